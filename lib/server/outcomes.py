"""What became of a trial, from its evidence alone: facts in, one outcome and the sentence for it out.

    predicted and not launched        -> skipped
    another server answered           -> identity_mismatch (invalid)
    died before it was ready          -> crashes | unsupported_here | out_of_memory, phase and line from its log
    no progress, nothing compiles     -> hangs;  still working at its deadline -> not_enough_data
    died or fell silent while asked   -> crashes | hangs
    answers alone: degenerate, wrong, far off       -> garbage;  beyond the limit -> numerically_off
    right alone, not under load                     -> garbage_under_load | numerically_off
    its log says that another backend was taken, or it computes the same bits as another -> silently_ignored
    its speed is the client's         -> client_bound (invalid)
    else                              -> works

Later rows don't hide earlier ones: a backend that is ignored *and* answers garbage is garbage.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lib.load.stats import paired_mean_difference
from lib.records import Measured, Record
from lib.server.failures import Failure
from lib.server.observations import garbage_signal

#: CPU cores that a process tree must use to count as working while its log is silent: little, on a host that others use too.
BUSY_CORES = 0.1
#: Seconds over which that use is averaged, and within which a compiler must have been seen.
WINDOW_S = 30.0
#: Programs that compile kernels; a tree that runs one is compiling.
COMPILERS = frozenset(
    {
        "nvcc",
        "cicc",
        "cudafe++",
        "ptxas",
        "nvlink",
        "fatbinary",
        "tileiras",
        "ninja",
        "cc1plus",
        "c++",
        "g++",
        "gcc",
        "clang",
        "ld",
    }
)
#: A last line that announces a compilation. (Capturing graphs compiles too, but a hang there spins: a compiler must show.)
COMPILE_LINE = re.compile(r"\bJIT\b|[Cc]ompil|autotune|\bninja\b|\bnvcc\b", re.ASCII)


class Sample(Record):
    """A starting server at one moment: how much it has written, how long its processes computed, what they are."""

    t_s: float
    log_bytes: int
    cpu_s: float
    compilers: list[str] = []
    last_line: str = ""


class Stall(Record):
    """Why the wait for a server ended: `hangs`, or `compiling` where it was at work when its deadline came."""

    kind: str
    words: str


def silence_s(samples: Sequence[Sample]) -> float:
    """Seconds since the log last grew.

    Example: 100 bytes at 10 s and at 25 s: 15.
    """
    if not samples:
        return 0.0
    now = samples[-1]
    return now.t_s - next(s.t_s for s in samples if s.log_bytes == now.log_bytes)


def stalled(samples: Sequence[Sample], quiet_s: float, compile_s: float) -> Stall | None:
    """Whether a starting server makes no progress any more.

    Progress is a new byte in its log. Silence ends the wait after `quiet_s`, unless the server is compiling: its last
    line announces it or a compiler runs below it, and its processes use the CPU; then after `compile_s`. A tree that
    computes without either sign (a spinning collective looks like that) counts as silent.

    Example: no byte for 200 s, no CPU use, `quiet_s` 180: hangs. The same with nvcc at work: None.
    """
    if not samples:
        return None
    now = samples[-1]
    quiet = silence_s(samples)
    if quiet < quiet_s:
        return None
    line = next((s.last_line for s in reversed(samples) if s.last_line), "")
    made = at_work([s for s in samples if s.t_s >= now.t_s - min(WINDOW_S, quiet)], line)
    if made.kind == "compiling" and quiet < compile_s:
        return None
    return made.model_copy(update={"words": f"no line for {quiet:.0f} s, {made.words}"})


def at_work(window: Sequence[Sample], last_line: str) -> Stall:
    """Whether a silent server compiles (`compiling`) or not (`hangs`), from its CPU use, its processes and its last line."""
    span = window[-1].t_s - window[0].t_s
    cores = (window[-1].cpu_s - window[0].cpu_s) / span if span > 0 else 0.0
    seen = sorted({name for s in window for name in s.compilers})
    signs = [f"{', '.join(seen)} at work"] if seen else []
    if COMPILE_LINE.search(last_line):
        signs.append("its last line announces a compilation")
    words = f"{max(cores, 0):.1f} CPU cores in use over the last {span:.0f} s"
    if signs and cores >= BUSY_CORES:
        return Stall(kind="compiling", words=f"{words}, {' and '.join(signs)}: still compiling at its deadline")
    if cores >= BUSY_CORES:
        words += ", but neither its log nor a compiler shows what for"
    return Stall(kind="hangs", words=words)


class Piece(Record):
    """The log-probabilities of one piece of text on one server; `problem` where they are none."""

    key: str
    ids_sha256: str
    logprobs: list[float | None]
    problem: str | None = None


class Difference(Record):
    """How far two scorings of the same pieces lie apart: mean |difference| with its interval, and the worst piece."""

    tokens: int
    mean: float
    low: float | None
    high: float | None
    worst_piece: float
    largest: float
    identical: bool

    @property
    def measured(self) -> Measured:
        """As a table shows it."""
        return Measured(
            value=self.mean, unit="nat/token", n=self.tokens, low=self.low, high=self.high,
            reason=None if self.low is not None else "too few tokens for an interval",
        )  # fmt: skip


def difference(reference: Sequence[Piece], other: Sequence[Piece]) -> Difference | None:
    """Mean |difference| per token of the pieces that both scored; None where there is none.

    The interval respects that neighbours in a text are not independent. Example: a piece against itself is identical.
    """
    its = {(p.key, p.ids_sha256): p for p in reference if p.problem is None}
    apart: list[float] = []
    blocks: list[str] = []
    worst = 0.0
    for place, piece in enumerate(other):
        base = its.get((piece.key, piece.ids_sha256))
        if base is None or piece.problem is not None:
            continue
        pairs = [(x, y) for x, y in zip(base.logprobs, piece.logprobs, strict=True) if x is not None and y is not None]
        mine = [abs(y - x) for x, y in pairs]
        if mine:
            worst = max(worst, sum(mine) / len(mine))
            apart += mine
            blocks += [f"{place}"] * len(mine)
    if not apart:
        return None
    made = paired_mean_difference(apart, [0.0] * len(apart), blocks)
    return Difference(
        tokens=len(apart), mean=made.mean or 0.0, low=made.low, high=made.high, worst_piece=worst,
        largest=max(apart), identical=not any(apart),
    )  # fmt: skip


def score_problem(logprobs: Sequence[Any], first: int = 1) -> str | None:
    """What is wrong with a list of log-probabilities whatever the model, or None: NaN, none, all zero, all alike, above 0.

    Example: `score_problem([None, 0.0, 0.0, 0.0])` is "every log-probability is exactly 0".
    """
    values = list(logprobs[first:])
    wrong = [i for i, v in enumerate(values, first) if not isinstance(v, int | float) or not math.isfinite(v)]
    if wrong:
        return f"NaN or no number as log-probability at {len(wrong)} of {len(values)} positions, first {wrong[0]}"
    if values and max(values) > 1e-3:
        return f"a log-probability above 0 ({max(values):.3g})"
    if len(values) >= 8 and not any(values):
        return "every log-probability is exactly 0"
    if len(values) >= 8 and len(set(values)) == 1:
        return f"every log-probability is {values[0]:.4g}"
    return None


def degenerate(text: str, ids: Sequence[int] = ()) -> str | None:
    """Why an answer looks like garbage whatever the model, or None.

    Signs: empty, replacement characters (U+FFFD), one character, word, token or short unit repeated throughout.
    Example: `degenerate("!!!!!!!!!!!!")` is `"one character repeated"`.
    """
    if len(ids) >= 8 and len(set(ids)) == 1:
        return f"one token repeated ({ids[0]})"
    if not text.strip():
        return "empty"
    if text.count("\ufffd") > max(1, len(text) // 20):
        return "replacement characters (U+FFFD)"
    if len(text) >= 8 and len(set(text.strip())) == 1:
        return "one character repeated"
    words = re.findall(r"\S+", text)
    if len(words) >= 8 and len(set(words)) == 1:
        return "one word repeated"
    signal = garbage_signal(text)
    return signal.replace("_", " ") if signal else None


#: Where a flag's kernels run: only there can equal bits show that a flag had no effect. A flag that is not here
#: (sampling, grammar, chunk size ...) may leave every bit as it is and still be honoured.
COMPUTES: dict[str, tuple[str, ...]] = {
    "attention_backend": ("prefill", "decode"),
    "prefill_attention_backend": ("prefill",),
    "decode_attention_backend": ("decode",),
    "moe_runner_backend": ("prefill", "decode"),
    "fp4_gemm_runner_backend": ("prefill", "decode"),
    "fp8_gemm_runner_backend": ("prefill", "decode"),
    "bf16_gemm_backend": ("prefill", "decode"),
    "linear_attn_backend": ("prefill", "decode"),
    "linear_attn_prefill_backend": ("prefill",),
    "linear_attn_decode_backend": ("decode",),
    "kv_cache_dtype": ("decode",),
}
#: Flags that take over a place of a more general one: where both trials set them, the general one has no say there.
TAKES_OVER: dict[str, dict[str, str]] = {
    "attention_backend": {"prefill": "prefill_attention_backend", "decode": "decode_attention_backend"},
    "linear_attn_backend": {"prefill": "linear_attn_prefill_backend", "decode": "linear_attn_decode_backend"},
}
#: Values of one field that mean the same.
SAME_VALUE = {("kv_cache_dtype", "bf16"): "bfloat16"}
#: One field, several names: as /server_info and the log reader spell it.
FIELD = {
    "fp4_gemm_backend": "fp4_gemm_runner_backend",
    "fp8_gemm_backend": "fp8_gemm_runner_backend",
}
#: Values that leave the choice to the server: nothing was claimed.
OPEN = (None, "", "auto")


def judged_at(name: str, *asked: Mapping[str, Any]) -> tuple[str, ...]:
    """Where a flag's kernels run in trials that asked so: not where each of them lets a more special flag decide.

    Example: with `decode_attention_backend` set in both, `attention_backend` is judged by prefill alone.
    """
    special = TAKES_OVER.get(name, {})
    return tuple(p for p in COMPUTES[name] if not all(a.get(special.get(p, "")) not in OPEN for a in asked))


def by_field(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags under the names that /server_info and the log reader use."""
    return {FIELD.get(name, name): value for name, value in flags.items()}


