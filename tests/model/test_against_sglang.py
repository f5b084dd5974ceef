"""Geometry, dtype, context and state of 70 configurations as SGLang 0.5.15.post1's own classes derive them
(tests/data/memory).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lib.errors import BadInput
from lib.model.architectures import TABLE
from lib.model.checkpoint import checkpoint_from_configs
from lib.model.memory import heads_per_gpu, state_bytes_per_slot, swa_pool

ANSWERS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data/memory/sglang_model_config.json").read_text()
)


@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_agrees_with_sglang(name: str) -> None:
    """Layers, heads, widths, latents, sliding layers, dtype and context are SGLang's."""
    checkpoint, said = checkpoint_from_configs(ANSWERS[name]["config"]), ANSWERS[name]["sglang"]
    layout = checkpoint.architecture
    assert layout is not None
    if ANSWERS[name]["config"].get("quantization_config", {}).get("quant_method") != "mxfp4":
        assert checkpoint.torch_dtype == said["dtype"]
    assert checkpoint.context_length == said["context_length"]
    assert checkpoint.quantization.weights_method == said["quantization"]
    latent = layout.group("mla")
    assert (latent is not None) == ("latent" in said)
    full = layout.group("full_attention")
    if latent is not None:
        assert [latent.kv_lora_rank, latent.qk_rope_head_dim] == said["latent"]
    elif full is not None:
        assert (full.k_head_dim, full.v_head_dim) == (said["head_dim"], said["v_head_dim"])
        for ranks, heads in said["kv_heads_per_gpu"].items():
            try:
                assert heads_per_gpu(full.kv_heads or 0, int(ranks)) == heads
            except BadInput:
                # SGLang only fails later, when it builds the attention layers
                assert (full.kv_heads or 0) % int(ranks)
                assert int(ranks) % (full.kv_heads or 1)
    assert swa_pool(checkpoint, "0.5.15.post1") == bool(said["sliding_pool"] and said["sliding"][0])
    if "sliding" in said and said["sliding"][0]:
        sliding = layout.group("sliding_window")
        assert sliding is not None
        assert [list(sliding.layers), sliding.kv_heads, sliding.k_head_dim, sliding.v_head_dim] == said["sliding"]
    if "full_layers" in said:
        assert [i for g in layout.groups if g.kind != "recurrent" for i in g.layers] == said["full_layers"]
    else:
        assert sum(len(group.layers) for group in layout.groups) == said["layers"]


@pytest.mark.parametrize("name", sorted(name for name in ANSWERS if ANSWERS[name]["sglang"].get("state_layers")))
def test_state_agrees_with_sglang(name: str) -> None:
    """Bytes per slot on one and on two ranks, to the byte."""
    checkpoint, said = checkpoint_from_configs(ANSWERS[name]["config"]), ANSWERS[name]["sglang"]
    assert checkpoint.architecture is not None
    recurrent = checkpoint.architecture.group("recurrent")
    assert recurrent is not None
    assert list(recurrent.layers) == said["state_layers"]
    for ranks, size in said["state_bytes"].items():
        state = state_bytes_per_slot(checkpoint, int(ranks))
        assert state is not None
        assert state.per_slot == size


def test_every_kind_of_state_is_compared() -> None:
    """All five kinds, and most rows of the table, stand against SGLang's own classes."""
    states = [checkpoint_from_configs(a["config"]).architecture for a in ANSWERS.values()]
    kinds = {g.state.kind for layout in states if layout for g in layout.groups if g.state}
    assert kinds == {"gdn", "mamba2", "kda", "lightning", "short_conv"}
    assert len(set(ANSWERS) & set(TABLE)) == len(ANSWERS) == 70
