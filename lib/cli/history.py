"""`workbook history`: the runs of a profile and what became of each claim from run to run."""

from __future__ import annotations

import argparse
from pathlib import Path

from lib.cli._input import writing
from lib.cli._outputs import use_outputs
from lib.errors import BadInput
from lib.outputs import outputs_root


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser("history", help="runs of a profile and each claim from run to run")
    parser.add_argument("profile", metavar="PROFILE", nargs="?", help="a folder below outputs/ (default: all)")
    parser.add_argument("--limit", type=int, default=30, metavar="N", help="the latest N runs (default 30)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output (docs/history.md)")
    parser.add_argument("--outputs", metavar="PLACE", help="a folder, or s3://BUCKET/PREFIX (default: outputs/)")
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page")
    parser.add_argument("--rescan", action="store_true", help="look at every run's files again")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Shows the history."""
    from lib.report import history  # every command imports this module; what this one needs is imported here

    if args.limit < 1:
        raise BadInput("--limit of at least 1", str(args.limit), "give a number of runs")
    use_outputs(args.outputs)
    root = outputs_root()
    profile = Path(args.profile).name if args.profile else None
    with history.opened(root) as connection:
        history.refresh(connection, root, profile, args.rescan)
        runs = history.run_rows(connection, profile, args.limit)
        if profile and not runs:
            known = [
                r[0]
                for r in connection.execute("SELECT DISTINCT profile FROM runs ORDER BY profile LIMIT 20").fetchall()
            ]
            raise BadInput(
                f"runs of profile {profile!r} below the outputs folder",
                "none",
                f"profiles with runs: {', '.join(known) or 'none'}",
            )
        series = history.result_series(connection, [r["path"] for r in reversed(runs)])
    if args.html:
        from lib.report.history_page import write_history  # the pages' packages take a second to import

        with writing("--html", args.html) as page:
            write_history(page, runs, series, f"History of {profile or 'all profiles'}")
    if args.json:
        print(history.as_json(runs, series))
        return 0
    from lib.report.history_tables import results_table, runs_table

    print(f"{runs_table(runs)!r}\n\n{results_table(series, runs)!r}")
    if args.html:
        print(f"page: {args.html}")
    return 0
