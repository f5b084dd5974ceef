"""Unit files and journals in one place: read, judge, render. Text and records in, text and records out."""

from __future__ import annotations

from lib.deploy.journal import JournalReport, read_journal, split_bundle
from lib.deploy.unit_lint import UnitReport, lint_unit, read_unit, unit_secrets
from lib.deploy.unit_parse import Assignment, Command, Unit, parse_unit, split_words, time_span_s
from lib.deploy.unit_render import (
    ContainerSpec,
    UnitSpec,
    http_probe_argv,
    render_container_unit,
    render_unit,
    start_limit_interval_s,
    unit_value,
)

__all__ = [
    "Assignment",
    "Command",
    "ContainerSpec",
    "JournalReport",
    "Unit",
    "UnitReport",
    "UnitSpec",
    "http_probe_argv",
    "lint_unit",
    "parse_unit",
    "read_journal",
    "read_unit",
    "render_container_unit",
    "render_unit",
    "split_bundle",
    "split_words",
    "start_limit_interval_s",
    "time_span_s",
    "unit_secrets",
    "unit_value",
]
