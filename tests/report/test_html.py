"""An executed notebook as one page: what it shows, what it never does, how large it gets."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from lib.errors import UnreadableFile
from lib.report.figures import acceptance, figure_svg
from lib.report.html import render_notebook
from tests.report.made_run import notebook, write_json
from tests.report.pages import Page

WIDGET = "application/vnd.jupyter.widget-view+json"
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"0" * 40).decode()


def rendered(tmp_path: Path, *cells: Any, **kw: Any) -> str:
    """The page of a notebook with these cells."""
    write_json(tmp_path / "01.ipynb", new_notebook(cells=list(cells)))
    return render_notebook(tmp_path / "01.ipynb", tmp_path / "01.html", "A title", **kw).read_text(encoding="utf-8")


def output(**data: Any) -> Any:
    """A code cell with one displayed output."""
    return new_code_cell("x", execution_count=1, outputs=[new_output("display_data", data)])


def _said(text: str) -> Any:
    return new_code_cell(f"{text!r}", outputs=[new_output("stream", text=text)])


def body(page: str) -> str:
    """The page below its navigation."""
    return page[page.index("<main>") :]


@pytest.mark.parametrize("number", ["01", "02", "03", "05"])
def test_page_loads_and_runs_nothing(tmp_path: Path, number: str) -> None:
    """Hostile logs, answers, tables and links in a whole notebook leave a page that is safe and complete."""
    write_json(tmp_path / "n.ipynb", notebook(number))
    path = render_notebook(tmp_path / "n.ipynb", tmp_path / "n.html", "A title")
    page = Page.read(path)
    assert page.runs == [] and page.loads == []
    raw = path.read_text(encoding="utf-8")
    assert "\u202e" not in raw and "\x1b" not in raw and "⟨U+202E⟩gnp.exe⟨ESC⟩[2J" in page.text
    assert "<script>document.title='owned'</script>" in page.text
    assert len(set(page.ids)) == len(page.ids)
    assert path.stat().st_size < 60_000


def test_page_is_the_same_twice(tmp_path: Path) -> None:
    """The same notebook gives the same bytes, and no temporary file stays."""
    write_json(tmp_path / "n.ipynb", notebook("03"))
    one = render_notebook(tmp_path / "n.ipynb", tmp_path / "a.html", "A title").read_bytes()
    two = render_notebook(tmp_path / "n.ipynb", tmp_path / "b.html", "A title").read_bytes()
    assert one == two
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "b.html", "n.ipynb"]


def test_code_is_folded_and_outputs_are_not(tmp_path: Path) -> None:
    """Code stands in a closed details element whose summary is its first line; the output stands outside of it."""
    page = rendered(tmp_path, new_code_cell("import x\n\ny = f(1)\n'z'", outputs=[new_output("stream", text="seen\n")]))
    assert '<details class="code"><summary><code>y = f(1)</code></summary>' in page
    assert "<details open" not in body(page)
    after = page[page.rindex("</details>") :]
    assert "<pre>seen</pre>" in after


def test_parameters_are_named(tmp_path: Path) -> None:
    """The parameter cells are told apart: defaults, and what this run injected."""
    cells = [new_code_cell("a = 1", metadata={"tags": [tag]}) for tag in ("parameters", "injected-parameters")]
    page = rendered(tmp_path, *cells)
    assert "Parameters (defaults)" in page and "Parameters of this run" in page


def test_contents_lead_to_headings(tmp_path: Path) -> None:
    """Every entry of the table of contents leads to a heading, also where two headings are alike."""
    page = Page(rendered(tmp_path, new_markdown_cell("# T\n## Verdict\n### Why `x`?\n## Verdict")))
    assert page.links[:3] == ["#verdict", "#why-x", "#verdict-2"]
    assert {"verdict", "why-x", "verdict-2"} <= set(page.ids)
    assert "A title" not in body(rendered(tmp_path, new_markdown_cell("# T")))
    assert "<h1>A title</h1>" in body(rendered(tmp_path, new_markdown_cell("## T")))


def test_stderr_and_progress_are_folded(tmp_path: Path) -> None:
    """Warnings and progress bars take one line; the bar is shown as it ended, colours are dropped."""
    streams = [
        new_output("stream", name="stderr", text=t) for t in ("\r 10%|#  |", "\r100%|###|\n", "\x1b[33mwarned\x1b[0m\n")
    ]
    page = body(rendered(tmp_path, new_code_cell("x", outputs=streams)))
    assert '<details class="fold"><summary>stderr (2 lines): warned</summary>' in page
    assert "10%|#  |" not in page and "100%|###|" in page


def test_error_is_shown_with_folded_traceback(tmp_path: Path) -> None:
    """A failed cell says what failed; its traceback is one click away, without colour codes."""
    error = new_output(
        "error", ename="ServerDied", evalue="exit 1 <b>", traceback=["\x1b[31mTraceback\x1b[0m", "line 3"]
    )
    page = body(rendered(tmp_path, new_code_cell("x", outputs=[error])))
    assert "ServerDied: exit 1 &lt;b&gt;" in page and "<summary>traceback</summary><pre>Traceback\nline 3</pre>" in page


def test_figure_is_inline_with_its_words(tmp_path: Path) -> None:
    """A chart stands inline as SVG, named by its own words, in the page's colours; two charts keep their own parts."""
    chart = acceptance([{"label": "chat", "accept_length": 1.5, "most": 4}])
    cell = output(**{"image/svg+xml": figure_svg(chart), "text/plain": repr(chart)})
    page = rendered(tmp_path, cell, cell)
    assert page.count('role="img"') == 2 and page.count(f'aria-label="{repr(chart)}"') == 2
    assert "var(--ink)" in page and "#1f2430" not in body(page)
    ids = Page(page).ids
    assert len(ids) == len(set(ids)) and any(one.startswith("p1-") for one in ids)


