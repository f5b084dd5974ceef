"""`workbook deploy` and `workbook watch` as people type them, on a real systemd host; one test deploys the real SGLang."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lib.deploy.deployment import STATE_FOLDER
from lib.deploy.service import systemctl
from lib.hosts import local
from lib.hosts.base import Host
from lib.model.cache import model_path
from lib.params import load_profile
from lib.server.spec import resolve_model
from tests.conftest import ROOT, TINY, only_run
from tests.lab import faults
from tests.lab.lab import Lab

HOME = "/opt/stand-in"
SERVICE = "sglang-typed"
PORT = 31300
KEY = "sk-typed-0123456789abcdef"
STAND_IN = {
    "model": "/srv/model", "python": "/usr/bin/python3", "sglang_version": "0.5.15.post1", "stop_timeout_s": 5, "ready_timeout_s": 30,
    "flags": {"kv_cache_dtype": "bf16", "device": "cpu"},
    "environment": {"PYTHONPATH": HOME, "STAND_IN_LOAD_S": "0.5", "STAND_IN_POLL_S": "0.3"},
}  # fmt: skip


@pytest.fixture(scope="module")
def installed(guest: Host) -> None:
    """The stand-in and a model on the host; no service."""
    faults.install_stand_in(guest, HOME)
    path = resolve_model(load_profile(TINY).server.model or "")
    script = f"mkdir -p /srv/model && cp -r {path}/. /srv/model/ && chmod -R a+rX /srv/model"
    guest.run(["sh", "-c", script]).check("a model")
    faults.sweep(guest, SERVICE, STATE_FOLDER)


@pytest.fixture(autouse=True)
def clean(guest: Host, installed: None) -> Iterator[None]:
    """No service after each test."""
    yield
    faults.sweep(guest, SERVICE, STATE_FOLDER)


def profile(folder: Path, lab: Lab, address: str, server: dict[str, Any], **deploy: Any) -> str:
    """A profile for the host, with what 06.yaml needs."""
    folder.mkdir()
    for file in (ROOT / TINY).glob("0*.yaml"):
        (folder / file.name).write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "profile": str(folder)}))
    known = {"prompt": "The capital of France is", "expect": " Paris", "max_new_tokens": 8}
    data = {
        "title": "t",
        "host": {"kind": "ssh", "address": address, "config": str(lab.config)},
        "server": server,
        "known_answer": known,
    }
    (folder / "profile.yaml").write_text(yaml.safe_dump(data))
    fields = {
        "profile": str(folder),
        "service": SERVICE,
        "user": "nobody",
        "working_directory": "/srv",
        "port": PORT,
        **deploy,
    }
    (folder / "06.yaml").write_text(yaml.safe_dump(fields))
    return str(folder)


def test_plan_deploy_watch_undo_as_typed(lab: Lab, guest: Host, tmp_path: Path, workbook: Callable[..., Any]) -> None:
    """Each exit code and each --json form; an objection refuses until it is overridden with a reason; without root: by hand."""
    mine = profile(tmp_path / "p", lab, "guest-101", STAND_IN, context_tokens=10**9, restart_proof=False)
    done = workbook("deploy", "--profile", mine, "--plan", "--json")
    plan = json.loads(done.stdout)
    assert done.returncode == 1 and [o["name"] for o in plan["refused"]] == ["capacity"], done.stdout + done.stderr
    assert workbook("deploy", "--profile", mine).returncode == 1 and not guest.exists(f"{STATE_FOLDER}/{SERVICE}")
    done = workbook("deploy", "--profile", mine, "--override", "capacity=a test of the command", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["outcome"] == "proven", done.stdout + done.stderr
    assert report["overrides"] == {"capacity": "a test of the command"}
    state = next((tmp_path / "outputs" / "deployments").rglob("state.md")).read_text()
    assert "is proven" in state and "overridden: a test of the command" in state and "the port belongs to" in state
    done = workbook("watch", "--profile", mine)
    assert done.returncode == 0 and done.stdout.startswith("NO DRIFT"), done.stdout + done.stderr
    assert workbook("deploy", "--profile", mine, "--prove").returncode == 0
    systemctl(guest, "stop", SERVICE)
    done = workbook("watch", "--profile", mine, "--json")
    assert done.returncode == 1 and "running" in {
        r["id"] for r in json.loads(done.stdout)["rows"] if r["status"] == "drift"
    }
    plain = profile(tmp_path / "plain", lab, "plain-101", STAND_IN)
    done = workbook("deploy", "--profile", plain)
    assert done.returncode == 2 and "ExecStart=" in done.stdout and "systemctl enable --now" in done.stdout, done.stderr
    assert workbook("watch", "--profile", plain).returncode == 2
    done = workbook("deploy", "--profile", mine, "--undo")
    assert done.returncode == 0 and not guest.exists(f"/etc/systemd/system/{SERVICE}.service"), (
        done.stdout + done.stderr
    )


def test_notebook_06_deploys_where_it_is_told_to(
    lab: Lab, guest: Host, tmp_path: Path, workbook: Callable[..., Any]
) -> None:
    """`deploy: true`: its own launch is stopped, the service is rolled out and proven on the host, and state.md says so."""
    mine = profile(tmp_path / "p", lab, "guest-101", STAND_IN, restart_proof=False, deploy=True)
    done = workbook("run", "--profile", mine, "--only", "06")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = only_run(tmp_path / "outputs")
    result = json.loads((run / "06.result.json").read_text())
    status = {v["id"]: v["status"] for v in result["verdicts"]}
    assert (status["plan"], status["deployed"], status["same-command"]) == ("pass", "pass", "pass"), status
    state = (run / "state.md").read_text()
    assert "the port belongs to a process of this service" in state and "raw/06/rollout/proof/" in state
    assert json.loads(guest.read_file(f"{STATE_FOLDER}/{SERVICE}/proven.json"))["id"]
    rebuilt = workbook("rebuild", str(run))
    assert rebuilt.returncode == 0, rebuilt.stdout[-2000:] + rebuilt.stderr[-2000:]


FAKETIME = next(iter(Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), None)
#: libfaketime takes the absolute time of Python's `time.sleep` (monotonic) for one of its own clock, so a sleep ends at once.
SLEEP = "import select, time\ntime.sleep = lambda s: select.select([], [], [], max(0.0, s))\n"


def test_a_clock_that_jumps_around_the_workbook(
    lab: Lab, guest: Host, tmp_path: Path, workbook: Callable[..., Any]
) -> None:
    """libfaketime around the workbook alone: its clock is thrown back and forth by years while it deploys and watches.

    No wait is cut short, nothing is taken for older or newer than it is, and the host's own clock is never touched.
    """
    if FAKETIME is None:
        assert os.environ.get("CI") is None, "apt-get install faketime"
        pytest.skip("libfaketime is not installed: apt-get install faketime")
    mine = profile(tmp_path / "p", lab, "guest-101", STAND_IN, restart_proof=False)
    clock, lib = tmp_path / "clock", tmp_path / "site"
    lib.mkdir()
    (lib / "sitecustomize.py").write_text(SLEEP)
    clock.write_text("+0d")
    over = threading.Event()

    def jump() -> None:
        for number in itertools.count():
            local.write_atomic(clock, "-700d" if number % 2 else "+700d")
            if over.wait(1.2):
                return

    jumping = threading.Thread(target=jump)
    jumping.start()
    faked = {
        "LD_PRELOAD": str(FAKETIME), "FAKETIME_TIMESTAMP_FILE": str(clock), "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1", "PYTHONPATH": os.pathsep.join([str(lib), str(ROOT)]),
    }  # fmt: skip
    try:
        done = workbook("deploy", "--profile", mine, "--json", **faked)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        report = json.loads(done.stdout)
        assert report["outcome"] == "proven" and abs(report["at"] - time.time()) > 300 * 86400, report["at"]
        assert all(0 <= step["seconds"] < 60 for step in report["steps"]), report["steps"]
        done = workbook("watch", "--profile", mine, **faked)
        assert done.returncode == 0 and done.stdout.startswith("NO DRIFT"), done.stdout + done.stderr
    finally:
        over.set()
        jumping.join()
    assert abs(guest.view().unix_s - time.time()) < 5


def test_with_a_dead_sshd_the_hypervisor_is_the_way_in(
    lab: Lab, guest_pct: Host, tmp_path: Path, workbook: Callable[..., Any]
) -> None:
    """06's `hypervisor` is taken where the host itself doesn't answer, never where another key answers."""
    way = {
        "kind": "lxc",
        "container": 101,
        "hypervisor": {"kind": "ssh", "address": "hypervisor", "config": str(lab.config)},
    }
    mine = profile(tmp_path / "p", lab, "guest-101", STAND_IN, hypervisor=way)
    wrong = profile(tmp_path / "wrong", lab, "stranger-101", STAND_IN, hypervisor=way)
    with faults.dead_sshd(guest_pct):
        done = workbook("deploy", "--profile", mine, "--plan", "--json")
        assert done.returncode == 0 and "container 101" in json.loads(done.stdout)["host"], done.stdout + done.stderr
    done = workbook("deploy", "--profile", wrong, "--plan")
    assert done.returncode == 1 and "host key" in done.stderr, done.stderr


@pytest.mark.server
def test_the_real_server_is_deployed_proven_crashed_and_proven_again(
    lab: Lab, guest: Host, tmp_path: Path, workbook: Callable[..., Any]
) -> None:
    """The real SGLang as a hardened unit of an unprivileged user, with a key: proven, its scheduler killed, proven again, watched."""
    real = load_profile("embedded").server  # a seeded model talks garbage, and the proof refuses it
    copied = guest.run(
        [
            "sh",
            "-c",
            f"mkdir -p /srv/real && cp -r {model_path('smollm2-135m-instruct')}/. /srv/real/ && chmod -R a+rX /srv/real",
        ],
        deadline_s=120,
    )
    copied.check("a model that knows an answer")
    server = {
        **real.model_dump(exclude_none=True), "model": "/srv/real", "python": str(ROOT / ".venv-sglang" / "bin" / "python"),
        "environment": {**real.environment, "HOME": "/tmp"}, "api_key_env": "LAB_TYPED_KEY", "ready_timeout_s": 120,
    }  # fmt: skip
    guest.run(["chmod", "o+x", "/root"])  # the interpreter's home; in this container's layer alone
    mine = profile(tmp_path / "p", lab, "guest-101", server)
    secrets = tmp_path / "secrets.env"
    secrets.write_text(f"LAB_TYPED_KEY={KEY}\n")
    done = workbook("deploy", "--profile", mine, "--environment-file", str(secrets), "--json")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(done.stdout)
    status = {c["id"]: c["status"] for c in report["proof"]["claims"]}
    wanted = {"running", "ready", "answers", "version", "kv-dtype", "key-needed", "audit"}
    assert wanted <= {k for k, v in status.items() if v == "pass"}, status
    assert report["restart_proof"]["invocation"] != report["proof"]["invocation"]
    assert KEY not in done.stdout + done.stderr
    assert not [f for f in (tmp_path / "outputs").rglob("*") if f.is_file() and KEY in f.read_text(errors="replace")]
    done = workbook("watch", "--profile", mine)  # the key is read where it stands, by root
    assert done.returncode == 0 and "version-on-disk" in done.stdout.partition("as proven:")[2], (
        done.stdout + done.stderr
    )
