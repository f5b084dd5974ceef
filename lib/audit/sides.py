"""One side of a comparison as a folder: what a server scored, who it was, and how to read it back when the server is gone.

    side.json                     who answered (version, model, KV dtype, backend, chunk), checks of its identity
    documents/documents.json      texts: name, origin, SHA-256, token ids
    first/ again/ loaded/         scores-NN.json of three passes (again and loaded are the noise floor), timing.json
    tasks/                        items.json, answers.jsonl

Two servers that don't fit on a machine at once are recorded one after the other and compared from their folders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lib.audit import tasks
from lib.audit.compare import (
    ScoreComparison,
    compare_scores,
    floor_shift,
    judge_comparison,
    judge_effect,
    tokens_needed,
)
from lib.audit.fidelity import view_of
from lib.audit.probes import (
    library_documents,
    read_scores,
    score_documents,
    score_under_load,
    token_pieces,
    tokenize_documents,
)
from lib.audit.tasks import FamilyResult
from lib.errors import BadInput
from lib.hosts import local
from lib.params import ServerParams
from lib.records import Record
from lib.results import Answering
from lib.server.attach import AttachedServer

#: What of /server_info says which configuration was scored.
TOLD = (
    "version", "model_path", "served_model_name", "kv_cache_dtype", "attention_backend", "prefill_attention_backend",
    "decode_attention_backend", "chunked_prefill_size", "mamba_ssm_dtype", "quantization", "dtype", "tp_size", "dp_size",
    "max_total_num_tokens", "max_req_input_len", "page_size",
)  # fmt: skip


class Wanted(Record):
    """What is scored on each side: texts and lengths, how many likeliest tokens, load of the floor, tasks."""

    documents: list[str] = []
    lengths: list[int] = []
    top_logprobs: int = 5
    load_streams: int = 2
    flush: bool = True
    task_count: int = 0
    task_tokens: int = 2000
    seed: int = 0


class AccuracyReport(Record):
    """What `workbook compare-accuracy` found; floors are A against itself."""

    a: dict[str, Any]
    b: dict[str, Any] | None
    documents: list[dict[str, Any]]
    floors: dict[str, ScoreComparison]
    comparison: ScoreComparison | None
    effect: str | None
    effect_reason: str | None
    outcome: str
    reason: str
    limit_nats: float
    needed_tokens: int | None
    floor_shift_nats: float
    tasks: list[FamilyResult] = []
    timing: dict[str, dict[str, float]]
    notes: list[str] = []


def attach(url: str, folder: Path, api_key_env: str | None) -> AttachedServer:
    """A running server to be scored, with its identity recorded below `folder`."""
    return AttachedServer.attach("side", ServerParams(attach=url, api_key_env=api_key_env), folder / "servers")


def default_lengths(info: Mapping[str, Any], most: int = 8192) -> list[int]:
    """Lengths of six documents: two each at a quarter, half and all of what the server takes, up to `most` tokens.

    Example: a context of 4,096 gives 1022, 1022, 2044, 2044, 4088, 4088.
    """
    room = min(int(info.get("max_req_input_len") or most), int(info.get("max_total_num_tokens") or most) - 64, most) - 8
    if room < 256:
        raise BadInput("a server that takes requests of 256 tokens", f"{room}", "raise its context length or its pool")
    return [room // 4, room // 4, room // 2, room // 2, room, room]


def tokenize_side(server: Answering, folder: Path, wanted: Wanted) -> list[dict[str, Any]]:
    """The documents of a side, tokenized once and kept.

    Raises:
        BadInput: the folder holds other documents, or texts are too short.
    """
    file = folder / "documents" / "documents.json"
    lengths = wanted.lengths or default_lengths(server.control.server_info())
    names = wanted.documents or library_documents(lengths)
    if wanted.documents and len(lengths) not in (1, len(names)):
        lengths = [lengths[i % len(lengths)] for i in range(len(names))]
    if len(lengths) == 1:
        lengths = lengths * len(names)
    if file.exists():
        found: list[dict[str, Any]] = json.loads(file.read_text())
        if [(d["name"], len(d["ids"])) for d in found] != list(zip(names, lengths, strict=True)):
            raise BadInput(f"{folder} holds these documents", "others are there", "name another folder, or the same texts")
        return found
    file.parent.mkdir(parents=True, exist_ok=True)
    tokenize_documents(server, file.parent, names, lengths)
    return list(json.loads(file.read_text()))


def check_same_vocabulary(server: Answering, documents: Sequence[Mapping[str, Any]]) -> str:
    """Shows that a server decodes the documents' ids to the same text; says so, or that it could not be checked.

    Raises:
        BadInput: it decodes other text (another tokenizer), or its context is too short for a document.
    """
    longest = max(len(d["ids"]) for d in documents)
    room = server.control.server_info().get("max_req_input_len")
    if room is not None and longest >= int(room):
        raise BadInput(f"a server that takes {longest} tokens", f"at most {room}", "compare shorter documents (--tokens)")
    for document in documents:
        pieces = document.get("pieces")
        if not pieces:
            return "whether both servers share a tokenizer could not be checked: no /detokenize"
        if token_pieces(server, document["ids"][:200]) != pieces[:200]:
            raise BadInput(
                "two servers with one vocabulary", f"the ids of {document['name']} are other text on B",
                "compare servers of the same model family",
            )  # fmt: skip
    return "both servers decode the ids to the same text"


def record_side(
    server: AttachedServer, folder: Path, wanted: Wanted, documents: Sequence[dict[str, Any]], floor: bool,
    families: Sequence[str] | None = None,
) -> list[str]:
    """Scores one side into its folder; what is there already (same server, same ids) is not scored again.

    With `floor`, also a second pass and one under load. Its identity is checked before and after.

    Raises:
        IdentityError: the server was restarted or exchanged meanwhile.
    """  # fmt: skip
    done = folder / "side.json"
    if done.exists() and json.loads(done.read_text()).get("server_key") != server.record.key:
        raise BadInput(f"{folder} is free, or was recorded on this very server", "another server's record", "name another folder")
    info = server.control.server_info()
    states = info.get("internal_states")
    resolved = states[0].get("kv_cache_dtype") if isinstance(states, list) and states else None
    told = {name: info[name] for name in TOLD if name in info} | {"resolved_kv_cache_dtype": resolved}
    checks = [f"before: {c}" for c in server.check_identity()]
    passes = ["first", *(["again"] if floor else [])]
    for name in passes:
        (folder / name).mkdir(parents=True, exist_ok=True)
        score_documents(
            server, folder / name, documents, top_logprobs=wanted.top_logprobs if name == "first" else 0, flush=wanted.flush
        )
    if floor and wanted.load_streams and not (folder / "loaded" / "load.json").exists():
        (folder / "loaded").mkdir(parents=True, exist_ok=True)
        score_under_load(server, folder / "loaded", documents[: max(1, len(documents) // 2)], wanted.load_streams,
                         flush=wanted.flush)  # fmt: skip
    if wanted.task_count:
        (folder / "tasks").mkdir(parents=True, exist_ok=True)
        tasks.run_tasks(
            server, folder / "tasks", wanted.task_count, wanted.task_tokens, seed=wanted.seed, families=families,
            flush=wanted.flush,
        )
    checks += [f"after: {c}" for c in server.check_identity()]
    side = {"base_url": server.base_url, "launch_id": server.launch_id, "server_key": server.record.key}
    local.write_atomic(done, json.dumps({**side, "told": told, "checks": checks}, indent=1))
    return checks


def read_side(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Who was scored in a folder, and the documents.

    Raises:
        BadInput: it is no recorded side, or its scoring did not come to its end.
    """
    try:
        documents = json.loads((folder / "documents" / "documents.json").read_text())
        side = json.loads((folder / "side.json").read_text())
    except (OSError, ValueError) as error:
        raise BadInput(
            f"a folder recorded by `workbook compare-accuracy --record` at {folder}", str(error),
            "record it, or run the same command again to finish it",
        ) from error  # fmt: skip
    return side, documents


