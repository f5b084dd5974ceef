"""A server's log as one record: what is really running, how much fits, and why it died. Lines in, record out.

`read_log` streams: a bytes prefilter passes the few lines that say something, batch lines have their own fast
path, every
list is bounded. It reads SGLang 0.5.10 to 0.5.23 with any rank tags, journal and container prefixes, colours, CRLF and
progress bars, recognises a vLLM log and reads what it knows of it, and says of any other log that it is foreign.

    ServerLog
    |-- engine, version (and how it is known), server_args, backends (asked, taken), quantization, weights per rank
    |-- kv_pools, pool_totals, pool_plans, mamba_pools (per rank; `kv` sums up one rank, never over ranks)
    |-- graphs, capacity, ready, phases, batches (time series), speculation, retractions
    `-- notices (warnings that matter), failure

"GB" in SGLang's lines is 2^30 bytes. Every fact carries its line number and the quoted line.
"""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lib.model.published import dtype_by_geometry
from lib.server.failures import Failure, FailureReader
from lib.server.lines import (
    MAX_LINE_BYTES,
    Line,
    Stamps,
    parse_line,
    rank_tag,
    split_messages,
    stamps_of,
    without_colours,
)
from lib.server.log_records import (
    Backend,
    Batch,
    Batches,
    Capacity,
    Graph,
    KvPool,
    KvSummary,
    Launch,
    MambaPool,
    Notice,
    PhaseSeen,
    PoolPlan,
    PoolTotal,
    Ready,
    ServerLog,
    Speculation,
    Spread,
    Told,
    VllmCapacity,
    VllmSpeculation,
    Weights,
)
from lib.server.log_tables import (
    ACCEPT,
    ARG_ALIASES,
    BACKEND_ARGS,
    BACKEND_ROWS,
    COMMAND,
    DISABLED,
    DRAFTS_LEFT,
    DSV4,
    DSV4_SIZES,
    FIELDS_B,
    FOREIGN,
    GRAPH,
    GRAPH_FAILED,
    INTERESTING,
    KV_LINE,
    LAYER_TOKENS,
    LEVELS,
    LOAD_END,
    MAMBA_LINE,
    MAX_MODEL_LEN,
    MOE_TRACE,
    NEGATIVE,
    NOTICE_NEEDS,
    NOTICES,
    NUM,
    PAIR,
    POOL_INIT,
    POST_CAPTURE,
    PROFILE,
    RETRACT,
    SAME_ARGUMENTS,
    SPREAD,
    STRONG,
    SWA_LINE,
    TARGET_LEFT,
    USING_DTYPE,
    VERSION_LINES,
    VERSION_MARKS,
    VERSION_TEXT,
    VLLM_ARGS,
    VLLM_BLOCKS,
    VLLM_CONC,
    VLLM_CONFIG,
    VLLM_ENGINE,
    VLLM_KV,
    VLLM_KV_GIB,
    VLLM_SPEC,
    VLLM_TOO_LONG,
    VLLM_VERSION,
    WORDS,
)
from lib.server.progress import PHASES, phase_of
from lib.server.redact import find_secrets, is_secret_name, redact_object, redact_text

GIB = 1 << 30
MAX_SERIES = 2000
MAX_FACTS = 4096
MAX_JOIN = 3


def read_log(lines: Iterable[bytes | str]) -> ServerLog:
    """Everything that a server's log says, from its lines, in one pass and bounded memory.

    One item is one physical line (see `lib.server.lines.lines_of` for reading a file of any size). A log with several
    starts is read as its last one; the earlier ones are listed in `launches`.

    Args:
        lines: bytes (faster) or str, with or without their line ends.

    Returns:
        The record; secrets are redacted. `engine` says "foreign" for another program's log and "empty" for none.

    Example: the line `KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 11483156, K size: 10.95 GB, V size:
    10.95 GB` gives one pool with dtype float8_e4m3fn, dtype_known_by "line", tokens 11483156, k_gib 10.95.
    """
    reader = LogReader()
    feed_many(reader, lines)
    return reader.finish()


def feed_many(reader: LogReader, lines: Iterable[Any]) -> None:
    """Feed lines into a reader: the hot loop."""
    interesting = INTERESTING.search
    batch = reader.batch_line
    other = reader.line
    number = reader.number
    size = reader.bytes
    http = 0
    for raw in lines:
        number += 1
        if type(raw) is str:
            raw = raw.encode("utf-8", "replace")
        length = len(raw)
        size += length + 1
        if length >= MAX_LINE_BYTES:
            reader.cut_lines += 1
        if b" batch" in raw and (b"Decode batch" in raw or b"Prefill batch" in raw) and b"\r" not in raw[:-2]:
            batch(number, raw)
        elif b"HTTP/1." in raw and b"INFO: " in raw and b"\r" not in raw[:-2]:
            http += 1
            reader.last_stamped = raw
            if not reader.first_time:
                reader.first_stamp(raw)
        elif raw.find(b"Receive: ", 0, 160) >= 0 or raw.find(b"Finish: ", 0, 160) >= 0:
            reader.last_stamped = raw[:400]  # what a user wrote (--log-requests) is not the server's word
        elif reader.want_all or interesting(raw):
            other(number, raw)
        elif not reader.first_time:
            reader.first_stamp(raw)
        elif number & 1023 == 0:
            reader.sample(raw)
    reader.number = number
    reader.bytes = size
    reader.http += http


class _Series:
    """Rows that stay below a bound by dropping every second one when full."""

    __slots__ = ("rows", "every", "seen")

    def __init__(self) -> None:
        self.rows: list[tuple[int, bytes | None, dict[str, Any], str]] = []
        self.every = 1
        self.seen = 0

    def add(self, number: int, raw: bytes, values: dict[str, Any], kind: str) -> None:
        if self.seen % self.every == 0:
            self.rows.append((number, raw[:400], values, kind))
            if len(self.rows) > MAX_SERIES:
                self.rows = self.rows[::2]
                self.every *= 2
        self.seen += 1


