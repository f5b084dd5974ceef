"""What runs on a host for each thing that is asked of it: starts, feeds, limits and ends a command, or does one file operation.

It is sent as text to the host's `python3 -IS` (3.7 or newer, standard library only) and reads frames from standard input:
nothing that a person chose ever stands on a command line that a shell reads. It is the parent of everything the command
starts, whatever session or process group that moves to (PR_SET_CHILD_SUBREAPER), and ends all of it when the command has
ended, when it is told to, when its deadline has passed, when its input ends (the other side is gone), or when no heartbeat
came for a while (the network is gone without a word).

Frames, both ways: one letter, the length in four bytes, that many bytes.
    to the guard      H header (JSON, first)   I input   E end of input   B heartbeat   K end it now
    from the guard    G hello (JSON, first)    O output  R standard error output        X the result (JSON, last)
"""

# ruff: noqa: PTH100, PTH103, PTH104, PTH108, PTH114, PTH115, PTH116, PTH118, PTH208
# pathlib would cost every command 5 ms
from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

MAGIC = b"\n\x02workbook-guard-1\x02\n"
BLOCK = 1 << 16
#: Seconds from SIGTERM to SIGKILL, and then until what withstands SIGKILL (uninterruptible sleep) is only named.
GRACE_S = 1.5
KILL_S = 5.0
#: Seconds that the other side may leave a full pipe unread once the command has to end anyway.
UNREAD_S = 2.0
_writing = threading.Lock()
#: Tells whether the command has to end; set when there is one.
_is_over: list[Callable[[], str | None]] = []
_deaf = [0.0]
_killed = [False]


def send(kind: bytes, payload: bytes = b"") -> None:
    """One frame to the other side; nothing if it is gone. A full pipe must not keep the deadline from passing."""
    data = memoryview(kind + struct.pack(">I", len(payload)) + payload)
    with _writing:
        while data and not _deaf[0]:
            try:
                data = data[os.write(1, data) :]
            except BlockingIOError:
                began = time.monotonic()
                while not select.select([], [1], [], 0.1)[1]:
                    if any(over() for over in _is_over) and time.monotonic() - began > UNREAD_S:
                        _deaf[0] = 1.0  # half a frame is out: nothing after it could be understood
                        return
            except OSError:
                _deaf[0] = 1.0


def send_json(kind: bytes, value: Any) -> None:
    send(kind, json.dumps(value).encode())


