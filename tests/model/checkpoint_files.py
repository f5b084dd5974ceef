"""Configurations and safetensors files that the tests of lib/model share."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "torch_dtype": "bfloat16",
}
#: The tiny hybrid of the recorded H200 servers (its geometry follows from their logs: tests/data/memory/README.md).
TINY_HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {
        "num_hidden_layers": 8,
        "full_attention_interval": 4,
        "hidden_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 32768,
        "mtp_num_hidden_layers": 1,
        "vocab_size": 8192,
        "dtype": "bfloat16",
    },
    "vision_config": {"depth": 2, "hidden_size": 64},
}
TINY_LLAMA = SMOLLM2 | {
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 8192,
}
#: Qwen3.5-397B-A17B-NVFP4 by its model card: 60 layers of which 15 are full attention, 2 KV heads of 256, 64 value
#: and 16 key heads.
ORIGIN: dict[str, Any] = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {
        "num_hidden_layers": 60,
        "full_attention_interval": 4,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_value_heads": 64,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
        "vocab_size": 248320,
        "dtype": "bfloat16",
    },
    "vision_config": {"depth": 27, "hidden_size": 1152},
    "quantization_config": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
        "ignore": ["lm_head"],
    },
}
HF_FP8_KV = {
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["*"]},
}
WIDTH = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "U8": 1, "F64": 8}


def safetensors_bytes(tensors: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    """A safetensors file of (dtype, shape, data)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def zeros(dtype: str, shape: list[int]) -> tuple[str, list[int], bytes]:
    """A tensor of zeros."""
    return dtype, shape, bytes(WIDTH[dtype] * math.prod(shape))


def bf16(value: float) -> bytes:
    """A bfloat16 scalar (truncated)."""
    return struct.pack("<f", value)[2:]


def write_checkpoint(
    folder: Path, config: dict[str, Any], shards: dict[str, bytes] | None = None, **files: Any
) -> Path:
    """A checkpoint folder: config.json, shards by name, further JSON files by name with '.' written as '__'."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name, raw in (shards or {}).items():
        (folder / name).write_bytes(raw)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(json.dumps(content))
    return folder
