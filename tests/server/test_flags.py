"""Flags by version: argument lists that the real parser gives back exactly, refusals that real servers confirmed."""

from __future__ import annotations

import argparse
import doctest
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lib.errors import BadInput, BadParams
from lib.server import extract_flags as extract
from lib.server import flags
from lib.server.flags import Gpu, ModelFacts, check_arguments, launch_argv

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORDED = json.loads((HERE / "launches_h200_0.5.16.json").read_text("utf-8"))["launches"]
H200 = Gpu(sm=90, name="NVIDIA H200")
SM100, SM120 = Gpu(sm=100), Gpu(sm=120)
CPU = Gpu(sm=None, amx=False)
HYBRID = ModelFacts(hybrid=True, nvfp4_dense=False, nvfp4_experts=False)
HYBRID_NVFP4 = ModelFacts(hybrid=True, nvfp4_dense=True, nvfp4_experts=True)


def config(environment: dict[str, Any] | None = None, **asked: Any) -> dict[str, Any]:
    """A server configuration with these flags."""
    return {"model_path": "/m", "flags": asked, "environment": environment or {}}


def argv(version: str, **asked: Any) -> list[str]:
    """The words of these flags alone on this release."""
    words = launch_argv(config(**asked), version, "127.0.0.1", 30000).argv
    assert words[:6] == ["--model-path", "/m", "--host", "127.0.0.1", "--port", "30000"]
    return words[6:]


def kinds(version: str, **asked: Any) -> list[str]:
    """Kinds of the notes that these flags draw on this release."""
    return [n.kind for n in launch_argv(config(**asked), version, "h", 1).notes]


# ----------------------------------------------------------------------------------------------------------- the table


def test_every_release_has_the_flags_that_every_launch_needs() -> None:
    """model-path, host, port and the origin's flags exist in all known releases."""
    for version in flags.known_versions():
        here = flags.release(version)
        for name in (
            "model_path",
            "host",
            "port",
            "tp_size",
            "moe_runner_backend",
            "fp4_gemm_backend",
            "kv_cache_dtype",
        ):
            assert here.find(name) is not None, (version, name)


def test_versions_are_in_rising_order_and_ranges_are_within_them() -> None:
    """Each form's range is a range, and no flag has two forms in one release."""
    table = json.loads((ROOT / "lib/server/flags_by_version.json").read_text("utf-8"))
    versions = table["versions"]
    assert [flags.Version.of(v) for v in versions] == sorted(flags.Version.of(v) for v in versions)
    for flag, forms in table["flags"].items():
        last = -1
        for form in forms:
            assert last < versions.index(form["since"]) <= versions.index(form["until"]), flag
            last = versions.index(form["until"])


def test_nothing_in_the_table_is_unresolved() -> None:
    """The extractor says what it could not resolve; for these releases there is nothing."""
    left = [
        (v, f.flag, f.unresolved)
        for v in flags.known_versions()
        for f in flags.release(v).forms.values()
        if f.unresolved
    ]
    assert left == []


def test_table_stays_small() -> None:
    """The packaged table stays under 300 kB."""
    assert (ROOT / "lib/server/flags_by_version.json").stat().st_size < 300_000


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        # FACTS section 0 and the wheels: the alias lived from 0.5.14 to 0.5.19
        ("mamba_scheduler_strategy", "0.5.10", "0.5.19"),
        ("mamba_radix_cache_strategy", "0.5.14", "0.5.23"),
        ("enable_nan_detection", "0.5.10", "0.5.12.post1"),
        ("torchao_config", "0.5.10", "0.5.17"),
    ],
)
def test_known_lives_of_flags(name: str, first: str, last: str) -> None:
    """Flags whose history is known from the wheels appear and vanish where they did."""
    held = [v for v in flags.known_versions() if flags.release(v).find(name) is not None]
    assert (held[0], held[-1]) == (first, last)


# ------------------------------------------------------------------------------------------------------------ the argv


def test_renamed_flag_is_written_as_the_release_spells_it() -> None:
    """mamba_scheduler_strategy and mamba_radix_cache_strategy are one flag; each release gets its own, and a note."""
    for name in ("mamba_scheduler_strategy", "mamba_radix_cache_strategy"):
        assert argv("0.5.11", **{name: "extra_buffer"}) == ["--mamba-scheduler-strategy", "extra_buffer"]
        assert argv("0.5.23", **{name: "extra_buffer"}) == ["--mamba-radix-cache-strategy", "extra_buffer"]
    assert kinds("0.5.11", mamba_radix_cache_strategy="extra_buffer") == ["renamed"]
    assert kinds("0.5.16", mamba_scheduler_strategy="extra_buffer") == ["renamed"]
    assert kinds("0.5.16", mamba_radix_cache_strategy="extra_buffer") == []


def test_field_name_and_flag_name_mean_one_flag() -> None:
    """fp4_gemm_runner_backend is what /server_info says, --fp4-gemm-backend what the parser takes."""
    for name in ("fp4_gemm_runner_backend", "fp4_gemm_backend", "fp4-gemm-backend", "--fp4-gemm-backend"):
        assert argv("0.5.16", **{name: "flashinfer_cudnn"}) == ["--fp4-gemm-backend", "flashinfer_cudnn"]


def test_the_same_configuration_on_two_releases() -> None:
    """A change of release changes spellings and notes, and nothing else."""
    asked: dict[str, Any] = {"tp_size": 8, "mamba_radix_cache_strategy": "extra_buffer", "cuda_graph_max_bs": 32}
    assert argv("0.5.11", **asked) == [
        "--tensor-parallel-size",
        "8",
        "--mamba-scheduler-strategy",
        "extra_buffer",
        "--cuda-graph-max-bs",
        "32",
    ]
    assert argv("0.5.23", **asked) == [
        "--tp-size",
        "8",
        "--mamba-radix-cache-strategy",
        "extra_buffer",
        "--cuda-graph-max-bs-decode",
        "32",
    ]


def test_old_switch_becomes_the_value_of_its_successor() -> None:
    """disable_piecewise_cuda_graph stands for --cuda-graph-backend-prefill disabled where the switch is gone."""
    assert argv("0.5.13", disable_piecewise_cuda_graph=True) == ["--disable-piecewise-cuda-graph"]
    for version in ("0.5.16", "0.5.23"):
        assert argv(version, disable_piecewise_cuda_graph=True) == ["--cuda-graph-backend-prefill", "disabled"]
        assert argv(version, disable_piecewise_cuda_graph=False) == []
    with pytest.raises(BadParams, match="tc_piecewise.*no choice"):
        argv("0.5.23", enforce_piecewise_cuda_graph=True)  # its value is no longer a choice there


