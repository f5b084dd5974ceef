"""Streams of a real SGLang 0.5.16, with and without speculation, read by the client's parser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lib.load import metrics
from lib.load.client_wire import Exchange, read_exchange

FOLDER = Path(__file__).parent / "recorded"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def replay(name: str, api: str, cut: int = 0) -> dict[str, Any]:
    """The recorded events as HTTP chunks at their times; `cut`: in reads of that many bytes instead."""
    exchange = Exchange(0, b"", 0, None, "r", "x")
    exchange.due_ns = exchange.sent_ns = 1_000_000_000
    reads = [(0.0, HEAD)]
    for time, event in re.findall(rb"^@([\d.]+) (data: .*)$", (FOLDER / name).read_bytes(), re.M):
        body = event.rstrip(b"\r") + b"\n\n"
        reads.append((float(time), b"%x\r\n%b\r\n" % (len(body), body)))
    reads.append((reads[-1][0], b"0\r\n\r\n"))
    if cut:
        whole, last = b"".join(r for _, r in reads), reads[-1][0]
        reads = [(last * i / len(whole), whole[i : i + cut]) for i in range(0, len(whole), cut)]
    for time, data in reads:
        exchange.times.append(exchange.sent_ns + round(time * 1e9))
        exchange.data.append(data)
    exchange.ended, exchange.end_ns = True, exchange.times[-1]
    return read_exchange(exchange, api, "x", keep_text=True)


TEXT = " import os, sys; from pathlib Path as filename return open(self."
CASES = [
    # name, api, completion tokens, token events, counts known, verify steps
    ("m1_auto.generate.sse", "generate", 16, 16, True, None),
    ("m1_auto.completions.sse", "completions", 16, 16, True, None),
    ("m1_auto.chat.sse", "chat", 16, None, None, None),
    ("m1_auto.chat_continuous_usage.sse", "chat", 8, 8, True, None),
    ("m1_nextn.generate.sse", "generate", 16, 5, True, 4),
    ("m1_nextn.chat.sse", "chat", 16, None, None, None),
]


@pytest.mark.parametrize(("name", "api", "tokens", "events", "known", "verify"), CASES, ids=lambda v: str(v)[:24])
@pytest.mark.parametrize("cut", [0, 1, 7, 100, 5000])
def test_a_recorded_stream(
    name: str, api: str, tokens: int, events: int | None, known: bool | None, verify: int | None, cut: int
) -> None:
    """Tokens from usage, token events by content, finish reason and verify steps, however the reads were cut."""
    record = replay(name, api, cut)
    assert record["failure"] is None, record["detail"]
    assert record["usage"]["completion_tokens"] == tokens and record["finish_reason"] == "length"
    whole = replay(name, api)
    assert (record["text"], record["kinds"], record["tokens"]) == (whole["text"], whole["kinds"], whole["tokens"])
    if events is not None:
        assert len(metrics.token_times_us(record)) == events
    if known:
        counts = metrics.token_counts(record)
        assert counts is not None and sum(counts) == tokens
    if verify is not None:
        assert record["meta"]["spec_verify_ct"] == verify
    if api != "chat":
        assert record["text"] == TEXT


def test_times_are_the_recorded_ones() -> None:
    """First token at 30.1 ms and last at 78.7 ms after sending, as the recording says."""
    times = metrics.token_times_us(replay("m1_auto.generate.sse", "generate"))
    assert times[0] == 30_100 and times == sorted(times) and times[-1] == 78_700


def test_the_role_chunk_is_not_a_token() -> None:
    """A chat stream begins with an event that has a role and no text: it is neither first token nor content."""
    record = replay("m1_auto.chat.sse", "chat")
    assert record["kinds"][0] == "n" and record["kinds"][1] == "c"
    assert metrics.token_times_us(record)[0] == 31_000


def test_speculation_brings_several_tokens_an_event() -> None:
    """16 tokens in 5 events: counts from the server are 1, 4, 4, 4, 3; without counts (chat) they stay unknown."""
    assert metrics.token_counts(replay("m1_nextn.generate.sse", "generate")) == [1, 4, 4, 4, 3]
    chat = replay("m1_nextn.chat.sse", "chat")
    assert len(metrics.token_times_us(chat)) < 15 and metrics.token_counts(chat) is None
