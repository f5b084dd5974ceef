"""Notebook 03's measurements: closed-loop levels and a smoke test, each one raw file, and what they say."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lib.errors import BadInput, WorkbookError
from lib.hosts import local
from lib.load import metrics, workloads
from lib.load.client import read_level, run_level
from lib.load.judge import calibrate
from lib.load.metrics import Level
from lib.load.workloads import Workload, requests_per_level
from lib.model.facts import Checkpoint
from lib.model.memory import kv_bytes_per_token
from lib.model.roofline import DecodeCeiling, decode_ceiling
from lib.params import BenchmarkParams
from lib.records import Measured, Prediction, Status, Trial, Verdict
from lib.results import Answering, Measurement, NotebookRun, ServerHandle
from lib.server.remote import calibration_for, load_way

LEVEL_FILE = "level.jsonl"
#: How far a smoke test may lie from what its parts predict: two requests on a shared machine are not the same minute.
SMOKE_TOLERANCE = 0.25
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
    url, sender = load_way(server)
    run_level(
        url,
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
        sender=sender,
    )


def take_calibration(folder: Path, streams: int, api: str, on: Mapping[str, Any] | None = None) -> None:
    """Lets the client prove against the built-in judge that it shows the truth at this load (calibration.json).

    `on` names another host (parameters), on which the client or at least the judge then runs.
    """
    made = calibration_for(on, streams, api) or calibrate(streams, api=api)
    local.write_atomic(folder / "calibration.json", json.dumps(made, default=str))


def measure_levels(run: NotebookRun, server: ServerHandle) -> Levels:
    """Measures every level of the parameters; a level that fails is kept with its reason and the next one goes on."""
    params: BenchmarkParams = run.params  # type: ignore[assignment]
    vocab = vocab_size(run, server)
    if params.dataset == "random_ids" and vocab is None:
        why = "the vocabulary size is not known, and an id outside it kills the server (set vocab_size)"
        run.skip("random-id levels", why)
        return {}
    api = "chat" if params.dataset == "chat" else params.api
    there: dict[str, Any] = {"on": run.profile.host.model_dump()} if run.profile.host.remote else {}
    calibrated = run.measure("calibration", None, take_calibration, streams=max(params.concurrency), api=api, **there)
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
    url, sender = load_way(server)
    run_level(
        url,
        "chat",
        made.requests,
        out=folder / LEVEL_FILE,
        concurrency=1,
        model=server.control.served_model_name(),
        workload=made.describe(),
        api_key_env=api_key_env,
        sender=sender,
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
        if level is not None and not measurement.stamp.invalid:
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
    """The bandwidth ceiling of the decode rate at one level, or the reason why it isn't computed.

    Bandwidth and active weights of one device come from params where they are given. Otherwise: on a CPU the read
    bandwidth of one thread is measured (a server with several threads may read faster), and a dense checkpoint reads all
    its weights but an untied input embedding.
    """
    params: BenchmarkParams = run.params  # type: ignore[assignment]
    checkpoint = run.checkpoint(server)
    if checkpoint is None or checkpoint.architecture is None:
        return (checkpoint.architecture_error if checkpoint else None) or "the model files are not read here"
    weights = params.active_weight_bytes
    if weights is None:
        if "experts" in json.dumps(checkpoint.config):
            return "which share of a mixture's weights a step reads is not known (set active_weight_bytes)"
        if checkpoint.weight_bytes is None:
            return "the checkpoint has no safetensors headers"
        weights = (checkpoint.weight_bytes - _embedding_bytes(checkpoint)) / server.tp_size
    bandwidth = params.bandwidth_bytes_per_s
    if bandwidth is None:
        if run.platform(server) != "cpu":
            return "the bandwidth of this host's GPUs is not known (set bandwidth_bytes_per_s)"
        if run.profile.host.remote:
            return "the bandwidth of another host is not measured from here (set bandwidth_bytes_per_s)"
        bandwidth = run.measure("bandwidth", None, measure_bandwidth).json("bandwidth.json")["read_bytes_per_s"]
    try:
        kv = kv_bytes_per_token(
            checkpoint,
            server.tp_size,
            str(server.params.flags.get("kv_cache_dtype") or "auto"),
            sglang_version=run.version(server),
            platform=run.platform(server),
        ).per_gpu
    except WorkbookError as error:
        return str(error)
    return decode_ceiling(int(weights), kv, params.input_len + params.output_len / 2, concurrency, float(bandwidth))


def _embedding_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of an input embedding of its own (a step looks up one row of it); 0 where it is tied to the head."""
    config = checkpoint.config.get("text_config") or checkpoint.config
    if config.get("tie_word_embeddings", checkpoint.config.get("tie_word_embeddings", True)):
        return 0
    return int(config.get("vocab_size") or 0) * int(config.get("hidden_size") or 0) * 2


