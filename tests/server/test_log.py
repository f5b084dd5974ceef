"""`lib.server.log`: every recorded server is read right, and the answer follows when the log changes."""

# ruff: noqa: E501  (lines of servers are quoted whole)

from __future__ import annotations

import bz2
import functools
import gzip
import importlib
import json
import lzma
import random
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lib.model.published import dtype_by_geometry
from lib.server import log_tables
from lib.server.failures import classify
from lib.server.lines import MAX_LINE_BYTES, lines_of, parse_line, seconds_between, split_messages
from lib.server.log import (
    ServerLog,
    accept_rate_definition,
    bytes_per_token,
    kv_dtype_by_arithmetic,
    parse_server_args,
    read_log,
)

TESTS = Path(__file__).resolve().parents[1]
RECORDED = TESTS / "recorded"
H200 = RECORDED / "h200-sglang-0.5.16"
LOGS = sorted(RECORDED.glob("*/*.log"))
sys.path.insert(0, str(TESTS / "cases"))


@functools.cache
def log_of(path: Path) -> ServerLog:
    return read_log(path.read_bytes().split(b"\n"))


def recorded(name: str) -> list[bytes]:
    return (RECORDED / name).read_bytes().split(b"\n")


def flat(expect: Any, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], Any]]:
    if isinstance(expect, dict):
        return [leaf for key, value in expect.items() for leaf in flat(value, (*path, key))]
    if isinstance(expect, list):
        return [leaf for index, value in enumerate(expect) for leaf in flat(value, (*path, index))]
    return [(path, expect)]


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def cases(kind: str) -> list[Any]:
    rows = [json.loads(line) for line in (TESTS / "cases" / kind / "cases.jsonl").read_text().splitlines()]
    return [pytest.param(row, id=row["id"]) for row in rows]


def check(case: dict[str, Any]) -> None:
    found = importlib.import_module(f"map_{case['kind']}").answer(case, TESTS / "cases" / case["kind"])
    wrong = []
    for path, want in flat(case["expect"]):
        try:
            got = at(found, path)
        except (KeyError, IndexError, TypeError):
            got = "nothing"
        same = got == want if isinstance(want, bool | str) or want is None else got == pytest.approx(want, rel=1e-3)
        if not same:
            wrong.append(f"{path}: {got!r}, expected {want!r}")
    assert not wrong, "; ".join(wrong)


@pytest.mark.parametrize("case", cases("server_log"))
def test_case(case: dict[str, Any]) -> None:
    """Every number, boolean and class of the case comes out of the one mapping table."""
    check(case)


#: Numbers that follow from others and only happen to stand in the input too.
DERIVED = {"tp", "draft_tokens_derived", "slots_per_request", "num_steps_derived", "num_draft_tokens_derived"}


def swapped(value: Any, old: str, new: str) -> Any:
    if isinstance(value, dict):
        return {key: swapped(item, old, new) for key, item in value.items()}
    if isinstance(value, list):
        return [swapped(item, old, new) for item in value]
    if isinstance(value, int | float) and not isinstance(value, bool) and str(value) == old:
        return type(value)(new)
    return re.sub(rf"(?<![\d.]){re.escape(old)}(?![\d]|\.\d)", new, value) if isinstance(value, str) else value


def changed_input(case: dict[str, Any], want: float, other: float) -> Any:
    """The case's input with one number changed wherever it stands, or None if it stands nowhere."""
    old = case["input"]
    if "file" in old:
        path = TESTS / "cases" / case["kind"] / old["file"]
        old = {"text": path.read_bytes().decode("utf-8", "replace")}
    new = old
    for form in sorted({f"{want}", f"{want:.2f}", f"{want:,}"}, key=len, reverse=True):
        text = (
            f"{other:.2f}" if form == f"{want:.2f}" and "." in form else (f"{other:,}" if "," in form else f"{other}")
        )
        new = swapped(new, form, text)
    return None if new == old else new


def perturbations() -> list[Any]:
    """(case, path of a leaf, changed input, the new number) for every number that a case's input quotes."""
    rows = []
    for param in [*cases("server_log"), *cases("failure_class")]:
        case = param.values[0]
        for path, want in flat(case["expect"]):
            if path[-1] in DERIVED or isinstance(want, bool) or not isinstance(want, int | float) or abs(want) < 2:
                continue
            other = want + 1 if isinstance(want, int) else round(want * 0.97, 2)
            changed = changed_input(case, want, other)
            if changed is not None:
                name = f"{case['id']}-{'.'.join(map(str, path))}"
                rows.append(pytest.param(case, path, changed, other, id=name))
    return rows


@pytest.mark.parametrize(("case", "path", "changed", "other"), perturbations())
def test_perturbed_case(case: dict[str, Any], path: tuple[Any, ...], changed: Any, other: float) -> None:
    """A number that the input quotes comes out changed when it is changed there."""
    folder = TESTS / "cases" / case["kind"]
    found = importlib.import_module(f"map_{case['kind']}").answer({**case, "input": changed}, folder)
    assert at(found, path) == pytest.approx(other, rel=1e-6)


@pytest.mark.parametrize("case", cases("server_log"))
@pytest.mark.parametrize("size", [2, 16])
def test_perturbed_rank_numbers(case: dict[str, Any], size: int) -> None:
    """Renumbered ranks change nothing but the rank numbers: sizes, tokens, classes stay those of one rank."""
    text = case["input"].get("text") or (TESTS / "cases" / case["kind"] / case["input"]["file"]).read_text(
        errors="replace"
    )
    moved = re.sub(r"\b(TP|DP|EP)(\d+)\b", lambda m: f"{m[1]}{int(m[2]) + size}", text)
    module = importlib.import_module("map_server_log")
    want = module.answer({**case, "input": {"text": text}}, TESTS)
    got = module.answer({**case, "input": {"text": moved}}, TESTS)
    for name in set(want) - {"tp", "dp", "slow_ranks", "scale_warning_ranks_seen", "root_cause"}:
        assert got.get(name) == want[name], name
    for name in ("slow_ranks", "scale_warning_ranks_seen"):
        if name in want:
            assert got[name] == [n + size for n in want[name]]


# ------------------------------------------------------------------------------------ recorded servers

