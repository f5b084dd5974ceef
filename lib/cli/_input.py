"""Text that a person names on the command line: a file, or standard input; one clear error for what cannot be read."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from lib.errors import BadInput, UnreadableFile


def read_text(name: str, what: str, max_bytes: int) -> str:
    """The text of a file, or of standard input for `-`; invalid UTF-8 is replaced.

    Raises:
        UnreadableFile: for a missing file, a folder, more than max_bytes, or UTF-16.
    """
    shown = "standard input" if name == "-" else name
    if name == "-":
        require_standard_input(what)
    try:
        if name == "-":
            data = sys.stdin.buffer.read(max_bytes + 1)
        else:
            path = Path(name)
            if path.is_dir():
                raise UnreadableFile(what, f"{shown} is a folder", "name a file in it")
            with path.open("rb") as stream:
                data = stream.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UnreadableFile(f"{what} that can be read", f"{shown!a}: {reason}", "check the path") from error
    if len(data) > max_bytes:
        found = f"{shown} is larger than {max_bytes >> 20} MiB"
        raise UnreadableFile(what, found, "give the part that matters")
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UnreadableFile(f"{what} in UTF-8", f"{shown} is UTF-16", "convert it: iconv -f utf-16 -t utf-8")
    return data.decode("utf-8", "replace")


@contextlib.contextmanager
def writing(option: str, name: str) -> Iterator[Path]:
    """The path of a file that an option names, while it is written.

    Raises:
        BadInput: it can't be written; names the option, the file and the reason.
    """
    try:
        yield Path(name)
    except OSError as error:
        raise BadInput(
            f"{option} names a file that can be written",
            f"{name}: {error.strerror or error}",
            "name another, in a folder that is there",
        ) from error


def require_standard_input(what: str) -> None:
    """Refuses `-` where the process was started without standard input (`<&-`).

    Raises:
        UnreadableFile: if there is none.
    """
    # typeshed says that it is always there
    if getattr(sys, "stdin", None) is None:
        raise UnreadableFile(what, "standard input is closed", "name a file, or give the text on standard input")


def printable(line: str) -> str:
    """The line with control characters shown by their code: a file's text must not steer the reader's terminal."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]", lambda m: f"\\x{ord(m[0]):02x}", line)
