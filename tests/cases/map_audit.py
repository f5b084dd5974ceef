"""How a case of kind `audit` is asked and how its expected leaves are named: case text in, `expect`-shaped answer out.

Everything in the answer is computed by `lib.audit`; this file only names it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lib.audit.evidence import described_facts
from lib.audit.rules import AuditReport, Finding, audit


def answer(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The audit's answer to one case.

    Args:
        case: a line of cases.jsonl; only `input` is looked at.
        folder: where the files are that the input names.
    """
    given = case["input"]
    if "file" in given:
        description: Any = (folder / given["file"]).read_text(encoding="utf-8", errors="replace")
    else:
        description = given["text"]
    report = audit(described_facts(description, folder))
    finding = _asked_about(report)
    if finding is None:
        return {"verdict": report.verdict, "finding_level": None}
    return {
        "verdict": finding.verdict,
        "finding_level": finding.level,
        "rule": finding.id,
        "certainty": finding.certainty,
        "condition": finding.what,
        "fix": finding.do,
        **finding.values,
    }


def _asked_about(report: AuditReport) -> Finding | None:
    """The finding that a case asks about, which is one about accuracy and not about starting: one that explains a line
    it quotes, before one that stands on what it states, before one that stands on a default that nobody stated; among
    equals the gravest."""
    ranked = sorted(report.findings, key=lambda item: (item.id == "X3", not item.explains, item.assumes_defaults))
    return ranked[0] if ranked else None
