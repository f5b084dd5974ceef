"""What a page may contain: HTML and SVG reduced to a whitelist, so that no content can load, run or hide anything.

Disallowed tags are shown as text, not dropped: what a model answered is visible. Links may go to other sites (a reader
clicks them), but nothing is loaded from anywhere.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable
from html.parser import HTMLParser
from xml.etree import ElementTree

import bleach

from lib.report.text import escaped, relative_href, visible_html, visible_text

_BLOCKS = "blockquote dd details div dl dt figcaption figure h1 h2 h3 h4 h5 h6 hr li ol p pre summary ul"
_INLINE = "a abbr b bdi br code del em i img kbd q s small span strong sub sup u"
_TABLE = "caption col colgroup table tbody td tfoot th thead tr"
_TAGS = frozenset(f"{_BLOCKS} {_INLINE} {_TABLE}".split())
_ID = re.compile(r"(?:(?:verdict|trial|prediction)-[A-Za-z0-9_.-]+|papermill-error-cell)")
_CLASS = re.compile(r"[A-Za-z0-9 _-]{0,80}")
_DATA_IMAGE = re.compile(r"data:image/(png|jpeg);base64,[A-Za-z0-9+/=\s]+")
_NO_SOURCE = re.compile(r"<img\b(?![^>]*\ssrc=)[^>]*>")
_STYLE_BLOCK = re.compile(r"<style\b[^>]*>.*?</style\s*>", re.IGNORECASE | re.DOTALL)
_PLAIN_ATTRIBUTES = frozenset(("title", "colspan", "rowspan", "scope", "align", "open", "start", "lang"))


def safe_link(url: str) -> bool:
    """Tell whether a link may stand in a page: an anchor, a plain relative path, or an http(s) address to click."""
    if visible_text(url) != url or "\n" in url or "\t" in url:
        return False
    if re.fullmatch(r"#[^\s<>\"]*", url) or re.match(r"https?://[^\s<>\"]+$", url):
        return True
    return relative_href(url.split("#")[0]) is not None


def _allowed(tag: str, name: str, value: str) -> bool:
    value = html.unescape(value)  # as a browser will read it
    if name in _PLAIN_ATTRIBUTES:
        return True
    if name == "class":
        return bool(_CLASS.fullmatch(value))
    if name == "id":
        return bool(_ID.fullmatch(value))
    if tag == "a" and name == "href":
        return safe_link(value)
    if tag == "img":
        return name == "alt" or (name == "src" and bool(_DATA_IMAGE.fullmatch(value)))
    return False


def clean_html(markup: str) -> str:
    """Return HTML of a cell's output or of Markdown reduced to the whitelist.

    Style blocks (pandas writes one before each table) are dropped, comments too; any other tag that is not allowed is
    shown as text; scripts, event handlers, inline styles and images from elsewhere can't remain.
    """
    cleaner = bleach.Cleaner(tags=_TAGS, attributes=_allowed, protocols=("http", "https", "data"), strip_comments=True)
    cleaned = cleaner.clean(visible_text(_STYLE_BLOCK.sub("", markup)))
    return visible_html(_NO_SOURCE.sub('<span class="why">(a picture from elsewhere, not loaded)</span>', cleaned))


class _Links(HTMLParser):
    """Collects a page's anchors and links."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.append(value)
            elif tag == "a" and name == "href" and value:
                self.links.append(value)


def anchors_of(markup: str) -> set[str]:
    """Return all anchors (ids) of a page."""
    parser = _Links()
    parser.feed(markup)
    return set(parser.ids)


