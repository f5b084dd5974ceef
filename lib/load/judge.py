"""The judge of this load client: a paced server that knows the truth, and the calibration against it.

The judge (judge.c, or judge_slow.py where no compiler is) streams to a plan and keeps the true time of every send.
`calibrate` runs this client against it at the asked load and says how far what the client shows is from what was sent;
a client that fails it, or a load that the judge itself cannot pace, gets no latency verdict.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lib.errors import BadInput, ServerError
from lib.load import client, metrics
from lib.load.client import Request
from lib.load.client_worker import prefer

Array = NDArray[np.float64]

#: The pure Python judge counts up to this, well below what it paced on two cores (12,800 over 256 streams, 1 ms late).
#: Beyond it a calibration with it proves nothing.
SLOW_JUDGE_CHUNKS_PER_S = 5_000
#: What a client may be off by and still count as calibrated.
TTFT_P50_LIMIT_S = 0.005
GAP_P50_LIMIT, GAP_P99_LIMIT = 0.05, 0.10
GAP_FLOOR_S = {"p50": 0.0002, "p99": 0.001}
SHARE_LIMIT = 0.98
#: The judge has paced a plan if its events were this punctual on average, as a part of a step.
JUDGE_LAG_OF_STEP, JUDGE_LAG_FLOOR_S = 0.50, 0.002
CACHE_DAYS = 7


@dataclass(frozen=True, slots=True)
class Plan:
    """How the judge paces: an event a stream every `step_s`, some steps `stall_s` longer, a wait before the first."""

    step_s: float = 0.020
    stall_frac: float = 0.02
    stall_s: float = 0.040
    first_min_s: float = 0.050
    first_max_s: float = 0.150
    tokens_per_event: int = 1
    seed: int = 1

    def arguments(self) -> list[str]:
        """The judge's command line."""
        nanoseconds = {
            "--step-ns": self.step_s,
            "--stall-ns": self.stall_s,
            "--first-min-ns": self.first_min_s,
            "--first-max-ns": self.first_max_s,
        }
        made = [x for name, value in nanoseconds.items() for x in (name, str(round(value * 1e9)))]
        made += ["--stall-ppm", str(round(self.stall_frac * 1e6))]
        return [*made, "--tokens-per-event", str(self.tokens_per_event), "--seed", str(self.seed)]


@dataclass(frozen=True, slots=True)
class Truth:
    """What the judge really did: for each request its connection, when it was read, and when each event was sent."""

    accepted_ns: NDArray[np.int64]
    read_ns: NDArray[np.int64]
    tokens: NDArray[np.int64]
    sent_ns: tuple[NDArray[np.int64], ...]
    lag_count: int
    lag_mean_s: float
    lag_max_s: float
    blocked_writes: int

    def ttft_s(self) -> Array:
        """First send minus read, one a request."""
        return np.array([(s[0] - r) / 1e9 for s, r in zip(self.sent_ns, self.read_ns, strict=True) if s.size])

    def gaps_s(self) -> Array:
        """All gaps between consecutive sends of a request, pooled."""
        parts = [np.diff(s) / 1e9 for s in self.sent_ns if s.size > 1]
        return np.concatenate(parts) if parts else np.empty(0)

    def tokens_per_s(self) -> float:
        """All tokens over the time from the first read to the last send."""
        return float(self.tokens.sum()) / ((self._last() - int(self.read_ns.min())) / 1e9)

    def chunks_per_s(self) -> float:
        """All sends over the same time."""
        return sum(s.size for s in self.sent_ns) / ((self._last() - int(self.read_ns.min())) / 1e9)

    def _last(self) -> int:
        return max(int(s[-1]) for s in self.sent_ns if s.size)

    def share_given(self) -> float:
        """Closed loop: of the time in which a slot could have been busy, the part in which it was.

        A slot is a kept-alive connection. A client that sends at once, and again the moment an answer ends, reaches 1.
        """
        start = int(self.read_ns.min())
        busy = available = 0
        for connection in np.unique(self.accepted_ns):
            mine = [i for i in np.flatnonzero(self.accepted_ns == connection) if self.sent_ns[i].size]
            if mine:
                busy += sum(int(self.sent_ns[i][-1] - self.read_ns[i]) for i in mine)
                available += max(int(self.sent_ns[i][-1]) for i in mine) - start
        return busy / available if available else 0.0


