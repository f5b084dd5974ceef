"""The index over runs: what it takes in, what it says, how it heals, and how long it takes to open when it is large."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lib.params import ROOT
from lib.records import Status
from lib.report import history
from lib.report.history_page import history_html
from lib.report.history_tables import results_table
from tests.report import made_run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One made run, which takes seconds to draw."""
    return made_run.make_run(tmp_path_factory.mktemp("made"))


@pytest.fixture
def outputs(tmp_path: Path, made: Path) -> Path:
    """An outputs folder with two runs of one profile and one of another."""
    for path in ("one/r1", "one/r2", "two/r1"):
        shutil.copytree(made, tmp_path / path)
    return tmp_path


def rows(root: Path, profile: str | None = None, rescan: bool = False) -> list[dict[str, object]]:
    """Runs after a refresh."""
    with history.opened(root) as connection:
        history.refresh(connection, root, profile, rescan)
        return history.run_rows(connection, profile, 100)


def test_runs_are_taken_in_once_and_forgotten_when_gone(outputs: Path) -> None:
    """All three at first, none again; a deleted run stays until a rescan."""
    with history.opened(outputs) as connection:
        assert history.refresh(connection, outputs) == 3
    with history.opened(outputs) as connection:
        assert history.refresh(connection, outputs) == 0
    shutil.rmtree(outputs / "two")
    assert len(rows(outputs)) == 3
    assert len(rows(outputs, rescan=True)) == 2


def test_a_changed_run_changes_the_index(outputs: Path) -> None:
    """A rebuilt run's new verdict comes in at a rescan."""
    before = [r["counts"].get("error", 0) for r in rows(outputs, "one") if r["run"] == "r2"]  # type: ignore[attr-defined]
    file = outputs / "one/r2/03.result.json"
    data = json.loads(file.read_text())
    data["verdicts"][0]["status"] = "error"
    file.write_text(json.dumps(data))
    found = rows(outputs, "one", rescan=True)
    assert [r["counts"].get("error", 0) for r in found if r["run"] == "r2"] == [before[0] + 1]  # type: ignore[attr-defined]


@pytest.mark.parametrize("content", [b"no database at all, but long enough to look like one" * 40, b""])
def test_a_broken_index_is_made_again(outputs: Path, content: bytes) -> None:
    """It is derived: garbage or nothing in its place is replaced without a word."""
    (outputs / history.INDEX).write_bytes(content)
    assert len(rows(outputs)) == 3


def test_an_index_of_another_version_is_made_again(outputs: Path) -> None:
    """A newer or older layout is not read by accident."""
    rows(outputs)
    with sqlite3.connect(outputs / history.INDEX) as connection:
        connection.execute("PRAGMA user_version = 99")
    assert len(rows(outputs)) == 3


def test_series_follow_a_claim_over_runs(outputs: Path) -> None:
    """Points in the order of the runs, with the value and the status; the table counts changes."""
    with history.opened(outputs) as connection:
        history.refresh(connection, outputs)
        paths = ["one/r1", "one/r2"]
        series = history.result_series(connection, paths)
    verdict = made_run.result("03").verdicts[0]
    points = series["03", verdict.id]
    assert [p["path"] for p in points] == paths and points[0]["status"] is verdict.status
    assert points[0]["measured"].value == (verdict.measured.value if verdict.measured else None)
    changed = {("03", "x"): [{**points[0], "status": Status.PASS}, {**points[1], "status": Status.FAIL}]}
    assert "✓✗" in repr(results_table(changed, [{"path": "one/r2"}]))


def test_the_page_stands_alone(outputs: Path) -> None:
    """Charts for claims with numbers in two runs, each with words; nothing is loaded, nothing runs."""
    with history.opened(outputs) as connection:
        history.refresh(connection, outputs)
        runs = history.run_rows(connection, "one", 10)
        page = history_html(
            runs, history.result_series(connection, [r["path"] for r in reversed(runs)]), "History of one"
        )
    assert "<svg" in page and "<script" not in page and "over 2 runs" in page
    assert "<img" not in page and "default-src 'none'" in page


def test_the_command_shows_a_profile(outputs: Path) -> None:
    """Text and JSON; an unknown profile is one message that names those with runs."""
    environment = {**os.environ, "WORKBOOK_OUTPUTS": str(outputs)}

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "lib.cli", "history", *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    done = command("one", "--html", str(outputs / "h.html"))
    assert done.returncode == 0 and "one/r2" in done.stdout and (outputs / "h.html").stat().st_size > 10_000, (
        done.stderr
    )
    found = json.loads(command("--json").stdout)
    assert len(found["runs"]) == 3 and found["results"][0]["points"]
    wrong = command("three")
    assert wrong.returncode == 2 and "one, two" in wrong.stderr and "Traceback" not in wrong.stderr
    assert command("--limit", "0").returncode == 2


