"""Questions to the operating system about processes, ports and GPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lib.errors import BadInput
from lib.hosts import local
from lib.hosts.local import ProcessId


@pytest.fixture
def process() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts processes and ends them after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*argv: str, **environment: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(argv, env={**os.environ, **environment}))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.wait()


@pytest.mark.parametrize("pid", [0, -1])
def test_there_is_no_process_of_a_number_that_is_none(pid: int) -> None:
    """A pid that is not known yet has no identity and no family, and is not alive."""
    assert local.process_id(pid) is None
    assert local.descendants(pid) == []
    assert not ProcessId(pid, 0.0).alive()


def test_a_process_lives_until_it_ended_and_a_zombie_is_gone(process: Callable[..., subprocess.Popen[bytes]]) -> None:
    """Alive while it runs; gone once it has ended, even if nobody has reaped it."""
    one = process("sleep", "60")
    identity = local.process_id(one.pid)
    assert identity and identity.alive()
    assert abs(identity.start_time - time.time()) < 60
    one.kill()
    os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT)
    assert not identity.alive()
    one.wait()
    assert not identity.alive()


def test_a_step_of_the_clock_changes_no_identity(
    process: Callable[..., subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the wall clock was set, the same process is still itself; also one that was given by its start in seconds."""
    identity = local.process_id(process("sleep", "60").pid)
    assert identity
    given = ProcessId(identity.pid, identity.start_time).pinned()
    real = local._start_time
    monkeypatch.setattr(local, "_start_time", lambda pid: (real(pid) or 0.0) + 3600)
    monkeypatch.setattr("psutil.Process.create_time", lambda self: identity.start_time + 3600)
    assert identity.alive() and given.alive()
    assert not ProcessId(identity.pid, identity.start_time, (identity.ticks or 0) + 1).alive()


def test_two_elements_still_tell_a_later_process_apart(process: Callable[..., subprocess.Popen[bytes]]) -> None:
    """Without ticks, pid and start in seconds decide; pinning a stranger's number doesn't make it alive."""
    identity = local.process_id(process("sleep", "60").pid)
    assert identity
    assert ProcessId(identity.pid, identity.start_time).alive()
    stranger = ProcessId(identity.pid, identity.start_time - 5)
    assert not stranger.alive() and not stranger.pinned().alive()


def test_a_command_name_with_brackets_is_read(process: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    """/proc/PID/stat is cut at the last bracket, since a command's name may hold ') S 1'."""
    odd = tmp_path / "a ) S 1 2"
    odd.symlink_to("/bin/sleep")
    identity = local.process_id(process(str(odd), "60").pid)
    assert identity and identity.alive() and identity.ticks


def test_an_owner_survives_being_written_as_a_word() -> None:
    """What owner_token writes parse_owner reads, with ticks and without; anything else is refused."""
    for owner in (ProcessId(41, 1700000000.25, 9), ProcessId(41, 1700000000.123456)):
        assert local.parse_owner(local.owner_token(owner)) == owner
    assert local.parse_owner("41:17") == ProcessId(41, 17.0)
    for wrong in ("", "41", "41:", "-1:2", "41:1:2:3", "a:b", "41:1e3", "41:1:"):
        with pytest.raises(BadInput):
            local.parse_owner(wrong)


def test_kill_hits_only_the_process_that_is_meant(process: Callable[..., subprocess.Popen[bytes]]) -> None:
    """A process with the same number and another start is left alone."""
    one = process("sleep", "60")
    identity = local.process_id(one.pid)
    assert identity
    ProcessId(one.pid, identity.start_time, (identity.ticks or 0) + 1).kill()
    assert one.poll() is None
    identity.kill(signal.SIGTERM)
    assert one.wait(10) == -signal.SIGTERM


def test_a_command_line_is_redacted_before_it_is_cut(process: Callable[..., subprocess.Popen[bytes]]) -> None:
    """However short the cut, no part of a key given as an argument is shown."""
    key = "sk-0123456789abcdefXYZ"
    one = process(sys.executable, "-c", "import time; time.sleep(60)", "--api-key", key, "--model-path", "/m")
    deadline = time.monotonic() + 10
    while "--model-path" not in local.command_line(one.pid, 10000) and time.monotonic() < deadline:
        time.sleep(0.05)
    whole = local.command_line(one.pid, 10000)
    assert "--api-key REDACTED --model-path /m" in whole
    for limit in range(len(whole)):
        assert "sk-0" not in local.command_line(one.pid, limit) and "0123" not in local.command_line(one.pid, limit)


def test_processes_are_found_by_their_environment(process: Callable[..., subprocess.Popen[bytes]]) -> None:
    """The whole variable has to match, not a part of it."""
    mine = process("sleep", "60", TEST_MARK="L1")
    process("sleep", "60", TEST_MARK="L12")
    time.sleep(0.2)
    assert [p.pid for p in local.processes_with("TEST_MARK", "L1")] == [mine.pid]


def stub_nvidia_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a shell script first on PATH that answers as nvidia-smi."""
    stub = folder / "nvidia-smi"
    stub.write_text(f"#!/bin/sh\n{script}\n")
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_gpu_users_are_kept_by_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process on two GPUs is counted on each, and summed over both; a line that is no process is left out."""
    lines = r"GPU-a, 11, 100\nGPU-b, 11, 50\nGPU-b, 12, [N/A]\nNo running processes found\n"
    stub_nvidia_smi(tmp_path, f"printf '{lines}'", monkeypatch)
    assert local.gpu_users() == ({"GPU-a": {11: 100}, "GPU-b": {11: 50, 12: 0}}, None)
    assert local.gpu_processes() == {11: 150, 12: 0}


def test_a_failing_nvidia_smi_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that does not answer is said, never taken as no memory held."""
    stub_nvidia_smi(tmp_path, "echo 'Failed to initialize NVML'; exit 9", monkeypatch)
    rows, reason = local.gpus()
    assert rows == [] and reason and "NVML" in reason
    assert local.gpu_users()[1] == reason


def test_without_nvidia_smi_there_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No program, no rows, and the reason why."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert local.gpus() == ([], "nvidia-smi is not on this machine")
    assert local.gpu_users() == ({}, "nvidia-smi is not on this machine")
