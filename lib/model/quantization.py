"""What a checkpoint's files declare about precision, and which KV cache dtype SGLang makes of it. Pure.

Two files may speak: `quantization_config` in config.json (also under text_config, also called compression_config) and
hf_quant_config.json. SGLang takes the first it finds in that order; the rules below say what each version reads out
of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from lib.errors import BadInput
from lib.model.facts import (
    DEFAULT_SGLANG_VERSION,
    VERSIONS_READ,
    Checkpoint,
    Quantization,
    since,
    version_key,
    version_note,
)

Config = Mapping[str, Any]

#: Spellings of the KV cache dtype flag and of torch's dtypes, to torch's name. Source: SGLang server_args.py,
#: kv_cache_dtype.py.
KV_DTYPES: dict[str, str] = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "float16": "float16",
    "float32": "float32",
    "float": "float32",
    "fp8_e4m3": "float8_e4m3fn",
    "float8_e4m3fn": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "float8_e5m2": "float8_e5m2",
    "float8_e4m3fnuz": "float8_e4m3fnuz",
    "fp4_e2m1": "float4_e2m1fn_x2",
    "nvfp4": "float4_e2m1fn_x2",
    "fp4_mx_block16": "float4_e2m1fn_x2",
    "float4_e2m1fn_x2": "float4_e2m1fn_x2",
    "mxfp8": "float8_e4m3fn",
}

#: Bytes per element; the 4-bit type is counted with its block scales apart (`memory`).
DTYPE_BYTES: dict[str, float] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float4_e2m1fn_x2": 0.5,
}

_FLAGS_11 = ("auto", "fp8_e5m2", "fp8_e4m3", "bf16", "bfloat16", "fp4_e2m1")
_FLAGS_16 = ("auto", "fp8_e5m2", "fp8_e4m3", "bf16", "bfloat16", "mxfp8", "nvfp4", "fp4_mx_block16")


class KvCacheDtype(NamedTuple):
    """The torch dtype SGLang gives the KV cache, and why."""

    dtype: str
    why: str


class ScalesLoaded(NamedTuple):
    """Whether this release puts the checkpoint's k/v scales into the model (None: not established), and why."""

    loaded: bool | None
    why: str


def torch_name(text: str) -> str:
    """Torch's name of a dtype spelled like a flag, a config value or a log line (`torch.bfloat16`, `bf16`,
    `fp8_e4m3`).

    Raises:
        BadInput: not a KV cache dtype.
    """
    name = KV_DTYPES.get(str(text).strip().lower().removeprefix("torch."))
    if name is None:
        raise BadInput(
            f"expected a KV cache dtype, one of {', '.join(sorted(KV_DTYPES))}", repr(text)[:60], "check the spelling"
        )
    return name


def model_dtype(config: Config, text: Config) -> str:
    """The dtype that the model (and a KV cache on `auto`) runs in, as SGLang derives it for `--dtype auto`.

    float32 checkpoints run as float16 (Gemma: bfloat16), MXFP4 gpt-oss always as bfloat16. Source:
    `configs/model_config.py: _get_and_verify_dtype`, `arg_groups/overrides.py`.
    """
    names = config.get("architectures")
    section = config.get("quantization_config")
    if (
        isinstance(section, Mapping)
        and section.get("quant_method") == "mxfp4"
        and names
        and names[0] == "GptOssForCausalLM"
    ):
        return "bfloat16"
    found = next((c[k] for c in (text, config) for k in ("dtype", "torch_dtype") if isinstance(c.get(k), str)), None)
    name = {"half": "float16", "float": "float32"}.get(
        str(found).removeprefix("torch."), str(found).removeprefix("torch.")
    )
    if found is None or name not in ("float16", "bfloat16", "float32"):
        name = "float32" if found is None or name not in DTYPE_BYTES else name
    if name == "float32":
        return "bfloat16" if str(text.get("model_type") or "").startswith("gemma") else "float16"
    return name


def _section(config: Config) -> tuple[Config | None, str | None]:
    """`quantization_config` as SGLang finds it, with its place."""
    for place, owner in (("config.json", config), ("config.json text_config", config.get("text_config"))):
        if isinstance(owner, Mapping) and isinstance(owner.get("quantization_config"), Mapping):
            return owner["quantization_config"], f"{place} quantization_config"
    if isinstance(config.get("compression_config"), Mapping):
        return config["compression_config"], "config.json compression_config"
    return None, None


