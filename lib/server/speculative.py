"""Was speculation on, and did it pay? An arm without a trace of its treatment proves nothing, whatever its throughput.

The only exact trace is `spec_verify_ct` in each request's `meta_info`: verification steps, counted by the server. Where
a run left only a benchmark's table, the missing trace makes the comparison *invalid*, never 'no benefit'.

Source: SGLang 0.5.16 on an H200 (tests/recorded); FACTS on `spec_accept_length = completion_tokens / spec_verify_ct`.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lib.errors import BadInput
from lib.hosts import local
from lib.load.benchmark import build_workload
from lib.load.stats import student_t_quantile
from lib.params import ROOT, SpeculativeParams
from lib.records import OUTCOMES, Evidence, Measured, Record, Status, Verdict
from lib.results import Answering, NotebookRun, ServerHandle, Stamp
from lib.server.launch import LaunchRecord
from lib.server.sweep import failed_launch


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
    return Arm(
        name=name,
        text=text,
        treated=treated,
        requests=len(metas),
        completion_tokens=sum(int(m["completion_tokens"]) for m in metas),
        e2e_s=sum(float(m["e2e_latency"]) for m in metas),
        verify_steps=_sum(metas, "spec_verify_ct"),
        correct_drafts=_sum(metas, "spec_num_correct_drafts", "spec_accepted_drafts"),
        proposed_drafts=_sum(metas, "spec_num_proposed_drafts", "spec_proposed_drafts"),
        output_ids=[list(answer.get("output_ids") or []) for answer in answers],
        request_s=[float(m["e2e_latency"]) for m in metas],
    )


def _sum(metas: Sequence[Mapping[str, Any]], *names: str) -> int | None:
    values = [next((m[name] for name in names if m.get(name) is not None), None) for m in metas]
    known = [int(value) for value in values if value is not None]
    return sum(known) if known else None


class Comparison(Record):
    """Two arms on the same text: the outcome (a key of OUTCOMES), why, and the speed ratio where it means anything."""

    text: str
    outcome: str
    reason: str
    speed_ratio: Measured
    accept_length: Measured
    accept_rate: Measured
    same_output: bool | None
    first_difference: int | None


def compare_arms(base: Arm, treated: Arm) -> Comparison:
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
    same, first = _same_output(base, treated)
    ratio = Measured(value=None, unit="x", reason=reason)
    if outcome == "not_enough_data":
        ratio = speed_ratio(base, treated)
    return Comparison(
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
        for place, (x, y) in enumerate(itertools.zip_longest(a, b)):
            if x != y:
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
    """Two tables of (concurrency, aggregate_tokens_per_s, tokens) that carry no verification counts: never 'no benefit'.

    Near-zero acceptance costs time (drafting and verifying), so equal throughput and equal token counts are what the
    same server measured twice looks like. Example: the origin case's tables.
    """
    pairs = [(a, b) for a, b in itertools.product(without, with_treatment) if a["concurrency"] == b["concurrency"]]
    equal = sum(a["tokens"] == b["tokens"] for a, b in pairs)
    changes = [b["aggregate_tokens_per_s"] / a["aggregate_tokens_per_s"] - 1 for a, b in pairs]
    largest = max(changes, key=abs) if changes else 0.0
    return TableSuspicion(
        outcome="no_trace_of_treatment",
        equal_token_counts=equal,
        levels=len(pairs),
        largest_change=largest,
        reason=f"no verification step is recorded in either table; {equal} of {len(pairs)} levels have the same number of "
        f"tokens to the digit, and the largest change is {largest:+.1%}: the mark of one server measured twice",
    )


# notebook 04 ------------------------------------------------------------------------------------------------------------

#: The texts whose acceptance is told apart, as the recorded runs and the workloads name them.
KINDS = ("random_ids", "code", "repeating")


def try_treatment(run: NotebookRun) -> tuple[ServerHandle, LaunchRecord | None]:
    """Launches the profile's server with the treatment's flags; None for an attached server, which is not restarted."""
    params: SpeculativeParams = run.params  # type: ignore[assignment]
    handle = run.server("treated", params.flags, params.environment, strict=False)
    if run.attached:
        run.skip("both arms", "each arm needs a launch of its own, and the attached server is not restarted")
        return handle, None
    return handle, run.try_launch(handle)


def send_arm(
    server: Answering,
    folder: Path,
    text: str,
    count: int,
    input_len: int,
    output_len: int,
    seed: int,
    vocab_size: int | None,
) -> None:
    """Sends `count` requests one at a time (/generate, not streaming) and writes the raw answers (answers.json)."""
    made = build_workload(text, count, input_len, output_len, seed, vocab_size)
    server.control.flush_cache()
    answers = []
    for request in [*made.warmup, *made.requests]:
        prompt = {"text": request.prompt} if isinstance(request.prompt, str) else {"input_ids": list(request.prompt)}
        sampling = {"temperature": 0, "max_new_tokens": output_len, "ignore_eos": True}
        answers.append(server.control.generate({**prompt, "sampling_params": sampling}))
    local.write_atomic(
        folder / "answers.json", json.dumps({"workload": made.describe(), "answers": answers[len(made.warmup) :]})
    )


def measure_arm(run: NotebookRun, server: ServerHandle, name: str, treated: bool) -> list[Arm]:
    """One arm on each kind of text; a text that can't be sent here is skipped with its reason."""
    params: SpeculativeParams = run.params  # type: ignore[assignment]
    checkpoint = run.checkpoint(server)
    vocab = checkpoint.vocab_size if checkpoint else None
    arms = []
    for kind in KINDS:
        if kind == "random_ids" and vocab is None:
            run.skip(
                f"random ids in arm {name}", "the vocabulary size is not known, and an id outside it kills the server"
            )
            continue
        taken = run.measure(
            f"{name}/{kind}",
            server,
            send_arm,
            keep_errors=True,
            text=kind,
            count=params.num_requests,
            input_len=params.input_len,
            output_len=params.output_len,
            seed=params.seed,
            vocab_size=vocab,
        )
        if taken.ok:
            arms.append(arm_from_answers(name, kind, treated, taken.json("answers.json")["answers"]))
        else:
            run.skip(f"arm {name} on {kind.replace('_', ' ')}", taken.problem or "it could not be measured")
    return arms


