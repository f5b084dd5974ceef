"""Rollouts on real systemd hosts: proven, rolled back, interrupted at every step, two at once, refused, undone."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lib.deploy.deployment import (
    STATE_FOLDER,
    STEPS,
    Deployment,
    DeployPlan,
    DeployReport,
    Objection,
    Refused,
    Unfinished,
)
from lib.deploy.proof import Expectation, prove
from lib.deploy.service import service_state, systemctl
from lib.errors import BadInput, Busy, HostError
from lib.hosts.base import Host
from tests.conftest import ROOT
from tests.lab import faults
from tests.lab.lab import Lab

PORT = 31100
HOME = "/opt/stand-in"
SERVICE = "sglang-lab"


def unit_text(note: str, environment: str = "", restart: str = "Restart=on-failure\nRestartSec=1") -> str:
    """A sound unit for the stand-in."""
    return (
        f"[Unit]\nDescription={note}\nAfter=network-online.target\nWants=network-online.target\nStartLimitIntervalSec=60\nStartLimitBurst=3\n"
        f"[Service]\nType=exec\nUser=nobody\nEnvironment=PYTHONPATH={HOME} PYTHONDONTWRITEBYTECODE=1\n"
        "Environment=STAND_IN_LOAD_S=0.3 STAND_IN_POLL_S=0.3\n"
        f"Environment={environment or 'X=1'}\n"
        f"ExecStart=/usr/bin/python3 -m sglang.launch_server --model-path m --port {PORT} --kv-cache-dtype bf16\n"
        f"KillMode=mixed\nTimeoutStopSec=20\nTimeoutStartSec=60\n{restart}\n[Install]\nWantedBy=multi-user.target\n"
    )


def plan(note: str = "one", environment: str = "", **other: Any) -> DeployPlan:
    """A plan for the stand-in, with what it must show."""
    expectation = Expectation(
        port=PORT, sglang_version="0.5.15.post1", kv_cache_dtype="bfloat16", max_total_num_tokens=65536, flags={"kv_cache_dtype": "bf16"},
        prompt="The capital of France is", expect=" Paris",
    )  # fmt: skip
    fields = {"ready_timeout_s": 15.0, "drain_s": 6.0, "kill_s": 5.0, "restart_proof": False, **other}
    return DeployPlan(service=SERVICE, unit_text=unit_text(note, environment), expectation=expectation, **fields)


@pytest.fixture(scope="module")
def installed(guest: Host) -> None:
    """The stand-in on container 101, and no trace of a service."""
    faults.install_stand_in(guest, HOME)
    faults.sweep(guest, SERVICE, STATE_FOLDER)


@pytest.fixture(autouse=True)
def clean(guest: Host, installed: None) -> Iterator[None]:
    """No trace of a service after each test, and so before the next."""
    yield
    faults.sweep(guest, SERVICE, STATE_FOLDER)


def description(guest: Host) -> str:
    """Which unit is installed."""
    text = guest.run(["sh", "-c", f"grep ^Description= /etc/systemd/system/{SERVICE}.service"]).text
    return text.strip().removeprefix("Description=")


def serves(guest: Host) -> bool:
    """True while the stand-in of the service listens."""
    view = guest.view()
    return any(p.unit == f"{SERVICE}.service" for p in view.port_owners(PORT))


def deploy(host: Host, what: DeployPlan, folder: Path, **options: Any) -> DeployReport:
    """One run to its end."""
    return Deployment(host, what, folder, **options).run()


@pytest.mark.parametrize("way", ["ssh", "pct", "user"])
def test_a_rollout_is_proven(way: str, guest: Host, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Over each way there is: installed, started, every needed claim passed from this start's own journal; the record is on the host."""
    host: Host = {
        "ssh": guest,
        "pct": request.getfixturevalue("guest_pct"),
        "user": request.getfixturevalue("guest_user"),
    }[way]
    report = deploy(host, plan(restart_proof=way == "ssh"), tmp_path)
    assert report.outcome == "proven", report
    assert [s.name for s in report.steps] == list(STEPS)
    status = {c.id: c.status for c in report.proof.claims} if report.proof else {}
    assert {"running", "port-owner", "ready", "answers", "kv-dtype", "kv-tokens", "version", "flags"} <= {
        k for k, v in status.items() if v == "pass"
    }
    assert status["gpu-memory"] == "unknown"
    if way == "ssh":
        assert report.restart_proof and report.proof and report.restart_proof.invocation != report.proof.invocation
    assert serves(guest) and json.loads(guest.read_file(f"{STATE_FOLDER}/{SERVICE}/proven.json"))["id"] == report.id
    assert not guest.exists(f"{STATE_FOLDER}/{SERVICE}/current.json")


