"""The process between the workbook and a server: filters its output, watches its owners, and ends it.

    workbook kernel --spec on stdin--> supervisor (own session) --pipe--> server (own process group)

The supervisor outlives the workbook, so its death neither kills the server's output pipe nor loses lines; when an owner
(the kernel, the `workbook` command) is gone and the launch is not to be kept, it ends the server's process group:
SIGTERM, deadline, SIGKILL. It adopts what its descendants leave behind (PR_SET_CHILD_SUBREAPER) and ends that too, in
whatever session it is. If the supervisor itself is killed, the kernel of the operating system kills the server
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

from lib.hosts.local import ProcessId, descendants, process_id, write_atomic
from lib.server.redact import find_secrets, redact_text

#: A line longer than this is written in pieces, cut where no secret can be cut in two (bytes).
LONGEST_LINE = 1 << 20
#: Without a place to cut a line is kept up to this length; what follows until the line's end is left out.
LONGEST_HELD = 4 * LONGEST_LINE
#: Bytes on both sides of a cut that are looked at.
CONTEXT = 4096
#: Places that are tried for one cut.
CUTS_TRIED = 64
#: Seconds from an owner's death to SIGKILL of the server's group; with all that follows it stays under 10 s.
ORPHAN_DEADLINE_S = 4.0
#: Seconds that children may go on after the server itself has ended, and then from SIGTERM to SIGKILL.
LAST_WORDS_S = 2.0
CHILDREN_GRACE_S = 1.0
#: Seconds until what withstands SIGKILL (uninterruptible sleep) is only named in the status.
KILL_DEADLINE_S = 10.0
POLL_S = 0.25
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


class Spec(TypedDict):
    """What to run and whom to watch.

    `environment` is complete. `secrets`, and what `environment` and `argv` hold as secrets, are replaced wherever they
    occur in the output. An owner is (pid, start time) or (pid, start time, ticks).
    """

    argv: list[str]
    environment: dict[str, str]
    cwd: str
    log_path: str
    status_path: str
    secrets: list[str]
    owners: list[list[Any]]
    keep: bool
    stop_deadline_s: float


class LineFilter:
    """Cuts a byte stream into lines and redacts each; carriage returns of progress bars count as line ends.

    Text is let go only up to a place where cutting changes nothing in what is hidden: not between a flag and its value
    (which may stand on the next line), not within quotes that hold a secret, not within a private key.

    Example: `LineFilter(["k3y5"]).feed(b"a k3y5\\npart")` gives `b"a REDACTED\\n"`; `part` waits for its end.
    """

    def __init__(self, secrets: list[str]) -> None:
        # of a secret of several lines every line is one, because lines are let go one by one
        self.secrets = [part for secret in secrets if secret for part in {secret, *secret.splitlines()} if part]
        self.rest = b""
        self._leaving_out = False

    def feed(self, chunk: bytes) -> bytes:
        """Takes bytes as they come, gives back the redacted lines that are complete."""
        data = self.rest + (self._after_line_end(chunk) if self._leaving_out else chunk)
        end = self._line_end(data)
        if end == 0 and len(data) > LONGEST_LINE:
            end = self._cut(data)
            if end == 0 and len(data) > LONGEST_HELD:
                self.rest, self._leaving_out = b"", True
                return self._clean(data) + b"[the rest of this line is left out: it may be part of a secret]\n"
        self.rest = data[end:]
        return self._clean(data[:end])

    def finish(self) -> bytes:
        """What is left when the stream ends."""
        rest, self.rest = self.rest, b""
        return self._clean(rest)

    def _after_line_end(self, chunk: bytes) -> bytes:
        ends = [place for place in (chunk.find(b"\n"), chunk.find(b"\r")) if place >= 0]
        self._leaving_out = not ends
        return chunk[min(ends) + 1 :] if ends else b""

    def _line_end(self, data: bytes) -> int:
        """Length up to the last line end after which nothing would be hidden because of what stands before it."""
        place = len(data)
        for _ in range(CUTS_TRIED):
            place = max(data.rfind(b"\n", 0, place), data.rfind(b"\r", 0, place))
            if place < 0:
                break
            before = data[max(0, place + 1 - CONTEXT) : place + 1]
            if all(_PROBE in self._clean(before + made) for made in (_PROBE, b'"' + _PROBE + b'"')):
                return place + 1
        return 0

    def _cut(self, data: bytes) -> int:
        """Length up to the last place within a line where both sides hide alone what they hide together."""
        place = len(data) - CONTEXT
        for _ in range(CUTS_TRIED):
            place = max(data.rfind(mark, 0, place) for mark in (b" ", b",", b"\t"))
            if place <= 0:
                break
            before, after = data[max(0, place + 1 - CONTEXT) : place + 1], data[place + 1 : place + 1 + CONTEXT]
            if self._clean(before) + self._clean(after) == self._clean(before + after):
                return place + 1
        return 0

    def _clean(self, data: bytes) -> bytes:
        if not data:
            return b""
        return redact_text(data.decode("utf-8", "surrogateescape"), self.secrets).encode("utf-8", "surrogateescape")


#: Stands for a value that is not known yet: whether it would be hidden shows whether a line end may be a cut.
_PROBE = b"pr0bevalue4"


class Supervisor:
    """One server's guardian; `run()` returns when the server's whole process group is gone."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        # a two-element owner is pinned now, so that a later step of the clock doesn't make it look gone
        self.owners = [
            ProcessId(int(owner[0]), float(owner[1]), owner[2] if len(owner) > 2 else None).pinned()
            for owner in spec["owners"]
        ]
        hidden = [*spec["secrets"], *find_secrets(spec["environment"]), *find_secrets({"argv": spec["argv"]})]
        self.filter = LineFilter(hidden)
        self.status: dict[str, Any] = {
            "state": "starting",
            "keep": spec["keep"],
            "supervisor_pid": os.getpid(),
            "lines_lost": 0,
        }
        self.kill_at: float | None = None
        self.asked = False
        self.woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

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

    def listen(self) -> None:
        """From here on SIGTERM is a request that the loop sees; before the server exists it means: don't start it."""
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._asked_to_stop)

    def run(self) -> int | None:
        """Starts the server, filters its output and returns its exit code as subprocess gives it (-N for signal N).

        None if it was asked to stop before it started anything.
        """
        self.listen()
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        me = os.getpid()

        def in_child() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != me:
                os._exit(127)

        self.write_status()
        if self.asked:
            self._ended(exit_code=None, stop_reason="asked before the server was started")
            return None
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
        except (OSError, subprocess.SubprocessError) as error:
            self._ended(exit_code=127, start_error=redact_text(str(error), self.filter.secrets))
            return 127
        self.server = server
        identity = process_id(server.pid)
        self.write_status(
            state="running",
            pid=server.pid,
            pgid=server.pid,
            pid_start_time=identity.start_time if identity else None,
            pid_start_ticks=identity.ticks if identity else None,
            started=time.time(),
        )
        log = self._open_log()
        pipe = server.stdout.fileno() if server.stdout else -1
        exit_code, pipe = self._pump(server, pipe, log)
        survivors = self._end_family()
        self._drain(pipe, log)
        self._ended(exit_code=exit_code, **({"survivors": survivors} if survivors else {}))
        return exit_code

    def _ended(self, **changes: Any) -> None:
        """The last word; a request to stop that comes later changes nothing in it."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.write_status(state="ended", ended=time.time(), **changes)

    def _asked_to_stop(self, _signum: int, _frame: FrameType | None) -> None:
        self.asked = True  # no more than that: a status file is perhaps being written

    def _open_log(self) -> int | None:
        try:
            return os.open(self.spec["log_path"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            self.write_status(log_error=str(error))
            return None

    def _pump(self, server: subprocess.Popen[bytes], pipe: int, log: int | None) -> tuple[int, int]:
        """Filters until the server has ended; its exit code, and the pipe (-1: closed) if children still hold it."""
        over_at: float | None = None
        while True:
            pipe = self._read(pipe, log, POLL_S)
            exit_code = server.poll()
            self._watch()
            if exit_code is None:
                continue
            if pipe < 0:
                return exit_code, pipe
            # the launcher is gone but a child may hold the pipe: its last words are worth a moment, however many
            over_at = over_at or time.monotonic() + LAST_WORDS_S
            if time.monotonic() > over_at:
                return exit_code, pipe

    def _read(self, pipe: int, log: int | None, wait_s: float) -> int:
        """Passes on what the pipe holds, waiting a while for it; the pipe, or -1 after its end."""
        waiting_for = [self.woken, pipe] if pipe >= 0 else [self.woken]
        ready = select.select(waiting_for, [], [], wait_s)[0]
        if self.woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self.woken, 512)
        if pipe < 0 or pipe not in ready:
            return pipe
        chunk = os.read(pipe, 1 << 16)
        self._write(log, self.filter.feed(chunk) if chunk else self.filter.finish())
        return pipe if chunk else -1

    def _drain(self, pipe: int, log: int | None) -> None:
        """What the family left in the pipe; bounded, because what withstood SIGKILL may still hold it."""
        deadline = time.monotonic() + LAST_WORDS_S
        while pipe >= 0 and time.monotonic() < deadline:
            pipe = self._read(pipe, log, 0.05)
        if pipe >= 0:
            self._write(log, self.filter.finish())

    def _write(self, log: int | None, data: bytes) -> None:
        if not data:
            return
        try:
            if log is None:
                raise OSError("the log file could not be opened")
            while data:
                data = data[os.write(log, data) :]
        except OSError as error:
            lost = max(1, data.count(b"\n"))
            self.write_status(log_error=str(error), lines_lost=self.status["lines_lost"] + lost)

    def _watch(self) -> None:
        if self.asked:
            self.stop("asked", self.spec["stop_deadline_s"])
        if not self.spec["keep"] and self.kill_at is None:
            gone = [owner.pid for owner in self.owners if not owner.alive()]
            if gone:
                self.stop(f"owner {gone[0]} is gone", min(ORPHAN_DEADLINE_S, self.spec["stop_deadline_s"]))
        if self.kill_at is not None and time.monotonic() > self.kill_at and "sigkill_at" not in self.status:
            self.write_status(sigkill_at=time.time())
            self._signal_group(signal.SIGKILL)

    def _end_family(self) -> list[int]:
        """Ends whatever outlived the server, in its group or not (SIGTERM, SIGKILL); pids that withstood both."""
        kill_from = time.monotonic() + CHILDREN_GRACE_S
        give_up = kill_from + KILL_DEADLINE_S
        told: set[int] = set()
        while True:
            while True:
                with contextlib.suppress(ChildProcessError):
                    if os.waitpid(-1, os.WNOHANG)[0]:
                        continue
                break
            left = [process for process in descendants(os.getpid()) if process.pid != os.getpid()]
            if not left or time.monotonic() > give_up:
                return [process.pid for process in left]
            if time.monotonic() > kill_from and "sigkill_at" not in self.status:
                self.write_status(sigkill_at=time.time())
            for process in left:
                if time.monotonic() > kill_from:
                    process.kill()
                elif process.pid not in told:
                    told.add(process.pid)
                    process.kill(signal.SIGTERM)
            time.sleep(0.05)

    def _signal_group(self, number: int) -> None:
        if self.server.returncode is None:  # once it is reaped, its number may become another group's
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
