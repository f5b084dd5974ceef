"""The life of one server: launch, wait, prove which one it is, stop, prove that it is gone.

A launch leaves a folder that is evidence and never rewritten, except for its own `launch.json` and `status.json`:

    <launch id>/launch.json       what was asked, how it went (LaunchRecord)
    <launch id>/status.json       the supervisor's view: pids, signals, exit code
    <launch id>/server.log        the server's output, redacted before it reached disk
    <launch id>/server_info.json  what the server said about itself when it became ready
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lib.errors import IdentityError, NotReady, NotStopped, PortTaken, ServerDied, ServerError, WorkbookError
from lib.hosts import local
from lib.hosts.local import ProcessId
from lib.model.cache import cache_dir
from lib.records import Record, ServerIdentity
from lib.report.progress import progress_bar
from lib.server.control import Control
from lib.server.failures import Failure, classify
from lib.server.progress import phase_of
from lib.server.redact import redact_object, redact_text

#: Environment variables that change what a server computes; recorded in its identity.
RELEVANT_ENVIRONMENT = re.compile(
    r"^(SGLANG_|SGL_|CUDA_|NCCL_|TRITON_|FLASHINFER_|VLLM_|TORCH|PYTORCH_|HF_HUB_OFFLINE|OMP_|MKL_|OPENBLAS_|HIP_|ROCM_)"
)
#: Answers of /server_info that differ between two moments of one server, or two launches of one configuration.
VOLATILE = (
    "random_seed",
    "port",
    "grpc_port",
    "nccl_port",
    "last_gen_throughput",
    "internal_states",
    "status",
    "kv_events",
    "dist_init_addr",
    "startup_time",
    "launch_command",
    "file_storage_path",
    "engine_info_bootstrap_port",
)


class ServerSpec(Record):
    """What to launch: a resolved command, not yet tied to a port.

    `argv` holds `{host}` and `{port}` where the address goes; `api_key_env` names the environment variable that holds the
    API key. `key` is the hash of all that decides what the server computes (argv, environment, model, version,
    machine).
    """

    name: str
    argv: list[str]
    environment: dict[str, str]
    sglang_version: str
    model_path: str
    model: dict[str, Any]
    host: str = "127.0.0.1"
    port: int | None = None
    api_key_env: str | None = None
    ready_timeout_s: float = 600.0
    stop_timeout_s: float = 20.0
    keep: bool = False
    notes: list[str] = []

    @property
    def key(self) -> str:
        """Hash of what decides the server's answers; equal keys may share recorded measurements.

        Weights are told apart by the shards' sizes and modification times; the environment counts as the server would
        get it now, with what it inherits.
        """
        inherited = {name: value for name, value in os.environ.items() if RELEVANT_ENVIRONMENT.match(name)}
        parts = [
            self.argv,
            sorted({**inherited, **self.environment}.items()),
            self.sglang_version,
            self.model.get("sha256"),
            self.model.get("shards"),
            local.machine(),
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


class GpuUse(Record):
    """GPU memory at one moment: MiB used by GPU uuid, and by GPU uuid and pid; `reason` where it is not known."""

    used_mib: dict[str, float] = {}
    users: dict[str, dict[str, int]] = {}
    reason: str | None = None

    @classmethod
    def now(cls) -> GpuUse:
        """What nvidia-smi says now."""
        rows, reason = local.gpus()
        silent = [str(row.get("index")) for row in rows if row["memory_used_mib"] is None]
        if not reason and silent:
            reason = f"nvidia-smi gives no memory.used for GPU {', '.join(silent)}"
        if reason:
            return cls(reason=reason)
        users, reason = local.gpu_users()
        return cls(
            used_mib={str(row["uuid"]): row["memory_used_mib"] for row in rows},
            users={uuid: {str(pid): mib for pid, mib in held.items()} for uuid, held in users.items()},
            reason=reason,
        )


class StopProof(Record):
    """How a server ended and what shows that it is gone."""

    signals: list[str]
    seconds: float
    exit_code: int | None
    processes_left: list[int]
    port_free: bool
    gpu_memory: str
    gpu_back: bool | None = None
    gpu_mib_left: int | None = None
    gpu_before_stop: GpuUse | None = None
    gpu_after_stop: GpuUse | None = None

    @property
    def gone(self) -> bool:
        """True if no process is left, the port is free, and its GPUs are not known to hold more than before the launch."""
        return not self.processes_left and self.port_free and self.gpu_back is not False and not self.gpu_mib_left


class LaunchRecord(Record):
    """launch.json: one attempt to run a server."""

    launch_id: str
    name: str
    origin: str = "launched"
    key: str
    argv: list[str]
    environment: dict[str, str]
    sglang_version: str
    model_path: str
    model: dict[str, Any]
    host: dict[str, Any]
    base_url: str
    port: int
    started: str
    started_at: float
    state: str
    pid: int | None = None
    pid_start_time: float | None = None
    pid_start_ticks: int | None = None
    supervisor_pid: int | None = None
    exit_code: int | None = None
    ready_s: float | None = None
    ended_s: float | None = None
    phases: list[tuple[str, float]] = []
    served_model_name: str | None = None
    notes: list[str] = []
    gpu_before: GpuUse | None = None
    stop: StopProof | None = None


#: Looks at a starting server and says why waiting for it makes no sense any more, or None.
Watch = Callable[["Server", float], str | None]


class Server:
    """A server that this workbook launched and owns; use as a context manager or call `stop()`."""

    origin = "launched"

    def __init__(
        self, spec: ServerSpec, folder: Path, record: LaunchRecord, supervisor: subprocess.Popen[bytes]
    ) -> None:
        self.spec, self.folder, self.record, self._supervisor = spec, folder, record, supervisor
        self.control = Control(record.base_url, spec.api_key_env)

    @property
    def base_url(self) -> str:
        return self.record.base_url

    @property
    def launch_id(self) -> str:
        return self.record.launch_id

    def status(self) -> dict[str, Any]:
        """The supervisor's latest word (state, pid, exit_code, log_error ...); empty before its first."""
        try:
            return dict(json.loads((self.folder / "status.json").read_text()))
        except (OSError, ValueError):
            return {}

    def has_ended(self) -> bool:
        """True where its process was known and is gone."""
        record = self.record
        if record.pid is None or record.pid_start_time is None:
            return False
        return not ProcessId(record.pid, record.pid_start_time, record.pid_start_ticks).alive()

    def check_identity(self) -> list[str]:
        """Checks that the process that answers is the one launched; returns what was checked.

        Raises:
            IdentityError: the process is gone, another one owns the port, or the resolved arguments or model differ.
        """
        record = self.record
        me = ProcessId(record.pid or -1, record.pid_start_time or 0.0, record.pid_start_ticks)
        faults, checks = [], []
        if not me.alive():
            faults.append(f"process {record.pid} of launch {record.launch_id} is gone")
        owner = local.port_owner(record.port)
        if owner is None:
            faults.append(f"nobody readable listens on port {record.port}")
        elif owner.pid not in {process.pid for process in local.descendants(record.pid or -1)}:
            faults.append(f"port {record.port} belongs to pid {owner.pid} ({local.command_line(owner.pid, 80)})")
        else:
            checks.append(f"port {record.port} is held by pid {owner.pid}, launched as {record.launch_id}")
        if lost := self.status().get("lines_lost"):
            faults.append(f"its log is no longer complete: {lost} lines lost ({self.status().get('log_error')})")
        if not faults:
            compare_server_info(self.folder, self.control, "when it was ready", faults, checks)
        if faults:
            raise IdentityError(
                f"the server of launch {record.launch_id} answers on {record.base_url}", "; ".join(faults)
            )
        return checks

    def wait_ready(self, say: Callable[[str], None] | None = None, watch: Watch | None = None) -> None:
        """Waits until /health answers 200; fails as soon as the process ends, with the cause from its log.

        `watch` is asked about once a second with the server and the seconds since its start; words from it end the wait.

        Raises:
            ServerDied, NotReady: with the log's own words; the server is stopped in both cases.
        """
        try:
            _Waiter(self, say, watch).wait()
        except BaseException as error:
            self._stop_after(error)
            raise

    def _stop_after(self, error: BaseException) -> None:
        """Stops because something went wrong; what else goes wrong then must not hide it."""
        try:
            self.stop()
        except (WorkbookError, OSError) as second:
            if isinstance(error, WorkbookError):
                raise type(error)(error.expected, f"{error.found}; and then: {second}", error.do) from second
            error.add_note(f"and then: {second}")

    def stop(self) -> StopProof:
        """Ends the server and everything it started (SIGTERM, deadline, SIGKILL) and proves it; idempotent.

        Also a server that is just being started: a supervisor that is asked to stop before it has started it doesn't.

        Raises:
            NotStopped: processes, the port, or GPU memory are still held after SIGKILL.
        """
        if self.record.stop is not None:
            return self.record.stop
        began = time.monotonic()
        family: set[ProcessId] = set()
        try:
            gpu_before = GpuUse.now()
            self._look_for(family)
        finally:  # whatever happens meanwhile, the request to stop is out
            if self._supervisor.poll() is None:
                self._supervisor.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self.spec.stop_timeout_s + 12.0
        while self._supervisor.poll() is None and time.monotonic() < deadline:
            self._look_for(family)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._supervisor.wait(0.2)
        if self._supervisor.poll() is None:
            self._look_for(family)
            self._supervisor.kill()  # the server follows it by PR_SET_PDEATHSIG, its children do not
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._supervisor.wait(5.0)
        left = self._end_family(family)
        status = self.status()
        gpu_after, gpu_words, gpu_back, gpu_left = _gpu_proof(self.record.gpu_before, gpu_before, family)
        signals = [name for name, stamp in (("SIGTERM", "sigterm_at"), ("SIGKILL", "sigkill_at")) if stamp in status]
        proof = StopProof(
            signals=signals,
            seconds=round(time.monotonic() - began, 3),
            exit_code=status.get("exit_code"),
            processes_left=left,
            port_free=not local.port_is_held(self.record.port),
            gpu_memory=gpu_words,
            gpu_back=gpu_back,
            gpu_mib_left=gpu_left,
            gpu_before_stop=gpu_before,
            gpu_after_stop=gpu_after,
        )
        state = {"ready": "stopped", "starting": "interrupted"}.get(self.record.state, self.record.state)
        self._note_process(status)
        self._update(state=state, stop=proof, exit_code=proof.exit_code)
        if not proof.gone:
            raise NotStopped(
                f"launch {self.launch_id} is gone after {signals}",
                f"pids left: {left}, port {self.record.port} free: {proof.port_free}, GPU memory: {gpu_words}",
                "look at these processes; nothing else was touched",
            )
        return proof

    def _look_for(self, family: set[ProcessId]) -> None:
        """Adds who belongs to the server now: all below the supervisor, in whatever group."""
        family.update(p for p in local.descendants(self._supervisor.pid) if p.pid != self._supervisor.pid)

    def _end_family(self, family: set[ProcessId]) -> list[int]:
        """Waits until nobody is left, and kills who outlived the supervisor (which ends all when it is not killed)."""
        began = time.monotonic()
        pgid = int(self.status().get("pgid") or -1)
        while True:
            family.update(self._group(pgid))
            family.update(local.processes_with("WORKBOOK_LAUNCH_ID", self.launch_id))
            left = sorted({p.pid for p in family if p.alive()})
            if not left or time.monotonic() - began > 10.0:
                return left
            if any(p.pid in left for p in self._group(pgid)):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pgid, signal.SIGKILL)
            for process in family:
                process.kill()
            time.sleep(0.1)

    def _group(self, pgid: int) -> list[ProcessId]:
        """The server's process group, unless its number is another's by now."""
        if pgid <= 0:
            return []
        status = self.status()
        leader = ProcessId(pgid, status.get("pid_start_time") or 0.0, status.get("pid_start_ticks"))
        if local.process_id(pgid) is not None and not leader.alive():
            return []
        return [p for pid in local.group_members(pgid) if (p := local.process_id(pid)) is not None]

    def _note_process(self, status: Mapping[str, Any]) -> None:
        """Takes over from the supervisor which process it is, as soon as that is known."""
        if self.record.pid is None and status.get("pid"):
            names = ("pid", "pid_start_time", "pid_start_ticks", "supervisor_pid")
            self._update(**{name: status.get(name) for name in names})

    def _update(self, **changes: Any) -> None:
        self.record = self.record.model_copy(update=changes)
        save_record(self.folder, self.record)

    def identity(self) -> ServerIdentity:
        """The identity that is stamped into every record measured on this server."""
        return identity_of(self.folder)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def save_record(folder: Path, record: LaunchRecord) -> None:
    """Writes launch.json (atomically)."""
    local.write_atomic(folder / "launch.json", record.model_dump_json(indent=1))


