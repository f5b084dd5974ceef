"""Counts of speculation: what they say, by position, over time, and when they cannot be true."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lib.params import ROOT
from lib.server.acceptance import (
    SpecCounts,
    by_position,
    contradictions,
    decay,
    pooled,
    spec_counts,
    stuck,
    text_loop,
    token_loop,
    wilson,
)

RECORDED = ROOT / "tests/recorded/h200-sglang-0.5.16"


def meta(text: str, arm: str = "nextn") -> dict[str, Any]:
    answers = json.loads((RECORDED / f"m1_{arm}.{text}_c1.generate.json").read_text())
    return dict(answers[0]["meta_info"])


def counts(
    tokens: int, steps: int | None, correct: int | None = None, histogram: list[int] | None = None
) -> SpecCounts:
    return SpecCounts(
        completion_tokens=tokens, verify_steps=steps, correct_drafts=correct, proposed_drafts=None, histogram=histogram
    )


def test_recorded_counts_are_read_and_possible() -> None:
    """256 tokens, 155 steps, 101 of 465 drafts; 94 + 33 + 16 + 12 = 155; nothing contradicts them."""
    one = spec_counts(meta("random_ids"))
    assert (one.completion_tokens, one.verify_steps, one.correct_drafts, one.proposed_drafts) == (256, 155, 101, 465)
    assert one.histogram == [94, 33, 16, 12] and contradictions(one, 3) == []
    assert contradictions(spec_counts(meta("repeating_text")), 3) == []


def test_names_of_the_older_releases_mean_the_same() -> None:
    """0.5.11 says spec_accepted_drafts, spec_proposed_drafts and spec_accept_histogram."""
    old = spec_counts(
        {"completion_tokens": 9, "spec_verify_ct": 4, "spec_accepted_drafts": 5, "spec_proposed_drafts": 12,
         "spec_accept_histogram": [1, 1, 2]}
    )  # fmt: skip
    assert (old.correct_drafts, old.proposed_drafts, old.histogram) == (5, 12, [1, 1, 2])


def test_an_answer_without_speculation_has_no_counts() -> None:
    """No field is no count: None, never 0."""
    one = spec_counts(meta("random_ids", "base"))
    assert one.verify_steps is None and one.correct_drafts is None and one.histogram is None


@pytest.mark.parametrize(
    ("one", "word"),
    [
        # 10 steps of at most 3 drafts give at most 1 + 10 x 4 = 41 tokens
        (counts(256, 10), "at most 41"),
        (counts(256, 10, 30), "at most 41"),
        (counts(40, 10, 29, [0, 0, 0, 9]), "9 steps"),
        (counts(40, 10, 28, [0, 0, 0, 10]), "30 accepted"),
        (counts(40, 10, 40, [0, 0, 0, 0, 10]), "accepted 4 of 3"),
        (counts(40, 400), "400 steps for 40 tokens"),
    ],
)
def test_impossible_counts_are_named(one: SpecCounts, word: str) -> None:
    """A server whose counts contradict each other proves nothing."""
    assert any(word in found for found in contradictions(one, 3))


def test_a_step_for_each_token_and_two_to_spare_is_possible() -> None:
    """Nothing accepted: 39 steps for 40 tokens; an overlapped schedule may run two more."""
    assert contradictions(counts(40, 39, 0), 3) == contradictions(counts(40, 42, 0), 3) == []


def test_a_retracted_request_may_count_less() -> None:
    """After a retraction the steps are counted anew."""
    assert contradictions(counts(256, 10, 30).model_copy(update={"retractions": 1}), 3) == []


def test_positions_of_the_recorded_run() -> None:
    """First draft 33 + 16 + 12 = 61 of 155 steps; second 28 of the 61 that reached it; third 12 of 28."""
    rows = by_position([94, 33, 16, 12], 3)
    assert [(r.accepted, r.reached) for r in rows] == [(61, 155), (28, 61), (12, 28)]
    assert rows[1].of_all_steps.value == pytest.approx(28 / 155)
    low, high = rows[0].of_all_steps.low, rows[0].of_all_steps.high
    assert low is not None and high is not None and low < 61 / 155 < high


def test_positions_that_were_never_accepted_are_zero_and_unreached_ones_unknown() -> None:
    """[5, 0]: the first draft never; a second one was never reached, which is no 0 of anything."""
    first, second = by_position([5], 2)
    assert first.of_all_steps.value == 0 and second.of_reached.value is None
    assert by_position(None) == [] and by_position([0, 0]) == []


def test_wilson_against_a_known_value() -> None:
    """5 of 10: 0.237 to 0.763 (Wilson 1927)."""
    share = wilson(5, 10)
    assert share.low == pytest.approx(0.2366, abs=1e-3) and share.high == pytest.approx(0.7634, abs=1e-3)


def test_pooling_counts_requests_without_steps() -> None:
    """A request of one token needs no step; one of 9 tokens without any was not speculated."""
    found = pooled([counts(1, None), counts(9, None), counts(8, 4, 4, [0, 4]), counts(8, 2, 6, [0, 0, 0, 2])])
    assert (found.requests, found.without_steps, found.verify_steps) == (4, 1, 6)
    assert found.length.value == pytest.approx(16 / 6) and found.histogram == [0, 4, 0, 2]
    assert pooled([]).length.value is None and pooled([counts(9, None)]).histogram is None


def test_a_histogram_that_some_requests_lack_is_not_pooled() -> None:
    """Half of the steps are no histogram of all."""
    assert pooled([counts(8, 4, 4, [0, 4]), counts(8, 4, 4)]).histogram is None


def test_decay_is_found_and_steadiness_too() -> None:
    """3.0 falling to 1.5 is a loss of half; 3.0 with noise of 1% is none; five requests tell nothing."""
    falling = decay([3.0, 2.95, 3.05, 3.0, 1.5, 1.45, 1.55, 1.5])
    assert falling.outcome == "outside_limit" and falling.change.value == pytest.approx(-0.5, abs=0.01)
    steady = decay([3.0, 3.03, 2.97, 3.0, 3.01, 2.99, 3.02, 2.98])
    assert steady.outcome == "within_limit" and steady.change.low is not None and steady.change.low > -0.1
    assert decay([3.0] * 5).outcome == "not_enough_data" and decay([]).change.value is None
    assert decay([1.0, 5.0, 1.0, 5.0, 1.0, 5.0]).outcome == "not_enough_data"


def test_a_server_that_no_longer_accepts_anything_is_stuck() -> None:
    """S4: accept length 1.00 to the end of the log, at high usage; three such lines in the middle are nothing."""
    lines = [(n, 2.5, 0.3) for n in range(10)] + [(n, 1.0, 0.7) for n in range(10, 18)]
    found = stuck(lines)
    assert found is not None and (found.lines, found.line_no, found.usage) == (8, 10, 0.7)
    assert stuck([*lines, (18, 2.0, 0.7)]) is None and stuck(lines[:13]) is None and stuck([]) is None


def test_loops() -> None:
    """Thirty times token 0 at the end is a loop, five times is not; '!' sixty times is one, a row of words is not."""
    assert token_loop([5, 7] + [0] * 30) == (0, 30)
    assert token_loop([5, 7] + [0] * 5) is None and token_loop([]) is None
    assert text_loop("fine so far " + "!" * 60) == "!" and text_loop("ha ha " * 30) is None
    assert text_loop("=" * 60 + " heading") is None