def _nested(hf_quant_config: Config | None) -> Config | None:
    inner = (hf_quant_config or {}).get("quantization")
    return inner if isinstance(inner, Mapping) else None


def _word(scheme: Any) -> str | None:
    """A KV scheme or algorithm, in one word: fp8, nvfp4, mxfp8, int8, other; None when it says nothing."""
    if scheme is None or scheme == "" or scheme is False:
        return None
    if isinstance(scheme, Mapping):
        kind, bits = str(scheme.get("type", "float")).lower(), scheme.get("num_bits")
        if not scheme or bits is None and "dtype" not in scheme:
            return "other" if scheme else None
        if bits is None:
            return _word(str(scheme["dtype"]))
        return {"float 8": "fp8", "float 4": "nvfp4", "int 8": "int8"}.get(f"{kind} {bits}", "other")
    name = str(scheme).strip().upper()
    if name in ("AUTO", "NONE", "NULL"):
        return None
    if "MXFP8" in name:
        return "mxfp8"
    if name in ("FP8", "FLOAT8", "FP8_E4M3", "FP8_E5M2", "FLOAT8_E4M3FN", "FP8_PER_TENSOR"):
        return "fp8"
    if "FP4" in name or name == "FLOAT4":
        return "nvfp4"
    return "int8" if name == "INT8" else "other"


def _quark_kv(section: Config) -> Any:
    """Quark keeps the KV cache's form in `kv_cache_config` or in the layer_quant_config of k_proj/v_proj outputs."""
    cache = section.get("kv_cache_config") or (section.get("export") or {}).get("kv_cache_group")
    if isinstance(section.get("kv_cache_config"), Mapping):
        return section["kv_cache_config"]
    if cache and isinstance(section.get("layer_quant_config"), Mapping):
        for rule in section["layer_quant_config"].values():
            if isinstance(rule, Mapping) and isinstance(rule.get("output_tensors"), Mapping):
                return rule["output_tensors"]
    return None


_METHOD_BITS = {
    "modelopt_fp4": 4,
    "modelopt_fp8": 8,
    "fp8": 8,
    "fbgemm_fp8": 8,
    "mxfp4": 4,
    "mxfp8": 8,
    "w4afp8": 4,
    "petit_nvfp4": 4,
}


def _modelopt_method(section: Config) -> str | None:
    """The method that SGLang gives a ModelOpt section (`ModelConfig._parse_modelopt_quant_config`).

    SGLang tells mixed NVFP4 from W4AFP8 by `quantized_layers`; a 4-bit float group in `config_groups` says the same
    of a file whose list is abbreviated.
    """
    algo = section.get("quant_algo")
    if algo == "MIXED_PRECISION":
        layers, groups = section.get("quantized_layers"), section.get("config_groups")
        named = (
            [v.get("quant_algo") for v in layers.values() if isinstance(v, Mapping)]
            if isinstance(layers, Mapping)
            else []
        )
        wide = (
            [g.get("weights") for g in groups.values() if isinstance(g, Mapping)] if isinstance(groups, Mapping) else []
        )
        fp4 = any(str(name).upper() in ("NVFP4", "W4A16_NVFP4") for name in named) or any(
            isinstance(w, Mapping) and w.get("type") == "float" and w.get("num_bits") == 4 for w in wide
        )
        return "modelopt_mixed" if fp4 else "w4afp8"
    name = str(algo or "")
    return "modelopt_fp4" if "FP4" in name else "modelopt_fp8" if "FP8" in name else None


