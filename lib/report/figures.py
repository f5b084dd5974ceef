"""Records as figures: plain records in, a small reproducible SVG out, with thresholds drawn and the picture in words.

Figures don't go through pyplot: nothing global changes, nothing has to be closed. Each carries its alternative text,
which is also what it shows where pictures can't be shown.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lib.records import Measured
from lib.report.clean import clean_svg
from lib.report.tables import display_unit, number_text, shown
from lib.report.text import visible_text

#: Ink, softer ink, grid lines and the ground; a page replaces them by its theme's (`clean.THEMED`).
INK, SOFT, LINE, PLATE = "#1f2430", "#5b6472", "#d5d9e0", "#fffffe"

#: Series colours, told apart by people with any colour vision and on light and dark pages; each with its own marker.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b8689a", "#8a7300", "#3a9ad9")
MARKERS = ("o", "s", "^", "D", "v", "P")
LIMIT_COLOUR = "#c0392b"

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "workbook",
    "text.parse_math": False,
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": SOFT,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.use_mathtext": False,
    "axes.unicode_minus": False,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 1.5,
    "lines.markersize": 5,
    "legend.frameon": False,
    "figure.facecolor": PLATE,
    "axes.facecolor": "none",
    "savefig.facecolor": PLATE,
}


_ONE_AT_A_TIME = threading.RLock()


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """The workbook's look during the `with` block, for one thread at a time: matplotlib's settings are the process's, and
    a widget draws in a thread of its own while a cell may be drawing."""
    with _ONE_AT_A_TIME, matplotlib.rc_context(_STYLE):
        yield


class Chart(Figure):
    """A figure that carries its alternative text and shows itself as SVG in a notebook."""

    alt: str = "a chart without a description"

    def __repr__(self) -> str:
        return self.alt

    def _repr_svg_(self) -> str:
        return figure_svg(self)

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display({"image/svg+xml": figure_svg(self), "text/plain": self.alt}, raw=True)


def style() -> None:
    """Set the workbook's look for every matplotlib figure of this notebook, also for those not made here, as SVG."""
    matplotlib.rcParams.update(_STYLE)
    try:
        from IPython import get_ipython
        from matplotlib_inline.backend_inline import set_matplotlib_formats
    except ImportError:
        return
    if get_ipython() is not None:
        set_matplotlib_formats("svg", metadata={"Date": None})


def figure_alt(figure: Figure) -> str:
    """Return what a figure shows, in words."""
    return figure.alt if isinstance(figure, Chart) else "a figure without a description"


def figure_svg(figure: Figure) -> str:
    """Return a figure as small SVG text: the same figure gives the same bytes; text stays text."""
    out = io.StringIO()
    with styled():
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    return clean_svg(svg, figure_alt(figure), f"f{hashlib.sha256(svg.encode()).hexdigest()[:6]}-")


def _chart(width: float, height: float) -> Chart:
    return Chart(figsize=(width, height), layout="constrained")


def _finished(figure: Chart, alt: str) -> Chart:
    """The figure with its words, laid out once and for all: drawing it again gives the same picture."""
    figure.alt = visible_text(alt)
    with styled():
        figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return figure


def _get(record: Any, key: str, default: Any = None) -> Any:
    if isinstance(record, Mapping):
        return record.get(key, default)
    return getattr(record, key, default)


def _measured(value: Any, unit: str) -> Measured:
    """A number, a `Measured` or nothing, as a `Measured` in `unit` unless it has its own."""
    if isinstance(value, Measured):
        return value
    if value is None:
        return Measured(value=None, reason="not measured")
    if isinstance(value, Mapping):
        return Measured(**value)
    return Measured(value=value, unit=unit)


def _number(measured: Measured) -> float | None:
    value = measured.value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _series(data: Any) -> dict[str, list[Any]]:
    """One series or several by name, as several by name."""
    if isinstance(data, Mapping):
        return {str(name): list(rows) for name, rows in data.items()}
    grouped: dict[str, list[Any]] = {}
    for row in data:
        grouped.setdefault(str(_get(row, "series", "") or ""), []).append(row)
    return grouped


