"""Both arms of the speculation experiment on real servers: launched in turn, asked the same, each answer kept raw.

    raw/NN/<arm>-<k>/<text>-C<c>/level.jsonl    one level of load (lib.load.client), with each request's own counts
    raw/NN/<arm>-<k>/pilot-<text>-C<c>/...      the same on other prompts, before the prediction is frozen
    raw/NN/<arm>-<k>/greedy/greedy.json         greedy answers as token ids
    raw/NN/<arm>-<k>/probes/probes.json         sampled answers and probes of single sampling parameters
    raw/NN/<arm>-<k>/long-run/level.jsonl       a long run, watched for decay and loops
    raw/NN/<arm>-<k>/state/state.json           /server_info at the end of the arm
    raw/NN/expectation-*/expectation.json       what was expected, frozen before what it is about was measured

Every measurement's stamp names its launch, checked before and after (lib.results).
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from lib.audit.probes import token_ids
from lib.errors import BadInput, ServerError, WorkbookError
from lib.hosts import local
from lib.load import workloads
from lib.load.benchmark import LEVEL_FILE, build_workload, take_calibration
from lib.load.client import run_level
from lib.load.workloads import requests_per_level
from lib.params import HostParams, SpeculativeParams
from lib.results import Answering, Measurement, NotebookRun, ServerHandle
from lib.server.launch import GpuUse, LaunchRecord
from lib.server.remote import gpu_use, load_way, place_of
from lib.server.speedup import schedule

#: Sampling parameters that verification may treat otherwise than plain decoding, with a value that shows.
PENALTIES: dict[str, dict[str, float]] = {
    "frequency_penalty": {"frequency_penalty": 2.0},
    "presence_penalty": {"presence_penalty": 2.0},
    "repetition_penalty": {"repetition_penalty": 1.8},
}
MIN_P_SAMPLES = 6
SAMPLE_LEN = 8
TOP_ROWS = 20
LEAST_REQUESTS = 8


@dataclass
class Unit:
    """One launch of one arm and what was measured on it."""

    name: str
    treated: bool
    handle: ServerHandle
    launch: LaunchRecord
    cells: dict[tuple[str, int], Measurement] = field(default_factory=dict)
    pilots: dict[tuple[str, int], Measurement] = field(default_factory=dict)
    greedy: Measurement | None = None
    probes: Measurement | None = None
    long_run: Measurement | None = None
    state: Measurement | None = None

    @property
    def ready(self) -> bool:
        return self.launch.ready_s is not None

    def measurements(self) -> list[Measurement]:
        """Everything measured on it, in order."""
        single = [m for m in (self.greedy, self.probes, self.long_run, self.state) if m is not None]
        return [*self.pilots.values(), *self.cells.values(), *single]

    @property
    def launch_ids(self) -> list[str]:
        """Launches that its measurements came from: one, unless the run was interrupted inside it."""
        found = dict.fromkeys(i for m in self.measurements() for i in m.launch_ids)
        return list(found) or [self.launch.launch_id]


@dataclass
class Arms:
    """The launches in the order in which they ran, and what was asked of them."""

    units: list[Unit]
    texts: dict[str, Any] = field(default_factory=dict)
    tops: Measurement | None = None
    pilot_expectation: Measurement | None = None

    def of(self, treated: bool) -> list[Unit]:
        """The ready launches of one arm."""
        return [u for u in self.units if u.treated is treated and u.ready]


def treatment(run: NotebookRun, name: str) -> ServerHandle:
    """The profile's server with the treatment's flags and environment on top."""
    params = _params(run)
    return run.server(name, params.flags, params.environment, strict=False)


def _params(run: NotebookRun) -> SpeculativeParams:
    return run.params  # type: ignore[return-value]


def requests_at(params: SpeculativeParams, concurrency: int) -> int:
    """Requests of one level: max(8, 2C) unless params say otherwise, since prompts differ in what is accepted."""
    return max(params.num_requests or max(LEAST_REQUESTS, requests_per_level(concurrency)), concurrency)


# what is sent --------------------------------------------------------------------------------------------------------


def make_texts(
    server: Answering,
    folder: Path,
    kinds: Sequence[str],
    count: int,
    input_len: int,
    seed: int,
    vocab_size: int | None,
    sentence: str | None = None,
) -> None:
    """Writes texts.json: `count` prompts of each kind as token ids, so that every launch gets the very same tokens.

    Chat tasks are rendered by the server itself (its chat template); a kind that cannot be made keeps its reason.
    """
    made: dict[str, Any] = {}
    for kind in kinds:
        try:
            made[kind] = _texts_of(server, kind, count, input_len, seed, vocab_size, sentence)
        except WorkbookError as error:
            made[kind] = {"ids": [], "problem": str(error)}
    local.write_atomic(folder / "texts.json", json.dumps(made))


def _texts_of(
    server: Answering, kind: str, count: int, input_len: int, seed: int, vocab_size: int | None, sentence: str | None
) -> dict[str, Any]:
    if kind == "repeating" and sentence:
        texts = [f"{seed + number} " + sentence * (input_len * 8 // len(sentence) + 2) for number in range(count)]
        return {"ids": [token_ids(server, t, input_len) for t in texts], "how": f"a number, then {sentence!r} repeated"}
    made = build_workload(kind, count - 1, input_len, 1, seed, vocab_size)
    prompts = [r.prompt for r in (*made.requests, *made.warmup)]
    how = f"{kind.replace('_', ' ')}, seed {seed}: {json.dumps(made.settings)}"
    if kind == "chat":
        ids, templated = _chat_ids(server, prompts)
        return {
            "ids": ids,
            "how": how + ("" if templated else "; without a chat template (this server returns no ids)"),
        }
    if kind == "random_ids":
        return {"ids": [list(p) for p in prompts], "how": how}
    return {"ids": [token_ids(server, str(p), input_len) for p in prompts], "how": how}


def _chat_ids(server: Answering, prompts: Sequence[Any]) -> tuple[list[list[int]], bool]:
    """Chat messages as the server's template renders them; their bare text where it doesn't return prompt ids."""
    ids: list[list[int]] = []
    model = server.control.served_model_name()
    try:
        for messages in prompts:
            body = {
                "model": model,
                "messages": list(messages),
                "max_tokens": 1,
                "temperature": 0,
                "return_prompt_token_ids": True,
            }
            choice = server.control.post_json("/v1/chat/completions", body, 120.0)["choices"][0]
            ids.append([int(i) for i in choice["prompt_token_ids"]])
        return ids, True
    except (ServerError, KeyError, TypeError):
        return [token_ids(server, str(m[0]["content"]), 1024) for m in prompts], False


def send_level(
    server: Answering,
    folder: Path,
    kind: str,
    ids: Sequence[Sequence[int]],
    warm: Sequence[Sequence[int]],
    concurrency: int,
    output_len: int,
    ignore_eos: bool,
    seed: int,
    gap_timeout_s: float,
    api_key_env: str | None,
    calibration_file: str,
    keep_text: bool = False,
) -> None:
    """One closed-loop level of /generate on token ids, after a cache flush (level.jsonl)."""
    prompts = [tuple(p) for p in (*ids, *warm)]
    made = workloads.make_workload(kind, prompts, output_len, len(warm), seed, {}, ignore_eos=ignore_eos)
    _flush(server)
    url, sender = load_way(server)
    run_level(
        url,
        "generate",
        made.requests,
        out=folder / LEVEL_FILE,
        concurrency=concurrency,
        warmup=made.warmup,
        workload=made.describe(),
        gap_timeout_s=gap_timeout_s,
        api_key_env=api_key_env,
        calibration=json.loads(Path(calibration_file).read_text()),
        keep_text=keep_text,
        sender=sender,
    )


def _flush(server: Answering) -> None:
    """Empties the cache; the scheduler may still hold the last answer's batch for a moment and then refuses (400)."""
    for pause_s in (0.2, 0.5, 1.0, 2.0):
        try:
            return server.control.flush_cache()
        except ServerError:
            time.sleep(pause_s)
    return server.control.flush_cache()


