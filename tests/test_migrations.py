"""Results of every version that was ever written are read; newer ones are refused in one message."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lib.cli import main
from lib.errors import WorkbookError
from lib.migrations import STEPS, NewerVersion, notebook_result, run_result, up_to_date
from lib.params import ROOT
from lib.records import SCHEMA_VERSION, NotebookResult, RunResult
from lib.report import history, prune
from lib.report.site import read_run

STORED = ROOT / "tests/data/results"
FORMS = sorted(folder.name for folder in STORED.iterdir() if folder.is_dir())
#: What the records look like in each version, without words. A new hash needs a new version: older code refuses new fields,
#: newer code may miss old ones.
FORM_SHA256 = {2: "a44be7078cbac24aee1390b1fa4ae110353afb378aae2c4ca006d026adc4a352"}


def form() -> str:
    """Hash over fields, types and bounds of both records."""

    def bare(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: bare(v) for k, v in value.items() if k not in ("description", "title") or not isinstance(v, str)}
        return [bare(v) for v in value] if isinstance(value, list) else value

    schemas = [bare(kind.model_json_schema()) for kind in (RunResult, NotebookResult)]
    return hashlib.sha256(json.dumps(schemas, sort_keys=True).encode()).hexdigest()


def test_every_version_has_a_step_and_a_stored_file() -> None:
    """The chain has no gap, and none of its steps is untested."""
    assert sorted(STEPS) == list(range(1, SCHEMA_VERSION))
    assert {int(name[1]) for name in FORMS} == set(range(1, SCHEMA_VERSION + 1))


def test_a_changed_form_is_a_new_version() -> None:
    """Fields of the records change only with SCHEMA_VERSION, a step and a stored file of the version before."""
    assert form() == FORM_SHA256[SCHEMA_VERSION]


@pytest.mark.parametrize("name", FORMS)
def test_a_stored_run_of_each_form_is_read(name: str) -> None:
    """Index and results become records of today, and what they said stays what it was."""
    folder = STORED / name
    raw = json.loads((folder / "result.json").read_text())
    run = run_result((folder / "result.json").read_text())
    assert raw["schema_version"] == int(name[1])
    assert (run.schema_version, run.run_id, run.state) == (SCHEMA_VERSION, raw["run_id"], raw["state"])
    assert [n.state for n in run.notebooks] == [n["state"] for n in raw["notebooks"]]
    for file in folder.glob("0*.result.json"):
        before = json.loads(file.read_text())
        result = notebook_result(file.read_text())
        assert [(v.id, v.status.value) for v in result.verdicts] == [(v["id"], v["status"]) for v in before["verdicts"]]
        assert [v.measured.value if v.measured else None for v in result.verdicts] == [
            v["measured"]["value"] if v["measured"] else None for v in before["verdicts"]
        ]
        assert notebook_result(result.model_dump_json()) == result


def test_the_first_form_gets_what_it_lacked() -> None:
    """`selected` is what had begun; a number that was not finite has a reason; the file itself is not changed."""
    text = (STORED / "v1-first/result.json").read_text()
    assert "selected" not in json.loads(text) and run_result(text).selected == ["01", "03"]
    first = notebook_result((STORED / "v1-first/01.result.json").read_text()).predictions[0].measured
    assert first and first.value is None and first.reason == "not a finite number"
    with pytest.raises(ValueError, match="needs a reason"):
        NotebookResult.model_validate(
            {**json.loads((STORED / "v1-first/01.result.json").read_text()), "schema_version": 2}
        )


def test_version_two_says_where_a_notebook_comes_from() -> None:
    """The stored run took 01 over; the site takes its result for valid, though it bears another run's id."""
    _, problem, notebooks = read_run(STORED / "v2")
    taken = {n.number: (n.taken_from, n.problems) for n in notebooks if n.result}
    assert problem is None and taken["03"] == (None, [])
    assert taken["01"][0] and taken["01"][0].startswith("two.model.here.small/") and taken["01"][1] == []


@pytest.mark.parametrize("data", [None, [], "x", {"schema_version": "one"}, {"schema_version": True}, {}])
def test_what_is_no_record_is_left_to_its_reader(data: Any) -> None:
    """A migration of nonsense changes nothing."""
    assert up_to_date(data, "run") == data


@pytest.fixture
def newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An outputs folder with a run of today, and one whose notebook a newer workbook wrote."""
    for name in ("old", "new"):
        shutil.copytree(STORED / "v2", tmp_path / "p" / name)
    file = tmp_path / "p/new/03.result.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "schema_version": SCHEMA_VERSION + 1, "surprise": 1}))
    monkeypatch.setenv("WORKBOOK_OUTPUTS", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    "command", [["compare", "old", "new"], ["rebuild", "new"], ["run", "--resume", "new"], ["replay", "new"]]
)
def test_a_newer_version_is_one_message(newer: Path, capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    """Exit 2, the file, the version and what to do; nothing is changed."""
    before = {f: f.read_bytes() for f in (newer / "p").rglob("*") if f.is_file()}
    assert main(command) == 2
    said = capsys.readouterr().err
    assert said.count("workbook: ") == 1 and "Traceback" not in said
    assert "03.result.json" in said and f"version {SCHEMA_VERSION + 1}" in said and "newer workbook" in said
    assert {f: f.read_bytes() for f in (newer / "p").rglob("*") if f.is_file()} == before


def test_a_newer_index_is_shown_and_kept(newer: Path) -> None:
    """History goes on with the other runs; prune does not take what it can't read."""
    file = newer / "p/new/result.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "schema_version": SCHEMA_VERSION + 1}))
    with history.opened(newer) as connection:
        history.refresh(connection, newer)
        assert {row["run"] for row in history.run_rows(connection, None, 9)} == {"old", "new"}
    plan = prune.plan_prune(newer, 0, keep=0)
    assert [r.path for r in plan.removals] == ["p/old"] and "newer workbook" in plan.kept["p/new"]
    with pytest.raises(WorkbookError) as error:
        run_result(file.read_text())
    assert isinstance(error.value, NewerVersion) and error.value.exit_code == 2
