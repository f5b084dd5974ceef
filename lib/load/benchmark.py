"""Notebook 03's measurements: levels of load, depths of context and a smoke test, each one raw record.

Every record is watched (`lib.server.telemetry`): GPU state, Xids, /metrics before and after. A level that fails is kept
with its reasons and the next one goes on. A request to stop (an interrupted kernel, or a file named `stop` in the run's
folder) keeps what is measured, the level in progress included; what was left out is named, and `--resume` takes it.
What the records say is in `bench_rows` and `bench_verdicts`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.audit.probes import token_ids
from lib.errors import BadInput, WorkbookError
from lib.hosts import local
from lib.load import bench_forecast, live, workloads
from lib.load.bench_forecast import Forecast, Frozen, depth_id, depth_users, server_ranks
from lib.load.client import Request, run_level
from lib.load.judge import calibrate
from lib.load.workloads import Workload, requests_per_level
from lib.params import BenchmarkParams
from lib.report.progress import progress_bar
from lib.results import Answering, Measurement, NotebookRun, ServerHandle
from lib.server import telemetry
from lib.server.remote import calibration_for, load_way

LEVEL_FILE, WARMUP_FILE = "level.jsonl", "warmup.jsonl"
#: Tokens of a warm-up request: enough for a prefill and some decode steps.
WARMUP_TOKENS = 8
#: Tokens kept free below the served limit, beside the new ones.
LIMIT_MARGIN = 16
#: level -> its repeats, first to last; those that were not measured are missing.
Levels = dict[int, list[Measurement]]


@dataclass(frozen=True)
class DepthCell:
    """One cell of the depth axis: how deep, how many at once, and its record (raw files in cold/ and hit/)."""

    depth: int | str
    concurrency: int
    measurement: Measurement

    def tokens(self) -> int | None:
        """The prompt's tokens in the cold half, as they were sent; None where nothing was sent."""
        file = self.measurement.folder / "depth.json"
        return int(json.loads(file.read_text())["tokens"]) if file.exists() else None


class Stopped(WorkbookError):
    """A level was stopped on request; its record holds what had been measured."""


def build_workload(
    dataset: str, count: int, input_len: int, output_len: int, seed: int, vocab_size: int | None, warmup: int = 1
) -> Workload:
    """The requests of one level: `count` measured ones and `warmup` that are none of them."""
    if dataset == "random_ids":
        return workloads.random_ids(count, input_len, output_len, vocab_size=vocab_size, seed=seed, warmup=warmup)
    if dataset == "code":
        return workloads.code_text(count, input_len, output_len, seed=seed, warmup=warmup)
    if dataset == "repeating":
        return workloads.repeating_text(count, input_len, output_len, seed=seed, warmup=warmup)
    if dataset == "chat":
        return workloads.chat_tasks(count, output_len, seed=seed, warmup=warmup)
    raise BadInput("dataset is code, chat, random_ids or repeating", repr(dataset))


@dataclass(frozen=True)
class Watch:
    """What goes along with a measurement and does not decide its numbers: whose GPUs, and who is told of progress."""

    ranks: list[int] | None = None
    progress: Callable[[dict[str, Any]], None] | None = None

    @contextlib.contextmanager
    def over(self, server: Answering, folder: Path) -> Iterator[dict[str, Any]]:
        """Watches the server and its GPUs during the `with` block."""
        here, place = local.is_local_url(server.base_url), getattr(server, "place", None)
        with telemetry.watching(server.control, folder, ranks=self.ranks, local_server=here, place=place) as told:
            yield told


