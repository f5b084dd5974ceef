"""`workbook inspect unit FILE [--journal FILE]`: what a systemd unit and its journal say, as text or JSON."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from lib.cli._input import printable, read_text
from lib.deploy.unit import JournalReport, UnitReport, parse_unit, read_journal, read_unit, split_bundle
from lib.deploy.unit_parse import MAX_UNIT_CHARACTERS
from lib.errors import BadInput, UnreadableFile
from lib.findings import LEVELS, reaches
from lib.records import Record

MAX_JOURNAL_BYTES = 256 << 20


class UnitInspection(Record):
    """What `inspect unit` prints: either part may be missing."""

    unit: UnitReport | None
    journal: JournalReport | None


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `unit` to the subcommands of `workbook inspect`."""
    parser = subparsers.add_parser(
        "unit",
        help="mistakes in a systemd unit, and what its journal says happened",
        description="Read a systemd service unit as systemd does, with its drop-ins, and its journal.",
    )
    parser.add_argument(
        "file", metavar="FILE", help="the unit, `systemctl cat` output, or a journal alone; - for standard input"
    )
    parser.add_argument(
        "--journal", metavar="FILE", help="journalctl output (short, cat or -o json); - for standard input"
    )
    parser.add_argument(
        "--dropin", metavar="FILE", action="append", default=[], help="a drop-in; may be given several times"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output (docs/inspect-unit.md)")
    parser.add_argument("--fail-on", choices=LEVELS, metavar="LEVEL", help=f"exit 1 at this level: {', '.join(LEVELS)}")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 read, 1 a finding at or above --fail-on, 2 cannot be read (raised as UnreadableFile)."""
    if [args.file, args.journal, *args.dropin].count("-") > 1:
        raise BadInput("standard input for one file", "- given more than once", "name the other files")
    text = read_text(args.file, "a systemd unit", MAX_UNIT_CHARACTERS)
    dropins = [(Path(name).name, read_text(name, "a drop-in", MAX_UNIT_CHARACTERS)) for name in args.dropin]
    # systemd applies drop-ins by file name, whatever folder they lie in
    dropins.sort(key=lambda item: item[0])
    fragment, inside, rest = split_bundle(text)
    if fragment is None:
        if _is_journal(text):
            return _journal_alone(args, text)
        fragment, rest = text, ""
    dropins = [*inside, *dropins]
    unit = read_unit(fragment, dropins)
    journal_text = read_text(args.journal, "a journal", MAX_JOURNAL_BYTES) if args.journal else rest
    journal = None
    if args.journal or rest.strip():
        try:
            journal = read_journal(journal_text, parse_unit(fragment, dropins))
        except UnreadableFile:
            if args.journal:
                raise
    return _shown(UnitInspection(unit=unit, journal=journal), args)


def _journal_alone(args: argparse.Namespace, text: str) -> int:
    """A journal in the place of the unit is read by itself; what was given for a unit has nothing to stand on then."""
    if args.journal or args.dropin:
        beside = "--journal" if args.journal else "--dropin"
        found = f"a journal as FILE, with {beside} beside it"
        raise BadInput("a systemd unit as FILE", found, "name the unit as FILE and this one as --journal FILE")
    print("workbook: FILE is a journal; without its unit, settings are not compared with it.", file=sys.stderr)
    return _shown(UnitInspection(unit=None, journal=read_journal(text)), args)


def _shown(inspection: UnitInspection, args: argparse.Namespace) -> int:
    print(
        inspection.model_dump_json(indent=1, by_alias=True)
        if args.json
        else "\n".join(map(printable, _lines(inspection))).lstrip("\n")
    )
    findings = [finding for part in (inspection.unit, inspection.journal) if part for finding in part.findings]
    return int(args.fail_on is not None and reaches(findings, args.fail_on))


def _is_journal(text: str) -> bool:
    """Whether the text's first lines are journalctl's (short or -o json), with no section of a unit before them."""
    first = [line for line in text.removeprefix("\ufeff").splitlines()[:20] if line.strip()][:3]
    stamp = r"(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\S*)"
    short = stamp + r" \S+ [^\s\[:]+(?:\[\d+\])?: |-- (?:Logs|Journal|Boot|No entries)"
    return bool(first) and all(
        re.match(short, line) or (line.startswith("{") and '"MESSAGE"' in line) for line in first
    )


def _lines(inspection: UnitInspection) -> Iterator[str]:
    unit = inspection.unit
    if unit:
        worst = unit.severity or "no finding"
        loads = "systemd loads it" if unit.valid else "systemd REFUSES it"
        yield f"unit: {loads}; {len(unit.findings)} findings, worst: {worst}"
        yield f"  command: {' '.join(unit.command)[:400] or 'none'}"
        stop = "no limit" if unit.timeout_stop_s is None else f"{unit.timeout_stop_s:g} s"
        yield f"  user {unit.user or 'root'}, type {unit.type}, kill mode {unit.kill_mode}, stop timeout {stop}"
        if unit.restart != "no":
            stops = "stops" if unit.start_limit_stops_instant_failures else "does not stop"
            yield (
                f"  restart {unit.restart} after {unit.restart_delay_s:g} s; limit {unit.effective_limit}:"
                f" {stops} a server that dies at once"
            )
        for finding in unit.findings:
            where = f" [line {finding.line}]" if finding.line else ""
            yield f"{finding.level}: {finding.id}: {finding.what}{where}"
            yield f"  do: {finding.do}"
    journal = inspection.journal
    if journal:
        yield ""
        starts = f"{len(journal.invocations)} invocations, about {journal.restarts_about} restarts"
        yield f"journal: {journal.class_}; {journal.lines} lines, {starts}"
        if journal.cause:
            yield f"  cause shown: {journal.cause}"
        for item in journal.settings:
            state = {True: "arrived", False: "did NOT arrive", None: "not known"}[item.applied]
            seen = ", ".join(map(repr, item.seen[-3:]))
            yield f"  {item.name} = {item.expected!r} ({item.origin}): {state}; the process shows {seen}"
        for finding in journal.findings:
            where = f" [line {finding.line}]" if finding.line else ""
            yield f"{finding.level}: {finding.id}: {finding.what}{where}"
            yield f"  do: {finding.do}"
