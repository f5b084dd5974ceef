"""`workbook inspect`: what a checkpoint, log, benchmark file or unit says, in seconds and without starting anything."""

from __future__ import annotations

import argparse

from lib.cli import _inspect_bench, _inspect_checkpoint, _inspect_log, _inspect_unit


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand with one further subcommand for each kind of input."""
    parser = subparsers.add_parser(
        "inspect",
        help="read a checkpoint, log, benchmark file or unit",
        description="Exit codes: 0 read, 1 a finding at or above --fail-on, 2 the input can't be read (and why).",
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for module in (_inspect_checkpoint, _inspect_log, _inspect_bench, _inspect_unit):
        module.add_parser(kinds)