def _send(
    server: Answering,
    folder: Path,
    made: Workload,
    watch: Watch,
    api: str,
    concurrency: int,
    told: str = "",
    **options: Any,
) -> None:
    """Warms up, then sends a workload under watch: warmup.jsonl, level.jsonl and telemetry in `folder`.

    Raises:
        Stopped: on a request to stop, once the record of what had been measured is written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = server.control.served_model_name()
    url, sender = load_way(server)
    common: dict[str, Any] = {"model": model, "sender": sender, **options}
    try:
        if made.warmup:
            few = [dataclasses.replace(r, max_tokens=min(r.max_tokens, WARMUP_TOKENS)) for r in made.warmup]
            run_level(url, api, few, out=folder / WARMUP_FILE, concurrency=len(few), **common)
        with watch.over(server, folder) as seen:
            run_level(
                url,
                api,
                made.requests,
                out=folder / LEVEL_FILE,
                concurrency=concurrency,
                workload=made.describe() | {"warmup_file": WARMUP_FILE},
                progress=watch.progress,
                **common,
            )
            seen["tokens"] = sum(r.max_tokens for r in made.requests if r.ignore_eos)
    except KeyboardInterrupt:
        raise Stopped(
            f"{len(made.requests)} requests{told}",
            "stopped on request, what had been measured is kept",
            "take it again with `workbook run --resume RUN`",
        ) from None


def send_level(
    server: Answering,
    folder: Path,
    concurrency: int,
    count: int,
    dataset: str,
    input_len: int,
    output_len: int,
    api: str,
    seed: int,
    vocab_size: int | None,
    gap_timeout_s: float,
    api_key_env: str | None,
    calibration_file: str,
    watch: Watch = Watch(),  # noqa: B008  (frozen)
) -> None:
    """Sends one closed-loop level after a cache flush and a warm-up, and writes its raw record (level.jsonl)."""
    warmup = max(1, min(concurrency // 4, 32))
    made = build_workload(dataset, count, input_len, output_len, seed + concurrency, vocab_size, warmup)
    server.control.flush_cache()
    _send(
        server,
        folder,
        made,
        watch,
        "chat" if dataset == "chat" else api,
        concurrency,
        gap_timeout_s=gap_timeout_s,
        api_key_env=api_key_env,
        calibration=json.loads(Path(calibration_file).read_text()),
    )


def take_calibration(folder: Path, streams: int, api: str, on: Mapping[str, Any] | None = None) -> None:
    """Lets the client prove against the built-in judge that it shows the truth at this load (calibration.json).

    `on` names another host (parameters), on which the client or at least the judge then runs.
    """
    made = calibration_for(on, streams, api) or calibrate(streams, api=api)
    local.write_atomic(folder / "calibration.json", json.dumps(made, default=str))


# the plan and its pace ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Item:
    """One record to take: its name, how long it should take at the bound, how it is taken, and the tokens of each answer
    (None: not fixed)."""

    name: str
    expected_s: float
    take: Callable[[Callable[[dict[str, Any]], None]], Measurement]
    tokens_each: int | None = None


class Pace:
    """Says per level what is done and how long it will take still, from what earlier levels took against their bound."""

    def __init__(self, run: NotebookRun, items: Sequence[Item], section: str = "") -> None:
        self.run, self.items, self.section = run, list(items), section
        bar: dict[str, Any] = {"disable": True} if live.is_watched(run.folder) else {}  # the live panel shows the same
        self.bar = progress_bar(total=len(self.items), bar_format="{desc} {bar} {elapsed}", **bar)
        self.taken_s = self.expected_s = 0.0
        self.began = time.monotonic()
        self.stop_asked = False

    def left_s(self, place: int, done: int = 0, of: int = 0) -> float | None:
        """Seconds from now to the end of the last item; None before anything has been timed."""
        elapsed = time.monotonic() - self.began
        this: float | None = None
        if done and of:
            this = elapsed * (of - done) / done
        elif self.expected_s:
            this = max(0.0, self.items[place].expected_s * self.taken_s / self.expected_s - elapsed)
        if this is None:
            return None
        factor = self.taken_s / self.expected_s if self.expected_s else (elapsed + this) / self.items[place].expected_s
        return this + sum(item.expected_s for item in self.items[place + 1 :]) * factor

    def words(self, place: int, done: int = 0, of: int = 0) -> str:
        """One line: which level, how far, how long still."""
        left = self.left_s(place, done, of)
        parts = [f"{self.items[place].name} ({place + 1} of {len(self.items)})"]
        parts += [f"{done} of {of} requests"] if of else []
        parts += [f"about {left:.0f} s left in all"] if left is not None else []
        return ", ".join(parts)

    def say(self, place: int, done: int = 0, of: int = 0) -> None:
        """Tells whoever watches: the `workbook` command's line, or a bar in a live notebook."""
        line = self.words(place, done, of)
        self.run.say(line)
        self.bar.set_description_str(line)

    def watcher(self, place: int) -> Callable[[dict[str, Any]], None]:
        """What a level calls twice a second: tells progress, and passes a request to stop on, once."""
        self.began = time.monotonic()

        def told(state: Mapping[str, Any]) -> None:
            done, of = int(state.get("done", 0)), int(state.get("of", 0))
            self.say(place, done, of)
            self.tell("progress", place, counted=dict(state), left_s=self.left_s(place, done, of))
            if not self.stop_asked and stop_file(self.run).exists():
                self.stop_asked = True
                raise KeyboardInterrupt

        return told

    def tell(self, kind: str, place: int = 0, **more: Any) -> None:
        """Tells onlookers (the live panel) where the measuring is."""
        item = self.items[place] if self.items else None
        named: dict[str, Any] = {"item": item.name, "tokens_each": item.tokens_each} if item and kind not in ("begin", "end") else {}
        told = live.Told(kind=kind, section=self.section, place=place, items=len(self.items), **named, **more)
        live.tell(self.run.folder, told)

    def took(self, place: int, seconds: float) -> None:
        """Notes how long an item took (a record that was there already took none and says nothing)."""
        self.bar.update(1)
        if seconds > 0.2:
            self.taken_s += seconds
            self.expected_s += self.items[place].expected_s


