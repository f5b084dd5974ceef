"""What is sent: prompts from fixed seeds, without a tokenizer, and never a warm-up prompt among the measured ones."""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from lib.errors import BadInput, UnreadableFile
from lib.load.client import Request

#: Characters per token of source code under the usual byte-level BPE vocabularies; only used to size text prompts.
CODE_CHARS_PER_TOKEN = 3.2

#: Short tasks for chat; written for this workbook.
CHAT_TASKS = (
    "Write a Python function that merges two sorted lists, and explain its cost.",
    "A service answers slowly after each deployment and recovers in ten minutes. List what you would check, in order.",
    "Explain to a new colleague what a write-ahead log is for.",
    "Turn this into a table: apples 3 kg 7.50, pears 2 kg 6.20, plums 1 kg 4.00. Add price per kg.",
    "Review this change: a cache without a size limit was added to a request handler.",
    "What is the difference between latency and throughput? Give an example where one improves and the other suffers.",
    "Write a shell command that finds the ten largest files below a folder, and say what each part does.",
    "Summarise how a hash table grows, and when that is noticed by a user.",
    "A test fails one time in fifty. Plan how to find the cause.",
    "Translate into SQL: for each customer, the last order and the number of orders in the last year.",
    "Which questions would you ask before you choose a message queue?",
    "Write a regular expression for ISO dates and three strings that it must not match.",
    "Describe a binary search over an array that was rotated, with its corner cases.",
    "Explain why two threads that increment one counter can lose counts.",
    "Draft a short message that tells users about a planned outage on Sunday from 6 to 8.",
    "How would you measure whether a new compression setting is worth it?",
)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests to measure, warm-up requests apart from them, and what a record needs to name both.

    `sha256` covers every prompt and length that is measured, in order: two levels with one hash sent the same.
    """

    name: str
    requests: tuple[Request, ...]
    warmup: tuple[Request, ...]
    seed: int
    settings: dict[str, Any]
    sha256: str

    def describe(self) -> dict[str, Any]:
        """What a level's header keeps of it (pass it as `workload` to `run_level`)."""
        return {
            "name": self.name,
            "seed": self.seed,
            "settings": self.settings,
            "sha256": self.sha256,
            "requests": len(self.requests),
            "warmup": len(self.warmup),
        }


def requests_per_level(concurrency: int) -> int:
    """The origin's rule: max(4, 2C) requests a level. Example: 8 at C=4."""
    return max(4, 2 * concurrency)


def make_workload(
    name: str, prompts: Sequence[Any], output_len: int, warmup: int, seed: int, settings: dict[str, Any], **request: Any
) -> Workload:
    """Requests from distinct prompts: the last `warmup` prompts are the warm-up.

    Raises:
        BadInput: a warm-up prompt is a measured one, or a length is impossible.
    """
    if output_len < 1:
        raise BadInput("at least one output token", f"output_len {output_len}")
    count = len(prompts) - warmup
    if count < 1:
        raise BadInput("at least one measured request", f"{count}")
    made = [
        Request(f"{name}-{'w' if i >= count else ''}{i if i < count else i - count}", prompt, output_len, **request)
        for i, prompt in enumerate(prompts)
    ]
    measured, warm = made[:count], made[count:]
    shared = {r.prompt_sha256() for r in measured} & {r.prompt_sha256() for r in warm}
    if shared:
        raise BadInput("warm-up prompts that are never measured", f"{len(shared)} that are both", "give more material")
    digest = sha256()
    for r in measured:
        digest.update(f"{r.prompt_sha256()} {r.max_tokens} {r.temperature} {r.ignore_eos}\n".encode())
    settings = settings | {"output_len": output_len} | request
    return Workload(name, tuple(measured), tuple(warm), seed, settings, digest.hexdigest())


def random_ids(
    count: int,
    input_len: int,
    output_len: int,
    *,
    vocab_size: int | None,
    seed: int = 0,
    warmup: int = 1,
    **request: Any,
) -> Workload:
    """Prompts of uniformly random token ids, all strictly below the vocabulary size.

    Args:
        vocab_size: from the model's config.json (`vocab_size`, under `text_config` for multimodal ones) or params.

    Raises:
        BadInput: no vocabulary size. An id outside the vocabulary is a device-side assert that kills the whole server
            (seen on SGLang 0.5.16), and no endpoint of the server tells the size, so none is guessed.
    """
    if vocab_size is None or isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 2:
        raise BadInput(
            "a vocabulary size for random ids: one id outside the vocabulary kills the server, so none is guessed",
            repr(vocab_size),
            "give vocab_size from the model's config.json or from params, or send text",
        )
    if input_len < 1:
        raise BadInput("prompts of at least one token", f"input_len {input_len}")
    generator = random.Random(f"random-ids-{seed}")
    # The first ids number the prompts, so that no two share a prefix that a cache could answer.
    prompts = []
    for number in range(count + warmup):
        ids = [generator.randrange(vocab_size) for _ in range(input_len)]
        ids[0] = (generator.randrange(vocab_size) if number >= vocab_size else number * 7919 + seed) % vocab_size
        prompts.append(tuple(ids))
    settings = {"input_len": input_len, "vocab_size": vocab_size}
    return make_workload("random_ids", prompts, output_len, warmup, seed, settings, **request)


