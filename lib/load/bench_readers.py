"""Read what benchmark tools write: one row a run, the same names and units whatever the tool calls them.

Understood: SGLang's bench_serving JSONL and text block, its one_batch_server JSONL, vLLM's JSON and text block,
aiperf's (and genai-perf's) JSON, guidellm's JSON, inference-perf's JSON, run-by-run text with warm-ups, and pipe
tables.

Source: sglang/benchmark/serving.py 0.5.15 and one_batch_server.py, vllm/benchmarks/serve.py, the export models of
aiperf 0.13 and guidellm 0.8; public outputs in issue threads.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from statistics import fmean, median, pstdev
from typing import Any

from lib.errors import UnreadableFile
from lib.records import Record
from lib.server.redact import find_secrets, redact_text

STATS = ("mean", "median", "std", "min", "max", "p90", "p95", "p99")


class Stats(Record):
    """A latency's summary as the file has it; what it lacks is None."""

    mean: float | None = None
    median: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None


class BenchRow(Record):
    """One run of a benchmark. None means that the file does not say."""

    format: str
    label: str | None = None
    tool: str
    backend: str | None = None
    model: str | None = None
    dataset: str | None = None
    streaming: bool | None = None
    ignore_eos: bool | None = None
    requested: int | None = None
    completed: int | None = None
    failed: int | None = None
    request_rate_per_s: float | None = None
    request_rate_unlimited: bool | None = None
    max_concurrency: int | None = None
    input_len_asked: float | None = None
    output_len_asked: float | None = None
    output_len_expected: float | None = None
    duration_s: float | None = None
    input_tokens: int | None = None
    input_text_tokens: int | None = None
    input_vision_tokens: int | None = None
    output_tokens: int | None = None
    output_tokens_retokenized: int | None = None
    requests_per_s: float | None = None
    goodput_requests_per_s: float | None = None
    input_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None
    total_tokens_per_s: float | None = None
    peak_output_tokens_per_s: float | None = None
    peak_concurrency: float | None = None
    concurrency: float | None = None
    accept_length: float | None = None
    num_draft_tokens: int | None = None
    num_steps: int | None = None
    decode_tokens_per_s: float | None = None
    wall_tokens_per_s: float | None = None
    runs: int | None = None
    e2e_ms: Stats | None = None
    ttft_ms: Stats | None = None
    ttst_ms: Stats | None = None
    tpot_ms: Stats | None = None
    itl_ms: Stats | None = None
    chunk_gap_ms: Stats | None = None
    client_queue_ms: Stats | None = None


class Details(Record):
    """What a file says beside its rows: per-request lists, warm-ups, repeated runs, odd keys, secrets, faults."""

    row: int | None = None
    ttfts_s: tuple[float, ...] = ()
    output_lens: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()
    errors: tuple[str, ...] = ()
    odd_keys: tuple[str, ...] = ()
    not_numbers: tuple[str, ...] = ()
    repeated: dict[str, tuple[float, ...]] = {}
    nulls: tuple[str, ...] = ()
    server_info: bool = False
    secrets: tuple[str, ...] = ()
    warmup_ttft_ms: tuple[float, ...] = ()
    warmup_runs: int | None = None
    run_sections: int = 0
    summary: dict[str, float] = {}
    runs_mean: dict[str, float] = {}
    all_runs_mean: dict[str, float] = {}
    faults: tuple[str, ...] = ()
    list_lens: dict[str, int] = {}
    failed_counted: bool = False
    lines: tuple[int, ...] = ()


def read_rows(text: str) -> tuple[list[BenchRow], list[Details]]:
    """The rows of a benchmark's output and, for each, what else the file says.

    Raises:
        UnreadableFile: for binary data, JSON that breaks off, and text in which no known form is found.
    """
    if "\0" in text:
        raise UnreadableFile("benchmark output, which is text or JSON", "binary data", "give the tool's result file")
    body = text.removeprefix("\ufeff").strip()
    if not body:
        raise UnreadableFile("benchmark output", "an empty file", "give the tool's result file")
    if body[0] in "{[":
        found = list(_json_documents(body))
    else:
        found = list(_text_rows(body))
    if not found:
        first = next(line for line in body.splitlines() if line.strip())
        raise UnreadableFile(
            "a result of bench_serving, one_batch_server, vLLM, aiperf, guidellm, inference-perf or llmperf",
            f"text that begins {ascii(redact_text(first[:4096])[:60])}",
            "give the tool's JSON or its whole result block",
        )
    return [row for row, _ in found], [details for _, details in found]


