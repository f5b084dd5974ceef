"""What a browser would do with a page: which links it has, what it would load, what it would run."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

#: Attributes by which an element loads something.
LOADING = (
    "src",
    "srcset",
    "poster",
    "data",
    "background",
    "action",
    "formaction",
    "manifest",
    "ping",
    "longdesc",
    "cite",
)


class Page(HTMLParser):
    """A parsed page: anchors, links, everything that it would load or run, and its text."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.runs: list[str] = []
        self.text = ""
        self._in_style = False
        self.feed(markup)

    @classmethod
    def read(cls, path: Path) -> Page:
        return cls(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "iframe", "object", "embed", "applet", "form", "base", "frame", "portal"):
            self.runs.append(tag)
        self._in_style = tag == "style"
        for name, value in attrs:
            value = value or ""
            if name == "id":
                self.ids.append(value)
            if name.startswith("on"):
                self.runs.append(f"{tag} {name}={value}")
            if re.match(r"\s*(javascript|vbscript|data:text)", value, re.IGNORECASE):
                self.runs.append(f"{tag} {name}={value}")
            if tag == "a" and name == "href":
                self.links.append(value)
            elif name in ("href", "xlink:href", *LOADING) and not value.startswith(("#", "data:image/")):
                self.loads.append(f"{tag} {name}={value}")
            if name == "style":
                self.loads += re.findall(r"url\((?!#)[^)]*\)|@import[^;]*", value)
            if tag == "meta" and name == "http-equiv" and value.lower() == "refresh":
                self.runs.append("meta refresh")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._in_style:
            self.loads += re.findall(r"url\([^)]*\)|@import[^;]*", data)

    def broken(self, folder: Path, name: str) -> list[str]:
        """Links that lead nowhere: a file or an anchor that is not there."""
        broken = []
        for link in self.links:
            if link.startswith(("http://", "https://")):
                continue
            file, _, anchor = link.partition("#")
            target = folder / unquote(file) if file else folder / name
            if not target.exists() or (anchor and unquote(anchor) not in Page.read(target).ids):
                broken.append(link)
        return broken
