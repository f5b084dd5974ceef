"""Notebook 05's verdicts (allocated, floors, effects, losses, tasks, fidelity, affordable, worth it) and its recommendation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lib.audit.arms import FLOORS, Audit
from lib.audit.compare import ScoreComparison, judge_comparison, judge_effect
from lib.audit.decision import (
    judge_affordable,
    judge_worth,
    throughput,
    throughput_ratio,
)
from lib.audit.kv import asked_dtype, audit_report, resolved_rows
from lib.audit.probes import NOT_A_NUMBER
from lib.deploy.build import COARSEST
from lib.params import ArmParams
from lib.records import OUTCOMES, Measured, Prediction, Status, Verdict
from lib.server.sweep import failed_launch


def verdicts(a: Audit, predicted: Sequence[Prediction]) -> list[Verdict]:
    """Allocated as predicted; bytes and tokens as predicted; audit clean; floor; the loss of each arm; affordable."""
    made: list[Verdict] = []
    for dtype in a.dtypes:
        launch = a.launches[dtype]
        if launch.ready_s is None and not a.run.attached:
            outcome, reason, evidence = failed_launch(a.run, launch)
            made.append(
                Verdict(
                    id=f"starts-{dtype}",
                    claim=f"The server starts with a {dtype} KV cache",
                    status=OUTCOMES[outcome],
                    reason=reason,
                    evidence=[evidence],
                    launch_ids=[launch.launch_id],
                    rule="lib.server.failures",
                )
            )
            continue
        made.append(_allocated(a, dtype))
        made.append(_audit_verdict(a, dtype))
        made += [v for v in (_finite_verdict(a, dtype),) if v is not None]
    made += [_as_predicted(a, p) for p in predicted]
    made.append(_floor_verdict(a))
    made += [_more_floor(a, name) for name in FLOORS[1:] if name in a.floors]
    for dtype in a.dtypes:
        made += [v for v in (_probe_verdict(a, dtype), _predicted_fault(a, dtype)) if v is not None]
    if not a.run.attached:
        for dtype in a.dtypes[1:]:
            made += [_effect_verdict(a, dtype), _loss_verdict(a, dtype)]
            made += [v for v in (_task_verdict(a, dtype),) if v is not None]
        if {"fp8_e4m3", "fp8_e5m2"} <= set(a.dtypes):
            made.append(_order_verdict(a))
        for dtype in a.dtypes[1:]:
            made += [_affordable(a, dtype), _worth(a, dtype)]
    return made


def _finite_verdict(a: Audit, dtype: str) -> Verdict | None:
    """Whether everything that an arm's server computed is a number; None where it was asked for nothing.

    A pool whose values leave the range of its dtype (too small a scale, or none) gives NaN on CUDA: log-probabilities come
    as NaN without an error, and the first sampled token may kill the server.
    """
    taken = a.scores.get(dtype, [])
    if not taken:
        return None
    told = next((m for m in taken if m.problem and NOT_A_NUMBER in m.problem), None)
    common: dict[str, Any] = {
        "id": f"finite-{dtype}",
        "claim": f"Every log-probability that {dtype} gives is a number",
        "limit": "no NaN and no missing value",
        "rule": "lib.audit.probes",
        "launch_ids": a.launch_ids(dtype),
    }
    if told is not None:
        where = [a.run.evidence(told.folder / "stamp.json")]
        reason = f"{told.problem}; a checkpoint's scales may be too small for its keys and values"
        return Verdict(status=Status.FAIL, reason=reason, evidence=where, **common)
    if all(m.ok for m in taken):
        evidence = a.evidence(dtype)
        return (
            Verdict(status=Status.PASS, reason=f"{len(taken)} passes over all texts", evidence=evidence, **common)
            if evidence
            else None
        )
    return None  # another problem: the verdicts on the effect name it


def _allocated(a: Audit, dtype: str) -> Verdict:
    launch, pool = a.launches[dtype], a.pool(dtype)
    row = next(r for r in resolved_rows(a) if r["arm"] == dtype)
    common: dict[str, Any] = {
        "id": f"allocated-{dtype}",
        "claim": f"Asked for {asked_dtype(a, dtype)}, the server allocates the KV cache that this version's rules predict",
        "limit": f"{row['predicted']}",
        "rule": "lib.model.quantization.resolve_kv_cache_dtype",
        "launch_ids": [launch.launch_id],
        "predicted": Measured(value=str(row["predicted"]), reason="computed"),
    }
    if pool is None or pool.dtype is None:
        return Verdict(status=Status.INCONCLUSIVE, reason="no log line tells the allocated dtype", **common)
    allocated = pool.dtype.removeprefix("torch.")
    same = allocated == str(row["predicted"]).removeprefix("torch.")
    return Verdict(
        status=Status.INCONCLUSIVE if row["predicted"] == "not known" else Status.PASS if same else Status.FAIL,
        measured=Measured(value=allocated, reason="read"),
        reason=f"allocated: {allocated}; {row['why']}",
        evidence=[a.run.evidence(a.run.log_file(launch), pool.line_no, pool.line)],
        **common,
    )


def _audit_verdict(a: Audit, dtype: str) -> Verdict:
    report = audit_report(a, dtype)
    launch = a.launches[dtype]
    common: dict[str, Any] = {
        "id": f"audit-{dtype}",
        "claim": f"Nothing in the configuration with {dtype} lowers accuracy silently",
        "rule": "docs/rules.md",
        "limit": "no finding of level warning or error",
        "launch_ids": [launch.launch_id],
    }
    if report is None:
        return Verdict(status=Status.INCONCLUSIVE, reason="nothing could be read", **common)
    heavy = [f for f in report.findings if f.level != "info"]
    evidence = [e for f in (heavy or report.fine) for e in f.evidence][:6]
    measured = Measured(
        value=len(heavy), unit="findings", n=len(report.findings) + len(report.fine), reason="rules answered"
    )
    if heavy:
        words = "; ".join(f"{f.id} ({f.level}): {f.what}" for f in heavy)
        return Verdict(
            status=Status.FAIL,
            measured=measured,
            reason=words,
            evidence=evidence or [a.run.evidence(a.run.log_file(launch))],
            **common,
        )
    serious = [n.id for n in report.not_checked if str(n.severity) in ("high", "critical")]
    if serious or not report.fine:
        return Verdict(
            status=Status.INCONCLUSIVE,
            measured=measured,
            reason=f"nothing found, but not everything could be checked: {', '.join(serious)}",
            evidence=evidence,
            **common,
        )
    return Verdict(status=Status.PASS, measured=measured, reason=report.answer, evidence=evidence, **common)


def _as_predicted(a: Audit, p: Prediction) -> Verdict:
    dtype = p.id.split("-", 1)[1]
    launch = a.launches.get(dtype)
    common: dict[str, Any] = {
        "id": f"predicted-{p.id}",
        "claim": f"Predicted from the checkpoint: {p.what}",
        "predicted": p.predicted,
        "measured": p.measured,
        "limit": "within 1%, or within the rounding of the log",
        "rule": p.source,
        "launch_ids": [launch.launch_id] if launch else [],
    }
    predicted, measured = p.predicted.value, p.measured.value if p.measured else None
    if (
        not isinstance(predicted, (int, float))
        or not isinstance(measured, (int, float))
        or launch is None
        or p.measured is None
    ):
        return Verdict(
            status=Status.INCONCLUSIVE,
            reason=(p.predicted.reason if predicted is None else p.measured.reason if p.measured else None)
            or "not measured",
            **common,
        )
    low = min(measured * 0.99, p.measured.low if p.measured.low is not None else measured)
    high = max(measured * 1.01, p.measured.high if p.measured.high is not None else measured)
    if (high - low) / 2 > COARSEST * predicted:
        return Verdict(
            status=Status.INCONCLUSIVE,
            reason=f"the log's rounding leaves {low:.4g} to {high:.4g}: too coarse here",
            **common,
        )
    pool = a.pool(dtype)
    evidence = [a.run.evidence(a.run.log_file(launch), pool.line_no if pool else None, pool.line if pool else None)]
    return Verdict(
        status=Status.PASS if low <= predicted <= high else Status.FAIL,
        reason=f"measured / predicted = {measured / predicted:.4f}",
        evidence=evidence,
        **common,
    )


def _floor_verdict(a: Audit) -> Verdict:
    common: dict[str, Any] = {
        "id": "floor",
        "claim": f"The same server ({a.reference}) gives the same log-probabilities twice: the noise floor is known",
        "rule": "lib.audit.compare",
        "limit": f"mean |difference| at most a tenth of {a.params.limit_nats:g} nat/token",
        "launch_ids": a.launch_ids(a.reference),
    }
    found = a.compared(a.reference)
    if found is None:
        return _unusable(a, (a.reference,), common)
    measured = Measured(
        value=found.mean_absolute, unit="nat/token", n=found.tokens, reason="mean |difference|, the same server twice"
    )
    status = Status.PASS if found.mean_absolute <= a.params.limit_nats / 10 else Status.INCONCLUSIVE
    words = "bit-identical" if found.identical else f"largest single difference {found.largest:+.4f} nat"
    return Verdict(status=status, measured=measured, reason=words, evidence=a.evidence(a.reference), **common)


def _more_floor(a: Audit, name: str) -> Verdict:
    """The reference after a restart, or with other requests beside it, against itself alone."""
    words = {"restarted": "after a restart", "loaded": f"with {a.params.load_streams} other requests running"}[name]
    taken = a.floors[name]
    common: dict[str, Any] = {
        "id": f"floor-{name}",
        "claim": f"The reference {words} gives the log-probabilities that it gave before",
        "rule": "lib.audit.compare.judge_effect",
        "limit": "bit-identical, or no mean difference told apart from 0",
        "launch_ids": taken.launch_ids,
    }
    found = a.floor_of(name)
    if found is None:
        return Verdict(status=Status.INCONCLUSIVE, reason=taken.problem or "not measured", **common)
    evidence = [a.run.evidence(f) for f in sorted(taken.folder.glob("*.json")) if f.name != "stamp.json"]
    measured = Measured(value=found.mean_absolute, unit="nat/token", n=found.tokens, reason="mean |difference|")
    if found.identical:
        return Verdict(status=Status.PASS, measured=measured, reason="bit-identical", evidence=evidence, **common)
    shifted = found.effect.found in ("loss", "gain")
    reason = f"{found.effect.found}: {found.effect.reason}; an arm's effect has to exceed this"
    return Verdict(
        status=Status.FAIL if shifted else Status.PASS, measured=measured, reason=reason, evidence=evidence, **common
    )


def _probe_verdict(a: Audit, dtype: str) -> Verdict | None:
    found, taken = a.probe(dtype), a.probes.get(dtype)
    if taken is None:
        return None
    common: dict[str, Any] = {
        "id": f"fidelity-{dtype}",
        "claim": f"Reading its own KV cache costs the {dtype} server nothing (probe of one running server)",
        "limit": f"at most {a.params.probe_limit_nats:g} nat/token",
        "rule": "lib.audit.fidelity",
        "launch_ids": taken.launch_ids,
    }
    if found is None:
        return Verdict(status=Status.INCONCLUSIVE, reason=taken.problem or "not measured", **common)
    status = {"clean": Status.PASS, "fault": Status.FAIL, "not_run": Status.UNSUPPORTED, "blind": Status.UNSUPPORTED}
    part = next((c for c in (found.decode, found.prefix) if c and c.outcome == "fault"), found.prefix)
    return Verdict(
        status=status.get(found.outcome, Status.INCONCLUSIVE),
        measured=part.cost if part else None,
        reason=found.answer,
        evidence=[a.run.evidence(taken.folder / "probe.json")],
        **common,
    )


#: Rules that predict a scaling fault of the cache from tensors, version, model class and backend (docs/rules.md).
FAULT_RULES = ("KV3", "KV8")


def _predicted_fault(a: Audit, dtype: str) -> Verdict | None:
    """The audit's prediction of a scaling fault beside what the probe measured; None where the probe could not see."""
    probe, report = a.probe(dtype), audit_report(a, dtype)
    if probe is None or report is None or probe.outcome not in ("clean", "fault"):
        return None
    predicted = [f for f in report.findings if f.id in FAULT_RULES]
    unknown = [n.id for n in report.not_checked if n.id in FAULT_RULES]
    common: dict[str, Any] = {
        "id": f"predicted-fault-{dtype}",
        "claim": f"The audit's prediction of a scaling fault of the {dtype} cache agrees with the probe",
        "limit": f"{', '.join(FAULT_RULES)} found, and the probe measures a fault; or neither",
        "rule": ", ".join(FAULT_RULES),
        "launch_ids": a.launch_ids(dtype),
        "predicted": Measured(
            value="fault" if predicted else "no fault", reason="; ".join(f.what for f in predicted) or "no rule"
        ),
        "measured": Measured(value=probe.outcome, reason="cache probe"),
        "evidence": [
            a.run.evidence(a.probes[dtype].folder / "probe.json"),
            *(e for f in predicted for e in f.evidence[:2]),
        ],
    }
    if unknown and not predicted:
        return Verdict(status=Status.INCONCLUSIVE, reason=f"{', '.join(unknown)} could not be checked", **common)
    agree = bool(predicted) == (probe.outcome == "fault")
    reason = f"predicted: {'; '.join(f.id for f in predicted) or 'nothing'}; measured: {probe.answer}"
    return Verdict(status=Status.PASS if agree else Status.FAIL, reason=reason, **common)


