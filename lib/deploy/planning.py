"""From a profile, and a run that measured it, to a plan: the unit, what it must show, and what speaks against it.

The unit's command comes from the same argv function as the sweep, the benchmark and notebook 06; what it must show comes
from what the run's notebooks recorded; objections come from the accuracy audit and from the capacity of the planned
configuration, before anything is touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.audit.evidence import facts_of_checkpoint, flags_facts, gather, gpu_fact, version_fact
from lib.audit.rules import audit
from lib.deploy.deployment import Deployment, DeployPlan, Objection
from lib.deploy.proof import Expectation, reach, served_facts
from lib.deploy.rollout import plain_command, rendered, service_port
from lib.errors import BadInput, BadParams, HostError, HostUnreachable, WorkbookError, WrongHostKey
from lib.hosts.base import Host, LocalHost
from lib.hosts.connect import shared_host
from lib.hosts.lxc import LXCHost
from lib.hosts.remote_client import HostSender
from lib.hosts.view import HostView
from lib.load import metrics
from lib.load.benchmark import build_workload
from lib.load.client import read_level, run_level
from lib.load.workloads import requests_per_level
from lib.migrations import notebook_result
from lib.model.checkpoint import read_checkpoint
from lib.model.facts import Checkpoint
from lib.model.memory import predict_pools
from lib.model.quantization import resolve_kv_cache_dtype
from lib.params import DeployParams, Profile, load_notebook, load_profile
from lib.records import Measured, NotebookResult, ServerIdentity
from lib.server.control import Control
from lib.server.log import read_log
from lib.server.log_records import ServerLog
from lib.server.remote import Place, calibration_for, place_of, remote_spec
from lib.server.spec import server_spec

GIB_IN_MIB = 1024.0
#: Letters of a measured greedy answer that must come again, where the profile expects none.
ANSWER_LETTERS = 12
#: Notebooks whose server is the one to deploy, the best first.
SERVED_BY = ("03", "06", "01")


@dataclass
class Prepared:
    """A plan with its host and the secrets that never stand in it."""

    plan: DeployPlan
    place: Place
    params: DeployParams
    profile: Profile
    environment: str | None
    api_key: str | None
    level: dict[str, Any] | None
    hypervisor: LXCHost | None

    def deployment(self, folder: Path, say: Any = lambda _: None) -> Deployment:
        """The rollout of this plan."""
        return Deployment(
            self.place.host, self.plan, folder, environment=self.environment, api_key=self.api_key, hypervisor=self.hypervisor, say=say,
            bench=self.bench if self.level else None,
        )  # fmt: skip

    def bench(self, folder: Path) -> Measured:
        """Output tokens/s of one level as notebook 03 sent it, sent again to the deployed server."""
        level, expected = dict(self.level or {}), self.plan.expectation
        made = build_workload(level["dataset"], level["count"], level["input_len"], level["output_len"], level["seed"], None)
        host, key = self.place.host, self.api_key
        with reach(host, expected) as near, _variable(expected.api_key_env, key):
            control = Control(near, expected.api_key_env, api_key=key if expected.api_key_env else None)
            control.flush_cache()
            sender, url, calibration = None, near, None
            if not isinstance(host, LocalHost) and self.place.params.load_client == "host":
                name = expected.api_key_env
                python = self.place.client_python(None if self.params.container else self.profile.server.python)
                sender = HostSender(host, python, {name: key or os.environ[name]} if name else None)
                url = f"http://127.0.0.1:{expected.port}"
            elif self.profile.host.remote and self.place.params == self.profile.host:  # what the way adds is part of the result
                calibration = calibration_for(self.profile.host.model_dump(), level["concurrency"], level["api"])
            folder.mkdir(parents=True, exist_ok=True)
            file = run_level(
                url, level["api"], made.requests, out=folder / "level.jsonl", concurrency=level["concurrency"],
                model=control.served_model_name(), warmup=made.warmup, workload=made.describe(), sender=sender,
                api_key_env=expected.api_key_env, calibration=calibration,
            )  # fmt: skip
        return metrics.level_summary(read_level(file))["output_tokens_per_s"]


@contextlib.contextmanager
def _variable(name: str | None, value: str | None) -> Iterator[None]:
    """A variable of this process for a time, where it isn't set."""
    if not name or value is None or os.environ.get(name):
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


