"""Pools that real servers made, predicted from what their logs give (tests/data/memory/README.md)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lib.model.checkpoint import checkpoint_from_configs
from lib.model.memory import (
    PoolPrediction,
    explain_pool,
    kv_bytes_per_token,
    predict_pools,
    state_bytes_per_slot,
    state_pool_gib,
)
from tests.model.checkpoint_files import HF_FP8_KV, SMOLLM2, TINY_HYBRID, TINY_LLAMA

SERVERS: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data/memory/recorded_pools.json").read_text())
NVFP4_KV8 = {
    "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["*"]}
}


def checkpoint_of(name: str) -> Any:
    if "smollm2" in name:
        return checkpoint_from_configs(SMOLLM2)
    if "h200-h1" in name:
        return checkpoint_from_configs(TINY_LLAMA, HF_FP8_KV if "L0" not in name else None)
    return checkpoint_from_configs(TINY_HYBRID, None if "/m1" in name else NVFP4_KV8)


def numbers(lines: list[str], pattern: str) -> list[float]:
    return [float(m[1]) for line in lines for m in [re.search(pattern, line)] if m]


def predicted(server: dict[str, Any], **changes: Any) -> PoolPrediction:
    args, lines = server["args"], server["lines"]
    inputs: dict[str, Any] = {
        "tp": args["tp_size"],
        "kv_cache_dtype": args["kv_cache_dtype"],
        "sglang_version": server["sglang_version"],
        "pre_load_gib": numbers(lines, r"Load weight begin\. avail mem=([\d.]+)")[0],
        "available_gib": numbers(lines, r"Load weight end.*avail mem=([\d.]+)")[-1],
        "mem_fraction_static": args["mem_fraction_static"],
        "max_total_tokens": args["max_total_tokens"],
        "max_running_requests": args["max_running_requests"],
        "page_size": args["page_size"] or 1,
        "speculative_algorithm": args["speculative_algorithm"],
        "speculative_num_draft_tokens": args["speculative_num_draft_tokens"],
        "speculative_draft_model_path": args["speculative_draft_model_path"],
        "mamba_strategy": args["mamba_radix_cache_strategy"] or None,
        "disable_radix_cache": args["disable_radix_cache"],
        "platform": "cpu" if args["device"] == "cpu" else "cuda",
        "context_length": 32768 if "/m" in server["server"] else None,
    }
    return predict_pools(checkpoint_of(server["server"]), **(inputs | changes))


@pytest.mark.parametrize("server", SERVERS, ids=[s["server"] for s in SERVERS])
def test_tokens_are_within_one_percent_of_the_servers_own(server: dict[str, Any]) -> None:
    """max_total_num_tokens is predicted within 1% from free memory, fraction and flags."""
    pools = [
        m
        for line in server["lines"]
        if (
            m := re.search(
                r"KV Cache is allocated.*dtype: torch\.(\w+), "
                r"#tokens: (\d+)",
                line,
            )
        )
    ]
    found = predicted(server)
    assert found.kv_cache_dtype == pools[0][1]
    assert found.max_total_num_tokens == pytest.approx(int(pools[0][2]), rel=0.01)


@pytest.mark.parametrize("server", SERVERS, ids=[s["server"] for s in SERVERS])
def test_sizes_are_the_logs(server: dict[str, Any]) -> None:
    """K and V of the server's own token count come out as logged, to the log's rounding; so does the draft's pool."""
    pools = [
        (int(m[1]), float(m[2]), float(m[3]))
        for line in server["lines"]
        if (m := re.search(r"#tokens: (\d+), K size: ([\d.]+) GB, V size: ([\d.]+) GB", line))
    ]
    layout = checkpoint_of(server["server"])
    dtype = predicted(server).kv_cache_dtype
    kv = kv_bytes_per_token(layout, 1, dtype, draft_layers=1)
    for (tokens, k, v), per_token in zip(pools, (kv.per_gpu, kv.draft_per_gpu), strict=False):
        assert k == pytest.approx(tokens * per_token / 2 / 2**30, abs=0.0051)
        assert v == pytest.approx(tokens * per_token / 2 / 2**30, abs=0.0051)


@pytest.mark.parametrize("server", [s for s in SERVERS if "/m" in s["server"]], ids=lambda s: s["server"])
def test_state_pool_is_the_logs(server: dict[str, Any]) -> None:
    """Slots, state size, scratch and running requests follow the server's, within 1%; the pool has one padding slot."""
    line = next(line for line in server["lines"] if "Mamba Cache" in line)
    slots = int(numbers([line], r"max_mamba_cache_size: (\d+)")[0])
    found, state = predicted(server), state_bytes_per_slot(checkpoint_of(server["server"]))
    assert state is not None
    assert found.max_mamba_cache_size == pytest.approx(slots, rel=0.01)
    assert state_pool_gib(state.ssm, slots) == pytest.approx(
        numbers([line], r" ssm_state size: ([\d.]+)GB")[0], abs=0.0051
    )
    assert state_pool_gib(state.conv, slots) == pytest.approx(
        numbers(
            [line],
            r" conv_state size: "
            r"([\d.]+)GB",
        )[0],
        abs=0.0051,
    )
    if scratch := numbers([line], r"intermediate_ssm_state_cache size: ([\d.]+)GB"):
        assert found.spec_scratch_gib == pytest.approx(scratch[0], abs=0.03)
    running = numbers(server["lines"], r"max_running_requests=(\d+)")
    if running:
        assert found.max_running_requests == pytest.approx(running[0], rel=0.01)


def test_an_unbudgeted_draft_is_what_the_server_did() -> None:
    """NEXTN on Qwen3.5 without a draft path: charging the draft's layer, as for a path, would be off by a third."""
    server = next(s for s in SERVERS if s["server"].endswith("m1_nextn"))
    assert predicted(server).max_total_num_tokens == pytest.approx(7_880_505, rel=0.01)
    charged = predicted(server, speculative_draft_model_path="DRAFT").max_total_num_tokens
    assert charged == pytest.approx(7_880_505 * 2 / 3, rel=0.01)


def test_the_dtype_of_a_recorded_pool_follows_from_its_size() -> None:
    """The inverse: tokens and K/V sizes of each server decide bfloat16 or an 8-bit cache."""
    for server in SERVERS:
        line = next(line for line in server["lines"] if "KV Cache" in line)
        match = re.search(r"dtype: torch\.(\w+), #tokens: (\d+), K size: ([\d.]+) GB, V size: ([\d.]+) GB", line)
        assert match
        found = explain_pool(checkpoint_of(server["server"]), int(match[2]), float(match[3]), float(match[4]))
        if float(match[3]) > 0.1:
            assert found.kv_cache_dtype is not None
            assert match[1].startswith(found.kv_cache_dtype)
