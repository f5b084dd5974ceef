"""Notebook 06: the unit for the measured configuration, the proof that this configuration runs, and the state document."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lib.deploy.build import no_answer
from lib.deploy.unit import ContainerSpec, UnitSpec, lint_unit, parse_unit, render_container_unit, render_unit
from lib.errors import BadParams, WorkbookError
from lib.hosts import local
from lib.migrations import run_result
from lib.model.quantization import resolve_kv_cache_dtype
from lib.params import DeployParams, ServerParams
from lib.records import Evidence, Measured, Status, Verdict
from lib.report.state import run_discoveries, state_markdown
from lib.results import Measurement, NotebookRun, ServerHandle
from lib.server.answers import Answer
from lib.server.launch import LaunchRecord, identity_of
from lib.server.log_records import KvPool

#: The port of the service where params name none: SGLang's own default.
SERVICE_PORT = 30000


def configured(run: NotebookRun) -> ServerHandle:
    """The server to deploy: the profile's own, which notebooks 01 and 03 launched and measured."""
    return run.server("deployed")


def planned_dtype(run: NotebookRun, server: ServerHandle) -> tuple[str | None, str]:
    """The KV cache dtype that the flags and the checkpoint give by this version's rules, and why; None if not known."""
    checkpoint = run.checkpoint(server)
    if checkpoint is None:
        return None, "the checkpoint of an attached server is not read"
    flag = str(server.params.flags.get("kv_cache_dtype") or "auto")
    try:
        found = resolve_kv_cache_dtype(checkpoint, flag, run.version(server), platform=run.platform(server))
    except WorkbookError as error:
        return None, str(error)
    return found.dtype.removeprefix("torch."), found.why


def service_port(params: DeployParams, server: ServerParams) -> int:
    """The port of the service: 06's own, else the server's, else SGLang's default."""
    return params.port or server.port or SERVICE_PORT


def key_file_of(service: str) -> str:
    """Where a service's API key stands on its host: a file for SGLang's `--config`, so that no command line shows it."""
    return f"/etc/{service}.key.yaml"


def unit_spec(
    params: DeployParams,
    argv: Sequence[str],
    environment: Mapping[str, str],
    gpu: bool,
    api_key_env: str | None,
    ready_timeout_s: float,
    stop_timeout_s: float,
    environment_file: bool = False,
) -> UnitSpec:
    """The unit of a configuration; a key never stands on the command line but in a file that only root and the service read."""
    return UnitSpec(
        name=f"{params.service}.service",
        description=params.description,
        argv=(*argv, *(("--config", key_file_of(params.service)) if api_key_env else ())),
        environment=dict(environment),
        environment_file=f"/etc/{params.service}.env" if environment_file else None,
        user=params.user,
        working_directory=params.working_directory,
        gpu=gpu,
        load_timeout_s=ready_timeout_s,
        drain_timeout_s=stop_timeout_s,
    )


def container_spec(
    params: DeployParams,
    argv: Sequence[str],
    environment: Mapping[str, str],
    gpu: bool,
    api_key_env: str | None,
    ready_timeout_s: float,
    stop_timeout_s: float,
    environment_file: bool = False,
) -> ContainerSpec:
    """The same configuration in a container: the image's interpreter, the model mounted where it lies, published on loopback.

    Raises:
        BadParams: no `container` in the parameters.
    """
    box = params.container
    if box is None:
        raise BadParams("container: in 06.yaml", "none", "name the image")
    words = [box.python, *argv[1:]]
    model, host, port = (words[words.index(name) + 1] for name in ("--model-path", "--host", "--port"))
    words[words.index("--host") + 1] = "0.0.0.0"  # in there; the host's side of the published port is `address`
    volumes = [*box.volumes]
    if model.startswith("/") and not any(model == inside or model.startswith(f"{inside}/") for _, inside in volumes):
        volumes.append((model, model))
    if api_key_env:
        volumes.append((key_file_of(params.service), key_file_of(params.service)))
        words += ["--config", key_file_of(params.service)]
    return ContainerSpec(
        name=f"{params.service}.service",
        description=params.description,
        image=box.image,
        argv=tuple(words),
        environment=dict(environment),
        environment_file=f"/etc/{params.service}.env" if environment_file else None,
        volumes=tuple(volumes),
        cache_volumes=tuple(box.cache_volumes),
        port=int(port),
        address="127.0.0.1" if host == "localhost" else host,
        gpu=gpu,
        docker=box.docker,
        load_timeout_s=ready_timeout_s,
        drain_timeout_s=stop_timeout_s,
    )


