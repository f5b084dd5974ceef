"""Runs the notebooks of a profile in order, keeps what failed, and ends nothing but its own.

Each notebook runs by papermill's API in a forked child (papermill is imported once), in its own session: Ctrl-C reaches
this process alone, which then ends the child, sees the servers gone and leaves a run that `--resume` continues.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import yaml
from pydantic import ValidationError
from tqdm import tqdm

from lib.errors import BadInput, Busy, NotStopped, WorkbookError
from lib.hosts import local
from lib.migrations import NewerVersion, notebook_result, run_result, up_to_date
from lib.params import NOTEBOOKS, ROOT, load_notebook
from lib.records import NotebookResult, NotebookState, RunResult, Status
from lib.results import new_run_id, outputs_root, run_folders

#: Seconds that a notebook's child gets to end by itself after Ctrl-C before it is killed.
INTERRUPT_DEADLINE_S = 8.0
PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def only_run(root: Path, profile: str) -> Iterator[None]:
    """Holds the lock of an outputs folder; the operating system frees it when the process ends, however it ends.

    Raises:
        Busy: another run holds it; names pid, profile and since when.
    """
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            raise Busy(
                "no other run of this workbook", f"one is running: {holder}", "wait for it, or end it with Ctrl-C"
            ) from None
        lock.truncate(0)
        lock.write(f"pid {os.getpid()}, profile {profile}, since {datetime.datetime.now():%Y-%m-%d %H:%M:%S}")
        lock.flush()
        yield


class Chain:
    """One run: its folder, its notebooks, its index."""

    def __init__(
        self,
        profile: str,
        folder: Path,
        offline: bool = False,
        line: Callable[[str], ProgressLine] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Opens a run's folder, or the run that is in it.

        Args:
            profile: a name under params/ (or under WORKBOOK_PROFILES of `environment`), or a folder.
            folder: of the run.
            offline: derive everything from raw records; nothing is launched.
            line: makes the line of progress of a notebook from its title; None: one on standard error.
            environment: variables for the notebooks' processes.
        """
        self.profile, self.folder, self.offline = profile, folder, offline
        self.line, self.environment = line or TerminalLine, dict(environment or {})
        self.started = _now()
        self.selected: list[str] = []
        self.earlier_s = 0.0
        self.kept: RunResult | None = None
        self.states = {number: NotebookState(notebook=number, state="not_run") for number in NOTEBOOKS}
        if (folder / "result.json").exists():
            earlier = read_run(folder)
            self.started = earlier.started
            self.selected = earlier.selected
            self.earlier_s = earlier.seconds or 0.0
            self.kept = earlier if offline else None  # a rebuild is not when, nor how long, the run was
            self.states.update({state.notebook: state for state in earlier.notebooks})

    def run(self, numbers: Sequence[str], params: dict[str, dict[str, Any]]) -> RunResult:
        """Runs these notebooks in order; a failed one is kept and the next goes on.

        Raises:
            KeyboardInterrupt: after the notebook's child and every server of it are gone and the index is written.
        """
        import papermill  # noqa: F401  (once, before the fork: 1.5 s)

        began = time.monotonic()
        self.selected = [n for n in NOTEBOOKS if n in {*self.selected, *numbers}]
        self._index("running", None)
        for place, number in enumerate(numbers, 1):
            title = f"[{place}/{len(numbers)}] {NOTEBOOKS[number]}"
            try:
                self.states[number] = self.notebook(number, params[number], title)
            except KeyboardInterrupt:
                self.states[number] = NotebookState(
                    notebook=number, state="interrupted", error="interrupted by the user"
                )
                self._index("interrupted", time.monotonic() - began)
                self._site()
                raise
            self._index("running", None)
        failed = [s for s in self.states.values() if s.state == "failed"]
        result = self._index("failed" if failed else "done", time.monotonic() - began)
        self._site()
        return result

    def notebook(self, number: str, params: dict[str, Any], title: str) -> NotebookState:
        """Runs one notebook in the run's folder; the index and the pages are not touched.

        Raises:
            KeyboardInterrupt: after the notebook's child and every server of it are gone.
        """
        began = time.monotonic()
        local.write_atomic(self.folder / "params" / f"{number}.yaml", yaml.safe_dump(params, sort_keys=False))
        output = self.folder / f"{number}.ipynb"
        result_file = self.folder / f"{number}.result.json"
        kept = result_file.with_name(f"{number}.result.earlier.json")
        if result_file.exists():
            result_file.replace(kept)
        me = local.process_id(os.getpid())
        environment = {
            **self.environment,
            "WORKBOOK_RUN_DIR": str(self.folder.resolve()),
            "WORKBOOK_OWNER": local.owner_token(me) if me else "",
            "WORKBOOK_OFFLINE": "1" if self.offline else "0",
            "WORKBOOK_SOCKETS": tempfile.mkdtemp(prefix="workbook-"),
        }
        reader, writer = multiprocessing.Pipe(duplex=False)
        source = ROOT / "notebooks" / f"{NOTEBOOKS[number]}.ipynb"
        child = multiprocessing.get_context("fork").Process(
            target=_execute,
            args=(source, output, params, environment, writer),
            name=NOTEBOOKS[number],
            daemon=True,
        )
        child.start()
        writer.close()
        try:
            error = self._wait(child, reader, title)
        finally:
            shutil.rmtree(environment["WORKBOOK_SOCKETS"], ignore_errors=True)
        if error is None:
            error = _invalid_result(result_file)
        if error is None:
            kept.unlink(missing_ok=True)
        return NotebookState(
            notebook=number,
            state="failed" if error else "done",
            error=error,
            result=result_file.name if result_file.exists() else None,
            ipynb=output.name if output.exists() else None,
            html=f"{number}.html" if output.exists() else None,
            seconds=round(time.monotonic() - began, 2),
        )

    def _wait(self, child: Any, reader: Any, title: str) -> str | None:
        progress = self.folder / ".progress"
        progress.unlink(missing_ok=True)
        line = self.line(title)
        try:
            while child.is_alive():
                child.join(0.3)
                with contextlib.suppress(OSError):
                    line.show(progress.read_text()[3:103])
            with contextlib.suppress(EOFError):
                if reader.poll():
                    return str(reader.recv())
            return None if child.exitcode == 0 else f"the notebook's process ended with {child.exitcode}"
        except BaseException:  # whatever it is: first the child and its server, then words
            self._end(child)
            line.show("interrupted; its server is ended", now=True)
            raise
        finally:
            progress.unlink(missing_ok=True)
            line.close()

    def _end(self, child: Any) -> None:
        """Ends a notebook's child and waits until every server below the run's folder is gone."""
        here = threading.current_thread() is threading.main_thread()  # signals are its own; a worker's thread gets none
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if here else ()
        previous = [signal.signal(n, signal.SIG_IGN) for n in numbers]  # a second Ctrl-C must not leave a server behind
        try:
            child.terminate()
            child.join(INTERRUPT_DEADLINE_S)
            if child.is_alive():
                child.kill()
                child.join()
            wait_servers_gone(self.folder, 20.0)
            from lib.server.remote import wait_run_gone

            wait_run_gone(self.folder, lambda _: None)
        finally:
            for number, handler in zip(numbers, previous, strict=True):
                signal.signal(number, handler)

    def _index(self, state: str, seconds: float | None) -> RunResult:
        results = [read_result(self.folder / s.result) for s in self.states.values() if s.result]
        result = RunResult(
            run_id=self.folder.name,
            profile=self.profile,
            started=self.started,
            ended=self.kept.ended if self.kept else None if state == "running" else _now(),
            seconds=self.kept.seconds
            if self.kept
            else round(self.earlier_s + seconds, 2)
            if seconds is not None
            else None,
            server_seconds=round(sum(r.server_seconds for r in results if r), 2),
            state=state,
            selected=self.selected,
            notebooks=list(self.states.values()),
        )
        local.write_atomic(self.folder / "result.json", result.model_dump_json(indent=1))
        return result

    def _site(self) -> None:
        from lib.report.site import build_site

        build_site(self.folder)


