"""The flag chooser: the same line as every launch, by version, with its audit; a wrong value is one message."""

from __future__ import annotations

from typing import Any

import pytest

from lib.errors import WorkbookError
from lib.model.checkpoint import checkpoint_from_configs
from lib.server.flags import launch_argv
from lib.widgets import chooser
from lib.widgets.typed import typed_flags

VERSION = "0.5.16"


def values(**changes: Any) -> dict[str, Any]:
    first = {control.name: control.value for control in chooser.controls_of(VERSION, {}, "")}
    return first | changes


def shown(**changes: Any) -> Any:
    return chooser.chosen(values(**changes), "m", None, None)


def line(**changes: Any) -> str:
    return str(shown(**changes).tables[0].rows[0][0].text)


def test_the_line_is_launch_argv_s() -> None:
    """What the chooser shows is what the sweep, the benchmark and the unit file would start with these flags."""
    flags = {"attention_backend": "triton", "kv_cache_dtype": "fp8_e4m3", "tp_size": 8, "enable_metrics": True}
    argv = launch_argv({"model_path": "m", "flags": flags, "environment": {"A": "1"}}, VERSION, "127.0.0.1", 30000).argv
    made = line(attention_backend="triton", kv_cache_dtype="fp8_e4m3", typed="A=1 --tp-size 8 --enable-metrics")
    assert made == "A=1 python -m sglang.launch_server " + " ".join(argv)


def test_a_pasted_line_is_taken_apart() -> None:
    """A whole command with its program, environment, model, name and port gives the same line again."""
    typed = "SGLANG_X=1 python3 -m sglang.launch_server --model-path /m/x --served-model-name n \\\n --tp-size=4 --host 0.0.0.0 --port 8000"
    made = line(typed=typed)
    assert made.startswith("SGLANG_X=1 python -m sglang.launch_server --model-path /m/x") and "--tp-size 4" in made
    assert "--host 0.0.0.0 --port 8000" in made and "--served-model-name n" in made


def test_flags_follow_the_version() -> None:
    """A spelling of another release is translated with a note, or refused with the nearest name; choices are the release's."""
    old, new = (
        next(c for c in chooser.controls_of(v, {}, "") if c.name == "kv_cache_dtype").options
        for v in ("0.5.11", "0.5.16")
    )
    assert "fp4_e2m1" in old and "nvfp4" not in old and "nvfp4" in new
    renamed = shown(typed="--mamba-scheduler-strategy extra_buffer", version="0.5.20")
    assert "--mamba-radix-cache-strategy extra_buffer" in renamed.tables[0].rows[0][0].text
    assert "mamba_radix_cache_strategy" in repr(renamed.tables[2]).replace("-", "_")
    with pytest.raises(WorkbookError, match="attention_backend"):
        shown(typed="--attention-backnd triton")


@pytest.mark.parametrize(
    ("typed", "part"),
    [
        ("--tp-size two", "whole number"),
        ("--attention-backend nonsense", "attention-backend"),
        ("'--tp-size", "close the quotes"),
        ("loose words", "name the flag"),
        ("--enable-metrics yes", "true or false"),
        ("--host a --port 99999999", "1 to 65535"),
        ("x" * 20_001, "shorten"),
        ("--mem-fraction-static nan", "number"),
        ("--tp-size 2 --attention-backnd x", "attention-backnd"),
    ],
)
def test_a_wrong_value_is_one_message(typed: str, part: str) -> None:
    """Each mistake is one line that says what to do."""
    with pytest.raises(WorkbookError, match=part) as found:
        shown(typed=typed)
    assert "\n" not in str(found.value)


def test_a_flag_that_is_chosen_and_typed_is_a_mistake() -> None:
    """Neither of two values wins in silence."""
    with pytest.raises(WorkbookError, match="chosen and typed"):
        shown(kv_cache_dtype="bf16", typed="--kv-cache-dtype fp8_e4m3")


def test_the_audit_is_the_rules_own_and_changes_with_the_line() -> None:
    """A 4-bit KV cache is a finding of the rules; without it the finding is gone."""
    bad, good = shown(kv_cache_dtype="nvfp4", gpu="B200"), shown(kv_cache_dtype="bf16", gpu="B200")
    report = chooser.audited(line(kv_cache_dtype="nvfp4"), VERSION, "B200", None)
    ids = {finding.id for finding in report.findings if finding.level != "info"}
    assert ids and all(one in repr(bad.tables[1]) for one in ids)
    assert not all(one in repr(good.tables[1]) for one in ids)
    assert bad.chart.alt != good.chart.alt


def test_the_checkpoint_is_asked_only_for_its_own_line() -> None:
    """Facts of the profile's checkpoint don't speak for another model that is typed."""
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 128,
              "vocab_size": 100, "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}  # fmt: skip
    made = checkpoint_from_configs(config)
    own = chooser.chosen(values(), "m", None, made)
    other = chooser.chosen(values(typed="--model-path /another"), "m", None, made)
    assert "accepted 0" not in own.chart.alt and "accepted 0" in other.chart.alt  # type: ignore[union-attr]


def test_known_failures_of_the_version_are_said_first() -> None:
    """What `check_arguments` knows of the release and the GPU stands in the sentence."""
    view = shown(attention_backend="trtllm_mha", gpu="A100")
    assert "would not do what this line asks" in view.sentence


def test_keys_are_not_shown() -> None:
    """An API key in the typed line is in no part of the view."""
    view = shown(typed="HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz0123456789 --api-key sk-verysecret0123456789abcdef")
    text = view.sentence + "".join(map(repr, view.tables))
    assert "verysecret" not in text and "hf_abcdef" not in text


@pytest.mark.parametrize(
    ("text", "flags", "environment"),
    [
        ("", {}, {}),
        ("--tp-size 2 --enable-metrics", {"tp-size": 2, "enable-metrics": True}, {}),
        ("A=b=c --tp-size=2", {"tp-size": 2}, {"A": "b=c"}),
        ("--served-model-name 'a b'", {"served-model-name": "a b"}, {}),
        ("--mem-fraction-static 0.85", {"mem-fraction-static": 0.85}, {}),
    ],
)
def test_typed_text_becomes_flags(text: str, flags: dict[str, Any], environment: dict[str, str]) -> None:
    """Values take the type of their flag."""
    assert typed_flags(text, VERSION) == (flags, environment)
