"""An LXC container through its hypervisor: `pct exec` there. It needs no sshd and no network in the container."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lib.errors import BadInput, HostError, HostUnreachable, NeedsRoot
from lib.hosts.base import Done, Host


class LXCHost(Host):
    """A container of a hypervisor, which is itself any host: this machine, one over SSH, or a container.

    Args:
        hypervisor: where `pct` runs (as root there, by `sudo -n` where we are not).
        container: the container's number.
        pct: the command; Proxmox VE's `pct` or one that takes the same words.
    """

    def __init__(
        self,
        hypervisor: Host,
        container: int | str,
        *,
        python: str = "python3",
        pct: str = "pct",
        name: str | None = None,
    ) -> None:
        if not str(container).isascii() or not str(container).isdigit():
            raise BadInput("a container's number, such as 101", repr(container))
        super().__init__(name or f"container {container} on {hypervisor.name}", python)
        self.hypervisor, self.container, self.pct = hypervisor, str(container), pct

    def wrap(self, argv: Sequence[str], deadline: float) -> list[str]:
        return self.hypervisor.wrap([*self._root(), self.pct, "exec", self.container, "--", *argv], deadline)

    def _root(self) -> list[str]:
        return [] if self.hypervisor.uid() == 0 else ["sudo", "-n", "--"]

    def explain(self, words: str, exit_code: int | None) -> HostError:
        said = " ".join(words.split())[-400:]
        if "not running" in words:
            return HostUnreachable(f"{self.name} runs", said, f"start it: {self.pct} start {self.container}")
        if "does not exist" in words or "doesn't exist" in words:
            return HostUnreachable(f"{self.name} exists", said, "correct host.container")
        if self.pct in words and ("not found" in words or "No such file" in words):
            return HostUnreachable(f"{self.pct} is on {self.hypervisor.name}", said, "is that the hypervisor?")
        if self.python in words:
            return super().explain(words, exit_code)
        found = self.hypervisor.explain(words, exit_code)
        return found if isinstance(found, (HostUnreachable, NeedsRoot)) else super().explain(words, exit_code)

    def manage(self, verb: str, *words: str, deadline_s: float = 60.0) -> Done:
        """Runs `pct VERB CONTAINER` on the hypervisor: status, start, stop, shutdown, reboot.

        A started container goes on because a service of the hypervisor starts it (pve-container@N on Proxmox VE), not because
        it is a child of this command: those end with it.
        """
        return self.hypervisor.run([self.pct, verb, self.container, *words], deadline_s=deadline_s, sudo=True)

    def reboot(self, *, deadline_s: float = 120.0) -> None:
        """Stops and starts the container, and waits until commands run in it again."""
        began = time.monotonic()
        self.manage("shutdown", deadline_s=deadline_s).check(f"{self.name} shuts down")
        self.manage("start", deadline_s=deadline_s).check(f"{self.name} starts")
        while True:
            try:
                self.run(["true"], deadline_s=10.0)
                return
            except HostError:
                if time.monotonic() - began > deadline_s:
                    raise
                time.sleep(0.5)

    def close(self) -> None:
        """Ends what runs in the container; the hypervisor's connection is its owner's."""
        super().close()
