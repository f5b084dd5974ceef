"""One systemd service on a host, as systemd and the kernel see it at one moment; the commands that change it.

Everything goes through a `Host`: words, not shell lines. Source: systemctl(1), systemd.kill(5), systemd 247 to 257.
"""

from __future__ import annotations

import re
from typing import Any

from lib.errors import BadInput, HostError
from lib.hosts.base import Done, Host
from lib.records import Record

_NAME = re.compile(r"[A-Za-z0-9:_.\\@-]{1,240}")
#: What is asked of `systemctl show`.
PROPERTIES = (
    "Id", "LoadState", "ActiveState", "SubState", "UnitFileState", "FragmentPath", "DropInPaths", "MainPID", "ControlGroup",
    "InvocationID", "Result", "NRestarts", "ExecMainStatus", "ExecMainCode", "ExecMainStartTimestampMonotonic", "Job",
    "KillMode", "Restart", "TimeoutStopUSec", "TimeoutStartUSec", "NeedDaemonReload", "User",
)  # fmt: skip


def unit_name(service: str) -> str:
    """The unit file's name of a service, checked.

    Raises:
        BadInput: a name that systemd wouldn't take, or a path.

    Example: `unit_name("sglang")` is `"sglang.service"`.
    """
    name = service if service.endswith(".service") else f"{service}.service"
    if not service or not _NAME.fullmatch(name) or name.startswith(("-", ".")):
        raise BadInput("a service's name: letters, digits and :_.@-", repr(service), "correct `service`")
    return name


class ServiceState(Record):
    """What systemd says about a service. `properties` has all that was asked, as systemd writes it."""

    unit: str
    properties: dict[str, str]

    def get(self, name: str) -> str:
        """A property, "" where systemd gives none."""
        return self.properties.get(name, "")

    @property
    def known(self) -> bool:
        """True if systemd has a unit of that name (loaded, masked or broken)."""
        return self.get("LoadState") not in ("", "not-found")

    @property
    def active(self) -> bool:
        """True while systemd counts it as running, coming up or going down; also while it waits to restart it."""
        return self.get("ActiveState") in ("active", "activating", "deactivating", "reloading", "refreshing")

    @property
    def main_pid(self) -> int | None:
        """The main process, None if there is none."""
        text = self.get("MainPID")
        return int(text) if text.isdigit() and text != "0" else None

    @property
    def invocation(self) -> str | None:
        """The id of the current start; None where it never ran."""
        return self.get("InvocationID") or None

    def words(self) -> str:
        """State in one line, as `systemctl status` would say it."""
        if not self.known:
            return "no such unit"
        return f"{self.get('ActiveState')} ({self.get('SubState')}), result {self.get('Result') or 'none'}"


def service_state(host: Host, service: str, deadline_s: float = 20.0) -> ServiceState:
    """What systemd on a host says about a service.

    Raises:
        HostError: there is no systemd, or it doesn't answer.
    """
    unit = unit_name(service)
    done = host.run(["systemctl", "show", "--property", ",".join(PROPERTIES), "--", unit], deadline_s=deadline_s)
    done.check("systemd answers", "is this a host with systemd?")
    return ServiceState(unit=unit, properties=read_properties(done.text))


def read_properties(text: str) -> dict[str, str]:
    """`NAME=value` lines of `systemctl show` as a dictionary; a line without a name belongs to nothing."""
    rows = (line.partition("=") for line in text.splitlines())
    return {name: value for name, sep, value in rows if sep and re.fullmatch(r"[A-Za-z]+", name)}


def systemctl(host: Host, *words: str, deadline_s: float = 60.0) -> Done:
    """Runs `systemctl WORDS` as root on a host."""
    return host.run(["systemctl", *words], deadline_s=deadline_s, sudo=True)


#: Kills every process of a control group at once (cgroup v2), or one by one until none is left (v1): argv is the path.
_KILL_GROUP = """
import os, signal, sys, time
path, killed = sys.argv[1].strip("/"), 0
roots = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd"]
found = [os.path.join(r, path) for r in roots if path and os.path.exists(os.path.join(r, path, "cgroup.procs"))]
for folder in found:
    try:
        with open(os.path.join(folder, "cgroup.kill"), "w") as file:
            file.write("1")
        killed += 1
        continue
    except OSError:
        pass
    end = time.monotonic() + 5
    while time.monotonic() < end:
        pids = []
        for place, _, files in os.walk(folder):
            if "cgroup.procs" in files:
                with open(os.path.join(place, "cgroup.procs")) as file:
                    pids += [int(line) for line in file.read().split() if line != "0"]
        if not pids:
            break
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
                killed += 1
            except OSError:
                pass
        time.sleep(0.05)
print(len(found), killed)
"""


def kill_control_group(host: Host, cgroup: str, deadline_s: float = 20.0) -> bool:
    """SIGKILL to every process of a service's control group, as root; False if there is no such group.

    Raises:
        BadInput: not the control group of a service: never a slice, never the root.
    """
    if not re.search(r"/[^/]+\.service(?:/[^/]+)*$", cgroup) or ".." in cgroup.split("/"):
        raise BadInput("the control group of a service", repr(cgroup))
    done = host.run([host.python, "-c", _KILL_GROUP, cgroup], deadline_s=deadline_s, sudo=True)
    done.check("the control group is killed")
    return done.text.split()[:1] != ["0"]


def put_root_file(host: Host, data: bytes, path: str, mode: int, deadline_s: float = 60.0) -> Any:
    """Writes a file of root's, atomically.

    Raises:
        HostError: it could not be written.
    """
    return host.put(data, path, mode=mode, sudo=True, deadline_s=deadline_s)


def require_systemd(host: Host) -> None:
    """Raises HostError where systemd doesn't run the host."""
    done = host.run(["systemctl", "is-system-running"], deadline_s=20.0)
    if done.text.strip() in ("", "offline", "unknown"):
        raise HostError(f"systemd runs {host.name}", done.text.strip() or done.error_text.strip() or "no answer")
