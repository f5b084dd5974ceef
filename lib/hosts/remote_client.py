"""The load client on the server's host: copied there as one file with its hash, run beside the server, records brought back.

What the client measures is between it and the server, so it belongs where no network lies between. `HostSender` is given to
`lib.load.client.run_level` in place of processes here; requests are made here and judged here, only the sending is there.

`calibrate_on` proves a client on a host against a judge on that host, and `calibrate_tunnel` proves the client here against a
judge there, through the same forwarded port as the load: what the tunnel adds to TTFT and gaps is measured, not assumed.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from lib.errors import BadInput, HostError, ServerError, WorkbookError
from lib.hosts.base import SILENCE_S, Host, Running
from lib.load import client, judge

_ROOT = Path(__file__).resolve().parents[2]
_MAIN = """\
import json, runpy, sys, time
job = sys.argv[1]
with open(job, "rb") as file:
    settings, _, rest = file.read().partition(b"\\n")
made = json.loads(settings)
made["parent_started_ns"] = time.monotonic_ns()  # this machine's clock, not the sender's
with open(job, "wb") as file:
    file.write(json.dumps(made).encode() + b"\\n" + rest)
sys.argv[0] = "client"
runpy.run_module(MODULE, run_name="__main__")
"""
#: Seconds that a level may take where nothing shorter is said; the host ends it sooner when we are gone.
LONGEST_LEVEL_S = 6 * 3600.0
#: asyncio.Runner is what the client needs of it.
OLDEST_PYTHON = (3, 11)


def modules_of(name: str) -> list[str]:
    """A module of `lib` and all others of `lib` that it imports, directly or not.

    Raises:
        BadInput: one of them imports something that a bare Python doesn't have.
    """
    found, rest = {name}, [name]
    while rest:
        for imported in _imports((_ROOT / Path(*rest.pop().split("."))).with_suffix(".py")):
            top = imported.partition(".")[0]
            if top == "lib":
                if imported not in found and (_ROOT / Path(*imported.split("."))).with_suffix(".py").is_file():
                    found.add(imported)
                    rest.append(imported)
            elif top not in sys.stdlib_module_names:
                raise BadInput(f"{name} needs only what a bare Python has", f"it imports {imported}")
    return sorted(found)


def _imports(file: Path) -> Iterator[str]:
    """Modules imported at the top of a file; what a function imports (uvloop) is tried there and may be missing."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module.startswith("lib"))


@cache
def bundle(module: str, main: str = "") -> tuple[bytes, str]:
    """One file that `python FILE` runs as `module`, and its sha256; the same sources give the same bytes."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:

        def add(name: str, data: bytes) -> None:
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data)

        for name in modules_of(module):
            path = Path(*name.split("."))
            add(path.with_suffix(".py").as_posix(), (_ROOT / path).with_suffix(".py").read_bytes())
        for package in sorted({Path(*name.split(".")).parent.as_posix() for name in modules_of(module)} | {"lib"}):
            add(f"{package}/__init__.py", b"")
        add(
            "__main__.py",
            (main or "import runpy; runpy.run_module(MODULE, run_name='__main__')")
            .replace("MODULE", repr(module))
            .encode(),
        )
    return made.getvalue(), sha256(made.getvalue()).hexdigest()


#: Holds a folder: removed when the input ends, or when the guard ends this because we are gone.
_HOLD = """
import getpass, json, shutil, signal, sys, tempfile
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
place = None
try:
    place = tempfile.mkdtemp(prefix="wb-client-")
    try:
        user = getpass.getuser()
    except Exception:
        user = None
    print(json.dumps({"folder": place, "temporary": tempfile.gettempdir(), "user": user}), flush=True)
    sys.stdin.read()
finally:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # one that comes now would leave half of it
        signal.signal(number, signal.SIG_IGN)
    if place:
        shutil.rmtree(place, ignore_errors=True)
"""


@contextlib.contextmanager
def folder_on(host: Host) -> Iterator[PurePosixPath]:
    """A new folder on a host that nobody else can look into; a process there removes it, also when we are cut off.

    Raises:
        HostError: none can be made there.
    """
    with held_folder(host) as made:
        yield PurePosixPath(made["folder"])


@contextlib.contextmanager
def held_folder(
    host: Host, deadline_s: float = LONGEST_LEVEL_S + 600.0, silence_s: float = SILENCE_S
) -> Iterator[dict[str, Any]]:
    """As `folder_on`: `folder`, the host's own `temporary` folder above it, and the `user` there (None: it has no name)."""
    words = [host.python, "-IS", "-c", _HOLD]
    with host.start(words, deadline_s=deadline_s, silence_s=silence_s) as holding:
        made = next(holding.lines(), None)
        if made is None:
            last = (holding.stderr.decode("utf-8", "replace").strip().splitlines() or ["it said nothing"])[-1]
            raise HostError(f"a temporary folder on {host.name}", last, "free space there, or name another in TMPDIR")
        try:
            yield json.loads(made)
        finally:
            with contextlib.suppress(WorkbookError):
                holding.feed(b"")
                holding.wait()


