"""Tiny hybrid Qwen3.5-MoE checkpoints: gated delta rule, full attention every 4th layer, experts, vision tower, MTP head.

Called by make_models.py. The geometry is the published models' in small; weights are one seeded stream of normal numbers.
Variants differ in what the checkpoint declares or stores, as NVIDIA ModelOpt writes it: `fp8kv` (hf_quant_config.json says
FP8 KV cache, every linear excluded), `fp8kv-scaled` (and scales, taken from the model's own keys and values on code),
`nvfp4` (the experts' weights in 4 bits: packed E2M1, an E4M3 scale for 16 of them, one float32 scale for a matrix).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: Seed and sizes. A change here is a new recipe.
HYBRID: dict[str, Any] = {
    "seed": 20261129,
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
}
ROPE = {
    "rope_type": "default",
    "rope_theta": 10_000_000,
    "partial_rotary_factor": 0.25,
    "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}
VISION = {
    "depth": 1,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_heads": 2,
    "out_hidden_size": 512,
    "num_position_embeddings": 256,
}
VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
#: E2M1: what four bits can say, without the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3_MAX = 448.0
BLOCK = 16


def layer_types(sizes: dict[str, Any]) -> list[str]:
    """Full attention in every `full_attention_interval`-th layer, the gated delta rule elsewhere."""
    every = sizes["full_attention_interval"]
    return ["full_attention" if (n + 1) % every == 0 else "linear_attention" for n in range(sizes["num_hidden_layers"])]


def mtp_tensors(sizes: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the MTP head: one full-attention layer with experts, after a projection of (embedding, hidden)."""
    hidden, head = sizes["hidden_size"], sizes["head_dim"]
    heads, kv = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    expert, shared = sizes["moe_intermediate_size"], sizes["shared_expert_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (hidden,),
        "mtp.norm.weight": (hidden,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (2 * heads * head, hidden),  # query and output gate
        "self_attn.k_proj": (kv * head, hidden),
        "self_attn.v_proj": (kv * head, hidden),
        "self_attn.o_proj": (hidden, heads * head),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "mlp.gate": (sizes["num_experts"], hidden),
        "mlp.shared_expert.gate_proj": (shared, hidden),
        "mlp.shared_expert.up_proj": (shared, hidden),
        "mlp.shared_expert.down_proj": (hidden, shared),
        "mlp.shared_expert_gate": (1, hidden),
    }
    for number in range(sizes["num_experts"]):
        layer[f"mlp.experts.{number}.gate_proj"] = (expert, hidden)
        layer[f"mlp.experts.{number}.up_proj"] = (expert, hidden)
        layer[f"mlp.experts.{number}.down_proj"] = (hidden, expert)
    return shapes | {f"mtp.layers.0.{name}.weight": shape for name, shape in layer.items()}


def config_of(tokenizer: Any, sizes: dict[str, Any] = HYBRID) -> Any:
    """The configuration, with the tokenizer's ids in it."""
    from transformers import Qwen3_5MoeConfig  # type: ignore[import-not-found, unused-ignore]

    ids = dict(zip(VISION_TOKENS, tokenizer.convert_tokens_to_ids(VISION_TOKENS), strict=True))
    text = {key: value for key, value in sizes.items() if key != "seed"}
    text |= {
        "layer_types": layer_types(sizes), "rope_parameters": ROPE, "mtp_num_hidden_layers": 1, "attn_output_gate": True,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "dtype": "bfloat16",
        "mamba_ssm_dtype": "float32", "tie_word_embeddings": False,
    }  # fmt: skip
    return Qwen3_5MoeConfig(
        text_config=text, vision_config={**VISION, "out_hidden_size": sizes["hidden_size"]},
        image_token_id=ids["<|image_pad|>"], video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"], vision_end_token_id=ids["<|vision_end|>"], tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, dtype="bfloat16",
    )  # fmt: skip


def seeded(shape: tuple[int, ...], stream: Any) -> Any:
    """Normal numbers whose products keep their size: a standard deviation of one over the root of the last dimension."""
    import torch

    return torch.randn(shape, generator=stream) / math.sqrt(shape[-1])


def fill(name: str, weight: Any, stream: Any) -> Any:
    """The seeded value of one tensor: matrices random; norms neutral; decay rates spread over their range."""
    import torch

    last = name.rsplit(".", 1)[-1]
    if last == "A_log":
        return torch.linspace(1.0, 16.0, weight.numel()).log().reshape(weight.shape)
    if last == "dt_bias":
        return torch.ones(weight.shape)
    if weight.ndim == 1:
        # Qwen3.5's norms multiply by one plus their weight; the gated norm of the delta rule and the vision tower's don't
        one = last == "weight" and ("linear_attn.norm" in name or "visual" in name)
        return torch.ones(weight.shape) if one else torch.zeros(weight.shape)
    return seeded(tuple(weight.shape), stream)


def make_hybrid(folder: Path, tokenizer_of: Callable[[int, list[str]], Any]) -> None:
    """The plain model in bfloat16, experts stored one by one as published checkpoints store them."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3_5MoeForConditionalGeneration  # type: ignore[import-not-found, unused-ignore]

    tokenizer = tokenizer_of(HYBRID["vocab_size"], VISION_TOKENS)
    config = config_of(tokenizer)
    with torch.device("meta"):
        skeleton = Qwen3_5MoeForConditionalGeneration(config)
    stream = torch.Generator().manual_seed(HYBRID["seed"])
    weights = {}
    for name, weight in sorted(skeleton.state_dict().items()):
        for stored, value in split_experts(name, fill(name, weight, stream)):
            weights[stored] = value.to(torch.bfloat16).contiguous()
    for name, shape in mtp_tensors(HYBRID).items():
        weights[name] = (torch.zeros(shape) if len(shape) == 1 else seeded(shape, stream)).to(torch.bfloat16)
    save_file(dict(sorted(weights.items())), folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = ["Qwen3_5MoeForConditionalGeneration"]
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_processor(folder)


def split_experts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A tensor under the names of published checkpoints: fused experts become one gate, up and down matrix each."""
    if name.endswith(".experts.gate_up_proj"):
        head = name.removesuffix("gate_up_proj")
        for number, both in enumerate(value):
            gate, up = both.chunk(2, dim=0)
            yield f"{head}{number}.gate_proj.weight", gate
            yield f"{head}{number}.up_proj.weight", up
    elif name.endswith(".experts.down_proj"):
        head = name.removesuffix("down_proj")
        for number, down in enumerate(value):
            yield f"{head}{number}.down_proj.weight", down
    else:
        yield name, value


def write_processor(folder: Path) -> None:
    """The image and video processors' settings, without which a multimodal server does not start."""
    common = {
        "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "do_rescale": True, "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "size": {"shortest_edge": 65536, "longest_edge": 262144},
    }  # fmt: skip
    image = {**common, "image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor"}
    video = {**common, "video_processor_type": "Qwen3VLVideoProcessor", "processor_class": "Qwen3VLProcessor"}
    for name, settings in (("preprocessor_config", image), ("video_preprocessor_config", video)):
        (folder / f"{name}.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def size(sizes: dict[str, Any]) -> tuple[int, int]:
    """Tensors and parameters of the plain model, from its sizes alone: what a made checkpoint is checked against."""
    hidden, head = sizes["hidden_size"], sizes["head_dim"]
    heads, kv = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    keys = sizes["linear_num_key_heads"] * sizes["linear_key_head_dim"]
    values = sizes["linear_num_value_heads"] * sizes["linear_value_head_dim"]
    v_heads, kernel = sizes["linear_num_value_heads"], sizes["linear_conv_kernel_dim"]
    # q with its gate, k, v, o, and two norms over a head
    full = 2 * heads * head * hidden + 2 * kv * head * hidden + heads * head * hidden + 2 * head
    # qkv, z, b and a, convolution, decay (A_log, dt_bias), gated norm, output
    linear = (2 * keys + values) * (hidden + kernel) + values * hidden + 2 * v_heads * (hidden + 1)
    linear += sizes["linear_value_head_dim"] + hidden * values
    experts = sizes["num_experts"] * (3 * sizes["moe_intermediate_size"] + 1) * hidden
    moe = experts + (3 * sizes["shared_expert_intermediate_size"] + 1) * hidden
    n_full = len(full_attention(sizes))
    n_linear = sizes["num_hidden_layers"] - n_full
    # tensors: 6 of full attention or 9 of the delta rule; experts, their gate, the shared one's three and its gate; two norms
    shared_tensors = 3 * sizes["num_experts"] + 1 + 4 + 2
    tensors = n_full * (6 + shared_tensors) + n_linear * (9 + shared_tensors) + 3  # embedding, norm, head
    count = n_full * full + n_linear * linear + sizes["num_hidden_layers"] * (moe + 2 * hidden)
    count += 2 * sizes["vocab_size"] * hidden + hidden
    mtp = mtp_tensors(sizes)
    vision = vision_shapes()
    return tensors + len(mtp) + len(vision), count + sum(map(math.prod, mtp.values())) + sum(map(math.prod, vision.values()))


def vision_shapes() -> dict[str, tuple[int, ...]]:
    """Shapes of the vision tower: patches of 3 x 2 x 16 x 16, blocks, and the merger of 2 x 2 patches."""
    hidden, inner, out = VISION["hidden_size"], VISION["intermediate_size"], VISION["out_hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (hidden, 3, 2, 16, 16), "patch_embed.proj.bias": (hidden,),
        "pos_embed.weight": (VISION["num_position_embeddings"], hidden),
        "merger.norm.weight": (hidden,), "merger.norm.bias": (hidden,),
        "merger.linear_fc1.weight": (4 * hidden, 4 * hidden), "merger.linear_fc1.bias": (4 * hidden,),
        "merger.linear_fc2.weight": (out, 4 * hidden), "merger.linear_fc2.bias": (out,),
    }  # fmt: skip
    for block in range(VISION["depth"]):
        for name, shape in {
            "norm1.weight": (hidden,), "norm1.bias": (hidden,), "norm2.weight": (hidden,), "norm2.bias": (hidden,),
            "attn.qkv.weight": (3 * hidden, hidden), "attn.qkv.bias": (3 * hidden,),
            "attn.proj.weight": (hidden, hidden), "attn.proj.bias": (hidden,),
            "mlp.linear_fc1.weight": (inner, hidden), "mlp.linear_fc1.bias": (inner,),
            "mlp.linear_fc2.weight": (hidden, inner), "mlp.linear_fc2.bias": (hidden,),
        }.items():  # fmt: skip
            shapes[f"blocks.{block}.{name}"] = shape
    return shapes


def nvfp4_change(sizes: dict[str, Any]) -> tuple[int, int]:
    """Matrices that become NVFP4, and by how much the count of stored numbers changes: half, plus a 16th, plus two."""
    hidden, layers = sizes["hidden_size"], sizes["num_hidden_layers"]
    matrices = layers * 3 * (sizes["num_experts"] + 1)
    each = layers * 3 * hidden
    numbers = each * (sizes["num_experts"] * sizes["moe_intermediate_size"] + sizes["shared_expert_intermediate_size"])
    return matrices, numbers // 2 + numbers // BLOCK + 2 * matrices - numbers


# --- variants ---------------------------------------------------------------------------------------------------------


def declare(folder: Path, quant_algo: str, exclude: list[str], kv: str | None = "FP8") -> None:
    """hf_quant_config.json as ModelOpt writes it."""
    said: dict[str, Any] = {"quant_algo": quant_algo, "kv_cache_quant_algo": kv, "exclude_modules": exclude}
    if quant_algo == "NVFP4":
        said["group_size"] = BLOCK
    text = json.dumps({"producer": {"name": "modelopt", "version": "0.39.0"}, "quantization": said}, indent=2)
    (folder / "hf_quant_config.json").write_text(text + "\n", encoding="utf-8")


def full_attention(sizes: dict[str, Any] = HYBRID) -> list[int]:
    """The layers that have a KV cache."""
    return [n for n, kind in enumerate(layer_types(sizes)) if kind == "full_attention"]


def calibrated_scales(folder: Path, text: str) -> dict[str, float]:
    """K and V scales of every full-attention layer: the largest magnitude on `text` over what E4M3 can say.

    The key is taken after its norm and before rotation (which keeps its length), the value as projected: what a calibration
    hook at the projection sees for V, and the cache for both up to the rotation.
    """
    import torch
    from transformers import AutoTokenizer, Qwen3_5MoeForConditionalGeneration  # type: ignore[import-not-found, unused-ignore]

    model = Qwen3_5MoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    largest: dict[str, float] = {}
    hooks = []
    for number in full_attention():
        attention = model.model.language_model.layers[number].self_attn
        for which, module in (("k", attention.k_norm), ("v", attention.v_proj)):
            key = f"model.language_model.layers.{number}.self_attn.{which}_proj.{which}_scale"

            def keep(_module: Any, _inputs: Any, output: Any, key: str = key) -> None:
                largest[key] = max(largest.get(key, 0.0), float(output.abs().max()))

            hooks.append(module.register_forward_hook(keep))
    with torch.no_grad():
        model(**tokenizer(text, return_tensors="pt"))
    for hook in hooks:
        hook.remove()
    return {key: value / E4M3_MAX for key, value in sorted(largest.items())}


def nvfp4(matrix: Any) -> dict[str, Any]:
    """One matrix in NVFP4: packed E2M1 (two in a byte, the even column low), E4M3 block scales, and the float32 scale.

    Value = E2M1 x block scale x matrix scale; the matrix scale puts the largest block scale at E4M3's end, so
    matrix scale = largest magnitude / (6 x 448). Source: NVIDIA ModelOpt's NVFP4 export as SGLang 0.5.16 reads it
    (layers/quantization/modelopt_quant.py). `input_scale` 1.0: activations were not calibrated.
    """
    import torch

    rows, columns = matrix.shape
    values = matrix.float().reshape(rows, columns // BLOCK, BLOCK)
    smallest = torch.finfo(torch.float32).tiny  # a matrix or block of zeros stays zeros
    whole = (values.abs().max() / (E2M1[-1] * E4M3_MAX)).clamp(min=smallest)
    block = (values.abs().amax(dim=-1) / E2M1[-1] / whole).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    step = (block.float() * whole).clamp(min=smallest).unsqueeze(-1)
    table = torch.tensor(E2M1)
    code = (values.abs() / step).unsqueeze(-1).sub(table).abs().argmin(dim=-1)
    code = (code | ((values < 0).long() << 3)).reshape(rows, columns // 2, 2).to(torch.uint8)
    return {
        "weight": (code[..., 0] | (code[..., 1] << 4)).contiguous(),
        "weight_scale": block.contiguous(),
        "weight_scale_2": whole.reshape(()).float(),
        "input_scale": torch.tensor(1.0),
    }


def from_nvfp4(stored: dict[str, Any]) -> Any:
    """The matrix that NVFP4 tensors stand for, in float32."""
    import torch

    packed = stored["weight"]
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).reshape(packed.shape[0], -1).long()
    signs = 1.0 - 2.0 * (codes >> 3)
    values = torch.tensor(E2M1)[codes & 7] * signs
    scales = stored["weight_scale"].float().repeat_interleave(BLOCK, dim=1) * stored["weight_scale_2"]
    return values * scales


def make_fp8kv(folder: Path, tokenizer_of: Callable[[int, list[str]], Any]) -> None:
    """Nothing quantized but the KV cache, which the checkpoint declares FP8: the origin's silent default."""
    make_hybrid(folder, tokenizer_of)
    declare(folder, "NVFP4", ["*"])


def make_fp8kv_scaled(folder: Path, tokenizer_of: Callable[[int, list[str]], Any], text: str) -> None:
    """The same with calibrated K and V scales under ModelOpt's names."""
    import torch
    from safetensors.torch import load_file, save_file

    make_hybrid(folder, tokenizer_of)
    scales = calibrated_scales(folder, text)
    weights = load_file(folder / "model.safetensors")
    weights |= {name: torch.tensor(value, dtype=torch.float32) for name, value in scales.items()}
    save_file(dict(sorted(weights.items())), folder / "model.safetensors", metadata={"format": "pt"})
    declare(folder, "NVFP4", ["*"])


def make_nvfp4(folder: Path, tokenizer_of: Callable[[int, list[str]], Any]) -> None:
    """Experts and shared experts of the text model in NVFP4; attention, gates, vision, head and MTP stay bfloat16; FP8 KV."""
    from safetensors.torch import load_file, save_file

    make_hybrid(folder, tokenizer_of)
    weights = load_file(folder / "model.safetensors")
    for name in [n for n in weights if is_expert(n)]:
        stem = name.removesuffix("weight")
        weights |= {stem + part: tensor for part, tensor in nvfp4(weights.pop(name)).items()}
    save_file(dict(sorted(weights.items())), folder / "model.safetensors", metadata={"format": "pt"})
    excluded = ["lm_head", "model.visual*", "mtp*", "model.language_model.embed_tokens"]
    for number in range(HYBRID["num_hidden_layers"]):
        head = f"model.language_model.layers.{number}"
        excluded += [f"{head}.linear_attn*", f"{head}.self_attn*", f"{head}.mlp.gate", f"{head}.mlp.shared_expert_gate"]
    declare(folder, "NVFP4", excluded)


def is_expert(name: str) -> bool:
    """Whether a tensor is the weight of an expert or shared expert of the text model."""
    return name.startswith("model.language_model.") and name.endswith("_proj.weight") and "expert" in name