def decode_rates(levels: Levels) -> dict[int, Measured]:
    """C times the mean decode rate of a request at each level: what the decode ceiling is compared with."""
    rates = {}
    for c, measurement in levels.items():
        level = level_of(measurement)
        if level is None or not measurement.ok:
            continue
        one = metrics.level_summary(level)["decode_tokens_per_s_mean"]
        if isinstance(one.value, (int, float)):
            low, high = (None if x is None else c * x for x in (one.low, one.high))
            rates[c] = Measured(value=c * one.value, unit="tok/s", n=one.n, low=low, high=high, reason=one.reason)
    return rates


def predictions(run: NotebookRun, server: ServerHandle, levels: Levels | None = None) -> list[Prediction]:
    """The decode ceiling at each level, beside C times the measured decode rate of a request."""
    made = []
    params: BenchmarkParams = run.params  # type: ignore[assignment]
    measured = decode_rates(levels or {})
    for c in params.concurrency:
        ceiling = ceiling_at(run, server, c)
        if isinstance(ceiling, DecodeCeiling):
            predicted = Measured(value=ceiling.output_tokens_per_s, unit="tok/s", reason="a ceiling")
        else:
            predicted = Measured(value=None, unit="tok/s", reason=ceiling)
        made.append(
            Prediction(
                id=f"ceiling-C{c}",
                what=f"decode rate that memory bandwidth allows at C={c}, all requests together",
                predicted=predicted,
                formula="C / ((weight bytes + C x context x KV bytes per token) / read bandwidth)",
                source="lib.model.roofline.decode_ceiling",
                measured=measured.get(c),
            )
        )
    return made


def ceiling_rows(made: Sequence[Prediction]) -> list[dict[str, Any]]:
    """What share of the ceiling is reached at each level."""
    return [
        {"level": p.id.removeprefix("ceiling-"), "ceiling": p.predicted, "decode rate": p.measured, "share": _share(p)}
        for p in made
    ]


def _share(p: Prediction) -> Measured:
    if (
        p.measured is None
        or not isinstance(p.measured.value, (int, float))
        or not isinstance(p.predicted.value, (int, float))
    ):
        return Measured(value=None, reason=p.predicted.reason if p.predicted.value is None else "not measured")
    top = float(p.predicted.value)
    low, high = (None if x is None else x / top for x in (p.measured.low, p.measured.high))
    return Measured(
        value=p.measured.value / top, unit="frac", n=p.measured.n, low=low, high=high, reason=p.measured.reason
    )


def _below_ceiling(run: NotebookRun, levels: Levels, made: Sequence[Prediction]) -> Verdict:
    common: dict[str, Any] = {
        "id": "below-ceiling",
        "claim": "The decode rate stays below the bandwidth ceiling, so the ceiling is not refuted",
        "limit": "measured interval below the ceiling at every level",
        "rule": "lib.model.roofline.decode_ceiling",
        "launch_ids": list(dict.fromkeys(i for m in levels.values() for i in m.launch_ids)),
    }
    shares = {p.id: _share(p) for p in made}
    known = {name: float(m.value) for name, m in shares.items() if isinstance(m.value, (int, float))}
    if not known:
        reason = next((m.reason for m in shares.values() if m.reason), "nothing was measured")
        return Verdict(status=Status.INCONCLUSIVE, reason=reason, **common)
    top = max(known, key=lambda name: known[name])
    evidence = [run.evidence(m.folder / LEVEL_FILE) for m in levels.values() if (m.folder / LEVEL_FILE).exists()]
    if (run.raw / "bandwidth" / "bandwidth.json").exists():
        evidence.append(run.evidence(run.raw / "bandwidth" / "bandwidth.json"))
    words = ", ".join(f"{name.removeprefix('ceiling-')}: {share:.0%}" for name, share in known.items())
    status = Status.PASS if (shares[top].high or known[top]) < 1 else Status.FAIL
    return Verdict(
        status=status,
        measured=shares[top],
        reason=f"share of the ceiling reached: {words}",
        evidence=evidence,
        **common,
    )


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
    if verdict.status != "ok":
        return "not_enough_data", f"every request ok, but the client is {verdict.status}: {'; '.join(verdict.reasons)}"
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
    if not levels:
        reason = run.skipped[-1] if run.skipped else "no level was asked for"
        made.append(Verdict(id="levels", claim="Levels were measured", status=Status.INCONCLUSIVE, reason=reason))
    made.append(_scaling(levels, tried))
    made.append(_below_ceiling(run, levels, predictions(run, server, levels)))
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
        "limit": "the 95% interval of each level lies above the one before (requests of one run; not other days)",
        "rule": "lib.load.benchmark",
        "evidence": evidence,
        "launch_ids": list(dict.fromkeys(ids)),
    }
    if len(known) < 2:
        return Verdict(status=Status.INCONCLUSIVE, reason="fewer than two levels worked", **common)
    steps = sorted(known)
    rate = {c: float(known[c].value) for c in steps}  # type: ignore[arg-type]
    gain = Measured(value=rate[steps[-1]] / rate[steps[0]], unit="x", n=len(known), reason="highest over lowest level")
    words = ", ".join(f"C={c}: {rate[c]:.4g} tok/s" for c in steps)
    if any(m.low is None or m.high is None for m in known.values()):
        return Verdict(status=Status.INCONCLUSIVE, measured=gain, reason=f"{words}; no interval", **common)
    pairs = list(itertools.pairwise(steps))
    falls = [f"C={a} to C={b}" for a, b in pairs if (known[b].high or 0) < (known[a].low or 0)]
    unclear = [f"C={a} to C={b}" for a, b in pairs if not falls and (known[b].low or 0) <= (known[a].high or 0)]
    if falls:
        return Verdict(status=Status.FAIL, measured=gain, reason=f"{words}; it falls from {', '.join(falls)}", **common)
    if unclear:
        return Verdict(
            status=Status.INCONCLUSIVE,
            measured=gain,
            reason=f"{words}; intervals overlap: {', '.join(unclear)}",
            **common,
        )
    return Verdict(status=Status.PASS, measured=gain, reason=words, **common)


