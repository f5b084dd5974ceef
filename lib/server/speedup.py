"""Does speculation pay? Launches of both arms compared, the concurrency at which it stops paying, and what was predicted.

Requests of one launch share that launch's luck (memory layout, clocks, graph captures), so the launch is the unit: the
interval comes from the spread between launches of one arm, widened by the spread between prompts. Three answers are
possible beside *inconclusive*: it pays, it costs, or there is no difference within x%.

Model of the prediction: a verification step yields `accept_length` tokens and takes as long as `verify_cost` plain
decode steps for the target and `draft_cost` for the drafts before it, so speed with / without is
accept_length / (verify_cost + draft_cost). Acceptance belongs to the text, costs belong to the concurrency.

Source: Leviathan et al. 2023 (theorem 3.8, with the costs of verification not assumed to be 1).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from lib.load.stats import student_t_quantile
from lib.records import Measured, Record

#: Words of a comparison and the outcome (a key of OUTCOMES) that each leads to.
WORDS = {
    "pays": "within_limit",
    "costs": "outside_limit",
    "no_difference": "outside_limit",
    "inconclusive": "not_enough_data",
    "invalid": "no_trace_of_treatment",
}
POWER = 0.8


class Speedup(Record):
    """Speed with / without for one text at one concurrency, its verdict word and what it could have found."""

    word: str
    reason: str
    ratio: Measured
    base_launches: int
    treated_launches: int
    launch_spread_frac: float | None = None
    detectable_frac: float | None = None
    launches_needed: int | None = None


def compare_launches(
    base: Sequence[float],
    treated: Sequence[float],
    margin_frac: float,
    prompt_logs: Sequence[float] = (),
) -> Speedup:
    """Speed of the treated launches over that of the untreated ones, with a 95% interval.

    Args:
        base, treated: one speed (tok/s) for each launch, in any order; logarithms are compared.
        margin_frac: x of 'no difference within x%': the smallest difference that would matter.
        prompt_logs: for each prompt log(speed with / without); their spread says how much prompts like these differ.

    Returns:
        `pays` if the whole interval lies above 1, `costs` if below, `no_difference` if all of it lies within
        1 / (1 + x) to 1 + x, else `inconclusive`. Fewer than two launches of an arm give no interval.

    Example: speeds 100 and 101 without, 110 and 111 with: 1.10, and it pays.
    """
    a, b = np.log(np.asarray(base, dtype=np.float64)), np.log(np.asarray(treated, dtype=np.float64))
    counts = {"base_launches": int(a.size), "treated_launches": int(b.size)}
    if not a.size or not b.size:
        reason = "no launch of one of the arms was measured"
        return Speedup(
            word="inconclusive", reason=reason, ratio=Measured(value=None, unit="x", reason=reason), **counts
        )
    effect = float(b.mean() - a.mean())
    if a.size < 2 or b.size < 2:
        reason = f"{a.size} launch(es) without and {b.size} with: the spread between launches is not known"
        ratio = Measured(value=math.exp(effect), unit="x", n=int(a.size + b.size), reason=reason)
        return Speedup(word="inconclusive", reason=reason, ratio=ratio, **counts)
    degrees = int(a.size + b.size - 2)
    spread = math.sqrt(float(((a - a.mean()) ** 2).sum() + ((b - b.mean()) ** 2).sum()) / degrees)
    per_launch = math.sqrt(1 / a.size + 1 / b.size)
    of_launches = student_t_quantile(0.975, degrees) * spread * per_launch
    prompts = np.asarray(prompt_logs, dtype=np.float64)
    error = float(prompts.std(ddof=1)) / math.sqrt(prompts.size) if prompts.size >= 2 else 0.0
    of_prompts = student_t_quantile(0.975, int(prompts.size) - 1) * error if prompts.size >= 2 else 0.0
    half = math.hypot(of_launches, of_prompts)
    low, high = effect - half, effect + half
    margin = math.log1p(margin_frac)
    if -margin < low and high < margin:
        word = "no_difference"
    else:
        word = "pays" if low > 0 else "costs" if high < 0 else "inconclusive"
    prompts_see = error * _power_factor(int(prompts.size) - 1) if error else 0.0
    detectable = math.expm1(math.hypot(spread * per_launch * _power_factor(degrees), prompts_see))
    needed = launches_needed(spread, margin_frac, prompts_see)
    share = "prompts" if of_prompts > of_launches else "launches"
    words = {
        "pays": f"the whole interval lies above 1: {math.expm1(low):+.1%} to {math.expm1(high):+.1%}",
        "costs": f"the whole interval lies below 1: {math.expm1(low):+.1%} to {math.expm1(high):+.1%}",
        "no_difference": f"the whole interval lies within {margin_frac:.0%}: {math.expm1(low):+.1%} to {math.expm1(high):+.1%}",
        "inconclusive": f"the interval {math.expm1(low):+.1%} to {math.expm1(high):+.1%} contains 1 and reaches beyond {margin_frac:.0%}",
    }
    return Speedup(
        word=word,
        reason=f"{words[word]}; launches of one arm differ by {math.expm1(spread):.1%} (standard deviation), and the spread "
        f"between {share} makes most of the interval",
        ratio=Measured(
            value=math.exp(effect), unit="x", n=int(a.size + b.size), low=math.exp(low), high=math.exp(high)
        ),
        launch_spread_frac=math.expm1(spread),
        detectable_frac=detectable,
        launches_needed=needed,
        **counts,
    )


_DRAWS = 20_000


@functools.cache
def _power_factor(degrees: int) -> float:
    """How many standard errors a difference must have to be found in 80% of experiments (two-sided 95%, Student's t).

    The 80th percentile of t x sqrt(chi2 / degrees) - Z, by simulation from a fixed seed.
    """
    generator = np.random.default_rng(degrees)
    scale = np.sqrt(generator.chisquare(degrees, _DRAWS) / degrees)
    noise = generator.standard_normal(_DRAWS)
    return float(np.quantile(student_t_quantile(0.975, degrees) * scale - noise, POWER))


def launches_needed(spread_log: float, margin_frac: float, prompts_log: float = 0.0, most: int = 20) -> int | None:
    """Launches of each arm with which a difference of `margin_frac` would be found in 80% of experiments; None beyond `most`.

    `prompts_log` is what the prompts alone already hide: more launches don't help against it.

    Example: launches that differ by 1% (standard deviation) find 5% with 3 of each arm.
    """
    for n in range(2, most + 1):
        hidden = spread_log * math.sqrt(2 / n) * _power_factor(2 * n - 2)
        if math.hypot(hidden, prompts_log) <= math.log1p(margin_frac):
            return n
    return None


class Crossover(Record):
    """The concurrency at which speculation stops paying on one text; bounds are where the interval's ends reach 1."""

    text: str
    at: Measured
    bracketed: bool
    reason: str


def crossover(text: str, ratios: Mapping[int, Measured]) -> Crossover:
    """Where the ratio falls to 1, interpolated in log2(C) between measured levels; never extrapolated.

    The interval holds every concurrency at which the ratio's own 95% interval contains 1. A level without an interval
    cannot bound it.

    Example: 1.2 at C=1, 1.0 at C=4, 0.8 at C=16: 4.
    """
    known = sorted((c, m) for c, m in ratios.items() if isinstance(m.value, (int, float)))

    def at(value: float | None, reason: str, low: float | None = None, high: float | None = None) -> Measured:
        return Measured(value=value, unit="requests", n=len(known), low=low, high=high, reason=reason)

    if len(known) < 2:
        reason = f"{len(known)} level(s) measured: a crossing needs two"
        return Crossover(text=text, at=at(None, reason), bracketed=False, reason=reason)
    values = [(c, math.log(float(m.value or 1))) for c, m in known]
    if values[0][1] <= 0:
        later = [str(c) for c, m in known[1:] if (m.low or 0.0) > 1]
        reason = f"it does not pay at C={values[0][0]} already, the smallest measured"
        reason += f"; yet it pays at C={', '.join(later)}: no single crossing" if later else ""
        return Crossover(text=text, at=at(None, reason), bracketed=False, reason=reason)
    middle = _falls_to_zero(values)
    if middle is None:
        reason = f"the ratio stays above 1 up to C={values[-1][0]}, the largest measured: measure more requests at once"
        return Crossover(text=text, at=at(None, reason), bracketed=False, reason=reason)
    bounded = all(m.low is not None and m.high is not None for _, m in known)
    if not bounded:
        reason = "levels without an interval: launch each arm at least twice"
        return Crossover(text=text, at=at(middle, reason), bracketed=False, reason=reason)
    lows = [(c, math.log(max(m.low or 1e-9, 1e-9))) for c, m in known]
    highs = [(c, math.log(max(m.high or 1e-9, 1e-9))) for c, m in known]
    low = _falls_to_zero(lows) if lows[0][1] > 0 else None
    high = _falls_to_zero(highs)
    notes = (
        [f"from C={low:.1f}"] if low and not high else [] if low else [f"the interval reaches below C={known[0][0]}"]
    )
    notes += (
        [f"to C={high:.1f}"] if high and not low else [] if high else [f"the interval reaches beyond C={known[-1][0]}"]
    )
    reason = "; ".join(notes) or "interpolated between measured levels"
    return Crossover(
        text=text,
        at=at(middle, reason, low if high else None, high if low else None),
        bracketed=bool(low and high),
        reason=reason,
    )


def _falls_to_zero(points: Sequence[tuple[int, float]]) -> float | None:
    for (c0, y0), (c1, y1) in zip(points, points[1:], strict=False):
        if y0 > 0 >= y1:
            share = y0 / (y0 - y1)
            return float(2 ** (math.log2(c0) + share * (math.log2(c1) - math.log2(c0))))
    return None


def predicted_ratio(accept_length: float, verify_cost: float, draft_cost: float = 0.0) -> float:
    """Speed with / without: tokens of a step over its cost in plain decode steps.

    Example: 4 tokens a step, verification 1.2 and drafts 0.8 decode steps: 2.0.
    """
    return accept_length / (verify_cost + draft_cost)


def step_cost(base_token_s: float, treated_token_s: float, accept_length: float) -> float:
    """What one speculative step costs in plain decode steps: drafts and verification together.

    Example: 2 ms a token without, 1.5 ms a token with 4 tokens a step: 6 ms, 3 decode steps.
    """
    return treated_token_s * accept_length / base_token_s


def schedule(launches: int) -> list[bool]:
    """The order of the launches, True with the treatment: A B B A, and so on; a linear drift cancels in each four.

    Example: `schedule(2)` is without, with, with, without.
    """
    return [treated for pair in range(launches) for treated in ((False, True) if pair % 2 == 0 else (True, False))]
