"""A replay: what is deleted, what is kept, and which differences are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lib import replay
from lib.errors import BadInput


def run_folder(tmp_path: Path, **results: Any) -> Path:
    run = tmp_path / "run"
    for file in ("raw/01/a.json", "params/01.yaml", "result.json", "01.ipynb", "01.html", "index.html", "assets/x.css", ".lock"):
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
    assert line == "01 verdict v: pass 1.0 (r), now fail 2.0 (r)"
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
    assert seen == [] and done.raw_files == 1 and done.differences == ["01 verdict v: pass 1.0 (r), now fail 1.0 (r)"]
    assert json.loads((run / "01.result.json").read_text())["verdicts"][0]["status"] == "pass"
    with pytest.raises(BadInput, match="exists"):
        replay.replay(run, str(tmp_path / "again"))
    done = replay.replay(run, in_place=True)
    assert "01.html" in done.deleted and not (run / "01.html").exists() and (run / "raw/01/a.json").exists()


def test_a_run_without_raw_files_is_refused(tmp_path: Path) -> None:
    """Nothing to rebuild from."""
    with pytest.raises(BadInput, match="raw"):
        replay.replay(tmp_path)
