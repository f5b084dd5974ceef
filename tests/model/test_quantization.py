"""lib.model.quantization: what the files declare, and which KV dtype each SGLang makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from lib.errors import BadInput
from lib.model.checkpoint import Header, Tensor, checkpoint_from_configs
from lib.model.facts import VERSIONS_READ, ScaleTensors
from lib.model.quantization import (
    SCALE_DROPPERS,
    SCALE_LOADERS,
    declared_quantization,
    model_dtype,
    resolve_kv_cache_dtype,
    scales_loaded,
    torch_name,
)
from tests.model.checkpoint_files import ORIGIN, SMOLLM2

FLOAT8 = {"dynamic": False, "num_bits": 8, "type": "float"}
STATIC8 = FLOAT8 | {"strategy": "tensor", "symmetric": True}
OLD, NEW = "0.5.11", "0.5.23"


def model(
    section: dict[str, Any] | None = None, hf: dict[str, Any] | None = None, name: str = "LlamaForCausalLM"
) -> Any:
    config = SMOLLM2 | {"architectures": [name]} | ({"quantization_config": section} if section else {})
    return checkpoint_from_configs(config, {"quantization": hf} if hf else None)


#: (config.json quantization_config, hf_quant_config.json quantization, weights method, declared KV, dtype of auto in
#: 0.5.11, in 0.5.23)
FORMS: list[tuple[str, dict[str, Any] | None, dict[str, Any] | None, str | None, str | None, str, str]] = [
    ("none", None, None, None, None, "bfloat16", "bfloat16"),
    (
        "modelopt nvfp4 flat, scheme",
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": FLOAT8},
        None,
        "modelopt_fp4",
        "fp8",
        "float8_e4m3fn",
        "float8_e4m3fn",
    ),
    (
        "modelopt nvfp4 flat, algo",
        {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"},
        None,
        "modelopt_fp4",
        "fp8",
        "bfloat16",
        "float8_e4m3fn",
    ),
    (
        "modelopt nvfp4 flat, string",
        {"quant_algo": "NVFP4", "kv_cache_scheme": "fp8"},
        None,
        "modelopt_fp4",
        "fp8",
        "float8_e4m3fn",
        "float8_e4m3fn",
    ),
    (
        "modelopt nvfp4 kv",
        {"quant_algo": "NVFP4", "kv_cache_scheme": "NVFP4"},
        None,
        "modelopt_fp4",
        "nvfp4",
        "bfloat16",
        "bfloat16",
    ),
    (
        "modelopt nvfp4 nested",
        None,
        {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"},
        "modelopt_fp4",
        "fp8",
        "float8_e4m3fn",
        "float8_e4m3fn",
    ),
    (
        "modelopt nvfp4 nested, no kv",
        None,
        {"quant_algo": "NVFP4", "kv_cache_quant_algo": None},
        "modelopt_fp4",
        None,
        "bfloat16",
        "bfloat16",
    ),
    (
        "config.json wins",
        {"quant_algo": "NVFP4", "kv_cache_scheme": {"type": "int", "num_bits": 8}},
        {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"},
        "modelopt_fp4",
        "int8",
        "bfloat16",
        "bfloat16",
    ),
    (
        "modelopt fp8 nested",
        None,
        {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        "modelopt_fp8",
        "fp8",
        "float8_e4m3fn",
        "float8_e4m3fn",
    ),
    (
        "modelopt fp8 flat, string",
        {"quant_algo": "FP8", "kv_cache_scheme": "FP8"},
        None,
        "modelopt_fp8",
        "fp8",
        "bfloat16",
        "bfloat16",
    ),
    ("no algo", None, {"quant_algo": None, "kv_cache_quant_algo": "FP8"}, None, "fp8", "bfloat16", "bfloat16"),
    (
        "mixed",
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_scheme": FLOAT8,
            "quantized_layers": {"a": {"quant_algo": "NVFP4"}},
        },
        None,
        "modelopt_mixed",
        "fp8",
        "float8_e4m3fn",
        "float8_e4m3fn",
    ),
    (
        "mixed, KV form only in hf_quant_config.json",
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "NVFP4"}}},
        {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8"},
        "modelopt_mixed",
        "fp8",
        "bfloat16",
        "float8_e4m3fn",
    ),
    (
        "w4afp8",
        {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "W4A8_AWQ"}}},
        None,
        "w4afp8",
        None,
        "bfloat16",
        "bfloat16",
    ),
    ("plain fp8", {"quant_method": "fp8", "fmt": "e4m3"}, None, "fp8", None, "bfloat16", "bfloat16"),
    (
        "plain fp8 with algo",
        {"quant_method": "fp8", "kv_cache_quant_algo": "FP8"},
        None,
        "fp8",
        "fp8",
        "bfloat16",
        "float8_e4m3fn",
    ),
    (
        "compressed-tensors",
        {"quant_method": "compressed-tensors", "kv_cache_scheme": STATIC8},
        None,
        "compressed-tensors",
        "fp8",
        "bfloat16",
        "float8_e4m3fn",
    ),
    (
        "compressed-tensors dynamic",
        {"quant_method": "compressed-tensors", "kv_cache_scheme": STATIC8 | {"dynamic": True}},
        None,
        "compressed-tensors",
        "fp8",
        "bfloat16",
        "bfloat16",
    ),
    (
        "compressed-tensors null",
        {"quant_method": "compressed-tensors", "kv_cache_scheme": None},
        None,
        "compressed-tensors",
        None,
        "bfloat16",
        "bfloat16",
    ),
    ("awq", {"quant_method": "awq", "bits": 4, "group_size": 128}, None, "awq", None, "bfloat16", "bfloat16"),
    ("gptq", {"quant_method": "gptq", "bits": 8}, None, "gptq", None, "bfloat16", "bfloat16"),
    ("mxfp4", {"quant_method": "mxfp4"}, None, "mxfp4", None, "bfloat16", "bfloat16"),
    (
        "quark",
        {"quant_method": "quark", "kv_cache_config": {"dtype": "fp8_e4m3"}},
        None,
        "quark",
        "fp8",
        "bfloat16",
        "bfloat16",
    ),
]


@pytest.mark.parametrize(
    ("section", "hf", "method", "declared", "old", "new"), [f[1:] for f in FORMS], ids=[f[0] for f in FORMS]
)
def test_forms(section: Any, hf: Any, method: str | None, declared: str | None, old: str, new: str) -> None:
    """Every form: the method SGLang loads it with, what it declares of the KV cache, and what auto makes of it
    then and now.
    """
    checkpoint = model(section, hf)
    assert checkpoint.quantization.weights_method == method
    assert checkpoint.quantization.kv_declared == declared
    assert resolve_kv_cache_dtype(checkpoint, "auto", OLD).dtype == old
    assert resolve_kv_cache_dtype(checkpoint, "auto", NEW).dtype == new


@pytest.mark.parametrize("version", VERSIONS_READ)
def test_auto_is_never_e5m2(version: str) -> None:
    """The origin's checkpoint under auto is e4m3 in every version read, and e5m2 only when asked for."""
    checkpoint = checkpoint_from_configs(ORIGIN)
    assert resolve_kv_cache_dtype(checkpoint, "auto", version).dtype == "float8_e4m3fn"
    assert resolve_kv_cache_dtype(checkpoint, "fp8_e5m2", version).dtype == "float8_e5m2"
    assert resolve_kv_cache_dtype(checkpoint, "bf16", version).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("form", "first"),
    [
        ({"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}, "0.5.15.post1"),
        ({"quant_method": "fp8", "kv_cache_quant_algo": "FP8"}, "0.5.18"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": STATIC8}, "0.5.19"),
    ],
)
def test_the_version_that_began_to_read_a_form(form: dict[str, Any], first: str) -> None:
    """Each form changes from the model's dtype to FP8 exactly at one release."""
    at = VERSIONS_READ.index(first)
    found = [resolve_kv_cache_dtype(model(form), "auto", version).dtype for version in VERSIONS_READ]
    assert set(found[:at]) == {"bfloat16"}
    assert set(found[at:]) == {"float8_e4m3fn"}


def test_a_silently_ignored_form_says_why() -> None:
    """FP8 declared as a string in an FP8 checkpoint is passed over; NVFP4 KV is not taken by auto: the reason
    names it.
    """
    assert "passes over" in resolve_kv_cache_dtype(model({"quant_algo": "FP8", "kv_cache_scheme": "FP8"}), "auto").why
    assert "only FP8" in resolve_kv_cache_dtype(model({"quant_algo": "NVFP4", "kv_cache_scheme": "NVFP4"}), "auto").why


def test_disagreeing_files_are_a_finding() -> None:
    """Two files that say different things of the KV cache are reported, with both."""
    checkpoint = model(
        {"quant_algo": "NVFP4", "kv_cache_scheme": {"type": "int", "num_bits": 8}},
        {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
    )
    assert len(checkpoint.quantization.conflicts) == 2
    assert any("int8" in text and "fp8" in text for text in checkpoint.findings)


@pytest.mark.parametrize(
    "scheme", ["FP8", "float8", {"type": "float", "num_bits": 8}, [], 5, {}, "", None, {"num_bits": "8"}]
)
def test_any_shape_of_a_scheme_is_survived(scheme: Any) -> None:
    """String, object, list or number: never a traceback."""
    declared_quantization({"quantization_config": {"quant_algo": "FP8", "kv_cache_scheme": scheme}})


@pytest.mark.parametrize(
    ("flag", "version"),
    [
        ("fp8", OLD),
        ("fp8", NEW),
        ("e4m3", NEW),
        ("nvfp4", OLD),
        ("fp4_e2m1", NEW),
        ("", NEW),
        ("mxfp8", "0.5.15.post1"),
    ],
)
def test_flags_that_a_version_refuses(flag: str, version: str) -> None:
    """There is no plain fp8, and 4-bit forms changed names: the message lists the choices of that release."""
    with pytest.raises(BadInput, match="fp8_e4m3"):
        resolve_kv_cache_dtype(model(), flag, version)


def test_sparse_attention_is_decided_by_the_gpu() -> None:
    """DeepSeek sparse attention under auto: e4m3 from SM100 on, bfloat16 below, and no GPU is said."""
    config = SMOLLM2 | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_topk": 2048,
        "index_head_dim": 128,
    }
    checkpoint = checkpoint_from_configs(config)
    assert resolve_kv_cache_dtype(checkpoint, sm=9).dtype == "bfloat16"
    assert resolve_kv_cache_dtype(checkpoint, sm=10).dtype == "float8_e4m3fn"
    assert "no GPU" in resolve_kv_cache_dtype(checkpoint).why


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "float32"}, "float16"),
        ({"torch_dtype": "float32", "model_type": "gemma2"}, "bfloat16"),
        ({}, "float16"),
        ({"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}}, "bfloat16"),
    ],
)
def test_model_dtype(config: dict[str, Any], dtype: str) -> None:
    """--dtype auto: 32 bits become 16, Gemma bfloat16, MXFP4 gpt-oss bfloat16."""
    assert model_dtype(config, config) == dtype


