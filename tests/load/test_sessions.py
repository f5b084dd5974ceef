"""Sessions, replays and ramps: what is sent when, over real sockets, and what the numbers then mean."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from faulty_server import TEXT, faulty_server

from lib.errors import BadInput, UnreadableFile
from lib.load import metrics, workloads
from lib.load.client import Request, arrival_offsets_ns, read_level, run_level

ANSWER = "".join(TEXT)


def turns(session: str, names: list[str], think_s: float = 0.0, **more: Any) -> list[Request]:
    return [
        Request(f"{session}-{t}", f"FAULT:{name} {session} turn {t}. ", 9, session=session, think_s=think_s if t else 0.0, **more)
        for t, name in enumerate(names)
    ]


@pytest.mark.parametrize("api", ["completions", "chat", "generate"])
@pytest.mark.parametrize("scripted", [False, True])
def test_a_turn_is_everything_said_before_it(api: str, scripted: bool, tmp_path: Path) -> None:
    """Turn 2's prompt is turn 0, its answer (the server's, or the script's), turn 1, its answer, and what turn 2 adds."""
    requests = turns("s", ["ok", "ok", "ok"], answer_before="a \"script\"\n" if scripted else None)
    with faulty_server(gap_s=0.001) as server:
        path = run_level(server.base_url, api, requests, out=tmp_path / "l", concurrency=2, model="m")
        bodies = server.bodies
    level = read_level(path)
    assert metrics.failures(level) == {} and [r["turn"] for r in level.requests] == [0, 1, 2]
    answer = "a \"script\"\n" if scripted else ANSWER
    said = [r.prompt for r in requests]
    if api == "chat":
        assert [m["role"] for m in bodies[2]["messages"]] == ["user", "assistant", "user", "assistant", "user"]
        assert [m["content"] for m in bodies[2]["messages"]] == [said[0], answer, said[1], answer, said[2]]
    else:
        prompt = bodies[2]["prompt" if api == "completions" else "text"]
        assert prompt == f"{said[0]}{answer}{said[1]}{answer}{said[2]}"
    assert "text" not in level.requests[0] and "content" not in level.requests[0]


def test_a_prompt_that_is_also_the_models_name(tmp_path: Path) -> None:
    """The place of the prompt in a body is found by its key, not by its text."""
    said = "FAULT:ok x"
    requests = [Request("a", said, 2, session="s"), Request("b", said, 2, session="s")]
    with faulty_server(gap_s=0.001) as server:
        path = run_level(server.base_url, "completions", requests, out=tmp_path / "l", concurrency=1, model=said)
        assert [b["model"] for b in server.bodies] == [said, said] and server.bodies[1]["prompt"].startswith(said + TEXT[0])
    assert metrics.failures(read_level(path)) == {}


def test_thoughts_are_no_part_of_the_conversation(tmp_path: Path) -> None:
    """Reasoning tokens are timed and counted, and the next turn's history has the content alone."""
    with faulty_server(gap_s=0.001) as server:
        path = run_level(server.base_url, "chat", turns("s", ["thinks", "ok"]), out=tmp_path / "l", concurrency=1, model="m")
        messages = server.bodies[1]["messages"]
    assert messages[1] == {"role": "assistant", "content": ANSWER}
    record = read_level(path).requests[0]
    assert record["failure"] is None and record["kinds"][:3] == "rrr" and record["kinds"].count("c") == 9


def test_sessions_are_sequential_inside_and_side_by_side(tmp_path: Path) -> None:
    """C sessions at a time: a turn begins think_s after the end of the one before, and never two of one session at once."""
    requests = [r for s in "abcde" for r in turns(s, ["ok"] * 3, think_s=0.05)]
    with faulty_server(gap_s=0.004) as server:
        level = read_level(run_level(server.base_url, "completions", requests, out=tmp_path / "l", concurrency=2, model="m"))
    assert metrics.failures(level) == {} and len(level.requests) == 15
    by_session: dict[int, list[dict[str, Any]]] = {}
    for record in level.requests:
        by_session.setdefault(record["session"], []).append(record)
    for mine in by_session.values():
        for a, b in zip(mine, mine[1:], strict=False):
            assert b["due_ns"] == a["end_ns"] + 50_000_000 and b["sent_ns"] >= b["due_ns"]
            assert b["slot"] == a["slot"]
    spans = [(m[0]["sent_ns"], m[-1]["end_ns"]) for m in by_session.values()]
    assert max(sum(a < t < b for a, b in spans) for t in [s for s, _ in spans]) <= 2
    assert level.header["load"]["sessions"] == 5


