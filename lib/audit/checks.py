"""What each accuracy rule looks at: one small function per row of `rules.RULES`, from facts to an outcome. Pure.

A check reads facts through a `Look`; asking for a fact that nobody has seen ends it as *not checked*, so that an
unknown can never come out as fine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lib.audit.facts import FACTS, HOW_ORDER, Fact, Facts, How, dtype_family, torch_dtype, version_key
from lib.audit.launch import has_run, launch_faults
from lib.audit.scales import QUERY_CAST, QWEN3_5, Version, scale_use, version_of
from lib.records import Evidence
from lib.server.garbage import output_hints, output_signs

#: `error`: answers are wrong, or wrong as soon as the pool is read. `warning`: accuracy is lower, or may be.
#: `info`: to know; no loss follows from it alone.
Level = Literal["info", "warning", "error"]


LEVELS: tuple[Level, ...] = ("info", "warning", "error")


#: How much it matters for long-context agentic coding.
Severity = Literal["none", "low", "medium", "high", "critical"]


SEVERITIES: tuple[Severity, ...] = ("none", "low", "medium", "high", "critical")


class Missing(Exception):  # noqa: N818 - control flow inside this module, never an error that a user sees
    """A check asked for facts that nobody has seen."""

    def __init__(self, names: Iterable[str], why: str | None = None) -> None:
        self.names, self.why = tuple(names), why
        super().__init__(", ".join(self.names))


@dataclass(frozen=True)
class Outcome:
    """What one check says: kind, a machine-readable verdict, and the sentence for the reader."""

    kind: Literal["found", "fine", "not_applicable", "cannot_check", "accepted"]
    what: str
    verdict: str = "ok"
    title: str | None = None
    level: Level = "warning"
    severity: Severity | None = None
    certainty: How | None = None
    do: str | None = None
    changes: tuple[Mapping[str, Any], ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()


class Look:
    """The facts as one rule sees them: what it reads is noted; a fact that nobody has seen ends the check."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.reads: list[Fact] = []
        self.quotes: list[Evidence] = []
        self.marks: list[str] = []

    def __call__(self, name: str) -> Any:
        """The value of a fact; raises Missing when nobody has seen it."""
        fact = self.facts.best(name)
        if fact is None:
            raise Missing([name])
        self._note(fact)
        return fact.value

    def maybe(self, name: str, default: Any = None) -> Any:
        """The value of a fact, or the default when nobody has seen it."""
        fact = self.facts.best(name)
        if fact is None:
            return default
        self._note(fact)
        return fact.value

    def version(self) -> Version:
        """The SGLang version; raises Missing when unknown or not a release."""
        key = version_of(self("sglang_version"))
        if key is None:
            raise Missing(["sglang_version"], "the version is not a release number")
        return key

    def maybe_version(self) -> Version | None:
        """The SGLang version, or None."""
        return version_of(self.maybe("sglang_version"))

    def line(self, mark: str) -> bool:
        """Whether the log has this line (see LINES); raises Missing when no log was given."""
        return self._quoted(mark, self("log_lines"))

    def maybe_line(self, mark: str) -> bool:
        """Whether a log was given and has this line."""
        return self._quoted(mark, self.maybe("log_lines", {}))

    def whole_start(self) -> None:
        """Raises Missing unless the log covers the start-up, so that a line's absence means something."""
        if not self("startup_seen"):
            raise Missing(["startup_seen"])

    def variable(self, name: str) -> str | None:
        """An environment variable; raises Missing when it is absent from an environment that is only partly known."""
        known = self("environment")
        if name in known["variables"]:
            return str(known["variables"][name])
        if not known["complete"]:
            raise Missing(["environment"], "only a part of the environment is known")
        return None

    def maybe_variable(self, name: str) -> str | None:
        """An environment variable as far as the environment is known."""
        known = self.maybe("environment")
        value = known["variables"].get(name) if known else None
        return None if value is None else str(value)

    def _quoted(self, mark: str, lines: Mapping[str, Any]) -> bool:
        if mark not in lines:
            return False
        seen = lines[mark]
        if mark not in self.marks:
            self.marks.append(mark)
            self.quotes.append(Evidence(path=seen["path"], line=seen.get("line"), quote=seen.get("quote")))
        return True

    def _note(self, fact: Fact) -> None:
        if fact not in self.reads:
            self.reads.append(fact)

    def certainty(self, claim: How) -> How:
        """The weakest link: the rule's own claim and every fact that was read."""
        links = [claim, *(fact.how for fact in self.reads)]
        return max(links, key=HOW_ORDER.index)

    def evidence(self) -> list[Evidence]:
        """Where everything that was read can be checked."""
        places: list[Evidence] = []
        for fact in self.reads:
            for place in fact.evidence or [Evidence(path=fact.source)]:
                note = f"{fact.name} = {short(fact.value)} ({fact.how})" + (f"; {fact.note}" if fact.note else "")
                if fact.name != "log_lines":
                    places.append(place.model_copy(update={"note": note}))
        return [*self.quotes, *places]


def _found(level: Level, verdict: str, what: str, **more: Any) -> Outcome:
    return Outcome(kind="found", level=level, verdict=verdict, what=what, **more)


def _fine(what: str, verdict: str = "ok", **more: Any) -> Outcome:
    return Outcome(kind="fine", verdict=verdict, what=what, **more)


def _not_for(what: str) -> Outcome:
    return Outcome(kind="not_applicable", verdict="not_applicable", what=what)


def _cannot(what: str, *missing: str) -> Outcome:
    return Outcome(kind="cannot_check", verdict="cannot_check", what=what, missing=missing)


def short(value: Any) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False) if isinstance(value, dict | list) else str(value)
    return text if len(text) <= 120 else text[:117] + "..."


_NO_KV = ("bfloat16", "float16", "float32")


def _family(look: Look) -> str:
    family = dtype_family(look("kv_dtype_target"))
    if family is None:
        raise Missing(["kv_dtype_target"], "the dtype is not one that is known here")
    return family


def kv1(look: Look) -> Outcome:
    family = _family(look)
    pool = look("kv_dtype_target")
    if family in ("16bit", "32bit"):
        return _fine(f"the KV pool is {pool}: nothing is quantized on its way into the cache", "kv_not_quantized")
    asked = look.maybe("kv_cache_dtype")
    if asked is None:
        return _found(
            "warning",
            "quantized_kv",
            f"the KV pool is {pool}; whether that was asked for is not known",
            changes=({"kv_cache_dtype": "bfloat16"},),
            values={"kv_dtype": pool, "asked": None},
        )
    if asked == "auto":
        return _found(
            "warning",
            "silent_quantized_kv",
            f"the KV pool is {pool} under --kv-cache-dtype auto: the files decided it, and no line says so",
            title="The KV cache is quantized without being asked",
            changes=({"kv_cache_dtype": "bfloat16"},),
            values={"kv_dtype": pool, "asked": asked},
        )
    if family in ("e5m2", "4bit"):
        return _not_for(f"{asked} was asked for: see {'KV5' if family == 'e5m2' else 'KV6'}")
    return _found(
        "warning",
        "quantized_kv_by_choice",
        f"the KV pool is {pool}, as asked with --kv-cache-dtype {asked}",
        title="The KV cache is quantized, as asked",
        severity="medium",
        changes=({"kv_cache_dtype": "bfloat16"},),
        values={"kv_dtype": pool, "asked": asked},
    )