def _label(name: str, limit: int = 48) -> str:
    text = " ".join(visible_text(name).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _errorbar(
    axes: Axes, x: Sequence[float], points: Sequence[Measured], scale: float, index: int, name: str, **kw: Any
) -> None:
    """Points with their 95% intervals; a point without an interval has no bar."""
    values = [float(_number(point) or 0.0) * scale for point in points]
    below, above = [], []
    for value, point in zip(values, points, strict=True):
        below.append(0.0 if point.low is None else max(0.0, value - point.low * scale))
        above.append(0.0 if point.high is None else max(0.0, point.high * scale - value))
    axes.errorbar(
        x,
        values,
        yerr=[below, above],
        color=COLOURS[index % len(COLOURS)],
        marker=MARKERS[index % len(MARKERS)],
        capsize=3,
        elinewidth=1.1,
        label=_label(name) or None,
        **kw,
    )


def _limit_line(axes: Axes, value: float, text: str, vertical: bool = False) -> None:
    if vertical:
        axes.axvline(value, color=LIMIT_COLOUR, linestyle=(0, (5, 3)), linewidth=1.1)
        axes.annotate(
            text, (value, 1.0), xycoords=("data", "axes fraction"), xytext=(3, 2), textcoords="offset points",
            color=LIMIT_COLOUR, fontsize=8, ha="left", va="bottom",
        )  # fmt: skip
    else:
        axes.axhline(value, color=LIMIT_COLOUR, linestyle=(0, (5, 3)), linewidth=1.1)
        axes.annotate(
            text, (0.0, value), xycoords=("axes fraction", "data"), xytext=(3, 2), textcoords="offset points",
            color=LIMIT_COLOUR, fontsize=8, ha="left", va="bottom",
        )  # fmt: skip


def _nothing(title: str, reason: str) -> Chart:
    """A figure that says why there is nothing to draw."""
    figure = _chart(7.0, 0.8)
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.text(0.0, 0.5, f"{_label(title, 120)}: {_label(reason)}", va="center", color=SOFT)
    return _finished(figure, f"{title}: {reason}.")


#: Panels of `throughput_latency`: key of a level, title, unit of bare numbers.
PANELS: tuple[tuple[str, str, str], ...] = (
    ("output_tokens_per_s", "Output throughput", "tok/s"),
    ("ttft_s", "Time to first token", "s"),
    ("itl_s", "Inter-token latency", "s"),
)


def throughput_latency(
    levels: Iterable[Any] | Mapping[str, Iterable[Any]],
    ceiling: Measured | float | None = None,
    *,
    ceiling_label: str = "ceiling",
    limits: Mapping[str, float] | None = None,
    panels: Sequence[tuple[str, str, str]] = PANELS,
    title: str = "",
) -> Chart:
    """Return throughput, time to first token and inter-token latency by concurrency, with 95% intervals.

    Args:
        levels: one mapping or record a level with `concurrency` and, per panel, a `Measured` or a number in the
            panel's unit: `output_tokens_per_s`, `ttft_s`, `itl_s`. A mapping name -> levels compares several series.
        ceiling: the predicted upper limit of throughput (tok/s); far above the data it is named instead of drawn.
        ceiling_label: what the ceiling is.
        limits: a panel's key -> a threshold in the panel's unit.
        panels: (key, title, unit) of each panel.
        title: one line above the figure.
    """
    series = _series(levels)
    used = [panel for panel in panels if any(_number(_measured(_get(r, panel[0]), panel[2])) is not None
                                             for rows in series.values() for r in rows)]  # fmt: skip
    if not used:
        return _nothing(title or "Throughput and latency", "no level was measured")
    words: list[str] = []
    with styled():
        figure = _chart(3.1 * len(used), 2.7)
        for axes, (key, heading, unit) in zip(figure.subplots(1, len(used), squeeze=False)[0], used, strict=True):
            taken = {name: [(float(_get(row, "concurrency")), _measured(_get(row, key), unit)) for row in rows]
                     for name, rows in series.items()}  # fmt: skip
            drawn = {name: [p for p in points if _number(p[1]) is not None] for name, points in taken.items()}
            top = max(float(_number(point) or 0.0) for points in drawn.values() for _, point in points)
            scale, shown_unit = display_unit(top, unit)
            for index, (name, points) in enumerate(drawn.items()):
                if points:
                    _errorbar(axes, [c for c, _ in points], [p for _, p in points], scale, index, name)
            ticks = sorted({c for points in taken.values() for c, _ in points})
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [number_text(int(tick)) for tick in ticks])
            axes.set_xticks([], minor=True)
            axes.set_xlabel("requests at once (C)")
            axes.set_title(_label(f"{heading} ({shown_unit})"))
            highest = max([top * scale, *((p.high or 0.0) * scale for ps in drawn.values() for _, p in ps)])
            if key == "output_tokens_per_s" and ceiling is not None:
                measured = _measured(ceiling, unit)
                limit = _number(measured)
                if limit is None:
                    words.append(f"{ceiling_label}: unknown ({measured.reason})")
                elif limit * scale > 4 * highest:
                    axes.annotate(
                        f"{_label(ceiling_label)}: {shown(measured).text()}, above this axis", (0.0, 1.0),
                        xycoords="axes fraction", xytext=(4, -2), textcoords="offset points", va="top",
                        color=LIMIT_COLOUR, fontsize=8,
                    )  # fmt: skip
                    highest *= 1.25
                    words.append(f"{ceiling_label} {shown(measured).text()}")
                else:
                    _limit_line(axes, limit * scale, f"{_label(ceiling_label)} {number_text(limit * scale)}")
                    highest = max(highest, limit * scale)
                    words.append(f"{ceiling_label} {shown(measured).text()}")
            if limits and key in limits:
                _limit_line(axes, limits[key] * scale, f"limit {number_text(limits[key] * scale)}")
                highest = max(highest, limits[key] * scale)
                words.append(f"{heading} limit {number_text(limits[key] * scale)} {shown_unit}")
            axes.set_ylim(0, highest * 1.12 if highest > 0 else 1)
            for name, points in taken.items():
                listed = ", ".join(f"C={number_text(int(c))}: {shown(p).text(with_n=False)}" for c, p in points)
                words.append(f"{heading}{' of ' + name if name else ''} by concurrency: {listed}")
        _legend(figure, series)
        if title:
            figure.suptitle(_label(title, 120), x=0.01, ha="left", fontsize=10)
    return _finished(figure, (f"{title}. " if title else "") + ". ".join(words) + ".")


