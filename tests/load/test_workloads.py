"""What is sent: seeded, below the vocabulary, warm-up apart, and refused where it could kill a server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.errors import BadInput, UnreadableFile, WorkbookError
from lib.load import workloads
from lib.load.workloads import Workload

MAKERS: dict[str, Callable[..., Workload]] = {
    "random_ids": lambda n, **k: workloads.random_ids(n, 32, 8, vocab_size=1000, **k),
    "code": lambda n, **k: workloads.code_text(n, 64, 8, **k),
    "repeating": lambda n, **k: workloads.repeating_text(n, 64, 8, **k),
    "chat": lambda n, **k: workloads.chat_tasks(n, 8, **k),
    "shared_prefix": lambda n, **k: workloads.shared_prefix(n, 128, 16, 8, groups=2, **k),
}


@pytest.mark.parametrize("name", MAKERS)
def test_seeds_decide_everything(name: str) -> None:
    """The same seed sends the same, another seed something else, and the hash tells."""
    make = MAKERS[name]
    one, again, other = make(6, seed=3), make(6, seed=3), make(6, seed=4)
    assert one == again and one.sha256 == again.sha256 != other.sha256
    assert one.name == name and one.describe()["sha256"] == one.sha256 and len(one.requests) == 6


@pytest.mark.parametrize("name", MAKERS)
def test_warm_up_is_never_measured_and_prompts_differ(name: str) -> None:
    """No warm-up prompt among the measured ones, and no two measured prompts equal."""
    made = MAKERS[name](20, warmup=3)
    measured = [r.prompt_sha256() for r in made.requests]
    assert len(made.warmup) == 3 and not {r.prompt_sha256() for r in made.warmup} & set(measured)
    assert len(set(measured)) == 20 and len({r.id for r in (*made.requests, *made.warmup)}) == 23


@given(vocab=st.integers(2, 5000), seed=st.integers(0, 10**6), length=st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_random_ids_are_below_the_vocabulary(vocab: int, seed: int, length: int) -> None:
    """Every id of every prompt, warm-up too, is in [0, vocabulary)."""
    try:
        made = workloads.random_ids(3, length, 4, vocab_size=vocab, seed=seed)
    except BadInput:
        assert vocab**length < 2000  # so few possible prompts that the warm-up equals a measured one
        return
    for request in (*made.requests, *made.warmup):
        assert len(request.prompt) == length and all(isinstance(i, int) and 0 <= i < vocab for i in request.prompt)


@pytest.mark.parametrize("vocab_size", [None, 0, 1, -5, True, 151936.0, "151936"])
def test_random_ids_without_a_vocabulary_are_refused(vocab_size: Any) -> None:
    """Nothing is guessed: the message says that an id outside the vocabulary kills the server."""
    with pytest.raises(BadInput, match="kills the server"):
        workloads.random_ids(4, 8, 8, vocab_size=vocab_size)


def test_the_number_of_requests_is_the_origins_rule() -> None:
    """max(4, 2C)."""
    assert [workloads.requests_per_level(c) for c in (1, 2, 4, 16, 32)] == [4, 4, 8, 32, 64]


def test_code_is_real_and_about_as_long_as_asked() -> None:
    """Prompts are stretches of standard library sources with the asked number of characters."""
    made = workloads.code_text(8, 500, 8, chars_per_token=4.0)
    whole = {f: f.read_text(encoding="utf-8", errors="replace") for f in workloads.standard_library_files()}
    for request in made.requests:
        assert isinstance(request.prompt, str) and 0.5 * 2000 <= len(request.prompt) <= 2000
        assert any(request.prompt in text for text in whole.values())


def test_shared_prefix_groups() -> None:
    """Two groups share their beginnings; the warm-up begins differently, so the first of each group is cold."""
    made = workloads.shared_prefix(6, 200, 16, 8, groups=2)
    prompts = [str(r.prompt) for r in made.requests]
    assert prompts[0][:400] == prompts[2][:400] == prompts[4][:400] != prompts[1][:400]
    assert str(made.warmup[0].prompt)[:100] not in {p[:100] for p in prompts}


def test_repeating_text_repeats() -> None:
    """A prompt is one line over and over."""
    prompt = str(workloads.repeating_text(2, 100, 8).requests[0].prompt)
    line = prompt[: prompt.index(". ") + 2]
    assert prompt.startswith(line * 3)


def test_jsonl_in_its_three_forms(tmp_path: Path) -> None:
    """prompt, messages and ShareGPT conversations are read; rows without any are counted; lengths are the file's."""
    rows = [
        {"prompt": "one", "max_tokens": 5},
        {"prompt": [1, 2, 3]},
        {"messages": [{"role": "user", "content": "two"}]},
        {"conversations": [{"from": "human", "value": "three"}, {"from": "gpt", "value": "x"}]},
        {"nothing": 1},
    ]
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    made = workloads.jsonl_file(path, 4, warmup=0)
    assert {r.prompt_kind() for r in made.requests} == {"text", "ids", "messages"}
    assert made.settings["unusable_rows"] == 1 and {r.max_tokens for r in made.requests} == {5}
    array = tmp_path / "sharegpt.json"
    array.write_text(json.dumps(rows[3:]))
    assert workloads.jsonl_file(array, 1, 9, warmup=0).requests[0].prompt == "three"


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '{"a": 1}\n', "\x00\xff"])
def test_files_that_are_not_prompts(content: str, tmp_path: Path) -> None:
    """Nothing, cut JSON, other JSON and binary are refused with the path."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(WorkbookError, match="x.jsonl"):
        workloads.jsonl_file(path, 1, 8, warmup=0)


def test_a_missing_file_and_too_little_material(tmp_path: Path) -> None:
    """A missing file is named; a text that is too short for the asked number of different prompts is refused."""
    with pytest.raises(UnreadableFile):
        workloads.text_file(tmp_path / "none.txt", 1, 8, 8)
    short = tmp_path / "short.txt"
    short.write_text("only this\n")
    with pytest.raises(BadInput, match="different stretches"):
        workloads.text_file(short, 5, 100, 8)
    long = tmp_path / "long.txt"
    long.write_text("".join(f"line {i} of a long text\n" for i in range(2000)))
    made = workloads.text_file(long, 5, 100, 8)
    assert len(made.requests) == 5 and made.settings["file_sha256"]


@pytest.mark.parametrize("how", [{"count": 0}, {"output_len": 0}, {"input_len": 0}])
def test_impossible_sizes(how: dict[str, int]) -> None:
    """No requests, no output, no input."""
    settings_ = {"count": 2, "input_len": 8, "output_len": 8} | how
    with pytest.raises(BadInput):
        workloads.random_ids(**settings_, vocab_size=100)  # type: ignore[arg-type]