def test_value_spelled_otherwise() -> None:
    """dsa is called nsa before 0.5.13; what both releases know stays as asked."""
    assert argv("0.5.11", attention_backend="dsa") == ["--attention-backend", "nsa"]
    assert kinds("0.5.11", attention_backend="dsa") == ["value_renamed"]
    assert argv("0.5.16", attention_backend="nsa") == ["--attention-backend", "nsa"]
    assert argv("0.5.16", kv_cache_dtype="bfloat16") == ["--kv-cache-dtype", "bfloat16"]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("trust_remote_code", True, ["--trust-remote-code"]),
        ("trust_remote_code", False, []),
        ("trust_remote_code", None, []),
        ("lora_strict_loading", True, ["--lora-strict-loading"]),
        ("lora_strict_loading", False, ["--no-lora-strict-loading"]),
        ("mem_fraction_static", 0.85, ["--mem-fraction-static", "0.85"]),
        ("mem_fraction_static", 1, ["--mem-fraction-static", "1"]),
        ("chunked_prefill_size", -1, ["--chunked-prefill-size=-1"]),
        ("context_length", 0, ["--context-length", "0"]),
        ("context_length", "256k", ["--context-length", "256k"]),
        ("cuda_graph_bs_decode", [1, 2, 4], ["--cuda-graph-bs-decode", "1", "2", "4"]),
        ("json_model_override_args", {"a": [1]}, ["--json-model-override-args", '{"a": [1]}']),
        ("json_model_override_args", '{"a": 1}', ["--json-model-override-args", '{"a": 1}']),
        ("model_checksum", True, ["--model-checksum"]),
        (
            "lora_paths",
            [{"lora_name": "x", "lora_path": "p"}],
            ["--lora-paths", '{"lora_name": "x", "lora_path": "p"}'],
        ),
        ("chat_template", "-odd", ["--chat-template=-odd"]),
    ],
)
def test_values_of_all_kinds(name: str, value: Any, words: list[str]) -> None:
    """Booleans, numbers, lists, JSON, None and values with a leading dash are written as argparse reads them."""
    assert argv("0.5.15.post1", **{name: value}) == words


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("tp_size", "8", "a whole number is needed"),
        ("tp_size", True, "a whole number is needed"),
        ("tp_size", 1.0, "a whole number is needed"),
        ("mem_fraction_static", float("nan"), "a number is needed"),
        ("mem_fraction_static", float("inf"), "a number is needed"),
        ("mem_fraction_static", False, "a number is needed"),
        ("trust_remote_code", "yes", "true or false is needed"),
        ("trust_remote_code", 1, "true or false is needed"),
        ("log_level", False, "text is needed"),
        ("chat_template", 5, "text is needed"),
        ("chat_template", "--", "argparse drops"),
        ("chat_template", "a\0b", "NUL"),
        ("chat_template", "\ud800", "not valid text"),
        ("cuda_graph_bs_decode", 8, "a list is needed"),
        ("cuda_graph_bs_decode", [], "at least one value"),
        ("cuda_graph_bs_decode", [1, "2"], "a whole number is needed"),
        ("served_model_name", "x", "served_model_name of the server configuration"),
        ("host", "x", "host and port are always explicit"),
        ("port", 1, "host and port are always explicit"),
        ("model", "x", "model_path of the server configuration"),
        ("config", "x.yaml", "second file"),
        ("quantization_param_path", "None", "write null"),
        ("enable_multimodal", False, "no way to say false"),
        ("preferred_sampling_params", "not json", "JSON"),
        ("attention_backend", ["triton"], "choice"),
        ("lora_paths", ["--x", "y"], "takes '--x' in a list for a flag"),
    ],
)
def test_wrong_values_are_refused_with_what_is_needed(name: str, value: Any, said: str) -> None:
    """A value that argparse would not give back, or that has the wrong type, is refused before a launch."""
    with pytest.raises(BadParams, match=re.escape(said)):
        argv("0.5.15.post1", **{name: value})


def test_all_faults_come_in_one_message_with_the_nearest_names() -> None:
    """Unknown keys, removed flags, wrong types, wrong choices and a bad port are all in one message."""
    wrong = {
        "model_path": "",
        "flagz": {},
        "flags": {"atention_backend": "triton", "torchao_config": "x", "tp_size": "8", "moe_runner_backend": "marlinn"},
        "environment": {"A B": "1", "X": True},
    }
    with pytest.raises(BadParams) as caught:
        launch_argv(wrong, "0.5.23", "127.0.0.1", 0)
    for part in (
        "flagz: not part of a server configuration; nearest: flags",
        "model_path: text is needed",
        "port: a number from 1 to 65535",
        "nearest: attention_backend",
        "removed after 0.5.17",
        "tp_size: a whole number",
        "nearest: marlin",
        "'A B'",
        "environment X",
    ):
        assert part in str(caught.value)


def test_removed_flag_names_its_replacement() -> None:
    """A flag that a release dropped without a plain renaming is refused, with what replaced it."""
    with pytest.raises(BadParams, match="removed after 0.5.19.*cp_strategy"):
        argv("0.5.23", nsa_prefill_cp_mode="in-seq-split")
    with pytest.raises(BadParams, match="comes with 0.5.14"):
        argv("0.5.13.post1", cuda_graph_config='{"decode": {}}')


def test_two_names_of_one_field_are_a_contradiction() -> None:
    """argparse would silently keep the last; here it is a fault that names both."""
    with pytest.raises(BadParams, match="tensor_parallel_size: sets tp_size, as tp_size does"):
        argv("0.5.16", tp_size=2, tensor_parallel_size=4)
    with pytest.raises(BadParams, match="sets cuda_graph_backend_prefill"):
        argv("0.5.16", cuda_graph_backend_prefill="full", disable_piecewise_cuda_graph=True)


def test_secret_values_stay_out_of_messages() -> None:
    """A wrong API key is refused without being repeated."""
    with pytest.raises(BadParams) as caught:
        argv("0.5.16", api_key=123456789, admin_api_key=["sk-hidden"])
    assert "123456789" not in str(caught.value) and "sk-hidden" not in str(caught.value)
    with pytest.raises(BadParams, match=r"max_total_tokens: .*found 'many'"):
        argv("0.5.16", max_total_tokens="many")  # not every name with a token in it is a secret


def test_not_strict_passes_what_the_release_would_refuse() -> None:
    """A trial that wants SGLang's own refusal gets unknown flags and wrong choices onto the command line."""
    asked = config(**{"fp4_gemm_backend": "cutlass", "--fp4-gemm-runner-backend": "x", "no_such": [1, 2], "off": False})
    words = launch_argv(asked, "0.5.16", "h", 1, strict=False).argv[6:]
    assert words == ["--fp4-gemm-backend", "cutlass", "--fp4-gemm-runner-backend", "x", "--no-such", "1", "2"]
    with pytest.raises(BadParams):
        launch_argv(asked, "0.5.16", "h", 1)


def test_deprecated_and_ignored_flags_draw_a_note() -> None:
    """A flag that the release still reads but names another, or reads and drops, is passed with a note."""
    assert argv("0.5.16", disable_cuda_graph=True) == ["--disable-cuda-graph"]
    assert kinds("0.5.16", disable_cuda_graph=True) == ["deprecated"]
    assert kinds("0.5.11", disable_cuda_graph=True) == []
    assert kinds("0.5.16", collect_tokens_histogram=True) == ["ignored"]
    with pytest.raises(BadParams, match="expert-balancedness-report-mode"):
        argv("0.5.18", enable_expert_distribution_metrics=True)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.5.10.post1", "off by default"),
        ("0.5.11", "0 means spec v1"),
        ("0.5.13.post1", "synchronous"),
        ("0.5.14", "without effect: .* a warning says so"),
        ("0.5.20", "without effect: .* a warning says so"),
        ("0.5.21", "without effect, and no line says so"),
        ("0.5.23", "without effect, and no line says so"),
    ],
)
def test_spec_v2_variable_by_release(version: str, said: str) -> None:
    """SGLANG_ENABLE_SPEC_V2 is passed on, and each release's note says what it does there."""
    launch = launch_argv(config({"SGLANG_ENABLE_SPEC_V2": 1}), version, "h", 1)
    assert launch.environment == {"SGLANG_ENABLE_SPEC_V2": "1"}
    assert [n.kind for n in launch.notes] == ["environment"] and re.search(said, launch.notes[0].text)


