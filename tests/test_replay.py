"""A replay: what is deleted, what is kept, and which differences are told."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from lib import replay
from lib.errors import BadInput, UnreadableFile
from lib.report import shown
from lib.results import run_folders


def run_folder(tmp_path: Path, **results: Any) -> Path:
    run = tmp_path / "run"
    for file in (
        "raw/01/a.json",
        "params/01.yaml",
        "result.json",
        "01.ipynb",
        "01.html",
        "index.html",
        "assets/x.css",
        ".lock",
    ):
        (run / file).parent.mkdir(parents=True, exist_ok=True)
        (run / file).write_text("{}")
    for number, content in results.items():
        (run / f"{number[1:]}.result.json").write_text(json.dumps(content))
    return run


def result(status: str = "pass", value: float = 1.0, started: str = "a") -> dict[str, Any]:
    verdict = {"id": "v", "status": status, "measured": {"value": value}, "reason": "r"}
    return {"started": started, "seconds": 1.0, "verdicts": [verdict], "recommendation": "go on"}


def test_evidence_parameters_and_the_index_are_kept_and_all_else_is_derived(tmp_path: Path) -> None:
    """Notebooks, pages, styles and results are derived; raw/, params/ and result.json are not."""
    names = [str(p.relative_to(tmp_path / "run")) for p in replay.derived(run_folder(tmp_path, n01=result()))]
    assert names == ["01.html", "01.ipynb", "01.result.json", "assets/x.css", "index.html"]


def test_times_may_differ_and_nothing_else() -> None:
    """Another start is no difference; another verdict, value or recommendation is one line each."""
    assert replay.compared({"01": result()}, {"01": result(started="b")}) == []
    (line,) = replay.compared({"01": result()}, {"01": result("fail", 2.0)})
    assert line == "01 verdict v: pass 1.0 (r), now fail 2.0 (r) [status: pass, now fail]"
    (line,) = replay.compared(
        {"01": result() | {"verdicts": [{"id": "v", "measured": {"low": 1}}]}},
        {"01": result() | {"verdicts": [{"id": "v", "measured": {"low": 2}}]}},
    )
    assert line.endswith("[measured.low: 1, now 2]")
    assert replay.compared({"01": result()}, {}) == ["01: not made by the replay"]


def test_a_replay_deletes_first_and_rebuilds_from_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rebuild finds no derived file; what it makes is compared with what the run said; the run itself is untouched."""
    run = run_folder(tmp_path, n01=result())
    seen: list[str] = []

    def rebuild(folder: str) -> tuple[int, Path]:
        seen.extend(str(p.relative_to(folder)) for p in replay.derived(Path(folder)))
        (Path(folder) / "01.result.json").write_text(json.dumps(result("fail")))
        return 0, Path(folder)

    index = type("Index", (), {"notebooks": []})()
    monkeypatch.setattr(replay.runner, "rebuild", rebuild)
    monkeypatch.setattr(replay.runner, "read_run", lambda _: index)
    done = replay.replay(run, str(tmp_path / "again"))
    assert (
        seen == []
        and done.raw_files == 1
        and done.differences == ["01 verdict v: pass 1.0 (r), now fail 1.0 (r) [status: pass, now fail]"]
    )
    assert json.loads((run / "01.result.json").read_text())["verdicts"][0]["status"] == "pass"
    with pytest.raises(BadInput, match="exists"):
        replay.replay(run, str(tmp_path / "again"))
    done = replay.replay(run, in_place=True)
    assert "01.html" in done.deleted and not (run / "01.html").exists() and (run / "raw/01/a.json").exists()


def test_a_run_without_raw_files_is_refused(tmp_path: Path) -> None:
    """Nothing to rebuild from."""
    with pytest.raises(BadInput, match="raw"):
        replay.replay(tmp_path)


def notebook(*cells: tuple[str, str], tags: tuple[str, ...] = ()) -> str:
    made = [
        {"cell_type": "code", "source": source, "metadata": {"tags": list(tags)},
         "outputs": [{"output_type": "display_data", "data": {"text/html": shown}}]}
        for source, shown in cells
    ]  # fmt: skip
    return json.dumps({"cells": [{"cell_type": "markdown", "source": "# x", "metadata": {}}, *made]})


