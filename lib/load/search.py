"""Where the knee is, and the highest load that meets an SLO: brackets with their evidence, never a single point.

Pure: the caller gives a function that measures one load. What a level is worth is decided from intervals, so a load
whose interval reaches the limit from both sides is undecided, and the bracket says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lib.errors import BadInput
from lib.load import metrics
from lib.records import Measured, Record

#: Share of requests that must be good, unless another is asked for.
GOOD_FRAC = 0.95
MAX_PROBES = 24


class Probe(Record):
    """One measured load: its share of good requests with interval, what that means, and where the record is."""

    load: float
    status: str
    good_frac: Measured
    goodput_requests_per_s: Measured
    output_tokens_per_s: Measured
    path: str = ""
    reason: str | None = None


class Bracket(Record):
    """The answer of a search: the highest load that passed below the lowest that did not, and why it is not narrower."""

    low: float | None
    high: float | None
    what: str
    reason: str
    probes: tuple[Any, ...] = ()


def probe_of(
    load: float, level: metrics.Level, limits: dict[str, float], good_frac: float = GOOD_FRAC
) -> Probe:
    """What one measured level says about an SLO (keys of `metrics.goodput`: ttft_s, token_latency_s, e2e_s).

    pass: the whole interval of the share of good requests is at or above `good_frac`. fail: all of it is below.
    undecided: across. invalid: the client was the bottleneck or not calibrated for the load, or nothing was sent.
    """
    made = metrics.goodput(level, **limits)
    share = made["goodput_frac"]
    summary = metrics.level_summary(level)
    status, reason = level_status(level, share, good_frac)
    return Probe(
        load=load, status=status, good_frac=share, goodput_requests_per_s=made["goodput_requests_per_s"],
        output_tokens_per_s=summary["output_tokens_per_s"], path=level.path, reason=reason,
    )  # fmt: skip


def status_of(share: Measured, good_frac: float) -> tuple[str, str | None]:
    """pass, fail, undecided or invalid from a share with its interval."""
    if not isinstance(share.value, (int, float)):
        return "invalid", share.reason
    low, high = share.low, share.high
    if low is None or high is None:
        return "undecided", share.reason or "no interval"
    if low >= good_frac:
        return "pass", None
    if high < good_frac:
        return "fail", None
    return "undecided", f"the interval {low:.3f} to {high:.3f} reaches {good_frac:g} from both sides (n = {share.n})"


def level_status(level: metrics.Level, share: Measured, good_frac: float) -> tuple[str, str | None]:
    """The same for a level; invalid where the client has not shown that its times can be believed."""
    client = metrics.client_verdict(level)
    if client.status != "ok":
        return "invalid", f"{client.status}: {'; '.join(client.reasons)}"
    return status_of(share, good_frac)


def highest_load(
    measure: Callable[[float], Probe], start: float, *, most: float, least: float | None = None, whole: bool = True,
    within: float = 0.1, max_probes: int = 12,
) -> Bracket:  # fmt: skip
    """Search the highest load that passes: doubling until one does not, then halving the interval between them.

    An undecided load counts as not passed, so the lower end of the bracket is a load that passed. A load that passes
    above one that failed is reported: the answer then holds for a server that changed while it was measured.

    Args:
        measure: measures one load, for instance with `probe_of`.
        start: where to begin.
        most: never more than this.
        least: when `start` does not pass, go down to this (default: start / 64, or 1 for whole loads).
        whole: loads are whole numbers (concurrency).
        within: stop when the bracket's ends differ by less than this part (whole loads: or by 1).
        max_probes: stop after so many measurements.
    """
    least = least if least is not None else (1.0 if whole else start / 64)
    if not 0 < least <= start <= most or not 0 < within < 1 or not 1 <= max_probes <= MAX_PROBES:
        found = f"least {least}, start {start}, most {most}, within {within}, max_probes {max_probes}"
        raise BadInput(f"0 < least <= start <= most, within in (0, 1), 1 to {MAX_PROBES} probes", found)
    probes: list[Probe] = []

    def ask(load: float) -> bool:
        probe = measure(load)
        probes.append(probe)
        return probe.status == "pass"

    low: float | None = None
    high: float | None = None
    load = float(round(start)) if whole else start
    reason = ""
    while len(probes) < max_probes:
        if ask(load):
            low = load
        else:
            high = load
        if probes[-1].status == "invalid":
            reason = f"stopped at {load:g}: {probes[-1].reason}"
            break
        if low is not None and high is not None:
            if high - low <= (max(1.0, within * low) if whole else within * low):
                break
            load = (low + high) / 2
            load = float(round(load)) if whole else load
            if load in (low, high):
                break
        elif high is None:
            if load >= most:
                reason = f"{most:g}, the highest load asked for, still passed: the limit lies above it"
                break
            load = min(load * 2, most)
        else:
            if load <= least:
                reason = f"even {least:g}, the lowest load asked for, did not pass"
                break
            load = max(load / 2, least)
            load = float(max(1, round(load))) if whole else load
    else:
        reason = f"stopped after {max_probes} measurements"
    passed_above = [p.load for p in probes if p.status == "pass" and high is not None and p.load > high]
    if passed_above:
        reason = "; ".join(x for x in (reason, f"{passed_above[0]:g} passed although {high:g} did not") if x)
    if high is not None:
        status = next(p.status for p in probes if p.load == high)
        why = {"fail": "failed", "undecided": "was undecided (send more requests to decide it)"}.get(status, status)
        reason = "; ".join(x for x in (f"{high:g} {why}", reason) if x)
    return Bracket(low=low, high=high, what="highest load that meets the SLO", reason=reason, probes=tuple(probes))


@dataclass(frozen=True, slots=True)
class Point:
    """One level for `knee`: its load, tokens a second and mean end-to-end seconds, each with an interval."""

    load: float
    output_tokens_per_s: Measured
    e2e_s: Measured
    path: str = ""


def point_of(load: float, level: metrics.Level) -> Point:
    """A measured level as a point of the knee's curve."""
    summary = metrics.level_summary(level)
    return Point(load, summary["output_tokens_per_s"], summary["e2e_s_mean"], level.path)


