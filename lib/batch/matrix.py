"""A matrix file, `params/matrix/NAME.yaml`: models x hosts x configurations, expanded to cells with a stable id.

    cell = profile of the model
           + keys of the model + keys of the host + keys of the configuration + keys of each `include` that fits it

Every cell is one profile of its own (docs/batch.md); its id is `NAME.MODEL.HOST.CONFIGURATION` and names its folder below
outputs/, so that `workbook history`, `compare` and `prune` take it as any other profile.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from lib.errors import BadParams
from lib.params import MODELS, HostParams, Profile, refuse_secrets, validated
from lib.records import Record

#: A name on an axis: no dot, because dots join the names of a cell's id.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_=+-]{1,60}$")]
Number = Literal["01", "02", "03", "04", "05", "06"]
#: What a file that leaves an axis out has on it.
ONLY_ONE = {"models": "model", "hosts": "here", "configurations": "as-is"}


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Overlay(_Part):
    """Keys that go over the profile's: `server` and `known_answer` key by key, `flags` and `environment` one by one."""

    server: dict[str, Any] = {}
    known_answer: dict[str, Any] = {}
    params: dict[Number, dict[str, Any]] = Field(default={}, description="keys over NN.yaml, by number of the notebook")


class Model(Overlay):
    """One row of the first axis: a profile, perhaps with keys over it."""

    profile: str | None = Field(default=None, description="a name under params/, or a folder; None: the file's")


class HostRow(Overlay):
    """One row of the second axis: where it runs, and what of that host a cell takes for itself."""

    host: HostParams | None = Field(default=None, description="as in profile.yaml; None: the profile's own")
    gpus: int = Field(default=0, ge=0, description="GPUs that a cell takes; 0: none")
    shared: bool = Field(default=False, description="True: other tasks may run there meanwhile; False: one at a time")


class Chosen(_Part):
    """Which cells are meant: those that have all the names given."""

    model: Name | None = None
    host: Name | None = None
    configuration: Name | None = None


class Exclusion(Chosen):
    """Cells that are left out, and why."""

    why: str = Field(min_length=1)


class Inclusion(Chosen, Overlay):
    """Keys that go over the cells that fit, and perhaps other notebooks there."""

    notebooks: list[Number] | None = None


class MatrixFile(_Part):
    """A matrix file as written."""

    title: str
    profile: str | None = Field(default=None, description="profile of every model that names none")
    notebooks: list[Number] | None = Field(
        default=None, description="numbers; None: all that the profile has a file for"
    )
    models: dict[Name, Model] = {}
    hosts: dict[Name, HostRow] = {}
    configurations: dict[Name, Overlay] = {}
    exclude: list[Exclusion] = []
    include: list[Inclusion] = []


class Resources(Record):
    """What a task takes of a host while it runs, so that no host is shared by two measurements."""

    host: str = Field(description="name on the matrix's axis of hosts; a worker that serves it says so")
    gpus: int = 0
    exclusive: bool = Field(default=True, description="nothing else may run there meanwhile")


class Cell(Record):
    """One combination: a whole profile, and the parameters of its notebooks, nothing left to look up."""

    id: str
    model: str
    host: str
    configuration: str
    profile: dict[str, Any] = Field(description="content of profile.yaml")
    params: dict[str, dict[str, Any]] = Field(description="number to content of NN.yaml, without `profile`, in order")
    resources: Resources


class LeftOut(Record):
    """A combination that the file leaves out, and why."""

    id: str
    why: str


def profiles_named(matrix: MatrixFile) -> list[str]:
    """The profiles that a matrix stands on, each once.

    Raises:
        BadParams: a model names none and the file names none either.
    """
    named = [model.profile or matrix.profile for model in matrix.models.values()] or [matrix.profile]
    if None in named:
        lacking = [key for key, model in matrix.models.items() if not (model.profile or matrix.profile)]
        raise BadParams(
            "a profile for every model",
            f"none for {', '.join(lacking) or 'the matrix'}",
            "write profile: NAME in the file",
        )
    return list(dict.fromkeys(str(name) for name in named))


def expand(
    matrix: MatrixFile, name: str, profiles: Mapping[str, Mapping[str, Mapping[str, Any]]]
) -> tuple[list[Cell], list[LeftOut]]:
    """The cells of a matrix, in the order of its file, and the combinations that it leaves out.

    Args:
        matrix: the file.
        name: what it is called; the first part of every id.
        profiles: by profile: `profile` (content of profile.yaml) and NN (content of NN.yaml).

    Raises:
        BadParams: every fault of every cell at once: unknown names, keys, types, secrets; or no cell is left.

    Example: two models, one host, three configurations, one excluded: five cells.
    """
    axes = _axes(matrix)
    faults = [*_unknown_names(matrix, axes)]
    of_cells: dict[str, list[str]] = {}
    cells, left_out = [], []
    for model, host, configuration in itertools.product(*axes.values()):
        chosen = {"model": model, "host": host, "configuration": configuration}
        cell_id = ".".join((name, model, host, configuration))
        why = next((e.why for e in matrix.exclude if _fits(e, chosen)), None)
        if why is not None:
            left_out.append(LeftOut(id=cell_id, why=why))
            continue
        try:
            cells.append(_cell(matrix, cell_id, chosen, profiles))
        except BadParams as error:
            for fault in (error.found or error.expected).split("; "):
                of_cells.setdefault(fault, []).append(cell_id)
    faults += [f"{fault} (in {_some(ids)})" for fault, ids in of_cells.items()]
    if not cells and not faults:
        faults.append("every combination is excluded")
    if faults:
        raise BadParams(f"matrix {name} is valid", "; ".join(faults), "correct these")
    return cells, left_out


