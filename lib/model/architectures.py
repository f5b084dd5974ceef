"""Architecture name to layer groups: a table in which every row says where its formula comes from. Pure.

A row names the function that reads the geometry out of config.json (by the family's own field names) and the source
it was read from. An architecture without a row raises `UnknownArchitecture`: head counts, latent caches and recurrent
states differ so much between families that a guess would be wrong by factors.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from lib.errors import BadInput, UnknownArchitecture
from lib.model.compressed import bytes_per_full_token
from lib.model.facts import Architecture, LayerGroup, RecurrentState

Config = Mapping[str, Any]
Groups = tuple[tuple[LayerGroup, ...], tuple[str, ...]]

#: No model has more; a larger number is a corrupt file, and must not become a loop or a list of that length.
MAX_LAYERS = 100_000
_MAX_SIZE = 1 << 31

#: Where multimodal and wrapper configurations keep the text model (SGLang `utils/hf_transformers/common.py`).
NESTED_KEYS = ("thinker_config", "llm_config", "language_config", "text_config")


def text_config(config: Config) -> tuple[Config, str | None]:
    """The part of config.json that describes the text model, and the key path it was found under (None: top level)."""
    current: Config = config
    path: list[str] = []
    for _ in range(4):
        key = next((k for k in NESTED_KEYS if isinstance(current.get(k), Mapping)), None)
        if key is None or "num_hidden_layers" in current and key != "text_config":
            break
        current, path = current[key], [*path, key]
    return current, ".".join(path) or None


def _whole(config: Config, *keys: str, default: int | None = None, low: int = 1) -> int:
    """The first of `keys` that is set, as a whole number of at least `low`; raises BadInput naming what is needed."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < _MAX_SIZE:
            raise BadInput(
                f"config.json: {key} must be a whole number of at least {low}", repr(value)[:80], "check the file"
            )
        return value
    if default is not None:
        return default
    raise BadInput(f"config.json must give {' or '.join(keys)}", "none of them", "use the model's original config.json")


def _optional(config: Config, *keys: str) -> int | None:
    """Like `_whole`, but None when no key is set or the value is 0."""
    for key in keys:
        if config.get(key) is not None:
            return _whole(config, key, low=0) or None
    return None


