"""`workbook bundle`: what a host without a network lacks to run this workbook, with an offline installer."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from lib.deploy import describe_host
from lib.errors import BadInput
from lib.params import ROOT


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "bundle",
        help="pack what a host without a network lacks, found by really importing",
        description="On the host: 'workbook bundle --describe-host host.json' (or, where nothing is installed, "
        "'python3 lib/deploy/describe_host.py host.json'). Here: 'workbook bundle --for host.json --out DIR'. On the host: "
        "'python3 DIR/install.py TARGET', then PYTHONPATH=TARGET. Exit codes: 0 done, 2 bad input or too large.",
    )
    parser.add_argument(
        "--describe-host", metavar="FILE", nargs="?", const="-", help="describe this machine; '-' prints it"
    )
    parser.add_argument("--for", dest="host", metavar="HOST.json", type=Path, help="the host that it is for")
    parser.add_argument("--out", metavar="DIR", type=Path, help="where the bundle goes (replaced)")
    parser.add_argument(
        "--plan",
        metavar="FILE",
        type=Path,
        default=ROOT / "params" / "h200" / "bundle.yaml",
        help="what is installed and run",
    )
    parser.add_argument(
        "--lock", metavar="FILE", type=Path, help="versions and hashes (default: bundle.lock beside the plan)"
    )
    parser.add_argument("--resolve", action="store_true", help="resolve the lock anew for this host")
    parser.add_argument(
        "--imports", metavar="FILE", type=Path, help="what was opened (default: bundle.imports.json beside the plan)"
    )
    parser.add_argument("--trace", action="store_true", help="run the plan's programs here to find what they open")
    parser.add_argument(
        "--add-trace",
        metavar="DIR",
        type=Path,
        action="append",
        default=[],
        help="a trace recorded on the host, added to the imports",
    )
    parser.add_argument("--work", metavar="DIR", type=Path, help="where wheels are unpacked (default: in the cache)")
    parser.add_argument("--prove", action="store_true", help="install it here and run the plan's programs with it")
    parser.add_argument("--json", action="store_true", help="print the manifest's summary as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Describes this host, or builds a bundle for another."""
    if args.describe_host is not None:
        described = json.dumps(describe_host.describe(), indent=1) + "\n"
        if args.describe_host == "-":
            print(described, end="")
        else:
            Path(args.describe_host).write_text(described, encoding="utf-8")
        return 0
    if args.host is None or args.out is None:
        raise BadInput("--for HOST.json and --out DIR, or --describe-host", "one of them is missing")
    from lib.deploy import bundle

    began = time.monotonic()
    manifest = bundle.make(
        host_file=args.host, plan_file=args.plan, out=args.out, lock=args.lock, imports=args.imports, resolve_anew=args.resolve,
        trace_anew=args.trace, added_traces=args.add_trace, work=args.work, prove_it=args.prove, say=_say,
    )  # fmt: skip
    summary = bundle.summary(manifest, args.out)
    if args.json:
        print(json.dumps(summary, indent=1, sort_keys=True))
    else:
        print(
            f"bundle: {summary['packages']} packages, {summary['files']} files, {summary['bytes'] / bundle.MIB:.1f} MiB in "
            f"{summary['parts']} parts; {summary['left_out_bytes'] / bundle.MIB:.0f} MiB of these packages stay here; "
            f"{time.monotonic() - began:.0f} s"
        )
        print(f"bundle: on the host: python3 {args.out.name}/install.py TARGET")
    return 0


def _say(text: str) -> None:
    print(f"bundle: {text}", file=sys.stderr, flush=True)
