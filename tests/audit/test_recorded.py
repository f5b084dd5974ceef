"""Real servers' logs and answers (tests/recorded): what the audit says about each, with and without the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lib.audit.evidence import checkpoint_facts, gather, json_object, log_file_facts, metrics_facts, server_info_facts
from lib.audit.facts import Fact
from lib.audit.rules import AuditReport, audit, audit_of_fix
from tests.audit.checkpoints import FP8_KV, LLAMA, write_checkpoint

RECORDED = Path(__file__).parents[1] / "recorded"
H200, H1, CPU = RECORDED / "h200-sglang-0.5.16", RECORDED / "h200-h1", RECORDED / "cpu-sglang"


def of_log(path: Path, *more: list[Fact]) -> AuditReport:
    """The audit of one log and more inputs."""
    return audit(gather(log_file_facts(path), *more))


def verdicts(report: AuditReport) -> dict[str, str]:
    """Rule -> verdict of what was found or fine; rules that were not checked are `None`."""
    told = {item.id: item.verdict for item in [*report.findings, *report.fine]}
    return told | {item.id: "not_checked" for item in report.not_checked}


def test_silent_fp8_is_found_from_the_log_alone() -> None:
    """m2_auto: no warning, auto everywhere, and only the pool's line says FP8."""
    report = of_log(H200 / "m2_auto.log")
    finding = next(item for item in report.findings if item.id == "KV1")
    assert (finding.level, finding.verdict) == ("warning", "silent_quantized_kv")
    assert finding.evidence[0].line and "float8_e4m3fn" in str(finding.evidence[0].quote)
    assert verdicts(report)["KV2"] == "scale_1.0_in_use"


def test_scale_one_is_certain_where_class_and_version_drop_every_scale() -> None:
    """m2_auto without its checkpoint: Qwen3.5 on 0.5.16 loads no scale whatever the files hold, so BF16 KV is safe."""
    known = gather(log_file_facts(H200 / "m2_auto.log"))
    finding = next(item for item in audit(known).findings if item.id == "KV2")
    assert finding.values["scale_in_effect"] == 1.0 and finding.values["kv_scales_in_checkpoint"] is None
    assert [fix.verdict for fix in finding.fixes] == ["safe"]
    fix = audit_of_fix(known, {"kv_cache_dtype": "bfloat16"})
    assert fix.verdict == "safe" and {"KV1", "KV2"} <= set(fix.removed)
    # From 0.5.17 on they would be loaded: then the tensors decide, and nobody has shown them.
    for version in ("0.5.17", "0.5.18"):
        later = audit_of_fix(known, {"kv_cache_dtype": "bfloat16", "sglang_version": version})
        assert later.verdict == "cannot_be_told" and "KV3" in {item.id for item in later.not_checked}


def test_a_backend_that_was_ignored_in_silence() -> None:
    """A launch asked for --moe-runner-backend cutlass, and Triton's experts ran without a word: X2, and never as asked."""
    report = of_log(H200 / "x_moe_cutlass.log")
    finding = next(item for item in report.findings if item.id == "X2")
    assert (finding.level, finding.verdict) == ("warning", "backend_ignored")
    assert "moe_runner_backend cutlass" in finding.what and "triton runs" in finding.what
    assert any("MoE kernel config" in str(place.quote) for place in finding.evidence)
    # A change of something else does not make the ignored backend go away; asking for what runs does.
    known = gather(log_file_facts(H200 / "x_moe_cutlass.log"))
    assert "X2" not in audit_of_fix(known, {"tool_call_parser": "qwen3_coder"}).removed
    assert "X2" in audit_of_fix(known, {"moe_runner_backend": "triton"}).removed


def test_lazy_buffers_with_speculation_do_not_start() -> None:
    """m1_nextn on 0.5.16: the launcher refuses extra_buffer_lazy, so the change is not safe from the log alone either."""
    known = gather(log_file_facts(H200 / "m1_nextn.log"))
    fix = audit_of_fix(known, {"mamba_radix_cache_strategy": "extra_buffer_lazy"})
    assert fix.verdict == "does_not_start" and "0.5.16" in str(fix.why)
    assert audit_of_fix(known, {"disable_radix_cache": True}).verdict != "does_not_start"


def test_silent_fp8_is_found_from_server_info_although_its_top_says_auto() -> None:
    """The scheduler's resolved dtype counts, the front process's auto does not."""
    info = json_object(H200 / "m2_auto.server_info.json")
    assert info["kv_cache_dtype"] == "auto"
    report = audit(gather(server_info_facts(info)))
    assert verdicts(report)["KV1"] == "silent_quantized_kv"