@lru_cache(maxsize=1)
def standard_library_files() -> tuple[Path, ...]:
    """The standard library's larger Python sources on this machine, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    files = [
        p
        for p in root.rglob("*.py")
        if not skip & set(p.relative_to(root).parts) and 8_000 < p.stat().st_size < 400_000
    ]
    return tuple(sorted(files, key=lambda p: p.relative_to(root).as_posix()))


def _slices(texts: Sequence[str], count: int, chars: int, generator: random.Random, what: str) -> list[str]:
    """`count` different stretches of text, starting at line starts, longest material first spread over all texts."""
    whole = [t for t in texts if t.strip()]
    if not whole:
        raise BadInput(f"{what} with text in it", "nothing")
    order = list(range(len(whole)))
    generator.shuffle(order)
    made, seen = [], set()
    for attempt in range(count * 50):
        index = order[attempt % len(order)]
        text, at = whole[index], index
        while len(text) < chars:
            at = (at + 1) % len(whole)
            text += "\n" + whole[at]
            if at == index:
                break
        start = generator.randrange(max(1, len(text) - chars))
        line = text.rfind("\n", 0, start) + 1
        piece = text[line : line + chars]
        if piece not in seen and piece.strip():
            seen.add(piece)
            made.append(piece)
        if len(made) == count:
            return made
    raise BadInput(f"{count} different stretches of {chars} characters", f"{len(made)} in {what}", "give more text")


def code_text(
    count: int, input_len: int, output_len: int, *, seed: int = 0, warmup: int = 1,
    chars_per_token: float | None = None, **request: Any,
) -> Workload:  # fmt: skip
    """Real Python source from this machine's standard library, about `input_len` tokens a prompt.

    Without a tokenizer a text's length is only aimed at (`CODE_CHARS_PER_TOKEN`); the server's `prompt_tokens` says
    what it was. The hash tells two machines with different Python versions apart.
    """
    if input_len < 1:
        raise BadInput("prompts of at least one token", f"input_len {input_len}")
    chars = max(16, round(input_len * (chars_per_token or CODE_CHARS_PER_TOKEN)))
    generator = random.Random(f"code-{seed}")
    files = standard_library_files()
    picked = sorted(generator.sample(range(len(files)), min(len(files), 40 + chars // 8000)))
    texts = [files[i].read_text(encoding="utf-8", errors="replace") for i in picked]
    prompts = _slices(texts, count + warmup, chars, generator, "the standard library")
    settings = {"input_len": input_len, "chars": chars, "source": f"python-{sysconfig.get_python_version()} stdlib"}
    return make_workload("code", prompts, output_len, warmup, seed, settings, **request)


def repeating_text(
    count: int, input_len: int, output_len: int, *, seed: int = 0, warmup: int = 1, **request: Any
) -> Workload:
    """One short sentence over and over, a different one for each prompt: the easiest text to speculate on."""
    generator = random.Random(f"repeating-{seed}")
    things = ("import os, sys; from pathlib import Path", "the cat sat on the mat and looked at the door", "a = a + 1")
    prompts = []
    for number in range(count + warmup):
        line = f"{generator.randrange(10**6)} {things[number % len(things)]} {number}. "
        prompts.append((line * (input_len * 4 // len(line) + 1))[: max(len(line) * 2, input_len * 4)])
    return make_workload("repeating", prompts, output_len, warmup, seed, {"input_len": input_len}, **request)


def chat_tasks(count: int, output_len: int, *, seed: int = 0, warmup: int = 1, **request: Any) -> Workload:
    """Short chat tasks as messages (for /v1/chat/completions), each numbered so that no two are equal."""
    generator = random.Random(f"chat-{seed}")
    numbers = generator.sample(range(1000, 10**6), count + warmup)
    prompts = [
        ({"role": "user", "content": f"(Case {n}) {CHAT_TASKS[i % len(CHAT_TASKS)]}"},) for i, n in enumerate(numbers)
    ]
    return make_workload("chat", prompts, output_len, warmup, seed, {"tasks": len(CHAT_TASKS)}, **request)


def shared_prefix(
    count: int,
    prefix_len: int,
    suffix_len: int,
    output_len: int,
    *,
    groups: int = 1,
    seed: int = 0,
    warmup: int = 1,
    **request: Any,
) -> Workload:
    """Prompts in `groups`, each with a long common beginning (code) and an end of its own: what a prefix cache meets.

    The warm-up has a beginning of its own, so the first measured prompt of each group is cold.
    """
    if not 1 <= groups <= count:
        raise BadInput("between one group and as many as requests", f"{groups} groups, {count} requests")
    prefixes = [r.prompt for r in code_text(groups + 1, prefix_len, 1, seed=seed, warmup=0).requests]
    suffixes = [r.prompt for r in code_text(count + warmup, suffix_len, 1, seed=seed + 1, warmup=0).requests]
    prompts = [
        f"{prefixes[i % groups] if i < count else prefixes[-1]}\n# part {i}\n{suffixes[i]}"
        for i in range(count + warmup)
    ]
    settings = {"prefix_len": prefix_len, "suffix_len": suffix_len, "groups": groups}
    return make_workload("shared_prefix", prompts, output_len, warmup, seed, settings, **request)


def text_file(
    path: Path, count: int, input_len: int, output_len: int, *, seed: int = 0, warmup: int = 1,
    chars_per_token: float = 4.0, **request: Any,
) -> Workload:  # fmt: skip
    """Stretches of a text file of the user's."""
    text = _read(path)
    chars = max(16, round(input_len * chars_per_token))
    prompts = _slices([text], count + warmup, chars, random.Random(f"file-{seed}"), str(path))
    settings = {"file": path.name, "file_sha256": sha256(text.encode()).hexdigest(), "input_len": input_len}
    return make_workload("text_file", prompts, output_len, warmup, seed, settings, **request)


