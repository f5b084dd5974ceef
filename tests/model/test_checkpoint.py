"""lib.model.checkpoint: reads small files, headers and scalar scales; refuses everything else with one message."""

from __future__ import annotations

import json
import math
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lib.errors import BadInput, UnreadableFile, WorkbookError
from lib.model.checkpoint import (
    checkpoint_from_configs,
    context_length,
    model_fingerprint,
    read_checkpoint,
    read_json,
    read_safetensors_header,
    scalar_value,
)
from tests.model.checkpoint_files import (
    HF_FP8_KV,
    SMOLLM2,
    TINY_LLAMA,
    bf16,
    safetensors_bytes,
    write_checkpoint,
    zeros,
)

WEIGHT = {"model.layers.0.self_attn.q_proj.weight": zeros("BF16", [4, 8])}


GOOD = safetensors_bytes(WEIGHT)


def scales(k: tuple[str, bytes], v: tuple[str, bytes], shape: list[int] | None = None) -> dict[str, Any]:
    size = [] if shape is None else shape
    return {
        "model.layers.0.self_attn.k_proj.k_scale": (k[0], size, k[1]),
        "model.layers.0.self_attn.v_proj.v_scale": (v[0], size, v[1]),
    }


def test_reads_a_folder(tmp_path: Path) -> None:
    """Counts, dtypes, bytes, scale names and values, context, chat template and generation config come from small
    reads.
    """
    shard = safetensors_bytes(WEIGHT | scales(("F32", struct.pack("<f", 0.05)), ("BF16", bf16(0.5))))
    folder = write_checkpoint(
        tmp_path / "m", TINY_LLAMA, {"model.safetensors": shard}, hf_quant_config__json=HF_FP8_KV,
        generation_config__json={"temperature": 0.7}, tokenizer_config__json={"chat_template": "{{ messages }}"},
    )  # fmt: skip
    found = read_checkpoint(folder)
    assert found.scales is not None
    # 4 x 8 bf16 weights + one F32 and one BF16 scalar = 64 + 4 + 2 bytes
    assert (found.shards, found.tensors, found.weight_bytes) == (1, 3, 70)
    assert found.parameters_by_dtype == {"BF16": 33, "F32": 1}
    assert found.scales.k_values == (pytest.approx(0.05),)
    assert found.scales.v_values == (0.5,)
    assert found.scales.name_form is not None
    assert "model.layers.N.self_attn.k_proj.k_scale" in found.scales.name_form
    assert found.scales.all_one is False
    assert found.chat_template == "tokenizer_config.json chat_template"
    assert found.generation_config == {"temperature": 0.7}
    assert (found.vocab_size, found.context_length) == (8192, 8192)
    assert found.quantization.kv_declared == "fp8"


@pytest.mark.parametrize(
    ("dtype", "raw", "value"),
    [
        ("F64", struct.pack("<d", 0.02), 0.02),
        ("F32", struct.pack("<f", 1.5), 1.5),
        ("F16", struct.pack("<e", 0.75), 0.75),
        ("BF16", bf16(2.0), 2.0),
        ("F8_E4M3", b"\x38", 1.0),  # exponent 7 = bias 7, mantissa 0
        ("F8_E4M3", b"\x7e", 448.0),  # the largest: (1 + 6/8) * 2**8
        ("F8_E5M2", b"\x3c", 1.0),  # exponent 15 = bias 15
        ("F8_E5M2", b"\x7b", 57344.0),  # the largest: (1 + 3/4) * 2**15
        ("F8_E8M0", b"\x80", 2.0),  # 2**(128 - 127)
        ("U8", b"\x07", 7.0),
    ],
)
def test_scalar_values(dtype: str, raw: bytes, value: float) -> None:
    """Every dtype a scale is stored in is read."""
    assert scalar_value(dtype, raw) == value


def test_scalar_values_that_are_none() -> None:
    """An unknown dtype and a cut-off value are None, never 0."""
    assert scalar_value("F6_E3M2", b"\0\0\0\0") is None
    assert scalar_value("F32", b"\0\0") is None
    assert math.isnan(scalar_value("F8_E4M3", b"\x7f") or 0.0)


def test_scales_that_are_no_scalars_are_named_not_dropped(tmp_path: Path) -> None:
    """A per-channel scale is reported as present but unread, and so is a NaN."""
    shard = safetensors_bytes(
        scales(("F32", struct.pack("<2f", 1.0, 1.0)), ("F32", struct.pack("<2f", 1.0, 1.0)), [2])
        | {"model.layers.1.self_attn.attn.k_scale": ("F32", [1], struct.pack("<f", math.nan))}
    )
    found = read_checkpoint(write_checkpoint(tmp_path / "m", TINY_LLAMA, {"model.safetensors": shard})).scales
    assert found is not None
    assert (found.k_count, found.v_count, found.k_values) == (2, 1, ())
    assert len(found.unread) == 3
    assert found.all_one is None


