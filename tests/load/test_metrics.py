"""Each metric: the normal case by hand, the undefined, the impossible, the empty, and a real zero that stays zero."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from lib.errors import BadInput, UnreadableFile
from lib.load import metrics
from lib.load.client_wire import FAILURES
from lib.records import Measured

S = 1_000_000_000


def record(i: int, due_s: float, sent_s: float, times_s: list[float], end_s: float, **change: Any) -> dict[str, Any]:
    """A request record; token times in seconds after sending."""
    count = len(times_s)
    made: dict[str, Any] = {
        "kind": "request", "i": i, "id": f"r{i}", "prompt_sha256": "x", "due_ns": round(due_s * S),
        "sent_ns": round(sent_s * S), "end_ns": round(end_s * S), "connect_us": None, "reused": False, "status": 200,
        "failure": None, "detail": None, "head_us": 1, "t_us": [round(t * 1e6) for t in times_s], "kinds": "c" * count,
        "tokens": [1] * count, "sizes": [9] * count, "reads": count, "bundled": 0,
        "usage": {"prompt_tokens": 10, "completion_tokens": count}, "finish_reason": "length", "meta": None,
        "model": "m", "server_id": "s", "output_sha256": "y",
    }  # fmt: skip
    return made | change


def failed(i: int, cause: str = "stall") -> dict[str, Any]:
    return record(i, 0.0, 0.0, [], 1.0, failure=cause, usage=None, kinds="", tokens=None)


def level(records: list[dict[str, Any]], concurrency: int | None = 2, **change: Any) -> metrics.Level:
    worker = {
        "lag_ns": {"p50": 100_000, "p99": 900_000, "mean": 1, "n": 9, "max": 1}, "cpu_frac": 0.2,
        "peak_rss_bytes": 50_000_000, "unread_bytes": {"mean": 0.0}, "in_flight_max": 2,
    }  # fmt: skip
    calibration = {"status": "ok", "reasons": [], "streams": 64, "chunks_per_s": 5000.0, "workers": 1}
    load = {"mode": "closed" if concurrency else "open", "concurrency": concurrency, "rate_per_s": None, "workers": 1}
    header = {
        "kind": "level", "schema": 1, "planned": len(records), "sent": len(records),
        "load": load | change.pop("load", {}),
        "client": {"workers": [worker | change.pop("worker", {})]}, "calibration": calibration,
    } | change  # fmt: skip
    return metrics.level_from_lines([header, *records])


#: Two slots, two requests each, 5 tokens at 10 tok/s after the first. Slot B starts 0.1 s late: sent at 0.1.
NORMAL = [
    record(0, 0.0, 0.0, [0.5, 0.6, 0.7, 0.8, 0.9], 1.0),
    record(1, 0.0, 0.1, [0.5, 0.6, 0.7, 0.8, 0.9], 1.1),
    record(2, 1.0, 1.0, [0.5, 0.6, 0.7, 0.8, 1.3], 2.4),
    record(3, 1.1, 1.1, [0.5, 0.6, 0.7, 0.8, 0.9], 2.1),
]

#: key -> the value by hand
EXPECTED = {
    "requests_ok": 4,
    "requests_failed": 0,
    "wall_s": 2.4,  # last end 2.4, first due 0
    "output_tokens": 20,
    "input_tokens": 40,
    "output_tokens_per_s": 20 / 2.4,
    # window: both first tokens are there at 0.6; last send 1.1; first end after it 2.1. tokens in (0.6, 2.1]:
    # r0 0.7 0.8 0.9 (0.6 itself is the border) 3; r1 0.7 0.8 0.9 1.0 4; r2 1.5 1.6 1.7 1.8 4 (2.3 is out);
    # r3 1.6 1.7 1.8 1.9 2.0 5
    "steady_output_tokens_per_s": 16 / 1.5,
    "steady_window_s": 1.5,
    # 5/1.0, 5/1.1, 5/1.4, 5/1.0
    "request_output_tokens_per_s_mean": (5 + 5 / 1.1 + 5 / 1.4 + 5) / 4,
    "ttft_s_mean": (0.5 + 0.6 + 0.5 + 0.5) / 4,  # the second was due at 0 and sent at 0.1
    "ttft_from_send_s_mean": 0.5,
    "first_content_s_mean": 0.525,
    "e2e_s_mean": (1.0 + 1.1 + 1.4 + 1.0) / 4,
    "send_lag_s_mean": 0.025,
    "chunk_gap_s_mean": (15 * 0.1 + 0.5) / 16,
    "chunk_gap_s_p50": 0.1,
    "chunk_gap_request_mean_s_mean": (0.1 + 0.1 + 0.2 + 0.1) / 4,
    "token_latency_s_mean": (15 * 0.1 + 0.5) / 16,
    "token_latency_request_mean_s_mean": 0.125,
    "decode_tokens_per_s_mean": (10 + 10 + 5 + 10) / 4,
    "tokens_per_chunk": 1.0,
    "in_flight_mean": (1.0 + 1.0 + 1.4 + 1.0) / 2.4,
    "requests_per_s": 4 / 2.4,
    "client_lag_p50_s": 0.0001,
    "client_lag_p99_s": 0.0009,
    "client_cpu_frac": 0.2,
    "client_rss_bytes": 50_000_000,
    "client_unread_bytes": 0.0,
    "client_bundled_frac": 0.0,
    "usage_below_events": 0,
}
#: Without a source in the normal level: the reason is given instead.
NEEDS_MORE = {
    "cached_tokens", "cached_frac", "prefix_reuse_frac", "accept_length", "achieved_of_offered", "server_e2e_s",
    "outside_server_s",
}  # fmt: skip


@pytest.mark.parametrize("metric", metrics.METRICS, ids=lambda m: m.id)
def test_normal_case_by_hand(metric: metrics.Metric) -> None:
    """Every row of the table has a value worked out by hand, or is known to need a source that this level lacks."""
    summary = metrics.level_summary(level(NORMAL))
    checked = [k for k in metric.names() if k in EXPECTED]
    for key in checked:
        assert summary[key].value == pytest.approx(EXPECTED[key]), key
        assert summary[key].unit == metric.unit
    if not checked:
        assert metric.id in NEEDS_MORE
        assert all(summary[k].value is None and summary[k].reason for k in metric.names())


@pytest.mark.parametrize("metric", metrics.METRICS, ids=lambda m: m.id)
def test_undefined_is_a_reason_never_zero(metric: metrics.Metric) -> None:
    """If every request failed, only counts of requests and facts about the client have values."""
    summary = metrics.level_summary(level([failed(0), failed(1)]))
    for key in metric.names():
        if metric.id.startswith(("requests_", "client_", "wall_s", "in_flight")) and metric.id != "client_bundled_frac":
            assert summary[key].value is not None
        else:
            assert summary[key].value is None and summary[key].reason, key


@pytest.mark.parametrize("metric", metrics.METRICS, ids=lambda m: m.id)
def test_empty_level(metric: metrics.Metric) -> None:
    """Nothing sent: nothing has a value but the counts, which are real zeros."""
    summary = metrics.level_summary(level([]))
    for key in metric.names():
        if metric.id in ("requests_ok", "requests_failed"):
            assert summary[key].value == 0
        elif not metric.id.startswith("client_") or metric.id == "client_bundled_frac":
            assert summary[key].value is None and summary[key].reason, key


@pytest.mark.parametrize("metric", metrics.METRICS, ids=lambda m: m.id)
def test_every_row_is_documented(metric: metrics.Metric) -> None:
    """A row says what it is, when it has no value, and where it comes from; its latencies can be withheld."""
    assert metric.definition.endswith(".") and metric.undefined and metric.source
    assert metric.shape in ("number", "requests", "pooled")
    assert f"`{metric.id}`" in metrics.metrics_markdown()


def test_a_server_that_counts_fewer_tokens_than_it_sent_is_told() -> None:
    """Four events with text and a usage of 2 tokens: the count cannot be right, and the figure says in how many requests."""
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    rows = [record(i, 0.0, 0.0, [0.1, 0.2, 0.3, 0.4], 0.5, tokens=None, usage=usage) for i in range(3)]
    assert metrics.level_summary(level(rows))["usage_below_events"].value == 3


def test_a_real_zero_stays_zero() -> None:
    """Two tokens in one read: a gap of 0 is a measurement; so are no cached tokens and no send lag."""
    meta = {"cached_tokens": 0, "spec_verify_ct": 1, "e2e_latency": 1.0}
    rows = [record(i, 0.0, 0.0, [0.5, 0.5], 1.0, meta=meta, bundled=1) for i in range(4)]
    summary = metrics.level_summary(level(rows))
    for key in ("chunk_gap_s_p50", "token_latency_s_p50", "send_lag_s_mean", "cached_tokens", "outside_server_s_mean"):
        assert summary[key].value == 0, key
        assert summary[key].value is not None
    assert summary["accept_length"].value == 2.0
    assert summary["server_e2e_s_mean"].value == 1.0
    assert summary["client_bundled_frac"].value == 0.5


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [{"kind": "request"}],
        [{"kind": "level", "schema": 2, "sent": 0}],
        [{"kind": "level", "schema": 1, "sent": 2}, NORMAL[0]],
        [{"kind": "level", "schema": 1, "sent": 2}, NORMAL[0], NORMAL[0]],
        [{"kind": "level", "schema": 1, "sent": 0}, {"kind": "level"}],
        ["text"],
    ],
)
def test_impossible_records_raise(lines: list[Any]) -> None:
    """No header, another schema, lost or doubled requests, two headers, or something else."""
    with pytest.raises(UnreadableFile):
        metrics.level_from_lines(lines)


def test_impossible_arguments_raise() -> None:
    """A path instead of a level, and SLOs that are none."""
    with pytest.raises(BadInput, match="read_level"):
        metrics.level_summary("level.jsonl")  # type: ignore[arg-type]
    for limits in ({}, {"ttft_s": 0.0}, {"e2e_s": -1.0}):
        with pytest.raises(BadInput):
            metrics.goodput(level(NORMAL), **limits)
    with pytest.raises(ValidationError):
        Measured(value=None)


def test_speculation_chunk_gap_and_token_latency_are_two_numbers() -> None:
    """30 ms between chunks of 3 tokens: chunk gap 30 ms, per token 10 ms, 3 tokens a chunk after the first."""
    times = [0.1, 0.13, 0.16, 0.19]
    usage = {"prompt_tokens": 1, "completion_tokens": 10}
    rows = [record(i, 0.0, 0.0, times, 0.2, tokens=[1, 3, 3, 3], usage=usage) for i in range(4)]
    summary = metrics.level_summary(level(rows))
    assert summary["chunk_gap_s_p50"].value == pytest.approx(0.030)
    assert summary["token_latency_s_p50"].value == pytest.approx(0.010)
    assert summary["token_latency_request_mean_s_p50"].value == pytest.approx(0.010)
    assert summary["decode_tokens_per_s_p50"].value == pytest.approx(100)
    assert summary["tokens_per_chunk"].value == 2.5


def test_unknown_counts_leave_the_pooled_token_latency_undefined() -> None:
    """An OpenAI stream of 4 events and 10 tokens: per-token latency pooled is not said, the request mean still is."""
    usage = {"prompt_tokens": 1, "completion_tokens": 10}
    rows = [record(i, 0.0, 0.0, [0.1, 0.2, 0.3, 0.4], 0.5, tokens=None, usage=usage) for i in range(4)]
    summary = metrics.level_summary(level(rows))
    pooled = summary["token_latency_s_p50"]
    assert pooled.value is None and "continuous usage" in (pooled.reason or "")
    assert summary["chunk_gap_s_p50"].value == pytest.approx(0.1)
    assert summary["token_latency_request_mean_s_p50"].value == pytest.approx(0.3 / 9)


@pytest.mark.parametrize(
    ("kinds", "tokens", "total", "expected"),
    [
        ("ccc", [1, 1, 1], 3, [1, 1, 1]),
        ("nccn", [0, 1, 2, 0], 3, [1, 2]),
        ("cnc", [1, 1, 1], 3, [1, 2]),  # a token whose text was held back arrives with the next event
        ("ccn", [1, 1, 1], 3, [1, 2]),  # a closing token without text belongs to the last event
        ("ccc", None, 3, [1, 1, 1]),
        ("ccc", None, 4, [1, 1, 1]),  # a closing token without text
        ("ccc", None, 9, None),
        ("ccc", None, 2, None),
        ("nnn", None, 0, None),
    ],
)
def test_token_counts(kinds: str, tokens: list[int] | None, total: int, expected: list[int] | None) -> None:
    """Counts come from the server, or from as many events as tokens; otherwise they are unknown."""
    row = record(0, 0, 0, [0.1, 0.2, 0.3, 0.4][: len(kinds)], 1, kinds=kinds, tokens=tokens)
    row["usage"]["completion_tokens"] = total
    assert metrics.token_counts(row) == expected


def test_reasoning_comes_before_content() -> None:
    """TTFT is the first token of either kind; the first content is apart."""
    rows = [record(i, 0.0, 0.0, [0.1, 0.2, 0.9], 1.0, kinds="rrc") for i in range(4)]
    summary = metrics.level_summary(level(rows))
    assert summary["ttft_s_p50"].value == 0.1 and summary["first_content_s_p50"].value == 0.9
    only = metrics.level_summary(level([record(i, 0, 0, [0.1, 0.2], 1.0, kinds="rr") for i in range(4)]))
    assert only["first_content_s_p50"].value is None and only["ttft_s_p50"].value == 0.1


def test_failed_requests_do_not_move_the_others_latencies() -> None:
    """A failed request changes counts and rates over the run, never a latency."""
    clean, dirty = metrics.level_summary(level(NORMAL)), metrics.level_summary(level([*NORMAL, failed(9)]))
    for metric in metrics.METRICS:
        if metric.latency:
            for key in metric.names():
                assert clean[key].value == dirty[key].value
    assert dirty["requests_failed"].value == 1 and metrics.failures(level([*NORMAL, failed(9)])) == {"stall": 1}


@pytest.mark.parametrize(
    ("worker", "part"),
    [
        ({"cpu_frac": 0.97}, "CPU share 0.97"),
        ({"lag_ns": {"p50": 8_000_000, "p99": 9_000_000}}, "lag p50 8.0 ms, limit 5.0 ms"),  # 5% of 100 ms
        ({"lag_ns": {"p50": 1, "p99": 150_000_000}}, "lag p99 150.0 ms, limit 100.0 ms"),
    ],
)
def test_a_client_that_was_the_bottleneck_gives_no_latency(worker: dict[str, Any], part: str) -> None:
    """Past a stated limit latencies are withheld, and say why; token counts are not."""
    bound = level(NORMAL, worker=worker)
    verdict = metrics.client_verdict(bound)
    assert verdict.status == "client_bound" and part in verdict.reasons[0]
    summary = metrics.level_summary(bound)
    assert summary["client"].value == "client_bound"
    assert summary["ttft_s_p50"].value is None and part in (summary["ttft_s_p50"].reason or "")
    assert summary["output_tokens"].value == 20
    assert metrics.goodput(bound, ttft_s=1.0)["goodput_frac"].value is None


COVERS = {"status": "ok", "reasons": [], "streams": 9, "chunks_per_s": 9e9, "workers": 1}


def test_a_level_of_fewer_workers_than_calibrated_is_covered_if_each_carries_no_more() -> None:
    """`--workers 4 --concurrency 1,64`: one stream needs one process, and each of four was calibrated with 16."""
    four = COVERS | {"streams": 64, "chunks_per_s": 4000.0, "workers": 4}
    assert metrics.client_verdict(level(NORMAL, calibration=four)).status == "ok"


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"calibration": None}, "no calibration"),
        ({"calibration": {"status": "client_bound", "reasons": ["TTFT off"]}}, "TTFT off"),
        ({"calibration": COVERS | {"streams": 1}}, "2 streams"),
        ({"calibration": COVERS | {"chunks_per_s": 1.0}}, "chunks/s"),
        ({"calibration": COVERS | {"streams": 2, "workers": 2}}, "1 workers with 2 streams each, calibrated with 2 and 1"),
        ({"calibration": COVERS | {"chunks_per_s": 10.0, "workers": 2}}, "1 workers with 8 chunks/s each"),
        ({"calibration": COVERS, "load": {"workers": 2}}, "2 workers, calibrated with 1"),
    ],
)
def test_without_a_calibration_for_this_load_there_is_no_verdict(change: dict[str, Any], part: str) -> None:
    """No calibration, a failed one, or one for less load: not_calibrated, with the reason, and the numbers stay."""
    verdict = metrics.client_verdict(level(NORMAL, **change))
    assert verdict.status == "not_calibrated" and part in "; ".join(verdict.reasons)
    assert metrics.level_summary(level(NORMAL, **change))["ttft_s_p50"].value is not None
    assert metrics.client_verdict(level(NORMAL)).status == "ok"


def test_origin_row() -> None:
    """The origin's columns: C, aggregate tok/s, per-request tok/s, tokens, wall s, ok."""
    row = metrics.origin_row(level([*NORMAL, failed(9)]))
    assert [row[k].value for k in ("concurrency", "tokens", "ok")] == [2, 20, 4]
    assert row["aggregate_tokens_per_s"].value == pytest.approx(20 / 2.4)
    assert row["wall_s"].value == pytest.approx(2.4)
    assert metrics.origin_row(level([failed(0)]))["aggregate_tokens_per_s"].value is None


