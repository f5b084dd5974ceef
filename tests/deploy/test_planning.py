"""From a profile and a run to a plan: what must be shown, what speaks against it, where secrets go. No host is touched."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lib.deploy.planning import (
    RunMeasured,
    _secrets,
    arguments_of,
    capacity_objections,
    expectation_of,
    not_claimed,
    objections_to,
    read_measured,
)
from lib.deploy.proof import served_facts
from lib.deploy.rollout import plain_command, rendered, server_command
from lib.deploy.unit import lint_unit, parse_unit
from lib.errors import BadInput, BadParams
from lib.hosts.view import HostGpu
from lib.model.checkpoint import checkpoint_from_configs
from lib.params import DeployParams, Profile, ServerParams
from lib.records import Measured, NotebookResult, Provenance, ServerIdentity, Trial
from lib.server.log import read_log
from tests.conftest import ROOT
from tests.deploy.test_stopping import view

RECORDED = ROOT / "tests" / "recorded"
CONFIG = json.loads((ROOT / "tests/cases/kv_memory/inputs/llama-3.1-8b.config.json").read_text())
LLAMA = checkpoint_from_configs(CONFIG, weight_bytes=16_060_522_496)
ARGV = ["/opt/v/bin/python", "-m", "sglang.launch_server", "--model-path", "/m", "--host", "127.0.0.1", "--port", "30000"]
GPU = HostGpu(
    index=0, name="NVIDIA H200", uuid="GPU-1", memory_total_mib=143771.0, memory_used_mib=0.0, driver_version="1", compute_cap="9.0",
)  # fmt: skip
IMAGE = f"lmsysorg/sglang@sha256:{'a' * 64}"


def profile(**server: Any) -> Profile:
    """A profile with these server keys."""
    return Profile(title="t", server=ServerParams(model="/m", **server))


def made_run(folder: Path, log: str, argv: list[str], environment: dict[str, str], gpus: list[dict[str, Any]], **info: Any) -> Path:
    """A run whose notebook 03 launched a server with a recorded log and measured one level."""
    home = folder / "raw" / "03" / "servers" / "L1"
    home.mkdir(parents=True)
    shutil.copy(RECORDED / log, home / "server.log")
    (home / "server_info.json").write_text(json.dumps({"version": "0.5.16", **info}))
    launch = {"phases": [["loading_weights", 12.5]], "host": {"gpus": gpus}, "gpu_before": {"used_mib": {"GPU-1": 500.0}}}
    (home / "launch.json").write_text(json.dumps(launch))
    params = {"dataset": "code", "input_len": 64, "output_len": 16, "api": "completions", "seed": 42}
    provenance = Provenance(
        commit=None, dirty=None, workbook_version="1", python="3.11", packages_sha256="x", params_sha256="x", params=params, host={},
    )  # fmt: skip
    rate = Measured(value=100.0, unit="tok/s", n=4, low=90.0, high=110.0)
    trials = [Trial(id=f"level-C{c}", what="x", outcome="works", values={"output_tokens_per_s": rate}) for c in (4, 1)]
    result = NotebookResult(
        notebook="03", title="t", question="q", run_id="r", profile="p", started="s", ended="e", seconds=1.0, server_seconds=1.0,
        provenance=provenance, servers=[ServerIdentity(launch_id="L1", origin="launched", argv=argv, environment=environment)],
        trials=trials, recommendation="x",
    )  # fmt: skip
    (folder / "03.result.json").write_text(result.model_dump_json())
    return folder


def test_what_a_run_measured_is_what_must_be_shown(tmp_path: Path) -> None:
    """Version, dtype, tokens, flags, GPU memory, throughput interval, phases: from the run's own raw files."""
    gpus = [{"memory_total_mib": 143771.0}]
    run = made_run(tmp_path, "h200-sglang-0.5.16/m1_auto.log", ARGV, {}, gpus, tp_size=1, attention_backend="triton")
    measured = read_measured(run)
    found = expectation_of(profile(flags={"tp_size": 1, "attention-backend": "triton"}), 30000, "0.5.16", LLAMA, True, measured, {})
    assert (found.kv_cache_dtype, found.max_total_num_tokens, found.sglang_version) == ("bfloat16", 5741583, "0.5.16")
    assert found.flags == {"tp_size": 1, "attention_backend": "triton"} and found.output_tokens_per_s == (90.0, 110.0)
    # 143771 MiB in all, 96.28 GiB free at the end (98590.7 MiB), 500 MiB held before
    assert found.gpu_memory_mib == pytest.approx(143771 - 96.28 * 1024 - 500)
    assert found.backends["moe_runner_backend"] == "triton" and measured.phases == {"loading_weights": 12.5}
    assert measured.level and (measured.level["concurrency"], measured.level["seed"], measured.level["count"]) == (1, 43, 4)
    assert not_claimed(found, measured) == []


RATE = Measured(value=100.0, unit="tok/s", n=4, low=90.0, high=110.0)
LATE = {"outcome": "client_bound", "reason": "the client was late by 40 ms"}


