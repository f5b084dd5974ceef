"""`report.html` in Debian's Chromium, driven by Playwright: as a reader, a printer and an attacker meet it."""

from __future__ import annotations

import csv
import io
import re
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from lib.params import ROOT
from lib.records import Evidence, NotebookResult
from lib.report.site import build_site
from tests.report import made_run
from tests.report.made_run import HOSTILE

pytestmark = pytest.mark.browser
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
EXAMPLE = ROOT / "outputs" / "examples" / "h200"
#: A4 less the margins of a printer, in CSS pixels (210 mm - 2 x 10 mm at 96 per inch).
A4_PX = 718


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a made run, one of whose verdicts stands on a hostile raw line."""
    folder = made_run.make_run(tmp_path_factory.mktemp("hostile") / "run")
    (folder / "raw" / "05" / "bad.log").write_text(
        f"one\n{HOSTILE} \x1b[31mred\x1b[0m \u2066isolated\u2069\nthree\n", encoding="utf-8"
    )
    file = folder / "05.result.json"
    result = NotebookResult.model_validate_json(file.read_text())
    first = result.verdicts[0].model_copy(update={"evidence": [Evidence(path="raw/05/bad.log", line=2, quote=HOSTILE)]})
    changed = result.model_copy(update={"verdicts": [first, *result.verdicts[1:]]})
    file.write_text(changed.model_dump_json())
    build_site(folder)
    return folder / "report.html"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the committed run on an H200, made anew from its notebooks, results and raw files."""
    folder = shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("h200") / "run")
    with tarfile.open(folder / "raw.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    build_site(folder)
    return folder / "report.html"


class Seen:
    """A page and what happened on it."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.asked: list[str] = []
        self.dialogs: list[str] = []
        page.on("request", lambda request: self.asked.append(request.url))
        page.on("dialog", lambda dialog: (self.dialogs.append(dialog.message), dialog.dismiss()))

    def open(self, file: Path) -> Any:
        self.page.goto(file.as_uri())
        return self.page


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """One browser for all pages."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here; do: apt-get install -y chromium")
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def seen(chromium: Any) -> Iterator[Seen]:
    context = chromium.new_context(viewport={"width": 1360, "height": 900}, accept_downloads=True)
    yield Seen(context.new_page())
    context.close()


def test_it_asks_for_nothing_and_runs_nothing(seen: Seen, report: Path) -> None:
    """Read from one file: one request, the file's own; no dialog, no changed title, and the raw line shows as text."""
    page = seen.open(report)
    page.wait_for_timeout(300)
    assert [url for url in seen.asked if urlsplit(url).scheme not in ("data", "blob")] == [report.as_uri()]
    assert seen.dialogs == [] and page.title() != "owned"
    assert page.evaluate("document.querySelectorAll('script,iframe,object,embed,link,form').length") == 0
    excerpt = page.locator("section.excerpt", has_text="raw/05/bad.log").inner_text()
    assert (
        "<script>document.title='owned'</script>" in excerpt
        and "⟨U+202E⟩gnp.exe" in excerpt
        and "\u202e" not in excerpt
    )
    assert "2> " in excerpt and "\x1b" not in excerpt and "red" in excerpt and "⟨U+2066⟩" in excerpt


def test_a_verdict_opens_its_evidence(seen: Seen, report: Path) -> None:
    """Clicking the evidence of a verdict on top brings its raw line, marked, into sight; without a script."""
    page = seen.open(report)
    page.locator("a.evidence", has_text="raw/05/bad.log:2").first.click()
    target = page.locator("section.excerpt h4:target")
    assert target.count() == 1 and "raw/05/bad.log, line 2" in target.inner_text()
    box = target.bounding_box()
    assert box is not None and 0 <= box["y"] < 900


def test_the_contents_reach_every_section(seen: Seen, report: Path) -> None:
    """The table of contents names every notebook and its sections, and each of its links has its target."""
    page = seen.open(report)
    links = page.evaluate("[...document.querySelectorAll('nav.toc a')].map(a => a.getAttribute('href'))")
    assert len(links) == len(set(links)) > 30
    assert (
        page.evaluate("(links) => links.filter(l => !document.getElementById(decodeURIComponent(l.slice(1))))", links)
        == []
    )
    for notebook in ("n03-", "n05-"):
        assert any(link.startswith(f"#{notebook}verdict") for link in links), links


@pytest.mark.parametrize("which", ["made", "example"])
def test_every_picture_has_words_and_thresholds_are_drawn(seen: Seen, report: Path, example: Path, which: str) -> None:
    """Alt text on each chart; the limit stands in the chart as a dashed line with its number."""
    page = seen.open(report if which == "made" else example)
    words = page.evaluate(
        "[...document.querySelectorAll('svg')].map(s => s.getAttribute('role') + ' ' + (s.getAttribute('aria-label') || ''))"
    )
    assert words and all(text.startswith("img ") and len(text) > 30 for text in words)
    assert page.evaluate("[...document.querySelectorAll('img')].filter(i => !i.alt).length") == 0
    dashed = page.evaluate("""[...document.querySelectorAll('svg path')].filter(
        p => /dasharray/.test(p.getAttribute('style') || '') && getComputedStyle(p).stroke === getComputedStyle(
            document.querySelector('.fail') || document.body).color).length""")
    assert dashed >= 1
    assert any("limit" in text for text in words)


