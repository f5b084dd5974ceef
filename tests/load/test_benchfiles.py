"""Benchmark files of six tools: the same names and units, and findings about what the numbers do not say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.errors import UnreadableFile
from lib.load import bench_readers, benchfiles
from lib.load.benchfiles import read_bench

RECORDED = Path(__file__).parents[1] / "recorded" / "h200-sglang-0.5.16"


def sglang(**changes: Any) -> dict[str, Any]:
    """A row of bench_serving's JSONL that has nothing wrong with it, with changes."""
    # 400 requests of 100 tokens in 40 s: 10 req/s, 1000 tok/s; TPOT 7.5 ms, TTFT 57.5 ms, E2E 57.5 + 99 * 7.5 = 800 ms:
    # in flight 10/s * 0.8 s = 8 = the asked concurrency
    row: dict[str, Any] = {
        "tag": None,
        "backend": "sglang",
        "dataset_name": "random",
        "request_rate": float("inf"),
        "max_concurrency": 8,
        "random_input_len": 200,
        "random_output_len": 100,
        "random_range_ratio": 1.0,
        "duration": 40.0,
        "completed": 400,
        "total_input_tokens": 80000,
        "total_input_text_tokens": 80000,
        "total_input_vision_tokens": 0,
        "total_output_tokens": 40000,
        "total_output_tokens_retokenized": 40010,
        "request_throughput": 10.0,
        "input_throughput": 2000.0,
        "output_throughput": 1000.0,
        "total_throughput": 3000.0,
        "mean_e2e_latency_ms": 800.0,
        "mean_ttft_ms": 57.5,
        "median_ttft_ms": 57.0,
        "mean_tpot_ms": 7.5,
        "mean_itl_ms": 7.5,
        "median_itl_ms": 7.4,
        "concurrency": 8.0,
        "accept_length": None,
        "max_output_tokens_per_s": 1100.0,
        "max_concurrent_requests": 9,
    }
    return row | changes


def found(text: str) -> dict[str, str]:
    """The findings' ids with their level."""
    return {finding.id: finding.level for finding in read_bench(text).findings}


DETAILS = {"output_lens": [100] * 400, "errors": [""] * 400}

