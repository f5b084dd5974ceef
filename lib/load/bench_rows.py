"""Notebook 03's records as rows of tables and figures: levels over repeats, depths, GPU state, the server's own counts."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lib.errors import WorkbookError
from lib.load import metrics, stats
from lib.load.bench_forecast import KNEE_EFFICIENCY, Forecast, Frozen, Point, depth_id, differences
from lib.load.benchmark import LEVEL_FILE, DepthCell, Levels, level_name
from lib.load.client import read_level
from lib.load.metrics import Level
from lib.model.roofline import step_efficiency
from lib.params import BenchmarkParams, load_profile
from lib.records import Measured, Prediction
from lib.results import Measurement, NotebookRun
from lib.server import telemetry
from lib.server.gpu_state import ServerCount, WindowState

Row = dict[str, Any]
Summary = dict[str, Measured]
#: A raw level larger than this is not kept in memory beside others (a token's times take about 70 bytes there).
LARGE_BYTES = 8_000_000
#: A depth was predicted for the prompt that was sent if their tokens differ by at most this share.
SAME_DEPTH_FRAC = 0.02
#: Replicates of the interval over repeats.
DRAWS = 4000
#: The profile that holds the origin case's runs.
ORIGIN_PROFILE = "qwen3.5-397b-nvfp4-rtx6000x8"

#: Metrics that notebook 03 shows by level, in this order.
LATENCY = ("ttft_s_p50", "ttft_s_p99", "chunk_gap_s_p50", "chunk_gap_s_p99", "token_latency_s_mean", "e2e_s_p50")
#: Throughput over the whole run and over the window in which all slots were busy.
THROUGHPUT = (
    "output_tokens_per_s",
    "steady_output_tokens_per_s",
    "steady_window_s",
    "request_output_tokens_per_s_mean",
    "decode_tokens_per_s_mean",
)
#: Headings of these columns.
TITLES = {
    "ttft_s_p50": "TTFT, median",
    "ttft_s_p99": "TTFT, p99",
    "chunk_gap_s_p50": "chunk gap, median",
    "chunk_gap_s_p99": "chunk gap, p99",
    "token_latency_s_mean": "token latency, mean",
    "e2e_s_p50": "whole answer, median",
    "output_tokens_per_s": "whole run",
    "steady_output_tokens_per_s": "steady window",
    "steady_window_s": "length of that window",
    "request_output_tokens_per_s_mean": "a request, whole answer",
    "decode_tokens_per_s_mean": "a request, after its first token",
    "client": "client",
    "client_lag_p99_s": "its timer's lag, p99",
    "client_cpu_frac": "its CPU share",
}
#: What a metric with one figure a level says instead of an interval; in a table of levels it goes without saying.
ONE_FIGURE = "one figure a level: repeat for an interval"
#: What shows that the client kept up.
CLIENT = ("client", "client_lag_p99_s", "client_cpu_frac")


# reading --------------------------------------------------------------------------------------------------------------


def level_in(folder: Path) -> Level | None:
    """The raw level in a folder, None if it left none that can be read."""
    file = folder / LEVEL_FILE
    if not file.exists():
        return None
    stat = file.stat()
    read = _read if stat.st_size < LARGE_BYTES else _read_large
    return read(str(file), stat.st_mtime_ns, stat.st_size)


def level_of(measurement: Measurement) -> Level | None:
    """The raw level of a measurement, None if it left none."""
    return level_in(measurement.folder)


def _read_file(path: str, _mtime: int, _size: int) -> Level | None:
    level = read_level(Path(path))
    return level if level.requests else None


_read = functools.lru_cache(maxsize=256)(_read_file)
_read_large = functools.lru_cache(maxsize=2)(_read_file)


def summary_in(folder: Path) -> Summary | None:
    """Every metric of the level in a folder, computed from its raw record once."""
    file = folder / LEVEL_FILE
    if level_in(folder) is None:
        return None
    stat = file.stat()
    return _summary(str(file), stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=256)
def _summary(path: str, mtime: int, size: int) -> Summary:
    level = (_read if size < LARGE_BYTES else _read_large)(path, mtime, size)
    return metrics.level_summary(level) if level else {}


def usable(levels: Levels) -> dict[int, list[Measurement]]:
    """Levels by their repeats that were measured without error on one and the same server."""
    found = {c: [m for m in repeats if m.ok and level_of(m) is not None] for c, repeats in levels.items()}
    return {c: kept for c, kept in found.items() if kept}


# repeats --------------------------------------------------------------------------------------------------------------


def over_repeats(values: Sequence[Measured]) -> Measured:
    """One metric over repeats: the mean, with an interval that holds the spread between repeats and that inside them.

    Two-stage bootstrap: repeats are drawn with replacement, each contributes a draw from its own 95% interval; the
    spread between repeats is widened by sqrt(R / (R - 1)), without which few repeats look too much alike. `n` counts
    the units of all repeats. One repeat keeps its own interval.

    Example: 100 [95, 105] and 120 [115, 125]: 110 [94, 126].
    """
    known = [v for v in values if isinstance(v.value, (int, float)) and not isinstance(v.value, bool)]
    if not known:
        return values[0] if values else Measured(value=None, reason="not measured")
    missing = len(values) - len(known)
    why = next((v.reason for v in values if v not in known), None)
    lost = f"{missing} of {len(values)} repeats have no value ({why})"
    if len(known) == 1:
        one = known[0]
        note = lost if missing else ""
        return one.model_copy(update={"reason": "; ".join(x for x in (one.reason, note) if x) or None})
    centres = np.array([float(v.value) for v in known])  # type: ignore[arg-type]
    mean = float(centres.mean())
    n = sum(v.n or 0 for v in known) or None
    text = lost if missing else None
    if any(v.low is None or v.high is None for v in known):
        interval = stats.bootstrap_mean(list(centres))
        reason = "; ".join(x for x in (text, "a repeat has no interval of its own", interval.reason) if x)
        return Measured(value=mean, unit=known[0].unit, n=n, low=interval.low, high=interval.high, reason=reason)
    generator = np.random.default_rng(0)
    picks = generator.integers(0, len(known), (DRAWS, len(known)))
    noise = generator.standard_normal((DRAWS, len(known))) / 1.96
    below = centres - np.array([v.low for v in known], dtype=float)
    above = np.array([v.high for v in known], dtype=float) - centres
    widened = mean + (centres - mean) * math.sqrt(len(known) / (len(known) - 1))
    draws = widened[picks] + np.where(noise < 0, noise * below[picks], noise * above[picks])
    low, high = np.percentile(draws.mean(axis=1), [2.5, 97.5])
    return Measured(value=mean, unit=known[0].unit, n=n, low=float(low), high=float(high), reason=text)


def pooled(repeats: Sequence[Measurement], key: str) -> Measured:
    """One metric of a level over its usable repeats."""
    found = [s for m in repeats if m.ok and (s := summary_in(m.folder))]
    if not found:
        reason = next((m.problem for m in repeats if m.problem), "no record")
        return Measured(value=None, reason=reason)
    return over_repeats([s[key] for s in found])


# levels ---------------------------------------------------------------------------------------------------------------


def _stopped(level: Level) -> str:
    return (
        f"; stopped after {len(level.requests)} of {level.header['planned']} requests"
        if level.header["stopped"]
        else ""
    )


def _short(measured: Measured) -> Measured:
    """Without the remark that a level has one such figure, which the table's form says."""
    return measured.model_copy(update={"reason": "one figure"}) if measured.reason == ONE_FIGURE else measured


