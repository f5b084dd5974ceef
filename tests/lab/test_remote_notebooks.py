"""Notebooks 02, 04 and 05 on another host, over SSH and by parameters alone: against the real SGLang there, and cut off there.

Where a run is cut off the server is the stand-in, which loads in a second: what is tested is what is left, and that it goes on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lib.hosts.base import Host
from lib.params import load_profile
from lib.server.spec import resolve_model
from tests.conftest import ROOT, TINY, WORKBOOK, only_run, states, works
from tests.lab import faults
from tests.lab.lab import Lab

HOME = "/opt/stand-in"
#: Small enough for two cores: what is tested is that everything is taken there, not the numbers.
SMALL: dict[str, dict[str, Any]] = {
    "02": {
        "candidates": [
            {"id": "torch_native", "flags": {"attention_backend": "torch_native"}},
            {"id": "flashinfer", "flags": {"attention_backend": "flashinfer"}},
        ],
        "text_tokens": 64, "load_concurrency": 2, "speed_repeats": 1, "speed_input_len": 32, "speed_output_len": 8,
    },
    "05": {
        "kv_cache_dtypes": ["bf16"], "documents": ["argparse"], "document_tokens": 300, "bucket_tokens": 100,
        "top_logprobs": 0, "load_streams": 0, "task_items": 0, "probe_documents": 0, "cost_requests": 2, "cost_output_len": 8,
        "numerics": {"keys": [256], "kinds": ["gaussian"], "draws": 1, "layers": [0], "tokens": 128,
                     "arms": [["fp8_e4m3", "storage", "one"]]},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def model(guest: Host) -> str:
    """The tiny model's folder on container 101, and the stand-in beside it."""
    faults.put_stand_in(guest, f"{HOME}/sglang/launch_server.py")
    guest.put(b"", f"{HOME}/sglang/__init__.py")
    path = resolve_model(load_profile(TINY).server.model or "")
    copy = f"mkdir -p /srv/model && cp -r {path}/. /srv/model/ && chmod -R a+rX /srv/model"
    guest.run(["sh", "-c", copy]).check("a model")
    return "/srv/model"


@pytest.fixture
def traces(guest_pct: Host) -> Iterator[Callable[[], list[str]]]:
    """What of a run is on the host now: processes, and what was not in /tmp before (but torch's compiled kernels, meant to stay)."""
    before = {e.path for e in guest_pct.list_folder("/tmp")}

    def found() -> list[str]:
        words = ("sglang.launch_server", "sglang::", "client.pyz", "job.pyz", "wb-client-")
        processes = [line for word in words for line in faults.alive(guest_pct, word)]
        new = sorted({e.path for e in guest_pct.list_folder("/tmp")} - before)
        return [*processes, *(path for path in new if not path.startswith("/tmp/torchinductor_"))]

    yield found


def ways(lab: Lab) -> dict[str, dict[str, Any]]:
    """Container 101 as `host:` names it, over SSH and through its hypervisor."""
    ssh = {"kind": "ssh", "config": lab.config}
    lxc = {"kind": "lxc", "container": 101, "hypervisor": {**ssh, "address": "hypervisor"}}
    return {"ssh": {**ssh, "address": "guest-101"}, "lxc": lxc}


def profile(folder: Path, lab: Lab, server: dict[str, Any], way: str = "ssh", **host: Any) -> Path:
    """The tiny profile with its server on container 101."""
    folder.mkdir()
    for file in (ROOT / TINY).glob("*.yaml"):
        data = yaml.safe_load(file.read_text())
        if file.stem == "profile":
            data["host"] = {**ways(lab)[way], **host}
            data["server"] = server
        else:
            data |= {"profile": str(folder), **SMALL.get(file.stem, {})}
        (folder / file.name).write_text(yaml.safe_dump(data))
    return folder


def record(file: Path) -> Any:
    return json.loads(file.read_text())


