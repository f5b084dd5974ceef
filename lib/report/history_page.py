"""The index over runs as one self-contained page: its tables, and a small chart for each result that has numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from lib.report.figures import figure_svg, trend
from lib.report.history_tables import Series, results_table, runs_table
from lib.report.html import write_page
from lib.report.style import POLICY, css
from lib.report.text import visible_text

#: Charts of one page; beyond it the table has the numbers.
CHARTS = 60


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