class Orders:
    """What the other side says, read in a thread of its own; `wake` becomes readable when something came."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.input: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.stop: str | None = None
        self.heard = time.monotonic()
        self.wake, self._bell = os.pipe()
        os.set_blocking(self._bell, False)

    def ring(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._bell, b"!")

    def frame(self) -> tuple[bytes, bytes]:
        head = self.stream.read(5)
        if len(head) < 5:
            raise EOFError
        size = struct.unpack(">I", head[1:])[0]
        payload = self.stream.read(size)
        if len(payload) < size:
            raise EOFError
        return head[:1], payload

    def listen(self) -> None:
        """Runs until the input ends."""
        try:
            while True:
                kind, payload = self.frame()
                self.heard = time.monotonic()
                if kind == b"I":
                    self.input.put(payload)
                elif kind == b"E":
                    self.input.put(None)
                elif kind == b"K":
                    self.stop = self.stop or "cancelled"
                    self.ring()
        except (EOFError, OSError, ValueError):
            self.stop = self.stop or "cut"
        self.input.put(None)
        self.ring()

    def over(self, header: dict[str, Any], began: float) -> str | None:
        """Why the command has to end now, or None."""
        now = time.monotonic()
        if self.stop:
            return self.stop
        if header.get("deadline_s") is not None and now - began > header["deadline_s"]:
            return "deadline"
        if header.get("heartbeat_s") and now - self.heard > header["heartbeat_s"]:
            return "silence"
        return None


def stat_of(pid: int) -> tuple[str, int, int] | None:
    """State, parent and start in ticks of a process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return fields[0].decode(), int(fields[1]), int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def cpu_ticks_of(pid: int) -> int | None:
    """Clock ticks that a process and its children that have ended took."""
    fields = (read_text(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) if len(fields) > 15 else None


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def below(root: int) -> dict[int, int]:
    """Everything alive below a process: pid to start in ticks."""
    seen = {pid: stat for pid in pids() for stat in [stat_of(pid)] if stat is not None}
    found: dict[int, int] = {}
    rest = [root]
    while rest:
        parent = rest.pop()
        for pid, (state, ppid, ticks) in seen.items():
            if ppid == parent and pid not in found:
                rest.append(pid)
                if state not in "ZXx":
                    found[pid] = ticks
    return found


def reap(main_pid: int, status: list[int]) -> bool:
    """Collects whoever ended (the status of the command itself is put aside); False where nobody is left below."""
    try:
        while True:
            pid, code = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return True
            if pid == main_pid:
                status.append(code)
    except ChildProcessError:
        return False


def end_all(main_pid: int, status: list[int], grace_s: float, main_first: bool = False) -> list[int]:
    """SIGTERM, a while, SIGKILL to everything below; returns who is still there.

    With `main_first` only the command itself is told at first, so that a server can drain with its workers alive.
    """
    began = time.monotonic()
    told: set[int] = set()
    alone = main_first and not status
    while True:
        family = below(os.getpid()) if reap(main_pid, status) else {}
        elapsed = time.monotonic() - began
        if alone and status:  # it has ended: a moment for the others, then the same for them
            alone, began, elapsed, grace_s = False, time.monotonic(), 0.0, min(grace_s, GRACE_S)
        if not family or elapsed > grace_s + KILL_S:
            return sorted(family)
        for pid in family:
            hard = elapsed > grace_s
            if hard or pid not in told and (pid == main_pid or not alone):
                told.add(pid)
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL if hard else signal.SIGTERM)
                    _killed[0] = _killed[0] or hard
        time.sleep(0.02)


