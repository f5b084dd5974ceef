"""Load from several machines by the batch's engine: workers of a dask scheduler take part in one level of `workbook bench`."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from distributed import Client, Future

from lib.batch import dask_worker
from lib.batch.hand_over import HOST, host_names, sharing_faults
from lib.errors import BadInput
from lib.load import far_worker, judge
from lib.load.machines import MAX_SKEW_S, MachinesSender


class DaskSenders:
    """The machines of a level: workers that serve a host's name, one worker a machine, each for itself while a level runs.

    Args:
        client: connected to the scheduler.
        name: the host's name that the sending machines serve.
        count: how many of them; None for all there are.
        listen: an address of this machine that they reach; None: the one from which this machine reaches the scheduler.
        max_skew_s: how far two machines' times may be apart in the merged window.

    Raises:
        BadInput: too few workers serve that name, they share a machine, or one has other code than this machine.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        count: int | None = None,
        listen: str | None = None,
        max_skew_s: float = MAX_SKEW_S,
    ) -> None:
        self.client, self.name, self.max_skew_s = client, name, max_skew_s
        workers = dict(client.scheduler_info(n_workers=-1)["workers"])
        serving = sorted(address for address, w in workers.items() if name in host_names(w))
        if not serving or len(serving) < (count or 1):
            raise BadInput(
                f"{count or 'some'} workers that serve {name!r}", f"{len(serving)} of {len(workers)}",
                f'start them: dask worker SCHEDULER --nthreads 1 --resources "{HOST}{name}=1"',
            )  # fmt: skip
        self.machines: Sequence[str] = serving[: count or len(serving)]
        about = client.run(dask_worker.about, workers=list(self.machines))
        faults = sharing_faults(workers, {a: about[a]["machine"] for a in self.machines})
        code = dask_worker.code_sha256()
        faults += [f"other code on {about[a]['machine']}" for a in self.machines if about[a]["code"] != code]
        if faults:
            raise BadInput("one worker with this project's code on each sending machine", "; ".join(faults))
        self.listen = listen or _address_towards(client)
        self._tasks: list[Future] = []

    def sender(self) -> MachinesSender:
        """For one level: `run_level(sender=..., workers=len(machines))`."""
        return MachinesSender(len(self.machines), self.listen, self._place, self.max_skew_s)

    def _place(self, host: str, port: int, token: str) -> None:
        self._tasks = [
            self.client.submit(
                far_worker.serve, host, port, token, workers=[address], pure=False, resources={HOST + self.name: 1.0}
            )
            for address in self.machines
        ]

    def calibrate(self, streams: int, api: str) -> dict[str, Any]:
        """What each machine's client shows of its share of the streams against a judge of its own; the worst counts."""
        share = max(1, -(-streams // len(self.machines)))
        made = [
            self.client.submit(judge.calibrate, share, api=api, workers=[a], pure=False, resources={HOST + self.name: 1.0})
            for a in self.machines
        ]  # fmt: skip
        found: list[dict[str, Any]] = [future.result() for future in made]
        order = ("not_calibrated", "client_bound", "ok")
        worst = min(found, key=lambda one: order.index(one["status"]))
        rate = len(found) * min(one.get("chunks_per_s", 0.0) for one in found)
        whole = {"workers": len(found), "streams": sum(one["streams"] for one in found), "chunks_per_s": rate}
        return worst | whole | {"machines": [{"worker": a, **one} for a, one in zip(self.machines, found, strict=True)]}


def _address_towards(client: Client) -> str:
    """The address of this machine on the way to the scheduler; loopback where the scheduler is here."""
    parts = urlsplit(str(client.scheduler_info(n_workers=0)["address"]))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((parts.hostname or "127.0.0.1", parts.port or 1))
            return str(probe.getsockname()[0])
        except OSError as error:
            raise BadInput("an address that the sending machines reach", str(error), "give it by --listen") from error
