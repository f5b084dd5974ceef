"""Was speculation on? The recorded H200 runs, the origin's tables, and arms without a trace."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from lib.params import ROOT
from lib.server.recorded_arms import Arm, arm_from_answers, compare_arms, compare_tables, speed_ratio

RECORDED = ROOT / "tests/recorded/h200-sglang-0.5.16"


def recorded(arm: str, text: str) -> Arm:
    answers = json.loads((RECORDED / f"m1_{arm}.{text}_c1.generate.json").read_text())
    return arm_from_answers(arm, text, arm == "nextn", answers)


def arm(treated: bool, seconds: list[float], verify: int | None, tokens: int = 400, ids: Any = ()) -> Arm:
    return Arm(
        name="treated" if treated else "base",
        text="code",
        treated=treated,
        requests=len(seconds),
        completion_tokens=tokens,
        e2e_s=sum(seconds),
        verify_steps=verify,
        correct_drafts=None,
        proposed_drafts=None,
        request_s=seconds,
        output_ids=list(ids),
    )


def test_recorded_random_ids_accept_little_and_are_slower() -> None:
    """256 tokens in 155 steps are 1.65 a step; 101 of 465 drafts accepted; 0.516 s against 1.422 s: 0.363 times as fast."""
    treated = recorded("nextn", "random_ids")
    assert treated.accept_length.value == pytest.approx(256 / 155)
    assert treated.accept_rate.value == pytest.approx(101 / 465)
    found = compare_arms(recorded("base", "random_ids"), treated)
    assert found.speed_ratio.value == pytest.approx(0.5162 / 1.4220, rel=1e-3)
    assert found.same_output is True and found.outcome == "not_enough_data"


def test_recorded_repeating_text_accepts_everything_and_is_faster() -> None:
    """64 steps for 256 tokens: 4 a step, the most that 3 drafts allow."""
    found = compare_arms(recorded("base", "repeating_text"), recorded("nextn", "repeating_text"))
    assert found.accept_length.value == 4 and found.speed_ratio.value > 1.2


def test_an_arm_without_verification_steps_proves_nothing() -> None:
    """Equal speed without one counted step is not 'no benefit' but no trace of the treatment."""
    found = compare_arms(arm(False, [1.0] * 4, None), arm(True, [1.0] * 4, None))
    assert found.outcome == "no_trace_of_treatment" and found.speed_ratio.value is None


def test_a_base_arm_with_verification_steps_is_no_base() -> None:
    """The old server answered: the untreated arm speculated."""
    assert compare_arms(arm(False, [1.0] * 4, 50), arm(True, [1.0] * 4, 50)).outcome == "no_trace_of_treatment"


def test_paired_ratio_has_an_interval_over_requests() -> None:
    """Twice as fast on every request: 2 with an interval of no width; mixed requests: an interval around the mean."""
    exact = speed_ratio(arm(False, [2.0, 4.0, 6.0], None), arm(True, [1.0, 2.0, 3.0], 9))
    assert exact.value == pytest.approx(2) and exact.low == pytest.approx(2) and exact.high == pytest.approx(2)
    mixed = speed_ratio(arm(False, [2.0, 2.0, 2.0], None), arm(True, [1.0, 2.0, 4.0], 9))
    assert mixed.low is not None and mixed.high is not None and mixed.low < 1 < mixed.high


def test_arms_of_other_lengths_are_not_paired() -> None:
    """Other token counts: tokens per second are compared, without an interval."""
    found = speed_ratio(arm(False, [2.0, 2.0], None, 100), arm(True, [2.0, 2.0], 9, 200))
    assert found.value == pytest.approx(2) and found.low is None


def test_first_difference_between_greedy_outputs_is_named() -> None:
    """Token 2 differs; an early end counts as a difference too."""
    base, other = arm(False, [1.0], None, ids=[[1, 2, 3]]), arm(True, [1.0], 5, ids=[[1, 2, 4]])
    assert compare_arms(base, other).first_difference == 2
    assert compare_arms(base, arm(True, [1.0], 5, ids=[[1, 2]])).first_difference == 2


def test_the_origins_tables_come_out_as_invalid() -> None:
    """Three of four levels have equal token counts, the largest change is 1686.1 / 1646.7 - 1 = +2.4%: no trace of NEXTN."""
    reference = yaml.safe_load((ROOT / "params/qwen3.5-397b-nvfp4-rtx6000x8/profile.yaml").read_text())["reference"]
    found = compare_tables(reference["without_nextn"], reference["asked_for_nextn"])
    assert found.outcome == "no_trace_of_treatment" and (found.equal_token_counts, found.levels) == (3, 4)
    assert found.largest_change == pytest.approx(1686.1 / 1646.7 - 1)


def test_tables_that_count_steps_are_one_run_of_each_arm() -> None:
    """With steps in the treated table only: not enough data, since one run has no interval; steps in the other: invalid."""
    without = [{"concurrency": 1, "aggregate_tokens_per_s": 100.0, "tokens": 4000}]
    counted = [{"concurrency": 1, "aggregate_tokens_per_s": 120.0, "tokens": 4000, "verify_steps": 2000}]
    assert compare_tables(without, counted).outcome == "not_enough_data"
    assert compare_tables(counted, counted).outcome == "no_trace_of_treatment"
    assert compare_tables(without, []).outcome == "not_enough_data"


def test_recorded_counts_by_position() -> None:
    """The histogram [94, 33, 16, 12] of 155 steps travels with the arm; impossible counts make it invalid."""
    treated = recorded("nextn", "random_ids")
    assert treated.histogram == [94, 33, 16, 12] and treated.contradictions == []
    broken = treated.model_copy(update={"contradictions": ["256 tokens from 10 steps"]})
    assert compare_arms(recorded("base", "random_ids"), broken).outcome == "no_trace_of_treatment"