class Ran(Record):
    """What a trial asked for, what its server says about it, and the bits that it computed.

    `proven` are the fields of which a line of its log (not a repeated argument) says that the asked backend was taken.
    """

    id: str
    asked: dict[str, Any]
    says: dict[str, Any]
    prefill: str | None
    decode: str | None
    proven: list[str] = []


def same_bits(trial: Ran, other: Ran) -> str | None:
    """The sentence that convicts a trial of running another's kernels, or None.

    Both must have asked for it by name, differ in nothing but kernels, and be bit-identical wherever those kernels run.
    Two different kernels sum in different orders: over hundreds of log-probabilities of real text they don't agree bit
    for bit. That `/server_info` repeats the asked value is said, and is no defence.
    """
    names = {n for n in {*trial.asked, *other.asked} if _means(n, trial.asked) != _means(n, other.asked)}
    if not names or any(n not in COMPUTES for n in names):
        return None
    if names & set(trial.proven):
        return None  # its log shows it at work: then it is the other that did not run what it says
    if any(trial.asked.get(n) in OPEN or other.asked.get(n) in OPEN for n in names):
        return None  # `auto` may have chosen just this
    places = {n: judged_at(n, trial.asked, other.asked) for n in names}
    if not all(places.values()):
        return None  # another flag decides there, in both
    for place in {p for listed in places.values() for p in listed}:
        mine, its = getattr(trial, place), getattr(other, place)
        if mine is None or mine != its:
            return None
    told = []
    for name in sorted(names):
        says = trial.says.get(name)
        tail = f" (/server_info repeats {says})" if says == trial.asked[name] else f" (/server_info says {says})"
        told.append(f"{name}={trial.asked[name]}{tail}")
    its_names = ", ".join(str(other.asked[n]) for n in sorted(names))
    return f"bit-identical to {other.id}, which asked for {its_names}: {', '.join(told)} had no effect" + (
        "" if names & set(other.proven) else f" (or {its_names} did not run there)"
    )


