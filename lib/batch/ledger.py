"""The record of which task ended where: append-only, one JSON object a record, at most one `done` of a key.

In a folder it is `.ledger.jsonl` (one line a record, appended under a lock and synced); in an object store one object a record
below `.ledger/`, and `.done/KEY`, which can be made only once, says which attempt counts. Of an object store a copy is kept here,
so that opening it asks only for what is new.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from lib.batch.attempts import read_commit
from lib.batch.storage import FolderStore, Store
from lib.batch.tasks import TaskRecord
from lib.errors import UnreadableFile

LEDGER = ".ledger.jsonl"


class Ledger:
    """All records of one outputs folder or store, oldest first."""

    def __init__(self, store: Store, here: Path) -> None:
        """Opens it.

        Args:
            store: where runs are kept.
            here: the folder of the store, or the local copy of an object store.

        Raises:
            UnreadableFile: a line that is whole is no record.
            StoreError: the store can't be read.
        """
        self.store = store
        self.file = here / LEDGER
        self.remote = not isinstance(store, FolderStore)
        self.records: list[TaskRecord] = []
        self.done: dict[str, TaskRecord] = {}
        self._read = 0
        self._take_in()
        if self.remote:
            self._fetch()

    def add(self, record: TaskRecord) -> bool:
        """Appends a record; False, and nothing is written, for a second `done` of a key.

        Raises:
            StoreError: it can't be written.
        """
        if not self.remote:
            return self._append(record, None)
        if _counts(record) and not self._first(record):
            self._fetch()
            return False
        self._put(record)
        return True

    def forget(self, key: str) -> None:
        """Files of a key are gone everywhere (pruned): it may be done again."""
        earlier = self.done.get(key)
        if earlier is None:
            return
        if self.remote:
            self.store.remove(f".done/{key}.json")
        gone = earlier.model_copy(update={"state": "gone", "error": "its files are not there any more", "files": {}})
        if self.remote:
            self._put(gone)
        else:
            self._append(gone, None)

    def runs(self) -> dict[str, dict[str, dict[str, TaskRecord]]]:
        """By cell and run id, in the order in which runs began, the latest record of each notebook."""
        found: dict[str, dict[str, dict[str, TaskRecord]]] = {}
        for record in self.records:
            found.setdefault(record.cell, {}).setdefault(record.run_id, {})[record.number] = record
        return found

    def _first(self, record: TaskRecord) -> bool:
        """Whether this attempt is the one that counts, by an object that can be made only once."""
        name = f".done/{record.key}.json"
        if self.store.put_new(name, record.attempt.encode()):
            return True
        winner = (self.store.get(name) or b"").decode()
        if winner == record.attempt:
            return True
        self._fetch()
        if record.key not in self.done:  # its engine ended between the two writes: what it committed is put down now
            left = read_commit(self.store, record.key, winner)
            if left is None:
                self.store.put(name, record.attempt.encode())
                return True
            self._put(left)
        return False

    def _put(self, record: TaskRecord) -> None:
        now = datetime.datetime.now(datetime.UTC)
        name = f"{now:%Y%m%dT%H%M%S.%f}-{record.key[:12]}-{record.attempt or 'none'}.json"
        self.store.put(f".ledger/{name}", record.model_dump_json().encode())
        self._append(record, name)

    def _append(self, record: TaskRecord, name: str | None) -> bool:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._take_in()  # what another process appended meanwhile
            if _counts(record) and record.key in self.done:
                return False
            line = json.dumps({"object": name, **record.model_dump(mode="json", exclude_defaults=True)})
            start = b"" if _ends_a_line(file) else b"\n"  # a line that was cut off stays what it is: no record
            file.write(start + line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
            self._take_in()
        return True

    def _take_in(self) -> None:
        """Reads lines that were not read yet; the last one only if it is whole."""
        if not self.file.exists():
            return
        with self.file.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        end = data.rfind(b"\n") + 1
        for line in data[:end].splitlines():
            if line.strip():
                self._learn(line)
        self._read += end

    def _learn(self, line: bytes) -> None:
        try:
            content = json.loads(line)
            content.pop("object", None)
            record = TaskRecord.model_validate(content)
        except (ValueError, ValidationError):
            if not line.rstrip().endswith(b"}"):
                return  # cut off when its writer was killed; the next record begins on a line of its own
            raise UnreadableFile(
                f"records in {self.file.name}",
                f"a line that is none: {line[:60]!r}",
                "move the file away: its runs stay",
            ) from None
        self.records.append(record)
        if record.state == "gone":
            self.done.pop(record.key, None)
        elif record.state == "done":
            self.done.setdefault(record.key, record)

    def _fetch(self) -> None:
        """Takes in what others put into an object store since this copy was made."""
        known = set()
        if self.file.exists():
            for line in self.file.read_bytes().splitlines():
                if line.rstrip().endswith(b"}"):
                    known.add(json.loads(line).get("object"))
        for name in self.store.children(".ledger"):
            if name not in known and (data := self.store.get(f".ledger/{name}")) is not None:
                self._append(TaskRecord.model_validate_json(data), name)


def _counts(record: TaskRecord) -> bool:
    """Whether a record says that a task was done, not that another run took its files over."""
    return record.state == "done" and not record.taken_from


def _ends_a_line(file: BinaryIO) -> bool:
    size = file.seek(0, os.SEEK_END)
    if not size:
        return True
    file.seek(size - 1)
    return file.read(1) == b"\n"