#: The origin's columns and their headings.
ORIGIN_COLUMNS = {
    "aggregate_tokens_per_s": "aggregate",
    "request_tokens_per_s": "per request",
    "tokens": "tokens",
    "wall_s": "wall",
    "ok": "ok",
}


def origin_rows(levels: Levels) -> list[Row]:
    """The origin's table, measured here: one row a repeat; a level without a usable record shows why."""
    rows: list[Row] = []
    for c, repeats in levels.items():
        for number, measurement in enumerate(repeats, 1):
            level = level_of(measurement)
            row: Row = {"concurrency": c, "repeat": number}
            if level is not None and not measurement.stamp.invalid:
                found = metrics.origin_row(level)
                row |= {words: _short(found[key]) for key, words in ORIGIN_COLUMNS.items()}
            words = (measurement.problem or "") + (_stopped(level) if level else "; no record")
            rows.append(
                {
                    **row,
                    "seconds": measurement.stamp.seconds,
                    "problem": words.strip("; ") if measurement.problem else "",
                }
            )
    return rows


def figure_rows(levels: Levels) -> list[Row]:
    """Levels as the throughput figure takes them, over repeats."""
    return [
        {
            "concurrency": c,
            "output_tokens_per_s": pooled(repeats, "output_tokens_per_s"),
            "ttft_s": pooled(repeats, "ttft_s_p50"),
            "itl_s": pooled(repeats, "chunk_gap_s_p50"),
        }
        for c, repeats in usable(levels).items()
    ]


