"""A launch line as somebody types it, as the flags and environment that `launch_argv` takes. Pure."""

from __future__ import annotations

import contextlib
import re
import shlex
from typing import Any

from lib.errors import BadInput
from lib.server.flags import Form, nearest_release

_ASSIGNED = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)
#: Words of a pasted command before its flags.
_PROGRAM = re.compile(r"(?:.*/)?(?:python[0-9.]*|sglang)|-m|serve|sglang\.launch_server|\\")


def typed_flags(text: str, sglang_version: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Flags and environment of a typed or pasted launch line, by the release's own flags (how many values each takes).

    Nothing is judged here but the line's shape: unknown flags and wrong values are `launch_argv`'s to refuse.

    Args:
        text: `NAME=VALUE ... --flag value --flag=value --switch`, with or without the program before it.
        sglang_version: the release.

    Raises:
        BadInput: quotes that don't close, or words that belong to no flag.

    Example: `typed_flags("A=1 --tp-size 2 --enable-metrics", "0.5.16")` is
    `({"tp-size": 2, "enable-metrics": True}, {"A": "1"})`.
    """
    try:
        words = shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        raise BadInput("expected flags that a shell can split", str(error), "close the quotes") from None
    release, _ = nearest_release(sglang_version)
    flags: dict[str, Any] = {}
    environment: dict[str, str] = {}
    stray: list[str] = []
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        assigned = _ASSIGNED.fullmatch(word)
        if not word.startswith("--"):
            if assigned:
                environment[assigned[1]] = assigned[2]
            elif not _PROGRAM.fullmatch(word):
                stray.append(word)
            continue
        name, sign, value = word[2:].partition("=")
        form = release.find(name)
        if sign:
            flags[name] = _value(value, form)
            continue
        takes = [] if form is not None and form.action in ("store_true", "store_false") else _values(words, index)
        many = form is not None and form.nargs in ("*", "+")
        takes = takes if many else takes[:1]
        index += len(takes)
        flags[name] = (
            [_value(one, form) for one in takes] if many and takes else _value(takes[0], form) if takes else True
        )
    if stray:
        raise BadInput(
            "expected --flag value, --flag=value, --switch or NAME=value",
            " ".join(stray)[:80],
            "name the flag before the value",
        )
    return flags, environment


def _values(words: list[str], index: int) -> list[str]:
    end = index
    while end < len(words) and not (words[end].startswith("--") or _ASSIGNED.fullmatch(words[end])):
        end += 1
    return words[index:end]


def _value(text: str, form: Form | None) -> Any:
    """The value as its flag takes it; what is no number stays text, which `launch_argv` then refuses by the flag's name."""
    kinds = {"int": int, "human_readable_int": int, "float": float}
    with contextlib.suppress(ValueError):
        return kinds[form.type](text) if form is not None and form.type in kinds else text
    return text
