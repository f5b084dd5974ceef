"""`workbook inspect log FILE`: what a server's log says, as text for a reader or as one JSON object."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from lib.cli._input import require_standard_input
from lib.errors import UnreadableFile
from lib.server.failures import classify
from lib.server.lines import lines_of
from lib.server.log import ServerLog, read_log
from lib.server.log_tables import LEVELS

#: Progress goes to stderr once for this many bytes.
_PROGRESS_BYTES = 1 << 28
_HEAD_BYTES = 1 << 16
#: A larger single JSON object is no answer of a server.
_JSON_BYTES = 1 << 24
#: How a compressed file begins, what it is, and what reads it.
_PACKED: tuple[tuple[bytes, str, str], ...] = (
    (b"\x1f\x8b", "gzip", "zcat"),
    (b"\x28\xb5\x2f\xfd", "zstd", "zstdcat"),
    (b"\xfd7zXZ\x00", "xz", "xzcat"),
    (b"BZh", "bzip2", "bzcat"),
)
_MAIN_BACKENDS = ("attention_backend", "moe_runner_backend", "fp4_gemm_runner_backend", "sampling_backend")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `log` to the subcommands of `workbook inspect`."""
    parser = subparsers.add_parser(
        "log",
        help="what a server's log says: what runs, how much fits, why it died",
        description="Read a log of SGLang (or vLLM): version, arguments, backends, KV cache, capacity, batches, "
        "failure.",
    )
    parser.add_argument("file", metavar="FILE", help="the log; - for standard input")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output (docs/inspect-log.md)")
    parser.add_argument(
        "--exit-code", type=int, default=None, metavar="N", help="how the process ended, if it is known"
    )
    parser.add_argument(
        "--fail-on",
        choices=LEVELS,
        default=None,
        metavar="LEVEL",
        help=f"exit 1 if a notice or failure has at least this level: {', '.join(LEVELS)} (a failure is critical)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 read, 1 a finding at or above --fail-on, 2 cannot be read (raised as UnreadableFile)."""
    log = _read(args.file)
    if log.engine == "empty":
        raise UnreadableFile(
            "a log of SGLang or vLLM", f"{args.file} is empty", "check where the server writes its output"
        )
    if log.engine == "foreign":
        found = f"{args.file}: {log.engine_why}" + (
            f"; it looks like {log.foreign_program}" if log.foreign_program else ""
        )
        raise UnreadableFile("a log of SGLang or vLLM", found, "give the server's standard output and error")
    failure = classify(log, exit_code=args.exit_code)
    log = log.model_copy(update={"failure": failure})
    print(log.model_dump_json(indent=1) if args.json else "\n".join(report(log)))
    if args.fail_on is None:
        return 0
    limit = LEVELS.index(args.fail_on)
    worst = max([LEVELS.index(notice.level) for notice in log.notices], default=-1)
    return int(worst >= limit or (failure is not None and LEVELS.index("critical") >= limit))


def _read(name: str) -> ServerLog:
    if name == "-":
        require_standard_input("a log of SGLang or vLLM")
        return _read_handle(sys.stdin.buffer, "standard input")
    path = Path(name)
    if path.is_dir():
        raise UnreadableFile("a log file", f"{name} is a directory", "name the file in it")
    try:
        with path.open("rb") as handle:
            return _read_handle(handle, name)
    except OSError as error:
        raise UnreadableFile(
            "a log file that can be read", f"{name}: {error.strerror or error}", "check the path"
        ) from error


def _read_handle(handle: IO[bytes], name: str) -> ServerLog:
    """Read a log after a look at its first bytes: what is packed, UTF-16 or one JSON object is named, not read."""
    head = handle.read(_HEAD_BYTES)
    file = "FILE" if name == "standard input" else name
    for magic, form, tool in _PACKED:
        if head.startswith(magic):
            raise UnreadableFile(
                "a log as text", f"{name} is compressed ({form})", f"{tool} {file} | workbook inspect log -"
            )
    code = _utf_16(head)
    if code:
        raise UnreadableFile(
            "a log in UTF-8", f"{name} is {code}", f"iconv -f {code} -t UTF-8 {file} | workbook inspect log -"
        )
    if head.lstrip()[:1] == b"{":
        head += handle.read(_JSON_BYTES)
        if len(head) < _JSON_BYTES and _is_one_object(head):
            raise UnreadableFile(
                "a log, which has lines",
                f"{name} is one JSON object",
                f"if it is the answer of GET /server_info: workbook audit --server-info {file}",
            )
    read = _with_progress(handle)
    begun = [head]
    return read_log(lines_of(lambda size: begun.pop() if begun else read(size)))


def _utf_16(head: bytes) -> str | None:
    """UTF-16 by its byte order mark, or by every second byte being zero as in English text."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16"
    sample = head[:4096]
    if len(sample) >= 16:
        for name, zeros in (("UTF-16LE", sample[1::2]), ("UTF-16BE", sample[::2])):
            if zeros.count(0) > 0.9 * len(zeros) and sample.count(0) < 0.6 * len(sample):
                return name
    return None


def _is_one_object(data: bytes) -> bool:
    """Whether the text is exactly one JSON object; a log in JSON lines has more than one."""
    try:
        return isinstance(json.loads(data), dict)
    except (ValueError, RecursionError):
        return False


def _with_progress(handle: IO[bytes]) -> Callable[[int], bytes]:
    total = 0
    shown = 0

    def read(size: int) -> bytes:
        nonlocal total, shown
        block = handle.read(size)
        total += len(block)
        if total - shown >= _PROGRESS_BYTES:
            shown = total
            print(f"read {total / (1 << 30):.2f} GiB", file=sys.stderr)
        return block

    return read


def report(log: ServerLog) -> list[str]:
    """The record for a reader: one line for one thing, with the line number it comes from."""
    return list(_report(log))


def _report(log: ServerLog) -> Iterator[str]:
    version = log.version or _bounds(log) or "version not known"
    yield f"{log.engine} {version} (known by: {log.version_known_by or 'not_known'}), {log.lines} lines"
    if log.launches:
        yield f"{len(log.launches)} launches; this is the last one, from line {log.launches[-1].line_no}"
    if log.ready:
        after = log.ready.seconds_from_first_line
        took = f" {after:g} s after the first line" if after is not None else ""
        yield f"ready{took}{_at(log.ready)}"
    else:
        died = log.failure is not None and log.failure.phase is not None  # then the failure's line names the phase
        yield "not ready: no line says so" + ("" if died else f"; last phase: {log.phase or 'none seen'}")
    if log.failure:
        yield from _failure_lines(log)
    if log.model_class:
        sizes = ", ".join(f"{n.upper()} {v}" for n in ("tp", "pp", "dp", "ep") if (v := getattr(log, f"{n}_size")))
        yield f"model: {log.model_class}{f' ({sizes})' if sizes else ''}"
    quantization = ", ".join(f"{key} {value}" for key, value in log.quantization.items() if value)
    if quantization:
        yield f"quantization: {quantization}"
    if log.weights_gib_per_rank is not None:
        yield f"weights: {log.weights_gib_per_rank:g} GiB per rank{_at(log.weights[0])}"
    for row in [row for row in log.weights if row.gib is not None and row.gib < 0][:1]:
        yield f"weights: {row.gib:g} GiB is not usable: another process changed free memory{_at(row)}"
    for backend in log.backends:
        main = backend.taken is not None and backend.kind in _MAIN_BACKENDS
        if backend.changed or main or backend.known_by in ("line", "trace"):
            asked = f" (asked: {backend.asked})" if backend.asked else ""
            yield f"{backend.kind}: {backend.taken}{asked}, known by {backend.known_by}{_at(backend)}"
    yield from _memory_lines(log)
    yield from _batch_lines(log)
    for notice in log.notices:
        times = f" x{notice.count}" if notice.count > 1 else ""
        yield f"{notice.level}: {notice.id}{times}: {notice.text}{_at(notice)}"


def _failure_lines(log: ServerLog) -> Iterator[str]:
    failure = log.failure
    if failure is None:
        return
    known = "" if failure.cause_known else " (the cause is not in this log)"
    yield f"FAILED: {failure.failure_class} in phase {failure.phase or 'not known'}{known}: {failure.root_cause}"
    if failure.line:
        yield f"  line {failure.line_no}{f', {failure.rank}' if failure.rank else ''}: {failure.line[:300]}"
    if failure.where:
        yield f"  at {failure.where}"
    yield f"  do: {failure.what_to_do}"
    if failure.do_not:
        yield f"  do not: {failure.do_not}"
    if failure.unsupported_here:
        yield "  not supported on this machine: a device, kernel or package is missing"
    for symptom in failure.symptoms[:4]:
        yield f"  follows from it, line {symptom.line_no}: {symptom.line[:160]}"
    for need in failure.needs:
        yield f"  would settle it: {need}"


def _memory_lines(log: ServerLog) -> Iterator[str]:
    if log.kv:
        sizes = (
            f"{log.kv.total_gib_per_rank:g} GiB per rank" if log.kv.total_gib_per_rank is not None else "size not said"
        )
        tokens = f"{log.kv.tokens} tokens, " if log.kv.tokens is not None else ""
        how = log.kv.dtype_known_by
        if log.kv.dtype_if_model_is:
            how += f", if the model is {' or '.join(log.kv.dtype_if_model_is[:4])}"
        yield f"KV cache: {log.kv.dtype or 'dtype not said'} (known by: {how}), {tokens}{sizes}"
    shown = [pool for pool in log.kv_pools if pool.rank == log.kv_pools[0].rank]
    for pool in shown[:8]:
        parts = (
            f"K {pool.k_gib:g} + V {pool.v_gib:g} GiB"
            if pool.k_gib is not None and pool.v_gib is not None
            else f"{pool.kv_gib} GiB"
        )
        per_token = f", {pool.bytes_per_token} B per token" if pool.bytes_per_token else ""
        yield f"  {pool.role} {pool.label}: {pool.tokens} tokens, {parts}{per_token}{_at(pool)}"
    for total in log.pool_totals[:1]:
        tokens = f"swa {total.swa_tokens}, full {total.full_tokens} tokens"
        yield f"  all pools of one rank: {total.gib:g} GiB, {tokens}{_at(total)}"
    for mamba in log.mamba_pools[:1]:
        yield f"recurrent state: {mamba.slots} slots, {mamba.total_gib:g} GiB per rank{_at(mamba)}"
    if log.capacity:
        held = log.capacity
        yield (
            f"capacity: {held.max_total_num_tokens} tokens, {held.max_running_requests} running requests, "
            f"context {held.context_len}, chunk {held.chunked_prefill_size}{_at(held)}"
        )
    if log.limited_by:
        yield f"  running requests are limited by {log.limited_by}"
    for row in log.vllm_capacity:
        known = row.model_dump(exclude_none=True, exclude={"line", "line_no", "rank"})
        yield f"vLLM KV cache: {', '.join(f'{key} {value}' for key, value in known.items())}{_at(row)}"


def _batch_lines(log: ServerLog) -> Iterator[str]:
    held = log.batches
    if held.decode_lines or held.prefill_lines:
        counts = f"{held.decode_lines} decode lines, {held.prefill_lines} prefill lines"
        yield f"batches: {counts}, longest queue {held.max_queue}"
    speed = held.spreads.get("decode", {}).get("gen_tok_s")
    if speed:
        yield f"  decode tok/s per line: {speed.low:g} to {speed.high:g}, last {speed.last:g} (n={speed.n})"
    spec = log.speculation
    if spec:
        definition = {
            "drafts": "accepted drafts / proposed drafts",
            "tokens": "accept_len / num_draft_tokens, not an acceptance of drafts",
        }.get(spec.rate_definition, spec.rate_definition)
        yield (
            f"speculation: last accept length {spec.last_accept_len} and rate {spec.last_accept_rate} ({definition}), "
            f"draft steps {spec.num_steps if spec.num_steps is not None else 'not known'} (known by: {spec.known_by})"
        )
    if log.retractions:
        yield f"retractions: {log.retractions} times, {log.retracted_requests} requests"


def _at(fact: Any) -> str:
    return f" [line {fact.line_no}]"


def _bounds(log: ServerLog) -> str | None:
    if not (log.version_at_least or log.version_at_most):
        return None
    return f"{log.version_at_least or '?'} to {log.version_at_most or 'newest'}"
