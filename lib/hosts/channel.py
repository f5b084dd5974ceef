"""The near end of a guard (lib.hosts.guard): starts it over a transport, exchanges frames, keeps it alive, lets go of it.

A thread of its own moves the bytes and sends heartbeats, so that neither a slow reader nor a busy notebook makes the host
believe that we are gone. When this process ends in whatever way, the pipe closes and the guard ends its command.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import struct
import subprocess
import threading
import time
import zlib
from collections import deque
from functools import cache
from pathlib import Path
from typing import Any

from lib.hosts.guard import MAGIC

#: The whole of what a host's login shell ever sees: no quote, no backslash, no `$` and no `!` in it, so that also csh and fish
#: take it as it stands.
BOOT = "import sys,zlib;i=sys.stdin.buffer;exec(zlib.decompress(i.read(int(i.readline()))));main(i)"
HEARTBEAT_S = 2.0
#: Bytes that may wait on either side of the channel.
MOST_WAITING = 1 << 22
#: Of what a transport says itself (ssh's messages) this much is kept.
MOST_WORDS = 1 << 14
#: Text before the guard's first word (a login script that prints) may be this long.
MOST_NOISE = 1 << 16


def guard_argv(python: str) -> list[str]:
    """The command that turns into a guard; its text follows on standard input."""
    return [python, "-X", "utf8", "-IS", "-c", BOOT]


@cache
def _guard_text() -> bytes:
    text = zlib.compress((Path(__file__).with_name("guard.py")).read_bytes(), 9)
    return b"%d\n" % len(text) + text


def _frame(kind: bytes, payload: bytes = b"") -> bytes:
    return kind + struct.pack(">I", len(payload)) + payload


class Channel:
    """One guard with one operation.

    Args:
        transport: the local command whose standard input and output are the guard's.
        header: the operation, see `lib.hosts.guard`.
    """

    def __init__(self, transport: list[str], header: dict[str, Any]) -> None:
        self.popen = subprocess.Popen(
            transport,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches us alone; we tell the guard
        )
        self.words = b""  # what the transport itself said
        self.result: dict[str, Any] | None = None
        self.hello: dict[str, Any] | None = None
        self._frames: deque[tuple[bytes, bytes]] = deque()
        self._held = 0
        self._out = bytearray()
        self._closing = self._ended = False
        self._lock = threading.Condition()
        self._ringing = threading.Lock()
        self._wake, self._bell = os.pipe()
        os.set_blocking(self._bell, False)
        os.set_blocking(self._wake, False)
        self._in = b""
        self._synced = False
        self.noise = b""
        self._put(_guard_text() + _frame(b"H", json.dumps(header).encode()))
        self._thread = threading.Thread(target=self._move, name="host-channel", daemon=True)
        self._thread.start()

    # the caller's side ------------------------------------------------------------------------------------------------
    def send(self, data: bytes, deadline: float) -> None:
        """Input for the operation; waits while too much is on its way. TimeoutError, BrokenPipeError."""
        view = memoryview(data)
        for at in range(0, len(view), 1 << 16):
            with self._lock:
                while len(self._out) > MOST_WAITING and not self._ended and self.result is None:
                    if (
                        not self._lock.wait(max(0.0, min(1.0, deadline - time.monotonic())))
                        and time.monotonic() > deadline
                    ):
                        raise TimeoutError
                if self._ended or self.result is not None:
                    raise BrokenPipeError
            self._put(_frame(b"I", bytes(view[at : at + (1 << 16)])))

    def end_input(self) -> None:
        self._put(_frame(b"E"))

    def cancel(self) -> None:
        """Tells the guard to end its command."""
        self._put(_frame(b"K"))

    def next(self, timeout: float | None) -> tuple[bytes, bytes] | None:
        """The next frame of output; None when there will be none. TimeoutError after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while not self._frames:
                if self._ended:
                    return None
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError
                self._lock.wait(left)
            kind, payload = self._frames.popleft()
            self._held -= len(payload)
        self._ring()
        return kind, payload

    def close(self, patience_s: float = 10.0) -> None:
        """Ends the operation if it still runs, waits for the guard's word, then lets the transport go."""
        if self.result is None and not self._ended:
            self.cancel()
            deadline = time.monotonic() + patience_s
            with self._lock:
                while self.result is None and not self._ended and time.monotonic() < deadline:
                    self._frames.clear()
                    self._held = 0
                    self._ring()
                    self._lock.wait(0.1)
        with self._lock:
            self._closing = True
        self._ring()
        self._thread.join(5.0)
        if self.popen.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(1.0 if self.result is not None else 0.05)
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        for stream in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            with contextlib.suppress(OSError):
                if stream:
                    stream.close()
        with self._ringing:  # a number that is closed may be another file's the next moment
            ends, self._wake, self._bell = (self._wake, self._bell), -1, -1
        for end in ends:
            with contextlib.suppress(OSError):
                os.close(end)

    # the moving thread -----------------------------------------------------------------------------------------------
    def _put(self, data: bytes) -> None:
        with self._lock:
            self._out += data
        self._ring()

    def _ring(self) -> None:
        with self._ringing, contextlib.suppress(OSError):
            if self._bell >= 0:
                os.write(self._bell, b"!")

    def _move(self) -> None:
        try:
            self._move_until_end()
        finally:
            with self._lock:
                self._ended = True
                self._lock.notify_all()

    def _move_until_end(self) -> None:
        stdin, stdout, stderr = self.popen.stdin, self.popen.stdout, self.popen.stderr
        if stdin is None or stdout is None or stderr is None:
            return
        for stream in (stdin, stdout, stderr):
            os.set_blocking(stream.fileno(), False)
        beat = time.monotonic()
        open_in, reading = True, {stdout.fileno(), stderr.fileno()}
        with selectors.DefaultSelector() as selector:
            while reading and not self._closing:
                with self._lock:
                    full, pending = self._held > MOST_WAITING, bool(self._out)
                wanted: dict[int, int] = {self._wake: selectors.EVENT_READ}
                wanted |= {f: selectors.EVENT_READ for f in reading if not (full and f == stdout.fileno())}
                if open_in and pending:
                    wanted[stdin.fileno()] = selectors.EVENT_WRITE
                for file in set(selector.get_map()) - set(wanted):
                    selector.unregister(file)
                for file, events in wanted.items():
                    if file not in selector.get_map():
                        selector.register(file, events)
                for key, _ in selector.select(HEARTBEAT_S / 2):
                    if key.fd == self._wake:
                        with contextlib.suppress(OSError):
                            os.read(self._wake, 4096)
                    elif key.fd == stdin.fileno():
                        open_in = self._write(key.fd)
                    elif not self._read(key.fd, key.fd == stderr.fileno()):
                        reading.discard(key.fd)
                if open_in and time.monotonic() - beat > HEARTBEAT_S:
                    beat = time.monotonic()
                    with self._lock:
                        if len(self._out) < MOST_WAITING:
                            self._out += _frame(b"B")
                if self.result is not None and stdout.fileno() not in reading:
                    break

    def _write(self, file: int) -> bool:
        try:
            with self._lock:
                count = os.write(file, self._out[: 1 << 16])
                del self._out[:count]
                self._lock.notify_all()
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def _read(self, file: int, words: bool) -> bool:
        try:
            data = os.read(file, 1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        if words:
            self.words = (self.words + data)[-MOST_WORDS:]
            return True
        self._in += data
        if not self._synced:
            before, found, rest = self._in.partition(MAGIC)
            if not found:
                if len(self._in) > MOST_NOISE:
                    self.noise, self._in = self._in[:1000], b""
                    return False
                return True
            self._synced, self.noise, self._in = True, before[-1000:], rest
        at = 0
        frames = []
        while len(self._in) - at >= 5:
            size = struct.unpack_from(">I", self._in, at + 1)[0]
            if len(self._in) - at - 5 < size:
                break
            frames.append((self._in[at : at + 1], self._in[at + 5 : at + 5 + size]))
            at += 5 + size
        self._in = self._in[at:]
        with self._lock:
            for kind, payload in frames:
                if kind == b"X":
                    self.result = json.loads(payload)
                elif kind == b"G":
                    self.hello = {**(self.hello or {}), **json.loads(payload)}
                else:
                    self._frames.append((kind, payload))
                    self._held += len(payload)
            self._lock.notify_all()
        return True
