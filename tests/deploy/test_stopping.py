"""Whose process is it? Pure questions of the stop ladder: identity, bystanders, ports, no host involved."""

from __future__ import annotations

from typing import Any

import pytest

from lib.deploy.service import kill_control_group, read_properties, unit_name
from lib.deploy.stopping import ServingContainer, asked_port, is_sglang, targets
from lib.errors import BadInput
from lib.hosts.base import LocalHost
from lib.hosts.view import HostGpu, HostProcess, HostView, Listener

SERVER = ["python3", "-m", "sglang.launch_server", "--model-path", "m", "--port", "30000"]


def process(pid: int, argv: list[str], parent: int = 1, unit: str | None = None, **other: Any) -> HostProcess:
    """One process."""
    fields = {"ticks": pid * 10, "state": "S", "uid": 1000, "name": argv[0][:15] if argv else "x", **other}
    return HostProcess(pid=pid, parent=parent, argv=argv, unit=unit, **fields)


def view(
    processes: list[HostProcess], listeners: list[Listener] | None = None, gpus: list[HostGpu] | None = None
) -> HostView:
    """A host with these processes."""
    return HostView(
        hostname="h", boot_id="b", unix_s=1.0, uptime_s=1.0, ticks_per_s=100, kernel="k", machine="x86_64", os_release=None, cpu=None,
        cpu_cores=1, memory_bytes=None, load_average=0.0, processes=processes, listeners=listeners or [], gpus=gpus or [],
        gpus_reason=None, unreadable=0,
    )  # fmt: skip


def mine(found: HostView, unit: str = "sglang.service", port: int | None = 30000) -> tuple[list[int], list[int]]:
    """Pids that would be stopped, and bystanders."""
    taken, bystanders = targets(found, unit, port)
    return sorted(taken), sorted(b.pid for b in bystanders)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (SERVER, True), (["/opt/v/bin/python3.12", "-u", "-m", "sglang.launch_server"], True),
        (["/opt/v/bin/sglang", "serve", "--model-path", "m"], True), (["python3", "/x/sglang/launch_server.py"], True),
        (["sglang::scheduler_TP0"], True), (["python3", "-m", "vllm.entrypoints.openai.api_server"], False),
        (["grep", "sglang.launch_server"], False), (["vim", "sglang/notes.txt"], False), (["python3"], False),
        (["tail", "-f", "/var/log/sglang/launch_server.log"], False), (["python3", "-m", "sglang.bench_serving"], False), ([], False),
    ],
)  # fmt: skip
def test_a_server_is_known_by_its_command_line(argv: list[str], expected: bool) -> None:
    """Neither `python3` nor a text that mentions SGLang makes a process a server."""
    assert is_sglang(process(5, argv, name=argv[0][:15] if argv else "x")) is expected


def test_a_worker_is_known_by_the_name_it_gave_itself() -> None:
    """SGLang's workers rename themselves."""
    assert is_sglang(process(5, ["python3"], name="sglang::schedul"))


@pytest.mark.parametrize(
    ("argv", "port"), [(SERVER, 30000), (["--port=1"], 1), (["--port"], None), (["--port", "x"], None), ([], None)]
)
def test_the_asked_port_is_read(argv: list[str], port: int | None) -> None:
    """Both spellings; nothing is guessed."""
    assert asked_port(argv) == port


def test_the_unit_and_all_below_it_are_its_own() -> None:
    """Also a child that left the control group for a session's scope; not another service's child."""
    found = view([
        process(1, ["init"], 0), process(10, ["sh", "-c", "x"], unit="sglang.service"), process(11, SERVER, 10, "sglang.service"),
        process(12, ["worker"], 11, "session-3.scope"), process(13, ["other"], 11, "other.service"),
    ])  # fmt: skip
    assert mine(found) == ([10, 11, 12], [])


