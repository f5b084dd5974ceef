"""Rebuilds a run from its raw files alone: all that is derived is deleted first, then compared with what the run said.

What is kept: `raw/`, the parameters (`params/`, the run's copies) and the run's index, which says when and how long it
was. What is derived: executed notebooks, pages, results, the state document. Only times may differ. A run whose evidence is packed
(`raw.tar.xz`, as the committed examples are) is unpacked first; notebooks whose evidence is not in it are left alone.
"""

from __future__ import annotations

import json
import lzma
import shutil
import tarfile
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib import runner
from lib.errors import BadInput, UnreadableFile
from lib.hosts import local
from lib.params import NOTEBOOKS
from lib.records import Record
from lib.report.shown import differences
from lib.results import REPLAYS

#: What a run's folder keeps when it is replayed.
KEPT = ("raw", "params", "result.json")
#: The evidence and parameters of a run in one file.
PACKED = "raw.tar.xz"
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
        p
        for p in folder.rglob("*")
        if (p.is_file() or p.is_symlink()) and p.relative_to(folder).parts[0] not in KEPT and p.name != ".lock"
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
                    where = _where(was.get(name), now.get(name))
                    lines.append(
                        f"{number} {kind[:-1]} {name}: {_said(was.get(name))}, now {_said(now.get(name))}{where}"
                    )
        for key in sorted({*old, *new} - {"verdicts", "predictions", "trials"}):
            if old.get(key) != new.get(key):
                lines.append(f"{number} {key}: {str(old.get(key))[:200]!r}, now {str(new.get(key))[:200]!r}")
    return lines


def _where(old: Any, new: Any, path: str = "") -> str:
    """The first field in which two rows differ, in brackets; nothing where one of them is missing."""
    if isinstance(old, dict) and isinstance(new, dict):
        key = next((k for k in [*old, *new] if old.get(k) != new.get(k)), None)
        return _where(old.get(key), new.get(key), f"{path}.{key}" if path else str(key)) if key is not None else ""
    return f" [{path}: {str(old)[:60]}, now {str(new)[:60]}]" if path else ""


