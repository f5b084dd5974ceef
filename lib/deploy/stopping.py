"""Stops a service so that it is really gone, by identity, rung by rung, and says what shows it.

Stopped means: no process of it is alive, nothing listens on its port, its GPU memory is back; whatever systemctl says. The
ladder: drain and stop by systemd (its own SIGTERM, then SIGKILL at its own deadline), SIGKILL to its control group and its
processes while the stop is still pending (so that Restart= can't revive it), SIGKILL from the hypervisor; and then
*unkillable*, with the evidence and what a person can do. A process that is not the service's is named and never touched.
A server in a container is stopped through its engine, by the container's id, so that a restart policy can't revive it.

Source of the behaviour that this is built for: recorded SGLang 0.5.16 runs (SIGTERM doesn't end a server with a stream in
flight), systemd.kill(5), proc(5).
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lib.deploy.service import ServiceState, kill_control_group, service_state, systemctl, unit_name
from lib.errors import HostError, HostTimeout, HostUnreachable, NeedsRoot, WorkbookError
from lib.hosts.base import Host
from lib.hosts.containers import INSPECT, Container
from lib.hosts.engine import container_of_process
from lib.hosts.lxc import LXCHost
from lib.hosts.signals import signal_processes
from lib.hosts.view import HostProcess, HostView
from lib.records import Record

#: Seconds: for the drain beyond the unit's own settings, after SIGKILL, after the hypervisor's SIGKILL.
DRAIN_S, KILL_S, HYPERVISOR_S = 60.0, 10.0, 10.0
POLL_S = 0.25


class Seen(Record):
    """A process as it was seen: its identity and what it is."""

    pid: int
    ticks: int
    uid: int | None
    state: str
    argv: str
    unit: str | None
    why: str = ""
    container: str | None = None


class ServingContainer(Record):
    """A container in which an SGLang server runs: its identity, its image by digest, where its log is."""

    engine: str
    id: str
    name: str
    image: str
    image_id: str | None
    digests: list[str]
    ports: list[int]
    restart_policy: str | None
    log: list[str]
    pids: list[int]


class Rung(Record):
    """One step of the ladder: what was done, how long it took, and what was left after it."""

    name: str
    did: str
    seconds: float
    outcome: str
    left: list[Seen] = []


class StopReport(Record):
    """How a service was stopped. `state`: stopped, was_not_running, unkillable (processes withstood every signal), not_stopped."""

    host: str
    unit: str
    port: int | None
    state: str
    seconds: float
    before: list[Seen] = []
    rungs: list[Rung] = []
    left: list[Seen] = []
    bystanders: list[Seen] = []
    containers: list[ServingContainer] = []
    port_free: bool | None = None
    port_reason: str | None = None
    gpu_back: bool | None = None
    gpu_reason: str | None = None
    service: str = ""
    do: str | None = None

    @property
    def gone(self) -> bool:
        """True if no process of it is left, its port is free and its GPUs don't hold memory of it."""
        return self.state in ("stopped", "was_not_running")


def is_sglang(process: HostProcess) -> bool:
    """True for an SGLang server or one of its workers, by its command line: a name alone (`python3`) is never enough.

    SGLang starts as `python -m sglang.launch_server`, `sglang serve` or `sglang.launch_server`; its workers rename
    themselves `sglang::scheduler`, `sglang::detokenizer`, ....
    """
    words = process.argv
    if process.name.startswith("sglang::") or (words and words[0].startswith("sglang::")):
        return True
    for index, word in enumerate(words[:6]):
        if word == "-m" and words[index + 1 : index + 2] in (
            ["sglang.launch_server"],
            ["sglang.srt.entrypoints.http_server"],
        ):
            return True
        if word.endswith("sglang/launch_server.py") or (
            word.rsplit("/", 1)[-1] == "sglang" and words[index + 1 : index + 2] == ["serve"]
        ):
            return True
    return False


