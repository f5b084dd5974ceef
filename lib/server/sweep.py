"""Notebook 02: trials launched one after the other (side by side where GPUs are free), each outcome from evidence.

    plan --> expected (rules of this version) --> host is free? --> groups of trials --> facts --> outcome --> choice

    one trial:  launch, wait, identity | known answer | text alone | its own continuation | all of it under load |
                short benchmark | stop, proof that it is gone | finished.json

A trial counts as done when its `finished.json` is written, after the proof; a resumed sweep repeats no such trial, and
starts one that was cut short from its beginning (what it had left is kept as `<id>.earlier-...`). Everything that the
tables say is derived from raw files again, so a rebuild needs no server.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import json
import os
import threading
import time
import uuid
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lib.audit.compare import compare_scores
from lib.audit.probes import tokenize_documents
from lib.errors import BadInput, NotMeasured, NotReady, ServerDied, WorkbookError
from lib.hosts import local
from lib.load import metrics
from lib.load.bench_rows import level_of
from lib.load.benchmark import LEVEL_FILE, take_calibration
from lib.load.workloads import requests_per_level
from lib.model.facts import Checkpoint
from lib.params import SweepParams
from lib.records import OUTCOMES, Evidence, Measured, Prediction, Record, Status, Trial, Verdict
from lib.report.progress import progress_bar
from lib.results import Measurement, NotebookRun, ServerHandle, Stamp
from lib.server import gate, grid, holders, outcomes, watching
from lib.server.answers import Answer, read_answer
from lib.server.flags import Gpu, ModelFacts, PredictedFailure, check_arguments
from lib.server.grid import Planned
from lib.server.launch import LaunchRecord, Server, read_failure
from lib.server.outcomes import Choice, Facts, Outcome, Piece, Ran, score_problem
from lib.server.remote import place_of, wait_gone_there
from lib.server.remote_looks import end_there, holders_there, kernel_files_there

#: The text that is scored as a quality gate: a module of the standard library, hashed in the raw record.
GATE_TEXT = "argparse"
#: Tokens of the text's beginning that are continued, and how far.
PROMPT_TOKENS, NEW_TOKENS = 48, 32
FINISHED = "finished.json"
#: Where compiled kernels lie: (variable that names the folder, its name below `kernel_cache`, default below the home).
KERNEL_CACHES = (
    ("TRITON_CACHE_DIR", "triton", ".triton/cache"),
    ("FLASHINFER_WORKSPACE_BASE", "flashinfer", ".cache/flashinfer"),
    ("TORCHINDUCTOR_CACHE_DIR", "inductor", ".cache/torchinductor"),
    ("SGLANG_DG_CACHE_DIR", "deep_gemm", ".cache/deep_gemm"),
    ("TVM_FFI_CACHE_DIR", "tvm-ffi", ".cache/tvm-ffi"),
    ("SGLANG_CACHE_DIR", "sglang", ".cache/sglang"),
)
_DOCUMENTS = threading.Lock()


class Finished(Record):
    """finished.json: this trial is done, on which launch, with which GPUs, and for how long it was at work."""

    id: str
    key: str
    launch_id: str
    gpus: list[str]
    seconds: float
    neighbours: list[str]
    kernels_before: int
    kernels_after: int


class Expected(Record):
    """What this version's rules say of one trial before it is launched, and whether it is launched all the same."""

    id: str
    found: list[PredictedFailure]
    launched: bool


class Tried(Record):
    """One trial: its plan, its launch (None: not launched), what is known of it, and what became of it."""

    planned: Planned
    launch: LaunchRecord | None
    facts: Facts
    outcome: Outcome
    speed: Measured
    trial: Trial


class Sweep(Record):
    """All trials in the order of the plan, what the grid left out, and the configuration to go on with."""

    tried: list[Tried]
    left_out: list[grid.LeftOut]
    choice: Choice


# ------------------------------------------------------------------------------------------------- before the launch


def planned(run: NotebookRun) -> grid.Plan:
    """The trials of this run's parameters, the reference first, and what was left out."""
    return grid.plan(_params(run))


def _params(run: NotebookRun) -> SweepParams:
    params: SweepParams = run.params  # type: ignore[assignment]
    return params


#: Handles and expectations of a run, made once: each reads the checkpoint's headers, which takes seconds for a large one.
_HANDLES: weakref.WeakKeyDictionary[NotebookRun, dict[Any, ServerHandle]] = weakref.WeakKeyDictionary()
_EXPECTED: weakref.WeakKeyDictionary[NotebookRun, list[Expected]] = weakref.WeakKeyDictionary()


def handle_of(run: NotebookRun, trial: Planned, gpus: Sequence[str] = ()) -> ServerHandle:
    """The launch of a trial: the profile, its flags, the shared kernel cache, and the GPUs that it was given."""
    known = _HANDLES.setdefault(run, {})
    key = (trial.id, tuple(gpus))
    if key not in known:
        known[key] = _handle(run, trial, gpus)
    return known[key]


def _handle(run: NotebookRun, trial: Planned, gpus: Sequence[str]) -> ServerHandle:
    params = _params(run)
    cache = _cache_environment(params.kernel_cache, run.profile.host.remote)
    environment = {**cache, **trial.environment}
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    mine = outcomes.by_field(trial.flags)
    other_names = {n: None for n in run.profile.server.flags if n not in trial.flags and outcomes.FIELD.get(n) in mine}
    handle = run.server(
        trial.id,
        {**other_names, **trial.flags},  # a flag of the profile under its other name would be given twice
        environment,
        strict=False,
        # silence ends a wait before; what compiles has its own deadline on top
        ready_timeout_s=trial.ready_timeout_s or run.profile.server.ready_timeout_s + _deadlines(params, trial)[1],
        python=trial.python,
        model=trial.model,
    )
    handle.beside = bool(gpus)
    return handle


def _deadlines(params: SweepParams, trial: Planned) -> tuple[float, float]:
    """Seconds of silence at rest and while compiling after which waiting for a trial ends."""
    return trial.quiet_timeout_s or params.quiet_timeout_s, trial.compile_timeout_s or params.compile_timeout_s


def _cache_environment(folder: str | None, remote: bool = False) -> dict[str, str]:
    if folder is None:
        return {}
    if remote and not folder.startswith("/"):
        raise BadInput("kernel_cache is an absolute path on the server's host", repr(folder), "name the folder there")
    root = Path(folder) if remote else Path(folder).expanduser().absolute()
    return {variable: str(root / name) for variable, name, _ in KERNEL_CACHES}


