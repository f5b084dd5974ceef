"""What came over the wire, made into one record a request, after the window is over.

Only bytes and timestamps go in. An answer may be cut anywhere: inside a UTF-8 character, a JSON value, an HTTP chunk
or the blank line between two events; an event's time is the time of the read that brought its last byte.
"""

from __future__ import annotations

import importlib
import json
import re
from array import array
from hashlib import sha256
from itertools import accumulate, chain, repeat
from operator import sub
from typing import IO, Any

#: Every way in which a request can fail, and what it means. A failed request has exactly one of these names.
FAILURES: dict[str, str] = {
    "connection_refused": "nobody listens on the port",
    "connect_timeout": "no TCP connection within the connect timeout",
    "connect_error": "the connection could not be made for another reason (name, route)",
    "tls_error": "the TLS handshake failed: certificate, host name, or a server that does not speak TLS",
    "reset_before_response": "the connection was reset after the request was sent, before a byte of the answer",
    "closed_before_response": "the server closed the connection without a byte of the answer",
    "reset_mid_stream": "the connection was reset inside the answer",
    "closed_mid_stream": "the server closed the connection inside the answer",
    "no_first_token": "the answer did not begin within the first-token timeout",
    "stall": "the answer began, then no byte came within the gap timeout",
    "http_4xx": "the server refused the request (status and body in `detail`)",
    "http_5xx": "the server failed on the request (status and body in `detail`)",
    "http_other": "a status that is neither 200, 4xx nor 5xx",
    "wrong_model": "the server does not know the model name, or answered in the name of another model",
    "malformed_http": "the answer's framing is not HTTP/1.1",
    "malformed_sse": "an event of the stream is not `data: JSON`, or its text is not UTF-8",
    "error_event": "the stream carried an error object instead of a token",
    "aborted": "the server ended the request with finish_reason abort",
    "incomplete": "the answer ended in good order but without a finish_reason or its closing event",
    "no_usage": "no token count from the server, so nothing about tokens is known",
    "no_output": "the server counted no output token",
    "duplicate_answer": "the server sent more than one answer to this request",
    "wrong_answer_id": "the answer names another request",
    "interrupted": "the run was stopped while this request was in flight",
}

#: meta_info fields of /generate that a record keeps (numbers and histograms only; never text or token ids).
META_FIELDS = (
    "cached_tokens",
    "cached_tokens_details",
    "e2e_latency",
    "queue_time",
    "num_retractions",
    "decode_throughput",
    "spec_accept_rate",
    "spec_accept_length",
    "spec_verify_ct",
    "spec_num_correct_drafts",
    "spec_num_proposed_drafts",
    "spec_accepted_drafts",
    "spec_proposed_drafts",
    "spec_accept_histogram",
    "spec_correct_drafts_histogram",
    "weight_version",
    "dp_rank",
)
DETAIL_CHARS = 500
_NUMBERS = ("t_us", "tokens", "sizes")
#: How this client's own request ids begin (`rid` of /generate): a server that echoes one says whose answer it is.
RID_PREFIX = "wb-"
_UNKNOWN_MODEL = re.compile(r"model\b.{0,120}(not exist|not found|not served|unknown)", re.I | re.S)
#: The inside of a JSON string without a control character (which also would break the event's line).
_JSON_TEXT = re.compile(rb'(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))+')
_ODD_BYTE = re.compile(rb'["\\\x00-\x1f]')
#: So many reads are checked at once: fewer lose speed, more cost more work when one of them differs. The last reads of an
#: answer (finish reason, usage, [DONE]) always differ and are left out.
RUN_BLOCK, CLOSING_READS = 128, 4
_BLANK_LINE = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_TRIMMED = b'data: {"trimmed":'
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens":(?=(\d+))')
_ID = re.compile(rb'"id"\s*:\s*"([^"]*)"')
_SLOTS = {"completions": ((b'"text":', "c"),), "chat": ((b'"content":', "c"), (b'"reasoning_content":', "r"))}


