"""Runs one task on the machine where it is called: the local engine and workers elsewhere use the same function."""

from __future__ import annotations

import datetime
import hashlib
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from lib import runner
from lib.batch import attempts
from lib.batch.identity import this_host
from lib.batch.storage import FolderStore, Store, store_of
from lib.batch.tasks import READS, Identity, Task, TaskRecord, ended
from lib.errors import NotStopped
from lib.hosts import local
from lib.params import NOTEBOOKS
from lib.records import NotebookState, RunResult


class _Said:
    """Progress handed to a function instead of a terminal."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say

    def show(self, text: str, now: bool = False) -> None:  # noqa: ARG002  (as runner.ProgressLine)
        """Hands on what is being done."""
        self.say(text)

    def close(self) -> None:
        """Nothing is left to say."""


def execute_task(
    task: Task,
    outputs: str,
    attempt: str,
    scratch: Path | None = None,
    say: Callable[[str], None] | None = None,
) -> TaskRecord:
    """Runs a task and leaves its files as one committed attempt in `outputs`.

    Args:
        task: what to run. What it needs is read from the run's folder in `outputs`.
        outputs: a folder, or a URL of a store (lib.batch.storage).
        attempt: a new name, unique over all attempts anywhere (`uuid4().hex[:12]`).
        scratch: a local folder to work in, a new one below the temporary folder if None; with a folder as `outputs` the work
            is done there.
        say: called with a line of progress about every 0.3 s.

    Returns:
        `done`, or `failed` with the reason; a notebook that fails is no exception. Its files are up and committed before it
        returns: `OUTPUTS/.attempts/KEY/ATTEMPT/...` with `commit.json` (the record itself) written last.

    Raises:
        WorkbookError: nothing could be run or stored (store unreachable, disk full): worth another host.
        KeyboardInterrupt: after the notebook's process and its servers are gone.
    """
    import papermill  # noqa: F401  (once, before the fork: 1.5 s)

    store = store_of(outputs)
    if isinstance(store, FolderStore):
        home = store.folder.resolve() / attempts.place(task.key, attempt)
        return _execute(task, store, attempt, home, say)
    home = Path(tempfile.mkdtemp(prefix="workbook-", dir=scratch))
    try:
        return _execute(task, store, attempt, home, say)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _execute(task: Task, store: Store, attempt: str, home: Path, say: Callable[[str], None] | None) -> TaskRecord:
    began, started = time.monotonic(), _now()
    folder = home / task.run_id
    with attempts.working_in(home):
        if isinstance(store, FolderStore):
            _continue(store, task, folder)
        given = _fetch_needs(store, task, folder)
        _write_profile(task, home / "profiles" / task.cell)
        chain = runner.Chain(
            task.cell,
            folder,
            line=(lambda _title: _Said(say)) if say else None,
            environment={"WORKBOOK_PROFILES": str(home / "profiles")},
        )
        params = {"profile": task.cell, **task.params}
        state = chain.notebook(task.number, params, f"{task.cell} {NOTEBOOKS[task.number]}")
        if left := runner.live_servers(folder):
            raise NotStopped("every server of a task is gone", f"pids {left} are left", f"look at {folder}/raw")
        for path in given:
            path.unlink(missing_ok=True)
        result = folder / f"{task.number}.result.json"
        record = ended(task, state.state, state.error, attempt, socket.gethostname()).model_copy(
            update={
                "identity": _found(task),
                "started": started,
                "ended": _now(),
                "seconds": round(time.monotonic() - began, 2),
                "result_sha256": hashlib.sha256(result.read_bytes()).hexdigest() if result.exists() else None,
                "files": _files(folder),
            }
        )
        _hand_over(store, record, folder)
        shutil.rmtree(home / "profiles", ignore_errors=True)
    return record


def _found(task: Task) -> Identity:
    """The planned identity with this machine's hardware in it, unless the server is on another host that the profile names."""
    elsewhere = (task.profile.get("host") or {}).get("kind", "local") != "local"
    return task.identity if elsewhere else task.identity.model_copy(update={"host": this_host()})


def _continue(store: FolderStore, task: Task, folder: Path) -> None:
    """Takes what an attempt that was cut off, or that failed in this run, has measured: same key, same measurement."""
    raw = Path("raw") / task.number
    for earlier in reversed(attempts.abandoned(store, task.key)):
        if earlier == folder.parent:
            continue
        old = next((f for f in earlier.glob(f"*/{raw}") if f.is_dir()), None)
        if old is not None and not (folder / raw).exists():
            (folder / raw).parent.mkdir(parents=True, exist_ok=True)
            old.rename(folder / raw)
        shutil.rmtree(earlier, ignore_errors=True)
    failed = store.folder / task.cell / task.run_id / raw
    if failed.is_dir() and not (folder / raw).exists():
        shutil.copytree(failed, folder / raw, symlinks=True)


def _fetch_needs(store: Store, task: Task, folder: Path) -> list[Path]:
    """Results of the same run that the notebook reads."""
    folder.mkdir(parents=True, exist_ok=True)
    given = []
    for number in READS.get(task.number, ()) if task.needs else ():
        name = f"{number}.result.json"
        data = store.get(f"{task.cell}/{task.run_id}/{name}")
        if data is not None:
            given.append(local.write_atomic(folder / name, data))
    if given:  # what notebook 06 says of the others comes from the index
        states = [NotebookState(notebook=path.name[:2], state="done", result=path.name) for path in given]
        index = RunResult(
            run_id=task.run_id, profile=task.cell, started=_now(), ended=None, seconds=None, server_seconds=None,
            state="running", selected=[*(s.notebook for s in states), task.number], notebooks=states,
        )  # fmt: skip
        given.append(local.write_atomic(folder / "result.json", index.model_dump_json(indent=1)))
    return given


def _write_profile(task: Task, folder: Path) -> None:
    local.write_atomic(folder / "profile.yaml", yaml.safe_dump(task.profile, sort_keys=False))
    local.write_atomic(folder / f"{task.number}.yaml", yaml.safe_dump(task.params, sort_keys=False))


def _files(folder: Path) -> dict[str, int]:
    """Bytes of everything that a run's folder holds, but the runner's own notes."""
    found = (f for f in sorted(folder.rglob("*")) if f.is_file() and not f.is_symlink())
    return {
        str(f.relative_to(folder)): f.stat().st_size
        for f in found
        if f.name not in (".progress", ".lock") and not f.name.endswith(".result.earlier.json")
    }


def _hand_over(store: Store, record: TaskRecord, folder: Path) -> None:
    if not isinstance(store, FolderStore):
        for path in record.files:
            store.upload(folder / path, f"{attempts.place(record.key, record.attempt)}/{record.run_id}/{path}")
    attempts.commit(store, record)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
