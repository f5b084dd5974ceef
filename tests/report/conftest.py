"""Fixtures of the page tests: a made-up run with its pages built once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lib.report.site import build_site
from tests.report.made_run import make_run


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a made-up run without pages; read only."""
    return make_run(tmp_path_factory.mktemp("made") / "run")


@pytest.fixture(scope="session")
def site(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a made-up run whose pages are built; read only."""
    folder = shutil.copytree(made, tmp_path_factory.mktemp("outputs") / "embedded" / "run")
    build_site(folder)
    return folder


@pytest.fixture
def run_dir(made: Path, tmp_path: Path) -> Path:
    """The folder of a made-up run of one's own, without pages."""
    return shutil.copytree(made, tmp_path / "embedded" / "run")