def test_a_failed_proof_brings_the_last_proven_one_back(guest: Host, tmp_path: Path) -> None:
    """A new server that allocates another dtype than planned: the old unit is back, running, and proven again; again and again."""
    assert deploy(guest, plan("one"), tmp_path / "1").outcome == "proven"
    report = deploy(guest, plan("two", "STAND_IN_KV_DTYPE=float8_e4m3fn"), tmp_path / "2")
    assert report.outcome == "rolled_back" and "kv-dtype" in report.reason, report
    assert report.way_back_proof and report.way_back_proof.proven
    assert description(guest) == "one" and serves(guest)
    assert json.loads(guest.read_file(f"{STATE_FOLDER}/{SERVICE}/proven.json"))["id"] == plan("one").id
    assert deploy(guest, plan("one"), tmp_path / "3").outcome == "proven"


@pytest.mark.parametrize(
    ("environment", "words"),
    [("STAND_IN_DIE=boom", "ready: the unit is"), ("STAND_IN_HEALTH_ONLY=1", "answers: expected"),
     ("STAND_IN_ANSWER=!!!!!!!!!!!! STAND_IN_TOKENS=60000 STAND_IN_VERSION=0.5.14", "one character repeated")],
)  # fmt: skip
def test_a_new_server_that_is_no_good_is_never_left_in_place(
    guest: Host, tmp_path: Path, environment: str, words: str
) -> None:
    """It dies at start, answers health and nothing else, talks garbage with another pool and version: rolled back to nothing."""
    report = deploy(guest, plan("bad", environment, ready_timeout_s=8.0), tmp_path)
    assert report.outcome == "rolled_back" and words in report.reason, report.reason
    if "VERSION" in environment:
        assert "kv-tokens: expected 65536" in report.reason and "version: expected 0.5.15.post1" in report.reason
    assert not guest.exists(f"/etc/systemd/system/{SERVICE}.service") and not serves(guest)
    assert service_state(guest, SERVICE).get("UnitFileState") in ("", "not-found")


def killed(lab: Lab, what: DeployPlan, folder: Path, at: str) -> None:
    """A run in a process of its own, which SIGKILL ends when it begins a step: nothing is tidied up."""

    def roll() -> None:
        def say(words: str) -> None:
            if words == at:
                os.kill(os.getpid(), signal.SIGKILL)

        with lab.ssh("guest-101") as own:
            Deployment(own, what, folder, say=say).run()

    child = multiprocessing.get_context("fork").Process(target=roll)
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL, (at, child.exitcode)


