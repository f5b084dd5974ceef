"""The table of accuracy rules: every row with a positive, a negative and a no-evidence case, and the report as
a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lib.audit.checks import LEVELS, SEVERITIES, disagreements, output_hints, output_signs
from lib.audit.evidence import flags_facts, gather, log_facts, stated_facts
from lib.audit.facts import FACTS, HOW_ORDER, Facts, dtype_family, make_fact, torch_dtype, version_key
from lib.audit.rules import LINES, RULES, VOIDED_BY, AuditReport, audit, audit_of_fix, changeable, rules_markdown
from lib.errors import BadInput
from tests.audit.examples import (
    EXAMPLES,
    FLASHINFER,
    LOG_LINES,
    NO_SCALES,
    ONES,
    QWEN,
    SCALES,
    TRITON,
    env,
    facts,
    line,
)

IDS = [rule.id for rule in RULES]


def read(values: dict[str, Any], source: str = "log") -> Facts:
    """Facts as an input file gives them (not merely stated)."""
    return Facts().plus(make_fact(name, value, "read", source) for name, value in values.items())


def where(report: AuditReport, rule_id: str) -> str:
    """The part of the report in which a rule ended up."""
    for part in ("findings", "fine", "not_checked", "not_applicable", "accepted_losses"):
        if any(item.id == rule_id for item in getattr(report, part)):
            return part
    raise AssertionError(f"{rule_id} is nowhere in the report")


def test_every_rule_has_examples() -> None:
    """A new row of the table is tested on arrival, or this fails."""
    assert sorted(EXAMPLES) == sorted(IDS)
    assert len(set(IDS)) == len(IDS)


@pytest.mark.parametrize("rule", RULES, ids=IDS)
def test_rows_are_whole(rule: Any) -> None:
    """Every row says what it needs, how sure it is, what to do and where it comes from."""
    assert rule.needs and all(name in FACTS for name in rule.needs)
    assert rule.severity in SEVERITIES and rule.certainty in HOW_ORDER
    for text in (rule.title, rule.group, rule.versions, rule.effect, rule.silent, rule.do, rule.source):
        assert text.strip()


@pytest.mark.parametrize("rule_id", [i for i in IDS if i not in ("X1", "N5", "Q0")])
def test_positive(rule_id: str) -> None:
    """The example makes the rule a finding with evidence and a certainty no stronger than its weakest fact."""
    report = audit(read(EXAMPLES[rule_id][0]))
    finding = next(item for item in report.findings if item.id == rule_id)
    assert finding.level in LEVELS and finding.what and finding.do and finding.verdict != "ok"
    assert finding.evidence
    assert HOW_ORDER.index(finding.certainty) >= HOW_ORDER.index("read")


@pytest.mark.parametrize("rule_id", [i for i in IDS if i not in ("X1", "L2")])
def test_negative(rule_id: str) -> None:
    """The counter-example is no finding, and it was really checked."""
    report = audit(read(EXAMPLES[rule_id][1]))
    assert where(report, rule_id) in ("fine", "not_applicable", "accepted_losses")


@pytest.mark.parametrize("rule", RULES, ids=IDS)
def test_without_evidence(rule: Any) -> None:
    """Without a fact the rule is not checked and names what would settle it; it is never fine."""
    engine = {"engine": "vllm"} if rule.engines == ("vllm",) else {}
    report = audit(read(engine))
    assert where(report, rule.id) == "not_checked"
    gap = next(item for item in report.not_checked if item.id == rule.id)
    assert gap.missing and gap.settled_by


@pytest.mark.parametrize("rule_id", [i for i in IDS if i not in ("X1", "L2")])
def test_unknown_is_never_fine(rule_id: str) -> None:
    """Every fact that a fine outcome stands on is needed: taken away, the rule is not fine any more."""
    example = EXAMPLES[rule_id][1]
    report = audit(read(example))
    if where(report, rule_id) != "fine":
        pytest.skip("the counter-example does not apply")
    checked = next(item for item in report.fine if item.id == rule_id)
    used = {name for name in example if any((place.note or "").startswith(f"{name} = ") for place in checked.evidence)}
    assert used
    for name in used:
        less = {key: value for key, value in example.items() if key != name}
        assert where(audit(read(less)), rule_id) != "fine", f"{rule_id} is fine without {name}"


def test_no_evidence_at_all() -> None:
    """Checked nothing is not a pass."""
    report = audit(Facts())
    assert report.verdict == "checked_nothing"
    assert not report.findings and not report.fine and not report.accepted_losses


def test_unavoidable_losses_are_accepted_not_found() -> None:
    """NVFP4 weights are named among the accepted losses, with what would be wider."""
    report = audit(read(EXAMPLES["Q0"][0]))
    loss = next(item for item in report.accepted_losses if item.id == "Q0")
    assert "NVFP4" in loss.what and loss.instead


def test_stated_facts_are_never_surer_than_quoted() -> None:
    """The same facts give a weaker certainty when somebody merely says them."""
    sure = audit(read(EXAMPLES["KV5"][0])).findings[0]
    said = audit(facts(**EXAMPLES["KV5"][0])).findings[0]
    assert (sure.certainty, said.certainty) == ("read", "quoted")


# --- the warning line -----------------------------------------------------------------------------------


WARNED = line("scale_default")
FP8 = {"kv_dtype_target": "float8_e4m3fn", "kv_cache_dtype": "fp8_e4m3"}


def kv2(**values: Any) -> tuple[str, str]:
    """(part of the report, verdict or reason) of rule KV2."""
    report = audit(read({**FP8, **values}))
    part = where(report, "KV2")
    item = next(item for item in getattr(report, part) if item.id == "KV2")
    return part, getattr(item, "verdict", "")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({**line("scale_default")}, ("not_checked", "")),
        ({**line("scale_default"), "kv_scales": NO_SCALES}, ("findings", "scale_1.0_in_use")),
        ({"startup_seen": True, "log_lines": {}, "kv_scales": NO_SCALES}, ("findings", "scale_1.0_in_use")),
        ({**line("scale_default"), "kv_scales": SCALES}, ("findings", "false_alarm_possible")),
        ({**WARNED, "kv_scales": SCALES, "kv_scales_loaded": "loaded"}, ("findings", "false_alarm_possible")),
        ({**WARNED, "kv_scales": SCALES, "kv_scales_loaded": "dropped"}, ("findings", "scale_1.0_in_use")),
        ({"kv_scales": SCALES, "kv_scales_loaded": "dropped"}, ("findings", "scale_1.0_in_use")),
        ({"kv_scales": SCALES, "kv_scales_loaded": "loaded"}, ("fine", "kv_scales_in_use")),
        ({"kv_scales": SCALES}, ("not_checked", "")),
        ({"kv_scales": ONES, "kv_scales_loaded": "loaded"}, ("findings", "scale_1.0_in_checkpoint")),
        ({"kv_scales": SCALES, "kv_scales_loaded": "loaded", "attention_backend_decode": "torch_native"},
         ("findings", "scale_1.0_in_use")),
    ],
)  # fmt: skip
def test_the_warning_line_is_no_proof_and_its_absence_is_none(
    values: dict[str, Any], expected: tuple[str, str]
) -> None:
    """Tensors and loader decide; the line alone decides nothing either way."""
    assert kv2(**values) == expected


@pytest.mark.parametrize(
    ("pool", "asked", "verdict"),
    [
        ("float8_e4m3fn", "auto", "silent_quantized_kv"),
        ("float8_e4m3fn", "fp8_e4m3", "quantized_kv_by_choice"),
        ("float8_e4m3fnuz", None, "quantized_kv"),
        ("float8_e5m2", "fp8_e5m2", None),
        ("bfloat16", "auto", None),
    ],
)
def test_how_a_quantized_pool_came_about(pool: str, asked: str | None, verdict: str | None) -> None:
    """Silent, chosen, or of unknown origin: three verdicts, all of them a loss."""
    known = read({"kv_dtype_target": pool} | ({"kv_cache_dtype": asked} if asked else {}))
    found = [item for item in audit(known).findings if item.id == "KV1"]
    assert [item.verdict for item in found] == ([verdict] if verdict else [])
    assert all(item.level == "warning" for item in found)


# --- H1 and the fix that the origin took ----------------------------------------------------------------


def origin(version: str, scales: dict[str, Any] = SCALES, **more: Any) -> Facts:
    """Qwen3.5 NVFP4 with FP8 declared, on triton with auto."""
    config = {"architectures": [QWEN], "quantization_config": None}
    hf_quant = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16}}
    given = {
        "sglang_version": version,
        "model_class": QWEN,
        "kv_cache_dtype": "auto",
        "attention_backend": "triton",
        "quantization_param_path": None,
        "kv_declared": {"config": config, "hf_quant_config": hf_quant},
        "kv_scales": scales,
        "mla": False,
        **more,
    }
    return read(given, "checkpoint")


@pytest.mark.parametrize("version", ["0.5.11", "0.5.15.post1", "0.5.16"])
def test_the_origins_fix_is_right_on_its_own_version(version: str) -> None:
    """Up to 0.5.16 Qwen3.5 drops the scales: BF16 KV solves the silent FP8 and brings nothing but a note for
    upgrades."""
    assert [item.verdict for item in audit(origin(version)).findings if item.id == "KV1"] == ["silent_quantized_kv"]
    fix = audit_of_fix(origin(version), {"kv_cache_dtype": "bfloat16"})
    assert fix.verdict == "safe" and {"KV1", "KV2", "KV4"} <= set(fix.removed)
    note = next(item for item in fix.report.findings if item.id == "KV3")
    assert (note.level, note.verdict) == ("info", "right_only_until_upgrade")


@pytest.mark.parametrize("version", ["0.5.17", "0.5.18", "0.5.20", "0.5.23"])
def test_the_origins_fix_is_ruinous_after_an_upgrade(version: str) -> None:
    """From 0.5.17 Qwen3.5 loads the scales: the same flag brings H1 on triton."""
    fix = audit_of_fix(origin(version), {"kv_cache_dtype": "bfloat16"})
    assert fix.verdict == "brings_findings"
    assert [(item.id, item.level, item.verdict) for item in fix.introduced] == [("KV3", "error", "wrong_scale_applied")]


def test_an_upgrade_is_a_change_like_any_other() -> None:
    """BF16 KV on 0.5.16 and then only the version changes: KV3 becomes an error."""
    fix = audit_of_fix(origin("0.5.16", kv_cache_dtype="bfloat16"), {"sglang_version": "0.5.20"})
    assert "KV3" in [item.id for item in fix.introduced]


def test_recommendations_are_audited() -> None:
    """KV1 recommends BF16 KV; on a version where that is H1 the recommendation itself says so."""
    finding = next(item for item in audit(origin("0.5.20")).findings if item.id == "KV1")
    assert finding.fixes[0].introduces == ["KV3"] and "no recommended change is clean" in finding.do


@pytest.mark.parametrize("scales", [NO_SCALES, ONES], ids=["none", "all 1.0"])
def test_without_calibrated_scales_the_fix_is_safe_everywhere(scales: dict[str, Any]) -> None:
    """No scale other than 1.0, no H1."""
    assert audit_of_fix(origin("0.5.23", scales), {"kv_cache_dtype": "bfloat16"}).verdict == "safe"


def test_without_the_tensors_the_fix_cannot_be_told() -> None:
    """Only the tensors tell: without them the fix is neither safe nor wrong."""
    known = origin("0.5.20").without(["kv_scales"])
    assert audit_of_fix(known, {"kv_cache_dtype": "bfloat16"}).verdict == "cannot_be_told"


def test_removing_the_scale_tensors_removes_h1() -> None:
    """The remedy that was measured (run c of H1): no tensors, bf16 pool."""
    known = origin("0.5.20", kv_cache_dtype="bfloat16")
    finding = next(item for item in audit(known).findings if item.id == "KV3")
    assert [(fix.verdict, fix.solves) for fix in finding.fixes][0] == ("safe", True)


def test_a_finding_that_became_unanswerable_is_not_solved() -> None:
    """Changing the version voids what the old process showed: that is a gap, not a success."""
    known = read({"kv_dtype_target": "float8_e4m3fn", "kv_cache_dtype": "auto", "sglang_version": "0.5.16"})
    fix = audit_of_fix(known, {"sglang_version": "0.5.20"})
    assert "KV1" not in fix.removed and "KV1" in [gap.id for gap in fix.not_checked]


def test_an_unrelated_change_solves_nothing_else() -> None:
    """fp32 logits touch neither pool nor backend: KV1 stays a finding."""
    known = read({"kv_dtype_target": "float8_e4m3fn", "kv_cache_dtype": "auto", "enable_fp32_lm_head": False})
    fix = audit_of_fix(known, {"enable_fp32_lm_head": True})
    assert fix.removed == ["N2"] and "KV1" in fix.kept


def test_only_what_can_be_chosen_can_be_changed() -> None:
    """A change of something that is no fact is refused with the names that exist."""
    with pytest.raises(BadInput, match="kv_cache_dtype"):
        audit_of_fix(Facts(), {"kv_dtype": "bf16"})
    assert "kv_dtype_target" not in changeable() and set(VOIDED_BY) <= set(FACTS)


H1_CASES = [
    # version, backend, pool, expected verdict (None: not checked); H1.md tables 1 and 2 and the wheels
    ("0.5.16", "triton", "bfloat16", "wrong_scale_applied"),
    ("0.5.16", "flashinfer", "bfloat16", "wrong_scale_applied"),
    ("0.5.16", "torch_native", "bfloat16", "kv_scales_ignored"),
    ("0.5.16", "trtllm_mha", "bfloat16", "kv_scales_ignored"),
    ("0.5.16", "trtllm_mla", "bfloat16", "kv_scales_ignored"),
    ("0.5.8", "trtllm_mla", "bfloat16", "wrong_scale_applied"),
    ("0.5.16", "fa3", "bfloat16", None),
    ("0.5.16", "flashmla", "bfloat16", None),
]


@pytest.mark.parametrize(("version", "backend", "pool", "verdict"), H1_CASES)
def test_h1_by_backend(version: str, backend: str, pool: str, verdict: str | None) -> None:
    """Loaded scales over a 16-bit pool, backend by backend; what was neither run nor read is not checked."""
    report = audit(
        read(
            {"kv_dtype_target": pool, "kv_scales": SCALES, "kv_scales_loaded": "loaded", "sglang_version": version,
             "attention_backend": backend}
        )
    )  # fmt: skip
    part = where(report, "KV3")
    item = next(item for item in getattr(report, part) if item.id == "KV3")
    assert getattr(item, "verdict", None) == verdict


def test_h1_on_flashinfer_names_the_phase() -> None:
    """On 0.5.16 FlashInfer is wrong in decode only (measured); from 0.5.18 in prefill too (read)."""
    base = {"kv_dtype_target": "bfloat16", "kv_scales": SCALES, "kv_scales_loaded": "loaded", **FLASHINFER}
    phases = {}
    for version in ("0.5.16", "0.5.18"):
        report = audit(read({**base, "sglang_version": version}))
        phases[version] = next(item for item in report.findings if item.id == "KV3").values["wrong_in"]
    assert phases == {"0.5.16": ["decode"], "0.5.18": ["prefill", "decode"]}


def test_h1_needs_the_values() -> None:
    """Scale tensors whose values were not read could all be 1.0."""
    unread = {**SCALES, "all_one": None, "min": None, "max": None}
    report = audit(read({"kv_dtype_target": "bfloat16", "kv_scales": unread, "kv_scales_loaded": "loaded", **TRITON}))
    assert where(report, "KV3") == "not_checked"


def test_scales_of_an_unknown_class_are_not_guessed() -> None:
    """A class that nobody read neither loads nor drops its scales here."""
    report = audit(origin("0.5.20", model_class="BrandNewForCausalLM", kv_cache_dtype="bfloat16"))
    assert where(report, "KV3") == "not_checked"


def test_mla_on_triton_is_not_guessed() -> None:
    """Triton stores MLA's latent divided whatever the pool: not the case that was measured."""
    report = audit(
        read({"kv_dtype_target": "bfloat16", "kv_scales": SCALES, "kv_scales_loaded": "loaded", "mla": True, **TRITON})
    )
    assert where(report, "KV3") == "not_checked"


