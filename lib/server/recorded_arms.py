"""Runs that exist only as files: recorded arms of another host, and published tables without any trace.

A recorded arm was one launch, so its ratio is shown and never judged; its identity is the files' hashes, since no
workbook launched it. A table without counts of verification steps can't tell a server that didn't speculate from one
that did, so its comparison is *invalid*, never 'no benefit'.

Source: SGLang 0.5.16 on an H200 (tests/recorded); the origin case's tables (params/qwen3.5-397b-nvfp4-rtx6000x8).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lib.errors import BadInput
from lib.hosts import local
from lib.load.stats import student_t_quantile
from lib.params import ROOT, SpeculativeParams, load_profile
from lib.records import Measured, Prediction, Record, ServerIdentity
from lib.results import NotebookRun
from lib.server import acceptance
from lib.server.acceptance import Acceptance, spec_counts
from lib.server.log import read_log
from lib.server.redact import redact_object
from lib.server.same_answers import first_difference
from lib.server.spec_trace import LaunchTrace, trace
from lib.server.speedup import predicted_ratio, step_cost

#: Files of one recorded server beside its answers.
SERVER_FILES = (".log", ".server_info.json")


class Arm(Record):
    """Requests of one kind of text against one server: tokens, seconds, and verification steps."""

    name: str
    text: str
    treated: bool
    requests: int
    completion_tokens: int
    e2e_s: float
    verify_steps: int | None
    correct_drafts: int | None
    proposed_drafts: int | None
    histogram: list[int] | None = None
    contradictions: list[str] = []
    output_ids: list[list[int]] = []
    request_s: list[float] = []

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens over the sum of the requests' end-to-end seconds (requests one at a time)."""
        return self.completion_tokens / self.e2e_s if self.e2e_s > 0 else None

    @property
    def accept_length(self) -> Measured:
        """Tokens per verification step, the bonus token included. Example: 256 tokens in 155 steps: 1.65."""
        if not self.verify_steps:
            return Measured(value=None, reason="no verification step was counted")
        return Measured(
            value=self.completion_tokens / self.verify_steps,
            unit="tok/step",
            n=self.verify_steps,
            reason="one run",
        )

    @property
    def accept_rate(self) -> Measured:
        """Accepted drafts over proposed drafts. Example: 101 of 465: 0.217."""
        if not self.proposed_drafts:
            return Measured(value=None, reason="no draft was proposed")
        return Measured(
            value=(self.correct_drafts or 0) / self.proposed_drafts,
            unit="",
            n=self.proposed_drafts,
            reason="one run",
        )


def arm_from_answers(name: str, text: str, treated: bool, answers: Sequence[Mapping[str, Any]]) -> Arm:
    """An arm from raw /generate answers (`meta_info` of SGLang 0.5.11 to 0.5.23)."""
    metas = [answer["meta_info"] for answer in answers]
    counts = acceptance.pooled([spec_counts(m) for m in metas])
    counted = counts.verify_steps > 0
    return Arm(
        name=name,
        text=text,
        treated=treated,
        requests=len(metas),
        completion_tokens=counts.completion_tokens,
        e2e_s=sum(float(m["e2e_latency"]) for m in metas),
        verify_steps=counts.verify_steps if counted else None,
        correct_drafts=counts.correct_drafts,
        proposed_drafts=counts.proposed_drafts,
        histogram=counts.histogram,
        contradictions=counts.contradictions,
        output_ids=[list(answer.get("output_ids") or []) for answer in answers],
        request_s=[float(m["e2e_latency"]) for m in metas],
    )


class ArmComparison(Record):
    """Two arms on the same text: the outcome (a key of OUTCOMES), why, and the speed ratio where it means anything."""

    text: str
    outcome: str
    reason: str
    speed_ratio: Measured
    accept_length: Measured
    accept_rate: Measured
    same_output: bool | None
    first_difference: int | None


