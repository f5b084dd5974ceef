"""Every notebook is an argument: question, parameters, expectation, claims, limits, verdict, record; and holds no code of its own."""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
import pytest

from lib.params import NOTEBOOKS, ROOT

FILES = sorted((ROOT / "notebooks").glob("0*.ipynb"))


def cells(file: Path, kind: str) -> list[nbformat.NotebookNode]:
    return [c for c in nbformat.read(file, 4).cells if c.cell_type == kind]


def test_the_six_notebooks_are_there() -> None:
    """One file for each number that the runner knows."""
    assert [f.stem for f in FILES] == list(NOTEBOOKS.values())


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_outputs_are_stripped(file: Path) -> None:
    """Notebooks in the repository carry no outputs and no execution counts."""
    assert all(not c.outputs and c.execution_count is None for c in cells(file, "code"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_headings_follow_the_argument(file: Path) -> None:
    """Question and decision first; then expectation, one heading a claim, what is not shown, verdict."""
    text = "\n".join(c.source for c in cells(file, "markdown"))
    assert text.startswith(f"# {file.stem[:2]} ")
    for words in ("**Question.**", "**The decision that hangs on it.**", "## What we expect", "## What this does not show", "## Verdict"):
        assert words in text, words
    order = [text.index(w) for w in ("## What we expect", "## What this does not show", "## Verdict")]
    assert order == sorted(order)
    assert any(line.startswith("## ") and line.endswith("?") for line in text.splitlines())


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_code_asks_and_shows_but_does_not_compute(file: Path) -> None:
    """No definition, loop, magic, sys.path, sglang or torch import; cells of at most 8 lines but for parameters."""
    for cell in cells(file, "code"):
        assert not any(line.startswith(("%", "!")) for line in cell.source.splitlines())
        tree = ast.parse(cell.source)
        banned = (ast.FunctionDef, ast.ClassDef, ast.For, ast.While, ast.ListComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)
        assert not [n for n in ast.walk(tree) if isinstance(n, banned)], cell.source
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom | ast.Import):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                assert all(n.split(".")[0] in ("lib", "IPython") for n in names), names
        if "parameters" not in cell.metadata.get("tags", []):
            assert len(cell.source.splitlines()) <= 8, cell.source


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_parameters_are_plain_literals(file: Path) -> None:
    """Papermill's reader misses annotations with `|` and lines with a second `=`: one literal a name."""
    (cell,) = [c for c in cells(file, "code") if "parameters" in c.metadata.get("tags", [])]
    for node in ast.parse(cell.source).body:
        assert isinstance(node, ast.Assign) and len(node.targets) == 1
        ast.literal_eval(node.value)


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_the_last_cell_writes_the_record(file: Path) -> None:
    """A notebook ends with `run.finish`: without a record it has failed."""
    assert "run.finish(" in cells(file, "code")[-1].source