# --- contradictions -------------------------------------------------------------------------------------


def test_two_sources_that_disagree_are_a_finding() -> None:
    """The process says FP8, the log says BF16: one of them is about another process."""
    known = read({"kv_dtype_target": "bfloat16"}).plus(
        [make_fact("kv_dtype_target", "fp8_e4m3", "read", "server_info")]
    )
    finding = next(item for item in audit(known).findings if item.id == "X1")
    assert (finding.level, finding.values["facts"]) == ("error", ["kv_dtype_target"])


def test_what_was_asked_and_is_gone_is_a_contradiction() -> None:
    """The unit says bf16 and the process's arguments say auto: the process was started with other flags."""
    known = (
        Facts().plus(flags_facts("--kv-cache-dtype bf16")).plus([make_fact("kv_cache_dtype", "auto", "read", "log")])
    )
    assert where(audit(known), "X1") == "findings"


def test_resolving_auto_is_no_contradiction() -> None:
    """auto on the command line and a resolved value in the process agree; so do two spellings of one dtype."""
    asked = Facts().plus(flags_facts("--kv-cache-dtype auto --moe-runner-backend auto"))
    known = asked.plus(
        [
            make_fact("kv_cache_dtype", "fp8_e4m3", "read", "log"),
            make_fact("moe_runner_backend", "triton", "read", "log"),
        ]
    )
    assert disagreements(known)[0] == []
    spelled = (
        Facts()
        .plus(flags_facts("--kv-cache-dtype bf16"))
        .plus([make_fact("kv_cache_dtype", "bfloat16", "read", "log")])
    )
    assert disagreements(spelled) == ([], 1)


