"""One level of load from several machines: started together, their clocks aligned, their records merged by time.

`MachinesSender` is given to `lib.load.client.run_level(sender=..., workers=N)` in place of processes here. Each machine has
connected back (lib.load.far_worker). Its clock is compared with this one's by round-trip exchanges right before the window and
right after it; its times are then told by this clock, and `client.about` says how far they can be off. Where that is more than
may be, the window is not merged.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib.errors import ServerError
from lib.load import client
from lib.load.clocks import Alignment, Exchange, Offset, offset_of, skew_bound_ns

#: Round trips before the window and again after it; those that take long cost nothing, the others narrow the bound.
EXCHANGES = 100
#: All machines start this much after the order was given, so that it has reached them by then.
LEAD_NS = 300_000_000
#: Seconds that machines may take to connect.
ARRIVE_S = 60.0
#: How far two machines' times may be apart in a merged window where nothing else is said.
MAX_SKEW_S = 0.002
_TIMES = ("due_ns", "sent_ns", "end_ns")


class SkewTooLarge(ServerError):
    """Machines' clocks can't be told well enough for their records to be one window."""


@dataclass
class _Machine:
    """The connection to one machine."""

    connection: socket.socket
    about: dict[str, Any]
    unread: bytes = b""
    answer: dict[str, Any] = field(default_factory=dict)
    clocks: list[int] = field(default_factory=list)
    before: Offset | None = None
    after: Offset | None = None
    asked: bool = False

    @property
    def name(self) -> str:
        return str(self.about["machine"])

    def order(self, text: str) -> None:
        with contextlib.suppress(ConnectionError):  # the next reading says who went away
            self.connection.sendall(text.encode() + b"\n")

    def take(self) -> None:
        """Read what it sends: lines, and after the last one its records, which stay unread."""
        try:
            data = self.connection.recv(1 << 20)
        except OSError as error:
            raise ServerError(f"{self.name} to stay until the level is over", error.strerror or str(error)) from error
        if not data:
            raise ServerError(f"{self.name} to stay until the level is over", "it hung up")
        self.unread += data
        while "part" not in self.answer and b"\n" in self.unread:
            line, _, self.unread = self.unread.partition(b"\n")
            if line.startswith(b"C "):
                self.clocks.append(int(line[2:]))
            else:
                with contextlib.suppress(ValueError):
                    self.answer |= json.loads(line)

    def exchange(self) -> Exchange:
        """One reading of its clock; what else it says meanwhile is kept."""
        sent = time.monotonic_ns()
        self.order("CLOCK")
        while not self.clocks:
            self.take()
            received = time.monotonic_ns()
        return Exchange(sent, self.clocks.pop(), received)

    def whole(self) -> bool:
        """Whether all of its records are here."""
        return "part" in self.answer and len(self.unread) >= self.answer["part"]


class MachinesSender:
    """Runs the sending processes of a level on machines that connect back; see `run_level(sender=...)`.

    Args:
        count: how many machines; `run_level` is told the same number of workers.
        listen: an address of this machine that they reach.
        place: called with host, port and token when this end listens: has `far_worker.serve` called on `count` machines.
        max_skew_s: how far two machines' times may be apart in the merged window.
    """

    def __init__(
        self, count: int, listen: str, place: Callable[[str, int, str], None], max_skew_s: float = MAX_SKEW_S
    ) -> None:
        self.count, self.listen, self.place, self.max_skew_s = count, listen, place, max_skew_s
        self.about: dict[str, Any] = {}

    def __call__(
        self,
        jobs: list[Path],
        progress: Callable[[dict[str, Any]], None] | None,
        observe: Callable[[], None] | None = None,
    ) -> list[tuple[dict[str, Any], Path]]:
        """One job a machine; records come back with times of this machine's clock.

        Raises:
            SkewTooLarge: the clocks can't be told well enough.
            ServerError: a machine did not come, went away, or its client failed.
        """
        with contextlib.ExitStack() as stack:
            machines = self._gather(len(jobs), stack)
            for machine, job in zip(machines, jobs, strict=True):
                data = job.read_bytes()
                with contextlib.suppress(ConnectionError):
                    machine.connection.sendall(b"JOB %d\n" % len(data) + data)
            level = _Level(machines, progress, observe, self.max_skew_s)
            try:
                interrupted = level.run()
            except BaseException:
                level.stop()
                raise
            aligned = [Alignment(m.before, m.after) for m in machines if m.before and m.after]
            self.about = {
                "machines": [m.about for m in machines],
                "clocks": clock_facts(machines, aligned, self.max_skew_s),
            }
            if len(aligned) == len(machines):
                _check_skew(aligned, self.max_skew_s)
            parts = []
            for machine, job, alignment in zip(machines, jobs, aligned, strict=False):
                part = job.with_name(f"{job.name}.part")
                part.write_bytes(aligned_lines(machine.unread, alignment))
                facts = machine.answer["facts"] | {"machine": machine.name}
                facts |= {k: alignment.here_ns(facts[k]) for k in ("start_ns", "end_ns")}
                parts.append((facts, part))
        if interrupted:
            raise client._Interrupted(parts) if parts else KeyboardInterrupt
        return parts

    def _gather(self, count: int, stack: contextlib.ExitStack) -> list[_Machine]:
        """Listen, have the machines called, and take those that know the token."""
        token = secrets.token_hex(16)
        listener = stack.enter_context(socket.create_server((self.listen, 0)))
        listener.settimeout(1.0)
        self.place(self.listen, listener.getsockname()[1], token)
        machines: list[_Machine] = []
        deadline = time.monotonic() + ARRIVE_S
        while len(machines) < count:
            if time.monotonic() > deadline:
                raise ServerError(
                    f"{count} machines that connect to {self.listen} within {ARRIVE_S:g} s", f"{len(machines)} did",
                    "name an address that they reach by --listen",
                )  # fmt: skip
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                stack.enter_context(connection)
                connection.settimeout(10.0)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if (machine := _greeted(connection, token)) is not None:
                    machines.append(machine)
        return machines


def _greeted(connection: socket.socket, token: str) -> _Machine | None:
    data = b""
    with contextlib.suppress(OSError, ValueError):
        while b"\n" not in data and len(data) < 10_000:
            more = connection.recv(4096)
            if not more:
                return None
            data += more
        line, _, rest = data.partition(b"\n")
        about = json.loads(line)
        if secrets.compare_digest(str(about.pop("token", "")), token):
            return _Machine(connection, about, rest)
    connection.close()
    return None


class _Level:
    """From the jobs to the records: wait until all are ready, start them together, listen, compare clocks twice."""

    def __init__(
        self,
        machines: Sequence[_Machine],
        progress: Callable[[dict[str, Any]], None] | None,
        observe: Callable[[], None] | None,
        max_skew_s: float,
    ) -> None:
        self.machines, self.progress, self.observe, self.max_skew_s = machines, progress, observe, max_skew_s
        self.ended = False

    def run(self) -> bool:
        """Until every machine's records are here; True if it was interrupted."""
        interrupted = False
        while True:
            try:
                self._listen()
                return interrupted
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                self.stop()

    def stop(self) -> None:
        for machine in self.machines:
            with contextlib.suppress(OSError):
                machine.order("STOP")

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for machine in self.machines:
                machine.connection.settimeout(60.0)
                if not machine.whole():
                    selector.register(machine.connection, selectors.EVENT_READ, machine)
            while not all(m.whole() for m in self.machines):
                for key, _ in selector.select():
                    key.data.take()
                    if key.data.whole():
                        selector.unregister(key.data.connection)
                        _check_end(key.data)
                self._advance()

    def _advance(self) -> None:
        """The start, when all are ready; the second look at the clocks, when all are over."""
        if all("ready" in m.answer for m in self.machines) and not all(m.before for m in self.machines):
            for machine in self.machines:
                machine.before = offset_of([machine.exchange() for _ in range(EXCHANGES)])
            _check_skew([Alignment(m.before, m.before) for m in self.machines if m.before], self.max_skew_s)
            if self.observe:
                self.observe()
            at = time.monotonic_ns() + LEAD_NS
            for machine in self.machines:
                machine.order(f"GO {Alignment(machine.before, machine.before).there_ns(at)}")  # type: ignore[arg-type]
        if all("over" in m.answer for m in self.machines) and not self.ended:
            self.ended = True
            if self.observe:
                self.observe()
        for machine in self.machines:
            if "over" in machine.answer and machine.after is None:
                machine.after = offset_of([machine.exchange() for _ in range(EXCHANGES)])
            if "exit" in machine.answer and not machine.asked:
                machine.asked = True
                machine.order("PART")
        known = [m.answer for m in self.machines if "of" in m.answer]
        if self.progress and known and not self.ended:
            self.progress({k: sum(a[k] for a in known) for k in ("done", "of", "in_flight")})


