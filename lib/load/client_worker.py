"""The process that sends and times; `lib.load.client` starts it and reads what it writes.

While requests are in flight it takes timestamps (CLOCK_MONOTONIC, nanoseconds) and bytes, nothing else: answers are
parsed after the window by `lib.load.client_wire`. It is a process of its own, and imports little, for three reasons:
a thread in a Jupyter kernel would share the kernel's GIL and its running loop, its garbage collector and its memory;
its CPU share and memory can be told apart from the notebook's; and it starts in a tenth of a second.

    python -m lib.load.client_worker JOB PART        (stdin stays open as long as the parent lives)
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import gc
import itertools
import json
import os
import resource
import select
import signal
import socket
import ssl
import struct
import sys
import termios
import time
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

from lib.load.client_wire import Exchange, answer_id, drop_first_answer, read_exchange, trimmed_read, write_record

now_ns = time.monotonic_ns
LAG_TICK_S = 0.010
SWEEP_S = 0.1
READS_AT_ONCE, READ_BYTES = 256, 1 << 16
#: A kept-alive connection that was idle for longer is not used again: uvicorn closes idle ones after 5 s.
REUSE_WITHIN_NS = 2_000_000_000
UNKNOWN, CHUNKED, TRIMMED, LENGTH, UNTIL_CLOSE, IDLE = range(6)
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_PLAIN_EVENT = getattr(select, "EPOLLIN", 1)


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection, one request at a time.

    A plain socket is read by `Run.read_ready`, which costs a tenth less than a transport at 1,024 streams; under TLS
    (`sock` is None) and where the system has no epoll it is the protocol of an asyncio transport.
    """

    __slots__ = (
        "run",
        "sock",
        "fd",
        "transport",
        "current",
        "mode",
        "left",
        "keep",
        "idle_since",
        "served",
        "trim",
        "lost",
        "last_id",
        "note",
        "unsent",
    )

    def __init__(self, run: Run, sock: socket.socket | None) -> None:
        self.run, self.sock, self.trim = run, sock, run.trim
        self.fd = sock.fileno() if sock else -1
        self.transport: Any = None
        self.current: Exchange | None = None
        self.mode, self.left, self.keep, self.idle_since = IDLE, 0, True, now_ns()
        self.served: list[Exchange] = []
        self.last_id = b""
        self.lost = False
        self.unsent: memoryview | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def send(self, exchange: Exchange) -> None:
        """Write the request at once, past the loop's write queue; what the socket does not take, the loop sends."""
        self.listen(exchange)
        self.keep = True
        exchange.reused = bool(self.served)
        self.served.append(exchange)
        payload = exchange.payload
        exchange.payload = b""
        exchange.sent_ns = now_ns()
        taken = 0
        if self.sock is not None:
            try:
                taken = self.sock.send(payload)
            except BlockingIOError:
                taken = 0
            except OSError as error:
                self.fail("reset_before_response", f"{type(error).__name__} while sending")
                return
        if taken < len(payload):
            if self.transport is not None:
                self.transport.write(payload[taken:] if taken else payload)
            else:
                self.unsent = memoryview(payload)[taken:]
                self.run.loop.add_writer(self.fd, self.send_rest)

    def send_rest(self) -> None:
        """The rest of a long request, as the socket takes it."""
        if self.unsent is None or self.sock is None:
            return
        try:
            self.unsent = self.unsent[self.sock.send(self.unsent) :]
        except BlockingIOError:
            return
        except OSError as error:
            self.fail("reset_before_response", f"{type(error).__name__} while sending")
            return
        if not self.unsent:
            self.unsent = None
            self.run.loop.remove_writer(self.fd)

    def listen(self, exchange: Exchange) -> None:
        """What arrives from now on belongs to this exchange."""
        self.current, self.mode = exchange, UNKNOWN
        self.note = exchange.log.append
        self.run.fast.pop(self.fd, None)

    def data_received(self, data: bytes) -> None:
        stamp = now_ns()
        if self.mode == CHUNKED:
            self.note(stamp)
            self.note(data)
            # A chunk with an event ends in LF LF CR LF, the last chunk does not: one byte tells.
            if len(data) < 4 or data[-4] != 10:
                self.check_end()
        else:
            self.received_otherwise(stamp, data)

    def received_otherwise(self, stamp: int, data: bytes) -> None:
        exchange = self.current
        if exchange is None:
            if not self.lost:
                self.surplus(data)
            return
        if self.mode == TRIMMED:
            data = trimmed_read(exchange.log[-1], data) if len(data) > 640 else data
        self.note(stamp)
        self.note(data)
        if self.mode == TRIMMED:
            if data.endswith(_LAST_CHUNK) or len(data) < 7:
                self.check_end()
        elif self.mode == LENGTH:
            self.left -= len(data)
            if self.left <= 0:
                self.finish()
        elif self.mode == UNKNOWN:
            self.read_head(exchange)

    def read_head(self, exchange: Exchange) -> None:
        head = b"".join(exchange.log[1::2])
        end = head.find(b"\r\n\r\n")
        if end < 0:
            if len(head) > 65536:
                self.fail("malformed_http", "more than 64 KiB without the end of the response head")
            return
        text = head[:end].lower()
        if text.startswith(b"http/1.1 100"):
            return
        self.keep = b"\r\nconnection: close" not in text and not text.startswith(b"http/1.0")
        if b"\r\ntransfer-encoding: chunked" in text:
            self.mode = TRIMMED if self.trim else CHUNKED
            if self.mode == CHUNKED and self.fd >= 0:
                self.run.fast[self.fd] = self.note
            self.check_end()
        elif (at := text.find(b"\r\ncontent-length:")) >= 0:
            length = text[at + 17 :].split(b"\r\n", 1)[0].strip()
            if not length.isdigit():
                self.fail("malformed_http", "content-length is not a number")
                return
            self.mode, self.left = LENGTH, int(length) - (len(head) - end - 4)
            if self.left <= 0:
                self.finish()
        else:
            self.mode, self.keep = UNTIL_CLOSE, False

    def check_end(self) -> None:
        """Called only when the last bytes look like the last chunk of a chunked answer."""
        exchange = self.current
        if exchange is not None and b"".join(exchange.log[-16:][1::2])[-7:] == _LAST_CHUNK:
            self.finish()

    def finish(self) -> None:
        exchange = self.current
        if exchange is None:
            return
        exchange.take_log()
        if len(self.served) > 1:
            # The same answer again: it belongs to the request before, and this one still waits for its own.
            answer = answer_id(exchange.data)
            if answer and answer == self.last_id:
                self.served[-2].surplus += drop_first_answer(exchange)
                exchange.log = [x for pair in zip(exchange.times, exchange.data, strict=True) for x in pair]
                exchange.times, exchange.data = array("q"), []
                self.listen(exchange)
                if exchange.log:
                    self.read_head(exchange)
                return
            self.last_id = answer
        else:
            self.last_id = answer_id(exchange.data)
        self.current, self.mode = None, IDLE
        self.run.fast.pop(self.fd, None)
        self.idle_since = exchange.end_ns = exchange.times[-1]
        exchange.ended = True
        if not self.keep or self.lost:
            self.close()
        self.run.done(self, exchange)

    def surplus(self, data: bytes) -> None:
        """Bytes that nobody asked for: the server answered a request of this connection twice."""
        self.keep = False
        for exchange in self.served:
            exchange.surplus_on_connection = True
        if self.served:
            self.served[-1].surplus += len(data)
        self.run.drop(self)
        self.close()

    def fail(self, failure: str, detail: str = "") -> None:
        exchange, self.current, self.mode = self.current, None, IDLE
        self.keep = False
        self.close()
        if exchange is not None and exchange.failure is None:
            exchange.take_log()
            exchange.failure, exchange.detail, exchange.end_ns = failure, detail, now_ns()
            self.run.done(self, exchange)

    def close(self) -> None:
        if self.transport is not None:
            self.lost = True
            self.transport.abort()
        elif not self.lost:
            self.lost = True
            self.run.drop(self)
            if self.sock is not None:
                if self.unsent is not None:
                    self.run.loop.remove_writer(self.fd)
                self.run.forget(self.fd)
                self.sock.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self.transport is None:
            self.close()
        self.lost = True
        self.run.drop(self)
        if self.current is None:
            return
        if self.mode == UNTIL_CLOSE and error is None:
            self.finish()
        elif not self.current.log:
            self.fail("reset_before_response" if error else "closed_before_response", _short(error))
        else:
            self.fail("reset_mid_stream" if error else "closed_mid_stream", _short(error))