class ProgressLine(Protocol):
    """Where a notebook's progress is shown."""

    def show(self, text: str, now: bool = False) -> None:
        """What is being done; called about three times a second, `now` for what must be seen."""
        ...

    def close(self) -> None:
        """The notebook has ended."""
        ...


class TerminalLine:
    """One line that is rewritten on a terminal; elsewhere a new line at most every 30 s."""

    def __init__(self, title: str) -> None:
        self.title, self.began, self.last = title, time.monotonic(), 0.0
        self.terminal = sys.stderr.isatty()
        self.bar = tqdm(total=0, bar_format="{desc}", leave=True, disable=not self.terminal)

    def show(self, text: str, now: bool = False) -> None:
        """Shows what is being done and for how long the notebook has run."""
        elapsed = time.monotonic() - self.began
        line = f"{self.title} {elapsed:4.0f} s  {text}"
        with contextlib.suppress(OSError):  # nobody reads any more (`| tee` ended by Ctrl-C)
            if self.terminal:
                self.bar.set_description_str(line)
            elif now or elapsed - self.last >= 30:
                self.last = elapsed
                tqdm.write(line, file=sys.stderr)

    def close(self) -> None:
        """Leaves the title and the time that the notebook took."""
        line = f"{self.title} {time.monotonic() - self.began:4.0f} s"
        with contextlib.suppress(OSError):
            if self.terminal:
                self.bar.set_description_str(line)
            else:
                tqdm.write(line, file=sys.stderr)
            self.bar.close()


