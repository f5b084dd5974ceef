"""Run by a Python that has SGLang: what the real argument parser knows, holds, or refuses. No server is started.

Without input on stdin: one JSON list of all options. With `{"parse": [argument list, ...]}`: for each the parsed
values, or the parser's own error text. With `{"check": [...]}`: for each the error of SGLang's argument checks
(`ServerArgs` and `check_server_args`), or null.
"""

import argparse
import contextlib
import io
import json
import sys

import sglang.version
from sglang.srt.server_args import ServerArgs


def plain(value):
    """A value as JSON has it."""
    return json.loads(json.dumps(value, default=lambda v: sorted(v) if isinstance(v, set) else vars(v)))


def name_of(callable_or_none):
    """Name of a type= callable."""
    if callable_or_none is None:
        return None
    module = getattr(callable_or_none, "__module__", "") or ""
    name = callable_or_none.__name__
    return f"json.{name}" if module.startswith("json") else name


parser = argparse.ArgumentParser(prog="sglang serve")
ServerArgs.add_cli_args(parser)
asked = sys.stdin.read()
if not asked.strip():
    rows = [
        {
            "flags": action.option_strings,
            "dest": action.dest,
            "action": type(action).__name__,
            "type": name_of(action.type),
            "nargs": action.nargs,
            "const": plain(action.const),
            "const_value": plain(getattr(action, "const_value", None)),
            "new_flag": getattr(action, "new_flag", None),
            "choices": None if action.choices is None else plain(list(action.choices)),
            "ordered": not isinstance(action.choices, set),
            "suppressed": action.default == argparse.SUPPRESS,
            "default": plain(action.default),
            "required": action.required,
        }
        for action in parser._actions
        if action.dest != "help"
    ]
    print(json.dumps({"version": sglang.version.__version__, "answers": rows}))
elif "check" in (request := json.loads(asked)):
    answers = []
    for arguments in request["check"]:
        try:
            ServerArgs.from_cli_args(parser.parse_args(arguments)).check_server_args()
            answers.append({"error": None})
        except (ValueError, TypeError, AssertionError, RuntimeError, NotImplementedError) as error:
            answers.append({"error": f"{type(error).__name__}: {error}" if str(error) else type(error).__name__})
    print(json.dumps({"version": sglang.version.__version__, "answers": answers}))
else:
    answers = []
    for arguments in request["parse"]:
        words = io.StringIO()
        try:
            with contextlib.redirect_stderr(words):
                answers.append({"values": plain(vars(parser.parse_args(arguments)))})
        except SystemExit as end:
            answers.append({"exit": end.code, "error": words.getvalue()[-2000:]})
        except (ValueError, TypeError, AssertionError) as error:
            answers.append({"exit": 1, "error": f"{type(error).__name__}: {error}"})
    print(json.dumps({"version": sglang.version.__version__, "answers": answers}))
