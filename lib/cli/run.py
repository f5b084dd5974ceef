"""`workbook run`: the six notebooks of a profile, in order, with a report at the end."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from pathlib import Path

from lib import runner
from lib.batch.engine import ENGINES, known_engines
from lib.cli._input import writing
from lib.cli._outputs import say_if_over_budget
from lib.errors import BadInput, WorkbookError
from lib.hosts import local
from lib.params import NOTEBOOKS


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "run",
        help="run the notebooks of a profile and write the report",
        description="Exit codes: 0 all notebooks ran and wrote valid results (whatever the verdicts), 1 one failed, "
        "2 bad input, 3 with --strict and a failed verdict, 130 interrupted (continue with --resume; a matrix goes on by itself). "
        "Of a matrix (docs/batch.md): 1 if any notebook of any cell failed, was skipped or lost.",
    )
    parser.add_argument("--profile", help="a name under params/, or a folder (default: embedded)")
    parser.add_argument("--matrix", metavar="FILE", help="a name under params/matrix/, or a file: run all of its cells")
    parser.add_argument("--engine", choices=known_engines(), default="local", help="what runs the tasks of a matrix")
    parser.add_argument("--outputs", metavar="PLACE", help="of a matrix: a folder, or s3://BUCKET/PREFIX (default: outputs/)")
    parser.add_argument("--watch", action="store_true", help="of a matrix: show all of it, drawn again in place")
    parser.add_argument("--plan", action="store_true", help="of a matrix: say what would run and why, and run nothing")
    parser.add_argument("--only", help="numbers of notebooks, such as 03,05")
    parser.add_argument("--resume", metavar="RUN", help="run id, folder or `latest`: go on where that run stopped")
    parser.add_argument("--junit", metavar="FILE", help="write the verdicts as JUnit XML, for a pipeline")
    parser.add_argument("--strict", action="store_true", help="exit 3 if a verdict failed")
    if "dask" in known_engines():
        importlib.import_module(ENGINES["dask"]).add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs; prints where the report is."""
    if args.matrix is not None:
        return _matrix(args)
    if given := [o for o in ("outputs", "watch", "plan") if getattr(args, o)] + ["engine"] * (args.engine != "local"):
        raise BadInput(f"--matrix FILE with --{given[0]}", "no --matrix", "name a matrix, or leave it out")
    began = time.time()
    try:
        code, folder = runner.run(
            args.profile or "embedded", args.only.split(",") if args.only is not None else None, args.resume, args.strict
        )
    except KeyboardInterrupt:
        print(f"workbook: interrupted. {_how_to_go_on(began)}", file=sys.stderr)
        return 130
    for state in runner.read_run(folder).notebooks:
        if state.state == "failed":
            print(f"workbook: notebook {state.notebook} failed: {state.error}", file=sys.stderr)
    if args.junit:
        _write_junit(Path(args.junit), folder)
    print(f"report: {folder / 'index.html'}")
    say_if_over_budget()
    return code


def _matrix(args: argparse.Namespace) -> int:
    if given := [f"--{option}" for option in ("profile", "resume") if getattr(args, option) is not None]:
        raise BadInput(f"--matrix without {given[0]}", "both", "a matrix names its profiles, and goes on by what is done")
    from lib.cli._matrix import run_matrix  # papermill and the report take a second to import

    return run_matrix(args)


def _write_junit(file: Path, folder: Path) -> None:
    """The run's verdicts as JUnit XML, to a temporary name first.

    Raises:
        BadInput: the file can't be written.
    """
    from lib.report.junit import junit_xml

    found = {n: r for n in NOTEBOOKS if (r := runner.read_result(folder / f"{n}.result.json"))}
    with writing("--junit", str(file)):
        local.write_atomic(file, junit_xml(runner.read_run(folder), found, NOTEBOOKS))


def _how_to_go_on(began: float) -> str:
    """The command that continues the run that was interrupted, or that none had begun."""
    try:
        folder = runner.find_run("latest")
    except WorkbookError:
        return "Nothing had begun."
    if (folder / "result.json").stat().st_mtime < began:
        return "Nothing had begun."
    left = runner.live_servers(folder)
    gone = f"Servers are left: pids {left}." if left else "No server is left."
    return f"{gone} Continue with: {sys.argv[0]} run --resume {folder.name}"
