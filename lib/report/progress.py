"""Progress bars: in a terminal and in a live notebook, not in a run that somebody else watches."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from tqdm.auto import tqdm


def progress_bar(items: Iterable[Any] | None = None, **options: Any) -> Any:
    """A tqdm bar; silent below `workbook run`, which shows one line of its own and whose pages need no dead widgets."""
    silent = bool(options.pop("disable", False) or os.environ.get("WORKBOOK_RUN_DIR"))
    return tqdm(items, leave=False, disable=silent, **options)
