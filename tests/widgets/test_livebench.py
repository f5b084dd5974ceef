"""The live panel: what it shows while the real client measures, its stop button, and that it can't disturb."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lib.load import bench_rows, benchmark, live
from lib.load.live import Told
from lib.records import Measured
from lib.widgets import livebench
from tests.load.bench_server import BenchServer
from tests.load.test_benchmark import EMPTY, Handle, open_run
from tests.widgets.test_panel import Notebook


@pytest.fixture
def server() -> Iterator[BenchServer]:
    made = BenchServer()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    ok = {"status": "ok", "reasons": [], "streams": 4096, "chunks_per_s": 1e9, "workers": 1}
    monkeypatch.setattr(benchmark, "calibrate", lambda streams, api: ok)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    made = Notebook()
    monkeypatch.setattr("IPython.display.display", made.display)
    return made


def measure(
    tmp_path: Path, server: BenchServer, is_live: bool, **params: Any
) -> tuple[livebench.LivePanel, Any, list[Told]]:
    run = open_run(tmp_path, **{"repeats": 1, "depths": [], **params})
    panel = livebench.LivePanel(run, is_live)
    panel.display()
    told: list[Told] = []
    live.watch(run.folder, panel.told)
    live.watch(run.folder, told.append)
    levels = benchmark.measure_levels(run, Handle(run, server), EMPTY)  # type: ignore[arg-type]
    return panel, levels, told


def test_complete_levels_show_the_notebook_s_own_numbers(
    tmp_path: Path, server: BenchServer, notebook: Notebook
) -> None:
    """Rows and picture come from the same summary and the same figure rows as the notebook's tables."""
    panel, levels, told = measure(tmp_path, server, False)
    assert [t.kind for t in told if t.kind != "progress"] == ["begin", "taken", "taken", "taken", "end"]
    assert "Measured: 3 records, 16 answered requests." in notebook.bundles[0]["text/plain"]  # max(4, 2C): 4 + 4 + 8
    for c, repeats in levels.items():
        summary = bench_rows.summary_in(repeats[0].folder)
        (row,) = panel.rows[f"level-C{c}"]
        assert (
            summary
            and all(row[key] == summary[key] for key in livebench.KEYS)
            and row["record"].path.endswith("level.jsonl")
        )
    from lib.report.figures import throughput_latency

    assert (
        panel.view().chart.alt == throughput_latency(bench_rows.figure_rows(levels), title="Complete levels so far").alt
    )  # type: ignore[union-attr]


def test_numbers_come_while_a_level_runs(tmp_path: Path, server: BenchServer, notebook: Notebook) -> None:
    """In the middle of a level: requests done and in flight, tokens a second and latency so far, time left."""
    server.step_s = 0.05
    seen: list[str] = []

    def keep(told: Told) -> None:
        if told.kind == "progress":
            seen.append(notebook.bundles[-2]["text/plain"])

    run = open_run(tmp_path, concurrency=[2], num_requests=12, repeats=1, depths=[])
    panel = (
        livebench.live_panel.__wrapped__(run)
        if hasattr(livebench.live_panel, "__wrapped__")
        else livebench.LivePanel(run, True)
    )
    panel.display()
    live.watch(run.folder, panel.told)
    live.watch(run.folder, keep)
    levels = benchmark.measure_levels(run, Handle(run, server), EMPTY)  # type: ignore[arg-type]
    halfway = [text for text in seen if "of 12 requests" in text and "tok/s so far" in text]
    assert halfway and "in progress (means so far)" in halfway[-1] and "left in this section" in halfway[-1]
    assert len(levels) == 1 and "in progress" not in notebook.bundles[-2]["text/plain"]


def test_the_stop_button_keeps_what_is_measured(tmp_path: Path, server: BenchServer, notebook: Notebook) -> None:
    """Pressed in the second level: the first is whole, the second is kept as far as it got, the third is left out."""
    server.step_s = 0.03
    run = open_run(tmp_path, repeats=1, depths=[], num_requests=10)
    panel = livebench.LivePanel(run, True)
    panel.display()
    live.watch(run.folder, panel.told)
    assert panel.button.disabled  # nothing to stop yet

    def press(told: Told) -> None:
        if told.item == "level-C2" and told.counted.get("done", 0) >= 2 and not panel.button.disabled:
            threading.Thread(target=panel.button.click).start()

    live.watch(run.folder, press)
    benchmark.measure_levels(run, Handle(run, server), EMPTY)  # type: ignore[arg-type]
    text = notebook.bundles[-2]["text/plain"]
    assert text.startswith("Stopped on request; what was measured is kept: 2 records")
    assert panel.rows["level-C1"][0]["state"] == "measured" and panel.rows["level-C2"][0]["state"] == "stopped, kept"
    assert "left out" in panel.rows["level-C4"][0]["state"] and panel.button.disabled
    kept = [json.loads(line) for line in (run.raw / "level-C2" / "level.jsonl").read_text().splitlines()]
    assert 2 <= panel.rows["level-C2"][0]["answered"] < 10 and len(kept) - 1 >= panel.rows["level-C2"][0]["answered"]
    assert not benchmark.stop_file(run).exists()