class Limited:
    """Forwards one stream of the command: whole, or its beginning and its end with the middle counted."""

    def __init__(self, kind: bytes, limit: int | None) -> None:
        self.kind, self.limit, self.sent, self.dropped = kind, limit, 0, 0
        self.tail = b""

    def feed(self, data: bytes) -> None:
        if self.limit is not None:
            half = self.limit // 2
            head, data = data[: max(0, half - self.sent)], data[max(0, half - self.sent) :]
            self.sent += len(head)
            if data:
                self.tail += data
                if len(self.tail) > 2 * half + BLOCK:
                    self._cut(half)
            data = head
        if data:
            send(self.kind, data)

    def _cut(self, half: int) -> None:
        self.dropped += max(0, len(self.tail) - half)
        self.tail = self.tail[max(0, len(self.tail) - half) :]

    def finish(self) -> None:
        if self.limit is not None:
            self._cut(self.limit // 2)
            if self.dropped:
                send(self.kind, b"\n[%d bytes left out]\n" % self.dropped)
            if self.tail:
                send(self.kind, self.tail)


def adopt() -> None:
    """Makes this process the parent of what its descendants leave behind."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def feed_input(orders: Orders, out: Any, closing: Any) -> None:
    """Passes input on until it ends; whoever doesn't read it any more is left alone."""
    with contextlib.suppress(OSError, ValueError):
        while True:
            data = orders.input.get()
            if data is None:
                break
            while data:
                data = data[out(data) :]
    with contextlib.suppress(OSError, ValueError):
        closing()


def run_command(header: dict[str, Any], orders: Orders) -> dict[str, Any]:
    """Runs one command to its end, or ends it."""
    began = time.monotonic()
    _is_over.append(lambda: orders.over(header, began))
    adopt()
    signal.set_wakeup_fd(orders._bell, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    environment = {**os.environ, **(header.get("env") or {})}
    argv = [part.encode("utf-8", "surrogateescape") for part in header["argv"]]
    try:
        child = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=header.get("cwd"),
            env=environment, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        place = header.get("cwd") if error.filename == header.get("cwd") else header["argv"][0]
        return {"start_error": error.strerror, "errno": error.errno, "file": place}
    about = stat_of(child.pid)
    send_json(b"G", {"child": child.pid, "child_ticks": about[2] if about else None})
    stdin, stdout, stderr = child.stdin, child.stdout, child.stderr
    if stdin is None or stdout is None or stderr is None:
        return {"start_error": "no pipes"}
    threading.Thread(
        target=feed_input, args=(orders, lambda data: os.write(stdin.fileno(), data), stdin.close), daemon=True
    ).start()
    limit = header.get("limit")
    streams = {stdout.fileno(): Limited(b"O", limit), stderr.fileno(): Limited(b"R", limit)}
    status: list[int] = []
    reason = None

    def pump(timeout: float) -> None:
        for file in select.select([*streams, orders.wake], [], [], timeout)[0]:
            data = os.read(file, BLOCK)
            if file == orders.wake:
                continue
            if data:
                streams[file].feed(data)
            else:
                done.append(streams.pop(file))

    done: list[Limited] = []
    while not status:
        pump(0.25)
        reap(child.pid, status)
        reason = None if status else orders.over(header, began)
        if reason:
            break
    grace_s = header.get("grace_s")
    left = end_all(child.pid, status, (grace_s or GRACE_S) if reason else 0.1, main_first=grace_s is not None)
    drained = time.monotonic()
    while streams and time.monotonic() - drained < (0.2 if left else 2.0):
        pump(0.05)
    for stream in [*done, *streams.values()]:
        stream.finish()
    code = status[0] if status else None
    return {
        "exit_code": os.WEXITSTATUS(code) if code is not None and os.WIFEXITED(code) else None,
        "signal": os.WTERMSIG(code) if code is not None and os.WIFSIGNALED(code) else None,
        "ended": reason,
        "left": left,
        "killed": bool(reason) and _killed[0],
        "seconds": time.monotonic() - began,
    }


def put_file(header: dict[str, Any], orders: Orders) -> dict[str, Any]:
    """Takes a file: a temporary name beside it, fsync, read back and hashed, renamed; or nothing at all."""
    import hashlib
    import stat

    path = header["path"]
    if header.get("resolve", True) and os.path.islink(path):
        path = os.path.realpath(path)  # a link stays a link: what it points to is replaced
    folder, name = os.path.split(os.path.abspath(path))
    if header.get("parents"):
        os.makedirs(folder, exist_ok=True)
    prefix = f".{name[:180]}.workbook-"
    for other in os.listdir(folder):  # what a guard that was killed left behind
        word = other[len(prefix) :].partition(".")[0]
        if other.startswith(prefix) and word.isdigit() and stat_of(int(word)) is None:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, other))
    temporary = os.path.join(folder, f"{prefix}{os.getpid()}.part")
    began = time.monotonic()
    handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        while True:
            try:
                data = orders.input.get(timeout=0.25)
            except queue.Empty:
                reason = orders.over(header, began)
                if reason:
                    return {"ended": reason}
                continue
            if data is None:
                break
            if orders.stop:
                return {"ended": orders.stop}
            while data:
                data = data[os.write(handle, data) :]
        if orders.stop:
            return {"ended": orders.stop}
        os.fsync(handle)
        digest = hashlib.sha256()
        os.lseek(handle, 0, os.SEEK_SET)
        while True:
            block = os.read(handle, 1 << 20)
            if not block:
                break
            digest.update(block)
        if digest.hexdigest() != header["sha256"]:
            return {"error": f"what arrived has another sha256: {digest.hexdigest()}"}
        mode, owner = header.get("mode"), None
        with contextlib.suppress(FileNotFoundError):
            old = os.stat(path)
            owner = (old.st_uid, old.st_gid)
            mode = stat.S_IMODE(old.st_mode) if mode is None else mode
        if owner and owner != (os.geteuid(), os.getegid()):
            with contextlib.suppress(OSError):  # only root may give a file away
                os.fchown(handle, *owner)
        os.fchmod(handle, 0o644 if mode is None else mode)
        os.fsync(handle)
        os.rename(temporary, path)
        temporary = ""
        at = os.open(folder, os.O_RDONLY)
        with contextlib.suppress(OSError):
            os.fsync(at)
        os.close(at)
        return {"sha256": digest.hexdigest()}
    finally:
        os.close(handle)
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def get_file(header: dict[str, Any], orders: Orders) -> dict[str, Any]:
    """Sends a file, or its first or last `limit` bytes, and the hash of what was sent."""
    import hashlib
    import stat

    began, limit = time.monotonic(), header.get("limit")
    handle = os.open(header["path"], os.O_RDONLY | os.O_NONBLOCK)
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            return {"error": "not a regular file"}
        if header.get("tail") and limit is not None and about.st_size > limit:
            os.lseek(handle, about.st_size - limit, os.SEEK_SET)
        digest, sent = hashlib.sha256(), 0
        while limit is None or sent < limit:
            reason = orders.over(header, began)
            if reason:
                return {"ended": reason}
            block = os.read(handle, BLOCK if limit is None else min(BLOCK, limit - sent))
            if not block:
                break
            digest.update(block)
            sent += len(block)
            send(b"O", block)
        return {"sha256": digest.hexdigest(), "size": about.st_size, "sent": sent}
    finally:
        os.close(handle)


