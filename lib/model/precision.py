"""What a KV cache format does to attention, in numbers: round trip, where its loss comes from, error of one attention output.

Pure arithmetic in torch (imported only where it computes, CPU or GPU); float64 is the reference. Keys, values and
queries come in as tensors; nothing is read, timed or written here (`precision_job` does that).

Model of one decode step, per head: logits l = q K^T / sqrt(head_dim), weights exp(l - max), output = weights V / sum.
An arm is a *format* (how K and V are stored) and a *path* (what else the kernel casts):

* `storage`: only K and V are rounded; queries and softmax weights stay exact. What the cache itself costs.
* `triton`: also the query is cast to the cache's dtype, and the softmax weights exp(l - running max of the split) before
  they meet V, while their sum is taken before the cast; block-wise running maximum, `num_kv_splits` splits.
* `triton_p_only`: the same without the cast of the query (decode before 0.5.12.post1).
* `lifted`: as `triton`, but the weights are multiplied by 2^8 before the cast and divided after it.

Source: SGLang 0.5.15 `srt/layers/attention/triton_ops/decode_attention.py` (`_fwd_grouped_kernel_stage1`: `q.to(K dtype)`,
`p.to(v.dtype)`, blocks of 32 keys, splits rounded up to 32), `srt/layers/quantization/kvfp4_tensor.py` (block 16, power
of two scales; two-level NVFP4 scales); the lift is FlashAttention-3's for FP8 (`hopper/softmax.h`, Max_offset 8).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lib.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor

#: Keys of one block of the kernel, and the number of splits it makes of the context.
BLOCK_KEYS = 32
NUM_KV_SPLITS = 8


@dataclass(frozen=True)
class Format:
    """One way of storing K and V.

    `maximum` is the largest finite value, `min_normal` the smallest with the full mantissa, `min_subnormal` the step
    below it (for `int8` and FP4 in units of their scale). `kind`: how values are rounded.
    """

    name: str
    kind: str  # float, int, block
    maximum: float
    min_normal: float
    min_subnormal: float
    torch_dtype: str = ""
    bits: float = 16
    block: int = 0
    source: str = ""


#: Every format by name; SGLang's spelling where it has one. Bits include the scales of a block.
FORMATS: dict[str, Format] = {
    f.name: f
    for f in [
        Format("bf16", "float", 3.3895313892515355e38, 2.0**-126, 2.0**-133, "bfloat16", 16),
        Format("fp8_e4m3", "float", 448.0, 2.0**-6, 2.0**-9, "float8_e4m3fn", 8, source="OCP 8-bit floating point, E4M3"),
        Format("fp8_e5m2", "float", 57344.0, 2.0**-14, 2.0**-16, "float8_e5m2", 8, source="OCP 8-bit floating point, E5M2"),
        Format("int8", "int", 127.0, 1.0, 1.0, "", 8, source="symmetric, one scale a tensor; SGLang has no int8 cache"),
        Format("nvfp4", "block", 6.0, 1.0, 0.5, "", 4.5, 16, "E2M1, E4M3 scale a block of 16, one float scale a tensor"),
        Format("fp4_mx_block16", "block", 6.0, 1.0, 0.5, "", 4.5, 16, "E2M1, power-of-two scale a block of 16"),
    ]
}  # fmt: skip

#: What a kernel casts beside the stored K and V: (query, weights, power of two the weights are lifted by), None for no cast.
PATHS: dict[str, tuple[bool, bool, int]] = {
    "storage": (False, False, 0),
    "triton": (True, True, 0),
    "triton_p_only": (False, True, 0),
    "lifted": (True, True, 8),
}
#: Formats whose own dtype a kernel can cast the query and the weights to.
CAST_FORMATS = ("bf16", "fp8_e4m3", "fp8_e5m2")


def known_format(name: str) -> Format:
    """The format of this name.

    Raises:
        BadInput: there is none; the known ones are named.
    """
    if name not in FORMATS:
        raise BadInput("a KV cache format: " + ", ".join(FORMATS), name, "name one of these")
    return FORMATS[name]


def calibrated_scale(x: Tensor, name: str) -> float:
    """The one scale of a tensor with which its largest value just fits the format: max |x| / maximum.

    Example: a tensor with max |x| = 896 has scale 2.0 in `fp8_e4m3` (maximum 448). `bf16` has no scale: 1.0.
    """
    if name == "bf16":
        return 1.0
    largest = float(x.abs().max())
    return largest / known_format(name).maximum if largest > 0 else 1.0


def round_trip(x: Tensor, name: str, scale: float = 1.0) -> Tensor:
    """What comes back when a tensor is stored: divide by the scale, round to the format, multiply by the scale.

    Args:
        x: any shape, float; the last axis is the one that blocks of FP4 run along and must divide by 16 for them.
        name: key of `FORMATS`.
        scale: per-tensor scale (`k_scale`, `v_scale`); ignored by the block formats, which make their own.

    Returns:
        float32, same shape. Values beyond the format's maximum become what this torch's own cast makes of them
        (`overflow_of`), as SGLang stores them by a plain cast.

    Example: 0.3 in `fp8_e4m3` comes back as 0.3125, in `fp8_e5m2` as 0.3125, in `bf16` as 0.30078125.
    """
    import torch

    fmt = known_format(name)
    if fmt.kind == "float":
        stored = (x.float() / scale if scale != 1.0 else x).to(getattr(torch, fmt.torch_dtype)).float()
        return stored * scale if scale != 1.0 else stored
    if fmt.kind == "int":
        return torch.round(x.float() / scale).clamp(-127, 127) * scale
    return _block_round_trip(x.float(), fmt)


def _block_round_trip(x: Tensor, fmt: Format) -> Tensor:
    import torch

    if x.shape[-1] % fmt.block:
        raise BadInput(f"a last axis that divides by {fmt.block}", f"{x.shape[-1]}", "use another head_dim or format")
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // fmt.block, fmt.block)
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    if fmt.name == "nvfp4":
        whole = x.abs().max().clamp(min=1e-30) / (fmt.maximum * 448.0)
        scale = (largest / fmt.maximum / whole).to(torch.float8_e4m3fn).float().clamp(min=2.0**-9) * whole
    else:
        scale = torch.exp2(torch.ceil(torch.log2((largest / fmt.maximum).clamp(min=1e-10))))
    return (_round_e2m1(blocks / scale) * scale).reshape(x.shape)


def _round_e2m1(y: Tensor) -> Tensor:
    """Nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with the sign; ties to the even mantissa; saturates at 6."""
    import torch

    a = y.abs()
    low, middle, high = torch.round(a * 2) / 2, torch.round(a), torch.round(a / 2) * 2
    return torch.where(a < 2, low, torch.where(a < 4, middle, high)).clamp(max=6.0) * torch.sign(y)


def overflow_of(name: str, device: str = "cpu") -> str:
    """What this torch's cast makes of a value beyond a float format's maximum: `saturates`, `nan` or `inf`.

    Depends on the version and the device, so it is asked, not assumed.
    """
    import torch

    fmt = known_format(name)
    if fmt.kind != "float" or fmt.name == "bf16":
        return "saturates" if fmt.kind != "float" else "inf"
    back = torch.tensor([fmt.maximum * 4], device=device).to(getattr(torch, fmt.torch_dtype)).float().item()
    return "nan" if math.isnan(back) else "inf" if math.isinf(back) else "saturates"


def rounding_losses(x: Tensor, name: str, scale: float = 1.0) -> dict[str, Any]:
    """Where a float format loses: share of the elements beyond its range, below its normal range, and the plain rest.

    Each element is in one class, by its scaled size a = |x| / scale: `clipped` (a > maximum), `flushed` (a rounds to 0),
    `subnormal` (a < min_normal, not flushed) and `mantissa` (all others). The squared error (x - stored)^2 of each class
    is its share of the whole; an element that comes back as NaN or infinite counts with its size as error.

    Returns:
        `relative_rms_error` (rms of the error over rms of x), `largest` (max |x|), `largest_scaled`, and for each class
        `<class>_frac` of elements and `<class>_error_frac` of the squared error (None where there is no error at all).

    Example: N(0, 1) in `fp8_e4m3` at scale 1: nothing clipped, 1.6% subnormal, relative rms error 2.6%.
    """
    import torch

    fmt = known_format(name)
    if fmt.kind != "float":
        raise BadInput("a float format", name, "losses by class are defined for bf16, fp8_e4m3 and fp8_e5m2")
    flat = x.flatten().float()
    size = flat.abs() / scale
    stored = round_trip(flat, name, scale)
    error = torch.where(torch.isfinite(stored), stored - flat, flat).double() ** 2
    clipped = size > fmt.maximum
    flushed = (size > 0) & (size <= fmt.min_subnormal / 2)
    subnormal = (size < fmt.min_normal) & (size > fmt.min_subnormal / 2)
    classes = {
        "clipped": clipped,
        "flushed": flushed,
        "subnormal": subnormal,
        "mantissa": ~(clipped | flushed | subnormal),
    }
    total = float(error.sum())
    out: dict[str, Any] = {
        "elements": flat.numel(),
        "largest": float(flat.abs().max()),
        "largest_scaled": float(size.max()),
        "relative_rms_error": math.sqrt(total / max(float((flat.double() ** 2).sum()), 1e-300)),
    }
    for key, mask in classes.items():
        out[f"{key}_frac"] = float(mask.double().mean())
        out[f"{key}_error_frac"] = float(error[mask].sum()) / total if total > 0 else None
    return out


def exact_output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One attention output in float64: softmax(q k^T / sqrt(head_dim)) v.

    Args:
        q: [heads, queries, head_dim]; k, v: [heads, keys, head_dim].

    Returns:
        float64 [heads, queries, head_dim].
    """
    import torch

    logits = q.double() @ k.double().transpose(1, 2) / math.sqrt(q.shape[-1])
    return torch.softmax(logits, dim=-1) @ v.double()


