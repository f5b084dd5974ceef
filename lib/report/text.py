"""Text of logs and model answers made safe to show: what a terminal or a browser would act on becomes visible.

A log line is data. Colour codes are dropped; every other control character, bidi control, invisible character and lone
surrogate is shown by its code, so that a reader sees what stands in the raw file and not what it wants to look like.
"""

from __future__ import annotations

import html
import re
from urllib.parse import quote

_SGR = re.compile(r"\x1b\[[0-9;:]*m")
_INVISIBLE = re.compile(
    "[\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f\ud800-\udfff]"
)
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_FIRST = "NUL SOH STX ETX EOT ENQ ACK BEL BS HT LF VT FF CR SO SI"
_SECOND = "DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US"
_CONTROL_NAMES = f"{_FIRST} {_SECOND}".split()
_CHARACTER_REFERENCE = re.compile(
    r"&(?:#0*(?P<dec>\d{1,8})|#[xX]0*(?P<hex>[0-9a-fA-F]{1,7})|(?P<name>lrm|rlm|shy|ZeroWidthSpace|NoBreak))(?:;|\b)"
)
_NAMED = {"lrm": 0x200E, "rlm": 0x200F, "shy": 0x00AD, "ZeroWidthSpace": 0x200B, "NoBreak": 0x2060}


def _by_code(match: re.Match[str]) -> str:
    return f"⟨U+{ord(match[0]):04X}⟩"


def _by_name(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return f"⟨{_CONTROL_NAMES[code]}⟩"
    return "⟨DEL⟩" if code == 0x7F else f"⟨U+{code:04X}⟩"


def last_states(text: str) -> str:
    """Return output of a progress bar as a terminal leaves it: of a line rewritten by carriage returns, the last state.

    For a notebook's own output only: in a log it would hide what stands before the carriage return.
    """
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        states = [state for state in line.split("\r") if state.strip()]
        lines.append(states[-1] if states else "")
    return "\n".join(lines)


def visible_text(text: str) -> str:
    """Return `text` with colour codes dropped and everything else that is not plain text shown by its code.

    Line feeds and tabs stay.

    Example: `visible_text("\\x1b[31mred\\x1b[0m \\u202etxt")` is `"red ⟨U+202E⟩txt"`.
    """
    plain = _SGR.sub("", text).replace("\r\n", "\n")
    return _CONTROL.sub(_by_name, _INVISIBLE.sub(_by_code, plain))


def visible_html(markup: str) -> str:
    """Return HTML whose invisible characters, also those written as character references, are shown by their code."""

    def shown(match: re.Match[str]) -> str:
        if match["name"]:
            code = _NAMED[match["name"]]
        else:
            code = int(match["dec"]) if match["dec"] else int(match["hex"], 16)
        if code > 0x10FFFF:
            return html.escape(match[0])
        character = chr(code)
        seen = visible_text(character)
        return match[0] if seen == character else seen

    return _CHARACTER_REFERENCE.sub(shown, visible_text(markup))


def escaped(text: str) -> str:
    """Return `text` as HTML in which nothing is markup and nothing is invisible."""
    return html.escape(visible_text(text), quote=True)


def shortened(text: str, limit: int, more: str = "the rest is in the raw file") -> str:
    """Return `text` cut in its middle to about `limit` characters, with one line that says how much is left out."""
    if len(text) <= limit:
        return text
    head, tail = limit * 2 // 3, limit // 3
    return f"{text[:head]}\n… {len(text) - head - tail:,} characters left out; {more} …\n{text[-tail:]}"


def relative_href(path: str) -> str | None:
    """Return `path` quoted for a link, or None where it leaves the run's folder or is not a plain relative path.

    Example: `relative_href("raw/a b.log")` is `"raw/a%20b.log"`; `relative_href("javascript:x")` is None.
    """
    parts = path.split("/")
    if not path or path.startswith("/") or "\\" in path or ".." in parts or ":" in parts[0]:
        return None
    if visible_text(path) != path or "\n" in path or "\t" in path:
        return None
    return quote(path, safe="/")


def anchor(kind: str, identifier: str) -> str:
    """Return the id that a row has in a page, for example `anchor("verdict", "kv dtype")` is `"verdict-kv-dtype"`."""
    return f"{kind}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', identifier).strip('-') or 'unnamed'}"


def slug(heading: str) -> str:
    """Return a heading's anchor. Example: `slug("Does it load?")` is `"does-it-load"`."""
    return re.sub(r"[^\w]+", "-", heading.lower()).strip("-_") or "section"
