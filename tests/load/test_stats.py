"""Intervals and tests: worked numbers, the undefined, the impossible, the empty, and a real zero."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lib.errors import BadInput
from lib.load import stats


def test_paired_mean_difference_of_a_constant_shift_is_that_shift_without_error() -> None:
    """A shift that is the same everywhere has no spread."""
    got = stats.paired_mean_difference([1, 2, 3, 4], [0, 1, 2, 3])
    assert (got.mean, got.standard_error, got.low, got.high, got.n, got.documents) == (1.0, 0.0, 1.0, 1.0, 4, 1)


def test_paired_mean_difference_by_hand() -> None:
    """Two documents of four tokens: batches of sqrt(4) = 2 tokens."""
    # differences 1 1 3 3 | 5 5 7 7; batch means 1 3 5 7, mean 4; residual sums 2*(-3,-1,1,3): squares 36 4 4 36 = 80
    # error = sqrt(4/3 * 80) / 8 = 1.2910; t(0.975, 3) = 3.1824
    a, blocks = [1, 1, 3, 3, 5, 5, 7, 7], ["x"] * 4 + ["y"] * 4
    got = stats.paired_mean_difference(a, [0] * 8, blocks)
    assert got.mean == 4 and got.batches == 4 and got.batch_length == 2 and got.documents == 2
    assert got.standard_error == pytest.approx(1.2910, abs=1e-4)
    assert got.low == pytest.approx(4 - 3.1824 * 1.2910, abs=1e-3)


def test_paired_mean_difference_identical_series_is_a_real_zero() -> None:
    """The same server twice: a noise floor of exactly zero stays zero."""
    got = stats.paired_mean_difference([0.1, -2.0, 3.5] * 40, [0.1, -2.0, 3.5] * 40)
    assert (got.mean, got.standard_error, got.low, got.high, got.reason) == (0.0, 0.0, 0.0, 0.0, None)


def test_paired_mean_difference_of_nothing_and_of_one_pair() -> None:
    """No pairs: no mean. One pair: a mean, no error, and the reason."""
    assert stats.paired_mean_difference([], []).mean is None
    one = stats.paired_mean_difference([2.0], [1.0])
    assert one.mean == 1.0 and one.standard_error is None and one.low is None and one.reason


@pytest.mark.parametrize(
    ("a", "b", "blocks"),
    [
        ([1.0], [1.0, 2.0], None),
        ([1.0, 2.0], [1.0, 2.0], "x"),
        ([math.nan], [1.0], None),
        ([1, 2, 3], [1, 2, 3], "xyx"),
    ],
)
def test_paired_mean_difference_impossible(a: list[float], b: list[float], blocks: str | None) -> None:
    """Unequal lengths, a NaN, or a document in two places raise."""
    with pytest.raises(BadInput):
        stats.paired_mean_difference(a, b, blocks)


def test_batch_means_cover_the_truth_on_a_dependent_series() -> None:
    """On an autocorrelated series the batch interval covers the true mean far more often than the naive one."""
    generator = np.random.default_rng(1)
    covered = naive = 0
    for _ in range(200):
        noise, level, series = generator.normal(size=900), 0.0, []
        for x in noise:
            level = 0.6 * level + x
            series.append(level)
        got = stats.paired_mean_difference(series, [0.0] * 900, [i // 300 for i in range(900)])
        assert got.low is not None and got.high is not None and got.mean is not None and got.naive_standard_error
        covered += got.low <= 0 <= got.high
        naive += abs(got.mean) <= 1.96 * got.naive_standard_error
    assert covered >= 176  # 88% or more of a nominal 95%
    assert naive <= 160  # the naive one: about 67%


@pytest.mark.parametrize(("degrees", "expected"), [(1, 12.706), (3, 3.182), (10, 2.228), (100, 1.984), (10_000, 1.960)])
def test_student_t_quantile(degrees: int, expected: float) -> None:
    """Printed tables of the 97.5% point."""
    assert stats.student_t_quantile(0.975, degrees) == pytest.approx(expected, abs=6e-4)
    assert stats.student_t_quantile(0.025, degrees) == pytest.approx(-expected, abs=6e-4)


def test_mcnemar_exact() -> None:
    """1 pair for a, 9 for b: p = 2 * (1 + 10) / 1024."""
    a = [True] * 1 + [False] * 9 + [True] * 5 + [False] * 2
    b = [False] * 1 + [True] * 9 + [True] * 5 + [False] * 2
    got = stats.mcnemar_exact(a, b)
    assert (got.only_a, got.only_b, got.both, got.neither) == (1, 9, 5, 2)
    assert got.p_value == pytest.approx(22 / 1024)
    assert got.difference == pytest.approx(-8 / 17)


def test_mcnemar_edges() -> None:
    """Nothing: no p. No differing pair: p is 1 and the difference a real zero. Unequal lengths raise."""
    assert stats.mcnemar_exact([], []).p_value is None
    same = stats.mcnemar_exact([True, False], [True, False])
    assert (same.p_value, same.difference) == (1.0, 0.0)
    with pytest.raises(BadInput):
        stats.mcnemar_exact([True], [])


def test_bootstrap_mean_edges() -> None:
    """Empty: a reason. Two values: no interval. Equal values: an interval of no width. Not finite: raises."""
    assert stats.bootstrap_mean([]).value is None and stats.bootstrap_mean([]).reason
    two = stats.bootstrap_mean([1.0, 3.0])
    assert two.value == 2.0 and two.low is None and two.reason
    zero = stats.bootstrap_mean([0.0] * 10)
    assert (zero.value, zero.low, zero.high) == (0.0, 0.0, 0.0)
    with pytest.raises(BadInput):
        stats.bootstrap_mean([math.inf])


def test_bootstrap_intervals_cover_the_truth() -> None:
    """Mean and median intervals of 60 normal values cover the true ones in about 95% of samples."""
    generator = np.random.default_rng(2)
    mean = median = 0
    for seed in range(100):
        sample = generator.normal(10, 2, 60)
        got, mid = stats.bootstrap_mean(sample, seed), stats.bootstrap_percentile(sample, 50, seed)
        assert got.low is not None and got.high is not None and mid.low is not None and mid.high is not None
        mean += got.low <= 10 <= got.high
        median += mid.low <= 10 <= mid.high
    assert mean >= 87 and median >= 87


def test_bootstrap_ratio() -> None:
    """Tokens over steps is a ratio of sums; denominators of zero give a reason."""
    got = stats.bootstrap_ratio([10, 20, 30, 40], [10, 10, 10, 10])
    assert got.value == 2.5 and got.low is not None and got.low < 2.5 < (got.high or 0)
    assert stats.bootstrap_ratio([0, 0, 0], [0, 0, 0]).value is None
    assert stats.bootstrap_ratio([0, 0, 0], [1, 1, 1]).value == 0.0
    with pytest.raises(BadInput):
        stats.bootstrap_ratio([1], [])


def test_pooled_interval_resamples_requests_not_gaps() -> None:
    """Ten requests that differ from each other: the pooled mean is as uncertain as ten values, not as a thousand."""
    values = np.concatenate([np.full(100, float(i)) for i in range(10)])
    owners = np.repeat(np.arange(10), 100)
    mean = stats.pooled_interval(values, owners, None)
    assert mean.value == 4.5 and mean.n == 1000 and mean.low is not None and mean.high is not None
    assert mean.high - mean.low > 2.5
    middle = stats.pooled_interval(values, owners, 50)
    assert middle.value == 4.5 and middle.low is not None and middle.low <= 4 and (middle.high or 0) >= 5
    assert stats.pooled_interval(np.empty(0), np.empty(0, dtype=np.int64), 50).value is None
    few = stats.pooled_interval(np.array([1.0, 2.0]), np.array([0, 0]), 50)
    assert few.value == 1.5 and few.low is None and few.reason
    zero = stats.pooled_interval(np.zeros(30), np.arange(30), 99)
    assert (zero.value, zero.low, zero.high) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(("q", "needed"), [(90, 36), (99, 368), (10, 36)])
def test_a_tail_has_no_interval_from_few_units(q: float, needed: int) -> None:
    """Below so many units the true percentile lies beyond all of them too often: no interval, and the reason says how many."""
    assert stats.units_for_percentile(q) == needed
    generator = np.random.default_rng(3)
    few = stats.bootstrap_percentile(generator.normal(size=needed - 1), q)
    assert few.value is not None and few.low is None and f"needs {needed}" in str(few.reason)
    enough = stats.bootstrap_percentile(generator.normal(size=needed), q)
    assert enough.low is not None and enough.high is not None and enough.low < enough.value < enough.high  # type: ignore[operator]


def test_a_median_of_few_says_how_seldom_its_interval_holds() -> None:
    """Three values enclose the median in 75% of cases, not 95: 1 - 2 x (1/2)**3."""
    few = stats.bootstrap_percentile([1.0, 2.0, 3.0], 50)
    assert few.low is not None and "at most 75%" in str(few.reason)
    assert stats.bootstrap_percentile(list(range(6)), 50).reason is None


@pytest.mark.parametrize(("n", "q"), [(40, 50.0), (40, 90.0), (7, 50.0), (401, 99.0), (3, 50.0)])
def test_a_percentiles_replicates_are_those_of_resampling(n: int, q: float) -> None:
    """Drawn by order statistics or by resampling in full: the same distribution (two-sample Kolmogorov-Smirnov, 1e-4)."""
    values = np.sort(np.random.default_rng(5).lognormal(size=n))
    ours = np.concatenate([stats._percentile_replicates(values, q, seed) for seed in range(20)])
    draws = np.random.default_rng(99).integers(0, n, (20_000, n))
    full = np.percentile(values[draws], q, axis=1)
    both = np.sort(np.concatenate([ours, full]))
    apart = np.abs(
        np.searchsorted(np.sort(ours), both, side="right") / ours.size
        - np.searchsorted(np.sort(full), both, side="right") / full.size
    ).max()
    assert apart < np.sqrt(np.log(2 / 1e-4) / 2 * (1 / ours.size + 1 / full.size)), apart


def test_a_means_replicates_are_those_of_resampling() -> None:
    """Their spread is the standard error of the mean, their middle the mean; a constant has none of either."""
    values = np.random.default_rng(1).exponential(size=300)
    made = stats._resampled_means(values, 3)
    assert made.size == stats.BOOTSTRAP_REPEATS
    assert made.mean() == pytest.approx(values.mean(), abs=4 * values.std() / np.sqrt(300 * made.size))
    assert made.std() == pytest.approx(values.std() / np.sqrt(300), rel=0.1)
    assert (stats._resampled_means(np.full(5, 2.5), 0) == 2.5).all()


@pytest.mark.parametrize("q", [50.0, 90.0, 99.0, None])
def test_pooled_intervals_are_those_of_resampling_whole_requests(q: float | None) -> None:
    """Values pooled over 80 requests that differ from each other: both ends as from drawing requests in full, within a
    fifth of the interval's width (the ends of 2,000 full draws lie up to 0.1 of it apart)."""
    generator = np.random.default_rng(11)
    sizes = generator.integers(20, 60, 80)
    parts = [generator.lognormal(mean=level, size=n) for level, n in zip(generator.normal(0, 0.4, 80), sizes, strict=True)]
    values, owners = np.concatenate(parts), np.repeat(np.arange(80), sizes)
    found = stats.pooled_intervals(values, owners, [q])[0]

    def of(drawn: np.ndarray) -> float:
        return float(drawn.mean() if q is None else np.percentile(drawn, q))

    full = [of(np.concatenate([parts[i] for i in generator.integers(0, 80, 80)])) for _ in range(6000)]
    low, high = np.percentile(full, [2.5, 97.5])
    assert found.value == pytest.approx(of(values)) and found.low is not None and found.high is not None
    assert found.low == pytest.approx(low, abs=(high - low) / 5) and found.high == pytest.approx(high, abs=(high - low) / 5)
