"""The process between the workbook and a server: filters its output, watches its owners, and ends it.

    workbook kernel --spec on stdin--> supervisor (own session) --pipe--> server (own process group)

The supervisor outlives the workbook, so its death neither kills the server's output pipe nor loses lines; when an owner
(the kernel, the `workbook` command) is gone and the launch is not to be kept, it ends the server's process group:
SIGTERM, deadline, SIGKILL. If the supervisor itself is killed, the kernel of the operating system kills the server
(PR_SET_PDEATHSIG). Every line passes the redacting filter before it first reaches disk.

Run as `python -m lib.server.supervise`, with one JSON object on standard input (see `Spec`); writes `status_path`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, TypedDict

from lib.hosts.local import ProcessId, group_members, process_id, write_atomic
from lib.server.redact import redact_text

#: A line longer than this is written in pieces, cut at white space (bytes).
LONGEST_LINE = 1 << 20
#: Seconds from an owner's death to SIGKILL of the server's group; with the poll below it stays under 10 s.
ORPHAN_DEADLINE_S = 5.0
POLL_S = 0.25
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


class Spec(TypedDict):
    """What to run and whom to watch. `environment` is complete; `secrets` are replaced wherever they occur in the output."""

    argv: list[str]
    environment: dict[str, str]
    cwd: str
    log_path: str
    status_path: str
    secrets: list[str]
    owners: list[tuple[int, float]]
    keep: bool
    stop_deadline_s: float


class LineFilter:
    """Cuts a byte stream into lines and redacts each; carriage returns of progress bars count as line ends.

    Example: `LineFilter(["k3y"]).feed(b"a k3y\\npart")` gives `b"a REDACTED\\n"`; `part` waits for its end.
    """

    def __init__(self, secrets: list[str]) -> None:
        self.secrets = [secret for secret in secrets if secret]
        self.rest = b""

    def feed(self, chunk: bytes) -> bytes:
        """Takes bytes as they come, gives back the redacted lines that are complete."""
        data = self.rest + chunk
        end = max(data.rfind(b"\n"), data.rfind(b"\r"))
        if end < 0 and len(data) > LONGEST_LINE:
            end = max(data.rfind(b" "), data.rfind(b","), LONGEST_LINE - 1)
        self.rest = data[end + 1 :]
        return self._clean(data[: end + 1])

    def finish(self) -> bytes:
        """What is left when the stream ends."""
        rest, self.rest = self.rest, b""
        return self._clean(rest)

    def _clean(self, data: bytes) -> bytes:
        if not data:
            return b""
        return redact_text(data.decode("utf-8", "surrogateescape"), self.secrets).encode("utf-8", "surrogateescape")


class Supervisor:
    """One server's guardian; `run()` returns when the server's whole process group is gone."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.owners = [ProcessId(int(pid), float(start)) for pid, start in spec["owners"]]
        self.filter = LineFilter(spec["secrets"])
        self.status: dict[str, Any] = {"state": "starting", "supervisor_pid": os.getpid(), "lines_lost": 0}
        self.kill_at: float | None = None

    def write_status(self, **changes: Any) -> None:
        """Updates the status file; a full disk must not stop the supervision."""
        self.status.update(changes)
        with contextlib.suppress(OSError):
            write_atomic(Path(self.spec["status_path"]), json.dumps(self.status))

    def stop(self, why: str, deadline_s: float) -> None:
        """Sends SIGTERM to the server's group once and sets the time of SIGKILL."""
        if self.kill_at is None:
            self.kill_at = time.monotonic() + deadline_s
            self.write_status(state="stopping", stop_reason=why, sigterm_at=time.time())
            self._signal_group(signal.SIGTERM)

    def run(self) -> int:
        """Starts the server, filters its output and returns its exit code as subprocess gives it (-N for signal N)."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        me = os.getpid()

        def in_child() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != me:
                os._exit(127)

        try:
            server = subprocess.Popen(
                self.spec["argv"],
                env=self.spec["environment"],
                cwd=self.spec["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=in_child,
            )
        except OSError as error:
            self.write_status(state="ended", exit_code=127, ended=time.time(), start_error=str(error))
            return 127
        self.server = server
        identity = process_id(server.pid)
        self.write_status(
            state="running",
            pid=server.pid,
            pgid=server.pid,
            pid_start_time=identity.start_time if identity else None,
            started=time.time(),
        )
        signal.signal(signal.SIGTERM, self._asked_to_stop)
        log = self._open_log()
        exit_code = self._pump(server, log)
        self._end_group()
        self.write_status(state="ended", exit_code=exit_code, ended=time.time())
        return exit_code

    def _asked_to_stop(self, _signum: int, _frame: FrameType | None) -> None:
        self.stop("asked", self.spec["stop_deadline_s"])

    def _open_log(self) -> int | None:
        try:
            return os.open(self.spec["log_path"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            self.write_status(log_error=str(error))
            return None

    def _pump(self, server: subprocess.Popen[bytes], log: int | None) -> int:
        pipe = server.stdout.fileno() if server.stdout else -1
        closed_at: float | None = None
        while True:
            ready = bool(select.select([pipe] if pipe >= 0 else [], [], [], POLL_S)[0])
            if ready:
                chunk = os.read(pipe, 1 << 16)
                self._write(log, self.filter.feed(chunk) if chunk else self.filter.finish())
                if not chunk:
                    pipe = -1
            exit_code = server.poll()
            self._watch()
            if exit_code is None:
                continue
            if pipe < 0:
                return exit_code
            # the launcher is gone but a child may hold the pipe: its last words are worth a moment
            closed_at = closed_at or time.monotonic()
            if not ready and time.monotonic() - closed_at > 2.0:
                self._write(log, self.filter.finish())
                return exit_code

    def _write(self, log: int | None, data: bytes) -> None:
        if not data:
            return
        try:
            if log is None:
                raise OSError("the log file could not be opened")
            while data:
                data = data[os.write(log, data) :]
        except OSError as error:
            lost = data.count(b"\n")
            self.write_status(log_error=str(error), lines_lost=self.status["lines_lost"] + lost)

    def _watch(self) -> None:
        if not self.spec["keep"] and self.kill_at is None:
            gone = [owner.pid for owner in self.owners if not owner.alive()]
            if gone:
                self.stop(f"owner {gone[0]} is gone", min(ORPHAN_DEADLINE_S, self.spec["stop_deadline_s"]))
        if self.kill_at is not None and time.monotonic() > self.kill_at and "sigkill_at" not in self.status:
            self.write_status(sigkill_at=time.time())
            self._signal_group(signal.SIGKILL)

    def _end_group(self) -> None:
        """Whatever of the group outlived its leader is ended and reaped."""
        deadline = time.monotonic() + 5.0
        grace = time.monotonic() + 1.0
        while group_members(self.server.pid) and time.monotonic() < deadline:
            if time.monotonic() > grace:
                self._signal_group(signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
            time.sleep(0.05)

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.server.pid, number)


def main() -> int:
    """Reads the spec from standard input, detaches from it, and supervises."""
    spec: Spec = json.loads(sys.stdin.read())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    Supervisor(spec).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
