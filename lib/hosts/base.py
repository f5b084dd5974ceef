"""One interface for every host: run a command, move a file, look around, reach a port, follow an output.

A host differs from another only in its transport: how a local command gets its standard input and output to a Python on it
(`Host.wrap`). Everything else is said in frames to the guard there (lib.hosts.guard), so a path, flag or model name is never
seen by a shell. `shell_line` is the one place where words become a line for a login shell, and only words of ours pass it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Generic, NoReturn, TypeVar

from lib.errors import BadInput, HostError, HostTimeout, HostUnreachable, NeedsRoot, WorkbookError
from lib.hosts import local
from lib.hosts.channel import Channel, guard_argv
from lib.hosts.view import HostView, view_of
from lib.server.redact import redact_object, redact_text

T = TypeVar("T")
#: Seconds without a heartbeat after which a guard ends its command: the network is gone without a word.
SILENCE_S = 20.0
#: Seconds beyond a deadline in which the guard's own report is still waited for.
REPORT_S = 8.0
#: Bytes of each output that are kept; of more, the beginning and the end.
OUTPUT_LIMIT = 4 << 20
_NO_ROOT = (
    "a password is required", "is not in the sudoers", "may not run sudo", "is not allowed to", "a terminal is required",
    "sudo: not found", "sudo: command not found", '"no new privileges" flag', "must be owned by uid 0",
)  # fmt: skip


def shell_line(words: Sequence[str]) -> str:
    """Words as one line for a POSIX shell, each arriving as itself.

    Raises:
        BadInput: a word holds a NUL character, which no command line can carry.

    Example: `shell_line(["echo", "a b", "$x"])` is `"echo 'a b' '$x'"`.
    """
    _refuse_nul(words)
    return shlex.join(words)


def _refuse_nul(words: Sequence[str]) -> None:
    bad = [number for number, word in enumerate(words) if "\0" in word]
    if bad:
        raise BadInput(
            "arguments, paths and names without a NUL character", f"one in word {bad[0] + 1}: {words[bad[0]]!r}"
        )


@dataclass(frozen=True)
class Done:
    """How a command on a host ended.

    `exit_code` is negative for a signal, as in `subprocess`. `left` are pids that withstood SIGKILL (uninterruptible sleep).
    """

    host: str
    argv: tuple[str, ...]
    exit_code: int
    stdout: bytes
    stderr: bytes
    seconds: float
    left: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def text(self) -> str:
        """Standard output as text; what is not UTF-8 is replaced."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def error_text(self) -> str:
        return self.stderr.decode("utf-8", "replace")

    def check(self, expected: str, do: str | None = None) -> Done:
        """Itself if it ended with 0.

        Raises:
            HostError: it didn't; with the end of what it said, redacted.
        """
        if not self.ok:
            said = redact_text((self.error_text.strip() or self.text.strip())[-600:]) or "it said nothing"
            words = redact_text(" ".join(redact_object(list(self.argv))))[:200]
            raise HostError(f"{self.host}: {expected}", f"`{words}` ended with {self.exit_code}: {said}", do)
        return self


@dataclass(frozen=True)
class Entry:
    """What lies at a path: kind (`file`, `folder`, `link`, `other`), size in bytes, mode, owner, modification time."""

    path: str
    kind: str
    size: int
    mode: int
    uid: int
    modified: float
    target: str | None = None


