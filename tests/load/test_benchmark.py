"""Notebook 03's measurements against a small server of the tests' own: plan, repeats, depths, stops, records, verdicts."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lib.errors import IdentityError
from lib.load import bench_forecast, bench_rows, bench_verdicts, benchmark
from lib.load.bench_forecast import Forecast, Frozen, Point
from lib.params import BenchmarkParams
from lib.records import Measured, Status
from lib.results import NotebookRun
from lib.server import telemetry
from lib.server.control import Control
from tests.conftest import TINY
from tests.load.bench_server import BenchServer


class Handle:
    """A server handle whose server is the tests' own."""

    def __init__(self, run: NotebookRun, server: BenchServer) -> None:
        self.params = SimpleNamespace(api_key_env=None, flags={}, environment={})
        self.key, self.tp_size, self.attached, self.name = "key", 1, False, "server"
        self.fail_identity = False
        self.live = SimpleNamespace(
            control=Control(server.base_url), base_url=server.base_url, launch_id="L1", check_identity=self.identity
        )

    def identity(self) -> list[str]:
        if self.fail_identity:
            raise IdentityError("the same server", "another one")
        return ["same"]

    def get(self) -> Any:
        return self.live

    def launches(self) -> list[Any]:
        return []


@pytest.fixture
def server() -> Iterator[BenchServer]:
    made = BenchServer()
    yield made
    made.close()


