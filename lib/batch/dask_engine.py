"""`--engine dask`: the tasks of a matrix on the workers of a dask.distributed scheduler, each host with one measurement at a time.

A worker says which hosts of the matrix it serves by its resources: `host-NAME=1`, and `GPU=8` where tasks share it. A task
that has its host for itself takes the whole of `host-NAME`, a shared one takes a small part of it and its GPUs. Several
workers on different machines may serve one NAME: then a lost machine's tasks go to the others.

Once in the record: the scheduler repeats a task whose worker is gone, each attempt commits its files by itself
(lib.batch.execute), and only the attempt whose result comes through the scheduler is yielded. Another committed attempt of
the same task, such as of a host that was only cut off, is a late duplicate: dropped, and named on standard error.
"""

from __future__ import annotations

import contextlib
import json
import queue
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed import Client, Future

from lib.batch import dask_worker
from lib.batch.dask_cluster import end
from lib.batch.dask_flow import Flow
from lib.batch.engine import Listener
from lib.batch.hand_over import HOST, host_names, sharing_faults, taken
from lib.batch.matrix import Cell
from lib.batch.storage import is_url, store_of
from lib.batch.tasks import Identity, Task, TaskRecord
from lib.errors import BadInput, HostError, WorkbookError


class DaskEngine:
    """Runs tasks on a scheduler's workers (see `lib.batch.engine.Engine`).

    Args:
        client: connected to the scheduler.
        cluster: what was started for this run and ends with it; None where the scheduler was there before.
        wait_s: how long a task waits for a worker that serves its host, before it is `lost`.
    """

    name = "dask"

    def __init__(self, client: Client, cluster: Any = None, wait_s: float = 120.0) -> None:
        self.client, self.cluster, self.wait_s = client, cluster, wait_s
        self.events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.topic = f"workbook-{uuid.uuid4().hex[:8]}"
        self.mark = f".seen/{self.topic}"
        client.subscribe_topic(self.topic, lambda event: self.events.put(("event", event[1])))
        info = client.scheduler_info(n_workers=0)
        self.address = str(info["address"])
        shown = client.dashboard_link if "dashboard" in info.get("services", {}) else "none (the scheduler has none)"
        sys.stderr.write(f"dask: scheduler {self.address}, dashboard {shown}\n")

    # what the hosts are ----------------------------------------------------------------------------------------------
    def workers(self) -> dict[str, Mapping[str, Any]]:
        """What the scheduler knows of each worker, by address."""
        return dict(self.client.scheduler_info(n_workers=-1)["workers"])

    def identify(self, cells: Sequence[Cell]) -> dict[str, Identity]:
        """What the workers that serve each cell's host have for it.

        Raises:
            BadInput: no worker serves a host, two workers share a machine, or one has other code than this one.
            HostError: hosts of one name differ, so that a measurement would depend on which of them took it.
        """
        served = self._await_hosts(list(dict.fromkeys(cell.resources.host for cell in cells)))
        self._check_workers({address for group in served.values() for address in group})
        asked: list[tuple[str, Future]] = []
        for name, group in served.items():
            mine = [cell.model_dump_json() for cell in cells if cell.resources.host == name]
            for address in group:
                future = self.client.submit(
                    dask_worker.identify_cells, mine, workers=[address], pure=False, resources={HOST + name: 1.0}
                )
                asked.append((address, future))
        found: dict[str, dict[str, Identity]] = {}
        for address, future in asked:
            for cell_id, text in self._answer(address, future).items():
                found.setdefault(cell_id, {})[address] = Identity.model_validate_json(text)
        if gone := sorted({cell.resources.host for cell in cells if cell.id not in found}):
            raise HostError(
                "a worker that says what its host is", f"those of {', '.join(gone)} went away", "run it again"
            )
        faults = [fault for cell_id, group in found.items() if (fault := _difference(cell_id, group))]
        if faults:
            raise HostError("hosts of one name that are alike", "; ".join(faults), "give them names of their own")
        return {cell_id: next(iter(group.values())) for cell_id, group in found.items()}

    def _await_hosts(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Addresses of the workers that serve each host, once every one is served."""
        deadline = time.monotonic() + self.wait_s
        while True:
            workers = self.workers()
            served = {n: [a for a, w in workers.items() if n in host_names(w)] for n in names}
            lacking = [name for name, group in served.items() if not group]
            if not lacking:
                return served
            if time.monotonic() > deadline:
                there = sorted({name for w in workers.values() for name in host_names(w)})
                raise BadInput(
                    f"a worker for each host of the matrix, within {self.wait_s:g} s",
                    f"none serves {', '.join(lacking)}; {len(workers)} workers serve {', '.join(there) or 'nothing'}",
                    f"start one there: dask worker {self.address} --nthreads 1 "
                    f'--resources "{HOST}{lacking[0]}=1" (docs/dask.md)',
                )
            time.sleep(0.5)

    def _check_workers(self, addresses: set[str]) -> None:
        answers = self.client.run(dask_worker.about, workers=sorted(addresses), on_error="return")
        faults = [f"{a}: {type(v).__name__}: {v}" for a, v in answers.items() if not isinstance(v, dict)]
        if faults:
            raise BadInput(
                "this project on every worker", "; ".join(faults)[:600], "install the same version of it there"
            )
        code = dask_worker.code_sha256()
        other = sorted({v["machine"] for v in answers.values() if v["code"] != code})
        if other:
            raise BadInput(
                "the same version of this project on every worker",
                f"other code on {', '.join(other)}",
                "bring them to the same commit, without changes",
            )
        if shared := sharing_faults(
            self.workers(), {address: answer["machine"] for address, answer in answers.items()}
        ):
            raise BadInput(
                "one worker a machine, so that no host is shared by two measurements",
                "; ".join(shared),
                "start one worker on each machine, with one of each name that it serves and, for several names, --nthreads 1",
            )

    # tasks -----------------------------------------------------------------------------------------------------------
    def run(self, tasks: Sequence[Task], outputs: str, listen: Listener) -> Iterator[TaskRecord]:
        """Runs tasks; the next task of a host is handed over when one there ends, so that the scheduler holds few."""
        place = outputs if is_url(outputs) else str(Path(outputs).resolve())
        flow = Flow(self, tasks, place, listen)
        with self._seen(place):
            try:
                yield from flow.records()
            finally:
                flow.end()

    @contextlib.contextmanager
    def _seen(self, outputs: str) -> Iterator[None]:
        """A mark in the outputs for as long as they are used; every worker must see it.

        Raises:
            BadInput: a worker does not: the folder is another one there, or its store can't be reached.
        """
        store = store_of(outputs)
        store.put(self.mark, b"in use")
        try:
            serving = [address for address, worker in self.workers().items() if host_names(worker)]
            answers = self.client.run(dask_worker.blind, outputs, self.mark, workers=serving, on_error="return")
            if faults := sorted({str(why) for why in answers.values() if why is not None}):
                raise BadInput(
                    "outputs that every worker sees",
                    "; ".join(faults)[:600],
                    "name a folder that all share, or s3://BUCKET/PREFIX",
                )
            yield
        finally:
            store.remove(self.mark)

    def close(self) -> None:
        """Lets go of the scheduler; ends it and its workers where they were started for this run."""
        end(self.client, self.cluster)

    def submit(self, task: Task, outputs: str, submission: str, without: Sequence[str]) -> Future:
        """Hand a task to the scheduler, to any worker that serves its host except those named."""
        served = [a for a, w in self.workers().items() if task.resources.host in host_names(w)] if without else []
        allowed = [address for address in served if address not in without] or None
        future = self.client.submit(
            dask_worker.run_task, task.model_dump_json(), outputs, submission, self.topic, self.mark,
            key=f"{task.cell} {task.number}-{submission}-{len(without)}", resources=taken(task.resources), pure=False,
            workers=allowed, allow_other_workers=allowed is not None,
        )  # fmt: skip
        future.add_done_callback(lambda done: self.events.put(("done", str(done.key))))
        return future

    def _answer(self, address: str, future: Future) -> dict[str, str]:
        """What a worker says of its host; nothing if it goes away meanwhile. One that measures for others answers after that.

        Raises:
            WorkbookError: as raised there, or the worker or the scheduler failed.
        """
        while True:
            try:
                return dict(future.result(timeout=5))
            except WorkbookError:
                raise
            except Exception as error:  # noqa: BLE001  (whatever a worker raises, or the loss of the scheduler)
                if isinstance(error, TimeoutError) and not future.done():
                    if address in self.workers():
                        continue
                    return {}
                raise HostError("an answer of the worker", f"{type(error).__name__}: {str(error)[:300]}") from error


def _difference(cell_id: str, group: Mapping[str, Identity]) -> str | None:
    """What differs between the hosts of one cell, by its names; None if nothing does."""
    seen: dict[str, set[str]] = {}
    for identity in group.values():
        for part, values in identity.model_dump(mode="json").items():
            for name, value in values.items():
                seen.setdefault(f"{part}.{name}", set()).add(json.dumps(value, sort_keys=True))
    apart = [f"{name} ({' / '.join(sorted(values))[:120]})" for name, values in seen.items() if len(values) > 1]
    return f"{cell_id}: {', '.join(apart[:5])}" if apart else None
