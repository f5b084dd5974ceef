"""What each number of a load level means: one row a metric, computed from the raw record alone.

A level's record (lib.load.client) holds times, sizes, and the server's own counts. Everything a reader sees is derived
here, from the table `METRICS`; docs/metrics.md is that table in prose. Undefined is a reason, never 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lib.errors import BadInput, UnreadableFile
from lib.load import stats
from lib.load.stats import Interval
from lib.records import Measured

Array = NDArray[np.float64]

#: Past these the client, not the server, shaped the times: no latency is given (`client_bound`).
CPU_FRAC_LIMIT = 0.90
LAG_P50_FLOOR_S, LAG_P50_OF_GAP = 0.002, 0.05
LAG_P99_FLOOR_S, LAG_P99_OF_GAP = 0.020, 1.00
#: A calibration holds up to this much more load than it was made with.
CALIBRATION_HEADROOM = 1.10


@dataclass(frozen=True, eq=False)
class Level:
    """One level's raw record: its header, its requests, and where it was read from. Nobody changes it after reading."""

    header: dict[str, Any]
    requests: list[dict[str, Any]]
    path: str = ""

    @cached_property
    def view(self) -> LevelView:
        """What several metrics need, computed once."""
        return LevelView(self)

    @cached_property
    def summary(self) -> dict[str, Measured]:
        """`level_summary`, computed once."""
        return _summary(self)


def level_from_lines(lines: Iterable[dict[str, Any]], path: str = "") -> Level:
    """A level from the decoded lines of its record.

    Raises:
        UnreadableFile: no header, another schema, or requests that do not add up to what the header says.
    """
    header: dict[str, Any] | None = None
    requests = []
    for line in lines:
        kind = line.get("kind") if isinstance(line, dict) else None
        if kind == "level" and header is None:
            header = line
        elif kind == "request" and header is not None:
            requests.append(line)
        else:
            raise UnreadableFile("a level's record: one header, then requests", f"{kind!r} in {path}")
    if header is None:
        raise UnreadableFile("a level's record with a header line", f"none in {path}")
    if header.get("schema") != 1:
        raise UnreadableFile("a level's record of schema 1", f"schema {header.get('schema')!r} in {path}")
    if header["sent"] != len(requests) or len({r["i"] for r in requests}) != len(requests):
        raise UnreadableFile(f"{header['sent']} requests in {path}", f"{len(requests)}", "the file was cut or edited")
    return Level(header, requests, path)


def is_ok(record: dict[str, Any]) -> bool:
    """A request counts as ok if nothing failed; the client has already named every failure."""
    return record["failure"] is None


def token_times_us(record: dict[str, Any]) -> list[int]:
    """Times of the events that carried tokens, in microseconds after sending."""
    times: list[int] = record["t_us"]
    kinds: str = record["kinds"]
    if len(times) != len(kinds):
        raise UnreadableFile("a kind for every event", f"{len(kinds)} kinds of {len(times)} events")
    heads = kinds.rstrip("n")
    if "n" not in heads:
        return times[: len(heads)]
    return [t for t, k in zip(times, kinds, strict=True) if k != "n"]


def token_counts(record: dict[str, Any]) -> list[int] | None:
    """Tokens of each token event, None where neither the server nor arithmetic says it.

    With counts from the server: exact. Without: one token an event if the events are as many as the tokens, or one
    fewer (a closing token that has no text).
    """
    tokens = record["tokens"]
    if tokens is not None:
        counts, held = [], 0
        for count, kind in zip(tokens, record["kinds"], strict=True):
            if kind == "n":
                held += count
            else:
                counts.append(count + held)
                held = 0
        if counts:
            counts[-1] += held
        return counts
    events = len(record["kinds"]) - record["kinds"].count("n")
    total = (record["usage"] or {}).get("completion_tokens")
    return [1] * events if total is not None and events and 0 <= total - events <= 1 else None


def request_times(record: dict[str, Any]) -> dict[str, float | None]:
    """One ok request in seconds: ttft_s and e2e_s from its due time, send_lag_s, decode_s, and its token counts."""
    late = (record["sent_ns"] - record["due_ns"]) / 1e9
    times = token_times_us(record)
    counts = token_counts(record)
    total = (record["usage"] or {}).get("completion_tokens")
    first = counts[0] if counts else 1
    decode = (times[-1] - times[0]) / 1e6 if len(times) > 1 else None
    at = record["kinds"].find("c")
    content = record["t_us"][at] if at >= 0 else None
    rest = total - first if total is not None else None
    return {
        "send_lag_s": late,
        "ttft_s": late + times[0] / 1e6 if times else None,
        "ttft_from_send_s": times[0] / 1e6 if times else None,
        "first_content_s": late + content / 1e6 if content is not None else None,
        "e2e_s": (record["end_ns"] - record["due_ns"]) / 1e9,
        "decode_s": decode,
        "output_tokens": total,
        "decode_tokens": rest,
        "token_latency_s": decode / rest if decode is not None and rest else None,
        "chunk_gap_s": decode / (len(times) - 1) if decode is not None else None,
    }


