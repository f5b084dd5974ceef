"""lib.model.memory: formulas with a worked number each, versions that differ, and the inverse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.errors import BadInput
from lib.model.checkpoint import checkpoint_from_configs
from lib.model.facts import VERSIONS_READ
from lib.model.memory import (
    DECIMAL_GB,
    GIB,
    attention_tp,
    chunk_and_graph_defaults,
    draft_layers_budgeted,
    explain_pool,
    heads_per_gpu,
    host_pool,
    kv_bytes_per_token,
    logged_pool_tokens_bytes,
    mem_fraction_static_default,
    pools_by_dtype,
    predict_pools,
    prefill_graph_sizes,
    slots_per_request,
    state_bytes_per_slot,
    state_pool_gib,
    swa_pool,
    tokens_in_pool,
    whole_bytes_per_token,
)
from tests.model.checkpoint_files import ORIGIN, SMOLLM2, TINY_HYBRID

CASES = Path(__file__).parents[1] / "cases/kv_memory/inputs"
SMOL, ORIGIN_MODEL = checkpoint_from_configs(SMOLLM2), checkpoint_from_configs(ORIGIN)
#: The origin's box, by its own log and the model card: 8 GPUs of 97,887 MiB, 94.0 GiB free before loading, 30.7 GiB
#: of weights each.
BOX: dict[str, Any] = {"tp": 8, "gpu_memory_mib": 97887, "pre_load_gib": 94.0, "available_gib": 94.0 - 30.7}


def public(name: str, **changes: Any) -> Any:
    return checkpoint_from_configs(json.loads((CASES / f"{name}.config.json").read_text()) | changes)


def test_smollm2() -> None:
    """30 layers * 3 heads * (64 + 64) * 2 B = 23,040 B in bf16, half of it in FP8."""
    kv = kv_bytes_per_token(SMOL)
    assert (kv.per_gpu, kv.k_per_gpu, kv.v_per_gpu, kv.whole_box, kv.logical) == (23040, 11520, 11520, 23040, 23040)
    assert kv_bytes_per_token(SMOL, dtype="fp8_e4m3").per_gpu == 11520
    assert kv_bytes_per_token(SMOL, dtype="fp8_e5m2").per_gpu == 11520
    assert kv_bytes_per_token(SMOL, dtype="float32").per_gpu == 46080


def test_origin() -> None:
    """Qwen3.5-397B on 8 ranks: 15 layers * 1 head * 512 * 2 B = 15,360 B, each head held 4 times; state 45 *
    533,504 B.
    """
    kv = kv_bytes_per_token(ORIGIN_MODEL, 8, "bf16", draft_layers=1)
    assert (kv.per_gpu, kv.whole_box, kv.logical, kv.replication) == (15360, 122880, 30720, 4.0)
    assert kv.draft_per_gpu == 1024
    assert kv_bytes_per_token(ORIGIN_MODEL, 8, "fp8_e4m3").per_gpu == 7680
    state = state_bytes_per_slot(ORIGIN_MODEL, 8)
    assert state is not None
    # conv 1536 * 3 * 2 = 9,216 B and ssm 8 * 128 * 128 * 4 = 524,288 B in each of 45 layers
    assert (state.conv, state.ssm, state.per_slot) == (45 * 9216, 45 * 524288, 24_007_680)
    half = state_bytes_per_slot(ORIGIN_MODEL, 8, mamba_ssm_dtype="bfloat16")
    assert half is not None
    assert half.per_slot == 12_211_200


@pytest.mark.parametrize(("tp", "heads", "box"), [(1, 2, 1), (2, 1, 1), (4, 1, 2), (8, 1, 4), (16, 1, 8)])
def test_replication(tp: int, heads: int, box: int) -> None:
    """Ranks beyond the KV heads hold copies: the box takes tp / heads times the logical bytes."""
    kv = kv_bytes_per_token(ORIGIN_MODEL, tp, "bf16")
    assert (kv.kv_heads_per_gpu, kv.replication) == (heads, box)
    assert kv.whole_box == kv.per_gpu * tp == kv.logical * box


def test_dp_attention_undoes_replication() -> None:
    """tp 8 with DP attention 4 gives 2 attention ranks: the same bytes per GPU, but each group holds tokens of its
    own.
    """
    kv = kv_bytes_per_token(ORIGIN_MODEL, 8, "bf16", dp_attention=4)
    assert (kv.attn_tp, kv.per_gpu, kv.replication) == (2, 15360, 1.0)
    state = state_bytes_per_slot(ORIGIN_MODEL, 8, dp_attention=4)
    assert state is not None
    assert state.per_slot == 4 * 24_007_680


@pytest.mark.parametrize("tp", [3, 5, 6])
def test_ranks_that_cannot_share_heads(tp: int) -> None:
    """Neither number divides the other: SGLang would not start, so there is no number."""
    with pytest.raises(BadInput, match="divides"):
        heads_per_gpu(8, tp)
    with pytest.raises(BadInput, match="divides"):
        kv_bytes_per_token(public("llama-3.1-8b"), tp)


@pytest.mark.parametrize("tp", [0, -1, True, 2.0, "8", 1 << 50])
def test_impossible_ranks(tp: Any) -> None:
    """Ranks are a positive whole number."""
    with pytest.raises(BadInput, match="tp"):
        kv_bytes_per_token(SMOL, tp)
    with pytest.raises(BadInput):
        attention_tp(8, 3)


@pytest.mark.parametrize("tp", [1, 2, 8, 64])
def test_mla_is_never_divided(tp: int) -> None:
    """61 layers * 576 * 2 B = 70,272 B on every rank, whatever tp is; 64 KV heads in the file mean nothing."""
    kv = kv_bytes_per_token(public("kimi-k2.5"), tp)
    assert (kv.per_gpu, kv.k_per_gpu, kv.replication) == (70272, None, tp)


def test_sparse_attention_layout() -> None:
    """FP8: 512 + 16 + 128 = 656 B and 132 B of indexer in each of 61 layers; raw kernels 576; bf16 1152."""
    model = public("deepseek-v3.2")
    assert kv_bytes_per_token(model, dtype="fp8_e4m3").groups == {"mla": 61 * 656, "indexer": 61 * 132}
    assert kv_bytes_per_token(model, dtype="fp8_e4m3", raw_mla_layout=True).groups["mla"] == 61 * 576
    assert kv_bytes_per_token(model, dtype="bf16").per_gpu == 61 * (1152 + 132)


def test_sliding_pool_by_version_and_flag() -> None:
    """gpt-oss keeps 36,864 B per token and as much inside the window; without the second pool all 36 layers are
    charged.
    """
    model = public("gpt-oss-120b")
    apart = kv_bytes_per_token(model, dtype="bf16")
    assert (apart.per_gpu, apart.sliding_per_gpu) == (36864, 36864)
    assert kv_bytes_per_token(model, dtype="bf16", disable_hybrid_swa_memory=True).per_gpu == 73728
    assert swa_pool(model, "0.5.11")
    gemma3 = checkpoint_from_configs(
        SMOLLM2
        | {"architectures": ["Gemma3ForCausalLM"], "layer_types": ["sliding_attention"] * 29 + ["full_attention"]}
    )
    assert kv_bytes_per_token(gemma3).per_gpu == 23040
    assert not swa_pool(gemma3, "0.5.23")


def test_asymmetric_heads() -> None:
    """MiMo-V2 on 4 ranks: sliding K 39 * 2 * 192 * 2 B, V 128 wide; full layers with one head."""
    kv = kv_bytes_per_token(public("mimo-v2-flash"), 4, "bf16")
    assert (kv.sliding_k_per_gpu, kv.sliding_v_per_gpu, kv.k_per_gpu, kv.v_per_gpu) == (29952, 19968, 3456, 2304)


def test_four_bits_take_their_scales() -> None:
    """0.5 B an element and a scale byte per 16: 11,520 * (8 + 1) / 16 = 6,480 B each for K and V."""
    kv = kv_bytes_per_token(SMOL, dtype="nvfp4", sglang_version="0.5.23")
    assert (kv.dtype, kv.per_gpu) == ("float4_e2m1fn_x2", 30 * 2 * (192 // 2 + 192 // 16))


def test_mxfp8_takes_a_scale_per_32() -> None:
    """One byte an element and one per 32: 23,040 / 2 * 33 / 32 B."""
    assert kv_bytes_per_token(SMOL, dtype="mxfp8", sglang_version="0.5.16").per_gpu == 30 * 2 * (192 + 6)


def test_no_recurrent_layers_is_none() -> None:
    """A dense model has no state: None, not 0."""
    assert state_bytes_per_slot(SMOL) is None


def test_groups_that_do_not_divide_are_extended() -> None:
    """8 groups on 16 ranks become 16; 64 heads on 16 ranks leave 4 (Mamba-2, Nemotron)."""
    quant = json.loads((CASES / "nemotron-3-nano-nvfp4.hf_quant_config.json").read_text())
    model = checkpoint_from_configs(json.loads((CASES / "nemotron-3-nano-nvfp4.config.json").read_text()), quant)
    state = state_bytes_per_slot(model, 16)
    assert state is not None
    # conv width (64 * 64 + 2 * 16 * 128) / 16 = 512, times 3, times 2 B; ssm 4 * 64 * 128 * 4 B; 23 layers
    assert (state.conv, state.ssm) == (23 * 512 * 3 * 2, 23 * 4 * 64 * 128 * 4)
    with pytest.raises(BadInput, match="divisible"):
        state_bytes_per_slot(model, 3)


def test_state_dtype_from_the_file() -> None:
    """mamba_ssm_dtype in text_config halves the state; the flag wins over it; Granite's class doesn't read the file."""
    text = TINY_HYBRID["text_config"] | {"mamba_ssm_dtype": "bfloat16"}
    model = checkpoint_from_configs(TINY_HYBRID | {"text_config": text})
    by_file, by_flag = state_bytes_per_slot(model), state_bytes_per_slot(model, mamba_ssm_dtype="float32")
    assert by_file is not None
    assert by_flag is not None
    assert (by_file.ssm_dtype, by_file.ssm * 2) == ("bfloat16", by_flag.ssm)
    with pytest.raises(BadInput, match="mamba_ssm_dtype"):
        state_bytes_per_slot(model, mamba_ssm_dtype="fp8")


def test_kda_state() -> None:
    """Kimi K3: three windows of 96 * 128 over 3 tokens, and 96 * 128 * 128 floats, in 69 layers."""
    state = state_bytes_per_slot(public("kimi-k3"))
    assert state is not None
    assert (state.conv, state.ssm) == (69 * 3 * 96 * 128 * 3 * 2, 69 * 96 * 128 * 128 * 4)


@pytest.mark.parametrize(("largest", "sizes"), [(8192, 58), (16384, 74), (2048, 42), (4, 1), (0, 0)])
def test_prefill_graph_sizes(largest: int, sizes: int) -> None:
    """8 + 14 + 8 + 8 + 12 up to 4096, then one per 512."""
    assert prefill_graph_sizes(largest) == sizes


@pytest.mark.parametrize(
    ("mib", "tp", "version", "expected"),
    [
        (16 * 1024, 1, "0.5.11", (2048, 8)),
        (32607, 1, "0.5.16", (2048, 24)),
        (32607, 1, "0.5.20", (4096, 48)),
        (32607, 8, "0.5.23", (4096, 160)),
        (49140, 4, "0.5.11", (4096, 160)),
        (81559, 1, "0.5.23", (8192, 256)),
        (97887, 8, "0.5.11", (8192, 512)),
        (183359, 1, "0.5.23", (16384, 512)),
    ],
)
def test_defaults_by_memory(mib: float, tp: int, version: str, expected: tuple[int, int]) -> None:
    """chunked_prefill_size and the largest decode graph by total memory; cards below 35 GiB changed in 0.5.20."""
    assert chunk_and_graph_defaults(mib, tp, version) == expected


@pytest.mark.parametrize(
    ("version", "algorithm", "multimodal", "fraction"),
    [
        # 512 + 12288 + 1024 + 1024 + 58 * 8 = 15,312 MiB of 97,887; up to 0.5.13 speculation takes 4,096 more
        ("0.5.11", "NEXTN", False, 0.802),
        ("0.5.11", None, False, 0.844),
        ("0.5.13.post1", "EAGLE", False, 0.802),
        ("0.5.14", "NEXTN", False, 0.844),
        ("0.5.23", "NEXTN", False, 0.844),
        ("0.5.11", "NGRAM", False, 0.844),
        ("0.5.11", "STANDALONE", False, 0.781),
        # times 0.95 * (1 - 0.1 * (1152**2 / 1024**2 - 1)) = 0.924766: Qwen's tower says depth, so 24 layers are taken
        ("0.5.11", "NEXTN", True, 0.742),
        ("0.5.23", "NEXTN", True, 0.781),
    ],
)
def test_mem_fraction_static(version: str, algorithm: str | None, multimodal: bool, fraction: float) -> None:
    """The origin's box by version: speculation's reserve is gone from 0.5.14, the vision tower takes its factor."""
    found = mem_fraction_static_default(
        ORIGIN_MODEL, 97887, tp=8, sglang_version=version, speculative_algorithm=algorithm, multimodal=multimodal
    )
    assert round(found, 3) == pytest.approx(fraction, abs=0.0011)


def test_mem_fraction_on_a_cpu() -> None:
    """0.5.15.post1 on a host of 24,105 MiB: 512 + 3,072 + 64 + 128 = 3,776 kept, no prefill graphs: 0.843 as its
    logs say.
    """
    assert mem_fraction_static_default(SMOL, 24105, platform="cpu") == 0.843
    # the recorded server without a bound: 20.61 GiB free before, 20.34 after: about 17 GiB for KV
    pool = predict_pools(SMOL, platform="cpu", gpu_memory_mib=24105, pre_load_gib=20.61, available_gib=20.34)
    assert pool.mem_fraction_static == 0.843
    assert pool.kv_gib == pytest.approx(20.34 - 20.61 * 0.157, rel=0.001)


@pytest.mark.parametrize(
    "wrong",
    [
        {"pre_load_gib": 0.0},
        {"pre_load_gib": float("nan")},
        {"available_gib": float("inf")},
        {"available_gib": -5.0},
        {"mamba_full_memory_ratio": -1.0},
        {"swa_full_tokens_ratio": 0.0},
        {"max_running_requests": 0},
        {"max_mamba_cache_size": -3},
        {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": -1},
        {"context_length": 0},
        {"page_size": 0},
        {"max_total_tokens": 0},
    ],
)
def test_impossible_inputs_are_refused(wrong: dict[str, Any]) -> None:
    """A value that can't be ends in one message, whichever it is; nothing is divided by zero."""
    inputs: dict[str, Any] = {"pre_load_gib": 100.0, "available_gib": 60.0, "mem_fraction_static": 0.8}
    with pytest.raises(BadInput):
        predict_pools(ORIGIN_MODEL, tp=8, **(inputs | wrong))


