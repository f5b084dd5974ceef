"""Where runs lie: the outputs folder, the runs in it, and how a new one is named. Imports nothing of the other rooms."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

#: The folder of committed examples below outputs/; nothing there is a run of this machine.
EXAMPLES = "examples"
#: Where replays of packed runs go: copies, which are no runs either.
REPLAYS = "replays"
_ROOT = Path(__file__).resolve().parents[1]


def outputs_root() -> Path:
    """Where runs go: WORKBOOK_OUTPUTS, else outputs/ of the checkout."""
    return Path(os.environ.get("WORKBOOK_OUTPUTS") or _ROOT / "outputs")


def run_folders(root: Path) -> list[Path]:
    """Folders of runs below an outputs folder, in no order; committed examples and replays of them are none, and not pruned."""
    return [f.parent for f in root.glob("*/*/result.json") if f.parent.parent.name not in (EXAMPLES, REPLAYS)]


def new_run_id() -> str:
    """A run id that sorts by time, such as `20261129-141503`."""
    return f"{datetime.datetime.now():%Y%m%d-%H%M%S}"