class Exchange:
    """One request on the wire: when it was due and sent, every read of its answer, and how it ended."""

    __slots__ = (
        "index",
        "payload",
        "offset_ns",
        "rid",
        "request_id",
        "prompt_sha256",
        "due_ns",
        "sent_ns",
        "end_ns",
        "connect_ns",
        "log",
        "times",
        "data",
        "failure",
        "detail",
        "ended",
        "reused",
        "surplus",
        "surplus_on_connection",
        "slot",
        "session",
        "turn",
        "think_ns",
        "cut",
        "script",
        "rest",
        "history",
        "record",
    )

    def __init__(
        self, index: int, payload: bytes, offset_ns: int, rid: str | None, request_id: str, prompt_sha256: str
    ) -> None:
        self.index, self.payload, self.offset_ns = index, payload, offset_ns
        self.rid, self.request_id, self.prompt_sha256 = rid, request_id, prompt_sha256
        self.due_ns = self.sent_ns = self.end_ns = self.connect_ns = 0
        #: While the answer comes: time, bytes, time, bytes, ... in one list (see Run.read_ready for why).
        self.log: list[Any] = []
        self.times: array[int] = array("q")
        self.data: list[bytes] = []
        self.failure: str | None = None
        self.detail = ""
        self.ended = self.reused = self.surplus_on_connection = False
        self.surplus = 0
        self.slot: int | None = None
        self.session: int | None = None
        self.turn = self.think_ns = 0
        self.cut: tuple[int, int] = (0, 0)
        self.script: str | None = None
        self.rest: list[Exchange] = []
        self.history = b""
        self.record: dict[str, Any] | None = None

    def take_log(self) -> None:
        """Nothing more comes: split what was read into times and bytes."""
        self.times, self.data = array("q", self.log[::2]), self.log[1::2]
        self.log = []

    def take_turn(self, session: int, turn: int, think_ns: int, start: int, end: int, script: str | None) -> None:
        """Make this a turn of a session; `payload` is its body, and its prompt lies between `start` and `end`."""
        self.session, self.turn, self.think_ns, self.cut, self.script = session, turn, think_ns, (start, end), script
        self.history = self.payload[start:end]

    def continue_from(self, last: Exchange, api: str, prefix: bytes) -> None:
        """The whole request of a later turn: everything said so far, the answer to it, and what this turn adds.

        The prompt is put together as JSON text, not decoded and encoded again: at 100,000 tokens that costs a copy.
        """
        text = self.script if self.script is not None else (last.record or {}).get("content") or ""
        answer = json.dumps(text, ensure_ascii=False)
        if api == "chat":
            between = b',{"role":"assistant","content":' + answer.encode("utf-8", "replace") + b"},"
        else:
            between = answer[1:-1].encode("utf-8", "replace")
        self.history = b"".join((last.history, between, self.history))
        last.history = b""
        start, end = self.cut
        body = b"".join((self.payload[:start], self.history, self.payload[end:]))
        self.payload = prefix + str(len(body)).encode() + b"\r\n\r\n" + body


def trimmed_read(previous: bytes, data: bytes) -> bytes:
    """The read with the repeated text taken out, where it is one whole `/generate` event that is not the last.

    SGLang's `/generate` repeats the whole text and all ids in every event: 4,096 tokens would keep 80 MB a request.
    The rest is made a well-formed HTTP chunk again, which states the original size; anything else comes back as it is.
    """
    if previous[-3:] != b"\n\r\n" or data[-4:] != b"\n\n\r\n":
        return data
    line = data.find(b"\r\n", 0, 12)
    at = data.rfind(b'"meta_info":')
    if line < 1 or at < 0 or data.find(b'"finish_reason":null', at) < 0:
        return data
    try:
        size = int(data[:line], 16)
    except ValueError:
        return data
    if size != len(data) - line - 4 or data.find(b"\n\n", line) != len(data) - 4:
        return data
    payload = b'data: {"trimmed":%d,%b' % (size, data[at:-2])
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def answer_id(data: list[bytes]) -> bytes:
    """The id in an answer's first event, b"" if there is none in its first reads."""
    found = _ID.search(b"".join(data[:3])[:8192])
    return found.group(1) if found else b""


