"""Records as tables: rounding, units, reasons, escaping."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.records import Evidence, Measured, Prediction, Status, Verdict
from lib.report.tables import (
    MARKS,
    Column,
    difference,
    display_unit,
    number_text,
    prediction_table,
    shown,
    table,
    trial_table,
    verdict_table,
)
from tests.report.made_run import HOSTILE, predictions, result, verdicts
from tests.report.pages import Page


@pytest.mark.parametrize(
    ("measured", "text"),
    [
        # half-width (38.21 - 33.98) / 2 = 2.115: two digits of it are one decimal
        (Measured(value=36.0971, unit="tok/s", n=4, low=33.98, high=38.21), "36.1 tok/s [34.0, 38.2] n=4"),
        # half-width 150: no decimals
        (Measured(value=1646.7, unit="tok/s", low=1496.7, high=1796.7), "1,647 tok/s [1,497, 1,797]"),
        # 0.0123 s = 12.3 ms
        (Measured(value=0.0123, unit="s"), "12.3 ms"),
        (Measured(value=3.2e-7, unit="s"), "0.32 µs"),
        (Measured(value=212, unit="ms"), "212 ms"),
        (Measured(value=5_000_000, unit="ns"), "5 ms"),
        # 2**35 bytes = 32 GiB; 28800 bytes stay exact
        (Measured(value=34359738368, unit="bytes"), "32 GiB"),
        (Measured(value=28800, unit="bytes/token"), "28,800 B/token"),
        (Measured(value=0.723, unit="frac", low=0.70, high=0.75), "72.3 % [70.0, 75.0]"),
        (Measured(value=1_573_000, unit="tokens"), "1,573,000 tokens"),
        (Measured(value=0, unit="s", n=3), "0 s n=3"),
        (Measured(value=0.0, unit="nat"), "0 nat"),
        (Measured(value=-0.00002, unit="nat", low=-0.0101, high=0.0101), "0.000 nat [-0.010, 0.010]"),
        (Measured(value=5, unit="requests", low=5, high=5), "5 requests [5, 5]"),
        (Measured(value=172.2, unit="tok/s", n=1, reason="one run"), "172.2 tok/s n=1 (no interval: one run)"),
        (Measured(value=2.0, unit="x", low=1.5), "2 x [1.5, ∞]"),
        (Measured(value=None, reason="no GPU"), "— (no GPU)"),
        (Measured(value=True), "yes"),
        (Measured(value=False, reason="refused"), "no (refused)"),
        (Measured(value=" Paris"), '" Paris"'),
        (Measured(value=""), '""'),
        (Measured(value="\u202ebf16"), "⟨U+202E⟩bf16"),
    ],
)
def test_measured_is_rounded_to_what_its_interval_supports(measured: Measured, text: str) -> None:
    """A value is shown in the unit of its size, with two digits of its interval's half-width, or with the reason."""
    assert shown(measured).text() == text


def test_exact_value_is_kept_in_the_title() -> None:
    """Rounding loses nothing: the cell's title has the record's own digits."""
    html = table([{"x": Measured(value=36.0971234, unit="tok/s", low=33.98, high=38.21)}])._repr_html_()
    assert 'title="exact: 36.0971234 tok/s, 95% interval [33.98, 38.21]"' in html


@given(st.floats(min_value=1e-4, max_value=1e12), st.floats(min_value=1e-6, max_value=0.9))
def test_rounding_moves_a_value_less_than_its_interval(value: float, share: float) -> None:
    """What is shown lies within a tenth of the interval's half-width (or within 1e-5) of the exact value."""
    half = value * share
    text = shown(Measured(value=value, unit="x", low=value - half, high=value + half)).value
    assert abs(float(text.replace(",", "")) - value) <= max(half * 0.1, value * 1e-5, 5e-7)


@given(st.floats(min_value=1e-12, max_value=1e15), st.sampled_from(["s", "ms", "bytes", "frac", "tok/s"]))
def test_units_keep_the_quantity(value: float, unit: str) -> None:
    """The displayed number times the displayed unit's size is the quantity in the record."""
    sizes = {
        "µs": 1e-6,
        "ms": 1e-3,
        "s": 1.0,
        "B": 1,
        "KiB": 2**10,
        "MiB": 2**20,
        "GiB": 2**30,
        "TiB": 2**40,
        "%": 0.01,
    }
    factor, name = display_unit(value, unit)
    base = {"ms": 1e-3}.get(unit, 1.0)
    assert value * factor * sizes.get(name, 1.0) == pytest.approx(value * base)


def test_forced_unit_stands_in_the_heading() -> None:
    """With a shown unit, cells are bare numbers in that unit and the heading names it."""
    made = table([{"c": 1, "t": 0.0123}, {"c": 2, "t": Measured(value=0.5, unit="s")}], ["c", ("t", "TTFT", "s", "ms")])
    assert made.headings == ("c", "TTFT (ms)")
    assert [[cell.text for cell in row] for row in made.rows] == [["1", "12.3"], ["2", "500"]]


def test_unit_of_another_family_is_refused() -> None:
    """Seconds can't be shown as bytes, an unknown unit not as seconds."""
    with pytest.raises(ValueError, match="can't be shown"):
        table([{"t": 1.0}], [Column("t", unit="s", show="GiB")])
    with pytest.raises(ValueError, match="can't be shown"):
        table([{"t": 1.0}], [Column("t", unit="tok/s", show="s")])


def test_missing_column_is_an_error_but_none_is_a_dash() -> None:
    """A misspelt column is not silently empty; a value that is None is."""
    with pytest.raises(KeyError):
        table([{"a": 1}], ["b"])
    with pytest.raises(AttributeError):
        table([Measured(value=1)], ["valu"])
    assert table([{"a": None}], ["a"]).rows[0][0].text == "—"