def _means(name: str, asked: Mapping[str, Any]) -> Any:
    value = asked.get(name)
    return SAME_VALUE.get((name, value), value) if isinstance(value, str) else value


class Facts(Record):
    """All that is known of one trial."""

    id: str
    is_reference: bool = False
    reference_problem: str | None = None
    predicted: str | None = None
    state: str | None = None
    exit_code: int | None = None
    ready_s: float | None = None
    ended_s: float | None = None
    phase: str | None = None
    failure: Failure | None = None
    stall: Stall | None = None
    silence_s: float | None = None
    invalid: str | None = None
    died: str | None = None
    silent: str | None = None
    failed: str | None = None
    garbage: str | None = None
    garbage_by: str = "answer"
    alone: Difference | None = None
    floor: Difference | None = None
    decode_gap: float | None = None
    decode_gap_reference: float | None = None
    load_garbage: str | None = None
    load: Difference | None = None
    load_reference: Difference | None = None
    load_failed: str | None = None
    load_decode_gap: float | None = None
    ignored: str | None = None
    same_bits: str | None = None
    same_bits_of: str | None = None
    client: str | None = None
    said: str = ""


class Outcome(Record):
    """The outcome of a trial (a key of OUTCOMES), why, and which evidence shows it."""

    outcome: str
    reason: str
    shown_by: str  # launch | log | answer | scores | decode | load | speed | none