#: (id, level, text that has it)
JUDGED: list[tuple[str, str, str]] = [
    (
        "failed_requests",
        "error",
        json.dumps(sglang(errors=["timeout"] * 100 + [""] * 400, output_lens=[0] * 100 + [100] * 400)),
    ),
    (
        "failed_requests",
        "warning",
        json.dumps(sglang(errors=["timeout"] * 4 + [""] * 400, output_lens=[0] * 4 + [100] * 400)),
    ),
    (
        "failed_requests",
        "error",
        json.dumps(
            sglang(completed=0, total_output_tokens=0, request_throughput=0.0, output_throughput=0.0, **DETAILS)
        ),
    ),
    ("failed_requests", "error", json.dumps(sglang(failed=7, completed=None))),
    ("survivorship", "warning", json.dumps(sglang(errors=["x"] + [""] * 400, output_lens=[0] + [100] * 400))),
    ("failures_unknown", "info", json.dumps(sglang())),
    ("error_texts", "info", json.dumps(sglang(errors=["connection reset"] + [""] * 399, output_lens=[100] * 400))),
    ("incomplete_file", "error", json.dumps(sglang()) + '\n{"backend": "sgl'),
    (
        "unfinished_requests",
        "info",
        json.dumps(
            {
                "benchmarks": [
                    {"metrics": {"request_totals": {"successful": 5, "errored": 0, "incomplete": 2, "total": 7}}}
                ]
            }
        ),
    ),
    ("not_a_number", "error", json.dumps(sglang(mean_ttft_ms=float("nan")))),
    ("not_a_number", "error", json.dumps(sglang(output_throughput=float("inf")))),
    ("rate_not_reached", "warning", json.dumps(sglang(request_rate=20.0))),
    (
        "rate_not_reached",
        "info",
        json.dumps(
            sglang(
                request_rate=11.0,
                mean_e2e_latency_ms=4000.0,
                concurrency=40.0,
                mean_ttft_ms=3257.5,
                max_concurrency=None,
            )
        ),
    ),
    ("length_not_kept", "warning", json.dumps(sglang(random_output_len=200))),
    ("length_is_an_upper_bound", "info", json.dumps(sglang(random_output_len=200, random_range_ratio=0.0))),
    ("counted_as_asked", "warning", json.dumps(sglang(total_output_tokens_retokenized=15000))),
    ("retokenized_differs", "info", json.dumps(sglang(total_output_tokens_retokenized=44000))),
    ("not_streamed", "warning", json.dumps(sglang(mean_ttft_ms=799.9, mean_itl_ms=0.0, mean_tpot_ms=0.0))),
    (
        "itl_undefined",
        "warning",
        json.dumps(
            sglang(
                total_output_tokens=400, output_throughput=10.0, random_output_len=1, mean_itl_ms=0.0, mean_tpot_ms=0.0
            )
        ),
    ),
    ("itl_is_chunk_gap", "warning", json.dumps(sglang(backend="sglang-oai", mean_itl_ms=22.5))),
    (
        "itl_is_request_mean",
        "info",
        json.dumps(
            {
                "request_throughput": {"unit": "requests/sec", "avg": 1.0},
                "inter_token_latency": {"unit": "ms", "avg": 9.0},
            }
        ),
    ),
    ("tokens_bundled", "warning", json.dumps(sglang(backend="sglang-oai", median_itl_ms=0.01))),
    (
        "mostly_vision_tokens",
        "info",
        json.dumps(sglang(total_input_text_tokens=10000, total_input_vision_tokens=70000)),
    ),
    (
        "two_throughputs",
        "info",
        "run-1 wall= 2s ttft= 100ms wall_TPS= 50.0 decode_TPS= 52.6\nrun-2 wall= 2s ttft= 100ms wall_TPS= 50.0"
        " decode_TPS= 52.6\n",
    ),
    (
        "one_batch_definition",
        "info",
        json.dumps(
            {
                "batch_size": 4,
                "latency": 1.0,
                "last_ttft": 0.2,
                "overall_throughput": 5.0,
                "output_len": 8,
                "input_len": 8,
            }
        ),
    ),
    ("throughput_inconsistent", "error", json.dumps(sglang(output_throughput=1500.0, mean_tpot_ms=5.0))),
    ("tpot_inconsistent", "warning", json.dumps(sglang(mean_tpot_ms=30.0))),
    (
        "client_bound_suspected",
        "warning",
        json.dumps(
            sglang(
                output_throughput=40000.0,
                total_output_tokens=1600000,
                completed=16000,
                request_throughput=400.0,
                total_input_tokens=3200000,
                input_throughput=80000.0,
                max_concurrency=320,
                concurrency=320.0,
                max_concurrent_requests=320,
            )
        ),
    ),
    (
        "client_adds_latency",
        "info",
        json.dumps(
            sglang(
                max_concurrency=300,
                concurrency=300.0,
                max_concurrent_requests=300,
                mean_ttft_ms=29257.5,
                mean_e2e_latency_ms=30000.0,
            )
        ),
    ),
    (
        "client_queue",
        "warning",
        json.dumps({**sglang(), "total_token_throughput": 3000.0, "mean_client_queue_time_ms": 300.0}),
    ),
    (
        "mostly_ramp",
        "warning",
        json.dumps(sglang(completed=16, total_output_tokens=1600, total_input_tokens=3200, duration=1.6)),
    ),
    (
        "short_run",
        "info",
        json.dumps(
            sglang(
                duration=4.0,
                completed=40,
                total_output_tokens=4000,
                total_input_tokens=8000,
                total_output_tokens_retokenized=4000,
            )
        ),
    ),
    ("first_wave_slow", "warning", json.dumps(sglang(ttfts=[0.5] * 8 + [0.05] * 392, **DETAILS))),
    (
        "warmup_included",
        "warning",
        "=== warmups ===\nwarm-1 ttft= 900ms decode_TPS= 50\n=== measured ===\nrun-1 ttft= 100ms decode_TPS="
        " 50\n=== summary ===\nTTFT mean= 500ms\n",
    ),
    ("no_warmup", "info", "=== measured ===\nrun-1 ttft= 100ms decode_TPS= 50\nrun-2 ttft= 100ms decode_TPS= 50\n"),
    (
        "summary_differs",
        "warning",
        "=== measured ===\nrun-1 ttft= 100ms decode_TPS= 50\n=== summary ===\nTTFT mean= 300ms\n",
    ),
    ("accept_length_is_cumulative", "info", json.dumps(sglang(accept_length=2.0))),
    ("acceptance_on_random_ids", "warning", json.dumps(sglang(accept_length=1.1, dataset_name="random-ids"))),
    ("server_info_embedded", "info", json.dumps(sglang(server_info={"model_path": "/m", "api_key": None}))),
    (
        "secret_in_file",
        "warning",
        json.dumps(sglang(server_info={"model_path": "/m", "api_key": "k3y-of-ours"}, tag="run with k3y-of-ours")),
    ),
    ("odd_key", "info", json.dumps({**sglang(), "request_goodput:": None})),
    ("runs_differ", "warning", "\n".join(json.dumps(sglang(mean_ttft_ms=ttft)) for ttft in (57.5, 57.0, 120.0))),
    ("one_run", "info", json.dumps(sglang())),
]


