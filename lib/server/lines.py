"""What surrounds a log line's message: colours, journal and container prefixes, progress bars, time stamps and
rank tags.

SGLang writes `[2026-11-29 13:05:53 DP0 PP1 TP3 EP7] message` (tags only for sizes above one, none for the main
process).
Services and containers put their own prefix before it, terminals add colours, progress bars write several lines
into one.
This module only looks at text; it never opens anything.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

MAX_LINE_BYTES = 1 << 20
"""A longer physical line is cut here: no line that a server writes is longer, and memory stays bounded."""

_ANSI = re.compile(rb"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-Z\\-_]")
#: `[time tags]` as SGLang's logger writes it, anywhere in the line; people
#: cut the date or the whole time off when they quote it.
_TAGS = rb"(?:ATTN_CP|MOE_DP|MOE_EP|DP|PP|TP|EP|CP|DCP)\d{1,9}"
_STAMP = re.compile(
    rb"\[(?:(?P<time>(?:\d{4}-\d\d-\d\d[ T])?\d\d:\d\d:\d\d(?:[.,]\d{1,9})?)(?P<tags>(?: +" + _TAGS + rb")*)"
    rb"|(?P<only>" + _TAGS + rb"(?: +" + _TAGS + rb")*))\] ?"
)
#: `2026-11-29 13:05:53 ...` without brackets: SGLang under another formatter, docker and k8s time stamps.
_PLAIN_TIME = re.compile(rb"(?<![\d\[])(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?)(?:Z|[+-]\d\d:?\d\d)?(?!\d)")
#: vLLM: `(EngineCore pid=9896) INFO 11-29 12:57:52 [core.py:133] message`.
_VLLM = re.compile(
    rb"(?:\((?P<process>[^()]{1,60}?)(?: pid=\d+)?\) ?)?(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) "
    rb"(?P<time>\d\d-\d\d \d\d:\d\d:\d\d)(?:\.\d+)? \[[^\]\s]{1,120}?:\d+\] ?"
)
#: What systemd's journal, docker compose and k8s put before the message.
_JOURNAL = re.compile(
    rb"(?:(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)"
    rb" [\w.-]{1,64} [\w@.:/-]{1,80}(?:\[\d+\])?: ?"
    rb"|[\w.-]{1,80} +\| ?"
    rb"|(?:(?:DEFAULT|DEBUG|INFO|NOTICE|WARNING|ERROR|CRITICAL) )?"
    rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[.\d]*(?:Z|[+-]\d\d:?\d\d)"
    rb" (?:(?:stdout|stderr) [FP] )?)"
)
#: Formatters other than SGLang's own: `INFO 151972 [scheduler_metrics_mixin.py:287] message`.
_LEVEL = re.compile(
    rb"^[\s:|-]*(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b[\s:|-]*)?(?:\d{1,8} +)?(?:\[[\w./-]+\.py:\d+\] ?)?"
)
_RANK = re.compile(rb"(ATTN_CP|MOE_DP|MOE_EP|DP|PP|TP|EP|CP|DCP)(\d+)")
_BRACKET_RANK = re.compile(rb"^\[rank(\d{1,9})\]:")
#: What launchers and collectors put before every line of a child, the inner lines of a traceback too: Ray and vLLM's
#: processes, PyTorch's ranks, pods, CI servers, `srun --label`, a quotation, a wrapper's own logger.
_LAUNCHER = re.compile(
    rb"(?P<process>\((?P<name>\w[\w.:-]{0,60}) pid=\d{1,10}(?:, ip=[\w.:]{1,45})?\))(?: |$)"
    rb"|\[rank(?P<rank>\d{1,9})\]:(?: |$)"
    rb"|\[(?:TP|DP|PP|EP)\d{1,4}\.\.\d{1,4}\] *"  # people sum up equal lines of many ranks
    rb"|\[pod/[^\]\s]{1,200}\](?: |$)"
    rb"|\[\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[.\d]{0,10}Z\](?: |$)"
    rb"|\d{1,4}: (?=[\[ A-Z])"
    rb"|> ?(?=[\[> A-Z])"
    rb"|\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.,]\d{1,9}(?:[+-]\d\d:?\d\d)? - [\w.]{1,80} - "
    rb"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) - "
)


class Line(NamedTuple):
    """One message with what was written around it."""

    number: int
    time: str | None
    rank: str | None
    text: str
    stamped: bool
    quote: str
    indent: int = 0
    outer: str | None = None
    """The time stamp that a container or collector put before the line; `time` is the server's own where it has one."""

    def tag(self, name: str) -> int | None:
        """The rank's number of one kind, e.g. `tag("TP")` of `DP0 TP3` is 3."""
        return rank_tag(self.rank, name)


