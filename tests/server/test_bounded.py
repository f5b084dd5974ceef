"""A control request ends: against servers that trickle, redirect, send without end, or hold the line."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from lib.audit import evidence
from lib.cli import main
from lib.errors import BadInput, ServerError
from lib.server.bounded import get_bounded, refuse_url_with_secret


@contextmanager
def served(answer: Callable[[socket.socket, threading.Event], None]) -> Iterator[tuple[str, list[str]]]:
    """A socket that answers each connection as told, and the request lines it got."""
    listener = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()
    got: list[str] = []

    def one(connection: socket.socket) -> None:
        with connection:
            try:
                got.append(connection.recv(65536).decode().splitlines()[0])
                answer(connection, over)
            except OSError:
                pass

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=one, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", got
    finally:
        over.set()
        listener.close()


def trickle_headers(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
    while not over.wait(0.05):
        connection.sendall(b"a")


def trickle_body(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n{")
    while not over.wait(0.05):
        connection.sendall(b" ")


def silent(connection: socket.socket, over: threading.Event) -> None:
    over.wait(30)


def endless(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while not over.is_set():
        connection.sendall(b"x" * 65536)


def to_itself(connection: socket.socket, over: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 302 Found\r\nLocation: /again\r\nContent-Length: 0\r\n\r\n")


@pytest.mark.parametrize("how", [trickle_headers, trickle_body, silent])
def test_the_whole_request_has_a_limit(how: Callable[..., None]) -> None:
    """Bytes that come now and then do not prolong it."""
    with served(how) as (url, _):
        begun = time.monotonic()
        answer = get_bounded(url, total_s=0.6)
        assert time.monotonic() - begun < 2 and answer.problem and answer.ended and answer.status is None


def test_a_size_has_a_limit() -> None:
    """An endless body ends at the limit."""
    with served(endless) as (url, _):
        answer = get_bounded(url, total_s=20, max_bytes=1 << 20)
        assert answer.problem == "more than 1 MiB" and answer.body == b""


def test_a_redirect_is_not_followed() -> None:
    """It is told; a key would go to wherever it points."""
    with served(to_itself) as (url, got):
        answer = get_bounded(url)
        assert answer.status == 302 and "redirect" in str(answer.problem) and len(got) == 1


def test_an_answer() -> None:
    """A body and its status; a refused connection has its own word."""

    def ok(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n{"a":1}')

    with served(ok) as (url, _):
        answer = get_bounded(url)
        assert (answer.status, answer.json(), answer.problem) == (200, {"a": 1}, None)
    assert get_bounded("http://127.0.0.1:9").problem == "connection refused"


@pytest.mark.parametrize(
    "url", ["http://me:hunter2secret9@h:1", "http://h:1/?token=hunter2secret9", "http://h#hunter2secret9",
            "http://h:hunter2secret9", "me:hunter2secret9@h"],
)  # fmt: skip
def test_a_url_with_a_secret(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused by every command that takes one, and never repeated."""
    with pytest.raises(BadInput) as refused:
        refuse_url_with_secret(url)
    assert "hunter2" not in str(refused.value)
    with pytest.raises(BadInput):
        evidence.fetch_server(url)
    for argv in (["bench", "--base-url", url, "--concurrency", "1"], ["audit", "--base-url", url],
                 ["bench", "--base-url", url, "--concurrency", "1", "--model", "m"]):  # fmt: skip
        assert main(argv) == 2
    shown = capsys.readouterr()
    assert "hunter2" not in shown.out + shown.err


def test_fetch_server_stops_after_the_first_timeout() -> None:
    """One request that got no answer in time is enough to know."""
    with served(trickle_body) as (url, got):
        begun = time.monotonic()
        with pytest.raises(ServerError, match="server_info"):
            evidence.fetch_server(url, timeout_s=0.5)
        assert time.monotonic() - begun < 2 and len(got) == 1


def test_fetch_server_follows_no_redirect() -> None:
    """Each of the four paths is asked once."""
    with served(to_itself) as (url, got):
        with pytest.raises(ServerError, match="302"):
            evidence.fetch_server(url, timeout_s=5)
        assert len(got) == 4 and not any("/again" in line for line in got)


def test_bench_ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`workbook bench` asks for the model's name with the same limits."""
    with served(to_itself) as (url, got):
        assert main(["bench", "--base-url", url, "--concurrency", "1"]) == 1
        assert "redirect" in capsys.readouterr().err and len(got) == 1
