"""From the raw files of both arms to what they say: cells, traces, ratios, crossovers, answers, and how long it lasts.

A cell is one text at one concurrency on one launch. Everything here is computed from raw files alone, so a rebuild
without a server gives the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lib.load.bench_rows import level_of
from lib.load.metrics import Level, cached_tokens, client_verdict, failures, is_ok, request_times
from lib.params import SpeculativeParams
from lib.records import Measured, Record
from lib.results import Measurement, NotebookRun
from lib.server import acceptance, same_answers
from lib.server.acceptance import Acceptance, Decay, SpecCounts, Stuck, spec_counts
from lib.server.arms import Arms, Unit
from lib.server.same_answers import GreedyAgreement, ParameterFate, SampledAgreement
from lib.server.spec_trace import LaunchTrace, trace
from lib.server.speedup import Crossover, Speedup, compare_launches, crossover, predicted_ratio, step_cost

#: Prompt tokens from the cache may differ between arms by this share before their cache states count as different.
CACHE_SHARE = 0.05
#: Accept length that a text must usually have before decode lines at 1.00 are called stuck.
USUAL_LENGTH = 1.1


class Cell(Record):
    """One text at one concurrency on one launch; `problem` says why its speed can't be used."""

    unit: str
    treated: bool
    launch_id: str | None
    text: str
    concurrency: int
    rate: float | None
    token_s: float | None
    gap_s: float | None
    acceptance: Acceptance
    counts: list[SpecCounts] = []
    cached_frac: float | None
    workload: str | None
    seconds_per_token: dict[str, float]
    started: str
    client: str
    problem: str | None


def drafts_of(params: SpeculativeParams, info: Mapping[str, Any] | None) -> int | None:
    """Drafts before one verification: as the server resolved it, else as it was asked."""
    for source in (info or {}, params.flags):
        tokens = source.get("speculative_num_draft_tokens")
        steps = source.get("speculative_num_steps")
        if source.get("speculative_eagle_topk") == 1 and isinstance(steps, int):
            return steps
        if isinstance(tokens, int):
            return tokens - 1
    return None


def level_counts(level: Level) -> list[SpecCounts]:
    """The server's counts of each request of a level that succeeded."""
    made = []
    for record in level.requests:
        tokens = (record["usage"] or {}).get("completion_tokens")
        if is_ok(record) and tokens:
            made.append(spec_counts(record["meta"] or {}, int(tokens)))
    return made


def read_cell(unit: Unit, text: str, concurrency: int, measured: Measurement, drafts: int | None) -> Cell:
    """One cell from its raw level."""
    level = level_of(measured) if not measured.stamp.invalid else None
    common: dict[str, Any] = {
        "unit": unit.name,
        "treated": unit.treated,
        "launch_id": measured.stamp.launch_id,
        "text": text,
        "concurrency": concurrency,
        "started": measured.stamp.started,
    }
    if level is None:
        return Cell(
            rate=None, token_s=None, gap_s=None, acceptance=acceptance.pooled([]), cached_frac=None, workload=None,
            seconds_per_token={}, client="unknown", problem=measured.problem or "it left no record", **common,
        )  # fmt: skip
    view = level.view
    client = client_verdict(level)
    failed = failures(level)
    problem = measured.problem
    if failed:
        causes = ", ".join(f"{name}: {n}" for name, n in failed.items())
        problem = problem or f"{sum(failed.values())} of {len(level.requests)} requests failed ({causes})"
    if client.status == "client_bound":
        problem = problem or f"client bound: {'; '.join(client.reasons)}"
    latencies = view.token_latencies
    tokens = latencies[0] if not isinstance(latencies, str) else np.empty(0)
    gaps = view.gaps[0]
    cached = [cached_tokens(r) for r in view.ok]
    prompts = sum(int((r["usage"] or {}).get("prompt_tokens") or 0) for r in view.ok)
    known = all(c is not None for c in cached) and prompts > 0
    times = {r["id"]: request_times(r) for r in view.ok}
    return Cell(
        rate=view.output_tokens / view.wall_s if view.wall_s and view.output_tokens else None,
        token_s=float(tokens.mean()) if tokens.size else None,
        gap_s=float(gaps.mean()) if gaps.size else None,
        acceptance=acceptance.pooled(level_counts(level), drafts),
        counts=level_counts(level),
        cached_frac=sum(c or 0 for c in cached) / prompts if known else None,
        workload=level.header["workload"]["sha256"],
        seconds_per_token={
            i: t["e2e_s"] / t["output_tokens"] for i, t in times.items() if t["e2e_s"] and t["output_tokens"]
        },
        client=client.status,
        problem=problem,
        **common,
    )


