"""lib.model.summary and `workbook inspect checkpoint`: one object, findings with levels, exit codes."""

from __future__ import annotations

import argparse
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from lib.cli import _inspect_checkpoint
from lib.errors import BadInput, UnknownArchitecture, UnreadableFile
from lib.model.checkpoint import checkpoint_from_configs
from lib.model.facts import ScaleTensors
from lib.model.summary import LEVELS, checkpoint_findings, checkpoint_summary
from tests.model.checkpoint_files import (
    HF_FP8_KV,
    ORIGIN,
    SMOLLM2,
    TINY_LLAMA,
    safetensors_bytes,
    write_checkpoint,
    zeros,
)


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    _inspect_checkpoint.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["checkpoint", *argv])
    return int(args.run(args))


def scaled(value: float) -> dict[str, bytes]:
    tensors = {"model.layers.0.self_attn.q_proj.weight": zeros("BF16", [2, 2])}
    tensors |= {
        f"model.layers.{n}.self_attn.{x}_proj.{x}_scale": ("F32", [], struct.pack("<f", value))
        for n in range(4)
        for x in "kv"
    }
    return {"model.safetensors": safetensors_bytes(tensors)}


def ids(**options: Any) -> dict[str, str]:
    checkpoint = options.pop("checkpoint")
    return {finding.id: finding.level for finding in checkpoint_findings(checkpoint, **options)}


def llama(value: float | None) -> Any:
    values = (value,) if value is not None else ()
    scales = ScaleTensors(k_count=len(values), v_count=len(values), k_values=values, v_values=values)
    return checkpoint_from_configs(TINY_LLAMA, HF_FP8_KV).model_copy(update={"scales": scales})


@pytest.mark.parametrize(
    ("value", "flag", "level"),
    [
        (0.05, "bf16", "error"),  # measured: more than a nat off everything read from the cache
        (1.0, "bf16", None),  # scales of exactly 1.0 change nothing
        (None, "bf16", None),  # no scales: bit-identical to the plain checkpoint
        (0.05, "auto", None),  # an FP8 cache divides and multiplies
    ],
)
def test_scales_over_a_16_bit_cache(value: float | None, flag: str, level: str | None) -> None:
    """A bfloat16 cache over loaded scales other than 1.0 is an error; the three harmless neighbours are not."""
    found = ids(checkpoint=llama(value), kv_cache_dtype=flag, sglang_version="0.5.16")
    assert found.get("kv_scales_over_16_bit_cache") == level


def test_the_origins_fix_by_version() -> None:
    """--kv-cache-dtype bf16 on Qwen3.5 with calibrated scales: right up to 0.5.16, ruinous from 0.5.18."""
    scales = ScaleTensors(k_count=15, v_count=15, k_values=(0.05,) * 15, v_values=(0.02,) * 15)
    checkpoint = checkpoint_from_configs(ORIGIN).model_copy(update={"scales": scales})
    assert "kv_scales_over_16_bit_cache" not in ids(
        checkpoint=checkpoint, kv_cache_dtype="bf16", sglang_version="0.5.16"
    )
    assert (
        ids(checkpoint=checkpoint, kv_cache_dtype="bf16", sglang_version="0.5.18")["kv_scales_over_16_bit_cache"]
        == "error"
    )


def test_unread_class_is_a_warning_not_silence() -> None:
    """Scales in a checkpoint whose model class was not read: may be loaded, so a warning."""
    checkpoint = llama(0.05).model_copy(update={"architecture_name": "KimiVLForConditionalGeneration"})
    assert ids(checkpoint=checkpoint, kv_cache_dtype="bf16")["kv_scales_over_16_bit_cache"] == "warning"


def test_silent_fp8_and_no_scales() -> None:
    """auto that becomes FP8 is a warning, and so is FP8 without scales; bf16 by flag is neither."""
    found = ids(checkpoint=llama(None))
    assert found["kv_cache_silently_8_bit"] == "warning"
    assert found["kv_scales_absent"] == "warning"
    assert not {"kv_cache_silently_8_bit", "kv_scales_absent"} & set(ids(checkpoint=llama(None), kv_cache_dtype="bf16"))


def test_a_plain_checkpoint_has_no_findings() -> None:
    """bf16, no quantization, one rank: nothing is claimed."""
    assert ids(checkpoint=checkpoint_from_configs(SMOLLM2)) == {}


