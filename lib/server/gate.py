"""The garbage gate's questions: real text scored alone, its own continuation scored again, everything at once under load.

    alone       pieces of real text, one at a time after a cache flush            scores.json
    decode      a greedy continuation, then the same tokens by prefill            decode.json
    under load  the same pieces and prompts, mixed lengths, many in flight        load.json

Nothing here judges: NaN, errors and timeouts are written down as they came; `lib.server.outcomes` says what they mean.
Source: SGLang 0.5.15 /generate (logprob_start_len=0 computes the whole prompt again, whatever the cache holds).
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lib.errors import ServerError
from lib.hosts import local
from lib.load.benchmark import send_level
from lib.results import Answering
from lib.server.answers import ask
from lib.server.control import Control
from lib.server.launch import Server
from lib.server.outcomes import Piece, degenerate, score_problem
from lib.server.watching import watch_silence

#: The pieces are the text divided by these.
SHARES = (1, 2, 4, 8)
#: Seconds within which a server that has answered everything comes to rest.
REST_S = 60.0


def pieces_of(ids: Sequence[int]) -> list[list[int]]:
    """Pieces of mixed length from one text: the whole, its second half, a quarter, an eighth; none shorter than 8.

    Example: 512 ids give pieces of 512, 256, 128 and 64, each ending where the text ends or at another place.
    """
    made = []
    for place, share in enumerate(SHARES):
        length = len(ids) // share
        start = (len(ids) - length) * (place % 2)
        if length >= 8:
            made.append(list(ids[start : start + length]))
    return made


def flush(control: Control) -> None:
    """Empties the prefix cache once the server is at rest: right after an answer SGLang may still count its request (400).

    Raises:
        ServerError: it refuses for longer than REST_S, or for another reason.
    """
    deadline = time.monotonic() + REST_S
    while True:
        try:
            return control.flush_cache()
        except ServerError as error:
            if "400" not in (error.found or "") or time.monotonic() > deadline:
                raise
        time.sleep(0.25)


def benchmark_level(server: Answering, folder: Path, **level: Any) -> None:
    """One level of the load client on a server that is at rest; see `lib.load.benchmark.send_level`."""
    flush(server.control)
    send_level(server, folder, **level)


def ask_alone(server: Answering, folder: Path, prompt: str, max_new_tokens: int, timeout_s: float) -> None:
    """Asks the known answer (answer.json); of a server that does not answer it keeps what it was doing."""
    try:
        ask(server, folder, prompt, max_new_tokens, timeout_s)
    except ServerError as error:
        if _timed_out(error) and isinstance(server, Server):
            watch_silence(server, folder)
        raise


def score_alone(server: Answering, folder: Path, pieces: Sequence[list[int]], timeout_s: float) -> None:
    """Scores each piece by one request after a cache flush and writes scores.json; a timeout ends it."""
    made = []
    for place, ids in enumerate(pieces):
        flush(server.control)
        made.append(_score(server.control, f"{place:02d}", ids, timeout_s))
        local.write_atomic(folder / "scores.json", json.dumps(made))
        _raise_if_silent(server, folder, made[-1:], timeout_s)


def continue_alone(server: Answering, folder: Path, ids: Sequence[int], new_tokens: int, timeout_s: float) -> None:
    """Continues a text greedily, then scores that continuation by prefill on the same server (decode.json)."""
    flush(server.control)
    answer = _generate(server.control, {"input_ids": list(ids)}, new_tokens, timeout_s)
    made: dict[str, Any] = {"asked": list(ids), "answer": answer, "rescored": None}
    if answer["error"] is None and answer["ids"]:
        flush(server.control)
        made["rescored"] = _score(server.control, "own", [*ids, *answer["ids"]], timeout_s)
    local.write_atomic(folder / "decode.json", json.dumps(made))
    _raise_if_silent(server, folder, [r for r in (answer, made["rescored"]) if r], timeout_s)


def ask_under_load(
    server: Answering,
    folder: Path,
    pieces: Sequence[list[int]],
    prompt: str,
    new_tokens: int,
    concurrency: int,
    rounds: int,
    timeout_s: float,
    seed: int = 0,
) -> None:
    """Keeps `concurrency` requests of mixed kinds and lengths in flight until all are answered (load.json).

    Each round scores every piece, asks the known answer as often, and continues pieces by 8 to 48 tokens, all shuffled.
    At rest again, what was continued is scored by prefill.
    """
    chosen = random.Random(seed)
    jobs: list[dict[str, Any]] = []
    for number in range(rounds):
        for place, ids in enumerate(pieces):
            jobs.append({"kind": "score", "key": f"{place:02d}", "ids": ids, "round": number})
            jobs.append({"kind": "answer", "key": "answer", "tokens": new_tokens, "round": number})
            jobs.append(
                {"kind": "continue", "key": f"{place:02d}", "ids": ids[: len(ids) // 2], "round": number,
                 "tokens": chosen.choice((8, 16, 32, 48))}
            )  # fmt: skip
    chosen.shuffle(jobs)
    flush(server.control)
    began, given_up = time.monotonic(), threading.Event()

    def one(job: dict[str, Any]) -> dict[str, Any]:
        if given_up.is_set():
            return {**job, "ids": None, "error": "not sent: an earlier request got no answer", "timed_out": False}
        control = Control(server.control.base_url)  # a tunnel's near end where it is on another host
        control.session.headers.update(server.control.session.headers)
        control.secrets = server.control.secrets
        started = time.monotonic() - began
        if job["kind"] == "score":
            found = _score(control, job["key"], job["ids"], timeout_s)
        else:
            source = {"text": prompt} if job["kind"] == "answer" else {"input_ids": job["ids"]}
            found = {"asked": job.get("ids"), **_generate(control, source, job["tokens"], timeout_s)}
        control.session.close()
        if found["timed_out"]:
            given_up.set()
        return {**job, **found, "started_s": round(started, 4), "ended_s": round(time.monotonic() - began, 4)}

    with ThreadPoolExecutor(concurrency) as pool:
        answered = list(pool.map(one, jobs))
    if not any(row["timed_out"] for row in answered):
        _rescore(server, answered, timeout_s)
    record = {"concurrency": concurrency, "in_flight_max": in_flight_max(answered), "requests": answered}
    local.write_atomic(folder / "load.json", json.dumps(record))
    _raise_if_silent(server, folder, answered, timeout_s)


def _rescore(server: Answering, answered: Sequence[dict[str, Any]], timeout_s: float) -> None:
    """Scores what was continued under load by prefill, alone: what decoding claimed there must hold at rest."""
    flush(server.control)
    for row in answered:
        if row["kind"] == "continue" and row["error"] is None and row["ids"]:
            row["rescored"] = _score(server.control, "own", [*row["asked"], *row["ids"]], timeout_s)


def _raise_if_silent(server: Answering, folder: Path, rows: Sequence[dict[str, Any]], timeout_s: float) -> None:
    """A server that does not answer is asked nothing more, not even who it is: the raw file says what happened."""
    silent = [row for row in rows if row["timed_out"]]
    if silent:
        if isinstance(server, Server):
            watch_silence(server, folder)
        raise ServerError(f"an answer within {timeout_s:g} s", f"Timeout for {len(silent)} of {len(rows)} request(s)")


def in_flight_max(requests: Sequence[dict[str, Any]]) -> int:
    """The largest number of requests that were in flight at once, from their times."""
    sent = [r for r in requests if "started_s" in r]
    return max((sum(r["started_s"] <= t["started_s"] < r["ended_s"] for r in sent) for t in sent), default=0)


def _score(control: Control, key: str, ids: Sequence[int], timeout_s: float) -> dict[str, Any]:
    """One prompt's log-probabilities as they came, with what went wrong."""
    body = {
        "input_ids": list(ids),
        "return_logprob": True,
        "logprob_start_len": 0,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
    }
    made: dict[str, Any] = {"key": key, "ids": list(ids), "logprobs": [], "error": None, "timed_out": False}
    try:
        rows = control.generate(body, timeout_s)["meta_info"].get("input_token_logprobs") or []
    except ServerError as error:
        return {**made, "error": str(error), "timed_out": _timed_out(error)}
    if [row[1] for row in rows] != list(ids):
        return {**made, "error": f"{len(rows)} log-probabilities, or for other ids, instead of {len(ids)}"}
    return {**made, "logprobs": [row[0] for row in rows]}