def test_a_failed_turn_ends_its_session_alone(tmp_path: Path) -> None:
    """The turns after a failed one are not sent and are counted; other sessions go on; planned = sent + unsent."""
    requests = [*turns("a", ["ok", "http_500", "ok", "ok"]), *turns("b", ["ok"] * 4)]
    for workers in (1, 2):
        with faulty_server(gap_s=0.001) as server:
            path = run_level(
                server.base_url, "chat", requests, out=tmp_path / f"l{workers}", concurrency=2, model="m", workers=workers
            )
        level = read_level(path)
        assert metrics.failures(level) == {"http_5xx": 1}
        assert (level.header["planned"], level.header["sent"], level.header["unsent_after_failed_turn"]) == (8, 6, 2)


def test_prefix_reuse_by_hand() -> None:
    """Turn 0: 100 prompt + 10 answered; turn 1 has 80 cached of these 110: reuse 0.727, cached 80 of 150 + 100."""
    base = {"failure": None, "due_ns": 0, "sent_ns": 0, "end_ns": 10**9, "t_us": [1, 2], "kinds": "cc", "tokens": [5, 5],
            "bundled": 0, "session": 1, "detail": None}  # fmt: skip
    rows = [
        base | {"i": 0, "turn": 0, "usage": {"prompt_tokens": 100, "completion_tokens": 10}, "meta": {"cached_tokens": 0}},
        base | {"i": 1, "turn": 1, "usage": {"prompt_tokens": 150, "completion_tokens": 10}, "meta": {"cached_tokens": 80}},
    ]
    load = {"mode": "closed", "concurrency": 1, "rate_per_s": None, "workers": 1}
    worker = {"lag_ns": None, "cpu_frac": 0.1, "peak_rss_bytes": 1, "unread_bytes": None, "in_flight_max": 1}
    level = metrics.Level({"load": load, "client": {"workers": [worker]}, "sent": 2, "planned": 2}, rows)
    summary = metrics.level_summary(level)
    assert summary["prefix_reuse_frac"].value == pytest.approx(80 / 110)
    assert summary["cached_frac"].value == pytest.approx(80 / 250)
    assert [r["turn"] for r in metrics.turn_rows(level)] == [0, 1]
    assert metrics.turn_rows(level)[0]["prefix_reuse_frac"].value is None
    silent = [r | {"meta": None} for r in rows]
    assert metrics.level_summary(metrics.Level(level.header, silent))["prefix_reuse_frac"].reason


def test_agentic_sessions_are_seeded_grow_and_have_think_times() -> None:
    """The same seed gives the same; each turn adds a tool result; the context limit ends a session; no prompt is warm-up."""
    one, again, other = (workloads.agentic_sessions(4, 5, 64, seed=s) for s in (1, 1, 2))
    assert one == again and one.sha256 != other.sha256 and len(one.requests) == 20 and len(one.warmup) == 1
    assert {r.session for r in one.requests} == {"s0", "s1", "s2", "s3"} and one.warmup[0].session is None
    assert all(0 <= r.think_s <= 2.0 for r in one.requests) and all(r.think_s == 0 for r in one.requests if r.id.endswith("-0"))
    assert len({r.prompt_sha256() for r in (*one.requests, *one.warmup)}) == 21
    short = workloads.agentic_sessions(4, 50, 64, first_len=500, max_context=3000, seed=1)
    assert all(1 <= sum(r.session == s for r in short.requests) < 50 for s in ("s0", "s1"))
    with pytest.raises(BadInput, match="max_context"):
        workloads.agentic_sessions(1, 2, 64, first_len=5000, max_context=1000)
    fixed = workloads.agentic_sessions(2, 3, 16, scripted=True)
    assert all((r.answer_before is None) == r.id.endswith("-0") for r in fixed.requests)


