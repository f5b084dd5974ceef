"""Signals to processes on a host, by identity: a number that another process has by now is left alone."""

from __future__ import annotations

from collections.abc import Mapping

from lib.hosts.base import Host

#: Sends a signal to processes that are still the ones that were seen: argv is SIGNAL, then PID:TICKS of each.
_SIGNAL_BY_IDENTITY = """
import os, sys
number, done = int(sys.argv[1]), []
for word in sys.argv[2:]:
    pid, ticks = (int(part) for part in word.split(":"))
    try:
        handle = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
        with open("/proc/%d/stat" % pid) as file:
            fields = file.read().rpartition(")")[2].split()
        if int(fields[19]) != ticks or fields[0] in "ZX":
            continue
        if handle is None:
            os.kill(pid, number)
        else:
            import signal
            signal.pidfd_send_signal(handle, number)
        done.append(word)
    except (OSError, IndexError, ValueError):
        continue
print(" ".join(done))
"""


def signal_processes(
    host: Host, number: int, processes: Mapping[int, int], deadline_s: float = 20.0, sudo: bool = True
) -> list[int]:
    """Sends a signal to processes by identity (pid and start in ticks) as root (unless `sudo` is False); returns the pids that took it.

    A pid that another process has by now is left alone.
    """
    if not processes:
        return []
    words = [f"{pid}:{ticks}" for pid, ticks in processes.items()]
    done = host.run([host.python, "-c", _SIGNAL_BY_IDENTITY, str(number), *words], deadline_s=deadline_s, sudo=sudo)
    done.check("signals are sent")
    return [int(word.split(":")[0]) for word in done.text.split()]