@pytest.fixture
def calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A calibration that always holds, so that verdicts speak of the server."""
    ok = {"status": "ok", "reasons": [], "streams": 4096, "chunks_per_s": 1e9, "workers": 1}
    monkeypatch.setattr(benchmark, "calibrate", lambda streams, api: ok)


def open_run(tmp_path: Path, offline: bool = False, **params: Any) -> NotebookRun:
    values: dict[str, Any] = {
        "profile": TINY, "concurrency": [1, 2, 4], "repeats": 2, "input_len": 64, "output_len": 8, "vocab_size": 512,
        "depths": [256, 1024], "depth_output_len": 4, "depth_suffix_len": 32, "agents": 2,
    }  # fmt: skip
    return NotebookRun("03", BenchmarkParams.model_validate(values | params), tmp_path, offline)


def forecast(**values: float) -> Frozen:
    points = [
        Point(
            id=name.replace("_", "-"), what=name, kind="level" if name.startswith("level") else "depth",
            concurrency=int(name.split("C")[1].split("_")[0]), context_tokens=10, new_tokens=1, value=value, unit="tok/s",
            terms_s={"weights": 1.0}, binds="weights",
        )
        for name, value in values.items()
    ]  # fmt: skip
    made = Forecast(inputs={}, points=points, knee=None, knee_reason="test")
    return Frozen(frozen_at="2026-01-01T00:00:00+00:00", frozen_monotonic_s=0, sha256="0" * 64, forecast=made)


EMPTY = forecast()


def test_repeats_are_interleaved_over_the_levels(tmp_path: Path, server: BenchServer, calibrated: None) -> None:
    """A B C A B C, each with its own record; resuming takes none of them again."""
    run = open_run(tmp_path)
    handle: Any = Handle(run, server)
    levels = benchmark.measure_levels(run, handle, EMPTY)
    starts = {m.stamp.name: bench_rows.level_of(m).header["window"]["start_ns"] for r in levels.values() for m in r}  # type: ignore[union-attr]
    assert sorted(starts, key=lambda n: starts[n]) == ["level-C1", "level-C2", "level-C4", "level-C1-r2", "level-C2-r2", "level-C4-r2"]
    sent = server.counters["num_requests"]
    hashes = {bench_rows.level_of(m).header["workload"]["sha256"] for m in levels[1]}  # type: ignore[union-attr]
    assert len(hashes) == 2  # other prompts at each repeat: nothing can be remembered from the one before
    again = benchmark.measure_levels(run, handle, EMPTY)
    assert server.counters["num_requests"] == sent and again.keys() == levels.keys()
    assert [m.stamp.started for m in again[4]] == [m.stamp.started for m in levels[4]]


def test_cold_is_computed_and_a_hit_comes_from_the_cache(tmp_path: Path, server: BenchServer, calibrated: None) -> None:
    """Exact depths in tokens, cold ones uncached, hits cached to the last token of the prefix, agents beside one user."""
    server.prefill_s = 0.0005  # 128 ms of a shallow prompt: no noise of a busy machine hides that
    run = open_run(tmp_path)
    cells = benchmark.measure_depths(run, Handle(run, server), EMPTY)  # type: ignore[arg-type]
    assert [(c.depth, c.concurrency) for c in cells] == [(256, 1), (256, 2), (1024, 1), (1024, 2)]
    for cell in cells:
        cold, hit = (bench_rows.level_in(cell.measurement.folder / half) for half in ("cold", "hit"))
        assert cold and hit and {r["usage"]["prompt_tokens"] for r in cold.requests} == {cell.depth}
        assert {r["usage"]["prompt_tokens"] for r in hit.requests} == {int(cell.depth) + 32}
        assert max(r["meta"]["cached_tokens"] for r in cold.requests) <= 2
        assert {r["meta"]["cached_tokens"] for r in hit.requests} == {cell.depth}
        assert hit.header["load"]["concurrency"] == cell.concurrency
    verdict = {v.id: v for v in bench_verdicts.verdicts(run, {}, cells, smoke(run, server), EMPTY)}
    assert verdict["prefix-hit"].status == Status.PASS and verdict["prefix-hit"].measured.value == 1.0  # type: ignore[union-attr]
    assert verdict["hit-pays"].status == Status.PASS


def test_a_hit_that_the_server_does_not_confirm_is_invalid(tmp_path: Path, server: BenchServer, calibrated: None) -> None:
    """Without a prefix cache the second half is as cold as the first: no trace of the treatment."""
    server.caching = False
    run = open_run(tmp_path, depths=[256], agents=1)
    cells = benchmark.measure_depths(run, Handle(run, server), EMPTY)  # type: ignore[arg-type]
    verdict = {v.id: v for v in bench_verdicts.verdicts(run, {}, cells, smoke(run, server), EMPTY)}
    assert verdict["prefix-hit"].status == Status.INVALID and "0%" in verdict["prefix-hit"].reason


def smoke(run: NotebookRun, server: BenchServer) -> Any:
    handle: Any = Handle(run, server)
    return benchmark.measure_smoke(run, handle)


def test_the_server_s_counts_equal_the_client_s_and_a_difference_is_found(
    tmp_path: Path, server: BenchServer, calibrated: None
) -> None:
    """The warm-up lies outside the window, so growth and client agree to the token; one token too many is a fail."""
    run = open_run(tmp_path / "a", repeats=1, depths=[])
    levels = benchmark.measure_levels(run, Handle(run, server), EMPTY)  # type: ignore[arg-type]
    verdict = {v.id: v for v in bench_verdicts.verdicts(run, levels, [], smoke(run, server), EMPTY)}
    assert verdict["server-truth"].status == Status.PASS and verdict["server-truth"].measured.n == 3  # type: ignore[union-attr]
    row = bench_rows.truth_rows(levels, [])[0]
    assert row["output tokens, server"].value == row["client"] == 4 * 8
    server.miscount = 1
    run = open_run(tmp_path / "b", repeats=1, depths=[], concurrency=[1])
    levels = benchmark.measure_levels(run, Handle(run, server), EMPTY)  # type: ignore[arg-type]
    verdict = {v.id: v for v in bench_verdicts.verdicts(run, levels, [], smoke(run, server), EMPTY)}
    assert verdict["server-truth"].status == Status.FAIL
    assert "generation_tokens +4" in verdict["server-truth"].reason and "not explained" in verdict["server-truth"].reason
    server.metrics = False
    run = open_run(tmp_path / "c", repeats=1, depths=[], concurrency=[1])
    levels = benchmark.measure_levels(run, Handle(run, server), EMPTY)  # type: ignore[arg-type]
    verdict = {v.id: v for v in bench_verdicts.verdicts(run, levels, [], smoke(run, server), EMPTY)}
    assert verdict["server-truth"].status == Status.INCONCLUSIVE and "--enable-metrics" in verdict["server-truth"].reason


@pytest.mark.parametrize(
    ("off", "failed", "words"),
    [
        ({"generation_tokens": 0.0, "requests": 0.0}, 0, "equal"),
        ({"generation_tokens": 9.0, "requests": 2.0}, 2, "2 requests failed"),
        ({"generation_tokens": 9.0, "requests": 3.0}, 0, "3 requests are not this client's"),
        ({"generation_tokens": -9.0, "requests": -1.0}, 0, "1 requests were not counted yet"),
        ({"generation_tokens": 9.0, "requests": 0.0}, 0, "not explained"),
    ],
)
def test_differences_are_explained_as_far_as_the_counts_say_it(off: dict[str, float], failed: int, words: str) -> None:
    """Each cause has its own words; what no count explains is called so."""
    assert words in bench_rows.explain(off, failed)


def test_a_failed_level_is_kept_and_the_next_goes_on(tmp_path: Path, server: BenchServer, calibrated: None) -> None:
    """At C=2 the server refuses one request: its cause is named, C=4 is measured, the verdict of C=2 fails."""
    seen = []

    def second(body: dict[str, Any]) -> bool:
        seen.append(body)
        return len(seen) == 7  # warm-up and 4 of C=1, warm-up of C=2, then its first

    server.fail_when = second
    run = open_run(tmp_path, repeats=1, depths=[])
    levels = benchmark.measure_levels(run, Handle(run, server), EMPTY)  # type: ignore[arg-type]
    rows = {r["concurrency"]: r for r in bench_rows.failure_rows(levels)}
    assert rows[2]["failed"] == 1 and rows[2]["sent"] == 4 and rows[4]["failed"] == 0 and rows[4]["ok"] == 8
    verdict = {v.id: v for v in bench_verdicts.verdicts(run, levels, [], smoke(run, server), EMPTY)}
    assert verdict["level-C2"].status == Status.FAIL and verdict["level-C4"].status != Status.FAIL


def test_another_server_makes_a_level_invalid(tmp_path: Path, server: BenchServer, calibrated: None) -> None:
    """No number of a level whose server was not the same before and after."""
    run = open_run(tmp_path, repeats=1, depths=[], concurrency=[1])
    handle: Any = Handle(run, server)
    handle.fail_identity = True
    levels = benchmark.measure_levels(run, handle, EMPTY)
    (trial,) = bench_verdicts.trials(run, levels)
    assert trial.outcome == "identity_mismatch" and trial.values == {}


def test_a_stop_file_keeps_the_level_in_progress_and_names_the_rest(tmp_path: Path, server: BenchServer, calibrated: None) -> None:
    """`touch stop`: what the running level has sent is kept and marked, later levels are named, resuming takes them."""
    server.step_s = 0.05
    run = open_run(tmp_path, repeats=1, depths=[], output_len=20)
    handle: Any = Handle(run, server)
    threading.Timer(1.6, lambda: (tmp_path / "stop").write_text("")).start()
    levels = benchmark.measure_levels(run, handle, EMPTY)
    assert list(levels) == [1]
    (row,) = bench_rows.origin_rows(levels)
    assert "stopped on request" in row["problem"] and "of 4 requests" in row["problem"]
    kept = bench_rows.level_of(levels[1][0])
    assert kept is not None and kept.header["stopped"] == "interrupted" and 0 < len(kept.requests) <= 4
    assert [s.split(":")[0] for s in run.skipped] == ["level-C2", "level-C4"]
    assert not (tmp_path / "stop").exists()
    rebuilt = open_run(tmp_path, offline=True, repeats=1, depths=[], output_len=20)
    assert list(benchmark.measure_levels(rebuilt, handle, EMPTY)) == [1] and len(rebuilt.skipped) == 2
    server.step_s = 0.001
    resumed = open_run(tmp_path, repeats=1, depths=[], output_len=20)
    levels = benchmark.measure_levels(resumed, handle, EMPTY)
    assert list(levels) == [1, 2, 4] and all(m.ok for r in levels.values() for m in r) and resumed.skipped == []


def test_an_interrupted_kernel_keeps_what_is_measured(tmp_path: Path, server: BenchServer, calibrated: None) -> None:
    """SIGINT in a level (what a notebook's stop button sends): the cell ends by itself and the rows are there."""
    server.step_s = 0.05
    run = open_run(tmp_path, repeats=1, depths=[], output_len=20)
    timer = threading.Timer(1.6, lambda: signal.raise_signal(signal.SIGINT))
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        levels = benchmark.measure_levels(run, Handle(run, server), EMPTY)  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGINT, previous)
    assert list(levels) == [1] and "stopped on request" in (levels[1][0].problem or "")
    server.step_s = 0.001
    verdict = {v.id: v for v in bench_verdicts.verdicts(run, levels, [], smoke(run, server), EMPTY)}
    assert verdict["level-C1"].status == Status.INCONCLUSIVE and verdict["levels"].status == Status.INCONCLUSIVE


