"""The `workbook` command: one module per subcommand in this folder, with `add_parser(subparsers)` and `run(args) -> int`."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

from lib.errors import WorkbookError


def build_parser() -> argparse.ArgumentParser:
    """The argument parser, with one subcommand for each module in this folder (its name with '-' for '_')."""
    description = "Run and read LLM servers, with evidence for every number."
    parser = argparse.ArgumentParser(prog="workbook", description=description)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for info in sorted(pkgutil.iter_modules(__path__), key=lambda m: m.name):
        if not info.name.startswith("_"):
            importlib.import_module(f"{__name__}.{info.name}").add_parser(subparsers)
    return parser


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> int:
    """Entry point: 0 done, 1 finding or failure, 2 bad input, 130 interrupted; no traceback for a user's mistake."""
    args = build_parser().parse_args(argv)
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):  # end like Ctrl-C: nothing is left running
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, _interrupt)
    try:
        return int(args.run(args))
    except WorkbookError as error:
        print(f"workbook: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        print("workbook: interrupted.", file=sys.stderr)
        return 130
