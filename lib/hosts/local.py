"""This machine: processes, ports, files and what it is made of. Every question that needs the operating system is asked here.

Source: /proc (proc(5)), psutil; `nvidia-smi --query-gpu` for GPUs. What can't be read is `None` with a reason, never 0.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from lib.errors import BadInput, HostError
from lib.server.redact import redact_object, redact_text

#: Two readings of one process's start in seconds differ by rounding at most this much, unless the clock was set between.
_SAME_START_S = 0.02


@dataclass(frozen=True)
class ProcessId:
    """A process that can't be confused with a later one of the same number: its pid and when it started.

    `start_time` (seconds since the epoch) is for people and JSON; it moves when the clock is set. `ticks` is the start
    in the kernel's clock ticks since boot and never moves; where it is known it alone decides.
    """

    pid: int
    start_time: float
    ticks: int | None = None

    def alive(self) -> bool:
        """True while exactly this process runs; a zombie counts as gone."""
        now = _state_and_ticks(self.pid)
        if now is None or now[0] in "ZXx":
            return False
        if self.ticks is not None:
            return now[1] == self.ticks
        return (start := _start_time(self.pid)) is not None and abs(start - self.start_time) < _SAME_START_S

    def pinned(self) -> ProcessId:
        """The same process with its ticks, so that a later step of the clock doesn't matter; unchanged if it is gone."""
        if self.ticks is None and self.alive():
            now = process_id(self.pid)
            return now if now is not None and now.ticks is not None else self
        return self

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal to exactly this process; nothing if it is gone or somebody else's."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)


def process_id(pid: int) -> ProcessId | None:
    """The identity of a running process, or None if there is none of that number."""
    now, start = (_state_and_ticks(pid), _start_time(pid)) if pid > 0 else (None, None)
    return ProcessId(pid, start, now[1]) if now is not None and start is not None else None


def owner_token(owner: ProcessId) -> str:
    """A process as one word for an environment variable: `pid:start_time:ticks` (the last only where it is known)."""
    return f"{owner.pid}:{owner.start_time!r}" + (f":{owner.ticks}" if owner.ticks is not None else "")


def parse_owner(text: str) -> ProcessId:
    """The process that `owner_token` wrote, or `pid:start_time`.

    Raises:
        BadInput: it is neither.

    Example: `parse_owner("41:1700000000.25:9")` is `ProcessId(41, 1700000000.25, 9)`.
    """
    match = re.fullmatch(r"(\d+):(\d+(?:\.\d*)?)(?::(\d+))?", text, re.ASCII)
    if match is None:
        raise BadInput("a process as pid:start_time or pid:start_time:ticks", repr(text))
    return ProcessId(int(match[1]), float(match[2]), int(match[3]) if match[3] else None)


def _state_and_ticks(pid: int) -> tuple[str, int] | None:
    """State letter and start in clock ticks since boot (/proc/PID/stat, fields 3 and 22); None if there is no such process."""
    try:
        # the command's name stands in brackets and may hold spaces and brackets itself
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def _start_time(pid: int) -> float | None:
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def boot_id() -> str | None:
    """The kernel's boot id; None where /proc has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def command_line(pid: int, limit: int = 200) -> str:
    """The command line of a process without its secrets, cut to `limit` characters; empty where it can't be read."""
    try:
        # first hidden, then cut: a secret that was cut in two would no longer be recognised
        return redact_text(" ".join(redact_object(psutil.Process(pid).cmdline())))[:limit]
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
    wanted = {f"socket:[{inode}]" for inode in _listeners(port)}
    for pid in psutil.pids() if wanted else []:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(entry.readlink()) in wanted:
                        return process_id(pid)
    return None


def port_is_held(port: int) -> bool:
    """True while any socket listens on the port, readable owner or not."""
    return bool(_listeners(port))


def _listeners(port: int) -> list[str]:
    """Inodes of the sockets that listen on a port, from the kernel's table: a load test leaves thousands of other rows."""
    found = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), Path(f"/proc/net/{table}").open() as rows:
            for row in rows:
                fields = row.split(None, 10)
                if len(fields) > 9 and fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    found.append(fields[9])
    return found


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
    if pid <= 0:
        return []
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
    return [identity for process in family if (identity := process_id(process.pid))]