def test_a_budget_ends_the_section_and_is_named(tmp_path: Path, server: BenchServer, calibrated: None) -> None:
    """Past the budget no further level begins; the first one always does."""
    run = open_run(tmp_path, depths=[], budget_s=0.001)
    levels = benchmark.measure_levels(run, Handle(run, server), EMPTY)  # type: ignore[arg-type]
    assert list(levels) == [1] and len(levels[1]) == 1
    assert len(run.skipped) == 5 and all("budget" in s for s in run.skipped)


def test_progress_says_level_requests_and_time_left(tmp_path: Path) -> None:
    """After a level that took twice its bound, the others are expected to take twice theirs."""
    said: list[str] = []
    run = SimpleNamespace(folder=tmp_path, say=said.append)
    items = [benchmark.Item(f"level-C{c}", s, lambda _: None) for c, s in ((1, 10.0), (2, 20.0), (4, 40.0))]  # type: ignore[arg-type,return-value]
    pace = benchmark.Pace(run, items)  # type: ignore[arg-type]
    assert pace.words(0) == "level-C1 (1 of 3)"  # nothing has been timed: nothing is promised
    pace.took(0, 20.0)
    pace.began = time.monotonic()
    assert pace.left_s(1) == pytest.approx(2 * 20 + 2 * 40, abs=0.1)
    pace.began = time.monotonic() - 10
    assert pace.left_s(1, 1, 4) == pytest.approx(30 + 80, abs=0.1)
    pace.watcher(1)({"done": 1, "of": 4, "in_flight": 2})
    assert "level-C2 (2 of 3), 1 of 4 requests, about" in said[-1] and said[-1].endswith("s left in all")


