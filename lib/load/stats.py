"""Intervals and tests, from numbers alone: bootstrap over requests, paired differences, McNemar, dependent series.

Every interval here is a 95% interval. What cannot be said is `None` with a reason, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lib.errors import BadInput
from lib.records import Record

Array = NDArray[np.float64]
CONFIDENCE = 0.95
BOOTSTRAP_REPEATS = 1000
#: Below this many independent units (requests, repeats) an interval is not given: it would be an ornament.
MIN_UNITS = 3


class Interval(Record):
    """An estimate with its 95% interval, the number of independent units behind it, or the reason why none."""

    value: float | None
    low: float | None = None
    high: float | None = None
    n: int = 0
    reason: str | None = None


class PairedDifference(Record):
    """The mean of `a - b` over pairs, with a standard error that respects dependence inside documents.

    `standard_error` and the interval come from the means of consecutive batches inside each document: neighbours in a
    text are not independent, so the plain error of the mean (`naive_standard_error`) is usually too small.
    """

    mean: float | None
    standard_error: float | None
    low: float | None
    high: float | None
    n: int
    documents: int
    batches: int
    batch_length: int | None
    naive_standard_error: float | None = None
    reason: str | None = None


class McNemar(Record):
    """Exact McNemar test of paired yes/no outcomes: how many pairs differ each way and the two-sided p."""

    both: int
    neither: int
    only_a: int
    only_b: int
    difference: float | None
    p_value: float | None
    reason: str | None = None


def student_t_quantile(probability: float, degrees: int) -> float:
    """Quantile of Student's t with `degrees` degrees of freedom, by bisection on its distribution function.

    Source: the regularised incomplete beta function by Lentz's continued fraction (Numerical Recipes, 6.4).
    Example: `student_t_quantile(0.975, 10)` is 2.228.
    """
    if degrees < 1 or not 0 < probability < 1:
        raise BadInput("a probability inside (0, 1) and at least one degree of freedom", f"{probability}, {degrees}")
    if probability < 0.5:
        return -student_t_quantile(1 - probability, degrees)
    low, high = 0.0, 1e4
    for _ in range(200):
        middle = (low + high) / 2
        x = degrees / (degrees + middle * middle)
        below = 1 - 0.5 * _incomplete_beta(degrees / 2, 0.5, x)
        low, high = (middle, high) if below < probability else (low, middle)
    return (low + high) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x > (a + 1) / (a + b + 2):
        return 1 - front * _beta_fraction(b, a, 1 - x) / b
    return front * _beta_fraction(a, b, x) / a


def _beta_fraction(a: float, b: float, x: float) -> float:
    tiny = 1e-300
    c, d = 1.0, 1 - (a + b) * x / (a + 1)
    d = 1 / (d if abs(d) > tiny else tiny)
    value = d
    for m in range(1, 300):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 + numerator * d
            d = 1 / (d if abs(d) > tiny else tiny)
            c = 1 + numerator / c
            c = c if abs(c) > tiny else tiny
            value *= d * c
        if abs(d * c - 1) < 1e-13:
            break
    return value


def _finite(values: Sequence[float] | Array, what: str) -> Array:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise BadInput(f"{what}: one number each", f"an array of shape {array.shape}")
    if not np.isfinite(array).all():
        raise BadInput(f"{what}: finite numbers", f"{int((~np.isfinite(array)).sum())} that are not")
    return array


def percentile(values: Sequence[float] | Array, q: float) -> float | None:
    """The q-th percentile (0..100) by linear interpolation, None for no values. Source: numpy's default method."""
    array = np.asarray(values, dtype=np.float64)
    return float(np.percentile(array, q)) if array.size else None


def _interval(value: float, replicates: Array, n: int) -> Interval:
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(replicates, [tail, 100 - tail])
    return Interval(value=value, low=float(low), high=float(high), n=n)


def bootstrap_mean(values: Sequence[float] | Array, seed: int = 0) -> Interval:
    """Mean and percentile bootstrap interval over units (requests, repeats).

    Below `MIN_UNITS` units the value is given without an interval, and the reason says so.
    """
    array = _finite(values, "values of a mean")
    if not array.size:
        return Interval(value=None, reason="no values")
    mean = float(array.mean())
    if array.size < MIN_UNITS:
        return Interval(value=mean, n=array.size, reason=f"no interval from {array.size} unit(s)")
    return _interval(mean, _resampled_means(array, seed), array.size)


