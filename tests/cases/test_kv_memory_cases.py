"""The public kv_memory cases, leaf by leaf, and the same cases with numbers, ranks, paths and versions changed."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lib.model.memory import GIB
from tests.cases.map_kv_memory import answer

FOLDER = Path(__file__).parent / "kv_memory"
CASES: dict[str, dict[str, Any]] = {
    c["id"]: c for c in map(json.loads, (FOLDER / "cases.jsonl").read_text().splitlines())
}
#: Numbers that somebody printed wrongly; no function of ours has them as an answer.
NOT_OURS = {
    ("kv-qwen3.5-9b-tp2", "note_value_wrong"),
    ("kv-kimi-k3-kda", "LMCache_status"),
    ("kv-kimi-k3-kda", "ATOM_plugin_kb"),
}


def leaves(node: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in node.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


QUESTIONS = [
    (name, path, value)
    for name, case in CASES.items()
    for path, value in leaves(case["expect"])
    if (name, path[-1]) not in NOT_OURS
]


@pytest.mark.parametrize(("name", "path", "value"), QUESTIONS, ids=[f"{n}:{'.'.join(p)}" for n, p, _ in QUESTIONS])
def test_leaf(name: str, path: tuple[str, ...], value: Any) -> None:
    """Each leaf: whole numbers, booleans and words exactly, logged sizes to 1.2% (logs round; vLLM reports what it
    then doesn't fill).
    """
    found = dict(leaves(answer(CASES[name], FOLDER)))[path]
    assert type(found) is type(value) or isinstance(value, int | float)
    assert found == (pytest.approx(value, rel=0.012) if isinstance(value, float) else value)


def changed(name: str, tmp_path: Path, **fields: Any) -> tuple[dict[str, Any], Path]:
    """The case with its configuration's fields changed (a dotted name goes into a sub-configuration), under
    another path.
    """
    case = copy.deepcopy(CASES[name])
    shutil.copytree(FOLDER / "inputs", tmp_path / "elsewhere")
    given = case["input"]
    old = given["file"] if "file" in given else given["text"]["config"]
    config = json.loads((FOLDER / old).read_text())
    for field, value in fields.items():
        owner = config
        *parents, last = field.split("__")
        for parent in parents:
            owner = owner[parent]
        owner[last] = value
    new = "elsewhere/renamed config.json"
    (tmp_path / new).write_text(json.dumps(config))
    if "file" in given:
        given["file"] = new
    else:
        given["text"]["config"] = new
        if "hf_quant_config" in given["text"]:
            given["text"]["hf_quant_config"] = given["text"]["hf_quant_config"].replace("inputs", "elsewhere")
    return case, tmp_path


@pytest.mark.parametrize(
    ("layers", "heads", "dim"), [(32, 8, 128), (48, 8, 128), (32, 4, 128), (32, 2, 80), (7, 32, 64)]
)
def test_dense_follows_its_fields(tmp_path: Path, layers: int, heads: int, dim: int) -> None:
    """Bytes per token follow layers, KV heads and head_dim: layers * 2 * heads * dim * 2 B."""
    case, folder = changed("kv-llama31-8b", tmp_path, num_hidden_layers=layers, num_key_value_heads=heads, head_dim=dim)
    found = answer(case, folder)
    assert found["bytes_per_token"] == layers * 2 * heads * dim * 2
    assert found["attention_layers"] == layers


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_ranks_follow(tmp_path: Path, tp: int) -> None:
    """4 KV heads over tp ranks, at least one on each: 94 * 2 * max(1, 4 // tp) * 128 * 2 B."""
    case, folder = changed("kv-qwen3-235b-tp4", tmp_path)
    case["expect"] = {"tp": tp, "bytes_per_token_per_rank": 0}
    assert answer(case, folder)["bytes_per_token_per_rank"] == 94 * 2 * max(1, 4 // tp) * 128 * 2


@pytest.mark.parametrize("tp", [2, 4, 16])
def test_a_rank_count_in_the_question_follows(tmp_path: Path, tp: int) -> None:
    """The ranks that a leaf's name gives are the ones used, and MLA ignores them."""
    case, folder = changed("kv-minimax-m2.5-nvfp4", tmp_path)
    case["expect"] = {f"per_rank_tp{tp}_fp8": 0, f"per_rank_tp{tp}_bf16": 0}
    assert list(answer(case, folder).values()) == [62 * 2 * max(1, 8 // tp) * 128, 62 * 2 * max(1, 8 // tp) * 128 * 2]
    latent, folder = changed("kv-kimi-k2.5-mla-tp8", tmp_path / "b")
    latent["expect"] = {f"per_rank_tp{tp}": 0}
    assert answer(latent, folder) == {f"per_rank_tp{tp}": 70272}


@pytest.mark.parametrize(("lora", "rope", "layers"), [(512, 64, 61), (256, 32, 61), (512, 64, 30)])
def test_latent_follows(tmp_path: Path, lora: int, rope: int, layers: int) -> None:
    """(kv_lora_rank + qk_rope_head_dim) * layers * 2 B in the nested configuration."""
    case, folder = changed(
        "kv-kimi-k2.5-mla-tp8",
        tmp_path,
        text_config__kv_lora_rank=lora,
        text_config__qk_rope_head_dim=rope,
        text_config__num_hidden_layers=layers,
    )
    case["expect"] = {"bytes_per_token_bf16": 0}
    assert answer(case, folder)["bytes_per_token_bf16"] == (lora + rope) * layers * 2


def test_indexer_follows(tmp_path: Path) -> None:
    """An indexer of 256 takes 256 + 8 B; without index_topk there is none and FP8 latents are plain."""
    case, folder = changed("kv-deepseek-v32-indexer", tmp_path, index_head_dim=256)
    assert answer(case, folder)["indexer_bytes_per_token"] == 61 * 264
    case, folder = changed("kv-deepseek-v32-indexer", tmp_path / "b", index_topk=None)
    case["expect"] = {"total_bytes_per_token_fp8": 0, "indexer_bytes_per_token": 0}
    assert answer(case, folder) == {"total_bytes_per_token_fp8": 61 * 576}


def test_hybrid_follows(tmp_path: Path) -> None:
    """Twice as many full layers double the bytes; state follows heads and dims; another slot count another pool."""
    types = ["linear_attention", "full_attention"] * 32
    case, folder = changed(
        "kv-qwen-27b-gdn-fp8", tmp_path, text_config__layer_types=types, text_config__linear_num_value_heads=32
    )
    case["expect"]["log_check"] = {"slots": 100, "ssm_gib": 0.0, "conv_gib": 0.0}
    found = answer(case, folder)
    assert (found["kv_layers"], found["of_layers"], found["bytes_per_token_fp8"]) == (32, 64, 65536)
    assert found["state_bytes_per_slot"] == {
        "ssm_fp32": 32 * 32 * 128 * 128 * 4,
        "conv_bf16": 32 * (32 * 128 + 2 * 16 * 128) * 3 * 2,
    }
    assert found["log_check"]["ssm_gib"] == pytest.approx(101 * 32 * 32 * 128 * 128 * 4 / GIB, abs=0.005)


def test_facts_of_a_thread_follow() -> None:
    """Facts and log lines in the input: other ranks, heads and numbers give other answers."""
    case = copy.deepcopy(CASES["kv-qwen3.5-9b-tp2"])
    case["input"]["text"]["facts"] |= {"tp": 4, "ssm_dtype": "bfloat16"}
    case["input"]["text"]["log"] = [
        line.replace("327310", "654321").replace("186", "77") for line in case["input"]["text"]["log"]
    ]
    found = answer(case, FOLDER)
    # 8 layers * 2 * 1 head * 256 * 2 B; 24 layers * 8 heads * 128 * 128 * 2 B
    assert (found["bytes_per_token_per_rank"], found["ssm_bytes_per_slot_per_rank"]) == (8192, 24 * 8 * 128 * 128 * 2)
    assert (found["tokens"], found["slots"]) == (654321, 77)


def test_pattern_follows(tmp_path: Path) -> None:
    """Nemotron: the letters of the pattern are the layers; 2 KV heads on 1 rank are both there."""
    case, folder = changed("kv-nemotron3-nano-tp4", tmp_path, hybrid_override_pattern="M*E*-M")
    case["input"]["text"]["tp"] = 1
    case["expect"] = {
        "kv_layers": 0,
        "mamba_layers": 0,
        "bytes_per_token_per_rank_fp8": 0,
        "ssm_bytes_per_slot_per_rank_fp32": 0,
    }
    assert list(answer(case, folder).values()) == [2, 2, 2 * 2 * 2 * 128, 2 * 64 * 64 * 128 * 4]


def test_sliding_geometry_follows(tmp_path: Path) -> None:
    """Gemma 4: each kind of layer has its own heads and widths; null for the global ones means the plain ones."""
    case, folder = changed(
        "kv-gemma4-26b-swa", tmp_path, text_config__num_global_key_value_heads=4, text_config__global_head_dim=256
    )
    found = answer(case, folder)
    assert (found["full_bytes_per_token_bf16"], found["swa_bytes_per_window_token_bf16"]) == (
        5 * 2 * 4 * 256 * 2,
        204800,
    )
    case, folder = changed("kv-gemma4-26b-swa", tmp_path / "b", text_config__num_global_key_value_heads=None)
    assert answer(case, folder)["full_bytes_per_token_bf16"] == 5 * 2 * 8 * 512 * 2


def test_asymmetric_pattern_follows(tmp_path: Path) -> None:
    """MiMo: the pattern's ones are sliding; V may be wider than K."""
    case, folder = changed(
        "kv-mimo-v2-flash-asymmetric", tmp_path, hybrid_layer_pattern=[0, 1] * 24, swa_v_head_dim=256
    )
    found = answer(case, folder)["per_rank"]
    assert found == {
        "swa_k": 24 * 2 * 192 * 2,
        "swa_v": 24 * 2 * 256 * 2,
        "full_k": 24 * 192 * 2,
        "full_v": 24 * 128 * 2,
    }


def test_window_follows(tmp_path: Path) -> None:
    """A sequence at its window: window * sliding bytes."""
    case, folder = changed("kv-gpt-oss-120b", tmp_path, sliding_window=4096)
    assert answer(case, folder)["swa_bytes_per_sequence_at_window"] == 4096 * 36864


@pytest.mark.parametrize(
    ("scheme", "declared"),
    [
        ("FP8", "fp8"),
        ({"type": "float", "num_bits": 8}, "fp8"),
        ({"type": "int", "num_bits": 8}, "int8"),
        ("NVFP4", "nvfp4"),
    ],
)
def test_declared_form_follows(tmp_path: Path, scheme: Any, declared: str) -> None:
    """Object or string, whatever it says is what is declared."""
    case, folder = changed("kv-minimax-m2.5-nvfp4", tmp_path, quantization_config__kv_cache_scheme=scheme)
    assert answer(case, folder)["kv_dtype_declared"] == declared


def test_nothing_declared_is_none(tmp_path: Path) -> None:
    """Without a scheme the declaration is none, and without scales the answer is no."""
    case, folder = changed("kv-minimax-m2.5-nvfp4", tmp_path, quantization_config__kv_cache_scheme=None)
    case["expect"] = {"kv_dtype_declared": "", "checkpoint_has_kv_scales": True}
    assert answer(case, folder) == {"kv_dtype_declared": "none", "checkpoint_has_kv_scales": False}


def test_host_pool_follows() -> None:
    """Other layers, tokens and sizes in the two lines: bytes per token and unit follow; a size in GiB is
    recognised as such.
    """
    case = copy.deepcopy(CASES["kv-hicache-decimal-gb"])
    # 20 target layers and 2 draft layers of 2,048 B, 1,000,000 host tokens: 45.056e9 B; 100,000 device tokens: 3.81 GiB
    case["input"]["text"] = (
        "KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 100000, K 1.91 GB, V 1.91 GB\n"
        "Allocating kv hierarchical KV host pool: 1000000 tokens, 45.06 GB host memory, "
        "packed MTP KV layers: target_layers=20, draft_layers=2, total_layers=22."
    )
    found = answer(case, FOLDER)
    assert (found["host_pool_tokens"], found["bytes_per_token"]) == (1_000_000, 22 * 2048)
    assert found["unit_of_host_line"].startswith("decimal")
    assert found["layers"] == {"target": 20, "draft": 2}
    case["input"]["text"] = case["input"]["text"].replace("45.06", "41.96")
    assert answer(case, FOLDER)["unit_of_host_line"].startswith("GiB")


def test_a_log_alone() -> None:
    """Pool lines without a checkpoint: tokens, sizes and bytes per token of a latent pool, as the lines give them."""
    pool = "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 2454421, KV size: 160.63 GB"
    text = pool + "\nmax_total_num_tokens=2454421, x=1"
    expect = {"tokens": 0, "kv_gib": 0.0, "bytes_per_token": 0, "kv_dtype": "", "max_total_num_tokens": 0, "k_gib": 0.0}
    found = answer({"input": {"text": text}, "expect": expect}, FOLDER)
    assert found.pop("bytes_per_token") == pytest.approx(70272, rel=0.0001)
    assert found == {"tokens": 2454421, "kv_gib": 160.63, "kv_dtype": "bf16", "max_total_num_tokens": 2454421}


def test_a_wrong_observation_is_not_echoed() -> None:
    """Tokens that don't go with the logged size are corrected from it; a size that fits no dtype is left unanswered."""
    case = copy.deepcopy(CASES["kv-gemma4-26b-swa"])
    case["expect"]["log_check"]["full_tokens"] = 900_000
    assert answer(case, FOLDER)["log_check"]["full_tokens"] != 900_000
    odd = copy.deepcopy(CASES["kv-kimi-k2.5-mla-tp8"])
    odd["expect"] = {"tokens": 2454421, "kv_gib": 111.0}
    assert answer(odd, FOLDER) == {}