def test_a_recorded_level_says_nothing_about_the_pace(tmp_path: Path) -> None:
    """On a resume, records that are there take no time and must not promise that the rest takes none."""
    pace = benchmark.Pace(SimpleNamespace(folder=tmp_path, say=print), [benchmark.Item("a", 10.0, lambda _: None)])  # type: ignore[arg-type,return-value]
    pace.took(0, 0.01)
    assert pace.left_s(0) is None


# repeats and the knee -------------------------------------------------------------------------------------------------


def m(value: float, low: float | None = None, high: float | None = None, n: int = 4) -> Measured:
    return Measured(value=value, unit="tok/s", n=n, low=low, high=high)


def test_the_interval_holds_the_spread_between_repeats() -> None:
    """Two sure repeats that differ: the interval holds both, which neither alone and no mean of them would."""
    both = bench_rows.over_repeats([m(100, 99, 101), m(120, 119, 121)])
    assert both.value == 110 and both.n == 8
    assert both.low is not None and both.high is not None and both.low < 100 and both.high > 120
    assert both.reason is None


def test_the_docstring_s_example_of_two_repeats() -> None:
    """100 [95, 105] and 120 [115, 125]: 110 [94, 126]."""
    both = bench_rows.over_repeats([m(100, 95, 105), m(120, 115, 125)])
    assert both.low is not None and both.high is not None
    assert (round(both.low), both.value, round(both.high)) == (94, 110, 126)