def kv2(look: Look) -> Outcome:
    family = _family(look)
    if family not in ("e4m3", "e5m2"):
        return _not_for(f"the KV pool is {look('kv_dtype_target')}: no FP8 scale is in use")
    if look.maybe("quantization_param_path"):
        return _not_for("scales come from --quantization-param-path: see KV7")
    warned = look.maybe_line("scale_default")
    look.maybe_line("scale_not_loaded")  # what the loader says of them is part of the evidence
    scales = look.maybe("kv_scales")
    if scales is None and look.facts.value("kv_scales_loaded") == "dropped":
        look("kv_scales_loaded")
        return _found(
            "warning",
            "scale_1.0_in_use",
            "the loader of this class and version leaves KV scales out whatever the checkpoint holds: scale 1.0 is in "
            "use",
            do="BF16 KV; or calibrated scales with a version whose loader maps them (check KV3 for that version first)",
            changes=({"kv_cache_dtype": "bfloat16"},),
            values={"kv_scales_in_checkpoint": None, "scale_warning": warned, "scale_in_effect": 1.0},
        )
    if scales is None:
        if warned:
            return _cannot(
                "the line about scaling factors of 1.0 depends on a flag and not on the checkpoint: it proves nothing "
                "either way",
                "kv_scales",
            )
        raise Missing(["kv_scales"])
    if not scales["present"]:
        return _found(
            "warning",
            "scale_1.0_in_use",
            "the checkpoint has no k_scale/v_scale tensor, so FP8 values are stored with scale 1.0",
            do="drop --kv-cache-dtype fp8_* (BF16 KV), or take a checkpoint with calibrated KV scales",
            changes=({"kv_cache_dtype": "bfloat16"},),
            values={"kv_scales_in_checkpoint": False, "scale_warning": warned, "scale_in_effect": 1.0},
        )
    loaded = look.maybe("kv_scales_loaded")
    backends = {look.maybe("attention_backend_prefill"), look.maybe("attention_backend_decode")}
    if loaded == "dropped" or (loaded == "loaded" and "torch_native" in backends):
        reason = (
            "the loader of this class and version drops them" if loaded == "dropped" else "torch_native ignores them"
        )
        return _found(
            "warning",
            "scale_1.0_in_use",
            f"the checkpoint has {scales.get('count') or 'some'} KV scale tensors, but {reason}: scale 1.0 is in use",
            do="upgrade to a version whose loader maps them, or BF16 KV (check KV3 for that version first)"
            if loaded == "dropped"
            else "another attention backend, which reads the pool with the scales, or BF16 KV; no version of torch_native "
            "that was read uses them",
            changes=({"kv_cache_dtype": "bfloat16"},),
            values={"kv_scales_in_checkpoint": True, "scale_warning": warned, "scale_in_effect": 1.0},
        )
    values = {"kv_scales_in_checkpoint": True, "scale_warning": warned, "checkpoint_scales_all_one": scales["all_one"]}
    if loaded == "loaded" and scales["all_one"]:
        return _found(
            "info",
            "scale_1.0_in_checkpoint",
            "the scales are loaded, and every one of them is 1.0: the checkpoint was not calibrated for FP8 KV",
            severity="low",
            values=values,
        )
    if warned:
        return _found(
            "info",
            "false_alarm_possible",
            "the log says that scales default to 1.0, but the checkpoint has k_scale/v_scale tensors; the line "
            "depends on "
            "--quantization-param-path and is printed whatever the checkpoint holds"
            + ("" if loaded == "loaded" else "; whether this class and version load them is not established here"),
            severity="low",
            do="look at the k_scale/v_scale tensors and at k_scale_float after loading, not at the line",
            values={
                **values,
                "kv_scales_effective": "checkpoint scales loaded" if loaded == "loaded" else "not established",
            },
        )
    if loaded is None:
        raise Missing(["kv_scales_loaded"], "whether this class and version load the scales is not established")
    return _fine("FP8 KV with the checkpoint's own scales, which this class and version load", "kv_scales_in_use")


def kv3(look: Look) -> Outcome:
    family = _family(look)
    if family not in ("16bit", "32bit"):
        return _not_for("the KV pool is quantized: what is written divided is read multiplied (see KV2 and KV8)")
    if look.facts.value("kv_scales_loaded") == "dropped":
        scales = look.maybe("kv_scales", {"present": True, "all_one": None})
    else:
        scales = look("kv_scales")
    if not scales["present"]:
        return _fine("no k_scale/v_scale tensor in the checkpoint", "no_kv_scales")
    if scales["all_one"]:
        return _fine("every k_scale/v_scale is exactly 1.0, so multiplying by it changes nothing", "kv_scales_all_one")
    loaded = look("kv_scales_loaded")
    version = look.maybe_version()
    if loaded == "dropped":
        model_class = look.maybe("model_class")
        if model_class in QWEN3_5 and version is not None and version < (0, 5, 17, 0):
            return _found(
                "info",
                "right_only_until_upgrade",
                "the 16-bit pool is read right only because this version drops "
                + ("the checkpoint's scales" if look.facts.known("kv_scales") else "whatever scales the checkpoint has")
                + "; from 0.5.17 on "
                "Qwen3.5 loads them, and on triton or flashinfer the same flags then give wrong attention in silence",
                severity="high",
                certainty="read",
                do="before an upgrade, remove the k_scale/v_scale tensors from a copy of the checkpoint, or audit "
                "again with "
                "--change sglang_version=NEW",
            )
        return _fine("the checkpoint's scales do not reach the attention layer", "kv_scales_dropped")
    prefill, decode = look("attention_backend_prefill"), look("attention_backend_decode")
    mla = bool(look.maybe("mla", prefill == "trtllm_mla"))
    uses = {
        "prefill": scale_use(prefill, "prefill", "16bit", version, mla),
        "decode": scale_use(decode, "decode", "16bit", version, mla),
    }
    wrong = [phase for phase, use in uses.items() if use and use.effect == "wrong"]
    if wrong and scales["all_one"] is None:
        return _cannot(
            "scales are loaded and would be applied to a 16-bit pool, but their values were not read", "kv_scales"
        )
    if wrong:
        rows = [use for use in uses.values() if use and use.effect == "wrong"]
        measured = all(
            row.measured_on and version is not None and version_key(row.measured_on) == version for row in rows
        )
        certainty: How = "measured" if measured else max((row.how for row in rows), key=HOW_ORDER.index)
        where = " and ".join(wrong)
        return _found(
            "error",
            "wrong_scale_applied",
            f"a {look('kv_dtype_target')} pool holds K and V undivided, and "
            f"{prefill if 'prefill' in wrong else decode} "
            f"multiplies what {where} reads from it by the checkpoint's scales"
            + (f" ({scales['min']:g} to {scales['max']:g})" if scales.get("min") is not None else "")
            + ": attention is wrong for everything that comes out of the cache",
            certainty=certainty,
            do="serve a copy of the checkpoint without the k_scale/v_scale tensors, or let the pool be FP8 (auto) "
            "and measure "
            "what FP8 costs",
            changes=({"kv_scales": {"present": False, "count": 0, "all_one": None}}, {"kv_cache_dtype": "auto"}),
            values={"wrong_in": wrong, "first_chunk_exact": True},
        )
    if None in uses.values():
        unknown = ", ".join(
            f"{phase} on {prefill if phase == 'prefill' else decode}" for phase, use in uses.items() if use is None
        )
        return _cannot(
            f"loaded scales over a 16-bit pool were neither run nor read for {unknown}; compare logprobs of the same "
            "ids with "
            "--chunked-prefill-size above and below the prompt",
            "attention_backend_prefill",
            "attention_backend_decode",
        )
    return _fine(
        f"{prefill} (prefill) and {decode} (decode) do not multiply a 16-bit pool by the scales", "kv_scales_ignored"
    )