def test_a_workbook_killed_at_any_step_leaves_a_rollout_that_is_undone_or_continued(
    lab: Lab, guest: Host, tmp_path: Path
) -> None:
    """At every step: another plan is refused by name, `undo` leaves the old unit running, and the same plan goes on to its proof.

    The two plans take turns, so each finds what an older rollout of itself had saved.
    """
    old, new = plan("one"), plan("two")
    assert deploy(guest, old, tmp_path / "0").outcome == "proven"
    for step in STEPS:
        killed(lab, new, tmp_path / f"{step}-1", step)
        if step == "start":
            with pytest.raises(Unfinished, match=new.id):
                again(lambda: deploy(guest, plan("three"), tmp_path / "other"))
        report = again(Deployment(guest, new, tmp_path / f"{step}-3").undo)
        assert report.outcome == "undone", report
        assert (service_note(old), True) == (description(guest), serves(guest)), step
        assert not guest.exists(f"{STATE_FOLDER}/{SERVICE}/current.json")
        killed(lab, new, tmp_path / f"{step}-4", step)
        report = again(functools.partial(deploy, guest, new, tmp_path / f"{step}-5"))
        assert report.outcome == "proven" and description(guest) == service_note(new) and serves(guest), report
        kept = json.loads(guest.read_file(f"{STATE_FOLDER}/{SERVICE}/proven.json"))
        assert kept["id"] == new.id and kept["proof"]["claims"], step
        old, new = new, old


def service_note(what: DeployPlan) -> str:
    """A plan's description."""
    return next(line for line in what.unit_text.splitlines() if line.startswith("Description=")).removeprefix("Description=")


def test_a_killed_workbook_leaves_a_rollout_that_goes_on(lab: Lab, guest: Host, tmp_path: Path) -> None:
    """SIGKILL to the real process in the middle: the lock is free again, the same plan is finished by another process."""
    file = tmp_path / "plan.json"
    file.write_text(plan("two", "STAND_IN_LOAD_S=4", ready_timeout_s=30.0).model_dump_json())
    code = (
        "import sys; from pathlib import Path\n"
        "from lib.deploy.deployment import Deployment, DeployPlan\nfrom lib.hosts.ssh import SSHHost\n"
        "host = SSHHost('guest-101', config=sys.argv[2], name='guest-101')\n"
        "plan = DeployPlan.model_validate_json(Path(sys.argv[1]).read_text())\n"
        "Deployment(host, plan, Path(sys.argv[3]), say=lambda w: print(w, flush=True)).run()\n"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", code, str(file), str(lab.config), str(tmp_path / "a")], cwd=ROOT, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
    )  # fmt: skip
    try:
        for line in first.stdout or ():
            if line.strip() == "ready":
                break
        with pytest.raises(Busy) as second:
            deploy(guest, plan("three"), tmp_path / "b")
        what = plan("two", "STAND_IN_LOAD_S=4", ready_timeout_s=30.0)
        assert re.search(rf"\S+@\S+.*, plan {what.id}, since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC", str(second.value)), second.value
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    what = DeployPlan.model_validate_json(file.read_text())
    report = again(lambda: deploy(guest, what, tmp_path / "c"))
    assert report.outcome == "proven", report


def test_a_full_disk_changes_nothing(guest: Host, tmp_path: Path) -> None:
    """The files can't be written: the old unit goes on as it was, never half a unit."""
    assert deploy(guest, plan("one"), tmp_path / "1").outcome == "proven"
    before = service_state(guest, SERVICE).invocation
    with faults.full_disk(guest) as folder:
        what = plan("two", environment_file=f"{folder}/service.env")
        report = deploy(guest, what, tmp_path / "2", environment="A=1\n" * 5000)
    assert report.outcome == "rolled_back" and "put" in report.reason, report
    assert description(guest) == "one" and serves(guest) and service_state(guest, SERVICE).invocation == before


def test_a_port_held_by_somebody_else_is_no_reason_to_touch_them(guest: Host, tmp_path: Path) -> None:
    """The rollout ends and goes back; the holder is named and lives."""
    with guest.start(["python3", "-m", "http.server", str(PORT), "--bind", "127.0.0.1"], deadline_s=60):
        end = time.monotonic() + 10
        while not guest.view().port_is_held(PORT) and time.monotonic() < end:
            time.sleep(0.1)
        report = deploy(guest, plan(), tmp_path)
        assert report.outcome == "rolled_back" and "http.server" in report.reason, report
        assert guest.view().port_is_held(PORT)


