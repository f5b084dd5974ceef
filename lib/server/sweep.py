"""Notebook 02: candidates launched one after the other, each outcome from evidence.

asked --launch--> died      -> class and line from the log (crashes, unsupported_here, out_of_memory)
              --> not ready -> hangs
              --> ready     -> ran what was asked?  no: silently_ignored
                           -> answers as the reference does?  garbage / numerically_off / works
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lib.audit.compare import ScoreComparison, compare_scores
from lib.audit.probes import read_scores, score_documents, tokenize_documents
from lib.errors import BadInput
from lib.model.facts import Checkpoint
from lib.params import Candidate, SweepParams
from lib.records import Evidence, Measured, Record, Status, Trial, Verdict
from lib.results import Measurement, NotebookRun, ServerHandle
from lib.server.answers import Answer, ask, read_answer
from lib.server.flags import Gpu, ModelFacts, check_arguments
from lib.server.launch import LaunchRecord, read_failure

#: The text that is scored as a quality gate: a module of the standard library, hashed in the raw record.
GATE_TEXT = "argparse"


class Tried(Record):
    """One candidate: its launch, what it answered and scored, and the trial made of it."""

    candidate: Candidate
    launch: LaunchRecord
    answer: Answer | None
    comparison: ScoreComparison | None
    trial: Trial


def run_sweep(run: NotebookRun) -> list[Tried]:
    """Launches, questions and stops every candidate, the reference first."""
    params: SweepParams = run.params  # type: ignore[assignment]
    if run.attached:
        run.skip("the sweep", "it needs launches of its own, and the attached server is not restarted")
        return []
    by_id = {c.id: c for c in params.candidates}
    if params.reference not in by_id or len(by_id) != len(params.candidates):
        raise BadInput(
            f"candidates with unique ids, one of them the reference {params.reference!r}",
            f"{[c.id for c in params.candidates]}",
        )
    order = [by_id[params.reference], *(c for c in params.candidates if c.id != params.reference)]
    reference_scores: Measurement | None = None
    tried = []
    for candidate in order:
        one, scores = _try(run, params, candidate, reference_scores)
        if candidate.id == params.reference:
            reference_scores = scores
        tried.append(one)
    return sorted(tried, key=lambda t: [c.id for c in params.candidates].index(t.candidate.id))


def _try(
    run: NotebookRun, params: SweepParams, candidate: Candidate, reference: Measurement | None
) -> tuple[Tried, Measurement | None]:
    handle = run.server(
        candidate.id, candidate.flags, candidate.environment, False, ready_timeout_s=candidate.ready_timeout_s
    )
    launch = run.try_launch(handle)
    answer, failed, scores = None, None, None
    if launch.ready_s is not None:
        known = run.profile.known_answer
        asked = run.measure(
            f"{candidate.id}/answer",
            handle,
            ask,
            keep_errors=True,
            prompt=known.prompt,
            max_new_tokens=known.max_new_tokens,
        )
        failed = None if asked.ok else asked
        if asked.ok:
            answer = read_answer(asked.json("answer.json"), known.expect)
            scores = _score(run, params, handle, candidate)
        failed = failed or (scores if scores is not None and not scores.ok else None)
        handle.stop()
        launch = next(r for r in run.launch_records() if r.launch_id == launch.launch_id)
    compared = None
    if scores is not None and scores.ok and reference is not None and reference.ok:
        compared = compare_scores(read_scores(reference.folder), read_scores(scores.folder), params.text_tokens)
    trial = judge(run, params, candidate, launch, answer, failed, compared)
    return Tried(candidate=candidate, launch=launch, answer=answer, comparison=compared, trial=trial), scores


def _score(run: NotebookRun, params: SweepParams, handle: ServerHandle, candidate: Candidate) -> Measurement:
    documents = run.measure(
        "documents",
        handle,
        tokenize_documents,
        any_server=True,
        keep_errors=True,
        context=None if run.offline else handle.spec.model,
        documents=[GATE_TEXT],
        tokens=params.text_tokens,
    )
    if not documents.ok:
        return documents
    return run.measure(
        f"{candidate.id}/scores",
        handle,
        score_documents,
        keep_errors=True,
        documents=documents.json("documents.json"),
    )


def judge(
    run: NotebookRun,
    params: SweepParams,
    candidate: Candidate,
    launch: LaunchRecord,
    answer: Answer | None,
    failed: Measurement | None,
    compared: ScoreComparison | None,
) -> Trial:
    """The trial of one candidate: its outcome, the reason, and what shows it.

    Args:
        answer: its known answer, None if it never gave one.
        failed: the first request that failed on it, None if none did.
        compared: its log-probabilities against the reference's; for the reference itself, against itself.
    """
    log_file = run.log_file(launch)
    is_reference = candidate.id == params.reference
    values: dict[str, Measured] = {
        "ready_s": Measured(
            value=launch.ready_s, unit="s", n=1 if launch.ready_s else None, reason=_start_reason(launch)
        ),
        "mean_absolute": Measured(
            value=compared.mean_absolute if compared else None,
            unit="nat/token",
            n=compared.tokens if compared else None,
            reason="against the reference" if compared else "no scores to compare",
        ),
    }
    asked = ", ".join(f"{k}={v}" for k, v in {**candidate.flags, **candidate.environment}.items()) or "as the profile"
    common: dict[str, Any] = {
        "id": candidate.id,
        "what": asked,
        "launch_ids": [launch.launch_id],
        "seconds": launch.ready_s or launch.ended_s,
        "values": values,
    }
    if launch.ready_s is None:
        outcome, reason, evidence = failed_launch(run, launch)
        return Trial(outcome=outcome, reason=reason, evidence=[evidence], **common)
    if failed is not None:
        proof = [run.evidence(failed.folder / "stamp.json"), run.evidence(log_file)]
        if failed.stamp.invalid:
            return Trial(outcome="identity_mismatch", reason=failed.stamp.invalid, evidence=proof, **common)
        outcome = "garbage" if "NaN" in (failed.stamp.error or "") else "crashes"
        return Trial(outcome=outcome, reason=failed.stamp.error, evidence=proof, **common)
    quality = _quality(answer, compared, params.limit_nats, is_reference)
    if quality:
        outcome, reason = quality
        source = (
            run.raw
            / candidate.id
            / ("answer/answer.json" if outcome == "garbage" and answer else "scores/scores-00.json")
        )
        return Trial(outcome=outcome, reason=reason, evidence=[run.evidence(source), run.evidence(log_file)], **common)
    ignored, evidence = not_honoured(run, candidate.flags, launch)
    if ignored:
        return Trial(outcome="silently_ignored", reason=ignored, evidence=[evidence], **common)
    if not is_reference and compared is None:
        reason = "it serves, but the reference gave no scores to compare with"
        return Trial(outcome="not_enough_data", reason=reason, evidence=[evidence], **common)
    return Trial(outcome="works", reason=_works_reason(answer, compared, is_reference), evidence=[evidence], **common)


def _start_reason(launch: LaunchRecord) -> str:
    return "one launch" if launch.ready_s else f"{launch.state} after {launch.ended_s} s"


def failed_launch(run: NotebookRun, launch: LaunchRecord) -> tuple[str, str, Evidence]:
    """Outcome, reason and quoted line of a launch that never became ready, from its exit code and log."""
    file = run.log_file(launch)
    failure = read_failure(file.parent, launch.exit_code)
    if launch.state == "not_ready":
        phase = launch.phases[-1][0] if launch.phases else "before its first line"
        return "hangs", f"not ready after {launch.ended_s} s; last seen: {phase}", run.evidence(file)
    if failure is None or not failure.cause_known:
        return (
            "crashes",
            f"exit code {launch.exit_code} after {launch.ended_s} s; its log names no known cause",
            run.evidence(file),
        )
    phase = (failure.phase or "starting").replace("_", " ")
    reason = f"exit code {launch.exit_code} after {launch.ended_s} s, while {phase}: {failure.root_cause}"
    return failure.outcome, reason, run.evidence(file, failure.line_no, failure.line)


def not_honoured(run: NotebookRun, flags: Mapping[str, Any], launch: LaunchRecord) -> tuple[str | None, Evidence]:
    """Which asked backend the server did not run, by its own log; `/server_info` repeats what was asked and is no proof.

    Only a line or a trace in the log convicts; that no line contradicts a flag is no proof that it was honoured.
    """
    file = run.log_file(launch)
    log = run.log(launch)
    asked_of = asked_backends(flags)
    for backend in log.backends if log else []:
        asked = asked_of.get(backend.kind)
        if asked and backend.taken and backend.taken != asked and backend.known_by in ("line", "trace"):
            info = run.server_info(launch) or {}
            repeats = f"; /server_info still says {info.get(backend.kind)}" if info.get(backend.kind) == asked else ""
            evidence = run.evidence(file, backend.line_no, backend.line)
            return f"{backend.kind} {asked} was asked, {backend.taken} runs{repeats}", evidence
    for notice in log.notices if log else []:
        if notice.id == "backend_ignored":
            return notice.text, run.evidence(file, notice.line_no, notice.line)
    ready = log.ready if log else None
    return None, run.evidence(file, ready.line_no if ready else None, ready.line if ready else None)


def asked_backends(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags under the names that /server_info and the log reader use (`fp4_gemm_backend` is `fp4_gemm_runner_backend` there)."""
    other = {"fp4_gemm_backend": "fp4_gemm_runner_backend", "fp8_gemm_backend": "fp8_gemm_runner_backend"}
    return {other.get(name, name): value for name, value in flags.items()}


