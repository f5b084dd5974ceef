"""What SGLang does with a checkpoint's KV scales, by version, class and attention backend; what `auto` becomes. Pure.

Three questions decide every KV finding, and none of them is answered by a log line alone: which dtype the pool has,
whether the scales of the checkpoint reach the attention layer (`lib.model.quantization`), and what the backend
does with
them when it reads the pool (SCALE_USE). The tables hold what was measured on a real server and what was read in the
wheels; between them nothing is guessed, the answer is None.
"""

from __future__ import annotations

from dataclasses import dataclass

from lib.audit.facts import Fact, Facts, How, dtype_family, make_fact, torch_dtype, version_key
from lib.errors import BadInput
from lib.model.architectures import TABLE, architecture, text_config
from lib.model.facts import VERSIONS_READ, Checkpoint, ScaleTensors, since
from lib.model.memory import kv_bytes_per_token
from lib.model.quantization import (
    SCALE_DROPPERS,
    SCALE_LOADERS,
    declared_quantization,
    model_dtype,
    resolve_kv_cache_dtype,
    scales_loaded,
)

READ_FROM, READ_TO = (0, 5, 11, 0), (0, 5, 23, 99)
QWEN3_5 = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration", "Qwen3_5ForCausalLM")

#: Class and version of which a real server showed whether scales are loaded (H1.md, H200.md, CPU.md).
MEASURED_LOADING: set[tuple[str, tuple[int, int, int]]] = {
    ("LlamaForCausalLM", (0, 5, 16)),
    ("Qwen3_5MoeForConditionalGeneration", (0, 5, 16)),
    ("Qwen3ForCausalLM", (0, 5, 15)),
}

Version = tuple[int, int, int, int]


_V11, _V16, _V18 = (0, 5, 11, 0), (0, 5, 16, 0), (0, 5, 18, 0)


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


def loads_scales(
    model_class: str, version: str | None, checkpoint: Checkpoint | None, quantization: str | None = None
) -> Fact | None:
    """Whether the checkpoint's scales reach the attention layer: `loaded`, `dropped`, or None when it is not
    established.

    Args:
        model_class: the class that runs.
        version: the SGLang version; None gives an answer only where all versions read agree.
        checkpoint: the checkpoint's files, or None when only class and tensor names are known.
        quantization: the quantization that a log names, for want of the files.

    Source: `lib.model.quantization.scales_loaded`; MEASURED_LOADING where a real server showed it.
    Example: Qwen3.5 drops them on 0.5.16 and loads them on 0.5.17.
    """
    key = version_of(version)
    if version is not None and key is None:
        return None
    answers: set[tuple[bool | None, str]] = set()
    for candidate in [_text(key)] if key else list(VERSIONS_READ):
        if checkpoint is not None:
            told = scales_loaded(checkpoint, candidate)
            answers.add((told.loaded, told.why))
        elif model_class in SCALE_DROPPERS:
            answers.add((False, SCALE_DROPPERS[model_class]))
        elif model_class in SCALE_LOADERS:
            mapped = since(candidate, SCALE_LOADERS[model_class])
            # A loader that maps the names still needs a quantization that creates the parameters.
            creates = quantization is not None and quantization.startswith(("modelopt", "fp8", "quark"))
            answers.add(
                (False, "its loader drops them") if not mapped else (creates or None, "its loader maps the names")
            )
        else:
            answers.add((None, "not read"))
    loaded = {answer for answer, _ in answers}
    if len(loaded) != 1 or None in loaded:
        return None
    why = sorted(answers, key=str)[0][1]
    measured = key is not None and (model_class, key[:3]) in MEASURED_LOADING
    return make_fact(
        "kv_scales_loaded",
        "loaded" if loaded == {True} else "dropped",
        "measured" if measured else "read",
        "rule",
        note=why,
    )


