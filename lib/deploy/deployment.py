"""Rolls a service out on a host: the old one really gone, the new one proven, the way back known.

A rollout is a row of steps, each of which can be repeated. What it did so far stands on the host in `current.json`, so a
rollout that was interrupted at any step (the workbook killed, the network cut, the host rebooted, the disk full) is
continued by running the same plan again, or undone by `undo`. A step that fails for a reason of the new configuration
(it doesn't come up, its proof fails, its files can't be written) is followed by the way back to the unit that was there.

On the host, below /var/lib/sglang-workbook/<service>/ (root's, 0700): `lock`, `current.json`, `proven.json`,
`deployments/<id>/` with `plan.json`, `previous.json` (the files that were replaced), `proof.json`. Secrets stand only there and
in the unit's environment and key files, never here.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import getpass
import hashlib
import json
import os
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lib.deploy.proof import Bench, Expectation, Proof, prove, reach
from lib.deploy.service import ServiceState, require_systemd, service_state, systemctl, unit_name
from lib.deploy.stopping import StopReport, seen, serving_containers, stop_service, targets
from lib.deploy.unit import lint_unit
from lib.errors import BadInput, Busy, HostError, HostTimeout, HostUnreachable, NeedsRoot, WorkbookError
from lib.hosts import local
from lib.hosts.base import Host, Running
from lib.hosts.lxc import LXCHost
from lib.hosts.signals import signal_processes
from lib.hosts.view import HostGpu, HostProcess
from lib.records import Record
from lib.server.control import Control
from lib.server.progress import phase_of, seconds_left
from lib.server.redact import redact_text

STATE_FOLDER = "/var/lib/sglang-workbook"
UNIT_FOLDER = "/etc/systemd/system"
#: The steps of a rollout in order; `current.json` names the one that is next.
STEPS = ("save", "put", "stop", "start", "ready", "prove", "commit")
#: What an ordinary user can't do.
NEEDS_ROOT = (
    "write the unit and its environment file", "systemctl daemon-reload, enable, start, stop", "end processes of other users",
    "read the journal and who owns a port",
)  # fmt: skip
#: Longest life of the lock's holder on the host; it ends with this process or its connection.
LOCK_S = 24 * 3600.0

_HOLD = """
import fcntl, os, sys
os.makedirs(os.path.dirname(sys.argv[1]), mode=0o700, exist_ok=True)
file = open(sys.argv[1], "a+")
try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    file.seek(0)
    print("busy " + file.read().strip())
    sys.exit(0)
file.truncate(0)
file.write(sys.argv[2])
file.flush()
print("held")
sys.stdout.flush()
sys.stdin.read()
"""


class Objection(Record):
    """Something that speaks against a plan. `name` is what an override names; None can't be overridden."""

    name: str | None
    reason: str


class DeployPlan(Record):
    """What is to run: the unit's text, where it serves, what it must show, and who decided against which objection.

    `environment_file` is root's alone; `key_file` holds the API key for SGLang's `--config` and may be read by the group of the
    account `key_reader`. `phase_s` are seconds by phase of an earlier start, for the time left.
    """

    service: str
    unit_text: str
    environment_file: str | None = None
    key_file: str | None = None
    key_reader: str | None = None
    expectation: Expectation
    ready_timeout_s: float = 900.0
    drain_s: float = 60.0
    kill_s: float = 10.0
    restart_proof: bool = True
    objections: list[Objection] = []
    overrides: dict[str, str] = {}
    about: dict[str, Any] = {}
    phase_s: dict[str, float] = {}

    @property
    def unit(self) -> str:
        return unit_name(self.service)

    @property
    def id(self) -> str:
        """The same plan has the same id, so an interrupted rollout is known again."""
        chosen = self.model_dump(
            mode="json", include={"service", "unit_text", "environment_file", "key_file", "expectation"}
        )
        return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:12]


class PlanReport(Record):
    """What would change, before anything is touched."""

    host: str
    unit: str
    id: str
    diff: str
    unit_new: bool
    dropins: list[str]
    now: str
    runs: list[dict[str, Any]]
    bystanders: list[dict[str, Any]]
    containers: list[dict[str, Any]] = []
    gpus: list[dict[str, Any]]
    gpus_reason: str | None
    port_held_by: str | None
    needs_root: list[str]
    can_root: str | None
    unfinished: str | None
    proven: str | None
    objections: list[Objection]
    refused: list[Objection]
    overrides: dict[str, str] = {}
    lint: list[str] = []
    about: dict[str, Any] = {}
    by_hand: list[str]


class Step(Record):
    """One step that was done, with its time and outcome."""

    name: str
    seconds: float
    outcome: str


class DeployReport(Record):
    """How a rollout ended. `outcome`: proven, rolled_back, undone, failed_and_not_rolled_back."""

    host: str
    unit: str
    id: str
    outcome: str
    reason: str
    steps: list[Step]
    stop: StopReport | None = None
    proof: Proof | None = None
    restart_proof: Proof | None = None
    way_back: list[Step] = []
    way_back_proof: Proof | None = None
    by: str = ""
    at: float = 0.0
    overrides: dict[str, str] = {}


