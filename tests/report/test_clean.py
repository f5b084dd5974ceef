"""HTML and SVG of cells, reduced to what can't load, run or hide."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.report.clean import clean_html, clean_svg, first_heading, unlinked
from tests.report.pages import Page

SVG = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="0 0 9 9">{}</svg>'

ATTACKS = [
    "<script>alert(1)</script>",
    "<SCRIPT SRC=//x.invalid/a.js></SCRIPT>",
    "<img src=x onerror=alert(1)>",
    "<img src='https://x.invalid/a.png'>",
    "<img src='data:image/svg+xml;base64,PHN2Zz4='>",
    "<svg onload=alert(1)><script>alert(1)</script></svg>",
    "<a href='javascript:alert(1)'>x</a>",
    "<a href=' jAvAsCrIpT&colon;alert(1)'>x</a>",
    "<a href='java&#9;script:alert(1)'>x</a>",
    "<a href='data:text/html,<script>alert(1)</script>'>x</a>",
    "<iframe src='https://x.invalid/'></iframe>",
    "<object data='https://x.invalid/'></object>",
    "<link rel=stylesheet href='https://x.invalid/a.css'>",
    "<style>@import 'https://x.invalid/a.css'</style>",
    "<style>body{background:url(https://x.invalid/a.png)}",
    "<p style='background:url(https://x.invalid/a.png)'>x</p>",
    "<div onmouseover='x()'>x</div>",
    "<form action='https://x.invalid/'><input></form>",
    "<meta http-equiv=refresh content='0;url=https://x.invalid/'>",
    "<base href='https://x.invalid/'>",
    "<math><mi xlink:href='javascript:alert(1)'>x</mi></math>",
    "<!--><script>alert(1)</script>-->",
    "<p>&#8238;txt.exe &rlm;</p>",
    "<td background='https://x.invalid/a.png'>x</td>",
    "<table><td><noscript><p title='</noscript><img src=x onerror=alert(1)>'>",
    "\x1b]8;;http://x\x07<b>ok</b>",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_attack_is_shown_not_run(attack: str) -> None:
    """Cleaned HTML loads nothing, runs nothing, hides nothing."""
    cleaned = clean_html(attack)
    page = Page(cleaned)
    assert page.runs == [] and page.loads == []
    assert "\u202e" not in cleaned and "&#8238" not in cleaned and "&rlm" not in cleaned and "\x1b" not in cleaned


def test_the_page_parser_sees_attacks() -> None:
    """The check itself finds something in the attacks that have something to find (or it would pass on anything)."""
    found = [attack for attack in ATTACKS if Page(attack).runs or Page(attack).loads]
    assert len(found) >= 17


@given(
    st.lists(
        st.sampled_from([*ATTACKS, "<table><tr><td>", "</td>", "'", '"', "<", ">", "&", "<!--", "-->", "x"]), max_size=6
    )
)
def test_attacks_in_combination(parts: list[str]) -> None:
    """No concatenation of attacks and broken markup gets through either."""
    page = Page(clean_html("".join(parts)))
    assert page.runs == [] and page.loads == []


def test_disallowed_tag_is_visible_text() -> None:
    """What a model answered is seen, not dropped."""
    assert clean_html("a<script>b</script>") == "a&lt;script&gt;b&lt;/script&gt;"


def test_tables_stay() -> None:
    """Our own tables and pandas' come through, without pandas' style block."""
    html = clean_html(
        '<style scoped>.dataframe{x:y}</style><table class="dataframe" border="1"><tr id="verdict-a">'
        '<td title="exact: 1">1</td></tr></table><a class="evidence" href="raw/a%20b.log">x</a><a href="https://example.invalid/">s</a>'
    )
    assert html == (
        '<table class="dataframe"><tbody><tr id="verdict-a"><td title="exact: 1">1</td></tr></tbody></table>'
        '<a class="evidence" href="raw/a%20b.log">x</a><a href="https://example.invalid/">s</a>'
    )


def test_ids_of_the_page_cannot_be_taken() -> None:
    """Only our rows' anchors may come from a cell; no other id."""
    assert "id=" not in clean_html('<p id="verdict">x</p><p id="toc">y</p>')


def test_missing_files_lose_their_link_only() -> None:
    """A link to a file that is not there becomes text; others stay."""
    text = '<a href="raw/a.log">a</a><a href="raw/b.log">b</a><a href="#x">c</a><a href="https://e.invalid/">d</a>'
    out = unlinked(text, lambda href: href == "raw/a.log")
    assert Page(out).links == ["raw/a.log", "#x", "https://e.invalid/"]
    assert Page(out).text == "abcd"


@pytest.mark.parametrize(
    "inner",
    [
        "<script>alert(1)</script>",
        "<foreignObject><iframe src='https://x.invalid/'/></foreignObject>",
        "<image href='https://x.invalid/a.png' width='9' height='9'/>",
        "<use xlink:href='https://x.invalid/a.svg#b'/>",
        "<a href='javascript:alert(1)'><text>x</text></a>",
        "<rect onclick='alert(1)' width='9' height='9'/>",
        "<rect style='fill:url(https://x.invalid/a.svg#b)' width='9' height='9'/>",
        "<rect fill='url(https://x.invalid/a.svg#b)' width='9' height='9'/>",
        "<style>@import url(https://x.invalid/a.css)</style>",
        "<set attributeName='href' to='javascript:alert(1)'/>",
    ],
)
def test_svg_attack_is_dropped(inner: str) -> None:
    """A picture loads nothing and runs nothing."""
    page = Page(clean_svg(SVG.format(inner), "alt", "p-"))
    assert page.runs == [] and page.loads == []


def test_svg_parts_are_its_own() -> None:
    """Ids get the picture's prefix, references follow, unused ids go: two pictures don't take each other's parts."""
    path = "<path d='M 0.123456 1' clip-path='url(#c)'/>"
    inner = f"<defs><clipPath id='c'><rect width='9' height='9'/></clipPath></defs><g id='unused'>{path}</g>"
    one, two = clean_svg(SVG.format(inner), "a", "p1-"), clean_svg(SVG.format(inner), "a", "p2-")
    assert Page(one).ids == ["p1-0"] and "url(#p1-0)" in one
    assert Page(two).ids == ["p2-0"] and "url(#p2-0)" in two
    assert 'd="M 0.12 1"' in one


@pytest.mark.parametrize(
    "svg",
    ["not xml", "<html/>", "", '<!DOCTYPE svg [<!ENTITY a "b">]><svg xmlns="http://www.w3.org/2000/svg">&a;</svg>'],
)
def test_what_is_no_picture_is_refused(svg: str) -> None:
    """Other documents and entity declarations raise, so that the page says it."""
    with pytest.raises(ValueError, match="expected an SVG picture"):
        clean_svg(svg, "alt", "p-")


def test_alt_cannot_break_out() -> None:
    """The picture's name is one attribute, whatever it contains."""
    page = Page(clean_svg(SVG.format(""), '"><script>x</script>\n\u202e', "p-"))
    assert page.runs == [] and page.text == ""


def test_first_heading() -> None:
    """The first heading's own text, without its link."""
    assert first_heading(
        '<h2>x</h2><h1 id="a">Does <code>it</code> &amp; load?<a class="here" href="#a">#</a></h1>'
    ) == ("Does it & load?")
    assert first_heading("<p>x</p>") == ""
