"""How long the precision numerics take: one attention output over a long context, beside the time that reading K and V takes.

    PYTHON benchmarks/precision_speed.py [--keys 262144] [--device cuda|cpu]

PYTHON has torch. On a GPU the arm is compiled (torch.compile) and compared with the floor: bytes of K and V in bf16 over
the copy bandwidth that the same run measures. Target: at most 2 times the floor. On a CPU every default arm at 131,072
keys is timed. Target: within a minute on 2 cores. Not a test: it measures.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from lib.model import precision
from lib.model.precision_job import REQUEST, arm_errors


def seconds_of(function: Any, repeats: int) -> float:
    """Median seconds of one call on the GPU, by CUDA events, after warm-up."""
    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return sorted(times)[len(times) // 2]


def on_gpu(keys: int, heads: int, head_dim: int) -> None:
    """Compiled arms against the floor of this GPU."""
    q, k, v = precision.synthetic("gaussian_mean", heads, 1, keys, head_dim, 2.0, 1, "cuda")
    moved = 2 * k.numel() * k.element_size()
    copy = seconds_of(lambda: k.clone(), 20)
    bandwidth = moved / copy  # read and written
    floor = moved / bandwidth
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {bandwidth / 1e12:.2f} TB/s (read and written)"
    )
    print(
        f"{heads} heads x {keys:,} keys x {head_dim}: K and V in bf16 {moved / 1e9:.2f} GB, floor {floor * 1e6:.0f} us"
    )
    exact = torch.cat([precision.exact_output(q[h : h + 1], k[h : h + 1], v[h : h + 1]) for h in range(heads)])
    for name, path in (("fp8_e4m3", "storage"), ("fp8_e4m3", "triton"), ("fp8_e5m2", "triton"), ("int8", "storage")):
        scales = (
            (precision.calibrated_scale(k, name), precision.calibrated_scale(v, name)) if name == "int8" else (1.0, 1.0)
        )
        compiled = torch.compile(precision.attention_output, dynamic=False, options={"coordinate_descent_tuning": True})
        began = time.perf_counter()
        output, _ = compiled(q, k, v, name, path, *scales)
        error = float(precision.relative_errors(output, exact).mean())
        torch.cuda.synchronize()
        first = time.perf_counter() - began
        took = seconds_of(lambda c=compiled, n=name, p=path, s=scales: c(q, k, v, n, p, *s), 20)  # type: ignore[misc]
        eager, _ = precision.attention_output(q[:1], k[:1], v[:1], name, path, *scales)
        same = float((output[:1] - eager).abs().max())
        print(
            f"{name:9} {path:8} {took * 1e6:7.0f} us, {took / floor:.2f} x floor; error {error:.3%}; "
            f"compiled against eager at most {same:.1e} apart; compile {first:.0f} s"
        )


def on_cpu(keys: int, head_dim: int) -> None:
    """Every default arm at one context length, eager."""
    began = time.perf_counter()
    q, k, v = precision.synthetic("gaussian_mean", 1, REQUEST["queries"], keys, head_dim, 2.0, 1)
    made = time.perf_counter() - began
    list(arm_errors(q, k, v, REQUEST))
    total = time.perf_counter() - began
    print(
        f"{keys:,} keys, {len(REQUEST['arms'])} arms, {torch.get_num_threads()} threads: {total:.1f} s ({made:.1f} s of it data)"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--keys", type=int, default=None)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=256)
    options = parser.parse_args()
    if options.device == "cpu":
        on_cpu(options.keys or 131072, options.head_dim)
    else:
        on_gpu(options.keys or 262144, options.heads, options.head_dim)
