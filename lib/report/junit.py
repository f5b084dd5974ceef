"""A run as JUnit XML, for pipelines that read nothing else: one suite a notebook, one case a verdict.

`fail`, `invalid` and `error` are failures or errors, `inconclusive` and `unsupported` are skipped with their reason: a
pipeline that counts failures then counts answers that say no, and never takes "not known" for a pass. A notebook that left
no valid result is an error of its own.
Source: the schema that Jenkins, GitLab and GitHub's reporters accept (testsuites/testsuite/testcase, failure, error, skipped).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

from lib.records import NotebookResult, RunResult, Status
from lib.report.text import visible_text

#: What XML 1.0 can't carry, whatever the escaping.
_UNCARRIED = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_CHILD = {
    Status.FAIL: "failure", Status.INVALID: "failure", Status.ERROR: "error", Status.INCONCLUSIVE: "skipped",
    Status.UNSUPPORTED: "skipped",
}  # fmt: skip


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
    totals = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for state in run.notebooks:
        number = state.notebook[:2]
        result = results.get(number)
        if state.state == "not_run" and result is None:
            continue
        name = result.title if result else (titles or {}).get(number, number)
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=_plain(f"{number} {name}"),
            timestamp=(result.started if result else run.started)[:19],
        )
        counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
        if result is None or state.state == "failed":
            case = ElementTree.SubElement(
                suite,
                "testcase",
                classname=f"workbook.{number}",
                name="the notebook ran and left a valid result",
                time="0",
            )
            _child(case, "error", state.error or state.state, state.state)
            counts["tests"] += 1
            counts["errors"] += 1
        for verdict in result.verdicts if result else []:
            case = ElementTree.SubElement(
                suite,
                "testcase",
                classname=f"workbook.{number}",
                name=_plain(f"{verdict.id}: {verdict.claim}"),
                time="0",
            )
            counts["tests"] += 1
            kind = _CHILD.get(verdict.status)
            if kind:
                counts["skipped" if kind == "skipped" else f"{kind}s"] += 1
                _child(case, kind, verdict.reason, verdict.status.value)
            _output(case, [f"{e.path}{f':{e.line}' if e.line else ''}" for e in verdict.evidence])
        for key, value in counts.items():
            suite.set(key, str(value))
            totals[key] += value
        suite.set("time", f"{(result.seconds if result else state.seconds) or 0:.3f}")
    for key, value in totals.items():
        root.set(key, str(value))
    root.set("time", f"{run.seconds or 0:.3f}")
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
