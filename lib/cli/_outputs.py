"""`--outputs PLACE` of commands that read runs: another folder, or an object store through its local copy."""

from __future__ import annotations

import os
import sys

from lib.outputs import outputs_root


def say_if_over_budget() -> None:
    """One line on standard error where the outputs folder is larger than WORKBOOK_MAX_GIB."""
    if not os.environ.get("WORKBOOK_MAX_GIB"):
        return
    from lib.report.prune import over_budget

    if said := over_budget(outputs_root()):
        print(f"workbook: {said}", file=sys.stderr)


def use_outputs(place: str | None) -> None:
    """Makes a place the outputs folder of this process; the local copy of an object store is brought up to date first.

    Raises:
        BadInput: no such scheme, or papermill's extra is not installed.
        StoreError: the store can't be read.
    """
    if not place:
        return
    from lib.batch.outputs import local_copy, refresh
    from lib.batch.storage import FolderStore, store_of

    store = store_of(place)
    here = local_copy(store)
    if not isinstance(store, FolderStore):
        refresh(store, here)
    os.environ["WORKBOOK_OUTPUTS"] = str(here)