def kv4(look: Look) -> Outcome:
    family = _family(look)
    if family not in ("e4m3", "e5m2"):
        return _not_for("the KV pool is not FP8")
    backends = {look("attention_backend_prefill"), look("attention_backend_decode")}
    if "triton" in backends:
        return _found(
            "warning",
            "fp8_query_and_weights",
            "with an FP8 pool Triton also casts the query and the softmax weights to FP8; weights below about 0.001 "
            "of the "
            "largest become 0, so the disturbance grows with context",
            changes=({"kv_cache_dtype": "bfloat16"},),
        )
    casting = sorted(str(backend) for backend in backends if backend in QUERY_CAST)
    if casting:
        return _found(
            "info",
            "fp8_query",
            f"{', '.join(casting)} {QUERY_CAST[casting[0]]} when the pool is FP8",
            severity="medium",
            certainty="read",
        )
    unknown = backends - {"torch_native", "flashinfer"}
    if unknown:
        return _cannot(
            f"what {', '.join(map(str, unknown))} casts with an FP8 pool was not read", "attention_backend_decode"
        )
    return _fine(f"{', '.join(sorted(map(str, backends)))}: the query stays 16-bit", "query_not_cast")


def kv5(look: Look) -> Outcome:
    if _family(look) != "e5m2":
        return _fine(f"the KV pool is {look('kv_dtype_target')}, not E5M2", "not_e5m2")
    return _found(
        "warning",
        "e5m2_kv",
        "E5M2 keeps 2 mantissa bits (E4M3 keeps 3); measured on one small model it cost 2 to 9 times as much as "
        "E4M3, without "
        "any line in the log",
        changes=({"kv_cache_dtype": "bfloat16"}, {"kv_cache_dtype": "fp8_e4m3"}),
    )


def kv6(look: Look) -> Outcome:
    if _family(look) != "4bit":
        return _fine(f"the KV pool is {look('kv_dtype_target')}, not 4-bit", "not_4bit")
    return _found("warning", "fp4_kv", "K and V are stored with 4 bits", changes=({"kv_cache_dtype": "bfloat16"},))


def kv7(look: Look) -> Outcome:
    path = look("quantization_param_path")
    if not path:
        return _fine("no --quantization-param-path", "no_scale_file")
    said = " although the log says that they were loaded" if look.maybe_line("scale_file_loaded") else ""
    asked = look.maybe("kv_cache_dtype")
    if asked is not None and asked != "fp8_e4m3":
        said = f"; it is only honoured with --kv-cache-dtype fp8_e4m3, not {asked}"
    return _found(
        "error",
        "scales_declared_but_not_applied",
        "scaling factors from --quantization-param-path are not used on both sides of the cache"
        + said
        + "; one factor per "
        "layer stands for K and V alike",
        changes=({"quantization_param_path": None},),
        values={"log_says_loaded": look.maybe_line("scale_file_loaded"), "scales_applied": False},
    )


def kv8(look: Look) -> Outcome:
    family = _family(look)
    if family not in ("e4m3", "e5m2"):
        return _not_for("the KV pool is not FP8")
    prefill = look("attention_backend_prefill")
    if prefill != "flashinfer":
        return _not_for(f"prefill runs on {prefill}, not flashinfer")
    if not look.facts.known("kv_scales") and look.maybe("kv_scales_loaded") == "dropped":
        return _fine(
            "this version loads no scales whatever there is: writing and reading agree on 1.0 (see KV2)",
            "kv_scales_dropped",
        )
    scales = look("kv_scales")
    if not scales["present"] or scales["all_one"]:
        return _fine("no scale other than 1.0 to lose", "no_scale_to_lose")
    if look("kv_scales_loaded") == "dropped":
        return _fine("the scales are not loaded, so writing and reading agree on 1.0 (see KV2)", "kv_scales_dropped")
    if scales["all_one"] is None:
        return _cannot("the values of the scales were not read", "kv_scales")
    version = look.version()
    use = scale_use("flashinfer", "prefill", "fp8", version, bool(look.maybe("mla", False)))
    if use is None:
        return _cannot("flashinfer with MLA was not read", "attention_backend_prefill")
    if use.effect == "right":
        return _fine("this version hands the scales to the paged prefill (read, not run)", "scales_passed")
    return _found(
        "error",
        "prefix_read_without_scale",
        "FlashInfer writes K and V divided by the scale and reads a cached prefix without it: wrong as soon as a "
        "prefill "
        "reads the pool (second chunk or prefix hit)",
        certainty="measured" if version[:3] == (0, 5, 16) else "read",
        changes=({"sglang_version": "0.5.18"}, {"attention_backend": "triton"}),
    )


def kv9(look: Look) -> Outcome:
    if not look("speculative_algorithm"):
        return _not_for("no speculative decoding, no draft pool")
    target, draft = look("kv_dtype_target"), look("kv_dtype_draft")
    if torch_dtype(target) == torch_dtype(draft):
        return _fine(f"target and draft pool are both {target}", "same_kv_dtype")
    return _found(
        "info",
        "draft_kv_differs",
        f"the target's pool is {target}, the draft's {draft}: text is verified by the target, so this moves "
        "acceptance, not "
        "answers",
        severity="low",
    )


def _weights(look: Look) -> str:
    return str((look("weight_quant") or {}).get("kind", "none"))


def q0(look: Look) -> Outcome:
    kind = _weights(look)
    told = look("weight_quant") or {}
    if kind == "none":
        excluded = f" ({told['detail']})" if "excluded" in str(told.get("detail")) else ""
        return _fine(f"the weights are not quantized{excluded}", "weights_not_quantized")
    if told.get("stored_narrow") is False:
        return _cannot(
            f"the files declare {told.get('detail') or kind} and hold no tensor of fewer than 16 bits ({told['stored']}): "
            "whether the weights are quantized while loading only the log says",
            "log_lines",
        )
    words = {
        "nvfp4": "NVFP4 weights (4 bits with block scales), and 4-bit activations wherever a native FP4 kernel runs",
        "mxfp4": "MXFP4 weights (4 bits with block scales)",
        "fp8": "FP8 weights",
        "mixed": "weights of mixed precision",
    }
    detail = told.get("detail")
    fact = look.facts.best("weight_quant")
    unseen = fact is not None and fact.source == "log"
    return Outcome(
        kind="accepted",
        verdict="weights_declared_quantized" if unseen else "weights_quantized",
        what=("the log declares " if unseen else "")
        + words.get(kind, f"{kind} weights")
        + (f" ({detail})" if detail else "")
        + ("; which layers are narrow, or whether any is, only the checkpoint's files say" if unseen else ""),
        do="a checkpoint with wider weights, where it fits; for FP4 also the marlin runner, which keeps activations "
        "in 16 bits",
    )


def _sm120(look: Look) -> bool:
    return str(look("gpu_sm")).startswith("12.")


