"""The server's own counters beside the client's sums: what both counted over one window, and why they may differ.

`observer` reads /metrics when all is ready to send and again after the window (SGLang with --enable-metrics); `rows`
compares, from the level's record alone. Source: sglang 0.5.15 observability/metrics_collector.py.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lib.load import metrics
from lib.load.metrics import Level
from lib.records import Measured
from lib.server.bounded import get_bounded

#: Counters and histogram sums that are kept of /metrics; all else would make the header long.
KEPT = (
    "sglang:num_requests_total",
    "sglang:num_aborted_requests_total",
    "sglang:prompt_tokens_total",
    "sglang:generation_tokens_total",
    "sglang:cached_tokens_total",
    "sglang:num_retracted_requests_total",
    "sglang:spec_verify_calls_total",
    "sglang:time_to_first_token_seconds_sum",
    "sglang:time_to_first_token_seconds_count",
    "sglang:e2e_request_latency_seconds_sum",
    "sglang:e2e_request_latency_seconds_count",
    "sglang:inter_token_latency_seconds_sum",
    "sglang:inter_token_latency_seconds_count",
)
#: A finished request is counted a moment after its last byte: so long the second reading waits for the counters to rest.
SETTLE_S, SETTLE_STEP_S = 1.0, 0.1
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+([-+\d.eE]+|NaN|[+-]Inf)(?:\s+\d+)?$")


def counters(text: str) -> dict[str, float]:
    """The kept counters of a /metrics text, summed over their labels (ranks, cache sources); {} if none is there."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match and match.group(1) in KEPT:
            try:
                value = float(match.group(3))
            except ValueError:
                continue
            if value == value and abs(value) != float("inf"):
                found[match.group(1)] = found.get(match.group(1), 0.0) + value
    return found


def read_counters(base_url: str, headers: Mapping[str, str] | None = None, ca_file: Path | None = None) -> dict[str, Any]:
    """{"counters": ..., "at_unix_s": ...}, or {"problem": why there are none}."""
    answer = get_bounded(f"{base_url.rstrip('/')}/metrics", headers=headers, total_s=3.0, ca_file=ca_file)
    made: dict[str, Any] = {"at_unix_s": time.time()}
    if answer.problem:
        return made | {"problem": f"/metrics: {answer.problem}"}
    if answer.status != 200:
        return made | {"problem": f"/metrics answers {answer.status} (SGLang exports it with --enable-metrics)"}
    found = counters(answer.text)
    return made | ({"counters": found} if found else {"problem": "/metrics has no counter of SGLang's that is known here"})


