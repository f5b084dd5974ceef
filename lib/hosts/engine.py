"""Asks a host's container engine about the container that one of its processes runs in."""

from __future__ import annotations

from lib.errors import HostError, NeedsRoot
from lib.hosts.base import Done, Host
from lib.hosts.containers import INSPECT, Container, parse_inspect
from lib.hosts.view import HostProcess


def container_of_process(host: Host, process: HostProcess, *, sudo: bool = True) -> Container | None:
    """The container that a process runs in, as its engine describes it; None if it runs in none that an engine is known for.

    Asks as the user first and then, with `sudo`, as root: an engine's socket is often root's alone.

    Raises:
        HostError: the engine doesn't answer, or says that the container is gone.
    """
    if process.container is None or process.container[0] not in INSPECT:
        return None
    engine, identity = process.container
    said = _ask(host, [*INSPECT[engine], identity], sudo).check(
        f"{engine} describes container {identity[:12]}", f"look at `{' '.join(INSPECT[engine])} {identity[:12]}` there"
    )
    found = parse_inspect(said.text, engine)
    if found.image_id:
        image = _ask(host, [engine, "image", "inspect", found.image_id], sudo)
        if image.ok:
            found = parse_inspect(said.text, engine, image.text)
    if found.id != identity:
        raise HostError(f"{engine} on {host.name} describes container {identity[:12]}", f"it describes {found.id[:12]}")
    return found


def _ask(host: Host, words: list[str], sudo: bool) -> Done:
    done = host.run(words, deadline_s=30.0)
    if done.ok or not sudo or host.uid() == 0:
        return done
    try:
        return host.run(words, deadline_s=30.0, sudo=True)
    except NeedsRoot:
        return done
