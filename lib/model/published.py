"""Geometries of published checkpoints by model class: what a log's pool sizes may be held against when nothing else is at hand.

A log names the model's class and the bytes per token of its pool, not the layers. Of one class only a few checkpoints are
published; where every one that explains the sizes agrees about the element size, that is the KV dtype. This is arithmetic on
an assumption (that the model is one of these), and it is told as such; a checkpoint's own config.json is always better.

Source of each row: the checkpoint's config.json as published (num_hidden_layers, num_key_value_heads, head_dim, layer types).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

#: Element sizes that a pool may have, and the dtype that each one means.
ELEMENT_BYTES: tuple[tuple[int, str], ...] = ((2, "bfloat16"), (1, "float8_e4m3fn"))


class Geometry(NamedTuple):
    """One published checkpoint: attention layers x KV heads x head_dim of full and of sliding layers; MLA by its latent."""

    family: str
    name: str
    layers: int
    heads: int
    head_dim: int
    sliding_layers: int = 0
    sliding_heads: int = 0
    sliding_head_dim: int = 0
    latent: int = 0

    def elements(self, tp: int) -> tuple[int, int]:
        """Elements of K and V for one token on one GPU: in full layers, and in sliding ones."""
        if self.latent:
            return self.layers * self.latent, 0
        full = self.layers * max(1, self.heads // tp) * 2 * self.head_dim
        sliding = self.sliding_layers * max(1, self.sliding_heads // tp) * 2 * self.sliding_head_dim
        return full, sliding


def _plain(family: str, *rows: tuple[str, int, int, int]) -> Iterator[Geometry]:
    for name, layers, heads, head_dim in rows:
        yield Geometry(family, name, layers, heads, head_dim)


PUBLISHED: tuple[Geometry, ...] = (
    *_plain("Llama", ("Llama-3.2-1B", 16, 8, 64), ("Llama-3.2-3B", 28, 8, 128), ("Llama-3.1-8B", 32, 8, 128),
            ("Llama-3.1-70B", 80, 8, 128), ("Llama-3.1-405B", 126, 8, 128), ("Llama-2-7B", 32, 32, 128),
            ("Llama-2-13B", 40, 40, 128), ("TinyLlama-1.1B", 22, 4, 64), ("SmolLM2-135M", 30, 3, 64)),
    *_plain("Mistral", ("Mistral-7B", 32, 8, 128), ("Mistral-Nemo-12B", 40, 8, 128), ("Mistral-Small-22B", 56, 8, 128),
            ("Mistral-Small-24B", 40, 8, 128), ("Mistral-Large-123B", 88, 8, 128), ("Ministral-8B", 36, 8, 128)),
    *_plain("Mixtral", ("Mixtral-8x7B", 32, 8, 128), ("Mixtral-8x22B", 56, 8, 128)),
    *_plain("Qwen2", ("Qwen2.5-0.5B", 24, 2, 64), ("Qwen2.5-1.5B", 28, 2, 128), ("Qwen2.5-3B", 36, 2, 128),
            ("Qwen2.5-7B", 28, 4, 128), ("Qwen2.5-14B", 48, 8, 128), ("Qwen2.5-32B", 64, 8, 128),
            ("Qwen2.5-72B", 80, 8, 128)),
    *_plain("Qwen3", ("Qwen3-0.6B", 28, 8, 128), ("Qwen3-4B", 36, 8, 128), ("Qwen3-14B", 40, 8, 128),
            ("Qwen3-32B", 64, 8, 128)),
    *_plain("Qwen3Moe", ("Qwen3-30B-A3B", 48, 4, 128), ("Qwen3-235B-A22B", 94, 4, 128),
            ("Qwen3-Coder-480B-A35B", 62, 8, 128)),
    *_plain("Qwen3Next", ("Qwen3-Next-80B-A3B", 12, 2, 256)),
    *_plain("Qwen3_5", ("Qwen3.5-9B", 8, 4, 256), ("Qwen3.5-27B", 16, 4, 256)),
    *_plain("Qwen3_5Moe", ("Qwen3.5-35B-A3B", 10, 2, 256), ("Qwen3.5-122B-A10B", 12, 2, 256),
            ("Qwen3.5-397B-A17B", 15, 2, 256)),
    *_plain("Glm4Moe", ("GLM-4.5", 92, 8, 128), ("GLM-4.5-Air", 46, 8, 128)),
    *_plain("MiniMaxM2", ("MiniMax-M2", 62, 8, 128)),
    *_plain("Phi3", ("Phi-3-mini", 32, 32, 96), ("Phi-3-medium", 40, 10, 128)),
    *_plain("NemotronH", ("Nemotron-3-Nano-30B-A3B", 6, 2, 128), ("Nemotron-Nano-9B-v2", 4, 8, 128),
            ("Nemotron-Nano-12B-v2", 6, 8, 128)),
    Geometry("GptOss", "gpt-oss-20b", 12, 8, 64, 12, 8, 64),
    Geometry("GptOss", "gpt-oss-120b", 18, 8, 64, 18, 8, 64),
    Geometry("Gemma3", "gemma-3-4b", 5, 4, 256, 29, 4, 256),
    Geometry("Gemma3", "gemma-3-12b", 8, 8, 256, 40, 8, 256),
    Geometry("Gemma3", "gemma-3-27b", 10, 16, 128, 52, 16, 128),
    Geometry("Gemma4", "gemma-4-26b-a4b", 5, 2, 512, 25, 8, 256),
    Geometry("DeepseekV2", "DeepSeek-V2", 60, 128, 128, latent=576),
    Geometry("DeepseekV2", "DeepSeek-V2-Lite", 27, 16, 128, latent=576),
    Geometry("DeepseekV3", "DeepSeek-V3", 61, 128, 128, latent=576),
    Geometry("KimiK25", "Kimi-K2.5", 61, 64, 128, latent=576),
)  # fmt: skip


def family_of(model_class: str) -> str:
    """The class's name without what it does with the model: `Gemma4ForConditionalGeneration` is `Gemma4`."""
    return re.sub(r"(?:LMHeadModel|For(?:CausalLM|ConditionalGeneration))$", "", model_class)


def dtype_by_geometry(
    model_class: str,
    tp: int | None,
    *,
    per_token: tuple[float, float] | None = None,
    pools: tuple[float, float, int, int] | None = None,
) -> tuple[str, list[str]] | None:
    """The KV dtype with which published checkpoints of a class explain a pool, and their names; None if none or several.

    Args:
        model_class: as the log names it.
        tp: ranks that share the KV heads; None where that is not known: then only an MLA latent, which is not shared, counts.
        per_token: least and most bytes for a token of the full-attention pool on one GPU.
        pools: least and most bytes of the full and the sliding pool together, and the tokens of each.

    Example: MistralForCausalLM with 163,840 B per token at TP 1 is ("bfloat16", ["Mistral-Nemo-12B", "Mistral-Small-24B"]).
    """
    found: dict[str, list[str]] = {}
    for row in PUBLISHED:
        if row.family != family_of(model_class) or (tp is None and not row.latent):
            continue
        full, sliding = row.elements(tp or 1)
        for size, dtype in ELEMENT_BYTES:
            if pools is not None:
                low, high, full_tokens, sliding_tokens = pools
                fits = bool(sliding) and low <= size * (full * full_tokens + sliding * sliding_tokens) <= high
            else:
                fits = per_token is not None and per_token[0] <= size * full <= per_token[1]
            if fits:
                found.setdefault(dtype, []).append(row.name)
    return next(iter(found.items())) if len(found) == 1 else None
