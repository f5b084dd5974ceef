"""Names every module that a package's code may import and this Python cannot: all at once, each with who asks for it.

    python3 lib/deploy/missing_imports.py PACKAGE [PACKAGE ...]

First the named modules are imported. Then every import statement, also those inside functions, of each file that this
loaded below the packages' top levels is looked up without being run. Prints JSON: `failed` (import errors) and `absent`
(top-level modules that are not installed, with up to three places). Standard library only.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import sys
import traceback
from pathlib import Path
from typing import Any


def wanted(path: Path) -> list[tuple[int, str]]:
    """(line, module) of every absolute import in a file that is not under a try, by ast."""
    tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
    guarded: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
            guarded.update(id(inner) for inner in ast.walk(node))
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.append((node.lineno, node.module))
    return found


def there(name: str, known: dict[str, bool]) -> bool:
    """Whether a module can be found, without importing it beyond its parents."""
    if name not in known:
        try:
            known[name] = name in sys.modules or importlib.util.find_spec(name) is not None
        except Exception:  # noqa: BLE001 -- also a parent package that fails in its own way: it cannot be imported
            known[name] = False
    return known[name]


def survey(names: list[str]) -> dict[str, Any]:
    """What fails and what is absent."""
    failed = {}
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 -- whatever it is, the others are still tried
            last = traceback.format_exc().strip().splitlines()[-2:-1]
            failed[name] = f"{type(error).__name__}: {str(error)[:300]} | {last}"
    tops = {name.split(".")[0] for name in names}
    known: dict[str, bool] = {}
    absent: dict[str, list[str]] = {}
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if name.split(".")[0] not in tops or not path or not path.endswith(".py"):
            continue
        try:
            imports = wanted(Path(path))
        except (OSError, SyntaxError):
            continue
        for line, target in imports:
            own = target.split(".")[0] in tops
            look = target if own else target.split(".")[0]
            if not there(look, known):
                absent.setdefault(look, []).append(f"{name}:{line}")
    return {"failed": failed, "absent": {name: places[:3] for name, places in sorted(absent.items())}}


if __name__ == "__main__":
    json.dump(survey(sys.argv[1:]), sys.stdout, indent=1)
    sys.stdout.write("\n")
