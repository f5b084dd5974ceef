"""The audit cases, and each of them perturbed: the answer must follow the facts, not the wording of one case."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

CASES = Path(__file__).parents[1] / "cases"


def _mapping() -> Any:
    spec = importlib.util.spec_from_file_location("map_audit", CASES / "map_audit.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


answer = _mapping().answer
ROWS: dict[str, dict[str, Any]] = {
    case["id"]: case for case in map(json.loads, (CASES / "audit" / "cases.jsonl").read_text().splitlines())
}


def ask(case_id: str, **changes: Any) -> dict[str, Any]:
    """The answer to a case with some keys of its text replaced (None takes the key out)."""
    case = copy.deepcopy(ROWS[case_id])
    text = case["input"]["text"]
    for name, value in changes.items():
        if value is None:
            text.pop(name)
        else:
            text[name] = value
    return answer(case, CASES / "audit")


@pytest.mark.parametrize("case_id", list(ROWS))
def test_case(case_id: str) -> None:
    """Every expected leaf comes out of the audit."""
    given = answer(ROWS[case_id], CASES / "audit")
    assert {name: given.get(name) for name in ROWS[case_id]["expect"]} == ROWS[case_id]["expect"]


def test_only_the_input_is_looked_at() -> None:
    """The answer does not change when everything but the input is taken away."""
    for case in ROWS.values():
        assert answer({"input": case["input"]}, CASES / "audit") == answer(case, CASES / "audit")


@pytest.mark.parametrize("version", ["0.5.10.post1", "0.5.11", "0.5.16", "0.5.18", "0.5.23"])
def test_the_warning_with_tensors_in_other_versions(version: str) -> None:
    """The line depends on a flag in every version."""
    assert ask("aud-warning-but-scales-loaded", sglang_version=version)["verdict"] == "false_alarm_possible"


@pytest.mark.parametrize(
    ("names", "verdict"),
    [
        (["model.layers.3.self_attn.k_scale", "model.layers.3.self_attn.v_scale"], "false_alarm_possible"),
        (["language_model.model.layers.11.self_attn.k_proj.k_scale"], "false_alarm_possible"),
        (["model.layers.0.self_attn.k_proj.output_scale"], "false_alarm_possible"),
        (
            ["model.layers.0.mlp.down_proj.weight_scale_inv", "model.layers.0.mlp.down_proj.input_scale"],
            "scale_1.0_in_use",
        ),
        (["model.layers.0.self_attn.q_scale"], "scale_1.0_in_use"),
        ([], "scale_1.0_in_use"),
    ],
)
def test_the_warning_follows_the_tensor_names(names: list[str], verdict: str) -> None:
    """Names in every form count; scales of weights, inputs and queries do not."""
    assert ask("aud-warning-but-scales-loaded", checkpoint_tensor_names=names)["verdict"] == verdict


@pytest.mark.parametrize(
    ("version", "verdict"),
    [("0.5.15", "scale_1.0_in_use"), ("0.5.16", "scale_1.0_in_use"), ("0.5.18", "false_alarm_possible")],
)
def test_the_warning_is_true_for_a_loader_that_drops_the_scales(version: str, verdict: str) -> None:
    """Qwen3.5 drops the scales up to 0.5.16: there the same line, with the same tensors, is true."""
    quant = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
    config = {"architectures": ["Qwen3_5MoeForConditionalGeneration"]}
    asked = ask("aud-warning-but-scales-loaded", sglang_version=version, config=config, hf_quant_config=quant)
    assert asked["verdict"] == verdict


def test_the_line_counts_through_prefixes_and_colours() -> None:
    """A rank tag, a journal prefix or a colour changes nothing."""
    line = ROWS["aud-warning-true-weight-only-fp8"]["input"]["text"]["log"][0]
    for form in (f"[2026-01-02 03:04:05 TP3] {line}", f"Jan 02 03:04:05 host sglang[7]: [2026-01-02 03:04:05] {line}",
                 f"\x1b[33m[2026-01-02 03:04:05 DP0 TP3] {line}\x1b[0m"):  # fmt: skip
        asked = ask("aud-warning-true-weight-only-fp8", log=[form])
        assert (asked["verdict"], asked["scale_warning"]) == ("scale_1.0_in_use", True)


def test_json_scales_without_the_line_or_with_another_dtype() -> None:
    """The flag decides, not the line that says that the file was loaded."""
    assert ask("aud-json-scales-silently-unused", log=None)["verdict"] == "scales_declared_but_not_applied"
    other = ask("aud-json-scales-silently-unused", args="--kv-cache-dtype auto --quantization-param-path=/x.json")
    assert (other["verdict"], other["finding_level"]) == ("scales_declared_but_not_applied", "error")


@pytest.mark.parametrize(
    "text", ["++++++++++++++++++++++++++++++++++++++++", "!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!", "�" * 20]
)
def test_other_garbage(text: str) -> None:
    """Other forms of garbage are the same class; plain text is not."""
    assert ask("aud-output-garbled", output=text)["class"] == "garbage_output"
    assert "class" not in ask("aud-output-garbled", output="The capital of France is Paris, on the river Seine.")


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"checkpoint_k_scale": 0.021}, "wrong_scale_applied"),
        ({"checkpoint_k_scale": 4.5}, "wrong_scale_applied"),
        ({"sglang": "0.5.8"}, "wrong_scale_applied"),
    ],
)
def test_k_scale_over_a_16_bit_pool(changes: dict[str, Any], verdict: str) -> None:
    """Any scale other than 1.0, in any version without the fix."""
    assert ask("aud-kscale-on-bf16-kv", **changes)["verdict"] == verdict


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpoint_k_scale": 1.0},
        {"sglang": "after PR 18396"},
        {"sglang": "0.5.16"},
    ],
)
def test_k_scale_that_does_no_harm(changes: dict[str, Any]) -> None:
    """A scale of 1.0, or a version with the fix: no finding."""
    assert ask("aud-kscale-on-bf16-kv", **changes)["finding_level"] is None


@pytest.mark.parametrize(("length", "verdict"), [("2.5", "synthetic_acceptance"), ("1", "synthetic_acceptance")])
def test_simulated_acceptance_of_another_length(length: str, verdict: str) -> None:
    """The configured length comes out as a number."""
    asked = ask("aud-simulated-acceptance", env={"SGLANG_SIMULATE_ACC_LEN": length})
    assert (asked["verdict"], asked["configured_accept_length"]) == (verdict, float(length))


@pytest.mark.parametrize("length", ["-1", "0", ""])
def test_simulation_that_is_off(length: str) -> None:
    """Off is off, whatever the log prints."""
    assert "outputs_valid" not in ask("aud-simulated-acceptance", env={"SGLANG_SIMULATE_ACC_LEN": length})


def test_the_kernel_follows_the_trace_and_not_the_label() -> None:
    """Without the trace nothing is said about the kernel; with another kernel there is no fallback."""
    assert "kernel_path" not in ask("aud-nvfp4-marlin-label", trace=None)
    assert "kernel_path" not in ask("aud-nvfp4-marlin-label", trace=["cutlass_fp4_group_mm"])
    assert "env_flag_effective" not in ask("aud-nvfp4-marlin-label", env={})


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"args": "--kv-cache-dtype bf16 --attention-backend flashinfer"}, "wrong_scale_applied"),
        (
            {"args": "--kv-cache-dtype bfloat16 --attention-backend=triton", "sglang_version": "0.5.23"},
            "wrong_scale_applied",
        ),
        ({"args": "--kv-cache-dtype fp8_e4m3 --attention-backend triton"}, "fp8_query_and_weights"),
        ({"k_scale": 1.0, "v_scale": 1.0}, "loses_accuracy or nothing"),
    ],
)
def test_h1_perturbed(changes: dict[str, Any], verdict: str) -> None:
    """Another backend, version, spelling or value: the answer follows."""
    asked = ask("own-h1-triton", **changes)
    if verdict == "loses_accuracy or nothing":
        assert asked["finding_level"] is None
    else:
        assert asked["verdict"] == verdict


@pytest.mark.parametrize("version", ["0.5.11", "0.5.16", "0.5.23"])
def test_silent_fp8_in_other_versions_and_when_not_declared(version: str) -> None:
    """Declared FP8 is taken under auto; declared null, or nothing, is not."""
    assert ask("own-silent-fp8", sglang_version=version)["verdict"] == "silent_quantized_kv"
    null = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}
    assert ask("own-silent-fp8", sglang_version=version, hf_quant_config=null)["finding_level"] is None
