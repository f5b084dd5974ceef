"""A matrix over its runs: what is kept, taken over, repeated and recorded, in a folder and in a real S3 server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lib.batch import attempts, session
from lib.batch.ledger import Ledger
from lib.batch.outputs import local_copy
from lib.batch.session import Session, read_snapshot
from lib.batch.storage import FolderStore, store_of
from lib.batch.tasks import Identity
from lib.records import RunResult, Status
from lib.report import history
from lib.report.junit import matrix_xml
from lib.report.prune import carry_out, plan_prune
from lib.report.site import read_run
from tests.batch.fakes import FakeEngine, cell

CODE = {"notebook": "a", "lib": "b"}


@pytest.fixture(autouse=True)
def _no_pages_and_one_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pages are tests/report's; hashes of real sources are test_keys'."""
    monkeypatch.setattr("lib.report.site.build_site", lambda folder: folder / "index.html")
    monkeypatch.setattr(session, "notebook_sha256", lambda number: CODE["notebook"] + number)
    monkeypatch.setattr(session, "lib_sha256", lambda number: CODE["lib"])
    monkeypatch.setenv("WORKBOOK_OUTPUTS", str(tmp_path / "outputs"))


@pytest.fixture(params=["folder", "s3"])
def outputs(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where runs are kept."""
    return str(tmp_path / "outputs") if request.param == "folder" else str(request.getfixturevalue("s3_url"))


def go(outputs: str, engine: FakeEngine, *cells: Any) -> Session:
    """Plans and runs a matrix `m`."""
    made = Session("m", cells or (cell("small"), cell("large")), [], engine, outputs)
    with made.locked():
        made.plan()
        made.run()
    return made


def index(outputs: str, made: Session, which: str = "small") -> RunResult:
    """The index of a cell's run, as it lies in the store."""
    plan = next(p for p in made.plans if p.cell.configuration == which)
    data = store_of(outputs).get(f"{plan.cell.id}/{plan.run_id}/result.json")
    assert data is not None
    return RunResult.model_validate_json(data)


def test_all_runs_once_and_the_second_time_nothing(outputs: str) -> None:
    """Every notebook of every cell in order, 06 with the others' results; then all is kept, in the same runs."""
    first = FakeEngine()
    made = go(outputs, first)
    assert first.ran == ["small 01", "small 03", "small 06", "large 01", "large 03", "large 06"]
    assert first.needs_seen == {p.cell.id: ["01", "03"] for p in made.plans}
    again = FakeEngine()
    second = go(outputs, again)
    assert again.ran == []
    assert [p.run_id for p in second.plans] == [p.run_id for p in made.plans]
    found = index(outputs, second)
    assert (
        found.state == "done" and [s.state for s in found.notebooks if s.notebook in ("01", "03", "06")] == ["done"] * 3
    )
    records = Ledger(store_of(outputs), local_copy(store_of(outputs))).records
    done = [r.key for r in records if r.state == "done"]
    assert len(done) == len(set(done)) == 6


def test_a_changed_parameter_reruns_what_reads_it_and_nothing_else(outputs: str) -> None:
    """03 of one cell is changed: 03 and 06 of that cell run, in a new run that takes 01 over; the old run stays whole."""
    old = go(outputs, FakeEngine())
    before = index(outputs, old)
    engine = FakeEngine()
    made = go(outputs, engine, cell("small", n03={"concurrency": [2]}), cell("large"))
    assert engine.ran == ["small 03", "small 06"]
    new = index(outputs, made)
    taken = {s.notebook: s.taken_from for s in new.notebooks}
    assert new.run_id != before.run_id
    assert taken["01"] == f"m.model.here.small/{before.run_id}" and taken["03"] is None
    assert index(outputs, old) == before
    store = store_of(outputs)
    assert store.get(f"m.model.here.small/{new.run_id}/raw/01/bytes.bin") == bytes(range(256))
    assert store.get(f"m.model.here.small/{before.run_id}/raw/01/bytes.bin") == bytes(range(256))
    back = FakeEngine()
    assert [p.run_id for p in go(outputs, back).plans][0] == before.run_id and back.ran == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"identity": Identity(host={"cpu": "two"}, stack={"01": 1}, model={"01": 1})}, ["01", "03", "06"]),
        ({"identity": Identity(host={"cpu": "one"}, stack={"01": 2}, model={"01": 1})}, ["01", "06"]),
        ({"identity": Identity(host={"cpu": "one"}, stack={"01": 1, "03": 9}, model={"01": 1})}, ["03", "06"]),
        ({"identity": Identity(host={"cpu": "one"}, stack={"01": 1}, model={"01": 1, "06": 9})}, ["06"]),
    ],
)
def test_a_changed_host_stack_or_model_reruns_what_stands_on_it(
    tmp_path: Path, change: dict[str, Identity], expected: list[str]
) -> None:
    """The identity is part of the key of each notebook that it is the identity of."""
    outputs = str(tmp_path / "outputs")
    go(outputs, FakeEngine(), cell())
    engine = FakeEngine(**change)
    go(outputs, engine, cell())
    assert engine.ran == [f"small {number}" for number in expected]


