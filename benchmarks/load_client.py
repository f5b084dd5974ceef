"""The load client's own table: what it shows against what the judge really sent, and what that costs.

    taskset is applied here: the judge on core 0, the client (all its processes) on core 1.
    python benchmarks/load_client.py [--quick] [--repeats 3] [--peers] [--json FILE]

With `--peers`, SGLang's bench_serving, its Rust client, vllm bench and aiperf are run at the same load, each against a
judge of its own, one after the other, where they are found: bench_serving in .venv-sglang or PEER_SGLANG_PYTHON; the
others on PATH or as PEER_SGLANG_RUST, PEER_VLLM, PEER_AIPERF (a command each). PEER_TOKENIZER is a folder with a
tokenizer for those that want one (default: a model of this workbook's cache). What is not found is said.

A shared machine disturbs; each cell is the run with the least lag of the judge, and the range over all runs is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lib.errors import WorkbookError  # noqa: E402
from lib.load import judge, metrics  # noqa: E402
from lib.load.client import SENDER_NICE  # noqa: E402
from lib.load.client_worker import prefer  # noqa: E402
from lib.load.judge import Comparison, Plan, Truth  # noqa: E402

JUDGE_CORES, CLIENT_CORES = (0,), (1,)
PEER_LIMIT_S = 90
#: The whole command as a user runs it: start-up, prompts, sending, statistics, measured as the other tools are.
OWN = "workbook bench, whole"


@dataclass(frozen=True, slots=True)
class Run:
    """One level against the judge."""

    found: Comparison
    truth: Truth
    cpu_us_per_token: float
    startup_s: float
    rss_bytes: int
    window_us: float
    cpu_frac: float
    verdict: str


def one(plan: Plan, streams: int, requests: int, tokens: int, api: str, workers: int, cores: tuple[int, ...]) -> Run:
    """A level with the judge and the client on their own cores."""
    level, truth, _ = judge.judged_level(
        plan, streams=streams, requests=requests, tokens=tokens, api=api, workers=workers, judge_cores=JUDGE_CORES,
        client_cores=cores,
    )  # fmt: skip
    facts = level.header["client"]["workers"]
    total = int(truth.tokens.sum())
    return Run(
        judge.compare(level, truth),
        truth,
        sum(f["cpu_total_s"] for f in facts) / total * 1e6,
        max(f["first_request_after_start_s"] for f in facts),
        sum(f["peak_rss_bytes"] for f in facts),
        sum(f["cpu_window_s"] for f in facts) / total * 1e6,
        max(f["cpu_frac"] for f in facts),
        metrics.client_verdict(level).status,
    )


def best(runs: list[Run]) -> Run:
    """The least disturbed run, by the judge's own lag: the judge is the same whoever the client is."""
    return min(runs, key=lambda r: r.truth.lag_mean_s)


def show(name: str, runs: list[Run]) -> dict[str, Any]:
    """A row of the table, and the range over the runs."""
    run = best(runs)
    f = run.found
    row = {
        "case": name,
        "shown_tokens_per_s": f.shown_tokens_per_s,
        "true_tokens_per_s": f.true_tokens_per_s,
        "share": f.share,
        "ttft_p50_ms": [x * 1e3 for x in f.ttft_p50_s],
        "ttft_p99_ms": [x * 1e3 for x in f.ttft_p99_s],
        "gap_p50_ms": [x * 1e3 for x in f.gap_p50_s],
        "gap_p99_ms": [x * 1e3 for x in f.gap_p99_s],
        "cpu_us_per_token": run.cpu_us_per_token,
        "cpu_window_us_per_token": run.window_us,
        "cpu_frac_of_busiest_process": run.cpu_frac,
        "rss_mb": run.rss_bytes / 1e6,
        "startup_s": run.startup_s,
        "judge_lag_ms": run.truth.lag_mean_s * 1e3,
        "client": run.verdict,
        "range": {
            "share": span(r.found.share for r in runs),
            "ttft_p50_error_ms": span(r.found.ttft_error_s * 1e3 for r in runs),
            "gap_p99_ratio": span(r.found.gap_p99_s[0] / r.found.gap_p99_s[1] for r in runs),
            "cpu_us_per_token": span(r.cpu_us_per_token for r in runs),
        },
        "runs": len(runs),
    }
    pair = lambda x: f"{x[0]:7.2f}/{x[1]:7.2f}"  # noqa: E731
    print(
        f"{name:24} {f.shown_tokens_per_s:9.0f} {f.share:6.3f} {pair(row['ttft_p50_ms'])} {pair(row['ttft_p99_ms'])} "
        f"{pair(row['gap_p50_ms'])} {pair(row['gap_p99_ms'])} {run.cpu_us_per_token:8.2f} {row['rss_mb']:6.0f} "
        f"{run.startup_s:6.2f} {row['judge_lag_ms']:6.2f}  {row['range']['cpu_us_per_token']}",
        flush=True,
    )
    return row


