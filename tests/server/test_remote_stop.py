"""How a launched server on another host ends when the connection to it had broken; the host is given, view by view."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lib.errors import HostUnreachable
from lib.params import HostParams
from lib.server import remote
from lib.server.launch import GpuUse, LaunchRecord, identity_of, save_record
from lib.server.remote import RemoteServer
from tests.deploy.test_stopping import SERVER, process, view

RUNS, GONE = view([process(9, SERVER)]), view([])


def server(folder: Path, views: list[Any]) -> RemoteServer:
    """A server whose connection is gone, on a host that gives these views in turn (the last again and again)."""

    def look() -> Any:
        found = views.pop(0) if len(views) > 1 else views[0]
        if isinstance(found, Exception):
            raise found
        return found

    record = LaunchRecord(
        launch_id="L1", name="s", key="k", argv=[], environment={}, sglang_version="0", model_path="m", model={}, host={},
        base_url="http://127.0.0.1:1", port=1, started="x", started_at=0.0, state="ready", pid=9,
        pid_start_ticks=RUNS.processes[0].ticks, gpu_before=GpuUse(reason="no GPU"),
    )  # fmt: skip
    made = RemoteServer.__new__(RemoteServer)
    made.spec, made.folder, made.record = SimpleNamespace(stop_timeout_s=1.0), folder, record  # type: ignore[assignment]
    made.place = SimpleNamespace(view=look, host=SimpleNamespace(name="h"), params=HostParams(silence_s=5))  # type: ignore[assignment]
    made.running = SimpleNamespace(  # type: ignore[assignment]
        ending=None, connected=False, process=(9, record.pid_start_ticks), stop=lambda: None
    )
    made._supervisor, made._tunnel, made._lost = SimpleNamespace(join=lambda _: None, lost=0, error=None), contextlib.ExitStack(), None
    return made


def test_a_server_that_its_guard_still_has_to_end_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A break shorter than the guard's patience: it is seen to go, and only then called gone."""
    waits: list[float] = []
    monkeypatch.setattr(remote.time, "sleep", waits.append)
    proof = server(tmp_path, [RUNS, RUNS, RUNS, GONE]).stop()
    assert proof.gone and proof.processes_left == [] and len(waits) == 2


def test_a_lost_host_is_asked_once(tmp_path: Path) -> None:
    """What its end looks like is not known, and each further step of the run's end says so at once."""
    asked: list[int] = []
    made = server(tmp_path, [HostUnreachable("h answers", "no route")])
    look = made.place.view

    def counted() -> Any:
        asked.append(1)
        return look()

    made.place.view = counted  # type: ignore[method-assign]
    with pytest.raises(HostUnreachable):
        made.has_ended()
    for _ in range(2):
        with pytest.raises(HostUnreachable, match="proven gone from h.*5 s after our last word"):
            made.stop()
    assert len(asked) == 1 and made.record.stop is None


def test_what_parameters_set_is_part_of_the_identity_whatever_its_name(tmp_path: Path) -> None:
    """A deployment compares its environment with the measured one: a variable that the run had set must be in its record."""
    made = server(tmp_path, [GONE])
    save_record(tmp_path, made.record.model_copy(update={"environment": {"LD_LIBRARY_PATH": "/opt/x", "SGLANG_A": "1"}}))
    assert identity_of(tmp_path).environment == {"LD_LIBRARY_PATH": "/opt/x", "SGLANG_A": "1"}
