"""The documents that are generated from the code's own tables, and the check that they are current.

`python -m lib.report.docs` writes them, `--check` names those that are not current and exits with 1.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic.json_schema import models_json_schema

from lib.records import SCHEMA_VERSION, NotebookResult, RunResult

ROOT = Path(__file__).resolve().parents[2]


def result_schema() -> str:
    """Return the JSON schema of `NN.result.json` (NotebookResult) and `result.json` (RunResult)."""
    _, schema = models_json_schema([(NotebookResult, "serialization"), (RunResult, "serialization")])
    document: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Results of the workbook",
        "description": f"NN.result.json is a NotebookResult, result.json a RunResult; schema version {SCHEMA_VERSION}.",
        "anyOf": [{"$ref": "#/$defs/NotebookResult"}, {"$ref": "#/$defs/RunResult"}],
        **schema,
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _named(module: str, function: str) -> Callable[[], str]:
    """A document's function in another room, imported when it is called."""

    def made() -> str:
        text: str = getattr(importlib.import_module(module), function)()
        return text if text.endswith("\n") else text + "\n"

    made.__qualname__ = f"{module}.{function}"
    return made


#: Path below the repository -> (module that must be there, function that makes the text).
DOCUMENTS: dict[str, tuple[str, Callable[[], str]]] = {
    "docs/result.schema.json": ("lib.records", result_schema),
    "docs/metrics.md": ("lib.load.metrics", _named("lib.load.metrics", "metrics_markdown")),
    "docs/backends.md": ("lib.server.flags", _named("lib.server.flags", "backends_markdown")),
    "docs/sweep.md": ("lib.server.known_findings", _named("lib.server.known_findings", "sweep_markdown")),
    "docs/rules.md": ("lib.audit.rules", _named("lib.audit.rules", "rules_markdown")),
    "docs/failures.md": ("lib.server.failures", _named("lib.server.failures", "failures_markdown")),
}


def _is_there(module: str, function: Callable[[], str]) -> bool:
    """Tell whether a document's room is in this tree; one that is there but can't be imported is an error."""
    if importlib.util.find_spec(module) is None:
        return False
    name = function.__qualname__.rpartition(".")[2]
    return function is result_schema or hasattr(importlib.import_module(module), name)


def documents() -> dict[str, str]:
    """Return the current text of every document whose room is there, by its path."""
    return {path: make() for path, (module, make) in DOCUMENTS.items() if _is_there(module, make)}


def not_current(root: Path) -> list[str]:
    """Return the paths of documents that are missing or differ from what the code says."""
    stale = []
    for path, text in documents().items():
        file = root / path
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            stale.append(path)
    return stale


def write_documents(root: Path) -> list[str]:
    """Write what is not current and return its paths."""
    texts = documents()
    stale = not_current(root)
    for path in stale:
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.tmp")
        temporary.write_text(texts[path], encoding="utf-8")
        temporary.replace(file)
    return stale


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the generated documents; 1 if the check found one that is not current."""
    parser = argparse.ArgumentParser(prog="python -m lib.report.docs", description="Generated documents.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a document is not current")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository (default: this one)")
    args = parser.parse_args(argv)
    if args.check:
        stale = not_current(args.root)
        for path in stale:
            sys.stderr.write(f"{path} is not current; do: python -m lib.report.docs\n")
        return 1 if stale else 0
    for path in write_documents(args.root):
        sys.stdout.write(f"wrote {path}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