def test_a_failure_is_kept_skips_what_reads_it_and_is_tried_again_in_its_run(outputs: str) -> None:
    """03 fails: 06 is not run, the other cell goes on; the next time 03 and 06 run, 01 does not."""
    made = go(
        outputs, FakeEngine(lambda task: "failed" if (task.cell[-5:], task.number) == ("small", "03") else "done")
    )
    found = {s.notebook: s for s in index(outputs, made).notebooks}
    assert found["03"].state == "failed" and found["03"].error == "cell 3: boom" and found["03"].result is None
    assert found["06"].state == "not_run" and index(outputs, made).state == "failed"
    assert index(outputs, made, "large").state == "done"
    engine = FakeEngine()
    second = go(outputs, engine)
    assert engine.ran == ["small 03", "small 06"]
    assert second.plans[0].why == {"03": "failed before", "06": "new"}
    assert index(outputs, second).run_id == index(outputs, made).run_id
    assert index(outputs, second).state == "done"


def test_what_is_done_when_it_is_cut_off_is_kept(outputs: str) -> None:
    """Ctrl-C in the third task: two are done, the run says interrupted, the next session does the other four."""

    def stop(task: Any) -> str:
        if task.number == "06":
            raise KeyboardInterrupt
        return "done"

    with pytest.raises(KeyboardInterrupt):
        go(outputs, FakeEngine(stop))
    snapshot = read_snapshot(local_copy(store_of(outputs)), "m")
    assert snapshot and snapshot.state == "interrupted"
    assert [t.state for t in snapshot.cells[0].tasks] == ["done", "done", "interrupted"]
    engine = FakeEngine()
    made = go(outputs, engine)
    assert engine.ran == ["small 06", "large 01", "large 03", "large 06"]
    assert index(outputs, made).state == "done"


def test_what_was_committed_but_not_put_down_is_adopted(outputs: str) -> None:
    """The session is killed between an attempt's commit and the ledger: the attempt counts, and is not repeated."""
    made = Session("m", [cell()], [], FakeEngine(), outputs)
    made.plan()
    FakeEngine().attempt(made.plans[0].todo[0], outputs)
    engine = FakeEngine()
    go(outputs, engine, cell())
    assert engine.ran == ["small 03", "small 06"]


def test_two_attempts_at_one_task_are_recorded_once(outputs: str) -> None:
    """A host that was given up ends its attempt too: the first record counts, the second one's files are thrown away."""
    store = store_of(outputs)
    made = Session("m", [cell()], [], FakeEngine(), outputs)
    made.plan()
    task = made.plans[0].todo[0]
    engine = FakeEngine()
    one, two = engine.attempt(task, outputs), engine.attempt(task, outputs)
    ledger = Ledger(store, local_copy(store))
    assert ledger.add(one) is True
    attempts.publish(store, one)
    other = Ledger(store, local_copy(store) / "elsewhere") if not isinstance(store, FolderStore) else ledger
    assert other.add(two) is False
    assert other.done[task.key].attempt == one.attempt
    attempts.discard(store, two)
    assert store.children(f".attempts/{task.key}") == []


def test_lost_tasks_fail_the_run_and_are_tried_again(tmp_path: Path) -> None:
    """An engine that gave up on a host: the notebook counts as failed, with that reason; what reads it is skipped."""
    outputs = str(tmp_path / "outputs")
    made = go(outputs, FakeEngine(lambda task: "lost" if task.number == "01" else "done"), cell())
    found = {s.notebook: s for s in index(outputs, made).notebooks}
    assert (found["01"].state, found["01"].error, found["06"].state) == ("failed", "its host is gone", "not_run")
    engine = FakeEngine()
    go(outputs, engine, cell())
    assert engine.ran == ["small 01", "small 06"]


def test_a_task_that_ran_on_other_hardware_does_not_count(tmp_path: Path) -> None:
    """Its key speaks of another host: failed, with the reason."""

    class Elsewhere(FakeEngine):
        def attempt(self, task: Any, outputs: str, fate: Any = "done") -> Any:
            return super().attempt(task, outputs, fate).model_copy(update={"identity": Identity(host={"cpu": "two"})})

    made = go(str(tmp_path / "outputs"), Elsewhere(), cell())
    found = index(str(tmp_path / "outputs"), made)
    assert found.state == "failed" and "other hardware" in (found.notebooks[0].error or "")


def test_pruned_files_are_measured_again(tmp_path: Path) -> None:
    """A run that was removed: its tasks are not done any more, and may be recorded again."""
    outputs = str(tmp_path / "outputs")
    go(outputs, FakeEngine(), cell())
    folder = tmp_path / "outputs" / "m.model.here.small"
    assert not carry_out(tmp_path / "outputs", plan_prune(tmp_path / "outputs", 0, keep=0))
    assert not list(folder.glob("*/result.json"))
    engine = FakeEngine()
    made = go(outputs, engine, cell())
    assert engine.ran == ["small 01", "small 03", "small 06"] and made.plans[0].why["01"] == "its files are gone"
    engine = FakeEngine()
    go(outputs, engine, cell())
    assert engine.ran == []


