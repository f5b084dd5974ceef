"""Tasks that a long-context coding agent depends on, graded by exact text: does a server still do them at depth?

Every item exists twice: *deep* (the facts stand early in a long file of real code) and as *control* (the same facts, the
same question, a short file). Who fails the control can't do the task at all, and its depth says nothing. Prompts are
plain text for `/generate`, greedy, without a chat template: no judge, no parser and no reasoning in between.
"""

from __future__ import annotations

import json
import random
import re
import string
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.audit.probes import empty_cache, read_document
from lib.errors import BadInput, ServerError
from lib.load.stats import mcnemar_exact
from lib.records import Record
from lib.report.progress import progress_bar
from lib.results import Answering

ARMS = ("control", "deep")
#: Characters a token in code, from below: a haystack of n tokens is cut at n times this many characters.
CHARACTERS_PER_TOKEN = 3.0
#: A family is used where the reference does at least this share of its control items.
ABLE_FRAC = 0.5
#: Two-sided level of the exact McNemar test.
LEVEL = 0.05
#: The fewest one-sided differing pairs that this level can tell from chance: 2 / 2^6 = 0.031.
FEWEST_PAIRS = 6
HAYSTACK = "inspect+tarfile+typing+argparse+doctest+pdb+subprocess+zipfile+ast"
_WORDS = (
    "amber", "basalt", "cobalt", "dune", "ember", "fjord", "garnet", "harbor", "indigo", "juniper", "krill", "lumen",
    "maple", "nickel", "onyx", "pollen", "quartz", "raven", "saffron", "tundra", "umber", "velvet", "walnut", "zephyr",
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """What is hidden in the file (lines, in order), the text that asks for it, and what a right answer starts with."""

    needles: tuple[str, ...]
    question: str
    expected: str
    kind: str = "text"


class Item(Record):
    """One prompt of one arm, with its grading key."""

    id: str
    family: str
    arm: str
    prompt: str
    expected: str
    kind: str
    max_new_tokens: int


class FamilyResult(Record):
    """One family under two servers: rates, the pairs that differ, and what follows."""

    family: str
    what: str
    items: int
    control_a: int
    control_b: int
    deep_a: int
    deep_b: int
    usable: int
    only_a: int
    only_b: int
    p_value: float | None
    outcome: str
    reason: str


def _token(r: random.Random, length: int = 6) -> str:
    return "".join(r.choice(string.ascii_lowercase + string.digits) for _ in range(length))


def _names(r: random.Random, count: int) -> list[str]:
    return r.sample(_WORDS, count)


def _needle(r: random.Random) -> Task:
    name, other = _names(r, 2)
    constant, value = f"{name.upper()}_SESSION_KEY", f"{_token(r, 4)}-{_token(r, 4)}"
    decoy = f'{other.upper()}_SESSION_KEY = "{_token(r, 4)}-{_token(r, 4)}"'
    ask = f'# The constants of this file, checked once more:\nassert {constant} == "'
    return Task((f'{constant} = "{value}"', decoy), ask, f'{value}"')


def _needles(r: random.Random) -> Task:
    names = [n.upper() for n in _names(r, 4)]
    values = [r.randint(1000, 9999) for _ in names]
    lines = tuple(f"PORT_{n} = {v}" for n, v in zip(names, values, strict=True))
    order = list(range(4))
    r.shuffle(order)
    asked = ", ".join(f"PORT_{names[i]}" for i in order)
    ask = f"# The values of {asked}, in this order:\nports = ["
    return Task(lines, ask, ", ".join(str(values[i]) for i in order) + "]")


def _identifier(r: random.Random) -> Task:
    first, *rest = _names(r, 4)
    tail = f"_{'_'.join(rest)}_{_token(r, 5)}"
    line = f"def {first}{tail}(batch): return batch"
    return Task((line,), f"# Call the function of this file whose name begins with {first}:\nresult = {first}", f"{tail}(")


def _renamed(r: random.Random) -> Task:
    a, b, c, other = _names(r, 4)
    value = r.randint(1000, 9999)
    lines = (f"{a}_limit = {value}", f"{other}_limit = {r.randint(1000, 9999)}", f"{b}_limit = {a}_limit", f"{c}_limit = {b}_limit")
    return Task(lines, f"# {c}_limit is a number:\nassert {c}_limit ==", f"{value}")


def _tool_call(r: random.Random) -> Task:
    name, queue, who = _names(r, 3)
    priority = r.randint(1, 9)
    tool = f"open_{name}_ticket"
    schema = f'# TOOL {{"name": "{tool}", "parameters": {{"queue": "string", "priority": "integer", "assignee": "string"}}}}'
    example = '# EXAMPLE {"name": "close_item", "arguments": {"queue": "main", "priority": 1, "assignee": "nobody"}}'
    task = f'# TASK: {tool} in queue "{queue}-ops" with priority {priority} for assignee "{who}-{_token(r, 3)}"'
    assignee = re.findall(r'assignee "([^"]+)"', task)[0]
    expected = {"name": tool, "arguments": {"queue": f"{queue}-ops", "priority": priority, "assignee": assignee}}
    return Task((schema, example, task), '# The TASK above as one JSON tool call:\n{"name": "', json.dumps(expected), "json")


def _signature(r: random.Random) -> Task:
    name = f"assemble_{'_'.join(_names(r, 2))}"
    kinds = [("int", lambda: str(r.randint(2, 99))), ("float", lambda: f"0.{r.randint(11, 99)}"), ("bool", lambda: "True")]
    parts = []
    for word in _names(r, 9):
        kind, default = kinds[r.randrange(3)]
        parts.append(f"{word}_{_token(r, 2)}: {kind} = {default()}")
    rest = f"source: str, *, {', '.join(parts)}) -> list[str]:"
    return Task((f"def {name}({rest} return [source]",), f"# The same signature once more, unchanged:\ndef {name}(", rest)


#: family -> (what it asks, how an item is made).
FAMILIES: dict[str, tuple[str, Callable[[random.Random], Task]]] = {
    "needle": ("give the value of one constant defined early in the file", _needle),
    "needles": ("give four values defined at four depths, in another order", _needles),
    "identifier": ("copy an identifier exactly", _identifier),
    "renamed": ("follow a value through two renamings", _renamed),
    "tool_call": ("write a valid JSON tool call from a schema and a task at depth", _tool_call),
    "signature": ("repeat a long function signature exactly", _signature),
}


def make_items(
    count: int, deep_tokens: int, control_tokens: int = 120, seed: int = 0, families: Sequence[str] = ()
) -> list[Item]:
    """`count` items of each family, each in both arms, from a seed: the same for every server.

    Raises:
        BadInput: an unknown family, or a depth below twice the control's.
    """
    unknown = [f for f in families if f not in FAMILIES]
    if unknown or deep_tokens < 2 * control_tokens:
        raise BadInput(
            f"families among {', '.join(FAMILIES)}, and a depth of at least {2 * control_tokens} tokens",
            ", ".join(unknown) or str(deep_tokens),
        )
    text, _ = read_document(HAYSTACK)
    lines = [line for line in text.splitlines() if line.strip()]
    made = []
    for family in families or FAMILIES:
        for number in range(count):
            r = random.Random(f"{seed}/{family}/{number}")
            task = FAMILIES[family][1](r)
            offset = r.randrange(max(1, len(lines) // 2))
            for arm, tokens in zip(ARMS, (control_tokens, deep_tokens), strict=True):
                body = _file(lines, offset, int(tokens * CHARACTERS_PER_TOKEN), task.needles)
                made.append(
                    Item(
                        id=f"{family}-{number:03d}-{arm}",
                        family=family,
                        arm=arm,
                        prompt=f"{body}\n\n{task.question}",
                        expected=task.expected,
                        kind=task.kind,
                        max_new_tokens=len(task.expected) // 2 + 12,
                    )
                )
    return made


def _file(lines: Sequence[str], offset: int, characters: int, needles: Sequence[str]) -> str:
    """Real code with the needles at even distances in its first half: what follows them is the depth."""
    chosen, length, i = [], 0, offset
    while length < characters:
        line = lines[i % len(lines)]
        chosen.append(line)
        length += len(line) + 1
        i += 1
    step = max(1, len(chosen) // (2 * len(needles)))
    for number, needle in reversed(list(enumerate(needles))):
        chosen.insert(min(len(chosen), 1 + number * step), needle)
    return "\n".join(chosen)


def right(item: Item, output: str) -> bool:
    """True if an answer is exactly right: it begins with the expected text, or is the expected JSON object."""
    if item.kind == "json":
        try:
            found, _ = json.JSONDecoder().raw_decode('{"name": "' + output)
        except ValueError:
            return False
        return bool(found == json.loads(item.expected))
    return _plain(output).startswith(_plain(item.expected)) and not re.match(r"\w", _after(item, output))


def _plain(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _after(item: Item, output: str) -> str:
    """What follows a right answer that ends in a letter or digit: `7391` is not right where `73912` is written."""
    if not re.search(r"\w$", item.expected):
        return ""
    return _rest(output, len(_plain(item.expected)))


def _rest(output: str, characters: int) -> str:
    seen = 0
    for place, letter in enumerate(output):
        if seen == characters:
            return output[place:]
        seen += not letter.isspace()
    return ""


def ask_items(
    server: Answering,
    folder: Path,
    items: Sequence[Mapping[str, Any]],
    parallel: int = 4,
    timeout_s: float = 600.0,
    flush: bool = True,
) -> None:
    """Asks every item and appends its answer to answers.jsonl as it comes; items answered already are not asked again."""
    file = folder / "answers.jsonl"
    done = {row["id"] for row in read_answers(folder)}
    todo = [Item.model_validate(dict(i)) for i in items]
    todo = [i for i in todo if i.id not in done]
    if flush and todo and not done:
        empty_cache(server)

    def ask(item: Item) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": item.max_new_tokens, "stop": ["\n"] if item.kind == "text" else []}
        answer = json.loads(
            server.control.post_bytes("/generate", {"text": item.prompt, "sampling_params": sampling}, timeout_s)
        )
        meta = answer["meta_info"]
        return {
            "id": item.id,
            "output": answer["text"],
            "right": right(item, answer["text"]),
            "prompt_tokens": meta.get("prompt_tokens"),
            "cached_tokens": meta.get("cached_tokens"),
            "finish_reason": (meta.get("finish_reason") or {}).get("type"),
        }

    with ThreadPoolExecutor(max(1, parallel)) as pool, file.open("a") as stream:
        for row in progress_bar(pool.map(ask, todo), total=len(todo), desc="tasks", unit="item"):
            stream.write(json.dumps(row) + "\n")
            stream.flush()


def read_answers(folder: Path) -> list[dict[str, Any]]:
    """Every whole line of answers.jsonl; a line cut off by an interruption is left out."""
    file = folder / "answers.jsonl"
    rows = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def able_families(answers: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, int]]:
    """Family -> (control items right, control items): what the model can do at all."""
    found: dict[str, tuple[int, int]] = {}
    for row in answers:
        family, _, arm = row["id"].rsplit("-", 2)
        if arm == "control":
            good, of = found.get(family, (0, 0))
            found[family] = (good + bool(row["right"]), of + 1)
    return found


def is_able(good: int, of: int) -> bool:
    """True where at least half of the control items are right."""
    return of > 0 and good >= ABLE_FRAC * of


def compare_tasks(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> list[FamilyResult]:
    """Every family under A and B, paired by item, and a last row `all` over the usable items of all families.

    An item is usable where both servers do its control: then a difference at depth is one of depth. Exact McNemar.

    Raises:
        BadInput: the servers were asked other items.
    """
    first, second = {r["id"]: bool(r["right"]) for r in a}, {r["id"]: bool(r["right"]) for r in b}
    families = dict.fromkeys(i.rsplit("-", 2)[0] for i in first)
    able = {f for f, (good, of) in able_families(a).items() if is_able(good, of)}
    needed = {i for i in first if i.rsplit("-", 2)[0] in able}
    if not first or not needed <= second.keys():
        raise BadInput("the same items under both servers", f"{len(first)} and {len(second)}", "use one seed and count")
    results = [_family(f, first, second) for f in families]
    used = [r for r in results if r.outcome != "skipped"]
    pairs = [p for r in used for p in _usable_pairs(r.family, first, second)]
    if used:
        results.append(_row("all", "every usable item of all families", pairs, used))
    return results


def _usable_pairs(family: str, a: Mapping[str, bool], b: Mapping[str, bool]) -> list[tuple[bool, bool]]:
    stems = [i.removesuffix("-control") for i in a if i.startswith(f"{family}-") and i.endswith("-control")]
    return [
        (a[f"{s}-deep"], b[f"{s}-deep"])
        for s in stems
        if a[f"{s}-control"] and b[f"{s}-control"] and f"{s}-deep" in a and f"{s}-deep" in b
    ]


def _family(family: str, a: Mapping[str, bool], b: Mapping[str, bool]) -> FamilyResult:
    what = FAMILIES[family][0] if family in FAMILIES else family
    mine = [i for i in a if i.startswith(f"{family}-")]
    control = [i for i in mine if i.endswith("-control")]
    deep = [i for i in mine if i.endswith("-deep")]
    good = sum(a[i] for i in control)
    counts: dict[str, Any] = {
        "family": family,
        "what": what,
        "items": len(control),
        "control_a": good,
        "control_b": sum(b.get(i, False) for i in control),
        "deep_a": sum(a[i] for i in deep),
        "deep_b": sum(b.get(i, False) for i in deep),
    }
    if not is_able(good, len(control)):
        reason = f"the model can't do it: {good} of {len(control)} right with the facts close by; its depth says nothing"
        return FamilyResult(**counts, usable=0, only_a=0, only_b=0, p_value=None, outcome="skipped", reason=reason)
    return _judged(counts, _usable_pairs(family, a, b))


def _row(family: str, what: str, pairs: Sequence[tuple[bool, bool]], parts: Sequence[FamilyResult]) -> FamilyResult:
    names = ("items", "control_a", "control_b", "deep_a", "deep_b")
    counts = {"family": family, "what": what, **{n: sum(getattr(p, n) for p in parts) for n in names}}
    return _judged(counts, pairs)


def _judged(counts: Mapping[str, Any], pairs: Sequence[tuple[bool, bool]]) -> FamilyResult:
    test = mcnemar_exact([x for x, _ in pairs], [y for _, y in pairs])
    p, lost, gained = test.p_value, test.only_a, test.only_b
    words = f"{lost} items only under A, {gained} only under B, of {len(pairs)} that both can do at shallow depth"
    if p is not None and p < LEVEL:
        outcome = "lost" if lost > gained else "gained"
        words += f": exact McNemar p = {p:.3g}"
    elif len(pairs) < FEWEST_PAIRS:
        outcome = "not_enough_data"
        words += f"; {FEWEST_PAIRS} differing pairs in one direction are the fewest that p < {LEVEL:g} needs"
    else:
        outcome = "none_seen"
        share = FEWEST_PAIRS / len(pairs)
        words += f": p = {p:.3g}; a loss of fewer than {share:.0%} of the items could not be told from chance"
    return FamilyResult(
        **counts, usable=len(pairs), only_a=lost, only_b=gained, p_value=p, outcome=outcome, reason=words
    )


def run_tasks(
    server: Answering,
    folder: Path,
    count: int,
    deep_tokens: int,
    control_tokens: int = 120,
    seed: int = 0,
    parallel: int = 4,
    families: Sequence[str] | None = None,
    flush: bool = True,
) -> None:
    """Asks the control items of every family, then the deep ones of those that the model can do (or of `families`).

    Writes items.json and answers.jsonl. `families` names those that the reference could do, so that both are asked the same.

    Raises:
        ServerError: the server does not answer.
    """
    items = make_items(count, deep_tokens, control_tokens, seed)
    keys = {"count": count, "deep_tokens": deep_tokens, "control_tokens": control_tokens, "seed": seed}
    (folder / "items.json").write_text(json.dumps({**keys, "items": [i.model_dump() for i in items]}))
    try:
        wanted = [i for i in items if families is None or i.family in families]
        ask_items(server, folder, [i.model_dump() for i in wanted if i.arm == "control"], parallel, flush=flush)
        able = able_families(read_answers(folder))
        chosen = [f for f, (good, of) in able.items() if is_able(good, of)] if families is None else list(families)
        deep = [i.model_dump() for i in items if i.arm == "deep" and i.family in chosen]
        ask_items(server, folder, deep, parallel, flush=flush)
    except (KeyError, ValueError) as error:
        raise ServerError("/generate answers text with meta_info", f"{type(error).__name__}: {error}") from error
