"""How far a matrix is, as one small file that its session keeps up to date and anybody may read (`workbook status`)."""

from __future__ import annotations

from lib.records import Record

#: State of a task to the mark that stands for it in a row.
MARKS = {
    "waiting": ".", "running": ">", "done": "+", "kept": "=", "failed": "x", "skipped": "-", "interrupted": "!", "lost": "?",
}  # fmt: skip
#: States in which a task is not going to change any more.
ENDED = ("done", "kept", "failed", "skipped", "interrupted", "lost")


class TaskView(Record):
    """One task: its state, where, since when, how long, and what it is doing."""

    number: str
    state: str
    host: str = ""
    since: float | None = None
    seconds: float | None = None
    text: str = ""


class CellView(Record):
    """One cell and its tasks in order."""

    id: str
    run_id: str
    tasks: list[TaskView]


class Snapshot(Record):
    """The whole matrix at one moment."""

    matrix: str
    state: str
    pid: int
    pid_start_time: float | None
    engine: str
    outputs: str
    began: float
    updated: float
    cells: list[CellView]
    left_out: dict[str, str] = {}


def lines(snapshot: Snapshot, now: float, width: int = 120, height: int | None = None) -> list[str]:
    """The matrix as lines of text: one row a cell, one mark a notebook; then what runs now and what failed.

    Args:
        snapshot: what to show.
        now: seconds since the epoch.
        width: characters of a line; longer ones are cut.
        height: lines at most; rows of cells that have ended are left out first, and counted.
    """
    tasks = [task for cell in snapshot.cells for task in cell.tasks]
    ended = sum(task.state in ENDED for task in tasks)
    counts = ", ".join(f"{sum(t.state == s for t in tasks)} {s}" for s in MARKS if any(t.state == s for t in tasks))
    head = f"{snapshot.matrix} on {snapshot.engine}: {snapshot.state}, {ended}/{len(tasks)} tasks, {now - snapshot.began:.0f} s ({counts})"
    active = [_active(c, t, now) for c in snapshot.cells for t in c.tasks if t.state in ("running", "failed", "lost")]
    rows = [(c, f"  {''.join(MARKS[t.state] for t in c.tasks):8} {c.id}") for c in snapshot.cells]
    room = None if height is None else max(0, height - len(active) - 2)
    shown = rows
    if room is not None and len(rows) > room:
        open_rows = [r for r in rows if any(t.state not in ENDED for t in r[0].tasks)]
        shown = open_rows[: max(0, room - 1)]
    left = [f"  ... {len(rows) - len(shown)} more cells"] if len(shown) < len(rows) else []
    made = [head, *(text for _, text in shown), *left, *active]
    return [line if len(line) <= width else f"{line[: width - 1]}~" for line in made[:height]]


def _active(cell: CellView, task: TaskView, now: float) -> str:
    took = now - task.since if task.state == "running" and task.since else task.seconds or 0.0
    where = f" on {task.host}" if task.host else ""
    return f"  {MARKS[task.state]} {cell.id} {task.number} {task.state}{where} {took:.0f} s  {task.text}"