def list_folder(header: dict[str, Any], orders: Orders) -> dict[str, Any]:
    """What lies at a path: itself, and a folder's entries."""
    import stat

    def about(path: str) -> dict[str, Any]:
        found = os.lstat(path)
        kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
        return {
            "kind": kinds.get(stat.S_IFMT(found.st_mode), "other"), "size": found.st_size, "uid": found.st_uid,
            "mode": stat.S_IMODE(found.st_mode), "modified": found.st_mtime,
            "target": os.readlink(path) if stat.S_ISLNK(found.st_mode) else None,
        }  # fmt: skip

    path = header["path"]
    try:
        itself: dict[str, Any] | None = about(path)
    except (FileNotFoundError, NotADirectoryError):
        return {"entry": None, "entries": {}}
    entries = {}
    if header.get("entries"):
        for name in sorted(os.listdir(path)):
            with contextlib.suppress(FileNotFoundError):
                entries[name] = about(os.path.join(path, name))
    return {"entry": itself, "entries": entries}


def read_text(path: str, limit: int = 65536) -> str | None:
    try:
        with open(path, "rb") as file:
            return os.fsdecode(file.read(limit))
    except OSError:
        return None


def listeners() -> list[dict[str, Any]]:
    """Listening TCP sockets of this network namespace: address, port, inode."""
    found = []
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (read_text(name, 1 << 22) or "").splitlines()[1:]:
            words = line.split()
            if len(words) > 9 and words[3] == "0A":
                address, port = words[1].rsplit(":", 1)
                found.append({"address": address, "port": int(port, 16), "inode": words[9], "pids": []})
    return found