class HostSender:
    """Runs the sending process of a level on a host; given to `run_level(sender=...)`.

    Args:
        host: where the server is.
        python: an interpreter there, 3.11 or newer; uvloop is used where it has it.
        environment: variables that the client needs there (the API key's, by name; its value goes over the wire to the host,
            never onto a command line).
    """

    def __init__(self, host: Host, python: str = "python3", environment: dict[str, str] | None = None) -> None:
        self.host, self.python, self.environment = host, python, environment or {}
        self.about: dict[str, Any] = {}

    def check(self) -> dict[str, Any]:
        """What the client runs on there.

        Raises:
            HostError: no such interpreter, or one older than the client needs.
        """
        code = (
            "import json,os,platform,sys; print(json.dumps({'version': list(sys.version_info[:2]), 'python': platform.python_version(),"
            "'machine': platform.machine(), 'kernel': platform.release(), 'cpu_count': os.cpu_count(), 'load_average': os.getloadavg()[0],"
            "'hostname': platform.node()}))"
        )
        said = self.host.run([self.python, "-IS", "-c", code], deadline_s=30.0).check(
            "the load client's Python answers"
        )
        facts = dict(json.loads(said.text))
        version = tuple(facts.pop("version"))
        if version < OLDEST_PYTHON:
            raise HostError(
                f"{self.python} on {self.host.name} is Python {'.'.join(map(str, OLDEST_PYTHON))} or newer (the load client needs it)",
                facts["python"],
                "name another in host.client_python, or set host.load_client: here",
            )
        return facts

    def __call__(
        self,
        jobs: list[Path],
        progress: Callable[[dict[str, Any]], None] | None,
        observe: Callable[[], None] | None = None,
    ) -> list[tuple[dict[str, Any], Path]]:
        """Runs one job there and brings its records back; an interrupt still brings those of what was sent.

        `observe` is called when the client is ready to send and again when all has ended, where it tells so.
        """
        if len(jobs) != 1:
            raise BadInput("one sending process on a host", f"{len(jobs)}", "set workers to 1")
        data, digest = bundle("lib.load.client_worker", _MAIN)
        self.about = {**self.check(), "host": self.host.name, "client_sha256": digest}
        job = jobs[0]
        part = job.with_name(f"{job.name}.part")
        with folder_on(self.host) as place:
            arrived = self.host.put(data, place / "client.pyz", mode=0o600)
            self.host.put(job, place / "job", mode=0o600)
            self.about["client_sha256"] = arrived
            words = [self.python, str(place / "client.pyz"), str(place / "job"), str(place / "part")]
            interrupted = False
            with self.host.start(words, deadline_s=LONGEST_LEVEL_S, env=self.environment) as running:
                answer: dict[str, Any] = {}
                while True:
                    try:
                        self._listen(running, answer, progress, observe)
                        break
                    except KeyboardInterrupt:
                        if interrupted:
                            raise
                        interrupted = True
                        running.feed(b"")  # the client writes what it has when its input ends
                done = running.wait()
            if done.exit_code or "facts" not in answer:
                if interrupted:
                    raise KeyboardInterrupt
                last = done.error_text.strip().splitlines()[-1:] or ["no message"]
                raise ServerError(
                    f"the sending process on {self.host.name} writes its records", f"exit {done.exit_code}: {last[0]}"
                )
            self.host.get(place / "part", part)
        parts = [(answer["facts"], part)]
        if interrupted:
            raise client._Interrupted(parts)
        return parts

    @staticmethod
    def _listen(
        running: Running,
        answer: dict[str, Any],
        progress: Callable[[dict[str, Any]], None] | None,
        observe: Callable[[], None] | None,
    ) -> None:
        rest = bytes(running.stdout)
        running.stdout.clear()
        for name, data in running.output():
            if name == "stderr":
                running.stderr += data
                continue
            *lines, rest = (rest + data).split(b"\n")
            running.stdout[:] = rest
            for line in lines:
                with contextlib.suppress(ValueError):
                    answer |= json.loads(line)
                for word, order in (("ready", b"GO 0\n"), ("over", b"")):  # 0: at once, whatever its clock says
                    if word in answer and f"{word}_seen" not in answer:
                        answer[f"{word}_seen"] = True
                        if observe:
                            observe()
                        if order:
                            running.feed(order, end=False)
                if progress and "facts" not in answer and "of" in answer:
                    progress(client.together([answer]))