def test_bytes_per_token_by_two_sources() -> None:
    """15,360 B in the log and 7,680 B by the server's memory: a factor of two is another dtype, 1% is rounding."""
    one = read({"kv_bytes_per_token": 15360})
    assert disagreements(one.plus([make_fact("kv_bytes_per_token", 7680.0, "measured", "server_info")]))[0]
    assert not disagreements(one.plus([make_fact("kv_bytes_per_token", 15300.0, "measured", "server_info")]))[0]


# --- small things ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "+" * 50,
        "!" * 64,
        "�" * 12 + " ��",
        "the answer is the the the the the the the the the the the the the the the",
        "<|endoftext|>" * 20,
        "The answer: <|im_end|> <|im_end|> <|im_end|> <|im_end|> <|im_end|>",
        "<pad><pad><pad><pad><pad>",
        "<｜end▁of▁sentence｜>" * 6,
        "information " * 20,
        "So, therefore. Therefore therefore therefore therefore therefore therefore therefore",
        "I will look at the file again. " * 12,
        "It is fine, and then " + "!" * 40,
        "broadcast返回罨返回返回返回返回返回返回的同时arya稳定有价值当之无愧无限稳",
    ],
)
def test_garbage_is_seen(text: str) -> None:
    """Repetition, replacement characters and scripts run together are signs."""
    assert output_signs(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4",
        "Paris.",
        "def main():\n    # ------------------------------------------------\n    return 0\n",
        "| a | b |\n|---|---|\n| 1 | 2 |\n",
        "Das Modell (英語: model) ist groß; 東京 liegt in Japan, Москва in Russland.",
        "日本語のテキストです。カタカナとひらがなと漢字が混ざっています。",
        "快速的棕色狐狸跳过了懒狗。今天天气很好，我们去公园散步吧。",
        "x = [" + "0, " * 60 + "0]\nprint(x)\n",
        "#include <stdio.h>\nstatic const int t[] = {" + "0x00, " * 30 + "0x01};\n",
        "def f():\n    s = '"
        + "!" * 30
        + "'\n    return s  # a bar of marks, as a banner of the program shows it to users\n",
        "He had had enough: very, very, very, very good.",
        "<br><br><br><br><p>New paragraph of a page, with a sentence in it.</p>",
        "x = [0, 0, 0, 0, 1]\nfor i in range(10):\n    print(i)\n" * 3,
    ],
)
def test_good_text_has_no_sign(text: str) -> None:
    """Prose in several scripts, code, tables and short answers are no garbage."""
    assert output_signs(text) == []