def share_interval(hits: int, count: int) -> Interval:
    """A share with Wilson's score interval: it has a width even when all or none hit, where a bootstrap has none.

    Source: Wilson 1927; Brown, Cai and DasGupta 2001, Interval Estimation for a Binomial Proportion.
    Example: 10 of 10 is 1.0 with a lower end of 0.722.
    """
    if not 0 <= hits <= count:
        raise BadInput("between 0 and all hits", f"{hits} of {count}")
    if count == 0:
        return Interval(value=None, reason="no values")
    z = 1.959963984540054
    share = hits / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    reach = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    low, high = max(0.0, middle - reach), min(1.0, middle + reach)
    return Interval(value=share, low=0.0 if hits == 0 else low, high=1.0 if hits == count else high, n=count)


def units_for_percentile(q: float) -> int:
    """Fewest units of which the most extreme lies beyond the q-th percentile with 97.5%, so that both ends have a bound.

    Example: 6 for the median, 36 for the 90th percentile, 368 for the 99th (0.99**368 is below 0.025).
    """
    part = max(q, 100 - q) / 100
    return math.ceil(math.log((1 - CONFIDENCE) / 2) / math.log(part)) if part < 1 else MIN_UNITS


def bootstrap_percentile(values: Sequence[float] | Array, q: float, seed: int = 0) -> Interval:
    """The q-th percentile over units and its percentile bootstrap interval.

    Without an interval in the tails where even the most extreme value may well lie inside the percentile: resampling
    cannot go beyond it, so its end would be too near. The reason says how many units are needed. A median of fewer than
    six keeps its interval, and says how seldom that holds.
    """
    array = _finite(values, "values of a percentile")
    if not array.size:
        return Interval(value=None, reason="no values")
    value = float(np.percentile(array, q))
    needed = units_for_percentile(q)
    if array.size < MIN_UNITS or (q != 50 and array.size < needed):
        few = f"no interval from {array.size} unit(s): the {q:g}th percentile needs {max(MIN_UNITS, needed)}"
        return Interval(value=value, n=array.size, reason=few)
    found = _interval(value, _percentile_replicates(np.sort(array), q, seed), array.size)
    if array.size < needed:
        at_most = 1 - 2 * 0.5**array.size
        found = found.model_copy(update={"reason": f"from {array.size} units: holds in at most {at_most:.0%}, not 95%"})
    return found


def _percentile_replicates(ordered: Array, q: float, seed: int) -> Array:
    """The q-th percentile of `BOOTSTRAP_REPEATS` resamples, without drawing them: only its two order statistics.

    Of n values drawn with replacement, the k-th smallest is the value at rank floor(n U), where U is the k-th smallest
    of n uniform numbers: Beta(k, n - k + 1). Given it, the next one divides the rest as the least of n - k uniforms.
    Source: David and Nagaraja 2003, Order Statistics, 2.1 and 2.5. The same distribution as resampling has.
    """
    n = ordered.size
    place = (n - 1) * q / 100
    k = int(place) + 1  # counted from 1
    generator = np.random.default_rng(seed)
    here = generator.beta(k, n - k + 1, BOOTSTRAP_REPEATS)
    low = ordered[np.minimum((here * n).astype(np.int64), n - 1)]
    part = place - int(place)
    if k == n or not part:
        return low
    after = here + (1 - here) * generator.beta(1, n - k, BOOTSTRAP_REPEATS)
    high = ordered[np.minimum((after * n).astype(np.int64), n - 1)]
    return low + part * (high - low)