def test_unknown_sglang_variable_draws_a_note_and_others_do_not() -> None:
    """A misspelled SGLANG_ variable has no effect and no server says so; HF_ variables are not SGLang's to know."""
    launch = launch_argv(config({"SGLANG_ENABLE_SPEC_V3": "1", "HF_HUB_OFFLINE": "1"}), "0.5.16", "h", 1)
    assert len(launch.notes) == 1 and "nearest: SGLANG_" in launch.notes[0].text
    assert launch_argv(config({"SGLANG_SIMULATE_ACC_LEN": 2}), "0.5.16", "h", 1).notes == []


@pytest.mark.parametrize(
    ("asked", "used", "noted"),
    [
        ("0.5.15.post1", "0.5.15.post1", False),
        ("0.5.15.post1+cpu", "0.5.15.post1", False),
        ("0.5.16rc1", "0.5.15.post1", True),
        ("0.5.16.dev20+g1a2b", "0.5.15.post1", True),
        ("0.5.16.post3", "0.5.16", True),
        ("0.5.24", "0.5.23", True),
        ("1.0.0", "0.5.23", True),
    ],
)
def test_versions_between_and_beyond(asked: str, used: str, noted: bool) -> None:
    """A release that the table lacks is treated as the nearest lower one, and the launch says so."""
    launch = launch_argv(config(), asked, "h", 1)
    assert launch.table_version == used
    assert [n.kind for n in launch.notes] == (["version"] if noted else [])


@pytest.mark.parametrize("version", ["0.5.9", "0.4.6.post5", "", "main", "0.5"])
def test_unknown_versions_are_refused(version: str) -> None:
    """An older release, or something that is no version, is an error: nothing is guessed."""
    with pytest.raises(BadParams):
        launch_argv(config(), version, "h", 1)


def test_empty_configuration_needs_only_a_model() -> None:
    """The smallest launch is model, host and port; its environment is empty."""
    launch = launch_argv({"model_path": "m"}, "0.5.16", "::1", 65535)
    assert launch.argv == ["--model-path", "m", "--host", "::1", "--port", "65535"]
    assert launch.environment == {} and launch.notes == []


def test_fields_are_what_server_info_calls_them() -> None:
    """The asked values by ServerArgs's names and types, for an identity check; what was not asked is not there."""
    asked = config(tensor_parallel_size=2, context_length="64k", disable_piecewise_cuda_graph=True, page_size=None)
    assert launch_argv(asked, "0.5.16", "h", 1).fields == {
        "model_path": "/m",
        "host": "h",
        "port": 1,
        "tp_size": 2,
        "context_length": 64000,
        "cuda_graph_backend_prefill": "disabled",
    }
    old = launch_argv(config(tp_size=2, context_length="8Ki"), "0.5.11", "h", 1).fields
    assert (old["tp_size"], old["context_length"]) == (2, 8192)


@pytest.mark.parametrize("wrong", [None, [], "model", {"flags": []}, {"model_path": "m", "environment": "A=1"}])
def test_configuration_of_a_wrong_shape_is_refused(wrong: Any) -> None:
    """A configuration that is no mapping, or whose parts are not, ends with a message."""
    with pytest.raises(BadParams):
        launch_argv(wrong, "0.5.16", "h", 1)


@pytest.mark.parametrize("version", flags.known_versions())
@pytest.mark.parametrize("hybrid", [True, False])
def test_nextn_incantation_passes_the_rules_of_its_release(version: str, hybrid: bool) -> None:
    """What turns NEXTN on in a release is refused by none of its rules, and leaving out what a hybrid needs is."""
    asked, environment, row = flags.nextn(version, hybrid=hybrid)
    model = ModelFacts(hybrid=hybrid, nvfp4_dense=False, nvfp4_experts=False)
    told = config(environment, attention_backend="triton", **asked)
    assert launch_argv(told, version, "h", 1).fields["speculative_algorithm"] == "NEXTN"
    assert check_arguments(told, version, SM120, model) == [] and row.source
    if row.flags:
        bare = config(environment, **{k: v for k, v in asked.items() if k not in row.flags})
        assert [f.id for f in check_arguments(bare, version, SM120, model)] == ["spec-hybrid-no-buffer"]


def test_order_of_flags_is_the_order_asked() -> None:
    """Two equal configurations give equal argument lists, in the order in which they were written."""
    assert argv("0.5.16", tp_size=2, page_size=1) == ["--tp-size", "2", "--page-size", "1"]
    assert argv("0.5.16", page_size=1, tp_size=2) == ["--page-size", "1", "--tp-size", "2"]


def parser_of(version: str) -> argparse.ArgumentParser:
    """A parser made from the table alone, with argparse's own actions in place of SGLang's."""
    types: dict[str, Any] = {"int": int, "float": float, "json": json.loads, "json_list": json.loads}
    parser = argparse.ArgumentParser()
    for form in flags.release(version).forms.values():
        told: dict[str, Any] = {"dest": form.dest, "default": None}
        if form.action == "on_off":
            told["action"] = argparse.BooleanOptionalAction
        elif form.action in ("true", "deprecated_true", "ignored"):
            told["action"] = "store_true"
        elif form.action == "deprecated_const" and form.choices is None:
            told.update(action="store_const", const=form.const)
        else:
            told.update(type=types.get(form.type or "str", str), nargs=form.nargs, choices=form.choices)
            if form.const is not None and form.nargs == "?":
                told["const"] = form.const
        parser.add_argument(*form.spellings, **told)
    return parser


def samples(form: flags.Form) -> list[Any]:
    """A few values that a flag of this form takes."""
    if form.choices is not None:
        values: list[Any] = [c for c in form.choices if c is not None]
    elif form.action in ("true", "on_off", "deprecated_true", "deprecated_const", "ignored"):
        return [True] if form.default is None else [True, False]
    elif form.action == "lora_paths":
        values = ["a", "b=c"]
    else:
        values = {
            "int": [0, 7, -3],
            "human_readable_int": [0, 4096, -1],
            "float": [0.5, -1e-9, 2],
            "json": [{"a": [1, None]}, {}],
            "json_list": [["-x", 1], []],
            "cuda_graph_config": [{"decode": {"backend": "full"}}],
        }.get(form.type or "str", ["plain", "-dash", "--flag=x y", "é"])
    if form.nargs not in ("+", "*"):
        return values
    lists: list[Any] = [[v] for v in values]
    return [*lists, values] if form.type in ("int", "lora_paths") else lists


