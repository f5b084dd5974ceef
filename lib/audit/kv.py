"""Notebook 05's tables: what the KV cache is declared, asked and allocated as, and what it costs.

declared (checkpoint files) -> asked (flag) -> resolved by this version's rules -> allocated (the log's pool line)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lib.audit.arms import FLOORS, Audit
from lib.audit.compare import ScoreComparison
from lib.audit.decision import (
    cost_row,
    throughput,
)
from lib.audit.evidence import environ_facts, facts_of_checkpoint, gather, log_facts, server_info_facts
from lib.audit.rules import AuditReport, audit
from lib.audit.tasks import FAMILIES, able_families, is_able, read_answers
from lib.deploy.build import pool_bytes_per_token
from lib.errors import WorkbookError
from lib.model.memory import kv_bytes_per_token, predict_pools
from lib.model.quantization import resolve_kv_cache_dtype
from lib.records import Measured, Prediction
from lib.results import Measurement


def asked_dtype(a: Audit, dtype: str) -> str:
    """The KV cache dtype that an arm was asked for."""
    flag = a.handles[dtype].params.flags.get("kv_cache_dtype")
    return str(
        (a.run.server_info(a.launches[dtype]) or {}).get("kv_cache_dtype")
        if a.run.attached and dtype in a.launches
        else flag or "auto"
    )


def declared_rows(a: Audit) -> list[dict[str, Any]]:
    """What the checkpoint's own files declare about its KV cache, and which scale tensors it carries."""
    checkpoint = a.run.checkpoint(a.handles[a.reference])
    if checkpoint is None:
        return [{"what": "checkpoint", "value": "not read: the server is attached"}]
    quantization, scales = checkpoint.quantization, checkpoint.scales
    rows: list[dict[str, Any]]
    scale_words = (
        "no tensor list"
        if scales is None
        else (
            f"{scales.k_count} k_scale, {scales.v_count} v_scale ({scales.name_form}), all 1.0: {scales.all_one}"
            if scales.present
            else "none"
        )
    )
    rows = [
        {"what": "architecture", "value": checkpoint.architecture_name},
        {
            "what": "weights",
            "value": f"{quantization.weights_method or 'not quantized'} {quantization.weights_algo or ''}".strip(),
        },
        {"what": "KV cache declared", "value": quantization.kv_declared or "nothing"},
        {"what": "declared in", "value": ", ".join(quantization.kv_declared_in) or "-"},
        {"what": "scale tensors", "value": scale_words},
        {"what": "context", "value": checkpoint.context_length},
    ]
    return [*rows, *({"what": "conflict", "value": c} for c in quantization.conflicts)]


def resolved_rows(a: Audit) -> list[dict[str, Any]]:
    """For each arm: asked, predicted by this version's rules, and why."""
    rows = []
    for dtype in a.dtypes:
        checkpoint, asked = a.checkpoint(dtype), asked_dtype(a, dtype)
        try:
            found = (
                resolve_kv_cache_dtype(
                    checkpoint, asked, a.run.version(a.handles[dtype]), platform=a.run.platform(a.handles[dtype])
                )
                if checkpoint
                else None
            )
            rows.append(
                {
                    "arm": dtype,
                    "asked": asked,
                    "predicted": found.dtype if found else "not known",
                    "why": found.why if found else "no checkpoint",
                }
            )
        except WorkbookError as error:
            rows.append({"arm": dtype, "asked": asked, "predicted": "refused", "why": str(error)})
    return rows


def allocated_rows(a: Audit) -> list[dict[str, Any]]:
    """For each arm: asked, repeated by /server_info, allocated by the log's own line."""
    rows = []
    for dtype in a.dtypes:
        launch = a.launches.get(dtype)
        pool = a.pool(dtype)
        info = a.run.server_info(launch) or {} if launch else {}
        line = a.run.evidence(a.run.log_file(launch), pool.line_no, pool.line) if launch and pool else None
        rows.append(
            {
                "arm": dtype,
                "/server_info says": info.get("kv_cache_dtype", "(never answered)"),
                "allocated": pool.dtype if pool and pool.dtype else "not known",
                "tokens": pool.tokens if pool else None,
                "evidence": line,
            }
        )
    return rows


