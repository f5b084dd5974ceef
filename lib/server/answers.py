"""What a server says to a prompt whose continuation is known, and signs that an answer is degenerate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lib.hosts import local
from lib.records import Record
from lib.results import Answering
from lib.server.outcomes import degenerate


class Answer(Record):
    """One greedy answer and how it compares with what was expected (`correct` None: nothing was expected)."""

    text: str
    expect: str | None
    correct: bool | None
    degenerate: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    e2e_s: float | None


def ask(server: Answering, folder: Path, prompt: str, max_new_tokens: int, timeout_s: float = 600.0) -> None:
    """Asks greedily and writes the raw answer (answer.json)."""
    body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens}}
    local.write_atomic(folder / "answer.json", json.dumps(server.control.generate(body, timeout_s), indent=1))


def read_answer(raw: Any, expect: str | None) -> Answer:
    """A raw /generate answer, judged; `expect` must be how the text begins."""
    meta = raw["meta_info"]
    text = str(raw["text"])
    return Answer(
        text=text,
        expect=expect,
        correct=None if expect is None else text.startswith(expect),
        degenerate=degenerate(text),
        prompt_tokens=meta.get("prompt_tokens"),
        completion_tokens=meta.get("completion_tokens"),
        e2e_s=meta.get("e2e_latency"),
    )
