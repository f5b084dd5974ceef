"""Attempts at tasks: each writes to a place of its own, and only the one that the ledger took in becomes part of a run.

OUTPUTS/.attempts/KEY/ATTEMPT/RUN_ID/...    what an attempt wrote, as it lies in the run's folder
OUTPUTS/.attempts/KEY/ATTEMPT/commit.json   its record, written last
OUTPUTS/CELL/RUN_ID/...                     the run; result.json, its index, is written after the files that it names
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from lib.batch.storage import FolderStore, Store
from lib.batch.tasks import TaskRecord

ATTEMPTS = ".attempts"
COMMIT = "commit.json"


def place(key: str, attempt: str) -> str:
    """Path of an attempt below the store."""
    return f"{ATTEMPTS}/{key}/{attempt}"


def commit(store: Store, record: TaskRecord) -> None:
    """Says that an attempt's files are all there."""
    store.put(f"{place(record.key, record.attempt)}/{COMMIT}", record.model_dump_json().encode())


def read_commit(store: Store, key: str, attempt: str) -> TaskRecord | None:
    """The record that an attempt left, None if it did not get that far."""
    data = store.get(f"{place(key, attempt)}/{COMMIT}")
    if data is None:
        return None
    try:
        return TaskRecord.model_validate_json(data)
    except ValidationError:
        return None


def committed(store: Store, key: str) -> TaskRecord | None:
    """A `done` attempt at a task whose files are all there, though it is in no ledger: its engine was gone when it ended."""
    for attempt in store.children(f"{ATTEMPTS}/{key}"):
        record = read_commit(store, key, attempt)
        if record is not None and record.state == "done":
            return record
    return None


def publish(store: Store, record: TaskRecord) -> None:
    """Makes an attempt's files part of its run and removes the attempt; can be repeated if it was cut off.

    Its result comes last: a run that has NN.result.json has all that belongs to it.
    """
    source, target = f"{place(record.key, record.attempt)}/{record.run_id}", f"{record.cell}/{record.run_id}"
    for path in _result_last(record):
        store.copy(f"{source}/{path}", f"{target}/{path}")
    discard(store, record)


def _result_last(record: TaskRecord) -> list[str]:
    return sorted(record.files, key=lambda path: path == f"{record.number}.result.json")


def discard(store: Store, record: TaskRecord) -> None:
    """Removes an attempt's files; its commit goes first, so that no half attempt looks whole."""
    home = place(record.key, record.attempt)
    store.remove(f"{home}/{COMMIT}")
    if isinstance(store, FolderStore):
        shutil.rmtree(store.folder / home, ignore_errors=True)
        with contextlib.suppress(OSError):
            (store.folder / home).parent.rmdir()
        return
    for path in record.files:
        store.remove(f"{home}/{record.run_id}/{path}")


def take_over(store: Store, taken: TaskRecord, cell: str, run_id: str) -> TaskRecord:
    """Puts a finished task's files into another run of its cell too, and returns the record that says so."""
    for path in _result_last(taken):
        store.copy(f"{taken.cell}/{taken.run_id}/{path}", f"{cell}/{run_id}/{path}")
    origin = taken.taken_from or f"{taken.cell}/{taken.run_id}"
    return taken.model_copy(update={"cell": cell, "run_id": run_id, "taken_from": origin})


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Holds an attempt's folder; the operating system lets go when its process ends, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def abandoned(store: FolderStore, key: str) -> list[Path]:
    """Folders of attempts at a task that nobody works in and that were not finished, oldest first."""
    found = []
    for folder in (store.folder / ATTEMPTS / key).glob("*"):
        if (folder / COMMIT).exists() or not (folder / ".lock").exists():
            continue
        with (folder / ".lock").open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
        found.append(folder)
    return sorted(found, key=lambda f: f.stat().st_mtime)
