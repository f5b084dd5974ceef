"""The load client against a server that misbehaves for real: every failure by name, nothing lost, nothing twice."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from hashlib import sha256
from pathlib import Path

import pytest
from faulty_server import TEXT, FaultyServer, faulty_server

from lib.errors import BadInput, UnreadableFile
from lib.load import metrics
from lib.load.client import Request, arrival_offsets_ns, level_summary, read_level, request_body, run_level, together
from lib.load.client_wire import FAILURES

TOKENS = 9
ANSWER = "".join(TEXT)


def requests_for(names: list[str], tokens: int = TOKENS) -> list[Request]:
    return [Request(f"{name}-{i}", f"FAULT:{name} {i}", tokens) for i, name in enumerate(names)]


def send(
    server: FaultyServer | str, names: list[str], out: Path, api: str = "completions", **how: object
) -> metrics.Level:
    # longer than a machine that others load stands still: the server's silence must be the server's
    settings: dict[str, object] = {"concurrency": 4, "model": "m", "gap_timeout_s": 3.0, "first_timeout_s": 3.5} | how
    if "rate" in settings:
        settings.pop("concurrency")
    url = server if isinstance(server, str) else server.base_url
    path = run_level(url, api, requests_for(names), out=out / "level.jsonl", **settings)  # type: ignore[arg-type]
    return read_level(path)


EXPECTED = {
    "ok": None,
    "bytewise": None,
    "cut_chunks": None,
    "crlf": None,
    "until_close": None,
    "reset_mid_stream": "reset_mid_stream",
    "reset_before": "reset_before_response",
    "close_before": "closed_before_response",
    "close_mid_stream": "closed_mid_stream",
    "stall": "stall",
    "no_first": "no_first_token",
    "http_400": "http_4xx",
    "http_500": "http_5xx",
    "unknown_model": "wrong_model",
    "other_model": "wrong_model",
    "malformed": "malformed_sse",
    "not_utf8": "malformed_sse",
    "not_sse": "malformed_sse",
    "bad_chunk": "malformed_http",
    "no_usage": "no_usage",
    "no_finish": "incomplete",
    "aborted": "aborted",
    "error_event": "error_event",
    "empty": "no_output",
    "twice": "duplicate_answer",
}


HOW_SENT = [(api, workers) for api in ("completions", "chat", "generate") for workers in (1, 2)]


def expected_of(name: str, api: str) -> str | None:
    """/generate names no model in its answers, so another model's name cannot be noticed there."""
    return None if (api, name) == ("generate", "other_model") else EXPECTED[name]


