"""Was speculation on, and did it pay? An arm without a trace of its treatment proves nothing, whatever its throughput.

The only exact trace is `spec_verify_ct` in each request's `meta_info`: verification steps, counted by the server. Where
a run left only a benchmark's table, the missing trace makes the comparison *invalid*, never 'no benefit'.

Source: SGLang 0.5.16 on an H200 (tests/recorded); FACTS on `spec_accept_length = completion_tokens / spec_verify_ct`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from lib.records import Measured, Record


class Arm(Record):
    """Requests of one kind of text against one server: tokens, seconds, and verification steps."""

    name: str
    text: str
    treated: bool
    requests: int
    completion_tokens: int
    e2e_s: float
    verify_steps: int | None
    correct_drafts: int | None
    proposed_drafts: int | None
    output_ids: list[list[int]] = []

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens over the sum of the requests' end-to-end seconds (requests one at a time)."""
        return self.completion_tokens / self.e2e_s if self.e2e_s > 0 else None

    @property
    def accept_length(self) -> Measured:
        """Tokens per verification step, the bonus token included. Example: 256 tokens in 155 steps: 1.65."""
        if not self.verify_steps:
            return Measured(value=None, reason="no verification step was counted")
        return Measured(
            value=self.completion_tokens / self.verify_steps, unit="tok/step", n=self.verify_steps, reason="one run: no interval"
        )

    @property
    def accept_rate(self) -> Measured:
        """Accepted drafts over proposed drafts. Example: 101 of 465: 0.217."""
        if not self.proposed_drafts:
            return Measured(value=None, reason="no draft was proposed")
        return Measured(
            value=(self.correct_drafts or 0) / self.proposed_drafts, unit="", n=self.proposed_drafts, reason="one run: no interval"
        )


def arm_from_answers(name: str, text: str, treated: bool, answers: Sequence[Mapping[str, Any]]) -> Arm:
    """An arm from raw /generate answers (`meta_info` of SGLang 0.5.11 to 0.5.23)."""
    metas = [answer["meta_info"] for answer in answers]
    return Arm(
        name=name, text=text, treated=treated, requests=len(metas),
        completion_tokens=sum(int(m["completion_tokens"]) for m in metas),
        e2e_s=sum(float(m["e2e_latency"]) for m in metas),
        verify_steps=_sum(metas, "spec_verify_ct"),
        correct_drafts=_sum(metas, "spec_num_correct_drafts", "spec_accepted_drafts"),
        proposed_drafts=_sum(metas, "spec_num_proposed_drafts", "spec_proposed_drafts"),
        output_ids=[list(answer.get("output_ids") or []) for answer in answers],
    )  # fmt: skip


def _sum(metas: Sequence[Mapping[str, Any]], *names: str) -> int | None:
    values = [next((m[name] for name in names if m.get(name) is not None), None) for m in metas]
    known = [int(value) for value in values if value is not None]
    return sum(known) if known else None


class Comparison(Record):
    """Two arms on the same text: the outcome (a key of OUTCOMES), why, and the speed ratio where it means anything."""

    text: str
    outcome: str
    reason: str
    speed_ratio: Measured
    accept_length: Measured
    accept_rate: Measured
    same_output: bool | None
    first_difference: int | None


def compare_arms(base: Arm, treated: Arm) -> Comparison:
    """Compares an untreated with a treated arm; invalid if the treatment left no trace, or left one where there was none.

    Example: 172.2 against 172.1 tok/s without one counted verification step is `no_trace_of_treatment`.
    """
    outcome, reason = "within_limit", ""
    if not treated.verify_steps:
        outcome = "no_trace_of_treatment"
        reason = f"{treated.name}: the server counted no verification step, so speculation was not on (or nobody asked)"
    elif base.verify_steps:
        outcome = "no_trace_of_treatment"
        reason = f"{base.name}, the arm without speculation, counted {base.verify_steps} verification steps"
    else:
        reason = f"{treated.verify_steps} verification steps counted with speculation, none without"
    same, first = _same_output(base, treated)
    ratio = None
    if outcome == "within_limit" and base.tokens_per_s and treated.tokens_per_s:
        ratio = treated.tokens_per_s / base.tokens_per_s
        outcome = "within_limit" if ratio > 1 else "outside_limit"
    return Comparison(
        text=base.text, outcome=outcome, reason=reason,
        speed_ratio=Measured(value=ratio, unit="x", n=1 if ratio else None,
                             reason="one run of each arm: no interval" if ratio else reason),
        accept_length=treated.accept_length, accept_rate=treated.accept_rate, same_output=same, first_difference=first,
    )  # fmt: skip


def _same_output(base: Arm, treated: Arm) -> tuple[bool | None, int | None]:
    if not base.output_ids or len(base.output_ids) != len(treated.output_ids) or not all(base.output_ids):
        return None, None
    for a, b in zip(base.output_ids, treated.output_ids, strict=True):
        for place, (x, y) in enumerate(itertools.zip_longest(a, b)):
            if x != y:
                return False, place
    return True, None


class TableSuspicion(Record):
    """What two benchmark tables without any trace of the treatment can still tell."""

    outcome: str
    reason: str
    equal_token_counts: int
    levels: int
    largest_change: float


def compare_tables(without: Sequence[Mapping[str, Any]], with_treatment: Sequence[Mapping[str, Any]]) -> TableSuspicion:
    """Two tables of (concurrency, aggregate_tokens_per_s, tokens) that carry no verification counts: never 'no benefit'.

    Near-zero acceptance costs time (drafting and verifying), so equal throughput and equal token counts are what the
    same server measured twice looks like. Example: the origin case's tables.
    """
    pairs = [
        (a, b) for a, b in itertools.product(without, with_treatment) if a["concurrency"] == b["concurrency"]
    ]
    equal = sum(a["tokens"] == b["tokens"] for a, b in pairs)
    changes = [b["aggregate_tokens_per_s"] / a["aggregate_tokens_per_s"] - 1 for a, b in pairs]
    largest = max(changes, key=abs) if changes else 0.0
    return TableSuspicion(
        outcome="no_trace_of_treatment", equal_token_counts=equal, levels=len(pairs), largest_change=largest,
        reason=f"no verification step is recorded in either table; {equal} of {len(pairs)} levels have the same number of "
               f"tokens to the digit, and the largest change is {largest:+.1%}: the mark of one server measured twice",
    )  # fmt: skip
