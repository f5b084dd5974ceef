"""A server on another host: launched there or attached, watched for being the same one, its log redacted as it comes in.

A launched server runs below a guard of the host (lib.hosts.guard), which is what the supervisor is on this machine: it ends the
server and all it started when it is told to, when this process is gone, and when nothing was heard from us for a minute. Its
output comes here line by line and passes the same filter before it first reaches a disk; none is kept there. Questions go through
a forwarded port; load is sent on the host itself (`load_way`), unless the parameters say `load_client: here`.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import json
import math
import os
import random
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lib.errors import (
    BadInput,
    HostError,
    HostTimeout,
    HostUnreachable,
    IdentityError,
    NotStopped,
    PortTaken,
    ServerError,
    WorkbookError,
)
from lib.hosts import local
from lib.hosts.base import Host, Running
from lib.hosts.connect import close_host, host_of, shared_host
from lib.hosts.remote_client import HostSender, held_folder, sender_for
from lib.hosts.view import HostProcess, HostView
from lib.model.cache import cache_dir
from lib.model.checkpoint import _SCALE, JSON_FILES, model_fingerprint, read_safetensors_header
from lib.params import HostParams, ServerParams
from lib.server.attach import AttachedServer, _address
from lib.server.control import Control
from lib.server.flags import launch_argv
from lib.server.launch import (
    GPU_SLACK_MIB,
    GPU_WAIT_S,
    RELEVANT_ENVIRONMENT,
    VOLATILE,
    GpuUse,
    LaunchRecord,
    Server,
    ServerSpec,
    StopProof,
    Watch,
    _redact_argv,
    _Waiter,
    compare_server_info,
    read_record,
    save_record,
)
from lib.server.redact import find_secrets, redact_object, redact_text
from lib.server.supervise import LineFilter

#: A server may hold for weeks; its guard ends it sooner when we are gone.
LONGEST_LIFE_S = 60 * 86400.0


@dataclass(frozen=True)
class Place:
    """A host with the parameters that named it."""

    host: Host
    params: HostParams

    def is_root_by_sudo(self) -> bool:
        """True where commands have to be, and can be, run as root by `sudo -n`."""
        return self.params.sudo and self.host.uid() != 0 and self.host.can_root() is None

    def view(self) -> HostView:
        """What runs there, as root where `sudo -n` gives it."""
        return self.host.view(sudo=self.is_root_by_sudo())

    def read(self, path: str) -> bytes:
        """A file there, as root where it takes that and `sudo -n` gives it."""
        try:
            return self.host.read_file(path, limit=1 << 30)
        except HostError:
            if not self.params.sudo or self.host.uid() == 0:
                raise
            return self.host.read_file(path, limit=1 << 30, sudo=True)

    def client_python(self, server_python: str | None) -> str:
        """The interpreter of the load client."""
        return self.params.client_python or server_python or self.params.python


def place_of(params: HostParams) -> Place | None:
    """The host of the parameters, None where it is this machine."""
    host = shared_host(params)
    return Place(host, params) if host is not None else None


# the checkpoint ----------------------------------------------------------------------------------------------------------
_ASK_MODEL = """
import base64, json, os, struct, sys
folder, names, known = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.stdin.read())
out = {"files": {}, "stats": {}, "folder": os.path.realpath(folder), "is_folder": os.path.isdir(folder)}
for name in sorted(os.listdir(folder)) if out["is_folder"] else ():
    path = os.path.join(folder, name)
    shard = name.endswith(".safetensors")
    if not os.path.isfile(path) or not (shard or name in names or name.endswith(".json")):
        continue
    about = os.stat(path)
    out["stats"][name] = [about.st_size, about.st_mtime_ns]
    if known.get(name) == out["stats"][name]:
        continue
    with open(path, "rb") as file:
        if shard:
            head = file.read(8)
            size = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            out["files"][name] = base64.b64encode(head + file.read(min(size, 100000000))).decode()
        elif about.st_size < 268435456:
            out["files"][name] = base64.b64encode(file.read()).decode()
print(json.dumps(out))
"""
_ASK_BYTES = """
import base64, json, os, sys
folder, out = sys.argv[1], []
for name, begin, size in json.loads(sys.stdin.read()):
    with open(os.path.join(folder, name), "rb") as file:
        file.seek(begin)
        out.append(base64.b64encode(file.read(size)).decode())
