"""What a reader of files has to say about one: findings with a level, the evidence and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import field_validator

from lib.records import Record

#: From harmless to fatal.
LEVELS = ("info", "warning", "error")


class Finding(Record):
    """One thing that a reader should know: its kind (`id`), what was read (`evidence`), what helps (`do`)."""

    id: str
    level: str
    what: str
    evidence: str = ""
    line: int | None = None
    do: str = ""
    source: str = ""

    @field_validator("level")
    @classmethod
    def _level_is_known(cls, level: str) -> str:
        if level not in LEVELS:
            raise ValueError(f"level {level!r} is not one of {LEVELS}")
        return level


def worst_level(findings: Iterable[Finding]) -> str | None:
    """The highest level among the findings, None where there are none."""
    return max((finding.level for finding in findings), key=LEVELS.index, default=None)


def reaches(findings: Iterable[Finding], level: str) -> bool:
    """Whether any finding is at or above the level."""
    return any(LEVELS.index(finding.level) >= LEVELS.index(level) for finding in findings)