def drop_first_answer(exchange: Exchange) -> int:
    """Take the first answer out of an exchange, leave what follows it (the beginning of the next), count its bytes."""
    dropped = 0
    for number, piece in enumerate(exchange.data):
        before = exchange.data[number - 1][-7:] if number else b""
        at = (before + piece).find(b"\r\n0\r\n\r\nHTTP/1.")
        if at >= 0:
            cut = at + 7 - len(before)
            exchange.data = [piece[cut:], *exchange.data[number + 1 :]]
            exchange.times = exchange.times[number:]
            return dropped + cut
        dropped += len(piece)
    exchange.data, exchange.times = [], array("q")
    return dropped


class _Events:
    """The events of one answer: times, kinds (c content, r reasoning, n no token), sizes, cumulative token counts."""

    __slots__ = (
        "api",
        "times",
        "kinds",
        "sizes",
        "counts",
        "texts",
        "thoughts",
        "failure",
        "detail",
        "usage",
        "finish",
        "meta",
        "model",
        "id",
        "done",
        "templates",
        "heads",
        "meta_head",
        "meta_tail",
    )

    def __init__(self, api: str) -> None:
        self.api = api
        self.times: list[int] = []
        self.kinds: list[str] = []
        self.sizes: list[int] = []
        self.counts: list[int] = []
        self.texts: list[bytes] = []
        self.thoughts: list[bytes] = []
        self.failure: str | None = None
        self.detail = ""
        self.usage: dict[str, Any] | None = None
        self.finish: Any = None
        self.meta: dict[str, Any] = {}
        self.model: str | None = None
        self.id: str | None = None
        self.done = False
        self.templates: list[tuple[bytes, int, bytes, int, str]] = []
        self.heads: dict[int, bytes] = {}
        self.meta_head = self.meta_tail = b""

    def fail(self, name: str, detail: str) -> None:
        if self.failure is None:
            self.failure, self.detail = name, detail

    def add(self, event: bytes, stamp: int) -> None:
        """One event without its closing blank line."""
        if self.meta_head and event.startswith(_TRIMMED) and event.endswith(self.meta_tail):
            at = event.find(b",", 17) + 1
            if event.startswith(self.meta_head, at):
                count = event[at + len(self.meta_head) : len(event) - len(self.meta_tail)]
                if count.isdigit():
                    self._count(int(count), int(event[17 : at - 1]), stamp)
                    return
        for prefix, cut, suffix, tail, kind in self.templates:
            if event.startswith(prefix) and event.endswith(suffix):
                text = event[cut : len(event) - tail]
                if text and not _JSON_TEXT.fullmatch(text):
                    break
                self.times.append(stamp)
                self.kinds.append(kind if text else "n")
                self.sizes.append(len(event))
                (self.texts if kind == "c" else self.thoughts).append(text)
                return
        self._add_slowly(event, stamp)

    def _add_slowly(self, event: bytes, stamp: int) -> None:
        body = event
        if not event.startswith(b"data:") or b"\n" in event or b"\r" in event:
            fields = [x for x in re.split(rb"\r\n|\n|\r", event) if x and not x.startswith((b":", b"event:", b"id:"))]
            if not fields or all(x.startswith(b"retry:") for x in fields):
                return
            if not all(x.startswith(b"data:") for x in fields):
                self.fail("malformed_sse", _text(event))
                return
            body = b"\n".join(x[5:].removeprefix(b" ") for x in fields)
        else:
            body = event[5:].strip()
        if body == b"[DONE]":
            self.done = True
            return
        try:
            payload = json.loads(body)
        except (ValueError, RecursionError):
            self.fail("malformed_sse", _text(event))
            return
        if not isinstance(payload, dict):
            self.fail("malformed_sse", _text(event))
            return
        if "error" in payload or payload.get("object") == "error":
            self.fail("error_event", _text(body))
            return
        kind = self._generate(payload) if self.api == "generate" else self._openai(payload, event)
        if self.api == "generate" and event.startswith(_TRIMMED):
            found = _COMPLETION_TOKENS.search(event)
            if found:
                self.meta_head, self.meta_tail = event[event.find(b",", 17) + 1 : found.end()], event[found.end(1) :]
        self.times.append(stamp)
        self.kinds.append(kind)
        self.sizes.append(int(payload.get("trimmed", len(event))))

    def _generate(self, payload: dict[str, Any]) -> str:
        meta = payload.get("meta_info")
        if not isinstance(meta, dict):
            self.fail("malformed_sse", "an event without meta_info")
            return "n"
        self.id = meta.get("id", self.id)
        count = _count_of(meta.get("completion_tokens"))
        before = self.counts[-1] if self.counts else 0
        self.counts.append(before if count is None else count)
        if count is not None:
            self.usage = {"prompt_tokens": meta.get("prompt_tokens"), "completion_tokens": count}
        if meta.get("finish_reason"):
            self.finish, self.meta = meta["finish_reason"], meta
            self.texts = [json.dumps(payload.get("text", ""), ensure_ascii=False).encode("utf-8", "replace")[1:-1]]
        return "c" if self.counts[-1] > before else "n"

    def _count(self, count: int, size: int, stamp: int) -> None:
        """A trimmed /generate event that differs from one that was read in full by its number of tokens alone."""
        before = self.counts[-1] if self.counts else 0
        self.counts.append(count)
        self.times.append(stamp)
        self.kinds.append("c" if count > before else "n")
        self.sizes.append(size)
        if self.usage is not None:
            self.usage["completion_tokens"] = count

    def _openai(self, payload: dict[str, Any], event: bytes) -> str:
        self.id = payload.get("id", self.id)
        self.model = payload.get("model", self.model)
        usage = payload.get("usage")
        if isinstance(usage, dict) and _count_of(usage.get("completion_tokens")) is not None:
            self.usage = usage
            if payload.get("choices"):
                before = self.counts[-1] if self.counts else 0
                self.counts.extend([before] * (len(self.kinds) - len(self.counts)))
                self.counts.append(usage["completion_tokens"])
        kind = "n"
        choices = payload.get("choices") or ()
        if not isinstance(choices, list | tuple) or not all(isinstance(c, dict) for c in choices):
            self.fail("malformed_sse", _text(event))
            return "n"
        for choice in choices:
            if choice.get("finish_reason"):
                self.finish = choice["finish_reason"]
            delta = choice if self.api == "completions" else choice.get("delta") or {}
            if not isinstance(delta, dict):
                self.fail("malformed_sse", _text(event))
                return "n"
            for key, letter in _SLOTS[self.api]:
                value = delta.get(key[1:-2].decode())
                if isinstance(value, str) and value:
                    kind = letter
                    self._keep(event, key, letter, value)
            if isinstance(delta.get("tool_calls"), list) and delta["tool_calls"] and kind == "n":
                kind = "c"
        return kind

    def _keep(self, event: bytes, key: bytes, letter: str, value: str) -> None:
        """Store the text, and learn the bytes around it: the next events usually differ in the text alone."""
        plain = value.encode("utf-8", "replace")
        if not value.isprintable() or b"\\" in plain or b'"' in plain or not value.isascii():
            plain = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")[1:-1]
        (self.texts if letter == "c" else self.thoughts).append(plain)
        if b'"finish_reason":null' not in event:
            return
        at = event.find(b"%b\"%b\"" % (key, plain))
        if at < 0:
            return
        at += len(key) + 1
        prefix, suffix = event[:at], event[at + len(plain) :]
        if all((prefix, suffix) != (t[0], t[2]) for t in self.templates) and b'"usage":{' not in suffix:
            self.templates.insert(0, (prefix, len(prefix), suffix, len(suffix), letter))
            self.heads.clear()
            del self.templates[4:]


def _count_of(value: Any) -> int | None:
    """A number of tokens; what a server states that is none (words, a truth value, less than 0) is unknown."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _text(raw: bytes) -> str:
    return raw[: DETAIL_CHARS * 4].decode("utf-8", "replace")[:DETAIL_CHARS]


def _plain_run(buffer: bytes, ends: list[int], first: int, times: array[int], events: _Events) -> int:
    """Take the reads from `first` on that are one HTTP chunk with one event each, as the template but for the text.

    Most of a stream is such a run. A block of reads is cut where a template and the reads' lengths put the texts, then
    built again from those texts and compared with what came: every byte is checked, in a few calls for the whole block.
    Returns the first read that is not part of the run.
    """
    last = len(ends) - CLOSING_READS
    while first < last:
        stop = min(first + RUN_BLOCK, last)
        if not _plain_block(buffer, ends, first, stop, times, events):
            return _plain_reads(buffer, ends, first, stop, times, events)
        first = stop
    return _plain_reads(buffer, ends, first, len(ends), times, events)


def _plain_block(buffer: bytes, ends: list[int], first: int, stop: int, times: array[int], events: _Events) -> bool:
    """Take all reads of a block, or none of them and say False."""
    prefix, _, suffix, _, kind = events.templates[0]
    tail = suffix + b"\n\n\r\n"
    begins, stops = ends[first - 1 : stop - 1], ends[first:stop]
    lengths = list(map(sub, stops, begins))
    known = {length: _chunk_head(events.heads, length, prefix) for length in set(lengths)}
    before = list(map(known.__getitem__, lengths))
    cut = len(tail)
    texts = [buffer[b + len(h) : e - cut] for b, h, e in zip(begins, before, stops, strict=True)]
    if b"".join(chain.from_iterable(zip(before, texts, repeat(tail)))) != buffer[begins[0] : stops[-1]]:
        return False
    if not all(texts):
        return False
    if _ODD_BYTE.search(b"".join(texts)) and not all(map(_JSON_TEXT.fullmatch, texts)):
        return False
    (events.texts if kind == "c" else events.thoughts).extend(texts)
    events.times.extend(times[first:stop])
    events.kinds.extend(kind * len(texts))
    inner = len(prefix) + len(suffix)
    events.sizes.extend([len(text) + inner for text in texts])
    return True


def _plain_reads(buffer: bytes, ends: list[int], first: int, stop: int, times: array[int], events: _Events) -> int:
    """The same read by read, up to the first that differs."""
    prefix, _, suffix, _, kind = events.templates[0]
    tail = suffix + b"\n\n\r\n"
    cut, inner = len(tail), len(prefix) + len(suffix)
    texts, sizes = events.texts if kind == "c" else events.thoughts, events.sizes
    starts_with, ends_with = buffer.startswith, buffer.endswith
    start, read = ends[first - 1], first
    for end in ends[first:stop]:
        head = _chunk_head(events.heads, end - start, prefix)
        begin = start + len(head)
        if not (starts_with(head, start, end) and ends_with(tail, begin, end)):
            break
        text = buffer[begin : end - cut]
        if not _JSON_TEXT.fullmatch(text):
            break
        texts.append(text)
        sizes.append(len(text) + inner)
        start = end
        read += 1
    events.times.extend(times[first:read])
    events.kinds.extend(kind * (read - first))
    return read


def _chunk_head(heads: dict[int, bytes], length: int, prefix: bytes) -> bytes:
    """How a chunk of this length begins: hexadecimal size, CRLF (then size bytes, CRLF), and the template's prefix."""
    head = heads.get(length)
    if head is None:
        digits = next((n for n in range(1, 9) if len(b"%x" % max(length - n - 4, 0)) == n), 1)
        head = heads[length] = b"%x\r\n%b" % (max(length - digits - 4, 0), prefix)
    return head


def _walk_chunks(
    buffer: bytes, position: int, ends: list[int], times: array[int], events: _Events
) -> tuple[bool, int]:
    """Feed the events of a chunked body; says whether its last chunk came, and how many bytes follow it."""
    carry = b""
    read, total = 0, len(buffer)
    find, add = buffer.find, events.add
    while position < total:
        if events.templates and not carry and ends[read] == position:
            read = _plain_run(buffer, ends, read + 1, times, events) - 1
            position = ends[read]
            if position >= total:
                break
        line = find(b"\r\n", position, position + 66)
        if line < 0:
            if total - position > 64:
                events.fail("malformed_http", "a chunk without a size")
            return False, 0
        try:
            size = int(buffer[position:line].split(b";", 1)[0], 16)
        except ValueError:
            events.fail("malformed_http", f"a chunk of size {_text(buffer[position:line])!r}")
            return False, 0
        start = line + 2
        if size == 0:
            if buffer[start : start + 2] != b"\r\n":
                events.fail("malformed_http", "no blank line after the last chunk")
                return False, 0
            _last_event(carry, events, times)
            return True, total - start - 2
        stop = start + size
        if stop + 2 > total:
            return False, 0
        if buffer[stop : stop + 2] != b"\r\n":
            events.fail("malformed_http", "a chunk that is longer than it says")
            return False, 0
        while ends[read] < stop + 2:
            read += 1
        arrived = read
        while arrived and ends[arrived - 1] >= stop:
            arrived -= 1
        if not carry and find(b"\n\n", start, stop) == stop - 2 and find(b"\r", start, stop) < 0:
            add(buffer[start : stop - 2], times[arrived])
        else:
            carry = _split_events(carry + buffer[start:stop], stop, ends, times, arrived, events)
        position = stop + 2
    return False, 0


def _split_events(
    piece: bytes, stop: int, ends: list[int], times: array[int], read: int, events: _Events
) -> bytes:
    """Events that end inside a piece whose last byte is at `stop`; what is left over comes back."""
    begin = 0
    for blank in _BLANK_LINE.finditer(piece):
        event = piece[begin : blank.start()]
        offset = stop - (len(piece) - blank.end())
        first = read
        while first > 0 and ends[first - 1] >= offset:
            first -= 1
        begin = blank.end()
        if event.strip():
            events.add(event, times[first])
    return piece[begin:]


def _last_event(carry: bytes, events: _Events, times: array[int]) -> None:
    if carry.strip():
        events.fail("malformed_sse", _text(carry))


def _http_failure(status: int, body: str) -> tuple[str, str]:
    detail = f"HTTP {status}: {body}"[:DETAIL_CHARS]
    if status in (400, 404, 422) and _UNKNOWN_MODEL.search(body):
        return "wrong_model", detail
    name = "http_4xx" if 400 <= status < 500 else "http_5xx" if 500 <= status < 600 else "http_other"
    return name, detail


def read_exchange(exchange: Exchange, api: str, model: str | None, keep_text: bool) -> dict[str, Any]:
    """The record of one finished exchange: raw times and sizes, the server's own counts, and at most one failure.

    Whatever a server sends costs at most its own request: an answer that cannot be read is `malformed_sse`.
    """
    kept = exchange.data
    try:
        return _read_exchange(exchange, api, model, keep_text)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError) as error:
        exchange.data = kept
        detail = f"{type(error).__name__} while reading {_text(b''.join(kept)[:200])!r}"
        failed = exchange.failure or "malformed_sse"
        return _record(exchange, _Events(api), None, None, failed, exchange.detail or detail, None, None)


