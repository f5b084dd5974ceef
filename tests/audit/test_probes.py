"""How documents become token ids, and what a scored answer must be (a stand-in for the control plane; the real one is in tests/runs)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lib.audit.probes import read_document, read_scores, score_documents, token_ids, tokenize_documents
from lib.errors import BadInput, ServerError


class Control:
    """Answers as SGLang does: one id a word, log-probabilities from a list."""

    def __init__(self, tokenize_fails: bool = False, logprobs: list[Any] | None = None, other_ids: bool = False) -> None:
        self.tokenize_fails, self.logprobs, self.other_ids, self.flushed = tokenize_fails, logprobs, other_ids, 0

    def post_json(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.tokenize_fails:
            raise ServerError("200", "500 'Internal Server Error'")
        return {"tokens": [len(w) for w in body["prompt"].split()]}

    def flush_cache(self) -> None:
        self.flushed += 1

    def generate(self, body: dict[str, Any], timeout_s: float = 0) -> dict[str, Any]:
        ids = body.get("input_ids") or [len(w) for w in body["text"].split()]
        if self.other_ids:
            ids = [i + 1 for i in ids]
        values = self.logprobs or [None, *([-1.5] * (len(ids) - 1))]
        return {"meta_info": {"input_token_logprobs": [[v, i, None] for v, i in zip(values, ids, strict=True)], "e2e_latency": 0.1}}


class Server:
    def __init__(self, control: Control) -> None:
        self.control = control


def test_ids_come_from_a_scored_prompt_where_tokenize_fails() -> None:
    """SGLang answers /tokenize with 500 for a tokenizer without model_max_length; the ids are the same."""
    text = "one three five " * 200
    assert token_ids(Server(Control(True)), text, 20) == token_ids(Server(Control()), text, 20) == ([3, 5, 4] * 7)[:20]  # type: ignore[arg-type]


def test_a_document_that_is_too_short_is_refused_by_name(tmp_path: Path) -> None:
    """All short documents are named, with how many tokens they have."""
    short = tmp_path / "short.txt"
    short.write_text("a b c")
    with pytest.raises(BadInput, match="short.txt has 3 tokens"):
        tokenize_documents(Server(Control()), tmp_path, [str(short)], 10)  # type: ignore[arg-type]


def test_a_document_is_a_file_or_a_module() -> None:
    """A module of the standard library gives its source; anything else is refused."""
    text, origin = read_document("argparse")
    assert "ArgumentParser" in text and origin == "standard library: argparse"
    with pytest.raises(BadInput, match="no_such_module"):
        read_document("no_such_module")


def score(tmp_path: Path, control: Control) -> list[dict[str, Any]]:
    documents = [{"name": "d", "ids": [1, 2, 3]}]
    score_documents(Server(control), tmp_path, documents)  # type: ignore[arg-type]
    return read_scores(tmp_path)


def test_scores_are_kept_with_the_hash_of_their_ids(tmp_path: Path) -> None:
    """One record a document, the cache flushed before it."""
    control = Control()
    (record,) = score(tmp_path, control)
    assert record["logprobs"] == [None, -1.5, -1.5] and len(record["ids_sha256"]) == 64 and control.flushed == 1


def test_scores_for_other_ids_are_refused(tmp_path: Path) -> None:
    """A server that re-tokenizes answers for other ids: not comparable."""
    with pytest.raises(ServerError, match="other ids"):
        score(tmp_path, Control(other_ids=True))


@pytest.mark.parametrize("bad", [float("nan"), None])
def test_nan_is_an_error_and_not_a_number(tmp_path: Path, bad: Any) -> None:
    """A log-probability that is no number ends the measurement with the position."""
    with pytest.raises(ServerError, match=r"positions \[2\]"):
        score(tmp_path, Control(logprobs=[None, -1.0, bad]))
    assert not list(tmp_path.glob("scores-*.json"))


def test_raw_scores_are_json(tmp_path: Path) -> None:
    """What is written can be read by anybody."""
    score(tmp_path, Control())
    assert json.loads((tmp_path / "scores-00.json").read_text())["name"] == "d"
