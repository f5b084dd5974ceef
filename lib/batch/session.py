"""One run of a matrix: plans by content, hands tasks to an engine, keeps the ledger, the runs' indexes and the snapshot."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from lib.batch import attempts
from lib.batch.engine import Engine
from lib.batch.ledger import Ledger
from lib.batch.matrix import Cell, LeftOut
from lib.batch.outputs import RunFiles, local_copy
from lib.batch.resume import CellPlan, plan_cell
from lib.batch.snapshot import CellView, Snapshot, TaskView
from lib.batch.sources import lib_sha256, notebook_sha256
from lib.batch.storage import StoreError, is_url, store_of
from lib.batch.tasks import Task, TaskEvent, TaskRecord, ended, plan_tasks
from lib.errors import WorkbookError
from lib.hosts import local
from lib.results import new_run_id
from lib.runner import only_run

SNAPSHOTS = ".matrix"
#: The snapshot is written, and a view called, at most this often while nothing ends.
REFRESH_S = 0.5
#: Times as long as a showing takes, it waits until the next: a matrix of thousands is shown less often.
BUSY = 20.0
View = Callable[[Snapshot], None]


class Session:
    """A matrix, an engine and a place for outputs; `plan` asks and reads, `run` does what the plan says."""

    def __init__(
        self, name: str, cells: Sequence[Cell], left_out: Sequence[LeftOut], engine: Engine, outputs: str
    ) -> None:
        self.name, self.cells, self.left_out, self.engine = name, list(cells), list(left_out), engine
        named = store_of(outputs)  # as it was written, so that a mistake in it is told as such
        self.outputs = outputs if is_url(outputs) else str(Path(outputs).resolve())
        self.store = named if is_url(outputs) else store_of(self.outputs)
        self.here = local_copy(self.store)
        self.view: View | None = None
        self.began = time.time()
        self.plans: list[CellPlan] = []
        self._views: dict[str, TaskView] = {}
        self._shown = self._cost = 0.0
        self._state = "running"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else on this machine runs anything into these outputs meanwhile.

        Raises:
            Busy: somebody does.
        """
        with only_run(self.here, f"matrix {self.name}"):
            yield

    # planning --------------------------------------------------------------------------------------------------------------
    def plan(self) -> list[CellPlan]:
        """What is kept, taken over and to be done, cell by cell; takes in what an engine committed before it was gone."""
        self.ledger = Ledger(self.store, self.here)
        identities = self.engine.identify(self.cells)
        numbers = sorted({number for cell in self.cells for number in cell.params})
        code = {n: {"notebook": notebook_sha256(n), "lib": lib_sha256(n)} for n in numbers}
        tasks = {cell.id: plan_tasks(cell, "", identities[cell.id], code) for cell in self.cells}
        self._recover([task for planned in tasks.values() for task in planned])
        there: dict[str, set[str]] = {}

        def present(record: TaskRecord) -> bool:
            run = f"{record.cell}/{record.run_id}"
            if run not in there:
                there[run] = set(self.store.children(run))
            return f"{record.number}.result.json" in there[run]

        self._known = runs = self.ledger.runs()
        self.plans = [plan_cell(c, tasks[c.id], runs.get(c.id, {}), present, _new_id) for c in self.cells]
        for task in [task for plan in self.plans for task in plan.todo]:
            self.ledger.forget(task.key)  # done once, but its files are nowhere any more: it may be done again
        return self.plans

    def _recover(self, tasks: Sequence[Task]) -> None:
        """Attempts that were finished, but whose session was gone before it put them down or into their run."""
        for task in tasks:
            record = self.ledger.done.get(task.key)
            if record is None:
                left = attempts.committed(self.store, task.key)
                if left is not None and self.ledger.add(left):
                    attempts.publish(self.store, left)
            elif record.attempt and (left := attempts.read_commit(self.store, record.key, record.attempt)):
                attempts.publish(self.store, left)

    # running ---------------------------------------------------------------------------------------------------------------
    def run(self, view: View | None = None) -> list[RunFiles]:
        """Does what the plan says; returns the cells' runs, each with its index written.

        Raises:
            KeyboardInterrupt: after what ran is gone and every index is written.
            WorkbookError: the engine or the store can't go on; what is done is kept.
        """
        self.view = view
        self._views = {
            self._slot(plan.cell.id, number): TaskView(number=number, state="waiting")
            for plan in self.plans
            for number in plan.cell.params
        }
        self.files = {plan.cell.id: RunFiles(self.store, self.here, plan.cell, plan.run_id) for plan in self.plans}
        for plan in self.plans:
            self._begin(plan)
        todo = [task for plan in self.plans for task in plan.todo]
        self._tasks = {task.key: task for task in todo}
        self._left = {plan.cell.id: {task.key for task in plan.todo} for plan in self.plans}
        self._show(now=True)
        ended_well = False
        stream = self.engine.run(todo, self.outputs, self._listen)
        try:
            for record in stream:
                self._take(record)
            for key in [key for keys in self._left.values() for key in keys]:
                self._take(ended(self._tasks[key], "lost", "the engine ended without a word about it"))
            ended_well = True
        finally:
            close = getattr(stream, "close", None)
            if close is not None and not ended_well:
                close()
            self._finish(ended_well)
        return list(self.files.values())

    def _begin(self, plan: CellPlan) -> None:
        files = self.files[plan.cell.id]
        if plan.todo and plan.run_id not in self._known.get(plan.cell.id, {}):
            self.ledger.add(
                ended(plan.todo[0], "began")
            )  # so that a run which is cut off in its first task is found again
        for taken in plan.taken:
            record = attempts.take_over(self.store, taken, plan.cell.id, plan.run_id)
            self.ledger.add(record)
            files.put(record)
        for record in plan.kept:
            files.put(record)
        for record in [*plan.kept, *plan.taken]:
            self._set(plan.cell.id, record.number, state="kept", seconds=record.seconds)
        if plan.todo or plan.taken:
            files.write_index("running")
        if plan.taken and not plan.todo:
            files.close()

    def _listen(self, event: TaskEvent) -> None:
        task = self._tasks.get(event.key)
        if task is None:
            return
        if event.state == "started":
            self._set(task.cell, task.number, state="running", host=event.host, since=time.time(), text="")
        else:
            self._set(task.cell, task.number, text=event.text[:100])
        self._show(now=event.state == "started")

    def _take(self, record: TaskRecord) -> None:
        """Puts a record down, and its files into their run."""
        task = self._tasks[record.key]
        if record.state == "done" and record.identity is not None and record.identity.host != task.identity.host:
            found = "it ran on other hardware than its key was made for"
            record = record.model_copy(update={"state": "failed", "error": found})
        if record.state == "done" and not self.ledger.add(record):
            attempts.discard(self.store, record)
            record = self._from_elsewhere(self.ledger.done[record.key], task)
        elif record.state == "done":
            attempts.publish(self.store, record)
        elif record.state != "skipped":
            self.ledger.add(record)
            if record.files:
                attempts.publish(self.store, record)
        files = self.files[task.cell]
        files.put(record)
        self._set(
            task.cell, task.number, state=record.state, seconds=record.seconds, host=record.host, text=record.error or ""
        )  # fmt: skip
        self._left[task.cell].discard(record.key)
        if self._left[task.cell]:
            files.write_index("running")
        else:
            files.close()
        self._show(now=True)

    def _from_elsewhere(self, winner: TaskRecord, task: Task) -> TaskRecord:
        """The record of a task that somebody else put down first."""
        if left := attempts.read_commit(self.store, winner.key, winner.attempt):
            attempts.publish(self.store, left)
        if winner.run_id == task.run_id:
            return winner
        record = attempts.take_over(self.store, winner, task.cell, task.run_id)
        self.ledger.add(record)
        return record

    def _finish(self, ended_well: bool) -> None:
        """Writes what is left to write; also on the way out of an error."""
        for cell, keys in self._left.items():
            for key in keys:
                number = self._tasks[key].number
                if self._views[self._slot(cell, number)].state == "running":
                    self._set(cell, number, state="interrupted")
                    self.files[cell].interrupted(number)
            if keys:
                with contextlib.suppress(StoreError):  # the first error is the one that is told
                    self.files[cell].close("interrupted")
        states = {view.state for view in self._views.values()}
        bad = states & {"failed", "skipped", "lost"}
        self._state = "interrupted" if not ended_well else "failed" if bad else "done"
        self._show(now=True)

    # what is seen ----------------------------------------------------------------------------------------------------------
    @staticmethod
    def _slot(cell: str, number: str) -> str:
        return f"{cell} {number}"

    def _set(self, cell: str, number: str, **changes: object) -> None:
        slot = self._slot(cell, number)
        self._views[slot] = self._views[slot].model_copy(update=changes)

    def snapshot(self) -> Snapshot:
        """How far it is."""
        me = local.process_id(os.getpid())
        cells = [
            CellView(
                id=plan.cell.id,
                run_id=plan.run_id,
                tasks=[self._views[self._slot(plan.cell.id, number)] for number in plan.cell.params],
            )
            for plan in self.plans
        ]
        return Snapshot(
            matrix=self.name,
            state=self._state,
            pid=os.getpid(),
            pid_start_time=me.start_time if me else None,
            engine=self.engine.name,
            outputs=self.outputs,
            began=self.began,
            updated=time.time(),
            cells=cells,
            left_out={one.id: one.why for one in self.left_out},
        )

    def _show(self, now: bool = False) -> None:
        began = time.monotonic()
        if began - self._shown < max(0.0 if now else REFRESH_S, BUSY * self._cost) and self._state == "running":
            return
        made = self.snapshot()
        with contextlib.suppress(OSError):  # a view less is no reason to end a measurement
            local.write_atomic(self.here / SNAPSHOTS / f"{self.name}.json", made.model_dump_json())
        if self.view is not None:
            self.view(made)
        self._shown = time.monotonic()
        self._cost = self._shown - began


def _new_id(known: Collection[str]) -> str:
    """An id for a new run, unlike those that are known even where two begin within a second."""
    made = new_run_id()
    taken = sum(run.startswith(made) for run in known)
    return f"{made}-{taken + 1}" if taken else made


def read_snapshot(outputs: Path, name: str | None = None) -> Snapshot | None:
    """The latest snapshot below an outputs folder, of one matrix if it is named; None if there is none.

    Raises:
        WorkbookError: it can't be read.
    """
    found = sorted((outputs / SNAPSHOTS).glob(f"{name or '*'}.json"), key=lambda f: f.stat().st_mtime)
    if not found:
        return None
    try:
        return Snapshot.model_validate_json(found[-1].read_text())
    except (OSError, ValueError) as error:
        raise WorkbookError(
            f"a snapshot in {found[-1].name}", str(error).splitlines()[0], "run the matrix again"
        ) from error
