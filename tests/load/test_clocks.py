"""Offsets by round trips: what is certain, what is not, and what is refused."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.errors import NotMeasured
from lib.load.clocks import Alignment, Exchange, Offset, offset_of, skew_bound_ns


def test_the_worked_example() -> None:
    """Each exchange allows an interval; both allow 1,000,000 to 1,000,012."""
    # first: [1000030 - 30, 1000030 - 10] = [1000000, 1000020]; second: [1000050 - 60, 1000050 - 38] = [999990, 1000012]
    found = offset_of([Exchange(10, 1_000_030, 30), Exchange(38, 1_000_050, 60)])
    assert (found.offset_ns, found.bound_ns, found.exchanges) == (1_000_006, 6, 2)


@given(
    st.integers(-(10**15), 10**15),
    st.lists(st.tuples(st.integers(1, 10**7), st.integers(1, 10**7)), min_size=1, max_size=50),
)
def test_the_true_offset_lies_within_the_bound(true: int, trips: list[tuple[int, int]]) -> None:
    """Whatever the two ways took, however unlike they were."""
    now, exchanges = 0, []
    for there, back in trips:
        exchanges.append(Exchange(now, now + there + true, now + there + back))
        now += there + back + 1000
    found = offset_of(exchanges)
    assert abs(found.offset_ns - true) <= found.bound_ns
    assert found.bound_ns <= min(there + back for there, back in trips) / 2


def test_a_clock_that_was_set_between_exchanges_is_refused() -> None:
    """Intervals without a common offset; and no exchange at all."""
    with pytest.raises(NotMeasured, match="agree"):
        offset_of([Exchange(0, 100, 10), Exchange(20, 5_000_120, 30)])
    with pytest.raises(NotMeasured):
        offset_of([])


def test_an_even_drift_is_taken_out() -> None:
    """A clock that runs 50 millionths fast: times in the middle of a minute are told within the bound."""
    generator = random.Random(1)

    def there(here: int) -> int:
        return round(7e9 + here * (1 + 50e-6))

    def look(at: int) -> Offset:
        made = []
        for number in range(100):
            sent = at + number * 200_000
            middle, end = sent + generator.randrange(20_000, 90_000), sent + 100_000
            made.append(Exchange(sent, there(middle), end))
        return offset_of(made)

    alignment = Alignment(look(0), look(60_000_000_000))
    # 50 ppm over the 20 ms of a look are 1,000 ns, which the intervals of one look may add to either side
    assert alignment.drift_ppm == pytest.approx(50, abs=2)
    assert abs(alignment.here_ns(there(30_000_000_000)) - 30_000_000_000) < alignment.bound_ns + 1_000
    assert Alignment(look(0), look(0)).drift_ppm == 0.0


def test_the_skew_of_a_merged_window_is_that_of_its_worst_pair() -> None:
    """3, 5 and 1 microseconds: 8; one machine: 0."""
    made = [Alignment(Offset(0, 0, b, 1), Offset(1, 0, b / 2, 1)) for b in (3_000, 5_000, 1_000)]
    assert skew_bound_ns(made) == 8_000 and skew_bound_ns(made[:1]) == 0
