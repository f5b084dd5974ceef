"""Ask SGLang itself what it derives from a configuration; writes what tests/model/test_against_sglang.py compares with.

Run with an environment that has SGLang (0.5.15.post1 on a CPU was used): python make_model_config.py CONFIGS.json
OUT.json
CONFIGS.json maps an architecture name to its config.json object.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import pkgutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
logging.disable(logging.CRITICAL)


class Ranks:
    """Stands in for the parallel state: these ranks share the attention."""

    count = 1

    @property
    def attn_tp_size(self) -> int:
        return Ranks.count

    tp_size = attn_tp_size


def derived(config: dict[str, Any]) -> dict[str, Any]:
    """What SGLang's ModelConfig and its state classes say of one configuration."""
    import sglang.srt.configs as configs
    import sglang.srt.layers.dp_attention as dp_attention
    from sglang.srt.configs.model_config import AttentionArch, ModelConfig
    from sglang.srt.model_executor.model_runner import ModelRunner

    dp_attention.get_attention_tp_size = lambda: Ranks.count
    for info in pkgutil.iter_modules(configs.__path__):
        module = importlib.import_module(f"{configs.__name__}.{info.name}")
        if hasattr(module, "get_parallel"):
            module.get_parallel = Ranks
        if hasattr(module, "get_attention_tp_size"):
            module.get_attention_tp_size = lambda: Ranks.count
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        model = ModelConfig(folder, trust_remote_code=False)
    found: dict[str, Any] = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "context_length": model.context_len,
        "kv_heads_per_gpu": {str(n): model.get_num_kv_heads(n) for n in (1, 2, 8)},
        "head_dim": model.head_dim,
        "v_head_dim": model.v_head_dim,
        "layers": model.num_attention_layers,
        "sliding_pool": bool(model.is_hybrid_swa),
        "quantization": model.quantization,
    }
    if model.attention_arch == AttentionArch.MLA:
        found["latent"] = [model.kv_lora_rank, model.qk_rope_head_dim]
    if model.is_hybrid_swa:
        found["sliding"] = [
            model.swa_attention_layer_ids, model.get_swa_num_kv_heads(1), model.swa_head_dim, model.swa_v_head_dim,
        ]  # fmt: skip
    runner = type("Runner", (), {"model_config": model, "is_draft_worker": False})()
    names = ("mamba2_config", "hybrid_gdn_config", "kimi_linear_config", "hybrid_lightning_config")
    hybrid = next((c for name in names if (c := getattr(ModelRunner, name).fget(runner)) is not None), None)
    if hybrid is not None:
        found["full_layers"] = list(hybrid.full_attention_layer_ids)
        found["state_bytes"] = {}
        for Ranks.count in (1, 2):
            parameters = hybrid.mamba2_cache_params
            if parameters is not None:
                found["state_bytes"][str(Ranks.count)] = int(parameters.mamba_cache_per_req)
                found["state_layers"] = list(parameters.layers)
        Ranks.count = 1
    return found


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text())
    answers = {}
    for name, config in asked.items():
        try:
            answers[name] = {"config": config, "sglang": derived(config)}
        except Exception as error:  # noqa: BLE001 - a configuration that SGLang refuses is reported and left out
            print(name, repr(error)[:160], file=sys.stderr)
    Path(sys.argv[2]).write_text(json.dumps(answers, separators=(",", ":")).replace('},"', '},\n"') + "\n")
    print(len(answers), "configurations")
