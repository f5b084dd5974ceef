"""A host over plain `ssh`: the user's ~/.ssh/config, agent, ProxyJump and known_hosts hold; host-key checking is always on.

One master connection for each object (ControlMaster) carries everything; it is ours alone, ends with the object, and a minute
after this process if that is killed. A master that has died is replaced at the next command.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from lib.errors import BadInput, HostError, HostTimeout, HostUnreachable, WrongHostKey
from lib.hosts import local
from lib.hosts.base import Host, shell_line
from lib.server.redact import redact_text

#: What every connection is told on top of the user's configuration. First given wins, so these do.
_ALWAYS = (
    "BatchMode=yes", "StrictHostKeyChecking=yes", "RequestTTY=no", "RemoteCommand=none", "PermitLocalCommand=no",
    "ForwardX11=no", "ForwardAgent=no", "ServerAliveInterval=5", "ServerAliveCountMax=3", "EscapeChar=none",
    "StdinNull=no", "ForkAfterAuthentication=no",
)  # fmt: skip
_PERSIST_S = 60
_ADDRESS = re.compile(r"(?:[^\s@-][^\s@]*@)?(?:\[[0-9A-Fa-f:.%]+\]|[^\s@-][^\s@]*)")


class SSHHost(Host):
    """A host that `ssh ADDRESS` reaches without asking anything.

    Args:
        address: what stands after `ssh`: a name of ~/.ssh/config, HOST or USER@HOST.
        port, identity, config: as `ssh -p`, `-i`, `-F`.
        options: further `-o` options; those that keep host-key checking on can't be overridden.
    """

    def __init__(
        self,
        address: str,
        *,
        port: int | None = None,
        identity: str | None = None,
        config: str | None = None,
        options: Sequence[str] = (),
        python: str = "python3",
        name: str | None = None,
        connect_timeout_s: float = 15.0,
    ) -> None:
        if not _ADDRESS.fullmatch(address):
            raise BadInput("an SSH address such as gpu1, user@gpu1 or a name of ~/.ssh/config", repr(address))
        super().__init__(name or f"ssh {address}" + (f" port {port}" if port else ""), python)
        self.address, self.connect_timeout_s = address, connect_timeout_s
        self._folder = Path(tempfile.mkdtemp(prefix="wb-ssh-", dir=_short_folder()))
        self._socket = self._folder / "s"
        self._connecting = threading.Lock()
        self._closed, self._owner = False, os.getpid()
        self._options = [
            *(word for option in _ALWAYS for word in ("-o", option)),
            *("-o", f"ConnectTimeout={max(1, round(connect_timeout_s))}"),
            *(("-F", config) if config else ()),
            *(("-p", str(port)) if port else ()),
            *(("-i", identity, "-o", "IdentitiesOnly=yes") if identity else ()),
            *(word for option in options for word in ("-o", option)),
        ]

    def wrap(self, argv: Sequence[str], deadline: float) -> list[str]:
        self._connect(deadline)
        return [
            "ssh", *self._options, "-o", f"ControlPath={self._socket}", "-o", "ControlMaster=no", "--", self.address,
            f"exec {shell_line(argv)}",
        ]  # fmt: skip

    def _connect(self, deadline: float) -> None:
        """Opens the master connection if there is none.

        Raises:
            WrongHostKey, HostUnreachable, HostTimeout: in ssh's own words.
        """
        if self._socket.exists():
            return
        with self._connecting:
            if self._socket.exists():
                return
            if self._closed:
                raise HostUnreachable(f"an open connection to {self.name}", "it was closed")
            # ssh keeps its error output open in the background: a file, because a pipe would never end
            words = self._folder / "words"
            argv = [
                "ssh", *self._options, "-o", f"ControlPath={self._socket}", "-o", "ControlMaster=yes", "-o",
                f"ControlPersist={_PERSIST_S}", "-o", "ClearAllForwardings=yes", "-N", "-f", "--", self.address,
            ]  # fmt: skip
            with words.open("wb") as said:
                opening = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True,
                    env={**os.environ, "SSH_ASKPASS_REQUIRE": "never"},
                )  # fmt: skip
                try:
                    code = opening.wait(max(0.1, deadline - time.monotonic()))
                except BaseException as error:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(opening.pid, 9)
                    opening.wait()
                    if isinstance(error, subprocess.TimeoutExpired):
                        raise HostTimeout(f"{self.name} is connected before the deadline", "no answer yet") from None
                    raise
            if code:
                raise self.explain(redact_text(words.read_text(errors="replace")), code)

    def explain(self, words: str, exit_code: int | None) -> HostError:
        """Why there is no connection, as one message."""
        said = " ".join(words.split())[-500:]
        if "REMOTE HOST IDENTIFICATION HAS CHANGED" in words or "POSSIBLE DNS SPOOFING" in words:
            shown = re.search(r"SHA256:[A-Za-z0-9+/=]+", words)
            known = re.search(r"(?:Offending|Host) [^\n]*? in (\S+?):(\d+)", words)
            return WrongHostKey(
                f"{self.name} shows the host key that is known",
                f"another one{f' ({shown[0]})' if shown else ''}: another machine, a reinstalled one, or somebody in between",
                f"ask its operator for the right fingerprint, then replace line {known[2]} of {known[1]}"
                if known
                else "ask its operator for the right fingerprint, then correct known_hosts",
            )
        if "Host key verification failed" in words or "host key is known for" in words:
            return WrongHostKey(
                f"the host key of {self.name} is known",
                "it is not in known_hosts (or is revoked there)",
                f"ask its operator for the fingerprint and compare it in `ssh {self.address}`, once",
            )
        if "Permission denied" in words:
            return HostUnreachable(
                f"{self.name} lets us in without asking", said, f"make `ssh -o BatchMode=yes {self.address} true` work"
            )
        if "Could not resolve" in words:
            return HostUnreachable(f"{self.name} has an address", said, "correct host.address, or ~/.ssh/config")
        if exit_code == 255 or any(
            w in words for w in ("Connection", "timed out", "No route", "kex_exchange", "mux_client")
        ):
            return HostUnreachable(
                f"{self.name} answers", said or "ssh ended with 255", "look whether it is up, and its sshd"
            )
        return super().explain(words, exit_code)

    @contextlib.contextmanager
    def forward(self, port: int, address: str = "127.0.0.1") -> Iterator[int]:
        """A local port forwarded by the master connection (`ssh -O forward`), while the context lasts."""
        self._connect(time.monotonic() + 30.0)
        for _ in range(5):
            near = local.free_port()
            way = f"127.0.0.1:{near}:{f'[{address}]' if ':' in address else address}:{port}"
            said = self._tell("forward", "-L", way)
            if said is None:
                break
        else:
            raise HostUnreachable(f"port {port} of {self.name} is forwarded", said)
        try:
            yield near
        finally:
            self._tell("cancel", "-L", way)

    def _tell(self, order: str, *words: str) -> str | None:
        """Says something to the master connection; None, or why it refused."""
        argv = ["ssh", "-F", "/dev/null", "-o", f"ControlPath={self._socket}", "-O", order, *words, "host"]
        try:
            out = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)
        except subprocess.TimeoutExpired:
            return "the master connection does not answer"
        return (
            None
            if out.returncode == 0
            else (out.stderr.strip()[-300:] or f"ssh -O {order} ended with {out.returncode}")
        )

    def close(self) -> None:
        """Ends what still runs there and closes the connection."""
        super().close()
        self._closed = True
        if self._socket.exists():
            self._tell("exit")
        shutil.rmtree(self._folder, ignore_errors=True)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            if os.getpid() == self._owner:  # a forked child must not end its parent's connection
                self.close()


def _short_folder() -> str | None:
    """Where a control socket's path stays short enough (108 bytes), for this user alone."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    for folder in (runtime, "/tmp"):  # noqa: S108
        if folder and len(folder) < 60 and os.access(folder, os.W_OK):
            return folder
    return None