def _layers(config: Config) -> int:
    count = _whole(config, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    if count > MAX_LAYERS:
        raise BadInput(f"config.json: num_hidden_layers must be below {MAX_LAYERS}", str(count), "check the file")
    return count


def _kv_heads(config: Config) -> int:
    """KV heads of the whole model, by SGLang's order of field names (`ModelConfig.get_total_num_kv_heads`)."""
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    attention = config.get("attn_config")
    if isinstance(attention, dict) and attention.get("kv_n_heads") is not None:
        return _whole(attention, "kv_n_heads")  # DBRX, MPT
    keys = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
    return _whole(config, *keys, "num_attention_heads", "n_head", "n_heads")


def _head_dim(config: Config) -> tuple[int, str]:
    """head_dim as config.json gives it, or hidden_size / num_attention_heads where it doesn't."""
    if config.get("head_dim") is not None:
        return _whole(config, "head_dim"), "taken"
    hidden = _whole(config, "hidden_size", "n_embd", "d_model")
    heads = _whole(config, "num_attention_heads", "n_head", "n_heads")
    if hidden < heads:
        raise BadInput(
            "config.json: hidden_size must be at least num_attention_heads", f"{hidden} and {heads}", "check the file"
        )
    return hidden // heads, "derived"


def _layer_types(config: Config, count: int, known: Mapping[str, str]) -> list[str]:
    """`layer_types` translated by `known`; an unknown word or a wrong length is an error, not a guess."""
    types = config.get("layer_types")
    if not isinstance(types, list) or len(types) < count:
        found = f"{len(types)} entries" if isinstance(types, list) else "none"
        raise BadInput(
            f"config.json: layer_types must name all {count} layers", found, "use the model's original config.json"
        )
    foreign = sorted({str(word)[:40] for word in types[:count] if word not in known})
    if foreign:
        raise BadInput(
            f"config.json: layer_types may hold {sorted(known)}", str(foreign[:5]), "add the layer type to the table"
        )
    return [known[word] for word in types[:count]]


def _where(types: list[str], kind: str) -> tuple[int, ...]:
    return tuple(i for i, found in enumerate(types) if found == kind)


def _full(config: Config, layers: tuple[int, ...], **changes: Any) -> LayerGroup:
    head_dim, how = _head_dim(config)
    values: dict[str, Any] = {
        "kind": "full_attention",
        "layers": layers,
        "kv_heads": _kv_heads(config),
        "k_head_dim": head_dim,
        "v_head_dim": _whole(config, "v_head_dim", default=head_dim),
        "head_dim_is": how,
    }
    return LayerGroup(**(values | changes))


_DEFAULT_TYPES = {
    "full_attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "sliding",
    "attention": "full",
}


def dense(config: Config) -> Groups:
    """K and V in every layer. Attention windows, if any, shorten what is read, not what SGLang keeps."""
    count = _layers(config)
    notes: tuple[str, ...] = ()
    types = config.get("layer_types")
    if isinstance(types, list) and "sliding_attention" in types:
        windowed = sum(1 for word in types[:count] if word == "sliding_attention")
        notes = (f"{windowed} of {count} layers attend to a window only; SGLang keeps full K and V for them",)
    return (_full(config, tuple(range(count))),), notes


def looped(config: Config) -> Groups:
    """The layers run loop_num times, each time with K and V of their own (IQuestLoopCoder)."""
    count, loops = _layers(config), _whole(config, "loop_num", default=1)
    if count * loops > MAX_LAYERS:
        raise BadInput(
            "config.json: num_hidden_layers * loop_num is impossible", f"{count} * {loops}", "check the file"
        )
    return (_full(config, tuple(range(count * loops))),), (f"{count} layers run {loops} times",)


def sliding_by_type(config: Config) -> Groups:
    """Full and sliding layers by `layer_types`, same geometry in both (gpt-oss, Laguna, Mellum)."""
    types = _layer_types(config, _layers(config), _DEFAULT_TYPES)
    window = _optional(config, "sliding_window", "sliding_window_size")
    full, sliding = _where(types, "full"), _where(types, "sliding")
    groups = [_full(config, full)] if full else []
    if sliding:
        groups.append(_full(config, sliding, kind="sliding_window", window=window))
    return tuple(groups), ()


def gemma4(config: Config) -> Groups:
    """Gemma 4: full layers by the `global_*` fields, sliding layers by the plain ones."""
    types = _layer_types(config, _layers(config), _DEFAULT_TYPES)
    head_dim, how = _head_dim(config)
    wide = _whole(config, "global_head_dim", default=head_dim)
    heads = _kv_heads(config)
    full_heads = _whole(config, "num_global_key_value_heads", default=heads)
    window = _optional(config, "sliding_window")
    shared = _optional(config, "num_kv_shared_layers") or 0
    notes = [f"full layers keep {full_heads} KV heads of {wide}, sliding layers {heads} of {head_dim}"]
    if config.get("attention_k_eq_v"):
        notes.append("attention_k_eq_v: K and V share a projection, SGLang still keeps both")
    if shared:
        notes.append(f"the last {shared} layers reuse earlier K and V; SGLang's pool still counts them")
    groups = []
    full, sliding = _where(types, "full"), _where(types, "sliding")
    if full:
        groups.append(_full(config, full, kv_heads=full_heads, k_head_dim=wide, v_head_dim=wide, head_dim_is=how))
    if sliding:
        groups.append(_full(config, sliding, kind="sliding_window", window=window, v_head_dim=head_dim))
    return tuple(groups), tuple(notes)


def mimo_v2(config: Config) -> Groups:
    """MiMo-V2: hybrid_layer_pattern 1 = sliding, 0 = full; the two have head counts of their own and V narrower than
    K.
    """
    count = _layers(config)
    pattern = config.get("hybrid_layer_pattern")
    if not isinstance(pattern, list) or len(pattern) < count or any(x not in (0, 1) for x in pattern[:count]):
        raise BadInput(
            f"config.json: hybrid_layer_pattern must give 0 or 1 for all {count} layers",
            repr(pattern)[:60],
            "check the file",
        )
    full = tuple(i for i in range(count) if pattern[i] == 0)
    sliding = tuple(i for i in range(count) if pattern[i] == 1)
    groups = [_full(config, full)] if full else []
    if sliding:
        k_dim = _whole(config, "swa_head_dim", default=_head_dim(config)[0])
        groups.append(
            _full(
                config,
                sliding,
                kind="sliding_window",
                kv_heads=_whole(config, "swa_num_key_value_heads", default=_kv_heads(config)),
                k_head_dim=k_dim,
                v_head_dim=_whole(config, "swa_v_head_dim", default=k_dim),
                window=_optional(config, "sliding_window_size", "sliding_window"),
            )
        )
    return tuple(groups), ("hybrid_layer_pattern: 1 is sliding, 0 is full",)


def llama4(config: Config) -> Groups:
    """Llama 4: every fourth layer is full attention, the others attend in chunks."""
    count = _layers(config)
    full = tuple(i for i in range(count) if (i + 1) % 4 == 0)
    rest = tuple(i for i in range(count) if (i + 1) % 4)
    groups = [_full(config, full)] if full else []
    groups.append(_full(config, rest, kind="sliding_window", window=_optional(config, "attention_chunk_size")))
    return tuple(groups), ()


def step3p5(config: Config) -> Groups:
    """Step 3.5: full and sliding layers by layer_types; sliding layers take their head counts from
    attention_other_setting.
    """
    types = _layer_types(config, _layers(config), _DEFAULT_TYPES)
    other = config.get("attention_other_setting")
    heads = _whole(other, "num_attention_groups") if isinstance(other, Mapping) else _kv_heads(config)
    groups = []
    if full := _where(types, "full"):
        groups.append(_full(config, full))
    if sliding := _where(types, "sliding"):
        groups.append(
            _full(config, sliding, kind="sliding_window", kv_heads=heads, window=_optional(config, "sliding_window"))
        )
    return tuple(groups), ()


def mla(config: Config) -> Groups:
    """One latent per token and layer (DeepSeek V2 and later, Kimi K2); with index_topk also an indexer key (DSA)."""
    return (_mla_group(config, tuple(range(_layers(config)))),), ()


def mla_twice(config: Config) -> Groups:
    """LongCat-Flash: two attention blocks in each layer."""
    count = _layers(config) * 2
    return (_mla_group(config, tuple(range(count))),), (f"{count // 2} layers with two attention blocks each",)


def _mla_group(config: Config, layers: tuple[int, ...]) -> LayerGroup:
    index = _whole(config, "index_head_dim") if config.get("index_topk") is not None else None
    return LayerGroup(
        kind="mla",
        layers=layers,
        kv_lora_rank=_whole(config, "kv_lora_rank"),
        qk_rope_head_dim=_whole(config, "qk_rope_head_dim", low=0),
        index_head_dim=index,
        index_layers=len(layers) if index else None,
    )


def gdn(config: Config) -> Groups:
    """Qwen3-Next and Qwen3.5: every full_attention_interval-th layer keeps K and V, the others a Gated DeltaNet
    state.
    """
    count = _layers(config)
    if isinstance(config.get("layer_types"), list):
        types = _layer_types(config, count, {"full_attention": "full", "linear_attention": "linear"})
    else:
        interval = _whole(config, "full_attention_interval", default=4)
        types = ["full" if (i + 1) % interval == 0 else "linear" for i in range(count)]
    v_heads, v_dim = _whole(config, "linear_num_value_heads"), _whole(config, "linear_value_head_dim")
    k_heads = _whole(config, "linear_num_key_heads", default=0, low=1) if config.get("linear_num_key_heads") else None
    if k_heads is None:
        raise BadInput("config.json must give linear_num_key_heads", "nothing", "use the model's original config.json")
    k_dim = _whole(config, "linear_key_head_dim")
    state = RecurrentState(
        kind="gdn",
        num_heads=v_heads,
        head_dim=v_dim,
        state_size=k_dim,
        n_groups=k_heads,
        intermediate_size=v_heads * v_dim,
        conv_kernel=_whole(config, "linear_conv_kernel_dim", default=4),
    )
    return _hybrid(config, types, state)


def _hybrid(config: Config, types: list[str], state: RecurrentState, linear: str = "linear") -> Groups:
    full, recurrent = _where(types, "full"), _where(types, linear)
    groups = [_full(config, full)] if full else []
    if recurrent:
        groups.append(LayerGroup(kind="recurrent", layers=recurrent, state=state))
    return tuple(groups), (
        f"{len(full)} of {len(types)} layers keep K and V, {len(recurrent)} a fixed state per request",
    )


def nemotron_h(config: Config) -> Groups:
    """Nemotron-H: hybrid_override_pattern, `*` attention, `M` Mamba-2, `-` and `E` neither."""
    pattern = config.get("hybrid_override_pattern")
    block_types = config.get("layers_block_type")
    letters = {"*": "full", "M": "mamba", "-": "none", "E": "none"}
    words = {"attention": "full", "mamba": "mamba", "mlp": "none", "moe": "none"}
    symbols: list[Any]
    if isinstance(pattern, str):
        known, symbols = letters, list(pattern)
    elif isinstance(block_types, list):
        known, symbols = words, block_types
    else:
        raise BadInput(
            "config.json must give hybrid_override_pattern or layers_block_type", "neither", "use the original file"
        )
    if not 0 < len(symbols) <= MAX_LAYERS or any(symbol not in known for symbol in symbols):
        raise BadInput(
            f"config.json: the layer pattern may hold {sorted(known)}",
            str(pattern or block_types)[:60],
            "check the file",
        )
    types = [known[symbol] for symbol in symbols]
    heads, head_dim = _whole(config, "mamba_num_heads"), _whole(config, "mamba_head_dim")
    state = RecurrentState(
        kind="mamba2",
        num_heads=heads,
        head_dim=head_dim,
        state_size=_whole(config, "ssm_state_size"),
        n_groups=_whole(config, "n_groups"),
        intermediate_size=heads * head_dim,
        conv_kernel=_whole(config, "conv_kernel", default=4),
    )
    return _hybrid(config, types, state, "mamba")


def _mamba_head_dim(config: Config, inner: int, heads: int) -> int:
    """mamba_d_head, or its derivation where the file says `auto` or nothing."""
    if config.get("mamba_d_head") in (None, "auto"):
        if inner % heads:
            raise BadInput(
                "config.json: Mamba's width must be divisible by mamba_n_heads", f"{inner} and {heads}", "check it"
            )
        return inner // heads
    return _whole(config, "mamba_d_head")


def _expanded(config: Config) -> int:
    """mamba_expand * hidden_size."""
    return _whole(config, "mamba_expand", default=2) * _whole(config, "hidden_size")


def falcon_h1(config: Config) -> Groups:
    """Falcon-H1: every layer has both attention and Mamba-2."""
    every = tuple(range(_layers(config)))
    heads = _whole(config, "mamba_n_heads")
    inner = _optional(config, "mamba_d_ssm") or _expanded(config)
    head_dim = _mamba_head_dim(config, inner, heads)
    state = RecurrentState(
        kind="mamba2",
        num_heads=heads,
        head_dim=head_dim,
        state_size=_whole(config, "mamba_d_state"),
        n_groups=_whole(config, "mamba_n_groups"),
        intermediate_size=inner,
        conv_kernel=_whole(config, "mamba_d_conv", default=4),
    )
    groups = (_full(config, every), LayerGroup(kind="recurrent", layers=every, state=state))
    return groups, ("every layer keeps both K and V and a Mamba-2 state",)


def granite_hybrid(config: Config) -> Groups:
    """Granite 4 hybrids: `mamba` and `attention` by layer_types."""
    types = _layer_types(config, _layers(config), {"attention": "full", "mamba": "mamba", "full_attention": "full"})
    if "mamba" not in types:
        return (_full(config, tuple(range(len(types)))),), ()
    heads, inner = _whole(config, "mamba_n_heads"), _expanded(config)
    head_dim = _mamba_head_dim(config, inner, heads)
    state = RecurrentState(
        kind="mamba2",
        num_heads=heads,
        head_dim=head_dim,
        state_size=_whole(config, "mamba_d_state"),
        n_groups=_whole(config, "mamba_n_groups"),
        intermediate_size=inner,
        conv_kernel=_whole(config, "mamba_d_conv", default=4),
        dtype_from_config=False,
    )
    return _hybrid(config, types, state, "mamba")


def lfm2(config: Config) -> Groups:
    """LFM2: attention and short convolutions by layer_types."""
    types = _layer_types(config, _layers(config), {"full_attention": "full", "conv": "conv", "short_conv": "conv"})
    hidden = _whole(config, "hidden_size")
    kernel = _whole(config, "conv_L_cache")
    state = RecurrentState(
        kind="short_conv",
        num_heads=1,
        head_dim=hidden,
        state_size=0,
        n_groups=1,
        intermediate_size=hidden,
        conv_kernel=kernel,
    )
    return _hybrid(config, types, state, "conv")


def kimi_linear(config: Config) -> Groups:
    """Kimi Linear and K3: MLA in linear_attn_config.full_attn_layers (1-based), Kimi Delta Attention in kda_layers."""
    count = _layers(config)
    linear = config.get("linear_attn_config")
    if not isinstance(linear, Mapping):
        raise BadInput("config.json must give linear_attn_config", "nothing", "use the model's original config.json")
    full, kda = _ids(linear, "full_attn_layers", count), _ids(linear, "kda_layers", count)
    if set(full) & set(kda) or len(full) + len(kda) != count:
        raise BadInput(
            f"config.json: full_attn_layers and kda_layers must share out the {count} layers (1-based)",
            f"{len(full)} and {len(kda)}, {len(set(full) & set(kda))} in both",
            "use the model's original config.json",
        )
    heads, head_dim = _whole(linear, "num_heads"), _whole(linear, "head_dim")
    state = RecurrentState(
        kind="kda",
        num_heads=heads,
        head_dim=head_dim,
        state_size=head_dim,
        conv_kernel=_whole(linear, "short_conv_kernel_size", default=4),
        dtype_from_config=False,
    )
    groups = [_mla_group(config, full)] if full else []
    if kda:
        groups.append(LayerGroup(kind="recurrent", layers=kda, state=state))
    return tuple(groups), (f"{len(full)} of {count} layers keep an MLA latent (layer ids are 1-based in the file)",)


def _ids(config: Config, key: str, count: int) -> tuple[int, ...]:
    """1-based layer ids as 0-based ones."""
    ids = config.get(key)
    if not isinstance(ids, list) or any(
        isinstance(i, bool) or not isinstance(i, int) or not 1 <= i <= count for i in ids
    ):
        raise BadInput(
            f"config.json: {key} must list layers from 1 to {count}", repr(ids)[:60], "use the original config.json"
        )
    return tuple(sorted({i - 1 for i in ids}))


def bailing_linear(config: Config) -> Groups:
    """Ling/Ring 2.5: every layer_group_size-th layer keeps an MLA latent, the others a lightning-attention state."""
    count, size = _layers(config), _whole(config, "layer_group_size")
    types = ["full" if (i + 1) % size == 0 else "linear" for i in range(count)]
    heads = _whole(config, "num_linear_key_value_heads", "num_key_value_heads", "num_attention_heads")
    head_dim = _head_dim(config)[0]
    state = RecurrentState(
        kind="lightning", num_heads=heads, head_dim=head_dim, state_size=head_dim, dtype_from_config=False
    )
    full, linear = _where(types, "full"), _where(types, "linear")
    groups = [_mla_group(config, full)] if full else []
    if linear:
        groups.append(LayerGroup(kind="recurrent", layers=linear, state=state))
    return tuple(groups), ()


def minimax_m3(config: Config) -> Groups:
    """MiniMax M3: K and V in every layer, and an unquantized indexer key (and value) in the sparse ones."""
    count = _layers(config)
    sparse = config.get("sparse_attention_config")
    if not isinstance(sparse, Mapping) or not isinstance(sparse.get("sparse_attention_freq"), list):
        raise BadInput(
            "config.json must give sparse_attention_config.sparse_attention_freq", "nothing", "use the original file"
        )
    flags = sparse["sparse_attention_freq"][:count]
    off = sparse.get("sparse_disable_index_value") or []
    with_index = [i for i, flag in enumerate(flags) if flag != 0]
    key_only = sum(1 for i in with_index if i < len(off) and off[i] != 0)
    dim = _whole(sparse, "sparse_index_dim")
    every = tuple(range(count))
    groups = [_full(config, every, index_head_dim=dim, index_layers=2 * len(with_index) - key_only)]
    return tuple(groups), (
        f"{len(with_index)} sparse layers keep an indexer key of {dim}, {key_only} of them without a value",
    )


def nemotron_nas(config: Config) -> Groups:
    """DeciLM / Nemotron-NAS: KV heads from block_configs, the same in all attention blocks; SGLang's pool counts
    every layer.
    """
    count, blocks = _layers(config), config.get("block_configs")
    shares = set()
    for block in blocks if isinstance(blocks, list) else ():
        attention = block.get("attention") if isinstance(block, Mapping) else None
        if isinstance(attention, Mapping) and not attention.get("no_op"):
            shares.add(_whole(attention, "n_heads_in_group"))
    if len(shares) != 1:
        found = f"{len(shares)} different ones" if shares else "none"
        raise BadInput(
            "config.json: block_configs must give one n_heads_in_group", found, "SGLang serves no variable GQA either"
        )
    heads = _whole(config, "num_attention_heads") // shares.pop()
    return (_full(config, tuple(range(count)), kv_heads=max(1, heads)),), (
        "layers without attention are counted by SGLang's pool",
    )


def jet_nemotron(config: Config) -> Groups:
    """Jet-Nemotron: `attn` and `swa` layers keep K and V, `jet` layers a linear-attention state."""
    types = _layer_types(config, _layers(config), {"attn": "full", "swa": "full", "jet": "linear"})
    jet = (
        (config.get("efficient_attention_config") or {}).get("jet")
        if config.get("efficient_attention_config")
        else None
    )
    if not isinstance(jet, Mapping):
        raise BadInput(
            "config.json must give efficient_attention_config.jet", "nothing", "use the model's original config.json"
        )
    heads, k_dim, expand = _whole(jet, "num_heads"), _whole(jet, "head_dim"), jet.get("expand_v", 1)
    if isinstance(expand, bool) or not isinstance(expand, int | float) or not 0 < expand < 1024:
        raise BadInput("config.json: expand_v must be a number above 0", repr(expand)[:40], "check the file")
    v_dim = int(k_dim * expand)
    state = RecurrentState(
        kind="gdn",
        num_heads=heads,
        head_dim=v_dim,
        state_size=k_dim,
        n_groups=heads,
        intermediate_size=heads * v_dim,
        conv_kernel=_whole(jet, "conv_size"),
    )
    return _hybrid(config, types, state)


def mla_or_dense(config: Config) -> Groups:
    """Families of which some models keep an MLA latent (those with kv_lora_rank) and others K and V."""
    return mla(config) if config.get("kv_lora_rank") is not None and config.get("use_mla", True) else dense(config)


class Row:
    """One architecture: its reader, its source, and what else its family needs to say."""

    def __init__(
        self,
        read: Callable[[Config], Groups],
        source: str,
        *,
        draft: tuple[str, ...] = (),
        swa_since: str | None = None,
        multimodal: bool = False,
        draft_always: int | None = None,
    ) -> None:
        self.read, self.source, self.draft, self.swa_since = read, source, draft, swa_since
        self.multimodal, self.draft_always = multimodal, draft_always


def _rows(names: str, read: Callable[[Config], Groups], source: str, **more: Any) -> dict[str, Row]:
    return {name: Row(read, source, **more) for name in names.split()}


_MC = "SGLang configs/model_config.py"
_NEXTN = ("num_nextn_predict_layers",)
_MTP = ("mtp_num_hidden_layers", "num_nextn_predict_layers")

TABLE: dict[str, Row] = {
    **_rows(
        "LlamaForCausalLM Phi3ForCausalLM InternLM3ForCausalLM IQuestCoderForCausalLM MistralForCausalLM "
        "MixtralForCausalLM "
        "QuantMixtralForCausalLM Ministral3ForCausalLM ArceeForCausalLM ApertusForCausalLM SolarForCausalLM",
        dense,
        f"{_MC} get_num_kv_heads; models/llama.py, mistral.py, mixtral.py",
    ),
    **_rows(
        "Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen3ForCausalLM",
        dense,
        f"{_MC}; models/qwen2.py, qwen2_moe.py, qwen3.py",
    ),
    **_rows("Qwen3MoeForCausalLM", dense, f"{_MC}; models/qwen3_moe.py", draft=_NEXTN),
    **_rows(
        "Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration Qwen3VLForConditionalGeneration "
        "Qwen3VLMoeForConditionalGeneration Mistral3ForConditionalGeneration Gemma3ForConditionalGeneration "
        "Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration InternVLChatModel "
        "LlavaForConditionalGeneration "
        "Cohere2VisionForConditionalGeneration",
        dense,
        f"{_MC} hf_text_config; models of the same names",
        multimodal=True,
    ),
    **_rows(
        "GemmaForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM",
        dense,
        f"{_MC}: not in is_hybrid_swa_model; models/gemma*.py",
    ),
    **_rows(
        "Gemma4ForCausalLM", gemma4, "SGLang utils/hf_transformers/config.py (global_* fields)", swa_since="0.5.11"
    ),
    **_rows(
        "Gemma4ForConditionalGeneration",
        gemma4,
        "SGLang utils/hf_transformers/config.py (global_* fields)",
        swa_since="0.5.11",
        multimodal=True,
    ),
    **_rows(
        "Gemma4UnifiedForConditionalGeneration",
        gemma4,
        "SGLang utils/hf_transformers/config.py (global_* fields)",
        swa_since="0.5.13",
        multimodal=True,
    ),
    **_rows("GptOssForCausalLM", sliding_by_type, f"{_MC} get_hybrid_layer_ids", swa_since="0.5.11"),
    **_rows("LagunaForCausalLM", sliding_by_type, f"{_MC} get_hybrid_layer_ids", swa_since="0.5.12"),
    **_rows("MellumForCausalLM", sliding_by_type, f"{_MC} get_hybrid_layer_ids", swa_since="0.5.16"),
    **_rows(
        "Llama4ForConditionalGeneration", llama4, f"{_MC} get_hybrid_layer_ids", swa_since="0.5.11", multimodal=True
    ),
    **_rows("MiMoV2FlashForCausalLM", mimo_v2, f"{_MC} MIMO_V2_MODEL_ARCHS", swa_since="0.5.11", draft=_NEXTN),
    **_rows(
        "MiMoV2ForCausalLM", mimo_v2, f"{_MC} MIMO_V2_MODEL_ARCHS", swa_since="0.5.11", draft=_NEXTN, multimodal=True
    ),
    **_rows(
        "Step3p5ForCausalLM",
        step3p5,
        f"{_MC} get_hybrid_layer_ids, get_swa_num_kv_heads",
        swa_since="0.5.11",
        draft=_NEXTN,
    ),
    **_rows("MiMoForCausalLM", dense, f"{_MC}; models/mimo.py", draft=_NEXTN),
    **_rows("DeepseekForCausalLM", dense, f"{_MC}; models/deepseek.py"),
    **_rows(
        "DeepseekV2ForCausalLM DeepseekV3ForCausalLM DeepseekV32ForCausalLM",
        mla,
        f"{_MC} MLA branch, is_deepseek_dsa",
        draft=_NEXTN,
    ),
    **_rows(
        "GlmMoeDsaForCausalLM Glm4MoeLiteForCausalLM MistralLarge3ForCausalLM",
        mla,
        f"{_MC} MLA branch, is_deepseek_dsa",
        draft=_NEXTN,
    ),
    **_rows(
        "KimiK25ForConditionalGeneration KimiVLForConditionalGeneration",
        mla,
        f"{_MC} MLA branch",
        draft=_NEXTN,
        multimodal=True,
    ),
    **_rows("MiniCPM3ForCausalLM SarvamMLAForCausalLM", mla, f"{_MC} MLA branch"),
    **_rows("LongcatFlashForCausalLM", mla_twice, f"{_MC}: num_attention_layers = 2 * num_hidden_layers", draft=_NEXTN),
    **_rows(
        "KimiLinearForCausalLM KimiK3LinearForCausalLM", kimi_linear, "SGLang configs/kimi_linear.py, mamba_utils.py"
    ),
    **_rows(
        "KimiK3ForConditionalGeneration",
        kimi_linear,
        "SGLang configs/kimi_linear.py; models/kimi_k3.py (0.5.18)",
        multimodal=True,
    ),
    **_rows("BailingMoeV2_5ForCausalLM", bailing_linear, "SGLang configs/bailing_hybrid.py", draft=_NEXTN),
    **_rows(
        "BailingMoEForCausalLM BailingMoeForCausalLM BailingMoeV2ForCausalLM",
        dense,
        f"{_MC}; models/bailing_moe.py",
        draft=_NEXTN,
    ),
    **_rows("Qwen3NextForCausalLM", gdn, "SGLang configs/qwen3_next.py, mamba_utils.py", draft=_NEXTN, draft_always=1),
    **_rows(
        "Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration",
        gdn,
        "SGLang configs/qwen3_5.py, qwen3_next.py",
        draft=_MTP,
        multimodal=True,
    ),
    **_rows(
        "Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM",
        gdn,
        "SGLang configs/qwen3_5.py; models/qwen3_5_text.py (0.5.23)",
        draft=_MTP,
    ),
    **_rows("NemotronHForCausalLM", nemotron_h, "SGLang configs/nemotron_h.py, mamba_utils.py", draft=_NEXTN),
    **_rows(
        "NemotronH_Nano_VL_V2 NemotronH_Nano_Omni_Reasoning_V3",
        nemotron_h,
        "SGLang configs/nano_nemotron_vl.py, nemotron_h.py",
        draft=_NEXTN,
        multimodal=True,
    ),
    **_rows("FalconH1ForCausalLM", falcon_h1, "SGLang configs/falcon_h1.py, mamba_utils.py"),
    **_rows("GraniteMoeHybridForCausalLM", granite_hybrid, "SGLang configs/granitemoehybrid.py, mamba_utils.py"),
    **_rows("Lfm2ForCausalLM Lfm2MoeForCausalLM", lfm2, "SGLang configs/lfm2.py, lfm2_moe.py"),
    **_rows("MiniMaxM2ForCausalLM", dense, f"{_MC}; models/minimax_m2.py", draft=_NEXTN),
    **_rows(
        "MiniMaxM3SparseForCausalLM",
        minimax_m3,
        "SGLang model_executor/pool_configurator.py is_minimax_sparse",
        draft=_NEXTN,
    ),
    **_rows(
        "MiniMaxM3SparseForConditionalGeneration",
        minimax_m3,
        "SGLang model_executor/pool_configurator.py is_minimax_sparse",
        draft=_NEXTN,
        multimodal=True,
    ),
    **_rows("Glm4ForCausalLM GlmForCausalLM", dense, f"{_MC}; models/glm4.py"),
    **_rows("Glm4MoeForCausalLM", dense, f"{_MC}; models/glm4_moe.py", draft=_NEXTN),
    **_rows("GraniteForCausalLM GraniteMoeForCausalLM", dense, f"{_MC}; models/granite.py, granitemoe.py"),
    **_rows("OlmoForCausalLM Olmo2ForCausalLM OlmoeForCausalLM", dense, f"{_MC}; models/olmo.py, olmo2.py, olmoe.py"),
    **_rows("CohereForCausalLM Cohere2ForCausalLM", dense, f"{_MC}; models/commandr.py"),
    **_rows(
        "ExaoneForCausalLM Exaone4ForCausalLM ExaoneMoEForCausalLM", dense, f"{_MC}; models/exaone*.py", draft=_NEXTN
    ),
    **_rows(
        "PhiForCausalLM PhiMoEForCausalLM StableLmForCausalLM Starcoder2ForCausalLM",
        dense,
        f"{_MC}; models of the same names",
    ),
    **_rows("InternLM2ForCausalLM XverseForCausalLM OrionForCausalLM", dense, f"{_MC}; models of the same names"),
    **_rows("HunYuanMoEV1ForCausalLM HunYuanDenseV1ForCausalLM", dense, f"{_MC}; models/hunyuan.py"),
    **_rows("Ernie4_5_ForCausalLM Ernie4_5_MoeForCausalLM", dense, f"{_MC}; models/ernie4.py", draft=_NEXTN),
    **_rows("SDARForCausalLM SDARMoeForCausalLM", dense, f"{_MC}; models/sdar.py, sdar_moe.py"),
    **_rows(
        "Step3VLForConditionalGeneration Qwen3OmniMoeForConditionalGeneration VoxtralForConditionalGeneration "
        "Gemma3nForConditionalGeneration InternS1ForConditionalGeneration",
        dense,
        f"{_MC} hf_text_config; models of the same names",
        multimodal=True,
    ),
    **_rows("Ernie4_5_VLMoeForConditionalGeneration", dense, f"{_MC}; models/ernie45_vl.py", multimodal=True),
    **_rows(
        "DbrxForCausalLM Gemma3nForCausalLM AfmoeForCausalLM Grok1ForCausalLM Grok1ModelForCausalLM BaichuanForCausalLM "
        "ChatGLMModel Phi3SmallForCausalLM MiniCPMForCausalLM GPT2LMHeadModel GPTJForCausalLM OPTForCausalLM TeleFLMForCausalLM "
        "SarvamMoEForCausalLM XverseMoeForCausalLM LLaDA2MoeModelLM",
        dense,
        f"{_MC} get_total_num_kv_heads; models of the same names",
    ),
    **_rows("GPTBigCodeForCausalLM", dense, f"{_MC} get_total_num_kv_heads (multi_query); models/gpt_bigcode.py"),
    **_rows("HYV3ForCausalLM", dense, f"{_MC}; models/hunyuan_v3.py", draft=_NEXTN),
    **_rows("DeciLMForCausalLM", nemotron_nas, f"{_MC} get_total_num_kv_heads (nemotron-nas)"),
    **_rows("JetNemotronForCausalLM", jet_nemotron, "SGLang configs/jet_nemotron.py, mamba_utils.py"),
    **_rows("PixtralForConditionalGeneration", mla_or_dense, f"{_MC} MLA branch with kv_lora_rank", multimodal=True),
    **_rows("DeepseekVL2ForCausalLM", mla_or_dense, f"{_MC} MLA branch with use_mla", multimodal=True),
    **_rows(
        "InternS2PreviewForConditionalGeneration", gdn, "SGLang configs/interns2preview.py", draft=_MTP, multimodal=True
    ),
    **_rows("IQuestLoopCoderForCausalLM", looped, f"{_MC}: num_attention_layers = num_hidden_layers * loop_num"),
}


#: Architectures that were read and left out on purpose, with what a row would need.
LEFT_OUT: dict[str, str] = {
    **dict.fromkeys(
        ("DeepseekV4ForCausalLM", "DeepseekV4ForCausalLMNextN", "DeepseekV4ForCausalLMDSpark"),
        "its five pools (sliding, 4x and 128x compressed, two states) follow a formula that differs in every "
        "release read "
        "(pool_configurator.py:DSV4PoolConfigurator); read bytes_per_full_token in the server's log",
    ),
    "MllamaForConditionalGeneration": "cross-attention layers keep image tokens, which no text length gives",
    "ZayaForCausalLM": "its attention layers keep a second, convolutional state of their own (configs/zaya.py)",
}


def architecture_name(config: Config) -> str:
    """The name in `architectures`, as SGLang takes it (the first one).

    Raises:
        BadInput: the configuration names none.
    """
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str) and names[0].strip():
        return names[0]
    nested, _ = text_config(config)
    inner = nested.get("architectures")
    if nested is not config and isinstance(inner, list) and inner and isinstance(inner[0], str):
        return inner[0]
    raise BadInput(
        "config.json must name the model in `architectures`", repr(names)[:60], "use the model's original config.json"
    )