def _generate(control: Control, source: dict[str, Any], new_tokens: int, timeout_s: float) -> dict[str, Any]:
    body = {
        **source,
        "return_logprob": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": "input_ids" in source},
    }
    made: dict[str, Any] = {"text": "", "ids": [], "logprobs": [], "error": None, "timed_out": False}
    try:
        answer = control.generate(body, timeout_s)
    except ServerError as error:
        return {**made, "error": str(error), "timed_out": _timed_out(error)}
    rows = answer["meta_info"].get("output_token_logprobs") or []
    return {**made, "text": answer.get("text", ""), "ids": [r[1] for r in rows], "logprobs": [r[0] for r in rows]}


def _timed_out(error: ServerError) -> bool:
    return "Timeout" in (error.found or "")


# ------------------------------------------------------------------------------------- from raw files to facts


def pieces_from(rows: Sequence[dict[str, Any]]) -> list[Piece]:
    """Scored pieces of a raw file, with what is wrong with each."""
    made = []
    for row in rows:
        problem = row["error"] or score_problem(row["logprobs"])
        made.append(
            Piece(key=row["key"], ids_sha256=_sha(row["ids"] or []), problem=problem,
                  logprobs=[v if isinstance(v, int | float) else None for v in row["logprobs"]] if not problem else [])
        )  # fmt: skip
    return made


