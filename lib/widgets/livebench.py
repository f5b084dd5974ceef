"""The live benchmark panel: how far, how fast, and a button that stops and keeps what is measured.

It looks on (`lib.load.live`): the load client runs in a process of its own and says twice a second what it has counted
anyway. The stop button makes the file `stop` in the run's folder, which the measuring looks for as it does without a
panel. In a batch run there is no button, and the panel shows what the section gave once it is over.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lib.load import bench_rows, live
from lib.load.benchmark import LEVEL_FILE, stop_file
from lib.load.metrics import is_ok
from lib.records import Evidence, Measured
from lib.report.figures import Chart, throughput_latency
from lib.report.tables import table
from lib.results import Measurement, NotebookRun, Stamp
from lib.widgets.panel import Outputs, View, is_live, reachable, with_words

TITLE = "Live benchmark"
WAITING = "Nothing is being measured yet; this fills as the next cells run."
COLUMNS = (
    "what",
    "state",
    "requests",
    ("output_tokens_per_s", "output tok/s", "tok/s"),
    ("ttft_s_p50", "first token, p50", "s"),
    ("e2e_s_p50", "whole answer, p50", "s"),
    "record",
)
#: What of a record stands for a row; the rows of the notebook's own tables come from the same summary.
KEYS = ("output_tokens_per_s", "ttft_s_p50", "e2e_s_p50")


def live_panel(run: NotebookRun) -> LivePanel:
    """Shows the panel; it fills while the cells below measure."""
    panel = LivePanel(run, is_live(run))
    panel.display()
    live.watch(run.folder, panel.told)
    return panel


class LivePanel:
    """What has been measured, what is being measured, and the button."""

    def __init__(self, run: NotebookRun, is_live_here: bool) -> None:
        self.run, self.live = run, is_live_here
        self.outputs = Outputs()
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.levels: bench_rows.Levels = {}
        self.now: live.Told | None = None
        self.said = WAITING
        self.button: Any = None
        self._chart: Chart | None = None

    def display(self) -> None:
        """Shows the button, where somebody can press it, and what there is."""
        if self.live:
            import ipywidgets
            from IPython.display import display

            self.button = ipywidgets.Button(description="Stop, keep what is measured", disabled=True, icon="stop")
            self.button.layout.width = "20em"
            self.button.on_click(self.stop)
            words = f"{TITLE}: the stop button needs a running kernel; what was measured stands below."
            display(with_words(ipywidgets.HBox([self.button]), words), raw=True)
            reachable(self.button)
        self.outputs.show(self.view())

    def stop(self, _: Any = None) -> None:
        """Asks the measuring to stop; it obeys within a second and keeps the record in progress."""
        stop_file(self.run).touch()
        self.said = "Stop was asked for: the level in progress is written as far as it got."
        if self.button is not None:
            self.button.disabled = True

    def told(self, told: live.Told) -> None:
        """What the measuring tells; in a batch run only the end of a section is shown."""
        if told.kind == "progress":
            self.now = told
        elif told.kind == "taken":
            self.now, self.rows[told.item] = None, self._rows_of(told)
            self._note_level(told)
        elif told.kind == "left_out":
            self.rows[told.item] = [_row(told.item, f"left out: {told.why}", None, told.why or "left out")]
        self._button(told)
        self._words(told)
        if told.kind in ("taken", "end") and (self.live or told.kind == "end"):
            self._chart = self._drawn()
        if self.live or told.kind == "end":
            self.outputs.show(self.view())

    def view(self) -> View:
        """One sentence, one row for each record and for the one in progress, and the picture of the complete levels."""
        rows = [row for listed in self.rows.values() for row in listed]
        if self.now is not None:
            rows.append(_row_in_progress(self.now))
        shown = table(rows, COLUMNS, caption="Measured, and being measured", empty="no record yet")
        return View(self.said, (shown,), self._chart or self._drawn())

    def _words(self, told: live.Told) -> None:
        kept = sum(row["answered"] for listed in self.rows.values() for row in listed)
        if told.kind == "begin":
            self.said = f"Measuring {told.section}: {told.items} records to take."
        elif told.kind == "progress" and (self.button is None or not self.button.disabled):
            c = live.so_far(told)
            rate = c["output_tokens_per_s"]
            fast = f", {rate.value:.4g} tok/s so far" if isinstance(rate.value, float) else ""
            left = f", about {told.left_s:.0f} s left in this section" if told.left_s is not None else ""
            self.said = (
                f"{told.item} ({told.place + 1} of {told.items}): {c['done'].value} of {c['of'].value} requests, "
                f"{c['in_flight'].value} in flight{fast}{left}."
            )
        elif told.kind == "end":
            stopped = any("stopped" in row["state"] for listed in self.rows.values() for row in listed)
            how = "Stopped on request; what was measured is kept" if stopped else "Measured"
            count = sum(1 for listed in self.rows.values() for row in listed if row["record"] is not None)
            self.said = f"{how}: {count} records, {kept} answered requests."

    def _button(self, told: live.Told) -> None:
        if self.button is not None and told.kind in ("begin", "end"):
            self.button.disabled = told.kind == "end"
            reachable(self.button)

    def _rows_of(self, told: live.Told) -> list[dict[str, Any]]:
        """Rows for a record: one, or one for each half of a depth."""
        folder = told.folder or Path()
        halves = [part for part in (folder, folder / "cold", folder / "hit") if (part / LEVEL_FILE).is_file()]
        problem = told.why
        if not halves:
            return [_row(told.item, problem or "no record", None, problem or "no record was left")]
        rows = []
        for part in halves:
            name = told.item if part == folder else f"{told.item}, {part.name}"
            rows.append(self._row_of_record(name, part, problem))
        return rows

    def _row_of_record(self, name: str, folder: Path, problem: str | None) -> dict[str, Any]:
        level, found = bench_rows.level_in(folder), bench_rows.summary_in(folder) or {}
        if level is None:
            return _row(name, problem or "empty record", None, "no request was sent")
        ok = sum(is_ok(request) for request in level.requests)
        state = "measured"
        if problem:
            state = "stopped, kept" if "stopped on request" in problem else problem
        row = _row(name, state, f"{ok} answered of {len(level.requests)} sent", "not in the record")
        evidence = Evidence(path=self.run.path(folder / LEVEL_FILE))
        return {**row, **{key: found[key] for key in KEYS if key in found}, "record": evidence, "answered": ok}

    def _note_level(self, told: live.Told) -> None:
        """Keeps a complete level for the picture, as the notebook's own figure takes it."""
        if told.section != "levels" or told.folder is None or told.why or bench_rows.level_in(told.folder) is None:
            return
        level = bench_rows.level_in(told.folder)
        stamp = Stamp.model_validate_json((told.folder / "stamp.json").read_text())
        concurrency = level.header["load"]["concurrency"] if level else None
        if concurrency:
            self.levels.setdefault(concurrency, []).append(Measurement(told.folder, stamp))

    def _drawn(self) -> Chart:
        rows = sorted(bench_rows.figure_rows(self.levels), key=lambda row: row["concurrency"])
        return throughput_latency(rows, title="Complete levels so far")


def _row(what: str, state: str, requests: str | None, why: str) -> dict[str, Any]:
    nothing = {key: Measured(value=None, reason=why) for key in KEYS}
    return {"what": what, "state": state, "requests": requests, **nothing, "record": None, "answered": 0}


def _row_in_progress(told: live.Told) -> dict[str, Any]:
    counted = live.so_far(told)
    row = _row(told.item, "in progress (means so far)", None, "not known yet")
    row["requests"] = f"{counted['done'].value} of {counted['of'].value}, {counted['in_flight'].value} in flight"
    if counted["failed"].value:
        row["requests"] += f", {counted['failed'].value} failed"
    return row | {
        "output_tokens_per_s": counted["output_tokens_per_s"],
        "ttft_s_p50": counted["first_data_s"],
        "e2e_s_p50": counted["e2e_s"],
    }