def test_dropins_of_the_old_unit_do_not_change_the_new_one_and_come_back(guest: Host, tmp_path: Path) -> None:
    """They are set aside for the new unit, and restored with the old one."""
    assert deploy(guest, plan("one"), tmp_path / "1").outcome == "proven"
    path = f"/etc/systemd/system/{SERVICE}.service.d/local.conf"
    guest.put(b"[Service]\nEnvironment=STAND_IN_TOKENS=65536\n", path, parents=True)
    systemctl(guest, "daemon-reload")
    report = deploy(guest, plan("two"), tmp_path / "2")
    assert report.outcome == "proven" and not guest.exists(path)
    assert Deployment(guest, plan("two"), tmp_path / "3").undo().outcome == "undone"
    assert guest.exists(path) and description(guest) == "one" and serves(guest)
    with pytest.raises(BadInput, match="undone already"):  # a nervous second time must not take the service away
        Deployment(guest, plan("two"), tmp_path / "4").undo()
    assert serves(guest)


def test_a_masked_unit_is_replaced_and_masked_again(guest: Host, tmp_path: Path) -> None:
    """The link is replaced, what it leads to is not written: /dev/null stays what it is."""
    path = f"/etc/systemd/system/{SERVICE}.service"
    guest.run(["ln", "-s", "/dev/null", path]).check("masked")
    systemctl(guest, "daemon-reload")
    assert deploy(guest, plan("bad", "STAND_IN_DIE=x", ready_timeout_s=5.0), tmp_path).outcome == "rolled_back"
    found = guest.entry(path)
    assert found and found.kind == "link" and found.target == "/dev/null"
    assert guest.run(["test", "-c", "/dev/null"]).ok


def test_the_network_cut_in_mid_copy(lab: Lab, guest: Host, tmp_path: Path) -> None:
    """The copy never ends half: the old unit runs on, and the same plan is finished when the network is back."""
    assert deploy(guest, plan("one"), tmp_path / "1").outcome == "proven"
    what = plan("two", environment_file=f"/etc/{SERVICE}.env")
    text = "A=1\n" + "#" * 30_000_000 + "\n"
    with contextlib.ExitStack() as stack, lab.ssh("guest-101") as own:

        def say(words: str) -> None:
            if words == "put":
                threading.Timer(0.4, lambda: stack.enter_context(faults.network_cut(lab, 101))).start()

        with pytest.raises(HostError):
            Deployment(own, what, tmp_path / "2", environment=text, say=say).run()
    with lab.ssh("guest-101") as fresh:
        assert description(fresh) in ("one", "two") and serves(fresh)
        assert not fresh.exists(f"/etc/{SERVICE}.env") or fresh.entry(f"/etc/{SERVICE}.env").size == len(text)
        report = again(lambda: Deployment(fresh, what, tmp_path / "3", environment="A=1\n").run())
        assert report.outcome == "proven" and description(fresh) == "two", report
        assert not fresh.run(["sh", "-c", f"ls -a /etc | grep -F {SERVICE}.env. | grep part"]).text


def again(attempt: Callable[[], DeployReport], seconds: float = 40) -> DeployReport:
    """A rollout as soon as the lock of a connection that was cut is free."""
    end = time.monotonic() + seconds
    while True:
        try:
            return attempt()
        except Busy:
            assert time.monotonic() < end
            time.sleep(1)