def user_rows(levels: Levels) -> list[Row]:
    """What one user gets while C are served: first token, then tokens a second, and what the whole answer took."""
    keys = ("ttft_s_p50", "ttft_s_p99", "decode_tokens_per_s_mean", "request_output_tokens_per_s_mean", "e2e_s_p50")
    return level_rows(levels, keys)


def level_rows(levels: Levels, keys: Sequence[str]) -> list[Row]:
    """Chosen metrics by level over its repeats; a level that the client spoilt shows the reason instead of a number."""
    return [
        {"concurrency": c, "repeats": len(repeats), **{TITLES[key]: _short(pooled(repeats, key)) for key in keys}}
        for c, repeats in usable(levels).items()
    ]


def repeat_rows(levels: Levels, keys: Sequence[str]) -> list[Row]:
    """Chosen metrics by level and repeat."""
    rows = []
    for c, repeats in levels.items():
        for number, measurement in enumerate(repeats, 1):
            found = None if measurement.stamp.invalid else summary_in(measurement.folder)
            if found:
                rows.append({"concurrency": c, "repeat": number, **{TITLES[key]: _short(found[key]) for key in keys}})
    return rows


def failure_rows(levels: Levels) -> list[Row]:
    """Requests that failed, by level, repeat and cause; sent = ok + failed."""
    rows = []
    for c, repeats in levels.items():
        for number, measurement in enumerate(repeats, 1):
            level = level_of(measurement)
            row: Row = {"concurrency": c, "repeat": number}
            if level is None:
                rows.append({**row, "sent": 0, "ok": 0, "failed": 0, "causes": measurement.problem or "no record"})
                continue
            causes = metrics.failures(level)
            failed = sum(causes.values())
            words = ", ".join(f"{name}: {n}" for name, n in causes.items()) or "none"
            rows.append({
                **row, "sent": len(level.requests), "ok": len(level.requests) - failed, "failed": failed, "causes": words
            })  # fmt: skip
    return rows


def smoke_rows(measurement: Measurement) -> list[Row]:
    """The smoke test's figure taken apart: how many tokens, how long to the first, how fast after it."""
    level = level_of(measurement)
    if level is None or not level.requests:
        return [{"what": "smoke test", "value": Measured(value=None, reason=measurement.problem or "no record")}]
    words = {
        "output_tokens": "output tokens, as the server counts them",
        "reasoning_tokens": "of these, reasoning tokens",
        "ttft_s": "time to first token",
        "decode_s": "decode time after it",
        "decode_tokens_per_s": "decode rate",
        "tokens_per_s": "tokens over end-to-end time (what a smoke test prints)",
        "ttft_frac": "share of the time before the first token",
    }
    apart = metrics.decompose(level.requests[0])
    return [{"what": text, "value": apart[key]} for key, text in words.items()]


# the knee -------------------------------------------------------------------------------------------------------------


def steps(levels: Levels) -> list[Row]:
    """From each level to the next: how much of the added users came back as throughput (1: all, 0: nothing).

    The interval takes both levels' intervals at their worst, so it is rather too wide than too narrow.
    """
    rates = {c: pooled(repeats, "output_tokens_per_s") for c, repeats in usable(levels).items()}
    known = [(c, m) for c, m in sorted(rates.items()) if isinstance(m.value, (int, float)) and m.value > 0]
    rows: list[Row] = []
    for (a, below), (b, above) in zip(known, known[1:], strict=False):
        value = step_efficiency(a, float(below.value or 0), b, float(above.value or 0))
        low = high = None
        if None not in (below.low, below.high, above.low, above.high):
            ends = [float(x or 0) for x in (below.low, below.high, above.low, above.high)]
            if min(ends) > 0:
                low, high = step_efficiency(a, ends[1], b, ends[2]), step_efficiency(a, ends[0], b, ends[3])
        n = (below.n or 0) + (above.n or 0)
        reason = None if low is not None else "a level has no interval"
        efficiency = Measured(value=value, unit="", n=n or None, low=low, high=high, reason=reason)
        rows.append({
            "from": a, "to": b, "throughput before": below, "throughput after": above, "scaling efficiency": efficiency,
            "reading": step_reading(efficiency),
        })  # fmt: skip
    return rows


