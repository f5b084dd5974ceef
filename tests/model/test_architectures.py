"""lib.model.architectures: a table of layouts with sources; what isn't in it is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from lib.errors import BadInput, UnknownArchitecture
from lib.model.architectures import LEFT_OUT, TABLE, architecture, text_config
from lib.model.checkpoint import checkpoint_from_configs
from lib.model.memory import kv_bytes_per_token, predict_pools, state_bytes_per_slot
from tests.model.checkpoint_files import ORIGIN, SMOLLM2

#: One configuration that has every field any row may ask for; each row must read it and give at least one layer.
RICH: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "vocab_size": 100,
    "torch_dtype": "bfloat16",
    "layer_types": ["full_attention"] * 4,
    "sliding_window": 128,
    "hybrid_layer_pattern": [0, 1, 1, 0],
    "hybrid_override_pattern": "M*E-",
    "attention_chunk_size": 1024,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_value_head_dim": 16,
    "linear_key_head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_d_ssm": 128,
    "conv_L_cache": 3,
    "layer_group_size": 2,
    "linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3], "num_heads": 4, "head_dim": 16},
    "sparse_attention_config": {"sparse_attention_freq": [0, 1, 1, 1], "sparse_index_dim": 16},
    "block_configs": [{"attention": {"no_op": False, "n_heads_in_group": 2}}],
    "efficient_attention_config": {"jet": {"num_heads": 4, "head_dim": 16, "expand_v": 2, "conv_size": 4}},
}


@pytest.mark.parametrize("name", sorted(TABLE))
def test_every_row_has_a_source_and_reads(name: str) -> None:
    """A new row is tested on arrival: it names its source and gives layers with a positive size."""
    types = ["attn", "jet", "swa", "jet"] if name.startswith("Jet") else RICH["layer_types"]
    found = architecture({"architectures": [name]} | RICH | {"layer_types": types})
    assert "SGLang" in TABLE[name].source
    assert found.source == TABLE[name].source
    assert found.kv_layers + found.recurrent_layers > 0
    checkpoint = checkpoint_from_configs({"architectures": [name]} | RICH | {"layer_types": types})
    assert kv_bytes_per_token(checkpoint, 2, "bf16").per_gpu > 0


@pytest.mark.parametrize("name", sorted(TABLE))
def test_every_row_reads_a_nested_configuration(name: str) -> None:
    """The same fields under text_config give the same layout."""
    types = ["attn", "jet", "swa", "jet"] if name.startswith("Jet") else RICH["layer_types"]
    flat = {"architectures": [name]} | RICH | {"layer_types": types}
    nested = {"architectures": [name], "text_config": RICH | {"layer_types": types}}
    assert architecture(nested).groups == architecture(flat).groups
    assert architecture(nested).nested == "text_config"


@pytest.mark.parametrize(
    "name", ["DeepseekV9ForCausalLM", "Qwen3_6ForConditionalGeneration", "llamaforcausallm", "", "X" * 5000]
)
def test_unknown_architectures_are_refused_by_name(name: str) -> None:
    """The message names it and what a row needs, and nothing is computed, however similar the name is."""
    config = SMOLLM2 | {"architectures": [name]}
    if not name:
        with pytest.raises(BadInput, match="architectures"):
            architecture(config)
        return
    with pytest.raises(UnknownArchitecture, match=name[:50]) as caught:
        architecture(config)
    assert "add a row to lib/model/architectures.py" in str(caught.value)
    assert len(str(caught.value)) < 700
    checkpoint = checkpoint_from_configs(config)
    assert checkpoint.architecture is None
    for compute in (kv_bytes_per_token, state_bytes_per_slot, predict_pools):
        with pytest.raises(UnknownArchitecture, match=name[:50]):
            compute(checkpoint)  # type: ignore[operator]


@pytest.mark.parametrize("name", sorted(LEFT_OUT))
def test_what_is_left_out_says_why(name: str) -> None:
    """Architectures that were read but have no simple formula are refused with the reason."""
    assert name not in TABLE
    with pytest.raises(UnknownArchitecture, match=name) as caught:
        architecture(RICH | {"architectures": [name]})
    assert LEFT_OUT[name][:40] in str(caught.value)


def test_head_dim_taken_or_derived() -> None:
    """head_dim comes from the file, or from hidden_size / heads where the file says nothing; the group says which."""
    taken = architecture(SMOLLM2 | {"head_dim": 80}).groups[0]
    derived = architecture({k: v for k, v in SMOLLM2.items() if k != "head_dim"}).groups[0]
    assert (taken.k_head_dim, taken.head_dim_is) == (80, "taken")
    assert (derived.k_head_dim, derived.head_dim_is) == (64, "derived")  # 576 / 9
    null = architecture(SMOLLM2 | {"head_dim": None}).groups[0]
    assert (null.k_head_dim, null.head_dim_is) == (64, "derived")


def test_nested_priority() -> None:
    """thinker_config comes before text_config, as SGLang takes them; a text-only model is not nested."""
    assert text_config({"thinker_config": {"text_config": {"num_hidden_layers": 3}}})[1] == "thinker_config.text_config"
    assert text_config(SMOLLM2)[1] is None
    assert text_config({"text_config": {"num_hidden_layers": 3}, "num_hidden_layers": 7})[0]["num_hidden_layers"] == 3


@pytest.mark.parametrize(("interval", "full"), [(4, 15), (2, 30), (6, 10), (1, 60)])
def test_gdn_interval(interval: int, full: int) -> None:
    """Every full_attention_interval-th of 60 layers keeps K and V; the rest a state."""
    found = architecture(ORIGIN | {"text_config": ORIGIN["text_config"] | {"full_attention_interval": interval}})
    assert (found.kv_layers, found.recurrent_layers) == (full, 60 - full)
    assert found.groups[0].layers[0] == interval - 1


def test_layer_types_win_over_the_interval() -> None:
    """Where both are there, the list says it layer by layer."""
    types = ["full_attention"] * 20 + ["linear_attention"] * 40
    found = architecture(ORIGIN | {"text_config": ORIGIN["text_config"] | {"layer_types": types}})
    assert (found.kv_layers, found.groups[0].layers) == (20, tuple(range(20)))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("LlamaForCausalLM", {"num_hidden_layers": None}, "num_hidden_layers"),
        ("LlamaForCausalLM", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ("LlamaForCausalLM", {"num_hidden_layers": "30"}, "num_hidden_layers"),
        ("LlamaForCausalLM", {"num_key_value_heads": 0}, "num_key_value_heads"),
        ("LlamaForCausalLM", {"head_dim": -64}, "head_dim"),
        ("GptOssForCausalLM", {"layer_types": None}, "layer_types"),
        ("GptOssForCausalLM", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("GptOssForCausalLM", {"layer_types": ["full_attention"] * 29 + ["lightning"]}, "lightning"),
        ("DeepseekV3ForCausalLM", {}, "kv_lora_rank"),
        ("DeepseekV3ForCausalLM", {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_topk": 8}, "index_head_dim"),
        ("KimiK3ForConditionalGeneration", {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "linear_attn_config"),
        ("NemotronHForCausalLM", {}, "hybrid_override_pattern"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M*X"}, "pattern"),
        ("MiMoV2FlashForCausalLM", {"hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern"),
        ("Qwen3NextForCausalLM", {}, "linear_num_value_heads"),
    ],
)
def test_what_a_row_lacks_is_said(name: str, change: dict[str, Any], words: str) -> None:
    """A field that a row needs and the file lacks or contradicts is an error that names it; nothing is assumed."""
    with pytest.raises(BadInput, match=words):
        architecture(SMOLLM2 | {"architectures": [name]} | change)


def test_kimi_layer_ids_must_share_out_the_layers() -> None:
    """1-based ids that overlap, leave a gap or point outside are refused."""
    base = {"architectures": ["KimiLinearForCausalLM"]} | RICH
    for full, kda in (([4], [1, 2]), ([4], [1, 2, 3, 4]), ([0], [1, 2, 3]), ([5], [1, 2, 3])):
        with pytest.raises(BadInput, match="config.json"):
            architecture(
                base
                | {"linear_attn_config": RICH["linear_attn_config"] | {"full_attn_layers": full, "kda_layers": kda}}
            )
    assert architecture(base).groups[0].layers == (3,)


@pytest.mark.parametrize(
    ("name", "config", "layers"),
    [
        ("DeepseekV3ForCausalLM", {"num_nextn_predict_layers": 1}, 1),
        ("DeepseekV3ForCausalLM", {"num_nextn_predict_layers": 0}, 0),
        ("DeepseekV3ForCausalLM", {}, None),
        ("LlamaForCausalLM", {"num_nextn_predict_layers": 1}, None),
        ("Qwen3NextForCausalLM", {}, 1),
    ],
)
def test_draft_layers(name: str, config: dict[str, Any], layers: int | None) -> None:
    """MTP layers as declared: a real zero stays zero, and no field is unknown, not zero."""
    assert architecture({"architectures": [name]} | RICH | config).draft_layers == layers


def test_dbrx_keeps_its_own_names() -> None:
    """d_model, n_heads, n_layers, attn_config.kv_n_heads (SGLang: model_config.py, get_total_num_kv_heads)."""
    config = {
        "architectures": ["DbrxForCausalLM"], "model_type": "dbrx", "d_model": 6144, "n_heads": 48, "n_layers": 40,
        "attn_config": {"kv_n_heads": 8}, "torch_dtype": "bfloat16", "vocab_size": 100352,
    }  # fmt: skip
    checkpoint = checkpoint_from_configs(config)
    assert kv_bytes_per_token(checkpoint, 1, "bf16").per_gpu == 40 * 8 * 128 * 2 * 2