def compare_arms(base: Arm, treated: Arm) -> ArmComparison:
    """Compares an untreated with a treated arm; invalid if the treatment left no trace, or left one where there was none.

    Example: 172.2 against 172.1 tok/s without one counted verification step is `no_trace_of_treatment`.
    """
    outcome, reason = (
        "not_enough_data",
        f"{treated.verify_steps} verification steps counted with speculation, none without",
    )
    if not treated.verify_steps:
        outcome = "no_trace_of_treatment"
        reason = f"{treated.name}: the server counted no verification step, so speculation was not on (or nobody asked)"
    elif base.verify_steps:
        outcome = "no_trace_of_treatment"
        reason = f"{base.name}, the arm without speculation, counted {base.verify_steps} verification steps"
    elif treated.contradictions:
        outcome = "no_trace_of_treatment"
        reason = f"{treated.name}: its counts are impossible ({treated.contradictions[0]})"
    same, first = _same_output(base, treated)
    ratio = Measured(value=None, unit="x", reason=reason)
    if outcome == "not_enough_data":
        ratio = speed_ratio(base, treated)
    return ArmComparison(
        text=base.text,
        outcome=outcome,
        reason=reason,
        speed_ratio=ratio,
        accept_length=treated.accept_length,
        accept_rate=treated.accept_rate,
        same_output=same,
        first_difference=first,
    )


def speed_ratio(base: Arm, treated: Arm) -> Measured:
    """How many times faster the treated arm answered the same requests: the geometric mean over pairs, with its interval.

    The interval covers the requests of one launch of each arm, not the spread between launches.
    Example: 0.516 s without and 1.422 s with speculation for one request of equal length: 0.363.
    """
    if len(base.request_s) != len(treated.request_s) or base.completion_tokens != treated.completion_tokens:
        a, b = base.tokens_per_s, treated.tokens_per_s
        value = b / a if a and b else None
        return Measured(
            value=value, unit="x", n=1 if value else None, reason="unpaired: the arms differ in requests or tokens"
        )
    logs = [math.log(a / b) for a, b in zip(base.request_s, treated.request_s, strict=True)]
    mean = sum(logs) / len(logs)
    if len(logs) < 2:
        return Measured(value=math.exp(mean), unit="x", n=1, reason="one pair of requests")
    spread = math.sqrt(sum((x - mean) ** 2 for x in logs) / (len(logs) - 1) / len(logs))
    half = student_t_quantile(0.975, len(logs) - 1) * spread
    return Measured(value=math.exp(mean), unit="x", n=len(logs), low=math.exp(mean - half), high=math.exp(mean + half))


def _same_output(base: Arm, treated: Arm) -> tuple[bool | None, int | None]:
    if not base.output_ids or len(base.output_ids) != len(treated.output_ids) or not all(base.output_ids):
        return None, None
    for a, b in zip(base.output_ids, treated.output_ids, strict=True):
        place = first_difference(a, b)
        if place is not None:
            return False, place
    return True, None


class TableSuspicion(Record):
    """What two benchmark tables without any trace of the treatment can still tell."""

    outcome: str
    reason: str
    equal_token_counts: int
    levels: int
    largest_change: float


def compare_tables(without: Sequence[Mapping[str, Any]], with_treatment: Sequence[Mapping[str, Any]]) -> TableSuspicion:
    """Two tables of (concurrency, aggregate_tokens_per_s, tokens, optionally verify_steps): never 'no benefit'.

    Near-zero acceptance costs time (drafting and verifying), so equal throughput and equal token counts are what the
    same server measured twice looks like. With verification steps at every treated level and none at the others the
    tables are one run of each arm: not enough data.

    Example: the origin case's tables are `no_trace_of_treatment`.
    """
    pairs = [(a, b) for a, b in itertools.product(without, with_treatment) if a["concurrency"] == b["concurrency"]]
    equal = sum(a["tokens"] == b["tokens"] for a, b in pairs)
    changes = [b["aggregate_tokens_per_s"] / a["aggregate_tokens_per_s"] - 1 for a, b in pairs]
    largest = max(changes, key=abs) if changes else 0.0
    common: dict[str, Any] = {"equal_token_counts": equal, "levels": len(pairs), "largest_change": largest}
    if not pairs:
        return TableSuspicion(outcome="not_enough_data", reason="the tables share no level", **common)
    if any(a.get("verify_steps") for a, _ in pairs):
        reason = "the table without the treatment counts verification steps"
        return TableSuspicion(outcome="no_trace_of_treatment", reason=reason, **common)
    if all(b.get("verify_steps") for _, b in pairs):
        return TableSuspicion(
            outcome="not_enough_data", reason="verification steps are counted, one run of each arm", **common
        )
    return TableSuspicion(
        outcome="no_trace_of_treatment",
        reason=f"no verification step is recorded in either table; {equal} of {len(pairs)} levels have the same number of "
        f"tokens to the digit, and the largest change is {largest:+.1%}: the mark of one server measured twice",
        **common,
    )