def _legend(figure: Chart, series: Mapping[str, Any]) -> None:
    if len(series) > 1 or any(series):
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=min(4, len(labels)))


#: Panels of `by_depth`: key of a row, title, unit of bare numbers.
DEPTH_PANELS: tuple[tuple[str, str, str], ...] = (
    ("ttft_s", "Time to first token", "s"),
    ("decode", "Decode rate of one request", "tok/s"),
)


def by_depth(
    series: Mapping[str, Iterable[Any]],
    *,
    bounds: Sequence[str] = (),
    panels: Sequence[tuple[str, str, str]] = DEPTH_PANELS,
    title: str = "",
) -> Chart:
    """Return time to first token (logarithmic) and decode rate by context depth, one line a series, with 95% intervals.

    Args:
        series: name -> rows with `depth` (tokens) and, per panel, a `Measured` or a number in the panel's unit.
        bounds: names of series that are predictions, drawn dashed and without points.
        panels: (key, title, unit) of each panel.
        title: one line above the figure.
    """
    taken = {name: list(rows) for name, rows in series.items()}
    used = [
        panel for panel in panels
        if any(_number(_measured(_get(r, panel[0]), panel[2])) is not None for rows in taken.values() for r in rows)
    ]  # fmt: skip
    if not used:
        return _nothing(title or "Time to first token and decode rate by depth", "no depth was measured")
    words: list[str] = []
    depths = sorted({float(_get(row, "depth")) for rows in taken.values() for row in rows})
    with styled():
        figure = _chart(4.4 * len(used), 3.3)
        for axes, (key, heading, unit) in zip(figure.subplots(1, len(used), squeeze=False)[0], used, strict=True):
            points = {name: [(float(_get(r, "depth")), _measured(_get(r, key), unit)) for r in rows]
                      for name, rows in taken.items()}  # fmt: skip
            top = max((float(_number(p) or 0.0) for listed in points.values() for _, p in listed), default=0.0)
            scale, shown_unit = display_unit(top, unit)
            highest, lowest = 0.0, math.inf
            beyond = []
            data = [
                (float(_number(p) or 0.0)) * scale for n, listed in points.items() if n not in bounds for _, p in listed
            ]
            linear = not key.startswith("ttft")
            for index, (name, listed) in enumerate(points.items()):
                drawn = sorted((p for p in listed if _number(p[1]) is not None), key=lambda p: p[0])
                if not drawn:
                    continue
                values = [float(_number(p) or 0.0) * scale for _, p in drawn]
                if linear and name in bounds and data and min(values) > 4 * max(data):
                    beyond.append(
                        f"{_label(name)}: {number_text(min(values))} to {number_text(max(values))} {shown_unit}"
                    )
                    words.append(f"{heading}: {beyond[-1]}, above the axis")
                    continue
                highest = max([highest, *values, *((p.high or 0.0) * scale for _, p in drawn)])
                lowest = min([lowest, *values, *(p.low * scale for _, p in drawn if p.low is not None)])
                if name in bounds:
                    marker = "_" if len(drawn) == 1 else ""
                    axes.plot(
                        [d for d, _ in drawn], values, color=LIMIT_COLOUR, linestyle=(0, (5, 3)), linewidth=1.1,
                        marker=marker, label=_label(name),
                    )  # fmt: skip
                else:
                    _errorbar(axes, [d for d, _ in drawn], [p for _, p in drawn], scale, index, name)
                said = ", ".join(f"{d:,.0f} tokens: {shown(p).text(with_n=False)}" for d, p in drawn)
                words.append(f"{heading} of {name}: {said}")
            axes.set_xscale("log", base=2)
            axes.set_xticks(depths, [f"{d:,.0f}" for d in depths])
            axes.set_xticks([], minor=True)
            axes.set_xlabel("context (tokens)")
            logarithmic = not linear and 0 < lowest < math.inf
            for line in beyond:
                axes.annotate(
                    f"{line}, above this axis", (0.0, 1.0), xycoords="axes fraction", xytext=(4, -2),
                    textcoords="offset points", va="top", color=LIMIT_COLOUR, fontsize=8,
                )  # fmt: skip
                highest *= 1.2
            axes.set_title(_label(f"{heading} ({shown_unit}{', log' if logarithmic else ''})"))
            if logarithmic:
                axes.set_yscale("log")
                axes.set_ylim(lowest / 1.5, highest * 1.5)
                marks = _decade_marks(lowest / 1.5, highest * 1.5)
                axes.set_yticks(marks, [number_text(mark) for mark in marks])
                axes.set_yticks([], minor=True)
            else:
                axes.set_ylim(0, highest * 1.12 if highest > 0 else 1)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        more = [(h, n) for h, n in zip(*figure.axes[-1].get_legend_handles_labels(), strict=True) if n not in labels]
        figure.legend(
            [*handles, *(h for h, _ in more)], [*labels, *(n for _, n in more)], loc="outside lower left", ncols=3
        )
        if title:
            figure.suptitle(_label(title, 120), x=0.01, ha="left", fontsize=10)
    return _finished(figure, (f"{title}. " if title else "") + ". ".join(words) + ".")


