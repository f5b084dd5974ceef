"""What is written is true as far as a machine can tell: links lead somewhere, generated pages are current, no blanks are left."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lib.params import ROOT

PAGES = [ROOT / n for n in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LOG.md")] + sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere_and_no_blank_is_left(page: Path) -> None:
    """Every relative link exists in the repository; no placeholder was forgotten."""
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if not re.match(r"https?:|mailto:", target):
            assert (page.parent / target).exists(), target
    assert not re.findall(r"\b(?:SETUP|VERDICT)_[A-Z0-9]+\b|\bTODO\b|\bTBD\b", text)


def test_generated_pages_are_current() -> None:
    """`python -m lib.report.docs --check` names none that differs from its table."""
    done = subprocess.run([sys.executable, "-m", "lib.report.docs", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