def stop_file(run: NotebookRun) -> Path:
    """The file that asks a running notebook to stop measuring: `stop` in the run's folder."""
    return run.folder / "stop"


def take_all(run: NotebookRun, section: str, items: Sequence[Item], budget_s: float | None) -> dict[str, Measurement]:
    """Takes records in order; on a request to stop, or past the budget, the rest is named and left out.

    What was left out is kept as raw/NN/not_measured_<section>.json, so that a rebuild leaves out the same.
    """
    file = run.raw / f"not_measured_{section}.json"
    left_out: dict[str, str] = json.loads(file.read_text()) if run.offline and file.exists() else {}
    taken: dict[str, Measurement] = {}
    pace = Pace(run, items, section)
    began = time.monotonic()
    stopped: str | None = None
    pace.tell("begin")
    for place, item in enumerate(items):
        recorded = (run.raw / item.name / "stamp.json").exists()
        if run.offline:
            if recorded or item.name not in left_out:
                taken[item.name] = item.take(lambda _: None)
                pace.tell("taken", place, folder=taken[item.name].folder, why=taken[item.name].problem)
            continue
        if stopped is None and stop_file(run).exists():
            stopped = "stopped on request before it began"
        late = budget_s is not None and time.monotonic() - began > budget_s and not recorded
        if stopped or late:
            left_out[item.name] = stopped or f"the budget of {budget_s:g} s was used up (budget_s)"
            continue
        pace.say(place)
        at = time.monotonic()
        try:
            taken[item.name] = found = item.take(pace.watcher(place))
            pace.took(place, time.monotonic() - at)
            pace.tell("taken", place, folder=found.folder, why=found.problem)
            if (found.problem or "").startswith(Stopped.__name__):
                stopped = "stopped on request before it began"
        except KeyboardInterrupt:
            left_out[item.name] = "stopped on request before anything was sent"
            stopped = "stopped on request before it began"
    pace.bar.close()
    if not run.offline:
        stop_file(run).unlink(missing_ok=True)  # it has been obeyed; the next resume is not to be stopped by it
        local.write_atomic(file, json.dumps(left_out))
    for name, why in left_out.items():
        if name not in taken:
            run.skip(name, why)
    for place, item in enumerate(items):
        if item.name not in taken and item.name in left_out:
            pace.tell("left_out", place, why=left_out[item.name])
    pace.tell("end")
    return taken


