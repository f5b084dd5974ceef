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
from lib.server import supervise
from lib.server.supervise import LONGEST_HELD, LONGEST_LINE, LineFilter

ROOT = Path(__file__).resolve().parents[2]


def wait_for(condition: Any, seconds: float = 30.0) -> Any:
    """The first true value of `condition()`, or a failed test; the time is that of two starts of Python on a slow machine."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s")


class Supervised:
    """A supervisor over a small Python program, owned by a process of the test's."""

    def __init__(
        self,
        folder: Path,
        program: str,
        keep: bool = False,
        secrets: tuple[str, ...] = (),
        log: str | None = None,
        more: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        guardian: str | None = None,
        ticks: bool = True,
    ) -> None:
        self.folder = folder
        self.owner = subprocess.Popen(["sleep", "300"])
        identity = local.process_id(self.owner.pid)
        assert identity
        spec = {
            "argv": [sys.executable, "-u", "-c", program, *more],
            "environment": {**os.environ, **(environment or {})},
            "cwd": str(folder),
            "log_path": log or str(folder / "server.log"),
            "status_path": str(folder / "status.json"),
            "secrets": list(secrets),
            "owners": [(identity.pid, identity.start_time, *([identity.ticks] if ticks else []))],
            "keep": keep,
            "stop_deadline_s": 2.0,
        }
        command = ["-c", guardian] if guardian else ["-m", "lib.server.supervise"]
        self.process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, start_new_session=True, cwd=ROOT
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


@pytest.mark.parametrize("ticks", [True, False])
def test_no_server_is_left_10_s_after_its_owner_was_killed(supervised: Any, ticks: bool) -> None:
    """SIGKILL of the owner (kernel, workbook, terminal) ends even a server that ignores SIGTERM, however it is named."""
    one = supervised(STUBBORN, ticks=ticks)
    pid = one.running()
    time.sleep(0.5)
    assert one.status()["state"] == "running"  # a living owner is not taken for a dead one
    one.owner.kill()  # not reaped yet: a zombie owner counts as gone
    killed = time.monotonic()
    wait_for(lambda: not local.group_members(pid))
    assert time.monotonic() - killed < 10.0
    wait_for(lambda: one.status()["state"] == "ended")
    assert "owner" in one.status()["stop_reason"]


def test_the_orphan_deadline_leaves_room_below_10_s() -> None:
    """Poll, SIGTERM to SIGKILL, last words and the children's grace together end within 10 s with 2 s to spare."""
    spent = supervise.POLL_S + supervise.ORPHAN_DEADLINE_S + supervise.LAST_WORDS_S + supervise.CHILDREN_GRACE_S
    assert spent <= 8.0


def test_a_kept_server_outlives_its_owner_and_its_lines_still_arrive(supervised: Any) -> None:
    """With `keep` the filter goes on after the owner's death."""
    program = "import itertools, time\nprint('up')\nfor i in itertools.count():\n    print('line', i); time.sleep(0.05)"
    one = supervised(program, keep=True)
    pid = one.running()
    one.owner.kill()
    one.owner.wait()
    seen = len(one.log().splitlines())
    wait_for(lambda: len(one.log().splitlines()) > seen + 20)
    assert local.group_members(pid)
    one.process.send_signal(signal.SIGTERM)
    one.process.wait(30)
    assert local.group_members(pid) == []


@pytest.mark.parametrize("how", ["owner", "asked", "by itself"])
def test_a_child_in_a_session_of_its_own_is_ended_too(supervised: Any, how: str) -> None:
    """What left the server's group is ended before the status says that it ended, however it came to that."""
    ending = "time.sleep(0.5)" if how == "by itself" else "time.sleep(300)"
    one = supervised(
        "import subprocess, sys, time\n"
        "deep = \"import subprocess,time; print(subprocess.Popen(['sleep', '300'], start_new_session=True).pid);"
        " time.sleep(300)\"\n"
        "subprocess.Popen([sys.executable, '-uc', deep], start_new_session=True)\n"
        "print(subprocess.Popen(['sleep', '300'], start_new_session=True).pid)\n"
        f"time.sleep(1); print('up'); {ending}"
    )
    wait_for(lambda: "up" in one.log() and len(one.log().split()) == 3)
    pids = [int(word) for word in one.log().split() if word != "up"]
    assert all(local.process_id(pid) for pid in pids) or how == "by itself"
    if how == "owner":
        one.owner.kill()
    elif how == "asked":
        one.process.send_signal(signal.SIGTERM)
    wait_for(lambda: one.status().get("state") == "ended")
    assert [pid for pid in pids if (found := local.process_id(pid)) and found.alive()] == []
    assert "survivors" not in one.status()