def become_child() -> None:
    """In the forked child: a session of its own that Ctrl-C does not reach and that ends with `workbook`, however that ends."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _execute(source: Path, output: Path, params: dict[str, Any], environment: dict[str, str], writer: Any) -> None:
    """In the forked child: executes one notebook; sends one message if it fails."""
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError
    from traitlets.config import Config

    become_child()
    os.environ.update(environment)
    sockets = environment["WORKBOOK_SOCKETS"]
    try:
        papermill.execute_notebook(
            str(source),
            str(output),
            parameters=params,
            progress_bar=False,
            cwd=str(ROOT),
            kernel_name="python3",
            start_timeout=120,
            # no open TCP ports for the kernel, and its sockets outside the checkout
            config=Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}}),
        )
    except PapermillExecutionError as error:
        writer.send(f"cell {error.exec_count}: {error.ename}: {error.evalue}"[:2000])
    except OSError as error:
        writer.send(f"{type(error).__name__}: {error}"[:2000])
    except DeadKernelError:
        writer.send(
            "the notebook's kernel died (killed, or out of memory): its last cells are in the .ipynb; run it again with --resume"
        )
    except Exception as error:  # noqa: BLE001  (whatever it is, the chain goes on and the report names it)
        writer.send(f"{type(error).__name__}: {error}: {traceback.format_exc(limit=-2)}"[:2000])
    finally:
        writer.close()


def read_run(folder: Path) -> RunResult:
    """The index of a run (result.json).

    Raises:
        BadInput: there is none, or it is not valid.
    """
    try:
        return run_result((folder / "result.json").read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"a run's result.json in {folder}", str(error).splitlines()[0]) from error


def read_result(file: Path) -> NotebookResult | None:
    """A notebook's result, or None if there is no valid one."""
    try:
        return notebook_result(file.read_text())
    except (OSError, ValueError, NewerVersion):
        return None


def _invalid_result(file: Path) -> str | None:
    if not file.exists():
        return f"the notebook ran to its end but left no {file.name}"
    try:
        notebook_result(file.read_text())
    except ValidationError as error:
        return f"{file.name} is not valid: {error.error_count()} faults, first: {error.errors()[0]['msg']}"
    except ValueError as error:
        return f"{file.name} is not JSON: {error}"
    return None


def live_servers(folder: Path) -> list[int]:
    """Pids of servers launched below a run's folder that still run (kept ones left out)."""
    left = []
    for file in folder.glob("raw/*/servers/*/status.json"):
        with contextlib.suppress(ValueError, OSError):
            status = json.loads(file.read_text())
            if not status.get("pid") or status.get("state") == "ended" or status.get("keep"):
                continue
            leader = local.ProcessId(
                int(status["pid"]), float(status["pid_start_time"] or 0), status.get("pid_start_ticks")
            )
            if leader.alive():
                left.append(leader.pid)
    return left


def wait_servers_gone(folder: Path, deadline_s: float) -> list[int]:
    """Waits until no server of a run is left; returns those that still are after the deadline."""
    end = time.monotonic() + deadline_s
    while (left := live_servers(folder)) and time.monotonic() < end:
        time.sleep(0.2)
    return left


def run(
    profile: str, only: Sequence[str] | None = None, resume: str | None = None, strict: bool = False
) -> tuple[int, Path]:
    """Runs a profile's notebooks.

    Args:
        profile: a name under params/, or a folder.
        only: numbers of the notebooks to run, None for all.
        resume: run id or folder of an earlier run to continue; what is done in it is not repeated.
        strict: a failed verdict gives exit code 3.

    Returns:
        The exit code (0 all ran and wrote valid results, 1 one failed, 3 strict and a verdict failed) and the folder.
    """
    folder = find_run(resume) if resume is not None else None
    profile = _absolute(profile)
    if folder:
        earlier = read_run(folder)
        if (folder / "cell.json").exists():
            found = f"{folder.parent.name} is a cell of a matrix"
            raise BadInput("--resume of a profile's run", found, "run its matrix again: it goes on by what is done")
        profile = earlier.profile
        only = earlier.selected if only is None else only
    numbers = _numbers(only)
    params = {number: load_notebook(profile, number) for number in numbers}
    root = outputs_root()
    with _clear_disk_errors(root), only_run(root, profile):
        folder = folder or root / Path(profile).name / new_run_id()
        folder.mkdir(parents=True, exist_ok=True)
        with only_run(folder, profile):
            chain = Chain(profile, folder)
            if resume:
                todo = [n for n in numbers if chain.states[n].state != "done"]
                if todo and "06" in numbers and "06" not in todo:
                    todo.append(
                        "06"
                    )  # the state document speaks of all the others; what 06 measured is not taken again
                numbers = todo
            try:
                result = chain.run(numbers, params)
            finally:
                if problem := _remember(root, folder):
                    sys.stderr.write(f"workbook: {problem}\n")
            left = live_servers(folder)
    if left:
        raise NotStopped(
            "every server of this run is gone",
            f"pids {left} are left",
            f"look at them; their records are in {folder}/raw",
        )
    if any(s.state == "failed" for s in result.notebooks):
        return 1, folder
    return (3 if strict and _failed_verdicts(folder) else 0), folder


def rebuild(run_id: str) -> tuple[int, Path]:
    """Derives notebooks, results and pages of a run again from its raw files, without any server."""
    folder = find_run(run_id)
    earlier = read_run(folder)
    numbers = [n for n in NOTEBOOKS if (folder / "params" / f"{n}.yaml").exists()]
    params = {n: yaml.safe_load((folder / "params" / f"{n}.yaml").read_text()) for n in numbers}
    with _clear_disk_errors(folder), only_run(folder, earlier.profile):
        result = Chain(earlier.profile, folder, offline=True).run(numbers, params)
        if problem := _remember(outputs_root(), folder):
            sys.stderr.write(f"workbook: {problem}\n")
    return (1 if any(s.state == "failed" for s in result.notebooks) else 0), folder


def _remember(root: Path, folder: Path) -> str | None:
    """The run in the index of runs; why not, if it could not be written there."""
    from lib.report.history import record_run  # the report's packages take a second to import

    return record_run(root, folder)


@contextlib.contextmanager
def _clear_disk_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        raise WorkbookError(
            f"results can be written below {root}",
            f"{error.strerror or error}",
            "free space there, or set WORKBOOK_OUTPUTS to another folder",
        ) from error


def _absolute(profile: str) -> str:
    """A profile given as a folder becomes an absolute path: notebooks run in another working folder."""
    known = (ROOT / "params" / profile / "profile.yaml").is_file()
    return profile if known or not (Path(profile) / "profile.yaml").is_file() else str(Path(profile).resolve())


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _numbers(only: Sequence[str] | None) -> list[str]:
    wanted = list(NOTEBOOKS) if only is None else [n.strip().zfill(2) for n in only]
    unknown = [n for n in wanted if n not in NOTEBOOKS]
    if unknown:
        raise BadInput(f"--only takes numbers of notebooks ({', '.join(NOTEBOOKS)})", ", ".join(unknown))
    return [n for n in NOTEBOOKS if n in wanted]


def find_run(run_id: str) -> Path:
    """The folder of a run, by its folder, its id, PROFILE/ID, or `latest`; BadInput names the latest runs if there is none."""
    runs = sorted(run_folders(outputs_root()), key=lambda f: (f / "result.json").stat().st_mtime)
    direct = Path(run_id)
    matching = [f for f in runs if run_id in (f.name, f"{f.parent.name}/{f.name}")]
    if run_id == "latest" and runs:
        matching = runs[-1:]
    elif (direct / "result.json").is_file():
        matching = [direct.resolve()]
    if len(matching) == 1:
        _refuse_newer(matching[0])
        return matching[0]
    known = ", ".join(f"{f.parent.name}/{f.name}" for f in runs[-3:]) or "none yet"
    raise BadInput(
        f"a run with result.json named {run_id!r}",
        f"{len(matching)} of that name; latest runs: {known}",
        "give its folder, or PROFILE/ID",
    )


def _refuse_newer(folder: Path) -> None:
    """Refuses a run that a newer workbook wrote; what is unreadable otherwise is said by what reads it.

    Raises:
        NewerVersion: names the file.
    """
    for file in sorted(folder.glob("*result.json")):
        with contextlib.suppress(OSError, json.JSONDecodeError, UnicodeDecodeError):
            data = json.loads(file.read_text())
            try:
                up_to_date(data, "run" if file.name == "result.json" else "notebook")
            except NewerVersion as error:
                raise NewerVersion(f"{folder.name}/{file.name} is {error.expected}", error.found, error.do) from None


def _failed_verdicts(folder: Path) -> bool:
    results = [read_result(folder / f"{n}.result.json") for n in NOTEBOOKS]
    return any(v.status in (Status.FAIL, Status.INVALID, Status.ERROR) for r in results if r for v in r.verdicts)