def _effect_verdict(a: Audit, dtype: str) -> Verdict:
    common: dict[str, Any] = {
        "id": f"effect-{dtype}",
        "claim": f"On this text {dtype} computes exactly what {a.reference} computes",
        "limit": "bit-identical: pass; a mean told apart from 0 and from the floor: fail; else inconclusive",
        "rule": "lib.audit.compare.judge_effect",
        "launch_ids": a.launch_ids(a.reference, dtype),
    }
    found = a.compared(dtype)
    if found is None or a.floor is None:
        return _unusable(a, (a.reference, dtype), common)
    evidence = [*a.evidence(a.reference)[:1], *a.evidence(dtype)]
    if missing := _no_trace(a, dtype):
        return Verdict(status=Status.INVALID, reason=missing, **common)
    effect, reason = judge_effect(found, a.known_floors())
    words = f"{effect}: {reason}; mean |difference| {found.mean_absolute:.4f}, noise floor {a.floor:.4f} nat/token"
    status = {"identical": Status.PASS, "loss": Status.FAIL, "gain": Status.FAIL}.get(effect, Status.INCONCLUSIVE)
    return Verdict(status=status, measured=found.pooled, reason=words, evidence=evidence, **common)


def _order_verdict(a: Audit) -> Verdict:
    """E5M2 against E4M3, paired token by token: 2 bits of mantissa should cost more than 3."""
    common: dict[str, Any] = {
        "id": "order-fp8_e5m2-fp8_e4m3",
        "claim": "fp8_e5m2 (2 bits of mantissa) loses more than fp8_e4m3 (3 bits) on these texts",
        "limit": "the interval of their paired difference lies below 0",
        "rule": "lib.audit.compare",
        "launch_ids": a.launch_ids("fp8_e4m3", "fp8_e5m2"),
    }
    taken = [a.scores.get(d) for d in ("fp8_e4m3", "fp8_e5m2")]
    found = a.compare(taken[0][0], taken[1][0], "fp8_e5m2") if taken[0] and taken[1] else None
    if found is None:
        return _unusable(a, ("fp8_e4m3", "fp8_e5m2"), common)
    low, high = found.pooled.low, found.pooled.high
    status = Status.INCONCLUSIVE
    if low is not None and high is not None:
        status = Status.PASS if high < 0 else Status.FAIL if low > 0 else Status.INCONCLUSIVE
    return Verdict(
        status=status,
        measured=found.pooled,
        reason=f"fp8_e5m2 minus fp8_e4m3, paired: {found.effect.reason}",
        evidence=[*a.evidence("fp8_e4m3"), *a.evidence("fp8_e5m2")],
        **common,
    )


