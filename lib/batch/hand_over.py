"""Which task is handed to a scheduler next: what a task needs has ended, and its host has room. No dask in it.

Handing over no more than fits keeps the scheduler's load independent of the size of the matrix, and gives each task to the
first worker that is free. The scheduler decides which worker that is; its resources are what keeps a host to one measurement.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lib.batch.matrix import Resources
from lib.batch.tasks import Task

#: The resource of a worker by which it serves a host of the matrix.
HOST = "host-"
#: What a task that shares its host takes of it: a power of two, so that many of them add up exactly.
SHARE = 1.0 / 1024


def host_names(worker: Mapping[str, Any]) -> set[str]:
    """Names of the hosts that a worker serves, by what the scheduler says of it."""
    return {name.removeprefix(HOST) for name in worker.get("resources") or {} if name.startswith(HOST)}


def taken(resources: Resources) -> dict[str, float]:
    """What a task takes of a worker: the whole host, or a small part of it and its GPUs."""
    host = HOST + resources.host
    if resources.exclusive:
        return {host: 1.0}
    return {host: SHARE} | ({"GPU": float(resources.gpus)} if resources.gpus else {})


def sharing_faults(workers: Mapping[str, Mapping[str, Any]], machines: Mapping[str, str]) -> list[str]:
    """Why these workers would let two measurements share a machine; empty if they would not.

    Args:
        workers: what the scheduler says of each, by address.
        machines: the machine that each is on, by address.
    """
    by_machine: dict[str, list[str]] = {}
    for address, machine in machines.items():
        by_machine.setdefault(machine, []).append(address)
    faults = [f"{m} has {len(g)} workers ({', '.join(sorted(g))})" for m, g in by_machine.items() if len(g) > 1]
    for address, machine in machines.items():
        worker = workers.get(address, {})
        names = sorted(host_names(worker))
        if len(names) > 1 and worker.get("nthreads", 1) > 1:
            faults.append(f"the worker on {machine} serves {', '.join(names)} with {worker['nthreads']} threads")
        if over := [n for n in names if worker["resources"][HOST + n] > 1]:
            faults.append(f"the worker on {machine} says that it has more than one of {', '.join(over)}")
    return faults


@dataclass
class _Room:
    """One host of the matrix: what its workers hold, and what is on them."""

    workers: int = 0
    threads: int = 0
    gpus: float = 0.0
    exclusive: int = 0
    shared: int = 0
    shared_gpus: int = 0

    def fits(self, wanted: Resources) -> bool:
        if wanted.exclusive:
            return self.shared == 0 and self.exclusive < self.workers
        return self.exclusive == 0 and self.shared < self.threads and self.shared_gpus + wanted.gpus <= self.gpus

    def add(self, wanted: Resources, sign: int = 1) -> None:
        if wanted.exclusive:
            self.exclusive += sign
        else:
            self.shared += sign
            self.shared_gpus += sign * wanted.gpus


class HandOver:
    """Tasks in their order: those that wait for others, those that are ready by host, and how much room each host has."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        keys = {task.key for task in tasks}
        self._missing = {task.key: sum(key in keys for key in task.needs) for task in tasks}
        self._dependents: dict[str, list[Task]] = {}
        self._ready: dict[str, deque[Task]] = {}
        self._rooms: dict[str, _Room] = {task.resources.host: _Room() for task in tasks}
        self._placed: dict[str, Resources] = {}
        self._blocked = 0
        for task in tasks:
            for key in task.needs:
                if key in keys:
                    self._dependents.setdefault(key, []).append(task)
            if self._missing[task.key]:
                self._blocked += 1
            else:
                self._ready.setdefault(task.resources.host, deque()).append(task)

    def waiting(self) -> bool:
        """Whether any task has not been handed over."""
        return bool(self._blocked or any(self._ready.values()))

    def update(self, workers: Mapping[str, Mapping[str, Any]]) -> None:
        """Take note of which workers there are now."""
        for room in self._rooms.values():
            room.workers, room.threads, room.gpus = 0, 0, 0.0
        for worker in workers.values():
            for name in host_names(worker) & self._rooms.keys():
                room = self._rooms[name]
                room.workers += 1
                room.threads += worker.get("nthreads", 1)
                room.gpus += worker["resources"].get("GPU", 0)

    def unserved(self) -> list[str]:
        """Hosts with tasks that are ready or placed, which no worker serves."""
        return [
            name for name, room in self._rooms.items()
            if not room.workers and (self._ready.get(name) or room.exclusive or room.shared)
        ]  # fmt: skip

    def next(self) -> Iterator[Task]:
        """Tasks that can begin now, in order for each host; each takes its room."""
        for name, ready in self._ready.items():
            room = self._rooms[name]
            while ready and room.fits(ready[0].resources):
                task = ready.popleft()
                room.add(task.resources)
                self._placed[task.key] = task.resources
                yield task

    def ended(self, key: str, state: str) -> list[Task]:
        """Give a task's room back; returns the tasks that will never begin because it did not end `done`."""
        if (resources := self._placed.pop(key, None)) is not None:
            self._rooms[resources.host].add(resources, -1)
        skipped: list[Task] = []
        for task in self._dependents.pop(key, []):
            left = self._missing.get(task.key)
            if left is None:  # skipped already, for another need
                continue
            if state != "done":
                del self._missing[task.key]
                self._blocked -= 1
                skipped.append(task)
                continue
            self._missing[task.key] = left - 1
            if left == 1:
                self._blocked -= 1
                self._ready.setdefault(task.resources.host, deque()).append(task)
        for task in list(skipped):
            skipped += self.ended(task.key, "skipped")
        return skipped

    def give_up(self, name: str) -> list[Task]:
        """Tasks of a host that were ready and will not be handed over."""
        tasks = list(self._ready.get(name, ()))
        self._ready.pop(name, None)
        return tasks
