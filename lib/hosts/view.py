"""What runs on a host at one moment, as its guard saw it: processes, listening ports, GPU holders, the machine.

Pure: text and numbers in, records out. Command lines and environments lose their secrets here, where they come in.
Source: proc(5), cgroups(7), systemd's cgroup names (systemd.unit(5)); `nvidia-smi --query-gpu`, `--query-compute-apps`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lib.records import Record
from lib.server.redact import redact_object

#: Container engines by the way their cgroup scopes or folders are called; both cgroup drivers of each.
_CONTAINER = (
    ("docker", re.compile(r"(?:^|/)docker-([0-9a-f]{64})\.scope(?:/|$)")),
    ("docker", re.compile(r"(?:^|/)docker/([0-9a-f]{64})(?:/|$)")),
    ("podman", re.compile(r"(?:^|/)libpod-([0-9a-f]{64})(?:\.scope)?(?:/|$)")),
    ("containerd", re.compile(r"(?:^|/)cri-containerd-([0-9a-f]{64})\.scope(?:/|$)")),
    ("cri-o", re.compile(r"(?:^|/)crio-([0-9a-f]{64})\.scope(?:/|$)")),
    ("kubernetes", re.compile(r"(?:^|/)kubepods[^/]*/(?:[^/]+/)*(?:pod[^/]+)/([0-9a-f]{64})(?:/|$)")),
    ("nerdctl", re.compile(r"(?:^|/)nerdctl-([0-9a-f]{64})\.scope(?:/|$)")),
    ("lxc", re.compile(r"(?:^|/)(?:lxc\.payload\.|lxc/)([A-Za-z0-9_.-]+?)(?:/|$)")),
)  # fmt: skip


def cgroup_paths(text: str) -> list[str]:
    """Paths of /proc/PID/cgroup, the unified one first, then systemd's, then the others."""
    rows = [line.split(":", 2) for line in text.splitlines() if line.count(":") >= 2]
    order = {"": 0, "name=systemd": 1}
    return [path for _, _, path in sorted(rows, key=lambda row: order.get(row[1], 2)) if path != "/"]


def unit_of(cgroup: str | None) -> str | None:
    """The systemd unit that a process belongs to, from /proc/PID/cgroup: the innermost service or scope of a path.

    A slice alone is no unit of a process. A unit of a user's own manager is named, not `user@1000.service` around it.

    Example: `unit_of("0::/system.slice/sglang.service/sub")` is `"sglang.service"`.
    """
    for path in cgroup_paths(cgroup or ""):
        for part in reversed(path.split("/")):
            if re.search(r"\.(service|scope)$", part):
                return part
    return None


def container_of(cgroup: str | None) -> tuple[str, str] | None:
    """Engine and id of the container that a process runs in, from /proc/PID/cgroup; None if no engine is recognised there.

    Inside a container the path is relative to the container's own cgroup and shows no engine: ask on the host.

    Example: `container_of("0::/system.slice/docker-" + 64 * "a" + ".scope")` is `("docker", 64 * "a")`.
    """
    for path in cgroup_paths(cgroup or ""):
        for engine, pattern in _CONTAINER:
            if match := pattern.search(path):
                return engine, match[1]
    return None


class HostProcess(Record):
    """One process: `pid` and `ticks` (start in clock ticks since boot) together are its identity on one boot."""

    pid: int
    ticks: int
    parent: int
    state: str
    uid: int | None
    argv: list[str]
    name: str
    cgroup: str | None = None
    unit: str | None = None
    container: tuple[str, str] | None = None
    cpu_ticks: int | None = None

    @property
    def alive(self) -> bool:
        """False for a zombie."""
        return self.state not in ("Z", "X", "x")


class Listener(Record):
    """A listening TCP port; `pids` is empty where its owner may not be read or lives in another pid namespace."""

    port: int
    address: str
    pids: list[int]


class HostGpu(Record):
    """A GPU as nvidia-smi lists it; MiB by pid as the driver sees it, `devices` who has its device file open here."""

    index: int
    name: str
    uuid: str
    memory_total_mib: float | None
    memory_used_mib: float | None
    driver_version: str
    compute_cap: str
    users: dict[int, float | None] = {}
    holders: list[int] = []