def read_record(folder: Path) -> LaunchRecord:
    """Reads launch.json of a launch folder."""
    return LaunchRecord.model_validate_json((folder / "launch.json").read_text())


def compare_server_info(folder: Path, control: Control, since: str, faults: list[str], checks: list[str]) -> None:
    """Asks /server_info again and adds to `faults` what is not as in the folder's server_info.json, else to `checks` that all is.

    Raises:
        ServerError: it does not answer.
    """
    then = json.loads((folder / "server_info.json").read_text())
    changed = changed_arguments(then, control.server_info())
    if changed:
        faults.append(f"/server_info is not what it was {since}: {', '.join(changed[:5])}")
    else:
        checks.append(f"resolved arguments equal those {since}, random_seed included")


def changed_arguments(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names of /server_info fields that should not change within one server's life but did."""
    watched = [key for key in then if key not in VOLATILE or key in ("random_seed", "port")]
    return [key for key in watched if then.get(key) != now.get(key)]


def identity_of(folder: Path) -> ServerIdentity:
    """The identity of a launch, derived from its raw files alone (launch.json, server_info.json)."""
    record = read_record(folder)
    info_file = folder / "server_info.json"
    info = json.loads(info_file.read_text()) if info_file.exists() else {}
    resolved = {key: value for key, value in info.items() if key not in VOLATILE}
    environment = dict(record.environment)  # what is relevant, and all that parameters set: a deployment must set it too
    parts = [
        info.get("version") or record.sglang_version,
        resolved or record.argv,
        environment,
        record.model,
        record.host,
    ]
    fingerprint = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return ServerIdentity(
        launch_id=record.launch_id,
        origin=record.origin,
        base_url=record.base_url,
        pid=record.pid,
        pid_start_time=record.pid_start_time,
        boot_id=record.host.get("boot_id"),
        started=record.started,
        ready_s=record.ready_s,
        sglang_version=info.get("version") or record.sglang_version,
        argv=record.argv,
        environment=environment,
        resolved_args=resolved,
        served_model_name=record.served_model_name,
        model=record.model,
        host=record.host,
        fingerprint=fingerprint,
    )


def launch(
    spec: ServerSpec,
    folder: Path,
    owners: list[ProcessId],
    say: Callable[[str], None] | None = None,
    watch: Watch | None = None,
) -> Server:
    """Starts a server under a supervisor and waits until it is ready.

    Args:
        spec: what to run.
        folder: parent folder; the launch gets its own folder below it, named by its launch id.
        owners: the server is ended within 10 s when one of these processes is gone (unless `spec.keep`).
        say: takes one line of progress at a time.
        watch: see `Server.wait_ready`.

    Raises:
        PortTaken: the asked port is held; the message names the holder.
        ServerError: it was ended from outside before it was ready (its state is `interrupted`: a resumed run tries again).
        ServerDied, NotReady: see `Server.wait_ready`. The launch folder stays as evidence.
    """
    server = start(spec, folder, owners)
    try:
        server.wait_ready(say, watch)
    except BaseException as error:
        server._stop_after(error)
        raise
    return server


def start(spec: ServerSpec, folder: Path, owners: list[ProcessId]) -> Server:
    """Starts a server without waiting for it; see `launch`."""
    port = spec.port or local.free_port()
    if local.port_is_held(port):
        holder = local.port_owner(port)
        who = f"pid {holder.pid}: {local.command_line(holder.pid)}" if holder else "a process that may not be read"
        raise PortTaken(
            f"port {port} of {spec.host} is free for launch {spec.name!r}",
            f"held by {who}",
            "stop that process or choose another port (server.port)",
        )
    base_url = f"http://{f'[{spec.host}]' if ':' in spec.host else spec.host}:{port}"
    Control(base_url, spec.api_key_env)  # a missing API key is found before anything runs
    launch_id = f"L{datetime.datetime.now():%m%d%H%M%S}-{uuid.uuid4().hex[:6]}"
    place = folder / launch_id
    place.mkdir(parents=True)
    secrets = [os.environ[spec.api_key_env]] if spec.api_key_env and os.environ.get(spec.api_key_env) else []
    argv = [part.replace("{host}", spec.host).replace("{port}", str(port)) for part in spec.argv]
    environment = {**os.environ, **spec.environment, "WORKBOOK_LAUNCH_ID": launch_id}
    relevant = {k: v for k, v in environment.items() if RELEVANT_ENVIRONMENT.match(k) or k in spec.environment}
    record = LaunchRecord(
        launch_id=launch_id,
        name=spec.name,
        key=spec.key,
        argv=[redact_text(a, secrets) for a in _redact_argv(argv)],
        environment=redact_object(relevant, secrets),
        sglang_version=spec.sglang_version,
        model_path=spec.model_path,
        model=spec.model,
        host=local.describe(),
        base_url=base_url,
        port=port,
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        started_at=time.time(),
        state="starting",
        notes=spec.notes,
        gpu_before=GpuUse.now(),
    )
    save_record(place, record)
    supervised = {
        "argv": argv + (["--api-key", secrets[0]] if secrets else []),
        "environment": environment,
        "cwd": str(place),
        "log_path": str((place / "server.log").resolve()),
        "status_path": str((place / "status.json").resolve()),
        "secrets": secrets,
        "owners": [(o.pid, o.start_time, o.ticks) for o in (owner.pinned() for owner in owners)],
        "keep": spec.keep,
        "stop_deadline_s": spec.stop_timeout_s,
    }
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "lib.server.supervise"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd=Path(__file__).parents[2],
    )
    server = Server(spec, place, record, supervisor)
    try:
        stdin = supervisor.stdin
        if stdin is None:
            raise ServerError("the supervisor takes its orders on standard input", "no pipe")
        with stdin:
            stdin.write(json.dumps(supervised).encode())
    except BaseException as error:
        server._stop_after(error)
        raise
    return server