class Refused(WorkbookError):
    """The plan itself says no: an objection that nobody overrode."""

    exit_code = 1


class Unfinished(WorkbookError):
    """Another rollout of this service began and did not end; it has to be continued or undone first."""


class _StepFailed(Exception):
    """The new configuration is at fault: the way back is taken."""


def refused(plan: DeployPlan) -> list[Objection]:
    """Objections without a named override that has a reason."""
    return [o for o in plan.objections if o.name is None or not plan.overrides.get(o.name, "").strip()]


def check_plan(plan: DeployPlan) -> None:
    """Stops a plan that may not be carried out.

    Raises:
        Refused: an objection stands; all of them are named, with the override that would lift each.
        BadInput: an override that no objection has, or one without a reason; a unit with a mistake of level error.
    """
    known = {o.name for o in plan.objections if o.name}
    unknown = sorted(set(plan.overrides) - known)
    if unknown:
        raise BadInput(
            f"overrides of objections that stand: {', '.join(sorted(known)) or 'none does'}", ", ".join(unknown)
        )
    silent = sorted(name for name, reason in plan.overrides.items() if not reason.strip())
    if silent:
        raise BadInput("a reason with each override", f"none for {', '.join(silent)}", "--override NAME=REASON")
    faults = [f for f in lint_unit(plan.unit_text) if f.level == "error"]
    if faults:
        raise BadInput("a unit without mistakes", "; ".join(f"{f.id}: {f.what}" for f in faults))
    if left := refused(plan):
        words = "; ".join(f"{o.reason} (override: {o.name or 'none'})" for o in left)
        raise Refused(
            "a plan that nothing speaks against", words, "change the configuration, or --override NAME=REASON"
        )


def key_on(host: Host, plan: DeployPlan) -> str | None:
    """The API key that a plan's key file on the host holds (root reads it); a variable of this process where there is none."""
    name = plan.expectation.api_key_env
    if plan.key_file and name:
        try:
            text = host.read_file(plan.key_file, sudo=True).decode("utf-8", "replace")
            return str(json.loads(text.partition("api-key:")[2])) or None
        except (HostUnreachable, HostTimeout, NeedsRoot):
            raise
        except (HostError, ValueError):
            pass
    return os.environ.get(name) if name else None


def kept_plan(saved: Mapping[str, Any]) -> DeployPlan:
    """A plan as a host keeps it, also one of another version of this workbook: fields that this one doesn't know are left out.

    Raises:
        HostError: it is no plan.
    """
    try:
        expected = {k: v for k, v in dict(saved["expectation"]).items() if k in Expectation.model_fields}
        known = {k: v for k, v in saved.items() if k in DeployPlan.model_fields}
        return DeployPlan.model_validate({**known, "expectation": expected})
    except (ValidationError, KeyError, TypeError, ValueError) as error:
        raise HostError("a plan that this workbook can read", str(error).splitlines()[0]) from error


