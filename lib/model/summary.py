"""What `workbook inspect checkpoint` and the notebooks say of a checkpoint: one object and its findings. Pure."""

from __future__ import annotations

from typing import Any, Literal

from lib.errors import BadInput
from lib.model.facts import DEFAULT_SGLANG_VERSION, Checkpoint
from lib.model.memory import (
    GIB,
    kv_bytes_per_token,
    pools_by_dtype,
    require_architecture,
    state_bytes_per_slot,
    swa_pool,
)
from lib.model.quantization import DTYPE_BYTES, resolve_kv_cache_dtype, scales_loaded, weights_quantized
from lib.records import Record

Level = Literal["info", "warning", "error"]
_FACTS = {
    "path",
    "architecture_name",
    "torch_dtype",
    "vocab_size",
    "context_length",
    "rope",
    "generation_config",
    "chat_template",
    "tokenizer_files",
    "shards",
    "tensors",
    "weight_bytes",
    "parameters_by_dtype",
    "draft_tensors",
}
LEVELS: tuple[Level, ...] = ("info", "warning", "error")


class Finding(Record):
    """One thing worth knowing before this checkpoint is served."""

    id: str
    level: Level
    text: str
    do: str | None = None
    source: str


def weights_text(checkpoint: Checkpoint) -> str:
    """The precision of the weights in words: what is stored, and what is only declared.

    Example: `bfloat16 (declares FP8, no weight is quantized)` where hf_quant_config.json excludes every layer.
    """
    declared = checkpoint.quantization
    if declared.weights_method is None:
        return checkpoint.torch_dtype or "not said"
    if weights_quantized(checkpoint) is False:
        said = declared.weights_algo or declared.weights_method
        return f"{checkpoint.torch_dtype or 'unquantized'} (declares {said}, no weight is quantized)"
    return f"{declared.weights_method}{f' {declared.weights_algo}' if declared.weights_algo else ''}"


def checkpoint_findings(
    checkpoint: Checkpoint,
    *,
    kv_cache_dtype: str = "auto",
    sglang_version: str = DEFAULT_SGLANG_VERSION,
    tp: int = 1,
    sm: int | None = None,
) -> list[Finding]:
    """What the files alone say about KV precision, scales, replication and what is missing.

    Example: k/v scales of 0.05 that this release loads, with a bfloat16 cache, give `kv_scales_over_16_bit_cache`
    (error).
    """
    dtype, why = resolve_kv_cache_dtype(checkpoint, kv_cache_dtype, sglang_version, sm=sm)
    loaded, loaded_why = scales_loaded(checkpoint, sglang_version)
    declared, scales = checkpoint.quantization.kv_declared, checkpoint.scales
    narrow = DTYPE_BYTES[dtype] < 2
    found: list[Finding] = []

    def add(name: str, level: Level, text: str, do: str | None, source: str) -> None:
        found.append(Finding(id=name, level=level, text=text, do=do, source=source))

    if scales is not None and scales.present and loaded is not False and scales.all_one is not True and not narrow:
        sure = "are loaded" if loaded else "may be loaded"
        add(
            "kv_scales_over_16_bit_cache",
            "error" if loaded else "warning",
            f"the cache is {dtype}, and the checkpoint's k/v scales other than 1.0 {sure} ({loaded_why}): on the "
            f"Triton backend K and "
            "V are stored undivided and read multiplied, which ruins everything read from the cache without a message",
            "serve a copy without the k_scale/v_scale tensors, or keep the FP8 cache",
            "measured on SGLang 0.5.16 with a Llama, read in 0.5.11 to 0.5.23",
        )
    if kv_cache_dtype == "auto" and narrow:
        add(
            "kv_cache_silently_8_bit",
            "warning",
            f"--kv-cache-dtype auto becomes {dtype} ({why}), and no warning line says so",
            "give --kv-cache-dtype bf16 where context must not be quantized (and see the scales)",
            "SGLang configure_kv_cache_dtype; seen on an H200 with 0.5.16",
        )
    if declared and declared != "fp8" and kv_cache_dtype == "auto":
        add(
            "kv_form_not_taken",
            "info",
            f"the files declare {declared} for the KV cache; {why}",
            None,
            "SGLang configure_kv_cache_dtype",
        )
    elif declared == "fp8" and kv_cache_dtype == "auto" and not narrow:
        add(
            "kv_form_not_taken",
            "info",
            f"the files declare fp8 for the KV cache, but the cache becomes {dtype}: {why}",
            None,
            "the same",
        )
    if narrow and (scales is None or not scales.present):
        add(
            "kv_scales_absent",
            "warning",
            "an 8-bit KV cache without calibrated scales: SGLang takes 1.0"
            if scales
            else "an 8-bit KV cache; whether there are scales is not known",
            None,
            "SGLang layers/quantization/kv_cache.py",
        )
    if narrow and scales is not None and scales.present and loaded is False:
        add(
            "kv_scales_not_loaded",
            "warning",
            f"the checkpoint's k/v scales are not used: {loaded_why}",
            None,
            "the model file",
        )
    if scales is not None and scales.unread:
        add(
            "kv_scales_unread",
            "warning",
            f"values not read: {'; '.join(scales.unread[:3])}",
            None,
            "safetensors headers",
        )
    if checkpoint.quantization.weights_method is not None and weights_quantized(checkpoint) is False:
        add(
            "weights_not_quantized",
            "info",
            f"weights: {weights_text(checkpoint)}: no tensor has a quantized dtype",
            None,
            "safetensors headers",
        )
    for text in checkpoint.findings:
        add("files", "warning" if "disagree" in text else "info", text, None, "config.json, hf_quant_config.json")
    if checkpoint.path is not None:
        if checkpoint.chat_template is None:
            add(
                "no_chat_template",
                "warning",
                "no chat template in the folder",
                "give --chat-template",
                "tokenizer_config.json",
            )
        if checkpoint.generation_config is None:
            add(
                "no_generation_config",
                "info",
                "no generation_config.json: SGLang's own sampling defaults apply",
                None,
                "the folder",
            )
        if checkpoint.shards is None:
            add(
                "no_weights",
                "warning",
                "no safetensors files: tensors, scales and weight size are not known",
                None,
                "the folder",
            )
    if checkpoint.architecture is not None:
        kv = kv_bytes_per_token(checkpoint, tp, dtype, sglang_version=sglang_version)
        if kv.replication > 1:
            add(
                "kv_replicated",
                "info",
                f"on {tp} ranks every KV entry is held {kv.replication:g} times",
                "DP attention holds different tokens on the ranks" if tp > 1 else None,
                "SGLang get_num_kv_heads; an MLA latent is kept whole on every rank",
            )
    return found


