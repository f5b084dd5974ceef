"""For each rule of the table: facts that make it a finding, and facts that make it fine (or not applicable, or
accepted).

A new row of RULES without a row here fails `test_rules.py`. `...` in the second place: the rule has no fine outcome.
"""

from __future__ import annotations

from typing import Any

from lib.audit.evidence import stated_facts
from lib.audit.facts import Facts

QWEN = "Qwen3_5MoeForConditionalGeneration"
NO_SCALES = {"present": False, "count": 0, "names": [], "min": None, "max": None, "all_one": None}
SCALES = {"present": True, "count": 8, "names": ["a.k_proj.k_scale"], "min": 0.02, "max": 0.05, "all_one": False}
ONES = {**SCALES, "min": 1.0, "max": 1.0, "all_one": True}
TRITON = {"attention_backend_prefill": "triton", "attention_backend_decode": "triton"}
FLASHINFER = {"attention_backend_prefill": "flashinfer", "attention_backend_decode": "flashinfer"}
NVFP4 = {"weight_quant": {"kind": "nvfp4", "detail": None}, "gpu_sm": "12.0", "is_moe": True}
SPEC = {"speculative_algorithm": "EAGLE"}
START = {"startup_seen": True, "log_lines": {}}


def line(mark: str) -> dict[str, Any]:
    """A log that covers the start-up and has the line of one mark."""
    return {"startup_seen": True, "log_lines": {mark: {"path": "log", "line": 7, "quote": "..."}}}


def env(complete: bool = True, **variables: str) -> dict[str, Any]:
    """The fact about the environment."""
    return {"environment": {"variables": variables, "complete": complete}}


def facts(**values: Any) -> Facts:
    """Facts that somebody states."""
    return Facts().plus(stated_facts(values))


EXAMPLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "KV1": (
        {"kv_dtype_target": "float8_e4m3fn", "kv_cache_dtype": "auto"},
        {"kv_dtype_target": "bfloat16", "kv_cache_dtype": "auto"},
    ),
    "KV2": (
        {"kv_dtype_target": "float8_e4m3fn", "kv_scales": NO_SCALES},
        {"kv_dtype_target": "float8_e4m3fn", "kv_scales": SCALES, "kv_scales_loaded": "loaded"},
    ),
    "KV3": (
        {"kv_dtype_target": "bfloat16", "kv_scales": SCALES, "kv_scales_loaded": "loaded", **TRITON},
        {"kv_dtype_target": "bfloat16", "kv_scales": ONES, "kv_scales_loaded": "loaded", **TRITON},
    ),
    "KV4": (
        {"kv_dtype_target": "float8_e4m3fn", **TRITON},
        {"kv_dtype_target": "float8_e4m3fn", **FLASHINFER},
    ),
    "KV5": ({"kv_dtype_target": "float8_e5m2"}, {"kv_dtype_target": "float8_e4m3fn"}),
    "KV6": ({"kv_dtype_target": "float4_e2m1fn_x2"}, {"kv_dtype_target": "bfloat16"}),
    "KV7": ({"quantization_param_path": "kv.json"}, {"quantization_param_path": None}),
    "KV8": (
        {"kv_dtype_target": "float8_e4m3fn", "kv_scales": SCALES, "kv_scales_loaded": "loaded",
         "sglang_version": "0.5.16", **FLASHINFER},
        {"kv_dtype_target": "float8_e4m3fn", "kv_scales": SCALES, "kv_scales_loaded": "loaded",
         "sglang_version": "0.5.18", **FLASHINFER},
    ),
    "KV9": (
        {**SPEC, "kv_dtype_target": "float8_e4m3fn", "kv_dtype_draft": "bfloat16"},
        {**SPEC, "kv_dtype_target": "bfloat16", "kv_dtype_draft": "bfloat16"},
    ),
    "Q0": ({"weight_quant": {"kind": "nvfp4"}}, {"weight_quant": {"kind": "none"}}),
    "Q1": (
        {**NVFP4, "fp4_gemm_runner_backend": "auto", "sglang_version": "0.5.16"},
        {**NVFP4, "fp4_gemm_runner_backend": "flashinfer_cudnn"},
    ),
    "Q2": (
        {**NVFP4, "moe_runner_backend": "flashinfer_cutlass", "flashinfer_version": "0.6.5"},
        {**NVFP4, "moe_runner_backend": "marlin"},
    ),
    "Q3": (
        {**NVFP4, "moe_runner_backend": "flashinfer_cutlass"},
        {**NVFP4, "moe_runner_backend": "flashinfer_cutedsl"},
    ),
    "Q4": (line("w1_w3_scale"), START),
    "Q5": (
        {"quantization": "fp8", "weight_quant": {"kind": "none"}},
        {"quantization": None, "weight_quant": {"kind": "nvfp4"}},
    ),
    "Q6": (
        {**NVFP4, "moe_runner_backend": "marlin"},
        {**NVFP4, "moe_runner_backend": "flashinfer_cutlass"},
    ),
    "Q7": (line("ue8m0"), START),
    "W1": ({"kernel_trace": ["prepare_moe_fp4_layer_for_marlin"]}, {"kernel_trace": ["cutlass_fp4_group_mm"]}),
    "S1": (
        {"recurrent": "gdn", "mamba_ssm_dtype": "bfloat16", "mamba_ssm_dtype_config": "float32", **env()},
        {"recurrent": "gdn", "mamba_ssm_dtype": None, "mamba_ssm_dtype_config": "float32", **env()},
    ),
    "S2": (
        {"recurrent": "gdn", "enable_int8_mamba_checkpoint": True},
        {"recurrent": "gdn", "enable_int8_mamba_checkpoint": False},
    ),
    "S3": ({"recurrent": "gdn", **env()}, {"recurrent": "gdn", **env(SGLANG_MAMBA_CONV_DTYPE="float32")}),
    "S4": (
        {"recurrent": "gdn", **SPEC, "mamba_radix_cache_strategy": "extra_buffer", "disable_radix_cache": False},
        {"recurrent": "gdn", **SPEC, "mamba_radix_cache_strategy": "extra_buffer", "disable_radix_cache": True},
    ),
    "S5": (
        {"recurrent": "mamba2", "mamba_radix_cache_strategy": "extra_buffer"},
        {"recurrent": "mamba2", "mamba_radix_cache_strategy": "no_buffer"},
    ),
    "D1": (
        {**SPEC, "speculative_accept_threshold_single": 0.8, "speculative_accept_threshold_acc": 1.0},
        {**SPEC, "speculative_accept_threshold_single": 1.0, "speculative_accept_threshold_acc": 1.0},
    ),
    "D2": ({**SPEC, "request_params": {"min_p": 0.05}}, {**SPEC, "request_params": {"temperature": 0.6}}),
    "D3": (env(complete=False, SGLANG_SIMULATE_ACC_LEN="3.39"), env()),
    "D4": ({**SPEC, "platform": "hip"}, {**SPEC, "platform": "cuda"}),
    "D5": (
        {**SPEC, "speculative_eagle_topk": 4, "page_size": 16, "sglang_version": "0.5.10.post1"},
        {**SPEC, "speculative_eagle_topk": 1, "page_size": 16},
    ),
    "C1": ({"context_len": 524288, "native_context": 262144}, {"context_len": 262144, "native_context": 262144}),
    "C2": (
        {"json_model_override_args": '{"rope_scaling": {"rope_type": "yarn", "factor": 4}}', "model_class": QWEN},
        {"json_model_override_args": "{}", "model_class": QWEN},
    ),
    "C3": (line("rope_factor"), START),
    "C4": ({"allow_auto_truncate": True}, {"allow_auto_truncate": False}),
    "C5": ({"context_len": 32768, "native_context": 262144}, {"context_len": 262144, "native_context": 262144}),
    "T1": (
        {"chat_template": None, "has_chat_template": False},
        {"chat_template": None, "has_chat_template": True},
    ),
    "T2": (
        {"model_class": QWEN, "tool_call_parser": "qwen25", "reasoning_parser": "qwen3"},
        {"model_class": QWEN, "tool_call_parser": "qwen3_coder", "reasoning_parser": "qwen3"},
    ),
    "T3": (
        {"sampling_defaults": "openai", "generation_config": {"temperature": 0.6}},
        {"sampling_defaults": "model", "generation_config": {"temperature": 0.6}},
    ),
    "T4": ({"client_history": False}, {"client_history": True}),
    "N1": (line("nan"), {**START, **env(SGLANG_ENABLE_NAN_LOGITS_CHECK="1")}),
    "N2": ({"enable_fp32_lm_head": False}, {"enable_fp32_lm_head": True}),
    "N3": (
        {"enable_tf32_matmul": True, "enable_torch_compile": False},
        {"enable_tf32_matmul": False, "enable_torch_compile": False},
    ),
    "N4": (
        {"enable_quant_communications": True, "moe_a2a_backend": "none", "tp_size": 8, **env()},
        {"enable_quant_communications": False, "moe_a2a_backend": "none", "tp_size": 8, **env()},
    ),
    "N5": (..., {"tp_size": 8, "disable_custom_all_reduce": True}),  # type: ignore[dict-item]
    "N6": (
        {"disable_cuda_graph": False, "disable_cuda_graph_padding": False, "speculative_algorithm": "NGRAM",
         "sglang_version": "0.5.10.post1", **FLASHINFER},
        {"disable_cuda_graph": True, "disable_cuda_graph_padding": False},
    ),
    "N7": ({"kv_dtype_target": "float8_e4m3fn", "mla": True}, {"kv_dtype_target": "float8_e4m3fn", "mla": False}),
    "N8": (
        {"speculative_algorithm": "NGRAM", "disable_radix_cache": False},
        {"speculative_algorithm": "NGRAM", "disable_radix_cache": True},
    ),
    "L1": (
        {"load_format": "dummy", "model_loader_extra_config": "{}", "speculative_draft_load_format": None},
        {"load_format": "auto", "model_loader_extra_config": "{}", "speculative_draft_load_format": None},
    ),
    "L2": (line("not_loaded"), ...),  # type: ignore[dict-item]
    "H1x": (
        {"enable_hierarchical_cache": True, "hicache_storage_backend": "file"},
        {"enable_hierarchical_cache": True, "hicache_storage_backend": None},
    ),
    "H2": (
        {"enable_hisparse": True, **TRITON},
        {"enable_hisparse": False, "speculative_draft_window_size": None, **TRITON},
    ),
    "G1": ({"output_text": "+" * 50}, {"output_text": "Paris is the capital of France, and it lies on the Seine."}),
    "V1": ({"engine": "vllm", **line("vllm_q_scale")}, {"engine": "vllm", **START}),
    "V2": ({"engine": "vllm", **line("vllm_scale_default")}, {"engine": "vllm", **START}),
    "X1": ({}, {}),  # needs two sources: test_rules.py
    "X2": (
        {"kv_cache_dtype": "bfloat16", "kv_dtype_target": "float8_e4m3fn"},
        {"kv_cache_dtype": "bfloat16", "kv_dtype_target": "bfloat16"},
    ),
    "X3": (
        {"sglang_version": "0.5.11", "speculative_algorithm": "NEXTN", "recurrent": "gdn"},
        {"sglang_version": "0.5.16", "speculative_algorithm": "NEXTN", "recurrent": "gdn"},
    ),
}  # fmt: skip


