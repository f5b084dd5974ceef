"""Proof that a service runs as planned: from this start's own journal, from the server itself, from the host.

Each claim is pass, fail or unknown, with what was expected, what was found, and the raw file that shows it. A line of an
earlier start can't count: the journal is asked for one invocation id. Nothing here changes anything.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from lib.audit.evidence import environ_facts, gather, log_facts, server_info_facts
from lib.audit.rules import audit
from lib.deploy.service import ServiceState, service_state, unit_name
from lib.deploy.stopping import ServingContainer, own_containers, seen, serving_containers
from lib.errors import ServerError, WorkbookError
from lib.hosts import local
from lib.hosts.base import Host, LocalHost
from lib.hosts.view import HostView
from lib.records import Measured, Record
from lib.server.answers import read_answer
from lib.server.control import Control
from lib.server.launch import VOLATILE
from lib.server.log import read_log
from lib.server.log_records import ServerLog
from lib.server.redact import redact_text

#: Bytes of one start's journal that are read: its beginning and its end.
JOURNAL_BYTES = 32 << 20
#: A pool may differ from what the measured server had by this share (what else was on the GPU moves it).
POOL_TOLERANCE = 0.01
HTTP_OK, HTTP_REFUSED = 200, (401, 403)
GPU_TOLERANCE = 0.05
#: Measures output tokens/s on the server; given a folder for its raw record.
Bench = Callable[[Path], Measured]


class Expectation(Record):
    """What the configuration must show where it runs; None and {} claim nothing."""

    port: int
    address: str = "127.0.0.1"
    sglang_version: str | None = None
    kv_cache_dtype: str | None = None
    max_total_num_tokens: int | None = None
    flags: dict[str, Any] = {}
    backends: dict[str, str] = {}
    gpu_memory_mib: float | None = None
    prompt: str | None = None
    expect: str | None = None
    max_new_tokens: int = 8
    output_tokens_per_s: tuple[float, float] | None = None
    accept_length: float | None = None
    environment: dict[str, str] = {}
    api_key_env: str | None = None


class Claim(Record):
    """One claim about a running service. `status`: pass, fail or unknown."""

    id: str
    claim: str
    status: str
    expected: str
    found: str
    evidence: str | None = None
    line: int | None = None


class Proof(Record):
    """Everything that was looked at in one go; `proven` needs every claim that must hold, and none that failed."""

    host: str
    unit: str
    invocation: str | None
    at: float
    claims: list[Claim]
    version: str | None = None
    main_pid: int | None = None
    main_ticks: int | None = None
    containers: list[ServingContainer] = []
    facts: dict[str, Any] = {}

    @property
    def failed(self) -> list[Claim]:
        return [c for c in self.claims if c.status == "fail"]

    @property
    def proven(self) -> bool:
        """No claim failed, and those without which nothing is proven passed."""
        passed = {c.id for c in self.claims if c.status == "pass"}
        return not self.failed and passed >= NEEDED


#: Claims that must pass, whatever else is unknown.
NEEDED = frozenset({"running", "port-owner", "ready", "answers"})


@contextlib.contextmanager
def reach(host: Host, expected: Expectation) -> Iterator[str]:
    """A base URL that leads from here to the server, while the context lasts."""
    address = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1", "localhost": "127.0.0.1"}.get(expected.address, expected.address)
    if isinstance(host, LocalHost):
        yield f"http://{f'[{address}]' if ':' in address else address}:{expected.port}"
        return
    with host.forward(expected.port, address) as port:
        yield f"http://127.0.0.1:{port}"


def journal_of(host: Host, unit: str, invocation: str) -> str:
    """The journal of one start of a unit, as text, redacted: its own lines and systemd's about it."""
    done = host.run(
        [
            "journalctl", "--no-pager", "--quiet", "--output=short-iso", f"_SYSTEMD_INVOCATION_ID={invocation}", "+",
            f"INVOCATION_ID={invocation}",
        ],
        deadline_s=120.0, sudo=True, limit=JOURNAL_BYTES,
    )  # fmt: skip
    return redact_text(done.check("the journal is read").text)


