"""`workbook replay`: every table, figure and verdict of a run anew from its raw files, after deleting all that is derived."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from lib import replay, runner


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "replay",
        help="delete what is derived and rebuild a run from its raw files",
        description="Needs no server and no GPU. The run's folder is left alone: the replay goes into --out (default: a new folder "
        "beside it; of a packed example: below outputs/replays). Exit codes: 0 results, tables and figures are the run's own, 1 they "
        "differ or a notebook failed, 2 bad input.",
    )
    parser.add_argument("run_id", metavar="RUN", help="run id, folder or `latest`")
    parser.add_argument("--out", metavar="DIR", help="where the replayed run goes; must not exist")
    parser.add_argument("--in-place", action="store_true", help="replay in the run's own folder")
    parser.add_argument("--json", action="store_true", help="print the differences as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replays; prints what differs and where the report is."""
    source = runner.find_run(args.run_id)
    done = replay.replay(source, args.out, args.in_place)
    for notebook, why in done.failed.items():
        print(f"workbook: notebook {notebook} failed: {why}", file=sys.stderr)
    if args.json:
        print(json.dumps(done.model_dump(), indent=1, sort_keys=True))
    else:
        print(f"replay: {len(done.deleted)} derived files deleted, {done.raw_files} raw files kept")
        for line in done.differences:
            print(f"replay: {line}")
        print(
            "replay: "
            + ("what follows differs from the run" if done.differences else "every verdict and number is the run's own")
        )
        page = next((p for p in ("index.html", "report.html") if (Path(done.folder) / p).is_file()), "")
        print(f"report: {Path(done.folder) / page}")
    return 1 if done.failed or done.differences else 0