def _redact_argv(argv: list[str]) -> list[str]:
    secret = {"--api-key", "--admin-api-key", "--ssl-keyfile-password"}
    return ["REDACTED" if i and argv[i - 1] in secret else part for i, part in enumerate(argv)]


#: MiB by which a GPU's used memory may differ from before the launch: driver and display come and go.
GPU_SLACK_MIB = 200.0
#: Seconds that the driver may take to give memory back after the last process ended.
GPU_WAIT_S = 10.0


def _gpu_proof(
    at_launch: GpuUse | None, before: GpuUse, family: set[ProcessId]
) -> tuple[GpuUse, str, bool | None, int | None]:
    """Whether the server's GPUs are back to what they held before the launch.

    The server's GPUs are those that hold more before the stop than before the launch, or that its processes are seen
    on; if there is none (it was stopped early), all. Waits up to GPU_WAIT_S. Whether others changed the same GPUs is
    told from the lists of processes; where they did, nothing is claimed.

    Returns:
        The use after the stop, words, True or False or None (unknown, the words say why), and MiB that are left.
    """
    deadline = time.monotonic() + GPU_WAIT_S
    own = {str(process.pid) for process in family}
    start = at_launch or GpuUse(reason="not recorded before the launch")
    while True:
        after = GpuUse.now()
        reason = start.reason or before.reason or after.reason
        if reason:
            return after, f"unknown, because {reason}", None, None
        risen = [
            uuid
            for uuid, used in before.used_mib.items()
            if used > start.used_mib.get(uuid, 0.0) + GPU_SLACK_MIB or own & set(before.users.get(uuid, {}))
        ]
        watched = risen or sorted(after.used_mib)
        left = {uuid: after.used_mib.get(uuid, 0.0) - start.used_mib.get(uuid, 0.0) for uuid in watched}
        over = sum(mib for mib in left.values() if mib > GPU_SLACK_MIB)
        if not over or time.monotonic() > deadline:
            break
        time.sleep(0.5)

    def told(use: GpuUse) -> str:
        return f"{sum(use.used_mib.get(uuid, 0.0) for uuid in watched):.0f}"

    words = f"{told(start)} MiB used before the launch, {told(before)} before the stop, {told(after)} after"
    changed = [
        f"pid {pid} on {uuid}: {was} MiB before the launch, {now} now"
        for uuid in watched
        for pid in sorted({*start.users.get(uuid, {}), *after.users.get(uuid, {})} - own)
        if (was := start.users.get(uuid, {}).get(pid, 0)) != (now := after.users.get(uuid, {}).get(pid, 0))
    ]
    if changed:
        return (
            after,
            f"unknown, because other processes changed meanwhile ({'; '.join(changed[:3])}); {words}",
            None,
            None,
        )
    return after, words, not over, round(over)


