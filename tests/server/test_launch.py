"""The life of one server with small fake servers in Python, which speak as much HTTP as the launch asks for (no SGLang)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lib.errors import BadInput, IdentityError, NotReady, NotStopped, ServerDied, ServerError
from lib.hosts import local
from lib.hosts.local import ProcessId
from lib.params import ServerParams
from lib.server import launch as launching
from lib.server.attach import AttachedServer
from lib.server.launch import Server, ServerSpec, read_record

#: Answers /health, /server_info and /v1/models as SGLang does; arguments: port, host, then JSON that updates the answer.
FAKE = """
import http.server, json, os, socket, subprocess, sys, time
INFO = {"version": "0.5.15", "model_path": "/m", "random_seed": 42, "kv_cache_dtype": "bf16", "tp_size": 1}
INFO.update(json.loads(sys.argv[3]) if len(sys.argv) > 3 else {})
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        said = {"/health": {}, "/server_info": INFO, "/v1/models": {"data": [{"id": "m"}]}}.get(self.path)
        body = json.dumps(said).encode()
        self.send_response(200 if said is not None else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
class Listening(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6 if ":" in sys.argv[2] else socket.AF_INET
    allow_reuse_address = True
def serve():
    print("up", flush=True)
    Listening((sys.argv[2], int(sys.argv[1])), Answers).serve_forever()
"""
SERVE = FAKE + "serve()\n"
FOREVER = "import time\nprint('up', flush=True)\ntime.sleep(300)"
#: Seconds within which a supervisor and its server, two starts of Python, are there on a slow machine.
TWO_STARTS_S = 30.0


def wait_for(condition: Callable[[], Any], seconds: float = TWO_STARTS_S) -> Any:
    """The first true value of `condition()`, or a failed test."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s")


def spec(program: str, *more: str, **changes: Any) -> ServerSpec:
    """A launch of a Python program."""
    return ServerSpec(
        name="fake",
        argv=[sys.executable, "-u", "-c", program, "{port}", "{host}", *more],
        environment=changes.pop("environment", {}),
        sglang_version="0.5.15",
        model_path="/m",
        model=changes.pop("model", {"sha256": "a" * 64}),
        stop_timeout_s=changes.pop("stop_timeout_s", 2.0),
        **changes,
    )


def me() -> ProcessId:
    """This test's process."""
    found = local.process_id(os.getpid())
    assert found
    return found


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start times go to a folder of the test's; no process of a launch is left after it."""
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "cache"))
    yield
    for record in tmp_path.rglob("launch.json"):
        for process in local.processes_with("WORKBOOK_LAUNCH_ID", record.parent.name):
            process.kill()


def launch_folder(parent: Path) -> Path:
    """The folder of the only launch."""
    (found,) = (file.parent for file in parent.rglob("launch.json"))
    return found


# --- stop -----------------------------------------------------------------------------------------------------------
def test_a_server_is_launched_proved_and_stopped(tmp_path: Path) -> None:
    """Ready, the same before and after, stopped by SIGTERM, with nothing left; a second stop repeats the proof."""
    server = launching.launch(spec(SERVE), tmp_path, [me()])
    assert server.record.state == "ready" and server.record.served_model_name == "m"
    assert server.record.pid_start_ticks and len(server.check_identity()) == 2
    pid = server.record.pid
    proof = server.stop()
    assert proof.gone and proof.signals == ["SIGTERM"] and proof.processes_left == []
    assert read_record(server.folder).state == "stopped" and local.process_id(pid or -1) is None
    assert server.stop() == proof


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.2, 0.3, 0.4, 0.6])
def test_a_server_that_is_just_being_started_is_ended_too(tmp_path: Path, after_s: float) -> None:
    """However early it is asked to stop, no server is running afterwards and the stop is no error."""
    server = launching.start(spec(FOREVER), tmp_path, [me()])
    time.sleep(after_s)
    proof = server.stop()
    assert proof.gone
    assert local.processes_with("WORKBOOK_LAUNCH_ID", server.launch_id) == []
    time.sleep(0.5)
    assert local.processes_with("WORKBOOK_LAUNCH_ID", server.launch_id) == []
    assert read_record(server.folder).state == "interrupted"