def number(value: object) -> float | None:
    """The value as a finite number, None for anything else (also for booleans, NaN and infinity).

    Example: `number("1,234.5 ")` is 1234.5.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        try:
            converted = float(value)
        except OverflowError:
            return None
        return converted if math.isfinite(converted) else None
    if isinstance(value, str):
        match = re.fullmatch(
            r"\s*([+-]?(?:\d{1,3}(?:,\d{3})+|\d{1,30})?(?:\.\d{0,30})?(?:[eE][+-]?\d{1,3})?)\s*", value, re.ASCII
        )
        if match and re.search(r"\d", match[1]):
            try:
                converted = float(match[1].replace(",", ""))
            except ValueError:
                return None
            return converted if math.isfinite(converted) else None
    return None


def count(value: object) -> int | None:
    """The value as a whole number, None where it is none."""
    found = number(value)
    return int(found) if found is not None and abs(found) < 1e18 and found == int(found) else None


# ---- JSON ------------------------------------------------------------------------------------------------------------


def _json_documents(body: str) -> Iterator[tuple[BenchRow, Details]]:
    try:
        documents = [json.loads(body)]
        faults: list[str] = []
        numbers = [1]
    except RecursionError as error:
        raise UnreadableFile("JSON of a benchmark", "JSON nested too deeply", "give the tool's result file") from error
    except ValueError as error:
        documents, numbers, faults = _json_lines(body, error)
    for line, document in zip(numbers, documents, strict=True):
        members = document if isinstance(document, list) else [document]
        for member in members:
            if isinstance(member, dict):
                for row, details in _from_json(member):
                    yield row, details.model_copy(update={"faults": (*details.faults, *faults), "lines": (line,)})
                    faults = []


def _json_lines(body: str, whole: ValueError) -> tuple[list[Any], list[int], list[str]]:
    documents: list[Any] = []
    numbers: list[int] = []
    faults: list[str] = []
    for number_, text in enumerate(body.split("\n"), start=1):
        if not text.strip():
            continue
        try:
            documents.append(json.loads(text))
            numbers.append(number_)
        except RecursionError:
            faults.append(f"line {number_} is nested too deeply")
        except ValueError as error:
            faults.append(f"line {number_} is no JSON ({getattr(error, 'msg', error)})")
    if not any(isinstance(document, dict) for document in documents):
        line, column = getattr(whole, "lineno", "?"), getattr(whole, "colno", "?")
        where = f"line {line}, column {column}: {getattr(whole, 'msg', whole)}"
        raise UnreadableFile("complete JSON of a benchmark", where, "the file may be cut off; copy it again")
    return documents, numbers, faults


def _from_json(data: dict[str, Any]) -> Iterator[tuple[BenchRow, Details]]:
    if isinstance(data.get("benchmarks"), list):
        yield from _guidellm(data)
    elif "last_ttft" in data or ("batch_size" in data and "overall_throughput" in data):
        yield _one_batch(data)
    elif any(
        isinstance(data.get(key), dict) and "unit" in data[key]
        for key in ("request_throughput", "request_latency", "request_count", "time_to_first_token")
    ) or (isinstance(data.get("records"), dict) and "request_latency" in data["records"]):
        yield _aiperf(data)
    elif "request_latency" in data or isinstance(data.get("successes"), dict):
        yield _inference_perf(data)
    elif any(
        key in data
        for key in ("mean_ttft_ms", "request_throughput", "output_throughput", "mean_e2e_latency_ms", "mean_e2el_ms")
    ):
        yield _serving_json(data)
    elif "output_token_throughput" in data and "request_rate" in data:
        yield _serving_json({_OLD_KEYS.get(key, key): value for key, value in data.items()})
    elif "results_num_requests_started" in data or "results_ttft_s_mean" in data:
        yield _llmperf(data)
    elif "avg_latency" in data and isinstance(data.get("percentiles"), dict):
        yield _vllm_latency(data)
    elif "elapsed_time" in data and "requests_per_second" in data:
        yield _vllm_throughput_json(data)


#: bench_serving's first JSONL (2024) had shorter names; its latencies are in ms too.
_OLD_KEYS = {
    "total_input": "total_input_tokens",
    "total_output": "total_output_tokens",
    "output_token_throughput": "output_throughput",
} | {f"{stat}_{word}": f"{stat}_{word}_ms" for stat in ("mean", "median", "p99") for word in ("ttft", "tpot", "itl")}


def _llmperf(data: dict[str, Any]) -> tuple[BenchRow, Details]:
    """llmperf's summary: one flat object; its inter-token latency is (E2E / output tokens), one value a request."""
    not_numbers: list[str] = []

    def stats(word: str) -> Stats | None:
        head = f"results_{word}_s_"
        names = {"mean": "mean", "min": "min", "max": "max", "std": "stddev", "median": "quantiles_p50"}
        names |= {stat: f"quantiles_{stat}" for stat in ("p90", "p95", "p99")}
        return _stats({stat: data.get(head + name) for stat, name in names.items()}, 1e3, head, not_numbers)

    started, done, bad = (
        count(data.get(f"results_{name}"))
        for name in ("num_requests_started", "num_completed_requests", "number_errors")
    )
    per_minute = number(data.get("results_num_completed_requests_per_min"))
    rate = number(data.get("results_mean_output_throughput_token_per_s"))
    length = number(data.get("results_number_output_tokens_mean"))
    row = BenchRow(
        format="llmperf",
        tool="llmperf",
        model=_word(data.get("model")),
        label=_word(data.get("name")),
        requested=started,
        completed=done,
        failed=bad,
        max_concurrency=count(data.get("num_concurrent_requests")),
        input_len_asked=number(data.get("mean_input_tokens")),
        output_len_asked=number(data.get("mean_output_tokens")),
        requests_per_s=per_minute / 60 if per_minute is not None else None,
        output_tokens_per_s=rate,
        output_tokens=round(length * done) if length is not None and done is not None else None,
        ttft_ms=stats("ttft"),
        itl_ms=stats("inter_token_latency"),
        e2e_ms=stats("end_to_end_latency"),
    )
    return row, Details(not_numbers=tuple(not_numbers), failed_counted=bad is not None)


def _vllm_latency(data: dict[str, Any]) -> tuple[BenchRow, Details]:
    """`vllm bench latency`: seconds of whole batches, one after the other; nothing is streamed."""
    not_numbers: list[str] = []
    shares = _mapping(data.get("percentiles"))
    times = _floats(data.get("latencies"))
    wanted = {"mean": data.get("avg_latency"), "median": shares.get("50")}
    wanted |= {f"p{share}": shares.get(str(share)) for share in (90, 95, 99)}
    wanted |= {"min": min(times), "max": max(times)} if times else {}
    row = BenchRow(
        format="vllm_latency",
        tool="vllm bench latency",
        streaming=False,
        completed=len(times) or None,
        duration_s=sum(times) if times else None,
        e2e_ms=_stats(wanted, 1e3, "latency", not_numbers),
    )
    return row, Details(not_numbers=tuple(not_numbers))


def _vllm_throughput_json(data: dict[str, Any]) -> tuple[BenchRow, Details]:
    """`vllm bench throughput --output-json`: one offline run."""
    row = BenchRow(
        format="vllm_throughput",
        tool="vllm bench throughput",
        completed=count(data.get("num_requests")),
        duration_s=number(data.get("elapsed_time")),
        requests_per_s=number(data.get("requests_per_second")),
        total_tokens_per_s=number(data.get("tokens_per_second")),
    )
    return row, Details()


