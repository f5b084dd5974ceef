"""What a server's own counts say about speculation: steps, accepted drafts by position, and whether they can be true.

For each request SGLang counts its verification steps and how many drafts each accepted (`meta_info`). The first token
comes from the prefill, every step yields its accepted drafts and one token of the target's own, and the last step may
run past the end. So the counts bound each other, and counts that break a bound are no evidence.

Source: SGLang 0.5.11 to 0.5.23 managers/tokenizer_manager.py, schedule_batch.py; recorded answers of 0.5.16.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lib.load.stats import bootstrap_ratio, student_t_quantile
from lib.records import Measured, Record

#: Names of one count in the releases that have it, newest first.
CORRECT = ("spec_num_correct_drafts", "spec_accepted_drafts")
PROPOSED = ("spec_num_proposed_drafts", "spec_proposed_drafts")
HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram")
#: So many equal tokens at the end of an answer are a loop (S4: a server that only ever emits token 0).
LOOP_TOKENS = 24
LOOP_CHARACTERS = 48
#: So many decode lines in a row without one accepted draft are a server that has stopped speculating.
STUCK_LINES = 5


class SpecCounts(Record):
    """One request's counts; None where the server doesn't say."""

    completion_tokens: int
    verify_steps: int | None
    correct_drafts: int | None
    proposed_drafts: int | None
    histogram: list[int] | None
    retractions: int = 0


def spec_counts(meta: Mapping[str, Any], completion_tokens: int | None = None) -> SpecCounts:
    """Counts of one request from its `meta_info` (a finished request; None counts where it was not speculated).

    Example: `{"completion_tokens": 256, "spec_verify_ct": 155}` has 155 steps and no histogram.
    """
    histogram = _first(meta, HISTOGRAM)
    return SpecCounts(
        completion_tokens=int(meta["completion_tokens"] if completion_tokens is None else completion_tokens),
        verify_steps=_whole(_first(meta, ("spec_verify_ct",))),
        correct_drafts=_whole(_first(meta, CORRECT)),
        proposed_drafts=_whole(_first(meta, PROPOSED)),
        histogram=[int(n) for n in histogram] if isinstance(histogram, list) else None,
        retractions=int(meta.get("num_retractions") or 0),
    )


def _first(meta: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((meta[name] for name in names if meta.get(name) is not None), None)


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)


#: Steps beyond the tokens of a request that an overlapped schedule may still run after its end.
SPARE_STEPS = 2


def contradictions(counts: SpecCounts, drafts_per_step: int | None = None) -> list[str]:
    """What cannot be true of one request's counts; empty where nothing contradicts them.

    Example: 256 tokens in 10 steps of at most 3 drafts is impossible: at most 1 + 10 x 4 = 41.
    """
    steps, correct = counts.verify_steps, counts.correct_drafts
    if not steps:
        return []
    found = []
    if counts.histogram is not None:
        accepted = sum(place * n for place, n in enumerate(counts.histogram))
        if sum(counts.histogram) != steps:
            found.append(f"its histogram has {sum(counts.histogram)} steps, the count says {steps}")
        if correct is not None and accepted != correct:
            found.append(f"its histogram has {accepted} accepted drafts, the count says {correct}")
        if drafts_per_step is not None and len(counts.histogram) > drafts_per_step + 1:
            found.append(f"a step accepted {len(counts.histogram) - 1} of {drafts_per_step} drafts")
    if counts.proposed_drafts is not None and correct is not None and correct > counts.proposed_drafts:
        found.append(f"{correct} of {counts.proposed_drafts} proposed drafts were accepted")
    if counts.retractions:
        return found  # a retracted request counts its steps anew
    if steps > counts.completion_tokens + SPARE_STEPS:
        found.append(f"{steps} steps for {counts.completion_tokens} tokens, and each step gives one at least")
    most = 1 + steps * (1 + drafts_per_step) if drafts_per_step is not None else None
    if correct is not None:
        most = 1 + steps + correct
    if most is not None and counts.completion_tokens > most:
        found.append(f"{counts.completion_tokens} tokens from {steps} steps, which give at most {most}")
    return found


class Acceptance(Record):
    """Counts of several requests: how many were speculated, and what their steps accepted."""

    requests: int
    without_steps: int
    completion_tokens: int
    verify_steps: int
    correct_drafts: int | None
    proposed_drafts: int | None
    histogram: list[int] | None
    length: Measured
    contradictions: list[str] = []

    @property
    def rate(self) -> Measured:
        """Accepted drafts over proposed drafts. Example: 101 of 465: 0.217."""
        if not self.proposed_drafts or self.correct_drafts is None:
            return Measured(value=None, reason="no draft was proposed, or the server does not count them")
        return Measured(
            value=self.correct_drafts / self.proposed_drafts, n=self.proposed_drafts, reason="all drafts counted"
        )


def pooled(counts: Sequence[SpecCounts], drafts_per_step: int | None = None) -> Acceptance:
    """The counts of several requests together; the accept length resamples requests.

    A request of one token has no step of its own (the prefill gives it), so it doesn't count as unspeculated.
    """
    with_steps = [c for c in counts if c.verify_steps]
    width = max((len(c.histogram) for c in with_steps if c.histogram), default=0)
    complete = bool(with_steps) and all(c.histogram is not None for c in with_steps)
    histogram = [0] * width
    for one in with_steps:
        for place, n in enumerate(one.histogram or []):
            histogram[place] += n
    length = Measured(value=None, unit="tok/step", reason="no verification step was counted")
    if with_steps:
        found = bootstrap_ratio(
            [float(c.completion_tokens) for c in with_steps], [float(c.verify_steps or 0) for c in with_steps]
        )
        length = Measured(
            value=found.value, unit="tok/step", n=len(with_steps), low=found.low, high=found.high, reason=found.reason
        )
    return Acceptance(
        requests=len(counts),
        without_steps=sum(not c.verify_steps and c.completion_tokens > 1 for c in counts),
        completion_tokens=sum(c.completion_tokens for c in counts),
        verify_steps=sum(c.verify_steps or 0 for c in with_steps),
        correct_drafts=_sum([c.correct_drafts for c in with_steps]),
        proposed_drafts=_sum([c.proposed_drafts for c in with_steps]),
        histogram=histogram if complete else None,
        length=length,
        contradictions=list(dict.fromkeys(x for c in with_steps for x in contradictions(c, drafts_per_step))),
    )


def _sum(values: Sequence[int | None]) -> int | None:
    known = [v for v in values if v is not None]
    return sum(known) if known and len(known) == len(values) else None


class Position(Record):
    """One place in the chain of drafts: how often it was accepted, of all steps and of those that reached it."""

    position: int
    reached: int
    accepted: int
    of_all_steps: Measured
    of_reached: Measured


def by_position(histogram: Sequence[int] | None, drafts_per_step: int | None = None) -> list[Position]:
    """Acceptance of the 1st, 2nd, ... draft of a step, with 95% Wilson intervals.

    The k-th draft is accepted where a step accepted k drafts or more, and reached where it accepted k - 1 or more.

    Example: the recorded `[94, 33, 16, 12]`: the first draft was accepted in 61 of 155 steps, the second in 28 of 61.
    """
    if not histogram or not sum(histogram):
        return []
    total = sum(histogram)
    rows = []
    for place in range(1, max(len(histogram) - 1, drafts_per_step or 0) + 1):
        accepted, reached = sum(histogram[place:]), sum(histogram[place - 1 :])
        rows.append(
            Position(
                position=place,
                reached=reached,
                accepted=accepted,
                of_all_steps=wilson(accepted, total),
                of_reached=wilson(accepted, reached),
            )
        )
    return rows


def wilson(successes: int, trials: int) -> Measured:
    """A share with its 95% Wilson score interval. Example: 61 of 155 is 0.394 [0.320, 0.472]."""
    if not trials:
        return Measured(value=None, reason="no step reached it")
    z = 1.959964
    share = successes / trials
    middle = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * ((share * (1 - share) / trials + z * z / (4 * trials * trials)) ** 0.5)
    return Measured(value=share, n=trials, low=max(0.0, middle - half), high=min(1.0, middle + half))


class Decay(Record):
    """Whether the accept length falls in the course of a run: the later half of the requests against the earlier one."""

    change: Measured
    outcome: str
    reason: str


def decay(lengths: Sequence[float], limit_frac: float = 0.1) -> Decay:
    """Mean accept length of the later half over the earlier half, less 1, with Welch's 95% interval.

    Args:
        lengths: accept lengths in the order in which the requests ended.
        limit_frac: a loss smaller than this is no decay.

    Returns:
        `within_limit` if the whole interval lies above -limit_frac, `outside_limit` if all of it lies below,
        else `not_enough_data`.
    """
    values = np.asarray(lengths, dtype=np.float64)
    if values.size < 6:
        reason = f"{values.size} requests: too few to tell a trend"
        return Decay(
            change=Measured(value=None, unit="frac", n=int(values.size), reason=reason),
            outcome="not_enough_data",
            reason=reason,
        )
    early, late = values[: values.size // 2], values[values.size - values.size // 2 :]
    mean = float(early.mean())
    parts = [float(early.var(ddof=1)) / early.size, float(late.var(ddof=1)) / late.size]
    error = sum(parts) ** 0.5
    degrees = (
        1
        if error == 0
        else max(1, int(error**4 / sum(p * p / (h.size - 1) for p, h in zip(parts, (early, late), strict=True))))
    )
    half = student_t_quantile(0.975, degrees) * error / mean
    change = float(late.mean()) / mean - 1
    measured = Measured(value=change, unit="frac", n=int(values.size), low=change - half, high=change + half)
    if change - half > -limit_frac:
        outcome = "within_limit"
    else:
        outcome = "outside_limit" if change + half < -limit_frac else "not_enough_data"
    return Decay(
        change=measured,
        outcome=outcome,
        reason=f"accept length {early.mean():.2f} in the first {early.size} requests, {late.mean():.2f} in the last {late.size}",
    )


class Stuck(Record):
    """Decode lines at the end of a log in which no draft was accepted any more."""

    lines: int
    line_no: int
    usage: float | None


def stuck(lines: Sequence[tuple[int, float | None, float | None]]) -> Stuck | None:
    """The run of decode lines with accept length 1.00 that the log ends with, if it is long enough to mean something.

    Args:
        lines: line number, accept length and pool usage of each decode line, in order; lines without a length end it.
    """
    run = 0
    for _, length, _ in reversed(lines):
        if length is None or length > 1.005:
            break
        run += 1
    if run < STUCK_LINES:
        return None
    number, _, usage = lines[len(lines) - run]
    return Stuck(lines=run, line_no=number, usage=usage)


def token_loop(ids: Sequence[int], least: int = LOOP_TOKENS) -> tuple[int, int] | None:
    """The token that an answer repeats to its end and how often, None where it doesn't.

    Example: `[5, 7] + [0] * 30` gives `(0, 30)`.
    """
    if not ids:
        return None
    run = next((n for n, token in enumerate(reversed(ids)) if token != ids[-1]), len(ids))
    return (int(ids[-1]), run) if run >= least else None


_LOOP = re.compile(rf"(\S)\1{{{LOOP_CHARACTERS - 1},}}\s*\Z")


def text_loop(text: str) -> str | None:
    """The character that a text repeats to its end (`!!!!...`), None where it doesn't."""
    found = _LOOP.search(text)
    return found[1] if found else None
