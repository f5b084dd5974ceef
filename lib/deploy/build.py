"""What a server's environment is made of: every distribution with version and hash, and what was changed by hand.

The interpreter that runs the server is asked by a small script that uses the standard library only: nothing of SGLang or
torch is imported, so the inventory takes a second and works where the stack itself is broken.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lib.errors import BadInput
from lib.hosts import local

#: Distributions whose files are compared with their RECORD: a local patch shows as a changed file.
CHECKED = ("sglang", "sgl-kernel", "sglang-kernel", "flashinfer-python", "torch", "transformers")

_SCRIPT = r"""
import base64, hashlib, importlib.metadata as m, json, os, platform, sys
checked = set(json.loads(sys.argv[1]))
rows, seen = [], set()
for d in m.distributions():
    name = d.metadata["Name"]
    if not name or name.lower() in seen:
        continue
    seen.add(name.lower())
    record = d.read_text("RECORD") or ""
    row = {"name": name, "version": d.version, "record_sha256": hashlib.sha256(record.encode()).hexdigest() if record else None,
           "direct_url": d.read_text("direct_url.json")}
    if name.lower().replace("_", "-") in checked and record:
        changed, missing, same = [], [], 0
        for f in d.files or []:
            if f.hash is None or not str(f).endswith((".py", ".json", ".txt", ".so", ".cu", ".cuh", ".h")):
                continue
            p = f.locate()
            try:
                size = os.path.getsize(p)
                if size > 50_000_000:
                    continue
                h = hashlib.new(f.hash.mode, open(p, "rb").read()).digest()
                if base64.urlsafe_b64encode(h).rstrip(b"=").decode() != f.hash.value:
                    changed.append(str(f))
                else:
                    same += 1
            except OSError:
                missing.append(str(f))
        row["files"] = {"same": same, "changed": changed[:50], "missing": missing[:50], "n_changed": len(changed), "n_missing": len(missing)}
    rows.append(row)
torch = {}
try:
    d = m.distribution("torch")
    text = open(d.locate_file("torch/version.py")).read()
    scope = {}
    exec(compile(text, "torch/version.py", "exec"), scope)
    torch = {k: scope.get(k) for k in ("__version__", "cuda", "hip", "git_version")}
    torch["__version__"] = str(torch["__version__"])
except Exception as e:
    torch = {"error": f"{type(e).__name__}: {e}"}
print(json.dumps({"python": platform.python_version(), "executable": sys.executable, "distributions": rows, "torch": torch}))
"""


def take_inventory(folder: Path, python: str) -> None:
    """Writes inventory.json: distributions, torch and CUDA, this machine.

    Args:
        folder: where it goes.
        python: the interpreter that runs the server.

    Raises:
        BadInput: that interpreter doesn't run, or says nothing.
    """
    out = subprocess.run(
        [python, "-c", _SCRIPT, json.dumps(CHECKED)], capture_output=True, text=True, timeout=300, check=False
    )
    if out.returncode:
        raise BadInput(
            f"{python} lists its packages",
            (out.stderr.strip().splitlines() or ["no output"])[-1],
            "name the Python of your SGLang environment in server.python",
        )
    inventory = json.loads(out.stdout)
    inventory["host"] = local.describe()
    local.write_atomic(folder / "inventory.json", json.dumps(inventory, indent=1))


def manifest_sha256(inventory: Mapping[str, Any]) -> str:
    """One hash for a whole environment: names, versions and RECORD hashes, order not counted."""
    rows = sorted((d["name"].lower(), d["version"], d["record_sha256"] or "") for d in inventory["distributions"])
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def stack_rows(inventory: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows that matter first: what the server is, torch, CUDA or the reason why none, the machine."""
    versions = {d["name"].lower().replace("_", "-"): d for d in inventory["distributions"]}
    torch, host = inventory["torch"], inventory["host"]
    rows = [{"what": "Python", "value": inventory["python"], "detail": ""}]
    for name in ("sglang", "sgl-kernel", "sglang-kernel", "flashinfer-python", "transformers", "triton"):
        found = versions.get(name)
        rows.append({"what": name, "value": found["version"] if found else "not installed", "detail": _origin(found)})
    cuda = torch.get("cuda") or torch.get("hip")
    rows.append({"what": "torch", "value": torch.get("__version__", torch.get("error", "not installed")), "detail": f"git {str(torch.get('git_version'))[:12]}"})
    rows.append({"what": "CUDA / HIP", "value": cuda or "none", "detail": "" if cuda else "this torch is built for the CPU alone"})
    gpus = ", ".join(f"{g['name']} ({g['memory_total_mib']:.0f} MiB)" for g in host["gpus"])
    rows.append({"what": "GPUs", "value": len(host["gpus"]), "detail": gpus or host["gpus_reason"]})
    driver = {g["driver_version"] for g in host["gpus"]}
    rows.append({"what": "driver", "value": ", ".join(sorted(driver)) or "none", "detail": "" if driver else host["gpus_reason"]})
    rows.append({"what": "CPU", "value": host["cpu"], "detail": f"{host['cpu_cores']} cores; {', '.join(host['cpu_features'])}"})
    return rows


def _origin(found: Mapping[str, Any] | None) -> str:
    if not found or not found.get("direct_url"):
        return ""
    url = json.loads(found["direct_url"])
    commit = (url.get("vcs_info") or {}).get("commit_id")
    return f"commit {commit}" if commit else "installed from a local folder or file"


def changed_files(inventory: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Checked distributions with the number of files that equal their RECORD, differ from it, or are missing."""
    return [
        {"name": d["name"], "version": d["version"], "same": d["files"]["same"], "changed": d["files"]["n_changed"],
         "missing": d["files"]["n_missing"], "which": ", ".join((d["files"]["changed"] + d["files"]["missing"])[:5])}
        for d in inventory["distributions"] if d.get("files")
    ]
