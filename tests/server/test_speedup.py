"""Verdicts of the paired design: planted gains, planted nothing, power, crossover, prediction; all from fixed seeds."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from lib.records import OUTCOMES, Measured
from lib.server.speedup import (
    WORDS,
    compare_launches,
    crossover,
    launches_needed,
    predicted_ratio,
    schedule,
    step_cost,
)

SEEDS = range(20)


def words(gain: float, spread: float, launches: int = 2, drift: float = 0.0, prompts: int = 16) -> Counter[str]:
    """Verdict words of 20 simulated experiments: launches in the notebook's order, a drift per launch, prompts that differ."""
    found: Counter[str] = Counter()
    for seed in SEEDS:
        dice = np.random.default_rng(seed)
        rates: dict[bool, list[float]] = {False: [], True: []}
        for place, treated in enumerate(schedule(launches)):
            effect = gain if treated else 0.0
            rates[treated].append(100 * (1 + effect) * math.exp(dice.normal(0, spread) + drift * place))
        logs = dice.normal(math.log1p(gain), 0.01, prompts)
        found[compare_launches(rates[False], rates[True], 0.05, list(logs)).word] += 1
    return found


def test_a_planted_gain_of_ten_percent_is_found() -> None:
    """Launches that differ by 0.5%: ten percent is found in each of 20 experiments; at 1% in at least 16, never as a cost."""
    assert words(0.10, 0.005) == {"pays": 20}
    at_one = words(0.10, 0.01)
    assert at_one["pays"] >= 16 and not at_one["costs"] and not at_one["no_difference"]


def test_a_planted_loss_is_found() -> None:
    """Fifteen percent slower is a cost."""
    assert words(-0.15, 0.005) == {"costs": 20}


def test_nothing_planted_is_no_difference_or_inconclusive() -> None:
    """No gain: at 0.5% mostly 'no difference within 5%'; at 3% inconclusive; a false 'pays' or 'costs' in at most 2 of 20."""
    quiet = words(0.0, 0.005)
    assert quiet["no_difference"] >= 15
    for spread in (0.005, 0.01, 0.03):
        found = words(0.0, spread)
        assert found["pays"] + found["costs"] <= 2, (spread, found)
    assert words(0.0, 0.03)["inconclusive"] >= 15


def test_false_alarms_are_as_rare_as_the_interval_says() -> None:
    """Over 400 experiments without a gain the 95% interval misses 1 in 2% to 8% of them (the prompts' part only widens it)."""
    missed = 0
    for seed in range(400):
        dice = np.random.default_rng(1000 + seed)
        a, b = (100 * np.exp(dice.normal(0, 0.02, 2)) for _ in range(2))
        ratio = compare_launches(list(a), list(b), 0.05).ratio
        missed += not (ratio.low <= 1 <= ratio.high)  # type: ignore[operator]
    assert 8 <= missed <= 32


def test_a_drift_over_the_launches_cancels() -> None:
    """A machine that gets 2% slower with each launch: A B B A shows no gain where none is; A A B B would show 4%."""
    ratios = []
    for order in (schedule(2), [False, False, True, True]):
        rates: dict[bool, list[float]] = {False: [], True: []}
        for place, treated in enumerate(order):
            rates[treated].append(100 * math.exp(-0.02 * place))
        ratios.append(compare_launches(rates[False], rates[True], 0.05).ratio.value)
    assert ratios[0] == pytest.approx(1.0) and ratios[1] == pytest.approx(math.exp(-0.04))


def test_the_stated_power_is_what_experiments_have() -> None:
    """The difference that an experiment says it would find in 80% is found in 70% to 90% of 300 such experiments."""
    spread = 0.01
    detectable = math.log1p(0.0) + spread * _factor(2)
    hits = 0
    for seed in range(300):
        dice = np.random.default_rng(5000 + seed)
        a = 100 * np.exp(dice.normal(0, spread, 2))
        b = 100 * np.exp(dice.normal(detectable, spread, 2))
        hits += (compare_launches(list(a), list(b), 0.0001).ratio.low or 0) > 1
    assert 0.70 <= hits / 300 <= 0.90


def _factor(degrees: int) -> float:
    from lib.server import speedup

    return speedup._power_factor(degrees) * math.sqrt(2 / 2)