def test_dtype_names_and_versions() -> None:
    """One dtype in all its spellings; releases order by number, not by text."""
    assert torch_dtype("torch.float8_e4m3fn") == torch_dtype("fp8_e4m3") == "float8_e4m3fn"
    assert (dtype_family("mxfp8"), dtype_family("nonsense"), dtype_family(None)) == ("mxfp8", None, None)
    assert version_key("0.5.9") < version_key("0.5.10.post1") < version_key("0.5.11")  # type: ignore[operator]
    assert version_key("main") is None


def test_every_log_line_has_a_sample() -> None:
    """A new pattern is tested on arrival."""
    assert sorted(LOG_LINES) == sorted(LINES)


@pytest.mark.parametrize("mark", sorted(LINES))
def test_log_lines(mark: str) -> None:
    """The line as the program prints it is recognised through the prefilter, and only by its own marks."""
    known = Facts().plus(log_facts([LOG_LINES[mark], "[2026-01-01 00:00:00] Load weight begin. avail mem=1.00 GB"]))
    lines = known.value("log_lines")
    assert mark in lines and set(lines) - {mark} <= {"not_loaded"}


def test_simulated_acceptance_needs_the_whole_environment_to_be_excluded() -> None:
    """A launch line shows a part of the environment: its silence is no proof."""
    assert where(audit(read(env(complete=False))), "D3") == "not_checked"
    assert where(audit(read(env(complete=True))), "D3") == "fine"
    assert where(audit(read(env(complete=True, SGLANG_SIMULATE_ACC_LEN="-1"))), "D3") == "fine"


