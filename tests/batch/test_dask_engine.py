"""Tasks on a real scheduler with two workers, in this process: lost hosts, duplicates, retries, breaking off.

What a worker runs in a process of its own is a function here that commits an attempt; real processes on real hosts:
tests/lab/test_dask_hosts.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("distributed", reason="pip install -r requirements-dask.txt")

from distributed import Client, LocalCluster

from lib.batch import attempts, dask_worker
from lib.batch.dask_engine import DaskEngine
from lib.batch.identity import Identity
from lib.batch.storage import store_of
from lib.batch.tasks import TaskEvent, TaskRecord, ended
from lib.errors import BadInput, HostError
from tests.batch.made_tasks import key, task


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """A scheduler and two workers in this process, each serving host `a`."""
    with LocalCluster(
        n_workers=2, threads_per_worker=1, processes=False, resources={"host-a": 1}, dashboard_address=":0", memory_limit=0
    ) as made:  # fmt: skip
        yield made


@pytest.fixture
def engine(cluster: LocalCluster) -> Iterator[DaskEngine]:
    """The engine on them; hosts are given up after 1 s."""
    made = DaskEngine(Client(cluster, set_as_default=False), wait_s=1.0)
    yield made
    made.close()


@pytest.fixture
def outputs(tmp_path: Path) -> str:
    """Where attempts go."""
    return str(tmp_path / "outputs")


class Work:
    """In place of a task's process: takes a while, commits, and notes who did what when."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.2) -> None:
        self.seconds = seconds
        self.spans: list[tuple[str, str, float, float]] = []
        self.fault: Callable[[str, str], None] = lambda _key, _worker: None
        self.hold = threading.Event()
        self.held_worker: str | None = None
        monkeypatch.setattr(dask_worker, "_in_process", self)

    def __call__(self, one: Any, outputs: str, attempt: str, devices: Any, tell: Any, wanted: Any) -> TaskRecord:
        from distributed import get_worker

        address = get_worker().address
        self.fault(one.key, address)
        began = time.monotonic()
        tell("progress", "at work")
        if address == self.held_worker:
            self.hold.wait(20)  # a host that is cut off, and goes on
        while time.monotonic() - began < self.seconds:
            time.sleep(0.02)
            if not wanted() and address != self.held_worker:
                raise HostError("a task that runs to its end", "it was ended")
        record = ended(one, "done", None, attempt, f"host of {address}")
        attempts.commit(store_of(outputs), record)
        self.spans.append((one.key, address, began, time.monotonic()))
        return record