def attention_output(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    name: str,
    path: str = "storage",
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    num_kv_splits: int = NUM_KV_SPLITS,
) -> tuple[Tensor, Tensor]:
    """The same output as a kernel computes it from a cache in this format, and the softmax mass that its casts dropped.

    float32 sums as in the kernels; the block-wise running maximum restarts in each split.

    Args:
        q: [heads, queries, head_dim]; k, v: [heads, keys, head_dim].
        name: key of `FORMATS`; path: key of `PATHS` (only `storage` for int8 and FP4: their kernels dequantize first).
        k_scale, v_scale: per-tensor scales of K and V; the kernel folds K's into the logits and V's into the output.

    Returns:
        float32 [heads, queries, head_dim], and [heads, queries]: share (0..1) of the softmax mass whose weight was cast to 0.

    Raises:
        BadInput: a path that this format cannot take.
    """
    import torch

    if path not in PATHS:
        raise BadInput("a path: " + ", ".join(PATHS), path, "name one of these")
    cast_q, cast_p, lift = PATHS[path]
    fmt = known_format(name)
    if (cast_q or cast_p) and name not in CAST_FORMATS:
        raise BadInput(f"path storage for {name}", path, "only bf16 and FP8 kernels cast the query and the weights")
    dtype = getattr(torch, fmt.torch_dtype) if fmt.torch_dtype else None
    heads, keys = k.shape[0], k.shape[1]
    query = q.float()
    if cast_q:
        query = query.to(dtype).float()
    stored_k = round_trip(k, name, k_scale)
    logits = _products(query, stored_k) / math.sqrt(q.shape[-1])
    logits = _blocks(logits, num_kv_splits)  # [heads, queries, splits, blocks, BLOCK_KEYS]
    running = logits.amax(dim=-1).cummax(dim=-1).values if cast_p else logits.amax(dim=(3, 4), keepdim=True)[..., 0]
    weights = torch.exp(logits - running.unsqueeze(-1))
    final = running.amax(dim=(2, 3), keepdim=True)
    outer = torch.exp(running - final).unsqueeze(-1)
    total = (weights * outer).sum(dim=(2, 3, 4))
    if cast_p:
        cast = (weights * 2.0**lift).to(dtype).float() * 2.0**-lift
        dropped = (weights * outer * (cast == 0)).sum(dim=(2, 3, 4)) / total
        weights = cast
    else:
        dropped = torch.zeros_like(total)
    flat = (weights * outer).reshape(heads, q.shape[1], -1)[..., :keys]
    return _weighted(flat, round_trip(v, name, v_scale)) / total.unsqueeze(-1), dropped


