"""The folder that a process on a host holds for us is gone whole, whatever ends the process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lib.hosts import remote_client


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_the_middle_of_the_removal_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    """Our side lets go, and the guard's signal comes while the folder is being taken away: seen on a loaded host."""
    holding = subprocess.Popen(
        [sys.executable, "-IS", "-c", remote_client._HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"TMPDIR": str(tmp_path)}
    )  # fmt: skip
    assert holding.stdin and holding.stdout
    folder = Path(json.loads(holding.stdout.readline())["folder"])
    assert folder.parent == tmp_path
    for name in range(20_000):  # enough that its removal can be met in the middle
        (folder / str(name)).touch()
    holding.stdin.close()
    end = time.monotonic() + 30
    while folder.exists() and len(list(folder.iterdir())) == 20_000 and time.monotonic() < end:
        time.sleep(0.001)
    while holding.poll() is None and time.monotonic() < end:
        holding.send_signal(number)
        time.sleep(0.002)
    holding.stdout.close()
    assert holding.wait(30) == 0 and list(tmp_path.iterdir()) == []
