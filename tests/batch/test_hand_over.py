"""Which task is handed over next: needs, room on hosts, and what lets two measurements share a host."""

from __future__ import annotations

from lib.batch.hand_over import SHARE, HandOver, sharing_faults, taken
from lib.batch.matrix import Resources
from tests.batch.made_tasks import key, task, worker


def numbers(over: HandOver) -> list[int]:
    """What would begin now."""
    return [int(t.key, 16) for t in over.next()]


def test_a_host_gets_one_measurement_for_each_machine() -> None:
    """Two machines of one name: two tasks at once, in their order; the next when one has ended."""
    over = HandOver([task(n) for n in (1, 2, 3, 4)])
    assert numbers(over) == []
    over.update({"x": worker(["a"]), "y": worker(["a"])})
    assert numbers(over) == [1, 2] and numbers(over) == []
    assert over.ended(key(2), "done") == []
    assert numbers(over) == [3] and over.waiting()


def test_what_is_needed_comes_first_and_its_failure_skips() -> None:
    """A task waits until its needs are done; one that fails takes everything that stands on it with it, each once."""
    over = HandOver([task(1), task(2), task(3, [1, 2]), task(4, [3]), task(5, [99])])
    over.update({"x": worker(["a"])})
    assert numbers(over) == [1]
    assert over.ended(key(1), "done") == [] and numbers(over) == [2]
    assert [t.key for t in over.ended(key(2), "failed")] == [key(3), key(4)]
    assert numbers(over) == [5], "a need that is not among the tasks is done"
    assert over.ended(key(5), "done") == [] and not over.waiting()


def test_two_failed_needs_skip_once() -> None:
    """Both needs fail: one skipped task, not two."""
    over = HandOver([task(1), task(2), task(3, [1, 2])])
    over.update({"x": worker(["a"]), "y": worker(["a"])})
    assert numbers(over) == [1, 2]
    assert len(over.ended(key(1), "failed")) == 1 and over.ended(key(2), "lost") == [] and not over.waiting()


def test_shared_tasks_count_gpus_and_threads() -> None:
    """8 GPUs: two tasks of 4 at once, not three; an exclusive one waits until they are gone, and nothing joins it."""
    over = HandOver([task(n, exclusive=False, gpus=4) for n in (1, 2, 3)] + [task(4), task(5, exclusive=False)])
    over.update({"x": worker(["a"], threads=8, gpus=8)})
    assert numbers(over) == [1, 2]
    over.ended(key(1), "done")
    assert numbers(over) == [3]
    over.ended(key(2), "done")
    over.ended(key(3), "done")
    assert numbers(over) == [4]
    over.ended(key(4), "done")
    assert numbers(over) == [5]


def test_what_a_task_takes_of_a_worker() -> None:
    """All of the host, or a part that adds up exactly and the GPUs: 1024 shared ones are one host."""
    assert taken(Resources(host="a")) == {"host-a": 1.0}
    assert taken(Resources(host="a", exclusive=False, gpus=2)) == {"host-a": SHARE, "GPU": 2.0}
    assert SHARE * 1024 == 1.0 and sum([SHARE] * 1024) == 1.0


def test_a_host_that_nobody_serves_is_named() -> None:
    """Only hosts with tasks that could go; giving one up gives back what was ready."""
    over = HandOver([task(1), task(2, host="b"), task(3, [2], host="c")])
    over.update({"x": worker(["a"])})
    assert over.unserved() == ["b"]
    assert [t.key for t in over.give_up("b")] == [key(2)] and over.unserved() == []


def test_workers_that_would_share_a_machine_are_refused() -> None:
    """Two workers on one machine; several names with threads for more than one; more than one of a name."""
    good = {"x": worker(["a"]), "y": worker(["b", "c"])}
    assert sharing_faults(good, {"x": "one", "y": "two"}) == []
    assert "one has 2 workers (x, y)" in sharing_faults(good, {"x": "one", "y": "one"})[0]
    assert "serves b, c with 2 threads" in sharing_faults({"y": worker(["b", "c"], 2)}, {"y": "two"})[0]
    twice = {"x": {"resources": {"host-a": 2.0}, "nthreads": 1}}
    assert "more than one of a" in sharing_faults(twice, {"x": "one"})[0]
