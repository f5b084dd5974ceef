"""Notebooks on another host by parameters alone. The server is the stand-in under SGLang's module name: what is tested is the way
there and back, not the numbers; `test_remote_server` launches the real SGLang there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lib.deploy.deployment import STATE_FOLDER
from lib.hosts.base import Host
from lib.params import load_profile
from lib.server.spec import resolve_model
from tests.conftest import ROOT, TINY, only_run, states
from tests.lab import faults
from tests.lab.lab import Lab

HOME = "/opt/stand-in"
SERVICE = "sglang-measured"


@pytest.fixture(scope="module")
def there(guest: Host) -> Iterator[Host]:
    """Container 101 with the stand-in as SGLang and a model."""
    faults.put_stand_in(guest, f"{HOME}/sglang/launch_server.py")
    guest.put(b"", f"{HOME}/sglang/__init__.py")
    path = resolve_model(load_profile(TINY).server.model or "")
    guest.run(["sh", "-c", f"mkdir -p /srv/model && cp -r {path}/. /srv/model/ && chmod -R a+rX /srv/model"]).check(
        "a model"
    )
    yield guest


@pytest.fixture(autouse=True)
def clean(guest: Host) -> Iterator[None]:
    """No service after each test."""
    yield
    faults.sweep(guest, SERVICE, STATE_FOLDER)


def profile(folder: Path, lab: Lab, host: dict[str, Any], server: dict[str, Any]) -> Path:
    """The tiny profile with another host."""
    folder.mkdir()
    for file in (ROOT / TINY).glob("*.yaml"):
        data = yaml.safe_load(file.read_text())
        if file.stem == "profile":
            data["host"] = {"kind": "ssh", "config": lab.config, **host}
            data["server"] = server
        else:
            data["profile"] = str(folder)
        (folder / file.name).write_text(yaml.safe_dump(data))
    return folder


@pytest.mark.parametrize("client", ["host", "here"])
def test_the_benchmark_runs_there_and_what_it_measured_must_be_shown_there(
    there: Host, lab: Lab, tmp_path: Path, workbook: Callable[..., Any], client: str
) -> None:
    """`workbook run` launches, measures and stops on the host; rebuilding needs neither host nor server. `deploy --run` sends
    the same level again to the deployed server, from where it was sent then, and holds it against its interval."""
    server = {
        "model": "/srv/model", "python": "/usr/bin/python3", "sglang_version": "0.5.15.post1", "stop_timeout_s": 5,
        "environment": {"PYTHONPATH": HOME, "STAND_IN_LOAD_S": "1", "STAND_IN_POLL_S": "0.3", "STAND_IN_TOKEN_S": "0.05"},
    }  # fmt: skip
    folder = profile(tmp_path / "profile", lab, {"address": "guest-101", "load_client": client}, server)
    deployed = {"profile": str(folder), "service": SERVICE, "user": "nobody", "working_directory": "/srv", "port": 31400}
    (folder / "06.yaml").write_text(yaml.safe_dump({**deployed, "restart_proof": False}))
    done = workbook("run", "--profile", str(folder), "--only", "03")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = only_run(tmp_path / "outputs")
    assert set(states(run).values()) <= {"done", "not_run"}
    result = json.loads((run / "03.result.json").read_text())
    assert [s["host"]["hostname"] for s in result["servers"]] == ["ct101"] and result["provenance"]["host"][
        "hostname"
    ] == "ct101"
    calibration = json.loads((run / "raw" / "03" / "calibration" / "calibration.json").read_text())
    header = json.loads((run / "raw" / "03" / "level-C1" / "level.jsonl").read_text().splitlines()[0])
    assert calibration["judge_on"] == "ssh guest-101" and header["calibration"]["judge_on"] == "ssh guest-101"
    assert ("tunnel" in header["calibration"]) == (client == "here")
    assert header["client"].get("hostname") == ("ct101" if client == "host" else None)
    assert faults.alive(there, "launch_server") == [] and faults.alive(there, "client.pyz") == []
    if client == "host":
        rebuilt = workbook("rebuild", str(run))
        assert rebuilt.returncode == 0, rebuilt.stdout[-2000:] + rebuilt.stderr[-2000:]
    done = workbook("deploy", "--profile", str(folder), "--run", str(run), "--json")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    claims = {c["id"]: c for c in json.loads(done.stdout)["proof"]["claims"]}
    (level,) = [t for t in result["trials"] if t["id"] == "level-C1"]
    if level["outcome"] != "works":  # a busy machine spoilt what 03 sent: then nothing is claimed, and the plan says why
        planned = workbook("deploy", "--profile", str(folder), "--run", str(run), "--plan", "--json")
        lines = json.loads(planned.stdout)["about"]["not_claimed"]
        (line,) = [line for line in lines if line.startswith("output_tokens_per_s: level-C1")]
        assert level["reason"] in line and "throughput" not in claims
        return
    claim = claims["throughput"]
    assert claim["status"] in ("pass", "unknown") and "tok/s" in claim["found"], claim
    sent = next((tmp_path / "outputs" / "deployments").rglob("level.jsonl"))
    header = json.loads(sent.read_text().splitlines()[0])
    assert header["client"].get("hostname") == ("ct101" if client == "host" else None)
    assert bool((header["calibration"] or {}).get("tunnel")) == (client == "here")


def test_a_host_that_cant_be_reached_is_one_message(lab: Lab, tmp_path: Path, workbook: Callable[..., Any]) -> None:
    """A wrong host key ends the run with its message, before anything was launched."""
    server = {"model": "/srv/model", "python": "/usr/bin/python3"}
    folder = profile(tmp_path / "profile", lab, {"address": "stranger-101"}, server)
    done = workbook("run", "--profile", str(folder), "--only", "03")
    assert done.returncode == 1 and "shows the host key that is known" in done.stdout + done.stderr
