"""The sending process of a level on another machine, and its clock, over one connection to where the level is run from.

`serve` is called there (as a task of the batch engine): it connects back, takes a job, runs `lib.load.client_worker`, and
answers each `CLOCK` with its own clock at once. Lines of JSON and few words; the records go back when all has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lib.errors import ServerError

_ROOT = Path(__file__).resolve().parents[2]
CONNECT_S = 30.0


def serve(host: str, port: int, token: str) -> str:
    """Be one machine of a level; returns this machine's name when the level is over.

    Args:
        host: where the level is run from, as seen from here.
        token: by which that end knows its own machines.

    Raises:
        ServerError: it can't be reached, or hung up before the end.
    """
    try:
        connection = socket.create_connection((host, port), timeout=CONNECT_S)
    except OSError as error:
        raise ServerError(
            f"a connection from {platform.node()} to {host}:{port}", f"{error.strerror or error}",
            "name an address that the machines reach by --listen",
        ) from error  # fmt: skip
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection, tempfile.TemporaryDirectory(prefix="wb-load-") as folder:
        _Machine(connection, Path(folder)).work(token)
    return platform.node()


class _Machine:
    def __init__(self, connection: socket.socket, folder: Path) -> None:
        self.connection, self.folder = connection, folder
        self.unread = b""
        self.process: subprocess.Popen[bytes] | None = None

    def say(self, what: dict[str, Any]) -> None:
        self.connection.sendall(json.dumps(what).encode() + b"\n")

    def work(self, token: str) -> None:
        self.say({"token": token, **_about()})
        size = int(self._line().removeprefix("JOB "))
        data = self._exactly(size)
        try:
            (self.folder / "job").write_bytes(_with_own_clock(data))
        except ServerError as refused:
            self.say({"error": str(refused), "exit": refused.exit_code, "part": 0})
            return
        self._start()
        try:
            self._relay()
        finally:
            if self.process is not None and self.process.poll() is None:
                self.process.kill()
                self.process.wait()
        part = self.folder / "part"
        data = part.read_bytes() if part.exists() else b""
        error = (self.folder / "err").read_text(errors="replace").strip().splitlines()[-1:]
        self.say({"error": error[0] if error else None, "part": len(data)})
        self.connection.sendall(data)

    def _line(self) -> str:
        while b"\n" not in self.unread:
            self._more()
        line, _, self.unread = self.unread.partition(b"\n")
        return line.decode()

    def _exactly(self, size: int) -> bytes:
        while len(self.unread) < size:
            self._more()
        data, self.unread = self.unread[:size], self.unread[size:]
        return data

    def _more(self) -> None:
        data = self.connection.recv(1 << 16)
        if not data:
            raise ServerError("the level to be run to its end", "the machine that runs it hung up")
        self.unread += data

    def _start(self) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(":"),
        }
        words = [sys.executable, "-m", "lib.load.client_worker", str(self.folder / "job"), str(self.folder / "part")]
        with (self.folder / "err").open("wb") as errors:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )

    def _relay(self) -> None:
        """The client's lines to the other end and its orders to the client, until that end asks for the records."""
        client = self.process
        if client is None or client.stdout is None:
            return
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ)
            selector.register(client.stdout, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self.connection:
                        self._more()
                        while b"\n" in self.unread:
                            if not self._obey(self._line(), client):
                                return
                    elif data := os.read(key.fd, 1 << 16):
                        self.connection.sendall(data)
                    else:
                        selector.unregister(client.stdout)
                        self.say({"exit": client.wait()})

    def _obey(self, order: str, client: subprocess.Popen[bytes]) -> bool:
        """Does what the other end says; False when it wants the records."""
        if order == "CLOCK":
            self.connection.sendall(b"C %d\n" % time.monotonic_ns())
        elif order.startswith("GO ") and client.stdin:
            with contextlib.suppress(OSError):
                client.stdin.write(order.encode() + b"\n")
                client.stdin.flush()
        elif order == "STOP":
            with contextlib.suppress(ProcessLookupError):
                client.send_signal(signal.SIGINT)
        return order != "PART"


def _about() -> dict[str, Any]:
    return {
        "machine": platform.node(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpu_count": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }


def _with_own_clock(job: bytes) -> bytes:
    """The job with its start told by this machine's clock, not by the sender's."""
    settings, _, rest = job.partition(b"\n")
    made = json.loads(settings)
    key = made.get("api_key_env")
    if key and not os.environ.get(key):
        raise ServerError(f"the environment variable {key} on {platform.node()}", "it is not set there")
    made["parent_started_ns"] = time.monotonic_ns()
    return json.dumps(made).encode() + b"\n" + rest