def _say(message: dict[str, Any]) -> None:
    """One line to the parent; a parent that has gone is noticed elsewhere."""
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


def _short(error: BaseException | None) -> str:
    if error is None:
        return ""
    code = getattr(error, "errno", None)
    return errno.errorcode.get(code, str(code)) if code else type(error).__name__


class Run:
    """One window: the exchanges of a job, dispatched closed-loop (by slots) or open-loop (by due times).

    `exchanges` are the first turns of sessions, each with the later ones in its `rest`; a plain request is a session of
    one turn. A session's turns follow each other; sessions run side by side.
    """

    def __init__(self, job: dict[str, Any], exchanges: list[Exchange], start: asyncio.Event | None = None) -> None:
        self.job, self.exchanges = job, exchanges
        self.loop = asyncio.get_running_loop()
        self.address: Any = None
        self.tls = ssl.create_default_context(cafile=job["ca_file"]) if job["tls"] else None
        self.trim = job["api"] == "generate"
        self.concurrency: int | None = job["concurrency"]
        self.waiting = deque(exchanges)
        self.planned = sum(1 + len(x.rest) for x in exchanges)
        self.idle: deque[Connection] = deque()
        self.connections: set[Connection] = set()
        self.active: dict[int, tuple[Exchange, Connection | None]] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.timers: dict[int, asyncio.TimerHandle] = {}
        self.served: list[Exchange] = []
        self.finished = 0
        self.after_failed_turn = 0
        self.refused_in_row = 0
        self.stopped: str | None = None
        self.over = asyncio.Event()
        self.start = start
        self.start_at_ns = 0
        self.lags = array("q")
        self.unread = array("q")
        self.start_ns = self.end_ns = 0
        self.in_flight_max = 0
        self._tick_due = 0
        self._probe = 0
        self._fionread = bytearray(4)
        self.poller = select.epoll() if hasattr(select, "epoll") and not job["tls"] else None
        self.by_fd: dict[int, Connection] = {}
        self.fast: dict[int, Callable[[Any], None]] = {}
        if self.poller is not None:
            self.loop.add_reader(self.poller.fileno(), self.read_ready)

    def read_ready(self) -> None:
        """Read the plain sockets that have bytes: one epoll for all of them, one read and one timestamp each.

        At 1,024 streams each object that a read touches is a cache miss, so a stream in mid-answer is a descriptor and
        the append of one list. Edge-triggered: a read that fills its buffer, or an event that tells of more than bytes,
        is followed up by `read_all`.
        """
        find, read = self.fast.get, os.read
        for fd, mask in self.poller.poll(0, READS_AT_ONCE):  # type: ignore[union-attr]
            note = find(fd)
            if note is None or mask != _PLAIN_EVENT:
                self.read_all(fd, None, mask == _PLAIN_EVENT)
                continue
            try:
                data = read(fd, READ_BYTES)
            except (BlockingIOError, InterruptedError):
                continue
            except OSError as error:
                # A reset is told once; read again, it would look like an orderly end.
                self.by_fd[fd].connection_lost(error)
                continue
            if len(data) < 4 or data[-4] != 10 or len(data) == READ_BYTES:
                self.read_all(fd, data, True)
            else:
                note(now_ns())
                note(data)

    def read_all(self, fd: int, data: bytes | None, bytes_only: bool) -> None:
        """Everything that a socket has, up to its end; `data` is a first read that was already made.

        `bytes_only`: the event told of bytes alone, so a read that does not fill its buffer was the last one.
        """
        connection = self.by_fd.get(fd)
        while connection is not None and not connection.lost:
            if data is None:
                try:
                    data = os.read(fd, READ_BYTES)
                except (BlockingIOError, InterruptedError):
                    return
                except OSError as error:
                    connection.connection_lost(error)
                    return
            if not data:
                connection.connection_lost(None)
                return
            connection.data_received(data)
            if bytes_only and len(data) < READ_BYTES:
                return
            data = None

    def forget(self, fd: int) -> None:
        """Stop reading a socket that is about to be closed."""
        self.by_fd.pop(fd, None)
        self.fast.pop(fd, None)
        if self.poller is not None:
            with contextlib.suppress(OSError, ValueError):
                self.poller.unregister(fd)

    async def connect(self) -> Connection:
        family, address = self.address
        sock = socket.socket(family, socket.SOCK_STREAM)
        limit = self.job["connect_timeout_s"]
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.wait_for(self.loop.sock_connect(sock, address), limit)
            connection = Connection(self, None if self.tls else sock)
            if self.poller is not None:
                self.by_fd[connection.fd] = connection
                self.poller.register(connection.fd, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)
            else:
                secure = {"ssl": self.tls, "server_hostname": self.job["host"]} if self.tls else {}
                made = self.loop.create_connection(lambda: connection, sock=sock, **secure)
                await asyncio.wait_for(made, limit)
        except BaseException:
            self.forget(sock.fileno())
            sock.close()
            raise
        self.connections.add(connection)
        return connection

    async def preconnect(self, count: int) -> None:
        """Open the connections before the window, 64 at a time; one that fails is tried again by its request."""
        faults = []

        async def one() -> None:
            try:
                self.idle.append(await self.connect())
            except (OSError, TimeoutError) as error:
                faults.append(error)

        for first in range(0, count, 64):
            await asyncio.gather(*(one() for _ in range(min(64, count - first))))
            if len(faults) >= 64:
                return

    async def go(self) -> None:
        self.address = await _resolve(self.loop, self.job["host"], self.job["port"])
        slots = min(self.concurrency or self.job["preconnect"], len(self.exchanges))
        await self.preconnect(slots)
        if self.start is not None:
            # All workers wait here for the parent, which starts them together when the slowest is ready.
            _say({"ready": True})
            await self.start.wait()
        gc.collect()
        gc.freeze()
        gc.disable()
        wait = self.start_at_ns - now_ns()
        if wait > 0:
            await asyncio.sleep(wait / 1e9)
        self.start_ns = self._tick_due = now_ns()
        if self.job["max_seconds"]:
            self.loop.call_later(self.job["max_seconds"], self.stop_sending, "deadline")
        self._tick()
        self._sweep()
        try:
            if self.concurrency:
                self._start_slots(slots)
            else:
                self._arrive()
            if self.exchanges:
                await self.over.wait()
        finally:
            self.end_ns = now_ns()
        await asyncio.sleep(self.job["surplus_wait_s"])
        for connection in list(self.connections):
            connection.close()
        for task in self.tasks:
            task.cancel()
        if self.poller is not None:
            self.loop.remove_reader(self.poller.fileno())
            self.poller.close()
            self.poller = None

    # -- dispatch
    def _start_slots(self, count: int) -> None:
        """All slots at once, or one after the other over the ramp (spread evenly over all workers' slots)."""
        every, first = self.job["slot_step"], self.job["slot_first"]
        for number in range(count):
            slot = first + number * every
            due = self.start_ns + int(self.job["ramp_s"] * 1e9 * slot / max(count * every, 1))
            self.at(due, self.next_of_slot, slot, due)

    def at(self, due_ns: int, call: Callable[..., None], *arguments: Any) -> None:
        """Call when it is due, at once if that is now; the window is not over before."""
        delay = (due_ns - now_ns()) / 1e9
        if delay <= 0:
            call(*arguments)
            return
        key = object()

        def run() -> None:
            self.timers.pop(id(key), None)
            # A loop's timers count in milliseconds and may come a little early: then this waits for the rest.
            self.at(due_ns, call, *arguments)

        self.timers[id(key)] = self.loop.call_later(delay, run)

    def next_of_slot(self, slot: int | None, due_ns: int) -> None:
        if not self.waiting or self.stopped:
            self._maybe_over()
            return
        exchange = self.waiting.popleft()
        exchange.due_ns, exchange.slot = due_ns, slot
        self.dispatch(exchange)

    def _next_turn(self, last: Exchange) -> bool:
        """Send the next turn of a session when its think time is over; False if the session ends here."""
        if not last.rest:
            return False
        left = last.rest
        last.rest = []
        if last.failure is None:
            last.record = read_exchange(last, self.job["api"], self.job["model"], True)
        if last.failure is not None or last.record is None or last.record["failure"] is not None:
            self.after_failed_turn += 0 if self.stopped else len(left)
            return False
        if self.stopped:
            return False
        turn = left[0]
        turn.rest, turn.slot = left[1:], last.slot
        turn.continue_from(last, self.job["api"], self.job["prefix"])
        turn.due_ns = last.end_ns + turn.think_ns
        self.at(turn.due_ns, self.dispatch, turn)
        return True

    def _arrive(self) -> None:
        """Open loop: send everything that is due, then sleep until the next due time; nothing waits for answers."""
        if self.stopped:
            self._maybe_over()
            return
        now = now_ns()
        while self.waiting and self.start_ns + self.waiting[0].offset_ns <= now:
            exchange = self.waiting.popleft()
            exchange.due_ns = self.start_ns + exchange.offset_ns
            self.dispatch(exchange)
        if self.waiting:
            delay = (self.start_ns + self.waiting[0].offset_ns - now_ns()) / 1e9
            self.loop.call_later(max(0.0, delay), self._arrive)
        else:
            self._maybe_over()

    def dispatch(self, exchange: Exchange) -> None:
        self.active[exchange.index] = (exchange, None)
        self.served.append(exchange)
        if len(self.active) > self.in_flight_max:
            self.in_flight_max = len(self.active)
        while self.idle:
            connection = self.idle.popleft() if self.concurrency else self.idle.pop()
            fresh = not connection.served or now_ns() - connection.idle_since < REUSE_WITHIN_NS
            if fresh and not connection.lost:
                self.active[exchange.index] = (exchange, connection)
                connection.send(exchange)
                return
            connection.close()
        task = self.loop.create_task(self._connect_and_send(exchange))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _connect_and_send(self, exchange: Exchange) -> None:
        begun = now_ns()
        failure = detail = None
        connection = None
        try:
            connection = await self.connect()
        except ConnectionRefusedError:
            failure, detail = "connection_refused", "ECONNREFUSED"
        except ssl.SSLError as error:
            failure, detail = "tls_error", getattr(error, "verify_message", "") or error.reason or type(error).__name__
        except TimeoutError:
            failure, detail = "connect_timeout", f"no connection in {self.job['connect_timeout_s']:g} s"
        except OSError as error:
            failure, detail = "connect_error", _short(error)
        exchange.connect_ns = now_ns() - begun
        if exchange.failure is not None:
            if connection is not None:
                connection.close()
            return
        if connection is None:
            exchange.failure, exchange.detail, exchange.end_ns = failure, detail or "", now_ns()
            exchange.sent_ns = exchange.end_ns
            self.done(None, exchange)
            return
        self.active[exchange.index] = (exchange, connection)
        connection.send(exchange)

    def done(self, connection: Connection | None, exchange: Exchange) -> None:
        self.active.pop(exchange.index, None)
        self.finished += 1
        self.refused_in_row = self.refused_in_row + 1 if exchange.failure in ("connection_refused", "tls_error") else 0
        if self.refused_in_row >= max(16, 2 * (self.concurrency or 8)) and not self.stopped:
            self.stop_sending("server_gone")
        if connection is not None and connection.keep and not connection.lost:
            self.idle.append(connection)
        if exchange.rest and self._next_turn(exchange):
            return
        if self.concurrency:
            # A failed request frees its slot through the loop, so that a dead server cannot recurse or starve the rest.
            if exchange.failure is None:
                self.next_of_slot(exchange.slot, exchange.end_ns)
            else:
                self.loop.call_soon(self.next_of_slot, exchange.slot, exchange.end_ns)
        else:
            self._maybe_over()

    def drop(self, connection: Connection) -> None:
        self.connections.discard(connection)
        with contextlib.suppress(ValueError):
            self.idle.remove(connection)

    def _maybe_over(self) -> None:
        if not self.active and not self.timers and (self.stopped or not self.waiting):
            self.over.set()

    # -- clocks
    def _tick(self) -> None:
        now = now_ns()
        self.lags.append(now - self._tick_due)
        self._tick_due = now + int(LAG_TICK_S * 1e9)
        self._probe += 1
        if self._probe % 10 == 0 and self.active:
            self._sample_unread()
        self.loop.call_later(LAG_TICK_S, self._tick)

    def _sample_unread(self) -> None:
        """Bytes that wait in the kernel for this client, summed over up to 8 sockets in flight."""
        waiting = 0
        for _, connection in itertools.islice(self.active.values(), 8):
            if connection is not None and connection.sock is not None and not connection.lost:
                with contextlib.suppress(OSError, ValueError):
                    fcntl.ioctl(connection.sock.fileno(), termios.FIONREAD, self._fionread)
                    waiting += struct.unpack("i", self._fionread)[0]
        self.unread.append(waiting)

    def _sweep(self) -> None:
        now = now_ns()
        gap, first = int(self.job["gap_timeout_s"] * 1e9), int(self.job["first_timeout_s"] * 1e9)
        for exchange, connection in list(self.active.values()):
            if connection is None or connection.current is not exchange:
                continue
            log = exchange.log
            if len(log) < 4:
                if now - exchange.sent_ns > first:
                    connection.fail("no_first_token", f"nothing but {len(log) // 2} reads in {first / 1e9:g} s")
            elif now - log[-2] > gap:
                connection.fail("stall", f"no byte for {gap / 1e9:g} s")
        self.loop.call_later(min(1.0, max(SWEEP_S, min(gap, first) / 10e9)), self._sweep)

    # -- ends
    def stop_sending(self, reason: str) -> None:
        if self.stopped is None:
            self.stopped = reason
        for timer in self.timers.values():
            timer.cancel()
        self.timers.clear()
        if reason == "deadline":
            self.loop.call_later(self.job["drain_s"], self.abort, "deadline")
        self._maybe_over()

    def abort(self, reason: str) -> None:
        """Stop now; what is in flight is recorded as interrupted, what has finished is kept."""
        self.stopped = self.stopped or reason
        for timer in self.timers.values():
            timer.cancel()
        self.timers.clear()
        for exchange, connection in list(self.active.values()):
            if connection is not None and connection.current is exchange:
                connection.fail("interrupted", reason)
            elif exchange.failure is None:
                exchange.failure, exchange.detail, exchange.end_ns = "interrupted", reason, now_ns()
                exchange.sent_ns = exchange.sent_ns or exchange.end_ns
                self.done(None, exchange)
        self._maybe_over()


