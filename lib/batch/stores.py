"""What every store of runs can do, and the error that all of them raise."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from lib.errors import WorkbookError


class StoreError(WorkbookError):
    """A store can't be reached, read or written."""


class Store(Protocol):
    """A tree of files, each named by its path below the store; all of them raise StoreError."""

    url: str

    def put(self, path: str, data: bytes) -> None:
        """Writes a file whole, over an earlier one."""
        ...

    def put_new(self, path: str, data: bytes) -> bool:
        """Writes a file whole if there is none; False, and nothing is changed, if there is one."""
        ...

    def get(self, path: str) -> bytes | None:
        """A file's bytes, None if there is none."""
        ...

    def children(self, folder: str) -> list[str]:
        """Names of what lies directly in a folder of the store, sorted; none if there is no such folder."""
        ...

    def copy(self, source: str, target: str) -> None:
        """Copies a file within the store."""
        ...

    def upload(self, file: Path, path: str) -> None:
        """Writes a file of this machine."""
        ...

    def remove(self, path: str) -> None:
        """Removes a file, if it is there."""
        ...