def test_sharegpt_conversations(tmp_path: Path) -> None:
    """Human turns become requests, the file's answers stand between them; rows of other shapes are left out."""
    rows = [
        {"conversations": [{"from": "human", "value": f"q{i}"}, {"from": "gpt", "value": "a" * 40}, {"from": "human", "value": "r"}]}
        for i in range(3)
    ]
    path = tmp_path / "s.json"
    path.write_text(json.dumps([*rows, {"conversations": [{"from": "human", "value": 3}]}, {"x": 1}]))
    made = workloads.chat_sessions_file(path, 2, warmup=1)
    assert len(made.requests) == 4 and len(made.warmup) == 1
    first, second = made.requests[:2]
    assert first.session == second.session and second.answer_before == "a" * 40 and first.max_tokens == 10
    with pytest.raises(BadInput, match="different conversations"):
        workloads.chat_sessions_file(path, 5)


MOONCAKE = [
    {"timestamp": 1000 + 40 * i, "input_length": 1100 + i, "output_length": 5 + i, "hash_ids": [7, 8, 100 + i]} for i in range(4)
]
OWN: list[dict[str, Any]] = [
    {"at_s": 0.1, "prompt": "FAULT:ok one", "output_len": 3},
    {"at_s": 0.0, "messages": [{"role": "user", "content": "FAULT:ok two"}], "output_len": 4},
]


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(r) for r in rows) + "\n")
    return path


def test_mooncake_traces(tmp_path: Path) -> None:
    """Lengths are exact with a vocabulary, equal hashes are equal blocks, times start at 0 and are scaled."""
    path = written(tmp_path / "t.jsonl", MOONCAKE)
    made = workloads.trace_file(path, vocab_size=500, time_scale=0.5)
    assert made.offsets_s == pytest.approx((0.0, 0.02, 0.04, 0.06))
    prompts = [r.prompt for r in made.requests]
    assert [len(p) for p in prompts] == [1100, 1101, 1102, 1103] and [r.max_tokens for r in made.requests] == [5, 6, 7, 8]
    assert prompts[0][:1024] == prompts[1][:1024] != prompts[0][76:1100] and prompts[0][1024:] != prompts[1][1024:1100]
    assert workloads.trace_file(path, vocab_size=500).sha256 != made.sha256
    text = workloads.trace_file(path, limit=2)
    assert len(text.requests) == 2 and len(str(text.requests[0].prompt).split()) == 1100
    assert workloads.trace_file(path, vocab_size=9, max_input_len=50).settings["cut_to_limits"] == 4


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        ([{"input_length": 5, "output_length": 5}], "no at_s"),
        ([{"at_s": 0, "input_len": 5}], "no output_len"),
        ([{"at_s": 0, "output_len": 5}], "neither prompt"),
        ([{"at_s": "x", "input_len": 1, "output_len": 5}], "no at_s"),
        ([{"at_s": 0, "input_len": -1, "output_len": True}], "no output_len"),
    ],
)
def test_traces_that_cannot_be_replayed(rows: list[Any], part: str, tmp_path: Path) -> None:
    """What is missing is named with its line."""
    with pytest.raises(UnreadableFile, match=f"line 1: {part}"):
        workloads.trace_file(written(tmp_path / "t.jsonl", rows))


def test_a_replay_keeps_the_recorded_times(tmp_path: Path) -> None:
    """Each request is due at its own time after the start, in order of time, however slow the answers are."""
    path = written(tmp_path / "t.jsonl", [{"at_s": i * 0.03, "prompt": f"FAULT:ok {i}", "output_len": 9} for i in range(8)])
    made = workloads.trace_file(path, warmup=0)
    with faulty_server(gap_s=0.02) as server:
        level = read_level(
            run_level(server.base_url, "completions", made.requests, out=tmp_path / "l", offsets_s=made.offsets_s, model="m")
        )
    due = [r["due_ns"] - level.header["window"]["start_ns"] for r in level.requests]
    assert due == pytest.approx([i * 30_000_000 for i in range(8)], abs=2)
    assert level.header["load"]["mode"] == "open" and level.header["load"]["arrival"] == "replay"
    assert metrics.level_summary(level)["achieved_of_offered"].value == pytest.approx(1.0, abs=0.2)
    own = workloads.trace_file(written(tmp_path / "o.jsonl", OWN), warmup=0)
    assert own.offsets_s == (0.0, 0.1) and [r.prompt_kind() for r in own.requests] == ["messages", "text"]


