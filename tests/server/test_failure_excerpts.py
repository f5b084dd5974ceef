"""Deaths as servers tell them in public: one excerpt for each message, the class and phase that it must get.

The messages are those of the programs (SGLang, vLLM, torch, NCCL, Triton, systemd, docker); the logs around them are made.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lib.server.failures import classify

ROWS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("failure_excerpts.json").read_text("utf-8"))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["log"][-1][:40])
def test_class_and_phase(row: dict[str, Any]) -> None:
    """The class, and the phase where one is named; None for a server that is well."""
    failure = classify(row["log"])
    assert (failure.failure_class if failure else None) == row["class"]
    assert row["phase"] is None or (failure is not None and failure.phase == row["phase"])


@pytest.mark.parametrize("row", [row for row in ROWS if any(" TP0]" in line for line in row["log"])])
def test_another_rank_and_prefix_change_nothing(row: dict[str, Any]) -> None:
    """Another rank, a container's prefix: the same answer, and the rank that it names follows."""
    failure = classify([f"srv-1  | {line.replace(' TP0]', ' DP1 TP5 EP5]')}" for line in row["log"]])
    assert (failure.failure_class if failure else None) == row["class"]
    assert failure is None or failure.rank in (None, "DP1 TP5 EP5", "rank4")