def span(values: Any) -> list[float]:
    """Least and largest, rounded for reading."""
    listed = list(values)
    return [round(min(listed), 3), round(max(listed), 3)]


def most_paced(api: str, repeats: int) -> dict[str, Any]:
    """The highest paced rate at which the pooled gap's p50 is within 5%: one wave of 256 streams, about 3 s each."""
    reached: dict[str, Any] = {"chunks_per_s": 0.0}
    for rate in (20_000, 40_000, 60_000, 80_000, 100_000, 120_000, 140_000):
        step = 256 / rate
        plan = Plan(step_s=step, stall_frac=0.0, first_min_s=0.05, first_max_s=0.06)
        runs = [one(plan, 256, 256, round(3 / step), api, 1, CLIENT_CORES) for _ in range(repeats)]
        errors = [abs(r.found.gap_p50_s[0] / r.found.gap_p50_s[1] - 1) for r in runs]
        paced = [r.found.chunks_per_s for r in runs]
        late = [r.truth.lag_mean_s / step for r in runs]
        pick = min(range(len(runs)), key=lambda i: errors[i])
        print(
            f"  asked {rate:7d}  paced {paced[pick]:7.0f}  gap p50 off {errors[pick]:6.1%}  judge late by "
            f"{late[pick]:.2f} of a step  (all runs: {', '.join(f'{e:.1%}' for e in errors)})",
            flush=True,
        )
        if errors[pick] <= 0.05 and paced[pick] > reached["chunks_per_s"]:
            reached = {"chunks_per_s": paced[pick], "asked": rate, "gap_p50_error": errors[pick]}
        if late[pick] > 1.0:
            print("  the judge cannot pace more on this machine")
            break
    return reached


def peer_commands() -> dict[str, tuple[list[str] | None, str]]:
    """The other clients: their command, or why there is none."""
    sglang = os.environ.get("PEER_SGLANG_PYTHON") or str(ROOT / ".venv-sglang" / "bin" / "python")
    found: dict[str, tuple[list[str] | None, str]] = {OWN: ([sys.executable, "-m", "lib.cli", "bench"], "")}
    there = Path(sglang).exists()
    found["bench_serving"] = ([sglang, "-m", "sglang.bench_serving"] if there else None, f"no interpreter at {sglang}")
    for name, variable, program in (
        ("sglang rust client", "PEER_SGLANG_RUST", "sglang-bench"),
        ("vllm bench", "PEER_VLLM", "vllm"),
        ("aiperf", "PEER_AIPERF", "aiperf"),
    ):
        command = os.environ.get(variable) or shutil.which(program)
        found[name] = ([command] if command else None, f"no {program} on PATH and {variable} is not set")
    return found


def tokenizer() -> str | None:
    """A folder with a tokenizer: PEER_TOKENIZER, or a model of the workbook's cache."""
    cached = sorted(judge.cache_folder().parent.glob("models/*/tokenizer.json"), key=lambda p: p.stat().st_size)
    return os.environ.get("PEER_TOKENIZER") or (str(cached[-1].parent) if cached else None)


