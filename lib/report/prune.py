"""Keeps the outputs folder below a size: whole old runs go, the newest of each profile and those that are kept stay.

A run is kept if it holds a file `KEEP`, if it is among the newest `keep` of its profile that ended, if it has not ended (its
evidence may be needed to go on), or if it is not a run of this workbook. Nothing inside a kept run is removed but attempts
that no verdict points to (`<name>.earlier-*`), so the evidence of a kept verdict is never lost.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from lib.errors import BadInput
from lib.records import Record
from lib.report.site import read_run
from lib.results import run_folders

KEEP_FILE = "KEEP"


class Removal(Record):
    """One folder that is, or would be, removed."""

    path: str
    bytes: int
    why: str


class PrunePlan(Record):
    """What would be removed, what stays and why, and the sizes before and after."""

    bytes_before: int
    bytes_after: int
    limit_bytes: int | None
    removals: list[Removal] = []
    kept: dict[str, str] = {}


def budget_bytes() -> int | None:
    """The size that the outputs folder may have, from WORKBOOK_MAX_GIB; None if it is not set.

    Raises:
        BadInput: it is no size.
    """
    text = os.environ.get("WORKBOOK_MAX_GIB", "").strip()
    if not text:
        return None
    try:
        gib = float(text)
    except ValueError:
        gib = -1.0
    if not 0 <= gib < float("inf"):
        raise BadInput("WORKBOOK_MAX_GIB is a size in GiB", repr(text), "for example WORKBOOK_MAX_GIB=200")
    return int(gib * 2**30)


def over_budget(root: Path) -> str | None:
    """One sentence if the runs below a folder take more than WORKBOOK_MAX_GIB allows."""
    limit = budget_bytes()
    if limit is None:
        return None
    taken = folder_bytes(root)
    if taken <= limit:
        return None
    return f"outputs take {taken / 2**30:.2f} GiB, WORKBOOK_MAX_GIB allows {limit / 2**30:.2f}: `workbook prune` shows what can go"


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder, as `du --apparent-size`; links are not followed, hard links count once."""
    return sum(_files(folder).values())


def _files(folder: Path) -> dict[tuple[int, int], int]:
    """Bytes of each file below a folder, by what the file system knows it by; links are not followed."""
    found = {}
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                about = os.lstat(Path(place) / name)
                found[about.st_dev, about.st_ino] = about.st_size
    return found


