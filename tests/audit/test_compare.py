"""Paired scores: floors, effects, limits, and what may not be concluded."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest

from lib.audit.compare import (
    LEVEL_LOSS,
    NOMINAL_LOSS,
    ScoreComparison,
    bucket_edges,
    compare_scores,
    judge_comparison,
    judge_effect,
    judge_loss,
    kl_lower_bound,
    sign_flip_p,
    tokens_needed,
)
from lib.errors import BadInput
from lib.load.stats import batch_sums, paired_mean_difference
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


def record(values: Any, key: str = "0", **more: Any) -> dict[str, Any]:
    return {"name": f"text {key}", "key": key, "ids_sha256": key, "logprobs": [None, *values], **more}


def pair_of_arms(
    seed: int, documents: int = 6, tokens: int = 500, shift: float = 0.0, gaussian: bool = False
) -> tuple[Any, Any]:
    """Two arms that differ by noise alone, plus `shift`: independent and normal, or AR(0.5) with some tokens far noisier."""
    r = np.random.default_rng(seed)
    base, white = r.normal(-2, 1, (documents, tokens)), r.standard_normal((documents, tokens))
    noise = np.empty((documents, tokens))
    noise[:, 0] = white[:, 0]
    for i in range(1, tokens):
        noise[:, i] = 0.5 * noise[:, i - 1] + math.sqrt(0.75) * white[:, i]
    noise *= 0.05 * np.exp(0.8 * r.standard_normal((documents, tokens)))
    noise = 0.05 * white if gaussian else noise
    one = [record(row.tolist(), str(d)) for d, row in enumerate(base)]
    return one, [record(row.tolist(), str(d)) for d, row in enumerate(base + noise + shift)]


def effects(seeds: range, planted_errors: float, gaussian: bool = False) -> list[str]:
    found = []
    for seed in seeds:
        plain = compare_scores(*pair_of_arms(seed, gaussian=gaussian), 10**6)
        shift = -planted_errors * (plain.effect.standard_error or 0)
        planted = pair_of_arms(seed, shift=shift, gaussian=gaussian) if shift else None
        found.append(compare_scores(*planted, 10**6).effect.found if planted else plain.effect.found)
    return found


@pytest.mark.parametrize("gaussian", [False, True])
def test_noise_is_called_an_effect_no_more_often_than_stated_over_20_seeds(gaussian: bool) -> None:
    """Stated: 10% of comparisons of equals are called an effect (9% a loss, 1% a gain): at most 2 of 20."""
    found = effects(range(20), 0, gaussian)
    assert found.count("loss") + found.count("gain") <= 2, found


def test_a_planted_loss_of_three_standard_errors_is_found_in_18_of_20() -> None:
    """Noise with heavy tails, as real scores have it: the clipped mean finds nearly all."""
    assert effects(range(20), 3).count("loss") >= 18


def test_three_standard_errors_of_normal_noise_are_found_in_nine_of_ten() -> None:
    """18 in 20 as a rate, over 400 seeds: P(Z > 1.45 - 3) = 94%; noise alone is called a loss in 8%."""
    # one series of 20 falls below 18 by chance in one of eight at 94%, so many are counted: 400 x 0.94 = 376, sigma 4.7;
    # 400 x 0.08 = 32, sigma 5.4
    blocks = [d for d in range(6) for _ in range(500)]
    found = called = 0
    for seed in range(400):
        noise = np.random.default_rng(seed).standard_normal(3000)
        error = paired_mean_difference(noise.tolist(), [0.0] * 3000, blocks).standard_error or math.nan
        for shift in (0.0, -3 * error):
            moved = noise + shift
            views = [batch_sums(x, blocks)[:2] for x in (moved, np.clip(moved, -1.5, 1.5))]
            loss = sign_flip_p(views, flips=500)[0] <= NOMINAL_LOSS
            found, called = found + (loss and shift < 0), called + (loss and shift == 0)
    assert found >= 362 and called <= 400 * LEVEL_LOSS + 3 * 5.4, (found, called)


def test_sign_changes_by_hand() -> None:
    """Six equal batches of one sign: of the 64 sign patterns one reaches as far, so p of a gain is near 1/64, of a loss 1."""
    loss, gain = sign_flip_p([(np.array([1.0, 1.1, 0.9, 1.0, 1.2, 0.8]), np.full(6, 10.0))])
    assert loss == 1.0 and 0.010 < gain < 0.022
    assert sign_flip_p([(np.array([1.0, 1.1]), np.full(2, 10.0))])[1] > 0.2  # two batches can show nothing


def test_level_and_power_hold_over_many_seeds() -> None:
    """60 further seeds: effects out of noise within 10% + 3 sigma (at most 13), planted losses at least 95% - 3 sigma."""
    # 60 x 0.10 = 6, sigma 2.3: 6 + 7 = 13; 60 x 0.95 = 57, sigma 1.7: 52
    found = effects(range(1000, 1060), 0)
    assert found.count("loss") + found.count("gain") <= 13
    assert effects(range(1000, 1060), 3).count("loss") >= 52


def test_kl_bound_by_hand() -> None:
    """p = (1/2, rest), q = (1/4, rest): 0.5 ln 2 + 0.5 ln(0.5 / 0.75) = 0.3466 - 0.2027 = 0.1438."""
    one, two = [[math.log(0.5), 7]], [[math.log(0.25), 7]]
    assert kl_lower_bound(one, two) == pytest.approx(0.14384, abs=1e-5)
    assert kl_lower_bound(one, one) == 0
    assert kl_lower_bound(one, [[math.log(0.9), 8]]) == 0  # no token in common: nothing is known, and 0 is a true bound


@pytest.mark.parametrize("seed", range(5))
def test_kl_bound_is_never_above_the_whole_divergence(seed: int) -> None:
    """From the three likeliest tokens of two distributions over 40, never more than the sum over all 40."""
    r = np.random.default_rng(seed)
    p, q = r.dirichlet(np.full(40, 0.3)), r.dirichlet(np.full(40, 0.3)) + 1e-9
    q /= q.sum()
    tops = [[[math.log(x[i] + 1e-300), int(i)] for i in np.argsort(-x)[:3]] for x in (p, q)]
    assert kl_lower_bound(*tops) <= float(np.sum(p * np.log((p + 1e-300) / q))) + 1e-9


def test_top1_agreement_and_kl_come_from_recorded_tops() -> None:
    """Three scored positions, the likeliest token differs at one of them: 2/3; without tops a reason, never 0."""
    tops = [None, [[-0.1, 1]], [[-0.1, 1]], [[-0.1, 1]]]
    other = [None, [[-0.1, 1]], [[-0.1, 2]], [[-0.1, 1]]]
    found = compare_scores([record([-1.0] * 3, top=tops)], [record([-1.0] * 3, top=other)], 16)
    assert found.top1_agreement.value == pytest.approx(2 / 3) and isinstance(found.kl_lower_bound.value, float)
    plain = compare_scores([record([-1.0] * 3)], [record([-1.0] * 3)], 16)
    assert plain.top1_agreement.value is None and plain.top1_agreement.reason and plain.kl_lower_bound.value is None


def test_buckets_can_double() -> None:
    """0 to 1,000, then to 2,000, then to the end."""
    assert bucket_edges(3999, 1000, True) == [(0, 999), (1000, 1999), (2000, 3999)]
    assert bucket_edges(2500, 1000) == [(0, 999), (1000, 1999), (2000, 2500)]


def test_the_largest_difference_is_shown_with_its_text() -> None:
    """The token in brackets after what stands before it."""
    reference = record([-1.0, -1.0, -1.0], ids=[5, 6, 7, 8], pieces=["def", " f", "(", "x"])
    found = compare_scores([reference], [record([-1.0, -3.0, -1.0])], 16)
    (only,) = found.largest_tokens
    assert (only.position, only.token_id, only.difference, only.text) == (2, 7, -2.0, "def f[[(]]")


def test_documents_are_the_units_of_a_limit_from_six_on() -> None:
    """Documents that differ among each other (some lose 0.04, some nothing) widen the interval for texts like these."""
    one, two = [], []
    for d in range(6):
        base = np.random.default_rng(d).normal(-2, 1, 400)
        one.append(record(base.tolist(), str(d)))
        two.append(
            record((base - 0.04 * (d % 2) + np.random.default_rng(99 + d).normal(0, 0.01, 400)).tolist(), str(d))
        )
    found = compare_scores(one, two, 10**6)
    assert found.decisive is found.by_document and found.by_document.n == 6
    width = [m.high - m.low for m in (found.by_document, found.pooled)]
    assert width[0] > 3 * width[1]
    assert found.effect.found == "loss"  # on these texts there is no doubt
    few = compare_scores(one[:5], two[:5], 10**6)
    assert few.decisive is few.pooled and "too few" in few.scope
    assert compare_scores(one[:2], two[:2], 10**6).by_document.reason


def test_too_little_data_says_how_many_tokens_are_needed() -> None:
    """1,000 tokens, 0.004 +- 0.008 against 0.01: 1,000 x (8 / 6)^2 = 1,778."""
    one, two = pair_of_arms(3, documents=3, tokens=300)
    found = compare_scores(one, two, 10**6)
    made = found.model_copy(update={"tokens": 1000, "pooled": Measured(value=0.004, low=-0.004, high=0.012, n=1000)})
    assert tokens_needed(made, 0.01) == 1778
    outcome, reason = judge_comparison(made, [compare_scores(one, one, 10**6)], 0.01)
    assert outcome == "not_enough_data" and "1,778 are needed" in reason


def test_no_verdict_without_a_floor() -> None:
    """A difference beside no noise floor is not judged."""
    found = compare_scores(scores(), scores(-0.05), 200)
    assert judge_comparison(found, [], 0.01)[0] == "not_enough_data"


def test_an_effect_has_to_exceed_what_the_reference_does_to_itself() -> None:
    """A reference that loses 0.02 under load against itself hides a treated loss of 0.01, not one of 0.05."""
    shifted = compare_scores(scores(), scores(-0.02, 0.001), 200)
    small, large = (compare_scores(scores(), scores(x, 0.001), 200) for x in (-0.01, -0.05))
    assert judge_effect(small, [shifted])[0] == "none_seen" and judge_effect(large, [shifted])[0] == "loss"
    assert judge_effect(small, [compare_scores(scores(), scores(), 200)])[0] == "loss"


def test_identical_scores_are_identical_and_say_so() -> None:
    """Exactly 0 everywhere is its own answer, with a standard error of 0."""
    found = compare_scores(scores(), scores(), 200)
    assert found.effect.found == "identical" and found.effect.standard_error == 0
    assert judge_comparison(found, [found], 0.01)[0] == "within_limit"
