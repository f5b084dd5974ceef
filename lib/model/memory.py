"""Bytes per token, fixed state per request, and the pools as SGLang of a given version splits them. Pure.

All sizes are bytes unless the name says GiB (2**30; SGLang's log lines print GiB as "GB"). Per GPU means one
tensor-parallel rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from lib.errors import BadInput, UnknownArchitecture
from lib.model.architectures import text_config
from lib.model.facts import (
    DEFAULT_SGLANG_VERSION,
    Architecture,
    Checkpoint,
    LayerGroup,
    RecurrentState,
    since,
    version_note,
)
from lib.model.quantization import DTYPE_BYTES, resolve_kv_cache_dtype, torch_name
from lib.records import Record

GIB = 1 << 30
#: What a log calls "GB" on its host-memory lines (HiCache) is decimal, while pool lines mean GiB.
DECIMAL_GB = 10**9
#: Memory of an H200 that was gone before weights were loaded (143,771 MiB in all, 139.13 GiB free at "Load weight
#: begin").
CONTEXT_GIB_MEASURED = 1.27


#: torch_compile_max_bs's default, which bounds the decode "graphs" of a CPU (0.5.15.post1).
CPU_GRAPH_MAX_BS = 32


class KvBytes(Record):
    """KV cache bytes per token, per GPU and for the whole box, by group.

    `per_gpu` is what one more token costs in the pool that max_total_num_tokens counts; `sliding_per_gpu` is what a
    token costs as long as it is inside the window, where sliding layers have a pool of their own; `draft_per_gpu`
    comes on top.
    """

    dtype: str
    tp: int
    attn_tp: int
    per_gpu: int
    k_per_gpu: int | None = Field(description="None for a latent cache, which has no separate K and V")
    v_per_gpu: int | None
    groups: dict[str, int]
    sliding_per_gpu: int = 0
    sliding_k_per_gpu: int = 0
    sliding_v_per_gpu: int = 0
    draft_per_gpu: int = 0
    draft_layers: int = 0
    whole_box: int
    logical: int = Field(description="each KV head once, as if nothing were replicated")
    kv_heads_per_gpu: int | None
    replication: float = Field(description="whole_box / logical")
    growth_beyond_window: int


class StateBytes(Record):
    """Fixed state per request slot and GPU of the recurrent layers."""

    kind: str
    layers: int
    conv_dtype: str
    ssm_dtype: str
    conv: int
    ssm: int
    per_slot: int


class PoolPrediction(Record):
    """The pools of one GPU as this SGLang would make them."""

    sglang_version: str
    kv_cache_dtype: str
    kv_cache_dtype_why: str
    tp: int
    mem_fraction_static: float | None
    mem_fraction_from: str
    pre_load_gib: float | None
    available_gib: float | None
    slack_gib: float | None
    rest_gib: float | None = Field(description="what the pools share, before the recurrent state")
    cell_bytes: float = Field(
        description="what SGLang divides the budget by; can differ from what a token really takes"
    )
    bytes_per_token: int
    max_total_num_tokens: int
    profiled_tokens: int | None = None
    swa_tokens: int | None = None
    kv_gib: float
    k_gib: float | None
    v_gib: float | None
    swa_gib: float | None = None
    draft_kv_gib: float = 0.0
    max_mamba_cache_size: int | None = None
    state_bytes_per_slot: int | None = None
    state_gib: float | None = None
    spec_scratch_gib: float | None = None
    slots_per_request: int | None = None
    max_running_requests: int | None = None
    context_length: int | None = None
    full_length_requests: float | None = Field(
        default=None, description="requests of the full context that fit, by tokens"
    )
    overcommitted_gib: float | None = Field(
        default=None, description="allocated beyond the budget, where SGLang's cell is too small"
    )
    notes: tuple[str, ...] = ()


class PoolReading(Record):
    """One way in which a reported pool could have come about."""

    kv_cache_dtype: str
    predicted_tokens: int | None = None
    mem_fraction_static: float | None = None
    relative_error: float | None = None
    speculative: bool | None = None
    why: str


class PoolExplanation(Record):
    """What dtype, fraction and speculation explain a pool that a log reports; `bytes_per_token` is measured where
    sizes are given.
    """

    tokens: int
    bytes_per_token: float | None
    kv_cache_dtype: str | None = Field(description="decided by arithmetic; None: several dtypes, or none, fit")
    candidates: tuple[PoolReading, ...]
    verdict: str


def require_architecture(checkpoint: Checkpoint) -> Architecture:
    """The checkpoint's architecture.

    Raises:
        UnknownArchitecture: there is no row for it.
    """
    if checkpoint.architecture is None:
        raise UnknownArchitecture(
            "expected an architecture with a known memory layout",
            checkpoint.architecture_name[:100],
            (checkpoint.architecture_error or "").rpartition("; do: ")[2].rstrip(".")
            or "add a row to lib/model/architectures.py: which layers keep K and V, which a window, a latent or a fixed "
            "state, and the source",
        )
    return checkpoint.architecture


def _positive(value: Any, name: str, low: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= 1 << 40:
        raise BadInput(f"expected {name} as a whole number of at least {low}", repr(value)[:60], "check the argument")
    return value


def attention_tp(tp: int, dp_attention: int = 1) -> int:
    """Ranks that share the attention heads: tp, or tp / dp with DP attention."""
    _positive(tp, "tp")
    if tp % _positive(dp_attention, "dp_attention"):
        raise BadInput(
            "expected a DP attention size that divides tp", f"tp {tp}, dp {dp_attention}", "check --tp and --dp"
        )
    return tp // dp_attention


def heads_per_gpu(kv_heads: int, attn_tp: int) -> int:
    """KV heads on one rank: their share, and at least one (then each head is held by several ranks).

    Raises:
        BadInput: neither divides the other, which SGLang's attention layers refuse.

    Source: SGLang `configs/model_config.py:get_num_kv_heads`. Example: 2 heads on 8 ranks give 1, held 4 times.
    """
    if max(kv_heads, attn_tp) % min(kv_heads, attn_tp):
        raise BadInput(
            "expected tp and KV heads of which one divides the other",
            f"{kv_heads} KV heads on {attn_tp} ranks",
            "choose another --tp",
        )
    return max(1, kv_heads // attn_tp)


def require_head_split(checkpoint: Checkpoint, attn_tp: int) -> None:
    """Every rank gets the same number of query heads, or SGLang's attention layers refuse to be built.

    Raises:
        BadInput: the heads can't be divided, with the sizes that would do.

    Source: SGLang `models/llama.py` and its siblings (`assert total_num_heads % tp_size == 0`), `configs/model_config.py`.
    Example: SmolLM2 has 9 heads: 1, 3 and 9 ranks share them, 6 don't (although 3 KV heads on 6 ranks would).
    """
    text, _ = text_config(checkpoint.config)
    heads = text.get("num_attention_heads", checkpoint.config.get("num_attention_heads"))
    if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1 or heads % attn_tp == 0:
        return
    layout = checkpoint.architecture
    kv_heads = [group.kv_heads for group in layout.groups if group.kv_heads] if layout else []
    allowed = [
        size
        for size in range(1, min(heads, 4096) + 1)
        if heads % size == 0 and all(max(size, kv) % min(size, kv) == 0 for kv in kv_heads)
    ]
    raise BadInput(
        f"expected a number of attention ranks that divides the model's {heads} attention heads, one of "
        f"{', '.join(map(str, allowed))}",
        f"{attn_tp} ranks",
        "choose another --tp (with DP attention: another tp / dp); SGLang asserts this while it builds the model",
    )


def _element(count: int, dtype: str) -> int:
    """Bytes of `count` elements; 4-bit with one scale byte per 16 elements, MXFP8 with one per 32."""
    if dtype == "float4_e2m1fn_x2":
        return count // 2 + count // 16
    if dtype == "mxfp8":
        return count + count // 32
    return int(count * DTYPE_BYTES[dtype])


def _kv_sides(group: LayerGroup, attn_tp: int, dtype: str) -> tuple[int, int]:
    heads = heads_per_gpu(group.kv_heads or 1, attn_tp)
    per_layer_k = _element(heads * (group.k_head_dim or 0), dtype)
    per_layer_v = _element(heads * (group.v_head_dim or 0), dtype)
    return per_layer_k * len(group.layers), per_layer_v * len(group.layers)


def _latent_bytes(group: LayerGroup, dtype: str, raw_layout: bool) -> int:
    """MLA latent per layer. With an indexer and e4m3, SGLang keeps lora bytes, a float scale per 128 and the RoPE
    part in bf16.

    Source: SGLang `calculate_mla_kv_cache_dim` (0.5.15.post1 `model_runner_kv_cache_mixin.py`). Example: 512 + 16 +
    128 = 656.
    """
    lora, rope = group.kv_lora_rank or 0, group.qk_rope_head_dim or 0
    if group.index_head_dim and dtype == "float8_e4m3fn" and not raw_layout:
        return lora + lora // 128 * 4 + rope * 2
    return _element(lora + rope, dtype)


def _indexer_bytes(group: LayerGroup, own_dtype: str) -> int:
    """Indexer keys of the whole group per token. DSA: 1 byte each and a 4-byte scale per 128; MiniMax M3: in the
    model's dtype.
    """
    if not group.index_head_dim or not group.index_layers:
        return 0
    dim = group.index_head_dim
    each = dim + dim // 128 * 4 if group.kind == "mla" else int(dim * DTYPE_BYTES[own_dtype])
    return each * group.index_layers


def swa_pool(checkpoint: Checkpoint, sglang_version: str, disable_hybrid_swa_memory: bool = False) -> bool:
    """Whether sliding layers get a pool of their own in this release (else they are kept at full length)."""
    layout = require_architecture(checkpoint)
    first = layout.hybrid_swa_since
    return bool(
        first and layout.group("sliding_window") and since(sglang_version, first) and not disable_hybrid_swa_memory
    )


def kv_bytes_per_token(
    checkpoint: Checkpoint,
    tp: int = 1,
    dtype: str = "auto",
    *,
    sglang_version: str = DEFAULT_SGLANG_VERSION,
    dp_attention: int = 1,
    draft_layers: int = 0,
    disable_hybrid_swa_memory: bool = False,
    raw_mla_layout: bool = False,
    platform: str = "cuda",
    sm: int | None = None,
) -> KvBytes:
    """KV cache bytes per token, per GPU and for the whole box, by group.

    MHA/GQA: max(1, H_kv // attn_tp) * (d_k + d_v) * layers * bytes. MLA: (kv_lora_rank + qk_rope_head_dim) * layers *
    bytes on every rank, undivided, plus the indexer's key where there is one. Sliding layers count apart when they
    have their own pool.

    Args:
        checkpoint: the model.
        tp: tensor-parallel ranks.
        dtype: a KV cache dtype (flag or torch name) or `auto`.
        sglang_version: the release.
        dp_attention: DP attention size (1: off).
        draft_layers: MTP/EAGLE layers of a running draft, with the target's geometry.
        disable_hybrid_swa_memory: the flag of that name.
        raw_mla_layout: sparse attention on trtllm or HIP kernels, which keep FP8 latents without block scales.

    Raises:
        UnknownArchitecture, BadInput.

    Source: SGLang `model_executor/pool_configurator.py`, `configs/model_config.py`.
    Example: SmolLM2-135M, bf16: 30 layers * 3 heads * (64 + 64) * 2 = 23,040 B; Qwen3.5-397B on 8 ranks, bf16: 15 *
    512 * 2 = 15,360 B.
    """
    layout = require_architecture(checkpoint)
    attn_tp = attention_tp(tp, dp_attention)
    if platform != "cpu":  # there SGLang pads the heads
        require_head_split(checkpoint, attn_tp)
    name = (
        resolve_kv_cache_dtype(checkpoint, dtype, sglang_version, platform=platform, sm=sm).dtype
        if dtype == "auto"
        else torch_name(dtype)
    )
    width = "mxfp8" if str(dtype).strip().lower() == "mxfp8" else name
    own_pool = swa_pool(checkpoint, sglang_version, disable_hybrid_swa_memory)
    groups: dict[str, int] = {}
    k = v = sliding_k = sliding_v = latent = indexer = logical = 0
    heads: int | None = None
    for group in layout.groups:
        if group.kind == "recurrent":
            continue
        if group.kind == "mla":
            latent += _latent_bytes(group, name, raw_mla_layout) * len(group.layers)
            indexer += _indexer_bytes(group, checkpoint.torch_dtype or "bfloat16")
            continue
        counted = _as_counted(group, layout, own_pool)
        group_k, group_v = _kv_sides(counted, attn_tp, width)
        once = sum(_kv_sides(counted, 1, width))
        indexer += _indexer_bytes(group, checkpoint.torch_dtype or "bfloat16")
        groups[group.kind] = group_k + group_v
        if group.kind == "full_attention":
            heads = heads_per_gpu(counted.kv_heads or 1, attn_tp)
        if group.kind == "sliding_window" and own_pool:
            sliding_k, sliding_v = group_k, group_v
        else:
            k, v = k + group_k, v + group_v
            logical += once
    if latent:
        groups["mla"] = latent
    if indexer:
        groups["indexer"] = indexer
    per_gpu = k + v + latent + indexer
    logical += latent + indexer
    draft = _draft_bytes(checkpoint, layout, attn_tp, width, _positive(draft_layers, "draft_layers", 0), raw_mla_layout)
    if per_gpu == 0 and sliding_k + sliding_v:
        per_gpu, logical = sliding_k + sliding_v, sum(_kv_sides(layout.groups[0], 1, width))
    return KvBytes(
        dtype=name,
        tp=tp,
        attn_tp=attn_tp,
        per_gpu=per_gpu,
        k_per_gpu=None if latent else k,
        v_per_gpu=None if latent else v,
        groups=groups,
        sliding_per_gpu=sliding_k + sliding_v,
        sliding_k_per_gpu=sliding_k,
        sliding_v_per_gpu=sliding_v,
        draft_per_gpu=draft,
        draft_layers=draft_layers,
        whole_box=per_gpu * tp,
        logical=logical,
        kv_heads_per_gpu=heads,
        replication=per_gpu * attn_tp / logical if logical else 1.0,
        growth_beyond_window=per_gpu,
    )


def _as_counted(group: LayerGroup, layout: Architecture, own_pool: bool) -> LayerGroup:
    """Without a pool of their own, sliding layers are kept with the full layers' geometry."""
    full = layout.group("full_attention")
    if group.kind == "sliding_window" and not own_pool and full is not None:
        return group.model_copy(
            update={"kv_heads": full.kv_heads, "k_head_dim": full.k_head_dim, "v_head_dim": full.v_head_dim}
        )
    return group


def _draft_bytes(checkpoint: Checkpoint, layout: Architecture, attn_tp: int, dtype: str, layers: int, raw: bool) -> int:
    """Bytes per token of `layers` draft layers with the target's attention geometry."""
    if not layers:
        return 0
    model = layout.group("mla") or layout.group("full_attention") or layout.groups[0]
    one = model.model_copy(
        update={"layers": tuple(range(layers)), "index_layers": layers if model.index_layers else None}
    )
    if model.kind == "mla":
        return _latent_bytes(one, dtype, raw) * layers + _indexer_bytes(one, checkpoint.torch_dtype or "bfloat16")
    return sum(_kv_sides(one, attn_tp, dtype))


def _divide(value: int, ranks: int, what: str) -> int:
    if value % ranks:
        raise BadInput(f"expected {what} to be divisible by {ranks} attention ranks", str(value), "choose another --tp")
    return value // ranks


def state_elements(state: RecurrentState, attn_tp: int) -> tuple[int, int]:
    """Elements of one layer's convolution window and recurrent state on one rank.

    Groups that don't divide evenly are extended to one a rank. Source: SGLang `configs/mamba_utils.py`.
    Example: GDN with 64 value heads, 16 key heads of 128, kernel 4, on 8 ranks: 1536 * 3 and 8 * 128 * 128.
    """
    if state.kind == "kda":
        width = _divide(state.num_heads * state.head_dim, attn_tp, "num_heads * head_dim of linear attention")
        return 3 * width * (state.conv_kernel - 1), _divide(
            state.num_heads, attn_tp, "linear attention heads"
        ) * state.head_dim**2
    if state.kind == "short_conv":
        groups = state.n_groups if state.n_groups % attn_tp == 0 else attn_tp
        width = _divide(state.intermediate_size + 2 * groups * state.state_size, attn_tp, "the convolution width")
        return width * (state.conv_kernel - 1), 0
    groups = state.n_groups if state.n_groups % attn_tp == 0 else state.n_groups + attn_tp - state.n_groups
    width = _divide(state.intermediate_size + 2 * groups * state.state_size, attn_tp, "the convolution width")
    heads = _divide(state.num_heads, attn_tp, "linear attention heads")
    return width * (state.conv_kernel - 1), heads * state.head_dim * state.state_size


def state_bytes_per_slot(
    checkpoint: Checkpoint,
    tp: int = 1,
    *,
    dp_attention: int = 1,
    mamba_ssm_dtype: str | None = None,
    conv_dtype: str = "bfloat16",
) -> StateBytes | None:
    """Fixed state per request slot and GPU; None for a model without recurrent layers.

    The state's dtype: --mamba-ssm-dtype, then config.json's mamba_ssm_dtype, then float32 (not in any log line).

    Source: SGLang `configs/mamba_utils.py`. Example: Qwen3.5-397B on 8 ranks: 45 * (9,216 + 524,288) = 24,007,680 B.
    """
    layout = require_architecture(checkpoint)
    group = layout.group("recurrent")
    if group is None or group.state is None:
        return None
    text, _ = text_config(checkpoint.config)
    said = (
        text.get("mamba_ssm_dtype", checkpoint.config.get("mamba_ssm_dtype")) if group.state.dtype_from_config else None
    )
    ssm_dtype = mamba_ssm_dtype or (said if said in ("float32", "bfloat16", "float16") else "float32")
    if ssm_dtype not in ("float32", "bfloat16", "float16") or conv_dtype not in ("float32", "bfloat16", "float16"):
        raise BadInput(
            "expected mamba_ssm_dtype float32, bfloat16 or float16", repr(ssm_dtype)[:40], "check --mamba-ssm-dtype"
        )
    conv, ssm = state_elements(group.state, attention_tp(tp, dp_attention))
    conv_bytes, ssm_bytes = (
        int(conv * DTYPE_BYTES[conv_dtype]) * len(group.layers),
        int(ssm * DTYPE_BYTES[ssm_dtype]) * len(group.layers),
    )
    return StateBytes(
        kind=group.state.kind,
        layers=len(group.layers),
        conv_dtype=conv_dtype,
        ssm_dtype=ssm_dtype,
        conv=conv_bytes,
        ssm=ssm_bytes,
        per_slot=conv_bytes + ssm_bytes,
    )


def state_pool_gib(per_slot: int, slots: int) -> float:
    """GiB of a recurrent state pool: SGLang allocates one padding slot more than it reports."""
    return per_slot * (slots + 1) / GIB


def logged_pool_tokens_bytes(size: float, tokens: int, unit: Literal["gib", "gb"] = "gib") -> float:
    """Bytes per token of a log line: "GB" means GiB on pool lines and decimal GB on HiCache's host lines."""
    return size * (GIB if unit == "gib" else DECIMAL_GB) / _positive(tokens, "tokens")


class HostPool(Record):
    """A HiCache host pool: which unit its log line means, and bytes per token."""

    unit: Literal["decimal_gb", "gib"]
    bytes_per_token: int | None = Field(
        description="the only whole number per layer that the rounded size allows; None: several"
    )
    bytes_per_token_measured: float
    layers: int
    relative_error: float = Field(description="of the chosen unit, against the device pool")


def whole_bytes_per_token(size: float, unit_bytes: int, tokens: int, layers: int, decimals: int = 2) -> int | None:
    """Bytes per token that a rounded size allows when every layer takes the same whole number; None when none or
    several do.

    Example: 40.41e9 B over 3,035,904 tokens and 13 layers allow 13 * 1024 = 13,312 B alone.
    """
    half = 0.5 * 10.0**-decimals * unit_bytes
    low = math.ceil((size * unit_bytes - half) / _positive(tokens, "tokens") / _positive(layers, "layers") - 1e-9)
    high = math.floor((size * unit_bytes + half) / tokens / layers + 1e-9)
    return low * layers if low == high else None


def host_pool(
    host_tokens: int,
    host_size: float,
    device_bytes_per_token: float,
    target_layers: int,
    total_layers: int | None = None,
) -> HostPool:
    """What the "GB" of a host-memory line means, by comparing with the device pool of the same layers.

    SGLang prints pool lines in GiB and HiCache's host lines in decimal GB; a packed draft layer raises the host
    pool's layers.

    Args:
        host_tokens, host_size: the host line's numbers.
        device_bytes_per_token: of the device pool (its line means GiB).
        target_layers, total_layers: layers of the device pool, and of the host pool.

    Example: 3,035,904 tokens in 40.41 "GB", 12 layers of 1,024 B on the device, 13 on the host: decimal GB, 13,312 B
    per token.
    """
    layers = total_layers or target_layers
    expected = device_bytes_per_token * layers / _positive(target_layers, "target_layers")
    readings: dict[Literal["decimal_gb", "gib"], int] = {"decimal_gb": DECIMAL_GB, "gib": GIB}
    errors = {
        name: host_size * unit / _positive(host_tokens, "host_tokens") / expected - 1 for name, unit in readings.items()
    }
    unit = min(readings, key=lambda name: abs(errors[name]))
    return HostPool(
        unit=unit,
        bytes_per_token=whole_bytes_per_token(host_size, readings[unit], host_tokens, layers),
        bytes_per_token_measured=host_size * readings[unit] / host_tokens,
        layers=layers,
        relative_error=errors[unit],
    )


def tokens_in_pool(pool_gib: float, bytes_per_token: int, block_size: int = 1) -> int:
    """Tokens that fit into a pool of this size, in whole blocks. Example: 3.8125 GiB, 131,072 B, blocks of 16:
    31,232.
    """
    _positive(bytes_per_token, "bytes_per_token")
    return int(pool_gib * GIB // (bytes_per_token * _positive(block_size, "block_size"))) * block_size


# ---------------------------------------------------------------------------------------------- mem_fraction_static


def prefill_graph_sizes(largest: int) -> int:
    """How many prefill graph sizes SGLang generates up to `largest` tokens. Source: 0.5.15.post1 `server_args.py`.
    8192 gives 58.
    """
    parts = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256))
    return sum(len(range(a, min(b, largest + 1), step)) for a, b, step in parts) + len(range(4608, largest + 1, 512))


