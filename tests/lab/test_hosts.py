"""Real hosts: the same interface over SSH, over `pct exec` and as an ordinary user; nothing is left running, no half file."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lib.errors import BadInput, HostError, HostTimeout, HostUnreachable, NeedsRoot, WrongHostKey
from lib.hosts.base import SILENCE_S, Host, LocalHost, together
from lib.hosts.engine import container_of_process
from lib.hosts.lxc import LXCHost
from lib.hosts.ssh import SSHHost
from tests.lab import faults
from tests.lab.lab import ROOT, Lab

HOSTILE = ["", " ", "-rf", "--", "$(touch /tmp/pwned)", "`id`", "a\nb", "'\"", "\\", "a b", "*", "~", "!!", ";ls", "é🙂", "%s", "\t",
           "$HOME", "#", "{a,b}", "\x1b[31m", "\r"]  # fmt: skip
WORD = st.one_of(
    st.sampled_from(HOSTILE), st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60)
)
SLOW = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
NAME = WORD.map(lambda w: w.replace("/", "_").encode()[:200].decode("utf-8", "ignore")).filter(
    lambda w: w not in ("", ".", "..")
)


@given(words=st.lists(WORD, min_size=1, max_size=12), value=WORD, data=st.binary(max_size=2000))
@SLOW
def test_hostile_values_arrive_as_themselves(any_guest: Host, words: list[str], value: str, data: bytes) -> None:
    """Words of a command, a variable's value and the input reach the program byte by byte, over every transport."""
    out = any_guest.run(["printf", "%s\\0", *words])
    assert out.stdout.split(b"\0")[:-1] == [w.encode() for w in words]
    out = any_guest.run(["sh", "-c", 'printf %s "$WB_VALUE"; printf "\\0"; cat'], env={"WB_VALUE": value}, input=data)
    assert out.stdout == value.encode() + b"\0" + data
    assert not any_guest.exists("/tmp/pwned")


@given(name=NAME, data=st.binary(max_size=3000))
@settings(SLOW, max_examples=5)
def test_hostile_file_names_and_contents_arrive(any_guest: Host, name: str, data: bytes) -> None:
    """A file of any name and content is written, listed, read and removed; its folder is where a command runs."""
    folder = f"/tmp/wb-names-{os.getpid()}-{any_guest.uid()}"
    path = f"{folder}/{name}"
    assert any_guest.put(data, path, parents=True) == hashlib.sha256(data).hexdigest()
    entries = any_guest.list_folder(folder)
    assert [(e.path, e.kind, e.size) for e in entries] == [(path, "file", len(data))]
    assert any_guest.read_file(path) == data
    assert any_guest.run(["cat", "--", path]).stdout == data
    any_guest.remove(path)
    assert not any_guest.exists(path)
    any_guest.run(["mkdir", "--", path]).check("a folder")
    assert any_guest.run(["pwd", "-P"], cwd=path).stdout == path.encode() + b"\n"
    any_guest.run(["rm", "-rf", "--", folder]).check("removed")


def test_a_nul_character_is_refused(guest: Host) -> None:
    """No command line can carry a NUL: it is refused here, not cut off there."""
    for call in (lambda: guest.run(["echo", "a\0b"]), lambda: guest.put(b"", "/tmp/a\0b"), lambda: guest.read_file("/tmp/a\0b"),
                 lambda: guest.run(["true"], env={"A": "\0"}), lambda: guest.run(["true"], cwd="\0")):  # fmt: skip
        with pytest.raises(BadInput, match="NUL"):
            call()
    with pytest.raises(BadInput):
        guest.run([])


def test_exit_codes_signals_and_outputs(any_guest: Host) -> None:
    """Exit code (also 255, ssh's own), signal, both outputs apart, and a start that fails under its own name."""
    done = any_guest.run(["sh", "-c", "echo out; echo err >&2; exit 255"])
    assert (done.exit_code, done.text, done.error_text) == (255, "out\n", "err\n")
    assert any_guest.run(["sh", "-c", "kill -9 $$"]).exit_code == -9
    with pytest.raises(HostError, match="No such file"):
        any_guest.run(["no-such-command-here"])
    with pytest.raises(HostError, match="No such file"):
        any_guest.run(["true"], cwd="/no/such/folder")
    with pytest.raises(HostError, match="the unit starts.*ended with 3"):
        any_guest.run(["sh", "-c", "exit 3"]).check("the unit starts")