def _ask(server: Answering, ids: Sequence[int], tokens: int, **sampling: Any) -> dict[str, Any]:
    asked = {"temperature": 0, "max_new_tokens": tokens, **sampling}
    answer = server.control.generate({"input_ids": list(ids), "sampling_params": asked})
    return {"output_ids": _output_ids(answer), "meta_info": answer["meta_info"]}


def _output_ids(answer: Mapping[str, Any]) -> list[int]:
    ids = answer.get("output_ids")
    if ids is None:
        raise ServerError("/generate returns output_ids", f"keys {sorted(answer)}", "SGLang 0.5.10 or later does")
    return [int(i) for i in ids]


def send_greedy(
    server: Answering, folder: Path, prompts: Mapping[str, Sequence[Sequence[int]]], output_len: int, ignore_eos: bool
) -> None:
    """Greedy answers one at a time after a cache flush (greedy.json: by kind of text)."""
    _flush(server)
    made = {
        kind: [_ask(server, ids, output_len, ignore_eos=ignore_eos) for ids in listed]
        for kind, listed in prompts.items()
    }
    local.write_atomic(folder / "greedy.json", json.dumps(made))


def send_probes(
    server: Answering, folder: Path, sampled: Sequence[int], penalised: Sequence[int], samples: int, output_len: int
) -> None:
    """Sampled answers to one prompt and probes of min_p and of penalties (probes.json: name -> answers)."""
    _flush(server)
    length = min(SAMPLE_LEN, output_len)
    made: dict[str, list[dict[str, Any]]] = {
        "greedy": [_ask(server, sampled, length, ignore_eos=True)],
        "free": [_ask(server, sampled, length, temperature=1.0, ignore_eos=True) for _ in range(samples)],
        "min_p": [
            _ask(server, sampled, length, temperature=1.0, min_p=1.0, ignore_eos=True) for _ in range(MIN_P_SAMPLES)
        ],
        "plain": [_ask(server, penalised, min(64, output_len), ignore_eos=True)],
    }
    for name, sampling in PENALTIES.items():
        made[name] = [_ask(server, penalised, min(64, output_len), ignore_eos=True, **sampling)]
    local.write_atomic(folder / "probes.json", json.dumps(made))


