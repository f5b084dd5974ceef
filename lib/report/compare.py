"""Two runs side by side: what changed in stack, flags and parameters; which results differ really, which can't be compared.

Records in, records out. A difference of two measured values is judged by their 95% intervals; a value without an interval
gives no verdict, and values that don't measure the same thing are named as not comparable, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lib.records import Measured, NotebookResult, Provenance, Record, ServerIdentity, Status

#: Arguments that differ between any two launches and say nothing about what was measured.
INCIDENTAL = frozenset(
    {"port", "nccl_port", "dist_init_addr", "random_seed", "api_key", "admin_api_key", "log_level", "host", "model_path",
     "tokenizer_path", "served_model_name", "base_url"}
)  # fmt: skip
#: Parameters that choose what is served and where, not how it is measured: a difference in them is the treatment.
TREATMENT = frozenset({"profile", "server", "resolved", "known_answer", "flags", "base", "candidates", "axes", "host"})

_RANK = {
    Status.PASS: 0,
    Status.INCONCLUSIVE: 1,
    Status.UNSUPPORTED: 1,
    Status.INVALID: 2,
    Status.FAIL: 3,
    Status.ERROR: 4,
}


class Change(Record):
    """One thing of the stack, the flags or the parameters that is not the same in both runs."""

    where: str
    what: str
    a: str | None = None
    b: str | None = None


class Difference(Record):
    """One result in both runs. `outcome`: same | real | not_told_apart | changed | not_comparable | only_a | only_b."""

    notebook: str
    kind: str
    id: str
    what: str
    outcome: str
    reason: str
    status_a: Status | None = None
    status_b: Status | None = None
    a: Measured | None = None
    b: Measured | None = None
    difference: Measured | None = None
    worse: bool | None = None


class RunComparison(Record):
    """Run A against run B."""

    a: str
    b: str
    changes: list[Change] = []
    differences: list[Difference] = []
    notes: list[str] = []

    def worse(self) -> list[Difference]:
        """Claims whose status got worse from A to B."""
        return [d for d in self.differences if d.worse]


def difference_of(a: Measured, b: Measured) -> Measured:
    """b - a with a 95% interval from the two intervals of independent values.

    The limits are combined by squares (method of variance estimates recovery): low = (b - a) - sqrt((b - b.low)^2 +
    (a.high - a)^2), high likewise, which keeps asymmetric intervals asymmetric.

    Returns:
        A value without an interval, and the reason, where either side has none; no value where the units differ or a
        side has no number.

    Source: G. Zou and A. Donner, Statistics in Medicine 27 (2008), 1693-1702.
    Example: 10 [8, 12] against 20 [17, 23] differ by 10 [6.39, 13.61].
    """
    one, other = number_of(a), number_of(b)
    if one is None or other is None:
        side = "A" if one is None else "B"
        return Measured(value=None, reason=f"no value in {side}: {(a if one is None else b).reason or 'not a number'}")
    if a.unit != b.unit:
        return Measured(value=None, reason=f"units differ: {a.unit} and {b.unit}")
    value = other - one
    if None in (a.low, a.high, b.low, b.high):
        return Measured(
            value=value, unit=a.unit, reason="no interval on " + ("A" if a.low is None or a.high is None else "B")
        )
    low = value - math.hypot(other - float(b.low or 0.0), float(a.high or 0.0) - one)
    high = value + math.hypot(float(b.high or 0.0) - other, one - float(a.low or 0.0))
    n = min(x for x in (a.n, b.n) if x is not None) if a.n is not None or b.n is not None else None
    return Measured(value=value, unit=a.unit, n=n, low=low, high=high)


def number_of(measured: Measured | None) -> float | None:
    """The value as a finite float, or None."""
    value = measured.value if measured else None
    if value is None or isinstance(value, (bool, str)):
        return None
    return float(value) if math.isfinite(float(value)) else None


def compare_runs(
    name_a: str, a: Mapping[str, NotebookResult], name_b: str, b: Mapping[str, NotebookResult]
) -> RunComparison:
    """What changed between two runs and what their results say about it.

    Args:
        name_a, name_b: what the runs are called.
        a, b: results by notebook number.
    """
    changes: list[Change] = []
    differences: list[Difference] = []
    notes: list[str] = []
    for number in sorted({*a, *b}):
        one, other = a.get(number), b.get(number)
        if one is None or other is None:
            notes.append(f"notebook {number} has a result only in {name_a if one else name_b}")
            continue
        found = [*provenance_changes(one.provenance, other.provenance), *server_changes(one.servers, other.servers)]
        asked = parameter_changes(one.provenance.params, other.provenance.params)
        changes += [c.model_copy(update={"where": f"{number} {c.where}"}) for c in [*found, *asked]]
        method = [c for c in asked if c.what.split(".")[0] not in TREATMENT]
        differences += result_differences(number, one, other, method)
    changes = _merged(changes)
    if len({*a} & {*b}) and not changes:
        notes.append("stack, flags and parameters are the same: every difference is drift or noise")
    notes.append(
        "an interval covers what varied within its run; drift from run to run is not in it, so a small real difference of "
        "two single runs wants a third"
    )
    return RunComparison(a=name_a, b=name_b, changes=changes, differences=differences, notes=notes)


def _merged(changes: Iterable[Change]) -> list[Change]:
    """The same change in several notebooks as one line."""
    groups: dict[tuple[str, str, str | None, str | None], list[str]] = {}
    for c in changes:
        number, _, where = c.where.partition(" ")
        groups.setdefault((where, c.what, c.a, c.b), []).append(number)
    return [
        Change(where=f"{where} ({', '.join(dict.fromkeys(numbers))})", what=what, a=a, b=b)
        for (where, what, a, b), numbers in groups.items()
    ]


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one mapping with dotted keys; lists stay as they are."""
    if not isinstance(value, Mapping):
        return {prefix: value}
    out: dict[str, Any] = {}
    for key, inner in value.items():
        out |= flat(inner, f"{prefix}.{key}" if prefix else str(key))
    return out