# (file, version, dtype, tokens, GiB per rank, ready, model class); versions as tests/recorded/README.md states them
GOLDEN = [
    ("cpu-sglang/q3_15b.log", "0.5.15 or 0.5.15.post1", "bfloat16", 65536, 0.06, True, "Qwen3ForCausalLM"),
    ("cpu-sglang/final19.log", "0.5.19", "bfloat16", 65536, 0.04, True, "Qwen3_5MoeForConditionalGeneration"),
    ("cpu-sglang/nextn_f32.log", "0.5.21", "float32", 65536, 0.12, True, "Qwen3_5MoeForConditionalGeneration"),
    ("cpu-sglang/t23_dense.log", "0.5.23 or newer", "bfloat16", 65536, 0.06, True, "Qwen3ForCausalLM"),
    ("cpu-sglang/smollm2_135m_bf16.log", "0.5.15 or 0.5.15.post1", "bfloat16", 65536, 1.4, True, "LlamaForCausalLM"),
    ("cpu-sglang/kv15_fp8_e5m2.log", "0.5.15 or 0.5.15.post1", "float8_e5m2", 65536, 0.04, True, "Qwen3ForCausalLM"),
    ("h200-h1/e_L2_auto.log", "0.5.16", "float8_e4m3fn", 16384, 0.06, True, "LlamaForCausalLM"),
    ("h200-sglang-0.5.16/m1_auto.log", "0.5.16", "bfloat16", 5741583, 21.9, True, "Qwen3_5MoeForConditionalGeneration"),
    ("h200-sglang-0.5.16/m2_auto.log", "0.5.16", "float8_e4m3fn", 11483156, 21.9, True, "Qwen3_5MoeForConditionalGeneration"),
    ("h200-sglang-0.5.16/m2_nextn_auto.log", "0.5.16", "float8_e4m3fn", 15761000, 45.1, True, "Qwen3_5MoeForConditionalGeneration"),
    ("h200-sglang-0.5.16/m3_auto.log", "0.5.16", "float8_e4m3fn", 11476142, 21.88, False, "Qwen3_5MoeForConditionalGeneration"),
]  # fmt: skip


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: Path(row[0]).stem)
def test_recorded_server(row: tuple[Any, ...]) -> None:
    """A recorded server is read as what it was."""
    name, version, dtype, tokens, gib, ready, model = row
    log = read_log(recorded(name))
    assert log.engine == "sglang"
    assert (log.version, log.version_known_by) == (version, "server_args")
    assert log.kv is not None
    assert (log.kv.dtype, log.kv.dtype_known_by, log.kv.tokens) == (dtype, "line", tokens)
    assert log.kv.total_gib_per_rank == pytest.approx(gib, abs=0.011)
    assert log.is_ready is ready
    assert log.model_class == model
    if log.capacity:
        assert log.capacity.max_total_num_tokens == tokens


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_every_fact_quotes_its_line(path: Path) -> None:
    """A fact's line number points at the line that it quotes, in every recorded log."""
    lines = path.read_bytes().split(b"\n")
    log = log_of(path)
    facts = [*log.weights, *log.kv_pools, *log.mamba_pools, *log.graphs, *log.backends, *log.notices, *log.phases]
    facts += [fact for fact in (log.capacity, log.ready, log.stopped, log.server_args_told) if fact is not None]
    assert facts or log.failure is not None
    for fact in facts:
        source = lines[fact.line_no - 1].decode("utf-8", "replace")
        assert fact.line.removesuffix(" ... (cut)")[:100] in source


def test_batch_lines_are_counted_exactly() -> None:
    """Batch lines are all counted, and the series has their numbers."""
    text = (H200 / "m1_base.log").read_text(errors="replace")
    log = read_log(text.splitlines())
    assert log.batches.decode_lines == len(re.findall(r"Decode batch, ", text)) == 432
    assert log.batches.prefill_lines == len(re.findall(r"Prefill batch, ", text)) == 97
    speeds = [float(x) for x in re.findall(r"gen throughput \(token/s\): ([\d.]+)", text)]
    spread = log.batches.spreads["decode"]["gen_tok_s"]
    assert (spread.n, spread.low, spread.high, spread.last) == (432, min(speeds), max(speeds), speeds[-1])
    assert spread.mean == pytest.approx(sum(speeds) / len(speeds))
    assert [row.gen_tok_s for row in log.batches.series if row.kind == "decode"] == speeds


def test_silently_ignored_backend_is_found() -> None:
    """A MoE runner that was asked for and is not used is seen by the trace of the one that is (bf16: cutlass, marlin)."""
    for name, changed in (("x_moe_cutlass", True), ("x_moe_marlin", True), ("x_moe_triton", False)):
        log = read_log((H200 / f"{name}.log").read_bytes().split(b"\n"))
        moe = next(backend for backend in log.backends if backend.kind == "moe_runner_backend")
        assert (moe.taken, moe.known_by, moe.changed) == ("triton", "trace", changed)
        assert any(notice.id == "backend_ignored" for notice in log.notices) is changed
    log = read_log((H200 / "x_moe_triton_kernel.log").read_bytes().split(b"\n"))
    moe = next(backend for backend in log.backends if backend.kind == "moe_runner_backend")
    assert (moe.taken, moe.changed) == ("triton_kernel", False)


FALLBACKS = [
    (
        "The current platform does not support Intel AMX, will fallback to torch_native backend.",
        "intel_amx",
        "torch_native",
    ),
    ("FlashAttention3 only supports fp8_e4m3 if using FP8; Setting attention backend to triton.", "fa3", "triton"),
    ("Attention backend not specified. Use flashinfer backend by default.", None, "flashinfer"),
    ("Use trtllm_mla as attention backend on sm100 for DeepseekV3ForCausalLM", None, "trtllm_mla"),
]


@pytest.mark.parametrize(("text", "asked", "taken"), FALLBACKS)
def test_fallback_lines(text: str, asked: str | None, taken: str) -> None:
    """A fallback line names what was asked for and what is used."""
    log = read_log([f"[2026-11-29 13:00:00 TP0] {text}"])
    (backend,) = log.backends
    assert (backend.kind, backend.asked, backend.taken, backend.known_by) == ("attention_backend", asked, taken, "line")
    assert backend.changed is (True if asked else None)