print(json.dumps(out))
"""


def mirror_checkpoint(host: Host, path: str) -> Path:
    """A folder here that reads like a checkpoint on a host: small files whole, of each shard its header and scalar k/v scales.

    Shards are sparse files of their true size and time; what wasn't copied reads as zeros and is never looked at. What hasn't
    changed there is not copied again.

    Raises:
        BadInput: no such folder there, or an embedded model's name, which means nothing on another host.
    """
    if not path.startswith("/"):
        raise BadInput(
            "server.model is the absolute path of a checkpoint on the host", repr(path), "name the folder there"
        )
    mirror = cache_dir() / "hosts" / hashlib.sha256(f"{host.name}\0{path}".encode()).hexdigest()[:24]
    mirror.mkdir(parents=True, exist_ok=True)
    known = {f.name: [f.stat().st_size, f.stat().st_mtime_ns] for f in mirror.iterdir() if f.is_file()}
    names = [*JSON_FILES, "chat_template.jinja", "tokenizer.model", "vocab.json", "merges.txt", "tiktoken.model"]
    words = [host.python, "-IS", "-c", _ASK_MODEL, path, json.dumps(names)]
    said = host.run(words, input=json.dumps(known), deadline_s=300.0, limit=1 << 31).check(
        "the model's small files are read"
    )
    answer = json.loads(said.text)
    if not answer["is_folder"]:
        raise BadInput(f"server.model is a checkpoint folder on {host.name}", f"no folder {path!r}", "correct the path")
    for old in set(known) - set(answer["stats"]):
        (mirror / old).unlink()
    wanted: list[tuple[str, int, int]] = []
    for name, data in answer["files"].items():
        file, (size, _) = mirror / name, answer["stats"][name]
        file.write_bytes(base64.b64decode(data))
        if name.endswith(".safetensors"):
            os.truncate(file, size)
            with contextlib.suppress(BadInput):  # whoever reads the checkpoint says what is wrong with it
                header = read_safetensors_header(file)
                wanted += [
                    (name, header.data_start + t.begin, min(8, t.end - t.begin))
                    for key, t in header.tensors.items()
                    if math.prod(t.shape) == 1 and _SCALE.search(key)
                ]
    if wanted:
        words = [host.python, "-IS", "-c", _ASK_BYTES, path]
        said = host.run(words, input=json.dumps(wanted), deadline_s=300.0, limit=1 << 28).check(
            "scalar scales are read"
        )
        for (name, begin, _), data in zip(wanted, json.loads(said.text), strict=True):
            with (mirror / name).open("r+b") as shard:
                shard.seek(begin)
                shard.write(base64.b64decode(data))
    for name in answer["files"]:
        os.utime(mirror / name, ns=(answer["stats"][name][1],) * 2)
    return mirror


# launching ---------------------------------------------------------------------------------------------------------------
class RemoteSpec(ServerSpec):
    """What to launch on another host; `mirror` is where its checkpoint can be read here."""

    machine: dict[str, Any]
    mirror: str

    @property
    def key(self) -> str:
        """As `ServerSpec.key`, with that host in the place of this machine."""
        shards = self.model.get("shards")
        parts = [
            self.argv,
            sorted(self.environment.items()),
            self.sglang_version,
            self.model.get("sha256"),
            shards,
            self.machine,
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def remote_spec(name: str, params: ServerParams, place: Place, strict: bool = True) -> RemoteSpec:
    """The launch that these parameters mean on a host, by the same argv function as everywhere.

    Raises:
        BadInput: no such model or interpreter there, or no SGLang behind it.
        BadParams: flags that this SGLang version doesn't know.
    """
    host = place.host
    if not params.python.startswith("/"):
        do = "name the Python of the SGLang environment there"
        raise BadInput(f"server.python is an absolute path on {host.name}", repr(params.python), do)
    if params.keep:
        raise BadInput(
            "a launched server on another host ends with the run", "server.keep: true", "deploy it as a unit instead"
        )
    mirror = mirror_checkpoint(host, params.model or "")
    version = params.sglang_version
    if version is None:
        code = "import importlib.metadata as m; print(m.version('sglang'))"
        try:
            said = host.run([params.python, "-c", code], deadline_s=60.0)
        except HostError as error:
            raise BadInput(f"server.python runs on {host.name}", str(error.found), "correct server.python") from error
        if not said.ok:
            last = (said.error_text.strip().splitlines() or ["no answer"])[-1]
            raise BadInput(
                f"SGLang installed in the environment of {params.python} on {host.name}", last, "install it there"
            )
        version = said.text.strip()
    configuration = {
        "model_path": params.model,
        "served_model_name": params.served_model_name,
        "flags": params.flags,
        "environment": params.environment,
    }
    launch = launch_argv(configuration, version, params.host, params.port or 1, strict=strict)
    argv = list(launch.argv)
    argv[argv.index("--port") + 1] = "{port}"
    view = place.view()
    return RemoteSpec(
        name=name,
        argv=[params.python, "-m", "sglang.launch_server", *argv],
        environment=launch.environment,
        sglang_version=version,
        model_path=params.model or "",
        model=model_fingerprint(mirror),
        host=params.host,
        port=params.port,
        api_key_env=params.api_key_env,
        ready_timeout_s=params.ready_timeout_s,
        stop_timeout_s=params.stop_timeout_s,
        notes=[note.text for note in launch.notes],
        mirror=str(mirror),
        machine={
            "hostname": view.hostname, "cpu": view.cpu, "cpu_cores": view.cpu_cores, "gpus": [g.uuid for g in view.gpus],
        },
    )  # fmt: skip


def gpu_use(view: HostView) -> GpuUse:
    """GPU memory on a host at one moment."""
    silent = [str(g.index) for g in view.gpus if g.memory_used_mib is None]
    reason = view.gpus_reason or (f"nvidia-smi gives no memory.used for GPU {', '.join(silent)}" if silent else None)
    if reason:
        return GpuUse(reason=reason)
    return GpuUse(
        used_mib={g.uuid: g.memory_used_mib or 0.0 for g in view.gpus},
        users={g.uuid: {str(pid): int(mib or 0) for pid, mib in g.users.items()} for g in view.gpus},
    )


def started_at(view: HostView, process: HostProcess) -> float:
    """When a process started, in seconds since the epoch, by its host's clocks."""
    return view.unix_s - view.uptime_s + process.ticks / view.ticks_per_s