def read_state(server: Answering, folder: Path) -> None:
    """What the server says about itself at the end of the arm (thresholds can be changed while it runs)."""
    local.write_atomic(folder / "state.json", json.dumps(server.control.server_info()))


def ask_tops(server: Answering, folder: Path, questions: Sequence[Mapping[str, Any]]) -> None:
    """The most likely next tokens after each context (tops.json), asked of the untreated server."""
    made = []
    for one in questions:
        body = {
            "input_ids": list(one["ids"]),
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": TOP_ROWS,
        }
        meta = server.control.generate(body)["meta_info"]
        rows = (meta.get("output_top_logprobs") or [None])[0]
        made.append({"text": one["text"], "request": one["request"], "top": [list(r[:2]) for r in rows or []]})
    local.write_atomic(folder / "tops.json", json.dumps(made))


def look_at_memory(folder: Path, on: Mapping[str, Any] | None = None) -> None:
    """GPU and host memory before the first launch, of the host `on` where that is another (memory.json)."""
    place = place_of(HostParams.model_validate(on)) if on else None
    view = place.view() if place else None
    use = gpu_use(view) if view else GpuUse.now()
    free = view.memory_free_bytes if view else psutil.virtual_memory().available
    local.write_atomic(folder / "memory.json", json.dumps({"gpu": use.model_dump(), "host_free_bytes": free}))


# what is expected ----------------------------------------------------------------------------------------------------


def frozen(run: NotebookRun, name: str, make: Callable[[], list[dict[str, Any]]]) -> Measurement:
    """Writes an expectation once (expectation.json); a resumed run and a rebuild read it and never write another."""
    return run.measure(f"expectation-{name}", None, functools.partial(_write_expectation, make))


def _write_expectation(make: Callable[[], list[dict[str, Any]]], folder: Path) -> None:
    local.write_atomic(folder / "expectation.json", json.dumps(make(), indent=1))


# the experiment ------------------------------------------------------------------------------------------------------


def measure(
    run: NotebookRun,
    expect: Callable[[Unit, Unit], list[dict[str, Any]]],
    divergences: Callable[[Unit, Unit], list[dict[str, Any]]],
) -> Arms:
    """Launches A B B A ... and measures the same on each launch; stops at the first launch that does not start.

    Args:
        expect: predictions from the pilots of the first untreated and the first treated launch; called before any
            level of a treated launch is measured.
        divergences: places at which greedy answers of the two arms part, to be asked of the last untreated launch.
    """
    params = _params(run)
    arms = Arms([])
    order = schedule(params.launches)
    counts = {True: 0, False: 0}
    for treated in order:
        counts[treated] += 1
        name = f"{'treated' if treated else 'base'}-{counts[treated]}"
        handle = treatment(run, name) if treated else run.server(name)
        unit = Unit(name, treated, handle, run.try_launch(handle))
        arms.units.append(unit)
        if not unit.ready:
            run.skip(f"the launches after {name}", "it did not start")
            break
        if not arms.texts:
            arms.texts = _texts(run, handle)
        if not any(t["ids"] for t in arms.texts.values()):
            break
        _measure_unit(run, arms, unit, last=counts[treated] == params.launches, expect=expect)
        if not treated and counts[False] == max(2, params.launches) and arms.of(True):
            arms.tops = _explain(run, handle, divergences(arms.of(False)[0], arms.of(True)[0]))
        unit.state = run.measure(f"{name}/state", handle, read_state, keep_errors=True)
        handle.stop()
        unit.launch = next((r for r in run.launch_records() if r.launch_id == unit.launch.launch_id), unit.launch)
    return arms


