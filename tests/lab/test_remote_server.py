"""Servers on other hosts by parameters alone: launched or attached there, measured from there, proven gone there.

Most use the stand-in under SGLang's module name, so that argv, environment and life cycle are those of the real launch; one uses
the real SGLang.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from lib.errors import BadInput, IdentityError, PortTaken, ServerDied, ServerError
from lib.hosts.base import Host, LocalHost
from lib.hosts.remote_client import calibrate_on, calibrate_tunnel
from lib.load.benchmark import build_workload
from lib.load.client import level_summary, read_level, run_level
from lib.model.checkpoint import model_fingerprint, read_checkpoint
from lib.params import HostParams, ServerParams, load_profile
from lib.server import remote
from lib.server.launch import identity_of
from lib.server.log import read_log
from lib.server.remote import Place, RemoteAttached, load_way, mirror_checkpoint, remote_spec
from lib.server.spec import resolve_model
from tests.conftest import ROOT, TINY
from tests.lab import faults

HOME = "/opt/stand-in"


@pytest.fixture(scope="module", params=["ssh", "pct", "user"])
def place(request: pytest.FixtureRequest, guest: Host, guest_pct: Host, guest_user: Host) -> Place:
    """Container 101 over each way there is to it, with the stand-in installed as SGLang."""
    faults.put_stand_in(guest, f"{HOME}/sglang/launch_server.py")
    guest.put(b"", f"{HOME}/sglang/__init__.py")
    host = {"ssh": guest, "pct": guest_pct, "user": guest_user}[request.param]
    return Place(host, HostParams(kind="ssh", address="used-by-tests"))


@pytest.fixture(scope="module")
def ssh(guest: Host) -> Place:
    """Container 101 over SSH."""
    faults.put_stand_in(guest, f"{HOME}/sglang/launch_server.py")
    guest.put(b"", f"{HOME}/sglang/__init__.py")
    return Place(guest, HostParams(kind="ssh", address="used-by-tests"))


@pytest.fixture(scope="module")
def model(guest: Host) -> str:
    """The tiny model's folder, the same path on every host of the lab, readable by everybody there."""
    path = resolve_model(load_profile(TINY).server.model or "")
    guest.run(["sh", "-c", f"mkdir -p /srv/model && cp -r {path}/. /srv/model/ && chmod -R a+rX /srv/model"]).check(
        "a model"
    )
    return "/srv/model"


def parameters(model: str, **changes: Any) -> ServerParams:
    environment = {
        "PYTHONPATH": HOME,
        "STAND_IN_LOAD_S": "1",
        "STAND_IN_POLL_S": "0.3",
        **changes.pop("environment", {}),
    }
    given: dict[str, Any] = {
        "model": model, "python": "/usr/bin/python3", "sglang_version": "0.5.15.post1", "environment": environment,
        "ready_timeout_s": 60, "stop_timeout_s": 3, **changes,
    }  # fmt: skip
    return ServerParams.model_validate(given)


def level(server: Any, folder: Path, count: int = 4) -> Path:
    url, sender = load_way(server)
    made = build_workload("code", count, 32, 8, 1, None)
    return run_level(url, "completions", made.requests, out=folder / "level.jsonl", concurrency=2, model=server.control.served_model_name(),
                     warmup=made.warmup, workload=made.describe(), sender=sender)  # fmt: skip


def test_a_server_is_launched_measured_and_proven_gone_there(place: Place, model: str, tmp_path: Path) -> None:
    """Ready by its own log, identity by pid and port there, load from beside it, nothing left after the stop."""
    spec = remote_spec("server", parameters(model), place)
    assert spec.key == remote_spec("server", parameters(model), place).key
    words: list[str] = []
    with remote.launch(place, spec, tmp_path, words.append) as server:
        record = server.record
        assert record.state == "ready" and record.host["hostname"] == "ct101" and record.pid and record.ready_s
        assert record.phases
        assert len(server.check_identity()) == 2
        path = level(server, tmp_path)
        header = json.loads(path.read_text().splitlines()[0])
        assert header["client"]["host"] == place.host.name and header["client"]["hostname"] == "ct101"
        assert len(header["client"]["client_sha256"]) == 64 and header["base_url"] == record.base_url
        assert (
            level_summary(path)["requests_ok"].value == 4
            if "requests_ok" in level_summary(path)
            else read_level(path).requests
        )
        assert all(request["failure"] is None for request in read_level(path).requests)
        with (server.folder / "server.log").open("rb") as lines:
            log = read_log(lines)
        assert log.kv_pools[0].dtype in ("torch.bfloat16", "bfloat16") and log.ready
        pids = {p.pid for p in place.view().family(record.pid)}
        assert len(pids) == 2  # launcher and scheduler
    proof = server.record.stop
    assert proof is not None and proof.gone and proof.signals[0] == "SIGTERM", proof
    view = place.view()
    assert not [p for p in pids if view.process(p)] and not view.port_is_held(record.port)
    assert identity_of(server.folder).pid == record.pid
    assert not [e for e in place.host.list_folder("/tmp") if "wb-client" in e.path]