@pytest.mark.parametrize(
    ("trials", "dataset", "why"),
    [
        ([LATE], "code", "level-C1 of notebook 03: client bound, the client was late by 40 ms"),
        ([{**LATE, "values": {"output_tokens_per_s": RATE}}], "code", "level-C1 of notebook 03: client bound, the client was late"),
        ([{"outcome": "works", "values": {"output_tokens_per_s": Measured(value=9.0, reason="one request")}}], "code",
         "level-C1 of notebook 03: works, one request"),
        ([{"outcome": "works", "values": {"output_tokens_per_s": RATE}}], "random_ids", "notebook 03 sent random ids"),
        ([], "code", "notebook 03 has no level"),
    ],
)  # fmt: skip
def test_what_gives_no_interval_is_not_claimed_and_says_why(
    tmp_path: Path, trials: list[dict[str, Any]], dataset: str, why: str
) -> None:
    """A level that the client spoilt counts for nothing, its figure included; the plan names the level, its outcome and why."""
    run = made_run(tmp_path, "h200-sglang-0.5.16/m1_auto.log", ARGV, {}, [], tp_size=1)
    result = NotebookResult.model_validate_json((run / "03.result.json").read_text())
    result.provenance.params["dataset"] = dataset
    made = [Trial(id="level-C1", what="x", **one) for one in trials]
    (run / "03.result.json").write_text(result.model_copy(update={"trials": made}).model_dump_json())
    measured = read_measured(run)
    found = expectation_of(profile(), 30000, "0.5.16", LLAMA, True, measured, {})
    assert measured.level is None and found.output_tokens_per_s is None
    assert [line for line in not_claimed(found, measured) if line.startswith(f"output_tokens_per_s: {why}")]


def test_a_run_without_notebook_03_has_no_interval(tmp_path: Path) -> None:
    """What 01 launched is compared; its throughput is not claimed, because nobody sent a level."""
    run = made_run(tmp_path, "h200-sglang-0.5.16/m1_auto.log", ARGV, {}, [], tp_size=1)
    text = (run / "03.result.json").read_text()
    (run / "03.result.json").unlink()
    (run / "01.result.json").write_text(text.replace('"notebook":"03"', '"notebook":"01"'))
    measured = read_measured(run)
    found = expectation_of(profile(), 30000, "0.5.16", LLAMA, True, measured, {})
    assert "output_tokens_per_s: the run has no notebook 03" in not_claimed(found, measured)


def test_without_a_run_what_nobody_measured_is_not_claimed() -> None:
    """The dtype follows from the rules of this version; the rest is named as not claimed."""
    found = expectation_of(profile(flags={"kv_cache_dtype": "fp8_e4m3"}), 30000, "0.5.16", LLAMA, True, None, {})
    assert found.kv_cache_dtype == "float8_e4m3fn" and found.max_total_num_tokens is None and found.flags == {}
    assert [line.partition(":")[0] for line in not_claimed(found, None)] == [
        "max_total_num_tokens", "output_tokens_per_s", "gpu_memory_mib", "flags",
    ]  # fmt: skip


def test_a_run_without_a_launched_server_is_refused(tmp_path: Path) -> None:
    """There is nothing to compare with."""
    with pytest.raises(BadInput, match="run 03 first"):
        read_measured(tmp_path)


def measured_with(argv: list[str], environment: dict[str, str], tokens: int | None = None) -> RunMeasured:
    """What a run measured, by hand."""
    log = read_log([b""])
    facts = {**served_facts(log, None), "max_total_num_tokens": tokens}
    server = ServerIdentity(launch_id="L1", origin="launched", argv=argv, environment=environment)
    return RunMeasured(server, "03", log, facts, None, None, None, None, {})


def objections(argv: list[str], measured: RunMeasured | None = None, **params: Any) -> dict[str | None, str]:
    """Objections by name on one H200."""
    found, _ = objections_to(argv, {"A": "1"}, "0.5.16", LLAMA, view([], gpus=[GPU]), True, DeployParams(**params), measured)
    return {o.name: o.reason for o in found}


def test_a_run_that_measured_something_else_is_an_objection() -> None:
    """Another flag, another variable, or one that only the measured process had; the port is not counted."""
    same = [*ARGV[:-1], "24000"]
    assert "not-measured" not in objections(ARGV, measured_with(same, {"A": "1"}))
    assert "--tp-size 2" in objections([*ARGV, "--tp-size", "2"], measured_with(same, {"A": "1"}))["not-measured"]
    assert "OMP_NUM_THREADS=2" in objections(ARGV, measured_with(same, {"A": "1", "OMP_NUM_THREADS": "2"}))["not-measured"]
    assert "A=1" in objections(ARGV, measured_with(same, {}))["not-measured"]


