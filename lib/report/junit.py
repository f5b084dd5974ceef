"""A run as JUnit XML, for pipelines that read nothing else: one suite a notebook, one case a verdict.

`fail`, `invalid` and `error` are failures or errors, `inconclusive` and `unsupported` are skipped with their reason: a
pipeline that counts failures then counts answers that say no, and never takes "not known" for a pass. A notebook that left
no valid result is an error of its own.
Source: the schema that Jenkins, GitLab and GitHub's reporters accept (testsuites/testsuite/testcase, failure, error, skipped).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

from lib.records import NotebookResult, NotebookState, RunResult, Status
from lib.report.text import visible_text

#: What XML 1.0 can't carry, whatever the escaping.
_UNCARRIED = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_CHILD = {
    Status.FAIL: "failure", Status.INVALID: "failure", Status.ERROR: "error", Status.INCONCLUSIVE: "skipped",
    Status.UNSUPPORTED: "skipped",
}  # fmt: skip
_COUNTED = ("tests", "failures", "errors", "skipped")


def _plain(text: str) -> str:
    return _UNCARRIED.sub("\ufffd", visible_text(text))


def junit_xml(run: RunResult, results: Mapping[str, NotebookResult], titles: Mapping[str, str] | None = None) -> str:
    """Return the run as JUnit XML.

    Args:
        run: its index.
        results: valid results by notebook number.
        titles: what a notebook without a result is called, by number.
    """
    root = ElementTree.Element("testsuites", name=_plain(f"{run.profile} {run.run_id}"))
    totals = _suites(root, run, results, titles or {}, "workbook")
    return _document(root, totals, run.seconds or 0.0)


def matrix_xml(
    name: str,
    runs: Sequence[tuple[RunResult, Mapping[str, NotebookResult]]],
    left_out: Mapping[str, str],
    titles: Mapping[str, str] | None = None,
) -> str:
    """Return a matrix as JUnit XML: the suites of every cell's run, each named by its cell.

    Args:
        name: of the matrix.
        runs: each cell's index, and its valid results by notebook number. A notebook that was selected and did not run
            (its cell was cut off, or what it reads failed) is an error.
        left_out: cells that the matrix excludes, and why: one skipped case each.
        titles: what a notebook without a result is called, by number.
    """
    root = ElementTree.Element("testsuites", name=_plain(name))
    totals: Counter[str] = Counter()
    for run, results in runs:
        totals += _suites(root, run, results, titles or {}, run.profile, f"{run.profile} ", run.selected)
    if left_out:
        suite = ElementTree.SubElement(root, "testsuite", name="left out")
        for cell, why in left_out.items():
            case = ElementTree.SubElement(suite, "testcase", classname=_plain(cell), name="the cell is run", time="0")
            _child(case, "skipped", why, "left out")
        counts = Counter(tests=len(left_out), skipped=len(left_out))
        for key in _COUNTED:
            suite.set(key, str(counts[key]))
        totals += counts
    return _document(root, totals, sum(run.seconds or 0.0 for run, _ in runs))


def _suites(
    root: ElementTree.Element,
    run: RunResult,
    results: Mapping[str, NotebookResult],
    titles: Mapping[str, str],
    classname: str,
    prefix: str = "",
    must_run: Sequence[str] = (),
) -> Counter[str]:
    """Adds one suite a notebook; returns how many cases there are of each kind."""
    totals: Counter[str] = Counter()
    for state in run.notebooks:
        number = state.notebook[:2]
        result = results.get(number)
        if state.state == "not_run" and result is None and number not in must_run:
            continue
        name = result.title if result else titles.get(number, number)
        began = (result.started if result else run.started)[:19]
        suite = ElementTree.SubElement(root, "testsuite", name=_plain(f"{prefix}{number} {name}"), timestamp=began)
        counts = _cases(suite, f"{_plain(classname)}.{number}", state, result)
        for key in _COUNTED:
            suite.set(key, str(counts[key]))
        totals += counts
        suite.set("time", f"{(result.seconds if result else state.seconds) or 0:.3f}")
    return totals


def _cases(
    suite: ElementTree.Element, classname: str, state: NotebookState, result: NotebookResult | None
) -> Counter[str]:
    counts: Counter[str] = Counter()
    if result is None or state.state == "failed":
        name = "the notebook ran and left a valid result"
        case = ElementTree.SubElement(suite, "testcase", classname=classname, name=name, time="0")
        _child(case, "error", state.error or state.state, state.state)
        counts.update(tests=1, errors=1)
    for verdict in result.verdicts if result else []:
        name = _plain(f"{verdict.id}: {verdict.claim}")
        case = ElementTree.SubElement(suite, "testcase", classname=classname, name=name, time="0")
        counts.update(tests=1)
        kind = _CHILD.get(verdict.status)
        if kind:
            counts.update(["skipped" if kind == "skipped" else f"{kind}s"])
            _child(case, kind, verdict.reason, verdict.status.value)
        _output(case, [f"{e.path}{f':{e.line}' if e.line else ''}" for e in verdict.evidence])
    return counts


def _document(root: ElementTree.Element, totals: Mapping[str, int], seconds: float) -> str:
    for key in _COUNTED:
        root.set(key, str(totals.get(key, 0)))
    root.set("time", f"{seconds:.3f}")
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _child(case: ElementTree.Element, kind: str, reason: str, status: str) -> None:
    first = _plain(reason).strip().splitlines() or [status]
    found = ElementTree.SubElement(case, kind, message=f"{status}: {first[0][:300]}")
    if kind != "skipped":
        found.set("type", status)
        found.text = _plain(reason)[:4000]


def _output(case: ElementTree.Element, evidence: Sequence[str]) -> None:
    if evidence:
        ElementTree.SubElement(case, "system-out").text = _plain("evidence: " + ", ".join(evidence))
