"""A task's own process on a worker: its words, its end with its worker, and the GPUs that it sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lib.batch import dask_worker
from lib.batch.one_task import INTERRUPTED, MARK
from lib.errors import HostError
from lib.params import ROOT
from tests.batch.made_tasks import task

WORDS = [sys.executable, "-m", "lib.batch.one_task"]


def asked(outputs: Path) -> str:
    """What a worker writes to its standard input."""
    return (
        json.dumps({"task": task(1).model_dump(mode="json"), "outputs": str(outputs), "attempt": "abcdef012345"}) + "\n"
    )


def test_a_task_whose_worker_is_gone_does_not_begin(tmp_path: Path) -> None:
    """Its parent is another process than it was told: ended as by Ctrl-C, and nothing is written."""
    done = subprocess.run([*WORDS, "1"], cwd=ROOT, input=asked(tmp_path / "outputs"), capture_output=True, text=True)
    assert done.returncode == INTERRUPTED and not (tmp_path / "outputs").exists(), done.stderr


def test_it_ends_when_its_worker_ends() -> None:
    """The process that started it is killed while it waits for its task: it is gone too."""
    code = (
        "import os, subprocess, sys, time; p = subprocess.Popen([*sys.argv[1:], str(os.getpid())], stdin=subprocess.PIPE); "
        "print(p.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, *WORDS], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    child = int(parent.stdout.readline())
    deadline = time.monotonic() + 20
    while b"one_task" not in Path(f"/proc/{child}/cmdline").read_bytes() or _sleeping(child) is False:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1.5)  # imports
    parent.kill()
    parent.wait()
    while Path(f"/proc/{child}").exists() and _state(child) != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def _sleeping(pid: int) -> bool:
    return _state(pid) == "S"


def test_what_it_cannot_store_is_said_in_one_line(tmp_path: Path) -> None:
    """Outputs below a file: the worker learns why, as an error that sends the task to another machine."""
    (tmp_path / "file").write_text("")
    words = [*WORDS, str(os.getpid())]
    done = subprocess.run(words, cwd=ROOT, input=asked(tmp_path / "file" / "outputs"), capture_output=True, text=True)
    said = [json.loads(line.removeprefix(MARK)) for line in done.stdout.split("\n") if line.startswith(MARK)]
    assert done.returncode == 1 and "Not a directory" in said[-1]["error"] and "Traceback" not in done.stderr


def test_tasks_that_share_a_host_see_gpus_of_their_own() -> None:
    """Of four GPUs two tasks get two each, a third none until one has ended; a task with the whole host is told nothing."""
    with dask_worker._gpus(2, 4) as first, dask_worker._gpus(2, 4) as second:
        assert (first, second) == ([0, 1], [2, 3])
        with pytest.raises(HostError, match="1 free GPUs of 4"), dask_worker._gpus(1, 4):
            pass
    with dask_worker._gpus(4, 4) as whole, dask_worker._gpus(0, 4) as none:
        assert (whole, none) == ([0, 1, 2, 3], [])


def test_code_is_known_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another line of lib is other code; a compiled file is not."""
    for name in ("lib/a.py", "notebooks/01.ipynb"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("x")
    monkeypatch.setattr(dask_worker, "ROOT", tmp_path)
    before = dask_worker.code_sha256()
    (tmp_path / "lib/a.pyc").write_text("y")
    assert dask_worker.code_sha256() == before
    (tmp_path / "lib/a.py").write_text("y")
    assert dask_worker.code_sha256() != before