def compare_sides(
    a: Path, b: Path | None, wanted: Wanted, bucket_tokens: int, limit_nats: float, restarted: Sequence[Path] = (),
    notes: Sequence[str] = (),
) -> AccuracyReport:
    """Compares recorded sides: A against itself (again, loaded, restarted), then B against A; the verdict."""  # fmt: skip
    side_a, documents = read_side(a)
    side_b = read_side(b)[0] if b else None
    first = read_scores(a / "first", documents)
    floors: dict[str, ScoreComparison] = {}
    for name in ("again", "loaded"):
        scores = read_scores(a / name)
        if scores:
            floors[name] = compare_scores(_same(first, scores), scores, bucket_tokens, doubling=True)
    for number, folder in enumerate(restarted):
        scores = read_scores(folder / "first")
        floors[f"restarted {number + 1}" if number else "restarted"] = compare_scores(
            _same(first, scores), scores, bucket_tokens, doubling=True
        )
    longest = max(len(d["ids"]) for d in documents)
    unread = unread_tokens(side_a["told"], side_b["told"]) if side_b else 0
    start = unread if unread < longest else 1
    found = compare_scores(first, read_scores(b / "first"), bucket_tokens, start, doubling=True) if b else None
    if start > 1:
        notes = [*notes, f"the KV caches differ: positions before {start} read none of them (first prefill chunk), left out"]
    listed = list(floors.values())
    effect = judge_effect(found, listed) if found else (None, None)
    if found:
        outcome, reason = judge_comparison(found, listed, limit_nats)
        if unread >= longest and outcome == "within_limit":
            outcome, reason = "not_enough_data", (
                f"the KV caches differ, and no scored token is known to have read one: documents of {longest} tokens fit into one "
                f"prefill chunk of {unread}; start both servers with --chunked-prefill-size well below. Without that: {reason}"
            )
    else:
        outcome, reason = _floor_words(floors, limit_nats)
    families: list[FamilyResult] = []
    answers = [tasks.read_answers(s / "tasks") for s in (a, b) if s]
    if len(answers) == 2 and all(answers):
        families = tasks.compare_tasks(*answers)
    return AccuracyReport(
        a=side_a,
        b=side_b,
        documents=[
            {"name": d["name"], "origin": d["origin"], "sha256": d["sha256"], "tokens": len(d["ids"])} for d in documents
        ],
        floors=floors,
        comparison=found,
        effect=effect[0],
        effect_reason=effect[1],
        outcome=outcome,
        reason=reason,
        limit_nats=limit_nats,
        needed_tokens=tokens_needed(found, limit_nats) if found and outcome == "not_enough_data" else None,
        floor_shift_nats=floor_shift(listed),
        tasks=families,
        timing={
            f"{side.name}/{name}": json.loads((side / name / "timing.json").read_text())
            for side in (a, b)
            if side
            for name in ("first", "again", "loaded")
            if (side / name / "timing.json").exists()
        },
        notes=list(notes),
    )