def rank_tag(rank: str | None, name: str) -> int | None:
    """The number behind `name` in a rank such as `DP0 TP3 EP3`, or None."""
    for part in (rank or "").split():
        if part.rstrip("0123456789") == name:
            return int(part[len(name) :])
    return None


def without_colours(raw: bytes) -> bytes:
    """The line without terminal escape sequences."""
    return _ANSI.sub(b"", raw) if b"\x1b" in raw else raw


def split_messages(raw: bytes) -> list[bytes]:
    """The messages in one physical line.

    A progress bar rewrites its line with carriage returns, and a logger that writes to the same terminal continues on
    it, so that `0%| | 0/20 [00:00<?][2026-11-29 13:06:29] message` holds two messages.
    """
    parts = [part for part in raw.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n") if part.strip()]
    messages: list[bytes] = []
    for part in parts:
        starts = [match.start() for match in _STAMP.finditer(part)]
        if not starts or (len(starts) == 1 and not _holds_progress(part[: starts[0]])):
            messages.append(part)
            continue
        if part[: starts[0]].strip() and _holds_progress(part[: starts[0]]):
            messages.append(part[: starts[0]])
            bounds = starts
        else:
            bounds = [0, *starts[1:]]
        messages.extend(part[a:b] for a, b in zip(bounds, [*bounds[1:], len(part)], strict=True))
    return messages


def _holds_progress(head: bytes) -> bool:
    return b"it/s" in head or b"s/it" in head or b"%|" in head or b"% Completed" in head


def parse_line(number: int, raw: bytes) -> Line:
    """Time, rank and message of one line, whatever wrote around it.

    Example: `parse_line(7, b"[2026-11-29 13:06:28 DP0 TP3] Memory pool end. avail mem=9.00 GB")` has time
    "2026-11-29 13:06:28", rank "DP0 TP3" and text "Memory pool end. avail mem=9.00 GB".
    """
    raw = without_colours(raw).rstrip(b"\r\n")
    quote = raw.decode("utf-8", "replace").strip()
    stamp = _STAMP.search(raw, 0, 400)
    if stamp:
        rank = b" ".join((stamp["tags"] or stamp["only"] or b"").split()).decode() or None
        time = _clock(stamp["time"]) if stamp["time"] else None
        indent = len(raw) - len(raw.lstrip(b" \t"))
        text = raw[stamp.end() :].decode("utf-8", "replace").strip()
        return Line(number, time, rank, text, True, quote, indent, _outer(raw[: stamp.start()]))
    vllm = _VLLM.search(raw, 0, 400)
    if vllm:
        process = vllm.group("process")
        text = raw[vllm.end() :].decode("utf-8", "replace").rstrip()
        return Line(
            number,
            vllm.group("time").decode(),
            process.decode("utf-8", "replace") if process else None,
            text,
            True,
            quote,
            0,
            _outer(raw[: vllm.start()]),
        )
    journal = _JOURNAL.match(raw)
    body = raw[journal.end() :] if journal else raw
    body, before, who = _without_launcher(body)
    head = _PLAIN_TIME.search(body, 0, 60)
    time = _clock(head.group(1)) if head else None
    outer = _outer(journal.group(0) if journal else b"") or _outer(before)
    time = time or outer
    if head and not body[: head.start()].strip(b" \t(["):
        body = body[head.end() :]
        level = _LEVEL.match(body)
        body = body[level.end() :] if level else body
    bracket = _BRACKET_RANK.match(body)
    rank_text = f"rank{int(bracket.group(1))}" if bracket else who
    text = body.decode("utf-8", "replace").rstrip()
    text = text if text[:1] in " \t" else text.strip()
    return Line(number, time, rank_text, text, head is not None, quote, 0, outer)


def _without_launcher(body: bytes) -> tuple[bytes, bytes, str | None]:
    """A line without what launchers put before it, what that was, and the process or rank that it names."""
    start, who = 0, None
    for _ in range(4):
        found = _LAUNCHER.match(body, start)
        if found is None:
            break
        start = found.end()
        if found["rank"]:
            who = f"rank{int(found['rank'])}"
        elif found["name"]:
            who = found["name"].decode("utf-8", "replace")
    return body[start:], body[:start], who


def _outer(prefix: bytes) -> str | None:
    """The collector's time stamp in what stands before the message."""
    found = _PLAIN_TIME.search(prefix) if prefix else None
    return _clock(found.group(1)) if found else None


def _clock(raw: bytes) -> str:
    return raw.decode("ascii").replace("T", " ").replace(",", ".")


def seconds_between(start: str | None, end: str | None) -> float | None:
    """Seconds from one time stamp of a log to another; None if one is missing or they have different forms.

    Example: `seconds_between("2026-11-29 13:05:53", "2026-11-29 13:06:36")` is 43.0. vLLM writes no year: over New Year
    the later of two such stamps is taken to be in the next one.
    """
    if not start or not end:
        return None
    a, b = _moment(start), _moment(end)
    if a is None or b is None or a[1] != b[1]:
        return None
    seconds = b[0] - a[0]
    if seconds < 0 and a[1] != "year":
        seconds += 86400 if a[1] == "time" else 365 * 86400
    return round(seconds, 3)


class Stamps(NamedTuple):
    """The two clocks of a line: the server's own and the collector's, which may keep another time zone."""

    time: str | None
    outer: str | None = None

    def seconds_to(self, end: Stamps) -> float | None:
        """Seconds to another line's stamps by one clock: the collector's where both have it, else the server's own.

        Example: `Stamps("2026-11-29 14:00:00", "2026-11-29 13:00:00").seconds_to(Stamps("2026-11-29 13:01:00",
        "2026-11-29 13:01:00"))` is 60.0 (the second line has the collector's stamp only).
        """
        if self.outer and end.outer:
            return seconds_between(self.outer, end.outer)
        if any(one.outer and one.outer == one.time for one in (self, end)):
            return None  # one line has only the collector's clock, the other only the server's
        return seconds_between(self.time, end.time)


def stamps_of(line: Line) -> Stamps:
    """Both time stamps of a line."""
    return Stamps(line.time, line.outer)


_MOMENT = re.compile(r"(?:(?:(\d{4})-)?(\d\d)-(\d\d) )?(\d\d):(\d\d):(\d\d(?:\.\d{1,9})?)")


def _moment(text: str) -> tuple[float, str] | None:
    """Seconds of a time stamp and its form (year, date or time); None if it is not one."""
    match = _MOMENT.fullmatch(text)
    if not match:
        return None
    form = "year" if match.group(1) else "date" if match.group(2) else "time"
    year, month, day = (
        int(part) if part else default for part, default in zip(match.groups()[:3], (2001, 1, 1), strict=True)
    )
    try:
        whole = calendar.timegm((year, month, day, int(match.group(4)), int(match.group(5)), 0))
    except ValueError:
        return None
    return whole + float(match.group(6)), form


def lines_of(read: Callable[[int], bytes], block_bytes: int = 1 << 20) -> Iterator[bytes]:
    """Physical lines from a `read(n)` function, in bounded memory.

    One item for one physical line, so that counting items gives line numbers; a line above MAX_LINE_BYTES is cut
    and its
    rest is skipped, so that even a file of 10 GB without a newline needs two blocks of memory.
    """
    rest = b""
    cut = False
    while True:
        block = read(block_bytes)
        if not block:
            break
        pieces = block.split(b"\n")
        if len(pieces) == 1:
            if not cut and len(rest) < MAX_LINE_BYTES:
                rest += block[: MAX_LINE_BYTES - len(rest)]
                cut = len(rest) >= MAX_LINE_BYTES
            continue
        first = rest if cut else rest + pieces[0]
        yield first[:MAX_LINE_BYTES]
        last = pieces.pop()
        yield from pieces[1:]
        rest, cut = last, False
    if rest:
        yield rest[:MAX_LINE_BYTES]