def test_sigterm_with_a_stream_in_flight_takes_sigkill(ssh: Place, model: str, tmp_path: Path) -> None:
    """As seen on SGLang: the drain never ends, the deadline does it, and the proof says which signal was needed."""
    server = remote.launch(
        ssh, remote_spec("s", parameters(model, environment={"STAND_IN_TOKEN_S": "0.2"}), ssh), tmp_path
    )
    body = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 10000}}

    def hold() -> None:
        with contextlib.suppress(requests.RequestException):
            requests.post(f"{server.control.base_url}/generate", json=body, timeout=30)

    thread = threading.Thread(target=hold)
    thread.start()
    time.sleep(1.0)
    proof = server.stop()
    thread.join(10)
    assert proof.signals == ["SIGTERM", "SIGKILL"] and proof.gone and 2.5 < proof.seconds < 12.0, proof
    assert "Remaining number of requests 1" in (server.folder / "server.log").read_text()
    assert server.stop() is proof


def test_a_server_that_dies_tells_its_cause(ssh: Place, model: str, tmp_path: Path) -> None:
    """Its own log gives the cause, as on this machine."""
    message = "ValueError: Unknown attention backend: nonsense"
    with pytest.raises(ServerDied, match="exit code 1"):
        remote.launch(ssh, remote_spec("d", parameters(model, environment={"STAND_IN_DIE": message}), ssh), tmp_path)
    folder = next(tmp_path.iterdir())
    assert (
        message in (folder / "server.log").read_text()
        and json.loads((folder / "launch.json").read_text())["state"] == "died"
    )
    with pytest.raises(ServerDied, match="No such file"):
        remote.launch(ssh, remote_spec("n", parameters(model, python="/no/python"), ssh), tmp_path)


def test_a_killed_server_is_noticed(ssh: Place, model: str, tmp_path: Path) -> None:
    """When the process there is gone, the next measurement is not taken in its name."""
    with remote.launch(ssh, remote_spec("k", parameters(model), ssh), tmp_path) as server:
        ssh.host.run(["kill", "-KILL", str(server.record.pid)])
        time.sleep(0.5)
        with pytest.raises(IdentityError, match="is gone on guest-101"):
            server.check_identity()
    assert server.record.stop and server.record.stop.gone


def test_a_port_taken_by_a_bystander_names_it(ssh: Place, model: str, tmp_path: Path) -> None:
    """Before anything is launched; the bystander goes on."""
    code = "import socket,time; s=socket.create_server(('127.0.0.1', 30007)); time.sleep(600)"
    with ssh.host.start(["python3", "-c", code, "somebodys-notebook"], deadline_s=60) as bystander:
        for _ in range(50):
            if ssh.view().port_is_held(30007):
                break
            time.sleep(0.1)
        with pytest.raises(PortTaken, match="somebodys-notebook"):
            remote.launch(ssh, remote_spec("p", parameters(model, port=30007), ssh), tmp_path)
        assert bystander.ending is None and not list(tmp_path.iterdir())