def _axes(matrix: MatrixFile) -> dict[str, list[str]]:
    return {
        "model": list(matrix.models) or [ONLY_ONE["models"]],
        "host": list(matrix.hosts) or [ONLY_ONE["hosts"]],
        "configuration": list(matrix.configurations) or [ONLY_ONE["configurations"]],
    }


def _some(ids: Sequence[str]) -> str:
    return ids[0] if len(ids) == 1 else f"{ids[0]} and {len(ids) - 1} more"


def _unknown_names(matrix: MatrixFile, axes: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """What `exclude` and `include` name that is on no axis; an exclusion that fits nothing would silently do nothing."""
    for kind, rows in (("exclude", matrix.exclude), ("include", matrix.include)):
        for place, row in enumerate(rows):
            for axis, known in axes.items():
                named = getattr(row, axis)
                if named is not None and named not in known:
                    near = difflib.get_close_matches(named, known, 1)
                    hint = f", did you mean {near[0]!r}?" if near else f", known: {', '.join(known)}"
                    yield f"{kind}[{place}].{axis}: {named!r} is on no axis{hint}"


def _fits(row: Chosen, chosen: Mapping[str, str]) -> bool:
    return all(getattr(row, axis) in (None, value) for axis, value in chosen.items())


def _over(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """Keys over keys; `flags` and `environment` one by one, as a notebook's own `server` keys are (lib.params)."""
    merged = dict(base)
    for key, value in overlay.items():
        one_by_one = key in ("flags", "environment") and isinstance(value, Mapping)
        merged[key] = {**(merged.get(key) or {}), **value} if one_by_one else value
    return merged


def _cell(
    matrix: MatrixFile,
    cell_id: str,
    chosen: Mapping[str, str],
    profiles: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> Cell:
    model = matrix.models.get(chosen["model"], Model())
    host = matrix.hosts.get(chosen["host"], HostRow())
    configuration = matrix.configurations.get(chosen["configuration"], Overlay())
    fitting = [row for row in matrix.include if _fits(row, chosen)]
    files = profiles[str(model.profile or matrix.profile)]
    profile = dict(files["profile"])
    params = {number: dict(files[number]) for number in _numbers(matrix, fitting, files)}
    for overlay in (model, host, configuration, *fitting):
        profile["server"] = _over(profile.get("server") or {}, overlay.server)
        profile["known_answer"] = {**(profile.get("known_answer") or {}), **overlay.known_answer}
        for number, keys in overlay.params.items():
            if number in params:
                params[number] = _over(params[number], keys)
    if host.host is not None:
        profile["host"] = host.host.model_dump(mode="json", exclude_unset=True)
    for keys in params.values():
        keys.pop("profile", None)
    _check(profile, params)
    resources = Resources(host=chosen["host"], gpus=host.gpus, exclusive=not host.shared)
    return Cell(id=cell_id, profile=profile, params=params, resources=resources, **chosen)


def _numbers(matrix: MatrixFile, fitting: Sequence[Inclusion], files: Mapping[str, Any]) -> list[str]:
    there = sorted(number for number in files if number in MODELS)
    wanted: Sequence[str] = matrix.notebooks if matrix.notebooks is not None else there
    for row in fitting:
        wanted = row.notebooks if row.notebooks is not None else wanted
    if missing := [number for number in wanted if number not in there] or (["any notebook"] if not wanted else []):
        raise BadParams("a file NN.yaml of the profile for every notebook", f"no file for {', '.join(missing)}")
    return [number for number in there if number in wanted]


def _check(profile: Mapping[str, Any], params: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuses a cell as `workbook run` would refuse the profile."""
    faults = []
    try:
        whole: Profile = validated(Profile, profile, "profile.yaml")
        refuse_secrets(whole.server, "the matrix")
        if whole.server.attach is None and whole.server.model is None:
            faults.append("neither server.model nor server.attach")
    except BadParams as error:
        faults.append(str(error.found))
        profile = {}  # said once, not for every notebook
    for number, keys in params.items():
        try:
            validated(MODELS[number], keys, f"{number}.yaml")
            if not profile:
                continue
            merged = {**profile, "server": _over(profile.get("server") or {}, keys.get("server") or {})}
            refuse_secrets(validated(Profile, merged, f"{number}.yaml over profile.yaml").server, f"{number}.yaml")
        except BadParams as error:
            faults.append(f"{number}.yaml: {error.found}")
    if faults:
        raise BadParams("a valid cell", "; ".join(faults))
