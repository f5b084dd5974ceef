"""One notebook's run: where its files go, which server answers, what was measured, and the record at the end.

    outputs/<profile>/<run id>/
        result.json  index.html  NN.ipynb  NN.html  NN.result.json  params/NN.yaml
        raw/NN/servers/<launch id>/...     see lib.server.launch
        raw/NN/<measurement>/stamp.json    which server, checked before and after, when
        raw/NN/<measurement>/...           raw files, written once

A measurement whose stamp says `done` for the same server key and the same arguments is never taken again: a resumed run
goes on where it stopped, and rebuilding a report (`offline`) derives everything from raw files without any server.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil
import yaml

from lib import __version__
from lib.errors import (
    BadInput,
    HostTimeout,
    HostUnreachable,
    IdentityError,
    NotMeasured,
    ServerDied,
    ServerError,
    WorkbookError,
)
from lib.hosts import local
from lib.hosts.local import ProcessId
from lib.migrations import notebook_result
from lib.model.checkpoint import read_checkpoint
from lib.model.facts import Checkpoint
from lib.outputs import EXAMPLES, REPLAYS, new_run_id, outputs_root, run_folders  # noqa: F401  (they were here; others import them)
from lib.params import (
    NOTEBOOKS,
    ROOT,
    HostParams,
    NotebookParams,
    Profile,
    ServerParams,
    load_profile,
    notebook_params,
    sha256_of,
)
from lib.records import (
    Evidence,
    Measured,
    NotebookResult,
    Prediction,
    Provenance,
    Record,
    ServerIdentity,
    Trial,
    Verdict,
)
from lib.server import launch as launching
from lib.server import remote
from lib.server.attach import AttachedServer
from lib.server.control import Control
from lib.server.launch import LaunchRecord, Server, ServerSpec
from lib.server.log import read_log
from lib.server.log_records import ServerLog
from lib.server.redact import redact_object
from lib.server.spec import server_spec


class Stamp(Record):
    """stamp.json: on which server a measurement was taken, and that it was the same one before and after."""

    name: str
    arguments_key: str
    server_key: str | None
    launch_id: str | None
    started: str
    seconds: float
    commit: str | None = None
    checks: list[str] = []
    invalid: str | None = None
    error: str | None = None


class Measurement:
    """A folder of raw files with its stamp; `ok` if it was taken, on one and the same server, without error."""

    def __init__(self, folder: Path, stamp: Stamp) -> None:
        self.folder, self.stamp = folder, stamp

    @property
    def ok(self) -> bool:
        return self.stamp.invalid is None and self.stamp.error is None

    @property
    def problem(self) -> str | None:
        """Why it can't be used, or None."""
        return self.stamp.invalid or self.stamp.error

    @property
    def launch_ids(self) -> list[str]:
        return [self.stamp.launch_id] if self.stamp.launch_id else []

    def json(self, name: str) -> Any:
        """One raw JSON file of it."""
        return json.loads((self.folder / name).read_text())


class Answering(Protocol):
    """A server that answers: launched or attached."""

    control: Control

    @property
    def base_url(self) -> str: ...
    @property
    def launch_id(self) -> str: ...
    def check_identity(self) -> list[str]: ...