def test_graph_states() -> None:
    """Disabled, captured and begun graphs are told apart."""
    cpu = read_log(recorded("cpu-sglang/q3_15b.log"))
    assert cpu.graphs_enabled is False
    assert {graph.state for graph in cpu.graphs} == {"disabled"}
    nextn = read_log(recorded("h200-sglang-0.5.16/m1_nextn.log"))
    assert nextn.graphs_enabled is True
    captured = {graph.name: graph for graph in nextn.graphs if graph.state == "captured"}
    assert set(captured) == {"target verify", "draft decode", "draft extend"}
    begun = read_log(recorded("h200-sglang-0.5.16/m3_auto.log"))
    assert begun.graphs[-1].state == "begun"
    assert begun.phase == "capturing_graphs"


def test_old_forms_of_lines() -> None:
    """0.5.10 to 0.5.12 print the dtype in a line of its own, and 0.5.17 and newer label the pools."""
    old = [
        "[2026-05-01 10:00:00 TP0] Using KV cache dtype: torch.bfloat16",
        "[2026-05-01 10:00:01 TP0] KV Cache is allocated. #tokens: 1000000, K size: 7.63 GB, V size: 7.63 GB",
        "[2026-05-01 10:00:01 TP1] KV Cache is allocated. #tokens: 1000000, K size: 7.63 GB, V size: 7.63 GB",
        "[2026-05-01 10:00:09 TP0] Capture cuda graph end. Time elapsed: 8.10 s. mem usage=1.25 GB. avail mem=9.00 GB.",
    ]
    log = read_log(old)
    assert [(pool.rank, pool.dtype, pool.dtype_known_by) for pool in log.kv_pools] == [
        ("TP0", "bfloat16", "line"),
        ("TP1", "bfloat16", "line"),
    ]
    assert log.kv is not None and log.kv.total_gib_per_rank == 15.26  # one rank's, not 30.52
    assert (log.version_at_least, log.version_at_most) == (None, "0.5.12.post1")
    assert log.graphs[0].seconds == 8.1
    new = [
        "[2026-11-01 10:00:01] SWA KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 8000, K size: 0.50 "
        "GB, V size: 0.50 GB",
        "[2026-11-01 10:00:01] Full KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 10000, K size: 1.00 "
        "GB, V size: 1.00 GB",
        "[2026-11-01 10:00:01] SWAKVPool mem usage: 3.00 GB, swa size: 8000, full size: 10000",
        "[2026-11-01 10:00:01] Memory pool end. avail mem=20.00 GB",
        "[2026-11-01 10:00:02] Full KV Cache is allocated. dtype: torch.bfloat16, #tokens: 10000, K size: 0.25 GB, V "
        "size: 0.25 GB",
        "[2026-11-01 10:00:02] Memory pool end. avail mem=19.50 GB",
    ]
    log = read_log(new)
    assert [(p.role, p.label, p.label_known_by) for p in log.kv_pools] == [
        ("target", "swa", "line"),
        ("target", "full", "line"),
        ("draft", "full", "line"),
    ]
    assert log.kv is not None
    assert (log.kv.tokens, log.kv.target_gib_per_rank, log.kv.draft_gib_per_rank) == (10000, 3.0, 0.5)
    assert log.version_at_least == "0.5.17"
    assert log.avail_after_target_pools_gib == 20.0


def test_mla_pool_has_one_size() -> None:
    """An MLA pool prints one size; K and V stay unknown, not 0."""
    log = read_log(["[2026-02-26 05:35:08 TP0] KV Cache is allocated. #tokens: 3262823, KV size: 186.77 GB"])
    (pool,) = log.kv_pools
    assert (pool.k_gib, pool.v_gib, pool.kv_gib) == (None, None, 186.77)
    assert (pool.dtype, pool.dtype_known_by) == (None, "not_known")
    assert log.kv is not None and log.kv.eight_bit_without_scales is None


def test_several_launches_are_read_as_the_last_one() -> None:
    """A journal with two starts gives the second, and says how the first ended."""
    first, second = recorded("cpu-sglang/sp15_nextn.log"), recorded("cpu-sglang/q3_15b.log")
    log = read_log([*first, *second])
    assert log.is_ready and log.failure is None
    assert [(start.ready, start.failure_class) for start in log.launches] == [(False, "crash"), (True, None)]
    swapped = read_log([*second, *first])
    assert not swapped.is_ready
    assert swapped.failure is not None and swapped.failure.id == "no_gpu_driver"


def test_weights_loaded_after_ready_begin_a_launch() -> None:
    """A journal that was searched has lost the lines a start begins with; a server that was ready loads no weights again."""
    lines = [
        "[2025-12-02 13:00:44] Load weight begin. avail mem=78.66 GB",
        "[2025-12-02 13:00:45] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 427282, K size: 26.08 GB, V size: 26.08 GB",
        "[2025-12-02 13:00:47] The server is fired up and ready to roll!",
        "[2025-12-02 13:10:44] Load weight begin. avail mem=78.66 GB",
        "[2025-12-02 13:10:45] KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 854564, K size: 26.08 GB, V size: 26.08 GB",
    ]
    log = read_log(lines)
    assert [(start.line_no, start.ready) for start in log.launches] == [(1, True), (4, False)]
    assert not log.is_ready and log.kv and log.kv.dtype == "float8_e4m3fn"
    assert read_log(lines[:2] + lines[3:]).launches == []  # two ranks, or a draft: nothing was ready between them


def test_ready_needs_its_line() -> None:
    """Without the line, nothing else makes a server ready; a vLLM server's line is uvicorn's."""
    lines = [line for line in recorded("cpu-sglang/q3_15b.log") if b"fired up" not in line]
    assert read_log(lines).ready is None
    assert read_log(recorded("cpu-sglang/vl1.log")).is_ready


# ------------------------------------------------------------------------------------ what stands around a line

PREFIXES = [
    b"",
    b"Nov 29 13:05:53 host sglang[1234]: ",
    b"2026-11-29T13:05:53+0000 gpu-1 python3[77]: ",
    b"sglang-server-1  | ",
    b"2026-11-29T13:05:53.123456789Z stdout F ",
    b"\x1b[32m",
]