def test_pruning_the_old_run_leaves_the_taken_over_evidence(tmp_path: Path) -> None:
    """Files that two runs share go with the last of them, and count once."""
    outputs = tmp_path / "outputs"
    go(str(outputs), FakeEngine(), cell())
    made = go(str(outputs), FakeEngine(), cell(n03={"concurrency": [2]}))
    plan = plan_prune(outputs, 0, keep=1)
    assert [r.path.startswith("m.model.here.small/") for r in plan.removals] == [True]
    shared = sum(len(d) for d in (bytes(256), b"m.model.here.small 01\n"))
    removed = plan.bytes_before - plan.bytes_after
    whole = sum(f.stat().st_size for f in (outputs / plan.removals[0].path).rglob("*") if f.is_file())
    assert removed <= whole - shared
    assert carry_out(outputs, plan) == []
    left = sum(f.stat().st_size for f in (outputs / "m.model.here.small").rglob("*") if f.is_file())
    assert left == plan.bytes_after
    assert (outputs / "m.model.here.small" / made.plans[0].run_id / "raw/01/bytes.bin").read_bytes() == bytes(
        range(256)
    )


def test_prune_takes_what_was_cut_off_only_above_the_limit_and_never_what_is_worked_in(tmp_path: Path) -> None:
    """An abandoned attempt and a local copy of a store go before runs; an attempt whose lock is held stays."""
    outputs = tmp_path / "outputs"
    go(str(outputs), FakeEngine(), cell())
    left, held = (outputs / attempts.place("a" * 64, name) for name in ("left", "held"))
    for folder in (left, held):
        (folder / "r/raw").mkdir(parents=True)
        (folder / "r/raw/x").write_bytes(bytes(1000))
        (folder / ".lock").touch()
    assert plan_prune(outputs, 10**9).removals == []
    with attempts.working_in(held):
        plan = plan_prune(outputs, 0, keep=1)
        assert {r.path.rpartition("/")[2] for r in plan.removals} == {"left", "held"}
        assert [p.rpartition("/")[2] for p in carry_out(outputs, plan)] == ["held: somebody works in it"]
    assert held.exists() and not left.exists() and list((outputs / "m.model.here.small").glob("*/result.json"))


def test_a_reader_never_sees_half_a_run(outputs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever an index lies in the store, every file that its done notebooks are made of is there, whole."""
    store = store_of(outputs)
    kind, seen = type(store), []
    plain = kind.put

    def put(self: Any, path: str, data: bytes) -> None:
        plain(self, path, data)
        for name in ("small", "large"):
            folder = f"m.model.here.{name}"
            for run_id in store.children(folder):
                text = store.get(f"{folder}/{run_id}/result.json")
                if text is None:
                    continue
                done = [s for s in json.loads(text)["notebooks"] if s["state"] == "done"]
                for state in done:
                    raw = store.children(f"{folder}/{run_id}/raw/{state['notebook']}")
                    assert raw == ["bytes.bin", "log.txt"] and store.get(f"{folder}/{run_id}/{state['result']}")
                seen.append(len(done))

    monkeypatch.setattr(kind, "put", put)
    go(outputs, FakeEngine())
    assert set(seen) >= {0, 1, 2, 3}


def test_history_and_pages_take_a_run_with_taken_over_notebooks(tmp_path: Path) -> None:
    """The index of runs has both runs of a cell; a notebook that was taken over is valid there."""
    outputs = tmp_path / "outputs"
    go(str(outputs), FakeEngine(), cell())
    made = go(str(outputs), FakeEngine(), cell(n03={"concurrency": [2]}))
    with history.opened(outputs) as connection:
        rows = history.run_rows(connection, "m.model.here.small", 10)
        series = history.result_series(connection, [row["path"] for row in rows])
    assert len(rows) == 2 and {len(points) for points in series.values()} == {2}, [(k, p) for k, p in series.items() if len(p) != 2]
    _, problem, notebooks = read_run(outputs / "m.model.here.small" / made.plans[0].run_id)
    assert problem is None and [n.problems for n in notebooks if n.result] == [[], [], []]


def test_junit_counts_all_cells(tmp_path: Path) -> None:
    """One suite a notebook of each cell; failed verdicts are failures, what did not run an error, what is excluded skipped."""

    def fate(task: Any) -> Any:
        return (
            "failed"
            if (task.number, task.cell[-5:]) == ("03", "large")
            else Status.FAIL
            if task.number == "01"
            else "done"
        )

    made = go(str(tmp_path / "outputs"), FakeEngine(fate))
    runs = [(files.index("done"), files.results()) for files in made.files.values()]
    root = ElementTree.fromstring(matrix_xml("m", runs, {"m.a.b.c": "too large"}))
    assert {k: root.get(k) for k in ("tests", "failures", "errors", "skipped")} == {
        "tests": "7", "failures": "2", "errors": "2", "skipped": "1",
    }  # fmt: skip
    names = [suite.get("name") or "" for suite in root]
    assert names[0].startswith("m.model.here.small 01") and names[-1] == "left out"
    assert "cell 3: boom" in ElementTree.tostring(root, encoding="unicode")