class ServerHandle:
    """One server of a notebook, launched at its first use; on a resumed or offline run perhaps never."""

    def __init__(self, run: NotebookRun, name: str, params: ServerParams, strict: bool = True) -> None:
        self.run, self.name, self.params, self.strict = run, name, params, strict
        self.beside: bool = False  # may run while other servers of this notebook that may too do
        self.watch: launching.Watch | None = None
        self._live: Answering | None = None
        self._spec: ServerSpec | None = None

    @property
    def attached(self) -> bool:
        return self.params.attach is not None

    @property
    def spec(self) -> ServerSpec:
        """The resolved launch (argv, environment, model); reads the checkpoint and asks for SGLang's version."""
        if self._spec is None:
            place = remote.place_of(self.run.profile.host)
            if place is None:
                self._spec = server_spec(self.name, self.params, self.strict)
            else:
                self._spec = remote.remote_spec(self.name, self.params, place, self.strict)
        return self._spec

    @property
    def tp_size(self) -> int:
        """Tensor parallel ranks that the flags ask for."""
        flags = self.params.flags
        asked = next((flags[name] for name in ("tp_size", "tp", "tensor_parallel_size") if flags.get(name)), 1)
        return int(str(asked))

    @property
    def key(self) -> str | None:
        if self.run.offline:
            return None
        live = self.get() if self.attached else None
        return live.record.key if isinstance(live, AttachedServer) else self.spec.key

    def get(self) -> Answering:
        """The running server; launches or attaches if needed."""
        if self._live is None:
            if self.run.offline:
                raise NotMeasured(
                    f"raw records of everything asked of server {self.name!r}",
                    "some are missing",
                    "run it again with the server (`workbook run --resume RUN`)",
                )
            self._live = self.run._bring_up(self)
        return self._live

    def stop(self) -> None:
        """Ends the server if this notebook launched it; an attached server is left alone."""
        if isinstance(self._live, Server):
            with self.run.inside_server():
                self._live.stop()
        self._live = None

    def launches(self) -> list[LaunchRecord]:
        """Every launch of this name so far, oldest first, from their raw records."""
        return [r for r in self.run.launch_records() if r.name == self.name]

    def folder(self, record: LaunchRecord | None = None) -> Path:
        """Raw folder of one launch (default: the latest)."""
        launches = self.launches()
        chosen = record or (launches[-1] if launches else None)
        if chosen is None:
            raise NotMeasured(f"a launch of server {self.name!r}", "none in this run", "measure something on it first")
        return self.run.raw / "servers" / chosen.launch_id

    def __enter__(self) -> ServerHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class NotebookRun:
    """What a notebook holds: its checked parameters, its servers, its measurements, its result."""

    def __init__(self, number: str, params: NotebookParams, folder: Path, offline: bool, batch: bool = False) -> None:
        self.number, self.params, self.folder, self.offline = number, params, folder, offline
        self.batch = batch  # papermill runs it: nobody is there to move a control
        self.profile: Profile = self._load_profile()
        self.raw = folder / "raw" / number
        self.raw.mkdir(parents=True, exist_ok=True)
        self._began = time.monotonic()
        self._started = _now()
        self._server_s = 0.0
        self._inside = 0
        self._handles: list[ServerHandle] = []
        self._used: list[str] = []
        self.skipped: list[str] = []
        self.recorded: list[ServerIdentity] = []  # servers of runs recorded elsewhere, which have no launch here
        self.saying = ""  # goes before each line of progress: which of how many, time left
        atexit.register(self.close)

    def _load_profile(self) -> Profile:
        """The profile as this notebook resolves it; offline it is the run's own copy, so that a rebuild changes nothing."""
        copy = self.folder / "params" / f"{self.number}.profile.yaml"
        if self.offline and copy.exists():
            return load_profile(self.params.profile, source=copy)
        profile = load_profile(self.params.profile, self.params.server, self.params.known_answer)
        local.write_atomic(copy, yaml.safe_dump(profile.model_dump(mode="json"), sort_keys=False))
        return profile

    # servers -------------------------------------------------------------------------------------------------------
    def server(
        self,
        name: str = "server",
        flags: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        strict: bool = True,
        **changes: Any,
    ) -> ServerHandle:
        """A server of the profile with these flags and environment on top; nothing is launched yet.

        With `strict=False` unknown flags and choices reach SGLang, so that it refuses them in its own words.
        """
        base = self.profile.server
        merged = {
            **base.model_dump(),
            **{k: v for k, v in changes.items() if v is not None},
            "flags": {**base.flags, **(flags or {})},
            "environment": {**base.environment, **(environment or {})},
        }
        handle = ServerHandle(self, name, ServerParams.model_validate(merged), strict)
        self._handles.append(handle)
        return handle

    @property
    def attached(self) -> bool:
        return self.profile.server.attach is not None

    def launch_records(self) -> list[LaunchRecord]:
        """All launches of this notebook in this run, oldest first."""
        records = [launching.read_record(p.parent) for p in (self.raw / "servers").glob("*/launch.json")]
        return sorted(records, key=lambda r: r.started_at)

    def try_launch(self, handle: ServerHandle) -> LaunchRecord:
        """Launches a server and gives its record, however it went; a recorded launch with the same key is not repeated."""
        done = [r for r in handle.launches() if r.state in ("ready", "stopped", "died", "not_ready", "attached")]
        if not self.offline:
            done = [r for r in done if r.key == handle.key]
        if done:
            self._used.append(done[-1].launch_id)
            return done[-1]
        with contextlib.suppress(ServerDied, launching.NotReady):
            handle.get()
        launched = handle.launches()[-1]
        self._used.append(launched.launch_id)  # a launch that failed is evidence too
        return launched

    def _bring_up(self, handle: ServerHandle) -> Answering:
        for other in self._handles:
            if other is not handle and not (other.beside and handle.beside):
                other.stop()  # one at a time: they would share the machine and falsify each other's numbers
        with self.inside_server():
            place = remote.place_of(self.profile.host)
            if place is not None and not handle.beside:
                remote.wait_gone_there(place, self.folder, self.say)
            if place is not None and handle.attached:
                live: Answering = remote.RemoteAttached.attach_on(
                    place, handle.name, handle.params, self.raw / "servers"
                )
            elif handle.attached:
                live = AttachedServer.attach(handle.name, handle.params, self.raw / "servers")
            elif place is not None and isinstance(handle.spec, remote.RemoteSpec):
                live = remote.launch(place, handle.spec, self.raw / "servers", self.say, handle.watch)
            else:
                live = launching.launch(handle.spec, self.raw / "servers", owners(), self.say, handle.watch)
        return live

    @contextlib.contextmanager
    def inside_server(self) -> Any:
        """Counts the time within as spent inside a server (starting, working or stopping)."""
        began = time.monotonic()
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            if self._inside == 0:
                self._server_s += time.monotonic() - began

    # what servers and files say, from raw records ----------------------------------------------------------------
    def host(self) -> dict[str, Any]:
        """The server's machine as first seen by this notebook's run (raw record `host`)."""
        return dict(self.measure("host", None, _write_host, **self.there).json("host.json"))

    @property
    def there(self) -> dict[str, Any]:
        """The argument `on` of measurements that are taken on the server's host; none where that is this machine."""
        return {"on": self.profile.host.model_dump()} if self.profile.host.remote else {}

    def checkpoint(self, handle: ServerHandle) -> Checkpoint | None:
        """The checkpoint's small files and headers (raw record `checkpoint`); None for an attached server."""
        if handle.attached:
            return None
        path = None if self.offline else getattr(handle.spec, "mirror", handle.spec.model_path)
        model = None if self.offline else handle.spec.model
        read = self.measure("checkpoint", None, _write_checkpoint, context=model, model_path=path)
        return Checkpoint.model_validate_json((read.folder / "checkpoint.json").read_text())

    def version(self, handle: ServerHandle) -> str:
        """SGLang's version behind a server: as it said itself, else as its environment says."""
        for launch in reversed(handle.launches()):
            return str((self.server_info(launch) or {}).get("version") or launch.sglang_version)
        return handle.spec.sglang_version

    def platform(self, handle: ServerHandle) -> str:
        """`cpu` where the server is told to run on the CPU or the machine has no GPU, else `cuda`."""
        return "cpu" if handle.params.flags.get("device") == "cpu" or not self.host()["gpus"] else "cuda"

    def log_file(self, launch: LaunchRecord) -> Path:
        """The log of a launch (raw; it may not exist for an attached server)."""
        return self.raw / "servers" / launch.launch_id / "server.log"

    def log(self, launch: LaunchRecord) -> ServerLog | None:
        """What the log of a launch says; None where there is no log."""
        file = self.log_file(launch)
        if not file.exists():
            return None
        with file.open("rb") as lines:
            return read_log(lines)

    def server_info(self, launch: LaunchRecord) -> dict[str, Any] | None:
        """What the server said about itself when it became ready; None if it never did."""
        file = self.raw / "servers" / launch.launch_id / "server_info.json"
        return dict(json.loads(file.read_text())) if file.exists() else None

    # measurements --------------------------------------------------------------------------------------------------
    def measure(
        self,
        name: str,
        handle: ServerHandle | None,
        function: Callable[..., None],
        keep_errors: bool = False,
        any_server: bool = False,
        context: Any = None,
        **arguments: Any,
    ) -> Measurement:
        """Takes a measurement once and keeps its raw files.

        Args:
            name: its stable name, also its folder below raw/NN/.
            handle: the server it is taken on, or None if none is needed.
            function: called as `function(folder, **arguments)` or `function(server, folder, **arguments)`; writes raw files.
            any_server: what one server gave is good for all (a text as token ids), so another server's record is reused.
            context: what else the record depends on (files' hashes, versions); another context is another measurement.
            keep_errors: a WorkbookError is kept in the stamp instead of raised, so that the next measurement goes on.

        Returns:
            The measurement. Its stamp is `invalid` if the server before and after was not the same one.
        """
        folder = self.raw / name
        machine = None if handle and not any_server else socket.gethostname()
        key = hashlib.sha256(
            json.dumps([arguments, context, machine], sort_keys=True, default=str).encode()
        ).hexdigest()[:16]
        stamp = self._recorded(folder, key, None if any_server else handle, any_server)
        if stamp is None and self.offline:
            raise NotMeasured(
                f"raw record {name!r} of notebook {self.number}",
                "it is not in this run",
                "measure it with the server (`workbook run --resume RUN`)",
            )
        if stamp is None:
            stamp = self._take(name, folder, key, handle, function, keep_errors, arguments)
        if stamp.launch_id:
            self._used.append(stamp.launch_id)
        return Measurement(folder, stamp)

    def _recorded(self, folder: Path, key: str, handle: ServerHandle | None, any_server: bool) -> Stamp | None:
        file = folder / "stamp.json"
        if not file.exists():
            return None
        stamp = Stamp.model_validate_json(file.read_text())
        if self.offline:
            return stamp
        same = stamp.arguments_key == key and (any_server or stamp.server_key == (handle.key if handle else None))
        return stamp if same and stamp.invalid is None and stamp.error is None else None

    def _take(
        self,
        name: str,
        folder: Path,
        key: str,
        handle: ServerHandle | None,
        function: Callable[..., None],
        keep_errors: bool,
        arguments: Mapping[str, Any],
    ) -> Stamp:
        self.say(f"{name}: measuring")
        server = handle.get() if handle else None
        if folder.exists():
            earlier = folder.with_name(f"{folder.name}.earlier-{uuid.uuid4().hex[:6]}")
            folder.rename(earlier)  # evidence of an interrupted or different attempt is kept
        folder.mkdir(parents=True)
        started, began = _now(), time.monotonic()
        checks: list[str] = []
        invalid = error = None
        try:
            if server is not None:
                checks += [f"before: {c}" for c in server.check_identity()]
                with self.inside_server():
                    function(server, folder, **arguments)
            else:
                function(folder, **arguments)
        except (HostUnreachable, HostTimeout):
            raise  # this says nothing about the server; a resumed run asks again
        except IdentityError as problem:
            error, invalid = self._died(server), str(problem)
        except WorkbookError as problem:
            error = self._died(server) or f"{type(problem).__name__}: {problem}"
            if not keep_errors:
                raise
        if server is not None and invalid is None and error is None:
            try:
                checks += [f"after: {c}" for c in server.check_identity()]
            except (IdentityError, ServerError) as problem:
                error, invalid = self._died(server), str(problem)
        if error is not None:
            invalid = None  # a server that died under the measurement is a crash, not somebody else's server
        stamp = Stamp(
            name=name,
            arguments_key=key,
            server_key=handle.key if handle else None,
            commit=_git()[0],
            launch_id=server.launch_id if server else None,
            started=started,
            seconds=round(time.monotonic() - began, 3),
            checks=checks,
            invalid=invalid,
            error=error,
        )
        local.write_atomic(folder / "stamp.json", stamp.model_dump_json(indent=1))
        return stamp

    def _died(self, server: Answering | None) -> str | None:
        """The cause in the log if this server's process has ended, else None.

        Raises:
            HostUnreachable: its host can't be reached, so nobody knows.
        """
        if not isinstance(server, Server):
            return None
        if not server.has_ended():
            return None
        code = server.status().get("exit_code")
        return f"ServerDied: the server ended with exit code {code}: {launching.failure_sentence(server.folder, code)}"

    # evidence and records ------------------------------------------------------------------------------------------
    def path(self, file: Path) -> str:
        """A file of this run as records name it: relative to the run's folder."""
        return str(file.resolve().relative_to(self.folder.resolve()))

    def evidence(
        self, file: Path, line: int | None = None, quote: str | None = None, note: str | None = None
    ) -> Evidence:
        """Evidence for a claim: a raw file of this run, a line in it, the words quoted."""
        return Evidence(path=self.path(file), line=line, quote=quote, note=note)

    def note_launch(self, launch_id: str) -> None:
        """Counts a launch among the servers that this notebook's numbers come from."""
        self._used.append(launch_id)

    def skip(self, what: str, why: str) -> None:
        """Records what this notebook does not do here, and why."""
        self.skipped.append(f"{what}: {why}")

    def say(self, text: str) -> None:
        """One line of progress for whoever watches the run (the `workbook` command shows it)."""
        with contextlib.suppress(OSError):
            local.write_atomic(self.folder / ".progress", f"{self.number} {self.saying}{text}")

    def identities(self) -> list[ServerIdentity]:
        """The servers that this notebook's numbers come from, from their raw records."""
        found = []
        for launch_id in dict.fromkeys(self._used):
            found.append(launching.identity_of(self.raw / "servers" / launch_id))
        return [*found, *self.recorded]

    def provenance(self) -> Provenance:
        """What produces this result: commit, Python, packages, parameters, and the machine of the measurements."""
        commit, dirty = _git()
        packages = sorted(f"{d.metadata['Name']}=={d.version}" for d in importlib.metadata.distributions())
        params = redact_object(
            {**self.params.model_dump(mode="json"), "resolved": self.profile.model_dump(mode="json")}
        )
        return Provenance(
            commit=commit,
            dirty=dirty,
            workbook_version=__version__,
            python=platform.python_version(),
            packages_sha256=hashlib.sha256("\n".join(packages).encode()).hexdigest(),
            params_sha256=sha256_of(params),
            params=params,
            host=self.host(),
        )

    def finish(
        self,
        title: str,
        question: str,
        verdicts: Sequence[Verdict],
        recommendation: str,
        predictions: Sequence[Prediction] = (),
        trials: Sequence[Trial] = (),
    ) -> NotebookResult:
        """Stops every server and writes NN.result.json; the notebook's last act."""
        self.close()
        timing = self._timing()
        result = NotebookResult(
            notebook=self.number,
            title=title,
            question=question,
            run_id=self.folder.name,
            profile=self.params.profile,
            **timing,
            provenance=self.provenance(),
            servers=self.identities(),
            predictions=list(predictions),
            trials=list(trials),
            verdicts=list(verdicts),
            recommendation=recommendation,
            skipped=self.skipped,
        )
        local.write_atomic(self.folder / f"{self.number}.result.json", result.model_dump_json(indent=1))
        self.say("done")
        return result

    def _timing(self) -> dict[str, Any]:
        """When and how long it ran, and how much of that inside a server; a rebuild keeps the first measurement's (raw)."""
        file = self.raw / "timing.json"
        if self.offline and file.exists():
            return dict(json.loads(file.read_text()))
        timing = {
            "started": self._started,
            "ended": _now(),
            "seconds": round(time.monotonic() - self._began, 2),
            "server_seconds": round(self._server_s, 2),
        }
        local.write_atomic(file, json.dumps(timing))
        return timing

    def close(self) -> None:
        """Stops every server that this notebook launched (unless params say `keep`)."""
        for handle in self._handles:
            if not handle.params.keep:
                handle.stop()
        atexit.unregister(self.close)

    def earlier(self) -> dict[str, NotebookResult]:
        """Results of the notebooks of this run that are already there, by number."""
        found = {}
        for number in NOTEBOOKS:
            file = self.folder / f"{number}.result.json"
            if file.exists() and number != self.number:
                found[number] = notebook_result(file.read_text())
        return found


