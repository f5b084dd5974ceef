"""The index over runs as tables and as one self-contained page with a small chart for each result that has numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from lib.records import Measured, Status
from lib.report.figures import figure_svg, trend
from lib.report.html import write_page
from lib.report.style import POLICY, css
from lib.report.tables import MARKS, Table, table
from lib.report.text import visible_text

#: Charts of one page; beyond it the table has the numbers.
CHARTS = 60

Series = Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]


def runs_table(runs: Sequence[Mapping[str, Any]]) -> Table:
    """Return the runs, newest first, one row each."""
    return table(
        [
            {
                "run": f"{r['profile']}/{r['run']}",
                "started": r["started"],
                "state": r["state"],
                "took": Measured(
                    value=r["seconds"], unit="s", reason=None if r["seconds"] is not None else "not recorded"
                ),
                "verdicts": ", ".join(f"{MARKS[Status(k)]} {n} {k}" for k, n in r["counts"].items()) or "none",
                "workbook": r["commit"],
                "SGLang": r["sglang"],
                "model": r["model"],
                "GPUs": r["gpus"] or "none",
            }
            for r in runs
        ],
        caption="Runs, newest first",
        empty="no run below this outputs folder",
    )


def results_table(series: Series, runs: Sequence[Mapping[str, Any]]) -> Table:
    """Return every claim with its latest status and value, the one before, and how often it changed."""
    newest = runs[0]["path"] if runs else None
    rows = []
    for (notebook, key), points in series.items():
        statuses = [p["status"] for p in points]
        last = points[-1]
        changes = sum(a != b for a, b in zip(statuses, statuses[1:], strict=False))
        rows.append(
            {
                "notebook": notebook,
                "claim": f"{key}: {last['claim']}",
                "latest": last["status"]
                if last["path"] == newest
                else Measured(value=None, reason="not in the latest run"),
                "value": last["measured"],
                "before": points[-2]["measured"] if len(points) > 1 else Measured(value=None, reason="first run"),
                "runs": len(points),
                "status changes": changes,
                "history": "".join(MARKS[s] for s in statuses[-40:]),
            }
        )
    return table(rows, caption="Claims over these runs, oldest left in the history", empty="no verdict in these runs")


def history_html(runs: Sequence[Mapping[str, Any]], series: Series, title: str) -> str:
    """Return one page; nothing is loaded, nothing runs."""
    labels = {r["path"]: r["run"] for r in runs}
    charts: list[Markup] = []
    more = 0
    for (notebook, key), points in series.items():
        if sum(p["measured"].value is not None for p in points) < 2:
            continue
        if len(charts) >= CHARTS:
            more += 1
            continue
        made = trend(
            [{"label": labels[p["path"]], "measured": p["measured"]} for p in points], title=f"{notebook} {key}"
        )
        charts.append(Markup(figure_svg(made)))  # noqa: S704
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True)
    return environment.get_template("history.html.j2").render(
        css=Markup(css()),  # noqa: S704
        policy=Markup(POLICY),  # noqa: S704
        title=visible_text(title),
        runs=Markup(runs_table(runs)._repr_html_()),  # noqa: S704
        results=Markup(results_table(series, runs)._repr_html_()),  # noqa: S704
        charts=charts,
        more=more,
    )


def write_history(path: Path, runs: Sequence[Mapping[str, Any]], series: Series, title: str) -> Path:
    """Write the page to a temporary name, then rename it."""
    return write_page(path, history_html(runs, series, title))
