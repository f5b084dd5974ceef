"""Tasks made by hand, for tests of what hands them over and runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lib.batch.matrix import Resources
from lib.batch.tasks import Identity, Task


def key(number: int) -> str:
    """A key as long as real ones."""
    return f"{number:064x}"


def task(number: int, needs: Sequence[int] = (), **resources: Any) -> Task:
    """Task `number` on host `a`, which it has for itself unless the resources say otherwise."""
    return Task(
        key=key(number), cell=f"m.{number}.a.c", number="03", run_id="r1", needs=[key(n) for n in needs],
        resources=Resources(**{"host": "a", **resources}), profile={}, params={}, identity=Identity(),
    )  # fmt: skip


def worker(names: Sequence[str], threads: int = 1, gpus: int = 0) -> dict[str, Any]:
    """What a scheduler says of a worker that serves these hosts."""
    return {"resources": {**{f"host-{n}": 1.0 for n in names}, **({"GPU": gpus} if gpus else {})}, "nthreads": threads}