def test_mem_fraction_floor_of_large_gpus() -> None:
    """Above 60 GiB at least 10,240 MiB are kept: an 80 GB card with a small chunk."""
    assert mem_fraction_static_default(SMOL, 81559, chunked_prefill_size=2048, cuda_graph_max_bs=8) == round(
        (81559 - 10240) / 81559, 3
    )
    for bad in (0, -1, float("nan"), float("inf")):
        with pytest.raises(BadInput):
            mem_fraction_static_default(SMOL, bad)


@pytest.mark.parametrize(
    ("version", "options", "slots"),
    [
        ("0.5.16", {}, 5),
        ("0.5.16", {"disable_overlap_schedule": True}, 3),
        ("0.5.13.post1", {}, 3),
        ("0.5.11", {"strategy": "extra_buffer"}, 5),
        ("0.5.11", {"strategy": "extra_buffer", "disable_overlap_schedule": True}, 4),
        ("0.5.23", {"strategy": "extra_buffer_lazy"}, 4),
        ("0.5.23", {"disable_radix_cache": True}, 1),
    ],
)
def test_slots_per_request(version: str, options: dict[str, Any], slots: int) -> None:
    """1 without radix cache, 3 with, extra buffers on top where overlap runs (0.5.16 on an H200: 6574 // 1314 = 5)."""
    assert slots_per_request(version, **options) == slots


