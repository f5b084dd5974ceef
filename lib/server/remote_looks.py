"""What a sweep looks at on another host: who holds its GPUs and ports, compiled kernels there, whether a server is at work.

Everything here is what `lib.server.holders` and `lib.server.watching` do on this machine; a process there is named by pid,
start and ticks as here, so that `may_stop` takes the same words.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lib.errors import NotStopped
from lib.hosts.local import ProcessId, owner_token
from lib.hosts.signals import signal_processes
from lib.hosts.view import HostProcess, HostView
from lib.server.holders import IDLE_MIB, KILL_S, ORPHANS_S, TERM_S, Holder
from lib.server.outcomes import COMPILERS
from lib.server.remote import Place, started_at

UNSEEN = "a process that is not visible from there (another container, another user)"
#: Counts files below folders: argv are folders, `~/` is the home there; `NAME=FOLDER` means the variable's folder where it is set.
_COUNT = """
import os, sys
count = 0
for word in sys.argv[1:]:
    name, found, folder = word.partition("=")
    folder = os.environ.get(name) or folder if found else word
    for _, _, files in os.walk(os.path.expanduser(folder)):
        count += len(files)
print(count)
"""


def holders_there(
    place: Place, gpus: Sequence[int] | None, port: int | None, on_cpu: bool
) -> tuple[list[Holder], list[dict[str, Any]], str | None]:
    """As `lib.server.holders.look`, on another host: holders now, the GPUs that may be used, why there are none."""
    view = place.view()
    found: list[Holder] = []
    rows = [] if on_cpu else [g for g in view.gpus if gpus is None or g.index in gpus]
    for gpu in rows:
        name = f"GPU {gpu.index} ({gpu.uuid})"
        found += [Holder(what=name, mib=mib, **_who(view, pid)) for pid, mib in sorted(gpu.users.items())]
        if not gpu.users and (gpu.memory_used_mib or 0.0) > IDLE_MIB:
            # whoever has its device file open may be the driver's own daemon, so alone that is no holder
            who = _who(view, gpu.holders[0]) if gpu.holders else {"by": UNSEEN, "identity": None}
            found.append(Holder(what=name, mib=gpu.memory_used_mib, **who))
    if port is not None and view.port_is_held(port):
        owners = view.port_owners(port)
        who = _who(view, owners[0].pid) if owners else {"by": "a process that may not be read", "identity": None}
        found.append(Holder(what=f"port {port} of {place.host.name}", **who))
    if on_cpu:
        return found, [], "this profile's servers run on the CPU"
    if view.gpus and view.gpus_reason:
        found.append(Holder(what="GPUs", by=f"unknown, because {view.gpus_reason}", identity=None))
    described = {g["uuid"]: g for g in view.describe()["gpus"]}
    return found, [{**described[g.uuid], "memory_used_mib": g.memory_used_mib} for g in rows], view.gpus_reason


def _who(view: HostView, pid: int) -> dict[str, Any]:
    process = view.process(pid)
    if process is None:
        return {"by": f"pid {pid}, not visible from there (another container?)", "identity": None}
    identity = ProcessId(pid, started_at(view, process), process.ticks)
    words = " ".join(process.argv) or process.name
    return {"by": f"pid {pid}: {words[:200]}", "identity": owner_token(identity)}


def end_there(place: Place, process: ProcessId, say: Callable[[str], None]) -> str:
    """Ends one process there and everything below it, only by identity: SIGTERM, deadline, SIGKILL.

    Raises:
        NotStopped: some are left after SIGKILL.
    """
    view = place.view()
    root = _found(view, process)
    if root is None:
        return f"pid {process.pid} was gone"
    family = {p.pid: p.ticks for p in view.family(root.pid)}
    say(f"ending pid {root.pid} of {place.host.name} as may_stop allows")
    how = "SIGTERM"
    for number, whom, seconds in (
        (signal.SIGTERM, {root.pid: root.ticks}, TERM_S),
        (signal.SIGTERM, family, ORPHANS_S),
        (signal.SIGKILL, family, KILL_S),
    ):
        left = _left(place, whom)
        if not left:
            continue
        if number == signal.SIGKILL:
            how = f"SIGKILL for {len(left)} of {len(family)}"
        signal_processes(place.host, number, left, sudo=place.is_root_by_sudo())
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and _left(place, whom, root.pid, family):
            time.sleep(0.3)
    if left := _left(place, family):
        raise NotStopped(
            f"pid {root.pid} of {place.host.name} and what it started are gone", f"left: {sorted(left)}",
            "look at these processes",
        )  # fmt: skip
    return f"pid {root.pid} and {len(family) - 1} below it ended by {how}"


def _found(view: HostView, process: ProcessId) -> HostProcess | None:
    """The process that is meant, by ticks where they are given, else by its start."""
    found = view.process(process.pid, process.ticks)
    if found is None or process.ticks is not None or abs(started_at(view, found) - process.start_time) < 0.1:
        return found
    return None


def _left(
    place: Place, whom: Mapping[int, int], root: int | None = None, family: dict[int, int] | None = None
) -> dict[int, int]:
    """Who of these is alive; what a root has started meanwhile joins its family."""
    view = place.view()
    if root is not None and family is not None and view.process(root, family.get(root)):
        family.update({p.pid: p.ticks for p in view.family(root)})
    return {pid: ticks for pid, ticks in whom.items() if view.process(pid, ticks)}


def kernel_files_there(place: Place, folders: Sequence[str]) -> int:
    """Files below folders there; see `_COUNT` for how they are named."""
    words = [place.host.python, "-IS", "-c", _COUNT, *folders]
    return int(place.host.run(words, deadline_s=120.0).check("compiled kernels are counted").text)


def at_work_there(place: Place, pid: int) -> tuple[float, set[str]]:
    """CPU seconds of a process there and everything below it, and the compilers among them."""
    view = place.view()
    family = view.family(pid)
    cpu = sum(p.cpu_ticks or 0 for p in family) / view.ticks_per_s
    return cpu, {p.name for p in family if p.name in COMPILERS}
