"""Was speculation on? What one launch leaves behind: its log, what it resolved, its requests' counts, its process.

The counts of each request are the only exact trace. The log shows the draft's weights and pool, `/server_info` the
algorithm that was resolved; they must agree with the counts. A server can also be made to lie: simulated acceptance
writes fabricated text, thresholds below 1 accept what the target would not have said.

Source: SGLang 0.5.10 to 0.5.23 environ.py, speculative/spec_utils.py, scheduler.set_internal_state; recorded logs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lib.records import Record
from lib.server.acceptance import Acceptance
from lib.server.log_records import ServerLog

#: Algorithms whose draft has weights and a KV pool of its own (NGRAM drafts from a table).
WITH_DRAFT_MODEL = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "DFLASH", "DSPARK")
SIMULATED = "SGLANG_SIMULATE_ACC_LEN"
THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")


class LaunchTrace(Record):
    """What shows whether one launch speculated; `problems` make its arm invalid, `notes` are said beside its numbers.

    `synthetic`: where acceptance is simulated (also a problem); `lossy`: which threshold is below 1 (its speed is real, its
    answers are not the target's).
    """

    launch_id: str
    treated: bool
    process: str | None
    identity_checks: int
    algorithm: str | None
    algorithm_known: bool
    draft_weights: bool | None
    draft_weights_line: int | None = None
    draft_pool: bool | None
    draft_pool_line: int | None = None
    requests: int
    without_steps: int
    verify_steps: int
    max_running: int | None = None
    synthetic: str | None = None
    lossy: str | None = None
    problems: list[str] = []
    notes: list[str] = []

    @property
    def ok(self) -> bool:
        return not self.problems


def simulated_acceptance(environment: Mapping[str, str], *answers: Any) -> str | None:
    """Where SGLANG_SIMULATE_ACC_LEN is set above 0, None if it is nowhere seen.

    Args:
        environment: of the launch. answers: what the server said, where it exposes its environment.

    Example: `simulated_acceptance({"SGLANG_SIMULATE_ACC_LEN": "3"})` names the launch's environment.
    """
    if _above_zero(environment.get(SIMULATED)):
        return f"{SIMULATED}={environment[SIMULATED]} in the launch's environment"
    for answer in answers:
        for path, value in _walk(answer):
            if path.rsplit(".", 1)[-1] == SIMULATED and _above_zero(value):
                return f"{SIMULATED}={value} in /server_info ({path})"
            if isinstance(value, str) and f"{SIMULATED}=" in value:
                told = value.split(f"{SIMULATED}=", 1)[1].split()[0].strip("'\",;")
                if _above_zero(told):
                    return f"{SIMULATED}={told} in /server_info ({path})"
    return None


def _above_zero(value: Any) -> bool:
    try:
        return float(value) > 0
    except (TypeError, ValueError):
        return False


def lossy_thresholds(*answers: Any) -> str | None:
    """The first acceptance threshold below 1 in what was asked or what the server said, with its place; None if none.

    A threshold below 1 accepts drafts that the target would not have sampled. It can be changed while a server runs, so
    the answers before and after a measurement are both read.
    """
    for answer in answers:
        for path, value in _walk(answer):
            if path.rsplit(".", 1)[-1] in THRESHOLDS and isinstance(value, int | float) and value < 1.0:
                return f"{path} = {value}"
    return None


def _walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _walk(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and len(value) < 100:
        for place, inner in enumerate(value):
            yield from _walk(inner, f"{path}[{place}]")
    else:
        yield path, value


def trace(
    launch_id: str,
    treated: bool,
    acceptance: Acceptance,
    *,
    log: ServerLog | None = None,
    info: Mapping[str, Any] | None = None,
    end: Mapping[str, Any] | None = None,
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    process: str | None = None,
    identity_checks: int = 0,
    argv: Sequence[str] = (),
) -> LaunchTrace:
    """Puts a launch's traces together and says what is wrong with them.

    Args:
        acceptance: the counts of all requests of this launch.
        info, end: /server_info at readiness and at the end. flags, environment, argv: what was asked.

    Example: a treated launch whose requests have no verification step is a problem, whatever its log says.
    """
    known = info is not None or (log is not None and bool(log.server_args))
    algorithm = (info or {}).get("speculative_algorithm") if info is not None else None
    if info is None and log is not None:
        algorithm = log.server_args.get("speculative_algorithm")
    algorithm = None if algorithm in (None, "None", "none", "") else str(algorithm)
    weights = next((w for w in log.weights if w.role == "draft"), None) if log else None
    pool = next((p for p in log.kv_pools if p.role == "draft"), None) if log else None
    has_weights = None if log is None or not log.weights else weights is not None
    has_pool = None if log is None or not log.kv_pools else pool is not None
    problems, notes = [], []
    if treated:
        if known and algorithm is None:
            problems.append("/server_info resolves no speculative algorithm")
        if not acceptance.verify_steps:
            problems.append(f"no verification step in {acceptance.requests} requests: speculation was not on")
        elif acceptance.without_steps:
            problems.append(
                f"{acceptance.without_steps} of {acceptance.requests} requests have no verification step: it was on in part"
            )
        if acceptance.verify_steps and algorithm in WITH_DRAFT_MODEL:
            missing = [name for name, seen in (("weights", has_weights), ("pool", has_pool)) if seen is False]
            if missing:
                problems.append(
                    f"steps are counted, but this launch's log shows no draft {' and no draft '.join(missing)}"
                )
    else:
        if algorithm is not None:
            problems.append(f"/server_info resolves {algorithm}: this launch should not speculate")
        if acceptance.verify_steps:
            problems.append(f"{acceptance.verify_steps} verification steps in the arm without speculation")
        if has_weights or has_pool:
            problems.append("the log of the arm without speculation shows a draft")
    problems += [f"impossible counts: {c}" for c in acceptance.contradictions[:3]]
    fake = simulated_acceptance(environment or {}, info, end, {"argv": " ".join(argv)})
    if fake:
        problems.append(f"synthetic: {fake}; acceptance and text are made up")
    lossy = lossy_thresholds(flags, info, end)
    if lossy:
        notes.append(f"lossy: {lossy}; drafts are accepted that the target would not have said")
    if any(str((x or {}).get("speculative_draft_load_format")) == "dummy" for x in (flags, info)):
        problems.append("the draft has random weights (speculative_draft_load_format dummy)")
    if (info or {}).get("speculative_adaptive"):
        notes.append("the number of drafts adapts while it runs (speculative_adaptive)")
    if treated and has_weights is None:
        notes.append("its log was not read: draft weights and pool are not known")
    return LaunchTrace(
        launch_id=launch_id,
        treated=treated,
        process=process,
        identity_checks=identity_checks,
        algorithm=algorithm,
        algorithm_known=known,
        draft_weights=has_weights,
        draft_weights_line=weights.line_no if weights else None,
        draft_pool=has_pool,
        draft_pool_line=pool.line_no if pool else None,
        requests=acceptance.requests,
        without_steps=acceptance.without_steps,
        verify_steps=acceptance.verify_steps,
        max_running=log.capacity.max_running_requests if log and log.capacity else None,
        synthetic=fake,
        lossy=lossy,
        problems=problems,
        notes=notes,
    )
