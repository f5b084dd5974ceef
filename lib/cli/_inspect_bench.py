"""`workbook inspect bench FILE`: what a benchmark's result file says and what it does not, as text or JSON."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from lib.cli._input import printable, read_text
from lib.findings import LEVELS, reaches
from lib.load.bench_readers import Stats
from lib.load.benchfiles import BenchReading, BenchReport, BenchRow, read_bench

#: Beyond this a result file with per-request details is not read.
MAX_BYTES = 512 << 20


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `bench` to the subcommands of `workbook inspect`."""
    parser = subparsers.add_parser(
        "bench",
        help="what a benchmark file says, and whether its numbers mean what they seem to",
        description="Read results of SGLang's bench_serving and one_batch_server, vLLM, aiperf, guidellm.",
    )
    parser.add_argument("file", metavar="FILE", help="JSON, JSONL or the printed result block; - for standard input")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object on standard output (docs/inspect-bench.md)"
    )
    parser.add_argument("--fail-on", choices=LEVELS, metavar="LEVEL", help=f"exit 1 at this level: {', '.join(LEVELS)}")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 read, 1 a finding at or above --fail-on, 2 cannot be read (raised as UnreadableFile)."""
    report = read_bench(read_text(args.file, "a benchmark result", MAX_BYTES))
    print(report.model_dump_json(indent=1) if args.json else "\n".join(map(printable, _lines(report))))
    return int(args.fail_on is not None and reaches(report.findings, args.fail_on))


def _lines(report: BenchReport) -> Iterator[str]:
    verdict = "the numbers can be used" if report.valid else "DO NOT USE these numbers as they are"
    yield f"{report.format}, {len(report.rows)} run{'s' if len(report.rows) != 1 else ''}: {verdict}"
    for row, reading in zip(report.rows, report.readings, strict=True):
        yield ""
        yield from _row(row, reading)
    if report.spread_ratio is not None:
        yield f"spread between runs: x{report.spread_ratio:.3g} in {report.spread_of}"
    yield ""
    for finding in report.findings:
        where = f" [line {finding.line}]" if finding.line else ""
        yield f"{finding.level}: {finding.id}: {finding.what}{where}"
        if finding.level != "info":
            yield f"  do: {finding.do}"


def _row(row: BenchRow, reading: BenchReading) -> Iterator[str]:
    about = [row.label, row.backend and f"backend {row.backend}", row.model, row.dataset and f"dataset {row.dataset}"]
    load = (
        "rate unlimited"
        if row.request_rate_unlimited
        else row.request_rate_per_s and f"rate {row.request_rate_per_s:g}/s"
    )
    streams = row.max_concurrency and f"concurrency {row.max_concurrency}"
    yield f"{row.tool}: " + ", ".join(str(item) for item in [*about, load, streams] if item)
    if row.completed is not None:
        asked = f" of {row.requested}" if row.requested is not None else " (number asked for: not in the file)"
        took = f" in {row.duration_s:.4g} s" if row.duration_s is not None else ""
        yield f"  requests: {row.completed} succeeded{asked}{took}"
    if row.output_tokens is not None and reading.output_tokens_per_request is not None:
        yield f"  output: {row.output_tokens} tokens, {reading.output_tokens_per_request:.4g} per request"
    rates = [
        (row.requests_per_s, "req/s"),
        (row.output_tokens_per_s, "output tok/s"),
        (row.input_tokens_per_s, "input tok/s"),
        (row.decode_tokens_per_s, "decode tok/s"),
        (row.wall_tokens_per_s, "tok/s over the request"),
    ]
    if any(value is not None for value, _ in rates):
        yield "  rates: " + ", ".join(f"{value:.5g} {unit}" for value, unit in rates if value is not None)
    for name, stats in (
        ("TTFT", row.ttft_ms),
        ("TPOT", row.tpot_ms),
        (_gap_name(reading), row.itl_ms),
        ("second token", row.ttst_ms),
        ("E2E", row.e2e_ms),
    ):
        if stats is not None:
            yield f"  {name}: {_stats(stats)} ms"
    if row.concurrency is not None or reading.concurrency_decoding is not None:
        seen = f"{row.concurrency:.4g} in flight (file)" if row.concurrency is not None else ""
        derived = (
            f"{reading.concurrency_decoding:.4g} decoding at once (TPOT x throughput)"
            if reading.concurrency_decoding
            else ""
        )
        yield "  concurrency: " + ", ".join(part for part in (seen, derived) if part)
    if row.accept_length is not None and reading.drafts_accepted_per_step is not None:
        share = (
            f" = {reading.draft_acceptance_frac:.1%} of {row.num_steps}"
            if reading.draft_acceptance_frac is not None
            else ""
        )
        drafts = f"{reading.drafts_accepted_per_step:.4g} drafts per step{share}"
        yield f"  speculation: accept length {row.accept_length:.4g}: {drafts}"


def _gap_name(reading: BenchReading) -> str:
    kinds = {
        "chunk_gap": "gap between chunks",
        "per_token": "inter-token latency",
        "per_request_mean": "mean gap of a request",
    }
    return kinds.get(reading.itl_kind or "", "inter-token latency")


def _stats(stats: Stats) -> str:
    return ", ".join(f"{name} {value:.5g}" for name, value in stats.model_dump(exclude_none=True).items())
