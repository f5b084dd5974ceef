"""Precision numerics: run by the server's Python, the only one with torch, through the job as the notebook does."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from lib.audit import numerics
from lib.errors import HostError, NotMeasured
from lib.model import precision_job
from lib.params import ROOT, AuditParams, NumericsParams
from lib.records import Evidence
from lib.report import figures

PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
CHECKS = ROOT / "tests" / "model" / "precision_checks.py"


@pytest.fixture(scope="module")
def torch_python() -> str:
    """A Python with torch; skipped with the reason where there is none."""
    if os.environ.get("CI") is None and not PYTHON.exists():
        pytest.skip("no .venv-sglang with torch: run `make setup`")
    return str(PYTHON)


@pytest.fixture(scope="module")
def checked(torch_python: str) -> dict[str, Any]:
    """Every check of precision_checks.py in one process (importing torch costs seconds)."""
    done = subprocess.run([torch_python, str(CHECKS)], cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "name",
    [
        n.name
        for n in ast.parse(CHECKS.read_text()).body
        if isinstance(n, ast.FunctionDef) and n.name.startswith("check_")
    ],
)
def test_a_check_with_torch_holds(checked: dict[str, Any], name: str) -> None:
    """Each check ran and found nothing wrong; its docstring says what."""
    assert checked[name] == "ok", checked[name]


def test_the_job_runs_on_a_real_checkpoint(torch_python: str, tmp_path: Path) -> None:
    """Rows of synthetic data and of a checkpoint's own K and V come back with what computed them; nothing of it clips."""
    from lib.model.cache import model_path

    model = model_path("tiny-qwen3")
    if os.environ.get("CI") is None and not model.exists():
        pytest.skip("the tiny model is not made: run `make models`")
    request = {
        "keys": [256, 1024], "kinds": ["gaussian_mean"], "draws": 3, "queries": 4, "head_dim": 64, "checkpoint": str(model),
        "layers": [0, 2], "arms": [["fp8_e4m3", "storage", "one"], ["fp8_e4m3", "triton", "one"], ["nvfp4", "storage", "one"]],
    }  # fmt: skip
    numerics.compute_numerics(tmp_path, torch_python, request, document="argparse")
    found = numerics.read_numerics(tmp_path)
    assert found.machine["torch"] and found.machine["overflow"]["fp8_e5m2"]
    assert {(r["source"], r["keys"]) for r in found.attention()} >= {("gaussian_mean", 256), ("gaussian_mean", 1024)}
    assert {r["layer"] for r in found.attention("checkpoint")} == {0, 2}
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    assert {r["layer"] for r in found.rounding()} == set(range(layers))  # whether anything clips is asked of every layer
    assert json.loads((tmp_path / "request.json").read_text())["document"] == "standard library: argparse"
    assert str(tmp_path) not in (tmp_path / "request.json").read_text()


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"kinds": ["cauchy"], "nonsense": 1}, ["kind 'cauchy'", "unknown key 'nonsense'"]),
        ({"arms": [["int8", "triton", "one"]]}, ["only storage"]),
        ({"keys": [0]}, ["keys 0"]),
    ],
)
def test_a_wrong_request_is_one_message(
    torch_python: str, tmp_path: Path, request_: dict[str, Any], words: list[str]
) -> None:
    """All that is wrong is named; no rows are left behind."""
    with pytest.raises(HostError) as error:
        numerics.compute_numerics(tmp_path, torch_python, request_)
    assert all(w in str(error.value) for w in words), error.value
    assert "Traceback" not in str(error.value)
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.mark.parametrize("how", ["interrupt", "kernel killed"])
def test_no_job_is_left_behind(tmp_path: Path, how: str) -> None:
    """Ctrl-C in the notebook, or a kernel that is killed: the job, which would run for a minute, is gone."""
    fake, pid = tmp_path / "python", tmp_path / "pid"
    fake.write_text(f"#!/bin/sh\necho $$ > {pid}.new; mv {pid}.new {pid}\nexec sleep 60\n")
    fake.chmod(0o755)
    code = (
        "import sys, pathlib; from lib.audit.numerics import compute_numerics; "
        f"compute_numerics(pathlib.Path({str(tmp_path)!r}), {str(fake)!r}, {{}})"
    )
    kernel = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not pid.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        job = Path("/proc", pid.read_text().strip())
        kernel.send_signal(signal.SIGINT if how == "interrupt" else signal.SIGKILL)
        kernel.wait(timeout=20)
        while job.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not job.exists()
    finally:
        kernel.kill()
        kernel.wait()


