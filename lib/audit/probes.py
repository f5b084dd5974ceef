"""Asks a server for the log-probabilities of real text, token by token: the raw material of every accuracy comparison.

Each document is scored by one request of its own (`/generate`, `logprob_start_len=0`, which forbids the reuse of a cached
prefix) after a cache flush, so that two servers that got the same token ids did the same work. Every document is a file
as soon as it is scored; what is there already is not asked again. Source: SGLang 0.5.15 managers/tokenizer_manager.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lib.errors import BadInput, ServerError
from lib.hosts import local
from lib.report.progress import progress_bar
from lib.results import Answering

#: How long a cache flush is tried: SGLang refuses it while the last request is being cleared away.
FLUSH_PATIENCE_S = 10.0
#: Modules of the standard library by the number of tokens that they surely have (about 4 characters a token).
LIBRARY_TEXTS = (
    "argparse", "typing", "tarfile", "inspect", "doctest", "pdb", "locale", "subprocess", "zipfile", "ast", "smtplib",
    "optparse", "mailbox", "datetime", "enum", "threading", "pickle", "difflib", "pathlib", "dataclasses", "socket",
    "configparser", "shutil", "cgi", "calendar", "statistics", "imaplib", "ftplib", "uuid", "tokenize", "random",
    "platform", "gettext", "traceback", "plistlib", "fractions", "pstats", "codecs", "zipapp", "telnetlib",
)  # fmt: skip

#: How a score that is no number is told; the verdicts of notebook 05 look for it.
NOT_A_NUMBER = "NaN or none at positions"


def read_document(name: str) -> tuple[str, str]:
    """The text of a document and where it is from: a text file, the source of a standard library module, or several (`a+b`).

    Raises:
        BadInput: a part is neither a readable file nor a module with source.
    """
    if not Path(name).expanduser().is_file() and "+" in name:
        parts = [read_document(part) for part in name.split("+")]
        return "\n".join(text for text, _ in parts), " + ".join(origin for _, origin in parts)
    path = Path(name).expanduser()
    if not path.is_file():
        spec = importlib.util.find_spec(name) if name.isidentifier() else None
        if spec is None or not spec.origin or not spec.origin.endswith(".py"):
            raise BadInput(
                f"document {name!r} is a text file or a module of the standard library",
                "neither",
                "correct `documents`",
            )
        path = Path(spec.origin)
    return path.read_text(encoding="utf-8", errors="replace"), f"standard library: {name}" if spec_like(
        name
    ) else path.name


def spec_like(name: str) -> bool:
    """True if a document's name is a module's rather than a file's."""
    return name.isidentifier() and not Path(name).is_file()


def library_documents(lengths: Sequence[int]) -> list[str]:
    """A text of the standard library for each length in tokens, no module in two of them; longer ones join several.

    Raises:
        BadInput: the library has not that much text.
    """
    left = []
    for name in LIBRARY_TEXTS:
        with contextlib.suppress(BadInput):  # not in this Python, or without source (frozen)
            left.append((name, len(read_document(name)[0])))
    chosen: dict[int, str] = {}
    for place, length in sorted(enumerate(lengths), key=lambda pair: -pair[1]):
        parts, characters = [], 0
        while characters < length * 5 and left:  # 3.2 to 4 characters a token in code
            missing = length * 5 - characters
            enough = [row for row in left if row[1] >= missing]
            row = min(enough, key=lambda r: r[1]) if enough else max(left, key=lambda r: r[1])
            left.remove(row)
            parts.append(row[0])
            characters += row[1]
        if characters < length * 5:
            raise BadInput(
                f"{sum(lengths):,} tokens of the standard library's text", "it has not that much", "name longer texts"
            )
        chosen[place] = "+".join(parts)
    return [chosen[place] for place in range(len(lengths))]


def tokenize_documents(server: Answering, folder: Path, documents: Sequence[str], tokens: int | Sequence[int]) -> None:
    """Writes documents.json: name, origin, SHA-256 of the text, the first `tokens` token ids as this server makes them.

    `tokens` is one length, or one for each document. Where the server decodes (`/detokenize`), each id's own piece of
    text is kept too, so that a token can be shown in its context.

    Raises:
        BadInput: a document is too short, all of them named.
    """
    lengths = [tokens] * len(documents) if isinstance(tokens, int) else list(tokens)
    if len(lengths) != len(documents):
        raise BadInput("one length, or one for each document", f"{len(lengths)} for {len(documents)} documents")
    made: list[dict[str, Any]] = []
    short: list[str] = []
    for name, length in zip(documents, lengths, strict=True):
        text, origin = read_document(name)
        ids = token_ids(server, text, length)
        if len(ids) < length:
            short.append(f"{name} has {len(ids)} tokens")
        made.append(
            {
                "name": name,
                "origin": origin,
                "sha256": hashlib.sha256(text.encode()).hexdigest(),
                "ids": ids,
                "pieces": token_pieces(server, ids),
            }
        )
    if short:
        raise BadInput(
            f"documents of at least {lengths if len(set(lengths)) > 1 else lengths[0]} tokens",
            "; ".join(short),
            "lower document_tokens or name longer texts",
        )
    local.write_atomic(folder / "documents.json", json.dumps(made))


