"""Asks a server for the log-probabilities of real text, token by token: the raw material of every accuracy comparison.

Each document is scored by one request of its own (`/generate`, `logprob_start_len=0`) after a cache flush, so that two
servers that got the same token ids did the same work. Source: SGLang 0.5.15 managers/tokenizer_manager.py.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib.errors import BadInput, ServerError
from lib.hosts import local
from lib.report.progress import progress_bar
from lib.results import Answering


def read_document(name: str) -> tuple[str, str]:
    """The text of a document and where it is from: a text file, or the source of a standard library module.

    Raises:
        BadInput: neither a readable file nor a module with source.
    """
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


def tokenize_documents(server: Answering, folder: Path, documents: Sequence[str], tokens: int) -> None:
    """Writes documents.json: name, origin, SHA-256 of the text, and the first `tokens` token ids as this server makes them.

    Raises:
        BadInput: a document is too short, all of them named.
    """
    made: list[dict[str, Any]] = []
    short: list[str] = []
    for name in documents:
        text, origin = read_document(name)
        ids = token_ids(server, text, tokens)
        if len(ids) < tokens:
            short.append(f"{name} has {len(ids)} tokens")
        made.append({"name": name, "origin": origin, "sha256": hashlib.sha256(text.encode()).hexdigest(), "ids": ids})
    if short:
        raise BadInput(
            f"documents of at least {tokens} tokens", "; ".join(short), "lower document_tokens or name longer texts"
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


def score_documents(
    server: Answering, folder: Path, documents: Sequence[dict[str, Any]], timeout_s: float = 900.0
) -> None:
    """Scores each document with one request and writes scores-NN.json (log-probability of each token given those before).

    The cache is flushed before each document, so that nothing is read from an earlier request's prefix.

    Raises:
        ServerError: the answer is not for the ids sent, or a log-probability is not a number.
    """
    for place, document in enumerate(progress_bar(documents, desc="scoring", unit="document")):
        server.control.flush_cache()
        answer = server.control.generate(
            {
                "input_ids": document["ids"],
                "return_logprob": True,
                "logprob_start_len": 0,
                "top_logprobs_num": 0,
                "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            },
            timeout_s,
        )
        scored = answer["meta_info"].get("input_token_logprobs") or []
        if [row[1] for row in scored] != document["ids"]:
            raise ServerError(
                f"one log-probability for each of the {len(document['ids'])} ids of {document['name']}",
                f"{len(scored)} rows, or rows for other ids",
                "this server doesn't score prompts as SGLang does",
            )
        logprobs = [row[0] for row in scored]
        wrong = [i for i, value in enumerate(logprobs[1:], 1) if not isinstance(value, (int, float)) or value != value]
        if wrong:
            raise ServerError(
                f"numbers as log-probabilities of {document['name']}", f"NaN or none at positions {wrong[:5]}"
            )
        record = {
            "name": document["name"],
            "key": f"{place:02d}",
            "ids_sha256": ids_sha256(document["ids"]),
            "logprobs": logprobs,
            "e2e_s": answer["meta_info"].get("e2e_latency"),
            "cached_tokens": answer["meta_info"].get("cached_tokens"),
        }
        local.write_atomic(folder / f"scores-{place:02d}.json", json.dumps(record))


def ids_sha256(ids: Sequence[int]) -> str:
    """Hash of a list of token ids: two arms are compared only if theirs are equal."""
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()


def read_scores(folder: Path) -> list[dict[str, Any]]:
    """All scored documents of a measurement, by name."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("scores-*.json"))]
