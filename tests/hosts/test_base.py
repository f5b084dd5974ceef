"""The interface on this machine: the same guard as on any other host, without a network in between. `tests/lab` has the others."""

from __future__ import annotations

import ast
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.errors import BadInput, HostError, HostTimeout, HostUnreachable
from lib.hosts import guard, local
from lib.hosts.base import Host, LocalHost, shell_line, together
from lib.hosts.channel import BOOT, guard_argv
from lib.hosts.remote_client import bundle, modules_of
from lib.hosts.ssh import SSHHost
from lib.hosts.view import address_of, view_of

WORD = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)


@pytest.fixture(scope="module")
def here() -> Host:
    return LocalHost()


def test_the_guard_is_python_3_7_and_needs_nothing_else() -> None:
    """It runs on whatever python3 a host has: old grammar, standard library only."""
    source = Path(guard.__file__).read_text()
    tree = ast.parse(source, feature_version=(3, 7))
    names = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {(n.module or "").split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert names <= set(sys.stdlib_module_names) and not {"psutil", "lib"} & names
    assert not [n for n in ast.walk(tree) if isinstance(n, (ast.NamedExpr, ast.Match))]
    assert not re.search(r"\.remove(prefix|suffix)\(|zip\(.*strict", source)


def test_what_a_login_shell_sees_means_the_same_in_every_shell() -> None:
    """No quote, backslash, dollar, backquote, history or glob sign in the constant line: csh and fish take it as it stands."""
    assert not set(BOOT) & set("'\"\\$`!*?[]{}~#&|<>\n")
    assert shlex.split(shell_line(guard_argv("python3"))) == guard_argv("python3")


@given(words=st.lists(WORD, min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_words_of_a_shell_line_arrive(words: list[str]) -> None:
    """`shell_line` through a real shell."""
    out = subprocess.run(["sh", "-c", f"printf '%s\\0' {shell_line(words)}"], capture_output=True)
    assert out.stdout.split(b"\0")[:-1] == [w.encode() for w in words]


def test_a_nul_is_refused() -> None:
    """No command line can carry it."""
    with pytest.raises(BadInput, match="word 2"):
        shell_line(["a", "b\0"])


def test_a_command_runs_with_input_variables_and_folder(here: Host, tmp_path: Path) -> None:
    """Input, variables, working folder, both outputs, exit code."""
    done = here.run(
        ["sh", "-c", 'cat; echo "$A"; pwd; echo no >&2; exit 7'], input="in\n", env={"A": "$x 'y'"}, cwd=str(tmp_path)
    )
    assert (done.exit_code, done.text, done.error_text) == (7, f"in\n$x 'y'\n{tmp_path.resolve()}\n", "no\n")
    assert here.run(["sh", "-c", "kill -TERM $$"]).exit_code == -15


def test_a_program_that_does_not_read_its_input_is_no_error(here: Host) -> None:
    """Megabytes of input that nobody reads end with the command."""
    began = time.monotonic()
    assert here.run(["true"], input=b"x" * 30_000_000, deadline_s=60).ok
    assert time.monotonic() - began < 30


def test_a_deadline_holds_with_a_full_pipe(here: Host) -> None:
    """Endless output that nobody takes doesn't keep the deadline from passing."""
    marker = f"wb-full-{os.getpid()}"
    with here.start(["sh", "-c", 'yes "$0"', marker], deadline_s=1.0) as running:
        time.sleep(4.0)
        assert subprocess.run(["pgrep", "-f", f"yes {marker}"], capture_output=True).stdout == b""
        with pytest.raises((HostTimeout, HostUnreachable)):
            running.wait()


def test_children_in_other_sessions_end_with_it(here: Host) -> None:
    """A daemon that ignores SIGTERM doesn't outlive the command."""
    marker = f"wb-daemon-{os.getpid()}"
    with pytest.raises(HostTimeout):
        here.run(["sh", "-c", f"setsid sh -c 'trap \"\" TERM; sleep 300; : {marker}' & sleep 300"], deadline_s=0.5)
    assert subprocess.run(["pgrep", "-f", f"^sh -c trap.*{marker}"], capture_output=True).stdout == b""


def test_files_are_written_whole_or_not_at_all(here: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong hash on arrival leaves the old file and no temporary one."""
    (tmp_path / "f").write_bytes(b"old")
    blocks = iter([b"new", b"damaged"])  # first hashed, then sent
    monkeypatch.setattr("lib.hosts.base._blocks", lambda source: [next(blocks)])
    with pytest.raises(HostError, match="another sha256"):
        here.put(b"new", tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["f"]


def test_what_cant_be_read_says_why(here: Host, tmp_path: Path) -> None:
    """Missing file, folder in a file's place, missing source."""
    for call, words in (
        (lambda: here.read_file(tmp_path / "none"), "No such file"),
        (lambda: here.read_file(tmp_path), "not a regular file"),
        (lambda: here.put(tmp_path / "none", tmp_path / "x"), "readable file"),
        (lambda: here.put(b"", tmp_path / "no" / "x"), "No such file"),
    ):
        with pytest.raises((HostError, BadInput), match=words):
            call()


def test_a_missing_interpreter_and_a_missing_ssh_are_named() -> None:
    """The transport's own program is missing: one message."""
    with pytest.raises(HostError, match="/no/python"):
        LocalHost(python="/no/python").run(["true"])


@pytest.mark.parametrize("address", ["", "-v", "a b", "user@-h", "a;b c", "x\ny"])
def test_addresses_that_ssh_would_take_for_options_are_refused(address: str) -> None:
    """Nothing of an address becomes an option."""
    with pytest.raises(BadInput):
        SSHHost(address)


def test_the_client_goes_as_one_file_with_one_hash() -> None:
    """The same sources give the same bytes; only what a bare Python has is imported."""
    names = modules_of("lib.load.client_worker")
    assert "lib.load.client_worker" in names and "lib.load.client_wire" in names and "lib.records" not in names
    one, digest = bundle("lib.load.client_worker")
    bundle.cache_clear()
    assert bundle("lib.load.client_worker") == (one, digest) and len(digest) == 64
    with pytest.raises(BadInput, match="imports"):
        modules_of("lib.records")


def test_one_failing_host_is_named(here: Host) -> None:
    """Partial failures by name."""
    bad = LocalHost("bad one", python="/no/python")
    made = together([here, bad], lambda host: host.run(["echo", "x"]).text)
    assert made.results == {"this machine": "x\n"} and list(made.failures) == ["bad one"]
    with pytest.raises(HostError, match="on all 2 hosts.*bad one.*worked on this machine"):
        made.check("it runs")


def test_the_view_of_this_machine(here: Host) -> None:
    """This process is in it, with the start that /proc gives."""
    view = here.view()
    me = view.process(os.getpid())
    assert me is not None and me.ticks == int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
    assert me in view.family(os.getppid()) and view.process(os.getpid(), me.ticks + 1) is None


# /proc/net/tcp writes each 32-bit word in this machine's byte order: 0100007F is 127.0.0.1.
@pytest.mark.parametrize(
    ("raw", "address"),
    [("0100007F", "127.0.0.1"), ("00000000", "0.0.0.0"), ("0" * 32, "::"), ("00000000000000000000000001000000", "::1"),
     ("0000000000000000FFFF00000100007F", "127.0.0.1"), ("B80D0120000000000000000001000000", "2001:db8:0:0:0:0:0:1")],
)  # fmt: skip
def test_addresses_of_listeners(raw: str, address: str) -> None:
    """IPv4, IPv6 and mapped addresses."""
    assert address_of(raw) == address


def answer(**changes: object) -> dict[str, object]:
    base: dict[str, object] = {
        "processes": [], "listeners": [], "gpu_devices": {"/dev/nvidia0": [7]}, "unreadable": 0, "boot_id": "b", "ticks_per_s": 100,
        "uptime_s": 10.0, "unix_s": 1e9, "hostname": "h", "kernel": "6", "machine": "x86_64", "cpu_cores": 2, "os_release": "",
        "cpuinfo": "", "meminfo": "", "load": 0.0,
        "gpus": {"exit_code": 0, "text": "0, NVIDIA H200, GPU-a, 143771, 1024, 580.1, 9.0\n"
                 "1, NVIDIA H200, GPU-b, 143771, [N/A], 580.1, 9.0\n"},
        "gpu_users": {"exit_code": 0, "text": "GPU-a, 5, 600\nGPU-a, 5, 12\nGPU-a, 6, [N/A]\n"},
    }  # fmt: skip
    return {**base, **changes}


def test_gpus_users_and_holders() -> None:
    """MiB by pid are summed, what isn't told is None, an open device file counts as holding."""
    view = view_of(answer())
    assert view.gpus[0].users == {5: 612.0, 6: None} and view.gpus[0].holders == [7]
    assert view.gpus[1].memory_used_mib is None and view.gpu_holders() == {5: ["GPU-a"], 6: ["GPU-a"], 7: ["GPU-a"]}
    assert view.describe()["gpus"][0]["memory_total_mib"] == 143771.0 and view.gpus_reason is None


def test_no_gpu_and_silent_users_have_a_reason() -> None:
    """No nvidia-smi is a reason, not a zero; so are users that can't be listed, and a list without a GPU."""
    view = view_of(answer(gpus={"exit_code": None, "text": "No such file"}))
    assert view.gpus == [] and view.gpus_reason == "nvidia-smi: No such file" and view.memory_bytes is None
    view = view_of(answer(gpu_users={"exit_code": 9, "text": "no rights"}))
    assert len(view.gpus) == 2 and "not known: no rights" in (view.gpus_reason or "")
    assert view_of(answer(gpus={"exit_code": 0, "text": ""})).gpus_reason == "nvidia-smi lists no GPU"


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_who_listens_on_a_port(family: int, address: str) -> None:
    """The listener's process by identity, while it listens and no longer; a connection from that port is no listener."""
    with socket.socket(family) as sock:
        sock.bind((address, 0))
        port = sock.getsockname()[1]
        assert not local.port_is_held(port) and local.port_owner(port) is None  # bound, not listening
        sock.listen()
        assert local.port_is_held(port) and local.port_owner(port) == local.process_id(os.getpid())
    assert not local.port_is_held(port) and local.port_owner(port) is None