def test_a_rate_ramp() -> None:
    """From 0 to 100/s in 2 s, then 100/s: 100 arrivals in the ramp, the first half of its time has a quarter of them."""
    offsets = [x / 1e9 for x in arrival_offsets_ns(300, 100.0, "constant", 0, 2.0, 0.0)]
    assert sum(x < 2.0 for x in offsets) == 100 and sum(x < 1.0 for x in offsets) == 25
    assert offsets[200] - offsets[100] == pytest.approx(1.0, abs=1e-6) and offsets == sorted(offsets)
    flat = arrival_offsets_ns(5, 10.0, "constant", 0, 3.0, 10.0)
    assert flat == pytest.approx([0, 1e8, 2e8, 3e8, 4e8])
    assert arrival_offsets_ns(5, 10.0, "constant", 0) == flat


def test_a_concurrency_ramp(tmp_path: Path) -> None:
    """Four slots over 0.8 s start 0.2 s apart, also dealt out to two processes; the steady window begins after the last."""
    requests = [Request(f"r{i}", f"FAULT:ok {i}", 9) for i in range(40)]
    for workers in (1, 2):
        with faulty_server(gap_s=0.008) as server:
            path = run_level(
                server.base_url, "completions", requests, out=tmp_path / f"l{workers}", concurrency=4, ramp_s=0.8,
                model="m", workers=workers,
            )  # fmt: skip
        level = read_level(path)
        firsts = {s: min(r["due_ns"] for r in level.requests if r["slot"] == s) for s in range(4)}
        start = level.header["window"]["start_ns"]
        assert [round((firsts[s] - start) / 2e8, 1) for s in range(4)] == pytest.approx([0, 1, 2, 3], abs=0.3)
        steady = metrics.LevelView(level).steady
        assert not isinstance(steady, str) and steady[0] > firsts[3]
        rows = metrics.timeline(level, 8)
        assert sum(r["due"] for r in rows) == 40 and rows[0]["in_flight_mean"] < 2.5
        total = sum(r["output_tokens_per_s"] * (r["to_s"] - r["from_s"]) for r in rows)
        assert total == pytest.approx(360, abs=1e-6)


def test_ctrl_c_in_a_think_time_does_not_wait_for_it(tmp_path: Path) -> None:
    """A deadline inside a long think time ends the level at once; the unsent turn is no failure."""
    with faulty_server(gap_s=0.001) as server:
        path = run_level(
            server.base_url, "completions", turns("a", ["ok", "ok"], think_s=60.0), out=tmp_path / "l", concurrency=1,
            model="m", max_seconds=0.4,
        )  # fmt: skip
    level = read_level(path)
    assert level.header["stopped"] == "deadline" and level.header["sent"] == 1 and metrics.failures(level) == {}
    assert level.header["unsent_after_failed_turn"] == 0


@pytest.mark.parametrize(
    ("how", "part"),
    [
        ({"offsets_s": [0.0]}, "2 requests"),
        ({"offsets_s": [1.0, 0.0]}, "rising order"),
        ({"offsets_s": [-1.0, 0.0]}, "from 0 on"),
        ({"offsets_s": [0.0, 1.0], "concurrency": 1}, "either concurrency"),
        ({"offsets_s": [0.0, 1.0], "ramp_s": 1.0}, "ramp"),
        ({"concurrency": 1, "ramp_s": -1.0}, "ramp"),
    ],
)
def test_impossible_loads_are_refused(how: dict[str, Any], part: str, tmp_path: Path) -> None:
    """One message names the fault and nothing is sent."""
    requests = [Request("a", "x", 1), Request("b", "y", 1)]
    with pytest.raises(BadInput, match=re.escape(part)):
        run_level("http://127.0.0.1:1", "generate", requests, out=tmp_path / "x", **how)
    with pytest.raises(BadInput, match="not token ids"):
        run_level(
            "http://127.0.0.1:1", "generate", [Request("a", (1, 2), 1, session="s")], out=tmp_path / "x", concurrency=1
        )
