"""Stores that are no folder: S3 by boto3, every other scheme by papermill's own handlers (see lib.batch.storage)."""

from __future__ import annotations

import base64
import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lib.batch.stores import StoreError
from lib.server.redact import redact_text

#: What a store of text keeps as text; a line's end may change in it, which changes no notebook, record or page.
READ_BY_PEOPLE = (".ipynb", ".json", ".html")


@functools.lru_cache(maxsize=4)
def _s3_client(_environment: tuple[tuple[str, str], ...]) -> Any:
    """One client for one state of the environment: making it takes half a second."""
    import boto3

    # papermill's own variable for the endpoint; boto3 itself reads AWS_ENDPOINT_URL
    return boto3.session.Session().client("s3", endpoint_url=os.environ.get("BOTO3_ENDPOINT_URL"))


class S3Store:
    """Objects below s3://BUCKET/PREFIX, by boto3's default chain of credentials and endpoints."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.url = url.rstrip("/")
        self.bucket = parts.netloc
        self.prefix = f"{parts.path.strip('/')}/" if parts.path.strip("/") else ""

    @property
    def client(self) -> Any:
        """boto3's client for what the environment says now."""
        with self._clear(""):
            return _s3_client(tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith(("AWS_", "BOTO3_")))))

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
        from botocore.exceptions import ClientError

        with self._clear(source):
            origin = {"Bucket": self.bucket, "Key": self.prefix + source}
            try:
                self.client.copy_object(CopySource=origin, Bucket=self.bucket, Key=self.prefix + target)
            except ClientError as error:
                if error.response.get("Error", {}).get("Code") not in ("InvalidRequest", "EntityTooLarge"):
                    raise
                self.client.copy(origin, self.bucket, self.prefix + target)  # in parts: above 5 GB one request can't

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
    """Any other store that papermill has a handler for: notebooks, records and pages as text, the rest as base64."""

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
        text = None
        if path.endswith(READ_BY_PEOPLE):
            with contextlib.suppress(UnicodeDecodeError):
                text = data.decode("utf-8")
        with self._clear(path):
            if text is not None:
                self.handler.write(text, f"{self.url}/{path}")
            else:
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
        found = next((n for n in (f"{name}.b64", name) if n in there), None)
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
        except Exception as error:  # noqa: BLE001  (four clients with an exception tree each)
            raise StoreError(
                f"{self.url}/{path} can be read and written",
                redact_text(f"{type(error).__name__}: {' '.join(str(error).split())}"),
                "look at its name and at the credentials in the environment",
            ) from error
