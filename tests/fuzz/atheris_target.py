"""Fuzz one reader by hand: `python tests/fuzz/atheris_target.py READER [libFuzzer options] [CORPUS]`; see README.md."""

from __future__ import annotations

import sys

import atheris  # type: ignore[import-not-found,unused-ignore]

with atheris.instrument_imports(include=["lib"]):
    from tests.fuzz import readers


def main() -> None:
    """Take the reader's name off the command line and hand the rest to libFuzzer."""
    if len(sys.argv) < 2 or sys.argv[1] not in readers.READERS:
        sys.exit(f"usage: atheris_target.py {{{','.join(readers.READERS)}}} [libFuzzer options]")
    name = sys.argv.pop(1)
    atheris.Setup(sys.argv, lambda data: readers.run(name, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
