"""What a token costs in DeepSeek-V4's compressed pools, on the releases whose formula is known. Pure.

Every layer keeps a sliding window; some keep one latent for 4 tokens (and an indexer key), some one for 128; both keep
compression states. SGLang counts all of it per token of full context (`bytes_per_full_token` in its log).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lib.errors import BadInput
from lib.model.facts import version_key
from lib.records import Record

_STATE_BYTES = 4  # SGLANG_DSV4_COMPRESS_STATE_DTYPE is float32 unless somebody sets it


class CompressedCost(Record):
    """Bytes per token of full context on one GPU (no rank shares them), and the layers that they come from."""

    bytes_per_full_token: float
    layers: int
    layers_4x: int
    layers_128x: int
    swa_full_tokens_ratio: float
    source: str


def bytes_per_full_token(
    config: Mapping[str, Any], sglang_version: str, *, swa_full_tokens_ratio: float = 0.1, speculative: bool = False
) -> CompressedCost | None:
    """The cost of one token of full context, or None for a release whose formula was not read and is in no known log.

    Args:
        config: config.json of a DeepSeek-V4 checkpoint.
        sglang_version: the release.
        swa_full_tokens_ratio: share of the sliding pool; SGLang sets 0.1 for this model.
        speculative: with MTP the compression states hold twice the tokens.

    Source: 0.5.15.post1 model_executor/pool_configurator.py DSV4PoolConfigurator; up to 0.5.12 from public logs of May
    2026 (15955.85 and 23749.84 without MTP; 176983.05 with MTP and ratio 0.8), 0.5.15's from those of August 2026.

    Raises:
        BadInput: the configuration lacks a field.

    Example: V4-Flash (43 layers, 21 of them 4x and 20 128x) costs 7705.45 bytes on 0.5.15 and 15955.85 on 0.5.12.
    """
    try:
        ratios = [int(ratio) for ratio in config["compress_ratios"]]
        latent, rope, index = (int(config[k]) for k in ("head_dim", "qk_rope_head_dim", "index_head_dim"))
        window, hidden = int(config["sliding_window"]), int(config["num_hidden_layers"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput("a DeepSeek-V4 config.json", str(error)[:80], "use the model's original config.json") from error
    if not 0 < swa_full_tokens_ratio <= 1 or window <= 0 or len(ratios) < hidden or hidden <= 0:
        raise BadInput(
            "a ratio in (0, 1], a sliding window, and a compress_ratio for each layer",
            f"{swa_full_tokens_ratio}, {window}, {len(ratios)} for {hidden}",
            "check the file",
        )
    release = version_key(sglang_version)
    if release <= (0, 5, 12):
        counted, states_128x, grown = ratios, (256 if speculative else 128) / window, 1.0
        source = "public logs of SGLang 0.5.11 and 0.5.12 development builds"
    elif release == (0, 5, 15):
        counted, states_128x = ratios[:hidden], 0.0
        grown = (hidden + 1) / hidden if speculative else 1.0
        source = "SGLang 0.5.15.post1 model_executor/pool_configurator.py DSV4PoolConfigurator"
    else:
        return None
    four, many = counted.count(4), counted.count(128)
    token = (latent - rope) + 2 * rope + 8
    key = index + index // 128 * 4
    ring = (16 if speculative else 8) / window
    per_token = (
        swa_full_tokens_ratio * token * len(counted)
        + token * four / 4
        + token * many / 128
        + key * four / 4
        + swa_full_tokens_ratio * ring * 4 * (latent + index) * _STATE_BYTES * four
        + swa_full_tokens_ratio * states_128x * 2 * latent * _STATE_BYTES * many
    )
    return CompressedCost(
        bytes_per_full_token=round(per_token * grown, 2),
        layers=len(counted),
        layers_4x=four,
        layers_128x=many,
        swa_full_tokens_ratio=swa_full_tokens_ratio,
        source=source,
    )