@pytest.fixture(scope="module", params=HOW_SENT, ids=lambda p: f"{p[0]}-{p[1]}-workers")
def every_fault(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[metrics.Level, str]:
    """One level in which each fault has a good request before it, for each endpoint, also from two processes."""
    api, workers = request.param
    names = [n for name in EXPECTED for n in ("ok", name)]
    with faulty_server() as server:
        level = send(server, names, tmp_path_factory.mktemp("faults"), api=api, concurrency=8, workers=workers)
        assert sum(server.seen.values()) == len(names)
    assert len(level.header["client"]["workers"]) == workers
    return level, api


def test_each_fault_is_counted_under_its_own_name(every_fault: tuple[metrics.Level, str]) -> None:
    """The cause of each faulty request is named, with what the server said; sent = ok + failed by cause."""
    level, api = every_fault
    got, want = {}, {}
    for record in level.requests:
        name = record["id"].rpartition("-")[0]
        if name == "ok":
            continue
        got[name], want[name] = record["failure"], expected_of(name, api)
        if name.startswith("http_"):
            assert name.removeprefix("http_") in record["detail"]
    assert got == want and set(got) == set(EXPECTED) - {"ok"}
    assert {cause for cause in want.values() if cause} <= set(FAILURES)
    failed = metrics.failures(level)
    good = sum(r["failure"] is None for r in level.requests)
    assert good + sum(failed.values()) == level.header["sent"] == level.header["planned"] == 2 * len(EXPECTED)


def test_faults_leave_the_other_requests_numbers_alone(every_fault: tuple[metrics.Level, str]) -> None:
    """Good requests among faulty ones: whole text, exact counts, and gaps of about the server's 10 ms."""
    level, _ = every_fault
    good = [r for r in level.requests if r["id"].startswith("ok-")]
    assert len(good) == len(EXPECTED) + 1
    assert all(r["failure"] is None and r["usage"]["completion_tokens"] == TOKENS for r in good)
    assert all(r["output_sha256"] == sha256(ANSWER.encode()).hexdigest() for r in good)
    gaps = sorted(b - a for r in good for a, b in zip(r["t_us"], r["t_us"][1:], strict=False))
    assert 5_000 < gaps[len(gaps) // 2] < 100_000


@pytest.mark.parametrize("api", ["completions", "chat", "generate"])
def test_hostile_answers(api: str, tmp_path: Path) -> None:
    """3 MB in an event is taken; counts that are no counts, and JSON of the wrong shape, are failures by name."""
    names = ["huge_event", "lying_usage", "negative_usage", "early_stop", "nested", "odd_types", "ok"]
    with faulty_server(gap_s=0.001) as server:
        level = send(server, names, tmp_path, api=api, gap_timeout_s=5.0)
    got = {r["id"].rpartition("-")[0]: r for r in level.requests}
    assert {k: r["failure"] for k, r in got.items()} == {
        "huge_event": None, "lying_usage": "no_usage", "negative_usage": "no_usage", "early_stop": None,
        "nested": "malformed_sse", "odd_types": got["odd_types"]["failure"], "ok": None,
    }, {k: r["detail"] for k, r in got.items()}  # fmt: skip
    assert got["odd_types"]["failure"] in ("malformed_sse", "incomplete", "no_usage", "no_output")
    assert got["huge_event"]["usage"]["completion_tokens"] == TOKENS and max(got["huge_event"]["sizes"]) > 3_000_000
    assert got["early_stop"]["usage"]["completion_tokens"] == 3 and got["early_stop"]["finish_reason"] == "stop"
    summary = metrics.level_summary(level)
    assert summary["output_tokens"].value == 2 * TOKENS + 3


@pytest.mark.parametrize("api", ["completions", "chat", "generate"])
def test_one_token_answers_have_no_gap(api: str, tmp_path: Path) -> None:
    """One token: TTFT is known; gaps and per-token latency are a reason, not 0."""
    with faulty_server(gap_s=0.001) as server:
        path = run_level(server.base_url, api, requests_for(["ok"] * 4, 1), out=tmp_path / "l.jsonl", concurrency=2, model="m")
    summary = level_summary(path)
    assert summary["requests_ok"].value == 4 and summary["ttft_s_p50"].value is not None
    for key in ("chunk_gap_s_p50", "token_latency_s_p50", "decode_tokens_per_s_mean"):
        assert summary[key].value is None and summary[key].reason


@pytest.mark.parametrize("api", ["completions", "chat", "generate"])
@pytest.mark.parametrize("name", ["ok", "bytewise", "cut_chunks", "crlf", "until_close"])
def test_a_good_answer_is_read_whole_however_it_is_cut(api: str, name: str, tmp_path: Path) -> None:
    """Text, token count and number of token events are the same for every way of cutting and framing the stream."""
    with faulty_server(gap_s=0.002) as server:
        level = send(server, [name], tmp_path, api=api, keep_text=True)
    (record,) = level.requests
    assert record["failure"] is None, record["detail"]
    assert record["text"] == ANSWER
    assert record["usage"]["completion_tokens"] == TOKENS and record["usage"]["prompt_tokens"] == 7
    assert record["kinds"].count("c") == TOKENS and len(record["t_us"]) == len(record["sizes"])
    assert record["t_us"] == sorted(record["t_us"])
    assert (metrics.cached_tokens(record) == 3) == (api == "generate")


@pytest.mark.parametrize(("api", "workers"), HOW_SENT)
def test_all_faults_at_once_are_conserved(api: str, workers: int, tmp_path: Path) -> None:
    """Sent = ok + failed by cause, each request once, in a shuffled mix of everything at concurrency 8."""
    names = [n for n in EXPECTED for _ in range(3)] + ["ok"] * 40
    random.Random(7).shuffle(names)
    with faulty_server(gap_s=0.003) as server:
        level = send(server, names, tmp_path, api=api, workers=workers, concurrency=8)
    expected: dict[str, int] = {}
    for name in names:
        if cause := expected_of(name, api):
            expected[cause] = expected.get(cause, 0) + 1
    assert metrics.failures(level) == dict(sorted(expected.items()))
    summary = metrics.level_summary(level)
    good = sum(expected_of(n, api) is None for n in names)
    assert summary["requests_ok"].value == good and summary["output_tokens"].value == good * TOKENS
    assert summary["requests_ok"].value + sum(expected.values()) == level.header["sent"] == len(names)
    assert sorted(r["i"] for r in level.requests) == list(range(len(names)))
    assert sum(server.seen.values()) == len(names)


@pytest.mark.parametrize(("api", "workers"), HOW_SENT)
def test_connection_refused_ends_the_level_and_is_counted(api: str, workers: int, tmp_path: Path) -> None:
    """Nobody listens: every try is connection_refused, the rest is not sent, and the record says why."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    level = send(f"http://127.0.0.1:{port}", ["ok"] * 200, tmp_path, api=api, workers=workers)
    assert metrics.failures(level) == {"connection_refused": level.header["sent"]}
    assert level.header["stopped"] == "server_gone"
    assert 0 < level.header["sent"] < 200 == level.header["planned"]
    summary = metrics.level_summary(level)
    assert summary["ttft_s_p50"].value is None and summary["ttft_s_p50"].reason
    assert summary["requests_ok"].value == 0


@pytest.mark.parametrize(("api", "workers"), HOW_SENT)
def test_a_server_that_dies_under_load(api: str, workers: int, tmp_path: Path) -> None:
    """After 30 answers it is gone: what it answered stays ok, the rest has causes, and all is accounted for."""
    with faulty_server() as server:
        server.die_after = 30
        level = send(server, ["ok"] * 300, tmp_path, api=api, workers=workers, concurrency=8)
    causes = metrics.failures(level)
    good = sum(r["failure"] is None for r in level.requests)
    assert 15 <= good <= 30
    assert set(causes) <= {"reset_mid_stream", "reset_before_response", "connection_refused", "closed_before_response"}
    assert good + sum(causes.values()) == level.header["sent"] and level.header["stopped"] == "server_gone"
    assert len({r["i"] for r in level.requests}) == level.header["sent"] < 300 == level.header["planned"]


@pytest.mark.parametrize("api", ["completions", "generate"])
def test_a_late_second_answer_is_not_taken_for_the_next_one(api: str, tmp_path: Path) -> None:
    """The same answer again after the next request was sent: the first is a duplicate, the next waits for its own."""
    with faulty_server(gap_s=0.002) as server:
        level = send(server, ["twice_later", "ok", "ok"], tmp_path, api=api, concurrency=1)
    got = {r["id"]: r["failure"] for r in sorted(level.requests, key=lambda r: r["i"])}
    assert got == {"twice_later-0": "duplicate_answer", "ok-1": None, "ok-2": None}


def test_a_late_second_answer_to_the_last_request(tmp_path: Path) -> None:
    """Bytes on an idle connection count against the request before them."""
    with faulty_server(gap_s=0.001) as server:
        level = send(server, ["twice_later"], tmp_path, concurrency=1)
    assert metrics.failures(level) == {"duplicate_answer": 1}


def test_an_answer_in_another_requests_name(tmp_path: Path) -> None:
    """/generate echoes the client's request id; a different one of this client's is a wrong answer."""
    with faulty_server() as server:
        level = send(server, ["ok", "other_id"], tmp_path, api="generate")
    assert metrics.failures(level) == {"wrong_answer_id": 1}


def test_the_key_is_sent_and_never_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key reaches the server, which echoes it in an error; neither key nor header is in the record."""
    monkeypatch.setenv("BENCH_KEY", "sk-very-secret-123")
    with faulty_server() as server:
        level = send(server, ["echo_key", "ok"], tmp_path, api_key_env="BENCH_KEY")
    assert server.authorizations == {"Bearer sk-very-secret-123"}
    assert metrics.failures(level) == {"http_4xx": 1}
    text = (tmp_path / "level.jsonl").read_text()
    assert "sk-very-secret-123" not in text and "401" in text


def test_open_loop_does_not_wait_for_answers(tmp_path: Path) -> None:
    """At 100 a second against answers of about 0.5 s, requests are sent when due and TTFT counts from due."""
    with faulty_server(gap_s=0.05) as server:
        level = send(server, ["ok"] * 60, tmp_path, rate=100.0, arrival="constant")
    records = sorted(level.requests, key=lambda r: r["due_ns"])
    gaps = [b["due_ns"] - a["due_ns"] for a, b in zip(records, records[1:], strict=False)]
    assert all(abs(g - 10_000_000) < 1_000 for g in gaps)
    assert all(r["sent_ns"] >= r["due_ns"] for r in records)
    assert sum(w["in_flight_max"] for w in level.header["client"]["workers"]) >= 30
    late = sorted((r["sent_ns"] - r["due_ns"]) / 1e9 for r in records)
    assert late[len(late) // 2] < 0.1
    summary = metrics.level_summary(level)
    assert summary["requests_ok"].value == 60
    assert summary["achieved_of_offered"].value is not None


def test_poisson_arrivals_are_seeded_and_have_the_asked_rate() -> None:
    """The mean distance of 4,000 arrivals is 1/rate within 5%; the same seed gives the same times, another others."""
    one, again, other = (arrival_offsets_ns(4000, 50.0, "poisson", s) for s in (1, 1, 2))
    assert one == again != other
    assert one[-1] / 3999 / 1e9 == pytest.approx(1 / 50, rel=0.05)
    assert one[0] == 0 and one == sorted(one)


def test_coordinated_omission_shows_in_ttft(tmp_path: Path) -> None:
    """A closed loop of one slot behind a slow answer: the wait is in the schedule, not in the next request's TTFT."""
    with faulty_server(gap_s=0.03) as server:
        closed = send(server, ["ok"] * 4, tmp_path, concurrency=1)
    for a, b in zip(closed.requests, closed.requests[1:], strict=False):
        assert b["due_ns"] == a["end_ns"]


def test_two_workers_start_together_and_send_everything_once(tmp_path: Path) -> None:
    """Requests are dealt out, both begin within some milliseconds, warm-up or not; the merged record is whole, by time."""
    with faulty_server(gap_s=0.002) as server:
        warm = [Request(f"w{i}", f"FAULT:ok warm {i}", 40) for i in range(3)]
        level = send(server, ["ok"] * 21, tmp_path, workers=2, concurrency=5, warmup=warm)
        assert server.seen["ok"] == 24
    starts = [w["start_ns"] for w in level.header["client"]["workers"]]
    assert abs(starts[0] - starts[1]) < 100_000_000
    assert [r["failure"] for r in level.requests] == [None] * 21
    assert sorted(r["i"] for r in level.requests) == list(range(21))
    sent = [r["sent_ns"] for r in level.requests]
    assert sent == sorted(sent) and len(level.header["client"]["workers"]) == 2


def test_warm_up_is_sent_first_and_never_recorded(tmp_path: Path) -> None:
    """Warm-up requests reach the server before the window; a measured prompt among them is refused."""
    with faulty_server(gap_s=0.001) as server:
        level = send(server, ["ok"] * 4, tmp_path, warmup=[Request("w", "FAULT:ok warm", 3)])
        assert server.seen["ok"] == 5
        with pytest.raises(BadInput, match="warm-up"):
            send(server, ["ok"] * 4, tmp_path, warmup=requests_for(["ok"]))
    assert level.header["client"]["workers"][0]["warmup"] == {"sent": 1, "answered": 1}
    assert len(level.requests) == 4


def test_deadline_keeps_what_finished(tmp_path: Path) -> None:
    """After max_seconds nothing is sent; what was in flight finishes; the rest counts as never sent."""
    with faulty_server(gap_s=0.02) as server:
        level = send(server, ["ok"] * 100, tmp_path, concurrency=2, max_seconds=0.7, drain_s=5.0)
    assert level.header["stopped"] == "deadline"
    assert 2 <= level.header["sent"] < 100 and all(r["failure"] is None for r in level.requests)


def test_a_level_runs_beside_a_running_event_loop(tmp_path: Path) -> None:
    """In a Jupyter kernel a loop is already running in this thread; the level does not care."""

    async def cell() -> metrics.Level:
        return send(server, ["ok"] * 3, tmp_path)

    with faulty_server(gap_s=0.001) as server:
        level = asyncio.run(cell())
    assert len(level.requests) == 3


def interruptible(url: str, out: Path) -> subprocess.Popen[bytes]:
    code = (
        "import sys; from pathlib import Path; from lib.load.client import *\n"
        "rs = [Request(f'r{i}', f'FAULT:ok {i}', 9) for i in range(500)]\n"
        "run_level(sys.argv[1], 'completions', rs, concurrency=4, model='m', out=Path(sys.argv[2]))\n"
    )
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", code, url, str(out)], cwd=root, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def test_ctrl_c_keeps_what_is_measured(tmp_path: Path) -> None:
    """SIGINT in mid-level: the record is whole, finished requests are ok, those in flight are `interrupted`."""
    out = tmp_path / "level.jsonl"
    with faulty_server(gap_s=0.01) as server:
        process = interruptible(server.base_url, out)
        wait_for(lambda: server.seen["ok"] >= 12)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=20)
    assert process.returncode != 0 and b"KeyboardInterrupt" in error
    level = read_level(out)
    assert level.header["stopped"] == "interrupted"
    good = sum(r["failure"] is None for r in level.requests)
    assert good >= 4 and metrics.failures(level) == {"interrupted": level.header["sent"] - good}
    assert not list(tmp_path.glob(".level*"))


def test_a_killed_parent_leaves_no_sender(tmp_path: Path) -> None:
    """SIGKILL of the notebook: the sending process notices and ends; no half record is left under the final name."""
    out = tmp_path / "level.jsonl"
    with faulty_server(gap_s=0.01) as server:
        process = interruptible(server.base_url, out)
        wait_for(lambda: server.seen["ok"] >= 8)
        process.kill()
        process.wait()
        time.sleep(0.5)
        before = server.seen["ok"]
        time.sleep(0.7)
        assert server.seen["ok"] <= before + 1
    assert not out.exists()


def wait_for(condition: object, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


def test_progress_is_reported(tmp_path: Path) -> None:
    """A level of a second reports done, total and in flight at least once."""
    seen: list[dict[str, int]] = []
    with faulty_server(gap_s=0.02) as server:
        send(server, ["ok"] * 20, tmp_path, progress=seen.append)
    assert seen and all({"done", "of", "in_flight"} <= set(s) and s["of"] == 20 for s in seen)


def test_what_is_told_while_it_sends_agrees_with_the_record(tmp_path: Path) -> None:
    """At each moment the sums are those of the requests that the record shows as ended by then; failures are apart."""
    seen: list[dict[str, int]] = []
    with faulty_server(gap_s=0.02) as server:
        names = ["ok"] * 16 + ["http_500"] * 4
        level = send(server, names, tmp_path, progress=seen.append, gap_timeout_s=20.0, first_timeout_s=20.0)
    last = seen[-1]
    by_end = sorted((r for r in level.requests if metrics.is_ok(r)), key=lambda r: r["end_ns"])
    ended = by_end[: last["ok"]]
    failed = [r for r in level.requests if not metrics.is_ok(r)]
    assert 0 < last["ok"] <= len(by_end) and last["ok"] + last["failed"] == last["done"], (last, metrics.failures(level))
    assert last["failed"] <= len(failed), (last, metrics.failures(level))
    assert last["whole_ns"] == sum(r["end_ns"] - r["due_ns"] for r in ended)
    assert 0 < last["first_ns"] <= last["whole_ns"] and last["since_ns"] >= ended[-1]["end_ns"] - level.header["window"]["start_ns"]
    assert [s["ok"] for s in seen] == sorted(s["ok"] for s in seen)


def test_several_sending_processes_are_summed() -> None:
    """Counts add up, the time since the window began is the longest; a process that says less counts as nothing."""
    one = {"done": 2, "of": 5, "in_flight": 1, "ok": 2, "failed": 0, "first_ns": 10, "whole_ns": 30, "since_ns": 7}
    made = together([one, {"done": 1, "of": 5, "in_flight": 2}, one | {"since_ns": 9}])
    assert made == {"done": 5, "of": 15, "in_flight": 4, "ok": 4, "failed": 0, "first_ns": 20, "whole_ns": 60, "since_ns": 9}


def test_long_generate_streams_keep_little_memory(tmp_path: Path) -> None:
    """Cumulative events of /generate are trimmed while they come; sizes stay the sent ones and the text is whole."""
    with faulty_server(gap_s=0.0) as server:
        requests = [Request("a", "FAULT:ok a", 1500)]
        path = run_level(server.base_url, "generate", requests, concurrency=1, out=tmp_path / "l.jsonl", keep_text=True)
    (record,) = read_level(path).requests
    assert record["failure"] is None and record["usage"]["completion_tokens"] == 1500
    assert record["text"] == "".join(TEXT[i % 9] for i in range(1500))
    assert record["tokens"] == [1] * 1500
    assert record["sizes"] == sorted(record["sizes"]) and record["sizes"][-2] > 12_000


@pytest.mark.parametrize(
    ("how", "part"),
    [
        ({"concurrency": 0}, "below 1"),
        ({"concurrency": None}, "either concurrency"),
        ({"concurrency": None, "rate": 0.0}, "rate 0.0"),
        ({"rate": 5.0}, "either concurrency"),
        ({"workers": 0}, "workers 0"),
        ({"model": None}, "served model name"),
        ({"api_key_env": "NO_SUCH_VARIABLE_X"}, "NO_SUCH_VARIABLE_X"),
        ({"concurrency": None, "rate": 1.0, "arrival": "burst"}, "burst"),
    ],
)
def test_contradictory_arguments_are_refused(how: dict[str, object], part: str, tmp_path: Path) -> None:
    """One message names each fault; nothing is sent and nothing is written."""
    settings: dict[str, object] = {"concurrency": 1, "model": "m"} | how
    with pytest.raises(BadInput, match=part):
        run_level("http://127.0.0.1:1", "completions", requests_for(["ok"]), out=tmp_path / "x", **settings)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:30000", "ftp://a", "http://", "http://a:99999", "http://user:pw@host", "http://a/?x=1", "http://a:b"],
)
def test_a_wrong_url_is_refused(url: str, tmp_path: Path) -> None:
    """What is not a base URL is refused with an example of one; credentials are not repeated."""
    with pytest.raises(BadInput) as caught:
        run_level(url, "generate", requests_for(["ok"]), concurrency=1, out=tmp_path / "x")
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize(
    ("api", "prompt"), [("chat", (1, 2)), ("generate", ({"role": "user", "content": "x"},)), ("completions", "")]
)
def test_prompts_that_an_endpoint_cannot_take(api: str, prompt: object) -> None:
    """Ids to chat, messages to /generate, and no prompt at all are refused before anything is sent."""
    with pytest.raises(BadInput):
        request_body(Request("r", prompt, 4), api, "m", None)  # type: ignore[arg-type]


def test_request_bodies() -> None:
    """The three bodies as SGLang takes them."""
    ids = json.loads(request_body(Request("r", (1, 2), 4), "generate", None, "wb-1"))
    assert ids == {
        "input_ids": [1, 2],
        "sampling_params": {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True},
        "rid": "wb-1",
        "stream": True,
    }
    chat = json.loads(request_body(Request("r", "hi", 4, extra={"top_p": 0.5}), "chat", "m", None, True))
    assert chat["messages"] == [{"role": "user", "content": "hi"}] and chat["top_p"] == 0.5
    assert chat["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize("damage", ["cut", "line lost", "line twice", "not json", "empty", "no header"])
def test_a_damaged_record_is_refused(damage: str, tmp_path: Path) -> None:
    """A record that was cut or edited is not summarised."""
    with faulty_server(gap_s=0.001) as server:
        send(server, ["ok"] * 3, tmp_path)
    path = tmp_path / "level.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text({
        "cut": "".join(lines)[:-40],
        "line lost": "".join(lines[:-1]),
        "line twice": "".join([*lines[:-1], lines[-2]]),
        "not json": "hello\n",
        "empty": "",
        "no header": "".join(lines[1:]),
    }[damage])  # fmt: skip
    with pytest.raises(UnreadableFile):
        level_summary(path)


def test_a_changed_record_changes_the_number(tmp_path: Path) -> None:
    """Every number is recomputed from the file: a token count edited in it is the one that is reported."""
    with faulty_server(gap_s=0.001) as server:
        send(server, ["ok"] * 3, tmp_path)
    path = tmp_path / "level.jsonl"
    before = level_summary(path)["output_tokens"].value
    path.write_text(path.read_text().replace('"completion_tokens":9', '"completion_tokens":10', 1))
    assert (before, level_summary(path)["output_tokens"].value) == (27, 28)


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    """A file where the folder should be, and a disk without room: one message, nothing left behind."""
    (tmp_path / "file").write_text("x")
    with faulty_server(gap_s=0.001) as server, pytest.raises(BadInput, match="level's record"):
        send(server, ["ok"], tmp_path / "file")
    if Path("/dev/full").exists():
        from lib.load import client

        with pytest.raises(BadInput, match="No space left"), client._room_for(tmp_path / "x"):
            Path("/dev/full").write_text("x" * 100_000)


def test_no_threads_or_descriptors_are_left(tmp_path: Path) -> None:
    """Twenty levels leave as many open files and threads as one."""
    with faulty_server(gap_s=0.0) as server:
        send(server, ["ok"], tmp_path)
        time.sleep(0.2)
        files, threads = open_files(), threading.active_count()
        for _ in range(5):
            send(server, ["ok"], tmp_path)
        time.sleep(0.3)
        assert open_files() <= files + 2 and threading.active_count() <= threads + 1


def test_without_uvloop_the_plain_loop_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where uvloop is missing, asyncio's own loop does the same, and the record says which loop it was."""
    monkeypatch.setenv("WORKBOOK_LOOP", "asyncio")
    with faulty_server(gap_s=0.001) as server:
        level = send(server, ["ok", "cut_chunks", "reset_mid_stream", "twice_later", "ok"], tmp_path, concurrency=2)
    assert level.header["client"]["workers"][0]["loop"] == "asyncio"
    assert metrics.failures(level) == {"duplicate_answer": 1, "reset_mid_stream": 1}
