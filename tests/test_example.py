"""The committed example from a GPU: everything derived comes out of its raw files again, and follows them when they change."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import pytest

from lib.params import ROOT
from lib.replay import replay

EXAMPLE = ROOT / "outputs" / "examples" / "h200"
NUMBERS = ("01", "03", "04")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run's folder as far as its raw files are kept, with the results that the example shows."""
    monkeypatch.setenv("WORKBOOK_OUTPUTS", str(tmp_path))
    folder = tmp_path / "h200" / "example"
    folder.mkdir(parents=True)
    with tarfile.open(EXAMPLE / "raw.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    index = json.loads((EXAMPLE / "result.json").read_text())
    index["selected"] = list(NUMBERS)
    for state in index["notebooks"]:
        if state["notebook"] not in NUMBERS:
            state |= {"state": "not_run", "result": None, "html": None, "ipynb": None, "seconds": None, "error": None}
    (folder / "result.json").write_text(json.dumps(index))
    for number in NUMBERS:
        shutil.copy(EXAMPLE / f"{number}.result.json", folder)
    return folder


def test_the_example_comes_out_of_its_raw_files(run: Path) -> None:
    """Every verdict, prediction, trial and recommendation of 01, 03 and 04, without a GPU and without a server."""
    found = replay(run)
    assert found.failed == {} and found.differences == [], found


def test_a_changed_raw_value_changes_the_verdict(run: Path) -> None:
    """One request of one level that failed: the level's verdict is no pass any more, and the recommendation is another."""
    for number in ("01", "04"):  # they don't read it
        for file in (run / "params").glob(f"{number}.*"):
            file.unlink()
        (run / f"{number}.result.json").unlink()
    file = run / "raw" / "03" / "level-C8" / "level.jsonl"
    lines = file.read_text().splitlines()
    row = json.loads(lines[1])
    assert row["kind"] == "request" and row["failure"] is None, row
    row["failure"] = "reset_mid_stream"
    lines[1] = json.dumps(row)
    file.write_text("\n".join(lines) + "\n")
    found = replay(run)
    assert any("level-C8" in line for line in found.differences), found.differences
