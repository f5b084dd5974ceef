"""An executed notebook as one calm page that loads nothing, runs nothing and trusts nothing that it shows.

nbconvert lays the page out by a template of our own on top of its `basic`; the cells are prepared here: code folded,
text escaped, HTML cleaned (`lib.report.clean`), matplotlib's SVG inline with the page's colours, widgets by the picture
or text that they leave.
"""

from __future__ import annotations

import functools
import html
import importlib
import json
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import nbformat
from nbconvert.exporters.html import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from lib.errors import UnreadableFile
from lib.report.clean import clean_html, clean_svg, unlinked
from lib.report.figures import PLATE
from lib.report.style import POLICY, css
from lib.report.text import escaped, last_states, shortened, slug, visible_html, visible_text

#: A page without figures stays below this; what is beyond is named and left in the notebook file.
PAGE_BYTES = 300_000
TEXT_CHARACTERS = 12_000
HTML_CHARACTERS = 80_000
IMAGE_CHARACTERS = 200_000

_WIDGET = "application/vnd.jupyter.widget-view+json"
_SILENT = ("application/javascript", "text/vnd.mermaid")
_PROGRESS = re.compile(r"[^\n]{0,80}?\d+%\|")
_PLAIN_TOKEN = re.compile(r'<span class="[nopwlgeb][a-z0-9]*">([^<]*)</span>')
_HEADING = re.compile(r"<h([1-6])>(.*?)</h\1>", re.DOTALL)
_TAG = re.compile(r"<[^>]*>")


def redactor(name: str) -> Callable[[Any], Any]:
    """Return the server room's redacting function, or identity where that room is not there."""
    try:
        function: Callable[[Any], Any] = getattr(importlib.import_module("lib.server.redact"), name)
    except ImportError:
        return lambda value: value
    return function


def write_page(path: Path, text: str) -> Path:
    """Write a page to a temporary name beside it, then rename: a reader never sees half a page."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", errors="replace", newline="\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def existing_below(folder: Path) -> Callable[[str], bool]:
    """Return a function that tells whether a link's target is a file below `folder`."""
    root = folder.resolve()

    def exists(href: str) -> bool:
        try:
            target = (root / unquote(html.unescape(href))).resolve()
            return target.is_relative_to(root) and target.exists()
        except (OSError, ValueError):
            return False

    return exists


def _as_it_is(value: Any, **_: Any) -> Any:
    return value


class _PageExporter(HTMLExporter):
    """nbconvert's HTML exporter, without its pass over the finished page (cells are prepared already)."""

    def from_notebook_node(self, nb: Any, resources: Any = None, **kw: Any) -> tuple[Any, dict[str, Any]]:
        for name in ("highlight_code", "filter_data_type"):  # `basic` names them; the prepared cells don't need them
            self.register_filter(name, _as_it_is)
        return super(HTMLExporter, self).from_notebook_node(nb, self._init_resources(resources), **kw)


class _Page:
    """What is collected while a notebook's cells are prepared."""

    def __init__(self, budget: int, notebook_file: str) -> None:
        self.left = budget
        self.notebook_file = notebook_file
        self.toc: list[dict[str, Any]] = []
        self.ids: set[str] = set()
        self.heading = ""
        self.pictures = 0
        self.has_title = False
        self.redact = redactor("redact_text")

    def unique(self, wanted: str) -> str:
        name, count = wanted, 1
        while name in self.ids:
            count += 1
            name = f"{wanted}-{count}"
        self.ids.add(name)
        return name

    def left_out(self, what: str) -> str:
        """One sentence in the place of an output that is too large for a page."""
        where = f'<a href="{escaped(self.notebook_file)}">{escaped(self.notebook_file)}</a>'
        return f'<p class="note">{escaped(what)} is left out here; it is in {where}.</p>'

    def within_budget(self, markup: str, what: str) -> str:
        size = len(markup.encode("utf-8", "replace"))
        if size > self.left:
            return self.left_out(f"{what} ({size:,} bytes)")
        self.left -= size
        return markup


@functools.cache
def _pygments() -> tuple[Any, Any]:
    return get_lexer_by_name("ipython3"), HtmlFormatter(nowrap=True)


@functools.cache
def _exporter() -> _PageExporter:
    """One exporter for all pages: its templates are compiled once."""
    basedir = str(Path(__file__).parent / "templates")
    return _PageExporter(template_name="notebook", extra_template_basedirs=[basedir], default_preprocessors=[])


def _highlighted(code: str) -> str:
    """Python code as HTML with few classes: k(eyword), s(tring), c(omment), m (number)."""
    marked = highlight(code, *_pygments())
    return f"<pre>{visible_html(_PLAIN_TOKEN.sub(lambda match: match[1], marked).rstrip())}</pre>"