class _Output(threading.Thread):
    """Takes a server's output from its host, filters it and writes the log; `poll()` as of a process that does so."""

    def __init__(self, running: Running, log: Path, secrets: list[str]) -> None:
        super().__init__(name="remote-log", daemon=True)
        self.running, self.log, self.filter = running, log, LineFilter(secrets)
        self.error: str | None = None
        self.lost = 0
        self.start()

    def run(self) -> None:
        try:
            with self.log.open("ab", buffering=0) as file:
                for _, data in self.running.output():
                    self._write(file, self.filter.feed(data))
                self._write(file, self.filter.finish())
        except OSError as error:
            self.error = str(error)

    def _write(self, file: Any, data: bytes) -> None:
        try:
            file.write(data)
        except OSError as error:  # a full disk must not stop the server's output from being taken
            self.error = str(error)
            self.lost += data.count(b"\n")

    def poll(self) -> int | None:
        """None while the server runs."""
        if self.running.ending is None and self.running.connected:
            return None
        self.join(5.0)
        return 0


class RemoteServer(Server):
    """A server that this workbook launched on another host and owns."""

    def __init__(
        self, spec: RemoteSpec, folder: Path, record: LaunchRecord, running: Running, place: Place, secrets: list[str],
        scratch: contextlib.ExitStack | None = None,
    ) -> None:
        self.spec, self.folder, self.record, self.place, self.running = spec, folder, record, place, running
        self._supervisor: Any = _Output(running, folder / "server.log", secrets)
        self._tunnel = scratch or contextlib.ExitStack()
        self._lost: HostUnreachable | None = None
        self.control = Control(record.base_url, spec.api_key_env)
        try:
            near = self._tunnel.enter_context(place.host.forward(record.port, spec.host.strip("[]")))
        except BaseException:
            running.stop()
            self._tunnel.close()
            raise
        self.control.base_url = f"http://127.0.0.1:{near}"

    def status(self) -> dict[str, Any]:
        """What is known of the process there, in the supervisor's words."""
        ending, process = self.running.ending, self.running.process
        status: dict[str, Any] = {
            "state": "running",
            "keep": False,
            "lines_lost": self._supervisor.lost,
            "supervisor_pid": None,
        }
        if process:
            status |= {"pid": process[0], "pgid": process[0], "pid_start_ticks": process[1]}
        if self._supervisor.error:
            status["log_error"] = self._supervisor.error
        if ending is not None:
            status["state"] = "ended"
            if "start_error" in ending:
                status |= {"exit_code": 127, "start_error": f"{ending['start_error']} ({ending.get('file')})"}
            else:
                status["exit_code"] = -ending["signal"] if ending.get("signal") is not None else ending.get("exit_code")
            if ending.get("ended"):
                status["stop_reason"] = ending["ended"]
        elif not self.running.connected:
            status |= {
                "state": "ended",
                "exit_code": None,
                "stop_reason": f"the connection to {self.place.host.name} was cut",
            }
        return status

    def has_ended(self) -> bool:
        """True where its process was known and is gone.

        Raises:
            HostUnreachable: nobody can say.
        """
        record = self.record
        return record.pid is not None and self._view().process(record.pid, record.pid_start_ticks) is None

    def _wait_for_guard(self, family: set[tuple[int, int]]) -> None:
        """The connection broke and came back: the guard there, which never heard of it, ends the server by its own clock."""
        deadline = time.monotonic() + self.place.params.silence_s + self.spec.stop_timeout_s + 10.0
        while time.monotonic() < deadline:
            view = self._view()
            if not any(view.process(pid, ticks) for pid, ticks in family):
                return
            time.sleep(1.0)

    def _view(self) -> HostView:
        """The host now. Where it can't be reached and the server's own connection is gone, this server is lost to us."""
        try:
            return self.place.view()
        except (HostUnreachable, HostTimeout) as error:
            if not self.running.connected:
                self._lost = HostUnreachable(
                    f"launch {self.launch_id} is proven gone from {self.place.host.name}", str(error),
                    f"the host ends it by itself {self.place.params.silence_s:.0f} s after our last word; a resumed run waits for that",
                )  # fmt: skip
            raise

    def load_way(self) -> tuple[str, HostSender | None]:
        """Where load is sent, and by whom: on the host itself, or from here through the tunnel."""
        return load_way_of(self.place, self.record.base_url, self.control, self.spec.argv[0], self.spec.api_key_env)

    def check_identity(self) -> list[str]:
        """Checks that the process that answers there is the one launched; returns what was checked.

        Raises:
            IdentityError: it is gone, another one owns the port, or the resolved arguments or model differ.
        """
        record, view = self.record, self._view()
        faults, checks = [], []
        if view.process(record.pid or -1, record.pid_start_ticks) is None:
            faults.append(f"process {record.pid} of launch {record.launch_id} is gone on {self.place.host.name}")
        owners = view.port_owners(record.port)
        family = {p.pid for p in view.family(record.pid or -1)}
        if not owners:
            faults.append(f"nobody readable listens on port {record.port} of {self.place.host.name}")
        elif not {p.pid for p in owners} & family:
            faults.append(f"port {record.port} there belongs to pid {owners[0].pid} ({' '.join(owners[0].argv)[:80]})")
        else:
            checks.append(
                f"port {record.port} of {self.place.host.name} is held by pid {owners[0].pid}, launched as {record.launch_id}"
            )
        if lost := self.status()["lines_lost"]:
            faults.append(f"its log is no longer complete: {lost} lines lost ({self._supervisor.error})")
        if not faults:
            compare_server_info(self.folder, self.control, "when it was ready", faults, checks)
        if faults:
            raise IdentityError(
                f"the server of launch {record.launch_id} answers on {self.place.host.name}", "; ".join(faults)
            )
        return checks

    def wait_ready(self, say: Callable[[str], None] | None = None, watch: Watch | None = None) -> None:
        """As `Server.wait_ready`."""
        try:
            _RemoteWaiter(self, say, watch).wait()
        except BaseException as error:
            self._stop_after(error)
            raise

    def stop(self) -> StopProof:
        """Ends the server and everything it started there (SIGTERM, deadline, SIGKILL) and proves it; idempotent.

        Raises:
            NotStopped: processes, the port, or GPU memory are still held.
            HostUnreachable: the host is lost, so nothing can be proven; its guard ends the server there.
        """
        if self.record.stop is not None:
            return self.record.stop
        began = time.monotonic()
        family: set[tuple[int, int]] = {p for p in [self.running.process] if p}
        before = GpuUse(reason="not asked before the stop")
        with contextlib.suppress(WorkbookError):
            view = self._view() if self._lost is None else None
            if view is not None:
                before = gpu_use(view)
                family |= {(p.pid, p.ticks) for p in view.family(self.record.pid or -1)}
        if self._lost is not None:
            raise self._lost
        self._note_process(self.status())
        self.running.stop()
        self._supervisor.join(5.0)
        with contextlib.suppress(WorkbookError):
            self._tunnel.close()
        status, ending = self.status(), self.running.ending or {}
        if self.running.ending is None:
            self._wait_for_guard(family)
        view, words, back, left_mib = self._gpu_back(before, family)
        left = sorted(pid for pid, ticks in family if view.process(pid, ticks))
        signals = ["SIGTERM"] + (["SIGKILL"] if ending.get("killed") else []) if ending.get("ended") else []
        proof = StopProof(
            signals=signals,
            seconds=round(time.monotonic() - began, 3),
            exit_code=status.get("exit_code"),
            processes_left=left,
            port_free=not view.port_is_held(self.record.port),
            gpu_memory=words,
            gpu_back=back,
            gpu_mib_left=left_mib,
            gpu_before_stop=before,
            gpu_after_stop=gpu_use(view),
        )
        state = {"ready": "stopped", "starting": "interrupted"}.get(self.record.state, self.record.state)
        self._update(state=state, stop=proof, exit_code=proof.exit_code)
        local.write_atomic(self.folder / "host_status.json", json.dumps(status))
        if not proof.gone:
            raise NotStopped(
                f"launch {self.launch_id} is gone on {self.place.host.name} after {signals}",
                f"pids left: {left}, port {self.record.port} free: {proof.port_free}, GPU memory: {words}",
                "look at these processes; nothing else was touched",
            )
        return proof

    def _gpu_back(self, before: GpuUse, family: set[tuple[int, int]]) -> tuple[HostView, str, bool | None, int | None]:
        """Whether the GPUs that the server used are back to what they held before the launch; waits for the driver."""
        start = self.record.gpu_before or GpuUse(reason="not recorded before the launch")
        pids = {str(pid) for pid, _ in family}
        deadline = time.monotonic() + GPU_WAIT_S
        while True:
            view = self.place.view()
            after = gpu_use(view)
            reason = start.reason or before.reason or after.reason
            if reason:
                return view, f"unknown, because {reason}", None, None
            risen = [
                uuid for uuid, used in before.used_mib.items()
                if used > start.used_mib.get(uuid, 0.0) + GPU_SLACK_MIB or pids & set(before.users.get(uuid, {}))
            ]  # fmt: skip
            watched = risen or sorted(after.used_mib)
            over = sum(
                mib for uuid in watched
                if (mib := after.used_mib.get(uuid, 0.0) - start.used_mib.get(uuid, 0.0)) > GPU_SLACK_MIB
            )  # fmt: skip
            if not over or time.monotonic() > deadline:
                break
            time.sleep(0.5)
        told = ", ".join(f"{sum(u.used_mib.get(i, 0.0) for i in watched):.0f}" for u in (start, before, after))
        others = [
            pid
            for uuid in watched
            for pid in set(after.users.get(uuid, {})) ^ set(start.users.get(uuid, {}))
            if pid not in pids
        ]
        words = f"MiB used before the launch, before the stop, after: {told}"
        if others:
            return (
                view,
                f"unknown, because other processes changed meanwhile (pids {', '.join(others[:5])}); {words}",
                None,
                None,
            )
        return view, words, not over, round(over)


