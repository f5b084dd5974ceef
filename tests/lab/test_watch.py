"""`workbook watch` on a real systemd host: nothing changed, a crash, an edited unit, errors in the journal; and deploying it again."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from lib.deploy.deployment import STATE_FOLDER, Deployment
from lib.deploy.drift import WatchReport
from lib.deploy.service import service_state, systemctl
from lib.deploy.watch import watch
from lib.errors import BadInput, NeedsRoot
from lib.hosts.base import Host
from lib.hosts.signals import signal_processes
from tests.lab.test_deployment import HOME, PORT, SERVICE, clean, deploy, description, installed, plan, serves

__all__ = ["clean", "installed"]


def found(report: WatchReport) -> dict[str, str]:
    """Status by what was compared."""
    return {row.id: row.status for row in report.rows}


def test_what_drifts_is_named_and_what_does_not_is_not(
    guest: Host, plain_user: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing changed: no drift, with a clock that jumps. A crash, an edit, an error: each by name. Deployed again: proven again."""
    with pytest.raises(BadInput, match="no record"):
        watch(guest, SERVICE)
    jumps = iter(range(1, 10**6))
    with monkeypatch.context() as clock:
        clock.setattr("time.time", lambda: 1.8e9 + (-1) ** next(jumps) * 3e8)
        assert deploy(guest, plan("one"), tmp_path / "0").outcome == "proven"
        assert deploy(guest, plan("two"), tmp_path / "1").outcome == "proven"
        report = watch(guest, SERVICE)
    assert not report.drifted, report.drifted
    same = {row.id for row in report.rows if row.status == "same"}
    assert {"unit", "invocation", "kv-dtype", "flags", "pool-tokens", "health", "port-owner", "journal", "retractions"} <= same
    with pytest.raises(NeedsRoot):
        watch(plain_user, SERVICE)
    # deploying what runs and is proven restarts nothing
    before = service_state(guest, SERVICE).invocation
    report_again = deploy(guest, plan("two"), tmp_path / "2")
    assert report_again.outcome == "proven" and [s.name for s in report_again.steps] == ["prove", "commit"]
    assert service_state(guest, SERVICE).invocation == before
    # it crashes and comes back by itself
    main = next(p for p in guest.view().in_unit(f"{SERVICE}.service") if p.pid == service_state(guest, SERVICE).main_pid)
    signal_processes(guest, 9, {main.pid: main.ticks})
    end = time.monotonic() + 20
    while (not serves(guest) or service_state(guest, SERVICE).invocation == before) and time.monotonic() < end:
        time.sleep(0.2)
    time.sleep(0.5)
    drifted = {row.id for row in watch(guest, SERVICE).drifted}
    assert {"invocation", "restarts"} <= drifted and "unit" not in drifted
    # somebody edits the unit, and the server says that something is wrong
    guest.run(["sed", "-i", "s/^TimeoutStopSec=.*/TimeoutStopSec=1/", f"/etc/systemd/system/{SERVICE}.service"]).check("edited")
    script = 'import syslog; print("RuntimeError: CUDA error: an illegal memory access was encountered")'
    guest.run(["systemd-run", "--wait", "--collect", f"--unit={SERVICE}-noise", "python3", "-c", script])
    report = watch(guest, SERVICE)
    assert found(report)["unit"] == found(report)["daemon-reload"] == "drift"
    assert "+TimeoutStopSec=1" in next(row.now for row in report.drifted if row.id == "unit")
    assert "CUDA" not in json.dumps([r.now for r in report.drifted])  # another unit's words are not this one's
    # the same plan again: started afresh, and what was there before it stays the way back
    again = deploy(guest, plan("two"), tmp_path / "3")
    assert again.outcome == "proven" and "stop" in [s.name for s in again.steps], again
    assert not watch(guest, SERVICE).drifted
    kept = [e.path for e in guest.list_folder(f"{STATE_FOLDER}/{SERVICE}/deployments/{plan('two').id}")]
    assert any("/replaced-" in path for path in kept), kept
    assert Deployment(guest, plan("two"), tmp_path / "4").undo().outcome == "undone" and description(guest) == "one"
    systemctl(guest, "stop", SERVICE)
    assert {"running", "health", "port-owner"} <= {row.id for row in watch(guest, SERVICE).drifted}


def test_decay_while_it_serves_is_named(guest: Host, tmp_path: Path) -> None:
    """A wheel upgraded beside the running server, acceptance that sinks, retractions that begin: each by name, nothing else."""
    tell, wheel = "/srv/stand-in-tells.json", f"{HOME}/sglang-%s.dist-info"

    def told(accept: float, say: list[str]) -> None:
        text = json.dumps({"state": {"avg_spec_accept_length": accept}, "say": say})
        guest.put(text, tell, mode=0o644)
        asked = f"import urllib.request as u; u.urlopen('http://127.0.0.1:{PORT}/server_info').read()"
        guest.run(["python3", "-c", asked])  # it says its lines when it is asked

    guest.put("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.15.post1\n", wheel % "0.5.15.post1" + "/METADATA", parents=True)
    guest.run(["chmod", "-R", "a+rX", HOME])
    told(2.9, [])
    try:
        assert deploy(guest, plan("one", f"STAND_IN_TELL={tell}"), tmp_path / "1").outcome == "proven"
        report = watch(guest, SERVICE)
        assert not report.drifted, report.drifted
        assert {found(report)[name] for name in ("version-on-disk", "accept-length", "retractions")} == {"same"}
        told(2.2, ["KV cache pool is full. Retract requests. #retracted_reqs: 3, #new_token_ratio: 0.5996 -> 1.0000"])
        guest.run(["mv", wheel % "0.5.15.post1", wheel % "0.5.16"]).check("another wheel")
        guest.put("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.16\n", wheel % "0.5.16" + "/METADATA")
        report = watch(guest, SERVICE)
        drifted = {row.id: row.now for row in report.drifted}
        assert drifted == {"version-on-disk": "0.5.16", "accept-length": "2.2", "retractions": "3"}, drifted
    finally:
        guest.run(["sh", "-c", f"rm -rf {tell} {HOME}/sglang-*.dist-info"])