def _markdown(source: str, attachments: dict[str, Any], trusted: bool = True) -> str:
    renderer = IPythonRenderer(escape=not trusted, attachments=attachments, exclude_anchor_links=True)
    markup = MarkdownWithMath(renderer=renderer).render(source)
    return clean_html(markup.replace(' style="text-align:right"', ' class="num"'))


def _with_anchors(markup: str, page: _Page) -> str:
    """Headings with anchors, noted in the table of contents."""

    def anchored(match: re.Match[str]) -> str:
        level, inner = int(match[1]), match[2]
        text = html.unescape(_TAG.sub("", inner)).strip()
        name = page.unique(slug(text))
        page.heading = text
        page.has_title |= level == 1
        if level in (2, 3):
            page.toc.append({"level": level, "id": name, "text": escaped(text)})
        link = f'<a class="here" href="#{name}" aria-label="link to this section">#</a>'
        return f'<h{level} id="{name}">{inner}{link}</h{level}>'

    return _HEADING.sub(anchored, markup)


def _text(text: str, page: _Page) -> str:
    where = f"the whole text is in {page.notebook_file}"
    return f"<pre>{escaped(shortened(visible_text(page.redact(text)), TEXT_CHARACTERS, where))}</pre>"


def _folded(title: str, inner: str, is_open: bool = False) -> str:
    return f'<details class="fold"{" open" if is_open else ""}><summary>{escaped(title)}</summary>{inner}</details>'


def _stream(name: str, text: str, page: _Page) -> str:
    shown = visible_text(last_states(text)).strip("\n")
    if not shown.strip():
        return ""
    if name == "stdout":
        return _text(shown, page)
    lines = [line for line in shown.split("\n") if line.strip()]
    count = f"{len(lines)} line{'s' if len(lines) > 1 else ''}"
    return _folded(f"{name} ({count}): {page.redact(lines[-1])[:120]}", _text(shown, page))


def _error(output: Any, page: _Page) -> str:
    head = visible_text(page.redact(f"{output.get('ename', 'Error')}: {output.get('evalue', '')}"))
    trace = "\n".join(output.get("traceback", []))
    inner = _folded("traceback", _text(trace, page)) if trace else ""
    return f'<div class="banner"><b>This cell failed.</b> <pre>{escaped(shortened(head, 2000))}</pre>{inner}</div>'


def _alt(output: Any, mime: str, page: _Page) -> str:
    given = (
        (output.get("metadata", {}).get(mime) or {}).get("alt") if isinstance(output.get("metadata"), dict) else None
    )
    plain = str(output.data.get("text/plain", "")).strip()
    if not given and plain and not plain.startswith("<"):
        given = plain
    return (
        given or f"figure under “{page.heading or 'the start'}”; its data is in the table beside it or in the raw files"
    )


def _svg(output: Any, page: _Page) -> str:
    page.pictures += 1
    svg = str(output.data["image/svg+xml"])
    ours = PLATE in svg
    try:
        picture = clean_svg(svg, _alt(output, "image/svg+xml", page), f"p{page.pictures}-", themed=ours)
    except ValueError as error:
        return f'<p class="note">A picture can’t be shown: {escaped(str(error))}</p>'
    kind = "" if ours else ' class="plate"'
    return f"<figure{kind}>{picture}</figure>"


def _raster(output: Any, mime: str, page: _Page) -> str:
    data = re.sub(r"\s+", "", str(output.data[mime]))
    if len(data) > IMAGE_CHARACTERS or not re.fullmatch(r"[A-Za-z0-9+/=]*", data):
        return page.left_out(f"A picture of {len(data) * 3 // 4:,} bytes")
    alt = escaped(" ".join(_alt(output, mime, page).split()))
    return f'<figure class="plate"><img src="data:{mime};base64,{data}" alt="{alt}"></figure>'


def _rich_html(output: Any, page: _Page) -> str:
    source = page.redact(str(output.data["text/html"]))
    if len(source) > HTML_CHARACTERS:
        return page.left_out(f"A table or text of {len(source):,} characters")
    return clean_html(source)


def _data(output: Any, page: _Page) -> str:
    """One output in the best form that a still page can show."""
    data = output.data
    if "image/svg+xml" in data:
        return _svg(output, page)
    for mime in ("image/png", "image/jpeg"):
        if mime in data and (_WIDGET in data or "text/html" not in data):
            return _raster(output, mime, page)
    if _WIDGET in data:
        plain = str(data.get("text/plain", "")).strip()
        if _PROGRESS.match(plain):
            return _folded("progress bar, as it was when it appeared", _text(plain, page))
        note = '<p class="note">An interactive control stands here in the live notebook; this is what it leaves:</p>'
        return note + (_text(plain, page) if plain else "<pre>(no text)</pre>")
    if "text/html" in data:
        return _rich_html(output, page)
    if "text/markdown" in data:
        return _markdown(page.redact(shortened(str(data["text/markdown"]), TEXT_CHARACTERS)), {}, trusted=False)
    for mime in ("text/latex", "text/plain"):
        if mime in data:
            return _text(str(data[mime]), page)
    if "application/json" in data:
        return _text(json.dumps(data["application/json"], indent=1, ensure_ascii=False), page)
    kinds = ", ".join(sorted(str(kind) for kind in data if kind not in _SILENT)) or "script"
    return f'<p class="note">An output of the kind {escaped(kinds)} can’t be shown on a still page.</p>'