class LevelView:
    """A level with what several metrics need, computed once."""

    def __init__(self, level: Level) -> None:
        self.level = level
        self.header = level.header
        self.ok = [r for r in level.requests if is_ok(r)]
        self.times = [request_times(r) for r in self.ok]
        self._pooled: tuple[Array, list[Interval]] | None = None

    def column(self, name: str) -> Array:
        return np.array([t[name] for t in self.times if t[name] is not None], dtype=np.float64)

    @cached_property
    def start_ns(self) -> int:
        return min((r["due_ns"] for r in self.level.requests), default=0)

    @cached_property
    def wall_s(self) -> float | None:
        """From the first due time to the end of the last request, ok or failed; interrupted ones do not end it."""
        ends = [r["end_ns"] for r in self.level.requests if r["failure"] != "interrupted"]
        return (max(ends) - self.start_ns) / 1e9 if ends and max(ends) > self.start_ns else None

    @cached_property
    def output_tokens(self) -> int:
        return int(sum(t["output_tokens"] or 0 for t in self.times))

    @cached_property
    def events(self) -> tuple[Array, NDArray[np.int64]]:
        """Times of all token events in microseconds after their request was sent, and how many each request has."""
        parts = [token_times_us(r) for r in self.ok]
        sizes = np.array([len(p) for p in parts], dtype=np.int64)
        return np.fromiter(chain.from_iterable(parts), dtype=np.float64, count=int(sizes.sum())), sizes

    @cached_property
    def counts(self) -> list[list[int] | None]:
        """Tokens of each token event, by request; None where nothing says it."""
        return [token_counts(r) for r in self.ok]

    def _between(self) -> NDArray[np.bool_]:
        """Of each event but the first of all: whether the one before it belongs to the same request."""
        sizes = self.events[1]
        inside = np.ones(max(int(sizes.sum()) - 1, 0), dtype=np.bool_)
        first = np.cumsum(sizes)[:-1] - 1
        inside[first[(first >= 0) & (first < inside.size)]] = False
        return inside

    @cached_property
    def gaps(self) -> tuple[Array, NDArray[np.int64]]:
        """All gaps between consecutive token events (seconds), and the request each belongs to."""
        times, sizes = self.events
        owners = np.repeat(np.arange(sizes.size), np.maximum(sizes - 1, 0))
        return np.diff(times)[self._between()] / 1e6, owners

    @cached_property
    def token_latencies(self) -> tuple[Array, NDArray[np.int64]] | str:
        """Gap over tokens of its event, once for each token; or the reason why it cannot be said."""
        if any(c is None for c in self.counts):
            return (
                "the server's events carry no token counts and are fewer than the tokens: "
                "use /generate, or ask for continuous usage"
            )
        if all(r["tokens"] is None for r in self.ok):
            return self.gaps  # one token an event
        gaps, owners = self.gaps
        share = np.array([n for c in self.counts if c for n in c[1:]], dtype=np.int64)
        return np.repeat(gaps / np.maximum(share, 1), share), np.repeat(owners, share)

    def pooled(self, values: Array, owners: NDArray[np.int64], percentiles: list[float | None]) -> list[Interval]:
        """`stats.pooled_intervals`; gaps and token latencies are often the same array, resampled once."""
        if self._pooled is None or self._pooled[0] is not values:
            self._pooled = values, stats.pooled_intervals(values, owners, percentiles)
        return self._pooled[1]

    @cached_property
    def steady(self) -> tuple[int, int] | str:
        """The steady-state window in monotonic nanoseconds, or why there is none.

        Closed loop: from when every slot's first request has its first token, to the first end of a request after the
        last one was sent. Open loop: from the first end to the last arrival.
        """
        records = sorted(self.level.requests, key=lambda r: (r["sent_ns"], r["i"]))
        if not self.ok:
            return "no request succeeded"
        load = self.header["load"]
        if load["mode"] == "closed":
            slots = _first_of_slots(records, load["concurrency"])
            firsts = [r["sent_ns"] + token_times_us(r)[0] * 1000 for r in slots if is_ok(r)]
            if not firsts:
                return "no slot's first request succeeded"
            start, last_sent = max(firsts), records[-1]["sent_ns"]
            end = min((r["end_ns"] for r in records if r["end_ns"] > last_sent), default=0)
        else:
            ramp_ns = int((load.get("ramp_s") or 0.0) * 1e9)
            start, end = max(min(r["end_ns"] for r in records), self.start_ns + ramp_ns), records[-1]["due_ns"]
        if end <= start:
            return "ramp and drain overlap: too few requests for this load (send more than 2 a slot)"
        return start, end

    @cached_property
    def steady_tokens(self) -> Array:
        """Tokens of each ok request that arrived inside the steady-state window."""
        if isinstance(self.steady, str):
            return np.empty(0)
        start, end = self.steady
        times, sizes = self.events
        owners = np.repeat(np.arange(sizes.size), sizes)
        sent = np.array([r["sent_ns"] for r in self.ok], dtype=np.float64)
        moments = times * 1e3 + sent[owners]
        inside = ((moments > start) & (moments <= end)).astype(np.float64)
        # Events without counts: each stands for an equal part of the request's tokens.
        weights = [
            c if c is not None else [r["usage"]["completion_tokens"] / max(n, 1)] * n
            for c, r, n in zip(self.counts, self.ok, sizes.tolist(), strict=True)
        ]
        each = np.fromiter(chain.from_iterable(weights), dtype=np.float64, count=times.size)
        made: Array = np.bincount(owners, weights=inside * each, minlength=sizes.size).astype(np.float64)
        return made

    @cached_property
    def in_flight_mean(self) -> float | None:
        if self.wall_s is None:
            return None
        busy = sum(r["end_ns"] - r["sent_ns"] for r in self.level.requests if r["failure"] != "interrupted")
        return float(busy / 1e9 / self.wall_s)


