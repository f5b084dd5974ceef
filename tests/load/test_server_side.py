"""The server's counters beside the client's: read at both ends of the window, differences explained, unknown is a reason."""

from __future__ import annotations

from typing import Any

import pytest

from lib.load import metrics, server_side

TEXT = """# HELP sglang:prompt_tokens_total Number of prefill tokens processed.
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="m",tp_rank="0"} 100.0
sglang:prompt_tokens_total{model_name="m",tp_rank="1"} 20.0
sglang:generation_tokens_total{model_name="m"} 1e3
sglang:generation_tokens_total_created{model_name="m"} 1.7e9
sglang:cached_tokens_total{cache_source="total",model_name="a } b"} 5
sglang:num_requests_total{model_name="m"} NaN
something_else 7
sglang:e2e_request_latency_seconds_sum{model_name="m"} 4.5 1395066363000
"""


def test_counters_of_a_metrics_text() -> None:
    """Labels are summed, other samples and numbers that are none are left out."""
    assert server_side.counters(TEXT) == {
        "sglang:prompt_tokens_total": 120.0,
        "sglang:generation_tokens_total": 1000.0,
        "sglang:cached_tokens_total": 5.0,
        "sglang:e2e_request_latency_seconds_sum": 4.5,
    }
    assert server_side.counters("<html>") == {} == server_side.counters("")


def level(before: Any, after: Any, failed: int = 0) -> metrics.Level:
    base = {"due_ns": 0, "sent_ns": 0, "end_ns": 10**9, "t_us": [100_000, 200_000], "kinds": "cc", "tokens": [1, 1],
            "bundled": 0, "detail": None, "usage": {"prompt_tokens": 10, "completion_tokens": 2}, "meta": {"cached_tokens": 4}}  # fmt: skip
    rows = [base | {"i": i, "failure": "stall" if i < failed else None} for i in range(5)]
    load = {"mode": "closed", "concurrency": 1, "rate_per_s": None, "workers": 1}
    worker = {"lag_ns": None, "cpu_frac": 0.1, "peak_rss_bytes": 1, "unread_bytes": None, "in_flight_max": 1}
    header = {"load": load, "client": {"workers": [worker]}, "server_before": before, "server_after": after}
    return metrics.Level(header, rows)


def counted(**more: float) -> dict[str, Any]:
    return {"counters": {f"sglang:{k}": v for k, v in more.items()}}


def test_both_sides_agree() -> None:
    """5 requests of 10 + 2 tokens: the deltas are 5, 10 and 50, and nothing needs explaining."""
    before = counted(num_requests_total=7, generation_tokens_total=70, prompt_tokens_total=1, cached_tokens_total=2)
    after = counted(
        num_requests_total=12, generation_tokens_total=80, prompt_tokens_total=51, cached_tokens_total=22,
        time_to_first_token_seconds_sum=0.45, time_to_first_token_seconds_count=5,
    )  # fmt: skip
    rows = {r["what"]: r for r in server_side.rows(level(before, after))}
    for what, value in (("requests finished", 5), ("output tokens", 10), ("prompt tokens", 50), ("cached prompt tokens", 20)):
        row = rows[what]
        assert (row["client"].value, row["server"].value, row["difference"].value, row["explanation"]) == (value, value, 0, "")
    ttft = rows["TTFT, mean"]
    assert ttft["server"].value == pytest.approx(0.09) and ttft["client"].value == pytest.approx(0.1)
    assert "network" in ttft["explanation"]
    assert rows["end to end, mean"]["server"].value is None and rows["end to end, mean"]["server"].reason


def test_differences_are_explained() -> None:
    """More at the server: failed requests or others; less: a restart. A counter never incremented is a real zero."""
    before = counted(num_requests_total=0, generation_tokens_total=0)
    rows = {r["what"]: r for r in server_side.rows(level(before, counted(num_requests_total=5, generation_tokens_total=10), 2))}
    assert rows["requests finished"]["difference"].value == 2 and "2 failed" in rows["requests finished"]["explanation"]
    assert rows["cached prompt tokens"]["server"].value == 0
    rows = {r["what"]: r for r in server_side.rows(level(before, counted(num_requests_total=9)))}
    assert "other clients" in rows["requests finished"]["explanation"]
    rows = {r["what"]: r for r in server_side.rows(level(before, counted(num_requests_total=1)))}
    assert "restarted" in rows["requests finished"]["explanation"]


@pytest.mark.parametrize(("before", "after"), [(None, None), ({"problem": "404"}, {"problem": "404"}), ({}, {})])
def test_no_counters_are_a_reason(before: Any, after: Any) -> None:
    """Nothing read, or no /metrics: every server figure is None with the reason."""
    for row in server_side.rows(level(before, after)):
        assert row["server"].value is None and row["server"].reason and row["difference"].value is None


def test_read_from_a_server_without_metrics() -> None:
    """404 says which option exports them; nobody there says so."""
    from faulty_server import faulty_server

    with faulty_server() as server:
        assert "--enable-metrics" in server_side.read_counters(server.base_url)["problem"]
        url = server.base_url
    assert "/metrics" in server_side.read_counters(url)["problem"]
