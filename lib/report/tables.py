"""Records as tables: the only place that rounds a number or converts a unit.

A `Table` shows itself as HTML in a notebook and in the report, as Markdown, and as plain text. Cells are data: all of
them are escaped, and what is invisible in them is shown (`lib.report.text`). `Measured` keeps its exact value in the
cell's title.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lib.records import Evidence, Measured, Prediction, Status, Trial, Verdict
from lib.report.text import anchor, escaped, relative_href, shortened, visible_text

Exists = Callable[[str], bool]

#: A verdict's mark: readable without colour.
MARKS: dict[Status, str] = {
    Status.PASS: "✓",
    Status.FAIL: "✗",
    Status.INCONCLUSIVE: "?",
    Status.INVALID: "⊘",
    Status.UNSUPPORTED: "–",
    Status.ERROR: "!",
}

NOTHING = "—"
QUOTE_CHARACTERS = 300
CELL_CHARACTERS = 2000

#: Display units by family: (factor to the base unit, name), smallest first.
_SECONDS = ((1e-6, "µs"), (1e-3, "ms"), (1.0, "s"))
_BYTES = ((1.0, "B"), (1024.0, "KiB"), (1024.0**2, "MiB"), (1024.0**3, "GiB"), (1024.0**4, "TiB"))
_FRACTION = ((0.01, "%"),)

#: What records call a unit -> its family and its size in the family's base unit.
_FAMILIES: dict[str, tuple[tuple[tuple[float, str], ...], float]] = {
    "s": (_SECONDS, 1.0),
    "ms": (_SECONDS, 1e-3),
    "us": (_SECONDS, 1e-6),
    "µs": (_SECONDS, 1e-6),
    "ns": (_SECONDS, 1e-9),
    "bytes": (_BYTES, 1.0),
    "B": (_BYTES, 1.0),
    "KiB": (_BYTES, 1024.0),
    "MiB": (_BYTES, 1024.0**2),
    "GiB": (_BYTES, 1024.0**3),
    "frac": (_FRACTION, 1.0),
    "%": (_FRACTION, 0.01),
}

#: Byte counts below this stay exact.
_EXACT_BYTES = 100_000


def display_unit(value: float, unit: str, show: str = "") -> tuple[float, str]:
    """Return the factor and the unit in which `value` (in `unit`) is shown; `show` forces one of the same family.

    Args:
        value: the number, in `unit`.
        unit: a record's unit, such as `s`, `bytes`, `bytes/token`, `frac`, `tok/s`.
        show: the wanted unit, or "" for the one that suits the number's size.

    Raises:
        ValueError: `show` is not of the same family as `unit`.

    Example: `display_unit(0.0123, "s")` is `(1000.0, "ms")`.
    """
    base, slash, per = unit.partition("/")
    family = _FAMILIES.get(base)
    if family is None:
        if show and show != unit:
            raise ValueError(f"unit {unit!r} can't be shown as {show!r}")
        return 1.0, unit
    steps, size = family
    if show:
        wanted, _, show_per = show.partition("/")
        factors = {name: factor for factor, name in steps}
        if wanted not in factors or show_per != per:
            raise ValueError(f"unit {unit!r} can't be shown as {show!r}; known: {sorted(factors)}")
        return size / factors[wanted], show
    magnitude = abs(value) * size
    factor, name = steps[0]
    if steps is _SECONDS and magnitude == 0:
        factor, name = steps[-1]
    elif not (steps is _BYTES and magnitude < _EXACT_BYTES):
        for step_factor, step_name in steps:
            if magnitude >= step_factor:
                factor, name = step_factor, step_name
    return size / factor, name + slash + per


def _decimals(value: float, half_width: float | None) -> int:
    """How many decimals a number deserves: two digits of its interval's half-width, else four significant digits."""
    size = abs(value)
    if half_width:
        wanted = 1 - math.floor(math.log10(half_width))
        most = 5 - math.floor(math.log10(size)) if size else wanted
        return max(0, min(wanted, max(most, 0)))
    if not size:
        return 0
    return max(0, 3 - math.floor(math.log10(size)))