def judge(facts: Facts, limit_nats: float, garbage_nats: float) -> Outcome:
    """The outcome of a trial; the order of the rows is the module's first table."""
    for row in (_not_served, _answers, _under_load):
        found = row(facts, limit_nats, garbage_nats)
        if found is not None:
            return found
    if facts.ignored:
        both = "; ".join(x for x in (facts.ignored, facts.same_bits) if x)
        return Outcome(outcome="silently_ignored", reason=both, shown_by="log")
    if facts.same_bits:
        return Outcome(outcome="silently_ignored", reason=facts.same_bits, shown_by="scores")
    if not facts.is_reference and facts.alone is None:
        why = f"it serves, but {facts.reference_problem or 'the reference gave no scores to compare with'}"
        return Outcome(outcome="not_enough_data", reason=why, shown_by="log")
    if facts.client:
        why = f"it computes what the reference computes, but its speed is the client's: {facts.client}"
        return Outcome(outcome="client_bound", reason=why, shown_by="speed")
    return Outcome(outcome="works", reason=_works(facts), shown_by="log")


def _not_served(f: Facts, _limit: float, _garbage: float) -> Outcome | None:
    if f.state is None:
        why = f"not launched: {f.predicted}" if f.predicted else "not launched"
        return Outcome(outcome="skipped", reason=why, shown_by="none")
    if f.invalid:
        return Outcome(outcome="identity_mismatch", reason=f.invalid, shown_by="answer")
    if f.ready_s is None:
        return _never_ready(f)
    if f.died:
        return Outcome(outcome="crashes", reason=f"while serving: {f.died}", shown_by="launch")
    if f.silent:
        where = "load" if "under load" in f.silent else "answer"
        if f.stall and f.stall.kind == "compiling":
            why = f"while serving: {f.silent}; {f.stall.words}: give it longer (answer_timeout_s)"
            return Outcome(outcome="not_enough_data", reason=why, shown_by=where)
        tail = f"; {f.stall.words}" if f.stall else ""
        return Outcome(outcome="hangs", reason=f"while serving: {f.silent}{tail}", shown_by=where)
    return None


def _never_ready(f: Facts) -> Outcome:
    if f.stall and f.stall.kind == "hangs":
        why = f"{f.stall.words}; last seen: {f.phase or 'before its first line'}"
        return Outcome(outcome="hangs", reason=why, shown_by="launch")
    if f.stall or f.state == "not_ready":
        last = "" if f.silence_s is None else f", its last new line {f.silence_s:.0f} s before"
        words = f.stall.words if f.stall else f"not ready after {_s(f.ended_s)}{last}"
        why = f"{words}; last seen: {f.phase or 'before its first line'}: give it longer"
        return Outcome(outcome="not_enough_data", reason=why, shown_by="launch")
    how = f"exit code {f.exit_code} after {_s(f.ended_s)}"
    if f.failure is None or not f.failure.cause_known:
        return Outcome(outcome="crashes", reason=f"{how}; its log names no known cause", shown_by="launch")
    phase = (f.failure.phase or "starting").replace("_", " ")
    return Outcome(outcome=f.failure.outcome, reason=f"{how}, while {phase}: {f.failure.root_cause}", shown_by="launch")


def _s(seconds: float | None) -> str:
    return "an unknown time" if seconds is None else f"{seconds:.1f} s"