def test_cpu_server_with_a_bound() -> None:
    """SmolLM2 on 0.5.15.post1, 65,536 tokens asked: K 0.70 and V 0.70 GiB as its log says, 16 requests."""
    pool = predict_pools(SMOL, platform="cpu", max_total_tokens=65536, max_running_requests=16)
    assert (pool.max_total_num_tokens, pool.max_running_requests, pool.full_length_requests) == (65536, 16, 8.0)
    assert pool.k_gib == pytest.approx(0.70, abs=0.005)
    assert pool.v_gib == pool.k_gib
    assert pool.profiled_tokens is None
    assert any("taken as reached" in note for note in pool.notes)


def test_a_bound_above_the_profile_is_not_reached() -> None:
    """max_total_tokens larger than what fits: SGLang takes the profiled value; smaller: rounded down to pages."""
    inputs: dict[str, Any] = {"pre_load_gib": 20.0, "available_gib": 19.5, "mem_fraction_static": 0.5}
    profiled = int(9.5 * GIB // 23040)
    assert predict_pools(SMOL, **inputs).max_total_num_tokens == profiled
    assert predict_pools(SMOL, max_total_tokens=10**9, **inputs).max_total_num_tokens == profiled
    assert predict_pools(SMOL, max_total_tokens=1000, page_size=64, **inputs).max_total_num_tokens == 960
    assert predict_pools(SMOL, page_size=64, **inputs).max_total_num_tokens == profiled // 64 * 64


def test_weights_that_leave_nothing_are_refused() -> None:
    """As SGLang refuses to start, with the fraction that would do."""
    with pytest.raises(BadInput, match="raise mem_fraction_static above 0.900"):
        predict_pools(SMOL, pre_load_gib=20.0, available_gib=2.0, mem_fraction_static=0.5)
    with pytest.raises(BadInput, match="neither"):
        predict_pools(SMOL)
    with pytest.raises(BadInput, match="between 0 and 1"):
        predict_pools(SMOL, pre_load_gib=20.0, available_gib=19.0, mem_fraction_static=85)


def test_pipeline_stages_are_refused() -> None:
    """What isn't modelled raises instead of giving a number; DP attention's tokens are one rank's, and a note says
    so.
    """
    with pytest.raises(BadInput, match="pipeline"):
        predict_pools(SMOL, max_total_tokens=1000, pp=2)
    pool = predict_pools(ORIGIN_MODEL, tp=8, dp_attention=4, max_total_tokens=1000)
    assert any("one of 4" in note for note in pool.notes)


def test_estimates_say_so() -> None:
    """Total memory and weight size alone give a prediction whose notes name both estimates."""
    pool = predict_pools(SMOL, gpu_memory_mib=24576, weights_gib=0.25)
    assert any("estimated" in note for note in pool.notes)
    assert pool.mem_fraction_from.startswith("SGLang 0.5.15.post1's default")


def test_dtypes_side_by_side() -> None:
    """FP8 doubles the tokens of bf16; both 8-bit forms are equally wide."""
    pools = pools_by_dtype(SMOL, pre_load_gib=20.0, available_gib=19.5, mem_fraction_static=0.5)
    assert pools["fp8_e4m3"].max_total_num_tokens == pools["fp8_e5m2"].max_total_num_tokens
    assert pools["fp8_e4m3"].max_total_num_tokens == pytest.approx(2 * pools["bf16"].max_total_num_tokens, abs=1)
    assert pools["auto"].max_total_num_tokens == pools["bf16"].max_total_num_tokens


@pytest.mark.parametrize(
    ("weights", "algorithm", "tokens"),
    [
        (28.0, "NEXTN", 1.378e6),
        (30.0, "NEXTN", 1.304e6),
        (32.0, "NEXTN", 1.230e6),
        (30.7, "NEXTN", 1.28e6),
        (30.7, None, 1.573e6),
    ],
)
def test_the_origins_tokens(weights: float, algorithm: str | None, tokens: float) -> None:
    """0.5.11 at the default fraction, bf16: 1.28 M with NEXTN's reserve and scratch, 1.57 M without (30.7 GiB of
    weights).
    """
    pool = predict_pools(
        ORIGIN_MODEL,
        kv_cache_dtype="bf16",
        sglang_version="0.5.11",
        speculative_algorithm=algorithm,
        speculative_num_draft_tokens=4 if algorithm else None,
        **(BOX | {"available_gib": 94.0 - weights}),
    )
    assert pool.max_total_num_tokens == pytest.approx(tokens, rel=0.003)
    assert pool.spec_scratch_gib == pytest.approx(4.29 if algorithm else 0.0, abs=0.01)


def test_the_origins_pool_is_explained() -> None:
    """1.28 M tokens: bf16 with speculation at the default fraction fits to 0.2%; every other reading is off by
    more than a fifth.
    """
    found = explain_pool(ORIGIN_MODEL, 1_280_000, sglang_version="0.5.11", **BOX)
    fitting = [r for r in found.candidates if r.relative_error is not None and abs(r.relative_error) < 0.01]
    others = [r for r in found.candidates if r.relative_error is not None and abs(r.relative_error) >= 0.01]
    assert [(r.kv_cache_dtype, r.speculative) for r in fitting] == [("bfloat16", True)]
    assert all(abs(r.relative_error or 0) > 0.2 for r in others)
    assert found.kv_cache_dtype is None  # arithmetic on memory alone doesn't prove a dtype
    # an FP8 pool of this size would need a fraction between 0.51 (no speculation) and 0.56
    needed = {
        r.speculative: r.mem_fraction_static
        for r in found.candidates
        if r.kv_cache_dtype == "float8_e4m3fn" and r.relative_error is None
    }
    assert needed[False] == pytest.approx(0.512, abs=0.002)
    assert needed[True] == pytest.approx(0.557, abs=0.002)


def test_size_decides_the_width() -> None:
    """K 9.16 + V 9.16 GiB for 1.28 M tokens is 15,368 B: bf16. Half of it is an 8-bit cache. A third fits nothing,
    and is said so.
    """
    assert explain_pool(ORIGIN_MODEL, 1_280_000, 9.16, 9.16, tp=8).kv_cache_dtype == "bfloat16"
    assert explain_pool(ORIGIN_MODEL, 1_280_000, 4.58, 4.58, tp=8).kv_cache_dtype == "float8"
    assert (
        explain_pool(ORIGIN_MODEL, 1_280_000, 2.575, 2.575, tp=8).kv_cache_dtype == "float4_e2m1fn_x2"
    )  # 9 / 16 B each
    half = checkpoint_from_configs(SMOLLM2 | {"torch_dtype": "float16"})
    assert explain_pool(half, 65536, 0.70, 0.70).kv_cache_dtype == "float16"
    for size in (float("nan"), float("inf"), -1.0, 0.0):
        assert explain_pool(ORIGIN_MODEL, 1_280_000, size, size, tp=8).kv_cache_dtype is None
    odd = explain_pool(ORIGIN_MODEL, 1_280_000, 6.1, 6.1, tp=8)
    assert odd.kv_cache_dtype is None
    assert "fits no KV dtype" in odd.verdict
    with pytest.raises(BadInput):
        explain_pool(ORIGIN_MODEL, 0, 1.0, 1.0)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(100_000, 50_000_000),
    tp=st.sampled_from([1, 2, 4, 8]),
    dtype=st.sampled_from(["bf16", "fp8_e4m3"]),
)
def test_the_inverse_finds_what_the_forward_made(tokens: int, tp: int, dtype: str) -> None:
    """Any pool printed with two decimals is read back as the width it was made with."""
    kv = kv_bytes_per_token(ORIGIN_MODEL, tp, dtype)
    k = round(tokens * (kv.k_per_gpu or 0) / GIB, 2)
    found = explain_pool(ORIGIN_MODEL, tokens, k, k, tp=tp).kv_cache_dtype
    assert found == ("bfloat16" if dtype == "bf16" else "float8")