def test_equal_repeats_are_surer_than_one() -> None:
    """Four equal repeats with noise inside: the interval shrinks to about half."""
    one, four = m(100, 90, 110), bench_rows.over_repeats([m(100, 90, 110)] * 4)
    assert four.low is not None and four.high is not None
    assert (four.high - four.low) / 20 == pytest.approx(0.5, abs=0.1) and one.low == 90


def test_one_repeat_keeps_its_interval_and_missing_ones_are_said() -> None:
    """Nothing is pooled from one; a repeat without a value is named, none is a reason."""
    assert bench_rows.over_repeats([m(5, 4, 6)]).low == 4
    lost = Measured(value=None, reason="client_bound")
    assert "1 of 2 repeats have no value (client_bound)" in str(bench_rows.over_repeats([m(5, 4, 6), lost]).reason)
    assert bench_rows.over_repeats([lost]).value is None
    bare = bench_rows.over_repeats([m(5), m(6)])
    assert bare.value == 5.5 and bare.low is None and "no interval" in str(bare.reason)


def curve(monkeypatch: pytest.MonkeyPatch, rates: dict[int, Measured]) -> Any:
    """Levels whose throughput is given."""
    levels = {c: [SimpleNamespace(folder=Path(f"/nowhere/{c}"), ok=True, problem=None, launch_ids=["L1"])] for c in rates}
    monkeypatch.setattr(bench_rows, "usable", lambda _: levels)
    monkeypatch.setattr(bench_verdicts, "usable", lambda _: levels)
    by_folder = {str(v[0].folder): rates[c] for c, v in levels.items()}
    one = lambda repeats, key: by_folder[str(repeats[0].folder)]  # noqa: E731
    monkeypatch.setattr(bench_rows, "pooled", one)
    monkeypatch.setattr(bench_verdicts, "pooled", one)
    return levels


@pytest.mark.parametrize(
    ("rates", "level", "words"),
    [
        ({1: m(100, 98, 102), 2: m(190, 188, 192), 4: m(200, 198, 202)}, 2, "it does not"),
        ({1: m(100, 98, 102), 2: m(190, 188, 192), 4: m(370, 365, 375)}, None, "lies above the highest level"),
        ({1: m(100, 98, 102), 2: m(141, 100, 190), 4: m(150, 149, 151)}, None, "unclear"),
        ({1: m(100, 98, 102), 4: m(50, 49, 51)}, 1, "it does not"),
        ({1: m(100, 98, 102)}, None, "fewer than two"),
        ({1: m(100), 2: m(101)}, None, "no interval"),
    ],
)
def test_a_knee_needs_intervals_on_both_sides(
    monkeypatch: pytest.MonkeyPatch, rates: dict[int, Measured], level: int | None, words: str
) -> None:
    """Bent: the level before. Straight: above. An interval across the limit, or none: undecided, and why."""
    levels = curve(monkeypatch, rates)
    found, beyond, why = bench_rows.knee_level(levels)
    assert found == level and words in why
    assert (beyond is None) == (level is None)


# the prediction -------------------------------------------------------------------------------------------------------


def test_a_prediction_is_written_once_and_a_later_computation_is_shown_beside_it(tmp_path: Path) -> None:
    """Frozen before, kept on resume and rebuild; other figures later are rows of their own."""
    run = open_run(tmp_path)
    first = bench_forecast.freeze(run, forecast(level_C1=100, level_C2=150).forecast)
    raw = (tmp_path / "raw/03/prediction/prediction.json").read_bytes()
    later = forecast(level_C1=100, level_C2=160, level_C4=170).forecast
    for again in (open_run(tmp_path), open_run(tmp_path, offline=True), open_run(tmp_path, output_len=99)):
        kept = bench_forecast.freeze(again, later)
        assert kept == first and (tmp_path / "raw/03/prediction/prediction.json").read_bytes() == raw
    rows = bench_rows.frozen_rows(first, later)
    assert "2 differ" in rows[0]["computed now"]
    assert {r["what"]: (str(getattr(r["written down"], "value", r["written down"])), r["computed now"].value) for r in rows[1:]} == {
        "level_C2": ("150.0", 160), "level_C4": ("not predicted", 170),
    }  # fmt: skip
    assert bench_rows.frozen_rows(first, first.forecast)[0]["computed now"] == "the same"