def _answers(f: Facts, limit: float, garbage: float) -> Outcome | None:
    if f.garbage:
        return Outcome(outcome="garbage", reason=f.garbage, shown_by=f.garbage_by)
    if f.failed:
        return Outcome(outcome="crashes", reason=f"while serving: {f.failed}", shown_by="answer")
    gap, base = f.decode_gap, f.decode_gap_reference or 0.0
    if gap is not None and gap > base + garbage:
        why = f"decoding disagrees with its own prefill: {gap:.3f} nat/token on its own text (reference {base:.3f})"
        return Outcome(outcome="garbage", reason=why, shown_by="decode")
    if f.is_reference or f.alone is None:
        return None
    words = f"{_nats(f.alone)} from the reference, limit {limit:g}"
    noise = 0.0
    if f.floor is not None and not f.floor.identical:
        noise = f.floor.high if f.floor.high is not None else f.floor.mean
        words += f", and the reference differs from itself by {_nats(f.floor)}"
    low = f.alone.low if f.alone.low is not None else f.alone.mean
    high = f.alone.high if f.alone.high is not None else f.alone.mean
    if low > noise + garbage:
        return Outcome(outcome="garbage", reason=words, shown_by="scores")
    if noise > limit:
        return Outcome(outcome="not_enough_data", reason=f"{words}: the floor is above the limit", shown_by="scores")
    if low > noise + limit:
        return Outcome(outcome="numerically_off", reason=words, shown_by="scores")
    if high > noise + limit:
        why = f"{words}: the interval spans it, more text would settle it"
        return Outcome(outcome="not_enough_data", reason=why, shown_by="scores")
    if gap is not None and gap > base + limit:
        why = f"decoding lies {gap:.3f} nat/token from its own prefill, the reference's {base:.3f}; limit {limit:g}"
        return Outcome(outcome="numerically_off", reason=why, shown_by="decode")
    return None


def _under_load(f: Facts, limit: float, garbage: float) -> Outcome | None:
    if f.load_garbage:
        return Outcome(outcome="garbage_under_load", reason=f"right alone; {f.load_garbage}", shown_by="load")
    if f.load_failed:
        return Outcome(outcome="crashes", reason=f"while serving under load: {f.load_failed}", shown_by="load")
    if f.load is None:
        why = "right alone, as far as it was asked; under load nothing could be compared"
        return Outcome(outcome="not_enough_data", reason=why, shown_by="launch")
    alone = f.decode_gap or 0.0
    if f.load_decode_gap is not None and f.load_decode_gap > alone + garbage:
        why = (
            f"right alone; what it continued under load lies {f.load_decode_gap:.3f} nat/token from its own prefill at rest, "
            f"alone {alone:.3f}"
        )
        return Outcome(outcome="garbage_under_load", reason=why, shown_by="load")
    base = f.load_reference.worst_piece if f.load_reference is not None and not f.is_reference else 0.0
    words = (
        f"right alone; under load its worst piece lies {f.load.worst_piece:.4f} nat/token from the same piece alone"
        f"{'' if f.is_reference else f' (reference {base:.4f})'}"
    )
    if f.load.worst_piece > base + garbage:
        return Outcome(outcome="garbage_under_load", reason=words, shown_by="load")
    if (
        f.load.worst_piece > base + limit and not f.is_reference
    ):  # the reference's own is the noise that others may have
        return Outcome(outcome="numerically_off", reason=f"{words}; limit {limit:g}", shown_by="load")
    return None


def _nats(d: Difference) -> str:
    interval = "" if d.low is None or d.high is None else f" [{max(d.low, 0):.4f}, {d.high:.4f}]"
    return f"{d.mean:.4f}{interval} nat/token over {d.tokens} tokens"


def _works(f: Facts) -> str:
    parts = [f.said] if f.said else []
    if f.is_reference:
        parts.append("the reference of the others")
        if f.floor is not None:
            parts.append("twice the same bits" if f.floor.identical else f"differs from itself by {_nats(f.floor)}")
    elif f.alone is not None:
        parts.append(
            f"{f.alone.tokens} log-probabilities bit-identical to the reference"
            if f.alone.identical
            else f"{_nats(f.alone)} from the reference"
        )
    if f.load is not None:
        n = f.load.tokens
        same = "bit-identical to" if f.load.identical else f"{f.load.mean:.4f} nat/token from"
        parts.append(f"under load {n} log-probabilities {same} those alone")
    return "; ".join(parts)


class Candidate(Record):
    """A trial as the choice sees it: its speed and how far it lies from the reference."""

    id: str
    outcome: str
    speed: Measured | None = None
    fidelity: Measured | None = None
    reason: str = ""
    same_kernels: bool = False  # known to run the reference's kernels: its speed is a second launch of them