def test_a_key_is_in_a_file_that_only_root_and_the_service_read(guest: Host, tmp_path: Path) -> None:
    """With an API key the server refuses whoever has none; the key is on no command line, in no unit and in no local file."""
    key, path = "sk-very-secret-0123456789", f"/etc/{SERVICE}.key.yaml"
    base = plan("keyed", key_file=path, key_reader="nobody")
    text = base.unit_text.replace("--kv-cache-dtype bf16", f"--kv-cache-dtype bf16 --config {path}")
    what = base.model_copy(update={"unit_text": text, "expectation": base.expectation.model_copy(update={"api_key_env": "LAB_KEY"})})
    with pytest.raises(BadInput, match="LAB_KEY"):
        deploy(guest, what, tmp_path / "1")
    assert not guest.exists(f"{STATE_FOLDER}/{SERVICE}")
    report = deploy(guest, what, tmp_path / "2", api_key=key)
    assert report.outcome == "proven" and report.proof, report
    assert {c.id: c.status for c in report.proof.claims}["key-needed"] == "pass"
    entry = guest.entry(path)
    assert entry and entry.mode & 0o777 == 0o640 and entry.uid == 0
    assert key not in guest.run(["ps", "axww"]).text + guest.run(["systemctl", "show", SERVICE]).text
    assert not [f for f in tmp_path.rglob("*") if f.is_file() and key in f.read_text(errors="replace")]


def test_secrets_stay_on_the_host(guest: Host, tmp_path: Path) -> None:
    """The environment file is root's, 0600; its key is in no local file and in no unit."""
    what = plan(environment_file=f"/etc/{SERVICE}.env")
    report = deploy(guest, what, tmp_path, environment="SECRET_TOKEN=sk-very-secret-0123456789\n")
    assert report.outcome == "proven"
    entry = guest.entry(f"/etc/{SERVICE}.env")
    assert entry and entry.mode & 0o777 == 0o600 and entry.uid == 0
    assert not [f for f in tmp_path.rglob("*") if f.is_file() and "sk-very-secret" in f.read_text(errors="replace")]
    folder = guest.entry(f"{STATE_FOLDER}/{SERVICE}")
    assert folder and folder.mode & 0o077 == 0


def test_an_objection_refuses_before_anything_is_touched(guest: Host, tmp_path: Path) -> None:
    """Without a named override with a reason nothing happens; with one it is recorded; a made-up override is an error."""
    objection = Objection(name="capacity", reason="the context doesn't fit")
    with pytest.raises(Refused, match="override: capacity"):
        deploy(guest, plan(objections=[objection]), tmp_path)
    with pytest.raises(BadInput, match="reason"):
        deploy(guest, plan(objections=[objection], overrides={"capacity": " "}), tmp_path)
    with pytest.raises(BadInput, match="none does"):
        deploy(guest, plan(overrides={"audit": "because"}), tmp_path)
    assert not guest.exists(f"{STATE_FOLDER}/{SERVICE}")
    report = deploy(guest, plan(objections=[objection], overrides={"capacity": "a test host"}), tmp_path)
    assert report.outcome == "proven" and report.overrides == {"capacity": "a test host"}


def test_the_plan_is_shown_without_touching_anything(
    guest: Host, guest_user: Host, plain_user: Host, tmp_path: Path
) -> None:
    """Diff, what runs now, whether root is there; a user without sudo is told what a person has to do."""
    first = Deployment(guest, plan("one"), tmp_path).look()
    assert first.unit_new and "+Description=one" in first.diff and first.can_root is None and first.runs == []
    deploy(guest, plan("one"), tmp_path)
    second = Deployment(guest_user, plan("two"), tmp_path).look()
    assert "-Description=one" in second.diff and second.runs and second.port_held_by and second.proven == plan("one").id
    plain = Deployment(plain_user, plan("two"), tmp_path).look()
    assert plain.can_root and any("systemctl enable --now" in line for line in plain.by_hand)
    assert description(guest) == "one"
    with pytest.raises(HostError):
        deploy(plain_user, plan("two"), tmp_path)
    assert description(guest) == "one" and serves(guest)


