"""What of a cell is done, by content: which run goes on, what it takes over from earlier runs, what is left to do and why."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from lib.batch.matrix import Cell
from lib.batch.tasks import Task, TaskRecord, what_changed
from lib.records import Record

#: By run id, in the order in which runs began, the latest record of each notebook's task.
Runs = Mapping[str, Mapping[str, TaskRecord]]


class CellPlan(Record):
    """One cell's part of a run of the matrix."""

    cell: Cell
    run_id: str
    kept: list[TaskRecord] = []
    taken: list[TaskRecord] = []
    todo: list[Task] = []
    why: dict[str, str] = {}


def plan_cell(
    cell: Cell,
    tasks: Sequence[Task],
    runs: Runs,
    present: Callable[[TaskRecord], bool],
    new_id: Callable[[Collection[str]], str],
) -> CellPlan:
    """Which run of a cell goes on, and what it needs.

    A run that holds all that is wanted is complete. Else the latest run goes on, if everything tried in it is still wanted;
    else a new run begins, which takes over what is still wanted from earlier ones. A run that something was changed under is
    left as it was.

    Args:
        cell: the cell.
        tasks: its tasks in order, with any run id.
        runs: what the ledger says of its runs.
        present: whether the files of a record are there.
        new_id: an id for a new run, from those that are taken.
    """
    wanted = {task.number: task for task in tasks}
    done = {
        run: {n: r for n, r in records.items() if r.state == "done" and present(r)} for run, records in runs.items()
    }
    for run_id, records in reversed(done.items()):
        if all(number in records and records[number].key == task.key for number, task in wanted.items()):
            return CellPlan(cell=cell, run_id=run_id, kept=[records[number] for number in wanted])
    latest = next(reversed(done), None)
    goes_on = latest is not None and all(
        number in wanted and record.key == wanted[number].key for number, record in runs[latest].items()
    )
    run_id = latest if latest is not None and goes_on else new_id(runs)
    here = done.get(run_id, {})
    elsewhere = {record.key: record for records in done.values() for record in records.values()}
    taken = {n: elsewhere[t.key] for n, t in wanted.items() if n not in here and t.key in elsewhere}
    todo = [t.model_copy(update={"run_id": run_id}) for n, t in wanted.items() if n not in here and n not in taken]
    return CellPlan(
        cell=cell,
        run_id=run_id,
        kept=list(here.values()),
        taken=list(taken.values()),
        todo=todo,
        why={task.number: _why(task, runs) for task in todo},
    )


def _why(task: Task, runs: Runs) -> str:
    """Why a task is to be done: new, failed, cut off, or what changed since the latest record that says what it stood on."""
    records = [records[task.number] for records in runs.values() if task.number in records]
    if not records:
        return "new"
    same = [record for record in records if record.key == task.key]
    if same:
        return {
            "failed": "failed before",
            "gone": "its files are gone",
            "done": "its files are gone",
            "began": "cut off before",
        }.get(same[-1].state, f"{same[-1].state} before")
    changed = what_changed(task.parts, records[-1].parts)
    return f"changed: {', '.join(changed)}"