def test_an_onlooker_that_fails_changes_nothing(tmp_path: Path, server: BenchServer, notebook: Notebook) -> None:
    """What goes wrong in a panel is the panel's: it is told nothing more, and every level is measured."""
    run = open_run(tmp_path, repeats=1, depths=[])
    calls: list[str] = []

    def bad(told: Told) -> None:
        calls.append(told.kind)
        raise RuntimeError("a fault")

    live.watch(run.folder, bad)
    levels = benchmark.measure_levels(run, Handle(run, server), EMPTY)  # type: ignore[arg-type]
    assert calls == ["begin"] and sorted(levels) == [1, 2, 4] and all(m.ok for kept in levels.values() for m in kept)


def test_a_batch_run_draws_once_and_a_rebuild_shows_the_same(
    tmp_path: Path, server: BenchServer, notebook: Notebook
) -> None:
    """Nothing is drawn while a batch run measures; from raw files the same rows and the same picture come out."""
    shows: list[float] = []
    run = open_run(tmp_path, repeats=1, depths=[256], agents=1)
    panel = livebench.LivePanel(run, False)
    panel.display()
    show = panel.outputs.show
    panel.outputs.show = lambda view: (shows.append(time.monotonic()), show(view))[1]  # type: ignore[method-assign,assignment]
    live.watch(run.folder, panel.told)
    benchmark.measure_levels(run, Handle(run, server), EMPTY)  # type: ignore[arg-type]
    benchmark.measure_depths(run, Handle(run, server), EMPTY)  # type: ignore[arg-type]
    assert len(shows) == 2  # the end of each section
    first = list(notebook.bundles)
    assert "depth-256-C1, cold" in first[0]["text/plain"] and "depth-256-C1, hit" in first[0]["text/plain"]
    notebook.bundles.clear()
    live._WATCHING.clear()
    offline = open_run(tmp_path, offline=True, repeats=1, depths=[256], agents=1)
    again = livebench.LivePanel(offline, False)
    again.display()
    live.watch(offline.folder, again.told)
    benchmark.measure_levels(offline, Handle(offline, server), EMPTY)  # type: ignore[arg-type]
    benchmark.measure_depths(offline, Handle(offline, server), EMPTY)  # type: ignore[arg-type]
    assert notebook.bundles == first


def counted(**more: int) -> Told:
    return Told(kind="progress", section="levels", item="level-C2", tokens_each=24, items=1, counted=more)


def test_so_far_is_arithmetic_over_what_has_ended() -> None:
    """4 answered requests of 24 tokens after 8 s are 12 tok/s; 2 s and 6 s in sum are means of 0.5 s and 1.5 s."""
    made = live.so_far(
        counted(done=5, of=10, in_flight=2, ok=4, failed=1, first_ns=2 * 10**9, whole_ns=6 * 10**9, since_ns=8 * 10**9)
    )
    assert made["output_tokens_per_s"].value == 12 and made["first_data_s"].value == 0.5 and made["e2e_s"].value == 1.5
    assert (made["done"].value, made["of"].value, made["in_flight"].value, made["failed"].value) == (5, 10, 2, 1)


def test_nothing_ended_yet_is_unknown_and_not_zero() -> None:
    """Before the first answer, and where answers have no fixed length, there is a reason instead of a number."""
    for told in (counted(), counted(ok=0, since_ns=10**9)):
        made = live.so_far(told)
        assert all(
            made[key].value is None and made[key].reason for key in ("output_tokens_per_s", "first_data_s", "e2e_s")
        )
    chat = Told(
        kind="progress", section="levels", items=1, counted={"ok": 3, "since_ns": 10**9, "first_ns": 3, "whole_ns": 3}
    )
    assert (
        isinstance(live.so_far(chat)["output_tokens_per_s"], Measured)
        and live.so_far(chat)["output_tokens_per_s"].value is None
    )
