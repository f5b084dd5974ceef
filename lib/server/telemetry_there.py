"""Watches a window of load on another host: its GPUs and CPUs once a second, by one small process there.

Writes what `lib.server.telemetry.Sampler` writes of this machine. Each sample carries the clock of the machine on which the
load client runs, so that a level's window finds its own samples: that host's where the client is there, else ours.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib.errors import WorkbookError
from lib.server.gpu_state import SMI_FIELDS, SMI_REASONS_BEFORE, names_nvidia, parse_smi
from lib.server.redact import redact_text
from lib.server.remote import Place

#: argv: seconds between two samples, then the fields of nvidia-smi in their newer and older names; ends with its input.
_SAMPLE = """
import json, select, subprocess, sys, time
def busy():
    with open("/proc/stat") as file:
        words = [int(word) for word in file.readline().split()[1:9]]
    return sum(words) - words[3] - words[4], sum(words)
def smi(fields):
    words = ["nvidia-smi", "--query-gpu=" + fields, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    text = done.stdout.decode("utf-8", "replace")
    return (text, None) if done.returncode == 0 else (None, text.strip()[:200])
period, forms = float(sys.argv[1]), sys.argv[2:]
text, reason = smi(forms[0])
if text is None and not (reason or "").startswith("[Errno"):
    forms = forms[1:]
    text, reason = smi(forms[0])
seen = bool(text and text.strip())
print(json.dumps({"seen": seen, "reason": None if seen else "no GPU: nvidia-smi: " + (reason or "lists none")}), flush=True)
before, due = busy(), time.monotonic() + period
over = False
while not over:
    over = bool(select.select([sys.stdin], [], [], max(0.0, due - time.monotonic()))[0])
    due = max(due + period, time.monotonic())
    text, reason = smi(forms[0]) if seen else ("", None)
    now = busy()
    share = (now[0] - before[0]) / (now[1] - before[1]) if now[1] > before[1] else None
    before = now
    line = {"t_ns": time.monotonic_ns(), "unix_s": time.time(), "smi": text, "error": reason, "cpu_frac": share}
    print(json.dumps(line), flush=True)
"""


class HostSampler:
    """One process on a host that samples until it is stopped; `source` and `reason` as of a `telemetry.Reader`."""

    def __init__(self, place: Place, file: Path, ranks: Sequence[int] | None, period_s: float) -> None:
        self.own_clock = place.params.load_client == "host"
        self._out = file.open("w", encoding="utf-8")
        newer = ",".join(SMI_FIELDS.values())
        older = newer.replace(SMI_FIELDS["clock_reasons"], SMI_REASONS_BEFORE)
        words = [place.host.python, "-IS", "-c", _SAMPLE, str(period_s), newer, older]
        self._running = place.host.start(words, deadline_s=7 * 3600.0)
        self._lines = self._running.lines()
        try:
            first = json.loads(next(self._lines, "{}"))
        except (WorkbookError, ValueError):
            first = {}
        self.source: str | None = "nvidia-smi" if first.get("seen") else None
        self.reason: str | None = None if self.source else str(first.get("reason") or "nothing could be asked there")
        clock = f"CLOCK_MONOTONIC of {place.host.name}" if self.own_clock else "CLOCK_MONOTONIC"
        self._write({
            "kind": "telemetry", "schema": 1, "source": self.source, "reason": self.reason, "ranks": ranks, "period_s": period_s,
            "clock": clock, "host": place.host.name,
        })  # fmt: skip
        self._thread = threading.Thread(target=self._take, name="host-telemetry", daemon=True)
        self._thread.start()

    def _write(self, line: dict[str, Any]) -> None:
        self._out.write(json.dumps(line) + "\n")
        self._out.flush()

    def _take(self) -> None:
        try:
            for text in self._lines:
                line = json.loads(text)
                at = line["t_ns"] if self.own_clock else time.monotonic_ns()
                if line["smi"] is None:
                    self._write({"kind": "fault", "t_ns": at, "error": redact_text(str(line["error"]))[:300]})
                    continue
                sample = {"unix_s": line["unix_s"], "gpus": parse_smi(line["smi"]), "cpu_frac": line["cpu_frac"]}
                self._write({"kind": "sample", "t_ns": at, **sample})
        except (WorkbookError, OSError, ValueError, KeyError) as error:  # the measurement goes on, the file says so
            with contextlib.suppress(OSError, ValueError):
                self._write({"kind": "fault", "t_ns": time.monotonic_ns(), "error": redact_text(str(error))[:300]})

    def stop(self, last: dict[str, Any] | None = None) -> None:
        """Takes a last sample, ends the process there and closes the file."""
        self._running.feed(b"")
        self._thread.join(timeout=15)
        self._running.stop()
        self._thread.join(timeout=5)
        with contextlib.suppress(OSError, ValueError):
            if last:
                self._write(last)
            self._out.close()


def kernel_log_there(place: Place) -> tuple[str | None, str | None]:
    """As `telemetry.kernel_log`, of a host; as root where `sudo -n` gives it."""
    reasons = []
    for command in (["dmesg"], ["journalctl", "-k", "-b", "-o", "short-monotonic", "--no-pager", "-q", "-n", "20000"]):
        try:
            done = place.host.run(command, deadline_s=10.0, sudo=place.is_root_by_sudo())
        except WorkbookError as error:
            reasons.append(f"{command[0]}: {error.found}")
            continue
        if not done.ok:
            reasons.append(f"{command[0]}: {(done.error_text.strip().splitlines() or [str(done.exit_code)])[-1][:120]}")
        elif not names_nvidia(done.text):
            reasons.append(f"{command[0]} shows no line of the NVIDIA driver")
        else:
            return done.text, None
    return None, f"unknown on {place.host.name}: " + "; ".join(reasons)


def topology_there(place: Place) -> tuple[str | None, str | None]:
    """As `telemetry.read_topology`, of a host."""
    try:
        done = place.host.run(["nvidia-smi", "topo", "-m"], deadline_s=30.0)
    except WorkbookError as error:
        return None, f"nvidia-smi topo -m on {place.host.name}: {error.found}"
    return (done.text, None) if done.ok else (None, f"nvidia-smi topo -m: {done.error_text.strip()[:200]}")