def test_records_and_deep_keys() -> None:
    """Rows can be records, and a dot goes deeper."""
    made = table(result("02").trials, ["id", ("values", "ready")])
    assert made.rows[0][0].text == "native"
    deep = table([{"values": {"ttft_s": Measured(value=0.2, unit="s")}}], ["values.ttft_s"])
    assert deep.rows[0][0].text == "200 ms"


def test_empty_table_says_so() -> None:
    """No rows give one sentence, in every form, and no empty frame."""
    made = table([], ["a"], caption="Launches", empty="no server was launched")
    for text in (made._repr_html_(), made._repr_markdown_(), repr(made)):
        assert "no server was launched" in text and "Launches" in text
    assert "<table" not in made._repr_html_()


@pytest.mark.parametrize("form", ["html", "markdown", "text"])
def test_hostile_cells_are_text(form: str) -> None:
    """A cell, heading, caption or badge can't bring markup or invisible characters into any form of the table."""
    made = table(
        [{HOSTILE: HOSTILE, "b": [HOSTILE, {"k": HOSTILE}], "c": Measured(value=HOSTILE, unit=HOSTILE)}],
        caption=HOSTILE,
    )
    if form == "html":
        page = Page(made._repr_html_())
        assert not page.runs and not page.loads and page.text.count("<script>") >= 6
    elif form == "markdown":
        text = made._repr_markdown_().replace("\\<", "")
        assert "<" not in text
    text = {"html": made._repr_html_(), "markdown": made._repr_markdown_(), "text": repr(made)}[form]
    assert "\u202e" not in text and "\x1b" not in text and "⟨U+202E⟩" in text


def test_pipe_in_a_cell_does_not_end_it() -> None:
    """A Markdown table keeps its columns whatever the cells hold."""
    lines = table([{"a": "x|y\nz", "b": 1}])._repr_markdown_().splitlines()
    assert lines[-1] == "| x\\|y z | 1 |"


def test_verdict_rows_have_anchors_evidence_and_lines() -> None:
    """A verdict's row carries its anchor, its status as a word, and links to raw files with their line."""
    html = verdict_table(verdicts("05"))._repr_html_()
    page = Page(html)
    assert page.ids == ["verdict-kv-dtype", "verdict-hostile"]
    assert page.links == ["raw/05/server.log"]
    for text in (
        "raw/05/server.log:3",
        "✗ fail",
        "! error",
        "0.0312",
        "[0.0288, 0.0336]",
        "2,048",
        "kv.shift",
        "< 0.02 nat",
    ):
        assert text in page.text


@pytest.mark.parametrize("status", list(Status))
def test_every_status_has_a_mark_and_a_word(status: Status) -> None:
    """No status is told by colour alone."""
    verdict = Verdict(id="x", claim="c", status=status, reason="r", evidence=[Evidence(path="raw/a")])
    assert f"{MARKS[status]} {status.value}" in repr(verdict_table([verdict]))
    assert len(set(MARKS.values())) == len(Status)


def test_evidence_without_its_file_is_no_link() -> None:
    """Evidence whose file is not there is named as missing, not linked."""
    page = Page(verdict_table(verdicts("02"), exists=lambda path: "gone" not in path)._repr_html_())
    assert page.links == ["raw/02/server.log"] * 2
    assert "raw/02/gone.json file not found" in page.text


def test_wrong_prediction_stays() -> None:
    """A prediction stands beside its measurement with the difference, also when it was wrong."""
    # pool: 943718400 / 1073741824 - 1 = -0.1211
    text = repr(prediction_table(predictions("05")))
    assert "23,040 B/token" in text and "1 GiB" in text and "900 MiB" in text and "-12.11 %" in text
    unmeasured = Prediction(id="a", what="w", predicted=Measured(value=1), formula="f", source="s")
    assert "not measured" in repr(prediction_table([unmeasured]))


def test_difference_needs_the_same_unit_and_a_base() -> None:
    """There is no percentage of zero, of text, or across units: the reason stands instead."""
    one = Measured(value=1.0, unit="s")
    assert difference(one, Measured(value=1.1, unit="s", n=2, low=1.0, high=1.2)).value == pytest.approx(0.1)
    assert difference(one, Measured(value=1.0, unit="ms")).reason == "units differ: s and ms"
    assert difference(Measured(value=0.0, unit="s"), one).reason == "predicted is zero"
    assert difference(one, None).reason == "not measured"
    assert difference(one, Measured(value=None, reason="died")).reason == "no measurement"
    assert difference(Measured(value="bf16"), Measured(value="fp8")).value == "different"
    # a real zero difference stays zero
    assert difference(one, one).value == 0


def test_trials_show_the_verdict_their_outcome_leads_to() -> None:
    """Each trial has the status of its outcome, its reason, its values and its seconds."""
    text = repr(trial_table(result("02").trials))
    assert "✓ pass" in text and "✗ fail" in text and "silently ignored" in text and "resolved to torch_native" in text
    assert "14.2 s" in text and "19.8 s" in text


def test_csv_runs_nothing() -> None:
    """A cell that a spreadsheet would take for a formula is text in the CSV."""
    assert table([{"=a": "=1+1", "b": -2, "c": "-x()"}]).csv() == "'=a,b,c\n'=1+1,-2,'-x()\n"


def test_number_text() -> None:
    """Four significant digits, thousands separated, trailing zeros dropped, tiny numbers in exponent form."""
    assert [number_text(n) for n in (0.012345, 1646.7, 28800, 0.5, 0.0, 2e-5, -3.14159)] == [
        "0.01235", "1,647", "28,800", "0.5", "0", "2.00e-05", "-3.142",
    ]  # fmt: skip
