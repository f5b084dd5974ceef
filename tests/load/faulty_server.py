"""A server of the tests' own that does one fault for each request, named in the prompt: `FAULT:name ...`.

It answers like SGLang's OpenAI endpoints and /generate, one thread a connection, over real sockets.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
TEXT = ["Grüße", " aus", " Köln", ' "quoted"', " back\\slash", "\nnew", " 東京", " 🙂", " end"]


def sse(payload: Any) -> bytes:
    raw = payload if isinstance(payload, bytes) else json.dumps(payload, ensure_ascii=False).encode()
    return b"data: " + raw + b"\n\n"


def chunk(raw: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(raw), raw)


class FaultyServer:
    """Counts what it received by fault; `kill()` closes the listener and resets every connection."""

    def __init__(self, gap_s: float = 0.01, tls: ssl.SSLContext | None = None) -> None:
        self.gap_s, self.tls = gap_s, tls
        self.seen: Counter[str] = Counter()
        self.lock = threading.Lock()
        self.connections: set[socket.socket] = set()
        self.answers = 0
        self.die_after: int | None = None
        self.authorizations: set[str] = set()
        self.bodies: list[dict[str, Any]] = []
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = self.listener.getsockname()[1]
        self.base_url = f"http{'s' if tls else ''}://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self.lock:
                self.connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def kill(self) -> None:
        """What a crash looks like from outside."""
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        with self.lock:
            for connection in self.connections:
                reset(connection)

    def _serve(self, connection: socket.socket) -> None:
        buffer = b""
        if self.tls:
            try:
                connection = self.tls.wrap_socket(connection, server_side=True)
            except OSError:
                return
        with contextlib.suppress(OSError, ValueError), connection:
            while True:
                while b"\r\n\r\n" not in buffer:
                    data = connection.recv(65536)
                    if not data:
                        return
                    buffer += data
                head, _, rest = buffer.partition(b"\r\n\r\n")
                if head.startswith(b"GET /v1/models"):
                    plain(connection, 200, b'{"data":[{"id":"m"}]}')
                    buffer = rest
                    continue
                if head.startswith(b"GET"):
                    plain(connection, 404, b"{}")
                    buffer = rest
                    continue
                length = int(re.search(rb"(?i)content-length:\s*(\d+)", head).group(1))  # type: ignore[union-attr]
                while len(rest) < length:
                    rest += connection.recv(65536)
                body, buffer = json.loads(rest[:length]), rest[length:]
                if found := re.search(rb"(?i)authorization: (\S+ \S+)", head):
                    self.authorizations.add(found.group(1).decode())
                prompt = body.get("prompt") or body.get("text") or (body.get("messages") or [{}])[0].get("content", "")
                # In a conversation the last thing said decides.
                name = re.findall(r"FAULT:(\w+)", json.dumps(body.get("messages") or prompt))[-1]
                with self.lock:
                    self.bodies.append(body)
                    self.seen[name] += 1
                    self.answers += 1
                    dying = self.die_after is not None and self.answers > self.die_after
                if dying:
                    self.kill()
                    return
                FAULTS[name](self, connection, Answer(body, head))


class Answer:
    """The events of a good answer to a request, in the dialect it was asked in."""

    def __init__(self, body: dict[str, Any], head: bytes) -> None:
        self.body, self.head = body, head
        self.api = "chat" if "messages" in body else "completions" if "prompt" in body else "generate"
        options = body.get("sampling_params") or body
        self.tokens = int(options.get("max_new_tokens") or options.get("max_tokens"))
        self.id = body.get("rid") or f"cmpl-{time.monotonic_ns()}"
        self.model = body.get("model")
        self.usage = True
        self.finish: Any = "length"

    def event(self, index: int) -> bytes:
        text, last = TEXT[index % len(TEXT)], index == self.tokens - 1
        if self.api == "generate":
            finish = {"type": self.finish, "length": self.tokens} if last else None
            meta = {"id": self.id, "finish_reason": finish, "prompt_tokens": 7}
            if self.usage:
                meta["completion_tokens"] = index + 1
            whole = "".join(TEXT[i % len(TEXT)] for i in range(index + 1))
            return sse({"text": whole, "output_ids": list(range(index + 1)), "meta_info": meta | {"cached_tokens": 3}})
        part = {"text": text} if self.api == "completions" else {"delta": {"content": text}}
        choice = {"index": 0, **part, "finish_reason": self.finish if last else None}
        return sse({"id": self.id, "object": "x", "model": self.model, "choices": [choice]})

    def events(self) -> list[bytes]:
        made = [self.event(i) for i in range(self.tokens)]
        if self.usage and self.api != "generate":
            usage = {"prompt_tokens": 7, "completion_tokens": self.tokens, "total_tokens": 7 + self.tokens}
            made.append(sse({"id": self.id, "model": self.model, "choices": [], "usage": usage}))
        return [*made, sse(b"[DONE]")]


def reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()


def stream(server: FaultyServer, connection: socket.socket, events: list[bytes], end: bool = True) -> None:
    connection.sendall(HEAD)
    for event in events:
        time.sleep(server.gap_s)
        connection.sendall(chunk(event))
    if end:
        connection.sendall(b"0\r\n\r\n")


def plain(connection: socket.socket, status: int, body: bytes) -> None:
    connection.sendall(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))


def ok(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    stream(server, connection, answer.events())


def bytewise(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    """Every byte in a packet of its own: cut inside UTF-8, JSON, chunk sizes and blank lines."""
    whole = HEAD + b"".join(map(chunk, answer.events())) + b"0\r\n\r\n"
    for i in range(len(whole)):
        connection.sendall(whole[i : i + 1])
        if i % 8 == 0:
            time.sleep(0.0002)


def cut_chunks(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    """HTTP chunks of 7 bytes, which end inside characters and events."""
    body = b"".join(answer.events())
    stream(server, connection, [body[i : i + 7] for i in range(0, len(body), 7)])


def crlf(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    events = [e.replace(b"\n\n", b"\r\n\r\n") for e in answer.events()]
    stream(server, connection, [b": a comment\r\n\r\n", *events])


def until_close(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
    for event in answer.events():
        time.sleep(server.gap_s)
        connection.sendall(event)
    connection.shutdown(socket.SHUT_RDWR)


def reset_mid_stream(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    stream(server, connection, answer.events()[:3], end=False)
    time.sleep(0.05)
    reset(connection)


def reset_before(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    reset(connection)


def close_before(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    connection.shutdown(socket.SHUT_RDWR)


def close_mid_stream(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    stream(server, connection, answer.events()[:3], end=False)
    connection.shutdown(socket.SHUT_RDWR)


def stall(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    stream(server, connection, answer.events()[:3], end=False)
    time.sleep(30)


def no_first(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    connection.sendall(HEAD)
    time.sleep(30)


def http_400(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    plain(connection, 400, b'{"object":"error","message":"The input (40000 tokens) is longer than the context."}')


def http_500(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    plain(connection, 500, b"Internal Server Error")


def echo_key(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    plain(connection, 401, b"not allowed: " + answer.head)


def unknown_model(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    plain(connection, 404, b'{"object":"error","message":"The model `nope` does not exist."}')


def other_model(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    answer.model = "another"
    ok(server, connection, answer)


def malformed(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    events = answer.events()
    events[2] = events[2][:-9] + b"\n\n"
    stream(server, connection, events)


def not_utf8(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    events = answer.events()
    events[1] = events[1].replace(b"aus", b"a\xffs")
    stream(server, connection, events)


def not_sse(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    plain(connection, 200, b"<html>a proxy's welcome page</html>")


def bad_chunk(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    connection.sendall(HEAD + chunk(answer.event(0)) + b"zz\r\nnonsense\r\n0\r\n\r\n")


def no_usage(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    answer.usage = False
    ok(server, connection, answer)


def no_finish(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    answer.finish = None
    ok(server, connection, answer)


def aborted(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    answer.finish = "abort"
    ok(server, connection, answer)


def error_event(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    error = {"error": {"message": "out of memory", "code": 500}}
    stream(server, connection, [answer.event(0), sse(error), sse(b"[DONE]")])


def empty(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 0, "total_tokens": 7}
    if answer.api == "generate":
        meta = {"id": answer.id, "finish_reason": {"type": "stop"}, "prompt_tokens": 7, "completion_tokens": 0}
        stream(server, connection, [sse({"text": "", "output_ids": [], "meta_info": meta}), sse(b"[DONE]")])
        return
    last = {"id": answer.id, "choices": [{"index": 0, "text": "", "finish_reason": "stop"}], "usage": usage}
    stream(server, connection, [sse(last), sse(b"[DONE]")])


def twice(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    """The same answer again in one packet with the end of the first."""
    whole = b"".join(map(chunk, answer.events())) + b"0\r\n\r\n"
    connection.sendall(HEAD + whole + HEAD + whole)


def twice_later(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    """The same answer again, after the client has sent its next request on this connection."""
    ok(server, connection, answer)
    time.sleep(0.03)
    ok(server, connection, answer)


def huge_event(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    """One event of 3 MB in one chunk, between ordinary ones."""
    events = answer.events()
    events[3] = re.sub(rb'("text"|"content"): "', lambda m: m.group() + b"x" * 3_000_000, events[3], count=1)
    stream(server, connection, events)


def lying_usage(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    """A token count that is no number, in the place where it belongs."""
    stream(server, connection, [re.sub(rb'"completion_tokens": \d+', b'"completion_tokens": "many"', e) for e in answer.events()])


def negative_usage(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    stream(server, connection, [re.sub(rb'"completion_tokens": \d+', b'"completion_tokens": -5', e) for e in answer.events()])


def early_stop(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    """The model ends by itself after three tokens, as it may where ignore_eos is off."""
    answer.tokens, answer.finish = 3, "stop"
    ok(server, connection, answer)


def thinks(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    """Chat: three reasoning tokens before the content."""
    said = [{"index": 0, "delta": {"reasoning_content": f" thought {i}"}, "finish_reason": None} for i in range(3)]
    thoughts = [sse({"id": answer.id, "model": answer.model, "choices": [choice]}) for choice in said]
    stream(server, connection, [*thoughts, *answer.events()])


def nested(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    """JSON nested so deeply that a parser gives up."""
    stream(server, connection, [answer.event(0), sse(b"[" * 100_000 + b"]" * 100_000), sse(b"[DONE]")])


def odd_types(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    """Well-formed JSON whose parts have other types than they should."""
    events = [sse({"id": 5, "choices": "none", "usage": [], "meta_info": {"completion_tokens": None}}), sse(b"[DONE]")]
    stream(server, connection, events)


def other_id(server: FaultyServer, connection: socket.socket, answer: Answer) -> None:
    answer.id = answer.id[:-1] + ("x" if answer.id[-1] != "x" else "y")
    ok(server, connection, answer)


FAULTS: dict[str, Callable[[FaultyServer, socket.socket, Answer], None]] = {
    f.__name__: f
    for f in (
        ok, bytewise, cut_chunks, crlf, until_close, reset_mid_stream, reset_before, close_before, close_mid_stream,
        stall, no_first, http_400, http_500, echo_key, unknown_model, other_model, malformed, not_utf8, not_sse,
        bad_chunk, no_usage, no_finish, aborted, error_event, empty, twice, twice_later, other_id, huge_event, lying_usage,
        negative_usage, early_stop, nested, odd_types, thinks,
    )
}  # fmt: skip


@contextlib.contextmanager
def faulty_server(gap_s: float = 0.01, tls: ssl.SSLContext | None = None) -> Iterator[FaultyServer]:
    server = FaultyServer(gap_s, tls)
    try:
        yield server
    finally:
        server.kill()
