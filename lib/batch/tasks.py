"""A task: one notebook of one cell, with the tasks that it needs and a key over all that its result depends on.

    key = sha256(cell, notebook's code, lib as far as the notebook reaches it, parameters, profile, host, stack, model, needs' keys)

So a changed parameter of notebook 03 gives 03 and 06 (which reads 03's result) other keys, and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, model_validator

from lib.batch.matrix import Cell, Resources
from lib.records import Record

#: Names of folders: what came out of a store must not lead elsewhere.
NAME = r"^[A-Za-z0-9_=+-][A-Za-z0-9_=+.-]*$"
#: Keys of a profile that a person reads and nothing is measured by.
ONLY_READ = ("title",)

#: Notebooks whose results a notebook reads (`run.earlier()`): 06 speaks of all the others.
READS: dict[str, tuple[str, ...]] = {"06": ("01", "02", "03", "04", "05")}


class Identity(Record):
    """What a result depends on beyond files of this project, as found on the host that will run it."""

    host: dict[str, Any] = Field(default={}, description="hardware: CPU, memory, GPUs, driver; not the host's name")
    stack: dict[str, Any] = Field(default={}, description="SGLang's version and a hash over its environment's packages")
    model: dict[str, Any] = Field(default={}, description="fingerprint of the checkpoint's files")


class Task(Record):
    """One notebook of one cell; all that another machine with this project needs to run it."""

    key: str = Field(description="sha256 over what the result depends on: equal keys are the same measurement")
    cell: str
    number: str = Field(description="of the notebook: 01 to 06")
    run_id: str = Field(description="folder of the cell's run: outputs/CELL/RUN_ID/")
    needs: list[str] = Field(default=[], description="keys of tasks of the same run that end before this one begins")
    resources: Resources
    profile: dict[str, Any]
    params: dict[str, Any]
    identity: Identity = Field(description="as planned: of this notebook")
    parts: dict[str, str] = Field(default={}, description="hash of each thing that the key is made of, by what it is")


class TaskRecord(Record):
    """How one attempt at a task ended; the ledger holds at most one `done` of a key."""

    key: str = Field(pattern=r"^[0-9a-f]{64}$")
    cell: str = Field(pattern=NAME)
    number: str = Field(pattern=r"^[0-9]{2}$")
    run_id: str = Field(pattern=NAME)
    state: str = Field(
        description="done | failed | skipped (what it needs failed) | lost (its host is gone); only in the ledger: began (its run), "
        "gone (its files were removed)"
    )
    error: str | None = None
    attempt: str = Field(pattern=r"^[A-Za-z0-9_-]*$", description="unique; names the folder of what this attempt wrote")
    host: str = Field(default="", description="name of the machine that ran it")
    identity: Identity | None = Field(default=None, description="as found there, after the fact")
    started: str | None = None
    ended: str | None = None
    seconds: float | None = None
    parts: dict[str, str] = Field(default={}, description="as in the task")
    taken_from: str | None = Field(
        default=None, description="CELL/RUN_ID that this run took it over from; None: ran in this one"
    )
    result_sha256: str | None = Field(default=None, description="of NN.result.json")
    files: dict[str, int] = Field(
        default={}, description="bytes of each file that belongs to it, by path in the run's folder"
    )

    @model_validator(mode="after")
    def _stays_in_its_folder(self) -> TaskRecord:
        if out := [p for p in self.files if p.startswith("/") or not p or {"", ".", ".."} & set(p.split("/"))]:
            raise ValueError(f"paths lead out of the run's folder: {out[:3]}")
        return self


class TaskEvent(Record):
    """What a person may want to see while tasks run (`--watch`)."""

    key: str
    state: str = Field(description="started | progress")
    host: str = ""
    text: str = ""


def task_key(cell: str, number: str, parts: Mapping[str, str]) -> str:
    """The key of a task: sha256 over its cell, its notebook's number and its parts."""
    return hashlib.sha256(json.dumps([cell, number, sorted(parts.items())]).encode()).hexdigest()


def plan_tasks(
    cell: Cell,
    run_id: str,
    identity: Identity,
    code: Mapping[str, Mapping[str, str]],
    only: Sequence[str] | None = None,
) -> list[Task]:
    """The tasks of a cell in order, each with its key.

    Args:
        cell: with the notebooks that it has parameters for.
        run_id: of the run that they would belong to; no part of the key.
        identity: what the cell's host is and has.
        code: by number of the notebook: `notebook` and `lib`, hashes of what runs.
        only: numbers that are wanted; what they read of others counts only where those are wanted too.
    """
    tasks: dict[str, Task] = {}
    for number in cell.params if only is None else [n for n in cell.params if n in only]:
        needs = {n: tasks[n].key for n in READS.get(number, ()) if n in tasks}
        own = Identity(
            host=identity.host, stack={number: identity.stack.get(number)}, model={number: identity.model.get(number)}
        )
        profile = {k: v for k, v in cell.profile.items() if k not in ONLY_READ}
        parts = {
            **code[number],
            "parameters": digest(cell.params[number]),
            "profile": digest(profile),
            "host": digest(own.host),
            "stack": digest(own.stack),
            "model": digest(own.model),
            "needs": digest(needs),
        }
        tasks[number] = Task(
            key=task_key(cell.id, number, parts),
            cell=cell.id,
            number=number,
            run_id=run_id,
            needs=list(needs.values()),
            resources=cell.resources,
            profile=cell.profile,
            params=cell.params[number],
            identity=own,
            parts=parts,
        )
    return list(tasks.values())


def digest(value: Any) -> str:
    """Hash of a value that JSON can hold; the order of keys does not count."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def ended(task: Task, state: str, error: str | None = None, attempt: str = "", host: str = "") -> TaskRecord:
    """The record of a task that left no files: skipped, lost, interrupted."""
    return TaskRecord(
        key=task.key, cell=task.cell, number=task.number, run_id=task.run_id, state=state, error=error, attempt=attempt,
        host=host, parts=task.parts,
    )  # fmt: skip


def what_changed(parts: Mapping[str, str], earlier: Mapping[str, str]) -> list[str]:
    """Names of the parts that differ from an earlier record's: why a task runs again."""
    return [name for name in parts if parts[name] != earlier.get(name)]
