"""Notebook 03's measurements: closed-loop levels and a smoke test, each one raw file, and what they say."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lib.errors import BadInput
from lib.hosts import local
from lib.load import metrics, workloads
from lib.load.client import read_level, run_level
from lib.load.judge import calibrate
from lib.load.metrics import Level
from lib.load.workloads import Workload, requests_per_level
from lib.model.memory import kv_bytes_per_token
from lib.model.roofline import DecodeCeiling, decode_ceiling
from lib.params import BenchmarkParams
from lib.records import Measured, Prediction, Status, Trial, Verdict
from lib.results import Answering, Measurement, NotebookRun, ServerHandle

LEVEL_FILE = "level.jsonl"
Levels = dict[int, Measurement]


def build_workload(
    dataset: str, count: int, input_len: int, output_len: int, seed: int, vocab_size: int | None
) -> Workload:
    """The requests of one level: `count` measured ones and one warm-up that is none of them."""
    if dataset == "random_ids":
        return workloads.random_ids(count, input_len, output_len, vocab_size=vocab_size, seed=seed)
    if dataset == "code":
        return workloads.code_text(count, input_len, output_len, seed=seed)
    if dataset == "repeating":
        return workloads.repeating_text(count, input_len, output_len, seed=seed)
    if dataset == "chat":
        return workloads.chat_tasks(count, output_len, seed=seed)
    raise BadInput("dataset is code, chat, random_ids or repeating", repr(dataset))


def send_level(
    server: Answering,
    folder: Path,
    concurrency: int,
    count: int,
    dataset: str,
    input_len: int,
    output_len: int,
    api: str,
    seed: int,
    vocab_size: int | None,
    gap_timeout_s: float,
    api_key_env: str | None,
    calibration_file: str,
) -> None:
    """Sends one closed-loop level after a cache flush and writes its raw record (level.jsonl)."""
    made = build_workload(dataset, count, input_len, output_len, seed + concurrency, vocab_size)
    server.control.flush_cache()
    run_level(
        server.base_url,
        "chat" if dataset == "chat" else api,
        made.requests,
        out=folder / LEVEL_FILE,
        concurrency=concurrency,
        model=server.control.served_model_name(),
        warmup=made.warmup,
        workload=made.describe(),
        gap_timeout_s=gap_timeout_s,
        api_key_env=api_key_env,
        calibration=json.loads(Path(calibration_file).read_text()),
    )


def take_calibration(folder: Path, streams: int, api: str) -> None:
    """Lets the client prove against the built-in judge that it shows the truth at this load (calibration.json)."""
    local.write_atomic(folder / "calibration.json", json.dumps(calibrate(streams, api=api), default=str))


def measure_levels(run: NotebookRun, server: ServerHandle) -> Levels:
    """Measures every level of the parameters; a level that fails is kept with its reason and the next one goes on."""
    params: BenchmarkParams = run.params  # type: ignore[assignment]
    vocab = vocab_size(run, server)
    api = "chat" if params.dataset == "chat" else params.api
    calibrated = run.measure("calibration", None, take_calibration, streams=max(params.concurrency), api=api)
    return {
        c: run.measure(
            f"level-C{c}",
            server,
            send_level,
            keep_errors=True,
            concurrency=c,
            count=params.num_requests or requests_per_level(c),
            dataset=params.dataset,
            input_len=params.input_len,
            output_len=params.output_len,
            api=params.api,
            seed=params.seed,
            vocab_size=vocab,
            gap_timeout_s=params.gap_timeout_s,
            api_key_env=server.params.api_key_env,
            calibration_file=str(calibrated.folder / "calibration.json"),
        )
        for c in params.concurrency
    }


def vocab_size(run: NotebookRun, server: ServerHandle) -> int | None:
    """The vocabulary size from params or the checkpoint's config.json; None where neither tells (never from a guess)."""
    params: BenchmarkParams = run.params  # type: ignore[assignment]
    checkpoint = None if params.vocab_size else run.checkpoint(server)
    return checkpoint.vocab_size if checkpoint else params.vocab_size


def send_smoke(server: Answering, folder: Path, prompt: str, tokens: int, api_key_env: str | None) -> None:
    """One chat completion, alone and cold, as people try a server by hand (level.jsonl of one request)."""
    made = workloads.make_workload(
        "smoke", [({"role": "user", "content": prompt},)], tokens, 0, 0, {"tokens": tokens}, ignore_eos=False
    )
    server.control.flush_cache()
    run_level(
        server.base_url,
        "chat",
        made.requests,
        out=folder / LEVEL_FILE,
        concurrency=1,
        model=server.control.served_model_name(),
        workload=made.describe(),
        api_key_env=api_key_env,
    )


