"""The errors that a person can cause or must know about.

    WorkbookError                 exit code 2 unless said otherwise
    |-- BadInput                  a file, parameter or answer that is not what it must be
    |   |-- BadParams             a parameter file: unknown key, wrong type, contradiction
    |   |-- UnknownArchitecture   a model architecture without a formula (never guessed)
    |   `-- UnreadableFile        truncated, binary, foreign or missing
    |-- HostError                 a command or file operation on a host failed
    |   |-- HostUnreachable       no connection, or it was cut
    |   |   `-- WrongHostKey      the host shows another key than the known one
    |   |-- HostTimeout           the deadline passed; what ran was ended
    |   `-- NeedsRoot             it takes root, and `sudo -n` does not give it
    |-- ServerError               a server could not be launched, reached or stopped
    |   |-- PortTaken             somebody else holds the port
    |   |-- ServerDied            the process ended before it was ready
    |   |-- NotReady              the deadline passed
    |   `-- NotStopped            processes, port or GPU memory are still held
    |-- IdentityError             the server that answers is not the one that is meant
    |-- NotMeasured               offline: the raw record that a result derives from is not there
    `-- Busy                      another run holds the lock

Every message says what was expected, what was found and what to do next, and lists all that is wrong, not the first.
"""

from __future__ import annotations


class WorkbookError(Exception):
    """Base of every error that ends a command with one clear message instead of a traceback.

    Args:
        expected: what should have been there.
        found: what was there instead.
        do: what the reader can do next.
    """

    exit_code = 2

    def __init__(self, expected: str, found: str | None = None, do: str | None = None) -> None:
        self.expected, self.found, self.do = expected, found, do
        parts = [expected.rstrip(".")]
        if found:
            parts.append(f"found: {found.rstrip('.')}")
        if do:
            parts.append(f"do: {do.rstrip('.')}")
        super().__init__("; ".join(parts) + ".")


class BadInput(WorkbookError):
    """A file, parameter or answer is not what it must be."""


class BadParams(BadInput):
    """A parameter file has unknown keys, wrong types or contradictions (all listed)."""


class UnknownArchitecture(BadInput):
    """A model architecture has no formula here; none is guessed."""


class UnreadableFile(BadInput):
    """A file is missing, truncated, binary or of another program."""


class HostError(WorkbookError):
    """A command or file operation on a host failed."""

    exit_code = 1


class HostUnreachable(HostError):
    """A host can't be reached, or the connection to it was cut."""


class WrongHostKey(HostUnreachable):
    """A host shows another key than the known one: another machine, or somebody in between."""


class HostTimeout(HostError):
    """A command on a host passed its deadline; it was ended there."""


class NeedsRoot(HostError):
    """Something on a host takes root, and `sudo -n` doesn't give it."""


class ServerError(WorkbookError):
    """A server could not be launched, reached or stopped."""

    exit_code = 1


class PortTaken(ServerError):
    """Somebody else holds the port that a launch asks for."""

    exit_code = 2


class ServerDied(ServerError):
    """The server process ended before it was ready; the message quotes the cause from its log."""


class NotReady(ServerError):
    """The server did not get ready within its deadline."""


class NotStopped(ServerError):
    """After the last signal, processes, the port or GPU memory are still held."""


class IdentityError(WorkbookError):
    """The server that answers is not the one that was launched or attached."""

    exit_code = 1


class NotMeasured(WorkbookError):
    """Rebuilding without a server: the raw record that a result derives from does not exist."""

    exit_code = 1


class Busy(WorkbookError):
    """Another run holds the lock; the message names its pid, profile and start."""