def _smoke_verdict(run: NotebookRun, levels: Levels, smoke: Measurement) -> Verdict:
    """Whether the smoke test's figure follows from its wait for the first token and the decode rate of the C=1 level."""
    file = smoke.folder / (LEVEL_FILE if (smoke.folder / LEVEL_FILE).exists() else "stamp.json")
    common: dict[str, Any] = {
        "id": "smoke-test",
        "claim": "The smoke test's tokens per second follow from its time to first token and the decode rate measured at C=1",
        "limit": f"within {SMOKE_TOLERANCE:.0%} of n / (TTFT + (n - 1) / decode rate at C=1)",
        "rule": "lib.load.metrics.decompose",
        "evidence": [run.evidence(file)],
        "launch_ids": smoke.launch_ids,
    }
    if smoke.stamp.invalid:
        return Verdict(status=Status.INVALID, reason=smoke.stamp.invalid, **common)
    level = level_of(smoke)
    apart = metrics.decompose(level.requests[0]) if level and level.requests else {}
    numbers = {k: float(m.value) for k, m in apart.items() if isinstance(m.value, (int, float))}
    if not {"tokens_per_s", "output_tokens", "ttft_s"} <= numbers.keys():
        reason = apart["tokens_per_s"].reason if apart else None
        return Verdict(status=Status.INCONCLUSIVE, reason=reason or smoke.problem or "no answer", **common)
    figure = apart["tokens_per_s"]
    alone = levels.get(1)
    single = level_of(alone) if alone is not None and alone.ok else None
    rate = metrics.level_summary(single)["decode_tokens_per_s_mean"] if single else None
    if alone is None or rate is None or not isinstance(rate.value, (int, float)):
        return Verdict(
            status=Status.INCONCLUSIVE, measured=figure, reason="there is no usable level C=1 to compare with", **common
        )
    common["evidence"].append(run.evidence(alone.folder / LEVEL_FILE))
    common["launch_ids"] = list(dict.fromkeys([*smoke.launch_ids, *alone.launch_ids]))
    n, ttft = numbers["output_tokens"], numbers["ttft_s"]
    expected = n / (ttft + (n - 1) / float(rate.value))
    off = numbers["tokens_per_s"] / expected - 1
    words = (
        f"{n:.0f} tokens, {ttft:.3f} s to the first, then {numbers.get('decode_tokens_per_s', 0):.4g} tok/s "
        f"(C=1 decoded at {rate.value:.4g}): expected {expected:.4g} tok/s, seen {numbers['tokens_per_s']:.4g} ({off:+.0%})"
    )
    predicted = Measured(value=expected, unit="tok/s", reason="computed")
    status = Status.PASS if abs(off) <= SMOKE_TOLERANCE else Status.FAIL
    return Verdict(status=status, measured=figure, predicted=predicted, reason=words, **common)


def recommendation(made: Sequence[Verdict], levels: Levels) -> str:
    """One sentence from the verdicts."""
    bad = [v for v in made if v.status != Status.PASS]
    rows = figure_rows(levels)
    if not rows:
        return "No level gave a usable measurement: read the failures before anything else."
    rows = [r for r in rows if isinstance(r["output_tokens_per_s"].value, (int, float))]
    if not rows:
        return "No request succeeded: read the failures before anything else."
    best = max(rows, key=lambda r: r["output_tokens_per_s"].value)
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
#: Throughput over the whole run and over the window in which all slots were busy.
THROUGHPUT = (
    "output_tokens_per_s",
    "steady_output_tokens_per_s",
    "steady_window_s",
    "request_output_tokens_per_s_mean",
)
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