#: The run that this kernel has open.
OPEN: list[NotebookRun] = []


def open_notebook(number: str, namespace: Mapping[str, Any]) -> NotebookRun:
    """Checks the parameters in a notebook's namespace and opens its run folder.

    The folder is the runner's (`workbook run`), else the folder of papermill's output notebook, else a new one below
    outputs/<profile>/ for interactive use.

    Raises:
        BadParams: unknown or wrong parameters, all named at once.
    """
    for earlier in OPEN:
        earlier.close()  # the cells are run again in the same kernel: its servers must not share the machine
    params = notebook_params(number, namespace, strict=not OPEN)
    folder = _run_folder(params.profile, namespace)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(
            f"a folder for results at {folder}", str(error), "free space, or choose another folder"
        ) from error
    batch = bool(namespace.get("PAPERMILL_OUTPUT_PATH") or _papermill_output())
    run = NotebookRun(number, params, folder, offline=os.environ.get("WORKBOOK_OFFLINE") == "1", batch=batch)
    OPEN[:] = [run]
    return run


def _run_folder(profile: str, namespace: Mapping[str, Any]) -> Path:
    if os.environ.get("WORKBOOK_RUN_DIR"):
        return Path(os.environ["WORKBOOK_RUN_DIR"])
    output = namespace.get("PAPERMILL_OUTPUT_PATH") or _papermill_output()
    if output:
        return Path(output).resolve().parent
    return outputs_root() / Path(profile).name / f"{new_run_id()}-interactive"