class HostView(Record):
    """A host at one moment. `unreadable` processes could not be looked into: their ports and GPUs are not known."""

    hostname: str
    boot_id: str | None
    unix_s: float
    uptime_s: float
    ticks_per_s: int
    kernel: str
    machine: str
    os_release: str | None
    cpu: str | None
    cpu_cores: int | None
    cpu_features: list[str] = []
    memory_bytes: int | None
    memory_free_bytes: int | None = None
    load_average: float
    processes: list[HostProcess]
    listeners: list[Listener]
    gpus: list[HostGpu]
    gpus_reason: str | None
    unreadable: int

    @property
    def init_ticks(self) -> int | None:
        """Start of process 1: with `boot_id` it tells one boot from another, also in a container, which shares the kernel."""
        return next((p.ticks for p in self.processes if p.pid == 1), None)

    def process(self, pid: int, ticks: int | None = None) -> HostProcess | None:
        """The live process of that number (and start), None if it is gone or another one."""
        found = next((p for p in self.processes if p.pid == pid and p.alive), None)
        return found if found and (ticks is None or found.ticks == ticks) else None

    def in_unit(self, unit: str) -> list[HostProcess]:
        """Live processes in the control group of a unit."""
        return [p for p in self.processes if p.unit == unit and p.alive]

    def family(self, pid: int) -> list[HostProcess]:
        """A live process and everything alive below it."""
        found = [p for p in [self.process(pid)] if p]
        for parent in found:
            found += [p for p in self.processes if p.parent == parent.pid and p.alive and p not in found]
        return found

    def port_is_held(self, port: int) -> bool:
        """True while any socket listens on the port, readable owner or not."""
        return any(item.port == port for item in self.listeners)

    def port_owners(self, port: int) -> list[HostProcess]:
        """Processes that listen on a port; empty if nobody does or none may be read (see `port_is_held`)."""
        pids = {pid for item in self.listeners if item.port == port for pid in item.pids}
        return [p for p in self.processes if p.pid in pids]

    def gpu_holders(self) -> dict[int, list[str]]:
        """GPU uuids by pid, from the driver's list and from open device files."""
        held: dict[int, list[str]] = {}
        for gpu in self.gpus:
            for pid in sorted({*gpu.users, *gpu.holders}):
                held.setdefault(pid, []).append(gpu.uuid)
        return held

    def describe(self) -> dict[str, Any]:
        """What this machine is, in the form of `lib.hosts.local.describe`."""
        name = re.search(r'^PRETTY_NAME="?([^"\n]*)', self.os_release or "", re.M)
        return {
            "hostname": self.hostname,
            "os": f"{name[1] if name else 'Linux'}, {self.kernel} {self.machine}",
            "cpu": self.cpu,
            "cpu_cores": self.cpu_cores,
            "cpu_features": self.cpu_features,
            "memory_bytes": self.memory_bytes,
            "gpus": [
                {
                    "index": str(g.index), "name": g.name, "uuid": g.uuid, "driver_version": g.driver_version,
                    "compute_cap": g.compute_cap, "memory_total_mib": g.memory_total_mib,
                }
                for g in self.gpus
            ],
            "gpus_reason": self.gpus_reason,
            "boot_id": self.boot_id,
        }  # fmt: skip


