"""What a sweep looks at on another host; the host is this machine behind the same interface, its processes are real."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lib.errors import Busy
from lib.hosts import local
from lib.hosts.base import LocalHost
from lib.hosts.view import HostGpu
from lib.params import HostParams
from lib.server import holders
from lib.server.remote import Place
from lib.server.remote_looks import at_work_there, end_there, holders_there, kernel_files_there
from tests.deploy.test_stopping import process, view

#: Starts a child of its own, and both withstand SIGTERM.
STUBBORN = (
    "import signal, subprocess, sys, time\nsignal.signal(15, signal.SIG_IGN)\n"
    "if len(sys.argv) < 2: subprocess.Popen([sys.executable, __file__, 'child'])\ntime.sleep(600)\n"
)
BUSY = "import time\nend = time.time() + 600\nwhile time.time() < end: pass\n"


@pytest.fixture
def here() -> Iterator[Place]:
    with LocalHost() as host:
        yield Place(host, HostParams())


def started(tmp_path: Path, source: str, family: int) -> subprocess.Popen[bytes]:
    file = tmp_path / "program.py"
    file.write_text(source)
    made = subprocess.Popen([sys.executable, str(file)])
    end = time.monotonic() + 20
    while len(local.descendants(made.pid)) < family and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.3)  # until its signals are set
    return made


def test_a_held_port_is_named_there_and_a_free_one_is_not(here: Place) -> None:
    """By pid, command and the identity that `may_stop` takes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        held, rows, reason = holders_there(here, None, port, on_cpu=True)
        assert [h.what for h in held] == [f"port {port} of this machine"] and rows == [] and "CPU" in str(reason)
        me = local.process_id(local.parse_owner(str(held[0].identity)).pid)
        assert me and me.ticks == local.parse_owner(str(held[0].identity)).ticks
    assert holders_there(here, None, port, on_cpu=True)[0] == []


def test_gpus_are_the_hosts_with_who_holds_them(monkeypatch: pytest.MonkeyPatch, here: Place) -> None:
    """A holder by the driver's list, memory of nobody or of who has the device open, and only the indices that may be used.

    An open device file alone is no holder: the driver's daemon has one.
    """

    def gpu(index: int, used: float, **more: Any) -> HostGpu:
        return HostGpu(
            index=index, name="G", uuid=f"u{index}", memory_total_mib=9000.0, memory_used_mib=used, driver_version="1",
            compute_cap="9.0", **more,
        )  # fmt: skip

    seen = view(
        [process(7, ["python3", "notebook"]), process(8, ["worker"])],
        gpus=[
            gpu(0, 500.0, users={7: 400.0}, holders=[8]), gpu(1, 2000.0), gpu(2, 3.0, holders=[8]), gpu(3, 900.0, users={99: 800.0}),
            gpu(4, 700.0, holders=[8]),
        ],
    )
    monkeypatch.setattr(Place, "view", lambda self: seen)
    held, rows, _ = holders_there(here, [0, 1, 2], None, on_cpu=False)
    assert [r["uuid"] for r in rows] == ["u0", "u1", "u2"] and rows[2]["memory_used_mib"] == 3.0
    assert [(h.what, h.mib) for h in held] == [("GPU 0 (u0)", 400.0), ("GPU 1 (u1)", 2000.0)]
    assert "notebook" in held[0].by and held[0].identity and held[1].identity is None
    assert "worker" in holders_there(here, [4], None, on_cpu=False)[0][0].by
    assert "not visible" in holders_there(here, [3], None, on_cpu=False)[0][0].by


def test_exactly_the_named_process_is_ended_there(here: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its child and against its will; the same pid with another start is nobody's."""
    for name, seconds in (("TERM_S", 0.6), ("ORPHANS_S", 0.3)):
        monkeypatch.setattr(f"lib.server.remote_looks.{name}", seconds)
    stubborn, bystander = started(tmp_path, STUBBORN, 2), subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        mine = local.process_id(stubborn.pid)
        assert mine
        family = local.descendants(mine.pid)
        assert len(family) == 2
        stranger = local.ProcessId(mine.pid, mine.start_time - 50, (mine.ticks or 0) - 5000)
        assert end_there(here, stranger, lambda _: None) == f"pid {mine.pid} was gone" and stubborn.poll() is None
        one = holders.Holder(what="port 1", by="it", identity=local.owner_token(mine))

        def end(process: local.ProcessId, say: Any) -> str:
            return end_there(here, process, say)

        with pytest.raises(Busy, match="port 1"):
            holders.free_the_way(lambda: [one] if mine.alive() else [], [], lambda _: None, end)
        done = holders.free_the_way(lambda: [one] if mine.alive() else [], [local.owner_token(mine)], lambda _: None, end)[1]
        assert done == [f"pid {mine.pid} and 1 below it ended by SIGKILL for 2 of 2"]
        stubborn.wait(5)
        assert not any(p.alive() for p in family) and bystander.poll() is None
    finally:
        for left in (stubborn, bystander):
            left.kill()
            left.wait()


def test_work_is_seen_where_it_is_done(here: Place, tmp_path: Path) -> None:
    """CPU seconds of a family grow with its work; a pid that is gone did none."""
    busy = started(tmp_path, BUSY, 1)
    try:
        before = at_work_there(here, busy.pid)[0]
        time.sleep(1.0)
        assert at_work_there(here, busy.pid)[0] > before + 0.1
    finally:
        busy.kill()
        busy.wait()
    assert at_work_there(here, busy.pid) == (0.0, set())


def test_compiled_kernels_are_counted_there(here: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In named folders, below the home there, or where a variable of the host says."""
    (tmp_path / "a/b").mkdir(parents=True)
    for name in ("x", "b/y"):
        (tmp_path / "a" / name).write_text("")
    assert kernel_files_there(here, [str(tmp_path / "a"), str(tmp_path / "missing")]) == 2
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kernel_files_there(here, ["NOBODY_SETS_THIS=~/a"]) == 2
    monkeypatch.setenv("SOME_CACHE", str(tmp_path / "a/b"))
    assert kernel_files_there(here, ["SOME_CACHE=~/a"]) == 1