def checkpoint_summary(
    checkpoint: Checkpoint,
    *,
    tp: int = 1,
    kv_cache_dtype: str = "auto",
    sglang_version: str = DEFAULT_SGLANG_VERSION,
    sm: int | None = None,
    **memory: Any,
) -> dict[str, Any]:
    """One object with everything that is known of the checkpoint; the keys are documented in
    docs/inspect-checkpoint.md.

    Args:
        checkpoint: from `read_checkpoint` or `checkpoint_from_configs`.
        tp, kv_cache_dtype, sglang_version, sm: how it is to be served.
        memory: inputs of `memory.predict_pools` (gpu_memory_mib, ...); without them `pools` is None, with the reason
            beside it.

    Raises:
        UnknownArchitecture: the layout is not known.
        BadInput: an argument that can't be.
    """
    layout = require_architecture(checkpoint)
    dtype, why = resolve_kv_cache_dtype(checkpoint, kv_cache_dtype, sglang_version, sm=sm)
    loaded, loaded_why = scales_loaded(checkpoint, sglang_version)
    widths = dict.fromkeys([dtype, checkpoint.torch_dtype or "bfloat16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
    cache = {name: kv_bytes_per_token(checkpoint, tp, name, sglang_version=sglang_version) for name in widths}
    state = state_bytes_per_slot(checkpoint, tp)
    pools: dict[str, Any] | None = None
    pools_why = None
    if memory:
        try:
            flags = tuple(dict.fromkeys((kv_cache_dtype, "bf16", "fp8_e4m3")))
            made = pools_by_dtype(checkpoint, flags, tp=tp, sglang_version=sglang_version, sm=sm, **memory)
            pools = {flag: pool.model_dump(mode="json") for flag, pool in made.items()}
        except BadInput as error:
            sized = any(memory.get(name) is not None for name in ("weights_gib", "available_gib", "max_total_tokens"))
            pools_why = str(error)
            if checkpoint.weight_bytes is None and not sized:
                pools_why = "the weights' size is missing (no safetensors files here): give --weights-gib, on one GPU"
    else:
        pools_why = "no memory inputs: give the GPU's memory"
    facts = checkpoint.model_dump(mode="json", include=_FACTS)
    scales = checkpoint.scales.model_dump(mode="json") if checkpoint.scales else None
    if scales is not None and checkpoint.scales is not None:
        scales |= {"present": checkpoint.scales.present, "all_one": checkpoint.scales.all_one}
    findings = checkpoint_findings(
        checkpoint, kv_cache_dtype=kv_cache_dtype, sglang_version=sglang_version, tp=tp, sm=sm
    )
    return {
        "checkpoint": facts,
        "layers": {
            **layout.model_dump(mode="json", exclude={"groups"}),
            "kv_layers": layout.kv_layers,
            "recurrent_layers": layout.recurrent_layers,
            "groups": [
                group.model_dump(mode="json", exclude_none=True) | {"count": len(group.layers)}
                for group in layout.groups
            ],
            "sliding_pool": swa_pool(checkpoint, sglang_version),
        },
        "quantization": checkpoint.quantization.model_dump(mode="json")
        | {"weights": weights_text(checkpoint), "weights_quantized": weights_quantized(checkpoint)},
        "scales": scales,
        "scales_loaded": {"loaded": loaded, "why": loaded_why},
        "kv_cache": {
            "flag": kv_cache_dtype,
            "sglang_version": sglang_version,
            "dtype": dtype,
            "why": why,
            "tp": tp,
            "bytes_per_token": {
                name: kv.model_dump(mode="json") | {"tokens_per_gib": GIB // kv.per_gpu if kv.per_gpu else None}
                for name, kv in cache.items()
            },
        },
        "state": state.model_dump(mode="json") if state else None,
        "pools": pools,
        "pools_why": pools_why,
        "findings": [finding.model_dump(mode="json") for finding in findings],
    }