def view_of(answer: Mapping[str, Any]) -> HostView:
    """The view that a guard's `look` answer means."""
    gpus, reason = _gpus(answer)
    memory = re.search(r"^MemTotal:\s+(\d+) kB", answer.get("meminfo") or "", re.M)
    free = re.search(r"^MemAvailable:\s+(\d+) kB", answer.get("meminfo") or "", re.M)
    cpu = re.search(r"^model name\s*:\s*(.+)$", answer.get("cpuinfo") or "", re.M)
    flags = re.search(r"^flags\s*:\s*(.+)$", answer.get("cpuinfo") or "", re.M)
    known = flags[1].split() if flags else []
    return HostView(
        hostname=answer["hostname"], boot_id=answer["boot_id"], unix_s=answer["unix_s"], uptime_s=answer["uptime_s"],
        ticks_per_s=answer["ticks_per_s"], kernel=answer["kernel"], machine=answer["machine"],
        os_release=answer.get("os_release"), cpu=cpu[1] if cpu else None, cpu_cores=answer.get("cpu_cores"),
        cpu_features=[f for f in ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16") if f in known],
        memory_bytes=int(memory[1]) * 1024 if memory else None,
        memory_free_bytes=int(free[1]) * 1024 if free else None, load_average=answer["load"],
        processes=[_process(row) for row in answer["processes"]],
        listeners=[
            Listener(port=row["port"], address=address_of(row["address"]), pids=row["pids"]) for row in answer["listeners"]
        ],
        gpus=gpus, gpus_reason=reason, unreadable=answer["unreadable"],
    )  # fmt: skip


def _process(row: Mapping[str, Any]) -> HostProcess:
    cgroup = row.get("cgroup")
    return HostProcess(
        pid=row["pid"], ticks=row["ticks"], parent=row["parent"], state=row["state"], uid=row["uid"],
        argv=redact_object([_plain(word) for word in row["argv"]]), name=_plain(row["name"]), cgroup=cgroup,
        unit=unit_of(cgroup), container=container_of(cgroup), cpu_ticks=row.get("cpu_ticks"),
    )  # fmt: skip


def _plain(text: str) -> str:
    """Text without lone surrogates, which no JSON file could carry."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def address_of(raw: str) -> str:
    """An address as /proc/net/tcp writes it (hexadecimal, each 32-bit word in this machine's byte order), as people do.

    Example: `address_of("0100007F")` is `"127.0.0.1"`.
    """
    words = [raw[at : at + 8] for at in range(0, len(raw), 8)]
    data = b"".join(bytes.fromhex(word)[::-1] for word in words)
    if len(data) == 4:
        return ".".join(str(byte) for byte in data)
    if data[:12] == bytes(10) + b"\xff\xff":
        return ".".join(str(byte) for byte in data[12:])
    if not any(data):
        return "::"
    if data == bytes(15) + b"\x01":
        return "::1"
    return ":".join(f"{data[at] << 8 | data[at + 1]:x}" for at in range(0, 16, 2))


def _gpus(answer: Mapping[str, Any]) -> tuple[list[HostGpu], str | None]:
    """GPUs with their users, and the reason where there are none or where users are not known."""
    listed = answer.get("gpus") or {"exit_code": None, "text": "not asked"}
    if listed["exit_code"] != 0:
        return [], f"nvidia-smi: {listed['text'].strip()[:200] or listed['exit_code']}"
    users: dict[str, dict[int, float | None]] = {}
    held = answer.get("gpu_users") or {"exit_code": None, "text": "not asked"}
    reason = None if held["exit_code"] == 0 else f"who uses the GPUs is not known: {held['text'].strip()[:200]}"
    for line in held["text"].splitlines() if held["exit_code"] == 0 else ():
        uuid, pid, used = ([part.strip() for part in line.split(",")] + ["", ""])[:3]
        if pid.isdigit():
            before = users.setdefault(uuid, {}).get(int(pid))
            now = _number(used)
            users[uuid][int(pid)] = now if before is None else before + (now or 0.0)
    gpus = []
    devices: Mapping[str, list[int]] = answer.get("gpu_devices") or {}
    for line in listed["text"].splitlines():
        words = [part.strip() for part in line.split(",")]
        if len(words) >= 7 and words[0].isdigit():
            gpus.append(
                HostGpu(
                    index=int(words[0]), name=words[1], uuid=words[2], memory_total_mib=_number(words[3]),
                    memory_used_mib=_number(words[4]), driver_version=words[5], compute_cap=words[6],
                    users=users.get(words[2], {}), holders=sorted(devices.get(f"/dev/nvidia{words[0]}", [])),
                )
            )  # fmt: skip
    return gpus, reason or (None if gpus else "nvidia-smi lists no GPU")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