def asked_port(argv: Sequence[str]) -> int | None:
    """The port that a server's command line asks for: `--port N` or `--port=N`; None if it names none.

    Example: `asked_port(["--port", "30000"])` is `30000`.
    """
    for index, word in enumerate(argv):
        value = (
            word[7:]
            if word.startswith("--port=")
            else argv[index + 1]
            if word == "--port" and index + 1 < len(argv)
            else ""
        )
        if value.isdigit():
            return int(value)
    return None


def seen(process: HostProcess, why: str = "") -> Seen:
    """A process as a record, its command line shortened (secrets left it where it came in)."""
    return Seen(
        pid=process.pid, ticks=process.ticks, uid=process.uid, state=process.state, argv=" ".join(process.argv)[:300] or process.name,
        unit=process.unit, why=why, container="/".join(process.container) if process.container else None,
    )  # fmt: skip


def described(container: Container, pids: Iterable[int]) -> ServingContainer:
    """A container as reports name it.

    Its ports are the host's: published ones, or with the host's network the one that its command asks for.
    """
    ports = sorted({p for places in container.host_ports.values() for p in places})
    if container.network_mode == "host" and (own := asked_port(container.argv)) is not None:
        ports = sorted({*ports, own})
    return ServingContainer(
        engine=container.engine, id=container.id, name=container.name, image=container.image, image_id=container.image_id,
        digests=container.image_digests, ports=ports, restart_policy=container.restart_policy, log=container.log_command, pids=sorted(pids),
    )  # fmt: skip


def serving_containers(host: Host, view: HostView) -> tuple[dict[str, ServingContainer], dict[str, str]]:
    """Containers by id in which an SGLang server runs, and the reason for each whose engine doesn't answer."""
    inside: dict[tuple[str, str], list[HostProcess]] = {}
    for process in view.processes:
        if process.alive and process.container is not None and process.container[0] in INSPECT and is_sglang(process):
            inside.setdefault(process.container, []).append(process)
    found: dict[str, ServingContainer] = {}
    unknown: dict[str, str] = {}
    for (_, identity), processes in inside.items():
        try:
            container = container_of_process(host, processes[0])
        except (HostUnreachable, HostTimeout):
            raise
        except WorkbookError as error:
            unknown[identity] = str(error.found or error)
            continue
        if container is not None:
            found[identity] = described(container, (p.pid for p in processes))
    return found, unknown


def client_units(view: HostView) -> dict[str, str]:
    """Units by the container's name that a `docker run --name NAME` in each of them holds."""
    named: dict[str, str] = {}
    for process in view.processes:
        words = process.argv
        if process.alive and process.unit and words and words[0].rsplit("/", 1)[-1] in INSPECT and "run" in words[1:3]:
            for index, word in enumerate(words):
                if word == "--name" and index + 1 < len(words):
                    named[words[index + 1]] = process.unit
                elif word.startswith("--name="):
                    named[word[7:]] = process.unit
    return named


def own_containers(
    view: HostView, unit: str, port: int | None, containers: Mapping[str, ServingContainer]
) -> dict[str, ServingContainer]:
    """Those of a service: started by its unit, or on its port and of no other unit."""
    clients = client_units(view)
    return {
        identity: c
        for identity, c in containers.items()
        if clients.get(c.name) == unit or (port is not None and port in c.ports and c.name not in clients)
    }


