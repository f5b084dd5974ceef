"""What an executed notebook shows, cell by cell, so that two executions can be compared: tables, figures and printed text.

The cell that shows where and when something was made (`provenance_table`) is left out: a replay is another moment on
another machine. Figures are SVG without dates and with salted identifiers, so the same numbers give the same text.
"""

from __future__ import annotations

import difflib
import json
import re
from pathlib import Path
from typing import Any

#: Cells whose outputs say when and where, by what they call.
MOMENT = ("provenance_table(",)
PARAMETERS = {"parameters", "injected-parameters"}
_TAGS = re.compile(r"<[^>]+>|\s+")


def outputs_by_cell(file: Path) -> dict[str, list[dict[str, Any]]]:
    """The outputs of every code cell that shows something, by the cell's source (with a number where it occurs twice)."""
    found: dict[str, list[dict[str, Any]]] = {}
    for cell in json.loads(file.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell.get("source", ""))
        tags = set(cell.get("metadata", {}).get("tags") or [])
        if cell.get("cell_type") != "code" or tags & PARAMETERS or any(mark in source for mark in MOMENT):
            continue
        outputs = cell.get("outputs", [])
        if not outputs:
            continue  # imports and the like show nothing
        shown = [{"type": o["output_type"], "data": o.get("data") or o.get("text") or o.get("evalue")} for o in outputs]
        name, again = source, 1
        while name in found:
            again += 1
            name = f"{source}  # {again}"
        found[name] = shown
    return found


def differences(before: Path, after: Path) -> list[str]:
    """One line for each cell that shows something else, or that only one of both notebooks has."""
    old, new = outputs_by_cell(before), outputs_by_cell(after)
    lines = []
    for source in [*old, *(s for s in new if s not in old)]:
        if source not in new or source not in old:
            side = "only the run has" if source not in new else "only the replay has"
            lines.append(f"{side} the cell {_named(source)}")
        elif old[source] != new[source]:
            lines.append(f"shown by {_named(source)}: {_first_difference(old[source], new[source])}")
    return lines


def _named(source: str) -> str:
    line = next((x for x in reversed(source.splitlines()) if x.strip()), source)
    return f"`{line[:90]}`"


def _first_difference(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> str:
    """Where two lists of outputs begin to differ, in the words that a reader sees."""
    if len(old) != len(new):
        return f"{len(old)} outputs, now {len(new)}"
    a, b = (_TAGS.sub(" ", json.dumps(x)).split() for x in (old, new))
    for kind, i, j, k, m in (
        difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes() if len(a) + len(b) < 4000 else []
    ):
        if kind != "equal":
            return f"{' '.join(a[i:j])[:80]!r}, now {' '.join(b[k:m])[:80]!r}"
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"{' '.join(a[at : at + 3])[:80]!r}, now {' '.join(b[at : at + 3])[:80]!r}"