def test_docs_are_generated() -> None:
    """docs/rules.md is what the table says."""
    path = Path(__file__).parents[2] / "docs" / "rules.md"
    assert path.read_text(encoding="utf-8") == rules_markdown()


def test_stated_facts_keep_their_words() -> None:
    """A stated fact quotes what was said."""
    fact = stated_facts({"kv_cache_dtype": "bf16"})[0]
    assert (fact.how, fact.evidence[0].quote) == ("quoted", "kv_cache_dtype = bf16")


def test_torch_native_is_not_cured_by_an_upgrade() -> None:
    """KV2 on torch_native: the loader is right and the backend ignores the scales, so the remedy is another one."""
    native = {"attention_backend_prefill": "torch_native", "attention_backend_decode": "torch_native"}
    base = {"kv_dtype_target": "float8_e4m3fn", "kv_scales": SCALES}
    told = {
        loaded: next(
            f for f in audit(read({**base, "kv_scales_loaded": loaded, **native})).findings if f.id == "KV2"
        ).do
        for loaded in ("loaded", "dropped")
    }
    assert "another attention backend" in told["loaded"] and "upgrade" not in told["loaded"]
    assert "upgrade" in told["dropped"]


@pytest.mark.parametrize(("version", "verdict"), [("0.5.15.post1", "does_not_start"), ("0.5.16", "does_not_start"),
                                                  ("0.5.17", "safe")])  # fmt: skip