#: Keys of SGLang's and vLLM's JSON -> fields that are plain numbers.
_SERVING = {
    "duration": "duration_s",
    "completed": "completed",
    "failed": "failed",
    "num_prompts": "requested",
    "max_concurrency": "max_concurrency",
    "total_input_tokens": "input_tokens",
    "total_input_text_tokens": "input_text_tokens",
    "total_input_vision_tokens": "input_vision_tokens",
    "total_output_tokens": "output_tokens",
    "total_output_tokens_retokenized": "output_tokens_retokenized",
    "request_throughput": "requests_per_s",
    "request_goodput": "goodput_requests_per_s",
    "input_throughput": "input_tokens_per_s",
    "output_throughput": "output_tokens_per_s",
    "total_throughput": "total_tokens_per_s",
    "total_token_throughput": "total_tokens_per_s",
    "max_output_tokens_per_s": "peak_output_tokens_per_s",
    "max_concurrent_requests": "peak_concurrency",
    "concurrency": "concurrency",
    "accept_length": "accept_length",
    "spec_decode_acceptance_length": "accept_length",
    "random_input_len": "input_len_asked",
    "input_len": "input_len_asked",
    "output_len": "output_len_asked",
    "random_output_len": "output_len_asked",
}
_COUNTS = frozenset(
    {
        "completed",
        "failed",
        "requested",
        "max_concurrency",
        "input_tokens",
        "input_text_tokens",
        "input_vision_tokens",
        "output_tokens",
        "output_tokens_retokenized",
        "num_draft_tokens",
        "num_steps",
        "runs",
    }
)
_LATENCIES = {
    "e2e_latency": "e2e_ms",
    "e2el": "e2e_ms",
    "ttft": "ttft_ms",
    "tpot": "tpot_ms",
    "itl": "itl_ms",
    "client_queue_time": "client_queue_ms",
}
#: Lists with one entry for each request that was sent.
_PER_REQUEST = ("input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors")
_SHAREGPT_LIKE = ("random", "random-ids", "random_ids", "generated-shared-prefix", "image")


def _serving_json(data: dict[str, Any]) -> tuple[BenchRow, Details]:
    odd = tuple(key for key in data if isinstance(key, str) and key.rstrip(":; ") != key)
    data = {(key.rstrip(":; ") if isinstance(key, str) else key): value for key, value in data.items()}
    fields: dict[str, Any] = {}
    not_numbers: list[str] = []
    for key, field in _SERVING.items():
        if data.get(key) is None or field in fields:
            continue
        value = count(data[key]) if field in _COUNTS else number(data[key])
        if value is None:
            not_numbers.append(key)
        else:
            fields[field] = value
    nulls = []
    for word, field in _LATENCIES.items():
        values: dict[str, float] = {}
        for stat in STATS:
            key = f"{stat}_{word}_ms"
            if key in data and data[key] is None:
                nulls.append(key)
            elif key in data:
                value = number(data[key])
                if value is None:
                    not_numbers.append(key)
                else:
                    values[stat] = value
        if values:
            fields[field] = Stats(**values)
    vllm = any(key in data for key in ("total_token_throughput", "tokenizer_id", "endpoint_type", "burstiness"))
    rate = data.get("request_rate")
    if rate == "inf" or (isinstance(rate, float) and math.isinf(rate)):
        fields["request_rate_unlimited"] = True
    elif number(rate) is not None:
        fields |= {"request_rate_per_s": number(rate), "request_rate_unlimited": False}
    fields |= {
        "format": "vllm_json" if vllm else "sglang_jsonl",
        "tool": "vllm bench serve" if vllm else "sglang.bench_serving",
        "backend": _word(data.get("backend") or data.get("endpoint_type")),
        "model": _word(data.get("model_id") or _of_server(data.get("server_info"), "model_path")),
        "dataset": _word(data.get("dataset_name")),
        "label": _word(data.get("tag") or data.get("label")),
    }
    for key, field in (("speculative_num_draft_tokens", "num_draft_tokens"), ("speculative_num_steps", "num_steps")):
        told = count(_of_server(data.get("server_info"), key))
        if told is not None:
            fields.setdefault(field, told)
    if fields.get("max_concurrency") == 0:
        fields.pop("max_concurrency")
    _expected_length(fields, number(data.get("random_range_ratio")), number(data.get("sharegpt_output_len")), vllm)
    errors = data.get("errors")
    errors = tuple(str(error)[:200] for error in errors if error) if isinstance(errors, list) else ()
    lens = data.get("output_lens")
    if isinstance(lens, list) and "requested" not in fields:
        fields["requested"] = len(lens)
    if "failed" not in fields and isinstance(data.get("errors"), list):
        fields["failed"] = len(errors)
    if "requested" not in fields and fields.get("failed") is not None and fields.get("completed") is not None:
        fields["requested"] = fields["failed"] + fields["completed"]
    itls = data.get("itls")
    details = Details(
        ttfts_s=_floats(data.get("ttfts")),
        output_lens=tuple(int(x) for x in _floats(lens)),
        chunks=tuple(len(item) for item in itls if isinstance(item, list)) if isinstance(itls, list) else (),
        errors=errors,
        odd_keys=odd,
        not_numbers=tuple(not_numbers),
        nulls=tuple(nulls),
        list_lens={key: len(data[key]) for key in _PER_REQUEST if isinstance(data.get(key), list)},
        failed_counted=count(data.get("failed")) is not None,
        server_info=bool(data.get("server_info")),
        secrets=find_secrets(data.get("server_info")) if data.get("server_info") else (),
    )
    return BenchRow(**fields), details


def _expected_length(fields: dict[str, Any], ratio: float | None, sharegpt_len: float | None, vllm: bool) -> None:
    """The mean output length that the workload asked for: SGLang draws uniformly from [max(1, L r), L], vLLM asks L."""
    asked = fields.get("output_len_asked")
    if sharegpt_len is not None and fields.get("dataset") == "sharegpt":
        fields["output_len_expected"] = fields["output_len_asked"] = sharegpt_len
    elif asked is None or (not vllm and fields.get("dataset") not in (None, *_SHAREGPT_LIKE)):
        if not vllm:
            fields.pop("output_len_asked", None)
            fields.pop("input_len_asked", None)
    elif vllm:
        fields["output_len_expected"] = asked
    elif ratio is not None:
        fields["output_len_expected"] = (max(1.0, asked * ratio) + asked) / 2


