"""The capacity planner: the figures of `memory`, beside a server's own, and what can't be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lib.errors import BadInput, WorkbookError
from lib.model.capacity import AS_STORED, GIB, ServerFigure, Wanted, plan, unlike, weights_on_gpu
from lib.model.checkpoint import checkpoint_from_configs, read_checkpoint
from lib.model.facts import Checkpoint
from lib.model.memory import predict_pools
from lib.params import ROOT
from lib.widgets import planner, sources
from lib.widgets.panel import Values

CONFIGS = ROOT / "tests" / "cases" / "kv_memory" / "inputs"
#: 8,192 x 128 embedding, once more for the output, and 1,000,000 other weights.
COUNTED: dict[str, Any] = {"weight_bytes": 6_194_304, "parameters_by_dtype": {"BF16": 3_097_152}}


def llama(**changes: Any) -> Checkpoint:
    made = checkpoint_from_configs(json.loads((CONFIGS / "llama-3.1-8b.config.json").read_text()))
    return made.model_copy(update={"weight_bytes": 16_060_522_496, **changes})


def small() -> Checkpoint:
    made = llama(**COUNTED)
    config = {**made.config, "vocab_size": 8192, "hidden_size": 128, "tie_word_embeddings": False}
    return made.model_copy(update={"config": config})


H200 = Wanted(tp=1, gpu_memory_mib=143771.0, mem_fraction_static=0.8, sglang_version="0.5.16")


def test_a_plan_is_what_memory_predicts() -> None:
    """The same figure as `predict_pools` gives for the same question, and whole requests of the context."""
    made = plan(llama(), H200)
    asked = predict_pools(llama(), gpu_memory_mib=143771.0, mem_fraction_static=0.8, sglang_version="0.5.16")
    assert made.pools.max_total_num_tokens == asked.max_total_num_tokens
    assert made.requests == asked.max_total_num_tokens // 131072
    # 32 layers x 8 heads x 2 x 128 x 2 B = 131,072 B a token; half of that in 8 bits: twice the tokens
    half = plan(llama(), H200.model_copy(update={"kv_cache_dtype": "fp8_e4m3"}))
    assert (made.pools.bytes_per_token, half.pools.bytes_per_token) == (131072, 65536)
    assert abs(half.pools.max_total_num_tokens - 2 * made.pools.max_total_num_tokens) <= 2


@pytest.mark.parametrize(
    ("weights", "size"),
    [
        (AS_STORED, 6_194_304),
        ("bfloat16", 6_194_304),  # 3,097,152 x 2
        ("fp8", 1_000_000 + 2 * 2_097_152),  # embedding and output stay in 16 bits
        ("nvfp4", 562_500 + 2 * 2_097_152),  # 4.5 bits a weight
        ("float32", 4 * 3_097_152),
    ],
)
def test_weights_in_another_precision(weights: str, size: int) -> None:
    """Linear weights change, embedding and output don't, and GPUs share."""
    found, why = weights_on_gpu(small(), weights, 2)
    assert found == pytest.approx(size / 2 / GIB) and "GPUs" in why


@pytest.mark.parametrize("stored", [{}, {"BF16": 10, "U8": 100}, {"I32": 5}])
def test_packed_weights_are_not_guessed(stored: dict[str, int]) -> None:
    """A checkpoint whose elements hold several weights each, or without a tensor list, has no other precision here."""
    with pytest.raises(BadInput, match="weights that can be counted"):
        weights_on_gpu(llama(parameters_by_dtype=stored), "fp8", 1)


def test_a_configuration_alone_needs_the_weights_size() -> None:
    """config.json does not say how large the weights are: one message, not a plan without weights."""
    with pytest.raises(BadInput, match="give it in GiB"):
        plan(llama(weight_bytes=None), H200)
    assert plan(llama(weight_bytes=None), H200.model_copy(update={"weights_gib": 15.0})).requests


SERVER = ServerFigure(
    name="L1", running=True, path="raw/01/servers/L1/server_info.json", tokens=700_000, kv_gib=85.4, weights_gib=15.0,
    running_requests=2048, context_length=131072,
    settings={"tp": 1, "kv_cache_dtype": "bf16", "mem_fraction_static": 0.8, "context_length": None,
              "max_total_tokens": None, "max_running_requests": None, "sglang_version": "0.5.16"},
)  # fmt: skip