def test_a_prediction_after_the_fact_is_invalid(tmp_path: Path, server: BenchServer, calibrated: None) -> None:
    """The same figures written down before the first level pass, written down later they prove nothing."""
    run = open_run(tmp_path, repeats=1, depths=[], concurrency=[1])
    before = bench_forecast.freeze(run, forecast(level_C1=1e9).forecast)
    levels = benchmark.measure_levels(run, Handle(run, server), before)  # type: ignore[arg-type]
    one = {v.id: v for v in bench_verdicts.verdicts(run, levels, [], smoke(run, server), before)}
    assert one["prediction-first"].status == Status.PASS and one["below-ceiling"].status == Status.PASS
    after = before.model_copy(update={"frozen_at": "2099-01-01T00:00:00+00:00"})
    late = {v.id: v for v in bench_verdicts.verdicts(run, levels, [], smoke(run, server), after)}
    assert late["prediction-first"].status == Status.INVALID


def test_a_rate_above_its_ceiling_refutes_the_ceiling(tmp_path: Path, server: BenchServer, calibrated: None) -> None:
    """About 400 tok/s against a ceiling of 10: fail, and the level is named."""
    run = open_run(tmp_path, repeats=1, depths=[], concurrency=[1])
    frozen = bench_forecast.freeze(run, forecast(level_C1=10).forecast)
    levels = benchmark.measure_levels(run, Handle(run, server), frozen)  # type: ignore[arg-type]
    verdict = {v.id: v for v in bench_verdicts.verdicts(run, levels, [], smoke(run, server), frozen)}["below-ceiling"]
    assert verdict.status == Status.FAIL and "refuted at level-C1" in verdict.reason
    assert verdict.measured is not None and float(verdict.measured.value or 0) > 1
    guessed = frozen.model_copy(update={"forecast": frozen.forecast.model_copy(update={"estimate": "measured while busy"})})
    verdict = {v.id: v for v in bench_verdicts.verdicts(run, levels, [], smoke(run, server), guessed)}["below-ceiling"]
    assert verdict.status == Status.INCONCLUSIVE and "measured while busy" in verdict.reason


def test_a_time_s_share_turns_its_interval_round() -> None:
    """Shortest over measured: the longest time gives the smallest share."""
    point = Point(id="depth-1024-C1-cold", what="", kind="ttft", concurrency=1, context_tokens=0, new_tokens=1024, value=1.0, unit="s")
    found = bench_rows.share(point, Measured(value=2.0, unit="s", n=3, low=1.6, high=2.5))
    assert (found.value, found.low, found.high) == (0.5, 0.4, 0.625)


# GPU state and references ---------------------------------------------------------------------------------------------


def fake_window(folder: Path, reasons: int, source: str | None = "nvml") -> None:
    """Rewrites a level's telemetry as if two GPUs had been there."""
    level = bench_rows.level_in(folder)
    assert level is not None
    at = level.header["window"]["start_ns"] + 1000
    gpus = [{"index": i, "sm_clock_mhz": 1980 - 300 * i, "clock_reasons": reasons * i} for i in range(2)]
    lines = [
        {"kind": "telemetry", "schema": 1, "source": source, "reason": None if source else "no GPU: none", "ranks": [0, 1], "period_s": 1},
        {"kind": "sample", "t_ns": at, "gpus": gpus, "cpu_frac": 0.1},
        {"kind": "kernel_log", "xids": [], "reason": None},
    ]  # fmt: skip
    (folder / telemetry.FILE).write_text("".join(json.dumps(x) + "\n" for x in lines))