def _one_batch(data: dict[str, Any]) -> tuple[BenchRow, Details]:
    batch, latency = count(data.get("batch_size")), number(data.get("latency"))
    input_len, output_len = number(data.get("input_len")), number(data.get("output_len"))
    total = count(data.get("total_output_tokens"))
    accept = number(data.get("acc_length"))
    last_ttft = number(data.get("last_ttft"))
    row = BenchRow(
        format="sglang_one_batch",
        tool="sglang one_batch_server",
        label=_word(data.get("run_name")),
        requested=batch,
        completed=batch,
        max_concurrency=batch,
        input_len_asked=input_len,
        output_len_asked=output_len,
        output_len_expected=output_len,
        duration_s=latency,
        input_tokens=int(batch * input_len) if batch and input_len is not None else None,
        output_tokens=total
        if total is not None
        else int(batch * output_len)
        if batch and output_len is not None
        else None,
        input_tokens_per_s=number(data.get("input_throughput")),
        output_tokens_per_s=number(data.get("output_throughput")),
        total_tokens_per_s=number(data.get("overall_throughput")),
        accept_length=accept if accept is not None and accept > 0 else None,
        ttft_ms=Stats(max=last_ttft * 1e3) if last_ttft is not None else None,
        requests_per_s=batch / latency if batch and latency else None,
        streaming=True,
    )
    bad = tuple(
        key
        for key in ("latency", "input_throughput", "output_throughput", "last_ttft")
        if key in data and number(data[key]) is None
    )
    return row, Details(not_numbers=bad)


_TO_MS = {
    "ms": 1.0,
    "millisecond": 1.0,
    "milliseconds": 1.0,
    "s": 1e3,
    "sec": 1e3,
    "seconds": 1e3,
    "us": 1e-3,
    "ns": 1e-6,
}


def _aiperf(data: dict[str, Any]) -> tuple[BenchRow, Details]:
    metrics: Mapping[str, Any] = data["records"] if isinstance(data.get("records"), dict) else data
    not_numbers: list[str] = []

    def value(key: str) -> float | None:
        member = metrics.get(key)
        if not isinstance(member, dict) or member.get("avg") is None:
            return None
        found = number(member["avg"])
        if found is None:
            not_numbers.append(key)
        return found

    def stats(key: str) -> Stats | None:
        member = metrics.get(key)
        if not isinstance(member, dict):
            return None
        factor = _TO_MS.get(str(member.get("unit", "ms")).lower())
        if factor is None:
            return None
        return _stats(
            {"mean": member.get("avg"), "median": member.get("p50"), **{k: member.get(k) for k in STATS[2:]}},
            factor,
            key,
            not_numbers,
        )

    config = _mapping(data.get("input_config"))
    loadgen = _mapping(config.get("loadgen"))
    endpoint = _mapping(config.get("endpoint"))
    good, bad = value("request_count"), value("error_request_count")
    ttft, per_token = stats("time_to_first_token"), stats("inter_token_latency")
    e2e = stats("request_latency")
    out_len, asked_len = value("output_sequence_length"), value("requested_osl")
    rate = number(loadgen.get("request_rate"))
    completed = count(good)
    names = endpoint.get("model_names")
    row = BenchRow(
        format="aiperf",
        tool="aiperf",
        model=_word(names[0] if isinstance(names, list) and names else None),
        streaming=endpoint.get("streaming")
        if isinstance(endpoint.get("streaming"), bool)
        else (True if ttft else None),
        completed=completed,
        failed=count(bad),
        requested=completed + int(bad)
        if completed is not None and bad is not None
        else count(loadgen.get("request_count")),
        request_rate_per_s=rate,
        request_rate_unlimited=False if rate else None,
        max_concurrency=count(loadgen.get("concurrency")),
        output_len_asked=asked_len,
        output_len_expected=asked_len,
        duration_s=value("benchmark_duration"),
        input_tokens=count(value("total_isl")),
        output_tokens=count(value("total_osl") or value("total_output_tokens"))
        or (round(out_len * completed) if out_len is not None and completed else None),
        requests_per_s=value("request_throughput"),
        goodput_requests_per_s=value("goodput"),
        output_tokens_per_s=value("output_token_throughput"),
        total_tokens_per_s=value("total_token_throughput"),
        accept_length=value("spec_decode_token_weighted_acceptance_length"),
        e2e_ms=e2e,
        ttft_ms=ttft,
        ttst_ms=stats("time_to_second_token"),
        tpot_ms=per_token,
        chunk_gap_ms=stats("inter_chunk_latency"),
    )
    summary = data.get("error_summary")
    errors = tuple(str(item)[:200] for item in summary[:20]) if isinstance(summary, list) else ()
    faults = ("the run was cancelled",) if data.get("was_cancelled") is True else ()
    return row, Details(
        not_numbers=tuple(not_numbers),
        errors=errors,
        faults=faults,
        warmup_runs=1 if data.get("warmup_metrics") else None,
    )


def _guidellm(data: dict[str, Any]) -> Iterator[tuple[BenchRow, Details]]:
    for benchmark in data["benchmarks"]:
        if not isinstance(benchmark, dict) or not isinstance(benchmark.get("metrics"), dict):
            continue
        metrics = benchmark["metrics"]
        not_numbers: list[str] = []

        def part(key: str, status: str = "successful", metrics: dict[str, Any] = metrics) -> dict[str, Any]:
            member = metrics.get(key)
            member = member.get(status) if isinstance(member, dict) else None
            return member if isinstance(member, dict) else {}

        def stats(
            key: str, factor: float = 1.0, part: Any = part, not_numbers: list[str] = not_numbers
        ) -> Stats | None:
            member = part(key)
            percentiles = _mapping(member.get("percentiles"))
            source = {
                "mean": member.get("mean"),
                "median": member.get("median"),
                "std": member.get("std_dev"),
                "min": member.get("min"),
                "max": member.get("max"),
                **{key: percentiles.get(key) for key in ("p90", "p95", "p99")},
            }
            return _stats(source, factor, key, not_numbers)

        totals = _mapping(
            metrics.get("request_totals")
            or benchmark.get("request_totals")
            or _mapping(benchmark.get("run_stats")).get("requests_made")
        )
        config = _mapping(benchmark.get("config"))
        arguments = _mapping(benchmark.get("args"))
        strategy = _mapping(config.get("strategy") or arguments.get("strategy"))
        kind = str(strategy.get("type_") or "")
        streams = count(strategy.get("streams")) or (1 if kind == "synchronous" else None)
        good = count(totals.get("successful"))
        incomplete = count(totals.get("incomplete"))
        outputs = part("output_token_count")
        prompts = part("prompt_token_count")
        rate = number(strategy.get("rate")) if kind in ("constant", "poisson") else None
        row = BenchRow(
            format="guidellm",
            tool="guidellm",
            label=kind or None,
            streaming=True if part("time_to_first_token_ms") else None,
            completed=good,
            failed=count(totals.get("errored")),
            requested=_without(count(totals.get("total")), incomplete),
            request_rate_per_s=rate,
            request_rate_unlimited=False if rate else (True if kind == "throughput" else None),
            max_concurrency=streams or count(strategy.get("max_concurrency")),
            duration_s=number(benchmark.get("duration")),
            input_tokens=count(prompts.get("total_sum")),
            output_tokens=count(outputs.get("total_sum")),
            requests_per_s=number(part("requests_per_second").get("mean")),
            output_tokens_per_s=number(part("output_tokens_per_second").get("mean")),
            input_tokens_per_s=number(part("prompt_tokens_per_second").get("mean")),
            total_tokens_per_s=number(part("tokens_per_second").get("mean")),
            concurrency=number(part("request_concurrency").get("mean")),
            e2e_ms=stats("request_latency", 1e3),
            ttft_ms=stats("time_to_first_token_ms"),
            tpot_ms=stats("inter_token_latency_ms"),
        )
        faults = (f"{incomplete} requests were still running at the end and count nowhere",) if incomplete else ()
        yield row, Details(not_numbers=tuple(not_numbers), faults=faults)