class _RemoteWaiter(_Waiter):
    def _answers(self) -> bool:
        server = self.server
        if not isinstance(server, RemoteServer) or server.record.pid is None or server.control.health() != 200:
            return False
        view = server.place.view()
        owners = view.port_owners(server.record.port)
        family = {p.pid for p in view.family(server.record.pid)}
        if owners and not {p.pid for p in owners} & family:
            raise IdentityError(
                f"launch {server.launch_id} owns port {server.record.port} of {server.place.host.name}",
                f"pid {owners[0].pid} ({' '.join(owners[0].argv)[:80]}) took it first",
            )
        if process := view.process(server.record.pid):
            server._update(pid_start_time=started_at(view, process))
        return bool(owners)


def load_way_of(
    place: Place, base_url: str, control: Control, python: str | None, api_key_env: str | None
) -> tuple[str, HostSender | None]:
    """The URL as the load client sees it, and the client's sender (None: this machine)."""
    if place.params.load_client == "here":
        return control.base_url, None
    return base_url, sender_for(place.host, place.client_python(python), api_key_env)


def launch(
    place: Place, spec: RemoteSpec, folder: Path, say: Callable[[str], None] | None = None, watch: Watch | None = None
) -> RemoteServer:
    """Starts a server on a host and waits until it is ready; see `lib.server.launch.launch` for what it raises."""
    view = place.view()
    taken = {item.port for item in view.listeners}
    free = [p for p in random.SystemRandom().sample(range(20000, 32000), 200) if not {p, p + 10000} & taken]
    port = spec.port or free[0]
    if port in taken:
        owners = view.port_owners(port)
        who = f"pid {owners[0].pid}: {' '.join(owners[0].argv)[:200]}" if owners else "a process that may not be read"
        raise PortTaken(
            f"port {port} of {place.host.name} is free for launch {spec.name!r}",
            f"held by {who}",
            "stop that process or choose another port (server.port)",
        )
    base_url = f"http://{f'[{spec.host}]' if ':' in spec.host else spec.host}:{port}"
    Control(base_url, spec.api_key_env)  # a missing API key is found before anything runs
    launch_id = f"L{datetime.datetime.now():%m%d%H%M%S}-{uuid.uuid4().hex[:6]}"
    home = folder / launch_id
    home.mkdir(parents=True)
    secrets = [os.environ[spec.api_key_env]] if spec.api_key_env and os.environ.get(spec.api_key_env) else []
    argv = [part.replace("{host}", spec.host).replace("{port}", str(port)) for part in spec.argv]
    record = LaunchRecord(
        launch_id=launch_id,
        name=spec.name,
        key=spec.key,
        argv=[redact_text(a, secrets) for a in _redact_argv(argv)],
        environment=redact_object(dict(spec.environment), secrets),
        sglang_version=spec.sglang_version,
        model_path=spec.model_path,
        model=spec.model,
        host=view.describe(),
        base_url=base_url,
        port=port,
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        started_at=time.time(),
        state="starting",
        notes=[
            *spec.notes,
            f"launched on {place.host.name}; variables that the server inherits there are not recorded; its temporary files lie "
            "in a folder that goes with it (TMPDIR)",
        ],
        gpu_before=gpu_use(view),
    )
    save_record(home, record)
    full = argv + (["--api-key", secrets[0]] if secrets else [])
    scratch = contextlib.ExitStack()
    try:
        environment = {**_temporary(place, scratch), **spec.environment, "WORKBOOK_LAUNCH_ID": launch_id}
        running = place.host.start(
            full,
            env=environment,
            deadline_s=LONGEST_LIFE_S,
            grace_s=spec.stop_timeout_s,
            silence_s=place.params.silence_s,
        )
    except BaseException:
        scratch.close()
        raise
    hidden = [*secrets, *find_secrets(spec.environment), *find_secrets({"argv": full})]
    server = RemoteServer(spec, home, record, running, place, hidden, scratch)
    server.wait_ready(say, watch)
    return server