def test_foreign_figure_stands_on_white_and_is_named_by_its_section(tmp_path: Path) -> None:
    """A figure without words of its own is named by the heading above it and stays legible on a dark page."""
    svg = '<svg xmlns="http://www.w3.org/2000/svg"><rect width="9" height="9"/></svg>'
    page = rendered(
        tmp_path, new_markdown_cell("## Why?"), output(**{"image/svg+xml": svg, "text/plain": "<Figure size 1x1>"})
    )
    assert '<figure class="plate">' in page and "figure under “Why?”" in page


@pytest.mark.parametrize(
    ("data", "seen"),
    [
        ({WIDGET: {"model_id": "a"}, "text/plain": "IntSlider(value=3)"}, "IntSlider(value=3)"),
        ({WIDGET: {"model_id": "a"}}, "An interactive control stands here"),
        ({WIDGET: {"model_id": "a"}, "image/png": PNG, "text/plain": "w"}, "<img src="),
        ({"application/javascript": "alert(1)"}, "can’t be shown on a still page"),
        ({"application/json": {"a": "<b>"}}, "&quot;a&quot;: &quot;&lt;b&gt;&quot;"),
        ({"text/latex": "$x^2$"}, "$x^2$"),
        ({"text/markdown": "**bold** <script>x</script>"}, "<strong>bold</strong> &lt;script&gt;x"),
        ({"text/markdown": "[x](javascript:alert(1)) ![y](https://x.invalid/a.png)"}, "not loaded"),
        ({"image/svg+xml": "<html/>"}, "A picture can’t be shown"),
        ({"image/png": PNG, "text/plain": "three bars"}, 'alt="three bars"'),
        ({"image/png": '"><script>x</script>'}, "is left out here"),
    ],
)  # fmt: skip
def test_no_output_is_an_empty_gap(tmp_path: Path, data: dict[str, Any], seen: str) -> None:
    """Each kind of output leaves a picture, its text or a sentence, and nothing that runs or loads."""
    page = rendered(tmp_path, output(**data))
    assert seen in body(page)
    assert Page(page).runs == [] and Page(page).loads == []


def test_text_that_is_not_unicode_is_shown(tmp_path: Path) -> None:
    """A lone surrogate (a truncated emoji in an answer) neither stops the page nor vanishes."""
    page = rendered(
        tmp_path,
        new_markdown_cell("a \ud83d b"),
        new_code_cell("'\ud83d'", outputs=[new_output("stream", text="\ud83d")]),
    )
    assert page.count("⟨U+D83D⟩") >= 2


def test_links_only_to_what_is_there(tmp_path: Path) -> None:
    """A link to a raw file stays if the file is below the page's folder, else its text stays."""
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a b.log").write_text("x")
    source = "[there](raw/a%20b.log) [gone](raw/c.log) [outside](../../etc/passwd) [site](https://e.invalid/)"
    source += " [up](index.html)"
    page = Page(rendered(tmp_path, new_markdown_cell(source), up=("index.html", "Report")))
    assert page.links == ["index.html", "raw/a%20b.log", "https://e.invalid/", "index.html"]
    assert "there gone outside site up" in page.text