def declared_quantization(config: Config, hf_quant_config: Config | None = None) -> Quantization:
    """What the files declare about weights and KV cache, whatever SGLang then makes of it.

    Args:
        config: the parsed config.json.
        hf_quant_config: the parsed hf_quant_config.json, if the folder has one.

    Source: SGLang `configs/model_config.py:_parse_quant_hf_config`, `model_loader/weight_utils.py:get_quant_config`.
    Example: `kv_cache_scheme` may be an object, or only the string "FP8"; both declare fp8.
    """
    section, place = _section(config)
    nested = _nested(hf_quant_config)
    if section is None and nested is None:
        return Quantization(weights_method=None)
    said = [
        (key, where, owner[key])
        for owner, where in ((section, place), (nested, "hf_quant_config.json quantization"))
        if owner is not None
        for key in ("kv_cache_scheme", "kv_cache_quant_algo")
        if owner.get(key) not in (None, "", False)
    ]
    quark = _quark_kv(section) if section is not None and str(section.get("quant_method")).lower() == "quark" else None
    if quark is not None:
        said.append(("kv_cache_config", str(place), quark))
    words = [(f"{where}: {key}", _word(value)) for key, where, value in said]
    declared = [(where, word) for where, word in words if word]
    conflicts = []
    if len({word for _, word in declared}) > 1:
        conflicts.append(
            "the files disagree on the KV cache: " + "; ".join(f"{where} says {word}" for where, word in declared)
        )
    main: Config = section if section is not None else nested if nested is not None else {}
    method, algo = _method_and_algo(section, nested)
    if section is not None and nested is not None:
        theirs = nested.get("quant_algo")
        if algo and theirs and str(algo).upper() != str(theirs).upper():
            conflicts.append(
                f"the files disagree on the weights: {place} says {algo}, hf_quant_config.json says {theirs}"
            )
    layers = main.get("quantized_layers") or (nested or {}).get("quantized_layers")
    kinds = (
        Counter(str(v.get("quant_algo")) for v in layers.values() if isinstance(v, Mapping))
        if isinstance(layers, Mapping)
        else Counter()
    )
    ignored = next(
        (
            main[k]
            for k in ("ignore", "exclude_modules", "modules_to_not_convert", "exclude")
            if isinstance(main.get(k), list)
        ),
        None,
    )
    producer = main.get("producer") or (hf_quant_config or {}).get("producer")
    weights = _weights_group(main)
    bits = main.get("bits", main.get("w_bit", weights.get("num_bits", _METHOD_BITS.get(str(method)))))
    group = main.get("group_size", main.get("q_group_size", weights.get("group_size")))
    return Quantization(
        weights_method=method,
        weights_algo=str(algo) if algo else None,
        weights_bits=float(bits) if isinstance(bits, (int, float)) and 0 < bits <= 64 else None,
        group_size=group if isinstance(group, int) and not isinstance(group, bool) else None,
        producer=" ".join(str(producer.get(k, "")) for k in ("name", "version")).strip()
        if isinstance(producer, Mapping)
        else None,
        excluded_modules=len(ignored) if ignored is not None else None,
        quantized_layers=dict(kinds),
        kv_declared=declared[0][1] if declared else None,
        kv_declared_in=tuple(where for where, _ in declared),
        kv_scheme=said[0][2] if said else None,
        source=place or "hf_quant_config.json",
        conflicts=tuple(conflicts),
    )


#: safetensors dtypes in which a quantized weight may be stored (I32: packed by AWQ and GPTQ).
_NARROW_STORED = frozenset(
    ("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "I4", "U4", "F4", "I32", "U32", "F4_E2M1", "F6_E2M3", "F6_E3M2")
)


def weights_quantized(checkpoint: Checkpoint) -> bool | None:
    """Whether any weight is stored quantized, by the tensors' dtypes; None when no tensor list was available.

    A file that declares FP8 may exclude every linear layer, e.g. to have SGLang take its form of the KV cache. Dtypes
    say it whatever the exclude list says. Methods that quantize on loading (an unquantized checkpoint served with
    --quantization) declare nothing here.
    """
    if not checkpoint.parameters_by_dtype:
        return None
    return bool(_NARROW_STORED & {name.upper() for name in checkpoint.parameters_by_dtype})


def _weights_group(section: Config) -> Config:
    groups = section.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping):
            return group["weights"]
    return {}


def _method_and_algo(section: Config | None, nested: Config | None) -> tuple[str | None, Any]:
    if section is None:
        return (_modelopt_method(nested), nested.get("quant_algo")) if nested is not None else (None, None)
    method = section.get("quant_method")
    algo = section.get("quant_algo")
    if method is None or str(method).lower().startswith("modelopt"):
        return _modelopt_method(section) or (str(method) if method else None), algo
    if algo == "MIXED_PRECISION" and str(section.get("moe_quant_algo", "")).upper() == "NVFP4":
        return str(method).lower(), "FP8 + NVFP4 experts"
    return str(method).lower(), algo or section.get("fmt") or section.get("format")


