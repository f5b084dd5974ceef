"""The stand-in behaves and logs as SGLang was seen to (tests/recorded, and the comments beside each case). It needs no lab."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import requests

from lib.hosts import local
from lib.server.failures import classify
from lib.server.log import read_log
from tests.lab.faults import STAND_IN


class Started:
    def __init__(self, folder: Path, *words: str, **environment: str) -> None:
        self.port = local.free_port()
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(STAND_IN), "--model-path", "/m", "--port", str(self.port), *words],
                stderr=log, stdout=log, env={**os.environ, "STAND_IN_LOAD_S": "1", "STAND_IN_POLL_S": "0.3", **environment},
            )  # fmt: skip

    def get(self, path: str) -> int | None:
        with contextlib.suppress(requests.RequestException):
            return requests.get(f"http://127.0.0.1:{self.port}{path}", timeout=5).status_code
        return None

    def wait(self, code: int) -> list[int | None]:
        """What /health answers until it is `code`, without repetitions."""
        seen: list[int | None] = []
        for _ in range(400):
            answer = self.get("/health")
            if not seen or seen[-1] != answer:
                seen.append(answer)
            if answer == code:
                return seen
            time.sleep(0.02)
        raise AssertionError(seen)

    def text(self) -> str:
        return self.log.read_text()


@contextlib.contextmanager
def started(folder: Path, *words: str, **environment: str) -> Iterator[Started]:
    made = Started(folder, *words, **environment)
    try:
        yield made
    finally:
        children = psutil.Process(made.process.pid).children(recursive=True) if made.process.poll() is None else []
        made.process.kill()
        made.process.wait()
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()


def test_nothing_listens_then_503_then_ready(tmp_path: Path) -> None:
    """H200, 0.5.16: /health answers 503 from «HTTP up» until «fired up», then 200; its log is read like SGLang's."""
    with started(tmp_path, "--kv-cache-dtype", "fp8_e4m3") as server:
        assert server.wait(200) == [None, 503, 200]
        info = requests.get(f"http://127.0.0.1:{server.port}/server_info", timeout=5).json()
        assert info["kv_cache_dtype"] == "fp8_e4m3" and info["max_total_num_tokens"] == 65536
        assert server.get("/get_model_info") == 200 and server.get("/nothing") == 404
        with server.log.open("rb") as lines:
            log = read_log(lines)
        assert [p.dtype for p in log.kv_pools] == ["torch.fp8_e4m3"] or [p.dtype for p in log.kv_pools] == ["fp8_e4m3"]
        assert log.ready and log.capacity and log.capacity.max_total_num_tokens == 65536


def test_sigterm_when_idle_ends_by_sigkill_of_itself(tmp_path: Path) -> None:
    """H200: «SIGTERM received… Draining requests and shutting down...», exit code -9, never 0; no child is left."""
    with started(tmp_path) as server:
        server.wait(200)
        children = psutil.Process(server.process.pid).children()
        assert len(children) == 1 and children[0].cmdline()[0] == "sglang::scheduler"
        server.process.terminate()
        assert server.process.wait(10) == -signal.SIGKILL
        assert "SIGTERM received." in server.text() and "Remaining number of requests 0" in server.text()
        psutil.wait_procs(children, 5)
        assert not children[0].is_running()


def test_sigterm_with_a_stream_in_flight_does_not_end_it(tmp_path: Path) -> None:
    """H200: never ended, «Gracefully exiting... Remaining number of requests 1» at every poll, and the stream goes on."""
    with started(tmp_path, STAND_IN_TOKEN_S="0.05") as server:
        server.wait(200)
        pieces: list[float] = []

        def read() -> None:
            body = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 100_000}}
            with (
                contextlib.suppress(requests.RequestException),
                requests.post(f"http://127.0.0.1:{server.port}/generate", json=body, stream=True, timeout=10) as answer,
            ):
                pieces.extend(time.monotonic() for line in answer.iter_lines() if line)

        threading.Thread(target=read, daemon=True).start()
        time.sleep(0.5)
        server.process.terminate()
        time.sleep(2.0)
        assert server.process.poll() is None and server.get("/health") == 503
        assert server.text().count("Remaining number of requests 1") >= 3


def test_a_dead_scheduler_takes_the_server_with_it(tmp_path: Path) -> None:
    """H200: «Subprocess scheduler_0 (pid=…) crashed with exit code -9. Triggering SIGQUIT for cleanup...», -9 after about 6 s."""
    with started(tmp_path) as server:
        server.wait(200)
        psutil.Process(server.process.pid).children()[0].kill()
        assert server.process.wait(15) == -signal.SIGKILL
        assert "crashed with exit code -9. Triggering SIGQUIT" in server.text()


def test_faults(tmp_path: Path) -> None:
    """Health and nothing else; a start that dies with a cause; a port that is taken; a key that is asked for."""
    with started(tmp_path, STAND_IN_HEALTH_ONLY="1") as server:
        server.wait(200)
        assert server.get("/server_info") == 500 and server.get("/v1/models") == 500
        with started(tmp_path / "..", "--port", str(server.port)) as second:
            assert second.process.wait(10) == 1 and "address already in use" in second.text()
    with started(tmp_path, STAND_IN_DIE="torch.OutOfMemoryError: CUDA out of memory.") as server:
        assert server.process.wait(10) == 1
        with server.log.open("rb") as log:
            failure = classify(log, exit_code=1, ready=False)
        assert failure is not None and failure.cause_known
    with started(tmp_path, "--api-key", "sk-standin-0123456789") as server:
        server.wait(200)
        assert server.get("/server_info") == 401


def test_a_scheduler_never_outlives_a_server_that_dies_at_once(tmp_path: Path) -> None:
    """Dead before its child could ask to die with it (twice seen in a whole run): the child looks, and ends."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for _ in range(3):
            with started(tmp_path, "--port", str(taken.getsockname()[1]), STAND_IN_TEST=str(tmp_path)) as server:
                assert server.process.wait(10) == 1
    end = time.monotonic() + 10
    while (left := of_this_test(tmp_path)) and time.monotonic() < end:
        time.sleep(0.1)
    for process in left:
        process.kill()
    assert not left


def of_this_test(folder: Path) -> list[psutil.Process]:
    """Processes with the test's mark in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("STAND_IN_TEST") == str(folder):
                found.append(process)
    return found


VARIABLES = ["LOAD_S", "POLL_S", "HEALTH_ONLY", "DIE", "HANG_S", "KV_DTYPE", "TOKENS", "ANSWER", "TOKEN_S", "VERSION"]


@pytest.mark.parametrize("word", VARIABLES)
def test_every_fault_is_described(word: str) -> None:
    """The page at its head names each variable that it reads."""
    text, word = STAND_IN.read_text(), f"STAND_IN_{word}"
    assert word in text.split('"""')[1] and text.count(word) >= 2
