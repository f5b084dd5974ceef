"""`workbook deploy`: roll a measured configuration out on the profile's host, prove it, or go back."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from lib.cli._input import read_text
from lib.deploy.deployed import deployment_state, steps_text
from lib.deploy.deployment import DeployPlan, PlanReport, by_hand, check_plan, key_on
from lib.deploy.planning import Prepared, prepare, prepare_undo
from lib.deploy.proof import Proof, prove
from lib.errors import BadInput, NeedsRoot
from lib.hosts import local
from lib.hosts.connect import close_all
from lib.results import outputs_root
from lib.runner import find_run

EPILOG = """\
Exit codes: 0 proven, undone, or a plan that may be carried out; 1 refused, rolled back, or a proof that failed; 2 bad input,
busy, or it takes root (the unit and the commands for a person are printed); 3 failed and not rolled back: a person has to
look now; 130 interrupted: run the same command again to go on, or with --undo to go back. Forms: docs/deploy.md.
"""
MAX_ENVIRONMENT = 1 << 20
EXIT = {"proven": 0, "undone": 0, "rolled_back": 1, "failed_and_not_rolled_back": 3}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `workbook deploy`."""
    parser = subparsers.add_parser(
        "deploy",
        help="roll a measured configuration out on the profile's host, prove it, or go back",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--profile", required=True, help="a name under params/, or a folder; its host: and 06.yaml")
    parser.add_argument(
        "--run", dest="run_id", metavar="RUN", help="run id, folder or `latest` that measured it: what must be shown"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--plan", action="store_true", help="show what would change and touch nothing")
    what.add_argument("--undo", action="store_true", help="go back to what was there before the last rollout")
    what.add_argument("--prove", action="store_true", help="prove what runs now, changing nothing")
    parser.add_argument(
        "--override",
        metavar="NAME=REASON",
        action="append",
        default=[],
        help="an objection that does not hold, and why (recorded)",
    )
    parser.add_argument(
        "--environment-file", metavar="FILE", help="NAME=value lines with secrets; they go to the host only"
    )
    parser.add_argument("--json", action="store_true", help="one object on stdout (docs/deploy.md); progress on stderr")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """See EPILOG."""
    began = time.time()
    try:
        overrides = _overrides(args.override)
        secrets = (
            read_text(args.environment_file, "an environment file", MAX_ENVIRONMENT) if args.environment_file else None
        )
        if args.undo:
            made = prepare_undo(args.profile, secrets)
        else:
            made = prepare(args.profile, find_run(args.run_id) if args.run_id else None, overrides, secrets)
        host = made.place.host
        folder = outputs_root() / "deployments" / made.plan.unit / time.strftime("%Y%m%d-%H%M%S", time.localtime(began))
        rollout = made.deployment(
            folder, lambda words: print(f"{time.time() - began:7.1f} s  {words}", file=sys.stderr, flush=True)
        )
        if args.plan:
            plan = rollout.look()
            print(plan.model_dump_json() if args.json else plan_text(plan))
            return 1 if plan.refused else 0
        if (reason := host.can_root()) is not None:
            if args.undo:
                raise NeedsRoot("root on the host, to go back", reason)
            print(json.dumps(_for_a_person(made.plan, reason)) if args.json else hand_text(made.plan, reason))
            return 2
        if args.prove:
            return _prove(made, folder, args.json)
        if args.undo:
            report = rollout.undo()
        else:
            check_plan(made.plan)
            report = rollout.run()
        local.write_atomic(folder / "state.md", deployment_state(report, made.params.goal))
        print(report.model_dump_json() if args.json else f"{steps_text(report)}\nevidence: {folder}")
        return EXIT[report.outcome]
    except NeedsRoot as error:
        raise BadInput(error.expected, error.found, "workbook deploy --plan shows the commands for a person") from error
    finally:
        close_all()


def _prove(made: Prepared, folder: Path, as_json: bool) -> int:
    key = (made.api_key if made.plan.expectation.api_key_env else None) or key_on(made.place.host, made.plan)
    bench = made.bench if made.level else None
    proof = prove(made.place.host, made.plan.unit, made.plan.expectation, folder / "proof", bench, key)
    print(proof.model_dump_json() if as_json else f"{proof_text(proof)}\nevidence: {folder / 'proof'}")
    return 0 if proof.proven else 1


def _overrides(pairs: list[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, equals, reason = pair.partition("=")
        if not equals or not name.strip() or not reason.strip():
            raise BadInput("--override NAME=REASON with a reason", repr(pair), "say why the objection does not hold")
        found[name.strip()] = reason.strip()
    return found


def _for_a_person(plan: DeployPlan, reason: str) -> dict[str, object]:
    return {"needs_root": reason, "unit": plan.unit, "unit_text": plan.unit_text, "by_hand": by_hand(plan)}


def hand_text(plan: DeployPlan, reason: str) -> str:
    """The unit and what a person types as root."""
    rows = [
        f"This takes root, and it is not to be had: {reason.strip()}",
        "",
        f"The unit, as {plan.unit}:",
        "",
        plan.unit_text,
    ]
    return "\n".join(
        [*rows, "As root on the host, in the unit's folder:", "", *(f"  {line}" for line in by_hand(plan))]
    )


def plan_text(plan: PlanReport) -> str:
    """The readable form of a plan."""
    out = [
        f"PLAN {plan.id} for {plan.unit} on {plan.host}",
        f"  now: {plan.now}; last proven plan: {plan.proven or 'none'}",
    ]
    if plan.unfinished:
        out.append(f"  UNFINISHED: {plan.unfinished}")
    out += ["", "OBJECTIONS" if plan.objections else "OBJECTIONS: none"]
    refused = {(o.name, o.reason) for o in plan.refused}
    for objection in plan.objections:
        lifted = (
            "REFUSES"
            if (objection.name, objection.reason) in refused
            else f"overridden: {plan.overrides[objection.name or '']}"
        )
        out.append(f"  {objection.name or '(cannot be overridden)'}: {objection.reason} [{lifted}]")
    capacity, audit = plan.about.get("capacity") or {}, plan.about.get("audit") or {}
    out += ["", f"AUDIT: {audit.get('answer', 'not audited')}", *(f"  {line}" for line in audit.get("findings", []))]
    out += ["", "CAPACITY", *(f"  {name}: {value}" for name, value in capacity.items() if value not in (None, []))]
    out += ["", "NOT CLAIMED BY THE PROOF" if plan.about.get("not_claimed") else "EVERYTHING CAN BE CLAIMED"]
    out += [f"  {line}" for line in plan.about.get("not_claimed") or []]
    out += ["", "RUNS NOW" if plan.runs else "RUNS NOW: nothing of this service"]
    out += [f"  pid {p['pid']} {p['why']}: {p['argv'][:110]}{_gpu(p)}" for p in plan.runs]
    for one in plan.containers:
        image = ", ".join(one.get("digests") or []) or one.get("image_id") or one.get("reason")
        log = " ".join(one.get("log", [])) or "not known"
        out.append(f"  container {one.get('name', '?')} ({str(one['id'])[:12]}): {image}; log: {log}")
    out.append(f"  port: {plan.port_held_by or 'free'}")
    out += [f"  GPU {g['gpu']} ({g['uuid']}): {g['used_mib']} MiB, pids {g['holders'] or 'none'}" for g in plan.gpus]
    out += [] if plan.gpus else [f"  GPU memory: {plan.gpus_reason}"]
    out += ["", "NEVER TOUCHED" if plan.bystanders else "NEVER TOUCHED: no bystander on its port or GPUs"]
    out += [f"  pid {b['pid']} {b['why']}: {b['argv'][:110]}" for b in plan.bystanders]
    out += [
        "",
        f"UNIT ({'new' if plan.unit_new else 'changes' if plan.diff else 'unchanged'})",
        plan.diff.rstrip() or "  no difference",
    ]
    out += [f"  drop-in, set aside: {path}" for path in plan.dropins] + [f"  {line}" for line in plan.lint]
    out += ["", f"ROOT: {'sudo or root is there' if plan.can_root is None else plan.can_root.strip()}; needed to:"]
    out += [f"  {line}" for line in plan.needs_root]
    if plan.can_root is not None:
        out += ["", "BY HAND, as root:", *(f"  {line}" for line in plan.by_hand)]
    return "\n".join(out)


def _gpu(row: dict[str, object]) -> str:
    return f", {row['gpu_mib']:.0f} MiB of GPU memory" if row.get("gpu_mib") is not None else ""


def proof_text(proof: Proof) -> str:
    """The claims, one a line."""
    rows = [f"{'PROVEN' if proof.proven else 'NOT PROVEN'}: {proof.unit} on {proof.host}, start {proof.invocation}"]
    rows += [f"  {c.status:7} {c.id}: {c.claim}; expected {c.expected}, found {c.found}" for c in proof.claims]
    return "\n".join(rows)