def targets(
    view: HostView, unit: str, port: int | None, containers: Mapping[str, ServingContainer] | None = None
) -> tuple[dict[int, tuple[HostProcess, str]], list[Seen]]:
    """Processes of a service by pid with the reason why they are its, and bystanders that hold its port or a GPU.

    Its own are: those in the unit's control group and all below them; an SGLang server that listens on the port, or was
    started for it (`--port`), and is in no other service's unit, with all below it; and SGLang workers whose server is gone
    (orphans of process 1) that hold a GPU which one of its own holds too, in no other service's unit. What runs in a container
    whose engine described it (`containers`) is judged by the container: its name and the ports that it publishes, since a port
    on a command line in there is not the host's.
    """
    mine: dict[int, tuple[HostProcess, str]] = {}
    known = containers or {}
    own = own_containers(view, unit, port, known)

    def take(process: HostProcess, why: str) -> None:
        for member in view.family(process.pid):
            if member.pid not in mine and (member.unit in (None, unit) or _session(member.unit)):
                mine[member.pid] = (member, why if member.pid == process.pid else f"below {process.pid}")

    for process in view.in_unit(unit):
        take(process, f"in {unit}")
    for process in view.processes:
        if process.alive and process.container is not None and process.container[1] in own:
            one = own[process.container[1]]
            take(process, f"in {one.engine} container {one.name} ({one.id[:12]})")
    owners = view.port_owners(port) if port is not None else []
    bystanders: list[Seen] = []
    for process in view.processes:
        if not process.alive or process.pid in mine or not is_sglang(process):
            continue
        if process.container is not None and process.container[1] in known:
            continue
        foreign = process.unit not in (None, unit) and not _session(process.unit)
        holds = process in owners or (port is not None and asked_port(process.argv) == port)
        if holds and not foreign:
            take(process, f"an SGLang server for port {port}, in no other service")
    for process in owners:
        if process.pid not in mine:
            bystanders.append(
                seen(process, f"listens on port {port}" + (f", of {process.unit}" if process.unit else ""))
            )
    held = view.gpu_holders()
    my_gpus = {uuid for pid in mine for uuid in held.get(pid, [])}
    for pid, uuids in held.items():
        holder = view.process(pid)
        if holder is None or pid in mine:
            continue
        orphan = is_sglang(holder) and holder.parent == 1 and (holder.unit is None or _session(holder.unit))
        orphan = orphan and holder.container is None
        if orphan and my_gpus & set(uuids):
            take(holder, "an SGLang worker without a server, on a GPU of this service")
        else:
            bystanders.append(
                seen(holder, f"holds {len(uuids)} GPU(s)" + (f", of {holder.unit}" if holder.unit else ""))
            )
    return mine, bystanders


def _session(unit: str | None) -> bool:
    """True for what somebody started by hand: a login session's scope, not a service."""
    return unit is not None and unit.endswith(".scope")


class _Ladder:
    """One stop, with what it learned."""

    def __init__(self, host: Host, unit: str, port: int | None, say: Callable[[str], None]) -> None:
        self.host, self.unit, self.port, self.say = host, unit, port, say
        self.began = time.monotonic()
        self.rungs: list[Rung] = []
        self.known: dict[tuple[int, int], HostProcess] = {}
        self.why: dict[tuple[int, int], str] = {}
        self.cgroups: set[str] = set()
        self.bystanders: list[Seen] = []
        self.view: HostView | None = None
        self.containers: dict[str, ServingContainer] = {}
        self.described: dict[str, ServingContainer] = {}
        self.silent: dict[str, str] = {}

    def look(self) -> list[HostProcess]:
        """What is alive of the service now; whatever once was its stays its until it is gone."""
        view = self.host.view(sudo=True)
        inside = {p.container[1] for p in view.processes if p.alive and p.container and is_sglang(p)}
        if inside - set(self.described) - set(self.silent):
            found, self.silent = serving_containers(self.host, view)
            self.described |= found
        self.containers |= own_containers(view, self.unit, self.port, self.described)
        mine, self.bystanders = targets(view, self.unit, self.port, self.described)
        for process, why in mine.values():
            key = (process.pid, process.ticks)
            self.known.setdefault(key, process)
            self.why.setdefault(key, why)
        self.view = view
        alive = [p for pid, ticks in self.known if (p := view.process(pid, ticks))]
        self.bystanders = [b for b in self.bystanders if (b.pid, b.ticks) not in self.known]
        return alive

    def wait_gone(self, seconds: float) -> list[HostProcess]:
        """Waits until nothing of it is alive, systemd has no job for it and the port is free; returns what is left."""
        end = time.monotonic() + seconds
        while True:
            left = self.look()
            if not left and not self._port_held() or time.monotonic() > end:
                return left
            time.sleep(POLL_S)

    def _port_held(self) -> bool:
        assert_view = self.view
        if assert_view is None or self.port is None or not assert_view.port_is_held(self.port):
            return False
        owners = assert_view.port_owners(self.port)
        return not owners or any((p.pid, p.ticks) in self.known for p in owners)

    def rung(self, name: str, did: str, began: float, left: Sequence[HostProcess], outcome: str = "") -> None:
        """Records a rung that was climbed."""
        words = outcome or ("nothing of it is left" if not left else f"{len(left)} processes are left")
        self.rungs.append(
            Rung(
                name=name,
                did=did,
                seconds=round(time.monotonic() - began, 3),
                outcome=words,
                left=[self.as_seen(p) for p in left],
            )
        )
        self.say(f"{name}: {words}")

    def as_seen(self, process: HostProcess) -> Seen:
        """A process with the reason why it is the service's."""
        return seen(process, self.why.get((process.pid, process.ticks), ""))


