"""What a cell's results depend on beyond files of this project, as found from the machine where this is called.

A host is its hardware and driver, not its name: two hosts alike in these are one for a result. A stack is every package's version
in the server's environment plus the content of SGLang's own code, so that a local patch counts. A model is what
`lib.model.checkpoint.model_fingerprint` says, modification times of shards included.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
from collections.abc import Mapping
from typing import Any

from lib.batch.matrix import Cell
from lib.batch.tasks import Identity
from lib.errors import BadInput, HostError, WorkbookError
from lib.hosts import local
from lib.model.checkpoint import model_fingerprint
from lib.params import HostParams, Profile, ServerParams, SweepParams, validated
from lib.server import remote
from lib.server.control import Control
from lib.server.launch import RELEVANT_ENVIRONMENT, VOLATILE
from lib.server.spec import resolve_model, resolve_python

#: Of a host's description, what a result depends on.
HARDWARE = ("cpu", "cpu_cores", "cpu_features", "memory_bytes")
OF_A_GPU = ("name", "memory_total_mib", "driver_version", "compute_cap")
#: Asked of an interpreter: all versions, and the content of the packages that serve. Runs with Python 3.7 or newer.
_ASK_STACK = """
import hashlib, importlib.metadata as m, json, os
found, code = sorted(str(d.metadata["Name"]) + "==" + str(d.version) for d in m.distributions()), hashlib.sha256()
for name in ("sglang", "sgl-kernel", "sglang-kernel", "flashinfer-python"):
    try:
        files = m.distribution(name).files or []
    except m.PackageNotFoundError:
        continue
    for file in sorted(files, key=str):
        path = str(file.locate())
        if path.endswith((".py", ".so", ".json", ".cu", ".cuh")) and os.path.isfile(path):
            code.update(str(file).encode())
            if path.endswith(".so"):
                code.update(str(os.path.getsize(path)).encode())
            else:
                with open(path, "rb") as opened:
                    code.update(opened.read())
try:
    version = m.version("sglang")
except m.PackageNotFoundError:
    version = None
print(json.dumps({"sglang": version, "packages_sha256": hashlib.sha256("\\n".join(found).encode()).hexdigest(),
    "code_sha256": code.hexdigest()}))
"""


def identify(cell: Cell) -> Identity:
    """What a cell depends on, by asking this machine, or the host that its profile names.

    Returns:
        `host`: HARDWARE and the GPUs; `stack` and `model` by number of the notebook, which may bring servers of their own.

    Raises:
        BadInput: no such model or interpreter.
        HostError: the host can't be asked.
    """
    profile: Profile = validated(Profile, cell.profile, cell.id)
    stack: dict[str, Any] = {}
    model: dict[str, Any] = {}
    for number, params in cell.params.items():
        servers = _servers(profile, number, params)
        stack[number] = [_stack(profile.host, one) for one in servers]
        model[number] = [_model(profile.host, one) for one in servers]
    found = json.loads(_described(profile.host.model_dump_json()))
    return Identity(host=hardware(found), stack=stack, model=model)


@functools.lru_cache(maxsize=4096)
def _described(on: str) -> str:
    place = remote.place_of(HostParams.model_validate_json(on))
    return json.dumps(place.view().describe() if place else local.describe())


def hardware(described: Mapping[str, Any]) -> dict[str, Any]:
    """The lasting part of a host's description (`lib.hosts.local.describe`)."""
    gpus = [{name: gpu.get(name) for name in OF_A_GPU} for gpu in described.get("gpus") or []]
    lasting = {name: described.get(name) for name in HARDWARE}
    if isinstance(
        memory := lasting["memory_bytes"], int
    ):  # what the kernel leaves differs by some KB between like machines
        lasting["memory_bytes"] = round(memory / 2**30) * 2**30
    return {**lasting, "gpus": gpus}


def this_host() -> dict[str, Any]:
    """The hardware of this machine."""
    return hardware(local.describe())


def _servers(profile: Profile, number: str, params: Mapping[str, Any]) -> list[ServerParams]:
    """The servers that a notebook may launch, the profile's first; a sweep's candidates may bring other environments."""
    own = {**profile.server.model_dump(), **(params.get("server") or {})}
    servers = [ServerParams.model_validate(own)]
    if number == "02":
        for candidate in SweepParams.model_validate({**params, "profile": "x"}).candidates:
            if candidate.python or candidate.model:
                changed = {"python": candidate.python, "model": candidate.model}
                servers.append(servers[0].model_copy(update={k: v for k, v in changed.items() if v}))
    return servers


def _stack(on: HostParams, server: ServerParams) -> dict[str, Any]:
    if server.attach:
        return {"attached": _attached(on, server.attach, server.api_key_env)}
    inherited = {n: v for n, v in os.environ.items() if RELEVANT_ENVIRONMENT.match(n)} if not on.remote else {}
    digest = hashlib.sha256(json.dumps(sorted(inherited.items())).encode()).hexdigest()
    python = server.python if on.remote else str(resolve_python(server.python))
    return {**_installed(on, python), "environment_sha256": digest}


@functools.lru_cache(maxsize=64)
def _attached_info(url: str, api_key_env: str | None) -> str:
    info = Control(url, api_key_env).server_info()
    lasting = {k: v for k, v in info.items() if k not in VOLATILE or k == "random_seed"}
    return hashlib.sha256(json.dumps(lasting, sort_keys=True, default=str).encode()).hexdigest()


def _attached(on: HostParams, url: str, api_key_env: str | None) -> dict[str, Any]:
    """Which server answers there: a restarted one is another one. One that can't be asked is known by its URL alone."""
    if on.remote:
        return {"url": url, "reason": "behind another host; not asked"}
    try:
        return {"url": url, "server_info_sha256": _attached_info(url, api_key_env)}
    except WorkbookError as error:
        return {"url": url, "reason": str(error)[:200]}


def _installed(on: HostParams, python: str) -> dict[str, Any]:
    text = _asked(on.model_dump_json(), python)
    return dict(json.loads(text))


@functools.lru_cache(maxsize=256)
def _asked(on: str, python: str) -> str:
    place = remote.place_of(HostParams.model_validate_json(on))
    where = f" on {place.host.name}" if place else ""
    try:
        if place:
            said = place.host.run([python, "-c", _ASK_STACK], deadline_s=120.0)
            code, out, error = (0 if said.ok else 1), said.text, said.error_text
        else:
            done = subprocess.run([python, "-c", _ASK_STACK], capture_output=True, text=True, timeout=120)
            code, out, error = done.returncode, done.stdout, done.stderr
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise BadInput(f"server.python runs{where}: {python}", str(failure), "correct server.python") from failure
    except HostError as failure:
        raise BadInput(f"server.python runs{where}: {python}", failure.found, "correct server.python") from failure
    if code:
        last = (error.strip().splitlines() or ["no answer"])[-1]
        raise BadInput(f"server.python runs{where}: {python}", last, "correct server.python")
    return out


def _model(on: HostParams, server: ServerParams) -> dict[str, Any]:
    if server.attach:
        return {"reason": "the model files of an attached server are not read"}
    return dict(json.loads(_fingerprint(on.model_dump_json(), server.model or "")))


@functools.lru_cache(maxsize=256)
def _fingerprint(on: str, model: str) -> str:
    place = remote.place_of(HostParams.model_validate_json(on))
    folder = remote.mirror_checkpoint(place.host, model) if place else resolve_model(model)
    found = model_fingerprint(folder)
    return json.dumps({"sha256": found.get("sha256"), "shards": found.get("shards")}, sort_keys=True)