ENDINGS = [b"\r", b"", b"\r", b"", b"\r", b"\x1b[0m"]


@pytest.mark.parametrize(("prefix", "ending"), list(zip(PREFIXES, ENDINGS, strict=True)))
def test_prefixes_colours_and_line_ends(prefix: bytes, ending: bytes) -> None:
    """Journal and container prefixes, colours and CRLF change no fact."""
    plain = recorded("h200-sglang-0.5.16/m2_nextn_auto.log")
    want, got = read_log(plain), read_log([prefix + line + ending if line.strip() else line for line in plain])
    for name in (
        "version",
        "model_class",
        "weights_gib_per_rank",
        "last_avail_gib",
        "is_ready",
        "retractions",
        "http_lines",
    ):
        assert getattr(got, name) == getattr(want, name), name
    assert got.kv == want.kv
    assert got.batches.spreads == want.batches.spreads
    assert (got.batches.decode_lines, got.batches.prefill_lines) == (
        want.batches.decode_lines,
        want.batches.prefill_lines,
    )
    assert [(g.name, g.state, g.seconds) for g in got.graphs] == [(g.name, g.state, g.seconds) for g in want.graphs]
    assert got.failure is not None and want.failure is not None
    assert (got.failure.id, got.failure.line_no) == (want.failure.id, want.failure.line_no)


@pytest.mark.parametrize(
    "tags", ["TP{r}", "DP{r} TP{r}", "PP0 TP{r}", "DP{r} TP{r} EP{r}", "DP{r} PP1 ATTN_CP0 MOE_DP1 TP{r} EP{r}"]
)
@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_ranks_are_not_summed(tags: str, ranks: int) -> None:
    """N interleaved ranks hold the same per-rank sizes as one, whatever the tags."""
    single = [line for line in recorded("h200-sglang-0.5.16/m2_nextn_auto.log") if b"Capturing" not in line]
    stop = next(i for i, line in enumerate(single) if b"fired up" in line)
    lines: list[bytes] = []
    for line in single[: stop + 1]:
        worker = any(
            word in line for word in (b"Load weight", b"KV Cache", b"Mamba", b"Memory pool", b"FP8 KV", b"Capture")
        )
        if worker:
            order = list(range(ranks))
            random.Random(len(lines)).shuffle(order)
            lines += [line.replace(b"] ", f" {tags.format(r=rank)}] ".encode(), 1) for rank in order]
        else:
            lines.append(line)
    want, got = read_log(single[: stop + 1]), read_log(lines)
    assert got.kv is not None and want.kv is not None
    assert got.kv.total_gib_per_rank == want.kv.total_gib_per_rank
    assert got.kv.tokens == want.kv.tokens
    assert got.kv.ranks_seen == ranks
    assert got.weights_gib_per_rank == want.weights_gib_per_rank
    assert got.memory_of_parts_gib == want.memory_of_parts_gib
    assert len(got.kv_pools) == 2 * ranks
    assert {pool.role for pool in got.kv_pools} == {"target", "draft"}
    warning = next(notice for notice in got.notices if notice.id == "kv_scale_default")
    assert len(warning.ranks) == ranks


@given(
    tokens=st.integers(4096, 50_000_000),
    k=st.integers(1, 20000).map(lambda n: n / 100),
    dtype=st.sampled_from(["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16", "float32"]),
    path=st.text("abcxyz0123_-", min_size=1, max_size=12),
)
@settings(max_examples=60, deadline=None)
def test_perturbed_numbers_follow(tokens: int, k: float, dtype: str, path: str) -> None:
    """Other numbers, dtypes and paths in a recorded log come out as they went in."""
    text = (RECORDED / "h200-h1" / "e_L2_auto.log").read_text(errors="replace")
    text = text.replace("dtype: torch.float8_e4m3fn, #tokens: 16384, K size: 0.03 GB, V size: 0.03 GB",
                        f"dtype: torch.{dtype}, #tokens: {tokens}, K size: {k:.2f} GB, V size: {k:.2f} GB")  # fmt: skip
    text = text.replace("max_total_num_tokens=16384", f"max_total_num_tokens={tokens}").replace(
        "/srv/models", f"/data/{path}"
    )
    log = read_log(text.splitlines())
    (pool,) = log.kv_pools
    assert (pool.tokens, pool.k_gib, pool.dtype) == (tokens, k, dtype)
    assert log.capacity is not None and log.capacity.max_total_num_tokens == tokens
    assert str(log.server_args["model_path"]).startswith(f"/data/{path}")


# ------------------------------------------------------------------------------------ versions


@pytest.mark.parametrize("index", range(len(log_tables.VERSION_MARKS)))
def test_version_by_arguments(index: int) -> None:
    """The names of the arguments give the release, up to the next one's names."""
    names = [name for _, marks in log_tables.VERSION_MARKS[: index + 1] for name in marks]
    filler = [f"argument_{n}" for n in range(120)]
    log = read_log(
        ["[2026-11-29 13:05:57] server_args=ServerArgs(" + ", ".join(f"{n}=None" for n in [*filler, *names]) + ")"]
    )
    assert log.version_at_least == log_tables.VERSION_MARKS[index][0]
    assert log.version_known_by == "server_args"


@pytest.mark.parametrize(("needle", "first", "last"), log_tables.VERSION_LINES)
def test_version_by_lines(needle: str, first: str | None, last: str | None) -> None:
    """One line that came or went with a release bounds the version."""
    log = read_log(
        [
            f"[2026-11-29 13:05:57] {needle} something about the KV Cache",
            "[2026-11-29 13:05:58] Memory pool end. avail mem=1.00 GB",
        ]
    )
    assert (log.version_at_least, log.version_at_most) == (first, last)


def test_contradicting_lines_give_no_version() -> None:
    """Lines of different releases in one log are said to contradict each other, and nothing is guessed."""
    log = read_log(
        ["[2026-11-29 13:05:57] Using KV cache dtype: torch.bfloat16", "[2026-11-29 13:05:57] Init parallel begin."]
    )
    assert log.version is None and log.version_known_by == "not_known"
    assert "contradict" in log.version_evidence[-1]


