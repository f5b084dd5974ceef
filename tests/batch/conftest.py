"""Fixtures of the batch room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.batch import s3_server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of one S3 server for all tests of a session."""
    with s3_server.s3_server(tmp_path_factory.mktemp("moto") / "log") as url:
        yield url


@pytest.fixture
def s3_url(s3: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """`s3://bucket/runs`, empty; the environment says how to reach it, and this machine's own settings are not read."""
    for name, value in s3_server.environment(s3).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    return s3_server.new_bucket(s3)
