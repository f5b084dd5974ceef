"""`workbook compare-accuracy`: do two servers give real text the same probabilities, and do they still do an agent's tasks?"""

from __future__ import annotations

import argparse
import datetime
import json
import os
from pathlib import Path
from typing import Any

from lib.audit import sides
from lib.audit.compare import ScoreComparison
from lib.audit.sides import AccuracyReport, Wanted
from lib.errors import BadInput
from lib.records import Measured
from lib.results import outputs_root

EPILOG = """\
Two running servers:      workbook compare-accuracy --a http://127.0.0.1:30000 --b http://127.0.0.1:30001
One server, its floor:    workbook compare-accuracy --a URL
One after the other:      workbook compare-accuracy --a URL --record bf16      (then start the other one)
                          workbook compare-accuracy --against bf16 --b URL
A restarted as floor:     workbook compare-accuracy --a URL --record bf16-again; ... --against bf16 --b URL --restarted bf16-again
An interrupted comparison goes on with the same --out or --record. The sign is B minus A: negative means that B loses.
A key is taken from WORKBOOK_API_KEY (another variable: --api-key-env). The cache of both servers is flushed, so they
should carry no other traffic. Exit codes: 0 compared, 1 B loses more than --limit and --fail-on-loss, or a server failed;
2 bad input.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `workbook compare-accuracy`."""
    parser = subparsers.add_parser(
        "compare-accuracy",
        help="what server B costs in accuracy against server A: paired log-probabilities and tasks",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--a", metavar="URL", help="reference server, or a recorded folder")
    parser.add_argument("--b", metavar="URL", help="treated server, or a recorded folder; none: A against itself")
    parser.add_argument("--against", metavar="DIR", help="the reference as recorded earlier (the same as --a DIR)")
    parser.add_argument("--record", metavar="DIR", help="score --a into this folder, to be compared later")
    parser.add_argument(
        "--restarted",
        metavar="DIR",
        action="append",
        default=[],
        help="A recorded again after a restart: part of the floor",
    )
    parser.add_argument("--out", metavar="DIR", help="where raw files go (default: a new folder under outputs/)")
    parser.add_argument(
        "--document", metavar="NAME", action="append", default=[],
        help="a text file or a module of the standard library, joined by + (default: chosen from the library)",
    )  # fmt: skip
    parser.add_argument(
        "--tokens",
        metavar="N[,N...]",
        help="tokens of each document (default: two each at 1/4, 1/2 and all of the context)",
    )
    parser.add_argument("--bucket", metavar="N", type=int, default=512, help="first position bucket; they double (512)")
    parser.add_argument("--limit", metavar="NATS", type=float, default=0.01, help="accepted loss, nats a token (0.01)")
    parser.add_argument("--top", metavar="K", type=int, default=5, help="likeliest tokens kept at each position (5)")
    parser.add_argument(
        "--load", metavar="N", type=int, default=2, help="streams beside the loaded floor pass, 0: none (2)"
    )
    parser.add_argument("--tasks", metavar="N", type=int, default=0, help="items of each task family (0: no tasks)")
    parser.add_argument("--task-tokens", metavar="N", type=int, default=2000, help="depth of the deep items (2000)")
    parser.add_argument("--no-flush", action="store_true", help="don't flush caches (other traffic runs)")
    parser.add_argument("--api-key-env", metavar="NAME", help="variable with the API key of both servers")
    parser.add_argument("--json", action="store_true", help="one object on stdout (docs/compare-accuracy.md)")
    parser.add_argument("--fail-on-loss", action="store_true", help="exit 1 if B loses more than --limit")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 compared; 1 a loss beyond the limit with --fail-on-loss; bad input raises (exit code 2)."""
    given_a = args.a or args.against
    if not given_a or (args.a and args.against):
        raise BadInput("expected one reference: --a URL, or --against DIR", "both" if given_a else "none")
    if args.record and (args.b or args.against or not _is_url(given_a)):
        raise BadInput("expected --record DIR with --a URL alone", "--b, --against, or a folder as --a")
    if not args.limit > 0 or args.bucket < 16 or not 0 <= args.top <= 64 or args.load < 0 or args.tasks < 0:
        raise BadInput("expected --limit > 0, --bucket >= 16, --top 0 to 64, --load and --tasks >= 0", _values(args))
    wanted = Wanted(
        documents=args.document, lengths=_lengths(args.tokens), top_logprobs=args.top, load_streams=args.load,
        flush=not args.no_flush, task_count=args.tasks, task_tokens=args.task_tokens,
    )  # fmt: skip
    key = args.api_key_env or ("WORKBOOK_API_KEY" if os.environ.get("WORKBOOK_API_KEY") else None)
    out = Path(
        args.record or args.out or outputs_root() / "compare-accuracy" / f"{datetime.datetime.now():%Y%m%d-%H%M%S}"
    )
    a, b, notes = _sides(args, given_a, out, wanted, key)
    report = sides.compare_sides(a, b, wanted, args.bucket, args.limit, [Path(d) for d in args.restarted], notes)
    print(json.dumps(report.model_dump(mode="json"), ensure_ascii=False) if args.json else text(report, a, b))
    return 1 if args.fail_on_loss and report.outcome == "outside_limit" else 0


def _sides(
    args: argparse.Namespace, given_a: str, out: Path, wanted: Wanted, key: str | None
) -> tuple[Path, Path | None, list[str]]:
    """Both sides as folders, recorded first where a server was named."""
    notes = []
    if _is_url(given_a):
        a = out if args.record else out / "a"
        a.mkdir(parents=True, exist_ok=True)
        server = sides.attach(given_a, a, key)
        documents = sides.tokenize_side(server, a, wanted)
        notes += [f"A: {c}" for c in sides.record_side(server, a, wanted, documents, floor=True)]
    else:
        a = Path(given_a)
        documents = sides.read_side(a)[1]
    if not args.b:
        return a, None, notes
    if not _is_url(args.b):
        return a, Path(args.b), notes
    b = out / "b"
    b.mkdir(parents=True, exist_ok=True)
    other = sides.attach(args.b, b, key)
    notes.append(sides.check_same_vocabulary(other, documents))
    (b / "documents").mkdir(exist_ok=True)
    (b / "documents" / "documents.json").write_text(json.dumps(documents))
    families = sides.able(a / "tasks") if wanted.task_count else None
    if families is not None and not families:
        notes.append("tasks: none that A can do, or none asked when it was recorded")
    notes += [f"B: {c}" for c in sides.record_side(other, b, wanted, documents, floor=False, families=families)]
    return a, b, notes


def _is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def _lengths(given: str | None) -> list[int]:
    if given is None:
        return []
    try:
        lengths = [int(part) for part in given.split(",")]
    except ValueError as error:
        raise BadInput("expected --tokens as numbers, such as 1000,4000", repr(given)) from error
    if min(lengths) < 64:
        raise BadInput("expected --tokens of at least 64", repr(given))
    return lengths


def _values(args: argparse.Namespace) -> str:
    return ", ".join(f"--{n} {getattr(args, n)}" for n in ("limit", "bucket", "top", "load", "tasks"))


def text(report: AccuracyReport, a: Path, b: Path | None) -> str:
    """The readable form: verdict, effect, floor, buckets, largest differences, tasks, time."""
    out = [f"{report.outcome}: {report.reason}"]
    if report.effect:
        out.append(f"effect: {report.effect} ({report.effect_reason})")
    if report.needed_tokens:
        out.append(f"needed: about {report.needed_tokens:,} tokens in all")
    out.append("")
    out += [
        f"  {d['name']}: {d['tokens']} tokens of {d['origin']}, SHA-256 {d['sha256'][:16]}" for d in report.documents
    ]
    rows: list[tuple[str, ScoreComparison]] = [(f"A {name}", found) for name, found in report.floors.items()]
    if report.comparison:
        rows.append(("B", report.comparison))
    out += [
        "",
        f"{'against A':<14}{'tokens':>8}{'mean nat/token':>34}{'mean |d|':>11}{'perplexity':>12}{'top-1':>8}{'KL >=':>10}",
    ]
    for name, found in rows:
        out.append(_line(name, found.tokens, found.pooled, found.mean_absolute, found.perplexity_ratio,
                         found.top1_agreement, found.kl_lower_bound))  # fmt: skip
    if report.comparison:
        out += ["", "by position"]
        for x in report.comparison.buckets:
            out.append(_line(f"{x.first}-{x.last}", x.tokens, x.mean, x.mean_absolute, x.perplexity_ratio,
                             x.top1_agreement, x.kl_lower_bound))  # fmt: skip
        out += ["", "largest single differences"]
        for t in report.comparison.largest_tokens:
            shown = repr(t.text[-70:]) if t.text else f"token {t.token_id}"
            out.append(f"  {t.difference:+8.3f}  {t.document} at {t.position}: {shown}")
    if report.tasks:
        out += ["", "tasks (A / B right)"]
        for f in report.tasks:
            out.append(
                f"  {f.family:<11} shallow {f.control_a}/{f.control_b}, deep {f.deep_a}/{f.deep_b} of {f.items}: {f.outcome}; {f.reason}"
            )
    for name, spent in report.timing.items():
        server_s = spent["request_s"] + spent["flush_s"]
        if spent["scored"]:
            out.append(f"time {name}: server {server_s:.1f} s, the workbook's own {spent['own_s'] / server_s:.1%}")
    out += [f"note: {n}" for n in report.notes]
    return "\n".join([*out, f"raw files: {a}" + (f", {b}" if b else "")])


def _line(name: str, tokens: int, mean: Measured, absolute: float, ratio: Any, top1: Any, kl: Any) -> str:
    ends = f" [{mean.low:+.5f}, {mean.high:+.5f}]" if mean.low is not None and mean.high is not None else ""
    shown = f"{mean.value:+.5f}{ends}" if isinstance(mean.value, (int, float)) else str(mean.reason)
    return (
        f"{name:<14}{tokens:>8}{shown:>34}{absolute:>11.5f}{_cell(ratio, 5):>12}{_cell(top1, 4):>8}{_cell(kl, 5):>10}"
    )


def _cell(value: Measured | None, digits: int) -> str:
    return f"{value.value:.{digits}f}" if value and isinstance(value.value, (int, float)) else "-"