def rendered(params: DeployParams, *arguments: Any, **options: Any) -> tuple[str, str]:
    """Name and text of the unit that the parameters choose: on the host, or in a container."""
    if params.container is not None:
        inside = container_spec(params, *arguments, **options)
        return inside.name, render_container_unit(inside)
    spec = unit_spec(params, *arguments, **options)
    return spec.name, render_unit(spec)


def write_unit(
    folder: Path,
    argv: list[str],
    environment: dict[str, str],
    gpu: bool,
    params: dict[str, Any],
    api_key_env: str | None,
    ready_timeout_s: float,
    stop_timeout_s: float,
) -> None:
    """Renders the unit, lints it, and asks systemd where there is one (unit file, check.json)."""
    deploy = DeployParams.model_validate(params)
    name, text = rendered(deploy, argv, environment, gpu, api_key_env, ready_timeout_s, stop_timeout_s)
    file = local.write_atomic(folder / name, text)
    checks: dict[str, Any] = {"unit": name, "lint": [f.model_dump(mode="json") for f in lint_unit(text)]}
    analyze = shutil.which("systemd-analyze")
    if analyze:
        out = subprocess.run([analyze, "verify", "--man=no", str(file)], capture_output=True, text=True, timeout=60)
        checks["verify"] = {"exit_code": out.returncode, "output": (out.stdout + out.stderr).strip()}
        checks["security"] = exposure_of(analyze, file)
    else:
        checks["verify"] = {"exit_code": None, "output": "systemd-analyze is not on this machine"}
        checks["security"] = {"exposure": None, "reason": "systemd-analyze is not on this machine"}
    local.write_atomic(folder / "check.json", json.dumps(checks, indent=1))


def exposure_of(analyze: str, file: Path) -> dict[str, Any]:
    """What `systemd-analyze security` says of a unit file, offline: its overall exposure (0 to 10), or why it says none."""
    command = [analyze, "security", "--offline=true", "--no-pager", str(file)]
    out = subprocess.run(command, capture_output=True, text=True, timeout=60)
    told = re.search(r"Overall exposure level for \S+: ([\d.]+) (\w+)", out.stdout)
    if told is None:
        said = (out.stdout + out.stderr).strip()
        return {"exposure": None, "reason": said[-200:] or "it said nothing (systemd 250 is the first that reads a file)"}
    return {"exposure": float(told[1]), "words": told[2]}


def unit_of(run: NotebookRun, server: ServerHandle) -> Measurement | None:
    """The rendered and checked unit (raw record `unit`); None for an attached server, whose command is not known."""
    if server.attached:
        run.skip("the unit", "an attached server's command line is not this workbook's")
        return None
    params: DeployParams = run.params  # type: ignore[assignment]
    arguments: dict[str, Any] = {}
    if not run.offline:
        spec = server.spec
        port = str(service_port(params, server.params))
        arguments = {
            "argv": [part.replace("{port}", port) for part in spec.argv],
            "environment": spec.environment,
            "gpu": run.platform(server) == "cuda",
            "params": params.model_dump(mode="json"),
            "api_key_env": server.params.api_key_env,
            "ready_timeout_s": server.params.ready_timeout_s,
            "stop_timeout_s": server.params.stop_timeout_s,
        }
    return run.measure("unit", None, write_unit, **arguments)


def unit_text(unit: Measurement | None) -> str:
    """The rendered unit, or why there is none."""
    if unit is None:
        return "(no unit: the server is attached)"
    return (unit.folder / unit.json("check.json")["unit"]).read_text()


def check_rows(unit: Measurement | None) -> list[dict[str, Any]]:
    """What the linter and systemd say about the unit."""
    if unit is None:
        return []
    checks = unit.json("check.json")
    rows = [{"check": f"linter: {f.get('id')}", "result": f.get("what") or f.get("title")} for f in checks["lint"]]
    rows = rows or [{"check": "linter", "result": "nothing found"}]
    verify = checks["verify"]
    return [
        *rows,
        {
            "check": "systemd-analyze verify",
            "result": f"exit {verify['exit_code']}: {verify['output'] or 'no complaint'}",
        },
        {"check": "systemd-analyze security", "result": _exposure_words(checks.get("security") or {})},
    ]


def _exposure_words(security: Mapping[str, Any]) -> str:
    if security.get("exposure") is None:
        return f"not told: {security.get('reason') or 'not asked'}"
    return f"exposure {security['exposure']} of 10 ({security['words']})"


