"""The evidence browser: from a verdict to the rule that gave it to the raw line that it stands on.

Everything comes from results (`Verdict`) and the run's raw files; each quoted line is looked up again, so that a file that
is missing, or no longer says what was quoted, shows.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lib.audit.rules import RULES
from lib.errors import UnreadableFile
from lib.migrations import NewerVersion, notebook_result
from lib.params import ROOT
from lib.records import Evidence, Verdict
from lib.report.excerpts import raw_lines, read_excerpt
from lib.report.tables import Column, Table, table, verdict_table
from lib.report.text import visible_text
from lib.results import NotebookRun
from lib.server.redact import redact_object, redact_text
from lib.widgets.panel import Control, Panel, Values, View, is_live
from lib.widgets.pictures import evidence_by_verdict

TITLE = "Evidence browser"
STANDS, MOVED, MISSING, WHOLE = "stands as quoted", "says something else", "not there", "a whole file"
ALL = "all verdicts of this notebook"


def evidence_browser(run: NotebookRun, verdicts: Sequence[Verdict]) -> Panel:
    """Shows the browser over this notebook's verdicts; those of the run's notebooks before it can be chosen, too."""
    own = {f"{run.number}/{v.id}": v for v in verdicts}
    before = {
        f"{number}/{v.id}": v
        for number, result in run.earlier().items()
        if number < run.number
        for v in result.verdicts
    }
    panel = Panel(TITLE, controls_of(own | before), Browser(run.folder, own | before, len(own)), is_live(run))
    panel.display()
    return panel


def browse(folder: Path | str) -> Panel:
    """Shows the browser over a finished run's folder, from its NN.result.json files.

    Raises:
        UnreadableFile: there is no valid result in it.
    """
    folder = Path(folder)
    named = read_verdicts(folder)
    panel = Panel(TITLE, controls_of(named), Browser(folder, named, len(named)), is_live())
    panel.display()
    return panel


def read_verdicts(folder: Path) -> dict[str, Verdict]:
    """Verdicts of a run's folder by notebook and id; a result that can't be read is left out, none at all is an error."""
    named: dict[str, Verdict] = {}
    faults = []
    for file in sorted(folder.glob("*.result.json")):
        try:
            text = file.read_text(encoding="utf-8")
            result = notebook_result(json.dumps(redact_object(json.loads(text))))
        except (OSError, ValueError, ValidationError, RecursionError, NewerVersion) as error:
            faults.append(f"{file.name}: {str(error).splitlines()[0][:120]}")
            continue
        named |= {f"{result.notebook}/{v.id}": v for v in result.verdicts}
    if not named:
        raise UnreadableFile(f"verdicts in {folder}", "; ".join(faults) or "no NN.result.json", "name a run's folder")
    return named


def controls_of(named: dict[str, Verdict]) -> list[Control]:
    """A choice of verdicts, and which piece of the verdict's evidence."""
    most = max((len(v.evidence) for v in named.values()), default=1)
    options = ((ALL, ALL), *((f"{v.status.value}: {visible_text(key)}"[:120], key) for key, v in named.items()))
    return [
        Control("verdict", "verdict", ALL, "choice", options),
        Control("piece", "piece of evidence", 1, "whole", low=1, high=max(most, 1)),
    ]


