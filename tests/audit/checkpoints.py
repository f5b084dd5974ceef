"""Tiny checkpoint folders: config files and a safetensors file with scalar scale tensors, made in a temporary
folder."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 1024,
    "vocab_size": 8192,
    "max_position_embeddings": 8192,
}
#: As in H1.md: FP8 weights with every linear excluded, KV declared FP8.
FP8_KV = {
    "producer": {"name": "modelopt"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["*"]},
}


def write_checkpoint(
    folder: Path,
    config: dict[str, Any] = LLAMA,
    hf_quant_config: dict[str, Any] | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    **files: dict[str, Any],
) -> Path:
    """A folder as SGLang would read it: config.json, hf_quant_config.json and one shard with the scale tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if hf_quant_config is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(hf_quant_config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    values = {"model.embed_tokens.weight": 0.0}
    for layer in range(4):
        for name, value in (("k_proj.k_scale", k_scale), ("v_proj.v_scale", v_scale)):
            if value is not None:
                values[f"model.layers.{layer}.self_attn.{name}"] = value
    header: dict[str, Any] = {}
    data = b""
    for name, value in values.items():
        header[name] = {
            "dtype": "F32",
            "shape": [1] if "weight" in name else [],
            "data_offsets": [len(data), len(data) + 4],
        }
        data += struct.pack("<f", value)
    raw = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return folder
