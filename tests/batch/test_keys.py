"""The key of a task: what changes it, and what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lib.batch.identity import hardware, identify
from lib.batch.sources import lib_sha256, notebook_sha256, reached
from lib.batch.tasks import Identity, TaskRecord, plan_tasks
from lib.hosts import local
from lib.params import ROOT
from tests.batch.fakes import cell
from tests.batch.standin import make_project

CODE = {n: {"notebook": f"n{n}", "lib": f"l{n}"} for n in ("01", "03", "06")}
FOUND = Identity(host={"cpu": "one"}, stack={"01": 1, "03": 1, "06": 1}, model={})


def keys(one: Any = None, found: Identity = FOUND, code: dict[str, Any] = CODE, run_id: str = "r") -> dict[str, str]:
    return {task.number: task.key for task in plan_tasks(one or cell(), run_id, found, code)}


def changed(other: dict[str, str]) -> list[str]:
    return [number for number, key in keys().items() if other[number] != key]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"run_id": "another"}, []),
        ({"one": cell().model_copy(update={"profile": {**cell().profile, "title": "another title"}})}, []),
        ({"one": cell(n03={"concurrency": [2]})}, ["03", "06"]),
        ({"one": cell(n06={"port": 1})}, ["06"]),
        ({"one": cell("another")}, ["01", "03", "06"]),
        ({"one": cell().model_copy(update={"profile": {"title": "x", "server": {"model": "n"}}})}, ["01", "03", "06"]),
        ({"found": FOUND.model_copy(update={"host": {"cpu": "two"}})}, ["01", "03", "06"]),
        ({"found": FOUND.model_copy(update={"stack": {"01": 2, "03": 1, "06": 1}})}, ["01", "06"]),
        ({"code": {**CODE, "03": {"notebook": "n03", "lib": "changed"}}}, ["03", "06"]),
        ({"code": {**CODE, "06": {"notebook": "changed", "lib": "l06"}}}, ["06"]),
    ],
)
def test_a_key_changes_with_what_it_stands_on(arguments: dict[str, Any], expected: list[str]) -> None:
    """And 06 with whatever changes the key of a notebook that it reads."""
    assert changed(keys(**arguments)) == expected


def test_the_needs_of_06_are_the_others_keys() -> None:
    """In order, and 01 and 03 need nothing."""
    tasks = {t.number: t for t in plan_tasks(cell(), "r", FOUND, CODE)}
    assert tasks["06"].needs == [tasks["01"].key, tasks["03"].key]
    assert tasks["01"].needs == tasks["03"].needs == []


def test_lib_counts_as_far_as_a_notebook_reaches_it(tmp_path: Path) -> None:
    """A page's style is reached by none; the load client by 03 alone of two; prose of a notebook changes nothing, code does."""
    project = make_project(tmp_path / "p", ("03",))
    notebook = project / "notebooks/03_benchmark.ipynb"
    before = lib_sha256("03", project), notebook_sha256("03", project)
    (project / "lib/report/style.py").write_text((project / "lib/report/style.py").read_text() + "\n# changed\n")
    notebook.write_text(notebook.read_text().replace('"metadata": {}', '"metadata": {"x": 1}', 1))
    assert (lib_sha256("03", project), notebook_sha256("03", project)) == before
    (project / "lib/records.py").write_text((project / "lib/records.py").read_text() + "\n# changed\n")
    assert lib_sha256("03", project) != before[0]
    notebook.write_text(notebook.read_text().replace("at work", "at rest"))
    assert notebook_sha256("03", project) != before[1]


def test_real_notebooks_reach_what_they_use() -> None:
    """03 the load client and the supervisor that is started by name, not the rollout; 06 the rollout; none the command line."""
    names = {number: {str(f.relative_to(ROOT)) for f in reached(number)} for number in ("03", "06")}
    for wanted in (
        "lib/load/client.py",
        "lib/load/judge.c",
        "lib/server/supervise.py",
        "lib/server/flags_by_version.json",
    ):
        assert wanted in names["03"], wanted
    assert "lib/deploy/rollout.py" in names["06"] - names["03"]
    assert not [n for found in names.values() for n in found if n.startswith(("lib/cli/", "lib/batch/"))]


def test_identity_is_of_this_machine_and_of_each_notebooks_server(tmp_path: Path) -> None:
    """The hardware without the name; packages of the interpreter; a file of the model changed is another model."""
    project = make_project(tmp_path / "p", ("03",))
    import sys

    one = cell().model_copy(
        update={
            "profile": {"title": "x", "server": {"model": str(project / "model"), "python": sys.executable}},
            "params": {"03": {"concurrency": [1]}},
        }
    )
    found = identify(one)
    assert found.host == hardware(local.describe()) and "hostname" not in found.host
    assert set(found.stack) == set(found.model) == {"03"} and len(found.stack["03"][0]["packages_sha256"]) == 64
    from lib.batch import identity

    (project / "model/config.json").write_text((project / "model/config.json").read_text() + "\n")
    identity._fingerprint.cache_clear()
    assert identify(one).model != found.model and identify(one).stack == found.stack


@pytest.mark.parametrize(
    "change", [{"cell": "../x"}, {"run_id": ".hidden"}, {"files": {"../../etc": 1}}, {"key": "../k"}]
)
def test_a_record_leads_out_of_no_folder(change: dict[str, Any]) -> None:
    """Records come out of stores that others may write to."""
    good = {"key": "0" * 64, "cell": "c", "number": "03", "run_id": "r", "state": "done", "attempt": "a"}
    TaskRecord.model_validate(good)
    with pytest.raises(ValueError, match="pattern|lead out"):
        TaskRecord.model_validate({**good, **change})
