"""Describes the machine it runs on for `workbook bundle`: Python, platform, C library, GPUs, installed packages.

    python3 lib/deploy/describe_host.py [host.json]

Standard library only: the host may have nothing of this project. Run it with the Python that will run the server.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

SCHEMA = 1


def gpus() -> tuple[list[dict[str, str]], str | None]:
    """Name, compute capability, memory (MiB) and driver of every GPU as nvidia-smi says; or why there is none."""
    program = shutil.which("nvidia-smi")
    if not program:
        return [], "no nvidia-smi"
    query = "name,compute_cap,memory.total,driver_version"
    try:
        out = subprocess.run(
            [program, "--query-gpu=" + query, "--format=csv,noheader,nounits"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi: {error}"
    if out.returncode:
        return [], f"nvidia-smi: {out.stdout.strip()[:300]}"
    rows = [[word.strip() for word in line.split(",")] for line in out.stdout.splitlines() if line.strip()]
    return [
        {"name": r[0], "compute_capability": r[1], "memory_total_mib": r[2], "driver_version": r[3]}
        for r in rows
        if len(r) == 4
    ], None


def toolkit() -> str | None:
    """The version that nvcc states; None where there is none."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    try:
        out = subprocess.run([nvcc, "--version"], stdout=subprocess.PIPE, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = [line for line in out.stdout.splitlines() if "release" in line]
    return words[0].split("release")[1].split(",")[0].strip() if words else None


def packages() -> dict[str, str]:
    """Version of every installed distribution, by normalised name."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(name.lower().replace("_", "-").replace(".", "-"), distribution.version)
    return dict(sorted(found.items()))


def describe() -> dict[str, Any]:
    """All that decides what must be carried to this machine."""
    rows, why = gpus()
    return {
        "schema": SCHEMA,
        "python": platform.python_version(),
        "implementation": sys.implementation.name,
        "soabi": sysconfig.get_config_var("SOABI"),
        "executable": sys.executable,
        "machine": platform.machine(),
        "system": platform.system(),
        "libc": list(platform.libc_ver()),
        "cpu_cores": os.cpu_count(),
        "cuda_toolkit": toolkit(),
        "gpus": rows,
        "gpus_reason": why,
        "packages": packages(),
    }


def main(arguments: list[str]) -> int:
    """Writes the description to the named file, or prints it."""
    text = json.dumps(describe(), indent=1) + "\n"
    if arguments:
        Path(arguments[0]).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
