"""What others found when they swept backends, with hardware and versions: reference rows beside the sweep's own.

A row is no verdict about this host: it says where a backend worked or failed, and which version that was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lib.params import NotebookParams, SweepParams
from lib.records import OUTCOMES
from lib.server.outcomes import COMPUTES, FIELD


class Known(NamedTuple):
    """One finding: what was set, on what, and what came of it."""

    id: str
    setting: Mapping[str, str]
    hardware: str
    versions: str
    outcome: str
    words: str
    look_for: str
    source: str


_ORIGIN_HARDWARE = "8 x RTX PRO 6000 (SM120), Qwen3.5-397B-A17B-NVFP4"
_ORIGIN_VERSIONS = "SGLang main of March 2026, PyTorch 2.12.0.dev20260307+cu130, FlashInfer 0.6.5"
_ORIGIN = "the origin case, step 1"

KNOWN: tuple[Known, ...] = (
    Known(
        "origin-attention", {"attention_backend": "triton"}, _ORIGIN_HARDWARE, _ORIGIN_VERSIONS, "works",
        "every trial of the origin's sweep ran with it", "-", _ORIGIN,
    ),
    Known(
        "origin-trtllm", {"moe_runner_backend": "flashinfer_trtllm"}, _ORIGIN_HARDWARE, _ORIGIN_VERSIONS, "crashes",
        "it crashed (its kernels are built for SM100, says SGLang's source)",
        "the phase and the line: no line of that crash was kept", _ORIGIN,
    ),
    Known(
        "origin-cutedsl", {"moe_runner_backend": "flashinfer_cutedsl"}, _ORIGIN_HARDWARE, _ORIGIN_VERSIONS, "garbage",
        "it started, answered, and the text was garbage", "the known answer, log-probabilities of real text", _ORIGIN,
    ),
    Known(
        "origin-kept", {"moe_runner_backend": "flashinfer_cutlass", "fp4_gemm_backend": "flashinfer_cudnn"},
        _ORIGIN_HARDWARE, _ORIGIN_VERSIONS, "works", "kept for everything after", "whether it holds under load", _ORIGIN,
    ),
    Known(
        "Q1", {"fp4_gemm_backend": "flashinfer_cutlass"}, "SM120", "SGLang of March 2026; flashinfer 0.6.12",
        "garbage_under_load",
        "NaN rows in mixed batches; all-zero outputs for some numbers of rows. From SGLang 0.5.13 on it is what auto takes",
        "the gate under concurrent load of mixed lengths; flashinfer_cudnn had no NaN in 3,200 requests",
        "sgl-project/sglang#20043, #20047; flashinfer-ai/flashinfer#3398 (closed)",
    ),
    Known(
        "Q2", {"moe_runner_backend": "flashinfer_cutlass"}, "SM120, grouped FP4", "older CUTLASS and FlashInfer",
        "garbage", "grouped FP4 GEMM of the experts computes garbage", "FlashInfer's and CUDA's versions; CUDA 13 or later",
        "flashinfer-ai/flashinfer#2723, NVIDIA/cutlass#3096",
    ),
    Known(
        "Q3", {"moe_runner_backend": "flashinfer_cutlass or flashinfer_trtllm"}, "any, NVFP4 experts",
        "SGLang 0.5.23 (read)", "numerically_off",
        "one input scale, the largest of all experts, for each of both GEMMs: seldom used experts get coarse scales",
        "log-probabilities against flashinfer_cutedsl (SM100) or marlin", "modelopt_quant.py, process_weights_after_loading",
    ),
    Known(
        "Q4", {"moe_runner_backend": "marlin"}, "any, NVFP4 experts whose w1 and w3 scales differ", "SGLang 0.5.23 (read)",
        "numerically_off", "the up projection uses the gate projection's scale",
        "the warning w1_weight_scale_2 must match w3_weight_scale_2", "SGLang's own warning",
    ),
    Known(
        "h200-ignored", {"moe_runner_backend": "cutlass or marlin"}, "one H200 (SM90), bf16 experts", "SGLang 0.5.16",
        "silently_ignored", "the same bits as triton; /server_info repeats the asked value",
        "bit-identical log-probabilities, Triton's «Using default MoE kernel config» in the log", "recorded launches",
    ),
    Known(
        "h200-compiles", {"moe_runner_backend": "flashinfer_cutlass or deep_gemm"}, "one H200 (SM90), bf16 experts",
        "SGLang 0.5.16", "not_enough_data", "compiling for more than 140 s, one of them without a line",
        "CPU use and compilers below the server: a deadline of its own", "recorded launches",
    ),
)  # fmt: skip


def reference_rows(axes: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The findings as a table takes them; with axes, those that set one of them first."""
    ordered = sorted(KNOWN, key=lambda k: not any(name in axes for name in k.setting))
    return [
        {
            "finding": k.id,
            "setting": ", ".join(f"{name}={value}" for name, value in k.setting.items()),
            "on": k.hardware,
            "versions": k.versions,
            "outcome": k.outcome.replace("_", " "),
            "what was seen": k.words,
            "what would show it here": k.look_for,
            "source": k.source,
        }
        for k in ordered
    ]