def test_large_outputs_are_named_not_shown(tmp_path: Path) -> None:
    """Megabytes of text, tables and pictures leave a page of bounded size that says what is left out and where."""
    table = "<table>" + "<tr><td>1</td></tr>" * 50_000 + "</table>"
    cells = [
        new_code_cell("x", outputs=[new_output("stream", text="line\n" * 400_000)]),
        output(**{"text/html": table, "text/plain": "t"}),
        output(**{"image/png": base64.b64encode(b"0" * 900_000).decode()}),
        *[new_code_cell("x", outputs=[new_output("stream", text=f"{n} " * 3000)]) for n in range(100)],
    ]
    page = rendered(tmp_path, *cells)
    assert len(page.encode()) < 350_000
    assert "characters left out; the whole text is in 01.ipynb" in page
    assert page.count('is left out here; it is in <a href="01.ipynb">') > 10
    small = rendered(tmp_path, *cells, page_bytes=20_000)
    assert len(small.encode()) < 60_000


def test_math_and_tables_of_markdown(tmp_path: Path) -> None:
    """Formulas stay as their text, number columns of Markdown tables stand right."""
    page = body(rendered(tmp_path, new_markdown_cell("$2 \\cdot n_{kv}$\n\n| a | b |\n|---|--:|\n| 1 | <b>2</b> |")))
    assert "$2 \\cdot n_{kv}$" in page and '<td class="num"><b>2</b></td>' in page


def test_a_failing_notebook_of_papermill_keeps_its_marks(tmp_path: Path) -> None:
    """papermill's own error notes and unexecuted cells render too."""
    cells = [
        new_markdown_cell(
            '<span style="color:red">An Exception was encountered at <a href="#papermill-error-cell">In [2]</a>.</span>'
        ),
        new_markdown_cell('<span id="papermill-error-cell" style="color:red">stopped here</span>'),
        new_code_cell("never ran"),
    ]
    page = rendered(tmp_path, *cells)
    assert "An Exception was encountered" in page and "never ran" in page and "color:red" not in page
    assert "papermill-error-cell" in Page(page).ids and "#papermill-error-cell" in Page(page).links


def test_live_progress_bar_is_folded(tmp_path: Path) -> None:
    """A progress widget keeps its first state in the file: it is folded and not shown as where it ended."""
    page = body(
        rendered(tmp_path, output(**{WIDGET: {"model_id": "a"}, "text/plain": "  0%|          | 0/3 [00:00<?]"}))
    )
    assert "<summary>progress bar, as it was when it appeared</summary>" in page


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"cells": 3}', "\x00\x01", '{"nbformat": 4, "cells": [{"cell_type": "code"}]}']
)
def test_what_is_no_notebook_is_refused(tmp_path: Path, content: str) -> None:
    """A truncated or foreign file raises one clear error and leaves an earlier page as it was."""
    (tmp_path / "01.ipynb").write_text(content)
    (tmp_path / "01.html").write_text("earlier")
    with pytest.raises(UnreadableFile, match="a notebook at"):
        render_notebook(tmp_path / "01.ipynb", tmp_path / "01.html", "t")
    assert (tmp_path / "01.html").read_text() == "earlier"
    with pytest.raises(UnreadableFile):
        render_notebook(tmp_path / "none.ipynb", tmp_path / "01.html", "t")


def test_full_disk_leaves_the_earlier_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If writing fails, the earlier page is whole and no temporary file stays."""
    rendered(tmp_path, new_markdown_cell("# first"))
    before = (tmp_path / "01.html").read_bytes()

    def full(self: Path, *args: Any, **kw: Any) -> None:
        with self.open("wb") as file:
            file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        render_notebook(tmp_path / "01.ipynb", tmp_path / "01.html", "second")
    assert (tmp_path / "01.html").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["01.html", "01.ipynb"]


def test_secrets_are_redacted_once_more(tmp_path: Path) -> None:
    """A key that slipped into code, text, HTML or an error is not on the page."""
    pytest.importorskip("lib.server.redact")
    key = "sk-test-0123456789abcdef0123456789abcdef"
    line = f"server_args=ServerArgs(api_key='{key}')"
    cells = [
        new_code_cell(
            f"api_key = '{key}'",
            outputs=[new_output("stream", text=line), new_output("stream", name="stderr", text=line)],
        ),
        output(**{"text/html": f"<p>{line}</p>", "text/plain": line}),
        output(**{"text/plain": line}),
        output(**{"application/json": {"api_key": key}}),
        new_code_cell("x", outputs=[new_output("error", ename="E", evalue=line, traceback=[line])]),
        new_markdown_cell(line),
    ]
    assert key not in rendered(tmp_path, *cells)


def test_notebook_file_is_not_changed(tmp_path: Path) -> None:
    """Rendering reads the executed notebook and leaves it as it is."""
    write_json(tmp_path / "n.ipynb", notebook("01"))
    before = (tmp_path / "n.ipynb").read_bytes()
    render_notebook(tmp_path / "n.ipynb", tmp_path / "n.html", "t")
    assert (tmp_path / "n.ipynb").read_bytes() == before
