"""The look of all pages: one small stylesheet, light and dark by the reader's setting, and for print."""

from __future__ import annotations

from pathlib import Path

#: Nothing may be loaded or run: what a page needs stands in it.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def css() -> str:
    """Return the stylesheet that every page carries."""
    return (Path(__file__).parent / "templates" / "page.css").read_text(encoding="utf-8")
