"""Records of what a checkpoint dictates: layer groups, quantization, scale tensors; and the SGLang versions read.

These are the nouns that `checkpoint` (reads files), `architectures`, `quantization` and `memory` (pure) share.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field

from lib.errors import BadInput
from lib.records import Record

#: The releases whose source the rules of this folder were read from; between two of them the older one's rule holds.
VERSIONS_READ = (
    "0.5.11",
    "0.5.12.post1",
    "0.5.13.post1",
    "0.5.14",
    "0.5.15.post1",
    "0.5.16",
    "0.5.18",
    "0.5.19",
    "0.5.20",
    "0.5.21",
    "0.5.23",
)
DEFAULT_SGLANG_VERSION = "0.5.15.post1"

_VERSION = re.compile(r"v?(\d{1,6})\.(\d{1,6})\.(\d{1,6})(?:\.?(?:post|rc|dev)(\d{1,6}))?(?:[.+-][\w.+-]*)?", re.ASCII)


def version_key(version: str) -> tuple[int, int, int]:
    """The comparable part of an SGLang version: `0.5.15.post1` and `v0.5.15` both give (0, 5, 15).

    Raises:
        BadInput: the text is not a version.
    """
    match = _VERSION.fullmatch(str(version).strip())
    if not match:
        raise BadInput("expected an SGLang version such as 0.5.15.post1", repr(version)[:80], "give --sglang-version")
    return int(match[1]), int(match[2]), int(match[3])


def since(version: str, first: str) -> bool:
    """True when `version` is `first` or newer."""
    return version_key(version) >= version_key(first)


def version_note(version: str) -> str | None:
    """A sentence when no source of this version was read, else None."""
    key, oldest, newest = version_key(version), version_key(VERSIONS_READ[0]), version_key(VERSIONS_READ[-1])
    if key > newest:
        return f"SGLang {version} is newer than the newest source read ({VERSIONS_READ[-1]}); that one's rules are used"
    if key < oldest:
        return f"SGLang {version} is older than the oldest source read ({VERSIONS_READ[0]}); that one's rules are used"
    return None


class RecurrentState(Record):
    """Shape of the fixed state that one layer keeps per request slot, before it is divided over tensor-parallel
    ranks.

    `gdn`, `mamba2`, `lightning`: convolution window (intermediate_size + 2 * n_groups * state_size) x (conv_kernel -
    1), state num_heads x head_dim x state_size. `kda`: windows for q, k and v of num_heads * head_dim each.
    `short_conv`: a convolution window only. Source: SGLang `configs/mamba_utils.py` (`Mamba2StateShape`,
    `KimiLinearStateShape`).
    """

    kind: Literal["gdn", "mamba2", "kda", "lightning", "short_conv"]
    num_heads: int
    head_dim: int
    state_size: int
    n_groups: int = 0
    intermediate_size: int = 0
    conv_kernel: int = 1
    #: Some SGLang configurations read the state's dtype from config.json, others always use float32.
    dtype_from_config: bool = True


class LayerGroup(Record):
    """Layers that keep the same thing in memory.

    `full_attention` and `sliding_window` keep K and V of `kv_heads` x (`k_head_dim` + `v_head_dim`) per token, `mla`
    one latent of `kv_lora_rank` + `qk_rope_head_dim` per token on every rank, `recurrent` a state per request slot.
    """

    kind: Literal["full_attention", "sliding_window", "mla", "recurrent"]
    layers: tuple[int, ...]
    kv_heads: int | None = None
    k_head_dim: int | None = None
    v_head_dim: int | None = None
    head_dim_is: Literal["taken", "derived"] | None = None
    window: int | None = None
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    index_head_dim: int | None = Field(
        default=None, description="sparse-attention indexer key beside each token, if any"
    )
    index_layers: int | None = Field(default=None, description="layers of this group that keep an indexer key")
    index_copies: int = Field(default=1, description="1: key only; 2: key and value")
    state: RecurrentState | None = None


class Architecture(Record):
    """What the architecture's row says of this configuration."""

    name: str
    groups: tuple[LayerGroup, ...]
    num_hidden_layers: int
    nested: str | None = Field(default=None, description="the sub-configuration that holds the text model, if any")
    draft_layers: int | None = Field(default=None, description="MTP/NEXTN layers that the configuration declares")
    multimodal: bool = False
    vision_layers: int | None = None
    vision_layers_named: bool = Field(
        default=False, description="the tower says num_hidden_layers, which SGLang looks for"
    )
    vision_hidden_size: int | None = None
    hybrid_swa_since: str | None = Field(
        default=None, description="SGLang release from which sliding layers get a pool of their own; None: never"
    )
    exceptions: tuple[str, ...] = ()
    source: str

    def group(self, kind: str) -> LayerGroup | None:
        """The group of that kind, if the model has one."""
        return next((group for group in self.groups if group.kind == kind), None)

    @property
    def kv_layers(self) -> int:
        """Layers that keep something per token."""
        return sum(len(group.layers) for group in self.groups if group.kind != "recurrent")

    @property
    def recurrent_layers(self) -> int:
        """Layers that keep a fixed state per request slot."""
        return sum(len(group.layers) for group in self.groups if group.kind == "recurrent")