def _decade_marks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each decade between two positive numbers; only the ones where that would be more than seven."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    every = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
    inside = [mark for mark in every if low <= mark <= high]
    return inside if len(inside) <= 7 else [mark for mark in inside if round(math.log10(mark), 9).is_integer()]


def difference_by_position(
    buckets: Iterable[Any] | Mapping[str, Iterable[Any]],
    limits: Sequence[float] | float | None = None,
    *,
    unit: str = "nat",
    ylabel: str = "mean log-probability difference",
    title: str = "",
) -> Chart:
    """Return mean log-probability differences by position in the context, with 95% intervals and limit lines.

    Args:
        buckets: mappings or records with `first` and `last` (token positions; or a `label`), `mean` (a `Measured` or a
            number in `unit`) and, for several series in one list, `series`; or a mapping name -> buckets.
        limits: thresholds in `unit`; a single positive number stands for plus and minus that number, a single negative
            one for itself (a limit on one side).
        unit: unit of the differences.
        ylabel: what the differences are.
        title: one line above the figure.
    """
    series = _series(buckets)
    places: dict[str, float] = {}
    for rows in series.values():
        for row in rows:
            places.setdefault(_bucket(row), float(_get(row, "first", len(places)) or 0))
    ordered = {name: index for index, name in enumerate(sorted(places, key=lambda name: places[name]))}
    points = {
        name: [(_bucket(row), _measured(_get(row, "mean"), unit)) for row in rows] for name, rows in series.items()
    }
    if not any(_number(point) is not None for listed in points.values() for _, point in listed):
        return _nothing(title or "Difference by position", "no bucket was measured")
    drawn_limits: list[float] = []
    if isinstance(limits, (int, float)):
        drawn_limits = [limits, -limits] if limits > 0 else [limits]
    elif limits is not None:
        drawn_limits = list(limits)
    words = []
    with styled():
        figure = _chart(8.2, 2.9)
        axes = figure.add_subplot()
        axes.axhline(0, color=SOFT, linewidth=0.8)
        for index, (name, listed) in enumerate(points.items()):
            shift = (index - (len(points) - 1) / 2) * 0.12
            kept = [(ordered[place] + shift, point) for place, point in listed if _number(point) is not None]
            if kept:
                _errorbar(axes, [x for x, _ in kept], [p for _, p in kept], 1.0, index, name, linestyle=":")
            words.append(
                f"{name + ': ' if name else ''}"
                + ", ".join(f"{place}: {shown(point).text(with_n=False)}" for place, point in listed)
            )
        for value in drawn_limits:
            _limit_line(axes, value, f"limit {number_text(value)}")
            words.append(f"limit {number_text(value)} {unit}")
        axes.set_xticks(range(len(ordered)), [_label(name, 16) for name in ordered])
        axes.set_xlim(-0.5, len(ordered) - 0.5)
        axes.margins(y=0.15)
        axes.set_xlabel("position in the context (tokens)")
        axes.set_ylabel(f"{_label(ylabel)}{' ' if len(ylabel) < 24 else chr(10)}({_label(unit)})")
        _legend(figure, series)
        if title:
            axes.set_title(_label(title, 120))
    return _finished(figure, (f"{title}. " if title else "") + f"{ylabel} by token position. " + ". ".join(words) + ".")