def _task_verdict(a: Audit, dtype: str) -> Verdict | None:
    if dtype not in a.tasks:
        return None
    common: dict[str, Any] = {
        "id": f"tasks-{dtype}",
        "claim": f"{dtype} does at depth what {a.reference} does (agent tasks, paired by item)",
        "limit": "exact McNemar over the items that both can do at shallow depth, p < 0.05",
        "rule": "lib.audit.tasks",
        "launch_ids": a.launch_ids(a.reference, dtype),
    }
    results = a.task_results(dtype)
    total = next((r for r in results if r.family == "all"), None)
    if total is None:
        why = a.tasks[dtype].problem or "the model does none of the tasks even at shallow depth"
        return Verdict(status=Status.INCONCLUSIVE, reason=why, **common)
    skipped = [r.family for r in results if r.outcome == "skipped"]
    status = {"lost": Status.FAIL, "none_seen": Status.PASS}.get(total.outcome, Status.INCONCLUSIVE)
    return Verdict(
        status=status,
        measured=Measured(value=total.deep_b, unit="items", n=total.usable, reason=f"right of {total.items}; reference {total.deep_a}"),
        reason=total.reason + (f"; skipped because the model can't do them: {', '.join(skipped)}" if skipped else ""),
        evidence=[a.run.evidence(a.tasks[d].folder / "answers.jsonl") for d in (a.reference, dtype)],
        **common,
    )  # fmt: skip