def test_72_or_172() -> None:
    """One server, two figures: 100 tokens with 0.8 s to the first at 175 tok/s are 73 tok/s end to end."""
    times = [0.8 + i / 175 for i in range(100)]
    parts = metrics.decompose(record(0, 0.0, 0.0, times, times[-1]))
    # 100 / (0.8 + 99/175) = 73.2
    assert parts["tokens_per_s"].value == pytest.approx(73.2, abs=0.1)
    assert parts["decode_tokens_per_s"].value == pytest.approx(175, rel=1e-4)
    assert parts["ttft_frac"].value == pytest.approx(0.8 / 1.3657, rel=1e-3)
    assert parts["reasoning_tokens"].value is None and parts["reasoning_tokens"].reason
    total = parts["ttft_s"].value + parts["decode_s"].value + parts["after_last_token_s"].value  # type: ignore[operator]
    assert total == pytest.approx(times[-1], abs=1e-5)


def test_decompose_edges() -> None:
    """A failed request has reasons; one token has no decode rate; reasoning tokens are taken from either place."""
    assert all(m.value is None and "stall" in (m.reason or "") for m in metrics.decompose(failed(0)).values())
    one = metrics.decompose(record(0, 0.0, 0.0, [0.5], 0.6))
    assert one["decode_tokens_per_s"].value is None and one["tokens_per_s"].value == pytest.approx(1 / 0.6)
    for usage in ({"reasoning_tokens": 0}, {"completion_tokens_details": {"reasoning_tokens": 0}}):
        row = record(0, 0.0, 0.0, [0.5, 0.6], 0.7)
        row["usage"] |= usage
        assert metrics.decompose(row)["reasoning_tokens"].value == 0