@pytest.mark.parametrize(("id_", "level", "text"), JUDGED, ids=[f"{n}-{row[0]}" for n, row in enumerate(JUDGED)])
def test_each_judgement(id_: str, level: str, text: str) -> None:
    """Each fault gives its finding at its level, and a key in the file appears nowhere."""
    assert found(text).get(id_) == level
    assert "k3y-of-ours" not in read_bench(text).model_dump_json()


def test_every_judgement_is_in_the_table() -> None:
    """A new rule without a file that shows it fails here."""
    source = Path(benchfiles.__file__ or "").read_text()
    ids = set(re.findall(r'(?:c\.find|Finding)\(\s*(?:id=)?"(\w+)"', source))
    assert len(ids) > 30
    assert ids - {row[0] for row in JUDGED} == set()


def test_a_good_run_repeated_has_no_finding_but_one() -> None:
    """Three runs alike with per-request details: nothing to say but that a client at 8 streams was short of nothing."""
    text = "\n".join(json.dumps(sglang(mean_ttft_ms=ttft, **DETAILS)) for ttft in (57.5, 57.0, 58.0))
    report = read_bench(text)
    assert report.findings == () and report.valid and report.single_run_trustworthy is True
    assert report.readings[0].tpot_consistent is True and report.readings[0].client_bound_suspected is False


# 1000 tok/s * 7.5 ms = 7.5 decoding at once; * 99/100 + 10 req/s * 57.5 ms = 8.0 in flight
def test_concurrency_from_tpot_and_throughput() -> None:
    """TPOT x throughput is the number of requests that decode at once; with TTFT it is the number in flight."""
    reading = read_bench(json.dumps(sglang())).readings[0]
    assert reading.concurrency_decoding == pytest.approx(7.5)
    assert reading.concurrency_predicted == pytest.approx(8.0)


@pytest.mark.parametrize(
    "name",
    [
        "m1_base.bench_c1",
        "m1_base.bench_c4",
        "m1_base.bench_c16",
        "m1_base.bench_c32",
        "m1_nextn.bench_c1",
        "m1_nextn.bench_c4",
    ],
)
@pytest.mark.skipif(not RECORDED.is_dir(), reason="recorded servers are not in this checkout")
def test_recorded_runs(name: str) -> None:
    """On real runs the concurrency derived from TPOT, TTFT and throughput is that of the file within 1%."""
    report = read_bench((RECORDED / f"{name}.jsonl").read_text())
    row, reading = report.rows[0], report.readings[0]
    assert row.format == "sglang_jsonl" and row.backend == "sglang" and row.dataset == "random-ids"
    assert row.request_rate_unlimited is True and reading.ignore_eos_effective is True and report.valid
    assert reading.concurrency_predicted == pytest.approx(row.concurrency, rel=0.01)
    assert (row.accept_length is not None) == ("nextn" in name)
    assert ("acceptance_on_random_ids" in {f.id for f in report.findings}) == ("nextn" in name)


FIELDS = {
    "Successful requests": ("completed", st.integers(1, 10**6)),
    "Total input tokens": ("input_tokens", st.integers(1, 10**9)),
    "Total generated tokens": ("output_tokens", st.integers(1, 10**9)),
    "Benchmark duration (s)": ("duration_s", st.floats(0.1, 1e5)),
    "Request throughput (req/s)": ("requests_per_s", st.floats(0.01, 1e4)),
    "Output token throughput (tok/s)": ("output_tokens_per_s", st.floats(0.01, 1e6)),
    "Peak output token throughput (tok/s)": ("peak_output_tokens_per_s", st.floats(0.01, 1e6)),
    "Max request concurrency": ("max_concurrency", st.integers(1, 4096)),
    "Max reqeuest concurrency": ("max_concurrency", st.integers(1, 4096)),
    "Maximum request concurrency": ("max_concurrency", st.integers(1, 4096)),
    "Mean TTFT (ms)": ("ttft_ms.mean", st.floats(0, 1e6)),
    "P99 TTFT (ms)": ("ttft_ms.p99", st.floats(0, 1e6)),
    "Median TPOT (ms)": ("tpot_ms.median", st.floats(0, 1e5)),
    "Mean E2EL (ms)": ("e2e_ms.mean", st.floats(0, 1e6)),
    "Max ITL (ms)": ("itl_ms.max", st.floats(0, 1e6)),
    "Concurrency": ("concurrency", st.floats(0, 4096)),
}