def test_no_scales_is_not_unknown(tmp_path: Path) -> None:
    """A checkpoint without scale tensors has none; one without weights doesn't say."""
    with_weights = write_checkpoint(tmp_path / "a", TINY_LLAMA, {"model.safetensors": safetensors_bytes(WEIGHT)})
    assert (found := read_checkpoint(with_weights).scales) is not None
    assert not found.present
    assert found.all_one is None
    assert read_checkpoint(write_checkpoint(tmp_path / "b", TINY_LLAMA)).scales is None


@pytest.mark.parametrize(
    ("name", "k", "v"),
    [
        ("model.layers.3.self_attn.k_proj.k_scale", 1, 0),
        ("model.layers.3.self_attn.v_scale", 0, 1),
        ("backbone.layers.3.mixer.v_proj.v_scale", 0, 1),
        ("model.layers.3.self_attn.attn.k_scale", 1, 0),
        ("model.layers.3.self_attn.k_proj.output_scale", 1, 0),
        ("model.layers.3.self_attn.kv_scale", 1, 1),
        ("model.layers.3.mlp.down_proj.output_scale", 0, 0),
    ],
)
def test_names_of_scales(tmp_path: Path, name: str, k: int, v: int) -> None:
    """ModelOpt's, compressed-tensors', Quark's and the old shared name are all found."""
    shard = safetensors_bytes({name: ("F32", [], struct.pack("<f", 0.25))})
    found = read_checkpoint(write_checkpoint(tmp_path / "m", TINY_LLAMA, {"model.safetensors": shard})).scales
    assert found is not None
    assert (found.k_count, found.v_count) == (k, v)
    assert (found.k_values, found.v_values) == ((0.25,) * k, (0.25,) * v)


def test_numbered_shards_without_an_index(tmp_path: Path) -> None:
    """File names say how many there must be; Mistral's second copy is not counted."""
    shards = {f"model-{i:05d}-of-00003.safetensors": GOOD for i in (1, 3)}
    folder = write_checkpoint(tmp_path / "m", TINY_LLAMA, shards)
    with pytest.raises(UnreadableFile, match="1 of 3 shards are missing.*00002-of-00003"):
        read_checkpoint(folder)
    twice = write_checkpoint(tmp_path / "t", TINY_LLAMA, {"model.safetensors": GOOD, "consolidated.safetensors": GOOD})
    assert read_checkpoint(twice).weight_bytes == 64
    claim = write_checkpoint(tmp_path / "c", TINY_LLAMA, {"model-1-of-999999.safetensors": GOOD})
    with pytest.raises(UnreadableFile, match="9999 of 10000 shards"):
        read_checkpoint(claim)


def test_input_scales_are_no_kv_scales(tmp_path: Path) -> None:
    """Weight, input and output scales of quantized layers are not counted as k/v scales."""
    names = ["input_scale", "weight_scale", "weight_scale_2", "q_scale"]
    tensors = {f"model.layers.0.self_attn.k_proj.{name}": ("F32", [], struct.pack("<f", 2.0)) for name in names}
    folder = write_checkpoint(tmp_path / "m", TINY_LLAMA, {"model.safetensors": safetensors_bytes(tensors)})
    assert (found := read_checkpoint(folder).scales) is not None
    assert not found.present


def sharded(folder: Path, count: int, per_shard: int) -> Path:
    weight_map, shards = {}, {}
    for shard in range(count):
        name = f"model-{shard + 1:05d}-of-{count:05d}.safetensors"
        tensors = {
            f"model.layers.{shard}.mlp.experts.{i}.up_proj.weight": zeros("U8", [2, 2]) for i in range(per_shard)
        }
        tensors |= {f"model.layers.{shard}.self_attn.k_proj.k_scale": ("F32", [], struct.pack("<f", 1.0))}
        weight_map |= dict.fromkeys(tensors, name)
        shards[name] = safetensors_bytes(tensors)
    return write_checkpoint(folder, TINY_LLAMA, shards, model__safetensors__index__json={"weight_map": weight_map})


def test_a_hundred_shards_take_under_two_seconds(tmp_path: Path) -> None:
    """120 shards with 72,000 tensors: only headers are read, so the size of the weights costs neither time nor memory.

    Processor time, since other work on the machine is not ours; 369,000 tensors (512 experts in NVFP4) took 1.3 s
    of it.
    """
    folder = sharded(tmp_path / "big", 120, 600)
    # a sparse tail of 1 GiB in each of three shards stands for weights: reading them would show in time and memory
    for name in sorted(p.name for p in folder.glob("*.safetensors"))[:3]:
        with (folder / name).open("r+b") as file:
            file.truncate(1 << 30)
    start = time.process_time()
    found = read_checkpoint(folder)
    seconds = time.process_time() - start
    assert found.tensors == 120 * 601
    assert found.scales is not None
    assert found.scales.all_one is True
    assert seconds < 2


