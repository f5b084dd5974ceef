"""A level from two machines whose clocks differ: two processes, one of them in a time namespace of its own (Linux, root)."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lib.errors import ServerError
from lib.load import client, judge, machines
from lib.load.clocks import Alignment, Offset
from lib.params import ROOT

PLAN = judge.Plan(step_s=0.01, stall_s=0.02, first_min_s=0.02, first_max_s=0.05)
#: Seconds by which the second machine's clock is ahead: further than any window is long.
AHEAD_S = 5000


def own_clock() -> list[str]:
    """Words before a command that give it a clock of its own; none where the kernel or the rights for it are missing."""
    words = ["unshare", "--time", "--monotonic", str(AHEAD_S)]
    with contextlib.suppress(OSError):
        if subprocess.run([*words, "true"], capture_output=True).returncode == 0:
            return words
    return []


@pytest.fixture
def two_machines() -> Iterator[Callable[[str, int, str], None]]:
    """Calls two `serve`, the second under another clock."""
    started: list[subprocess.Popen[bytes]] = []

    def place(host: str, port: int, token: str) -> None:
        code = f"from lib.load.far_worker import serve; serve({host!r}, {port}, {token!r})"
        for words in ([], own_clock()):
            started.append(
                subprocess.Popen(
                    [*words, sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
                )
            )

    yield place
    for process in started:
        process.kill()
        process.wait()


def requests(count: int) -> list[client.Request]:
    """Prompts of their own."""
    return [client.Request(f"r{i}", f"request number {i}", 8) for i in range(count)]


def send(sender: machines.MachinesSender, url: str, out: Path, **load: Any) -> Path:
    """A level from two machines."""
    options = {"concurrency": 4, **load}
    return client.run_level(
        url, "completions", requests(12), out=out, model="judge", workers=2, sender=sender, **options
    )


def test_two_machines_with_different_clocks_make_one_window(
    two_machines: Callable[[str, int, str], None], tmp_path: Path
) -> None:
    """Started together, all requests answered, times by one clock, the skew and how sure it is in the record."""
    if not own_clock():
        pytest.skip("no time namespaces here (Linux 5.6 or newer, util-linux 2.38, root)")
    seen: list[str] = []
    with judge.running_judge(PLAN) as server:
        sender = machines.MachinesSender(2, "127.0.0.1", two_machines)
        out = send(sender, server.base_url, tmp_path / "level.jsonl", observe=lambda: {"seen": str(seen.append("x"))})
    level = client.read_level(out)
    clocks = level.header["client"]["clocks"]
    offsets = sorted(row["offset_before_ns"] for row in clocks["machines"])
    assert abs(offsets[0]) < 5e6 and abs(offsets[1] - AHEAD_S * 1e9) < 5e6
    assert 0 < clocks["skew_bound_s"] < clocks["max_skew_s"]
    rows = [json.loads(line) for line in out.read_text().splitlines()[1:]]
    assert len(rows) == 12 and all(r["failure"] is None for r in rows)
    window = level.header["window"]
    assert all(window["start_ns"] - 3e6 <= r["sent_ns"] < r["end_ns"] <= window["end_ns"] + 3e6 for r in rows)
    assert window["end_ns"] - window["start_ns"] < 20e9, "5000 s of another clock would show"
    assert [r["sent_ns"] for r in rows] == sorted(r["sent_ns"] for r in rows)
    starts = [w["start_ns"] for w in level.header["client"]["workers"]]
    assert abs(starts[0] - starts[1]) < 50e6 and len(seen) == 2
    assert len({row["machine"] for row in level.header["client"]["machines"]}) == 1  # both are this one
    assert client.level_summary(out)["output_tokens_per_s"].value


def test_a_window_whose_clocks_cannot_be_told_is_not_merged(
    two_machines: Callable[[str, int, str], None], tmp_path: Path
) -> None:
    """A nanosecond may be too much to ask: refused with both numbers, and no record is left."""
    with judge.running_judge(PLAN) as server:
        sender = machines.MachinesSender(2, "127.0.0.1", two_machines, max_skew_s=1e-9)
        with pytest.raises(machines.SkewTooLarge, match="may be .* ms apart"):
            send(sender, server.base_url, tmp_path / "level.jsonl")
    assert not (tmp_path / "level.jsonl").exists()


def test_a_machine_that_goes_away_fails_the_level(tmp_path: Path) -> None:
    """It connects, knows the token, and hangs up: one error that names it."""

    def place(host: str, port: int, token: str) -> None:
        code = (
            f"import json, socket, sys; s = socket.create_connection(({host!r}, {port})); "
            f"s.sendall(json.dumps(dict(token={token!r}, machine='short')).encode() + b'\\n'); s.recv(10)"
        )
        subprocess.run(
            [sys.executable, "-c", f"import socket; socket.create_connection(({host!r}, {port})).sendall(b'x\\n')"]
        )
        subprocess.Popen([sys.executable, "-c", code])

    with pytest.raises(ServerError, match="short to stay"):
        client.run_level("http://127.0.0.1:9", "completions", requests(2), out=tmp_path / "l", model="m", concurrency=1,
                         sender=machines.MachinesSender(1, "127.0.0.1", place))  # fmt: skip


def test_records_keep_their_durations() -> None:
    """Times move by the offset, what is counted from a record's own start does not."""
    alignment = Alignment(Offset(0, 1000.0, 5, 1), Offset(10, 1000.0, 5, 1))
    line = b'{"sent_ns":5000,"due_ns":4000,"end_ns":9000,"t_us":[1,2],"head_us":1}\n'
    made = json.loads(machines.aligned_lines(line, alignment))
    assert made == {"sent_ns": 4000, "due_ns": 3000, "end_ns": 8000, "t_us": [1, 2], "head_us": 1}


def test_a_key_that_a_machine_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are never sent to machines; one that has none says so, and the level fails with its words."""
    monkeypatch.setenv("KEY_OF_THIS_TEST", "sk-not-sent-0123456789")
    without = {k: v for k, v in os.environ.items() if k != "KEY_OF_THIS_TEST"} | {"PYTHONPATH": str(ROOT)}

    def place(host: str, port: int, token: str) -> None:
        code = f"from lib.load.far_worker import serve; serve({host!r}, {port}, {token!r})"
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=without)

    with pytest.raises(ServerError, match="the environment variable KEY_OF_THIS_TEST"):
        client.run_level("http://127.0.0.1:9", "completions", requests(2), out=tmp_path / "l", model="m", concurrency=1,
                         api_key_env="KEY_OF_THIS_TEST", sender=machines.MachinesSender(1, "127.0.0.1", place))  # fmt: skip


def test_an_interrupt_keeps_what_was_sent(two_machines: Callable[[str, int, str], None], tmp_path: Path) -> None:
    """Ctrl-C in the middle: every machine stops, and the record has what was answered until then."""
    told: list[int] = []

    def progress(state: dict[str, Any]) -> None:
        if state["done"] and not told:
            told.append(state["done"])
            raise KeyboardInterrupt

    out = tmp_path / "level.jsonl"
    with judge.running_judge(judge.Plan(step_s=0.1, stall_s=0.2, first_min_s=0.02, first_max_s=0.05)) as server:
        sender = machines.MachinesSender(2, "127.0.0.1", two_machines)
        with pytest.raises(KeyboardInterrupt):
            send(sender, server.base_url, out, progress=progress)
    level = client.read_level(out)
    assert level.header["stopped"] == "interrupted" and 0 < len(level.requests) < 12
    assert level.header["client"]["clocks"]["skew_bound_s"] > 0