def test_a_table_or_a_figure_that_changed_is_told_by_its_cell(tmp_path: Path) -> None:
    """The same outputs are no difference, whatever provenance says; another number is told in the reader's words; so is another cell."""
    a, b = tmp_path / "a.ipynb", tmp_path / "b.ipynb"
    cells = (
        ("provenance_table(run.provenance())", "today"),
        ("x = 1\ntables.table(rows(levels))", "<td>5,908 tok/s</td>"),
    )
    a.write_text(notebook(*cells))
    b.write_text(notebook(("provenance_table(run.provenance())", "tomorrow"), cells[1]))
    assert shown.differences(a, b) == []
    b.write_text(notebook(("x = 1\ntables.table(rows(levels))", "<td>5,909 tok/s</td>")))
    assert shown.differences(a, b) == ["shown by `tables.table(rows(levels))`: '5,908', now '5,909'"]
    b.write_text(notebook(*cells, ("figures.knee()", "<svg/>")))
    assert shown.differences(a, b) == ["only the replay has the cell `figures.knee()`"]
    assert shown.differences(b, a) == ["only the run has the cell `figures.knee()`"]
    twice = notebook(*cells, cells[1])
    b.write_text(twice)
    assert len(shown.differences(a, b)) == 1 and shown.differences(b, b) == []
    b.write_text(notebook(("c = 1", "5"), tags=("injected-parameters",)))
    assert len(shown.differences(a, b)) == 1  # parameters are no claim; the table is missing


def test_every_field_of_a_result_counts_but_times() -> None:
    """A server that is another, or a skipped part that was not skipped then, is a line."""
    (line,) = replay.compared({"01": result() | {"skipped": ["a"]}}, {"01": result() | {"skipped": []}})
    assert line == "01 skipped: \"['a']\", now '[]'"
    assert replay.compared({"01": result() | {"provenance": 1}}, {"01": result() | {"provenance": 2}}) == []


def test_a_packed_run_is_unpacked_and_its_other_notebooks_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evidence of 01 alone in the archive: 05's results are neither compared nor called missing; a damaged archive is one message."""
    whole = run_folder(tmp_path, n01=result(), n05=result())
    packed = tmp_path / "example"
    packed.mkdir()
    with tarfile.open(packed / replay.PACKED, "w:xz") as archive:
        for name in ("raw", "params"):
            archive.add(whole / name, name)
    states = [
        {"notebook": n, "state": "done", "result": "r", "html": "h", "ipynb": "i", "seconds": 1, "error": None}
        for n in ("01", "05")
    ]
    (packed / "result.json").write_text(json.dumps({"run_id": "R1", "notebooks": states, "selected": ["01", "05"]}))
    for number in ("01", "05"):
        (packed / f"{number}.result.json").write_text((whole / f"{number}.result.json").read_text())
        (packed / f"{number}.ipynb").write_text(notebook(("t()", "<td>1</td>")))
    monkeypatch.setenv("WORKBOOK_OUTPUTS", str(tmp_path / "outputs"))

    def rebuild(folder: str) -> tuple[int, Path]:
        made = Path(folder)
        assert json.loads((made / "result.json").read_text())["selected"] == ["01"] and not replay.results(made)
        (made / "01.result.json").write_text(json.dumps(result()))
        (made / "01.ipynb").write_text(notebook(("t()", "<td>2</td>")))
        return 0, made

    monkeypatch.setattr(replay.runner, "rebuild", rebuild)
    monkeypatch.setattr(replay.runner, "read_run", lambda _: type("Index", (), {"notebooks": []})())
    done = replay.replay(packed)
    assert done.differences == ["01 shown by `t()`: '1', now '2'"] and "05.ipynb" in done.deleted
    assert Path(done.folder).is_relative_to(tmp_path / "outputs") and (packed / "01.ipynb").exists()
    assert (Path(done.folder) / "result.json").is_file() and run_folders(tmp_path / "outputs") == []  # `latest` stays what it was
    (packed / replay.PACKED).write_bytes(b"no archive")
    with pytest.raises(UnreadableFile, match=replay.PACKED):
        replay.replay(packed)