def left_there(view: HostView, folder: Path) -> list[LaunchRecord]:
    """Launches of a run's folder that were not proven gone and whose process is still on a host."""
    found = []
    for file in folder.glob("raw/*/servers/*/launch.json"):
        record = read_record(file.parent)
        unproven = record.origin == "launched" and record.stop is None and record.pid is not None
        if unproven and view.process(record.pid or -1, record.pid_start_ticks):
            found.append(record)
    return found


def wait_gone_there(place: Place, folder: Path, say: Callable[[str], None]) -> None:
    """Waits until no server of an earlier, cut-off session of this run is left on its host: they would share the machine.

    Raises:
        NotStopped: they are still there, though their guard should have ended them.
    """
    unproven = [
        r for f in folder.glob("raw/*/servers/*/launch.json")
        if (r := read_record(f.parent)).origin == "launched" and r.stop is None and r.launch_id not in _GONE
    ]  # fmt: skip
    if not unproven:
        return
    deadline = time.monotonic() + place.params.silence_s + 60.0
    while left := left_there(place.view(), folder):
        if time.monotonic() > deadline:
            raise NotStopped(
                f"servers of an earlier session of this run are gone from {place.host.name}",
                ", ".join(f"pid {r.pid} of launch {r.launch_id}" for r in left),
                "look at these processes and end them, then resume",
            )
        say(f"waiting until {place.host.name} has ended pid {left[0].pid} of an earlier session")
        time.sleep(1.0)
    _GONE.update(r.launch_id for r in unproven)