def _quality(
    answer: Answer | None, compared: ScoreComparison | None, limit: float, is_reference: bool
) -> tuple[str, str] | None:
    if answer is not None and answer.degenerate:
        return "garbage", f"its answer is degenerate: {answer.degenerate} ({answer.text[:40]!r})"
    if answer is not None and answer.correct is False:
        return "garbage", f"the known answer is wrong: {answer.text[:40]!r} instead of {answer.expect!r}"
    if compared is not None and not is_reference and compared.mean_absolute > limit:
        words = (
            f"mean |difference| {compared.mean_absolute:.4f} nat/token over {compared.tokens} tokens, limit {limit:g}"
        )
        return ("garbage" if compared.mean_absolute > 1.0 else "numerically_off"), words
    return None


def _works_reason(answer: Answer | None, compared: ScoreComparison | None, is_reference: bool) -> str:
    said = f"answers {answer.text.strip()[:30]!r}" if answer else "answered"
    if is_reference:
        return f"{said}; the reference of the others"
    if compared is None:
        return f"{said}; there was no reference to compare with"
    if compared.identical:
        return f"{said}; {compared.tokens} log-probabilities bit-identical to the reference"
    return f"{said}; mean |difference| {compared.mean_absolute:.4f} nat/token over {compared.tokens} tokens"


