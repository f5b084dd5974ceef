"""Load levels: start the sending process, keep its raw records, read them back.

`run_level` sends one level of load and returns the path of its raw record; `level_summary` recomputes every number
from that file alone. The sending itself is `lib.load.client_worker`, a process of its own (see there why), so the same
call works in a script, in a thread and inside a Jupyter kernel, whose running event loop and GIL it does not share.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import platform
import random
import selectors
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from pydantic_core import from_json

from lib import __version__
from lib.errors import BadInput, ServerError, UnreadableFile
from lib.load import metrics
from lib.load.client_wire import RID_PREFIX
from lib.records import Measured

LEVEL_SCHEMA = 1
PATHS = {"generate": "/generate", "completions": "/v1/completions", "chat": "/v1/chat/completions"}
#: The sending process asks for this priority, and goes on without it where it is not allowed (its header says).
SENDER_NICE = -10
#: Several sending processes are told to start together this much later, so that all have read it by then.
WORKERS_LEAD_NS = 20_000_000
_DISK_FAULTS = {
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.EFBIG
}  # fmt: skip
ARRIVALS = ("constant", "poisson")


class Sender(Protocol):
    """Runs the sending processes of a level; `about` says on what, afterwards."""

    about: dict[str, Any]

    def __call__(
        self,
        jobs: list[Path],
        progress: Callable[[dict[str, Any]], None] | None,
        observe: Callable[[], None] | None = None,
    ) -> list[tuple[dict[str, Any], Path]]: ...


@dataclass(frozen=True)
class Request:
    """One request before it is bytes: a prompt (text, token ids, or chat messages) and how much to generate.

    `temperature=0` and `ignore_eos=True` by default: levels are comparable only if they generate the same lengths.
    For acceptance under speculation set `ignore_eos=False`: text after the end of a text repeats itself.

    Requests that name the same `session` are its turns, in order: each is sent `think_s` after the answer to the one
    before, and its prompt is only what it adds (a tool result, the user's next message); the whole conversation is sent.
    The answers in it are the server's own, or `answer_before`, where the same text must be sent in every run.
    """

    id: str
    prompt: str | tuple[int, ...] | tuple[dict[str, str], ...]
    max_tokens: int
    temperature: float = 0.0
    ignore_eos: bool = True
    extra: dict[str, Any] = field(default_factory=dict)
    session: str | None = None
    think_s: float = 0.0
    answer_before: str | None = None

    def prompt_kind(self) -> str:
        """text, ids or messages."""
        if isinstance(self.prompt, str):
            return "text"
        return "messages" if self.prompt and isinstance(self.prompt[0], dict) else "ids"

    def prompt_sha256(self) -> str:
        """SHA-256 of the prompt, by which warm-up and measured prompts are told apart."""
        return self._prompt_sha256

    @cached_property
    def _prompt_sha256(self) -> str:
        raw = self.prompt if isinstance(self.prompt, str) else json.dumps(self.prompt, separators=(",", ":"))
        return sha256(raw.encode("utf-8", "surrogatepass")).hexdigest()


def request_body(
    request: Request, api: str, model: str | None, rid: str | None, continuous_usage: bool = False
) -> bytes:
    """The JSON body of a request for one of the three endpoints, always streaming.

    Raises:
        BadInput: the endpoint cannot take this kind of prompt.
    """
    kind = request.prompt_kind()
    if not request.prompt or request.max_tokens < 1:
        raise BadInput("a request has a prompt and generates at least one token", f"request {request.id!r}")
    if api == "generate":
        if kind == "messages":
            raise BadInput("/generate takes text or token ids", f"chat messages in {request.id!r}", "use api='chat'")
        sampling = {
            "max_new_tokens": request.max_tokens,
            "temperature": request.temperature,
            "ignore_eos": request.ignore_eos,
            **request.extra,
        }
        body: dict[str, Any] = {"text" if kind == "text" else "input_ids": request.prompt, "sampling_params": sampling}
        if rid:
            body["rid"] = rid
        body["stream"] = True
    else:
        if api == "chat" and kind == "ids":
            raise BadInput(
                "/v1/chat/completions takes messages or text", f"token ids in {request.id!r}", "use api='generate'"
            )
        if api == "completions" and kind == "messages":
            raise BadInput("/v1/completions takes text or ids", f"chat messages in {request.id!r}", "use api='chat'")
        options = {"include_usage": True} | ({"continuous_usage_stats": True} if continuous_usage else {})
        body = {"model": model}
        if api == "chat":
            body["messages"] = [{"role": "user", "content": request.prompt}] if kind == "text" else request.prompt
        else:
            body["prompt"] = request.prompt
        body |= {
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "ignore_eos": request.ignore_eos,
            "stream": True,
            "stream_options": options,
            **request.extra,
        }
    return json.dumps(body, separators=(",", ":")).encode()


def arrival_offsets_ns(
    count: int, rate: float, arrival: str, seed: int, ramp_s: float = 0.0, ramp_from: float = 0.0
) -> list[int]:
    """When each request of an open loop is due, in nanoseconds after the start; nothing in it depends on answers.

    With `ramp_s` the rate grows evenly from `ramp_from` to `rate` during it, then stays.
    """
    generator = random.Random(f"arrivals-{seed}")
    at, offsets = 0.0, []
    for number in range(count):
        # `at` counts expected arrivals; the time at which so many are expected is the inverse of the rate's integral.
        expected = float(number) if arrival == "constant" else at
        offsets.append(int(_time_of_arrival(expected, rate, ramp_s, ramp_from) * 1e9))
        at += generator.expovariate(1.0)
    return offsets


def _time_of_arrival(expected: float, rate: float, ramp_s: float, ramp_from: float) -> float:
    within = (ramp_from + rate) / 2 * ramp_s
    if expected >= within:
        return ramp_s + (expected - within) / rate
    slope = (rate - ramp_from) / ramp_s
    if slope == 0:
        return expected / rate
    return (math.sqrt(max(ramp_from**2 + 2 * slope * expected, 0.0)) - ramp_from) / slope


def split_url(base_url: str) -> tuple[str, int, bool, str]:
    """Host, port, whether TLS, and path prefix of a base URL; a URL that is not one is refused with the reason."""
    do = "give it as http://HOST:PORT, for instance http://127.0.0.1:30000"
    try:
        parts = urlsplit(base_url)
        port = parts.port
    except ValueError as error:
        raise BadInput("the server's base URL", f"{base_url!r} ({error})", do) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadInput("the server's base URL", repr(base_url), do)
    if parts.query or parts.fragment:
        raise BadInput("a base URL without ? and #", repr(base_url), do)
    if parts.username or parts.password:
        raise BadInput("a base URL without a user name or password in it", None, "name the key's environment variable")
    tls = parts.scheme == "https"
    return parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/")


def run_level(
    base_url: str,
    api: str,
    requests: Sequence[Request],
    *,
    out: Path,
    concurrency: int | None = None,
    rate: float | None = None,
    arrival: str = "poisson",
    seed: int = 0,
    model: str | None = None,
    warmup: Sequence[Request] = (),
    workload: dict[str, Any] | None = None,
    workers: int = 1,
    gap_timeout_s: float = 60.0,
    first_timeout_s: float = 600.0,
    connect_timeout_s: float = 10.0,
    max_seconds: float | None = None,
    drain_s: float = 30.0,
    api_key_env: str | None = None,
    continuous_usage: bool = False,
    keep_text: bool = False,
    calibration: dict[str, Any] | None = None,
    cores: Sequence[int] = (),
    progress: Callable[[dict[str, Any]], None] | None = None,
    extra_header: dict[str, Any] | None = None,
    ca_file: Path | None = None,
    offsets_s: Sequence[float] | None = None,
    ramp_s: float = 0.0,
    ramp_from: float = 0.0,
    observe: Callable[[], dict[str, Any]] | None = None,
    sender: Sender | None = None,
) -> Path:
    """Send one level of load and write its raw record: a header line, then one JSON line a request that was sent.

    Closed loop (`concurrency`): that many slots, each sends its next request when its last one ended; a slot's request
    is due when the slot gets free. Open loop (`rate` per second, `arrival` constant or poisson): a request is due at
    its own time, whatever the server does, so a slow server meets a growing number of requests in flight. Replay
    (`offsets_s`): an open loop with the given times.

    Requests with a `session` are sent as sessions: a slot or a due time belongs to a whole session, whose turns follow
    each other. After a turn that failed, the rest of its session is not sent (`unsent_after_failed_turn`).

    Args:
        base_url: http://HOST:PORT of the server, or https://.
        api: generate, completions or chat.
        requests: what is sent, in this order, each once.
        out: the record's path; it appears whole or not at all.
        model: served model name, for completions and chat (read it from /v1/models).
        warmup: requests sent before the window, at the same concurrency, never measured; must be other prompts.
        workers: sending processes; concurrency and requests are dealt out among them.
        gap_timeout_s: a stream in which no byte comes for longer is a `stall`.
        first_timeout_s: an answer that has not begun after it is `no_first_token`.
        max_seconds: send nothing after it; what is in flight may finish within `drain_s`.
        api_key_env: name of the environment variable that holds the API key; neither is its value ever recorded.
        continuous_usage: ask the OpenAI endpoints for token counts in every event (exact per-token latency there).
        calibration: what `lib.load.judge.calibrate` said about this client at this load; kept in the header.
        cores: pin the sending processes to these cores.
        progress: called about twice a second with what has been counted so far (`together`): done, of, in_flight, ...
        ca_file: certificates to trust under https, instead of the system's.
        offsets_s: seconds after the start at which each request (session) is due.
        ramp_s: closed loop: start the slots one after the other over so many seconds. Open loop: let the rate grow to
            `rate` during them, from `ramp_from`.
        observe: called when all is ready to send and again when all has ended; both answers go into the header
            (`server_before`, `server_after`). `lib.load.server_side.observer` makes one.
        sender: runs the sending processes elsewhere (`lib.hosts.remote_client.HostSender`); `base_url` is as seen from there.

    Returns:
        `out`. A level in which every request failed is a result too; its causes are in the record.

    Raises:
        BadInput: the arguments contradict each other (all faults in one message).
        ServerError: the sending process itself failed.
        KeyboardInterrupt: after an interrupt, once what was measured has been written to `out`.
    """
    api = {v: k for k, v in PATHS.items()}.get(api, api)
    host, port, tls, prefix = split_url(base_url)
    sessions = _sessions(requests)
    _check_arguments(
        api, requests, warmup, concurrency, rate, arrival, model, workers, api_key_env, ca_file if tls else None,
        len(sessions), offsets_s, ramp_s, ramp_from,
    )  # fmt: skip
    out = Path(out)
    workers = min(workers, len(sessions), concurrency or workers)
    if rate:
        offsets = arrival_offsets_ns(len(sessions), rate, arrival, seed, ramp_s, ramp_from)
    else:
        offsets = [int(x * 1e9) for x in offsets_s] if offsets_s is not None else [0] * len(sessions)
    token = sha256(os.urandom(16)).hexdigest()[:12]
    job: dict[str, Any] = {
        "host": host,
        "port": port,
        "tls": tls,
        "path": prefix + PATHS[api],
        "api": api,
        "model": model,
        "gap_timeout_s": gap_timeout_s,
        "first_timeout_s": first_timeout_s,
        "connect_timeout_s": connect_timeout_s,
        "max_seconds": max_seconds,
        "drain_s": drain_s,
        "surplus_wait_s": 0.05,
        "api_key_env": api_key_env,
        "keep_text": keep_text,
        "cores": sorted(cores),
        "loop": os.environ.get("WORKBOOK_LOOP", "uvloop"),
        "progress_s": 0.5,
        "nice": SENDER_NICE,
        "ca_file": str(ca_file) if ca_file else None,
        "ramp_s": ramp_s if concurrency else 0.0,
    }
    wall_start = time.time()
    parts: list[tuple[dict[str, Any], Path]] = []
    interrupted = False
    with _room_for(out), tempfile.TemporaryDirectory(prefix=".level-", dir=out.parent) as folder:
        jobs = []
        for number in range(workers):
            mine = range(number, len(sessions), workers)
            share = concurrency // workers + (number < concurrency % workers) if concurrency else None
            warm = list(warmup[number::workers])
            settings = job | {
                "concurrency": share,
                "slot_first": number,
                "slot_step": workers,
                "preconnect": min(64, len(mine)),
                "warmup_concurrency": max(1, min(share or 8, len(warm) or 1)),
                "parent_started_ns": time.monotonic_ns(),
            }
            path = Path(folder) / f"job{number}"
            rows = [(i, requests[i], offsets[n], n, turn) for n in mine for turn, i in enumerate(sessions[n])]
            _write_job(path, settings, rows, warm, api, token, continuous_usage)
            jobs.append(path)
        seen: list[dict[str, Any]] = []
        hook = (lambda: seen.append(observe())) if observe else None
        try:
            parts = (sender or _run_workers)(jobs, progress, hook)
        except _Interrupted as stop:
            parts, interrupted = stop.parts, True
        if observe:
            extra_header = (extra_header or {}) | dict(zip(("server_before", "server_after"), seen, strict=False))
        header = _header(
            base_url=f"{'https' if tls else 'http'}://{host}:{port}{prefix}",
            api=api,
            model=model,
            load={
                "mode": "closed" if concurrency else "open",
                "concurrency": concurrency,
                "rate_per_s": rate,
                "arrival": arrival if rate else "replay" if offsets_s is not None else None,
                "ramp_s": ramp_s,
                "ramp_from_per_s": ramp_from if rate and ramp_s else None,
                "sessions": len(sessions) if len(sessions) != len(requests) else None,
                "seed": seed,
                "workers": workers,
                "planned": len(requests),
                "continuous_usage": continuous_usage,
                "gap_timeout_s": gap_timeout_s,
                "first_timeout_s": first_timeout_s,
                "max_seconds": max_seconds,
            },
            workload=workload or _plain_workload(requests),
            facts=[f for f, _ in parts],
            calibration=calibration,
            wall_start=wall_start,
            interrupted=interrupted,
            extra=extra_header,
        )
        if sender is not None:
            header["client"] |= sender.about
        _write_level(out, header, [p for _, p in parts])
    if interrupted:
        raise KeyboardInterrupt
    return out


@contextlib.contextmanager
def _room_for(out: Path) -> Iterator[None]:
    """A full, read-only or forbidden disk is the user's to mend: one message, and no half record."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if error.errno not in _DISK_FAULTS:
            raise
        found = f"{error.strerror} ({error.filename or out})"
        raise BadInput(f"to write a level's record at {out}", found, "free space or choose another folder") from None


def _sessions(requests: Sequence[Request]) -> list[list[int]]:
    """Indices of the requests of each session, in order of first appearance; a request without one is its own."""
    made: dict[Any, list[int]] = {}
    for number, request in enumerate(requests):
        made.setdefault(request.session if request.session is not None else number, []).append(number)
    return list(made.values())


def _check_arguments(
    api: str,
    requests: Sequence[Request],
    warmup: Sequence[Request],
    concurrency: int | None,
    rate: float | None,
    arrival: str,
    model: str | None,
    workers: int,
    api_key_env: str | None,
    ca_file: Path | None,
    sessions: int,
    offsets_s: Sequence[float] | None,
    ramp_s: float,
    ramp_from: float,
) -> None:
    faults = []
    if api not in PATHS:
        faults.append(f"api {api!r} is not one of {', '.join(PATHS)}")
    elif api != "generate" and not model:
        faults.append(f"api {api!r} needs the served model name (GET /v1/models says it)")
    if not requests:
        faults.append("no requests")
    if sum(x is not None for x in (concurrency, rate, offsets_s)) != 1:
        faults.append("give either concurrency (closed loop), or rate or offsets_s (open loop)")
    if concurrency is not None and concurrency < 1:
        faults.append(f"concurrency {concurrency} is below 1")
    if rate is not None and not 0 < rate < 1e6:
        faults.append(f"rate {rate} is not a positive number of requests a second")
    if offsets_s is not None:
        if len(offsets_s) != sessions:
            faults.append(f"{len(offsets_s)} offsets for {sessions} requests (sessions)")
        if any(not 0 <= x < 1e6 for x in offsets_s) or any(b < a for a, b in itertools.pairwise(offsets_s)):
            faults.append("offsets_s are seconds from 0 on, in rising order")
    if not 0 <= ramp_s < 1e6 or not 0 <= ramp_from < 1e6 or (ramp_s and offsets_s is not None):
        faults.append(f"a ramp of {ramp_s} s from {ramp_from}: not negative, and not with a replay")
    if any(not 0 <= r.think_s < 1e6 for r in requests):
        faults.append("a think time that is not a number of seconds from 0 on")
    if ca_file is not None:
        try:
            ssl.create_default_context(cafile=str(ca_file))
        except (OSError, ssl.SSLError) as error:
            why = getattr(error, "strerror", None) or getattr(error, "reason", None) or type(error).__name__
            faults.append(f"the CA file {ca_file} cannot be used ({why})")
    if any(r.session is not None and r.prompt_kind() == "ids" for r in requests):
        faults.append("the turns of a session are text or messages, not token ids")
    if arrival not in ARRIVALS:
        faults.append(f"arrival {arrival!r} is not one of {', '.join(ARRIVALS)}")
    if workers < 1:
        faults.append(f"workers {workers} is below 1")
    if api_key_env and not os.environ.get(api_key_env):
        faults.append(f"the environment variable {api_key_env} is not set")
    if warmup:
        measured = {r.prompt_sha256() for r in requests}
        same = [r.id for r in warmup if r.prompt_sha256() in measured]
        if same:
            faults.append(f"warm-up prompts are measured ones too ({', '.join(same[:3])}): those would hit the cache")
    if faults:
        raise BadInput("a level that can be sent", "; ".join(faults))


def _write_job(
    path: Path,
    settings: dict[str, Any],
    requests: list[tuple[int, Request, int, int, int]],
    warmup: list[Request],
    api: str,
    token: str,
    continuous_usage: bool,
) -> None:
    with open(path, "wb") as file:
        file.write(json.dumps(settings).encode() + b"\n")
        rows = [(i, False, o, r, n, turn) for i, r, o, n, turn in requests]
        rows += [(-1 - n, True, 0, r, 0, 0) for n, r in enumerate(warmup)]
        for index, warm, offset, request, session, turn in rows:
            rid = f"{RID_PREFIX}{token}-{'w' if warm else ''}{abs(index)}" if api == "generate" else None
            body = request_body(request, api, settings["model"], rid, continuous_usage)
            place: list[Any] | None = None
            if request.session is not None and not warm:
                start, end = _prompt_place(body, request, api)
                place = [session, turn, int(request.think_s * 1e9), start, end, request.answer_before]
            meta = json.dumps([index, warm, offset, rid, request.id, request.prompt_sha256(), place])
            file.write(meta.encode() + b"\t" + body + b"\n")


def _prompt_place(body: bytes, request: Request, api: str) -> tuple[int, int]:
    """Where the prompt's own JSON lies in a body, without its quotes or brackets: there a session's turns are joined."""
    prompt = request.prompt
    if api == "chat" and isinstance(prompt, str):
        prompt = ({"role": "user", "content": prompt},)
    key = {"generate": "text", "completions": "prompt", "chat": "messages"}[api]
    raw = json.dumps(prompt, separators=(",", ":"))
    start = body.index(f'"{key}":{raw}'.encode()) + len(key) + 4
    return start, start + len(raw.encode()) - 2


class _Interrupted(Exception):
    def __init__(self, parts: list[tuple[dict[str, Any], Path]]) -> None:
        super().__init__()
        self.parts = parts


def _run_workers(
    jobs: list[Path],
    progress: Callable[[dict[str, Any]], None] | None,
    observe: Callable[[], None] | None = None,
) -> list[tuple[dict[str, Any], Path]]:
    """Start the sending processes and wait for them; an interrupt is passed on and their records are still read."""
    environment = dict(os.environ)
    root = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(x for x in (root, environment.get("PYTHONPATH", "")) if x)
    workers: list[subprocess.Popen[bytes]] = []
    interrupted = False
    unread = [b"" for _ in jobs]
    answers: list[dict[str, Any]] = [{} for _ in jobs]
    try:
        for job in jobs:
            workers.append(
                subprocess.Popen(
                    [sys.executable, "-m", "lib.load.client_worker", str(job), f"{job}.part"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=open(f"{job}.err", "w"),  # noqa: SIM115
                    env=environment,
                    start_new_session=True,
                )
            )
        while True:
            try:
                _listen(workers, answers, unread, progress, observe)
                break
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                for worker in workers:
                    with contextlib.suppress(ProcessLookupError):
                        worker.send_signal(signal.SIGINT)
        codes = [worker.wait(timeout=60) for worker in workers]
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.kill()
                worker.wait()
            for stream in (worker.stdin, worker.stdout):
                if stream:
                    with contextlib.suppress(OSError):
                        stream.close()
    parts = []
    for job, code, answer in zip(jobs, codes, answers, strict=True):
        if code != 0 or "facts" not in answer:
            if interrupted:
                continue
            error = Path(f"{job}.err").read_text(errors="replace").strip().splitlines()
            raise ServerError(
                "the sending process writes its records", f"exit {code}: {error[-1] if error else 'no message'}"
            )
        parts.append((answer["facts"], Path(f"{job}.part")))
    if interrupted:
        if not parts:
            raise KeyboardInterrupt
        raise _Interrupted(parts)
    return parts


def _listen(
    workers: list[subprocess.Popen[bytes]],
    answers: list[dict[str, Any]],
    unread: list[bytes],
    progress: Callable[[dict[str, Any]], None] | None,
    observe: Callable[[], None] | None,
) -> None:
    """Until every worker has given its facts: start them together when all are ready, and observe before and after.

    `answers` and `unread` (the beginning of a line) outlive an interrupt, after which this is called again.
    """
    with selectors.DefaultSelector() as selector:
        for number, worker in enumerate(workers):
            if worker.stdout and "facts" not in answers[number]:
                selector.register(worker.stdout, selectors.EVENT_READ, number)
        while selector.get_map():
            for key, _ in selector.select():
                number = key.data
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fileobj)
                    if "facts" not in answers[number]:
                        # It died: the others stop too, and the level fails with its message.
                        for worker in workers:
                            with contextlib.suppress(ProcessLookupError):
                                worker.send_signal(signal.SIGINT)
                    continue
                *lines, unread[number] = (unread[number] + data).split(b"\n")
                for line in lines:
                    with contextlib.suppress(ValueError):
                        answers[number] |= json.loads(line)
                _start_and_observe(workers, answers, observe)
                known = [a for a in answers if "of" in a]
                if progress and known and "facts" not in answers[number]:
                    progress(together(known))


#: What a sending process says of itself while it sends, as sums: see `client_worker.Tally`.
COUNTED = ("done", "of", "in_flight", "ok", "failed", "first_ns", "whole_ns")


def together(said: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sums of several sending processes as one, and the longest time since a window began."""
    sums = {key: sum(one.get(key, 0) for one in said) for key in COUNTED}
    return sums | {"since_ns": max(one.get("since_ns", 0) for one in said)}


def _start_and_observe(
    workers: list[subprocess.Popen[bytes]], answers: list[dict[str, Any]], observe: Callable[[], None] | None
) -> None:
    if "started" not in answers[0] and all("ready" in a for a in answers):
        answers[0]["started"] = True
        if observe:
            observe()
        at = time.monotonic_ns() + (WORKERS_LEAD_NS if len(workers) > 1 else 0)
        for worker in workers:
            with contextlib.suppress(OSError):
                worker.stdin.write(b"GO %d\n" % at)  # type: ignore[union-attr]
                worker.stdin.flush()  # type: ignore[union-attr]
    if "ended" not in answers[0] and all("over" in a for a in answers):
        answers[0]["ended"] = True
        if observe:
            observe()


def _header(
    *,
    base_url: str,
    api: str,
    model: str | None,
    load: dict[str, Any],
    workload: dict[str, Any],
    facts: list[dict[str, Any]],
    calibration: dict[str, Any] | None,
    wall_start: float,
    interrupted: bool,
    extra: dict[str, Any] | None,
) -> dict[str, Any]:
    stopped = next((f["stopped"] for f in facts if f["stopped"]), None)
    return {
        "kind": "level",
        "schema": LEVEL_SCHEMA,
        "base_url": base_url,
        "api": api,
        "model": model,
        "load": load,
        "workload": workload,
        "window": {
            "start_ns": min((f["start_ns"] for f in facts), default=0),
            "end_ns": max((f["end_ns"] for f in facts), default=0),
            "clock": "CLOCK_MONOTONIC",
            "started_unix_s": wall_start,
        },
        "planned": load["planned"],
        "sent": sum(f["sent"] for f in facts),
        "stopped": "interrupted" if interrupted else stopped,
        "unsent_after_failed_turn": sum(f["unsent_after_failed_turn"] for f in facts),
        "client": {
            "workers": facts,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "kernel": platform.release(),
            "cpu_count": os.cpu_count(),
            "load_average": os.getloadavg()[0],
            "workbook": __version__,
        },
        "calibration": calibration,
        **(extra or {}),
    }


def _plain_workload(requests: Sequence[Request]) -> dict[str, Any]:
    digest = sha256()
    for request in requests:
        digest.update(f"{request.prompt_sha256()} {request.max_tokens} {request.temperature}\n".encode())
    return {"name": "given", "sha256": digest.hexdigest(), "requests": len(requests)}


def _write_level(out: Path, header: dict[str, Any], parts: list[Path]) -> None:
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(json.dumps(header, separators=(",", ":")).encode() + b"\n")
            if len(parts) == 1:
                with open(parts[0], "rb") as part:
                    while block := part.read(1 << 20):
                        file.write(block)
            else:
                lines = [line for part in parts for line in part.read_bytes().splitlines(keepends=True)]
                for line in sorted(lines, key=lambda line: int(from_json(line)["sent_ns"])):
                    file.write(line)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)


def read_level(path: Path) -> metrics.Level:
    """A level's raw record as `run_level` wrote it.

    Raises:
        UnreadableFile: the file is missing, cut off, or something else.
    """
    try:
        with open(path, "rb") as file:
            lines = list(_json_lines(file))
    except OSError as error:
        raise UnreadableFile(f"a level's record at {path}", str(error.strerror)) from None
    except ValueError as error:
        raise UnreadableFile(f"a level's record at {path}", f"a line that is not JSON ({error})") from None
    return metrics.level_from_lines(lines, str(path))


def _json_lines(file: Any) -> Iterator[dict[str, Any]]:
    for line in file:
        yield from_json(line)


def level_summary(path: Path) -> dict[str, Measured]:
    """Every number of a level, recomputed from its raw record alone; see docs/metrics.md for what each means."""
    return metrics.level_summary(read_level(path))