class _Waiter:
    """Waits for one server, reading its log as it grows and saying what it is doing."""

    def __init__(self, server: Server, say: Callable[[str], None] | None, watch: Watch | None = None) -> None:
        self.server, self.say, self.watch = server, say, watch
        self.began = time.monotonic()
        self.offset = 0
        self.rest = b""
        self.phases: list[tuple[str, float]] = []
        self.history = _StartTimes(server.spec)

    def wait(self) -> None:
        """Returns when the server is ready, or raises."""
        expected = self.history.expected_s()
        bar = progress_bar(
            total=expected,
            desc=f"{self.server.spec.name}: starting",
            unit="s",
            bar_format="{desc} {bar} {n:.0f}/{total:.0f} s" if expected else "{desc} {n:.0f} s",
        )
        next_probe = next_word = 0.0
        try:
            while True:
                elapsed = time.monotonic() - self.began
                self._read_log(elapsed)
                if elapsed >= next_word:
                    self._say(bar, elapsed, expected)
                    next_word = elapsed + 1.0
                status = self.server.status()
                self.server._note_process(status)
                if status.get("log_error"):
                    raise ServerError(
                        f"the log of launch {self.server.launch_id} can be written",
                        str(status["log_error"]),
                        "free space on the outputs' disk, then run again",
                    )
                if status.get("state") == "ended" or self.server._supervisor.poll() is not None:
                    self._died(elapsed)
                if elapsed > self.server.spec.ready_timeout_s:
                    self._not_ready(elapsed)
                if self.watch and (why := self.watch(self.server, elapsed)):
                    self._not_ready(elapsed, why)
                if elapsed >= next_probe and self._answers():
                    self._ready(elapsed)
                    return
                next_probe = max(next_probe, elapsed + 0.5) if elapsed >= next_probe else next_probe
                time.sleep(0.2)
        finally:
            bar.close()

    def _say(self, bar: Any, elapsed: float, expected: float | None) -> None:
        left = f", about {max(expected - elapsed, 0):.0f} s left" if expected else ""
        phase = self.phases[-1][0] if self.phases else "importing"
        bar.n = min(elapsed, expected) if expected else elapsed
        bar.set_description(f"{self.server.spec.name}: {phase}{left}", refresh=True)
        if self.say:
            self.say(f"{self.server.spec.name}: {phase}, {elapsed:.0f} s{left}")

    def _answers(self) -> bool:
        port = self.server.record.port
        if self.server.record.pid is None:
            return False
        owner = local.port_owner(port)
        if owner is None:
            return False
        if owner.pid not in {p.pid for p in local.descendants(self.server.record.pid or -1)}:
            raise IdentityError(
                f"launch {self.server.launch_id} owns port {port}",
                f"pid {owner.pid} ({local.command_line(owner.pid, 80)}) took it first",
            )
        return self.server.control.health() == 200

    def _read_log(self, elapsed: float) -> None:
        with contextlib.suppress(FileNotFoundError), (self.server.folder / "server.log").open("rb") as log:
            log.seek(self.offset)
            data = self.rest + log.read()
            self.offset = log.tell()
            *lines, self.rest = re.split(rb"[\r\n]", data)
            for line in lines:
                phase = phase_of(line.decode("utf-8", "replace"))
                if phase is not None and (not self.phases or self.phases[-1][0] != phase.name):
                    self.phases.append((phase.name, round(elapsed, 2)))

    def _ready(self, elapsed: float) -> None:
        control = self.server.control
        local.write_atomic(self.server.folder / "server_info.json", json.dumps(control.server_info(), indent=1))
        self.server._update(
            state="ready", ready_s=round(elapsed, 2), phases=self.phases, served_model_name=control.served_model_name()
        )
        self.history.add(elapsed)

    def _died(self, elapsed: float) -> None:
        status = self.server.status()  # again: the last word may have been written after the look that led here
        code = status.get("exit_code")
        from_outside = status.get("stop_reason")
        if status.get("state") != "ended" and not from_outside:
            from_outside = "its supervisor is gone without a last word"
        state = "interrupted" if from_outside else "died"
        self.server._update(state=state, exit_code=code, ended_s=round(elapsed, 2), phases=self.phases)
        if from_outside:
            raise ServerError(
                f"{self.server.spec.name!r} becomes ready",
                f"it was ended from outside after {elapsed:.1f} s: {from_outside}",
                "run it again (`workbook run --resume`)",
            )
        cause = status.get("start_error") or failure_sentence(self.server.folder, code)
        raise ServerDied(
            f"{self.server.spec.name!r} becomes ready",
            f"it ended with exit code {code} after {elapsed:.1f} s: {cause}",
            f"read {self.server.folder / 'server.log'}",
        )

    def _not_ready(self, elapsed: float, why: str | None = None) -> None:
        self.server._update(state="not_ready", ended_s=round(elapsed, 2), phases=self.phases)
        last = self.phases[-1][0] if self.phases else "no line that is known"
        raise NotReady(
            f"{self.server.spec.name!r} becomes ready within {self.server.spec.ready_timeout_s:.0f} s",
            f"{why or 'the time is over'}; last seen: {last}",
            f"read {self.server.folder / 'server.log'}, or raise server.ready_timeout_s",
        )