def step_reading(efficiency: Measured) -> str:
    """One word for a step: pays, does not pay, or unclear where the interval holds the limit."""
    if efficiency.low is None or efficiency.high is None:
        return "unclear: no interval"
    if efficiency.low >= KNEE_EFFICIENCY:
        return "pays"
    if efficiency.high < KNEE_EFFICIENCY:
        return "does not pay" + (": throughput falls" if efficiency.high < 0 else "")
    return f"unclear: the interval holds {KNEE_EFFICIENCY:g}"


def knee_level(levels: Levels) -> tuple[int | None, int | None, str]:
    """The last level whose users pay, the next one, and what is known: (4, 8, reason), (None, None, why there is none)."""
    found = steps(levels)
    if not found:
        return None, None, "fewer than two levels with a throughput"
    for row in found:
        if row["reading"].startswith("does not pay"):
            return (
                row["from"],
                row["to"],
                f"up to C={row['from']} each step pays, from there to C={row['to']} it does not",
            )
        if row["reading"] != "pays":
            return None, None, f"from C={row['from']} to C={row['to']}: {row['reading']}"
    return None, None, f"every step up to C={found[-1]['to']} pays: the knee lies above the highest level measured"


# prediction against measurement ---------------------------------------------------------------------------------------


def times(measured: Measured, factor: float) -> Measured:
    """A measured number with its interval times a factor."""
    if not isinstance(measured.value, (int, float)):
        return measured
    low, high = (None if x is None else x * factor for x in (measured.low, measured.high))
    return measured.model_copy(update={"value": measured.value * factor, "low": low, "high": high})


def measured_for(point: Point, levels: Levels, cells: Sequence[DepthCell]) -> Measured | None:
    """What was measured of a predicted point: C x decode rate of a request, or the median time to first token."""
    if point.kind == "level":
        repeats = usable(levels).get(point.concurrency)
        return times(pooled(repeats, "decode_tokens_per_s_mean"), point.concurrency) if repeats else None
    if point.id.startswith("level-"):
        repeats = usable(levels).get(1) if point.id == "level-C1-ttft" else None
        return pooled(repeats, "ttft_s_p50") if repeats else None
    for cell in cells:
        name = depth_id(cell.depth, cell.concurrency)
        if not point.id.startswith(f"{name}-") or not cell.measurement.ok:
            continue
        half = "hit" if point.id.endswith("-hit") else "cold"
        planned = point.new_tokens if point.id.endswith("-cold") else point.context_tokens
        sent = cell.tokens() or 0
        if point.value is not None and not _same_depth(planned, sent, point):
            return Measured(value=None, reason=f"predicted for {planned:,.0f} tokens, sent were {sent:,}")
        found = summary_in(cell.measurement.folder / half)
        if found is None:
            return None
        if point.kind == "ttft":
            return found["ttft_s_p50"]
        return times(found["decode_tokens_per_s_mean"], point.concurrency)
    return None


def _same_depth(planned: float, sent: int, point: Point) -> bool:
    """Whether a bound speaks of the prompt that was sent (a decode step's context holds half of the answer too)."""
    answer = 0.0 if point.kind == "ttft" else 0.1 * planned
    return sent > 0 and abs(planned - sent) <= SAME_DEPTH_FRAC * planned + answer


def share(point: Point, measured: Measured | None) -> Measured:
    """What part of the bound is reached: rate over ceiling, or shortest time over measured time."""
    if point.value is None:
        return Measured(value=None, reason=point.reason)
    if measured is None or not isinstance(measured.value, (int, float)) or not measured.value:
        return Measured(value=None, reason=(measured.reason if measured else None) or "not measured")
    ends = [measured.value, measured.low, measured.high]
    if point.kind == "ttft":
        parts = [None if x is None or x <= 0 else point.value / x for x in (ends[0], ends[2], ends[1])]
    else:
        parts = [None if x is None else x / point.value for x in ends]
    return Measured(value=parts[0], unit="frac", n=measured.n, low=parts[1], high=parts[2], reason=measured.reason)


FORMULAS = {
    "level": "C / (max((weights + C x (KV + state)) / bandwidth, products / FLOP/s) + all-reduces)",
    "depth": "C / (max((weights + C x (KV + state)) / bandwidth, products / FLOP/s) + all-reduces)",
    "ttft": "max(products / FLOP/s, (weights + cached KV) / bandwidth) + all-reduces",
}


