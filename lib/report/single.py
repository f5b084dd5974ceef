"""A run's pages as one self-contained file, `report.html`: to send by e-mail, to keep, to print.

Made from the pages that `build_site` wrote, so it shows nothing that they don't: the index first, then each notebook
below one table of contents. Identifiers get their notebook's number as a prefix; links between pages become links within
the file; a link to a raw file becomes a link to an excerpt of it at the end, with the lines that were meant.
"""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote, unquote

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from lib.report.clean import first_heading
from lib.report.excerpts import read_excerpt
from lib.report.html import write_page
from lib.report.style import POLICY, css
from lib.report.tables import _inert
from lib.report.text import escaped, slug, visible_text

#: The whole file stays below this; excerpts are left out first, then whole notebooks are named instead of shown.
REPORT_BYTES = 2_000_000

_MAIN = re.compile(r"<main>(.*)</main>", re.DOTALL)
_ID = re.compile(r'(\sid=")([^"]*)(")')
_HREF = re.compile(r'(\s(?:xlink:)?href=")([^"]*)(")')
#: A link to a raw file whose text names a line of it, as `tables.evidence_html` writes it.
_NAMED_LINE = re.compile(r'href="(raw/[^"]*)">([^<]*:(\d{1,9})</a>)')
_LOCAL_URL = re.compile(r"url\(#")
_TABLE = re.compile(r'<div class="table-scroll"><table class="wb.*?</table></div>', re.DOTALL)
_CAPTION = re.compile(r"<caption>(.*?)</caption>", re.DOTALL)
_TAG = re.compile(r"<[^>]*>")
_HEADING = re.compile(r'<h2 id="([^"]*)"[^>]*>(.*?)</h2>', re.DOTALL)


class _Cells(HTMLParser):
    """Texts of a table's cells, row by row."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.rows: list[list[str]] = []
        self._text: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self._text = []
        elif self._text is not None and self._text:
            self._text.append(" ")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th") and self._text is not None and self.rows:
            self.rows[-1].append(" ".join("".join(self._text).split()))
            self._text = None

    def handle_data(self, data: str) -> None:
        if self._text is not None:
            self._text.append(data)


def table_csv(markup: str) -> str:
    """Return the CSV text of a table's HTML, cells as they are shown; what a spreadsheet would run is marked as text."""
    parser = _Cells()
    parser.feed(markup)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in parser.rows:
        writer.writerow([_inert(cell) for cell in row])
    return out.getvalue()


def with_csv(markup: str) -> str:
    """Return a page with a CSV link below each of its tables; it works without a script and loads nothing."""

    def linked(match: re.Match[str]) -> str:
        caption = _CAPTION.search(match[0])
        name = slug(html.unescape(_TAG.sub("", caption[1]))) if caption else ""
        text = quote(table_csv(match[0]), safe=" ,;:/()[]")
        href = f"data:text/csv;charset=utf-8,{escaped(text)}"
        return f'{match[0]}<p class="csv"><a download="{escaped(name[:60] or "table")}.csv" href="{href}">CSV</a></p>'

    return _TABLE.sub(linked, markup)


class _Excerpts:
    """Excerpts of raw files, each once, with what links to them."""

    def __init__(self, folder: Path, budget: int) -> None:
        self.folder, self.left = folder.resolve(), budget
        self.made: dict[str, tuple[str, str]] = {}
        self.left_out = 0

    def link(self, href: str) -> str | None:
        """The anchor of the excerpt of a raw file (`path` or `path#L12`), or None if it can't be shown."""
        path, _, fragment = html.unescape(href).partition("#")
        line = int(fragment[1:]) if re.fullmatch(r"L\d{1,9}", fragment) else None
        name = unquote(path)
        key = f"{name}#{line}" if line else name
        if key in self.made:
            return self.made[key][0]
        shown = read_excerpt(self.folder, name, line)
        if shown is None:
            return None
        text = escaped(shown)
        if len(text.encode()) > self.left:
            self.left_out += 1
            return None
        self.left -= len(text.encode())
        mark = f"raw-{len(self.made) + 1}"
        self.made[key] = (mark, text)
        return mark

    def markup(self) -> list[Markup]:
        """Every excerpt as a section."""
        out = []
        for key, (mark, text) in self.made.items():
            name = escaped(visible_text(key.replace("#", ", line ")))
            out.append(Markup(f'<section class="excerpt"><h4 id="{mark}">{name}</h4><pre>{text}</pre></section>'))  # noqa: S704
        return out