def parse_truth(raw: bytes) -> Truth:
    """The judge's own record (see judge.c for its layout)."""
    numbers = np.frombuffer(raw, dtype="<i8")
    if numbers.size < 6 or numbers[0] != 1:
        raise BadInput("a judge's record of version 1", f"{len(raw)} bytes")
    count, at = int(numbers[1]), 6
    accepted, read, tokens, sent = [], [], [], []
    for _ in range(count):
        row = numbers[at : at + 5]
        if row.size < 5:
            break
        accepted.append(row[1])
        read.append(row[2])
        tokens.append(row[3])
        events = int(row[4])
        sent.append(numbers[at + 5 : at + 5 + events])
        at += 5 + events
    if at != numbers.size or len(sent) != count:
        raise BadInput("a whole judge's record", f"{numbers.size} numbers for {at}")
    return Truth(
        np.array(accepted), np.array(read), np.array(tokens), tuple(sent),
        lag_count=int(numbers[2]),
        lag_mean_s=int(numbers[3]) / max(int(numbers[2]), 1) / 1e9,
        lag_max_s=int(numbers[4]) / 1e9,
        blocked_writes=int(numbers[5]),
    )  # fmt: skip


def cache_folder() -> Path:
    """Where the built judge and calibrations are kept: WORKBOOK_CACHE, or ~/.cache/sglang-workbook."""
    return Path(os.environ.get("WORKBOOK_CACHE") or Path.home() / ".cache" / "sglang-workbook") / "load"


