"""Which files of this project a notebook's result depends on: its own cells, and the modules of lib that it reaches."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import re
from pathlib import Path

from lib.params import NOTEBOOKS, ROOT

#: Always counted: what opens and closes every notebook's run.
ALWAYS = ("lib.results", "lib.params", "lib.records")
#: Files beside the modules that they are read by.
DATA = (".json", ".yaml", ".c")


def notebook_sha256(number: str, root: Path = ROOT) -> str:
    """Hash of a notebook's code cells and their tags; prose may change without a new measurement."""
    cells = _code_cells(root / "notebooks" / f"{NOTEBOOKS[number]}.ipynb")
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()


def lib_sha256(number: str, root: Path = ROOT) -> str:
    """Hash of every module of lib that a notebook imports, directly or not, and of the data files beside them."""
    digest = hashlib.sha256()
    for file in reached(number, root):
        digest.update(f"{file.relative_to(root)}\0".encode())
        digest.update(_file_sha256(file))
    return digest.hexdigest()


def reached(number: str, root: Path = ROOT) -> list[Path]:
    """The files behind `lib_sha256`, sorted. Imports inside functions count; what is built by name at run time does not."""
    source = "\n".join(text for text, _ in _code_cells(root / "notebooks" / f"{NOTEBOOKS[number]}.ipynb"))
    todo = [*ALWAYS, *_imports(source)]
    seen: set[Path] = set()
    while todo:
        name = todo.pop()
        for file in _files_of(name, root):
            if file not in seen:
                seen.add(file)
                todo += _imports_of(file, file.stat().st_mtime_ns)
                seen |= _programs_of(file, file.stat().st_mtime_ns) - seen
    folders = {file.parent for file in seen}
    beside = {f for folder in folders for f in folder.iterdir() if f.suffix in DATA and folder != root / "lib"}
    return sorted(seen | beside)


def _code_cells(notebook: Path) -> list[tuple[str, list[str]]]:
    content = json.loads(notebook.read_text(encoding="utf-8"))
    return [
        ("".join(cell["source"]), sorted(cell.get("metadata", {}).get("tags", [])))
        for cell in content["cells"]
        if cell["cell_type"] == "code"
    ]


def _files_of(name: str, root: Path) -> list[Path]:
    """The files that an import of `lib.a.b` (or of a name in `lib.a`) runs."""
    parts, found = name.split("."), []
    for end in range(1, len(parts) + 1):
        place = root.joinpath(*parts[:end])
        found += [f for f in (place / "__init__.py", place.with_suffix(".py")) if f.is_file()]
    return found


@functools.lru_cache(maxsize=1024)
def _imports_of(file: Path, _modified: int) -> tuple[str, ...]:
    return _imports(file.read_text(encoding="utf-8"))


@functools.lru_cache(maxsize=1024)
def _programs_of(file: Path, _modified: int) -> frozenset[Path]:
    """Files beside a module that it names as a text: programs that it starts or sends to another interpreter."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    named = {file.with_name(text) for text in texts if re.fullmatch(r"\w+\.py", text)}
    return frozenset(place for place in named if place.is_file())


def _imports(source: str) -> tuple[str, ...]:
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"lib(\.\w+)+", node.value)
        ):
            found.append(node.value)  # python -m lib.server.supervise
    return tuple(name for name in found if name == "lib" or name.startswith("lib."))


def _file_sha256(file: Path) -> bytes:
    return hashlib.sha256(file.read_bytes()).digest()