def test_light_and_dark(seen: Seen, report: Path) -> None:
    """Both by the reader's setting; text and its ground stand apart at least 4.5 to 1, in tables and in charts."""
    page = seen.open(report)
    grounds = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        found = page.evaluate("""() => {
            const lum = c => { const v = c.match(/[\\d.]+/g).slice(0, 3).map(Number).map(x => { x /= 255;
                return x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4; });
                return 0.2126 * v[0] + 0.7152 * v[1] + 0.0722 * v[2]; };
            const ratio = (a, b) => { const [x, y] = [lum(a), lum(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
            const ground = getComputedStyle(document.body).backgroundColor;
            const low = [];
            for (const e of document.querySelectorAll('p, td, th, h1, h2, a[href], .badge, .why, summary'))
                if (e.offsetParent && ratio(getComputedStyle(e).color, ground) < 4.5)
                    low.push(e.className + ':' + e.textContent.slice(0, 9));
            for (const t of document.querySelectorAll('figure:not(.plate) svg text'))
                if (ratio(getComputedStyle(t).fill, ground) < 3) low.push('svg ' + t.textContent.slice(0, 30));
            return [ground, low]; }""")
        grounds.append(found[0])
        assert found[1] == [], (scheme, found[1][:8])
    assert grounds[0] != grounds[1]


@pytest.mark.parametrize("which", ["made", "example"])
def test_it_prints(seen: Seen, report: Path, example: Path, which: str, tmp_path: Path) -> None:
    """On paper nothing is cut at the right or scrolled away, folded facts are unfolded, navigation is gone; a PDF comes out."""
    page = seen.open(report if which == "made" else example)
    page.set_viewport_size({"width": A4_PX, "height": 1000})
    page.emulate_media(media="print")
    cut = page.evaluate(f"""[...document.querySelectorAll('td, th, pre, svg, p, h1, h2')].filter(e => e.offsetParent || e.tagName == 'svg')
        .filter(e => e.getBoundingClientRect().right > {A4_PX} + 2)
        .map(e => e.tagName + ' ' + e.getBoundingClientRect().right.toFixed(0) + ' ' + e.textContent.slice(0, 60))""")
    scrolled = page.evaluate(
        "[...document.querySelectorAll('pre, .table-scroll')].filter(e => e.scrollHeight > e.clientHeight + 4).length"
    )
    hidden = page.evaluate(
        "[...document.querySelectorAll('details.fold > :not(summary)')].filter(e => !e.checkVisibility()).length"
    )
    assert cut == [] and scrolled == 0 and hidden == 0, (cut[:6], len(cut), scrolled, hidden)
    assert not page.locator("nav.toc").is_visible() and not page.locator("p.csv").first.is_visible()
    pdf = page.pdf(format="A4")
    assert pdf.startswith(b"%PDF") and len(re.findall(rb"/Type\s*/Page\b", pdf)) > 3


@pytest.mark.parametrize("which", ["made", "example"])
def test_tables_are_saved_as_csv(seen: Seen, report: Path, example: Path, which: str, tmp_path: Path) -> None:
    """A click below a table saves it under its caption's name, cell by cell as it is shown, without a script or a request."""
    page = seen.open(report if which == "made" else example)
    tables = page.locator("table.wb").count()
    links = page.locator("p.csv a")
    assert tables == links.count() > 5
    before = len(seen.asked)
    for place in (0, tables // 2, tables - 1):
        with page.expect_download() as waiting:
            links.nth(place).click()
        saved = tmp_path / "t.csv"
        waiting.value.save_as(saved)
        assert waiting.value.suggested_filename.endswith(".csv")
        rows = list(csv.reader(io.StringIO(saved.read_text(encoding="utf-8"))))
        shown = page.locator("table.wb").nth(place)
        assert len(rows) == shown.locator("tr").count() and {len(row) for row in rows} == {shown.locator("th").count()}
        cell = " ".join(str(shown.locator("tbody td").first.evaluate("e => e.textContent")).split())
        assert rows[1][0].lstrip("'").replace(" ", "") == cell.replace(" ", "")
    assert [u for u in seen.asked[before:] if not u.startswith("data:")] == []
    page.emulate_media(color_scheme="light")


def test_it_is_read_without_any_script(chromium: Any, report: Path, example: Path) -> None:
    """With scripts switched off in the browser everything is there, code unfolds, and the example is below 2 MB, too."""
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(report.as_uri())
    fold = page.locator("details.code").first
    assert not fold.locator("pre").first.is_visible()
    fold.locator("summary").click()
    assert fold.locator("pre").first.is_visible()
    assert page.locator("h1").first.is_visible()
    assert report.stat().st_size < 2_000_000 and example.stat().st_size < 2_000_000
    context.close()