def _without(total: int | None, incomplete: int | None) -> int | None:
    """Requests that ended: those cut off by the end of the run neither succeeded nor failed."""
    return total - (incomplete or 0) if total is not None and total >= (incomplete or 0) else total


def _inference_perf(data: dict[str, Any]) -> tuple[BenchRow, Details]:
    successes = _mapping(data.get("successes"))
    failures = _mapping(data.get("failures"))
    load = _mapping(data.get("load_summary"))
    places: list[Mapping[str, Any]] = [data]
    for key in ("latency", "throughput"):
        if isinstance(successes.get(key), dict):
            places.append(successes[key])
    places.append(successes)
    nulls: list[str] = []
    not_numbers: list[str] = []

    def find(key: str) -> Any:
        for place in places:
            if key in place:
                if place[key] is None:
                    nulls.append(key)
                return place[key]
        return None

    def stats(key: str) -> Stats | None:
        member = find(key)
        if not isinstance(member, dict):
            return None
        return _stats(
            {**{k: member.get(k) for k in STATS}, "median": member.get("median", member.get("p50"))},
            1e3,
            key,
            not_numbers,
        )

    ttft, tpot, itl = stats("time_to_first_token"), stats("time_per_output_token"), stats("inter_token_latency")
    good, bad = count(successes.get("count")), count(failures.get("count"))
    missing = {"time_to_first_token", "inter_token_latency"} & set(nulls)
    row = BenchRow(
        format="inference_perf",
        tool="inference-perf",
        streaming=False if missing else (True if ttft else None),
        completed=good,
        failed=bad,
        requested=good + bad if good is not None and bad is not None else count(load.get("count")),
        requests_per_s=number(find("requests_per_sec")),
        request_rate_per_s=number(load.get("requested_rate")),
        input_tokens_per_s=number(find("input_tokens_per_sec")),
        output_tokens_per_s=number(find("output_tokens_per_sec")),
        total_tokens_per_s=number(find("total_tokens_per_sec")),
        duration_s=number(load.get("send_duration")),
        e2e_ms=stats("request_latency"),
        ttft_ms=ttft,
        tpot_ms=tpot,
        itl_ms=itl,
    )
    return row, Details(nulls=tuple(dict.fromkeys(nulls)), not_numbers=tuple(not_numbers))


def _stats(source: Mapping[str, Any], factor: float, name: str, not_numbers: list[str]) -> Stats | None:
    values: dict[str, float] = {}
    for key in STATS:
        raw = source.get(key)
        if raw is None:
            continue
        value = number(raw)
        if value is None:
            not_numbers.append(f"{name}.{key}")
        else:
            values[key] = value * factor
    return Stats(**values) if values else None


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _floats(value: object) -> tuple[float, ...]:
    if not isinstance(value, list):
        return ()
    return tuple(found for found in (number(item) for item in value) if found is not None)


def _word(value: object) -> str | None:
    return (
        str(value)[:200]
        if isinstance(value, (str, int, float)) and not isinstance(value, bool) and value != ""
        else None
    )


def _of_server(info: object, key: str) -> object:
    """A resolved argument in the `server_info` that bench_serving embeds in its record."""
    return info.get(key) if isinstance(info, dict) else None


# ---- text ------------------------------------------------------------------------------------------------------------

#: Labels of the result blocks (lower case, without units) -> fields.
_LABELS = {
    "backend": "backend",
    "traffic request rate": "_rate",
    "request rate configured": "_rate",
    "max request concurrency": "max_concurrency",
    "max reqeuest concurrency": "max_concurrency",
    "maximum request concurrency": "max_concurrency",
    "successful requests": "completed",
    "failed requests": "failed",
    "benchmark duration": "duration_s",
    "total input tokens": "input_tokens",
    "total input text tokens": "input_text_tokens",
    "total input vision tokens": "input_vision_tokens",
    "total generated tokens": "output_tokens",
    "total generated tokens (retokenized)": "output_tokens_retokenized",
    "request throughput": "requests_per_s",
    "request goodput": "goodput_requests_per_s",
    "input token throughput": "input_tokens_per_s",
    "output token throughput": "output_tokens_per_s",
    "peak output token throughput": "peak_output_tokens_per_s",
    "peak concurrent requests": "peak_concurrency",
    "total token throughput": "total_tokens_per_s",
    "total throughput": "total_tokens_per_s",
    "concurrency": "concurrency",
    "accept length": "accept_length",
    "acceptance length": "accept_length",
}
_LATENCY_LABEL = re.compile(
    r"(mean|median|std|p90|p95|p99|max|min) (e2e latency|e2el|ttft|tpot|itl|client queue time)$"
)
_LATENCY_FIELD = {
    "e2e latency": "e2e_ms",
    "e2el": "e2e_ms",
    "ttft": "ttft_ms",
    "tpot": "tpot_ms",
    "itl": "itl_ms",
    "client queue time": "client_queue_ms",
}
_LINE = re.compile(r"\s*(?:[#>|]\s?)?\s*([A-Za-z][A-Za-z0-9 ()/%.-]{2,50}?)\s*:\s+(\S[^|]*?)\s*\|?\s*$")
_UNIT = re.compile(r"\s{0,20}\((?:s|ms|req/s|tok/s|rps|tokens/s)\)\s*$", re.IGNORECASE)
_TITLE = re.compile(r"={4}\s{0,80}Serving Benchmark Result\s{0,80}={4}")
_OPTION = re.compile(r"--([a-z][a-z0-9-]*)(?:[ =]+((?!--)[^\s\\]+))?")
_ARGUMENT = re.compile(r"\b([a-z_]+)=('[^']*'|\"[^\"]*\"|[^,()\s]+)")
_LISTED = r"\d{1,12}(?:\.\d{1,9})?(?:\s?(?:ms|s|tok/s)\b)?"
_NUMBER_LIST = rf"{_LISTED}(?:(?:[\s,/;]|and)+{_LISTED}){{2,40}}"
_PROSE_METRIC = re.compile(
    rf"\b(TTFT|TPOT|ITL|E2E(?: latency)?|(?:output )?throughput|tok(?:ens)?/s)\b[^\n\d]{{0,40}}({_NUMBER_LIST})",
    re.IGNORECASE,
)


