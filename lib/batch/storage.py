"""Where runs are kept: a folder, or an object store by its URL (s3://, gs://, abs://, adl://, hdfs://).

Schemes, packages and credentials are papermill's: `pip install 'papermill[s3]'` and what its clients read from the environment
(AWS_PROFILE, AWS_ENDPOINT_URL ...). s3:// goes through boto3 byte by byte; for the others papermill's own handlers carry text,
so a file that is no UTF-8 is kept as base64 under `NAME.b64`. Every object is written whole, or not at all.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from lib.errors import BadInput, WorkbookError
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


def is_url(outputs: str) -> bool:
    """Whether outputs are named by a URL: a scheme of two letters or more and `://`."""
    return "://" in outputs


def store_of(outputs: str) -> Store:
    """The store that a folder or a URL names; nothing is asked of it yet.

    Raises:
        BadInput: unknown scheme, a password in the URL, or papermill's extra is not installed.
    """
    if not is_url(outputs):
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
        """A hard link where the file system has them: raw files are never rewritten, so both names stay right."""
        with self._clear(target):
            place = self.folder / target
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            try:
                place.hardlink_to(self.folder / source)
            except OSError:
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


class S3Store:
    """Objects below s3://BUCKET/PREFIX, by boto3's default chain of credentials and endpoints."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.url = url.rstrip("/")
        self.bucket = parts.netloc
        self.prefix = f"{parts.path.strip('/')}/" if parts.path.strip("/") else ""
        self._client: Any = None

    @property
    def client(self) -> Any:
        """boto3's client, made at the first use."""
        if self._client is None:
            import boto3

            with self._clear(""):
                # papermill's own variable for the endpoint; boto3 itself reads AWS_ENDPOINT_URL
                endpoint = os.environ.get("BOTO3_ENDPOINT_URL")
                self._client = boto3.session.Session().client("s3", endpoint_url=endpoint)
        return self._client

    def put(self, path: str, data: bytes) -> None:
        with self._clear(path):
            self.client.put_object(Bucket=self.bucket, Key=self.prefix + path, Body=data)

    def put_new(self, path: str, data: bytes) -> bool:
        from botocore.exceptions import ClientError

        with self._clear(path):
            try:
                self.client.put_object(Bucket=self.bucket, Key=self.prefix + path, Body=data, IfNoneMatch="*")
            except ClientError as error:
                if error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") in (409, 412):
                    return False
                raise
        return True

    def get(self, path: str) -> bytes | None:
        from botocore.exceptions import ClientError

        with self._clear(path):
            try:
                return bytes(self.client.get_object(Bucket=self.bucket, Key=self.prefix + path)["Body"].read())
            except ClientError as error:
                if error.response.get("Error", {}).get("Code") == "NoSuchKey":
                    return None
                raise

    def children(self, folder: str) -> list[str]:
        start = self.prefix + (f"{folder.strip('/')}/" if folder.strip("/") else "")
        found: list[str] = []
        with self._clear(folder):
            pages = self.client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self.bucket, Prefix=start, Delimiter="/"):
                found += [item["Key"][len(start) :] for item in page.get("Contents", [])]
                found += [item["Prefix"][len(start) :].rstrip("/") for item in page.get("CommonPrefixes", [])]
        return sorted(found)

    def copy(self, source: str, target: str) -> None:
        with self._clear(source):
            origin = {"Bucket": self.bucket, "Key": self.prefix + source}
            self.client.copy(origin, self.bucket, self.prefix + target)  # in parts above 5 GB

    def upload(self, file: Path, path: str) -> None:
        with self._clear(path):
            self.client.upload_file(str(file), self.bucket, self.prefix + path)  # in parts where it is large, retried

    def remove(self, path: str) -> None:
        with self._clear(path):
            self.client.delete_object(Bucket=self.bucket, Key=self.prefix + path)

    @contextlib.contextmanager
    def _clear(self, path: str) -> Iterator[None]:
        """Everything that boto3 raises as one message; it never shows a key of an account."""
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except (Boto3Error, BotoCoreError, ClientError) as error:
            raise StoreError(
                f"s3://{self.bucket}/{self.prefix}{path} can be read and written",
                redact_text(" ".join(str(error).split())),
                "look at the bucket's name, AWS_PROFILE (or AWS_ACCESS_KEY_ID and its secret), AWS_ENDPOINT_URL and AWS_REGION",
            ) from error


class HandlerStore:
    """Any other store that papermill has a handler for: text as it is, other bytes as base64 beside their name."""

    def __init__(self, url: str, handler: Any = None) -> None:
        self.url = url.rstrip("/")
        self._handler = handler

    @property
    def handler(self) -> Any:
        """papermill's handler of the scheme."""
        if self._handler is None:
            from papermill.iorw import papermill_io

            self._handler = papermill_io.get_handler(self.url)
        return self._handler

    def put(self, path: str, data: bytes) -> None:
        with self._clear(path):
            try:
                self.handler.write(data.decode("utf-8"), f"{self.url}/{path}")
            except UnicodeDecodeError:
                self.handler.write(base64.b64encode(data).decode(), f"{self.url}/{path}.b64")

    def put_new(self, path: str, data: bytes) -> bool:
        """As said, but these handlers can't refuse an object that came meanwhile: one writer at a time."""
        folder, _, name = path.rpartition("/")
        if name in self.children(folder):
            return False
        self.put(path, data)
        return True

    def get(self, path: str) -> bytes | None:
        folder, _, name = path.rpartition("/")
        there = self._listed(folder)
        found = next((n for n in (name, f"{name}.b64") if n in there), None)
        if found is None:
            return None
        with self._clear(path):
            text = self.handler.read(f"{self.url}/{folder}/{found}" if folder else f"{self.url}/{found}")
        data = text if isinstance(text, bytes) else text.encode("utf-8")
        return base64.b64decode(data) if found.endswith(".b64") else data

    def children(self, folder: str) -> list[str]:
        return sorted({name.removesuffix(".b64") for name in self._listed(folder)})

    def _listed(self, folder: str) -> list[str]:
        where = f"{self.url}/{folder.strip('/')}".rstrip("/")
        try:
            entries = self.handler.listdir(where)
        except FileNotFoundError:
            return []
        # whole paths, URLs or bare names, by client
        return [str(entry).rstrip("/").rpartition("/")[2] for entry in entries]

    def copy(self, source: str, target: str) -> None:
        data = self.get(source)
        if data is None:
            raise StoreError(f"{self.url}/{source}", "no such object", "run the task again")
        self.put(target, data)

    def upload(self, file: Path, path: str) -> None:
        self.put(path, file.read_bytes())

    def remove(self, path: str) -> None:
        """Nothing: papermill's handlers don't remove."""

    @contextlib.contextmanager
    def _clear(self, path: str) -> Iterator[None]:
        try:
            yield
        except UnicodeDecodeError:
            raise
        except Exception as error:  # noqa: BLE001  (four clients with an exception tree each)
            raise StoreError(
                f"{self.url}/{path} can be read and written",
                redact_text(f"{type(error).__name__}: {' '.join(str(error).split())}"),
                "look at its name and at the credentials in the environment",
            ) from error
