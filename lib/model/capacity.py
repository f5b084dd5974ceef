"""A deployment on paper: what fits on how many GPUs, beside what a server says of itself. Pure.

Nothing is computed here that `memory` does not compute; this says which question was asked, turns weights into another
precision, and names what keeps a plan and a server from being compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from lib.errors import BadInput, WorkbookError
from lib.model.architectures import text_config
from lib.model.facts import DEFAULT_SGLANG_VERSION, Checkpoint
from lib.model.memory import GIB, PoolPrediction, predict_pools
from lib.model.quantization import resolve_kv_cache_dtype
from lib.records import Record

AS_STORED = "as stored"
#: Weight dtype -> bits a weight takes with its block scales. Source: one byte a block of 16 for NVFP4, a byte a block of
#: 32 for MXFP4, a 16-bit scale a group of 128 for INT4 (GPTQ, AWQ); scales of FP8 (one a channel or 128 x 128) are left out.
WEIGHT_BITS: dict[str, float] = {
    "float32": 32.0,
    "bfloat16": 16.0,
    "fp8": 8.0,
    "nvfp4": 4.5,
    "mxfp4": 4.25,
    "int4": 4.125,
}
#: safetensors dtypes in which one element is one weight; the others pack several into one.
_ONE_EACH = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


class Wanted(Record):
    """What is asked of the planner: the launch as far as memory depends on it. None: SGLang's own default."""

    tp: int = 1
    weights: str = Field(default=AS_STORED, description="AS_STORED or a key of WEIGHT_BITS")
    weights_gib: float | None = Field(default=None, description="on one GPU; None: from the checkpoint's files")
    kv_cache_dtype: str = "auto"
    mem_fraction_static: float | None = None
    context_length: int | None = None
    max_total_tokens: int | None = None
    max_running_requests: int | None = None
    gpu_memory_mib: float | None = None
    sglang_version: str = DEFAULT_SGLANG_VERSION
    platform: str = "cuda"


class Plan(Record):
    """What fits, and the weights that it was computed with (GiB on one GPU; None: not known)."""

    wanted: Wanted
    pools: PoolPrediction
    weights_gib: float | None
    weights_why: str
    requests: int | None = Field(description="requests of the whole context that fit at once")


class ServerFigure(Record):
    """What a server says of itself: its pool, and the settings that the pool depends on. None: it does not say."""

    name: str
    running: bool
    path: str = Field(description="raw file that says so")
    line: int | None = None
    quote: str | None = None
    tokens: int | None = None
    kv_gib: float | None = None
    weights_gib: float | None = None
    running_requests: int | None = None
    context_length: int | None = None
    settings: dict[str, Any] = Field(default={}, description="the fields of `Wanted` that it was launched with")


def weights_on_gpu(checkpoint: Checkpoint, weights: str, tp: int) -> tuple[float | None, str]:
    """GiB of weights on one of `tp` GPUs if they were stored in another precision, and how that is computed.

    The linear weights change; the embedding and, where it is its own, the output matrix stay in 16 bits, as the
    published quantizations leave them. Replicated parts and kernel layouts come on top.

    Raises:
        BadInput: an unknown precision, or a checkpoint whose weights can't be counted (packed, or no tensor list).

    Example: 1,115,200 weights of which 524,288 are embedding and output (2,048 x 128 x 2), fp8, one GPU:
    (590,912 + 2 x 524,288) B = 0.00153 GiB.
    """
    if weights == AS_STORED:
        if checkpoint.weight_bytes is None:
            return None, "no safetensors files here"
        return checkpoint.weight_bytes / tp / GIB, "bytes in the safetensors headers / GPUs"
    if weights not in WEIGHT_BITS:
        raise BadInput(f"expected weights as one of {AS_STORED}, {', '.join(WEIGHT_BITS)}", weights[:60])
    stored = checkpoint.parameters_by_dtype
    packed = sorted(name for name in stored if name not in _ONE_EACH)
    if not stored or packed:
        found = f"tensors of {', '.join(packed)}, which pack several weights each" if packed else "no tensor list"
        raise BadInput(
            f"expected weights that can be counted, to think of them as {weights}", found, f"choose {AS_STORED!r}"
        )
    kept = min(_kept_wide(checkpoint.config), sum(stored.values()))
    linear = sum(stored.values()) - kept
    bits = WEIGHT_BITS[weights]
    size = (linear * bits + kept * max(bits, 16.0)) / 8
    return (
        size / tp / GIB,
        f"{linear:,} weights x {bits:g} bits + {kept:,} (embedding, output) x {max(bits, 16):g} / GPUs",
    )