def plain_command(argv: Sequence[str]) -> list[str]:
    """A command line with its port named PORT, and without the file that its API key is in."""
    plain = list(argv)
    if "--port" in plain:
        plain[plain.index("--port") + 1] = "PORT"
    if "--config" in plain and plain[plain.index("--config") + 1].endswith(".key.yaml"):
        at = plain.index("--config")
        del plain[at : at + 2]
    return plain


def server_command(argv: Sequence[str]) -> list[str]:
    """What a unit's command runs as the server: itself, or what follows the image of a `docker run`, with the host's names."""
    words = list(argv)
    image = next((i for i, word in enumerate(words) if re.search(r"@sha256:[0-9a-f]{64}$", word)), None)
    return words if image is None else words[image + 1 :]


def same_command(launch: LaunchRecord, unit: Measurement) -> tuple[bool, str]:
    """Whether the unit's ExecStart is the launched argv, but for the port."""
    commands = parse_unit(unit_text(unit)).commands("ExecStart")
    words = list(commands[0].argv) if commands else []
    inside, ran = plain_command(server_command(words)), plain_command(launch.argv)
    if inside and server_command(words) != words:  # in a container, its interpreter and address are the image's
        inside, ran = inside[1:], ran[1:]
        for command in (inside, ran):
            command[command.index("--host") + 1] = "HOST"
    return inside == ran, "ExecStart equals the launched command but for the port" if inside == ran else difference(
        ran, inside
    )


def difference(measured: Sequence[str], deployed: Sequence[str]) -> str:
    """What two command lines do not share."""
    only_measured = [part for part in measured if part not in deployed]
    only_deployed = [part for part in deployed if part not in measured]
    return f"only in the first: {only_measured or 'nothing'}; only in the second: {only_deployed or 'nothing'}"


def _as_measured(run: NotebookRun, launch: LaunchRecord) -> Verdict:
    """Whether notebook 03 of this run measured exactly the command and environment that 06 runs."""
    measured = run.earlier().get("03")
    common: dict[str, Any] = {
        "id": "as-measured",
        "claim": "The command and environment are those that notebook 03 of this run measured",
        "limit": "equal but for the port",
        "rule": "lib.deploy.rollout",
    }
    servers = [s for s in measured.servers if s.origin == "launched"] if measured else []
    if not servers:
        return Verdict(
            status=Status.INCONCLUSIVE, reason="notebook 03 of this run measured no launched server", **common
        )
    server = servers[-1]
    here = identity_of(run.log_file(launch).parent)
    same = plain_command(server.argv) == plain_command(launch.argv) and server.environment == here.environment
    same_model = server.model == launch.model
    reason = (
        "equal but for the port; same model files"
        if same and same_model
        else difference(
            [*plain_command(server.argv), *(f"{k}={v}" for k, v in server.environment.items())],
            [*plain_command(launch.argv), *(f"{k}={v}" for k, v in here.environment.items())],
        )
        if not same
        else "the model's files differ"
    )
    return Verdict(
        status=Status.PASS if same and same_model else Status.FAIL,
        reason=reason,
        evidence=[Evidence(path="03.result.json"), run.evidence(run.log_file(launch).parent / "launch.json")],
        launch_ids=[server.launch_id, launch.launch_id],
        **common,
    )


def pools(run: NotebookRun, launch: LaunchRecord) -> list[KvPool]:
    """KV pools in this launch's log: each launch has a log of its own, so no line of an earlier one can be read."""
    log = run.log(launch)
    return [p for p in log.kv_pools if p.role == "target"] if log else []


def proof_rows(run: NotebookRun, launch: LaunchRecord) -> list[dict[str, Any]]:
    """What this launch's own lines and answers show."""
    log, file = run.log(launch), run.log_file(launch)
    rows: list[dict[str, Any]] = []
    for pool in pools(run, launch):
        rows.append(
            {
                "what": "KV cache allocated",
                "value": f"{pool.dtype}, {pool.tokens} tokens",
                "evidence": run.evidence(file, pool.line_no, pool.line),
            }
        )
    if log and log.capacity:
        rows.append(
            {
                "what": "capacity",
                "value": f"{log.capacity.max_total_num_tokens} tokens, context {log.capacity.context_len}",
                "evidence": run.evidence(file, log.capacity.line_no, log.capacity.line),
            }
        )
    if log and log.ready:
        rows.append(
            {
                "what": "ready",
                "value": f"after {launch.ready_s} s",
                "evidence": run.evidence(file, log.ready.line_no, log.ready.line),
            }
        )
    return rows


