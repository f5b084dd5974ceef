"""How fast `read_log` reads a large log, beside a bare loop and grep over the same file. Not a test: it measures.

    python benchmarks/log_speed.py [--mib 1024] [--keep]

The file is made from recorded servers in tests/recorded: the start of one, then its batch lines and accesses again and
again with other numbers, with a second rank's lines interleaved and some warnings and progress bars between them. The bare
loop is `for line in f: pattern.search(line)` with one alternation of the patterns that the reader looks for: what a
straightforward script does, without taking a single fact. Target: at most twice the bare loop, at most 300 MB.
"""

# ruff: noqa: E501
from __future__ import annotations

import argparse
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lib.server.lines import lines_of
from lib.server.log import read_log
from lib.server.log_tables import (
    ACCEPT,
    BACKEND_ROWS,
    DISABLED,
    DSV4,
    GRAPH,
    GRAPH_FAILED,
    KV_LINE,
    LOAD_END,
    MAMBA_LINE,
    RETRACT,
    SWA_LINE,
    USING_DTYPE,
)

RECORDED = Path(__file__).resolve().parents[1] / "tests" / "recorded" / "h200-sglang-0.5.16"
#: What the loop looks for: the reader's own patterns, as one alternation.
BATCH = r"(?:Decode|Prefill) batch, .*?#running-req: \d+"
OTHERS = (
    r"server_args=", r"max_total_num_tokens=\d+", r"The server is fired up", r"Memory pool end\. avail mem=", r"Load weight begin",
    r"hit an exception", r"Received sigquit", r"crashed with exit code", r"out of memory", r"atchdog timeout", r"NaN ", r"Health check failed",
)  # fmt: skip


def alternation() -> re.Pattern[str]:
    """One pattern with every pattern that the reader would use, names of groups removed."""
    rows = [ACCEPT, DISABLED, DSV4, GRAPH, GRAPH_FAILED, KV_LINE, LOAD_END, MAMBA_LINE, RETRACT, SWA_LINE, USING_DTYPE]
    texts = [BATCH, *OTHERS, *(p.pattern for p in rows), *(p.pattern for _, p, _ in BACKEND_ROWS)]
    return re.compile("|".join(f"(?:{re.sub(r'[(][?]P<[a-z_0-9]+>', '(?:', text)})" for text in texts))


def make(path: Path, mib: int) -> None:
    """Write a log of about `mib` MiB."""
    lines = (RECORDED / "m1_nextn.log").read_bytes().split(b"\n")
    ready = next(i for i, line in enumerate(lines) if b"fired up and ready" in line)
    body = [line for line in lines[ready + 1 :] if b" batch" in line or b"HTTP/1.1" in line]
    other = [line for line in lines[:ready] if line and b"server_args" not in line and len(line) < 400]
    chance = random.Random(7)
    with path.open("wb") as out:
        out.write(b"\n".join(lines[: ready + 1]) + b"\n")
        written, n = out.tell(), 0
        while written < mib << 20:
            block: list[bytes] = []
            for line in body:
                n += 1
                if b"Decode batch" in line:
                    line = re.sub(
                        rb"throughput \(token/s\): [\d.]+",
                        b"throughput (token/s): %.2f" % chance.uniform(20, 4000),
                        line,
                    )
                    block.append(line.replace(b"] Decode", b" DP1 TP1] Decode"))
                block.append(line)
                if n % 997 == 0:
                    block.append(chance.choice(other))
                if n % 5003 == 0:
                    block.append(
                        b"[2026-11-29 13:06:28] KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_tokens_gained: 512, #new_token_ratio: 0.5 -> 0.9"
                    )
            data = b"\n".join(block) + b"\n"
            out.write(data)
            written += len(data)


def measure(name: str, what: str, path: Path) -> float:
    """CPU seconds of one way to read the file, in a process of its own."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, __file__, "--run", what, "--file", str(path)], check=True)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{name:30s} {seconds:7.1f} s wall {cpu:7.1f} s CPU {path.stat().st_size / 1e6 / cpu:7.0f} MB per CPU second")
    return cpu


def main() -> None:
    """Make the file, read it three ways, remove it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--run")
    parser.add_argument("--file", type=Path)
    args = parser.parse_args()
    if args.run == "loop":
        pattern = alternation()
        with args.file.open(encoding="utf-8", errors="replace") as handle:
            found = 0
            for line in handle:
                if pattern.search(line):
                    found += 1
        print(f"    lines found: {found}")
        return
    if args.run == "read_log":
        with args.file.open("rb") as handle:
            log = read_log(lines_of(handle.read))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"    decode lines {log.batches.decode_lines}, retractions {log.retractions}, series {len(log.batches.series)}"
        )
        print(f"    peak memory {peak:.0f} MB")
        return
    with tempfile.TemporaryDirectory(prefix="log_speed_") as folder:
        path = Path(folder) / "server.log"
        make(path, args.mib)
        print(f"{path.stat().st_size / (1 << 30):.3f} GiB, {sum(1 for _ in path.open('rb'))} lines")
        ours = measure("read_log", "read_log", path)
        loop = measure("bare loop, one alternation", "loop", path)
        start = time.perf_counter()
        subprocess.run(
            ["grep", "-cE", "Decode batch|Prefill batch|KV Cache is allocated|hit an exception", str(path)], check=False
        )
        print(f"{'grep -cE, four words':38s} {time.perf_counter() - start:8.1f} s")
        print(f"read_log / bare loop, CPU time = {ours / loop:.2f} (target: at most 2)")


if __name__ == "__main__":
    main()
