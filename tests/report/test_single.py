"""`report.html`: one file with every page, its links inside it, excerpts of the raw files, tables as CSV."""

from __future__ import annotations

import csv
import html
import io
import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from lib.report.single import build_report, table_csv, with_csv
from lib.report.site import build_site
from lib.report.tables import table
from tests.report import made_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A made run with its pages."""
    folder = made_run.make_run(tmp_path_factory.mktemp("single"))
    build_site(folder)
    return folder


@pytest.fixture(scope="module")
def report(run: Path) -> str:
    """The one file of it."""
    return (run / "report.html").read_text(encoding="utf-8")


def test_every_link_leads_somewhere_within_the_file(report: str) -> None:
    """Identifiers are unique, each local link and each reference of a picture has its target, nothing leads to another file."""
    ids = re.findall(r'\sid="([^"]*)"', report)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]*)"', report)) | set(re.findall(r"url\(#([^)]*)\)", report)) <= set(ids)
    assert {
        h for h in re.findall(r'href="([^"#][^"]*)"', report) if not h.startswith(("data:text/csv", "https://"))
    } == set()


def test_it_is_one_small_file_that_runs_and_loads_nothing(report: str) -> None:
    """Below 2 MB, no script, no address to load from, and the policy forbids both."""
    assert len(report.encode()) < 2_000_000
    assert "<script" not in report and "default-src 'none'" in report
    assert not re.search(r'\b(?:src|xlink:href)="(?!data:image/|#)', report)


def test_a_verdict_opens_the_line_that_it_names(run: Path) -> None:
    """Evidence with a line becomes an excerpt with that line marked and its neighbours; without one, the file's start."""
    (run / "01.html").write_text(
        '<main><h1>One</h1><a class="evidence" href="raw/01/server.log">raw/01/server.log:2</a><a href="raw/01/server.log">all</a></main>',
        encoding="utf-8",
    )
    text = build_report(run, ["01"], "t").read_text(encoding="utf-8")
    assert "     1  one\n     2&gt; two\n     3  KV Cache" in text
    assert re.search(r"raw/01/server.log</h4><pre>     1  one", text)
    build_site(run)


@pytest.mark.parametrize(
    "href", ["raw/../../../etc/hostname", "raw/missing.log", "raw/01/server.log#L999", "raw/%00", "../x"]
)
def test_a_link_out_of_the_run_or_to_nothing_is_no_link(run: Path, href: str) -> None:
    """No file outside the run's folder is ever read; what isn't there is text."""
    (run / "01.html").write_text(f'<main><h1>One</h1><a href="{href}">text</a></main>', encoding="utf-8")
    text = build_report(run, ["01"], "t").read_text(encoding="utf-8")
    assert "<a>text</a>" in text
    build_site(run)


def test_secrets_and_hostile_lines_of_raw_files_are_inert(run: Path) -> None:
    """A raw line with a key, a script and bidi characters shows as text without the key."""
    (run / "raw" / "01" / "bad.log").write_text(
        f"--api-key sk-verysecret0123456789 {made_run.HOSTILE}\n", encoding="utf-8"
    )
    (run / "01.html").write_text('<main><h1>One</h1><a href="raw/01/bad.log#L1">x</a></main>', encoding="utf-8")
    text = build_report(run, ["01"], "t").read_text(encoding="utf-8")
    assert "sk-verysecret" not in text and "<script" not in text and "\u202e" not in text and "\x1b" not in text
    build_site(run)


def test_too_large_a_run_names_what_is_left_out(run: Path) -> None:
    """Excerpts go first, then the largest notebooks, named; the limit holds."""
    whole = len(build_report(run, ["01", "02", "03"], "t").read_bytes())
    tight = build_report(run, ["01", "02", "03"], "t", limit=whole - 1_000).read_text(encoding="utf-8")
    assert len(tight.encode()) < whole
    least = build_report(run, ["01", "02", "03"], "t", limit=1_000).read_text(encoding="utf-8")
    assert re.search(r"Notebooks (0[123], ){2}0[123] are too large for one file", least)
    build_site(run)


def test_a_table_can_be_copied_as_csv() -> None:
    """The link's text is the table, cell by cell; a cell that a spreadsheet would run is text."""
    made = table([{"a": "x, y", "b": "=cmd()"}, {"a": 'q"q', "b": "&"}], caption="Some cells")
    markup = with_csv(made._repr_html_())
    link = re.search(r'<a download="some-cells.csv" href="data:text/csv;charset=utf-8,([^"]*)">', markup)
    assert link
    rows = list(csv.reader(io.StringIO(unquote(html.unescape(link[1])))))
    assert rows == [["a", "b"], ["x, y", "'=cmd()"], ['q"q', "&"]]
    assert table_csv("<p>no table</p>") == ""
