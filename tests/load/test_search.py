"""Brackets: the highest load that meets an SLO, and the knee, from measured intervals."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lib.errors import BadInput
from lib.load import search, stats
from lib.load.search import Point, Probe
from lib.records import Measured

NONE = Measured(value=None, reason="not needed here")


def probe(load: float, share: float, n: int = 400) -> Probe:
    found = stats.share_interval(round(share * n), n)
    good = Measured(value=found.value, n=found.n, low=found.low, high=found.high)
    status, reason = search.status_of(good, 0.95)
    return Probe(load=load, status=status, good_frac=good, goodput_requests_per_s=NONE, output_tokens_per_s=NONE, reason=reason)


def cliff(at: float, seen: list[float]) -> Callable[[float], Probe]:
    def measure(load: float) -> Probe:
        seen.append(load)
        return probe(load, 1.0 if load <= at else 0.5)

    return measure


@pytest.mark.parametrize("at", [1, 5, 23, 24, 63])
def test_the_bracket_encloses_the_truth(at: int) -> None:
    """A server that is good up to C and bad above it: low <= C < high, within a tenth or one step."""
    seen: list[float] = []
    found = search.highest_load(cliff(at, seen), 4, most=64)
    assert found.low is not None and found.high is not None
    assert found.low <= at < found.high and found.high - found.low <= max(1, 0.1 * found.low)
    assert len(seen) == len(set(seen)) == len(found.probes) <= 12 and "failed" in found.reason


def test_ends_that_are_not_found() -> None:
    """Good at the highest load, or bad at the lowest: one end is None and the reason says which."""
    top = search.highest_load(cliff(1000, []), 4, most=64)
    assert (top.low, top.high) == (64, None) and "still passed" in top.reason
    bottom = search.highest_load(cliff(0, []), 4, most=64)
    assert (bottom.low, bottom.high) == (None, 1) and "even 1" in bottom.reason


def test_rates_are_searched_by_halves() -> None:
    """An open loop's rate is no whole number: the bracket is a tenth wide."""
    found = search.highest_load(cliff(3.3, []), 1.0, most=100.0, whole=False)
    assert found.low is not None and found.high is not None
    assert found.low <= 3.3 < found.high <= found.low * 1.1


def test_too_few_requests_are_undecided_and_do_not_pass() -> None:
    """20 of 20 good cannot show 0.95 (Wilson's lower end is 0.839): undecided, and the reason says what to do."""
    found = search.highest_load(lambda load: probe(load, 1.0, 20), 4, most=64)
    assert found.low is None and "undecided" in found.reason and "more requests" in found.reason
    assert all(p.status == "undecided" for p in found.probes)


def test_a_spoilt_measurement_stops_the_search() -> None:
    """The client was the bottleneck: no answer is built on it."""
    bad = probe(1, 1.0).model_copy(update={"status": "invalid", "reason": "client_bound: lag"})
    found = search.highest_load(lambda load: bad.model_copy(update={"load": load}), 4, most=64)
    assert found.low is None and "client_bound" in found.reason and len(found.probes) == 1


@pytest.mark.parametrize("how", [{"start": 0}, {"start": 9, "most": 8}, {"start": 1, "within": 0}, {"start": 1, "max_probes": 0}])
def test_impossible_searches(how: dict[str, float]) -> None:
    """No load, a start above the end, no width, no measurement."""
    with pytest.raises(BadInput):
        search.highest_load(cliff(1, []), **({"most": 8} | how))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("share", "n", "expected"),
    [(1.0, 400, "pass"), (0.5, 400, "fail"), (0.95, 400, "undecided"), (0.0, 400, "fail"), (1.0, 10, "undecided")],
)
def test_status_of_a_share(share: float, n: int, expected: str) -> None:
    """The interval, not the point, is compared with the limit."""
    assert probe(1, share, n).status == expected


def test_no_share_is_invalid() -> None:
    """Nothing was sent, or the client was the bottleneck."""
    assert search.status_of(Measured(value=None, reason="nothing was sent"), 0.9) == ("invalid", "nothing was sent")


def points(powers: list[float], width: float = 0.02) -> list[Point]:
    return [
        Point(
            2.0**i,
            Measured(value=p, low=p * (1 - width), high=p * (1 + width), n=9),
            Measured(value=1.0, low=1 - width, high=1 + width, n=9),
        )
        for i, p in enumerate(powers)
    ]


def test_the_knee_is_between_the_neighbours_of_what_cannot_be_told_apart() -> None:
    """Power 10, 18, 25, 24, 12 at 1 to 16: 4 and 8 overlap, so the knee lies between 2 and 16."""
    found = search.knee(points([10, 18, 25, 24, 12]))
    assert (found.low, found.high) == (2, 16) and "4 to 8" in found.reason
    sharp = search.knee(points([10, 18, 25, 15, 12], 0.001))
    assert (sharp.low, sharp.high) == (2, 8)


def test_a_knee_at_an_end_is_open_there() -> None:
    """Power that still grows at the last level: no upper end, and the reason says so."""
    found = search.knee(points([10, 20, 40], 0.001))
    assert (found.low, found.high) == (2, None) and "above the highest" in found.reason


def test_no_knee_from_two_levels_or_without_intervals() -> None:
    """Three levels with both figures are needed; what is missing is said."""
    assert search.knee(points([1, 2])).low is None
    bare = [Point(p.load, Measured(value=1.0), p.e2e_s) for p in points([1, 2, 3])]
    assert "needs at least 3" in search.knee(bare).reason


def test_share_intervals() -> None:
    """10 of 10 has Wilson's lower end 0.722, none of 10 its mirror, nothing of nothing a reason."""
    full, none = stats.share_interval(10, 10), stats.share_interval(0, 10)
    assert full.low == pytest.approx(0.7225, abs=1e-3) and full.high == 1.0
    assert none.high == pytest.approx(1 - 0.7225, abs=1e-3) and none.low == 0.0
    assert stats.share_interval(0, 0).value is None
    with pytest.raises(BadInput):
        stats.share_interval(3, 2)


@pytest.mark.parametrize("knee_at", [3, 12, 40])
def test_the_knees_search_encloses_it(knee_at: int) -> None:
    """Throughput linear up to the knee and flat above, latency flat up to it and growing above: power peaks there."""
    seen: list[float] = []

    def measure(load: float) -> Point:
        seen.append(load)
        rate, time = min(load, knee_at) * 10.0, max(1.0, load / knee_at)
        ends = {"low": 0.99, "high": 1.01}
        return Point(
            load,
            Measured(value=rate, n=9, **{k: rate * x for k, x in ends.items()}),
            Measured(value=time, n=9, **{k: time * x for k, x in ends.items()}),
        )

    found = search.find_knee(measure, 1, most=128)
    assert found.low is not None and found.high is not None and found.low <= knee_at <= found.high
    assert found.high / found.low < 3 and len(seen) == len(set(seen)) <= 12


def test_a_knee_that_is_not_reached() -> None:
    """Power still grows at the highest load asked for: no upper end."""
    found = search.find_knee(lambda load: Point(load, *_figures(load)), 1, most=16)
    assert found.high is None and "above the highest" in found.reason


def _figures(load: float) -> tuple[Measured, Measured]:
    return Measured(value=load, low=load * 0.99, high=load * 1.01, n=9), Measured(value=1.0, low=0.99, high=1.01, n=9)
