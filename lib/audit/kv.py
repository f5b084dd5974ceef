"""Notebook 05: what the KV cache is declared, asked and allocated as, what it costs in accuracy, and whether that is worth it.

declared (checkpoint files) -> asked (flag) -> resolved by this version's rules -> allocated (the log's pool line)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lib.audit.compare import ScoreComparison, compare_scores, judge_loss
from lib.audit.evidence import environ_facts, facts_of_checkpoint, gather, log_facts, server_info_facts
from lib.audit.probes import read_scores, score_documents, tokenize_documents
from lib.audit.rules import AuditReport, audit
from lib.deploy.build import COARSEST, pool_bytes_per_token
from lib.errors import WorkbookError
from lib.model.memory import kv_bytes_per_token, predict_pools
from lib.model.quantization import resolve_kv_cache_dtype
from lib.params import AuditParams
from lib.records import OUTCOMES, Evidence, Measured, Prediction, Record, Status, Verdict
from lib.results import Measurement, NotebookRun, ServerHandle
from lib.server.launch import LaunchRecord
from lib.server.log_records import KvPool
from lib.server.sweep import failed_launch

GIB = 1 << 30


class Arm(Record):
    """One KV cache dtype: its launch and its scores."""

    kv_cache_dtype: str
    launch: LaunchRecord
    server_key: str | None = None
    scores: list[str] = []


class Audit:
    """Notebook 05's arms and what was measured on them; the first dtype of the parameters is the reference."""

    def __init__(self, run: NotebookRun) -> None:
        self.run = run
        self.params: AuditParams = run.params  # type: ignore[assignment]
        self.dtypes = ["attached"] if run.attached else list(self.params.kv_cache_dtypes)
        self.handles: dict[str, ServerHandle] = {}
        self.launches: dict[str, LaunchRecord] = {}
        self.scores: dict[str, list[Measurement]] = {}
        for dtype in self.dtypes:
            flags: dict[str, Any] = {} if run.attached else {"kv_cache_dtype": dtype}
            if self.params.chunked_prefill_size and not run.attached:
                flags["chunked_prefill_size"] = self.params.chunked_prefill_size
            self.handles[dtype] = run.server(f"kv-{dtype}", flags, strict=False)

    @property
    def reference(self) -> str:
        return self.dtypes[0]

    def measure(self) -> None:
        """Scores the documents on every arm: the reference twice (its noise floor), every other once."""
        if self.run.attached:
            self.run.skip(
                "the comparison of KV cache dtypes",
                "each dtype needs a launch of its own, and the attached server is not restarted",
            )
        for dtype in self.dtypes:
            handle = self.handles[dtype]
            self.launches[dtype] = self.run.try_launch(handle)
            if self.launches[dtype].ready_s is None and not handle.attached:
                continue
            tokenized = self.run.measure(
                "documents",
                handle,
                tokenize_documents,
                any_server=True,
                keep_errors=True,
                context=None if self.run.offline or handle.attached else handle.spec.model,
                documents=list(self.params.documents),
                tokens=self.params.document_tokens,
            )
            if not tokenized.ok:
                self.run.skip(f"scores of {dtype}", tokenized.problem or "the documents could not be tokenized")
                handle.stop()
                continue
            documents = tokenized.json("documents.json")
            names = ["first", "again"] if dtype == self.reference else ["first"]
            self.scores[dtype] = [
                self.run.measure(
                    f"scores-{dtype}-{name}", handle, score_documents, keep_errors=True, documents=documents
                )
                for name in names
            ]
            handle.stop()
            self.launches[dtype] = handle.launches()[-1]

    def pool(self, dtype: str) -> KvPool | None:
        """The target's pool line in the log of one arm."""
        log = self.run.log(self.launches[dtype]) if dtype in self.launches else None
        return next((p for p in log.kv_pools if p.role == "target"), None) if log else None

    def compared(self, dtype: str) -> ScoreComparison | None:
        """An arm against the reference; the reference against itself gives the noise floor. None without usable scores."""
        reference = self.scores.get(self.reference) or []
        treated = self.scores.get(dtype) or []
        pair = (
            (reference[0], reference[1])
            if dtype == self.reference and len(reference) > 1
            else (reference[:1] + treated[:1])
        )
        if len(pair) < 2 or not all(m.ok for m in pair):
            return None
        if self.blind(dtype):
            return None
        return compare_scores(
            read_scores(pair[0].folder),
            read_scores(pair[1].folder),
            self.params.bucket_tokens,
            self.first_position(dtype),
        )

    def first_position(self, dtype: str) -> int:
        """First position whose score depends on the KV pool.

        torch_native reads the pool from the first token; other backends compute a first prefill chunk from unquantized
        keys and values, so only what comes after `chunked_prefill_size` reads it (seen on an H200: docs/sources.md, H1).
        """
        found = 1
        for one in (self.reference, dtype):
            info = self.run.server_info(self.launches[one]) or {} if one in self.launches else {}
            backend = info.get("prefill_attention_backend") or info.get("attention_backend")
            if backend != "torch_native":
                found = max(found, int(info.get("chunked_prefill_size") or 0) if info else 1)
        return found

    def blind(self, dtype: str) -> str | None:
        """Why the scores of an arm cannot show its KV cache, or None."""
        first = self.first_position(dtype)
        if first >= self.params.document_tokens:
            return (
                f"documents of {self.params.document_tokens} tokens fit into one prefill chunk of {first}: no scored token read "
                "the KV pool; set chunked_prefill_size well below document_tokens"
            )
        return None

    @property
    def floor(self) -> float | None:
        """Mean absolute difference of the reference against itself, nats a token; None if it was not measured."""
        found = self.compared(self.reference)
        return found.mean_absolute if found else None

    def usable(self, dtype: str) -> bool:
        """True where an arm's server came up."""
        return dtype in self.launches and (self.launches[dtype].ready_s is not None or self.run.attached)

    def evidence(self, dtype: str) -> list[Evidence]:
        """Raw scores of an arm."""
        return [
            self.run.evidence(f) for m in self.scores.get(dtype, []) for f in sorted(m.folder.glob("scores-*.json"))
        ]

    def launch_ids(self, *dtypes: str) -> list[str]:
        return [self.launches[d].launch_id for d in dict.fromkeys(dtypes) if d in self.launches]


