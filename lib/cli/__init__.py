"""The `workbook` command: one module per subcommand in this folder, with `add_parser(subparsers)` and `run(args) -> int`."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import importlib
import os
import pkgutil
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

from lib.errors import WorkbookError
from lib.server.redact import find_secrets, redact_text


class Parser(argparse.ArgumentParser):
    """A parser that takes no shortened option (`--api-key` is not `--api-key-env`) and shows no secret in an error."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        super().__init__(*args, **options)
        self._given: list[str] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does it; the arguments are kept, so that an error can leave their secrets out."""
        self._given = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(self._given, namespace)

    def _print_message(self, message: str, file: Any = None) -> None:
        """As argparse does it, but help that cannot be written is an error: argparse drops it and exits with 0."""
        stream = sys.stderr if file is None else file
        if message and stream is not None:
            stream.write(message)

    def error(self, message: str) -> NoReturn:
        """One message without secrets, exit code 2."""
        super().error(redact_text(message, find_secrets(self._given)))


def build_parser(given: Sequence[str] = ()) -> Parser:
    """The argument parser, with one subcommand for each module in this folder (its name with '-' for '_').

    Args:
        given: the arguments, if known. Where they begin with a subcommand, no other one is imported: what the others
            import costs more than a second of CPU.
    """
    description = "Run and read LLM servers, with evidence for every number."
    parser = Parser(prog="workbook", description=description)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    names = sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))
    named = given[0].replace("-", "_") if given and "_" not in given[0] else ""
    for name in [named] if named in names else names:
        importlib.import_module(f"{__name__}.{name}").add_parser(subparsers)
    return parser


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> int:
    """Entry point: 0 done, 1 finding or failure, 2 bad input, 130 interrupted; no traceback for a user's mistake."""
    given = list(sys.argv[1:] if argv is None else argv)
    _take_any_character()
    try:
        try:
            code = _command(given)
        except SystemExit:  # --help, --version, a wrong option
            _flush()
            raise
        _flush()
        return code
    except BrokenPipeError:
        _drop_output()
        return 1
    except OSError as error:
        _drop_output()
        where = f" {error.filename}:" if error.filename else ""
        reason = redact_text(f"{where} {error.strerror or error}", find_secrets(given))
        print(f"workbook: cannot write the output or read an input:{reason}.", file=sys.stderr)
        return 1


def _command(given: list[str]) -> int:
    args = build_parser(given).parse_args(given)
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):  # end like Ctrl-C: nothing is left running
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, _interrupt)
    try:
        return int(args.run(args))
    except WorkbookError as error:
        print(f"workbook: {redact_text(str(error), find_secrets(given))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("workbook: interrupted.", file=sys.stderr)
        return 130


def _as_json_escape(error: UnicodeError) -> tuple[str, int]:
    """What the output's encoding lacks, as JSON writes it: `--json` stays JSON whatever the locale."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4)), error.end


codecs.register_error("workbook.jsonescape", _as_json_escape)


def _take_any_character() -> None:
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="workbook.jsonescape")


def _flush() -> None:
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


def _drop_output() -> None:
    """What is still buffered goes nowhere, so that the interpreter's last flush does not fail again."""
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