def test_goodput() -> None:
    """Two of four meet TTFT 0.55 and E2E 1.05; failed ones miss; a limit nobody meets is a real zero."""
    both = metrics.goodput(level(NORMAL), ttft_s=0.55, e2e_s=1.05)
    assert both["goodput_frac"].value == 0.5 and both["goodput_requests_per_s"].value == pytest.approx(2 / 2.4)
    assert metrics.goodput(level([*NORMAL, failed(9)]), ttft_s=9.0)["goodput_frac"].value == pytest.approx(0.8)
    none = metrics.goodput(level(NORMAL), ttft_s=0.1)
    assert none["goodput_frac"].value == 0.0 and none["goodput_requests_per_s"].value == 0.0
    assert metrics.goodput(level([]), ttft_s=1.0)["goodput_frac"].value is None


def test_steady_window_of_an_open_loop() -> None:
    """From the first end to the last arrival; if none ended before the last arrived, there is none."""
    rows = [record(i, 0.5 * i, 0.5 * i, [0.1, 0.2], 0.5 * i + 0.3) for i in range(5)]
    got = metrics.level_summary(level(rows, concurrency=None, load={"rate_per_s": 2.0}))
    assert got["steady_window_s"].value == pytest.approx(2.0 - 0.3)
    assert got["achieved_of_offered"].value == pytest.approx(1.0)
    late = [record(i, 0.01 * i, 0.01 * i, [0.1, 0.2], 1.0) for i in range(5)]
    assert metrics.level_summary(level(late, concurrency=None))["steady_window_s"].value is None