def kv_cache_quant_algo(checkpoint: Checkpoint, sglang_version: str = DEFAULT_SGLANG_VERSION) -> KvCacheDtype:
    """The `kv_cache_quant_algo` that this SGLang's quantization class ends up with (as `.dtype`), and where it comes
    from.

    Source: `layers/quantization/modelopt_quant.py` from_config of the FP4, FP8 and mixed classes; `fp8.py` (attribute
    since 0.5.18); `compressed_tensors.py` (since 0.5.19); `weight_utils.py:get_quant_config`.
    """
    section, place = _section(checkpoint.config)
    nested = _nested(checkpoint.hf_quant_config)
    method = checkpoint.quantization.weights_method
    flat_read = since(sglang_version, "0.5.15")
    if method in ("modelopt_fp4", "modelopt_fp8", "modelopt_mixed"):
        mixed_gap = (
            method == "modelopt_mixed"
            and flat_read
            and section is not None
            and nested is not None
            and ("quantized_layers" not in section or not {"kv_cache_quant_algo", "kv_cache_scheme"} & set(section))
        )
        if section is not None and section.get("quant_algo") is not None and not mixed_gap:
            return _flat_algo(section, str(place), method, sglang_version, flat_read)
        if nested is not None:
            algo = nested.get("kv_cache_quant_algo")
            return KvCacheDtype(
                str(algo) if algo else "auto", f"hf_quant_config.json says kv_cache_quant_algo {algo!r}"
            )
        if section is not None and isinstance(section.get("quantization"), Mapping):
            algo = section["quantization"].get("kv_cache_quant_algo")
            return KvCacheDtype(str(algo) if algo else "auto", f"{place} says kv_cache_quant_algo {algo!r}")
        return KvCacheDtype("auto", f"{place} names no quant_algo")
    if method in ("fp8", "mxfp8") and section is not None:
        if not since(sglang_version, "0.5.18"):
            return KvCacheDtype(
                "auto", f"SGLang {sglang_version} reads no KV form from a {method} checkpoint (it does from 0.5.18)"
            )
        algo = section.get("kv_cache_quant_algo")
        return KvCacheDtype(str(algo) if algo else "auto", f"{place} says kv_cache_quant_algo {algo!r}")
    if method in ("compressed-tensors", "compressed_tensors") and section is not None:
        scheme = section.get("kv_cache_scheme")
        if scheme is None:
            return KvCacheDtype("auto", f"{place} has no kv_cache_scheme")
        if not since(sglang_version, "0.5.19"):
            return KvCacheDtype(
                "auto", f"SGLang {sglang_version} ignores compressed-tensors' kv_cache_scheme (read from 0.5.19)"
            )
        fits = (
            isinstance(scheme, Mapping)
            and scheme.get("type") == "float"
            and scheme.get("num_bits") == 8
            and scheme.get("strategy") == "tensor"
            and scheme.get("symmetric", True)
            and not scheme.get("dynamic", False)
        )
        if fits:
            return KvCacheDtype("FP8", f"{place} has a static symmetric per-tensor FP8 kv_cache_scheme")
        return KvCacheDtype(
            "auto", f"{place} has a kv_cache_scheme other than static symmetric per-tensor FP8, which is ignored"
        )
    if method == "petit_nvfp4" and nested is not None:
        algo = nested.get("kv_cache_quant_algo")
        return KvCacheDtype(str(algo) if algo else "auto", f"hf_quant_config.json says kv_cache_quant_algo {algo!r}")
    if method is None and nested is not None:
        return KvCacheDtype(
            "auto", "hf_quant_config.json names no quant_algo, so SGLang loads the model as unquantized"
        )
    return KvCacheDtype(
        "auto", f"the {method} method carries no KV form" if method else "the checkpoint declares no quantization"
    )