@pytest.mark.parametrize(
    ("name", "version", "path", "layers"),
    [
        ("DeepseekV3ForCausalLM", "0.5.13.post1", None, 0),
        ("DeepseekV3ForCausalLM", "0.5.14", None, 1),
        ("Qwen3_5MoeForConditionalGeneration", "0.5.23", None, 0),
        ("Qwen3_5MoeForConditionalGeneration", "0.5.23", "DRAFT", 1),
    ],
)
def test_which_drafts_are_budgeted(name: str, version: str, path: str | None, layers: int) -> None:
    """From 0.5.14 on, and only where a draft path is set: by the flag, or by SGLang for architectures that carry
    their draft.
    """
    model = ORIGIN_MODEL.model_copy(update={"architecture_name": name})
    assert draft_layers_budgeted(model, version, 1, path) == layers


@pytest.mark.parametrize(("version", "cell"), [("0.5.16", 61 * (576 + 132)), ("0.5.18", 61 * (656 + 132))])
def test_sparse_fp8_cell_by_version(version: str, cell: int) -> None:
    """Up to 0.5.16 the budget divides by 708 B a layer where 788 B are allocated: the pool is 11% over."""
    pool = predict_pools(
        public("deepseek-v3.2"),
        kv_cache_dtype="fp8_e4m3",
        sglang_version=version,
        pre_load_gib=139.0,
        available_gib=100.0,
        mem_fraction_static=0.8,
        max_running_requests=8,
    )
    assert pool.cell_bytes == cell
    assert pool.bytes_per_token == 61 * 788
    assert (pool.overcommitted_gib is not None) == (version == "0.5.16")