def test_why_a_program_cannot_be_started_is_said(tmp_path: Path) -> None:
    """The reason of the operating system reaches the message; stopping what never ran doesn't hide it."""
    wrong = spec("x").model_copy(update={"argv": [str(tmp_path)]})
    with pytest.raises(ServerDied, match="Permission denied"):
        launching.launch(wrong, tmp_path, [me()])
    assert read_record(launch_folder(tmp_path)).state == "died"


@pytest.mark.parametrize("where", ["say", "waiter"])
def test_whatever_goes_wrong_after_the_start_no_server_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Ctrl-C while waiting, or before the waiting has begun, ends the server and stays Ctrl-C."""

    def interrupt(*_: Any) -> None:
        time.sleep(0.5)
        raise KeyboardInterrupt

    if where == "waiter":
        monkeypatch.setattr(launching, "_Waiter", interrupt)
    with pytest.raises(KeyboardInterrupt):
        launching.launch(spec(FOREVER), tmp_path, [me()], interrupt)
    folder = launch_folder(tmp_path)
    assert local.processes_with("WORKBOOK_LAUNCH_ID", folder.name) == []
    assert read_record(folder).state == "interrupted"


def test_a_failing_stop_does_not_hide_why_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first error stays the error; what failed while stopping is added to it."""

    def fail(self: Server) -> None:
        real(self)
        raise NotStopped("all is gone", "pid 4711 is left")

    real = Server.stop
    monkeypatch.setattr(Server, "stop", fail)
    with pytest.raises(ServerDied, match=r"exit code 3.*pid 4711 is left"):
        launching.launch(spec("raise SystemExit(3)"), tmp_path, [me()])


def test_a_missing_api_key_is_found_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable that holds the key there is no launch folder and no process."""
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(BadInput, match="NO_SUCH_KEY"):
        launching.start(spec(FOREVER, api_key_env="NO_SUCH_KEY"), tmp_path, [me()])
    assert list(tmp_path.rglob("launch.json")) == []


def test_a_child_that_outlives_a_killed_supervisor_is_ended(tmp_path: Path) -> None:
    """SIGKILL of the supervisor ends the server; stop() ends its children, in its group and out of it."""
    program = """
import subprocess, time
print(subprocess.Popen(['sleep', '300']).pid, subprocess.Popen(['sleep', '300'], start_new_session=True).pid, flush=True)
time.sleep(300)
"""
    server = launching.start(spec(program), tmp_path, [me()])
    log = server.folder / "server.log"
    pids = [int(pid) for pid in wait_for(lambda: log.exists() and log.read_text().split())]
    children = [local.process_id(pid) for pid in pids]
    server._supervisor.kill()
    server._supervisor.wait()
    time.sleep(0.5)
    assert all(child and child.alive() for child in children)  # otherwise this shows nothing
    assert server.stop().gone
    assert not any(child and child.alive() for child in children)


def test_a_group_of_a_recycled_number_is_left_alone(tmp_path: Path) -> None:
    """If the server's number is another process's by now, that one's group is not touched."""
    server = launching.start(spec("pass"), tmp_path, [me()])
    wait_for(lambda: server.status().get("state") == "ended")
    stranger = subprocess.Popen(["sleep", "300"], start_new_session=True)
    try:
        status = {**server.status(), "pid": stranger.pid, "pgid": stranger.pid}
        (server.folder / "status.json").write_text(json.dumps(status))
        assert server.stop().processes_left == []
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


# --- how it ended ---------------------------------------------------------------------------------------------------
def test_a_server_that_ends_by_itself_died(tmp_path: Path) -> None:
    """Its own exit is a result, with the exit code."""
    with pytest.raises(ServerDied, match="exit code 7"):
        launching.launch(spec("raise SystemExit(7)"), tmp_path, [me()])
    record = read_record(launch_folder(tmp_path))
    assert record.state == "died" and record.exit_code == 7


