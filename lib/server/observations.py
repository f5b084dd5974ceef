"""Failures that no log line shows: garbage in answers, a server that hangs while /health says 200, several nodes,
decay.

Each function takes what somebody observed and gives a `lib.server.failures.Failure`, or None if it shows none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lib.records import Record
from lib.server.failures import Failure, classify
from lib.server.garbage import output_signs
from lib.server.redact import redact_object

_MIN_GARBAGE_CHARS = 8


class NodesFailure(Record):
    """Why a server on several nodes failed: the node that failed first, and those that only waited for it."""

    failure: Failure
    root_node: str
    victims: list[str]
    exit_codes: list[int | None]
    exit_code_hides_it: bool
    what_to_do: str


def garbage_signal(text: str) -> str | None:
    """What makes a text garbage, or None: one character, unit or phrase repeated, replacement characters, or scripts
    mixed within a phrase.

    A text of fewer than 8 characters is not judged. Garbage is served with HTTP 200 by a healthy server, so only
    the text
    tells. Example: `garbage_signal("+" * 50)` is "single_character_repeated".
    """
    dense = "".join(text.split())
    if len(dense) < _MIN_GARBAGE_CHARS:
        return None
    counts: dict[str, int] = {}
    for char in dense:
        counts[char] = counts.get(char, 0) + 1
    if dense.count("\ufffd") >= 0.3 * len(dense):
        return "replacement_characters"
    if max(counts.values()) >= 0.95 * len(dense):
        return "single_character_repeated"
    if len(dense) >= 24:
        for size in range(2, min(24, len(dense) // 8) + 1):
            unit = dense[-size:]
            repeated = 0
            at = len(dense)
            while at >= size and dense[at - size : at] == unit:
                repeated += 1
                at -= size
            if repeated >= 8 and repeated * size >= 0.9 * len(dense):
                return "short_unit_repeated"
    signs = output_signs(text)
    if not signs:
        return None
    if signs[-1].startswith("scripts mixed"):
        return "scripts_mixed"
    return "replacement_characters" if "replacement characters" in signs[0] else "piece_repeated"


def answer_text(answer: Any) -> str:
    """The generated text in an answer of /generate, /v1/completions or /v1/chat/completions, or in plain text."""
    if isinstance(answer, str):
        return answer
    if isinstance(answer, list | tuple):
        return "".join(answer_text(item) for item in answer)
    if isinstance(answer, Mapping):
        for key in ("choices", "message", "delta"):
            if key in answer:
                return answer_text(answer[key])
        for key in ("content", "text", "output", "reasoning_content", "reasoning"):
            if isinstance(answer.get(key), str) and answer[key]:
                return str(answer[key])
    return ""


def classify_answer(answer: Any, http_status: int = 200) -> Failure | None:
    """Garbage in an answer, whatever the health check says; None if the text is not garbage by `garbage_signal`."""
    signal = garbage_signal(answer_text(answer))
    if signal is None:
        return None
    return Failure(
        id="garbage_output",
        failure_class="garbage_output",
        outcome="garbage",
        phase="serving",
        during_startup=False,
        cause_known=False,
        root_cause=f"the answer is garbage ({signal.replace('_', ' ')}) with HTTP {http_status}: a kernel computes "
        f"wrong numbers",
        what_to_do="ask the same question with another MoE, FP4 GEMM and attention backend, one at a time; the first "
        "right answer names the kernel",
        do_not="trusting /health: it answers 200 for garbage",
        values={"http": http_status, "signal": signal},
        needs=["the same prompt at temperature 0 on a known-good backend"],
    )


def classify_nodes(
    nodes: Mapping[str, Iterable[bytes | str]],
    exit_codes: Sequence[int | None] = (),
    finished_order: Sequence[str] = (),
) -> NodesFailure | None:
    """Why a server on several nodes failed: the first node with a cause of its own; the others only waited for it.

    Args:
        nodes: the lines of each node's log.
        exit_codes: their exit codes in the order of `nodes`; 0 does not mean that a node ended well.
        finished_order: the nodes in the order in which they ended, if that is known.
    """
    found = {name: classify(lines) for name, lines in nodes.items()}
    order = [*[n for n in finished_order if n in found or f"node_{n}" in found], *found]
    names = list(dict.fromkeys(n if n in found else f"node_{n}" for n in order))
    failures = {name: failure for name in names if (failure := found[name]) is not None}
    if not failures:
        return None
    root = next((name for name, failure in failures.items() if failure.cause_known), next(iter(failures)))
    failure = failures[root].model_copy(update={"exit_code": None})
    victims = [name for name in failures if name != root]
    codes = list(exit_codes)
    return NodesFailure(
        failure=failure,
        root_node=root,
        victims=victims,
        exit_codes=codes,
        exit_code_hides_it=bool(codes) and all(code == 0 for code in codes),
        what_to_do=f"start from {root}; compare when each node finished (FinishedAt), since victims log a watchdog "
        f"timeout minutes later",
    )


_OK = re.compile(r"requests? 1\.\.(?P<n>\d+) ok(?: at (?P<qps>[\d.]+) ?QPS)?", re.IGNORECASE)
_STUCK = re.compile(
    r"\b0 tokens\b|no (?:tokens|output|answer|response)|timed? ?out|never (?:answers|returns|ends)|hangs?\b",
    re.IGNORECASE,
)
_HEALTH = re.compile(r"/health(?:_generate)?\b\D{0,20}(?P<code>\d{3})")
_KILL = re.compile(r"kill -9|SIGKILL|killed with signal 9", re.IGNORECASE)


def classify_events(events: Iterable[str]) -> Failure | None:
    """A hang in a sequence of observed events: connections are taken, no tokens come, whatever /health says.

    Example: `["GET /health 200", "requests 1..102 ok at 5 QPS", "request 103: connected, 0 tokens, 300 s
    timeout"]` is a
    hang with health_http 200 and ok_before_hang 102.
    """
    values: dict[str, float | int | str | bool | None] = {}
    stuck: str | None = None
    for event in events:
        health, good = _HEALTH.search(event), _OK.search(event)
        if health:
            values["health_http"] = int(health["code"])
        if good:
            values["ok_before_hang"] = int(good["n"])
            if good["qps"]:
                values["qps"] = float(good["qps"])
        if _KILL.search(event):
            values["after_sigkill"] = True
        if _STUCK.search(event) and stuck is None:
            stuck = event
    if stuck is None:
        return None
    failure = Failure(
        id="no_tokens",
        failure_class="hang",
        outcome="hangs",
        phase="serving",
        during_startup=False,
        cause_known=False,
        root_cause=f"requests get no tokens: {stuck[:200]}",
        what_to_do="restart; watch with a real request that must produce a token, and make sure that every process "
        "of the old server is gone before a new one starts",
        do_not="trusting /health: it was 200" if values.get("health_http") == 200 else None,
        values=values,
        needs=["py-spy dump of the scheduler", "whether processes of an earlier server still run"],
    )
    return redact_object(failure)


_SPEED = re.compile(r"(?<![\d.])(?P<speed>\d{1,9}(?:\.\d{1,9})?) ?(?:tok(?:ens?)?/s|token/s)")
_BELOW = re.compile(r"(?P<what>accept(?:ance)? (?:rate|len(?:gth)?)) (?:below|under|<) ?(?P<limit>\d+(?:\.\d+)?)")


def classify_speeds(observed: Iterable[str]) -> Failure | None:
    """Performance that decays without an error: speeds in the order in which they were observed.

    Example: `["47.1 tok/s after restart", "16.4 tok/s later, accept rate below 0.35"]` is performance_degradation with
    healthy_tok_s 47.1, degraded_tok_s 16.4, threshold 0.35. A loss of less than 30% is not one.
    """
    speeds: list[float] = []
    values: dict[str, float | int | str | bool | None] = {}
    restart = False
    for text in observed:
        speeds.extend(float(match["speed"]) for match in _SPEED.finditer(text))
        below = _BELOW.search(text)
        if below:
            values["metric"], values["threshold"] = below["what"], float(below["limit"])
        restart = restart or "restart" in text
    if len(speeds) < 2 or min(speeds[1:]) > 0.7 * speeds[0]:
        return None
    values["healthy_tok_s"], values["degraded_tok_s"] = speeds[0], min(speeds[1:])
    values["restored_by_restart"] = restart
    return Failure(
        id="speed_decay",
        failure_class="performance_degradation",
        outcome="outside_limit",
        phase="serving",
        during_startup=False,
        cause_known=False,
        root_cause=f"speed fell from {speeds[0]} to {min(speeds[1:])} tok/s with time, without an error",
        what_to_do="log accept length and rate over the uptime, compare with speculation off, restart as a stopgap",
        values=values,
        needs=["decode lines over the whole uptime"],
    )


_TAKEN = re.compile(
    r"inference compute.*?library=(?P<library>\w+)|offloaded (?P<n>\d+)/(?P<all>\d+) layers to GPU|using device "
    r"(?P<device>CUDA|HIP|Metal)\d*"
)


def device_taken(lines: Iterable[str]) -> str | None:
    """The device that a log of Ollama or llama.cpp finally takes, or None; lines about skipped runners do not count.

    Example: `inference compute library=CUDA compute=12.1` gives "CUDA", whatever `skipping CUDA device` line stood
    before.
    """
    taken: str | None = None
    for line in lines:
        match = _TAKEN.search(line)
        if match:
            if match["n"]:
                taken = "GPU" if int(match["n"]) > 0 else "CPU"
            else:
                taken = (match["library"] or match["device"] or "").upper() or None
    return taken
