"""The accuracy audit: a table of rules over the facts about a deployment, and the report that it gives. Pure.

The question is the user's: 'are we doing anything that could be reducing model accuracy?' The answer has four parts,
and none may be left out: what was found, what was checked and is fine, what could not be checked and which
evidence would
settle it, and which losses are accepted (quantized weights).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from lib.audit import checks
from lib.audit.checks import LEVELS, SEVERITIES, Level, Look, Missing, Outcome, Severity, short
from lib.audit.facts import DEFAULT_NOTE, FACTS, Fact, Facts, How
from lib.audit.launch import has_run, launch_faults
from lib.audit.scales import derived, extrapolated, version_of
from lib.errors import BadInput
from lib.records import Evidence, Record


@dataclass(frozen=True)
class Rule:
    """One row of RULES: what is looked for, on which evidence, how sure the claim is, and what to do."""

    id: str
    title: str
    group: str
    needs: tuple[str, ...]
    check: Callable[[Look], Outcome]
    severity: Severity
    certainty: How
    versions: str
    effect: str
    silent: str
    do: str
    source: str
    engines: tuple[str, ...] = ("sglang",)


class FixCheck(Record):
    """A recommended change, run through all rules again: what it solves, what it brings, what stays open."""

    change: dict[str, Any]
    solves: bool
    introduces: list[str] = []
    not_checked: list[str] = []
    verdict: str


class Finding(Record):
    """Something that may lower accuracy, with how sure that is and where it can be checked."""

    id: str
    title: str
    level: Level
    severity: Severity
    verdict: str
    what: str
    effect: str
    silent: str
    certainty: How
    do: str
    source: str
    versions: str
    values: dict[str, Any] = {}
    explains: list[str] = Field(default=[], description="marks of the log lines that it speaks about (LINES)")
    assumes_defaults: bool = Field(default=False, description="it stands on a default of SGLang that no input states")
    fixes: list[FixCheck] = []
    evidence: list[Evidence] = []


class Checked(Record):
    """A rule whose facts are known and give no reason for concern."""

    id: str
    title: str
    why: str
    verdict: str = "ok"
    certainty: How
    evidence: list[Evidence] = []


class NotChecked(Record):
    """A rule that could not be answered: which facts are missing and which evidence would settle them."""

    id: str
    title: str
    severity: Severity
    missing: list[str]
    why: str
    settled_by: list[str]


class NotApplicable(Record):
    """A rule that does not concern this deployment."""

    id: str
    title: str
    why: str


class AcceptedLoss(Record):
    """A loss that comes with the checkpoint that was chosen; named, not hidden."""

    id: str
    title: str
    what: str
    certainty: How
    instead: str
    source: str
    evidence: list[Evidence] = []


class AuditReport(Record):
    """The answer to 'are we doing anything that could be reducing model accuracy?'."""

    answer: str
    verdict: Literal["loses_accuracy", "nothing_found", "nothing_found_but_incomplete", "checked_nothing"]
    worst_level: Level | None
    findings: list[Finding]
    fine: list[Checked]
    not_checked: list[NotChecked]
    not_applicable: list[NotApplicable]
    accepted_losses: list[AcceptedLoss]
    facts: dict[str, Any]

    @property
    def leading(self) -> Finding | None:
        """The finding that matters most, or None."""
        return self.findings[0] if self.findings else None


class FixAudit(Record):
    """What a change does to the audit: findings that it removes, keeps and brings, and what can no longer be told."""

    change: dict[str, Any]
    verdict: Literal["safe", "brings_findings", "cannot_be_told", "solves_nothing", "does_not_start"]
    why: str | None = Field(
        default=None, description="does_not_start: what the server says, and where that is known from"
    )
    removed: list[str]
    kept: list[str]
    introduced: list[Finding]
    not_checked: list[NotChecked]
    report: AuditReport


#: Accuracy-relevant lines of a log: mark -> (literal to look for, regular expression, what it shows). `evidence` scans
#: for them.
LINES: dict[str, tuple[str, str, str]] = {
    "scale_default": (
        "no scaling factors provided",
        r"Using FP8 KV cache but no scaling factors provided",
        "printed when --kv-cache-dtype is fp8_e4m3 and --quantization-param-path is unset, whatever the checkpoint "
        "holds",
    ),
    "scale_file_loaded": (
        "Loaded KV cache scaling factors",
        r"Loaded KV cache scaling factors from",
        "the JSON file was read",
    ),
    "scale_not_loaded": (
        "is not loaded.",
        r"Found \.?[kv]_scale in the checkpoint .*is not loaded\.",
        "a KV scale of the checkpoint has no parameter to go to",
    ),
    "scale_ignored_16bit": (
        "Ignoring k_scale",
        r"Checkpoint has k_scale but KV cache dtype is not FP8\. *Ignoring k_scale",
        "scales are loaded, and this backend leaves them out of a 16-bit pool",
    ),
    "not_loaded": (
        "not loaded",
        r"^(?!.*Found \.?[kv]_scale in the checkpoint ).*(?:is|are) not loaded\.",
        "a tensor of the checkpoint that is no KV scale is left out",
    ),
    "not_in_params": ("found in params_dict", r"not found in params_dict", "a tensor of the checkpoint is left out"),
    "fp4_kv_warning": ("might lead to a", r"KV Cache might lead to an? accuracy drop", "4-bit KV cache"),
    "w1_w3_scale": (
        "w1_weight_scale_2 must match",
        r"w1_weight_scale_2 must match w3_weight_scale_2",
        "gate scale used for up-proj",
    ),
    "requantize": (
        "Beware that",
        r"Beware that (?:requantization|this optimization) may",
        "weights are quantized again while loading",
    ),
    "ue8m0": (
        "scale_fmt of checkpoint",
        r"scale_fmt of checkpoint is not ue8m0",
        "DeepGEMM with scales of another format",
    ),
    "marlin_fallback": (
        "arlin",
        r"[Ww]eight-only FP\w+ compression will\s+be used leveraging the Marlin kernel|prepare_\w*for_marlin"
        r"|leveraging the Marlin kernel",
        "weights run through marlin with 16-bit activations",
    ),
    "context_overwritten": (
        "is greater than the derived",
        r"context_length \(\d+\) is greater than the derived",
        "beyond native",
    ),
    "rope_factor": ("rope_scaling missing", r"rope_scaling missing 'factor'", "RoPE scaling without a factor"),
    "truncated": ("Truncating the input", r"Truncating the input", "a prompt was cut"),
    "no_chat_template": ("No HuggingFace chat template", r"No HuggingFace chat template found", "no template"),
    "default_chat_template": (
        "chat template",
        r"Using default HuggingFace chat template",
        "the checkpoint's own template",
    ),
    "nan": (
        "NaN",
        r"Detected errors during sampling! NaN|NaN detected in|NaN happened|NaN in the logits",
        "NaN in the logits",
    ),
    "custom_all_reduce_off": (
        "is disabled because",
        r"Custom[Aa]ll[Rr]educe\w* is disabled because",
        "NCCL does the all-reduce",
    ),
    "backend_fallback": (
        "back to",
        r"will fallback to \S+ backend|[Ff]all(?:ing)? back to \w+ (?:attention )?backend",
        "another backend than asked for",
    ),
    "attention_changed": (
        "Setting attention backend",
        r"Setting attention backend to \w+",
        "another attention backend than asked for",
    ),
    "vllm_q_scale": ("q scaling factor", r"Checkpoint does not provide a q scaling factor", "K and V scales exist"),
    "vllm_scale_default": ("caling factor", r"Using KV cache scaling factor 1\.0 for fp8", "vLLM uses scale 1.0"),
    "vllm_fp8_kv": ("to store kv cache", r"Using fp8\w* data type to store kv cache", "vLLM stores KV in FP8"),
    "vllm_uncalibrated": ("uncalibrated q_scale", r"Using uncalibrated q_scale", "vLLM attention scale 1.0 for Q or P"),
}


def _rule(id: str, title: str, group: str, needs: str, check: Callable[[Look], Outcome], severity: Severity,
certainty: How,
          versions: str, effect: str, silent: str, do: str, source: str, *engines: str) -> Rule:  # fmt: skip
    return Rule(
        id,
        title,
        group,
        tuple(needs.split()),
        check,
        severity,
        certainty,
        versions,
        effect,
        silent,
        do,
        source,
        engines or ("sglang",),
    )


_W1_W3 = checks.line_rule(
    "w1_w3_scale",
    "gate_scale_used_for_up",
    "the log says that w1 and w3 have different scales: up-proj uses the gate's",
    "no line about different w1 and w3 scales",
)
_UE8M0 = checks.line_rule(
    "ue8m0",
    "scale_format_mismatch",
    "DeepGEMM runs on scales of another format than it expects on Blackwell",
    "no line about the scale format",
)
_ROPE_FACTOR = checks.line_rule(
    "rope_factor",
    "rope_factor_missing",
    "rope_scaling has no factor and 1.0 is taken",
    "no line about a missing factor",
    "error",
)
_S, _L = "yes", "no: a line in the log"


_ANY = ("sglang", "vllm")


#: Every rule. A new one is a row here; tests/audit/examples.py must give it a positive, a negative and a no-evidence
#: case.
# fmt: off
# fmt: off
# fmt: off
# fmt: off
# fmt: off
# fmt: off
# fmt: off
# fmt: off
# fmt: off
# fmt: off
# fmt: off
# fmt: off
# fmt: off
RULES: tuple[Rule, ...] = (
    _rule("KV1", "The KV cache is quantized", "KV cache", "kv_dtype_target kv_cache_dtype",
        checks.kv1, "high", "measured", "all; the pool's line carries the dtype from 0.5.13 on",
        "K and V lose mantissa bits", _S, "--kv-cache-dtype bf16, after KV3 is clear for it",
        "H200.md m2_auto; FACTS 1"),
    _rule("KV2", "FP8 KV with a scale of 1.0", "KV cache", "kv_dtype_target kv_scales kv_scales_loaded", checks.kv2,
        "medium", "read", "all; loaders by version in lib/audit/scales.py",
        "large K values saturate, small ones lose bits",
        "yes under auto; with an explicit flag a line that is also printed when scales are loaded",
        "calibrated scales that the version loads, or BF16 KV", "FACTS 1.4, 2; sglang#31224, #31220, #39942"),
    _rule("KV3", "Calibrated scales over a 16-bit pool (H1)", "KV cache",
        "kv_dtype_target kv_scales kv_scales_loaded attention_backend_prefill attention_backend_decode", checks.kv3,
        "critical", "read", "measured on 0.5.16 (Llama); Qwen3.5 from 0.5.17 (read)",
        "attention logits and outputs are multiplied by the scales", _S,
        "remove the scale tensors, or let the pool be FP8", "H1.md; sglang#18396, #39543"),
    _rule("KV4", "FP8 KV on a backend that also casts query and softmax weights", "KV cache",
        "kv_dtype_target attention_backend_prefill attention_backend_decode", checks.kv4, "high", "read",
        "prefill in all, decode's query from 0.5.12.post1", "the loss grows with context", _S,
        "BF16 KV, or an A/B at the target length", "FACTS 2.4"),
    _rule("KV5", "E5M2 KV cache", "KV cache", "kv_dtype_target", checks.kv5, "medium", "measured", "all",
        "2 mantissa bits", _S, "E4M3 or BF16", "CPU.md: -0.04 to -0.11 nats per token against bf16 on SmolLM2-135M"),
    _rule("KV6", "4-bit KV cache", "KV cache", "kv_dtype_target", checks.kv6, "high", "read", "all", "1 mantissa bit",
        _L, "FP8 or BF16", "FACTS 1.1"),
    _rule("KV7", "KV scaling factors from a JSON file", "KV cache", "quantization_param_path", checks.kv7, "high",
        "quoted", "all read", "written divided, read not multiplied, or not used at all",
        "yes: the log says that they were loaded", "do not use the file; take a checkpoint with scales",
        "sglang#18818, #20705, #37446, #25790; FACTS 2.3"),
    _rule("KV8", "FlashInfer reads a cached prefix without the scale", "KV cache",
        "kv_dtype_target attention_backend_prefill kv_scales kv_scales_loaded sglang_version", checks.kv8, "critical",
        "read", "0.5.10 to 0.5.17 (measured on 0.5.16)", "attention over every cached prefix is wrong", _S,
        "0.5.18 or newer, or triton", "H1.md; sglang#18904, #24198"),
    _rule("KV9", "The draft's KV dtype differs from the target's", "KV cache",
        "speculative_algorithm kv_dtype_target kv_dtype_draft", checks.kv9, "low", "read", "0.5.18+ under auto",
        "acceptance moves, answers do not", _S, "nothing, or --speculative-draft-kv-cache-dtype", "FACTS 1.3"),
    _rule("Q0", "Quantized weights", "weights", "weight_quant", checks.q0, "medium", "read", "all",
        "the checkpoint's own loss", "no: its name says it", "measure against a wider checkpoint where one fits",
        "FACTS Q6", *_ANY),
    _rule("Q1", "FP4 GEMM of CUTLASS on SM120", "weights", "weight_quant gpu_sm fp4_gemm_runner_backend", checks.q1,
        "high", "quoted", "auto takes it from 0.5.13 on", "NaN rows or all-zero outputs", "may crash, may corrupt",
        "flashinfer_cudnn, or validate", "sglang#20043, #20047; flashinfer#3398"),
    _rule("Q2", "Grouped FP4 of CUTLASS on SM120", "weights",
        "weight_quant is_moe gpu_sm moe_runner_backend flashinfer_version", checks.q2, "high", "quoted",
        "old FlashInfer and CUTLASS", "garbage", _S, "a recent FlashInfer with CUDA 13, or marlin",
        "flashinfer#2723; cutlass#3096; ORIGIN 1.1"),
    _rule("Q3", "One activation scale for all experts", "weights", "weight_quant is_moe moe_runner_backend", checks.q3,
        "medium", "read", "all read", "coarse activations in quiet experts", _S, "flashinfer_cutedsl on SM100",
        "layers/quantization/modelopt_quant.py"),
    _rule("Q4", "Gate and up projection have different scales", "weights", "log_lines startup_seen", _W1_W3, "medium",
        "read", "all", "up-proj is mis-scaled", _L, "another MoE runner", "modelopt_quant.py"),
    _rule("Q5", "Quantization while loading", "weights", "quantization weight_quant", checks.q5, "medium", "read",
        "all", "a loss without calibration", _L, "a checkpoint that was calibrated", "FACTS Q5"),
    _rule("Q6", "4-bit activations, or the fallback without them", "weights", "weight_quant moe_runner_backend",
        checks.q6, "medium", "read", "all", "activations in 4 bits", _S, "A/B against marlin", "FACTS Q6"),
    _rule("Q7", "DeepGEMM with scales that are not ue8m0", "weights", "log_lines startup_seen", _UE8M0, "medium",
        "read", "all", "mis-rounded scales", _L, "another FP8 GEMM backend", "configs/model_config.py"),
    _rule("W1", "The kernel that really runs", "weights", "kernel_trace", checks.w1, "low", "quoted", "all",
        "a label says one thing, the kernel another", _S, "read a trace, not the label",
        "model-serving-minefield traps/quantization/10", *_ANY),
    _rule("S1", "Recurrent state in fewer bits", "recurrent state", "recurrent mamba_ssm_dtype mamba_ssm_dtype_config",
        checks.s1, "high", "quoted", "all", "the state is rounded at every step",
        "yes: the dtype is only in a debug line", "--mamba-ssm-dtype float32",
        "sglang#10258; TensorRT-Model-Connect#725"),
    _rule("S2", "Cached recurrent states in int8", "recurrent state", "recurrent enable_int8_mamba_checkpoint",
        checks.s2, "high", "read", "0.5.16+", "each prefix hit starts from a rounded state", _S, "turn it off",
        "FACTS S2"),
    _rule("S3", "Convolution state in 16 bits", "recurrent state", "recurrent environment", checks.s3, "low", "read",
        "all", "small", _S, "nothing", "FACTS S3"),
    _rule("S4", "Extra-buffer states with speculation and prefix reuse", "recurrent state",
        "recurrent speculative_algorithm mamba_radix_cache_strategy disable_radix_cache", checks.s4, "high", "quoted",
        "0.5.16 and around", "token 0 for ever, acceptance 0 until a restart", _S,
        "--disable-radix-cache, or extra_buffer_lazy from 0.5.17 on (earlier it does not start with speculation); watch "
        "the accept rate", "sglang#36537"),
    _rule("S5", "Mamba2 state snapshots", "recurrent state", "recurrent mamba_radix_cache_strategy", checks.s5,
        "medium", "quoted", "see the threads", "wrong cached state", _S, "no_buffer, or a fixed version",
        "sglang#31833, #33450"),
    _rule("D1", "Lossy acceptance of drafts", "decoding",
        "speculative_algorithm speculative_accept_threshold_single speculative_accept_threshold_acc", checks.d1, "high",
        "read", "all", "another distribution than the target's", _S, "both thresholds 1.0", "FACTS D1"),
    _rule("D2", "Sampling parameters that verification does not honour", "decoding",
        "speculative_algorithm request_params", checks.d2, "medium", "quoted", "0.5.11 to 0.5.23",
        "sampling differs with and without speculation", _S, "avoid min_p and penalties, or speculation",
        "sglang#10617, #22049"),
    _rule("D3", "Simulated acceptance", "decoding", "environment", checks.d3, "critical", "read", "all",
        "the text is wrong", _S, "unset SGLANG_SIMULATE_ACC_LEN", "speculative/spec_utils.py; sglang#35194"),
    _rule("D4", "Greedy verification", "decoding", "speculative_algorithm platform", checks.d4, "high", "read",
        "platforms other than CUDA", "temperature is ignored", _S, "no speculation there", "FACTS D4"),
    _rule("D5", "A draft tree over pages", "decoding", "speculative_algorithm speculative_eagle_topk page_size",
        checks.d5, "medium", "read", "up to 0.5.11; later a ValueError", "wrong tokens are accepted", _S,
        "topk 1, or page size 1", "FACTS D5"),
    _rule("C1", "Context beyond what the model was trained for", "context", "context_len native_context", checks.c1,
        "high", "read", "all", "RoPE extrapolates", _L, "the native length, or a scaling that the model card gives",
        "configs/model_config.py"),
    _rule("C2", "RoPE scaling forced on the command line", "context", "json_model_override_args model_class", checks.c2,
        "high", "read", "all", "short prompts change too, or nothing happens at all", _S,
        "only when the length is needed", "FACTS C2"),
    _rule("C3", "RoPE scaling without a factor", "context", "log_lines startup_seen", _ROPE_FACTOR, "high", "read",
        "all", "positions are wrong", _L, "fix config.json", "configs/model_config.py"),
    _rule("C4", "Prompts cut instead of refused", "context", "allow_auto_truncate", checks.c4, "high", "read", "all",
        "the tail of the prompt is lost", "a line per request", "turn it off", "managers/tokenizer_manager.py"),
    _rule("C5", "Less context than the model has", "context", "context_len native_context", checks.c5, "medium", "read",
        "all", "agents compact earlier", _S, "raise it when memory allows", "FACTS C5"),
    _rule("T1", "Chat template", "templates", "chat_template has_chat_template", checks.t1, "high", "read", "all",
        "the model sees a format it never saw", "partly: a line", "pin the checkpoint's own", "FACTS T1"),
    _rule("T2", "Parsers of tool calls and reasoning", "templates", "model_class tool_call_parser reasoning_parser",
        checks.t2, "high", "quoted", "all", "tool calls are lost or end up in the text", _S, "the family's parsers",
        "FACTS T2; sglang#26172, #25242"),
    _rule("T3", "Sampling defaults", "templates", "sampling_defaults generation_config", checks.t3, "medium", "read",
        "all", "temperature 1, top_p 1", "only by the absence of a line",
        "--sampling-defaults model; presence_penalty is never read from the file",
        "entrypoints/openai/serving_chat.py"),
    _rule("T4", "History that clients leave out", "templates", "client_history", checks.t4, "high", "quoted", "all",
        "the agent forgets its reasoning", _S, "send the whole history", "FACTS T4", *_ANY),
    _rule("N1", "NaN in the logits", "numerics", "log_lines environment", checks.n1, "high", "read", "all",
        "garbage or an early stop", "yes unless checks are on", "SGLANG_ENABLE_NAN_LOGITS_CHECK=1, then swap backends",
        "FACTS N1"),
    _rule("N2", "16-bit logits", "numerics", "enable_fp32_lm_head", checks.n2, "low", "read", "all", "near ties flip",
        _S, "--enable-fp32-lm-head for evals", "FACTS N2"),
    _rule("N3", "Run-to-run noise", "numerics", "enable_tf32_matmul enable_torch_compile", checks.n3, "low", "read",
        "all", "noise, not bias", _S, "--enable-deterministic-inference for an A/B", "FACTS N3"),
    _rule("N4", "Lossy communication between GPUs", "numerics",
        "enable_quant_communications moe_a2a_backend environment", checks.n4, "medium", "read", "all",
        "partial sums are rounded", _S, "turn it off", "FACTS N4"),
    _rule("N5", "Custom all-reduce over patched peer-to-peer", "numerics",
        "tp_size disable_custom_all_reduce log_lines", checks.n5, "critical", "quoted", "several PCIe GPUs",
        "wrong data", _S, "--disable-custom-all-reduce", "club-3090#922; FACTS N5"),
    _rule("N6", "Padding of CUDA graphs", "numerics",
        "disable_cuda_graph disable_cuda_graph_padding speculative_algorithm", checks.n6, "medium", "quoted",
        "NGRAM with flashinfer up to 0.5.11", "crash or garbage", "sometimes", "upgrade", "sglang#24401"),
    _rule("N7", "Chunked prefix of MLA with FP8 KV", "numerics", "kv_dtype_target mla", checks.n7, "medium", "quoted",
        "see the thread", "wrong logits", _S, "A/B chunk sizes", "sglang#9704"),
    _rule("N8", "NGRAM with the prefix cache", "numerics", "speculative_algorithm disable_radix_cache", checks.n8,
        "medium", "quoted", "see the thread", "answers diverge", _S, "--disable-radix-cache", "sglang#24175"),
    _rule("L1", "Random weights", "loader", "load_format model_loader_extra_config speculative_draft_load_format",
        checks.l1, "critical", "read", "all", "nothing means anything", _S, "--load-format auto", "FACTS L1"),
    _rule("L2", "Tensors that are not loaded", "loader", "log_lines", checks.l2, "medium", "read", "all",
        "depends on the tensor", "mostly", "compare the names", "FACTS L2"),
    _rule("H1x", "Stale pages of a storage tier", "cache tiers", "enable_hierarchical_cache hicache_storage_backend",
        checks.h1x, "low", "read", "all", "pages of another model or dtype", _S, "clear or name-space it", "FACTS H1x"),
    _rule("H2", "Sparse attention", "cache tiers", "enable_hisparse attention_backend_prefill attention_backend_decode",
        checks.h2, "high", "read", "0.5.16+", "tokens are left out of attention", _S, "turn it off", "FACTS H2"),
    _rule("G1", "Garbage in the answers", "output", "output_text", checks.g1, "critical", "measured", "all",
        "answers are useless", "HTTP 200 all the same", "swap one backend at a time", "FACTS 5.2; sglang#24321, #26324",
        *_ANY),
    _rule("V1", "vLLM: a q scale is missing", "KV cache", "log_lines startup_seen", checks.v1, "low", "quoted", "vLLM",
        "only the flash-attn backend uses it", _L, "nothing", "llm-compressor#1294", "vllm"),
    _rule("V2", "vLLM: FP8 KV scales", "KV cache", "log_lines startup_seen", checks.v2, "medium", "quoted", "vLLM",
        "scale 1.0", _L, "a checkpoint with scales", "vLLM's kv_cache.py", "vllm"),
    _rule("X1", "Sources that contradict each other", "evidence", "kv_dtype_target kv_cache_dtype max_total_num_tokens",
        checks.x1, "high", "read", "all", "the audit looks at another process than the one that answers", _S,
        "take everything from one process", "ORIGIN 3.1", *_ANY),
    _rule("X2", "Asked for and not done", "evidence", "kv_cache_dtype kv_dtype_target", checks.x2, "high", "read",
        "all", "a precision or backend that nobody chose", _S, "read what was allocated", "FACTS 1; CPU.md intel_amx"),
    _rule("X3", "Arguments that this version refuses", "evidence", "sglang_version", checks.x3, "medium", "read",
        "0.5.10 to 0.5.23", "the server does not start; what is said above holds for none", "no: it dies",
        "correct the launch line", "lib/server/flags.py"),
)
# fmt: on


def audit(facts: Facts, *, check_fixes: bool = True) -> AuditReport:
    """The answer to 'are we doing anything that could be reducing model accuracy?' for one deployment.

    Args:
        facts: what is known, as the evidence gave it; what follows from it is derived here.
        check_fixes: run every recommended change through the rules again.

    Returns:
        Findings (the gravest first), what is fine, what could not be checked and which evidence would settle it,
        what does
        not apply, and the losses that come with the checkpoint.

    Example: `audit(Facts()).verdict == "checked_nothing"`.
    """
    facts = derived(facts)
    findings: list[Finding] = []
    fine: list[Checked] = []
    open_: list[NotChecked] = []
    foreign: list[NotApplicable] = []
    accepted: list[AcceptedLoss] = []
    engine = facts.value("engine") or ("sglang" if facts.known("sglang_version") else None)
    for rule in RULES:
        if engine is not None and engine not in rule.engines:
            foreign.append(
                NotApplicable(id=rule.id, title=rule.title, why=f"a rule for {', '.join(rule.engines)}, not {engine}")
            )
            continue
        if engine is None and "sglang" not in rule.engines:
            foreign.append(NotApplicable(id=rule.id, title=rule.title, why="nothing says that this is vLLM"))
            continue
        look = Look(facts)
        outcome, missing, why = _run(rule, look)
        if outcome is None or outcome.kind == "cannot_check":
            names = missing or rule.needs
            open_.append(
                NotChecked(
                    id=rule.id,
                    title=rule.title,
                    severity=rule.severity,
                    missing=list(names),
                    why=why or f"not known: {', '.join(FACTS[name].what for name in names)}",
                    settled_by=_settled_by(names),
                )
            )
        elif outcome.kind == "not_applicable":
            foreign.append(NotApplicable(id=rule.id, title=rule.title, why=outcome.what))
        elif outcome.kind == "fine":
            fine.append(
                Checked(
                    id=rule.id,
                    title=rule.title,
                    why=outcome.what,
                    verdict=outcome.verdict,
                    certainty=look.certainty(outcome.certainty or rule.certainty),
                    evidence=look.evidence(),
                )
            )
        elif outcome.kind == "accepted":
            accepted.append(
                AcceptedLoss(
                    id=rule.id,
                    title=rule.title,
                    what=outcome.what,
                    certainty=look.certainty(rule.certainty),
                    instead=outcome.do or rule.do,
                    source=rule.source,
                    evidence=look.evidence(),
                )
            )
        else:
            findings.append(_finding(rule, outcome, look, facts, check_fixes))
    findings.sort(key=lambda item: (-LEVELS.index(item.level), -SEVERITIES.index(item.severity)))
    open_.sort(key=lambda item: -SEVERITIES.index(item.severity))
    return _report(facts, findings, fine, open_, foreign, accepted)


def audit_of_fix(facts: Facts, change: Mapping[str, Any]) -> FixAudit:
    """The audit of a deployment after a change, before anybody runs it.

    The checkpoint and the hardware stay; whatever a process has shown is void, since the changed process has not run.

    Args:
        facts: what is known now.
        change: fact names and their new values, e.g. `{"kv_cache_dtype": "bfloat16", "sglang_version": "0.5.20"}`.

    Raises:
        BadInput: a name that is no fact, or a fact that cannot be chosen.

    Example: on Qwen3.5 with scales other than 1.0, `{"kv_cache_dtype": "bfloat16"}` is safe on 0.5.16 and brings
    KV3 on 0.5.20.
    """
    unknown = sorted(name for name in change if name not in FACTS)
    if unknown:
        raise BadInput(
            f"expected names of facts that can be changed, one of {', '.join(changeable())}", ", ".join(unknown)
        )
    before = audit(facts, check_fixes=False)
    after = audit(changed(facts, change), check_fixes=False)
    had = {(item.id, item.verdict) for item in before.findings}
    has = {(item.id, item.verdict) for item in after.findings}
    open_after = {item.id: item for item in after.not_checked}
    # A finding that became unanswerable is not solved.
    removed = sorted({rule_id for rule_id, _ in had - has} - open_after.keys() - {rule_id for rule_id, _ in has})
    introduced = [item for item in after.findings if (item.id, item.verdict) not in had and item.level != "info"]
    lost = {rule_id for rule_id, _ in had} & open_after.keys()
    had_open = {item.id for item in before.not_checked}
    decisive_ids = _watched(change) | lost
    # X1 and X2 compare what a process shows with what was asked: before it has run there is nothing to compare.
    watched = [
        item
        for item in after.not_checked
        if item.id not in ("X1", "X2") and (item.id in decisive_ids or item.id not in had_open)
    ]
    decisive = [item for item in watched if item.id in decisive_ids]
    verdict: Literal["safe", "brings_findings", "cannot_be_told", "solves_nothing", "does_not_start"]
    refused = _refused(facts, change)
    if refused:
        verdict = "does_not_start"
    elif introduced:
        verdict = "brings_findings"
    elif decisive:
        verdict = "cannot_be_told"
    elif not removed:
        verdict = "solves_nothing"
    else:
        verdict = "safe"
    return FixAudit(
        change=dict(change),
        verdict=verdict,
        why=refused,
        removed=[] if refused else removed,
        kept=sorted({rule_id for rule_id, _ in had & has}),
        introduced=introduced,
        not_checked=watched,
        report=after,
    )


def _refused(facts: Facts, change: Mapping[str, Any]) -> str | None:
    """Why the server would not start after the change; None if nothing is known against it.

    What is held against a deployment that was seen to run is no fault of the change.

    Source: `lib.server.flags.check_arguments`. Its silence is no promise that the launch works.
    """
    known = {fault.id for fault in launch_faults(facts)} if has_run(facts) else set()
    new = [fault for fault in launch_faults(changed(facts, change)) if fault.id not in known]
    return "; ".join(f"{fault.reason} ({fault.source})" for fault in new) or None


def changeable() -> list[str]:
    """Names of the facts that a change can set: arguments, versions, the environment and the checkpoint's own."""
    return sorted(name for name, kind in FACTS.items() if kind.belongs not in ("process", "client"))