def observer(base_url: str, api_key_env: str | None = None, ca_file: Path | None = None) -> Callable[[], dict[str, Any]]:
    """What `run_level` calls before and after the window; the second reading waits until the counters rest."""
    key = os.environ.get(api_key_env or "", "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    calls: list[dict[str, Any]] = []

    def observe() -> dict[str, Any]:
        made = read_counters(base_url, headers, ca_file)
        end = time.monotonic() + SETTLE_S
        while calls and "counters" in made and time.monotonic() < end:
            time.sleep(SETTLE_STEP_S)
            again = read_counters(base_url, headers, ca_file)
            rested = again.get("counters") == made["counters"] != calls[0].get("counters")
            made = again if "counters" in again else made
            if rested:
                break
        calls.append(made)
        return made

    return observe


def rows(level: Level) -> list[dict[str, Any]]:
    """What both sides counted over the window: {what, client, server, difference, explanation}; [] never.

    A side that does not know says why. `explanation` names each reason for a difference that applies to this level.
    """
    header = level.header
    before, after = header.get("server_before"), header.get("server_after")
    why = "the server's counters were not read"
    for side in (before, after):
        if isinstance(side, dict) and side.get("problem"):
            why = side["problem"]
    deltas = _deltas(before, after)
    view = level.view
    ok = len(view.ok)
    failed = len(level.requests) - ok
    cached = [c for c in map(metrics.cached_tokens, view.ok) if c is not None]
    told = [r for r in view.ok if isinstance((r["usage"] or {}).get("prompt_tokens"), int)]
    sums: list[tuple[str, str, Measured, str]] = [
        ("requests finished", "sglang:num_requests_total", Measured(value=ok, unit="requests", n=len(level.requests)), "count"),
        ("output tokens", "sglang:generation_tokens_total", Measured(value=view.output_tokens, unit="tokens", n=ok), "count"),
        (
            "prompt tokens", "sglang:prompt_tokens_total",
            Measured(value=sum(r["usage"]["prompt_tokens"] for r in told), unit="tokens", n=len(told)), "count",
        ),
        (
            "cached prompt tokens", "sglang:cached_tokens_total",
            Measured(value=sum(cached), unit="tokens", n=len(cached)) if cached
            else Measured(value=None, unit="tokens", reason="the answers do not say"), "count",
        ),
    ]  # fmt: skip
    made = []
    for what, name, client, _ in sums:
        absent = name not in deltas and bool(deltas) and name == "sglang:cached_tokens_total"
        # A counter that was never incremented is not exported: with others there, that is a real zero.
        value = deltas.get(name, 0.0 if absent else None)
        server = Measured(value=int(value), unit=client.unit) if value is not None else _missing(client.unit, deltas, name, why)
        made.append(_row(what, client, server, level, failed))
    spoilt = metrics.client_verdict(level).status == "client_bound"
    for what, stem, key in (
        ("TTFT, mean", "sglang:time_to_first_token_seconds", "ttft_from_send_s"),
        ("end to end, mean", "sglang:e2e_request_latency_seconds", None),
    ):
        values = view.column(key) if key else [(r["end_ns"] - r["sent_ns"]) / 1e9 for r in view.ok]
        count, total = deltas.get(f"{stem}_count"), deltas.get(f"{stem}_sum")
        server = (
            Measured(value=total / count, unit="s", n=int(count), reason="the server's own clock")
            if count and total is not None
            else _missing("s", deltas, stem, why)
        )
        if spoilt or not len(values):
            client = Measured(value=None, unit="s", reason="client_bound" if spoilt else "no request succeeded")
        else:
            client = Measured(value=float(sum(values) / len(values)), unit="s", n=len(values), reason="from sending")
        made.append(_row(what, client, server, level, failed))
    return made


def _deltas(before: Any, after: Any) -> dict[str, float]:
    if not isinstance(before, dict) or not isinstance(after, dict) or "counters" not in after or "counters" not in before:
        return {}
    return {k: v - before["counters"].get(k, 0.0) for k, v in after["counters"].items()}


def _missing(unit: str, deltas: dict[str, float], name: str, why: str) -> Measured:
    return Measured(value=None, unit=unit, reason=f"/metrics has no {name}" if deltas else why)


def _row(what: str, client: Measured, server: Measured, level: Level, failed: int) -> dict[str, Any]:
    row: dict[str, Any] = {"what": what, "client": client, "server": server}
    if not isinstance(client.value, (int, float)) or not isinstance(server.value, (int, float)):
        gap = Measured(value=None, unit=client.unit, reason="one side does not know")
        return row | {"difference": gap, "explanation": ""}
    off = server.value - client.value
    row["difference"] = Measured(value=off, unit=client.unit, reason="server minus client")
    notes = []
    if client.unit == "s":
        if off < 0:
            notes.append("the client's time has the network, HTTP and both queues in it")
        elif off > 0:
            notes.append("the server counts requests that the client does not (failed, or of others)")
    elif off > 0:
        if failed:
            notes.append(f"{failed} failed request(s) of this client may have been counted")
        notes.append("requests of other clients, or health checks that generate" if not failed else "or other clients'")
    elif off < 0:
        notes.append("the server was restarted or has not counted all yet" if off else "")
        if (level.header.get("stopped") or "") == "interrupted":
            notes.append("the run was interrupted")
    return row | {"explanation": "; ".join(x for x in notes if x)}