class LogReader:
    """The state of reading a log. Use `read_log`; a reader of one's own can follow a growing file."""

    def __init__(self) -> None:
        self.number = 0
        self.bytes = 0
        self.http = 0
        self.cut_lines = 0
        self.want_all = False
        self.first_time: str | None = None
        self.first_outer: str | None = None
        self.last_stamped: bytes = b""
        self.marks: Counter[str] = Counter()
        self.mark_why: dict[str, str] = {}
        self.foreign: str | None = None
        self.binary = 0
        self.launches: list[Launch] = []
        self.earlier_secrets: set[str] = set()
        self._first_checked = 0
        self._pending: list[tuple[Line, int]] = []
        self._repeated: dict[bytes, tuple[str, ...]] = {}
        self._launch()

    def _launch(self) -> None:
        self._repeated.clear()
        self.failures = FailureReader()
        self.facts: dict[str, list[Any]] = {
            name: []
            for name in (
                "weights",
                "kv",
                "total",
                "plan",
                "mamba",
                "graph",
                "backend",
                "pool_end",
                "load_begin",
                "left",
                "avail",
            )
        }
        self.dropped = 0
        self.notices: dict[str, dict[str, Any]] = {}
        self.traits: dict[str, Line] = {}
        self.args: dict[str, Any] = {}
        self.args_line: Line | None = None
        self.args_complete: bool | None = None
        self.asked: dict[str, str | bool] = {}
        self.command: Line | None = None
        self.capacity: tuple[Line, dict[str, str]] | None = None
        self.ready: Line | None = None
        self.stop: Line | None = None
        self.compiling: Line | None = None
        self.using_dtype: dict[str | None, tuple[str, Line]] = {}
        self.phase: str | None = None
        self.phase_lines: dict[str, Line] = {}
        self.ranks: set[str] = set()
        self.versions: list[tuple[str, Line]] = []
        self.moe_trace: Line | None = None
        self.quant_line: Line | None = None
        self.retractions = 0
        self.retracted = 0
        self.retract_line: Line | None = None
        self.series = _Series()
        self.spreads: dict[str, dict[str, list[float]]] = {}
        self.counts: Counter[str] = Counter()
        self.accepts: Counter[tuple[float, float]] = Counter()
        self.accept_last: tuple[int, bytes, float, float | None] | None = None
        self.vllm_rows: list[dict[str, Any]] = []
        self.vllm_spec: list[tuple[Line, dict[str, Any]]] = []
        self.start_time: str | None = None
        self.start_outer: str | None = None
        self.start_line = 1
        self.last_avail: float | None = None
        self.before_graphs: float | None = None

    # ---------------------------------------------------------------- the hot path
    def first_stamp(self, raw: bytes) -> None:
        """Look for the first time stamp and for the program in the first lines."""
        self._first_checked += 1
        if self._first_checked <= 5000:
            line = parse_line(0, raw)
            if line.time:
                self.first_time, self.first_outer = line.time, line.outer
                if self.start_time is None:
                    self.start_time, self.start_outer = line.time, line.outer
            self._recognise(raw)

    def sample(self, raw: bytes) -> None:
        """Look at one line of many that say nothing: is this text at all?"""
        if b"\x00" in raw:
            self.binary += 1

    def batch_line(self, number: int, raw: bytes) -> None:
        """One `Decode batch` or `Prefill batch` line."""
        if b"\x1b" in raw:
            raw = without_colours(raw)
        at = raw.find(b"Decode batch")
        kind = "decode"
        if at < 0:
            at = raw.find(b"Prefill batch")
            kind = "prefill"
        if at > 300 or b"Receive: " in raw[:at] or b"Finish: " in raw[:at]:
            return
        self.counts[kind] += 1
        values: dict[str, Any] = {}
        fields = FIELDS_B
        tail = raw[raw.find(b"#", at) :] if raw.find(b"#", at) >= 0 else raw[at:]
        for part in tail.split(b", "):
            key, _, value = part.partition(b": ")
            known = fields.get(key)
            if known is not None and len(value) < 24:
                try:
                    found = known[1](value)
                except ValueError:
                    try:
                        found = known[1](float(value.split()[0].rstrip(b",;")))
                    except (ValueError, IndexError, OverflowError):
                        continue
                if found - found == 0:  # neither NaN nor infinite
                    values[known[0]] = found
            elif known is None and key.endswith(b"graph"):
                values["graph"] = value.strip().startswith(b"True")
        spreads = self.spreads.get(kind)
        if spreads is None:
            spreads = self.spreads[kind] = {}
        for name, value in values.items():
            if name in SPREAD:
                spread = spreads.get(name)
                if spread is None:
                    spreads[name] = [1, value, value, value, value]
                else:
                    spread[0] += 1
                    if value < spread[1]:
                        spread[1] = value
                    elif value > spread[2]:
                        spread[2] = value
                    spread[3] += value
                    spread[4] = value
        if "accept_len" in values and "accept_rate" in values:
            self._accepted(number, raw, values["accept_len"], values["accept_rate"])
        elif "accept_len" in values:
            self.accept_last = (number, raw, values["accept_len"], None)
        self.series.add(number, raw, values, kind)
        self.failures.alive = number
        self.last_stamped = raw
        if self.counts[kind] == 1:
            self.marks["sglang"] += 1
            self.mark_why.setdefault("sglang", raw[at : at + 60].decode("utf-8", "replace"))
            line = parse_line(number, raw)
            if b"#pending-token: " in raw:
                self._trait("#pending-token: ", line)
            if not self.first_time:
                self.first_stamp(raw)
            if self.ready is not None or not self.failures.seen_startup:
                self._saw_phase("serving", line)
        if number & 255 == 0 or self.counts[kind] < 50:
            rank = parse_line(number, raw).rank
            if rank:
                self.ranks.add(rank)

    def _accepted(self, number: int, raw: bytes, length: float, rate: float) -> None:
        pair = (length, rate)
        if pair in self.accepts or len(self.accepts) < 5000:
            self.accepts[pair] += 1
        self.accept_last = (number, raw, length, rate)

    # ---------------------------------------------------------------- everything else
    def line(self, number: int, raw: bytes) -> None:
        """One physical line that may say something."""
        if not raw.strip():
            if self.want_all:
                self._message(Line(number, None, None, "", False, ""))
            return
        message = raw[raw.find(b"] ", 0, 120) + 1 :]
        known = self._repeated.get(message)
        if known is not None and not self.want_all:
            for ident in known:
                self._seen_again(ident, raw)
            self.last_stamped = raw
            return
        before = self._fingerprint()
        self._recognise(raw)
        for part in split_messages(without_colours(raw)):
            line = parse_line(number, part)
            if line.time:
                self.last_stamped = part
                if not self.first_time:
                    self.first_time, self.first_outer = line.time, line.outer
                if self.start_time is None:
                    self.start_time, self.start_outer = line.time, line.outer
            self._message(line)
        self.want_all = self.failures.open or bool(self._pending)
        if not self.want_all and len(message) < 1000 and len(self._repeated) < 4096 and self._fingerprint() == before:
            text = message.decode("utf-8", "replace")
            self._repeated[message] = tuple(row[0] for row in self._notices_in(text))

    def _fingerprint(self) -> tuple[Any, ...]:
        """What one line may change, apart from counts of notices: an equal one means that the line said nothing new."""
        told = (self.capacity, self.ready, self.stop, self.compiling, self.args_line, self.accept_last, self.moe_trace)
        sizes = tuple(len(rows) for rows in self.facts.values())
        failed = (len(self.failures.events), self.failures.dropped, len(self.versions), len(self.vllm_rows))
        return (
            told,
            sizes,
            failed,
            self.dropped,
            self.phase,
            self.retractions,
            self.series.seen,
            len(self.traits),
            len(self.using_dtype),
        )

    def _seen_again(self, ident: str, raw: bytes) -> None:
        seen = self.notices[ident]
        seen["count"] += 1
        if raw[:1] == b"[" and raw[20:22] != b"] " and len(seen["ranks"]) < 4096:
            rank = parse_line(0, raw[:200]).rank
            if rank:
                seen["ranks"].add(rank)
                self.ranks.add(rank)

    @staticmethod
    def _notices_in(text: str) -> list[tuple[str, str, str]]:
        """(id, level, meaning) of the warnings in a message."""
        found = []
        for ident, level, needle, meaning in NOTICES:
            if needle not in text or NOTICE_NEEDS.get(ident, "") not in text:
                continue
            if ident == "max_total_tokens_capped":
                negative = NEGATIVE.search(text)
                if negative and int(negative.group(1)) < 0:
                    continue
            found.append((ident, level, meaning))
        return found

    def _message(self, line: Line) -> None:
        if self._pending and not line.stamped:
            held, count = self._pending.pop()
            joined = held._replace(text=f"{held.text} {line.text.strip()}", quote=f"{held.quote} {line.text.strip()}")
            if joined.text.endswith(",") and count + 1 < MAX_JOIN:
                self._pending.append((joined, count + 1))
            else:
                self._whole(joined)
            return
        if self._pending:
            self._whole(self._pending.pop()[0])
        if line.text.endswith(",") and _JOINABLE.search(line.text) and len(line.text) < 4000 and not self.failures.open:
            self._pending.append((line, 0))
            return
        self._whole(line)

    def _whole(self, line: Line) -> None:
        text = line.text
        if self._begins_launch(line):
            self._end_launch()
            self.start_time, self.start_outer, self.start_line = line.time, line.outer, line.number
        if text.startswith(("Decode batch", "Prefill batch")) and "#" in text:
            self.batch_line(line.number, line.quote.encode("utf-8", "replace"))
            return
        if line.rank and len(self.ranks) < 4096:
            self.ranks.add(line.rank)
        if not self.failures.open:
            if "Retract requests" in text:
                self._retract(line)
            elif self._handle(line):
                phase = phase_of(text if len(text) < 4000 else text[:4000])
                if phase is not None:
                    self._saw_phase(phase.name, line)
        self.failures.feed(line)

    def _saw_phase(self, name: str, line: Line) -> None:
        if name == "ready" and self.ready is None:
            self.ready = line
        if name == "warming_up" and self.ready is not None:
            return
        if name != "stopping":
            self.phase = name if self.ready is None or PHASES.index(name) >= PHASES.index("ready") else self.phase
        self.phase_lines.setdefault(name, line)
        self.failures.saw_phase(name, line)

    def _keep(self, kind: str, fact: Any) -> None:
        if len(self.facts[kind]) < MAX_FACTS:
            self.facts[kind].append(fact)
        else:
            self.dropped += 1

    def _trait(self, needle: str, line: Line) -> None:
        self.traits.setdefault(needle, line)

    def _recognise(self, raw: bytes) -> None:
        if b"\x00" in raw[:4096]:
            self.binary += 1
        for engine, needles in STRONG.items():
            if self.marks[engine] > 200:
                continue
            for needle in needles:
                if needle in raw:
                    self.marks[engine] += 1
                    if engine not in self.mark_why:
                        self.mark_why[engine] = needle.decode()
                    break
        if self.foreign is None and not self.marks:
            lowered = raw[:2000]
            for needle, name in FOREIGN:
                if needle in lowered:
                    self.foreign = name
                    break

    def _retract(self, line: Line) -> None:
        match = RETRACT.search(line.text)
        self.retractions += 1
        self.retracted += int(match.group("n")) if match else 0
        self.retract_line = self.retract_line or line

    def _handle(self, line: Line) -> bool:
        """Take the facts of one message; False for a message whose text is not the server's own (requests,
        arguments)."""
        text = line.text
        if "server_args=" in text:
            self._server_args(line)
            self._saw_phase("importing", line)
            return False
        if text.startswith(("Receive: ", "Finish: ", "Receive OpenAI")):
            return False
        if len(text) > 20000:
            text = text[:20000]
        for needle, _, _ in VERSION_LINES:
            if needle in text:
                self._trait(needle, line)
        if "KV Cache " in text or "KV cache allocated" in text:
            self._kv(line, text)
        elif "SWAKVPool" in text:
            swa = SWA_LINE.search(text)
            if swa:
                self._keep("total", (line, float(swa["gib"]), int(swa["swa"]), int(swa["full"])))
        elif "Mamba Cache is allocated" in text:
            mamba = MAMBA_LINE.search(text)
            if mamba:
                self._keep("mamba", (line, mamba.groupdict()))
        elif "Load weight" in text:
            self._load(line, text)
        elif "max_total_num_tokens=" in text:
            pairs = {key.strip(): value.rstrip(",.") for key, value in PAIR.findall(text)}
            if self.capacity is None or rank_tag(line.rank, "DP") in (None, 0):
                self.capacity = (line, pairs)
        elif "Memory pool end" in text:
            self._keep("pool_end", (line, _gib_after(text, "avail mem=")))
        elif "Using KV cache dtype" in text:
            self._using_dtype(line, text)
        elif "accept len: " in text and "batch" not in text:
            accept = ACCEPT.search(text)
            if accept:
                self._accepted(line.number, line.quote.encode(), float(accept["len"]), float(accept["rate"]))
                values = {"accept_len": float(accept["len"]), "accept_rate": float(accept["rate"])}
                if accept["gen"]:
                    values["gen_tok_s"] = float(accept["gen"])
                self.series.add(line.number, line.quote.encode(), values, "acceptance")
        if "aptur" in text or "raph is disabled" in text or "CUDA graph because" in text:
            self._graph(line, text)
        if "avail mem=" in text:
            gib = _gib_after(text, "avail mem=")
            if gib is not None:
                self.last_avail = gib
        self._plan(line, text)
        self._backend(line, text)
        self._notice(line, text)
        self._vllm(line, text)
        if MOE_TRACE in text and self.moe_trace is None:
            self.moe_trace = line
        if text.startswith("Detected ") and "checkpoint" in text and self.quant_line is None:
            self.quant_line = line
        if "JIT Pre-Compile" in text or text.startswith("Running FlashInfer autotune"):
            self.compiling = line
        if text.startswith("SIGTERM received") and self.stop is None:
            self.stop = line
        if self.command is None and len(text) < 20000:
            command = COMMAND.search(text)
            if command and "UserWarning" not in text:
                self.command = line
                self.asked = _read_command(command["args"])
                if self.failures.phase is None:
                    self.failures.saw_phase("importing", line)
        version = VERSION_TEXT.search(text)
        if version and len(self.versions) < 20:
            self.versions.append((version["v"], line))
        return True

    def _server_args(self, line: Line) -> None:
        raw = line.text.partition("server_args=")[2]
        args, complete = parse_server_args(raw)
        node = args.get("node_rank")
        if self.args_line is not None and args and (node is None or node == self.args.get("node_rank")):
            self._end_launch()
            self.start_time, self.start_outer, self.start_line = line.time, line.outer, line.number
        if args and (self.args_line is None or not self.args):
            self.args, self.args_line, self.args_complete = args, line, complete
            self.earlier_secrets.update(find_secrets(args))

    def _begins_launch(self, line: Line) -> bool:
        """Whether a new start begins here and the one before it had come to something (ready, stopped or dead)."""
        text = line.text
        if "Load weight begin" in text:  # a server that was ready loads no weights again: its first lines are missing here
            return self.ready is not None
        if "sglang" not in text and "systemd" not in line.quote[:200] and "error: " not in text:
            return False
        if self.ready is None and self.stop is None and not any(event.fatal for event in self.failures.events):
            return False
        if "is still supported, but 'sglang serve'" in text:
            return True
        if text.startswith("Started ") and "systemd[" in line.quote[:200]:
            return True
        # argparse answers before anything else is logged: after a server that was stopped it is the next one.
        return self.stop is not None and "sglang serve: error: " in text

    def _end_launch(self) -> None:
        failure = self.failures.finish()
        if len(self.launches) < 200:
            self.launches.append(
                Launch(
                    line_no=self.start_line,
                    time=self.start_time,
                    ready=self.ready is not None,
                    failure_class=failure.failure_class if failure else None,
                    root_cause=failure.root_cause if failure else None,
                )
            )
        command, asked = self.command, self.asked
        self._launch()
        self.command, self.asked = command, asked

    def _using_dtype(self, line: Line, text: str) -> None:
        dtype = USING_DTYPE.search(text)
        if dtype:
            self.using_dtype[line.rank] = (dtype["dtype"] or dtype["quoted"], line)

    def _kv(self, line: Line, text: str) -> None:
        match = KV_LINE.search(text)
        if match and (match["tokens"] or match["k"] or match["kv"]):
            self._keep(
                "kv",
                {
                    "line": line,
                    **match.groupdict(),
                    "post": False,
                    "after_end": len(self.facts["pool_end"]),
                    "after_total": len(self.facts["total"]),
                },
            )
            return
        match = POST_CAPTURE.search(text)
        if not match:
            self._using_dtype(line, text)
        else:
            self._keep(
                "kv",
                {
                    "line": line,
                    **match.groupdict(),
                    "k": None,
                    "v": None,
                    "label": None,
                    "state": "is allocated",
                    "post": True,
                    "after_end": len(self.facts["pool_end"]),
                    "after_total": len(self.facts["total"]),
                },
            )

    def _load(self, line: Line, text: str) -> None:
        if "Load weight begin" in text:
            self._keep("load_begin", (line, _gib_after(text, "avail mem=")))
        elif LOAD_END.search(text):
            pairs = {
                key.strip(): value.rstrip(",.") for key, value in PAIR.findall(text[text.find("Load weight end") :])
            }
            self._keep("weights", (line, pairs))

    def _graph(self, line: Line, text: str) -> None:
        failed = GRAPH_FAILED.search(text)
        if failed:
            self._keep(
                "graph",
                Graph(
                    name="cuda graph",
                    state="failed",
                    reason=failed["why"][:300],
                    line_no=line.number,
                    line=_short(line.quote),
                    rank=line.rank,
                ),
            )
            return
        disabled = DISABLED.search(text)
        if disabled:
            reason = disabled["why"] or disabled["why2"]
            self._keep(
                "graph",
                Graph(
                    name=disabled["which"] or "all",
                    state="disabled",
                    reason=reason[:300],
                    line_no=line.number,
                    line=_short(line.quote),
                    rank=line.rank,
                ),
            )
            return
        match = GRAPH.match(text)
        if not match:
            return
        rest = match["rest"]
        sizes = re.search(r"(?:bs|num_tokens)=?\s?\[([\d, ]*)\]", rest)
        elapsed = re.search(rf"(?:elapsed=|Time elapsed: )({NUM}) s", rest)
        avail = _gib_after(rest, "avail mem=")
        if match["what"] == "begin" and self.before_graphs is None:
            self.before_graphs = avail
        self._keep(
            "graph",
            Graph(
                name=match["name"].strip() or "decode",
                state="begun" if match["what"] == "begin" else "captured",
                seconds=float(elapsed.group(1)) if elapsed else None,
                gib=_gib_after(rest, "mem usage="),
                avail_gib=avail,
                sizes=len(sizes.group(1).split(",")) if sizes and sizes.group(1).strip() else None,
                line_no=line.number,
                line=_short(line.quote),
                rank=line.rank,
            ),
        )

    def _plan(self, line: Line, text: str) -> None:
        if "full_token=" in text:
            match = DSV4.search(text)
            if match:
                self._keep(
                    "plan",
                    (
                        line,
                        {
                            "bytes_per_full_token": float(match["bytes"]),
                            "budget_gib": float(match["gib"]),
                            "full_tokens": int(match["full"]),
                        },
                    ),
                )
        elif "pool sizes: " in text:
            match = DSV4_SIZES.search(text)
            if match:
                self._keep("plan", (line, {"full_tokens": int(match["full"]), "swa_tokens": int(match["swa"])}))
        elif "rest_memory=" in text:
            match = PROFILE.search(text)
            if match:
                self._keep(
                    "plan",
                    (
                        line,
                        {
                            "available_gib": float(match["avail"]),
                            "total_gpu_gib": float(match["total"]),
                            "mem_fraction_static": float(match["f"]),
                            "budget_gib": float(match["rest"]),
                        },
                    ),
                )
        elif "_layer_tokens=" in text:
            match = LAYER_TOKENS.search(text)
            if match:
                self._keep("plan", (line, {"full_tokens": int(match["full"]), "swa_tokens": int(match["swa"])}))
        elif "TokenToKVPool with" in text:
            match = POOL_INIT.search(text)
            if match:
                self._keep("plan", (line, {"swa_tokens": int(match["swa"])}))
        elif "draft pool" in text or "target pool" in text:
            target, drafts = TARGET_LEFT.search(text), DRAFTS_LEFT.search(text)
            if target:
                self._keep("left", (line, 0, float(target["gib"])))
            elif drafts:
                word = drafts["n"].lower()
                count = WORDS.get(word, int(word) if word.isdigit() and len(word) < 6 else None)
                if count:
                    self._keep("left", (line, count, float(drafts["gib"])))

    def _backend(self, line: Line, text: str) -> None:
        if "ackend" not in text and "GDN" not in text:
            return
        for kind, pattern, asked in BACKEND_ROWS:
            match = pattern.search(text)
            if not match:
                continue
            groups = match.groupdict()
            if groups.get("decode"):
                taken = (
                    groups["decode"]
                    if groups["decode"] == groups["prefill"]
                    else f"decode {groups['decode']}, prefill {groups['prefill']}"
                )
            else:
                taken = groups.get("taken")
            said = groups.get("asked") or asked
            if len(self.facts["backend"]) < 500:
                self.facts["backend"].append((line, kind, said, taken))
            return

    def _notice(self, line: Line, text: str) -> None:
        for ident, level, meaning in self._notices_in(text):
            seen = self.notices.get(ident)
            if seen is None:
                self.notices[ident] = {
                    "line": line,
                    "level": level,
                    "text": meaning,
                    "count": 1,
                    "ranks": {line.rank} if line.rank else set(),
                }
            else:
                seen["count"] += 1
                if line.rank and len(seen["ranks"]) < 4096:
                    seen["ranks"].add(line.rank)

    def _vllm(self, line: Line, text: str) -> None:
        if (
            "KV cache size: " in text
            or "Maximum concurrency" in text
            or "GPU blocks" in text
            or "max seq len" in text
            or "kv_cache_size=" in text
        ) or "Available KV cache memory" in text:
            self._vllm_capacity(line, text)
        elif "SpecDecoding metrics" in text:
            self._vllm_speculation(line, text)
        elif "Avg generation throughput" in text:
            engine = VLLM_ENGINE.search(text)
            if engine:
                values = {
                    "running": int(engine["run"]),
                    "queue": int(engine["wait"]),
                    "gen_tok_s": float(engine["gen"]),
                    "input_tok_s": float(engine["prompt"]),
                }
                if engine["usage"]:
                    values["usage"] = float(engine["usage"]) / 100
                self.counts["engine"] += 1
                self.series.add(line.number, line.quote.encode(), values, "engine")
        if self.marks["vllm"] > self.marks["sglang"]:
            if "Application startup complete" in text and self.ready is None:
                self._saw_phase("ready", line)
            if "ersion " in text or "LLM engine (v" in text:
                version = VLLM_VERSION.search(text)
                if version and len(self.versions) < 20:
                    self.versions.append((version["v"], line))
            args = VLLM_ARGS.search(text)
            if args and not self.args:
                self.args, self.args_complete = parse_server_args(args["args"])
                self.args_line = line
                self.earlier_secrets.update(find_secrets(self.args))
            if "LLM engine (v" in text and " with config: " in text:
                for name, value in VLLM_CONFIG.findall(text):
                    self.args.setdefault(name, _plain_word(value))
                self.args_line = self.args_line or line
            length = MAX_MODEL_LEN.search(text)
            if length:
                self.args.setdefault("max_model_len", int(length["len"] or length["len2"]))
            if "weights took" in text or "Model loading took" in text:
                size = re.search(rf"(?:Model loading|model weights) took ({NUM}) ?Gi?B", text)
                took = re.search(rf"took (?:{NUM} Gi?B[\w ]* and )?({NUM}) s", text)
                self._keep(
                    "weights",
                    (line, {"elapsed": took.group(1) if took else "", "mem usage": size.group(1) if size else ""}),
                )

    def _vllm_capacity(self, line: Line, text: str) -> None:
        if len(self.vllm_rows) >= MAX_FACTS:
            return
        found: dict[str, Any] = {}
        tokens, concurrency = VLLM_KV.search(text), VLLM_CONC.search(text)
        blocks, gib, too_long = VLLM_BLOCKS.search(text), VLLM_KV_GIB.search(text), VLLM_TOO_LONG.search(text)
        if gib:
            found["kv_gib"] = float(gib["gib"])
        if tokens:
            found["printed_tokens"] = _plain_int(tokens["tokens"])
        if concurrency:
            found["max_model_len"], found["printed_concurrency"] = (
                _plain_int(concurrency["len"]),
                float(concurrency["x"].replace(",", "")),
            )
        if blocks:
            found["blocks"] = _plain_int(blocks["blocks"])
        if too_long:
            found["max_model_len"], found["tokens"], found["fits"] = (
                int(too_long["len"]),
                int(too_long["tokens"]),
                False,
            )
        if not found:
            return
        last = self.vllm_rows[-1] if self.vllm_rows else None
        new = last is None or bool(set(found) & set(last)) or last["rank"] != line.rank
        if new:
            self.vllm_rows.append({"line": line, "rank": line.rank, **found})
        elif last is not None:
            last.update(found)

    def _vllm_speculation(self, line: Line, text: str) -> None:
        length = VLLM_SPEC.search(text)
        if not length:
            return
        found: dict[str, Any] = {"mean_acceptance_length": float(length["len"])}
        rates = re.search(r"Per-position acceptance rate: ((?:\d{1,3}(?:\.\d{1,9})?(?:, )?){1,64})", text)
        if rates:
            values = [float(value) for value in rates.group(1).strip(", ").split(", ") if value]
            found["num_spec_tokens"] = len(values)
            found["consistent"] = (
                abs(1 + sum(values) - found["mean_acceptance_length"]) <= 0.005 + 0.0005 * len(values) + 1e-9
            )
        accepted, drafted = (
            re.search(r"Accepted: (\d[\d,]{0,24}) tokens", text),
            re.search(r"Drafted: (\d[\d,]{0,24}) tokens", text),
        )
        printed = re.search(rf"Avg Draft acceptance rate: ({NUM})%", text)
        if accepted and drafted:
            found["accepted_tokens"], found["drafted_tokens"] = (
                _plain_int(accepted.group(1)),
                _plain_int(drafted.group(1)),
            )
        if printed:
            found["draft_acceptance"] = round(float(printed.group(1)) / 100, 6)
        elif accepted and drafted and found["drafted_tokens"]:
            found["draft_acceptance"] = found["accepted_tokens"] / found["drafted_tokens"]
        if len(self.vllm_spec) < MAX_FACTS:
            self.vllm_spec.append((line, found))

    # ---------------------------------------------------------------- the record
    def finish(self) -> ServerLog:
        """The record of everything that was fed."""
        while self._pending:
            self._whole(self._pending.pop()[0])
        last = parse_line(0, self.last_stamped).time if self.last_stamped else None
        engine, why = self._engine()
        weights = self._weights()
        unusable = {w.rank for w in weights if w.gib is not None and w.gib < 0}  # free memory moved meanwhile
        pools = self._pools()
        mamba = [_mamba_pool(line, groups) for line, groups in self.facts["mamba"]]
        plans = [
            PoolPlan(line_no=line.number, line=_short(line.quote), rank=line.rank, **found)
            for line, found in self.facts["plan"]
        ]
        totals = [
            PoolTotal(
                gib=gib,
                swa_tokens=swa,
                full_tokens=full,
                swa_full_ratio=round(swa / full, 4) if full else None,
                line_no=line.number,
                line=_short(line.quote),
                rank=line.rank,
            )
            for line, gib, swa, full in self.facts["total"]
        ]
        capacity = self._capacity()
        failure = self.failures.finish()
        version = self._version()
        kv = self._kv_summary(pools, totals, next((w.model_class for w in weights if w.model_class), None))
        ends = [gib for _, gib in self.facts["pool_end"] if gib is not None]
        speculation = self._speculation(version)
        slots = (
            capacity
            and mamba
            and capacity.max_running_requests
            and mamba[0].slots // capacity.max_running_requests
            or None
        )
        log = ServerLog(
            engine=engine,
            engine_why=why,
            foreign_program=self.foreign if engine == "foreign" else None,
            **version,
            lines=self.number,
            bytes=self.bytes,
            binary=self.binary > max(2, self.number // 1000),
            first_time=self.start_time or self.first_time,
            last_time=last,
            ranks=sorted(self.ranks, key=_rank_key),
            **self._sizes(),
            command=_told(self.command),
            asked_args=self.asked,
            server_args=_plain(self.args),
            server_args_told=_told(self.args_line, 300),
            server_args_complete=self.args_complete,
            model_class=next((w.model_class for w in weights if w.model_class), None),
            quantization=self._quantization(weights),
            quantization_told=_told(self.quant_line),
            backends=self._backends(),
            weights=weights,
            weights_gib_per_rank=_largest_rank([w for w in weights if w.rank not in unusable], lambda w: w.gib),
            slow_ranks=_slow_ranks(weights),
            kv_pools=pools,
            pool_totals=totals,
            pool_plans=plans,
            mamba_pools=mamba,
            kv=kv,
            avail_after_pools_gib_min=min(ends) if ends else None,
            avail_after_target_pools_gib=self._after_target(pools),
            avail_before_graphs_gib=self.before_graphs,
            last_avail_gib=self.last_avail,
            memory_of_parts_gib=_parts(weights, pools, mamba, self.facts["graph"], self.facts["left"]),
            **_static_budget(weights, self.args, failure),
            graphs=self.facts["graph"],
            graphs_enabled=self._graphs_enabled(),
            capacity=capacity,
            slots_per_request=slots,
            limited_by=_limited_by(capacity, mamba, self.args, "spec_max_running" in self.notices),
            ready=self._ready(),
            phase=self.phase,
            phases=self._phases(),
            batches=Batches(),
            speculation=speculation,
            retractions=self.retractions,
            retracted_requests=self.retracted,
            retraction_told=_told(self.retract_line),
            http_lines=self.http,
            vllm_capacity=self._vllm_capacities(),
            vllm_speculation=[
                VllmSpeculation(line_no=line.number, line=_short(line.quote), rank=line.rank, **found)
                for line, found in self.vllm_spec
            ],
            notices=self._notices(weights, ends),
            stopped=_told(self.stop),
            compiling=_told(self.compiling),
            launches=self._launches(failure),
            failure=failure,
            dropped_facts=self.dropped,
            cut_lines=self.cut_lines,
        )
        log = ServerLog.model_validate(_redacted(log.model_dump(), tuple(sorted(self.earlier_secrets)), False))
        return log.model_copy(update={"batches": self._batches()})

    def _engine(self) -> tuple[str, str]:
        if self.number == 0 or self.bytes <= self.number:
            return "empty", "no lines"
        sglang, vllm = self.marks["sglang"], self.marks["vllm"]
        if vllm > sglang:
            return "vllm", f"{vllm} lines of vLLM, e.g. with {self.mark_why['vllm']!r}"
        if sglang:
            return "sglang", f"{sglang} lines of SGLang, e.g. with {self.mark_why['sglang']!r}"
        if self.binary:
            return "foreign", "binary data, no log"
        return "foreign", f"no line of SGLang or vLLM among {self.number}"

    def _sizes(self) -> dict[str, Any]:
        sizes: dict[str, int | None] = {}
        for tag in ("TP", "PP", "DP", "EP"):
            name = f"{tag.lower()}_size"
            told = self.args.get(name)
            told = self.args.get("tensor_parallel_size", told) if tag == "TP" else told
            seen = [n for n in (rank_tag(rank, tag) for rank in self.ranks) if n is not None]
            # A tag is written for sizes above one only. The highest rank gives the size if it
            # completes a power of two, or if most of the ranks below it were seen.
            size = max(seen) + 1 if seen else 0
            whole = size > 1 and (size & (size - 1) == 0 or 2 * len(set(seen)) > size)
            sizes[name] = told if isinstance(told, int) else (size if whole else None)
        return sizes

    def _launches(self, failure: Failure | None) -> list[Launch]:
        if not self.launches:
            return []
        last = Launch(
            line_no=self.start_line,
            time=self.start_time,
            ready=self.ready is not None,
            failure_class=failure.failure_class if failure else None,
            root_cause=failure.root_cause if failure else None,
        )
        return [*self.launches, last]

    def _ready(self) -> Ready | None:
        if self.ready is None:
            return None
        first = Stamps(self.first_time, self.first_outer)
        start = Stamps(self.start_time, self.start_outer) if self.start_time else first
        return Ready(
            line_no=self.ready.number,
            line=_short(self.ready.quote),
            rank=self.ready.rank,
            time=self.ready.time,
            seconds_from_first_line=start.seconds_to(stamps_of(self.ready)),
        )

    def _phases(self) -> list[PhaseSeen]:
        rows = sorted(self.phase_lines.items(), key=lambda item: (item[1].number, PHASES.index(item[0])))
        times = [stamps_of(line) for _, line in rows]
        return [
            PhaseSeen(
                name=name,
                time=line.time,
                seconds=times[i].seconds_to(times[i + 1]) if i + 1 < len(rows) else None,
                line_no=line.number,
                line=_short(line.quote, 200),
                rank=line.rank,
            )
            for i, (name, line) in enumerate(rows)
        ]

    def _version(self) -> dict[str, Any]:
        engine, _ = self._engine()
        for text, line in self.versions:
            if engine in ("sglang", "vllm"):
                return {
                    "version": text,
                    "version_known_by": "line",
                    "version_at_least": text,
                    "version_at_most": text,
                    "version_evidence": [f"line {line.number}"],
                }
        if engine != "sglang":
            return {"version": None, "version_known_by": "not_known"}
        if self.args and len(self.args) > 100 and self.args_complete:
            found, evidence = "0.5.10", ["server_args has none of the names that came after 0.5.10"]
            for version, names in VERSION_MARKS:
                if all(name in self.args for name in names):
                    found, evidence = version, [f"server_args has {', '.join(names)}, which came with {version}"]
            following = [names for version, names in VERSION_MARKS if _version_key(version) > _version_key(found)]
            if following:
                evidence.append(f"and lacks {', '.join(following[0])}")
            return {
                "version": SAME_ARGUMENTS.get(found, found),
                "version_known_by": "server_args",
                "version_at_least": found,
                "version_at_most": None
                if found == "0.5.23"
                else f"{found}.post1"
                if found in ("0.5.10", "0.5.12", "0.5.13", "0.5.15")
                else found,
                "version_evidence": evidence,
            }
        low: str | None = None
        high: str | None = None
        evidence = []
        for needle, first, until in VERSION_LINES:
            if needle not in self.traits:
                continue
            if first and (low is None or _version_key(first) > _version_key(low)):
                low = first
                evidence.append(f"line {self.traits[needle].number}: {needle.strip()!r} came with {first}")
            if until and (high is None or _version_key(until) < _version_key(high)):
                high = until
                evidence.append(f"line {self.traits[needle].number}: {needle.strip()!r} went after {until}")
        if low and high and _version_key(low) > _version_key(high):
            return {
                "version": None,
                "version_known_by": "not_known",
                "version_evidence": [*evidence, "these contradict each other"],
            }
        return {
            "version": low if low and low == high else None,
            "version_known_by": "lines" if low or high else "not_known",
            "version_at_least": low,
            "version_at_most": high,
            "version_evidence": evidence,
        }

    def _weights(self) -> list[Weights]:
        rows: list[Weights] = []
        seen: Counter[str | None] = Counter()
        for line, pairs in self.facts["weights"]:
            model = pairs.get("type")
            drafts = bool(model and re.search(r"MTP|NextN|Nextn|Eagle|EAGLE|Draft|DFlash|Medusa", model))
            role = "draft" if drafts or (seen[line.rank] and _speculative(self.args, self.asked)) else "target"
            seen[line.rank] += 1
            rows.append(
                Weights(
                    role=role,
                    gib=_number(pairs.get("mem usage")),
                    avail_gib=_number(pairs.get("avail mem")),
                    seconds=_number(pairs.get("elapsed")),
                    model_class=model,
                    dtype=(pairs.get("dtype") or "").removeprefix("torch.") or None,
                    quant=pairs.get("quant"),
                    quant_algo=pairs.get("quant_algo"),
                    fmt=pairs.get("fmt"),
                    line_no=line.number,
                    line=_short(line.quote),
                    rank=line.rank,
                )
            )
        return rows

    def _quantization(self, weights: Sequence[Weights]) -> dict[str, str | None]:
        found: dict[str, str | None] = {}
        for row in weights:
            if row.role == "target":
                for name in ("quant", "quant_algo", "fmt", "dtype"):
                    value = getattr(row, name)
                    if value is not None:
                        found.setdefault(name, value)
        if "quantization" in self.args:
            asked = self.args["quantization"]
            found["asked"] = str(asked) if asked is not None else None
        return found

    def _pools(self) -> list[KvPool]:
        groups: dict[tuple[str | None, int], list[dict[str, Any]]] = {}
        by_rank: dict[str | None, list[dict[str, Any]]] = {}
        told_at_end = bool(self.capacity and self.capacity[1].get("max_total_num_tokens", "").isdigit())
        for entry in self.facts["kv"]:
            if entry["tokens"] or told_at_end:  # SGLang 0.4.2 and before print the sizes alone, and the tokens once at the end
                by_rank.setdefault(entry["line"].rank, []).append(entry)
        ends: dict[str | None, list[int]] = {}
        for line, _ in self.facts["pool_end"]:
            ends.setdefault(line.rank, []).append(line.number)
        totals: dict[str | None, list[int]] = {}
        for line, *_ in self.facts["total"]:
            totals.setdefault(line.rank, []).append(line.number)
        for rank, entries in by_rank.items():
            borders = ends.get(rank) or totals.get(rank) or []
            for entry in entries:
                index = sum(border < entry["line"].number for border in borders)
                groups.setdefault((rank, index), []).append(entry)
        first = {rank: min(index for r, index in groups if r == rank) for rank, _ in groups}
        rows: list[KvPool] = []
        for (rank, index), entries in groups.items():
            draft_group = index > first[rank]
            swa_lines = [n for n in totals.get(rank, []) if n > entries[-1]["line"].number]
            is_swa = len(entries) == 2 and bool(swa_lines) and all(e["label"] is None for e in entries)
            speculative = _speculative(self.args, self.asked) or len(self.facts["weights"]) > len(
                {line.rank for line, _ in self.facts["weights"]}
            )
            for position, entry in enumerate(entries):
                draft = draft_group or bool(entry.get("draft")) or (entry["label"] or "").lower().startswith("draft")
                draft = draft or (
                    not is_swa
                    and entry["label"] is None
                    and position > 0
                    and not ends.get(rank)
                    and speculative
                    and not entry["post"]
                )
                if entry["label"]:
                    label, known = entry["label"].lower(), "line"
                elif is_swa:
                    label, known = ("swa", "full")[position], "order"
                else:
                    label, known = "full", "default"
                rows.append(self._pool(entry, "draft" if draft else "target", label, known))
        return sorted(rows, key=lambda pool: pool.line_no)

    def _pool(self, entry: Mapping[str, Any], role: str, label: str, known: str) -> KvPool:
        line: Line = entry["line"]
        tokens = _plain_int(entry["tokens"] or self.capacity[1]["max_total_num_tokens"])  # type: ignore[index]
        k, v, kv = _number(entry["k"]), _number(entry["v"]), _number(entry["kv"])
        dtype, by = entry["dtype"], "line"
        if dtype is None:
            told = self.using_dtype.get(line.rank) or next(iter(self.using_dtype.values()), None)
            dtype, by = (told[0], "line") if told else (None, "not_known")
        low, high, likely = bytes_per_token(tokens, [size for size in (k, v, kv) if size is not None])
        total = kv if kv is not None else (round(k + v, 4) if k is not None and v is not None else None)
        return KvPool(
            role=role,
            label=label,
            label_known_by=known,
            dtype=dtype,
            dtype_known_by=by,
            tokens=tokens,
            k_gib=k,
            v_gib=v,
            kv_gib=total,
            bytes_per_token=likely,
            bytes_per_token_low=low,
            bytes_per_token_high=high,
            upper_bound=entry["state"] == "VA upper bound",
            line_no=line.number,
            line=_short(line.quote),
            rank=line.rank,
        )

    def _kv_summary(
        self, pools: Sequence[KvPool], totals: Sequence[PoolTotal], model_class: str | None
    ) -> KvSummary | None:
        real = [p for p in pools if not p.upper_bound] or list(pools)
        target = [p for p in real if p.role == "target"]
        if not target and not totals and not self.using_dtype:
            return None
        full = [p for p in target if p.label != "swa"] or target
        sized = [p for p in target if p.kv_gib is not None]
        sizes = {rank: sum(p.kv_gib or 0.0 for p in sized if p.rank == rank) for rank in {p.rank for p in sized}}
        drafts = {
            rank: sum(p.kv_gib or 0.0 for p in real if p.role == "draft" and p.rank == rank)
            for rank in {p.rank for p in real}
        }
        target_gib = max(sizes.values()) if sizes else (max(t.gib for t in totals) if totals else None)
        draft_gib = max(drafts.values()) if any(p.role == "draft" for p in real) else None
        dtypes = {p.dtype for p in target if p.dtype} or {dtype for dtype, _ in self.using_dtype.values()}
        dtype = sorted(dtypes)[0] if len(dtypes) == 1 else (" and ".join(sorted(dtypes)) or None)
        tokens = {p.tokens for p in full} or {t.full_tokens for t in totals if t.full_tokens}
        eight_bit = None if dtype is None else ("float8" in dtype and "kv_scale_loaded" not in self.notices)
        by_geometry = None if dtypes else self._dtype_by_geometry(model_class, full, totals)
        if by_geometry is not None:
            dtype = by_geometry[0]
        return KvSummary(
            dtype=dtype,
            dtype_known_by="line" if dtypes else "arithmetic" if by_geometry else "not_known",
            dtype_if_model_is=by_geometry[1] if by_geometry else [],
            tokens=min(tokens) if tokens else None,
            target_gib_per_rank=_rounded(target_gib),
            draft_gib_per_rank=_rounded(draft_gib),
            total_gib_per_rank=_rounded(target_gib + (draft_gib or 0.0)) if target_gib is not None else None,
            ranks_seen=len({p.rank for p in target}) or len({t.rank for t in totals}),
            ranks_differ=len(tokens) > 1,
            eight_bit_without_scales=eight_bit,
        )

    def _dtype_by_geometry(
        self, model_class: str | None, full: Sequence[KvPool], totals: Sequence[PoolTotal]
    ) -> tuple[str, list[str]] | None:
        """The KV dtype with which published checkpoints of the log's model class explain its pool sizes."""
        sizes = self._sizes()
        tp, pp, dp = (sizes[name] or 1 for name in ("tp_size", "pp_size", "dp_size"))
        ranks_unknown = sizes["tp_size"] is None and any(rank_tag(rank, "TP") is not None for rank in self.ranks)
        if model_class is None or pp > 1:
            return None
        heads_shared_by: int | None = max(1, tp // dp) if self.args.get("enable_dp_attention") else tp
        if ranks_unknown:
            heads_shared_by = None
        for total in totals:
            if total.full_tokens and total.swa_tokens:
                slack = max(0.005, 0.002 * total.gib)
                low, high = ((total.gib + sign * slack) * (1 << 30) for sign in (-1, 1))
                return dtype_by_geometry(
                    model_class, heads_shared_by, pools=(low, high, total.full_tokens, total.swa_tokens)
                )
        for pool in full:
            if pool.bytes_per_token_low and pool.bytes_per_token_high:
                bounds = (pool.bytes_per_token_low, pool.bytes_per_token_high)
                return dtype_by_geometry(model_class, heads_shared_by, per_token=bounds)
        return None

    def _capacity(self) -> Capacity | None:
        if self.capacity is None:
            return None
        line, pairs = self.capacity
        memory = next((key for key in pairs if re.fullmatch(r"available_\w+_mem", key)), None)
        whole = {
            name: _whole_number(pairs.get(name))
            for name in (
                "max_total_num_tokens",
                "chunked_prefill_size",
                "max_prefill_tokens",
                "max_running_requests",
                "context_len",
            )
        }
        return Capacity(
            line_no=line.number,
            line=_short(line.quote),
            rank=line.rank,
            available_mem_gib=_number(pairs.get(memory)) if memory else None,
            memory=memory.split("_")[1] if memory else None,
            **whole,
        )

    def _after_target(self, pools: Sequence[KvPool]) -> float | None:
        """Free memory after the target's pools, lowest rank: the first `Memory pool end` of each rank."""
        first: dict[str | None, float] = {}
        for line, gib in self.facts["pool_end"]:
            if gib is not None:
                first.setdefault(line.rank, gib)
        told = [gib for _, count, gib in self.facts["left"] if not count]
        return min(first.values()) if first and pools else (told[-1] if told else None)

    def _graphs_enabled(self) -> bool | None:
        graphs: list[Graph] = self.facts["graph"]
        decode = [g for g in graphs if g.name not in ("prefill",) and "prefill" not in g.name]
        if any(g.state == "captured" for g in decode):
            return True
        if any(g.state == "disabled" for g in decode):
            return False
        spread = [
            values.get("graph") for _, _, values, kind in self.series.rows if kind == "decode" and "graph" in values
        ]
        return any(spread) if spread else None

    def _backends(self) -> list[Backend]:
        rows: dict[str, Backend] = {}
        for kind in BACKEND_ARGS:
            resolved = self.args.get(kind)
            asked = self.asked.get(kind)
            if resolved is None and asked is None:
                continue
            line = self.args_line if resolved is not None else self.command
            taken = str(resolved) if resolved is not None and resolved != "auto" else None
            asked_text = str(asked) if asked is not None else None
            rows[kind] = Backend(
                kind=kind,
                asked=asked_text,
                taken=taken,
                known_by="server_args" if taken else "not_known",
                changed=asked_text != taken if asked_text and taken else None,
                line_no=line.number if line else 0,
                line=_short(line.quote, 160) if line else "",
                rank=None,
            )
        for line, kind, said, taken in self.facts["backend"]:
            before = rows.get(kind)
            command_asked = self.asked.get(kind)
            asked = str(command_asked) if command_asked is not None else (said or (before.asked if before else None))
            if said == "" and command_asked is None:
                asked = None
            if before is not None and before.known_by == "line" and said in (None, ""):
                continue
            changed = (asked != taken and asked != "auto") if asked and taken else None
            rows[kind] = Backend(
                kind=kind,
                asked=asked,
                taken=taken,
                known_by="line",
                changed=changed,
                line_no=line.number,
                line=_short(line.quote),
                rank=line.rank,
            )
        moe = rows.get("moe_runner_backend")
        if self.moe_trace is not None and (moe is None or moe.known_by != "line"):
            asked = moe.asked if moe and moe.asked else (moe.taken if moe else None)
            rows["moe_runner_backend"] = Backend(
                kind="moe_runner_backend",
                asked=asked,
                taken="triton",
                known_by="trace",
                changed=(asked not in ("triton", "auto")) if asked else None,
                line_no=self.moe_trace.number,
                line=_short(self.moe_trace.quote),
                rank=self.moe_trace.rank,
            )
        return list(rows.values())

    def _notices(self, weights: Sequence[Weights], ends: Sequence[float]) -> list[Notice]:
        rows = [
            Notice(
                id=ident,
                level=seen["level"],
                text=seen["text"],
                count=seen["count"],
                ranks=sorted(seen["ranks"], key=_rank_key),
                line_no=seen["line"].number,
                line=_short(seen["line"].quote),
                rank=seen["line"].rank,
            )
            for ident, seen in self.notices.items()
        ]
        if self.retract_line is not None:
            line = self.retract_line
            rows.append(
                Notice(
                    id="retraction",
                    level="medium",
                    count=self.retractions,
                    line_no=line.number,
                    line=_short(line.quote),
                    rank=line.rank,
                    text=f"the KV pool was full {self.retractions} times; {self.retracted} requests were put back "
                    f"and computed again",
                )
            )
        for backend in self._backends():
            if backend.changed and backend.known_by == "trace":
                rows.append(
                    Notice(
                        id="backend_ignored",
                        level="high",
                        line_no=backend.line_no,
                        line=backend.line,
                        rank=backend.rank,
                        text=f"{backend.kind} {backend.asked} was asked for; the log shows {backend.taken}'s work "
                        f"and no message says so",
                    )
                )
            elif backend.changed:
                rows.append(
                    Notice(
                        id="backend_changed",
                        level="medium",
                        line_no=backend.line_no,
                        line=backend.line,
                        rank=backend.rank,
                        text=f"{backend.kind} {backend.asked} was asked for; {backend.taken} is used",
                    )
                )
        slow = _slow_ranks(weights)
        if slow:
            row = next(w for w in weights if w.rank == slow[0])
            rows.append(
                Notice(
                    id="slow_ranks",
                    level="low",
                    ranks=slow,
                    line_no=row.line_no,
                    line=row.line,
                    rank=row.rank,
                    text="these ranks loaded their weights much later than the fastest",
                )
            )
        order = {level: index for index, level in enumerate(LEVELS)}
        return sorted(rows, key=lambda row: (-order[row.level], row.line_no))

    def _batches(self) -> Batches:
        rows: list[Batch] = []
        for number, raw, values, kind in self.series.rows:
            line = parse_line(number, without_colours(raw or b""))
            rows.append(Batch(line_no=number, time=line.time, rank=line.rank, kind=kind, **values))
        spreads = {
            kind: {
                name: Spread(n=int(s[0]), low=s[1], high=s[2], mean=round(s[3] / s[0], 6), last=s[4])
                for name, s in names.items()
            }
            for kind, names in self.spreads.items()
        }
        queues = [names["queue"].high for names in spreads.values() if "queue" in names]
        usages = [
            names[key].high
            for names in spreads.values()
            for key in ("usage", "full_usage", "swa_usage", "mamba_usage")
            if key in names
        ]
        return Batches(
            decode_lines=self.counts["decode"],
            prefill_lines=self.counts["prefill"],
            engine_lines=self.counts["engine"],
            every=self.series.every,
            series=rows,
            spreads=spreads,
            max_queue=int(max(queues)) if queues else None,
            max_usage=max(usages) if usages else None,
        )

    def _speculation(self, version: Mapping[str, Any]) -> Speculation | None:
        if self.accept_last is None:
            return None
        number, raw, length, rate = self.accept_last
        definition, steps, draft_tokens, by = accept_rate_definition(
            list(self.accepts),
            self.args.get("speculative_num_steps"),
            self.args.get("speculative_num_draft_tokens"),
            version.get("version_at_least"),
            version.get("version_at_most"),
        )
        drafts = round(length - 1, 6)
        if definition == "drafts":
            acceptance: float | None = rate
        elif steps:
            acceptance = drafts / steps
        else:
            acceptance = None
        any_accepted = length > 1.0 or any(pair[0] > 1.0 for pair in self.accepts)
        line = parse_line(number, raw)
        return Speculation(
            active=any_accepted,
            lines=sum(self.accepts.values()) or self.counts["decode"],
            last_accept_len=length,
            last_accept_rate=rate,
            rate_definition=definition,
            num_steps=steps,
            num_draft_tokens=draft_tokens,
            known_by=by,
            drafts_accepted_per_step=max(drafts, 0.0),
            draft_acceptance=_rounded(max(acceptance, 0.0)) if acceptance is not None else None,
            throughput_affected=acceptance < 0.25 if acceptance is not None else None,
            rows=[{"len": a, "rate": b} for a, b in list(self.accepts)[:50]],
            line_no=number,
            line=_short(line.quote),
            rank=line.rank,
        )

    def _vllm_capacities(self) -> list[VllmCapacity]:
        rows = []
        sizes = [
            row["tokens"] // row["blocks"]
            for row in self.vllm_rows
            if row.get("tokens") and row.get("blocks") and row["tokens"] % row["blocks"] == 0
        ]
        told = self.args.get("block_size")
        size = sizes[0] if sizes else (told if isinstance(told, int) else 16)
        for row in self.vllm_rows:
            found = {key: value for key, value in row.items() if key not in ("line", "rank")}
            length = found.get("max_model_len")
            if found.get("blocks"):
                found["block_size"] = size
                found.setdefault("tokens", found["blocks"] * size)
            if length and found.get("tokens") is not None:
                found.setdefault("fits", found["tokens"] >= length)
            if length and found.get("printed_concurrency"):
                found["real_token_capacity"] = int(found["printed_concurrency"] * length + 1e-6)
                printed = found.get("printed_tokens") or found.get("tokens")
                if printed:
                    found["consistent"] = (
                        abs(printed / length - found["printed_concurrency"])
                        <= 0.02 * found["printed_concurrency"] + 0.01
                    )
            line: Line = row["line"]
            rows.append(VllmCapacity(line_no=line.number, line=_short(line.quote), rank=line.rank, **found))
        return rows


_JOINABLE = re.compile(
    r"^(?:Mamba Cache is allocated|Load weight end|Capture |Engine startup timings|(?:[\w ]+ )?KV Cache is allocated|"
    r"max_total_num_tokens=)"
)


# ------------------------------------------------------------------------------------------------ pure helpers


def bytes_per_token(tokens: int, sizes_gib: Sequence[float]) -> tuple[float | None, float | None, int | None]:
    """Bytes per token of a pool from its printed sizes: lowest, highest, and the roundest value between them.

    A printed size is rounded to 0.01 GiB, so it allows a range. A real value is layers x heads x head_dim x
    element size,
    a multiple of a large power of two; of the values in each part's range the one with the largest such factor is
    taken,
    unless the range is wider than 1% (then None: a pool that prints 0.00 GB says nothing).

    Args:
        tokens: tokens of the pool.
        sizes_gib: the printed parts (K and V, or one) in GiB.

    Example: `bytes_per_token(21456, [1.64, 1.64])` is about (163157, 164644, 163840): 2 x 40 x 8 x 128 x 2 bytes.
    """
    if tokens <= 0 or not sizes_gib or any(size <= 0 for size in sizes_gib):
        return None, None, None
    low = high = 0.0
    total: int | None = 0
    for size in sizes_gib:
        # Buffers hold one page (up to 64 tokens) more than the tokens that are counted.
        a, b = (size - 0.005) * GIB / (tokens + 64), (size + 0.005) * GIB / tokens
        low, high = low + a, high + b
        part = _roundest(a, b) if b - a <= 0.01 * b else None
        total = total + part if total is not None and part is not None else None
    return round(max(low, 0.0), 2), round(high, 2), total


def _roundest(low: float, high: float) -> int | None:
    """The integer in [low, high] with the largest power of two as a factor."""
    for exponent in range(40, -1, -1):
        step = 1 << exponent
        value = math.floor(high / step) * step
        if value >= low and value > 0:
            return value
    return None


def kv_dtype_by_arithmetic(pool: KvPool, elements_per_token: int) -> str | None:
    """The element size class of a pool from the model's elements per token and rank: '16-bit', '8-bit', '4-bit' or
    None.

    Args:
        pool: a pool whose line does not name the dtype.
        elements_per_token: layers x 2 x KV heads on this rank x head_dim (K and V together).

    Example: K 3.49 GiB + V 3.49 GiB over 228,520 tokens with 16 x 2 x 4 x 256 elements is '8-bit'.
    """
    if pool.bytes_per_token_low is None or pool.bytes_per_token_high is None or elements_per_token <= 0:
        return None
    sizes = (("16-bit", 2.0), ("8-bit", 1.0), ("4-bit", 0.5625))
    low, high = pool.bytes_per_token_low, pool.bytes_per_token_high
    fits = [name for name, size in sizes if low <= elements_per_token * size <= high]
    return fits[0] if len(fits) == 1 else None


def accept_rate_definition(
    pairs: Sequence[tuple[float, float]],
    num_steps: Any = None,
    num_draft_tokens: Any = None,
    version_low: str | None = None,
    version_high: str | None = None,
) -> tuple[str, int | None, int | None, str]:
    """Which of SGLang's two accept rates a log prints, with the number of draft steps that follows from it.

    Until 0.5.10 the rate is accept_len / num_draft_tokens, since 0.5.11 it is (accept_len - 1) / num_steps. Both
    numbers are
    printed with two decimals; the whole number that fits all pairs under exactly one definition decides.

    Returns:
        (definition, num_steps, num_draft_tokens, known_by): "drafts" (new), "tokens" (old), "ambiguous" or "not_known".

    Example: `accept_rate_definition([(1.0, 0.11)])` is ("tokens", 8, 9, "arithmetic"); `[(2.73, 0.43), (4.62, 0.91)]`
    gives ("drafts", 4, 5, "arithmetic").
    """
    useful = [(length, rate) for length, rate in pairs if length >= 1.0 and rate >= 0.0][:2000]
    new = (
        [s for s in range(1, 65) if all(_within((a - 1) / s, b, 0.005 / s) for a, b in useful)]
        if any(a > 1.0 for a, _ in useful)
        else []
    )
    old = [d for d in range(2, 65) if all(_within(a / d, b, 0.005 / d) for a, b in useful)] if useful else []
    told_steps = num_steps if isinstance(num_steps, int) and num_steps > 0 else None
    told_tokens = num_draft_tokens if isinstance(num_draft_tokens, int) and num_draft_tokens > 1 else None
    if version_low and _version_key(version_low) >= _version_key("0.5.11"):
        old = []
    if version_high and _version_key(version_high) < _version_key("0.5.11"):
        new = []
    if told_tokens or told_steps:
        drafts = told_tokens - 1 if told_tokens else told_steps
        tokens = told_tokens or (told_steps or 0) + 1
        new_fits, old_fits = drafts in new, tokens in old
        if new_fits != old_fits:
            return ("drafts" if new_fits else "tokens"), drafts, tokens, "server_args"
        if version_low and _version_key(version_low) >= _version_key("0.5.11"):
            return "drafts", drafts, tokens, "version"
        return "ambiguous" if new_fits else "not_known", drafts, tokens, "server_args"
    if len(new) == 1 and not old:
        return "drafts", new[0], new[0] + 1, "arithmetic"
    if len(old) == 1 and not new:
        return "tokens", old[0] - 1, old[0], "arithmetic"
    if new and not old:
        return "drafts", None, None, "arithmetic"
    if old and not new:
        return "tokens", None, None, "arithmetic"
    return ("ambiguous" if new and old else "not_known"), None, None, "not_known"


def _within(exact: float, printed: float, slack: float) -> bool:
    return abs(exact - printed) <= 0.005 + slack + 1e-9


def parse_server_args(text: str) -> tuple[dict[str, Any], bool]:
    """The resolved arguments of a `server_args=` line and whether the line holds all of them.

    Both forms are read: `ServerArgs(a='x', ...)` (until 0.5.18) and `{'a': 'x', ...}` (from 0.5.19; vLLM's too). A
    cut line
    gives the arguments that are whole. Nested objects become dictionaries, unknown objects text.
    """
    text = text.strip()
    head = re.match(r"(?:[A-Za-z_]\w*)?\(|\{", text)
    if not head:
        return {}, False
    dictionary = head.group(0) == "{"
    fields, closed = _split_top(text[head.end() :])
    args: dict[str, Any] = {}
    for index, field in enumerate(fields):
        if index == len(fields) - 1 and not closed:
            break
        if dictionary:
            match = re.match(r"\s*['\"]([\w.-]{1,120})['\"]\s*:\s*(.*)", field, re.DOTALL)
        else:
            match = re.match(r"\s*([A-Za-z_]\w{0,119})\s*=\s*(.*)", field, re.DOTALL)
        if match:
            args[match.group(1)] = _value(match.group(2).strip(), 0)
    return args, closed


def _split_top(text: str) -> tuple[list[str], bool]:
    """Split at commas that stand outside quotes and brackets, up to the closing bracket."""
    fields: list[str] = []
    depth, start, i, size = 0, 0, 0, len(text)
    while i < size:
        char = text[i]
        if char in "'\"":
            i += 1
            while i < size and text[i] != char:
                i += 2 if text[i] == "\\" else 1
        elif char in "([{<":
            depth += 1
        elif char in ")]}>":
            if depth == 0:
                if char == ">":
                    i += 1
                    continue
                if text[start:i].strip():
                    fields.append(text[start:i])
                return fields, True
            depth -= 1
        elif char == "," and depth == 0:
            fields.append(text[start:i])
            start = i + 1
        i += 1
    fields.append(text[start:])
    return fields, False


def _value(text: str, depth: int) -> Any:
    if len(text) < 20000:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            pass
    if depth < 6 and re.match(r"[A-Za-z_][\w.]*\(", text):
        inner, closed = parse_server_args(text)
        if closed and inner:
            return inner
    return text


def _read_command(text: str) -> dict[str, str | bool]:
    """The arguments of a command line, by SGLang's argument names; positional words are left out."""
    asked: dict[str, str | bool] = {}
    name: str | None = None
    for word in text.split()[:400]:
        if word.startswith("--") and len(word) > 2:
            flag, _, value = word[2:].partition("=")
            name = flag.replace("-", "_")
            name = ARG_ALIASES.get(name, name)
            asked[name] = value.strip("'\"") if value else True
            if value:
                name = None
        elif re.match(r"[A-Za-z_]\w*=", word):
            name = None  # an environment that a harness appends
        elif name is not None and not word.startswith("-"):
            before = asked[name]
            asked[name] = word.strip("'\"") if before is True else f"{before} {word}"
    return asked


def _speculative(args: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    return bool(args.get("speculative_algorithm") or asked.get("speculative_algorithm"))


def _mamba_pool(line: Line, groups: Mapping[str, str | None]) -> MambaPool:
    conv, ssm = float(groups["conv"] or 0), float(groups["ssm"] or 0)
    issm, iconv = _number(groups["issm"]), _number(groups["iconv"])
    drafts: int | None = None
    if issm and ssm:
        ratio = issm / ssm
        slack = ratio * (0.005 / issm + 0.005 / ssm) + 0.02 * ratio
        drafts = round(ratio) if round(ratio) >= 1 and abs(ratio - round(ratio)) <= slack and slack < 0.5 else None
    return MambaPool(
        slots=int(groups["slots"] or 0),
        conv_gib=conv,
        ssm_gib=ssm,
        intermediate_ssm_gib=issm,
        intermediate_conv_gib=iconv,
        total_gib=round(conv + ssm + (issm or 0.0) + (iconv or 0.0), 4),
        draft_tokens=drafts,
        line_no=line.number,
        line=_short(line.quote),
        rank=line.rank,
    )


def _largest_rank(rows: Sequence[Any], size: Callable[[Any], float | None]) -> float | None:
    """The largest sum over one rank's rows (target and draft), never over ranks."""
    sums: dict[str | None, float] = {}
    for row in rows:
        value = size(row)
        if value is not None:
            sums[row.rank] = sums.get(row.rank, 0.0) + value
    return _rounded(max(sums.values())) if sums else None


def _parts(
    weights: Sequence[Weights],
    pools: Sequence[KvPool],
    mamba: Sequence[MambaPool],
    graphs: Sequence[Graph],
    left: Sequence[Any],
) -> dict[str, float]:
    parts: dict[str, float | None] = {
        "weights": _largest_rank(weights, lambda w: w.gib),
        "kv_target": _largest_rank([p for p in pools if p.role == "target" and not p.upper_bound], lambda p: p.kv_gib),
        "kv_draft": _largest_rank([p for p in pools if p.role == "draft" and not p.upper_bound], lambda p: p.kv_gib),
        "mamba_conv": _largest_rank(mamba, lambda m: m.conv_gib),
        "mamba_ssm": _largest_rank(mamba, lambda m: m.ssm_gib),
        "mamba_intermediate_ssm": _largest_rank(mamba, lambda m: m.intermediate_ssm_gib),
        "mamba_intermediate_conv": _largest_rank(mamba, lambda m: m.intermediate_conv_gib),
        "graphs": _largest_rank([g for g in graphs if g.state == "captured"], lambda g: g.gib),
    }
    drafts = [(count, gib) for _, count, gib in left if count]
    targets = [gib for _, count, gib in left if not count]
    if drafts and targets:
        parts["each_draft_pool"] = round((targets[-1] - drafts[-1][1]) / drafts[-1][0], 4)
    return {name: value for name, value in parts.items() if value is not None}


#: Fields that quote the log. A key that the log names (api_key='...') is removed from them wherever it stands; other
#: fields hold our own words and numbers, which a short key such as 'test' must not destroy.
_QUOTING = frozenset(
    ("line", "text", "root_cause", "where", "reason", "server_args", "asked_args", "what_to_do", "values")
)


def _redacted(value: Any, secrets: tuple[str, ...], quoting: bool) -> Any:
    if isinstance(value, str):
        return redact_text(value, secrets if quoting else ())
    if isinstance(value, dict):
        return {
            key: redact_object({key: item})[key]
            if isinstance(key, str) and is_secret_name(key)
            else _redacted(item, secrets, quoting or key in _QUOTING)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_redacted(item, secrets, quoting) for item in value]
    return value


def _static_budget(weights: Sequence[Weights], args: Mapping[str, Any], failure: Failure | None) -> dict[str, Any]:
    rows = [w for w in weights if w.gib is not None and w.avail_gib is not None and w.gib > 0]
    if not rows:
        return {"static_budget_gib": None, "mem_fraction_floor": None}
    ranks = {w.rank for w in rows}
    used = {rank: sum(w.gib or 0.0 for w in rows if w.rank == rank) for rank in ranks}
    free = {rank: min(w.avail_gib or 0.0 for w in rows if w.rank == rank) for rank in ranks}
    worst = max(ranks, key=lambda rank: used[rank] / (used[rank] + free[rank]))
    total = used[worst] + free[worst]
    fraction = args.get("mem_fraction_static")
    if not isinstance(fraction, float) and failure is not None:
        fraction = failure.values.get("mem_fraction_static")
    return {
        "static_budget_gib": _rounded(fraction * total) if isinstance(fraction, float) else None,
        "mem_fraction_floor": math.ceil(used[worst] / total * 1e4) / 1e4,
    }


def _limited_by(
    capacity: Capacity | None, mamba: Sequence[MambaPool], args: Mapping[str, Any], by_speculation: bool
) -> str | None:
    """What bounds the number of running requests, where the log says enough."""
    if capacity is None or not capacity.max_running_requests:
        return None
    running = capacity.max_running_requests
    told = args.get("max_running_requests")
    if by_speculation and told == running:
        return f"speculative decoding's own default of {running} (set --max-running-requests)"
    if isinstance(told, int) and told == running:
        return f"the argument max_running_requests={told}"
    if mamba:
        slots = mamba[0].slots
        per = slots // running if running else 0
        if per >= 1 and slots // per == running:
            return f"the recurrent-state pool ({slots} slots // {per} per request = {running})"
    return None


def _slow_ranks(weights: Sequence[Weights]) -> list[str]:
    """Ranks whose weights took more than 1.5 times the fastest rank's time and 30 s longer."""
    rows = [w for w in weights if w.seconds is not None and w.rank]
    if len({w.rank for w in rows}) < 2:
        return []
    fastest = min(w.seconds or 0.0 for w in rows)
    slow = {w.rank for w in rows if w.rank and (w.seconds or 0.0) > 1.5 * fastest and (w.seconds or 0.0) - fastest > 30}
    return sorted(slow, key=_rank_key)


def _rank_key(rank: str) -> tuple[tuple[str, int], ...]:
    return tuple(
        (part.rstrip("0123456789"), int(part.lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz") or 0))
        if part[-1:].isdigit() and part.lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz").isdigit()
        else (part, 0)
        for part in rank.split()
    )


def _version_key(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text)[:5])


def _told(line: Line | None, limit: int = 600) -> Told | None:
    if line is None:
        return None
    return Told(
        line_no=line.number,
        line=_short(line.quote, limit),
        rank=line.rank,
        text=_short(line.text, limit),
        time=line.time,
    )


def _plain(value: Any) -> Any:
    """Values that JSON can hold: no infinities, bytes, sets or tuples."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value)


def _gib_after(text: str, key: str) -> float | None:
    at = text.rfind(key)
    if at < 0:
        return None
    match = re.match(rf"({NUM}) ?GB", text[at + len(key) :])
    return float(match.group(1)) if match else None


def _number(text: Any) -> float | None:
    if not text:
        return None
    match = re.match(NUM, str(text))
    return float(match.group(0)) if match and len(match.group(0)) < 30 else None


def _whole_number(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"-?\d{1,18}", text) else None


def _plain_word(text: str) -> str | int | None:
    text = text.strip("'\"")
    if text == "None":
        return None
    return int(text) if re.fullmatch(r"\d{1,18}", text) else text


def _plain_int(text: str) -> int:
    digits = text.replace(",", "")
    return int(digits) if len(digits) <= 18 else 0


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _short(text: str, limit: int = 600) -> str:
    return text if len(text) <= limit else text[: limit - 20] + " ... (cut)"
