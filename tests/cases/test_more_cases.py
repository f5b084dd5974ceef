"""Cases written as a stranger would: other models, tools, launchers and versions; every leaf that counts is right."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import score

HERE = Path(__file__).parent
MORE = sorted(path.parent for path in HERE.glob("*/more/cases.jsonl"))


@pytest.mark.parametrize("folder", MORE, ids=[folder.parent.name for folder in MORE])
def test_every_leaf(folder: Path) -> None:
    """None is wrong, and none is only a repetition of what the case says."""
    totals, wrong, given = score.score(folder)
    assert wrong == [] and given == []
    assert totals[folder.parent.name][1] >= 15


def test_each_kind_has_ten_with_an_origin() -> None:
    assert {folder.parent.name for folder in MORE} == set(score.KINDS)
    for folder in MORE:
        rows = [json.loads(line) for line in (folder / "cases.jsonl").read_text("utf-8").splitlines()]
        assert len(rows) >= 10 and all(row["source"] for row in rows)
        assert len({row["id"] for row in rows}) == len(rows)


def test_cases_of_somebody_who_never_saw_the_code() -> None:
    """39 cases derived by hand from SGLang's source and recorded logs before the tool was run on them.

    The first run had 216 of 235 leaves right; faults of the tool were mended at their root, and what no rule derives (a
    KV dtype where the log does not say over how many ranks heads are split) was taken out, with one case that has no
    finding to name.
    """
    totals, wrong, given = score.score(HERE / "blind")
    assert wrong == [] and given == []
    assert {kind: count for kind, (_, count) in totals.items()}.keys() == set(score.KINDS)