class Comparison(Record):
    """Both arms on one text at one concurrency: speed ratio, latencies, acceptance, and what makes it invalid."""

    text: str
    concurrency: int
    speedup: Speedup
    base_token_s: Measured
    treated_token_s: Measured
    base_gap_s: Measured
    treated_gap_s: Measured
    base_rate: Measured
    treated_rate: Measured
    accept_length: Measured
    notes: list[str] = []
    launch_ids: list[str] = []


class LongRun(Record):
    """What a long run with speculation showed."""

    requests: int
    decay: Decay
    stuck: Stuck | None
    loops: list[str]
    max_usage: float | None
    launch_id: str | None


@dataclass
class Analysis:
    """Everything that the arms say."""

    cells: list[Cell] = field(default_factory=list)
    traces: list[LaunchTrace] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    crossovers: list[Crossover] = field(default_factory=list)
    acceptances: dict[str, Acceptance] = field(default_factory=dict)
    greedy: list[GreedyAgreement] = field(default_factory=list)
    floor: list[GreedyAgreement] = field(default_factory=list)
    sampled: SampledAgreement | None = None
    sampled_floor: SampledAgreement | None = None
    parameters: list[ParameterFate] = field(default_factory=list)
    long_run: LongRun | None = None
    drafts: int | None = None

    @property
    def invalid(self) -> list[str]:
        """What makes the whole experiment invalid, by launch."""
        return [f"{t.launch_id}: {p}" for t in self.traces for p in t.problems]

    @property
    def lossy(self) -> str | None:
        return next((t.lossy for t in self.traces if t.lossy), None)


def analyse(run: NotebookRun, arms: Arms) -> Analysis:
    """Reads all raw files of the arms."""
    params: SpeculativeParams = run.params  # type: ignore[assignment]
    ready = [u for u in arms.units if u.ready]
    treated = next((u for u in ready if u.treated), None)
    found = Analysis(drafts=drafts_of(params, run.server_info(treated.launch) if treated else None))
    for unit in ready:
        for (text, c), measured in unit.cells.items():
            found.cells.append(read_cell(unit, text, c, measured, found.drafts))
        found.traces += _traces(run, unit, found.drafts)
    found.traces = _one_process_each(found.traces)
    levels = dict.fromkeys((c.text, c.concurrency) for c in found.cells)
    found.comparisons = [_compare(params, found, text, c) for text, c in levels]
    for text in dict.fromkeys(t for t, _ in levels):
        ratios = {
            c.concurrency: c.speedup.ratio for c in found.comparisons if c.text == text and c.speedup.word != "invalid"
        }
        found.crossovers.append(crossover(text, ratios))
        counts = [n for x in found.cells if x.treated and x.text == text for n in x.counts]
        found.acceptances[text] = acceptance.pooled(counts, found.drafts)
    _answers(params, arms, found)
    usual = found.acceptances.get(next(iter(found.acceptances), ""))
    found.long_run = _long_run(run, arms, usual.length.value if usual else None)
    return found