def _bucket(row: Any) -> str:
    label = _get(row, "label")
    if label:
        return str(label)
    first, last = _get(row, "first"), _get(row, "last")
    return f"{first:,}" if last is None or first == last else f"{first:,}-{last:,}"


def speed_fidelity(rows: Iterable[Any], limit_nats: float, *, title: str = "") -> Chart:
    """Return speed against distance from the reference, one point a trial with both intervals; the others in words below.

    Args:
        rows: mappings with `trial`, `outcome`, `chosen`, `speed` and `fidelity` (each a `Measured` or None), `quote`.
        limit_nats: the largest distance that counts as equal, drawn as a line.
        title: one line above the figure.
    """
    listed = list(rows)
    if not listed:
        return _nothing(title or "Speed against fidelity", "nothing was tried")
    points: list[tuple[Any, Measured, Measured]] = []
    others: list[tuple[Any, Measured, Measured]] = []
    for row in listed:
        speed, apart = _measured(_get(row, "speed"), "tok/s"), _measured(_get(row, "fidelity"), "nat/token")
        pair = _number(speed), _number(apart)
        (others if None in pair else points).append((row, speed, apart))
    lines = [_failure_line(row) for row, *_ in others]
    words = []
    with styled():
        figure = _chart(8.2, 3.4 + 0.2 * len(lines)) if points else _chart(8.2, 0.7 + 0.2 * len(lines))
        axes = figure.add_subplot()
        for place, (row, speed, apart) in enumerate(points):
            x, y = float(_number(apart) or 0.0), float(_number(speed) or 0.0)
            good = _get(row, "outcome") == "works"
            colour = COLOURS[place % len(COLOURS)]
            axes.errorbar(
                [x], [y], xerr=_reach(apart, x), yerr=_reach(speed, y), color=colour, marker=MARKERS[place % len(MARKERS)],
                markerfacecolor=colour if good else "none", linestyle="none", capsize=3, elinewidth=1.1,
                markersize=9 if _get(row, "chosen") else 6,
                label=_label(f"{_get(row, 'trial')}: {str(_get(row, 'outcome')).replace('_', ' ')}"
                             + (" (chosen)" if _get(row, "chosen") else ""), 72),
            )  # fmt: skip
            words.append(
                f"{_get(row, 'trial')} ({str(_get(row, 'outcome')).replace('_', ' ')}): {shown(speed).text(with_n=False)}, "
                f"{shown(apart).text(with_n=False)} from the reference"
            )
        if points:
            axes.set_xscale("symlog", linthresh=max(limit_nats / 100, 1e-6))
            farthest = max(float(apart.high or _number(apart) or 0.0) for *_, apart in points)
            last = max(farthest, limit_nats) * 3
            axes.set_xlim(-limit_nats / 300, last)
            decades = [10.0**power for power in range(-9, 6) if limit_nats / 60 < 10.0**power < last]
            axes.set_xticks([0.0, *decades], ["0", *(f"{tick:g}" for tick in decades)])
            axes.set_xticks([], minor=True)
            axes.set_ylim(0, 1.25 * max(float(speed.high or _number(speed) or 0.0) for _, speed, _ in points) or 1)
            axes.set_xlabel("mean |difference| of log-probability from the reference, nat/token (0: the same bits)")
            axes.set_ylabel("output tok/s")
            _limit_line(axes, limit_nats, f"limit {number_text(limit_nats)}", vertical=True)
            handles, labels = axes.get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside upper left", ncols=1)
        else:
            axes.set_axis_off()
            axes.set_title(_label("no trial has both a speed and a distance", 120))
        if lines:
            text = "\n".join(lines)
            figure.supxlabel(text, x=0.01, ha="left", fontsize=7.5, color=INK)
        if title and points:
            axes.set_title(_label(title, 120), pad=14)
    said = "; ".join([*words, *lines])
    return _finished(figure, f"{title or 'Speed against distance from the reference'}. {said}.")


