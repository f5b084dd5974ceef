"""Fixtures of all tests: where the real server's environment and models are, and one shared real server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lib.errors import WorkbookError
from lib.hosts import local
from lib.params import load_profile
from lib.server import launch as launching
from lib.server.spec import server_spec

# A shell starts what it runs in the background with SIGINT ignored, and children inherit that: Ctrl-C could not be tested.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]
TINY = "tests/params/tiny"
WORKBOOK = [sys.executable, "-m", "lib.cli"]


def missing_server() -> str | None:
    """Why no real server can be started here, or None."""
    try:
        server_spec("probe", load_profile(TINY).server)
    except WorkbookError as error:
        return str(error)
    return None


#: A limit on a test is against one that hangs: in `make test` three rows share the machine's cores, and all take longer.
SHARED_MACHINE = 2.5


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give tests with a real server, host or browser more time than their module says."""
    for item in items:
        if any(item.get_closest_marker(name) for name in ("server", "lab", "browser")):
            mark = item.get_closest_marker("timeout")
            alone = float(mark.args[0]) if mark and mark.args else float(config.getini("timeout") or 0)
            item.add_marker(pytest.mark.timeout(alone * SHARED_MACHINE), append=False)


@pytest.fixture(scope="session")
def tiny_spec() -> launching.ServerSpec:
    """A real SGLang with the tiny model, ready to be launched; the test is skipped with the reason where it can't be."""
    if os.environ.get("CI") is None and (reason := missing_server()):
        pytest.skip(reason)
    return server_spec("shared", load_profile(TINY).server)


@pytest.fixture(scope="module")
def tiny_server(
    tiny_spec: launching.ServerSpec, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[launching.Server]:
    """One real server that several tests of a module ask; none may change or stop it, and it ends with the module."""
    me = local.process_id(os.getpid())
    assert me
    with launching.launch(tiny_spec, tmp_path_factory.mktemp("shared-server"), [me]) as server:
        yield server


@pytest.fixture
def workbook(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the `workbook` command with its outputs in a folder of the test's."""

    def run(*arguments: str, timeout: float = 600, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*WORKBOOK, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout,
            env={**os.environ, "WORKBOOK_OUTPUTS": str(tmp_path / "outputs"), **environment},
        )  # fmt: skip

    return run


@pytest.fixture
def profile(tmp_path: Path) -> Callable[..., Path]:
    """A copy of the tiny profile with changed keys: `profile(server={...}, files={"03": {...}})`."""
    import yaml

    def make(
        server: dict[str, Any] | None = None, files: dict[str, dict[str, Any]] | None = None, name: str = "profile"
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for file in (ROOT / TINY).glob("*.yaml"):
            data = yaml.safe_load(file.read_text())
            if file.stem == "profile":
                data["server"].update(server or {})
            else:
                data["profile"] = str(folder)
                data.update((files or {}).get(file.stem, {}))
            (folder / file.name).write_text(yaml.safe_dump(data))
        return folder

    return make


def works(trial: Any) -> bool:
    """Whether a sweep's trial works: on a machine that others load the client may be late, and then only its speed is withheld."""
    outcome, reason = (trial["outcome"], trial["reason"]) if isinstance(trial, dict) else (trial.outcome, trial.reason)
    late = r"it computes what the reference computes, but its speed is the client's: client .*?([\d.]+)(?: ms)?, limit ([\d.]+)"
    said = re.match(late, str(reason))
    return outcome == "works" or (outcome == "client_bound" and said is not None and float(said[1]) > float(said[2]))


def only_run(outputs: Path) -> Path:
    """The one run folder below an outputs folder."""
    runs = [p.parent for p in outputs.glob("*/*/result.json")]
    assert len(runs) == 1, runs
    return runs[0]


def states(run: Path) -> dict[str, str]:
    """State of each notebook in a run's index."""
    return {n["notebook"]: n["state"] for n in json.loads((run / "result.json").read_text())["notebooks"]}


def server_pids(run: Path) -> list[int]:
    """Pids of all servers that a run ever launched."""
    found = [json.loads(f.read_text()).get("pid") for f in run.glob("raw/*/servers/*/status.json")]
    return [pid for pid in found if pid]


def said(done: subprocess.CompletedProcess[str]) -> str:
    """What a command printed, without what ipykernel itself writes when its socket is closed a moment too early."""
    noise = (
        r"(?:\[IPKernelApp\]|ERROR:tornado\.general:)[^\n]*\n(?:(?!\[IPKernelApp\]|ERROR:tornado).*\n)*?"
        r"zmq\.error\.ZMQError: Socket operation on non-socket\n"
    )
    return re.sub(noise, "", done.stderr + done.stdout)
