"""`workbook compare`: what changed between runs, which differences are real, which results can't be compared and why."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from lib import runner
from lib.cli._input import writing
from lib.cli._outputs import use_outputs
from lib.errors import BadInput
from lib.records import NotebookResult


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser("compare", help="compare runs: stack, flags, results; which differences are real")
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="run ids, folders or `latest`; the first is what the others are compared with",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output (docs/compare.md)")
    parser.add_argument("--outputs", metavar="PLACE", help="a folder, or s3://BUCKET/PREFIX (default: outputs/)")
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page")
    parser.add_argument("--all", action="store_true", help="also results that are the same")
    parser.add_argument("--fail-on-worse", action="store_true", help="exit code 1 if a claim's status got worse")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compares the first run with each other one."""
    from lib.report import (
        compare as comparing,
    )  # the report's packages take a second to import: only where they are used
    from lib.report.comparison_page import comparison_tables, write_comparison

    if len(args.runs) < 2:
        raise BadInput("at least two runs", str(len(args.runs)), "name a second run: workbook compare RUN_A RUN_B")
    use_outputs(args.outputs)
    folders = [runner.find_run(name) for name in args.runs]
    found = [_results(folder) for folder in folders]
    made = [
        comparing.compare_runs(_name(folders[0]), found[0], _name(f), r)
        for f, r in zip(folders[1:], found[1:], strict=True)
    ]
    if args.html:
        with writing("--html", args.html) as page:
            write_comparison(page, made)
    if args.json:
        print(
            json.dumps(
                {"schema": "workbook.compare/1", "comparisons": [m.model_dump(mode="json") for m in made]},
                ensure_ascii=False,
            )
        )
    else:
        for one in made:
            print(f"A: {one.a}\nB: {one.b}\n")
            for shown in comparison_tables(one, everything=args.all):
                print(f"{shown!r}\n")
            for note in one.notes:
                print(f"note: {note}")
        if args.html:
            print(f"page: {args.html}")
    return 1 if args.fail_on_worse and any(one.worse() for one in made) else 0


def _name(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}"


def _results(folder: Path) -> dict[str, NotebookResult]:
    """Valid results of a run by notebook number.

    Raises:
        BadInput: there is none.
    """
    from lib.report.site import read_run

    _, problem, notebooks = read_run(folder)
    found = {one.number[:2]: one.result for one in notebooks if one.result is not None}
    if not found:
        raise BadInput(
            f"a run with results in {folder.name}", problem or "no notebook left a valid result", "name another run"
        )
    return found
