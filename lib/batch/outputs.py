"""The runs of a matrix in their store: the index of each, written after the files that it names, and its pages.

Of an object store a local copy is kept below `outputs/.remote/`: indexes, results, notebooks and the evidence that pages show.
`workbook history` and `compare` read that copy (`--outputs URL` brings it up to date).
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
from pathlib import Path

from lib.batch.ledger import Ledger
from lib.batch.matrix import Cell
from lib.batch.storage import FolderStore, Store
from lib.batch.tasks import TaskRecord
from lib.errors import BadInput
from lib.hosts import local
from lib.migrations import NewerVersion, notebook_result, run_result
from lib.params import NOTEBOOKS
from lib.records import NotebookResult, NotebookState, RunResult
from lib.results import outputs_root

REMOTE = ".remote"
#: Files of evidence above this are not copied for the pages.
EVIDENCE_BYTES = 8_000_000


def local_copy(store: Store) -> Path:
    """The folder of a store, or the folder that holds the local copy of an object store."""
    if isinstance(store, FolderStore):
        return store.folder.resolve()
    return outputs_root() / REMOTE / hashlib.sha256(store.url.encode()).hexdigest()[:16]


class RunFiles:
    """One cell's run: what the ledger says of its notebooks, turned into result.json and pages."""

    def __init__(self, store: Store, here: Path, cell: Cell, run_id: str) -> None:
        self.store, self.cell, self.run_id = store, cell, run_id
        self.folder = here / cell.id / run_id
        self.root = here
        self.states = {number: NotebookState(notebook=number, state="not_run") for number in NOTEBOOKS}
        self.files: dict[str, int] = {}
        self.written = False
        self.started = _now()

    def put(self, record: TaskRecord) -> None:
        """Takes in how a task of this run ended."""
        number = record.number
        kept = record.state in ("done", "failed")
        self.files.update(record.files)
        self.states[number] = NotebookState(
            notebook=number,
            state={"skipped": "not_run", "lost": "failed"}.get(record.state, record.state),
            error=record.error,
            result=f"{number}.result.json" if f"{number}.result.json" in record.files else None,
            ipynb=f"{number}.ipynb" if f"{number}.ipynb" in record.files else None,
            html=f"{number}.html" if kept and f"{number}.ipynb" in record.files else None,
            seconds=record.seconds,
            taken_from=record.taken_from,
        )

    def interrupted(self, number: str) -> None:
        """A notebook was ended in the middle."""
        self.states[number] = NotebookState(notebook=number, state="interrupted", error="interrupted by the user")

    def result(self, number: str) -> NotebookResult | None:
        """A notebook's result, None if it left no valid one."""
        name = self.states[number].result
        data = self.store.get(f"{self.cell.id}/{self.run_id}/{name}") if name else None
        if data is None:
            return None
        with contextlib.suppress(ValueError, NewerVersion):
            return notebook_result(data)
        return None

    def results(self) -> dict[str, NotebookResult]:
        """Valid results by number."""
        found = {number: self.result(number) for number in self.cell.params}
        return {number: result for number, result in found.items() if result is not None}

    def index(self, state: str) -> RunResult:
        """The run's index in this state: running, done, failed, interrupted."""
        seconds = [s.seconds for s in self.states.values() if s.seconds is not None and s.taken_from is None]
        ended = state != "running"
        results = self.results() if ended else {}
        return RunResult(
            run_id=self.run_id,
            profile=self.cell.id,
            started=self.started,
            ended=_now() if ended else None,
            seconds=round(sum(seconds), 2) if ended else None,
            server_seconds=round(sum(r.server_seconds for r in results.values()), 2) if ended else None,
            state=state,
            selected=list(self.cell.params),
            notebooks=list(self.states.values()),
        )

    def write_index(self, state: str) -> RunResult:
        """Writes result.json; every file that it names is there already."""
        if not self.written:
            with contextlib.suppress(ValueError, NewerVersion):
                if (earlier := self.store.get(f"{self.cell.id}/{self.run_id}/result.json")) is not None:
                    self.started = run_result(earlier).started
        made = self.index(state)
        data = made.model_dump_json(indent=1).encode()
        if not self.written:
            self.store.put(f"{self.cell.id}/{self.run_id}/cell.json", self.cell.model_dump_json(indent=1).encode())
            self.written = True
        self.store.put(f"{self.cell.id}/{self.run_id}/result.json", data)
        if not isinstance(self.store, FolderStore):
            local.write_atomic(self.folder / "result.json", data)
        return made

    def close(self, state: str | None = None) -> None:
        """Writes the last index and the pages, and puts the run into the index of runs."""
        from lib.report.history import record_run
        from lib.report.site import build_site

        wanted = [self.states[number] for number in self.cell.params]
        whole = all(one.state == "done" for one in wanted)
        self.write_index(state or ("done" if whole else "failed"))
        if isinstance(self.store, FolderStore):
            build_site(self.folder)
        else:
            fetch_run(self.store, self.root, self.cell.id, self.run_id, self.files)
            build_site(self.folder)
            for page in sorted(self.folder.glob("*.html")):
                self.store.upload(page, f"{self.cell.id}/{self.run_id}/{page.name}")
        record_run(self.root, self.folder)


def refresh(store: Store, root: Path) -> None:
    """Brings the local copy of an object store up to date: indexes and results of all runs that changed since.

    Raises:
        StoreError: the store can't be read.
    """
    for cell, runs in Ledger(store, root).runs().items():
        for run_id, records in runs.items():
            file = root / cell / run_id / "result.json"
            latest = max((record.ended or "" for record in records.values()), default="")
            with contextlib.suppress(OSError, ValueError, NewerVersion):
                if (run_result(file.read_bytes()).ended or "") >= latest:
                    continue
            with contextlib.suppress(BadInput):  # its first task has ended, its index is about to be written
                fetch_run(store, root, cell, run_id)


def fetch_run(store: Store, root: Path, cell: str, run_id: str, files: dict[str, int] | None = None) -> Path:
    """Brings a run's index and results into the local copy; with `files` (bytes by path) also what its pages show.

    Raw files that no page quotes become empty files of the right size, so that links and counts are right; they are not read.

    Raises:
        BadInput: there is no such run.
    """
    folder = root / cell / run_id
    data = store.get(f"{cell}/{run_id}/result.json")
    if data is None:
        raise BadInput(
            f"a run {cell}/{run_id} in {store.url}", "no result.json there", "look at `workbook history --outputs URL`"
        )
    local.write_atomic(folder / "result.json", data)
    quoted: set[str] = set()
    for state in run_result(data).notebooks:
        for name in (state.result, state.ipynb if files is not None else None):
            if name and (content := store.get(f"{cell}/{run_id}/{name}")) is not None:
                local.write_atomic(folder / name, content)
        if state.result and (folder / state.result).exists():
            with contextlib.suppress(ValueError):
                result = notebook_result((folder / state.result).read_bytes())
                quoted |= {e.path for verdict in result.verdicts for e in verdict.evidence}
                quoted |= {e.path for trial in result.trials for e in trial.evidence}
    for path, size in (files or {}).items():
        _evidence(store, f"{cell}/{run_id}/{path}", folder / path, size, path in quoted)
    return folder


def _evidence(store: Store, path: str, place: Path, size: int, quoted: bool) -> None:
    if place.exists():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    if quoted and size <= EVIDENCE_BYTES and (data := store.get(path)) is not None:
        local.write_atomic(place, data)
        return
    place.touch()
    os.truncate(place, size)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