def _changed(where: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Change]:
    return [
        Change(where=where, what=key, a=_text(a.get(key)), b=_text(b.get(key)))
        for key in sorted({*a, *b})
        if a.get(key) != b.get(key)
    ]


def provenance_changes(a: Provenance, b: Provenance) -> list[Change]:
    """Workbook, Python, packages and machine."""

    def facts(p: Provenance) -> dict[str, Any]:
        host = {k: v for k, v in p.host.items() if k not in ("boot_id", "memory_bytes", "gpus_reason")}
        gpus = [g.get("name") for g in host.pop("gpus", []) or []]
        return {
            "commit": p.commit, "local changes": p.dirty, "workbook": p.workbook_version, "Python": p.python,
            "packages": p.packages_sha256[:12], "GPUs": ", ".join(map(str, gpus)) or "none", **host,
        }  # fmt: skip

    return _changed("stack", facts(a), facts(b))


def server_changes(a: Sequence[ServerIdentity], b: Sequence[ServerIdentity]) -> list[Change]:
    """Version, model, environment and arguments of the servers, launch by launch in their order."""
    out: list[Change] = []
    if len(a) != len(b):
        out.append(Change(where="servers", what="number of servers", a=str(len(a)), b=str(len(b))))
    for index, (one, other) in enumerate(zip(a, b, strict=False), 1):
        where = f"server {index}" if max(len(a), len(b)) > 1 else "server"
        out += _changed(where, server_facts(one), server_facts(other))
    return out


def server_facts(server: ServerIdentity) -> dict[str, Any]:
    """What a server is, without what differs at every launch."""
    arguments = {k: v for k, v in server.resolved_args.items() if k not in INCIDENTAL}
    if not arguments:  # it never answered: what was asked
        arguments = {"argv": " ".join(_without_incidental(server.argv[1:]))}
    return {
        "SGLang": server.sglang_version, "model": str(server.model.get("sha256", ""))[:12] or None, "origin": server.origin,
        **{f"environment {k}": v for k, v in server.environment.items()}, **arguments,
    }  # fmt: skip


def _without_incidental(argv: Sequence[str]) -> list[str]:
    out: list[str] = []
    skip = False
    for word in argv:
        if skip:
            skip = False
            continue
        name = word.lstrip("-").split("=")[0].replace("-", "_")
        if word.startswith("--") and name in INCIDENTAL:
            skip = "=" not in word
            continue
        out.append(word)
    return out


