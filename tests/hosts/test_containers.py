"""Servers in containers are recognised from what the engines print. No engine runs here: the texts are written after the
engines' documentation (Docker Engine API 1.47 ContainerInspect; podman-inspect(1), Podman 5), with the fields they have."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lib.errors import BadInput
from lib.hosts.containers import parse_inspect
from lib.hosts.view import container_of, unit_of

ID = "0123456789abcdef" * 4
IMAGE = "fedcba9876543210" * 4


def docker(**changes: Any) -> str:
    row: dict[str, Any] = {
        "Id": ID,
        "Created": "2026-11-20T08:00:00.123456789Z",
        "Path": "python3",
        "Args": ["-m", "sglang.launch_server", "--model-path", "/models/m", "--port", "30000", "--api-key", "sk-abcdefgh12345678"],
        "State": {
            "Status": "running", "Running": True, "Paused": False, "Restarting": False, "OOMKilled": False, "Dead": False,
            "Pid": 4242, "ExitCode": 0, "Error": "", "StartedAt": "2026-11-20T08:00:01.5Z", "FinishedAt": "0001-01-01T00:00:00Z",
        },
        "Image": f"sha256:{IMAGE}",
        "LogPath": f"/var/lib/docker/containers/{ID}/{ID}-json.log",
        "Name": "/sglang",
        "RestartCount": 2,
        "HostConfig": {
            "NetworkMode": "host", "RestartPolicy": {"Name": "unless-stopped", "MaximumRetryCount": 0},
            "LogConfig": {"Type": "json-file", "Config": {}}, "PortBindings": {}, "Devices": [],
            "DeviceRequests": [{"Driver": "", "Count": -1, "DeviceIDs": None, "Capabilities": [["gpu"]], "Options": {}}],
        },
        "Mounts": [{"Type": "bind", "Source": "/srv/models", "Destination": "/models", "Mode": "ro", "RW": False}],
        "Config": {
            "Image": "lmsysorg/sglang:v0.5.15", "Env": ["HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz0123", "SGLANG_X=1", "EMPTY="],
            "Cmd": ["--x"], "Entrypoint": ["python3"], "Labels": {"maintainer": "someone"},
        },
        "NetworkSettings": {"Ports": {}},
    }  # fmt: skip
    for key, value in changes.items():
        row[key] = {**row[key], **value} if isinstance(row.get(key), dict) and isinstance(value, dict) else value
    return json.dumps([row])


def test_docker_inspect_is_read_without_its_secrets() -> None:
    """Id, image, main process, log, command and GPUs; keys are gone from command and environment."""
    found = parse_inspect(docker(), image_text=json.dumps([{"RepoDigests": ["lmsysorg/sglang@sha256:" + 64 * "a"]}]))
    assert (found.id, found.name, found.pid, found.running) == (ID, "sglang", 4242, True)
    assert (found.image, found.image_id) == ("lmsysorg/sglang:v0.5.15", f"sha256:{IMAGE}")
    assert found.image_digests == ["lmsysorg/sglang@sha256:" + 64 * "a"]
    assert found.argv[:3] == ["python3", "-m", "sglang.launch_server"] and found.argv[-3:-1] == ["30000", "--api-key"]
    assert found.log_driver == "json-file" and found.log_path and found.log_path.endswith("-json.log")
    assert found.network_mode == "host" and found.gpus == ["all"] and found.mounts == {"/models": "/srv/models"}
    assert found.revived and found.restart_count == 2 and found.stop_command == ["docker", "stop", ID]
    text = found.model_dump_json()
    assert "sk-abcdefgh" not in text and "hf_abcdef" not in text
    assert found.environment["SGLANG_X"] == "1" and found.environment["EMPTY"] == ""


def test_ports_gpus_and_a_stopped_container() -> None:
    """Published ports by the container's port; devices by id; a stopped container has no process."""
    ports = {
        "30000/tcp": [{"HostIp": "0.0.0.0", "HostPort": "31000"}, {"HostIp": "::", "HostPort": "31000"}],
        "9/udp": [{"HostPort": "9"}],
        "8/tcp": None,
    }
    host = {
        "NetworkMode": "bridge",
        "RestartPolicy": {"Name": "no"},
        "DeviceRequests": [{"Count": 0, "DeviceIDs": ["0", "GPU-1"]}],
    }
    found = parse_inspect(docker(NetworkSettings={"Ports": ports}, HostConfig=host, State={"Running": False, "Pid": 0}))
    assert found.host_ports == {30000: [31000]} and found.gpus == ["0", "GPU-1"]
    assert not found.revived and found.pid is None and not found.running