def _main_of(page: str) -> str:
    found = _MAIN.search(page)
    return found[1] if found else ""


def _moved(markup: str, prefix: str, pages: Mapping[str, str], excerpts: _Excerpts) -> str:
    """A page's markup with its identifiers and links as they are in the one file."""

    def moved_link(match: re.Match[str]) -> str:
        href = match[2]
        page, _, fragment = href.partition("#")
        if not page and fragment:
            return f"{match[1]}#{prefix}{fragment}{match[3]}"
        if page in pages:
            return f"{match[1]}#{pages[page]}{fragment or 'top'}{match[3]}"
        if re.match(r"[a-z][a-z0-9+.-]*:", page, re.IGNORECASE):
            return match[0]
        if page.startswith("raw/"):
            mark = excerpts.link(href)
            return f"{match[1]}#{mark}{match[3]}" if mark else ""
        return ""  # a file beside the pages: not in this one

    markup = _NAMED_LINE.sub(r'href="\1#L\3">\2', markup)
    renamed = _LOCAL_URL.sub(f"url(#{prefix}", _ID.sub(lambda m: f"{m[1]}{prefix}{m[2]}{m[3]}", markup))
    return _HREF.sub(moved_link, renamed)


def _contents(markup: str) -> list[tuple[str, str]]:
    return [
        (mark, html.unescape(_TAG.sub("", text)).replace("¶", "").strip()) for mark, text in _HEADING.findall(markup)
    ]


def build_report(folder: Path | str, numbers: Sequence[str], title: str, limit: int = REPORT_BYTES) -> Path:
    """Write `report.html` from the pages of a run's folder and return its path.

    Args:
        folder: the run's folder, with `index.html` and the `NN.html` that exist.
        numbers: notebooks whose page is to be shown, in order.
        title: the file's title.
        limit: bytes that the file may have.
    """
    folder = Path(folder)
    index = (folder / "index.html").read_text(encoding="utf-8")
    pages = {n: (folder / f"{n}.html").read_text(encoding="utf-8") for n in numbers if (folder / f"{n}.html").is_file()}
    dropped: list[str] = []
    excerpt_bytes = limit // 4
    while True:
        text = _joined(
            folder, index, {n: p for n, p in pages.items() if n not in dropped}, dropped, title, excerpt_bytes
        )
        if len(text.encode("utf-8", "replace")) <= limit or (excerpt_bytes == 0 and len(dropped) == len(pages)):
            break
        if excerpt_bytes > 20_000:
            excerpt_bytes //= 4
        elif excerpt_bytes:
            excerpt_bytes = 0
        else:
            dropped.append(max((n for n in pages if n not in dropped), key=lambda n: len(pages[n])))
    return write_page(folder / "report.html", text)


def _joined(
    folder: Path, index: str, pages: Mapping[str, str], dropped: Sequence[str], title: str, excerpt_bytes: int
) -> str:
    places = {"index.html": "", "report.html": "", **{f"{n}.html": f"n{n}-" for n in pages}}
    excerpts = _Excerpts(folder, excerpt_bytes)
    shown = [("", "", _moved(_main_of(index), "", places, excerpts))]
    for number, page in pages.items():
        prefix = f"n{number}-"
        shown.append(
            (prefix, f"{number} {html.unescape(first_heading(page))}", _moved(_main_of(page), prefix, places, excerpts))
        )
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True)
    return environment.get_template("report.html.j2").render(
        title=visible_text(title),
        css=Markup(css()),  # noqa: S704
        policy=Markup(POLICY),  # noqa: S704
        dropped=list(dropped),
        left_out=excerpts.left_out,
        excerpts=excerpts.markup(),
        parts=[
            {"id": prefix, "heading": heading, "html": Markup(with_csv(markup)), "contents": _contents(markup)}  # noqa: S704
            for prefix, heading, markup in shown
        ],
    )
