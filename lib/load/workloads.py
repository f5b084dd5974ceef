"""What is sent: prompts from fixed seeds, without a tokenizer, and never a warm-up prompt among the measured ones."""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterable, Sequence
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
    #: Replay: when each request (each session) is due, in seconds after the start.
    offsets_s: tuple[float, ...] | None = None

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
    settings = settings | {"output_len": output_len} | request
    return Workload(name, tuple(measured), tuple(warm), seed, settings, requests_sha256(measured))


def requests_sha256(requests: Iterable[Request]) -> str:
    """The hash of what is measured: every prompt, length and sampling choice, in order."""
    digest = sha256()
    for r in requests:
        digest.update(f"{r.prompt_sha256()} {r.max_tokens} {r.temperature} {r.ignore_eos}\n".encode())
    return digest.hexdigest()


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


#: What a coding agent's tools return, as (share, kind, least and most tokens): mostly short, sometimes a whole file.
TOOL_RESULTS = (
    (0.35, "search", 60, 400),
    (0.30, "read file", 300, 3000),
    (0.20, "test run", 150, 1500),
    (0.10, "edit", 20, 80),
    (0.05, "directory", 100, 800),
)
_PATH_WORDS = ("core", "api", "utils", "server", "models", "tests", "cache", "queue", "parser", "config")


def agentic_sessions(
    sessions: int,
    turns: int,
    output_len: int,
    *,
    first_len: int = 2000,
    think_s: float = 0.5,
    max_context: int | None = None,
    scripted: bool = False,
    chat: bool = False,
    seed: int = 0,
    warmup: int = 1,
    **request: Any,
) -> Workload:
    """Coding agents: each session starts with instructions and a task, then tool results come back turn after turn.

    The context grows with every turn and begins with all of the one before, so a prefix cache can serve it; sessions
    share their first 200 tokens or so (the instructions) and nothing else. Tool results are real code, search and
    test output of the sizes in `TOOL_RESULTS`; think times are exponential around `think_s`, cut at four times it.

    Args:
        sessions: conversations; `concurrency` of run_level says how many of them run at a time.
        turns: requests a session.
        first_len: tokens of the first prompt, about.
        max_context: end a session before its prompts and answers are about this many tokens.
        scripted: put fixed answers into the conversation instead of the server's own, so that two servers get the same.
        chat: messages (for /v1/chat/completions) instead of text.
    """
    if sessions < 1 or turns < 1 or first_len < 1 or think_s < 0:
        raise BadInput("at least one session, turn and token, and a think time from 0 on", f"{sessions}, {turns}")
    generator = random.Random(f"agentic-{seed}")
    files = standard_library_files()
    chars = CODE_CHARS_PER_TOKEN
    made: list[Request] = []
    lengths = []
    for number in range(sessions + warmup):
        warm = number >= sessions
        context = 0.0
        for turn in range(1 if warm else turns):
            tokens = first_len if turn == 0 else _tool_tokens(generator)
            piece = _tool_result(generator, files, round(tokens * chars), number, turn)
            if turn == 0:
                task = f"Session {seed}-{number}: find out why {generator.choice(_PATH_WORDS)} fails, and fix it."
                piece = f"{AGENT_INSTRUCTIONS}\n\n# Task\n{task}\n\n{piece}"
            context += len(piece) / chars + output_len
            if max_context is not None and context > max_context:
                if turn == 0:
                    raise BadInput(f"a first prompt that fits into max_context {max_context}", f"about {context:.0f}")
                break
            lengths.append(len(piece) / chars)
            made.append(
                Request(
                    f"agentic-{'w' if warm else ''}{number - sessions if warm else number}-{turn}",
                    ({"role": "user", "content": piece},) if chat else _transcript(piece, turn),
                    output_len,
                    session=None if warm else f"s{number}",
                    think_s=0.0 if turn == 0 else min(generator.expovariate(1 / think_s), 4 * think_s) if think_s else 0.0,
                    answer_before=_scripted_answer(generator, output_len) if scripted and turn else None,
                    **request,
                )
            )
    settings = {
        "sessions": sessions, "turns": turns, "output_len": output_len, "first_len": first_len, "think_s": think_s,
        "max_context": max_context, "answers": "scripted" if scripted else "the server's own",
        "appended_tokens_mean": round(sum(lengths) / len(lengths)), "source": f"python-{sysconfig.get_python_version()} stdlib",
    }  # fmt: skip
    return _of_requests("agentic", made, seed, settings | request)