def test_podman_inspect_is_read() -> None:
    """Podman: bare image id, digest beside it, its unit in a label, log path in LogConfig, GPU as a CDI device."""
    row = {
        "Id": ID, "Name": "sglang", "Image": IMAGE, "ImageName": "docker.io/lmsysorg/sglang:v0.5.15",
        "ImageDigest": "sha256:" + 64 * "b", "Path": "python3", "Args": ["-m", "sglang.launch_server"], "RestartCount": 0,
        "State": {"Running": True, "Pid": 77, "StartedAt": "2026-11-20T08:00:01.5Z"},
        "Config": {"Env": [], "Labels": {"PODMAN_SYSTEMD_UNIT": "sglang.service"}, "Image": "docker.io/lmsysorg/sglang:v0.5.15"},
        "HostConfig": {
            "NetworkMode": "host", "RestartPolicy": {"Name": "", "MaximumRetryCount": 0},
            "LogConfig": {"Type": "journald", "Path": ""}, "Devices": [{"PathOnHost": "/dev/nvidia0"}],
        },
        "Mounts": [], "NetworkSettings": {"Ports": None},
    }  # fmt: skip
    found = parse_inspect(json.dumps([row]), "podman")
    assert (found.pid, found.image_id, found.image_digests) == (77, f"sha256:{IMAGE}", ["sha256:" + 64 * "b"])
    assert found.systemd_unit == "sglang.service" and found.log_path is None and found.log_driver == "journald"
    assert not found.revived and found.gpus == ["/dev/nvidia0"] and found.log_command[0] == "podman"


@pytest.mark.parametrize(
    "text", ["", "Error: No such container: x", "[]", "[1]", '[{"Id": "x"}]', '[{"State": {}}]', "{", "[{}, {}]"]
)
def test_what_is_not_one_container_is_refused(text: str) -> None:
    """An engine's error text, nothing or two entries are an error, not an empty container."""
    with pytest.raises(BadInput):
        parse_inspect(text)


# The cgroup lines that the engines, the two cgroup drivers and cgroup v1 and v2 give (cgroups(7), the engines' documentation).
@pytest.mark.parametrize(
    ("cgroup", "container", "unit"),
    [
        (f"0::/system.slice/docker-{ID}.scope\n", ("docker", ID), f"docker-{ID}.scope"),
        (f"0::/docker/{ID}\n", ("docker", ID), None),
        (f"12:memory:/docker/{ID}\n1:name=systemd:/docker/{ID}\n0::/\n", ("docker", ID), None),
        (f"0::/machine.slice/libpod-{ID}.scope/container\n", ("podman", ID), f"libpod-{ID}.scope"),
        (f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope\n", ("podman", ID), f"libpod-{ID}.scope"),
        (f"0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-{ID}.scope\n", ("containerd", ID), f"cri-containerd-{ID}.scope"),
        (f"0::/kubepods/besteffort/pod1-2/{ID}\n", ("kubernetes", ID), None),
        ("0::/lxc.payload.101/system.slice/sglang.service\n", ("lxc", "101"), "sglang.service"),
        ("0::/lxc/101/ns/system.slice/sglang.service\n", ("lxc", "101"), "sglang.service"),
        ("0::/system.slice/sglang.service\n", None, "sglang.service"),
        ("0::/system.slice/system-sglang.slice/sglang@0.service\n", None, "sglang@0.service"),
        ("0::/user.slice/user-0.slice/session-3.scope\n", None, "session-3.scope"),
        ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/sg\\x2dlang.service\n", None, "sg\\x2dlang.service"),
        ("0::/system.slice\n", None, None),
        ("0::/\n", None, None),
        ("", None, None),
        (f"0::/system.slice/my-docker-{ID[:12]}.service\n", None, f"my-docker-{ID[:12]}.service"),
    ],
)  # fmt: skip
def test_container_and_unit_of_a_cgroup(cgroup: str, container: tuple[str, str] | None, unit: str | None) -> None:
    """The container and the unit of a process from its cgroup lines; none where none is told."""
    assert container_of(cgroup) == container and unit_of(cgroup) == unit