def token_ids(server: Answering, text: str, tokens: int) -> list[int]:
    """The first `tokens` token ids of a text as this server makes them; fewer where the text is shorter.

    Asks /tokenize; SGLang 0.5.15 answers it with 500 for tokenizers without `model_max_length` (an integer beyond 64 bits
    in its JSON), and then the ids come from a scored prompt.
    """
    begin = text[: tokens * 12]  # a token of real text is rarely longer than 12 characters
    try:
        answer = server.control.post_json("/tokenize", {"prompt": begin, "add_special_tokens": True})
        return [int(i) for i in answer["tokens"]][:tokens]
    except ServerError:
        ids: list[int] = []
        for characters in (tokens * 3, tokens * 6, tokens * 12):
            sampling = {"temperature": 0, "max_new_tokens": 1}
            body = {
                "text": text[:characters],
                "return_logprob": True,
                "logprob_start_len": 0,
                "sampling_params": sampling,
            }
            ids = [int(row[1]) for row in server.control.generate(body)["meta_info"]["input_token_logprobs"]]
            if len(ids) > tokens or characters >= len(text):  # the last id of a cut text may be a cut token
                break
        return ids[:tokens]


def token_pieces(server: Answering, ids: Sequence[int]) -> list[str] | None:
    """Each id's own text, None where the server does not decode."""
    with contextlib.suppress(ServerError, KeyError, TypeError):
        answer = server.control.post_json("/detokenize", {"tokens": [[i] for i in ids], "skip_special_tokens": False})
        pieces = answer["text"]
        if isinstance(pieces, list) and len(pieces) == len(ids):
            return [str(p) for p in pieces]
    return None


def empty_cache(server: Answering, patience_s: float = FLUSH_PATIENCE_S) -> float:
    """Flushes the prefix cache, tried again while the last request is being cleared away; returns the seconds it took.

    Raises:
        ServerError: it is still refused after `patience_s` (other requests run).
    """
    began = time.monotonic()
    while True:
        try:
            server.control.flush_cache()
        except ServerError:
            if time.monotonic() - began > patience_s:
                raise
            time.sleep(0.02)
        else:
            return time.monotonic() - began


def score_documents(
    server: Answering,
    folder: Path,
    documents: Sequence[dict[str, Any]],
    timeout_s: float = 900.0,
    top_logprobs: int = 0,
    flush: bool = True,
) -> None:
    """Scores each document with one request and writes scores-NN.json (log-probability of each token given those before).

    The cache is flushed before each document. A document is read and written while the server works on the next one:
    timing.json says how much time this function took beyond its requests.

    Args:
        top_logprobs: how many of the likeliest tokens are kept at each position (top-1 agreement and KL need them).
        flush: False under concurrent load, where SGLang refuses it; that nothing came from the cache is checked anyway.

    Raises:
        ServerError: the answer is not for the ids sent, a log-probability is no number, or tokens came from the cache.
    """
    began, request_s, flush_s, taken = time.monotonic(), 0.0, 0.0, 0
    key = getattr(getattr(server, "record", None), "key", None)
    pending: Future[None] | None = None
    earlier = [folder, *sorted(folder.parent.glob(f"{folder.name}.earlier-*"))]
    there = {path.name: path for place in reversed(earlier) for path in place.glob("scores-*.json")}
    with ThreadPoolExecutor(1) as writer:
        for place, document in enumerate(progress_bar(documents, desc="scoring", unit="document")):
            file = folder / f"scores-{place:02d}.json"
            if file.name in there and _kept(there[file.name], file, document, top_logprobs, key):
                continue
            flush_s += empty_cache(server) if flush else 0.0
            sent = time.monotonic()
            payload = server.control.post_bytes("/generate", _scoring_body(document["ids"], top_logprobs), timeout_s)
            seconds = time.monotonic() - sent
            request_s += seconds
            taken += 1
            if pending is not None:
                pending.result()
            origin = {
                "launch_id": getattr(server, "launch_id", None),
                "server_key": key,
                "request_s": round(seconds, 4),
            }
            pending = writer.submit(_keep, file, payload, document, place, top_logprobs, origin)
        if pending is not None:
            pending.result()
    wall = time.monotonic() - began
    timing = {
        "wall_s": round(wall, 4),
        "request_s": round(request_s, 4),
        "flush_s": round(flush_s, 4),
        "own_s": round(wall - request_s - flush_s, 4),
        "scored": taken,
        "found_already": len(documents) - taken,
    }
    local.write_atomic(folder / "timing.json", json.dumps(timing))


def _scoring_body(ids: Sequence[int], top_logprobs: int) -> dict[str, Any]:
    return {
        "input_ids": list(ids),
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": top_logprobs,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
    }


def _kept(found: Path, file: Path, document: Mapping[str, Any], top_logprobs: int, key: str | None) -> bool:
    """True if this document was scored already: here, or in an interrupted attempt on a server of the same configuration."""
    with contextlib.suppress(ValueError, OSError):
        record = json.loads(found.read_text())
        same = record.get("ids_sha256") == ids_sha256(document["ids"]) and record.get("top_logprobs", 0) == top_logprobs
        if same and key is not None and record.get("server_key") == key:
            if found != file:
                local.write_atomic(file, json.dumps(record))
            return True
    return False


