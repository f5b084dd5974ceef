"""Looks at a proven service without changing anything, for `lib.deploy.drift` to compare with its last proof.

Nothing runs on the host between two looks; each asks systemd, the journal, the server and the process table once.
"""

from __future__ import annotations

import json
import time
from typing import Any

from lib.deploy.deployment import STATE_FOLDER, UNIT_FOLDER, kept_plan, key_on
from lib.deploy.drift import Sight, WatchReport, compare, trouble
from lib.deploy.proof import JOURNAL_BYTES, Expectation, journal_of, reach, served_facts
from lib.deploy.service import ServiceState, service_state, unit_name
from lib.deploy.stopping import own_containers, seen, serving_containers
from lib.deploy.unit import parse_unit
from lib.errors import BadInput, HostError, HostTimeout, HostUnreachable, NeedsRoot, ServerError, WorkbookError
from lib.hosts.base import Host
from lib.hosts.view import HostView
from lib.server.control import Control
from lib.server.log import read_log
from lib.server.log_records import ServerLog
from lib.server.redact import redact_text

_VERSION = "import importlib.metadata as m; print(m.version('sglang'))"


def record_of(host: Host, service: str, name: str = "proven.json") -> dict[str, Any] | None:
    """A record of ours on a host (root's), None if it isn't there.

    Raises:
        HostUnreachable, NeedsRoot: it can't be looked at.
    """
    base = f"{STATE_FOLDER}/{unit_name(service).removesuffix('.service')}"
    if host.entry(f"{base}/{name}", sudo=True) is None:
        return None
    try:
        return dict(json.loads(host.read_file(f"{base}/{name}", sudo=True)))
    except ValueError as error:
        raise HostError(f"{base}/{name} on {host.name} is JSON", str(error), "prove the service again") from error


def watch(host: Host, service: str, api_key: str | None = None) -> WatchReport:
    """One look at a service, compared with its last proof.

    Raises:
        BadInput: it was never proven, or its key is not known.
        HostError: the host can't be looked at; that is no drift and no "all well".
    """
    record = record_of(host, service)
    if record is None:
        raise BadInput(f"a proven rollout of {unit_name(service)} on {host.name}", "no record of one", "workbook deploy first")
    sight = look(host, service, record, api_key)
    return WatchReport(
        host=host.name, unit=unit_name(service), plan=str(record.get("id")), proven_at=float(record.get("at") or 0), at=time.time(),
        rows=compare(record, sight),
    )  # fmt: skip


def look(host: Host, service: str, record: dict[str, Any], api_key: str | None = None) -> Sight:
    """What is there now; what can't be known has its reason."""
    unit = unit_name(service)
    plan = kept_plan(record.get("plan") or {})
    expected, api_key = plan.expectation, api_key or key_on(host, plan)
    reasons: dict[str, str] = {}
    state, view = service_state(host, unit), host.view(sudo=True)
    journal = journal_of(host, unit, state.invocation) if state.invocation else ""
    log = read_log(line.encode("utf-8", "replace") for line in journal.splitlines())
    if not journal.strip():
        reasons |= dict.fromkeys(("kv-dtype", "retractions"), "the journal has no line of this start")
    health, info = _ask(host, expected, api_key, reasons)
    facts = served_facts(log, info)
    containers = own_containers(view, unit, expected.port, serving_containers(host, view)[0])
    mine = {p.pid for p in view.processes if p.alive and (p.unit == unit or (p.container and p.container[1] in containers))}
    owners = view.port_owners(expected.port)
    published = any(expected.port in c.ports for c in containers.values())
    current = record_of(host, service, "current.json")
    text = _unit_text(host, unit)
    return Sight(
        unit=unit, unit_text=text, dropins=state.get("DropInPaths").split(), needs_reload=state.get("NeedDaemonReload") == "yes",
        active=state.get("ActiveState"), invocation=state.invocation, restarts=_whole(state.get("NRestarts")),
        version_running=facts["version"], version_on_disk=_on_disk(host, text, reasons), kv_cache_dtype=facts["kv_cache_dtype"],
        arguments=facts["arguments"], max_total_num_tokens=facts["max_total_num_tokens"], accept_length=facts["accept_length"],
        retractions=_retractions(log, journal), journal_errors=_errors(host, unit, record, state, reasons), health=health,
        port_owned=None if view.port_is_held(expected.port) and not owners and not published
        else published or bool(owners) and all(p.pid in mine for p in owners),
        port_holders=[seen(p) for p in owners if p.pid not in mine and not published],
        gpu_strangers=_strangers(view, mine, reasons), gpu_mib=_gpu_mib(view, mine),
        image=next((c.image_id for c in containers.values()), None),
        unfinished=f"plan {current['id']} at step {current['step']}, by {current['by']}" if current else None, reasons=reasons,
    )  # fmt: skip


