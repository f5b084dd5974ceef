"""Whether a deployment's arguments start at all on its version, as far as that is known. Pure."""

from __future__ import annotations

import re
from typing import Any

from lib.audit.facts import DEFAULT_NOTE, FACTS, WRITTEN_AS, Fact, Facts, version_key
from lib.errors import BadInput
from lib.server.flags import Gpu, ModelFacts, PredictedFailure, check_arguments


def has_run(facts: Facts) -> bool:
    """Whether any of the facts was seen in a process of this deployment: its log, its answers or its metrics."""
    return any(
        FACTS[name].belongs == "process" and any(fact.how in ("measured", "read") for fact in seen)
        for name, seen in facts.sightings.items()
    )


def _spelling(name: str, fact: Fact) -> str:
    """The flag as somebody wrote it: argparse knows no other name; a recommended change is written as the version
    needs it."""
    if fact.source == "change":
        return name
    note = fact.note or ""
    return note.removeprefix(WRITTEN_AS) if note.startswith(WRITTEN_AS) else "--" + name.replace("_", "-")


def launch_faults(facts: Facts) -> list[PredictedFailure]:
    """What this version would refuse to start with, by argparse for what somebody wrote and by rules for all arguments.

    Arguments that a log or /server_info shows may be SGLang's own choice under the spelling of that version: argparse
    has no say about them.
    """
    version = facts.value("sglang_version")
    if version_key(version) is None:
        return []
    written: dict[str, Any] = {}
    resolved: dict[str, Any] = {}
    for name, kind in FACTS.items():
        fact = facts.best(name)
        if kind.belongs != "argument" or fact is None or fact.value in (None, False) or fact.note == DEFAULT_NOTE:
            continue
        if name != "model_path":
            resolved[name] = fact.value
            if fact.source in ("flags", "change"):
                written[_spelling(name, fact)] = fact.value
    if facts.value("platform") == "cpu":
        resolved["device"] = "cpu"
    recurrent = facts.value("recurrent")
    model = ModelFacts(hybrid=None if recurrent is None else recurrent != "none")
    sm = re.fullmatch(r"(\d+)\.(\d)", str(facts.value("gpu_sm")))
    gpu = Gpu(sm=int(sm[1] + sm[2])) if sm else None
    found: dict[str, PredictedFailure] = {}
    for flags in (written, resolved):
        try:
            told = check_arguments({"model_path": "model", "flags": flags}, str(version), gpu, model, strict=False)
        except BadInput:
            continue
        for fault in told:
            if fault.outcome != "silently_ignored" and (flags is written or not fault.id.startswith("argparse")):
                found.setdefault(fault.id, fault)
    return list(found.values())
