"""Ways of asking for NEXTN that people have tried: what each release makes of them, known without a launch.

A form that is refused costs 20 to 35 seconds on a real host, one that is quietly ignored costs a wrong conclusion.

Source: the origin case's launches; recorded launches of SGLang 0.5.16 (tests/recorded/h200-sglang-0.5.16/x_nextn_*.log);
the rules of lib.server.flags by release.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lib.server.flags import Gpu, ModelFacts, check_arguments

CHAIN: dict[str, Any] = {
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
SPEC_V2 = {"SGLANG_ENABLE_SPEC_V2": "1"}
HYBRID = ModelFacts(hybrid=True)
#: Releases that every form is judged for, beside the one at hand: the origin's generation, the recorded one, the newest.
RELEASES = ("0.5.10.post1", "0.5.11", "0.5.16", "0.5.23")


@dataclass(frozen=True)
class Form:
    """One way of asking, and what a recorded launch of 0.5.16 made of it (None: not recorded)."""

    id: str
    what: str
    flags: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    recorded: str | None = None
    log: str | None = None
    origin: str = ""


FORMS: tuple[Form, ...] = (
    Form(
        "origin-topk",
        "a draft tree (topk 2) with spec v2",
        {**CHAIN, "speculative_eagle_topk": 2, "--mamba-scheduler-strategy": "extra_buffer"},
        SPEC_V2,
        "starts",
        "x_nextn_topk2",
        "the origin's first failure",
    ),
    Form(
        "origin-no-strategy",
        "a hybrid model without a state-cache strategy",
        CHAIN,
        SPEC_V2,
        None,
        None,
        "the origin's second failure",
    ),
    Form(
        "origin-extra-buffer",
        "extra_buffer and the variable, the origin's line that came up",
        {**CHAIN, "--mamba-scheduler-strategy": "extra_buffer"},
        SPEC_V2,
        "starts",
        "m1_nextn",
    ),
    Form("variable-alone", "the environment variable alone", {}, SPEC_V2),
    Form(
        "no-buffer",
        "no_buffer with overlap",
        {**CHAIN, "--mamba-scheduler-strategy": "no_buffer"},
        SPEC_V2,
        "crashes",
        "x_nextn_no_buffer",
    ),
    Form(
        "no-buffer-no-overlap",
        "no_buffer without overlap",
        {**CHAIN, "--mamba-scheduler-strategy": "no_buffer", "disable_overlap_schedule": True},
        SPEC_V2,
        "starts",
        "x_nextn_nobuf_noovl",
    ),
    Form(
        "lazy",
        "extra_buffer_lazy",
        {**CHAIN, "--mamba-radix-cache-strategy": "extra_buffer_lazy"},
        {},
        "crashes",
        "x_nextn_lazy",
    ),
    Form(
        "steps-alone",
        "speculative_num_steps without topk and draft tokens",
        {"speculative_algorithm": "NEXTN", "speculative_num_steps": 3, "--mamba-scheduler-strategy": "extra_buffer"},
        {},
        "crashes",
        "x_nextn_steps_only",
    ),
    Form(
        "draft-tokens-8",
        "8 draft tokens with topk 1 (adjusted to steps + 1)",
        {**CHAIN, "speculative_num_draft_tokens": 8, "--mamba-scheduler-strategy": "extra_buffer"},
        SPEC_V2,
        "starts",
        "x_nextn_draft8",
    ),
    Form(
        "v2-off",
        "SGLANG_ENABLE_SPEC_V2=0",
        {**CHAIN, "--mamba-scheduler-strategy": "extra_buffer"},
        {"SGLANG_ENABLE_SPEC_V2": "0"},
        "starts",
        "x_nextn_v2off",
    ),
)


@dataclass(frozen=True)
class Fate:
    """What a release makes of a form: starts, starts_without (no speculation), or an outcome of the rules."""

    outcome: str
    reason: str
    source: str
    exit_code: int | None = None


def fate(
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    sglang_version: str,
    gpu: Gpu | None = None,
    model: ModelFacts | None = HYBRID,
) -> Fate:
    """What a release makes of a way of asking for speculation, without a launch.

    `starts` means that no known rule is against it, not that it was seen to start.

    Example: `fate({}, {"SGLANG_ENABLE_SPEC_V2": "1"}, "0.5.11")` is `starts_without`: the variable turns nothing on.
    """
    if not flags.get("speculative_algorithm") and not flags.get("--speculative-algorithm"):
        return Fate(
            "starts_without",
            "no speculative_algorithm: the server comes up and does not speculate",
            "lib.server.nextn_forms",
        )
    # only the speculative part is judged: a spelling that this release lacks is a refusal (exit 2) like any other
    config = {"model_path": "model", "flags": dict(flags), "environment": dict(environment)}
    found = check_arguments(config, sglang_version, gpu, model, strict=False)
    refused = [f for f in found if f.outcome != "silently_ignored"]
    if refused:
        one = refused[0]
        return Fate(one.outcome, one.reason, one.source, one.exit_code)
    return Fate("starts", "no known rule is against it", "lib.server.flags")


def form_rows(sglang_version: str, releases: Sequence[str] = RELEASES) -> list[dict[str, Any]]:
    """Every form on a hybrid model and a GPU: what this release makes of it and why, and what other releases make of it."""
    rows = []
    for form in FORMS:
        here = fate(form.flags, form.environment, sglang_version)
        others = {v: _short(fate(form.flags, form.environment, v)) for v in releases if v != sglang_version}
        rows.append(
            {
                "form": form.what + (f" ({form.origin})" if form.origin else ""),
                f"{sglang_version}, on a GPU": _short(here),
                "because": here.reason,
                **others,
                "recorded on 0.5.16": f"{form.recorded} ({form.log}.log)" if form.recorded else "not recorded",
            }
        )
    return rows


def _short(one: Fate) -> str:
    words = one.outcome.replace("_", " ")
    return words if one.exit_code is None else f"{words} (exit {one.exit_code})"


def memory_rows(
    gpus: Mapping[str, float], users: Mapping[str, Mapping[str, int]], host_free: int | None, weights: int | None
) -> list[dict[str, Any]]:
    """The origin's third failure, a launch killed by the system: no argument shows it, so what can be seen is said.

    Args:
        gpus: MiB in use by GPU; users: MiB by GPU and pid; host_free, weights: bytes (None: unknown).

    Example: 83 GB still held on each GPU by the old server.
    """
    rows = []
    for gpu, used in gpus.items():
        holders = ", ".join(f"pid {pid}: {mib} MiB" for pid, mib in users.get(gpu, {}).items())
        if holders or used > 1024:
            rows.append(
                {
                    "what": f"GPU {gpu[:12]} is in use before the launch",
                    "value": f"{used:.0f} MiB",
                    "means": f"held by {holders or 'nobody that nvidia-smi names'}: an old server, and a launch beside it may be killed",
                }
            )
    if host_free is not None and weights is not None and host_free < weights:
        rows.append(
            {
                "what": "host memory is smaller than the checkpoint",
                "value": f"{host_free / 2**30:.1f} GiB free, {weights / 2**30:.1f} GiB of weights",
                "means": "loading evicts what it read; with several ranks at once the kernel may kill one (exit -9 without a traceback)",
            }
        )
    return rows
