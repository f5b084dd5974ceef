"""Are the answers the same with speculation? Greedy token by token, sampled by distribution, parameters by their effect.

Verification is meant to leave the target's answers alone. In floating point it need not: a batch of drafts is summed in
another order than one token, and where two tokens are almost equally likely the other one may win. Such a *near tie*
explains a first divergence; a clear preference of the untreated server does not.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lib.records import Measured, Record

Ids = Sequence[int]


def first_difference(a: Ids, b: Ids) -> int | None:
    """The first place at which two outputs differ; an early end is a difference; None if they are equal."""
    for place, (x, y) in enumerate(itertools.zip_longest(a, b)):
        if x != y:
            return place
    return None


class Divergence(Record):
    """The first place at which a treated answer leaves the untreated one, and what the untreated server thinks of it."""

    text: str
    request: int
    position: int
    base_token: int | None
    treated_token: int | None
    margin_nats: float | None
    near_tie: bool | None
    reason: str


def explain(
    text: str,
    request: int,
    position: int,
    base_token: int | None,
    treated_token: int | None,
    top: Sequence[Sequence[Any]] | None,
    tie_nats: float,
) -> Divergence:
    """Judges one divergence by the untreated server's log-probabilities for the place where it happens.

    Args:
        top: rows of (log-probability, token id, ...) for the next token, most likely first; None if it was not asked.
        tie_nats: two tokens closer than this are a near tie.

    Example: log-probabilities -0.70 and -0.71 for the two tokens: a margin of 0.01, a near tie.
    """
    common: dict[str, Any] = {
        "text": text, "request": request, "position": position, "base_token": base_token, "treated_token": treated_token,
    }  # fmt: skip
    if base_token is None or treated_token is None:
        return Divergence(margin_nats=None, near_tie=None, reason="one of the answers ends here", **common)
    if not top:
        return Divergence(margin_nats=None, near_tie=None, reason="the log-probabilities here were not asked", **common)
    known = {int(row[1]): float(row[0]) for row in top}
    if treated_token in known and base_token in known:
        margin = known[base_token] - known[treated_token]
        near = abs(margin) <= tie_nats
        word = "a near tie" if near else "no near tie"
        reason = f"the untreated server prefers its own token by {margin:.4f} nat: {word} (limit {tie_nats:g})"
        return Divergence(margin_nats=margin, near_tie=near, reason=reason, **common)
    lowest = min(known.values())
    missing = treated_token if treated_token not in known else base_token
    margin = max(known.values()) - lowest
    if margin <= tie_nats:  # a distribution so flat that even the last of the rows is a tie
        reason = f"token {missing} is beyond the {len(known)} most likely, which lie within {margin:.4f} nat"
        return Divergence(margin_nats=None, near_tie=None, reason=reason, **common)
    reason = f"token {missing} is not among the {len(known)} most likely: at least {margin:.3f} nat away, no near tie"
    return Divergence(margin_nats=margin, near_tie=False, reason=reason, **common)


class GreedyAgreement(Record):
    """Greedy answers of two launches to the same prompts."""

    text: str
    requests: int
    identical: int
    tokens_compared: int
    divergences: list[Divergence]

    @property
    def unexplained(self) -> list[Divergence]:
        """Divergences that are no near tie (what could not be judged is not among them)."""
        return [d for d in self.divergences if d.near_tie is False]

    @property
    def unknown(self) -> list[Divergence]:
        return [d for d in self.divergences if d.near_tie is None]


def compare_greedy(
    text: str,
    base: Sequence[Ids],
    treated: Sequence[Ids],
    tops: Mapping[int, Sequence[Sequence[Any]]],
    tie_nats: float,
) -> GreedyAgreement:
    """Answers of both arms, request by request; `tops` holds the next-token rows at each divergence, by request."""
    found, compared = [], 0
    for number, (a, b) in enumerate(zip(base, treated, strict=True)):
        place = first_difference(a, b)
        compared += len(a) if place is None else place + 1
        if place is not None:
            x, y = (ids[place] if place < len(ids) else None for ids in (a, b))
            found.append(explain(text, number, place, x, y, tops.get(number), tie_nats))
    return GreedyAgreement(
        text=text, requests=len(base), identical=len(base) - len(found), tokens_compared=compared, divergences=found
    )


class SampledAgreement(Record):
    """Two sets of sampled answers to one prompt compared by distribution (permutation test)."""

    samples_a: int
    samples_b: int
    distance: Measured
    p_value: float | None
    expected_distance: float | None
    detectable: float | None = None
    reason: str


def compare_samples(a: Sequence[Ids], b: Sequence[Ids], seed: int = 0, repeats: int = 2000) -> SampledAgreement:
    """Whether two sets of sampled answers come from one distribution.

    The statistic is the total variation distance between the tokens at each position, averaged over positions after the
    first (the first token comes from the prefill and is never verified). The p-value is the share of random splits of
    all samples whose distance is as large.

    Example: two halves of one set of samples give p around 0.5; fair against always-heads coins give p below 0.01.
    """
    length = min((len(x) for x in itertools.chain(a, b)), default=0)
    if len(a) < 5 or len(b) < 5 or length < 2:
        reason = f"{len(a)} and {len(b)} samples of {length} tokens: too few"
        return SampledAgreement(
            samples_a=len(a), samples_b=len(b), distance=Measured(value=None, reason=reason), p_value=None,
            expected_distance=None, reason=reason,
        )  # fmt: skip
    columns = []
    for place in range(1, length):
        names = {token: i for i, token in enumerate(dict.fromkeys(x[place] for x in itertools.chain(a, b)))}
        columns.append((np.array([names[x[place]] for x in itertools.chain(a, b)]), len(names)))
    rows = len(a) + len(b)

    def distance(chosen: np.ndarray[Any, Any]) -> float:
        inside = np.zeros(rows, dtype=bool)
        inside[chosen] = True
        total = 0.0
        for column, width in columns:
            p = np.bincount(column[inside], minlength=width) / len(a)
            q = np.bincount(column[~inside], minlength=width) / len(b)
            total += float(np.abs(p - q).sum()) / 2
        return total / len(columns)

    seen = distance(np.arange(len(a)))
    generator = np.random.default_rng(seed)
    split = np.array([distance(generator.permutation(rows)[: len(a)]) for _ in range(repeats)])
    p_value = float((1 + (split >= seen - 1e-12).sum()) / (1 + repeats))
    return SampledAgreement(
        samples_a=len(a),
        samples_b=len(b),
        distance=Measured(value=seen, n=rows, reason="total variation, mean over positions after the first"),
        p_value=p_value,
        expected_distance=float(split.mean()),
        detectable=float(np.quantile(split, 0.95)) - float(split.mean()),
        reason=f"distance {seen:.3f}; random splits of the same samples have {split.mean():.3f} on average: p = {p_value:.3f}",
    )


class ParameterFate(Record):
    """What became of one sampling parameter under verification: honoured, ignored, applied otherwise, or not visible."""

    name: str
    fate: str
    reason: str
    n: int


def judge_min_p(base: Mapping[str, Sequence[Ids]], treated: Mapping[str, Sequence[Ids]]) -> ParameterFate:
    """min_p 1.0 leaves the most likely token alone, so each sample must equal the greedy answer.

    Args:
        base, treated: outputs by probe: `greedy` (one), `free` (sampled without min_p), `min_p` (sampled with it).
    """
    n = len(treated.get("min_p", ()))
    if not n or not base.get("min_p") or not treated.get("greedy") or not base.get("greedy"):
        return ParameterFate(name="min_p", fate="not_tried", reason="the probe was not answered", n=n)
    base_hits = sum(list(x) == list(base["greedy"][0]) for x in base["min_p"])
    hits = sum(list(x) == list(treated["greedy"][0]) for x in treated["min_p"])
    free = sum(list(x) == list(treated["greedy"][0]) for x in treated.get("free", ()))
    if base_hits < len(base["min_p"]):
        reason = (
            f"without speculation {base_hits} of {len(base['min_p'])} samples equal the greedy answer: "
            "near ties, or not honoured there either"
        )
        return ParameterFate(name="min_p", fate="not_visible", reason=reason, n=n)
    if treated.get("free") and free == len(treated["free"]):
        reason = "samples without min_p equal the greedy answer too: nothing for it to cut off"
        return ParameterFate(name="min_p", fate="not_visible", reason=reason, n=n)
    words = f"{hits} of {n} samples with min_p=1 equal the greedy answer (without speculation {base_hits} of {len(base['min_p'])})"
    return ParameterFate(name="min_p", fate="honoured" if hits == n else "ignored", reason=words, n=n)


def judge_penalty(name: str, base: Mapping[str, Sequence[Ids]], treated: Mapping[str, Sequence[Ids]]) -> ParameterFate:
    """A penalty under greedy decoding: the treated answer should be the untreated server's penalised answer."""
    if not base.get(name) or not treated.get(name) or not base.get("plain") or not treated.get("plain"):
        return ParameterFate(name=name, fate="not_tried", reason="the probe was not answered", n=0)
    with_it, plain = list(base[name][0]), list(base["plain"][0])
    got, got_plain = list(treated[name][0]), list(treated["plain"][0])
    if with_it == plain:
        return ParameterFate(
            name=name, fate="not_visible", reason="it changes nothing without speculation either", n=len(got)
        )
    place = first_difference(with_it, got)
    if place is not None and plain != got_plain:
        reason = "the answers without the penalty differ already: its part in the difference cannot be told"
        return ParameterFate(name=name, fate="not_visible", reason=reason, n=len(got))
    if place is None:
        return ParameterFate(
            name=name, fate="honoured", reason="the answer is the untreated server's, penalised", n=len(got)
        )
    if got == got_plain:
        return ParameterFate(name=name, fate="ignored", reason="the answer is the one without the penalty", n=len(got))
    words = f"the answer leaves the untreated server's penalised one at token {place}: applied late or otherwise"
    return ParameterFate(name=name, fate="applied_otherwise", reason=words, n=len(got))


def repeated_share(ids: Ids) -> float | None:
    """Share of tokens that occurred before in the same answer (a penalty should lower it); None for no tokens."""
    return 1 - len(Counter(ids)) / len(ids) if ids else None