def test_a_throttled_window_fails_with_rank_and_reason_and_no_gpu_is_unsupported(
    tmp_path: Path, server: BenchServer, calibrated: None
) -> None:
    """Marked: fail. Clean: pass. No GPU: unsupported with the reason, never a pass."""
    run = open_run(tmp_path, repeats=1, depths=[], concurrency=[1])
    levels = benchmark.measure_levels(run, Handle(run, server), EMPTY)  # type: ignore[arg-type]
    folder = levels[1][0].folder

    def verdict() -> Any:
        return {v.id: v for v in bench_verdicts.verdicts(run, levels, [], smoke(run, server), EMPTY)}["gpu-state"]

    fake_window(folder, 0x4)
    assert verdict().status == Status.FAIL and "level-C1: rank 1 (GPU 1): sw_power_cap" in verdict().reason
    (row,) = bench_rows.gpu_rows(levels, [])
    assert row["slowest rank"].startswith("rank 1") and row["Xid"] == "none" and row["SM clock"] == "1680 to 1980 MHz"
    fake_window(folder, 0)
    assert verdict().status == Status.PASS
    fake_window(folder, 0, None)
    assert verdict().status == Status.UNSUPPORTED and verdict().reason.startswith("no GPU")


def test_the_origin_s_runs_and_what_to_doubt_about_them_are_always_there(tmp_path: Path) -> None:
    """Also in a profile that quotes nothing: marked as another model's, with slots busy and per-GPU figures computed."""
    run = open_run(tmp_path)
    rows = bench_rows.reference_rows(run)
    assert len(rows) == 9 and "another model" in bench_rows.reference_caption(run)
    at_32 = next(r for r in rows if r["concurrency"] == 32)
    # 2156.4 / (32 x 81.2) = 0.830; 2156.4 / 8 = 269.6 against 1373 / 4 = 343.2
    assert at_32["slots busy"] == 0.83 and at_32["per GPU tok/s"] == pytest.approx(269.6, abs=0.1)
    assert rows[-1]["per GPU tok/s"] == pytest.approx(343.2, abs=0.1) and rows[-1]["concurrency"] == "not stated"
    assert len(bench_rows.doubt_rows(run)) == len(bench_rows.DOUBTS)


def test_a_depth_that_was_not_the_predicted_one_is_not_compared(tmp_path: Path, server: BenchServer, calibrated: None) -> None:
    """Predicted for 8,000 tokens, sent 256: no share, and the reason names both."""
    run = open_run(tmp_path, depths=[256], agents=1)
    cells = benchmark.measure_depths(run, Handle(run, server), EMPTY)  # type: ignore[arg-type]
    common: dict[str, Any] = {"what": "", "kind": "ttft", "concurrency": 1, "context_tokens": 0, "value": 1.0, "unit": "s"}
    off = bench_rows.measured_for(Point(id="depth-256-C1-cold", new_tokens=8000, **common), {}, cells)
    assert off is not None and off.value is None and "8,000" in str(off.reason) and "256" in str(off.reason)
    on = bench_rows.measured_for(Point(id="depth-256-C1-cold", new_tokens=256, **common), {}, cells)
    assert on is not None and isinstance(on.value, float)


def test_the_served_limit_leaves_room_for_all_prompts_of_a_cell(tmp_path: Path) -> None:
    """The shorter of request limit and pool over prompts, minus answer, new end and margin."""
    run: Any = SimpleNamespace(
        params=BenchmarkParams.model_validate({"profile": TINY, "concurrency": [1], "depth_output_len": 32, "depth_suffix_len": 64}),
        server_info=lambda _: {"max_req_input_len": 8186, "internal_states": [{"max_total_num_tokens": 65536}]},
    )
    server: Any = SimpleNamespace(launches=lambda: ["one"])
    assert benchmark.served_limit(run, server, 3) == (8186 - 112, "max_req_input_len 8,186")
    assert benchmark.served_limit(run, server, 16) == (4096 - 112, "a pool of 65,536 tokens for 16 prompts")
    assert benchmark.served_limit(run, SimpleNamespace(launches=list), 1)[0] is None  # type: ignore[arg-type]


@pytest.mark.parametrize(("depth", "share"), [(256, 0.5), (1024, 0.5), (2048, 0.75), (8192, 0.9), (131072, 0.9)])
def test_a_hit_may_lack_the_last_page_or_state_but_not_more(depth: int, share: float) -> None:
    """A hybrid model's state is kept every 256 tokens: 768 of 1,024 is a hit, a third is none."""
    assert bench_verdicts.needed_share(depth) == share