def _ask(
    host: Host, expected: Expectation, api_key: str | None, reasons: dict[str, str]
) -> tuple[int | None, dict[str, Any] | None]:
    """The status of /health and the answer of /server_info."""
    with reach(host, expected) as url:
        control = Control(url, expected.api_key_env, timeout_s=20.0, api_key=api_key if expected.api_key_env else None)
        health = control.health(timeout_s=20.0)
        try:
            return health, control.server_info()
        except ServerError as error:
            words = f"/server_info: {error.found}"
            reasons |= dict.fromkeys(("version-running", "arguments", "max_total_num_tokens", "accept_length"), words)
            return health, None


def _unit_text(host: Host, unit: str) -> str | None:
    try:
        return host.read_file(f"{UNIT_FOLDER}/{unit}", sudo=True).decode("utf-8", "replace")
    except (HostUnreachable, HostTimeout, NeedsRoot):
        raise
    except HostError:
        return None


def _on_disk(host: Host, text: str | None, reasons: dict[str, str]) -> str | None:
    """SGLang's version in the environment that the unit would start next."""
    commands = parse_unit(text).commands("ExecStart") if text else ()
    python = commands[0].argv[0] if commands else ""
    if not python.rsplit("/", 1)[-1].startswith("python"):
        reasons["version-on-disk"] = "the unit's command is no Python of the host"
        return None
    path = parse_unit(text or "").environment().get("PYTHONPATH")
    try:
        done = host.run([python, "-c", _VERSION], deadline_s=60.0, env={"PYTHONPATH": path} if path else None)
    except HostUnreachable:
        raise
    except HostError as error:
        reasons["version-on-disk"] = str(error.found)
        return None
    if not done.ok:
        reasons["version-on-disk"] = redact_text((done.error_text.strip().splitlines() or ["no answer"])[-1])
        return None
    return done.text.strip()


def _retractions(log: ServerLog, journal: str) -> int | None:
    return (log.retracted_requests or log.retractions) if journal.strip() else None


def _errors(host: Host, unit: str, record: dict[str, Any], state: ServiceState, reasons: dict[str, str]) -> list[str]:
    """Lines of trouble since the proof, of whichever start: the host's own cursor says since when, not a clock."""
    cursor = record.get("cursor")
    since = [f"--after-cursor={cursor}"] if cursor else [f"_SYSTEMD_INVOCATION_ID={state.invocation}"]
    match = [f"_SYSTEMD_UNIT={unit}", "+", f"UNIT={unit}"] if cursor else []
    words = ["journalctl", "--no-pager", "--quiet", "--output=short-iso", *since, *match]
    try:
        done = host.run(words, deadline_s=120.0, sudo=True, limit=JOURNAL_BYTES)
    except (HostUnreachable, NeedsRoot):
        raise
    except WorkbookError as error:
        reasons["journal"] = str(error.found)
        return []
    if not done.ok:
        reasons["journal"] = redact_text(done.error_text.strip()[-200:]) or f"journalctl ended with {done.exit_code}"
    return trouble(redact_text(done.text).splitlines())


def _strangers(view: HostView, mine: set[int], reasons: dict[str, str]) -> list[Any]:
    """Others on the GPUs that this service holds."""
    if not view.gpus:
        reasons["gpu"] = view.gpus_reason or "no GPU"
        return []
    held = [g for g in view.gpus if mine & {*g.users, *g.holders}]
    pids = {pid for g in held for pid in {*g.users, *g.holders}} - mine
    return [seen(p, "on a GPU of this service") for p in view.processes if p.pid in pids and p.alive]


def _gpu_mib(view: HostView, mine: set[int]) -> float | None:
    numbers = [mib for g in view.gpus for pid, mib in g.users.items() if pid in mine and mib is not None]
    return sum(numbers) if numbers else None


def _whole(text: str) -> int | None:
    return int(text) if text.isdigit() else None
