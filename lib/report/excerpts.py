"""A raw line with its neighbours, as it may be shown: redacted, with what is invisible made visible, nothing from outside."""

from __future__ import annotations

from pathlib import Path

from lib.report.html import redactor
from lib.report.text import shortened, visible_text

#: Lines before and after the one that was meant, and lines of a file that has no line named.
AROUND, WHOLE_LINES, LINE_CHARACTERS = 3, 12, 240
#: Larger raw files are read only as far as this.
READ_BYTES = 64_000_000


def raw_lines(folder: Path, name: str) -> list[str] | None:
    """Lines of a raw file below a run's folder, as editors count them; None if there is none, or it lies outside."""
    try:
        root = folder.resolve()
        file = (root / name).resolve()
        if not file.is_relative_to(root) or not file.is_file():
            return None
        with file.open("rb") as stream:
            return stream.read(READ_BYTES).decode("utf-8", "replace").split("\n")
    except (OSError, ValueError):
        return None


def read_excerpt(folder: Path, name: str, line: int | None = None) -> str | None:
    """A raw file's line between its neighbours (marked `>`), or the file's first lines; plain text, to be escaped.

    Args:
        folder: the run's folder; nothing outside it is read.
        name: the file's path below it.
        line: which line is meant, from 1; None: none.

    Returns:
        The text; None where there is no such file or line.
    """
    lines = raw_lines(folder, name)
    if lines is None or (line is not None and not 1 <= line <= len(lines)):
        return None
    first, last = (0, WHOLE_LINES) if line is None else (max(0, line - 1 - AROUND), line + AROUND)
    shown = [
        f"{number:>6}{'>' if number == line else ' '} {shortened(text.rstrip(chr(13)), LINE_CHARACTERS, '…')}"
        for number, text in enumerate(_redacted(lines[first:last]), first + 1)
    ]
    if line is None and len(lines) > last:
        shown.append(f"        … {len(lines) - last:,} more lines")
    return visible_text("\n".join(shown))


def _redacted(lines: list[str]) -> list[str]:
    """Whole lines without secrets, before any is cut: half a secret has no shape that could be recognised."""
    redact = redactor("redact_text")
    together = str(redact("\n".join(lines))).split("\n")
    return together if len(together) == len(lines) else [str(redact(line)) for line in lines]