# ------------------------------------------------------------------------------------ acceptance


@given(steps=st.integers(1, 12), accepted=st.lists(st.floats(0, 1), min_size=1, max_size=30))
@settings(max_examples=200, deadline=None)
def test_new_definition_with_the_arguments_known(steps: int, accepted: list[float]) -> None:
    """Lines as 0.5.11 and newer print them (rate of drafts), with a known version, always give that rate."""
    pairs = [(round(1 + steps * rate, 2), round(rate, 2)) for rate in accepted]
    told = accept_rate_definition(pairs, num_steps=steps, num_draft_tokens=steps + 1, version_low="0.5.16")
    assert told[:3] == ("drafts", steps, steps + 1)


@given(steps=st.integers(1, 12), low=st.floats(0.05, 0.4), high=st.floats(0.5, 0.95))
@settings(max_examples=200, deadline=None)
def test_new_definition_by_arithmetic(steps: int, low: float, high: float) -> None:
    """Two distant pairs alone tell the definition and never a wrong number of steps."""
    pairs = [(round(1 + steps * rate, 2), round(rate, 2)) for rate in (low, high)]
    definition, found, _, known = accept_rate_definition(pairs)
    assert definition == "drafts"
    assert found in (steps, None)
    assert steps > 6 or (found, known) == (steps, "arithmetic")


@given(tokens=st.integers(2, 10), low=st.floats(1.0, 1.2), high=st.floats(1.6, 2.0))
@settings(max_examples=200, deadline=None)
def test_old_definition(tokens: int, low: float, high: float) -> None:
    """Lines as 0.5.10 prints them (accept_len / num_draft_tokens) are never read as a rate of drafts."""
    pairs = [(round(length, 2), round(length / tokens, 2)) for length in (low, high)]
    definition, _, found, _ = accept_rate_definition(pairs)
    assert definition == "tokens"
    assert found in (tokens, None)
    assert accept_rate_definition(pairs, version_high="0.5.10")[0] == "tokens"


def test_no_draft_accepted_is_a_real_zero() -> None:
    """Accept length 1.00 is no accepted draft: 0, not 11%; and no speculation at all is None."""
    log = read_log(
        [
            "[2026-01-01 00:00:00] Decode batch, #running-req: 48, #token: 3894, token usage: 0.00, accept len: "
            "1.00, accept rate: 0.11, cuda graph: False, gen throughput (token/s): 5452.63, #queue-req: 0, "
        ]
    )
    assert log.speculation is not None
    assert (log.speculation.drafts_accepted_per_step, log.speculation.draft_acceptance, log.speculation.active) == (
        0.0,
        0.0,
        False,
    )
    assert read_log(recorded("cpu-sglang/q3_15b.log")).speculation is None


# ------------------------------------------------------------------------------------ pure helpers


def test_bytes_per_token() -> None:
    """A printed size allows a range; the roundest value in it is taken, and 0.00 GB says nothing."""
    # 40 layers x 8 heads x 128 x 2 bytes x (K and V) = 163,840
    assert bytes_per_token(21456, [1.64, 1.64])[2] == 163840
    # 16 layers x 4 heads x 256 x 1 byte x 2 = 32,768
    assert bytes_per_token(228520, [3.49, 3.49])[2] == 32768
    assert bytes_per_token(4096, [0.0, 0.0]) == (None, None, None)
    assert bytes_per_token(0, [1.0]) == (None, None, None)
    low, high, likely = bytes_per_token(32768, [0.18, 0.18])
    assert low is not None and high is not None and low < 11520 < high
    assert likely is None  # 0.18 is too coarse


@given(power=st.integers(7, 14), odd=st.sampled_from([1, 3, 5, 7, 9, 15, 45]), tokens=st.integers(200_000, 20_000_000))
@settings(max_examples=100, deadline=None)
def test_bytes_per_token_range_holds_the_truth(power: int, odd: int, tokens: int) -> None:
    """The range always holds the real value, whatever the rounding."""
    real = odd << power
    printed = round(real * (tokens + 1) / (1 << 30), 2)
    low, high, _ = bytes_per_token(tokens, [printed])
    if printed > 0:
        assert low is not None and high is not None
        assert low - 0.01 <= real <= high + 0.01


def test_kv_dtype_by_arithmetic() -> None:
    """The element size follows from the pool and the model's elements per token."""
    (pool,) = read_log(["KV Cache is allocated. #tokens: 228520, K size: 3.49 GB, V size: 3.49 GB"]).kv_pools
    assert kv_dtype_by_arithmetic(pool, 16 * 2 * 4 * 256) == "8-bit"
    assert kv_dtype_by_arithmetic(pool, 8 * 2 * 4 * 256) == "16-bit"
    assert kv_dtype_by_arithmetic(pool, 1000) is None


def test_server_args_forms() -> None:
    """Both forms are read, nested objects and cut lines too."""
    args, whole = parse_server_args(
        "ServerArgs(a='x, y', b=None, c=[1, 2], d=Cfg(decode=Ph(bs=[1], on=True)), e={'k': \"v's\"}, f=<E.A: 1>)"
    )
    assert whole
    assert args == {
        "a": "x, y",
        "b": None,
        "c": [1, 2],
        "d": {"decode": {"bs": [1], "on": True}},
        "e": {"k": "v's"},
        "f": "<E.A: 1>",
    }
    assert parse_server_args("{'a': 1, 'b': 'x'}") == ({"a": 1, "b": "x"}, True)
    assert parse_server_args("ServerArgs(a=1, b='cut") == ({"a": 1}, False)
    assert parse_server_args("nonsense") == ({}, False)


def test_seconds_between() -> None:
    """Times are subtracted only if both are there and have the same form."""
    assert seconds_between("2026-11-29 13:05:53", "2026-11-29 13:06:36") == 43.0
    assert seconds_between("11-29 12:57:39", "11-29 12:58:26") == 47.0
    assert seconds_between("23:59:50", "00:00:10") == 20.0
    assert seconds_between("12-31 23:59:50", "01-01 00:00:10") == 20.0
    assert seconds_between("2026-13-29 13:05:53", "2026-11-29 13:06:36") is None
    assert seconds_between(None, "2026-11-29 13:06:36") is None
    assert seconds_between("11-29 12:57:39", "2026-11-29 13:06:36") is None


