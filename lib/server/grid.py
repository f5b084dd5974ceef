"""A grid of backends as an ordered list of trials with stable ids, and which of them may run side by side.

    axes x links - exclusions, and named candidates  -->  plan()   -->  trials, the reference first
    trials and free GPUs                             -->  waves()  -->  groups that run at the same time

A trial's id depends on its own values alone: another order of axes or values, more values, or a new axis whose value is
null (as the profile) leave it unchanged, so that a resumed sweep finds what it has done.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lib.errors import BadParams
from lib.params import Candidate, SweepParams
from lib.records import Record
from lib.server.flags import AXES

ENVIRONMENT = "env:"
#: An id is a folder's name; what is longer is cut and gets a hash.
ID_CHARACTERS = 100


class Planned(Record):
    """One trial before its launch: what is laid over the profile, and which links added to it."""

    id: str
    flags: dict[str, Any] = {}
    environment: dict[str, str] = {}
    python: str | None = None
    model: str | None = None
    ready_timeout_s: float | None = None
    quiet_timeout_s: float | None = None
    compile_timeout_s: float | None = None
    linked: list[str] = []

    @property
    def what(self) -> str:
        """The trial in words, as tables show it."""
        parts = [f"{k}={v}" for k, v in {**self.flags, **self.environment}.items() if v is not None]
        parts += [f"{name}={value}" for name, value in (("python", self.python), ("model", self.model)) if value]
        return ", ".join(parts) or "as the profile"


class LeftOut(Record):
    """A point of the grid that is not tried, and why."""

    what: str
    why: str


class Plan(Record):
    """The trials in the order in which they are launched, the reference first, and what was left out."""

    trials: list[Planned]
    left_out: list[LeftOut]


def plan(params: SweepParams) -> Plan:
    """The trials of a sweep: named candidates, then the grid; the reference first, then what differs least from it.

    Raises:
        BadParams: no trial, ids twice, no such reference (or it is left out), a link that contradicts an axis, `when` on
            a flag or a value that no trial has; all faults at once.

    Example: axes {moe_runner: [triton, cutlass]} gives `moe_runner_backend=triton` and `moe_runner_backend=cutlass`.
    """
    faults: list[str] = []
    made = [*(_of_candidate(c) for c in params.candidates), *_points(params.axes, faults)]
    faults += _faults_of_conditions(params, made)
    kept, left_out = [], []
    for trial in made:
        why = next((e.why for e in params.exclude if _holds(e.when, trial)), None)
        if why:
            left_out.append(LeftOut(what=trial.id, why=why))
        else:
            kept.append(_linked(trial, params, faults))
    ids = [trial.id for trial in kept]
    faults += [f"id {name!r} twice" for name in sorted({i for i in ids if ids.count(i) > 1})]
    reference = next((trial for trial in kept if trial.id == params.reference), None)
    if reference is None:
        was = next((f" (left out: {one.why})" for one in left_out if one.what == params.reference), "")
        near = difflib.get_close_matches(params.reference, ids, 1, 0.4)
        hint = f", did you mean {near[0]!r}?" if near else f"; the trials: {', '.join(ids[:8]) or 'none'}"
        faults.append(f"the reference {params.reference!r} is no trial{was}{hint}")
    unknown = [i for i in params.verify if i not in ids] if not isinstance(params.verify, str) else []
    faults += [f"verify names {name!r}, which is no trial" for name in unknown]
    if faults or reference is None:
        raise BadParams("a sweep's candidates and axes that make trials", "; ".join(faults), "correct these keys")
    if not params.cross:
        named = {c.id for c in params.candidates}
        far = [t for t in kept if t.id not in named and _distance(t, reference, params.axes) > 1]
        left_out += [LeftOut(what=t.id, why="more than one axis away from the reference (cross: false)") for t in far]
        kept = [t for t in kept if t not in far]
    kept, doubles = _without_doubles(sorted(kept, key=lambda t: t.id != reference.id))
    ordered = sorted(kept, key=lambda t: (t.id != reference.id, _changes(t, reference)))
    return Plan(trials=ordered, left_out=[*left_out, *doubles])


def _of_candidate(c: Candidate) -> Planned:
    return Planned(**c.model_dump())


def field_of(axis: str) -> str:
    """The flag that an axis sets: the first field of an axis of docs/backends.md, else the flag itself."""
    return AXES[axis][0] if axis in AXES else axis


def _points(axes: Mapping[str, Sequence[Any]], faults: list[str]) -> list[Planned]:
    """Every point of the grid, in the order in which axes and values are given."""
    empty = [name for name, values in axes.items() if not values]
    faults += [f"axis {name!r} has no value" for name in empty]
    fields = [field_of(name) for name in axes]
    faults += [f"two axes set {name}" for name in sorted({f for f in fields if fields.count(f) > 1})]
    if not axes or empty:
        return []
    made = []
    for values in itertools.product(*axes.values()):
        point = dict(zip(fields, values, strict=True))
        made.append(
            Planned(
                id=point_id(point),
                flags={k: v for k, v in point.items() if not k.startswith(ENVIRONMENT) and v is not None},
                environment={
                    k.removeprefix(ENVIRONMENT): str(v)
                    for k, v in point.items()
                    if k.startswith(ENVIRONMENT) and v is not None
                },
            )
        )
    return made


def point_id(point: Mapping[str, Any]) -> str:
    """The id of a point: its values that are not null, by name; a folder's name, the same on every day and host.

    Example: `point_id({"moe_runner_backend": "triton", "attention_backend": None})` is "moe_runner_backend=triton".
    """
    parts = [f"{name.replace(':', '.')}={_word(value)}" for name, value in sorted(point.items()) if value is not None]
    text = "+".join(parts) or "profile"
    plain = re.sub(r"[^A-Za-z0-9_.=+-]", "_", text)
    if plain == text and len(text) <= ID_CHARACTERS:
        return text
    return f"{plain[: ID_CHARACTERS - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _value(name: str, trial: Planned) -> Any:
    """What a trial has under a name of `when`: a flag, an axis, or env:NAME; None where it is as the profile."""
    if name.startswith(ENVIRONMENT):
        return trial.environment.get(name.removeprefix(ENVIRONMENT))
    return trial.flags.get(field_of(name))


def _holds(when: Mapping[str, Any], trial: Planned) -> bool:
    return all(_value(name, trial) == value for name, value in when.items())


def _linked(trial: Planned, params: SweepParams, faults: list[str]) -> Planned:
    flags, environment, why = dict(trial.flags), dict(trial.environment), []
    for link in params.links:
        if not _holds(link.when, trial):
            continue
        for name, value in link.flags.items():
            if name in trial.flags and trial.flags[name] != value:
                faults.append(f"{trial.id}: a link sets {name}={value}, the trial itself has {trial.flags[name]}")
            flags[name] = value
        for name, text in link.environment.items():
            if name in trial.environment and trial.environment[name] != text:
                faults.append(f"{trial.id}: a link sets {name}={text}, the trial itself {trial.environment[name]}")
            environment[name] = text
        why.append(link.why)
    return trial.model_copy(update={"flags": flags, "environment": environment, "linked": why})


def _faults_of_conditions(params: SweepParams, made: Sequence[Planned]) -> list[str]:
    """Conditions that no trial can meet: a misspelt link would silently do nothing."""
    faults = []
    for kind, conditions in (("link", params.links), ("exclude", params.exclude)):
        for condition in conditions:
            for name, value in condition.when.items():
                found = {_word(v) for trial in made if (v := _value(name, trial)) is not None}
                if value is not None and _word(value) not in found:
                    near = difflib.get_close_matches(_word(value), found, 1, 0.4)
                    hint = (
                        f", did you mean {near[0]!r}?" if near else f"; there: {', '.join(sorted(found)) or 'nothing'}"
                    )
                    faults.append(f"{kind}: no trial has {name}={_word(value)}{hint}")
    return faults


def _changes(trial: Planned, reference: Planned) -> int:
    """How many flags and variables differ from the reference's."""
    mine, its = ({**t.flags, **t.environment, "python": t.python, "model": t.model} for t in (trial, reference))
    return sum(mine.get(name) != its.get(name) for name in {*mine, *its})


