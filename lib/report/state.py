"""What a run established, as the document that the next engineer reads: goal, instructions, discoveries, accomplished.

Every line ends with the file that it can be checked in; a line without evidence says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lib.records import Evidence, Measured, NotebookResult, Status, Verdict
from lib.report.tables import MARKS, evidence_text, shown
from lib.report.text import relative_href, visible_text

#: What a line of the document can be: text, text with evidence, or a verdict (alone or with its notebook).
Line = str | tuple[Any, Any] | Verdict


def _plain(text: str) -> str:
    """Text on one line in which Markdown and HTML mean nothing."""
    flat = " ".join(visible_text(text).split())
    for mark in "\\`*_<>[]|#":
        flat = flat.replace(mark, "\\" + mark)
    return flat


def _evidence(evidence: Any) -> str:
    """Links to raw files; several are separated by commas."""
    if evidence is None:
        return ""
    if isinstance(evidence, Mapping):
        evidence = Evidence(**evidence)
    if isinstance(evidence, str):
        evidence = Evidence(path=evidence)
    if not isinstance(evidence, Evidence):
        return ", ".join(text for text in (_evidence(one) for one in evidence) if text)
    href = relative_href(evidence.path)
    words = _plain(evidence_text(evidence))
    return f"[{words}]({href})" if href else words


def _verdict(verdict: Verdict) -> str:
    parts = [f"{MARKS[verdict.status]} {verdict.status.value}: {_plain(verdict.claim)}"]
    if verdict.measured is not None:
        parts.append(f"measured {_plain(shown(verdict.measured).text())}")
    if verdict.predicted is not None:
        parts.append(f"predicted {_plain(shown(verdict.predicted).text())}")
    if verdict.limit:
        parts.append(f"limit {_plain(verdict.limit)}")
    if verdict.launch_ids:
        parts.append(f"launch {_plain(', '.join(verdict.launch_ids))}")
    return "; ".join(parts) + f" ({_plain(verdict.reason)})"


def _line(line: Line) -> str:
    if isinstance(line, Verdict):
        text, evidence = _verdict(line), _evidence(line.evidence)
    elif isinstance(line, str):
        text, evidence = _plain(line), ""
    else:
        content, given = line
        if isinstance(content, Verdict):
            text = _verdict(content)
            given = [*content.evidence, *([given] if given else [])]
        elif isinstance(content, Measured):
            text = _plain(shown(content).text())
        else:
            text = _plain(str(content))
        evidence = _evidence(given)
    return f"- {text}: {evidence}" if evidence else f"- {text} (no evidence file)"


def state_markdown(
    goal: Sequence[Line] | str,
    instructions: Iterable[Line],
    discoveries: Iterable[Line],
    accomplished: Iterable[Line],
    title: str = "State of this deployment",
) -> str:
    """Return the state document as Markdown.

    Args:
        goal: what the deployment is for: one sentence or several lines.
        instructions: what the next engineer has to do or keep to.
        discoveries: what was found out, verdicts among it, also the ones that say no.
        accomplished: what was done.
        title: the document's heading.

    A line is text, `(text, evidence)` or a `Verdict`; evidence is an `Evidence`, a path below the run's folder, or a
    list of these. A verdict brings its own.

    Example: `state_markdown("serve", [], [("KV is bf16", "raw/06/server.log")], [])` contains the line
    `- KV is bf16: [raw/06/server.log](raw/06/server.log)`.
    """
    goals = [goal] if isinstance(goal, (str, Verdict)) else list(goal)
    sections = (
        ("Goal", goals),
        ("Instructions", list(instructions)),
        ("Discoveries", list(discoveries)),
        ("Accomplished", list(accomplished)),
    )
    lines = [f"# {_plain(title)}", ""]
    for heading, entries in sections:
        lines += [f"## {heading}", ""]
        lines += [_line(entry) for entry in entries] or ["- nothing recorded (no evidence file)"]
        lines.append("")
    return "\n".join(lines)


def run_discoveries(results: Iterable[NotebookResult]) -> list[Line]:
    """Return one line a verdict of a run's notebooks, failures first, each with its evidence and result file."""
    ranks = (Status.FAIL, Status.INVALID, Status.ERROR, Status.INCONCLUSIVE, Status.UNSUPPORTED, Status.PASS)
    order = {status: place for place, status in enumerate(ranks)}
    found = [(order[v.status], one.notebook, v) for one in results for v in one.verdicts]
    found.sort(key=lambda entry: entry[:2])
    return [(verdict, f"{notebook}.result.json") for _, notebook, verdict in found]