def _products(q: Tensor, k: Tensor) -> Tensor:
    """q k^T; for one query a head as a product and a sum, which a compiler fuses with the rounding of k."""
    if q.shape[1] == 1 and k.is_cuda:
        return (q * k).sum(dim=-1).unsqueeze(1)
    return q @ k.transpose(1, 2)


def _weighted(weights: Tensor, v: Tensor) -> Tensor:
    if weights.shape[1] == 1 and v.is_cuda:
        return (weights[:, 0].unsqueeze(-1) * v).sum(dim=1).unsqueeze(1)
    return weights @ v


def _blocks(logits: Tensor, splits: int) -> Tensor:
    """Logits as [heads, queries, splits, blocks, BLOCK_KEYS], padded with -inf at the end.

    A split is as long as the kernel makes it: the context over the splits, rounded up to whole blocks.
    """
    import torch

    heads, queries, keys = logits.shape
    per_split = math.ceil(math.ceil(keys / splits) / BLOCK_KEYS) * BLOCK_KEYS
    used = math.ceil(keys / per_split)
    padded = torch.nn.functional.pad(logits, (0, used * per_split - keys), value=-math.inf)
    return padded.reshape(heads, queries, used, per_split // BLOCK_KEYS, BLOCK_KEYS)


def relative_errors(output: Tensor, exact: Tensor) -> Tensor:
    """|output - exact| / |exact| over head_dim, per head and query: [heads, queries], float64."""
    return (output.double() - exact).norm(dim=-1) / exact.norm(dim=-1)


#: Synthetic keys and values: what each kind stands for.
KINDS: dict[str, str] = {
    "gaussian": "K and V N(0, 1): values of zero mean, so the output shrinks with the context as its error does",
    "gaussian_mean": "K N(0, 1), V a vector shared by all keys plus N(0, 1): the output keeps its size",
    "student_t3": "Student's t with 3 degrees of freedom, unit variance: heavy tails everywhere",
    "outlier_channels": "N(0, 1) with 2 of 128 channels of K 20 times as large, as trained models have them",
}


def synthetic(
    kind: str, heads: int, queries: int, keys: int, head_dim: int, logit_std: float, seed: int, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """Seeded q [heads, queries, head_dim], k, v [heads, keys, head_dim] in bf16, with logits of the asked spread.

    Args:
        kind: key of `KINDS`.
        logit_std: standard deviation of q k^T / sqrt(head_dim) over the keys, for each query.
    """
    import torch

    if kind not in KINDS:
        raise BadInput("a kind of data: " + ", ".join(KINDS), kind, "name one of these")
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def draw() -> Tensor:
        x = normal(heads, keys, head_dim)
        if kind == "student_t3":  # z / sqrt(chi2_3 / 3) has variance 3
            chi2 = sum(normal(heads, keys, head_dim).square_() for _ in range(3))
            x = x / (chi2 / 3).sqrt_() / math.sqrt(3)
        return x

    k, v = draw(), draw()
    if kind == "outlier_channels":
        k[..., : max(1, head_dim // 64)] *= 20.0
    if kind == "gaussian_mean":
        v += normal(heads, 1, head_dim)
    k, v = k.bfloat16(), v.bfloat16()
    q = normal(heads, queries, head_dim)
    logits = q @ k.float().transpose(1, 2) / math.sqrt(head_dim)
    return (q * (logit_std / logits.std(dim=-1, keepdim=True))).bfloat16(), k, v