@pytest.mark.parametrize("victim", ["owner", "supervisor", "asked"])
def test_a_server_that_was_ended_from_outside_did_not_die(tmp_path: Path, victim: str) -> None:
    """If an owner's end, a request, or the supervisor's end ended it, the launch was interrupted: no statement on it."""
    owner = subprocess.Popen(["sleep", "300"])
    identity = local.process_id(owner.pid)
    assert identity
    server = launching.start(spec(FOREVER), tmp_path, [me(), identity])

    def end() -> None:
        wait_for(lambda: server.status().get("state") == "running")
        if victim == "owner":
            owner.kill()
            owner.wait()
        elif victim == "supervisor":
            server._supervisor.kill()
        else:
            server._supervisor.send_signal(signal.SIGTERM)

    thread = threading.Thread(target=end)
    thread.start()
    try:
        with pytest.raises(ServerError, match="ended from outside") as caught:
            server.wait_ready()
        assert type(caught.value) is ServerError
        assert read_record(server.folder).state == "interrupted"
    finally:
        thread.join()
        owner.kill()
        owner.wait()


def test_a_deadline_that_passes_is_not_ready(tmp_path: Path) -> None:
    """A server that never answers is ended after its deadline, and the record says so."""
    with pytest.raises(NotReady):
        launching.launch(spec(FOREVER, ready_timeout_s=1.0), tmp_path, [me()])
    record = read_record(launch_folder(tmp_path))
    assert record.state == "not_ready" and record.stop and record.stop.gone


# --- which one it is ------------------------------------------------------------------------------------------------
def test_lost_log_lines_are_a_broken_identity(tmp_path: Path) -> None:
    """A server whose log has holes is no longer evidence, and the check says why."""
    with launching.launch(spec(SERVE), tmp_path, [me()]) as server:
        assert server.check_identity()
        status = {**server.status(), "lines_lost": 12, "log_error": "No space left on device"}
        (server.folder / "status.json").write_text(json.dumps(status))
        with pytest.raises(IdentityError, match="no longer complete: 12 lines lost .No space"):
            server.check_identity()


def test_the_key_tells_weights_machine_and_inherited_environment_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal headers with other sizes or times, another machine, or an inherited variable give another key."""
    shard = {"header_sha256": "b", "size": 10, "mtime_ns": 5}

    def key(**changes: Any) -> str:
        return spec(SERVE, model={"sha256": "a", "shards": {"m.safetensors": {**shard, **changes}}}).key

    monkeypatch.setattr(local, "machine", lambda: {"hostname": "a", "gpus": ["GPU-1"]})
    first = key()
    assert key() == first
    assert len({first, key(size=11), key(mtime_ns=6)}) == 3
    monkeypatch.setenv("SGLANG_TEST_SWITCH", "1")
    assert key() != first
    monkeypatch.setenv("SGLANG_TEST_SWITCH", "2")
    inherited = key()
    overridden = spec(SERVE, environment={"SGLANG_TEST_SWITCH": "2"}, model={"sha256": "a", "shards": {"m.safetensors": shard}})
    assert overridden.key == inherited  # what it gets is the same
    monkeypatch.delenv("SGLANG_TEST_SWITCH")
    monkeypatch.setenv("EDITOR", "something else")
    assert key() == first
    monkeypatch.setattr(local, "machine", lambda: {"hostname": "a", "gpus": ["GPU-2"]})
    assert key() != first


def test_the_machine_is_named_without_its_boot() -> None:
    """Host name, CPU and GPUs; nothing that changes when it is started again."""
    assert set(local.machine()) == {"hostname", "cpu", "cpu_cores", "gpus"}


def test_an_ipv6_address_is_bracketed(tmp_path: Path) -> None:
    """`::` gives a URL that can be asked."""
    with launching.launch(spec(SERVE, host="::"), tmp_path, [me()]) as server:
        assert server.base_url == f"http://[::]:{server.record.port}"
        assert server.control.health() == 200


# --- GPU memory -----------------------------------------------------------------------------------------------------
@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A stub of nvidia-smi for one machine of two GPUs: `gpu(used=(a, b), users={uuid: {pid: MiB}})` sets its answer."""
    folder = tmp_path / "stub"
    folder.mkdir()
    stub = folder / "nvidia-smi"
    stub.write_text(f'#!/bin/sh\ncase "$1" in *compute-apps*) cat {folder}/users;; *) cat {folder}/gpus;; esac\n')
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(launching, "GPU_WAIT_S", 1.5)

    def answer(used: tuple[Any, Any], users: dict[str, dict[int, int]] | None = None) -> None:
        rows = [f"{i}, H, GPU-{'ab'[i]}, 80000, {mib}, 570, 9.0" for i, mib in enumerate(used)]
        local.write_atomic(folder / "gpus", "\n".join(rows) + "\n")
        held = [f"{uuid}, {pid}, {mib}" for uuid, by in (users or {}).items() for pid, mib in by.items()]
        local.write_atomic(folder / "users", "\n".join(held) + "\n")

    answer((500, 500))
    return answer