def first_heading(markup: str) -> str:
    """Return the text of a page's first heading, or ""."""
    match = re.search(r"<h1\b[^>]*>(.*?)(?:<a class=\"here\"|</h1>)", markup, re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", "", match[1])).split()) if match else ""


def unlinked(markup: str, exists: Callable[[str], bool]) -> str:
    """Return the page's HTML with relative links to files that are not there turned into plain text."""

    def kept(match: re.Match[str]) -> str:
        href = match["href"]
        if href.startswith(("#", "http://", "https://")) or exists(href.split("#")[0]):
            return match[0]
        return f'<span class="missing" title="file not found">{match["text"]}</span>'

    return re.sub(r'<a\b[^>]*?\bhref="(?P<href>[^"]*)"[^>]*>(?P<text>.*?)</a>', kept, markup, flags=re.DOTALL)


_SVG = "{http://www.w3.org/2000/svg}"
_XLINK_HREF = "{http://www.w3.org/1999/xlink}href"
_SHAPES = "path rect circle ellipse line polyline polygon use image"
_SVG_TAGS = frozenset(f"svg g defs clipPath pattern text tspan linearGradient stop {_SHAPES}".split())
_GEOMETRY = "d x y x1 y1 x2 y2 cx cy r rx ry dx dy points transform"
_PAINT = "fill fill-opacity fill-rule opacity stroke stroke-width stroke-opacity stroke-dasharray stroke-linecap"
_WORDS = "font-size font-family font-weight font-style text-anchor"
_FRAME = "width height patternUnits viewBox preserveAspectRatio clip-path clip-rule offset style stroke-linejoin"
_SVG_ATTRIBUTES = frozenset(f"{_GEOMETRY} {_PAINT} {_WORDS} {_FRAME}".split())
_SVG_NUMBERS = frozenset(_GEOMETRY.split())
_LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_BAD_STYLE = re.compile(r"@|\\|expression|javascript|url\(\s*(?!#)", re.IGNORECASE)
_LOCAL_URL = re.compile(r"url\(#([^)\s]+)\)")
_FONT_LIST = re.compile(r"'[^']*'(?:,\s*'[^']*')*(?:,\s*sans-serif)?|font-family:[^;]*")

#: Colours of `lib.report.figures` that follow the page's light or dark theme.
THEMED = {
    "#1f2430": "var(--ink)",
    "#5b6472": "var(--soft)",
    "#d5d9e0": "var(--line)",
    "#fffffe": "var(--plate)",
    "#c0392b": "var(--fail)",
    "#0072b2": "var(--first)",
}


def _short_number(match: re.Match[str]) -> str:
    text = f"{float(match[0]):.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def _svg_style(style: str, names: dict[str, str], themed: bool) -> str:
    parts = []
    for part in style.split(";"):
        part = " ".join(part.split())
        if not part or _BAD_STYLE.search(part):
            continue
        if part.startswith("font"):
            part = _FONT_LIST.sub(lambda m: "font-family:inherit" if m[0].startswith("font") else "sans-serif", part)
        if themed:
            for plain, by_theme in THEMED.items():
                part = part.replace(plain, by_theme)
        parts.append(re.sub(r":\s+", ":", _LOCAL_URL.sub(lambda m: f"url(#{names.get(m[1], m[1])})", part)))
    return ";".join(parts)


def _references(root: ElementTree.Element) -> Iterable[str]:
    for element in root.iter():
        for name, value in element.attrib.items():
            yield from _LOCAL_URL.findall(value)
            if name in (_XLINK_HREF, "href") and value.startswith("#"):
                yield value[1:]


def clean_svg(svg: str, alt: str, prefix: str, themed: bool = False) -> str:
    """Return an SVG picture fit to stand in a page: whitelisted, small, named for screen readers, with its own ids.

    Args:
        svg: what matplotlib (or anything else) wrote.
        alt: what the picture shows, for those who don't see it.
        prefix: put before each id, so that pictures on one page don't take each other's parts.
        themed: let the workbook's own colours follow the page's theme.

    Raises:
        ValueError: not an SVG document, or one that declares entities.
    """
    if "<!ENTITY" in svg.upper():
        raise ValueError("expected an SVG picture, found one that declares entities")
    try:
        root = ElementTree.fromstring(svg)
    except ElementTree.ParseError as error:
        raise ValueError(f"expected an SVG picture, found unreadable XML: {error}") from None
    if root.tag != f"{_SVG}svg":
        raise ValueError(f"expected an SVG picture, found <{escaped(root.tag)}>")
    names = {old: f"{prefix}{index}" for index, old in enumerate(dict.fromkeys(_references(root)))}
    out: list[str] = []

    def write(element: ElementTree.Element, inside_text: bool) -> None:
        tag = element.tag.removeprefix(_SVG) if isinstance(element.tag, str) else ""
        if tag not in _SVG_TAGS:
            return
        attributes = []
        for name, value in element.attrib.items():
            if name == "id" and value in names:
                attributes.append(f'id="{names[value]}"')
            elif name in (_XLINK_HREF, "href"):
                if value.startswith("#"):
                    attributes.append(f'href="{names.get(value[1:], "")}"'.replace('="', '="#', 1))
                elif tag == "image" and _DATA_IMAGE.fullmatch(value):
                    attributes.append(f'href="{escaped(value)}"')
            elif name == "style":
                style = _svg_style(value, names, themed)
                if style:
                    attributes.append(f'style="{escaped(style)}"')
            elif name in _SVG_ATTRIBUTES and not _BAD_STYLE.search(value):
                if element is root and name in ("width", "height"):
                    value = value.removesuffix("pt")
                value = _LOCAL_URL.sub(lambda m: f"url(#{names.get(m[1], m[1])})", " ".join(value.split()))
                if name in _SVG_NUMBERS:
                    value = _LONG_NUMBER.sub(_short_number, value)
                attributes.append(f'{name}="{escaped(value)}"')
        if element is root:
            attributes[:0] = [
                'xmlns="http://www.w3.org/2000/svg"',
                'role="img"',
                f'aria-label="{escaped(" ".join(alt.split()))}"',
                'stroke-linejoin="round"',
            ]
        opening = " ".join([tag, *attributes])
        texts = tag in ("text", "tspan")
        start = len(out)
        out.append(f"<{opening}>")
        if texts and element.text:
            out.append(escaped(element.text))
        for child in element:
            write(child, texts)
            if texts and child.tail:
                out.append(escaped(child.tail))
        if len(out) == start + 1:
            if tag in ("g", "defs") and element is not root:
                out.pop()
                return
            out[start] = f"<{opening}/>"
        else:
            out.append(f"</{tag}>")

    write(root, False)
    return "".join(out)
