"""Was speculation on? Recorded servers, and servers that lie."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lib.params import ROOT
from lib.server.acceptance import pooled, spec_counts
from lib.server.log import read_log
from lib.server.log_records import ServerLog
from lib.server.spec_trace import LaunchTrace, lossy_thresholds, simulated_acceptance, trace

RECORDED = ROOT / "tests/recorded/h200-sglang-0.5.16"


def log_of(name: str) -> ServerLog:
    with (RECORDED / f"{name}.log").open("rb") as lines:
        return read_log(lines)


def counts_of(arm: str, **changes: Any) -> Any:
    answers = json.loads((RECORDED / f"m1_{arm}.random_ids_c1.generate.json").read_text())
    return pooled([spec_counts({**a["meta_info"], **changes}) for a in answers], 3)


def info_of(arm: str) -> dict[str, Any] | None:
    file = RECORDED / f"m1_{arm}.server_info.json"
    return dict(json.loads(file.read_text())) if file.exists() else None


def one(arm: str, treated: bool, counts: Any = None, **changes: Any) -> LaunchTrace:
    given: dict[str, Any] = {"log": log_of(f"m1_{arm}"), "info": info_of(arm), **changes}
    return trace("L1", treated, counts or counts_of(arm), **given)


def test_the_recorded_arms_are_what_they_say() -> None:
    """m1_nextn: EAGLE, draft weights and pool in its log, 155 steps; m1_base: none of these."""
    on = one("nextn", True)
    assert on.ok and on.algorithm == "EAGLE" and on.draft_weights and on.draft_pool and on.verify_steps == 155
    assert on.max_running == 48 and on.draft_weights_line and on.draft_pool_line
    off = one("base", False)
    assert off.ok and off.algorithm is None and off.draft_weights is False and off.verify_steps == 0


def test_a_treated_launch_that_is_the_base_server_is_invalid() -> None:
    """The origin's doubt: the old server answered. No steps, no algorithm."""
    found = one("base", True)
    assert any("no verification step" in p for p in found.problems) and any(
        "no speculative" in p for p in found.problems
    )


def test_an_untreated_launch_that_speculates_is_invalid() -> None:
    """Steps, an algorithm and a draft in the arm without speculation, each named."""
    assert len(one("nextn", False).problems) == 3


def test_steps_without_a_draft_in_the_log_are_a_contradiction() -> None:
    """Counts from a speculating server, the log of another one."""
    found = one("nextn", True, log=log_of("m1_base"))
    assert any("no draft weights and no draft pool" in p for p in found.problems)
    assert one("nextn", True, log=None).ok and one("nextn", True, log=None).notes


def test_impossible_counts_and_partly_speculated_launches_are_invalid() -> None:
    """256 tokens in 9 steps; a request of 256 tokens without steps among others."""
    assert any("impossible" in p for p in one("nextn", True, counts_of("nextn", spec_verify_ct=9)).problems)
    plain = {"completion_tokens": 256}
    mixed = pooled([spec_counts(plain), spec_counts({**plain, "spec_verify_ct": 155})])
    assert any("1 of 2 requests" in p for p in one("nextn", True, mixed).problems)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"environment": {"SGLANG_SIMULATE_ACC_LEN": "3"}}, "environment"),
        ({"end": {"env": {"SGLANG_SIMULATE_ACC_LEN": "2.5"}}}, "/server_info"),
        ({"argv": ["env", "SGLANG_SIMULATE_ACC_LEN=4", "python"]}, "SIMULATE"),
    ],
)
def test_simulated_acceptance_is_synthetic(changes: dict[str, Any], where: str) -> None:
    """Wherever it shows: the launch's environment, the server's own words, the command line."""
    found = one("nextn", True, **changes)
    assert found.synthetic and where in found.synthetic and any("synthetic" in p for p in found.problems)


def test_simulation_that_is_off_is_not_reported() -> None:
    """-1 (the default), 0 and absence are off."""
    assert simulated_acceptance({"SGLANG_SIMULATE_ACC_LEN": "-1"}) is None
    assert simulated_acceptance({"SGLANG_SIMULATE_ACC_LEN": "0"}, {"a": "SGLANG_SIMULATE_ACC_LEN=0"}) is None
    assert simulated_acceptance({}) is None


def test_thresholds_below_one_are_lossy_wherever_they_stand() -> None:
    """Asked, resolved, or changed while it ran (the end of the arm); 1.0 is exact."""
    assert lossy_thresholds({"speculative_accept_threshold_acc": 1.0}, info_of("nextn")) is None
    end = {"internal_states": [{"speculative_accept_threshold_single": 0.9}]}
    found = one("nextn", True, end=end)
    assert found.lossy == "internal_states[0].speculative_accept_threshold_single = 0.9" and found.ok
    assert any("lossy" in n for n in found.notes)
    assert one("nextn", True, flags={"speculative_accept_threshold_acc": 0.5}).lossy


def test_a_draft_with_random_weights_is_invalid() -> None:
    """speculative_draft_load_format dummy: what it accepts is chance."""
    assert not one("nextn", True, flags={"speculative_draft_load_format": "dummy"}).ok
