"""What SGLang does with a checkpoint's KV scales, by version, class and attention backend; and what `auto` becomes.

Three questions decide every KV finding, and none of them is answered by a log line alone:
which dtype the pool has, whether the scales of the checkpoint reach the attention layer, and what the backend does with
them when it reads the pool. The tables below hold what was measured on a real server and what was read in the wheels
named in READ; between them nothing is guessed, the answer is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lib.audit.facts import Fact, Facts, How, dtype_family, make_fact, torch_dtype, version_key

#: The wheels in which the tables below were read. An older or newer version is extrapolated and says so.
READ = ("0.5.11", "0.5.16", "0.5.17", "0.5.18", "0.5.20", "0.5.23")
READ_FROM, READ_TO = (0, 5, 11, 0), (0, 5, 23, 99)

Version = tuple[int, int, int, int]


@dataclass(frozen=True)
class Loader:
    """One row of LOADERS: from which version on a class loads k_scale/v_scale (None: in none of the wheels read)."""

    classes: tuple[str, ...]
    loads_from: Version | None
    how: How
    source: str


_V11, _V16, _V18, _V20, _V23 = (0, 5, 11, 0), (0, 5, 16, 0), (0, 5, 18, 0), (0, 5, 20, 0), (0, 5, 23, 0)
_REMAP = "sglang/srt/models: load_weights calls maybe_remap_kv_scale_name (wheels 0.5.11 to 0.5.23)"

LOADERS: tuple[Loader, ...] = (
    Loader(
        ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration", "Qwen3_5ForCausalLM"),
        (0, 5, 17, 0),
        "read",
        "models/qwen3_5.py: QWEN3_5_KV_SCALE_MAPPER is in the wheels 0.5.17, 0.5.18, 0.5.20, 0.5.23 and not in 0.5.11, "
        "0.5.16; dropped on a real 0.5.16 (bit-identical logprobs with and without the tensors)",
    ),
    Loader(("Qwen3_5ForCausalLMMTP",), _V20, "read", "models/qwen3_5_mtp.py: the mapper is in 0.5.20 and 0.5.23"),
    Loader(("LlamaForCausalLM",), _V11, "read", _REMAP + "; measured on a real 0.5.16 with triton and flashinfer"),
    Loader(
        ("Qwen3NextForCausalLM",), _V11, "read", "models/qwen3_next.py rewrites k_proj.k_scale (0.5.11, 0.5.16, 0.5.23)"
    ),
    Loader(
        ("DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM"),
        _V11,
        "read",
        "models/deepseek_common/deepseek_weight_loader.py rewrites k_scale and v_scale (0.5.11, 0.5.16)",
    ),
    Loader(
        (
            "ApertusForCausalLM", "ArceeForCausalLM", "Cohere2ForCausalLM", "CohereForCausalLM", "DbrxForCausalLM",
            "DeciLMForCausalLM", "Exaone4ForCausalLM", "GPTJForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM",
            "Gemma3ForConditionalGeneration", "Gemma3nForCausalLM", "Gemma3nForConditionalGeneration",
            "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "HunYuanDenseV1ForCausalLM",
            "HunYuanMoEV1ForCausalLM", "IQuestCoderForCausalLM", "InternLM3ForCausalLM", "KimiLinearForCausalLM",
            "KimiVLForConditionalGeneration", "Llama4ForConditionalGeneration", "MiniMaxM2ForCausalLM",
            "NemotronHForCausalLM", "Phi3ForCausalLM", "PhiMoEForCausalLM", "Qwen3ForCausalLM", "SDARForCausalLM",
            "SDARMoeForCausalLM",
        ),
        _V11,
        "read",
        _REMAP,
    ),
    Loader(
        ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration", "NemotronHPuzzleForCausalLM"),
        _V16,
        "read",
        _REMAP,
    ),
    Loader(
        ("MuseGlimmerForCausalLM", "MuseGlimmerForConditionalGeneration", "KimiK3ForConditionalGeneration"),
        _V18,
        "read",
        _REMAP,
    ),
    Loader(
        ("Qwen3MoeForCausalLM", "Qwen2ForCausalLM", "MixtralForCausalLM", "Qwen2MoeForCausalLM"),
        None,
        "quoted",
        "sgl-project/sglang#39942 (open): the loaders do not map k_proj.k_scale; no mapper in the wheels read",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class ScaleUse:
    """One row of SCALE_USE: what a backend does with loaded scales when it reads a pool of this family.

    `effect` is `right`, `wrong`, or `unused` (neither written nor read with it, so the scale in effect is 1.0).
    """

    backend: str
    phase: str
    pool: str
    since: Version
    until: Version
    effect: str
    how: How
    measured_on: str | None
    source: str


_ALWAYS, _NEVER = (0, 0, 0, 0), (99, 0, 0, 0)
_TRITON = "layers/attention/triton_backend.py reads layer.k_scale_float without looking at the pool's dtype"
_FI_DECODE = "layers/attention/flashinfer_backend.py forward_decode passes k_scale_float whatever the pool's dtype"
_V9 = (0, 5, 9, 0)
_MLA = (
    "layers/attention/trtllm_mla_backend.py ignores k_scale for a pool that is not FP8 from the wheel 0.5.9 on "
    "(absent in "
    "0.5.8.post1); sgl-project/sglang#18396"
)
_FI_PREFILL = "layers/attention/flashinfer_backend.py forward_extend, paged forward_return_lse"
_NATIVE = "layers/attention/torch_native_backend.py neither divides nor multiplies by the scales"

#: Loaded scales against the pool's dtype: a 16-bit pool is written undivided, an FP8 pool divided by the scale.
SCALE_USE: tuple[ScaleUse, ...] = (
    ScaleUse("triton", "prefill", "16bit", _ALWAYS, _NEVER, "wrong", "read", "0.5.16", _TRITON),
    ScaleUse("triton", "decode", "16bit", _ALWAYS, _NEVER, "wrong", "read", "0.5.16", _TRITON),
    ScaleUse("triton", "prefill", "fp8", _ALWAYS, _NEVER, "right", "read", "0.5.16", _TRITON),
    ScaleUse("triton", "decode", "fp8", _ALWAYS, _NEVER, "right", "read", "0.5.16", _TRITON),
    ScaleUse("flashinfer", "decode", "16bit", _ALWAYS, _NEVER, "wrong", "read", "0.5.16", _FI_DECODE),
    ScaleUse("flashinfer", "decode", "fp8", _ALWAYS, _NEVER, "right", "read", "0.5.16", _FI_DECODE),
    ScaleUse(
        "flashinfer", "prefill", "16bit", _ALWAYS, _V18, "right", "read", "0.5.16", _FI_PREFILL + " has no scales"
    ),
    ScaleUse(
        "flashinfer", "prefill", "16bit", _V18, _NEVER, "wrong", "read", None,
        _FI_PREFILL + " passes the scales from 0.5.18 on",
    ),
    ScaleUse(
        "flashinfer", "prefill", "fp8", _ALWAYS, _V18, "wrong", "read", "0.5.16",
        _FI_PREFILL + " has no scales although the write divided; sgl-project/sglang#18904, #24198",
    ),
    ScaleUse("flashinfer", "prefill", "fp8", _V18, _NEVER, "right", "read", None, _FI_PREFILL + " passes the scales"),
    ScaleUse("torch_native", "prefill", "16bit", _ALWAYS, _NEVER, "right", "read", "0.5.16", _NATIVE),
    ScaleUse("torch_native", "decode", "16bit", _ALWAYS, _NEVER, "right", "read", "0.5.16", _NATIVE),
    ScaleUse("torch_native", "prefill", "fp8", _ALWAYS, _NEVER, "unused", "read", None, _NATIVE),
    ScaleUse("torch_native", "decode", "fp8", _ALWAYS, _NEVER, "unused", "read", None, _NATIVE),
    ScaleUse("trtllm_mla", "prefill", "16bit", _ALWAYS, _V9, "wrong", "quoted", None, _MLA),
    ScaleUse("trtllm_mla", "decode", "16bit", _ALWAYS, _V9, "wrong", "quoted", None, _MLA),
    ScaleUse("trtllm_mla", "prefill", "16bit", _V9, _NEVER, "right", "read", None, _MLA),
    ScaleUse("trtllm_mla", "decode", "16bit", _V9, _NEVER, "right", "read", None, _MLA),
    *(
        ScaleUse(
            "trtllm_mha", phase, pool, _V11, _NEVER, "right", "read", None,
            "layers/attention/trtllm_mha_backend.py _get_bmm_scales uses 1.0 unless the pool is e4m3",
        )
        for phase in ("prefill", "decode")
        for pool in ("16bit", "fp8")
    ),
)  # fmt: skip

#: Backends that cast the query (and on Triton also the softmax weights) to the pool's FP8 type.
QUERY_CAST = {
    "triton": "casts Q and the softmax weights P to FP8 when it reads the pool (decode casts Q from 0.5.12.post1 on)",
    "fa3": "casts Q to the KV dtype",
    "trtllm_mha": "casts Q to e4m3",
}

#: "before PR N" in a report, as the first wheel that has the change.
FIXED_IN: dict[int, Version] = {18396: (0, 5, 9, 0), 31220: (0, 5, 17, 0)}


def version_of(text: str | None) -> Version | None:
    """The version that a text names; `before PR 18396` is the last version without that change when FIXED_IN knows it.

    Example: `version_of("before PR 18396") < (0, 5, 9, 0)`.
    """
    key = version_key(text)
    if key or not text:
        return key
    words = text.lower().replace("#", " ").split()
    pull = next((int(word) for word in words if word.isdigit()), None)
    fixed = FIXED_IN.get(pull) if pull is not None else None
    if fixed is None:
        return None
    if "before" in words or "without" in words:
        return (fixed[0], fixed[1], fixed[2] - 1, 99)
    return fixed if {"after", "with", "since"} & set(words) else None


def scale_use(
    backend: str, phase: str, pool_family: str, version: Version | None, mla: bool = False
) -> ScaleUse | None:
    """The row of SCALE_USE that applies, or None when this combination was neither run nor read.

    Without a version the answer is given only when it is the same for all versions. Triton with MLA stores K divided
    whatever the pool (0.5.16, 0.5.23) and reads V from the same latent: neither right nor wrong is established.
    """
    if mla and backend != "trtllm_mla":
        return None
    pool = "16bit" if pool_family == "16bit" else "fp8"
    rows = [row for row in SCALE_USE if (row.backend, row.phase, row.pool) == (backend, phase, pool)]
    if version is not None:
        rows = [row for row in rows if row.since <= version < row.until]
        return rows[0] if rows else None
    return rows[0] if rows and len({row.effect for row in rows}) == 1 else None


def extrapolated(version: Version | None) -> bool:
    """Whether a version lies outside the wheels that were read (or is unknown)."""
    return version is None or not READ_FROM <= version <= READ_TO


def loads_scales(model_class: str, version: Version | None, declared: Any, names: list[str]) -> Fact | None:
    """Whether the checkpoint's scales reach the attention layer: `loaded`, `dropped`, or None when nobody has read it.

    Args:
        model_class: the class that runs.
        version: the SGLang version.
        declared: the checkpoint's raw quantization files (the fact kv_declared), or None when not known.
        names: names of the scale tensors.
    """
    row = next((row for row in LOADERS if model_class in row.classes), None)
    if row is None:
        return None
    if _method(declared) == "compressed-tensors" and names:
        if version is None:
            return None
        if version < _V20:
            return _loaded("dropped", "read", "compressed-tensors kv_cache_scheme is ignored up to 0.5.18")
    if declared is not None and _method(declared) in (None, "awq", "gptq", "gguf", "bitsandbytes", "mxfp4"):
        return _loaded("dropped", "read", "no quantization method that gives the attention layer scale parameters")
    if declared is not None and _modelopt_kv_is_null(declared):
        return _loaded(
            "dropped", "read", "kv_cache_quant_algo is null, so the attention layer has no scale to load into "
            "(measured on a real 0.5.16: the log says that they are not loaded)",
        )  # fmt: skip
    if row.loads_from is None:
        return _loaded("dropped", row.how, row.source)
    if version is None:
        return None
    how: How = "measured" if version[:3] == (0, 5, 16) and "measured on a real 0.5.16" in row.source else row.how
    if version[:3] == (0, 5, 16) and "dropped on a real 0.5.16" in row.source:
        how = "measured"
    if version >= row.loads_from:
        return _loaded("loaded", how, row.source)
    if row.loads_from == _V11:
        return None  # older than every wheel read
    return _loaded("dropped", how, row.source)


def auto_kv_dtype(declared: Any, version: Version | None, model_dtype: str = "bfloat16") -> tuple[str, str] | None:
    """What `--kv-cache-dtype auto` becomes for these checkpoint files, with the reason; None when it depends on a
    version that is not known.

    Source: FACTS 1.2 (layers/quantization/modelopt_quant.py from_config and fp8.py, wheels 0.5.11, 0.5.16, 0.5.23).
    Example: a flat modelopt `kv_cache_scheme` of an 8-bit float becomes float8_e4m3fn in every version read.
    """
    config = declared.get("config") if isinstance(declared, dict) else None
    hf_quant = declared.get("hf_quant_config") if isinstance(declared, dict) else None
    model_dtype = torch_dtype(model_dtype) or "bfloat16"
    method = _method(declared)
    if method is None:
        return model_dtype, "the checkpoint is not quantized"
    if method == "compressed-tensors":
        scheme = (config or {}).get("kv_cache_scheme")
        if not scheme:
            return model_dtype, "compressed-tensors without kv_cache_scheme"
        if version is None:
            return None
        static = _is_fp8(scheme) and not (isinstance(scheme, dict) and scheme.get("dynamic"))
        if version >= _V20 and static:
            return "float8_e4m3fn", "compressed-tensors kv_cache_scheme is honoured from 0.5.20 on"
        return model_dtype, "compressed-tensors kv_cache_scheme is ignored up to 0.5.18"
    if method == "modelopt":
        scheme, algo = _modelopt_kv(config, hf_quant, version)
        if scheme is False:
            return None
        return (
            ("float8_e4m3fn", f"the checkpoint declares {algo} KV") if _is_fp8(scheme)
            else (model_dtype, f"the checkpoint declares {algo} KV, which auto does not follow")
        )  # fmt: skip
    if method == "fp8":
        algo = (config or {}).get("kv_cache_quant_algo")
        if not algo:
            return model_dtype, "FP8 weights alone say nothing about the KV cache"
        if version is None:
            return None
        if version >= _V20 and _is_fp8(algo):
            return "float8_e4m3fn", "Fp8Config reads kv_cache_quant_algo from 0.5.20 on"
        return model_dtype, "Fp8Config has no kv_cache_quant_algo before 0.5.20"
    return model_dtype, f"the quantization method {method} has no kv_cache_quant_algo"


def derived(facts: Facts) -> Facts:
    """These facts and what follows from them: backends per phase, the pool's dtype, whether scales are loaded.

    A derived fact never replaces one that was measured or read; it only stands where nothing else is known.
    """
    facts = _with_backends(facts)
    facts = _with_kv_dtype(facts)
    return _with_scales_loaded(facts)


def _with_backends(facts: Facts) -> Facts:
    added: list[Fact] = []
    for phase in ("prefill", "decode"):
        name = f"attention_backend_{phase}"
        own, both = facts.best(f"{phase}_attention_backend"), facts.best("attention_backend")
        chosen = own if own and own.value else both
        if facts.known(name) or chosen is None or not chosen.value:
            continue
        backend = str(chosen.value)
        if backend == "fa3" and dtype_family(facts.value("kv_cache_dtype")) == "e5m2":
            note = "fa3 takes no fp8_e5m2: SGLang switches to triton"
            added.append(
                Fact(name=name, value="triton", how="derived", source="rule", evidence=chosen.evidence, note=note)
            )
        else:
            added.append(chosen.model_copy(update={"name": name}))
    return facts.plus(added)


def _with_kv_dtype(facts: Facts) -> Facts:
    if facts.known("kv_dtype_target"):
        return facts
    asked = facts.best("kv_cache_dtype")
    if asked is None:
        return facts
    explicit = torch_dtype(asked.value)
    if explicit and explicit != "auto":
        hip = facts.value("platform") == "hip"
        value = (
            {"float8_e4m3fn": "float8_e4m3fnuz", "float8_e5m2": "float8_e4m3fnuz"}.get(explicit, explicit)
            if hip
            else explicit
        )
        note = "an explicit dtype is allocated as asked" + (" (ROCm takes its native FP8)" if hip else "")
        return facts.plus(
            [
                Fact(
                    name="kv_dtype_target",
                    value=value,
                    how="derived",
                    source="rule",
                    evidence=asked.evidence,
                    note=note,
                )
            ]
        )
    forced, declared = facts.best("kv_auto_forced"), facts.best("kv_declared")
    if forced and forced.value:
        return facts.plus(
            [Fact(name="kv_dtype_target", value=torch_dtype(forced.value), how="derived", source="rule",
                  evidence=forced.evidence, note="this model class sets its KV dtype under auto")]
        )  # fmt: skip
    if declared is None:
        return facts
    version = version_of(facts.value("sglang_version"))
    resolved = auto_kv_dtype(declared.value, version, (declared.value or {}).get("model_dtype") or "bfloat16")
    if resolved is None:
        return facts
    return facts.plus(
        [Fact(name="kv_dtype_target", value=resolved[0], how="derived", source="rule",
              evidence=[*asked.evidence, *declared.evidence], note=f"auto: {resolved[1]}")]
    )  # fmt: skip


def _with_scales_loaded(facts: Facts) -> Facts:
    scales = facts.best("kv_scales")
    if facts.known("kv_scales_loaded") or scales is None:
        return facts
    if not scales.value["present"]:
        return facts.plus(
            [
                Fact(
                    name="kv_scales_loaded",
                    value="none",
                    how=scales.how,
                    source=scales.source,
                    evidence=scales.evidence,
                )
            ]
        )
    model_class = facts.best("model_class")
    if model_class is None:
        return facts
    version = facts.best("sglang_version")
    loaded = loads_scales(
        str(model_class.value),
        version_of(version.value) if version else None,
        facts.value("kv_declared"),
        list(scales.value.get("names", [])),
    )
    if loaded is None:
        return facts
    places = [*scales.evidence, *model_class.evidence, *(version.evidence if version else [])]
    return facts.plus([loaded.model_copy(update={"evidence": places})])


def _loaded(value: str, how: How, source: str) -> Fact:
    return make_fact("kv_scales_loaded", value, how, "rule", note=source)


def _is_fp8(scheme: Any) -> bool:
    if isinstance(scheme, dict):
        return scheme.get("type") == "float" and scheme.get("num_bits") == 8
    return isinstance(scheme, str) and scheme.strip().upper() in ("FP8", "FLOAT8")


def _method(declared: Any) -> str | None:
    """The quantization method of the raw files: modelopt, compressed-tensors, fp8, ...; None for a plain checkpoint."""
    if not isinstance(declared, dict):
        return None
    config, hf_quant = declared.get("config"), declared.get("hf_quant_config")
    if isinstance(config, dict) and config:
        method = str(config.get("quant_method") or "").lower()
        producer = config.get("producer")
        by_modelopt = isinstance(producer, dict) and "modelopt" in str(producer.get("name", "")).lower()
        if method.startswith("modelopt") or "quant_algo" in config or by_modelopt:
            return "modelopt"
        return method or ("modelopt" if hf_quant else "unknown")
    return "modelopt" if isinstance(hf_quant, dict) and hf_quant else None


def _modelopt_kv(config: Any, hf_quant: Any, version: Version | None) -> tuple[Any, Any]:
    """(what decides, its spelling) of a ModelOpt checkpoint; (False, None) when it depends on an unknown version."""
    if isinstance(config, dict) and config:
        scheme = config.get("kv_cache_scheme")
        if scheme:
            return scheme, scheme if isinstance(scheme, str) else "an 8-bit float" if _is_fp8(scheme) else scheme
        nested = config.get("quantization")
        flat = nested.get("kv_cache_quant_algo") if isinstance(nested, dict) else config.get("kv_cache_quant_algo")
        if not flat:
            return None, "no"
        if isinstance(nested, dict):
            return flat, flat
        if version is None:
            return False, None
        # 0.5.11 takes config.json without kv_cache_scheme as "auto" even when the flat key is there; 0.5.16 reads it.
        if version >= _V16:
            return flat, flat
        return (
            (None, "a flat kv_cache_quant_algo that this version does not read, no")
            if version <= _V11
            else (False, None)
        )
    section = hf_quant.get("quantization") if isinstance(hf_quant, dict) else None
    algo = (section or {}).get("kv_cache_quant_algo")
    # A quant_algo of null means that SGLang sees no quantization at all and ignores the KV entry (CPU.md: hfq_null).
    if section is not None and "quant_algo" in section and section["quant_algo"] is None:
        return None, "(under quant_algo null) no"
    return algo, algo or "no"


def _modelopt_kv_is_null(declared: Any) -> bool:
    """Whether a ModelOpt FP8 checkpoint says kv_cache_quant_algo null (its attention layers then get no scale)."""
    if _method(declared) != "modelopt" or (isinstance(declared.get("config"), dict) and declared["config"]):
        return False
    section = (declared.get("hf_quant_config") or {}).get("quantization")
    if not isinstance(section, dict) or str(section.get("quant_algo") or "").upper() != "FP8":
        return False
    return not section.get("kv_cache_quant_algo")
