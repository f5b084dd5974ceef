"""Who holds this host's GPUs and ports before a sweep's first launch, and ending exactly those that params name.

A process is named by its identity (pid and start), never by its name: `pid:start_time[:ticks]`, as the table shows it.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import Field

from lib.errors import Busy, NotStopped
from lib.hosts import local
from lib.hosts.local import ProcessId
from lib.records import Record

#: MiB that an idle GPU may hold without a visible process: driver, display, another container's context.
IDLE_MIB = 600.0
#: Seconds from SIGTERM to SIGKILL of a named holder, and then until its GPU memory must be back.
TERM_S = 20.0
KILL_S = 15.0
#: Seconds that processes get which outlived the named one.
ORPHANS_S = 5.0


class Holder(Record):
    """One thing that is held: a GPU or a port, and by whom."""

    what: str = Field(description="GPU 0 (uuid), port 30000")
    by: str = Field(description="pid and command line, or that it can't be seen from here")
    identity: str | None = Field(description="pid:start_time[:ticks], as may_stop takes it")
    mib: float | None = None


def holders(
    gpus: Sequence[Mapping[str, Any]], users: Mapping[str, Mapping[int, int]], port: int | None
) -> list[Holder]:
    """Who holds these GPUs (rows and users as `lib.hosts.local` gives them) and this port (None: a free one is taken)."""
    found = []
    for gpu in gpus:
        name = f"GPU {gpu.get('index')} ({gpu.get('uuid')})"
        held = users.get(str(gpu.get("uuid")), {})
        found += [Holder(what=name, mib=mib, **_who(pid)) for pid, mib in sorted(held.items())]
        used = gpu.get("memory_used_mib")
        if not held and used is not None and used > IDLE_MIB:
            unseen = "a process that is not visible from here (another container, another user)"
            found.append(Holder(what=name, by=unseen, identity=None, mib=used))
    if port is not None and local.port_is_held(port):
        owner = local.port_owner(port)
        who = _who(owner.pid) if owner else {"by": "a process that may not be read", "identity": None}
        found.append(Holder(what=f"port {port}", **who))
    return found


def _who(pid: int) -> dict[str, Any]:
    process = local.process_id(pid)
    if process is None:
        return {"by": f"pid {pid}, not visible from here (another container?)", "identity": None}
    return {
        "by": f"pid {pid}: {local.command_line(pid) or 'command not readable'}",
        "identity": local.owner_token(process),
    }


def look(
    gpus: Sequence[int] | None, port: int | None, on_cpu: bool
) -> tuple[list[Holder], list[dict[str, Any]], str | None]:
    """Holders now, the GPUs that may be used, and why there are none.

    Args:
        gpus: indices that may be used, None for all; CUDA_VISIBLE_DEVICES of this process limits them too.
        port: the port that every launch takes, None where each takes a free one.
        on_cpu: the servers use no GPU, so nobody on one is in the way.
    """
    if on_cpu:
        return holders([], {}, port), [], "this profile's servers run on the CPU"
    rows, reason = local.gpus()
    chosen = [row for row in rows if (gpus is None or int(row["index"]) in gpus) and _visible(row)]
    users, unknown = local.gpu_users() if chosen else ({}, None)
    found = holders(chosen, users, port)
    if shutil.which("nvidia-smi") and (reason or unknown):
        found.append(Holder(what="GPUs", by=f"unknown, because {reason or unknown}", identity=None))
    return found, chosen, reason


def _visible(row: Mapping[str, Any]) -> bool:
    """Whether CUDA_VISIBLE_DEVICES of this process, which every launch inherits, lets a GPU be seen."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return True
    names = [name.strip() for name in listed.split(",") if name.strip()]
    return any(
        name == str(row["index"]) or (not name.isdigit() and str(row["uuid"]).startswith(name)) for name in names
    )


def free_the_way(
    look_now: Callable[[], list[Holder]],
    may_stop: Sequence[str],
    say: Callable[[str], None],
    end: Callable[[ProcessId, Callable[[str], None]], str] | None = None,
) -> tuple[list[Holder], list[str]]:
    """Refuses while anything is held, after ending those holders that params name.

    Args:
        look_now: asks the host again.
        may_stop: identities that may be ended, with everything below them.
        say: takes a line of progress.
        end: ends one of them by identity and says how; None: on this machine.

    Returns:
        What was held at first, and what was done about it.

    Raises:
        Busy: something is held and not named; every holder is named with the identity that may_stop would take.
        NotStopped: a named process, or what it held, is still there after SIGKILL.
    """
    first = look_now()
    parsed = [local.parse_owner(text) for text in may_stop]
    named = parsed if end else [p.pinned() for p in parsed]
    known = [h for h in first if (p := _process(h)) is not None and any(_same(p, n) for n in named)]
    others = [h for h in first if h not in known]
    if others:
        raise Busy(
            "GPUs and ports of this host are free before the first launch",
            "; ".join(_words(h) for h in others),
            "wait for them or end them yourself; what the sweep may end is named in may_stop by pid:start_time[:ticks]",
        )
    done = []
    for process in {p for h in known if (p := _process(h)) is not None}:
        done.append((end or _end)(process, say))
    deadline = time.monotonic() + KILL_S
    while (left := look_now()) and time.monotonic() < deadline and done:
        time.sleep(0.5)
    if left and done:
        raise NotStopped("what was ended lets go", "; ".join(_words(h) for h in left), "look at these processes")
    return first, done


def _process(holder: Holder) -> ProcessId | None:
    return local.parse_owner(holder.identity) if holder.identity else None


def _same(a: ProcessId, b: ProcessId) -> bool:
    if a.pid != b.pid:
        return False
    if a.ticks is not None and b.ticks is not None:
        return a.ticks == b.ticks
    return abs(a.start_time - b.start_time) < 0.02


def _words(holder: Holder) -> str:
    mib = f", {holder.mib:.0f} MiB" if holder.mib is not None else ""
    identity = f" [{holder.identity}]" if holder.identity else ""
    return f"{holder.what}: {holder.by}{mib}{identity}"


def _end(process: ProcessId, say: Callable[[str], None]) -> str:
    """Ends one process and everything below it: SIGTERM, deadline, SIGKILL; only by identity."""
    family = local.descendants(process.pid) if process.alive() else []
    say(f"ending pid {process.pid} as may_stop allows")
    process.kill(signal.SIGTERM)
    family = _wait_gone(process, family, [process], TERM_S)
    for p in family:
        p.kill(signal.SIGTERM)  # what the end of its parent did not end
    family = _wait_gone(process, family, family, ORPHANS_S)
    killed = [p for p in family if p.alive()]
    for p in killed:
        p.kill()
    family = _wait_gone(process, family, family, KILL_S)
    left = [p.pid for p in family if p.alive()]
    if left:
        raise NotStopped(f"pid {process.pid} and what it started are gone", f"left: {left}", "look at these processes")
    how = f"SIGKILL for {len(killed)} of {len(family)}" if killed else "SIGTERM"
    return f"pid {process.pid} and {max(len(family) - 1, 0)} below it ended by {how}"


def _wait_gone(root: ProcessId, family: list[ProcessId], whom: list[ProcessId], seconds: float) -> list[ProcessId]:
    """Waits until these are gone, at most so long; gives the family with what it has started meanwhile."""
    deadline = time.monotonic() + seconds
    while any(p.alive() for p in whom) and time.monotonic() < deadline:
        family = list({*family, *(local.descendants(root.pid) if root.alive() else [])})
        time.sleep(0.1)
    return family