def test_a_chatty_orphan_does_not_hide_the_death(supervised: Any) -> None:
    """A child that keeps on writing into the log is ended 2 s after the server, and its last lines are kept."""
    talker = "import time\nwhile True:\n    print('chatter', flush=True); time.sleep(.02)"
    one = supervised(
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-u', '-c', {talker!r}])\n"
        "time.sleep(1); print('up'); time.sleep(0.2); os._exit(3)"
    )
    pid = one.running()
    wait_for(lambda: local.process_id(pid) is None)
    over = time.monotonic()
    wait_for(lambda: one.status()["state"] == "ended")
    assert time.monotonic() - over < 6.0
    assert one.status()["exit_code"] == 3 and "chatter" in one.log()
    assert local.group_members(pid) == []


#: A supervisor that is sent SIGTERM at one moment of its life: `{when}` is a status, or `spawned`.
SIGNALLED = """
import json, os, signal, subprocess, sys
from lib.server import supervise
def hit(): os.kill(os.getpid(), signal.SIGTERM)
class Popen(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if WHEN == 'spawned': hit()
class Hit(supervise.Supervisor):
    def write_status(self, **changes):
        super().write_status(**changes)
        if self.status['state'] == WHEN: hit()
WHEN = {when!r}
one = Hit(json.load(sys.stdin))
supervise.subprocess.Popen = Popen
one.run()
"""


@pytest.mark.parametrize("when", ["starting", "spawned", "running"])
def test_a_request_to_stop_is_heard_from_the_first_moment(supervised: Any, when: str) -> None:
    """SIGTERM before the server is started: it isn't; right after: it is ended. In no case is the request lost."""
    one = supervised(FOREVER, guardian=SIGNALLED.format(when=when))
    assert one.process.wait(30) == 0
    status = one.status()
    assert status["state"] == "ended" and "asked" in status["stop_reason"]
    assert ("pid" in status) == (when != "starting")
    assert when == "starting" or status["exit_code"] in (-15, 0)
    assert when == "starting" or local.group_members(status["pid"]) == []


def test_a_request_after_the_end_changes_nothing(supervised: Any) -> None:
    """SIGTERM that arrives after the last word doesn't turn an ended server into one that is stopping."""
    one = supervised("print('up')", guardian=SIGNALLED.format(when="ended"))
    assert one.process.wait(30) == 0
    assert one.status()["state"] == "ended" and one.status()["exit_code"] == 0
    assert "stop_reason" not in one.status()


def test_no_signal_goes_to_the_group_of_a_reaped_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the server is reaped its number may be another group's."""
    sent: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda pgid, number: sent.append(pgid))
    guardian = supervise.Supervisor(
        {
            "argv": [], "environment": {}, "cwd": str(tmp_path), "log_path": "", "owners": [], "secrets": [],
            "status_path": str(tmp_path / "s"), "keep": False, "stop_deadline_s": 1.0,
        }
    )  # fmt: skip
    guardian.server = subprocess.Popen(["sleep", "300"], start_new_session=True)
    guardian._signal_group(signal.SIGTERM)
    assert sent == [guardian.server.pid]
    guardian.server.kill()
    guardian.server.wait()
    guardian._signal_group(signal.SIGKILL)
    assert sent == [guardian.server.pid]


def test_secrets_of_environment_and_arguments_are_hidden_wherever_they_stand(supervised: Any) -> None:
    """A key that the server got by a variable or a flag is hidden also where nothing beside it names it."""
    one = supervised(
        "import os, sys; print('env', os.environ['MY_SERVICE_TOKEN']); print('arg', sys.argv[-1]); print('up')",
        more=("--api-key", "tulip-9-garden"),
        environment={"MY_SERVICE_TOKEN": "walnut-7-window"},
    )
    wait_for(lambda: one.status().get("state") == "ended")
    assert one.log().splitlines() == ["env REDACTED", "arg REDACTED", "up"]


