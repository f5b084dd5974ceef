"""The garbage gate: what it asks, that load is really concurrent and of mixed length, and what raw answers show."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lib.errors import ServerError
from lib.server import gate


class Control:
    """A server's control plane that counts what is in flight; an answer takes 20 ms."""

    def __init__(self, *_: Any) -> None:
        self.base_url = "http://127.0.0.1:1"
        self.session = type("S", (), {"headers": {}, "close": lambda self: None})()
        self.secrets: list[str] = []

    lock, now, most, flushed, prompts = threading.Lock(), 0, 0, 0, []

    def flush_cache(self) -> None:
        type(self).flushed += 1

    def generate(self, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        kind = type(self)
        with kind.lock:
            kind.now += 1
            kind.most = max(kind.most, kind.now)
            kind.prompts.append(len(body.get("input_ids", body.get("text"))))
        time.sleep(0.02)
        with kind.lock:
            kind.now -= 1
        if kind.fails:
            raise ServerError("an answer", f"{kind.fails}: x")
        ids = body.get("input_ids") or [1, 2]
        new = body["sampling_params"]["max_new_tokens"]
        return {
            "text": " Paris",
            "meta_info": {
                "input_token_logprobs": [[None if i == 0 else -1.0 - i / 10, t, None] for i, t in enumerate(ids)],
                "output_token_logprobs": [[-1.0 - (len(ids) + i) / 10, 7, None] for i in range(new)],
            },
        }

    fails = ""


class Server:
    base_url = "http://127.0.0.1:1"

    def __init__(self) -> None:
        self.control = Control()


@pytest.fixture(autouse=True)
def control(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test counts from 0, and the gate's threads use the same control plane."""
    Control.now = Control.most = Control.flushed = 0
    Control.prompts, Control.fails = [], ""
    monkeypatch.setattr(gate, "Control", Control)


def test_pieces_have_mixed_lengths_and_lie_inside_the_text() -> None:
    """512 ids: 512, 256, 128 and 64, not all from the beginning; a short text gives fewer pieces."""
    ids = list(range(512))
    pieces = gate.pieces_of(ids)
    assert [len(p) for p in pieces] == [512, 256, 128, 64]
    assert {p[0] for p in pieces} != {0} and all(p == ids[p[0] : p[0] + len(p)] for p in pieces)
    assert [len(p) for p in gate.pieces_of(list(range(20)))] == [20, 10]


def test_alone_means_one_at_a_time_after_a_flush(tmp_path: Path) -> None:
    """Each piece gets a flush and a request of its own."""
    gate.score_alone(Server(), tmp_path, gate.pieces_of(list(range(64))), 5)  # type: ignore[arg-type]
    assert Control.most == 1 and Control.flushed == 4 and Control.prompts == [64, 32, 16, 8]


def test_a_flush_waits_until_the_server_is_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen on a real server: right after an answer /flush_cache says 400 for a moment. Any other refusal is an error at once."""
    refusals = iter([ServerError("/flush_cache", "400 'Flush cache failed.'")] * 2)

    def flush_cache(_: Control) -> None:
        if refused := next(refusals, None):
            raise refused

    monkeypatch.setattr(Control, "flush_cache", flush_cache)
    gate.flush(Control())  # type: ignore[arg-type]
    assert next(refusals, None) is None
    refusals = iter([ServerError("/flush_cache", "500 'x'")])
    with pytest.raises(ServerError, match="500"):
        gate.flush(Control())  # type: ignore[arg-type]


def test_under_load_is_concurrent_and_mixed(tmp_path: Path) -> None:
    """As many requests in flight as asked, of several kinds and lengths, each recorded with its times."""
    gate.ask_under_load(Server(), tmp_path, gate.pieces_of(list(range(64))), "p", 6, 5, 2, 5)  # type: ignore[arg-type]
    raw = json.loads((tmp_path / "load.json").read_text())
    assert Control.most == 5 == raw["in_flight_max"] and len(raw["requests"]) == 2 * 3 * 4
    assert {r["kind"] for r in raw["requests"]} == {"score", "answer", "continue"} and len(set(Control.prompts)) >= 5


def test_the_continuation_is_scored_again_by_prefill(tmp_path: Path) -> None:
    """Decoding and prefill of the same tokens by the same server: here they agree, so the gap is 0."""
    gate.continue_alone(Server(), tmp_path, [1, 2, 3], 4, 5)  # type: ignore[arg-type]
    raw = json.loads((tmp_path / "decode.json").read_text())
    assert gate.decode_gap(raw) == pytest.approx(0)
    raw["answer"]["logprobs"] = [x - 0.5 for x in raw["answer"]["logprobs"]]
    assert gate.decode_gap(raw) == pytest.approx(0.5)
    assert gate.decode_gap({**raw, "rescored": None}) is None


def test_what_was_continued_under_load_is_scored_at_rest(tmp_path: Path) -> None:
    """Every continuation is scored again by prefill; one whose log-probabilities hold only under load stands out."""
    gate.ask_under_load(Server(), tmp_path, gate.pieces_of(list(range(64))), "p", 6, 5, 1, 5)  # type: ignore[arg-type]
    raw = json.loads((tmp_path / "load.json").read_text())
    continued = [r for r in raw["requests"] if r["kind"] == "continue"]
    assert len(continued) == 4 and all(len(r["rescored"]["logprobs"]) == len(r["asked"] + r["ids"]) for r in continued)
    assert gate.load_decode_gap(raw) == pytest.approx(0)
    continued[2]["logprobs"] = [x - 2 for x in continued[2]["logprobs"]]
    assert gate.load_decode_gap(raw) == pytest.approx(2)
    assert gate.load_decode_gap({"requests": [answered(kind="continue")]}) is None  # records of before


def decoded(answer: dict[str, Any] | None = None, rescored: dict[str, Any] | None = None) -> dict[str, Any]:
    own = {"text": " a fine text", "ids": [*range(9)], "logprobs": [-1.0 - i for i in range(9)], "error": None}
    again = {"logprobs": [None, *(-1.0 - i for i in range(11))], "error": None}
    return {"asked": [1, 2, 3], "answer": {**own, **(answer or {})}, "rescored": {**again, **(rescored or {})}}


TOY = {"text": "x" * 12, "ids": [7] * 12}


@pytest.mark.parametrize(
    ("raw", "its", "garbage", "failed"),
    [
        (decoded(), decoded(), None, None),
        (decoded({"logprobs": [0.0] * 9}), decoded(), "its continuation: every log-probability is exactly 0", None),
        (decoded({"logprobs": [0.0] * 9}), decoded({"logprobs": [0.0] * 9}), None, None),  # a sure model
        (decoded({"logprobs": [None] * 9}), decoded({"logprobs": [None] * 9}), "its continuation: NaN", None),
        (decoded(TOY), decoded(), "its continuation is degenerate: one token repeated (7)", None),
        (decoded(TOY), decoded(TOY), None, None),  # both do: a toy
        (decoded(TOY), None, None, None),  # the reference itself
        (decoded({"ids": []}), decoded(), "its continuation is empty", None),
        (decoded(None, {"logprobs": [None] * 12}), decoded(), "by prefill: NaN", None),
        (decoded(None, {"error": "500 x"}), decoded(), None, "scoring its continuation: 500 x"),
        (decoded({"error": "500 y"}), decoded(), None, "its continuation: 500 y"),
    ],
)
def test_what_a_continuation_shows_by_itself(raw: Any, its: Any, garbage: str | None, failed: str | None) -> None:
    """Zeros, NaN, a repeated token, nothing, a refusal: none of them passes for want of numbers to compare."""
    found = gate.continuation_faults(raw, its)
    assert garbage is None if found[0] is None else garbage is not None and garbage in found[0]
    assert found[1] == failed


def test_a_server_that_is_silent_is_left_after_the_first_timeout(tmp_path: Path) -> None:
    """The raw file says which requests got no answer; those not yet sent are not sent; the measurement is an error."""
    Control.fails = "ReadTimeout"
    with pytest.raises(ServerError, match="Timeout"):
        gate.ask_under_load(Server(), tmp_path, gate.pieces_of(list(range(64))), "p", 6, 2, 2, 5)  # type: ignore[arg-type]
    raw = json.loads((tmp_path / "load.json").read_text())["requests"]
    assert sum(r["timed_out"] for r in raw) == 2 and len(raw) == 24


# --- what raw answers show ------------------------------------------------------------------------------------------------
def answered(**changes: Any) -> dict[str, Any]:
    good = {"kind": "answer", "key": "answer", "text": " Paris, the", "ids": [5, 6, 7], "logprobs": [-1.0, -2.0, -3.0],
            "error": None, "timed_out": False}  # fmt: skip
    return {**good, **changes}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"text": " Berlin"}, "the known answer became ' Berlin'"),
        ({"text": "!" * 12}, "became '!!!!!!!!!!!!'"),
        ({"logprobs": [-1.0, None]}, "an answer: NaN"),
        ({"logprobs": [0.0] * 9}, None),  # a sure model
        ({"kind": "score", "logprobs": [None, *[0.0] * 9]}, "a scored text: every log-probability is exactly 0"),
        ({"kind": "continue", "text": "no no no no no no no no"}, None),  # a toy may repeat itself; its numbers tell
    ],
)
def test_what_went_wrong_under_load(changes: dict[str, Any], words: str | None) -> None:
    """The known answer, NaN and zeros convict; the number of requests and how many were in flight is said."""
    raw = {"in_flight_max": 4, "requests": [answered(), answered(**changes)]}
    garbage, failed, silent = gate.load_faults(raw, " Paris", " Paris, the")
    assert failed is None and silent is None
    assert (
        garbage is None if words is None else words in (garbage or "") and "1 of 2 requests, up to 4" in (garbage or "")
    )


def test_without_an_expected_answer_a_sign_counts_that_is_not_there_alone() -> None:
    """A toy that repeats itself alone too shows nothing; one that does so only under load does."""
    raw = {"in_flight_max": 4, "requests": [answered(text="!" * 12)]}
    assert gate.load_faults(raw, None, "!" * 12)[0] is None
    assert "one character repeated" in (gate.load_faults(raw, None, " fine")[0] or "")


def test_refused_and_silent_requests_are_no_garbage() -> None:
    """HTTP 500 is a failure, no answer a hang."""
    failed = {"in_flight_max": 4, "requests": [answered(error="500"), answered()]}
    assert gate.load_faults(failed, " Paris", None) == (
        None,
        "1 of 2 requests, up to 4 in flight, failed; first: 500",
        None,
    )
    silent = {"in_flight_max": 4, "requests": [answered(error="ReadTimeout", timed_out=True)]}
    assert "got no answer" in (gate.load_faults(silent, " Paris", None)[2] or "")


def test_a_piece_with_nan_is_kept_as_a_problem() -> None:
    """What is no number is never compared as one."""
    rows = [
        {"key": "0", "ids": [1, 2], "logprobs": [None, None], "error": None},
        {"key": "1", "ids": None, "logprobs": [], "error": "x"},
    ]
    assert [p.problem is not None for p in gate.pieces_from(rows)] == [True, True]
