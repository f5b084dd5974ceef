"""Where runs are kept: a folder, or an object store by its URL (s3://, gs://, abs://, adl://, hdfs://).

Schemes, packages and credentials are papermill's: `pip install 'papermill[s3]'` and what its clients read from the environment
(AWS_PROFILE, AWS_ENDPOINT_URL ...). s3:// goes through boto3, byte by byte. For the others papermill's own handlers carry text,
and some of them read it line by line: what people open there is kept as it is, all evidence as base64 in `NAME.b64`. Every object
is written whole, or not at all.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from lib.batch.object_stores import HandlerStore, S3Store
from lib.batch.stores import Store, StoreError
from lib.errors import BadInput
from lib.hosts import local
from lib.server.redact import redact_text

#: Scheme to papermill's extra and the module that it installs.
EXTRAS = {
    "s3": ("s3", "boto3"),
    "gs": ("gcs", "gcsfs"),
    "abs": ("azure", "azure.storage.blob"),
    "adl": ("azure", "azure.datalake.store"),
    "hdfs": ("hdfs", "pyarrow"),
}


#: A file that `write_atomic` has not renamed yet.
_TEMPORARY = re.compile(r"^\..+\.[a-z0-9_]{8}$")


def is_url(outputs: str) -> bool:
    """Whether outputs are named by a URL: a scheme of two letters or more and `://`."""
    return "://" in outputs


def store_of(outputs: str) -> Store:
    """The store that a folder or a URL names; nothing is asked of it yet.

    Raises:
        BadInput: unknown scheme, a password in the URL, or papermill's extra is not installed.
    """
    if not is_url(outputs):
        if re.match(r"[A-Za-z0-9]{2,}:", outputs):
            raise BadInput("--outputs takes a folder, or a URL such as s3://BUCKET/PREFIX", outputs, "write SCHEME://")
        return FolderStore(Path(outputs))
    parts = urlsplit(outputs)
    if parts.username or parts.password or parts.query:
        raise BadInput(
            f"--outputs {parts.scheme}://BUCKET/PREFIX",
            "a user, password or query in the URL",
            "leave credentials to the environment (AWS_PROFILE and the like)",
        )
    if parts.scheme not in EXTRAS or not parts.netloc:
        raise BadInput(
            "--outputs takes a folder, or a URL with a bucket: " + ", ".join(f"{s}://" for s in EXTRAS),
            redact_text(outputs),
            "for example s3://BUCKET/PREFIX",
        )
    extra, module = EXTRAS[parts.scheme]
    if not _installed(module):
        raise BadInput(
            f"papermill's extra {extra!r} for outputs in {parts.scheme}://",
            f"{module} is not installed",
            f"pip install 'papermill[{extra}]'",
        )
    return S3Store(outputs) if parts.scheme == "s3" else HandlerStore(outputs)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


class FolderStore:
    """A folder of this machine, or one that several machines share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = str(folder)

    def put(self, path: str, data: bytes) -> None:
        with self._clear(path):
            local.write_atomic(self.folder / path, data)

    def put_new(self, path: str, data: bytes) -> bool:
        target = self.folder / path
        with self._clear(path):
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                target.hardlink_to(temporary)  # the one operation that fails where a file is already
            except FileExistsError:
                return False
            finally:
                Path(temporary).unlink()
        return True

    def get(self, path: str) -> bytes | None:
        with self._clear(path):
            try:
                return (self.folder / path).read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def children(self, folder: str) -> list[str]:
        with self._clear(folder):
            try:
                return sorted(f.name for f in (self.folder / folder).iterdir() if not _TEMPORARY.match(f.name))
            except (FileNotFoundError, NotADirectoryError):
                return []

    def copy(self, source: str, target: str) -> None:
        """Raw files by a hard link where the file system has them: nobody rewrites those, so both names stay right."""
        with self._clear(target):
            place = self.folder / target
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            if "raw" in Path(target).parts:  # anything else a rebuild may write in its place
                with contextlib.suppress(OSError):
                    place.hardlink_to(self.folder / source)
                    return
            shutil.copy2(self.folder / source, place)

    def upload(self, file: Path, path: str) -> None:
        self.put(path, file.read_bytes())

    def remove(self, path: str) -> None:
        with self._clear(path):
            (self.folder / path).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _clear(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"{path} can be read and written below {self.folder}",
                error.strerror or str(error),
                "free space there, or name another folder",
            ) from error