def test_more_launches_are_asked_for_where_they_help() -> None:
    """1% between launches: 3 of each arm for 5%; 3%: more; where prompts alone hide 5%, no number of launches helps."""
    assert launches_needed(0.01, 0.05) == 3
    assert (launches_needed(0.03, 0.05) or 99) > 5
    assert launches_needed(0.01, 0.05, prompts_log=0.06) is None


def test_one_launch_of_each_arm_is_no_verdict() -> None:
    """Twice as fast with one launch each: a ratio, no interval, inconclusive; none at all: no ratio."""
    one = compare_launches([100.0], [200.0], 0.05)
    assert one.word == "inconclusive" and one.ratio.value == pytest.approx(2) and one.ratio.low is None
    assert compare_launches([], [200.0], 0.05).ratio.value is None


def test_prompts_that_differ_widen_the_interval() -> None:
    """The same launches; prompts whose gains range from half to double make it inconclusive, and the reason says so."""
    same = compare_launches([100.0, 100.5], [115.0, 115.5], 0.05, [0.14] * 8)
    wide = compare_launches([100.0, 100.5], [115.0, 115.5], 0.05, [-0.7, 0.98, -0.6, 0.88])
    assert same.word == "pays" and wide.word == "inconclusive" and "between prompts" in wide.reason


def test_every_word_leads_to_a_known_outcome() -> None:
    """Pays is a pass, costs and no difference are a no, the rest no verdict."""
    assert {w: OUTCOMES[o].value for w, o in WORDS.items()} == {
        "pays": "pass", "costs": "fail", "no_difference": "fail", "inconclusive": "inconclusive", "invalid": "invalid",
    }  # fmt: skip


def at(value: float, half: float | None = 0.05) -> Measured:
    if half is None:
        return Measured(value=value, n=2, reason="one launch")
    return Measured(value=value, n=4, low=value - half, high=value + half)


def test_the_crossover_is_interpolated_in_log_c() -> None:
    """1.2 at 1, 1/1.2 at 4: half way in the logarithm, C = 2; its interval lies around it."""
    found = crossover("code", {1: at(1.2), 4: at(1 / 1.2)})
    assert found.at.value == pytest.approx(2.0) and found.bracketed
    assert found.at.low is not None and found.at.high is not None and 1 < found.at.low < 2 < found.at.high < 4


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        ({1: at(1.3), 8: at(1.1)}, "stays above 1 up to C=8"),
        ({1: at(0.9), 8: at(0.5)}, "does not pay at C=1"),
        ({1: at(0.9), 8: at(1.5)}, "yet it pays at C=8"),
        ({4: at(1.3)}, "1 level(s)"),
        ({}, "0 level(s)"),
    ],
)
def test_a_crossover_outside_what_was_measured_is_not_invented(ratios: dict[int, Measured], words: str) -> None:
    """Never extrapolated: the reason says on which side it lies."""
    found = crossover("code", ratios)
    assert found.at.value is None and not found.bracketed and words in found.reason


def test_a_crossover_with_open_ends_says_so() -> None:
    """Interval 0.95 to 1.25 at C=1 contains 1: no lower end; levels without intervals bound nothing."""
    found = crossover("code", {1: at(1.1, 0.15), 16: at(0.5)})
    assert found.at.value is not None and not found.bracketed and "below C=1" in found.reason
    loose = crossover("code", {1: at(1.2, None), 4: at(0.8, None)})
    assert loose.at.value is not None and loose.at.low is None and "at least twice" in loose.reason


def test_the_model_on_the_recorded_run() -> None:
    """Recorded: 2.016 ms a token without, 5.555 ms with at 1.652 tokens a step: 4.55 decode steps a step, so 0.363."""
    cost = step_cost(0.5162 / 256, 1.4220 / 256, 256 / 155)
    assert cost == pytest.approx(4.55, abs=0.01) and predicted_ratio(256 / 155, cost) == pytest.approx(0.363, abs=1e-3)
    assert predicted_ratio(4.0, 1.2, 0.8) == pytest.approx(2.0)


def test_the_order_of_launches_alternates() -> None:
    """Two of each arm: without, with, with, without."""
    assert schedule(2) == [False, True, True, False] and schedule(1) == [False, True]
    assert sum(schedule(5)) == 5 and len(schedule(5)) == 10
