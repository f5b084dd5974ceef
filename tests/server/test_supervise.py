"""The supervisor between the workbook and a server, with real processes (small Python ones, no SGLang)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lib.hosts import local
from lib.server.supervise import LONGEST_LINE, LineFilter

ROOT = Path(__file__).resolve().parents[2]


def wait_for(condition: Any, seconds: float = 10.0) -> Any:
    """The first true value of `condition()`, or a failed test."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s")


class Supervised:
    """A supervisor over a small Python program, owned by a process of the test's."""

    def __init__(
        self, folder: Path, program: str, keep: bool = False, secrets: tuple[str, ...] = (), log: str | None = None
    ) -> None:
        self.folder = folder
        self.owner = subprocess.Popen(["sleep", "300"])
        identity = local.process_id(self.owner.pid)
        assert identity
        spec = {
            "argv": [sys.executable, "-u", "-c", program],
            "environment": dict(os.environ),
            "cwd": str(folder),
            "log_path": log or str(folder / "server.log"),
            "status_path": str(folder / "status.json"),
            "secrets": list(secrets),
            "owners": [(identity.pid, identity.start_time)],
            "keep": keep,
            "stop_deadline_s": 2.0,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lib.server.supervise"], stdin=subprocess.PIPE, start_new_session=True, cwd=ROOT
        )
        assert self.process.stdin
        self.process.stdin.write(json.dumps(spec).encode())
        self.process.stdin.close()

    def status(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.folder / "status.json").read_text()))
        except OSError:
            return {}

    def log(self) -> str:
        try:
            return (self.folder / "server.log").read_text()
        except OSError:
            return ""

    def running(self) -> int:
        return int(
            wait_for(lambda: self.status().get("state") == "running" and "up" in self.log() and self.status()["pid"])
        )

    def end(self) -> None:
        self.owner.kill()
        self.owner.wait()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def supervised(tmp_path: Path) -> Any:
    made: list[Supervised] = []

    def make(program: str, **kwargs: Any) -> Supervised:
        made.append(Supervised(tmp_path, program, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.end()


FOREVER = "import time\nprint('up', flush=True)\nwhile True: time.sleep(0.1)"
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, '-c', 'import signal,time; signal.signal(15, signal.SIG_IGN); time.sleep(300)'])
time.sleep(0.5)
print('up', flush=True)
while True: time.sleep(0.1)
"""


def test_lines_are_redacted_before_they_reach_disk(supervised: Any) -> None:
    """An API key printed by the server, also in the middle of server_args, is not in the log file."""
    one = supervised(
        "print(\"server_args=ServerArgs(api_key='sk-abc123xyz', port=1)\"); print('plain s3cr3t-value end'); print('up')",
        secrets=("s3cr3t-value",),
    )
    wait_for(lambda: one.status().get("state") == "ended")
    assert "sk-abc123xyz" not in one.log() and "s3cr3t-value" not in one.log()
    assert "port=1" in one.log() and "up" in one.log()


def test_exit_code_and_last_words_are_kept(supervised: Any) -> None:
    """A server that dies leaves its exit code and its last line, even without a newline."""
    one = supervised("import sys; sys.stdout.write('last words'); sys.stdout.flush(); sys.exit(7)")
    wait_for(lambda: one.status().get("state") == "ended")
    assert one.status()["exit_code"] == 7
    assert one.log().endswith("last words")


def test_stop_is_sigterm_then_sigkill_of_the_whole_group(supervised: Any) -> None:
    """A server and a child of it that ignore SIGTERM are gone after the deadline."""
    one = supervised(STUBBORN)
    pid = one.running()
    assert len(local.group_members(pid)) == 2
    began = time.monotonic()
    one.process.send_signal(signal.SIGTERM)
    one.process.wait(15)
    assert local.group_members(pid) == []
    assert 1.5 < time.monotonic() - began < 10
    assert {"sigterm_at", "sigkill_at"} <= set(one.status())
    assert one.status()["exit_code"] == -9


def test_no_server_is_left_10_s_after_its_owner_was_killed(supervised: Any) -> None:
    """SIGKILL of the owner (kernel, workbook, terminal) ends even a server that ignores SIGTERM."""
    one = supervised(STUBBORN)
    pid = one.running()
    one.owner.kill()  # not reaped yet: a zombie owner counts as gone
    wait_for(lambda: not local.group_members(pid), 10.0)
    wait_for(lambda: one.status()["state"] == "ended")
    assert "owner" in one.status()["stop_reason"]


def test_a_kept_server_outlives_its_owner_and_its_lines_still_arrive(supervised: Any) -> None:
    """With `keep` the filter goes on after the owner's death."""
    one = supervised("import time\nprint('up')\nfor i in range(100):\n    print('line', i); time.sleep(0.1)", keep=True)
    pid = one.running()
    one.owner.kill()
    one.owner.wait()
    seen = len(one.log().splitlines())
    wait_for(lambda: len(one.log().splitlines()) > seen + 10)
    assert local.group_members(pid)


def test_the_server_dies_with_a_killed_supervisor(supervised: Any) -> None:
    """SIGKILL of the supervisor itself leaves no server either."""
    one = supervised(FOREVER)
    pid = one.running()
    one.process.kill()
    one.process.wait()
    wait_for(lambda: not local.group_members(pid), 5.0)


def test_a_log_that_cannot_be_written_is_said_and_does_not_block_the_server(supervised: Any) -> None:
    """On a full disk the server's pipe is still drained and the status says how many lines were lost."""
    one = supervised("for i in range(20000): print('x' * 100)\nprint('up')", log="/dev/full")
    wait_for(lambda: one.status().get("state") == "ended")
    assert one.status()["exit_code"] == 0
    assert "space" in one.status()["log_error"]
    assert one.status()["lines_lost"] > 10000


def test_a_missing_program_is_a_clear_end(tmp_path: Path) -> None:
    """A command that does not exist ends at once with 127 and the reason."""
    spec = {
        "argv": ["/nonexistent/python"],
        "environment": {},
        "cwd": str(tmp_path),
        "log_path": str(tmp_path / "l"),
        "status_path": str(tmp_path / "status.json"),
        "secrets": [],
        "owners": [],
        "keep": True,
        "stop_deadline_s": 1.0,
    }
    subprocess.run(
        [sys.executable, "-m", "lib.server.supervise"],
        input=json.dumps(spec).encode(),
        cwd=ROOT,
        check=True,
        timeout=20,
    )
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["exit_code"] == 127 and "nonexistent" in status["start_error"]


def test_filter_cuts_at_line_ends_and_bounds_memory() -> None:
    """Lines split over chunks are redacted whole; a line without end is written in pieces."""
    lines = LineFilter(["k3ys3cret"])
    assert lines.feed(b"a k3y") == b""
    assert lines.feed(b"s3cret\nrest") == b"a REDACTED\n"
    assert lines.finish() == b"rest"
    out = LineFilter([]).feed(b"word " * (LONGEST_LINE // 4))
    assert len(out) > LONGEST_LINE
