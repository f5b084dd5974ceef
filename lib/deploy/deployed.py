"""What a rollout did, as people read it: steps, the old server's end, claims, the way back, the state document. Records in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lib.deploy.deployment import DeployReport, PlanReport
from lib.deploy.proof import Claim, Proof
from lib.records import Evidence, Measured, Status, Verdict
from lib.report.state import state_markdown

#: How a claim's status reads as a verdict.
STATUS = {"pass": Status.PASS, "fail": Status.FAIL, "unknown": Status.INCONCLUSIVE}


def step_rows(report: DeployReport | None) -> list[dict[str, Any]]:
    """Steps of a rollout and of its way back, with seconds and outcome."""
    if report is None:
        return []
    rows = [{"step": s.name, "seconds": s.seconds, "outcome": s.outcome} for s in report.steps]
    return rows + [{"step": f"way back: {s.name}", "seconds": s.seconds, "outcome": s.outcome} for s in report.way_back]


def stop_rows(report: DeployReport | None) -> list[dict[str, Any]]:
    """How the old server ended: each rung with its time, and what shows that it is gone."""
    stop = report.stop if report else None
    if stop is None:
        return []
    rows = [{"what": f"rung: {r.name}", "value": f"{r.did}: {r.outcome} ({r.seconds} s)"} for r in stop.rungs]
    rows += [{"what": f"container {c.name}", "value": f"{', '.join(c.digests) or c.image_id or c.image}"} for c in stop.containers]
    rows += [{"what": "bystander, not touched", "value": f"pid {b.pid} {b.why}: {b.argv[:80]}"} for b in stop.bystanders]
    held = f" ({stop.port_reason})" if stop.port_reason else ""
    end = {
        "state": stop.state, "processes left": len(stop.left), "port free": f"{stop.port_free}{held}",
        "GPU memory back": f"{stop.gpu_back if stop.gpu_back is not None else 'not known'} ({stop.gpu_reason or 'looked at'})",
    }  # fmt: skip
    return rows + [{"what": name, "value": value} for name, value in end.items()]


def claim_rows(proof: Proof | None) -> list[dict[str, Any]]:
    """The claims of a proof."""
    return [
        {"claim": c.claim, "status": c.status, "expected": c.expected, "found": c.found, "evidence": c.evidence or ""}
        for c in (proof.claims if proof else [])
    ]


def plan_rows(plan: PlanReport) -> list[dict[str, Any]]:
    """What a plan would change."""
    runs = "; ".join(f"pid {p['pid']} {p['why']}" for p in plan.runs)
    objections = "; ".join(f"{o.name or 'no override'}: {o.reason}" for o in plan.objections)
    gpus = "; ".join(f"{g['gpu']}: {g['used_mib']} MiB, pids {g['holders']}" for g in plan.gpus)
    rows = {
        "host": plan.host, "unit": f"{plan.unit}, {'new' if plan.unit_new else 'changes' if plan.diff else 'unchanged'}",
        "now": plan.now, "runs now": runs or "nothing of this service", "port": plan.port_held_by or "free",
        "GPU memory": gpus or plan.gpus_reason or "none",
        "never touched": "; ".join(f"pid {b['pid']} {b['why']}" for b in plan.bystanders) or "no bystander",
        "root": "to be had" if plan.can_root is None else plan.can_root.strip(), "objections": objections or "none",
        "refused": "yes" if plan.refused else "no", "last proven": plan.proven or "none", "unfinished": plan.unfinished or "none",
    }  # fmt: skip
    return [{"what": name, "value": value} for name, value in rows.items()]


def steps_text(report: DeployReport) -> str:
    """A rollout's report for a terminal."""
    rows = [f"{report.outcome.replace('_', ' ').upper()}: {report.unit} on {report.host}, plan {report.id}: {report.reason}"]
    rows += [f"  {r['step']}: {r['outcome']} ({r['seconds']} s)" for r in step_rows(report)]
    rows += [f"  {r['what']}: {r['value']}" for r in stop_rows(report)]
    for name, proof in (("proof", report.proof), ("after a crash", report.restart_proof), ("way back", report.way_back_proof)):
        rows += [f"  {c.status:7} {name}: {c.id}: expected {c.expected}, found {c.found}" for c in (proof.claims if proof else [])]
    if report.stop and report.stop.do:
        rows.append(f"  do: {report.stop.do}")
    return "\n".join(rows)


def claim_verdict(claim: Claim, folder: str) -> Verdict:
    """A claim as a verdict; `folder` is where its evidence lies."""
    place = Evidence(path=f"{folder}/{claim.evidence or 'proof.json'}", line=claim.line)
    measured = Measured(value=claim.found[:120], reason="read") if claim.found else None
    return Verdict(
        id=claim.id, claim=claim.claim, status=STATUS[claim.status], measured=measured, limit=claim.expected,
        reason=claim.found or claim.status, rule="lib.deploy.proof", evidence=[place],
    )  # fmt: skip


def served_proof(report: DeployReport) -> tuple[Proof | None, str]:
    """The proof of what serves now, and its folder below the rollout's."""
    if report.outcome == "proven":
        return (report.restart_proof, "proof-after-crash") if report.restart_proof else (report.proof, "proof")
    return report.way_back_proof, "way-back-proof"


def instructions(report: DeployReport) -> Sequence[str]:
    """What the next person does."""
    if report.outcome == "proven":
        return ["Watch it: workbook watch with the same profile, from a timer", "Go back: workbook deploy --undo with the same profile"]
    if report.outcome == "failed_and_not_rolled_back":
        return [f"Look now: {report.reason}", "Then run workbook deploy again to go on, or workbook deploy --undo"]
    return [f"The rollout ended as {report.outcome.replace('_', ' ')}: {report.reason}"]


def deployment_state(report: DeployReport, goal: str) -> str:
    """state.md of a rollout: goal, what to do next, what is proven and what isn't, what was done."""
    proof, folder = served_proof(report)
    found = [claim_verdict(claim, folder) for claim in proof.claims] if proof else ["Nothing is proven of what serves now"]
    done = [(f"{row['step']}: {row['outcome']} ({row['seconds']} s)", Evidence(path="deploy.json")) for row in step_rows(report)]
    done += [(f"objection {name} overridden: {reason}", Evidence(path="deploy.json")) for name, reason in report.overrides.items()]
    head = (f"{report.unit} on {report.host}: plan {report.id} is {report.outcome.replace('_', ' ')}", Evidence(path="deploy.json"))
    return state_markdown(goal, list(instructions(report)), found, [head, *done])