def _check_end(machine: _Machine) -> None:
    if machine.answer.get("exit") or "facts" not in machine.answer:
        why = machine.answer.get("error") or f"exit {machine.answer.get('exit')}"
        raise ServerError(f"the sending process on {machine.name} writes its records", str(why))


def _check_skew(alignments: Sequence[Alignment], max_skew_s: float) -> None:
    bound = skew_bound_ns(alignments) / 1e9
    if bound > max_skew_s:
        raise SkewTooLarge(
            f"machines' clocks that are told within {1e3 * max_skew_s:g} ms of each other",
            f"two of them may be {1e3 * bound:.3f} ms apart",
            "use machines that are nearer to each other, or allow more by --max-skew",
        )


def aligned_lines(part: bytes, alignment: Alignment) -> bytes:
    """A machine's records with every time told by this machine's clock; durations stay as they were taken."""
    lines = []
    for line in part.splitlines():
        record = json.loads(line)
        for name in _TIMES:
            if record.get(name):
                record[name] = alignment.here_ns(record[name])
        lines.append(json.dumps(record, separators=(",", ":")))
    return "".join(f"{line}\n" for line in lines).encode()


def clock_facts(machines: Sequence[_Machine], alignments: Sequence[Alignment], max_skew_s: float) -> dict[str, Any]:
    """What the level's record says of the clocks: by machine, and how far apart two times in it can be."""
    rows = [
        {
            "machine": machine.name,
            "offset_before_ns": round(a.before.offset_ns), "bound_before_ns": round(a.before.bound_ns),
            "offset_after_ns": round(a.after.offset_ns), "bound_after_ns": round(a.after.bound_ns),
            "drift_ppm": round(a.drift_ppm, 3), "exchanges": a.before.exchanges + a.after.exchanges,
        }
        for machine, a in zip(machines, alignments, strict=False)
    ]  # fmt: skip
    return {
        "reference": "CLOCK_MONOTONIC of the machine that ran the level",
        "skew_bound_s": skew_bound_ns(alignments) / 1e9,
        "max_skew_s": max_skew_s,
        "machines": rows,
    }
