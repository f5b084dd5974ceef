"""Runs one task on the machine where it is called: the local engine and workers elsewhere use the same function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lib.batch.tasks import Task, TaskRecord


def execute_task(
    task: Task,
    outputs: str,
    attempt: str,
    scratch: Path | None = None,
    say: Callable[[str], None] | None = None,
) -> TaskRecord:
    """Runs a task and leaves its files as one committed attempt in `outputs`.

    Args:
        task: what to run. What it needs is read from the run's folder in `outputs`.
        outputs: a folder, or a URL of a store (lib.batch.storage).
        attempt: a new name, unique over all attempts anywhere (`uuid4().hex[:12]`).
        scratch: a local folder to work in, a new one below the temporary folder if None.
        say: called with a line of progress about every 0.3 s.

    Returns:
        `done`, or `failed` with the reason; a notebook that fails is no exception. Its files are up and committed before it
        returns: `OUTPUTS/.attempts/KEY/ATTEMPT/...` with `commit.json` (the record itself) written last.

    Raises:
        WorkbookError: nothing could be run or stored (store unreachable, disk full): worth another host.
        KeyboardInterrupt: after the notebook's process and its servers are gone.
    """
    raise NotImplementedError
