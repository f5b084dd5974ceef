"""Measures the GPUs of this host with torch: copies, and the all-reduce by size with a process a GPU; prints one JSON line.

    PYTHON-OF-THE-SERVER lib/deploy/host_probe.py FOLDER-FOR-SCRATCH [RANKS nccl|gloo]

With RANKS only the all-reduce is measured: over so many GPUs (nccl), or over so many processes on the processor (gloo), which tries
the same code where there is no GPU.

Standard library and torch only. Times are CUDA events around one operation, after a warm-up; the median and the middle 90%.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COPY_BYTES = 1 << 30
SIZES = [1 << n for n in range(11, 29)]


def rate(function: Callable[[], Any], moved: int, seconds: float = 0.4) -> dict[str, Any]:
    """Bytes a second over repeated calls within `seconds`, at least five and at most 200."""
    import torch

    torch.cuda.synchronize()
    function()
    torch.cuda.synchronize()
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while len(samples) < 5 or (time.perf_counter() < end and len(samples) < 200):
        begin, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        stop.record()
        stop.synchronize()
        samples.append(moved / (begin.elapsed_time(stop) / 1e3))
    samples.sort()
    twentieth = len(samples) // 20
    return {
        "bytes_per_s": statistics.median(samples),
        "n": len(samples),
        "low": samples[twentieth],
        "high": samples[-1 - twentieth],
    }


def copies() -> list[dict[str, Any]]:
    """Inside each device, between it and the host (pinned), and between each pair of devices."""
    import torch

    rows: list[dict[str, Any]] = []
    small = COPY_BYTES // 4
    for n in range(torch.cuda.device_count()):
        torch.cuda.set_device(n)
        x = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
        y = torch.empty_like(x)
        host = torch.empty(small, dtype=torch.uint8, pin_memory=True)
        part = x[:small]
        tried: list[tuple[str, Any, Any, Any, Any, int, int]] = [
            ("inside the device, read and write counted", n, n, y, x, COPY_BYTES, 2 * COPY_BYTES),
            ("host to device, pinned", "host", n, part, host, small, small),
            ("device to host, pinned", n, "host", host, part, small, small),
        ]
        for m in range(torch.cuda.device_count()):
            if m != n:
                other = torch.empty(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{m}")
                tried.append(("device to device", n, m, other, x, COPY_BYTES, COPY_BYTES))
        for what, begin, end, to, source, size, moved in tried:

            def once(to: Any = to, source: Any = source) -> None:
                to.copy_(source, non_blocking=True)

            rows.append({"what": what, "from": begin, "to": end, "size": size, **rate(once, moved)})
        del tried, x, y, host, part
        torch.cuda.empty_cache()
    return rows


def all_reduce(rank: int, world: int, port: int, out: str, backend: str, sizes: list[int]) -> None:
    """One process of the all-reduce: every size with its time, bus bandwidth, and whether the sum was right.

    `seconds` is the median of single operations, each alone; `burst_seconds` an operation's share of many in a row, in
    which starting one hides behind the one before (as in a captured graph). Over gloo, on processors, wall-clock times.
    """
    import torch
    import torch.distributed as dist

    cuda = backend == "nccl"
    if cuda:
        torch.cuda.set_device(rank)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    more = {"device_id": device} if cuda else {}
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, **more)
    rows = []
    for size in sizes:
        x = torch.ones(size // 2, dtype=torch.bfloat16, device=device)
        for _ in range(5):
            dist.all_reduce(x)
        x.fill_(1)
        dist.all_reduce(x)
        _wait(cuda)
        right = bool((x == world).all())
        count = 50 if size < 1 << 24 else 10
        samples = sorted(_timed(x, 1, cuda) for _ in range(count))
        burst = min(_timed(x, 20, cuda) for _ in range(3))
        median = statistics.median(samples)
        bus = size * 2 * (world - 1) / world / median
        row = {
            "size": size,
            "seconds": median,
            "low": samples[0],
            "high": samples[-1],
            "n": count,
            "burst_seconds": burst,
        }
        rows.append({**row, "right": right, "bus_bytes_per_s": bus})
    if rank == 0:
        Path(out).write_text(json.dumps(rows), encoding="utf-8")
    dist.destroy_process_group()


def _wait(cuda: bool) -> None:
    import torch

    if cuda:
        torch.cuda.synchronize()


def _timed(x: Any, times: int, cuda: bool) -> float:
    """Seconds of one all-reduce, as its share of `times` in a row, after all processes have met."""
    import torch
    import torch.distributed as dist

    x.fill_(1)
    _wait(cuda)
    dist.barrier()
    if not cuda:
        at = time.perf_counter()
        for _ in range(times):
            dist.all_reduce(x)
        return (time.perf_counter() - at) / times
    begin, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        dist.all_reduce(x)
    stop.record()
    stop.synchronize()
    return float(begin.elapsed_time(stop)) / 1e3 / times


def all_reduces(scratch: Path, world: int, backend: str, sizes: list[int]) -> dict[str, Any]:
    """The all-reduce over `world` processes (GPUs 0 to world - 1 as this process sees them), or why there is none."""
    import torch.multiprocessing as mp

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = scratch / "all_reduce.json"
    try:
        mp.spawn(all_reduce, (world, port, str(out), backend, sizes), nprocs=world)
        return {"all_reduce": json.loads(out.read_text(encoding="utf-8")), "ranks": world, "backend": backend}
    except Exception as error:  # noqa: BLE001 -- what NCCL or a child ends with is the answer
        return {"all_reduce": [], "all_reduce_reason": f"{type(error).__name__}: {str(error)[-400:]}", "ranks": world}


def reduce_only(scratch: Path, world: int, backend: str) -> dict[str, Any]:
    """The all-reduce alone, over as many GPUs as are asked (nccl), or processes (gloo)."""
    import torch

    said: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    there = torch.cuda.device_count() if backend == "nccl" and torch.cuda.is_available() else 0
    if world < 2:
        return {**said, "all_reduce": [], "all_reduce_reason": "one rank: nothing to reduce over", "ranks": world}
    if backend == "nccl" and there < world:
        return {
            **said,
            "all_reduce": [],
            "all_reduce_reason": f"{world} ranks, and torch sees {there} GPUs",
            "ranks": world,
        }
    return said | all_reduces(scratch, world, backend, SIZES if backend == "nccl" else SIZES[:11])


def measure(scratch: Path) -> dict[str, Any]:
    """All of it; on a host without GPUs the reason."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    said: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "devices": count}
    if not count:
        return {**said, "reason": "torch sees no GPU"}
    said["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    said["properties"] = [
        {
            "name": p.name,
            "multiprocessors": p.multi_processor_count,
            "l2_bytes": getattr(p, "L2_cache_size", None),
            "memory_bytes": p.total_memory,
        }
        for p in map(torch.cuda.get_device_properties, range(count))
    ]
    peers = torch.cuda.can_device_access_peer
    said["peer_access"] = [[n == m or peers(n, m) for m in range(count)] for n in range(count)]
    said["copies"] = copies()
    if count == 1:
        return {**said, "all_reduce": [], "all_reduce_reason": "one GPU: nothing to reduce over"}
    said |= all_reduces(scratch, count, "nccl", SIZES)
    return said


def main(arguments: list[str]) -> None:
    """`FOLDER`: all of it. `FOLDER WORLD nccl|gloo`: the all-reduce alone."""
    scratch = Path(arguments[0])
    made = measure(scratch) if len(arguments) == 1 else reduce_only(scratch, int(arguments[1]), arguments[2])
    sys.stdout.write("PROBE " + json.dumps(made) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