def changed(facts: Facts, change: Mapping[str, Any]) -> Facts:
    """The facts after a change: what a process has shown is dropped as far as the change touches it (VOIDED_BY)."""
    touched = set(change)
    gone = {
        name
        for name, kind in FACTS.items()
        if kind.belongs == "process" and (name not in VOIDED_BY or touched & VOIDED_BY[name])
    }
    lines = facts.best("log_lines")
    after = facts.without(gone | touched)
    if lines is not None and "log_lines" not in gone and touched & _KV_DTYPE:
        kept = {mark: seen for mark, seen in lines.value.items() if mark not in _KV_MARKS}
        after = after.without(["log_lines"]).plus([lines.model_copy(update={"value": kept})])
    return after.plus(
        Fact(
            name=name,
            value=value,
            how="derived",
            source="change",
            evidence=[Evidence(path="change", quote=f"{name} = {short(value)}")],
        )
        for name, value in change.items()
    )


_KV_DTYPE = {
    "kv_cache_dtype",
    "speculative_draft_kv_cache_dtype",
    "sglang_version",
    "quantization",
    "kv_declared",
    "kv_auto_forced",
    "model_class",
    "model_path",
    "platform",
    "quantization_param_path",
    "kv_scales",
}
_BACKENDS = {"attention_backend", "prefill_attention_backend", "decode_attention_backend", "sglang_version", "platform"}
_WEIGHTS = {"sglang_version", "quantization", "moe_runner_backend", "fp4_gemm_runner_backend", "model_path", "platform"}
#: Lines of the log that are about the KV cache.
_KV_MARKS = {"scale_default", "scale_file_loaded", "scale_not_loaded", "scale_ignored_16bit", "fp4_kv_warning"}

