"""Older result.json and NN.result.json brought to the form of today, one step a version; newer ones are refused, never guessed.

    1    two forms: the first had no `selected` in a run's index, and a number that was not finite was null without a reason
    2    a notebook of a run may be taken over from another run (`taken_from`)

A change of lib.records that an older file does not satisfy, or that older code would not accept, is a new version: a row of STEPS,
a line here, and a stored file of the version before in tests/data/results/.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

from lib.errors import BadInput
from lib.records import SCHEMA_VERSION, NotebookResult, RunResult

Kind = Literal["run", "notebook"]


class NewerVersion(BadInput):
    """A result was written by a workbook that is newer than this one."""


def _one_to_two(data: dict[str, Any], kind: Kind) -> dict[str, Any]:
    if kind == "run":
        begun = [state["notebook"] for state in data.get("notebooks", []) if state.get("state") != "not_run"]
        return {"selected": begun, **data}
    return dict(_with_reasons(data))


def _with_reasons(value: Any) -> Any:
    """Every measured null gets the reason that its version did not write down."""
    if isinstance(value, list):
        return [_with_reasons(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {key: _with_reasons(item) for key, item in value.items()}
    if set(found) >= {"value", "unit", "reason"} and found["value"] is None and not found["reason"]:
        found["reason"] = "not a finite number"
    return found


#: From a version to the next one.
STEPS: dict[int, Callable[[dict[str, Any], Kind], dict[str, Any]]] = {1: _one_to_two}


def up_to_date(data: Any, kind: Kind) -> Any:
    """A record's content in the form of this version; what is no record at all is given back for its reader to refuse.

    Raises:
        NewerVersion: it has a version that this workbook doesn't know.
    """
    if not isinstance(data, dict):
        return data
    version = data.get("schema_version", SCHEMA_VERSION)
    if not isinstance(version, int) or isinstance(version, bool):
        return data
    if version > SCHEMA_VERSION:
        raise NewerVersion(
            f"a result of version {SCHEMA_VERSION} or older",
            f"version {version}, written by a newer workbook",
            "read it with that one, or bring this one up to date",
        )
    while version in STEPS:
        data = {**STEPS[version](data, kind), "schema_version": version + 1}
        version += 1
    return data


def run_result(text: str | bytes) -> RunResult:
    """A run's index from the text of its result.json, of whatever version.

    Raises:
        NewerVersion: a newer workbook wrote it.
        ValueError: not JSON, or not such a record (pydantic's ValidationError is one).
    """
    return RunResult.model_validate(up_to_date(json.loads(text), "run"))


def notebook_result(text: str | bytes) -> NotebookResult:
    """A notebook's result from the text of its NN.result.json, of whatever version; raises as `run_result`."""
    return NotebookResult.model_validate(up_to_date(json.loads(text), "notebook"))