def wait_run_gone(folder: Path, say: Callable[[str], None], seconds: float = 20.0) -> list[int]:
    """Waits until no server of an interrupted run is left on the hosts that its parameters name; pids that still are.

    What can't be reached is not waited for: the guard there ends it by itself (`silence_s`).
    """
    left: list[int] = []
    for file in sorted((folder / "params").glob("*.profile.yaml")):
        named = HostParams.model_validate((yaml.safe_load(file.read_text()) or {}).get("host") or {})
        number = file.name.partition(".")[0]
        if not named.remote or not any((folder / "raw" / number / "servers").glob("*/launch.json")):
            continue
        with contextlib.suppress(WorkbookError), contextlib.ExitStack() as stack:
            stack.callback(close_host, host := host_of(named))
            place, deadline = Place(host, named), time.monotonic() + seconds
            while (found := left_there(place.view(), folder)) and time.monotonic() < deadline:
                say(f"waiting until {host.name} has ended pid {found[0].pid}")
                time.sleep(0.5)
            left += [r.pid for r in found if r.pid]
    return left


#: Launches without a proof of their end that were seen to be gone.
_GONE: set[str] = set()


def _temporary(place: Place, scratch: contextlib.ExitStack) -> dict[str, str]:
    """Variables that keep a server's temporary files in a folder that goes with it: SGLang leaves its sockets behind.

    Kernels that torch compiles stay where they would be without this, so that the next launch finds them.
    """
    made = scratch.enter_context(held_folder(place.host, LONGEST_LIFE_S, place.params.silence_s))
    found = {"TMPDIR": str(made["folder"])}
    if made["user"]:
        user = re.sub(r'[\\/:*?"<>|]', "_", made["user"])
        found["TORCHINDUCTOR_CACHE_DIR"] = f"{made['temporary']}/torchinductor_{user}"
    return found


# attaching ---------------------------------------------------------------------------------------------------------------
class RemoteAttached(AttachedServer):
    """A running server on another host that is somebody else's: never stopped, never restarted."""

    def __init__(
        self, record: LaunchRecord, folder: Path, control: Control, place: Place, tunnel: contextlib.ExitStack
    ) -> None:
        super().__init__(record, folder, control)
        self.place, self._tunnel, self._api_key_env = place, tunnel, None

    @classmethod
    def attach_on(cls, place: Place, name: str, params: ServerParams, folder: Path) -> RemoteAttached:
        """Finds the server at `params.attach`, a URL as seen on the host, and records who it is.

        Raises:
            BadInput: not an http URL, or no such log file there.
            ServerError: nothing answers there, or not as SGLang does.
        """
        parts, port = _address(params.attach or "")
        if parts.scheme != "http":
            raise BadInput("server.attach on another host is an http URL", parts.scheme, "attach to its plain port")
        host = place.host
        tunnel = contextlib.ExitStack()
        try:
            near = tunnel.enter_context(host.forward(port, parts.hostname or "127.0.0.1"))
            control = Control(f"http://127.0.0.1:{near}{parts.path.rstrip('/')}", params.api_key_env)
            try:
                info = control.server_info()
            except ServerError as error:
                raise ServerError(
                    f"an SGLang server answers on {params.attach} of {host.name}", str(error.found), error.do
                ) from error
            view = place.view()
            owners = view.port_owners(port)
            owner = owners[0] if owners else None
            lasting = {key: value for key, value in info.items() if key not in VOLATILE or key == "random_seed"}
            process = [owner.pid, owner.ticks] if owner else None
            seen = [host.name, params.attach, view.boot_id, view.init_ticks, process, lasting]
            now = datetime.datetime.now(datetime.UTC)
            record = LaunchRecord(
                launch_id=f"A{datetime.datetime.now():%m%d%H%M%S}-{uuid.uuid4().hex[:6]}",
                name=name,
                origin="attached",
                key=hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()[:16],
                argv=owner.argv if owner else [],
                environment=_environment(place, owner.pid) if owner else {},
                sglang_version=str(info["version"]),
                model_path=str(info.get("model_path")),
                model={"path": info.get("model_path"), "reason": "the model files of an attached server are not read"},
                host=view.describe(),
                base_url=(params.attach or "").rstrip("/"),
                port=port,
                started=now.isoformat(timespec="seconds"),
                started_at=now.timestamp(),
                state="attached",
                pid=owner.pid if owner else None,
                pid_start_time=started_at(view, owner) if owner else None,
                pid_start_ticks=owner.ticks if owner else None,
                served_model_name=control.served_model_name(),
                notes=[_where(owner)] if owner else [],
            )
            home = folder / record.launch_id
            save_record(home, record)
            local.write_atomic(home / "server_info.json", json.dumps(info, indent=1))
            if params.log:
                try:
                    data = place.read(params.log)
                except HostError as error:
                    raise BadInput(
                        f"server.log names the server's log on {host.name}: {params.log!r}", str(error.found)
                    ) from error
                local.write_atomic(home / "server.log", redact_text(data.decode("utf-8", "replace"), control.secrets))
        except BaseException:
            tunnel.close()
            raise
        made = cls(record, home, control, place, tunnel)
        made._api_key_env = params.api_key_env  # type: ignore[assignment]
        return made

    def load_way(self) -> tuple[str, HostSender | None]:
        """Where load is sent, and by whom."""
        return load_way_of(self.place, self.record.base_url, self.control, None, self._api_key_env)

    def check_identity(self) -> list[str]:
        """Checks that the URL is still answered by the server found at the start; returns what was checked.

        Raises:
            IdentityError: another process, or other resolved arguments.
        """
        faults, checks = [], []
        record, view = self.record, self.place.view()
        if record.pid is None:
            checks.append(
                "weak identity: the process that listens there may not be read, only /server_info is compared; a restart with "
                "the same arguments and random_seed would not be noticed"
            )
        elif record.pid in {p.pid for p in view.port_owners(record.port)} and view.process(
            record.pid, record.pid_start_ticks
        ):
            checks.append(f"pid {record.pid} of {self.place.host.name} and its start still own the port")
        else:
            now = [p.pid for p in view.port_owners(record.port)]
            faults.append(
                f"the port belonged to pid {record.pid} (start {record.pid_start_ticks}) and now to {now or 'nobody readable'}"
            )
        if not faults:
            compare_server_info(self.folder, self.control, "when it was found", faults, checks)
        if faults:
            raise IdentityError(
                f"the server attached as {self.launch_id} answers on {self.place.host.name}", "; ".join(faults)
            )
        return checks