def kernel_files(folder: str | None) -> int:
    """Files in the caches of compiled kernels: a trial that adds none has found everything compiled."""
    roots = (
        [Path(p) for p in _cache_environment(folder).values()]
        if folder
        else [Path(os.environ.get(variable) or Path.home() / default) for variable, _, default in KERNEL_CACHES]
    )
    return sum(len(files) for root in roots for _, _, files in os.walk(root))


def _kernels(run: NotebookRun) -> int:
    """`kernel_files` on the servers' host."""
    folder = _params(run).kernel_cache
    place = place_of(run.profile.host)
    if place is None:
        return kernel_files(folder)
    named = list(_cache_environment(folder, remote=True).values())
    return kernel_files_there(place, named or [f"{variable}=~/{default}" for variable, _, default in KERNEL_CACHES])


def expected(run: NotebookRun) -> list[Expected]:
    """What is known of every trial's arguments without a launch (raw record `expected`); taken before the first one."""
    if run in _EXPECTED:
        return _EXPECTED[run]
    rows: list[dict[str, Any]] = []
    if not run.offline:
        params = _params(run)
        for trial in planned(run).trials:
            found = _known(run, trial)
            asked = params.verify == "all" or trial.id in params.verify
            rows.append(
                {
                    "id": trial.id,
                    "found": [f.model_dump() for f in found],
                    "launched": asked or not found or trial.id == params.reference,
                }
            )
    kept = run.measure("expected", None, _write_rows, rows=rows)
    _EXPECTED[run] = [Expected.model_validate(row) for row in kept.json("rows.json")]
    return _EXPECTED[run]


def _write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    local.write_atomic(folder / "rows.json", json.dumps(rows, indent=1))


def _known(run: NotebookRun, trial: Planned) -> list[PredictedFailure]:
    handle = handle_of(run, trial)
    gpu = next(iter(run.host()["gpus"]), None)
    sm = _sm(gpu.get("compute_cap")) if gpu else None
    own = trial.model is None and trial.python is None
    return check_arguments(
        {"model_path": handle.params.model, "flags": handle.params.flags, "environment": handle.params.environment},
        handle.spec.sglang_version,
        Gpu(sm=sm, name=gpu["name"] if gpu else "none", amx="amx_tile" in run.host()["cpu_features"]),
        model_facts(run.checkpoint(handle)) if own else None,
        strict=False,
    )


def _sm(capability: Any) -> int | None:
    with contextlib.suppress(TypeError, ValueError):
        return round(float(capability) * 10)
    return None


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


def expected_rows(run: NotebookRun) -> list[dict[str, Any]]:
    """Every trial with what the version's rules say against it, and every point of the grid that was left out."""
    if run.attached:
        return []
    what = {t.id: t for t in planned(run).trials}
    rows: list[dict[str, Any]] = []
    for one in expected(run):
        trial = what.get(one.id)
        linked = "; ".join(trial.linked) if trial else ""
        first = one.found[0] if one.found else None
        rows.append(
            {
                "trial": one.id,
                "asked": trial.what if trial else "",
                "expected": first.outcome.replace("_", " ") if first else "no rule speaks against it",
                "why": "; ".join([*(f.reason for f in one.found), *([f"linked: {linked}"] if linked else [])]),
                "launched": "yes" if one.launched and not one.found else "yes, to verify" if one.launched else "no",
                "source": first.source if first else "",
            }
        )
    for left in planned(run).left_out:
        rows.append(
            {
                "trial": left.what,
                "asked": "",
                "expected": "left out",
                "why": left.why,
                "launched": "no",
                "source": "params",
            }
        )
    return rows


def host_rows(run: NotebookRun) -> list[dict[str, Any]]:
    """Who holds the GPUs and the port before the first launch; taken anew in every session that will launch something."""
    if run.attached:
        return []
    if not run.offline and _to_launch(run):
        _look(run)
    files = sorted((run.raw / "holders").glob("*.json"))
    if not files:
        return []
    seen = json.loads(files[-1].read_text())
    rows = [
        {"what": h["what"], "held by": h["by"], "identity": h["identity"] or "", "MiB": h["mib"]} for h in seen["held"]
    ]
    free = [
        f"GPU {g['index']} ({g['uuid']})" for g in seen["gpus"] if not any(g["uuid"] in h["what"] for h in seen["held"])
    ]
    rows += [{"what": name, "held by": "nobody: free", "identity": "", "MiB": None} for name in free]
    if not seen["gpus"]:
        rows.append({"what": "GPUs", "held by": f"there are none: {seen['reason']}", "identity": "", "MiB": None})
    if seen["port"] is None:
        rows.append({"what": "port", "held by": "nobody: each launch takes a free one", "identity": "", "MiB": None})
    elif not any(h["what"].startswith("port") for h in seen["held"]):
        rows.append({"what": f"port {seen['port']}", "held by": "nobody: free", "identity": "", "MiB": None})
    return rows


def _look(run: NotebookRun) -> tuple[list[holders.Holder], list[dict[str, Any]]]:
    """Looks who holds what, keeps it, and gives it with the GPUs that may be used."""
    from lib.runner import wait_servers_gone

    wait_servers_gone(run.folder, 20.0)  # an earlier session's servers end within 10 s of it
    on_cpu = run.profile.server.flags.get("device") == "cpu"
    asked = (_params(run).gpus, run.profile.server.port, on_cpu)
    place = place_of(run.profile.host)
    if place is not None:
        wait_gone_there(place, run.folder, run.say)
    held, gpus, reason = holders_there(place, *asked) if place else holders.look(*asked)
    stamp = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace(":", "")
    record = {
        "held": [h.model_dump() for h in held],
        "gpus": gpus,
        "reason": reason,
        "port": run.profile.server.port,
    }
    local.write_atomic(run.raw / "holders" / f"{stamp}.json", json.dumps(record, indent=1))
    return held, gpus


# -------------------------------------------------------------------------------------------------------- the trials


