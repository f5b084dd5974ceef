"""How far two launches of one configuration differ in throughput: what a deployment's proof must allow for (deploy.proof.LAUNCH_FRAC).

    .venv/bin/python benchmarks/launch_spread.py [--profile params/embedded] [--launches 8] [--concurrency 1] [--requests 16]

Launches the profile's own server several times, one after the other, sends each the same level twice (code, 128 tokens in, 24
out, as the embedded profile's notebook 03), and prints output tokens/s with its interval for each. Then every ordered pair of
launches is judged as a deployment is: the first as what notebook 03 measured, the second as the short benchmark of the deployed
server. Nothing was changed between them, so each failure is a false one. Their share is printed by the margin that is allowed
below the first interval: bounds 213 and 222 tok/s fail a second launch whose upper bound is 201, with 5% allowed (202.4) too.
Exit code 1 where fewer than three launches gave a figure, 2 on bad input. Not a test: it measures.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lib.errors import WorkbookError
from lib.hosts import local
from lib.load import metrics
from lib.load.benchmark import build_workload
from lib.load.client import read_level, run_level
from lib.params import load_profile
from lib.server import launch as launching
from lib.server.control import Control
from lib.server.spec import server_spec

MARGINS = (0.0, 0.01, 0.02, 0.05, 0.10)
#: Fewer launches have no spread worth printing.
LEAST = 3


class Figure(NamedTuple):
    """Output tokens/s of one level with its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.1f} tok/s ({self.low:.1f} to {self.high:.1f})"


def level_of(server: launching.Server, folder: Path, concurrency: int, requests: int) -> Figure | str:
    """One level after the cache was flushed, or why it gave no figure."""
    control = Control(server.base_url)
    control.flush_cache()
    made = build_workload("code", requests, 128, 24, 42 + concurrency, None)
    folder.mkdir(parents=True)
    file = run_level(
        server.base_url, "completions", made.requests, out=folder / "level.jsonl", concurrency=concurrency,
        model=control.served_model_name(), warmup=made.warmup, workload=made.describe(),
    )  # fmt: skip
    rate = metrics.level_summary(read_level(file))["output_tokens_per_s"]
    if not isinstance(rate.value, (int, float)) or rate.low is None or rate.high is None:
        return rate.reason or "no interval"
    return Figure(float(rate.value), rate.low, rate.high)


def show(rows: list[tuple[Figure, Figure]]) -> None:
    """The spread between launches and within them, and how often a deployment's proof would fail for nothing."""
    values = [first.value for first, _ in rows]
    slowest = min(values) / max(values) - 1
    share = statistics.stdev(values) / statistics.mean(values)
    print(f"between launches: standard deviation {share:.1%}, slowest {slowest:+.1%} of the fastest")
    again = [second.value / first.value - 1 for first, second in rows]
    print(f"second level of a launch against its first: mean {statistics.mean(again):+.1%}, furthest {max(again, key=abs):+.1%}")
    pairs = list(permutations([first for first, _ in rows], 2))
    outside = sum(not a.low <= b.value <= a.high for a, b in pairs)
    print(f"outside the other launch's interval: {outside} of {len(pairs)} ordered pairs ({outside / len(pairs):.0%})")
    for margin in MARGINS:
        false = sum(b.high < a.low * (1 - margin) for a, b in pairs)
        print(f"falsely failed with {margin:.0%} allowed: {false} of {len(pairs)} ({false / len(pairs):.1%})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="params/embedded")
    parser.add_argument("--launches", type=int, default=8)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--requests", type=int, default=16)
    args = parser.parse_args()
    if args.launches < LEAST or args.concurrency < 1 or args.requests < 1:
        parser.error(f"--launches is at least {LEAST}, --concurrency and --requests at least 1")
    me = local.process_id(os.getpid())
    assert me
    rows: list[tuple[Figure, Figure]] = []
    try:
        spec = server_spec("launch-spread", load_profile(args.profile).server)
        with tempfile.TemporaryDirectory() as work:
            for number in range(args.launches):
                with launching.launch(spec, Path(work), [me]) as server:
                    first, second = (level_of(server, Path(work) / f"{number}-{k}", args.concurrency, args.requests) for k in (1, 2))
                print(f"launch {number + 1}: {first}   again {second}   load {os.getloadavg()[0]:.1f}", flush=True)
                if isinstance(first, Figure) and isinstance(second, Figure):
                    rows.append((first, second))
    except WorkbookError as error:
        print(f"launch_spread: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # what was measured is shown; the server is gone
        print("interrupted", file=sys.stderr)
    print(f"{len(rows)} launches of {args.profile}, C={args.concurrency}, {args.requests} requests a level")
    if len(rows) < LEAST:
        print(f"at least {LEAST} launches with a figure are needed", file=sys.stderr)
        return 1
    show(rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
