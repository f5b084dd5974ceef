"""Two servers on the same tokens: what the difference is, by position, and whether it is one.

A difference means something only beside the noise floor (the same server again, restarted, under load) and inside an
interval that respects the pairing and the dependence within a document. The sign is `treated - reference`: negative
loses accuracy. Two questions have two intervals:

    pooled       these texts: batch means inside each document, hundreds of units; decides whether there IS an effect
    by_document  texts like these: documents as units, Student's t with few degrees of freedom; decides against the limit
                 where there are at least MIN_DOCUMENTS (below, the limit is judged for these texts alone, and that is said)

A bootstrap over a handful of documents is too narrow (it can't know the spread from 3 values), and over single tokens it
ignores that neighbours depend on each other; hence batches and t.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lib.errors import BadInput
from lib.load.stats import PairedDifference, batch_sums, paired_mean_difference, student_t_quantile
from lib.records import Measured, Record

Scores = Sequence[Mapping[str, Any]]

#: From this many documents on they are the units in which a loss is judged.
MIN_DOCUMENTS = 6
#: Stated rates at which noise alone is called a loss or a gain: 10% in all. Of normal noise no test finds 3 standard errors
#: in 18 of 20 comparisons for sure at 5% (Neyman and Pearson: power 91% for one side, 18 of
#: 20 in three of four series); at 9% seven of eight series reach it.
#: The nominal levels are lower: neighbouring batches are nearly, not quite, independent.
LEVEL_LOSS, LEVEL_GAIN = 0.09, 0.01
NOMINAL_LOSS, NOMINAL_GAIN = 0.08, 0.008
#: Random sign changes of the batches under which the observed statistic is judged; seeded, so that a rerun says the same.
FLIPS, FLIP_SEED = 4000, 20260417
#: Differences are clipped at this many robust standard deviations (Huber's 1.5).
CLIP = 1.5
#: Standard normal quantile of the power with which `detectable` is found: 90%.
_POWER_Z = 1.2816
#: How many of the largest single differences are kept.
LARGEST = 8


class Bucket(Record):
    """The mean difference over one range of positions, all documents pooled."""

    first: int
    last: int
    mean: Measured
    mean_absolute: float
    tokens: int = 0
    perplexity_ratio: Measured | None = None
    top1_agreement: Measured | None = None
    kl_lower_bound: Measured | None = None


class TokenDifference(Record):
    """One token whose log-probability moved far: where it stands, what it was, and the text around it if known."""

    document: str
    position: int
    token_id: int | None
    reference: float
    treated: float
    difference: float
    text: str | None = None


class Effect(Record):
    """Whether the mean difference is told apart from 0 (or from the floor's own shift), at which level, with what power.

    `found` is loss, gain, none_seen, identical or unknown. The statistic of a loss is the larger of two: the mean over its
    standard error, and the same of differences clipped at 1.5 robust standard deviations (single tokens move a hundred
    times as far as most, and hide a small shift of all the others), the latter only with the mean's own sign. Two equal
    servers give differences symmetric about 0, so every batch might as well have the other sign: `p_loss` and `p_gain` are
    the shares of 4,000 random sign changes that reach as far. That keeps the level of both together, however they depend
    on each other. `detectable` is the loss that the mean alone finds 9 times in 10.
    """

    found: str
    level_loss: float = LEVEL_LOSS
    level_gain: float = LEVEL_GAIN
    p_loss: float | None = None
    p_gain: float | None = None
    standard_error: float | None = None
    batches: int = 0
    detectable: float | None = None
    reason: str


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
    by_document: Measured
    effect: Effect
    top1_agreement: Measured
    kl_lower_bound: Measured
    largest_tokens: list[TokenDifference] = []

    @property
    def decisive(self) -> Measured:
        """The interval that a limit is compared with: documents as units where there are enough of them."""
        enough = self.documents >= MIN_DOCUMENTS and self.by_document.low is not None
        return self.by_document if enough else self.pooled

    @property
    def scope(self) -> str:
        """What the decisive interval speaks of."""
        if self.decisive is self.by_document:
            return f"texts like these ({self.documents} documents as units)"
        return f"these texts only ({self.documents} documents are too few to speak for others)"


def compare_scores(
    reference: Scores, treated: Scores, bucket_tokens: int, first: int = 1, doubling: bool = False
) -> ScoreComparison:
    """Compares two scorings of the same documents, token by token (the first token of each has no score and is left out).

    Args:
        reference, treated: records of `probes.read_scores` (`name`, `ids_sha256`, `logprobs` in nats, perhaps `top`).
        bucket_tokens: width of a position bucket (of the first one where they double).
        first: positions before it are left out (a first prefill chunk that never read the KV pool says nothing about it).
        doubling: buckets grow: 0 to w, w to 2w, 2w to 4w, ...

    Raises:
        BadInput: no position is left, or the arms scored other documents or other token ids.

    Example: the same server twice gives `identical` and a pooled difference of exactly 0.
    """
    pairs = _paired(reference, treated)
    start = max(first, 1)
    rows = [
        _Row(place, ref["key"], ref, new)
        for ref, new in pairs
        for place in range(start, min(len(ref["logprobs"]), len(new["logprobs"])))
    ]
    if not rows:
        raise BadInput(f"documents longer than {start} tokens", "no scored token is left", "score longer documents")
    pooled = _difference(rows)
    differences = [r.difference for r in rows]
    identical = all(d == 0 for d in differences)
    return ScoreComparison(
        tokens=len(rows),
        documents=len({r.document for r in rows}),
        pooled=_measured(pooled),
        by_document=_by_document(rows),
        effect=_effect(rows, pooled, identical),
        mean_absolute=sum(map(abs, differences)) / len(differences),
        largest=max(differences, key=abs),
        perplexity_ratio=_perplexity_ratio(pooled),
        top1_agreement=_top1_agreement(rows),
        kl_lower_bound=_kl(rows),
        buckets=_buckets(rows, bucket_tokens, doubling),
        identical=identical,
        largest_tokens=[_largest(r) for r in sorted(rows, key=lambda r: -abs(r.difference))[:LARGEST] if r.difference],
    )


class _Row:
    """One token under both arms."""

    __slots__ = ("a", "b", "difference", "document", "new", "place", "ref")

    def __init__(self, place: int, document: str, ref: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        self.place, self.document, self.ref, self.new = place, document, ref, new
        self.a, self.b = ref["logprobs"][place], new["logprobs"][place]
        self.difference = self.b - self.a

    def tops(self) -> tuple[Sequence[Any], Sequence[Any]] | None:
        """The most likely tokens here under both arms, `[log-probability, id]` each, the first the likeliest."""
        one, two = self.ref.get("top"), self.new.get("top")
        if not one or not two or not one[self.place] or not two[self.place]:
            return None
        return one[self.place], two[self.place]

    @property
    def token_id(self) -> int | None:
        ids = self.ref.get("ids")
        return int(ids[self.place]) if ids else None


def _difference(rows: Sequence[_Row]) -> PairedDifference:
    return paired_mean_difference([r.b for r in rows], [r.a for r in rows], [r.document for r in rows])


def _by_document(rows: Sequence[_Row]) -> Measured:
    """Mean over all tokens, documents as the independent units (cluster-robust error of a ratio), Student's t."""
    sums: dict[str, list[float]] = {}
    for r in rows:
        found = sums.setdefault(r.document, [0.0, 0.0])
        found[0] += r.difference
        found[1] += 1
    count, total = len(sums), len(rows)
    mean = sum(s for s, _ in sums.values()) / total
    if count < 3:
        return Measured(
            value=mean, unit="nat/token", n=count, reason=f"{count} document(s) say nothing about the spread between texts"
        )
    spread = sum((s - mean * n) ** 2 for s, n in sums.values())
    error = math.sqrt(count / (count - 1) * spread) / total
    reach = student_t_quantile(0.975, count - 1) * error
    return Measured(value=mean, unit="nat/token", n=count, low=mean - reach, high=mean + reach)


def _effect(rows: Sequence[_Row], d: PairedDifference, identical: bool) -> Effect:
    if identical:
        return Effect(found="identical", standard_error=0.0, batches=d.batches, reason="every score is the same number")
    if d.mean is None or d.standard_error is None:
        return Effect(found="unknown", reason=d.reason or "no standard error")
    blocks = [r.document for r in rows]
    p_loss, p_gain = sign_flip_p([batch_sums(x, blocks)[:2] for x in ([r.difference for r in rows], _clipped(rows))])
    found = "loss" if p_loss <= NOMINAL_LOSS else "gain" if p_gain <= NOMINAL_GAIN else "none_seen"
    quantile = student_t_quantile(1 - NOMINAL_LOSS, d.batches - 1)
    p = f"p {p_loss:.4f} for a loss" if d.mean < 0 else f"p {p_gain:.4f} for a gain"
    return Effect(
        found=found, p_loss=p_loss, p_gain=p_gain, standard_error=d.standard_error, batches=d.batches,
        detectable=(quantile + _POWER_Z) * d.standard_error,
        reason=f"mean {d.mean:+.5f}, standard error {d.standard_error:.5f} from {d.batches} batches of about {d.batch_length} "
        f"tokens, {p} ({FLIPS:,} sign changes); by noise alone a loss in {LEVEL_LOSS:.0%}, a gain in {LEVEL_GAIN:.0%} at most",
    )  # fmt: skip


def sign_flip_p(views: Sequence[tuple[Any, Any]], flips: int = FLIPS) -> tuple[float, float]:
    """p of a loss and of a gain: how often random signs of the batches give a statistic at least as far from 0.

    Args:
        views: sums and sizes of the same batches under each way of looking at them; the first one's mean has the sign.

    Example: three batches of one sign have p = (1 + about flips / 8) / (1 + flips): 2^3 sign patterns, one as far.
    """
    signs = np.random.default_rng(FLIP_SEED).choice((-1.0, 1.0), (flips + 1, len(views[0][0])))
    signs[0] = 1.0  # as observed
    ratios = []
    for sums, sizes in views:
        mean = signs @ sums / sizes.sum()
        squares = (sums**2).sum() - 2 * mean * (signs @ (sums * sizes)) + mean**2 * (sizes**2).sum()
        ratios.append(mean / np.sqrt(np.maximum(squares, 1e-300)))
    far = []
    for side in (-1.0, 1.0):
        own = [side * ratio for ratio in ratios]
        statistic = np.where(own[0] > 0, np.maximum.reduce(own), 0.0)
        far.append(1.0 if statistic[0] <= 0 else float((statistic >= statistic[0] * (1 - 1e-9)).mean()))
    return far[0], far[1]


def _clipped(rows: Sequence[_Row]) -> list[float]:
    """Differences, those beyond `CLIP` robust standard deviations (1.4826 x median |difference| of the tokens that moved) cut."""
    moved = sorted(abs(r.difference) for r in rows if r.difference)
    bound = CLIP * 1.4826 * moved[len(moved) // 2]
    return [max(-bound, min(bound, r.difference)) for r in rows]


def _indicator_mean(rows: Sequence[_Row], values: Sequence[float], unit: str) -> Measured:
    d = paired_mean_difference(list(values), [0.0] * len(values), [r.document for r in rows])
    return Measured(value=d.mean, unit=unit, n=d.n, low=d.low, high=d.high, reason=d.reason)


def _top1_agreement(rows: Sequence[_Row]) -> Measured:
    """Share of positions at which both arms find the same token likeliest."""
    with_tops = [(r, t) for r in rows if (t := r.tops())]
    if not with_tops:
        return Measured(value=None, unit="fraction", reason="no top-k was recorded in both arms")
    agree = [float(one[0][1] == two[0][1]) for _, (one, two) in with_tops]
    found = _indicator_mean([r for r, _ in with_tops], agree, "fraction")
    low = None if found.low is None else max(0.0, found.low)
    high = None if found.high is None else min(1.0, found.high)
    return found.model_copy(update={"low": low, "high": high})


def kl_lower_bound(
    reference: Sequence[Sequence[float]], treated: Sequence[Sequence[float]], more: Mapping[int, tuple[float, float]] = {}
) -> float:
    """A lower bound of KL(reference || treated) at one position, from two lists of `[log-probability, id]`.

    Every token known under both arms is its own event, all others are one: putting outcomes together never raises a KL
    divergence (data processing inequality), so the true one is at least this.

    Args:
        reference, treated: the likeliest tokens of both arms.
        more: further tokens known under both: id -> (reference, treated) log-probabilities.

    Example: p = (0.5, rest), q = (0.25, rest) gives 0.5 ln 2 + 0.5 ln(0.5 / 0.75) = 0.1438.
    """
    one = {int(i): value for value, i, *_ in reference}
    two = {int(i): value for value, i, *_ in treated}
    known = {i: (one[i], two[i]) for i in one.keys() & two.keys()} | dict(more)
    total, p_rest, q_rest = 0.0, 1.0, 1.0
    for a, b in known.values():
        p = math.exp(a)
        total += p * (a - b)
        p_rest -= p
        q_rest -= math.exp(b)
    if p_rest > 1e-9:
        total += p_rest * math.log(p_rest / max(q_rest, 1e-9))
    return max(0.0, total)


def _kl(rows: Sequence[_Row]) -> Measured:
    values, kept = [], []
    for r in rows:
        tops = r.tops()
        if tops:
            more = {} if r.token_id is None else {r.token_id: (r.a, r.b)}
            values.append(kl_lower_bound(*tops, more))
            kept.append(r)
    if not kept:
        return Measured(value=None, unit="nat/token", reason="no top-k was recorded in both arms")
    return _indicator_mean(kept, values, "nat/token")


def _largest(r: _Row) -> TokenDifference:
    pieces = r.ref.get("pieces")
    text = None
    if pieces:
        before = "".join(pieces[max(0, r.place - 12) : r.place])
        text = f"{before}[[{pieces[r.place]}]]"
    return TokenDifference(
        document=str(r.ref["name"]),
        position=r.place,
        token_id=r.token_id,
        reference=r.a,
        treated=r.b,
        difference=r.difference,
        text=text,
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


def bucket_edges(last: int, width: int, doubling: bool = False) -> list[tuple[int, int]]:
    """First and last position of each bucket up to `last`: of one width, or doubling.

    Example: `bucket_edges(3999, 1000, True)` is `[(0, 999), (1000, 1999), (2000, 3999)]`.
    """
    edges, start = [], 0
    while start <= last:
        end = start + (max(start, width) if doubling else width) - 1
        edges.append((start, min(end, last)))
        start = end + 1
    return edges


def _buckets(rows: Sequence[_Row], width: int, doubling: bool) -> list[Bucket]:
    made = []
    for start, end in bucket_edges(max(r.place for r in rows), width, doubling):
        inside = [r for r in rows if start <= r.place <= end]
        if not inside:
            continue
        difference = _difference(inside)
        made.append(
            Bucket(
                first=max(start, 1),
                last=end,
                mean=_measured(difference),
                mean_absolute=sum(abs(r.difference) for r in inside) / len(inside),
                tokens=len(inside),
                perplexity_ratio=_perplexity_ratio(difference),
                top1_agreement=_top1_agreement(inside),
                kl_lower_bound=_kl(inside),
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


def floor_shift(floors: Sequence[ScoreComparison]) -> float:
    """The largest mean difference of the reference against itself that is told apart from 0; 0 if none is."""
    return max((abs(float(f.pooled.value or 0)) for f in floors if f.effect.found in ("loss", "gain")), default=0.0)


def judge_effect(found: ScoreComparison, floors: Sequence[ScoreComparison]) -> tuple[str, str]:
    """Whether two arms differ at all: `identical`, `loss`, `gain`, `none_seen` or `unknown`, and why.

    An effect also has to exceed what the reference does to itself: a mean that lies within the floor's own shift (seen
    again, after a restart, or under load) is `none_seen`.
    """
    effect, shift = found.effect, floor_shift(floors)
    reason = effect.reason
    if effect.found in ("loss", "gain") and abs(float(found.pooled.value or 0)) <= shift:
        return "none_seen", f"{reason}; the reference shifts against itself by {shift:.5f} nat/token, no less than this"
    if effect.found == "none_seen" and effect.detectable is not None:
        reason += f"; a loss of {effect.detectable:.5f} nat/token would be found 9 times in 10"
    return effect.found, reason


def tokens_needed(found: ScoreComparison, limit_nats: float) -> int | None:
    """How many tokens in all would put the decisive interval on one side of the limit, if the mean stays; None if none would.

    The interval narrows with the root of the number of tokens: n x (half width / distance to the nearer limit)^2.
    Example: 1,000 tokens, 0.004 +- 0.008 against 0.01: 1,000 x (8 / 6)^2 = 1,778.
    """
    d = found.decisive
    if not isinstance(d.value, (int, float)) or d.low is None or d.high is None:
        return None
    half, distance = (d.high - d.low) / 2, min(abs(d.value + limit_nats), abs(d.value - limit_nats))
    return None if distance <= 0 else math.ceil(found.tokens * (half / distance) ** 2)


def judge_comparison(
    found: ScoreComparison, floors: Sequence[ScoreComparison], limit_nats: float
) -> tuple[str, str]:
    """The outcome of a comparison against the largest accepted loss, the widest floor counted; see `judge_loss`."""
    if not floors:
        return "not_enough_data", "no noise floor: score the reference against itself first"
    worst = max(floors, key=_reach)
    outcome, reason = judge_loss(found.decisive, worst, limit_nats)
    if outcome == "not_enough_data" and (needed := tokens_needed(found, limit_nats)) and needed > found.tokens:
        reason += f": {found.tokens:,} tokens were scored, about {needed:,} are needed"
    return outcome, f"{reason}; for {found.scope}"


def _reach(floor: ScoreComparison) -> float:
    ends = [abs(x) for x in (floor.pooled.low, floor.pooled.high) if x is not None]
    return max(ends) if ends else (0.0 if floor.identical else math.inf)


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