class Host(ABC):
    """A machine on which commands run. Every command has a deadline, and nothing of it outlives it.

    Args:
        name: what messages call it.
        python: an interpreter there, 3.7 or newer; only its standard library is used.
    """

    def __init__(self, name: str, python: str = "python3") -> None:
        self.name, self.python = name, python
        self._uid: int | None = None
        self._no_root: str | None = "not asked"
        self._open: set[Channel] = set()
        self._guarding = threading.Lock()

    # what a transport decides ---------------------------------------------------------------------------------------
    @abstractmethod
    def wrap(self, argv: Sequence[str], deadline: float) -> list[str]:
        """The local command that runs `argv` on the host with our standard input and output.

        Only words of ours and of the parameters come here, never data. `deadline` is on the monotonic clock.
        """

    def explain(self, words: str, exit_code: int | None) -> HostError:
        """Why no guard answered, from what the transport said."""
        if exit_code in (126, 127) or "command not found" in words or "No such file" in words:
            return HostError(
                f"{self.python} runs on {self.name}",
                words.strip()[-300:] or f"exit {exit_code}",
                "name one in host.python",
            )
        return HostUnreachable(f"{self.name} answers", words.strip()[-400:] or f"the transport ended with {exit_code}")

    def close(self) -> None:
        """Ends what still runs and lets the connection go."""
        self.cancel()

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    # operations ------------------------------------------------------------------------------------------------------
    def _start(self, header: dict[str, Any], deadline: float, sudo: bool = False) -> Channel:
        sudo = sudo and self.uid() != 0
        argv = [*(["sudo", "-n", "--"] if sudo else []), *guard_argv(self.python)]
        transport = self.wrap(argv, deadline)
        left = max(0.1, deadline - time.monotonic())
        try:
            channel = Channel(transport, {"heartbeat_s": SILENCE_S, "deadline_s": left, **header})
        except OSError as error:  # the transport's own program is not here
            raise self.explain(f"{error.filename}: {error.strerror}", 127) from error
        with self._guarding:
            self._open.add(channel)
        return channel

    def _let_go(self, channel: Channel, patience_s: float = 10.0) -> None:
        channel.close(patience_s)
        with self._guarding:
            self._open.discard(channel)

    def _judge(self, channel: Channel, what: str, deadline_s: float) -> dict[str, Any]:
        """The guard's result, or the error that took its place."""
        if channel.hello and self._uid is None:
            self._uid = channel.hello["uid"]
        result = channel.result
        if result is None:
            words = redact_text(channel.words.decode("utf-8", "replace"))
            if any(sign in words for sign in _NO_ROOT):
                raise NeedsRoot(
                    f"{self.name}: {what} takes root",
                    words.strip()[-300:],
                    "allow `sudo -n`, connect as root, or do it by hand",
                )
            if channel.hello is None:
                noise = redact_text((channel.noise or channel._in).decode("utf-8", "replace"))
                raise self.explain(f"{noise}\n{words}".strip(), channel.popen.poll())
            raise HostUnreachable(
                f"{self.name} stays connected during: {what}",
                words.strip()[-300:] or "the connection ended without a result",
                f"the host ends the command by itself within {SILENCE_S:.0f} s; look at the network, then run it again",
            )
        if result.get("ended") == "deadline":
            left = f"; still there: pids {result['left']}" if result.get("left") else ""
            raise HostTimeout(
                f"{self.name}: {what} within {deadline_s:g} s", f"it took longer and was ended there{left}"
            )
        if result.get("ended") == "cancelled":
            raise HostError(f"{self.name}: {what} runs to its end", "it was cancelled from here")
        if result.get("ended"):
            raise HostUnreachable(f"{self.name}: {what} runs to its end", f"it was ended: {result['ended']}")
        return result

    def _finish(self, channel: Channel, deadline: float, collect: Callable[[bytes, bytes], None] | None = None) -> None:
        """Takes frames until there are no more, or the deadline and the guard's report are overdue."""
        with contextlib.suppress(TimeoutError):
            while True:
                frame = channel.next(max(0.0, deadline + REPORT_S - time.monotonic()))
                if frame is None:
                    return
                if collect:
                    collect(*frame)

    def run(
        self,
        argv: Sequence[str],
        *,
        input: bytes | str = b"",
        deadline_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        sudo: bool = False,
        limit: int = OUTPUT_LIMIT,
    ) -> Done:
        """Runs a command to its end.

        Whatever it started is ended with it. At the deadline, on Ctrl-C, on `cancel()` from another thread and when the
        connection is cut, everything it started is ended on the host: SIGTERM, 1.5 s, SIGKILL.

        Args:
            argv: its words; no shell sees them.
            input: its standard input.
            env: variables on top of the host's.
            sudo: as root, by `sudo -n` where we are not root already.
            limit: bytes kept of each output; of more, the beginning and the end.

        Raises:
            HostTimeout: it ran longer than `deadline_s`.
            HostUnreachable: there is no connection, or it was cut.
            NeedsRoot: `sudo=True` and `sudo -n` refuses.
            HostError: there is no such command.
            BadInput: a word with a NUL character, or no command.
        """
        data = input.encode() if isinstance(input, str) else input
        with self.start(argv, deadline_s=deadline_s, env=env, cwd=cwd, sudo=sudo, limit=limit) as running:
            running.feed(data)
            return running.wait()

    def start(
        self,
        argv: Sequence[str],
        *,
        deadline_s: float = 60.0,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        sudo: bool = False,
        limit: int | None = None,
        grace_s: float | None = None,
        silence_s: float = SILENCE_S,
    ) -> Running:
        """A command that runs while we do something else; a context manager that ends it. See `run`.

        Args:
            grace_s: where it has to be ended, seconds from SIGTERM to SIGKILL, and SIGTERM to the command alone, so that a server
                can drain with its workers alive; None: 1.5 s, SIGTERM to all.
            silence_s: seconds without a word from us after which the host ends it by itself.
        """
        words = [str(word) for word in argv]
        if not words or not words[0]:
            raise BadInput("a command to run", repr(words))
        _refuse_nul([*words, *(cwd or "",), *(f"{k}={v}" for k, v in (env or {}).items())])
        deadline = time.monotonic() + deadline_s
        header: dict[str, Any] = {"op": "run", "argv": words, "env": dict(env or {}), "cwd": cwd, "limit": limit}
        header |= {"grace_s": grace_s, "heartbeat_s": silence_s}
        return Running(self, self._start(header, deadline, sudo), tuple(words), deadline, deadline_s, grace_s or 0.0)

    def follow(self, argv: Sequence[str], *, deadline_s: float, sudo: bool = False) -> Iterator[str]:
        """The lines of a command's output as they come; ends with the command, at the deadline, or when it is closed.

        For `journalctl --follow` and the like: reaching the deadline is no error here.
        """
        with self.start(argv, deadline_s=deadline_s, sudo=sudo) as running:
            yield from running.lines()

    def uid(self) -> int:
        """The user id that commands have there."""
        if self._uid is None:
            self.run(["true"], deadline_s=30.0)
        return self._uid if self._uid is not None else -1

    def can_root(self) -> str | None:
        """None if commands can run as root, otherwise why not; asked once."""
        if self._no_root == "not asked":
            try:
                self.run(["true"], deadline_s=30.0, sudo=True)
                self._no_root = None
            except NeedsRoot as error:
                self._no_root = error.found
        return self._no_root

    def _once(self, header: dict[str, Any], what: str, deadline_s: float, sudo: bool) -> tuple[dict[str, Any], bytes]:
        if "path" in header:
            _refuse_nul([header["path"]])
        deadline = time.monotonic() + deadline_s
        channel, parts = self._start(header, deadline, sudo), []
        try:
            self._finish(channel, deadline, lambda kind, data: parts.append(data) if kind == b"O" else None)
            result = self._judge(channel, what, deadline_s)
        finally:
            self._let_go(channel)
        self._refuse_error(result, what)
        return result, b"".join(parts)

    def _refuse_error(self, result: Mapping[str, Any], what: str) -> None:
        if "error" in result:
            do = "free space there" if result.get("errno") == 28 else None
            file = f" ({result['file']})" if result.get("file") else ""
            raise HostError(f"{self.name}: {what}", f"{result['error']}{file}", do)

    def put(
        self,
        source: Path | bytes | str,
        path: str | PurePosixPath,
        *,
        mode: int | None = None,
        parents: bool = False,
        deadline_s: float = 300.0,
        sudo: bool = False,
    ) -> str:
        """Writes a file there: temporary name beside it, fsync, read back and hashed, renamed; returns its sha256.

        Readers there see the old file or the new one, never half. Mode and owner of a file that is replaced are kept (the
        owner only as root); a new one gets 0644 or `mode`. When we are cut off, the temporary file is removed there.

        Args:
            source: a file here, or what to write (text as UTF-8).

        Raises:
            HostError: it could not be written, or what arrived has another hash; the file there is as before.
        """
        target, what = str(path), f"{path} is written"
        _refuse_nul([target])
        data = source.encode() if isinstance(source, str) else source
        digest, size = hashlib.sha256(), 0
        for block in _blocks(data):
            digest.update(block)
            size += len(block)
        deadline = time.monotonic() + deadline_s
        header = {"op": "put", "path": target, "sha256": digest.hexdigest(), "mode": mode, "parents": parents}
        channel = self._start(header, deadline, sudo)
        try:
            with contextlib.suppress(BrokenPipeError, TimeoutError):  # the result says why
                for block in _blocks(data):
                    channel.send(block, deadline)
                channel.end_input()
            self._finish(channel, deadline)
            result = self._judge(channel, what, deadline_s)
        finally:
            self._let_go(channel)
        self._refuse_error(result, what)
        return str(result["sha256"])

    def get(self, path: str | PurePosixPath, here: Path, *, deadline_s: float = 300.0, sudo: bool = False) -> str:
        """Copies a file from there, verified by its hash and renamed into place; returns its sha256."""
        target, what = str(path), f"{path} is copied"
        _refuse_nul([target])
        deadline = time.monotonic() + deadline_s
        channel = self._start({"op": "get", "path": target}, deadline, sudo)
        digest = hashlib.sha256()
        here.parent.mkdir(parents=True, exist_ok=True)
        temporary = here.with_name(f".{here.name}.{os.getpid()}-{threading.get_ident()}.part")
        try:
            with temporary.open("xb") as file:

                def take(kind: bytes, data: bytes) -> None:
                    if kind == b"O":
                        digest.update(data)
                        file.write(data)

                self._finish(channel, deadline, take)
                result = self._judge(channel, what, deadline_s)
                self._refuse_error(result, what)
                if result["sha256"] != digest.hexdigest():
                    raise HostError(f"{self.name}: {what}", "what arrived has another sha256", "copy it again")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(here)
        finally:
            self._let_go(channel)
            temporary.unlink(missing_ok=True)
        return digest.hexdigest()

    def read_file(
        self,
        path: str | PurePosixPath,
        *,
        limit: int = OUTPUT_LIMIT,
        tail: bool = False,
        deadline_s: float = 60.0,
        sudo: bool = False,
    ) -> bytes:
        """The first (with `tail` the last) `limit` bytes of a file there.

        Raises:
            HostError: it can't be read.
        """
        header = {"op": "get", "path": str(path), "limit": limit, "tail": tail}
        result, data = self._once(header, f"{path} is read", deadline_s, sudo)
        if hashlib.sha256(data).hexdigest() != result["sha256"]:
            raise HostError(f"{self.name}: {path} is read", "what arrived has another sha256", "read it again")
        return data

    def entry(self, path: str | PurePosixPath, *, deadline_s: float = 30.0, sudo: bool = False) -> Entry | None:
        """What lies at a path, None if nothing does."""
        result, _ = self._once({"op": "list", "path": str(path)}, f"{path} is looked at", deadline_s, sudo)
        return Entry(str(path), **_fields(result["entry"])) if result["entry"] else None

    def exists(self, path: str | PurePosixPath, *, sudo: bool = False) -> bool:
        """True if something lies at the path; a dangling link is something."""
        return self.entry(path, sudo=sudo) is not None

    def list_folder(self, path: str | PurePosixPath, *, deadline_s: float = 30.0, sudo: bool = False) -> list[Entry]:
        """Entries of a folder there, by name.

        Raises:
            HostError: there is no such folder.
        """
        what = f"the folder {path} is listed"
        result, _ = self._once({"op": "list", "path": str(path), "entries": True}, what, deadline_s, sudo)
        if result["entry"] is None:
            raise HostError(f"{self.name}: {what}", "there is none")
        return [Entry(str(PurePosixPath(path) / name), **_fields(about)) for name, about in result["entries"].items()]

    def remove(self, path: str | PurePosixPath, *, deadline_s: float = 30.0, sudo: bool = False) -> None:
        """Removes one file there; nothing if it is not there."""
        self.run(["rm", "-f", "--", str(path)], deadline_s=deadline_s, sudo=sudo).check(f"{path} is removed")

    def view(self, *, deadline_s: float = 60.0, sudo: bool = False) -> HostView:
        """Processes, listening ports, GPU holders and the machine itself, in one round trip.

        Without root, sockets of other users have no owner, and `unreadable` counts the processes that could not be looked
        into.
        """
        ask = {
            "gpus": ["nvidia-smi", "--query-gpu=index,name,uuid,memory.total,memory.used,driver_version,compute_cap",
                     "--format=csv,noheader,nounits"],
            "gpu_users": ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits"],
        }  # fmt: skip
        result, _ = self._once({"op": "look", "ask": ask}, "processes and ports are listed", deadline_s, sudo)
        return view_of(result)

    @contextlib.contextmanager
    def forward(self, port: int, address: str = "127.0.0.1") -> Iterator[int]:
        """A local port that leads to a port of the host, while the context lasts.

        Here: each connection through a guard of its own, over whatever transport there is; some transports have better.
        """
        with _Relay(self, port, address) as relay:
            yield relay.port

    def cancel(self) -> None:
        """Ends every command that runs through this object; may be called from another thread."""
        with self._guarding:
            channels = list(self._open)
        for channel in channels:
            channel.cancel()


