"""One run of tasks on a dask scheduler: what is handed over, what has come back, what was lost, and the end of it."""

from __future__ import annotations

import contextlib
import queue
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distributed import Future
from distributed.scheduler import KilledWorker

from lib.batch import attempts, dask_worker
from lib.batch.engine import Listener
from lib.batch.hand_over import HandOver
from lib.batch.storage import store_of
from lib.batch.tasks import Task, TaskEvent, TaskRecord, ended
from lib.errors import HostError

if TYPE_CHECKING:
    from lib.batch.dask_engine import DaskEngine

#: On how many machines a task is tried when one can't run or store it.
TRIES = 3
#: Seconds between two looks at which workers there are; more where looking takes long.
LOOK_S = 2.0
#: Seconds that ended tasks get to see their servers gone when a run is broken off.
END_S = 70.0


@dataclass
class Going:
    """A task that the scheduler has."""

    task: Task
    submission: str
    future: Future
    failed_on: list[str] = field(default_factory=list)
    seen: list[dict[str, str]] = field(default_factory=list)


class Flow:
    """One call of `DaskEngine.run`."""

    def __init__(self, engine: DaskEngine, tasks: Sequence[Task], outputs: str, listen: Listener) -> None:
        self.engine, self.outputs, self.listen = engine, outputs, listen
        self.hand_over = HandOver(tasks)
        self.going: dict[str, Going] = {}
        self.by_submission: dict[str, Going] = {}
        self.next_look = 0.0
        self.unserved: dict[str, float] = {}
        self.repeated: list[tuple[Task, TaskRecord]] = []

    def records(self) -> Iterator[TaskRecord]:
        """The record of each task as it ends; what depends on it is handed over after its record was taken."""
        while self.hand_over.waiting() or self.going:
            self._look()
            for task in self.hand_over.next():
                self._submit(task, uuid.uuid4().hex[:6], [])
            for record in [*self._hear(), *self._without_host()]:
                yield record
                for task in self.hand_over.ended(record.key, record.state):
                    yield _record(task, "skipped", "a notebook that it reads did not end well")
        self._drop_duplicates()

    def _look(self) -> None:
        """Which workers there are, every few seconds."""
        now = time.monotonic()
        if now < self.next_look:
            return
        status = self.engine.client.status
        if status not in ("running", "connecting"):
            raise HostError("a scheduler that answers", f"the connection to it is {status}", "run it again")
        self.hand_over.update(self.engine.workers())
        after = time.monotonic()
        self.next_look = after + max(LOOK_S, 50 * (after - now))
        self.unserved = {name: self.unserved.get(name, now) for name in self.hand_over.unserved()}

    def _submit(self, task: Task, submission: str, without: Sequence[str]) -> None:
        future = self.engine.submit(task, self.outputs, submission, without)
        self.going[str(future.key)] = self.by_submission[submission] = Going(task, submission, future, list(without))

    def _without_host(self) -> Iterator[TaskRecord]:
        """Tasks whose host nobody has served for too long are lost."""
        now = time.monotonic()
        given_up = [name for name, since in self.unserved.items() if now - since > self.engine.wait_s]
        for name in given_up:
            del self.unserved[name]
            why = f"no worker has served its host {name} for {self.engine.wait_s:g} s"
            for key, going in list(self.going.items()):
                if going.task.resources.host == name:
                    going.future.cancel()
                    del self.going[key], self.by_submission[going.submission]
                    yield _record(going.task, "lost", why, going)
            for task in self.hand_over.give_up(name):
                yield _record(task, "lost", why)

    def _hear(self) -> Iterator[TaskRecord]:
        """What has come from workers and the scheduler; waits for it half a second at most."""
        with contextlib.suppress(queue.Empty):
            kind, what = self.engine.events.get(timeout=0.5)
            while True:
                if kind == "event":
                    self._event(what)
                elif what in self.going and (record := self._ended(what)) is not None:
                    yield record
                kind, what = self.engine.events.get_nowait()

    def _event(self, said: Mapping[str, str]) -> None:
        going = self.by_submission.get(said["attempt"][:6])
        if going is None:
            return
        if said["event"] in ("started", "taken over"):
            if going.seen and going.seen[-1]["worker"] not in going.failed_on:
                sys.stderr.write(
                    f"dask: {going.task.cell} {going.task.number}: its host {going.seen[-1]['machine']} is gone; "
                    f"{'its committed attempt is taken' if said['event'] == 'taken over' else 'again'} on {said['machine']}\n"
                )
            going.seen.append(dict(said))
        if said["event"] in ("started", "progress"):
            self.listen(TaskEvent(key=said["key"], state=said["event"], host=said["host"], text=said.get("text", "")))

    def _ended(self, name: str) -> TaskRecord | None:
        """The record of a task whose future has ended; None if it is tried again elsewhere."""
        going = self.going.pop(name)
        del self.by_submission[going.submission]  # and with it the future, whose result the scheduler lets go then
        task, status = going.task, going.future.status
        if status == "finished":
            record = TaskRecord.model_validate_json(going.future.result())
            if len(going.seen) > 1 or going.failed_on:
                self.repeated.append((task, record))
            return record
        if status != "error":
            raise HostError(
                "a scheduler that keeps its tasks",
                f"{task.cell} {task.number} is {status} there: it was restarted, or is gone",
                "run it again: what is done is kept",
            )
        error = going.future.exception()
        if isinstance(error, KilledWorker):
            return _record(
                task, "lost", f"its hosts went away one after the other, last {error.last_worker.address}", going
            )
        last = going.seen[-1] if going.seen else {}
        tried = [*going.failed_on, last.get("worker", "")]
        if isinstance(error, HostError) and len(tried) < TRIES:
            where = last.get("machine", "a worker")
            sys.stderr.write(f"dask: {task.cell} {task.number}: not on {where}: {error}; again elsewhere\n")
            self._submit(task, going.submission, tried)
            self.by_submission[going.submission].seen = going.seen
            return None
        return _record(task, "failed", f"{type(error).__name__}: {error}"[:2000], going)

    def _drop_duplicates(self) -> None:
        """Attempts of repeated tasks that were committed too late go; one line says so."""
        for task, record in self.repeated:
            for other in dask_worker.commits(self.outputs, task.key):
                if other.attempt != record.attempt:
                    attempts.discard(store_of(self.outputs), other)
                    sys.stderr.write(
                        f"dask: {task.cell} {task.number}: a late duplicate of {other.host} (attempt {other.attempt}) is dropped; "
                        f"in the record is attempt {record.attempt} of {record.host}\n"
                    )

    def end(self) -> None:
        """Break off what still runs, and wait until the workers say that it is gone."""
        if not self.going:
            return
        names = list(self.going)
        with contextlib.suppress(Exception):  # noqa: BLE001  (the scheduler may be what is gone)
            self.engine.client.cancel([g.future for g in self.going.values()], force=True)
            deadline = time.monotonic() + END_S
            while time.monotonic() < deadline:
                busy = self.engine.client.run(dask_worker.running, on_error="ignore")
                if not {name for group in busy.values() for name in group} & set(names):
                    break
                time.sleep(0.3)
        self.going.clear()


def _record(task: Task, state: str, why: str, going: Going | None = None) -> TaskRecord:
    """A record of a task of which no attempt gave one."""
    last = going.seen[-1] if going and going.seen else {}
    return ended(task, state, why, last.get("attempt", ""), last.get("host", ""))