def _fp4_dense(look: Look) -> str | None:
    """The FP4 GEMM backend that runs on this GPU, resolved by version where it was left on auto."""
    asked = look("fp4_gemm_runner_backend")
    if asked and asked != "auto":
        return str(asked)
    version = look.version()
    if version >= (0, 5, 13, 0):
        return "flashinfer_cutlass"
    return "flashinfer_cudnn" if version >= (0, 5, 10, 0) else None


def q1(look: Look) -> Outcome:
    kind = _weights(look)
    if kind not in ("nvfp4", "mixed"):
        return _not_for(f"no NVFP4 weights ({kind})")
    if not _sm120(look):
        return _not_for(f"compute capability {look('gpu_sm')}, not 12.x")
    backend = _fp4_dense(look)
    if backend is None:
        return _cannot("what auto takes on SM120 in a version before 0.5.10 was not read", "fp4_gemm_runner_backend")
    if backend != "flashinfer_cutlass":
        return _fine(f"FP4 GEMM runs on {backend}", "other_fp4_gemm")
    flashinfer = look.maybe("flashinfer_version")
    return _found(
        "warning",
        "fp4_gemm_not_validated",
        "FP4 GEMM runs on flashinfer_cutlass on SM120, for which NaN rows under mixed batches and all-zero outputs "
        "were "
        f"reported; FlashInfer {flashinfer or 'of an unknown version'} is not among the versions shown to be good here",
        do="stress it with concurrent prompts of mixed lengths and look for NaN or '!!!!'; or --fp4-gemm-backend "
        "flashinfer_cudnn",
        changes=({"fp4_gemm_runner_backend": "flashinfer_cudnn"},),
    )


def q2(look: Look) -> Outcome:
    kind = _weights(look)
    if kind not in ("nvfp4", "mixed"):
        return _not_for(f"no NVFP4 weights ({kind})")
    if not look("is_moe"):
        return _not_for("no routed experts")
    if not _sm120(look):
        return _not_for(f"compute capability {look('gpu_sm')}, not 12.x")
    backend = look("moe_runner_backend")
    if backend == "auto":
        backend = "flashinfer_cutlass" if look.version() >= (0, 5, 13, 0) else "flashinfer_trtllm"
    if backend == "marlin":
        return _fine("experts run on marlin: 4-bit weights, 16-bit activations, no grouped FP4 kernel", "moe_on_marlin")
    if backend in ("flashinfer_trtllm", "flashinfer_cutedsl"):
        return _found(
            "error",
            "moe_runner_not_for_sm120",
            f"{backend} has SM100 kernels; on SM120 it was seen to crash (trtllm) or to return garbage (cutedsl)",
            certainty="quoted",
            changes=({"moe_runner_backend": "flashinfer_cutlass"}, {"moe_runner_backend": "marlin"}),
        )
    if backend != "flashinfer_cutlass":
        return _cannot(f"grouped FP4 on {backend} was neither run nor read on SM120", "moe_runner_backend")
    flashinfer = look("flashinfer_version")
    return _found(
        "warning",
        "moe_fp4_not_validated",
        f"grouped FP4 through CUTLASS on SM120 gave garbage with old FlashInfer and CUTLASS; FlashInfer {flashinfer} "
        "is not "
        "among the versions shown to be good here",
        do="check answers of a known prompt set on the installed build, or A/B against --moe-runner-backend marlin",
        changes=({"moe_runner_backend": "marlin"},),
    )


def q3(look: Look) -> Outcome:
    if _weights(look) not in ("nvfp4", "mixed") or not look("is_moe"):
        return _not_for("no NVFP4 experts")
    backend = look("moe_runner_backend")
    if backend == "auto":
        return _cannot("which runner auto takes depends on GPU and version", "moe_runner_backend")
    if backend in ("flashinfer_cutlass", "flashinfer_trtllm", "flashinfer_trtllm_routed"):
        return _found(
            "info",
            "one_input_scale_for_all_experts",
            f"{backend} takes the largest activation scale over all experts, so quiet experts get coarse activations",
            severity="medium",
        )
    return _fine(f"{backend} does not share one activation scale over all experts", "input_scale_per_expert")


def line_rule(
    mark: str, verdict: str, what: str, fine: str, level: Level = "warning", **more: Any
) -> Callable[[Look], Outcome]:
    """A rule that stands on one log line; its absence counts only in a log that covers the start-up."""

    def check(look: Look) -> Outcome:
        if look.line(mark):
            return _found(level, verdict, what, certainty="read", **more)
        look.whole_start()
        return _fine(fine, "line_absent")

    return check


def q5(look: Look) -> Outcome:
    asked = look("quantization")
    if look.maybe_line("requantize"):
        return _found("warning", "requantized", "the checkpoint's quantization is undone and done again while loading")
    online = ("fp8", "mxfp8", "nvfp4_online", "quark_mxfp4", "modelopt_fp8", "int8", "w8a8_int8", "w8a8_fp8")
    if not asked:
        return _fine("no --quantization: the checkpoint is taken as it is", "not_requantized")
    kind = _weights(look)
    if kind == "none" and asked in online:
        return _found(
            "warning",
            "quantized_while_loading",
            f"--quantization {asked} quantizes 16-bit weights while loading, without calibration",
            changes=({"quantization": None},),
        )
    return _fine(f"--quantization {asked} names what the checkpoint already is ({kind})", "quantization_as_declared")


def q6(look: Look) -> Outcome:
    kind = _weights(look)
    if kind not in ("nvfp4", "mxfp4", "mixed"):
        return _not_for(f"no 4-bit weights ({kind})")
    trace = " ".join(look.maybe("kernel_trace", []) or [])
    marlin = look.maybe_line("marlin_fallback") or "marlin" in trace
    backend = look.maybe("moe_runner_backend")
    if marlin or backend == "marlin":
        return _w4a16(look, trace)
    if look.maybe("gpu_sm") is not None and str(look("gpu_sm")).split(".")[0] in ("8", "9"):
        what = f"compute capability {look('gpu_sm')} has no FP4 kernel: activations are not quantized to 4 bits"
        return _fine(what, "no_fp4_activations")
    if backend is None or backend == "auto":
        raise Missing(["moe_runner_backend", "kernel_trace"], "which FP4 kernel runs is not known")
    return Outcome(
        kind="accepted",
        verdict="activations_fp4",
        what=f"activations are quantized to 4 bits on {backend} (W4A4)",
        do="an A/B against --moe-runner-backend marlin (W4A16) tells what that costs",
    )


def _w4a16(look: Look, trace: str) -> Outcome:
    known = look.maybe("environment")
    flags = [
        name
        for name in (known["variables"] if known else {})
        if "MOE" in name and name.startswith(("VLLM_", "SGLANG_"))
    ]
    values: dict[str, Any] = {"kernel_path": "marlin (W4A16)"}
    if flags:
        values["env_flag_effective"] = False
    return _found(
        "info",
        "weight_only_fallback",
        "4-bit weights run through marlin with 16-bit activations"
        + (f" although {', '.join(flags)} asks for another path" if flags else "")
        + ": a label or an environment variable is no evidence of the kernel",
        severity="low",
        values=values,
    )


def w1(look: Look) -> Outcome:
    """The kernel that a trace names, whatever the engine or the checkpoint's label."""
    trace = look.maybe("kernel_trace")
    if trace is None and not look.maybe_line("marlin_fallback"):
        raise Missing(["kernel_trace"])
    text = " ".join(trace or [])
    if "marlin" in text.lower() or look.maybe_line("marlin_fallback"):
        return _w4a16(look, text)
    return _fine("the trace names no weight-only fallback", "no_fallback_seen")


