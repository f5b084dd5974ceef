"""The index over runs as two tables: the runs, and each claim from run to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lib.records import Measured, Status
from lib.report.tables import MARKS, Table, table

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