def prove(
    host: Host,
    service: str,
    expected: Expectation,
    folder: Path,
    bench: Bench | None = None,
    api_key: str | None = None,
) -> Proof:
    """Looks at a service and judges each claim; raw answers go into `folder`.

    Args:
        bench: measures output tokens/s, where the expectation has an interval.
        api_key: the server's key, where no variable of this process holds it.

    Raises:
        BadInput: the server has a key, and neither `api_key` nor the variable gives it.
        HostUnreachable, NeedsRoot: the host can't be looked at. A server that misbehaves is a failed claim, never an error.
    """
    unit = unit_name(service)
    folder.mkdir(parents=True, exist_ok=True)
    state = service_state(host, unit)
    _keep(folder, "service.json", json.dumps(state.properties, indent=1))
    view = host.view(sudo=True)
    containers = own_containers(view, unit, expected.port, serving_containers(host, view)[0])
    journal = journal_of(host, unit, state.invocation) if state.invocation else ""
    _keep(folder, "journal.log", journal)
    log = read_log(line.encode("utf-8", "replace") for line in journal.splitlines())
    claims = [_running(state), _port_owner(view, state, expected, containers)]
    info: dict[str, Any] | None = None
    with reach(host, expected) as url:
        key = api_key if expected.api_key_env else None
        control = Control(url, expected.api_key_env, timeout_s=20.0, api_key=key)
        claims.append(_ready(control, log))
        try:
            info = control.server_info()
            _keep(folder, "server_info.json", json.dumps(info, indent=1))
        except ServerError as error:
            claims.append(
                _claim("server-info", "/server_info says what runs", False, "an answer", str(error.found), None)
            )
        claims.append(_answers(control, expected, folder))
        if expected.api_key_env:
            claims.append(_key_needed(url))
        if bench is not None and expected.output_tokens_per_s is not None:
            claims.append(_throughput(bench, folder, expected.output_tokens_per_s))
    claims += _from_log(log, expected, journal)
    claims += _from_info(info, expected)
    claims.append(_gpu_memory(view, unit, expected, containers))
    claims.append(_audited(log, journal, info, expected, folder))
    main = view.process(state.main_pid) if state.main_pid else None
    proof = Proof(
        host=host.name, unit=unit, invocation=state.invocation, at=time.time(), claims=claims,
        version=(info or {}).get("version") or log.version, main_pid=main.pid if main else None, main_ticks=main.ticks if main else None,
        containers=list(containers.values()), facts=served_facts(log, info),
    )  # fmt: skip
    _keep(folder, "proof.json", proof.model_dump_json(indent=1))
    return proof


def served_facts(log: ServerLog, info: dict[str, Any] | None) -> dict[str, Any]:
    """What a later look is compared with: resolved arguments, allocated dtype, tokens, acceptance, retractions."""
    pools = [p for p in log.kv_pools if p.role == "target"]
    state = next(iter((info or {}).get("internal_states") or []), None)
    measured = state.get("avg_spec_accept_length") if isinstance(state, dict) else None
    return {
        "arguments": {k: v for k, v in (info or {}).items() if _lasting(k, v)},
        "version": (info or {}).get("version") or log.version,
        "kv_cache_dtype": ",".join(sorted({(p.dtype or "").removeprefix("torch.") for p in pools if p.dtype})) or None,
        "max_total_num_tokens": (info or {}).get("max_total_num_tokens") or (log.capacity.max_total_num_tokens if log.capacity else None),
        "accept_length": measured if measured is not None else (log.speculation.last_accept_len if log.speculation else None),
        "retractions": log.retracted_requests or log.retractions,
    }


def _lasting(key: str, value: Any) -> bool:
    """True for what a server was told, not for what changes while it runs or from start to start."""
    simple = isinstance(value, (str, int, float, bool, type(None)))
    return simple and key not in VOLATILE and key not in ("version", "max_total_num_tokens", "last_gen_throughput", "random_seed")


def _keep(folder: Path, name: str, text: str) -> None:
    local.write_atomic(folder / name, text)


def _claim(
    key: str, words: str, status: bool | None, expected: str, found: str, evidence: str | None, line: int | None = None
) -> Claim:
    name = "unknown" if status is None else "pass" if status else "fail"
    return Claim(id=key, claim=words, status=name, expected=expected, found=found[:400], evidence=evidence, line=line)


def _running(state: ServiceState) -> Claim:
    good = state.get("ActiveState") == "active" and state.main_pid is not None
    return _claim(
        "running", "systemd runs the service", good, "active, with a main process", state.words(), "service.json"
    )


def _port_owner(
    view: HostView, state: ServiceState, expected: Expectation, containers: dict[str, ServingContainer]
) -> Claim:
    owners = view.port_owners(expected.port)
    words = "the port belongs to a process of this service, and to no other"
    want = f"processes in {state.unit}"
    if not view.port_is_held(expected.port):
        return _claim("port-owner", words, False, f"a listener on {expected.port}", "nobody listens", None)
    publishing = next((c for c in containers.values() if expected.port in c.ports), None)
    if publishing is not None:  # the engine's proxy, or nobody's process at all, holds a published port
        image = ", ".join(publishing.digests) or publishing.image_id or publishing.image
        found = f"published by {publishing.engine} container {publishing.name} ({publishing.id[:12]}), image {image}"
        return _claim("port-owner", words, True, want, found, None)
    if not owners:
        return _claim("port-owner", words, None, state.unit, "its owner may not be read", None)
    foreign = [p for p in owners if p.unit != state.unit]
    found = "; ".join(f"pid {p.pid} in {p.unit or 'no unit'}: {seen(p).argv[:100]}" for p in foreign or owners)
    return _claim("port-owner", words, not foreign, want, found, None)