def build_judge(folder: Path | None = None) -> tuple[Path | None, str]:
    """The compiled judge, built once for each state of its source; (None, why) where there is no compiler."""
    source = Path(__file__).with_name("judge.c")
    asked = os.environ.get("CC")
    compiler = next((c for c in (asked, "cc", "gcc", "clang") if c and shutil.which(c)), None)
    if compiler is None or asked == "":
        return None, "no C compiler (apt-get install gcc)"
    folder = folder or cache_folder()
    target = f"{compiler} {platform.machine()} {platform.libc_ver()}"
    key = sha256(source.read_bytes() + target.encode()).hexdigest()[:16]
    built = folder / f"judge-{key}"
    if built.exists():
        return built, compiler
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        made = Path(temporary) / "judge"
        command = [compiler, "-O2", "-o", str(made), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode != 0:
            last = done.stderr.strip().splitlines()[-1:] or [f"exit {done.returncode}"]
            return None, f"{compiler} failed: {last[0]}"
        made.replace(built)
    return built, compiler


class Judge:
    """A running judge: its base URL, and the truth of what it has done so far."""

    def __init__(self, process: subprocess.Popen[str], port: int, kind: str) -> None:
        self.process, self.port, self.kind = process, port, kind
        self.base_url = f"http://127.0.0.1:{port}"

    def truth(self) -> Truth:
        """What it has sent until now."""
        with urllib.request.urlopen(f"{self.base_url}/judge/truth", timeout=60) as answer:
            return parse_truth(answer.read())


@contextlib.contextmanager
def running_judge(plan: Plan, *, kind: str | None = None, cores: tuple[int, ...] = ()) -> Iterator[Judge]:
    """A judge on a free port of 127.0.0.1 for as long as the block lasts; it also ends when this process does.

    Args:
        kind: "c" or "python"; by default C where a compiler is.
        cores: pin it to these cores.
    """
    built, why = build_judge() if kind != "python" else (None, "")
    if built is None and kind == "c":
        raise ServerError("the compiled judge", why, "install a C compiler, or use the Python one")
    command = [str(built)] if built else [sys.executable, "-m", "lib.load.judge_slow"]
    root = str(Path(__file__).resolve().parents[2])
    process = subprocess.Popen(
        command + plan.arguments(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        env=dict(os.environ, PYTHONPATH=root),
    )  # fmt: skip
    try:
        if cores:
            os.sched_setaffinity(process.pid, cores)
        prefer(process.pid, client.SENDER_NICE)
        line = process.stdout.readline() if process.stdout else ""
        if not line.startswith("PORT "):
            raise ServerError("the judge to say its port", repr(line))
        yield Judge(process, int(line.split()[1]), "c" if built else "python")
    finally:
        for stream in (process.stdin, process.stdout):
            if stream:
                stream.close()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a client showed against what the judge did."""

    share: float
    shown_tokens_per_s: float
    true_tokens_per_s: float
    chunks_per_s: float
    ttft_p50_s: tuple[float, float]
    ttft_p99_s: tuple[float, float]
    gap_p50_s: tuple[float, float]
    gap_p99_s: tuple[float, float]

    @property
    def ttft_error_s(self) -> float:
        """Shown minus true TTFT at p50."""
        return self.ttft_p50_s[0] - self.ttft_p50_s[1]

    def gap_error(self, which: str) -> float:
        """Relative error of the pooled gap at p50 or p99; differences below the floor count as none."""
        shown, true = self.gap_p50_s if which == "p50" else self.gap_p99_s
        off = abs(shown - true)
        return 0.0 if off < GAP_FLOOR_S[which] else off / true


def compare(level: metrics.Level, truth: Truth) -> Comparison:
    """The client's level held against the judge's truth, percentile by percentile."""
    view = level.view
    if not view.ok or not truth.read_ns.size:
        raise BadInput("a level with answers to compare", str(metrics.failures(level)))
    shown_ttft, shown_gaps = view.column("ttft_s"), view.gaps[0]
    true_ttft, true_gaps = truth.ttft_s(), truth.gaps_s()

    def pair(shown: Array, true: Array, q: float) -> tuple[float, float]:
        return float(np.percentile(shown, q)), float(np.percentile(true, q))

    return Comparison(
        share=truth.share_given(),
        shown_tokens_per_s=view.output_tokens / (view.wall_s or float("nan")),
        true_tokens_per_s=truth.tokens_per_s(),
        chunks_per_s=truth.chunks_per_s(),
        ttft_p50_s=pair(shown_ttft, true_ttft, 50),
        ttft_p99_s=pair(shown_ttft, true_ttft, 99),
        gap_p50_s=pair(shown_gaps, true_gaps, 50),
        gap_p99_s=pair(shown_gaps, true_gaps, 99),
    )


def judged_level(
    plan: Plan, *, streams: int, requests: int, tokens: int, api: str = "completions", workers: int = 1,
    judge_cores: tuple[int, ...] = (), client_cores: tuple[int, ...] = (), kind: str | None = None,
    folder: Path | None = None,
) -> tuple[metrics.Level, Truth, str]:  # fmt: skip
    """One closed-loop level of this client against a fresh judge: its record, the truth, and the judge's kind."""
    made = [Request(f"judge-{i}", f"request number {i}", tokens) for i in range(requests)]
    with contextlib.ExitStack() as stack:
        where = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="judged-")))
        judge = stack.enter_context(running_judge(plan, kind=kind, cores=judge_cores))
        path = client.run_level(
            judge.base_url, api, made, concurrency=streams, model="judge", out=where / "judged.jsonl", workers=workers,
            cores=client_cores, gap_timeout_s=20, first_timeout_s=20, max_seconds=10, drain_s=5,
        )  # fmt: skip
        return client.read_level(path), judge.truth(), judge.kind