def jsonl_file(
    path: Path, count: int, output_len: int | None = None, *, seed: int = 0, warmup: int = 1, **request: Any
) -> Workload:
    """Prompts from a JSONL file: `prompt`, `messages`, or ShareGPT's `conversations`, in a seeded order.

    A JSON array of such objects is read too (ShareGPT is published as one). An object's `max_tokens` or `output_len`
    is used when `output_len` is not given.

    Raises:
        UnreadableFile: the file is not that.
        BadInput: it holds fewer different prompts than asked for.
    """
    rows = _rows(path)
    faults, found = [], []
    for number, row in enumerate(rows, 1):
        prompt = _prompt_of(row)
        if prompt is None:
            faults.append(number)
        else:
            found.append((prompt, row.get("max_tokens") or row.get("output_len")))
    if faults and not found:
        raise UnreadableFile(
            "objects with `prompt`, `messages` or `conversations`", f"none in {path}", "see docs/metrics.md, Workloads"
        )
    unique = {json.dumps(p): (p, n) for p, n in found}
    pool = [unique[k] for k in sorted(unique)]
    random.Random(f"jsonl-{seed}").shuffle(pool)
    if len(pool) < count + warmup:
        raise BadInput(f"{count + warmup} different prompts", f"{len(pool)} in {path}", "ask for fewer, or warmup=0")
    length = output_len or next((n for _, n in pool if isinstance(n, int)), None)
    if length is None:
        raise BadInput("an output length", "none given and none in the file", "give output_len")
    settings = {"file": path.name, "unusable_rows": len(faults), "rows": len(rows)}
    prompts = [p for p, _ in pool[: count + warmup]]
    made = make_workload("jsonl_file", prompts, length, warmup, seed, settings, **request)
    if output_len is None:
        own = [
            Request(r.id, r.prompt, n if isinstance(n, int) and n > 0 else length, r.temperature, r.ignore_eos, r.extra)
            for r, (_, n) in zip(made.requests, pool[:count], strict=True)
        ]
        made = Workload(made.name, tuple(own), made.warmup, seed, made.settings, made.sha256)
    return made


def _read(path: Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UnreadableFile(f"a text file at {path}", str(error.strerror)) from None
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"UTF-8 text at {path}", str(error)) from None


def _rows(path: Path) -> list[dict[str, Any]]:
    text = _read(path)
    try:
        if text.lstrip().startswith("["):
            rows = json.loads(text)
        else:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise UnreadableFile(f"JSON lines at {path}", str(error)) from None
    if not all(isinstance(r, dict) for r in rows):
        raise UnreadableFile(f"JSON objects at {path}", "something else among them")
    return list(rows)


def _prompt_of(row: dict[str, Any]) -> Any:
    if isinstance(row.get("prompt"), str) and row["prompt"]:
        return row["prompt"]
    ids = row.get("prompt") or row.get("input_ids")
    if isinstance(ids, list) and ids and all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        return tuple(ids)
    if isinstance(row.get("messages"), list) and row["messages"]:
        return tuple(row["messages"]) if all(isinstance(m, dict) and "role" in m for m in row["messages"]) else None
    turns = row.get("conversations")
    if isinstance(turns, list) and turns and isinstance(turns[0], dict):
        first = turns[0].get("value") or turns[0].get("content")
        return first if isinstance(first, str) and first else None
    return None