# notebook 04 ---------------------------------------------------------------------------------------------------------


class Recorded(Record):
    """Recorded arms with their traces and identities."""

    arms: list[Arm] = []
    comparisons: list[ArmComparison] = []
    traces: list[LaunchTrace] = []
    identities: list[ServerIdentity] = []
    predictions: list[Prediction] = []


def copy_recorded(folder: Path, source: str) -> None:
    """Copies the recorded answers, logs and /server_info of both arms, so that this run's evidence is in one place."""
    files = sorted(Path(source).glob("m1_*_c1.generate.json"))
    if not files:
        raise BadInput(
            f"recorded runs in {source}", "no m1_*_c1.generate.json", "correct `recorded`, or set it to null"
        )
    servers = {f.name.split(".", 1)[0] for f in files}
    more = [f for name in sorted(servers) for end in SERVER_FILES if (f := Path(source) / f"{name}{end}").is_file()]
    for file in [*files, *more]:
        local.write_atomic(folder / file.name, file.read_bytes())


def recorded_runs(run: NotebookRun) -> Recorded:
    """The recorded runs that params name (SGLang 0.5.16, one H200, a seeded toy model); empty if they name none."""
    params: SpeculativeParams = run.params  # type: ignore[assignment]
    if params.recorded is None:
        return Recorded()
    copied = run.measure("recorded", None, copy_recorded, source=str(ROOT / params.recorded))
    arms: list[Arm] = []
    for file in sorted(copied.folder.glob("m1_*.generate.json")):
        server, text = file.name.removesuffix("_c1.generate.json").split(".", 1)
        name = server.removeprefix("m1_")
        arms.append(arm_from_answers(f"recorded {name}", text, name == "nextn", json.loads(file.read_text())))
    traces, identities = [], []
    for name, treated in (("base", False), ("nextn", True)):
        mine = [a for a in arms if a.name == f"recorded {name}"]
        if mine:
            one, identity = _recorded_server(copied.folder, f"m1_{name}", treated, params.recorded)
            traces.append(one)
            identities.append(identity)
    run.recorded = identities
    pairs = [compare_arms(a, b) for a in arms for b in arms if a.text == b.text and not a.treated and b.treated]
    return Recorded(
        arms=arms, comparisons=pairs, traces=traces, identities=identities, predictions=_cross_predictions(arms, pairs)
    )


def _recorded_server(folder: Path, name: str, treated: bool, source: str) -> tuple[LaunchTrace, ServerIdentity]:
    """Trace and identity of one recorded server: its files and their hashes, since it has no launch id."""
    files = sorted(f for f in folder.glob(f"{name}.*") if f.is_file())
    hashes = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
    counts = [
        spec_counts(answer["meta_info"])
        for f in files
        if f.name.endswith(".generate.json")
        for answer in json.loads(f.read_text())
    ]
    log_file, info_file = folder / f"{name}.log", folder / f"{name}.server_info.json"
    log, argv = None, []
    if log_file.exists():
        with log_file.open("rb") as lines:
            log = read_log(lines)
        first = log_file.read_text(errors="replace").split("\n", 1)[0]
        argv = shlex.split(first[1:].split("  env=", 1)[0]) if first.startswith("# ") else []
    info = dict(redact_object(json.loads(info_file.read_text()))) if info_file.exists() else None
    resolved = info or (log.server_args if log else {})
    digest = hashlib.sha256(json.dumps(sorted(hashes.items())).encode()).hexdigest()
    launch_id = f"recorded {name}, no launch id"
    checks = [
        f"recorded in {source} by hand, not launched by the workbook: no launch id, pid or port was kept",
        "which process answered is not proved; the files are these, by SHA-256:",
        *(f"{file} {value}" for file, value in hashes.items()),
    ]
    one = trace(
        launch_id,
        treated,
        acceptance.pooled(counts, 3 if treated else None),
        log=log,
        info=info,
        argv=argv,
    )
    identity = ServerIdentity(
        launch_id=launch_id,
        origin="recorded",
        sglang_version=str(info["version"]) if info else (log.version if log else None),
        argv=[str(a) for a in argv],
        resolved_args={k: v for k, v in resolved.items() if k not in ("internal_states",)},
        served_model_name=str(resolved.get("served_model_name") or "") or None,
        model={"path": str(resolved.get("model_path", "")), "sha256": ""},
        fingerprint=digest,
        checks=checks,
    )
    return one, identity