def test_the_server_dies_with_a_killed_supervisor(supervised: Any) -> None:
    """SIGKILL of the supervisor itself leaves no server either."""
    one = supervised(FOREVER)
    pid = one.running()
    one.process.kill()
    one.process.wait()
    wait_for(lambda: not local.group_members(pid), 10.0)


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


SECRET = "tulip-9-garden"


@pytest.mark.parametrize(
    "line",
    [
        f"start --api-key {SECRET} --port 1",
        f"'--api-key', '{SECRET}', '--port'",
        f"args: api_key='two words {SECRET}', port=1",
        f"Authorization: Bearer {SECRET}",
        f'{{"Authorization": "Bearer {SECRET}", "x": 1}}',
        f"HF_TOKEN={SECRET} next",
    ],
)
def test_no_cut_of_an_endless_line_shows_a_secret(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever in a flag and its value the length is reached, what is written is what would be written of the whole."""
    monkeypatch.setattr(supervise, "LONGEST_LINE", 600)
    monkeypatch.setattr(supervise, "LONGEST_HELD", 2400)
    monkeypatch.setattr(supervise, "CONTEXT", 200)
    for before in range(300, 500):
        lines = LineFilter([])
        text = ("w" * (before % 7) + " ") + "x " * (before // 2) + line + " y" * 300
        out = b""
        for start in range(0, len(text), 50):
            out += lines.feed(text[start : start + 50].encode())
        assert out  # it was cut
        whole = (out + lines.finish()).decode()
        assert SECRET not in whole and "9-garden" not in whole and "left out" not in whole
        assert whole.count("x ") >= before // 2
        assert whole.count(" y") == 300 or line.startswith("Authorization")  # a header's value is the rest of its line


def test_a_flag_at_a_lines_end_waits_for_its_value() -> None:
    """A value on the next line is hidden, though the first line was complete long before."""
    lines = LineFilter([])
    assert lines.feed(b"first\n  --api-key\n") == b"first\n"
    assert lines.feed(f"  {SECRET}\nnext\n".encode()) == b"  --api-key\n  REDACTED\nnext\n"
    listed = LineFilter([])
    out = listed.feed(b'["--api-key",\n') + listed.feed(f'  "{SECRET}",\n "--port"]\n'.encode()) + listed.finish()
    assert SECRET.encode() not in out and b"--port" in out


def test_a_private_key_is_hidden_over_all_its_lines() -> None:
    """Lines within a key are not let go before its end, even if every line comes alone."""
    lines = LineFilter([])
    key = [b"-----BEGIN PRIVATE KEY-----\n", *(b"MIIEvQ%dIBADANBgkq\n" % i for i in range(200)), b"-----END PRIVATE KEY-----\n"]
    out = b"".join(lines.feed(line) for line in [b"a\n", *key, b"z\n"]) + lines.finish()
    assert out.startswith(b"a\n") and out.endswith(b"z\n") and b"MIIEvQ" not in out


def test_a_known_secret_of_several_lines_is_hidden_line_by_line() -> None:
    """Of a secret value with line ends no line is shown."""
    lines = LineFilter(["walnut-7\nwindow-8"])
    assert lines.feed(b"a walnut-7\n") + lines.feed(b"window-8 b\n") == b"a REDACTED\nREDACTED b\n"


def test_a_line_without_a_place_to_cut_is_bounded_and_said() -> None:
    """A line that could be one secret is held up to a bound; then its rest is left out, and the next line is whole."""
    lines = LineFilter([])
    out = b""
    for _ in range(0, 2 * LONGEST_HELD, 1 << 16):
        out += lines.feed(b"x" * (1 << 16))
        assert len(lines.rest) <= LONGEST_HELD
    out += lines.feed(b"x\nnext line\n")
    assert b"left out" in out and out.endswith(b"\nnext line\n") and LONGEST_HELD < len(out) < LONGEST_HELD + (1 << 17)