def peers(streams: int, requests: int, tokens: int, plan: Plan, names: list[str]) -> list[dict[str, Any]]:
    """Clients as whole commands at the same load, where they are installed; what is not installed is said."""
    rows = []
    for name, (command, why) in ((n, peer_commands()[n]) for n in names):
        if not command:
            print(f"{name:24} not run: {why}")
            rows.append({"case": name, "not_run": why})
            continue
        with judge.running_judge(plan, cores=JUDGE_CORES) as running, tempfile.TemporaryDirectory() as folder:
            more = peer_arguments(name, running.base_url, running.port, streams, requests, tokens)
            environment = dict(os.environ, COLUMNS="200")
            # bench_serving imports `datasets` for data sets that are not used here; it is not part of SGLang's CPU install.
            (Path(folder) / "stub" / "datasets").mkdir(parents=True)
            (Path(folder) / "stub" / "datasets" / "__init__.py").write_text("load_dataset = None\n")
            if name == OWN:
                environment["PYTHONPATH"] = str(ROOT)
            if name == "bench_serving":
                environment |= {"PYTHONPATH": str(Path(folder) / "stub"), "HF_HUB_OFFLINE": "1"}
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            begun = time.monotonic_ns()
            process = subprocess.Popen(
                ["taskset", "-c", ",".join(map(str, CLIENT_CORES)), *command, *more],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, start_new_session=True,
                env=environment,
            )  # fmt: skip
            prefer(process.pid, SENDER_NICE)  # the same priority as this client's sender
            try:
                out, error = process.communicate(timeout=PEER_LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                out, error = process.communicate()
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            truth = running.truth()
            shown = shown_by(name, out, Path(folder))
        if process.returncode != 0 or truth.read_ns.size < requests:
            last = (error or out).strip()[-300:].replace("\n", " | ")
            print(f"{name:24} failed (rc {process.returncode}, {truth.read_ns.size} of {requests} requests): {last}")
            rows.append({"case": name, "failed": last})
            continue
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        gaps = truth.gaps_s()
        true = {
            "ttft_p50_ms": float(np.median(truth.ttft_s())) * 1e3,
            "gap_p50_ms": float(np.median(gaps)) * 1e3,
            "gap_p99_ms": float(np.percentile(gaps, 99)) * 1e3,
            "tokens_per_s": truth.tokens_per_s(),
        }
        row = {
            "case": name, "true": true, "shown": shown, "share_of_load": in_flight(truth) / streams,
            "cpu_us_per_token": float(cpu / truth.tokens.sum() * 1e6), "judge_lag_ms": truth.lag_mean_s * 1e3,
            "startup_s": (int(truth.read_ns.min()) - begun) / 1e9, "largest_process_mb": after.ru_maxrss / 1024,
        }  # fmt: skip
        rows.append(row)
        words = ", ".join(f"{k} {v:.1f}/{true[k]:.1f}" if k in true else f"{k} {v:.1f}" for k, v in shown.items())
        print(
            f"{name:24} share {row['share_of_load']:.2f}  CPU {row['cpu_us_per_token']:.1f} us/token  start-up "
            f"{row['startup_s']:.1f} s  shown/true: {words}",
            flush=True,
        )
    return rows


def in_flight(truth: Truth) -> float:
    """Requests in the judge's hands on average, over the time from its first read to its last send, ramp and drain too."""
    ends = np.array([s[-1] for s in truth.sent_ns if s.size])
    starts = np.array([r for r, s in zip(truth.read_ns, truth.sent_ns, strict=True) if s.size])
    return float((ends - starts).sum() / (ends.max() - starts.min()))


def shown_by(name: str, out: str, folder: Path) -> dict[str, float]:
    """What a client reports, in milliseconds: TTFT p50, pooled gaps where it has them (per-request means are named so)."""
    if name == OWN:
        made = json.loads((folder / "own.json").read_text())["levels"][0]["metrics"]
        keys = {"ttft_p50_ms": "ttft_s_p50", "gap_p50_ms": "chunk_gap_s_p50", "gap_p99_ms": "chunk_gap_s_p99"}
        values = {shown: made[key]["value"] for shown, key in keys.items()}
        return {shown: value * 1e3 for shown, value in values.items() if value is not None}
    if name == "aiperf":
        for path in folder.rglob("profile_export_aiperf.json"):
            made = json.loads(path.read_text())
            keys = {
                "ttft_p50_ms": ("time_to_first_token", "p50"),
                "gap_p50_ms": ("inter_chunk_latency", "p50"),
                "request_mean_p99_ms": ("inter_token_latency", "p99"),
                "tokens_per_s": ("output_token_throughput", "avg"),
            }
            return {k: float(made[m][s]) for k, (m, s) in keys.items() if isinstance(made.get(m), dict) and s in made[m]}
        return {}
    words = {
        "ttft_p50_ms": r"Median TTFT \(ms\):\s+([\d.]+)",
        "gap_p50_ms": r"Median ITL \(ms\):\s+([\d.]+)",
        "gap_p99_ms": r"P99 ITL \(ms\):\s+([\d.]+)",
        "tokens_per_s": r"Output token throughput \(tok/s\):\s+([\d.]+)",
    }
    return {k: float(m.group(1)) for k, pattern in words.items() if (m := re.search(pattern, out))}


def peer_arguments(name: str, url: str, port: int, streams: int, requests: int, tokens: int) -> list[str]:
    """Where the judge is and how much load, in each tool's own words."""
    if name == OWN:
        return [
            "--base-url", url, "--model", "judge", "--api", "completions", "--dataset", "random-ids", "--vocab-size", "1000",
            "--input-len", "16", "--output-len", str(tokens), "--concurrency", str(streams), "--num-requests", str(requests),
            "--warmup", "0", "--no-calibration", "--json", "own.json", "--raw", "raw",
        ]  # fmt: skip
    words = ["--tokenizer", folder] if (folder := tokenizer()) else []
    if name in ("bench_serving", "sglang rust client"):
        return [
            "--host", "127.0.0.1", "--port", str(port), "--backend", "sglang-oai", "--dataset-name", "random-ids",
            "--num-prompts", str(requests), "--random-input-len", "16", "--random-output-len", str(tokens),
            "--random-range-ratio", "1.0", "--max-concurrency", str(streams), "--model", "judge", "--disable-tqdm",
            "--warmup-requests", "0", *words,
        ]  # fmt: skip
    if name == "vllm bench":
        return [
            "bench", "serve", "--base-url", url, "--model", "judge", "--dataset-name", "random", "--random-input-len",
            "16", "--random-output-len", str(tokens), "--num-prompts", str(requests), "--max-concurrency", str(streams),
            "--ignore-eos", *words,
        ]  # fmt: skip
    return [
        "profile", "-m", "judge", "-u", url, "--endpoint-type", "completions", "--streaming", "--concurrency",
        str(streams), "--request-count", str(requests), "--isl", "16", "--osl", str(tokens), "--ui", "none",
        "--use-server-token-count", "--extra-inputs", "ignore_eos:true", *words,
    ]  # fmt: skip


def main() -> int:
    """Print the table; 0 if the client met every limit of its own calibration at the largest load, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two waves instead of four but for the row of the limits, no highest rate")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only-target", action="store_true", help="only 1,024 streams over completions")
    parser.add_argument("--highest", action="store_true", help="the highest paced rate also with --quick")
    parser.add_argument("--peers", action="store_true", help="run other clients too, where installed")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if os.cpu_count() == 1:
        print("this needs two cores: judge and client would share one")
        return 2
    waves = 2 if args.quick else 4
    print(f"load average {os.getloadavg()}; judge core {JUDGE_CORES}, client core {CLIENT_CORES}; shown/true in ms")
    print(
        f"{'case':24} {'tok/s':>9} {'share':>6} {'TTFT p50':>15} {'TTFT p99':>15} {'gap p50':>15} {'gap p99':>15} "
        f"{'us/token':>8} {'MB':>6} {'start':>6} {'lag ms':>6}  us/token over runs"
    )
    rows = []
    plan = Plan()
    for api in ("completions",) if args.only_target else ("completions", "generate", "chat"):
        for streams in (1, 32, 256, 1024) if api == "completions" and not args.only_target else (1024,):
            # The row that the limits are stated for keeps its four waves (524,288 tokens): start-up is part of its CPU.
            count = max(8, (4 if (api, streams) == ("completions", 1024) else waves) * streams)
            runs = [one(plan, streams, count, 128, api, 1, CLIENT_CORES) for _ in range(args.repeats)]
            rows.append(show(f"{api} {streams}", runs))
    if not args.only_target:
        runs = [one(plan, 1024, waves * 1024, 128, "completions", 2, (0, 1)) for _ in range(args.repeats)]
        rows.append(show("2 workers, cores 0 and 1", runs))
        alone = next(r for r in rows if r["case"] == "completions 1024")["cpu_frac_of_busiest_process"]
        shared = rows[-1]["cpu_frac_of_busiest_process"]
        print(f"  gain of --workers 2: CPU share of the busiest process {alone:.2f} with one, {shared:.2f} with two: "
              f"room for {alone / shared:.2f} times the load (the judge keeps core 0 half busy)")  # fmt: skip
        triple = Plan(step_s=0.030, tokens_per_event=3)
        runs = [one(triple, 32, 64, 127, "generate", 1, CLIENT_CORES) for _ in range(args.repeats)]
        rows.append(show("3 tokens a chunk, 32", runs))
    result: dict[str, Any] = {"unix_s": time.time(), "load_average": os.getloadavg(), "rows": rows}
    if not args.quick and not args.only_target or args.highest:
        print("highest paced rate, 256 streams on one core:")
        result["highest"] = most_paced("completions", min(2, args.repeats))
    print("whole commands, each with a judge of its own:")
    result["peers"] = peers(1024, 4 * 1024, 128, plan, list(peer_commands()) if args.peers else [OWN])
    target = next(r for r in rows if r["case"] == "completions 1024")
    shown, true = target["gap_p99_ms"]
    checks = {
        "share >= 0.99": target["share"] >= 0.99,
        "TTFT p50 off by <= 5 ms": target["ttft_p50_ms"][0] - target["ttft_p50_ms"][1] <= 5,
        "gap p50 within 3%": abs(target["gap_p50_ms"][0] / target["gap_p50_ms"][1] - 1) <= 0.03,
        "gap p99 within 3%": abs(shown / true - 1) <= 0.03,
        "CPU <= 8 us/token": target["cpu_us_per_token"] <= 8,
        "memory <= 300 MB": target["rss_mb"] <= 300,
        "start-up <= 1 s": target["startup_s"] <= 1,
    } | ({"80,000 chunks/s": result["highest"]["chunks_per_s"] >= 80_000} if "highest" in result else {})
    for what, met in checks.items():
        print(f"{'met ' if met else 'MISS'} {what}")
    if args.json:
        args.json.write_text(json.dumps(result | {"checks": checks}, indent=1) + "\n")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        try:
            raise SystemExit(main())
        except WorkbookError as error:
            raise SystemExit(f"load_client: {error}") from None