def unread_tokens(a: Mapping[str, Any], b: Mapping[str, Any]) -> int:
    """Tokens of a first prefill chunk that may read no KV pool, where two servers' caches differ; 0 where they don't.

    Args:
        a, b: `told` of both sides.
    """
    caches = [(t.get("kv_cache_dtype"), t.get("resolved_kv_cache_dtype")) for t in (a, b)]
    if caches[0] == caches[1]:
        return 0
    return max(int(t.get("chunked_prefill_size") or 0) if view_of(t)[0] is not False else 0 for t in (a, b))


def _same(first: Sequence[dict[str, Any]], other: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The records of `first` for the documents that `other` scored (a floor may be measured on fewer)."""
    ids = {r["ids_sha256"] for r in other}
    return [r for r in first if r["ids_sha256"] in ids]


def _floor_words(floors: Mapping[str, ScoreComparison], limit: float) -> tuple[str, str]:
    if not floors:
        return "not_enough_data", "nothing to compare: one side, scored once"
    words = "; ".join(
        f"{name}: " + ("bit-identical" if f.identical else f"mean |difference| {f.mean_absolute:.5f}, {f.effect.reason}")
        for name, f in floors.items()
    )
    quiet = all(f.identical or max(abs(f.pooled.low or 0), abs(f.pooled.high or 0)) <= limit / 2 for f in floors.values())
    return ("within_limit" if quiet else "not_enough_data"), f"noise floor only (A against A): {words}"


def able(folder: Path) -> list[str]:
    """Families of tasks that were done at shallow depth, from the folder of their answers."""
    found = tasks.able_families(tasks.read_answers(folder))
    return [f for f, (good, of) in found.items() if tasks.is_able(good, of)]