def test_the_server_s_own_figure_stands_beside_the_plan_with_the_difference() -> None:
    """Tokens, pool, weights and requests, each with the measured one, the difference, and the raw file."""
    view = planner.planned(llama(), H200, SERVER)
    tokens = plan(llama(), H200).pools.max_total_num_tokens
    assert f"{abs(700_000 - tokens):,} {'more' if tokens < 700_000 else 'fewer'} than planned" in view.sentence
    assert "with the same settings" in view.sentence
    rows = {row["what"]: row for row in planner.rows_of(plan(llama(), H200), SERVER)}
    row = rows["tokens in the KV pool"]
    assert row["server's own"].value == 700_000 and row["difference"].value == pytest.approx(700_000 / tokens - 1)
    assert row["evidence"].path.endswith("server_info.json")
    assert rows["KV cache bytes a token and GPU"]["server's own"].value is None
    assert view.chart is not None and "server's own 700,000" in view.chart.alt


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype float8_e4m3fn here, bfloat16 there"),
        ({"tp": 2}, "tp 2 here, 1 there"),
        ({"mem_fraction_static": 0.7}, "mem_fraction_static 0.7 here, 0.8 there"),
        ({"context_length": 4096}, "context_length 4096 here, 131072 there"),
        ({"sglang_version": "0.5.15.post1"}, "sglang_version 0.5.15.post1 here, 0.5.16 there"),
        ({"weights_gib": 3.0}, "the weights are not those of the files"),
    ],
)
def test_a_plan_for_other_settings_says_so(change: dict[str, Any], words: str) -> None:
    """A difference between figures that were not asked the same is named as such; `auto` that means bf16 is the same."""
    assert words in "; ".join(unlike(llama(), H200.model_copy(update=change), SERVER))
    assert unlike(llama(), H200, SERVER) == []
    assert words in planner.planned(llama(), H200.model_copy(update=change), SERVER).sentence


def test_no_server_is_said_and_another_model_s_is_not_compared() -> None:
    """Without a server the column says why it is empty; a server of another model is named."""
    assert "No server has answered here yet" in planner.planned(llama(), H200, None).sentence
    assert "serves another model" in planner.planned(llama(), H200, None, SERVER).sentence
    assert all(row["server's own"].value is None for row in planner.rows_of(plan(llama(), H200), None))


def values(**changes: Any) -> Values:
    first = {control.name: control.value for control in planner.controls_of(H200, "m")}
    return first | changes


def test_the_controls_begin_at_the_configuration_and_zero_is_sglang_s_default() -> None:
    """What the controls say at first is the question that they were made from; 0 leaves a flag out."""
    assert planner.asked_of(values(), H200) == H200
    asked = planner.asked_of(values(fraction=0.0, context=0, memory_gib=80.0), H200)
    assert asked.mem_fraction_static is None and asked.context_length is None and asked.gpu_memory_mib == 81920


@pytest.mark.parametrize(
    "change",
    [
        {"tp": 3},
        {"fraction": 0.05},
        {"memory_gib": 1.0},
        {"kv_cache_dtype": "nvfp4", "version": "0.5.11"},
        {"memory_gib": 0.0},
    ],
)
def test_what_can_t_be_is_one_message(change: dict[str, Any]) -> None:
    """Heads that don't divide, weights that don't fit, no memory at all: an error in words, never a figure."""
    with pytest.raises(WorkbookError) as found:
        planner.planned(llama(), planner.asked_of(values(**change), H200), SERVER)
    assert "\n" not in str(found.value) and len(str(found.value)) < 700


def test_a_typed_model_is_a_folder_or_a_config(tmp_path: Path) -> None:
    """A folder with config.json, a config.json by itself, and what is neither, with a message."""
    file = CONFIGS / "llama-3.1-8b.config.json"
    assert sources.typed_checkpoint(str(file)).architecture_name == "LlamaForCausalLM"
    (tmp_path / "config.json").write_text(file.read_text())
    assert sources.typed_checkpoint(f" {tmp_path} ").path == read_checkpoint(tmp_path).path
    for wrong in (str(tmp_path / "no"), "no-such-model", str(tmp_path / "x/y"), "\x00"):
        with pytest.raises(WorkbookError):
            sources.typed_checkpoint(wrong)