def test_sliding_pools_share_by_ratio() -> None:
    """full_tokens = budget / (full + ratio * sliding); the sliding pool gets ratio times as many (Gemma 4: 213,761
    and 171,008).
    """
    budget = 36.69
    pool = predict_pools(
        public("gemma-4-26b-a4b"),
        pre_load_gib=budget * 2,
        available_gib=budget * 1.5,
        mem_fraction_static=0.75,
        multimodal=False,
    )
    assert pool.max_total_num_tokens == pytest.approx(213_761, rel=0.001)
    assert pool.swa_tokens == pytest.approx(171_008, rel=0.001)
    assert pool.kv_gib == pytest.approx(36.69, rel=0.001)


def test_a_sliding_pool_sized_by_requests() -> None:
    """Without radix cache and with --max-running-requests (0.5.14 on), sliding tokens follow requests, and the
    rest is full tokens.
    """
    inputs: dict[str, Any] = {
        "pre_load_gib": 140.0,
        "available_gib": 100.0,
        "mem_fraction_static": 0.8,
        "disable_radix_cache": True,
        "max_running_requests": 16,
        "chunked_prefill_size": 8192,
        "kv_cache_dtype": "bf16",
    }
    pool = predict_pools(public("gpt-oss-120b"), sglang_version="0.5.16", **inputs)
    # (window 128 + interval 128 + page 1 + decode 1) * 16 requests + 2 chunks + page
    assert pool.swa_tokens == 258 * 16 + 2 * 8192 + 1
    assert pool.max_total_num_tokens == (72 * GIB - pool.swa_tokens * 36864) // 36864
    shared = predict_pools(public("gpt-oss-120b"), sglang_version="0.5.13.post1", **inputs)
    assert shared.max_total_num_tokens == pytest.approx(72 * GIB / (1.8 * 36864), abs=1)
    with pytest.raises(BadInput, match="chunked_prefill_size"):
        predict_pools(public("gpt-oss-120b"), sglang_version="0.5.16", **(inputs | {"chunked_prefill_size": None}))