def _text_rows(body: str) -> Iterator[tuple[BenchRow, Details]]:
    lines = body.splitlines()
    blocks = _blocks(lines)
    for index, (start, end) in enumerate(blocks):
        before = lines[blocks[index - 1][1] if index else 0 : start]
        found = _block_row(lines[start:end], before)
        if found:
            row, details = found
            yield row, details.model_copy(update={"lines": (start + 1,)})
    if blocks:
        return
    yield from _runs_text(lines)
    yield from _pipe_table(lines)
    yield from _throughput_lines(lines)


def _blocks(lines: list[str]) -> list[tuple[int, int]]:
    """First and last line (exclusive) of each result block: after its title, or wherever known labels stand."""
    starts = [index for index, line in enumerate(lines) if _TITLE.search(line)]
    if not starts:
        names = [(_label(line) or ("", ""))[0] for line in lines]
        known = [index for index, name in enumerate(names) if name in ("completed", "duration_s")]
        if not known:
            return []
        first = next(index for index, name in enumerate(names) if name)
        repeats = [index for index, name in enumerate(names) if name == "completed"]
        starts = [first] if len(repeats) < 2 else [min(first, repeats[0]), *repeats[1:]]
    blocks = []
    for index, start in enumerate(starts):
        limit = starts[index + 1] if index + 1 < len(starts) else len(lines)
        last = max((at for at in range(start, limit) if _label(lines[at])), default=start)
        blocks.append((start, last + 1))
    return blocks


def _label(line: str) -> tuple[str, str] | None:
    """The field and the text of its value that a line of a block gives."""
    match = _LINE.match(line) if len(line) < 300 else None
    if not match:
        return None
    name = _UNIT.sub("", match[1].strip().lower())
    if name in _LABELS:
        return _LABELS[name], match[2]
    latency = _LATENCY_LABEL.match(name)
    return (f"{_LATENCY_FIELD[latency[2]]}.{latency[1]}", match[2]) if latency else None


def _block_row(block: list[str], before: list[str]) -> tuple[BenchRow, Details] | None:
    fields: dict[str, Any] = {}
    stats: dict[str, dict[str, float]] = {}
    not_numbers: list[str] = []
    for line in block:
        found = _label(line)
        if found is None:
            continue
        field, text = found
        if field == "backend":
            fields[field] = text
        elif field == "_rate":
            fields |= _rate_fields(text)
        elif text.lower() in ("not set", "none", "null", "n/a", "-"):
            continue
        else:
            value: float | None = count(text) if field in _COUNTS else number(text)
            if value is None:
                not_numbers.append(field)
            elif "." in field:
                name, stat = field.split(".")
                stats.setdefault(name, {})[stat] = value
            else:
                fields[field] = value
    if "completed" not in fields and "output_tokens_per_s" not in fields and "requests_per_s" not in fields:
        return None
    fields |= {name: Stats(**values) for name, values in stats.items()}
    for line in before[-40:]:
        found = _label(line)  # vLLM prints rate and concurrency before the block
        if found and found[0] == "_rate" and "request_rate_unlimited" not in fields:
            fields |= _rate_fields(found[1])
        elif (
            found and found[0] == "max_concurrency" and "max_concurrency" not in fields and count(found[1]) is not None
        ):
            fields["max_concurrency"] = count(found[1])
    options = _options(before)
    sglang = (
        "backend" in fields or "e2e_ms" in fields or "concurrency" in fields or any("sglang" in line for line in before)
    )
    fields.setdefault("backend", options.get("backend"))
    for option, field in (
        ("num-prompts", "requested"),
        ("max-concurrency", "max_concurrency"),
        ("speculative-num-steps", "num_steps"),
        ("speculative-num-draft-tokens", "num_draft_tokens"),
    ):
        if fields.get(field) is None and count(options.get(option)) is not None:
            fields[field] = count(options[option])
    for option, field in (
        ("random-output-len", "output_len_asked"),
        ("random-input-len", "input_len_asked"),
        ("output-len", "output_len_asked"),
        ("request-rate", "request_rate_per_s"),
    ):
        if fields.get(field) is None and number(options.get(option)) is not None:
            fields[field] = number(options[option])
    dataset = options.get("dataset-name")
    fields |= {
        "format": "sglang_text" if sglang else "vllm_text",
        "tool": "sglang.bench_serving" if sglang else "vllm bench serve",
        "model": options.get("model"),
        "dataset": dataset,
        "label": options.get("tag"),
    }
    if "disable-ignore-eos" in options:
        fields["ignore_eos"] = options["disable-ignore-eos"] == "False"
    elif "ignore-eos" in options:
        fields["ignore_eos"] = True
    if options.get("disable-stream") not in (None, "False"):
        fields["streaming"] = False
    ratio = number(options.get("random-range-ratio"))
    _expected_length(fields, ratio, number(options.get("sharegpt-output-len")), not sglang)
    if fields.get("requested") is None and fields.get("failed") is not None and fields.get("completed") is not None:
        fields["requested"] = fields["failed"] + fields["completed"]
    if fields.get("failed") is None and fields.get("requested") is not None and fields.get("completed") is not None:
        fields["failed"] = max(0, fields["requested"] - fields["completed"])
    prose = "\n".join(line for line in before if "=" not in line)
    return BenchRow(**fields), Details(not_numbers=tuple(not_numbers), repeated=_repeated(prose))


