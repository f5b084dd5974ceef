"""Load from two workers of a real scheduler (in this process, told that they are two machines)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("distributed", reason="pip install -r requirements-dask.txt")

from distributed import Client, LocalCluster

from lib.batch import dask_worker
from lib.batch.dask_load import DaskSenders
from lib.errors import BadInput
from lib.load import client, judge

PLAN = judge.Plan(step_s=0.01, stall_s=0.02, first_min_s=0.02, first_max_s=0.05)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    """A scheduler with two workers that serve `load`."""
    numbers = itertools.count()
    monkeypatch.setattr(dask_worker, "machine", lambda: f"machine {next(numbers)}")
    with (
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, resources={"host-load": 1}, dashboard_address=None, memory_limit=0
        ) as cluster,
        Client(cluster, set_as_default=False) as made,
    ):  # fmt: skip
        yield made


def test_two_workers_send_one_level(two: Client, tmp_path: Path) -> None:
    """Two levels one after the other: each from both, merged, with the skew; the workers are free again between them."""
    senders = DaskSenders(two, "load")
    requests = [client.Request(f"r{i}", f"request number {i}", 4) for i in range(8)]
    with judge.running_judge(PLAN) as server:
        for name in ("one", "two"):
            out = client.run_level(
                server.base_url, "completions", requests, out=tmp_path / name, model="judge", concurrency=4,
                workers=len(senders.machines), sender=senders.sender(),
            )  # fmt: skip
            level = client.read_level(out)
            assert len(level.requests) == 8 and all(r["failure"] is None for r in level.requests)
            assert len(level.header["client"]["clocks"]["machines"]) == 2


def test_too_few_or_one_machine_twice_is_refused(two: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that too few serve; two workers of one machine, whose client would share its cores."""
    with pytest.raises(BadInput, match="3 workers that serve 'load'; found: 2 of 2"):
        DaskSenders(two, "load", count=3)
    with pytest.raises(BadInput, match="some workers that serve 'other'"):
        DaskSenders(two, "other")
    monkeypatch.setattr(dask_worker, "machine", lambda: "the same")
    with pytest.raises(BadInput, match="the same has 2 workers"):
        DaskSenders(two, "load")
