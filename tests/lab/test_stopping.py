"""The stop ladder on real systemd hosts: drained, killed, from the hypervisor, unkillable; and nobody else hurt."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest

from lib.deploy.service import service_state, systemctl
from lib.deploy.stopping import StopReport, serving_containers, stop_service
from lib.hosts.base import Host
from lib.hosts.lxc import LXCHost
from tests.lab import faults
from tests.lab.lab import Lab

PORT = 31000
HOME = "/opt/stand-in"


def unit_text(extra: str = "", environment: str = "", command: str | None = None) -> str:
    """A unit of the old kind, with what a test wants wrong in it."""
    argv = command or f"/usr/bin/python3 -m sglang.launch_server --model-path m --port {PORT}"
    return (
        "[Unit]\nDescription=old\nStartLimitIntervalSec=0\n[Service]\n"
        f"Environment=PYTHONPATH={HOME} STAND_IN_LOAD_S=0.2 STAND_IN_POLL_S=0.5"
        f" {environment}\nExecStart={argv}\n{extra}\n"
    )


@contextlib.contextmanager
def service(guest: Host, name: str, text: str, wait: bool = True) -> Iterator[str]:
    """An installed and started service; whatever is left of it is removed at the end."""
    if not guest.exists(f"{HOME}/sglang/__init__.py"):
        faults.install_stand_in(guest, HOME)
    guest.put(text.encode(), f"/etc/systemd/system/{name}.service")
    systemctl(guest, "daemon-reload").check("reload")
    systemctl(guest, "start", name).check("start")
    try:
        if wait:
            ready(guest)
        yield name
    finally:
        systemctl(guest, "kill", "--signal=SIGKILL", name)
        systemctl(guest, "stop", name)
        guest.run(["rm", "-f", f"/etc/systemd/system/{name}.service"])
        systemctl(guest, "daemon-reload")
        systemctl(guest, "reset-failed")


def ready(guest: Host, seconds: float = 20) -> None:
    """Waits until the stand-in answers health."""
    end = time.monotonic() + seconds
    with guest.forward(PORT) as port:
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                if urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).status == 200:
                    return
            time.sleep(0.1)
    raise TimeoutError("not ready")


@contextlib.contextmanager
def stream(guest: Host, tokens: int = 100_000) -> Iterator[None]:
    """A stream in flight, which keeps the server from ending at SIGTERM."""
    with guest.forward(PORT) as port:
        body = json.dumps(
            {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}
        ).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/generate", body, {"Content-Type": "application/json"}
        )
        answer = urllib.request.urlopen(request, timeout=30)
        answer.read(20)

        def drain() -> None:
            with contextlib.suppress(Exception):
                while answer.read(4096):
                    pass

        thread = threading.Thread(target=drain, daemon=True)
        thread.start()
        try:
            yield
        finally:
            with contextlib.suppress(Exception):
                answer.close()


def rungs(report: StopReport) -> list[str]:
    """Names of the rungs that were climbed."""
    return [r.name for r in report.rungs]


@pytest.mark.parametrize("way", ["ssh", "user"])
def test_an_idle_service_drains(way: str, guest: Host, guest_user: Host) -> None:
    """One rung; processes gone, port free, systemd agrees; an ordinary user with sudo suffices; again is no error."""
    with service(guest, "old", unit_text()):
        report = stop_service(guest if way == "ssh" else guest_user, "old", PORT, drain_s=15)
        assert report.gone and rungs(report) == ["drain"] and report.port_free, report
        assert {s.unit for s in report.before} == {"old.service"}
        assert stop_service(guest, "old", PORT).state == "was_not_running"


def test_a_stream_in_flight_is_ended_by_sigkill_and_restart_does_not_revive_it(guest: Host) -> None:
    """SIGTERM is not enough, Restart=always doesn't bring it back, TimeoutStopSec=infinity doesn't hold us up."""
    text = unit_text("Restart=always\nRestartSec=0\nTimeoutStopSec=infinity\nKillMode=mixed")
    with service(guest, "old", text), stream(guest):
        report = stop_service(guest, "old", PORT, drain_s=2, kill_s=8)
        assert report.gone and rungs(report) == ["drain", "kill"], report
        time.sleep(1.5)
        state = service_state(guest, "old")
        assert not state.active and not guest.view().port_is_held(PORT), state


def test_workers_left_by_killmode_process_are_ended_too(guest: Host) -> None:
    """A unit that leaves its workers behind: systemd says inactive, the ladder says what is left and ends it."""
    with service(guest, "old", unit_text("KillMode=process")), stream(guest):
        main = service_state(guest, "old").main_pid
        guest.run(["kill", "-KILL", str(main)])
        end = time.monotonic() + 5
        while service_state(guest, "old").get("ActiveState") == "active" and time.monotonic() < end:
            time.sleep(0.1)
        report = stop_service(guest, "old", PORT, drain_s=2, kill_s=8)
        assert report.gone, report
        assert not [p for p in guest.view().processes if p.alive and "sglang" in " ".join([p.name, *p.argv])]


def test_a_server_started_by_hand_is_found_by_its_port_and_bystanders_are_left_alone(guest: Host) -> None:
    """The origin's old server: no unit at all. Another service's Python and a listener on another port survive."""
    faults.put_stand_in(guest, f"{HOME}/sglang/launch_server.py")
    guest.put(b"", f"{HOME}/sglang/__init__.py")
    scope = ["systemd-run", "--quiet", "--scope", "--unit=session-by-hand", "--"]
    values = [f"--setenv={v}" for v in (f"PYTHONPATH={HOME}", "STAND_IN_LOAD_S=0.2", "STAND_IN_POLL_S=0.5")]
    server = ["python3", "-m", "sglang.launch_server", "--model-path", "m", "--port", str(PORT)]
    guest.run(["systemd-run", "--quiet", "--collect", *values, "--", *scope, *server], deadline_s=10).check(
        "a server by hand"
    )
    other = "/usr/bin/python3 -c 'import time; time.sleep(600)' sglang.launch_server"
    with service(guest, "bystander", unit_text(command=other), wait=False):
        ready(guest)
        report = stop_service(guest, "new", PORT, drain_s=6, kill_s=8)
        assert report.gone and report.before and report.service == "no such unit", report
        assert service_state(guest, "bystander").get("ActiveState") == "active"


def test_a_port_taken_by_a_bystander_is_said_and_not_freed(guest: Host) -> None:
    """Nothing is stopped for the port's sake; the report names who listens."""
    command = f"/usr/bin/python3 -m http.server {PORT} --bind 127.0.0.1"
    with service(guest, "web", unit_text(command=command), wait=False):
        end = time.monotonic() + 10
        while not guest.view().port_is_held(PORT) and time.monotonic() < end:
            time.sleep(0.1)
        report = stop_service(guest, "old", PORT)
        assert report.state == "was_not_running" and report.port_free is False
        assert [b.unit for b in report.bystanders] == ["web.service"] and "http.server" in (report.port_reason or "")
        assert service_state(guest, "web").get("ActiveState") == "active"


