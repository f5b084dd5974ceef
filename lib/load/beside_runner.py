"""Runs sglang.bench_serving as published, several levels in one process: its imports take up to half a minute.

    PYTHON-OF-THE-SERVER lib/load/beside_runner.py

Each line on stdin is JSON: `argv` (bench_serving's own arguments) and `log` (where its output goes, as it comes). Each is run as
`python -m sglang.bench_serving ARGV` would be. Answers, one JSON line each: first `ready` (seconds of the imports, or `problem`), then
`exit_code`, `seconds`, `cpu_s` for each job. Standard library only, besides what it runs.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import runpy
import sys
import time
import traceback
import types
from typing import IO, Any

MODULE = "sglang.bench_serving"
#: Packages that bench_serving imports for data sets other than the one that is used here (0.5.15: mmmu). A server's
#: environment may lack them; the answer `ready` names those that were stood in for.
OTHER_DATA = ("datasets",)


def answer(to: IO[str], **said: Any) -> None:
    """One line for the process that asks."""
    to.write(json.dumps(said) + "\n")
    to.flush()


class Absent(types.ModuleType):
    """A package that is not installed, for code that imports it and does not use it: every use is an error that says so."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        class Missing:
            def __init__(self, *_: Any, **__: Any) -> None:
                raise ModuleNotFoundError(f"{self.__module__}: package is not installed here")

        Missing.__module__ = f"{self.__name__}.{name}"
        return Missing


def stand_in_for(names: tuple[str, ...]) -> list[str]:
    """Puts a stand-in where one of these packages is not installed; their names."""
    gone = [name for name in names if name not in sys.modules and importlib.util.find_spec(name) is None]
    for name in gone:
        sys.modules[name] = Absent(name)
    return gone


def prepare() -> dict[str, Any]:
    """Imports what every level needs; its version and file, or why it cannot be run."""
    began = time.monotonic()
    gone = stand_in_for(OTHER_DATA)
    try:
        module = importlib.import_module(MODULE)
        version = importlib.metadata.version("sglang")
        sys.modules.pop(MODULE, None)  # it is run as a program, each time anew
    except BaseException as error:  # noqa: BLE001 -- whatever it is, it is told, and nothing can be run
        return {"ready": False, "problem": f"{MODULE}: {type(error).__name__}: {str(error)[:300]}"}
    seconds = round(time.monotonic() - began, 3)
    return {"ready": True, "seconds": seconds, "version": version, "file": module.__file__, "not_installed": gone}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One level: bench_serving with these arguments, its output in the log."""
    sys.argv = [MODULE, *job["argv"]]
    code: Any = 0
    wall, cpu = time.monotonic(), time.process_time()
    with (
        open(job["log"], "a", encoding="utf-8") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        try:
            runpy.run_module(MODULE, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            code = end.code
            if isinstance(code, str):
                log.write(f"{code}\n")  # as Python itself ends with a message
        except BaseException:  # noqa: BLE001 -- its own words go into its log, and the next level goes on
            traceback.print_exc(file=log)
            code = 1
    code = 0 if code is None else code if isinstance(code, int) else 1
    return {
        "exit_code": code,
        "seconds": round(time.monotonic() - wall, 3),
        "cpu_s": round(time.process_time() - cpu, 3),
    }


def main() -> int:
    """Jobs from stdin until it ends; what libraries print goes to stderr, so that answers stay alone."""
    to = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    state = prepare()
    answer(to, **state)
    if not state["ready"]:
        return 1
    for line in sys.stdin:
        answer(to, **run(json.loads(line)))
    return 0


if __name__ == "__main__":
    if not __package__:
        sys.path.pop(0)  # this folder's modules are not on its path: it is another environment
    sys.exit(main())