def test_an_index_of_100000_results_opens_quickly(tmp_path: Path) -> None:
    """100,000 runs: the latest 30 and their results come without reading the rest (the time is printed, not judged)."""
    with history.opened(tmp_path) as connection:
        connection.executemany(
            "INSERT INTO runs VALUES (?, ?, ?, ?, NULL, 'done', 1.0, NULL, NULL, NULL, NULL, NULL, '')",
            ((f"p{i % 1000}/{i:06}", f"p{i % 1000}", f"{i:06}", f"2026-01-01T00:00:{i:06}") for i in range(100_000)),
        )
        connection.executemany(
            "INSERT INTO results VALUES (?, '03', 'tok', 'claim', 'pass', ?, NULL, NULL, 'tok/s', 4, '')",
            ((f"p{i % 1000}/{i:06}", float(i)) for i in range(100_000)),
        )
    began = time.perf_counter()
    with history.opened(tmp_path) as connection:
        plan = connection.execute("EXPLAIN QUERY PLAN SELECT * FROM results WHERE path = ?", ("p7/000007",)).fetchall()
        runs = history.run_rows(connection, "p7", 30)
        series = history.result_series(connection, [r["path"] for r in runs])
    print(f"100,000 runs: {time.perf_counter() - began:.3f} s")
    assert len(runs) == 30 and runs[0]["run"] == "099007" and len(series["03", "tok"]) == 30
    assert "SEARCH" in str(plan) and "SCAN" not in str(plan)


def test_the_index_says_what_the_runs_own_files_say(outputs: Path) -> None:
    """Every verdict of every valid result, and no other; a result of another run and a broken one have no rows."""
    from lib.report.site import read_run

    run, _, notebooks = read_run(outputs / "one/r1")
    expected = {(n.number, v.id, v.status.value) for n in notebooks if n.result for v in n.result.verdicts}
    assert run and len(expected) > 5
    (outputs / "one/r2/03.result.json").write_text("{")
    other = json.loads((outputs / "two/r1/03.result.json").read_text())
    (outputs / "two/r1/03.result.json").write_text(json.dumps({**other, "run_id": "another"}))
    with history.opened(outputs) as connection:
        history.refresh(connection, outputs)
        found = connection.execute("SELECT path, notebook, id, status FROM results").fetchall()
    by_path = {path: {row[1:] for row in found if row[0] == path} for path in ("one/r1", "one/r2", "two/r1")}
    assert by_path["one/r1"] == expected
    assert by_path["one/r2"] == by_path["two/r1"] == {row for row in expected if row[0] != "03"}


def test_a_secret_in_a_result_is_not_in_the_index(outputs: Path) -> None:
    """Words are freed of secrets again on their way in, whatever file they come from."""
    file = outputs / "one/r1/03.result.json"
    data = json.loads(file.read_text())
    data["verdicts"][0]["reason"] = "asked with api_key='sk-0123456789abcdef0123'"
    file.write_text(json.dumps(data))
    rows(outputs)
    assert b"sk-0123456789abcdef" not in (outputs / history.INDEX).read_bytes()


def test_an_interrupted_first_look_goes_on(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read is kept from time to time; the next look reads the rest."""
    monkeypatch.setattr(history, "KEPT_EVERY", 1)
    real, seen = history.index_run, []

    def twice(connection: sqlite3.Connection, root: Path, folder: Path) -> None:
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(folder)
        real(connection, root, folder)

    monkeypatch.setattr(history, "index_run", twice)
    with pytest.raises(KeyboardInterrupt), history.opened(outputs) as connection:
        history.refresh(connection, outputs)
    monkeypatch.setattr(history, "index_run", real)
    with history.opened(outputs) as connection:
        assert history.refresh(connection, outputs) == 1


def test_opening_the_history_imports_no_page(tmp_path: Path) -> None:
    """The packages of pages, figures and notebooks take seconds to import; the two tables need none of them."""
    code = (
        "import sys; from lib.cli import main; main(['history']); "
        "print([m for m in ('matplotlib', 'nbconvert', 'pandas', 'requests', 'lib.results') if m in sys.modules])"
    )
    environment = {**os.environ, "WORKBOOK_OUTPUTS": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr
