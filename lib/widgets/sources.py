"""What widgets start from: the checkpoint, the machine, and the server that runs or ran last, each from a raw record."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lib.errors import NotMeasured, WorkbookError
from lib.hosts import local
from lib.model.capacity import ServerFigure, Wanted
from lib.model.checkpoint import checkpoint_from_configs, read_checkpoint, read_json
from lib.model.facts import Checkpoint
from lib.results import NotebookRun, ServerHandle
from lib.server.launch import LaunchRecord
from lib.server.spec import resolve_model

#: Fields of `Wanted` that a server's /server_info repeats under the same name.
_SETTINGS = ("kv_cache_dtype", "mem_fraction_static", "context_length", "max_total_tokens", "max_running_requests")


@functools.lru_cache(maxsize=8)
def _read(path: str, _mtime: int) -> Checkpoint:
    file = Path(path)
    if file.is_file():
        return checkpoint_from_configs(read_json(file))
    return read_checkpoint(path)


def typed_checkpoint(text: str) -> Checkpoint:
    """The checkpoint that somebody typed: a folder, an embedded model's name, or a config.json without weights.

    Raises:
        BadInput, UnreadableFile, UnknownArchitecture: as one message.
    """
    path = Path(text.strip()).expanduser()
    found = path if path.is_file() else resolve_model(text.strip())
    config = found if found.is_file() else found / "config.json"
    return _read(str(found), config.stat().st_mtime_ns if config.exists() else 0)


def _write_own(folder: Path, model_path: str) -> None:
    local.write_atomic(folder / "checkpoint.json", read_checkpoint(model_path).model_dump_json(indent=1))


def checkpoint_of(run: NotebookRun, handle: ServerHandle) -> tuple[Checkpoint | None, str]:
    """The model of the notebook's server and where it lies; None and why where it can't be read here.

    A launched server's is the raw record that the notebook has anyway. An attached server's folder is read only for
    planning and where server and workbook share this machine; it is kept as raw record `planner-checkpoint`.
    """
    try:
        if not handle.attached:
            return run.checkpoint(handle), str(run.profile.server.model or "")
        path = str((_info(run, handle)[0] or {}).get("model_path") or "")
        if not run.offline and not (local.is_local_url(handle.params.attach or "") and Path(path).is_dir()):
            return None, f"the attached server's model ({path or 'not named'}) is in no folder of this machine"
        taken = run.measure("planner-checkpoint", None, _write_own, keep_errors=True, model_path=path)
        if taken.problem:
            return None, taken.problem
        return Checkpoint.model_validate_json((taken.folder / "checkpoint.json").read_text()), path
    except NotMeasured as error:
        return None, str(error)


def _info(run: NotebookRun, handle: ServerHandle) -> tuple[dict[str, Any] | None, LaunchRecord | None]:
    """/server_info of the handle's latest launch that answered."""
    for launch in reversed(handle.launches()):
        info = run.server_info(launch)
        if info is not None:
            return info, launch
    return None, None


def machine(run: NotebookRun, handle: ServerHandle) -> tuple[float | None, str]:
    """MiB of the smallest GPU (on a CPU: of the host), and the platform."""
    platform, host = run.platform(handle), run.host()
    sizes = [gpu["memory_total_mib"] for gpu in host.get("gpus") or [] if gpu.get("memory_total_mib")]
    if platform == "cpu":
        return (host["memory_bytes"] / (1 << 20) if host.get("memory_bytes") else None), platform
    return (min(sizes) if sizes else None), platform


def server_figure(run: NotebookRun, handle: ServerHandle) -> ServerFigure | None:
    """What the server that runs, or that ran last in this notebook, says of its pool; None if none ever answered."""
    info, launch = _info(run, handle)
    if info is None or launch is None:
        return None
    state: Mapping[str, Any] = (info.get("internal_states") or [{}])[0] or {}
    used: Mapping[str, Any] = state.get("memory_usage") or {}
    log = run.log(launch)
    settings = {name: info.get(name) for name in _SETTINGS} | {"tp": int(info.get("tp_size") or 1)}
    file = run.log_file(launch).parent / "server_info.json"
    return ServerFigure(
        name=launch.launch_id,
        running=launch.state == "attached" or (not run.offline and handle._live is not None),
        path=run.path(file),
        tokens=info.get("max_total_num_tokens") or used.get("token_capacity"),
        kv_gib=used.get("kvcache"),
        weights_gib=used.get("weight"),
        running_requests=state.get("effective_max_running_requests_per_dp"),
        context_length=info.get("context_length") or (log.capacity.context_len if log and log.capacity else None),
        settings=settings | {"sglang_version": launch.sglang_version},
    )


def first_wanted(run: NotebookRun, handle: ServerHandle, server: ServerFigure | None) -> Wanted:
    """The question that the notebook's own configuration answers: the server's settings, else the profile's flags."""
    flags = handle.params.flags
    told: dict[str, Any] = (
        dict(server.settings) if server else {n: flags.get(n) for n in _SETTINGS} | {"tp": handle.tp_size}
    )
    memory, platform = machine(run, handle)
    try:
        version = str(told.get("sglang_version") or run.version(handle))
    except WorkbookError:
        version = Wanted().sglang_version
    given: dict[str, Any] = {name: told.get(name) for name in _SETTINGS if name != "kv_cache_dtype"}
    return Wanted(
        **given,
        kv_cache_dtype=str(told.get("kv_cache_dtype") or "auto"),
        tp=int(told.get("tp") or 1),
        gpu_memory_mib=memory,
        sglang_version=version,
        platform=platform,
    )