def _said(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not there"
    value = (row.get("measured") or {}).get("value")
    return f"{row.get('status') or row.get('outcome') or ''} {'' if value is None else value} ({str(row.get('reason'))[:80]})".strip()


def compared_pages(before: Path, after: Path, numbers: Sequence[str]) -> list[str]:
    """One line for each table, figure or text that a notebook shows and that the run did not show so."""
    lines = []
    for number in numbers:
        old, new = before / f"{number}.ipynb", after / f"{number}.ipynb"
        if old.is_file() and new.is_file():
            lines += [f"{number} {line}" for line in differences(old, new)]
    return lines


def replay(source: Path, out: str | None = None, in_place: bool = False) -> Replayed:
    """Replays a run into `out` (or a new folder beside it, or its own), and compares results and what the notebooks show.

    Raises:
        BadInput: `out` exists, or nothing raw is there.
    """
    packed = not (source / "raw").is_dir() and (source / PACKED).is_file()
    if not packed and not (source / "raw").is_dir():
        raise BadInput(
            f"a run with raw files in {source}", f"no folder raw/ and no {PACKED}", "name a run that was kept whole"
        )
    with tempfile.TemporaryDirectory() as work:
        said = Path(work) / "said"
        said.mkdir()
        for file in [*source.glob("*.ipynb"), *source.glob("*.result.json")]:
            shutil.copy2(file, said)  # what the run said, before anything is deleted
        folder = _prepared(source, out, in_place, packed, Path(work))
        gone = derived(folder) if in_place and not packed else derived(source)
        if in_place and not packed:
            for file in gone:
                file.unlink()
        _, made = runner.rebuild(str(folder))
        index = runner.read_run(made)
        numbers = [n for n in NOTEBOOKS if (made / "params" / f"{n}.yaml").exists()] if packed else list(NOTEBOOKS)
        before = {n: r for n, r in results(said).items() if n in numbers}
        found = compared(before, results(made)) + compared_pages(said, made, numbers)
        raw_files = sum(1 for p in (made / "raw").rglob("*") if p.is_file())
        if in_place and packed:
            _renew(source, made, numbers)
            made = source
        return Replayed(
            folder=str(made), deleted=[str(p.relative_to(source)) for p in gone if p.name != PACKED], raw_files=raw_files,
            failed={s.notebook: s.error or "" for s in index.notebooks if s.state == "failed"}, differences=found,
        )  # fmt: skip


def _prepared(source: Path, out: str | None, in_place: bool, packed: bool, work: Path) -> Path:
    """The folder in which the replay runs: evidence, parameters and index, nothing derived (in place: the run's own)."""
    if in_place and not packed:
        return source
    run_id = json.loads((source / "result.json").read_text(encoding="utf-8"))["run_id"] if packed else source.name
    beside = (
        work / "h" / run_id
        if in_place
        else runner.outputs_root() / REPLAYS / f"{source.name}-replay-{uuid.uuid4().hex[:6]}"
    )
    folder = (
        Path(out) if out else beside if packed else source.with_name(f"{source.name}-replay-{uuid.uuid4().hex[:6]}")
    )
    if folder.exists():
        raise BadInput("a new folder for the replay", f"{folder} exists", "name another, or --in-place")
    folder.mkdir(parents=True)
    if packed:
        _unpack(source, folder)
        return folder
    for name in KEPT:
        if (source / name).is_dir():
            shutil.copytree(source / name, folder / name, symlinks=True)
        elif (source / name).is_file():
            shutil.copy2(source / name, folder / name)
    return folder


def _unpack(source: Path, folder: Path) -> None:
    """Evidence and parameters out of the archive, and the index of those notebooks that have some.

    Raises:
        UnreadableFile: the archive is damaged.
    """
    try:
        with tarfile.open(source / PACKED) as archive:
            archive.extractall(folder, filter="data")
    except (OSError, tarfile.TarError, EOFError, lzma.LZMAError) as error:
        raise UnreadableFile(
            f"{PACKED} of {source}", f"{type(error).__name__}: {error}", "take it from the repository again"
        ) from error
    index = json.loads((source / "result.json").read_text(encoding="utf-8"))
    there = [n for n in NOTEBOOKS if (folder / "params" / f"{n}.yaml").exists()]
    index["selected"] = there
    for state in index["notebooks"]:
        if state["notebook"] not in there:
            state |= {"state": "not_run", "result": None, "html": None, "ipynb": None, "seconds": None, "error": None}
    local.write_atomic(folder / "result.json", json.dumps(index))


def _renew(source: Path, made: Path, numbers: Sequence[str]) -> None:
    """Puts what was derived into a packed run's own folder: notebooks, results, and one report of all its notebooks."""
    from lib.report.site import build_site

    for number in numbers:
        if (made / f"{number}.ipynb").is_file():
            book = json.loads((made / f"{number}.ipynb").read_text(encoding="utf-8"))
            about = book["metadata"].get("papermill", {})
            for key in ("input_path", "output_path"):
                about[key] = f"notebooks/{NOTEBOOKS[number]}.ipynb" if key == "input_path" else f"{number}.ipynb"
            local.write_atomic(source / f"{number}.ipynb", json.dumps(book, indent=1, ensure_ascii=False) + "\n")
            shutil.copyfile(made / f"{number}.result.json", source / f"{number}.result.json")
    for file in [*source.glob("*.ipynb"), *source.glob("*.result.json")]:
        shutil.copyfile(file, made / file.name)
    shutil.copyfile(source / "result.json", made / "result.json")
    build_site(made)
    if (source / "report.html").is_file():
        shutil.copyfile(made / "report.html", source / "report.html")