def test_rules_of_the_state_split_differ_by_version() -> None:
    """0.5.11 takes the scratch of all requests off first; 0.5.13 solves jointly; 0.5.18 adds padding slots. Tokens
    differ, and add up.
    """
    inputs = BOX | {"mem_fraction_static": 0.75, "multimodal": False}
    tokens = {}
    for version in ("0.5.11", "0.5.13.post1", "0.5.18"):
        pool = predict_pools(
            ORIGIN_MODEL,
            kv_cache_dtype="bf16",
            sglang_version=version,
            speculative_algorithm="NEXTN",
            speculative_num_draft_tokens=4,
            mamba_strategy="extra_buffer",
            **inputs,
        )
        tokens[version] = pool.max_total_num_tokens
        pad = 1 if version == "0.5.18" else 0
        assert pool.state_bytes_per_slot is not None
        assert pool.rest_gib is not None
        used = pool.state_bytes_per_slot * ((pool.max_mamba_cache_size or 0) + pad) / GIB + (pool.spec_scratch_gib or 0)
        assert used + pool.profiled_tokens * 15360 / GIB == pytest.approx(pool.rest_gib, abs=0.01)
    assert tokens["0.5.11"] < tokens["0.5.18"] < tokens["0.5.13.post1"]


@settings(max_examples=80, deadline=None)
@given(
    version=st.sampled_from(VERSIONS_READ),
    free=st.floats(60, 140),
    weights=st.floats(1, 40),
    fraction=st.floats(0.6, 0.95),
    tp=st.sampled_from([1, 2, 4, 8]),
    speculative=st.booleans(),
    dtype=st.sampled_from(["bf16", "fp8_e4m3"]),
)
def test_pools_never_exceed_their_budget(
    version: str, free: float, weights: float, fraction: float, tp: int, speculative: bool, dtype: str
) -> None:
    """Whatever the inputs: state, scratch and KV cache together stay within what the fraction leaves, and use all
    but one page.
    """
    try:
        pool = predict_pools(
            ORIGIN_MODEL,
            tp=tp,
            kv_cache_dtype=dtype,
            sglang_version=version,
            pre_load_gib=free,
            available_gib=free - weights,
            mem_fraction_static=fraction,
            speculative_algorithm="EAGLE" if speculative else None,
            multimodal=False,
        )
    except BadInput:
        return
    assert pool.profiled_tokens is not None
    assert pool.rest_gib is not None
    used = (pool.state_bytes_per_slot or 0) * (pool.max_mamba_cache_size or 0) / GIB + (pool.spec_scratch_gib or 0)
    kv = pool.profiled_tokens * pool.cell_bytes / GIB
    assert used + kv <= pool.rest_gib + 1e-6
    assert pool.max_running_requests is not None
    assert pool.max_running_requests >= 0