def look(header: dict[str, Any], orders: Orders) -> dict[str, Any]:
    """Processes, listening sockets, GPU holders and what this machine is, in one answer."""
    sockets = {item["inode"]: item for item in listeners()}
    processes, unreadable = [], 0
    devices: dict[str, list[int]] = {}
    for pid in pids():
        stat = stat_of(pid)
        if stat is None:
            continue
        line = read_text(f"/proc/{pid}/cmdline")
        status = read_text(f"/proc/{pid}/status") or ""
        uid = [row.split()[1] for row in status.splitlines() if row.startswith("Uid:")]
        processes.append(
            {
                "pid": pid, "ticks": stat[2], "parent": stat[1], "state": stat[0], "uid": int(uid[0]) if uid else None,
                "argv": (line or "").rstrip("\0").split("\0") if line else [],
                "name": (read_text(f"/proc/{pid}/comm") or "").rstrip("\n"),
                "cgroup": read_text(f"/proc/{pid}/cgroup"), "cpu_ticks": cpu_ticks_of(pid),
            }
        )  # fmt: skip
        folder = f"/proc/{pid}/fd"
        try:
            names = os.listdir(folder)
        except OSError:
            unreadable += 1
            continue
        for name in names:
            try:
                target = os.readlink(folder + "/" + name)
            except OSError:
                continue
            if target.startswith("socket:["):
                item = sockets.get(target[8:-1])
                if item is not None and pid not in item["pids"]:
                    item["pids"].append(pid)
            elif target.startswith("/dev/nvidia") and target[11:].isdigit():
                holders = devices.setdefault(target, [])
                if pid not in holders:
                    holders.append(pid)
    answer: dict[str, Any] = {
        "processes": processes, "listeners": list(sockets.values()), "gpu_devices": devices, "unreadable": unreadable,
        "boot_id": (read_text("/proc/sys/kernel/random/boot_id") or "").strip() or None, "ticks_per_s": os.sysconf("SC_CLK_TCK"),
        "uptime_s": float((read_text("/proc/uptime") or "nan").split()[0]), "unix_s": time.time(),
        "hostname": os.uname().nodename, "kernel": os.uname().release, "machine": os.uname().machine,
        "cpu_cores": os.cpu_count(), "os_release": read_text("/etc/os-release"), "cpuinfo": (read_text("/proc/cpuinfo", 8192) or ""),
        "meminfo": (read_text("/proc/meminfo", 512) or ""), "load": os.getloadavg()[0],
    }  # fmt: skip
    for key, words in (header.get("ask") or {}).items():
        try:
            out = subprocess.run(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=20
            )
            answer[key] = {"exit_code": out.returncode, "text": os.fsdecode(out.stdout[: 1 << 18])}
        except (OSError, subprocess.TimeoutExpired) as error:
            answer[key] = {"exit_code": None, "text": str(error)}
    return answer


def relay(header: dict[str, Any], orders: Orders) -> dict[str, Any]:
    """One TCP connection to a port of this host, through the frames."""
    import socket

    try:
        peer = socket.create_connection((header.get("address") or "127.0.0.1", header["port"]), timeout=5)
    except OSError as error:
        return {"error": f"no connection to port {header['port']}: {error.strerror or error}"}
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    send_json(b"G", {"connected": True})
    threading.Thread(
        target=feed_input, args=(orders, peer.send, lambda: peer.shutdown(socket.SHUT_WR)), daemon=True
    ).start()
    began = time.monotonic()
    while True:
        readable = select.select([peer.fileno(), orders.wake], [], [], 0.5)[0]
        if orders.over(header, began):
            return {"ended": orders.over(header, began)}
        if peer.fileno() in readable:
            data = peer.recv(BLOCK)
            if not data:
                return {}
            send(b"O", data)


OPERATIONS = {"run": run_command, "put": put_file, "get": get_file, "list": list_folder, "look": look, "relay": relay}


def main(stream: Any) -> None:
    """Takes the header, does what it says, sends the result."""
    os.write(1, MAGIC)
    os.set_blocking(1, False)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    orders = Orders(stream)
    header = json.loads(orders.frame()[1].decode("utf-8", "surrogateescape"))
    os.umask(0o022)
    if hasattr(signal, "SIGTERM"):

        def told(*_: Any) -> None:
            orders.stop = orders.stop or "terminated"

        signal.signal(signal.SIGTERM, told)
    send_json(b"G", {"pid": os.getpid(), "uid": os.geteuid(), "python": sys.version.split()[0]})
    threading.Thread(target=orders.listen, daemon=True).start()
    try:
        result = OPERATIONS[header["op"]](header, orders)
    except OSError as error:
        result = {"error": error.strerror or str(error), "errno": error.errno, "file": str(error.filename or "")}
    except UnicodeError as error:
        result = {"error": str(error)}
    send_json(b"X", result)
    os._exit(0)