def test_torch_names() -> None:
    """Spellings of flags, configs and logs meet in torch's names."""
    assert torch_name("torch.bfloat16") == torch_name("bf16") == torch_name("BFLOAT16") == "bfloat16"
    assert torch_name("fp8_e4m3") == "float8_e4m3fn"
    with pytest.raises(BadInput):
        torch_name("fp8")


SCALED = ScaleTensors(k_count=1, v_count=1, k_values=(0.05,), v_values=(0.02,))


def with_scales(name: str, section: dict[str, Any] | None, hf: dict[str, Any] | None = None) -> Any:
    return model(section, hf).model_copy(update={"scales": SCALED, "architecture_name": name})


FP8_NESTED = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}


def test_qwen35_scales_by_version() -> None:
    """Qwen3.5 drops the scales up to 0.5.16 and loads them from 0.5.18."""
    found = {
        v: scales_loaded(with_scales("Qwen3_5MoeForConditionalGeneration", None, FP8_NESTED), v).loaded
        for v in VERSIONS_READ
    }
    assert [v for v, loaded in found.items() if loaded] == ["0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.23"]


def test_llama_loads_and_qwen3_does_not() -> None:
    """A Llama on 0.5.16 loads them (measured: the log has no line); a Qwen3 on 0.5.15.post1 doesn't (its log says
    so).
    """
    assert scales_loaded(with_scales("LlamaForCausalLM", None, FP8_NESTED), "0.5.16").loaded is True
    assert scales_loaded(with_scales("Qwen3ForCausalLM", None, FP8_NESTED), "0.5.15.post1").loaded is False


