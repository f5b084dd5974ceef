"""What a machine's CPUs can do at most: read bandwidth and float32 products, all cores at once.

Runs by itself too (`python -m lib.load.machine` prints one JSON object), on a host whose Python has numpy.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import sys
import time
from typing import Any


def measured() -> dict[str, Any]:
    """Bytes a second that all cores read together, and float32 FLOP/s of a matrix product.

    Bandwidth: each core sums 256 MB of its own, all at the same time, best of five. Products: a float32 matrix product
    of 2048 x 2048 by numpy's BLAS, best of three; kernels in 16 bits may be faster where the CPU has them.
    """
    import numpy as np

    cores = len(os.sched_getaffinity(0))
    blocks = [np.ones(32 * 1024 * 1024, dtype=np.float64) for _ in range(cores)]
    best = 0.0
    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        for _ in range(5):
            began = time.perf_counter()
            list(pool.map(np.sum, blocks))
            best = max(best, sum(b.nbytes for b in blocks) / (time.perf_counter() - began))
    square = np.ones((2048, 2048), dtype=np.float32)
    shortest = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        square @ square
        shortest = min(shortest, time.perf_counter() - began)
    return {
        "read_bytes_per_s": best, "threads": cores, "bytes": sum(b.nbytes for b in blocks),
        "flops_per_s": 2 * 2048**3 / shortest, "product": "float32 2048 x 2048, numpy",
    }  # fmt: skip


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measured()) + "\n")