def test_keys_stay_out_of_everything_that_is_kept(
    ssh: Place, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API key reaches the server and the load client there, and no file of the run."""
    monkeypatch.setenv("WB_LAB_KEY", "sk-labsecret-0123456789abcdef")
    spec = remote_spec("key", parameters(model, api_key_env="WB_LAB_KEY"), ssh)
    with remote.launch(ssh, spec, tmp_path) as server:
        assert requests.get(f"{server.control.base_url}/v1/models", timeout=10).status_code == 401
        url, sender = load_way(server)
        made = build_workload("code", 2, 16, 4, 1, None)
        path = run_level(url, "completions", made.requests, out=tmp_path / "level.jsonl", concurrency=1,
                         model=server.control.served_model_name(), api_key_env="WB_LAB_KEY", sender=sender)  # fmt: skip
        assert all(request["failure"] is None for request in read_level(path).requests)
    kept = [f for f in tmp_path.rglob("*") if f.is_file()]
    assert len(kept) >= 4 and not [f for f in kept if b"labsecret" in f.read_bytes()]


def test_wrong_parameters_are_refused_in_words(ssh: Place, model: str) -> None:
    """Relative paths mean nothing on another host; missing folders and interpreters are named with the host."""
    for changes, words in (
        ({"model": "tiny"}, "absolute path"),
        ({"model": "/no/such"}, "no folder '/no/such'"),
        ({"python": ".venv/bin/python"}, "absolute path"),
        ({"python": "/no/python", "sglang_version": None}, "server.python runs on guest-101"),
        ({"sglang_version": None}, "SGLang installed"),
        ({"keep": True}, "ends with the run"),
    ):
        with pytest.raises(BadInput, match=words):
            remote_spec("w", parameters(**{"model": model, **changes}), ssh)


def test_a_mirrored_checkpoint_reads_like_the_original(place: Place, model: str) -> None:
    """Fingerprint and facts of the files there, without copying weights; unchanged files are not copied again."""
    original = resolve_model(load_profile(TINY).server.model or "")
    mirror = mirror_checkpoint(place.host, model)
    assert model_fingerprint(mirror)["sha256"] == model_fingerprint(original)["sha256"]
    same = read_checkpoint(mirror).model_dump(exclude={"path"})
    assert same == read_checkpoint(original).model_dump(exclude={"path"})
    shard = next(mirror.glob("*.safetensors"))
    assert (
        shard.stat().st_size == (original / shard.name).stat().st_size
        and shard.stat().st_blocks * 512 < shard.stat().st_size
    )
    before = {f.name: f.stat().st_ctime_ns for f in mirror.iterdir()}
    mirror_checkpoint(place.host, model)
    assert {f.name: f.stat().st_ctime_ns for f in mirror.iterdir()} == before


# attached -----------------------------------------------------------------------------------------------------------------
@pytest.fixture
def service(ssh: Place, model: str) -> Iterator[str]:
    """The stand-in as somebody's systemd service on port 30000 of container 101."""
    words = ["systemd-run", "--unit=somebodys-sglang", "--collect", "-E", "STAND_IN_LOAD_S=0.5", "-E", "SGLANG_X=1",
             "-p", "StandardError=append:/var/log/sglang.log", "-p", "TimeoutStopSec=2", "python3", f"{HOME}/sglang/launch_server.py",
             "--model-path", model, "--port", "30000", "--api-key", "sk-servicesecret-0123456789"]  # fmt: skip
    ssh.host.run(words).check("the service starts")
    for _ in range(100):
        if b"fired up" in (
            ssh.host.read_file("/var/log/sglang.log") if ssh.host.exists("/var/log/sglang.log") else b""
        ):
            break
        time.sleep(0.1)
    yield "somebodys-sglang.service"
    ssh.host.run(["systemctl", "kill", "-s", "KILL", "somebodys-sglang"])
    ssh.host.run(["systemctl", "stop", "somebodys-sglang"])
    ssh.host.run(["rm", "-f", "/var/log/sglang.log"])


def test_a_running_service_is_attached_and_left_alone(
    place: Place, service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pid, start, unit, environment and log of a service there; measured from there; it runs on afterwards."""
    monkeypatch.setenv("WB_LAB_KEY", "sk-servicesecret-0123456789")
    params = ServerParams(attach="http://127.0.0.1:30000", log="/var/log/sglang.log", api_key_env="WB_LAB_KEY")
    server = RemoteAttached.attach_on(place, "server", params, tmp_path)
    record = server.record
    assert (
        record.pid and record.notes == [f"pid {record.pid}, unit {service}"] and record.environment == {"SGLANG_X": "1"}
    )
    assert "REDACTED" in record.argv and "still own the port" in server.check_identity()[0]
    assert "KV Cache is allocated" in (server.folder / "server.log").read_text()
    url, sender = load_way(server)
    made = build_workload("code", 2, 16, 4, 1, None)
    path = run_level(url, "completions", made.requests, out=tmp_path / "level.jsonl", concurrency=1,
                     model=server.control.served_model_name(), api_key_env="WB_LAB_KEY", sender=sender)  # fmt: skip
    assert all(request["failure"] is None for request in read_level(path).requests)
    assert not [f for f in tmp_path.rglob("*") if f.is_file() and b"servicesecret" in f.read_bytes()]
    place.host.run(["kill", "-KILL", str(record.pid)], sudo=True)
    time.sleep(0.3)
    with pytest.raises(IdentityError, match=f"belonged to pid {record.pid}"):
        server.check_identity()


def test_without_root_the_identity_is_weak_and_says_so(
    plain_user: Host, service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who may not look into the service's process gets /server_info only, and is told."""
    monkeypatch.setenv("WB_LAB_KEY", "sk-servicesecret-0123456789")
    params = ServerParams(attach="http://127.0.0.1:30000", api_key_env="WB_LAB_KEY")
    server = RemoteAttached.attach_on(Place(plain_user, HostParams()), "server", params, tmp_path)
    assert server.record.pid is None and "weak identity" in server.check_identity()[0]


def test_nothing_there_is_said_with_the_host(ssh: Place, tmp_path: Path) -> None:
    """Attach to a port on which nobody listens."""
    with pytest.raises(ServerError, match="answers on http://127.0.0.1:30999 of guest-101"):
        RemoteAttached.attach_on(ssh, "server", ServerParams(attach="http://127.0.0.1:30999"), tmp_path)


# the load client ----------------------------------------------------------------------------------------------------------
def test_the_client_there_shows_the_truth_and_a_tunnel_says_what_it_adds(guest: Host, guest_pct: Host) -> None:
    """Against a judge on the host: the client beside it is within the limits (or the machine too busy to say), and the way
    through a forwarded port carries what it adds to TTFT; a port relayed by `pct exec` adds far more than SSH's."""
    beside = calibrate_on(guest, 2)
    assert beside["judge_on"] == beside["client_on"] == "guest-101" and beside["ttft_p50_shown_true_s"][1] > 0.04, (
        beside
    )
    by_ssh, by_pct = calibrate_tunnel(guest, 2), calibrate_tunnel(guest_pct, 2)
    assert set(by_ssh["tunnel"]) == {"ttft_p50_added_s", "ttft_p99_added_s", "gap_p50_added_s", "gap_p99_added_s"}
    assert 0 < by_ssh["tunnel"]["ttft_p50_added_s"] < by_pct["tunnel"]["ttft_p50_added_s"]
    assert by_pct["status"] != "ok"  # no latency verdict through it


def test_load_through_a_tunnel_if_params_say_so(guest: Host, ssh: Place, model: str, tmp_path: Path) -> None:
    """`load_client: here` sends from this machine to the near end, and its header names no other host."""
    near = Place(guest, HostParams(kind="ssh", address="used-by-tests", load_client="here"))
    with remote.launch(near, remote_spec("t", parameters(model), near), tmp_path) as server:
        path = level(server, tmp_path)
        header = json.loads(path.read_text().splitlines()[0])
        assert (
            header["base_url"] == server.control.base_url != server.record.base_url and "host" not in header["client"]
        )
        assert all(request["failure"] is None for request in read_level(path).requests)


def test_an_interrupted_level_keeps_what_was_sent(ssh: Place, model: str, tmp_path: Path) -> None:
    """Ctrl-C during a level on a host: the records of what was sent come back, and nothing runs there afterwards."""
    with remote.launch(
        ssh, remote_spec("i", parameters(model, environment={"STAND_IN_TOKEN_S": "0.05"}), ssh), tmp_path
    ) as server:
        url, sender = load_way(server)
        made = build_workload("code", 40, 16, 40, 1, None)
        timer = threading.Timer(4.0, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            run_level(url, "completions", made.requests, out=tmp_path / "level.jsonl", concurrency=2,
                      model=server.control.served_model_name(), sender=sender)  # fmt: skip
        timer.join()
        lines = (tmp_path / "level.jsonl").read_text().splitlines()
        assert json.loads(lines[0])["stopped"] == "interrupted" and 1 < len(lines) < 41
        assert faults.alive(ssh.host, "client.pyz") == []


def test_an_old_python_there_is_said(tmp_path: Path) -> None:
    """The load client needs 3.11: an older interpreter is named, with what to do."""
    from lib.errors import HostError
    from lib.hosts.remote_client import HostSender

    old = tmp_path / "python3.9"
    old.write_text(
        '#!/bin/sh\necho \'{"version": [3, 9], "python": "3.9.2", "machine": "x", "kernel": "x", "cpu_count": 1}\'\n'
    )
    old.chmod(0o755)
    with pytest.raises(HostError, match="3.11 or newer.*3.9.2.*client_python"):
        HostSender(LocalHost(), str(old)).check()


# the real thing -----------------------------------------------------------------------------------------------------------
@pytest.mark.server
def test_what_is_meant_there_is_what_is_meant_here(ssh: Place, model: str, tiny_spec: Any) -> None:
    """The real SGLang's environment and model as seen on the host: the same version, files and command as on this machine;
    `test_remote_notebooks` launches it."""
    tiny = load_profile(TINY).server
    python = str(ROOT / ".venv-sglang" / "bin" / "python")
    spec = remote_spec("real", ServerParams.model_validate({**tiny.model_dump(), "model": model, "python": python}), ssh)
    assert spec.sglang_version == tiny_spec.sglang_version and spec.model["sha256"] == tiny_spec.model["sha256"]
    here = [model if word == tiny_spec.model_path else word for word in tiny_spec.argv]
    assert spec.argv[1:] == here[1:] and spec.environment == tiny_spec.environment