def verdicts(run: NotebookRun, tried: Sequence[Tried]) -> list[Verdict]:
    """One verdict a candidate, and whether there is one to go on with."""
    params: SweepParams = run.params  # type: ignore[assignment]
    made = [
        Verdict(
            id=t.trial.id,
            claim=f"{t.trial.what} serves, nothing in its log contradicts the flag, and it computes what {params.reference} computes"
            if t.candidate.id != params.reference
            else f"{t.trial.what}, the reference, serves and gives the known answer",
            status=t.trial.status,
            measured=t.trial.values["mean_absolute"] if t.comparison else None,
            limit=f"mean |difference| at most {params.limit_nats:g} nat/token",
            rule="lib.server.sweep",
            reason=f"{t.trial.outcome.replace('_', ' ')}: {t.trial.reason}",
            evidence=t.trial.evidence,
            launch_ids=t.trial.launch_ids,
        )
        for t in tried
    ]
    working = [t for t in tried if t.trial.outcome == "works"]
    common: dict[str, Any] = {
        "id": "a-backend-works",
        "claim": "At least one candidate works",
        "limit": "1 or more",
        "rule": "lib.server.sweep",
        "launch_ids": [i for t in working for i in t.trial.launch_ids],
    }
    if not tried:
        return [Verdict(status=Status.INCONCLUSIVE, reason="no candidate was launched", **common)]
    names = ", ".join(t.candidate.id for t in working) or "none"
    evidence = [e for t in (working or tried) for e in t.trial.evidence]
    return [
        *made,
        Verdict(status=Status.PASS if working else Status.FAIL, reason=f"works: {names}", evidence=evidence, **common),
    ]


def recommendation(tried: Sequence[Tried]) -> str:
    """Which candidate to go on with, and what must not be believed."""
    working = [t for t in tried if t.trial.outcome == "works"]
    ignored = [t.candidate.id for t in tried if t.trial.outcome == "silently_ignored"]
    if not tried:
        return "No candidate was launched here."
    if not working:
        return "No candidate works: read the quoted lines, then change the candidates."
    text = f"Go on with {working[0].candidate.id}"
    return f"{text}; {', '.join(ignored)} would serve, but not what its name says." if ignored else f"{text}."