AGENT_INSTRUCTIONS = (
    "You are a coding agent in a repository. Work in small steps: say which tool you call and with what, then wait for "
    "its result. Tools: search(pattern), read(path, first, last), edit(path, old, new), run_tests(path), list(path). "
    "Never guess what a file contains; read it. When the tests pass, say in two sentences what was wrong."
)


def _of_requests(
    name: str, made: Sequence[Request], seed: int, settings: dict[str, Any], offsets_s: Sequence[float] | None = None
) -> Workload:
    """A workload of finished requests; those whose id ends its first part in `-w...` are the warm-up."""
    warm = tuple(r for r in made if r.id.startswith(f"{name}-w"))
    measured = tuple(r for r in made if not r.id.startswith(f"{name}-w"))
    if not measured:
        raise BadInput("at least one measured request", "none")
    digest = sha256()
    for r in measured:
        line = f"{r.prompt_sha256()} {r.max_tokens} {r.temperature} {r.ignore_eos} {r.session} {r.think_s:.6f}"
        digest.update(f"{line} {r.answer_before}\n".encode())
    for offset in offsets_s or ():
        digest.update(f"{offset:.6f}\n".encode())
    return Workload(name, measured, warm, seed, settings, digest.hexdigest(), tuple(offsets_s) if offsets_s is not None else None)


def _tool_tokens(generator: random.Random) -> int:
    kinds = [(least, most) for _, _, least, most in TOOL_RESULTS]
    (least, most) = generator.choices(kinds, [share for share, *_ in TOOL_RESULTS])[0]
    # Log-uniform: short results are the rule, long ones happen.
    return round(least * (most / least) ** generator.random())


def _tool_result(generator: random.Random, files: Sequence[Path], chars: int, session: int, turn: int) -> str:
    path = f"src/{generator.choice(_PATH_WORDS)}/{generator.choice(_PATH_WORDS)}_{session}.py"
    text = files[generator.randrange(len(files))].read_text(encoding="utf-8", errors="replace")
    while len(text) < chars:
        text += "\n" + files[generator.randrange(len(files))].read_text(encoding="utf-8", errors="replace")
    start = text.rfind("\n", 0, generator.randrange(max(1, len(text) - chars))) + 1
    return f"[{path}, step {turn}]\n{text[start : start + max(chars, 1)]}"


def _transcript(piece: str, turn: int) -> str:
    return f"{piece}\n\nAssistant:" if turn == 0 else f"\n\nTool result:\n{piece}\n\nAssistant:"