def _rate_fields(text: str) -> dict[str, Any]:
    if text.lower() in ("inf", "infinity"):
        return {"request_rate_unlimited": True}
    rate = number(text)
    return {"request_rate_per_s": rate, "request_rate_unlimited": False} if rate is not None else {}


def _options(lines: list[str]) -> dict[str, str]:
    """Options of the last command line and of the last argument dump before a block; names with '-'."""
    found: dict[str, str] = {}
    for line in lines[-200:]:
        if len(line) > 100_000:
            continue
        if "Namespace(" in line:
            for name, value in _ARGUMENT.findall(line):
                text = value.strip("'\"")
                if text not in ("None", ""):
                    found[name.replace("_", "-")] = text
        else:
            for name, value in _OPTION.findall(line):
                found[name] = value.strip("'\"") if value else "True"
    return found


def _repeated(prose: str) -> dict[str, tuple[float, ...]]:
    """Values of several runs that prose lists after a metric's name: 'a TTFT of 1.2, 1.3 and 9 ms in three tests'."""
    found: dict[str, tuple[float, ...]] = {}
    for match in _PROSE_METRIC.finditer(prose[:20_000]):
        values = tuple(float(item) for item in re.findall(r"\d+(?:\.\d+)?", match[2]))
        name = match[1].lower().split()[0]
        field = {"ttft": "ttft_ms", "tpot": "tpot_ms", "itl": "itl_ms", "e2e": "e2e_ms"}.get(
            name, "output_tokens_per_s"
        )
        if len(values) >= 3:
            found.setdefault(field, values)
    return found


_THROUGHPUT = re.compile(
    r"Throughput: ([\d.]{1,20}) requests/s(?:, ([\d.]{1,20}) (?:total )?tokens/s)?(?:, ([\d.]{1,20}) output tokens/s)?"
)


def _throughput_lines(lines: list[str]) -> Iterator[tuple[BenchRow, Details]]:
    """vLLM's offline benchmark: one line with requests/s, total tokens/s and output tokens/s."""
    for number_, line in enumerate(lines, start=1):
        match = _THROUGHPUT.search(line)
        if match and number(match[1]) is not None:
            total, output = number(match[2] or ""), number(match[3] or "")
            yield (
                BenchRow(
                    format="vllm_throughput",
                    tool="vllm bench throughput",
                    requests_per_s=number(match[1]),
                    total_tokens_per_s=total,
                    output_tokens_per_s=output,
                ),
                Details(lines=(number_,)),
            )


_SECTION = re.compile(r"^\s*={3,}\s*([^=\s](?:.*[^=\s])?)\s*={3,}\s*$")
_PAIRS = re.compile(r"(?<![\w./])([A-Za-z][\w./]{0,60})\s{0,20}=\s{0,20}([0-9]+(?:\.[0-9]+)?)\s*(ms|s|%)?(?![\w.])")
_RUN_LABEL = re.compile(r"^\s*([A-Za-z][\w -]{0,30}?)\s*[-_# ]?(\d{1,9})(?:\s*:)?\s+(?=[A-Za-z])")
_RUN_FIELDS = {
    "wall": "duration_s",
    "ttft": "ttft_ms",
    "toks": "output_tokens",
    "tokens": "output_tokens",
    "wall_tps": "wall_tokens_per_s",
    "decode_tps": "decode_tokens_per_s",
    "tps": "output_tokens_per_s",
    "tok/s": "output_tokens_per_s",
    "tpot": "tpot_ms",
}


def _runs_text(lines: list[str]) -> Iterator[tuple[BenchRow, Details]]:
    """Text with one line a run (`run-1 wall= 13.2s ttft= 142ms ...`) in sections, warm-ups apart."""
    group: str | None = None
    asked: float | None = None
    warm: list[dict[str, float]] = []
    measured: list[dict[str, float]] = []
    summary: dict[str, float] = {}
    sections: set[str] = set()
    section = ""
    pending: list[
        tuple[str | None, float | None, list[dict[str, float]], list[dict[str, float]], dict[str, float], set[str]]
    ] = []

    def close() -> None:
        nonlocal warm, measured, summary, sections
        if measured or warm or summary:
            pending.append((group, asked, warm, measured, summary, sections))
        warm, measured, summary, sections = [], [], {}, set()

    for line in lines:
        if len(line) > 2000:
            continue
        title = _SECTION.match(line)
        if title:
            section = title[1].lower()
            if not re.search(r"warm|measur|summary|run|result", section):
                close()
                group = re.sub(r"\s*\(.*", "", title[1]) or None
                limit = re.search(r"(?:max_tokens|output_len|osl)\s*=\s*(\d+)", title[1])
                asked = float(limit[1]) if limit else None
            continue
        statistics = re.match(r"\s*([A-Za-z][\w/]*)\s+mean\s*=\s*([0-9.]+)\s*(ms|s)?", line)
        if statistics and number(statistics[2]) is not None:
            key = _RUN_FIELDS.get(statistics[1].lower())
            if key:
                summary[key] = _scaled(key, float(number(statistics[2]) or 0), statistics[3])
            continue
        label = _RUN_LABEL.match(line)
        pairs = {key.lower(): (float(value), unit) for key, value, unit in _PAIRS.findall(line)}
        run = {
            _RUN_FIELDS[key]: _scaled(_RUN_FIELDS[key], value, unit)
            for key, (value, unit) in pairs.items()
            if key in _RUN_FIELDS
        }
        if len(run) < 2 or not (label or "run" in section or "measur" in section or "warm" in section):
            continue
        is_warm = "warm" in section or bool(label and "warm" in label[1].lower())
        (warm if is_warm else measured).append(run)
        sections.add("warm-ups" if is_warm else "measured")
    close()
    for name, limit_, warm_, measured_, summary_, sections_ in pending:
        yield _runs_row(name, limit_, warm_, measured_, summary_, len(sections_))


def _scaled(field: str, value: float, unit: str | None) -> float:
    """A run's value in its field's unit."""
    if field.endswith("_ms"):
        return value * 1e3 if unit == "s" else value
    if field.endswith("_s") and unit == "ms":
        return value / 1e3
    return value


