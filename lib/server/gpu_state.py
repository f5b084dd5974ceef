"""What GPUs did while something was measured: samples of a window to a judgement, from text and numbers alone.

A window in which any GPU of the server held its clocks down (power cap, heat, hardware slowdown, power brake) is marked
as throttled; the slowest rank is the one with the lowest mean SM clock. Unknown stays None with a reason, never 0.

Sources: NVML API reference, NvmlClocksEventReasons (R550); `nvidia-smi --help-query-gpu`; NVIDIA's Xid catalogue for
the form of the kernel's lines (`NVRM: Xid (PCI:0000:41:00): 79, ...`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import Field

from lib.records import Record

#: Bit of the clocks' event mask -> name, and whether it means that the GPU could not run as fast as it was asked to.
CLOCK_REASONS: dict[int, tuple[str, bool]] = {
    0x1: ("idle", False),
    0x2: ("applications_clocks_setting", False),
    0x4: ("sw_power_cap", True),
    0x8: ("hw_slowdown", True),
    0x10: ("sync_boost", True),
    0x20: ("sw_thermal_slowdown", True),
    0x40: ("hw_thermal_slowdown", True),
    0x80: ("hw_power_brake_slowdown", True),
    0x100: ("display_clock_setting", False),
}
#: What one sample of a GPU holds, and nvidia-smi's name of it. The first query that the driver knows is used.
SMI_FIELDS: dict[str, str] = {
    "index": "index",
    "uuid": "uuid",
    "name": "name",
    "sm_clock_mhz": "clocks.current.sm",
    "sm_clock_max_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.current.memory",
    "power_w": "power.draw",
    "power_limit_w": "enforced.power.limit",
    "temperature_c": "temperature.gpu",
    "gpu_busy_pct": "utilization.gpu",
    "memory_used_mib": "memory.used",
    "clock_reasons": "clocks_event_reasons.active",
}
#: The same field under its older name (drivers before R535).
SMI_REASONS_BEFORE = "clocks_throttle_reasons.active"
#: Ranks whose mean clocks differ by less are not called slower.
SAME_CLOCK_FRAC = 0.01

Sample = Mapping[str, Any]


def clock_reasons(mask: int | None) -> list[str]:
    """Names of a mask's bits; a bit without a row is named by its number.

    Example: `clock_reasons(0x24)` is ["sw_power_cap", "sw_thermal_slowdown"].
    """
    if mask is None:
        return []
    known = [name for bit, (name, _) in CLOCK_REASONS.items() if mask & bit]
    rest = mask & ~sum(CLOCK_REASONS)
    return known + [f"bit_{rest:#x}"] * bool(rest)


def parse_smi(text: str, fields: Sequence[str] = tuple(SMI_FIELDS)) -> list[dict[str, Any]]:
    """Samples from `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`; `[N/A]` and the like become None."""
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(fields):
            continue
        row: dict[str, Any] = {}
        for field, cell in zip(fields, cells, strict=True):
            if field in ("name", "uuid"):
                row[field] = cell
            elif field == "clock_reasons":
                row[field] = int(cell, 16) if re.fullmatch(r"0[xX][0-9a-fA-F]+", cell) else None
            else:
                row[field] = float(cell) if re.fullmatch(r"-?\d+(\.\d+)?", cell) else None
        if row.get("index") is not None:
            rows.append(row | {"index": int(row["index"])})
    return rows


class Xid(Record):
    """One error that the NVIDIA driver wrote to the kernel's log."""

    gpu: str = Field(description="PCI address as the driver writes it")
    number: int
    text: str


def parse_xids(text: str) -> list[Xid]:
    """Xid lines of a kernel log, in order."""
    found = []
    for line in text.splitlines():
        match = re.search(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]+)\): (\d{1,4}),? ?(.*)", line)
        if match:
            found.append(Xid(gpu=match[1], number=int(match[2]), text=match[3].strip()[:200]))
    return found


def names_nvidia(text: str) -> bool:
    """True if a kernel log has any line of the NVIDIA driver: only then does the absence of Xid lines mean anything."""
    return bool(re.search(r"NVRM|\bnvidia\b", text))


def new_xids(before: str, after: str) -> list[Xid]:
    """Xids of the later reading that the earlier one did not have (whole lines, so time stamps tell repeats apart)."""
    old, new = Counter(before.splitlines()), Counter(after.splitlines())
    return parse_xids("\n".join((new - old).elements()))


class GpuWindow(Record):
    """One GPU over a window."""

    index: int
    rank: int | None = Field(description="the server's rank on it, None if it is not the server's")
    name: str | None
    samples: int
    sm_clock_mhz: float | None
    sm_clock_min_mhz: float | None
    sm_clock_max_mhz: float | None = Field(description="the highest that the GPU can run at")
    memory_clock_mhz: float | None
    power_w: float | None
    power_max_w: float | None
    power_limit_w: float | None
    temperature_max_c: float | None
    gpu_busy_pct: float | None
    memory_used_max_mib: float | None
    reasons: dict[str, float] | None = Field(description="clock reason -> share of the samples; None: not reported")

    @property
    def throttled(self) -> list[str]:
        """Reasons seen that hold clocks down."""
        slow = {name for name, throttles in CLOCK_REASONS.values() if throttles}
        return [name for name in self.reasons or {} if name in slow]