def measure_pair(run: NotebookRun, treated: ServerHandle, launch: LaunchRecord | None) -> list[Comparison]:
    """Both arms of this host, where the treatment starts; empty where it does not."""
    if launch is None or launch.ready_s is None:
        return []
    with_it = measure_arm(run, treated, "treated", True)
    treated.stop()
    base = run.server("base")
    without = measure_arm(run, base, "base", False)
    base.stop()
    return [compare_arms(a, b) for a in without for b in with_it if a.text == b.text]


def recorded_folder(run: NotebookRun) -> Path | None:
    """Folder of recorded runs to read where this host can't measure; None if params name none."""
    params: SpeculativeParams = run.params  # type: ignore[assignment]
    return None if params.recorded is None else ROOT / params.recorded


def copy_recorded(folder: Path, source: str) -> None:
    """Copies the recorded answers of both arms into this run, so that its evidence is in one place."""
    files = sorted(Path(source).glob("m1_*_c1.generate.json"))
    if not files:
        raise BadInput(
            f"recorded runs in {source}", "no m1_*_c1.generate.json", "correct `recorded`, or set it to null"
        )
    for file in files:
        local.write_atomic(folder / file.name, file.read_bytes())


def recorded_arms(run: NotebookRun) -> list[Arm]:
    """Arms of the recorded runs (SGLang 0.5.16, one H200, a seeded toy model), one request each; empty if params name none."""
    source = recorded_folder(run)
    if source is None:
        return []
    copied = run.measure("recorded", None, copy_recorded, source=str(source))
    arms = []
    for file in sorted(copied.folder.glob("m1_*.generate.json")):
        arm, text = file.name.removeprefix("m1_").removesuffix("_c1.generate.json").split(".", 1)
        arms.append(arm_from_answers(f"recorded {arm}", text, arm == "nextn", json.loads(file.read_text())))
    return arms


def compare_recorded(arms: Sequence[Arm]) -> list[Comparison]:
    """Untreated against treated, by text."""
    return [compare_arms(a, b) for a in arms for b in arms if a.text == b.text and not a.treated and b.treated]