def test_output_is_bounded_and_binary(any_guest: Host) -> None:
    """Of too much output the beginning and the end are kept, and the middle is counted; bytes are bytes."""
    done = any_guest.run(["sh", "-c", "printf BEGIN; head -c 50000000 /dev/zero; printf END"], limit=10_000)
    assert done.stdout.startswith(b"BEGIN\0") and done.stdout.endswith(b"\0END") and len(done.stdout) < 10_100
    assert b"[49990008 bytes left out]" in done.stdout
    assert any_guest.run(["head", "-c", "100000", "/dev/urandom"]).stdout.__len__() == 100_000


def test_a_secret_stays_out_of_messages(guest: Host) -> None:
    """An error quotes the command, without the key on it."""
    with pytest.raises(HostError) as error:
        guest.run(["sh", "-c", "exit 1", "--api-key", "sk-verysecret12345678"]).check("it works")
    assert "sk-verysecret" not in str(error.value)


# nothing is left running -----------------------------------------------------------------------------------------------
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
for _ in range(2):  # a child in a session of its own, and one that is orphaned
    subprocess.Popen([sys.executable, "-c", code, sys.argv[1]], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.execv(sys.executable, [sys.executable, "-c", code, sys.argv[1]])
print("running", flush=True)
time.sleep(600)
"""


def stubborn(marker: str) -> list[str]:
    return ["python3", "-c", STUBBORN, marker]


def test_a_deadline_ends_everything_there_and_nobody_else(any_guest: Host, guest_pct: Host) -> None:
    """Children in other sessions and daemons that ignore SIGTERM end too; a bystander of the same name does not."""
    marker = f"wb-deadline-{time.time_ns()}"
    with guest_pct.start(["python3", "-c", "import time; time.sleep(600)", f"{marker}-bystander"], deadline_s=60):
        began = time.monotonic()
        with pytest.raises(HostTimeout, match="within 1 s"):
            any_guest.run(stubborn(marker), deadline_s=1.0)
        assert time.monotonic() - began < 6.0
        assert [line.split()[-1] for line in faults.alive(guest_pct, marker)] == [f"{marker}-bystander"]


def test_what_a_command_leaves_in_the_background_ends_with_it(any_guest: Host, guest_pct: Host) -> None:
    """A command that has ended is over: its background children are ended, and the call does not wait for them."""
    marker = f"wb-background-{time.time_ns()}"
    began = time.monotonic()
    done = any_guest.run(
        ["sh", "-c", f"python3 -c 'import time; time.sleep(600)' {marker} & echo started"], deadline_s=30
    )
    assert done.text == "started\n" and done.ok and time.monotonic() - began < 5.0
    assert faults.alive(guest_pct, marker) == []


RUNNER = """
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tests.lab.lab import Lab
lab = Lab(Path(sys.argv[1]), (101, 102), int(sys.argv[2]))
host = lab.ssh(sys.argv[3])
if sys.argv[4] == "pct":
    host = lab.pct(101, lab.ssh("hypervisor"))
print("go", flush=True)
host.run(["python3", "-c", "import time; time.sleep(600)", sys.argv[5]], deadline_s=500)
"""


@pytest.mark.parametrize("way", ["ssh", "pct"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_and_a_killed_workbook_leave_nothing(
    lab: Lab, guest_pct: Host, way: str, number: signal.Signals
) -> None:
    """After Ctrl-C and after SIGKILL of this side the command is gone on the host."""
    marker = f"wb-{number.name}-{time.time_ns()}"
    words = [sys.executable, "-c", RUNNER, str(lab.folder), str(lab.number), "guest-101", way, marker]
    runner = subprocess.Popen(
        words, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert runner.stdout and runner.stdout.readline() == b"go\n"
    for _ in range(100):
        if faults.alive(guest_pct, marker):
            break
        time.sleep(0.1)
    assert faults.alive(guest_pct, marker)
    runner.send_signal(number)
    _, said = runner.communicate(timeout=15)
    assert (runner.returncode == -9) if number == signal.SIGKILL else (b"KeyboardInterrupt" in said)
    assert faults.gone(guest_pct, marker, 6.0) is not None


def test_cancel_from_another_thread(any_guest: Host, guest_pct: Host) -> None:
    """`cancel` ends what runs through an object, and the call that waits for it says so."""
    marker = f"wb-cancel-{time.time_ns()}"
    timer = threading.Timer(1.0, any_guest.cancel)
    timer.start()
    with pytest.raises(HostError, match="cancelled from here"):
        any_guest.run(stubborn(marker), deadline_s=60.0)
    assert faults.alive(guest_pct, marker) == []


def test_a_cut_network_ends_the_command_there_and_leaves_no_half_file(lab: Lab, guest_pct: Host) -> None:
    """Without a word from us the host ends the command and drops the copy by itself; the old file stays whole."""
    marker = f"wb-cut-{time.time_ns()}"
    folder = "/root/wb-cut"
    guest_pct.put(b"old", f"{folder}/file", parents=True)
    raised: dict[str, BaseException] = {}
    with lab.ssh("guest-101") as one, lab.ssh("guest-101") as two:
        one.run(["true"])
        two.run(["true"])

        def attempt(name: str, work: object) -> None:
            try:
                work()  # type: ignore[operator]
            except BaseException as error:  # noqa: BLE001
                raised[name] = error

        threads = [
            threading.Thread(target=attempt, args=("run", lambda: one.run(stubborn(marker), deadline_s=120.0))),
            threading.Thread(
                target=attempt,
                args=("put", lambda: two.put(os.urandom(1 << 20) * 800, f"{folder}/file", deadline_s=120.0)),
            ),
        ]
        for thread in threads:
            thread.start()
        for _ in range(200):  # until the copy has begun
            names = [e.path for e in guest_pct.list_folder(folder)]
            if len(names) > 1 and faults.alive(guest_pct, marker):
                break
            time.sleep(0.02)
        assert len(names) == 2, names
        with faults.network_cut(lab, 101):
            began = time.monotonic()
            assert faults.gone(guest_pct, marker, SILENCE_S + 10.0) is not None
            seconds = time.monotonic() - began
            for thread in threads:
                thread.join(30.0)
                assert not thread.is_alive()
    assert seconds > 5.0  # it was the host's own clock, not our word
    assert isinstance(raised["run"], HostUnreachable) and isinstance(raised["put"], HostUnreachable), raised
    for _ in range(50):
        entries = [e.path for e in guest_pct.list_folder(folder)]
        if entries == [f"{folder}/file"]:
            break
        time.sleep(0.5)
    assert entries == [f"{folder}/file"] and guest_pct.read_file(f"{folder}/file") == b"old"
    with lab.ssh("guest-101") as again:
        assert again.run(["true"]).ok
        again.put(b"new", f"{folder}/file")
    assert guest_pct.read_file(f"{folder}/file") == b"new"


def test_a_process_in_uninterruptible_sleep_is_named(guest: Host) -> None:
    """What withstands SIGKILL is named with its pid and not waited for; it is gone when its disk comes back."""
    with faults.frozen_disk(guest) as folder:
        began = time.monotonic()
        with pytest.raises(HostTimeout, match=r"still there: pids \[\d+") as error:
            guest.run(["sh", "-c", f"echo wb-frozen > {folder}/file"], deadline_s=1.0)
        assert time.monotonic() - began < 12.0
        pid = int(str(error.value).split("pids [")[1].split("]")[0].split(",")[0])
        process = guest.view().process(pid)
        assert process is not None and process.state == "D"
    for _ in range(30):
        if guest.view().process(pid) is None:
            break
        time.sleep(0.1)
    assert guest.view().process(pid) is None


# the connection --------------------------------------------------------------------------------------------------------
def test_a_wrong_and_an_unknown_host_key_are_one_clear_message(lab: Lab) -> None:
    """Another key than the known one, or none known: nothing is run, and what to do is said in one line."""
    with lab.ssh("stranger-101") as host, pytest.raises(WrongHostKey) as error:
        host.run(["true"])
    text = str(error.value)
    assert "SHA256:" in text and f"replace line 1 of {lab.folder}/strange_hosts" in text and "\n" not in text
    with lab.ssh("unknown-101") as host, pytest.raises(WrongHostKey, match="not in known_hosts"):
        host.run(["true"])
    with (
        SSHHost("unknown-101", config=lab.config, options=["StrictHostKeyChecking=no"]) as host,
        pytest.raises(WrongHostKey),
    ):
        host.run(["true"])  # checking can't be switched off


def test_refused_unresolved_and_forbidden(lab: Lab, guest_pct: Host) -> None:
    """No sshd, no such name, no key: each under its own words."""
    with faults.dead_sshd(guest_pct):
        with lab.ssh("guest-101") as host, pytest.raises(HostUnreachable, match="Connection refused"):
            host.run(["true"], deadline_s=10)
        assert guest_pct.run(["hostname"]).text == "ct101\n"  # the hypervisor still gets in
    with (
        SSHHost("no-such-host.invalid", config=lab.config) as host,
        pytest.raises(HostUnreachable, match="has an address"),
    ):
        host.run(["true"], deadline_s=20)
    with (
        SSHHost("nobody-there@guest-101", config=lab.config) as host,
        pytest.raises(HostUnreachable, match="lets us in"),
    ):
        host.run(["true"], deadline_s=20)
    with LXCHost(LocalHost(), 101) as host, pytest.raises(HostUnreachable, match="is that the hypervisor"):
        host.run(["true"])
    with pytest.raises(BadInput):
        SSHHost("-oProxyCommand=touch /tmp/pwned")


def test_proxy_jump_and_the_users_config_hold(lab: Lab) -> None:
    """A host behind a jump host is reached by the user's own ssh_config."""
    with lab.ssh("jump-101") as host:
        assert host.run(["sh", "-c", "echo $SSH_CONNECTION"]).text.split()[0] == f"{lab.subnet}.1"


def test_two_jump_hosts_one_after_the_other(lab: Lab, guest_pct: Host) -> None:
    """Hypervisor, container 102, container 101: the last sees the one before it; a port is forwarded all the way, and a
    command is ended there when this side goes."""
    with lab.ssh("far-101") as host:
        assert host.run(["sh", "-c", "echo $SSH_CONNECTION"]).text.split()[0] == lab.address(102)
        with (
            host.start(["python3", "-m", "http.server", "31977", "--bind", "127.0.0.1", "--directory", "/srv"], deadline_s=60),
            host.forward(31977) as near,
        ):
            end = time.monotonic() + 10
            while not host.view().port_is_held(31977) and time.monotonic() < end:
                time.sleep(0.1)
            assert urllib.request.urlopen(f"http://127.0.0.1:{near}/", timeout=10).status == 200
    assert faults.gone(guest_pct, "31977", 10) is not None


def test_one_connection_carries_everything_and_ends_with_the_object(lab: Lab) -> None:
    """Commands share a master connection of ours; closing leaves neither its process nor its socket."""
    host = lab.ssh("guest-101")
    places = {host.run(["sh", "-c", "echo $SSH_CONNECTION"]).text for _ in range(4)}
    assert len(places) == 1
    began = time.monotonic()
    for _ in range(10):
        host.run(["true"])
    each = (time.monotonic() - began) / 10
    socket = str(host._socket)
    assert faults.local_processes(socket)
    host.close()
    time.sleep(0.3)
    assert not faults.local_processes(socket) and not Path(socket).parent.exists()
    assert each < 1.0, each
    with pytest.raises(HostUnreachable, match="closed"):
        host.run(["true"])


def test_a_dead_connection_is_replaced(lab: Lab) -> None:
    """When the master connection was killed, the next command opens another."""
    with lab.ssh("guest-101") as host:
        host.run(["true"])
        for line in faults.local_processes(str(host._socket)):
            os.kill(int(line.split()[0]), signal.SIGKILL)
        host._socket.unlink(missing_ok=True)
        assert host.run(["echo", "again"]).text == "again\n"


def test_a_talkative_login_script_is_no_output(guest_user: Host) -> None:
    """What a login script prints is kept apart from the command's output."""
    guest_user.put(b"echo WELCOME; echo NOISE >&2\n", "/home/ops/.bashrc")
    try:
        done = guest_user.run(["echo", "mine"])
        assert (done.text, done.error_text) == ("mine\n", "")
    finally:
        guest_user.remove("/home/ops/.bashrc")


@pytest.mark.parametrize("shell", ["/bin/dash", "/usr/bin/python3"])
def test_other_login_shells(lab: Lab, guest: Host, shell: str) -> None:
    """dash works; a login shell that is no shell gives one message."""
    guest.run(["usermod", "-s", shell, "plain"]).check("another shell")
    try:
        with lab.ssh("plain-101") as host:
            if shell == "/bin/dash":
                assert host.run(["echo", *HOSTILE]).text == " ".join(HOSTILE) + "\n"
            else:
                with pytest.raises(HostError):
                    host.run(["true"], deadline_s=10)
    finally:
        guest.run(["usermod", "-s", "/bin/sh", "plain"]).check("its own shell")


# root --------------------------------------------------------------------------------------------------------------------
def test_sudo_for_an_ordinary_user(guest: Host, guest_user: Host, plain_user: Host) -> None:
    """`sudo -n` where it is allowed; where it isn't, NeedsRoot before anything ran; root needs no sudo."""
    assert guest_user.run(["id", "-u"]).text == "2001\n" and guest_user.run(["id", "-u"], sudo=True).text == "0\n"
    assert guest_user.can_root() is None and guest.can_root() is None
    assert "password is required" in (plain_user.can_root() or "")
    with pytest.raises(NeedsRoot, match="takes root"):
        plain_user.run(["touch", "/tmp/as-root"], sudo=True)
    assert not guest.exists("/tmp/as-root")
    guest_user.put(b"x", "/etc/wb-root-file", mode=0o600, sudo=True)
    entry = guest.entry("/etc/wb-root-file")
    assert entry is not None and (entry.uid, entry.mode) == (0, 0o600)
    with pytest.raises(HostError, match="Permission denied"):
        guest_user.read_file("/etc/wb-root-file")
    with pytest.raises(HostError, match="Permission denied"):
        guest_user.put(b"y", "/etc/wb-root-file")
    assert guest_user.read_file("/etc/wb-root-file", sudo=True) == b"x"
    guest_user.remove("/etc/wb-root-file", sudo=True)


def test_root_processes_of_an_ordinary_user_end_at_the_deadline(guest_user: Host, guest: Host) -> None:
    """What ran under sudo ends too: the guard there is root as well."""
    marker = f"wb-rooted-{time.time_ns()}"
    with pytest.raises(HostTimeout):
        guest_user.run(stubborn(marker), sudo=True, deadline_s=1.0)
    assert faults.alive(guest, marker) == []


# files -------------------------------------------------------------------------------------------------------------------
def test_a_full_disk_leaves_the_old_file_and_no_half_one(guest: Host) -> None:
    """No space: said so, with the old content there and no temporary file."""
    with faults.full_disk(guest) as folder:
        guest.run(
            ["sh", "-c", f"rm {folder}/filler; echo old > {folder}/file; head -c 1000000 /dev/zero > {folder}/filler"]
        )
        with pytest.raises(HostError, match="No space left"):
            guest.put(b"n" * 100_000, f"{folder}/file")
        assert guest.read_file(f"{folder}/file") == b"old\n"
        assert sorted(e.path for e in guest.list_folder(folder)) == [f"{folder}/file", f"{folder}/filler"]


def test_files_keep_mode_owner_and_links(guest: Host, guest_user: Host, tmp_path: Path) -> None:
    """A file that is replaced keeps its mode and owner, a link stays a link; copies here are whole or absent."""
    guest_user.put(b"1", "/home/ops/file", mode=0o640)
    guest.run(["ln", "-sf", "/home/ops/file", "/home/ops/link"])
    guest.put(b"22", "/home/ops/link")
    link, entry = guest.entry("/home/ops/link"), guest.entry("/home/ops/file")
    assert link is not None and link.kind == "link" and link.target == "/home/ops/file"
    assert entry is not None and (entry.uid, entry.mode, entry.size) == (2001, 0o640, 2)
    big = os.urandom(3_000_001)
    (tmp_path / "big").write_bytes(big)
    digest = guest.put(tmp_path / "big", "/root/big")
    assert guest.get("/root/big", tmp_path / "back") == digest and (tmp_path / "back").read_bytes() == big
    assert (
        guest.read_file("/root/big", limit=10, tail=True) == big[-10:]
        and guest.read_file("/root/big", limit=10) == big[:10]
    )
    with pytest.raises(HostError, match="No such file"):
        guest.get("/root/none", tmp_path / "none")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "big"]
    with pytest.raises(HostError, match="there is none"):
        guest.list_folder("/no/such")