class Run:
    """A notebook's run as `measure_numerics` sees it."""

    def __init__(self, folder: Path, stamp: Any = None, **more: Any) -> None:
        self.params = AuditParams.model_validate({"profile": "embedded", "numerics": {"checkpoint": False, "keys": [64]}})
        self.attached, self.offline, self.folder, self.skipped = False, True, folder, list[str]()
        self.there: dict[str, Any] = {}
        server = SimpleNamespace(model="m", python="no/such/python")
        self.profile = SimpleNamespace(host=SimpleNamespace(kind="local"), server=server)
        self.stamp = stamp
        self.__dict__.update(more)

    def measure(self, name: str, handle: None, function: Any, **arguments: Any) -> Any:
        if self.stamp is None:
            raise NotMeasured("raw record", "not in this run")
        return SimpleNamespace(folder=self.folder, ok=self.stamp == "ok", problem="it failed")

    def evidence(self, file: Path) -> Any:
        return Evidence(path=file.name)

    def skip(self, what: str, why: str) -> None:
        self.skipped.append(why)


@pytest.mark.parametrize(
    ("more", "words", "verdicts"),
    [
        ({"params": AuditParams.model_validate({"profile": "embedded"})}, "numerics: null", 0),
        ({"attached": True}, "attached", 0),
        ({}, "not in this run", 0),
        ({"stamp": "failed"}, "it failed", 2),
    ],
)
def test_numerics_that_were_not_computed_say_why(tmp_path: Path, more: dict[str, Any], words: str, verdicts: int) -> None:
    """Not asked, attached, a run of before, failed: the reason is shown; failed is inconclusive, never a pass."""
    run: Any = Run(tmp_path, **more)
    found = numerics.measure_numerics(run, None)  # type: ignore[arg-type]
    assert words in (found.reason or "") and words in run.skipped[0]
    made = numerics.numerics_verdicts(found)
    assert [v.status for v in made] == ["inconclusive"] * verdicts
    assert not numerics.attention_rows(found) and not numerics.rounding_rows(found)
    assert figures.error_by_context(numerics.error_series(found, "gaussian")) is not None


def test_a_rebuild_reads_the_rows_that_were_kept(tmp_path: Path) -> None:
    """Offline, no Python with torch: tables, verdicts and the emulation's figures beside them come from rows.jsonl."""
    rows = [attention("gaussian_mean", "storage", [0.0016], 131072), attention("gaussian_mean", "triton", [0.039], 131072)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in [*rows, rounding(25.75, 0.0)]))
    found = numerics.measure_numerics(Run(tmp_path, "ok"), None)  # type: ignore[arg-type]
    assert len(numerics.attention_rows(found)) == 2 and len(numerics.rounding_rows(found)) == 1
    assert {v.id: v.status for v in numerics.numerics_verdicts(found)} == {"values-clip": "pass", "storage-is-the-cost": "fail"}
    asked = NumericsParams.model_validate({})
    by_id = {p.id: p for p in numerics.numerics_predictions(asked, found)}
    assert by_id["error-gaussian_mean-storage"].predicted.value == 0.0026
    assert by_id["error-gaussian_mean-storage"].measured.value == 0.0016  # type: ignore[union-attr]
    assert by_id["error-gaussian-triton"].measured is None
    assert numerics.numerics_predictions(None) == []


def test_what_the_parameters_can_ask_the_job_understands() -> None:
    """Every key of `numerics` is one of the job's; the profiles' own requests are read without complaint."""
    own = set(NumericsParams.model_fields) - {"document"}
    assert own <= set(precision_job.REQUEST)
    for file in sorted((ROOT / "params").glob("*/05.yaml")):
        said = yaml.safe_load(file.read_text()).get("numerics")
        if said:
            precision_job.read_request(json.dumps(NumericsParams.model_validate(said).request("m")))