def _flat_algo(section: Config, place: str, method: str, version: str, flat_read: bool) -> KvCacheDtype:
    """`kv_cache_scheme` or, from 0.5.15, `kv_cache_quant_algo` of a flat ModelOpt section."""
    scheme = section.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        is_float, bits = scheme.get("type") == "float", scheme.get("num_bits")
        if is_float and bits == 8:
            return KvCacheDtype("FP8", f"{place} has kv_cache_scheme 8-bit float")
        word = "NVFP4" if method == "modelopt_mixed" and is_float and bits == 4 else "auto"
        return KvCacheDtype(
            word, f"{place} has kv_cache_scheme {bits}-bit {scheme.get('type')}, which SGLang doesn't take for FP8"
        )
    if isinstance(scheme, str) and method == "modelopt_fp4":
        name = scheme.strip().upper()
        word = "FP8" if name in ("FP8", "FLOAT8") else "NVFP4" if name in ("FP4", "FLOAT4", "NVFP4") else "auto"
        return KvCacheDtype(word, f"{place} has kv_cache_scheme {scheme!r}")
    text = (
        f"{place} has kv_cache_scheme {scheme!r}, a string, which the {method} class passes over; "
        if isinstance(scheme, str)
        else ""
    )
    if not flat_read:
        return KvCacheDtype("auto", f"{text}SGLang {version} reads no flat kv_cache_quant_algo (it does from 0.5.15)")
    algo = section.get("kv_cache_quant_algo")
    return KvCacheDtype(str(algo) if algo else "auto", f"{text}{place} says kv_cache_quant_algo {algo!r}")


def resolve_kv_cache_dtype(
    checkpoint: Checkpoint,
    flag: str = "auto",
    sglang_version: str = DEFAULT_SGLANG_VERSION,
    *,
    platform: str = "cuda",
    sm: int | None = None,
) -> KvCacheDtype:
    """The torch dtype that SGLang's KV cache gets, and why.

    Args:
        checkpoint: the model.
        flag: the value of --kv-cache-dtype.
        sglang_version: the release that serves it.
        platform: cuda, hip or cpu.
        sm: the GPU's compute capability, major part (DeepSeek sparse attention picks by it).

    Raises:
        BadInput: the flag isn't a choice of that release.

    Source: SGLang 0.5.15.post1 `model_executor/model_runner.py:configure_kv_cache_dtype`, 0.5.23
    `mem_cache/kv_cache_dtype.py`.
    Example: kv_cache_quant_algo FP8 and `auto` give float8_e4m3fn (never e5m2).
    """
    value = str(flag).strip().lower()
    choices = _FLAGS_16 if since(sglang_version, "0.5.16") else _FLAGS_11
    if value not in choices:
        raise BadInput(
            f"expected --kv-cache-dtype of SGLang {sglang_version}, one of {', '.join(choices)}",
            repr(flag)[:60],
            "check the flag",
        )
    note = version_note(sglang_version)
    tail = f" ({note})" if note else ""
    own = checkpoint.torch_dtype or "bfloat16"
    fp8 = "float8_e4m3fn"
    if value != "auto":
        if platform == "hip" and value.startswith("fp8"):
            return KvCacheDtype(
                fp8, f"--kv-cache-dtype {value}; HIP takes its own e4m3 (fnuz on gfx94) for both forms{tail}"
            )
        return KvCacheDtype(torch_name(value), f"--kv-cache-dtype {value}{tail}")
    architecture = checkpoint.architecture
    group = architecture.group("mla") if architecture else None
    if group is not None and group.index_head_dim and platform == "cuda":
        if sm is None:
            return KvCacheDtype(
                own if own != "float16" else "bfloat16",
                "auto with sparse attention (DSA) is decided by the GPU: float8_e4m3fn from SM100 on, bfloat16 "
                "below; no GPU given, taken as below" + tail,
            )
        dtype = fp8 if sm >= 10 else "bfloat16"
        return KvCacheDtype(dtype, f"auto with sparse attention (DSA) on SM{sm}x gives {dtype}{tail}")
    algo, why = kv_cache_quant_algo(checkpoint, sglang_version)
    if algo.upper() == "FP8":
        return KvCacheDtype(fp8, f"auto, and {why}{tail}")
    if algo.upper() not in ("AUTO", "NONE"):
        why = f"{why}; only FP8 is taken over by auto, so the KV cache silently stays in the model's dtype"
    return KvCacheDtype(own, f"auto: {why}; the model's own dtype{tail}")