def test_a_stale_part_of_a_killed_guard_is_removed(guest: Host) -> None:
    """What a guard that was itself killed left behind goes with the next copy; a live one's stays."""
    guest.run(
        [
            "sh",
            "-c",
            "mkdir -p /root/st; echo half > /root/st/.f.workbook-999999.part; echo live > /root/st/.f.workbook-1.part",
        ]
    )
    guest.put(b"whole", "/root/st/f")
    assert [e.path for e in guest.list_folder("/root/st")] == ["/root/st/.f.workbook-1.part", "/root/st/f"]


# looking around -----------------------------------------------------------------------------------------------------------
def test_view_names_units_ports_and_owners(guest: Host, guest_user: Host, guest_pct: Host) -> None:
    """One round trip tells processes with start ticks and unit, and who listens where; without root, what is not known."""
    code = "import socket,time; s=socket.create_server(('127.0.0.1', 34567)); time.sleep(600)"
    guest.run(
        ["systemd-run", "--unit=wb-view", "--collect", "python3", "-c", code, "--api-key", "sk-verysecret12345678"]
    ).check("it runs")
    try:
        for _ in range(50):
            if guest.view().port_is_held(34567):
                break
            time.sleep(0.1)
        for host in (guest, guest_pct):
            view = host.view()
            owners = view.port_owners(34567)
            assert [p.unit for p in owners] == ["wb-view.service"] and view.in_unit("wb-view.service") == owners
            assert [i.address for i in view.listeners if i.port == 34567] == ["127.0.0.1"]
            assert view.process(owners[0].pid, owners[0].ticks) and not view.process(owners[0].pid, owners[0].ticks - 1)
            assert "sk-verysecret" not in view.model_dump_json()
            assert view.gpus == [] and "nvidia-smi" in (view.gpus_reason or "") and view.unreadable == 0
            assert view.hostname == "ct101" and view.memory_bytes and view.uptime_s > 0
        weak = guest_user.view()
        assert weak.port_is_held(34567) and weak.port_owners(34567) == [] and weak.unreadable > 0
        assert guest_user.view(sudo=True).port_owners(34567)
    finally:
        guest.run(["systemctl", "stop", "wb-view"])
    assert not guest.view().port_is_held(34567)


