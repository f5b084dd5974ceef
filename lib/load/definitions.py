"""sglang.bench_serving and this workbook's client on the same requests: both by the same definitions, and what differs.

Each tool means something of its own by TTFT, TPOT, ITL and throughput. `own_figures` and `peer_figures` bring both raw records
to one definition; `compare` then takes out what the server itself did differently in the two windows (its own clock, by
/metrics) and says what is left, and to whose time outside the server it belongs.

Source: sglang 0.5.15.post1 benchmark/serving.py, `async_request_*` and `calculate_metrics`.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

from lib.errors import UnreadableFile
from lib.load import metrics
from lib.load.benchfiles import CLIENT_CHUNKS_PER_S, CLIENT_STREAMS_TOO_MANY
from lib.load.metrics import Level
from lib.records import Record

#: How far two clients may lie apart by the same definition.
AGREE_FRAC = 0.02
#: Beyond this share of the rate up to which bench_serving was exact on one core it counts as bound.
PEER_HEADROOM = 0.8
#: A client cannot see less time than the server itself spent; clocks and rounding give it this much.
CLOCK_SLACK_S = 0.0005
#: This client's endpoint -> bench_serving's `--backend`.
BACKENDS = {"generate": "sglang", "completions": "sglang-oai", "chat": "sglang-oai-chat"}
#: figure -> what it is, its unit, bench_serving's own name, how it was made the same on both sides.
FIGURES: dict[str, tuple[str, str, str, str]] = {
    "ttft_s": (
        "time to first token, mean", "s", "mean_ttft_ms",
        "from sending to the first event with text; ours otherwise counts from the moment the request was due",
    ),
    "tpot_s": (
        "time per output token, mean", "s", "mean_tpot_ms",
        "(last line of the stream - first text) / (tokens - 1), so with the closing lines; ours otherwise ends at the last token",
    ),
    "itl_s": (
        "inter-token latency, mean", "s", "mean_itl_ms",
        "OpenAI endpoints: gaps between events with text; /generate: the gap over its tokens, once for each token",
    ),
    "e2e_s": ("whole answer, mean", "s", "mean_e2e_latency_ms", "from sending to the last line of the stream"),
    "output_tokens_per_s": (
        "output throughput", "tok/s", "output_throughput",
        "tokens over the time that the requests' own times fill in C slots; bench_serving's duration also holds its sessions' set-up "
        "and a GET of /server_info, ours the time between an answer and the slot's next request",
    ),
}  # fmt: skip


class Figures(Record):
    """One client's figures by the common definitions, and as the tool itself reports them."""

    requests_ok: int
    output_tokens: int
    common: dict[str, float | None]
    reported: dict[str, float | None]
    wall_s: float
    slots_s: float
    itl_events: int


class Difference(Record):
    """One figure of both clients: what lies between them, how much of it the server did, and what each adds to the server."""

    figure: str
    own: float
    peer: float
    frac: float
    server_frac: float | None = None
    left_frac: float | None = None
    own_outside_s: float | None = None
    peer_outside_s: float | None = None
    impossible: str | None = None


def slots_time_s(times: Sequence[float], slots: int) -> float:
    """How long requests of these times take one after the other in so many slots, each taken by the first free one.

    Example: 3, 1, 1 and 2 seconds in 2 slots take 4: 3 beside 1, 1 and 2.
    """
    free = [0.0] * max(1, min(slots, len(times) or 1))
    for seconds in times:
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def own_figures(level: Level) -> Figures | None:
    """This client's record by the common definitions; None where no request succeeded."""
    view = level.view
    load, api = level.header["load"], level.header["api"]
    ok = sorted(view.ok, key=lambda r: (r["sent_ns"], r["i"]))
    if not ok or not view.wall_s:
        return None
    asked = (level.header.get("workload") or {}).get("settings", {}).get("output_len")
    e2e, first, per_token, tokens = [], [], [], 0
    for r in ok:
        counted = (r["usage"] or {}).get("completion_tokens") or 0
        counted = counted if api == "generate" or not asked else int(asked)
        tokens += counted
        whole = (r["end_ns"] - r["sent_ns"]) / 1e9
        start = metrics.token_times_us(r)[0] / 1e6
        e2e.append(whole)
        first.append(start)
        if counted > 1:
            per_token.append((whole - start) / (counted - 1))
    gaps = view.token_latencies if api == "generate" else view.gaps
    values = [] if isinstance(gaps, str) else [float(x) for x in gaps[0]]
    slots = slots_time_s(e2e, load["concurrency"])
    due = view.column("ttft_s")
    own_itl = None if isinstance(view.token_latencies, str) else _mean([float(x) for x in view.token_latencies[0]])
    return Figures(
        requests_ok=len(ok), output_tokens=tokens, wall_s=view.wall_s, slots_s=slots, itl_events=len(values),
        common={
            "ttft_s": _mean(first), "tpot_s": _mean(per_token), "itl_s": _mean(values), "e2e_s": _mean(e2e),
            "output_tokens_per_s": tokens / slots if slots else None,
        },
        reported={
            "ttft_s": _mean([float(x) for x in due]), "tpot_s": _mean([float(x) for x in view.column("token_latency_s")]),
            "itl_s": own_itl, "e2e_s": _mean([float(x) for x in view.column("e2e_s")]),
            "output_tokens_per_s": view.output_tokens / view.wall_s,
        },
    )  # fmt: skip


