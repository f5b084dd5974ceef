"""Tasks on this machine, one after the other, each notebook in a process of its own."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable, Iterator, Sequence

from lib.batch.engine import Listener
from lib.batch.execute import execute_task
from lib.batch.identity import identify
from lib.batch.matrix import Cell
from lib.batch.tasks import Identity, Task, TaskEvent, TaskRecord, ended


class LocalEngine:
    """Fulfils `lib.batch.engine.Engine`. Servers may be on other hosts, where a cell's profile says so; one runs at a time."""

    name = "local"

    def identify(self, cells: Sequence[Cell]) -> dict[str, Identity]:
        """By cell id what its host is and has, asked from here."""
        return {cell.id: identify(cell) for cell in cells}

    def run(self, tasks: Sequence[Task], outputs: str, listen: Listener) -> Iterator[TaskRecord]:
        """Runs tasks in the given order and yields each one's record."""
        lacking: set[str] = set()
        here = socket.gethostname()
        for task in tasks:
            if missing := [key for key in task.needs if key in lacking]:
                lacking.add(task.key)
                yield ended(
                    task, "skipped", f"{len(missing)} of the notebooks that it reads did not end well", host=here
                )
                continue
            listen(TaskEvent(key=task.key, state="started", host=here))
            record = execute_task(task, outputs, uuid.uuid4().hex[:12], say=_say(task, listen, here))
            if record.state != "done":
                lacking.add(task.key)
            yield record

    def close(self) -> None:
        """Nothing is held."""


def _say(task: Task, listen: Listener, here: str) -> Callable[[str], None]:
    return lambda text: listen(TaskEvent(key=task.key, state="progress", host=here, text=text))