def number_text(value: float | int, decimals: int | None = None) -> str:
    """Return a number rounded for reading, thousands separated; a real zero stays `0`.

    Example: `number_text(1646.7)` is `"1,647"`; `number_text(0.012345)` is `"0.01235"`.
    """
    if isinstance(value, int) and decimals is None:
        return f"{value:,}"
    number = float(value)
    if math.isnan(number):
        return "not a number"
    if math.isinf(number):
        return "∞" if number > 0 else "-∞"
    if decimals is not None:
        text = f"{number:,.{decimals}f}"
        return text if text.strip("-0.,") else text.lstrip("-")
    if number and abs(number) < 1e-4:
        return f"{number:.2e}"
    text = f"{number:,.{_decimals(number, None)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


@dataclass(frozen=True)
class Shown:
    """A `Measured` as a reader sees it, in parts."""

    value: str
    unit: str = ""
    interval: str = ""
    n: str = ""
    why: str = ""
    exact: str = ""

    def text(self, with_n: bool = True) -> str:
        """Return the parts in one line."""
        parts = [f"{self.value} {self.unit}".rstrip() if self.unit != "%" else f"{self.value} %"]
        if self.interval:
            parts.append(self.interval)
        if with_n and self.n:
            parts.append(self.n)
        if self.why:
            parts.append(f"({self.why})")
        return " ".join(parts)


def shown(measured: Measured, show: str = "") -> Shown:
    """Return a measured value rounded to what its interval supports, in the unit that suits its size.

    Two significant digits of the interval's half-width decide the decimals; without an interval four significant digits
    are shown. An integer that needs no conversion stays exact.

    Example: `shown(Measured(value=36.0971, unit="tok/s", n=4, low=33.98, high=38.21)).text()` is
    `"36.1 tok/s [34.0, 38.2] n=4"`.
    """
    value, unit = measured.value, measured.unit
    n = f"n={measured.n:,}" if measured.n is not None else ""
    if value is None:
        return Shown(value=NOTHING, n=n, why=visible_text(measured.reason or "no reason given"))
    why = visible_text(measured.reason) if measured.reason else ""
    if isinstance(value, bool):
        return Shown(value="yes" if value else "no", n=n, why=why)
    if isinstance(value, str):
        quoted = value if value and value == value.strip() else f'"{value}"'  # a space is an answer too
        return Shown(value=visible_text(quoted), unit=visible_text(unit), n=n, why=why)
    low, high = measured.low, measured.high
    if not math.isfinite(value):
        return Shown(value=number_text(float(value)), unit=visible_text(unit), n=n, why=why)
    largest = max(abs(part) for part in (value, low, high) if part is not None and math.isfinite(part))
    factor, name = display_unit(value if value else largest, unit, show)
    half = None
    if low is not None and high is not None and math.isfinite(low) and math.isfinite(high):
        half = abs(high - low) / 2 * factor
    exact = f"{value!r} {unit}".strip()
    if half:
        decimals: int | None = _decimals(value * factor, half)
    else:
        decimals = None
    kept = value if factor == 1.0 and decimals is None else value * factor
    interval = ""
    if low is not None or high is not None:
        ends = ["-∞" if low is None else number_text(low * factor, decimals)]
        ends.append("∞" if high is None else number_text(high * factor, decimals))
        interval = f"[{ends[0]}, {ends[1]}]"
        exact += f", 95% interval [{low!r}, {high!r}]"
    elif why:
        why = f"no interval: {why}"
    return Shown(number_text(kept, decimals), visible_text(name), interval, n, why, exact)


@dataclass(frozen=True)
class Column:
    """One column: the key in a row, its title, the unit of its bare numbers, and the unit to show them in.

    With `show`, the unit stands in the title and not in each cell: `Column("ttft_s", "TTFT", unit="s", show="ms")`.
    """

    key: str
    title: str = ""
    unit: str = ""
    show: str = ""

    @property
    def heading(self) -> str:
        """The title, with the shown unit."""
        title = self.title or self.key.replace("_", " ")
        return visible_text(f"{title} ({self.show})" if self.show else title)