def _asked(a: Audit, dtype: str) -> str:
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
    checkpoint = a.run.checkpoint(a.handles[a.reference])
    rows = []
    for dtype in a.dtypes:
        asked = _asked(a, dtype)
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
    checkpoint = a.run.checkpoint(a.handles[a.reference])
    made: list[Prediction] = []
    if checkpoint is None:
        return []
    for dtype in a.dtypes:
        flags = a.handles[dtype].params.flags
        version, platform, pool = a.run.version(a.handles[dtype]), a.run.platform(a.handles[dtype]), a.pool(dtype)
        try:
            kv = kv_bytes_per_token(
                checkpoint, a.handles[dtype].tp_size, _asked(a, dtype), sglang_version=version, platform=platform
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
    checkpoint = a.run.checkpoint(a.handles[a.reference])
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
            kv_cache_dtype=_asked(a, dtype),
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
    checkpoint = a.run.checkpoint(a.handles[dtype])
    groups = (
        [facts_of_checkpoint(checkpoint, a.run.path(a.run.raw / "checkpoint" / "checkpoint.json"))]
        if checkpoint
        else []
    )
    file = a.run.log_file(launch)
    if file.exists():
        groups.append(log_facts(file.read_bytes().splitlines(), a.run.path(file)))
    info = a.run.server_info(launch)
    if info:
        groups.append(server_info_facts(info, a.run.path(file.parent / "server_info.json")))
    groups.append(
        environ_facts(
            "\n".join(f"{k}={v}" for k, v in launch.environment.items()), a.run.path(file.parent / "launch.json")
        )
    )
    return audit(gather(*groups))


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
    """Each arm against the reference, pooled over all documents; the reference's row is the noise floor."""
    rows = []
    for dtype in a.dtypes:
        found = a.compared(dtype)
        name = f"{dtype} again (noise floor)" if dtype == a.reference else f"{dtype} against {a.reference}"
        if found is None:
            problem = next((m.problem for m in a.scores.get(dtype, []) if m.problem), "it has no scores")
            rows.append(
                {
                    "arm": name,
                    "mean": Measured(value=None, reason=problem),
                    "mean |difference|": None,
                    "perplexity": None,
                    "largest": None,
                    "identical": None,
                }
            )
            continue
        rows.append(
            {
                "arm": name,
                "mean": found.pooled,
                "mean |difference|": Measured(
                    value=found.mean_absolute, unit="nat/token", n=found.tokens, reason="mean"
                ),
                "perplexity": found.perplexity_ratio,
                "largest": Measured(value=found.largest, unit="nat", n=1, reason="largest single token"),
                "identical": found.identical,
            }
        )
    return rows


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


def verdicts(a: Audit, predicted: Sequence[Prediction]) -> list[Verdict]:
    """Allocated as predicted; bytes and tokens as predicted; audit clean; floor; the loss of each arm; affordable."""
    made: list[Verdict] = []
    for dtype in a.dtypes:
        launch = a.launches[dtype]
        if launch.ready_s is None and not a.run.attached:
            outcome, reason, evidence = failed_launch(a.run, launch)
            made.append(
                Verdict(
                    id=f"starts-{dtype}",
                    claim=f"The server starts with a {dtype} KV cache",
                    status=OUTCOMES[outcome],
                    reason=reason,
                    evidence=[evidence],
                    launch_ids=[launch.launch_id],
                    rule="lib.server.failures",
                )
            )
            continue
        made.append(_allocated(a, dtype))
        made.append(_audit_verdict(a, dtype))
    made += [_as_predicted(a, p) for p in predicted]
    made.append(_floor_verdict(a))
    if not a.run.attached:
        for dtype in a.dtypes[1:]:
            made += [_effect_verdict(a, dtype), _loss_verdict(a, dtype)]
        made += [_affordable(a, d) for d in a.dtypes[1:]]
    return made


def _allocated(a: Audit, dtype: str) -> Verdict:
    launch, pool = a.launches[dtype], a.pool(dtype)
    row = next(r for r in resolved_rows(a) if r["arm"] == dtype)
    common: dict[str, Any] = {
        "id": f"allocated-{dtype}",
        "claim": f"Asked for {_asked(a, dtype)}, the server allocates the KV cache that this version's rules predict",
        "limit": f"{row['predicted']}",
        "rule": "lib.model.quantization.resolve_kv_cache_dtype",
        "launch_ids": [launch.launch_id],
        "predicted": Measured(value=str(row["predicted"]), reason="computed"),
    }
    if pool is None or pool.dtype is None:
        return Verdict(status=Status.INCONCLUSIVE, reason="no log line tells the allocated dtype", **common)
    allocated = pool.dtype.removeprefix("torch.")
    same = allocated == str(row["predicted"]).removeprefix("torch.")
    return Verdict(
        status=Status.INCONCLUSIVE if row["predicted"] == "not known" else Status.PASS if same else Status.FAIL,
        measured=Measured(value=allocated, reason="read"),
        reason=f"allocated: {allocated}; {row['why']}",
        evidence=[a.run.evidence(a.run.log_file(launch), pool.line_no, pool.line)],
        **common,
    )


def _audit_verdict(a: Audit, dtype: str) -> Verdict:
    report = audit_report(a, dtype)
    launch = a.launches[dtype]
    common: dict[str, Any] = {
        "id": f"audit-{dtype}",
        "claim": f"Nothing in the configuration with {dtype} lowers accuracy silently",
        "rule": "docs/rules.md",
        "limit": "no finding of level warning or error",
        "launch_ids": [launch.launch_id],
    }
    if report is None:
        return Verdict(status=Status.INCONCLUSIVE, reason="nothing could be read", **common)
    heavy = [f for f in report.findings if f.level != "info"]
    evidence = [e for f in (heavy or report.fine) for e in f.evidence][:6]
    measured = Measured(
        value=len(heavy), unit="findings", n=len(report.findings) + len(report.fine), reason="rules answered"
    )
    if heavy:
        words = "; ".join(f"{f.id} ({f.level}): {f.what}" for f in heavy)
        return Verdict(
            status=Status.FAIL,
            measured=measured,
            reason=words,
            evidence=evidence or [a.run.evidence(a.run.log_file(launch))],
            **common,
        )
    serious = [n.id for n in report.not_checked if str(n.severity) in ("high", "critical")]
    if serious or not report.fine:
        return Verdict(
            status=Status.INCONCLUSIVE,
            measured=measured,
            reason=f"nothing found, but not everything could be checked: {', '.join(serious)}",
            evidence=evidence,
            **common,
        )
    return Verdict(status=Status.PASS, measured=measured, reason=report.answer, evidence=evidence, **common)


def _as_predicted(a: Audit, p: Prediction) -> Verdict:
    dtype = p.id.split("-", 1)[1]
    launch = a.launches.get(dtype)
    common: dict[str, Any] = {
        "id": f"predicted-{p.id}",
        "claim": f"Predicted from the checkpoint: {p.what}",
        "predicted": p.predicted,
        "measured": p.measured,
        "limit": "within 1%, or within the rounding of the log",
        "rule": p.source,
        "launch_ids": [launch.launch_id] if launch else [],
    }
    predicted, measured = p.predicted.value, p.measured.value if p.measured else None
    if (
        not isinstance(predicted, (int, float))
        or not isinstance(measured, (int, float))
        or launch is None
        or p.measured is None
    ):
        return Verdict(
            status=Status.INCONCLUSIVE,
            reason=(p.predicted.reason if predicted is None else p.measured.reason if p.measured else None)
            or "not measured",
            **common,
        )
    low = min(measured * 0.99, p.measured.low if p.measured.low is not None else measured)
    high = max(measured * 1.01, p.measured.high if p.measured.high is not None else measured)
    if (high - low) / 2 > COARSEST * predicted:
        return Verdict(
            status=Status.INCONCLUSIVE,
            reason=f"the log's rounding leaves {low:.4g} to {high:.4g}: too coarse here",
            **common,
        )
    pool = a.pool(dtype)
    evidence = [a.run.evidence(a.run.log_file(launch), pool.line_no if pool else None, pool.line if pool else None)]
    return Verdict(
        status=Status.PASS if low <= predicted <= high else Status.FAIL,
        reason=f"measured / predicted = {measured / predicted:.4f}",
        evidence=evidence,
        **common,
    )


def _floor_verdict(a: Audit) -> Verdict:
    common: dict[str, Any] = {
        "id": "floor",
        "claim": f"The same server ({a.reference}) gives the same log-probabilities twice: the noise floor is known",
        "rule": "lib.audit.compare",
        "limit": f"mean |difference| at most a tenth of {a.params.limit_nats:g} nat/token",
        "launch_ids": a.launch_ids(a.reference),
    }
    found = a.compared(a.reference)
    if found is None:
        return _unusable(a, (a.reference,), common)
    measured = Measured(
        value=found.mean_absolute, unit="nat/token", n=found.tokens, reason="mean |difference|, the same server twice"
    )
    status = Status.PASS if found.mean_absolute <= a.params.limit_nats / 10 else Status.INCONCLUSIVE
    words = "bit-identical" if found.identical else f"largest single difference {found.largest:+.4f} nat"
    return Verdict(status=status, measured=measured, reason=words, evidence=a.evidence(a.reference), **common)


def _effect_verdict(a: Audit, dtype: str) -> Verdict:
    common: dict[str, Any] = {
        "id": f"effect-{dtype}",
        "claim": f"On this text {dtype} computes exactly what {a.reference} computes",
        "limit": "bit-identical: pass; interval of the mean difference without 0: fail; else inconclusive",
        "rule": "lib.audit.compare",
        "launch_ids": a.launch_ids(a.reference, dtype),
    }
    found = a.compared(dtype)
    if found is None or a.floor is None:
        return _unusable(a, (a.reference, dtype), common)
    evidence = [*a.evidence(a.reference)[:1], *a.evidence(dtype)]
    low, high = found.pooled.low, found.pooled.high
    if missing := _no_trace(a, dtype):
        return Verdict(status=Status.INVALID, reason=missing, **common)
    if low is None or high is None:
        return Verdict(status=Status.INCONCLUSIVE, reason=found.pooled.reason or "no interval", **common)
    words = f"mean |difference| {found.mean_absolute:.4f}, noise floor {a.floor:.4f} nat/token"
    if found.identical:
        return Verdict(status=Status.PASS, measured=found.pooled, reason="bit-identical", evidence=evidence, **common)
    if low <= 0 <= high:
        reason = f"single tokens move ({words}), the mean is not told apart from 0"
        return Verdict(status=Status.INCONCLUSIVE, measured=found.pooled, reason=reason, evidence=evidence, **common)
    reason = f"the mean {'loss' if high < 0 else 'gain'} is not 0; {words}"
    return Verdict(status=Status.FAIL, measured=found.pooled, reason=reason, evidence=evidence, **common)


def _no_trace(a: Audit, dtype: str) -> str | None:
    """Why nothing was compared: both arms allocated the same dtype, or nobody knows what they allocated; else None."""
    one, other = a.pool(a.reference), a.pool(dtype)
    if one is None or other is None or one.dtype is None or other.dtype is None:
        return "which dtype an arm allocated is not known, so nothing shows that the arms differ"
    return f"both arms allocated {one.dtype}: nothing was compared" if one.dtype == other.dtype else None


def _loss_verdict(a: Audit, dtype: str) -> Verdict:
    common: dict[str, Any] = {
        "id": f"loss-{dtype}",
        "claim": f"{dtype} loses no more than the accepted log-probability against {a.reference}",
        "limit": f"loss at most {a.params.limit_nats:g} nat/token",
        "rule": "lib.audit.compare.judge_loss",
        "launch_ids": a.launch_ids(a.reference, dtype),
    }
    found, floor = a.compared(dtype), a.compared(a.reference)
    if found is None or floor is None:
        return _unusable(a, (a.reference, dtype), common)
    outcome, reason = judge_loss(found.pooled, floor, a.params.limit_nats)
    if missing := _no_trace(a, dtype):
        outcome, reason = "no_trace_of_treatment", missing
    else:
        reason = f"{reason}; {_worst(found)}"
    evidence = [*a.evidence(a.reference)[:1], *a.evidence(dtype)]
    return Verdict(status=OUTCOMES[outcome], measured=found.pooled, reason=reason, evidence=evidence, **common)


def _worst(found: ScoreComparison) -> str:
    """The bucket that loses most, with its own interval (not corrected for looking at several)."""
    worst = min(found.buckets, key=lambda b: float(b.mean.value) if isinstance(b.mean.value, (int, float)) else 0.0)
    ends = (
        f" [{worst.mean.low:+.4f}, {worst.mean.high:+.4f}]"
        if worst.mean.low is not None and worst.mean.high is not None
        else ""
    )
    mean = f"{worst.mean.value:+.4f}" if isinstance(worst.mean.value, (int, float)) else "unknown"
    return f"worst positions {worst.first} to {worst.last}: {mean}{ends}"


def _unusable(a: Audit, dtypes: Sequence[str], common: Mapping[str, Any]) -> Verdict:
    for dtype in dtypes:
        if a.usable(dtype) and (blind := a.blind(dtype)):
            return Verdict(status=Status.INVALID, reason=blind, **common)
    taken = [m for d in dtypes for m in a.scores.get(d, [])]
    invalid = next((m.stamp.invalid for m in taken if m.stamp.invalid), None)
    problem = next((m.problem for m in taken if m.problem), "an arm has no scores: its server did not start")
    return Verdict(status=Status.INVALID if invalid else Status.INCONCLUSIVE, reason=problem, **common)


def _affordable(a: Audit, dtype: str) -> Verdict:
    """What the reference's precision costs in tokens of context, from both servers' own pool lines."""
    reference, other = a.pool(a.reference), a.pool(dtype)
    checkpoint = a.run.checkpoint(a.handles[a.reference])
    common: dict[str, Any] = {
        "id": f"affordable-{a.reference}-{dtype}",
        "claim": f"A {a.reference} KV cache holds at least one full context",
        "limit": "tokens in the pool >= context length",
        "rule": "the pool line of the server's log",
        "launch_ids": a.launch_ids(a.reference, dtype),
    }
    log = a.run.log(a.launches[a.reference])
    context = log.capacity.context_len if log and log.capacity else (checkpoint.context_length if checkpoint else None)
    if reference is None or context is None or not a.usable(a.reference):
        return Verdict(
            status=Status.INCONCLUSIVE, reason="the server did not come up, or no context length is known", **common
        )
    if reference.tokens == a.handles[a.reference].params.flags.get("max_total_tokens"):
        reason = f"the pool of {reference.tokens} tokens is capped by --max-total-tokens: what memory would allow does not show"
        return Verdict(status=Status.INCONCLUSIVE, reason=reason, **common)
    more = f"; {dtype} would hold {other.tokens}" if other else ""
    return Verdict(
        status=Status.PASS if reference.tokens >= context else Status.FAIL,
        measured=Measured(value=reference.tokens / context, unit="contexts", n=1, reason="read"),
        reason=f"{reference.tokens} tokens for a context of {context}{more}",
        evidence=[a.run.evidence(a.run.log_file(a.launches[a.reference]), reference.line_no, reference.line)],
        **common,
    )


def recommendation(a: Audit, made: Sequence[Verdict]) -> str:
    """Which KV cache to serve with, by what was measured; an arm whose own audit or allocation failed is never recommended."""
    by_id = {v.id: v.status for v in made}
    if a.run.attached:
        return "The attached server was read, not compared: launch both dtypes on this host to measure what the cache costs."
    if by_id.get("floor") != Status.PASS:
        return "Nothing is settled: the reference's own noise floor is not known, or too high."
    parts = []
    sound = [
        d for d in a.dtypes if by_id.get(f"allocated-{d}") == Status.PASS and by_id.get(f"audit-{d}") != Status.FAIL
    ]
    for dtype in a.dtypes[1:]:
        loss = by_id.get(f"loss-{dtype}")
        if loss == Status.FAIL:
            parts.append(f"{dtype} loses more than is accepted")
        elif loss == Status.PASS:
            audited = "" if dtype in sound else ", but its audit has findings: read them first"
            parts.append(f"{dtype} stays within the accepted loss on this text{audited}")
        else:
            parts.append(f"the loss of {dtype} is not settled")
    end = (
        f"serve with {a.reference}"
        if a.reference in sound
        else f"{a.reference} has findings of its own: settle them before serving"
    )
    return f"{'; '.join(parts)}; until more is measured, {end}."
