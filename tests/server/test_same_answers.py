"""The same answers or not: near ties, distributions, and parameters that verification ignores."""

from __future__ import annotations

import numpy as np
import pytest

from lib.server.same_answers import (
    compare_greedy,
    compare_samples,
    explain,
    first_difference,
    judge_min_p,
    judge_penalty,
    repeated_share,
)


def test_first_difference() -> None:
    """Token 2; an early end counts; equal outputs and empty ones have none."""
    assert first_difference([1, 2, 3], [1, 2, 4]) == 2 and first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1], [1]) is None and first_difference([], []) is None


@pytest.mark.parametrize(
    ("top", "near", "words"),
    [
        ([[-0.70, 5], [-0.71, 6], [-3.0, 7]], True, "near tie"),
        ([[-0.10, 5], [-2.60, 6]], False, "no near tie"),
        ([[-0.10, 5], [-2.60, 9]], False, "not among the 2 most likely"),
        ([[-9.001, 1], [-9.002, 2]], None, "beyond the 2 most likely"),
        (None, None, "were not asked"),
        ([], None, "were not asked"),
    ],
)
def test_a_divergence_is_explained_by_the_untreated_server(top: object, near: bool | None, words: str) -> None:
    """Token 5 without and 6 with: 0.01 nat apart is a near tie, 2.5 is not; a flat distribution can't be judged."""
    found = explain("code", 0, 3, 5, 6, top, 0.1)  # type: ignore[arg-type]
    assert found.near_tie is near and words in found.reason


def test_an_answer_that_ends_early_is_not_judged() -> None:
    """Where one answer has no token there is nothing to compare probabilities of."""
    assert explain("code", 0, 3, 5, None, [[-0.1, 5]], 0.1).near_tie is None


def test_greedy_agreement_counts_what_it_compared() -> None:
    """Two equal answers of 3 tokens, one that parts at token 1: 3 + 3 + 2 tokens compared, one divergence, no near tie."""
    tops = {2: [[-0.1, 8], [-5.0, 9]]}
    found = compare_greedy("code", [[1, 2, 3], [4, 5, 6], [7, 8, 9]], [[1, 2, 3], [4, 5, 6], [7, 9, 9]], tops, 0.1)
    assert (found.requests, found.identical, found.tokens_compared) == (3, 2, 8)
    assert len(found.unexplained) == 1 and found.unknown == []
    assert compare_greedy("code", [[7]], [[8]], {}, 0.1).unknown[0].near_tie is None


def draws(odds: list[float], n: int, seed: int) -> list[list[int]]:
    dice = np.random.default_rng(seed)
    return [[1, *(int(x) for x in dice.choice(len(odds), 4, p=odds))] for _ in range(n)]


def test_equal_distributions_are_rarely_told_apart_and_different_ones_are() -> None:
    """Over 20 seeds: same odds give p < 0.01 at most once; (0.6, 0.3, 0.1) against (0.1, 0.2, 0.7) always."""
    same, other = [], []
    for seed in range(20):
        a = draws([0.6, 0.3, 0.1], 32, seed)
        same.append(compare_samples(a, draws([0.6, 0.3, 0.1], 32, 100 + seed), seed, 400).p_value or 1)
        other.append(compare_samples(a, draws([0.1, 0.2, 0.7], 32, 200 + seed), seed, 400).p_value or 1)
    assert sum(p < 0.01 for p in same) <= 1 and all(p < 0.01 for p in other)


def test_the_first_token_is_no_evidence() -> None:
    """It comes from the prefill: samples that differ there alone are equal."""
    a, b = [[1, 5, 5]] * 10, [[2, 5, 5]] * 10
    assert compare_samples(a, b).distance.value == 0


def test_too_few_samples_give_no_p() -> None:
    """Four samples, or none: no p-value, and a reason."""
    assert compare_samples(draws([1.0], 4, 0), draws([1.0], 4, 1)).p_value is None
    assert compare_samples([], []).p_value is None


GREEDY = {"greedy": [[1, 2, 3]], "free": [[1, 9, 3], [1, 2, 8]], "min_p": [[1, 2, 3]] * 6}


def test_min_p_honoured_ignored_and_not_visible() -> None:
    """min_p = 1 leaves the greedy answer: all equal is honoured; one other is ignored; without an effect it is not visible."""
    assert judge_min_p(GREEDY, GREEDY).fate == "honoured"
    assert judge_min_p(GREEDY, {**GREEDY, "min_p": [[1, 2, 3]] * 5 + [[1, 9, 9]]}).fate == "ignored"
    assert judge_min_p(GREEDY, {**GREEDY, "free": [[1, 2, 3]] * 4}).fate == "not_visible"
    assert judge_min_p({**GREEDY, "min_p": [[1, 9, 9]] * 6}, GREEDY).fate == "not_visible"
    assert judge_min_p(GREEDY, {}).fate == "not_tried"


def test_penalties_honoured_ignored_and_otherwise() -> None:
    """Compared with the untreated server's penalised answer; where plain answers differ already nothing can be told."""
    base = {"plain": [[1, 1, 1]], "frequency_penalty": [[1, 2, 3]]}
    assert judge_penalty("frequency_penalty", base, base).fate == "honoured"
    plain = {**base, "frequency_penalty": [[1, 1, 1]]}
    assert judge_penalty("frequency_penalty", base, plain).fate == "ignored"
    late = {**base, "frequency_penalty": [[1, 1, 2]]}
    assert judge_penalty("frequency_penalty", base, late).fate == "applied_otherwise"
    assert judge_penalty("frequency_penalty", plain, late).fate == "not_visible"
    assert judge_penalty("frequency_penalty", base, {**late, "plain": [[1, 1, 4]]}).fate == "not_visible"
    assert judge_penalty("frequency_penalty", base, {}).fate == "not_tried"


def test_repeated_share() -> None:
    """[1, 1, 1, 2]: two of four tokens occurred before."""
    assert repeated_share([1, 1, 1, 2]) == 0.5 and repeated_share([]) is None