@given(st.data(), st.sampled_from(["", "# ", "> ", "    "]), st.sampled_from(["\n", "\r\n"]))
@settings(max_examples=150, deadline=None)
def test_any_block_comes_back(data: st.DataObject, prefix: str, end: str) -> None:
    """Whatever lines a block has, in whatever order, quoted or with CRLF: each number comes back in its field."""
    labels = data.draw(
        st.lists(st.sampled_from(sorted(FIELDS)), unique_by=lambda label: FIELDS[label][0]).map(
            lambda x: sorted({*x, "Successful requests"})
        )
    )
    labels = [
        label for i, label in enumerate(labels) if FIELDS[label][0] not in [FIELDS[other][0] for other in labels[:i]]
    ]
    values = {}
    lines = ["============ Serving Benchmark Result ============"]
    for label in data.draw(st.permutations(labels)):
        value = data.draw(FIELDS[label][1])
        shown = str(value) if isinstance(value, int) else f"{value:.2f}"
        values[FIELDS[label][0]] = float(shown)
        lines.append(f"{label + ':':<40} {shown:<10}")
    row = read_bench(end.join(prefix + line for line in lines)).rows[0].model_dump()
    for path, value in values.items():
        name, _, stat = path.partition(".")
        assert (row[name][stat] if stat else row[name]) == value


def test_blocks_take_the_command_above_them() -> None:
    """In a file of several runs each block is read with its own command line."""
    title = "============ Serving Benchmark Result ============"
    block = f"{title}\nBackend: sglang\nSuccessful requests: 10\nBenchmark duration (s): 20.0\n"
    first = f"bench --num-prompts 10 --max-concurrency 2\n{block}\n"
    second = (
        f"bench --num-prompts 20 --max-concurrency 4\nNamespace(num_prompts=20, dataset_name='random-ids')\n{block}"
    )
    text = first + second
    report = read_bench(text)
    assert [(row.requested, row.max_concurrency, row.dataset) for row in report.rows] == [
        (10, 2, None),
        (20, 4, "random-ids"),
    ]
    assert [reading.success_frac for reading in report.readings] == [1.0, 0.5]
    assert [finding.line for finding in report.findings if finding.id == "failed_requests"] == [9]


@pytest.mark.parametrize(
    "prose",
    [
        "TTFT 100, 200, and 400 ms",
        "a TTFT of 100 ms, 200 ms and 400 ms in three runs",
        "ttft: 100 / 200 / 400",
        "TTFT was 100.0 200.0 400.0 ms",
    ],
)
def test_runs_listed_in_prose(prose: str) -> None:
    """However prose lists the values of several runs, they are read."""
    report = read_bench(f"{prose}\nSuccessful requests: 10\nMean TTFT (ms): 100\n")
    assert report.repeated == {"ttft_ms": (100.0, 200.0, 400.0)} and report.spread_ratio == 4.0


def test_what_vllm_prints_before_and_instead_of_the_block() -> None:
    """Rate and concurrency stand above vLLM's block; its offline benchmark prints one line; llama-bench a table."""
    block = "============ Serving Benchmark Result ============\nSuccessful requests: 10\nFailed requests: 2\n"
    row = read_bench(f"Traffic request rate: 4.0\nMaximum request concurrency: 16\n{block}").rows[0]
    assert (row.request_rate_per_s, row.max_concurrency, row.failed, row.requested) == (4.0, 16, 2, 12)
    row = read_bench("Throughput: 2.50 requests/s, 1200.00 total tokens/s, 400.00 output tokens/s").rows[0]
    assert (row.requests_per_s, row.total_tokens_per_s, row.output_tokens_per_s) == (2.5, 1200.0, 400.0)
    rows = read_bench(
        "| model | test | t/s |\n|---|---|---:|\n| m | tg128 | 52.25 ± 0.30 |\n| m | tg256 | 50.00 |\n"
    ).rows
    assert [(row.label, row.output_tokens_per_s) for row in rows] == [("tg128", 52.25), ("tg256", 50.0)]


