"""This machine: processes, ports, files and what it is made of. Every question that needs the operating system is asked here.

Source: /proc (proc(5)), psutil; `nvidia-smi --query-gpu` for GPUs. What can't be read is `None` with a reason, never 0.
"""

from __future__ import annotations

import contextlib
import os
import platform
import random
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from lib.errors import HostError


@dataclass(frozen=True)
class ProcessId:
    """A process that can't be confused with a later one of the same number: pid and start time (seconds since the epoch)."""

    pid: int
    start_time: float

    def alive(self) -> bool:
        """True while exactly this process runs; a zombie counts as gone."""
        try:
            process = psutil.Process(self.pid)
            return abs(process.create_time() - self.start_time) < 0.02 and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def process_id(pid: int) -> ProcessId | None:
    """The identity of a running process, or None if there is none of that number."""
    try:
        return ProcessId(pid, psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return None


def boot_id() -> str | None:
    """The kernel's boot id; None where /proc has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def command_line(pid: int, limit: int = 200) -> str:
    """The command line of a process, cut to `limit` characters; empty where it can't be read."""
    try:
        return " ".join(psutil.Process(pid).cmdline())[:limit]
    except psutil.Error:
        return ""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody holds now, with the one 10000 above it free too.

    SGLang derives its gRPC port as port + 10000 and refuses to start where that exceeds 65535 (0.5.15).
    """
    for _ in range(200):
        port = random.SystemRandom().randrange(20000, 32000)  # below the kernel's range of outgoing ports
        if _can_bind(port) and _can_bind(port + 10000):
            return port
    raise HostError("two free TCP ports, P and P + 10000, between 20000 and 42000", "none in 200 tries", "end what holds them")


def _can_bind(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def port_owner(port: int) -> ProcessId | None:
    """The process that listens on a TCP port of this machine; None if none does, or if it may not be read."""
    for connection in _listeners(port):
        if connection.pid:
            return process_id(connection.pid)
    return None


def port_is_held(port: int) -> bool:
    """True while any socket listens on the port, readable owner or not."""
    return any(True for _ in _listeners(port))


def _listeners(port: int) -> Iterator[Any]:
    for connection in psutil.net_connections(kind="tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
            yield connection


def is_local_url(url: str) -> bool:
    """True if the URL names this machine's loopback."""
    return (urlsplit(url).hostname or "") in ("127.0.0.1", "localhost", "::1")


def group_members(pgid: int) -> list[int]:
    """Pids of all live processes in a process group (zombies left out)."""
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == pgid and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def descendants(pid: int) -> list[ProcessId]:
    """The process and everything below it, by identity; empty if it is gone."""
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
    return [identity for process in family if (identity := process_id(process.pid))]


def gpus() -> tuple[list[dict[str, Any]], str | None]:
    """GPUs as nvidia-smi lists them, and the reason where there are none.

    Returns:
        Rows of {index, name, uuid, memory_total_mib, memory_used_mib, driver_version, compute_cap}, and None or a reason.
    """
    fields = ["index", "name", "uuid", "memory.total", "memory.used", "driver_version", "compute_cap"]
    if not shutil.which("nvidia-smi"):
        return [], "nvidia-smi is not on this machine"
    out = subprocess.run(
        ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    if out.returncode != 0:
        return [], f"nvidia-smi ended with {out.returncode}: {(out.stdout + out.stderr).strip()[:200]}"
    rows = []
    for line in out.stdout.splitlines():
        values = [value.strip() for value in line.split(",")]
        row: dict[str, Any] = dict(zip([f.replace(".", "_") for f in fields], values, strict=False))
        row["memory_total_mib"] = _number(row.pop("memory_total", None))
        row["memory_used_mib"] = _number(row.pop("memory_used", None))
        rows.append(row)
    return rows, None if rows else "nvidia-smi lists no GPU"


def gpu_processes() -> dict[int, int]:
    """MiB of GPU memory by pid, as nvidia-smi lists compute processes; empty where there is no GPU."""
    if not shutil.which("nvidia-smi"):
        return {}
    out = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    held: dict[int, int] = {}
    for line in out.stdout.splitlines() if out.returncode == 0 else []:
        pid, _, used = line.partition(",")
        if pid.strip().isdigit():
            held[int(pid)] = held.get(int(pid), 0) + int(_number(used) or 0)
    return held


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def describe() -> dict[str, Any]:
    """What this machine is: operating system, CPU, memory, GPUs (or why none), boot id."""
    rows, reason = gpus()
    cpu = next(
        (line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.processor()
    )
    flags = next((line.split(":", 1)[1].split() for line in _cpuinfo() if line.startswith("flags")), [])
    return {
        "hostname": socket.gethostname(),
        "os": platform.platform(),
        "cpu": cpu,
        "cpu_cores": os.cpu_count(),
        "cpu_features": [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16") if f in flags],
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [{k: v for k, v in row.items() if k != "memory_used_mib"} for row in rows],
        "gpus_reason": reason,
        "boot_id": boot_id(),
    }


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def write_atomic(path: Path, data: str | bytes) -> Path:
    """Writes a file under a temporary name in its folder, syncs, then renames: readers see the old or the new, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
    return path
