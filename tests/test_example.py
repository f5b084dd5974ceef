"""The committed example from a GPU: everything derived comes out of its raw files again, and follows them when they change."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import pytest

from lib.params import ROOT
from lib.replay import PACKED, replay

EXAMPLE = ROOT / "outputs" / "examples" / "h200"
NUMBERS = ("01", "03", "04")


@pytest.fixture(autouse=True)
def outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written beside the example."""
    monkeypatch.setenv("WORKBOOK_OUTPUTS", str(tmp_path / "outputs"))


def test_the_example_comes_out_of_its_raw_files() -> None:
    """Every table, figure, verdict, prediction, trial and recommendation of 01, 03 and 04, without a GPU and without a server.

    A line here means that the code or a notebook changed what the example shows: `workbook replay outputs/examples/h200 --in-place`
    makes it anew (read the difference first: a number that moved is a line of CHANGELOG).
    """
    found = replay(EXAMPLE)
    assert found.failed == {} and found.differences == [], found
    assert {"01.ipynb", "03.ipynb", "04.ipynb", "01.result.json", "report.html"} <= set(
        found.deleted
    ) and found.raw_files > 100
    made = Path(found.folder)
    assert all((made / f"{n}.{kind}").is_file() for n in NUMBERS for kind in ("ipynb", "html", "result.json"))


def test_a_changed_raw_value_changes_the_verdict_and_what_is_shown(tmp_path: Path) -> None:
    """One request of one level that failed: the level's verdict is no pass any more, and its row in the table is another."""
    run = tmp_path / "run"
    run.mkdir()
    with tarfile.open(EXAMPLE / PACKED) as archive:
        archive.extractall(run, filter="data")
    for name in ("03.result.json", "03.ipynb", "result.json"):
        shutil.copy(EXAMPLE / name, run)
    for number in ("01", "04"):  # they don't read it
        for file in (run / "params").glob(f"{number}.*"):
            file.unlink()
    file = run / "raw" / "03" / "level-C8" / "level.jsonl"
    lines = file.read_text().splitlines()
    row = json.loads(lines[1])
    assert row["kind"] == "request" and row["failure"] is None, row
    row["failure"] = "reset_mid_stream"
    lines[1] = json.dumps(row)
    file.write_text("\n".join(lines) + "\n")
    found = replay(run)
    assert any(line.startswith("03 verdict level-C8: pass") and ", now fail" in line for line in found.differences), (
        found.differences
    )
    assert any("shown by" in line and "failure_rows" in line for line in found.differences), found.differences
