"""sglang.bench_serving beside this workbook's client: the same requests, one after the other, on the same server.

A raw record `beside-C4` (and `-r2` ...) holds both: `ours/` as every level, `peer/` with the requests as bench_serving got them
(requests.jsonl), its arguments (argv.json), its output (log.txt), its result row (result.jsonl, keys redacted) and /metrics before
and after. Who goes first changes from repeat to repeat. What they say is in `definitions` and `beside_rows`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lib.errors import BadInput, ServerError, WorkbookError
from lib.hosts import local
from lib.load import beside_runner
from lib.load.bench_forecast import Frozen, server_ranks
from lib.load.benchmark import (
    WARMUP_FILE,
    WARMUP_TOKENS,
    Item,
    Watch,
    _send,
    _take,
    build_workload,
    expected_s,
    measure_calibration,
    take_all,
    vocab_size,
)
from lib.load.client import Request, run_level
from lib.load.definitions import BACKENDS
from lib.load.workloads import Workload, requests_per_level, requests_sha256
from lib.params import BenchmarkParams
from lib.results import Answering, Measurement, NotebookRun, ServerHandle
from lib.server.redact import redact_object, redact_text
from lib.server.spec import resolve_python

OURS, PEER = "ours", "peer"
REQUESTS, ARGV, LOG, RESULT, RAN = "requests.jsonl", "argv.json", "log.txt", "result.jsonl", "ran.json"
#: bench_serving's imports (torch and the server's modules) and its longest level.
READY_S, LEVEL_S = 240.0, 600.0
#: What `take_all` keeps of records that were left out, with the reason (its section is `beside`).
NOT_MEASURED = "not_measured_beside.json"
#: (users at once, repeat) -> the record of both clients.
Pairs = dict[tuple[int, int], Measurement]


class Runner:
    """bench_serving in the server's environment, kept alive over levels; it is started by the first one."""

    def __init__(
        self,
        python: str,
        api_key_env: str | None,
        secrets: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.python, self.api_key_env, self.secrets = python, api_key_env, list(secrets)
        self.environment = dict(environment or {})
        self.about: dict[str, Any] = {}
        self._process: subprocess.Popen[str] | None = None

    def _start(self) -> subprocess.Popen[str]:
        key = os.environ.get(self.api_key_env or "", "")
        kept = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy") and k != "PYTHONPATH"}
        # a host whose packages lie on PYTHONPATH (the bundle's) keeps it; its own `lib` is not bench_serving's
        paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
        kept |= {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
        kept |= self.environment | ({"OPENAI_API_KEY": key} if key else {})
        process = subprocess.Popen(
            [self.python, beside_runner.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, env=kept,
        )  # fmt: skip
        self._process = process
        try:
            self.about = self._answer(READY_S)
        except ServerError:
            self.close()
            raise
        if not self.about.get("ready"):
            self.close()
            raise ServerError(f"bench_serving runs in the environment of {self.python}", str(self.about.get("problem")))
        return process

    def _answer(self, within_s: float) -> dict[str, Any]:
        process = self._process
        if process is None or process.stdout is None:
            raise ServerError("bench_serving's process", "it is not there")
        readable, _, _ = select.select([process.stdout], [], [], within_s)
        line = process.stdout.readline() if readable else ""
        if not line:
            how = f"no answer within {within_s:g} s" if not readable else f"it ended with exit code {process.wait(10)}"
            raise ServerError(f"bench_serving answers from {self.python}", how)
        return dict(json.loads(line))

    def ready(self) -> subprocess.Popen[str]:
        """Its process, started and with its imports done (before a window that is watched).

        Raises:
            ServerError: it cannot be run there.
        """
        return self._process or self._start()

    def __call__(self, argv: Sequence[str], log: Path) -> dict[str, Any]:
        """Runs one level and says how it ended.

        Raises:
            ServerError: it cannot be run there, or does not end.
        """
        process = self.ready()
        if process.stdin is None:
            raise ServerError("bench_serving's process", "it takes no jobs")
        try:
            process.stdin.write(json.dumps({"argv": list(argv), "log": str(log)}) + "\n")
            process.stdin.flush()
            return self._answer(LEVEL_S)
        except (OSError, ServerError) as error:
            self.close()
            if isinstance(error, ServerError):
                raise
            raise ServerError("bench_serving's process takes jobs", str(error)) from error

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            if process.stdin:
                process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def rows_for(requests: Sequence[Request]) -> list[dict[str, Any]]:
    """Requests as bench_serving's `autobench` data set takes them: in this order, with this length to generate."""
    return [{"prompt": r.prompt, "output_len": r.max_tokens} for r in requests]


def same_text(made: Workload) -> Workload:
    """The workload with its texts stripped: bench_serving strips a prompt, and both are to send the same."""
    requests = tuple(
        dataclasses.replace(r, prompt=r.prompt.strip()) if isinstance(r.prompt, str) else r for r in made.requests
    )
    return dataclasses.replace(made, requests=requests, sha256=requests_sha256(requests))


def peer_argv(
    base_url: str,
    model_path: str,
    served: str,
    api: str,
    concurrency: int,
    made: Workload,
    requests: Path,
    result: Path,
) -> list[str]:
    """bench_serving's arguments for these requests, with its warm-up off: both are warmed up by the same other prompts."""
    ends = any(not r.ignore_eos for r in made.requests)
    return [
        "--backend", BACKENDS[api], "--base-url", base_url, "--model", model_path, "--served-model-name", served,
        "--tokenizer", model_path, "--dataset-name", "autobench", "--dataset-path", str(requests),
        "--num-prompts", str(len(made.requests)), "--max-concurrency", str(concurrency), "--warmup-requests", "0",
        "--output-file", str(result), "--output-details", "--disable-tqdm", *(["--disable-ignore-eos"] if ends else []),
    ]  # fmt: skip


def _model_path(server: Answering) -> str:
    """The model's folder as the server itself says it."""
    for path in ("/model_info", "/get_model_info"):
        with contextlib.suppress(ServerError):
            if found := server.control.get_json(path).get("model_path"):
                return str(found)
    raise ServerError(
        "the server says where its model is (/model_info)", "it does not", "bench_serving needs the tokenizer's folder"
    )


def _send_peer(
    server: Answering,
    folder: Path,
    made: Workload,
    watch: Watch,
    api: str,
    concurrency: int,
    runner: Runner,
    api_key_env: str | None,
) -> None:
    """The same warm-up, then the same requests by bench_serving, under watch; its files are redacted before they are kept."""
    folder.mkdir(parents=True)
    served = server.control.served_model_name()
    local.write_atomic(folder / REQUESTS, "".join(json.dumps(row) + "\n" for row in rows_for(made.requests)))
    secrets = [*runner.secrets, *server.control.secrets]
    runner.ready()
    server.control.flush_cache()
    if made.warmup:
        few = [dataclasses.replace(r, max_tokens=min(r.max_tokens, WARMUP_TOKENS)) for r in made.warmup]
        run_level(
            server.base_url, api, few, out=folder / WARMUP_FILE, concurrency=len(few), model=served, api_key_env=api_key_env
        )  # fmt: skip
    with tempfile.TemporaryDirectory() as work:
        log, result = Path(work) / LOG, Path(work) / RESULT
        argv = peer_argv(
            server.base_url, _model_path(server), served, api, concurrency, made, folder / REQUESTS, result
        )
        local.write_atomic(folder / ARGV, json.dumps(argv, indent=1))
        with watch.over(server, folder) as seen:
            ran = runner(argv, log)
            seen["tokens"] = sum(r.max_tokens for r in made.requests if r.ignore_eos) if not ran["exit_code"] else 0
        words = redact_text(log.read_text(encoding="utf-8", errors="replace"), secrets) if log.exists() else ""
        local.write_atomic(folder / LOG, words)
        local.write_atomic(folder / RAN, json.dumps({**runner.about, **ran}))
        if ran["exit_code"] or not result.exists():
            last = next((line.strip() for line in reversed(words.splitlines()) if line.strip()), "no output")
            raise ServerError(
                "bench_serving gives a result",
                f"exit code {ran['exit_code']}: {last[:300]}",
                f"read {LOG} of this record",
            )
        rows = [
            redact_object(json.loads(line)) for line in result.read_text(encoding="utf-8").splitlines() if line.strip()
        ]
        text = redact_text("".join(json.dumps(row) + "\n" for row in rows), secrets)
        local.write_atomic(folder / RESULT, text)


def send_pair(
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
    peer_first: bool,
    runner: Runner | None = None,
    watch: Watch = Watch(),  # noqa: B008  (frozen)
) -> None:
    """The same requests by both clients, one after the other, each after a cache flush and the same warm-up."""
    if runner is None:
        raise BadInput("a process that runs bench_serving", "none")
    warmup = max(1, min(concurrency // 4, 32))
    made = same_text(build_workload(dataset, count, input_len, output_len, seed + concurrency, vocab_size, warmup))
    way = "chat" if dataset == "chat" else api
    calibration = json.loads(Path(calibration_file).read_text())

    def ours() -> None:
        server.control.flush_cache()
        _send(
            server, folder / OURS, made, watch, way, concurrency,
            gap_timeout_s=gap_timeout_s, api_key_env=api_key_env, calibration=calibration,
        )  # fmt: skip

    def peer() -> None:
        _send_peer(server, folder / PEER, made, watch, way, concurrency, runner, api_key_env)

    for step in (peer, ours) if peer_first else (ours, peer):
        step()
        time.sleep(0.2)


def pair_name(concurrency: int, repeat: int) -> str:
    """A pair's raw folder: beside-C4, and beside-C4-r2 for its second repeat."""
    return f"beside-C{concurrency}" + (f"-r{repeat + 1}" if repeat else "")


def measure_beside(run: NotebookRun, server: ServerHandle, frozen: Frozen) -> Pairs:
    """Both clients at each level of `bench_serving`, repeats interleaved; {} where it is not asked, or not possible (said in `skipped`)."""
    params: BenchmarkParams = run.params  # type: ignore[assignment]
    if not params.bench_serving:
        return {}
    vocab, runner, why = vocab_size(run, server), None, None
    order = [(c, repeat) for c in params.bench_serving for repeat in range(params.bench_serving_repeats)]
    left = [pair_name(*pair) for pair in order if not (run.raw / pair_name(*pair) / "stamp.json").exists()]
    if run.profile.host.remote:
        why = "bench_serving is run on the notebook's own machine, and the server is on another"
    elif params.dataset == "random_ids" and vocab is None:
        why = "the vocabulary size is not known"
    elif left and not run.offline:
        try:
            runner = Runner(
                str(resolve_python(server.params.python)), server.params.api_key_env, environment=server.params.environment
            )  # fmt: skip
            run.say("bench_serving: importing")
            runner.ready()
        except WorkbookError as error:
            why = str(error)
    if why:
        if not run.offline:
            local.write_atomic(run.raw / NOT_MEASURED, json.dumps(dict.fromkeys(left, why)))
        for name in left:
            run.skip(name, why)
        order = [pair for pair in order if pair_name(*pair) not in left]
        if not order:
            return {}
    calibration, ranks = measure_calibration(run), server_ranks(server)
    items = [
        _item(run, server, frozen, runner, c, repeat, vocab, str(calibration), ranks)
        for repeat in range(params.bench_serving_repeats)
        for c in params.bench_serving
        if (c, repeat) in order
    ]
    try:
        taken = take_all(run, "beside", items, params.budget_s)
    finally:
        if runner:
            runner.close()
    return {(c, repeat): taken[pair_name(c, repeat)] for c, repeat in order if pair_name(c, repeat) in taken}


def _item(
    run: NotebookRun, server: ServerHandle, frozen: Frozen, runner: Runner | None, c: int, repeat: int, vocab: int | None,
    calibration: str, ranks: list[int] | None,
) -> Item:  # fmt: skip
    params: BenchmarkParams = run.params  # type: ignore[assignment]
    count = params.num_requests or requests_per_level(c)
    arguments: Mapping[str, Any] = {
        "concurrency": c, "count": count, "dataset": params.dataset, "input_len": params.input_len, "output_len": params.output_len,
        "api": params.api, "seed": params.seed + 10_000 * repeat, "vocab_size": vocab, "gap_timeout_s": params.gap_timeout_s,
        "api_key_env": server.params.api_key_env, "calibration_file": calibration, "peer_first": bool(repeat % 2),
    }  # fmt: skip
    seconds = 2 * expected_s(frozen.forecast, f"level-C{c}", count, params.output_len, c, params.input_len) + 5.0
    send = functools.partial(send_pair, runner=runner)
    return Item(
        pair_name(c, repeat),
        seconds,
        functools.partial(_take, run, server, pair_name(c, repeat), send, ranks, arguments),
    )