def processes_with(name: str, value: str) -> list[ProcessId]:
    """Live processes that started with the environment variable `name=value`, as far as they may be read.

    A program that rewrites its title may have overwritten it: what is found belongs, what is not found may still.
    """
    wanted = f"{name}={value}".encode()
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                found.append(process_id(process.pid))
    return [identity for identity in found if identity is not None and identity.alive()]


def gpus() -> tuple[list[dict[str, Any]], str | None]:
    """GPUs as nvidia-smi lists them, and the reason where there are none.

    Returns:
        Rows of {index, name, uuid, memory_total_mib, memory_used_mib, driver_version, compute_cap}, and None or a reason.
    """
    fields = ["index", "name", "uuid", "memory.total", "memory.used", "driver_version", "compute_cap"]
    lines, reason = _nvidia_smi(f"--query-gpu={','.join(fields)}")
    rows = []
    for line in lines:
        values = [value.strip() for value in line.split(",")]
        row: dict[str, Any] = dict(zip([f.replace(".", "_") for f in fields], values, strict=False))
        row["memory_total_mib"] = _number(row.pop("memory_total", None))
        row["memory_used_mib"] = _number(row.pop("memory_used", None))
        rows.append(row)
    return rows, reason or (None if rows else "nvidia-smi lists no GPU")


def gpu_users() -> tuple[dict[str, dict[int, int]], str | None]:
    """MiB of GPU memory by GPU uuid and pid, as nvidia-smi lists compute processes, and the reason where it can't say.

    In a container the pids may be the host's; a process of another container may not be listed at all.
    """
    lines, reason = _nvidia_smi("--query-compute-apps=gpu_uuid,pid,used_memory")
    users: dict[str, dict[int, int]] = {}
    for line in lines:
        uuid, pid, used = ([part.strip() for part in line.split(",")] + ["", ""])[:3]
        if pid.isdigit():
            held = users.setdefault(uuid, {})
            held[int(pid)] = held.get(int(pid), 0) + int(_number(used) or 0)
    return users, reason


def gpu_processes() -> dict[int, int]:
    """MiB of GPU memory by pid over all GPUs; empty where there is no GPU."""
    held: dict[int, int] = {}
    for users in gpu_users()[0].values():
        for pid, mib in users.items():
            held[pid] = held.get(pid, 0) + mib
    return held


def _nvidia_smi(query: str) -> tuple[list[str], str | None]:
    if not shutil.which("nvidia-smi"):
        return [], "nvidia-smi is not on this machine"
    try:
        out = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi did not answer: {error}"
    if out.returncode != 0:
        return [], f"nvidia-smi ended with {out.returncode}: {(out.stdout + out.stderr).strip()[:200]}"
    return [line for line in out.stdout.splitlines() if line.strip()], None


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def describe() -> dict[str, Any]:
    """What this machine is: operating system, CPU, memory, GPUs (or why none), boot id."""
    rows, reason = gpus()
    flags = next((line.split(":", 1)[1].split() for line in _cpuinfo() if line.startswith("flags")), [])
    return {
        "hostname": socket.gethostname(),
        "os": platform.platform(),
        "cpu": _cpu(),
        "cpu_cores": os.cpu_count(),
        "cpu_features": [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16") if f in flags],
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [{k: v for k, v in row.items() if k != "memory_used_mib"} for row in rows],
        "gpus_reason": reason,
        "boot_id": boot_id(),
    }


@functools.cache
def machine() -> dict[str, Any]:
    """What stays the same of this machine over a restart: host name, CPU, GPUs by uuid. Asked once per process."""
    return {
        "hostname": socket.gethostname(),
        "cpu": _cpu(),
        "cpu_cores": os.cpu_count(),
        "gpus": [row.get("uuid") for row in gpus()[0]],
    }


def _cpu() -> str:
    named = (line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name"))
    return next(named, platform.processor())


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