def test_split_messages() -> None:
    """A progress bar and the messages written onto its line are separate messages."""
    raw = (
        b"  0%|          | 0/20 [00:00<?, ?it/s][2026-11-29 13:06:29] first[2026-11-29 13:06:30] second\rCapturing 1/20"
    )
    texts = [parse_line(1, part).text.strip() for part in split_messages(raw)]
    assert texts[1:] == ["first", "second", "Capturing 1/20"]


# ------------------------------------------------------------------------------------ secrets

SECRET = "sk-verysecret0123456789abcdef"


@pytest.mark.parametrize(
    "form",
    [
        "ServerArgs(model_path='/m', api_key='{s}', admin_api_key='{s}', port=1)",
        "{{'model_path': '/m', 'api_key': '{s}', 'port': 1}}",
    ],
)
def test_api_keys_never_come_out(form: str) -> None:
    """A key in server_args, on the command line, in a later line or in a traceback is in no output."""
    key = "correct-horse-battery"
    lines = [
        f"$ python -m sglang.launch_server --model-path /m --api-key {key} --port 1",
        "[2026-11-29 13:05:57] server_args=" + form.format(s=key),
        "[2026-11-29 13:05:58] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/srv/a.py", line 1, in load_model',
        f"ValueError: bad header Authorization: Bearer {key} and {SECRET}",
    ]
    log = read_log(lines)
    assert log.server_args["model_path"] == "/m"
    assert log.failure is not None
    text = log.model_dump_json()
    assert key not in text and SECRET not in text
    assert "REDACTED" in text


@pytest.mark.parametrize("key", ["test", "sglang", "bfloat16", "model", "EMPTY"])
def test_a_key_that_is_a_word_destroys_nothing(key: str) -> None:
    """A short key that is an ordinary word is hidden in its place, and the record's own words stay."""
    lines = recorded("cpu-sglang/q3_15b.log")
    keyed = [line.replace(b"api_key=None", f"api_key='{key}'".encode()) for line in lines]
    want, got = read_log(lines), read_log(keyed)
    assert got.server_args["api_key"] == "REDACTED"
    assert (got.engine, got.version, got.model_class, got.kv) == (want.engine, want.version, want.model_class, want.kv)
    assert set(got.server_args) == set(want.server_args)


def test_api_keys_never_come_out_of_classify() -> None:
    """A key that server_args names is in no quote of a failure either."""
    key = "correct-horse-battery"
    lines = [
        f"[2026-11-29 13:05:57] server_args=ServerArgs(model_path='/m', api_key='{key}', port=1)",
        "[2026-11-29 13:05:58] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/srv/a.py", line 1, in load_model',
        f"ValueError: cannot use {key}",
    ]
    failure = classify(lines)
    assert failure is not None and key not in failure.model_dump_json()


# ------------------------------------------------------------------------------------ bad input


def test_foreign_and_empty() -> None:
    """Another program's log is said to be foreign, an empty one empty; neither gets a fact."""
    for lines in ([], [b""], ["", ""]):
        assert read_log(lines).engine == "empty"
    llama = read_log(
        ["llama_model_loader: loaded meta data with 25 key-value pairs", "llm_load_print_meta: arch = llama"]
    )
    assert (llama.engine, llama.foreign_program) == ("foreign", "llama.cpp")
    nginx = read_log(['10.0.0.1 - - [29/Nov/2026] "GET / HTTP/1.1" 200 5'] * 50)
    assert nginx.engine == "foreign" and nginx.kv is None and nginx.failure is None
    noise = read_log(random.Random(1).randbytes(200_000).split(b"\n"))
    assert noise.engine == "foreign"
    assert read_log(recorded("cpu-sglang/vl1.log")).engine == "vllm"


def test_prompts_in_the_log_are_not_the_servers_words() -> None:
    """What a user wrote and the server logged (--log-requests) is no failure and no fact."""
    lines = recorded("cpu-sglang/q3_15b.log")
    said = b"[2026-11-29 13:00:00] Receive: obj=GenerateReqInput(text='RuntimeError: CUDA out of memory. KV Cache is allocated. dtype: torch.float8_e5m2, #tokens: 1, K size: 1.00 GB, V size: 1.00 GB')"
    want, got = read_log(lines), read_log([*lines, said])
    assert got.failure is None
    assert got.kv == want.kv


def test_batch_lines_in_a_prompt_are_not_counted() -> None:
    """A batch line that a user pasted into a prompt is no batch line."""
    pasted = b"Decode batch, #running-req: 9, #token: 1, token usage: 0.99, cuda graph: True, gen throughput (token/s): 9.00, #queue-req: 9"
    lines = recorded("h200-sglang-0.5.16/m1_base.log")
    said = b"[2026-11-29 13:00:00] Receive: obj=GenerateReqInput(text='why " + pasted + b"')"
    assert read_log([*lines, said]).batches == read_log(lines).batches


def test_repeated_warnings_are_counted() -> None:
    """A warning that is repeated ten thousand times by three ranks is counted, with its ranks."""
    line = "[2026-11-29 13:06:27 TP%d] Using FP8 KV cache but no scaling factors provided. Defaulting to scaling factors of 1.0."
    log = read_log(line % (n % 3) for n in range(10_000))
    (notice,) = log.notices
    assert (notice.count, notice.ranks, notice.line_no) == (10_000, ["TP0", "TP1", "TP2"], 1)


def test_a_line_without_end_is_cut() -> None:
    """A huge line is cut at MAX_LINE_BYTES and the lines after it keep their numbers."""
    blocks = [b"x" * (1 << 20)] * 40 + [b"\n[2026-11-29 13:06:28] Memory pool end. avail mem=9.00 GB\n"]
    supply = iter(blocks)
    items = list(lines_of(lambda size: next(supply, b"")))
    assert [len(items[0]), len(items)] == [MAX_LINE_BYTES, 2]
    log = read_log(items)
    assert log.last_avail_gib == 9.0
    assert (log.cut_lines, log.lines) == (1, 2)
    assert log.engine == "sglang"


