"""Text that a terminal or a browser would act on is shown, not obeyed."""

from __future__ import annotations

import pytest

from lib.report.text import anchor, escaped, last_states, relative_href, shortened, slug, visible_html, visible_text


@pytest.mark.parametrize(
    ("raw", "seen"),
    [
        ("plain\ttext\nsecond", "plain\ttext\nsecond"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[2Jcleared", "⟨ESC⟩[2Jcleared"),
        ("\x1b]0;title\x07", "⟨ESC⟩]0;title⟨BEL⟩"),
        ("a\x00b\x7fc\x9bd", "a⟨NUL⟩b⟨DEL⟩c⟨U+009B⟩d"),
        ("exe.\u202etxt", "exe.⟨U+202E⟩txt"),
        ("\u2066iso\u2069 \u200b\ufeff", "⟨U+2066⟩iso⟨U+2069⟩ ⟨U+200B⟩⟨U+FEFF⟩"),
        ("\U000e0041tag", "⟨U+E0041⟩tag"),
        ("lone \ud800", "lone ⟨U+D800⟩"),
        ("hidden\rshown", "hidden⟨CR⟩shown"),
        ("dos\r\nline", "dos\nline"),
        ("été 日本 👩\u200d🚀", "été 日本 👩\u200d🚀"),
    ],
)
def test_invisible_is_shown(raw: str, seen: str) -> None:
    """What is not plain text is shown by its name; real letters, also of other scripts, stay."""
    assert visible_text(raw) == seen
    assert visible_text(seen) == seen
    visible_text(raw).encode("utf-8")


def test_invisible_as_character_reference_is_shown() -> None:
    """A bidi control can't hide as a character reference in HTML; a letter stays a letter."""
    assert visible_html("&#8238;&#x202E;&#X0000202e;&rlm;&#65;&amp;#8238;") == (
        "⟨U+202E⟩⟨U+202E⟩⟨U+202E⟩⟨U+200F⟩&#65;&amp;#8238;"
    )


def test_escaped_is_no_markup() -> None:
    """Nothing in escaped text is markup, in content or in an attribute."""
    assert escaped("<a href=\"x\" b='y'>&") == "&lt;a href=&quot;x&quot; b=&#x27;y&#x27;&gt;&amp;"


def test_progress_bar_is_its_last_state() -> None:
    """Of a line rewritten by carriage returns the last state stays; other lines are untouched."""
    assert last_states("\r 10%\r 50%\r100%\nready\r\n") == "100%\nready\n"


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "../x",
        "raw/../../x",
        "javascript:alert(1)",
        "file:///x",
        "a\\b",
        "x\u202e.log",
        "a\nb",
        "//host/x",
    ],
)
def test_path_that_leaves_the_run_is_no_link(path: str) -> None:
    """Only plain relative paths become links."""
    assert relative_href(path) is None


def test_path_is_quoted_for_a_link() -> None:
    """Characters with a meaning in a URL are quoted."""
    assert relative_href("raw/a b#1?.log") == "raw/a%20b%231%3F.log"


def test_shortened_says_how_much() -> None:
    """A cut text says how many characters are missing, and keeps start and end."""
    # 3000 characters, 900 kept: 600 at the start, 300 at the end, 2100 left out.
    text = shortened("a" * 1500 + "b" * 1500, 900)
    assert text.startswith("a" * 600 + "\n") and text.endswith("\n" + "b" * 300)
    assert "2,100 characters left out" in text
    assert shortened("short", 900) == "short"


def test_anchors() -> None:
    """Anchors hold no character with a meaning in HTML or a URL."""
    assert anchor("verdict", "kv dtype") == "verdict-kv-dtype"
    assert anchor("verdict", '"><script>') == "verdict-script"
    assert anchor("verdict", "…") == "verdict-unnamed"
    assert slug("Does it load?") == "does-it-load"
    assert slug("???") == "section"