def test_missing_shards_are_all_counted(tmp_path: Path) -> None:
    """One message says how many shards are missing and which are broken."""
    folder = sharded(tmp_path / "m", 6, 2)
    (folder / "model-00002-of-00006.safetensors").unlink()
    (folder / "model-00005-of-00006.safetensors").unlink()
    (folder / "model-00003-of-00006.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(UnreadableFile, match="2 of 6 shards are missing.*00002.*00005.*00003"):
        read_checkpoint(folder)
    with pytest.raises(UnreadableFile, match="2 of 6 shards"):
        model_fingerprint(folder)


def test_an_index_of_another_download_is_refused(tmp_path: Path) -> None:
    """A tensor that the index puts into a shard without it is named."""
    folder = sharded(tmp_path / "m", 2, 2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.embed_tokens.weight"] = "model-00001-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnreadableFile, match="model.embed_tokens.weight"):
        read_checkpoint(folder)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", ".hidden.safetensors", "model.bin"])
def test_an_index_must_not_point_elsewhere(tmp_path: Path, name: str) -> None:
    """Shard names are file names of the folder."""
    folder = write_checkpoint(tmp_path / "m", TINY_LLAMA, model__safetensors__index__json={"weight_map": {"a": name}})
    with pytest.raises(UnreadableFile, match="file names of this folder"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "0 bytes"),
        (b"\x01\x00", "2 bytes"),
        (struct.pack("<Q", 1 << 62) + b"{}", "header length"),
        (struct.pack("<Q", 200_000_000) + b"{}", "header length"),
        (struct.pack("<Q", 0), "header length"),
        (GOOD[:40], "header length"),
        (GOOD[:-1], "cut short"),
        (struct.pack("<Q", 4) + b"[1]\n", "JSON object"),
        (struct.pack("<Q", 4) + b"\xff\xfe{}", "safetensors header"),
        (struct.pack("<Q", 12) + b'{"a": NaN}  ', "expected value"),
        (struct.pack("<Q", 10) + b'{"a": [1]}', "dtype, shape and data_offsets"),
        (struct.pack("<Q", 16) + b'{"a": "\\ud800"} ' [:16], "header"),
    ],
)  # fmt: skip
def test_broken_headers(tmp_path: Path, raw: bytes, words: str) -> None:
    """Truncated, absurd and foreign headers end in one UnreadableFile that says what was found."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(UnreadableFile, match=words):
        read_safetensors_header(path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0, 1 << 60]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": 3, "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]},
    ],
)
def test_impossible_entries(tmp_path: Path, entry: dict[str, Any]) -> None:
    """Sizes that contradict each other or the file are refused."""
    text = json.dumps({"a": entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 4)
    with pytest.raises(UnreadableFile):
        read_safetensors_header(path)


def test_an_absurd_header_length_takes_no_memory(tmp_path: Path) -> None:
    """A sparse 200 MB file that claims a header of all of it is refused before it is read."""
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 199_999_000))
        file.truncate(200_000_000)
    tracemalloc.start()
    with pytest.raises(UnreadableFile, match="header length"):
        read_safetensors_header(path)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": 1e999}',
        b"\x80\x81",
        b'{"a": "\\ud800"}',
        b"[" * 100_000,
    ],
)
def test_broken_json(tmp_path: Path, raw: bytes) -> None:
    """JSON that isn't an object of finite numbers is one message, not a traceback."""
    folder = write_checkpoint(tmp_path / "m", TINY_LLAMA)
    for name in ("config.json", "hf_quant_config.json", "generation_config.json", "model.safetensors.index.json"):
        (folder / name).write_bytes(raw)
        with pytest.raises(UnreadableFile, match=name):
            read_checkpoint(folder)
        write_checkpoint(folder, TINY_LLAMA)
        (folder / name).unlink()
        write_checkpoint(folder, TINY_LLAMA)


def test_crlf_and_byte_order_mark_are_fine(tmp_path: Path) -> None:
    """A file written on Windows is still JSON."""
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(SMOLLM2, indent=1).replace("\n", "\r\n").encode())
    assert read_json(path) == SMOLLM2


@pytest.mark.parametrize("kind", ["nothing", "file", "empty folder", "nul"])
def test_not_a_checkpoint_folder(tmp_path: Path, kind: str) -> None:
    """A file, an empty folder or nothing at all: the message says which."""
    path = tmp_path / "x"
    if kind == "file":
        path.write_text("x")
    elif kind == "empty folder":
        path.mkdir()
    with pytest.raises(UnreadableFile, match="expected a checkpoint folder"):
        read_checkpoint(str(path) + ("\0" if kind == "nul" else ""))