def _cross_predictions(arms: Sequence[Arm], pairs: Sequence[ArmComparison]) -> list[Prediction]:
    """Each recorded text's ratio from its own acceptance and the step cost of the *other* recorded text."""
    made = []
    for pair in pairs:
        for other in arms:
            base = next((a for a in arms if a.text == other.text and not a.treated), None)
            length = other.accept_length.value
            own = pair.accept_length.value
            if not other.treated or other.text == pair.text or base is None or not isinstance(length, float):
                continue
            if not isinstance(own, float) or not base.tokens_per_s or not other.tokens_per_s:
                continue
            cost = step_cost(1 / base.tokens_per_s, 1 / other.tokens_per_s, length)
            made.append(
                Prediction(
                    id=f"recorded-{pair.text}",
                    what=f"recorded runs: speed with / without on {pair.text.replace('_', ' ')}",
                    predicted=Measured(
                        value=predicted_ratio(own, cost),
                        unit="x",
                        n=1,
                        reason=f"accept length {own:.2f}, a step costs {cost:.2f} decode steps on {other.text.replace('_', ' ')}",
                    ),
                    formula="accept length / step cost",
                    source="lib.server.speedup.predicted_ratio; Leviathan et al. 2023",
                    measured=pair.speed_ratio,
                )
            )
    return made


def position_rows(name: str, counts: Acceptance | Arm, drafts: int | None) -> list[dict[str, Any]]:
    """Acceptance of each draft position, as a table."""
    return [
        {
            "text": name,
            "draft": p.position,
            "accepted in": p.accepted,
            "of all steps": p.of_all_steps,
            "of steps that reached it": p.of_reached,
        }
        for p in acceptance.by_position(counts.histogram, drafts)
    ]


class Published(Record):
    """Published tables with and without the treatment, where they are from, and what they are worth."""

    source: str
    profile: str
    without: list[dict[str, Any]]
    asked_for: list[dict[str, Any]]
    found: TableSuspicion


def write_published(folder: Path, profile: str, reference: Mapping[str, Any]) -> None:
    """Keeps the tables as this run read them (tables.json)."""
    keys = ("source", "without_nextn", "asked_for_nextn")
    kept = {"profile": profile, **{k: reference[k] for k in keys if k in reference}}
    local.write_atomic(folder / "tables.json", json.dumps(kept, indent=1))


def published_tables(run: NotebookRun) -> Published | None:
    """The tables of the profile that params name (their own by default), judged; None where it quotes none."""
    params: SpeculativeParams = run.params  # type: ignore[assignment]
    name = params.published or params.profile
    reference = run.profile.reference
    if params.published and not run.offline:
        reference = load_profile(params.published).reference
    if not run.offline and not (reference.get("without_nextn") and reference.get("asked_for_nextn")):
        return None
    if run.offline and not (run.raw / "published" / "stamp.json").exists():
        return None
    taken = run.measure("published", None, write_published, profile=name, reference=dict(reference))
    tables = taken.json("tables.json")
    without, asked_for = tables["without_nextn"], tables["asked_for_nextn"]
    return Published(
        source=str(tables.get("source", "no source given")),
        profile=tables["profile"],
        without=without,
        asked_for=asked_for,
        found=compare_tables(without, asked_for),
    )