def test_a_port_is_forwarded_and_let_go(any_guest: Host) -> None:
    """HTTP on the host's own loopback is answered here, several connections at once, and the near port ends with the block."""
    code = (
        "from http.server import *; ThreadingHTTPServer(('127.0.0.1',34568),SimpleHTTPRequestHandler).serve_forever()"
    )
    body = os.urandom(300_000)
    any_guest.put(body, f"/tmp/wb-www-{any_guest.uid()}/file", parents=True)
    with any_guest.start(["python3", "-c", code], cwd=f"/tmp/wb-www-{any_guest.uid()}", deadline_s=60):
        with any_guest.forward(34568) as port:
            for _ in range(50):
                try:
                    if requests.get(f"http://127.0.0.1:{port}/file", timeout=5).content == body:
                        break
                except requests.RequestException:
                    time.sleep(0.1)
            session = requests.Session()
            answers: list[bytes] = []
            threads = [
                threading.Thread(
                    target=lambda: answers.append(session.get(f"http://127.0.0.1:{port}/file", timeout=20).content)
                )
                for _ in range(6)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert answers == [body] * 6
            assert session.get(f"http://127.0.0.1:{port}/none", timeout=10).status_code == 404
        with pytest.raises(requests.RequestException):
            requests.get(f"http://127.0.0.1:{port}/file", timeout=2)


def test_a_journal_is_followed_and_let_go(any_guest: Host, guest: Host) -> None:
    """Lines come as they are written; leaving the loop ends journalctl on the host."""
    unit = f"wb-follow-{time.time_ns()}"
    guest.run(
        [
            "systemd-run",
            f"--unit={unit}",
            "--collect",
            "sh",
            "-c",
            "for i in 1 2 3 4 5 6; do echo line $i; sleep 0.2; done; sleep 60",
        ]
    )
    words = ["journalctl", "--follow", "--lines=all", "--output=cat", f"_SYSTEMD_UNIT={unit}.service"]
    seen = []
    lines = any_guest.follow(words, deadline_s=30, sudo=True)
    for line in lines:
        seen.append(line)
        if line == "line 6":
            break
    lines.close()  # type: ignore[attr-defined]
    assert seen == [f"line {i}" for i in range(1, 7)]
    assert not [line for line in faults.alive(guest, unit) if "journalctl" in line]
    guest.run(["systemctl", "stop", unit])
    began = time.monotonic()
    assert list(any_guest.follow(["sh", "-c", "echo a; sleep 60"], deadline_s=1.0)) == [
        "a"
    ]  # a passed deadline is no error
    assert time.monotonic() - began < 6


def test_several_hosts_at_once(lab: Lab, guest: Host, other: Host, guest_pct: Host) -> None:
    """Results and failures by name; one that fails doesn't stop the others, and the failed one is named."""
    made = together([guest, other, guest_pct], lambda host: host.run(["hostname"]).text.strip())
    assert made.check("a name") == {"guest-101": "ct101", "guest-102": "ct102", "pct-101": "ct101"}
    began = time.monotonic()
    together([guest, other], lambda host: host.run(["sleep", "1.5"]))
    assert time.monotonic() - began < 2.8
    with lab.ssh("stranger-102") as bad:
        made = together([guest, bad, other], lambda host: host.run(["hostname"]).text)
    assert sorted(made.results) == ["guest-101", "guest-102"] and isinstance(
        made.failures["stranger-102"], WrongHostKey
    )
    with pytest.raises(HostError, match="on all 3 hosts.*stranger-102.*it worked on guest-101, guest-102"):
        made.check("a name")
    with pytest.raises(BadInput, match="named twice"):
        together([guest, guest], lambda host: None)


def test_commands_survive_a_reboot_of_the_host(lab: Lab) -> None:
    """A command during which the host reboots fails as cut off; the same object works again afterwards."""
    with lab.ssh("guest-102") as host:
        host.run(["true"])
        before = host.view()
        caught: list[BaseException] = []

        def wait() -> None:
            try:
                host.run(["sleep", "300"], deadline_s=60)
            except HostError as error:
                caught.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.5)
        faults.restart(host, lab, 102)
        thread.join(30)
        assert caught and isinstance(caught[0], HostUnreachable)
        after = host.view()
        assert host.run(["hostname"]).text == "ct102\n"
        assert before.init_ticks != after.init_ticks  # the containers share a kernel, so its boot id stays