def _traces(run: NotebookRun, unit: Unit, drafts: int | None) -> list[LaunchTrace]:
    params: SpeculativeParams = run.params  # type: ignore[assignment]
    made = []
    records = {r.launch_id: r for r in run.launch_records()}
    for launch_id in unit.launch_ids:
        record = records.get(launch_id, unit.launch)
        mine = [m for m in unit.measurements() if m.stamp.launch_id == launch_id and not m.stamp.invalid]
        counts: list[SpecCounts] = []
        for measured in mine:
            if (level := level_of(measured)) is not None:
                counts += level_counts(level)
            for name in ("greedy.json", "probes.json"):
                if (measured.folder / name).exists():
                    answers = [a for listed in measured.json(name).values() for a in listed]
                    counts += [spec_counts(a["meta_info"]) for a in answers]
        state = unit.state.json("state.json") if unit.state is not None and unit.state.ok else None
        checks = sum(len(m.stamp.checks) for m in mine)
        one = trace(
            launch_id,
            unit.treated,
            acceptance.pooled(counts, drafts),
            log=run.log(record),
            info=run.server_info(record),
            end=state,
            flags=params.flags if unit.treated else {},
            environment=record.environment,
            process=f"pid {record.pid}, started {record.pid_start_time}" if record.pid else None,
            identity_checks=checks,
            argv=record.argv,
        )
        wrong = [m.stamp.invalid for m in unit.measurements() if m.stamp.launch_id == launch_id and m.stamp.invalid]
        if wrong:
            one = one.model_copy(update={"problems": [*one.problems, f"identity: {wrong[0]}"]})
        made.append(one)
    return made


def _one_process_each(traces: Sequence[LaunchTrace]) -> list[LaunchTrace]:
    """Two launches that are one process are one server measured twice."""
    made: list[LaunchTrace] = []
    seen: dict[str, str] = {}
    for one in traces:
        if one.process and one.process in seen:
            problem = f"the process of launch {seen[one.process]} answered here too"
            one = one.model_copy(update={"problems": [*one.problems, problem]})
        elif one.process:
            seen[one.process] = one.launch_id
        made.append(one)
    return made


def _mean(values: Sequence[float | None], unit: str) -> Measured:
    known = [v for v in values if v is not None]
    if not known:
        return Measured(value=None, unit=unit, reason="not measured, or withheld")
    return Measured(value=sum(known) / len(known), unit=unit, n=len(known), reason="mean of the launches")


def _compare(params: SpeculativeParams, found: Analysis, text: str, c: int) -> Comparison:
    cells = [x for x in found.cells if (x.text, x.concurrency) == (text, c)]
    base, treated = ([x for x in cells if x.treated is arm] for arm in (False, True))
    good = {arm: [x for x in cells if x.treated is arm and x.problem is None and x.rate] for arm in (False, True)}
    notes = [f"{x.unit} is left out: {x.problem}" for x in cells if x.problem]
    notes += [f"the client was not calibrated for {x.unit}" for x in cells[:1] if x.client == "not_calibrated"]
    limits = [t.max_running for t in found.traces if t.treated and t.max_running]
    if limits and c > min(limits):
        notes.append(f"C={c} is above the {min(limits)} requests that the treated server runs at once: the rest wait")
    if found.lossy:
        notes.append(f"lossy: {found.lossy}")
    problems = _cell_problems(found, cells, treated, base)
    logs = _prompt_logs(good[False], good[True])
    speedup = compare_launches(
        [float(x.rate or 0) for x in good[False]],
        [float(x.rate or 0) for x in good[True]],
        params.no_difference_frac,
        logs,
    )
    if problems:
        reason = "; ".join(dict.fromkeys(problems))
        speedup = Speedup(
            word="invalid",
            reason=reason,
            ratio=Measured(value=None, unit="x", reason=reason),
            base_launches=len(good[False]),
            treated_launches=len(good[True]),
        )
    return Comparison(
        text=text,
        concurrency=c,
        speedup=speedup,
        base_token_s=_mean([x.token_s for x in good[False]], "s"),
        treated_token_s=_mean([x.token_s for x in good[True]], "s"),
        base_gap_s=_mean([x.gap_s for x in good[False]], "s"),
        treated_gap_s=_mean([x.gap_s for x in good[True]], "s"),
        base_rate=_mean([x.rate for x in good[False]], "tok/s"),
        treated_rate=_mean([x.rate for x in good[True]], "tok/s"),
        accept_length=acceptance.pooled([n for x in treated for n in x.counts], found.drafts).length,
        notes=notes,
        launch_ids=[x.launch_id for x in cells if x.launch_id],
    )