def _recurrent(look: Look) -> bool:
    return look("recurrent") not in (None, "none")


def s1(look: Look) -> Outcome:
    if not _recurrent(look):
        return _not_for("no recurrent layers")
    chosen = look.maybe("ssm_dtype")
    if chosen is None:
        # The environment variable beats config.json, so without the whole environment the config decides nothing.
        chosen = look("mamba_ssm_dtype") or look.maybe_variable("SGLANG_MAMBA_SSM_DTYPE")
        configured = look("mamba_ssm_dtype_config") if chosen is None else None
        if chosen is None and torch_dtype(str(configured or "float32")) == "float32":
            look.variable("SGLANG_MAMBA_SSM_DTYPE")
        chosen = chosen or configured or "float32"
    dtype = torch_dtype(str(chosen))
    if dtype == "float32":
        return _fine("the recurrent state is kept in float32", "state_fp32")
    return _found(
        "warning",
        "recurrent_state_rounded",
        f"the recurrent state is kept in {chosen}: it is rounded at every step, so the error accumulates over the "
        "context",
        changes=({"mamba_ssm_dtype": "float32"},),
        values={"ssm_dtype": dtype},
    )


def s2(look: Look) -> Outcome:
    if not _recurrent(look):
        return _not_for("no recurrent layers")
    if look("enable_int8_mamba_checkpoint"):
        return _found(
            "warning",
            "int8_state_snapshots",
            "recurrent states kept for prefix reuse are stored in int8: every prefix hit starts from a rounded state",
            changes=({"enable_int8_mamba_checkpoint": False},),
        )
    return _fine("states kept for prefix reuse are not quantized", "state_snapshots_exact")


def s3(look: Look) -> Outcome:
    if not _recurrent(look):
        return _not_for("no recurrent layers")
    dtype = look.variable("SGLANG_MAMBA_CONV_DTYPE") or "bfloat16"
    if torch_dtype(dtype) == "float32":
        return _fine("the convolution state is kept in float32", "conv_fp32")
    return _found(
        "info",
        "conv_state_16bit",
        f"the convolution window is kept in {dtype} (the default)",
        severity="low",
        certainty="read",
    )


def _s4_remedy(look: Look) -> str:
    """What to choose instead, by version: up to 0.5.16 extra_buffer_lazy refuses to start with speculation."""
    version = look.maybe_version()
    if version is not None and version < (0, 5, 17, 0):
        return "--disable-radix-cache (extra_buffer_lazy does not start with speculation up to 0.5.16)"
    lazy = "--mamba-radix-cache-strategy extra_buffer_lazy, or --disable-radix-cache"
    return lazy if version is not None else f"{lazy}; up to 0.5.16 the former does not start with speculation"


def s4(look: Look) -> Outcome:
    if not _recurrent(look):
        return _not_for("no recurrent layers")
    if not look("speculative_algorithm"):
        return _not_for("no speculative decoding")
    strategy = look("mamba_radix_cache_strategy")
    # Who names extra_buffer keeps states for reuse; under any other word only the flag says whether prefixes are reused.
    radix_off = look.maybe("disable_radix_cache") if strategy == "extra_buffer" else look("disable_radix_cache")
    if radix_off or strategy in ("no_buffer", "extra_buffer_lazy"):
        return _fine("prefix reuse is off or does not keep extra buffers", "not_extra_buffer")
    batches = look.maybe("decode_batches")
    if batches and batches.get("stuck", 0) >= 3:
        return _found(
            "error",
            "acceptance_stuck_at_zero",
            f"{batches['stuck']} of {batches['total']} decode lines have acceptance 0 with the pool more than half "
            "full: the "
            "pattern of a corrupted recurrent state after eviction (token 0 repeated, '!!!!')",
            certainty="quoted",
            do=f"restart; then {_s4_remedy(look)}",
            changes=({"disable_radix_cache": True},),
        )
    return _found(
        "warning",
        "extra_buffer_with_speculation",
        f"{strategy or 'auto'} with speculation and prefix reuse: a corrupted state after eviction at high KV usage "
        "was reported "
        "for this combination (open)",
        certainty="quoted",
        do=f"{_s4_remedy(look)}; watch the accept rate",
        changes=({"disable_radix_cache": True},),
    )


def s5(look: Look) -> Outcome:
    kind = look("recurrent")
    if kind in (None, "none", "gdn", "kda"):
        return _not_for(f"recurrent layers: {kind or 'none'}, not Mamba2")
    strategy = look("mamba_radix_cache_strategy")
    if look.maybe("disable_radix_cache") or strategy == "no_buffer":
        return _fine("no extra-buffer snapshots", "no_snapshots")
    return _found(
        "warning",
        "mamba2_snapshots",
        "snapshots of Mamba2 states were reported wrong when several requests are prefilled together",
        certainty="quoted",
        changes=({"mamba_radix_cache_strategy": "no_buffer"},),
    )


def d1(look: Look) -> Outcome:
    if not look("speculative_algorithm"):
        return _not_for("no speculative decoding")
    names = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
    known = {name: look(name) for name in names if look.facts.value(name) is not None}
    if all(float(value) >= 1.0 for value in known.values()):
        known = {name: look(name) for name in names}  # one that is not known can't be called fine
    if all(float(value) >= 1.0 for value in known.values()):
        return _fine(
            "both acceptance thresholds are 1.0: drafts are accepted by the target's distribution",
            "lossless_acceptance",
        )
    said = ", ".join(f"{name.rpartition('_')[2]}={value}" for name, value in known.items())
    return _found(
        "error",
        "lossy_acceptance",
        f"acceptance thresholds {said}: drafts are accepted that the target would refuse",
        changes=({"speculative_accept_threshold_single": 1.0, "speculative_accept_threshold_acc": 1.0},),
        values={"outputs_valid": False},
    )


def d2(look: Look) -> Outcome:
    if not look("speculative_algorithm"):
        return _not_for("no speculative decoding")
    params = look("request_params")
    used = [
        name for name in ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty") if params.get(name)
    ]
    used = [name for name in used if not (name == "repetition_penalty" and float(params[name]) == 1.0)]
    if not used:
        return _fine("requests use neither min_p nor penalties", "plain_sampling")
    return _found(
        "warning",
        "sampling_differs_under_speculation",
        f"requests set {', '.join(used)}; verification ignores min_p and applies penalties from before the drafted "
        "window",
    )


def d3(look: Look) -> Outcome:
    length = look.variable("SGLANG_SIMULATE_ACC_LEN")
    try:
        simulated = length is not None and float(length) > 0
    except ValueError:
        simulated = False
    if not simulated:
        return _fine("SGLANG_SIMULATE_ACC_LEN is not set", "acceptance_real")
    return _found(
        "error",
        "synthetic_acceptance",
        f"SGLANG_SIMULATE_ACC_LEN={length}: drafted tokens are committed whatever the target says; the acceptance "
        "length is the "
        "configured one and the text is wrong",
        changes=({"environment": {"variables": {}, "complete": True}},),
        values={
            "accept_length_meaningful": False,
            "outputs_valid": False,
            "configured_accept_length": float(length or 0),
        },
    )


