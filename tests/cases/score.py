"""Score a folder of cases leaf by leaf: `python tests/cases/score.py FOLDER` prints wrong leaves and right/total.

FOLDER holds `cases.jsonl` (id, kind, input, expect, ...) and the files that inputs name. For each kind, `map_<kind>.py`
here has `answer(case, folder) -> dict` in the shape of `expect`; a kind without one, or one that raises, is wrong.

A map may look at `expect` for what is asked (names, and inputs that stand only there). Whether it merely repeats a
value is tested: each leaf is changed and asked again, and one that follows its own change was given, not found. It
is listed and counts neither as right nor in the total.

What is compared, by rule and not by case:
- a number: two integers are equal, anything else is within 1% (5% where the key says `about`);
- a boolean, null and the empty string: the same, and the key must be answered;
- `class`, `verdict`, and every string that is an identifier (a letter, then letters, digits and `_ . : / -`): the same;
- a list of such values: the same length and order (identifiers in any order), an empty list: empty;
- an object: its members.
Other strings are prose for a reader and are skipped, and so are keys that begin with `note` (a remark) or contain
`wrong` (a value that somebody else published), and those in PROSE.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MISSING = object()
#: Keys whose value is meant for a reader, whatever it looks like.
PROSE = frozenset({"why", "trap", "source", "truth"})
ALWAYS = frozenset({"class", "verdict"})
KINDS = ("kv_memory", "server_log", "audit", "failure_class", "bench", "systemd")

Leaf = tuple[str, Any, Any, bool]


def leaves(expected: Any, got: Any, path: str = "") -> Iterator[Leaf]:
    """Every leaf that counts: (path, expected, got, right)."""
    key = path.rsplit(".", 1)[-1].split("[")[0]
    if key in PROSE or key.startswith("note") or "wrong" in path:
        return
    if isinstance(expected, dict):
        for name, member in expected.items():
            inner = got.get(name, MISSING) if isinstance(got, dict) else MISSING
            yield from leaves(member, inner, f"{path}.{name}" if path else name)
    elif isinstance(expected, list):
        yield from _list_leaves(expected, got, path)
    elif isinstance(expected, str):
        if key in ALWAYS or is_identifier(expected):
            yield path, expected, got, isinstance(got, str) and got == expected
    elif expected is None:
        yield path, expected, got, got is None
    elif isinstance(expected, bool):
        yield path, expected, got, isinstance(got, bool) and got == expected
    else:
        yield path, expected, got, same_number(expected, got, "about" in key)


def _list_leaves(expected: list[Any], got: Any, path: str) -> Iterator[Leaf]:
    if not expected:
        yield path, expected, got, isinstance(got, (list, tuple)) and not got
    elif all(isinstance(item, str) for item in expected):
        if all(map(is_identifier, expected)):
            right = isinstance(got, (list, tuple)) and sorted(map(str, got)) == sorted(expected)
            yield path, expected, got, right
    else:
        items = list(got) if isinstance(got, (list, tuple)) else []
        for index, item in enumerate(expected):
            yield from leaves(item, items[index] if index < len(items) else MISSING, f"{path}[{index}]")
        if len(items) > len(expected):
            yield f"{path}.length", len(expected), len(items), False


def is_identifier(text: str) -> bool:
    """Whether a string is a name that can be right or wrong, and not prose; the empty string is a value too."""
    return text == "" or re.fullmatch(r"[A-Za-z][\w.:/-]*", text, re.ASCII) is not None


def same_number(expected: float, got: Any, about: bool = False) -> bool:
    """Two integers are equal; anything else is within 1%, or 5% for `about`."""
    if isinstance(got, bool) or not isinstance(got, (int, float)):
        return False
    if isinstance(expected, int) and isinstance(got, int) and not about:
        return expected == got
    tolerance = 0.05 if about else 0.01
    return abs(got - expected) <= tolerance * abs(expected)


class Question(dict[str, Any]):
    """A case that remembers whether its `expect` was looked at."""

    looked = False

    def __getitem__(self, key: str) -> Any:
        self.looked |= key == "expect"
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.looked |= key == "expect"
        return super().get(key, default)


def changed(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value * 3 + 7
    return f"{value or ''}x"


def replaced(tree: Any, path: str, value: Any) -> Any:
    """A copy of the tree with another value at a path such as `a.b[1].c`."""
    steps = [int(step[1:-1]) if step.startswith("[") else step for step in re.findall(r"[^.\[\]]+|\[\d+\]", path)]
    copy = json.loads(json.dumps(tree))
    place = copy
    for step in steps[:-1]:
        place = place[step]
    place[steps[-1]] = value
    return copy


def is_echo(module: ModuleType, case: dict[str, Any], folder: Path, leaf: Leaf) -> bool:
    """Whether the answer at a leaf follows a change of that leaf's own expected value."""
    path, expected, got, _ = leaf
    if isinstance(expected, list) or path.endswith(".length"):
        return False
    other = changed(expected)
    try:
        again = module.answer(Question(case | {"expect": replaced(case["expect"], path, other)}), folder)
    except Exception:  # noqa: BLE001 - it did not even answer
        return False
    for name, _, value, right in leaves(replaced(case["expect"], path, other), again):
        if name == path:
            return right and value != got
    return False