def test_replication_is_told() -> None:
    """8 ranks over 2 KV heads: every entry is held 4 times."""
    texts = [f.text for f in checkpoint_findings(checkpoint_from_configs(ORIGIN), tp=8, kv_cache_dtype="bf16")]
    assert any("held 4 times" in text for text in texts)


def test_summary_is_plain_json_with_stable_keys() -> None:
    """The documented keys are there, and every documented key exists (docs/inspect-checkpoint.md)."""
    summary = checkpoint_summary(checkpoint_from_configs(ORIGIN), tp=8, gpu_memory_mib=97887, weights_gib=30.7)
    text = (Path(__file__).parents[2] / "docs/inspect-checkpoint.md").read_text()
    assert list(summary) == [
        "checkpoint",
        "layers",
        "quantization",
        "scales",
        "scales_loaded",
        "kv_cache",
        "state",
        "pools",
        "pools_why",
        "findings",
    ]
    json.dumps(summary, allow_nan=False)
    for section in ("checkpoint", "layers", "quantization", "scales_loaded", "kv_cache", "state"):
        for key in summary[section]:
            assert f"`{key}`" in text, f"{section}.{key} is not documented"
    for key in next(iter(summary["pools"].values())):
        assert f"`{key}`" in text, f"pools.{key} is not documented"
    for key in next(iter(summary["kv_cache"]["bytes_per_token"].values())):
        assert f"`{key}`" in text, f"bytes_per_token.{key} is not documented"
    assert summary["kv_cache"]["bytes_per_token"]["bfloat16"]["per_gpu"] == 15360
    assert summary["state"]["per_slot"] == 24_007_680


def test_pools_that_cannot_be_say_why() -> None:
    """Weights larger than the GPU: pools is null with the reason, the rest stands."""
    summary = checkpoint_summary(checkpoint_from_configs(ORIGIN), tp=1, gpu_memory_mib=24576, weights_gib=200.0)
    assert summary["pools"] is None
    assert "memory left" in summary["pools_why"]


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Readable by default: the layers, the KV dtype with its reason, a table of dtypes, the findings."""
    folder = write_checkpoint(tmp_path / "m", TINY_LLAMA, scaled(0.05), hf_quant_config__json=HF_FP8_KV)
    assert run(str(folder), "--kv-cache-dtype", "bf16", "--sglang-version", "0.5.16") == 0
    text = capsys.readouterr().out
    # 4 layers * 4 heads * 256 * 2 B = 8,192 B
    for words in (
        "4 full attention",
        "bfloat16",
        "8,192",
        "4,096",
        "k/v scales: 4 + 4",
        "error: the cache is bfloat16",
    ):
        assert words in text
    assert max(len(line) for line in text.splitlines() if line.startswith(("KV dtype", "bfloat16"))) < 100


@pytest.mark.parametrize(
    ("value", "level", "code"), [(0.05, "error", 1), (1.0, "error", 0), (1.0, "info", 1), (0.05, None, 0)]
)
def test_exit_codes(tmp_path: Path, value: float, level: str | None, code: int) -> None:
    """1 with a finding at or above --fail-on, else 0."""
    folder = write_checkpoint(tmp_path / "m", TINY_LLAMA, scaled(value), hf_quant_config__json=HF_FP8_KV)
    argv = [str(folder), "--kv-cache-dtype", "bf16", "--sglang-version", "0.5.16", "--json"]
    assert run(*argv, *(["--fail-on", level] if level else [])) == code


def test_json_is_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints one object and nothing else, with the weights' size and the scales in it."""
    folder = write_checkpoint(tmp_path / "m", TINY_LLAMA, scaled(0.5))
    assert run(str(folder), "--json", "--tp", "4", "--gpu-memory-mib", "24576") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["scales"]["k_values"] == [0.5] * 4
    assert found["scales"]["all_one"] is False
    assert found["checkpoint"]["weight_bytes"] == 8 + 8 * 4
    assert found["pools"]["auto"]["max_total_num_tokens"] > 0
    assert found["kv_cache"]["bytes_per_token"]["bfloat16"]["per_gpu"] == 2048