def stop_service(
    host: Host,
    service: str,
    port: int | None = None,
    *,
    drain_s: float = DRAIN_S,
    kill_s: float = KILL_S,
    hypervisor: LXCHost | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> StopReport:
    """Stops a service and everything of it; see the module.

    Args:
        host: where it runs, and how it is reached.
        service: its unit, with or without `.service`. A unit that systemd doesn't know is no error: strays are still ended.
        port: where it serves.
        drain_s: seconds that requests get to end after SIGTERM.
        kill_s: seconds after SIGKILL until a process counts as one that withstands it.
        hypervisor: the container's own hypervisor, for the last rung and where `host` doesn't answer any more.
        say: told each step.

    Raises:
        NeedsRoot: it takes root; nothing was touched.
        HostUnreachable: neither the host nor its hypervisor answers.
    """
    unit = unit_name(service)
    way = _reachable(host, hypervisor, say)
    ladder = _Ladder(way, unit, port, say)
    state = service_state(way, unit)
    alive = ladder.look()
    before = [ladder.as_seen(p) for p in alive]
    if state.get("ControlGroup"):
        ladder.cgroups.add(state.get("ControlGroup"))
    if not alive and not state.active:
        return _report(ladder, state, before, "was_not_running")
    gpus_before = _gpu_of(ladder.view, ladder.known)
    left = _drain(ladder, state, alive, drain_s)
    if left or service_state(way, unit).active:
        left = _kill(ladder, left, kill_s)
    if left and hypervisor is not None:
        left = _from_hypervisor(ladder, hypervisor, left, kill_s)
    after = service_state(way, unit)
    gone = not left and not after.active and not ladder._port_held()
    report = _report(ladder, after, before, "stopped" if gone else "unkillable" if left else "not_stopped")
    return _with_gpu(report, gpus_before, ladder)


def _reachable(host: Host, hypervisor: LXCHost | None, say: Callable[[str], None]) -> Host:
    try:
        host.run(["true"], deadline_s=15.0, sudo=True)
    except WorkbookError as error:
        if hypervisor is None or hypervisor is host:
            raise
        say(f"{host.name} doesn't answer ({error.found}); through its hypervisor instead")
        hypervisor.run(["true"], deadline_s=30.0)
        return hypervisor
    return host


def _drain(ladder: _Ladder, state: ServiceState, alive: Sequence[HostProcess], drain_s: float) -> list[HostProcess]:
    """Rung 1: systemd's own stop, and SIGTERM to strays, with our deadline; requests in flight may end."""
    began = time.monotonic()
    did = []
    if state.known and state.active:
        systemctl(ladder.host, "stop", "--no-block", "--", ladder.unit, deadline_s=20.0).check("systemd takes the stop")
        did.append(f"systemctl stop {ladder.unit} (KillMode={state.get('KillMode')})")
    did += _by_engine(ladder, "stop", drain_s)
    strays = {
        p.pid: p.ticks
        for p in alive
        if p.unit != ladder.unit and not _has_parent_in(p, alive) and not (p.container and p.container[1] in ladder.containers)
    }
    if strays:
        taken = signal_processes(ladder.host, signal.SIGTERM, strays)
        did.append(f"SIGTERM to {', '.join(map(str, taken)) or 'none'} outside the unit")
    ladder.say(f"draining for up to {drain_s:.0f} s: {len(alive)} processes")
    left = ladder.wait_gone(drain_s)
    ladder.rung("drain", "; ".join(did) or "nothing to ask", began, left)
    return left


def _by_engine(ladder: _Ladder, verb: str, seconds: float) -> list[str]:
    """`docker stop` (its own SIGTERM, then SIGKILL at the deadline) or `docker kill` for each container of the service, by id."""
    did = []
    for identity, one in ladder.containers.items():
        options = ["--time", str(max(1, int(seconds)))] if verb == "stop" else []
        try:
            done = ladder.host.run([one.engine, verb, *options, identity], deadline_s=seconds + 20.0, sudo=True)
            ended = "" if done.ok else f" ended with {done.exit_code}: {done.error_text.strip()[-120:]}"
        except (HostUnreachable, NeedsRoot):
            raise
        except HostError as error:
            ended = f" failed: {error.found}"
        did.append(f"{one.engine} {verb} {one.name} ({identity[:12]}){ended}")
    return did


def _has_parent_in(process: HostProcess, others: Iterable[HostProcess]) -> bool:
    return any(other.pid == process.parent for other in others)


def _kill(ladder: _Ladder, left: Sequence[HostProcess], kill_s: float) -> list[HostProcess]:
    """Rung 2: SIGKILL to the control group and to each process, while systemd's stop is still pending; no revival."""
    began = time.monotonic()
    did = []
    now = service_state(ladder.host, ladder.unit)
    if now.known and now.active and now.get("Job") in ("", "0") and now.get("ActiveState") != "deactivating":
        # the stop job is over but the unit isn't: it was started again meanwhile, or waits to be
        systemctl(ladder.host, "stop", "--no-block", "--", ladder.unit).check("systemd takes the stop")
        did.append("systemctl stop again")
    if now.get("ControlGroup"):
        ladder.cgroups.add(now.get("ControlGroup"))
    if any(p.container and p.container[1] in ladder.containers for p in left):
        did += _by_engine(ladder, "kill", 10.0)
    for cgroup in sorted(ladder.cgroups):
        if kill_control_group(ladder.host, cgroup):
            did.append(f"SIGKILL to {cgroup}")
    rest = {p.pid: p.ticks for p in ladder.look()}
    if rest:
        taken = signal_processes(ladder.host, signal.SIGKILL, rest)
        did.append(f"SIGKILL to {', '.join(map(str, taken)) or 'none'}")
    remaining = ladder.wait_gone(kill_s)
    end = time.monotonic() + kill_s
    while not remaining and service_state(ladder.host, ladder.unit).active and time.monotonic() < end:
        if service_state(ladder.host, ladder.unit).get("SubState") == "auto-restart":
            systemctl(ladder.host, "stop", "--", ladder.unit, deadline_s=30.0)
            did.append("its pending restart was called off")
        time.sleep(POLL_S)
        remaining = ladder.look()
    ladder.rung("kill", "; ".join(did) or "nothing to kill", began, remaining)
    return remaining


def _from_hypervisor(
    ladder: _Ladder, hypervisor: LXCHost, left: Sequence[HostProcess], kill_s: float
) -> list[HostProcess]:
    """Rung 3: the same processes by their pids on the hypervisor, told by start, command line and container."""
    began = time.monotonic()
    outside = hypervisor.hypervisor.view(sudo=True)
    wanted = {(p.ticks, tuple(p.argv)) for p in left}
    inside = [
        p for p in outside.processes
        if p.alive and (p.ticks, tuple(p.argv)) in wanted and p.container is not None and p.container[1] == hypervisor.container
    ]  # fmt: skip
    taken = signal_processes(hypervisor.hypervisor, signal.SIGKILL, {p.pid: p.ticks for p in inside}) if inside else []
    remaining = ladder.wait_gone(kill_s)
    did = f"SIGKILL on {hypervisor.hypervisor.name} to pids {', '.join(map(str, taken)) or 'none'} of container {hypervisor.container}"
    ladder.rung("hypervisor", did, began, remaining)
    return remaining


def _report(ladder: _Ladder, state: ServiceState, before: list[Seen], word: str) -> StopReport:
    view = ladder.view
    port_free: bool | None = None
    port_reason: str | None = None
    if ladder.port is not None and view is not None:
        port_free = not view.port_is_held(ladder.port)
        if not port_free:
            owners = view.port_owners(ladder.port)
            port_reason = (
                ", ".join(f"pid {p.pid} ({' '.join(p.argv)[:80]}, {p.unit or 'no unit'})" for p in owners)
                or "its owner may not be read"
            )
    left = [ladder.as_seen(p) for p in (ladder.look() if word != "was_not_running" else [])]
    return StopReport(
        host=ladder.host.name, unit=ladder.unit, port=ladder.port, state=word, seconds=round(time.monotonic() - ladder.began, 3),
        before=before, rungs=ladder.rungs, left=left, bystanders=ladder.bystanders,
        containers=list(ladder.containers.values()), port_free=port_free, port_reason=port_reason,
        service=state.words(), do=_advice(ladder, left) if left else None,
    )  # fmt: skip


def _advice(ladder: _Ladder, left: Sequence[Seen]) -> str:
    """What a person can do about processes that withstood SIGKILL, with where they sleep."""
    words = []
    for one in left[:5]:
        where = ""
        with contextlib.suppress(HostError):
            where = ladder.host.read_file(f"/proc/{one.pid}/wchan", sudo=True).decode("ascii", "replace").strip("\0\n ")
        words.append(f"pid {one.pid} (state {one.state}{f', sleeps in {where}' if where and where != '0' else ''})")
    return (
        f"{', '.join(words)}: SIGKILL is pending until the kernel lets go (a storage or GPU driver call that doesn't return). Free what "
        "it waits for (mount, device, NFS server); if that is the GPU driver, reset the GPU when nobody else uses it; else reboot the host"
    )


def _gpu_of(view: HostView | None, known: Mapping[tuple[int, int], HostProcess]) -> dict[str, float | None]:
    """MiB by GPU uuid that processes of the service hold; None where the driver gives no number."""
    held: dict[str, float | None] = {}
    for gpu in view.gpus if view else []:
        pids = {pid for pid, _ in known} & {*gpu.users, *gpu.holders}
        if pids:
            numbers = [gpu.users.get(pid) for pid in pids]
            held[gpu.uuid] = sum(n for n in numbers if n is not None) if any(n is not None for n in numbers) else None
    return held


def _with_gpu(report: StopReport, before: Mapping[str, Any], ladder: _Ladder) -> StopReport:
    view = ladder.view
    if view is None or not view.gpus:
        return report.model_copy(update={"gpu_reason": (view.gpus_reason if view else None) or "not looked at"})
    if not before:
        return report.model_copy(update={"gpu_reason": "none of its processes was known to hold a GPU"})
    known = {pid for pid, _ in ladder.known}
    still = [g.uuid for g in view.gpus if known & {*g.users, *g.holders}]
    return report.model_copy(update={
        "gpu_back": not still, "state": report.state if not still else "not_stopped" if report.gone else report.state,
        "gpu_reason": f"held before: {', '.join(f'{u[:12]} {m or 0:.0f} MiB' for u, m in before.items())}; now "
        + (f"still on {', '.join(still)}" if still else "none of it"),
    })  # fmt: skip