def _fields(about: Mapping[str, Any]) -> dict[str, Any]:
    return {name: about[name] for name in ("kind", "size", "mode", "uid", "modified", "target")}


def _blocks(source: Path | bytes) -> Iterator[bytes]:
    if isinstance(source, bytes):
        for at in range(0, len(source), 1 << 20):
            yield source[at : at + (1 << 20)]
        return
    try:
        with source.open("rb") as file:
            while block := file.read(1 << 20):
                yield block
    except OSError as error:
        raise BadInput(f"a readable file {source}", error.strerror) from error


class Running:
    """A command that runs on a host; a context manager that ends it."""

    def __init__(
        self,
        host: Host,
        channel: Channel,
        argv: tuple[str, ...],
        deadline: float,
        deadline_s: float,
        grace_s: float = 0.0,
    ) -> None:
        self.host, self.argv = host, argv
        self._channel, self._deadline, self._deadline_s = channel, deadline, deadline_s
        self.stdout, self.stderr = bytearray(), bytearray()
        self._grace_s = grace_s

    def feed(self, data: bytes, end: bool = True) -> None:
        """Gives it input; `end` closes it. A command that doesn't read its input is no error."""
        with contextlib.suppress(BrokenPipeError, TimeoutError):
            self._channel.send(data, self._deadline)
            if end:
                self._channel.end_input()

    def output(self, timeout_s: float | None = None) -> Iterator[tuple[str, bytes]]:
        """Pieces of output as they come: (`stdout` or `stderr`, bytes).

        Raises:
            TimeoutError: nothing came for `timeout_s` seconds.
        """
        while True:
            left = self._deadline + REPORT_S - time.monotonic()
            try:
                frame = self._channel.next(max(0.0, left if timeout_s is None else min(left, timeout_s)))
            except TimeoutError:
                if timeout_s is not None and timeout_s < left:
                    raise
                return
            if frame is None:
                return
            yield ("stdout" if frame[0] == b"O" else "stderr"), frame[1]

    def lines(self) -> Iterator[str]:
        """Lines of its output as they come, until it ends or the deadline passes.

        Raises:
            HostUnreachable: the connection was cut.
            HostError: there is no such command.
        """
        rest = b""
        for name, data in self.output():
            if name == "stderr":
                self.stderr += data
                continue
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                yield line.decode("utf-8", "replace")
        if rest:
            yield rest.decode("utf-8", "replace")
        with contextlib.suppress(HostTimeout):
            self._result()

    def wait(self) -> Done:
        """Waits for its end and gives its result; see `Host.run` for what it raises."""
        for name, data in self.output():
            (self.stdout if name == "stdout" else self.stderr).extend(data)
        result = self._result()
        code = -result["signal"] if result.get("signal") is not None else result["exit_code"]
        return Done(
            host=self.host.name, argv=self.argv, exit_code=code, stdout=bytes(self.stdout), stderr=bytes(self.stderr),
            seconds=result["seconds"], left=tuple(result["left"]),
        )  # fmt: skip

    def _result(self) -> dict[str, Any]:
        what = f"`{redact_text(' '.join(redact_object(list(self.argv))))[:160]}`"
        try:
            result = self.host._judge(self._channel, what, self._deadline_s)
        except HostUnreachable as error:
            if self._channel.hello and time.monotonic() > self._deadline:
                raise HostTimeout(
                    f"{self.host.name}: {what} within {self._deadline_s:g} s",
                    "it took longer, and no report came from the host",
                    "the host ends it by its own clock; look whether it is gone",
                ) from error
            raise
        if "start_error" in result:
            raise HostError(
                f"{self.host.name}: {what} can be started", f"{result['start_error']} ({result.get('file')})"
            )
        return result

    def stop(self) -> None:
        """Ends it and everything it started, and waits until that is done."""
        self.host._let_go(self._channel, self._grace_s + 10.0)

    @property
    def process(self) -> tuple[int, int] | None:
        """Pid and start in ticks of the command on its host; None before it was started there."""
        hello = self._channel.hello or {}
        return (hello["child"], hello["child_ticks"]) if hello.get("child_ticks") is not None else None

    @property
    def ending(self) -> dict[str, Any] | None:
        """What the host said about its end (exit_code, signal, ended, left, killed); None while it runs or if it said nothing."""
        return self._channel.result

    @property
    def connected(self) -> bool:
        """False once nothing more can come from the host."""
        return not self._channel._ended

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Relay:
    """A listening socket here whose connections are carried to a port of the host, each by a guard."""

    def __init__(self, host: Host, port: int, address: str) -> None:
        self.host, self.target, self.address = host, port, address
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=32)
        self.port = self.listener.getsockname()[1]
        self.over = threading.Event()
        self.threads: list[threading.Thread] = []

    def __enter__(self) -> _Relay:
        self._go(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.listener.close()
        for thread in list(self.threads):
            thread.join(15.0)

    def _go(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="host-relay", daemon=True)
        self.threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        self.listener.settimeout(0.2)
        while not self.over.is_set():
            try:
                peer, _ = self.listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            peer.settimeout(None)
            self._go(lambda peer=peer: self._carry(peer))  # type: ignore[misc]

    def _carry(self, peer: socket.socket) -> None:
        year = 365 * 86400.0
        with peer, contextlib.suppress(WorkbookError, OSError):
            header = {"op": "relay", "port": self.target, "address": self.address}
            channel = self.host._start(header, time.monotonic() + year)
            try:
                sender = threading.Thread(target=self._send, args=(peer, channel), daemon=True)
                sender.start()
                while not self.over.is_set():
                    with contextlib.suppress(TimeoutError):
                        frame = channel.next(0.2)
                        if frame is None:
                            break
                        peer.sendall(frame[1])
                with contextlib.suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)
                sender.join(2.0)
            finally:
                self.host._let_go(channel)

    @staticmethod
    def _send(peer: socket.socket, channel: Channel) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            while data := peer.recv(1 << 16):
                channel.send(data, time.monotonic() + 60.0)
            channel.end_input()