def predictions(a: Audit) -> list[Prediction]:
    """Bytes a token and tokens in the pool for each arm, from the checkpoint, beside the server's own lines."""
    made: list[Prediction] = []
    for dtype in a.dtypes:
        checkpoint = a.checkpoint(dtype)
        if checkpoint is None:
            continue
        flags = a.handles[dtype].params.flags
        version, platform, pool = a.run.version(a.handles[dtype]), a.run.platform(a.handles[dtype]), a.pool(dtype)
        try:
            kv = kv_bytes_per_token(
                checkpoint, a.handles[dtype].tp_size, asked_dtype(a, dtype), sglang_version=version, platform=platform
            )
            bytes_predicted = Measured(value=kv.per_gpu, unit="B", reason="computed")
        except WorkbookError as error:
            bytes_predicted = Measured(value=None, unit="B", reason=str(error))
        made.append(
            Prediction(
                id=f"bytes-{dtype}",
                what=f"KV cache bytes a token and device, {dtype}",
                predicted=bytes_predicted,
                formula="layers x (K + V) x KV heads per device x head_dim x element size",
                source="lib.model.memory.kv_bytes_per_token",
                measured=pool_bytes_per_token(pool) if dtype in a.launches else None,
            )
        )
        made.append(
            Prediction(
                id=f"tokens-{dtype}",
                what=f"tokens in the KV pool, {dtype}",
                predicted=_predicted_tokens(a, dtype, flags, version, platform),
                formula="min(--max-total-tokens, memory for KV / bytes a token)",
                source="lib.model.memory.predict_pools",
                measured=Measured(value=pool.tokens, unit="tokens", n=1, reason="read") if pool else None,
            )
        )
    return made


def _predicted_tokens(a: Audit, dtype: str, flags: Mapping[str, Any], version: str, platform: str) -> Measured:
    checkpoint = a.checkpoint(dtype)
    if checkpoint is None:
        return Measured(value=None, reason="no checkpoint")
    host = a.run.host()
    memory = min((g["memory_total_mib"] for g in host["gpus"]), default=host["memory_bytes"] / (1 << 20))
    taken = {
        k: flags[k]
        for k in ("mem_fraction_static", "max_total_tokens", "max_running_requests", "page_size")
        if flags.get(k)
    }
    try:
        pools = predict_pools(
            checkpoint,
            tp=a.handles[dtype].tp_size,
            kv_cache_dtype=asked_dtype(a, dtype),
            sglang_version=version,
            platform=platform,
            gpu_memory_mib=memory,
            **taken,
        )
    except WorkbookError as error:
        return Measured(value=None, unit="tokens", reason=str(error))
    return Measured(value=pools.max_total_num_tokens, unit="tokens", reason="computed")


def audit_report(a: Audit, dtype: str) -> AuditReport | None:
    """The accuracy audit of one arm from its checkpoint, log and /server_info; None if it never started."""
    launch = a.launches.get(dtype)
    if launch is None:
        return None
    checkpoint = a.checkpoint(dtype)
    arm = a.arms.get(dtype)
    place = f"checkpoint-{dtype}" if arm and arm.checkpoint else "checkpoint"
    groups = (
        [facts_of_checkpoint(checkpoint, a.run.path(a.run.raw / place / "checkpoint.json"))]
        if checkpoint
        else []
    )
    file = a.run.log_file(launch)
    if file.exists():
        groups.append(log_facts(file.read_bytes().splitlines(), a.run.path(file)))
    info = a.run.server_info(launch)
    if info:
        groups.append(server_info_facts(info, a.run.path(file.parent / "server_info.json")))
    if launch.environment:  # of an attached server perhaps nothing may be read
        text = "\n".join(f"{k}={v}" for k, v in launch.environment.items())
        groups.append(environ_facts(text, a.run.path(file.parent / "launch.json")))
    return audit(gather(*groups)) if groups else None


def finding_rows(report: AuditReport | None) -> list[dict[str, Any]]:
    """Findings of the audit, the weightiest first."""
    return [
        {
            "rule": f.id,
            "level": f.level,
            "severity": f.severity,
            "finding": f.what,
            "known by": str(f.certainty),
            "do": f.do,
            "evidence": f.evidence[:2],
        }
        for f in (report.findings if report else [])
    ]


def fine_rows(report: AuditReport | None) -> list[dict[str, Any]]:
    """What was checked and is fine."""
    return [{"rule": c.id, "checked": c.title, "why": c.why} for c in (report.fine if report else [])]


def unchecked_rows(report: AuditReport | None) -> list[dict[str, Any]]:
    """What could not be checked, and what would settle it; accepted losses are named too."""
    rows = [
        {"rule": n.id, "not checked": n.title, "because": n.why, "settled by": ", ".join(n.settled_by)}
        for n in (report.not_checked if report else [])
    ]
    return rows + [
        {"rule": x.id, "not checked": x.title, "because": f"accepted: {x.what}", "settled by": x.instead}
        for x in (report.accepted_losses if report else [])
    ]


def loss_rows(a: Audit) -> list[dict[str, Any]]:
    """The reference against itself (its floors), then each arm against it, pooled over all documents."""
    rows = []
    for name in FLOORS:
        if name == "again" or name in a.floors:
            rows.append(_loss_row(f"{a.reference} {name} (noise floor)", a.floor_of(name), a.scores.get(a.reference, [])))
    for dtype in a.dtypes[1:]:
        rows.append(_loss_row(f"{dtype} against {a.reference}", a.compared(dtype), a.scores.get(dtype, [])))
    return rows