def auto_kv_dtype(checkpoint: Checkpoint, version: str | None, sm: int | None = None) -> tuple[str, str] | None:
    """What `--kv-cache-dtype auto` becomes for this checkpoint, with the reason; None when it depends on what is
    unknown.

    Source: `lib.model.quantization.resolve_kv_cache_dtype`. Without a version the answer is given only where all
    versions read agree; sparse attention (DSA) also needs the GPU.
    """
    key = version_of(version)
    if version is not None and key is None:
        return None
    group = checkpoint.architecture.group("mla") if checkpoint.architecture else None
    if group is not None and group.index_head_dim and sm is None:
        return None
    told = [resolve_kv_cache_dtype(checkpoint, "auto", one, sm=sm) for one in ([_text(key)] if key else VERSIONS_READ)]
    return (told[0].dtype, told[0].why) if len({one.dtype for one in told}) == 1 else None


def checkpoint_of(facts: Facts) -> Checkpoint | None:
    """The checkpoint's files as the record that lib.model reasons about, or None when they are not known."""
    declared = facts.value("kv_declared")
    if not isinstance(declared, dict):
        return None
    config = dict(declared.get("config") or {})
    hf_quant = declared.get("hf_quant_config")
    model_class = str(facts.value("model_class") or (config.get("architectures") or [""])[0])
    text, _ = text_config(config)
    trouble = None
    layout = None
    try:
        layout = architecture(config)
    except BadInput as error:
        trouble = str(error)
    scales = facts.value("kv_scales")
    return Checkpoint(
        config=config,
        hf_quant_config=hf_quant,
        architecture_name=model_class,
        architecture=layout,
        architecture_error=trouble,
        torch_dtype=model_dtype(config, text),
        quantization=declared_quantization(config, hf_quant),
        scales=ScaleTensors(k_count=(scales.get("count") or 1) if scales["present"] else 0) if scales else None,
    )


def _text(key: Version) -> str:
    return f"{key[0]}.{key[1]}.{key[2]}"


def derived(facts: Facts) -> Facts:
    """These facts and what follows from them: backends per phase, the pool's dtype, whether scales are loaded.

    A derived fact never replaces one that was measured or read; it only stands where nothing else is known.
    """
    facts = _with_recurrent(facts)
    facts = _with_backends(facts)
    facts = _with_kv_dtype(facts)
    return _with_scales_loaded(facts)


#: Readers of architectures with recurrent layers, and the kind of state that `recurrent` calls them.
_RECURRENT_READERS: dict[str, str] = {
    "gdn": "gdn", "kimi_linear": "kda", "nemotron_h": "mamba2", "falcon_h1": "mamba2", "granite_hybrid": "mamba2",
}  # fmt: skip


def _with_recurrent(facts: Facts) -> Facts:
    """Whether the model has recurrent layers, by its class alone where neither files nor a start-up say it."""
    row = TABLE.get(str(facts.value("model_class")))
    if row is None or facts.known("recurrent"):
        return facts
    kind = _RECURRENT_READERS.get(row.read.__name__)
    if kind is None:
        return facts
    return facts.plus([make_fact("recurrent", kind, "derived", "rule", note="every checkpoint of this class has them")])


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


def kv_dtype_by_arithmetic(facts: Facts) -> Fact | None:
    """The pool's dtype from its bytes per token and the checkpoint's geometry; None when unknown or nothing fits.

    From 0.5.18 on this is the only way to see through `auto` in /server_info and /metrics.
    Example: 15,360 B per token and GPU of Qwen3.5-397B on 8 GPUs are bfloat16, 7,680 B are FP8.
    """
    seen, checkpoint = facts.best("kv_bytes_per_token"), checkpoint_of(facts)
    if seen is None or checkpoint is None or checkpoint.architecture is None:
        return None
    version = version_of(facts.value("sglang_version"))
    names = {"bfloat16": "bfloat16", "fp8_e4m3": "an 8-bit type"}
    for dtype in names:
        try:
            size = kv_bytes_per_token(
                checkpoint,
                int(facts.value("tp_size") or 1),
                dtype,
                sglang_version=_text(version) if version else VERSIONS_READ[-1],
            )
        except BadInput:
            return None
        if size.sliding_per_gpu:
            return None
        if abs(float(seen.value) / size.per_gpu - 1) < 0.03:
            note = f"{float(seen.value):,.0f} B per token; this checkpoint takes {size.per_gpu:,} in {names[dtype]}"
            found = _follows("kv_dtype_target", torch_dtype(dtype), [seen], note)
            return found.model_copy(update={"source": "arithmetic"})
    return None