@pytest.mark.server
@pytest.mark.parametrize("number", ["02", "04", "05"])
def test_a_notebook_measures_the_real_server_there(
    number: str, guest: Host, lab: Lab, model: str, tmp_path: Path, workbook: Callable[..., Any], tiny_spec: Any,
    traces: Callable[[], list[str]],
) -> None:  # fmt: skip
    """Every launch is on the host and proven gone there, what is sent is sent from there, and nothing is left."""
    server = load_profile(TINY).server.model_dump() | {"model": model, "python": str(ROOT / ".venv-sglang/bin/python")}
    folder = profile(tmp_path / "profile", lab, server, client_python="/usr/bin/python3")
    done = workbook("run", "--profile", str(folder), "--only", number, timeout=235)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert traces() == []
    run = only_run(tmp_path / "outputs")
    assert states(run)[number] == "done"
    result, raw = record(run / f"{number}.result.json"), run / "raw" / number
    launches = [record(f) for f in sorted(raw.glob("servers/*/launch.json"))]
    assert launches and {launch["host"]["hostname"] for launch in launches} == {"ct101"}
    assert all(x["stop"]["processes_left"] == [] and x["stop"]["port_free"] is True for x in launches), launches
    used = [s for s in result["servers"] if s["origin"] == "launched"]
    assert {s["launch_id"] for s in used} == {x["launch_id"] for x in launches}
    assert result["provenance"]["host"]["hostname"] == "ct101"
    {"02": swept, "04": unsupported, "05": audited}[number](result, raw)


def swept(result: dict[str, Any], raw: Path) -> None:
    """One trial works there, one says itself why not; load, speed and progress were seen on the host."""
    native, other = result["trials"]
    assert native["id"] == "torch_native" and works(native), native
    assert (other["id"], other["outcome"]) == ("flashinfer", "unsupported_here"), other
    first = "pass" if native["outcome"] == "works" else "invalid"
    assert [v["status"] for v in result["verdicts"]] == [first, "unsupported", "pass", "pass"], result["verdicts"]
    assert not [r for r in record(raw / "torch_native/load/load.json")["requests"] if r["error"]]
    header = json.loads((raw / "torch_native/speed-1/level.jsonl").read_text().splitlines()[0])
    assert header["client"]["hostname"] == "ct101" and len(header["client"]["client_sha256"]) == 64
    assert header["calibration"]["judge_on"] == "ssh guest-101"
    ready = next(f for f in raw.glob("servers/*/launch.json") if record(f)["name"] == "torch_native")
    samples = [json.loads(line) for line in (ready.parent / "watch.jsonl").read_text().splitlines()]
    assert samples[-1]["cpu_s"] > samples[0]["cpu_s"] + 2.0, samples  # its work is seen there, not a namesake's here


def unsupported(result: dict[str, Any], raw: Path) -> None:
    """NEXTN does not start on a CPU; SGLang's own line is the evidence."""
    verdict = next(v for v in result["verdicts"] if v["claim"] == "The server starts with speculative decoding")
    assert verdict["status"] == "unsupported", verdict
    quotes = [e["quote"] or "" for e in verdict["evidence"]]
    log = "".join(f.read_text() for f in raw.glob("servers/*/server.log"))
    assert quotes and all(quote in log for quote in quotes) and "driver" in quotes[0], quotes
    assert record(raw / "memory/memory.json")["host_free_bytes"] > 0


def audited(result: dict[str, Any], raw: Path) -> None:
    """The pool is read from that server's log, texts are scored twice the same, cost is sent from beside it."""
    statuses = {v["status"] for v in result["verdicts"]}
    assert statuses <= {"pass", "inconclusive", "unsupported"} and "pass" in statuses, result["verdicts"]
    first, again = (record(raw / f"scores-bf16-{name}/scores-00.json") for name in ("first", "again"))
    assert first["logprobs"] == again["logprobs"] and len(first["logprobs"]) == 300
    header = json.loads((raw / "cost-bf16/level-0.jsonl").read_text().splitlines()[0])
    assert header["client"]["hostname"] == "ct101" and header["calibration"]["judge_on"] == "ssh guest-101"
    rows = [json.loads(line) for line in (raw / "numerics/rows.jsonl").read_text().splitlines()]
    assert {r["row"] for r in rows} == {"machine", "attention", "rounding"}  # the checkpoint's own K and V, read there