def attention(
    source: str, path: str, units: list[float | None], keys: int = 4096, dropped: float = 0.0
) -> dict[str, Any]:
    """One made row of attention errors."""
    return {
        "row": "attention", "source": source, "keys": keys, "format": "fp8_e4m3", "path": path, "scales": "one",
        "error_rel_units": units, "units": "draws", "dropped_frac": dropped,
    }  # fmt: skip


def rounding(largest: float, clipped: float, tensor: str = "K", layer: int = 0) -> dict[str, Any]:
    """One made row of rounding losses."""
    return {
        "row": "rounding", "source": "checkpoint", "layer": layer, "tensor": tensor, "format": "fp8_e4m3", "scales": "one",
        "scale": 1.0, "elements": 1000, "largest": largest, "largest_scaled": largest, "relative_rms_error": 0.026,
        "clipped_frac": clipped, "flushed_frac": 0.0, "subnormal_frac": 0.01, "mantissa_frac": 0.99, "mantissa_error_frac": 0.999,
    }  # fmt: skip


def evidence() -> Any:
    """Some evidence, which a verdict needs."""
    from lib.records import Evidence

    return Evidence(path="raw/05/numerics/rows.jsonl")


def test_values_that_clip_fail_the_claim_and_others_pass() -> None:
    """The verdict follows the largest value of any layer and tensor."""
    good = numerics.Numerics([rounding(25.75, 0.0), rounding(14.8, 0.0, "V", 3)], evidence())
    bad = numerics.Numerics([rounding(25.75, 0.0), rounding(500.0, 0.001, "V", 3)], evidence())
    assert [(v.id, v.status) for v in numerics.numerics_verdicts(good)] == [("values-clip", "pass")]
    assert [(v.id, v.status) for v in numerics.numerics_verdicts(bad)] == [("values-clip", "fail")]
    assert "V, layer 3" in numerics.numerics_verdicts(bad)[0].reason


def test_the_path_verdict_takes_the_longest_context_and_the_worst_kind() -> None:
    """Storage is the cost where the casts add little; one kind of data with four times the error refutes it."""
    rows = [attention("gaussian", "storage", [0.06] * 3), attention("gaussian", "triton", [0.08] * 3)]
    short = [attention("gaussian", "storage", [0.01] * 3, 64), attention("gaussian", "triton", [0.9] * 3, 64)]
    worse = [attention("gaussian_mean", "storage", [0.001] * 3), attention("gaussian_mean", "triton", [0.04] * 3)]
    (verdict,) = numerics.numerics_verdicts(numerics.Numerics([*rows, *short], evidence()))
    assert verdict.status == "pass"
    (verdict,) = numerics.numerics_verdicts(numerics.Numerics([*rows, *worse], evidence()))
    assert verdict.status == "fail" and verdict.measured and verdict.measured.value == pytest.approx(40)


def test_not_finite_is_a_reason_and_too_few_draws_have_no_interval() -> None:
    """NaN never becomes a number; two draws give a mean without an interval; three give Student's."""
    assert numerics.error_of([0.1, None]).value is None
    assert "not finite" in (numerics.error_of([0.1, None]).reason or "")
    two, three = numerics.error_of([0.1, 0.2]), numerics.error_of([0.1, 0.2, 0.3])
    assert two.low is None and two.value == pytest.approx(0.15)
    # sd 0.1, n 3, t(2) = 4.303: half width 0.2484
    assert three.low == pytest.approx(0.2 - 0.2484, abs=1e-3)
    assert numerics.error_of([]).value is None


def test_the_figure_names_what_it_draws() -> None:
    """Series and values stand in the words; no error at all is a sentence, not an empty chart."""
    from lib.report import figures

    found = numerics.Numerics(
        [attention("gaussian", "storage", [0.06] * 3), attention("gaussian", "storage", [0.05] * 3, 64)]
    )
    chart = figures.error_by_context(numerics.error_series(found, "gaussian"), title="Error")
    assert "fp8_e4m3, storage, scale 1" in chart.alt and "4,096 keys" in chart.alt
    assert "no error was computed" in figures.error_by_context({}).alt
