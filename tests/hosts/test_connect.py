"""A profile names its host; contradictions are refused, all at once, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lib.errors import BadParams
from lib.hosts.base import LocalHost
from lib.hosts.connect import close_all, host_of, shared_host
from lib.hosts.lxc import LXCHost
from lib.hosts.ssh import SSHHost
from lib.params import HostParams, load_profile


def profile_with(folder: Path, host: Any) -> Path:
    data: dict[str, Any] = {"title": "t", "server": {"model": "tiny"}, "host": host}
    (folder / "profile.yaml").write_text(yaml.safe_dump(data))
    return folder


def test_kinds_of_hosts(tmp_path: Path) -> None:
    """Each kind becomes its host; this machine where none is named."""
    assert load_profile("embedded").host == HostParams() and isinstance(host_of(HostParams()), LocalHost)
    ssh = load_profile(str(profile_with(tmp_path, {"kind": "ssh", "address": "gpu1", "port": 2222}))).host
    with host_of(ssh) as host:
        assert isinstance(host, SSHHost) and host.address == "gpu1" and "2222" in host._options
    lxc = {"kind": "lxc", "container": 101, "hypervisor": {"kind": "ssh", "address": "root@pve"}}
    found = host_of(load_profile(str(profile_with(tmp_path, lxc))).host)
    assert isinstance(found, LXCHost) and found.container == "101" and isinstance(found.hypervisor, SSHHost)
    found.hypervisor.close()


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ({"kind": "ssh"}, ["kind ssh needs address"]),
        ({"kind": "lxc", "address": "x"}, ["needs container", "needs hypervisor", "address belongs to kind ssh"]),
        ({"address": "gpu1"}, ["address belongs to kind ssh, not to local"]),
        ({"kind": "slurm", "address": "x"}, ["host.kind", "'local', 'ssh' or 'lxc'"]),
        ({"kind": "ssh", "adress": "x"}, ["did you mean 'address'?"]),
        ({"kind": "lxc", "container": 1, "hypervisor": {"kind": "ssh"}}, ["host.hypervisor", "kind ssh needs address"]),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, host: dict[str, Any], words: list[str]) -> None:
    """Wrong keys and missing ones are all named."""
    with pytest.raises(BadParams) as error:
        load_profile(str(profile_with(tmp_path, host)))
    assert all(word in str(error.value) for word in words), error.value


def test_one_connection_per_host_and_process() -> None:
    """The same parameters give the same object until all are closed; this machine needs none."""
    params = HostParams(kind="ssh", address="gpu1")
    assert shared_host(HostParams()) is None
    one = shared_host(params)
    assert one is shared_host(HostParams(kind="ssh", address="gpu1")) and one is not None
    close_all()
    assert shared_host(params) is not one
    close_all()