def test_a_change_that_does_not_start_is_not_safe(version: str, verdict: str) -> None:
    """extra_buffer_lazy with speculation on a hybrid model: refused up to 0.5.16 (recorded there), taken later."""
    known = read({
        "recurrent": "gdn", "speculative_algorithm": "NEXTN", "speculative_num_draft_tokens": 4,
        "speculative_num_steps": 3, "speculative_eagle_topk": 1,
        "mamba_radix_cache_strategy": "extra_buffer", "disable_radix_cache": False, "sglang_version": version,
    })  # fmt: skip
    fix = audit_of_fix(known, {"mamba_radix_cache_strategy": "extra_buffer_lazy"})
    assert fix.verdict == verdict
    finding = next(item for item in audit(known).findings if item.id == "S4")
    if verdict == "does_not_start":
        assert "extra_buffer_lazy" in str(fix.why) and fix.removed == []
        assert "--disable-radix-cache" in finding.do and "does not start" in finding.do
    else:
        assert fix.why is None and fix.removed == ["S4"] and "does not start" not in finding.do
    # What already stands in the way before the change is not blamed on it, and nothing else is called refused.
    assert audit_of_fix(known, {"disable_radix_cache": True}).verdict == "safe"


def test_a_value_that_the_version_does_not_know_does_not_start() -> None:
    """mxfp8 KV came with 0.5.16's choices: 0.5.11 refuses the word."""
    known = read({"kv_cache_dtype": "auto", "sglang_version": "0.5.11"})
    assert audit_of_fix(known, {"kv_cache_dtype": "mxfp8"}).verdict == "does_not_start"
    assert audit_of_fix(known, {"kv_cache_dtype": "bfloat16"}).verdict != "does_not_start"