def calibrate(
    streams: int,
    *,
    chunks_per_s: float | None = None,
    api: str = "completions",
    workers: int = 1,
    use_cache: bool = True,
    kind: str | None = None,
) -> dict[str, Any]:
    """Whether this client, here and now, shows the truth at `streams` streams and `chunks_per_s`.

    By default 1,000 chunks a second and 50 more for each stream. Takes 3 to 10 seconds, once for each machine, set of
    cores, load and state of the client; then from the cache (a calibration that failed is not cached: the machine may
    have been busy). Pass the result to `run_level`.

    Returns:
        status (ok, client_bound, not_calibrated), reasons, the load, and shown against true TTFT and gaps in seconds.
    """
    if streams < 1 or workers < 1 or (chunks_per_s is not None and chunks_per_s <= 0):
        raise BadInput("at least one stream, worker and chunk a second", f"{streams}, {workers}, {chunks_per_s}")
    streams = 1 << (streams - 1).bit_length()
    rate = chunks_per_s or 1000.0 + 50.0 * streams
    key = _cache_key(streams, rate, api, workers, kind)
    path = cache_folder() / f"calibration-{key}.json"
    if use_cache and (cached := _cached(path)):
        return cached
    step = streams / rate
    plan = Plan(step_s=step, stall_s=2 * step, first_min_s=0.05, first_max_s=0.15)
    tokens = max(2, min(4000, round(1.0 / step)))
    requests = max(4, 2 * streams)
    begun = time.monotonic()
    try:
        level, truth, judge_kind = judged_level(
            plan, streams=streams, requests=requests, tokens=tokens, api=api, workers=workers, kind=kind
        )
        found = compare(level, truth)
    except (BadInput, ServerError) as error:
        return {
            "status": "not_calibrated", "reasons": [f"the calibration did not run: {error}"], "streams": streams,
            "chunks_per_s": rate, "workers": workers,
        }  # fmt: skip
    status, reasons = judged(found, truth, plan, judge_kind, rate)
    made = {
        "status": status,
        "reasons": reasons,
        "streams": streams,
        "chunks_per_s": found.chunks_per_s,
        "asked_chunks_per_s": rate,
        "workers": workers,
        "api": api,
        "judge": judge_kind,
        "share": found.share,
        "ttft_p50_shown_true_s": found.ttft_p50_s,
        "gap_p50_shown_true_s": found.gap_p50_s,
        "gap_p99_shown_true_s": found.gap_p99_s,
        "judge_lag_mean_s": truth.lag_mean_s,
        "seconds": time.monotonic() - begun,
        "made_unix_s": time.time(),
    }
    if status == "ok":
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(made))
        temporary.replace(path)
    return made


def judged(found: Comparison, truth: Truth, plan: Plan, kind: str, rate: float) -> tuple[str, list[str]]:
    """The status that a comparison leads to: what the judge could not pace proves nothing about the client."""
    reasons = []
    lag_limit = max(JUDGE_LAG_FLOOR_S, JUDGE_LAG_OF_STEP * plan.step_s)
    if kind == "python" and rate > SLOW_JUDGE_CHUNKS_PER_S:
        reasons.append(f"{rate:.0f} chunks/s, the Python judge paces {SLOW_JUDGE_CHUNKS_PER_S} (no C compiler)")
    if truth.lag_mean_s > lag_limit:
        late = truth.lag_mean_s * 1e3
        reasons.append(f"the judge itself was {late:.1f} ms late on average: too much load, or a busy machine")
    if reasons:
        return "not_calibrated", reasons
    if found.ttft_error_s > TTFT_P50_LIMIT_S:
        reasons.append(f"TTFT p50 {found.ttft_error_s * 1e3:+.1f} ms off, limit {TTFT_P50_LIMIT_S * 1e3:g} ms")
    for which, limit in (("p50", GAP_P50_LIMIT), ("p99", GAP_P99_LIMIT)):
        if found.gap_error(which) > limit:
            reasons.append(f"chunk gap {which} {found.gap_error(which):.0%} off, limit {limit:.0%}")
    if found.share < SHARE_LIMIT:
        reasons.append(f"{found.share:.3f} of the load given, limit {SHARE_LIMIT}")
    return ("client_bound", reasons) if reasons else ("ok", [])


def _cache_key(streams: int, rate: float, api: str, workers: int, kind: str | None) -> str:
    folder = Path(__file__).parent
    digest = sha256()
    for name in ("client_worker.py", "client_wire.py", "judge.c", "judge.py", "judge_slow.py"):
        digest.update((folder / name).read_bytes())
    cpu = next((x for x in _lines("/proc/cpuinfo") if x.startswith("model name")), platform.processor())
    machine = next(iter(_lines("/etc/machine-id")), platform.node())
    facts = [machine, cpu, sorted(os.sched_getaffinity(0)), sys.version, streams, round(rate), api, workers, kind]
    return sha256(digest.digest() + json.dumps(facts).encode()).hexdigest()[:16]


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _cached(path: Path) -> dict[str, Any] | None:
    try:
        made = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    fresh = isinstance(made, dict) and 0 <= time.time() - made.get("made_unix_s", 0) < CACHE_DAYS * 86400
    return dict(made, cached=True) if fresh else None
