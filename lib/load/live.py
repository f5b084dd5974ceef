"""What a running benchmark tells those who watch: progress while a record is taken, the record when it is there.

The numbers while it runs are sums that the sending process has anyway (`client_worker.Tally`); those of a record that is
complete are computed from the record, like everywhere else. Whoever watches can't disturb: an onlooker that fails is
left out from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lib.records import Measured, Record


class Told(Record):
    """One moment of a section of the benchmark (levels, depths).

    `kind`: `begin` (a section), `progress` (an item is being measured), `taken` (its record is there, in `folder`),
    `left_out` (with `why`), `end` (the section is over). `counted` are the sums that the sending processes gave.
    """

    kind: str
    section: str
    item: str = ""
    place: int = 0
    items: int = 0
    folder: Path | None = None
    tokens_each: int | None = None
    counted: dict[str, Any] = {}
    left_s: float | None = None
    why: str | None = None


Onlooker = Callable[[Told], None]
_WATCHING: dict[Path, list[Onlooker]] = {}


def watch(folder: Path, look: Onlooker) -> None:
    """Lets `look` be told of every measurement of the run in `folder`, from now on, in the measuring thread."""
    _WATCHING.setdefault(folder.resolve(), []).append(look)


def is_watched(folder: Path) -> bool:
    """Whether anybody watches the run in `folder`."""
    return bool(_WATCHING.get(folder.resolve()))


def tell(folder: Path, told: Told) -> None:
    """Tells all who watch the run in `folder`; one that fails is not told again, and the measurement goes on."""
    lookers = _WATCHING.get(folder.resolve(), [])
    for look in list(lookers):
        try:
            look(told)
        except Exception:  # noqa: BLE001  (it only looks on)
            lookers.remove(look)


def so_far(told: Told) -> dict[str, Measured]:
    """The level in progress in numbers, from sums over the requests that have ended.

    Returns:
        done, of, in_flight, failed; `output_tokens_per_s` (tokens of the answered requests over the time since the
        window began: it falls behind while long answers are under way, and meets the record's figure at the end);
        `first_data_s` and `e2e_s`, means over the answered requests, from the moment each was due.

    Example: 4 answered requests of 24 tokens each after 8 s: 12 tok/s.
    """
    c = told.counted
    ok, since = int(c.get("ok", 0)), c.get("since_ns", 0) / 1e9
    none = "no request has been answered yet"
    made: dict[str, Measured] = {
        key: Measured(value=int(c.get(key, 0)), unit="requests") for key in ("done", "of", "in_flight", "failed")
    }
    if told.tokens_each is None:
        rate = Measured(
            value=None, unit="tok/s", reason="answers have no fixed length: known when the level is complete"
        )
    elif not ok or since <= 0:
        rate = Measured(value=None, unit="tok/s", reason=none)
    else:
        rate = Measured(value=ok * told.tokens_each / since, unit="tok/s", n=ok)
    made["output_tokens_per_s"] = rate
    for key, name in (("first_data_s", "first_ns"), ("e2e_s", "whole_ns")):
        mean = c.get(name, 0) / ok / 1e9 if ok else None
        made[key] = Measured(value=mean, unit="s", n=ok or None, reason=None if ok else none)
    return made