def peer_figures(result: Mapping[str, Any], slots: int) -> Figures | None:
    """bench_serving's result row with --output-details by the common definitions; None where no request succeeded.

    The details have no end of a request: its last line comes the mean tail (mean E2E less first text and gaps) after its last text.

    Raises:
        UnreadableFile: a row without details, or whose lists do not belong together.
    """
    lists = [result.get(name) for name in ("ttfts", "itls", "output_lens", "errors")]
    if not all(isinstance(x, list) for x in lists) or len({len(x) for x in lists if x is not None}) != 1:
        raise UnreadableFile(
            "a row of bench_serving with --output-details", "its lists are missing or of different lengths"
        )
    rows = [(t, g, n) for t, g, n, e in zip(*lists, strict=True) if not e and n]
    if not rows or not result.get("duration"):
        return None
    to_text = [t + sum(g) for t, g, _ in rows]
    mean_e2e = float(result["mean_e2e_latency_ms"]) / 1e3
    tail = max(0.0, mean_e2e - sum(to_text) / len(to_text))
    gaps = [x for _, g, _ in rows for x in g]
    tokens = sum(n for _, _, n in rows)
    span = slots_time_s([x + tail for x in to_text], slots)
    return Figures(
        requests_ok=len(rows), output_tokens=tokens, wall_s=float(result["duration"]), slots_s=span, itl_events=len(gaps),
        common={
            "ttft_s": _mean([t for t, _, _ in rows]),
            "tpot_s": _mean([(sum(g) + tail) / (n - 1) for _, g, n in rows if n > 1]),
            "itl_s": _mean(gaps), "e2e_s": mean_e2e, "output_tokens_per_s": tokens / span if span else None,
        },
        reported={
            name: float(result[key]) / (1e3 if unit == "s" else 1) if isinstance(result.get(key), (int, float)) else None
            for name, (_, unit, key, _) in FIGURES.items()
        },
    )  # fmt: skip


def server_means(deltas: Mapping[str, float]) -> dict[str, float]:
    """The server's own means over a window, seconds, from the growth of its counters; what it does not say is not there.

    `decode_sum_s` is all its time between first tokens and ends: over a client's own gaps it is the server's part of each gap.
    """
    found = {}
    for name in ("ttft", "e2e"):
        count = deltas.get(f"{name}_count")
        if count and f"{name}_sum_s" in deltas:
            found[f"{name}_s"] = deltas[f"{name}_sum_s"] / count
    later = deltas.get("generation_tokens", 0.0) - deltas.get("e2e_count", 0.0)
    if later > 0 and {"ttft_sum_s", "e2e_sum_s"} <= set(deltas):
        found["decode_sum_s"] = deltas["e2e_sum_s"] - deltas["ttft_sum_s"]
        found["tpot_s"] = found["decode_sum_s"] / later
    return found


def _served(name: str, means: Mapping[str, float], figures: Figures) -> float | None:
    """The server's own part of one mean of a client; None where it does not say it."""
    if name != "itl_s":
        return means.get(name)
    return means["decode_sum_s"] / figures.itl_events if "decode_sum_s" in means and figures.itl_events else None


def compare(
    own: Figures, peer: Figures, own_server: Mapping[str, float], peer_server: Mapping[str, float]
) -> list[Difference]:
    """Each figure of both clients by one definition: the difference, the server's share in it, and what is left.

    Times add up: ours - theirs = (server in our window - server in theirs) + (our time outside it - theirs). Each part is a
    share of the smaller figure. A throughput's parts are minus those of the whole answer, on which it hangs in a closed loop.

    Example: 44 ms against 40 ms, of which the server itself spent 43.5 and 39.5: 10%, all of it the server's.
    """
    found: list[Difference] = []
    for name, (_, unit, _, _) in FIGURES.items():
        a, b = own.common.get(name), peer.common.get(name)
        if not a or not b:
            continue
        scale = min(a, b)
        made: dict[str, Any] = {"figure": name, "own": a, "peer": b, "frac": (a - b) / scale}
        ours, theirs = _served(name, own_server, own), _served(name, peer_server, peer)
        if unit != "s":
            whole = next((d for d in found if d.figure == "e2e_s"), None)
            if whole is not None and whole.server_frac is not None and whole.left_frac is not None:
                made |= {"server_frac": -whole.server_frac, "left_frac": -whole.left_frac}
        elif ours and theirs:
            outside = {"own_outside_s": a - ours, "peer_outside_s": b - theirs}
            made |= outside | {"server_frac": (ours - theirs) / scale, "left_frac": ((a - ours) - (b - theirs)) / scale}
            early = (
                {"own": (a - ours, ours), "bench_serving": (b - theirs, theirs)} if name in ("ttft_s", "e2e_s") else {}
            )
            wrong = [who for who, (gap, spent) in early.items() if gap < -max(CLOCK_SLACK_S, AGREE_FRAC * spent)]
            made["impossible"] = f"{' and '.join(wrong)}: less time than the server itself spent" if wrong else None
        found.append(Difference(**made))
    return found


def peer_bound(backend: str, slots: int, figures: Figures) -> str | None:
    """Why bench_serving's own figures cannot be trusted at this load; None where it was exact at such loads."""
    limit = CLIENT_CHUNKS_PER_S["sglang.bench_serving" + (" native" if backend == "sglang" else "")]
    rate = (figures.itl_events + figures.requests_ok) / figures.slots_s if figures.slots_s else 0.0
    if slots >= CLIENT_STREAMS_TOO_MANY:
        return f"bench_serving is bound: at {slots} streams it did not hold the load (14% was missing)"
    if rate > PEER_HEADROOM * limit:
        return f"bench_serving is bound: {rate:,.0f} events/s, and it was exact up to {limit:,}"
    return None
