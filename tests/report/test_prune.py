"""Pruning: old runs go, kept evidence stays, nothing is half gone."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lib.cli import main
from lib.params import ROOT
from lib.records import Evidence, NotebookState, RunResult
from lib.report.prune import carry_out, folder_bytes, over_budget, plan_prune, superfluous
from tests.report import made_run


def make(root: Path, name: str, started: str, state: str = "done", size: int = 100_000) -> Path:
    """A small run: one notebook, a raw file of a known size, an attempt that was taken again."""
    folder = root / "p" / name
    (folder / "raw" / "03" / "level").mkdir(parents=True)
    (folder / "raw" / "03" / "level" / "level.jsonl").write_bytes(b"x" * size)
    (folder / "raw" / "03" / "level.earlier-abc").mkdir()
    (folder / "raw" / "03" / "level.earlier-abc" / "level.jsonl").write_bytes(b"x" * 10_000)
    result = made_run.result("03", name)
    (folder / "03.result.json").write_text(result.model_dump_json())
    index = RunResult(
        run_id=name, profile="p", started=started, ended=None, seconds=1, server_seconds=None, state=state, selected=["03"],
        notebooks=[NotebookState(notebook="03", state="done", result="03.result.json")],
    )  # fmt: skip
    (folder / "result.json").write_text(index.model_dump_json())
    return folder


def test_the_oldest_go_first_and_the_newest_stay(tmp_path: Path) -> None:
    """Four runs of 100 kB, a limit of 250 kB, one kept by number: the two oldest go, and their attempts with them."""
    for i in range(4):
        make(tmp_path, f"r{i}", f"2026-01-0{i + 1}")
    plan = plan_prune(tmp_path, 250_000, keep=1)
    assert [r.path for r in plan.removals if "earlier" not in r.path] == ["p/r0", "p/r1"]
    assert {r.path for r in plan.removals if "earlier" in r.path} == {
        f"p/r{i}/raw/03/level.earlier-abc" for i in (2, 3)
    }
    assert carry_out(tmp_path, plan) == []
    assert sorted(p.name for p in (tmp_path / "p").iterdir()) == ["r2", "r3"]
    left = sum(folder_bytes(p) for p in (tmp_path / "p").iterdir())
    assert left == plan.bytes_after <= 250_000
    assert not list(tmp_path.glob(".pruned-*"))


@pytest.mark.parametrize("kind", ["KEEP", "running", "interrupted", "unreadable"])
def test_what_is_kept_stays_whatever_the_size(tmp_path: Path, kind: str) -> None:
    """A marked run, one that has not ended, and one whose index can't be read: with the reason."""
    old = make(tmp_path, "old", "2026-01-01", state=kind if kind in ("running", "interrupted") else "done")
    if kind == "KEEP":
        (old / "KEEP").touch()
    if kind == "unreadable":
        (old / "result.json").write_text("{")
    plan = plan_prune(tmp_path, 0, keep=0)
    assert "p/old" in plan.kept and "p/old" not in [r.path for r in plan.removals]
    carry_out(tmp_path, plan)
    assert (old / "raw" / "03" / "level" / "level.jsonl").exists()


def test_an_attempt_that_a_verdict_points_to_stays(tmp_path: Path) -> None:
    """Evidence of a kept verdict is never removed; without a valid result nothing inside a run is."""
    folder = make(tmp_path, "r", "2026-01-01")
    assert [p.name for p in superfluous(folder)] == ["level.earlier-abc"]
    result = made_run.result("03", "r")
    verdict = result.verdicts[0].model_copy(
        update={"evidence": [Evidence(path="raw/03/level.earlier-abc/level.jsonl")]}
    )
    (folder / "03.result.json").write_text(result.model_copy(update={"verdicts": [verdict]}).model_dump_json())
    assert superfluous(folder) == []
    (folder / "03.result.json").write_text("{")
    assert superfluous(folder) == []


def test_a_run_that_somebody_works_in_is_left_alone(tmp_path: Path) -> None:
    """Its lock is held: it is named as not removed, and whole."""
    folder = make(tmp_path, "r", "2026-01-01")
    with (folder / ".lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        problems = carry_out(tmp_path, plan_prune(tmp_path, 0, keep=0))
    assert len(problems) == 1 and "somebody works in it" in problems[0] and (folder / "result.json").exists()


def test_the_command_touches_nothing_without_yes(tmp_path: Path) -> None:
    """Shown first; --yes removes; a limit that can't be reached is exit code 1; bad numbers are 2."""
    make(tmp_path, "r0", "2026-01-01")
    make(tmp_path, "r1", "2026-01-02")

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "lib.cli", "prune", *arguments], cwd=ROOT, env={**os.environ, "WORKBOOK_OUTPUTS": str(tmp_path)},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    shown = command("--max-gib", "0", "--keep", "1")
    assert shown.returncode == 1 and "would remove: p/r0" in shown.stdout and (tmp_path / "p" / "r0").exists()
    done = command("--max-gib", "0.00015", "--keep", "1", "--yes", "--json")
    assert (
        json.loads(done.stdout)["removed"] and not (tmp_path / "p" / "r0").exists() and (tmp_path / "p" / "r1").exists()
    )
    assert command("--max-gib", "-1").returncode == 2 and command("--keep", "-1").returncode == 2


def test_the_committed_examples_are_no_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are neither pruned, nor the latest run, nor in the history; by their folder they can be read."""
    from lib import runner
    from lib.errors import BadInput
    from lib.report import history

    example = make(tmp_path, "old", "2026-01-01")
    example.parent.rename(tmp_path / "examples")
    monkeypatch.setenv("WORKBOOK_OUTPUTS", str(tmp_path))
    plan = plan_prune(tmp_path, 0, keep=0)
    assert plan.removals == [] and plan.kept == {}
    with pytest.raises(BadInput, match="none yet"):
        runner.find_run("latest")
    with history.opened(tmp_path) as connection:
        assert history.refresh(connection, tmp_path) == 0 and history.refresh(connection, tmp_path, "examples") == 0
    assert runner.find_run(str(tmp_path / "examples" / "old")) == tmp_path / "examples" / "old"
    run = make(tmp_path, "new", "2026-01-02")
    assert runner.find_run("latest") == run


def test_the_budget_of_the_environment_is_said_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """WORKBOOK_MAX_GIB: said when it is passed, the limit of `prune` without --max-gib, refused where it is no size."""
    for i in range(3):
        make(tmp_path, f"r{i}", f"2026-01-0{i + 1}")
    monkeypatch.setenv("WORKBOOK_OUTPUTS", str(tmp_path))
    assert over_budget(tmp_path) is None
    monkeypatch.setenv("WORKBOOK_MAX_GIB", "0.00015")  # 161 kB
    assert "`workbook prune`" in (over_budget(tmp_path) or "")
    assert main(["prune", "--keep", "1", "--yes"]) == 0
    assert over_budget(tmp_path) is None and [f.name for f in (tmp_path / "p").iterdir()] == ["r2"]
    monkeypatch.setenv("WORKBOOK_MAX_GIB", "much")
    capsys.readouterr()
    assert main(["prune"]) == 2 and "WORKBOOK_MAX_GIB" in capsys.readouterr().err
