"""What `--engine dask` is told on the command line, and the engine made of it; without its packages one message says so."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from lib.batch.engine import Engine
from lib.errors import BadInput


def add_arguments(parser: argparse._ActionsContainer) -> None:
    """Adds the options of the dask engine."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--scheduler", metavar="ADDRESS", help="dask: a scheduler that is there, such as tcp://HOST:8786"
    )
    where.add_argument("--cluster", metavar="FILE", help="dask: start workers over SSH or by Slurm (docs/dask.md)")
    parser.add_argument(
        "--wait-hosts", type=float, default=120.0, metavar="S", help="dask: wait so long for a worker of a host (120)"
    )


def need_packages() -> None:
    """See that the optional packages are there.

    Raises:
        BadInput: they are not; says what to install.
    """
    missing = [name for name in ("distributed", "dask_jobqueue", "asyncssh") if importlib.util.find_spec(name) is None]
    if missing:
        raise BadInput(
            "the packages of the dask engine",
            f"{', '.join(missing)} not installed",
            "pip install -r requirements-dask.txt (one host needs none of it: leave --engine out)",
        )


def make_engine(args: argparse.Namespace) -> Engine:
    """The engine, connected to its scheduler.

    Raises:
        BadInput: neither --scheduler nor --cluster, no such scheduler, or the packages are missing.
        HostError: the cluster does not start.
    """
    need_packages()
    if not args.scheduler and not args.cluster:
        raise BadInput("where the tasks run", "neither --scheduler nor --cluster", "give one of them (docs/dask.md)")
    if not args.wait_hosts > 0:
        raise BadInput("--wait-hosts above 0", str(args.wait_hosts))
    from lib.batch import dask_cluster
    from lib.batch.dask_engine import DaskEngine

    if args.scheduler:
        return DaskEngine(dask_cluster.connect(args.scheduler), wait_s=args.wait_hosts)
    cluster = dask_cluster.start_cluster(dask_cluster.read_cluster(Path(args.cluster)))
    return DaskEngine(dask_cluster.connect(cluster.scheduler_address), cluster, args.wait_hosts)
