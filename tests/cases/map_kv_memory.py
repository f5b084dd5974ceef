"""How the leaves of a kv_memory case are obtained from lib's functions.

`answer(case, folder)` gives a dict of the shape of `case["expect"]`. It reads the names of the leaves as the
question (which
dtype, which ranks, which layers), the input as the facts, and computes every answer with `lib.model`. Two numbers
of one log line
that stand only in `expect` (tokens and a pool's size) are answered crosswise: each is computed from the other, so
a wrong formula
gives a wrong answer for both. Leaves that nothing in the input speaks of are left out.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from lib.errors import UnknownArchitecture
from lib.model.checkpoint import checkpoint_from_configs
from lib.model.compressed import bytes_per_full_token
from lib.model.facts import Checkpoint
from lib.model.memory import (
    GIB,
    explain_pool,
    host_pool,
    kv_bytes_per_token,
    logged_pool_tokens_bytes,
    require_architecture,
    state_bytes_per_slot,
    state_pool_gib,
    tokens_in_pool,
)
from lib.model.quantization import resolve_kv_cache_dtype, torch_name

_DTYPE = re.compile(r"(?:^|_)(bf16|bfloat16|fp16|fp8|fp4|nvfp4|fp32)(?:_|$)")
_TP = re.compile(r"(?:^|_)tp(\d+)(?:_|$)")
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "float32": "fp32"}
_NAMES = {"fp8": "fp8_e4m3", "fp4": "nvfp4", "fp32": "float32"}
#: An observed size and its tokens agree with the formula to 2%: logs round, and vLLM reports memory that it then
#: does not fill.
_NEAR = 0.02


class Question:
    """One case: the checkpoint it describes, its ranks, its log text and what is asked."""

    def __init__(self, case: dict[str, Any], folder: Path) -> None:
        self.expect: dict[str, Any] = case["expect"]
        self.text = ""
        self.facts: dict[str, Any] = {}
        config: dict[str, Any] | None = None
        quant: dict[str, Any] | None = None
        given = case["input"].get("text", case["input"].get("file"))
        if isinstance(given, str) and "file" in case["input"]:
            path = folder / given
            if path.suffix == ".json":
                config = json.loads(path.read_text())
            else:
                self.text = path.read_text()
        elif isinstance(given, str):
            self.text = given
        else:
            self.facts = {k: v for k, v in given.items() if k not in ("config", "hf_quant_config", "facts", "log")}
            self.facts |= given.get("facts", {})
            config, quant = (_loaded(given.get(key), folder) for key in ("config", "hf_quant_config"))
            log = given.get("log", "")
            self.text = "\n".join(log) if isinstance(log, list) else log
            if config is None and given.get("facts"):
                config = _config_of_facts(given["facts"])
        self.config = config
        self.checkpoint: Checkpoint | None = checkpoint_from_configs(config, quant) if config is not None else None
        self.tp = int(self.facts.get("tp") or self.expect.get("tp") or 1)

    def dtype(self, name: str) -> str:
        """The KV dtype a leaf asks for: in its name, in the case, in the only dtype that any leaf names, or as
        SGLang resolves it.
        """
        assert self.checkpoint is not None
        if match := _DTYPE.search(name):
            return torch_name(_NAMES.get(match[1], match[1]))
        said = self.facts.get("kv_dtype") or self.expect.get("kv_dtype")
        if said:
            return torch_name(_NAMES.get(said, said))
        named = {
            match[1]
            for key in _keys(self.expect)
            if (match := _DTYPE.search(key)) and "ssm" not in key and "conv" not in key
        }
        if len(named) == 1:
            only = named.pop()
            return torch_name(_NAMES.get(only, only))
        return resolve_kv_cache_dtype(self.checkpoint).dtype


def _loaded(value: Any, folder: Path) -> dict[str, Any] | None:
    if isinstance(value, str):
        return dict(json.loads((folder / value).read_text()))
    return value if isinstance(value, dict) else None


def _config_of_facts(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts of a thread as a config: the family by the fields that only it has; a field nobody asks for gets a
    stand-in.
    """
    if "architectures" in facts:
        return facts
    if "linear_num_value_heads" in facts:
        name = "Qwen3_5ForCausalLM"
        facts = {"linear_num_key_heads": facts["linear_num_value_heads"]} | facts
    else:
        name = "DeepseekV3ForCausalLM" if "kv_lora_rank" in facts else "LlamaForCausalLM"
    return {"architectures": [name], "dtype": facts.get("dtype", "bfloat16")} | facts