def _keep(
    file: Path, payload: bytes, document: Mapping[str, Any], place: int, top_logprobs: int, origin: Mapping[str, Any]
) -> None:
    try:
        answer = json.loads(payload)
        meta = answer["meta_info"]
    except (ValueError, KeyError, TypeError) as error:
        raise ServerError("/generate answers one object with meta_info", f"{payload[:200]!r}") from error
    scored = meta.get("input_token_logprobs") or []
    if [row[1] for row in scored] != document["ids"]:
        raise ServerError(
            f"one log-probability for each of the {len(document['ids'])} ids of {document['name']}",
            f"{len(scored)} rows, or rows for other ids",
            "this server doesn't score prompts as SGLang does",
        )
    logprobs = [row[0] for row in scored]
    wrong = [i for i, value in enumerate(logprobs[1:], 1) if not isinstance(value, (int, float)) or value != value]
    if wrong:
        raise ServerError(f"numbers as log-probabilities of {document['name']}", f"{NOT_A_NUMBER} {wrong[:5]}")
    if meta.get("cached_tokens"):
        raise ServerError(
            f"{document['name']} computed from its first token on",
            f"{meta['cached_tokens']} tokens came from the prefix cache",
            "this server doesn't honour logprob_start_len",
        )
    top = [[[r[0], r[1]] for r in row] if row else None for row in meta.get("input_top_logprobs") or []]
    record = {
        "name": document["name"],
        "key": f"{place:02d}",
        "ids_sha256": ids_sha256(document["ids"]),
        "logprobs": logprobs,
        "top_logprobs": top_logprobs,
        "top": top if top_logprobs else None,
        "e2e_s": meta.get("e2e_latency"),
        "cached_tokens": meta.get("cached_tokens"),
        **origin,
    }
    local.write_atomic(file, json.dumps(record))


def score_under_load(
    server: Answering,
    folder: Path,
    documents: Sequence[dict[str, Any]],
    streams: int,
    top_logprobs: int = 0,
    timeout_s: float = 900.0,
    flush: bool = True,
) -> None:
    """Scores the documents while `streams` other requests are always running, and writes load.json: what ran beside them.

    Raises:
        ServerError: as `score_documents`, or no background request finished a token (then nothing was under load).
    """
    if flush:
        empty_cache(server)
    with background_load(server, [d["ids"] for d in documents], streams) as done:
        score_documents(server, folder, documents, timeout_s, top_logprobs, flush=False)
    local.write_atomic(folder / "load.json", json.dumps(done))
    if not done["tokens"]:
        raise ServerError("requests running beside the scored ones", f"none got a token; {done['errors'][:2]}")


@contextlib.contextmanager
def background_load(server: Answering, texts: Sequence[Sequence[int]], streams: int) -> Iterator[dict[str, Any]]:
    """Keeps `streams` requests of other prompts running; yields the counts (requests, tokens, errors), final at the exit."""
    done: dict[str, Any] = {"streams": streams, "requests": 0, "tokens": 0, "errors": []}
    stop, lock = threading.Event(), threading.Lock()
    first = threading.Semaphore(0)

    def one_stream(number: int) -> None:
        turn = 0
        while not stop.is_set():
            text = texts[(number + turn) % len(texts)]
            cut = (37 * turn + 101 * number) % max(1, len(text) // 2)
            body = {
                "input_ids": list(text[cut : cut + 64 + 16 * number]),
                "extra_key": f"load-{number}",
                "sampling_params": {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True},
            }
            if turn == 0:
                first.release()
            try:
                answer = json.loads(server.control.post_bytes("/generate", body, 300))
                with lock:
                    done["requests"] += 1
                    done["tokens"] += answer["meta_info"].get("completion_tokens") or 0
            except (ServerError, ValueError, KeyError) as error:
                with lock:
                    done["errors"].append(f"{type(error).__name__}: {error}"[:200])
                stop.wait(0.2)
            turn += 1

    workers = [threading.Thread(target=one_stream, args=(i,), daemon=True) for i in range(streams)]
    for worker in workers:
        worker.start()
    for _ in workers:
        first.acquire(timeout=10)
    try:
        yield done
    finally:
        stop.set()
        for worker in workers:
            worker.join(timeout=330)


def ids_sha256(ids: Sequence[int]) -> str:
    """Hash of a list of token ids: two arms are compared only if theirs are equal."""
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()


def read_scores(folder: Path, documents: Sequence[Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
    """All scored documents of a measurement; with `documents`, each gets its token ids and pieces of text back."""
    found = [json.loads(file.read_text()) for file in sorted(folder.glob("scores-*.json"))]
    by_hash = {ids_sha256(d["ids"]): d for d in documents or []}
    for record in found:
        document = by_hash.get(record["ids_sha256"])
        if document:
            record["ids"], record["pieces"] = document["ids"], document.get("pieces")
    return found