def verdicts(
    run: NotebookRun, server: ServerHandle, launch: LaunchRecord, unit: Measurement | None, answer: Answer | None
) -> list[Verdict]:
    """Unit sound, unit is what ran, KV dtype as planned, answer right, server gone."""
    made: list[Verdict] = []
    if unit is not None:
        made += [_unit_sound(run, unit), _verify(run, unit)]
        same, reason = same_command(launch, unit)
        made.append(
            Verdict(
                id="same-command",
                claim="The unit starts exactly the command that this notebook ran",
                status=Status.PASS if same else Status.FAIL,
                reason=reason,
                rule="lib.deploy.unit",
                limit="equal but for the port",
                launch_ids=[launch.launch_id],
                evidence=[
                    run.evidence(unit.folder / unit.json("check.json")["unit"]),
                    run.evidence(run.log_file(launch).parent / "launch.json"),
                ],
            )
        )
        made.append(_as_measured(run, launch))
    made.append(_ready(run, launch))
    made.append(_kv_dtype(run, server, launch))
    made.append(_smoke(run, launch, answer))
    record = next((r for r in server.launches() if r.launch_id == launch.launch_id), launch)
    if record.stop is not None:
        made.append(
            Verdict(
                id="gone",
                claim="The server of this notebook is gone at its end",
                status=Status.PASS if record.stop.gone else Status.FAIL,
                reason=f"{record.stop.signals} in {record.stop.seconds} s; port free: {record.stop.port_free}; "
                f"GPU: {record.stop.gpu_memory}",
                rule="lib.server.launch",
                limit="no process, port free",
                launch_ids=[launch.launch_id],
                evidence=[run.evidence(run.log_file(launch).parent / "launch.json")],
            )
        )
    return made


def _unit_sound(run: NotebookRun, unit: Measurement) -> Verdict:
    found = unit.json("check.json")["lint"]
    heavy = [f for f in found if f["level"] != "info"]
    return Verdict(
        id="unit-lint",
        claim="The unit has none of the known mistakes of service units",
        rule="lib.deploy.unit.lint_unit",
        limit="no finding of level warning or error",
        status=Status.FAIL if heavy else Status.PASS,
        measured=Measured(value=len(heavy), unit="findings", reason="counted"),
        reason="; ".join(f"{f.get('id')}: {f.get('what')}" for f in heavy) or "nothing found",
        evidence=[run.evidence(unit.folder / "check.json")],
    )


def _verify(run: NotebookRun, unit: Measurement) -> Verdict:
    verify = unit.json("check.json")["verify"]
    common: dict[str, Any] = {
        "id": "unit-verify",
        "claim": "systemd accepts the unit",
        "rule": "systemd-analyze verify",
        "limit": "exit 0, no complaint",
    }
    if verify["exit_code"] is None:
        return Verdict(status=Status.UNSUPPORTED, reason=verify["output"], **common)
    ok = verify["exit_code"] == 0 and not verify["output"]
    return Verdict(
        status=Status.PASS if ok else Status.FAIL,
        reason=f"exit {verify['exit_code']}: {verify['output'] or 'no complaint'}",
        evidence=[run.evidence(unit.folder / "check.json")],
        **common,
    )


def _ready(run: NotebookRun, launch: LaunchRecord) -> Verdict:
    from lib.deploy.build import _loads

    return _loads(run, launch)


def _kv_dtype(run: NotebookRun, server: ServerHandle, launch: LaunchRecord) -> Verdict:
    found = pools(run, launch)
    wanted, why = planned_dtype(run, server)
    common: dict[str, Any] = {
        "id": "kv-dtype",
        "claim": "The KV cache is allocated as the flags and the checkpoint give it",
        "limit": wanted or "not known",
        "rule": "the pool line of this launch's log",
        "launch_ids": [launch.launch_id],
    }
    if not found or any(p.dtype is None for p in found):
        return Verdict(status=Status.INCONCLUSIVE, reason="no line of this launch tells the dtype", **common)
    names = {(p.dtype or "").removeprefix("torch.") for p in found}
    evidence = [run.evidence(run.log_file(launch), p.line_no, p.line) for p in found]
    measured = Measured(value=", ".join(sorted(names)), reason="read")
    if wanted is None:
        return Verdict(status=Status.INCONCLUSIVE, measured=measured, reason=why, evidence=evidence, **common)
    return Verdict(
        status=Status.PASS if names == {wanted} else Status.FAIL,
        measured=measured,
        reason=f"planned {wanted} ({why}); allocated {', '.join(sorted(names))}",
        evidence=evidence,
        **common,
    )


