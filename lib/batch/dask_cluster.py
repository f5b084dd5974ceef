"""Where the tasks of `--engine dask` run: a scheduler that is there, hosts over SSH, or jobs of Slurm (`--cluster FILE`).

A cluster file is YAML: `kind: ssh` with hosts, or `kind: slurm` with what a job asks for; docs/dask.md has one of each.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from distributed import Client, Scheduler, SpecCluster
from distributed.deploy import ssh
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from lib.batch.hand_over import HOST
from lib.errors import BadInput, BadParams, HostError
from lib.params import ROOT, validated

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_=+-]{1,60}$")]
#: Seconds that connecting to a scheduler may take.
CONNECT_S = 30


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Serving(_Part):
    """What a worker says of its machine: the names on the matrix's axis of hosts, its GPUs, tasks at once."""

    serves: list[Name] = Field(min_length=1, description="names of the matrix's hosts that it stands for")
    gpus: int = Field(default=0, ge=0)
    tasks: int = Field(default=1, ge=1, description="tasks at once; more than one only for hosts that are `shared`")

    def resources(self) -> dict[str, float]:
        """As dask counts them."""
        return {HOST + name: 1.0 for name in self.serves} | ({"GPU": float(self.gpus)} if self.gpus else {})


class SSHMachine(Serving):
    """One machine that plain `ssh` reaches without asking."""

    address: str = Field(description="HOST, or a name of the ssh configuration")
    user: str | None = None
    python: str | None = Field(default=None, description="interpreter with this project; None: the file's")


class SSHSpec(_Part):
    """`kind: ssh`: a worker on each host, and a scheduler here or on one of them."""

    kind: Literal["ssh"]
    hosts: list[SSHMachine] = Field(min_length=1)
    scheduler: str | None = Field(default=None, description="host of the scheduler; None: this machine")
    listen: str | None = Field(default=None, description="address by which the workers reach the scheduler")
    dashboard: str = Field(default=":0", description="where the dashboard listens; :0 is any free port")
    python: str = Field(default=".venv/bin/python", description="interpreter on the hosts, below `folder`")
    folder: str = Field(default=str(ROOT), description="the project's folder on the hosts")
    config: str | None = Field(default=None, description="another ssh configuration than ~/.ssh/config")


class SlurmSpec(Serving):
    """`kind: slurm`: one job a worker, each with a node for itself."""

    kind: Literal["slurm"]
    jobs: int = Field(ge=1, description="how many nodes")
    cores: int = Field(default=1, ge=1, description="CPUs of a node's job")
    memory: str = Field(description="of a node's job, such as 200GB")
    walltime: str = Field(default="04:00:00")
    queue: str | None = None
    account: str | None = None
    directives: list[str] = Field(default=[], description="further #SBATCH lines, such as --gres=gpu:8")
    prologue: list[str] = Field(default=[], description="shell lines before the worker, such as module load")
    interface: str | None = Field(default=None, description="network interface, such as ib0")
    python: str = Field(default=".venv/bin/python", description="interpreter on the nodes, below `folder`")
    folder: str = Field(default=str(ROOT), description="the project's folder on the nodes")
    log_folder: str = Field(default="outputs/.slurm", description="output of the jobs, below `folder`")


def read_cluster(file: Path) -> SSHSpec | SlurmSpec:
    """A cluster file, checked whole.

    Raises:
        BadParams: it is not readable, or has unknown keys or wrong values; all are named.
    """
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise BadParams(f"a cluster file at {file}", str(error).splitlines()[0]) from error
    kinds: dict[str, type[SSHSpec | SlurmSpec]] = {"ssh": SSHSpec, "slurm": SlurmSpec}
    kind = found.get("kind") if isinstance(found, dict) else None
    if kind not in kinds:
        raise BadParams(f"kind: one of {', '.join(kinds)} in {file.name}", repr(kind), "see docs/dask.md")
    return validated(kinds[str(kind)], found, file.name)


