"""Signs in a generated text that it is garbage: repetition, lost characters, scripts mixed within a phrase. Pure."""

from __future__ import annotations

import itertools
import re
import unicodedata


def output_signs(text: str) -> list[str]:
    """Signs that a text is garbage; empty if none.

    One piece, word or phrase repeated, special tokens in a row, replacement characters, scripts mixed within a phrase.

    Example: `output_signs("+" * 50)` names the repetition; a paragraph of English, Chinese or Python gives no sign.
    """
    signs: list[str] = []
    body = "".join(text.split())
    if len(body) < 8:
        return signs
    lost = body.count("\ufffd") / len(body)
    if lost > 0.05:
        signs.append(f"{lost:.0%} replacement characters")
    signs += _repeats(text)[0]
    scripts = [script for script in (_script(char) for char in text) if script]
    mixed = sorted(set(scripts))
    foreign = [name for name in mixed if scripts.count(name) >= 2]
    switches = sum(1 for left, right in zip(text, text[1:], strict=False) if _glued(left, right))
    if len(foreign) >= 2 and switches >= 2 and switches / max(len(scripts), 1) > 0.02 and _unseparated(text):
        signs.append(f"scripts mixed without separation ({', '.join(foreign)})")
    return signs


def output_hints(text: str) -> list[str]:
    """Repetition that code and tables may hold (a row of zeros, a ruler, equal lines); never garbage by itself.

    Example: `output_hints("x = [" + "0, " * 40 + "0]")` names it, and `output_signs` of the same text is empty.
    """
    return _repeats(text)[1]


_REPEAT = re.compile(r"(.{1,4}?)\1{4,}")
_PHRASE = re.compile(r"(.{5,120}?)\1{4,}")
_SPECIAL = re.compile(
    r"((?:<[|\uff5c][^<>|\uff5c]{1,60}[|\uff5c]>|</?s>|<(?:pad|unk|eos|bos|mask|unused\d+|extra_id_\d+)>|\[(?:PAD|UNK|MASK)\])\s*)"
    r"\1{3,}"
)

#: Characters that good text repeats: rules, underlines, table borders, bars.
_RULERS = set("-=_*#.~/\\|+:─━═│█▇░▏▎")
_LIMIT = 20_000


def _repeats(text: str) -> tuple[list[str], list[str]]:
    """Repetitions in a text: those that make it garbage, and those that code or a table may hold."""
    text = text[:_LIMIT]
    body = "".join(text.split())
    special = _SPECIAL.search(text)
    if special:
        return [f"{special[1].strip()!r} repeated {len(special[0]) // len(special[1])} times"], []
    found: list[tuple[str, int, int]] = []
    piece = max(_REPEAT.finditer(body), key=lambda match: len(match[0]), default=None)
    if piece is not None:
        length, share = len(piece[0]), len(piece[0]) / len(body)
        ruler = set(piece[1]) <= _RULERS and share < 0.8
        if not ruler and (length >= 24 or share >= 0.2):
            found.append((piece[1], length // len(piece[1]), length))
    words = [(word.strip(".,;:!?\"'()").casefold(), len(word)) for word in text.split()]
    for word, run in itertools.groupby(words, key=lambda pair: pair[0]):
        sizes = [size for _, size in run]
        if any(map(str.isalpha, word)) and (len(sizes) >= 12 or (len(sizes) >= 6 and sum(sizes) >= 0.3 * len(body))):
            found.append((word, len(sizes), sum(sizes)))
    phrase = max(_PHRASE.finditer(body), key=lambda match: len(match[0]), default=None)
    if phrase is not None and len(phrase[0]) >= 0.5 * len(body) and not set(phrase[1]) <= _RULERS:
        found.append((phrase[1], len(phrase[0]) // len(phrase[1]), len(phrase[0])))
    if not found:
        return [], []
    what, times, length = max(found, key=lambda one: one[2])
    told = [f"{what!r} repeated {times} times"]
    data = bool(re.search(r"[\d,|]", what)) or len(what) >= 5
    tame = _codelike(text) and (data or (not re.search(r"[^\W\d_]", what) and length < 0.8 * len(body)))
    return ([], told) if tame else (told, [])


_CODE = re.compile(
    r"^\s*(?:def |class |import |from \w+ import|return\b|for\b.*[:{]|if\b.*[:{]|#include|const |let |var |\||```|\}|print\()"
    r"|[\w\])]\s*(?:=|:=|\+=)\s*[\[({\"'\w]|[;{]\s*$",
    re.M,
)


def _codelike(text: str) -> bool:
    """Whether a text has the marks of code or of a table: statements, assignments, fences, rows."""
    return bool(_CODE.search(text))


def _script(char: str) -> str | None:
    if not char.isalpha():
        return None
    name = unicodedata.name(char, "")
    return next(
        (
            word
            for word in ("LATIN", "CJK", "CYRILLIC", "ARABIC", "HANGUL", "HIRAGANA", "KATAKANA", "THAI", "HEBREW")
            if word in name
        ),
        None,
    )


def _glued(left: str, right: str) -> bool:
    one, two = _script(left), _script(right)
    japanese = {"CJK", "HIRAGANA", "KATAKANA"}
    return bool(one and two and one != two and not {one, two} <= japanese)


def _unseparated(text: str) -> bool:
    """Whether the text has hardly any punctuation or spaces, as neither prose nor code has."""
    marks = sum(1 for char in text if char.isspace() or unicodedata.category(char).startswith("P"))
    return marks / max(len(text), 1) < 0.05
