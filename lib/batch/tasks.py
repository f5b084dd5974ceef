"""A task: one notebook of one cell, with the tasks that it needs and a key over all that its result depends on."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from lib.batch.matrix import Resources
from lib.records import Record

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
    identity: Identity


class TaskRecord(Record):
    """How one attempt at a task ended; the ledger holds at most one `done` of a key."""

    key: str
    cell: str
    number: str
    run_id: str
    state: str = Field(
        description="done | failed | skipped (what it needs failed) | interrupted | lost (its host is gone)"
    )
    error: str | None = None
    attempt: str = Field(description="unique; names the folder of what this attempt wrote")
    host: str = Field(default="", description="name of the machine that ran it")
    identity: Identity | None = Field(default=None, description="as found there, after the fact")
    started: str | None = None
    ended: str | None = None
    seconds: float | None = None
    result_sha256: str | None = Field(default=None, description="of NN.result.json")
    files: dict[str, int] = Field(
        default={}, description="bytes of each file that belongs to it, by path in the run's folder"
    )


class TaskEvent(Record):
    """What a person may want to see while tasks run (`--watch`)."""

    key: str
    state: str = Field(description="started | progress")
    host: str = ""
    text: str = ""
