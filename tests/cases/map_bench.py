"""From `lib.load.benchfiles.BenchReport` to the names that cases of kind bench use: one table for all of them.

Nothing is computed here that `lib` does not compute: a row picks a field, or renames it. Names of latencies are made by
rule from the statistic and the latency, in each order and unit that tools use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lib.load.bench_readers import STATS, Stats
from lib.load.benchfiles import BenchReading, BenchReport, BenchRow, read_bench

#: name -> field of the row
ROW = {
    "requested": "requested",
    "completed": "completed",
    "request_count": "completed",
    "failed": "failed",
    "duration_s": "duration_s",
    "req_s": "requests_per_s",
    "achieved_req_s": "requests_per_s",
    "requested_rate": "request_rate_per_s",
    "max_concurrency": "max_concurrency",
    "concurrency": "concurrency",
    "peak_concurrency": "peak_concurrency",
    "input_tokens": "input_tokens",
    "output_tokens": "output_tokens",
    "output_tokens_retokenized": "output_tokens_retokenized",
    "input_text_tokens": "input_text_tokens",
    "input_vision_tokens": "input_vision_tokens",
    "in_tok_s": "input_tokens_per_s",
    "out_tok_s": "output_tokens_per_s",
    "total_tok_s": "total_tokens_per_s",
    "peak_out_tok_s": "peak_output_tokens_per_s",
    "goodput_req_s": "goodput_requests_per_s",
    "requested_output_len": "output_len_asked",
    "requested_input_len": "input_len_asked",
    "accept_length": "accept_length",
    "num_draft_tokens": "num_draft_tokens",
    "num_steps": "num_steps",
    "backend": "backend",
    "dataset": "dataset",
}
#: name -> field of the reading
READING = {
    "success_rate": "success_frac",
    "output_tokens_per_request": "output_tokens_per_request",
    "mean_output_tokens": "output_tokens_per_request",
    "mean_input_tokens": "input_tokens_per_request",
    "streaming": "streaming",
    "itl_meaningful": "itl_meaningful",
    "itl_kind": "itl_kind",
    "ttft_equals_e2e": "ttft_equals_e2e",
    "tokens_per_chunk": "tokens_per_chunk",
    "bundled_tokens_suspected": "bundled_tokens_suspected",
    "ignore_eos_effective": "ignore_eos_effective",
    "rate_achieved_ratio": "rate_achieved_frac",
    "implied_concurrency_about": "concurrency_decoding",
    "implied_concurrency": "concurrency_decoding",
    "consistent": "consistent",
    "drafts_accepted_per_step": "drafts_accepted_per_step",
    "draft_acceptance": "draft_acceptance_frac",
    "client_bound_suspected": "client_bound_suspected",
    "warmup_excluded": "warmup_excluded",
    "first_warmup_ttft_ms": "first_warmup_ttft_ms",
}
LATENCIES = {
    "ttft": "ttft_ms",
    "tpot": "tpot_ms",
    "itl": "itl_ms",
    "e2e": "e2e_ms",
    "latency": "e2e_ms",
    "time_to_second_token": "ttst_ms",
}
WORDS = {"mean": ("mean", "avg"), "median": ("median", "p50")}


def answer(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """All names that the case's input answers, in the shape that `expect` has."""
    given = case["input"]
    text = (folder / given["file"]).read_bytes().decode("utf-8", "replace") if "file" in given else given["text"]
    report = read_bench(text if isinstance(text, str) else "\n".join(map(str, text)))
    found = row_names(report.rows[0], report.readings[0]) | report_names(report)
    for row, reading in zip(report.rows, report.readings, strict=True):
        if row.format == "runs_text" and row.label:
            found[row.label.lower()] = runs_names(row, reading)
    return found


def report_names(report: BenchReport) -> dict[str, Any]:
    """Names of the whole file: validity, repeated runs, keys."""
    return {
        "valid": report.valid,
        "severity": report.severity,
        "runs": len(report.rows),
        "sections": report.run_sections,
        "odd_key": report.odd_keys[0] if report.odd_keys else None,
        "spread_ratio": report.spread_ratio,
        "single_run_trustworthy": report.single_run_trustworthy,
    } | {f"{name.removesuffix('_ms')}_mean_ms_runs": list(values) for name, values in report.repeated.items()}


def row_names(row: BenchRow, reading: BenchReading) -> dict[str, Any]:
    """Names of one run."""
    found: dict[str, Any] = {name: getattr(row, field) for name, field in ROW.items()}
    found |= {name: getattr(reading, field) for name, field in READING.items()}
    found["effective_concurrency"] = row.concurrency if row.concurrency is not None else reading.concurrency_predicted
    for word, field in LATENCIES.items():
        stats: Stats | None = getattr(row, field)
        found[word] = stats.mean if stats else None
        for stat in STATS:
            value = getattr(stats, stat) if stats else None
            for name in WORDS.get(stat, (stat,)):
                for unit, factor in (("ms", 1.0), ("s", 1e-3)):
                    scaled = value * factor if value is not None else None
                    for order in (f"{name}_{word}_{unit}", f"{word}_{name}_{unit}", f"{word}_{unit}_{name}"):
                        found[order] = scaled
    return found


def runs_names(row: BenchRow, reading: BenchReading) -> dict[str, Any]:
    """Names of a section of single runs."""
    return row_names(row, reading) | {
        "n": row.runs,
        "decode_tps_mean": row.decode_tokens_per_s,
        "wall_tps_mean": row.wall_tokens_per_s,
    }
