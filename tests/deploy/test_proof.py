"""Claims and reports without a host: what passes, fails or stays unknown, and how a rollout reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lib.cli.deploy import _overrides, hand_text, plan_text, proof_text
from lib.deploy.deployed import claim_rows, deployment_state, plan_rows, served_proof, step_rows, steps_text, stop_rows
from lib.deploy.deployment import DeployPlan, DeployReport, Objection, PlanReport, Refused, Step, check_plan
from lib.deploy.proof import Claim, Expectation, Proof, _from_info, _gpu_memory, _throughput, served_facts
from lib.deploy.stopping import Rung, Seen, StopReport
from lib.errors import BadInput, ServerError
from lib.hosts.view import HostGpu
from lib.records import Measured
from lib.server.log import read_log
from tests.deploy.test_stopping import SERVER, process, view

UNIT = "[Service]\nType=exec\nExecStart=/usr/bin/true --x\nUser=nobody\n[Install]\nWantedBy=multi-user.target\n"


@pytest.mark.parametrize(
    ("value", "low", "high", "status"),
    [(100.0, 95.0, 105.0, "pass"), (91.0, 80.0, 102.0, "pass"), (80.0, 75.0, 85.0, "fail"), (85.0, 80.0, 95.0, "unknown"),
     (130.0, 120.0, 140.0, "unknown"), (80.0, None, None, "fail"), (88.0, 87.0, 89.0, "unknown"), (84.0, 83.0, 85.4, "fail")],
)  # fmt: skip
def test_the_short_benchmark_fails_only_where_it_is_slower_for_sure(
    tmp_path: Path, value: float, low: float | None, high: float | None, status: str
) -> None:
    """Inside 90 to 110 passes; all below by more than two launches differ (85.5) fails; across, just below, and faster is
    unknown and rolls nothing back."""
    claim = _throughput(lambda _: Measured(value=value, unit="tok/s", n=4, low=low, high=high, reason="x"), tmp_path, (90.0, 110.0))
    assert claim.status == status


def test_a_benchmark_that_cannot_be_made_is_unknown(tmp_path: Path) -> None:
    """No value, or an error: said, never a pass."""

    def fails(_: Path) -> Measured:
        raise ServerError("x", "no client there")

    claim = _throughput(fails, tmp_path, (1.0, 2.0))
    assert claim.status == "unknown" and "no client there" in claim.found
    assert _throughput(lambda _: Measured(value=None, reason="no request succeeded"), tmp_path, (1.0, 2.0)).status == "unknown"


@pytest.mark.parametrize(
    ("info", "status"), [({"tp_size": 2}, "pass"), ({"tp_size": 1}, "fail"), ({"other": 1}, "unknown")]
)
def test_flags_that_nobody_repeats_are_unknown(info: dict[str, Any], status: str) -> None:
    """Compared nothing is not a pass."""
    claims = _from_info(info, Expectation(port=1, flags={"tp_size": 2}))
    assert [c.status for c in claims if c.id == "flags"] == [status]


@pytest.mark.parametrize(("expected", "status"), [(1000.0, "pass"), (900.0, "fail"), (None, "unknown")])
def test_gpu_memory_is_within_five_percent(expected: float | None, status: str) -> None:
    """The unit's processes alone are counted; a stranger's megabytes are not."""
    gpu = HostGpu(index=0, name="G", uuid="u", memory_total_mib=2000.0, memory_used_mib=1500.0, driver_version="1", compute_cap="9.0",
                  users={10: 1010.0, 99: 490.0})  # fmt: skip
    found = view([process(10, SERVER, unit="s.service"), process(99, ["python3"])], gpus=[gpu])
    assert _gpu_memory(found, "s.service", Expectation(port=1, gpu_memory_mib=expected), {}).status == status


def test_what_serves_is_kept_without_what_changes() -> None:
    """Arguments that last, never a port, seed or throughput of the moment."""
    info = {"version": "1", "tp_size": 2, "port": 1, "random_seed": 3, "internal_states": [{}], "x": {"a": 1}}
    facts = served_facts(read_log([b""]), info)
    assert facts["arguments"] == {"tp_size": 2} and facts["version"] == "1" and facts["kv_cache_dtype"] is None


def claim(key: str, status: str) -> Claim:
    return Claim(id=key, claim=f"{key} holds", status=status, expected="e", found="f", evidence="journal.log", line=3)


def rolled(outcome: str) -> DeployReport:
    """A rollout with everything in it."""
    proof = Proof(host="h", unit="s.service", invocation="i", at=1.0, claims=[claim("kv-dtype", "pass"), claim("gpu-memory", "unknown")])
    seen = Seen(pid=7, ticks=1, uid=0, state="S", argv="python3 notebook", unit="web.service", why="holds 1 GPU(s)")
    stop = StopReport(
        host="h", unit="s.service", port=1, state="stopped", seconds=1.0, bystanders=[seen],
        rungs=[Rung(name="drain", did="systemctl stop", seconds=1.0, outcome="nothing of it is left")], port_free=True, gpu_reason="no GPU",
    )  # fmt: skip
    return DeployReport(
        host="h", unit="s.service", id="p1", outcome=outcome, reason="because", steps=[Step(name="put", seconds=1.0, outcome="written")],
        stop=stop, proof=proof, way_back_proof=None, overrides={"capacity": "a test"},
    )  # fmt: skip


@pytest.mark.parametrize("outcome", ["proven", "rolled_back", "undone", "failed_and_not_rolled_back"])
def test_a_rollout_reads_as_what_it_is(outcome: str) -> None:
    """Steps, rungs, bystander and claims are there; only a proven one has its claims in state.md."""
    report = rolled(outcome)
    text, state = steps_text(report), deployment_state(report, "Serve.")
    assert outcome.replace("_", " ").upper() in text and "rung: drain" in text and "web.service" not in state
    assert ("kv-dtype holds" in state) == (outcome == "proven") and "overridden: a test" in state
    assert claim_rows(served_proof(report)[0]) or outcome != "proven"
    assert step_rows(report) and "holds 1 GPU" in str(stop_rows(report)) and step_rows(None) == stop_rows(None) == []


def test_a_plan_reads_as_what_it_is() -> None:
    """Objections with what became of them, what is never touched, commands for a person."""
    plan = PlanReport(
        host="h", unit="s.service", id="p", diff="+a", unit_new=True, dropins=["/etc/d.conf"], now="inactive", runs=[], gpus=[],
        gpus_reason="no GPU", bystanders=[{"pid": 7, "why": "listens on port 1", "argv": "web"}], port_held_by=None,
        needs_root=["x"], can_root="a password is required",
        unfinished=None, proven=None, objections=[Objection(name="capacity", reason="too long"), Objection(name=None, reason="no account")],
        refused=[Objection(name=None, reason="no account")], overrides={"capacity": "known"}, by_hand=["systemctl daemon-reload"],
        containers=[{"id": "a" * 64, "name": "old", "digests": ["r@sha256:1"], "log": ["docker", "logs", "a"]}],
    )  # fmt: skip
    text = plan_text(plan)
    wanted = ("too long [overridden: known]", "no account [REFUSES]", "pid 7", "systemctl daemon-reload", "docker logs a", "r@sha256:1")
    for words in wanted:
        assert words in text, words
    assert {r["what"]: r["value"] for r in plan_rows(plan)}["refused"] == "yes"
    assert "NOT PROVEN" in proof_text(Proof(host="h", unit="s", invocation=None, at=1.0, claims=[claim("running", "fail")]))


def test_overrides_need_a_name_and_a_reason() -> None:
    """`NAME=REASON`; a reason may hold another `=`."""
    assert _overrides(["capacity=x = y"]) == {"capacity": "x = y"}
    for bad in ("capacity", "capacity=", "=x", "capacity= "):
        with pytest.raises(BadInput, match="NAME=REASON"):
            _overrides([bad])


def test_a_plan_that_may_not_be_carried_out_is_refused_with_exit_code_1() -> None:
    """And without root a person gets the unit and the commands."""
    plan = DeployPlan(service="s", unit_text=UNIT, expectation=Expectation(port=1), objections=[Objection(name="audit-KV1", reason="bad")],
                      key_file="/etc/s.key.yaml", key_reader="nobody")  # fmt: skip
    with pytest.raises(Refused, match="override: audit-KV1") as error:
        check_plan(plan)
    assert error.value.exit_code == 1
    text = hand_text(plan, "a password is required")
    assert UNIT in text and "install -m 0640" in text and "systemctl enable --now s.service" in text