def _read_exchange(exchange: Exchange, api: str, model: str | None, keep_text: bool) -> dict[str, Any]:
    times, ends = exchange.times, list(accumulate(map(len, exchange.data)))
    buffer = b"".join(exchange.data)
    # The reads lie scattered in memory: they are let go while the cache still has them.
    exchange.data = []
    events = _Events(api)
    head_end = buffer.find(b"\r\n\r\n")
    status: int | None = None
    terminated, surplus = False, exchange.surplus
    head_us = None
    while head_end >= 0 and buffer[:12].split(b" ")[1:2] == [b"100"]:
        cut = head_end + 4
        buffer, ends = buffer[cut:], [x - cut for x in ends]
        head_end = buffer.find(b"\r\n\r\n")
    if buffer:
        first_line = buffer[: max(buffer.find(b"\r\n"), 0)].split(b" ", 2)
        if first_line[0].startswith(b"HTTP/1.") and len(first_line) > 1 and first_line[1].isdigit():
            status = int(first_line[1])
        elif head_end >= 0 or len(buffer) > 16:
            events.fail("malformed_http", _text(buffer[:80]))
    if head_end >= 0 and status is not None:
        read = 0
        while ends[read] < head_end + 4:
            read += 1
        head_us = (times[read] - exchange.sent_ns) // 1000
        head = buffer[:head_end].lower()
        body_at = head_end + 4
        if status != 200:
            body = buffer[body_at:]
            if b"transfer-encoding: chunked" in head:
                body = re.sub(rb"(?:^|\r\n)[0-9a-fA-F]+\r\n", b"", body).removesuffix(b"\r\n")
            events.fail(*_http_failure(status, _text(body)))
        elif b"transfer-encoding: chunked" in head:
            terminated, after = _walk_chunks(buffer, body_at, ends, times, events)
            surplus += after
        elif b"text/event-stream" in head:
            stop = len(buffer)
            rest = _split_events(buffer[body_at:], stop, ends, times, len(times) - 1, events)
            terminated = exchange.ended
            _last_event(rest if terminated else b"", events, times)
        else:
            events.fail("malformed_sse", _text(buffer[body_at:]))
            terminated = exchange.ended
    failure, detail = _verdict(exchange, events, status, terminated, surplus, model)
    content, thoughts = _decoded(events.texts), _decoded(events.thoughts)
    text = None if content is None or thoughts is None else thoughts + content
    if text is None and failure is None:
        failure, detail = "malformed_sse", "the text is not UTF-8"
    record = _record(exchange, events, status, head_us, failure, detail, text if keep_text else None, text)
    if exchange.rest or exchange.turn or exchange.session is not None:
        record |= {"session": exchange.session, "turn": exchange.turn, "content": content}
    if exchange.slot is not None:
        record["slot"] = exchange.slot
    return record


def _verdict(
    exchange: Exchange, events: _Events, status: int | None, terminated: bool, surplus: int, model: str | None
) -> tuple[str | None, str]:
    if exchange.failure == "interrupted":
        return exchange.failure, exchange.detail
    if surplus:
        return "duplicate_answer", f"{surplus} bytes after the end of the answer"
    if exchange.rid and events.id and events.id != exchange.rid and events.id.startswith(RID_PREFIX):
        return "wrong_answer_id", f"asked as {exchange.rid}, answered as {events.id}"
    if exchange.surplus_on_connection and not (exchange.rid and events.id == exchange.rid):
        return "duplicate_answer", "its connection carried more answers than requests"
    if exchange.failure and not (events.failure and events.failure.startswith(("http_", "error_", "malformed_"))):
        return exchange.failure, exchange.detail
    if events.failure:
        return events.failure, events.detail
    if not terminated:
        return "malformed_http", "the answer's end could not be found where it seemed to be"
    if model and events.model and events.model != model:
        return "wrong_model", f"asked for {model!r}, answered as {events.model!r}"
    kind = events.finish.get("type") if isinstance(events.finish, dict) else events.finish
    if kind == "abort":
        return "aborted", json.dumps(events.finish)[:DETAIL_CHARS]
    if not kind or not events.done:
        return "incomplete", "no finish_reason" if not kind else "no closing [DONE]"
    if events.usage is None:
        return "no_usage", "no usage in the stream"
    if not events.usage.get("completion_tokens"):
        return "no_output", f"usage {json.dumps(events.usage)}"[:DETAIL_CHARS]
    if "c" not in events.kinds and "r" not in events.kinds:
        # Tokens were counted but none of them can be seen (special tokens only): there is no first token to time.
        return "no_output", "tokens were counted, but no event carried one"
    return None, ""