@dataclass
class Together(Generic[T]):
    """What several hosts gave: results and failures, both by host name."""

    results: dict[str, T] = field(default_factory=dict)
    failures: dict[str, WorkbookError] = field(default_factory=dict)

    def check(self, expected: str) -> dict[str, T]:
        """The results if every host gave one.

        Raises:
            HostError: names each host that didn't, with its reason, and those that did.
        """
        if self.failures:
            _raise_partial(expected, self.failures, sorted(self.results))
        return self.results


def _raise_partial(expected: str, failures: Mapping[str, WorkbookError], worked: Sequence[str]) -> NoReturn:
    faults = "; ".join(f"{name}: {error}" for name, error in sorted(failures.items()))
    raise HostError(
        f"{expected} on all {len(failures) + len(worked)} hosts",
        f"{faults}; it worked on {', '.join(worked) or 'none'}",
    )


def together(hosts: Sequence[Host], function: Callable[[Host], T], at_most: int = 16) -> Together[T]:
    """Calls a function for several hosts at once; one that fails doesn't keep the others from finishing.

    On Ctrl-C everything that runs on any of them is ended first.

    Raises:
        BadInput: two hosts have the same name.
    """
    names = [host.name for host in hosts]
    if len(set(names)) < len(names):
        raise BadInput("every host once", f"named twice: {', '.join(sorted({n for n in names if names.count(n) > 1}))}")
    made: Together[T] = Together()
    with ThreadPoolExecutor(max_workers=max(1, min(at_most, len(hosts)))) as pool:
        waiting = {host: pool.submit(function, host) for host in hosts}
        try:
            for host, future in waiting.items():
                try:
                    made.results[host.name] = future.result()
                except WorkbookError as error:
                    made.failures[host.name] = error
        except BaseException:
            for host, future in waiting.items():
                future.cancel()
                host.cancel()
            raise
    return made


class LocalHost(Host):
    """This machine, with the same interface and the same promises as any other."""

    def __init__(self, name: str = "this machine", python: str | None = None) -> None:
        import sys

        super().__init__(name, python or sys.executable)

    def wrap(self, argv: Sequence[str], deadline: float) -> list[str]:
        return list(argv)

    @contextlib.contextmanager
    def forward(self, port: int, address: str = "127.0.0.1") -> Iterator[int]:
        """The port itself."""
        yield port


def free_local_port() -> int:
    """A port for a tunnel's near end."""
    return local.free_port()