def _sha(ids: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()


def decode_gap(raw: dict[str, Any]) -> float | None:
    """Mean |log-probability by decoding - by prefill| over a server's own continuation; None where either is missing."""
    return _gap(raw["asked"], raw["answer"], raw["rescored"])


def load_decode_gap(raw: dict[str, Any]) -> float | None:
    """The largest such mean over the continuations that were made under load; None where none can be compared."""
    gaps = [
        _gap(r["asked"], r, r["rescored"]) for r in raw["requests"] if r["kind"] == "continue" and r.get("rescored")
    ]
    return max((g for g in gaps if g is not None), default=None)


def continuation_faults(raw: dict[str, Any], its: dict[str, Any] | None) -> tuple[str | None, str | None]:
    """What a continuation alone shows by itself: (garbage, a request that failed).

    Args:
        raw: decode.json.
        its: the reference's; a sign that it has too says nothing.
    """
    for what, part in (("its continuation", raw["answer"]), ("scoring its continuation", raw["rescored"])):
        if part is not None and part["error"]:
            return None, f"{what}: {part['error']}"
    if not raw["answer"]["ids"]:
        return "its continuation is empty", None
    for what, name, first in (("its continuation", "answer", 0), ("its own continuation by prefill", "rescored", 1)):
        problem = score_problem((raw[name] or {}).get("logprobs") or [], first)
        also = score_problem(((its or {}).get(name) or {}).get("logprobs") or [], first)
        if problem and (problem.startswith("NaN") or problem != also):
            return f"{what}: {problem}", None
    sign = degenerate(raw["answer"]["text"], raw["answer"]["ids"])
    if sign and its is not None and degenerate(its["answer"]["text"], its["answer"]["ids"]) is None:
        return f"its continuation is degenerate: {sign} ({raw['answer']['text'][:40]!r})", None
    return None, None


def _gap(asked: Sequence[int], answer: dict[str, Any], again: dict[str, Any] | None) -> float | None:
    if again is None or again["error"] or score_problem(again["logprobs"]) or score_problem(answer["logprobs"], 0):
        return None
    own = again["logprobs"][len(asked) :]
    pairs = list(zip(answer["logprobs"], own, strict=True))
    return sum(abs(a - b) for a, b in pairs) / len(pairs) if pairs else None


def load_faults(
    raw: dict[str, Any], expect: str | None, alone: str | None
) -> tuple[str | None, str | None, str | None]:
    """What the answers under load show by themselves: (garbage, requests that failed, requests without an answer).

    Args:
        raw: load.json.
        expect: how the known answer begins; None where nothing is expected.
        alone: the answer to the same prompt alone; a sign of degeneration that it has too says nothing.
    """
    requests = raw["requests"]
    silent = [r for r in requests if r["timed_out"]]
    sent = f"of {len(requests)} requests, up to {raw['in_flight_max']} in flight"
    if silent:
        return None, None, f"{len(silent)} {sent}, got no answer: {silent[0]['error']}"
    errors = [r for r in requests if r["error"]]
    bad = []
    for r in requests:
        if r["error"]:
            continue
        if r["kind"] == "score" and (problem := score_problem(r["logprobs"])):
            bad.append(f"a scored text: {problem}")
        elif r["kind"] != "score" and (problem := score_problem(r["logprobs"], 0)) and "exactly 0" not in problem:
            bad.append(f"an answer: {problem}")
        elif r["kind"] == "answer" and expect is not None and not r["text"].startswith(expect):
            bad.append(f"the known answer became {r['text'][:40]!r} instead of {expect!r}")
        elif r["kind"] == "answer" and (sign := degenerate(r["text"], r["ids"])) and sign != degenerate(alone or "x"):
            bad.append(f"the answer is degenerate: {sign} ({r['text'][:40]!r})")
    garbage = f"under load {len(bad)} {sent}, went wrong; first: {bad[0]}" if bad else None
    return garbage, f"{len(errors)} {sent}, failed; first: {errors[0]['error']}" if errors else None, None