def level_of(measurement: Measurement) -> Level | None:
    """The raw level of a measurement, None if it left none."""
    file = measurement.folder / LEVEL_FILE
    return read_level(file) if file.exists() else None


def origin_rows(levels: Levels) -> list[dict[str, Any]]:
    """The origin's table, measured here; a level without a record shows why."""
    rows = []
    for c, measurement in levels.items():
        level = level_of(measurement)
        if level is None or measurement.stamp.invalid:
            rows.append({"concurrency": c, "problem": measurement.problem or "no record"})
        else:
            rows.append({**metrics.origin_row(level), "problem": measurement.problem or ""})
    return rows


def figure_rows(levels: Levels) -> list[dict[str, Any]]:
    """Levels as the throughput figure takes them."""
    rows = []
    for c, measurement in levels.items():
        level = level_of(measurement)
        if level is not None and measurement.ok:
            s = metrics.level_summary(level)
            rows.append(
                {
                    "concurrency": c,
                    "output_tokens_per_s": s["output_tokens_per_s"],
                    "ttft_s": s["ttft_s_p50"],
                    "itl_s": s["chunk_gap_s_p50"],
                }
            )
    return rows


def latency_rows(levels: Levels, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Chosen metrics by level; a level that the client spoilt shows the reason instead of a number."""
    rows = []
    for c, measurement in levels.items():
        level = level_of(measurement)
        if level is not None:
            s = metrics.level_summary(level)
            rows.append({"concurrency": c, **{key: s[key] for key in keys}})
    return rows


def failure_rows(levels: Levels) -> list[dict[str, Any]]:
    """Requests that failed, by level and cause; sent = ok + failed."""
    rows = []
    for c, measurement in levels.items():
        level = level_of(measurement)
        if level is None:
            rows.append(
                {"concurrency": c, "sent": 0, "ok": 0, "failed": 0, "causes": measurement.problem or "no record"}
            )
            continue
        causes = metrics.failures(level)
        failed = sum(causes.values())
        words = ", ".join(f"{name}: {n}" for name, n in causes.items()) or "none"
        rows.append(
            {
                "concurrency": c,
                "sent": len(level.requests),
                "ok": len(level.requests) - failed,
                "failed": failed,
                "causes": words,
            }
        )
    return rows


def smoke_rows(measurement: Measurement) -> list[dict[str, Any]]:
    """The smoke test's figure taken apart: how many tokens, how long to the first, how fast after it."""
    level = level_of(measurement)
    if level is None or not level.requests:
        return [{"what": "smoke test", "value": Measured(value=None, reason=measurement.problem or "no record")}]
    words = {
        "output_tokens": "output tokens, as the server counts them",
        "reasoning_tokens": "of these, reasoning tokens",
        "ttft_s": "time to first token",
        "decode_s": "decode time after it",
        "decode_tokens_per_s": "decode rate",
        "tokens_per_s": "tokens over end-to-end time (what a smoke test prints)",
        "ttft_frac": "share of the time before the first token",
    }
    apart = metrics.decompose(level.requests[0])
    return [{"what": text, "value": apart[key]} for key, text in words.items()]


def measure_bandwidth(folder: Path) -> None:
    """Measures this CPU's read bandwidth: the best of five sums over 512 MB (bandwidth.json)."""
    block = np.ones(64 * 1024 * 1024, dtype=np.float64)
    best = 0.0
    for _ in range(5):
        began = time.perf_counter()
        block.sum()
        best = max(best, block.nbytes / (time.perf_counter() - began))
    local.write_atomic(
        folder / "bandwidth.json", json.dumps({"read_bytes_per_s": best, "threads": 1, "bytes": block.nbytes})
    )


def ceiling_at(run: NotebookRun, server: ServerHandle, concurrency: int) -> DecodeCeiling | str:
    """The bandwidth ceiling on this host at one level, or the reason why it isn't computed.

    A dense checkpoint on a CPU, whose read bandwidth is measured with one thread (a server may reach more with several).
    """
    if server.attached:
        return "the model files of an attached server are not read"
    host = run.host()
    if host["gpus"]:
        return "the bandwidth of this host's GPUs is not measured yet; none is assumed"
    checkpoint = run.checkpoint(server)
    if checkpoint is None or checkpoint.weight_bytes is None:
        return "the model files are not read here"
    if checkpoint.architecture is None:
        return checkpoint.architecture_error or "the architecture has no formula here"
    if "experts" in json.dumps(checkpoint.config):
        return "which share of a mixture's weights a step reads depends on routing"
    params: BenchmarkParams = run.params  # type: ignore[assignment]
    measurement = run.measure("bandwidth", None, measure_bandwidth)
    bandwidth = measurement.json("bandwidth.json")["read_bytes_per_s"]
    context = params.input_len + params.output_len / 2
    per_token = kv_bytes_per_token(checkpoint, platform="cpu").per_gpu
    return decode_ceiling(checkpoint.weight_bytes, per_token, context, concurrency, bandwidth)


def predictions(run: NotebookRun, server: ServerHandle, levels: Levels | None = None) -> list[Prediction]:
    """The ceiling at each level, beside what was measured."""
    made = []
    params: BenchmarkParams = run.params  # type: ignore[assignment]
    measured = {row["concurrency"]: row["output_tokens_per_s"] for row in figure_rows(levels or {})}
    for c in params.concurrency:
        ceiling = ceiling_at(run, server, c)
        known = isinstance(ceiling, DecodeCeiling)
        made.append(
            Prediction(
                id=f"ceiling-C{c}",
                what=f"most output tokens per second that memory bandwidth allows at C={c}",
                predicted=Measured(value=ceiling.output_tokens_per_s, unit="tok/s", reason="a ceiling")
                if isinstance(ceiling, DecodeCeiling)
                else Measured(value=None, unit="tok/s", reason=ceiling),
                formula="C / ((weight bytes + C x context x KV bytes per token) / read bandwidth)",
                source="lib.model.roofline.decode_ceiling; bandwidth measured on this host with one thread"
                if known
                else "not computed",
                measured=measured.get(c),
            )
        )
    return made


def trials(run: NotebookRun, levels: Levels) -> list[Trial]:
    """One trial a level: works only if every request did, on one server, with a client that kept up."""
    made = []
    for c, measurement in levels.items():
        level = level_of(measurement)
        outcome, reason = _outcome(measurement, level)
        values = {}
        if level is not None and outcome != "identity_mismatch":
            s = metrics.level_summary(level)
            values = {key: s[key] for key in ("output_tokens_per_s", "ttft_s_p50", "chunk_gap_s_p50")}
        made.append(
            Trial(
                id=f"level-C{c}",
                what=f"closed loop, C={c}",
                outcome=outcome,
                reason=reason,
                values=values,
                evidence=[run.evidence(measurement.folder / (LEVEL_FILE if level else "stamp.json"))],
                launch_ids=measurement.launch_ids,
                seconds=measurement.stamp.seconds,
            )
        )
    return made


def _outcome(measurement: Measurement, level: Level | None) -> tuple[str, str | None]:
    if measurement.stamp.invalid:
        return "identity_mismatch", measurement.stamp.invalid
    if level is None:
        return "crashes", measurement.problem
    causes = metrics.failures(level)
    verdict = metrics.client_verdict(level)
    if verdict.status == "client_bound":
        return "client_bound", "; ".join(verdict.reasons)
    if causes:
        return "crashes", ", ".join(f"{n} {name}" for name, n in causes.items())
    return "works", None


def verdicts(run: NotebookRun, server: ServerHandle, levels: Levels, smoke: Measurement) -> list[Verdict]:
    """What the levels and the smoke test show, each claim with its limit."""
    tried = trials(run, levels)
    made = [
        Verdict(
            id=t.id,
            claim=f"At C={c} every request is answered by the server under test",
            status=t.status,
            measured=t.values.get("output_tokens_per_s"),
            limit="0 failed requests, one server identity, client keeps up",
            rule="lib.load.benchmark",
            reason=t.reason or "all requests ok",
            evidence=t.evidence,
            launch_ids=t.launch_ids,
        )
        for c, t in zip(levels, tried, strict=True)
    ]
    made.append(_scaling(levels, tried))
    made.append(_smoke_verdict(run, levels, smoke))
    return made


def _scaling(levels: Levels, tried: Sequence[Trial]) -> Verdict:
    ids = [i for t in tried for i in t.launch_ids]
    evidence = [e for t in tried for e in t.evidence]
    rates = {c: t.values.get("output_tokens_per_s") for c, t in zip(levels, tried, strict=True) if t.outcome == "works"}
    known = {c: m for c, m in rates.items() if m is not None and isinstance(m.value, (int, float))}
    common: dict[str, Any] = {
        "id": "more-users",
        "claim": "More concurrent requests give more total throughput, up to the highest level",
        "limit": "95% intervals of the lowest and highest level do not overlap",
        "rule": "lib.load.benchmark",
        "evidence": evidence,
        "launch_ids": list(dict.fromkeys(ids)),
    }
    if len(known) < 2:
        return Verdict(status=Status.INCONCLUSIVE, reason="fewer than two levels worked", **common)
    low, high = known[min(known)], known[max(known)]
    gain = Measured(value=float(high.value) / float(low.value), unit="x", n=len(known), reason="ratio of two levels")  # type: ignore[arg-type]
    words = f"C={min(known)}: {float(low.value):.4g} tok/s, C={max(known)}: {float(high.value):.4g} tok/s"  # type: ignore[arg-type]
    if low.high is None or high.low is None or low.low is None or high.high is None:
        return Verdict(status=Status.INCONCLUSIVE, measured=gain, reason=f"{words}; no interval", **common)
    if high.low > low.high:
        return Verdict(status=Status.PASS, measured=gain, reason=words, **common)
    if high.high < low.low:
        return Verdict(status=Status.FAIL, measured=gain, reason=words, **common)
    return Verdict(status=Status.INCONCLUSIVE, measured=gain, reason=f"{words}; intervals overlap", **common)


def _smoke_verdict(run: NotebookRun, levels: Levels, smoke: Measurement) -> Verdict:
    common: dict[str, Any] = {
        "id": "smoke-test",
        "claim": "A smoke test's tokens per second is explained by its time to first token and its decode rate",
        "limit": "tokens over end-to-end time = n / (TTFT + (n - 1) / decode rate + rest), within 5%",
        "rule": "lib.load.metrics.decompose",
        "evidence": [
            run.evidence(smoke.folder / (LEVEL_FILE if (smoke.folder / LEVEL_FILE).exists() else "stamp.json"))
        ],
        "launch_ids": smoke.launch_ids,
    }
    level = level_of(smoke)
    apart = metrics.decompose(level.requests[0]) if level and level.requests else {}
    figure = apart.get("tokens_per_s")
    if smoke.stamp.invalid:
        return Verdict(status=Status.INVALID, reason=smoke.stamp.invalid, **common)
    if figure is None or not isinstance(figure.value, (int, float)):
        return Verdict(
            status=Status.INCONCLUSIVE,
            reason=(figure.reason if figure else None) or smoke.problem or "no answer",
            **common,
        )
    numbers = {k: m.value for k, m in apart.items() if isinstance(m.value, (int, float))}
    needed = ("output_tokens", "ttft_s", "decode_s", "decode_tokens_per_s", "after_last_token_s")
    if any(key not in numbers for key in needed):
        reason = "the answer came in one piece: no decode rate"
        return Verdict(status=Status.INCONCLUSIVE, measured=figure, reason=reason, **common)
    parts = {key: float(numbers[key]) for key in needed}
    total = parts["ttft_s"] + parts["decode_s"] + parts["after_last_token_s"]
    explained = parts["output_tokens"] / total
    words = (
        f"{parts['output_tokens']:.0f} tokens in {parts['ttft_s']:.3f} s to the first, then {parts['decode_tokens_per_s']:.4g} tok/s, "
        f"and {parts['after_last_token_s']:.3f} s after the last"
    )
    status = Status.PASS if abs(explained / float(figure.value) - 1) <= 0.05 else Status.FAIL
    return Verdict(status=status, measured=figure, reason=words, **common)


def recommendation(made: Sequence[Verdict], levels: Levels) -> str:
    """One sentence from the verdicts."""
    bad = [v for v in made if v.status != Status.PASS]
    rows = figure_rows(levels)
    if not rows:
        return "No level gave a usable measurement: read the failures before anything else."
    best = max(rows, key=lambda r: r["output_tokens_per_s"].value or 0)
    text = f"Highest measured throughput: {best['output_tokens_per_s'].value:.4g} tok/s at C={best['concurrency']}"
    return (
        f"{text}; not everything passed: {', '.join(v.id for v in bad)}."
        if bad
        else f"{text}; every request was answered."
    )


def reference_rows(reference: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Published rows from the profile (marked as such), in the origin table's columns."""
    return [dict(row) for row in reference.get(key, [])]


#: Metrics that notebook 03 shows by level, in this order.
LATENCY = ("ttft_s_p50", "ttft_s_p99", "chunk_gap_s_p50", "chunk_gap_s_p99", "token_latency_s_mean", "e2e_s_p50")
#: What shows that the client kept up.
CLIENT = ("client", "client_lag_p99_s", "client_cpu_frac")


def measure_smoke(run: NotebookRun, server: ServerHandle) -> Measurement:
    """The smoke test of the parameters."""
    params: BenchmarkParams = run.params  # type: ignore[assignment]
    return run.measure(
        "smoke",
        server,
        send_smoke,
        keep_errors=True,
        prompt=params.smoke_prompt,
        tokens=params.smoke_tokens,
        api_key_env=server.params.api_key_env,
    )