def _first_of_slots(records: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Each slot's first request; during a ramp an early slot sends several before the last one begins."""
    if any("slot" not in r for r in records):
        return records[:count]
    firsts: dict[int, dict[str, Any]] = {}
    for record in records:
        firsts.setdefault(record["slot"], record)
    return list(firsts.values())


@dataclass(frozen=True, slots=True)
class Metric:
    """One row: what a number means, when it has no value, where it is taken from, and what other tools call it.

    `shape`: number (one value), requests (one value a request), pooled (all gaps of all requests).
    `latency`: withheld where the client itself was the bottleneck.
    """

    id: str
    unit: str
    definition: str
    undefined: str
    source: str
    elsewhere: str
    shape: str
    compute: Callable[[LevelView], Any]
    latency: bool = False

    def names(self) -> list[str]:
        """The names in a summary: the id, or the id with each statistic."""
        return [self.id] if self.shape == "number" else [f"{self.id}_{s}" for s in STATISTICS]


STATISTICS = ("mean", "p50", "p90", "p99")


def _number(value: float | int | None, reason: str, n: int | None = None) -> Interval:
    return Interval(value=None if value is None else float(value), n=n or 0, reason=reason if value is None else None)


def _aggregate(view: LevelView) -> Interval:
    if not view.ok or view.wall_s is None:
        return Interval(value=None, reason="no request succeeded")
    value = view.output_tokens / view.wall_s
    rate = stats.bootstrap_ratio(view.column("output_tokens"), view.column("e2e_s"))
    if rate.low is None or rate.high is None or not rate.value:
        return Interval(value=value, n=len(view.ok), reason=rate.reason)
    scale = value / rate.value
    return Interval(value=value, low=rate.low * scale, high=rate.high * scale, n=len(view.ok))


def _steady(view: LevelView) -> Interval:
    if isinstance(view.steady, str):
        return Interval(value=None, reason=view.steady)
    start, end = view.steady
    tokens, value = view.steady_tokens, float(view.steady_tokens.sum()) / ((end - start) / 1e9)
    # How long each request was busy inside the window: one that took longer for its tokens must widen the interval.
    busy = np.array([max(0, min(r["end_ns"], end) - max(r["sent_ns"], start)) / 1e9 for r in view.ok])
    inside = busy > 0
    rate = stats.bootstrap_ratio(tokens[inside], busy[inside])
    if rate.low is None or rate.high is None or not rate.value:
        return Interval(value=value, n=rate.n, reason=rate.reason or "no token inside the window")
    scale = value / rate.value
    return Interval(value=value, low=rate.low * scale, high=rate.high * scale, n=rate.n)


def _steady_window(view: LevelView) -> Interval:
    if isinstance(view.steady, str):
        return Interval(value=None, reason=view.steady)
    return Interval(value=(view.steady[1] - view.steady[0]) / 1e9, n=1)


def _request_rate(view: LevelView) -> Array:
    return np.array([t["output_tokens"] / t["e2e_s"] for t in view.times if t["output_tokens"] and t["e2e_s"]])


def _decode_rate(view: LevelView) -> Array:
    return np.array([1 / t["token_latency_s"] for t in view.times if t["token_latency_s"]])


def _accept_length(view: LevelView) -> Interval:
    rows = [
        (r["usage"]["completion_tokens"], r["meta"]["spec_verify_ct"])
        for r in view.ok
        if r["meta"] and r["meta"].get("spec_verify_ct") is not None
    ]
    if not rows:
        return Interval(value=None, reason="no request reports verify steps (no speculation, or not /generate)")
    return stats.bootstrap_ratio([t for t, _ in rows], [v for _, v in rows])


def _tokens_per_chunk(view: LevelView) -> Interval:
    if not view.ok:
        return Interval(value=None, reason="no request succeeded")
    return stats.bootstrap_ratio(view.column("output_tokens"), view.events[1].astype(np.float64))


def cached_tokens(record: dict[str, Any]) -> int | None:
    """Prompt tokens that the server took from its cache, None where it does not say."""
    if record["meta"] and record["meta"].get("cached_tokens") is not None:
        return int(record["meta"]["cached_tokens"])
    details = (record["usage"] or {}).get("prompt_tokens_details")
    value = details.get("cached_tokens") if isinstance(details, dict) else None
    return int(value) if value is not None else None


def _cached(view: LevelView) -> Interval:
    known = [c for c in map(cached_tokens, view.ok) if c is not None]
    return _number(sum(known) if known else None, "the server does not report cached tokens", len(known))


def _prompt_tokens(record: dict[str, Any]) -> int | None:
    value = (record["usage"] or {}).get("prompt_tokens")
    return value if isinstance(value, int) else None


def _cached_frac(view: LevelView) -> Interval:
    pairs = [(cached_tokens(r), _prompt_tokens(r)) for r in view.ok]
    known = [(c, p) for c, p in pairs if c is not None and p]
    if not known:
        return Interval(value=None, reason="the server does not report cached tokens")
    return stats.bootstrap_ratio([c for c, _ in known], [p for _, p in known])


def reusable_tokens(level: Level) -> dict[int, int]:
    """By request index: how many tokens of a session's later turn were in the turn before it, prompt and answer."""
    made = {}
    before: dict[tuple[int, int], dict[str, Any]] = {
        (r["session"], r["turn"]): r for r in level.requests if r.get("session") is not None and is_ok(r)
    }
    for (session, turn), record in before.items():
        last = before.get((session, turn - 1))
        if last is not None and _prompt_tokens(last) is not None:
            made[record["i"]] = _prompt_tokens(last) + last["usage"]["completion_tokens"]
    return made


def _prefix_reuse(view: LevelView) -> Interval:
    reusable = reusable_tokens(view.level)
    if not reusable:
        return Interval(value=None, reason="no session has two turns that succeeded")
    pairs = [(cached_tokens(r), reusable[r["i"]]) for r in view.ok if r["i"] in reusable]
    known = [(c, n) for c, n in pairs if c is not None]
    if not known:
        return Interval(value=None, reason="the server does not report cached tokens")
    return stats.bootstrap_ratio([c for c, _ in known], [n for _, n in known])


def _usage_below_events(view: LevelView) -> Interval:
    told = [(r["usage"] or {}).get("completion_tokens", 0) for r in view.ok]
    liars = sum(n < events for n, events in zip(told, view.events[1].tolist(), strict=True))
    return _number(liars if view.ok else None, "no request succeeded", len(view.ok))


def _sum_usage(view: LevelView, field: str) -> Interval:
    known = [r["usage"][field] for r in view.ok if (r["usage"] or {}).get(field) is not None]
    return _number(sum(known) if known else None, "no request succeeded", len(known))


def _server_e2e(view: LevelView) -> Array:
    return np.array([r["meta"]["e2e_latency"] for r in view.ok if r["meta"] and "e2e_latency" in r["meta"]])


def _outside_server(view: LevelView) -> Array:
    return np.array([
        (r["end_ns"] - r["sent_ns"]) / 1e9 - r["meta"]["e2e_latency"]
        for r in view.ok
        if r["meta"] and "e2e_latency" in r["meta"]
    ])


def _workers(view: LevelView) -> list[dict[str, Any]]:
    return list(view.header["client"]["workers"])


def _worst(view: LevelView, pick: Callable[[dict[str, Any]], float | None]) -> Interval:
    values = [v for v in map(pick, _workers(view)) if v is not None]
    return _number(max(values) if values else None, "the client did not report it", len(values))


def _bundled(view: LevelView) -> Interval:
    events = int(view.events[1].sum())
    return _number(sum(r["bundled"] for r in view.ok) / events if events else None, "no token events", events)


def _counted(view: LevelView, choose: Callable[[dict[str, Any]], bool]) -> Interval:
    return _number(sum(map(choose, view.level.requests)), "", len(view.level.requests))


def _achieved(view: LevelView) -> Interval:
    if view.header["load"]["mode"] == "closed":
        return Interval(value=None, reason="closed loop: no rate was offered")
    sent = sorted(r["sent_ns"] for r in view.level.requests)
    if len(sent) < 2 or sent[-1] == sent[0]:
        return Interval(value=None, reason="fewer than two requests were sent")
    due = sorted(r["due_ns"] for r in view.level.requests)
    return _number((due[-1] - due[0]) / (sent[-1] - sent[0]), "", len(sent))


#: The table. docs/metrics.md is generated from it; a new metric is a new row.
METRICS: tuple[Metric, ...] = (
    Metric(
        "requests_ok", "requests", "Requests that ended with a finish_reason, a token count and at least one token.",
        "never", "record `failure`", "bench_serving `completed`", "number", lambda v: _counted(v, is_ok),
    ),
    Metric(
        "requests_failed", "requests",
        "Requests that ended in any other way; `failures(level)` counts them by cause. Sent = ok + failed.",
        "never", "record `failure`", "bench_serving counts them with 0 tokens", "number",
        lambda v: _counted(v, lambda r: not is_ok(r)),
    ),
    Metric(
        "wall_s", "s", "From the first due time to the end of the last request, ok or failed.",
        "nothing was sent", "`due_ns`, `end_ns`",
        "bench_serving `duration` ends later, after its request for /server_info", "number",
        lambda v: _number(v.wall_s, "nothing was sent", len(v.level.requests)),
    ),
    Metric(
        "output_tokens", "tokens", "Output tokens of ok requests, as the server counts them.",
        "no request succeeded", "usage / meta_info `completion_tokens`",
        "bench_serving `total_output_tokens` on /generate; on OpenAI endpoints, which it does not ask for usage, that is "
        "the length asked for; `_retokenized` counts the text's tokens anew", "number",
        lambda v: _sum_usage(v, "completion_tokens"),
    ),
    Metric(
        "usage_below_events", "requests",
        "Ok requests whose server counts fewer tokens than it sent events with text: its count cannot be right.",
        "no request succeeded", "usage, `kinds`", "none reports it", "number", _usage_below_events,
    ),
    Metric(
        "input_tokens", "tokens", "Prompt tokens of ok requests, as the server counts them.",
        "no request succeeded", "usage / meta_info `prompt_tokens`", "bench_serving counts with the client's tokenizer",
        "number", lambda v: _sum_usage(v, "prompt_tokens"),
    ),
    Metric(
        "cached_tokens", "tokens", "Prompt tokens that the server took from its prefix cache.",
        "the server does not say (OpenAI endpoints need --enable-cache-report)",
        "meta_info `cached_tokens`, usage `prompt_tokens_details`", "aiperf, bench_serving with cache report",
        "number", _cached,
    ),
    Metric(
        "cached_frac", "1", "Cached over prompt tokens, both summed over ok requests.",
        "the server does not say", "as cached_tokens", "InferenceX, aiperf 'cache hit rate'", "number", _cached_frac,
    ),
    Metric(
        "prefix_reuse_frac", "1",
        "Sessions: cached tokens of the later turns over the tokens of the turn before each (prompt and answer), which "
        "all begin the new prompt. Near 1: the prefix cache gave all that it could; 0: every turn was computed anew.",
        "no session with two turns, or the server does not say", "as cached_tokens, record `session`, `turn`",
        "none by this name", "number", _prefix_reuse,
    ),
    Metric(
        "output_tokens_per_s", "tok/s",
        "Output tokens of ok requests over wall_s: the whole run, ramp and drain included. Its interval resamples "
        "requests at the mean number in flight.",
        "no request succeeded", "derived", "bench_serving `output_throughput`; the origin's 'aggregate tok/s'",
        "number", _aggregate,
    ),
    Metric(
        "steady_output_tokens_per_s", "tok/s",
        "Output tokens that arrived inside the steady-state window over its length. Closed loop: from when each "
        "slot's first request has its first token, to the first end after the last send. Open loop: from the first "
        "end to the last arrival. Its interval resamples requests with the time they were busy inside the window.",
        "ramp and drain overlap (about 2 requests a slot or fewer)", "derived",
        "bench_serving `steady_state_serving` cuts by a concurrency ratio", "number", _steady,
    ),
    Metric(
        "steady_window_s", "s", "Length of the steady-state window.", "as steady_output_tokens_per_s", "derived", "",
        "number", _steady_window,
    ),
    Metric(
        "request_output_tokens_per_s", "tok/s", "Output tokens over e2e_s, one value a request.",
        "no request succeeded", "derived", "the origin's 'per-request tok/s' is its mean", "requests", _request_rate,
    ),
    Metric(
        "decode_tokens_per_s", "tok/s", "1 / token_latency_s of a request: the rate after the first token.",
        "requests with one token event", "derived", "InferenceX 'interactivity' is its median, guidellm 1/ITL",
        "requests", _decode_rate, True,
    ),
    Metric(
        "ttft_s", "s",
        "From the moment the request was due to the first event that carries a token, content or reasoning; waiting "
        "in the client is inside.",
        "no request succeeded", "`due_ns`, `t_us`, `kinds`",
        "bench_serving, vllm bench: from sending (`ttft_from_send_s`), first chunk with text; club-3090 #1096: "
        "first content only (`first_content_s`)",
        "requests", lambda v: v.column("ttft_s"), True,
    ),
    Metric(
        "ttft_from_send_s", "s", "The same from the moment of sending.", "no request succeeded", "`t_us`, `kinds`",
        "bench_serving and vllm bench `ttft`", "requests", lambda v: v.column("ttft_from_send_s"), True,
    ),
    Metric(
        "first_content_s", "s", "From due to the first content (not reasoning) token.",
        "no request has content, only reasoning", "`kinds`", "tools that skip reasoning call this TTFT",
        "requests", lambda v: v.column("first_content_s"), True,
    ),
    Metric(
        "e2e_s", "s", "From due to the last byte of the answer.", "no request succeeded", "`due_ns`, `end_ns`",
        "bench_serving `e2e_latency` starts at sending", "requests", lambda v: v.column("e2e_s"), True,
    ),
    Metric(
        "send_lag_s", "s", "From due to sending: what the client (and an open loop's connecting) added.",
        "no request succeeded", "`due_ns`, `sent_ns`", "hidden in most tools (vllm #54101)", "requests",
        lambda v: v.column("send_lag_s"),
    ),
    Metric(
        "chunk_gap_s", "s", "Gaps between consecutive token events, pooled over all requests: what a reader sees.",
        "no request has two token events", "`t_us`, `kinds`",
        "vllm bench, evalscope, bench_serving (OpenAI endpoints, unless the server reports an accept length: then over the "
        "tokens of each chunk's text) call it ITL; aiperf `inter_chunk_latency`",
        "pooled", lambda v: v.gaps, True,
    ),
    Metric(
        "chunk_gap_request_mean_s", "s",
        "Mean chunk gap of a request, one value a request: its percentiles hide stalls.",
        "no request has two token events", "derived", "none by this name", "requests",
        lambda v: v.column("chunk_gap_s"), True,
    ),
    Metric(
        "token_latency_s", "s",
        "Chunk gap over the tokens that the chunk carries, once for each token, pooled. Equals chunk_gap_s when each "
        "chunk has one token; under speculation it is smaller.",
        "the events carry no token counts and are fewer than the tokens",
        "`t_us`, `tokens`", "bench_serving `/generate` ITL", "pooled", lambda v: v.token_latencies, True,
    ),
    Metric(
        "token_latency_request_mean_s", "s",
        "(last token event - first) / (tokens after the first event), one value a request.",
        "no request has two token events", "derived",
        "bench_serving TPOT: (last line of the stream - first text) / (tokens - 1), so smaller than this where the first "
        "event has more than one token, larger by the time of the closing lines; vllm bench TPOT and genai-bench, "
        "guidellm ITL alike; aiperf `inter_token_latency` subtracts the first chunk's tokens where the server tells them",
        "requests", lambda v: v.column("token_latency_s"), True,
    ),
    Metric(
        "tokens_per_chunk", "tokens", "Output tokens over token events.", "no request succeeded", "derived", "",
        "number", _tokens_per_chunk,
    ),
    Metric(
        "accept_length", "tokens",
        "Output tokens over verify steps, both summed over this level's requests: speculation's tokens a step.",
        "no request reports verify steps", "meta_info `spec_verify_ct`",
        "bench_serving `accept_length` is a server average since its start or last flush", "number", _accept_length,
    ),
    Metric(
        "in_flight_mean", "requests", "Sum of the times between sending and end over wall_s.",
        "nothing was sent", "derived", "bench_serving `concurrency`", "number",
        lambda v: _number(v.in_flight_mean, "nothing was sent", len(v.level.requests)),
    ),
    Metric(
        "requests_per_s", "1/s", "Ok requests over wall_s.", "nothing was sent", "derived",
        "bench_serving `request_throughput`", "number",
        lambda v: _number(len(v.ok) / v.wall_s if v.wall_s else None, "nothing was sent", len(v.ok)),
    ),
    Metric(
        "achieved_of_offered", "1",
        "Open loop: time in which all requests were due over the time in which they were sent.",
        "closed loop, or fewer than two requests", "`due_ns`, `sent_ns`", "evalscope #1366", "number", _achieved,
    ),
    Metric(
        "server_e2e_s", "s", "The server's own end-to-end time of a request.", "the server does not report it",
        "meta_info `e2e_latency`", "", "requests", _server_e2e,
    ),
    Metric(
        "outside_server_s", "s", "End-to-end time from sending, minus the server's own: network, HTTP, both queues.",
        "the server does not report its own", "derived", "", "requests", _outside_server, True,
    ),
    Metric(
        "client_lag_p50_s", "s", "How late a 10 ms timer in the sending process fired (resolution 1 ms); worst worker.",
        "no timer fired", "header", "none reports it", "number",
        lambda v: _worst(v, lambda w: w["lag_ns"] and w["lag_ns"]["p50"] / 1e9),
    ),
    Metric(
        "client_lag_p99_s", "s", "The same, 99th percentile.", "no timer fired", "header", "none reports it", "number",
        lambda v: _worst(v, lambda w: w["lag_ns"] and w["lag_ns"]["p99"] / 1e9),
    ),
    Metric(
        "client_cpu_frac", "1", "CPU time of the sending process in the window over its length; worst worker.",
        "nothing was sent", "header", "Locust warns over 0.9", "number", lambda v: _worst(v, lambda w: w["cpu_frac"]),
    ),
    Metric(
        "client_rss_bytes", "B", "Peak memory of the sending process; worst worker.", "nothing was sent", "header", "",
        "number", lambda v: _worst(v, lambda w: w["peak_rss_bytes"]),
    ),
    Metric(
        "client_unread_bytes", "B", "Bytes waiting in the kernel for up to 8 sockets in flight, sampled; worst mean.",
        "no sample fell into the window", "header", "none reports it", "number",
        lambda v: _worst(v, lambda w: w["unread_bytes"] and w["unread_bytes"]["mean"]),
    ),
    Metric(
        "client_bundled_frac", "1",
        "Token events that came in one read with the one before: the server, the network or a late client joined them.",
        "no token events", "record `bundled`", "none reports it", "number", _bundled,
    ),
)  # fmt: skip


def failures(level: Level) -> dict[str, int]:
    """Failed requests by cause. Conservation: sent = ok + their sum; planned = sent + never sent."""
    return dict(sorted(Counter(r["failure"] for r in level.requests if r["failure"] is not None).items()))


@dataclass(frozen=True, slots=True)
class ClientVerdict:
    """ok, client_bound (its latencies are withheld) or not_calibrated (no latency verdict), with the reasons."""

    status: str
    reasons: tuple[str, ...]


def client_verdict(level: Level) -> ClientVerdict:
    """Whether the client itself kept up, from its own lag and CPU, and whether a calibration covers this load."""
    view = level.view
    reasons = []
    gaps = view.gaps[0]
    gap = float(np.median(gaps)) if gaps.size else 0.0
    for name, floor, share in (("p50", LAG_P50_FLOOR_S, LAG_P50_OF_GAP), ("p99", LAG_P99_FLOOR_S, LAG_P99_OF_GAP)):
        limit = max(floor, share * gap)
        lag = _worst(view, lambda w, n=name: w["lag_ns"] and w["lag_ns"][n] / 1e9).value  # type: ignore[misc]
        if lag is not None and lag > limit:
            reasons.append(f"client lag {name} {lag * 1e3:.1f} ms, limit {limit * 1e3:.1f} ms")
    cpu = _worst(view, lambda w: w["cpu_frac"]).value
    if cpu is not None and cpu > CPU_FRAC_LIMIT and (view.wall_s or 0) > 0.5:
        reasons.append(f"client CPU share {cpu:.2f}, limit {CPU_FRAC_LIMIT:.2f}")
    if reasons:
        return ClientVerdict("client_bound", tuple(reasons))
    calibration = level.header.get("calibration")
    if not calibration:
        return ClientVerdict("not_calibrated", ("no calibration was made",))
    if calibration["status"] != "ok":
        return ClientVerdict("not_calibrated", tuple(calibration["reasons"]))
    load = level.header["load"]
    streams = load["concurrency"] or max((w["in_flight_max"] for w in _workers(view)), default=0)
    if streams > calibration["streams"] * CALIBRATION_HEADROOM:
        reasons.append(f"{streams} streams, calibrated with {calibration['streams']}")
    events = sum(len(r["t_us"]) for r in level.requests)
    rate = events / view.wall_s if view.wall_s else 0.0
    if rate > calibration["chunks_per_s"] * CALIBRATION_HEADROOM:
        reasons.append(f"{rate:.0f} chunks/s, calibrated with {calibration['chunks_per_s']:.0f}")
    used, proved = load["workers"], calibration["workers"]
    if used > proved:
        reasons.append(f"{used} workers, calibrated with {proved}")
    elif used < proved:
        # A level of fewer streams than workers uses fewer: what each of them carries must have been calibrated.
        for what, here, there in (("streams", streams, calibration["streams"]), ("chunks/s", rate, calibration["chunks_per_s"])):
            if here / used > there / proved * CALIBRATION_HEADROOM:
                each = f"{here / used:.0f} {what} each, calibrated with {proved} and {there / proved:.0f}"
                reasons.append(f"{used} workers with {each}")
    return ClientVerdict("not_calibrated", tuple(reasons)) if reasons else ClientVerdict("ok", ())


def _measured(interval: Interval, unit: str) -> Measured:
    value = interval.value
    whole = unit in ("tokens", "requests", "B") and value is not None and float(value).is_integer()
    return Measured(
        value=int(value) if whole and value is not None else value,
        unit=unit, n=interval.n, low=interval.low, high=interval.high,
        reason=interval.reason or (None if interval.low is not None else "one figure a level: repeat for an interval"),
    )  # fmt: skip


def level_summary(level: Level) -> dict[str, Measured]:
    """Every metric of the table for one level, plus `client` (ok, client_bound or not_calibrated, with the reason).

    Keys: a metric's id, with `_mean`, `_p50`, `_p90`, `_p99` where it has one value a request or a gap.
    """
    if not isinstance(level, Level):
        raise BadInput(
            "a Level",
            type(level).__name__,
            "read it with lib.load.client.read_level(path), or call lib.load.client.level_summary(path)",
        )
    return dict(level.summary)


def _summary(level: Level) -> dict[str, Measured]:
    view = level.view
    verdict = client_verdict(level)
    summary = {
        "client": Measured(value=verdict.status, n=len(level.requests), reason="; ".join(verdict.reasons) or None)
    }
    for metric in METRICS:
        if metric.latency and verdict.status == "client_bound":
            reason = "client_bound: " + "; ".join(verdict.reasons)
            summary |= {key: Measured(value=None, unit=metric.unit, reason=reason) for key in metric.names()}
            continue
        made = metric.compute(view)
        if metric.shape == "number":
            summary[metric.id] = _measured(made, metric.unit)
        elif isinstance(made, str):
            summary |= {key: Measured(value=None, unit=metric.unit, reason=made) for key in metric.names()}
        else:
            summary |= _statistics(metric, made, view)
    return summary


def _statistics(metric: Metric, made: Any, view: LevelView) -> dict[str, Measured]:
    values = made[0] if metric.shape == "pooled" else made
    if not values.size:
        return {key: Measured(value=None, unit=metric.unit, n=0, reason=metric.undefined) for key in metric.names()}
    percentiles = [None if name == "mean" else float(name[1:]) for name in STATISTICS]
    if metric.shape == "pooled":
        intervals = view.pooled(values, made[1], percentiles)
    else:
        intervals = [
            stats.bootstrap_mean(values) if q is None else stats.bootstrap_percentile(values, q) for q in percentiles
        ]
    results = {}
    for name, q, interval in zip(STATISTICS, percentiles, intervals, strict=True):
        figure = _measured(interval, metric.unit)
        if q is not None and q > 50 and values.size * (100 - q) < 100:
            note = f"of {values.size} values: close to their maximum"
            figure = figure.model_copy(update={"reason": "; ".join(x for x in (note, figure.reason) if x)})
        results[f"{metric.id}_{name}"] = figure
    return results


def origin_row(level: Level) -> dict[str, Measured]:
    """The origin's table row: C, aggregate tok/s, per-request tok/s, tokens, wall s, ok."""
    view = level.view
    slots = level.header["load"]["concurrency"]
    return {
        "concurrency": Measured(value=slots, unit="requests", reason=None if slots else "open loop"),
        "aggregate_tokens_per_s": _measured(_aggregate(view), "tok/s"),
        "request_tokens_per_s": _measured(stats.bootstrap_mean(_request_rate(view)), "tok/s"),
        "tokens": Measured(value=view.output_tokens, unit="tokens", n=len(view.ok)),
        "wall_s": _measured(_number(view.wall_s, "nothing was sent", len(level.requests)), "s"),
        "ok": Measured(value=len(view.ok), unit="requests", n=len(level.requests)),
    }  # fmt: skip


def turn_rows(level: Level) -> list[dict[str, Any]]:
    """Sessions by turn: how many were sent and ok, prompt and cached tokens, prefix reuse, TTFT and token latency."""
    turns = sorted({r["turn"] for r in level.requests if r.get("turn") is not None})
    reusable = reusable_tokens(level)
    rows = []
    for turn in turns:
        mine = [r for r in level.requests if r.get("turn") == turn]
        view = Level(level.header, mine, level.path).view
        known = [(cached_tokens(r), reusable[r["i"]]) for r in view.ok if r["i"] in reusable]
        pairs = [(c, n) for c, n in known if c is not None]
        reuse = stats.bootstrap_ratio([c for c, _ in pairs], [n for _, n in pairs]) if pairs else None
        why = "the first turn has nothing before it" if turn == 0 else "the server does not report cached tokens"
        prompts = [p for p in map(_prompt_tokens, view.ok) if p is not None]
        spoilt = client_verdict(level).status == "client_bound"
        rows.append({
            "turn": turn,
            "sent": len(mine),
            "ok": len(view.ok),
            "prompt_tokens_mean": _measured(stats.bootstrap_mean([float(p) for p in prompts]), "tokens"),
            "cached_frac": _measured(_cached_frac(view), "1"),
            "prefix_reuse_frac": _measured(reuse, "1") if reuse else Measured(value=None, unit="1", reason=why),
            "ttft_s_p50": _withheld(level) if spoilt else _measured(stats.bootstrap_percentile(view.column("ttft_s"), 50), "s"),
            "token_latency_s_mean": _withheld(level)
            if spoilt
            else _measured(stats.bootstrap_mean(view.column("token_latency_s")), "s"),
        })  # fmt: skip
    return rows


def _withheld(level: Level) -> Measured:
    return Measured(value=None, unit="s", reason="client_bound: " + "; ".join(client_verdict(level).reasons))


def timeline(level: Level, bins: int = 20) -> list[dict[str, Any]]:
    """The window in equal parts: arrivals due, tokens received, requests in flight, and TTFT of those due in it.

    What a ramp is read from: where tokens a second stop following the arrivals, or TTFT begins to grow.
    """
    view = level.view
    if bins < 1:
        raise BadInput("at least one part", str(bins))
    if view.wall_s is None:
        return []
    edges = view.start_ns + np.linspace(0, view.wall_s * 1e9, bins + 1)
    width = view.wall_s / bins
    tokens = np.zeros(bins)
    for record in view.ok:
        times = np.array(token_times_us(record), dtype=np.float64) * 1e3 + record["sent_ns"]
        counts = token_counts(record)
        each = record["usage"]["completion_tokens"] / max(times.size, 1)
        weights = np.array(counts, dtype=np.float64) if counts is not None else np.full(times.size, each)
        tokens += np.histogram(times, edges, weights=weights)[0]
    spoilt = client_verdict(level).status == "client_bound"
    rows = []
    for number in range(bins):
        low, high = edges[number], edges[number + 1]
        inside = lambda at, a=low, b=high, last=number == bins - 1: a <= at < b or (last and at == b)  # noqa: E731
        due = [r for r in level.requests if inside(r["due_ns"])]
        ttft = np.array([t["ttft_s"] for r, t in zip(view.ok, view.times, strict=True) if inside(r["due_ns"]) and t["ttft_s"]])
        busy = sum(max(0.0, min(r["end_ns"], high) - max(r["sent_ns"], low)) for r in level.requests)
        figure = _withheld(level) if spoilt else _measured(stats.bootstrap_percentile(ttft, 50), "s")
        if not ttft.size and not spoilt:
            figure = Measured(value=None, unit="s", n=0, reason="no ok request was due in this part")
        rows.append({
            "from_s": number * width,
            "to_s": (number + 1) * width,
            "due": len(due),
            "due_per_s": len(due) / width,
            "output_tokens_per_s": float(tokens[number]) / width,
            "in_flight_mean": busy / 1e9 / width,
            "ttft_s_p50": figure,
        })  # fmt: skip
    return rows


def decompose(record: dict[str, Any]) -> dict[str, Measured]:
    """One request's tokens/s taken apart, so that two figures for one server explain each other.

    A short smoke test divides few tokens by a time that is mostly time to first token: with TTFT `t`, `n` tokens and
    a decode rate `r`, tokens over end-to-end time is n / (t + (n - 1) / r), which tends to r only for long answers.

    Example: 100 tokens, 0.8 s to the first, 175 tok/s after it: 100 / (0.8 + 99 / 175) = 73 tok/s, decode 175.
    """
    if not is_ok(record):
        reason = f"the request failed: {record['failure']}"
        keys = ("output_tokens", "ttft_s", "decode_s", "decode_tokens_per_s", "tokens_per_s", "ttft_frac")
        return {key: Measured(value=None, reason=reason) for key in keys}
    times = request_times(record)
    total, e2e = times["output_tokens"], times["e2e_s"]
    usage = record["usage"] or {}
    details = usage.get("completion_tokens_details")
    reasoning = usage.get("reasoning_tokens", details.get("reasoning_tokens") if isinstance(details, dict) else None)
    latency = times["token_latency_s"]
    one = "one request"

    def figure(value: float | None, unit: str, reason: str) -> Measured:
        return Measured(value=value, unit=unit, n=1, reason=one if value is not None else reason)

    return {
        "output_tokens": figure(total, "tokens", "no count"),
        "reasoning_tokens": figure(reasoning, "tokens", "the server does not count reasoning tokens apart"),
        "token_events": figure(len(token_times_us(record)), "events", ""),
        "ttft_s": figure(times["ttft_s"], "s", "no token event"),
        "decode_s": figure(times["decode_s"], "s", "one token event: no decode time"),
        "after_last_token_s": figure(
            (record["end_ns"] - record["sent_ns"]) / 1e9 - token_times_us(record)[-1] / 1e6, "s", ""
        ),
        "decode_tokens_per_s": figure(1 / latency if latency else None, "tok/s", "one token event: no decode rate"),
        "tokens_per_s": figure(total / e2e if total is not None and e2e else None, "tok/s", "no end-to-end time"),
        "ttft_frac": figure(times["ttft_s"] / e2e if times["ttft_s"] is not None and e2e else None, "1", "no time"),
    }


def goodput(
    level: Level, *, ttft_s: float | None = None, token_latency_s: float | None = None, e2e_s: float | None = None
) -> dict[str, Measured]:
    """Requests a second that met every given limit, and their share of all that were sent (failed ones miss).

    `token_latency_s` is compared with a request's mean (TPOT), as other tools do.
    """
    limits = {"ttft_s": ttft_s, "token_latency_s": token_latency_s, "e2e_s": e2e_s}
    given = {k: v for k, v in limits.items() if v is not None}
    if not given or any(v <= 0 for v in given.values()):
        raise BadInput("at least one positive limit", str(given))
    view = level.view
    verdict = client_verdict(level)
    if verdict.status == "client_bound":
        none = Measured(value=None, reason="client_bound: " + "; ".join(verdict.reasons))
        return {"goodput_requests_per_s": none, "goodput_frac": none}
    sent = [r for r in level.requests if r["failure"] != "interrupted"]
    if not sent or view.wall_s is None:
        none = Measured(value=None, reason="nothing was sent")
        return {"goodput_requests_per_s": none, "goodput_frac": none}
    met = [is_ok(r) and _meets(request_times(r), given) for r in sent]
    share = stats.share_interval(sum(met), len(met))
    rate = len(sent) / view.wall_s
    scaled = [None if x is None else x * rate for x in (share.value, share.low, share.high)]
    return {
        "goodput_requests_per_s": Measured(
            value=scaled[0], unit="1/s", n=len(sent), low=scaled[1], high=scaled[2], reason=share.reason
        ),
        "goodput_frac": _measured(share, "1"),
    }


def _meets(times: dict[str, float | None], limits: dict[str, float]) -> bool:
    """A request with one token event has no token latency and cannot miss that limit."""
    return all(times[k] is None or times[k] <= limit for k, limit in limits.items())  # type: ignore[operator]


def across_repeats(summaries: Sequence[dict[str, Measured]], key: str) -> Measured:
    """One metric over repeated levels: the mean of the repeats with a bootstrap interval over them."""
    values = [s[key].value for s in summaries if isinstance(s[key].value, (int, float))]
    missing = len(summaries) - len(values)
    unit = summaries[0][key].unit if summaries else ""
    if not values:
        return Measured(value=None, unit=unit, n=0, reason=summaries[0][key].reason if summaries else "no repeats")
    interval = stats.bootstrap_mean([float(v) for v in values if v is not None])
    notes = (f"{missing} repeat(s) without a value" if missing else "", interval.reason or "")
    reason = "; ".join(x for x in notes if x)
    return Measured(
        value=interval.value, unit=unit, n=interval.n, low=interval.low, high=interval.high, reason=reason or None
    )


def metrics_markdown() -> str:
    """docs/metrics.md: the table in prose, the failure names, the client's limits, and other tools' names."""
    from lib.load.client_wire import FAILURES

    lines = [
        "# What the load numbers mean",
        "",
        "Generated from `METRICS` in `lib/load/metrics.py` by `metrics_markdown()`; do not edit.",
        "",
        "Times are CLOCK_MONOTONIC, taken when a read returns; an event's time is that of the read with its last byte.",
        "Token counts are the server's (`usage`, `meta_info`), never the number of chunks. Intervals are 95%, by",
        "bootstrap over requests (repeats where there are any). A percentile in the tail has one from "
        f"{stats.units_for_percentile(90)} requests on (p90)",
        f"or {stats.units_for_percentile(99)} (p99): fewer do not reach beyond it. What cannot be said is a reason,",
        "never 0.",
        "",
        "| metric | unit | what it is | no value when | from | other tools |",
        "|---|---|---|---|---|---|",
    ]
    for m in METRICS:
        name = f"`{m.id}`" + ("" if m.shape == "number" else " (" + ", ".join(STATISTICS) + ")")
        lines.append(f"| {name} | {m.unit} | {m.definition} | {m.undefined} | {m.source} | {m.elsewhere or '-'} |")
    lines += [
        "",
        "*Pooled* metrics take all gaps of all requests together; *request mean* ones take a mean from each request,",
        "and their percentiles over requests. A stall that all users see once moves the first and hides in the second.",
        "",
        "## When the client is the bottleneck",
        "",
        "`client_bound`: the lag of a 10 ms timer is above "
        f"max({LAG_P50_FLOOR_S * 1e3:g} ms, "
        f"{LAG_P50_OF_GAP:.0%} of the median chunk gap) at p50, or above max({LAG_P99_FLOOR_S * 1e3:g} ms, "
        f"{LAG_P99_OF_GAP:.0%} of it) at p99, or the CPU share of a sending process is above {CPU_FRAC_LIMIT:.2f}. "
        "Latencies are then withheld.",
        "",
        f"`not_calibrated`: no calibration against the built-in judge, one that failed, or a load more than "
        f"{CALIBRATION_HEADROOM - 1:.0%} above it. "
        "Latencies are shown, and no verdict is built on them.",
        "",
        "The sending process is one of its own and asks for a higher priority (nice -10, its scheduling group too), so",
        "that a server which takes every core does not delay its timestamps; it goes on without where that is not",
        "allowed. The record's header says which priority it had.",
        "",
        "## How a request can fail",
        "",
        "Sent = ok + failed by cause; a failed request has one cause, and its times do not enter the numbers above.",
        "",
        "| cause | meaning |",
        "|---|---|",
        *[f"| `{name}` | {meaning} |" for name, meaning in FAILURES.items()],
        "",
        "## Workloads",
        "",
        "`random_ids` (uniform, below the vocabulary), `code` (this machine's standard library), `repeating`, `chat`,",
        "`shared_prefix`, `agentic` (sessions whose context grows by tool results), a text file, JSON lines with `prompt`",
        "(text or ids), `messages`, or ShareGPT's `conversations` (its first turn, or all turns as a session), and a",
        "recorded trace. Each has a seed and a SHA-256 of what it sent.",
        "",
        "*Sessions*: a turn is due `think_s` after the end of the turn before; C is how many sessions run at a time, each",
        "sequential. The rest of a session whose turn failed is not sent (`unsent_after_failed_turn` in the header).",
        "",
        "*Replay*: a request is due at its recorded time (scaled), whatever the server does. Mooncake's form (`timestamp`",
        "in ms, `input_length`, `output_length`, `hash_ids`) and this one are read: `at_s`, `output_len`, and one of",
        "`prompt`, `messages`, `input_len`; with `session` and `think_s` a line is a turn.",
        "",
        "## Windows",
        "",
        "*Whole run*: first due time to the last end. *Steady state*, closed loop: from the moment when every slot's first",
        "request has its first token to the first end after the last send; open loop: from the first end (and the end of",
        "the ramp, where there is one) to the last arrival. `steady_window_s` is its length, None says why there is none.",
        "",
        "## Server-side truth",
        "",
        "Where the server exports /metrics, its counters are read when all is ready to send and after the window; their",
        "differences stand beside the client's sums (`lib/load/server_side.py`). They may differ, and each reason that",
        "applies is named: failed requests whose tokens the server counts, other clients, prompt tokens that the server",
        "counts without cached ones, and histograms whose means are the server's own clock without network and queues.",
        "",
        "## Search",
        "",
        "*Highest load that meets an SLO*: a load passes when the interval of its share of good requests (`goodput_frac`)",
        "is at or above the asked share, fails when it is below it, and is undecided across. The answer is a bracket: the",
        "highest load that passed and the lowest above it that did not. *Knee*: the load with the greatest output",
        "tokens/s over mean end-to-end time (Kleinrock's power); the bracket is from the load below the first to the load",
        "above the last whose interval reaches the best one's.",
        "",
    ]
    return "\n".join(lines)