def test_with_a_dead_sshd_the_hypervisor_stops_it(lab: Lab, guest: Host, guest_pct: LXCHost) -> None:
    """The host itself doesn't answer: the same ladder through `pct exec`."""
    with service(guest_pct, "old", unit_text()), faults.dead_sshd(guest_pct), lab.ssh("guest-101") as gone:
        report = stop_service(gone, "old", PORT, drain_s=15, hypervisor=guest_pct)
        assert report.gone and report.host == guest_pct.name, report


def test_a_process_in_uninterruptible_sleep_is_unkillable_and_named(guest: Host, guest_pct: LXCHost) -> None:
    """Every rung is climbed, the report says who is left, where it sleeps and what a person can do; nothing claims success."""
    with faults.frozen_disk(guest) as folder:
        server = f"python3 -m sglang.launch_server --model-path m --port {PORT}"
        writer = f"/bin/sh -c '{server} & exec dd if=/dev/zero of={folder}/x bs=64k count=1'"
        with service(guest, "stuck", unit_text("TimeoutStopSec=2", command=writer), wait=False):
            end = time.monotonic() + 10
            while not any(p.state == "D" for p in guest.view().in_unit("stuck.service")) and time.monotonic() < end:
                time.sleep(0.1)
            report = stop_service(guest, "stuck", PORT, drain_s=4, kill_s=3, hypervisor=guest_pct)
            assert report.state == "unkillable" and not report.gone, report
            assert rungs(report) == ["drain", "kill", "hypervisor"]
            assert [s.state for s in report.left] == ["D"] and "dd" in report.left[0].argv
            assert "reboot" in (report.do or "")
            guest.run(["bash", "-c", f"fsfreeze -u {folder}"])
            end = time.monotonic() + 10
            while guest.view().in_unit("stuck.service") and time.monotonic() < end:
                time.sleep(0.2)


