"""The main job on a real server: six notebooks, their records, their report, and everything derived again from raw files."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest

from lib.params import NOTEBOOKS
from lib.records import NotebookResult, RunResult
from tests.conftest import ROOT, TINY, only_run, server_pids, states, works

SECRET = "hf_s3cretS3cretS3cretS3cretS3cret01"
pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory, tiny_spec: Any) -> Path:
    """`make report` with the small model, once; the run's folder. WORKBOOK_TEST_CHAIN names one of earlier, to work on tests."""
    if earlier := os.environ.get("WORKBOOK_TEST_CHAIN"):
        return Path(earlier)
    outputs = tmp_path_factory.mktemp("chain")
    done = subprocess.run(
        ["make", "report", f"P={TINY}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
        env={**os.environ, "WORKBOOK_OUTPUTS": str(outputs), "HF_TOKEN": SECRET, "SGLANG_TEST_API_KEY": SECRET},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert f"report: {outputs}" in done.stdout
    return only_run(outputs)


def punctual(run: Path, level: str) -> dict[str, Any]:
    """Write into a copied run that the client was punctual: on a loaded machine the level is rightly refused otherwise."""
    file = run / f"raw/03/{level}/level.jsonl"
    header, *rest = file.read_text().splitlines()
    data: dict[str, Any] = json.loads(header)
    for worker in data["client"]["workers"]:
        worker["lag_ns"] |= {"p50": 100_000, "p99": 200_000}
        worker["cpu_frac"] = 0.01
    data["calibration"] |= {"status": "ok", "reasons": [], "streams": 64, "chunks_per_s": 100_000.0}
    file.write_text("\n".join([json.dumps(data), *rest]) + "\n")
    return data


def results(run: Path) -> dict[str, NotebookResult]:
    return {n: NotebookResult.model_validate_json((run / f"{n}.result.json").read_text()) for n in NOTEBOOKS}


def verdict(run: Path, number: str, id_: str) -> Any:
    return next(v for v in results(run)[number].verdicts if v.id == id_)


def test_all_six_notebooks_ran_and_left_valid_results(chain: Path) -> None:
    """Each notebook is done, its result valid, and the index says so."""
    assert states(chain) == dict.fromkeys(NOTEBOOKS, "done")
    index = RunResult.model_validate_json((chain / "result.json").read_text())
    assert index.state == "done" and index.server_seconds and index.server_seconds < (index.seconds or 0)
    assert len(results(chain)) == 6


def test_no_server_is_left(chain: Path) -> None:
    """Every server that the run launched is gone."""
    pids = server_pids(chain)
    assert len(pids) >= 9
    assert not [p for p in pids if psutil.pid_exists(p)]


def test_every_launch_was_identified_before_and_after_each_measurement(chain: Path) -> None:
    """Each stamp with a server carries checks from before and after, on the launch that its result names."""
    stamps = [json.loads(f.read_text()) for f in chain.glob("raw/*/**/stamp.json")]
    with_server = [s for s in stamps if s["launch_id"]]
    assert len(with_server) >= 8
    for stamp in with_server:
        assert stamp["invalid"] is None and stamp["error"] is None, stamp
        assert [c.split(":")[0] for c in stamp["checks"]].count("before") == 2
        assert [c.split(":")[0] for c in stamp["checks"]].count("after") == 2


def test_01_names_the_stack_and_loads_the_model(chain: Path) -> None:
    """SGLang as published, loaded, and gone at the end."""
    assert verdict(chain, "01", "unmodified").status == "pass"
    assert verdict(chain, "01", "loads").status == "pass"
    assert verdict(chain, "01", "gone").status == "pass"
    server = results(chain)["01"].servers[0]
    assert server.sglang_version == "0.5.15.post1" and server.model["sha256"] and len(server.fingerprint) == 64


def test_02_finds_the_backend_that_is_silently_ignored(chain: Path) -> None:
    """torch_native works, intel_amx runs torch_native, triton and flashinfer fail each in its own way."""
    trials = {t.id: t for t in results(chain)["02"].trials}
    assert works(trials["torch_native"]), trials["torch_native"]
    assert trials["intel_amx"].outcome == "silently_ignored"
    assert "fallback" in (trials["intel_amx"].evidence[0].quote or "")
    assert trials["triton"].outcome == trials["flashinfer"].outcome == "unsupported_here"
    assert trials["triton"].reason != trials["flashinfer"].reason
    for trial in trials.values():
        line = trial.evidence[0]
        raw = (chain / line.path).read_bytes().split(b"\n")  # as editors count: a progress bar's \r ends no line
        assert raw[(line.line or 0) - 1].decode().strip() == (line.quote or "").strip()


def test_03_every_request_is_counted_once_and_a_late_client_gives_no_number(chain: Path) -> None:
    """Sent = ok. Where the client was late (this machine may be loaded), level and smoke test say so and show nothing."""
    for level in (1, 4):
        raw = [json.loads(line) for line in (chain / f"raw/03/level-C{level}/level.jsonl").read_text().splitlines()]
        assert len(raw) - 1 == max(4, 2 * level)
        found = verdict(chain, "03", f"level-C{level}")
        ttft = next(t for t in results(chain)["03"].trials if t.id == f"level-C{level}").values["ttft_s_p50"]
        assert (found.status == "invalid") == (ttft.value is None), (found, ttft)
        assert found.status in ("pass", "inconclusive") or (found.status == "invalid" and "client" in found.reason), (
            found
        )


def test_04_is_unsupported_with_sglangs_own_words(chain: Path) -> None:
    """On a CPU NEXTN does not start; the recorded runs show both signs of the benefit, without a verdict on one run."""
    found = verdict(chain, "04", "starts")
    assert found.status == "unsupported" and "active drivers" in found.evidence[0].quote
    assert (
        verdict(chain, "04", "recorded-random_ids").measured.value
        < 1
        < verdict(chain, "04", "recorded-repeating_text").measured.value
    )


def test_05_compares_what_was_allocated_and_knows_its_floor(chain: Path) -> None:
    """Both dtypes allocated as asked, the floor exactly zero, the tokens as predicted."""
    assert verdict(chain, "05", "allocated-bf16").measured.value == "bfloat16"
    assert verdict(chain, "05", "allocated-fp8_e4m3").measured.value == "float8_e4m3fn"
    assert verdict(chain, "05", "floor").measured.value == 0
    assert verdict(chain, "05", "predicted-tokens-bf16").status == "pass"
    loss = verdict(chain, "05", "loss-fp8_e4m3")
    assert loss.measured.low < loss.measured.value < loss.measured.high
    assert loss.measured.n == 3 * 599


def test_06_the_unit_is_the_command_that_ran(chain: Path) -> None:
    """The unit is accepted, equals the launched command, and the state document names its evidence."""
    assert verdict(chain, "06", "same-command").status == "pass"
    assert verdict(chain, "06", "as-measured").status == "pass"
    assert verdict(chain, "06", "unit-lint").status == "pass"
    assert verdict(chain, "06", "kv-dtype").status == "pass"
    state = (chain / "state.md").read_text()
    for heading in ("## Goal", "## Instructions", "## Discoveries", "## Accomplished"):
        assert heading in state
    for path in re.findall(r"\]\(([^)#]+)", state):
        assert (chain / path).exists(), path


def test_the_pages_are_small_offline_and_linked(chain: Path) -> None:
    """Under 2 MB together, nothing loaded from anywhere, every evidence link leads to a raw file of this run."""
    pages = [chain / "index.html", *(chain / f"{n}.html" for n in NOTEBOOKS)]
    assert sum(p.stat().st_size for p in pages) < 2_000_000
    for page in pages:
        text = page.read_text()
        assert not re.search(r'(src|href)="(https?:)?//', text)
        for target in re.findall(r'href="([^"#]+)', text):
            assert (chain / target).exists(), target
    index = pages[0].read_text()
    assert all(v.id in index for r in results(chain).values() for v in r.verdicts)


def test_secrets_and_foreign_paths_are_not_in_the_report(chain: Path) -> None:
    """A secret of the environment reaches no file of the run, and launches keep only the variables that matter."""
    assert not [f for f in chain.rglob("*") if f.is_file() and SECRET.encode() in f.read_bytes()]
    for file in chain.rglob("launch.json"):
        assert "PATH" not in json.loads(file.read_text())["environment"]


def test_report_follows_raw_records_and_identity(chain: Path, tmp_path: Path, workbook: Any) -> None:
    """One raw latency and one server flag changed: after a rebuild without a server, number and identity follow."""
    copy = tmp_path / "copy"
    shutil.copytree(chain, copy)
    before = results(chain)["03"]
    for name in ("level-C1", "level-C4"):
        punctual(copy, name)
    level = copy / "raw/03/level-C1/level.jsonl"
    lines = level.read_text().splitlines()
    firsts = []
    for place, line in enumerate(lines[1:], 1):
        record = json.loads(line)
        record["end_ns"] += 7_000_000_000
        record["t_us"] = [t + 7_000_000 for t in record["t_us"]]
        firsts.append((record["sent_ns"] - record["due_ns"]) / 1e9 + record["t_us"][record["kinds"].index("c")] / 1e6)
        lines[place] = json.dumps(record)
    level.write_text("\n".join(lines) + "\n")
    launch = before.servers[0].launch_id
    info = copy / f"raw/03/servers/{launch}/server_info.json"
    data = json.loads(info.read_text())
    data["max_running_requests"] = 4242
    info.write_text(json.dumps(data))
    done = workbook("rebuild", str(copy))
    assert done.returncode == 0, done.stderr
    after = results(copy)["03"]
    new = next(t for t in after.trials if t.id == "level-C1").values["ttft_s_p50"].value
    assert new == pytest.approx(median(firsts), abs=0.001) and new > 7
    assert after.servers[0].resolved_args["max_running_requests"] == 4242
    assert after.servers[0].fingerprint != before.servers[0].fingerprint
    page = (copy / "03.html").read_text()
    assert after.servers[0].fingerprint[:12] in page and before.servers[0].fingerprint[:12] not in page
    assert after.servers[0].fingerprint[:12] in (copy / "index.html").read_text()
    unchanged = {n: r.verdicts for n, r in results(copy).items() if n in ("01", "02", "04", "05", "06")}
    assert unchanged == {n: r.verdicts for n, r in results(chain).items() if n in unchanged}
    smoke = verdict(copy, "03", "smoke-test")
    assert smoke.measured.value > 0 and smoke.predicted.value > 0 and smoke.status in ("pass", "fail")
    assert verdict(copy, "03", "below-ceiling").measured.value > 0


def test_a_missing_raw_record_is_said_and_not_replaced(chain: Path, tmp_path: Path, workbook: Any) -> None:
    """Rebuilding without one raw file fails that notebook with its name; the others are rebuilt."""
    copy = tmp_path / "copy"
    shutil.copytree(chain, copy)
    shutil.rmtree(copy / "raw/03/level-C4")
    done = workbook("rebuild", str(copy))
    assert done.returncode == 1
    assert "level-C4" in done.stderr and "Traceback" not in done.stderr
    assert states(copy)["03"] == "failed" and states(copy)["05"] == "done"


def test_strict_is_3_where_a_verdict_failed_and_resuming_a_finished_run_measures_nothing(
    chain: Path, tmp_path: Path, workbook: Any
) -> None:
    """intel_amx is silently ignored: a failed verdict. Without --strict the same run is exit 0."""
    copy = tmp_path / "copy"
    shutil.copytree(chain, copy)
    launches = len(server_pids(copy))
    assert workbook("run", "--resume", str(copy), "--strict").returncode == 3
    assert workbook("run", "--resume", str(copy)).returncode == 0
    assert len(server_pids(copy)) == launches


def test_a_rebuild_keeps_when_and_how_long_the_run_was(chain: Path, tmp_path: Path, workbook: Any) -> None:
    """Times, server time and the machine of the measurements stay those of the run."""
    copy = tmp_path / "copy"
    shutil.copytree(chain, copy)
    assert workbook("rebuild", str(copy)).returncode == 0
    before = RunResult.model_validate_json((chain / "result.json").read_text())
    after = RunResult.model_validate_json((copy / "result.json").read_text())
    assert (after.started, after.ended, after.seconds, after.server_seconds) == (
        before.started,
        before.ended,
        before.seconds,
        before.server_seconds,
    )
    for number, result in results(copy).items():
        assert result.provenance.host == results(chain)[number].provenance.host
        assert result.started == results(chain)[number].started