def parameter_changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Change]:
    """Parameters that differ; `resolved` (the profile's file) is told apart key by key."""
    return _changed("parameters", flat(dict(a)), flat(dict(b)))


def result_differences(number: str, a: NotebookResult, b: NotebookResult, method: Sequence[Change]) -> list[Difference]:
    """Verdicts and trials of one notebook in both runs; `method`: changed parameters that change what is measured."""
    out: list[Difference] = []
    reason = "measured differently: " + ", ".join(f"{c.what} {c.a} / {c.b}" for c in method[:4]) if method else None
    verdicts_a, verdicts_b = ({v.id: v for v in r.verdicts} for r in (a, b))
    for key in dict.fromkeys([*verdicts_a, *verdicts_b]):
        one, other = verdicts_a.get(key), verdicts_b.get(key)
        common: dict[str, Any] = {"notebook": number, "kind": "verdict", "id": key, "what": (other or one).claim}  # type: ignore[union-attr]
        if one is None or other is None:
            out.append(
                Difference(outcome="only_a" if one else "only_b", reason="no such claim in the other run", **common)
            )
            continue
        worse = _RANK[other.status] > _RANK[one.status]
        common |= {
            "status_a": one.status,
            "status_b": other.status,
            "a": one.measured,
            "b": other.measured,
            "worse": worse,
        }
        if one.claim != other.claim or one.limit != other.limit:
            words = (
                f"the claim or its limit changed: {one.limit} / {other.limit}"
                if one.limit != other.limit
                else "the claim changed"
            )
            out.append(Difference(outcome="not_comparable", reason=words, **common))
        else:
            out.append(judged(one.measured, other.measured, reason, common))
    trials_a, trials_b = ({t.id: t for t in r.trials} for r in (a, b))
    for key in trials_a:
        one_trial, other_trial = trials_a[key], trials_b.get(key)
        if other_trial is None:
            continue
        if one_trial.outcome != other_trial.outcome:
            out.append(
                Difference(
                    notebook=number, kind="trial", id=key, what=one_trial.what, outcome="changed",
                    reason=f"{one_trial.outcome} / {other_trial.outcome}",
                )
            )  # fmt: skip
        for name in one_trial.values.keys() & other_trial.values.keys():
            common = {"notebook": number, "kind": "trial", "id": f"{key}.{name}", "what": f"{one_trial.what}: {name}"}
            x, y = one_trial.values[name], other_trial.values[name]
            out.append(judged(x, y, reason, {**common, "a": x, "b": y}))
    return out


def judged(a: Measured | None, b: Measured | None, method: str | None, common: Mapping[str, Any]) -> Difference:
    """One pair of values (either may be missing) with its outcome."""
    changed = common.get("status_a") != common.get("status_b")
    if a is None or b is None:
        if a is None and b is None:
            words = "no number on either side"
            return Difference(outcome="changed" if changed else "same", reason=words, **common)
        return Difference(outcome="not_comparable", reason=f"no number in {'A' if a is None else 'B'}", **common)
    found = difference_of(a, b)
    common = {**common, "difference": found}
    if found.value is None:
        same = a.value == b.value and number_of(a) is None and number_of(b) is None
        outcome = "same" if same and not changed else "not_comparable"
        return Difference(outcome=outcome, reason=found.reason or "no difference can be taken", **common)
    if method:
        return Difference(outcome="not_comparable", reason=method, **common)
    if found.low is None or found.high is None:
        if found.value == 0:
            return Difference(outcome="changed" if changed else "same", reason="the same number", **common)
        return Difference(
            outcome="not_comparable", reason=f"{found.reason}: nobody can tell noise from a difference", **common
        )
    if found.low > 0 or found.high < 0:
        return Difference(outcome="real", reason="the interval of the difference leaves out 0", **common)
    words = "the same number" if found.value == 0 else "the interval of the difference has 0 in it"
    return Difference(outcome="same" if found.value == 0 and not changed else "not_told_apart", reason=words, **common)