def _where(owner: HostProcess) -> str:
    inside = f", container {owner.container[1]} ({owner.container[0]})" if owner.container else ""
    return f"pid {owner.pid}, unit {owner.unit or 'none'}{inside}"


def _environment(place: Place, pid: int) -> dict[str, str]:
    """Relevant environment of a process there, redacted; empty where it may not be read."""
    with contextlib.suppress(HostError):
        items = place.read(f"/proc/{pid}/environ").split(b"\0")
        pairs = (item.decode("utf-8", "replace").partition("=") for item in items if item)
        return dict(redact_object({name: value for name, _, value in pairs if RELEVANT_ENVIRONMENT.match(name)}))
    return {}


def load_way(server: Any) -> tuple[str, HostSender | None]:
    """The URL and the sender for load on any server; this machine's client where the server is here."""
    way: Callable[[], tuple[str, HostSender | None]] | None = getattr(server, "load_way", None)
    return way() if way is not None else (server.base_url, None)


def calibration_for(params: Mapping[str, Any] | None, streams: int, api: str) -> dict[str, Any] | None:
    """The calibration that a level on the host of these parameters carries; None where the server is on this machine."""
    place = place_of(HostParams.model_validate(params)) if params else None
    if place is None:
        return None
    from lib.hosts.remote_client import calibrate_on, calibrate_tunnel

    if place.params.load_client == "here":
        return calibrate_tunnel(place.host, streams, api=api)
    return calibrate_on(place.host, streams, api=api, python=place.client_python(None))