def _papermill_output() -> str | None:
    """The output path on the command line of the papermill that started this kernel, if one did."""
    with contextlib.suppress(psutil.Error, OSError):
        parent = psutil.Process(os.getppid())
        words = parent.cmdline()
        if any(Path(word).name in ("papermill", "papermill.exe") or word == "papermill" for word in words[:4]):
            notebooks = [w for w in words if w.endswith(".ipynb")]
            if len(notebooks) >= 2:
                return str(Path(parent.cwd(), notebooks[1]))
    return None


def owners() -> list[ProcessId]:
    """The processes whose end ends a server: this one, and the `workbook` command above it where there is one."""
    mine = local.process_id(os.getpid())
    above = os.environ.get("WORKBOOK_OWNER", "")
    found = [mine] if mine else []
    if above:
        found.append(local.parse_owner(above))
    return found


def _git() -> tuple[str | None, bool | None]:
    if not shutil.which("git"):
        return None, None
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if head.returncode:
        return None, None
    status = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=ROOT, capture_output=True, text=True)
    return head.stdout.strip(), bool(status.stdout.strip())


def _write_host(folder: Path, on: Mapping[str, Any] | None = None) -> None:
    place = remote.place_of(HostParams.model_validate(on)) if on else None
    found = place.view().describe() if place else local.describe()
    local.write_atomic(folder / "host.json", json.dumps(found, indent=1))


def _write_checkpoint(folder: Path, model_path: str) -> None:
    local.write_atomic(folder / "checkpoint.json", read_checkpoint(model_path).model_dump_json(indent=1))


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def measured_seconds(value: float | None, reason: str = "not reached") -> Measured:
    """Seconds as a `Measured`; None gets its reason."""
    return Measured(
        value=value, unit="s", n=1 if value is not None else None, reason=reason if value is None else "one run"
    )