FAKE_ENGINE = """#!/usr/bin/python3
import json, os, signal, subprocess, sys
ID, PORT, POLICY = {identity!r}, {port}, "unless-stopped"
words = sys.argv[1:]
with open("/run/fake-docker.log", "a") as log:
    log.write(" ".join(words) + "\\n")
scope = "/sys/fs/cgroup/system.slice/docker-" + ID + ".scope/cgroup.procs"
pids = [int(p) for p in open(scope).read().split()] if os.path.exists(scope) else []
if words[0] == "inspect":
    print(json.dumps([{{"Id": ID, "Name": "/old", "Image": "sha256:" + "b" * 64, "RestartCount": 0, "Path": "python3", "Args": [],
        "State": {{"Running": bool(pids), "Pid": pids[0] if pids else 0, "StartedAt": "x"}}, "Config": {{"Image": "lmsysorg/sglang:v1"}},
        "HostConfig": {{"NetworkMode": "bridge", "RestartPolicy": {{"Name": POLICY}}, "LogConfig": {{"Type": "json-file"}}}},
        "NetworkSettings": {{"Ports": {{"30000/tcp": [{{"HostIp": "127.0.0.1", "HostPort": str(PORT)}}]}}}}}}]))
elif words[0] == "image":
    print(json.dumps([{{"RepoDigests": ["lmsysorg/sglang@sha256:" + "c" * 64]}}]))
elif words[0] in ("stop", "kill"):
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
"""


def test_a_server_in_a_container_is_stopped_through_its_engine(guest: Host) -> None:
    """Named with its image's digest, ended by `docker stop` of its id; a container on another port is a bystander's and lives."""
    ids = {"mine": "a" * 64, "other": "d" * 64}
    faults.put_stand_in(guest, f"{HOME}/sglang/launch_server.py")
    guest.put(b"", f"{HOME}/sglang/__init__.py")
    guest.put(FAKE_ENGINE.format(identity=ids["mine"], port=PORT).encode(), "/usr/local/bin/docker", mode=0o755)
    server = "exec python3 -m sglang.launch_server --model-path m --port"
    try:
        for name, port in (("mine", PORT), ("other", PORT + 1)):
            scope = ["systemd-run", "--quiet", "--scope", f"--unit=docker-{ids[name]}", "--", "sh", "-c", f"{server} {port}"]
            guest.run([
                "systemd-run", "--quiet", "--collect", f"--unit=start-{name}", f"--setenv=PYTHONPATH={HOME}",
                "--setenv=STAND_IN_LOAD_S=0.2", "--", *scope,
            ]).check("a server in a container's scope")  # fmt: skip
        ready(guest)
        described, silent = serving_containers(guest, guest.view(sudo=True))
        assert list(described) == [ids["mine"]] and list(silent) == [ids["other"]], (described, silent)
        report = stop_service(guest, "old", PORT, drain_s=4, kill_s=6)
        assert report.gone, report
        assert [(c.id, c.digests) for c in report.containers] == [(ids["mine"], [f"lmsysorg/sglang@sha256:{'c' * 64}"])]
        said = guest.read_file("/run/fake-docker.log").decode()
        assert f"stop --time 4 {ids['mine']}" in said and f"stop --time 4 {ids['other']}" not in said
        left = [p for p in guest.view().processes if p.alive and p.container == ("docker", ids["other"])]
        assert left, "the other container's server must live"
    finally:
        guest.run(["systemctl", "kill", "--signal=SIGKILL", *(f"docker-{identity}.scope" for identity in ids.values())])
        guest.run(["rm", "-f", "/usr/local/bin/docker", "/run/fake-docker.log"])
