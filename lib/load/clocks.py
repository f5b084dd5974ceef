"""How far another machine's clock is from this one, by round-trip exchanges, and how sure that is. Numbers in, numbers out.

One exchange: this clock is read, the other machine reads its own, this clock is read again. The other reading was taken
somewhere between, so (there - here) lies in [there - received, there - sent], whatever the two ways took. The intersection
of many such intervals is the offset with a bound that needs no assumption about symmetry; NTP takes the middle of the
shortest one (RFC 5905), which the same idea gives for a single exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from lib.errors import NotMeasured


@dataclass(frozen=True, slots=True)
class Exchange:
    """One round trip, in nanoseconds: sent and received by this clock, `there` by the other."""

    sent_ns: int
    there_ns: int
    received_ns: int


@dataclass(frozen=True, slots=True)
class Offset:
    """The other clock minus this one at a time of this clock: `offset_ns`, certainly within plus or minus `bound_ns`."""

    at_ns: int
    offset_ns: float
    bound_ns: float
    exchanges: int


def offset_of(exchanges: Sequence[Exchange]) -> Offset:
    """The offset that all exchanges agree in.

    Raises:
        NotMeasured: there are none, or they contradict each other (a clock was set, or ran away, between them).

    Example: there 1,000,030 between 10 and 30 here, and 1,000,050 between 38 and 60: between 1,000,000 and 1,000,012 by
    both, so 1,000,006 within 6 ns.
    """
    if not exchanges:
        raise NotMeasured("exchanges with the other clock", "none")
    low = max(x.there_ns - x.received_ns for x in exchanges)
    high = min(x.there_ns - x.sent_ns for x in exchanges)
    if low > high:
        raise NotMeasured(
            "exchanges with the other clock that agree",
            f"they differ by {(low - high) / 1e6:.3f} ms more than their trips took",
        )
    first, last = exchanges[0].sent_ns, exchanges[-1].received_ns
    return Offset((first + last) // 2, (low + high) / 2, (high - low) / 2, len(exchanges))


@dataclass(frozen=True, slots=True)
class Alignment:
    """Another machine's clock over a window: its offset before and after, and evenly between them."""

    before: Offset
    after: Offset

    @property
    def drift_ppm(self) -> float:
        """How much faster the other clock runs, in millionths; 0 where no time lies between."""
        span = self.after.at_ns - self.before.at_ns
        return 1e6 * (self.after.offset_ns - self.before.offset_ns) / span if span > 0 else 0.0

    @property
    def bound_ns(self) -> float:
        """How far a time of that machine, as told by this clock, can be off; holds for a drift that is even between."""
        return max(self.before.bound_ns, self.after.bound_ns)

    def here_ns(self, there_ns: int) -> int:
        """A time of the other clock as this one would have shown it."""
        guess = there_ns - self.before.offset_ns
        moved = self.drift_ppm / 1e6 * (guess - self.before.at_ns)
        return round(guess - moved)

    def there_ns(self, here_ns: int) -> int:
        """A time of this clock as the other one would show it, before any drift is known."""
        return round(here_ns + self.before.offset_ns)


def skew_bound_ns(alignments: Iterable[Alignment]) -> float:
    """How far apart two machines' times can be of which the merged record says that they are the same: the worst pair.

    Example: bounds of 3, 5 and 1 microseconds: 8 microseconds. A single machine has none: 0.
    """
    bounds = [a.bound_ns for a in alignments]
    return max((a + b for a, b in combinations(bounds, 2)), default=0.0)