#: What a process has shown -> changes after which it says nothing any more; a fact without a row is voided by any
#: change.
VOIDED_BY: dict[str, set[str]] = {
    "kv_dtype_target": _KV_DTYPE - {"kv_scales", "quantization_param_path"},
    "kv_dtype_draft": _KV_DTYPE - {"kv_scales", "quantization_param_path"},
    "kv_bytes_per_token": _KV_DTYPE | {"tp_size"},
    "kv_scales_loaded": {"sglang_version", "kv_scales", "kv_declared", "quantization", "model_class", "model_path"},
    "attention_backend_prefill": _BACKENDS,
    "attention_backend_decode": _BACKENDS,
    "backends_replaced": _BACKENDS | _WEIGHTS | {"kv_cache_dtype", "quantization", "moe_a2a_backend"},
    "ssm_dtype": {"mamba_ssm_dtype", "environment", "sglang_version", "mamba_ssm_dtype_config"},
    "context_len": {"context_length", "json_model_override_args", "native_context", "sglang_version"},
    "log_lines": _WEIGHTS | {"context_length", "json_model_override_args", "chat_template"},
    "startup_seen": _WEIGHTS | {"context_length", "json_model_override_args", "chat_template"},
    "default_sampling": {"sampling_defaults", "generation_config", "sglang_version"},
    "kernel_trace": _WEIGHTS,
}