@dataclass(frozen=True)
class Cell:
    """One cell as text and as HTML; `kind` is `num`, `text` or `status`."""

    text: str
    html: str
    kind: str = "text"


_NOTHING = Cell(NOTHING, f'<span class="why">{NOTHING}</span>')


def _number_cell(value: float | int, column: Column) -> Cell:
    measured = Measured(value=value, unit=column.unit)
    return _measured_cell(measured, column)


def _measured_cell(measured: Measured, column: Column, with_n: bool = True) -> Cell:
    parts = shown(measured, column.show)
    if column.show and isinstance(measured.value, (int, float)):
        parts = Shown(parts.value, "", parts.interval, parts.n, parts.why, parts.exact)
    title = f' title="{escaped("exact: " + parts.exact)}"' if parts.exact else ""
    unit = f" <i>{escaped(parts.unit)}</i>" if parts.unit else ""
    markup = f'<span class="num"{title}>{escaped(parts.value)}{unit}</span>'
    if parts.interval:
        markup += f' <span class="ci">{escaped(parts.interval)}</span>'
    if with_n and parts.n:
        markup += f' <span class="n">{escaped(parts.n)}</span>'
    if parts.why:
        markup += f' <span class="why">{escaped(parts.why)}</span>'
    numeric = isinstance(measured.value, (int, float)) and not isinstance(measured.value, bool)
    return Cell(parts.text(with_n), markup, "num" if numeric else "text")


def badge(status: Status) -> str:
    """Return a status as HTML: mark and word, coloured by the page's style where there is one."""
    return f'<span class="badge {status.value}">{MARKS[status]} {status.value}</span>'


def evidence_html(evidence: Evidence, exists: Exists | None = None) -> str:
    """Return a link to the raw file (line number shown) with the quoted text; no link where there is no such file."""
    where = evidence.path + (f":{evidence.line}" if evidence.line is not None else "")
    href = relative_href(evidence.path)
    if href is None:
        markup = f"<code>{escaped(where)}</code>"
    elif exists is not None and not exists(evidence.path):
        markup = f'<code>{escaped(where)}</code> <span class="why">file not found</span>'
    else:
        markup = f'<a class="evidence" href="{escaped(href)}">{escaped(where)}</a>'
    if evidence.quote:
        markup += f' <q class="quote">{escaped(shortened(evidence.quote, QUOTE_CHARACTERS))}</q>'
    if evidence.note:
        markup += f' <span class="why">{escaped(evidence.note)}</span>'
    return markup


def evidence_text(evidence: Evidence) -> str:
    """Return the raw file's path, line and note in one line."""
    where = evidence.path + (f":{evidence.line}" if evidence.line is not None else "")
    return visible_text(where + (f" ({evidence.note})" if evidence.note else ""))


def _cell(value: Any, column: Column, exists: Exists | None) -> Cell:
    if value is None:
        return _NOTHING
    if isinstance(value, Cell):
        return value
    if isinstance(value, Measured):
        return _measured_cell(value, column)
    if isinstance(value, Status):
        return Cell(f"{MARKS[value]} {value.value}", badge(value), "status")
    if isinstance(value, Evidence):
        return Cell(evidence_text(value), evidence_html(value, exists))
    if isinstance(value, bool):
        return Cell("yes" if value else "no", "yes" if value else "no")
    if isinstance(value, (int, float)):
        return _number_cell(value, column)
    if isinstance(value, Mapping):
        value = ", ".join(f"{key}={item}" for key, item in value.items())
    elif isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        items = list(value)
        if not items:
            return _NOTHING
        parts = [_cell(item, column, exists) for item in items]
        separator = "<br>" if any(isinstance(item, Evidence) for item in items) else ", "
        return Cell(", ".join(part.text for part in parts), separator.join(part.html for part in parts))
    text = shortened(str(value), CELL_CHARACTERS)
    return Cell(visible_text(text), escaped(text).replace("\n", "<br>"))


