"""A server stopped in the middle of an endless answer: what the client saw, and verdicts that can fail."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lib.deploy import ending
from lib.records import Status
from lib.results import NotebookRun
from lib.server.control import Control
from tests.load.bench_server import BenchServer
from tests.load.test_benchmark import open_run

GONE = SimpleNamespace(
    gone=True, signals=["SIGTERM", "SIGKILL"], seconds=20.4, port_free=True, gpu_memory="given back", gpu_back=True
)
LEFT = SimpleNamespace(
    gone=False, signals=["SIGTERM", "SIGKILL"], seconds=30.0, port_free=True, gpu_memory="4,096 MiB more than before"
)


def launch(ready_s: float | None = 1.0, stop: Any = None) -> Any:
    return SimpleNamespace(launch_id="L1", ready_s=ready_s, stop=stop)


def server_info(limit: int) -> dict[str, Any]:
    return {"internal_states": [{"max_req_input_len": limit, "max_total_num_tokens": 10 * limit}]}


class Handle:
    """A handle whose server ends when it is stopped, `stop_s` after the request."""

    def __init__(self, server: BenchServer, stop_s: float = 0.3) -> None:
        self.server, self.stop_s, self.attached = server, stop_s, False
        self.live = SimpleNamespace(control=Control(server.base_url), launch_id="L1")
        self.stopped = False

    def get(self) -> Any:
        return self.live

    def launches(self) -> list[Any]:
        return [launch(stop=GONE)]

    def stop(self) -> None:
        time.sleep(self.stop_s)
        self.stopped = True
        self.server.cut.set()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NotebookRun:
    made = open_run(tmp_path)
    monkeypatch.setattr(made, "platform", lambda _: "cpu")
    monkeypatch.setattr(made, "log_file", lambda _: made.raw / "servers" / "L1" / "server.log")
    return made


@pytest.fixture
def server() -> Any:
    made = BenchServer(step_s=0.01)
    yield made
    made.cut.set()
    made.close()


def stopped(run: NotebookRun, server: BenchServer, tokens: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    monkeypatch.setattr(run, "server_info", lambda _: server_info(tokens + ending.ROOM))
    handle: Any = Handle(server)
    return handle, ending.stop_under_stream(run, handle, launch())


def test_the_stop_comes_in_the_middle_of_the_answer(
    run: NotebookRun, server: BenchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events before and after the stop was asked, then the connection is cut: a pass, and the record alone says so again."""
    handle, said = stopped(run, server, 5000, monkeypatch)
    assert handle.stopped and said["running_when_asked"] and said["tokens_asked"] == 5000
    assert (
        said["events_before"] >= ending.EVENTS_FIRST
        and said["events_after"] > 3
        and said["ended"].startswith("cut off")
    ), said
    (verdict,) = ending.verdicts(run, handle, launch(), said)
    assert verdict.status == Status.PASS and "SIGTERM, SIGKILL in 20.4 s" in str(verdict.reason)
    offline = SimpleNamespace(raw=run.raw, offline=True)
    assert ending.stop_under_stream(offline, handle, launch()) == said  # type: ignore[arg-type]
    again: Any = Handle(server)
    again.get = None  # resumed: that launch was stopped and is not run again for this
    assert ending.stop_under_stream(run, again, launch(stop=GONE)) == said
    changed = json.loads((run.raw / "stop-stream" / "stream.json").read_text()) | {"running_when_asked": False}
    assert ending.verdicts(run, handle, launch(), changed)[0].status == Status.INVALID


def test_an_answer_that_was_over_is_no_trace_of_the_treatment(
    run: NotebookRun, server: BenchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five tokens end before the stop: the verdict is invalid, not a pass."""
    handle, said = stopped(run, server, 5, monkeypatch)
    (verdict,) = ending.verdicts(run, handle, launch(), said)
    assert verdict.status == Status.INVALID and "in good order (length) after" in str(verdict.reason), verdict


def test_memory_that_is_not_given_back_fails(
    run: NotebookRun, server: BenchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left is a fail; so is a client that still hangs; an answer that the server still finished proves nothing."""
    handle, said = stopped(run, server, 5000, monkeypatch)
    handle.launches = lambda: [launch(stop=LEFT)]
    (verdict,) = ending.verdicts(run, handle, launch(), said)
    assert verdict.status == Status.FAIL and "4,096 MiB more" in str(verdict.reason)
    handle.launches = lambda: [launch(stop=GONE)]
    assert (
        ending.verdicts(run, handle, launch(), said | {"ended": "still open 30 s after the stop"})[0].status
        == Status.FAIL
    )
    assert (
        ending.verdicts(run, handle, launch(), said | {"ended": "in good order (length)"})[0].status == Status.INVALID
    )
    assert (
        ending.verdicts(run, handle, launch(), said | {"ended": "ended by the server (abort)"})[0].status == Status.PASS
    )


def test_what_never_ran_is_stopped_and_claims_nothing(run: NotebookRun, server: BenchServer) -> None:
    """A launch that was never ready has no stream and no verdict."""
    handle: Any = Handle(server)
    assert ending.stop_under_stream(run, handle, launch(ready_s=None)) is None and handle.stopped
    assert ending.verdicts(run, handle, launch(), None) == [] and ending.stream_rows(None) == []


@pytest.mark.parametrize(
    ("last", "how"),
    [
        (b'data: {"text":"x","meta_info":{"finish_reason":{"type":"length","length":5}}}', "in good order (length)"),
        (b'data: {"text":"x","meta_info":{"finish_reason":{"type":"abort","message":"m"}}}', "ended by the server (abort)"),
        (b'data: {"text":"x","meta_info":{"finish_reason":null}}', "closed in the middle"),
        (b'data: {"text":"x","me', "closed in the middle"), (b"", "closed in the middle"),
    ],
)  # fmt: skip
def test_how_an_answer_ended_is_read_from_its_last_event(last: bytes, how: str) -> None:
    """The server's finish reason decides; a cut event is no end."""
    assert ending.ending_of(last) == how


def test_the_greatest_length_is_the_server_s_own_limit() -> None:
    """The smallest of what it says of itself, less room; a million where it says nothing."""
    assert ending.most_tokens(server_info(1000)) == 1000 - ending.ROOM
    assert ending.most_tokens(None) == 1_000_000 - ending.ROOM
