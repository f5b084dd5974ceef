"""What goes wrong on real hosts, done to the lab's for the time of a `with`."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from lib.errors import HostUnreachable
from lib.hosts.base import Host
from tests.lab.lab import Lab, _tool

STAND_IN = Path(__file__).with_name("stand_in.py")


@contextlib.contextmanager
def network_cut(lab: Lab, guest: int) -> Iterator[None]:
    """Packets to and from a container vanish without a word, as with a pulled cable on the way."""
    _tool("ip", "link", "set", lab.veth(guest), "down")
    try:
        yield
    finally:
        _tool("ip", "link", "set", lab.veth(guest), "up")


@contextlib.contextmanager
def dead_sshd(pct: Host) -> Iterator[None]:
    """The container's sshd and all its connections are gone; its hypervisor still reaches it."""
    pct.run(["systemctl", "stop", "ssh.service"]).check("sshd stops")
    pct.run(["pkill", "-KILL", "-x", "sshd"])
    try:
        yield
    finally:
        pct.run(["systemctl", "start", "ssh.service"]).check("sshd starts")


@contextlib.contextmanager
def full_disk(host: Host, folder: str = "/mnt/full") -> Iterator[str]:
    """A folder on a host without a free byte."""
    host.run(["mkdir", "-p", folder]).check("a folder")
    host.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder]).check("a small file system")
    try:
        host.run(["sh", "-c", f"head -c 1000000 /dev/zero > {shlex.quote(folder)}/filler"])
        yield folder
    finally:
        host.run(["umount", "-l", folder])


@contextlib.contextmanager
def frozen_disk(host: Host, folder: str = "/mnt/frozen") -> Iterator[str]:
    """A file system whose writers sleep uninterruptibly until the end of the `with` (fsfreeze on a loop ext4)."""
    script = (
        f"set -e; mkdir -p {folder}; truncate -s 16M {folder}.img; mkfs.ext4 -q -F {folder}.img; "
        "[ -e /dev/loop-control ] || mknod /dev/loop-control c 10 237; "
        f"for i in $(seq 0 63); do [ -e /dev/loop$i ] || mknod /dev/loop$i b 7 $i; done; "
        f"mount -o loop {folder}.img {folder}; fsfreeze -f {folder}"
    )
    undo = f"fsfreeze -u {folder}; sleep 0.2; umount -l {folder}; rm -rf {folder} {folder}.img"
    host.run(["bash", "-c", script]).check("a frozen file system")
    try:
        yield folder
    finally:
        host.run(["bash", "-c", undo])


def restart(host: Host, lab: Lab, guest: int) -> None:
    """Reboots the container from within, and waits until its sshd is back."""
    before = host.run(["stat", "-c", "%Y", "/proc/1"]).text
    with contextlib.suppress(HostUnreachable):  # it may be gone before it has answered
        host.run(["systemctl", "reboot", "--no-block"])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(Exception), lab.ssh(f"guest-{guest}") as fresh:
            now = fresh.run(["stat", "-c", "%Y", "/proc/1"], deadline_s=5).text
            if now != before and fresh.run(["systemctl", "is-system-running"], deadline_s=5).text.strip() == "running":
                return
        time.sleep(0.2)
    raise TimeoutError(f"container {guest} did not come back")


def alive(host: Host, marker: str) -> list[str]:
    """Command lines on a host that hold a marker."""
    return [" ".join(p.argv) for p in host.view().processes if p.alive and any(marker in word for word in p.argv)]


def gone(host: Host, marker: str, seconds: float) -> float | None:
    """Seconds until no command line on the host holds the marker any more; None if that is longer than `seconds`."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        if not alive(host, marker):
            return time.monotonic() - began
        time.sleep(0.2)
    return None


def sweep(host: Host, service: str, state_folder: str) -> None:
    """Ends a service of a test and removes every trace of it, in one command."""
    unit = f"/etc/systemd/system/{service}.service"
    host.run(["sh", "-c", (
        f"systemctl kill --signal=SIGKILL {service}; systemctl disable --now {service}; rm -rf {unit}* "
        f"{state_folder}/{service} /etc/{service}.*; systemctl daemon-reload; systemctl reset-failed {service}"
    )], sudo=True)  # fmt: skip


def install_stand_in(host: Host, home: str) -> None:
    """The stand-in as the module `sglang.launch_server` below a folder that everybody may read."""
    put_stand_in(host, f"{home}/sglang/launch_server.py")
    host.put(b"", f"{home}/sglang/__init__.py")
    host.run(["chmod", "-R", "a+rX", home])


def put_stand_in(host: Host, path: str = "/usr/local/bin/sglang-stand-in") -> str:
    """Copies the stand-in server to a host; run it with the host's python3."""
    host.put(STAND_IN, path, mode=0o755, parents=True, sudo=True)
    return path


def local_processes(marker: str) -> list[str]:
    """Command lines on this machine that hold a marker."""
    out = subprocess.run(["pgrep", "-af", "--", marker], capture_output=True, text=True)
    return [line for line in out.stdout.splitlines() if "pgrep" not in line]