def gpu_server(folder: Path) -> Server:
    """A server that runs."""
    server = launching.start(spec(FOREVER), folder, [me()])
    wait_for(lambda: server.status().get("state") == "running")
    return server


def test_gpu_memory_that_came_back_is_proved_by_three_readings(tmp_path: Path, gpu: Callable[..., None]) -> None:
    """Before the launch, before the stop and after it are recorded; back to the start is gone, also if it takes a moment."""
    server = gpu_server(tmp_path)
    gpu((70500, 500), {"GPU-a": {server.status()["pid"]: 70000}})
    timer = threading.Timer(1.0, gpu, [(650, 500)])  # 150 MiB more than before the launch is within the slack
    timer.start()
    proof = server.stop()
    timer.join()
    assert proof.gpu_back is True and proof.gone and proof.gpu_mib_left == 0
    record = read_record(server.folder)
    assert record.gpu_before and record.gpu_before.used_mib == {"GPU-a": 500, "GPU-b": 500}
    assert record.stop and record.stop.gpu_before_stop and record.stop.gpu_before_stop.used_mib["GPU-a"] == 70500
    assert record.stop.gpu_after_stop and record.stop.gpu_after_stop.used_mib["GPU-a"] == 650
    assert proof.gpu_memory == "500 MiB used before the launch, 70500 before the stop, 650 after"


def test_gpu_memory_that_stays_is_not_gone(tmp_path: Path, gpu: Callable[..., None]) -> None:
    """Memory held after the last process ended is an error, even if nvidia-smi lists no process for it."""
    server = gpu_server(tmp_path)
    gpu((70500, 500))
    with pytest.raises(NotStopped, match="70500 after"):
        server.stop()
    stop = read_record(server.folder).stop
    assert stop and stop.gpu_back is False and stop.gpu_mib_left == 70000 and not stop.gone


def test_another_gpu_that_filled_meanwhile_is_not_the_servers(tmp_path: Path, gpu: Callable[..., None]) -> None:
    """Only GPUs that the server used are compared."""
    server = gpu_server(tmp_path)
    gpu((70500, 500), {"GPU-a": {server.status()["pid"]: 70000}})
    timer = threading.Timer(0.6, gpu, [(500, 60000), {"GPU-b": {999999: 59500}}])
    timer.start()
    proof = server.stop()
    timer.join()
    assert proof.gpu_back is True and proof.gone


@pytest.mark.parametrize("used_after", [70500, 500])
def test_gpu_memory_that_others_changed_is_unknown(tmp_path: Path, gpu: Callable[..., None], used_after: int) -> None:
    """If other processes came on the server's GPU meanwhile, nothing is claimed, in either direction."""
    server = gpu_server(tmp_path)
    gpu((70500, 500), {"GPU-a": {server.status()["pid"]: 70000}})
    timer = threading.Timer(0.6, gpu, [(used_after, 500), {"GPU-a": {999999: 70000}}])
    timer.start()
    proof = server.stop()
    timer.join()
    assert proof.gpu_back is None and proof.gpu_mib_left is None
    assert proof.gpu_memory.startswith("unknown, because other processes changed meanwhile (pid 999999")


def test_a_gpu_that_gives_no_number_is_unknown(tmp_path: Path, gpu: Callable[..., None]) -> None:
    """[N/A] is not 0."""
    gpu(("[N/A]", 500))
    proof = gpu_server(tmp_path).stop()
    assert proof.gpu_back is None and "no memory.used for GPU 0" in proof.gpu_memory