class Browser:
    """The view for a chosen verdict, or over the first `own` of them; every file is read once and kept."""

    def __init__(self, folder: Path, named: dict[str, Verdict], own: int) -> None:
        self.folder, self.named, self.own = folder, named, own
        self._files: dict[str, list[str] | None] = {}

    def __call__(self, values: Values) -> View:
        own = list(self.named)[: self.own]
        counts = Counter(self.now(piece) for key in own for piece in self.named[key].evidence)
        chart = evidence_by_verdict(
            {name: counts[name] for name in (STANDS, WHOLE, MOVED, MISSING) if counts[name]},
            [self.named[key].status for key in own],
        )
        total = (
            f"{len(own)} verdicts stand on {counts.total()} pieces of evidence: {counts[STANDS]} lines stand as quoted"
        )
        others = ((WHOLE, "are whole files"), (MOVED, "say something else"), (MISSING, "are not there"))
        total += "".join(f", {counts[name]} {what}" for name, what in others if counts[name])
        key = values["verdict"]
        if key in self.named:
            sentence = f"{self.sentence(key, values['piece'])} In all, {total}."
            return View(sentence, self.tables(key, values["piece"]), chart)
        rows = [self.row(key) for key in own]
        return View(
            f"{total}.", (table(rows, COLUMNS, caption="Verdict, rule, raw line", empty="no verdict yet"),), chart
        )

    def row(self, key: str) -> dict[str, Any]:
        """One verdict in the list: its rule, the piece of its evidence that says most (a line before a file), and how all lie."""
        verdict = self.named[key]
        pieces = sorted(verdict.evidence, key=lambda piece: (piece.line is None, piece.quote is None))
        now = Counter(self.now(piece) for piece in pieces)
        return {
            "verdict": key,
            "status": verdict.status,
            "rule": verdict.rule or "none named",
            "raw line": pieces[0] if pieces else None,
            "pieces": len(pieces),
            "now": ", ".join(f"{count} {name}" for name, count in now.items()) or "no evidence",
        }

    def now(self, piece: Evidence) -> str:
        """Whether a piece of evidence lies where it was quoted, as far as its file still says so."""
        if piece.path not in self._files:
            self._files[piece.path] = raw_lines(self.folder, piece.path)
        lines = self._files[piece.path]
        if lines is None or (piece.line is not None and not 1 <= piece.line <= len(lines)):
            return MISSING
        if piece.line is None or not piece.quote:
            return WHOLE
        return STANDS if _plain(piece.quote) in _plain(lines[piece.line - 1]) else MOVED

    def sentence(self, key: str, piece: int) -> str:
        """Verdict, rule and raw line in one sentence."""
        verdict = self.named[key]
        text = f"{verdict.status.value}: {verdict.claim} ({verdict.reason.rstrip('.')}). Rule: {rule_text(verdict)}."
        if not verdict.evidence:
            return f"{text} It has no evidence."
        at = verdict.evidence[min(piece, len(verdict.evidence)) - 1]
        where = at.path + (f", line {at.line}" if at.line else "")
        return (
            f"{text} Evidence {min(piece, len(verdict.evidence))} of {len(verdict.evidence)}: {where}, {self.now(at)}."
        )

    def tables(self, key: str, piece: int) -> tuple[Table, ...]:
        """The verdict, its rule, and the raw line between its neighbours."""
        verdict = self.named[key]
        made = [verdict_table([verdict], anchors=False)]
        rules = [{"rule": verdict.rule or "none named", "what it says": rule_text(verdict)}, *audit_rows(verdict)]
        made.append(table(rules, caption="The rule"))
        if verdict.evidence:
            at = verdict.evidence[min(piece, len(verdict.evidence)) - 1]
            text = read_excerpt(self.folder, at.path, at.line)
            rows = [{"raw": line} for line in (text or f"{at.path}: {self.now(at)}").split("\n")]
            made.append(
                table(rows, [Column("raw", redact_text(visible_text(at.path)))], caption="The raw line, marked >")
            )
        return tuple(made)


COLUMNS = ("verdict", "status", "rule", "raw line", "pieces", "now")


def _plain(text: str) -> str:
    """Text as it is compared: redacted and visible like what was quoted, and without differences of spacing."""
    return " ".join(visible_text(redact_text(text)).split()).rstrip("…")


def rule_text(verdict: Verdict) -> str:
    """What the verdict's rule says: the first sentence of the function or module that it names, read, never imported."""
    rule = verdict.rule or ""
    if rule == "docs/rules.md":
        return "the accuracy rules of docs/rules.md, each asked with the evidence there is"
    found = _docstring(rule)
    if found is None:
        return visible_text(rule) or "none named; the limit stands in the verdict"
    limit = f" (limit: {verdict.limit})" if verdict.limit else ""
    return found + limit


def _docstring(rule: str) -> str | None:
    """First sentence of a docstring in this workbook by dotted name; None if there is no such module or function."""
    if not re.fullmatch(r"lib(\.[A-Za-z_][A-Za-z0-9_]*)+", rule):
        return None
    parts = rule.split(".")
    for length in (len(parts), len(parts) - 1):
        file = ROOT.joinpath(*parts[:length]).with_suffix(".py")
        if not file.is_file():
            continue
        node: Any = ast.parse(file.read_text(encoding="utf-8"))
        for name in parts[length:]:
            kinds = (ast.FunctionDef, ast.ClassDef)
            node = next((one for one in node.body if isinstance(one, kinds) and one.name == name), None)
            if node is None:
                return None
        text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        return text.rstrip(".") or None
    return None


def audit_rows(verdict: Verdict) -> list[dict[str, Any]]:
    """The rows of docs/rules.md that a verdict names in its words."""
    if verdict.rule != "docs/rules.md":
        return []
    text = f"{verdict.claim} {verdict.reason} {' '.join(one.note or '' for one in verdict.evidence)}"
    words = set(re.findall(r"\b[A-Z]{1,3}\d{1,2}\b", text))
    return [{"rule": r.id, "what it says": f"{r.title}: {r.effect}; do: {r.do}"} for r in RULES if r.id in words]