def test_the_title_follows_the_verdict_and_numbers_their_noun() -> None:
    """KV1 is not 'without being asked' where it was asked for; one finding is no 'findings'."""
    pool = {"kv_dtype_target": "float8_e4m3fn"}
    titles = {
        asked: next(f for f in audit(read({**pool, "kv_cache_dtype": asked})).findings if f.id == "KV1").title
        for asked in ("auto", "fp8_e4m3")
    }
    assert titles["auto"].endswith("without being asked") and titles["fp8_e4m3"].endswith("as asked")
    report = audit(read({"enable_fp32_lm_head": False}))
    assert len(report.findings) == 1 and "(1 finding, " in report.answer


@pytest.mark.parametrize("text", ["", " \n\t "])
def test_an_empty_text_is_not_plausible(text: str) -> None:
    """Nothing came back: that is no answer that was checked and found good."""
    report = audit(read({"output_text": text}))
    assert "G1" in {item.id for item in report.not_checked} and "G1" not in {item.id for item in report.fine}


def test_repetition_in_code_is_at_most_a_warning() -> None:
    """A table of zeros in a program is named, and not called garbage."""
    text = "x = [" + "0, " * 60 + "0]\nprint(x)\n"
    assert output_hints(text) and not output_signs(text)
    finding = next(item for item in audit(read({"output_text": text})).findings if item.id == "G1")
    assert (finding.level, finding.verdict) == ("warning", "repetition_in_code") and "class" not in finding.values


@pytest.mark.parametrize(("version", "verdict"), [("0.5.11", "does_not_start"), ("0.5.13.post1", "does_not_start"),
                                                  ("0.5.16", None)])  # fmt: skip
def test_the_algorithm_alone_does_not_start_on_a_hybrid_model(version: str, verdict: str | None) -> None:
    """Only --speculative-algorithm NEXTN: up to 0.5.13 the default no_buffer is refused, before and after any change."""
    known = read({"recurrent": "gdn", "speculative_algorithm": "NEXTN", "sglang_version": version})
    assert where(audit(known), "X3") == ("fine" if verdict is None else "findings")
    fix = audit_of_fix(known, {"kv_cache_dtype": "bfloat16"})
    assert (fix.verdict == "does_not_start") is (verdict is not None)


@pytest.mark.parametrize(("version", "starts"), [("0.5.11", False), ("0.5.18", True)])
def test_a_value_is_held_against_the_version_that_is_known(version: str, starts: bool) -> None:
    """mxfp8 became a choice with 0.5.16: on 0.5.11 argparse refuses it."""
    known = gather(flags_facts("--kv-cache-dtype mxfp8"), stated_facts({"sglang_version": version}))
    assert ("X3" in {item.id for item in audit(known).findings}) is not starts


def test_what_was_seen_to_run_is_not_said_to_not_start() -> None:
    """A process that shows its KV pool has started, whatever a rule predicts."""
    known = read({"recurrent": "gdn", "speculative_algorithm": "NEXTN", "sglang_version": "0.5.11",
                  "max_total_num_tokens": 1000})  # fmt: skip
    assert "X3" in {item.id for item in audit(known).not_applicable}