def place_for(profile: Profile, params: DeployParams) -> Place:
    """The profile's host, this machine where it names none; through 06's `hypervisor` where the host doesn't answer.

    Raises:
        WrongHostKey: somebody else answers; no other way is tried then.
        HostUnreachable: neither answers.
    """
    place = place_of(profile.host) or Place(LocalHost(), profile.host)
    if params.hypervisor is None:
        return place
    try:
        place.host.run(["true"], deadline_s=20.0)
    except WrongHostKey:
        raise
    except HostUnreachable:
        other = shared_host(params.hypervisor)
        if other is None:
            raise
        other.run(["true"], deadline_s=30.0)
        return Place(other, params.hypervisor)
    return place


def prepare(
    profile: str,
    run: Path | None = None,
    overrides: Mapping[str, str] | None = None,
    environment_text: str | None = None,
    notebook: Mapping[str, Any] | None = None,
) -> Prepared:
    """The plan of a profile's service on its host.

    Args:
        profile: a name under params/, or a folder.
        run: a run's folder; what its notebooks measured is what the deployed server must show.
        overrides: objections that do not hold, each with its reason; on top of those of 06.yaml.
        environment_text: NAME=value lines for the unit's environment file, the API key's variable among them.
        notebook: parameters of notebook 06 in the place of 06.yaml.

    Raises:
        BadInput, BadParams: parameters, checkpoint, run or environment that can't be used.
        HostError: the host can't be asked.
    """
    params = DeployParams.model_validate(dict(notebook) if notebook is not None else load_notebook(profile, "06"))
    loaded = load_profile(params.profile, params.server, params.known_answer)
    server = loaded.server
    if server.attach:
        raise BadParams("a server whose command is known", "server.attach", "deploy a profile with server.model")
    place = place_for(loaded, params)
    host, view = place.host, place.view()
    if params.container is not None and server.sglang_version is None:
        raise BadParams("server.sglang_version (the image's)", "none", "say which SGLang the image holds")
    remote = not isinstance(host, LocalHost)
    spec = remote_spec("service", server, place) if remote else server_spec("service", server)
    checkpoint = read_checkpoint(getattr(spec, "mirror", spec.model_path))
    port = service_port(params, server)
    argv = [part.replace("{port}", str(port)) for part in spec.argv]
    gpu = server.flags.get("device") != "cpu" and bool(view.gpus)
    secrets, key = _secrets(environment_text, server.api_key_env, params)
    name, text = rendered(
        params, argv, spec.environment, gpu, server.api_key_env, server.ready_timeout_s, server.stop_timeout_s,
        environment_file=params.environment_file,
    )  # fmt: skip
    measured = read_measured(run) if run is not None else None
    expectation = expectation_of(loaded, port, spec.sglang_version, checkpoint, gpu, measured, spec.environment)
    objections, about = objections_to(argv, spec.environment, spec.sglang_version, checkpoint, view, gpu, params, measured)
    objections += [] if params.container else missing_on(host, params)
    plan = DeployPlan(
        service=name, unit_text=text, environment_file=f"/etc/{params.service}.env" if params.environment_file else None,
        key_file=f"/etc/{params.service}.key.yaml" if server.api_key_env else None,
        key_reader=None if params.container else params.user, expectation=expectation, ready_timeout_s=server.ready_timeout_s,
        drain_s=server.stop_timeout_s, restart_proof=params.restart_proof, objections=objections,
        overrides={**params.overrides, **(overrides or {})}, phase_s=measured.phases if measured else {},
        about={**about, "sglang_version": spec.sglang_version, "model": spec.model.get("sha256"), "run": run.name if run else None,
               "not_claimed": not_claimed(expectation, measured)},
    )  # fmt: skip
    way = shared_host(params.hypervisor) if params.hypervisor else host
    return Prepared(
        plan=plan, place=place, params=params, profile=loaded, environment=secrets, api_key=key,
        level=measured.level if measured else None, hypervisor=way if isinstance(way, LXCHost) else None,
    )  # fmt: skip