def test_config_that_names_no_architecture(tmp_path: Path) -> None:
    """Without `architectures` there is nothing to compute from."""
    with pytest.raises(BadInput, match="architectures"):
        read_checkpoint(write_checkpoint(tmp_path / "m", {"hidden_size": 8}))


def test_fingerprint(tmp_path: Path) -> None:
    """The fingerprint follows config, headers and sizes, and leaves out times; it says what the files are."""
    folder = write_checkpoint(tmp_path / "m", TINY_LLAMA, {"model.safetensors": GOOD})
    first = model_fingerprint(folder)
    (folder / "model.safetensors").touch()
    again = model_fingerprint(folder)
    assert first["sha256"] == again["sha256"]
    assert first["shards"]["model.safetensors"]["mtime_ns"] <= again["shards"]["model.safetensors"]["mtime_ns"]
    assert first["shards"]["model.safetensors"]["size"] == len(GOOD)
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA | {"rope_theta": 5.0}))
    assert model_fingerprint(folder)["sha256"] != first["sha256"]
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    assert model_fingerprint(folder)["sha256"] == first["sha256"]
    other = {"model.layers.0.self_attn.q_proj.weight": zeros("BF16", [8, 4])}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(other))
    assert model_fingerprint(folder)["sha256"] != first["sha256"]


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"max_position_embeddings": 8192, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 32768),
        # Llama 3.1 and any RoPE that names its original length already say the long one
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        ({}, None),
    ],
)
def test_context_length(config: dict[str, Any], length: int | None) -> None:
    """RoPE factors multiply as SGLang's get_context_length does."""
    assert context_length(config) == length


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    raw=st.one_of(
        st.binary(max_size=400),
        st.builds(
            lambda cut, byte, at: _mutated(cut, byte, at), st.integers(0, 400), st.integers(0, 255), st.integers(0, 400)
        ),
    )
)
def test_fuzzed_headers_never_trace_back(tmp_path: Path, raw: bytes) -> None:
    """Random bytes and damaged files: a header or UnreadableFile, nothing else."""
    path = tmp_path / "fuzz.safetensors"
    path.write_bytes(raw)
    try:
        header = read_safetensors_header(path)
    except UnreadableFile:
        return
    assert all(tensor.end <= len(raw) for tensor in header.tensors.values())


def _mutated(cut: int, byte: int, at: int) -> bytes:
    good = bytearray(safetensors_bytes(WEIGHT | scales(("F32", b"\0\0\x80\x3f"), ("BF16", b"\x80\x3f"))))
    good[at % len(good)] = byte
    return bytes(good[: max(1, len(good) - cut)])


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = """
    num_hidden_layers hidden_size num_attention_heads num_key_value_heads head_dim v_head_dim layer_types
    text_config kv_lora_rank qk_rope_head_dim index_topk index_head_dim hybrid_layer_pattern
    hybrid_override_pattern linear_attn_config quantization_config dtype torch_dtype vocab_size rope_scaling
    max_position_embeddings vision_config full_attention_interval n_groups
"""
ARCHITECTURES = """
    LlamaForCausalLM Qwen3_5MoeForConditionalGeneration DeepseekV32ForCausalLM Gemma4ForConditionalGeneration
    MiMoV2FlashForCausalLM NemotronHForCausalLM KimiK3ForConditionalGeneration MiniMaxM3SparseForCausalLM
    FalconH1ForCausalLM GptOssForCausalLM Nobody
"""
QUANT_FIELDS = """
    quant_method quant_algo kv_cache_scheme kv_cache_quant_algo config_groups ignore producer quantized_layers
    bits quantization
"""
KEYS, NAMES = st.sampled_from(FIELDS.split()), st.sampled_from(ARCHITECTURES.split())
QUANT = st.fixed_dictionaries({}, optional=dict.fromkeys(QUANT_FIELDS.split(), JSON))


@settings(max_examples=120, deadline=None)
@given(name=NAMES, fields=st.dictionaries(KEYS, JSON, max_size=8), quant=st.none() | QUANT, hf=st.none() | QUANT | JSON)
def test_fuzzed_configs_never_trace_back(name: str, fields: dict[str, Any], quant: Any, hf: Any) -> None:
    """Any JSON object as configuration: a Checkpoint, or one of our errors."""
    config = (
        SMOLLM2 | fields | {"architectures": [name]} | ({"quantization_config": quant} if quant is not None else {})
    )
    try:
        checkpoint_from_configs(config, hf if isinstance(hf, dict) else None)
    except WorkbookError as error:
        assert len(str(error)) < 1000