def test_scales_need_a_method_that_makes_parameters() -> None:
    """kv_cache_quant_algo null, no quantization, and compressed-tensors before 0.5.19 create none (measured for
    null: bit-identical).
    """
    null = {"quant_algo": "FP8", "kv_cache_quant_algo": None}
    assert scales_loaded(with_scales("LlamaForCausalLM", None, null), "0.5.16").loaded is False
    assert scales_loaded(with_scales("LlamaForCausalLM", None), "0.5.16").loaded is False
    compressed = with_scales("LlamaForCausalLM", {"quant_method": "compressed-tensors", "kv_cache_scheme": STATIC8})
    assert scales_loaded(compressed, "0.5.18").loaded is False
    assert scales_loaded(compressed, "0.5.19").loaded is True


def test_unread_model_classes_are_unknown_not_no() -> None:
    """A class in neither list is None with a reason; no tensors at all is a plain no; no tensor list is None."""
    assert scales_loaded(with_scales("DeepseekV3ForCausalLM", {"quant_method": "fp8"}), NEW).loaded is None
    assert scales_loaded(model(None, FP8_NESTED), NEW).loaded is None
    none = {"model.safetensors": Header({"a": Tensor("BF16", (1,), 0, 2)}, 8, 10, "")}
    assert scales_loaded(checkpoint_from_configs(SMOLLM2, None, none), NEW).loaded is False
    assert not set(SCALE_LOADERS) & set(SCALE_DROPPERS)


def test_versions_as_text() -> None:
    """Post-releases and a leading v are read; rubbish is refused."""
    checkpoint = checkpoint_from_configs(ORIGIN)
    assert resolve_kv_cache_dtype(checkpoint, "auto", "v0.5.15.post1") == resolve_kv_cache_dtype(
        checkpoint, "auto", "0.5.15"
    )
    assert "newer than the newest" in resolve_kv_cache_dtype(checkpoint, "auto", "0.6.0").why
    assert "older than the oldest" in resolve_kv_cache_dtype(checkpoint, "auto", "0.4.9").why
    for text in ("main", "", "0.5", "0.5.x", "9" * 500):
        with pytest.raises(BadInput, match="version"):
            resolve_kv_cache_dtype(checkpoint, "auto", text)