def test_a_process_in_a_container_is_recognised_and_its_engine_asked(guest: Host, guest_user: Host) -> None:
    """The control group names the container for real; the engine's answer is a text written after its documentation."""
    identity, image = "ab" * 32, "cd" * 32
    inspected = [{
        "Id": identity, "Name": "/sglang", "Image": f"sha256:{image}", "State": {"Running": True, "Pid": 1},
        "Config": {"Image": "lmsysorg/sglang:latest"}, "Path": "sleep", "Args": ["60"],
        "HostConfig": {"RestartPolicy": {"Name": "always"}},
    }]  # fmt: skip
    script = (
        "#!/bin/sh\n[ $(id -u) = 0 ] || { echo 'permission denied while trying to connect to the Docker daemon socket' >&2; exit 1; }\n"
        f'case "$*" in *{identity}) cat /opt/container.json ;; *sha256:{image}) echo \'[{{"RepoDigests": ["a@sha256:1"]}}]\' ;;\n'
        "*) echo 'Error: No such object' >&2; exit 1 ;; esac\n"
    )
    guest.put(json.dumps(inspected), "/opt/container.json", mode=0o600)
    guest.put(script, "/usr/local/sbin/docker", mode=0o755)
    guest.put(script, "/usr/local/bin/docker", mode=0o755)
    with guest.start(["systemd-run", "--scope", f"--unit=docker-{identity}", "sleep", "60"], deadline_s=60):
        for _ in range(50):
            process = next((p for p in guest.view().processes if p.name == "sleep" and p.container), None)
            if process:
                break
            time.sleep(0.1)
        assert (
            process is not None
            and process.container == ("docker", identity)
            and process.unit == f"docker-{identity}.scope"
        )
        for host in (guest, guest_user):  # the user is refused and asks again by sudo
            found = container_of_process(host, process)
            assert (
                found is not None and found.name == "sglang" and found.revived and found.image_digests == ["a@sha256:1"]
            )
        with pytest.raises(HostError, match="permission denied"):
            container_of_process(guest_user, process, sudo=False)
        gone = process.model_copy(update={"container": ("docker", "ee" * 32)})
        with pytest.raises(HostError, match="No such object"):
            container_of_process(guest, gone)
    assert container_of_process(guest, process.model_copy(update={"container": ("lxc", "101")})) is None
    guest.run(["rm", "-f", "/opt/container.json", "/usr/local/sbin/docker", "/usr/local/bin/docker"])