def test_two_requests_a_slot_may_have_no_steady_state() -> None:
    """A slot whose first token comes after another's last request ended: ramp and drain overlap, and that is said."""
    rows = [record(0, 0, 0, [0.1, 0.2], 0.3), record(1, 0, 0, [2.0, 2.1], 2.2), record(2, 0.3, 0.3, [0.1, 0.2], 0.6)]
    got = metrics.level_summary(level(rows))["steady_output_tokens_per_s"]
    assert got.value is None and "overlap" in (got.reason or "")


def test_across_repeats() -> None:
    """Repeats give a mean with an interval over repeats; those without a value are counted, not taken as 0."""
    one = metrics.level_summary(level(NORMAL))
    slower = [copy.deepcopy(r) for r in NORMAL]
    slower[2]["end_ns"] += S
    two = metrics.level_summary(level(slower))
    empty = metrics.level_summary(level([failed(0)]))
    got = metrics.across_repeats([one, two, one, two, empty], "output_tokens_per_s")
    assert got.value == pytest.approx((20 / 2.4 + 20 / 3.4) / 2) and got.n == 4 and got.low is not None
    assert "1 repeat(s) without a value" in (got.reason or "")
    assert metrics.across_repeats([empty], "ttft_s_p50").value is None
    assert metrics.across_repeats([], "ttft_s_p50").value is None


