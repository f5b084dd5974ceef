"""Records as figures: small, reproducible, with thresholds, words and nothing that a label could bring in."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure

from lib.records import Measured
from lib.report import figures
from lib.report.figures import (
    acceptance,
    by_depth,
    difference_by_position,
    figure_alt,
    figure_svg,
    startup_phases,
    throughput_latency,
)
from tests.report.made_run import HOSTILE, interval, levels
from tests.report.pages import Page

BUCKETS = [{"first": 1, "last": 256, "mean": Measured(value=0.01, unit="nat", low=0.005, high=0.015)},
           {"first": 257, "last": 512, "mean": Measured(value=0.03, unit="nat", low=0.02, high=0.04)}]  # fmt: skip
PHASES = [{"phase": "import", "seconds": 8.1}, {"phase": "load weights", "seconds": Measured(value=3.2, unit="s")},
          {"phase": "capture graphs", "seconds": None}]  # fmt: skip
RATES = [{"label": "random ids", "accept_length": interval(1.02, "", 0.01, 64), "most": 4},
         {"label": "chat", "accept_length": None}]  # fmt: skip
DEPTHS = {"one user, cold": [{"depth": 1024, "ttft_s": interval(0.4, "s", 0.1, 3), "decode": interval(20.0, "tok/s", 2.0, 3)},
                             {"depth": 8192, "ttft_s": interval(9.1, "s", 1.0, 3), "decode": None}],
          "bound": [{"depth": 1024, "ttft_s": 0.1, "decode": 40.0}, {"depth": 8192, "ttft_s": 2.0, "decode": 35.0}]}  # fmt: skip

MADE: dict[str, Callable[[], figures.Chart]] = {
    "throughput": lambda: throughput_latency(
        levels(), ceiling=62.0, ceiling_label="weights ceiling", limits={"ttft_s": 0.5}
    ),
    "compared": lambda: throughput_latency({"plain": levels(), "NEXTN": levels()}, ceiling=620.0),
    "difference": lambda: difference_by_position({"noise floor": BUCKETS, "fp8": BUCKETS}, limits=0.02),
    "phases": lambda: startup_phases(PHASES, deadline_s=60.0),
    "launches": lambda: startup_phases([{**p, "launch": name} for name in ("a", "b") for p in PHASES]),
    "acceptance": lambda: acceptance(RATES),
    "depth": lambda: by_depth(DEPTHS, bounds=["bound"]),
}  # fmt: skip


@pytest.mark.parametrize("name", list(MADE))
def test_figure_is_reproducible_small_and_named(name: str) -> None:
    """Two makings give the same bytes, below 60 kB, with a name for screen readers and text kept as text."""
    svg = figure_svg(MADE[name]())
    assert svg == figure_svg(MADE[name]())
    figure = MADE[name]()
    assert figure_svg(figure) == figure_svg(figure)
    assert len(svg) < 60_000
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img"
    assert root.get("aria-label") == " ".join(figure_alt(MADE[name]()).split())
    assert "<text" in svg and "<metadata" not in svg
    page = Page(svg)
    assert not page.loads and not page.runs


def test_figure_is_the_same_in_another_process() -> None:
    """Neither the process, its hash seed nor the clock is in the picture."""
    code = "from tests.report.test_figures import MADE, figure_svg; print(figure_svg(MADE['compared']()), end='')"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"}
    made = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert made.stdout == figure_svg(MADE["compared"]())


def test_words_tell_values_intervals_and_thresholds() -> None:
    """The alternative text has every value with its interval, the ceiling and the limit."""
    alt = figure_alt(MADE["throughput"]())
    # 17.31 tok/s plus and minus 6%: 16.27 to 18.35
    for text in ("C=1: 17.3 tok/s [16.3, 18.3]", "C=4", "weights ceiling 62 tok/s", "limit 500 ms", "553 ms"):
        assert text in alt
    assert "limit -0.02 nat" in figure_alt(MADE["difference"]())
    assert "deadline 60 s" in figure_alt(MADE["phases"]()) and "capture graphs: — (not measured)" in figure_alt(
        MADE["phases"]()
    )
    assert "threshold 1 (no draft accepted)" in figure_alt(MADE["acceptance"]())


def _lines(figure: Figure, axes: int = 0) -> list[float]:
    return [float(line.get_ydata()[0]) for line in figure.axes[axes].lines if line.get_color() == figures.LIMIT_COLOUR]  # type: ignore[index]


def test_thresholds_are_drawn_where_given_and_only_there() -> None:
    """The ceiling is a line of the throughput panel, the limit one of the latency panel, at their values."""
    figure = MADE["throughput"]()
    assert _lines(figure, 0) == [62.0]
    assert _lines(figure, 1) == [500.0]  # 0.5 s, shown in ms
    assert _lines(figure, 2) == []
    assert sorted(_lines(MADE["difference"]())) == [-0.02, 0.02]
    assert _lines(throughput_latency(levels())) == []
    assert _lines(difference_by_position(BUCKETS, limits=-0.02)) == [-0.02]
    assert _lines(difference_by_position(BUCKETS, limits=[0.05, -0.01])) == [0.05, -0.01]


def test_far_ceiling_is_named_and_does_not_flatten_the_data() -> None:
    """A ceiling far above the data is written instead of drawn."""
    figure = throughput_latency(levels(), ceiling=620.0)
    assert _lines(figure) == []
    assert figure.axes[0].get_ylim()[1] < 100
    assert "620" in figure_svg(figure)


def test_drawn_points_are_the_records() -> None:
    """The points of the throughput panel are the levels' values, the bars their intervals."""
    axes = throughput_latency(levels()).axes[0]
    line, _, (bars,) = axes.containers[0]
    assert list(line.get_xdata()) == [1, 2, 4]
    assert list(line.get_ydata()) == [17.31, 30.94, 44.07]
    low, high = bars.get_segments()[0][:, 1]
    assert (low, high) == pytest.approx((17.31 * 0.94, 17.31 * 1.06))


