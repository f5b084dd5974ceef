"""What the hardware would allow: decoding reads every active weight once a step, and each sequence's KV cache.

A lower bound on time is an upper bound on throughput; compute, collectives and launch overhead come on top, so the
ceiling is never reached. Source: the memory-bound decode model (arithmetic intensity below the machine's balance point).
"""

from __future__ import annotations

from lib.records import Record


class DecodeCeiling(Record):
    """Bytes a decode step must read, and the throughput that bandwidth alone would allow."""

    concurrency: int
    weight_bytes: int
    kv_bytes: int
    bandwidth_bytes_per_s: float
    step_s: float
    output_tokens_per_s: float


def decode_ceiling(
    weight_bytes: int, kv_bytes_per_token: int, context_tokens: float, concurrency: int, bandwidth_bytes_per_s: float
) -> DecodeCeiling:
    """The decode throughput at which memory bandwidth would be used up.

    Args:
        weight_bytes: bytes of weights that one step reads, on one device.
        kv_bytes_per_token: of one device.
        context_tokens: mean context of a sequence while it decodes.
        concurrency: sequences that share a step.
        bandwidth_bytes_per_s: of one device.

    Example: 269 MB of weights, 23,040 B a token, 288 tokens, C=1, 10 GB/s: 36.3 tok/s.
    """
    if min(weight_bytes, concurrency) < 1 or bandwidth_bytes_per_s <= 0 or min(kv_bytes_per_token, context_tokens) < 0:
        raise ValueError("weights, concurrency and bandwidth are positive; KV bytes and context are not negative")
    kv = int(kv_bytes_per_token * context_tokens * concurrency)
    step = (weight_bytes + kv) / bandwidth_bytes_per_s
    return DecodeCeiling(
        concurrency=concurrency,
        weight_bytes=weight_bytes,
        kv_bytes=kv,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        step_s=step,
        output_tokens_per_s=concurrency / step,
    )