def outcome_rows(tried: Sequence[Tried]) -> list[Trial]:
    """The trials, in the order of the parameters."""
    return [t.trial for t in tried]


def phase_rows(tried: Sequence[Tried]) -> list[dict[str, Any]]:
    """Start-up phases of every candidate, for the figure."""
    return [row for t in tried for row in launch_phases(t.launch, t.candidate.id)]


def launch_phases(launch: LaunchRecord, name: str = "") -> list[dict[str, Any]]:
    """Phases of one launch with their seconds, from the lines of its log as they came."""
    end = launch.ready_s or launch.ended_s or 0.0
    starts = [("importing", 0.0), *[(p, s) for p, s in launch.phases if p != "importing"]]
    rows = []
    for place, (phase, began) in enumerate(starts):
        until = starts[place + 1][1] if place + 1 < len(starts) else end
        if until - began > 0.005:
            rows.append({"launch": name or launch.name, "phase": phase.replace("_", " "), "seconds": until - began})
    return rows


def expected_rows(run: NotebookRun) -> list[dict[str, Any]]:
    """What the version's rules say of each candidate before it is launched."""
    params: SweepParams = run.params  # type: ignore[assignment]
    rows: list[dict[str, Any]] = []
    for candidate in params.candidates if not run.attached else []:
        handle = run.server(candidate.id, candidate.flags, candidate.environment, False)
        version = run.version(handle)
        gpu = next(iter(run.host()["gpus"]), None)
        sm = int(float(gpu["compute_cap"]) * 10) if gpu else None
        found = check_arguments(
            {"model_path": handle.params.model, "flags": handle.params.flags, "environment": handle.params.environment},
            version,
            Gpu(sm=sm, name=gpu["name"] if gpu else "none", amx="amx_tile" in run.host()["cpu_features"]),
            model_facts(run.checkpoint(handle)),
            strict=False,
        )
        if not found:
            rows.append({"candidate": candidate.id, "expected": "nothing known against it", "why": "", "source": ""})
        for one in found:
            rows.append(
                {
                    "candidate": candidate.id,
                    "expected": one.outcome.replace("_", " "),
                    "why": one.reason,
                    "source": one.source,
                }
            )
    return rows


def honoured_rows(run: NotebookRun, tried: Sequence[Tried]) -> list[dict[str, Any]]:
    """Each asked backend: what /server_info repeats, what the log shows, and how that is known."""
    rows = []
    for one in tried:
        log = run.log(one.launch)
        info = run.server_info(one.launch) or {}
        taken = {b.kind: b for b in log.backends} if log else {}
        for flag, asked in asked_backends(one.candidate.flags).items():
            backend = taken.get(flag)
            rows.append(
                {
                    "candidate": one.candidate.id,
                    "flag": flag,
                    "asked": asked,
                    "/server_info": info.get(flag, "(never answered)"),
                    "log": (backend.taken or "not known") if backend else "not known",
                    "known by": backend.known_by if backend else "not_known",
                }
            )
    return rows


def agreement_rows(tried: Sequence[Tried]) -> list[dict[str, Any]]:
    """Mean and largest difference from the reference for each candidate that serves."""
    return [
        {
            "candidate": t.candidate.id,
            "tokens": t.comparison.tokens,
            "mean difference": t.comparison.pooled,
            "mean |difference|": Measured(
                value=t.comparison.mean_absolute, unit="nat/token", n=t.comparison.tokens, reason="mean"
            ),
            "largest": Measured(value=t.comparison.largest, unit="nat", n=1, reason="largest single token"),
            "bit-identical": t.comparison.identical,
        }
        for t in tried
        if t.comparison
    ]


def model_facts(checkpoint: Checkpoint | None) -> ModelFacts | None:
    """What the argument rules need to know about a checkpoint; None where it isn't read or not understood."""
    if checkpoint is None or checkpoint.architecture is None:
        return None
    nvfp4 = checkpoint.quantization.weights_algo == "NVFP4"
    experts = "experts" in json.dumps(checkpoint.config)
    return ModelFacts(
        hybrid=checkpoint.architecture.recurrent_layers > 0,
        nvfp4_experts=nvfp4 and experts,
        nvfp4_dense=False if not nvfp4 else None if experts else True,
    )
