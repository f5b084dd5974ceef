"""What notebook 01 says about the stack before a launch: pins, kernels for the GPU, and a build from source."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lib.deploy import kernels, releases, source_build
from lib.errors import BadParams, NotMeasured
from lib.hosts import local
from lib.model.cache import cache_dir
from lib.params import BuildParams
from lib.records import Measured, Status, Verdict
from lib.results import NotebookRun, ServerHandle
from lib.server.spec import resolve_python

#: The origin's GPU: what the plan is made for where no GPU is at hand and none is stated.
ORIGIN_SM = 120


def conflict_rows(inventory: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Pins that this environment breaks, or one row that says that none is broken (or why nothing was compared)."""
    if not inventory["distributions"]:
        return [{"package": "(not read)", "wanted": "", "found": inventory.get("reason", ""), "by": ""}]
    found = releases.conflicts(inventory["distributions"], inventory["torch"].get("cuda"))
    return found or [{"package": "(none)", "wanted": "", "found": "every pin of the table is met", "by": ""}]


def release_rows(inventory: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The table of releases, with the installed one marked."""
    versions = {releases.normalised(d["name"]): d["version"] for d in inventory["distributions"]}
    return releases.rows(versions.get("sglang"))


def own(run: NotebookRun) -> BuildParams:
    """The parameters of notebook 01."""
    if not isinstance(run.params, BuildParams):
        raise BadParams("parameters of notebook 01", type(run.params).__name__)
    return run.params


def judged(run: NotebookRun, inventory: Mapping[str, Any]) -> tuple[int | None, str]:
    """The GPU architecture that kernels are judged for, and where it comes from."""
    return kernels.target(inventory, own(run).compute_capability)


def plan(run: NotebookRun, inventory: Mapping[str, Any]) -> source_build.BuildPlan:
    """The plan of a source build for the judged GPU (the origin's, where there is none) and torch's CUDA."""
    sm, _ = judged(run, inventory)
    versions = {releases.normalised(d["name"]): d["version"] for d in inventory["distributions"]}
    host = inventory.get("host") or {}
    memory = float(host.get("memory_bytes") or 0) / (1 << 30)
    return source_build.make_plan(
        sm or ORIGIN_SM,
        inventory.get("torch", {}).get("cuda") or "13.0",
        memory,
        int(host.get("cpu_cores") or 1),
        own(run).source_ref or f"v{versions.get('sglang', '0.5.16')}",
        own(run).source_commit,
    )


def take_checks(folder: Path, python: str, made: dict[str, Any]) -> None:
    """Writes checks.json: what a compile would need, and what of it is here."""
    wanted = source_build.BuildPlan.model_validate(made)
    lacking = source_build.missing_tools(python)
    free = shutil.disk_usage(folder).free / 1e9
    rows = source_build.checks(wanted, python, free, lacking, source_build.cmake_version())
    lacking += [row["detail"] for row in rows if row["outcome"] == "too old"]
    if not lacking and (why := source_build.unreachable(wanted)):  # asked only where a build could otherwise begin
        lacking.append(f"the sources ({why})")
        rows.append({"check": "repository", "outcome": "unsupported here", "detail": why})
    local.write_atomic(folder / "checks.json", json.dumps({"lacking": lacking, "checks": rows, "plan": made}, indent=1))


def take_build(folder: Path, python: str, made: dict[str, Any]) -> None:
    """Runs the plan in the cache, where an interrupted one goes on; build.json and build.log are copied here as its raw files.

    The cache's folder is the plan's own (builds/sgl-kernel-sm120-<hash>): another run, or a resumed one, finds what is done.
    """
    wanted = source_build.BuildPlan.model_validate(made)
    work = cache_dir() / "builds" / f"sgl-kernel-sm{wanted.sm}-{source_build.plan_sha256(wanted)[:12]}"
    try:
        source_build.run_plan(wanted, work, python, local_say)
    finally:
        for name in (source_build.BUILD, source_build.LOG):
            if (work / name).is_file():
                shutil.copyfile(work / name, folder / name)


def local_say(text: str) -> None:
    """A line of progress, as the runner shows it."""
    print(text, flush=True)  # noqa: T201 -- a build of an hour must be seen to go on


def checks_of(run: NotebookRun, server: ServerHandle, made: source_build.BuildPlan) -> dict[str, Any]:
    """The raw record `source-checks`; for an attached server, why there is none."""
    if server.attached:
        return {"lacking": ["an environment named here (the server is attached)"], "checks": []}
    python = None if run.offline else str(resolve_python(server.params.python))
    try:
        return dict(
            run.measure("source-checks", None, take_checks, python=python, made=made.model_dump()).json("checks.json")
        )
    except NotMeasured as error:  # a run of before this record existed
        run.skip("the checks of a source build", str(error))
        return {"lacking": [str(error)], "checks": []}


def build(
    run: NotebookRun, server: ServerHandle, made: source_build.BuildPlan, checked: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Runs the build if it is asked for and possible; says otherwise why it did not run."""
    if checked["lacking"]:
        return [{"build": "unsupported here", "why": f"lacking: {', '.join(checked['lacking'])}"}]
    if not own(run).build_from_source:
        return [{"build": "not asked for", "why": "build_from_source is false"}]
    python = None if run.offline else str(resolve_python(server.params.python))
    done = run.measure("source-build", None, take_build, keep_errors=True, python=python, made=made.model_dump())
    if not done.ok:
        return [{"build": "failed", "why": done.stamp.error or "no build.json"}]
    state = done.json("build.json")
    return [
        {
            "build": p["file"],
            "why": f"{p['bytes']} B, SHA-256 {p['sha256']}, commit {state.get('commit')}, device code for "
            f"{', '.join(sorted({a for names in p.get('architectures', {}).values() for a in names})) or 'no GPU'}",
        }
        for p in state["products"]
    ]


def verdicts(run: NotebookRun, inventory: Mapping[str, Any], found: Mapping[str, Any]) -> list[Verdict]:
    """Do the pins agree, and are there kernels for the GPU?"""
    if not inventory["distributions"]:
        return []
    return [_pins(run, inventory), kernels.verdict(run, found, *judged(run, inventory))]


def _pins(run: NotebookRun, inventory: Mapping[str, Any]) -> Verdict:
    broken = releases.conflicts(inventory["distributions"], inventory["torch"].get("cuda"))
    differing = [c for c in broken if c["found"] != "not installed"]
    absent = [c["package"] for c in broken if c["found"] == "not installed"]
    versions = {releases.normalised(d["name"]): d["version"] for d in inventory["distributions"]}
    common: dict[str, Any] = {
        "id": "pins",
        "claim": "The installed versions are those that this SGLang release pins",
        "rule": "lib.deploy.releases",
        "limit": "no other version than the pinned one",
        "evidence": [run.evidence(run.raw / "inventory" / "inventory.json")],
    }
    if "sglang" not in versions or not releases.pins(versions["sglang"]):
        return Verdict(
            status=Status.INCONCLUSIVE,
            reason=f"SGLang {versions.get('sglang', 'not installed')} is not in the table",
            **common,
        )
    said = _said(differing)
    said += f"; not installed: {', '.join(absent)} (an import that needs one fails)" if absent else ""
    measured = Measured(
        value=len(differing), unit="packages", n=len(releases.pins(versions["sglang"])), reason="counted"
    )
    if differing and not inventory["torch"].get("cuda"):
        reason = f"a CPU environment, which the pins do not speak of: {said}"
        return Verdict(status=Status.INCONCLUSIVE, reason=reason, measured=measured, **common)
    return Verdict(
        status=Status.FAIL if differing else Status.PASS, reason=said or "all met", measured=measured, **common
    )


def _said(rows: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(f"{r['package']} {r['found']}, wanted {r['wanted']}" for r in rows) or "every installed one is met"
