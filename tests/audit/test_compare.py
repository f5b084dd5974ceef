"""Paired scores: floors, effects, limits, and what may not be concluded."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from lib.audit.compare import ScoreComparison, compare_scores, judge_loss
from lib.errors import BadInput
from lib.records import OUTCOMES, Measured


def scores(
    shift: float = 0.0, noise: float = 0.0, seed: int = 1, documents: int = 3, tokens: int = 600, key: str = ""
) -> list[dict[str, Any]]:
    """Documents with the same random log-probabilities, shifted and with noise of its own."""
    base, own = random.Random(7), random.Random(seed)
    return [
        {
            "name": "same name",
            "key": f"{key}{d:02d}",
            "ids_sha256": str(d),
            "logprobs": [None, *(base.gauss(-2, 1) + shift + own.gauss(0, noise) for _ in range(tokens - 1))],
        }
        for d in range(documents)
    ]


def test_the_same_server_twice_is_exactly_zero() -> None:
    """A floor of zero is a measured zero with an interval of zero width."""
    found = compare_scores(scores(), scores(), 200)
    assert found.identical and found.pooled.value == found.pooled.low == found.pooled.high == 0 == found.mean_absolute
    assert found.tokens == 3 * 599 and found.documents == 3


def test_a_planted_loss_is_found_in_every_bucket() -> None:
    """A loss of 0.05 nat a token: mean, perplexity ratio exp(0.05), and all three position buckets."""
    found = compare_scores(scores(), scores(-0.05, 0.01), 200)
    assert found.pooled.value == pytest.approx(-0.05, abs=0.002)
    assert found.perplexity_ratio.value == pytest.approx(math.exp(0.05), rel=0.01)
    assert [(b.first, b.last) for b in found.buckets] == [(1, 199), (200, 399), (400, 599)]
    assert all(b.mean.high < 0 for b in found.buckets)


def test_documents_of_one_name_stay_apart() -> None:
    """Two texts with the same file name are two documents."""
    assert compare_scores(scores(), scores(), 100).documents == 3


def test_positions_that_never_read_the_pool_are_left_out() -> None:
    """With a first chunk of 256 only what comes after it counts: (600 - 256) tokens a document."""
    assert compare_scores(scores(), scores(-0.1), 200, first=256).tokens == 3 * (600 - 256)
    with pytest.raises(BadInput, match="no scored token is left"):
        compare_scores(scores(), scores(), 200, first=600)


@pytest.mark.parametrize("other", [scores(documents=2), [{**s, "ids_sha256": "x"} for s in scores()], []])
def test_arms_that_scored_other_tokens_are_refused(other: Any) -> None:
    """Another number of documents, other ids, or none at all can't be paired."""
    with pytest.raises(BadInput, match="same token ids"):
        compare_scores(scores(), other, 100)


def floor(noise: float = 0.0) -> ScoreComparison:
    return compare_scores(scores(noise=noise, seed=2), scores(noise=noise, seed=3), 200)


@pytest.mark.parametrize(
    ("low", "value", "high", "outcome"),
    [
        (-0.031, -0.024, -0.018, "outside_limit"),
        (-0.004, 0.0, 0.004, "within_limit"),
        (-0.012, -0.005, 0.002, "not_enough_data"),
        (0.02, 0.03, 0.04, "reference_suspect"),
        (1.2, 1.5, 1.8, "reference_suspect"),
        (-0.002, 0.006, 0.014, "not_enough_data"),
        (None, None, None, "not_enough_data"),
    ],
)
def test_the_interval_decides_on_both_sides(low: Any, value: Any, high: Any, outcome: str) -> None:
    """Inside is within, below is a loss, above means that the reference is the broken one, across is open."""
    measured = Measured(
        value=value, low=low, high=high, unit="nat/token", reason=None if value is not None else "no scores"
    )
    found, reason = judge_loss(measured, floor(), 0.01)
    assert found == outcome and reason
    assert OUTCOMES[found]


def test_no_verdict_where_the_reference_differs_from_itself_by_more_than_half_the_limit() -> None:
    """A noisy floor makes even a small difference inconclusive."""
    measured = Measured(value=0.0, low=-0.001, high=0.001)
    assert judge_loss(measured, floor(noise=0.5), 0.01)[0] == "not_enough_data"
    assert judge_loss(measured, floor(noise=0.001), 0.01)[0] == "within_limit"


def test_noise_alone_is_called_a_loss_no_more_often_than_the_level_says() -> None:
    """40 pairs of equal arms with independent noise: the 95% interval misses 0 in at most 6 (expected 2)."""
    misses = 0
    for seed in range(40):
        found = compare_scores(scores(noise=0.05, seed=2 * seed), scores(noise=0.05, seed=2 * seed + 1), 300)
        misses += not (found.pooled.low <= 0 <= found.pooled.high)
    assert misses <= 6
