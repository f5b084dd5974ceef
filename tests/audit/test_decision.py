"""'We can afford it' and 'it is worth it' are two claims: each with its own numbers, and neither decides the other."""

from __future__ import annotations

import pytest

from lib.audit.decision import Ratio, judge_affordable, judge_worth, throughput, throughput_ratio
from lib.records import Measured

EQUAL = Ratio(value=1.0, low=0.97, high=1.03, reason="measured")
SLOW = Ratio(value=0.5, low=0.45, high=0.55, reason="measured")
UNSURE = Ratio(value=0.9, low=0.7, high=1.1, reason="measured")
NONE = Ratio(value=None, reason="not measured")


@pytest.mark.parametrize(
    ("tokens", "capped", "ratio", "outcome"),
    [
        (9000, False, EQUAL, "within_limit"),
        (9000, False, SLOW, "outside_limit"),
        (9000, False, UNSURE, "not_enough_data"),
        (9000, False, NONE, "within_limit"),
        (9000, True, EQUAL, "within_limit"),
        (7000, False, EQUAL, "outside_limit"),
        (7000, True, EQUAL, "not_enough_data"),
    ],
)
def test_affordable_needs_room_and_speed(tokens: int, capped: bool, ratio: Ratio, outcome: str) -> None:
    """8,192 tokens needed, 10% of throughput accepted; a cap below what is needed says nothing about memory."""
    found, reason = judge_affordable(tokens, capped, 8192, ratio, 0.1, "")
    assert found == outcome and "8,192" in reason


@pytest.mark.parametrize(
    ("loss", "tasks", "outcome"),
    [
        ("outside_limit", None, "within_limit"),
        ("within_limit", "lost", "within_limit"),
        ("within_limit", "none_seen", "outside_limit"),
        ("within_limit", None, "outside_limit"),
        ("not_enough_data", "none_seen", "not_enough_data"),
    ],
)
def test_worth_is_what_the_cheaper_arm_loses(loss: str, tasks: str | None, outcome: str) -> None:
    """A loss beyond the limit or lost items make the precise arm worth it; a small loss makes it not worth it."""
    measured = Measured(value=-0.02, low=-0.03, high=-0.01)
    found, reason = judge_worth((loss, measured), tasks, 0.01)
    assert found == outcome and "-0.0200 nat/token" in reason


def test_ratio_keeps_what_both_intervals_leave_open() -> None:
    """95 [90, 100] against 100 [95, 105]: 0.95 [90/105, 100/95]; without a figure it is unknown with a reason."""
    one, other = Measured(value=95.0, low=90.0, high=100.0), Measured(value=100.0, low=95.0, high=105.0)
    found = throughput_ratio(one, other)
    assert (found.value, found.low, found.high) == (0.95, pytest.approx(90 / 105), pytest.approx(100 / 95))
    assert throughput_ratio(throughput(None), other).value is None