def test_a_server_started_by_hand_on_the_port_is_the_services_and_anything_else_there_is_not() -> None:
    """An SGLang of nobody's unit that holds the port is ended; a web server or another service's SGLang there is a bystander."""
    by_hand = process(20, SERVER, unit="session-1.scope")
    found = view(
        [by_hand, process(21, ["sglang::scheduler"], 20, "session-1.scope")],
        [Listener(port=30000, address="127.0.0.1", pids=[20])],
    )
    assert mine(found) == ([20, 21], [])
    web = view([process(30, ["nginx"], unit="nginx.service")], [Listener(port=30000, address="0.0.0.0", pids=[30])])
    assert mine(web) == ([], [30])
    other = view([process(31, SERVER, unit="blue.service")], [Listener(port=30000, address="::", pids=[31])])
    assert mine(other) == ([], [31])
    loading = view([process(32, SERVER, unit=None)])
    assert mine(loading) == ([32], [])
    elsewhere = view([process(33, [*SERVER[:-1], "30001"], unit=None)])
    assert mine(elsewhere) == ([], [])


def gpu(holders: list[int]) -> HostGpu:
    """One GPU held by these processes."""
    return HostGpu(
        index=0, name="H200", uuid="GPU-1", memory_total_mib=1.0, memory_used_mib=1.0, driver_version="1", compute_cap="9.0",
        users=dict.fromkeys(holders, 100.0), holders=holders,
    )  # fmt: skip


def test_on_a_shared_gpu_only_its_own_are_touched() -> None:
    """Somebody's notebook on the same GPU is named; an orphaned worker on the service's GPU is ended; one elsewhere is named."""
    notebook = process(40, ["python3", "-m", "ipykernel_launcher"], 39, "jupyter.service")
    orphan = process(41, ["sglang::scheduler_TP1"], 1, None)
    server = process(42, SERVER, 1, "sglang.service")
    assert mine(view([notebook, orphan, server], gpus=[gpu([40, 41, 42])])) == ([41, 42], [40])
    assert mine(view([notebook, orphan], gpus=[gpu([40, 41])])) == ([], [40, 41])


def test_zombies_are_gone() -> None:
    """A zombie is neither to be stopped nor a bystander."""
    assert mine(view([process(50, SERVER, unit="sglang.service", state="Z")])) == ([], [])


@pytest.mark.parametrize("name", ["a/b", "../x", "-x", "a b", "a\nb", "", "x;reboot"])
def test_a_service_name_is_no_path_and_no_option(name: str) -> None:
    """What systemd would misread is refused."""
    with pytest.raises(BadInput):
        unit_name(name)


@pytest.mark.parametrize(
    "path", ["/", "/system.slice", "/user.slice/user-0.slice", "/system.slice/../x.service/..", "/a.scope", ""]
)
def test_only_a_services_control_group_is_ever_killed(path: str) -> None:
    """Never a slice, never the root, never a way out."""
    with pytest.raises(BadInput):
        kill_control_group(LocalHost(), path)


def test_properties_are_read_as_systemd_writes_them() -> None:
    """Values may hold `=`; a line of something else is no property."""
    assert read_properties("A=b=c\nB=\nnoise\nx y=1\n") == {"A": "b=c", "B": ""}


def box(identity: str, name: str, ports: list[int]) -> ServingContainer:
    """A container with a server in it."""
    return ServingContainer(
        engine="docker", id=identity, name=name, image="i", image_id=None, digests=[], ports=ports, restart_policy="always",
        log=[], pids=[],
    )  # fmt: skip


def inside(pid: int, identity: str) -> HostProcess:
    """A server in a container whose own port is 30000, whatever the host's is."""
    return process(pid, SERVER, unit=f"docker-{identity}.scope", container=("docker", identity))


def test_a_container_is_the_services_by_its_published_port_or_its_units_client() -> None:
    """A port on a command line in a container is not the host's; another unit's container is a bystander's; an unknown one is by port."""
    a, b, c = "a" * 64, "b" * 64, "c" * 64
    client = process(9, ["/usr/bin/docker", "run", "--rm", "--name", "theirs", "i"], unit="theirs.service")
    own_client = process(8, ["/usr/bin/docker", "run", "--name=ours", "i"], unit="sglang.service")
    found = view([inside(20, a), inside(21, b), inside(22, c), client, own_client])
    boxes = {a: box(a, "old", [30000]), b: box(b, "theirs", [30000]), c: box(c, "ours", [31000])}
    assert sorted(targets(found, "sglang.service", 30000, boxes)[0]) == [8, 20, 22]
    assert sorted(targets(found, "new.service", 31999, boxes)[0]) == []
    # without an engine that answers, only its command line is left to go by
    assert sorted(targets(view([inside(20, a)]), "sglang.service", 30000)[0]) == [20]