def load_map(kind: str) -> ModuleType | None:
    """The module map_<kind>.py of this folder, None where there is none."""
    path = HERE / f"map_{kind}.py"
    if kind not in KINDS or not path.is_file():
        return None
    spec = importlib.util.spec_from_file_location(f"map_{kind}", path)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def score(folder: Path) -> tuple[dict[str, list[int]], list[str], list[str]]:
    """Right and total leaves per kind, a line for every wrong leaf, and the leaves that the case itself gave."""
    maps: dict[str, ModuleType | None] = {}
    totals: dict[str, list[int]] = {}
    wrong: list[str] = []
    given: list[str] = []
    for number, line in enumerate((folder / "cases.jsonl").read_text("utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        case = {key: value for key, value in json.loads(line).items() if key not in ("why", "trap", "truth")}
        kind = case["kind"]
        if kind not in maps:
            try:
                maps[kind] = load_map(kind)
            except Exception as error:  # noqa: BLE001 - a map that does not load makes its kind wrong
                maps[kind] = None
                wrong.append(f"{kind}: map does not load: {type(error).__name__}: {error}")
        module = maps[kind]
        question = Question(case)
        answer: Any = MISSING
        reason = "no map" if module is None else ""
        if module is not None:
            try:
                answer = module.answer(question, folder)
            except Exception as error:  # noqa: BLE001 - one case that raises is wrong; the others still count
                reason = f"{type(error).__name__}: {error}"
        counts = totals.setdefault(kind, [0, 0])
        for leaf in leaves(case["expect"], answer):
            path, expected, got, right = leaf
            if right and question.looked and module is not None and is_echo(module, case, folder, leaf):
                given.append(f"{case.get('id', number)}: {path}")
                continue
            counts[0] += right
            counts[1] += 1
            if not right:
                shown = reason or ("not answered" if got is MISSING else repr(got))
                wrong.append(f"{case.get('id', number)}: {path}: expected {expected!r}, {shown[:200]}")
    return totals, wrong, given


def main(argv: list[str]) -> int:
    """0 if every leaf is right, 1 if not, 2 if there is nothing to score."""
    if len(argv) != 1 or not (Path(argv[0]) / "cases.jsonl").is_file():
        print("usage: python tests/cases/score.py FOLDER (with cases.jsonl in it)", file=sys.stderr)
        return 2
    totals, wrong, given = score(Path(argv[0]))
    for line in wrong:
        print(line)
    if given:
        print(f"given by the case, not counted: {', '.join(given)}")
    for kind in sorted(totals):
        print(f"{kind}: {totals[kind][0]}/{totals[kind][1]}")
    right, total = (sum(column) for column in zip(*totals.values(), strict=True)) if totals else (0, 0)
    print(f"all: {right}/{total}")
    return 0 if total and right == total else 1 if total else 2


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
