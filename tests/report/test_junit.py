"""A run as JUnit XML: every verdict is a case, none is lost, hostile text stays text."""

from __future__ import annotations

from xml.etree import ElementTree

from lib.records import NotebookState, RunResult, Status
from lib.report.junit import junit_xml
from tests.report import made_run


def run(*states: NotebookState) -> RunResult:
    """A run's index."""
    return RunResult(
        run_id="r", profile="p", started="2026-03-01T12:00:00+00:00", ended=None, seconds=1.5, server_seconds=None, state="failed",
        selected=[s.notebook for s in states], notebooks=list(states),
    )  # fmt: skip


def test_every_verdict_is_a_case_with_its_status() -> None:
    """Counts per suite and in all equal the verdicts; fail is a failure, error an error, not known is skipped, never passed."""
    result = made_run.result("05")
    verdicts = [
        result.verdicts[0].model_copy(update={"id": s.value, "status": s, "reason": f"because {s.value}"})
        for s in Status
    ]
    text = junit_xml(
        run(NotebookState(notebook="05", state="done", seconds=2.0)),
        {"05": result.model_copy(update={"verdicts": verdicts})},
    )
    root = ElementTree.fromstring(text)
    suite = root.find("testsuite")
    assert suite is not None
    counts = {k: suite.get(k) for k in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "6", "failures": "2", "errors": "1", "skipped": "2"} == {k: root.get(k) for k in counts}
    kinds = {(c.get("name") or "").split(":")[0]: [e.tag for e in c if e.tag != "system-out"] for c in suite}
    assert kinds == {
        "pass": [], "fail": ["failure"], "invalid": ["failure"], "error": ["error"],
        "inconclusive": ["skipped"], "unsupported": ["skipped"],
    }  # fmt: skip


def test_a_notebook_without_a_result_is_an_error_and_one_that_was_not_run_is_absent() -> None:
    """A pipeline must not read a missing notebook as a passed one."""
    text = junit_xml(
        run(
            NotebookState(notebook="01", state="failed", error="it broke\nin the middle"),
            NotebookState(notebook="02", state="not_run"),
        ),
        {},
    )
    root = ElementTree.fromstring(text)
    assert [s.get("errors") for s in root] == ["1"]
    error = root.find(".//error")
    assert error is not None and error.get("message") == "failed: it broke" and "middle" in (error.text or "")


def test_hostile_text_is_carried_as_text() -> None:
    """Scripts, ANSI, NUL and bidi characters give well-formed XML without any of them."""
    result = made_run.result("05")
    bad = result.verdicts[0].model_copy(
        update={"status": Status.FAIL, "reason": made_run.HOSTILE + "\x00\x1b", "claim": made_run.HOSTILE}
    )
    text = junit_xml(
        run(NotebookState(notebook="05", state="done")), {"05": result.model_copy(update={"verdicts": [bad]})}
    )
    ElementTree.fromstring(text)
    assert "\x00" not in text and "\x1b" not in text and "\u202e" not in text and "<script" not in text
