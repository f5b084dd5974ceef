"""Interrupts that a terminal really makes, with a notebook that only waits (no server): nothing is left, words are few."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT

PROGRAM = """
import sys, time
from pathlib import Path
from lib import runner
from lib.cli import main
mark = Path(sys.argv[1])
def waits(source, output, params, environment, writer):
    runner.become_child()
    mark.write_text(str(__import__('os').getpid()))
    time.sleep(120)
runner._execute = waits
sys.argv = ['workbook', 'run', '--profile', 'tests/params/tiny', '--only', '01']
raise SystemExit(main())
"""


def as_from_a_terminal() -> None:
    """In the child: the signals that a nohup above the tests may have set to be ignored."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start(tmp_path: Path, **options: object) -> tuple[subprocess.Popen[bytes], int]:
    """A run whose notebook waits; the process and the pid of the notebook's child."""
    mark = tmp_path / "child"
    options.setdefault("preexec_fn", as_from_a_terminal)
    environment = {**os.environ, "WORKBOOK_OUTPUTS": str(tmp_path / "outputs"), "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(mark)], cwd=ROOT, env=environment, start_new_session=True, **options
    )  # type: ignore[call-overload]
    end = time.monotonic() + 60
    while not (mark.exists() and mark.read_text()):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.1)
    return process, int(mark.read_text())


def gone(pid: int, seconds: float = 15) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_way_of_ending_it_is_an_interrupt(tmp_path: Path, number: int) -> None:
    """Ctrl-C, kill and a closed terminal end the notebook and leave a run that can be resumed: exit 130, one message."""
    process, child = start(tmp_path, stderr=subprocess.PIPE)
    process.send_signal(number)
    _, words = process.communicate(timeout=40)
    assert process.returncode == 130
    assert gone(child)
    assert b"Traceback" not in words and b"--resume" in words


def test_ctrl_c_with_a_dead_reader_ends_the_notebook_too(tmp_path: Path) -> None:
    """`make report 2>&1 | tee log`: Ctrl-C kills tee first; the notebook must still end."""
    reader, writer = os.pipe()
    process, child = start(tmp_path, stderr=writer, stdout=writer)
    os.close(writer)
    os.close(reader)
    process.send_signal(signal.SIGINT)
    process.wait(40)
    assert gone(child)


def test_nohup_survives_a_hangup(tmp_path: Path) -> None:
    """Started with SIGHUP ignored, a run goes on when the terminal closes."""
    process, child = start(
        tmp_path, stderr=subprocess.DEVNULL, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    process.send_signal(signal.SIGHUP)
    time.sleep(1.5)
    assert process.poll() is None and psutil.pid_exists(child)
    process.terminate()
    process.wait(40)
    assert gone(child)


def test_a_killed_workbook_takes_its_notebook_along(tmp_path: Path) -> None:
    """SIGKILL leaves no time for anything: the operating system ends the notebook's process."""
    process, child = start(tmp_path, stderr=subprocess.DEVNULL)
    process.kill()
    process.wait(10)
    assert gone(child)
