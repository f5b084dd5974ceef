"""Stores: a folder, a real S3 server, and papermill's handlers; every mistake is one message without a secret."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from papermill.iorw import LocalHandler

from lib.batch import storage
from lib.batch.object_stores import HandlerStore, S3Store
from lib.batch.storage import FolderStore, StoreError, store_of
from lib.errors import BadInput
from tests.batch.s3_server import SECRET


class FolderHandler(LocalHandler):
    """papermill's handler of files, as one of an object store behaves: no folders to make."""

    def write(self, buf: str, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        super().write(buf, path)


@pytest.fixture(params=["folder", "s3", "handler"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """One of each kind, empty."""
    if request.param == "s3":
        return store_of(request.getfixturevalue("s3_url"))
    if request.param == "handler":
        return HandlerStore(str(tmp_path / "handled"), FolderHandler())
    return store_of(str(tmp_path / "folder"))


def test_what_is_put_is_got(store: Any, tmp_path: Path) -> None:
    """Text and any bytes, over an earlier file, only if new, copied, from a file, removed; listings name what lies directly below."""
    files = {
        "a.b/r/03.ipynb": b"{}\r\n",
        "a.b/r/raw/03/x.bin": bytes(range(256)),
        "a.b/r/empty.txt": b"",
        "top.json": "é".encode(),
    }
    for path, data in files.items():
        store.put(path, b"before")
        store.put(path, data)
    if isinstance(store, HandlerStore):  # text that papermill reads line by line
        files["a.b/r/03.ipynb"] = b"{}\n"
    assert {path: store.get(path) for path in files} == files
    assert store.get("a.b/none.json") is None and store.get("none/at/all") is None
    assert store.children("") == ["a.b", "top.json"] and store.children("a.b/r") == ["03.ipynb", "empty.txt", "raw"]
    assert store.children("nothing") == []
    assert store.put_new("once.json", b"1") is True and store.put_new("once.json", b"2") is False
    assert store.get("once.json") == b"1"
    store.copy("a.b/r/raw/03/x.bin", "c/x.bin")
    assert store.get("c/x.bin") == bytes(range(256))
    (tmp_path / "up").write_bytes(b"\xff\x00")
    store.upload(tmp_path / "up", "c/up.bin")
    assert store.get("c/up.bin") == b"\xff\x00"
    if not isinstance(store, HandlerStore):
        store.remove("c/up.bin")
        store.remove("c/up.bin")
        assert store.children("c") == ["x.bin"]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://host/x", ["s3://", "gs://"]),
        ("s3:///x", ["s3://BUCKET"]),
        ("s3:/bucket/x", ["s3://BUCKET"]),
        ("s3://user:s3cr3t@bucket/x", ["credentials"]),
        ("s3://bucket/x?key=s3cr3t", ["credentials"]),
    ],
)
def test_urls_that_name_no_store(url: str, words: list[str]) -> None:
    """Refused before anything is asked; a password is not repeated."""
    with pytest.raises(BadInput) as error:
        store_of(url)
    assert all(word in str(error.value) for word in words) and "s3cr3t" not in str(error.value)


@pytest.mark.parametrize(
    ("scheme", "extra"), [("s3", "s3"), ("gs", "gcs"), ("abs", "azure"), ("adl", "azure"), ("hdfs", "hdfs")]
)
def test_a_missing_extra_says_what_to_install(scheme: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One message with papermill's own extra."""
    monkeypatch.setattr(storage, "_installed", lambda module: False)
    with pytest.raises(BadInput, match=rf"pip install 'papermill\[{extra}\]'"):
        store_of(f"{scheme}://bucket/x")


def test_what_s3_refuses_is_one_message_without_keys(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No such bucket, nobody listening, no credentials."""
    with pytest.raises(StoreError, match="NoSuchBucket"):
        S3Store("s3://not-there/x").put("a", b"")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(StoreError, match="AWS_ENDPOINT_URL") as error:
            S3Store(s3_url).get("a")
    assert SECRET not in str(error.value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(StoreError, match="credentials"):
        S3Store(s3_url).get("a")


def test_a_folder_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    """A file in the way."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="Not a directory|File exists"):
        FolderStore(tmp_path / "file").put("a/b", b"")