def prepare_undo(profile: str, environment_text: str | None = None) -> Prepared:
    """What going back takes: the host, the service, its key. No checkpoint, no server environment: they may be what broke.

    Raises:
        BadInput, BadParams: parameters or environment that can't be used.
    """
    params = DeployParams.model_validate(load_notebook(profile, "06"))
    loaded = load_profile(params.profile, params.server, params.known_answer)
    secrets, key = _secrets(environment_text, loaded.server.api_key_env, params)
    place = place_for(loaded, params)
    way = shared_host(params.hypervisor) if params.hypervisor else place.host
    plan = DeployPlan(
        service=f"{params.service}.service", unit_text="", ready_timeout_s=loaded.server.ready_timeout_s,
        drain_s=loaded.server.stop_timeout_s, expectation=Expectation(port=service_port(params, loaded.server)),
    )  # fmt: skip
    return Prepared(
        plan=plan, place=place, params=params, profile=loaded, environment=secrets, api_key=key, level=None,
        hypervisor=way if isinstance(way, LXCHost) else None,
    )  # fmt: skip


def _secrets(text: str | None, key_name: str | None, params: DeployParams) -> tuple[str | None, str | None]:
    """The environment file's text without the API key, and the key; checked without showing a value."""
    key = os.environ.get(key_name) if key_name else None
    if text is None:
        return None, key
    kept, wrong = [], []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith(("#", ";")):
            continue
        name, equals, value = line.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or line.endswith("\\"):
            wrong.append(str(number))
        elif name == key_name:
            key = value.strip().strip("\"'")
        else:
            kept.append(line)
    if wrong:
        raise BadInput("NAME=value on each line of the environment file", f"something else on line {', '.join(wrong)}")
    if kept and not params.environment_file:
        names = ", ".join(line.partition("=")[0] for line in kept)
        raise BadParams("environment_file: true in 06.yaml for variables that the unit reads", names, "set it, so that every plan has it")
    return ("\n".join(kept) + "\n" if kept else None), key


def missing_on(host: Host, params: DeployParams) -> list[Objection]:
    """What the unit needs on its host and doesn't find: its account, its folder. No override makes them appear."""
    out = []
    if not host.run(["getent", "passwd", "--", params.user]).ok:
        reason = f"there is no account {params.user} on {host.name}: useradd --system --no-create-home {params.user}"
        out.append(Objection(name=None, reason=reason))
    try:
        folder = host.entry(params.working_directory)
    except HostError:  # it may be unreadable for us
        folder = None
    if (folder is None or folder.kind not in ("folder", "link")) and host.can_root() is None:
        folder = host.entry(params.working_directory, sudo=True)
    if folder is None or folder.kind not in ("folder", "link"):
        command = f"install -d -o {params.user} {params.working_directory}"
        out.append(Objection(name=None, reason=f"there is no folder {params.working_directory} on {host.name}: {command}"))
    return out


# what a run measured -----------------------------------------------------------------------------------------------------
@dataclass
class RunMeasured:
    """What a run recorded of the server to deploy."""

    server: ServerIdentity
    notebook: str
    log: ServerLog | None
    facts: dict[str, Any]
    answer: str | None
    level: dict[str, Any] | None
    interval: tuple[float, float] | None
    gpu_mib: float | None
    phases: dict[str, float]
    no_interval: str | None = None  # why `interval` is None


def read_measured(run: Path) -> RunMeasured:
    """What a run's notebooks measured of the profile's own server.

    Raises:
        BadInput: no notebook of it launched one.
    """
    results = {}
    for number in SERVED_BY:
        file = run / f"{number}.result.json"
        if file.exists():
            results[number] = notebook_result(file.read_text())
    having = [n for n in SERVED_BY if n in results and any(s.origin == "launched" for s in results[n].servers)]
    if not having:
        found = f"{run.name} has {', '.join(results) or 'none of them'}"
        raise BadInput(f"a run in which notebook {', '.join(SERVED_BY)} launched the server", found, "run 03 first")
    number = having[0]
    server = [s for s in results[number].servers if s.origin == "launched"][-1]
    home = run / "raw" / number / "servers" / server.launch_id
    log = None
    if (home / "server.log").exists():
        with (home / "server.log").open("rb") as lines:
            log = read_log(lines)
    info = json.loads((home / "server_info.json").read_text()) if (home / "server_info.json").exists() else None
    level, interval, no_interval = _level_of(results.get("03"))
    return RunMeasured(
        server=server, notebook=number, log=log, facts=served_facts(log or ServerLog(engine="empty", engine_why="no log"), info),
        answer=_answer_of(run), level=level, interval=interval, gpu_mib=_gpu_mib(log, home), phases=_phases(home),
        no_interval=no_interval,
    )  # fmt: skip


