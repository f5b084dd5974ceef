"""Notebook 06 on the profile's host: the plan, the rollout where the parameters ask for it, and what both say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lib.deploy import deployed
from lib.deploy.deployment import DeployReport, PlanReport, Refused
from lib.deploy.planning import Prepared, place_for, prepare
from lib.deploy.service import require_systemd
from lib.errors import BadInput, HostError
from lib.hosts import local
from lib.params import DeployParams, load_profile
from lib.records import Evidence, Status, Verdict
from lib.results import Measurement, NotebookRun, ServerHandle
from lib.server.launch import LaunchRecord


def _prepared(run_folder: Path, params: DeployParams) -> Prepared:
    """The plan for this run; what its notebooks measured is what must be shown, where any measured before 06."""
    measured = any((run_folder / f"{number}.result.json").exists() for number in ("03", "01"))
    return prepare(params.profile, run_folder if measured else None, notebook=params.model_dump(mode="json"))


def write_plan(folder: Path, run_folder: str, params: dict[str, Any]) -> None:
    """Looks at the host and writes plan.json, or the reason why there is no plan (unsupported.json)."""
    given = DeployParams.model_validate(params)
    try:
        loaded = load_profile(given.profile, given.server, given.known_answer)
        require_systemd(place_for(loaded, given).host)
        made = _prepared(Path(run_folder), given)
        plan = made.deployment(folder).look()
    except (HostError, BadInput) as error:
        local.write_atomic(folder / "unsupported.json", json.dumps({"reason": str(error)}))
        return
    local.write_atomic(folder / "plan.json", plan.model_dump_json(indent=1))


def plan_of(run: NotebookRun, server: ServerHandle, launch: LaunchRecord) -> Measurement | None:
    """What would change on the host (raw record `plan`); None for an attached server."""
    if server.attached:
        run.skip("the plan", "an attached server's command line is not this workbook's")
        return None
    arguments: dict[str, Any] = {}
    if not run.offline:
        arguments = {"run_folder": str(run.folder), "params": run.params.model_dump(mode="json")}
    made = run.measure("plan", None, write_plan, context=launch.key, **arguments)
    if (made.folder / "unsupported.json").exists():
        run.skip("the plan for the host", made.json("unsupported.json")["reason"])
    return made


def read_plan(plan: Measurement | None) -> PlanReport | None:
    """The recorded plan, None where there is none."""
    if plan is None or not (plan.folder / "plan.json").exists():
        return None
    return PlanReport.model_validate(plan.json("plan.json"))


def _no_plan(plan: Measurement | None) -> str:
    return "the server is attached" if plan is None else str(plan.json("unsupported.json")["reason"])


def plan_rows(plan: Measurement | None) -> list[dict[str, Any]]:
    """The plan as a table, or why there is none here."""
    found = read_plan(plan)
    if found is None:
        return [{"what": "unsupported here", "value": _no_plan(plan)}]
    return deployed.plan_rows(found)


def write_rollout(folder: Path, run_folder: str, params: dict[str, Any]) -> None:
    """Carries the plan out (deploy.json, proofs, stop report), or writes why it was refused (refused.json)."""
    made = _prepared(Path(run_folder), DeployParams.model_validate(params))
    try:
        made.deployment(folder).run()
    except Refused as error:
        local.write_atomic(folder / "refused.json", json.dumps({"reason": str(error)}))


def deploy(run: NotebookRun, server: ServerHandle, launch: LaunchRecord, plan: Measurement | None) -> DeployReport | None:
    """The rollout where the parameters say so (raw record `rollout`); None where they don't, or it may not be."""
    params: DeployParams = run.params  # type: ignore[assignment]
    if not params.deploy or read_plan(plan) is None:
        run.skip("the rollout", why_not(run, plan))
        return None
    arguments: dict[str, Any] = {}
    if not run.offline:
        server.stop()  # the measured one must not share the machine, or hold the port
        arguments = {"run_folder": str(run.folder), "params": params.model_dump(mode="json")}
    made = run.measure("rollout", None, write_rollout, keep_errors=True, context=launch.key, **arguments)
    file = made.folder / "deploy.json"
    if not file.exists():
        why = made.json("refused.json")["reason"] if (made.folder / "refused.json").exists() else made.problem
        run.skip("the rollout", why or "it left no report")
        return None
    return DeployReport.model_validate_json(file.read_text())


def why_not(run: NotebookRun, plan: Measurement | None) -> str:
    """Why nothing was deployed."""
    params: DeployParams = run.params  # type: ignore[assignment]
    if read_plan(plan) is None:
        return f"unsupported here: {_no_plan(plan)}"
    told = next((line.partition(": ")[2] for line in run.skipped if line.startswith("the rollout: ")), None)
    return told or ("not asked for (deploy: false)" if not params.deploy else "it left no report")


def claim_rows(report: DeployReport | None) -> list[dict[str, Any]]:
    """The claims about what serves now."""
    return deployed.claim_rows(deployed.served_proof(report)[0]) if report else []


def verdicts(run: NotebookRun, plan: Measurement | None, report: DeployReport | None) -> list[Verdict]:
    """Whether the plan may be carried out, and whether what serves is proven."""
    found, made = read_plan(plan), []
    common: dict[str, Any] = {
        "id": "plan", "claim": "Neither the audit nor the capacity speaks against deploying it",
        "limit": "no objection without an override", "rule": "lib.deploy.planning",
    }  # fmt: skip
    if found is None or plan is None:
        made.append(Verdict(status=Status.UNSUPPORTED, reason=_no_plan(plan), **common))
    else:
        words = "; ".join(f"{o.name or 'no override'}: {o.reason}" for o in found.refused or found.objections)
        made.append(
            Verdict(
                status=Status.FAIL if found.refused else Status.PASS,
                reason=words or "no objection",
                evidence=[run.evidence(plan.folder / "plan.json")],
                **common,
            )
        )
    params: DeployParams = run.params  # type: ignore[assignment]
    if report is None and params.deploy and found is not None:
        made.append(
            Verdict(
                id="deployed",
                claim="The service runs on its host and is proven from its own start",
                status=Status.INCONCLUSIVE,
                reason=why_not(run, plan),
                limit="every claim that must hold",
                rule="lib.deploy.proof",
            )
        )
    if report is not None:
        proof, where = deployed.served_proof(report)
        folder = run.raw / "rollout"
        failed = ", ".join(c.id for c in proof.failed) if proof else ""
        made.append(
            Verdict(
                id="deployed",
                claim="The service runs on its host and is proven from its own start",
                status=Status.PASS if report.outcome == "proven" else Status.FAIL,
                reason=f"{report.outcome.replace('_', ' ')}: {report.reason}{f'; failed: {failed}' if failed else ''}",
                limit="every claim that must hold",
                rule="lib.deploy.proof",
                evidence=[run.evidence(folder / "deploy.json"), *([run.evidence(folder / where / "proof.json")] if proof else [])],
            )
        )
    return made


def state_lines(run: NotebookRun, report: DeployReport | None) -> list[Any]:
    """What a rollout adds to state.md: each claim about what serves now, and how to go on."""
    if report is None:
        return []
    proof, where = deployed.served_proof(report)
    folder = run.path(run.raw / "rollout")
    lines: list[Any] = [deployed.claim_verdict(claim, f"{folder}/{where}") for claim in (proof.claims if proof else [])]
    return lines + [(text, Evidence(path=f"{folder}/deploy.json")) for text in deployed.instructions(report)]

