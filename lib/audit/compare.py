"""Two servers on the same tokens: what the difference is, by position, and whether it is one.

A difference means something only beside the noise floor (the same server twice) and inside an interval that respects
the pairing and the dependence within a document. The sign is `treated - reference`: negative loses accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lib.errors import BadInput
from lib.load.stats import PairedDifference, paired_mean_difference
from lib.records import Measured, Record

Scores = Sequence[Mapping[str, Any]]


class Bucket(Record):
    """The mean difference over one range of positions, all documents pooled."""

    first: int
    last: int
    mean: Measured
    mean_absolute: float


class ScoreComparison(Record):
    """Two arms over all scored tokens: mean difference in nats, by position and pooled, and the largest single ones."""

    tokens: int
    documents: int
    pooled: Measured
    mean_absolute: float
    largest: float
    perplexity_ratio: Measured
    buckets: list[Bucket]
    identical: bool


def compare_scores(reference: Scores, treated: Scores, bucket_tokens: int, first: int = 1) -> ScoreComparison:
    """Compares two scorings of the same documents, token by token (the first token of each has no score and is left out).

    Args:
        reference, treated: records of `probes.read_scores` (`name`, `ids_sha256`, `logprobs` in nats).
        bucket_tokens: width of a position bucket.
        first: positions before it are left out (a first prefill chunk that never read the KV pool says nothing about it).

    Raises:
        BadInput: no position is left, or the arms scored other documents or other token ids.

    Example: the same server twice gives `identical` and a pooled difference of exactly 0.
    """
    pairs = _paired(reference, treated)
    start = max(first, 1)
    a = [value for ref, _ in pairs for value in ref["logprobs"][start:]]
    b = [value for _, new in pairs for value in new["logprobs"][start:]]
    blocks = [ref["key"] for ref, _ in pairs for _ in ref["logprobs"][start:]]
    positions = [place for ref, _ in pairs for place in range(start, len(ref["logprobs"]))]
    if not a:
        raise BadInput(f"documents longer than {start} tokens", "no scored token is left", "score longer documents")
    pooled = paired_mean_difference(b, a, blocks)
    differences = [y - x for x, y in zip(a, b, strict=True)]
    return ScoreComparison(
        tokens=len(a),
        documents=len(pairs),
        pooled=_measured(pooled),
        mean_absolute=sum(map(abs, differences)) / len(differences),
        largest=max(differences, key=abs),
        perplexity_ratio=_perplexity_ratio(pooled),
        buckets=_buckets(a, b, blocks, positions, bucket_tokens),
        identical=all(d == 0 for d in differences),
    )


def _paired(reference: Scores, treated: Scores) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    first = {(s["key"], s["ids_sha256"]): s for s in reference}
    second = {(s["key"], s["ids_sha256"]): s for s in treated}
    if not first or first.keys() != second.keys():
        odd = sorted(name for name, _ in first.keys() ^ second.keys())
        raise BadInput(
            "two arms that scored the same token ids of the same documents", f"{', '.join(odd) or 'no scores'}"
        )
    return [(first[key], second[key]) for key in sorted(first)]


def _buckets(a: list[float], b: list[float], blocks: list[str], positions: list[int], width: int) -> list[Bucket]:
    made = []
    for start in range(0, max(positions) + 1, width):
        inside = [i for i, place in enumerate(positions) if start <= place < start + width]
        if not inside:
            continue
        x, y = [a[i] for i in inside], [b[i] for i in inside]
        made.append(
            Bucket(
                first=max(start, 1),
                last=min(start + width - 1, max(positions)),
                mean=_measured(paired_mean_difference(y, x, [blocks[i] for i in inside])),
                mean_absolute=sum(abs(q - p) for p, q in zip(x, y, strict=True)) / len(x),
            )
        )
    return made


def _measured(difference: PairedDifference) -> Measured:
    reason = difference.reason
    return Measured(
        value=difference.mean,
        unit="nat/token",
        n=difference.n,
        low=difference.low,
        high=difference.high,
        reason=reason or (None if difference.low is not None else "no interval"),
    )


def _perplexity_ratio(difference: PairedDifference) -> Measured:
    if difference.mean is None or difference.low is None or difference.high is None:
        return Measured(value=None, reason=difference.reason or "no interval")
    return Measured(
        value=math.exp(-difference.mean),
        unit="x",
        n=difference.n,
        low=math.exp(-difference.high),
        high=math.exp(-difference.low),
    )


def judge_loss(difference: Measured, floor: ScoreComparison, limit_nats: float) -> tuple[str, str]:
    """The outcome of a measured difference against the largest loss that is accepted.

    Args:
        difference: treated minus reference, nats a token, with its interval.
        floor: the reference against itself.
        limit_nats: accepted loss, positive.

    Returns:
        (outcome, reason): `within_limit` if the whole interval lies inside +-limit, `outside_limit` if it lies below
        -limit, `reference_suspect` if it lies above +limit (the treated server predicts real text *better*: then the
        reference is the broken one, as a BF16 pool over calibrated scales is), else `not_enough_data` with how many times
        more tokens would settle it; also where the floor itself is not well inside the limit.

    Example: [-0.031, -0.018] against 0.01 is `outside_limit`; [-0.012, 0.002] is `not_enough_data`.
    """
    if difference.value is None or difference.low is None or difference.high is None:
        return "not_enough_data", difference.reason or "no interval"
    value, low, high = float(difference.value), difference.low, difference.high
    words = (
        f"{value:+.4f} nat/token, 95% interval [{low:+.4f}, {high:+.4f}], accepted loss {limit_nats:g}; "
        f"floor: mean |difference| {floor.mean_absolute:.4f}"
    )
    if not floor.identical:
        ends = [abs(x) for x in (floor.pooled.low, floor.pooled.high) if x is not None]
        if not ends or max(ends) > limit_nats / 2:
            return "not_enough_data", f"{words}; the reference differs from itself by more than half the limit"
    if low > limit_nats:
        return (
            "reference_suspect",
            f"{words}; the treated server is better by more than the limit: look at the reference",
        )
    if low >= -limit_nats and high <= limit_nats:
        return "within_limit", words
    if high < -limit_nats:
        return "outside_limit", words
    half = (high - low) / 2
    distance = min(abs(value + limit_nats), abs(value - limit_nats))
    more = (half / distance) ** 2 if distance > 0 else math.inf
    needed = f"about {more:.0f} times as many tokens would settle it" if math.isfinite(more) else "the mean lies on it"
    return "not_enough_data", f"{words}; the interval spans the limit: {needed}"
