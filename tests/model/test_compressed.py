"""DeepSeek-V4's cost per token of full context, against what public SGLang logs print."""

from __future__ import annotations

from typing import Any

import pytest

from lib.errors import BadInput, UnknownArchitecture
from lib.model.checkpoint import checkpoint_from_configs
from lib.model.compressed import bytes_per_full_token
from lib.model.memory import kv_bytes_per_token

FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0],
    "head_dim": 512,
    "index_head_dim": 128,
    "num_hidden_layers": 43,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
}
PRO = FLASH | {"compress_ratios": [128, 128, *([4, 128] * 29), 4, 0], "num_hidden_layers": 61}


@pytest.mark.parametrize(
    ("config", "version", "ratio", "speculative", "logged"),
    [
        (FLASH, "0.5.15.post1", 0.1, False, 7705.45),  # NPU logs of 2026-08-10, TP4 and DP4
        (PRO, "0.5.15", 0.15, False, 13735.04),  # a public reading of pool_configurator.py with its log
        (FLASH, "0.5.12", 0.1, False, 15955.85),  # 8 x 96 GB, 2026-05-15
        (FLASH, "0.5.11", 0.8, True, 176983.05),  # sglang#25118, 4x MI300X
        (PRO, "0.5.12", 0.1, False, 23749.84),  # sglang#24523, DP8 EP8
    ],
)
def test_logged(config: dict[str, Any], version: str, ratio: float, speculative: bool, logged: float) -> None:
    """To the last digit that the log prints."""
    cost = bytes_per_full_token(config, version, swa_full_tokens_ratio=ratio, speculative=speculative)
    assert cost is not None and cost.bytes_per_full_token == logged


@pytest.mark.parametrize("version", ["0.5.13", "0.5.14", "0.5.18", "0.5.23"])
def test_releases_that_nobody_read_are_not_guessed(version: str) -> None:
    assert bytes_per_full_token(FLASH, version) is None


def test_mtp_grows_the_cost_of_0515() -> None:
    """One draft layer beside the target's, and states for twice the tokens."""
    plain, drafted = (bytes_per_full_token(FLASH, "0.5.15", speculative=s) for s in (False, True))
    assert plain and drafted and drafted.bytes_per_full_token > plain.bytes_per_full_token * 44 / 43


@pytest.mark.parametrize("change", [{"sliding_window": 0}, {"head_dim": None}, {"compress_ratios": [4]}, {"x": 1}])
def test_broken_configurations(change: dict[str, Any]) -> None:
    broken = {
        k: v for k, v in (FLASH | change).items() if v is not None and not (k == "index_head_dim" and "x" in change)
    }
    with pytest.raises(BadInput):
        bytes_per_full_token(broken, "0.5.15")


def test_the_refusal_says_why_and_what_is_known() -> None:
    """The pools are not predicted; the number that the log will print is told."""
    with pytest.raises(UnknownArchitecture) as refused:
        kv_bytes_per_token(checkpoint_from_configs(FLASH), 1, "bf16")
    assert "7705.45 on 0.5.15" in str(refused.value) and "five pools" in str(refused.value)