def _ready(control: Control, log: ServerLog) -> Claim:
    code = control.health(timeout_s=20.0)
    line = log.ready.line_no if log.ready else None
    return _claim(
        "ready",
        "it answers /health with 200",
        code == HTTP_OK,
        "200",
        str(code or "no answer"),
        "journal.log" if line else None,
        line,
    )


def _answers(control: Control, expected: Expectation, folder: Path) -> Claim:
    words = "it answers a request, not degenerate and as expected"
    body = {
        "text": expected.prompt or "def main():", "sampling_params": {"temperature": 0, "max_new_tokens": expected.max_new_tokens},
    }  # fmt: skip
    try:
        raw = control.generate(body, timeout_s=120.0)
    except ServerError as error:
        return _claim("answers", words, False, "an answer of /generate", str(error.found), None)
    _keep(folder, "answer.json", json.dumps(raw, indent=1))
    answer = read_answer(raw, expected.expect)
    wrong = answer.degenerate or ("another text" if answer.correct is False else None)
    want = f"begins with {expected.expect!r}" if expected.expect else "a text that is no garbage"
    return _claim(
        "answers", words, wrong is None, want, f"{answer.text[:80]!r}{f': {wrong}' if wrong else ''}", "answer.json"
    )


def _key_needed(url: str) -> Claim:
    """A key that protects nothing is worse than none: somebody relies on it."""
    words = "without its API key it refuses"
    try:
        Control(url, timeout_s=20.0).server_info()
    except ServerError as error:
        refused = any(str(error.found).startswith(str(code)) for code in HTTP_REFUSED)
        return _claim("key-needed", words, True if refused else None, "401 or 403", str(error.found)[:80], None)
    return _claim("key-needed", words, False, "401 or 403", "it answers /server_info to anybody", None)


#: Two launches of one configuration differ in throughput by more than an interval taken within one of them says. Measured
#: (benchmarks/launch_spread.py, SGLang 0.5.15.post1 on 2 CPU cores, nothing else running, C=1): 8 launches of a tiny model had a
#: standard deviation of 3.6%, 6 of a 135M model 1.8%. Judged by the interval alone, an unchanged server failed in 11 of 56 and
#: in 2 of 30 pairs of launches; with 5% below it allowed in 1 of 56 and in 0 of 30. Not measured on a GPU.
LAUNCH_FRAC = 0.05


def _throughput(bench: Bench, folder: Path, interval: tuple[float, float]) -> Claim:
    """Fails where all of the new interval is slower than all of the measured one by more than two launches may differ.

    Faster, and slower by less than LAUNCH_FRAC, is unknown, not a failure: both intervals are of one launch each.
    """
    words = "a short benchmark is within the interval that notebook 03 measured"
    want = f"{interval[0]:.4g} to {interval[1]:.4g} tok/s"
    try:
        made = bench(folder / "bench")
    except WorkbookError as error:
        return _claim("throughput", words, None, want, str(error), None)
    if not isinstance(made.value, (int, float)):
        return _claim("throughput", words, None, want, made.reason or "no value", "bench/level.jsonl")
    low, high = (made.value if x is None else x for x in (made.low, made.high))
    found = f"{made.value:.4g} tok/s ({low:.4g} to {high:.4g}, n={made.n})"
    inside = interval[0] <= made.value <= interval[1]
    status = True if inside else False if high < interval[0] * (1 - LAUNCH_FRAC) else None
    return _claim("throughput", words, status, want, found, "bench/level.jsonl")