@pytest.mark.parametrize("version", flags.known_versions())
def test_every_flag_of_every_release_can_be_written(version: str) -> None:
    """For each flag of 18 releases: what is written parses, on a parser made from the table, to what was asked."""
    parser = parser_of(version)
    tried = 0
    for form in flags.release(version).forms.values():
        if form.dest in flags.OWNED or form.error is not None:
            continue
        new = flags.release(version).find((form.use or "").split("=")[0]) if form.action == "deprecated_store" else None
        for value in samples(new if new is not None and new.dest == form.dest else form):
            launch = launch_argv({"model_path": "m", "flags": {form.flag: value}}, version, "h", 1)
            held = vars(parser.parse_args(launch.argv))
            target = flags.release(version).find(launch.argv[6].split("=")[0]) if len(launch.argv) > 6 else None
            assert (held["model_path"], held["host"], held["port"]) == ("m", "h", 1)
            if target is None:
                assert value is False
                continue
            wanted = value
            if form.action == "deprecated_const" and form.choices is None:
                wanted = form.const
            elif (
                form.type in ("human_readable_int", "cuda_graph_config") or form.type == "parse_cuda_graph_backend_arg"
            ):
                wanted = str(value) if not isinstance(value, dict) else json.dumps(value)
            assert held[target.dest] == wanted, (form.flag, launch.argv)
            tried += 1
    assert tried > 400


def test_docstring_examples_hold() -> None:
    """The worked examples in the docstrings of both modules are true."""
    for module in (flags, extract):
        result = doctest.testmod(module)
        assert result.failed == 0 and result.attempted > 0


# ------------------------------------------------------------------------------------- refusals known without a launch


def as_flags(words: list[str]) -> dict[str, Any]:
    """A recorded command line as flags: the last of a repeated one stands, as for argparse."""
    asked: dict[str, Any] = {}
    i = 0
    while i < len(words):
        value = words[i + 1] if i + 1 < len(words) and not words[i + 1].startswith("--") else True
        asked[words[i]] = value
        i += 1 if value is True else 2
    return {k: v for k, v in asked.items() if k not in ("--model-path", "--host", "--port")}


#: what no argument rule can know: first-forward downloads, JIT time, memory shared with other servers, unsettled runs
NOT_ARGUMENTS = {"m3_auto", "x_m3_auto", "x_moe_deep_gemm", "x_moe_flashinfer_cutlass", "x_moe_flashinfer_trtllm"}


@pytest.mark.parametrize("launch", RECORDED, ids=lambda r: r["run"])
def test_recorded_launches_end_as_predicted(launch: dict[str, Any]) -> None:
    """Each of 40 real launches: a refused one was predicted with its exit code and words, one that started was not."""
    model = HYBRID_NVFP4 if "/m3" in launch["words"][1] else HYBRID
    asked = {"model_path": "/m", "flags": as_flags(launch["words"]), "environment": launch["environment"]}
    found = check_arguments(asked, "0.5.16", H200, model, strict=False)
    if launch["ready"] or launch["run"] in NOT_ARGUMENTS:
        assert found == []
        return
    assert len(found) == 1, [f.id for f in found]
    assert found[0].exit_code == launch["exit_code"]
    assert re.search(found[0].pattern, launch["error"])


@pytest.mark.parametrize(
    ("version", "asked", "exit_code", "line"),
    [
        # recorded on CPUs without AMX (logs sp15_nextn, sp15_ngram, nextn19, nextn_21, kv21_fp8_e4m3, kv21_fp8_e5m2)
        (
            "0.5.15.post1",
            {"speculative_algorithm": "NEXTN", "attention_backend": "torch_native"},
            -9,
            "RuntimeError: 0 active drivers ([]). There should only be one.",
        ),
        (
            "0.5.15.post1",
            {"speculative_algorithm": "NGRAM", "attention_backend": "torch_native"},
            1,
            "ValueError: Ngram speculative decoding only supports CUDA device.",
        ),
        (
            "0.5.19",
            {"speculative_algorithm": "NEXTN", "attention_backend": "torch_native"},
            -9,
            "AssertionError: Torch not compiled with CUDA enabled",
        ),
        (
            "0.5.21",
            {"speculative_algorithm": "NEXTN", "attention_backend": "torch_native"},
            -9,
            "ValueError: EAGLE is not supported in decode attention backend torch_native",
        ),
        ("0.5.21", {"kv_cache_dtype": "fp8_e4m3"}, -9, "ValueError: CPU FP8 KV cache requires Intel AMX support."),
        (
            "0.5.21",
            {"kv_cache_dtype": "fp8_e5m2"},
            -9,
            "ValueError: --kv-cache-dtype fp8_e5m2 is not supported on CPU.",
        ),
        ("0.5.15.post1", {"attention_backend": "triton"}, -9, "RuntimeError: 0 active drivers ([])."),
        (
            "0.5.15.post1",
            {"attention_backend": "flashinfer"},
            1,
            "importlib.metadata.PackageNotFoundError: No package metadata was found for flashinfer_python",
        ),
        (
            "0.5.15.post1",
            {"attention_backend": "intel_amx"},
            None,
            "The current platform does not support Intel AMX, will fallback to torch_native backend.",
        ),
    ],
)
def test_refusals_recorded_on_cpus(version: str, asked: dict[str, Any], exit_code: int | None, line: str) -> None:
    """What a CPU server refused, or silently replaced, is predicted with its own words; on a GPU none of it is."""
    found = check_arguments(config(device="cpu", **asked), version, CPU)
    assert [f.exit_code for f in found] == [exit_code]
    assert re.search(found[0].pattern, line)
    assert check_arguments(config(device="cuda", **asked), version, SM100) == []


@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3", "fp8_e5m2"])
def test_what_a_cpu_served_is_not_predicted_to_fail(dtype: str) -> None:
    """0.5.15.post1 served all three KV dtypes on a CPU (recorded), so nothing is predicted for them."""
    served = config(device="cpu", attention_backend="torch_native", sampling_backend="pytorch", kv_cache_dtype=dtype)
    assert check_arguments(served, "0.5.15.post1", CPU, ModelFacts(hybrid=False)) == []