def _stacked(*cells: Cell) -> Cell:
    """Cells under each other in one cell."""
    used = [cell for cell in cells if cell.text]
    return Cell("; ".join(cell.text for cell in used), "<br>".join(cell.html for cell in used))


def _why(text: str) -> Cell:
    return Cell(visible_text(text), f'<span class="why">{escaped(text)}</span>')


@dataclass(frozen=True)
class Table:
    """Rows of cells under headings, shown as HTML, Markdown or plain text; `ids` are the rows' anchors in a page."""

    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""
    ids: tuple[str, ...] = ()
    name: str = "table"
    empty: str = "nothing to show"

    def _repr_html_(self) -> str:
        caption = f"<caption>{escaped(self.caption)}</caption>" if self.caption else ""
        if not self.rows:
            return f'<p class="why">{escaped(self.caption or self.name)}: {escaped(self.empty)}</p>'
        kinds = [self._kind(index) for index in range(len(self.headings))]
        head = "".join(
            f'<th scope="col" class="{kind}">{escaped(heading)}</th>'
            for kind, heading in zip(kinds, self.headings, strict=True)
        )
        body = []
        for index, row in enumerate(self.rows):
            mark = f' id="{escaped(self.ids[index])}"' if self.ids and self.ids[index] else ""
            cells = "".join(f'<td class="{kind}">{cell.html}</td>' for kind, cell in zip(kinds, row, strict=True))
            body.append(f"<tr{mark}>{cells}</tr>")
        return (
            f'<div class="table-scroll"><table class="wb {escaped(self.name)}">{caption}'
            f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
        )

    def _kind(self, index: int) -> str:
        kinds = {row[index].kind for row in self.rows if not row[index].text.startswith(NOTHING)}
        return kinds.pop() if len(kinds) == 1 else "text"

    def _repr_markdown_(self) -> str:
        if not self.rows:
            return f"{self.caption or self.name}: {self.empty}\n"

        def line(texts: Iterable[str]) -> str:
            return "| " + " | ".join(_markdown_cell(text) for text in texts) + " |"

        rule = "|" + "|".join("---:" if self._kind(i) == "num" else "---" for i in range(len(self.headings))) + "|"
        lines = [line(self.headings), rule, *(line(cell.text for cell in row) for row in self.rows)]
        if self.caption:
            lines = [f"**{_markdown_cell(self.caption)}**", "", *lines]
        return "\n".join(lines) + "\n"

    def __repr__(self) -> str:
        if not self.rows:
            return f"{self.caption or self.name}: {self.empty}"
        lines = [list(self.headings), *[[" ".join(cell.text.split()) for cell in row] for row in self.rows]]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.headings))]
        right = [self._kind(i) == "num" for i in range(len(self.headings))]

        def padded(line: Sequence[str]) -> str:
            cells = (
                text.rjust(width) if to_right else text.ljust(width)
                for text, width, to_right in zip(line, widths, right, strict=True)
            )
            return "  ".join(cells).rstrip()

        text = [padded(line) for line in lines]
        text.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([visible_text(self.caption), *text] if self.caption else text)

    def csv(self) -> str:
        """Return the table as CSV, cells as they are shown; a cell that a spreadsheet would run is quoted as text."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([_inert(heading) for heading in self.headings])
        for row in self.rows:
            writer.writerow([_inert(cell.text) for cell in row])
        return out.getvalue()


def _inert(text: str) -> str:
    """A cell that a spreadsheet would take for a formula, marked as text."""
    return f"'{text}" if text[:1] in ("=", "+", "@", "\t") or (text[:1] == "-" and not text[1:2].isdigit()) else text


def _markdown_cell(text: str) -> str:
    flat = " ".join(visible_text(text).split())
    for mark in "\\|`*_<>[]":
        flat = flat.replace(mark, "\\" + mark)
    return flat


def _value(row: Any, key: str) -> Any:
    """A row's value by key or attribute; dots go deeper (`values.ttft_s`); a missing key is a programming error."""
    for part in key.split("."):
        row = row[part] if isinstance(row, Mapping) else getattr(row, part)
    return row