#: Outcome of a trial -> what must be there for it to be said.
EVIDENCE: dict[str, str] = {
    "works": "known answer right, log-probabilities within the limit of the reference's (its own noise added), decoding "
    "agrees with its own prefill, the same under concurrent mixed-length load, nothing in its log contradicts a flag",
    "crashes": "exit code, phase and the root cause's line in its log; or it died, or refused requests (one piece of text is "
    "enough), while serving",
    "hangs": "no new byte in its log for `quiet_timeout_s` while nothing compiles (watch.jsonl: log, CPU seconds, "
    "compilers, once a second); or a request without an answer for `answer_timeout_s`",
    "garbage": "the known answer is wrong; NaN, all zeros or all alike in log-probabilities; an empty or degenerate answer or "
    "continuation that the reference does not give; more than `garbage_nats` from the reference; decoding far from its own prefill",
    "garbage_under_load": "right alone, and one of the above under concurrent load, or one piece of text more than "
    "`garbage_nats` from the same piece alone, or a continuation that far from its own prefill at rest",
    "numerically_off": "the whole interval of mean |difference| beyond `limit_nats` plus the reference's own noise",
    "silently_ignored": "its log says that another backend was taken; or the same bits as a trial that asked for another "
    "one by name, wherever those kernels run (not where a more special flag decides in both), whatever /server_info repeats",
    "unsupported_here": "a line in the server's own words that names a device, package or kernel that this host lacks",
    "out_of_memory": "an allocation that failed, from its log",
    "client_bound": "the load client's own lag or CPU share was beyond its limits: no speed is given",
    "identity_mismatch": "another process or other arguments answered: the numbers are of another server (invalid)",
    "not_enough_data": "an interval across the limit, no reference to compare with, still compiling at its "
    "deadline, or nothing to compare under load",
    "skipped": "this version's rules refuse or ignore it, and `verify` did not ask for a launch",
}


#: A grid as params/<profile>/02.yaml writes it; a test makes its trials.
EXAMPLE = """\
reference: attention_backend=triton+moe_runner_backend=triton
axes:                                # every flag can be an axis; env:NAME is one too; null leaves the profile's value
  moe_runner: [triton, cutlass, flashinfer_cutedsl]
  attention: [triton, flashinfer]
cross: false                         # one axis away from the reference at a time
links:
  - when: {moe_runner: flashinfer_cutedsl}
    flags: {quantization: modelopt_fp4}
    why: it refuses a checkpoint whose quantization was only detected
exclude:
  - when: {moe_runner: cutlass, attention: flashinfer}
    why: tried yesterday
verify: none                         # what this version is known to refuse is not launched
"""


def sweep_markdown() -> str:
    """docs/sweep.md: a grid and its keys, outcomes and their evidence, what equal bits convict, and others' findings."""

    def row(*cells: str) -> str:
        return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"

    lines = [
        "# The backend sweep: outcomes, and what others found",
        "",
        "Generated from the tables of `lib/server/known_findings.py` and `lib/server/outcomes.py`; do not edit.",
        "",
        "## A grid",
        "",
        "```yaml",
        EXAMPLE.rstrip(),
        "```",
        "",
        "A trial's id is made of its own values, by name (`attention_backend=triton+moe_runner_backend=cutlass`): order, more "
        "values and new axes that are null don't change it. Finished trials are kept by id and launch "
        "(`raw/02/<id>/finished.json`), so a resumed sweep (`workbook run --resume RUN`) repeats none of them, and starts one "
        "that was cut short from its beginning. On a host with several free GPUs trials run side by side, each with GPUs of "
        "its own; their speeds are taken one after the other.",
        "",
        row("key", "default", "meaning"),
        row("---", "---", "---"),
        *(
            row(
                f"`{name}`",
                f"`{json.dumps(field.get_default(call_default_factory=True))}`",
                field.description or "see above",
            )
            for name, field in SweepParams.model_fields.items()
            if name not in NotebookParams.model_fields
        ),
        "",
        "## Outcomes and the evidence that each needs",
        "",
        "Checked in this order of weight: another server, death, silence, garbage, distance, load, ignored, client, works.",
        "",
        row("outcome", "verdict", "evidence"),
        row("---", "---", "---"),
        *(row(name.replace("_", " "), str(OUTCOMES[name]), words) for name, words in EVIDENCE.items()),
        "",
        "## Where a flag's kernels run",
        "",
        "Two trials that differ in these flags alone, both asked by name (not `auto`), and that agree in every bit of the "
        "places named ran the same kernels. A flag that is not here can leave every bit as it is and still be honoured.",
        "",
        row("flag", "places"),
        row("---", "---"),
        *(row(f"`{name}`", ", ".join(places)) for name, places in COMPUTES.items()),
        "",
        "`/server_info` and the log spell some fields differently: "
        + ", ".join(f"`{a}` is `{b}`" for a, b in FIELD.items())
        + ".",
        "",
        "## Reference rows",
        "",
        row("finding", "setting", "on", "versions", "outcome", "what was seen", "what would show it here", "source"),
        row(*["---"] * 8),
        *(row(*map(str, r.values())) for r in reference_rows()),
    ]
    return "\n".join(lines) + "\n"