def _smoke(run: NotebookRun, launch: LaunchRecord, answer: Answer | None) -> Verdict:
    common: dict[str, Any] = {
        "id": "smoke",
        "claim": "It answers a request, not degenerate and as expected",
        "limit": f"begins with {run.profile.known_answer.expect!r}",
        "rule": "lib.server.answers",
        "launch_ids": [launch.launch_id],
    }
    if answer is None:
        return no_answer(run, common)
    wrong = answer.degenerate or (f"it says {answer.text[:40]!r}" if answer.correct is False else None)
    return Verdict(
        status=Status.FAIL if wrong else Status.PASS,
        reason=wrong or f"it says {answer.text[:40]!r}",
        evidence=[run.evidence(run.raw / "answer" / "answer.json", quote=answer.text[:80])],
        **common,
    )


def notebook_states(run: NotebookRun) -> dict[str, str]:
    """What the run's index says of the other notebooks: done, failed, not_run ...; empty outside a run."""
    file = run.folder / "result.json"
    if not file.exists():
        return {}
    index = run_result(file.read_text())
    return {n.notebook: n.state for n in index.notebooks if n.notebook != run.number and n.notebook in index.selected}


def write_state(
    run: NotebookRun, launch: LaunchRecord, unit: Measurement | None, made: Sequence[Verdict], served: Sequence[Any] = ()
) -> Path:
    """Writes state.md into the run's folder: goal, instructions, discoveries, accomplished, each line with its evidence.

    `served` are the lines about a service that was deployed: what is proven of it.
    """
    params: DeployParams = run.params  # type: ignore[assignment]
    here = run.evidence(run.log_file(launch).parent / "launch.json")
    instructions: list[Any] = [(recommendation(run, unit, made), Evidence(path=f"{run.number}.result.json"))]
    if unit is not None:
        name = unit.json("check.json")["unit"]
        file = run.evidence(unit.folder / name)
        install = f"systemctl daemon-reload && systemctl enable --now {params.service}"
        current = f"journalctl _SYSTEMD_INVOCATION_ID=$(systemctl show -P InvocationID {params.service})"
        instructions += [
            (f"To install: copy {name} to /etc/systemd/system/ as root, then {install}", file),
            (f"Read the current start only: {current}", file),
            ("Stop an old server by its unit or its process identity, never by the name of a program", here),
        ]
    earlier = list(run.earlier().values())
    done: list[Any] = [(f"{r.title}: {r.recommendation}", Evidence(path=f"{r.notebook}.result.json")) for r in earlier]
    for number, state in notebook_states(run).items():
        if state != "done":
            done.append((f"Notebook {number}: {state.replace('_', ' ')}", Evidence(path="result.json")))
    done.append((f"Ran the configuration as launch {launch.launch_id} ({launch.state})", here))
    text = state_markdown(params.goal, instructions, [*run_discoveries(earlier), *made, *served], done)
    return local.write_atomic(run.folder / "state.md", text)


#: What must have passed before a unit may be installed.
NEEDED = ("unit-lint", "same-command", "loads", "kv-dtype", "smoke", "gone")


def recommendation(run: NotebookRun, unit: Measurement | None, made: Sequence[Verdict]) -> str:
    """Deploy, or what stands against it: here, in an earlier notebook of this run, or because something was not proven."""
    status = {v.id: v.status for v in made}
    bad = [v.id for v in made if v.status in (Status.FAIL, Status.INVALID, Status.ERROR)]
    missing = [name for name in NEEDED if status.get(name) != Status.PASS and name not in bad]
    open_notebooks = [f"{n} ({s.replace('_', ' ')})" for n, s in notebook_states(run).items() if s != "done"]
    if unit is None:
        return "There is nothing to deploy: the server is attached."
    if status.get("deployed") == Status.PASS and not [name for name in bad if name != "plan"]:
        return "This configuration runs on its host and is proven there (see state.md)."
    if status.get("deployed") == Status.FAIL:
        return f"The rollout did not end as proven: {next(v.reason for v in made if v.id == 'deployed')}."
    if bad or missing:
        return f"Do not deploy yet: {', '.join([*bad, *(f'{m} (not proven)' for m in missing)])}."
    if open_notebooks:
        return f"This configuration ran and was verified, but notebooks of this run are missing: {', '.join(open_notebooks)}."
    return "This configuration ran and was verified: the unit may be installed (see state.md)."