def read_failure(folder: Path, exit_code: int | None) -> Failure | None:
    """Why a launch failed, read from its log; None if there is no log or nothing in it failed."""
    with contextlib.suppress(OSError), (folder / "server.log").open("rb") as log:
        return classify(log, exit_code=exit_code, ready=False)
    return None


def failure_sentence(folder: Path, exit_code: int | None) -> str:
    """The root cause that the log gives, quoted; or that it gives none."""
    failure = read_failure(folder, exit_code)
    if failure is None or not failure.cause_known:
        return "its log gives no known cause"
    return f"{failure.root_cause} (line {failure.line_no}: {(failure.line or '').strip()[:300]})"


class _StartTimes:
    """Seconds to ready of earlier launches of the same model and version, kept in the cache folder (last 5)."""

    def __init__(self, spec: ServerSpec) -> None:
        self.file = cache_dir() / "start_times.json"
        self.key = f"{spec.model.get('sha256', spec.model_path)[:16]}/{spec.sglang_version}"

    def _all(self) -> dict[str, list[float]]:
        try:
            return dict(json.loads(self.file.read_text()))
        except (OSError, ValueError):
            return {}

    def expected_s(self) -> float | None:
        """The mean of earlier starts, None if there is none."""
        times = self._all().get(self.key, [])
        return sum(times) / len(times) if times else None

    def add(self, seconds: float) -> None:
        """Remembers one start; not being able to is no reason to fail."""
        times = self._all()
        times[self.key] = [*times.get(self.key, []), round(seconds, 1)][-5:]
        with contextlib.suppress(OSError):
            local.write_atomic(self.file, json.dumps(times))
