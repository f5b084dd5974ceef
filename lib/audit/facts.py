"""What is known about one deployment: each fact with its value, how it is known and where that can be checked.

A fact that nobody has seen is not False and not a default: it is absent, and a rule that needs it says so.
Several sources may speak about the same fact (a launch line, a log, a running process). All sightings are kept, so that
two sources which contradict each other are a finding of their own instead of the last one silently winning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from lib.records import Evidence, Record
from lib.server.redact import redact_text

#: How a fact is known, strongest first: seen on a running process, read in the file or answer that decides it,
#: worked out from other facts, said by somebody in public, only asked for.
How = Literal["measured", "read", "derived", "quoted", "asked"]
HOW_ORDER: tuple[How, ...] = ("measured", "read", "derived", "quoted", "asked")

#: What a fact belongs to. A change of configuration leaves the checkpoint and the hardware as they are, and makes
#: everything that a process has shown so far void, because the changed process has not run yet.
Belongs = Literal["program", "argument", "environment", "checkpoint", "hardware", "process", "client"]


#: Note of an argument that a whole launch line leaves out.
DEFAULT_NOTE = "not on the launch line: SGLang's default"
#: Begins the note of an argument that was written under another name, which some versions refuse.
WRITTEN_AS = "written as "


@dataclass(frozen=True)
class FactKind:
    """One row of FACTS: what a fact is, what it belongs to, and which evidence would settle it."""

    name: str
    what: str
    belongs: Belongs
    settled_by: tuple[str, ...]
    must_agree: bool = False


class Fact(Record):
    """One sighting: the value, how it is known, which input said so, and the quoted place."""

    name: str
    value: Any = None
    how: How
    source: str
    evidence: list[Evidence] = []
    note: str | None = None


_LAUNCH = ("--flags with the launch line", "--log with the server_args= line", "--server-info or --base-url")
_LOG = ("--log with the start-up",)
_CKPT = ("--checkpoint DIR",)
_ENV = ("--environ with a copy of /proc/PID/environ (a launch line shows only a part)",)


def _row(
    name: str, what: str, belongs: Belongs, settled_by: tuple[str, ...], must_agree: bool = False
) -> tuple[str, FactKind]:
    return name, FactKind(name, what, belongs, settled_by, must_agree)


def _argument(name: str, what: str, must_agree: bool = True) -> tuple[str, FactKind]:
    return name, FactKind(name, what, "argument", _LAUNCH, must_agree)


#: Every fact that a rule can ask for. Server arguments keep SGLang's own field names, so a search finds them upstream.
FACTS: dict[str, FactKind] = dict(
    [
        _row(
            "engine", "which program serves (sglang, vllm)", "program", ("--log", "--server-info or --base-url"), True
        ),
        _row(
            "sglang_version",
            "the SGLang version that runs",
            "program",
            ("--sglang-version", "--server-info or --base-url", "pip show sglang in its environment"),
            True,
        ),
        _row(
            "flashinfer_version",
            "the FlashInfer version that runs",
            "program",
            ("pip show flashinfer-python in its environment, given as --flags 'FLASHINFER_VERSION=0.6.14 ...'",),
        ),
        _row(
            "gpu_sm", "compute capability of the GPUs (12.0, 10.0, 9.0)", "hardware", ("--gpu 'RTX PRO 6000' or 12.0",)
        ),
        _row("platform", "cuda, hip, xpu, npu or cpu", "hardware", _LAUNCH),
        # Server arguments, as asked or resolved before the model is loaded.
        _argument("kv_cache_dtype", "the KV cache dtype asked for"),
        _argument("speculative_draft_kv_cache_dtype", "the KV cache dtype asked for the draft"),
        _argument("quantization_param_path", "JSON file with KV scaling factors"),
        _argument("attention_backend", "attention backend asked for"),
        _argument("prefill_attention_backend", "attention backend asked for prefill"),
        _argument("decode_attention_backend", "attention backend asked for decode"),
        _argument("moe_runner_backend", "MoE runner asked for"),
        _argument("fp4_gemm_runner_backend", "FP4 GEMM backend asked for"),
        _argument("fp8_gemm_runner_backend", "FP8 GEMM backend asked for"),
        _argument("quantization", "quantization asked for on the command line"),
        _argument("mamba_ssm_dtype", "dtype of the recurrent state asked for"),
        _argument("mamba_radix_cache_strategy", "how recurrent states are kept for prefix reuse"),
        _argument("enable_int8_mamba_checkpoint", "cached recurrent states kept in int8"),
        _argument("enable_mamba_cache_stochastic_rounding", "recurrent state rounded stochastically"),
        _argument("disable_radix_cache", "prefix cache off"),
        _argument("speculative_algorithm", "speculative decoding algorithm"),
        _argument("speculative_num_draft_tokens", "tokens that one verification looks at"),
        _argument("speculative_num_steps", "drafts in a row"),
        _argument("speculative_adaptive", "draft length that follows acceptance"),
        _argument("disable_overlap_schedule", "scheduling without overlap"),
        _argument("linear_attn_backend", "backend of recurrent layers asked for"),
        _argument("linear_attn_decode_backend", "backend of recurrent layers asked for decode"),
        _argument("pp_size", "pipeline-parallel stages"),
        _argument("nnodes", "nodes"),
        _argument("speculative_eagle_topk", "branches of the draft tree"),
        _argument("page_size", "tokens per page of the KV pool"),
        _argument("speculative_accept_threshold_single", "acceptance threshold for one token"),
        _argument("speculative_accept_threshold_acc", "acceptance threshold, accumulated"),
        _argument("speculative_draft_load_format", "how the draft's weights are loaded"),
        _argument("speculative_draft_window_size", "attention window of the draft"),
        _argument("context_length", "context length asked for"),
        _argument("json_model_override_args", "overrides of config.json on the command line"),
        _argument("allow_auto_truncate", "too long prompts are cut instead of refused"),
        _argument("chat_template", "chat template given on the command line"),
        _argument("default_chat_template_kwargs", "defaults for the chat template's variables"),
        _argument("reasoning_parser", "parser that separates the reasoning"),
        _argument("tool_call_parser", "parser of tool calls"),
        _argument("sampling_defaults", "where default sampling parameters come from"),
        _argument("load_format", "how the weights are loaded"),
        _argument("model_loader_extra_config", "extra options of the weight loader"),
        _argument("enable_fp32_lm_head", "logits computed in fp32"),
        _argument("enable_tf32_matmul", "TF32 for fp32 matrix products"),
        _argument("enable_torch_compile", "torch.compile"),
        _argument("enable_deterministic_inference", "batch-invariant kernels"),
        _argument("enable_quant_communications", "all-reduce quantized to INT8"),
        _argument("disable_custom_all_reduce", "SGLang's own all-reduce off"),
        _argument("enable_p2p_check", "peer-to-peer access checked"),
        _argument("moe_a2a_backend", "expert-parallel exchange"),
        _argument("deepep_dispatcher_output_dtype", "dtype of expert dispatch"),
        _argument("enable_hierarchical_cache", "HiCache"),
        _argument("hicache_storage_backend", "HiCache's storage tier"),
        _argument("enable_hisparse", "HiSparse attention"),
        _argument("disable_cuda_graph", "CUDA graphs off"),
        _argument("disable_cuda_graph_padding", "CUDA graphs without padding"),
        _argument("chunked_prefill_size", "tokens per prefill chunk"),
        _argument("model_path", "path or name of the model"),
        _argument("tp_size", "tensor parallel size"),
        _row("environment", "environment variables of the process, and whether all are known", "environment", _ENV),
        # The checkpoint.
        _row("model_class", "the model class that runs", "checkpoint", (*_CKPT, *_LOG, "/model_info"), True),
        _row("kv_declared", "quantization files of the checkpoint, raw", "checkpoint", _CKPT),
        _row("kv_scales", "k_scale/v_scale tensors: how many, their names and values", "checkpoint", _CKPT),
        _row("weight_quant", "how the checkpoint's weights are quantized", "checkpoint", (*_CKPT, *_LOG)),
        _row("mla", "attention keeps one latent per token (MLA)", "checkpoint", _CKPT),
        _row("is_moe", "the model has routed experts", "checkpoint", _CKPT),
        _row("recurrent", "the model has recurrent layers (gdn, mamba, kda), or none", "checkpoint", (*_CKPT, *_LOG)),
        _row("mamba_ssm_dtype_config", "dtype of the recurrent state by config.json", "checkpoint", _CKPT),
        _row("native_context", "max_position_embeddings", "checkpoint", _CKPT),
        _row("rope", "rope parameters as config.json nests them", "checkpoint", _CKPT),
        _row("has_chat_template", "the checkpoint brings a chat template", "checkpoint", _CKPT),
        _row("generation_config", "generation_config.json, or False when it is missing", "checkpoint", _CKPT),
        _row("kv_auto_forced", "KV dtype that the model class forces under auto", "checkpoint", _CKPT),
        # What a process has shown.
        _row(
            "kv_dtype_target", "dtype of the allocated KV pool", "process", (*_LOG, "--server-info", "--metrics"), True
        ),
        _row("kv_dtype_draft", "dtype of the draft's KV pool", "process", _LOG),
        _row(
            "kv_bytes_per_token",
            "bytes of KV pool per token and GPU",
            "process",
            (*_LOG, "--server-info", "--metrics"),
            True,
        ),
        _row(
            "kv_scales_loaded", "whether this version and class load the scales", "process", (*_LOG, "--sglang-version")
        ),
        _row("attention_backend_prefill", "attention backend that prefill takes", "process", _LAUNCH),
        _row("attention_backend_decode", "attention backend that decode takes", "process", _LAUNCH),
        _row("backends_replaced", "backends that were asked for and are not the ones that run", "process", _LOG),
        _row("ssm_dtype", "dtype of the recurrent state by the size of its pool", "process", (*_LOG, *_CKPT)),
        _row("state_pool", "slots and size of the recurrent state's pool", "process", _LOG),
        _row("context_len", "context length that is served", "process", (*_LOG, "--server-info"), True),
        _row("max_total_num_tokens", "tokens that the KV pool holds", "process", _LOG, True),
        _row("startup_seen", "the log covers the loading of the weights and the pools", "process", _LOG),
        _row("log_lines", "lines of the log that bear on accuracy", "process", _LOG),
        _row("default_sampling", "sampling defaults that the server announced", "process", _LOG),
        _row(
            "decode_batches",
            "decode lines: how many, and how many stuck at acceptance 0",
            "process",
            ("--log of a day",),
        ),
        _row(
            "accept_length",
            "acceptance length that the server reports",
            "process",
            (*_LOG, "--server-info", "--metrics"),
        ),
        _row("kernel_trace", "function names seen in a trace or log of the process", "process", ("a profiler trace",)),
        # The client's side.
        _row("output_text", "text that the server produced", "client", ("answers kept by a probe",)),
        _row(
            "request_params", "sampling parameters that clients send", "client", ("a log of requests (--log-requests)",)
        ),
        _row(
            "client_history",
            "whether clients send earlier reasoning and tool text back",
            "client",
            ("the client's requests",),
        ),
    ]
)


class Facts(Record):
    """All sightings about one deployment, by name of the fact; what is absent is unknown."""

    sightings: dict[str, list[Fact]] = {}

    def best(self, name: str) -> Fact | None:
        """The strongest sighting of a fact (see HOW_ORDER; the first wins a tie), or None when nobody has seen it."""
        if name not in FACTS:
            raise KeyError(f"{name!r} is not a fact; known facts: {sorted(FACTS)}")
        seen = self.sightings.get(name)
        return min(seen, key=lambda fact: HOW_ORDER.index(fact.how)) if seen else None

    def value(self, name: str) -> Any:
        """The value of the strongest sighting, or None when unknown."""
        fact = self.best(name)
        return fact.value if fact else None

    def known(self, name: str) -> bool:
        """Whether anybody has seen the fact (a seen None, e.g. an argument left unset, counts as seen)."""
        return self.best(name) is not None

    def plus(self, facts: Iterable[Fact]) -> Facts:
        """These facts and more sightings; nothing is overwritten."""
        merged = {name: list(seen) for name, seen in self.sightings.items()}
        for fact in facts:
            if fact.name not in FACTS:
                raise KeyError(f"{fact.name!r} is not a fact; known facts: {sorted(FACTS)}")
            seen = merged.setdefault(fact.name, [])
            if fact not in seen:
                seen.append(fact)
        return Facts(sightings=merged)

    def without(self, names: Iterable[str]) -> Facts:
        """These facts except all sightings of `names`."""
        gone = set(names)
        return Facts(sightings={name: list(seen) for name, seen in self.sightings.items() if name not in gone})


def make_fact(
    name: str,
    value: Any,
    how: How,
    source: str,
    *,
    path: str | None = None,
    line: int | None = None,
    quote: str | None = None,
    note: str | None = None,
) -> Fact:
    """One sighting with one place as evidence (the source's name when there is no file)."""
    evidence = [Evidence(path=path or source, line=line, quote=redact_text(quote)[:400] if quote else None)]
    return Fact(name=name, value=value, how=how, source=source, evidence=evidence, note=note)


_DTYPES = {
    "auto": "auto",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "float16": "float16",
    "fp32": "float32",
    "float": "float32",
    "float32": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "float8_e4m3": "float8_e4m3fn",
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e4m3fnuz": "float8_e4m3fnuz",
    "fp8_e5m2": "float8_e5m2",
    "float8_e5m2": "float8_e5m2",
    "float8_e5m2fnuz": "float8_e5m2fnuz",
    "mxfp8": "mxfp8",
    "int8": "int8",
    "nvfp4": "float4_e2m1fn_x2",
    "fp4_e2m1": "float4_e2m1fn_x2",
    "fp4_mx_block16": "float4_e2m1fn_x2",
    "float4_e2m1fn_x2": "float4_e2m1fn_x2",
}


def torch_dtype(name: str | None) -> str | None:
    """The torch name of a dtype however it is spelled, or None for a name that nobody here knows.

    Example: `torch_dtype("torch.float8_e4m3fn") == torch_dtype("fp8_e4m3") == "float8_e4m3fn"`.
    """
    return _DTYPES.get(name.lower().removeprefix("torch.").strip()) if isinstance(name, str) else None


def dtype_family(name: str | None) -> str | None:
    """`16bit`, `e4m3`, `e5m2`, `mxfp8`, `int8`, `4bit`, `32bit` or `auto`; None when unknown."""
    dtype = torch_dtype(name)
    if dtype is None:
        return None
    if dtype.startswith("float8_e4m3"):
        return "e4m3"
    if dtype.startswith("float8_e5m2"):
        return "e5m2"
    return {"bfloat16": "16bit", "float16": "16bit", "float32": "32bit", "float4_e2m1fn_x2": "4bit"}.get(dtype, dtype)


def version_key(version: str | None) -> tuple[int, int, int, int] | None:
    """`0.5.15.post1` as (0, 5, 15, 1), or None for text without three numbers (a branch, a commit).

    Example: `version_key("0.5.9") < version_key("0.5.10.post1")`.
    """
    match = re.search(r"(\d+)\.(\d+)\.(\d+)(?:\.post(\d+))?", version or "")
    if not match:
        return None
    major, minor, patch, post = (int(group or 0) for group in match.groups())
    return major, minor, patch, post