def test_long_series_is_thinned_and_counted() -> None:
    """A million batch lines keep a bounded series and exact counts."""
    line = b"[2026-11-29 13:06:28] Decode batch, #running-req: %d, #token: 10, token usage: 0.10, cuda graph: True, gen throughput (token/s): %d.00, #queue-req: 0"
    log = read_log(line % (n % 7, n) for n in range(50_000))
    assert log.batches.decode_lines == 50_000
    assert len(log.batches.series) <= 2001
    assert log.batches.every > 1
    assert log.batches.spreads["decode"]["gen_tok_s"].high == 49_999
    numbers = [row.line_no for row in log.batches.series]
    assert {b - a for a, b in zip(numbers, numbers[1:], strict=False)} == {log.batches.every}


def test_long_words_take_no_time() -> None:
    """Very long words meet no pattern that backtracks over them (a quadratic one took minutes here)."""
    line = (H200 / "m1_nextn.log").read_bytes().split(b"\n")[20]
    start = time.process_time()
    for filler in (b"9", b"a", b"A", b"_", b" "):
        read_log([line + filler * 60_000, b"RuntimeError: " + filler * 60_000, filler * 60_000 + b" error: "])
    assert time.process_time() - start < 20


def test_truncated_anywhere() -> None:
    """A log that is cut at any byte is read without an error, and never as ready before its line."""
    data = (H200 / "m2_nextn_auto.log").read_bytes()
    ready = data.index(b"The server is fired up and ready to roll!") + 41
    for cut in range(0, len(data), 4999):
        log = read_log(data[:cut].split(b"\n"))
        assert log.is_ready is (cut >= ready)


NASTY = [
    b"",
    b"\r",
    b"9" * 30,
    b"9" * 5000,
    b"1.2.3",
    b",",
    b".",
    b"1e999",
    b"inf",
    b"\x00",
    b"\xff",
    b"nan",
    b"-",
    b"(",
    b"'",
]
LINES = [line for path in LOGS for line in path.read_bytes().split(b"\n") if 0 < len(line) < 2000]


@given(
    st.lists(st.one_of(st.sampled_from(LINES), st.binary(max_size=200)), max_size=40), st.randoms(use_true_random=False)
)
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_fuzz(lines: list[bytes], chance: random.Random) -> None:
    """Any mix of real lines, cut and spliced, and rubbish is read without an error and can be written as JSON."""
    mixed = []
    for line in lines:
        if chance.random() < 0.4 and line:
            a, b = sorted((chance.randrange(len(line) + 1), chance.randrange(len(line) + 1)))
            line = line[:a] + chance.choice(NASTY) + line[b:]
        mixed.append(line)
    log = read_log(mixed)
    assert ServerLog.model_validate_json(log.model_dump_json()) == log


@given(st.text(max_size=300))
@settings(max_examples=200, deadline=None)
def test_fuzz_server_args(text: str) -> None:
    """Any text after server_args= is read without an error."""
    read_log([f"[2026-11-29 13:05:57] server_args=ServerArgs({text}"])
    read_log([f"[2026-11-29 13:05:57] server_args={{{text}"])


# ------------------------------------------------------------------------------------ the command line