#: Rules that must be answerable after a change of these facts before it may be called safe.
_WATCHED: dict[str, tuple[str, ...]] = {
    "kv_cache_dtype": ("KV1", "KV2", "KV3", "KV8"),
    "attention_backend": ("KV3", "KV4", "KV8"),
    "prefill_attention_backend": ("KV3", "KV4", "KV8"),
    "decode_attention_backend": ("KV3", "KV4"),
    "sglang_version": ("KV1", "KV2", "KV3", "KV8"),
    "kv_scales": ("KV2", "KV3"),
    "moe_runner_backend": ("Q2",),
    "fp4_gemm_runner_backend": ("Q1",),
}


def _watched(change: Mapping[str, Any]) -> set[str]:
    return {rule_id for name in change for rule_id in _WATCHED.get(name, ())}


def _run(rule: Rule, look: Look) -> tuple[Outcome | None, tuple[str, ...], str | None]:
    try:
        outcome = rule.check(look)
    except Missing as missing:
        names = tuple(dict.fromkeys([*missing.names, *(name for name in rule.needs if not look.facts.known(name))]))
        return None, names, missing.why
    return outcome, outcome.missing, outcome.what if outcome.kind == "cannot_check" else None


def _finding(rule: Rule, outcome: Outcome, look: Look, facts: Facts, check_fixes: bool) -> Finding:
    severity = outcome.severity or rule.severity
    fixes = [_fix_check(facts, rule.id, change) for change in outcome.changes] if check_fixes else []
    do = outcome.do or rule.do
    bad = [fix for fix in fixes if fix.verdict != "safe"]
    if bad and len(bad) == len(fixes):
        do += "; note that no recommended change is clean by itself, see fixes"
    return Finding(
        id=rule.id,
        title=outcome.title or rule.title,
        level=outcome.level,
        severity=severity,
        verdict=outcome.verdict,
        what=outcome.what + _extrapolation(rule, look),
        effect=rule.effect,
        silent=rule.silent,
        certainty=look.certainty(outcome.certainty or rule.certainty),
        do=do,
        source=rule.source,
        versions=rule.versions,
        values=dict(outcome.values),
        explains=list(look.marks),
        assumes_defaults=any(fact.note == DEFAULT_NOTE for fact in look.reads),
        fixes=fixes,
        evidence=look.evidence(),
    )