def _no_trace(a: Audit, dtype: str) -> str | None:
    """Why nothing was compared: no trace of the treatment on the server that was asked for it; else None."""
    arm = a.arms.get(dtype)
    if arm is not None:
        return _no_trace_of_arm(a, arm)
    one, other = a.pool(a.reference), a.pool(dtype)
    if one is None or other is None or one.dtype is None or other.dtype is None:
        return "which dtype an arm allocated is not known, so nothing shows that the arms differ"
    return f"both arms allocated {one.dtype}: nothing was compared" if one.dtype == other.dtype else None


def _no_trace_of_arm(a: Audit, arm: ArmParams) -> str | None:
    """Every flag of the arm as /server_info has it, an edited checkpoint by its path."""
    infos = [a.run.server_info(a.launches[d]) or {} if d in a.launches else {} for d in (a.reference, arm.id)]
    if not all(infos):
        return "one of the servers said nothing about itself, so nothing shows that the arms differ"
    wrong = [f"{n}: asked {v}, resolved {infos[1].get(n)}" for n, v in arm.flags.items() if infos[1].get(n) != v]
    if arm.checkpoint and infos[0].get("model_path") == infos[1].get("model_path"):
        wrong.append("both served the same checkpoint")
    if wrong:
        return f"the treatment left no trace: {'; '.join(wrong)}"
    if not arm.flags and not arm.checkpoint and not arm.environment:
        return "this arm changes nothing"
    same = [n for n in arm.flags if n not in (infos[0] or {}) or infos[0][n] != infos[1][n]]
    return (
        None if same or arm.checkpoint or arm.environment else "the reference has the same flags: nothing was compared"
    )


