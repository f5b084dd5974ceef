"""Fixtures of the page tests: a made-up run with its pages built once."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_run import make_run

from lib.report.site import build_site


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a made-up run whose pages are built; read only."""
    folder = make_run(tmp_path_factory.mktemp("outputs") / "embedded" / "run")
    build_site(folder)
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The folder of a made-up run of one's own, without pages."""
    return make_run(tmp_path / "embedded" / "run")