def knee(points: Sequence[Point]) -> Bracket:
    """Between which loads the knee lies: where power, output tokens/s over mean end-to-end time, is greatest.

    Below the knee throughput grows faster than latency, above it slower (Kleinrock 1979). Levels whose power interval
    reaches the best one's cannot be told from it; the knee lies between the neighbours of their lowest and highest.

    Example: power 10, 18, 25, 24, 12 at C = 1, 2, 4, 8, 16, where 25 and 24 overlap: the knee lies between 2 and 16.
    """
    known = sorted((p for p in points if _power(p) is not None), key=lambda p: p.load)
    left_out = len(points) - len(known)
    rows: tuple[dict[str, Any], ...] = tuple(
        {"load": p.load, "power": power[0], "low": power[1], "high": power[2], "path": p.path}
        for p in known
        if (power := _power(p)) is not None
    )
    if len(known) < 3:
        why = f"{len(known)} level(s) with both figures and their intervals; a knee needs at least 3"
        return Bracket(low=None, high=None, what="knee", reason=why, probes=rows)
    best = max(range(len(rows)), key=lambda i: rows[i]["power"])
    alike = [i for i, row in enumerate(rows) if row["high"] >= rows[best]["low"]]
    first, last = min(alike), max(alike)
    notes = [f"power is greatest at {rows[best]['load']:g}"]
    if len(alike) > 1:
        notes.append(f"{rows[first]['load']:g} to {rows[last]['load']:g} cannot be told from it")
    if left_out:
        notes.append(f"{left_out} level(s) without figures were left out")
    low = rows[first - 1]["load"] if first > 0 else None
    high = rows[last + 1]["load"] if last + 1 < len(rows) else None
    if low is None:
        notes.append("it may lie below the lowest load measured")
    if high is None:
        notes.append("it may lie above the highest load measured")
    return Bracket(low=low, high=high, what="knee", reason="; ".join(notes), probes=rows)


def find_knee(
    measure: Callable[[float], Point], start: float, *, most: float, whole: bool = True, within: float = 0.25,
    max_probes: int = 12,
) -> Bracket:  # fmt: skip
    """Search the knee: double the load until power is clearly below its best, then measure inside the bracket.

    Inside, the widest step between neighbouring loads is halved (geometrically) until steps are at most `within` or no
    whole load lies between, or so many loads were measured. The answer is `knee` over all of them.
    """
    if not 0 < start <= most or not 0 < within < 2 or not 3 <= max_probes <= MAX_PROBES:
        found = f"start {start}, most {most}, within {within}, max_probes {max_probes}"
        raise BadInput(f"0 < start <= most, within in (0, 2), 3 to {MAX_PROBES} probes", found)
    points: list[Point] = []
    load = float(round(start)) if whole else start
    while len(points) < max_probes:
        points.append(measure(load))
        powers = [p for p in map(_power, points) if p is not None]
        last = _power(points[-1])
        if last is None or (powers and last[2] < max(powers)[1]) or load >= most:
            break
        load = min(load * 2, most)
    while len(points) < max_probes and len([p for p in points if _power(p)]) >= 3:
        found_now = knee(points)
        loads = sorted(p.load for p in points)
        low = found_now.low if found_now.low is not None else loads[0]
        high = found_now.high if found_now.high is not None else loads[-1]
        steps = [(b / a, a, b) for a, b in itertools.pairwise(loads) if low <= a and b <= high]
        steps = [s for s in steps if s[0] > 1 + within and not (whole and s[2] - s[1] <= 1)]
        if not steps:
            break
        _, a, b = max(steps)
        middle = (a * b) ** 0.5
        middle = float(round(middle)) if whole else middle
        points.append(measure(middle if a < middle < b else (a + b) // 2 if whole else (a + b) / 2))
    return knee(points)


def _power(point: Point) -> tuple[float, float, float] | None:
    rate, time = point.output_tokens_per_s, point.e2e_s
    figures = (rate.value, rate.low, rate.high, time.value, time.low, time.high)
    if not all(isinstance(x, (int, float)) for x in figures) or not time.low:
        return None
    value, low, high, mean, short, long = (float(x) for x in figures)  # type: ignore[arg-type]
    return value / mean, low / long, high / short
