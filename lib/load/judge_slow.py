"""The judge in Python, for machines without a compiler: the same plan and record as judge.c, at a lower pace.

It answers the same endpoints and keeps the same truth; what it can pace is stated in `judge.SLOW_JUDGE_CHUNKS_PER_S`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import struct
import sys
import time

WORDS = (" lorem", " ipsum", " dolor", " sit", " amet", " sed", " do", " ut")
PATHS = {b"/generate": "generate", b"/v1/completions": "completions", b"/v1/chat/completions": "chat"}


class _Request:
    __slots__ = ("ordinal", "accepted", "read", "api", "count", "usage", "index", "sent", "stream")

    def __init__(self, ordinal: int, accepted: int, api: str, count: int, usage: bool, stream: _Stream) -> None:
        self.ordinal, self.accepted, self.read = ordinal, accepted, time.monotonic_ns()
        self.api, self.count, self.usage, self.stream = api, count, usage, stream
        self.index = 0
        self.sent: list[int] = []


class _Judge:
    def __init__(self, plan: argparse.Namespace) -> None:
        self.plan = plan
        self.requests: list[_Request] = []
        self.running: list[_Request] = []
        self.loop = asyncio.get_running_loop()
        self.lags = [0, 0, 0]
        self.stepping = False
        self.next_step = 0
        self.steps = 0

    def begin(self, stream: _Stream, api: str, body: bytes) -> None:
        name = rb'"max_new_tokens":\s*(\d+)' if api == "generate" else rb'"max_tokens":\s*(\d+)'
        found = re.findall(name, body)
        usage = re.search(rb'"include_usage":\s*true', body) is not None
        request = _Request(len(self.requests) + 1, stream.accepted, api, int(found[-1]) if found else 16, usage, stream)
        self.requests.append(request)
        stream.request = request
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        stream.transport.write(head + b"transfer-encoding: chunked\r\n\r\n")
        chance = random.Random(f"{self.plan.seed}-{request.ordinal}").random()
        wait = self.plan.first_min_ns + int(chance * (self.plan.first_max_ns - self.plan.first_min_ns))
        due = request.read + wait
        self.loop.call_later(wait / 1e9, self.first, request, due)

    def first(self, request: _Request, due: int) -> None:
        self.late(due)
        self.emit(request)
        if request.index < request.count:
            self.running.append(request)
            if not self.stepping:
                self.stepping = True
                self.next_step = max(self.next_step, time.monotonic_ns() + self.plan.step_ns)
                self.wait()

    def wait(self) -> None:
        self.loop.call_later(max(0.0, (self.next_step - time.monotonic_ns()) / 1e9), self.step)

    def step(self) -> None:
        self.late(self.next_step)
        now, self.running = self.running, []
        for request in now:
            if request.stream.transport.is_closing():
                continue
            self.emit(request)
            if request.index < request.count:
                self.running.append(request)
        self.steps += 1
        self.next_step += self.plan.step_ns
        if random.Random(f"{self.plan.seed}-step-{self.steps}").random() * 1e6 < self.plan.stall_ppm:
            self.next_step += self.plan.stall_ns
        self.next_step = max(self.next_step, time.monotonic_ns() - 1_000_000_000)
        self.stepping = bool(self.running)
        if self.stepping:
            self.wait()

    def late(self, due: int) -> None:
        lag = max(0, time.monotonic_ns() - due)
        self.lags = [self.lags[0] + 1, self.lags[1] + lag, max(self.lags[2], lag)]

    def emit(self, r: _Request) -> None:
        count = min(1 if r.index == 0 else self.plan.tokens_per_event, r.count - r.index)
        text = "".join(WORDS[(r.index + i) & 7] for i in range(count))
        begun = r.index == 0
        r.index += count
        last = r.index >= r.count
        finish = "length" if last else None
        base = {"id": f"judge-{r.ordinal:016x}", "model": "judge"}
        events: list[object] = []
        if r.api == "completions":
            choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
            events.append(base | {"object": "text_completion", "choices": [choice], "usage": None})
        elif r.api == "chat":
            deltas: list[dict[str, str]] = [{"content": text}]
            deltas = ([{"role": "assistant", "content": ""}] if begun else []) + deltas + ([{}] if last else [])
            for delta in deltas:
                choice = {"index": 0, "delta": delta, "finish_reason": None if delta else finish}
                events.append(base | {"object": "chat.completion.chunk", "choices": [choice]})
        else:
            meta = {
                "id": base["id"],
                "finish_reason": {"type": "length", "length": r.count} if last else None,
                "prompt_tokens": 8,
                "completion_tokens": r.index,
                "cached_tokens": 0,
            }
            whole = "".join(WORDS[i & 7] for i in range(r.index))
            events.append({"text": whole, "output_ids": [1000 + (i & 7) for i in range(r.index)], "meta_info": meta})
        if last and r.usage and r.api != "generate":
            usage = {"prompt_tokens": 8, "completion_tokens": r.count, "total_tokens": 8 + r.count}
            events.append(base | {"choices": [], "usage": usage})
        pieces = [b"data: " + json.dumps(e, separators=(",", ":")).encode() + b"\n\n" for e in events]
        if last:
            pieces.append(b"data: [DONE]\n\n")
        raw = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces) + (b"0\r\n\r\n" if last else b"")
        r.sent.append(time.monotonic_ns())
        r.stream.transport.write(raw)
        if last:
            r.stream.request = None
            self.loop.call_soon(r.stream.take)

    def truth(self) -> bytes:
        numbers = [1, len(self.requests), *self.lags, 0]
        for r in self.requests:
            numbers += [r.ordinal, r.accepted, r.read, r.index, len(r.sent), *r.sent]
        return struct.pack(f"<{len(numbers)}q", *numbers)


class _Stream(asyncio.Protocol):
    def __init__(self, judge: _Judge) -> None:
        self.judge, self.accepted, self.buffer = judge, time.monotonic_ns(), b""
        self.request: _Request | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        self.take()

    def take(self) -> None:
        while self.request is None and (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end]
            length = re.search(rb"(?i)\r\ncontent-length:\s*(\d+)", head)
            size = int(length.group(1)) if length else 0
            if len(self.buffer) < end + 4 + size:
                return
            body, self.buffer = self.buffer[end + 4 : end + 4 + size], self.buffer[end + 4 + size :]
            path = head.split(b" ", 2)[1]
            if path in PATHS:
                self.judge.begin(self, PATHS[path], body)
            elif path == b"/judge/truth":
                self.answer(200, self.judge.truth())
            elif path == b"/v1/models":
                self.answer(200, b'{"object":"list","data":[{"id":"judge","object":"model"}]}')
            else:
                self.answer(200 if path == b"/health" else 404, b"{}")

    def answer(self, status: int, body: bytes) -> None:
        self.transport.write(b"HTTP/1.1 %d judge\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))


async def _serve(plan: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    judge = _Judge(plan)
    server = await loop.create_server(lambda: _Stream(judge), "127.0.0.1", 0, backlog=4096)
    over = asyncio.Event()

    def parent_gone() -> None:
        if not os.read(0, 256):
            over.set()

    loop.add_reader(0, parent_gone)
    sys.stdout.write(f"PORT {server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await over.wait()


def main(argv: list[str]) -> None:
    """Serve the plan on a free port until standard input ends; options as in judge.c."""
    parser = argparse.ArgumentParser()
    for name, default in (("step-ns", 20_000_000), ("stall-ppm", 20_000), ("stall-ns", 40_000_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("first-min-ns", 50_000_000), ("first-max-ns", 150_000_000), ("tokens-per-event", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seed", type=int, default=1)
    asyncio.run(_serve(parser.parse_args(argv)))


if __name__ == "__main__":
    main(sys.argv[1:])