def d5(look: Look) -> Outcome:
    if not look("speculative_algorithm"):
        return _not_for("no speculative decoding")
    topk, page = look("speculative_eagle_topk"), look("page_size")
    if topk is None or page is None:
        raise Missing(["speculative_eagle_topk", "page_size"], "the value is worked out at start-up")
    if int(topk) <= 1 or int(page) <= 1:
        return _fine(f"topk {topk}, page size {page}: not a draft tree over pages", "no_tree_over_pages")
    if look.version() > (0, 5, 11, 99):
        return _fine("a version that refuses a tree over pages on a backend that cannot do it", "refused_where_wrong")
    return _found(
        "warning",
        "tree_over_pages",
        f"a draft tree (topk {topk}) over pages of {page} tokens: its own source calls it incorrect on some backends",
        changes=({"speculative_eagle_topk": 1}, {"page_size": 1}),
    )


def d4(look: Look) -> Outcome:
    if not look("speculative_algorithm"):
        return _not_for("no speculative decoding")
    platform = look("platform")
    if platform == "cuda":
        return _fine("CUDA verifies by sampling", "sampled_verification")
    return _found(
        "warning",
        "greedy_verification",
        f"on {platform} EAGLE-style verification is greedy whatever the temperature asks for",
        certainty="read",
    )


def c1(look: Look) -> Outcome:
    if look.maybe_line("context_overwritten"):
        return _found(
            "error", "context_beyond_native", "the log says that the context length is beyond what the model derives"
        )
    served, native = look("context_len"), look("native_context")
    rope = look.maybe("rope") or {}
    if served <= native:
        return _fine(f"{served} tokens of context, native {native}", "context_native")
    if str(rope.get("rope_type", rope.get("type", "default"))) not in ("default", "None"):
        return _found(
            "info", "context_scaled", f"{served} tokens are served over a native {native} with RoPE scaling: see C2"
        )
    return _found(
        "error",
        "context_beyond_native",
        f"{served} tokens of context are served, the model was trained for {native}: RoPE extrapolates",
        changes=({"context_length": native},),
        values={"served": served, "native": native},
    )


def c2(look: Look) -> Outcome:
    raw = look("json_model_override_args")
    try:
        override = json.loads(raw) if isinstance(raw, str) and raw.strip() else raw or {}
    except json.JSONDecodeError:
        return _cannot("--json-model-override-args is not JSON", "json_model_override_args")
    text = json.dumps(override)
    if "rope" not in text:
        return _fine("no RoPE override on the command line", "rope_as_trained")
    if look("model_class") in QWEN3_5 and "rope_parameters" not in json.dumps(override.get("text_config") or {}):
        return _found(
            "warning",
            "rope_override_ignored",
            "Qwen3.5 keeps its RoPE under text_config.rope_parameters; an override at another level is ignored in "
            "silence",
            certainty="derived",
        )
    return _found(
        "warning",
        "static_rope_scaling",
        "a static RoPE scaling is forced: it also changes prompts that are short enough without it",
        changes=({"json_model_override_args": "{}"},),
    )


def c4(look: Look) -> Outcome:
    if look.maybe_line("truncated"):
        return _found("error", "prompts_truncated", "prompts were cut: the log says that it truncates the input")
    if look("allow_auto_truncate"):
        return _found(
            "warning",
            "truncation_allowed",
            "--allow-auto-truncate: a prompt that is too long loses its tail instead of being refused",
            changes=({"allow_auto_truncate": False},),
        )
    return _fine("prompts that are too long are refused, not cut", "no_truncation")


def c5(look: Look) -> Outcome:
    served, native = look("context_len"), look("native_context")
    if served >= native:
        return _fine(f"the whole native context of {native} tokens is served", "context_whole")
    return _found(
        "info",
        "context_short",
        f"{served} of {native} native tokens are served: an agent compacts or loses history earlier",
        severity="medium",
        certainty="read",
        values={"served": served, "native": native},
    )


def t1(look: Look) -> Outcome:
    if look.maybe_line("no_chat_template"):
        return _found(
            "error", "no_chat_template", "the server found no chat template: chat requests are formatted by a fallback"
        )
    forced = look.maybe("chat_template")
    if forced:
        return _found(
            "info",
            "chat_template_replaced",
            f"--chat-template {forced} replaces the checkpoint's own",
            severity="medium",
            do="compare one prompt's ids with the checkpoint's own template",
        )
    if look.maybe_line("default_chat_template"):
        return _fine("the server announces the checkpoint's own chat template", "chat_template_own")
    if look("has_chat_template"):
        look("chat_template")
        return _fine("the checkpoint brings a chat template and none replaces it", "chat_template_own")
    return _found("error", "no_chat_template", "neither the checkpoint nor the command line has a chat template")


#: Parsers that a family needs for tool calls and reasoning. Source: FACTS T2 and the models' cards.
PARSERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "Qwen3_5": (("qwen3_coder",), ("qwen3",)),
    "Qwen3Next": (("qwen25", "qwen", "qwen3_coder"), ("qwen3", "qwen3-thinking")),
    "DeepseekV3": (("deepseekv3", "deepseekv31", "deepseekv32"), ("deepseek-r1", "deepseek-v3")),
    "GptOss": (("gpt-oss",), ("gpt-oss",)),
    "KimiK": (("kimi_k2",), ("kimi_k2", "kimi")),
    "MiniMaxM2": (("minimax-m2",), ("minimax", "minimax-append-think")),
    "Glm4Moe": (("glm45", "glm47", "glm"), ("glm45",)),
    "GlmMoeDsa": (("glm47", "glm45", "glm"), ("glm45",)),
}


def t2(look: Look) -> Outcome:
    model_class = str(look("model_class"))
    tool, reasoning = look("tool_call_parser"), look("reasoning_parser")
    family = next((name for name in PARSERS if model_class.startswith(name)), None)
    if family is None:
        return _cannot(f"which parsers {model_class} needs is not recorded here", "tool_call_parser")
    tools, reasonings = PARSERS[family]
    wrong = [
        f"--{name} {given or '(none)'}, expected {' or '.join(wanted)}"
        for name, given, wanted in (("tool-call-parser", tool, tools), ("reasoning-parser", reasoning, reasonings))
        if given not in wanted
    ]
    if not wrong:
        return _fine(f"tool calls by {tool}, reasoning by {reasoning}", "parsers_match")
    return _found(
        "warning",
        "parser_mismatch",
        "; ".join(wrong) + ": tool calls or reasoning end up in the wrong field",
        certainty="quoted",
        changes=({"tool_call_parser": tools[0], "reasoning_parser": reasonings[0]},),
    )


def t3(look: Look) -> Outcome:
    source = look("sampling_defaults")
    if source == "openai":
        return _found(
            "warning",
            "sampling_defaults_openai",
            "--sampling-defaults openai: temperature 1 and top_p 1 instead of the model's own recommendation",
            changes=({"sampling_defaults": "model"},),
        )
    announced = look.maybe("default_sampling")
    if announced:
        return _fine(f"defaults from generation_config.json: {short(announced)}", "sampling_defaults_model")
    config = look("generation_config")
    if not config:
        return _found(
            "warning",
            "no_generation_config",
            "generation_config.json is missing: temperature 1 and top_p 1 when a request is silent",
        )
    return _fine(f"generation_config.json: {short(config)}", "sampling_defaults_model")


def t4(look: Look) -> Outcome:
    if look("client_history"):
        return _fine("clients send earlier reasoning and tool text back", "history_whole")
    return _found("warning", "history_dropped", "clients leave earlier reasoning or tool text out of the next request")