def _cell_problems(found: Analysis, cells: Sequence[Cell], treated: Sequence[Cell], base: Sequence[Cell]) -> list[str]:
    """Why a comparison is invalid; a failed request or a slow client only leaves a launch out."""
    mine = {x.launch_id for x in cells}
    problems = [f"{t.launch_id}: {p}" for t in found.traces if t.launch_id in mine for p in t.problems]
    for x in treated:
        if x.acceptance.requests and (not x.acceptance.verify_steps or x.acceptance.without_steps):
            n = x.acceptance.without_steps
            problems.append(f"{x.unit}: {n} of {x.acceptance.requests} requests without a verification step")
    problems += [
        f"{x.unit}, without speculation, counted {x.acceptance.verify_steps} verification steps"
        for x in base
        if x.acceptance.verify_steps
    ]
    hashes = {x.workload for x in cells if x.workload}
    if len(hashes) > 1:
        problems.append("the launches did not get the same prompts in the same order")
    shares = [x.cached_frac for x in cells if x.cached_frac is not None]
    if shares and max(shares) - min(shares) > CACHE_SHARE:
        problems.append(
            f"cache states differ: {min(shares):.0%} to {max(shares):.0%} of the prompts came from the cache"
        )
    return problems


def _prompt_logs(base: Sequence[Cell], treated: Sequence[Cell]) -> list[float]:
    """For each prompt log(speed with / without), means over the launches of each arm."""
    if not base or not treated:
        return []
    common = set.intersection(*(set(x.seconds_per_token) for x in (*base, *treated)))

    def mean(cells: Sequence[Cell], prompt: str) -> float:
        return sum(math.log(x.seconds_per_token[prompt]) for x in cells) / len(cells)

    return [mean(base, p) - mean(treated, p) for p in sorted(common)]


def pilot_rows(run: NotebookRun, base: Unit, treated: Unit) -> list[dict[str, Any]]:
    """Predictions from pilots on other prompts: each text's acceptance, and the cost of a step at each concurrency.

    The cost comes from the first text alone, acceptance from the smallest concurrency alone: what the model says of all
    other cells is a prediction.
    """
    params: SpeculativeParams = run.params  # type: ignore[assignment]
    drafts = drafts_of(params, run.server_info(treated.launch))
    pilots = {
        (unit.treated, text, c): read_cell(unit, text, c, measured, drafts)
        for unit in (base, treated)
        for (text, c), measured in unit.pilots.items()
    }
    kinds = list(dict.fromkeys(text for text, _ in treated.pilots))
    least = params.concurrency[0]
    rows = []
    for text in kinds:
        for c in params.concurrency:
            a, b = pilots.get((False, kinds[0], c)), pilots.get((True, kinds[0], c))
            own = pilots.get((True, text, least))
            length = own.acceptance.length.value if own else None
            at_cost = b.acceptance.length.value if b else None
            row: dict[str, Any] = {
                "text": text,
                "concurrency": c,
                "accept_length": length,
                "step_cost": None,
                "ratio": None,
            }
            if a is None or b is None or not a.token_s or not b.token_s:
                row["reason"] = "the pilots gave no latency: " + str(
                    (a and a.problem) or (b and b.problem) or "no record"
                )
            elif not isinstance(at_cost, float) or not isinstance(length, float):
                row["reason"] = "no verification step in the pilots"
            else:
                row["step_cost"] = step_cost(a.token_s, b.token_s, at_cost)
                row["ratio"] = predicted_ratio(length, row["step_cost"])
                row["reason"] = f"pilots of {base.launch.launch_id} and {treated.launch.launch_id}"
            rows.append(row)
    return rows


def divergences(run: NotebookRun, texts: Mapping[str, Any], base: Unit, treated: Unit) -> list[dict[str, Any]]:
    """The contexts at which greedy answers of the two arms part: prompt and what both had said until then."""
    if base.greedy is None or treated.greedy is None or not base.greedy.ok or not treated.greedy.ok:
        return []
    a, b = base.greedy.json("greedy.json"), treated.greedy.json("greedy.json")
    made = []
    for text in a:
        for number, (x, y) in enumerate(zip(a[text], b.get(text, []), strict=False)):
            place = same_answers.first_difference(x["output_ids"], y["output_ids"])
            if place is not None:
                ids = [*texts[text]["ids"][number], *x["output_ids"][:place]]
                made.append({"text": text, "request": number, "ids": ids})
    return made


