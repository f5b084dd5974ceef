"""Records that cross a file: what a notebook writes and a report reads (schema in docs/result.schema.json).

Every number that a person sees is a `Measured` (value, unit, count, interval, or the reason why there is none), every
verdict names its evidence and the launches it stands on, and *unknown* is `None` with a reason, never 0.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

#: A new form of NotebookResult or RunResult is a new version, with a step in lib/migrations.py.
SCHEMA_VERSION = 2


class Record(BaseModel):
    """Base of all records: frozen, and unknown fields are an error. A record's validator is built at its first use."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="null", defer_build=True)


class Status(StrEnum):
    """What a verdict can say. `fail` is an answer, not an error; `error` means that the workbook itself failed."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    INVALID = "invalid"
    UNSUPPORTED = "unsupported"
    ERROR = "error"


#: Every outcome that a trial of any notebook can have, and the verdict it leads to. One table for the whole workbook.
OUTCOMES: dict[str, Status] = {
    "works": Status.PASS,
    "crashes": Status.FAIL,
    "hangs": Status.FAIL,
    "garbage": Status.FAIL,
    "garbage_under_load": Status.FAIL,
    "numerically_off": Status.FAIL,
    "out_of_memory": Status.FAIL,
    "silently_ignored": Status.FAIL,
    "within_limit": Status.PASS,
    "outside_limit": Status.FAIL,
    "not_enough_data": Status.INCONCLUSIVE,
    "skipped": Status.INCONCLUSIVE,
    "client_bound": Status.INVALID,
    "identity_mismatch": Status.INVALID,
    "no_trace_of_treatment": Status.INVALID,
    "reference_suspect": Status.INVALID,
    "unsupported_here": Status.UNSUPPORTED,
    "workbook_error": Status.ERROR,
}


class Measured(Record):
    """One number as a reader sees it: value, unit, count and 95% interval, or why there is none.

    Example: `Measured(value=36.1, unit="tok/s", n=4, low=34.0, high=38.2)`.
    """

    value: float | int | str | bool | None
    unit: str = ""
    n: int | None = None
    low: float | None = None
    high: float | None = None
    reason: str | None = Field(default=None, description="why value or interval is missing")

    @model_validator(mode="after")
    def _unknown_has_a_reason(self) -> Measured:
        if self.value is None and not self.reason:
            raise ValueError("a missing value needs a reason")
        if any(isinstance(x, float) and not math.isfinite(x) for x in (self.value, self.low, self.high)):
            raise ValueError("a number is finite; what is not is None with a reason")
        return self


class Evidence(Record):
    """Where a claim can be checked: a raw file of the run (relative path), a line in it, and the quoted text."""

    path: str
    line: int | None = None
    quote: str | None = None
    note: str | None = None


class Prediction(Record):
    """What was expected before measuring; it stays when it turns out wrong."""

    id: str
    what: str
    predicted: Measured
    formula: str
    source: str
    measured: Measured | None = None


class Trial(Record):
    """One thing that was tried, with its outcome (a key of OUTCOMES) and its numbers."""

    id: str
    what: str
    outcome: str
    reason: str | None = None
    values: dict[str, Measured] = {}
    evidence: list[Evidence] = []
    launch_ids: list[str] = []
    seconds: float | None = None

    @model_validator(mode="after")
    def _outcome_is_known(self) -> Trial:
        if self.outcome not in OUTCOMES:
            raise ValueError(f"outcome {self.outcome!r} is not one of {sorted(OUTCOMES)}")
        return self

    @property
    def status(self) -> Status:
        """The verdict that this outcome leads to."""
        return OUTCOMES[self.outcome]


class Verdict(Record):
    """One claim, compared with its limit. `pass` needs evidence; a claim about a server needs its launch."""

    id: str
    claim: str
    status: Status
    measured: Measured | None = None
    predicted: Measured | None = None
    limit: str | None = None
    rule: str | None = None
    reason: str
    evidence: list[Evidence] = []
    launch_ids: list[str] = []

    @model_validator(mode="after")
    def _verdict_has_evidence(self) -> Verdict:
        if self.status in (Status.PASS, Status.FAIL) and not self.evidence:
            raise ValueError(f"verdict {self.id}: {self.status} without evidence")
        return self


class ServerIdentity(Record):
    """Which server a number comes from: launched by this workbook, attached, or recorded earlier elsewhere."""

    launch_id: str
    origin: str = Field(description="launched | attached | recorded")
    base_url: str | None = None
    pid: int | None = None
    pid_start_time: float | None = Field(default=None, description="seconds since the epoch")
    boot_id: str | None = None
    started: str | None = None
    ready_s: float | None = Field(default=None, description="seconds from launch to ready")
    sglang_version: str | None = None
    argv: list[str] = []
    environment: dict[str, str] = {}
    resolved_args: dict[str, Any] = {}
    served_model_name: str | None = None
    model: dict[str, Any] = Field(default={}, description="fingerprint of the model's files")
    host: dict[str, Any] = Field(default={}, description="host, GPUs, driver")
    fingerprint: str = Field(default="", description="sha256 over version, arguments, environment, model, host")
    checks: list[str] = Field(default=[], description="what was checked before and after each measurement")


class Provenance(Record):
    """What produced a result: the workbook's commit, Python, packages, parameters and machine."""

    commit: str | None
    dirty: bool | None
    workbook_version: str
    python: str
    packages_sha256: str
    params_sha256: str
    params: dict[str, Any]
    host: dict[str, Any]


class NotebookResult(Record):
    """What one notebook writes as NN.result.json; a run whose notebook leaves none has failed."""

    schema_version: int = Field(default=SCHEMA_VERSION, ge=SCHEMA_VERSION, le=SCHEMA_VERSION)
    notebook: str
    title: str
    question: str
    run_id: str
    profile: str
    started: str
    ended: str
    seconds: float
    server_seconds: float = Field(description="seconds in which a launched server was starting, working or stopping")
    provenance: Provenance
    servers: list[ServerIdentity] = []
    predictions: list[Prediction] = []
    trials: list[Trial] = []
    verdicts: list[Verdict] = []
    recommendation: str
    skipped: list[str] = Field(default=[], description="what was not done, and why")


class NotebookState(Record):
    """One line of a run's index: did the notebook run, how long, and what did it say."""

    notebook: str
    state: str = Field(description="done | failed | interrupted | not_run")
    error: str | None = None
    result: str | None = None
    html: str | None = None
    ipynb: str | None = None
    seconds: float | None = None
    taken_from: str | None = Field(
        default=None, description="CELL/RUN of the earlier run that measured it, where this run took it over unchanged"
    )


class RunResult(Record):
    """result.json of a run: the index over its notebooks."""

    schema_version: int = Field(default=SCHEMA_VERSION, ge=SCHEMA_VERSION, le=SCHEMA_VERSION)
    run_id: str
    profile: str
    started: str
    ended: str | None
    seconds: float | None
    server_seconds: float | None
    state: str = Field(description="done | failed | interrupted | running")
    selected: list[str] = Field(description="numbers of the notebooks that were asked for; a resumed run keeps them")
    notebooks: list[NotebookState]