def _extrapolation(rule: Rule, look: Look) -> str:
    """A note when a rule that depends on the version is used outside the versions that were read."""
    if "sglang_version" not in {fact.name for fact in look.reads} or rule.group != "KV cache":
        return ""
    text = look.facts.value("sglang_version")
    return f" (SGLang {text} is outside the versions that were read)" if extrapolated(version_of(text)) else ""


def _fix_check(facts: Facts, rule_id: str, change: Mapping[str, Any]) -> FixCheck:
    done = audit_of_fix(facts, change)
    return FixCheck(
        change=dict(change),
        solves=rule_id in done.removed,
        introduces=[item.id for item in done.introduced],
        not_checked=[item.id for item in done.not_checked],
        verdict=done.verdict,
    )


def _settled_by(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(way for name in names for way in FACTS[name].settled_by))


def _report(
    facts: Facts,
    findings: list[Finding],
    fine: list[Checked],
    open_: list[NotChecked],
    foreign: list[NotApplicable],
    accepted: list[AcceptedLoss],
) -> AuditReport:
    worst = max((item.level for item in findings), key=LEVELS.index, default=None)
    losing = [item for item in findings if item.level != "info"]
    # Rules that answer themselves from an empty record (another engine's, the absence of a second source) check
    # nothing.
    checked = len(fine) + len(findings) + len(accepted)
    verdict: Literal["loses_accuracy", "nothing_found", "nothing_found_but_incomplete", "checked_nothing"]
    if losing:
        verdict = "loses_accuracy"
        answer = f"Yes: {len(losing)} finding{'s' if len(losing) > 1 else ''} that lower or may lower accuracy"
    elif not checked:
        verdict, answer = "checked_nothing", "Nothing could be checked with the evidence given"
    elif open_:
        verdict = "nothing_found_but_incomplete"
        answer = "Nothing was found in what could be checked, which is not everything"
    else:
        verdict, answer = "nothing_found", "Nothing was found, and everything could be checked"
    answer += (
        f" ({_count(len(findings), 'finding')}, {len(fine)} fine, {len(open_)} not checked, "
        f"{_count(len(accepted), 'accepted loss', 'es')})."
    )
    known = {
        name: {"value": _told(fact), "how": fact.how, "source": fact.source, "note": fact.note}
        for name in FACTS
        if (fact := facts.best(name)) is not None
    }
    return AuditReport(
        answer=answer,
        verdict=verdict,
        worst_level=worst,
        findings=findings,
        fine=fine,
        not_checked=open_,
        not_applicable=foreign,
        accepted_losses=accepted,
        facts=known,
    )


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


