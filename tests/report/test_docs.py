"""Generated documents: written from the code, and the check that finds a stale one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lib.records import NotebookResult
from lib.report import docs
from tests.report.made_run import result


def test_check_names_what_is_not_current(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The check fails on a missing or changed document and names it; after writing it passes, and nothing is redone."""
    assert docs.main(["--check", "--root", str(tmp_path)]) == 1
    assert "docs/result.schema.json is not current" in capsys.readouterr().err
    assert docs.main(["--root", str(tmp_path)]) == 0
    assert "wrote docs/result.schema.json" in capsys.readouterr().out
    assert docs.main(["--check", "--root", str(tmp_path)]) == 0
    assert docs.write_documents(tmp_path) == []
    file = tmp_path / "docs" / "result.schema.json"
    file.write_text(file.read_text().replace("snake", "camel") + " ")
    assert docs.not_current(tmp_path) == ["docs/result.schema.json"]


def test_schema_describes_the_records() -> None:
    """The schema names every field of a notebook's result and refuses unknown ones; it is the same each time."""
    schema = json.loads(docs.result_schema())
    properties = schema["$defs"]["NotebookResult"]["properties"]
    assert set(properties) == set(NotebookResult.model_fields) == set(json.loads(result("05").model_dump_json()))
    assert schema["$defs"]["NotebookResult"]["additionalProperties"] is False
    assert {"RunResult", "Verdict", "Measured", "ServerIdentity", "Status"} <= set(schema["$defs"])
    assert docs.result_schema() == docs.result_schema()


def test_absent_room_is_left_out_a_broken_one_isnt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A document whose room is absent is skipped; a room that can't be imported raises."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_room.py").write_text("raise RuntimeError('broken')")
    (tmp_path / "small_room.py").write_text("def markdown():\n    return '# small'")
    table = {
        "docs/a.md": ("absent_room", docs._named("absent_room", "markdown")),
        "docs/b.md": ("small_room", docs._named("small_room", "markdown")),
        "docs/c.md": ("small_room", docs._named("small_room", "not_there")),
    }
    monkeypatch.setattr(docs, "DOCUMENTS", table)
    assert docs.documents() == {"docs/b.md": "# small\n"}
    table["docs/d.md"] = ("broken_room", docs._named("broken_room", "markdown"))
    with pytest.raises(RuntimeError, match="broken"):
        docs.documents()
