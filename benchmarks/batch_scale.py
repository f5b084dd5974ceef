"""What a matrix of 100,000 runs on 1,000 hosts asks of its scheduler, its store and its index: measured parts, then a simulation.

    python benchmarks/batch_scale.py [--hosts 1000] [--runs 100000] [--noops 2000] [--only-simulation]

Measured here: no-op tasks a second through a real dask scheduler (in this process, and with processes), handed over one by
one as the engine does it; the bytes of a task as it is sent; the engine's own queue (`lib.batch.hand_over`) with that many
hosts and runs; the bytes of the runs named by --measured FOLDER.
Simulated: hosts that take a task as soon as they are free, through one scheduler that serves hand-overs one after the other
(a queue with one server, at the measured rate), hosts that are lost at random and whose task is repeated. Assumptions are the
constants below; each is printed with the result.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lib.batch.hand_over import HandOver
from lib.batch.matrix import Resources
from lib.batch.tasks import Identity, Task

#: A notebook takes 10 minutes, give or take a third (embedded notebooks take 1 to 5, those on GPUs 5 to 60).
TASK_S, SPREAD = 600.0, 200.0
#: A host is lost once in 30 days; its task begins again elsewhere 30 s later (dask's time-out of a connection).
LOST_EVERY_S, NOTICED_S = 30 * 86400.0, 30.0
#: Messages of progress that a task sends, at most one every 0.3 s, in truth when its words change.
EVENTS_A_TASK = 60
#: Bytes of a run where none is named by --measured.
RUN_BYTES = 3_000_000


def made_task(number: int, hosts: int) -> Task:
    """A task with a profile and parameters of the embedded profile's size."""
    return Task(
        key=f"{number:064x}", cell=f"m.model{number % 97}.h{number % hosts}.c{number}", number="03", run_id="20260101-000000",
        resources=Resources(host=f"h{number % hosts}"),
        profile={"title": "x" * 60, "server": {"flags": {f"flag_{n}": n for n in range(30)}}},
        params={f"key_{n}": [1, 4, 16] for n in range(30)}, identity=Identity(host={"cpu": "x" * 40, "gpus": [{"name": "y" * 30}] * 8}),
    )  # fmt: skip


def measure_scheduler(noops: int, processes: bool) -> float:
    """Tasks a second: a fixed number in flight, the next one handed over when one ends, each with a resource."""
    from distributed import Client, LocalCluster, as_completed

    text = made_task(1, 10).model_dump_json()
    resources = {"host-a": 1}
    with LocalCluster(
        n_workers=2, threads_per_worker=1, processes=processes, dashboard_address=None, resources=resources, memory_limit=0
    ) as cluster, Client(cluster) as client:  # fmt: skip

        def submit(number: int) -> Any:
            return client.submit(len, text, key=f"t{number}", resources={"host-a": 1}, pure=False)

        client.gather([submit(-n) for n in range(1, 50)])
        began = time.perf_counter()
        flow = as_completed([submit(n) for n in range(64)])
        sent = 64
        for done in flow:
            done.release()
            if sent < noops:
                flow.add(submit(sent))
                sent += 1
        return noops / (time.perf_counter() - began)


def measure_queue(hosts: int, runs: int) -> tuple[float, float]:
    """Seconds that the engine's own queue takes to be made, and microseconds of a task from it and back."""
    tasks = [made_task(n, hosts) for n in range(runs)]
    workers = {f"w{n}": {"resources": {f"host-h{n}": 1.0}, "nthreads": 1} for n in range(hosts)}
    began = time.perf_counter()
    over = HandOver(tasks)
    over.update(workers)
    made = time.perf_counter() - began
    began, count = time.perf_counter(), 0
    while over.waiting():
        for task in list(over.next()):
            over.ended(task.key, "done")
            count += 1
    return made, 1e6 * (time.perf_counter() - began) / count


def simulate(hosts: int, runs: int, tasks_per_s: float, seed: int = 1) -> dict[str, float]:
    """Seconds until all runs are done once, how busy the scheduler was, and how often a run was repeated.

    Hosts in a heap by the time at which they are free; each hand-over waits for the scheduler, which serves one at a time.
    """
    generator = random.Random(seed)
    free = [(0.0, n) for n in range(hosts)]
    heapq.heapify(free)
    scheduler_free = busy = waited = most = 0.0
    left, repeats, end = runs, 0, 0.0
    while left:
        at, host = heapq.heappop(free)
        begins = max(at, scheduler_free)
        waited, most = waited + begins - at, max(most, begins - at)
        scheduler_free = begins + 1 / tasks_per_s
        busy += 1 / tasks_per_s
        takes = max(30.0, generator.gauss(TASK_S, SPREAD))
        if generator.random() < takes / LOST_EVERY_S:  # lost in the middle; another host comes in its place after a day
            repeats += 1
            heapq.heappush(free, (begins + takes * generator.random() + NOTICED_S + 86400.0, host))
            continue
        left -= 1
        end = max(end, begins + takes)
        heapq.heappush(free, (begins + takes, host))
    ideal = runs * TASK_S / hosts
    return {
        "hours": end / 3600, "ideal_hours": ideal / 3600, "scheduler_busy_frac": busy / end, "hand_over_wait_mean_s": waited / runs,
        "hand_over_wait_max_s": most, "repeats": repeats,
    }  # fmt: skip


def bytes_of(folder: Path) -> tuple[int, int]:
    """Bytes and files of a run."""
    sizes = [f.stat().st_size for f in folder.rglob("*") if f.is_file() and not f.is_symlink()]
    return sum(sizes), len(sizes)


def main() -> None:
    """Measure, simulate, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=1_000)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--noops", type=int, default=2_000)
    parser.add_argument("--measured", type=Path, nargs="*", default=[])
    parser.add_argument("--only-simulation", action="store_true")
    parser.add_argument("--tasks-per-s", type=float, default=100.0, help="for --only-simulation")
    asked = parser.parse_args()
    out: dict[str, object] = {
        "assumed": {k: globals()[k] for k in ("TASK_S", "SPREAD", "LOST_EVERY_S", "NOTICED_S", "EVENTS_A_TASK")}
    }
    rate = asked.tasks_per_s
    if not asked.only_simulation:
        rate = measure_scheduler(asked.noops, processes=True)
        out["scheduler"] = {
            "tasks_per_s_processes": round(rate), "tasks_per_s_in_process": round(measure_scheduler(asked.noops, processes=False)),
            "task_bytes": len(made_task(1, 10).model_dump_json()), "load_average": os.getloadavg()[0],
        }  # fmt: skip
        made, each = measure_queue(asked.hosts, asked.runs)
        out["queue"] = {"made_s": round(made, 2), "task_us": round(each, 1)}
    runs = {folder.name: bytes_of(folder) for folder in asked.measured}
    out["runs"] = runs
    sizes = [size for size, _ in runs.values()] or [RUN_BYTES]
    out["storage_gb"] = {"least": round(min(sizes) * asked.runs / 1e9), "most": round(max(sizes) * asked.runs / 1e9)}
    out["simulated"] = {k: round(v, 4) for k, v in simulate(asked.hosts, asked.runs, rate).items()}
    for slower in (10.0, 2.0, 1.0):
        out[f"simulated_at_{slower:g}_tasks_per_s"] = {
            k: round(v, 4) for k, v in simulate(asked.hosts, asked.runs, slower).items()
        }
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
