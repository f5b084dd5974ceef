"""Hosts of the lab, shared by the whole session: boot once, take down once. Tests leave them as they found them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lib.hosts.base import Host
from lib.hosts.lxc import LXCHost
from lib.hosts.ssh import SSHHost
from tests.lab import lab as building
from tests.lab.lab import Lab


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs the lab."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.lab)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """Two systemd containers (101, 102) below a hypervisor; skipped with the reason where they can't be built."""
    reason = building.missing()
    if reason and os.environ.get("CI") is None:
        pytest.skip(reason)
    assert reason is None, reason
    folder = Path(tempfile.mkdtemp(prefix="wblab-", dir="/tmp"))
    with building.running(folder) as made:
        yield made
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def hypervisor(lab: Lab) -> Iterator[SSHHost]:
    """The hypervisor, over SSH as root."""
    with lab.ssh("hypervisor") as host:
        yield host


@pytest.fixture(scope="session")
def guest(lab: Lab) -> Iterator[SSHHost]:
    """Container 101 over SSH as root."""
    with lab.ssh("guest-101") as host:
        yield host


@pytest.fixture(scope="session")
def guest_pct(lab: Lab, hypervisor: SSHHost) -> LXCHost:
    """Container 101 by `pct exec` on the hypervisor: works without its sshd and without its network."""
    return lab.pct(101, hypervisor)


@pytest.fixture(scope="session")
def guest_user(lab: Lab) -> Iterator[SSHHost]:
    """Container 101 as an ordinary user with `sudo -n`."""
    with lab.ssh("ops-101") as host:
        yield host


@pytest.fixture(scope="session")
def plain_user(lab: Lab) -> Iterator[SSHHost]:
    """Container 101 as an ordinary user without sudo."""
    with lab.ssh("plain-101") as host:
        yield host


@pytest.fixture(scope="session")
def other(lab: Lab) -> Iterator[SSHHost]:
    """Container 102 over SSH as root."""
    with lab.ssh("guest-102") as host:
        yield host


@pytest.fixture(scope="session", params=["ssh", "pct", "user"])
def any_guest(request: pytest.FixtureRequest, guest: Host, guest_pct: Host, guest_user: Host) -> Host:
    """Container 101 over each way there is to it."""
    return {"ssh": guest, "pct": guest_pct, "user": guest_user}[request.param]
