"""Cells, and an engine that runs no notebook: it writes what one would leave, through the same attempts."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import nbformat

from lib.batch import attempts
from lib.batch.engine import Listener
from lib.batch.matrix import Cell, Resources
from lib.batch.storage import store_of
from lib.batch.tasks import Identity, Task, TaskEvent, TaskRecord, ended
from lib.params import NOTEBOOKS
from lib.records import Evidence, Measured, NotebookResult, Provenance, Status, Verdict

NOTEBOOK = nbformat.writes(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 + 1")])).encode()


def cell(name: str = "small", host: str = "here", **params: dict[str, Any]) -> Cell:
    """A cell with notebooks 01, 03 and 06."""
    files: dict[str, dict[str, Any]] = {"01": {}, "03": {"concurrency": [1]}, "06": {}}
    return Cell(
        id=f"m.model.{host}.{name}",
        model="model",
        host=host,
        configuration=name,
        profile={"title": "x", "server": {"model": "m", "flags": {"max_total_tokens": len(name)}}},
        params={**files, **{k.removeprefix("n"): v for k, v in params.items()}},
        resources=Resources(host=host),
    )


def result(task: Task, status: Status = Status.PASS) -> NotebookResult:
    """A valid result of a notebook that saw one thing."""
    number = task.number
    now = "2026-01-01T00:00:00+00:00"
    return NotebookResult(
        notebook=number, title=NOTEBOOKS[number], question="?", run_id=task.run_id, profile=task.cell, started=now, ended=now,
        seconds=1.0, server_seconds=0.5, recommendation="keep it",
        provenance=Provenance(
            commit=None, dirty=None, workbook_version="0", python="3.11", packages_sha256="0", params_sha256="0",
            params=task.params, host={},
        ),
        verdicts=[
            Verdict(
                id="saw", claim="it saw", status=status, reason="counted", measured=Measured(value=4, n=1),
                evidence=[Evidence(path=f"raw/{number}/log.txt", line=1)],
            )
        ],
    )  # fmt: skip


class FakeEngine:
    """Runs tasks at once; `fate(task)` may say another state, raise, or return a status of the verdict."""

    name = "fake"

    def __init__(self, fate: Callable[[Task], Any] = lambda task: "done", identity: Identity | None = None) -> None:
        self.fate, self.identity = fate, identity or Identity(host={"cpu": "one"}, stack={"01": 1}, model={"01": 1})
        self.ran: list[str] = []
        self.needs_seen: dict[str, list[str]] = {}

    def identify(self, cells: Sequence[Cell]) -> dict[str, Identity]:
        return {one.id: self.identity for one in cells}

    def run(self, tasks: Sequence[Task], outputs: str, listen: Listener) -> Iterator[TaskRecord]:
        lacking: set[str] = set()
        for task in tasks:
            if lacking & set(task.needs):
                lacking.add(task.key)
                yield ended(task, "skipped", "what it reads failed")
                continue
            listen(TaskEvent(key=task.key, state="started", host="fake-1"))
            fate = self.fate(task)
            self.ran.append(f"{task.cell.rpartition('.')[2]} {task.number}")
            if task.needs:
                there = store_of(outputs).children(f"{task.cell}/{task.run_id}")
                self.needs_seen[task.cell] = [n for n in ("01", "03") if f"{n}.result.json" in there]
            if fate == "lost":
                lacking.add(task.key)
                yield ended(task, "lost", "its host is gone")
                continue
            record = self.attempt(task, outputs, fate)
            if record.state != "done":
                lacking.add(task.key)
            yield record

    def attempt(self, task: Task, outputs: str, fate: Any = "done") -> TaskRecord:
        """One committed attempt."""
        store, name = store_of(outputs), uuid.uuid4().hex[:12]
        home = f"{attempts.place(task.key, name)}/{task.run_id}"
        status = fate if isinstance(fate, Status) else Status.PASS
        files = {
            f"{task.number}.ipynb": NOTEBOOK,
            f"raw/{task.number}/log.txt": f"{task.cell} {task.number}\n".encode(),
            f"raw/{task.number}/bytes.bin": bytes(range(256)),
        }
        if fate != "failed":
            files[f"{task.number}.result.json"] = result(task, status).model_dump_json().encode()
        for path, data in files.items():
            store.put(f"{home}/{path}", data)
        record = ended(
            task, "failed" if fate == "failed" else "done", "cell 3: boom" if fate == "failed" else None, name
        )
        record = record.model_copy(
            update={
                "identity": task.identity,
                "ended": "2026-01-01T00:00:00+00:00",
                "seconds": 1.0,
                "files": {path: len(data) for path, data in files.items()},
            }
        )
        attempts.commit(store, record)
        return record

    def close(self) -> None:
        """Nothing is held."""