def run_cli(args: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    import argparse

    from lib.cli import _inspect_log
    from lib.errors import WorkbookError

    parser = argparse.ArgumentParser()
    _inspect_log.add_parser(parser.add_subparsers(required=True))
    parsed = parser.parse_args(["log", *args])
    try:
        return parsed.run(parsed), capsys.readouterr().out
    except WorkbookError as error:
        return error.exit_code, str(error)


def test_cli_exit_codes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """0 read, 1 a finding at or above --fail-on, 2 with one message for what can't be read."""
    good = str(RECORDED / "cpu-sglang" / "q3_15b.log")
    dead = str(RECORDED / "cpu-sglang" / "sp15_nextn.log")
    assert run_cli([good], capsys)[0] == 0
    assert run_cli([good, "--fail-on", "critical"], capsys)[0] == 0
    assert run_cli([good, "--fail-on", "low"], capsys)[0] == 1  # CUDA graphs are disabled
    assert run_cli([dead], capsys)[0] == 0
    assert run_cli([dead, "--fail-on", "critical"], capsys)[0] == 1
    empty = tmp_path / "empty.log"
    empty.write_bytes(b"")
    noise = tmp_path / "noise.log"
    noise.write_bytes(random.Random(3).randbytes(9000))
    for bad in (str(tmp_path), str(tmp_path / "missing"), str(empty), str(noise)):
        code, message = run_cli([bad], capsys)
        assert code == 2 and "do:" in message and "\n" not in message


def test_cli_reads_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """- is standard input, and gives what the file gives."""
    path = RECORDED / "cpu-sglang" / "q3_15b.log"
    want = run_cli([str(path)], capsys)
    with path.open("rb") as handle:
        monkeypatch.setattr("sys.stdin", type("Stdin", (), {"buffer": handle})())
        assert run_cli(["-"], capsys) == want


def test_cli_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints one object with the names that the documentation lists."""
    code, out = run_cli([str(H200 / "m2_auto.log"), "--json"], capsys)
    data = json.loads(out)
    assert code == 0
    assert data["kv"]["dtype"] == "float8_e4m3fn" and data["capacity"]["max_total_num_tokens"] == 11483156
    documented = (TESTS.parent / "docs" / "inspect-log.md").read_text()
    missing = [name for name in data if f"`{name}`" not in documented]
    assert not missing


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_cli_report(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The readable report of every recorded log names the engine and whether it is ready."""
    code, out = run_cli([str(path)], capsys)
    assert code == 0
    assert out.startswith(("sglang ", "vllm "))
    assert "ready" in out


@pytest.mark.parametrize("hours", [0, 1, 9])
def test_seconds_are_counted_by_one_clock(hours: int) -> None:
    """`docker logs -t` puts UTC before lines that carry local time, or none: a difference never mixes the two."""
    inner = f"[2026-11-29 {10 + hours:02}:{{}}] "
    rows = [
        ("00:00", "", "Fail to set RLIMIT_NOFILE: no"),
        ("00:05", inner.format("00:05"), "Load weight begin. avail mem=100.00 GB"),
        ("00:25", inner.format("00:25"), "Capture cuda graph begin. This can take up to several minutes."),
        ("00:42", inner.format("00:42"), "The server is fired up and ready to roll!"),
    ]
    log = read_log([f"2026-11-29T10:{at}.000000000Z {own}{text}" for at, own, text in rows])
    assert log.ready is not None
    assert log.ready.seconds_from_first_line == 42
    assert {row.name: row.seconds for row in log.phases if row.seconds is not None} == {
        "loading_weights": 20,
        "capturing_graphs": 17,
    }


def test_seconds_between_two_clocks_are_not_said() -> None:
    """Only the first line has the collector's stamp, only the last the server's: no difference can be taken."""
    lines = [
        "2026-11-29T10:00:00.0Z Fail to set RLIMIT_NOFILE: no",
        "[2026-11-29 19:00:42] The server is fired up and ready to roll!",
    ]
    log = read_log(lines)
    assert log.ready is not None
    assert log.ready.seconds_from_first_line is None


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (gzip.compress, "zcat"),
        (bz2.compress, "bzcat"),
        (lzma.compress, "xzcat"),
        (lambda raw: raw.decode("utf-8").encode("utf-16"), "iconv -f UTF-16 "),
        (lambda raw: raw.decode("utf-8").encode("utf-16-le"), "iconv -f UTF-16LE "),
        (lambda raw: raw.decode("utf-8").encode("utf-16-be"), "iconv -f UTF-16BE "),
        (lambda raw: json.dumps({"version": "0.5.16", "log": raw.decode("utf-8")}, indent=1).encode(), "audit --server-info"),
    ],
)
def test_cli_names_what_is_no_text(
    write: Callable[[bytes], bytes], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A packed log, one in UTF-16 and an answer of /server_info: exit 2 with the command that reads it."""
    raw = (RECORDED / "cpu-sglang" / "q3_15b.log").read_bytes()
    path = tmp_path / "server.log"
    path.write_bytes(write(raw))
    code, message = run_cli([str(path)], capsys)
    assert code == 2 and says in message and str(path) in message
    path.write_bytes(raw)
    assert run_cli([str(path)], capsys)[0] == 0


def test_cli_reads_lines_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON lines are a log: not taken for one object."""
    path = tmp_path / "server.log"
    row = json.dumps({"line": "[2026-11-29 10:00:00] The server is fired up and ready to roll!"})
    path.write_text(f"{row}\n{row}\n")
    assert "one JSON object" not in run_cli([str(path)], capsys)[1]


def test_cli_names_one_phase_and_no_negative_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The phase of a death stands in one place; weights below zero are no measurement."""
    path = tmp_path / "server.log"
    lines = [
        "[2026-11-29 10:00:00] Load weight begin. avail mem=100.00 GB",
        "[2026-11-29 10:00:09] Load weight end. elapsed=9.00 s, type=LlamaForCausalLM, avail mem=130.00 GB, mem usage=-30.00 GB.",
        "[2026-11-29 10:00:10] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/x/model_runner.py", line 1, in alloc_memory_pool',
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
    ]
    path.write_text("\n".join(lines))
    out = run_cli([str(path)], capsys)[1]
    assert "in phase allocating_kv" in out and "last phase" not in out
    assert "weights: -30 GiB is not usable: another process changed free memory" in out
    assert read_log(lines).weights_gib_per_rank is None
    draft = lines[1].replace("LlamaForCausalLM", "LlamaForCausalLMEagle")
    assert read_log([lines[1].replace("-30", "30"), draft]).weights_gib_per_rank is None
    path.write_text("\n".join(lines[:2]).replace("-30", "30"))
    out = run_cli([str(path)], capsys)[1]
    assert "last phase: loading_weights" in out and "weights: 30 GiB per rank" in out


@pytest.mark.parametrize(
    ("text", "gib"),
    [("Model loading took 28.4500 GiB and 21.10 seconds", 28.45), ("Model loading took 28.45 GiB memory and 21.1 seconds", 28.45),
     ("Loading model weights took 14.9 GB", 14.9)],
)  # fmt: skip
def test_weights_of_vllm(text: str, gib: float) -> None:
    """vLLM's line about its weights, as several versions write it, gets through the prefilter."""
    head = b"INFO 05-01 19:20:00 [api_server.py:1896] vLLM API server version 0.11.0"
    log = read_log([head, f"(Worker_TP0 pid=7) INFO 05-01 19:20:40 [gpu_model_runner.py:2653] {text}".encode()])
    assert log.engine == "vllm" and log.weights_gib_per_rank == gib


@pytest.mark.parametrize(
    ("model_class", "tp", "per_token", "dtype"),
    [
        # 40 x 8 x 128 x 2 (K and V) x 2 B: Nemo 12B and Small 24B, both in 16 bits.
        ("MistralForCausalLM", 1, 163840, "bfloat16"),
        ("MistralForCausalLM", 2, 81920, "bfloat16"),
        # 32 x 8 x 128 x 2 x 1 B: only the 8B in FP8; 16 x 8 x 64 x 2 x 2 B = 32,768 is the 1B.
        ("LlamaForCausalLM", 1, 65536, "float8_e4m3fn"),
        # 61 x 576 x 2 B, whatever the ranks.
        ("DeepseekV3ForCausalLM", 8, 70272, "bfloat16"),
        ("FooForCausalLM", 1, 163840, None),
        ("MistralForCausalLM", 1, 99999, None),
    ],
)
def test_dtype_by_published_geometry(model_class: str, tp: int, per_token: int, dtype: str | None) -> None:
    """The dtype with which published checkpoints of a class explain a pool; None where none does."""
    found = dtype_by_geometry(model_class, tp, per_token=(per_token * 0.998, per_token * 1.002))
    assert (found and found[0]) == dtype


def test_dtype_by_geometry_that_two_dtypes_explain_is_none() -> None:
    """Mistral Large in FP8 has 88 x 8 x 128 x 2 B = 180,224 B, between none; Qwen3-30B BF16 at TP 4 equals none in FP8."""
    assert dtype_by_geometry("Qwen3NextForCausalLM", 1, per_token=(12000.0, 25000.0)) is None  # 12,288 or 24,576