def _decoded(texts: list[bytes]) -> str | None:
    raw = b"".join(texts)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        return None
    if "\\" not in text and '"' not in text:
        return text
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except (ValueError, RecursionError):
        return None


def _record(
    exchange: Exchange,
    events: _Events,
    status: int | None,
    head_us: int | None,
    failure: str | None,
    detail: str,
    kept: str | None,
    text: str | None,
) -> dict[str, Any]:
    sent = exchange.sent_ns
    stamps = events.times
    tokens: list[int] | int | None = None
    if events.counts:
        counts = events.counts + [events.counts[-1]] * (len(stamps) - len(events.counts))
        tokens = [b - a for a, b in zip([0, *counts[:-1]], counts, strict=True)]
    kinds = "".join(events.kinds)
    if "n" in kinds:
        seen = [stamp for stamp, kind in zip(stamps, kinds, strict=True) if kind != "n"]
    else:
        seen = stamps
    bundled = len(seen) - len(set(seen))
    finish = events.finish.get("type") if isinstance(events.finish, dict) else events.finish
    usage = events.usage
    record: dict[str, Any] = {
        "kind": "request",
        "i": exchange.index,
        "id": exchange.request_id,
        "prompt_sha256": exchange.prompt_sha256,
        "due_ns": exchange.due_ns,
        "sent_ns": sent,
        "end_ns": exchange.end_ns,
        "connect_us": exchange.connect_ns // 1000 or None,
        "reused": exchange.reused,
        "status": status,
        "failure": failure,
        "detail": detail or None,
        "head_us": head_us,
        "t_us": [(t - sent) // 1000 for t in stamps],
        "kinds": kinds,
        "tokens": tokens,
        "sizes": events.sizes,
        "reads": len(exchange.times),
        "bundled": bundled,
        "usage": usage,
        "finish_reason": finish,
        "meta": {k: events.meta[k] for k in META_FIELDS if k in events.meta} or None,
        "model": events.model,
        "server_id": events.id,
        "output_sha256": sha256(text.encode("utf-8", "replace")).hexdigest() if text is not None else None,
    }
    if kept is not None:
        record["text"] = kept
    return record


def write_record(file: IO[str], exchange: Exchange, job: dict[str, Any]) -> None:
    """Write one exchange as a JSON line, without the API key wherever a server may have echoed it."""
    record = exchange.record or read_exchange(exchange, job["api"], job["model"], job["keep_text"])
    record.pop("content", None)
    if not job["keep_text"]:
        record.pop("text", None)
    if record["detail"]:
        record["detail"] = _redacted(record["detail"], job["secret"])
    # Most of a record is three lists of whole numbers, which str() writes three times as fast as json does.
    numbers = [f'"{key}":{record.pop(key)}'.replace(" ", "") for key in _NUMBERS if record[key] is not None]
    line = ",".join([json.dumps(record, separators=(",", ":"))[:-1], *numbers]) + "}"
    if job["secret"] and job["secret"] in line:
        line = line.replace(job["secret"], "[redacted]")
    file.write(line + "\n")


def _redacted(detail: str, secret: str) -> str:
    if secret:
        detail = detail.replace(secret, "[redacted]")
    try:
        redact = importlib.import_module("lib.server.redact").redact_text
    except (ImportError, AttributeError):
        return detail
    return str(redact(detail))