def architecture(config: Config) -> Architecture:
    """Layer groups of the model that config.json describes.

    Args:
        config: the parsed config.json.

    Raises:
        UnknownArchitecture: no row for this name; the message names the nearest known ones and what a row needs.
        BadInput: the row needs a field that the configuration lacks or contradicts.

    Source: the row's `source`. Example: Llama-3.1-8B gives one group, 32 layers, 8 KV heads, head_dim 4096 / 32 = 128
    (derived).
    """
    name = architecture_name(config)
    row = TABLE.get(name)
    if row is None:
        if name in LEFT_OUT:
            raise UnknownArchitecture(
                "expected an architecture with a known memory layout", name, LEFT_OUT[name] + _compressed(config)
            )
        near = difflib.get_close_matches(name[:100], TABLE, n=3, cutoff=0.5)
        raise UnknownArchitecture(
            "expected an architecture with a known memory layout"
            + (
                f" (nearest known: {', '.join(near)}; not used, since a similar name says nothing about the layout)"
                if near
                else ""
            ),
            name[:100],
            "add a row to lib/model/architectures.py: which layers keep K and V, which a window, a latent or a fixed "
            "state, and the source",
        )
    text, nested = text_config(config)
    if name == "DeepseekV2ForCausalLM" and text.get("kv_lora_rank") is None:
        raise BadInput("config.json must give kv_lora_rank", "nothing", "use the model's original config.json")
    groups, notes = row.read(text)
    if not groups:
        raise BadInput("config.json must describe at least one layer", "none", "use the model's original config.json")
    vision = next((config[k] for k in ("vision_config", "vit_config") if isinstance(config.get(k), Mapping)), None)
    return Architecture(
        name=name,
        groups=groups,
        num_hidden_layers=sum(1 for _ in range(_layers_or_pattern(text, groups))),
        nested=nested,
        draft_layers=_draft(row, text, config),
        multimodal=row.multimodal and (vision is not None or name.endswith("ConditionalGeneration")),
        vision_layers=_optional(vision, "num_hidden_layers", "depth") if vision else None,
        vision_layers_named=bool(vision and vision.get("num_hidden_layers") is not None),
        vision_hidden_size=_optional(vision, "hidden_size") if vision else None,
        hybrid_swa_since=row.swa_since,
        exceptions=notes,
        source=row.source,
    )


def _compressed(config: Config) -> str:
    """The cost of a token of full context on the releases of which it is known, for the refusal's text."""
    told = []
    for version in ("0.5.12", "0.5.15.post1"):
        try:
            cost = bytes_per_full_token(text_config(config)[0], version)
        except BadInput:
            return ""
        if cost is not None:
            told.append(f"{cost.bytes_per_full_token:.2f} on {version}")
    return f"; without MTP and with a sliding share of 0.1 it says {' and '.join(told)}"


def _layers_or_pattern(text: Config, groups: tuple[LayerGroup, ...]) -> int:
    for key in ("hybrid_override_pattern", "layers_block_type"):
        if isinstance(text.get(key), (str, list)):
            return len(text[key])
    if text.get("num_hidden_layers") is None and text.get("n_layer") is None and text.get("num_layers") is None:
        return sum(len(group.layers) for group in groups)
    return _layers(text)


def _draft(row: Row, text: Config, config: Config) -> int | None:
    """MTP layers that the configuration declares; 0 when the family has such a field and it says none."""
    for key in row.draft:
        for where in (text, config):
            if where.get(key) is not None:
                return _whole(where, key, low=0)
    return row.draft_always
