"""Answers as bytes: whatever comes, a record comes out, and how the bytes were cut never changes what they say."""

from __future__ import annotations

import json
import random
from array import array
from itertools import pairwise

import pytest
from faulty_server import HEAD, Answer, chunk, sse
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.load import metrics
from lib.load.client_wire import FAILURES, Exchange, read_exchange, trimmed_read

WORDS = ["a", " word", "\n", '"', "\\", "ß", " 東", "\t", " the end", "}", "data: ", "🙂"]
PATHS = {"completions": "prompt", "chat": "messages", "generate": "text"}


def answer_bytes(api: str, words: list[str]) -> bytes:
    """A good answer in SGLang's own form (compact JSON), of these tokens."""
    made = Answer({PATHS[api]: "x", "max_tokens": len(words), "max_new_tokens": len(words), "model": "m"}, b"")
    made.id = "cmpl-1"
    events = []
    for index, word in enumerate(words):
        last = index == len(words) - 1
        if api == "generate":
            meta = {"id": "1", "finish_reason": {"type": "length"} if last else None, "prompt_tokens": 3, "completion_tokens": index + 1}
            payload: dict[str, object] = {"text": "".join(words[: index + 1]), "meta_info": meta}
        else:
            part = {"text": word} if api == "completions" else {"delta": {"content": word}}
            payload = {"id": "1", "model": "m", "choices": [{"index": 0, **part, "finish_reason": "length" if last else None}]}
        events.append(sse(json.dumps(payload, separators=(",", ":"), ensure_ascii=False).encode()))
    if api != "generate":
        usage = {"prompt_tokens": 3, "completion_tokens": len(words)}
        events.append(sse({"id": "1", "model": "m", "choices": [], "usage": usage}))
    events.append(sse(b"[DONE]"))
    return HEAD + b"".join(map(chunk, events)) + b"0\r\n\r\n"


def exchange(pieces: list[bytes]) -> Exchange:
    made = Exchange(0, b"", 0, None, "r", "0" * 64)
    made.sent_ns, made.ended = 0, True
    made.data = pieces
    made.times = array("q", [1_000_000 * (i + 1) for i in range(len(pieces))])
    made.end_ns = made.times[-1] if pieces else 1
    return made


def cut(raw: bytes, at: list[int]) -> list[bytes]:
    ends = sorted({0, len(raw), *[x % max(len(raw), 1) for x in at]})
    return [raw[a:b] for a, b in pairwise(ends)]


def by_chunks(raw: bytes) -> list[bytes]:
    """As a server sends them: the head, then one read a chunk."""
    pieces, body = [HEAD], raw[len(HEAD) :]
    while body:
        size = int(body[: body.index(b"\r\n")], 16)
        end = body.index(b"\r\n") + 2 + size + 2
        pieces.append(body[:end])
        body = body[end:]
    return pieces


@given(
    words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=300),
    api=st.sampled_from(["completions", "chat", "generate"]),
    at=st.lists(st.integers(0, 10**6), max_size=30),
)
@settings(max_examples=60, deadline=None)
def test_how_the_bytes_are_cut_changes_nothing(words: list[str], api: str, at: list[int]) -> None:
    """One read a chunk (whole blocks compared at once), any other cut, and one read: the same text, events and tokens."""
    raw = answer_bytes(api, words)
    seen = []
    for pieces in (by_chunks(raw), cut(raw, at), [raw]):
        record = read_exchange(exchange(pieces), api, "m", True)
        assert record["failure"] is None, record["detail"]
        assert record["t_us"] == sorted(record["t_us"])
        seen.append((record["text"], record["kinds"], record["sizes"], record["usage"], record["tokens"]))
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][0] == "".join(words) and seen[0][1].count("c") == len(words)


@given(data=st.data(), api=st.sampled_from(["completions", "chat", "generate"]))
@settings(max_examples=300, deadline=None)
def test_whatever_comes_a_record_comes_out(data: st.DataObject, api: str) -> None:
    """Bytes changed, lost, doubled or made up: never an exception, and a failure has one of the known names."""
    raw = bytearray(answer_bytes(api, data.draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=20))))
    generator = random.Random(data.draw(st.integers(0, 2**32)))
    for _ in range(data.draw(st.integers(0, 6))):
        at = generator.randrange(len(raw))
        what = generator.randrange(4)
        if what == 0:
            raw[at] = generator.randrange(256)
        elif what == 1:
            del raw[at : at + generator.randrange(40)]
        elif what == 2:
            raw[at:at] = raw[at : at + generator.randrange(200)]
        else:
            raw[at:at] = generator.choice([b"null", b"[]", b"{}", b"-1", b"1e999", b"\r\n", b"\n\n", b'"', b"\xff", b"0\r\n\r\n"])
        raw = raw or bytearray(b"x")
    pieces = cut(bytes(raw), [generator.randrange(10**6) for _ in range(generator.randrange(12))])
    record = read_exchange(exchange(pieces), api, "m", False)
    assert record["failure"] is None or record["failure"] in FAILURES
    assert len(record["t_us"]) == len(record["kinds"]) == len(record["sizes"])
    json.dumps(record)
    metrics.request_times(record)


@pytest.mark.parametrize("payload", ["null", "5", '"x"', "[]", '{"choices":[null]}', '{"choices":[{"delta":[]}]}',
                                     '{"meta_info":{"completion_tokens":true}}', '{"usage":{"completion_tokens":1e400}}'])  # fmt: skip
@pytest.mark.parametrize("api", ["completions", "chat", "generate"])
def test_events_of_a_wrong_shape(payload: str, api: str) -> None:
    """JSON that is no event of this endpoint costs its own request, by name."""
    raw = HEAD + chunk(sse(payload.encode())) + chunk(sse(b"[DONE]")) + b"0\r\n\r\n"
    assert read_exchange(exchange([raw]), api, "m", False)["failure"] in ("malformed_sse", "incomplete", "no_usage")


def test_a_bad_escape_in_the_middle_of_a_fast_run_is_seen() -> None:
    """A lone backslash at the end of one token's text, in a long run that otherwise matches: malformed, not joined."""
    raw = answer_bytes("completions", ["ab"] * 300)
    assert raw.count(b'"text":"ab"') == 300
    at = [i for i in range(len(raw)) if raw.startswith(b'"text":"ab"', i)][150]
    bad = raw[: at + 9] + b"\\" + raw[at + 10 :]
    record = read_exchange(exchange(by_chunks(bad)), "completions", "m", False)
    assert record["failure"] == "malformed_sse"
    assert len(record["t_us"]) >= 150


def test_trimming_leaves_what_it_does_not_know() -> None:
    """Only a whole, ordinary event after an ordinary one is trimmed."""
    event = b'data: {"text":"' + b"x" * 700 + b'","meta_info":{"finish_reason":null,"completion_tokens":5}}\n\n'
    whole = chunk(event)
    assert len(trimmed_read(b"\n\n\r\n", whole)) < 150
    for previous, data in ((b"abc", whole), (b"\n\n\r\n", whole[:-1]), (b"\n\n\r\n", whole.replace(b"null", b'"x"'))):
        assert trimmed_read(previous, data) == data
