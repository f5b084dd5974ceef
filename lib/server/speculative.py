"""Notebook 04: was speculation on, does it pay, are the answers the same, does it last? Tables and verdicts.

The measuring is in `arms`, what the raw files say in `spec_analysis`, recorded and published runs in `recorded_arms`;
this module asks for them in the notebook's order and words the answers. An arm without a trace of its treatment proves
nothing, whatever its throughput.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lib.params import SpeculativeParams
from lib.records import OUTCOMES, Evidence, Measured, Prediction, Status, Trial, Verdict
from lib.results import Measurement, NotebookRun, Stamp
from lib.server import arms as measuring
from lib.server import recorded_arms, spec_analysis
from lib.server.arms import Arms, Unit
from lib.server.flags import Gpu, ModelFacts, check_arguments, nextn
from lib.server.launch import LaunchRecord
from lib.server.nextn_forms import fate, form_rows, memory_rows
from lib.server.recorded_arms import ArmComparison, Published, Recorded
from lib.server.same_answers import GreedyAgreement
from lib.server.spec_analysis import Analysis, Comparison
from lib.server.spec_trace import LaunchTrace
from lib.server.speedup import WORDS, predicted_ratio
from lib.server.sweep import failed_launch, launch_phases, model_facts

#: A prediction is right if the whole measured interval lies within this share of it.
PREDICTION_TOLERANCE = 0.15
#: Sampled answers: below this p-value the distributions differ.
P_LIMIT = 0.01
#: With random splits this far apart on average the sampled tokens are almost all different: the test sees nothing.
NO_POWER_DISTANCE = 0.8


def _params(run: NotebookRun) -> SpeculativeParams:
    return run.params  # type: ignore[return-value]


def _words(text: str) -> str:
    return text.replace("_", " ")


# what we expect ------------------------------------------------------------------------------------------------------


def expectation(run: NotebookRun) -> list[Prediction]:
    """Predictions from params, frozen as a raw record before any server is launched; without a measurement yet."""
    params = _params(run)
    if params.expected is None and not run.offline:
        return []
    if run.offline and not (run.raw / "expectation-params" / "stamp.json").exists():
        return []
    taken = measuring.frozen(run, "params", lambda: _expected_rows(params))
    return _predictions(taken, "params", {})


def _expected_rows(params: SpeculativeParams) -> list[dict[str, Any]]:
    asked = params.expected
    if asked is None:
        return []
    return [
        {
            "text": text,
            "concurrency": params.concurrency[0],
            "accept_length": asked.accept_length.get(text),
            "verify_cost": asked.verify_cost,
            "draft_cost": asked.draft_cost,
            "step_cost": asked.verify_cost + asked.draft_cost,
            "ratio": predicted_ratio(asked.accept_length[text], asked.verify_cost, asked.draft_cost)
            if text in asked.accept_length
            else None,
            "reason": asked.source if text in asked.accept_length else "no accept length is expected in params",
        }
        for text in params.texts
    ]


def _predictions(taken: Measurement, name: str, measured: Mapping[tuple[str, int], Measured]) -> list[Prediction]:
    rows = json.loads((taken.folder / "expectation.json").read_text())
    made = []
    for row in rows:
        text, c = row["text"], row["concurrency"]
        cost = f"a step costs {row['step_cost']:.2f} decode steps" if row["step_cost"] else ""
        if row.get("draft_cost") is not None:
            cost += f" (verification {row['verify_cost']:g}, drafts {row['draft_cost']:g})"
        length = f"accept length {row['accept_length']:.2f}" if row["accept_length"] else ""
        words = "; ".join(x for x in (length, cost, row["reason"]) if x)
        made.append(
            Prediction(
                id=f"{name}-{text}-C{c}",
                what=f"speed with / without on {_words(text)} at C={c}",
                predicted=Measured(value=row["ratio"], unit="x", reason=words),
                formula="accept length / (verification + drafts), in decode steps",
                source=f"expectation-{name}/expectation.json, frozen {taken.stamp.started}",
                measured=measured.get((text, c)),
            )
        )
    return made


def predictions(run: NotebookRun, arms: Arms | None, found: Analysis, recorded: Recorded) -> list[Prediction]:
    """All frozen expectations beside what was measured, and the recorded texts predicted from each other."""
    ratios = {(c.text, c.concurrency): c.speedup.ratio for c in found.comparisons}
    made: list[Prediction] = []
    stamp = run.raw / "expectation-params" / "stamp.json"
    if stamp.exists():
        taken = Measurement(stamp.parent, Stamp.model_validate_json(stamp.read_text()))
        made += _predictions(taken, "params", ratios)
    if arms is not None and arms.pilot_expectation is not None:
        made += _predictions(arms.pilot_expectation, "pilot", ratios)
    return [*made, *recorded.predictions]


# how it is turned on -------------------------------------------------------------------------------------------------


def _gpu(run: NotebookRun) -> Gpu:
    gpu = next(iter(run.host()["gpus"]), None)
    sm = int(float(gpu["compute_cap"]) * 10) if gpu else None
    return Gpu(sm=sm, name=gpu["name"] if gpu else "none", amx="amx_tile" in run.host()["cpu_features"])


def _facts(run: NotebookRun) -> ModelFacts | None:
    return None if run.attached else model_facts(run.checkpoint(run.server("probe")))


def _version(run: NotebookRun) -> str:
    versions = [str((run.server_info(r) or {}).get("version") or r.sglang_version) for r in run.launch_records()]
    return versions[0] if versions else run.version(run.server("probe"))


def incantation_rows(run: NotebookRun) -> list[dict[str, Any]]:
    """What turns NEXTN on in this release, what is asked here, and what the release's rules say of it."""
    if run.attached:
        return []
    params, version, facts = _params(run), _version(run), _facts(run)
    hybrid = bool(facts and facts.hybrid)
    flags, environment, row = nextn(version, hybrid=hybrid)
    asked = fate(params.flags, params.environment, version, _gpu(run), facts)
    kind = "a hybrid model" if hybrid else "not a hybrid model"
    return [
        {
            "what": f"SGLang {version}, {kind}: what turns it on",
            "value": _settings(flags, environment),
            "because": row.reason,
            "source": row.source,
        },
        {
            "what": "what is asked here",
            "value": _settings(params.flags, params.environment),
            "because": "params",
            "source": "",
        },
        {
            "what": "expected of these settings alone",
            "value": _words(asked.outcome),
            "because": asked.reason,
            "source": asked.source,
        },
        *(
            {
                "what": "the release's rules on the whole launch",
                "value": _words(f.outcome),
                "because": f.reason,
                "source": f.source,
            }
            for f in refusals(run)
        ),
    ]