def _answer_of(run: Path) -> str | None:
    for number in ("06", "01"):
        file = run / "raw" / number / "answer" / "answer.json"
        if file.exists():
            return str(json.loads(file.read_text()).get("text") or "") or None
    return None


def _phases(home: Path) -> dict[str, float]:
    """Seconds by phase of a recorded launch."""
    try:
        rows = json.loads((home / "launch.json").read_text()).get("phases") or []
    except (OSError, ValueError):
        return {}
    return {str(name): float(seconds) for name, seconds in rows}


def _level_of(result: NotebookResult | None) -> tuple[dict[str, Any] | None, tuple[float, float] | None, str | None]:
    """How notebook 03 sent its smallest level that worked, and the interval of its output tokens/s; or why there is none."""
    if result is None:
        return None, None, "the run has no notebook 03"
    asked = result.provenance.params
    if asked.get("dataset") == "random_ids":
        return None, None, "notebook 03 sent random ids, and no text that could be sent again"
    rows, refused = [], []
    for trial in result.trials:
        if not (number := re.fullmatch(r"level-C(\d+)", trial.id)):
            continue
        rate = trial.values.get("output_tokens_per_s")
        if trial.outcome == "works" and rate and rate.low is not None and rate.high is not None:
            rows.append((int(number[1]), (rate.low, rate.high)))
        else:
            why = trial.reason or (rate.reason if rate else None) or "no interval"
            refused.append(f"{trial.id} of notebook 03: {trial.outcome.replace('_', ' ')}, {why}")
    if not rows:
        return None, None, "; ".join(refused) or "notebook 03 has no level"
    c, interval = min(rows)
    dataset = str(asked.get("dataset", "code"))
    level = {
        "dataset": dataset, "input_len": int(asked.get("input_len", 256)), "output_len": int(asked.get("output_len", 64)),
        "api": "chat" if dataset == "chat" else str(asked.get("api", "completions")), "seed": int(asked.get("seed", 42)) + c,
        "count": int(asked.get("num_requests") or requests_per_level(c)), "concurrency": c,
    }  # fmt: skip
    return level, interval, None


def _gpu_mib(log: ServerLog | None, home: Path) -> float | None:
    """MiB that the measured server held on all its GPUs: each one's total, less what the log had free at the end and what was
    held before. None where a log line or the driver doesn't tell."""
    if log is None or log.capacity is None or log.capacity.memory != "gpu" or log.capacity.available_mem_gib is None:
        return None
    try:
        record = json.loads((home / "launch.json").read_text())
    except (OSError, ValueError):
        return None
    totals = [g.get("memory_total_mib") for g in (record.get("host") or {}).get("gpus") or []]
    ranks = int(log.tp_size or 1) * int(log.pp_size or 1)
    if len(totals) < ranks or any(t is None for t in totals):
        return None
    before = sorted(((record.get("gpu_before") or {}).get("used_mib") or {}).values())
    held = sum(before[:ranks]) if before else 0.0
    return float(sum(sorted(totals)[:ranks]) - ranks * log.capacity.available_mem_gib * GIB_IN_MIB - held)