def _loss_row(name: str, found: ScoreComparison | None, taken: Sequence[Measurement]) -> dict[str, Any]:
    if found is None:
        problem = next((m.problem for m in taken if m.problem), "it has no scores")
        nothing = Measured(value=None, reason=problem)
        return {"arm": name, "these texts": nothing, "texts like these": nothing, "mean |difference|": None, "perplexity": None,
                "top-1 agreement": None, "KL, at least": None}  # fmt: skip
    absolute = Measured(value=found.mean_absolute, unit="nat/token", n=found.tokens, reason="mean")
    return {
        "arm": name, "these texts": found.pooled, "texts like these": found.by_document, "mean |difference|": absolute,
        "perplexity": found.perplexity_ratio, "top-1 agreement": found.top1_agreement, "KL, at least": found.kl_lower_bound,
    }  # fmt: skip


def position_rows(a: Audit) -> list[dict[str, Any]]:
    """Each arm by position in the document."""
    return [
        {
            "arm": dtype, "positions": f"{x.first} to {x.last}", "mean": x.mean, "perplexity": x.perplexity_ratio,
            "top-1 agreement": x.top1_agreement, "KL, at least": x.kl_lower_bound,
        }
        for dtype in a.dtypes[1:]
        if (found := a.compared(dtype)) is not None
        for x in found.buckets
    ]  # fmt: skip


def largest_rows(a: Audit, count: int = 4) -> list[dict[str, Any]]:
    """The tokens whose log-probability moved furthest, with the text before them."""
    return [
        {
            "arm": dtype, "document": t.document, "position": t.position, "nat": round(t.difference, 3),
            "text": repr(t.text[-60:]) if t.text else f"token {t.token_id}",
        }
        for dtype in a.dtypes[1:]
        if (found := a.compared(dtype)) is not None
        for t in found.largest_tokens[:count]
    ]  # fmt: skip


def task_rows(a: Audit) -> list[dict[str, Any]]:
    """Task items right under the reference and each arm, at shallow depth (control) and deep; what the model can't do at all."""
    reference = a.tasks.get(a.reference)
    rows = [
        {
            "arm": a.reference, "task": FAMILIES[family][0], "items": of, "control": f"{good}", "deep": "-", "found": "skipped",
            "why": "the model can't do it even with the facts close by",
        }
        for family, (good, of) in able_families(read_answers(reference.folder) if reference and reference.ok else []).items()
        if not is_able(good, of)
    ]  # fmt: skip
    return rows + [
        {
            "arm": dtype, "task": f.what, "items": f.items, "control": f"{f.control_a} / {f.control_b}",
            "deep": f"{f.deep_a} / {f.deep_b}", "found": f.outcome, "why": f.reason,
        }
        for dtype in a.dtypes[1:]
        for f in a.task_results(dtype)
        if f.outcome != "skipped"
    ]  # fmt: skip


def probe_rows(a: Audit) -> list[dict[str, Any]]:
    """What each arm's own cache probe found: no reference, one running server."""
    rows = []
    for dtype in a.dtypes:
        found = a.probe(dtype)
        if found is not None:
            prefix, decode = (c.cost if c else None for c in (found.prefix, found.decode))
            rows.append({"arm": dtype, "found": found.outcome, "prefix read": prefix, "decode": decode, "answer": found.answer})
    return rows


def cost_rows(a: Audit) -> list[dict[str, Any]]:
    """What each arm's precision costs: tokens in the pool and output tokens a second, the reference before and after."""
    names = [*a.dtypes, *(n for n in a.costs if n not in a.dtypes)]
    return [cost_row(n, a.pool(n) if n in a.dtypes else None, throughput(a.costs.get(n))) for n in names]


def loss_buckets(a: Audit) -> dict[str, list[Any]]:
    """Differences by position for the figure, one series an arm."""
    series = {}
    for dtype in a.dtypes:
        found = a.compared(dtype)
        if found:
            series[f"{dtype} again" if dtype == a.reference else dtype] = list(found.buckets)
    return series


def document_rows(a: Audit) -> list[dict[str, Any]]:
    """The texts that were scored: origin, hash, tokens."""
    file = a.run.raw / "documents" / "documents.json"
    if not file.exists():
        return []
    documents = Measurement(file.parent, None).json("documents.json")  # type: ignore[arg-type]
    return [
        {"document": d["name"], "origin": d["origin"], "SHA-256 of the text": d["sha256"][:16], "tokens": len(d["ids"])}
        for d in documents
    ]
