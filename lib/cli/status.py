"""`workbook status`: how far a running matrix is, from any terminal of its machine."""

from __future__ import annotations

import argparse
import sys
import time

from lib.errors import BadInput
from lib.results import outputs_root

REFRESH_S = 1.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "status",
        help="how far a matrix is (`run --matrix`), from any terminal",
        description="Marks: . waiting, > running, + done, = kept from before, x failed, - skipped, ! interrupted, ? lost. "
        "Exit codes: 0 it runs or is done, 1 it failed, was interrupted or its process is gone, 2 there is none.",
    )
    parser.add_argument("matrix", metavar="NAME", nargs="?", help="of the matrix (default: the latest one)")
    parser.add_argument("--outputs", metavar="PLACE", help="folder or URL that it writes to (default: as `run`)")
    parser.add_argument("--watch", action="store_true", help="draw it again every second until it has ended")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output (docs/batch.md)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Shows the snapshot."""
    from lib.batch.outputs import local_copy
    from lib.batch.session import read_snapshot
    from lib.batch.snapshot import Snapshot, lines
    from lib.batch.storage import store_of
    from lib.cli._matrix import Screen
    from lib.hosts import local

    if args.watch and args.json:
        raise BadInput("--watch or --json", "both", "leave one out")
    here = local_copy(store_of(args.outputs or str(outputs_root())))

    def look() -> Snapshot:
        found = read_snapshot(here, args.matrix)
        if found is None:
            raise BadInput(
                f"a matrix {args.matrix or ''} that ran below {here.name}/", "none", "workbook run --matrix FILE"
            )
        alive = found.pid_start_time is not None and local.ProcessId(found.pid, found.pid_start_time).alive()
        return found.model_copy(update={"state": "gone"}) if found.state == "running" and not alive else found

    made = look()
    screen = Screen(sys.stdout)
    while args.watch and made.state == "running":
        screen.show(made)
        time.sleep(REFRESH_S)
        made = look()
    if args.json:
        print(made.model_dump_json())
    elif args.watch:
        screen.show(made)
    else:
        now = time.time() if made.state == "running" else made.updated
        print("\n".join(lines(made, now)))
    if made.state == "gone":
        print(f"workbook: its process {made.pid} is gone; what is done is kept, run it again", file=sys.stderr)
    return 0 if made.state in ("running", "done") else 1