# what it must show -------------------------------------------------------------------------------------------------------
def expectation_of(
    profile: Profile,
    port: int,
    version: str,
    checkpoint: Checkpoint,
    gpu: bool,
    measured: RunMeasured | None,
    environment: Mapping[str, str],
) -> Expectation:
    """What the deployed server must show: by the rules of this version, and as measured where there is a run."""
    server, known = profile.server, profile.known_answer
    dtype: str | None = None
    with contextlib.suppress(WorkbookError):
        flag = str(server.flags.get("kv_cache_dtype") or "auto")
        found = resolve_kv_cache_dtype(checkpoint, flag, version, platform="cuda" if gpu else "cpu")
        dtype = found.dtype.removeprefix("torch.")
    base: dict[str, Any] = {
        "port": port, "address": server.host, "sglang_version": version, "kv_cache_dtype": dtype, "prompt": known.prompt,
        "expect": known.expect, "max_new_tokens": known.max_new_tokens, "environment": dict(environment),
        "api_key_env": server.api_key_env,
    }  # fmt: skip
    if measured is None:
        return Expectation(**base)
    asked = {name.replace("-", "_") for name in server.flags}
    arguments = measured.facts["arguments"]
    log = measured.log
    backends = {b.kind: str(b.taken) for b in (log.backends if log else []) if b.taken and b.known_by in ("line", "trace")}
    base |= {
        "sglang_version": measured.facts["version"] or version,
        "kv_cache_dtype": measured.facts["kv_cache_dtype"] or dtype,
        "max_total_num_tokens": measured.facts["max_total_num_tokens"],
        "flags": {name: arguments[name] for name in sorted(asked) if name in arguments},
        "backends": backends,
        "gpu_memory_mib": measured.gpu_mib,
        "output_tokens_per_s": measured.interval,
        "accept_length": measured.facts["accept_length"],
    }
    if known.expect is None and measured.answer:
        base["expect"] = measured.answer[:ANSWER_LETTERS]
    return Expectation(**base)


def not_claimed(expectation: Expectation, measured: RunMeasured | None) -> list[str]:
    """What the proof will not claim, and why: nobody measured it."""
    why = "no run was given" if measured is None else f"notebook {measured.notebook} of the run did not record it"
    reasons = {"output_tokens_per_s": measured.no_interval} if measured and measured.no_interval else {}
    names = ("max_total_num_tokens", "output_tokens_per_s", "gpu_memory_mib", "flags", "kv_cache_dtype")
    return [f"{name}: {reasons.get(name, why)}" for name in names if not getattr(expectation, name)]


# what speaks against it --------------------------------------------------------------------------------------------------
def objections_to(
    argv: Sequence[str],
    environment: Mapping[str, str],
    version: str,
    checkpoint: Checkpoint,
    view: HostView,
    gpu: bool,
    params: DeployParams,
    measured: RunMeasured | None,
) -> tuple[list[Objection], dict[str, Any]]:
    """Objections of the audit, of the capacity, and of a run that measured something else; and what they rest on."""
    out: list[Objection] = []
    line = shlex.join([*(f"{name}={value}" for name, value in environment.items()), *argv])
    groups = [flags_facts(line, "plan"), facts_of_checkpoint(checkpoint, "checkpoint"), [version_fact(version)]]
    if gpu:
        with contextlib.suppress(BadInput):  # a GPU that no table knows
            groups.append([gpu_fact(view.gpus[0].name)])
    report = audit(gather(*groups))
    for finding in report.findings:
        if finding.level == "error":
            reason = f"{finding.title}: {finding.what}; do: {finding.do}"
            out.append(Objection(name=f"audit-{finding.id}", reason=reason))
    reasons, capacity = capacity_objections(argv, version, checkpoint, view, gpu, params, measured)
    out += [Objection(name="capacity", reason="; ".join(reasons))] if reasons else []
    if measured is not None:
        ran, planned = plain_command(measured.server.argv), plain_command(argv)
        there = [w for w in ran[1:] if w not in planned] + _only(measured.server.environment, environment)
        here = [w for w in planned[1:] if w not in ran] + _only(environment, measured.server.environment)
        if ran[1:] != planned[1:] or there or here:
            found = f"only there: {' '.join(there) or 'nothing'}; only here: {' '.join(here) or 'nothing'}"
            reason = f"notebook {measured.notebook} of the run measured another command or environment; {found}"
            out.append(Objection(name="not-measured", reason=reason))
    audited = {
        "answer": report.answer,
        "findings": [f"{f.level}: {f.id}: {f.title}" for f in report.findings],
        "not_checked": [f"{gap.id}: {gap.why}" for gap in report.not_checked],
    }
    return out, {"audit": audited, "capacity": capacity}