def _outputs(cell: Any, page: _Page) -> list[str]:
    shown = []
    merged: list[Any] = []
    for output in cell.outputs:
        last = merged[-1] if merged else {}
        if output.output_type == last.get("output_type") == "stream" and last["name"] == output.name:
            merged[-1] = nbformat.from_dict({**last, "text": last["text"] + output.text})
            continue
        merged.append(output)
    for output in merged:
        if output.output_type == "stream":
            markup, what = _stream(output.name, output.text, page), "A text"
        elif output.output_type == "error":
            markup, what = _error(output, page), "An error"
        else:
            markup, what = _data(output, page), "An output"
        if markup:
            shown.append(page.within_budget(markup, what))
    return shown


def _summary(cell: Any) -> str:
    """One line that stands for the folded code."""
    tags = cell.metadata.get("tags", [])
    if "injected-parameters" in tags:
        title = "Parameters of this run"
    elif "parameters" in tags:
        title = "Parameters (defaults)"
    else:
        lines = [
            line for line in cell.source.splitlines() if line.strip() and not line.startswith(("from ", "import "))
        ]
        title = ""
        first = (lines or cell.source.strip().splitlines() or [""])[0]
        count = cell.get("execution_count")
        return f"{f'[{count}] ' if count else ''}<code>{escaped(shortened(first, 110, '').splitlines()[0])}</code>"
    return escaped(title)


def _prepare(notebook: Any, page: _Page) -> None:
    for cell in notebook.cells:
        cell.source = page.redact(cell.source)
        if cell.cell_type == "markdown":
            cell.metadata.page = {"html": _with_anchors(_markdown(cell.source, cell.get("attachments", {})), page)}
        elif cell.cell_type == "code":
            failed = any(output.output_type == "error" for output in cell.outputs)
            code = page.within_budget(_highlighted(shortened(cell.source, TEXT_CHARACTERS)), "Code")
            cell.metadata.page = {
                "code": code if cell.source.strip() else "",
                "summary": _summary(cell),
                "outputs": _outputs(cell, page),
                "failed": failed,
            }
            cell.outputs = []
        else:
            cell.metadata.page = {"html": escaped(shortened(cell.source, TEXT_CHARACTERS))}
        cell.source = ""  # all that is shown stands in the metadata now; what is left need not be copied
        cell.attachments = {}


def render_notebook(
    ipynb_path: Path | str,
    html_path: Path | str,
    title: str,
    *,
    up: tuple[str, str] | None = None,
    banner: str = "",
    page_bytes: int = PAGE_BYTES,
) -> Path:
    """Write an executed notebook as one HTML page and return the page's path.

    The page needs no script and loads nothing. Text of cells is escaped and made visible, HTML of cells is reduced to a
    whitelist, links to files that are not beside the page become text, secrets are redacted once more.

    Args:
        ipynb_path: the executed notebook.
        html_path: where the page is written (to a temporary name first).
        title: the page's title; also its heading where the notebook has none.
        up: (link, text) of the page above, shown over the table of contents.
        banner: HTML shown first, made by `lib.report` (a failure's reason).
        page_bytes: size that code and outputs may take; what is beyond is named, not shown.

    Raises:
        UnreadableFile: no notebook can be read from `ipynb_path`.
    """
    source, target = Path(ipynb_path), Path(html_path)
    page = _Page(page_bytes, source.name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            notebook = nbformat.reads(source.read_text(encoding="utf-8", errors="surrogatepass"), as_version=4)
        _prepare(notebook, page)
    except OSError as error:
        raise UnreadableFile(f"a notebook at {source}", str(error), "run the notebook again") from None
    except (nbformat.ValidationError, ValueError, AttributeError, KeyError, TypeError) as error:
        found = " ".join(shortened(str(error), 200, "").split())
        raise UnreadableFile(f"a notebook at {source}", found, "run the notebook again") from None
    if not page.has_title:
        banner = f"<h1>{escaped(title)}</h1>{banner}"
    link = f'<a href="{escaped(up[0])}">← {escaped(up[1])}</a>' if up else ""
    resources = {
        "page": {
            "title": escaped(title),
            "css": css(),
            "policy": POLICY,
            "toc": page.toc,
            "up": link,
            "banner": banner,
        }
    }
    text, _ = _exporter().from_notebook_node(notebook, resources)
    there = existing_below(target.parent)
    return write_page(target, unlinked(text, lambda href: there(href) or (up is not None and href == up[0])))
