"""What a starting server is doing now, read from one line of its log.

A wait for a server shows the phase and what is known of its end: `loading_weights 31/47`. The seconds that earlier runs
spent in each phase give the time left. Everything here is text in, record out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic import Field

from lib.records import Record
from lib.server.lines import parse_line, split_messages

PHASES: tuple[str, ...] = (
    "importing",
    "distributed_init",
    "loading_weights",
    "allocating_kv",
    "compiling_kernels",
    "capturing_graphs",
    "starting_http",
    "warming_up",
    "ready",
    "serving",
    "stopping",
)
"""Phases in the order in which a server usually passes them (kernels are also compiled during capture and warm-up)."""

STARTUP_PHASES: tuple[str, ...] = PHASES[: PHASES.index("ready")]


class Phase(Record):
    """One phase of a server's life as one log line shows it."""

    name: str = Field(description="one of PHASES")
    order: int = Field(description="index in PHASES")
    done: int | None = Field(default=None, description="shards or graph sizes done, of `total`")
    total: int | None = None
    detail: str | None = Field(default=None, description="what exactly: the model class, the graph's kind, the kernel")
    at_end: bool = Field(default=False, description="the line says that this phase has ended")

    @property
    def text(self) -> str:
        """The phase for a progress line, e.g. `capturing graphs 3/20 (target verify)`."""
        count = f" {self.done}/{self.total}" if self.total else ""
        return self.name.replace("_", " ") + count + (f" ({self.detail})" if self.detail else "")


#: (phase, pattern, at_end). The first match decides. Groups: done, total, detail. Sources: FACTS section 4; SGLang
#: 0.5.10 to 0.5.23 model_runner.py, cuda_graph_setup.py, http_server.py; vLLM 0.32's log.
_ROWS: tuple[tuple[str, re.Pattern[str], bool], ...] = tuple(
    (phase, re.compile(pattern), at_end)
    for phase, pattern, at_end in (
        ("serving", r"^(?:Decode|Prefill) batch\b", False),
        (
            "ready",
            r"^The server is fired up and ready to roll!|^\(APIServer[^)]*\) INFO:\s+Application startup complete\.",
            True,
        ),
        ("stopping", r"^SIGTERM received|^Gracefully exiting|^kill_process_tree called|Shutting down$", False),
        (
            "loading_weights",
            r"(?:Loading|loading) (?P<detail>[\w ]*?)(?:checkpoint )?shards?:\s+\d+% Completed \| (?P<done>\d+)"
            r"/(?P<total>\d+)",
            False,
        ),
        ("loading_weights", r"^Load(?:ing)? weights? begin|^Starting to load model|Load weight begin", False),
        ("loading_weights", r"^Load weight end\..*?type=(?P<detail>\w+)|^Loading weights took", True),
        ("loading_weights", r"^Load weight end", True),
        ("compiling_kernels", r"(?P<detail>DeepGEMM) (?:JIT Pre-Compile|warmup)", False),
        ("compiling_kernels", r"^Running (?P<detail>FlashInfer autotune)", False),
        ("compiling_kernels", r"^(?P<detail>FlashInfer autotune) completed", True),
        ("compiling_kernels", r"^Compiling|JIT compil|ninja: |Building extension module", False),
        (
            "capturing_graphs",
            r"Capturing (?:batches|num tokens|piecewise|\w[\w ]*?)\s*(?:\((?P<detail>[^)]*)\))?:\s+\d+%\|[^|"
            r"]*\|\s*(?P<done>\d+)/(?P<total>\d+)",
            False,
        ),
        (
            "capturing_graphs",
            r"^Capture (?P<detail>[\w -]*?) ?(?:(?:cuda|cpu|npu|xpu) graph|CUDA graph|Graph)s? begin",
            False,
        ),
        (
            "capturing_graphs",
            r"^Capture (?P<detail>[\w -]*?) ?(?:(?:cuda|cpu|npu|xpu) graph|CUDA graph|Graph)s? end",
            True,
        ),
        ("capturing_graphs", r"^Capturing CUDA graphs", False),
        (
            "allocating_kv",
            r"^(?:[\w ]+ )?KV Cache (?:is allocated|VA upper bound|skipped)|^Mamba Cache is allocated",
            False,
        ),
        (
            "allocating_kv",
            r"^SWAKVPool |^Memory profiling:|memory calculation:|KV cache size:|^Initialize \w+TokenToKVPool",
            False,
        ),
        ("allocating_kv", r"^Memory pool end", True),
        ("warming_up", r"^Start of .*warmup|^Warm(?:ing|up)|\"(?:GET /model_info|GET /get_model_info) HTTP", False),
        (
            "starting_http",
            r"Started server process|Waiting for application startup|Uvicorn running on|Application startup complete",
            False,
        ),
        ("starting_http", r"^max_total_num_tokens=", False),
        ("distributed_init", r"^Init (?:torch distributed|parallel) begin|^init_threads_binding", False),
        ("distributed_init", r"^Init (?:torch distributed|parallel) ends|^Memory baseline taken", True),
        ("importing", r"^server_args=|is still supported, but 'sglang serve'", False),
        ("importing", r"^Using default HuggingFace chat template|^Fail to set RLIMIT_NOFILE|^non-default args:", False),
    )
)


def phase_of(line: str | bytes) -> Phase | None:
    """The phase that one log line shows, or None if the line says nothing about it.

    Prefixes, colours and carriage returns are handled; of several messages in one physical line the last one counts.
    Example: `phase_of("Multi-thread loading shards:  50% Completed | 1/2 [00:00<00:00]")` is loading_weights 1/2.
    """
    raw = line.encode("utf-8", "replace") if isinstance(line, str) else line
    found: Phase | None = None
    for part in split_messages(raw[-65536:])[-8:]:
        text = parse_line(0, part).text
        for name, pattern, at_end in _ROWS:
            match = pattern.search(text[:4000])
            if not match:
                continue
            groups = match.groupdict()
            if groups.get("total"):
                groups = (list(pattern.finditer(text[-4000:])) or [match])[-1].groupdict()
            total = _number(groups.get("total"))
            done = _number(groups.get("done"))
            found = Phase(
                name=name,
                order=PHASES.index(name),
                done=done if total else None,
                total=total or None,
                detail=(groups.get("detail") or "").strip() or None,
                at_end=at_end or bool(total and done == total),
            )
            break
    return found


def _number(text: str | None) -> int | None:
    return int(text) if text and len(text) < 12 else None


def seconds_left(phase: str, seconds_in_phase: float, earlier: Mapping[str, float]) -> float | None:
    """Seconds until ready, from the seconds by phase of earlier runs; None if none of the remaining phases is known.

    Model: what earlier runs spent in this phase minus what has passed in it (never below 0) plus all later phases.

    Args:
        phase: a name in PHASES.
        seconds_in_phase: seconds since this phase began.
        earlier: seconds by phase name, e.g. medians of earlier launches on this host.

    Example: `seconds_left("loading_weights", 10, {"loading_weights": 30, "capturing_graphs": 12})` is 32.
    """
    here = STARTUP_PHASES.index(phase) if phase in STARTUP_PHASES else len(STARTUP_PHASES)
    remaining = [name for name in STARTUP_PHASES[here:] if name in earlier]
    if here == len(STARTUP_PHASES):
        return 0.0
    if not remaining:
        return None
    return sum(max(earlier[n] - (seconds_in_phase if n == phase else 0.0), 0.0) for n in remaining)