def _outputs(unit: Unit | None, name: str) -> dict[str, list[list[int]]]:
    measured = unit and (unit.greedy if name == "greedy.json" else unit.probes)
    if not measured or not measured.ok:
        return {}
    return {key: [a["output_ids"] for a in listed] for key, listed in measured.json(name).items()}


def _answers(params: SpeculativeParams, arms: Arms, found: Analysis) -> None:
    base, treated = arms.of(False), arms.of(True)
    if not base or not treated:
        return
    tops: dict[str, dict[int, Any]] = {}
    if arms.tops is not None and arms.tops.ok:
        for row in arms.tops.json("tops.json"):
            tops.setdefault(row["text"], {})[row["request"]] = row["top"]
    a, b = _outputs(base[0], "greedy.json"), _outputs(treated[0], "greedy.json")
    again = _outputs(base[1], "greedy.json") if len(base) > 1 else {}
    for text in a:
        if len(a[text]) == len(b.get(text, [])):
            found.greedy.append(
                same_answers.compare_greedy(text, a[text], b[text], tops.get(text, {}), params.tie_nats)
            )
        if len(a[text]) == len(again.get(text, [])):
            found.floor.append(same_answers.compare_greedy(text, a[text], again[text], {}, params.tie_nats))
    probes = {arm: [_outputs(u, "probes.json") for u in units] for arm, units in ((False, base), (True, treated))}
    free = {arm: [ids for p in probes[arm] for ids in p.get("free", [])] for arm in (False, True)}
    if params.samples:
        found.sampled = same_answers.compare_samples(free[False], free[True], params.seed)
        if len(base) > 1:
            halves = [p.get("free", []) for p in probes[False][:2]]
            found.sampled_floor = same_answers.compare_samples(halves[0], halves[1], params.seed)
        x, y = probes[False][0], probes[True][0]
        found.parameters = [same_answers.judge_min_p(x, y)]
        names = [n for n in (*x, *y) if n.endswith("_penalty")]
        found.parameters += [same_answers.judge_penalty(n, x, y) for n in dict.fromkeys(names)]


def _long_run(run: NotebookRun, arms: Arms, usual: Any) -> LongRun | None:
    """The long run of the last treated launch; `usual` is the accept length of the same text in the levels.

    Where next to nothing is accepted anyway, decode lines without an accepted draft are no sign of S4.
    """
    unit = next((u for u in arms.units if u.long_run is not None), None)
    if unit is None or unit.long_run is None:
        return None
    level = level_of(unit.long_run)
    if level is None:
        return None
    done = sorted((r for r in level.requests if is_ok(r)), key=lambda r: r["end_ns"])
    lengths = []
    for record in done:
        counts = spec_counts(record["meta"] or {}, int(record["usage"]["completion_tokens"]))
        if counts.verify_steps:
            lengths.append(counts.completion_tokens / counts.verify_steps)
    loops = [
        f"{r['id']} ends in {char!r} repeated" for r in done if (char := acceptance.text_loop(r.get("text") or ""))
    ]
    records = {r.launch_id: r for r in run.launch_records()}
    log = run.log(records.get(unit.long_run.stamp.launch_id or "", unit.launch))
    decode = [b for b in log.batches.series if b.kind == "decode"] if log else []
    usage = [(b.line_no, b.accept_len, b.full_usage if b.full_usage is not None else b.usage) for b in decode]
    return LongRun(
        requests=len(done),
        decay=acceptance.decay(lengths),
        stuck=acceptance.stuck(usage) if isinstance(usual, float) and usual > USUAL_LENGTH else None,
        loops=loops,
        max_usage=max((u for _, _, u in usage if u is not None), default=None),
        launch_id=unit.long_run.stamp.launch_id,
    )