class Quantization(Record):
    """What the checkpoint's files declare about the precision of weights and KV cache, and where.

    `weights_method` is the name under which SGLang loads it; `kv_declared` is what any of the files says of the KV
    cache (what is *allocated* depends on version and flag: `quantization.resolve_kv_cache_dtype`).
    """

    weights_method: str | None
    weights_algo: str | None = None
    weights_bits: float | None = None
    group_size: int | None = None
    producer: str | None = None
    excluded_modules: int | None = None
    quantized_layers: dict[str, int] = {}
    kv_declared: str | None = Field(
        default=None, description="fp8 | nvfp4 | mxfp8 | int8 | other | None (nothing declared)"
    )
    kv_declared_in: tuple[str, ...] = ()
    kv_scheme: Any = None
    source: str | None = Field(default=None, description="the file and key that SGLang takes first")
    conflicts: tuple[str, ...] = ()


class ScaleTensors(Record):
    """The `*k_scale` / `*v_scale` tensors of a checkpoint: which there are, and their values where they are scalars."""

    k_count: int = 0
    v_count: int = 0
    name_form: str | None = Field(default=None, description="one name of each form, layer number replaced by N")
    k_values: tuple[float, ...] = ()
    v_values: tuple[float, ...] = ()
    unread: tuple[str, ...] = Field(default=(), description="names whose values could not be read, with the reason")
    names_sample: tuple[str, ...] = ()

    @property
    def present(self) -> bool:
        """True when there is at least one."""
        return self.k_count + self.v_count > 0

    @property
    def all_one(self) -> bool | None:
        """True when every value is exactly 1.0; None when there is no value to judge."""
        values = self.k_values + self.v_values
        if not values or self.unread:
            return None if not any(value != 1.0 for value in values) else False
        return all(value == 1.0 for value in values)


class Checkpoint(Record):
    """A model checkpoint as its small files and safetensors headers describe it (weights are never read)."""

    path: str | None = None
    config: dict[str, Any]
    hf_quant_config: dict[str, Any] | None = None
    architecture_name: str
    architecture: Architecture | None
    architecture_error: str | None = None
    torch_dtype: str | None
    quantization: Quantization
    scales: ScaleTensors | None = Field(default=None, description="None: no tensor list was available")
    vocab_size: int | None = None
    context_length: int | None = None
    rope: dict[str, Any] | None = None
    generation_config: dict[str, Any] | None = None
    chat_template: str | None = Field(
        default=None, description="file (and key) that holds one; None: no chat template found"
    )
    tokenizer_files: tuple[str, ...] = ()
    shards: int | None = None
    tensors: int | None = None
    weight_bytes: int | None = None
    parameters_by_dtype: dict[str, int] = {}
    draft_tensors: int | None = Field(default=None, description="tensors of MTP/NEXTN layers found in the headers")
    findings: tuple[str, ...] = ()