def until(what: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_each_task_once_and_no_host_twice_at_a_time(
    engine: DaskEngine, outputs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven tasks, one record each; both workers work, neither at two tasks at once; what needs another comes after it."""
    work = Work(monkeypatch)
    events: list[TaskEvent] = []
    tasks = [task(n) for n in range(6)] + [task(6, [0])]
    records = list(engine.run(tasks, outputs, events.append))
    assert sorted(r.key for r in records) == sorted(t.key for t in tasks) and {r.state for r in records} == {"done"}
    by_worker: dict[str, list[tuple[float, float]]] = {}
    for _, address, began, end in work.spans:
        by_worker.setdefault(address, []).append((began, end))
    assert len(by_worker) == 2
    for spans in by_worker.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))
    place = [r.key for r in records].index
    assert place(key(6)) > place(key(0))
    assert {"started", "progress"} <= {e.state for e in events if e.key == key(3)}


def test_a_lost_hosts_task_goes_elsewhere_and_its_late_duplicate_is_dropped(
    engine: DaskEngine, cluster: LocalCluster, outputs: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    """A worker is cut off in the middle: one record, from the other; what the first commits later goes, and is named."""
    work = Work(monkeypatch)
    victim = cluster.workers[0].address
    work.held_worker = victim
    started: list[str] = []

    def listen(event: TaskEvent) -> None:
        if event.state == "progress":
            started.append(event.key)

    def cut() -> None:
        until(lambda: len(started) == 2)
        engine.client.run_on_scheduler(_remove, victim)

    cutter = threading.Thread(target=cut)
    cutter.start()
    records = []
    for record in engine.run([task(1), task(2), task(3)], outputs, listen):
        records.append(record)
        if len(records) == 3:
            work.hold.set()  # only now does the host that was cut off commit
            until(lambda: len(work.spans) == 4)
    cutter.join()
    assert sorted(r.key for r in records) == [key(1), key(2), key(3)] and {r.state for r in records} == {"done"}
    assert victim not in {r.host.removeprefix("host of ") for r in records}
    twice = [k for k in (key(1), key(2)) if sum(s[0] == k for s in work.spans) == 2]
    assert len(twice) == 1, work.spans
    said = capsys.readouterr().err
    assert "is gone; again on" in said and f"a late duplicate of host of {victim}" in said
    assert [r.host for r in dask_worker.commits(outputs, twice[0])] != [] and all(
        r.host != f"host of {victim}" for r in dask_worker.commits(outputs, twice[0])
    )


async def _remove(address: str, dask_scheduler: Any) -> None:
    await dask_scheduler.remove_worker(address, stimulus_id="test", close=True)


def test_an_attempt_committed_before_its_host_was_lost_is_taken(
    engine: DaskEngine, outputs: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The host goes between its commit and its answer: the repeat finds the commit and runs nothing."""
    work = Work(monkeypatch)
    real = work.__call__

    def commit_then_die(one: Any, outputs: str, attempt: str, devices: Any, tell: Any, wanted: Any) -> TaskRecord:
        from distributed import get_worker

        record = real(one, outputs, attempt, devices, tell, wanted)
        if len(work.spans) == 1:
            engine.client.run_on_scheduler(_remove, get_worker().address)
        return record

    monkeypatch.setattr(dask_worker, "_in_process", commit_then_die)
    (record,) = engine.run([task(1)], outputs, lambda _: None)
    assert record.state == "done" and len(work.spans) == 1
    assert record.host == f"host of {work.spans[0][1]}" and "its committed attempt is taken" in capsys.readouterr().err


def test_a_host_that_cannot_run_it_is_left_for_another(
    engine: DaskEngine, outputs: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A HostError sends a task to the other machine; when every try fails it is failed with the reason, others go on."""
    work = Work(monkeypatch, 0.05)
    seen: list[tuple[str, str]] = []

    def fault(one: str, address: str) -> None:
        seen.append((one, address))
        if one == key(9) or (one == key(1) and len([s for s in seen if s[0] == one]) == 1):
            raise HostError("a disk with room", "none")

    work.fault = fault
    records = {r.key: r for r in engine.run([task(1), task(9), task(2)], outputs, lambda _: None)}
    assert {k: r.state for k, r in records.items()} == {key(1): "done", key(2): "done", key(9): "failed"}
    assert len({a for k, a in seen if k == key(1)}) == 2
    assert "again elsewhere" in (said := capsys.readouterr().err) and "is gone" not in said
    assert "a disk with room" in (records[key(9)].error or "") and len([k for k, _ in seen if k == key(9)]) == 3


def test_a_host_without_workers_is_lost_after_a_while(
    engine: DaskEngine, outputs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tasks are `lost` with the reason, and what needs them is skipped; the others are done."""
    Work(monkeypatch, 0.05)
    records = {r.key: r for r in engine.run([task(1), task(2, host="b"), task(3, [2])], outputs, lambda _: None)}
    assert {k: r.state for k, r in records.items()} == {key(1): "done", key(2): "lost", key(3): "skipped"}
    assert "no worker has served its host b" in (records[key(2)].error or "")


def test_breaking_off_ends_what_runs(engine: DaskEngine, outputs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing the iterator cancels what waits and sees what runs gone."""
    work = Work(monkeypatch, 0.2)
    run = engine.run([task(n) for n in range(8)], outputs, lambda _: None)
    next(run)
    work.seconds = 30
    began = time.monotonic()
    run.close()
    assert time.monotonic() - began < 15
    assert not any(engine.client.run(dask_worker.running).values())
    assert len(work.spans) < 4


def test_identify_refuses_two_workers_of_one_machine_and_different_ones(
    engine: DaskEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both workers are here: refused. Told that they are two machines, their identities are compared."""
    from lib.batch.matrix import Cell, Resources

    cell = Cell(
        id="m.x.a.c", model="x", host="a", configuration="c", profile={}, params={}, resources=Resources(host="a")
    )
    with pytest.raises(BadInput, match="has 2 workers"):
        engine.identify([cell])
    with pytest.raises(BadInput, match="none serves b"):
        engine.identify([cell.model_copy(update={"resources": Resources(host="b")})])
    monkeypatch.setattr(dask_worker, "machine", lambda: str(time.monotonic_ns()))
    monkeypatch.setattr(dask_worker, "identify", lambda _cell: Identity(host={"cpu": "same"}))
    assert engine.identify([cell])["m.x.a.c"].host == {"cpu": "same"}
    monkeypatch.setattr(dask_worker, "identify", lambda _cell: Identity(host={"cpu": str(time.monotonic_ns())}))
    with pytest.raises(HostError, match=r"m\.x\.a\.c: host\.cpu"):
        engine.identify([cell])
    monkeypatch.setattr(dask_worker, "about", lambda: {"machine": "m", "code": "another"})
    with pytest.raises(BadInput, match="other code on m"):
        engine.identify([cell])


def test_a_worker_that_sees_other_outputs_is_refused(
    engine: DaskEngine, outputs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is not shared would take results that nobody finds; the mark goes when the run ends."""
    Work(monkeypatch, 0.05)
    assert [r.state for r in engine.run([task(1)], outputs, lambda _: None)] == ["done"]
    assert not any((Path(outputs) / ".seen").iterdir())
    real = dask_worker.store_of
    monkeypatch.setattr(dask_worker, "store_of", lambda place: real(f"{place}-of-its-own"))
    with pytest.raises(BadInput, match="sees other outputs"):
        list(engine.run([task(2)], outputs, lambda _: None))