@contextlib.contextmanager
def judge_on(host: Host, plan: judge.Plan, python: str = "python3") -> Iterator[tuple[int, str]]:
    """A paced judge on a host's loopback for as long as the block lasts; gives its port there, and which judge it is.

    The compiled judge where one was built here and runs there (same machine type, same C library), else the Python one.
    """
    built, _ = judge.build_judge()
    with folder_on(host) as place, contextlib.ExitStack() as stack:
        said = b"no judge"
        for kind in ("c", "python"):
            if kind == "c" and built is None:
                continue
            if kind == "c" and built is not None:
                host.put(built, place / "judge", mode=0o700)
                words = [str(place / "judge")]
            else:
                host.put(bundle("lib.load.judge_slow")[0], place / "judge.pyz", mode=0o600)
                words = [python, str(place / "judge.pyz")]
            running = stack.enter_context(host.start([*words, *plan.arguments()], deadline_s=300.0))
            said = b""
            with contextlib.suppress(TimeoutError):
                for name, data in running.output(timeout_s=20.0):
                    said += data if name == "stdout" else b""
                    if b"\n" in said:
                        break
            if said.startswith(b"PORT "):
                yield int(said.split()[1]), kind
                return
        raise ServerError(f"the judge on {host.name} says its port", repr(said[:100]))


def _plan(streams: int) -> tuple[judge.Plan, int, float]:
    """The pace of a calibration, as `lib.load.judge.calibrate` has it: plan, tokens a request, chunks a second."""
    rate = 1000.0 + 50.0 * streams
    step = streams / rate
    return (
        judge.Plan(step_s=step, stall_s=2 * step, first_min_s=0.05, first_max_s=0.15),
        max(2, min(4000, round(1.0 / step))),
        rate,
    )


def _calibrated(host: Host, streams: int, api: str, sender: HostSender | None) -> dict[str, Any]:
    if streams < 1:
        raise BadInput("at least one stream", str(streams))
    streams = 1 << (streams - 1).bit_length()
    plan, tokens, rate = _plan(streams)
    made = [client.Request(f"judge-{i}", f"request number {i}", tokens) for i in range(max(4, 2 * streams))]
    began = time.monotonic()
    about = {"streams": streams, "asked_chunks_per_s": rate, "workers": 1, "api": api, "judge_on": host.name}
    try:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="judged-")))
            there, kind = stack.enter_context(judge_on(host, plan))
            here = stack.enter_context(host.forward(there))
            path = client.run_level(
                f"http://127.0.0.1:{there if sender else here}", api, made, concurrency=streams, model="judge",
                out=folder / "judged.jsonl", gap_timeout_s=20, first_timeout_s=20, max_seconds=10, drain_s=5, sender=sender,
            )  # fmt: skip
            level = client.read_level(path)
            truth = judge.Judge(None, here, kind).truth()  # type: ignore[arg-type]
            found = judge.compare(level, truth)
    except (BadInput, ServerError, HostError) as error:
        return {"status": "not_calibrated", "reasons": [f"the calibration did not run: {error}"], **about}
    status, reasons = judge.judged(found, truth, plan, kind, rate)
    return {
        "status": status,
        "reasons": reasons,
        **about,
        "chunks_per_s": found.chunks_per_s,
        "judge": kind,
        "share": found.share,
        "ttft_p50_shown_true_s": found.ttft_p50_s,
        "ttft_p99_shown_true_s": found.ttft_p99_s,
        "gap_p50_shown_true_s": found.gap_p50_s,
        "gap_p99_shown_true_s": found.gap_p99_s,
        "judge_lag_mean_s": truth.lag_mean_s,
        "seconds": time.monotonic() - began,
        "made_unix_s": time.time(),
    }


def calibrate_on(host: Host, streams: int, *, api: str = "completions", python: str = "python3") -> dict[str, Any]:
    """Whether the client on a host shows the truth at this load, against a judge on the same host. See `judge.calibrate`."""
    return {**_calibrated(host, streams, api, HostSender(host, python)), "client_on": host.name}


def calibrate_tunnel(host: Host, streams: int, *, api: str = "completions") -> dict[str, Any]:
    """Whether the client here shows the truth of a judge on a host through a forwarded port, and what the way adds.

    Returns:
        As `judge.calibrate`, and `tunnel`: seconds that shown TTFT and gaps lie above the true ones at p50 and p99. TTFT is
        compared as durations on either side's own clock, so the two clocks need not agree.
    """
    made = {**_calibrated(host, streams, api, None), "client_on": "this machine, through a forwarded port"}
    if "ttft_p50_shown_true_s" in made:
        names = ("ttft_p50", "ttft_p99", "gap_p50", "gap_p99")
        made["tunnel"] = {f"{n}_added_s": made[f"{n}_shown_true_s"][0] - made[f"{n}_shown_true_s"][1] for n in names}
    return made


def sender_for(host: Host | None, python: str | None, api_key_env: str | None) -> HostSender | None:
    """The sender for a server on a host; None where the client runs here."""
    if host is None:
        return None
    key = {api_key_env: os.environ[api_key_env]} if api_key_env and os.environ.get(api_key_env) else None
    return HostSender(host, python or "python3", key)
