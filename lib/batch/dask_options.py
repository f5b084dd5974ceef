"""What `--engine dask` and load from several machines are told on the command line; without their packages one message."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lib.errors import BadInput

if TYPE_CHECKING:
    from lib.batch.dask_load import DaskSenders
    from lib.batch.engine import Engine


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


def add_load_arguments(parser: argparse._ActionsContainer) -> None:
    """Adds the options by which load is sent from several machines."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--scheduler", metavar="ADDRESS", help="send from workers of this dask scheduler (docs/dask.md)")
    where.add_argument("--cluster", metavar="FILE", help="send from the machines of this file (docs/dask.md)")
    parser.add_argument("--machines", type=int, metavar="N", help="how many of them (default: all that serve the name)")
    parser.add_argument(
        "--serving", default="load", metavar="NAME", help="the name that the workers serve (default: load)"
    )
    parser.add_argument("--listen", metavar="ADDRESS", help="address of this machine that they reach")
    parser.add_argument(
        "--max-skew", type=float, default=0.002, metavar="S", help="how far two machines' times may be apart (0.002 s)"
    )


@contextlib.contextmanager
def load_senders(args: argparse.Namespace) -> Iterator[DaskSenders | None]:
    """The machines that a level is sent from; None where it is sent from here.

    Raises:
        BadInput: as `make_engine`, or the machines can't take part.
    """
    if not args.scheduler and not args.cluster:
        if args.machines is not None or args.listen:
            raise BadInput("--machines and --listen with --scheduler or --cluster", "neither", "name one of them")
        yield None
        return
    need_packages()
    if args.workers != 1:
        raise BadInput("one sending process on each machine", f"--workers {args.workers}", "leave --workers out")
    if not args.max_skew > 0 or (args.machines is not None and args.machines < 1):
        raise BadInput("--max-skew above 0 and --machines of at least 1", f"{args.max_skew}, {args.machines}")
    from lib.batch import dask_cluster
    from lib.batch.dask_load import DaskSenders

    cluster = dask_cluster.start_cluster(dask_cluster.read_cluster(Path(args.cluster))) if args.cluster else None
    client = dask_cluster.connect(cluster.scheduler_address if cluster else args.scheduler)
    try:
        yield DaskSenders(client, args.serving, args.machines, args.listen, args.max_skew)
    finally:
        dask_cluster.end(client, cluster)


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