def _kept_wide(config: Mapping[str, Any]) -> int:
    text, _ = text_config(config)
    vocab, hidden = text.get("vocab_size"), text.get("hidden_size")
    if not isinstance(vocab, int) or not isinstance(hidden, int):
        return 0
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    return vocab * hidden * (1 if tied else 2)


def plan(checkpoint: Checkpoint, wanted: Wanted) -> Plan:
    """The plan for one question.

    Raises:
        BadInput, UnknownArchitecture: as `memory.predict_pools`; also where a number is none.
    """
    weights, why = wanted.weights_gib, "given"
    if weights is None:
        weights, why = weights_on_gpu(checkpoint, wanted.weights, wanted.tp)
    if weights is None and wanted.max_total_tokens is None:
        raise BadInput(
            "expected the size of the weights on one GPU",
            f"{why}: a configuration alone does not say it",
            "give it in GiB, or name a folder with the safetensors files",
        )
    pools = predict_pools(
        checkpoint,
        tp=wanted.tp,
        kv_cache_dtype=wanted.kv_cache_dtype,
        sglang_version=wanted.sglang_version,
        gpu_memory_mib=wanted.gpu_memory_mib,
        weights_gib=weights,
        mem_fraction_static=wanted.mem_fraction_static,
        max_total_tokens=wanted.max_total_tokens,
        max_running_requests=wanted.max_running_requests,
        context_length=wanted.context_length,
        platform=wanted.platform,
    )
    full = pools.full_length_requests
    return Plan(
        wanted=wanted,
        pools=pools,
        weights_gib=weights,
        weights_why=why,
        requests=int(full) if full is not None else None,
    )


def plans_by_dtype(checkpoint: Checkpoint, wanted: Wanted, dtypes: tuple[str, ...]) -> dict[str, Plan | None]:
    """The same question for other KV cache dtypes; None where one can't be."""
    made: dict[str, Plan | None] = {}
    for dtype in dtypes:
        try:
            made[dtype] = plan(checkpoint, wanted.model_copy(update={"kv_cache_dtype": dtype}))
        except WorkbookError:
            made[dtype] = None
    return made


def unlike(checkpoint: Checkpoint, wanted: Wanted, server: ServerFigure) -> list[str]:
    """Settings in which a plan and a server differ, each in words; empty: the figures may be compared."""
    found = []
    for name, theirs in server.settings.items():
        mine = getattr(wanted, name)
        if name == "kv_cache_dtype":
            mine, theirs = _dtype(checkpoint, wanted, mine), _dtype(checkpoint, wanted, theirs)
        if name == "context_length":
            mine, theirs = mine or checkpoint.context_length, theirs or checkpoint.context_length
        same = abs(mine - theirs) < 5e-4 if isinstance(mine, float) and isinstance(theirs, float) else mine == theirs
        if not same:
            found.append(f"{name} {_said(mine)} here, {_said(theirs)} there")
    if wanted.weights != AS_STORED or wanted.weights_gib is not None:
        found.append("the weights are not those of the files")
    return found


def _dtype(checkpoint: Checkpoint, wanted: Wanted, flag: Any) -> Any:
    try:
        return resolve_kv_cache_dtype(
            checkpoint, str(flag or "auto"), wanted.sglang_version, platform=wanted.platform
        ).dtype
    except WorkbookError:
        return flag


def _said(value: Any) -> str:
    return "SGLang's default" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