# levels ---------------------------------------------------------------------------------------------------------------


def level_name(concurrency: int, repeat: int) -> str:
    """A level's raw folder: level-C4, and level-C4-r2 for its second repeat."""
    return f"level-C{concurrency}" + (f"-r{repeat + 1}" if repeat else "")


def expected_s(made: Forecast, name: str, count: int, output_len: int, concurrency: int, input_len: int) -> float:
    """About how long a level takes, up to a factor that is the same for all: from its bound where there is one."""
    decode, first = made.point(name), next((p for p in made.points if p.kind == "ttft" and p.value), None)
    rate = decode.value if decode and decode.value else 20.0 * concurrency**0.7
    prefill = first.value * input_len / max(first.new_tokens, 1) if first and first.value else 0.0
    return count * output_len / rate + count * prefill


def measure_calibration(run: NotebookRun) -> Path:
    """The client's calibration at the highest load of this notebook (raw record `calibration`)."""
    params: BenchmarkParams = run.params  # type: ignore[assignment]
    api = "chat" if params.dataset == "chat" else params.api
    streams = max([*params.concurrency, *(depth_users(params) if params.depths else [])])
    taken = run.measure("calibration", None, take_calibration, streams=streams, api=api, **run.there)
    return taken.folder / "calibration.json"


def measure_levels(run: NotebookRun, server: ServerHandle, frozen: Frozen) -> Levels:
    """Measures every level of the parameters, repeats interleaved (A B C A B C); a level that fails is kept."""
    params: BenchmarkParams = run.params  # type: ignore[assignment]
    vocab = vocab_size(run, server)
    if params.dataset == "random_ids" and vocab is None:
        why = "the vocabulary size is not known, and an id outside it kills the server (set vocab_size)"
        run.skip("random-id levels", why)
        return {}
    calibration, ranks = measure_calibration(run), server_ranks(server)
    items = []
    for repeat in range(params.repeats):
        for c in params.concurrency:
            count = params.num_requests or requests_per_level(c)
            arguments = {
                "concurrency": c,
                "count": count,
                "dataset": params.dataset,
                "input_len": params.input_len,
                "output_len": params.output_len,
                "api": params.api,
                "seed": params.seed + 10_000 * repeat,
                "vocab_size": vocab,
                "gap_timeout_s": params.gap_timeout_s,
                "api_key_env": server.params.api_key_env,
                "calibration_file": str(calibration),
            }
            seconds = expected_s(frozen.forecast, f"level-C{c}", count, params.output_len, c, params.input_len)
            take = functools.partial(_take, run, server, level_name(c, repeat), send_level, ranks, arguments)
            fixed = params.output_len if params.dataset != "chat" else None
            items.append(Item(level_name(c, repeat), seconds, take, fixed))
    taken = take_all(run, "levels", items, params.budget_s)
    found: Levels = {}
    for c in params.concurrency:
        names = [level_name(c, repeat) for repeat in range(params.repeats)]
        if kept := [taken[name] for name in names if name in taken]:
            found[c] = kept
    return found


def _take(
    run: NotebookRun,
    server: ServerHandle,
    name: str,
    function: Callable[..., None],
    ranks: list[int] | None,
    arguments: Mapping[str, Any],
    progress: Callable[[dict[str, Any]], None],
) -> Measurement:
    watched = functools.partial(function, watch=Watch(ranks, progress))
    return run.measure(name, server, watched, keep_errors=True, **arguments)


def vocab_size(run: NotebookRun, server: ServerHandle) -> int | None:
    """The vocabulary size from params or the checkpoint's config.json; None where neither tells (never from a guess)."""
    params: BenchmarkParams = run.params  # type: ignore[assignment]
    checkpoint = None if params.vocab_size else run.checkpoint(server)
    return checkpoint.vocab_size if checkpoint else params.vocab_size