def _texts(run: NotebookRun, handle: ServerHandle) -> dict[str, Any]:
    params = _params(run)
    checkpoint = run.checkpoint(handle)
    largest = max(params.concurrency)
    count = max(requests_at(params, c) for c in params.concurrency)
    count = max(count, params.answers, params.long_run_requests) + 2 * largest + 4
    made = run.measure(
        "texts",
        handle,
        make_texts,
        any_server=True,
        keep_errors=True,
        context=None if run.offline else handle.spec.model,
        kinds=params.texts,
        count=count,
        input_len=params.input_len,
        seed=params.seed,
        vocab_size=checkpoint.vocab_size if checkpoint else None,
        sentence=params.sentence,
    )
    if not made.ok:
        run.skip("all texts", made.problem or "they could not be made")
        return {}
    texts: dict[str, Any] = made.json("texts.json")
    for kind, one in texts.items():
        if not one["ids"]:
            run.skip(f"text {kind}", one["problem"])
    return texts


def _measure_unit(
    run: NotebookRun, arms: Arms, unit: Unit, last: bool, expect: Callable[[Unit, Unit], list[dict[str, Any]]]
) -> None:
    params = _params(run)
    kinds = [k for k in params.texts if arms.texts[k]["ids"]]
    streams = max(params.concurrency)
    calibrated = run.measure("calibration", None, take_calibration, streams=streams, api="generate", **run.there)
    largest = max(params.concurrency)

    def level(folder: str, kind: str, c: int, first: int, count: int, **more: Any) -> Measurement:
        pool = arms.texts[kind]["ids"]
        arguments = {
            "output_len": params.output_len,
            "ignore_eos": params.ignore_eos,
            "warm": pool[-c:],
            **more,
        }
        return run.measure(
            f"{unit.name}/{folder}",
            unit.handle,
            send_level,
            keep_errors=True,
            kind=kind,
            ids=pool[first : first + count],
            concurrency=c,
            seed=params.seed,
            gap_timeout_s=params.gap_timeout_s,
            api_key_env=unit.handle.params.api_key_env,
            calibration_file=str(calibrated.folder / "calibration.json"),
            **arguments,
        )

    first_of_arm = unit.name.endswith("-1")
    if first_of_arm:
        for kind in kinds:
            for c in params.concurrency if kind == kinds[0] else params.concurrency[:1]:
                if unit.treated or kind == kinds[0]:
                    begin = len(arms.texts[kind]["ids"]) - 2 * largest - 4  # prompts that no level measures
                    unit.pilots[kind, c] = level(f"pilot-{kind}-C{c}", kind, c, begin, max(4, c))
    if first_of_arm and unit.treated:
        arms.pilot_expectation = frozen(run, "pilot", lambda: expect(arms.of(False)[0], unit))
    for kind in kinds:
        for c in params.concurrency:
            unit.cells[kind, c] = level(f"{kind}-C{c}", kind, c, 0, requests_at(params, c))
    unit.greedy = run.measure(
        f"{unit.name}/greedy",
        unit.handle,
        send_greedy,
        keep_errors=True,
        prompts={kind: arms.texts[kind]["ids"][: params.answers] for kind in kinds},
        output_len=params.output_len,
        ignore_eos=params.ignore_eos,
    )
    if params.samples:
        unit.probes = run.measure(
            f"{unit.name}/probes",
            unit.handle,
            send_probes,
            keep_errors=True,
            sampled=arms.texts[kinds[0]]["ids"][0],
            penalised=arms.texts["repeating" if "repeating" in kinds else kinds[0]]["ids"][0],
            samples=params.samples,
            output_len=params.output_len,
        )
    if params.long_run_requests and unit.treated and last:
        unit.long_run = level(
            "long-run", kinds[0], min(8, largest), 0, params.long_run_requests, output_len=params.long_run_len,
            ignore_eos=True, keep_text=True,
        )  # fmt: skip


def _explain(run: NotebookRun, handle: ServerHandle, questions: list[dict[str, Any]]) -> Measurement | None:
    if not questions and not run.offline:
        return None
    if run.offline and not (run.raw / "tops" / "stamp.json").exists():
        return None
    return run.measure("tops", handle, ask_tops, keep_errors=True, questions=questions)


def refuse_one_text(params: SpeculativeParams) -> None:
    """Refuses parameters that would measure nothing.

    Raises:
        BadInput: the treatment asks for no speculation, so both arms would be the same server.
    """
    asked = params.flags.get("speculative_algorithm") or params.flags.get("--speculative-algorithm")
    if not asked:
        raise BadInput(
            "flags that turn speculation on (speculative_algorithm)",
            f"{sorted(params.flags)} with environment {sorted(params.environment)}: an environment variable alone turns nothing on",
            "add speculative_algorithm: NEXTN",
        )