def _with_kv_dtype(facts: Facts) -> Facts:
    if facts.known("kv_dtype_target"):
        return facts
    by_size = kv_dtype_by_arithmetic(facts)
    if by_size is not None:
        return facts.plus([by_size])
    asked = facts.best("kv_cache_dtype")
    if asked is None:
        return facts
    explicit = torch_dtype(asked.value)
    if explicit and explicit != "auto":
        note = "an explicit dtype is allocated as asked"
        if facts.value("platform") == "hip" and explicit.startswith("float8"):
            explicit, note = "float8_e4m3fnuz", "ROCm takes its native FP8 type for both spellings"
        return facts.plus([_follows("kv_dtype_target", explicit, [asked], note)])
    forced, declared = facts.best("kv_auto_forced"), facts.best("kv_declared")
    if forced and forced.value:
        note = "this model class sets its KV dtype under auto"
        return facts.plus([_follows("kv_dtype_target", torch_dtype(forced.value), [forced], note)])
    checkpoint = checkpoint_of(facts)
    if declared is None or checkpoint is None:
        return facts
    sm = facts.value("gpu_sm")
    resolved = auto_kv_dtype(checkpoint, facts.value("sglang_version"), int(str(sm).split(".")[0]) if sm else None)
    if resolved is None:
        return facts
    return facts.plus([_follows("kv_dtype_target", resolved[0], [asked, declared], resolved[1])])


def _follows(name: str, value: str | None, from_: list[Fact], note: str) -> Fact:
    places = [place for fact in from_ for place in fact.evidence]
    return Fact(name=name, value=value, how="derived", source="rule", evidence=places, note=note)


def _with_scales_loaded(facts: Facts) -> Facts:
    scales = facts.best("kv_scales")
    if facts.known("kv_scales_loaded"):
        return facts
    if scales is None:
        return facts.plus(_dropped_whatever_there_is(facts))
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
        backend = facts.best("attention_backend_decode")
        if backend is not None and backend.value == "trtllm_mla":
            note = "only MLA models run on trtllm_mla, and their common loader maps k_scale (wheels 0.5.11 and 0.5.16)"
            return facts.plus([_follows("kv_scales_loaded", "loaded", [scales, backend], note)])
        return facts
    version, weights = facts.best("sglang_version"), facts.value("weight_quant")
    loaded = loads_scales(
        str(model_class.value),
        str(version.value) if version else None,
        checkpoint_of(facts),
        str((weights or {}).get("detail") or ""),
    )
    if loaded is None:
        return facts
    places = [*scales.evidence, *model_class.evidence, *(version.evidence if version else [])]
    return facts.plus([loaded.model_copy(update={"evidence": places})])


def _dropped_whatever_there_is(facts: Facts) -> list[Fact]:
    """`kv_scales_loaded` = dropped where class and version leave scales out whatever the checkpoint holds; else nothing.

    Without the checkpoint nothing is known about scales that would be loaded, so only a loader that drops them settles
    the scale in effect (1.0).
    """
    model_class, version = facts.best("model_class"), facts.best("sglang_version")
    if model_class is None:
        return []
    loaded = loads_scales(str(model_class.value), str(version.value) if version else None, None)
    if loaded is None or loaded.value != "dropped":
        return []
    places = [*model_class.evidence, *(version.evidence if version else [])]
    note = f"{loaded.note}; whatever tensors the checkpoint holds"
    return [loaded.model_copy(update={"evidence": places, "note": note})]