def chunk_and_graph_defaults(gpu_memory_mib: float, tp: int, sglang_version: str) -> tuple[int, int]:
    """Default chunked_prefill_size and largest decode graph batch by the GPU's memory. Source:
    `_handle_gpu_memory_settings`.
    """
    g, wide = gpu_memory_mib / 1024, tp >= 4
    if g < 20:
        return 2048, 8
    if g < 35:
        return (4096, 160 if wide else 48) if since(sglang_version, "0.5.20") else (2048, 80 if wide else 24)
    if g < 60:
        return 4096, 160 if wide else 32
    if g < 160:
        return 8192, 512 if wide else 256
    return 16384, 512


def mem_fraction_static_default(
    checkpoint: Checkpoint,
    gpu_memory_mib: float,
    *,
    tp: int = 1,
    pp: int = 1,
    sglang_version: str = DEFAULT_SGLANG_VERSION,
    chunked_prefill_size: int | None = None,
    cuda_graph_max_bs: int | None = None,
    disable_cuda_graph: bool = False,
    platform: str = "cuda",
    speculative_algorithm: str | None = None,
    dp_attention: int = 1,
    max_running_requests: int | None = None,
    max_total_tokens: int | None = None,
    multimodal: bool | None = None,
) -> float:
    """mem_fraction_static as SGLang derives it when the flag isn't given.

    reserved MiB = 512 + 1.5 * chunk + 2 * max_bs + 1024 * tp * pp / 8 + 8 * prefill graph sizes (MLA: 1536), at least
    10,240 above 60 GiB, plus 4,096 for EAGLE-family speculation up to 0.5.13; f = round((total - reserved) / total,
    3); multimodal models take a further factor by their vision tower.

    Source: SGLang 0.5.11 and 0.5.15.post1 `server_args.py`, 0.5.23 `arg_groups/memory_hook.py`.
    Example: tp 8, 97,887 MiB, chunk 8192, ViT of 1152 x 27: 0.802 -> 0.742 in 0.5.11, 0.844 -> 0.781 in 0.5.23.
    """
    layout = require_architecture(checkpoint)
    if not math.isfinite(gpu_memory_mib) or gpu_memory_mib <= 0:
        raise BadInput("expected the GPU's memory in MiB", repr(gpu_memory_mib), "take it from nvidia-smi")
    chunk, max_bs = chunk_and_graph_defaults(gpu_memory_mib, tp, sglang_version)
    chunk = chunked_prefill_size if chunked_prefill_size is not None else chunk
    if cuda_graph_max_bs is not None:
        max_bs = cuda_graph_max_bs
    elif platform == "cpu":
        max_bs = CPU_GRAPH_MAX_BS
    elif max_running_requests is not None and since(sglang_version, "0.5.23"):
        max_bs = min(max_bs, max_running_requests)
    reserved = 512 + 1.5 * max(chunk, 2048) + 1024 * tp * pp / 8
    if not disable_cuda_graph or not since(sglang_version, "0.5.14"):
        reserved += 2 * max_bs
    if dp_attention > 1:
        reserved += max_bs * dp_attention * (4.5 if max_bs > 300 else 3)
    if platform != "cpu" and not disable_cuda_graph:
        if layout.group("mla") and not layout.group("recurrent"):
            reserved += 1536
        else:
            reserved += 8 * prefill_graph_sizes(min(chunk, max_total_tokens) if max_total_tokens is not None else chunk)
    if gpu_memory_mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    algorithm = (speculative_algorithm or "").upper()
    if algorithm and algorithm != "NGRAM" and not since(sglang_version, "0.5.14"):
        reserved += 6144 if algorithm == "STANDALONE" else 4096
    fraction = round((gpu_memory_mib - reserved) / gpu_memory_mib, 3)
    if layout.multimodal if multimodal is None else multimodal:
        fraction *= vision_factor(layout)
    return fraction