_AT = "[2026-01-01 00:00:00 TP0] "
#: One line for each mark of LINES, with the words that the program prints (FACTS 1.4 and 5.2; recorded logs).
LOG_LINES: dict[str, str] = {
    "scale_default": _AT + "Using FP8 KV cache but no scaling factors provided. Defaulting to scaling factors of 1.0.",
    "scale_file_loaded": _AT + "Loaded KV cache scaling factors from /m/kv.json",
    "scale_not_loaded": _AT
    + "Found .k_scale in the checkpoint (e.g. model.layers.0.self_attn.k_proj.k_scale), but not "
    "found the expected name in the model (e.g. model.layers.0.self_attn.attn.k_scale). .k_scale is not loaded.",
    "scale_ignored_16bit": _AT + "Checkpoint has k_scale but KV cache dtype is not FP8. Ignoring k_scale for BMM1 "
    "(k_scale=0.3700, kv_dtype=torch.bfloat16).",
    "not_loaded": _AT + "The weights of the draft's embedding are not loaded.",
    "not_in_params": _AT + "Parameter lm_head.bias not found in params_dict",
    "fp4_kv_warning": _AT + "nvfp4 KV Cache might lead to an accuracy drop!",
    "w1_w3_scale": _AT + "w1_weight_scale_2 must match w3_weight_scale_2. Accuracy may be affected.",
    "requantize": _AT + "Beware that requantization may incur a loss in accuracy",
    "ue8m0": _AT + "DeepGemm is enabled but the scale_fmt of checkpoint is not ue8m0. This might cause accuracy "
    "degradation on Blackwell.",
    "marlin_fallback": _AT + "Weight-only FP4 compression will be used leveraging the Marlin kernel.",
    "context_overwritten": _AT + "Warning: User-specified context_length (524288) is greater than the derived "
    "context_length (262144).",
    "rope_factor": _AT + "rope_scaling missing 'factor', defaulting to 1.0. Check model accuracy.",
    "truncated": _AT + "Input length exceeds the maximum. Truncating the input.",
    "no_chat_template": _AT + "No HuggingFace chat template found",
    "default_chat_template": _AT + "Using default HuggingFace chat template with detected content format: openai",
    "nan": _AT + "Detected errors during sampling! NaN in the logits.",
    "custom_all_reduce_off": _AT
    + "CustomAllReduceV2 is disabled because it's not supported on more than two PCIe-only GPUs",
    "backend_fallback": _AT + "The current platform does not support Intel AMX, will fallback to torch_native backend.",
    "attention_changed": _AT
    + "FlashAttention3 only supports fp8_e4m3 if using FP8; Setting attention backend to triton.",
    "vllm_q_scale": "WARNING 03-25 22:34:30 [kv_cache.py:82] Checkpoint does not provide a q scaling factor.",
    "vllm_scale_default": "WARNING 03-25 22:34:30 [kv_cache.py:109] Using KV cache scaling factor 1.0 for fp8_e4m3.",
    "vllm_fp8_kv": "INFO 11-29 12:58:59 [cache.py:361] Using fp8 data type to store kv cache. It reduces the footprint",
    "vllm_uncalibrated": "WARNING 03-25 22:34:30 [kv_cache.py:128] Using uncalibrated q_scale 1.0",
}