def test_without_nvidia_smi_the_reason_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU tool, no claim."""
    monkeypatch.setattr("lib.hosts.local.shutil.which", lambda name: None)
    proof = gpu_server(tmp_path).stop()
    assert proof.gpu_back is None and "nvidia-smi is not on this machine" in proof.gpu_memory and proof.gone


# --- attached -------------------------------------------------------------------------------------------------------
@pytest.fixture
def foreign() -> Iterator[Callable[..., str]]:
    """Starts servers that the workbook did not launch; gives their URL. `again` restarts one on the same port."""
    running: list[subprocess.Popen[bytes]] = []
    port = local.free_port()

    def start(**info: Any) -> str:
        for one in running:
            one.kill()
            one.wait()
        argv = [sys.executable, "-c", SERVE, str(port), "127.0.0.1", json.dumps(info)]
        running.append(subprocess.Popen(argv, stdout=subprocess.DEVNULL))
        wait_for(lambda: local.port_owner(port))
        return f"http://127.0.0.1:{port}"

    yield start
    for one in running:
        one.kill()
        one.wait()


def attach(url: str, folder: Path) -> AttachedServer:
    """The server at a URL, attached."""
    return AttachedServer.attach("server", ServerParams(attach=url), folder)


def test_an_attached_server_keeps_its_key_until_it_is_restarted(foreign: Callable[..., str], tmp_path: Path) -> None:
    """Attaching twice gives one key, though load changes volatile answers; a restart gives another and is noticed."""
    url = foreign()
    first = attach(url, tmp_path)
    assert attach(url, tmp_path).record.key == first.record.key
    assert [check for check in first.check_identity() if "start time still own" in check]
    foreign()
    assert attach(url, tmp_path).record.key != first.record.key
    with pytest.raises(IdentityError, match="the port belonged to pid"):
        first.check_identity()


def test_two_remote_servers_with_one_seed_have_two_keys(
    foreign: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the process can't be seen, every lasting field of /server_info is in the key, and the check says it is weak."""
    monkeypatch.setattr(local, "is_local_url", lambda url: False)
    url = foreign(internal_states=[1])
    first = attach(url, tmp_path)
    assert [check for check in first.check_identity() if check.startswith("weak identity")]
    foreign(internal_states=[2])
    assert attach(url, tmp_path).record.key == first.record.key  # the same by all that can be seen
    foreign(kv_cache_dtype="fp8_e4m3")
    assert attach(url, tmp_path).record.key != first.record.key
    foreign(random_seed=43)
    assert attach(url, tmp_path).record.key != first.record.key


@pytest.mark.parametrize(
    "url",
    [
        "http://user:p4ssw0rd@127.0.0.1:30000", "http://p4ssw0rd@127.0.0.1:30000", "user:p4ssw0rd@host:30000",
        "http://u:p4ssw0rd@host:port", "http://[u:p4ssw0rd@::1:30000", "ftp://u:p4ssw0rd@host",
    ],
)  # fmt: skip
def test_a_url_with_a_password_is_refused_without_repeating_it(url: str, tmp_path: Path) -> None:
    """Nothing of it reaches the message or a file."""
    with pytest.raises(BadInput) as caught:
        attach(url, tmp_path)
    assert "p4ssw0rd" not in str(caught.value) and "user name" in str(caught.value)
    assert list(tmp_path.rglob("*.json")) == []


@pytest.mark.parametrize("url", ["", "127.0.0.1:30000", "ftp://host", "http://", "http://host:port", "http://[::1"])
def test_what_is_no_http_url_is_refused(url: str, tmp_path: Path) -> None:
    """The message shows what a URL looks like."""
    with pytest.raises(BadInput, match="such as http://"):
        attach(url, tmp_path)


#: Takes 4 GiB of the first GPU by the driver's own library, then sleeps.
TAKES_4_GIB = """
import ctypes, time
cuda = ctypes.CDLL("libcuda.so.1")
context, pointer, device = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_int()
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(4 << 30)) == 0
print("up", flush=True)
time.sleep(300)
"""


@pytest.mark.gpu
def test_memory_of_a_real_gpu_comes_back(tmp_path: Path) -> None:
    """On a real GPU the readings see 4 GiB come and go, though in a container no pid may be readable."""
    rows, reason = local.gpus()
    if not rows:
        pytest.skip(str(reason))
    server = launching.start(spec(TAKES_4_GIB), tmp_path, [me()])
    wait_for(lambda: (server.folder / "server.log").exists() and "up" in (server.folder / "server.log").read_text())
    proof = server.stop()
    assert proof.gpu_before_stop and server.record.gpu_before
    uuid = str(rows[0]["uuid"])
    assert proof.gpu_before_stop.used_mib[uuid] - server.record.gpu_before.used_mib[uuid] >= 4096
    assert proof.gpu_back is True and proof.gone, proof.gpu_memory
