"""How far two launches of one configuration differ in throughput: what a deployment's proof must allow for (deploy.proof.LAUNCH_FRAC).

    .venv/bin/python benchmarks/launch_spread.py [--profile params/embedded] [--launches 8] [--concurrency 1] [--requests 16]

Launches the profile's own server several times, one after the other, sends each the same level twice, and prints output tokens/s
with its interval for each. Then every ordered pair of launches is judged as a deployment is: the first as what notebook 03
measured, the second as the short benchmark of the deployed server. Nothing was changed between them, so each failure is a
false one. Their share is printed by the margin that is allowed below the first interval. Not a test: it measures.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from itertools import permutations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lib.hosts import local
from lib.load import metrics
from lib.load.benchmark import build_workload
from lib.load.client import read_level, run_level
from lib.params import load_profile
from lib.records import Measured
from lib.server import launch as launching
from lib.server.control import Control
from lib.server.spec import server_spec

MARGINS = (0.0, 0.01, 0.02, 0.05, 0.10)


def level_of(server: launching.Server, folder: Path, concurrency: int, requests: int) -> Measured:
    """Output tokens/s of one level, as notebook 03 sends it, after the cache was flushed."""
    control = Control(server.base_url)
    control.flush_cache()
    made = build_workload("code", requests, 128, 24, 42 + concurrency, None)
    folder.mkdir(parents=True)
    file = run_level(
        server.base_url, "completions", made.requests, out=folder / "level.jsonl", concurrency=concurrency,
        model=control.served_model_name(), warmup=made.warmup, workload=made.describe(),
    )  # fmt: skip
    return metrics.level_summary(read_level(file))["output_tokens_per_s"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="params/embedded")
    parser.add_argument("--launches", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--requests", type=int, default=16)
    args = parser.parse_args()
    me = local.process_id(os.getpid())
    assert me
    spec = server_spec("launch-spread", load_profile(args.profile).server)
    rows: list[tuple[Measured, Measured]] = []
    with tempfile.TemporaryDirectory() as work:
        for number in range(args.launches):
            with launching.launch(spec, Path(work), [me]) as server:
                pair = tuple(level_of(server, Path(work) / f"{number}-{k}", args.concurrency, args.requests) for k in (1, 2))
            assert len(pair) == 2
            if any(m.value is None or m.low is None or m.high is None for m in pair):
                print(f"launch {number + 1}: no figure, {pair[0].reason or pair[1].reason}", flush=True)
                continue
            rows.append(pair)
            words = "   again ".join(f"{m.value:.1f} tok/s ({m.low:.1f} to {m.high:.1f})" for m in pair)
            print(f"launch {number + 1}: {words}   load {os.getloadavg()[0]:.1f}", flush=True)
    if len(rows) < 3:
        print("too few launches gave a figure", file=sys.stderr)
        return 1
    values = [float(first.value) for first, _ in rows]  # type: ignore[arg-type]
    mean = statistics.mean(values)
    again = [float(b.value) / float(a.value) - 1 for a, b in rows]  # type: ignore[arg-type]
    print(f"{len(rows)} launches of {args.profile}, C={args.concurrency}, {args.requests} requests a level")
    slowest = min(values) / max(values) - 1
    print(f"between launches: standard deviation {statistics.stdev(values) / mean:.1%}, slowest {slowest:+.1%} of the fastest")
    print(f"second level of a launch against its first: mean {statistics.mean(again):+.1%}, furthest {max(again, key=abs):+.1%}")
    pairs = list(permutations([first for first, _ in rows], 2))
    outside = sum(not a.low <= b.value <= a.high for a, b in pairs)  # type: ignore[operator]
    print(f"outside the other launch's interval: {outside} of {len(pairs)} ordered pairs ({outside / len(pairs):.0%})")
    for margin in MARGINS:
        false = sum(b.high < a.low * (1 - margin) for a, b in pairs)  # type: ignore[operator]
        print(f"falsely failed with {margin:.0%} allowed: {false} of {len(pairs)} ({false / len(pairs):.1%})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