def test_two_units_in_one_log() -> None:
    """1.37 + 1.37 "GB" of a pool line are GiB; 40.41 "GB" of the host line are decimal: 13 layers of 1,024 B."""
    per_token = logged_pool_tokens_bytes(2.74, 240_128)
    pool = host_pool(3_035_904, 40.41, per_token, 12, 13)
    assert (pool.unit, pool.bytes_per_token, pool.layers) == ("decimal_gb", 13312, 13)
    same = host_pool(3_035_904, 13312 * 3_035_904 / GIB, per_token, 12, 13)
    assert same.unit == "gib"
    assert logged_pool_tokens_bytes(40.41, 3_035_904, "gb") == pytest.approx(13312, rel=0.001)
    assert pytest.approx(0.9313, abs=0.0001) == DECIMAL_GB / GIB


def test_a_rounded_size_that_allows_several_widths_is_none() -> None:
    """With few tokens the rounding leaves several whole numbers: unknown, not the nearest."""
    assert whole_bytes_per_token(40.41, DECIMAL_GB, 3_035_904, 13) == 13312
    assert whole_bytes_per_token(0.01, DECIMAL_GB, 1000, 13) is None


def test_blocks_and_padding() -> None:
    """1952 blocks of 16 tokens at 131,072 B fill 3.8125 GiB; a state pool has one slot more than it reports."""
    assert tokens_in_pool(3.8125, 131072, 16) == 31232
    assert state_pool_gib(150_994_944, 360) == pytest.approx(50.77, abs=0.005)


def test_heads_that_tp_cannot_divide_have_no_capacity() -> None:
    """SmolLM2: 9 heads and 3 KV heads. 3 KV heads on 6 ranks would replicate, 9 heads on 6 ranks SGLang refuses."""
    model = checkpoint_from_configs(SMOLLM2)
    for tp in (1, 3, 9):
        assert kv_bytes_per_token(model, tp, "bf16").per_gpu == 23_040 // min(tp, 3)
    for tp in (2, 6, 18):
        with pytest.raises(BadInput, match=r"9 attention heads, one of 1, 3, 9"):
            kv_bytes_per_token(model, tp, "bf16")
    assert kv_bytes_per_token(model, 6, "bf16", dp_attention=2).attn_tp == 3