def start_cluster(spec: SSHSpec | SlurmSpec) -> Any:
    """Start what a cluster file asks for.

    Raises:
        HostError: a host can't be reached, or no worker starts there.
    """
    _be_quiet()
    try:
        return ssh_cluster(spec) if isinstance(spec, SSHSpec) else slurm_cluster(spec, scale=True)
    except Exception as error:  # noqa: BLE001  (asyncssh, dask, Slurm's own command: each has errors of its own)
        raise HostError(
            f"a {spec.kind} cluster that starts",
            f"{type(error).__name__}: {str(error).strip()[:400]}",
            "try the same by hand: ssh HOST, then its python -m distributed.cli.dask_worker --version",
        ) from error


def ssh_cluster(spec: SSHSpec) -> SpecCluster:
    """What `dask.distributed.SSHCluster` makes, with resources of its own for each host."""
    connect = {"config": [spec.config]} if spec.config else {}
    workers = {
        machine.address: {
            "cls": ssh.Worker,
            "options": {
                "address": machine.address,
                "connect_options": connect | ({"username": machine.user} if machine.user else {}),
                "kwargs": {
                    "nthreads": machine.tasks, "resources": machine.resources(), "memory_limit": 0, "death_timeout": 60,
                },
                "remote_python": _python(spec, machine.python),
            },
        }
        for machine in spec.hosts
    }  # fmt: skip
    listen: dict[str, Any] = {"dashboard_address": spec.dashboard, "port": 0}
    if spec.listen:
        listen["host"] = spec.listen
    scheduler = (
        {
            "cls": ssh.Scheduler,
            "options": {
                "address": spec.scheduler, "connect_options": connect, "kwargs": listen,
                "remote_python": _python(spec),
            },
        }
        if spec.scheduler
        else {"cls": Scheduler, "options": listen}
    )  # fmt: skip
    return SpecCluster(workers, scheduler, name="workbook-ssh")


def _python(spec: SSHSpec, own: str | None = None) -> str:
    """The interpreter in the project's folder, as words of a shell."""
    return shlex.join(["env", "-C", spec.folder, own or spec.python])


def slurm_cluster(spec: SlurmSpec, scale: bool = False) -> Any:
    """A dask-jobqueue cluster whose jobs each have one node, one worker; `job_script()` shows what is submitted."""
    from dask_jobqueue import SLURMCluster

    resources = ",".join(f"{name}={value:g}" for name, value in spec.resources().items())
    cluster = SLURMCluster(
        queue=spec.queue,
        account=spec.account,
        cores=spec.tasks,
        processes=1,
        job_cpu=spec.cores,
        memory=spec.memory,
        walltime=spec.walltime,
        interface=spec.interface,
        python=spec.python,
        job_extra_directives=["--nodes=1", "--exclusive", *spec.directives],
        job_script_prologue=[*spec.prologue, f"cd {shlex.quote(spec.folder)}"],
        worker_extra_args=["--resources", resources, "--memory-limit", "0"],
        log_directory=f"{spec.folder}/{spec.log_folder}",
    )
    if scale:
        cluster.scale(jobs=spec.jobs)
    return cluster


def connect(address: str) -> Client:
    """A client of a scheduler that is there.

    Raises:
        BadInput: nothing answers at that address.
    """
    _be_quiet()
    try:
        return Client(address, timeout=CONNECT_S, set_as_default=False)
    except (OSError, TimeoutError, ValueError, ImportError) as error:
        raise BadInput(
            f"a dask scheduler at {address}", f"{type(error).__name__}: {str(error)[:300]}", "start one: dask scheduler"
        ) from error


def end(client: Client, cluster: Any = None) -> None:
    """Lets go of a scheduler; with the cluster that was started for it, its workers are closed first.

    They are told by the scheduler: ssh alone would leave them behind where a host's sshd passes no signals on (root's does not
    without privilege separation), for the minute that they wait for a scheduler.
    """
    if cluster is not None:
        with contextlib.suppress(Exception):  # noqa: BLE001  (whatever is gone already need not be ended)
            client.retire_workers(close_workers=True, remove=True)
    with contextlib.suppress(Exception):  # noqa: BLE001
        client.close(timeout=10)
    if cluster is not None:
        with contextlib.suppress(Exception):  # noqa: BLE001  (a host that is gone doesn't hang up)
            cluster.close(timeout=5)
        cluster.shutdown_on_close = False  # not once more, and for longer, when this process ends


def _be_quiet() -> None:
    """What goes wrong is said once, by this project, without a traceback."""
    for name in ("distributed", "asyncssh", "dask_jobqueue", "tornado"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