class WindowState(Record):
    """All GPUs over a window, or the reason why there are none."""

    source: str | None = Field(description="nvml | nvidia-smi; None: no GPU is seen")
    reason: str | None = None
    gpus: list[GpuWindow] = []
    throttled: list[str] = Field(default=[], description="one sentence a GPU whose clocks were held down")
    slowest: str | None = None
    xids: list[Xid] | None = Field(default=None, description="None: unknown")
    xid_reason: str | None = None
    cpu_frac: float | None = Field(default=None, description="mean share of this machine's CPUs that was busy")
    faults: int = Field(default=0, description="samples that could not be taken")

    @property
    def reported(self) -> bool:
        """True if at least one GPU said whether its clocks were held down."""
        return any(gpu.reasons is not None and gpu.samples for gpu in self.gpus)


def window_state(
    lines: Iterable[Mapping[str, Any]], start_ns: int | None = None, end_ns: int | None = None
) -> WindowState:
    """What the samples between two monotonic times say (all of them where no times are given).

    Args:
        lines: a telemetry file's decoded lines: one header, samples, at the end the kernel log's reading.
        start_ns, end_ns: CLOCK_MONOTONIC, as a level's header has them.
    """
    header: Mapping[str, Any] = {}
    samples: list[Mapping[str, Any]] = []
    log: Mapping[str, Any] = {}
    faults = 0
    for line in lines:
        kind = line.get("kind")
        if kind == "telemetry":
            header = line
        elif kind == "kernel_log":
            log = line
        elif kind in ("sample", "fault"):
            inside = (start_ns is None or line["t_ns"] >= start_ns) and (end_ns is None or line["t_ns"] <= end_ns)
            faults += inside and kind == "fault"
            if inside and kind == "sample":
                samples.append(line)
    cpu = [s["cpu_frac"] for s in samples if s.get("cpu_frac") is not None]
    xids = [Xid.model_validate(x) for x in log["xids"]] if log.get("xids") is not None else None
    common: dict[str, Any] = {
        "source": header.get("source"),
        "xids": xids,
        "xid_reason": log.get("reason") or (None if xids is not None else "the kernel's log was not read"),
        "cpu_frac": sum(cpu) / len(cpu) if cpu else None,
        "faults": faults,
    }
    if not header:
        return WindowState(reason="no telemetry was recorded", **common)
    if header.get("source") is None:
        return WindowState(reason=str(header.get("reason")), **common)
    ranks = {int(index): rank for rank, index in enumerate(header["ranks"])} if header.get("ranks") else None
    by_gpu: dict[int, list[Sample]] = {}
    for sample in samples:
        for gpu in sample.get("gpus", []):
            by_gpu.setdefault(int(gpu["index"]), []).append(gpu)
    if not by_gpu:
        why = f"no sample fell into the window ({faults} failed)" if faults else "no sample fell into the window"
        return WindowState(reason=f"{why}; one is taken every {header.get('period_s')} s", **common)
    gpus = [
        _gpu_window(index, rows, index if ranks is None else ranks.get(index)) for index, rows in sorted(by_gpu.items())
    ]
    mine = [gpu for gpu in gpus if gpu.rank is not None]
    return WindowState(gpus=gpus, throttled=_throttled(mine), slowest=slowest_rank(mine), **common)


def _gpu_window(index: int, rows: Sequence[Sample], rank: int | None) -> GpuWindow:
    def column(key: str) -> list[float]:
        return [float(row[key]) for row in rows if row.get(key) is not None]

    def mean(key: str) -> float | None:
        values = column(key)
        return sum(values) / len(values) if values else None

    masks = [int(row["clock_reasons"]) for row in rows if row.get("clock_reasons") is not None]
    counts = Counter(name for mask in masks for name in clock_reasons(mask))
    return GpuWindow(
        index=index,
        rank=rank,
        name=next((str(row["name"]) for row in rows if row.get("name")), None),
        samples=len(rows),
        sm_clock_mhz=mean("sm_clock_mhz"),
        sm_clock_min_mhz=min(column("sm_clock_mhz"), default=None),
        sm_clock_max_mhz=max(column("sm_clock_max_mhz"), default=None),
        memory_clock_mhz=mean("memory_clock_mhz"),
        power_w=mean("power_w"),
        power_max_w=max(column("power_w"), default=None),
        power_limit_w=min(column("power_limit_w"), default=None),
        temperature_max_c=max(column("temperature_c"), default=None),
        gpu_busy_pct=mean("gpu_busy_pct"),
        memory_used_max_mib=max(column("memory_used_mib"), default=None),
        reasons={name: n / len(masks) for name, n in counts.items()} if masks else None,
    )