@lru_cache(maxsize=1)
def _weights(size: int, seed: int) -> list[NDArray[np.float32]]:
    """How often each of `size` units is drawn in each resample: blocks of shape (resamples, units).

    Kept for the next metric of the same requests. Fewer resamples (at least 200) above 4,000 units.
    """
    generator = np.random.default_rng(seed)
    left = min(BOOTSTRAP_REPEATS, max(200, 4_000_000 // size))
    made = []
    while left:
        rows = min(left, max(1, 1_000_000 // size))
        draws = generator.integers(0, size, (rows, size)) + np.arange(0, rows * size, size)[:, None]
        made.append(np.bincount(draws.ravel(), minlength=rows * size).reshape(rows, size).astype(np.float32))
        left -= rows
    return made


def _resampled_means(values: Array, seed: int) -> Array:
    """The mean of each resample of the units, in the order of the resamples: two calls of one size are paired."""
    middle = float(values.mean())
    centred = (values - middle).astype(np.float32)
    return np.concatenate([(w @ centred).astype(np.float64) for w in _weights(values.size, seed)]) / values.size + middle


def bootstrap_ratio(
    numerators: Sequence[float] | Array, denominators: Sequence[float] | Array, seed: int = 0
) -> Interval:
    """Sum of numerators over sum of denominators, resampling the pairs (tokens per verify step, tokens per second)."""
    top, bottom = _finite(numerators, "numerators"), _finite(denominators, "denominators")
    if top.size != bottom.size:
        raise BadInput("as many numerators as denominators", f"{top.size} and {bottom.size}")
    if not top.size or bottom.sum() <= 0:
        return Interval(value=None, n=top.size, reason="no values" if not top.size else "the denominators sum to 0")
    value = float(top.sum() / bottom.sum())
    if top.size < MIN_UNITS:
        return Interval(value=value, n=top.size, reason=f"no interval from {top.size} unit(s)")
    above, below = _resampled_means(top, seed), _resampled_means(bottom, seed)
    some = below > 1e-6 * float(bottom.mean())  # not a resample of nothing but zeros
    return _interval(value, above[some] / below[some], top.size)


def pooled_intervals(
    values: Array, owners: NDArray[np.int64], percentiles: Sequence[float | None], seed: int = 0
) -> list[Interval]:
    """Percentiles (None: the mean) of values pooled over requests, their intervals by resampling whole requests.

    Gaps inside a request depend on each other and on the same server steps, so single gaps are not resampled. The
    interval is computed on 1,000 bins of the pooled distribution: its ends are exact to 0.1% of the values.
    """
    if not values.size:
        return [Interval(value=None, reason="no values") for _ in percentiles]
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    points = [float(values.mean()) if q is None else _of_sorted(ordered, q) for q in percentiles]
    ids, owner = np.unique(owners, return_inverse=True)
    if ids.size < MIN_UNITS:
        reason = f"no interval from {ids.size} request(s)"
        return [Interval(value=x, n=int(values.size), reason=reason) for x in points]
    draws = _weights(ids.size, seed)
    # Bin j holds the values from rank j n / 1000 on; a replicate is the largest value of the bin that reaches q.
    bins = min(1000, values.size)
    bin_of = np.empty(values.size, dtype=np.int64)
    bin_of[order] = np.arange(values.size) * bins // values.size
    largest = ordered[np.append(np.flatnonzero(np.diff(bin_of[order])), values.size - 1)]
    table = np.bincount(owner * bins + bin_of, minlength=ids.size * bins).reshape(ids.size, bins).astype(np.float32)
    reached = np.concatenate([np.cumsum(w @ table, axis=1, dtype=np.float64) for w in draws])
    results = []
    for q, point in zip(percentiles, points, strict=True):
        if q is None:
            sums: Array = np.bincount(owner, weights=values).astype(np.float64)
            replicates = _resampled_means(sums, seed) / _resampled_means(np.bincount(owner).astype(np.float64), seed)
        else:
            replicates = largest[np.argmax(reached >= reached[:, -1:] * (q / 100), axis=1)]
        results.append(_interval(point, replicates, int(values.size)))
    return results


def _of_sorted(ordered: Array, q: float) -> float:
    """The q-th percentile of sorted values, as `np.percentile` has it."""
    place = (ordered.size - 1) * q / 100
    low, high = ordered[int(place)], ordered[min(int(place) + 1, ordered.size - 1)]
    return float(low + (place - int(place)) * (high - low))


def pooled_interval(values: Array, owners: NDArray[np.int64], q: float | None, seed: int = 0) -> Interval:
    """One of `pooled_intervals`."""
    return pooled_intervals(values, owners, [q], seed)[0]


def paired_difference(a: Sequence[float] | Array, b: Sequence[float] | Array, seed: int = 0) -> Interval:
    """Mean of a - b over pairs (the same request under A and B, or interleaved repeats) with its bootstrap interval."""
    x, y = _finite(a, "a"), _finite(b, "b")
    if x.size != y.size:
        raise BadInput("pairs: as many values of a as of b", f"{x.size} and {y.size}")
    return bootstrap_mean(x - y, seed)


def paired_mean_difference(
    a: Sequence[float] | Array, b: Sequence[float] | Array, blocks: Sequence[Any] | None = None
) -> PairedDifference:
    """Mean of `a - b` over token positions, its standard error by batch means within documents, and a 95% interval.

    Args:
        a: one number a token (a log-probability, nats).
        b: the same tokens under the other condition, in the same order.
        blocks: the document each token belongs to, in text order; None means one document.

    A document of n tokens is cut into consecutive batches of about sqrt(n) tokens; the batches are taken as
    independent, tokens inside one are not. The interval uses Student's t with (batches - 1) degrees of freedom.
    Two identical series give exactly 0 with a standard error of exactly 0: that is a measured noise floor.

    Raises:
        BadInput: unequal lengths, a number that is not finite, or a document whose tokens are not consecutive.

    Source: batch means for dependent series (Law and Kelton, Simulation Modeling and Analysis, 9.5.3).
    Example: `paired_mean_difference([1, 2, 3, 4], [0, 1, 2, 3]).mean` is 1.0 with standard error 0.0.
    """
    x, y = _finite(a, "a"), _finite(b, "b")
    if x.size != y.size or (blocks is not None and len(blocks) != x.size):
        found = f"{x.size}, {y.size}" + (f", {len(blocks)}" if blocks is not None else "")
        raise BadInput("as many values of a as of b, and a document for each", found)
    if not x.size:
        return PairedDifference(
            mean=None, standard_error=None, low=None, high=None, n=0, documents=0, batches=0, batch_length=None,
            reason="no pairs",
        )  # fmt: skip
    difference = x - y
    mean = float(difference.mean())
    documents = _runs(blocks, x.size)
    sums, sizes, length = batch_sums(difference, blocks)
    k = len(sums)
    naive = float(difference.std(ddof=1) / math.sqrt(x.size)) if x.size > 1 else None
    if k < 2:
        return PairedDifference(
            mean=mean, standard_error=None, low=None, high=None, n=x.size, documents=len(documents), batches=k,
            batch_length=length, naive_standard_error=naive, reason="one batch has no standard error",
        )  # fmt: skip
    residual = sums - mean * sizes
    error = float(math.sqrt(k / (k - 1) * float((residual**2).sum())) / x.size)
    reach = student_t_quantile(0.5 + CONFIDENCE / 2, k - 1) * error
    return PairedDifference(
        mean=mean, standard_error=error, low=mean - reach, high=mean + reach, n=x.size, documents=len(documents),
        batches=k, batch_length=length, naive_standard_error=naive,
    )  # fmt: skip


def batch_sums(values: Sequence[float] | Array, blocks: Sequence[Any] | None = None) -> tuple[Array, Array, int]:
    """Sums and sizes of consecutive batches of about sqrt(n) values inside each block, and that length.

    Example: `batch_sums([1, 2, 3, 4])` is sums [3, 7], sizes [2, 2], length 2.
    """
    x = np.asarray(values, dtype=float)
    runs = _runs(blocks, x.size)
    length = max(1, round(math.sqrt(max(stop - start for start, stop in runs))))
    pieces = [p for start, stop in runs for p in np.array_split(x[start:stop], max(1, (stop - start) // length))]
    return np.array([p.sum() for p in pieces]), np.array([float(p.size) for p in pieces]), length


def _runs(blocks: Sequence[Any] | None, size: int) -> list[tuple[int, int]]:
    if blocks is None:
        return [(0, size)]
    runs, start, seen = [], 0, set()
    for i in range(1, size + 1):
        if i == size or blocks[i] != blocks[start]:
            if blocks[start] in seen:
                raise BadInput("each document's tokens one after the other", f"{blocks[start]!r} in two places")
            seen.add(blocks[start])
            runs.append((start, i))
            start = i
    return runs


def mcnemar_exact(a: Sequence[bool], b: Sequence[bool]) -> McNemar:
    """Exact two-sided McNemar test for paired outcomes (a question answered right under A, under B).

    Under the null hypothesis a differing pair is as likely to favour A as B: a fair coin over the differing pairs.
    Example: 1 pair only a, 9 pairs only b: p = 2 * (1 + 10) / 2**10 = 0.0215.
    """
    if len(a) != len(b):
        raise BadInput("pairs: as many outcomes of a as of b", f"{len(a)} and {len(b)}")
    both = sum(x and y for x, y in zip(a, b, strict=True))
    only_a = sum(bool(x) and not y for x, y in zip(a, b, strict=True))
    only_b = sum(bool(y) and not x for x, y in zip(a, b, strict=True))
    neither = len(a) - both - only_a - only_b
    if not a:
        return McNemar(both=0, neither=0, only_a=0, only_b=0, difference=None, p_value=None, reason="no pairs")
    differing = only_a + only_b
    tail = sum(math.comb(differing, i) for i in range(min(only_a, only_b) + 1))
    p = min(1.0, 2 * tail / 2**differing)
    return McNemar(
        both=both, neither=neither, only_a=only_a, only_b=only_b, difference=(only_a - only_b) / len(a), p_value=p
    )
