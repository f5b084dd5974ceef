"""`workbook audit`: inputs, exit codes, one JSON object, a readable form that hides nothing."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lib.cli import main
from tests.audit.checkpoints import FP8_KV, write_checkpoint

RECORDED = Path(__file__).parents[1] / "recorded"
M2 = str(RECORDED / "h200-sglang-0.5.16" / "m2_auto.log")
E_LOG = str(RECORDED / "h200-h1" / "e_L2_auto.log")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of one command."""
    code = main(["audit", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_nothing_given(capsys: pytest.CaptureFixture[str]) -> None:
    """One clear message that names the inputs."""
    code, out, err = run(capsys)
    assert code == 2 and out == "" and "--checkpoint" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("level", "code"), [(None, 0), ("info", 1), ("warning", 1), ("error", 0)], ids=["none", "info", "warning", "error"]
)
def test_exit_codes(capsys: pytest.CaptureFixture[str], level: str | None, code: int) -> None:
    """m2_auto has warnings and no error: 1 from --fail-on warning downwards."""
    assert run(capsys, "--log", M2, *(["--fail-on", level] if level else []))[0] == code


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    """One object on stdout with the four parts of the answer, nothing on stderr."""
    code, out, err = run(capsys, "--log", M2, "--json")
    report = json.loads(out)
    assert code == 0 and err == "" and report["verdict"] == "loses_accuracy"
    assert {"findings", "fine", "not_checked", "accepted_losses", "not_applicable", "answer", "facts"} <= set(report)
    documented = (Path(__file__).parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")
    for name in [*report, *report["findings"][0], *report["findings"][0]["fixes"][0], *report["not_checked"][0]]:
        assert f"`{name}`" in documented, f"{name} is not documented in docs/audit.md"


def test_readable_form_has_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    """Findings first, then accepted losses, fine, not checked with what would settle it."""
    out = run(capsys, "--log", M2)[1]
    parts = ["FINDINGS", "ACCEPTED WITH THE CHECKPOINT", "CHECKED AND FINE", "NOT CHECKED, and what would settle it"]
    places = [out.index(part) for part in parts]
    assert places == sorted(places) and out.startswith("Yes: ")
    assert "m2_auto.log:29" in out and "--checkpoint DIR" in out


def test_a_change_is_audited(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """e_L2_auto with its tensors, and the origin's fix: it brings KV3; without the tensors it is safe."""
    folder = str(write_checkpoint(tmp_path, hf_quant_config=FP8_KV, k_scale=0.05, v_scale=0.02))
    fix = ("--log", E_LOG, "--checkpoint", folder, "--change", "kv_cache_dtype=bfloat16", "--fail-on", "error")
    code, out, _ = run(capsys, *fix)
    assert code == 1 and "brings findings" in out and "BRINGS KV3 (error)" in out
    gone = '{"present": false, "count": 0, "all_one": null}'
    code, out, _ = run(capsys, *fix, "--change", f"kv_scales={gone}", "--json")
    assert code == 0 and json.loads(out)["verdict"] == "safe"


def test_a_change_of_nothing_that_exists(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown name is refused with the names that can be changed."""
    code, _, err = run(capsys, "--log", M2, "--change", "kv_dtype=bf16")
    assert code == 2 and "kv_cache_dtype" in err


def test_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`-` reads a log from standard input; two inputs cannot both do so."""
    raw = Path(M2).read_bytes()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(raw), read=lambda: raw.decode()))
    code, out, _ = run(capsys, "--log", "-", "--json")
    assert code == 0 and any(item["id"] == "KV1" for item in json.loads(out)["findings"])
    assert run(capsys, "--log", "-", "--metrics", "-")[0] == 2


def test_all_inputs_together(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Log, /server_info, environment, GPU, version, output and launch line of one deployment."""
    environ = tmp_path / "environ"
    environ.write_bytes(b"PATH=/bin\0SGLANG_SIMULATE_ACC_LEN=3.39\0")
    text = tmp_path / "out.txt"
    text.write_text("+" * 60)
    argv = [
        "--log",
        M2,
        "--server-info",
        M2.replace(".log", ".server_info.json"),
        "--environ",
        str(environ),
        "--gpu",
        "H200",
    ]
    argv += ["--sglang-version", "0.5.16", "--output", str(text), "--flags", "--kv-cache-dtype bf16", "--json"]
    report: dict[str, Any] = json.loads(run(capsys, *argv)[1])
    found = {item["id"]: item["verdict"] for item in report["findings"]}
    assert found["D3"] == "synthetic_acceptance" and found["G1"] == "garbage_output"
    # The launch line says bf16, the process says auto: another process.
    assert found["X1"] == "sources_disagree"


@pytest.mark.parametrize(
    "argv",
    [
        ["--log", "/nowhere/x.log"],
        ["--server-info", "/nowhere/x.json"],
        ["--checkpoint", "/nowhere"],
        ["--metrics", "/nowhere/m"],
        ["--flags", "--chat-template 'open"],
        ["--flags", "--tp 8", "--gpu", "abacus"],
        ["--base-url", "http://127.0.0.1:9"],
        ["--flags", "--kv-cache-dtype fp8"],
        ["--flags", "--attention-backend rubbish"],
        ["--flags", "--tp 0"],
        ["--flags", "--tp -3"],
        ["--flags", "--tp 8", "--sglang-version", "abc"],
        ["--log", M2, "--change", "kv_cache_dtype=fp8"],
        ["--log", M2, "--change", "kv_cache_dtype=5"],
        ["--log", M2, "--change", "tp_size=0"],
        ["--log", M2, "--change", "tp=-3"],
        ["--log", M2, "--change", "page_size=many"],
        ["--log", M2, "--change", "sglang_version=abc"],
        ["--log", M2, "--change", "kv_scales=none"],
        ["--flags", "hello world"],
        ["--flags", ""],
        ["--flags", "HOME=/root"],
        ["--output", "/dev/null"],
    ],
)
def test_bad_input_is_one_message(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    """Never a traceback, never a guess, nothing on stdout."""
    code, out, err = run(capsys, *argv)
    assert code == 2 and out == "" and err.startswith("workbook: ") and err.count("\n") == 1


@pytest.mark.parametrize("form", [[], ["--json"], ["--change", "kv_cache_dtype=bf16"]], ids=["text", "json", "change"])
def test_no_secret_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path, form: list[str]) -> None:
    """Keys in values of arguments, in URLs, in overrides, in a change and in the text that the model produced."""
    text = tmp_path / "out.txt"
    text.write_text("the key is sk-Abcdef0123456789abcdef and so on, it said. " * 4)
    line = (
        "python -m sglang.launch_server --model-path https://u:SECRETPW123@x/sk-Zyxwvu9876543210zyxw "
        '--json-model-override-args \'{"api_key":"OVERRIDEKEY123","x":"' + "y" * 200 + "\"}' "
        "--chat-template https://u:" + "p" * 130 + "SECRETPW123@x/t"
    )
    code, out, err = run(capsys, "--flags", line, "--output", str(text), *form)
    assert code == 0 and "REDACTED" in out
    for secret in ("SECRETPW123", "OVERRIDEKEY123", "sk-Abcdef", "sk-Zyxwvu", "pppppppp"):
        assert secret not in out + err, secret


def test_a_secret_in_a_change(capsys: pytest.CaptureFixture[str]) -> None:
    """A change is shown as it was asked for, without what it hides."""
    change = ["--change", "model_path=https://u:SECRETPW123@x/m"]
    for form in ([], ["--json"]):
        code, out, _ = run(capsys, "--log", M2, *change, *form)
        assert code == 0 and "SECRETPW123" not in out and "https://u:REDACTED@x/m" in out


def test_values_that_exist_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """The check of values refuses typing errors only: every spelling of a release passes, -1 where it means 'off'."""
    line = (
        "--kv-cache-dtype fp8_e4m3 --attention-backend triton --chunked-prefill-size -1 --tp 8 --reasoning-parser qwen3"
    )
    assert run(capsys, "--flags", line)[0] == 0
    assert run(capsys, "--log", M2, "--change", "kv_cache_dtype=bf16", "--change", "tp=2")[0] == 0
    assert "fp8_e4m3" in run(capsys, "--flags", "--kv-cache-dtype fp8")[2]
    assert run(capsys, "--log", M2, "--change", 'kv_scales={"present": true}')[0] == 0


def test_a_refused_value_is_not_shown_with_its_secret(capsys: pytest.CaptureFixture[str]) -> None:
    """The message about a wrong value repeats it, without a key that stands in it."""
    err = run(capsys, "--flags", "--tool-call-parser sk-Zyxwvu9876543210zyxw")[2]
    assert "REDACTED" in err and "Zyxwvu" not in err