class _Sizes:
    """How much goes with a folder: a file that two runs share (a matrix takes results over by hard links) goes with the last."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self.holders: Counter[tuple[int, int]] = Counter()
        self.total = 0
        for folder in folders:
            found = _files(folder)
            self.total += sum(size for key, size in found.items() if not self.holders[key])
            self.holders.update(found.keys())

    def freed(self, folder: Path, gone: Iterable[Path] = ()) -> int:
        """Bytes that removing a folder frees; the total is then without them. `gone`: parts of it that were counted before."""
        files = _files(folder)
        for part in gone:
            for key in _files(part):
                files.pop(key, None)
        freed = 0
        for key, size in files.items():
            self.holders[key] -= 1
            freed += size if self.holders[key] == 0 else 0
        self.total -= freed
        return freed


def plan_prune(root: Path, limit_bytes: int | None, keep: int = 3) -> PrunePlan:
    """What has to go so that the outputs folder is within its limit; oldest first, attempts without a verdict before runs.

    Args:
        root: the outputs folder.
        limit_bytes: its size afterwards, as far as kept runs allow; None: only superfluous attempts go.
        keep: newest ended runs of each profile that stay whatever the size.
    """
    runs: list[tuple[str, Path, str | None]] = []
    everything: list[Path] = []
    removals: list[Removal] = []
    kept: dict[str, str] = {}
    by_profile: dict[str, list[Path]] = {}
    for folder in sorted(run_folders(root)):
        if not folder.is_symlink() and not folder.parent.is_symlink() and not folder.parent.name.startswith("."):
            by_profile.setdefault(folder.parent.name, []).append(folder)
    for folders in by_profile.values():
        newest: list[tuple[str, Path]] = []
        for folder in folders:
            run, problem, _ = read_run(folder)
            everything.append(folder)
            if run is None:
                runs.append((folder.name, folder, f"its index can't be read ({problem})"))
            elif run.state in ("running", "interrupted"):
                runs.append((run.started, folder, f"it has not ended ({run.state})"))
            elif (folder / KEEP_FILE).exists():
                runs.append((run.started, folder, f"it holds {KEEP_FILE}"))
            else:
                newest.append((run.started, folder))
        newest.sort(reverse=True)
        runs += [
            (at, f, f"one of the newest {keep} of its profile" if i < keep else None)
            for i, (at, f) in enumerate(newest)
        ]
    everything += [folder for folder, _ in leftovers(root)]
    sizes = _Sizes(everything)
    before = sizes.total
    for _, folder, why in sorted(runs, key=lambda r: r[0]):
        if why is not None:
            kept[str(folder.relative_to(root))] = why
        for attempt in superfluous(folder):
            again = "an attempt that was taken again; no verdict points to it"
            removals.append(Removal(path=str(attempt.relative_to(root)), bytes=sizes.freed(attempt), why=again))
    if limit_bytes is not None:
        for folder, why in leftovers(root):
            if sizes.total > limit_bytes:
                removals.append(Removal(path=str(folder.relative_to(root)), bytes=sizes.freed(folder), why=why))
        for _, folder, why in sorted(runs, key=lambda r: r[0]):
            if sizes.total <= limit_bytes:
                break
            if why is None:
                inside = [r for r in removals if Path(r.path).is_relative_to(folder.relative_to(root))]
                removals = [r for r in removals if r not in inside]
                freed = sizes.freed(folder, [root / r.path for r in inside]) + sum(r.bytes for r in inside)
                whole = "an old run, beyond the size limit"
                removals.append(Removal(path=str(folder.relative_to(root)), bytes=freed, why=whole))
    after = sizes.total
    return PrunePlan(bytes_before=before, bytes_after=after, limit_bytes=limit_bytes, removals=removals, kept=kept)


def leftovers(root: Path) -> list[tuple[Path, str]]:
    """What a matrix left below the outputs folder besides runs, oldest first: nothing that a verdict points to."""
    from lib.batch.attempts import ATTEMPTS
    from lib.batch.outputs import REMOTE

    cut_off = "an attempt of a matrix that was cut off; the matrix would have gone on from it"
    copies = "the local copy of an object store; it is fetched again"
    found = [(f, cut_off) for f in sorted((root / ATTEMPTS).glob("*/*"), key=lambda f: f.stat().st_mtime) if f.is_dir()]
    return [*found, *((f, copies) for f in sorted((root / REMOTE).glob("*")) if f.is_dir())]


def superfluous(folder: Path) -> list[Path]:
    """Folders of attempts (`raw/NN/<name>.earlier-*`) that no verdict, trial or prediction of the run points to."""
    _, _, notebooks = read_run(folder)
    if any(one.result is None and one.state != "not_run" for one in notebooks):
        return []  # what a notebook without a valid result would have pointed to is not known
    named = {
        evidence.path
        for one in notebooks
        if one.result
        for claim in [v.evidence for v in one.result.verdicts] + [t.evidence for t in one.result.trials]
        for evidence in claim
    }
    found = sorted(p for p in folder.glob("raw/*/*.earlier-*") if p.is_dir() and not p.is_symlink())
    return [p for p in found if not any(Path(name).is_relative_to(p.relative_to(folder)) for name in named)]


def carry_out(root: Path, plan: PrunePlan) -> list[str]:
    """Remove what a plan names; returns what could not be removed, with the reason.

    Each folder is renamed first, so that a run is there or gone, never half; one that somebody works in now is left alone.
    """
    problems = []
    for removal in plan.removals:
        folder = root / removal.path
        parts = Path(removal.path).parts
        run = root.joinpath(*parts[: 3 if parts[0].startswith(".attempts") else 2])  # whose lock its worker holds
        try:
            with (run / ".lock").open("a+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                doomed = root / f".pruned-{uuid.uuid4().hex[:8]}"
                folder.rename(doomed)
            shutil.rmtree(doomed)
        except BlockingIOError:
            problems.append(f"{removal.path}: somebody works in it")
        except OSError as error:
            problems.append(f"{removal.path}: {error.strerror or error}")
    return problems
