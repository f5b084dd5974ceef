"""Has a proven service drifted? Compares what is there now with its last proof. Records in, records out.

Each row is `same`, `drift` or `unknown`, with what was proven, what is there now, and where that can be seen.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lib.deploy.stopping import Seen
from lib.records import Record

#: Acceptance below this share of the proven one has decayed.
ACCEPT_SHARE = 0.9
#: The pool may differ by this share between two starts (what else was on the GPU moves it).
POOL_TOLERANCE = 0.01
#: GPU memory may grow by this share while it serves.
GPU_TOLERANCE = 0.05


class Sight(Record):
    """A service at one moment; None is not known, and `reasons` says why by field."""

    unit: str
    unit_text: str | None
    dropins: list[str]
    needs_reload: bool
    active: str
    invocation: str | None
    restarts: int | None
    version_running: str | None = None
    version_on_disk: str | None = None
    kv_cache_dtype: str | None = None
    arguments: dict[str, Any] = {}
    max_total_num_tokens: int | None = None
    accept_length: float | None = None
    retractions: int | None = None
    journal_errors: list[str] = []
    health: int | None = None
    port_owned: bool | None = None
    port_holders: list[Seen] = []
    gpu_strangers: list[Seen] = []
    gpu_mib: float | None = None
    image: str | None = None
    unfinished: str | None = None
    reasons: dict[str, str] = {}


class Difference(Record):
    """One thing that was compared."""

    id: str
    status: str
    proven: str
    now: str
    evidence: str


class WatchReport(Record):
    """What a look found; `drifted` if anything is not as it was proven."""

    host: str
    unit: str
    plan: str
    proven_at: float
    at: float
    rows: list[Difference]

    @property
    def drifted(self) -> list[Difference]:
        return [row for row in self.rows if row.status == "drift"]


def compare(record: Mapping[str, Any], sight: Sight) -> list[Difference]:
    """Every difference between a record of a proof (proven.json) and what is there now."""
    rows: list[Difference] = []
    proof, plan = record.get("proof") or {}, record.get("plan") or {}
    facts: Mapping[str, Any] = proof.get("facts") or {}
    expected: Mapping[str, Any] = plan.get("expectation") or {}

    def row(key: str, same: bool | None, proven: Any, now: Any, evidence: str, field: str = "") -> None:
        why = sight.reasons.get(field or key)
        status = "unknown" if same is None else "same" if same else "drift"
        shown = f"not known: {why or 'nothing tells it'}" if same is None and now in (None, "", []) else str(now)
        rows.append(Difference(id=key, status=status, proven=str(proven)[:300], now=shown[:600], evidence=evidence))

    def equal(key: str, proven: Any, now: Any, evidence: str) -> None:
        if proven is not None:
            row(key, None if now is None else proven == now, proven, now, evidence)

    digest = hashlib.sha256(sight.unit_text.encode()).hexdigest() if sight.unit_text is not None else None
    row("unit", digest == record.get("unit_sha256"), f"sha256 {str(record.get('unit_sha256'))[:16]}",
        _changed_lines(str(plan.get("unit_text") or ""), sight.unit_text), f"systemctl cat {sight.unit}")  # fmt: skip
    row("dropins", not sight.dropins, "none", ", ".join(sight.dropins) or "none", f"systemctl show -P DropInPaths {sight.unit}")
    row("daemon-reload", not sight.needs_reload, "systemd runs what is on disk", "files changed since systemd read them"
        if sight.needs_reload else "systemd runs what is on disk", f"systemctl show -P NeedDaemonReload {sight.unit}")  # fmt: skip
    row("running", sight.active == "active", "active", sight.active, f"systemctl show -P ActiveState {sight.unit}")
    row("invocation", sight.invocation == record.get("invocation"), record.get("invocation"), sight.invocation or "none",
        f"systemctl show -P InvocationID {sight.unit}")  # fmt: skip
    restarts = _number(record.get("restarts"))
    if sight.restarts is not None and restarts is not None:
        row("restarts", sight.restarts == restarts, restarts, sight.restarts, f"systemctl show -P NRestarts {sight.unit}")
    row("rollout", sight.unfinished is None, "none under way", sight.unfinished or "none under way", "current.json on the host")
    equal("version-running", facts.get("version") or expected.get("sglang_version"), sight.version_running, "/server_info version")
    equal("version-on-disk", facts.get("version") or expected.get("sglang_version"), sight.version_on_disk, "the environment of ExecStart")
    equal("image", _image(proof), sight.image, "docker inspect")
    equal("kv-dtype", facts.get("kv_cache_dtype") or expected.get("kv_cache_dtype"), sight.kv_cache_dtype, "this start's journal")
    arguments = facts.get("arguments") or {}
    if arguments:
        changed = {k: (v, sight.arguments.get(k)) for k, v in arguments.items() if k in sight.arguments and sight.arguments[k] != v}
        words = ", ".join(f"{k}: {old!r} -> {new!r}" for k, (old, new) in sorted(changed.items()))
        shown = words or ("as proven" if sight.arguments else "")
        same = not changed if sight.arguments else None
        row("flags", same, f"{len(arguments)} arguments", shown, "/server_info", "arguments")
    tokens, now = _number(facts.get("max_total_num_tokens")), sight.max_total_num_tokens
    if tokens:
        row("pool-tokens", None if now is None else abs(now / tokens - 1) <= POOL_TOLERANCE, f"{tokens} within {POOL_TOLERANCE:.0%}", now,
            "/server_info max_total_num_tokens", "max_total_num_tokens")  # fmt: skip
    accepted = facts.get("accept_length") or expected.get("accept_length")
    if accepted:
        low = ACCEPT_SHARE * float(accepted)
        same = None if sight.accept_length is None else sight.accept_length >= low
        words = f"at least {low:.3g} of {float(accepted):.3g}"
        row("accept-length", same, words, sight.accept_length, "/server_info avg_spec_accept_length", "accept_length")
    before = int(facts.get("retractions") or 0) if sight.invocation == record.get("invocation") else 0
    row("retractions", None if sight.retractions is None else sight.retractions <= before, f"at most {before}", sight.retractions,
        "this start's journal", "retractions")  # fmt: skip
    row("health", None if sight.health is None and "health" in sight.reasons else sight.health == 200, "200",
        sight.health if sight.health is not None else "no answer", "GET /health")  # fmt: skip
    holders = "; ".join(f"pid {s.pid} {s.unit or 'no unit'}: {s.argv[:80]}" for s in sight.port_holders)
    row("port-owner", sight.port_owned, f"processes of {sight.unit}", holders or ("as proven" if sight.port_owned else "nobody listens"),
        "listening sockets")  # fmt: skip
    row("journal", not sight.journal_errors if sight.reasons.get("journal") is None else None, "no error since the proof",
        " / ".join(sight.journal_errors[:3]) or "no error since the proof", "this start's journal")  # fmt: skip
    strangers = "; ".join(f"pid {s.pid} {s.unit or 'no unit'}: {s.argv[:60]}" for s in sight.gpu_strangers)
    if sight.reasons.get("gpu") is None:
        row("gpu-holders", not sight.gpu_strangers, "only this service on its GPUs", strangers or "only this service", "nvidia-smi")
    memory = expected.get("gpu_memory_mib")
    if memory and sight.gpu_mib is not None:
        row("gpu-memory", abs(sight.gpu_mib / memory - 1) <= GPU_TOLERANCE, f"{memory:.0f} MiB within {GPU_TOLERANCE:.0%}",
            f"{sight.gpu_mib:.0f} MiB", "nvidia-smi")  # fmt: skip
    return rows


def _image(proof: Mapping[str, Any]) -> str | None:
    containers = proof.get("containers") or []
    return str(containers[0].get("image_id")) if containers else None


def _number(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def _changed_lines(proven: str, now: str | None) -> str:
    """The lines that differ, those that came and those that went."""
    if now is None:
        return "the unit file is gone"
    came = [line for line in now.splitlines() if line not in proven.splitlines()]
    went = [line for line in proven.splitlines() if line not in now.splitlines()]
    if not came and not went:
        return "as proven" if proven == now else "the same lines in another order"
    return "; ".join([*(f"+{line}" for line in came[:5]), *(f"-{line}" for line in went[:5])])


#: A line that tells of trouble while a server serves; warnings are not drift.
_TROUBLE = re.compile(
    r"\bTraceback \(most recent call last\)|\bCUDA error|out of memory|OutOfMemoryError|\bcrashed with exit code|\bNCCL error"
    r"|Xid\b|\bERROR\b|Scheduler hit an exception|watchdog timeout|detected NaN",
    re.I,
)


def trouble(lines: Sequence[str]) -> list[str]:
    """Journal lines that tell of an error, each once, in order.

    Example: `trouble(["a", "torch.OutOfMemoryError: CUDA out of memory."])` is the second line alone.
    """
    return list(dict.fromkeys(line.strip()[:300] for line in lines if _TROUBLE.search(line)))