def _settings(flags: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    words = [f"--{k.removeprefix('--').replace('_', '-')} {v}".removesuffix(" True") for k, v in flags.items()]
    return " ".join([*(f"{k}={v}" for k, v in environment.items()), *words])


def refusals(run: NotebookRun) -> list[Any]:
    """What the release's rules say of the treated launch as a whole (its profile's flags too), without launching it."""
    handle = measuring.treatment(run, "probe")
    config = {"model_path": handle.params.model, "flags": handle.params.flags, "environment": handle.params.environment}
    return check_arguments(config, _version(run), _gpu(run), _facts(run), strict=False)


def forms(run: NotebookRun) -> list[dict[str, Any]]:
    """The forms that people have tried, and what this and other releases make of each."""
    return [] if run.attached else form_rows(_version(run))


def before_launch_rows(run: NotebookRun) -> list[dict[str, Any]]:
    """Memory that is in use before the first launch: what may get a server killed without a word."""
    if run.attached:
        return []
    seen = run.measure("memory", None, measuring.look_at_memory, **run.there).json("memory.json")
    checkpoint = run.checkpoint(run.server("probe"))
    return memory_rows(
        seen["gpu"]["used_mib"],
        seen["gpu"]["users"],
        seen["host_free_bytes"],
        checkpoint.weight_bytes if checkpoint else None,
    )


# launches ------------------------------------------------------------------------------------------------------------


def try_treatment(run: NotebookRun) -> LaunchRecord | None:
    """Launches the treatment alone where the release's rules expect a refusal, to hear it in SGLang's own words.

    None where nothing is known against it (its first launch is then one of the four below), or for an attached server.

    Raises:
        BadInput: the parameters' flags turn no speculation on.
    """
    measuring.refuse_one_text(_params(run))
    if run.attached:
        run.skip("both arms", "each arm needs launches of its own, and the attached server is not restarted")
        return None
    if not [f for f in refusals(run) if f.outcome != "silently_ignored"]:
        return None
    handle = measuring.treatment(run, "treated-start")
    launch = run.try_launch(handle)
    handle.stop()
    return launch


def measure_arms(run: NotebookRun, start: LaunchRecord | None) -> Arms | None:
    """Both arms, launched in turn, where the treatment may start; None where it is known not to."""
    if run.attached or (start is not None and start.ready_s is None):
        return None

    def expect(base: Unit, treated: Unit) -> list[dict[str, Any]]:
        return spec_analysis.pilot_rows(run, base, treated)

    def places(base: Unit, treated: Unit) -> list[dict[str, Any]]:
        texts = run.raw / "texts" / "texts.json"
        return spec_analysis.divergences(run, json.loads(texts.read_text()), base, treated)

    return measuring.measure(run, expect, places)


def analyse(run: NotebookRun, arms: Arms | None) -> Analysis:
    """What the arms say; empty where none were launched."""
    return Analysis() if arms is None else spec_analysis.analyse(run, arms)


def treated_launch(start: LaunchRecord | None, arms: Arms | None) -> LaunchRecord | None:
    """The launch that shows whether the treatment starts: the first one with it."""
    if arms is not None:
        return next((u.launch for u in arms.units if u.treated), start)
    return start


def start_phases(start: LaunchRecord | None, arms: Arms | None) -> list[dict[str, Any]]:
    """Start-up phases of every launch, for the figure."""
    if arms is None:
        return launch_phases(start, "with NEXTN") if start else []
    return [row for u in arms.units for row in launch_phases(u.launch, u.name)]


def launch_rows(run: NotebookRun, start: LaunchRecord | None, arms: Arms | None) -> list[dict[str, Any]]:
    """What became of each launch: ready after how long, or its root cause with the quoted line."""
    if run.attached:
        return [{"launch": "none", "what": "not tried: the server is attached", "value": None, "evidence": None}]
    listed = [("with NEXTN, alone", start)] if start else []
    listed += [(u.name, u.launch) for u in arms.units] if arms else []
    rows = []
    for name, launch in listed:
        if launch.ready_s is not None:
            ready = Measured(value=launch.ready_s, unit="s", n=1, reason="one launch")
            rows.append({"launch": name, "what": "ready after", "value": ready, "evidence": None})
        else:
            outcome, reason, evidence = failed_launch(run, launch)
            rows.append({"launch": name, "what": _words(outcome), "value": reason, "evidence": evidence})
    return rows


# tables --------------------------------------------------------------------------------------------------------------


def trace_rows(traces: Sequence[LaunchTrace]) -> list[dict[str, Any]]:
    """Each launch: what shows whether it speculated, and what is wrong with that."""

    def seen(value: bool | None, line: int | None) -> str:
        return "not known" if value is None else (f"yes (line {line})" if value else "no")

    return [
        {
            "launch": t.launch_id,
            "arm": "with NEXTN" if t.treated else "without",
            "process": t.process or "not recorded",
            "identity checks": t.identity_checks,
            "algorithm": t.algorithm or ("none" if t.algorithm_known else "not known"),
            "draft weights in log": seen(t.draft_weights, t.draft_weights_line),
            "draft pool in log": seen(t.draft_pool, t.draft_pool_line),
            "requests": t.requests,
            "without a step": t.without_steps if t.treated else None,
            "verify steps": t.verify_steps,
            "verdict": "as it should be" if t.ok else "invalid: " + "; ".join(t.problems),
            "notes": "; ".join(t.notes),
        }
        for t in traces
    ]


def comparison_rows(found: Analysis) -> list[dict[str, Any]]:
    """Both arms by text and concurrency."""
    return [
        {
            "text": _words(c.text),
            "C": c.concurrency,
            "verdict": _verdict_words(c, found),
            "speed with / without": c.speedup.ratio,
            "launches": f"{c.speedup.base_launches} + {c.speedup.treated_launches}",
            "tok/s without": c.base_rate,
            "tok/s with": c.treated_rate,
            "accept length": c.accept_length,
            "would find": Measured(
                value=c.speedup.detectable_frac, unit="frac", n=c.speedup.ratio.n, reason="80% power"
            ),
            "because": "; ".join([c.speedup.reason, *c.notes]),
        }
        for c in found.comparisons
    ]


def _verdict_words(c: Comparison, found: Analysis) -> str:
    if c.speedup.word == "no_difference":
        return "no difference"
    return c.speedup.word


def latency_rows(found: Analysis) -> list[dict[str, Any]]:
    """Latency per token and gap between chunks: under speculation a chunk carries several tokens."""
    return [
        {
            "text": _words(c.text),
            "C": c.concurrency,
            "per token without": c.base_token_s,
            "per token with": c.treated_token_s,
            "chunk gap without": c.base_gap_s,
            "chunk gap with": c.treated_gap_s,
        }
        for c in found.comparisons
    ]


def ratio_series(found: Analysis) -> dict[str, list[dict[str, Any]]]:
    """Ratios by concurrency for each text, for the figure."""
    series: dict[str, list[dict[str, Any]]] = {}
    for c in found.comparisons:
        series.setdefault(_words(c.text), []).append({"concurrency": c.concurrency, "ratio": c.speedup.ratio})
    return series


def crossover_rows(found: Analysis) -> list[dict[str, Any]]:
    """Where it stops paying, by text."""
    return [{"text": _words(x.text), "stops paying at C": x.at, "because": x.reason} for x in found.crossovers]


def position_rows(found: Analysis) -> list[dict[str, Any]]:
    """Acceptance of each draft position, by text."""
    return [
        row
        for text, counts in found.acceptances.items()
        for row in recorded_arms.position_rows(_words(text), counts, found.drafts)
    ]


def acceptance_rows(found: Analysis) -> list[dict[str, Any]]:
    """Accept length by text, for the figure."""
    most = found.drafts + 1 if found.drafts else None
    return [
        {"label": _words(text), "accept_length": counts.length, "most": most}
        for text, counts in found.acceptances.items()
    ]


def greedy_rows(found: Analysis) -> list[dict[str, Any]]:
    """Greedy answers with against without speculation, and the untreated server against itself."""

    def row(arms: str, one: GreedyAgreement, judged: bool) -> dict[str, Any]:
        return {
            "text": _words(one.text),
            "arms": arms,
            "answers": one.requests,
            "identical": one.identical,
            "tokens compared": one.tokens_compared,
            "near ties": sum(d.near_tie is True for d in one.divergences) if judged else None,
            "no near tie": len(one.unexplained) if judged else None,
            "not known": len(one.unknown) if judged else None,
            "first divergences": "; ".join(
                f"answer {d.request} at token {d.position}: {d.reason}" for d in one.divergences[:3]
            )
            if judged
            else "; ".join(f"answer {d.request} at token {d.position}" for d in one.divergences[:3]),
        }

    rows = [row("with / without", one, True) for one in found.greedy]
    return rows + [row("without, launched twice", one, False) for one in found.floor]


def sampled_rows(found: Analysis) -> list[dict[str, Any]]:
    """Sampled answers by distribution: with against without, and without against itself."""
    listed = [("with / without", found.sampled), ("without, launched twice", found.sampled_floor)]
    return [
        {
            "arms": name,
            "samples": f"{one.samples_a} + {one.samples_b}",
            "distance": one.distance,
            "random splits": one.expected_distance,
            "p": one.p_value,
            "because": one.reason,
        }
        for name, one in listed
        if one is not None
    ]


def parameter_rows(found: Analysis) -> list[dict[str, Any]]:
    """Sampling parameters that verification may treat otherwise."""
    return [{"parameter": p.name, "under NEXTN": _words(p.fate), "because": p.reason} for p in found.parameters]


def long_run_rows(found: Analysis) -> list[dict[str, Any]]:
    """What the long run showed."""
    one = found.long_run
    if one is None:
        return []
    stuck = (
        "no"
        if one.stuck is None
        else f"the last {one.stuck.lines} decode lines accept no draft, from line {one.stuck.line_no}"
    )
    usage = Measured(
        value=one.max_usage, unit="frac", n=one.requests, reason="largest in the log; not known without decode lines"
    )
    return [
        {
            "what": "accept length, later half over earlier half, less 1",
            "value": one.decay.change,
            "because": one.decay.reason,
        },
        {"what": "stuck without accepted drafts", "value": stuck, "because": "S4: accept length 1.00 until a restart"},
        {
            "what": "answers that end in one repeated character",
            "value": len(one.loops),
            "because": "; ".join(one.loops[:3]) or "none",
        },
        {"what": "pool usage reached", "value": usage, "because": "S4 was reported from 0.5 on"},
    ]


def recorded_rows(recorded: Recorded) -> list[dict[str, Any]]:
    """Recorded arms as a table: what was sent, how fast, and the trace of speculation."""
    return [
        {
            "arm": a.name,
            "text": _words(a.text),
            "requests": a.requests,
            "tokens": a.completion_tokens,
            "speed": Measured(value=a.tokens_per_s, unit="tok/s", n=a.requests, reason="one run"),
            "verify steps": Measured(
                value=a.verify_steps,
                n=a.requests if a.verify_steps else None,
                reason="all counted" if a.verify_steps else "none was counted",
            ),
            "accept length": a.accept_length,
            "accept rate": a.accept_rate,
        }
        for a in recorded.arms
    ]


def recorded_comparison_rows(recorded: Recorded) -> list[dict[str, Any]]:
    """Recorded arms against each other: one launch of each, so a ratio and no verdict."""
    return [
        {
            "text": _words(c.text),
            "verdict": _words(c.outcome),
            "speed with / without": c.speed_ratio,
            "accept length": c.accept_length,
            "same greedy output": "not known"
            if c.same_output is None
            else ("yes" if c.same_output else f"differs at token {c.first_difference}"),
            "because": c.reason,
        }
        for c in recorded.comparisons
    ]


def recorded_position_rows(recorded: Recorded) -> list[dict[str, Any]]:
    """Acceptance by draft position in the recorded runs."""
    return [row for a in recorded.arms if a.treated for row in recorded_arms.position_rows(_words(a.text), a, 3)]


def recorded_acceptance_rows(recorded: Recorded) -> list[dict[str, Any]]:
    """Accept length of the recorded arms, for the figure."""
    return [
        {"label": f"{a.name}: {_words(a.text)}", "accept_length": a.accept_length, "most": 4}
        for a in recorded.arms
        if a.treated
    ]


def recorded_identity_rows(recorded: Recorded) -> list[dict[str, Any]]:
    """What identifies the recorded servers: files and hashes; that no launch id, pid or port was kept."""
    return [
        {
            "server": i.launch_id,
            "SGLang": i.sglang_version or "not in its files",
            "identified by": "; ".join(f"{c.split(' ')[0]} {c.split(' ')[1][:12]}" for c in i.checks[2:]),
            "not known": "launch id, pid, port, whether another process answered",
        }
        for i in recorded.identities
    ]


def published_rows(published: Published | None) -> list[dict[str, Any]]:
    """The two published tables side by side, with the change that was read as 'no benefit'."""
    if published is None:
        return []
    with_it = {row["concurrency"]: row for row in published.asked_for}
    return [
        {
            "C": row["concurrency"],
            "without, tok/s": row["aggregate_tokens_per_s"],
            "asked for NEXTN, tok/s": with_it[row["concurrency"]]["aggregate_tokens_per_s"],
            "tokens without": row["tokens"],
            "tokens with": with_it[row["concurrency"]]["tokens"],
            "verify steps with": with_it[row["concurrency"]].get("verify_steps", "not recorded"),
        }
        for row in published.without
        if row["concurrency"] in with_it
    ]


# verdicts ------------------------------------------------------------------------------------------------------------


def trials(run: NotebookRun, found: Analysis) -> list[Trial]:
    """One trial a cell, with its word, numbers and evidence."""
    return [
        Trial(
            id=f"{c.text}-C{c.concurrency}",
            what=f"NEXTN against none on {_words(c.text)} at C={c.concurrency}",
            outcome=WORDS[c.speedup.word],
            reason=f"{_verdict_words(c, found)}: {c.speedup.reason}",
            values={
                "ratio": c.speedup.ratio,
                "accept_length": c.accept_length,
                "base_token_s": c.base_token_s,
                "treated_token_s": c.treated_token_s,
                "base_gap_s": c.base_gap_s,
                "treated_gap_s": c.treated_gap_s,
            },
            evidence=_cell_evidence(run, found, c),
            launch_ids=c.launch_ids,
        )
        for c in found.comparisons
    ]


def _cell_evidence(run: NotebookRun, found: Analysis, c: Comparison) -> list[Evidence]:
    units = [x.unit for x in found.cells if (x.text, x.concurrency) == (c.text, c.concurrency)]
    files = [run.raw / unit / f"{c.text}-C{c.concurrency}" / "level.jsonl" for unit in units]
    return [run.evidence(f) for f in files if f.exists()]


def verdicts(
    run: NotebookRun,
    start: LaunchRecord | None,
    arms: Arms | None,
    found: Analysis,
    expected: Sequence[Prediction],
    recorded: Recorded,
    published: Published | None,
) -> list[Verdict]:
    """Does it start, was it on, does it pay and up to where, was that foreseen, are answers the same; what other runs show."""
    made: list[Verdict] = []
    launch = treated_launch(start, arms)
    if launch is not None:
        made.append(_starts(run, launch))
    if found.traces:
        made.append(_was_on(run, arms, found))
    made += [_pays(run, found, c) for c in found.comparisons]
    made += [_crossover(run, found, x.text) for x in found.crossovers]
    if arms is not None and arms.pilot_expectation is not None:
        made.append(_foreseen(run, arms, found, expected))
    if found.greedy:
        made += [_same_greedy(run, arms, found), _same_sampled(run, found), _parameters(run, found)]
    if found.long_run is not None:
        made.append(_lasts(run, found))
    if launch is not None and launch.ready_s is not None and not found.comparisons:
        reason = "; ".join(run.skipped) or "no text was measured on both arms"
        ids = [launch.launch_id]
        made.append(
            Verdict(id="pays", claim="NEXTN is faster here", status=Status.INCONCLUSIVE, reason=reason, launch_ids=ids)
        )
    made += [_recorded_pays(run, one) for one in recorded.comparisons]
    if published is not None:
        made.append(_published(run, published, recorded))
    if not made:
        reason = "nothing was measured and nothing recorded is named"
        made.append(Verdict(id="nextn", claim="NEXTN pays", status=Status.INCONCLUSIVE, reason=reason))
    return made


def _starts(run: NotebookRun, launch: LaunchRecord) -> Verdict:
    file = run.log_file(launch)
    common: dict[str, Any] = {
        "id": "starts",
        "claim": "The server starts with speculative decoding",
        "launch_ids": [launch.launch_id],
        "rule": "lib.server.failures",
        "limit": "ready, and the resolved algorithm is not null",
    }
    if launch.ready_s is None:
        outcome, reason, evidence = failed_launch(run, launch)
        return Verdict(status=OUTCOMES[outcome], reason=reason, evidence=[evidence], **common)
    algorithm = (run.server_info(launch) or {}).get("speculative_algorithm")
    return Verdict(
        status=Status.PASS if algorithm else Status.INVALID,
        reason=f"resolved speculative_algorithm: {algorithm}",
        evidence=[run.evidence(file.parent / "server_info.json")],
        **common,
    )


def _units_evidence(run: NotebookRun, arms: Arms | None, *names: str) -> list[Evidence]:
    files = [run.raw / u.name / name for u in (arms.units if arms else []) for name in names]
    return [run.evidence(f) for f in files if f.exists()]


def _was_on(run: NotebookRun, arms: Arms | None, found: Analysis) -> Verdict:
    treated = [t for t in found.traces if t.treated]
    steps, requests = sum(t.verify_steps for t in treated), sum(t.requests for t in treated)
    evidence = _units_evidence(run, arms, "greedy/greedy.json", "state/state.json")
    for one in treated:
        record = next((r for r in run.launch_records() if r.launch_id == one.launch_id), None)
        if record is not None and one.draft_weights_line:
            evidence.append(run.evidence(run.log_file(record), one.draft_weights_line, note="draft weights"))
    common: dict[str, Any] = {
        "id": "was-on",
        "claim": "Each launch with NEXTN speculated on every request, and none without it did",
        "measured": Measured(value=steps, unit="steps", n=requests, reason="counted by the server, request by request"),
        "limit": "verification steps in every request with it, none without; one process a launch; counts possible",
        "rule": "lib.server.spec_trace",
        "evidence": evidence,
        "launch_ids": [t.launch_id for t in found.traces],
    }
    if found.invalid:
        return Verdict(status=Status.INVALID, reason="; ".join(found.invalid), **common)
    if not treated or len(treated) == len(found.traces):
        return Verdict(status=Status.INCONCLUSIVE, reason="one of the arms was not measured", **common)
    notes = "; ".join(dict.fromkeys(n for t in found.traces for n in t.notes))
    reason = f"{steps} verification steps in {requests} requests of {len(treated)} launches, none in the others"
    return Verdict(status=Status.PASS, reason=reason + (f"; {notes}" if notes else ""), **common)


def _pays(run: NotebookRun, found: Analysis, c: Comparison) -> Verdict:
    margin = _params(run).no_difference_frac
    status = OUTCOMES[WORDS[c.speedup.word]]
    evidence = _cell_evidence(run, found, c)
    if status in (Status.PASS, Status.FAIL) and not evidence:
        status = Status.INCONCLUSIVE
    power = ""
    if c.speedup.word == "inconclusive" and c.speedup.detectable_frac is not None:
        needed = c.speedup.launches_needed
        power = f"; with these launches {c.speedup.detectable_frac:.1%} would be found in 80% of experiments, {margin:.0%} needs "
        power += f"{needed} launches of each arm" if needed else "more prompts, or more than 20 launches of each arm"
    words = {"no_difference": f"no difference within {margin:.0%}"}.get(c.speedup.word, c.speedup.word)
    return Verdict(
        id=f"pays-{c.text}-C{c.concurrency}",
        claim=f"NEXTN is faster on {_words(c.text)} at C={c.concurrency}" + (" (lossy)" if found.lossy else ""),
        status=status,
        measured=c.speedup.ratio,
        limit=f"interval of the ratio above 1 and not within {margin:.0%} of it",
        rule="lib.server.speedup.compare_launches",
        reason=f"{words}: {'; '.join([c.speedup.reason, *c.notes])}{power}",
        evidence=evidence,
        launch_ids=c.launch_ids,
    )


def _crossover(run: NotebookRun, found: Analysis, text: str) -> Verdict:
    one = next(x for x in found.crossovers if x.text == text)
    mine = [c for c in found.comparisons if c.text == text]
    evidence = [e for c in mine for e in _cell_evidence(run, found, c)]
    status = Status.PASS if one.bracketed and evidence else Status.INCONCLUSIVE
    if any(c.speedup.word == "invalid" for c in mine):
        status = Status.INVALID
    return Verdict(
        id=f"crossover-{text}",
        claim=f"The concurrency at which NEXTN stops paying on {_words(text)} is known",
        status=status,
        measured=one.at,
        limit="both ends of its interval lie between measured levels",
        rule="lib.server.speedup.crossover",
        reason=one.reason,
        evidence=evidence,
        launch_ids=list(dict.fromkeys(i for c in mine for i in c.launch_ids)),
    )


def _foreseen(run: NotebookRun, arms: Arms, found: Analysis, expected: Sequence[Prediction]) -> Verdict:
    pilot = arms.pilot_expectation
    made = [p for p in expected if p.id.startswith("pilot-")]
    judged = [p for p in made if _came_true(p) is not None]
    by_fate = {fate: [p for p in judged if _came_true(p) == fate] for fate in ("right", "wrong", "undecided")}
    started = sorted(x.started for x in found.cells if x.treated)
    frozen = pilot is not None and bool(started) and pilot.stamp.started <= started[0]
    common: dict[str, Any] = {
        "id": "foreseen",
        "claim": "Acceptance over the cost of a step predicts the ratio",
        "measured": Measured(
            value=len(by_fate["right"]) / len(judged) if judged else None,
            unit="frac",
            n=len(judged),
            reason="cells predicted before they were measured" if judged else "no cell has both",
        ),
        "limit": f"every cell: the measured interval within {PREDICTION_TOLERANCE:.0%} of the prediction",
        "rule": "lib.server.speedup.predicted_ratio",
        "evidence": [run.evidence(pilot.folder / "expectation.json")] if pilot else [],
        "launch_ids": [t.launch_id for t in found.traces],
    }
    if found.invalid:
        return Verdict(status=Status.INVALID, reason=found.invalid[0], **common)
    if not frozen:
        return Verdict(
            status=Status.INVALID, reason="the prediction was not frozen before the first treated level", **common
        )
    if not judged:
        return Verdict(status=Status.INCONCLUSIVE, reason="no cell has both a prediction and a measurement", **common)
    words = "; ".join(
        f"{fate} on {', '.join(p.id.removeprefix('pilot-') for p in listed)}"
        for fate, listed in by_fate.items()
        if listed
    )
    if by_fate["wrong"]:
        return Verdict(status=Status.FAIL, reason=words, **common)
    status = Status.INCONCLUSIVE if by_fate["undecided"] else Status.PASS
    return Verdict(status=status, reason=words, **common)


def _came_true(p: Prediction) -> str | None:
    """`right` if the measured interval lies within the tolerance of the prediction, `wrong` if outside, else `undecided`.

    None where there is no prediction or no interval.
    """
    found, predicted = p.measured, p.predicted.value
    if found is None or found.low is None or found.high is None or not isinstance(predicted, float):
        return None
    low, high = found.low / predicted - 1, found.high / predicted - 1
    if low >= -PREDICTION_TOLERANCE and high <= PREDICTION_TOLERANCE:
        return "right"
    return "wrong" if high < -PREDICTION_TOLERANCE or low > PREDICTION_TOLERANCE else "undecided"


def _same_greedy(run: NotebookRun, arms: Arms | None, found: Analysis) -> Verdict:
    requests = sum(g.requests for g in found.greedy)
    identical = sum(g.identical for g in found.greedy)
    unexplained = [d for g in found.greedy for d in g.unexplained]
    unknown = [d for g in found.greedy for d in g.unknown]
    floor_total, floor_same = sum(g.requests for g in found.floor), sum(g.identical for g in found.floor)
    floor = (
        f"; the server without it, launched twice, gave {floor_same} of {floor_total} identical" if floor_total else ""
    )
    evidence = _units_evidence(run, arms, "greedy/greedy.json")
    if arms is not None and arms.tops is not None:
        evidence.append(run.evidence(arms.tops.folder / "tops.json", note="log-probabilities where answers part"))
    common: dict[str, Any] = {
        "id": "same-greedy",
        "claim": "Greedy answers are the same with and without NEXTN",
        "measured": Measured(
            value=identical / requests if requests else None,
            unit="frac",
            n=requests,
            reason="share identical, all counted",
        ),
        "limit": f"every first divergence is a near tie ({_params(run).tie_nats:g} nat)",
        "rule": "lib.server.same_answers.compare_greedy",
        "evidence": evidence,
        "launch_ids": [t.launch_id for t in found.traces],
    }
    words = f"{identical} of {requests} answers identical, {requests - identical} part{floor}"
    if found.invalid:
        return Verdict(status=Status.INVALID, reason=found.invalid[0], **common)
    if found.lossy:
        return Verdict(status=Status.FAIL, reason=f"lossy by configuration ({found.lossy}); {words}", **common)
    if unexplained:
        reason = f"{words}; {len(unexplained)} at no near tie, e.g. {unexplained[0].reason}"
        same_server = floor_total and floor_same == floor_total
        status = Status.FAIL if same_server else Status.INCONCLUSIVE
        if not same_server:
            reason += "; the server without it does not repeat itself either, or was launched once"
        return Verdict(status=status, reason=reason, **common)
    if unknown:
        return Verdict(
            status=Status.INCONCLUSIVE,
            reason=f"{words}; {len(unknown)} could not be judged: {unknown[0].reason}",
            **common,
        )
    return Verdict(
        status=Status.PASS,
        reason=words + ("; every divergence is a near tie" if identical < requests else ""),
        **common,
    )


def _same_sampled(run: NotebookRun, found: Analysis) -> Verdict:
    one = found.sampled
    units = sorted(run.raw.glob("*/probes/probes.json"))
    common: dict[str, Any] = {
        "id": "same-sampled",
        "claim": "Sampled answers have the same distribution with and without NEXTN",
        "measured": one.distance if one else None,
        "limit": f"permutation test: p at least {P_LIMIT:g}, and a test that could see a difference",
        "rule": "lib.server.same_answers.compare_samples",
        "evidence": [run.evidence(u) for u in units],
        "launch_ids": [t.launch_id for t in found.traces],
    }
    if one is None or one.p_value is None:
        return Verdict(status=Status.INCONCLUSIVE, reason=one.reason if one else "no samples were asked", **common)
    if found.invalid:
        return Verdict(status=Status.INVALID, reason=found.invalid[0], **common)
    floor = found.sampled_floor
    words = one.reason + (f"; without it, launched twice: p = {floor.p_value:.3f}" if floor and floor.p_value else "")
    if floor is not None and floor.p_value is not None and floor.p_value < P_LIMIT:
        return Verdict(status=Status.INCONCLUSIVE, reason=f"{words}: the server differs from itself", **common)
    if one.p_value < P_LIMIT:
        return Verdict(status=Status.FAIL, reason=words, **common)
    spread = one.expected_distance or 0.0
    if spread > NO_POWER_DISTANCE or spread == 0.0:
        why = "almost all sampled tokens differ" if spread else "all sampled tokens are equal"
        return Verdict(status=Status.INCONCLUSIVE, reason=f"{words}; {why}, so the test sees nothing", **common)
    return Verdict(
        status=Status.PASS,
        reason=f"{words}; an excess of less than {one.detectable or 0:.3f} would not be seen with so many samples",
        **common,
    )


def _parameters(run: NotebookRun, found: Analysis) -> Verdict:
    bad = [p for p in found.parameters if p.fate in ("ignored", "applied_otherwise")]
    blind = [p for p in found.parameters if p.fate in ("not_visible", "not_tried")]
    good = [p for p in found.parameters if p.fate == "honoured"]
    common: dict[str, Any] = {
        "id": "parameters",
        "claim": "Sampling parameters keep their meaning with NEXTN (min_p, penalties)",
        "measured": Measured(
            value=", ".join(f"{p.name} {_words(p.fate)}" for p in found.parameters) or None,
            n=len(found.parameters) or None,
            reason="none was tried",
        ),
        "limit": "each is honoured as without it",
        "rule": "FACTS D2, lib.server.same_answers",
        "evidence": [run.evidence(u) for u in sorted(run.raw.glob("*/probes/probes.json"))],
        "launch_ids": [t.launch_id for t in found.traces],
    }
    if found.invalid:
        return Verdict(status=Status.INVALID, reason=found.invalid[0], **common)
    if bad:
        return Verdict(status=Status.FAIL, reason="; ".join(f"{p.name}: {p.reason}" for p in bad), **common)
    if blind or not good:
        words = "; ".join(f"{p.name}: {p.reason}" for p in blind) or "none was tried"
        return Verdict(status=Status.INCONCLUSIVE, reason=words, **common)
    return Verdict(status=Status.PASS, reason="; ".join(f"{p.name}: {p.reason}" for p in good), **common)


def _lasts(run: NotebookRun, found: Analysis) -> Verdict:
    one = found.long_run
    if one is None:
        return Verdict(id="lasts", claim="It lasts", status=Status.INCONCLUSIVE, reason="no long run was measured")
    file = next(iter(sorted(run.raw.glob("*/long-run/level.jsonl"))), None)
    usage = f"pool usage reached {one.max_usage:.0%}" if one.max_usage is not None else "pool usage is not known"
    low = one.max_usage is None or one.max_usage < 0.5
    words = f"{one.decay.reason}; {usage}" + ("; S4 was reported above 50%: this run can't exclude it" if low else "")
    common: dict[str, Any] = {
        "id": "lasts",
        "claim": "Acceptance does not decay in a long run, and no answer ends in a loop",
        "measured": one.decay.change,
        "limit": "a loss of less than 10%, decode lines with accepted drafts at the end, no answer of one character",
        "rule": "lib.server.acceptance.decay, stuck, text_loop",
        "evidence": [run.evidence(file)] if file else [],
        "launch_ids": [one.launch_id] if one.launch_id else [],
    }
    if found.invalid:
        return Verdict(status=Status.INVALID, reason=found.invalid[0], **common)
    if one.stuck is not None:
        return Verdict(
            status=Status.FAIL,
            reason=f"the log ends with {one.stuck.lines} decode lines without one accepted draft (S4)",
            **common,
        )
    if one.loops:
        return Verdict(
            status=Status.INCONCLUSIVE,
            reason=f"{one.loops[0]} while drafts are accepted: the model may loop by itself; {words}",
            **common,
        )
    return Verdict(status=OUTCOMES[one.decay.outcome], reason=words, **common)


def _recorded_pays(run: NotebookRun, one: ArmComparison) -> Verdict:
    same = (
        ""
        if one.same_output is None
        else f"; greedy output {'the same' if one.same_output else f'differs from token {one.first_difference} on'}"
    )
    invalid = one.outcome == "no_trace_of_treatment"
    files = [run.raw / "recorded" / f"m1_{arm}.{one.text}_c1.generate.json" for arm in ("base", "nextn")]
    return Verdict(
        id=f"recorded-{one.text}",
        claim=f"NEXTN is faster on {_words(one.text)} in the recorded H200 runs (a toy model)",
        # one launch of each arm: a verdict would claim too much
        status=Status.INVALID if invalid else Status.INCONCLUSIVE,
        measured=one.speed_ratio,
        limit="interval of the ratio above 1",
        rule="lib.server.recorded_arms.compare_arms",
        reason=one.reason
        if invalid
        else f"{one.reason}; one launch of each arm, no launch id: identified by file hashes{same}",
        evidence=[run.evidence(f) for f in files],
        launch_ids=[],
    )


def _published(run: NotebookRun, published: Published, recorded: Recorded) -> Verdict:
    found = published.found
    slow = next((c.speed_ratio.value for c in recorded.comparisons if c.text == "random_ids"), None)
    known = (
        f"; where it is known to have been on, random ids ran at {slow:.2f}x (recorded runs)"
        if isinstance(slow, float)
        else ""
    )
    return Verdict(
        id="published",
        claim="The published runs with and without NEXTN show that it brings nothing",
        status=OUTCOMES[found.outcome],
        measured=Measured(
            value=found.largest_change, unit="frac", n=found.levels, reason="largest change over the levels"
        ),
        limit="verification steps counted in the treated arm, none in the other",
        rule="lib.server.recorded_arms.compare_tables",
        reason=found.reason + known,
        evidence=[
            run.evidence(run.raw / "published" / "tables.json", note=f"the tables, as quoted ({published.profile})")
        ],
    )


def recommendation(
    run: NotebookRun, start: LaunchRecord | None, arms: Arms | None, found: Analysis, recorded: Recorded
) -> str:
    """What to do about NEXTN here."""
    if found.comparisons:
        if found.invalid:
            return f"Nothing may be concluded: {found.invalid[0]}."
        by_word: dict[str, list[str]] = {}
        for c in found.comparisons:
            by_word.setdefault(c.speedup.word, []).append(f"{_words(c.text)} C={c.concurrency}")
        margin = f"{_params(run).no_difference_frac:.0%}"
        names = {
            "pays": "it pays on", "costs": "it costs on", "no_difference": f"no difference within {margin} on",
            "inconclusive": "not decided on", "invalid": "invalid on",
        }  # fmt: skip
        words = "; ".join(f"{text} {', '.join(by_word[w])}" for w, text in names.items() if w in by_word)
        return f"Decide by your traffic: {words}." + (" It is lossy as configured." if found.lossy else "")
    spread = [
        f"{c.speed_ratio.value:.2f}x on {_words(c.text)}"
        for c in recorded.comparisons
        if isinstance(c.speed_ratio.value, float)
    ]
    launch = treated_launch(start, arms)
    if launch is None:
        here = "It was not tried here"
    elif launch.ready_s is None:
        here = "It does not start here"
    else:
        here = "It starts here, but no text could be measured on both arms"
    shown = (
        f"the recorded runs ({', '.join(spread)}) show that the answer depends on the text"
        if spread
        else "no recorded run is named"
    )
    return f"{here}; {shown}, so measure on your own."