def _only(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Assignments of one environment that the other doesn't have."""
    return [f"{name}={value}" for name, value in sorted(one.items()) if other.get(name) != value]


def capacity_objections(
    argv: Sequence[str],
    version: str,
    checkpoint: Checkpoint,
    view: HostView,
    gpu: bool,
    params: DeployParams,
    measured: RunMeasured | None,
) -> tuple[list[str], dict[str, Any]]:
    """Why the planned configuration doesn't hold what it has to, and the numbers; measured ones where a run has them."""
    asked = arguments_of(argv)
    memory = min((g.memory_total_mib for g in view.gpus if g.memory_total_mib), default=None) if gpu else None
    if not gpu and view.memory_bytes:
        memory = view.memory_bytes / (1 << 20)
    taken: dict[str, Any] = {}
    for name, kind in (("mem_fraction_static", float), ("max_total_tokens", int), ("max_running_requests", int), ("page_size", int),
                       ("context_length", int), ("speculative_algorithm", str), ("speculative_num_draft_tokens", int)):  # fmt: skip
        if name in asked:
            taken[name] = kind(asked[name])
    tokens = measured.facts["max_total_num_tokens"] if measured else None
    context = int(asked["context_length"]) if "context_length" in asked else checkpoint.context_length
    requests = int(asked["max_running_requests"]) if "max_running_requests" in asked else None
    about: dict[str, Any] = {"max_total_num_tokens": tokens, "from": "the run's log" if tokens else None, "context_length": context}
    out: list[str] = []
    if tokens is None:
        try:
            pools = predict_pools(
                checkpoint, tp=int(asked.get("tp_size", 1)), kv_cache_dtype=asked.get("kv_cache_dtype", "auto"), sglang_version=version,
                platform="cuda" if gpu else "cpu", gpu_memory_mib=memory, **taken,
            )  # fmt: skip
            tokens, requests = pools.max_total_num_tokens, requests or pools.max_running_requests
            about |= {"max_total_num_tokens": tokens, "from": "lib.model.memory.predict_pools", "notes": list(pools.notes)}
        except BadInput as error:
            about["not_predicted"] = str(error)
            if re.search(r"memory left for the KV cache|memory for at least one page", str(error)):  # SGLang wouldn't start
                out.append(str(error))
    about |= {"max_running_requests": requests, "full_length_requests": round(tokens / context, 2) if tokens and context else None}
    if params.context_tokens is not None:
        if context and params.context_tokens > context:
            out.append(f"a request of {params.context_tokens} tokens is longer than the context of {context}")
        if tokens is not None and params.context_tokens > tokens:
            out.append(f"a request of {params.context_tokens} tokens does not fit into a KV pool of {tokens}")
    if params.concurrent_requests is not None:
        if requests and params.concurrent_requests > requests:
            out.append(f"{params.concurrent_requests} requests at once are more than max_running_requests={requests}")
        need = params.concurrent_requests * (params.context_tokens or 0)
        if tokens is not None and need > tokens:
            words = f"{params.concurrent_requests} requests of {params.context_tokens} tokens"
            out.append(f"{words} take {need} tokens, the KV pool holds {tokens}")
    if "context_length" in asked and params.context_tokens is None and context and tokens is not None and context > tokens:
        out.append(f"the context of {context} tokens that is asked for does not fit into a KV pool of {tokens}")
    return out, about


def arguments_of(argv: Sequence[str]) -> dict[str, str]:
    """`--name value` and `--name=value` of a command line by SGLang's field names; a flag alone is "true".

    Example: `arguments_of(["--tp-size", "8", "--enable-metrics"])` is `{"tp_size": "8", "enable_metrics": "true"}`.
    """
    found: dict[str, str] = {}
    for index, word in enumerate(argv):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            follows = argv[index + 1] if index + 1 < len(argv) and not argv[index + 1].startswith("--") else "true"
            found[name.replace("-", "_")] = value if equals else follows
    return found