def _runs_row(
    name: str | None,
    asked: float | None,
    warm: list[dict[str, float]],
    measured: list[dict[str, float]],
    summary: dict[str, float],
    sections: int,
) -> tuple[BenchRow, Details]:
    def mean(runs: list[dict[str, float]]) -> dict[str, float]:
        keys = {key for run in runs for key in run}
        return {key: fmean(run[key] for run in runs if key in run) for key in sorted(keys)}

    def stats(key: str) -> Stats | None:
        values = [run[key] for run in measured if key in run]
        if not values:
            return Stats(mean=summary[key]) if key in summary else None
        return Stats(mean=fmean(values), median=median(values), std=pstdev(values), min=min(values), max=max(values))

    means = mean(measured)
    duration = sum(run.get("duration_s", 0.0) for run in measured)
    tokens = sum(run.get("output_tokens", 0.0) for run in measured)
    row = BenchRow(
        format="runs_text",
        tool="a script",
        label=name,
        runs=len(measured) or None,
        completed=len(measured) or None,
        output_len_asked=asked,
        output_len_expected=None,
        duration_s=duration or None,
        output_tokens=int(tokens) if tokens else None,
        max_concurrency=None,
        output_tokens_per_s=means.get("output_tokens_per_s"),
        wall_tokens_per_s=means.get("wall_tokens_per_s", summary.get("wall_tokens_per_s")),
        decode_tokens_per_s=means.get("decode_tokens_per_s", summary.get("decode_tokens_per_s")),
        ttft_ms=stats("ttft_ms"),
        tpot_ms=stats("tpot_ms"),
    )
    details = Details(
        warmup_ttft_ms=tuple(run["ttft_ms"] for run in warm if "ttft_ms" in run),
        warmup_runs=len(warm),
        run_sections=sections,
        summary=summary,
        runs_mean=means,
        all_runs_mean=mean([*warm, *measured]),
        repeated={
            key: tuple(run[key] for run in measured if key in run)
            for key in ("ttft_ms", "decode_tokens_per_s", "output_tokens_per_s")
            if sum(key in run for run in measured) >= 2
        },
    )
    return row, details


_COLUMNS: tuple[tuple[str, str], ...] = (
    (
        r"^(c|conc\w*|concurrency|streams|users|(max |#)?(conc\w*|parallel) ?(requests|req)?|batch( size)?)$",
        "max_concurrency",
    ),
    (r"aggregate|output tok|^tok/s$|^t/s$|throughput.*tok|agg", "output_tokens_per_s"),
    (r"^test$|^name$|^label$", "label"),
    (r"^(wall|duration)", "duration_s"),
    (r"^(output )?tokens$", "output_tokens"),
    (r"^(req/s|requests/s|rps)$", "requests_per_s"),
    (r"^ok$|^success", "_ok"),
)
#: `Mean TTFT (ms)`, `P99 ITL`, `TTFT p50 (s)`: the statistic stands before or behind, and is the mean where none is named.
_LATENCY_COLUMN = re.compile(
    r"^(?:(?P<before>mean|avg|average|median|p50|p90|p95|p99|max|min|std)\.? )?"
    r"(?P<what>ttft|tpot|itl|e2e(?: latency)?|e2el|latency|time to first token|time per output token|inter-token latency)"
    r"(?:[ _](?P<behind>mean|avg|average|median|p50|p90|p95|p99|max|min|std))?(?:\b.*)?$"
)
_LATENCY_FIELDS = {
    "ttft": "ttft_ms", "time to first token": "ttft_ms", "tpot": "tpot_ms", "time per output token": "tpot_ms",
    "itl": "itl_ms", "inter-token latency": "itl_ms", "e2e": "e2e_ms", "e2el": "e2e_ms", "e2e latency": "e2e_ms",
    "latency": "e2e_ms",
}  # fmt: skip
_STAT_WORDS = {"avg": "mean", "average": "mean", "p50": "median"}


def _column(cell: str) -> str | None:
    """The field that a column's title names; a latency as `field:statistic`."""
    match = _LATENCY_COLUMN.match(cell)
    if match:
        stat = match["before"] or match["behind"] or "mean"
        return f"{_LATENCY_FIELDS[match['what']]}:{_STAT_WORDS.get(stat, stat)}"
    return next((field for pattern, field in _COLUMNS if re.search(pattern, cell)), None)


def _pipe_table(lines: list[str]) -> Iterator[tuple[BenchRow, Details]]:
    """Rows of a table with pipes whose first row names columns that are known."""
    header: list[str | None] | None = None
    for number_, line in enumerate(lines, start=1):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if "|" not in line or len(cells) < 2 or len(line) > 2000:
            header = None
            continue
        if header is None:
            names = [_column(cell.lower()) for cell in cells]
            told = sum(name is not None for name in names) >= 2
            if told and any(name == "output_tokens_per_s" or (name or "").startswith("ttft_ms") for name in names):
                header = names
                seconds = [bool(re.search(r"\bs\b", cell.lower())) for cell in cells]
            continue
        if all(re.fullmatch(r":?-+:?", cell) for cell in cells) or len(cells) != len(header):
            continue
        fields: dict[str, Any] = {"format": "table", "tool": "a script", "label": f"row {number_}"}
        for name, cell, in_seconds in zip(header, cells, seconds, strict=False):
            share = re.fullmatch(r"(\d{1,9})\s*/\s*(\d{1,9})", cell)
            if name == "_ok" and share:
                fields |= {
                    "completed": int(share[1]),
                    "requested": int(share[2]),
                    "failed": max(0, int(share[2]) - int(share[1])),
                }
            elif name == "_ok" and count(cell) is not None:
                fields["completed"] = count(cell)
            elif name and ":" in name:
                latency, stat = name.split(":")
                value = number(cell)
                if value is not None:
                    held = fields.get(latency, Stats())
                    fields[latency] = held.model_copy(update={stat: value * (1e3 if in_seconds else 1)})
            elif name == "label":
                fields["label"] = cell[:100]
            elif name and name != "_ok":
                cell = cell.partition("±")[0]
                value = count(cell) if name in _COUNTS else number(cell)
                if value is not None:
                    fields[name] = value
        if {"output_tokens_per_s", "ttft_ms", "requests_per_s"} & fields.keys():
            yield BenchRow(**fields), Details(lines=(number_,))