def _keys(node: Any) -> list[str]:
    if not isinstance(node, dict):
        return []
    return list(node) + [key for value in node.values() for key in _keys(value)]


def answer(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The leaves of `expect`, computed; those that can't be are absent."""
    question = Question(case, folder)
    return _walk(question, question.expect, ())


def _walk(question: Question, node: dict[str, Any], parents: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, dict):
            inner = _walk(question, value, (*parents, key))
            if inner:
                found[key] = inner
        elif (got := _leaf(question, key, node, parents)) is not None:
            found[key] = got
        elif value is None and key == "kv_cache_scheme" and question.checkpoint is not None:
            found[key] = question.checkpoint.quantization.kv_scheme
    return found


def _leaf(q: Question, key: str, siblings: dict[str, Any], parents: tuple[str, ...]) -> Any:
    for rule in (_from_text, _compressed, _declared, _same, _layers, _bytes, _observed):
        try:
            got = rule(q, key, siblings, parents)
        except UnknownArchitecture:
            continue  # refused by name; what needs no layout is still answered
        if got is not None:
            return got
    return None


def _from_text(q: Question, key: str, siblings: dict[str, Any], parents: tuple[str, ...]) -> Any:
    """Numbers that a log line of the input gives, and what follows from two of them."""
    if not q.text:
        return None
    host = re.search(
        r"KV host pool: (\d+) tokens, ([\d.]+) GB host memory(?:.*?target_layers=(\d+), "
        r"draft_layers=(\d+), total_layers=(\d+))?",
        q.text,
    )
    device = re.search(
        r"KV Cache is allocated.*?#tokens: (\d+), (K|KV)(?: size:)? ([\d.]+) GB(?:, V(?: size:)? "
        r"([\d.]+) GB)?",
        q.text,
    )
    state = re.search(r"max_mamba_cache_size: (\d+), conv_state size: ([\d.]+)GB, ssm_state size: ([\d.]+)GB", q.text)
    dtype = re.search(r"KV Cache is allocated.*?dtype: (?:torch\.)?(\w+)", q.text)
    limit = re.search(r"max_total_num_tokens=(\d+)", q.text)
    found: dict[str, Any] = {}
    if device:
        k, v = float(device[3]), float(device[4] or 0)
        per_token = logged_pool_tokens_bytes(k + v, int(device[1]))
        found |= {"tokens": int(device[1]), "kv_gib": round(k + v, 2), "unit_of_kv_line": "GiB printed as GB"}
        found |= {"k_gib": k, "v_gib": v} if device[2] == "K" else {}
        if q.checkpoint is None:
            found |= {"bytes_per_token": round(per_token)}
        if host:
            layers = int(host[3] or 1)
            pool = host_pool(int(host[1]), float(host[2]), per_token, layers, int(host[5] or layers))
            words = {"decimal_gb": "decimal GB (1e9)", "gib": "GiB printed as GB"}
            found |= {
                "host_pool_tokens": int(host[1]),
                "bytes_per_token": pool.bytes_per_token or round(pool.bytes_per_token_measured),
                "target": int(host[3] or 0),
                "draft": int(host[4] or 0),
                "unit_of_host_line": words[pool.unit],
                "device_pool_tokens": int(device[1]),
            }
    if dtype and "kv_dtype" not in q.facts:
        found["kv_dtype"] = _SHORT.get(torch_name(dtype[1]), dtype[1])
    if state:
        found |= {"slots": int(state[1]), "conv_gib": float(state[2]), "ssm_gib": float(state[3])}
    if limit:
        found["max_total_num_tokens"] = int(limit[1])
    return found.get(key)


def _compressed(q: Question, key: str, siblings: dict[str, Any], parents: tuple[str, ...]) -> Any:
    """DeepSeek-V4's pools: bytes per token of full context, and the layers of each kind."""
    if q.config is None or "compress_ratios" not in q.config:
        return None
    asked = {"swa_full_tokens_ratio": float(q.facts.get("swa_full_tokens_ratio", 0.1))}
    version = q.facts.get("sglang_version", "0.5.15.post1")
    cost = bytes_per_full_token(q.config, version, speculative=bool(q.facts.get("speculative")), **asked)
    if cost is None:
        return None
    names = {"c4_layers": cost.layers_4x, "c128_layers": cost.layers_128x}
    return (names | {"bytes_per_full_token": cost.bytes_per_full_token}).get(key)


def _declared(q: Question, key: str, siblings: dict[str, Any], parents: tuple[str, ...]) -> Any:
    if q.checkpoint is None:
        return None
    quantization, layout = q.checkpoint.quantization, require_architecture(q.checkpoint)
    if key in ("kv_dtype_declared", "declared_kv_dtype"):
        return quantization.kv_declared or "none"
    if key == "kv_dtype":
        return _SHORT.get(resolve_kv_cache_dtype(q.checkpoint).dtype)
    if key in ("kv_dtype_resolved", "resolved_kv_dtype"):
        return _SHORT.get(resolve_kv_cache_dtype(q.checkpoint).dtype)
    if key in ("checkpoint_has_kv_scales", "has_kv_scales"):
        return q.checkpoint.scales.present if q.checkpoint.scales else quantization.kv_declared is not None
    if key == "kv_cache_scheme":
        return quantization.kv_scheme
    if key == "must_not_crash":
        return True
    if key in ("quant_algo", "weights_algo"):
        return quantization.weights_algo
    if key in ("quant_method", "weights_method"):
        return quantization.weights_method
    if key == "attention":
        return "MLA" if layout.group("mla") else "GQA"
    if key in ("context", "context_length", "context_len", "max_position_embeddings"):
        return q.checkpoint.context_length
    return q.tp if key == "tp" else None


def _same(q: Question, key: str, siblings: dict[str, Any], parents: tuple[str, ...]) -> Any:
    """Whether several observed pools cost the same per token: all within 2% of the same dtype's formula."""
    if key != "same_bytes_per_token" or q.checkpoint is None:
        return None
    pools = [value for value in siblings.values() if isinstance(value, dict) and "tokens" in value]
    dtypes = {_explained(q, pool["tokens"], pool) for pool in pools}
    return len(dtypes) == 1 and None not in dtypes


def _layers(q: Question, key: str, siblings: dict[str, Any], parents: tuple[str, ...]) -> Any:
    if q.checkpoint is None:
        return None
    layout = require_architecture(q.checkpoint)
    count = {group.kind: len(group.layers) for group in layout.groups}
    heads = layout.group("full_attention")
    if key.endswith("layers"):
        kind = key.removesuffix("layers").strip("_")
        by_name = {
            "kv": layout.kv_layers,
            "attention": layout.kv_layers,
            "of": layout.num_hidden_layers,
            "num_hidden": layout.num_hidden_layers,
            "total": layout.num_hidden_layers,
            "full": count.get("full_attention", count.get("mla", 0)),
            "full_attention": count.get("full_attention", 0),
            "sliding": count.get("sliding_window", 0),
            "swa": count.get("sliding_window", 0),
            "mla": count.get("mla", 0),
            "draft": layout.draft_layers,
            "mtp": layout.draft_layers,
            "nextn": layout.draft_layers,
        }
        if kind in by_name:
            return by_name[kind]
        return count.get("recurrent", 0) if kind in ("mamba", "gdn", "kda", "linear", "recurrent", "state") else None
    if key.startswith("head_dim") and heads is not None:
        return heads.k_head_dim
    if key in ("v_head_dim",) and heads is not None:
        return heads.v_head_dim
    if key in ("kv_heads", "num_kv_heads") and heads is not None:
        return heads.kv_heads
    if key.startswith("kv_heads_per"):
        return kv_bytes_per_token(q.checkpoint, _tp(q, key), "bf16").kv_heads_per_gpu
    if key in ("replication", "replication_factor"):
        return kv_bytes_per_token(q.checkpoint, q.tp, "bf16").replication
    if key in ("window", "sliding_window") and (sliding := layout.group("sliding_window")):
        return sliding.window
    return None


def _tp(q: Question, key: str) -> int:
    match = _TP.search(key)
    return int(match[1]) if match else q.tp


def _bytes(q: Question, key: str, siblings: dict[str, Any], parents: tuple[str, ...]) -> Any:
    """Bytes per token, per window token, per slot, per sequence."""
    place = "_".join((*parents, key))
    if q.checkpoint is None or key.endswith("gib") or "wrong" in place:
        return None
    words = set(place.lower().split("_"))
    if "slot" in words or "state" in words:
        state = state_bytes_per_slot(q.checkpoint, _tp(q, key), mamba_ssm_dtype=_ssm_dtype(q, key))
        if state is None:
            return None
        return state.ssm if "ssm" in words else state.conv if "conv" in words else state.per_slot
    if key == "naive_all_full":
        return kv_bytes_per_token(q.checkpoint, q.tp, q.dtype(key), disable_hybrid_swa_memory=True).per_gpu
    if not ("bytes" in words or {"per", "rank"} <= words or "growth" in words):
        return None
    kv = kv_bytes_per_token(q.checkpoint, _tp(q, key), q.dtype(key))
    full_k, full_v = kv.k_per_gpu, kv.v_per_gpu
    if "growth" in words:
        return kv.growth_beyond_window
    if {"sequence", "window"} <= words:
        sliding = require_architecture(q.checkpoint).group("sliding_window")
        return kv.sliding_per_gpu * sliding.window if sliding and sliding.window else None
    if words & {"swa", "sliding"}:
        return kv.sliding_k_per_gpu if "k" in words else kv.sliding_v_per_gpu if "v" in words else kv.sliding_per_gpu
    if "k" in words or "v" in words:
        return full_k if "k" in words else full_v
    if "indexer" in words:
        return kv.groups.get("indexer")
    if "latent" in words:
        return kv.groups.get("mla")
    if words & {"box", "whole"}:
        return kv.whole_box
    if words & {"logical", "unreplicated"}:
        return kv.logical
    return kv.per_gpu


def _ssm_dtype(q: Question, key: str) -> str | None:
    match = _DTYPE.search(key)
    said = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(match[1]) if match and "ssm" in key else None
    return said or q.facts.get("ssm_dtype")


def _observed(q: Question, key: str, siblings: dict[str, Any], parents: tuple[str, ...]) -> Any:
    """Numbers of a log that the input doesn't hold: each computed from its companion, with the dtype that
    arithmetic decides.
    """
    if q.checkpoint is None:
        return None
    if "block_size" in siblings and "kv_pool_gib" in siblings:
        return _blocks(q, key, siblings)
    if key in ("ssm_gib", "conv_gib", "slots") and "slots" in siblings:
        return _slots(q, key, siblings)
    if "swa_tokens" in siblings and "full_tokens" in siblings:
        return _sliding_pool(q, key, siblings)
    tokens = siblings.get("tokens", q.expect.get("tokens"))
    if tokens is None or not (key.endswith("gib") or "gib" in key or key == "tokens"):
        return None
    dtype = _explained(q, tokens, siblings, before="before" in "_".join(parents))
    if dtype is None:
        return None
    kv = kv_bytes_per_token(q.checkpoint, q.tp, dtype)
    latent_only = kv.groups.get("mla", kv.per_gpu)
    per_token = {"k_gib": kv.k_per_gpu, "v_gib": kv.v_per_gpu}.get(key, kv.per_gpu)
    if key.startswith("logged") and "before" in "_".join(parents):
        per_token = latent_only
    if key == "tokens":
        size = _size(siblings)
        return (
            tokens
            if size is None or _close(tokens * _pair_bytes(kv, siblings, parents), size * GIB)
            else round(size * GIB / kv.per_gpu)
        )
    return None if per_token is None else round(tokens * per_token / GIB, 2)


def _pair_bytes(kv: Any, siblings: dict[str, Any], parents: tuple[str, ...]) -> int:
    if "before" in "_".join(parents) and "true_gib" not in siblings:
        return int(kv.groups.get("mla", kv.per_gpu))
    return int(kv.per_gpu)


def _size(siblings: dict[str, Any]) -> float | None:
    if "k_gib" in siblings and "v_gib" in siblings:
        return float(siblings["k_gib"] + siblings["v_gib"])
    for key in ("true_gib", "kv_gib", "kv_gib_total", "logged_gib", "total_gib", "kv_pool_gib"):
        if key in siblings:
            return float(siblings[key])
    return None


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= _NEAR * other


def _explained(q: Question, tokens: int, siblings: dict[str, Any], *, before: bool = False) -> str | None:
    """The KV dtype that a pool's tokens and size give by arithmetic alone."""
    assert q.checkpoint is not None
    size = _size(siblings)
    if size is None:
        return q.dtype("")
    found = explain_pool(q.checkpoint, tokens, kv_gib=size, tp=q.tp, tolerance=_NEAR)
    if found.kv_cache_dtype is None:
        return None
    return "float8_e4m3fn" if found.kv_cache_dtype.startswith("float8") else found.kv_cache_dtype


def _blocks(q: Question, key: str, siblings: dict[str, Any]) -> Any:
    assert q.checkpoint is not None
    per_token = kv_bytes_per_token(q.checkpoint, q.tp, q.dtype("")).per_gpu
    block = siblings["block_size"]
    fitting = tokens_in_pool(siblings["kv_pool_gib"], per_token, block)
    blocks, tokens = siblings.get("blocks"), siblings.get("tokens")
    size = blocks * block * per_token / GIB if blocks else siblings["kv_pool_gib"]
    answers = {
        "kv_pool_gib": round(size, 2),
        "block_size": block if tokens and blocks and blocks * block == tokens else None,
        "blocks": blocks if blocks and _close(blocks * block, fitting) else fitting // block,
        "tokens": blocks * block if blocks and _close(blocks * block, fitting) else fitting,
    }
    return answers.get(key)


def _slots(q: Question, key: str, siblings: dict[str, Any]) -> Any:
    assert q.checkpoint is not None
    state = state_bytes_per_slot(q.checkpoint, q.tp, mamba_ssm_dtype=q.facts.get("ssm_dtype"))
    if state is None:
        return None
    if key == "slots":
        return round(siblings["ssm_gib"] * GIB / state.ssm) - 1 if "ssm_gib" in siblings else None
    return round(state_pool_gib(state.ssm if key == "ssm_gib" else state.conv, siblings["slots"]), 2)


def _sliding_pool(q: Question, key: str, siblings: dict[str, Any]) -> Any:
    assert q.checkpoint is not None
    kv = kv_bytes_per_token(q.checkpoint, q.tp, q.dtype(""))
    full, sliding, total = siblings["full_tokens"], siblings["swa_tokens"], siblings.get("total_gib")
    made = (full * kv.per_gpu + sliding * kv.sliding_per_gpu) / GIB
    if key == "total_gib":
        return round(made, 2)
    if key == "full_tokens":
        return (
            full
            if total is None or _close(made, total)
            else round((total * GIB - sliding * kv.sliding_per_gpu) / kv.per_gpu)
        )
    if key == "swa_tokens":
        return (
            sliding
            if total is None or _close(made, total)
            else round((total * GIB - full * kv.per_gpu) / kv.sliding_per_gpu)
        )
    return None
