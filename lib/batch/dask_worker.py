"""What runs inside a dask worker: who it is, what a host there is, and one task in a process of its own.

Functions of this module are sent by name, so the worker needs the same version of this project; `about` tells.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import selectors
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib.batch import attempts
from lib.batch.identity import identify
from lib.batch.matrix import Cell
from lib.batch.one_task import INTERRUPTED, MARK
from lib.batch.storage import store_of
from lib.batch.tasks import Task, TaskRecord
from lib.errors import HostError, WorkbookError
from lib.params import ROOT

#: Seconds between two looks whether the task is still wanted.
LOOK_S = 0.5
#: Seconds that an ended task gets to see its servers gone before it is killed.
END_S = 60.0
_devices = threading.Lock()
_taken: set[int] = set()
_running: set[str] = set()


def code_sha256() -> str:
    """SHA-256 over this project's code and notebooks: two machines that agree in it run the same."""
    digest = hashlib.sha256()
    files = [*(ROOT / "lib").rglob("*.py"), *(ROOT / "notebooks").glob("*.ipynb")]
    for file in sorted(files):
        digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def machine() -> str:
    """A name for the machine that this process runs on: two workers with the same name share it."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{platform.node()} ({boot[:8]})"


def about() -> dict[str, Any]:
    """Which machine a worker is on, and which code it would run."""
    return {"machine": machine(), "hostname": platform.node(), "code": code_sha256(), "python": sys.executable}


def running() -> list[str]:
    """Names of the tasks that have a process on this worker."""
    return sorted(_running)


def identify_cells(cells: Sequence[str]) -> dict[str, str]:
    """By cell id the identity (JSON) of what this machine is and has for it; cells are JSON."""
    return {(cell := Cell.model_validate_json(text)).id: identify(cell).model_dump_json() for text in cells}


def blind(outputs: str, mark: str) -> str | None:
    """Why this machine does not see a mark in the outputs; None if it does."""
    try:
        seen = store_of(outputs).get(mark) is not None
    except WorkbookError as error:
        return f"{machine()}: {error}"
    return None if seen else f"{machine()} sees other outputs at {outputs}"


def run_task(text: str, outputs: str, submission: str, topic: str, mark: str) -> str:
    """Run one task (JSON) and return its record (JSON); called by the scheduler, again elsewhere where a host was lost.

    An attempt of the same submission that was committed before its host was lost is taken as it is.

    Args:
        submission: six letters that name what was asked for once; every attempt's name begins with them.
        topic: where events go: {event, key, host, machine, attempt, text}.
        mark: a file in the outputs that this machine must see.

    Raises:
        HostError: nothing could be run or stored here; another host may do it.
    """
    from distributed import get_worker

    worker = get_worker()
    task = Task.model_validate_json(text)
    attempt = f"{submission}{uuid.uuid4().hex[:6]}"
    base = {
        "key": task.key,
        "host": platform.node(),
        "machine": machine(),
        "worker": worker.address,
        "attempt": attempt,
    }

    def tell(event: str, said: str = "") -> None:
        worker.log_event(topic, {**base, "event": event, "text": said})

    if why := blind(outputs, mark):
        raise HostError("outputs that every worker sees", why)
    earlier = next((r for r in commits(outputs, task.key) if r.attempt.startswith(submission)), None)
    if earlier is not None:
        tell("taken over", earlier.attempt)
        return earlier.model_dump_json()
    tell("started")
    name = worker.get_current_task()

    def wanted() -> bool:
        known = worker.state.tasks.get(name)
        there = worker.status.name not in ("closing", "closed", "failed")
        return there and known is not None and known.state not in ("cancelled", "released", "forgotten")

    count = task.resources.gpus if not task.resources.exclusive else 0
    _running.add(str(name))
    try:
        with _gpus(count, int(worker.state.total_resources.get("GPU", 0))) as devices:
            record = _in_process(task, outputs, attempt, devices, tell, wanted)
    finally:
        _running.discard(str(name))
    tell("ended", record.state)
    return record.model_dump_json()


def commits(outputs: str, key: str) -> list[TaskRecord]:
    """Every attempt at a task that was committed and is in no run."""
    store = store_of(outputs)
    found = (attempts.read_commit(store, key, name) for name in store.children(f"{attempts.ATTEMPTS}/{key}"))
    return [record for record in found if record is not None]


@contextlib.contextmanager
def _gpus(count: int, of: int) -> Any:
    """Indices of GPUs that no other task of this worker has; none for a task that has the whole host."""
    if not count:
        yield []
        return
    with _devices:
        free = [n for n in range(of) if n not in _taken][:count]
        _taken.update(free)
    try:
        if len(free) < count:
            raise HostError(f"{count} free GPUs of {of}", f"{len(free)}")
        yield free
    finally:
        with _devices:
            _taken.difference_update(free)


def _in_process(task: Task, outputs: str, attempt: str, devices: Sequence[int], tell: Any, wanted: Any) -> TaskRecord:
    """The task in its own process; ended, servers and all, when nobody wants it any more."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(":"),
    }
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    process = subprocess.Popen(
        [sys.executable, "-m", "lib.batch.one_task", str(os.getpid())], cwd=ROOT, env=environment, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        asked = {"task": task.model_dump(mode="json"), "outputs": outputs, "attempt": attempt}
        if process.stdin:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(asked).encode() + b"\n")
                process.stdin.flush()
        said, errors = _listen(process, tell, wanted)
    finally:
        _end(process)
    if "record" in said:
        return TaskRecord.model_validate(said["record"])
    if process.returncode == INTERRUPTED:
        raise HostError("a task that runs to its end", "it was ended")
    last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
    raise HostError(
        f"notebook {task.number} of {task.cell} can be run and stored on {platform.node()}",
        said.get("error") or f"exit {process.returncode}: {last[0]}",
    )


def _listen(process: subprocess.Popen[bytes], tell: Any, wanted: Any) -> tuple[dict[str, Any], bytes]:
    """Lines of the process until it ends or is ended: what it said at last, and the end of its standard error."""
    said: dict[str, Any] = {}
    errors, rest = b"", b""
    ended = False
    with selectors.DefaultSelector() as selector:
        for stream in filter(None, (process.stdout, process.stderr)):
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            if not ended and not wanted():
                ended = True
                process.send_signal(signal.SIGINT)
            for key, _ in selector.select(LOOK_S):
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fileobj)
                elif key.fileobj is process.stderr:
                    errors = (errors + data)[-4000:]
                else:
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        _take(line, said, tell)
            if process.poll() is not None and not selector.select(0.2):
                break  # a child that it left behind may hold its pipes open
    return said, errors


def _take(line: bytes, said: dict[str, Any], tell: Any) -> None:
    text = line.decode(errors="replace")
    if not text.startswith(MARK):
        return
    with contextlib.suppress(ValueError):
        what = json.loads(text.removeprefix(MARK))
        if "progress" in what and what["progress"] != said.get("progress"):
            tell("progress", what["progress"])
        said |= what


def _end(process: subprocess.Popen[bytes]) -> None:
    """See the process gone: it is asked first, so that it can see its servers gone."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + END_S
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        if process.poll() is None:
            process.kill()
    process.wait()
    for stream in filter(None, (process.stdin, process.stdout, process.stderr)):
        with contextlib.suppress(OSError):
            stream.close()
