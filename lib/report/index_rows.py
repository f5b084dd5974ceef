"""What the index of runs keeps of one run, read from its result files: a row for the run and one for each verdict.

Only what is kept is freed of secrets (again: the files are already), so a run costs milliseconds; the whole of a large
result takes a hundred times as long.
"""

from __future__ import annotations

import contextlib
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lib.migrations import NewerVersion, notebook_result, run_result
from lib.params import NOTEBOOKS
from lib.records import Measured, NotebookResult, RunResult, Verdict
from lib.server.redact import redact_text

_UNREADABLE = (OSError, UnicodeError, ValueError, ValidationError, NewerVersion)


@dataclass(frozen=True)
class RunRow:
    """A run as the index keeps it; the fields are the columns of its table, in order."""

    path: str
    profile: str
    run_id: str
    started: str | None
    ended: str | None
    state: str
    seconds: float | None
    commit_id: str | None
    dirty: int | None
    sglang: str | None
    model: str | None
    gpus: str | None
    stamp: str


def stamp_of(folder: Path) -> str:
    """Sizes and times of a run's result files: another stamp means that they changed."""
    parts = []
    for file in sorted(folder.glob("*result.json")):
        with contextlib.suppress(OSError):
            found = file.stat()
            parts.append(f"{file.name}:{found.st_size}:{found.st_mtime_ns}")
    return ",".join(parts)


def index_rows(folder: Path, path: str) -> tuple[tuple[Any, ...], list[tuple[Any, ...]]]:
    """The rows of a run: one for the run, one for each verdict of its valid results.

    A result that is not valid, or is another run's, has no rows; a run without a valid index has the state `no index`.

    Args:
        folder: the run's folder.
        path: how the index names it, relative to the outputs folder.
    """
    stamp = stamp_of(folder)  # before the files: what changes meanwhile is read again
    run = _run_of(folder)
    results = _results_of(folder, run)
    first = results[0].provenance if results else None
    servers = [s for r in results for s in r.servers]
    gpus = ", ".join(str(g.get("name")) for g in (first.host.get("gpus") or [])) if first else None
    row = RunRow(
        path=path,
        profile=folder.parent.name,
        run_id=folder.name,
        started=run.started if run else None,
        ended=run.ended if run else None,
        state=run.state if run else "no index",
        seconds=run.seconds if run else None,
        commit_id=first.commit if first else None,
        dirty=None if first is None or first.dirty is None else int(first.dirty),
        sglang=_joined(s.sglang_version for s in servers),
        model=_joined(s.served_model_name for s in servers),
        gpus=redact_text(gpus) if gpus else gpus,
        stamp=stamp,
    )
    return astuple(row), [_verdict_row(path, r.notebook, v) for r in results for v in r.verdicts]


def _run_of(folder: Path) -> RunResult | None:
    with contextlib.suppress(*_UNREADABLE):
        return run_result((folder / "result.json").read_text(encoding="utf-8"))
    return None


def _results_of(folder: Path, run: RunResult | None) -> list[NotebookResult]:
    found = []
    for number in NOTEBOOKS:
        with contextlib.suppress(*_UNREADABLE):
            result = notebook_result((folder / f"{number}.result.json").read_text(encoding="utf-8"))
            if result.notebook == number and (run is None or result.run_id == _origin(run, number)):
                found.append(result)
    return found


def _origin(run: RunResult, number: str) -> str:
    """The run whose id a notebook's result bears: this one, or the one that it was taken over from."""
    taken = next((state.taken_from for state in run.notebooks if state.notebook == number), None)
    return taken.rpartition("/")[2] if taken else run.run_id


def _verdict_row(path: str, notebook: str, verdict: Verdict) -> tuple[Any, ...]:
    m = verdict.measured or Measured(value=None, reason="no number")
    number = isinstance(m.value, (int, float)) and not isinstance(m.value, bool)
    return (
        path,
        notebook,
        verdict.id,
        redact_text(verdict.claim),
        verdict.status.value,
        m.value if number else None,
        m.low,
        m.high,
        m.unit,
        m.n,
        redact_text(verdict.reason),
    )


def _joined(names: Any) -> str | None:
    return redact_text(", ".join(sorted({str(name) for name in names if name}))) or None