class Deployment:
    """A rollout on one host.

    Args:
        host: where; reached as root or with `sudo -n`.
        plan: what.
        folder: local folder for evidence (proofs, stop reports, this report).
        environment: text of the unit's environment file, with its secrets; None keeps the file that is there.
        api_key: the server's key, for its key file and for asking it; None keeps the file that is there.
        hypervisor: the container's hypervisor, for the last rung of the stop ladder.
        say: told each step and the server's own progress.
        bench: see `proof.prove`.
    """

    def __init__(
        self,
        host: Host,
        plan: DeployPlan,
        folder: Path,
        *,
        environment: str | None = None,
        api_key: str | None = None,
        hypervisor: LXCHost | None = None,
        say: Callable[[str], None] = lambda _: None,
        bench: Bench | None = None,
    ) -> None:
        self.host, self.plan, self.folder, self.say = host, plan, folder, say
        self.environment, self.api_key, self.hypervisor, self.bench = environment, api_key, hypervisor, bench
        self.base = f"{STATE_FOLDER}/{plan.service.removesuffix('.service')}"
        self.id = plan.id
        self.steps: list[Step] = []
        self.stop_report: StopReport | None = None
        self.proof: Proof | None = None
        self.second_proof: Proof | None = None
        self._holder: Running | None = None
        self._at = ""

    # what stands on the host -------------------------------------------------------------------------------------------
    def _read(self, name: str) -> Any:
        """A JSON file of ours on the host, None if it isn't there or was cut off."""
        try:
            return json.loads(self.host.read_file(f"{self.base}/{name}", sudo=True))
        except (HostUnreachable, HostTimeout, NeedsRoot):
            raise
        except (HostError, BadInput, ValueError):
            return None

    def _write(self, name: str, content: Any) -> None:
        text = json.dumps(content, indent=1)
        self.host.put(text.encode(), f"{self.base}/{name}", mode=0o600, parents=True, sudo=True)

    def _current(self, step: str | None) -> None:
        if step is None:
            self.host.remove(f"{self.base}/current.json", sudo=True)
        else:
            self._write("current.json", {"id": self.id, "step": step, "by": _who(), "at": time.time()})

    # before anything is touched ------------------------------------------------------------------------------------------
    def look(self) -> PlanReport:
        """What would change; touches nothing, and works without root as far as that goes."""
        plan, can = self.plan, self.host.can_root()
        root = can is None
        state = service_state(self.host, plan.unit)
        view = self.host.view(sudo=root)
        containers, silent = serving_containers(self.host, view)
        mine, bystanders = targets(view, plan.unit, plan.expectation.port, containers)
        old = self._text(f"{UNIT_FOLDER}/{plan.unit}", root)
        owners = view.port_owners(plan.expectation.port)
        held = (
            ", ".join(f"pid {p.pid} ({seen(p).argv[:80]}, {p.unit or 'no unit'})" for p in owners)
            or "an owner that may not be read"
        )
        current = self._read("current.json") if root else None
        proven = self._read("proven.json") if root else None
        return PlanReport(
            host=self.host.name, unit=plan.unit, id=plan.id, diff=unit_diff(old, plan.unit_text, plan.unit), unit_new=old is None,
            dropins=state.get("DropInPaths").split(), now=state.words(),
            runs=[{**seen(p, why).model_dump(), "gpu_mib": _gpu_mib(view, p.pid)} for p, why in mine.values()],
            bystanders=[b.model_dump() for b in bystanders],
            containers=[c.model_dump() for c in containers.values()] + [{"id": i, "reason": why} for i, why in silent.items()],
            gpus=[_gpu_row(g) for g in view.gpus],
            gpus_reason=view.gpus_reason, port_held_by=held if view.port_is_held(plan.expectation.port) else None,
            needs_root=list(NEEDS_ROOT),
            can_root=can, unfinished=_unfinished_words(current, plan.id), proven=(proven or {}).get("id"), objections=plan.objections,
            refused=refused(plan), overrides=plan.overrides, about=plan.about, by_hand=by_hand(plan),
            lint=[f"{f.level}: {f.id}: {f.what}" for f in lint_unit(plan.unit_text)],
        )  # fmt: skip

    def _text(self, path: str, root: bool) -> str | None:
        try:
            return self.host.read_file(path, sudo=root).decode("utf-8", "replace")
        except (HostUnreachable, HostTimeout, NeedsRoot):
            raise
        except (HostError, BadInput):
            return None

    # the rollout ---------------------------------------------------------------------------------------------------------
    def run(self) -> DeployReport:
        """Carries the plan out, or goes on where it stopped.

        Returns:
            The report; `proven`, or `rolled_back` if the new configuration failed and the old unit is back.

        Raises:
            Refused, BadInput: the plan may not be carried out; nothing was touched.
            Busy: somebody else rolls this service out now; who and since when.
            Unfinished: another plan began and did not end.
            NeedsRoot: it takes root; the commands for a person are in `by_hand`.
            HostUnreachable, KeyboardInterrupt: it stopped where it was; run it again, or undo it.
        """
        check_plan(self.plan)
        require_systemd(self.host)
        self._control("http://127.0.0.1:1", self.plan)  # a key that nobody has is found before anything is touched
        with self._locked():
            current = self._read("current.json")
            if current and current["step"] == STEPS[0]:
                if current["id"] != self.id:
                    self.say(f"plan {current['id']} of {current['by']} stopped before it touched anything")
                current = None
            if current and current["id"] != self.id:
                raise Unfinished(
                    f"no unfinished rollout of {self.plan.unit}",
                    f"plan {current['id']}, at step {current['step']}, by {current['by']} at {_when(current['at'])}",
                    "run that plan again to continue it, or `workbook deploy --undo` to go back",
                )
            if current and current["step"] == "undo":
                self.say("an earlier run was on its way back: finishing that")
                return self._finish(*self._back("an earlier run was interrupted on its way back"))
            if current is None and self._runs_already():
                return self._finish("proven", "it ran already: proven again, nothing was restarted", [], None)
            step = current["step"] if current and current["step"] in STEPS else STEPS[0]
            if step != STEPS[0]:
                self.say(f"going on at step {step}: the last run stopped there")
            try:
                for name in STEPS[STEPS.index(step) :]:
                    self._do(name)
            except _StepFailed as failure:
                self.say(f"failed: {failure}; taking the way back")
                return self._finish(*self._back(str(failure)))
            return self._finish("proven", f"every claim that must hold passed{self._open_claims()}", [], None)

    def _control(self, url: str, plan: DeployPlan) -> Control:
        """Asks the server of a plan, with its key where it has one.

        Raises:
            BadInput: it has one, and neither we nor its key file on the host give it.
        """
        return Control(url, plan.expectation.api_key_env, api_key=self._key(plan))

    def _key(self, plan: DeployPlan) -> str | None:
        """A plan's API key: this rollout's own for its own plan, else what stands on the host."""
        if not plan.expectation.api_key_env:
            return None
        return (self.api_key if plan is self.plan else None) or key_on(self.host, plan)

    def _runs_already(self) -> bool:
        """True if this very plan is the proven one, nothing of it was changed, and it is proven again as it runs."""
        proven = self._read("proven.json")
        if not proven or proven.get("id") != self.id:
            return False
        state = service_state(self.host, self.plan.unit)
        same = (
            state.get("ActiveState") == "active"
            and not state.get("DropInPaths")
            and state.get("NeedDaemonReload") != "yes"
            and self._text(f"{UNIT_FOLDER}/{self.plan.unit}", True) == self.plan.unit_text
            and self._same_secrets()
        )
        if not same:
            self.say("this plan was proven here, but what runs is not it any more")
            return False
        try:
            began = time.monotonic()
            self.say("prove")
            words = self._step_prove(fresh=False)
            self.steps.append(Step(name="prove", seconds=round(time.monotonic() - began, 3), outcome=words))
            self._do("commit", record=False)
        except _StepFailed as failure:
            self.say(f"it runs, but is not proven any more ({failure}): starting it afresh")
            self.steps, self.proof = [], None
            return False
        return True

    def _open_claims(self) -> str:
        """What the proof could not tell, for its reader."""
        last = self.second_proof or self.proof
        unknown = [c.id for c in (last.claims if last else []) if c.status == "unknown"]
        return f"; not known: {', '.join(unknown)}" if unknown else ""

    def _secret_files(self) -> dict[str, tuple[str, int]]:
        """Files with secrets that this run brings: text and mode by path."""
        files = {}
        if self.plan.environment_file and self.environment is not None:
            files[self.plan.environment_file] = (self.environment, 0o600)
        if self.plan.key_file and self.api_key is not None:
            files[self.plan.key_file] = (f"api-key: {json.dumps(self.api_key)}\n", 0o640)
        return files

    def _same_secrets(self) -> bool:
        return all(self._text(path, True) == text for path, (text, _) in self._secret_files().items())

    def undo(self) -> DeployReport:
        """Goes back to what was there before this rollout, whatever its step.

        Raises:
            BadInput: there is nothing to undo, or it was undone already: going back further is a rollout of its own.
        """
        with self._locked():
            current = self._read("current.json")
            proven = self._read("proven.json")
            if current and current["step"] == STEPS[0]:
                self._current(None)
                return self._finish("undone", "nothing had been touched", [], None)
            if current is None and proven and proven.get("restored_from"):
                raise BadInput(
                    f"a rollout of {self.plan.unit} to undo",
                    f"plan {proven['restored_from']} was undone already, and {proven['id']} runs again",
                    "deploy the configuration that you want",
                )
            known = current["id"] if current else (proven or {}).get("id")
            if known is None or (saved := self._read(f"deployments/{known}/plan.json")) is None:
                if current is None:
                    raise BadInput(f"a rollout of {self.plan.unit} to undo", "none is on record on the host")
                self._current(None)  # it stopped before it saved anything: nothing was touched
                return self._finish("undone", "nothing had been touched", [], None)
            self.plan, self.id = kept_plan(saved), known
            outcome, reason, steps, proof = self._back("asked for")
            return self._finish("undone" if outcome == "rolled_back" else outcome, reason, steps, proof)

    def _finish(self, outcome: str, reason: str, way_back: list[Step], back_proof: Proof | None) -> DeployReport:
        report = DeployReport(
            host=self.host.name, unit=self.plan.unit, id=self.id, outcome=outcome, reason=reason, steps=self.steps,
            stop=self.stop_report, proof=self.proof, restart_proof=self.second_proof, way_back=way_back,
            way_back_proof=back_proof, overrides=self.plan.overrides, by=_who(), at=time.time(),
        )  # fmt: skip
        self.folder.mkdir(parents=True, exist_ok=True)
        local.write_atomic(self.folder / "deploy.json", report.model_dump_json(indent=1))
        return report

    def _do(self, name: str, record: bool = True) -> None:
        began = time.monotonic()
        self._at = name
        self._still_locked()
        try:
            if record:
                self._current(name)
            self.say(name)
            outcome = getattr(self, f"_step_{name}")()
        except (HostUnreachable, NeedsRoot, _StepFailed):
            raise
        except HostTimeout as error:
            raise _StepFailed(f"{name}: {error}") from error
        except HostError as error:
            raise _StepFailed(f"{name}: {error}") from error
        self.steps.append(Step(name=name, seconds=round(time.monotonic() - began, 3), outcome=outcome))

    def _step_save(self) -> str:
        """Keeps what is there: the unit, its drop-ins, its environment file, whether it was enabled and running.

        Where this very plan was the proven one, what was there before it stays the way back, and what is there now (somebody
        changed it) is kept beside it.
        """
        place = f"deployments/{self.id}"
        state = service_state(self.host, self.plan.unit)
        paths = [f"{UNIT_FOLDER}/{self.plan.unit}", *state.get("DropInPaths").split()]
        paths = [path for path in paths if path.startswith(f"{UNIT_FOLDER}/")]
        paths += [path for path in (self.plan.environment_file, self.plan.key_file) if path]
        proven = self._read("proven.json")
        now = {
            "files": {path: self._saved(path) for path in paths},
            "enabled": state.get("UnitFileState"), "active": state.active, "invocation": state.invocation,
            "proven": proven,
        }  # fmt: skip
        again = proven and proven.get("id") == self.id
        if again and self._read(f"{place}/previous.json") is not None:
            self._write(f"{place}/replaced-{int(time.time())}.json", now)
        else:
            self._write(f"{place}/previous.json", now)
        self._write(f"{place}/plan.json", self.plan.model_dump(mode="json"))
        self.host.remove(f"{self.base}/{place}/proof.json", sudo=True)
        return "what was there is kept"

    def _saved(self, path: str) -> dict[str, Any] | None:
        entry = self.host.entry(path, sudo=True)
        if entry is None or entry.kind != "file":
            return None if entry is None else {"link": entry.target} if entry.kind == "link" else None
        data = self.host.read_file(path, sudo=True)
        owner = self.host.run(["stat", "-c", "%u:%g", "--", path], sudo=True).check(f"the owner of {path}").text.strip()
        return {"data": base64.b64encode(data).decode(), "mode": entry.mode & 0o7777, "owner": owner}

    def _step_put(self) -> str:
        """Writes the unit and its environment file; drop-ins of the old unit would change the new one and go."""
        state = service_state(self.host, self.plan.unit)
        self._put_secrets()
        path = f"{UNIT_FOLDER}/{self.plan.unit}"
        there = self.host.entry(path, sudo=True)
        if there is not None and there.kind == "link":  # masked, or linked: what it leads to is not ours to write
            self.host.remove(path, sudo=True)
        self.host.put(self.plan.unit_text.encode(), path, mode=0o644, parents=True, sudo=True)
        dropins = [p for p in state.get("DropInPaths").split() if p.startswith(f"{UNIT_FOLDER}/")]
        for path in dropins:
            self.host.remove(path, sudo=True)
        systemctl(self.host, "daemon-reload").check("systemd reads the new unit")
        now = service_state(self.host, self.plan.unit)
        if now.get("LoadState") != "loaded":
            raise _StepFailed(f"put: systemd says {now.get('LoadState')} of the new unit")
        others = now.get("DropInPaths").split()
        if others:
            raise _StepFailed(f"put: drop-ins outside {UNIT_FOLDER} change the unit: {', '.join(others)}")
        return f"unit written, {len(dropins)} drop-ins set aside"

    def _put_secrets(self) -> None:
        for path, (text, mode) in self._secret_files().items():
            self.host.put(text.encode(), path, mode=0o600, parents=True, sudo=True)
            owner = "root:root"
            if mode & 0o040 and self.plan.key_reader:
                group = self.host.run(["id", "-g", "--", self.plan.key_reader]).check(
                    f"the account {self.plan.key_reader} is there"
                )
                owner = f"root:{group.text.strip()}"
            self.host.run(["chown", "--", owner, path], sudo=True).check(f"{path} is {owner}'s")
            self.host.run(["chmod", f"{mode:04o}", "--", path], sudo=True).check(f"{path} has mode {mode:o}")
        for wanted in (self.plan.environment_file, self.plan.key_file):
            if wanted and not self.host.exists(wanted, sudo=True):
                raise _StepFailed(f"put: {wanted}, which the unit needs, is not there and was not given (--environment-file)")

    def _step_stop(self) -> str:
        """The old one really gone."""
        plan = self.plan
        report = stop_service(
            self.host,
            plan.unit,
            plan.expectation.port,
            drain_s=plan.drain_s,
            kill_s=plan.kill_s,
            hypervisor=self.hypervisor,
            say=self.say,
        )
        self.stop_report = report
        self.folder.mkdir(parents=True, exist_ok=True)
        local.write_atomic(self.folder / "stop.json", report.model_dump_json(indent=1))
        if not report.gone:
            raise _StepFailed(
                f"stop: the old server is {report.state}: {'; '.join(f'pid {s.pid} {s.argv[:60]}' for s in report.left)}"
            )
        if report.port_free is False:
            raise _StepFailed(
                f"stop: port {plan.expectation.port} is held by {report.port_reason}, which is not this service's"
            )
        return report.state

    def _step_start(self) -> str:
        unit = self.plan.unit
        systemctl(self.host, "reset-failed", "--", unit)
        systemctl(self.host, "enable", "--", unit).check("the unit is enabled", "does it have an [Install] section?")
        state = service_state(self.host, unit)
        if not state.active:
            systemctl(self.host, "start", "--no-block", "--", unit).check("systemd takes the start")
        return "started"

    def _step_ready(self) -> str:
        return self._wait_ready(self.plan)

    def _wait_ready(self, plan: DeployPlan) -> str:
        """Waits until the server answers, the unit fails, or the time is over; shows the log's own progress."""
        began, last = time.monotonic(), ""
        phases: dict[str, float] = {}
        with reach(self.host, plan.expectation) as url:
            control = self._control(url, plan)
            while True:
                self._still_locked()
                state = service_state(self.host, plan.unit)
                gone = time.monotonic() - began
                if state.get("ActiveState") == "failed" or (
                    state.get("ActiveState") == "inactive" and not state.get("Job").strip("0")
                ):
                    raise _StepFailed(
                        f"ready: the unit is {state.words()} after {gone:.0f} s: {self._last_words(state)}"
                    )
                if state.main_pid and state.get("ActiveState") == "active" and control.health(timeout_s=10.0) == 200:
                    return f"after {gone:.1f} s"
                if gone > plan.ready_timeout_s:
                    raise _StepFailed(f"ready: no answer after {gone:.0f} s: {self._last_words(state)}")
                words = self._progress(state, plan, phases)
                if words and words != last:
                    self.say(words)
                    last = words
                time.sleep(0.25 if gone < 5.0 else 1.0)

    def _journal(self, state: ServiceState, lines: int) -> list[str]:
        if not state.invocation:
            return []
        done = self.host.run(
            ["journalctl", "--no-pager", "--quiet", "--output=cat", f"--lines={lines}", f"_SYSTEMD_INVOCATION_ID={state.invocation}"],
            deadline_s=30.0, sudo=True,
        )  # fmt: skip
        return redact_text(done.text).splitlines()

    def _last_words(self, state: ServiceState) -> str:
        words = [line.strip() for line in self._journal(state, 8) if line.strip()]
        return " / ".join(words[-3:])[:500] or "its journal is empty"

    def _progress(self, state: ServiceState, plan: DeployPlan, begun: dict[str, float]) -> str:
        """The phase that this start's own log shows, and the seconds left by what an earlier start took."""
        phases = [p for line in self._journal(state, 200) if (p := phase_of(line))]
        if not phases:
            return state.get("SubState")
        name = phases[-1].name
        since = time.monotonic() - begun.setdefault(name, time.monotonic())
        left = seconds_left(name, since, plan.phase_s)
        return f"{state.get('SubState')}: {phases[-1].text}" + (f", about {left:.0f} s left" if left is not None else "")

    def _step_prove(self, fresh: bool = True) -> str:
        """Each claim; then a crash, and each claim again (not where it serves already and is only looked at: `fresh`)."""
        plan = self.plan
        self._wait_ready(plan)
        self.proof = self._prove(plan, "proof", bench=fresh)  # no load on a server that others use
        if plan.restart_proof and fresh:
            self.second_proof = self._crash_and_prove(plan)
        self._write(f"deployments/{plan.id}/proof.json", (self.second_proof or self.proof).model_dump(mode="json"))
        return f"{sum(c.status == 'pass' for c in self.proof.claims)} of {len(self.proof.claims)} claims passed"

    def _prove(self, plan: DeployPlan, name: str, bench: bool = True) -> Proof:
        proof = prove(
            self.host, plan.unit, plan.expectation, self.folder / name, self.bench if bench else None, self._key(plan)
        )
        if not proof.proven:
            bad = proof.failed or [c for c in proof.claims if c.status != "pass"]
            raise _StepFailed(f"{name}: " + "; ".join(f"{c.id}: expected {c.expected}, found {c.found}" for c in bad))
        return proof

    def _crash_and_prove(self, plan: DeployPlan) -> Proof:
        """Kills the scheduler (or the main process where it has none), sees the unit come back by itself, proves it again."""
        before = service_state(self.host, plan.unit)
        members = self._members(plan)
        workers = [p for p in members if p.name.startswith("sglang::") and "sched" in p.name]
        victim = workers[0] if workers else next((p for p in members if p.pid == before.main_pid), None)
        if victim is None:
            raise _StepFailed("restart: the service has no process to crash")
        self.say(f"crashing pid {victim.pid} ({victim.name}): does the unit come back by itself?")
        signal_processes(self.host, 9, {victim.pid: victim.ticks})
        end = time.monotonic() + plan.ready_timeout_s
        while (state := service_state(self.host, plan.unit)).invocation in (
            None,
            before.invocation,
        ) or not state.main_pid:
            if state.get("ActiveState") == "failed" or time.monotonic() > end:
                raise _StepFailed(f"restart: after a crash of {victim.name} the unit is {state.words()}")
            time.sleep(0.5)
        self._wait_ready(plan)
        return self._prove(plan, "proof-after-crash", bench=False)

    def _members(self, plan: DeployPlan) -> list[HostProcess]:
        """Live processes of the service, also those in its container."""
        view = self.host.view(sudo=True)
        containers, _ = serving_containers(self.host, view)
        return [process for process, _ in targets(view, plan.unit, plan.expectation.port, containers)[0].values()]

    def _step_commit(self) -> str:
        kept = self._read(f"deployments/{self.id}/proof.json")
        if kept is None:  # an interrupted run left none
            self._step_prove()
            kept = self._read(f"deployments/{self.id}/proof.json")
        self._write("proven.json", {
            "id": self.id, "at": time.time(), "by": _who(), "plan": self.plan.model_dump(mode="json"), "proof": kept,
            "unit_sha256": hashlib.sha256(self.plan.unit_text.encode()).hexdigest(), **self._start_facts(),
        })  # fmt: skip
        self._current(None)
        return "recorded as the last proven one"

    # the way back ----------------------------------------------------------------------------------------------------------
    def _back(self, reason: str) -> tuple[str, str, list[Step], Proof | None]:
        """Restores what was there and proves it as far as it was proven before; repeatable at any point."""
        steps: list[Step] = []
        untouched = self._at == STEPS[0]  # what an older rollout of this plan had saved is not what is there now
        previous = None if untouched else self._read(f"deployments/{self.id}/previous.json")
        if previous is None:
            self._current(None)
            return "rolled_back", f"{reason}; nothing had been touched", steps, None
        try:
            self._current("undo")
        except (HostUnreachable, HostTimeout, NeedsRoot):
            raise
        except HostError as error:  # a full disk must not keep the old unit from coming back
            self.say(f"the way back can't be put on record: {error.found}")

        def done(name: str, began: float, outcome: str) -> None:
            steps.append(Step(name=name, seconds=round(time.monotonic() - began, 3), outcome=outcome))
            self.say(f"way back: {name}: {outcome}")

        began = time.monotonic()
        had = previous["files"].get(f"{UNIT_FOLDER}/{self.plan.unit}") is not None
        try:
            running = service_state(self.host, self.plan.unit)
            untouched = (
                previous["active"]
                and running.invocation == previous["invocation"]
                and running.get("ActiveState") == "active"
            )
            if not untouched:
                port = self.plan.expectation.port
                report = stop_service(
                    self.host, self.plan.unit, port, drain_s=min(self.plan.drain_s, 10.0), kill_s=self.plan.kill_s,
                    hypervisor=self.hypervisor, say=self.say,
                )  # fmt: skip
                done("stop", began, report.state)
            began = time.monotonic()
            self._restore(previous)
            done(
                "restore", began, "the old unit is back" if had else "there was no unit before: the new one is removed"
            )
            proof = None
            if previous["active"] and had:
                began = time.monotonic()
                proof, words = self._start_old(previous, untouched)
                done("start", began, words)
        except (_StepFailed, HostTimeout) as error:
            return "failed_and_not_rolled_back", f"{reason}; on the way back: {error}", steps, None
        except HostError as error:
            if isinstance(error, (HostUnreachable, NeedsRoot)):
                raise
            return "failed_and_not_rolled_back", f"{reason}; on the way back: {error}", steps, None
        if previous["proven"]:
            restored = {"restored_from": self.id, "restored_at": time.time(), **self._start_facts()}
            self._write("proven.json", {**previous["proven"], **restored})
        else:
            self.host.remove(f"{self.base}/proven.json", sudo=True)
        self._current(None)
        return "rolled_back", reason, steps, proof

    def _start_facts(self) -> dict[str, Any]:
        """What tells this start from the next."""
        state = service_state(self.host, self.plan.unit)
        shown = self.host.run(["journalctl", "--no-pager", "--quiet", "--lines=1", "--show-cursor"], deadline_s=30.0, sudo=True)
        cursor = next((line[11:] for line in shown.text.splitlines() if line.startswith("-- cursor: ")), None)
        return {"invocation": state.invocation, "restarts": state.get("NRestarts"), "cursor": cursor}

    def _restore(self, previous: Mapping[str, Any]) -> None:
        unit = self.plan.unit
        if previous["enabled"] not in ("enabled", "enabled-runtime"):
            systemctl(self.host, "disable", "--", unit)
        for path, kept in previous["files"].items():
            if kept is None:
                self.host.remove(path, sudo=True)
            elif "link" in kept:
                self.host.run(["ln", "-sfn", "--", kept["link"], path], sudo=True).check("the old link is back")
            else:
                self.host.put(base64.b64decode(kept["data"]), path, mode=0o600, parents=True, sudo=True)
                self.host.run(["chown", "--", kept["owner"], path], sudo=True).check(f"the owner of {path} is back")
                self.host.run(["chmod", f"{kept['mode']:o}", "--", path], sudo=True).check(f"the mode of {path} is back")
        systemctl(self.host, "daemon-reload").check("systemd reads the old unit")
        if previous["enabled"] in ("enabled", "enabled-runtime"):
            systemctl(self.host, "enable", "--", unit)

    def _start_old(self, previous: Mapping[str, Any], untouched: bool) -> tuple[Proof | None, str]:
        """Starts the old unit again, and proves it with what proved it; without a proof of its own: systemd and its port."""
        unit = self.plan.unit
        if not untouched:
            systemctl(self.host, "reset-failed", "--", unit)
            systemctl(self.host, "start", "--no-block", "--", unit).check("systemd takes the start of the old unit")
        proven = previous["proven"]
        if proven:
            old = kept_plan(proven["plan"])
            self._wait_ready(old)
            return self._prove(old, "way-back-proof", bench=False), "the last proven unit runs and is proven again"
        end = time.monotonic() + self.plan.ready_timeout_s
        while (state := service_state(self.host, unit)).get("ActiveState") not in ("active", "failed"):
            if time.monotonic() > end:
                raise _StepFailed(f"the old unit is {state.words()}")
            time.sleep(0.5)
        if state.get("ActiveState") == "failed":
            raise _StepFailed(f"the old unit doesn't start: {self._last_words(state)}")
        return None, "the old unit runs; it was never proven, so nothing but systemd says so"

    # one at a time -------------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the service's lock on the host as long as we are connected.

        Raises:
            Busy: somebody holds it: who, from where and since when.
        """
        words = f"{_who()}, plan {self.id}, since {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"
        argv = [self.host.python, "-c", _HOLD, f"{self.base}/lock", words]
        with self.host.start(argv, deadline_s=LOCK_S, sudo=True) as holder:
            holder.feed(b"", end=False)
            self._holder = holder
            answer = next(holder.lines(), "")
            if answer.startswith("busy"):
                raise Busy(
                    f"no other rollout of {self.plan.unit} on {self.host.name}",
                    answer[5:] or "somebody",
                    "wait for it, or ask them",
                )
            if answer != "held":
                holder.wait().check("the lock of the service can be taken")
                raise HostError("the lock of the service can be taken", repr(answer))
            try:
                yield
            finally:
                self._holder = None

    def _still_locked(self) -> None:
        """Stops where the connection that holds the lock is gone: somebody else may have taken it.

        Raises:
            HostUnreachable: it is.
        """
        if self._holder is not None and (not self._holder.connected or self._holder.ending is not None):
            raise HostUnreachable(
                f"{self.host.name} stays connected during the rollout", "the connection that holds its lock is gone", "run it again"
            )


def _who() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):
        return socket.gethostname()


def _when(at: float) -> str:
    return f"{datetime.datetime.fromtimestamp(at, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"


def _unfinished_words(current: Mapping[str, Any] | None, plan_id: str) -> str | None:
    if not current:
        return None
    which = "this plan" if current["id"] == plan_id else f"plan {current['id']}"
    return f"{which} stopped at step {current['step']}, by {current['by']} at {_when(current['at'])}"


def _gpu_row(gpu: HostGpu) -> dict[str, Any]:
    return {
        "gpu": gpu.name,
        "uuid": gpu.uuid,
        "used_mib": gpu.memory_used_mib,
        "holders": sorted({*gpu.users, *gpu.holders}),
    }


def _gpu_mib(view: Any, pid: int) -> float | None:
    numbers = [gpu.users[pid] for gpu in view.gpus if gpu.users.get(pid) is not None]
    return sum(numbers) if numbers else None


def unit_diff(old: str | None, new: str, name: str) -> str:
    """A unified diff from the installed unit to the planned one; empty if they are the same."""
    import difflib

    before = redact_text(old or "").splitlines(keepends=True)
    after = redact_text(new).splitlines(keepends=True)
    return "".join(
        difflib.unified_diff(before, after, f"installed/{name}" if old is not None else "/dev/null", f"planned/{name}")
    )


def by_hand(plan: DeployPlan) -> list[str]:
    """The commands with which a person does the same as root, where this workbook may not."""
    unit = shlex.quote(plan.unit)
    out = [f"install -m 0644 -o root -g root {unit} {UNIT_FOLDER}/{unit}"]
    if plan.environment_file:
        target = shlex.quote(plan.environment_file)
        out.append(f"install -m 0600 -o root -g root /dev/stdin {target}   # NAME=value lines, secrets among them")
    if plan.key_file:
        group = f"$(id -gn {shlex.quote(plan.key_reader)})" if plan.key_reader else "root"
        out.append(f'install -m 0640 -o root -g "{group}" /dev/stdin {shlex.quote(plan.key_file)}   # api-key: "..."')
    return [
        *out, "systemctl daemon-reload", f"systemctl stop {unit}",
        f"ss -ltnp 'sport = :{plan.expectation.port}'   # must show nothing: whoever holds the port is not stopped by systemctl",
        f"systemctl enable --now {unit}",
        f"journalctl _SYSTEMD_INVOCATION_ID=$(systemctl show -P InvocationID {unit})   # this start's lines only",
    ]  # fmt: skip