def _told(fact: Fact) -> Any:
    """A fact's value for the report: whole configuration files are named, not repeated."""
    if fact.name != "kv_declared" or not isinstance(fact.value, dict):
        return fact.value
    config = fact.value.get("config") or {}
    return {
        "quantization_config": config.get("quantization_config"),
        "hf_quant_config": (fact.value.get("hf_quant_config") or {}).get("quantization"),
    }


def rules_markdown() -> str:
    """docs/rules.md: every rule with its evidence, certainty, severity, versions, remedy and source."""
    out = [
        "# Accuracy rules",
        "",
        "Generated by `lib.audit.rules.rules_markdown()` from the table in `lib/audit/rules.py`; do not edit.",
        "Severity is for long-context agentic coding. Certainty is the rule's own: *measured* on a real server, "
        "*read* in source,",
        "*derived*, or *quoted* from public threads; a finding is never surer than the weakest fact that it stands on.",
        "A fact that nobody has seen makes a rule *not checked*, never fine.",
    ]
    for group in dict.fromkeys(rule.group for rule in RULES):
        out += ["", f"## {group[0].upper()}{group[1:]}", ""]
        out += [
            "| id | what | evidence needed | severity | certainty | versions | silent? | effect | do | source |",
            "|" + "---|" * 10,
        ]
        for rule in RULES:
            if rule.group == group:
                needs = ", ".join(f"`{name}`" for name in rule.needs)
                cells = [rule.id, rule.title, needs, rule.severity, rule.certainty, rule.versions, rule.silent]
                cells += [rule.effect, rule.do, rule.source]
                out.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    out += ["", "## Facts and what settles them", "", "| fact | what | settled by |", "|---|---|---|"]
    out += [f"| `{kind.name}` | {kind.what} | {'; '.join(kind.settled_by)} |" for kind in FACTS.values()]
    out += ["", "## Log lines that are looked for", "", "| mark | pattern | what it shows |", "|---|---|---|"]
    out += [
        f"| `{mark}` | `{pattern.replace('|', chr(92) + '|')}` | {what} |" for mark, (_, pattern, what) in LINES.items()
    ]
    return "\n".join(out) + "\n"