def n1(look: Look) -> Outcome:
    if look.line("nan"):
        return _found(
            "error",
            "nan_in_logits",
            "the log reports NaN in the logits",
            do="find the kernel: swap one backend at a time",
        )
    if look.variable("SGLANG_ENABLE_NAN_LOGITS_CHECK") in ("1", "true", "True"):
        return _fine("NaN checks are on and none was reported", "no_nan_reported")
    return _cannot(
        "no NaN was reported, but nothing says that they are looked for (SGLANG_ENABLE_NAN_LOGITS_CHECK)", "environment"
    )


def n2(look: Look) -> Outcome:
    if look("enable_fp32_lm_head"):
        return _fine("logits are computed in fp32", "fp32_logits")
    return _found(
        "info",
        "16bit_logits",
        "logits are computed in 16 bits (the default): near ties may flip",
        severity="low",
        changes=({"enable_fp32_lm_head": True},),
    )


def n3(look: Look) -> Outcome:
    on = [name for name in ("enable_tf32_matmul", "enable_torch_compile") if look(name)]
    if look.maybe("enable_deterministic_inference"):
        return _fine("deterministic inference is on", "deterministic")
    if not on:
        return _fine(
            "neither TF32 nor torch.compile; batch-dependent kernels remain, which is noise and not bias", "usual_noise"
        )
    return _found("info", "more_noise", f"{', '.join(on)}: more run-to-run noise, no bias shown", severity="low")


_COMM_VARIABLES = ("ROCM_QUICK_REDUCE_QUANTIZATION", "SGLANG_ENABLE_DP_GATHER_FP8")


def n4(look: Look) -> Outcome:
    lossy = [name for name in ("enable_quant_communications",) if look(name)]
    dispatch = look.maybe("deepep_dispatcher_output_dtype")
    if look("moe_a2a_backend") not in (None, "none") and dispatch in ("fp8", "nvfp4", "auto"):
        lossy.append(f"deepep_dispatcher_output_dtype={dispatch}")
    lossy += [name for name in _COMM_VARIABLES if look.maybe_variable(name) not in (None, "", "0", "NONE", "false")]
    if lossy:
        return _found(
            "warning",
            "lossy_communication",
            f"{', '.join(lossy)}: partial results are quantized between GPUs",
            changes=({"enable_quant_communications": False},),
        )
    if look.facts.value("tp_size") == 1:
        look("tp_size")
        return _fine("one GPU: nothing is exchanged", "no_communication")
    for name in _COMM_VARIABLES:
        look.variable(name)
    return _fine("nothing quantizes what GPUs exchange", "exact_communication")


def n5(look: Look) -> Outcome:
    tp = look("tp_size")
    if int(tp or 1) == 1:
        return _not_for("one GPU")
    if look("disable_custom_all_reduce"):
        return _fine("custom all-reduce is off", "nccl_all_reduce")
    if look.line("custom_all_reduce_off"):
        return _fine("SGLang turned its custom all-reduce off by itself", "nccl_all_reduce")
    return _cannot(
        "whether custom all-reduce runs over PCIe peer-to-peer needs the topology (nvidia-smi topo -m)",
        "disable_custom_all_reduce",
    )


def n6(look: Look) -> Outcome:
    if look("disable_cuda_graph") or look("disable_cuda_graph_padding"):
        return _fine("no graph padding", "no_graph_padding")
    if look("speculative_algorithm") == "NGRAM" and look("attention_backend_decode") == "flashinfer":
        version = look.version()
        if version <= (0, 5, 11, 0):
            return _found(
                "warning",
                "graph_padding_bug",
                "NGRAM with flashinfer and graph padding was fixed after this version",
                certainty="quoted",
            )
    return _fine("no combination that is known to break under graph padding", "no_known_padding_bug")


def n7(look: Look) -> Outcome:
    family = _family(look)
    if look("mla") and family in ("e4m3", "e5m2"):
        return _found(
            "warning",
            "mla_fp8_chunked_prefix",
            "MLA with FP8 KV reads its prefix in chunks: wrong results were reported for this combination",
            severity="medium",
            certainty="quoted",
            do="A/B with another --chunked-prefill-size on logprobs of fixed ids",
        )
    return _fine("not MLA with FP8 KV", "no_known_chunk_bug")


def n8(look: Look) -> Outcome:
    if look("speculative_algorithm") != "NGRAM":
        return _not_for("no NGRAM speculation")
    if look("disable_radix_cache"):
        return _fine("the prefix cache is off", "no_prefix_cache")
    return _found(
        "warning",
        "ngram_with_prefix_cache",
        "NGRAM with the prefix cache: diverging answers were reported",
        certainty="quoted",
        changes=({"disable_radix_cache": True},),
    )


def l1(look: Look) -> Outcome:
    formats = {
        "load_format": look("load_format"),
        "speculative_draft_load_format": look("speculative_draft_load_format"),
    }
    dummy = [name for name, value in formats.items() if value == "dummy"]
    if "load_format" in dummy:
        return _found(
            "error", "random_weights", "--load-format dummy: the weights are random", changes=({"load_format": "auto"},)
        )
    if dummy:
        return _found(
            "warning", "random_draft", "the draft's weights are random: acceptance means nothing", severity="high"
        )
    extra = look("model_loader_extra_config")
    if extra not in (None, "{}", "", {}):
        return _cannot(
            f"--model-loader-extra-config {short(extra)}: what it changes was not read", "model_loader_extra_config"
        )
    return _fine(f"weights are loaded ({formats['load_format']})", "real_weights")


def l2(look: Look) -> Outcome:
    if look.line("not_loaded") or look.line("not_in_params"):
        return _found(
            "info",
            "tensors_not_loaded",
            "the loader names tensors of the checkpoint that it does not load",
            severity="low",
            certainty="read",
            do="find out which tensors: what is left out is not computed with (KV scales have rules of their own, KV2, KV3)",
        )
    raise Missing(["log_lines"], "most dropped tensors are dropped without a line; only comparing names tells")


def h1x(look: Look) -> Outcome:
    if not look("enable_hierarchical_cache"):
        return _not_for("no hierarchical cache")
    storage = look("hicache_storage_backend")
    if not storage:
        return _fine("host copies of the cache are exact", "hicache_exact")
    return _found(
        "info",
        "stale_storage_tier",
        f"HiCache keeps pages in {storage} beyond the process: pages of another model or dtype must not be found there",
        severity="low",
        do="clear or name-space the storage whenever model or KV dtype change",
    )


def h2(look: Look) -> Outcome:
    if look("enable_hisparse"):
        return _found(
            "error", "sparse_attention", "HiSparse leaves tokens out of the target's attention", certainty="read"
        )
    backends = {look("attention_backend_prefill"), look("attention_backend_decode")}
    if "qsa" in backends:
        return _found("error", "sparse_attention", "qsa leaves tokens out of the target's attention", certainty="read")
    if look.facts.value("speculative_draft_window_size"):
        look("speculative_draft_window_size")
        return _found("info", "draft_window", "a draft window moves acceptance, not answers", severity="none")
    return _fine("attention sees every token", "dense_attention")