#: Architectures whose loader maps checkpoint k/v scale names *and* whose attention layers are given the quantization
#: (so that the
#: parameters exist), by the release that began to. Source: models/*.py of each release in VERSIONS_READ:
#: RadixAttention(...,
#: quant_config=...) together with maybe_remap_kv_scale_name, QWEN3_5_KV_SCALE_MAPPER or an explicit k_proj.k_scale
#: rule.
SCALE_LOADERS: dict[str, str] = {
    **dict.fromkeys(
        [
            "LlamaForCausalLM",
            "Phi3ForCausalLM",
            "InternLM3ForCausalLM",
            "IQuestCoderForCausalLM",
            "MistralForCausalLM",
            "ArceeForCausalLM",
            "ApertusForCausalLM",
            "CohereForCausalLM",
            "Cohere2ForCausalLM",
            "Exaone4ForCausalLM",
            "Gemma4ForCausalLM",
            "GraniteMoeHybridForCausalLM",
            "MiniMaxM2ForCausalLM",
            "NemotronHForCausalLM",
            "PhiMoEForCausalLM",
            "Qwen3NextForCausalLM",
        ],
        "0.5.11",
    ),
    **dict.fromkeys(["MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration"], "0.5.16"),
    **dict.fromkeys(["Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"], "0.5.17"),
}

#: Architectures read to leave the scales out in every release of VERSIONS_READ, and why.
SCALE_DROPPERS: dict[str, str] = {
    **dict.fromkeys(
        [
            "Qwen3ForCausalLM",
            "HunYuanMoEV1ForCausalLM",
            "HunYuanDenseV1ForCausalLM",
            "SDARForCausalLM",
            "SDARMoeForCausalLM",
        ],
        "its attention layers are built without the quantization, so there is no parameter to load into; the log "
        "says 'not loaded'",
    ),
    **dict.fromkeys(
        [
            "Qwen2ForCausalLM",
            "Qwen2MoeForCausalLM",
            "Qwen3MoeForCausalLM",
            "MixtralForCausalLM",
            "Glm4MoeForCausalLM",
            "GptOssForCausalLM",
            "GraniteForCausalLM",
            "Olmo2ForCausalLM",
            "ExaoneForCausalLM",
            "Step3p5ForCausalLM",
        ],
        "its loader maps no k/v scale names",
    ),
}


def scales_loaded(checkpoint: Checkpoint, sglang_version: str = DEFAULT_SGLANG_VERSION) -> ScalesLoaded:
    """Whether this SGLang loads the checkpoint's k/v scales into its attention layers, and why.

    It needs tensors, a quantization method that creates the parameters, and a model class that hands the method to
    its attention layers and maps the names. None: the model class was not read.

    Source: `layers/quantization/kv_cache.py`, `weight_utils.py:maybe_remap_kv_scale_name`, the model files
    (SCALE_LOADERS).
    Example: Qwen3.5 drops them up to 0.5.16 and loads them from 0.5.17 on; a Qwen3 never does (seen in a 0.5.15.post1
    log).
    """
    scales, name, method = checkpoint.scales, checkpoint.architecture_name, checkpoint.quantization.weights_method
    if scales is None:
        return ScalesLoaded(None, "no tensor list was available")
    if not scales.present:
        return ScalesLoaded(False, "the checkpoint has no k_scale or v_scale tensors; SGLang uses 1.0")
    algo = kv_cache_quant_algo(checkpoint, sglang_version).dtype.upper()
    creates = {
        "modelopt_fp4": True,
        "modelopt_fp8": algo not in ("AUTO", "NONE"),
        "modelopt_mixed": algo not in ("AUTO", "NONE"),
        "fp8": True,
        "quark": True,
        "compressed-tensors": algo == "FP8",
    }.get(str(method), False)
    if not creates:
        what = f"quantization {method or 'none'}{f' with KV form {algo}' if method else ''}"
        return ScalesLoaded(
            False, f"{what} creates no scale parameters in SGLang {sglang_version}; the tensors are left out"
        )
    if name in SCALE_DROPPERS:
        return ScalesLoaded(False, f"{name}: {SCALE_DROPPERS[name]}")
    first = SCALE_LOADERS.get(name)
    if first is None:
        return ScalesLoaded(None, f"not established for {name}: its model file was not read for k/v scales")
    if not since(sglang_version, first) and version_key(first) > version_key(VERSIONS_READ[0]):
        return ScalesLoaded(False, f"the loader of {name} drops them before {first}")
    return ScalesLoaded(
        True, f"{method} creates the parameters and the loader of {name} maps the names ({first} and later)"
    )
