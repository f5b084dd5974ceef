"""From `lib.server.failures` and `lib.server.observations` to the names that cases of kind failure_class use.

The input is a log's text, or an object with what somebody observed: an answer, several nodes' lines, events, speeds, an
exit code. `answer` gives every name that follows from it; a case's `expect` asks for some of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lib.audit.evidence import flags_facts
from lib.server.failures import Failure, classify
from lib.server.observations import (
    classify_answer,
    classify_events,
    classify_nodes,
    classify_speeds,
    device_taken,
)

#: Phases of `lib.server.progress` that the cases call by another name.
PHASE_NAMES = {"warming_up": "warmup", "loading_weights": "weight_load"}


def answer(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """All names that the case's input answers, in the shape that `expect` has."""
    given = case["input"]
    seen = (folder / given["file"]).read_bytes().decode("utf-8", "replace") if "file" in given else given["text"]
    if isinstance(seen, str):
        return _of_log(seen)
    return {**_asked(seen.get("args")), **_of_observation(seen)}


#: The backends of a launch line in the order in which garbage or a crash is blamed on them.
BACKENDS = ("moe_runner_backend", "fp4_gemm_runner_backend", "attention_backend")


def _asked(args: Any) -> dict[str, Any]:
    """What the launch line asks for, under SGLang's own names, and the backend that a report is about."""
    if not isinstance(args, str):
        return {}
    asked = {fact.name: fact.value for fact in flags_facts(args) if fact.how == "asked"}
    backend = next((asked[name] for name in BACKENDS if name in asked), None)
    return asked | ({"backend": backend} if backend else {})


def _of_observation(seen: dict[str, Any]) -> dict[str, Any]:
    if "events" in seen:
        return _names(classify_events(seen["events"]))
    if "observed" in seen:
        return _names(classify_speeds(seen["observed"]))
    nodes = {key: lines for key, lines in seen.items() if key.startswith("node")}
    if nodes:
        found = classify_nodes(nodes, seen.get("exit_codes", ()), seen.get("finished_order", ()))
        if found is None:
            return {"class": "no_failure"}
        names = {"exit_codes": found.exit_codes, "root_rank": found.root_node, "root_error": found.failure.root_cause}
        return {**_names(found.failure), **names}
    if "log" in seen or "exit_code" in seen:
        lines = [*seen.get("log", []), *seen.get("dmesg", [])]
        return _names(classify(lines, exit_code=seen.get("exit_code"), ready=seen.get("ready")))
    return _names(classify_answer(seen.get("response", seen), seen.get("http", 200)))


def _of_log(text: str) -> dict[str, Any]:
    lines = text.splitlines()
    names = _names(classify(lines))
    taken = device_taken(lines)
    if taken is not None:
        names["gpu_used"] = taken != "CPU"
    return names


def _names(failure: Failure | None) -> dict[str, Any]:
    if failure is None:
        return {"class": "no_failure"}
    values = failure.values
    names: dict[str, Any] = {
        "class": failure.failure_class,
        "phase": PHASE_NAMES.get(failure.phase or "", failure.phase),
        "cause": failure.root_cause,
        "cause_known": failure.cause_known,
        "root_cause_in_this_log": failure.cause_known,
        "graph_related": failure.graph_related,
        "hardware_fault": failure.hardware_fault,
        "gpu_memory_oom": failure.gpu_memory_oom,
        "process_exited": failure.exit_seen,
        "exit_code": failure.exit_code,
        "oom_killer": values.get("oom_killer"),
        "http": values.get("http"),
        "queue_length": values.get("queue_length"),
        "health_http": values.get("health_http"),
        "seconds_since_heartbeat": values.get("seconds_since_heartbeat"),
        "threshold_s": values.get("threshold_s"),
        "healthy_tok_s": values.get("healthy_tok_s"),
        "degraded_tok_s": values.get("degraded_tok_s"),
        "threshold_used": values.get("threshold"),
        "restored_by": "restart" if values.get("restored_by_restart") else None,
    }
    if "ok_before_hang" in values:
        qps = values.get("qps")
        names["ok_before_hang"] = {f"{qps:g}qps": values["ok_before_hang"]} if isinstance(qps, float) else {}
    return {name: value for name, value in names.items() if value is not None}