def g1(look: Look) -> Outcome:
    text = str(look("output_text"))
    if not text.strip():
        raise Missing(["output_text"], "the text is empty: nothing can be said of it")
    signs, hints = output_signs(text), output_hints(text)
    if hints and not signs:
        return _found(
            "warning",
            "repetition_in_code",
            "the text looks like code or a table and repeats itself: " + "; ".join(hints),
            severity="low",
            do="read the place; data repeats itself, a loop of the model does too",
            values={"hints": hints},
        )
    if not signs:
        return _fine("the text shows no sign of garbage", "text_plausible")
    return _found(
        "error",
        "garbage_output",
        "the text is garbage: " + "; ".join(signs),
        do="compare with another attention and MoE backend on the same prompt at temperature 0",
        values={"class": "garbage_output", "signs": signs},
    )


def v1(look: Look) -> Outcome:
    if look.line("vllm_q_scale"):
        return _found(
            "info",
            "kv_scales_present",
            "the line is about the query's scale: K and V scales are in the checkpoint, and the missing q scale "
            "takes k_scale",
            severity="low",
            values={"missing": "q scale only", "kv_scales_in_checkpoint": True},
        )
    look.whole_start()
    return _not_for("no line about a q scale")


def v2(look: Look) -> Outcome:
    if look.line("vllm_scale_default"):
        return _found(
            "warning", "scale_1.0_in_use", "vLLM says that the KV scale is 1.0", values={"scale_in_effect": 1.0}
        )
    if look.line("vllm_uncalibrated"):
        return _found(
            "warning", "uncalibrated_attention_scale", "vLLM runs FP8 attention with a scale of 1.0 for the query or P"
        )
    if look.line("vllm_q_scale"):
        return _fine("K and V scales are in the checkpoint (V1)", "kv_scales_present")
    if look.line("vllm_fp8_kv"):
        return _cannot("vLLM stores KV in FP8; its line does not say whether scales were found", "kv_scales")
    look.whole_start()
    return _fine("no FP8 KV line in vLLM's start-up", "kv_not_quantized")


def x1(look: Look) -> Outcome:
    """Sources that contradict each other: the process runs something else than the log or the launch line says."""
    clashes, compared = disagreements(look.facts)
    if not compared:
        raise Missing(
            ["kv_dtype_target", "kv_cache_dtype", "max_total_num_tokens"], "fewer than two sources speak about one fact"
        )
    if not clashes:
        return _fine(f"{compared} facts are told alike by several sources", "sources_agree")
    for clash in clashes:
        for fact in clash:
            look._note(fact)
    told = "; ".join(
        f"{clash[0].name}: " + " / ".join(f"{short(fact.value)} ({fact.source})" for fact in clash) for clash in clashes
    )
    return _found(
        "error",
        "sources_disagree",
        f"the inputs describe different processes: {told}",
        severity="high",
        values={"facts": [clash[0].name for clash in clashes]},
        do="find out which process answers (pid, start time, port owner), and give log, launch line and answers of "
        "the same one",
    )


def x3(look: Look) -> Outcome:
    """Arguments with which this version does not start: refused by its argparse, or by a check that is known."""
    version = look("sglang_version")
    if version_key(version) is None:
        raise Missing(["sglang_version"], f"{short(version)} is no release whose arguments are known")
    if has_run(look.facts):
        return Outcome("not_applicable", "a process of this deployment was seen: it starts")
    faults = launch_faults(look.facts)
    if not faults:
        return _fine(f"nothing is known against starting these arguments on {version}", "starts_as_far_as_known")
    told = "; ".join(f"{fault.reason} ({fault.source})" for fault in faults)
    return _found(
        "error",
        "does_not_start",
        f"SGLang {version} does not start with these arguments: {told}",
        values={"refused_by": [fault.id for fault in faults]},
    )


def x2(look: Look) -> Outcome:
    """What was asked for and what was allocated or taken."""
    ignored = [one for one in look.facts.value("backends_replaced") or () if one["silent"]]
    if ignored:
        look("backends_replaced")
        told = "; ".join(f"{one['kind']} {one['asked']} was asked for, {one['taken']} runs" for one in ignored)
        return _found(
            "warning",
            "backend_ignored",
            f"{told}, and no message says so",
            severity="medium",
            do="ask for the backend that runs, or change what keeps the other from running (weights, GPU, version); every "
            "number measured under the asked name belongs to the one that ran",
            values={"ignored": ignored},
        )
    asked = torch_dtype(look("kv_cache_dtype"))
    real = look.facts.best("kv_dtype_target")
    if real is None or (real.how not in ("measured", "read") and real.source != "arithmetic"):
        raise Missing(["kv_dtype_target"], "what was allocated was not seen")
    look._note(real)
    if asked and asked != "auto" and dtype_family(asked) != dtype_family(real.value):
        return _found(
            "error",
            "asked_but_not_done",
            f"--kv-cache-dtype {look('kv_cache_dtype')} was asked for, {real.value} was allocated",
            values={"asked": asked, "allocated": real.value},
        )
    replaced = look.maybe("backends_replaced") or []
    if replaced:
        told = "; ".join(f"{one['kind']} {one['asked']} was asked for, {one['taken']} runs" for one in replaced)
        return _found("info", "backend_replaced", f"{told}; the log says so", severity="medium")
    if look.maybe_line("backend_fallback") or look.maybe_line("attention_changed"):
        return _found(
            "info",
            "backend_replaced",
            "the log says that the attention backend that was asked for is not the one that runs",
            severity="medium",
        )
    return _fine(f"the KV pool is what was asked for ({look('kv_cache_dtype')}: {real.value})", "as_asked")


def disagreements(facts: Facts) -> tuple[list[list[Fact]], int]:
    """Facts that several sources tell differently, and how many facts were told more than once.

    An argument that one source leaves unset or on auto and another resolves is no contradiction, with one exception:
    what was asked for explicitly and is not there any more.
    """
    clashes: list[list[Fact]] = []
    compared = 0
    for name, kind in FACTS.items():
        if not kind.must_agree:
            continue
        told = [fact for fact in facts.sightings.get(name, []) if fact.how != "derived" or fact.source == "log"]
        by_source: dict[str, Fact] = {}
        for fact in told:
            by_source.setdefault(fact.source, fact)
        if len(by_source) < 2:
            continue
        compared += 1
        explicit = {_plain(fact.value, name) for fact in by_source.values()} - {None}
        # An explicit KV dtype of the launch cannot turn back into auto in the same process.
        launched = [fact for source, fact in by_source.items() if source in ("flags", "log")]
        gone = (
            name == "kv_cache_dtype"
            and any(_plain(fact.value) is not None for fact in launched)
            and any(_plain(fact.value) is None for source, fact in by_source.items() if source != "flags")
        )
        if name == "kv_bytes_per_token":
            told_bytes = [float(fact.value) for fact in by_source.values()]
            # Sizes are printed with two decimals; a factor of two between dtypes is far outside that.
            if max(told_bytes) <= 1.1 * min(told_bytes):
                continue
        if len(explicit) > 1 or gone:
            clashes.append(list(by_source.values()))
    return clashes, compared


def _plain(value: Any, name: str = "") -> Any:
    """A value without its spelling: dtypes by torch name, NEXTN as EAGLE, releases without post, unset as None."""
    if name == "sglang_version":
        key = version_key(str(value))
        return key[:3] if key else None
    if value in (None, "auto", "", "{}", "none") or value is False:
        return None if value is not False else False
    if isinstance(value, str):
        alias = {"NEXTN": "EAGLE"}.get(value, value)
        return torch_dtype(value) or alias
    return json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else value
