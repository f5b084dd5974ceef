"""An index over all runs below the outputs folder, and what became of a profile's results from run to run.

The index is one SQLite file, `outputs/.index.sqlite`: derived, deleted at will, made again by `workbook history --rescan`.
A run enters it when it ends; opening it looks only for run folders that it does not know and for runs that had not ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lib.errors import UnreadableFile, WorkbookError
from lib.outputs import EXAMPLES, REPLAYS
from lib.records import Measured, Status

INDEX = ".index.sqlite"
VERSION = 2
#: States of a run that has ended: its files are not looked at again, except by a rescan.
ENDED = ("done", "failed")
KEPT_EVERY = 500
_SCHEMA = """
CREATE TABLE runs (
    path TEXT PRIMARY KEY, profile TEXT NOT NULL, run_id TEXT NOT NULL, started TEXT, ended TEXT, state TEXT, seconds REAL,
    commit_id TEXT, dirty INTEGER, sglang TEXT, model TEXT, gpus TEXT, stamp TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX runs_by_profile ON runs (profile, started);
CREATE INDEX runs_by_start ON runs (started, path);
CREATE TABLE results (
    path TEXT NOT NULL REFERENCES runs (path) ON DELETE CASCADE, notebook TEXT NOT NULL, id TEXT NOT NULL, claim TEXT,
    status TEXT NOT NULL, value REAL, low REAL, high REAL, unit TEXT, n INTEGER, reason TEXT,
    PRIMARY KEY (path, notebook, id)
) WITHOUT ROWID;
"""


@contextlib.contextmanager
def opened(root: Path) -> Iterator[sqlite3.Connection]:
    """The index below an outputs folder, made if it is missing, of another version or no database.

    Raises:
        UnreadableFile: the folder can't be read or written, or the index is locked for more than 10 s.
    """
    file = root / INDEX
    connection: sqlite3.Connection | None = None
    try:
        root.mkdir(parents=True, exist_ok=True)
        connection = _connected(file)
        with connection:
            yield connection
    except (sqlite3.Error, OSError) as error:
        raise UnreadableFile(
            f"an index of runs at {file.name}", str(error), "delete it and run `workbook history --rescan`"
        ) from error
    finally:
        if connection is not None:
            connection.close()


def _connected(file: Path) -> sqlite3.Connection:
    for attempt in (1, 2):
        connection = sqlite3.connect(file, timeout=10)
        try:
            connection.execute("PRAGMA foreign_keys = ON")
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version == VERSION:
                return connection
            if version == 0 and not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
                return connection
        except sqlite3.OperationalError as error:
            if "locked" in str(error) or "already exists" in str(error):
                if "already exists" in str(error):  # made by somebody else just now
                    connection.close()
                    continue
                connection.close()
                raise
        except sqlite3.DatabaseError:
            pass
        connection.close()
        if attempt == 1:  # another version, or no database: it is derived, so it is made again
            file.unlink(missing_ok=True)
    raise sqlite3.DatabaseError("the index can't be made")


def index_run(connection: sqlite3.Connection, root: Path, folder: Path) -> None:
    """Put one run into the index, in place of what it said of it before."""
    from lib.report.index_rows import index_rows  # only where runs are read: opening the index imports little

    path = str(folder.relative_to(root))
    run, results = index_rows(folder, path)
    connection.execute("DELETE FROM results WHERE path = ?", (path,))
    connection.execute(f"INSERT OR REPLACE INTO runs VALUES ({_marks(run)})", run)  # noqa: S608  (question marks)
    connection.executemany(
        "INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        results,
    )


def _marks(row: Sequence[Any]) -> str:
    return ", ".join("?" * len(row))


def refresh(connection: sqlite3.Connection, root: Path, profile: str | None = None, rescan: bool = False) -> int:
    """Take in runs that the index lacks, and runs that had not ended when it saw them; returns how many it read.

    What was read is kept every `KEPT_EVERY` runs, so an interrupted first look goes on where it stopped.

    Args:
        profile: only this one.
        rescan: also look whether any known run's files changed, and forget runs whose folder is gone.
    """
    read = 0
    known = _known(connection, profile)
    seen: set[str] = set()
    for folder in _profiles(root, profile):
        with os.scandir(folder) as entries:
            names = [e.name for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")]
        for name in names:
            path = f"{folder.name}/{name}"
            seen.add(path)
            if known.get(path) in ENDED and not rescan:
                continue
            run = folder / name
            if path in known and _same_files(connection, path, run):
                continue
            if (run / "result.json").exists():
                index_run(connection, root, run)
                read += 1
                if read % KEPT_EVERY == 0:
                    connection.commit()
    if rescan:
        connection.executemany("DELETE FROM runs WHERE path = ?", [(path,) for path in known if path not in seen])
    return read


def _known(connection: sqlite3.Connection, profile: str | None) -> dict[str, str]:
    """The state of each run that the index has, by path."""
    where, arguments = ("WHERE profile = ?", [profile]) if profile else ("", [])
    return dict(connection.execute(f"SELECT path, state FROM runs {where}", arguments))  # noqa: S608  (no user's value)


def _same_files(connection: sqlite3.Connection, path: str, folder: Path) -> bool:
    from lib.report.index_rows import stamp_of

    return connection.execute("SELECT stamp FROM runs WHERE path = ?", (path,)).fetchone()[0] == stamp_of(folder)


def _profiles(root: Path, profile: str | None) -> list[Path]:
    if profile is not None:
        return [root / profile] if profile not in (EXAMPLES, REPLAYS) and (root / profile).is_dir() else []
    with os.scandir(root) as entries:
        names = [e.name for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")]
    return sorted(root / name for name in names if name not in (EXAMPLES, REPLAYS))


def record_run(root: Path, folder: Path) -> str | None:
    """Put a run that just ended into the index; returns why it could not be, which is no reason to fail the run."""
    try:
        if not folder.resolve().is_relative_to(root.resolve()) or folder.parent.name in (EXAMPLES, REPLAYS):
            return None
        with opened(root) as connection:
            index_run(connection, root.resolve(), folder.resolve())
    except (WorkbookError, OSError) as error:
        return f"not in the index of runs: {error}"
    return None


def run_rows(connection: sqlite3.Connection, profile: str | None, limit: int) -> list[dict[str, Any]]:
    """The latest runs, newest first, with the count of each verdict."""
    where, arguments = ("WHERE profile = ?", [profile]) if profile else ("", [])
    runs = connection.execute(
        "SELECT path, profile, run_id, started, state, seconds, commit_id, dirty, sglang, model, gpus FROM runs "
        f"{where} ORDER BY started DESC, path DESC LIMIT ?",  # noqa: S608  (no value of a user's in it)
        [*arguments, limit],
    ).fetchall()
    out = []
    for path, name, run_id, started, state, seconds, commit, dirty, sglang, model, gpus in runs:
        counts = dict(
            connection.execute(
                "SELECT status, count(*) FROM results WHERE path = ? GROUP BY status", (path,)
            ).fetchall()
        )
        out.append({
            "path": path, "profile": name, "run": run_id, "started": started, "state": state, "seconds": seconds,
            "commit": f"{commit[:12]}{' + changes' if dirty else ''}" if commit else None, "sglang": sglang, "model": model,
            "gpus": gpus, "counts": {s.value: counts.get(s.value, 0) for s in Status if counts.get(s.value)},
        })  # fmt: skip
    return out


def result_series(connection: sqlite3.Connection, paths: Sequence[str]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Results of these runs by notebook and claim, in the order of the runs."""
    place = {path: i for i, path in enumerate(paths)}
    series: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for path in paths:
        for notebook, key, claim, status, value, low, high, unit, n, reason in connection.execute(
            "SELECT notebook, id, claim, status, value, low, high, unit, n, reason FROM results WHERE path = ?", (path,)
        ):
            measured = (
                Measured(value=value, low=low, high=high, unit=unit or "", n=n)
                if value is not None
                else Measured(value=None, reason=reason)
            )
            series.setdefault((notebook, key), []).append(
                {"path": path, "place": place[path], "claim": claim, "status": Status(status), "measured": measured}
            )
    return dict(sorted(series.items()))


def as_json(runs: Sequence[dict[str, Any]], series: dict[tuple[str, str], list[dict[str, Any]]]) -> str:
    """Runs and results as one JSON object (docs/history.md)."""
    return json.dumps(
        {
            "schema": "workbook.history/1",
            "runs": list(runs),
            "results": [
                {
                    "notebook": notebook, "id": key, "claim": points[-1]["claim"],
                    "points": [
                        {"path": p["path"], "status": p["status"].value, "measured": p["measured"].model_dump(mode="json")} for p in points
                    ],
                }
                for (notebook, key), points in series.items()
            ],
        },
        ensure_ascii=False,
    )  # fmt: skip