def test_more_commands_at_once_than_sessions_on_a_connection(lab: Lab, other: Host) -> None:
    """sshd allows 10 sessions a connection by default, here 2: the others get connections of their own, and none fails."""
    setting = "/etc/ssh/sshd_config.d/10-lab.conf"
    before = other.read_file(setting)
    other.put(before.replace(b"MaxSessions 64", b"MaxSessions 2"), setting)
    try:
        other.run(["systemctl", "restart", "ssh.service"]).check("sshd restarts")
        with lab.ssh("guest-102") as host, ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda n: host.run(["sh", "-c", f"sleep 0.5; echo {n}"]).text, range(8)))
        assert answers == [f"{n}\n" for n in range(8)]
    finally:
        other.put(before, setting)
        other.run(["systemctl", "restart", "ssh.service"])


def test_a_container_is_managed_through_its_hypervisor(lab: Lab, hypervisor: SSHHost) -> None:
    """Stopped, said to be so, started, rebooted: what was started goes on when the command that asked for it has ended."""
    container = lab.pct(102, hypervisor)
    before = container.view().init_ticks
    assert container.manage("status").text == "status: running\n"
    container.manage("stop").check("it stops")
    with pytest.raises(HostUnreachable, match="pct-102 runs.*not running.*pct start 102"):
        container.run(["true"])
    container.manage("start").check("it starts")
    for _ in range(100):
        if container.run(["systemctl", "is-active", "ssh.service"]).ok:
            break
        time.sleep(0.1)
    container.reboot()
    assert container.run(["hostname"]).text == "ct102\n" and container.view().init_ticks != before
    for _ in range(100):  # others use it over SSH
        if container.run(["systemctl", "is-active", "ssh.service"]).ok:
            break
        time.sleep(0.1)
