"""Watches a starting server for progress: log growth, CPU use of its processes, compilers among them (watch.jsonl).

The samples are evidence in the launch's folder, so that why a wait ended can be derived again without the server.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

import psutil

from lib.hosts import local
from lib.server.launch import Server
from lib.server.outcomes import COMPILERS, Sample, stalled
from lib.server.remote import RemoteServer
from lib.server.remote_looks import at_work_there

FILE = "watch.jsonl"
#: Seconds between two samples that are kept.
EVERY_S = 1.0


class Watch:
    """Called about once a second while a server starts; gives the reason to stop waiting, or None."""

    def __init__(self, quiet_s: float, compile_s: float) -> None:
        self.quiet_s, self.compile_s = quiet_s, compile_s
        self.samples: list[Sample] = []

    def __call__(self, server: Server, elapsed_s: float) -> str | None:
        if self.samples and elapsed_s - self.samples[-1].t_s < EVERY_S:
            return None
        sample = _sample(server, elapsed_s)
        if self.samples and self.samples[-1].log_bytes == sample.log_bytes:
            sample = sample.model_copy(update={"last_line": ""})  # as before
        self.samples.append(sample)
        with contextlib.suppress(OSError), (server.folder / FILE).open("a") as file:
            file.write(sample.model_dump_json() + "\n")
        stall = stalled(self.samples, self.quiet_s, self.compile_s)
        return stall.words if stall else None


def _at_work(server: Server) -> tuple[float, set[str]]:
    """CPU seconds of a server and everything below it, and the compilers among them, where it runs."""
    if isinstance(server, RemoteServer):
        return at_work_there(server.place, server.record.pid or -1)
    cpu, compilers = 0.0, set()
    for one in local.descendants(server.record.pid or -1):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(one.pid)
            times = process.cpu_times()
            cpu += times.user + times.system + times.children_user + times.children_system
            if (name := process.name()) in COMPILERS:
                compilers.add(name)
    return cpu, compilers


def _sample(server: Server, elapsed_s: float) -> Sample:
    cpu, compilers = _at_work(server)
    size, last = 0, b""
    with contextlib.suppress(OSError), (server.folder / "server.log").open("rb") as log:
        size = log.seek(0, 2)
        log.seek(max(0, size - 2048))
        last = next((part for part in reversed(log.read().replace(b"\r", b"\n").split(b"\n")) if part.strip()), b"")
    return Sample(
        t_s=round(elapsed_s, 2), log_bytes=size, cpu_s=round(cpu, 2), compilers=sorted(compilers),
        last_line=last.decode("utf-8", "replace")[-300:],
    )  # fmt: skip


def watch_silence(server: Server, folder: Path) -> None:
    """Two looks at a server that does not answer, two seconds apart: is it computing, and what (watch.jsonl)."""
    began = time.monotonic()
    first = _sample(server, 0.0)
    time.sleep(2.0)
    second = _sample(server, time.monotonic() - began)
    local.write_atomic(folder / FILE, f"{first.model_dump_json()}\n{second.model_dump_json()}\n")


def read_samples(folder: Path) -> list[Sample]:
    """What was seen of a launch while it started; empty where nothing was kept."""
    with contextlib.suppress(OSError, ValueError):
        return [Sample(**json.loads(line)) for line in (folder / FILE).read_text().splitlines()]
    return []