def predictions(frozen: Frozen, levels: Levels | None = None, cells: Sequence[DepthCell] = ()) -> list[Prediction]:
    """The frozen bounds, beside what was measured where something was."""
    made = []
    for point in frozen.forecast.points:
        kind = "a ceiling" if point.unit == "tok/s" else "the shortest possible"
        source = "lib.model.roofline." + ("prefill_bound" if point.kind == "ttft" else "decode_bound")
        made.append(
            Prediction(
                id=point.id,
                what=point.what + (f" (binds: {point.binds})" if point.binds else ""),
                predicted=Measured(value=point.value, unit=point.unit, reason=point.reason or kind),
                formula=FORMULAS[point.kind],
                source=f"{source}; raw/03/prediction/prediction.json",
                measured=measured_for(point, levels, cells) if levels is not None else None,
            )
        )
    return made


def expected_rows(frozen: Frozen) -> list[Row]:
    """The frozen bounds before anything is measured: what, how much, what it is made of, and which term binds."""
    return [
        {
            "what": point.what,
            "bound": _figure(point),
            "binds": point.binds or "unknown",
            "terms": _terms(point),
        }
        for point in frozen.forecast.points
    ]


def _terms(point: Point) -> str:
    found = ", ".join(f"{name} {_seconds(value)}" for name, value in point.terms_s.items() if value)
    return found or (point.reason or "")


def input_rows(frozen: Frozen) -> list[Row]:
    """What the prediction was computed from."""
    rows = [{"input": name, "value": words} for name, words in frozen.forecast.inputs.items()]
    if frozen.forecast.estimate:
        rows.append({"input": "estimates, not limits", "value": frozen.forecast.estimate})
    reason = next((p.reason for p in frozen.forecast.points if p.reason), None)
    return rows + ([{"input": "not predicted", "value": reason}] if reason else [])


def frozen_rows(frozen: Frozen, now: Forecast) -> list[Row]:
    """When the prediction was written down, and every figure that a later computation gives otherwise."""
    rows: list[Row] = [{
        "what": f"the prediction, {len(frozen.forecast.points)} figures",
        "written down": f"{frozen.frozen_at}, sha256 {frozen.sha256[:12]}", "computed now": "the same",
    }]  # fmt: skip
    changed = differences(frozen.forecast, now)
    if changed:
        rows[0]["computed now"] = f"{len(changed)} differ; what was written down counts"
    for a, b in changed:
        either = a or b
        rows.append({
            "what": either.what if either else "", "written down": _figure(a), "computed now": _figure(b)
        })  # fmt: skip
    return rows


def _figure(point: Point | None) -> Measured | str:
    if point is None:
        return "not predicted"
    return Measured(value=point.value, unit=point.unit, reason=point.reason or "a bound")


def bound_rows(frozen: Frozen, levels: Levels, cells: Sequence[DepthCell]) -> list[Row]:
    """Each predicted bound with its terms, which one binds, what was measured and what share of it was reached."""
    knee, _, _ = knee_level(levels)
    rows = []
    for point in frozen.forecast.points:
        measured = measured_for(point, levels, cells)
        mark = " (the knee)" if point.kind == "level" and point.concurrency == knee else ""
        rows.append({
            "point": point.id + mark,
            "bound": _figure(point),
            "binds": point.binds or "unknown",
            "measured": measured or Measured(value=None, reason="not measured"),
            "share reached": share(point, measured),
        })  # fmt: skip
    return rows


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"


#: Panels of the figure of ceilings.
CEILING_PANELS = (
    ("rate", "Decode rate of all requests", "tok/s"),
    ("share", "Share of the ceiling reached", "frac"),
)


def ceiling_figure_rows(frozen: Frozen, levels: Levels) -> dict[str, list[Row]]:
    """Measured decode rate and its ceiling by level, as two series of one figure."""
    points = [p for p in frozen.forecast.points if p.kind == "level" and p.value is not None]
    if not points:
        return {}
    series: dict[str, list[Row]] = {"predicted ceiling": [], "measured decode rate x C": []}
    for point in points:
        predicted = Measured(value=point.value, unit="tok/s", reason="a ceiling")
        series["predicted ceiling"].append({"concurrency": point.concurrency, "rate": predicted})
        measured = measured_for(point, levels, ())
        if measured is not None:
            part = share(point, measured)
            series["measured decode rate x C"].append(
                {"concurrency": point.concurrency, "rate": measured, "share": part}
            )
    return series


# depths ---------------------------------------------------------------------------------------------------------------