class Going:
    """`workbook run` of notebook 05 with the stand-in, while something happens to it."""

    def __init__(self, lab: Lab, tmp_path: Path, way: str = "ssh", **environment: str) -> None:
        server = {
            "model": "/srv/model", "python": "/usr/bin/python3", "sglang_version": "0.5.15.post1", "stop_timeout_s": 3,
            "environment": {"PYTHONPATH": HOME, "STAND_IN_LOAD_S": "1", "STAND_IN_POLL_S": "0.3", **environment},
        }  # fmt: skip
        folder = profile(tmp_path / "profile", lab, server, way, silence_s=5)
        audit = yaml.safe_load((folder / "05.yaml").read_text())
        audit |= {"documents": ["argparse", "typing", "tarfile"], "numerics": None}
        audit |= {"cost_requests": 4, "cost_concurrency": 4, "cost_output_len": 20}
        (folder / "05.yaml").write_text(yaml.safe_dump(audit))
        self.outputs = tmp_path / "outputs"
        self.environment = {**os.environ, "WORKBOOK_OUTPUTS": str(self.outputs)}
        words = [*WORKBOOK, "run", "--profile", str(folder), "--only", "05"]
        self.process = subprocess.Popen(
            words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.environment
        )

    def wait_for(self, pattern: str) -> Path:
        """The file that shows that it has come so far."""
        end = time.monotonic() + 60
        while time.monotonic() < end and self.process.poll() is None:
            if found := list(self.outputs.glob(f"*/*/raw/05/{pattern}")):
                return found[0]
            time.sleep(0.1)
        raise AssertionError(f"no {pattern}; " + str(self.process.communicate(timeout=20)[0])[-2000:])

    def resume(self) -> Path:
        """Runs it to its end; gives the run's folder."""
        words = [*WORKBOOK, "run", "--resume", "latest"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=self.environment, timeout=120)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return only_run(self.outputs)


def test_the_network_cut_in_the_middle_of_the_audit(
    lab: Lab, guest_pct: Host, model: str, tmp_path: Path, traces: Callable[[], list[str]]
) -> None:
    """One message; the host ends its server by itself; resumed, it goes on with what had been scored."""
    going = Going(lab, tmp_path, STAND_IN_SCORE_S="3")
    kept = going.wait_for("scores-bf16-first/scores-00.json")
    with faults.network_cut(lab, 101):
        cut = time.monotonic()
        said = going.process.communicate(timeout=100)[0]
        assert going.process.returncode == 1 and "guest-101" in said and "Traceback" not in said, said
        while traces() and time.monotonic() - cut < 60:
            time.sleep(0.5)
        assert traces() == []
    before = kept.read_text()
    run = going.resume()
    result = record(run / "05.result.json")
    assert {s["host"]["hostname"] for s in result["servers"]} == {"ct101"} and traces() == []
    assert json.loads(before) == record(run / "raw/05/scores-bf16-first/scores-00.json")  # not asked again
    launches = [record(f)["launch_id"] for f in (run / "raw/05/servers").glob("*/launch.json")]
    assert len(launches) == 2


@pytest.mark.parametrize(("how", "way"), [(signal.SIGINT, "ssh"), (signal.SIGKILL, "lxc")])
def test_an_audit_that_is_ended_here_leaves_nothing_there(
    how: signal.Signals, way: str, lab: Lab, guest_pct: Host, model: str, tmp_path: Path, traces: Callable[[], list[str]]
) -> None:
    """Ctrl-C and SIGKILL while the load client runs on the host: it, its folder and the server are gone; it can be resumed."""
    going = Going(lab, tmp_path, way, STAND_IN_TOKEN_S="0.1")
    going.wait_for("cost-bf16")
    end = time.monotonic() + 20
    while not faults.alive(guest_pct, "client.pyz") and time.monotonic() < end:
        time.sleep(0.2)
    assert faults.alive(guest_pct, "client.pyz")
    going.process.send_signal(how)
    going.process.communicate(timeout=60)
    if how is signal.SIGINT:
        assert going.process.returncode == 130
    end = time.monotonic() + (0.0 if how is signal.SIGINT else 20.0)
    while traces() and time.monotonic() < end:
        time.sleep(0.5)
    assert traces() == []
    if way == "lxc":  # over SSH the test above has resumed one
        assert states(going.resume())["05"] == "done" and traces() == []