def test_the_warning_from_the_drafts_load_proves_nothing() -> None:
    """m2_nextn_auto prints the line about scales of 1.0 from the draft's load, under auto: where class and version do
    not settle it, KV2 still needs the tensors."""
    report = audit(gather(log_file_facts(H200 / "m2_nextn_auto.log")).without(["model_class"]))
    gap = next(item for item in report.not_checked if item.id == "KV2")
    assert "proves nothing" in gap.why and "--checkpoint DIR" in gap.settled_by
    assert verdicts(report)["KV9"] == "same_kv_dtype"


@pytest.mark.parametrize(
    ("name", "kv1", "kv5"),
    [
        ("m1_auto", "kv_not_quantized", "not_e5m2"),
        ("m2_bf16", "kv_not_quantized", "not_e5m2"),
        ("m2_e5m2", None, "e5m2_kv"),
    ],
)
def test_h200_pools(name: str, kv1: str | None, kv5: str) -> None:
    """The pool is what its line says, and what was asked for."""
    told = verdicts(of_log(H200 / f"{name}.log"))
    assert (told.get("KV1"), told["KV5"], told["X2"]) == (kv1, kv5, "as_asked")


@pytest.mark.parametrize("name", ["m1_auto", "m2_auto"])
def test_log_and_answers_of_one_process_agree(name: str) -> None:
    """Log and /server_info of the same process contradict each other nowhere."""
    report = of_log(H200 / f"{name}.log", server_info_facts(json_object(H200 / f"{name}.server_info.json")))
    assert verdicts(report)["X1"] == "sources_agree"


def test_the_answers_of_another_process_are_noticed() -> None:
    """The log of m2_bf16 with the /server_info of m2_auto: the process runs something else than the log says."""
    report = of_log(H200 / "m2_bf16.log", server_info_facts(json_object(H200 / "m2_auto.server_info.json")))
    finding = next(item for item in report.findings if item.id == "X1")
    assert {"kv_dtype_target", "max_total_num_tokens", "kv_cache_dtype"} <= set(finding.values["facts"])


def test_metrics_of_another_process_are_noticed() -> None:
    """Pool sizes in /metrics and in the log must be the same."""
    text = (H200 / "m1_nextn.metrics_after_bench.txt").read_text()
    assert verdicts(of_log(H200 / "m1_nextn.log", metrics_facts(text)))["X1"] == "sources_agree"
    assert verdicts(of_log(H200 / "m1_base.log", metrics_facts(text)))["X1"] == "sources_disagree"


# --- H1: the logs of d (wrong) and c (right) say the same; only the tensors tell ------------------------


def test_the_logs_of_d_and_c_alone_cannot_be_told_apart() -> None:
    """Without the checkpoint KV3 is not checked in both, and everything else is the same."""
    d, c = verdicts(of_log(H1 / "d_L2_bf16.log")), verdicts(of_log(H1 / "c_L1_bf16.log"))
    assert d == c and d["KV3"] == "not_checked"


H1_RUNS = [
    # run, k_scale, v_scale, rule, verdict, certainty of the finding (None: fine); what was measured is in H1.md
    ("d_L2_bf16", 0.05, 0.02, "KV3", "wrong_scale_applied"),
    ("c_L1_bf16", None, None, "KV3", "no_kv_scales"),
    ("g_L2_native_bf16", 0.05, 0.02, "KV3", "kv_scales_ignored"),
    ("h_L2_fi_bf16", 0.05, 0.02, "KV3", "wrong_scale_applied"),
    ("h_L2_fi_auto", 0.05, 0.02, "KV8", "prefix_read_without_scale"),
    ("e_L2_auto", 0.05, 0.02, "KV2", "kv_scales_in_use"),
    ("f_L1_auto", None, None, "KV2", "scale_1.0_in_use"),
    ("h_L0_fi_auto", None, None, "KV3", "no_kv_scales"),
    ("d_L2_bf16", 1.0, 1.0, "KV3", "kv_scales_all_one"),
    ("d_L2_bf16", 1.5, 2.0, "KV3", "wrong_scale_applied"),
]


@pytest.mark.parametrize(("run", "k_scale", "v_scale", "rule", "verdict"), H1_RUNS)
def test_h1_runs_with_their_checkpoint(
    tmp_path: Path, run: str, k_scale: float | None, v_scale: float | None, rule: str, verdict: str
) -> None:
    """The same log with the checkpoint's tensors beside it gives what the server was measured to do."""
    quant = None if "L0" in run else FP8_KV
    folder = write_checkpoint(tmp_path, hf_quant_config=quant, k_scale=k_scale, v_scale=v_scale)
    assert verdicts(of_log(H1 / f"{run}.log", checkpoint_facts(folder)))[rule] == verdict


def test_h1_on_flashinfer_is_decode_only(tmp_path: Path) -> None:
    """Run h on 0.5.16: prefill right, decode wrong."""
    folder = write_checkpoint(tmp_path, hf_quant_config=FP8_KV, k_scale=0.05, v_scale=0.02)
    report = of_log(H1 / "h_L2_fi_bf16.log", checkpoint_facts(folder))
    assert next(item for item in report.findings if item.id == "KV3").values["wrong_in"] == ["decode"]