class Tally:
    """Sums over the requests that have ended so far, for whoever watches: taken at each progress tick, from what is kept.

    Nothing is noted for it while answers come. A tick looks at what was in flight at the last one and at what was sent
    since, so that its cost does not grow with the level; what it says has a fixed size, whatever the parent reads.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.seen = 0
        self.open: list[Exchange] = []
        self.sums = {"ok": 0, "failed": 0, "first_ns": 0, "whole_ns": 0}

    def now(self) -> dict[str, int]:
        """What has ended, in sums.

        `ok` (answered with 200 and ended) and `failed` requests; over the ok ones `first_ns` from due to the first data
        (the second read, as in `no_first_token`) and `whole_ns` from due to the end; `since_ns` since the window began.
        The record, parsed afterwards, has the exact figures: an answer that ended well may still hold an error.
        """
        served = self.run.served
        looked_at = [*self.open, *served[self.seen :]]
        self.seen = len(served)
        self.open = []
        for exchange in looked_at:
            if exchange.failure is None and not exchange.ended:
                self.open.append(exchange)
            elif exchange.failure is not None or not exchange.data or exchange.data[0][9:12] != b"200":
                self.sums["failed"] += 1
            else:
                times = exchange.times
                self.sums["ok"] += 1
                self.sums["first_ns"] += times[min(1, len(times) - 1)] - exchange.due_ns
                self.sums["whole_ns"] += exchange.end_ns - exchange.due_ns
        since = now_ns() - self.run.start_ns if self.run.start_ns else 0
        return self.sums | {"since_ns": since}


async def _resolve(loop: asyncio.AbstractEventLoop, host: str, port: int) -> Any:
    infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for info in infos:
        if info[0] == socket.AF_INET:
            return info[0], info[4]
    return infos[0][0], infos[0][4]


def _percentiles(values: array[int]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    pick = lambda q: ordered[min(len(ordered) - 1, int(q * len(ordered)))]  # noqa: E731
    return {
        "n": len(ordered),
        "mean": sum(ordered) / len(ordered),
        "p50": pick(0.5),
        "p99": pick(0.99),
        "max": ordered[-1],
    }


def _load(path: str) -> tuple[dict[str, Any], list[Exchange], list[Exchange]]:
    """The job file: one JSON line of settings, then one line a request (meta, TAB, body)."""
    with open(path, "rb") as file:
        job = json.loads(file.readline())
        key = os.environ.get(job["api_key_env"] or "", "")
        host = job["host"] if ":" not in job["host"] else f"[{job['host']}]"
        head = f"POST {job['path']} HTTP/1.1\r\nHost: {host}:{job['port']}\r\nContent-Type: application/json\r\n"
        head += "Accept: text/event-stream\r\n" + (f"Authorization: Bearer {key}\r\n" if key else "")
        job["prefix"] = prefix = head.encode() + b"Content-Length: "
        warmup: list[Exchange] = []
        measured: list[Exchange] = []
        first: dict[int | None, Exchange] = {}
        for line in file:
            meta, body = line.rstrip(b"\n").split(b"\t", 1)
            index, warm, offset_ns, rid, request_id, prompt_sha256, turn = json.loads(meta)
            exchange = Exchange(index, body, offset_ns, rid, request_id, prompt_sha256)
            if turn:
                exchange.take_turn(*turn)
            if exchange.turn:
                # A later turn: its body is made when the answer before it is known.
                first[exchange.session].rest.append(exchange)
                continue
            exchange.payload = prefix + str(len(body)).encode() + b"\r\n\r\n" + body
            if turn:
                first[exchange.session] = exchange
            (warmup if warm else measured).append(exchange)
    job["secret"] = key
    return job, warmup, measured


async def _main(job: dict[str, Any], warmup: list[Exchange], measured: list[Exchange], part: str) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    runs: list[Run] = []
    halted: list[str] = []

    def halt(reason: str) -> None:
        halted.append(reason)
        start.set()
        for window in runs:
            window.abort(reason)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, halt, "interrupted")

    start = asyncio.Event()

    def parent_speaks() -> None:
        said = os.read(0, 4096)
        if not said:
            loop.remove_reader(0)
            halt("parent_gone")
        elif said.startswith(b"GO "):
            run.start_at_ns = int(said.split()[1])
            start.set()

    with contextlib.suppress(OSError, ValueError, PermissionError):
        loop.add_reader(0, parent_speaks)

    facts: dict[str, Any] = {}
    run = Run(job, measured, start)
    if warmup:
        warm_job = dict(job, concurrency=job["warmup_concurrency"], ramp_s=0.0, max_seconds=None, surplus_wait_s=0.0)
        warm = Run(warm_job, warmup)
        runs.append(warm)
        await warm.go()
        runs.remove(warm)
        ok = sum(x.failure is None and x.ended for x in warmup)
        facts["warmup"] = {"sent": sum(x.sent_ns > 0 for x in warmup), "answered": ok}
        warmup.clear()
    if halted:
        run.stopped = halted[0]
        run.over.set()
        start.set()
    runs.append(run)

    tally = Tally(run)

    def progress() -> None:
        _say({"done": run.finished, "in_flight": len(run.active), "of": run.planned} | tally.now())
        ticks[:] = [loop.call_later(job["progress_s"], progress)]

    ticks = [loop.call_later(job["progress_s"], progress)]
    cpu = time.process_time()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    await run.go()
    cpu_window = time.process_time() - cpu
    ticks[0].cancel()  # it would run once more when the loop ends, over exchanges that have been written and let go
    _say({"over": True})
    after = resource.getrusage(resource.RUSAGE_SELF)
    wall = max(run.end_ns - run.start_ns, 1) / 1e9
    facts |= {
        "start_ns": run.start_ns,
        "end_ns": run.end_ns,
        "stopped": run.stopped,
        "lag_ns": _percentiles(run.lags),
        "lag_tick_ns": int(LAG_TICK_S * 1e9),
        "unread_bytes": _percentiles(run.unread),
        "cpu_window_s": cpu_window,
        "cpu_frac": cpu_window / wall,
        "cpu_window_system_s": after.ru_stime - usage.ru_stime,
        "involuntary_switches": after.ru_nivcsw - usage.ru_nivcsw,
        "in_flight_max": run.in_flight_max,
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "loop": type(loop).__module__.split(".")[0],
        "cores": sorted(os.sched_getaffinity(0)),
        "first_request_after_start_s": (run.start_ns / 1e9) - job["parent_started_ns"] / 1e9,
        "cpu_before_window_s": cpu,
    }
    for number in (signal.SIGINT, signal.SIGTERM):
        # The window is over: a second signal must not lose what has been measured.
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)
    sent = 0
    with open(part, "w", encoding="utf-8") as file:
        for exchange in sorted(run.served, key=lambda x: x.sent_ns):
            if exchange.sent_ns:
                sent += 1
                write_record(file, exchange, job)
            exchange.data, exchange.times = [], array("q")

    facts |= {
        "sent": sent,
        "planned": run.planned,
        "unsent_after_failed_turn": run.after_failed_turn,
        "peak_rss_bytes": peak_rss_bytes(),
        "cpu_total_s": time.process_time(),
    }
    return facts


def peak_rss_bytes() -> int:
    """Peak memory of this program (ru_maxrss survives exec: it would be the notebook's where that is larger)."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def prefer(pid: int, nice: int) -> None:
    """Ask for a priority, of the process and of its session's scheduling group; without the right to it, go on."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, min(nice, os.getpriority(os.PRIO_PROCESS, pid)))
    with contextlib.suppress(OSError), open(f"/proc/{pid}/autogroup", "w") as file:
        file.write(str(nice))


def main(argv: list[str]) -> int:
    """Run one job file, write its records to PART and the facts about this client to stdout's last line."""
    job, warmup, measured = _load(argv[0])
    if job["cores"]:
        os.sched_setaffinity(0, job["cores"])
    # Beside a server that takes every core, a sender that waits for its turn would time the scheduler.
    prefer(os.getpid(), job["nice"])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    if job["loop"] != "asyncio":
        try:
            import uvloop

            loop_factory = uvloop.new_event_loop
        except ImportError:
            loop_factory = asyncio.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        facts = runner.run(_main(job, warmup, measured, argv[1]))
    _say({"facts": facts})
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
