"""Arrows of the house: rooms that only compute import nothing that touches the world."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from lib.params import ROOT

#: Rooms that take text, numbers and records, and give records back.
PURE = [
    "server/garbage", "server/observations", "model/published", "audit/launch", "server/flags", "server/log", "server/log_records",
    "server/lines", "server/failures", "server/progress", "server/redact", "server/gpu_state", "server/acceptance", "server/speedup",
    "server/same_answers", "server/spec_trace", "server/nextn_forms", "server/grid", "server/outcomes", "server/known_findings",
    "load/metrics", "load/stats", "load/benchfiles", "model/architectures", "model/compressed", "model/facts", "model/memory",
    "model/quantization", "load/definitions",
    "model/roofline", "audit/facts", "audit/scales", "audit/checks", "audit/rules", "audit/compare", "deploy/unit", "deploy/unit_parse",
    "deploy/fatbin", "deploy/releases", "deploy/unit_render", "deploy/unit_lint", "report/tables", "report/state", "report/text",
    "report/provenance", "records", "errors", "deploy/drift", "deploy/deployed", "model/capacity", "widgets/typed",
    "widgets/pictures", "batch/matrix", "batch/tasks", "batch/resume", "batch/snapshot", "migrations",
]  # fmt: skip
#: What reaches processes, sockets, HTTP, clocks or files.
WORLD = {
    "subprocess", "socket", "http", "urllib.request", "requests", "asyncio", "time", "os", "pathlib", "shutil", "tempfile",
    "multiprocessing", "threading", "psutil", "signal", "select", "ctypes", "uvloop", "torch", "sglang",
}  # fmt: skip


def offences(source: str) -> list[str]:
    """World modules that a source imports (outside `if TYPE_CHECKING`), and calls of open()."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open":
            found.append("open()")
        found += [n for n in names if n in WORLD or n.split(".")[0] in WORLD]
    return found


@pytest.mark.parametrize("room", PURE)
def test_a_pure_room_touches_nothing(room: str) -> None:
    """Text, numbers and records in, records out."""
    assert offences((ROOT / "lib" / f"{room}.py").read_text()) == []


@pytest.mark.parametrize(
    "planted", ["import subprocess", "from time import time", "import requests.sessions", "x = open('f')"]
)
def test_a_planted_offender_is_found(planted: str) -> None:
    """The test above can fail."""
    assert offences(planted)


def test_nothing_imports_sglang_and_torch_is_lazy() -> None:
    """The notebooks talk to a server, they don't import it; torch is imported only where it computes."""
    for file in (ROOT / "lib").rglob("*.py"):
        if file.name == "make_models.py":  # runs in the server's environment
            continue
        for node in ast.parse(file.read_text()).body:
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            assert not [n for n in names if n.split(".")[0] in ("sglang", "torch")], file


def test_no_module_is_named_after_a_package() -> None:
    """lib.http or lib.json would read like the standard library."""
    import sys

    names = {p.stem for p in (ROOT / "lib").rglob("*.py") if not p.stem.startswith("_")}
    clash = names & (
        set(sys.stdlib_module_names) | {"requests", "yaml", "pandas", "numpy", "torch", "sglang", "papermill"}
    )
    assert clash <= {"html", "inspect", "site", "lib"}, clash  # named by the layout, always imported through their room


def test_paths_of_machines_stay_out() -> None:
    """No absolute path of a builder's machine in what is shipped."""
    here = str(ROOT)
    for file in [
        *(ROOT / "lib").rglob("*.py"),
        *(ROOT / "notebooks").glob("*.ipynb"),
        *Path(ROOT / "params").rglob("*.yaml"),
    ]:
        assert here not in file.read_text(), file