@pytest.mark.parametrize("run", ["n_L2n_bf16", "n_L2n_auto"])
def test_not_loaded_means_safe_with_a_16_bit_pool(tmp_path: Path, run: str) -> None:
    """L2n: the log says that the scales are not loaded, and with a bf16 pool that is right, even without the
    checkpoint."""
    assert verdicts(of_log(H1 / f"{run}.log"))["KV3"] == "kv_scales_dropped"
    null = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["*"]}}
    folder = write_checkpoint(tmp_path, hf_quant_config=null, k_scale=0.05, v_scale=0.02)
    assert verdicts(of_log(H1 / f"{run}.log", checkpoint_facts(folder)))["KV3"] == "kv_scales_dropped"


def test_the_fix_of_run_e_is_run_d(tmp_path: Path) -> None:
    """FP8 under auto with scales (e), then --kv-cache-dtype bf16: that is d, and the audit of the change says so."""
    folder = write_checkpoint(tmp_path, hf_quant_config=FP8_KV, k_scale=0.05, v_scale=0.02)
    known = gather(log_file_facts(H1 / "e_L2_auto.log"), checkpoint_facts(folder))
    fix = audit_of_fix(known, {"kv_cache_dtype": "bfloat16"})
    assert fix.verdict == "brings_findings" and [item.id for item in fix.introduced] == ["KV3"]
    removed = audit_of_fix(known, {"kv_cache_dtype": "bfloat16", "kv_scales": {"present": False, "all_one": None}})
    assert removed.verdict == "safe"


# --- a CPU ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kv15_bfloat16", {"KV1": "kv_not_quantized"}),
        ("kv15_fp8_e4m3", {"KV1": "quantized_kv_by_choice", "KV5": "not_e5m2", "KV2": "scale_1.0_in_use"}),
        ("kv15_fp8_e5m2", {"KV5": "e5m2_kv"}),
        ("kv15_hfq_fp8", {"KV1": "silent_quantized_kv"}),
        ("kv15_hfq_null", {"KV1": "kv_not_quantized"}),
        ("kv15_qwen3-kvonly", {"KV1": "silent_quantized_kv", "KV2": "scale_1.0_in_use"}),
        ("kv15_qwen3-kvscaled", {"KV1": "silent_quantized_kv", "KV2": "scale_1.0_in_use"}),
        ("t23_dense", {"KV1": "kv_not_quantized"}),
    ],
)
def test_cpu_logs(name: str, expected: dict[str, str]) -> None:
    """0.5.15.post1 and 0.5.23 on a CPU: pools from their lines; a Qwen3 drops its scales whatever there is, and the
    scaled one's own line says so."""
    told = verdicts(of_log(CPU / f"{name}.log"))
    assert {rule: told[rule] for rule in expected} == expected


def test_a_fixed_pool_of_another_server_is_judged_by_its_own_version() -> None:
    """A log has no version line; its arguments tell the release, and the fact says that it is derived."""
    facts = gather(log_file_facts(H200 / "m2_auto.log"))
    assert (facts.value("sglang_version"), facts.best("sglang_version").how) == ("0.5.16", "derived")  # type: ignore[union-attr]


def test_vllm_is_not_judged_by_sglangs_rules() -> None:
    """A vLLM log: SGLang's rules do not apply, FP8 KV is named as what its line does not settle."""
    report = of_log(CPU / "vl_fp8.log")
    assert {"KV1", "KV3", "D1"} <= {item.id for item in report.not_applicable}
    assert "V2" in {item.id for item in report.not_checked}


def test_qwen3_5_with_scales_is_right_now_and_wrong_later(tmp_path: Path) -> None:
    """m2_bf16 (0.5.16) with a scaled checkpoint: right, with the note; the audit of an upgrade brings KV3."""
    config: dict[str, Any] = json_config()
    quant = {
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
            "exclude_modules": ["*"],
        }
    }
    template, sampling = {"chat_template": "{{ messages }}"}, {"temperature": 0.6}
    folder = write_checkpoint(
        tmp_path, config, quant, 0.05, 0.02, tokenizer_config=template, generation_config=sampling
    )
    known = gather(log_file_facts(H200 / "m2_bf16.log"), checkpoint_facts(folder))
    assert verdicts(audit(known))["KV3"] == "right_only_until_upgrade"
    assert [item.id for item in audit_of_fix(known, {"sglang_version": "0.5.20"}).introduced] == ["KV3"]


def json_config() -> dict[str, Any]:
    """A hybrid Qwen3.5-MoE's config.json, as small as it can be read (the geometry is not the recorded model's)."""
    text = {
        **{key: value for key, value in LLAMA.items() if key not in ("architectures", "model_type")},
        "model_type": "qwen3_5_moe_text",
        "num_key_value_heads": 2,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "mamba_ssm_dtype": "float32",
    }
    return {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config": text}
