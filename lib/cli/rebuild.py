"""`workbook rebuild`: the notebooks, results and pages of a run, derived again from its raw files, without a server."""

from __future__ import annotations

import argparse
import sys

from lib import runner


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser("rebuild", help="derive a run's results and report again from its raw files")
    parser.add_argument("run_id", metavar="RUN", help="run id, folder or `latest`")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Rebuilds; prints where the report is."""
    code, folder = runner.rebuild(args.run_id)
    for state in runner.read_run(folder).notebooks:
        if state.state == "failed":
            print(f"workbook: notebook {state.notebook} failed: {state.error}", file=sys.stderr)
    print(f"report: {folder / 'index.html'}")
    return code