def _loss_verdict(a: Audit, dtype: str) -> Verdict:
    common: dict[str, Any] = {
        "id": f"loss-{dtype}",
        "claim": f"{dtype} loses no more than the accepted log-probability against {a.reference}",
        "limit": f"loss at most {a.params.limit_nats:g} nat/token",
        "rule": "lib.audit.compare.judge_comparison",
        "launch_ids": a.launch_ids(a.reference, dtype),
    }
    found, floor = a.compared(dtype), a.compared(a.reference)
    if found is None or floor is None:
        return _unusable(a, (a.reference, dtype), common)
    outcome, reason = judge_comparison(found, a.known_floors(), a.params.limit_nats)
    if missing := _no_trace(a, dtype):
        outcome, reason = "no_trace_of_treatment", missing
    else:
        reason = f"{reason}; {_worst(found)}"
    evidence = [*a.evidence(a.reference)[:1], *a.evidence(dtype)]
    return Verdict(status=OUTCOMES[outcome], measured=found.decisive, reason=reason, evidence=evidence, **common)


def _worst(found: ScoreComparison) -> str:
    """The bucket that loses most, with its own interval (not corrected for looking at several)."""
    worst = min(found.buckets, key=lambda b: float(b.mean.value) if isinstance(b.mean.value, (int, float)) else 0.0)
    ends = (
        f" [{worst.mean.low:+.4f}, {worst.mean.high:+.4f}]"
        if worst.mean.low is not None and worst.mean.high is not None
        else ""
    )
    mean = f"{worst.mean.value:+.4f}" if isinstance(worst.mean.value, (int, float)) else "unknown"
    return f"worst positions {worst.first} to {worst.last}: {mean}{ends}"