def _distance(trial: Planned, reference: Planned, axes: Mapping[str, Any]) -> int:
    return sum(_value(name, trial) != _value(name, reference) for name in axes)


def _without_doubles(trials: Sequence[Planned]) -> tuple[list[Planned], list[LeftOut]]:
    kept: dict[str, Planned] = {}
    left_out = []
    for trial in trials:
        key = repr([sorted(trial.flags.items(), key=str), sorted(trial.environment.items()), trial.python, trial.model])
        if key in kept:
            left_out.append(LeftOut(what=trial.id, why=f"the same launch as {kept[key].id}"))
        else:
            kept[key] = trial
    return list(kept.values()), left_out


def waves(needs: Mapping[str, int], free: Sequence[str]) -> list[dict[str, list[str]]]:
    """Groups of trials that run at the same time, each with GPUs of its own, in the order of `needs`.

    First fit: a trial goes into the first group that has enough GPUs left, but the first trial, the reference, into the
    first. Without GPUs, with one, or where a trial needs more than there are, each has a group of its own and no GPUs
    are assigned. In a group all start and are questioned at once; speeds are measured one after the other.

    Args:
        needs: GPUs by trial id, the reference first.
        free: ids of the free GPUs.

    Example: `waves({"a": 1, "b": 1, "c": 2}, ["0", "1"])` is [{"a": ["0"], "b": ["1"]}, {"c": ["0", "1"]}].
    """
    made: list[dict[str, list[str]]] = []
    left: list[list[str]] = []
    for name, need in needs.items():
        if len(free) < 2 or need < 1 or need > len(free):
            made.append({name: []})
            left.append([])
            continue
        place = next((i for i, gpus in enumerate(left) if len(gpus) >= need), None)
        if place is None:
            made.append({})
            left.append(list(free))
            place = len(made) - 1
        made[place][name], left[place] = left[place][:need], left[place][need:]
    return made


def gpus_needed(flags: Mapping[str, Any]) -> int:
    """GPUs that a launch takes: tensor x pipeline x data parallel (data parallel attention shares the tensor ones).

    Example: `gpus_needed({"tp_size": 4, "dp_size": 2})` is 8.
    """

    def of(*names: str) -> int:
        return int(str(next((flags[n] for n in names if flags.get(n)), 1)))

    dp = 1 if flags.get("enable_dp_attention") else of("dp_size", "dp", "data_parallel_size")
    return of("tp_size", "tp", "tensor_parallel_size") * of("pp_size", "pp", "pipeline_parallel_size") * dp


def seconds_left(done_s: Sequence[float], to_launch: int, running_s: float = 0.0) -> float | None:
    """Seconds until the last trial is done: the mean of those that are, for each that is not; None before the first.

    Example: `seconds_left([40, 60], 3, 20)` is 130: three times 50, less the 20 of the one that runs.
    """
    if not done_s:
        return None
    return max(0.0, sum(done_s) / len(done_s) * to_launch - running_s)