def run_sweep(run: NotebookRun) -> Sweep:
    """Runs every trial that is not done yet and derives all outcomes from the raw files.

    Raises:
        Busy: somebody holds a GPU or the port, and params don't name it.
        NotStopped: a server of a trial, or what it held, is still there: the next trial would share the machine with it.
    """
    if run.attached:
        run.skip("the sweep", "it needs launches of its own, and the attached server is not restarted")
        return Sweep(tried=[], left_out=[], choice=Choice(id=None, why="no trial was launched here"))
    params, plan = _params(run), planned(run)
    known = {one.id: one for one in expected(run)}
    todo = _to_launch(run)
    if todo:
        _run_all(run, params, todo)
    tried = _derive(run, params, plan.trials, known)
    choice = outcomes.choose(
        [
            outcomes.Candidate(
                id=t.planned.id, outcome=t.trial.outcome, speed=t.speed, reason=t.outcome.reason,
                fidelity=t.facts.alone.measured if t.facts.alone else None,
                same_kernels=t.trial.outcome == "silently_ignored" and bool(t.facts.alone and t.facts.alone.identical),
            )
            for t in tried
        ],
        params.reference,
    )  # fmt: skip
    return Sweep(tried=tried, left_out=plan.left_out, choice=choice)


def _to_launch(run: NotebookRun) -> list[Planned]:
    """The trials that are launched and not done."""
    if run.offline:
        return []
    launched = {one.id for one in expected(run) if one.launched}
    return [t for t in planned(run).trials if t.id in launched and _done(run, t) is None]


def _done(run: NotebookRun, trial: Planned) -> Finished | None:
    """The record of a finished trial, if it is of the launch that the parameters mean now."""
    file = run.raw / trial.id / FINISHED
    if not file.exists():
        return None
    done = Finished.model_validate_json(file.read_text())
    return done if run.offline or done.key == handle_of(run, trial, done.gpus).key else None


def _run_all(run: NotebookRun, params: SweepParams, todo: Sequence[Planned]) -> None:
    seen: list[list[dict[str, Any]]] = []

    def look_now() -> list[holders.Holder]:
        held, gpus = _look(run)
        seen.append(gpus)
        return held

    place = place_of(run.profile.host)
    end = functools.partial(end_there, place) if place else None
    _, ended = holders.free_the_way(look_now, params.may_stop, run.say, end)
    if ended:
        local.write_atomic(run.raw / "holders" / "ended.txt", "\n".join(ended) + "\n")
    gpus = [str(row["uuid"]) for row in seen[-1]]
    by_id = {t.id: t for t in todo}
    needs = {t.id: grid.gpus_needed({**run.profile.server.flags, **t.flags}) for t in todo}
    groups = grid.waves(needs, gpus if run.profile.server.port is None else [])  # one port is one lane
    took: list[float] = []
    finished = 0
    bar = progress_bar(total=len(todo), desc="trials", unit="trial")
    try:
        for group in groups:
            left = grid.seconds_left(took, len(todo) - finished)
            run.saying = f"trial {finished + 1}/{len(todo)}{_left(left)}: "
            began = time.monotonic()
            _run_group(run, params, [(by_id[name], given) for name, given in group.items()])
            took += [(time.monotonic() - began) / len(group)] * len(group)
            finished += len(group)
            bar.update(len(group))
    finally:
        run.saying = ""
        bar.close()