def _unusable(a: Audit, dtypes: Sequence[str], common: Mapping[str, Any]) -> Verdict:
    for dtype in dtypes:
        if a.usable(dtype) and (blind := a.blind(dtype)):
            return Verdict(status=Status.INVALID, reason=blind, **common)
    taken = [m for d in dtypes for m in a.scores.get(d, [])]
    invalid = next((m.stamp.invalid for m in taken if m.stamp.invalid), None)
    problem = next((m.problem for m in taken if m.problem), "an arm has no scores: its server did not start")
    return Verdict(status=Status.INVALID if invalid else Status.INCONCLUSIVE, reason=problem, **common)


def _affordable(a: Audit, dtype: str) -> Verdict:
    """What the reference's precision costs beside a cheaper arm: tokens in both pools, throughput of both servers."""
    reference, other = a.pool(a.reference), a.pool(dtype)
    checkpoint = a.run.checkpoint(a.handles[a.reference])
    common: dict[str, Any] = {
        "id": f"affordable-{a.reference}-{dtype}",
        "claim": f"We can afford {a.reference} instead of {dtype}: it holds what is needed, and is not too slow",
        "limit": f"tokens in the pool >= needed; throughput at least {1 - a.params.limit_throughput_frac:g} of {dtype}'s",
        "rule": "lib.audit.decision.judge_affordable",
        "launch_ids": a.launch_ids(a.reference, dtype),
    }
    log = a.run.log(a.launches[a.reference]) if a.reference in a.launches else None
    context = log.capacity.context_len if log and log.capacity else (checkpoint.context_length if checkpoint else None)
    needed = a.params.needed_tokens or context
    if reference is None or needed is None or not a.usable(a.reference):
        return Verdict(
            status=Status.INCONCLUSIVE, reason="the server did not come up, or no context length is known", **common
        )
    capped = reference.tokens == a.handles[a.reference].params.flags.get("max_total_tokens")
    before = throughput(a.costs.get(a.reference))
    after = throughput(a.costs.get(f"{a.reference}-restarted"))
    ratio = throughput_ratio(_both(before, after), throughput(a.costs.get(dtype)))
    memory = f"; {dtype} holds {other.tokens:,}" if other else ""
    outcome, reason = judge_affordable(reference.tokens, capped, needed, ratio, a.params.limit_throughput_frac, memory)
    evidence = [a.run.evidence(a.run.log_file(a.launches[a.reference]), reference.line_no, reference.line)]
    for name in (a.reference, dtype):
        taken = a.costs.get(name)
        evidence += [a.run.evidence(f) for f in sorted(taken.folder.glob("level-*.jsonl"))] if taken else []
    return Verdict(
        status=OUTCOMES[outcome],
        measured=Measured(value=reference.tokens / needed, unit="x", n=1, reason="tokens in the pool / tokens needed"),
        reason=reason,
        evidence=evidence,
        **common,
    )


def _both(before: Measured, after: Measured) -> Measured:
    """The reference's throughput before and after the other arms, as one figure whose interval spans both."""
    values = [m for m in (before, after) if isinstance(m.value, (int, float))]
    if len(values) < 2:
        return values[0] if values else before
    ends = [x for m in values for x in (m.low, m.high, m.value) if isinstance(x, (int, float))]
    mean = (float(before.value or 0) + float(after.value or 0)) / 2
    return Measured(
        value=mean, unit="tok/s", n=2, low=min(ends), high=max(ends), reason="before and after the other arms"
    )


