"""A server that runs in a container (Docker, Podman): which one, from which image, where its log is.

Pure parsers of what the engines print; asking them is the caller's. A process tells its container by its cgroup
(`lib.hosts.view.container_of`), the engine's `inspect` tells the rest. Identity is the full id together with the main
process's pid and start: a container that was restarted keeps its id and has another process.
Source: Docker Engine API 1.4x, `docker inspect` (ContainerInspect); Podman 4/5 `podman inspect --type container`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lib.errors import BadInput
from lib.records import Record
from lib.server.redact import redact_object

#: What to ask an engine about one container, by id.
INSPECT: dict[str, tuple[str, ...]] = {
    "docker": ("docker", "inspect", "--type", "container"),
    "podman": ("podman", "inspect", "--type", "container"),
    "nerdctl": ("nerdctl", "inspect", "--mode", "dockercompat", "--type", "container"),
}


class Container(Record):
    """One container as its engine describes it, without secrets.

    `pid` is the main process in the host's numbers, None while it doesn't run. `image_id` is the image's content hash;
    `image_digests` are the registry digests that the name stood for, known only if the image was inspected too.
    `host_ports` are the ports of the host by the container's TCP port; with `network_mode` host the container's port is the
    host's. `log_path` is a file of the host for the json-file driver, None where the log is elsewhere (`log_driver` says).
    """

    engine: str
    id: str
    name: str
    image: str
    image_id: str | None
    image_digests: list[str] = []
    running: bool
    pid: int | None
    started_at: str | None
    restart_policy: str | None
    restart_count: int | None
    argv: list[str]
    environment: dict[str, str]
    log_driver: str | None
    log_path: str | None
    network_mode: str | None
    host_ports: dict[int, list[int]]
    mounts: dict[str, str] = {}
    gpus: list[str] = []
    systemd_unit: str | None = None
    labels: dict[str, str] = {}

    @property
    def revived(self) -> bool:
        """True if the engine starts it again when its process is killed: it has to be stopped through the engine."""
        return (self.restart_policy or "no") not in ("no", "")

    @property
    def log_command(self) -> list[str]:
        """How its log is read, whatever the driver keeps."""
        return [self.engine, "logs", "--timestamps", self.id]

    @property
    def stop_command(self) -> list[str]:
        """How it is stopped without being revived."""
        return [self.engine, "stop", self.id]


def parse_inspect(text: str, engine: str = "docker", image_text: str | None = None) -> Container:
    """The container that `docker inspect ID` or `podman inspect ID` describes.

    Args:
        text: what the engine printed.
        image_text: what `docker image inspect IMAGE_ID` printed, for the registry digests.

    Raises:
        BadInput: it is not JSON of one container.
    """
    row = _one(text, "a container")
    state, config, host = (_mapping(row.get(key)) for key in ("State", "Config", "HostConfig"))
    if not row.get("Id") or not state:
        raise BadInput("the JSON that `inspect` prints for one container", f"keys {sorted(row)[:6]}")
    running = bool(state.get("Running"))
    log = _mapping(host.get("LogConfig"))
    policy = _mapping(host.get("RestartPolicy"))
    labels = {str(k): str(v) for k, v in _mapping(config.get("Labels")).items()}
    return Container(
        engine=engine,
        id=str(row["Id"]),
        name=str(row.get("Name") or "").lstrip("/"),
        image=str(config.get("Image") or row.get("ImageName") or row.get("Image") or ""),
        image_id=_sha(row.get("Image")),
        image_digests=_digests(row, image_text),
        running=running,
        pid=int(state["Pid"]) if running and state.get("Pid") else None,
        started_at=str(state["StartedAt"]) if state.get("StartedAt") else None,
        restart_policy=str(policy["Name"]) if policy.get("Name") else None,
        restart_count=int(row["RestartCount"]) if row.get("RestartCount") is not None else None,
        argv=redact_object(_command(row, config)),
        environment=redact_object(_environment(config.get("Env") or ())),
        log_driver=str(log["Type"]) if log.get("Type") else None,
        log_path=str(row.get("LogPath") or log.get("Path") or "") or None,
        network_mode=str(host["NetworkMode"]) if host.get("NetworkMode") else None,
        host_ports=_ports(row, host),
        mounts={
            str(m.get("Destination")): str(m.get("Source")) for m in row.get("Mounts") or () if isinstance(m, Mapping)
        },
        gpus=_gpus(host),
        systemd_unit=labels.get("PODMAN_SYSTEMD_UNIT"),
        labels={
            k: v for k, v in redact_object(labels).items() if not k.startswith("org.opencontainers.image.licenses")
        },
    )


def _one(text: str, what: str) -> Mapping[str, Any]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise BadInput(f"the JSON that `inspect` prints for {what}", f"{text.strip()[:120]!r}") from error
    rows = data if isinstance(data, list) else [data]
    if len(rows) != 1 or not isinstance(rows[0], Mapping):
        raise BadInput(f"the JSON that `inspect` prints for {what}", f"{len(rows)} entries")
    return dict(rows[0])


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _sha(value: Any) -> str | None:
    """An image id with its algorithm; Podman leaves that out, and a name is no id."""
    text = str(value or "")
    bare = text.removeprefix("sha256:")
    return f"sha256:{bare}" if len(bare) == 64 and set(bare) <= set("0123456789abcdef") else None


def _digests(row: Mapping[str, Any], image_text: str | None) -> list[str]:
    found = [str(row["ImageDigest"])] if row.get("ImageDigest") else []  # Podman
    if image_text:
        image = _one(image_text, "an image")
        found += [str(digest) for digest in image.get("RepoDigests") or ()]
    return list(dict.fromkeys(found))


def _command(row: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """What runs: entry point and its arguments, as the engine started them."""
    if row.get("Path"):
        return [str(row["Path"]), *map(str, row.get("Args") or ())]
    entry = config.get("Entrypoint") or []
    return [*(entry.split() if isinstance(entry, str) else map(str, entry)), *map(str, config.get("Cmd") or ())]


def _environment(rows: Sequence[Any]) -> dict[str, str]:
    pairs = (str(row).partition("=") for row in rows)
    return {name: value for name, _, value in pairs}


def _ports(row: Mapping[str, Any], host: Mapping[str, Any]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    bound = _mapping(_mapping(row.get("NetworkSettings")).get("Ports")) or _mapping(host.get("PortBindings"))
    for name, places in bound.items():
        port, _, kind = str(name).partition("/")
        if port.isdigit() and kind in ("", "tcp"):
            numbers = {int(p["HostPort"]) for p in places or () if str(_mapping(p).get("HostPort") or "").isdigit()}
            if numbers:
                found[int(port)] = sorted(numbers)
    return found


def _gpus(host: Mapping[str, Any]) -> list[str]:
    """GPUs that it was given: device ids, `all`, or a number of any."""
    found: list[str] = []
    for request in host.get("DeviceRequests") or ():
        row = _mapping(request)
        if row.get("DeviceIDs"):
            found += [str(i) for i in row["DeviceIDs"]]
        elif row.get("Count"):
            found.append("all" if row["Count"] == -1 else f"any {row['Count']}")
    devices = [str(_mapping(d).get("PathOnHost") or "") for d in host.get("Devices") or ()]
    return found + [d for d in devices if d.startswith(("/dev/nvidia", "nvidia.com/gpu"))]