def cached_share(level: Level | None, of_tokens: int | None = None) -> Measured:
    """Lowest share of a request's tokens that came from the cache (of its prompt, or of `of_tokens`), as the server says."""
    if level is None:
        return Measured(value=None, reason="no record")
    ok = [r for r in level.requests if metrics.is_ok(r)]
    parts = []
    for record in ok:
        cached, prompt = metrics.cached_tokens(record), (record["usage"] or {}).get("prompt_tokens")
        whole = of_tokens or prompt
        if cached is None or not whole:
            return Measured(value=None, n=len(ok), reason="the server does not say how many tokens came from its cache")
        parts.append(cached / whole)
    if not parts:
        return Measured(value=None, n=0, reason="no request succeeded")
    note = f"lowest of {len(parts)}; highest {max(parts):.1%}"
    return Measured(value=min(parts), unit="frac", n=len(parts), reason=note)


def cached_words(level: Level | None, of_tokens: int | None, half: str) -> str | Measured:
    """The same in words: lowest and highest share over the requests, of the whole prompt or of the prefix."""
    ok = [r for r in level.requests if metrics.is_ok(r)] if level else []
    lowest = cached_share(level, of_tokens)
    if not isinstance(lowest.value, (int, float)):
        return lowest
    tokens = [metrics.cached_tokens(r) or 0 for r in ok]
    parts = f"{min(tokens):,}" if min(tokens) == max(tokens) else f"{min(tokens):,} to {max(tokens):,}"
    if half == "hit":
        return f"{parts} tokens a request, at least {lowest.value:.0%} of the prefix"
    return f"{parts} tokens a request"


def depth_rows(cells: Sequence[DepthCell]) -> list[Row]:
    """Time to first token and decode rate by depth, users at once, and whether the prefix was in the cache."""
    rows: list[Row] = []
    for cell in cells:
        for half, words in (("cold", "empty cache"), ("hit", "prefix in the cache")):
            folder = cell.measurement.folder / half
            found, level = summary_in(folder), level_in(folder)
            tokens = cell.tokens()
            row: Row = {"depth": cell.depth, "tokens": tokens, "users": cell.concurrency, "cache": words}
            if found is None or not cell.measurement.ok:
                none = Measured(value=None, reason=cell.measurement.problem or "no record")
                rows.append(
                    {**row, "time to first token": none, "decode rate": none, "from the cache": none, "ok": "0"}
                )
                continue
            failed = sum(metrics.failures(level).values()) if level else 0
            rows.append({
                **row,
                "time to first token": found["ttft_s_p50"],
                "decode rate": found["decode_tokens_per_s_mean"],
                "from the cache": cached_words(level, tokens if half == "hit" else None, half),
                "ok": f"{len(level.requests) - failed} of {len(level.requests)}" if level else "0",
            })  # fmt: skip
    return rows


def depth_figure_rows(cells: Sequence[DepthCell], frozen: Frozen) -> dict[str, list[Row]]:
    """The same as series of the figure by depth, with the shortest possible times and ceilings of one user."""
    series: dict[str, list[Row]] = {}
    for cell in cells:
        for half in ("cold", "hit"):
            found = summary_in(cell.measurement.folder / half)
            if found is None or not cell.measurement.ok:
                continue
            users = "one user" if cell.concurrency == 1 else f"{cell.concurrency} agents"
            name = f"{users}, {'cold' if half == 'cold' else 'prefix hit'}"
            series.setdefault(name, []).append({
                "depth": cell.tokens(), "ttft_s": found["ttft_s_p50"], "decode": found["decode_tokens_per_s_mean"]
            })  # fmt: skip
    bounds = []
    for cell in cells:
        if cell.concurrency != 1:
            continue
        name = depth_id(cell.depth, 1)
        first, rate = frozen.forecast.point(f"{name}-cold"), frozen.forecast.point(f"{name}-decode")
        row: Row = {"depth": cell.tokens()}
        if first and first.value is not None:
            row["ttft_s"] = Measured(value=first.value, unit="s", reason="a bound")
        if rate and rate.value is not None:
            row["decode"] = Measured(value=rate.value, unit="tok/s", reason="a bound")
        if len(row) > 1:
            bounds.append(row)
    return {**series, **({"one user, cold, predicted bound": bounds} if bounds else {})}


# GPU state and the server's own counts --------------------------------------------------------------------------------