def _left(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f", about {seconds / 60:.0f} min left" if seconds >= 120 else f", about {seconds:.0f} s left"


def _run_group(run: NotebookRun, params: SweepParams, group: Sequence[tuple[Planned, list[str]]]) -> None:
    """Runs trials side by side: all start and are questioned at once, speeds are taken one by one, then all end."""
    began = time.monotonic()
    before = _kernels(run)
    handles = {trial.id: handle_of(run, trial, gpus) for trial, gpus in group}
    launches: dict[str, LaunchRecord] = {}
    ended = threading.Event()
    for trial, _ in group:
        handles[trial.id].watch = _Ending(watching.Watch(*_deadlines(params, trial)), ended)
    try:
        for trial, _ in group:
            _put_aside(run.raw / trial.id)
        if len(group) == 1:
            trial = group[0][0]
            launches[trial.id] = _launch_and_question(run, params, trial, handles[trial.id])
        else:
            with ThreadPoolExecutor(len(group)) as pool:
                asked = {t.id: pool.submit(_launch_and_question, run, params, t, handles[t.id]) for t, _ in group}
                try:
                    launches = {name: future.result() for name, future in asked.items()}
                except BaseException:  # Ctrl-C, or one of them can't go on: the others end now, not at their deadlines
                    ended.set()
                    _stop_all(handles.values())
                    raise
        for trial, _ in group:
            if launches[trial.id].ready_s is not None:
                _measure_speed(run, params, trial, handles[trial.id])
    finally:
        _stop_all(handles.values())
    for trial, gpus in group:
        done = Finished(
            id=trial.id,
            key=handles[trial.id].key or "",
            launch_id=launches[trial.id].launch_id,
            gpus=gpus,
            seconds=round(time.monotonic() - began, 2),
            neighbours=[other.id for other, _ in group if other.id != trial.id],
            kernels_before=before,
            kernels_after=_kernels(run),
        )
        local.write_atomic(run.raw / trial.id / FINISHED, done.model_dump_json(indent=1))


def _stop_all(handles: Iterable[ServerHandle]) -> None:
    """Ends every server of a group; one that can't be ended keeps none of the others alive."""
    left: list[WorkbookError] = []
    for handle in handles:
        try:
            handle.stop()
        except WorkbookError as error:
            left.append(error)
    if left:
        raise left[0]


class _Ending:
    """A watch that ends its server's start when the group ends."""

    def __init__(self, watch: watching.Watch, ended: threading.Event) -> None:
        self.watch, self.ended = watch, ended

    def __call__(self, server: Server, elapsed_s: float) -> str | None:
        if self.ended.is_set():
            raise KeyboardInterrupt
        return self.watch(server, elapsed_s)


def _put_aside(folder: Path) -> None:
    """What an interrupted or different attempt has left stays as evidence, under another name."""
    if folder.exists():
        folder.rename(folder.with_name(f"{folder.name}.earlier-{uuid.uuid4().hex[:6]}"))


def _launch_and_question(run: NotebookRun, params: SweepParams, trial: Planned, handle: ServerHandle) -> LaunchRecord:
    """Launches a trial and asks it everything but its speed; stops asking at the first answer that settles it."""
    with contextlib.suppress(ServerDied, NotReady):
        handle.get()
    launch = handle.launches()[-1]
    if launch.ready_s is None:
        return launch
    known, wait = run.profile.known_answer, params.answer_timeout_s
    asked = run.measure(
        f"{trial.id}/answer", handle, gate.ask_alone, keep_errors=True, prompt=known.prompt, max_new_tokens=known.max_new_tokens,
        timeout_s=wait,
    )  # fmt: skip
    if not asked.ok:
        return launch
    with _DOCUMENTS:
        documents = run.measure(
            "documents", handle, tokenize_documents, any_server=True, keep_errors=True,
            context=[handle.spec.model, params.text_tokens], documents=[GATE_TEXT], tokens=params.text_tokens,
        )  # fmt: skip
    if not documents.ok:
        return launch
    ids = documents.json("documents.json")[0]["ids"]
    pieces = gate.pieces_of(ids)
    scored = run.measure(
        f"{trial.id}/scores", handle, gate.score_alone, keep_errors=True, pieces=pieces, timeout_s=wait
    )
    if not scored.ok or any(r["error"] or score_problem(r["logprobs"]) for r in scored.json("scores.json")):
        return launch
    if trial.id == params.reference:
        run.measure(f"{trial.id}/again", handle, gate.score_alone, keep_errors=True, pieces=pieces, timeout_s=wait)
    decoded = run.measure(
        f"{trial.id}/decode", handle, gate.continue_alone, keep_errors=True, ids=ids[:PROMPT_TOKENS],
        new_tokens=NEW_TOKENS, timeout_s=wait,
    )  # fmt: skip
    if decoded.ok:
        run.measure(
            f"{trial.id}/load", handle, gate.ask_under_load, keep_errors=True, pieces=pieces, prompt=known.prompt,
            new_tokens=known.max_new_tokens, concurrency=params.load_concurrency, rounds=params.load_rounds,
            timeout_s=wait,
        )  # fmt: skip
    return launch


def _measure_speed(run: NotebookRun, params: SweepParams, trial: Planned, handle: ServerHandle) -> None:
    """A short benchmark, one trial at a time on the whole host; none of a trial whose answers are already garbage."""
    loaded = _taken(run, trial, "load")
    if loaded is None or not loaded.ok:
        return
    expect = run.profile.known_answer.expect
    answer = _answer(run, trial, expect)
    garbage, failed, _ = gate.load_faults(loaded.json("load.json"), expect, answer.text if answer else None)
    if failed or garbage:
        return
    if params.speed_repeats:
        calibrated = run.measure(
            "calibration", None, take_calibration, streams=params.speed_concurrency, api="completions", **run.there
        )
    for number in range(1, params.speed_repeats + 1):
        level = run.measure(
            f"{trial.id}/speed-{number}", handle, gate.benchmark_level, keep_errors=True,
            concurrency=params.speed_concurrency, count=requests_per_level(params.speed_concurrency), dataset="code",
            input_len=params.speed_input_len, output_len=params.speed_output_len, api="completions", seed=number,
            vocab_size=None, gap_timeout_s=params.answer_timeout_s, api_key_env=handle.params.api_key_env,
            calibration_file=str(calibrated.folder / "calibration.json"),
        )  # fmt: skip
        if not level.ok:
            return


# ------------------------------------------------------------------------------------------- from raw files to facts


def _taken(run: NotebookRun, trial: Planned, name: str) -> Measurement | None:
    """A measurement of a trial as it lies on disk, None if it was not taken."""
    folder = run.raw / trial.id / name
    file = folder / "stamp.json"
    return Measurement(folder, Stamp.model_validate_json(file.read_text())) if file.exists() else None


def _raw(run: NotebookRun, trial: Planned, name: str, file: str) -> Any:
    """A raw JSON file of a measurement that was taken without error, else None."""
    taken = _taken(run, trial, name)
    return taken.json(file) if taken is not None and taken.ok else None


def _derive(
    run: NotebookRun, params: SweepParams, trials: Sequence[Planned], known: Mapping[str, Expected]
) -> list[Tried]:
    """Every trial with its outcome, from raw files alone."""
    launches = {r.launch_id: r for r in run.launch_records()}
    reference = next(t for t in trials if t.id == params.reference)
    ran: dict[str, Ran] = {}
    finished: dict[str, Finished] = {}
    facts: dict[str, Facts] = {}
    for trial in trials:
        file = run.raw / trial.id / FINISHED
        if not file.exists():
            if known.get(trial.id) is None or known[trial.id].launched:
                raise NotMeasured(
                    f"trial {trial.id!r} of the sweep, finished", "it is not", "run it (`workbook run --resume RUN`)"
                )
            facts[trial.id] = Facts(id=trial.id, predicted=_predicted_words(known[trial.id]))
            continue
        finished[trial.id] = Finished.model_validate_json(file.read_text())
        launch = launches[finished[trial.id].launch_id]
        run.note_launch(launch.launch_id)
        facts[trial.id] = _facts(run, params, trial, reference, launch)
        ran[trial.id] = _ran(run, trial, launch)
    unsound = _unsound(facts[reference.id], params)
    convicted = {} if unsound else _same_bits(ran, trials, reference)
    made = []
    for trial in trials:
        words, other = convicted.get(trial.id, (None, None))
        one = facts[trial.id].model_copy(update={"same_bits": words, "same_bits_of": other})
        done = finished.get(trial.id)
        launch_of = launches[done.launch_id] if done else None
        speed, client = _speed(run, params, trial)
        one = one.model_copy(update={"client": client})
        if unsound and not one.is_reference:
            nothing = {"alone": None, "floor": None, "load_reference": None, "decode_gap_reference": None}
            one = one.model_copy(update={**nothing, "reference_problem": unsound})
        outcome = outcomes.judge(one, params.limit_nats, params.garbage_nats)
        made.append(
            Tried(
                planned=trial, launch=launch_of, facts=one, outcome=outcome, speed=speed,
                trial=_trial(run, params, trial, one, outcome, speed, launch_of, done),
            )
        )  # fmt: skip
    return made


def _unsound(reference: Facts, params: SweepParams) -> str | None:
    """Why nothing can be compared with the reference, None where it is sound."""
    found = outcomes.judge(reference, params.limit_nats, params.garbage_nats)
    return None if found.outcome == "works" else f"the reference is not sound ({found.outcome.replace('_', ' ')})"


def _predicted_words(one: Expected) -> str:
    first = one.found[0]
    code = "" if first.exit_code is None else f", exit {first.exit_code}"
    return f"predicted {first.outcome.replace('_', ' ')}{code}: {first.reason} [{first.source}]; `verify: all` (or its id) launches it"


def _facts(run: NotebookRun, params: SweepParams, trial: Planned, reference: Planned, launch: LaunchRecord) -> Facts:
    """What is known of a launched trial."""
    folder = run.log_file(launch).parent
    ready = launch.ready_s is not None
    values: dict[str, Any] = {
        "id": trial.id,
        "is_reference": trial.id == reference.id,
        "state": launch.state,
        "exit_code": launch.exit_code,
        "ready_s": launch.ready_s,
        "ended_s": launch.ended_s,
        "phase": launch.phases[-1][0].replace("_", " ") if launch.phases else None,
    }
    if not ready:
        if launch.state == "not_ready":
            samples = watching.read_samples(folder)
            values["stall"] = outcomes.stalled(samples, *_deadlines(params, trial))
            values["silence_s"] = outcomes.silence_s(samples) if samples else None
        else:
            values["failure"] = read_failure(folder, launch.exit_code)
        return Facts(**values)
    values |= _broken(run, trial)
    expect = run.profile.known_answer.expect
    answer, its = _answer(run, trial, expect), _answer(run, reference, expect)
    garbage, by = _garbage(answer, its, trial, run)
    values |= {"said": _said(answer), "garbage": garbage, "garbage_by": by}
    scores, base = _scores(run, trial), _scores(run, reference)
    if trial.id == reference.id:
        values["floor"] = outcomes.difference(base, _scores(run, trial, "again"))
    else:
        values["alone"] = outcomes.difference(base, scores)
        values["floor"] = outcomes.difference(base, _scores(run, reference, "again"))
    decoded, its_decoded = (_raw(run, t, "decode", "decode.json") for t in (trial, reference))
    values["decode_gap"] = gate.decode_gap(decoded) if decoded else None
    values["decode_gap_reference"] = gate.decode_gap(its_decoded) if its_decoded else None
    values["failed"] = values.get("failed") or _refused_pieces(run, trial)
    if decoded and not values["garbage"]:
        wrong, failed = gate.continuation_faults(decoded, its_decoded if trial.id != reference.id else None)
        if wrong:
            values |= {"garbage": wrong, "garbage_by": "decode"}
        values["failed"] = values["failed"] or failed
    loaded, its_loaded = (_raw(run, t, "load", "load.json") for t in (trial, reference))
    if loaded:
        wrong, failed, _ = gate.load_faults(loaded, expect, answer.text if answer else None)
        values |= {"load_garbage": wrong, "load_failed": failed, "load": _loaded(scores, loaded)}
        values["load_decode_gap"] = gate.load_decode_gap(loaded)
        values["load_reference"] = _loaded(base, its_loaded) if its_loaded else None
    if failed := _speed_failures(run, params, trial):
        values["load_failed"] = values.get("load_failed") or failed
    values["ignored"] = not_honoured(run, handle_flags(run, trial), launch)[0]
    return Facts(**values)


def handle_flags(run: NotebookRun, trial: Planned) -> dict[str, Any]:
    """Flags of the trial's launch: the profile's with the trial's on top."""
    return {**outcomes.by_field(run.profile.server.flags), **outcomes.by_field(trial.flags)}


def _broken(run: NotebookRun, trial: Planned) -> dict[str, Any]:
    """What went wrong while it was asked: another server, a death, silence, or a refused request."""
    names = ("answer", "scores", "again", "decode", "load")
    for name in (*names, *(p.name for p in sorted((run.raw / trial.id).glob("speed-*")))):
        taken = _taken(run, trial, name)
        if taken is None or taken.ok:
            continue
        error = taken.stamp.error or ""
        if taken.stamp.invalid:
            return {"invalid": f"{name}: {taken.stamp.invalid}"}
        if error.startswith("ServerDied"):
            return {
                "died": f"{_doing(name)}, {error.removeprefix('ServerDied: ').replace('exit code None', 'no exit code')}"
            }
        if "Timeout" in error:
            limit = f"{_params(run).answer_timeout_s:g} s"
            seen = watching.read_samples(taken.folder)
            stall = outcomes.at_work(seen, seen[-1].last_line) if len(seen) > 1 else None
            words = f"{_doing(name)}, no answer within {limit} ({_in_words(error)}); the process is alive"
            return {"silent": words, "stall": stall}
        return {"failed": f"{_doing(name)}, {error}"}
    documents = run.raw / "documents" / "stamp.json"
    if _taken(run, trial, "scores") is None and documents.exists():
        stamp = Stamp.model_validate_json(documents.read_text())
        if stamp.error:
            return {"failed": f"asked for token ids, {stamp.error}"}
    return {}


def _in_words(error: str) -> str:
    """What is worth keeping of a failed request's message."""
    found = error.partition("found: ")[2] or error.removeprefix("ServerError: ")
    return found.partition("; do: ")[0].rstrip(".")[:200]


def _doing(name: str) -> str:
    words = {
        "answer": "asked for the known answer",
        "scores": "scoring text alone",
        "again": "scoring text again",
        "decode": "continuing a text",
        "load": "under load",
    }
    return words.get(name, "in the benchmark")


def _answer(run: NotebookRun, trial: Planned, expect: str | None) -> Answer | None:
    raw = _raw(run, trial, "answer", "answer.json")
    return read_answer(raw, expect) if raw is not None else None


def _said(answer: Answer | None) -> str:
    if answer is None:
        return ""
    sign = (
        f" ({answer.degenerate}; nothing is expected of this model, so its numbers must tell)"
        if answer.degenerate
        else ""
    )
    return f"answers {answer.text.strip()[:30]!r}{sign}"


def _garbage(answer: Answer | None, its: Answer | None, trial: Planned, run: NotebookRun) -> tuple[str | None, str]:
    """What shows garbage in the answers of a trial that was asked alone, and which raw file holds it."""
    if answer is not None and answer.correct is False:
        sign = f"; {answer.degenerate}" if answer.degenerate else ""
        return f"the known answer is wrong: {answer.text[:40]!r} instead of {answer.expect!r}{sign}", "answer"
    if answer is not None and answer.degenerate:
        # where nothing is expected the model may be a toy: then its sign counts only if the reference has none
        if trial.id == _params(run).reference:
            told = answer.degenerate == "empty"
        else:
            told = its is None or its.degenerate is None
        if told:
            return f"its answer is degenerate: {answer.degenerate} ({answer.text[:40]!r})", "answer"
    raw = _raw(run, trial, "scores", "scores.json")
    for row in raw or []:
        if row["error"] is None and (problem := score_problem(row["logprobs"])):
            return f"scoring real text: {problem}", "scores"
    return None, "answer"


def _refused_pieces(run: NotebookRun, trial: Planned) -> str | None:
    """Pieces of text whose scoring was refused: what the others say is no proof for these."""
    for name in ("scores", "again"):
        raw = _raw(run, trial, name, "scores.json") or []
        if errors := [row["error"] for row in raw if row["error"]]:
            return f"{_doing(name)}, {len(errors)} of {len(raw)} pieces failed; first: {errors[0]}"
    return None


def _scores(run: NotebookRun, trial: Planned, name: str = "scores") -> list[Piece]:
    raw = _raw(run, trial, name, "scores.json")
    return gate.pieces_from(raw) if raw else []


def _loaded(alone: Sequence[Piece], raw: Mapping[str, Any]) -> outcomes.Difference | None:
    scored = [r for r in raw["requests"] if r["kind"] == "score" and not r["error"]]
    return outcomes.difference(alone, gate.pieces_from(scored))


def _ran(run: NotebookRun, trial: Planned, launch: LaunchRecord) -> Ran:
    scores = _raw(run, trial, "scores", "scores.json")
    decoded = _raw(run, trial, "decode", "decode.json")
    asked = outcomes.by_field({**handle_flags(run, trial), "model": trial.model})
    log = run.log(launch)
    told = [b for b in log.backends if b.known_by in ("line", "trace")] if log else []
    return Ran(
        id=trial.id,
        asked=asked,
        proven=[b.kind for b in told if b.taken is not None and b.taken == asked.get(b.kind)],
        says=run.server_info(launch) or {},
        prefill=_bits([r["logprobs"] for r in scores]) if scores else None,
        decode=_bits([decoded["answer"]["ids"], decoded["answer"]["logprobs"]]) if decoded else None,
    )


def _bits(values: Any) -> str | None:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest() if any(values) else None


def _same_bits(ran: Mapping[str, Ran], trials: Sequence[Planned], reference: Planned) -> dict[str, tuple[str, str]]:
    """Trials that computed another's bits where the other runs the reference's kernels: their flags had no effect.

    Each with the sentence for it and the other's id.
    """
    base = ran.get(reference.id)
    found: dict[str, tuple[str, str]] = {}
    if base is None:
        return found
    for trial in trials:
        mine = ran.get(trial.id)
        if mine is None or trial.id == reference.id:
            continue
        for other in ran.values():
            if other.id == trial.id or trial.id in found:
                continue
            differ = {n for n in {*mine.asked, *other.asked} if mine.asked.get(n) != other.asked.get(n)}
            if all(other.asked.get(n) == base.asked.get(n) for n in differ) and (
                words := outcomes.same_bits(mine, other)
            ):
                found[trial.id] = (words, other.id)
    return found


def not_honoured(run: NotebookRun, flags: Mapping[str, Any], launch: LaunchRecord) -> tuple[str | None, Evidence]:
    """Which asked backend the server did not run, by its own log; `/server_info` repeats what was asked and is no proof.

    Only a line or a trace in the log convicts; that no line contradicts a flag is no proof that it was honoured.
    """
    file = run.log_file(launch)
    log = run.log(launch)
    asked_of = outcomes.by_field(flags)
    for backend in log.backends if log else []:
        asked = asked_of.get(backend.kind)
        if (
            asked
            and asked != "auto"
            and backend.taken
            and backend.taken != asked
            and backend.known_by in ("line", "trace")
        ):
            info = run.server_info(launch) or {}
            repeats = f"; /server_info still says {info.get(backend.kind)}" if info.get(backend.kind) == asked else ""
            evidence = run.evidence(file, backend.line_no, backend.line)
            return f"{backend.kind} {asked} was asked, {backend.taken} runs{repeats}", evidence
    for notice in log.notices if log else []:
        if notice.id == "backend_ignored":
            return notice.text, run.evidence(file, notice.line_no, notice.line)
    ready = log.ready if log else None
    return None, run.evidence(file, ready.line_no if ready else None, ready.line if ready else None)


def _speed(run: NotebookRun, params: SweepParams, trial: Planned) -> tuple[Measured, str | None]:
    """Output tokens a second over the repeats, and why they are the client's own if they are."""
    summaries = []
    for number in range(1, params.speed_repeats + 1):
        taken = _taken(run, trial, f"speed-{number}")
        level = level_of(taken) if taken is not None and taken.ok else None
        if level is not None:
            summaries.append(metrics.level_summary(level))
    if not summaries:
        why = "no benchmark was asked for" if not params.speed_repeats else "not benchmarked"
        return Measured(value=None, unit="tok/s", reason=why), None
    bound = [s["client"].reason for s in summaries if s["client"].value == "client_bound"]
    key = "output_tokens_per_s"
    speed = summaries[0][key] if len(summaries) == 1 else metrics.across_repeats(summaries, key)
    if bound:
        return Measured(value=None, unit="tok/s", reason=f"client bound: {bound[0]}"), f"{bound[0]}"
    return speed, None


def _speed_failures(run: NotebookRun, params: SweepParams, trial: Planned) -> str | None:
    for number in range(1, params.speed_repeats + 1):
        taken = _taken(run, trial, f"speed-{number}")
        level = level_of(taken) if taken is not None and taken.ok else None
        causes = metrics.failures(level) if level is not None else {}
        if level is not None and causes:
            words = ", ".join(f"{name}: {n}" for name, n in causes.items())
            return f"{sum(causes.values())} of {len(level.requests)} requests of the benchmark failed ({words})"
    return None


def _trial(
    run: NotebookRun, params: SweepParams, trial: Planned, facts: Facts, outcome: Outcome, speed: Measured,
    launch: LaunchRecord | None, done: Finished | None,
) -> Trial:  # fmt: skip
    nothing = Measured(value=None, unit="nat/token", reason="the reference" if facts.is_reference else "no scores")
    stop = launch.stop if launch else None
    values = {
        "ready_s": Measured(
            value=facts.ready_s, unit="s", n=1 if facts.ready_s is not None else None,
            reason="one launch" if facts.ready_s is not None else f"never ready ({facts.state or 'not launched'})",
        ),
        "from_reference": facts.alone.measured if facts.alone else nothing,
        "under_load": facts.load.measured if facts.load else nothing.model_copy(update={"reason": "not asked under load"}),
        "output_tokens_per_s": speed,
        "gone": Measured(
            value=None if stop is None else "yes" if stop.gone else "no",
            reason="not launched" if launch is None else f"GPU memory: {stop.gpu_memory}" if stop else "no proof",
        ),
        "kernels": Measured(
            value=done.kernels_after - done.kernels_before if done else None, unit="files", n=1 if done else None,
            reason=f"{done.kernels_before} were there" if done else "not launched",
        ),
    }  # fmt: skip
    return Trial(
        id=trial.id,
        what=f"{trial.id}: {trial.what}" if trial.what != trial.id else trial.what,
        outcome=outcome.outcome,
        reason=outcome.reason,
        values=values,
        evidence=_evidence(run, trial, outcome, launch, facts.same_bits_of),
        launch_ids=[launch.launch_id] if launch else [],
        seconds=done.seconds if done else None,
    )


def _evidence(
    run: NotebookRun, trial: Planned, outcome: Outcome, launch: LaunchRecord | None, same_bits_of: str | None = None
) -> list[Evidence]:
    """What shows the outcome first, then the log."""
    if launch is None:
        return [run.evidence(run.raw / "expected" / "rows.json")]
    line = _line(run, trial, outcome, launch)
    files = {
        "answer": ("answer/answer.json", "answer/stamp.json"),
        "scores": ("scores/scores.json",),
        "decode": ("decode/decode.json",),
        "load": ("load/load.json", "load/stamp.json"),
        "speed": (f"speed-1/{LEVEL_FILE}",),
    }.get(outcome.shown_by, ())
    shown = [run.raw / trial.id / name for name in files if (run.raw / trial.id / name).exists()][:1]
    if outcome.shown_by == "launch" and (watch := run.log_file(launch).parent / watching.FILE).exists():
        return [line, run.evidence(watch)] if outcome.outcome in ("hangs", "not_enough_data") else [line]
    if outcome.outcome == "silently_ignored" and same_bits_of:
        both = [run.raw / name / "scores/scores.json" for name in (trial.id, same_bits_of)]
        bits = [run.evidence(file, note="log-probabilities with the same bits") for file in both]
        return [*bits, line] if outcome.shown_by == "scores" else [line, *bits]
    return [*(run.evidence(file) for file in shown), line]


def _line(run: NotebookRun, trial: Planned, outcome: Outcome, launch: LaunchRecord) -> Evidence:
    """The line of the log that belongs to an outcome: the cause, the contradiction, the last one written, or readiness."""
    file = run.log_file(launch)
    if outcome.shown_by == "launch":
        failure = read_failure(file.parent, launch.exit_code) if launch.state != "not_ready" else None
        if failure is not None and failure.line_no is not None:
            return run.evidence(file, failure.line_no, failure.line)
        with contextlib.suppress(OSError):
            lines = file.read_bytes().split(b"\n")
            last = next((n for n in range(len(lines), 0, -1) if lines[n - 1].strip()), None)
            if last is not None:
                return run.evidence(file, last, lines[last - 1].decode("utf-8", "replace").strip(), "its last line")
        return run.evidence(file, note="it wrote nothing")
    return not_honoured(run, handle_flags(run, trial), launch)[1]


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


# ------------------------------------------------------------------------------------------------ what a reader sees

#: Columns of the table of trials.
COLUMNS = {
    "ready_s": "ready after",
    "from_reference": "from the reference",
    "under_load": "under load, from itself alone",
    "output_tokens_per_s": "speed",
    "gone": "gone",
    "kernels": "compiled kernels added",
}


def outcome_rows(sweep: Sweep) -> list[Trial]:
    """The trials, in the order of the plan."""
    return [t.trial for t in sweep.tried]


def phase_rows(sweep: Sweep) -> list[dict[str, Any]]:
    """Start-up phases of every launched trial, for the figure."""
    return [row for t in sweep.tried if t.launch for row in launch_phases(t.launch, t.planned.id)]


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


def figure_rows(sweep: Sweep) -> list[dict[str, Any]]:
    """Speed against fidelity for the picture; trials without both carry the line that tells why."""
    rows = []
    for t in sweep.tried:
        zero = Measured(value=0.0, unit="nat/token", n=1, reason="the reference itself")
        quote = next((e.quote for e in t.trial.evidence if e.quote), None)
        rows.append(
            {
                "trial": t.planned.id,
                "outcome": t.trial.outcome,
                "chosen": t.planned.id == sweep.choice.id,
                "speed": t.speed,
                "fidelity": t.facts.alone.measured if t.facts.alone else zero if t.facts.is_reference else None,
                "quote": quote if t.outcome.shown_by in ("launch", "log") else t.outcome.reason,
            }
        )
    return rows


def honoured_rows(run: NotebookRun, sweep: Sweep) -> list[dict[str, Any]]:
    """Each asked backend: what /server_info repeats, what the log shows, what the bits show, and how that is known."""
    rows = []
    for one in sweep.tried:
        if one.launch is None:
            continue
        log = run.log(one.launch)
        info = run.server_info(one.launch) or {}
        taken = {b.kind: b for b in log.backends} if log else {}
        for flag, asked in outcomes.by_field(one.planned.flags).items():
            backend = taken.get(flag)
            rows.append(
                {
                    "trial": one.planned.id,
                    "flag": flag,
                    "asked": asked,
                    "/server_info": info.get(flag, "(never answered)" if not info else "(no such field)"),
                    "log": (backend.taken or "not known") if backend else "not known",
                    "log known by": backend.known_by.replace("_", " ") if backend else "not known",
                    "bits": one.facts.same_bits or _bits_words(one),
                }
            )
    return rows


def _bits_words(one: Tried) -> str:
    if one.facts.is_reference:
        return "the reference"
    if one.facts.alone is None:
        return "none to compare"
    return "the reference's" if one.facts.alone.identical else "its own"


def agreement_rows(run: NotebookRun, sweep: Sweep) -> list[dict[str, Any]]:
    """How far each trial that serves lies from the reference alone, and from itself under load."""
    rows = []
    reference = next((t.planned for t in sweep.tried if t.facts.is_reference), None)
    base = _compared(run, reference) if reference else []
    for t in sweep.tried:
        f = t.facts
        apart = f.floor if f.is_reference else f.alone
        if apart is None:
            continue
        mine = _compared(run, t.planned, "again" if f.is_reference else "scores")
        signed: Measured = Measured(value=None, reason="no scores")
        with contextlib.suppress(BadInput):
            signed = compare_scores(base, mine, _params(run).text_tokens).pooled
        rows.append(
            {
                "trial": f"{t.planned.id} (against itself)" if f.is_reference else t.planned.id,
                "mean |difference|": apart.measured,
                "mean difference": signed,
                "largest": Measured(value=apart.largest, unit="nat", n=1, reason="largest single token"),
                "decoding from its own prefill": Measured(
                    value=f.decode_gap, unit="nat/token", n=NEW_TOKENS if f.decode_gap is not None else None,
                    reason="mean over its own continuation" if f.decode_gap is not None else "not asked",
                ),
                "under load, worst piece": Measured(
                    value=f.load.worst_piece if f.load else None, unit="nat/token",
                    n=f.load.tokens if f.load else None, reason="from the same piece alone" if f.load else "not asked",
                ),
                "bit-identical": apart.identical,
            }
        )  # fmt: skip
    return rows


def _compared(run: NotebookRun, trial: Planned, name: str = "scores") -> list[dict[str, Any]]:
    """Scores as `compare_scores` takes them; the first token of each piece has none."""
    return [
        {
            "name": p.key,
            "key": p.key,
            "ids_sha256": p.ids_sha256,
            "logprobs": [x if x is not None else 0.0 for x in p.logprobs],
        }
        for p in _scores(run, trial, name)
        if p.problem is None
    ]


def predictions(run: NotebookRun, sweep: Sweep) -> list[Prediction]:
    """What the version's rules said of a trial, beside what became of it."""
    became = {t.planned.id: t for t in sweep.tried}
    made = []
    for one in expected(run) if not run.attached else []:
        tried = became.get(one.id)
        if not one.found or tried is None:
            continue
        first = one.found[0]
        measured = (
            Measured(value=tried.trial.outcome.replace("_", " "), n=1)
            if tried.launch
            else Measured(value=None, reason="not launched: not asked for in `verify`")
        )
        made.append(
            Prediction(
                id=f"expected-{one.id}",
                what=f"{one.id} on this SGLang",
                predicted=Measured(value=first.outcome.replace("_", " "), reason=first.reason),
                formula=first.id,
                source=first.source,
                measured=measured,
            )
        )
    return made


def verdicts(run: NotebookRun, sweep: Sweep) -> list[Verdict]:
    """One verdict a trial, that every server is gone, that the reference is sound, and whether there is one to go on with."""
    params = _params(run)
    tried = sweep.tried
    common: dict[str, Any] = {"rule": "lib.server.outcomes"}
    made = [
        Verdict(
            id=t.planned.id,
            claim=f"{t.planned.what} serves, runs what it was asked, and computes what {params.reference} computes, alone and under load"
            if not t.facts.is_reference
            else f"{t.planned.what}, the reference, serves, answers as expected, and repeats itself alone and under load",
            status=OUTCOMES[t.trial.outcome],
            measured=t.trial.values["from_reference"] if t.facts.alone else None,
            limit=f"mean |difference| at most {params.limit_nats:g} nat/token",
            reason=f"{t.trial.outcome.replace('_', ' ')}: {t.outcome.reason}",
            evidence=t.trial.evidence,
            launch_ids=t.trial.launch_ids,
            **common,
        )
        for t in tried
    ]
    launched = [t for t in tried if t.launch]
    claim = "At least one trial works, and one is chosen"
    if not launched:
        return [
            *made,
            Verdict(id="a-backend-works", claim=claim, status=Status.INCONCLUSIVE, limit="1 or more",
                    reason="no trial was launched", **common),
        ]  # fmt: skip
    stops = [t for t in launched if t.launch and t.launch.stop and t.launch.stop.gone]
    unknown = [t for t in stops if t.launch and t.launch.stop and t.launch.stop.gpu_back is None]
    words = f"{len(stops)} of {len(launched)}: no process, port free"
    words += (
        f"; GPU memory back for {len(stops) - len(unknown)}" if len(unknown) < len(stops) else "; no GPU to give back"
    )
    made.append(
        Verdict(
            id="gone", claim="Every server that was launched is gone, with all that it held",
            status=Status.PASS if len(stops) == len(launched) else Status.FAIL, limit="all", reason=words,
            evidence=[run.evidence(run.log_file(t.launch).parent / "launch.json") for t in launched if t.launch],
            launch_ids=[t.launch.launch_id for t in launched if t.launch], **common,
        )
    )  # fmt: skip
    chosen = next((t for t in tried if t.planned.id == sweep.choice.id), None)
    made.append(
        Verdict(
            id="a-backend-works", claim=claim, status=Status.PASS if chosen else Status.FAIL, limit="1 or more",
            measured=chosen.speed if chosen and chosen.speed.value is not None else None,
            reason=f"{sweep.choice.id}: {sweep.choice.why}" if chosen else sweep.choice.why,
            evidence=[e for t in ([chosen] if chosen else launched) for e in t.trial.evidence],
            launch_ids=[i for t in ([chosen] if chosen else launched) for i in t.trial.launch_ids], **common,
        )
    )  # fmt: skip
    return made


def choice_rows(sweep: Sweep) -> list[dict[str, Any]]:
    """The chosen configuration, why, and each thing that would change the choice."""
    rows = [{"what": "chosen", "which": sweep.choice.id or "none", "because": sweep.choice.why}]
    rows += [{"what": "would change it", "which": which, "because": why} for which, why in sweep.choice.would_change]
    return rows


def recommendation(sweep: Sweep) -> str:
    """Which trial to go on with, and what must not be believed."""
    if not sweep.tried:
        return "No trial was launched here."
    ignored = [t.planned.id for t in sweep.tried if t.trial.outcome == "silently_ignored"]
    if sweep.choice.id is None:
        return "No trial works: read the quoted lines, then change the trials."
    text = f"Go on with {sweep.choice.id}: {sweep.choice.why}"
    return f"{text}; {', '.join(ignored)} would serve, but not what the name says." if ignored else f"{text}."
