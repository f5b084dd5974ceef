"""From unit and journal reports to the names that cases of kind systemd use: one table for all of them.

Nothing is computed here that `lib` does not compute: a row picks a field, or renames it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lib.deploy.journal import JournalReport, read_journal, split_bundle
from lib.deploy.unit import UnitReport, read_unit
from lib.errors import UnreadableFile

UNIT = (
    "effective_limit",
    "severity",
    "kill_mode",
    "restart",
    "restart_delay_s",
    "start_limit_burst",
    "start_limit_interval_s",
    "timeout_stop_s",
    "timeout_start_s",
    "user",
    "type",
)
JOURNAL = (
    "restarts_about",
    "exit_code",
    "exit_signal",
    "result",
    "cause",
    "failing_check",
    "restart_limit_hit",
    "unit_valid",
    "dropin_valid",
    "dropin_applied",
    "memory_free_gib",
    "memory_total_gib",
    "memory_target_gib",
)


def answer(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """All names that the case's input answers, in the shape that `expect` has."""
    given = case["input"]
    text = (folder / given["file"]).read_bytes().decode("utf-8", "replace") if "file" in given else given["text"]
    text = text if isinstance(text, str) else "\n".join(map(str, text))
    fragment, dropins, rest = split_bundle(text)
    if fragment is None:
        try:
            return unit_names(read_unit(text))
        except UnreadableFile:
            return journal_names(read_journal(text))
    found = unit_names(read_unit(fragment, dropins))
    return found | journal_names(read_journal(text)) if rest.strip() else found


def unit_names(report: UnitReport) -> dict[str, Any]:
    """Names of a unit."""
    found: dict[str, Any] = {name: getattr(report, name) for name in UNIT}
    counting = [finding for finding in report.findings if finding.level != "info"]
    ignored = [finding.what for finding in report.findings if finding.what.endswith("ignoring.")]
    return found | {
        "findings": [finding.id for finding in counting],
        "severity_max": report.severity or "info",
        "unit_valid": report.valid,
        "verify_line": ignored[0] if ignored else None,
        "restart_sec": report.restart_delay_s,
        "start_limit_never_trips": report.start_limit_stops_instant_failures is False,
    }


def journal_names(report: JournalReport) -> dict[str, Any]:
    """Names of a journal."""
    found = {name: getattr(report, name) for name in JOURNAL}
    found |= {"class": report.class_, "severity": report.severity, "restarts": report.restarts_about}
    if report.settings:
        found["effective_value_first"] = report.settings[0].seen[0]
        found["effective_value_last"] = report.settings[0].seen[-1]
    return found