def test_a_key_on_the_command_line_is_not_repeated() -> None:
    """A key in the command above a block is removed wherever the report would quote it."""
    text = "bench --api-key k3y-of-ours --tag k3y-of-ours\nSuccessful requests: 10\nBackend: sglang\n"
    assert "k3y-of-ours" not in read_bench(text).model_dump_json()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1,234.5", 1234.5),
        ("12", 12.0),
        (7, 7.0),
        (1e400, None),
        ("nan", None),
        (float("nan"), None),
        (True, None),
        ("1.2.3", None),
        ("", None),
        ("²", None),
        (None, None),
        ("1e3", 1000.0),
        (10**400, None),
        ("-5", -5.0),
        ([], None),
        ("1" * 400, None),
    ],
)
def test_number(text: object, expected: float | None) -> None:
    """Only finite numbers are numbers."""
    assert bench_readers.number(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  \n",
        "hello world",
        "\0\1\2",
        "{",
        '{"a": 1',
        "[1, 2",
        "{}",
        "[]",
        '{"benchmarks": []}',
        "[" * 100_000,
        '{"request_throughput": ',
        "| a | b |\n",
        "null",
        "1",
        "[Unit]\nDescription=x\n",
    ],
)
def test_what_is_no_benchmark_is_refused(text: str) -> None:
    """Nothing, prose, rubbish, broken or foreign JSON: one clear message."""
    with pytest.raises(UnreadableFile):
        read_bench(text)


@given(st.text(max_size=400))
@settings(max_examples=200, deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    """Arbitrary text around and inside a result gives a report or one clear error."""
    block = "Successful requests:   10\nMean TTFT (ms): 5\n"
    for candidate in (text, text + block, block + text, "=== run ===\nrun-1 ttft= 5ms wall= 3s " + text):
        try:
            read_bench(candidate)
        except UnreadableFile as error:
            assert str(error)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["inf", "ms", "sglang"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    "metrics",
                    "avg",
                    "unit",
                    "successful",
                    "percentiles",
                    "mean",
                    "p50",
                    "request_totals",
                    "config",
                    "strategy",
                    "type_",
                    "rate",
                    "api_key",
                    "records",
                    "count",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
KEYS = [
    *sglang(),
    "benchmarks",
    "request_latency",
    "successes",
    "last_ttft",
    "batch_size",
    "request_count",
    "time_to_first_token",
    "server_info",
    "ttfts",
    "itls",
    "errors",
    "output_lens",
    "num_prompts",
    "total_token_throughput",
    "input_config",
    "error_summary",
    "records",
]


@given(st.dictionaries(st.sampled_from(KEYS), json_values, max_size=8))
@settings(max_examples=400, deadline=None)
def test_any_json_with_known_keys_is_read_or_refused(data: dict[str, Any]) -> None:
    """Known keys with values of any type never break the reader, and the report is always valid JSON."""
    for candidate in (data, sglang() | data, {"benchmarks": [data, {"metrics": data}]}):
        try:
            json.loads(read_bench(json.dumps(candidate)).model_dump_json())
        except UnreadableFile as error:
            assert str(error)


@given(st.integers(1, 2000))
@settings(max_examples=60, deadline=None)
def test_a_file_cut_anywhere_says_so(cut: int) -> None:
    """A JSONL cut in its second row gives the first row and an error; cut in its first, one clear message."""
    line = json.dumps(sglang())
    text = (line + "\n" + line)[:-1][: max(1, min(cut, 2 * len(line)))]
    try:
        report = read_bench(text)
    except UnreadableFile as error:
        assert len(text) < len(line) and "cut off" in str(error)
        return
    assert len(text) >= len(line)
    assert len(report.rows) == 1
    assert report.valid is (len(text) <= len(line) + 1)


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"duration": 0}, "impossible_duration"),
        ({"duration": -40.0}, "impossible_duration"),
        ({"total_output_tokens": -1}, "negative_number"),
        ({"completed": -400}, "negative_number"),
        ({"mean_ttft_ms": -57.5}, "negative_number"),
        ({"num_prompts": 300}, "more_completed_than_sent"),
        ({"num_prompts": 400, "failed": 3}, "requests_do_not_add_up"),
        ({"num_prompts": 401, "failed": 0}, "requests_do_not_add_up"),
        ({"ttfts": [0.05] * 300}, "lists_of_other_length"),
        ({"ttfts": [0.05] * 400, "itls": [[0.01]] * 399}, "lists_of_other_length"),
        ({"ttfts": []}, "lists_of_other_length"),
    ],
)
def test_an_impossible_file(changes: dict[str, Any], finding: str) -> None:
    """An error that names it, no verdict that it can be used, and nothing derived from the impossible number."""
    report = read_bench(json.dumps(sglang(**changes)))
    assert not report.valid and report.severity == "error" and report.readings[0].valid is False
    assert [found.id for found in report.findings if found.id != "one_run"] == [finding]
    assert report.readings[0].concurrency_decoding is None and report.readings[0].success_frac is None