def test_p99_of_few_values_says_so() -> None:
    """A p99 of four requests is their maximum, and the figure says it."""
    assert "close to their maximum" in (metrics.level_summary(level(NORMAL))["ttft_s_p99"].reason or "")


def test_docs_are_generated_and_complete() -> None:
    """docs/metrics.md is what the table says now, with every failure name."""
    from pathlib import Path

    text = metrics.metrics_markdown()
    assert all(f"`{name}`" in text for name in FAILURES)
    assert (Path(__file__).parents[2] / "docs" / "metrics.md").read_text() == text


def test_the_steady_rates_interval_covers_the_rate_of_slow_and_fast_requests() -> None:
    """One slot, ten tokens each, half the requests twice as slow: over 60 runs the interval covers the long-run rate.

    Resampling token sums alone would give next to no width, because every request has the same number of tokens.
    """
    covered = 0
    for seed in range(60):
        slow = np.random.default_rng(seed).random(40) < 0.5
        rows, at = [], 0.0
        for i, is_slow in enumerate(slow):
            gap = 0.2 if is_slow else 0.1
            rows.append(record(i, at, at, [gap * (k + 1) for k in range(10)], at + 10 * gap))
            at += 10 * gap
        got = metrics.level_summary(level(rows, concurrency=1))["steady_output_tokens_per_s"]
        assert got.low is not None and got.high is not None
        covered += got.low <= 10 / 1.5 <= got.high
    assert covered >= 50