def _worth(a: Audit, dtype: str) -> Verdict:
    """What the reference's precision brings against a cheaper arm, in nats and in task items."""
    common: dict[str, Any] = {
        "id": f"worth-{a.reference}-{dtype}",
        "claim": f"{a.reference} instead of {dtype} is worth it: {dtype} loses more than is accepted, or loses task items",
        "limit": f"loss above {a.params.limit_nats:g} nat/token, or items lost by exact McNemar",
        "rule": "lib.audit.decision.judge_worth",
        "launch_ids": a.launch_ids(a.reference, dtype),
    }
    found = a.compared(dtype)
    if found is None:
        return _unusable(a, (a.reference, dtype), common)
    if missing := _no_trace(a, dtype):
        return Verdict(status=Status.INVALID, reason=missing, **common)
    loss, _ = judge_comparison(found, a.known_floors(), a.params.limit_nats)
    if loss == "reference_suspect":
        reason = f"{dtype} predicts real text better than {a.reference}: the reference is the suspect, see its audit and probe"
        return Verdict(status=Status.INVALID, measured=found.decisive, reason=reason, **common)
    tasks = next((r.outcome for r in a.task_results(dtype) if r.family == "all"), None)
    outcome, reason = judge_worth((loss, found.decisive), tasks, a.params.limit_nats)
    evidence = [*a.evidence(a.reference)[:1], *a.evidence(dtype)]
    return Verdict(status=OUTCOMES[outcome], measured=found.decisive, reason=reason, evidence=evidence, **common)


def recommendation(a: Audit, made: Sequence[Verdict]) -> str:
    """Which arm to serve with: only what measured clean is named, each with its cost; a faulty cache is never recommended."""
    by_id = {v.id: v for v in made}
    status = {v.id: v.status for v in made}
    if a.run.attached:
        probe = by_id.get("fidelity-attached")
        found = f" Its cache probe: {probe.reason}" if probe else ""
        return f"The attached server was read, not compared: launch both dtypes on this host to measure what the cache costs.{found}"
    no_numbers = [d for d in a.dtypes if status.get(f"finite-{d}") == Status.FAIL]
    wrong = [d for d in a.dtypes if status.get(f"fidelity-{d}") == Status.FAIL and d not in no_numbers]
    faulty = [*no_numbers, *wrong]
    warning = f"Never serve with {', '.join(no_numbers)}: it computes NaN. " if no_numbers else ""
    warning += f"Never serve with {', '.join(wrong)}: reading the KV cache is wrong there. " if wrong else ""
    if status.get("floor") != Status.PASS:
        return f"{warning}Nothing is settled: the reference's own noise floor is not known, or too high."
    parts = [_arm_words(a, d, by_id) for d in a.dtypes[1:] if d not in faulty]
    if a.reference in faulty:
        clean = [d for d in a.dtypes if status.get(f"fidelity-{d}") == Status.PASS]
        cures = ", ".join(f"{d} ({_price(a, d)})" for d in clean) or "none of the arms that were tried"
        return f"{warning}Measured clean by their own probe: {cures}."
    sound = status.get(f"allocated-{a.reference}") == Status.PASS and status.get(f"audit-{a.reference}") != Status.FAIL
    end = (
        f"serve with {a.reference} ({_price(a, a.reference)})"
        if sound
        else f"{a.reference} has findings of its own: settle them before serving"
    )
    return f"{warning}{'; '.join([*parts, f'until more is measured, {end}'])}."


def _arm_words(a: Audit, dtype: str, by_id: Mapping[str, Verdict]) -> str:
    loss, worth = by_id.get(f"loss-{dtype}"), by_id.get(f"worth-{a.reference}-{dtype}")
    price = _price(a, dtype)
    if loss is None or loss.status not in (Status.PASS, Status.FAIL):
        return f"the loss of {dtype} is not settled"
    if loss.status == Status.FAIL:
        return f"{dtype} loses more than is accepted ({price})"
    audited = by_id.get(f"audit-{dtype}")
    findings = ", but its audit has findings: read them first" if audited and audited.status == Status.FAIL else ""
    lost = ", but task items are lost" if worth is not None and worth.status == Status.PASS else ""
    return f"{dtype} stays within the accepted loss ({price}){findings}{lost}"


def _price(a: Audit, dtype: str) -> str:
    pool, speed = a.pool(dtype), throughput(a.costs.get(dtype))
    tokens = f"{pool.tokens:,} tokens in the pool" if pool else "pool not known"
    return tokens + (f", {speed.value:.0f} tok/s" if isinstance(speed.value, (int, float)) else "")