def _columns(rows: Sequence[Any], columns: Any) -> list[Column]:
    if columns is None:
        keys: dict[str, None] = {}
        for row in rows:
            names = row if isinstance(row, Mapping) else getattr(type(row), "model_fields", None) or vars(row)
            keys.update(dict.fromkeys(str(name) for name in names))
        return [Column(key) for key in keys]
    if isinstance(columns, Mapping):
        columns = [(key, title) for key, title in columns.items()]
    made = []
    for column in columns:
        if isinstance(column, Column):
            made.append(column)
        elif isinstance(column, str):
            made.append(Column(column))
        else:
            made.append(Column(*column))
    return made


def table(
    rows: Iterable[Any],
    columns: Mapping[str, str] | Iterable[str | tuple[str, ...] | Column] | None = None,
    caption: str = "",
    *,
    exists: Exists | None = None,
    empty: str = "nothing to show",
) -> Table:
    """Return a table of mappings or records.

    Args:
        rows: mappings, records or objects; cells: `Measured`, `Status`, `Evidence`, lists of these, numbers, text.
        columns: keys in order: `"key"`, `("key", "Title")`, `("key", "Title", "unit", "shown unit")`, a `Column`, or a
            mapping key -> title; None takes all keys. Dots go deeper: `"values.ttft_s"`.
        caption: what the table shows, in one line.
        exists: tells whether a raw file is there; evidence is a link only then. None: always a link.
        empty: what is said when there are no rows.

    Raises:
        KeyError, AttributeError: a row lacks a column (with `columns=None` a missing key is an empty cell).

    Example: `table([{"c": 1, "ttft_s": 0.0123}], ["c", ("ttft_s", "TTFT", "s", "ms")])` has the cells `1` and `12.3`.
    """
    listed = list(rows)
    made = _columns(listed, columns)
    cells = []
    for row in listed:
        if columns is None and isinstance(row, Mapping):
            cells.append(tuple(_cell(row.get(column.key), column, exists) for column in made))
        else:
            cells.append(tuple(_cell(_value(row, column.key), column, exists) for column in made))
    return Table(tuple(column.heading for column in made), tuple(cells), caption, empty=empty)


_PLAIN = Column("")


def _measured_without_n(measured: Measured | None) -> Cell:
    return _NOTHING if measured is None else _measured_cell(measured, _PLAIN, with_n=False)


def verdict_table(
    verdicts: Iterable[Verdict],
    caption: str = "",
    *,
    exists: Exists | None = None,
    href: Callable[[Verdict], str | None] | None = None,
    anchors: bool = True,
) -> Table:
    """Return claims against their limits: predicted or reference, measured with interval, n, rule, status, evidence.

    Each row's anchor is `verdict-<id>`, to which the report's index links.

    Args:
        verdicts: in the order in which they are shown.
        caption: one line above the table.
        exists: tells whether a raw file is there (see `table`).
        href: where a claim links to (the index links to the notebook's section).
        anchors: False where another table on the page owns the anchors.
    """
    rows, ids = [], []
    for verdict in verdicts:
        target = href(verdict) if href else None
        claim = escaped(verdict.claim)
        if target:
            claim = f'<a href="{escaped(target)}">{claim}</a>'
        n = verdict.measured.n if verdict.measured else None
        rows.append(
            (
                _cell(verdict.status, _PLAIN, exists),
                _stacked(Cell(visible_text(verdict.claim), claim), _why(verdict.reason)),
                _measured_without_n(verdict.predicted),
                _measured_without_n(verdict.measured),
                _cell(verdict.limit, _PLAIN, exists),
                _cell(n, _PLAIN, exists),
                _cell(verdict.rule, _PLAIN, exists),
                _cell(verdict.evidence, _PLAIN, exists),
            )
        )
        ids.append(anchor("verdict", verdict.id))
    headings = ("verdict", "claim", "predicted or reference", "measured [95%]", "limit", "n", "rule", "evidence")
    return Table(headings, tuple(rows), caption, tuple(ids) if anchors else (), "verdicts", "no verdict was recorded")