def _from_log(log: ServerLog, expected: Expectation, journal: str) -> list[Claim]:
    """Claims that this start's own lines decide."""
    if not journal.strip():
        reason = "the journal has no line of this start (rotated, or logging goes elsewhere)"
        return [_claim("log", "this start's journal can be read", None, "its lines", reason, "journal.log")]
    out = []
    pools = [p for p in log.kv_pools if p.role == "target"]
    first = pools[0] if pools else None
    if expected.kv_cache_dtype is not None:
        names = sorted({(p.dtype or "").removeprefix("torch.") for p in pools if p.dtype})
        status = None if not names else names == [expected.kv_cache_dtype]
        found = ", ".join(names) or "no line of this start tells it"
        line = first.line_no if first else None
        words = "the KV cache is allocated in the planned dtype"
        out.append(_claim("kv-dtype", words, status, expected.kv_cache_dtype, found, "journal.log", line))
    if expected.max_total_num_tokens is not None:
        got = log.capacity.max_total_num_tokens if log.capacity else None
        near = None if got is None else abs(got / expected.max_total_num_tokens - 1) <= POOL_TOLERANCE
        want = f"{expected.max_total_num_tokens} tokens within {POOL_TOLERANCE:.0%}"
        out.append(_claim("kv-tokens", "the KV pool holds what was measured", near, want, str(got or "no line tells it"), "journal.log",
                          log.capacity.line_no if log.capacity else None))  # fmt: skip
    for kind, name in sorted(expected.backends.items()):
        taken = {str(b.taken) for b in log.backends if b.kind == kind and b.taken and b.known_by in ("line", "trace")}
        status = None if not taken else taken == {name}
        out.append(
            _claim(
                f"backend-{kind}",
                f"the {kind} backend is the planned one",
                status,
                name,
                ", ".join(sorted(taken)) or "no line tells it",
                "journal.log",
            )
        )
    return out


def _from_info(info: dict[str, Any] | None, expected: Expectation) -> list[Claim]:
    """Claims that /server_info decides; it repeats what was asked, so it confirms flags, never a dtype."""
    out = []
    if expected.sglang_version is not None:
        version = (info or {}).get("version")
        status = None if version is None else version == expected.sglang_version
        out.append(
            _claim(
                "version",
                "the server is of the measured version",
                status,
                expected.sglang_version,
                str(version or "not told"),
                "server_info.json",
            )
        )
    if expected.flags and info is not None:
        wrong = {k: info.get(k) for k, v in expected.flags.items() if k in info and info.get(k) != v}
        missing = sorted(k for k in expected.flags if k not in info)
        status = False if wrong else None if len(missing) == len(expected.flags) else True
        found = ", ".join(f"{k}={v!r} instead of {expected.flags[k]!r}" for k, v in wrong.items()) or "all as asked"
        found += f"; not told: {', '.join(missing)}" if missing else ""
        out.append(
            _claim(
                "flags",
                "/server_info repeats the measured flags",
                status,
                f"{len(expected.flags)} flags",
                found,
                "server_info.json",
            )
        )
    return out


def _gpu_memory(
    view: HostView, unit: str, expected: Expectation, containers: dict[str, ServingContainer]
) -> Claim:
    words = "its GPU memory is as predicted"
    want = (
        "not predicted"
        if expected.gpu_memory_mib is None
        else f"{expected.gpu_memory_mib:.0f} MiB within {GPU_TOLERANCE:.0%}"
    )
    if not view.gpus:
        return _claim("gpu-memory", words, None, want, view.gpus_reason or "no GPU", None)
    pids = {p.pid for p in view.processes if p.alive and (p.unit == unit or (p.container and p.container[1] in containers))}
    numbers = [mib for gpu in view.gpus for pid, mib in gpu.users.items() if pid in pids and mib is not None]
    if not numbers:
        return _claim(
            "gpu-memory", words, None, want, view.gpus_reason or "the driver names no memory of its processes", None
        )
    used = sum(numbers)
    status = None if expected.gpu_memory_mib is None else abs(used / expected.gpu_memory_mib - 1) <= GPU_TOLERANCE
    return _claim("gpu-memory", words, status, want, f"{used:.0f} MiB", None)


def _audited(log: ServerLog, journal: str, info: dict[str, Any] | None, expected: Expectation, folder: Path) -> Claim:
    """The accuracy audit of what runs: a finding of level error fails."""
    words = "the accuracy audit of what runs finds no error"
    groups = []
    if journal.strip():
        groups.append(log_facts(journal.encode("utf-8", "replace").splitlines(), "journal.log"))
    if info is not None:
        groups.append(server_info_facts(info, "server_info.json"))
    if expected.environment:
        groups.append(environ_facts("\n".join(f"{k}={v}" for k, v in expected.environment.items()), "plan"))
    if not groups:
        return _claim("audit", words, None, "no finding of level error", "nothing to audit", None)
    report = audit(gather(*groups))
    _keep(folder, "audit.json", report.model_dump_json(indent=1))
    heavy = [f for f in report.findings if f.level == "error"]
    found = "; ".join(f"{f.id}: {f.title}" for f in heavy) or f"{len(report.findings)} findings, none of level error"
    return _claim("audit", words, not heavy, "no finding of level error", found, "audit.json")


def proof_rows(claims: Iterable[Claim]) -> list[dict[str, Any]]:
    """Rows of a table: the claims in order."""
    return [
        {
            "claim": c.claim, "status": c.status, "expected": c.expected, "found": c.found,
            "evidence": f"{c.evidence or ''}{f':{c.line}' if c.line else ''}",
        }
        for c in claims
    ]  # fmt: skip
