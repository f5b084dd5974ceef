"""The judge and the client against each other: what is shown is what was sent. No test gates on time."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lib.errors import BadInput
from lib.load import judge, metrics
from lib.load.judge import Plan, Truth

KINDS = ["c", "python"]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Judges built and calibrations kept in a folder of the tests'."""
    patch = pytest.MonkeyPatch()
    patch.setenv("WORKBOOK_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


def skip_without_compiler(kind: str) -> None:
    if kind == "c" and judge.build_judge()[0] is None:
        pytest.skip("no C compiler")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("api", ["completions", "chat", "generate"])
def test_the_client_shows_what_the_judge_did(kind: str, api: str) -> None:
    """Every request, token and event is there, and each event was received after it was sent, soon."""
    skip_without_compiler(kind)
    plan = Plan(step_s=0.004, stall_s=0.01, first_min_s=0.01, first_max_s=0.03)
    level, truth, used = judge.judged_level(plan, streams=8, requests=24, tokens=20, api=api, kind=kind)
    assert used == kind and metrics.failures(level) == {}
    assert truth.tokens.tolist() == [20] * 24 and all(s.size == 20 for s in truth.sent_ns)
    assert all(r["usage"]["completion_tokens"] == 20 and len(metrics.token_times_us(r)) == 20 for r in level.requests)
    # requests are matched by the judge's ordinal, which its ids carry
    by_ordinal = {int(r["server_id"].removeprefix("judge-"), 16): r for r in level.requests}
    assert sorted(by_ordinal) == list(range(1, 25))
    for number, (read, sent) in enumerate(zip(truth.read_ns, truth.sent_ns, strict=True), 1):
        row = by_ordinal[number]
        late = np.array(metrics.token_times_us(row)) * 1000 + row["sent_ns"] - sent
        assert row["sent_ns"] <= read
        assert late.min() >= -2_000  # microsecond rounding
        assert np.median(late) < 50_000_000


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_is_kept(kind: str) -> None:
    """Gaps of a step, stalls of a step and the stall, waits inside the asked range: the same seed, the same waits."""
    skip_without_compiler(kind)
    plan = Plan(step_s=0.01, stall_frac=1.0, stall_s=0.02, first_min_s=0.02, first_max_s=0.04)
    _, truth, _ = judge.judged_level(plan, streams=2, requests=4, tokens=6, kind=kind)
    assert np.median(truth.gaps_s()) == pytest.approx(0.03, abs=0.01)
    assert truth.ttft_s().min() >= 0.0199
    calm = Plan(step_s=0.01, stall_frac=0.0, first_min_s=0.02, first_max_s=0.02)
    _, truth, _ = judge.judged_level(calm, streams=2, requests=4, tokens=6, kind=kind)
    assert np.median(truth.gaps_s()) == pytest.approx(0.01, abs=0.005)


@pytest.mark.parametrize("kind", KINDS)
def test_speculation_is_seen_as_tokens_per_event(kind: str) -> None:
    """Three tokens an event: chunk gap and per-token latency differ by three in what the client shows."""
    skip_without_compiler(kind)
    plan = Plan(step_s=0.012, stall_frac=0, tokens_per_event=3, first_min_s=0.01, first_max_s=0.02)
    level, truth, _ = judge.judged_level(plan, streams=4, requests=8, tokens=31, api="generate", kind=kind)
    assert truth.tokens.tolist() == [31] * 8 and all(s.size == 11 for s in truth.sent_ns)
    view = metrics.LevelView(level)
    latencies = view.token_latencies
    assert not isinstance(latencies, str)
    assert np.median(view.gaps[0]) == pytest.approx(3 * np.median(latencies[0]), rel=0.01)


def test_the_judge_ends_with_its_parent() -> None:
    """Leaving the block ends it and frees the port, also after an exception."""
    with pytest.raises(RuntimeError), judge.running_judge(Plan()) as running:
        pid, port = running.process.pid, running.port
        raise RuntimeError
    assert running.process.poll() is not None and not Path(f"/proc/{pid}/cmdline").exists()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_an_impossible_plan_is_refused() -> None:
    """The C judge refuses unknown options and impossible plans with exit code 2 before it listens."""
    skip_without_compiler("c")
    from lib.errors import ServerError

    with pytest.raises(ServerError), judge.running_judge(Plan(tokens_per_event=0), kind="c"):
        pass


def test_no_compiler_falls_back_to_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler the Python judge serves, and says so."""
    monkeypatch.setenv("PATH", "/nonexistent")
    built, why = judge.build_judge(Path("/nonexistent-folder"))
    assert built is None and "compiler" in why
    with judge.running_judge(Plan()) as running:
        assert running.kind == "python" and running.truth().read_ns.size == 0


def test_a_source_that_does_not_compile_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A compiler that fails gives its last line, not a traceback, and leaves nothing behind."""
    fake = tmp_path / "cc"
    fake.write_text("#!/bin/sh\necho 'judge.c:1: error: no headers' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CC", str(fake))
    built, why = judge.build_judge(tmp_path / "folder")
    assert built is None and "no headers" in why and not list((tmp_path / "folder").iterdir())


def test_calibration_is_cached_and_its_key_holds_the_load() -> None:
    """The second call for one load answers from the cache; another load is calibrated anew."""
    one = judge.calibrate(2, chunks_per_s=100)
    assert one["streams"] == 2 and one["seconds"] <= 10
    if one["status"] == "ok":
        begun = time.monotonic()
        again = judge.calibrate(2, chunks_per_s=100)
        assert again["cached"] and time.monotonic() - begun < 0.5
        assert again["made_unix_s"] == one["made_unix_s"]
    keys = {judge._cache_key(s, r, a, w, None) for s in (1, 2) for r in (1.0, 9.0) for a in ("a", "b") for w in (1, 2)}
    assert len(keys) == 16


@pytest.mark.parametrize("how", [{"streams": 0}, {"streams": 1, "workers": 0}, {"streams": 1, "chunks_per_s": 0.0}])
def test_impossible_calibrations(how: dict[str, Any]) -> None:
    """No streams, no workers, no load."""
    with pytest.raises(BadInput):
        judge.calibrate(**how)


def truth_of(lag_mean_s: float = 0.0) -> Truth:
    one = np.array([1], dtype=np.int64)
    return Truth(one, one, one, (np.array([2, 3], dtype=np.int64),), 1, lag_mean_s, lag_mean_s, 0)


GOOD = judge.Comparison(1.0, 100, 100, 100, (0.1, 0.1), (0.1, 0.1), (0.02, 0.02), (0.06, 0.06))


@pytest.mark.parametrize(
    ("change", "lag", "kind", "rate", "expected"),
    [
        ({}, 0.0, "c", 100, "ok"),
        ({"ttft_p50_s": (0.106, 0.1)}, 0.0, "c", 100, "client_bound"),
        ({"gap_p50_s": (0.0, 0.02)}, 0.0, "c", 100, "client_bound"),
        ({"gap_p99_s": (0.09, 0.06)}, 0.0, "c", 100, "client_bound"),
        ({"share": 0.9}, 0.0, "c", 100, "client_bound"),
        ({"share": 0.9}, 0.5, "c", 100, "not_calibrated"),
        ({}, 0.0, "python", 1e6, "not_calibrated"),
    ],
)
def test_what_a_comparison_leads_to(change: dict[str, Any], lag: float, kind: str, rate: float, expected: str) -> None:
    """Each limit, and that a judge which could not pace proves nothing either way."""
    from dataclasses import replace

    status, reasons = judge.judged(replace(GOOD, **change), truth_of(lag), Plan(), kind, rate)
    assert status == expected and bool(reasons) == (expected != "ok")


def test_share_given_by_hand() -> None:
    """One slot: read at 0, last send at 10, read again at 12, last send at 20: busy 18 of 20."""
    connection, both = np.array([5, 5]), (np.array([1, 10]), np.array([15, 20]))
    truth = Truth(connection, np.array([0, 12]), np.array([2, 2]), both, 1, 0.0, 0.0, 0)
    assert truth.share_given() == pytest.approx(0.9)
    assert truth.ttft_s().tolist() == [1e-9, 3e-9]


@pytest.mark.parametrize("raw", [b"", b"x" * 48, np.array([1, 5, 0, 0, 0, 0], dtype="<i8").tobytes()])
def test_a_cut_truth_is_refused(raw: bytes) -> None:
    """No header, another version, or fewer requests than it says."""
    with pytest.raises(BadInput):
        judge.parse_truth(raw)


def test_a_broken_cache_entry_is_ignored() -> None:
    """A cut or foreign file in the cache is not a calibration."""
    folder = judge.cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    for content in ("", "[]", "{}", json.dumps({"made_unix_s": 1})):
        (folder / "x.json").write_text(content)
        assert judge._cached(folder / "x.json") is None
