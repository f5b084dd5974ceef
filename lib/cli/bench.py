"""`workbook bench`: load levels against a running server, with raw records and the client's own proof."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lib.errors import BadInput, ServerError
from lib.load import client, judge, metrics, workloads
from lib.load.workloads import Workload
from lib.records import Measured
from lib.server.bounded import get_bounded, refuse_url_with_secret
from lib.server.redact import redact_text

DATASETS = ("code", "random-ids", "repeating", "chat", "shared-prefix")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Options of `workbook bench`."""
    parser = subparsers.add_parser("bench", help="measure a running server at several load levels")
    parser.add_argument("--base-url", required=True, help="http://HOST:PORT of the server")
    parser.add_argument("--concurrency", help="closed loop: levels, for instance 1,4,16,32")
    parser.add_argument("--rate", help="open loop instead: requests a second, for instance 0.5,1,2")
    parser.add_argument("--arrival", choices=client.ARRIVALS, default="poisson", help="open loop: how requests arrive")
    parser.add_argument("--num-requests", type=int, help="requests a level (default max(4, 2C); open loop: 64)")
    parser.add_argument("--input-len", type=int, default=512, help="tokens a prompt, about (default 512)")
    parser.add_argument("--output-len", type=int, default=128, help="tokens an answer (default 128)")
    parser.add_argument(
        "--dataset", default="code", help=f"{', '.join(DATASETS)}, or the path of a .txt, .jsonl or .json file"
    )
    parser.add_argument("--vocab-size", type=int, help="for random-ids: the model's vocabulary size (config.json)")
    parser.add_argument("--api", choices=tuple(client.PATHS), help="default: chat for --dataset chat, else generate")
    parser.add_argument("--model", help="served model name (default: what /v1/models says)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--warmup", type=int, default=1, help="warm-up requests a level, never measured (default 1)")
    parser.add_argument("--stop-at-eos", action="store_true", help="let answers end by themselves")
    parser.add_argument(
        "--token-counts", action="store_true",
        help="completions and chat: ask for a token count in every event (per-token latency under speculation)",
    )  # fmt: skip
    parser.add_argument("--workers", type=int, default=1, help="sending processes")
    parser.add_argument("--gap-timeout", type=float, default=60.0, help="seconds without a byte that make a stall")
    parser.add_argument("--api-key-env", help="name of the environment variable with the API key")
    parser.add_argument("--no-calibration", action="store_true", help="skip it; latencies then carry no verdict")
    parser.add_argument("--json", type=Path, help="write all numbers of all levels to this file")
    parser.add_argument("--raw", type=Path, help="folder for the raw records (default: a new temporary one)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure each level; 0 if every request of every level succeeded, 1 if some failed."""
    refuse_url_with_secret(args.base_url)
    client.split_url(args.base_url)
    levels = _levels(args)
    model = args.model or _served_model(args.base_url, args.api_key_env)
    api = args.api or ("chat" if args.dataset == "chat" else "generate")
    if args.json and not args.json.parent.is_dir():
        raise BadInput("an existing folder for --json", str(args.json.parent))
    raw = args.raw or Path(tempfile.mkdtemp(prefix="workbook-bench-"))
    made = [(name, value, _workload(args, number, value)) for number, (name, value) in enumerate(levels)]
    calibration = None
    if not args.no_calibration:
        streams = int(max(v for _, v in levels)) if levels[0][0] == "concurrency" else 64
        print(f"calibrating this client at {streams} streams against the built-in judge ...", flush=True)
        calibration = judge.calibrate(max(1, streams), api=api, workers=args.workers)
        why = "; ".join(calibration["reasons"])
        print(f"calibration: {calibration['status']}" + (f" ({why})" if why else "") + _shown(calibration), flush=True)
    print(f"{args.base_url}  model {model}  api {api}  dataset {made[0][2].name}  raw records in {raw}")
    print(_row("C" if levels[0][0] == "concurrency" else "req/s", *COLUMNS))
    results, bad = [], 0
    for name, value, workload in made:
        path = raw / f"{name}-{value:g}.jsonl"
        client.run_level(
            args.base_url, api, workload.requests, out=path, model=model, warmup=workload.warmup, seed=args.seed,
            workload=workload.describe(), workers=args.workers, gap_timeout_s=args.gap_timeout, arrival=args.arrival,
            api_key_env=args.api_key_env, calibration=calibration,
            continuous_usage=args.token_counts, progress=_progress(f"{name} {value:g}"),
            concurrency=int(value) if name == "concurrency" else None, rate=value if name == "rate" else None,
        )  # fmt: skip
        level = client.read_level(path)
        summary = metrics.level_summary(level)
        failed = metrics.failures(level)
        bad += sum(failed.values()) + (level.header["planned"] - level.header["sent"])
        print(_line(value, summary))
        for note in _notes(level, summary, failed):
            print(f"    {note}")
        dumped = {k: m.model_dump(exclude_none=True) for k, m in summary.items()}
        results.append({name: value, "failures": failed, "record": str(path), "metrics": dumped})
        if args.json:
            _write_json(args.json, {"base_url": args.base_url, "model": model, "api": api, "levels": results})
    return 1 if bad else 0


RATES = ("tok/s", "steady", "tok/s/req")
COLUMNS = (*RATES, "TTFT p50", "p99 ms", "gap p50", "p99 ms", "tok p50 ms", "tokens", "wall s", "ok")


def _levels(args: argparse.Namespace) -> list[tuple[str, float]]:
    if bool(args.concurrency) == bool(args.rate):
        raise BadInput("either --concurrency or --rate", "both" if args.rate else "neither")
    name, text = ("concurrency", args.concurrency) if args.concurrency else ("rate", args.rate)
    try:
        values = [float(x) for x in text.split(",") if x.strip()]
    except ValueError:
        values = []
    whole = name == "rate" or all(v.is_integer() for v in values)
    if not values or not whole or any(not 0 < v < 1e6 for v in values):
        raise BadInput(f"--{name} as positive numbers with commas between, for instance 1,4,16", repr(text))
    for option, least in (("num_requests", 1), ("input_len", 1), ("output_len", 1), ("warmup", 0), ("workers", 1)):
        given = getattr(args, option)
        if given is not None and given < least:
            raise BadInput(f"--{option.replace('_', '-')} of at least {least}", str(given))
    return [(name, v) for v in values]


def _served_model(base_url: str, api_key_env: str | None) -> str:
    """The name that /v1/models gives; it also tells a dead server or a wrong URL before any load is sent."""
    headers = {}
    if api_key_env:
        if not os.environ.get(api_key_env):
            raise BadInput(f"the environment variable {api_key_env} with the API key", "not set")
        headers["Authorization"] = f"Bearer {os.environ[api_key_env]}"
    url = f"{base_url.rstrip('/')}/v1/models"
    do = "check the URL and that the server is ready"
    answer = get_bounded(url, headers=headers)
    if answer.problem:
        raise ServerError(f"a server at {base_url}", answer.problem, do)
    if answer.status in (401, 403):
        raise ServerError(f"access to {url}", f"HTTP {answer.status}", "give --api-key-env NAME")
    try:
        names = [m["id"] for m in answer.json()["data"]] if answer.status == 200 else []
    except (ValueError, KeyError, TypeError):
        names = []
    if not names:
        shown = redact_text(answer.text[:4096])[:80]
        raise ServerError(f"model names from {url}", f"HTTP {answer.status}, {shown!r}", do)
    return str(names[0])


def _workload(args: argparse.Namespace, number: int, value: float) -> Workload:
    """Each level has prompts of its own: a level never meets what the one before left in the prefix cache."""
    count = args.num_requests or (workloads.requests_per_level(int(value)) if args.concurrency else 64)
    seed = args.seed * 1000 + number
    how: dict[str, Any] = {"seed": seed, "warmup": args.warmup, "ignore_eos": not args.stop_at_eos}
    if args.dataset == "random-ids":
        return workloads.random_ids(count, args.input_len, args.output_len, vocab_size=args.vocab_size, **how)
    if args.dataset == "code":
        return workloads.code_text(count, args.input_len, args.output_len, **how)
    if args.dataset == "repeating":
        return workloads.repeating_text(count, args.input_len, args.output_len, **how)
    if args.dataset == "chat":
        return workloads.chat_tasks(count, args.output_len, **how)
    if args.dataset == "shared-prefix":
        tail = max(1, args.input_len // 8)
        return workloads.shared_prefix(count, args.input_len - tail or 1, tail, args.output_len, **how)
    path = Path(args.dataset)
    if path.suffix not in (".txt", ".jsonl", ".json", ".md", ".py") and not path.exists():
        raise BadInput(f"--dataset as one of {', '.join(DATASETS)}, or a file", repr(args.dataset))
    if path.suffix in (".jsonl", ".json"):
        return workloads.jsonl_file(path, count, args.output_len, **how)
    return workloads.text_file(path, count, args.input_len, args.output_len, **how)


def _progress(name: str) -> Callable[[dict[str, Any]], None] | None:
    if not sys.stderr.isatty():
        return None
    begun = time.monotonic()

    def show(state: dict[str, Any]) -> None:
        done, of = state["done"], state["of"]
        left = (time.monotonic() - begun) / done * (of - done) if done else None
        rest = f", about {left:.0f} s left" if left is not None else ""
        print(f"\r{name}: {done} of {of} done, {state['in_flight']} in flight{rest}   ", end="", file=sys.stderr)
        if done == of:
            print("\r" + " " * 78 + "\r", end="", file=sys.stderr)

    return show


def _shown(calibration: dict[str, Any]) -> str:
    if "ttft_p50_shown_true_s" not in calibration:
        return ""
    ttft, gap = calibration["ttft_p50_shown_true_s"], calibration["gap_p99_shown_true_s"]
    return (
        f"; TTFT p50 shown {ttft[0] * 1e3:.1f} ms, true {ttft[1] * 1e3:.1f}; gap p99 shown {gap[0] * 1e3:.1f}, "
        f"true {gap[1] * 1e3:.1f}; {calibration['chunks_per_s']:.0f} chunks/s; share {calibration['share']:.3f}"
    )


def _row(*cells: str) -> str:
    return "".join(f"{c:>11}" for c in cells)


def _figure(measured: Measured, scale: float = 1.0, digits: int = 1) -> str:
    value = measured.value
    return f"{value * scale:.{digits}f}" if isinstance(value, (int, float)) else "-"


def _line(value: float, s: dict[str, Measured]) -> str:
    milli = [
        _figure(s[k], 1e3, 2)
        for k in ("ttft_s_p50", "ttft_s_p99", "chunk_gap_s_p50", "chunk_gap_s_p99", "token_latency_s_p50")
    ]
    whole = [_figure(s["output_tokens"], 1, 0), _figure(s["wall_s"], 1, 2), _figure(s["requests_ok"], 1, 0)]
    keys = ("output_tokens_per_s", "steady_output_tokens_per_s", "request_output_tokens_per_s_mean")
    rates = [_figure(s[k]) for k in keys]
    return _row(f"{value:g}", *rates, *milli, *whole)


def _notes(level: metrics.Level, summary: dict[str, Measured], failed: dict[str, int]) -> list[str]:
    notes = []
    low, high = summary["output_tokens_per_s"].low, summary["output_tokens_per_s"].high
    if low is not None and high is not None:
        notes.append(f"tok/s 95% interval {low:.1f} to {high:.1f}")
    if summary["client"].value != "ok":
        notes.append(f"{summary['client'].value}: {summary['client'].reason}")
    if failed:
        notes.append("failed: " + ", ".join(f"{n} {cause}" for cause, n in failed.items()))
        first = next((r["detail"] for r in level.requests if r["failure"] and r["detail"]), None)
        if first:
            notes.append(f"first: {first[:160]}")
    unsent = level.header["planned"] - level.header["sent"]
    if unsent:
        notes.append(f"{unsent} never sent: {level.header['stopped']}")
    for key in ("steady_output_tokens_per_s", "token_latency_s_p50"):
        if summary[key].value is None and not failed and summary["client"].value != "client_bound":
            hint = " (--token-counts)" if key.startswith("token") else ""
            notes.append(f"no {key}: {summary[key].reason}{hint}")
    cached = summary["cached_tokens"].value
    if isinstance(cached, int) and cached:
        notes.append(f"{cached} of {summary['input_tokens'].value} prompt tokens came from the prefix cache")
    return notes


def _write_json(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)
