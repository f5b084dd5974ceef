"""Rebuilds a run from its raw files alone: all that is derived is deleted first, then compared with what the run said.

What is kept: `raw/`, the parameters (`params/`, the run's copies) and the run's index, which says when and how long it
was. What is derived: executed notebooks, pages, results, the state document. Only times may differ.
"""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path
from typing import Any

from lib import runner
from lib.errors import BadInput
from lib.params import NOTEBOOKS
from lib.records import Record

#: What a run's folder keeps when it is replayed.
KEPT = ("raw", "params", "result.json")
#: Fields that say when, where and by which code a result was made: a replay is another moment on another machine.
TIMES = ("started", "ended", "seconds", "provenance", "run_id", "server_seconds")


class Replayed(Record):
    """How a replay went: what was deleted, what failed, and where it differs from the run."""

    folder: str
    deleted: list[str]
    raw_files: int
    failed: dict[str, str]
    differences: list[str]


def derived(folder: Path) -> list[Path]:
    """Every file of a run that is not evidence, parameter or index, sorted."""
    return sorted(
        p for p in folder.rglob("*") if (p.is_file() or p.is_symlink()) and p.relative_to(folder).parts[0] not in KEPT and p.name != ".lock"
    )


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """NN.result.json of every notebook, by number, as plain data."""
    found = {}
    for number in NOTEBOOKS:
        file = folder / f"{number}.result.json"
        if file.is_file():
            found[number] = json.loads(file.read_text(encoding="utf-8"))
    return found


def without_times(value: Any) -> Any:
    """A result without what a replay may change."""
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k not in TIMES}
    return [without_times(v) for v in value] if isinstance(value, list) else value


def compared(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> list[str]:
    """One line for each verdict, prediction or trial that differs, one for each notebook that only one side has."""
    lines = []
    for number in sorted({*before, *after}):
        if number not in before or number not in after:
            lines.append(f"{number}: {'only after the replay' if number in after else 'not made by the replay'}")
            continue
        old, new = without_times(before[number]), without_times(after[number])
        for kind in ("verdicts", "predictions", "trials"):
            was = {row["id"]: row for row in old.get(kind, [])}
            now = {row["id"]: row for row in new.get(kind, [])}
            for name in [*was, *(n for n in now if n not in was)]:
                if was.get(name) != now.get(name):
                    lines.append(f"{number} {kind[:-1]} {name}: {_said(was.get(name))}, now {_said(now.get(name))}")
        if old.get("recommendation") != new.get("recommendation"):
            lines.append(f"{number} recommendation: {old.get('recommendation')!r}, now {new.get('recommendation')!r}")
    return lines


def _said(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not there"
    value = (row.get("measured") or {}).get("value")
    return f"{row.get('status') or row.get('outcome') or ''} {'' if value is None else value} ({str(row.get('reason'))[:80]})".strip()


def replay(source: Path, out: str | None = None, in_place: bool = False) -> Replayed:
    """Replays a run into `out` (or a new folder beside it, or its own), and compares.

    Raises:
        BadInput: `out` exists, or nothing raw is there.
    """
    if not (source / "raw").is_dir():
        raise BadInput(f"a run with raw files in {source}", "no folder raw/", "name a run that was kept whole")
    before = results(source)
    if in_place:
        folder = source
    else:
        folder = Path(out) if out else source.with_name(f"{source.name}-replay-{uuid.uuid4().hex[:6]}")
        if folder.exists():
            raise BadInput("a new folder for the replay", f"{folder} exists", "name another, or --in-place")
        folder.mkdir(parents=True)
        for name in KEPT:
            if (source / name).is_dir():
                shutil.copytree(source / name, folder / name, symlinks=True)
            elif (source / name).is_file():
                shutil.copy2(source / name, folder / name)
    gone = derived(folder) if in_place else derived(source)
    if in_place:
        for file in gone:
            file.unlink()
    _, made = runner.rebuild(str(folder))
    index = runner.read_run(made)
    return Replayed(
        folder=str(made),
        deleted=[str(p.relative_to(source)) for p in gone],
        raw_files=sum(1 for p in (folder / "raw").rglob("*") if p.is_file()),
        failed={s.notebook: s.error or "" for s in index.notebooks if s.state == "failed"},
        differences=compared(before, results(made)),
    )