def vision_factor(layout: Architecture) -> float:
    """What a vision tower takes off mem_fraction_static: 0.95, less 0.1 per doubling of a ViT-L's size, between 0.8
    and 1.05.

    The tower's field names count: without num_hidden_layers 24 and without hidden_size 1024 are taken (Qwen names it
    `depth`, so 24).
    Source: SGLang `adjust_mem_fraction_for_vlm`.
    """
    layers = layout.vision_layers if layout.vision_layers_named else 24
    size = (layers or 24) * float(layout.vision_hidden_size or 1024) ** 2 / (24 * 1024**2)
    return 0.95 * max(0.8, min(1.05, 1.0 - 0.1 * (size - 1.0)))


# ---------------------------------------------------------------------------------------------- pools


def slots_per_request(
    sglang_version: str,
    *,
    strategy: str | None = None,
    disable_radix_cache: bool = False,
    disable_overlap_schedule: bool = False,
) -> int:
    """State slots that a running request may take: 1 without radix cache, 3 with, and 1 or 2 more for extra buffers.

    Source: SGLang `_calculate_mamba_ratio`; `auto` is extra_buffer where overlap runs (from 0.5.14), no_buffer
    before.
    Example: 0.5.16 on an H200 made 6,574 slots and max_running_requests 1,314 = 6574 // 5.
    """
    if disable_radix_cache:
        return 1
    name = strategy if strategy not in (None, "auto") else _default_strategy(sglang_version, disable_overlap_schedule)
    if name not in ("no_buffer", "extra_buffer", "extra_buffer_lazy"):
        raise BadInput(
            "expected a mamba strategy: auto, no_buffer, extra_buffer, extra_buffer_lazy",
            repr(strategy)[:40],
            "check the flag",
        )
    if name == "no_buffer":
        return 3
    return 3 + (1 if disable_overlap_schedule or name == "extra_buffer_lazy" else 2)


