"""Unit files and journals in one place: read, judge, render. Text and records in, text and records out."""

from __future__ import annotations

from lib.deploy.unit_parse import Assignment, Command, Unit, parse_unit, split_words, time_span_s
from lib.deploy.unit_render import UnitSpec, http_probe_argv, render_unit, start_limit_interval_s, unit_value

__all__ = [
    "Assignment",
    "Command",
    "Unit",
    "UnitSpec",
    "http_probe_argv",
    "parse_unit",
    "render_unit",
    "split_words",
    "start_limit_interval_s",
    "time_span_s",
    "unit_value",
]