def arm_rows(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """Arms as a table: what was sent, how fast, and the trace of speculation."""
    return [
        {
            "arm": a.name,
            "text": a.text.replace("_", " "),
            "requests": a.requests,
            "tokens": a.completion_tokens,
            "speed": Measured(value=a.tokens_per_s, unit="tok/s", n=a.requests, reason="one run"),
            "verify steps": Measured(
                value=a.verify_steps, n=a.requests if a.verify_steps else None, reason="none was counted"
            ),
            "accept length": a.accept_length,
            "accept rate": a.accept_rate,
        }
        for a in arms
    ]


def acceptance_rows(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    """Accept length by text, for the figure."""
    return [
        {"label": f"{a.name}: {a.text.replace('_', ' ')}", "accept_length": a.accept_length} for a in arms if a.treated
    ]


def comparison_rows(found: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Comparisons as a table."""
    return [
        {
            "text": c.text.replace("_", " "),
            "speed with / without": c.speed_ratio,
            "accept length": c.accept_length,
            "same greedy output": "not known"
            if c.same_output is None
            else ("yes" if c.same_output else f"differs at token {c.first_difference}"),
            "because": c.reason,
        }
        for c in found
    ]


def verdicts(
    run: NotebookRun, launch: LaunchRecord | None, measured: Sequence[Comparison], recorded: Sequence[Comparison]
) -> list[Verdict]:
    """Does it run here; does it pay here; what the recorded runs show; what the published tables are worth."""
    made = []
    if launch is not None:
        made.append(_starts(run, launch))
    for one in measured:
        files = [run.evidence(run.raw / arm / one.text / "answers.json") for arm in ("base", "treated")]
        stamps = [
            Stamp.model_validate_json((run.raw / arm / one.text / "stamp.json").read_text())
            for arm in ("base", "treated")
        ]
        ids = [stamp.launch_id for stamp in stamps if stamp.launch_id]
        made.append(_pays(one, f"pays-{one.text}", "here", files, ids))
    if launch is not None and launch.ready_s is not None and not measured:
        reason = "; ".join(run.skipped) or "no text was measured on both arms"
        made.append(
            Verdict(
                id="pays",
                claim="NEXTN is faster here",
                status=Status.INCONCLUSIVE,
                reason=reason,
                launch_ids=[launch.launch_id],
            )
        )
    for one in recorded:
        files = [
            run.evidence(run.raw / "recorded" / f"m1_{arm}.{one.text}_c1.generate.json") for arm in ("base", "nextn")
        ]
        made.append(_pays(one, f"recorded-{one.text}", "in the recorded H200 runs (a toy model)", files, []))
    reference = run.profile.reference
    if reference.get("without_nextn") and reference.get("asked_for_nextn"):
        made.append(_published(run, compare_tables(reference["without_nextn"], reference["asked_for_nextn"])))
    if not made:
        made.append(
            Verdict(
                id="nextn",
                claim="NEXTN pays",
                status=Status.INCONCLUSIVE,
                reason="nothing was measured and nothing recorded is named",
            )
        )
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
    status = Status.PASS if algorithm else Status.INVALID
    return Verdict(
        status=status,
        reason=f"resolved speculative_algorithm: {algorithm}",
        evidence=[run.evidence(file.parent / "server_info.json")],
        **common,
    )


def _pays(one: Comparison, id_: str, where: str, evidence: list[Evidence], launch_ids: list[str]) -> Verdict:
    same = (
        ""
        if one.same_output is None
        else f"; greedy output {'the same' if one.same_output else f'differs from token {one.first_difference} on'}"
    )
    text = one.text.replace("_", " ")
    if one.outcome == "no_trace_of_treatment":
        status, reason = Status.INVALID, one.reason
    else:
        # the interval covers requests, not launches: with one launch of each arm a verdict would claim too much
        status, reason = Status.INCONCLUSIVE, f"{one.reason}; one launch of each arm{same}"
    return Verdict(
        id=id_,
        claim=f"NEXTN is faster on {text} {where}",
        status=status,
        measured=one.speed_ratio,
        limit="interval of the ratio above 1",
        rule="lib.server.speculative.compare_arms",
        reason=reason,
        evidence=evidence,
        launch_ids=launch_ids,
    )


def _published(run: NotebookRun, found: TableSuspicion) -> Verdict:
    return Verdict(
        id="published",
        claim="The published runs with and without NEXTN show that it brings nothing",
        status=OUTCOMES[found.outcome],
        measured=Measured(
            value=found.largest_change, unit="frac", n=found.levels, reason="largest change over the levels"
        ),
        limit="verification steps counted in the treated arm, none in the other",
        rule="lib.server.speculative.compare_tables",
        reason=found.reason,
        evidence=[run.evidence(run.folder / "params" / f"{run.number}.profile.yaml", note="the tables, as quoted")],
    )


def recommendation(launch: LaunchRecord | None, measured: Sequence[Comparison], recorded: Sequence[Comparison]) -> str:
    """What to do about NEXTN here."""
    if measured:
        invalid = [c.text for c in measured if c.outcome == "no_trace_of_treatment"]
        if invalid:
            return f"Nothing may be concluded on {', '.join(invalid)}: speculation left no trace on the server."
        slower = [c.text for c in measured if isinstance(c.speed_ratio.value, float) and c.speed_ratio.value < 1]
        return f"Repeat with more launches before deciding; with one of each arm it was slower on: {', '.join(slower) or 'no text'}."
    spread = [
        f"{c.speed_ratio.value:.2f}x on {c.text.replace('_', ' ')}"
        for c in recorded
        if isinstance(c.speed_ratio.value, float)
    ]
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


def launch_rows(run: NotebookRun, launch: LaunchRecord | None) -> list[dict[str, Any]]:
    """The treated launch: its end, the root cause, and the quoted line."""
    if launch is None:
        return [{"what": "launch", "value": "not tried: the server is attached", "evidence": None}]
    if launch.ready_s is not None:
        return [
            {
                "what": "ready after",
                "value": Measured(value=launch.ready_s, unit="s", n=1, reason="one launch"),
                "evidence": None,
            }
        ]
    outcome, reason, evidence = failed_launch(run, launch)
    return [{"what": outcome.replace("_", " "), "value": reason, "evidence": evidence}]


def published_rows(reference: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The two published tables side by side, with the change that was read as 'no benefit'."""
    with_it = {row["concurrency"]: row for row in reference.get("asked_for_nextn", [])}
    return [
        {
            "C": row["concurrency"],
            "without, tok/s": row["aggregate_tokens_per_s"],
            "asked for NEXTN, tok/s": with_it[row["concurrency"]]["aggregate_tokens_per_s"],
            "tokens without": row["tokens"],
            "tokens with": with_it[row["concurrency"]]["tokens"],
        }
        for row in reference.get("without_nextn", [])
        if row["concurrency"] in with_it
    ]