# depths ---------------------------------------------------------------------------------------------------------------


def planned_depths(run: NotebookRun, server: ServerHandle) -> dict[int | str, int | None]:
    """Each depth of the parameters in tokens; `limit` from the context length that the server will have, where it is known."""
    params: BenchmarkParams = run.params  # type: ignore[assignment]
    found: dict[int | str, int | None] = {}
    for depth in params.depths:
        if isinstance(depth, int):
            found[depth] = depth
            continue
        checkpoint = run.checkpoint(server)
        flag = server.params.flags.get("context_length")
        length = int(str(flag)) if flag else (checkpoint.context_length if checkpoint else None)
        found[depth] = length - _room(params) if length else None
    return found


def _room(params: BenchmarkParams) -> int:
    return params.depth_output_len + params.depth_suffix_len + LIMIT_MARGIN


def served_limit(run: NotebookRun, server: ServerHandle, prompts: int) -> tuple[int | None, str]:
    """The deepest prompt that leaves room for its answer, with `prompts` of them in the KV pool, and what says so.

    All prompts of a cell must stay in the pool together, or the second half would not find them there.
    """
    launches = server.launches()
    info = run.server_info(launches[-1]) if launches else None
    if not info:
        return None, "the server has not said its limits"
    states = info.get("internal_states")
    inner = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    length, pool = (info.get(k) or inner.get(k) for k in ("max_req_input_len", "max_total_num_tokens"))
    params: BenchmarkParams = run.params  # type: ignore[assignment]
    limits = []
    if isinstance(length, int):
        limits.append((length - _room(params), f"max_req_input_len {length:,}"))
    if isinstance(pool, int):
        limits.append((pool // prompts - _room(params), f"a pool of {pool:,} tokens for {prompts} prompts"))
    return min(limits) if limits else (None, "the server has not said its limits")


def depth_prompts(
    server: Answering, depth: int, count: int, suffix_len: int, seed: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Pairs of prompts as token ids: one of exactly `depth` tokens of code, and the same with `suffix_len` more.

    The first line of each is its own, so that no two share a prefix. The second prompt is what an agent sends next: all
    that was there, and something new.

    Raises:
        BadInput: the texts give too few tokens.
    """
    texts = workloads.code_text(count, depth * 2, 1, seed=seed, warmup=0).requests
    ends = workloads.code_text(count, suffix_len * 4, 1, seed=seed + 1, warmup=0).requests
    pairs, short = [], []
    for i, (text, end) in enumerate(zip(texts, ends, strict=True)):
        mark = hashlib.sha256(f"{seed} {depth} {i}".encode()).hexdigest()[:12]
        ids = tuple(token_ids(server, f"{mark}\n{text.prompt}", depth))
        new = tuple(token_ids(server, str(end.prompt), suffix_len))
        if len(ids) < depth or len(new) < suffix_len:
            short.append(f"prompt {i}: {len(ids)} and {len(new)} tokens")
        pairs.append((ids, ids + new))
    if short:
        raise BadInput(f"{depth} tokens and {suffix_len} more", "; ".join(short[:3]), "lower the depth")
    return pairs


def send_depth(
    server: Answering,
    folder: Path,
    depth: int,
    concurrency: int,
    count: int,
    output_len: int,
    suffix_len: int,
    seed: int,
    gap_timeout_s: float,
    api_key_env: str | None,
    calibration_file: str,
    watch: Watch = Watch(),  # noqa: B008  (frozen)
) -> None:
    """Sends `count` prompts of one depth to an empty cache (cold/), then each again with a new end (hit/).

    Over /generate as token ids: the depth is exact, and each answer says how many tokens came from the cache.
    """
    pairs = depth_prompts(server, depth, count + 1, suffix_len, seed)
    warm = Request("depth-w0", pairs.pop()[0][: min(depth, 256)], WARMUP_TOKENS)
    local.write_atomic(
        folder / "depth.json",
        json.dumps({"tokens": depth, "suffix": suffix_len, "requests": count, "users": concurrency}),
    )
    server.control.flush_cache()
    options = {
        "gap_timeout_s": gap_timeout_s, "api_key_env": api_key_env,
        "calibration": json.loads(Path(calibration_file).read_text()),
    }  # fmt: skip
    for half, place in (("cold", 0), ("hit", 1)):
        settings = {"depth": depth, "half": half, "suffix_len": suffix_len, "text": "standard library, as token ids"}
        made = workloads.make_workload(f"depth_{half}", [p[place] for p in pairs], output_len, 0, seed, settings)
        if half == "cold":
            made = dataclasses.replace(made, warmup=(warm,))
        _send(server, folder / half, made, watch, "generate", concurrency, f" of {half} prompts", **options)


def measure_depths(run: NotebookRun, server: ServerHandle, frozen: Frozen) -> list[DepthCell]:
    """Measures every depth for one user and for the agents, cold and with a prefix hit; what is too deep is named."""
    params: BenchmarkParams = run.params  # type: ignore[assignment]
    if not params.depths:
        run.skip("context depths", "the parameters name none (depths)")
        return []
    calibration, ranks = measure_calibration(run), server_ranks(server)
    if not run.offline and not server.launches():
        server.get()  # only a server that has run says how deep a prompt may be
    items, cells = [], []
    for depth, planned in planned_depths(run, server).items():
        for c in depth_users(params):
            count = math.ceil(params.depth_requests / c) * c  # all users are busy to the end
            limit, said = served_limit(run, server, count)
            tokens = limit if depth == "limit" else planned
            name = depth_id(depth, c)
            if tokens is None or tokens < 16 or (limit is not None and tokens > limit):
                run.skip(name, f"{tokens if tokens is not None else 'unknown'} tokens: {said}")
                continue
            arguments = {
                "depth": tokens,
                "concurrency": c,
                "count": count,
                "output_len": params.depth_output_len,
                "suffix_len": params.depth_suffix_len,
                "seed": params.seed + c,
                "gap_timeout_s": params.gap_timeout_s,
                "api_key_env": server.params.api_key_env,
                "calibration_file": str(calibration),
            }
            seconds = expected_s(frozen.forecast, f"{name}-decode", 2 * count, params.depth_output_len, c, tokens)
            take = functools.partial(_take, run, server, name, send_depth, ranks, arguments)
            items.append(Item(name, seconds, take, params.depth_output_len))
            cells.append((depth, c, name))
    taken = take_all(run, "depths", items, params.budget_s)
    return [DepthCell(depth, c, taken[name]) for depth, c, name in cells if name in taken]


# the prediction and the smoke test ------------------------------------------------------------------------------------


def forecast_now(run: NotebookRun, server: ServerHandle) -> Forecast:
    """The prediction as it is computed now (see `bench_forecast.freeze` for the one that counts)."""
    return bench_forecast.forecast(run, server, planned_depths(run, server))


def predict(run: NotebookRun, server: ServerHandle) -> Frozen:
    """The run's frozen prediction; written down now if there is none yet."""
    return bench_forecast.freeze(run, forecast_now(run, server))


def send_smoke(server: Answering, folder: Path, prompt: str, tokens: int, api_key_env: str | None) -> None:
    """One chat completion, alone and cold, as people try a server by hand (level.jsonl of one request)."""
    made = workloads.make_workload(
        "smoke", [({"role": "user", "content": prompt},)], tokens, 0, 0, {"tokens": tokens}, ignore_eos=False
    )
    server.control.flush_cache()
    _send(server, folder, made, Watch(), "chat", 1, api_key_env=api_key_env)


def measure_smoke(run: NotebookRun, server: ServerHandle) -> Measurement:
    """The smoke test of the parameters."""
    params: BenchmarkParams = run.params  # type: ignore[assignment]
    return run.measure(
        "smoke",
        server,
        send_smoke,
        keep_errors=True,
        prompt=params.smoke_prompt,
        tokens=params.smoke_tokens,
        api_key_env=server.params.api_key_env,
    )
