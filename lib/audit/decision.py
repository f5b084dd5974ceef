"""Notebook 05's two claims: can we afford the more precise arm, and is it worth it? Two claims, two verdicts.

What it costs is measured before and after, on both servers: tokens of context in their pools, output tokens a second of
the same requests. What it brings is measured in nats a token and in task items.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from lib.load import workloads
from lib.load.client import read_level, run_level
from lib.load.metrics import level_summary
from lib.records import Measured, Record
from lib.results import Answering, Measurement
from lib.server.remote import load_way

#: Levels of one throughput measurement: their spread is part of the interval.
REPEATS = 2


class Ratio(Record):
    """Throughput of the precise arm divided by the cheap one's, with the widest interval that both leave open."""

    value: float | None
    low: float | None = None
    high: float | None = None
    reason: str


def measure_cost(
    server: Answering,
    folder: Path,
    requests: int,
    concurrency: int,
    input_len: int,
    output_len: int,
    api_key_env: str | None,
    calibration_file: str | None = None,
) -> None:
    """Sends the same closed-loop level of code twice, the cache flushed before each, and writes level-0 and level-1.jsonl.

    `calibration_file` holds what the client showed of a judge; it goes along with both levels.
    """
    from lib.audit.probes import empty_cache

    url, sender = load_way(server)
    calibration = json.loads(Path(calibration_file).read_text()) if calibration_file else None

    for repeat in range(REPEATS):
        made = workloads.code_text(requests, input_len, output_len, seed=100 + repeat)
        empty_cache(server)
        run_level(
            url, "generate", made.requests, out=folder / f"level-{repeat}.jsonl", concurrency=concurrency,
            warmup=made.warmup, workload=made.describe(), api_key_env=api_key_env, sender=sender, calibration=calibration,
        )  # fmt: skip


def throughput(measurement: Measurement | None) -> Measured:
    """Output tokens a second over the repeats; the interval spans all of theirs."""
    if measurement is None or not measurement.ok:
        return Measured(
            value=None, unit="tok/s", reason=(measurement.problem if measurement else None) or "not measured"
        )
    found = [
        level_summary(read_level(f))["output_tokens_per_s"] for f in sorted(measurement.folder.glob("level-*.jsonl"))
    ]
    values = [float(m.value) for m in found if isinstance(m.value, (int, float))]
    if not values or len(values) < len(found):
        reason = next((m.reason for m in found if m.value is None), None)
        return Measured(value=None, unit="tok/s", reason=reason or "a repeat has no figure")
    ends = [x for m in found for x in (m.low, m.high, m.value) if isinstance(x, (int, float))]
    return Measured(
        value=sum(values) / len(values), unit="tok/s", n=len(values), low=min(ends), high=max(ends),
        reason=f"{len(values)} levels; the interval spans both",
    )  # fmt: skip


def throughput_ratio(precise: Measured, cheap: Measured) -> Ratio:
    """precise / cheap.

    Example: 95 [90, 100] against 100 [95, 105] is 0.95 [0.857, 1.053].
    """
    if not all(isinstance(m.value, (int, float)) and m.value for m in (precise, cheap)):
        return Ratio(value=None, reason=precise.reason or cheap.reason or "not measured")
    value = float(precise.value) / float(cheap.value)  # type: ignore[arg-type]
    if precise.low is None or precise.high is None or not cheap.low or not cheap.high:
        return Ratio(value=value, reason="no interval")
    return Ratio(
        value=value, low=precise.low / cheap.high, high=precise.high / cheap.low, reason="measured on both arms"
    )


def judge_affordable(
    tokens: int, capped: bool, needed: int, ratio: Ratio, limit_frac: float, memory: str
) -> tuple[str, str]:
    """Whether the precise arm holds what is needed and is not too slow; the outcome of the weaker half.

    Args:
        tokens: in the precise arm's pool.
        capped: by `--max-total-tokens`, so that more might fit than the pool shows.
        needed: tokens that must be held at once.
        ratio: of throughput, precise / cheap.
        limit_frac: accepted loss of throughput.
        memory: what the cheaper arm holds, in words.
    """
    words = (
        f"{tokens:,} tokens for {needed:,} that are needed{' (capped by --max-total-tokens)' if capped else ''}{memory}"
    )
    if ratio.value is None:
        speed, outcome = f"throughput: {ratio.reason}", "skipped"
    else:
        ends = f" [{ratio.low:.2f}, {ratio.high:.2f}]" if ratio.low is not None and ratio.high is not None else ""
        speed = f"throughput x {ratio.value:.2f}{ends}, accepted x {1 - limit_frac:.2f}"
        if ratio.low is not None and ratio.low >= 1 - limit_frac:
            outcome = "within_limit"
        elif ratio.high is not None and ratio.high < 1 - limit_frac:
            outcome = "outside_limit"
        else:
            outcome = "not_enough_data"
    reason = f"{words}; {speed}"
    if tokens < needed:
        return ("not_enough_data" if capped else "outside_limit"), reason
    return ("within_limit" if outcome == "skipped" else outcome), reason


def judge_worth(loss: tuple[str, Measured], tasks: str | None, limit_nats: float) -> tuple[str, str]:
    """Whether the precise arm brings more than the accepted loss: pass where the cheap arm loses it, fail where it does not.

    Args:
        loss: outcome of the cheap arm against the limit, and the difference.
        tasks: outcome over all usable task items, None where none was measured.
        limit_nats: the accepted loss.
    """
    outcome, d = loss
    value = (
        f"{d.value:+.4f} nat/token" if isinstance(d.value, (int, float)) and math.isfinite(d.value) else "not measured"
    )
    ends = f" [{d.low:+.4f}, {d.high:+.4f}]" if d.low is not None and d.high is not None else ""
    told = {"lost": "task items are lost too", "gained": "task items are gained, against expectation"}
    words = f"the cheaper arm: {value}{ends}, accepted {limit_nats:g}; tasks: {told.get(str(tasks), tasks or 'not measured')}"
    if outcome == "outside_limit" or tasks == "lost":
        return "within_limit", f"worth it: {words}"
    if outcome == "within_limit":
        return "outside_limit", f"not worth it: {words}"
    return "not_enough_data", f"not settled: {words}"


def cost_row(arm: str, pool: Any, speed: Measured) -> dict[str, Any]:
    """One arm's price: tokens its pool holds, the pool's size, output tokens a second."""
    size = pool.kv_gib if pool else None
    return {
        "arm": arm,
        "tokens in the pool": pool.tokens if pool else None,
        "pool": Measured(value=size * (1 << 30), unit="B", n=1, reason="read, rounded by the log") if size else None,
        "output tokens/s": speed,
    }
