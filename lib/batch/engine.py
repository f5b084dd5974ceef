"""What runs tasks: in processes of this machine, or somewhere else by the same few words."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from lib.batch.matrix import Cell
from lib.batch.tasks import Identity, Task, TaskEvent, TaskRecord

Listener = Callable[[TaskEvent], None]
#: Engines of a matrix besides `local`: name to the module with `add_arguments(parser)` and `make_engine(args)`.
ENGINES = {"dask": "lib.batch.dask_options"}


def known_engines() -> list[str]:
    """`local`, and those whose module is there."""
    return ["local", *(name for name, module in ENGINES.items() if importlib.util.find_spec(module))]


class Engine(Protocol):
    """Runs tasks of a matrix. One object a run of `workbook run --matrix`; used from one thread.

    The session (lib.batch.session) decides what is to be done, keeps the ledger and writes the runs' indexes; an engine only
    decides where and when, by `lib.batch.execute.execute_task`, which is the same on every machine.
    """

    name: str

    def identify(self, cells: Sequence[Cell]) -> dict[str, Identity]:
        """By cell id what the host that will run it is, has installed, and holds as the model (lib.batch.identity).

        Raises:
            WorkbookError: a host can't be reached, or the hosts that would serve one cell differ.
        """
        ...

    def run(self, tasks: Sequence[Task], outputs: str, listen: Listener) -> Iterator[TaskRecord]:
        """Runs tasks, and yields the record of each as soon as it ends, in the order in which they end.

        Args:
            tasks: in an order in which what a task needs comes before it. A needed key that is not among them is done.
            outputs: a folder that every host sees, or a URL (s3://bucket/prefix).
            listen: called with events; may be called between yields only from the thread that iterates.

        Exactly one record a task: an attempt whose host was lost is repeated elsewhere and only the last one is yielded, or
        `lost` after the engine has given up. A task whose need did not end `done` is yielded as `skipped`.
        Closing the iterator early (Ctrl-C) ends what runs and leaves no server behind.
        """
        ...

    def close(self) -> None:
        """Frees what the engine holds; called once, also after an error."""
        ...