def windows(levels: Levels, cells: Sequence[DepthCell]) -> dict[str, Path]:
    """Every measured window by name: the folder of its level record and telemetry."""
    found: dict[str, Path] = {}
    for c, repeats in levels.items():
        found |= {level_name(c, i): m.folder for i, m in enumerate(repeats) if level_of(m) is not None}
    for cell in cells:
        for half in ("cold", "hit"):
            folder = cell.measurement.folder / half
            if level_in(folder) is not None:
                found[f"{depth_id(cell.depth, cell.concurrency)}/{half}"] = folder
    return found


def state_in(folder: Path) -> WindowState:
    """GPU state over the window of the level in a folder (its warm-up left out)."""
    level = level_in(folder)
    window = level.header["window"] if level else {}
    return telemetry.read_state(folder, window.get("start_ns"), window.get("end_ns"))


def gpu_rows(levels: Levels, cells: Sequence[DepthCell]) -> list[Row]:
    """GPU state by window: clocks, power, temperature, throttling, Xids, the slowest rank; or why there is none."""
    rows: list[Row] = []
    states = {name: state_in(folder) for name, folder in windows(levels, cells).items()}
    if states and all(state.source is None for state in states.values()):
        busy = {
            name: Measured(value=s.cpu_frac, unit="frac", reason=None if s.cpu_frac else "no sample")
            for name, s in states.items()
        }
        return [{"window": name, "GPUs": s.reason, "CPU busy": busy[name]} for name, s in states.items()]
    for name, state in states.items():
        xids = "; ".join(f"Xid {x.number} on {x.gpu}" for x in state.xids) or "none" if state.xids is not None else None
        rows.append({
            "window": name,
            "GPUs": state.reason or f"{len(state.gpus)} by {state.source}, {max(g.samples for g in state.gpus)} samples",
            "SM clock": _range([g.sm_clock_mhz for g in state.gpus], "MHz"),
            "memory clock": _range([g.memory_clock_mhz for g in state.gpus], "MHz"),
            "power": _range([g.power_w for g in state.gpus], "W"),
            "hottest": _range([g.temperature_max_c for g in state.gpus], "degC"),
            "throttled": "; ".join(state.throttled) or ("no" if state.reported else "unknown"),
            "slowest rank": state.slowest or "unknown",
            "Xid": xids or "unknown",
            "CPU busy": Measured(value=state.cpu_frac, unit="frac", reason=None if state.cpu_frac is not None else "no sample"),
        })  # fmt: skip
    return rows


def _range(values: Sequence[float | None], unit: str) -> str:
    known = [v for v in values if v is not None]
    if not known:
        return "unknown"
    low, high = min(known), max(known)
    return f"{low:.0f} {unit}" if high - low < 0.5 else f"{low:.0f} to {high:.0f} {unit}"


def truth_of(folder: Path) -> tuple[ServerCount, dict[str, float], dict[str, float], str]:
    """The server's own counts over a window beside the client's, their difference, and the difference explained."""
    count, level = telemetry.read_count(folder), level_in(folder)
    if level is None:
        return count, {}, {}, "no record"
    ok = [r for r in level.requests if metrics.is_ok(r)]
    client = {
        "generation_tokens": float(sum((r["usage"] or {}).get("completion_tokens") or 0 for r in ok)),
        "prompt_tokens": float(sum((r["usage"] or {}).get("prompt_tokens") or 0 for r in ok)),
        "requests": float(len(ok)),
    }
    if count.reason:
        return count, client, {}, count.reason
    off = {k: count.deltas[k] - v for k, v in client.items() if k in count.deltas}
    if not off:
        return count, client, {}, "the server counts none of these"
    return count, client, off, explain(off, len(level.requests) - len(ok))


def explain(off: Mapping[str, float], failed: int) -> str:
    """Why server and client counted differently, as far as the counts themselves say it."""
    if not any(off.values()):
        return "equal"
    more, words = off.get("requests", 0.0), []
    if failed:
        words.append(f"{failed} requests failed or were stopped: their tokens count on the server only")
    if more > failed:
        words.append(f"{more - failed:.0f} requests are not this client's (another client, or a health probe)")
    if more < 0:
        words.append(f"{-more:.0f} requests were not counted yet {telemetry.SETTLE_S:g} s after the last answer")
    return "; ".join(words) or "not explained: as many requests, other tokens"