def _throttled(gpus: Sequence[GpuWindow]) -> list[str]:
    words = []
    for gpu in gpus:
        for name in gpu.throttled:
            share = (gpu.reasons or {})[name]
            words.append(f"rank {gpu.rank} (GPU {gpu.index}): {name} in {share:.0%} of {gpu.samples} samples")
    return words


def slowest_rank(gpus: Sequence[GpuWindow]) -> str | None:
    """The rank with the lowest mean SM clock, named with the fastest one's; None where clocks are not reported."""
    known = [gpu for gpu in gpus if gpu.sm_clock_mhz is not None]
    if not known:
        return None
    low, high = min(known, key=lambda g: g.sm_clock_mhz or 0.0), max(known, key=lambda g: g.sm_clock_mhz or 0.0)
    slow, fast = float(low.sm_clock_mhz or 0), float(high.sm_clock_mhz or 0)
    if len(known) == 1:
        return f"only rank {low.rank}: {slow:.0f} MHz"
    if fast <= 0 or slow / fast > 1 - SAME_CLOCK_FRAC:
        return f"none: all {len(known)} ranks within {SAME_CLOCK_FRAC:.0%} of {fast:.0f} MHz"
    why = f", {', '.join(low.throttled)}" if low.throttled else ""
    return f"rank {low.rank} (GPU {low.index}): {slow:.0f} MHz, rank {high.rank} {fast:.0f} MHz{why}"


def visible_gpus(environment: Mapping[str, str], base_gpu_id: int, count: int, step: int = 1) -> list[int] | None:
    """Indices of the GPUs of a server's ranks, in the order of the ranks; None where they are named by uuid.

    Source: CUDA_VISIBLE_DEVICES; SGLang's `base_gpu_id` and `gpu_id_step` count within it.
    Example: `visible_gpus({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 1, 2)` is [5, 6].
    """
    wanted = [base_gpu_id + rank * step for rank in range(count)]
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return wanted
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if not all(name.isdigit() for name in names) or max(wanted, default=0) >= len(names):
        return None
    return [int(names[place]) for place in wanted]


# /metrics -------------------------------------------------------------------------------------------------------------


#: What is compared of /metrics: name here -> series of SGLang (summed over labels: ranks, cache sources).
COUNTERS: dict[str, str] = {
    "generation_tokens": "sglang:generation_tokens_total",
    "prompt_tokens": "sglang:prompt_tokens_total",
    "cached_tokens": "sglang:cached_tokens_total",
    "requests": "sglang:num_requests_total",
    "ttft_sum_s": "sglang:time_to_first_token_seconds_sum",
    "ttft_count": "sglang:time_to_first_token_seconds_count",
    "e2e_sum_s": "sglang:e2e_request_latency_seconds_sum",
    "e2e_count": "sglang:e2e_request_latency_seconds_count",
}


def parse_counters(text: str) -> dict[str, float]:
    """The counters above from the text of /metrics, each summed over its labels; what is not exported is not there."""
    names = {series: name for name, series in COUNTERS.items()}
    sums: dict[str, float] = {}
    for line in text.splitlines():
        match = re.match(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{.*\})?\s+([-+0-9.eE]+)\s*(?:\d+)?$", line)
        if match and match[1] in names:
            sums[names[match[1]]] = sums.get(names[match[1]], 0.0) + float(match[2])
    return sums


class ServerCount(Record):
    """What the server counted over a window; None with the reason where it does not say."""

    deltas: dict[str, float] = {}
    reason: str | None = None

    def value(self, name: str) -> float | None:
        """One counter's growth, None where the server has none of that name."""
        return self.deltas.get(name)

    def mean_s(self, name: str) -> float | None:
        """Mean of a histogram over the window (`ttft`, `e2e`), None where nothing was observed."""
        count = self.deltas.get(f"{name}_count")
        return self.deltas[f"{name}_sum_s"] / count if count and f"{name}_sum_s" in self.deltas else None


def server_count(before: str | None, after: str | None) -> ServerCount:
    """The growth of each counter between two readings of /metrics.

    A series that a label had not created before counts from 0; one that is missing after is not reported. A counter
    that fell means that the server was restarted in between, and nothing is said.
    """
    if before is None or after is None:
        return ServerCount(reason="the server exports no /metrics (start it with --enable-metrics)")
    old, new = parse_counters(before), parse_counters(after)
    if not new:
        return ServerCount(reason="/metrics has none of SGLang's token counters")
    if "generation_tokens" in new:
        new.setdefault("cached_tokens", 0.0)  # its series appears with the first cached token
    fell = [name for name, value in new.items() if value < old.get(name, 0.0)]
    if fell:
        return ServerCount(reason=f"counters fell ({', '.join(fell)}): the server was restarted in between")
    return ServerCount(deltas={name: value - old.get(name, 0.0) for name, value in new.items()})