def _reach(measured: Measured, value: float) -> list[list[float]] | None:
    """Lengths of an error bar to both sides, None without an interval."""
    if measured.low is None or measured.high is None:
        return None
    return [[max(0.0, value - max(measured.low, 0.0))], [max(0.0, measured.high - value)]]


def _failure_line(row: Any) -> str:
    outcome = str(_get(row, "outcome")).replace("_", " ")
    return _label(f"× {_get(row, 'trial')}: {outcome}: {_get(row, 'quote') or 'no line'}", 132)


def startup_phases(phases: Iterable[Any], deadline_s: float | None = None, *, title: str = "") -> Chart:
    """Return where a start's seconds went: one bar a phase, or one stacked bar a launch where there are several.

    Args:
        phases: in order, mappings or records with `phase` (its name), `seconds` (a number or a `Measured`) and, for
            several launches, `launch`.
        deadline_s: the deadline until ready, drawn as a line.
        title: one line above the figure.
    """
    rows: list[tuple[str, str, float | None, Measured]] = []
    for row in phases:
        measured = _measured(_get(row, "seconds"), "s")
        rows.append((str(_get(row, "launch", "") or ""), str(_get(row, "phase")), _number(measured), measured))
    if not any(seconds is not None for _, _, seconds, _ in rows):
        return _nothing(title or "Start-up phases", "no phase was measured")
    launches = list(dict.fromkeys(launch for launch, *_ in rows))
    names = list(dict.fromkeys(phase for _, phase, *_ in rows))
    totals = {launch: sum(s or 0.0 for one, _, s, _ in rows if one == launch) for launch in launches}
    with styled():
        lines = len(rows) if len(launches) == 1 else len(launches)
        figure = _chart(8.2, 1.1 + 0.27 * lines + (0.3 if len(launches) > 1 else 0))
        axes = figure.add_subplot()
        axes.grid(axis="y", visible=False)
        largest = max([*totals.values(), deadline_s or 0.0])
        if len(launches) == 1:
            start = 0.0
            for place, (_, _, seconds, measured) in enumerate(rows):
                if seconds is not None:
                    axes.barh(place, seconds, left=start, height=0.62, color=COLOURS[0])
                    start += seconds
                axes.annotate(
                    shown(measured).text(with_n=False), (start, place), xytext=(4, 0), textcoords="offset points",
                    va="center", fontsize=8, color=INK,
                )  # fmt: skip
            axes.set_yticks(range(len(rows)), [_label(phase) for _, phase, *_ in rows])
        else:
            for place, launch in enumerate(launches):
                start = 0.0
                for one, phase, seconds, _ in rows:
                    if one == launch and seconds is not None:
                        colour = COLOURS[names.index(phase) % len(COLOURS)]
                        hatch = ("", "//", "..")[names.index(phase) // len(COLOURS) % 3]
                        axes.barh(place, seconds, left=start, height=0.62, color=colour, hatch=hatch, edgecolor="white",
                                  linewidth=0.5, label=_label(phase))  # fmt: skip
                        start += seconds
                axes.annotate(shown(Measured(value=start, unit="s")).text(), (start, place), xytext=(4, 0),
                              textcoords="offset points", va="center", fontsize=8, color=INK)  # fmt: skip
            axes.set_yticks(range(len(launches)), [_label(launch, 32) for launch in launches])
            handles, labels = axes.get_legend_handles_labels()
            unique = dict(zip(labels, handles, strict=True))
            figure.legend(list(unique.values()), list(unique), loc="outside lower left", ncols=min(4, len(unique)))
        axes.set_ylim(lines - 0.5, -0.5)
        axes.set_xlim(0, largest * 1.15 or 1)
        axes.set_xlabel("seconds since launch")
        if deadline_s is not None:
            _limit_line(axes, deadline_s, f"deadline {number_text(deadline_s)} s", vertical=True)
        if title:
            axes.set_title(_label(title, 120), pad=14 if deadline_s is not None else None)
    words = [f"{launch + ', ' if launch else ''}{phase}: {shown(m).text(with_n=False)}" for launch, phase, _, m in rows]
    if deadline_s is not None:
        words.append(f"deadline {number_text(deadline_s)} s")
    return _finished(figure, (f"{title}. " if title else "") + "Seconds by start-up phase. " + "; ".join(words) + ".")


def acceptance(
    rows: Iterable[Any],
    limit: float | None = 1.0,
    *,
    limit_label: str = "no draft accepted",
    xlabel: str = "accept length (tokens per verify step)",
    title: str = "",
) -> Chart:
    """Return accept lengths of speculative decoding as bars with 95% intervals and a threshold.

    Args:
        rows: mappings or records with `label` (what text, what server), `accept_length` (a `Measured` or a number) and,
            optionally, `most` (draft tokens + 1: what could be accepted at best), drawn as the bar's frame.
        limit: the threshold; 1.0 means that verifying never yields more than decoding. None: no line.
        limit_label: what the threshold means.
        xlabel: what is measured.
        title: one line above the figure.
    """
    listed = [(str(_get(row, "label")), _measured(_get(row, "accept_length"), ""), _get(row, "most")) for row in rows]
    if not any(_number(point) is not None for _, point, _ in listed):
        return _nothing(title or "Accept length", "no accept length was measured")
    words = []
    with styled():
        figure = _chart(8.2, 1.0 + 0.32 * len(listed))
        axes = figure.add_subplot()
        axes.grid(axis="y", visible=False)
        largest = limit or 0.0
        for place, (label, point, most) in enumerate(listed):
            value = _number(point)
            end = 0.0
            if value is not None:
                low = 0.0 if point.low is None else max(0.0, value - point.low)
                high = 0.0 if point.high is None else max(0.0, point.high - value)
                bars = [[low], [high]] if low or high else None
                axes.barh(place, value, height=0.6, color=COLOURS[0], xerr=bars, ecolor=INK, capsize=3)
                end = value + high
            if most is not None:
                end = max(end, float(most))
                axes.barh(place, float(most), height=0.6, facecolor="none", edgecolor=SOFT, linewidth=0.8)
            axes.annotate(
                shown(point).text(with_n=False), (end, place), xytext=(5, 0), textcoords="offset points", va="center",
                fontsize=8, color=INK,
            )  # fmt: skip
            largest = max(largest, end, float(most or 0))
            words.append(f"{label}: {shown(point).text()}" + (f" of at most {most}" if most is not None else ""))
        axes.set_yticks(range(len(listed)), [_label(label) for label, *_ in listed])
        axes.set_ylim(len(listed) - 0.5, -0.5)
        axes.set_xlim(0, largest * 1.2)
        axes.set_xlabel(_label(xlabel, 80))
        if limit is not None:
            _limit_line(axes, limit, f"{number_text(limit)}: {_label(limit_label)}", vertical=True)
            words.append(f"threshold {number_text(limit)} ({limit_label})")
        if title:
            axes.set_title(_label(title, 120), pad=16 if limit is not None else None)
    return _finished(figure, (f"{title}. " if title else "") + f"{xlabel}. " + "; ".join(words) + ".")


def error_by_context(
    series: Mapping[str, Iterable[Any]], *, title: str = "", ylabel: str = "relative error of one attention output"
) -> Chart:
    """Return a relative error by context length, one line a series, both axes logarithmic.

    Args:
        series: name -> points with `keys` and `error` (a `Measured` share or a number); a point without a value is
            left out and named in the words.
        title: one line above the figure.
        ylabel: what the error is of.
    """
    drawn = {
        name: [(int(_get(p, "keys")), _measured(_get(p, "error"), "frac")) for p in points]
        for name, points in series.items()
    }
    if not any(_number(m) for points in drawn.values() for _, m in points):
        return _nothing(title or "Error by context", "no error was computed")
    words = []
    with styled():
        figure = _chart(7.0, 3.4)
        axes = figure.add_subplot()
        for index, (name, points) in enumerate(drawn.items()):
            shown_points = [(x, m) for x, m in points if (_number(m) or 0.0) > 0]
            if shown_points:
                _errorbar(axes, [x for x, _ in shown_points], [m for _, m in shown_points], 100.0, index, name)
            listed = ", ".join(f"{number_text(x)} keys: {shown(m).text(with_n=False)}" for x, m in points)
            words.append(f"{name}: {listed}")
        ticks = sorted({x for points in drawn.values() for x, _ in points})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ticks, [number_text(tick) for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_formatter(lambda value, _position: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda _value, _position: "")
        axes.set_xlabel("keys in the context")
        axes.set_ylabel(f"{ylabel} (%)")
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=2)
        if title:
            figure.suptitle(_label(title, 120), x=0.01, ha="left", fontsize=10)
    return _finished(figure, (f"{title}. " if title else "") + ". ".join(words) + ".")


def trend(points: Iterable[Any], *, title: str = "") -> Chart:
    """Return one result over runs, oldest left, with its 95% intervals.

    Args:
        points: `label` (the run) and `measured` (a `Measured`), in the order of the runs; one without a value is named
            in the words and leaves a gap.
        title: one line above the figure.
    """
    listed = [(str(_get(p, "label")), _measured(_get(p, "measured"), "")) for p in points]
    drawn = [(i, m) for i, (_, m) in enumerate(listed) if _number(m) is not None]
    if not drawn:
        return _nothing(title or "Over runs", "no run has a number")
    with styled():
        figure = _chart(3.4, 1.9)
        axes = figure.add_subplot()
        top = max(abs(float(_number(m) or 0.0)) for _, m in drawn)
        scale, unit = display_unit(top, drawn[-1][1].unit or "")
        _errorbar(axes, [float(i) for i, _ in drawn], [m for _, m in drawn], scale, 0, "", linestyle=":")
        ends = sorted({0, len(listed) - 1})
        axes.set_xlim(-0.5, len(listed) - 0.5)
        axes.set_xticks(ends, [_label(listed[i][0], 20) for i in ends])
        axes.set_title(_label(f"{title} ({unit})" if unit else title, 60))
    words = ", ".join(f"{label}: {shown(m).text(with_n=False)}" for label, m in listed)
    return _finished(figure, f"{title} over {len(listed)} runs: {words}.")