def test_what_cannot_be_read_ends_with_code_two(tmp_path: Path) -> None:
    """An unreadable folder and an unknown architecture raise errors whose exit code is 2."""
    with pytest.raises(UnreadableFile) as unreadable:
        run(str(tmp_path / "nothing"))
    folder = write_checkpoint(tmp_path / "m", TINY_LLAMA | {"architectures": ["NobodyForCausalLM"]})
    with pytest.raises(UnknownArchitecture, match="NobodyForCausalLM") as unknown:
        run(str(folder))
    assert (unreadable.value.exit_code, unknown.value.exit_code) == (2, 2)
    assert LEVELS == ("info", "warning", "error")


def test_names_in_any_language_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text of the files reaches the output whole."""
    folder = write_checkpoint(tmp_path / "größe", TINY_LLAMA | {"model_type": "模型"})
    assert run(str(folder), "--json") == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"]["path"].endswith("größe")


@pytest.mark.parametrize(("dtype", "quantized"), [("BF16", False), ("F8_E4M3", True)])
def test_declared_fp8_is_not_taken_for_stored_fp8(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str, quantized: bool
) -> None:
    """A file that declares FP8 and excludes every layer holds BF16 weights: the headers say which it is."""
    tensors = {"model.layers.0.self_attn.q_proj.weight": zeros(dtype, [2, 2])}
    folder = write_checkpoint(
        tmp_path / "m", TINY_LLAMA, {"model.safetensors": safetensors_bytes(tensors)}, hf_quant_config__json=HF_FP8_KV
    )
    assert run(str(folder)) == 0
    text = capsys.readouterr().out
    assert ("no weight is quantized" in text) is not quantized
    assert run(str(folder), "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["quantization"]["weights_quantized"] is quantized
    assert said["quantization"]["weights_bits"] == (8.0 if quantized else 16.0)
    assert said["quantization"]["weights_method"] == "modelopt_fp8"
    assert ("weights_not_quantized" in {row["id"] for row in said["findings"]}) is not quantized


@pytest.mark.parametrize(
    ("flag", "value", "says"),
    [
        *(("--gpu-memory-mib", value, "at least 1024") for value in ("0", "-5", "nan", "inf", "100")),
        *(("--mem-fraction-static", value, "between 0 and 1") for value in ("85", "nan", "0", "1")),
        *(("--sm", value, "8, 9, 10 or 12") for value in ("-1", "0", "90")),
        *(("--tp", value, "from 1 to 4096") for value in ("0", "-2", "99999")),
        *(("--weights-gib", value, "above 0") for value in ("0", "-1", "nan")),
    ],
)
def test_numbers_that_cannot_be(tmp_path: Path, flag: str, value: str, says: str) -> None:
    """One message that names the flag and what is allowed; exit code 2."""
    folder = write_checkpoint(tmp_path / "m", TINY_LLAMA)
    with pytest.raises(BadInput) as caught:
        run(str(folder), *([] if flag == "--gpu-memory-mib" else ["--gpu-memory-mib", "81920"]), f"{flag}={value}")
    assert flag in str(caught.value) and says in str(caught.value)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_all_wrong_numbers_stand_in_one_message(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", TINY_LLAMA)
    with pytest.raises(BadInput) as caught:
        run(str(folder), "--tp=0", "--sm=-1", "--gpu-memory-mib=nan")
    assert all(flag in str(caught.value) for flag in ("--tp", "--sm", "--gpu-memory-mib"))
    with pytest.raises(BadInput, match="--gpu-memory-mib beside --mem-fraction-static"):
        run(str(folder), "--mem-fraction-static=0.8")


def test_pools_from_a_config_alone_need_the_weights_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only config.json: the message names what is missing; with --weights-gib there are pools, fewer for more."""
    folder = write_checkpoint(tmp_path / "m", TINY_LLAMA)
    memory = ["--gpu-memory-mib", "81920", "--json"]
    assert run(str(folder), *memory) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["pools"] is None
    assert "weights' size is missing" in said["pools_why"] and "--weights-gib" in said["pools_why"]
    tokens = []
    for weights in ("1", "11"):
        assert run(str(folder), *memory, "--weights-gib", weights) == 0
        tokens.append(json.loads(capsys.readouterr().out)["pools"]["bf16"]["max_total_num_tokens"])
    per_token = said["kv_cache"]["bytes_per_token"]["bfloat16"]["per_gpu"]
    assert tokens[0] - tokens[1] == pytest.approx(10 * 2**30 / per_token, rel=1e-3)
