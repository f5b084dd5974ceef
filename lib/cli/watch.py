"""`workbook watch`: has a deployed service drifted from its last proof? Reads, changes nothing."""

from __future__ import annotations

import argparse

from lib.deploy.drift import WatchReport
from lib.deploy.planning import place_for
from lib.deploy.watch import watch
from lib.errors import HostError, WorkbookError
from lib.hosts.connect import close_all
from lib.params import DeployParams, load_notebook, load_profile

EPILOG = """\
Exit codes: 0 nothing has drifted (what can't be known is said), 1 something has, 2 it could not be looked at (no host, no
root, never proven). Form and an example timer: docs/deploy.md.
"""


class CantLook(WorkbookError):
    """The host or its records can't be read: neither drift nor all well."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `workbook watch`."""
    parser = subparsers.add_parser(
        "watch",
        help="has a deployed service drifted from its last proof?",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--profile", required=True, help="a name under params/, or a folder; its host: and 06.yaml")
    parser.add_argument("--json", action="store_true", help="one object on stdout (docs/deploy.md)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """See EPILOG."""
    params = DeployParams.model_validate(load_notebook(args.profile, "06"))
    profile = load_profile(params.profile, params.server, params.known_answer)
    try:
        report = watch(place_for(profile, params).host, params.service)
    except HostError as error:  # exit code 1 would say that it was looked at
        raise CantLook(error.expected, error.found, error.do) from error
    finally:
        close_all()
    print(report.model_dump_json() if args.json else watch_text(report))
    return 1 if report.drifted else 0


def watch_text(report: WatchReport) -> str:
    """What drifted first, with its evidence; then what is unknown; then how much is as proven."""
    count = len(report.drifted)
    head = f"{report.unit} on {report.host}, plan {report.plan}"
    rows = [f"DRIFT in {count} of {len(report.rows)}: {head}" if count else f"NO DRIFT: {head}"]
    for row in report.drifted:
        rows += [f"  {row.id}: {row.now}", f"      proven: {row.proven}; see {row.evidence}"]
    rows += [f"  unknown: {row.id}: {row.now}" for row in report.rows if row.status == "unknown"]
    return "\n".join(
        [*rows, f"  as proven: {', '.join(row.id for row in report.rows if row.status == 'same') or 'nothing'}"]
    )