def truth_rows(levels: Levels, cells: Sequence[DepthCell]) -> list[Row]:
    """What the server counted over each window (/metrics) beside what the client counted, and why they differ."""
    rows = []
    for name, folder in windows(levels, cells).items():
        count, client, _, words = truth_of(folder)
        found = summary_in(folder) or {}
        ours = found.get("ttft_s_mean")
        theirs = count.mean_s("ttft")
        why = count.reason or "not exported"
        rows.append({
            "window": name,
            "output tokens, server": _count(count.value("generation_tokens"), why),
            "client": int(client.get("generation_tokens", 0)),
            "prompt tokens, server": _count(count.value("prompt_tokens"), why),
            "client's": int(client.get("prompt_tokens", 0)),
            "of these from its cache": _count(count.value("cached_tokens"), why),
            "mean TTFT, server": Measured(value=theirs, unit="s", reason="mean of a histogram" if theirs is not None else why),
            "mean TTFT, client": ours or Measured(value=None, reason="no record"),
            "difference of counts": words,
        })  # fmt: skip
    return rows


def _count(value: float | None, why: str) -> Measured:
    return Measured(value=None if value is None else int(value), unit="tokens", reason=why if value is None else None)


# published runs -------------------------------------------------------------------------------------------------------

#: What to doubt about the origin's runs, from the rows themselves and from what the case says.
DOUBTS = (
    ("random-token prompts", "acceptance under speculation depends on text; real text is another measurement"),
    (
        "lengths left to the model: 4,000 tokens of 4 x 1,000 at C=1, 7,245 of 8,000 at C=4",
        "short answers end early and thin the load out",
    ),
    (
        "max(4, 2C) requests, one figure over the whole run",
        "ramp and drain are in it: see `slots busy`; there is no steady-state figure",
    ),
    ("one run, no interval", "differences of a few percent say nothing"),
    (
        "with NEXTN asked for: 172.1 against 172.2 tok/s, tokens equal to the digit at three of four levels",
        "the treatment left no trace: notebook 04 calls it invalid, and the rows stand apart",
    ),
    (
        "compared with a published 1,373 tok/s on 4 GPUs",
        "at an unstated concurrency; per GPU that figure is the higher one: see `per GPU`",
    ),
)


def origin_reference(run: NotebookRun) -> tuple[dict[str, Any], bool]:
    """The published runs of this profile, else the origin case's; True where they are this profile's own."""
    own = dict(run.profile.reference)
    if own.get("without_nextn"):
        return own, True
    try:
        return dict(load_profile(ORIGIN_PROFILE).reference), False
    except WorkbookError:
        return {}, False


def reference_rows(run: NotebookRun) -> list[Row]:
    """The origin's runs and the 4-GPU figure as rows, with what their own numbers say about ramp and drain.

    `slots busy` is aggregate over C times the per-request rate: 1 where all slots work all the time.
    """
    reference, _ = origin_reference(run)
    rows: list[Row] = []
    for key, words in (("without_nextn", "8 GPUs"), ("asked_for_nextn", "8 GPUs, NEXTN asked for")):
        for row in reference.get(key, []):
            aggregate, one, c = row["aggregate_tokens_per_s"], row["per_request_tokens_per_s"], row["concurrency"]
            rows.append({
                "run": words, "concurrency": c, "aggregate tok/s": aggregate, "per request tok/s": one,
                "tokens": row["tokens"], "wall s": row["wall_s"], "ok": row["ok"],
                "tokens / wall": round(row["tokens"] / row["wall_s"], 1), "slots busy": round(aggregate / (c * one), 3),
                "per GPU tok/s": round(aggregate / 8, 1),
            })  # fmt: skip
    if figure := reference.get("published_4_gpus_tokens_per_s"):
        rows.append({
            "run": "published elsewhere, 4 GPUs", "concurrency": "not stated", "aggregate tok/s": figure,
            "per GPU tok/s": round(figure / 4, 1),
        })  # fmt: skip
    return rows


def doubt_rows(run: NotebookRun) -> list[Row]:
    """What to doubt about the origin's runs; empty where the profile quotes others of its own."""
    reference, _ = origin_reference(run)
    return [{"what": what, "why it matters": why} for what, why in DOUBTS] if reference.get("without_nextn") else []


def reference_caption(run: NotebookRun) -> str:
    """Whose runs the reference rows are."""
    reference, own = origin_reference(run)
    whose = (
        "this profile's" if own else "the origin case's: another model on other hardware, for comparison of shape only"
    )
    return f"Published, quoted ({whose}); source: {reference.get('source', 'none')}"


def params_of(run: NotebookRun) -> BenchmarkParams:
    """The notebook's parameters, typed."""
    params: BenchmarkParams = run.params  # type: ignore[assignment]
    return params
