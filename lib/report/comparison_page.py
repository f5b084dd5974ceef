"""A comparison of runs as tables and as one self-contained page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from lib.records import Measured
from lib.report.compare import Difference, RunComparison
from lib.report.html import redactor, write_page
from lib.report.style import POLICY, css
from lib.report.tables import MARKS, Table, table
from lib.report.text import visible_text

#: Outcomes in the order in which a reader wants them, with their heading.
OUTCOMES: tuple[tuple[str, str], ...] = (
    ("real", "Real differences: the interval leaves out 0"),
    ("changed", "Other verdict or outcome, without numbers to compare"),
    ("not_told_apart", "Not told apart: the interval of the difference has 0 in it"),
    ("not_comparable", "Not comparable, and why"),
    ("only_a", "Only in A"),
    ("only_b", "Only in B"),
    ("same", "The same"),
)


def comparison_tables(found: RunComparison, everything: bool = False) -> list[Table]:
    """Return the tables of one comparison: what changed, then the results by outcome."""
    changes = [{"where": c.where, "what": c.what, "A": c.a, "B": c.b} for c in found.changes]
    out = [table(changes, caption="What changed", empty="stack, flags and parameters are the same")]
    for outcome, heading in OUTCOMES:
        chosen = [d for d in found.differences if d.outcome == outcome]
        if chosen and (outcome != "same" or everything):
            out.append(table([_row(d) for d in chosen], caption=f"{heading} ({len(chosen)})"))
    same = sum(d.outcome == "same" for d in found.differences)
    if same and not everything:
        out.append(table([{"results that are the same": same}], caption="The rest"))
    return out


def _row(d: Difference) -> dict[str, Any]:
    def status(which: Any) -> str:
        return f"{MARKS[which]} {which.value} " if which is not None else ""

    nothing = Measured(value=None, reason="none")
    return {
        "notebook": d.notebook,
        "result": f"{d.id}: {d.what}",
        "verdict": "" if d.status_a is None else f"{status(d.status_a)}→ {status(d.status_b)}".strip(),
        "A": d.a or nothing,
        "B": d.b or nothing,
        "B - A": d.difference or nothing,
        "why": d.reason,
    }


def comparison_html(found: Sequence[RunComparison]) -> str:
    """Return one page with every comparison; nothing is loaded, nothing runs."""
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True)
    redact = redactor("redact_text")
    return environment.get_template("compare.html.j2").render(
        css=Markup(css()),  # noqa: S704
        policy=Markup(POLICY),  # noqa: S704
        comparisons=[
            {
                "a": visible_text(one.a),
                "b": visible_text(one.b),
                "tables": [Markup(t._repr_html_()) for t in comparison_tables(one, everything=True)],  # noqa: S704
                "notes": [visible_text(redact(n)) for n in one.notes],
                "worse": [visible_text(f"{d.notebook} {d.id}: {d.status_a} → {d.status_b}") for d in one.worse()],
            }
            for one in found
        ],
    )


def write_comparison(path: Path, found: Sequence[RunComparison]) -> Path:
    """Write the page to a temporary name, then rename it."""
    return write_page(path, comparison_html(found))