@pytest.mark.parametrize(
    ("argv", "params", "tokens", "words"),
    [
        ([], {}, None, None), ([], {"context_tokens": 131072, "concurrent_requests": 2}, None, None),
        ([], {"context_tokens": 200000}, None, "longer than the context"),
        (["--max-total-tokens", "1000"], {"context_tokens": 2000}, None, "pool of"),
        (["--max-running-requests", "4"], {"concurrent_requests": 8}, None, "max_running_requests=4"),
        ([], {"context_tokens": 131072, "concurrent_requests": 64}, None, "64 requests of 131072 tokens"),
        ([], {"context_tokens": 5000}, 4000, "pool of 4000"),
        (["--context-length", "100000", "--max-total-tokens", "50000"], {}, None, "asked for"),
    ],
)  # fmt: skip
def test_a_configuration_that_does_not_hold_what_it_has_to_is_an_objection(
    argv: list[str], params: dict[str, Any], tokens: int | None, words: str | None
) -> None:
    """Context, pool and concurrency; a measured pool is believed before a predicted one."""
    measured = measured_with(ARGV, {}, tokens) if tokens else None
    found, about = capacity_objections([*ARGV, *argv], "0.5.16", LLAMA, view([], gpus=[GPU]), True, DeployParams(**params), measured)
    assert (words is None and not found) or (words is not None and words in "; ".join(found)), (found, about)
    assert about["max_total_num_tokens"] and about["from"]


def test_weights_that_leave_no_memory_are_an_objection() -> None:
    """16 GB of weights on a GPU of 12 GiB: SGLang would refuse to start, so the plan does."""
    small = GPU.model_copy(update={"memory_total_mib": 12288.0})
    found, _ = capacity_objections(ARGV, "0.5.16", LLAMA, view([], gpus=[small]), True, DeployParams(), None)
    assert len(found) == 1 and "memory" in found[0]


def test_the_audit_of_the_planned_flags_objects() -> None:
    """A KV cache in e5m2, which the audit calls an error or a warning, shows in what the plan rests on."""
    _, about = objections_to(
        [*ARGV, "--kv-cache-dtype", "fp8_e5m2"], {}, "0.5.16", LLAMA, view([], gpus=[GPU]), True, DeployParams(), None
    )
    assert any("KV" in line for line in about["audit"]["findings"]), about["audit"]


def test_the_key_is_taken_out_of_the_environment_file() -> None:
    """The key goes to its own file; other variables need the unit to read them; a bad line is named without its text."""
    params = DeployParams(environment_file=True)
    text, key = _secrets("# note\nHF_TOKEN=hf_x\nKEY='sk-1'\n", "KEY", params)
    assert (text, key) == ("HF_TOKEN=hf_x\n", "sk-1")
    assert _secrets("KEY=sk-1\n", "KEY", DeployParams()) == (None, "sk-1")
    with pytest.raises(BadParams, match="environment_file: true"):
        _secrets("HF_TOKEN=hf_x\n", "KEY", DeployParams())
    with pytest.raises(BadInput, match="on line 2") as error:
        _secrets("A=1\nsk-secret-secret\n", None, params)
    assert "sk-secret" not in str(error.value)


def test_arguments_are_read_by_field_name() -> None:
    """Both spellings, and a flag alone."""
    assert arguments_of(["--tp-size", "8", "--a-b=c", "--enable-metrics"]) == {"tp_size": "8", "a_b": "c", "enable_metrics": "true"}


@pytest.mark.parametrize("key", [None, "KEY"])
def test_a_container_unit_is_chosen_by_parameters_and_sound(tmp_path: Path, key: str | None) -> None:
    """The same command behind the image, the model mounted where it lies, on loopback; systemd and our linter accept it."""
    box = {"image": IMAGE, "cache_volumes": [["/var/cache/sg", "/root/.cache"]], "docker": "/bin/true"}
    params = DeployParams.model_validate({"container": box, "service": "sglang-box"})
    name, text = rendered(params, ARGV, {"HF_HUB_OFFLINE": "1"}, True, key, 600.0, 60.0)
    words = list(parse_unit(text).commands("ExecStart")[0].argv)
    inside = server_command(words)
    assert inside[:4] == ["python3", "-m", "sglang.launch_server", "--model-path"] and inside[inside.index("--host") + 1] == "0.0.0.0"
    assert plain_command(inside)[3:5] == ["--model-path", "/m"] and words[words.index("-p") + 1] == "127.0.0.1:30000:30000"
    assert "/m:/m:ro" in words and "/var/cache/sg:/root/.cache" in words
    assert (("--config" in inside) and "/etc/sglang-box.key.yaml:/etc/sglang-box.key.yaml:ro" in words) == bool(key)
    assert [f for f in lint_unit(text) if f.level != "info"] == []
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    (tmp_path / name).write_text(text.replace("Requires=docker.service\n", ""))
    out = subprocess.run([analyze, "verify", "--man=no", str(tmp_path / name)], capture_output=True, text=True, timeout=60)
    assert (out.returncode, out.stdout + out.stderr) == (0, "")


def test_an_image_without_a_digest_is_refused() -> None:
    """A tag can be another image tomorrow."""
    with pytest.raises(ValueError, match="image"):
        DeployParams.model_validate({"container": {"image": "lmsysorg/sglang:latest"}})