def _default_strategy(version: str, no_overlap: bool) -> str:
    return "extra_buffer" if since(version, "0.5.14") and not no_overlap else "no_buffer"


class _Budget(Record):
    """What the recurrent state takes and what is left for the KV cache, in bytes."""

    kv: float
    slots: int | None = None
    scratch: float = 0.0


def _after_state(
    rest: float,
    per_slot: int,
    version: str,
    *,
    ratio: float,
    slots_each: int,
    draft_tokens: int,
    requests: int | None,
    explicit: int | None,
    no_radix: bool,
) -> _Budget:
    """The split between recurrent state and KV cache. Source: `handle_max_mamba_cache` of 0.5.11, 0.5.15.post1 and
    0.5.18.
    """
    speculative = draft_tokens > 0
    joint, padded = since(version, "0.5.13"), since(version, "0.5.18")
    pad = 1 if padded else 0
    scratch = 0.0
    if speculative and requests is None:
        raise BadInput(
            "expected max_running_requests with speculation", "none", "SGLang takes 48 when the flag isn't given"
        )
    if speculative and not joint:
        scratch = float(per_slot * (requests or 0) * draft_tokens)
        rest -= scratch
    if explicit is not None:
        slots = explicit
    elif no_radix and requests is not None:
        slots = requests
    else:
        budget = rest * ratio / (1 + ratio)
        if speculative and joint:
            slots = int((budget - per_slot * (1 + draft_tokens) * pad) // (per_slot * (1 + draft_tokens / slots_each)))
        else:
            slots = int((budget - per_slot * pad) // per_slot)
    if speculative and joint:
        running = min(requests or 0, slots if no_radix and explicit is None else slots // slots_each)
        scratch = float(per_slot * (running + pad) * draft_tokens)
        rest -= scratch
    if slots <= 0:
        raise BadInput(
            "expected memory for at least one recurrent state slot",
            f"{slots} slots",
            "raise mem_fraction_static or lower max_running_requests",
        )
    return _Budget(kv=rest - per_slot * (slots + pad), slots=slots, scratch=scratch)


#: Architectures whose MTP draft is found in the model's own folder, so that SGLang fills in
#: speculative_draft_model_path itself.
#: Only with that path set are draft layers budgeted. Source: `arg_groups/speculative_hook.py` of 0.5.14 to 0.5.23.
SELF_DRAFTING = frozenset(
    [
        "DeepseekV32ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV4ForCausalLM",
        "Glm4MoeForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GlmMoeDsaForCausalLM",
        "BailingMoeForCausalLM",
        "BailingMoeV2ForCausalLM",
        "BailingMoeV2_5ForCausalLM",
        "MistralLarge3ForCausalLM",
        "PixtralForConditionalGeneration",
        "HYV3ForCausalLM",
    ]
)


def draft_layers_budgeted(
    checkpoint: Checkpoint, sglang_version: str, draft_layers: int, draft_model_path: str | None = None
) -> int:
    """How many of the draft's layers SGLang charges to the pool's budget: none up to 0.5.13, and none later either
    unless a draft model path is given or the architecture fills it in. So NEXTN on Qwen3.5 without a path allocates
    its draft pool on top.

    Source: `_resolve_eagle_aux_hidden_state` (0.5.16), seen on an H200: 7,880,505 tokens where a charged draft would
    give 5.26 M.
    """
    named = draft_model_path is not None or checkpoint.architecture_name in SELF_DRAFTING
    return draft_layers if named and since(sglang_version, "0.5.14") else 0


def _cell(checkpoint: Checkpoint, kv: KvBytes, version: str, counted: int, swa_ratio: float) -> float:
    """What SGLang divides the budget by. Not always what a token takes: up to 0.5.16 a sparse-attention FP8 latent is
    budgeted at 576 bytes a layer and takes 656, and draft layers are often not budgeted at all (`counted` are).
    """
    layout = require_architecture(checkpoint)
    if kv.sliding_per_gpu:
        full, draft = layout.group("full_attention"), 0
        if full is None:
            return float(kv.per_gpu)
        if counted:
            draft = kv.groups["full_attention"] // len(full.layers) * counted
        return kv.groups["full_attention"] + draft + swa_ratio * kv.sliding_per_gpu
    base = kv.per_gpu
    group = layout.group("mla")
    if group is not None and group.index_head_dim and kv.dtype == "float8_e4m3fn" and not since(version, "0.5.18"):
        base = ((group.kv_lora_rank or 0) + (group.qk_rope_head_dim or 0)) * len(group.layers) + kv.groups.get(
            "indexer", 0
        )
    return float(int(base * (1 + counted / max(1, layout.kv_layers)))) if counted else float(base)


def predict_pools(
    checkpoint: Checkpoint,
    *,
    tp: int = 1,
    kv_cache_dtype: str = "auto",
    sglang_version: str = DEFAULT_SGLANG_VERSION,
    gpu_memory_mib: float | None = None,
    pre_load_gib: float | None = None,
    available_gib: float | None = None,
    weights_gib: float | None = None,
    mem_fraction_static: float | None = None,
    max_total_tokens: int | None = None,
    max_running_requests: int | None = None,
    page_size: int = 1,
    context_length: int | None = None,
    dp_attention: int = 1,
    pp: int = 1,
    speculative_algorithm: str | None = None,
    speculative_num_draft_tokens: int | None = None,
    draft_layers: int | None = None,
    speculative_draft_model_path: str | None = None,
    draft_weights_gib: float = 0.0,
    mamba_full_memory_ratio: float = 0.9,
    max_mamba_cache_size: int | None = None,
    mamba_strategy: str | None = None,
    mamba_ssm_dtype: str | None = None,
    disable_radix_cache: bool = False,
    disable_overlap_schedule: bool = False,
    swa_full_tokens_ratio: float = 0.8,
    disable_hybrid_swa_memory: bool = False,
    chunked_prefill_size: int | None = None,
    cuda_graph_max_bs: int | None = None,
    multimodal: bool | None = None,
    platform: str = "cuda",
    sm: int | None = None,
) -> PoolPrediction:
    """The pools of one GPU as this SGLang would make them.

    rest = available - pre * (1 - mem_fraction_static); recurrent state takes its share first; tokens = rest / cell,
    rounded down to pages, and at most max_total_tokens. `pre` is the free memory before weights, `available` the free
    memory after them (from 0.5.14 on with the draft's weights): the log's "Load weight begin" and last "Load weight
    end" lines. Without them, they are estimated from gpu_memory_mib and the weights' size, and a note says so.

    Args:
        checkpoint: the model.
        tp, dp_attention, pp: ranks.
        kv_cache_dtype: the flag's value.
        gpu_memory_mib: smallest total GPU memory of the host (MiB; on a CPU: of the host).
        pre_load_gib, available_gib: free memory before and after loading, GiB.
        weights_gib: weights on one GPU, GiB, when available_gib isn't known.
        mem_fraction_static and the other flags: as given to SGLang; None: SGLang's default.
        draft_layers: layers of the running draft; None: 1 when speculation with a draft is on and the model declares
            MTP layers.

    Returns:
        the prediction; tokens of the full pool as SGLang logs them in max_total_num_tokens.

    Raises:
        BadInput: nothing to compute from, or weights that leave no memory (as SGLang refuses to start).

    Source: SGLang 0.5.11 and 0.5.15.post1 `model_runner_kv_cache_mixin.py`, `pool_configurator.py`; 0.5.23
    `kv_cache_configurator.py`.
    Example: a tiny Qwen3.5-MoE on an H200, 0.5.16, f 0.3, 139.13 GiB before and 139.07 after: 5.75 M tokens (the
    server: 5,741,583).
    """
    layout = require_architecture(checkpoint)
    dtype, why = resolve_kv_cache_dtype(checkpoint, kv_cache_dtype, sglang_version, platform=platform, sm=sm)
    speculative, flag_requests = bool(speculative_algorithm), max_running_requests
    with_draft = speculative and str(speculative_algorithm).upper() not in ("NGRAM",)
    notes = [note] if (note := version_note(sglang_version)) else []
    if draft_layers is None:
        draft_layers = _running_draft_layers(layout) if with_draft else 0
    draft_tokens = (speculative_num_draft_tokens or 4) if speculative else 0
    if speculative and max_running_requests is None:
        max_running_requests = 48
        notes.append("speculation without --max-running-requests: SGLang takes 48")
    kv = kv_bytes_per_token(
        checkpoint,
        tp,
        "mxfp8" if kv_cache_dtype == "mxfp8" else dtype,
        sglang_version=sglang_version,
        dp_attention=dp_attention,
        draft_layers=draft_layers,
        disable_hybrid_swa_memory=disable_hybrid_swa_memory,
        platform=platform,
        sm=sm,
    )
    _positive(page_size, "page_size")
    for ratio, ratio_name in (
        (mamba_full_memory_ratio, "mamba_full_memory_ratio"),
        (swa_full_tokens_ratio, "swa_full_tokens_ratio"),
    ):
        if not (math.isfinite(ratio) and ratio > 0):
            raise BadInput(f"expected {ratio_name} above 0", repr(ratio)[:40], "check the flag")
    for count, count_name in (
        (max_running_requests, "max_running_requests"),
        (max_mamba_cache_size, "max_mamba_cache_size"),
        (speculative_num_draft_tokens, "speculative_num_draft_tokens"),
        (context_length, "context_length"),
    ):
        if count is not None:
            _positive(count, count_name)
    if _positive(pp, "pp") > 1:
        raise BadInput("expected pp 1: the pools of pipeline stages are not modelled", str(pp), "leave pp out")
    if dp_attention > 1:
        notes.append(
            f"tokens and requests are of one of {dp_attention} DP attention ranks; the box holds as many times more"
        )
    counted = draft_layers_budgeted(checkpoint, sglang_version, draft_layers, speculative_draft_model_path)
    if draft_layers and not counted:
        notes.append(f"SGLang {sglang_version} doesn't budget the draft's KV cache here: it comes on top of the pools")
    cell = _cell(checkpoint, kv, sglang_version, counted, swa_full_tokens_ratio)
    state = state_bytes_per_slot(checkpoint, tp, dp_attention=dp_attention, mamba_ssm_dtype=mamba_ssm_dtype)
    each = (
        slots_per_request(
            sglang_version,
            strategy=mamba_strategy,
            disable_radix_cache=disable_radix_cache,
            disable_overlap_schedule=disable_overlap_schedule,
        )
        if state
        else None
    )
    request_cap = None
    by_requests = bool(kv.sliding_per_gpu and layout.group("full_attention") and disable_radix_cache)
    if by_requests and flag_requests is not None and since(sglang_version, "0.5.14"):
        chunk = chunked_prefill_size
        if chunk is None and gpu_memory_mib is not None:
            chunk = chunk_and_graph_defaults(gpu_memory_mib, tp, sglang_version)[0]
        request_cap = _sliding_request_cap(
            layout, flag_requests // dp_attention, page_size, chunk, draft_tokens, disable_overlap_schedule
        )
        if since(sglang_version, "0.5.23"):
            notes.append("the sliding pool is sized by requests by 0.5.21's rule; 0.5.23's was not read in full")
    fraction, fraction_from = mem_fraction_static, "given"
    if fraction is None and gpu_memory_mib is not None:
        fraction = mem_fraction_static_default(
            checkpoint,
            gpu_memory_mib,
            tp=tp,
            pp=pp,
            sglang_version=sglang_version,
            chunked_prefill_size=chunked_prefill_size,
            cuda_graph_max_bs=cuda_graph_max_bs,
            speculative_algorithm=speculative_algorithm,
            dp_attention=dp_attention,
            max_running_requests=flag_requests,
            max_total_tokens=max_total_tokens,
            multimodal=multimodal,
            platform=platform,
        )
        fraction_from = f"SGLang {sglang_version}'s default for {gpu_memory_mib:.0f} MiB"
    pre, available = _free_memory(
        checkpoint,
        tp,
        gpu_memory_mib,
        pre_load_gib,
        available_gib,
        weights_gib,
        draft_weights_gib,
        sglang_version,
        notes,
    )
    requests = max_running_requests // dp_attention if max_running_requests is not None else None
    rest = slack = None
    budget: _Budget | None = None
    profiled: int | None = None
    if fraction is not None and pre is not None and available is not None:
        if not 0 < fraction < 1:
            raise BadInput("expected mem_fraction_static between 0 and 1", repr(fraction)[:40], "check the flag")
        slack = pre * (1 - fraction)
        rest = available - slack
        if since(sglang_version, "0.5.18") and (layout.multimodal if multimodal is None else multimodal):
            rest -= 100 / 1024
            notes.append("multimodal: 100 MiB kept for the vision cache (from 0.5.18)")
        if rest <= 0:
            raise BadInput(
                "expected memory left for the KV cache after the weights",
                f"{available:.2f} GiB free after loading, {slack:.2f} GiB kept for the rest",
                f"raise mem_fraction_static above {1 - available / pre:.3f}, or use more GPUs",
            )
        budget = _Budget(kv=rest * GIB)
        if state:
            budget = _after_state(
                rest * GIB,
                state.per_slot,
                sglang_version,
                ratio=mamba_full_memory_ratio,
                slots_each=each or 1,
                draft_tokens=draft_tokens,
                requests=requests,
                explicit=max_mamba_cache_size // dp_attention if max_mamba_cache_size is not None else None,
                no_radix=disable_radix_cache,
            )
        if cell <= 0:
            raise BadInput(
                "expected a model that keeps K and V", "only recurrent layers", "there is no KV pool to size"
            )
        if request_cap is not None:
            fixed = kv.sliding_per_gpu * request_cap
            full_cell = cell - swa_full_tokens_ratio * kv.sliding_per_gpu
            profiled = int((budget.kv - fixed) // full_cell) // page_size * page_size
        else:
            profiled = int(budget.kv // cell) // page_size * page_size
        if profiled <= 0:
            raise BadInput(
                "expected memory for at least one page of KV cache",
                f"{budget.kv / GIB:.3f} GiB left",
                "raise mem_fraction_static or lower the state pool",
            )
    tokens = _capped(profiled, max_total_tokens, page_size, notes)
    sizes = _pool_sizes(kv, layout, tokens, page_size, swa_full_tokens_ratio, request_cap)
    slots = budget.slots if budget else max_mamba_cache_size if state else None
    if state and slots is None and disable_radix_cache:
        slots = requests
    draft_gib = kv.draft_per_gpu * (tokens + page_size) / GIB
    context = context_length or checkpoint.context_length
    over = None
    if budget is not None and profiled == tokens:
        over = max(0.0, sizes["total"] + draft_gib - budget.kv / GIB)
        if over > 0.02 * budget.kv / GIB:
            notes.append(
                f"SGLang {sglang_version} budgets {cell:.0f} B per token where {kv.per_gpu + kv.draft_per_gpu} B are "
                f"allocated"
            )
        else:
            over = None
    running = _max_running(tokens, context, requests, slots, each)
    return PoolPrediction(
        sglang_version=sglang_version,
        kv_cache_dtype=dtype,
        kv_cache_dtype_why=why,
        tp=tp,
        mem_fraction_static=fraction,
        mem_fraction_from=fraction_from if fraction is not None else "not known",
        pre_load_gib=pre,
        available_gib=available,
        slack_gib=slack,
        rest_gib=rest,
        cell_bytes=cell,
        bytes_per_token=kv.per_gpu,
        max_total_num_tokens=tokens,
        profiled_tokens=profiled,
        swa_tokens=sizes["swa_tokens"],
        kv_gib=sizes["total"],
        k_gib=sizes["k"],
        v_gib=sizes["v"],
        swa_gib=sizes["swa"],
        draft_kv_gib=draft_gib,
        max_mamba_cache_size=slots,
        state_bytes_per_slot=state.per_slot if state else None,
        state_gib=state_pool_gib(state.per_slot, slots) if state and slots is not None else None,
        spec_scratch_gib=budget.scratch / GIB if budget and state else None,
        slots_per_request=each,
        max_running_requests=running,
        context_length=context,
        full_length_requests=tokens / context if context else None,
        overcommitted_gib=over,
        notes=tuple(notes),
    )


def _running_draft_layers(layout: Architecture) -> int:
    """Layers of an MTP draft: as declared, and one for hybrids, whose draft is one attention layer whatever is
    declared.
    """
    return 1 if layout.group("recurrent") else max(1, layout.draft_layers or 1)


def _free_memory(
    checkpoint: Checkpoint,
    tp: int,
    gpu_memory_mib: float | None,
    pre: float | None,
    available: float | None,
    weights: float | None,
    draft_weights: float,
    version: str,
    notes: list[str],
) -> tuple[float | None, float | None]:
    """Free memory before and after loading; estimates are named in the notes."""
    if pre is None and gpu_memory_mib is not None:
        pre = gpu_memory_mib / 1024 - CONTEXT_GIB_MEASURED
        notes.append(
            f"free memory before loading estimated: total less {CONTEXT_GIB_MEASURED} GiB of context (measured on "
            f"one H200)"
        )
    if available is None and pre is not None:
        if weights is None and checkpoint.weight_bytes is not None:
            weights = checkpoint.weight_bytes / tp / GIB
            notes.append(
                "weights on a GPU estimated: the checkpoint's bytes divided by tp (replicated parts and kernel "
                "layouts come on top)"
            )
        if weights is not None:
            available = pre - weights - (draft_weights if since(version, "0.5.14") else 0.0)
    for name, value in (("pre_load_gib", pre), ("available_gib", available)):
        if value is not None and not (math.isfinite(value) and (value > 0 or name == "available_gib")):
            raise BadInput(f"expected {name} in GiB", repr(value), "take it from the log")
    return pre, available


def _capped(profiled: int | None, cap: int | None, page_size: int, notes: list[str]) -> int:
    if cap is not None:
        _positive(cap, "max_total_tokens")
    if profiled is None:
        if cap is None:
            raise BadInput(
                "expected what the pool is made from: free memory before and after loading and mem_fraction_static, "
                "or gpu_memory_mib and the weights' size",
                "neither, and no max_total_tokens",
                "take them from the log's Load weight lines, or give the GPU's memory",
            )
        notes.append("only max_total_tokens is known: it is taken as reached, which a GPU too small would not allow")
        return cap // page_size * page_size
    return profiled if cap is None or cap >= profiled else cap // page_size * page_size


def _sliding_request_cap(
    layout: Architecture, requests: int, page_size: int, chunk: int | None, draft_tokens: int, no_overlap: bool
) -> int:
    """Tokens of a sliding pool that is sized by requests: each needs its window, an eviction interval of 128 and
    pages.

    Only without radix cache and with --max-running-requests, from 0.5.14 on. Source: `SWAChunkCapPoolConfigurator`
    (0.5.16).
    """
    group = layout.group("sliding_window")
    window = group.window if group else None
    if window is None or chunk is None:
        raise BadInput(
            "expected chunked_prefill_size and the model's window for a sliding pool sized by requests",
            f"chunk {chunk}, window {window}",
            "give chunked_prefill_size",
        )
    if draft_tokens:
        decode = draft_tokens + page_size if no_overlap else 2 * draft_tokens
    else:
        decode = page_size
    each = window + 128 * max(1, draft_tokens) + page_size + decode
    total = each * requests + (1 if no_overlap else 2) * chunk + page_size
    return -(-total // page_size) * page_size


def _pool_sizes(
    kv: KvBytes, layout: Architecture, tokens: int, page_size: int, ratio: float, request_cap: int | None
) -> dict[str, Any]:
    """GiB as the log prints them; a pool holds one page more than it reports."""
    held = tokens + page_size
    k = kv.k_per_gpu * held / GIB if kv.k_per_gpu is not None else None
    v = kv.v_per_gpu * held / GIB if kv.v_per_gpu is not None else None
    swa_tokens = swa = None
    total = kv.per_gpu * held / GIB
    if kv.sliding_per_gpu:
        all_sliding = layout.group("full_attention") is None
        swa_tokens = tokens if all_sliding else int(tokens * ratio) // page_size * page_size
        if request_cap is not None:
            swa_tokens = min(request_cap, tokens)
        swa = kv.sliding_per_gpu * (swa_tokens + page_size) / GIB
        total = swa if all_sliding else total + swa
    return {"k": k, "v": v, "swa_tokens": swa_tokens, "swa": swa, "total": total}


def _max_running(
    tokens: int, context: int | None, requests: int | None, slots: int | None, each: int | None
) -> int | None:
    """Requests that may run at once: the flag, half the tokens, the state slots (`_resolve_max_num_reqs`)."""
    if requests is None and context is None:
        return None
    limit = requests if requests is not None else max(min(int(tokens / (context or 1) * 512), 4096), 2048)
    limit = min(limit, tokens // 2)
    return min(limit, slots // each) if slots is not None and each else limit


def pools_by_dtype(
    checkpoint: Checkpoint, dtypes: tuple[str, ...] = ("auto", "bf16", "fp8_e4m3", "fp8_e5m2"), **inputs: Any
) -> dict[str, PoolPrediction]:
    """`predict_pools` for each KV cache dtype side by side."""
    return {dtype: predict_pools(checkpoint, kv_cache_dtype=dtype, **inputs) for dtype in dtypes}


def explain_pool(
    checkpoint: Checkpoint,
    tokens: int,
    k_gib: float | None = None,
    v_gib: float | None = None,
    *,
    kv_gib: float | None = None,
    tp: int = 1,
    sglang_version: str = DEFAULT_SGLANG_VERSION,
    tolerance: float = 0.01,
    **inputs: Any,
) -> PoolExplanation:
    """Which KV dtype, fraction and speculation explain a pool that a log reports.

    With the pool's size, dtype follows by division (bytes per token). With the memory inputs of `predict_pools` in
    `inputs`, each dtype is also predicted, with and without speculation, and the fraction that would give exactly
    this pool is solved for.

    Args:
        checkpoint: the model that was served.
        tokens: the log's #tokens or max_total_num_tokens.
        k_gib, v_gib: the log's K size and V size ("GB" there means GiB); kv_gib: their sum, or a latent pool's size.
        inputs: what `predict_pools` takes (gpu_memory_mib, pre_load_gib, available_gib or weights_gib, ...).

    Raises:
        BadInput, UnknownArchitecture.

    Example: 1.28 M tokens of Qwen3.5-397B, TP8 on 96 GB cards with 30.7 GiB of weights, 0.5.11: bf16 at the default
    fraction with NEXTN's reserve gives 1.28 M; without speculation 1.57 M, and FP8 twice as many.
    """
    _positive(tokens, "tokens")
    size = kv_gib if kv_gib is not None else (k_gib or 0.0) + (v_gib or 0.0) or None
    measured = size * GIB / tokens if size else None
    own = "float16" if checkpoint.torch_dtype == "float16" else "bfloat16"
    dtypes = (own, "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn_x2", "float32")
    fits = []
    for dtype in dtypes:
        kv = kv_bytes_per_token(
            checkpoint, tp, dtype, sglang_version=sglang_version, dp_attention=inputs.get("dp_attention", 1)
        )
        expected = kv.per_gpu
        if measured is not None:
            rounding = (0.005 * (1 if kv_gib is not None else 2)) * GIB / tokens
            if abs(measured - expected) <= tolerance * expected + rounding:
                fits.append(dtype)
    readings = list(_readings(checkpoint, tokens, tp, sglang_version, tolerance, dict(inputs)))
    matching = [r for r in readings if r.relative_error is not None and abs(r.relative_error) <= tolerance]
    families = {d.split("_")[0] for d in fits}
    decided = fits[0] if len(families) == 1 and fits else None
    if measured is not None:
        verdict = (
            f"{measured:,.0f} B per token and GPU: {' or '.join(fits)} (size decides the width; e4m3 and e5m2 are "
            f"equally wide)"
            if fits
            else f"{measured:,.0f} B per token and GPU fits no KV dtype of this model on {tp} ranks: another model, "
            f"tp, or a draft pool"
        )
    elif matching:
        best = min(matching, key=lambda r: abs(r.relative_error or 0))
        verdict = f"without the pool's size the dtype isn't certain; best match: {best.why}"
    else:
        verdict = "without the pool's size or matching memory inputs, the dtype can't be told"
    return PoolExplanation(
        tokens=tokens,
        bytes_per_token=measured,
        kv_cache_dtype=decided if decided != "float8_e4m3fn" or len(fits) == 1 else "float8",
        candidates=tuple(readings),
        verdict=verdict,
    )


def _readings(
    checkpoint: Checkpoint, tokens: int, tp: int, version: str, tolerance: float, inputs: dict[str, Any]
) -> list[PoolReading]:
    """Each dtype with and without speculation at the default (or given) fraction, and the fraction that solves for
    the pool.
    """
    readings = []
    asked = inputs.pop("speculative_algorithm", None)
    for dtype in ("bf16", "fp8_e4m3"):
        for algorithm in dict.fromkeys((asked, None, "EAGLE")):
            common = {
                **inputs,
                "tp": tp,
                "kv_cache_dtype": dtype,
                "sglang_version": version,
                "speculative_algorithm": algorithm,
            }
            label = f"{torch_name(dtype)}, {'with' if algorithm else 'without'} speculation"
            try:
                found = predict_pools(checkpoint, **common)
            except BadInput:
                continue
            if found.profiled_tokens is None:
                continue
            error = found.profiled_tokens / tokens - 1
            readings.append(
                PoolReading(
                    kv_cache_dtype=torch_name(dtype),
                    predicted_tokens=found.profiled_tokens,
                    mem_fraction_static=found.mem_fraction_static,
                    relative_error=error,
                    speculative=bool(algorithm),
                    why=f"{label}, mem_fraction_static {found.mem_fraction_static:.3f} ({found.mem_fraction_from}): "
                    f"{found.profiled_tokens:,} tokens, {error:+.1%}",
                )
            )
            solved = _solve_fraction(checkpoint, tokens, common)
            if solved is not None and abs(error) > tolerance:
                readings.append(
                    PoolReading(
                        kv_cache_dtype=torch_name(dtype),
                        predicted_tokens=tokens,
                        mem_fraction_static=solved,
                        speculative=bool(algorithm),
                        why=f"{label}, would need mem_fraction_static {solved:.3f}",
                    )
                )
    return readings


def _solve_fraction(checkpoint: Checkpoint, tokens: int, common: Mapping[str, Any]) -> float | None:
    """The mem_fraction_static that gives this many tokens, by bisection; None when none between 0 and 1 does."""
    low, high = 0.001, 0.999

    def predicted(fraction: float) -> int:
        try:
            return (
                predict_pools(
                    checkpoint, **{**common, "mem_fraction_static": fraction, "max_total_tokens": None}
                ).profiled_tokens
                or 0
            )
        except BadInput:
            return 0

    if predicted(high) < tokens:
        return None
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if predicted(middle) < tokens else (low, middle)
    return high
