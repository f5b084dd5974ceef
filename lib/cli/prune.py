"""`workbook prune`: keep the outputs folder below a size without losing the evidence of what is kept."""

from __future__ import annotations

import argparse
import json
import sys

from lib.errors import BadInput
from lib.results import outputs_root


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "prune",
        help="remove old runs so that outputs/ stays below a size",
        description="Shows what would go; --yes removes it. Runs with a file KEEP, runs that have not ended and the newest of each "
        "profile stay. In runs that stay only repeated attempts go that no verdict points to. Exit codes: 0 within the limit, "
        "1 the limit can't be reached or something could not be removed, 2 bad input.",
    )
    parser.add_argument(
        "--max-gib",
        type=float,
        metavar="N",
        help="size of the outputs folder afterwards (default: WORKBOOK_MAX_GIB, else no limit)",
    )
    parser.add_argument(
        "--keep", type=int, default=3, metavar="N", help="newest ended runs of each profile that stay (default 3)"
    )
    parser.add_argument("--yes", action="store_true", help="remove; without it nothing is touched")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plans, shows, and with --yes removes."""
    from lib.report import history, prune  # the report's packages take a second to import: only where they are used

    if args.max_gib is not None and not args.max_gib >= 0:
        raise BadInput("--max-gib of at least 0", str(args.max_gib), "give a size in GiB")
    if args.keep < 0:
        raise BadInput("--keep of at least 0", str(args.keep), "give a number of runs")
    root = outputs_root()
    limit = prune.budget_bytes() if args.max_gib is None else int(args.max_gib * 2**30)
    plan = prune.plan_prune(root, limit, args.keep)
    problems = prune.carry_out(root, plan) if args.yes else []
    if args.yes and plan.removals:
        with history.opened(root) as connection:
            history.refresh(connection, root, rescan=True)
    if args.json:
        print(
            json.dumps(
                {
                    "schema": "workbook.prune/1",
                    "removed": args.yes,
                    "problems": problems,
                    **plan.model_dump(mode="json"),
                }
            )
        )
    else:
        for removal in plan.removals:
            print(
                f"{'removed' if args.yes else 'would remove'}: {removal.path} ({removal.bytes / 2**20:.1f} MiB): {removal.why}"
            )
        sizes = f"{plan.bytes_before / 2**30:.3f} GiB before, {plan.bytes_after / 2**30:.3f} GiB after"
        print(f"{sizes}; {len(plan.kept)} runs are kept whatever the size")
        if plan.removals and not args.yes:
            print("nothing was touched; --yes removes")
    for problem in problems:
        print(f"workbook: not removed: {problem}", file=sys.stderr)
    over = limit is not None and plan.bytes_after > limit
    if over:
        print("workbook: the limit can't be reached with the runs that are kept", file=sys.stderr)
    return 1 if problems or over else 0