def test_after_a_reboot_it_serves_and_is_proven_again(lab: Lab, guest: Host, tmp_path: Path) -> None:
    """The unit is enabled: it comes back with the host, with another invocation, and the same claims hold."""
    report = deploy(guest, plan(), tmp_path / "1")
    assert report.outcome == "proven" and report.proof
    with lab.ssh("guest-101") as own:  # its connection dies with the host
        faults.restart(own, lab, 101)
    with lab.ssh("guest-101") as fresh:
        end = time.monotonic() + 30
        while not serves(fresh) and time.monotonic() < end:
            time.sleep(0.3)
        proof = prove(fresh, SERVICE, plan().expectation, tmp_path / "2")
        assert proof.proven and proof.invocation != report.proof.invocation, proof


@pytest.mark.parametrize("at", ["put", "ready"])
def test_a_host_that_reboots_in_the_middle(at: str, lab: Lab, guest: Host, tmp_path: Path) -> None:
    """The run says that it lost the host; no half unit is there afterwards, and the same plan is finished by running it again."""
    assert deploy(guest, plan("one"), tmp_path / "1").outcome == "proven"
    what = plan("two", "STAND_IN_LOAD_S=3", ready_timeout_s=30.0)
    with lab.ssh("guest-101") as own, lab.ssh("guest-101") as other:
        rebooting = threading.Thread(target=faults.restart, args=(other, lab, 101))

        def say(words: str) -> None:
            if words == at:
                rebooting.start()
                time.sleep(0.5)

        with pytest.raises(HostError):
            Deployment(own, what, tmp_path / "2", say=say).run()
        rebooting.join(90)
    with lab.ssh("guest-101") as fresh:
        assert description(fresh) in ("one", "two")
        assert "ExecStart=" in fresh.run(["systemctl", "cat", SERVICE]).check("a whole unit").text
        report = again(lambda: Deployment(fresh, what, tmp_path / "3").run())
        assert report.outcome == "proven" and description(fresh) == "two" and serves(fresh), report


def test_an_earlier_starts_lines_prove_nothing(guest: Host, tmp_path: Path) -> None:
    """The origin's first check read the launch before: here a start with another dtype fails, whatever the one before had said."""
    first = deploy(guest, plan("one"), tmp_path / "1")
    assert first.outcome == "proven" and first.proof
    path = f"/etc/systemd/system/{SERVICE}.service.d/x.conf"
    guest.put(b"[Service]\nEnvironment=STAND_IN_KV_DTYPE=float8_e4m3fn\n", path, parents=True)
    systemctl(guest, "daemon-reload")
    systemctl(guest, "restart", SERVICE)
    end = time.monotonic() + 15
    while time.monotonic() < end:
        proof = prove(guest, SERVICE, plan().expectation, tmp_path / "2")
        if {c.id: c.status for c in proof.claims}.get("kv-dtype", "unknown") != "unknown":
            break  # it has allocated its cache by now
    claim = {c.id: c for c in proof.claims}["kv-dtype"]
    assert claim.status == "fail" and "float8" in claim.found and proof.invocation != first.proof.invocation, claim
    journal = (tmp_path / "2" / "journal.log").read_text()
    assert journal.count("KV Cache is allocated") == 1 and "bfloat16" not in journal
    whole = guest.run(["journalctl", "-u", SERVICE, "-b", "--no-pager"]).text
    assert "dtype: torch.bfloat16" in whole  # the line that would have passed is in the unit's journal


def test_a_rotated_journal_is_unknown_not_a_pass(guest: Host, tmp_path: Path) -> None:
    """When this start's lines are gone, what only they show is unknown."""
    report = deploy(guest, plan(), tmp_path / "1")
    assert report.outcome == "proven"
    guest.run(["sh", "-c", "journalctl --rotate; sleep 1; journalctl --vacuum-time=1s; journalctl --vacuum-size=1"])
    proof = prove(guest, SERVICE, plan().expectation, tmp_path / "2")
    assert {c.id: c.status for c in proof.claims}.get("kv-dtype") in (None, "unknown")
    assert next(c for c in proof.claims if c.id == "answers").status == "pass"