def _scripted_answer(generator: random.Random, output_len: int) -> str:
    call = f"I read src/{generator.choice(_PATH_WORDS)}/{generator.choice(_PATH_WORDS)}.py next, lines {generator.randrange(900)} on. "
    return (call * (output_len * 4 // len(call) + 1))[: max(1, output_len * 4)]


def chat_sessions_file(
    path: Path, sessions: int, output_len: int | None = None, *, think_s: float = 0.0, scripted: bool = True,
    max_turns: int | None = None, seed: int = 0, warmup: int = 1, **request: Any,
) -> Workload:  # fmt: skip
    """ShareGPT-shaped conversations as sessions: each human turn is a request, with the conversation before it.

    The file's own answers go into the conversation (`scripted`), or the server's. Messages, so for /v1/chat/completions.
    """
    found: list[list[tuple[str, str | None]]] = []
    rows = _rows(path)
    for row in rows:
        turns = _turns_of(row)
        if turns:
            found.append(turns[:max_turns])
    found = [list(t) for t in {json.dumps(t): t for t in found}.values()]
    if len(found) < sessions + warmup:
        raise BadInput(f"{sessions + warmup} different conversations", f"{len(found)} in {path}", "ask for fewer")
    random.Random(f"sharegpt-{seed}").shuffle(found)
    made = []
    for number, turns in enumerate(found[: sessions + warmup]):
        warm = number >= sessions
        for turn, (said, answer) in enumerate(turns[:1] if warm else turns):
            length = output_len or max(1, round(len(answer or "") / 4))
            before = turns[turn - 1][1] if turn else None
            made.append(
                Request(
                    f"sharegpt-{'w' if warm else ''}{number}-{turn}", ({"role": "user", "content": said},), length,
                    session=None if warm else f"s{number}", think_s=think_s if turn else 0.0,
                    answer_before=before if scripted and turn else None, **request,
                )  # fmt: skip
            )
    settings = {"file": Path(path).name, "rows": len(rows), "conversations": len(found), "think_s": think_s}
    return _of_requests("sharegpt", made, seed, settings | {"answers": "scripted" if scripted else "the server's own"})


def _turns_of(row: dict[str, Any]) -> list[tuple[str, str | None]]:
    """(what the human said, the answer in the file or None) for each turn of a conversation."""
    turns = row.get("conversations") or row.get("messages") or []
    if not isinstance(turns, list):
        return []
    made: list[tuple[str, str | None]] = []
    for turn in turns:
        if not isinstance(turn, dict):
            return []
        who, said = turn.get("from") or turn.get("role"), turn.get("value") or turn.get("content")
        if not isinstance(said, str) or not said:
            return []
        if who in ("human", "user"):
            made.append((said, None))
        elif who in ("gpt", "assistant") and made and made[-1][1] is None:
            made[-1] = (made[-1][0], said)
    return made


#: Tokens of one block of a Mooncake trace's `hash_ids`.
TRACE_BLOCK = 512


def trace_file(
    path: Path, *, time_scale: float = 1.0, limit: int | None = None, vocab_size: int | None = None,
    max_output_len: int | None = None, max_input_len: int | None = None, seed: int = 0, warmup: int = 1, **request: Any,
) -> Workload:  # fmt: skip
    """A recorded trace, to be replayed at its own times: JSON lines, one request each.

    | form | time | what was sent | how much came |
    |---|---|---|---|
    | this workbook's | `at_s`, seconds | `prompt` (text or ids), `messages`, or `input_len` tokens | `output_len` |
    | Mooncake's | `timestamp`, milliseconds | `input_length` tokens; equal `hash_ids` are equal blocks of 512 | `output_length` |

    Lines with a `session` are turns of one conversation: the first is due at its time, a later one as long after the
    answer before it as `think_s` says. Lengths without text are filled with random ids where `vocab_size` is known,
    else with words of about one token each; blocks with the same hash get the same content, so a prefix cache finds
    what it found when the trace was taken.

    Args:
        time_scale: 2 makes it twice as slow, 0.5 twice as fast.
        limit: only the first so many lines.
        max_input_len, max_output_len: cut longer ones (and say so in the settings).
    """
    if not 0 < time_scale < 1e6:
        raise BadInput("a positive time_scale", str(time_scale))
    rows = _rows(path)[:limit]
    if not rows:
        raise UnreadableFile(f"a trace with at least one line at {path}", "none")
    made: list[Request] = []
    times: list[float] = []
    faults, cut, seen = [], 0, set()
    for number, row in enumerate(rows):
        at = row.get("at_s", row["timestamp"] / 1000 if isinstance(row.get("timestamp"), (int, float)) else None)
        inputs = row.get("input_len", row.get("input_length"))
        output = row.get("output_len", row.get("output_length", row.get("max_tokens")))
        prompt = _prompt_of(row)
        session = row.get("session")
        later = session is not None and session in seen
        if not later and not _is_number(at):
            faults.append(f"line {number + 1}: no at_s (seconds) or timestamp (milliseconds)")
        output, inputs = _whole(output), _whole(inputs)
        if output is None:
            faults.append(f"line {number + 1}: no output_len")
        elif prompt is None and not inputs:
            faults.append(f"line {number + 1}: neither prompt, messages nor input_len")
        if faults or output is None:
            if len(faults) >= 3:
                break
            continue
        if prompt is None and inputs is not None:
            wanted = min(inputs, max_input_len or inputs)
            cut += wanted < inputs
            prompt = _filled(wanted, row.get("hash_ids"), vocab_size, f"{seed}-{number}", session is not None)
        cut += max_output_len is not None and output > max_output_len
        if session is not None:
            seen.add(session)
        if not later:
            times.append(float(at) * time_scale)  # type: ignore[arg-type]
        length = max(1, min(output, max_output_len or output))
        made.append(
            Request(
                f"trace-{number}", prompt, length, session=str(session) if session is not None else None,
                think_s=float(row.get("think_s") or 0.0) * time_scale if later else 0.0, **request,
            )  # fmt: skip
        )
    if faults:
        raise UnreadableFile(f"a trace at {path}: at_s or timestamp, prompt or length, output_len", "; ".join(faults))
    start = min(times)
    if any(b < a for a, b in zip(times, times[1:], strict=False)):
        order = sorted(range(len(times)), key=times.__getitem__)
        made, times = _in_order(made, order), [times[i] for i in order]
    kind = made[0].prompt_kind()
    for number in range(warmup):
        fill: Any = _filled(64, None, vocab_size if kind == "ids" else None, f"{seed}-warm-{number}", False)
        prompt = ({"role": "user", "content": fill},) if kind == "messages" else fill
        made.append(Request(f"trace-w{number}", prompt, 8, **request))
    settings = {
        "file": Path(path).name, "file_sha256": sha256(Path(path).read_bytes()).hexdigest(), "lines": len(rows),
        "time_scale": time_scale, "cut_to_limits": cut, "duration_s": (max(times) - start),
    }  # fmt: skip
    return _of_requests("trace", made, seed, settings | request, [t - start for t in times])


def _whole(value: Any) -> int | None:
    """A whole number from 0 on, None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15


def _in_order(made: list[Request], order: list[int]) -> list[Request]:
    """Sessions (or single requests) in the order of their times, each with its turns together."""
    groups: dict[Any, list[Request]] = {}
    for number, request in enumerate(made):
        groups.setdefault(request.session if request.session is not None else number, []).append(request)
    listed = list(groups.values())
    return [request for i in order for request in listed[i]]


def _filled(length: int, hashes: Any, vocab_size: int | None, name: str, text_only: bool) -> Any:
    """Content of a length: blocks named by their hashes, the rest by the request's own name."""
    parts: list[Any] = []
    known = hashes if isinstance(hashes, list) else []
    for block in range(-(-length // TRACE_BLOCK)):
        size = min(TRACE_BLOCK, length - block * TRACE_BLOCK)
        generator = random.Random(f"block-{known[block]}" if block < len(known) else f"own-{name}-{block}")
        if vocab_size and not text_only:
            parts += [generator.randrange(vocab_size) for _ in range(size)]
        else:
            parts += [generator.choice(_COMMON_WORDS) for _ in range(size)]
    if vocab_size and not text_only:
        return tuple(parts)
    return " ".join(parts)


#: Words that are one token with a space before them in the usual vocabularies.
_WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you
were all her she there would their we him been has when who will no more if out so up said what its about than into them
can only other time new some could these two may first then do any like my now over such our man me even most made after
also did many off before must well back through years much where your way down should because long
"""
_COMMON_WORDS = tuple(_WORDS.split())


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
