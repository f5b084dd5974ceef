"""The state document: four sections, each line with its evidence."""

from __future__ import annotations

from lib.records import Evidence, Measured
from lib.report.state import run_discoveries, state_markdown
from tests.report.made_run import HOSTILE, TITLES, result


def lines(text: str, heading: str) -> list[str]:
    """The lines of one section."""
    return [line for line in text.split(f"## {heading}\n")[1].split("## ")[0].splitlines() if line]


def test_every_line_has_its_evidence_or_says_that_it_has_none() -> None:
    """Text, text with a path, with evidence, with several, and a verdict each end with where they can be checked."""
    text = state_markdown(
        "serve it",
        [("keep bf16 KV", "params/06.yaml")],
        [("KV is bf16", Evidence(path="raw/06/server.log", line=3)), ("seen twice", ["raw/a b.log", "raw/c.log"])],
        [],
    )
    assert lines(text, "Goal") == ["- serve it (no evidence file)"]
    assert lines(text, "Instructions") == ["- keep bf16 KV: [params/06.yaml](params/06.yaml)"]
    assert lines(text, "Discoveries") == [
        "- KV is bf16: [raw/06/server.log:3](raw/06/server.log)",
        "- seen twice: [raw/a b.log](raw/a%20b.log), [raw/c.log](raw/c.log)",
    ]
    assert lines(text, "Accomplished") == ["- nothing recorded (no evidence file)"]


def test_all_verdicts_of_a_run_failures_first() -> None:
    """Every verdict of every notebook is one line with its number, limit and launch; what failed comes first."""
    results = [result(number) for number in TITLES]
    found = lines(state_markdown("g", [], run_discoveries(results), []), "Discoveries")
    assert len(found) == sum(len(one.verdicts) for one in results) == 8
    assert [line.split()[1] for line in found] == ["✗", "✗", "⊘", "!", "?", "–", "✓", "✓"]
    kv = next(line for line in found if "fp8" in line)
    # half-width 0.0024: four decimals
    assert "measured 0.0312 nat" in kv and "0.0288, 0.0336" in kv and "limit \\< 0.02 nat" in kv and "launch L-05" in kv
    assert "(raw/05/server.log)" in kv and "(05.result.json)" in kv


def test_hostile_words_are_words() -> None:
    """Nothing in a line is Markdown, HTML or invisible, and no link leaves the run's folder."""
    text = state_markdown(
        HOSTILE, [(HOSTILE, "javascript:alert(1)"), ("x](http://e.invalid) `c`", "../../etc/passwd")], [], []
    )
    assert "\u202e" not in text and "\x1b" not in text and "](javascript" not in text and "](../" not in text
    assert "\\<script\\>" in text and "x\\]" in text and "\\`c\\`" in text


def test_measured_line() -> None:
    """A bare number as a line is shown as every other number."""
    text = state_markdown("g", [], [(Measured(value=36.0971, unit="tok/s", n=4, low=33.98, high=38.21), "raw/a")], [])
    assert "36.1 tok/s" in text
