"""How documents become token ids, and what a scored answer must be (a stand-in for the control plane; the real one is in tests/runs)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lib.audit.probes import (
    empty_cache,
    library_documents,
    read_document,
    read_scores,
    score_documents,
    score_under_load,
    token_ids,
    tokenize_documents,
)
from lib.errors import BadInput, ServerError


class Control:
    """Answers as SGLang does: one id a word, log-probabilities from a list."""

    def __init__(
        self, tokenize_fails: bool = False, logprobs: list[Any] | None = None, other_ids: bool = False
    ) -> None:
        self.tokenize_fails, self.logprobs, self.other_ids, self.flushed = tokenize_fails, logprobs, other_ids, 0
        self.asked, self.refused_flushes, self.slow_s, self.cached = 0, 0, 0.0, 0
        self.dies_after: int | None = None

    def post_json(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.tokenize_fails:
            raise ServerError("200", "500 'Internal Server Error'")
        return {"tokens": [len(w) for w in body["prompt"].split()]}

    def flush_cache(self) -> None:
        if self.refused_flushes:
            self.refused_flushes -= 1
            raise ServerError("/flush_cache empties the cache", "400")
        self.flushed += 1

    def post_bytes(self, path: str, body: dict[str, Any], timeout_s: float = 0) -> bytes:
        self.asked += 1
        if self.dies_after is not None and self.asked > self.dies_after:
            raise ServerError("an answer", "connection closed")
        time.sleep(self.slow_s)
        return json.dumps(self.generate(body)).encode()

    def generate(self, body: dict[str, Any], timeout_s: float = 0) -> dict[str, Any]:
        ids = body.get("input_ids") or [len(w) for w in body["text"].split()]
        if self.other_ids:
            ids = [i + 1 for i in ids]
        values = self.logprobs or [None, *([-1.5] * (len(ids) - 1))]
        values = values[: len(ids)]
        meta: dict[str, Any] = {
            "input_token_logprobs": [[v, i, None] for v, i in zip(values, ids, strict=True)],
            "e2e_latency": 0.1,
            "cached_tokens": self.cached,
            "completion_tokens": body["sampling_params"]["max_new_tokens"],
        }
        if body.get("top_logprobs_num"):
            meta["input_top_logprobs"] = [None, *([[-0.5, 9, None]] for _ in ids[1:])]
        return {"text": "", "meta_info": meta}


class Server:
    launch_id = "L1"

    def __init__(self, control: Control, key: str = "k") -> None:
        self.control, self.record = control, SimpleNamespace(key=key)


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


DOCUMENTS = [{"name": f"d{i}", "ids": [i, 2, 3]} for i in range(4)]


def test_a_document_is_on_disk_before_the_last_one_is_asked(tmp_path: Path) -> None:
    """A server that dies at the fourth document leaves the first three, and a second call asks only for what is missing."""
    control = Control()
    control.dies_after = 3
    with pytest.raises(ServerError, match="connection closed"):
        score_documents(Server(control), tmp_path, DOCUMENTS)  # type: ignore[arg-type]
    assert len(list(tmp_path.glob("scores-*.json"))) == 3
    again = Control()
    score_documents(Server(again), tmp_path, DOCUMENTS)  # type: ignore[arg-type]
    assert again.asked == 1 and len(read_scores(tmp_path)) == 4
    assert json.loads((tmp_path / "timing.json").read_text())["found_already"] == 3


def test_another_server_or_other_ids_are_never_resumed(tmp_path: Path) -> None:
    """Scores of another configuration, of other ids or with fewer likeliest tokens are asked anew."""
    score_documents(Server(Control()), tmp_path, DOCUMENTS)  # type: ignore[arg-type]
    for server, documents, top in (
        (Server(Control(), "other"), DOCUMENTS, 0),
        (Server(Control(), "other"), [{"name": d["name"], "ids": [*d["ids"], 4]} for d in DOCUMENTS], 0),
        (Server(Control(), "other"), DOCUMENTS, 2),
    ):
        score_documents(server, tmp_path, documents, top_logprobs=top)  # type: ignore[arg-type]
        assert server.control.asked == 4


def test_an_interrupted_attempt_of_a_notebook_is_resumed(tmp_path: Path) -> None:
    """The runner keeps an interrupted folder under another name; its documents are taken over, with the launch they came from."""
    old, new = tmp_path / "scores-bf16.earlier-abc123", tmp_path / "scores-bf16"
    old.mkdir(), new.mkdir()
    score_documents(Server(Control()), old, DOCUMENTS[:2])  # type: ignore[arg-type]
    control = Control()
    score_documents(Server(control), new, DOCUMENTS)  # type: ignore[arg-type]
    assert control.asked == 2 and [r["launch_id"] for r in read_scores(new)] == ["L1"] * 4


def test_likeliest_tokens_are_kept_where_they_are_asked_for(tmp_path: Path) -> None:
    """`top` has one list a position, None at the first; ids and pieces come back from the documents."""
    documents = [{"name": "d", "ids": [1, 2, 3], "pieces": ["a", "b", "c"]}]
    score_documents(Server(Control()), tmp_path, documents, top_logprobs=1)  # type: ignore[arg-type]
    (record,) = read_scores(tmp_path, documents)
    assert record["top"] == [None, [[-0.5, 9]], [[-0.5, 9]]] and record["pieces"] == ["a", "b", "c"]


def test_tokens_from_the_prefix_cache_are_refused(tmp_path: Path) -> None:
    """A scored document that was partly read from the cache is not what the other arm computed."""
    control = Control()
    control.cached = 2
    with pytest.raises(ServerError, match="came from the prefix cache"):
        score(tmp_path, control)


def test_a_flush_that_is_refused_for_a_moment_is_tried_again(tmp_path: Path) -> None:
    """SGLang answers 400 while it clears the last request away (seen on 0.5.15)."""
    control = Control()
    control.refused_flushes = 3
    assert empty_cache(Server(control)) >= 0 and control.flushed == 1  # type: ignore[arg-type]
    control.refused_flushes = 10**6
    with pytest.raises(ServerError, match="flush"):
        empty_cache(Server(control), patience_s=0.1)  # type: ignore[arg-type]


def test_own_time_around_the_requests_is_at_most_five_percent(tmp_path: Path) -> None:
    """Four documents of 4,000 tokens, 0.8 s a request: reading and writing happen beside the next one. Best of three."""
    documents = [{"name": f"d{i}", "ids": [i, *range(1, 4000)]} for i in range(4)]
    shares = []
    for attempt in range(3):
        control = Control(logprobs=[None, *([-1.5] * 3999)])
        control.slow_s = 0.8
        folder = tmp_path / str(attempt)
        folder.mkdir()
        score_documents(Server(control), folder, documents, top_logprobs=1)  # type: ignore[arg-type]
        timing = json.loads((folder / "timing.json").read_text())
        shares.append(timing["own_s"] / timing["request_s"])
        if shares[-1] <= 0.05:
            break
    assert min(shares) <= 0.05, shares


def test_load_runs_beside_the_scored_requests(tmp_path: Path) -> None:
    """The load's own counts are kept: without a token of it nothing was under load."""
    control = Control(logprobs=[None, *([-1.5] * 199)])
    control.slow_s = 0.01
    documents = [{"name": "d", "ids": list(range(200))}]
    score_under_load(Server(control), tmp_path, documents, streams=2)  # type: ignore[arg-type]
    load = json.loads((tmp_path / "load.json").read_text())
    assert load["requests"] >= 2 and load["tokens"] >= 64 and read_scores(tmp_path)


def test_library_documents_share_no_module_and_are_long_enough() -> None:
    """One text for each length, longer ones joined of several modules."""
    lengths = [300, 4000, 30000]
    names = library_documents(lengths)
    parts = [part for name in names for part in name.split("+")]
    assert len(set(parts)) == len(parts)
    assert all(len(read_document(n)[0]) >= 5 * length for n, length in zip(names, lengths, strict=True))
    with pytest.raises(BadInput, match="it has not that much"):
        library_documents([10**7])
