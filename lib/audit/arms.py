"""Notebook 05's arms: what is launched, asked of each server and kept as raw records, and how two arms compare."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lib.audit.compare import ScoreComparison, compare_scores
from lib.audit.decision import (
    measure_cost,
)
from lib.audit.edits import edited_checkpoint
from lib.audit.edits_there import edited_there
from lib.audit.fidelity import ProbeReport, judge_probe, take_probe, view_of
from lib.audit.probes import read_scores, score_documents, score_under_load, tokenize_documents
from lib.audit.sides import able
from lib.audit.tasks import FamilyResult, compare_tasks, read_answers, run_tasks
from lib.errors import BadInput
from lib.hosts import local
from lib.load.benchmark import take_calibration
from lib.model.checkpoint import read_checkpoint
from lib.model.facts import Checkpoint
from lib.params import AuditParams
from lib.records import Evidence
from lib.results import Measurement, NotebookRun, ServerHandle
from lib.server.launch import LaunchRecord
from lib.server.log_records import KvPool
from lib.server.remote import place_of
from lib.server.spec import resolve_model


class Audit:
    """Notebook 05's arms and what was measured on them; the first dtype of the parameters is the reference.

    An arm is a KV cache dtype, or anything else that `arms` asks for (mamba_ssm_dtype, chunked prefill, a backend, an
    edited checkpoint) on top of the reference.
    """

    def __init__(self, run: NotebookRun) -> None:
        self.run = run
        self.params: AuditParams = run.params  # type: ignore[assignment]
        self.arms = {arm.id: arm for arm in self.params.arms} if not run.attached else {}
        dtypes = ["attached"] if run.attached else list(self.params.kv_cache_dtypes)
        self.dtypes = [*dtypes, *self.arms]
        if len(set(self.dtypes)) < len(self.dtypes):
            raise BadInput("arms and kv_cache_dtypes with different names", ", ".join(self.dtypes), "rename one")
        self.handles: dict[str, ServerHandle] = {}
        self.launches: dict[str, LaunchRecord] = {}
        self.scores: dict[str, list[Measurement]] = {}
        self.floors: dict[str, Measurement] = {}
        self.tasks: dict[str, Measurement] = {}
        self.probes: dict[str, Measurement] = {}
        self.costs: dict[str, Measurement] = {}
        self._compared: dict[str, ScoreComparison | None] = {}
        self._documents: list[dict[str, Any]] | None = None
        for dtype in self.dtypes:
            self.handles[dtype] = self._handle(dtype, f"kv-{dtype}")

    def _handle(self, dtype: str, name: str) -> ServerHandle:
        if self.run.attached:
            return self.run.server(name, {}, strict=False)
        arm = self.arms.get(dtype)
        flags: dict[str, Any] = {"kv_cache_dtype": self.dtypes[0] if arm else dtype}
        if self.params.chunked_prefill_size:
            flags["chunked_prefill_size"] = self.params.chunked_prefill_size
        model = None
        if arm and arm.checkpoint and not self.run.offline:
            base = self.run.profile.server.model or ""
            place = place_of(self.run.profile.host)
            made = (
                edited_there(place, base, arm.checkpoint)
                if place
                else edited_checkpoint(resolve_model(base), arm.checkpoint)
            )
            model = str(made)
        return self.run.server(
            name, {**flags, **(arm.flags if arm else {})}, arm.environment if arm else {}, strict=False, model=model
        )

    @property
    def reference(self) -> str:
        return self.dtypes[0]

    def measure(self) -> None:
        """Scores every arm (the reference again, under load and after a restart: its floor), then tasks, probe and cost."""
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
            self._measure_arm(dtype, handle)
            handle.stop()
            self.launches[dtype] = handle.launches()[-1]
        if not self.run.attached and self.params.restart_reference and self.scores.get(self.reference):
            self._measure_restarted()
        self._compared.clear()

    def _measure_arm(self, dtype: str, handle: ServerHandle) -> None:
        tokenized = self.run.measure(
            "documents",
            handle,
            tokenize_documents,
            any_server=True,
            keep_errors=True,
            context=None if self.run.offline or handle.attached else self.handles[self.reference].spec.model,
            documents=list(self.params.documents),
            tokens=self.params.document_tokens,
        )
        if not tokenized.ok:
            self.run.skip(f"scores of {dtype}", tokenized.problem or "the documents could not be tokenized")
            return
        documents = tokenized.json("documents.json")
        names = ["first", "again"] if dtype == self.reference else ["first"]
        self.scores[dtype] = [
            self.run.measure(
                f"scores-{dtype}-{name}",
                handle,
                score_documents,
                keep_errors=True,
                documents=bare(documents if name == "first" else documents[: self.params.floor_documents]),
                top_logprobs=self.params.top_logprobs if name == "first" else 0,
            )
            for name in names
        ]
        if dtype == self.reference and self.params.load_streams and not handle.attached:
            self.floors["loaded"] = self.run.measure(
                f"scores-{dtype}-loaded",
                handle,
                score_under_load,
                keep_errors=True,
                documents=bare(documents[: self.params.floor_documents]),
                streams=self.params.load_streams,
            )
        self._measure_tasks(dtype, handle)
        if self.params.probe_documents:
            self.probes[dtype] = self.run.measure(
                f"probe-{dtype}", handle, take_probe, keep_errors=True, documents=self.params.probe_documents, duty=1.0
            )
        self._measure_cost(dtype, handle, dtype)

    def _measure_tasks(self, dtype: str, handle: ServerHandle) -> None:
        if not self.params.task_items:
            return
        families = None
        if dtype != self.reference:
            known = self.tasks.get(self.reference)
            families = able(known.folder) if known and known.ok else []
            if not families:
                self.run.skip(f"tasks on {dtype}", "the reference does none of them even at shallow depth")
                return
        self.tasks[dtype] = self.run.measure(
            f"tasks-{dtype}",
            handle,
            run_tasks,
            keep_errors=True,
            count=self.params.task_items,
            deep_tokens=self.params.task_tokens,
            families=families,
        )

    def _measure_cost(self, dtype: str, handle: ServerHandle, name: str) -> None:
        if self.params.cost_requests:
            self.costs[name] = self.run.measure(
                f"cost-{name}",
                handle,
                measure_cost,
                keep_errors=True,
                requests=self.params.cost_requests,
                concurrency=self.params.cost_concurrency,
                input_len=self.params.cost_input_len,
                output_len=self.params.cost_output_len,
                api_key_env=handle.params.api_key_env,
                **self._calibration(),
            )

    def _calibration(self) -> dict[str, Any]:
        """The client's calibration where it is not on this machine, or its server is not: its way is part of the result."""
        if not self.run.there:
            return {}
        streams = self.params.cost_concurrency
        taken = self.run.measure(
            "calibration", None, take_calibration, streams=streams, api="generate", **self.run.there
        )
        return {"calibration_file": str(taken.folder / "calibration.json")}

    def _measure_restarted(self) -> None:
        """The reference launched once more: its scores (floor across restarts) and its throughput (before and after)."""
        handle = self._handle(self.reference, f"kv-{self.reference}-restarted")
        if self.run.try_launch(handle).ready_s is None:
            self.run.skip("the floor across restarts", "the reference did not start a second time")
            return
        documents = self.documents()[: self.params.floor_documents]
        self.floors["restarted"] = self.run.measure(
            f"scores-{self.reference}-restarted", handle, score_documents, keep_errors=True, documents=bare(documents)
        )
        self._measure_cost(self.reference, handle, f"{self.reference}-restarted")
        handle.stop()

    def documents(self) -> list[dict[str, Any]]:
        """The tokenized texts, from the raw record."""
        file = self.run.raw / "documents" / "documents.json"
        if self._documents is None and file.exists():
            self._documents = json.loads(file.read_text())
        return self._documents or []

    def pool(self, dtype: str) -> KvPool | None:
        """The target's pool line in the log of one arm."""
        log = self.run.log(self.launches[dtype]) if dtype in self.launches else None
        return next((p for p in log.kv_pools if p.role == "target"), None) if log else None

    def compared(self, dtype: str) -> ScoreComparison | None:
        """An arm against the reference; the reference against itself gives the noise floor. None without usable scores."""
        if dtype not in self._compared:
            reference = self.scores.get(self.reference) or []
            treated = self.scores.get(dtype) or []
            self._compared[dtype] = (
                self.compare(reference[0], reference[1], dtype)
                if dtype == self.reference and len(reference) > 1
                else self.compare(reference[0], treated[0], dtype)
                if reference and treated and dtype != self.reference
                else None
            )
        return self._compared[dtype]

    def compare(self, one: Measurement, other: Measurement, dtype: str) -> ScoreComparison | None:
        """Two scorings of the documents, token by token; None where either is unusable or blind."""
        if not one.ok or not other.ok or self.blind(dtype):
            return None
        scored = read_scores(other.folder)
        ids = {r["ids_sha256"] for r in scored}
        reference = [r for r in read_scores(one.folder, self.documents()) if r["ids_sha256"] in ids]
        first, width = self.first_position(dtype), self.params.bucket_tokens
        return compare_scores(reference, scored, width, first, self.params.bucket_doubling)

    def floor_of(self, name: str) -> ScoreComparison | None:
        """The reference against itself: `again`, `restarted` or `loaded`; None where it was not measured."""
        if name == "again":
            return self.compared(self.reference)
        measured, reference = self.floors.get(name), self.scores.get(self.reference)
        if measured is None or not reference:
            return None
        key = f"floor:{name}"
        if key not in self._compared:
            self._compared[key] = self.compare(reference[0], measured, self.reference)
        return self._compared[key]

    def known_floors(self) -> list[ScoreComparison]:
        """Every floor that was measured."""
        return [f for f in (self.floor_of(n) for n in FLOORS) if f is not None]

    def probe(self, dtype: str) -> ProbeReport | None:
        """What the cache probe of one arm found; None where it was not taken."""
        taken = self.probes.get(dtype)
        return judge_probe(taken.json("probe.json"), self.params.probe_limit_nats) if taken and taken.ok else None

    def task_results(self, dtype: str) -> list[FamilyResult]:
        """Task families under the reference and an arm; empty where either has no answers."""
        pair = [self.tasks.get(self.reference), self.tasks.get(dtype)]
        if not all(m is not None and m.ok for m in pair):
            return []
        return compare_tasks(*(read_answers(m.folder) for m in pair if m is not None))

    def first_position(self, dtype: str) -> int:
        """First position whose score depends on the KV pool.

        Some backends (torch_native, fa3) read the pool from the first token; others compute a first prefill chunk from
        unquantized keys and values, so only what comes after `chunked_prefill_size` reads it (`fidelity.VIEWS`; seen on
        an H200: docs/sources.md, H1). Where it isn't known, the first chunk is left out.
        """
        found = 1
        for one in (self.reference, dtype):
            info = self.run.server_info(self.launches[one]) or {} if one in self.launches else {}
            if view_of(info)[0] is not False:
                found = max(found, int(info.get("chunked_prefill_size") or 0) if info else 1)
        return found

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        tokens = self.params.document_tokens
        return tokens if isinstance(tokens, int) else max(tokens)

    def blind(self, dtype: str) -> str | None:
        """Why the scores of an arm cannot show its KV cache, or None."""
        first = self.first_position(dtype)
        if first >= self.longest:
            return (
                f"documents of {self.longest} tokens fit into one prefill chunk of {first}: no scored token read "
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

    def checkpoint(self, dtype: str) -> Checkpoint | None:
        """The checkpoint that an arm was served from: the profile's, or its edited copy."""
        arm = self.arms.get(dtype)
        if not arm or not arm.checkpoint:
            return self.run.checkpoint(self.handles[dtype])
        spec = None if self.run.offline else self.handles[dtype].spec
        read = self.run.measure(
            f"checkpoint-{dtype}", None, write_checkpoint, context=spec.model if spec else None,
            model_path=getattr(spec, "mirror", spec.model_path) if spec else None,
        )  # fmt: skip
        return Checkpoint.model_validate_json((read.folder / "checkpoint.json").read_text())


FLOORS = ("again", "restarted", "loaded")


def write_checkpoint(folder: Path, model_path: str) -> None:
    """Keeps what an edited checkpoint's small files and headers say (checkpoint.json)."""
    local.write_atomic(folder / "checkpoint.json", read_checkpoint(model_path).model_dump_json(indent=1))


def bare(documents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Documents without their pieces of text: what a scoring request needs."""
    return [{k: v for k, v in d.items() if k != "pieces"} for d in documents]
