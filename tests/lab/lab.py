"""The project's own hosts: systemd containers with journald and sshd, below a hypervisor with sshd and a `pct`, on one machine.

    python -m tests.lab.lab up FOLDER [--guests 2]     about 3 s; needs root, packages: lxc openssh-server sudo iproute2
    python -m tests.lab.lab down FOLDER                nothing is left behind

Each container's root is an overlay of this machine's own `/` with a layer in memory, so there is nothing to download; each has
a network of its own on a bridge (the hypervisor is .1, container N is .N). `FOLDER/ssh_config` knows them all:
`hypervisor`, `guest-101` (root), `ops-101` (an ordinary user with `sudo -n`), `plain-101` (without), `jump-101` (through the
hypervisor), `far-101` (through the
hypervisor, then through another container), `stranger-101` (known_hosts holds another key) and `unknown-101` (known_hosts holds none).

Differences from real machines that a test must know: all share one kernel (boot id, clock, loop devices, load average);
limits of memory and tasks are not enforced.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lib.hosts.base import Host
from lib.hosts.lxc import LXCHost
from lib.hosts.ssh import SSHHost
from lib.model.cache import cache_dir

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
#: Lab number N has the bridge wblabN and the addresses 10.213.N.*, so that several can be up at once.
NUMBERS = range(1, 250)
NEEDED = {
    "lxc-start": "lxc", "lxc-attach": "lxc", "sshd": "openssh-server", "ssh": "openssh-client", "sudo": "sudo",
    "ip": "iproute2", "dbus-daemon": "dbus", "unshare": "util-linux", "ssh-keygen": "openssh-client",
}  # fmt: skip
SBIN = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def missing() -> str | None:
    """Why no lab can be built here, or None."""
    if sys.platform != "linux":
        return "the lab needs Linux"
    if os.geteuid() != 0:
        return "the lab needs root (containers with systemd)"
    absent = sorted({package for tool, package in NEEDED.items() if shutil.which(tool, path=SBIN) is None})
    if not Path("/lib/systemd/systemd").exists():
        absent.append("systemd")
    if absent:
        return f"the lab needs packages that are not installed: apt-get install {' '.join(absent)}"
    if "overlay" not in Path("/proc/filesystems").read_text():
        return "the lab needs overlay file systems"
    return None if cgroup2() else "the lab needs a cgroup2 file system"


def cgroup2() -> Path | None:
    """Where cgroup2 is mounted."""
    for line in Path("/proc/mounts").read_text().splitlines():
        words = line.split()
        if words[2] == "cgroup2":
            return Path(words[1])
    return None


def _tool(*argv: str, check: bool = True, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    out = subprocess.run(argv, capture_output=True, text=True, timeout=timeout, env={**os.environ, "PATH": SBIN})
    if check and out.returncode:
        raise RuntimeError(f"{' '.join(argv)} ended with {out.returncode}: {out.stderr.strip()[-400:]}")
    return out


@dataclass
class Lab:
    """A lab that is up."""

    folder: Path
    guests: tuple[int, ...]
    number: int

    @property
    def bridge(self) -> str:
        return f"wblab{self.number}"

    @property
    def subnet(self) -> str:
        return f"10.213.{self.number}"

    @property
    def config(self) -> str:
        return str(self.folder / "ssh_config")

    def address(self, guest: int) -> str:
        return f"{self.subnet}.{guest}"

    def ssh(self, name: str) -> SSHHost:
        """A new connection to a name of ssh_config."""
        return SSHHost(name, config=self.config, name=name)

    def pct(self, guest: int, hypervisor: Host) -> LXCHost:
        """A container through its hypervisor."""
        return LXCHost(hypervisor, guest, name=f"pct-{guest}")

    def veth(self, guest: int) -> str:
        """The hypervisor's end of a container's network cable."""
        return f"{self.bridge}v{guest}"


def _bridge() -> int:
    """Takes the first number whose bridge nobody has."""
    said = ""
    for number in NUMBERS:
        made = _tool("ip", "link", "add", f"wblab{number}", "type", "bridge", check=False)
        if made.returncode == 0:
            return number
        said = made.stderr.strip()
        if "exists" not in said:
            break
    raise RuntimeError(f"no bridge for the lab: {said}")


def up(folder: Path, count: int = 2, owner: int | None = None) -> Lab:
    """Builds the lab and waits until every sshd answers; when the process `owner` is gone it is taken down."""
    guests = tuple(range(101, 101 + count))
    group = cgroup2()
    if group is None:
        raise RuntimeError("no cgroup2")
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    lab = Lab(folder, guests, _bridge())
    (folder / "bridge").write_text(lab.bridge)
    if owner:
        subprocess.Popen(
            [sys.executable, "-m", "tests.lab.lab", "watch", str(folder), "--owner", str(owner)], cwd=ROOT,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    _keys(lab)
    _config(lab)
    (folder / "bin").mkdir(exist_ok=True)
    pct = folder / "bin" / "pct"
    pct.write_text(
        f'#!/bin/bash\nexport WB_LXC={folder}/lxc PATH=/usr/sbin:/usr/bin:/sbin:/bin\nexec bash {folder}/bin/pct.real "$@"\n'
    )
    shutil.copy(HERE / "pct", folder / "bin" / "pct.real")
    pct.chmod(0o755)
    (folder / "binds").write_text("".join(f"{path}\n" for path in _binds()))
    _tool("ip", "address", "add", f"{lab.subnet}.1/24", "dev", lab.bridge)
    _tool("ip", "link", "set", lab.bridge, "up")
    leaf = group / lab.bridge
    leaf.mkdir()
    (folder / "cgroup").write_text(str(leaf))
    words = [str(HERE / "hypervisor.sh"), str(folder), lab.bridge, lab.subnet, str(folder / "binds"), *map(str, guests)]
    with (folder / "log").open("wb") as log:
        hypervisor = subprocess.Popen(
            ["bash", "-c", f'echo $$ > "{leaf}/cgroup.procs"; exec unshare --mount --cgroup --propagation private bash "$@"',
             "_", *words],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env={**os.environ, "PATH": SBIN},
        )  # fmt: skip
    (folder / "pid").write_text(str(hypervisor.pid))
    _wait(lab, hypervisor)
    return lab


def _binds() -> list[Path]:
    """What a container would not see of this machine: folders on other file systems than `/`, and what lies below /tmp."""
    wanted = [
        ROOT,
        cache_dir(),
        Path(sys.prefix).resolve(),
        Path(sys.base_prefix).resolve(),
        (ROOT / ".venv-sglang").resolve(),
    ]
    root = Path("/").stat().st_dev
    found = [
        p for p in wanted
        if p.is_dir() and (p.stat().st_dev != root or p.is_relative_to("/tmp") or p.is_relative_to("/var/tmp"))
    ]  # fmt: skip
    return sorted({p for p in found if not any(p != q and p.is_relative_to(q) for q in found)})


def _keys(lab: Lab) -> None:
    for name in ("id", "hostkey-1", "another", *(f"hostkey-{guest}" for guest in lab.guests)):
        if not (lab.folder / name).exists():
            _tool("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(lab.folder / name))

    def public(name: str) -> str:
        return " ".join((lab.folder / f"{name}.pub").read_text().split()[:2])

    known = [
        f"{lab.subnet}.1 {public('hostkey-1')}",
        *(f"{lab.address(g)} {public(f'hostkey-{g}')}" for g in lab.guests),
    ]
    (lab.folder / "known_hosts").write_text("\n".join(known) + "\n")
    strange = [f"{lab.address(g)} {public('another')}" for g in lab.guests]
    (lab.folder / "strange_hosts").write_text("\n".join(strange) + "\n")
    (lab.folder / "no_hosts").write_text("")


def _config(lab: Lab) -> None:
    def host(name: str, address: str, user: str = "root", known: str = "known_hosts", jump: str | None = None) -> str:
        via = f"\n    ProxyJump {jump}" if jump else ""
        return (
            f"Host {name}\n    HostName {address}\n    User {user}{via}\n    UserKnownHostsFile {lab.folder / known}\n"
            f"    GlobalKnownHostsFile /dev/null\n    IdentityFile {lab.folder / 'id'}\n    IdentitiesOnly yes\n"
        )

    parts = [host("hypervisor", f"{lab.subnet}.1")]
    for guest in lab.guests:
        address = lab.address(guest)
        parts += [
            host(f"guest-{guest}", address), host(f"ops-{guest}", address, "ops"), host(f"plain-{guest}", address, "plain"),
            host(f"jump-{guest}", address, jump="hypervisor"), host(f"stranger-{guest}", address, known="strange_hosts"),
            host(f"unknown-{guest}", address, known="no_hosts"),
        ]  # fmt: skip
        parts += [host(f"far-{guest}", address, jump=f"jump-{other}") for other in lab.guests if other != guest][:1]
    (lab.folder / "ssh_config").write_text("\n".join(parts))
    settings = [
        f"ListenAddress {lab.subnet}.1", f"HostKey {lab.folder / 'hostkey-1'}", f"PidFile {lab.folder / 'sshd.pid'}",
        f"AuthorizedKeysFile {lab.folder / 'id.pub'}", "PermitRootLogin prohibit-password", "PasswordAuthentication no",
        "UsePAM no", "StrictModes no", "UseDNS no", "MaxSessions 64", "MaxStartups 100", "Subsystem sftp internal-sftp",
        f"SetEnv PATH={lab.folder / 'bin'}:/usr/sbin:/usr/bin:/sbin:/bin",
    ]  # fmt: skip
    (lab.folder / "sshd_config").write_text("\n".join(settings) + "\n")


def _wait(lab: Lab, hypervisor: subprocess.Popen[bytes], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    for address in (f"{lab.subnet}.1", *(lab.address(g) for g in lab.guests)):
        while "ssh-ed25519" not in _tool("ssh-keyscan", "-T", "1", "-t", "ed25519", address, check=False).stdout:
            if hypervisor.poll() is not None or time.monotonic() > deadline:
                logs = [lab.folder / "log", *lab.folder.glob("lxc/*/log")]
                said = "; ".join(f"{f.name}: {f.read_text(errors='replace')[-600:]}" for f in logs if f.exists())
                down(lab.folder)
                raise RuntimeError(f"no sshd on {address}; {said}")
            time.sleep(0.1)


def down(folder: Path) -> None:
    """Takes the lab down, in whatever state it is."""
    pid = int((folder / "pid").read_text()) if (folder / "pid").exists() else 0
    if pid and Path(f"/proc/{pid}/ns/mnt").exists():
        for place in (folder / "lxc").glob("[0-9]*"):
            _tool(
                "nsenter",
                "-t",
                str(pid),
                "-m",
                "--",
                "lxc-stop",
                "-P",
                str(folder / "lxc"),
                "-n",
                place.name,
                "-k",
                check=False,
            )
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGTERM)
        for _ in range(50):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            if not Path(f"/proc/{pid}").exists():
                break
            time.sleep(0.1)
        else:
            os.killpg(pid, signal.SIGKILL)
    if (folder / "cgroup").exists():
        _empty(Path((folder / "cgroup").read_text()))
    if (folder / "bridge").exists():
        _tool("ip", "link", "del", (folder / "bridge").read_text(), check=False)
    shutil.rmtree(folder, ignore_errors=True)


def _empty(leaf: Path) -> None:
    """Ends whatever is still in the lab's control group, and removes it."""
    for _ in range(50):
        folders = sorted((p for p in leaf.rglob("*") if p.is_dir()), key=lambda p: -len(p.parts))
        for place in [*folders, leaf]:
            for word in _procs(place):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(word), signal.SIGKILL)
            with contextlib.suppress(OSError):
                place.rmdir()
        if not leaf.exists():
            return
        time.sleep(0.1)


def _procs(place: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return (place / "cgroup.procs").read_text().split()
    return []


@contextlib.contextmanager
def running(folder: Path, count: int = 2) -> Iterator[Lab]:
    """A lab while the context lasts."""
    try:
        yield up(folder, count, os.getpid())
    finally:
        down(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="the project's own hosts")
    parser.add_argument("what", choices=["up", "down", "watch"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--guests", type=int, default=2)
    parser.add_argument("--owner", type=int, default=0)
    arguments = parser.parse_args()
    if reason := missing():
        sys.exit(reason)
    if arguments.what == "up":
        began = time.monotonic()
        made = up(arguments.folder.resolve(), arguments.guests)
        print(f"up in {time.monotonic() - began:.1f} s; ssh -F {made.config} guest-{made.guests[0]}")
    elif arguments.what == "down":
        down(arguments.folder.resolve())
    else:
        while arguments.folder.exists() and Path(f"/proc/{arguments.owner}").exists():
            time.sleep(1.0)
        if arguments.folder.exists():
            down(arguments.folder.resolve())
