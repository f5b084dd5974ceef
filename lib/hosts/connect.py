"""From parameters to a host: one connection per host and process, ended with the process."""

from __future__ import annotations

import atexit
from pathlib import Path

from lib.hosts.base import Host, LocalHost
from lib.hosts.lxc import LXCHost
from lib.hosts.ssh import SSHHost
from lib.params import HostParams

_OPEN: dict[str, Host] = {}


def host_of(params: HostParams) -> Host:
    """A new host as the parameters name it; nothing is connected yet. Close it."""
    if params.kind == "ssh":
        identity, config = (str(Path(file).expanduser()) if file else None for file in (params.identity, params.config))
        return SSHHost(params.address or "", port=params.port, identity=identity, config=config, python=params.python)
    if params.kind == "lxc" and params.hypervisor is not None:
        return LXCHost(host_of(params.hypervisor), params.container or 0, python=params.python)
    return LocalHost()


def shared_host(params: HostParams) -> Host | None:
    """The host of the parameters, connected once per process; None where it is this machine."""
    if not params.remote:
        return None
    key = params.model_dump_json()
    if key not in _OPEN:
        if not _OPEN:
            atexit.register(close_all)
        _OPEN[key] = host_of(params)
    return _OPEN[key]


def close_all() -> None:
    """Ends what runs on the shared hosts and lets their connections go."""
    while _OPEN:
        close_host(_OPEN.popitem()[1])


def close_host(host: Host) -> None:
    """Ends what runs on a host through this object, and lets its connection go, also that to a container's hypervisor."""
    host.close()
    if isinstance(host, LXCHost):
        host.hypervisor.close()