def trial_table(
    trials: Iterable[Trial],
    values: Mapping[str, str] | Iterable[str | tuple[str, ...] | Column] | None = None,
    caption: str = "",
    *,
    exists: Exists | None = None,
) -> Table:
    """Return what was tried: status, outcome with its reason, numbers, seconds, launches, evidence.

    Args:
        trials: in the order in which they are shown.
        values: which of the trials' values are columns (as `columns` of `table`); None takes all that any trial has.
        caption: one line above the table.
        exists: tells whether a raw file is there (see `table`).
    """
    listed = list(trials)
    columns = _columns([trial.values for trial in listed], values)
    rows = []
    for trial in listed:
        rows.append(
            (
                Cell(visible_text(trial.what), escaped(trial.what)),
                _cell(trial.status, _PLAIN, exists),
                _stacked(
                    Cell(trial.outcome.replace("_", " "), escaped(trial.outcome.replace("_", " "))),
                    _why(trial.reason or ""),
                ),
                *(_cell(trial.values.get(column.key), column, exists) for column in columns),
                _cell(trial.seconds, Column("", unit="s"), exists),
                _cell(trial.launch_ids, _PLAIN, exists),
                _cell(trial.evidence, _PLAIN, exists),
            )
        )
    headings = ("tried", "verdict", "outcome", *(column.heading for column in columns), "took", "launch", "evidence")
    ids = tuple(anchor("trial", trial.id) for trial in listed)
    return Table(headings, tuple(rows), caption, ids, "trials", "nothing was tried")


def difference(predicted: Measured | None, measured: Measured | None) -> Measured:
    """Return measured relative to predicted as a fraction, with the measured interval, or why there is none.

    Example: predicted 620 tok/s, measured 172.2 tok/s: -0.722 (shown as -72.23 %).
    """
    if predicted is None or measured is None:
        return Measured(value=None, reason="not measured" if measured is None else "not predicted")
    for side, name in ((predicted, "prediction"), (measured, "measurement")):
        if side.value is None:
            return Measured(value=None, reason=f"no {name}")
        if isinstance(side.value, (bool, str)):
            same = predicted.value == measured.value
            return Measured(value="the same" if same else "different")
    if predicted.unit != measured.unit:
        return Measured(value=None, reason=f"units differ: {predicted.unit or 'none'} and {measured.unit or 'none'}")
    base = predicted.value
    if not isinstance(base, (int, float)) or not isinstance(measured.value, (int, float)):
        return Measured(value=None, reason="not numbers")
    if base == 0:
        return Measured(value=None, reason="predicted is zero")
    ends = sorted(end / base - 1 for end in (measured.low, measured.high) if end is not None)
    low, high = (ends[0], ends[1]) if len(ends) == 2 else (None, None)
    return Measured(value=measured.value / base - 1, unit="frac", n=measured.n, low=low, high=high)


def prediction_table(
    predictions: Iterable[Prediction], caption: str = "", *, exists: Exists | None = None, anchors: bool = True
) -> Table:
    """Return predictions beside what was measured, kept when wrong, with the formula and its source.

    Args:
        predictions: in the order in which they are shown; without `measured` the row says so.
        caption: one line above the table.
        exists: unused by predictions; here so that all record tables are called alike.
        anchors: False where another table on the page owns the anchors.
    """
    rows, ids = [], []
    for prediction in predictions:
        measured = prediction.measured
        rows.append(
            (
                Cell(visible_text(prediction.what), escaped(prediction.what)),
                _measured_cell(prediction.predicted, _PLAIN),
                _measured_cell(measured, _PLAIN) if measured else _why("not measured"),
                _measured_without_n(difference(prediction.predicted, measured) if measured else None),
                Cell(visible_text(prediction.formula), f"<code>{escaped(prediction.formula)}</code>"),
                _cell(prediction.source, _PLAIN, exists),
            )
        )
        ids.append(anchor("prediction", prediction.id))
    headings = ("what", "predicted", "measured [95%]", "measured against predicted", "formula", "source")
    return Table(headings, tuple(rows), caption, tuple(ids) if anchors else (), "predictions", "nothing was predicted")