class Choice(Record):
    """The configuration to go on with, why, and what would change it."""

    id: str | None
    why: str
    would_change: list[tuple[str, str]] = []  # which trial, and what would have to be so
    launch_noise: float | None = None  # how far two launches of the same kernels lay apart in speed, as a share


def launch_noise(trials: Sequence[Candidate], reference: str) -> float | None:
    """The largest share by which a trial that ran the reference's kernels was slower or faster than it; None without one.

    Repeats within a launch don't see what differs from launch to launch. Example: 60 and 30 tok/s give 0.5.
    """
    base = next((_rate(t) for t in trials if t.id == reference), -math.inf)
    again = [_rate(t) for t in trials if t.same_kernels and t.id != reference and _rate(t) > 0]
    if base <= 0 or not again:
        return None
    return max(1 - min(base, rate) / max(base, rate) for rate in again)


def choose(trials: Sequence[Candidate], reference: str) -> Choice:
    """The fastest of those that work; where speeds can't be told apart, the one nearest the reference.

    They can't where intervals overlap, or where two launches of the same kernels lie as far apart.
    Example: works at 100 [95, 105] and 103 [97, 109] tok/s: the reference is kept, and the other is named.
    """
    working = [t for t in trials if t.outcome == "works"] or [t for t in trials if t.outcome == "client_bound"]
    if not working:
        return Choice(id=None, why="no trial works", would_change=_failing(trials))
    timed = [t for t in working if t.speed is not None and isinstance(t.speed.value, int | float)]
    if not timed:
        first = next((t for t in working if t.id == reference), working[0])
        why = "it computes what it should, and no speed of any trial is known"
        return Choice(
            id=first.id, why=why, would_change=[c for c in _failing(trials) if not c[0].startswith(f"{first.id} (")]
        )
    fastest = max(timed, key=_rate)
    floor = fastest.speed.low if fastest.speed is not None and fastest.speed.low is not None else _rate(fastest)
    noise = launch_noise(trials, reference)
    close = [t for t in timed if _top(t) >= floor or _rate(t) >= _rate(fastest) * (1 - (noise or 0.0))]
    best = min(close, key=lambda t: (t.id != reference, _apart(t), -_rate(t)))
    if len(working) == 1:
        why = f"the only one that works, {_tok(best)}"
    elif best is fastest and len(close) == 1:
        why = f"the fastest of {len(working)} that work, {_tok(best)}, and the intervals don't overlap"
    else:
        others = ", ".join(f"{t.id} ({_tok(t)})" for t in close if t is not best)
        why = f"{_tok(best)}; no measurable difference in speed from {others}, and nearest to the reference"
    if noise is not None:
        why += f"; two launches of the same kernels differed by {100 * noise:.0f}% here"
    change = [(f"{t.id} ({_tok(t)})", "if more launches showed it faster") for t in close if t is not best]
    return Choice(id=best.id, why=why, would_change=[*change, *_failing(trials)], launch_noise=noise)


def _failing(trials: Sequence[Candidate]) -> list[tuple[str, str]]:
    words = {
        "silently_ignored": "if its flag were honoured on another checkpoint or host",
        "skipped": "if it were launched (verify) or this version's rule were wrong",
        "not_enough_data": "with a longer deadline or more text",
        "client_bound": "if its speed were measured by a client that keeps up",
    }
    return [
        (f"{t.id} ({t.outcome.replace('_', ' ')})", words.get(t.outcome) or f"if this were gone: {t.reason[:200]}")
        for t in trials
        if t.outcome != "works"
    ]


def _rate(t: Candidate) -> float:
    value = t.speed.value if t.speed is not None else None
    return float(value) if isinstance(value, int | float) else -math.inf


def _top(t: Candidate) -> float:
    return t.speed.high if t.speed is not None and t.speed.high is not None else _rate(t)


def _apart(t: Candidate) -> float:
    value = t.fidelity.value if t.fidelity is not None else None
    return float(value) if isinstance(value, int | float) else math.inf


def _tok(t: Candidate) -> str:
    if t.speed is None or t.speed.low is None or t.speed.high is None:
        return f"{_rate(t):.1f} tok/s"
    return f"{_rate(t):.1f} [{t.speed.low:.1f}, {t.speed.high:.1f}] tok/s"