SPEC = {"speculative_algorithm": "NEXTN"}
SPEC_314 = {**SPEC, "speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
V2 = {"environment": {"SGLANG_ENABLE_SPEC_V2": "1"}}
#: for each rule: a release, flags, device, model with which it applies; and flags, device, model with which it does not
CASES: dict[str, tuple[str, dict[str, Any], Gpu | None, ModelFacts, dict[str, Any], Gpu | None, ModelFacts]] = {
    "attention-trtllm-mha-prefill": (
        *("0.5.18", {"attention_backend": "trtllm_mha"}, SM120, HYBRID),
        *({"attention_backend": "trtllm_mha"}, SM100, HYBRID),
    ),
    "attention-trtllm-mha-prefill-sm": (
        *("0.5.19", {"prefill_attention_backend": "trtllm_mha"}, Gpu(sm=89), HYBRID),
        *({"prefill_attention_backend": "trtllm_mha"}, SM120, HYBRID),
    ),
    "attention-trtllm-mha-decode": (
        *("0.5.16", {"decode_attention_backend": "trtllm_mha"}, Gpu(sm=80), HYBRID),
        *({"decode_attention_backend": "trtllm_mha"}, H200, HYBRID),
    ),
    "attention-trtllm-mha-sm120-fp8-kv": (
        *("0.5.23", {"attention_backend": "trtllm_mha", "kv_cache_dtype": "fp8_e4m3"}, SM120, HYBRID),
        *({"attention_backend": "trtllm_mha", "kv_cache_dtype": "bf16"}, SM120, HYBRID),
    ),
    "attention-trtllm-mha-topk": (
        *("0.5.23", {**SPEC_314, "speculative_eagle_topk": 2, "attention_backend": "trtllm_mha"}, SM100, HYBRID),
        *({**SPEC_314, "attention_backend": "trtllm_mha"}, SM100, HYBRID),
    ),
    "linear-attention-flashinfer-state": (
        *("0.5.16", {"linear_attn_backend": "flashinfer"}, SM120, HYBRID),
        *({"linear_attn_backend": "flashinfer", "mamba_ssm_dtype": "bfloat16"}, SM120, HYBRID),
    ),
    "linear-attention-flashkda-decode": (
        *("0.5.16", {"linear_attn_decode_backend": "flashkda"}, SM100, HYBRID),
        *({"linear_attn_prefill_backend": "flashkda"}, SM100, HYBRID),
    ),
    "spec-hybrid-no-buffer": (
        *("0.5.11", SPEC, None, HYBRID),
        *({**SPEC, "mamba_scheduler_strategy": "extra_buffer"}, None, HYBRID),
    ),
    "hybrid-no-buffer-overlap": (
        *("0.5.23", {"mamba_radix_cache_strategy": "no_buffer"}, None, HYBRID),
        *({"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True}, None, HYBRID),
    ),
    "hybrid-no-buffer-page": (
        *("0.5.16", {"mamba_radix_cache_strategy": "no_buffer", "page_size": 64}, None, HYBRID),
        *({"mamba_radix_cache_strategy": "no_buffer", "page_size": 64, "disable_radix_cache": True}, None, HYBRID),
    ),
    "hybrid-lazy-spec-13": (
        *("0.5.13", {**SPEC_314, "mamba_scheduler_strategy": "extra_buffer_lazy"}, None, HYBRID),
        *({**SPEC_314, "mamba_scheduler_strategy": "extra_buffer"}, None, HYBRID),
    ),
    "hybrid-lazy-spec": (
        *("0.5.16", {**SPEC_314, "mamba_radix_cache_strategy": "extra_buffer_lazy"}, None, HYBRID),
        *({"mamba_radix_cache_strategy": "extra_buffer_lazy"}, None, HYBRID),
    ),
    "spec-v2-topk": (
        *("0.5.10.post1", {**SPEC_314, "speculative_eagle_topk": 4, **V2}, None, ModelFacts()),
        *({**SPEC_314, **V2}, None, ModelFacts()),
    ),
    "spec-steps-alone": (
        *("0.5.23", {**SPEC, "speculative_num_steps": 3}, None, ModelFacts()),
        *(SPEC, None, ModelFacts()),
    ),
    "spec-without-steps": (
        *("0.5.16", {**SPEC, "speculative_num_draft_tokens": 4}, None, ModelFacts()),
        *(SPEC_314, None, ModelFacts()),
    ),
    "moe-cutedsl-quantization": (
        *("0.5.23", {"moe_runner_backend": "flashinfer_cutedsl"}, None, HYBRID),
        *({"moe_runner_backend": "flashinfer_cutedsl"}, None, ModelFacts()),
    ),
    "moe-cutedsl-detected-checkpoint": (
        *("0.5.16", {"moe_runner_backend": "flashinfer_cutedsl"}, SM100, HYBRID_NVFP4),
        *({"moe_runner_backend": "flashinfer_cutedsl", "quantization": "modelopt_fp4"}, SM100, HYBRID_NVFP4),
    ),
    "moe-flashinfer-cutlass-quantization": (
        *("0.5.16", {"moe_runner_backend": "flashinfer_cutlass", "quantization": "fp8"}, None, ModelFacts()),
        *({"moe_runner_backend": "flashinfer_cutlass"}, None, ModelFacts()),
    ),
    "moe-nvfp4-before-blackwell": (
        *("0.5.23", {"moe_runner_backend": "triton"}, H200, HYBRID_NVFP4),
        *({"moe_runner_backend": "marlin"}, H200, HYBRID_NVFP4),
    ),
    "moe-nvfp4-before-blackwell-any": ("0.5.11", {}, H200, HYBRID_NVFP4, {}, SM120, HYBRID_NVFP4),
    "fp4-gemm-before-blackwell": (
        *("0.5.23", {"fp4_gemm_backend": "flashinfer_cutlass"}, H200, HYBRID_NVFP4),
        *({"fp4_gemm_backend": "flashinfer_cutlass"}, SM120, HYBRID_NVFP4),
    ),
    "kv-mxfp8-before-blackwell": (
        *("0.5.16", {"kv_cache_dtype": "mxfp8"}, H200, HYBRID),
        *({"kv_cache_dtype": "mxfp8"}, SM120, HYBRID),
    ),
    "kv-nvfp4-before-blackwell": (
        *("0.5.16", {"kv_cache_dtype": "nvfp4"}, H200, HYBRID),
        *({"kv_cache_dtype": "nvfp4"}, SM120, HYBRID),
    ),
    "kv-fp4-e2m1-deprecated": (
        *("0.5.20", {"kv_cache_dtype": "fp4_e2m1"}, SM100, HYBRID),
        *({"kv_cache_dtype": "fp4_mx_block16"}, SM100, HYBRID),
    ),
    "cpu-hybrid-extra-buffer": (
        *("0.5.21", {"device": "cpu", "mamba_radix_cache_strategy": "extra_buffer"}, CPU, HYBRID),
        *({"mamba_radix_cache_strategy": "extra_buffer"}, H200, HYBRID),
    ),
    "cpu-hybrid-auto": (
        *("0.5.15.post1", {"device": "cpu"}, CPU, HYBRID),
        *({"device": "cpu", "disable_overlap_schedule": True}, CPU, HYBRID),
    ),
    "cpu-ngram": (
        *("0.5.11", {"device": "cpu", "speculative_algorithm": "NGRAM"}, CPU, HYBRID),
        *({"speculative_algorithm": "NGRAM"}, CPU, ModelFacts()),
    ),
    "cpu-eagle-triton": (
        *("0.5.15.post1", {"device": "cpu", **SPEC}, None, ModelFacts()),
        *(SPEC, None, ModelFacts()),
    ),
    "cpu-eagle-cuda": ("0.5.19", {"device": "cpu", **SPEC}, None, ModelFacts(), SPEC, None, ModelFacts()),
    "cpu-eagle-torch-native": (
        *("0.5.21", {"device": "cpu", **SPEC, "attention_backend": "torch_native"}, None, ModelFacts()),
        *({"device": "cpu", **SPEC, "attention_backend": "triton"}, None, ModelFacts()),
    ),
    "cpu-attention-triton": (
        *("0.5.15.post1", {"device": "cpu", "attention_backend": "triton"}, CPU, ModelFacts()),
        *({"attention_backend": "triton"}, H200, ModelFacts()),
    ),
    "cpu-attention-flashinfer": (
        *("0.5.15.post1", {"device": "cpu", "attention_backend": "flashinfer"}, CPU, ModelFacts()),
        *({"attention_backend": "flashinfer"}, H200, ModelFacts()),
    ),
    "cpu-attention-intel-amx": (
        *("0.5.23", {"device": "cpu", "attention_backend": "intel_amx"}, CPU, ModelFacts()),
        *({"device": "cpu", "attention_backend": "intel_amx"}, Gpu(sm=None, amx=True), ModelFacts()),
    ),
    "cpu-kv-fp8-without-amx": (
        *("0.5.20", {"device": "cpu", "kv_cache_dtype": "fp8_e4m3"}, CPU, ModelFacts()),
        *({"device": "cpu", "kv_cache_dtype": "fp8_e4m3"}, Gpu(sm=None), ModelFacts()),
    ),
    "cpu-kv-e5m2": (
        *("0.5.20", {"device": "cpu", "kv_cache_dtype": "fp8_e5m2"}, None, ModelFacts()),
        *({"kv_cache_dtype": "fp8_e5m2"}, H200, ModelFacts()),
    ),
    "nodes-divide-tp": (
        *("0.5.11", {"tensor_parallel_size": 8, "nnodes": 3}, None, ModelFacts()),
        *({"tp_size": 8, "nnodes": 2}, None, ModelFacts()),
    ),
}


@pytest.mark.parametrize("rule", flags.RULES, ids=lambda r: r.id)
def test_rule_speaks_when_it_applies_and_is_silent_otherwise(rule: flags.Rule) -> None:
    """Every rule has a source and a pattern, one configuration that it predicts, and one near it that it does not."""
    assert (
        rule.source and re.compile(rule.pattern) and rule.outcome in ("crashes", "unsupported_here", "silently_ignored")
    )
    assert flags.Version.of(rule.since).text in flags.known_versions()
    version, asked, gpu, model, other, other_gpu, other_model = CASES[rule.id]
    assert rule.id in [f.id for f in check_arguments(config(**asked), version, gpu, model)]
    assert rule.id not in [f.id for f in check_arguments(config(**other), version, other_gpu, other_model)]


@pytest.mark.parametrize("rule", [r for r in flags.RULES if r.until], ids=lambda r: r.id)
def test_rule_ends_with_its_last_release(rule: flags.Rule) -> None:
    """The same configuration draws no such prediction on the release after the rule's last."""
    _, asked, gpu, model, *_ = CASES[rule.id]
    known = flags.known_versions()
    after = known[known.index(rule.until or "") + 1]
    assert rule.id not in [f.id for f in check_arguments(config(**asked), after, gpu, model)]


def test_unknown_device_and_model_predict_nothing_about_them() -> None:
    """Without facts about GPU and checkpoint, only what argparse and the arguments alone decide is predicted."""
    asked = config(attention_backend="trtllm_mha", moe_runner_backend="triton", mamba_radix_cache_strategy="no_buffer")
    assert check_arguments(asked, "0.5.16") == []
    assert len(check_arguments(asked, "0.5.16", H200, HYBRID_NVFP4)) == 3


@pytest.mark.parametrize(
    ("asked", "pattern_of"),
    [
        ({"no_such_flag": 1}, "sglang serve: error: unrecognized arguments: --no-such-flag 1"),
        (
            {"tp_size": "two"},
            "sglang serve: error: argument --tp-size/--tensor-parallel-size: invalid int value: 'two'",
        ),
        (
            {"--speculative-num": "3"},
            "sglang serve: error: ambiguous option: --speculative-num could match --speculative-num-steps, ...",
        ),
        (
            {"kv_cache_dtype": "fp8"},
            "sglang serve: error: argument --kv-cache-dtype: invalid choice: 'fp8' (choose from 'auto', 'fp8_e5m2')",
        ),
    ],
)
def test_what_argparse_refuses_is_known(asked: dict[str, Any], pattern_of: str) -> None:
    """Exit 2 is predicted with a pattern that argparse's own message matches (checked against the real one below)."""
    found = check_arguments(config(**asked), "0.5.15.post1", strict=False)
    assert [f.exit_code for f in found] == [2]
    assert re.search(found[0].pattern, pattern_of)


def test_abbreviation_is_read_as_argparse_reads_it() -> None:
    """--attention-back completes to --attention-backend: not refused, and the rules see its value."""
    asked = config(**{"--attention-back": "trtllm_mha"})
    assert [f.id for f in check_arguments(asked, "0.5.16", H200, strict=False)] == ["attention-trtllm-mha-prefill"]


# ------------------------------------------------------------------------------------------------ the table of backends


def test_backend_notes_name_values_that_exist_and_have_sources() -> None:
    """A note belongs to a value that some known release takes; none is without a source."""
    known = {(b.axis, b.value) for b in flags.backends()}
    for note in flags.HARDWARE_NOTES:
        assert (note.axis, note.value) in known and note.source and note.text


def test_backends_by_version() -> None:
    """--fp4-gemm-backend cutlass ends with 0.5.15.post1; marlin for MoE begins with 0.5.12."""
    rows = {(b.axis, b.value): b for b in flags.backends()}
    assert rows["fp4_gemm", "cutlass"].versions == [("0.5.10", "0.5.15.post1")]
    assert rows["moe_runner", "marlin"].versions == [("0.5.12", "0.5.23")]
    assert rows["linear_attn", "nv_cutedsl"].fields == ["linear_attn_verify_backend"]


def test_docs_are_current() -> None:
    """docs/backends.md is what the tables say; write it again with backends_markdown()."""
    assert (ROOT / "docs/backends.md").read_text("utf-8") == flags.backends_markdown()


# ---------------------------------------------------------------------------------------------- the extractor's reading


def wheel(folder: Path, server_args: str, **modules: str) -> Path:
    """A pretended unpacked wheel with this server_args.py and further modules under sglang/srt."""
    srt = folder / "sglang" / "srt"
    srt.mkdir(parents=True)
    (srt / "server_args.py").write_text(server_args, "utf-8")
    for name, text in modules.items():
        (srt / f"{name}.py").write_text(text, "utf-8")
    return folder


OLD = """
import argparse
from sglang.srt.names import MORE, Parser, Mode
CHOICES = ["a", *MORE]
def add_choices(x): CHOICES.extend(x)
class ServerArgs:
    size: int = 4 * 2
    def add_cli_args(parser):
        dynamic = list(Parser.Map.keys())
        parser.add_argument("--size", "--sz", type=int, default=ServerArgs.size, help=f"{dynamic}")
        parser.add_argument("--kind", choices=CHOICES, default=None)
        parser.add_argument("--parser", choices=["auto"] + dynamic)
        parser.add_argument("--mode", choices=[m.name.lower() for m in Mode])
        parser.add_argument("--unknowable", choices=compute())
        parser.add_argument("--flag", action="store_true")
"""
NAMES = """
from enum import IntEnum
MORE = {"c", "b"}
class Parser:
    Map: dict = {"x": object, "y": object}
class Mode(IntEnum):
    ONE = 1
    TWO = 2
"""


def test_extractor_follows_constants_imports_enums_and_says_what_it_cannot(tmp_path: Path) -> None:
    """Choices come through constants, stars, imports, class attributes and enums; a call stays unresolved, and said."""
    rows = {r["flags"][0]: r for r in extract.Extraction(wheel(tmp_path, OLD, names=NAMES)).flags()}
    assert rows["--size"] == {
        "flags": ["--size", "--sz"],
        "dest": "size",
        "action": "store",
        "type": "int",
        "default": 8,
    }
    assert rows["--kind"]["choices"] == ["a", "b", "c"]
    assert rows["--parser"]["choices"] == ["auto", "x", "y"]
    assert rows["--mode"]["choices"] == ["one", "two"]
    assert rows["--unknowable"]["unresolved"] == {"choices": "compute()"}
    assert rows["--flag"]["action"] == "true" and rows["--flag"]["default"] is False


NEW = '''
from typing import Annotated as A, List, Literal, Optional
class ServerArgs:
    """A docstring."""
    path: A[str, Arg(help="x", aliases=["--p"])]
    many: A[Optional[List[int]], "x"] = None
    pick: A[Literal["u", "v"], "x" "y"] = "u"
    on: A[bool, f"x{1}"] = False
    hidden: A[str, Arg(no_cli=True)] = ""
    twice: A[int, "x"] = 1
    twice: A[float, "x"] = 2.0
    def add_cli_args(parser):
        add_cli_args_from_dataclass(parser, ServerArgs)
        parser.add_argument(
            "--old", dest="pick", action=DeprecatedAliasStoreAction, new_flag="--pick", default=argparse.SUPPRESS
        )
'''


def test_extractor_reads_annotated_fields(tmp_path: Path) -> None:
    """Fields with Arg or help text become flags as SGLang's own reader makes them; no_cli fields do not."""
    rows = {r["flags"][0]: r for r in extract.Extraction(wheel(tmp_path, NEW)).flags()}
    assert list(rows) == ["--path", "--many", "--pick", "--on", "--twice", "--old"]
    assert rows["--path"]["required"] is True and rows["--path"]["flags"] == ["--path", "--p"]
    assert (rows["--many"]["nargs"], rows["--many"]["type"]) == ("+", "int")
    assert rows["--pick"]["choices"] == ["u", "v"] and rows["--on"]["action"] == "true"
    assert rows["--twice"]["type"] == "float"
    assert rows["--old"]["use"] == "--pick" and rows["--old"]["suppressed"] is True


def test_extractor_merges_equal_releases_and_splits_changed_ones(tmp_path: Path) -> None:
    """A flag that stays the same has one form; a changed choice starts a new one, a gap stays a gap."""
    first = extract.Extraction(wheel(tmp_path / "1", OLD, names=NAMES))
    second = extract.Extraction(wheel(tmp_path / "2", OLD.replace("--flag", "--other"), names=NAMES))
    third = extract.Extraction(wheel(tmp_path / "3", OLD, names=NAMES.replace('"c"', '"d"')))
    table = json.loads(extract.dump(extract.table_of({"1": first, "2": second, "3": third})))
    assert [(f["since"], f["until"]) for f in table["flags"]["--size"]] == [("1", "3")]
    assert [(f["since"], f["until"]) for f in table["flags"]["--kind"]] == [("1", "2"), ("3", "3")]
    assert [(f["since"], f["until"]) for f in table["flags"]["--flag"]] == [("1", "1"), ("3", "3")]


def test_extractor_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    """A folder without server_args.py, broken source and an unknown action each end with a message."""
    with pytest.raises(BadInput, match="unpacked sglang wheel"):
        extract.Extraction(tmp_path)
    with pytest.raises(BadInput, match="as Python source"):
        extract.Extraction(wheel(tmp_path / "a", "def ("))
    strange = OLD.replace('"store_true"', '"append"')
    with pytest.raises(BadInput, match="known argparse action"):
        extract.Extraction(wheel(tmp_path / "b", strange, names=NAMES)).flags()
    with pytest.raises(BadInput, match="VERSION=FOLDER"):
        extract.main([])


# ------------------------------------------------------------------------------------------ against the real parser


def server_python() -> Path:
    """The Python that has SGLang: WORKBOOK_SERVER_PYTHON, else .venv-sglang here or in the main checkout."""
    asked = os.environ.get("WORKBOOK_SERVER_PYTHON")
    if asked:
        return Path(asked)
    common = subprocess.run(
        ["git", "rev-parse", "--path-format=absolute", "--git-common-dir"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    roots = [ROOT, *([Path(common).parent] if common else [])]
    found = [r / ".venv-sglang/bin/python" for r in roots if (r / ".venv-sglang/bin/python").exists()]
    if not found:
        pytest.skip("no .venv-sglang: run the set-up, or name a Python with SGLang in WORKBOOK_SERVER_PYTHON")
    return found[0]


def ask_real_parser(asked: list[list[str]] | None, what: str = "parse") -> tuple[str, list[dict[str, Any]]]:
    """SGLang's version and its answers to these argument lists; one process, no server."""
    done = subprocess.run(
        [str(server_python()), str(HERE / "dump_parser.py")],
        input="" if asked is None else json.dumps({what: asked}),
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    return answer["version"], answer["answers"]


@pytest.fixture(scope="module")
def real_options() -> tuple[str, list[dict[str, Any]]]:
    """Every option of the real parser."""
    return ask_real_parser(None)


ACTIONS = {
    "_StoreAction": "store",
    "_StoreTrueAction": "true",
    "BooleanOptionalAction": "on_off",
    "DeprecatedAction": "ignored",
    "DeprecatedStoreTrueAction": "deprecated_true",
    "DeprecatedStoreConstAction": "deprecated_const",
    "DeprecatedAliasStoreAction": "deprecated_store",
    "LoRAPathAction": "lora_paths",
}


@pytest.mark.server
def test_table_equals_the_real_parser(real_options: tuple[str, list[dict[str, Any]]]) -> None:
    """Every option of the installed SGLang: names, field, action, type, arity, choices, default, replacement."""
    version, options = real_options
    here = flags.release(version)
    assert {o["flags"][0] for o in options} == set(here.forms)
    for option in options:
        form = here.forms[option["flags"][0]]
        names = [f for f in option["flags"] if not (form.action == "on_off" and f.startswith("--no-"))]
        assert list(form.spellings) == names
        choices = option["choices"] if option["ordered"] or not option["choices"] else sorted(option["choices"])
        values = form.action in ("store", "deprecated_store", "lora_paths")
        told = {
            "dest": form.dest,
            "action": form.action,
            "choices": None if form.choices is None else list(form.choices),
            "default": form.default,
            "required": form.required,
            "new_flag": form.use,
            "nargs": form.nargs if values else None,
            "type": form.type if values else None,
            "const": form.const,
        }
        kind = option["type"] or "str"
        read = {
            "dest": option["dest"],
            "action": ACTIONS[option["action"]],
            "choices": choices,
            "default": None if option["suppressed"] else option["default"],
            "required": option["required"],
            "new_flag": option["new_flag"],
            "nargs": option["nargs"] if values else None,
            "type": extract.TYPES.get(kind, kind) if values else None,
            "const": option["const_value"]
            if form.action == "deprecated_const"
            else option["const"]
            if values
            else None,
        }
        assert told == read, form.flag


#: values of every type for the flags of 0.5.15.post1, as the parser must hold them afterwards
ASKED: dict[str, Any] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "fp4_gemm_runner_backend": "flashinfer_cudnn",
    "moe_runner_backend": "flashinfer_cutlass",
    "kv_cache_dtype": "bf16",
    "tp_size": 8,
    "chunked_prefill_size": -1,
    "mem_fraction_static": 1e-07,
    "schedule_conservativeness": -0.5,
    "max_total_tokens": "64k",
    "context_length": 262144,
    "trust_remote_code": True,
    "enable_metrics": True,
    "lora_strict_loading": True,
    "cuda_graph_bs_decode": [1, 2, 4, 8],
    "json_model_override_args": '{"rope": {"factor": -1.5}}',
    "preferred_sampling_params": {"temperature": 0.6, "stop": ["-"]},
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": 3,
    "mamba_radix_cache_strategy": "extra_buffer",
    "chat_template": "-starts-with-a-dash",
    "api_key": "--looks-like-a-flag=yes",
    "random_seed": -42,
    "bucket_time_to_first_token": [0.5, -1.25],
}


@pytest.mark.server
def test_asked_values_come_back_from_the_real_parser(real_options: tuple[str, list[dict[str, Any]]]) -> None:
    """What `launch_argv` writes is what the real parser holds, for hostile names and values of every type."""
    version, options = real_options
    hostile: list[tuple[str, str]] = []
    words = st.text(min_size=1, max_size=40).filter(lambda t: "\0" not in t and flags._encodable(t))
    nasty = st.sampled_from(
        [
            "--",
            "-",
            "-1",
            "--host",
            "--config",
            "--port=1",
            "-x y",
            " ",
            "a b",
            "'\"",
            "$(rm)",
            "\n",
            "=",
            "--a=b",
            "名前",
        ]
    )

    @settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(model=words | nasty | nasty.flatmap(lambda n: words.map(lambda w: n + w)), served=words | nasty)
    @example(model="--", served="x")
    def collect(model: str, served: str) -> None:
        hostile.append((model, served))

    collect()
    launches: list[flags.Launch] = []
    wanted: list[dict[str, Any]] = []
    refused = 0
    for model, served in hostile:
        try:
            launch = launch_argv(
                {"model_path": model, "served_model_name": served, "flags": ASKED}, version, "127.0.0.1", 31999
            )
        except BadParams as error:
            assert model == "--" or served == "--", error
            refused += 1
            continue
        launches.append(launch)
        wanted.append({**ASKED, "model_path": model, "served_model_name": served, "host": "127.0.0.1", "port": 31999})
    assert refused >= 1 and len(launches) >= 100
    # every choice of every flag, alone
    here = flags.release(version)
    for form in here.forms.values():
        if form.action == "store" and form.choices and form.dest not in flags.OWNED:
            for choice in form.choices:
                if choice is not None:
                    value = [choice] if form.nargs in ("+", "*") else choice
                    launches.append(launch_argv(config(**{form.dest: value}), version, "h", 1))
                    wanted.append({form.dest: value})
    _, answers = ask_real_parser([launch.argv for launch in launches])
    for want, answer in zip(wanted, answers, strict=True):
        assert "values" in answer, (want, answer)
        want = {**want, **({"max_total_tokens": 64000} if "max_total_tokens" in want else {})}
        held = {name: answer["values"][name] for name in want}
        assert held == want
    for launch, answer in zip(launches, answers, strict=True):
        assert {name: answer["values"][name] for name in launch.fields} == launch.fields


@pytest.mark.server
def test_predicted_refusals_are_the_real_parsers(real_options: tuple[str, list[dict[str, Any]]]) -> None:
    """Unknown flags, wrong choices and numbers, ambiguous beginnings: exit 2, in words that the pattern matches."""
    version, _ = real_options
    wrong: list[dict[str, Any]] = [
        {"no_such_flag": "1"},
        {"--fp4-gemm-runner-backend": "flashinfer_cutlass"},
        {"attention_backend": "trtlm"},
        {"kv_cache_dtype": "fp8"},
        {"tp_size": "two"},
        {"mem_fraction_static": "lots"},
        {"--speculative-num": "3"},
        {"cuda_graph_bs_decode": ["1", "x"]},
        {"context_length": "1.5Ki"},
        {"max_total_tokens": "many"},
        {"preferred_sampling_params": "{"},
    ]
    lists = [launch_argv(config(**w), version, "h", 1, strict=False).argv for w in wrong]
    _, answers = ask_real_parser(lists)
    for asked, answer in zip(wrong, answers, strict=True):
        found = check_arguments(config(**asked), version, strict=False)
        assert [f.exit_code for f in found] == [2] == [answer["exit"]], (asked, answer)
        assert re.search(found[0].pattern, answer["error"]), (found[0].pattern, answer["error"])


#: the smallest config.json that SGLang's argument checks read: a dense model and one with linear attention
DENSE_JSON: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}
HYBRID_JSON: dict[str, Any] = {
    **DENSE_JSON,
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "full_attention_interval": 4,
}


def without_none(**asked: Any) -> dict[str, Any]:
    """The flags that are not None."""
    return {k: v for k, v in asked.items() if v is not None}


@pytest.mark.server
def test_argument_rules_agree_with_the_real_argument_checks(tmp_path: Path) -> None:
    """Over grids of flags the first prediction is what the real ServerArgs says; no prediction: it accepts."""
    for name, text in (("dense", DENSE_JSON), ("hybrid", HYBRID_JSON)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(text), "utf-8")
    grid: list[tuple[str, dict[str, Any]]] = [
        ("dense", without_none(speculative_num_steps=a, speculative_eagle_topk=b, speculative_num_draft_tokens=c))
        for a in (None, 3)
        for b in (None, 1, 2)
        for c in (None, 4)
    ]
    for _, asked in grid:
        asked.update(speculative_algorithm="EAGLE", speculative_draft_model_path=str(tmp_path / "dense"))
    grid += [
        (
            "hybrid",
            without_none(mamba_radix_cache_strategy=a, disable_overlap_schedule=b, page_size=c, disable_radix_cache=d),
        )
        for a in (None, "auto", "no_buffer", "extra_buffer", "extra_buffer_lazy")
        for b in (None, True)
        for c in (None, 1, 64)
        for d in (None, True)
    ]
    grid += [("dense", {"tp_size": 8, "nnodes": n}) for n in (1, 2, 3, 5, 8)]
    grid += [
        ("dense", without_none(moe_runner_backend=b, quantization=q))
        for b in (None, "triton", "flashinfer_cutlass", "flashinfer_cutedsl")
        for q in (None, "fp8")
    ]
    grid += [("dense", {n: "trtllm_mha"}) for n in ("prefill_attention_backend", "decode_attention_backend")]
    grid += [("dense", {"speculative_algorithm": "NGRAM"}), ("dense", {"linear_attn_decode_backend": "flashkda"})]
    grid += [("dense", {"attention_backend": b}) for b in ("intel_amx", "torch_native")]
    version, _ = ask_real_parser([])
    common = {"device": "cpu", "sampling_backend": "pytorch", "grammar_backend": "none"}
    lists, predicted = [], []
    for name, asked in grid:
        told = {
            "model_path": str(tmp_path / name),
            "flags": {
                **common,
                **({} if "attention_backend" in asked else {"attention_backend": "torch_native"}),
                **asked,
            },
        }
        lists.append(launch_argv(told, version, "127.0.0.1", 31999).argv)
        facts = ModelFacts(hybrid=name == "hybrid", nvfp4_dense=False, nvfp4_experts=False)
        # what the scheduler says later is none of the argument checks' business
        predicted.append([f for f in check_arguments(told, version, CPU, facts) if f.exit_code == 1])
    _, answers = ask_real_parser(lists, "check")
    refused = 0
    for (name, asked), found, answer in zip(grid, predicted, answers, strict=True):
        if answer["error"] is None:
            assert found == [], (name, asked)
            continue
        refused += 1
        assert found, (name, asked, answer)
        assert re.search(found[0].pattern, answer["error"], re.MULTILINE), (name, asked, found[0].id, answer)
    assert refused >= 20 and refused < len(grid) - 20