@pytest.mark.parametrize(
    "changes",
    [
        {"num_prompts": 402, "failed": 2},
        {"ttfts": [0.05] * 400, "itls": [[0.01]] * 400, "output_lens": [100] * 400, "errors": [""] * 400},
        {"ttfts": [0.05] * 402, "output_lens": [100] * 400 + [0, 0], "errors": [""] * 402},
    ],
)
def test_a_possible_file(changes: dict[str, Any]) -> None:
    """Counts and lists that fit each other are no error; a failed request stands in the lists too."""
    assert read_bench(json.dumps(sglang(**changes))).valid


def test_guidellm_with_its_counts_in_run_stats() -> None:
    """The 0.3 layout; requests that the end of the run cut off are no failures."""
    made = {"successful": 480, "errored": 5, "incomplete": 11, "total": 496}
    metrics = {"requests_per_second": {"successful": {"mean": 8.0}}, "time_to_first_token_ms": {"successful": {"mean": 95.0}},
               "output_token_count": {"successful": {"mean": 128.0, "total_sum": 61440}}}  # fmt: skip
    benchmark = {"duration": 60.0, "run_stats": {"requests_made": made}, "metrics": metrics}
    report = read_bench(json.dumps({"metadata": {}, "benchmarks": [benchmark]}))
    row = report.rows[0]
    assert (row.completed, row.failed, row.requested) == (480, 5, 485)


def test_a_table_with_statistics_in_its_titles() -> None:
    """`P99 TTFT (ms)` is a TTFT's P99, whatever order the words have; seconds become milliseconds."""
    text = "| Concurrency | Output tok/s | Mean TTFT (ms) | P99 TTFT (ms) | TPOT p50 (s) |\n|---|---|---|---|---|\n"
    row = read_bench(text + "| 8 | 310.5 | 190 | 260 | 0.025 |\n").rows[0]
    assert row.max_concurrency == 8 and row.ttft_ms is not None and row.tpot_ms is not None
    assert (row.ttft_ms.mean, row.ttft_ms.p99, row.tpot_ms.median) == (190, 260, pytest.approx(25))


def test_without_a_success_nothing_is_said_about_streaming() -> None:
    """No request succeeded: a TTFT of 0 is no sign of answers that were not streamed."""
    text = "=== Serving Benchmark Result ===\n".replace("===", "====") + "Successful requests: 0\nBenchmark duration (s): 3.2\n"
    report = read_bench(text + "Total generated tokens: 0\nMean TTFT (ms): 0.00\nMean ITL (ms): 0.00\n")
    assert {finding.id for finding in report.findings} >= {"failed_requests"}
    assert "not_streamed" not in {finding.id for finding in report.findings}


def test_a_rate_that_its_count_contradicts_is_inconsistent() -> None:
    """957.44 tok/s beside 61,275 tokens in 128 s: twice what follows. The same block with 478.71 is consistent."""
    block = (
        "============ Serving Benchmark Result ============\nSuccessful requests:                     64\n"
        "Benchmark duration (s):                  128.00\nTotal input tokens:                      65536\n"
        "Total generated tokens:                  61275\nOutput token throughput (tok/s):         {}\n"
        "==================================================\n"
    )
    wrong, right = (read_bench(block.format(rate)) for rate in ("957.44", "478.71"))
    assert wrong.readings[0].consistent is False and "throughput_inconsistent" in {f.id for f in wrong.findings}
    assert right.readings[0].consistent is not False and "throughput_inconsistent" not in {f.id for f in right.findings}