def test_unknown_is_not_drawn_as_zero() -> None:
    """A level without a value leaves no point; a real zero is one."""
    rows = [
        {"concurrency": 1, "output_tokens_per_s": 0.0},
        {"concurrency": 2, "output_tokens_per_s": Measured(value=None, reason="died")},
    ]
    figure = throughput_latency(rows)
    assert list(figure.axes[0].containers[0][0].get_ydata()) == [0.0]
    assert "C=2: — (died)" in figure_alt(figure)
    assert len(figure.axes) == 1  # no panel for what no level has


@pytest.mark.parametrize(
    "figure", [throughput_latency([]), difference_by_position([]), startup_phases([]), acceptance([]),
               acceptance([{"label": "x", "accept_length": Measured(value=None, reason="unsupported")}])],
)  # fmt: skip
def test_nothing_measured_is_said(figure: figures.Chart) -> None:
    """Without data there is a sentence, not a crash and not an empty frame."""
    assert "was measured" in figure_alt(figure) and "was measured" in figure_svg(figure)


def test_hostile_labels_are_text() -> None:
    """A label brings neither markup nor mathematics nor invisible characters into the picture."""
    for hostile in (HOSTILE, r"$\frac{a}{", "a\nb"):
        svg = figure_svg(acceptance([{"label": hostile, "accept_length": 1.5}], title=hostile))
        page = Page(svg)
        assert not page.runs and not page.loads and "\u202e" not in svg and "\x1b" not in svg


def test_chart_shows_itself_as_svg_and_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook a chart leaves exactly two forms: the picture and, as plain text, its words."""
    shown: list[dict[str, str]] = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    chart = MADE["acceptance"]()
    chart._ipython_display_()
    assert list(shown[0]) == ["image/svg+xml", "text/plain"]
    assert shown[0]["text/plain"] == figure_alt(chart) == repr(chart)


def test_making_figures_changes_nothing_global() -> None:
    """No pyplot figure stays open and no setting changes by making a chart; `style()` sets them on purpose."""
    before, opened = dict(plt.rcParams), plt.get_fignums()
    MADE["throughput"]()
    assert dict(plt.rcParams) == before and plt.get_fignums() == opened
    with plt.rc_context():
        figures.style()
        assert plt.rcParams["svg.fonttype"] == "none" and plt.rcParams["svg.hashsalt"] == "workbook"


def test_foreign_figure_has_a_poor_but_true_name() -> None:
    """A figure that was not made here says that it has no description."""
    assert figure_alt(Figure()) == "a figure without a description"


def test_depths_are_said_in_words_and_nothing_measured_gives_a_reason() -> None:
    """Each series with its depths and intervals; a missing point is left out; no series is a sentence, not an empty frame."""
    words = figure_alt(by_depth(DEPTHS, bounds=["bound"]))
    assert "Time to first token of one user, cold: 1,024 tokens: " in words and "8,192 tokens: 9.1 s" in words
    assert words.count("8,192 tokens") == 3  # the decode rate of the deepest measured point is missing
    assert "no depth was measured" in figure_alt(by_depth({}))
