"""bench_serving beside this client as rows of tables and as verdicts, from the raw record of each pair alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from lib.errors import UnreadableFile
from lib.load import metrics
from lib.load.bench_rows import Row, level_in
from lib.load.beside import OURS, PEER, RAN, RESULT, Pairs, pair_name
from lib.load.definitions import (
    AGREE_FRAC,
    BACKENDS,
    FIGURES,
    Difference,
    Figures,
    compare,
    own_figures,
    peer_bound,
    peer_figures,
    server_means,
)
from lib.params import BenchmarkParams
from lib.records import Evidence, Measured, Status, Verdict
from lib.results import NotebookRun
from lib.server import telemetry

CLAIM = (
    "At C={c} bench_serving and this client give the same figures by one definition, or the difference is attributed"
)


class Pair:
    """One record of both clients, read: figures of each, what the server counted, and why a comparison does not count."""

    def __init__(self, folder: Path, concurrency: int, problem: str | None) -> None:
        self.folder, self.concurrency = folder, concurrency
        self.own: Figures | None = None
        self.peer: Figures | None = None
        self.differences: list[Difference] = []
        self.bound: list[str] = []
        self.server_silent: str | None = None
        self.problem = problem or self._read()

    def _read(self) -> str | None:
        level = level_in(self.folder / OURS)
        file = self.folder / PEER / RESULT
        if level is None or not file.exists():
            return "this client left no record" if level is None else "bench_serving left no result"
        try:
            (row,) = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
            self.peer = peer_figures(row, self.concurrency)
        except (ValueError, KeyError, TypeError, UnreadableFile) as error:
            return f"{RESULT}: {error}"
        self.own = own_figures(level)
        if self.own is None or self.peer is None:
            return f"no request of {'this client' if self.own is None else 'bench_serving'} succeeded"
        backend = BACKENDS[level.header["api"]]
        verdict = metrics.client_verdict(level)
        if verdict.status == "client_bound":
            self.bound.append(f"this client is bound: {'; '.join(verdict.reasons)}")
        if why := peer_bound(backend, self.concurrency, self.peer):
            self.bound.append(why)
        counts = [telemetry.read_count(self.folder / who) for who in (OURS, PEER)]
        self.server_silent = next((c.reason for c in counts if c.reason), None)
        strangers = self._strangers(counts[1].deltas)
        means = [server_means(c.deltas) for c in counts] if not self.server_silent and not strangers else [{}, {}]
        self.server_silent = self.server_silent or strangers
        self.differences = compare(self.own, self.peer, means[0], means[1])
        return None

    def _strangers(self, deltas: Mapping[str, float]) -> str | None:
        """Why the server's means over bench_serving's window are not its requests' alone."""
        counted, sent = deltas.get("e2e_count"), self.peer.requests_ok if self.peer else 0
        if counted is None or counted == sent:
            return None
        return f"the server finished {counted:.0f} requests in bench_serving's window, which sent {sent}"

    @property
    def sent_differently(self) -> str | None:
        """Why both did not do the same work; None if they did."""
        if self.own is None or self.peer is None:
            return None
        pairs = [("requests answered", self.own.requests_ok, self.peer.requests_ok)]
        pairs += [("output tokens", self.own.output_tokens, self.peer.output_tokens)]
        off = [f"{what}: {a} here, {b} by bench_serving" for what, a, b in pairs if a != b]
        return "; ".join(off) or None


def pairs_of(pairs: Pairs) -> dict[int, list[Pair]]:
    """Every pair by its level, repeats first to last."""
    found: dict[int, list[Pair]] = {}
    for (c, _), m in pairs.items():
        found.setdefault(c, []).append(Pair(m.folder, c, m.problem))
    return found


def attributed(d: Difference, silent: str | None) -> str:
    """One sentence on where a difference comes from."""
    if abs(d.frac) <= AGREE_FRAC:
        return f"within {AGREE_FRAC:.0%}"
    if d.left_frac is None or d.server_frac is None:
        return f"not attributed: {silent or 'the server does not say its own time'}"
    words = []
    if abs(d.server_frac) > AGREE_FRAC / 2:
        words.append(f"{d.server_frac:+.1%} by the server's own clock: it was not the same between the two windows")
    if abs(d.left_frac) > AGREE_FRAC / 2:
        words.append(f"{d.left_frac:+.1%} by the clients{_outside(d)}")
    return "; ".join(words) or "several parts, each below 1%"


def _outside(d: Difference) -> str:
    if d.own_outside_s is None or d.peer_outside_s is None:
        return ""
    return f": outside the server {d.own_outside_s * 1e3:.2f} ms here, {d.peer_outside_s * 1e3:.2f} ms in bench_serving"


def definition_rows() -> list[Row]:
    """What each figure means, and how it is made the same."""
    return [
        {"figure": what, "bench_serving's name": name, "by one definition": how}
        for what, _, name, how in FIGURES.values()
    ]


def beside_rows(pairs: Pairs) -> list[Row]:
    """A row a pair and figure: as each tool reports it, by one definition, the difference and its parts."""
    rows: list[Row] = []
    for c, repeats in pairs_of(pairs).items():
        for number, pair in enumerate(repeats, 1):
            if pair.own is None or pair.peer is None:
                rows.append({"C": c, "repeat": number, "figure": "none", "reading": pair.problem})
                continue
            for d in pair.differences:
                what, unit, _, _ = FIGURES[d.figure]
                n = pair.own.requests_ok
                rows.append({
                    "C": c, "repeat": number, "figure": what,
                    "this client reports": _measured(pair.own.reported.get(d.figure), unit, n),
                    "bench_serving reports": _measured(pair.peer.reported.get(d.figure), unit, pair.peer.requests_ok),
                    "this client, converted": _measured(d.own, unit, n),
                    "bench_serving, converted": _measured(d.peer, unit, pair.peer.requests_ok),
                    "difference": f"{d.frac:+.1%}",
                    "reading": "; ".join([*pair.bound, *([d.impossible] if d.impossible else []), attributed(d, pair.server_silent)]),
                })  # fmt: skip
    return rows


def time_rows(pairs: Pairs) -> list[Row]:
    """What each tool's window holds beside its requests: the reason why whole-run throughputs differ."""
    rows = []
    for c, repeats in pairs_of(pairs).items():
        for number, pair in enumerate(repeats, 1):
            ran = pair.folder / PEER / RAN
            said = json.loads(ran.read_text()) if ran.exists() else {}
            for who, f in (("this client", pair.own), ("bench_serving", pair.peer)):
                if f is not None:
                    rows.append({
                        "C": c, "repeat": number, "client": who, "window": _measured(f.wall_s, "s", f.requests_ok),
                        "its requests' own times in C slots": _measured(f.slots_s, "s", f.requests_ok),
                        "beside them": f"{1 - f.slots_s / f.wall_s:.1%}" if f.wall_s else "unknown",
                        "process": f"{said.get('seconds')} s, CPU {said.get('cpu_s')} s" if who != "this client" and said else "",
                    })  # fmt: skip
    return rows


def _measured(value: float | None, unit: str, n: int) -> Measured:
    if value is None:
        return Measured(value=None, unit=unit, reason="not said")
    return Measured(value=value, unit=unit, n=n, reason="over the requests of one window")


def left_over(repeats: Sequence[Pair], figure: str) -> list[Difference]:
    """One figure's difference in each repeat that has it."""
    return [d for pair in repeats for d in pair.differences if d.figure == figure]


def level_status(repeats: Sequence[Pair]) -> tuple[Status, str, Measured | None]:
    """What the pairs of one level come to.

    Within 2% by one definition, or with the server's own change taken out: pass. Beyond it because bench_serving's own
    time outside the server is the longer one: pass, and said. Because ours is: fail. Unequal work or less time than the
    server spent: fail. A bound client, or nothing to attribute by: inconclusive.
    """
    if problems := [p.problem for p in repeats if p.problem]:
        return Status.INCONCLUSIVE, problems[0], None
    if unequal := [p.sent_differently for p in repeats if p.sent_differently]:
        return Status.FAIL, f"not the same work: {unequal[0]}", None
    words: list[str] = []
    worst = 0.0
    statuses = [Status.PASS]
    for name, (what, _, _, _) in FIGURES.items():
        found = left_over(repeats, name)
        if not found:
            continue
        left = [d.left_frac if d.left_frac is not None else d.frac for d in found]
        whole = [d.frac for d in found]
        worst = max(worst, *map(abs, left))
        if impossible := [d.impossible for d in found if d.impossible]:
            statuses.append(Status.FAIL)
            words.append(f"{what}: {impossible[0]}")
        elif all(abs(x) <= AGREE_FRAC for x in whole):
            words.append(f"{what} {_span(whole)}")
        else:
            status, said = _beyond(found, left, repeats)
            statuses.append(status)
            words.append(f"{what} {_span(whole)}: {said}")
    bound = list(dict.fromkeys(why for p in repeats for why in p.bound))
    order = (Status.FAIL, Status.INCONCLUSIVE, Status.PASS)
    status = min(statuses, key=order.index)
    if bound:
        status, words = Status.INCONCLUSIVE, [*bound, *words]
    text = f"largest difference left to the clients, over {len(repeats)} pair{'s' * (len(repeats) > 1)}"
    return status, "; ".join(words), Measured(value=worst, unit="", n=len(repeats), reason=text)


def _span(values: Sequence[float]) -> str:
    found = [f"{x:+.1%}" for x in (min(values), max(values))]
    return found[0] if found[0] == found[1] else f"{found[0]} to {found[1]}"


def _beyond(found: Sequence[Difference], left: Sequence[float], repeats: Sequence[Pair]) -> tuple[Status, str]:
    """A figure that differs by more than the limit in some repeat: its status and the attribution."""
    silent = next((p.server_silent for p in repeats if p.server_silent), None)
    if any(d.left_frac is None for d in found):
        return Status.INCONCLUSIVE, f"not attributed: {silent or 'the server does not say its own time'}"
    if all(abs(x) <= AGREE_FRAC for x in left):
        return Status.PASS, f"the server itself changed between the windows; {_span(left)} is left to the clients"
    if not (all(x > AGREE_FRAC for x in left) or all(x < -AGREE_FRAC for x in left)):
        return Status.INCONCLUSIVE, f"left to the clients {_span(left)}, across the limit over the repeats"
    d = max(found, key=lambda d: abs(d.left_frac or 0))
    slower = (left[0] > 0) == (FIGURES[d.figure][1] == "s")  # whether this client shows the worse figure
    who = "this client's" if slower else "bench_serving's"
    return (
        Status.FAIL if slower else Status.PASS
    ), f"left to the clients {_span(left)}, and it is {who} time{_outside(d)}"


def verdicts(run: NotebookRun, pairs: Pairs) -> list[Verdict]:
    """One verdict a level of `bench_serving`; a level that was asked for and has no pair says why."""
    made = []
    params: BenchmarkParams = run.params  # type: ignore[assignment]
    for c in params.bench_serving:
        if not any(level == c for level, _ in pairs):
            names = {pair_name(c, repeat) for repeat in range(params.bench_serving_repeats)}
            why = next((s for s in run.skipped if s.split(":")[0] in names), "it was not measured")
            made.append(Verdict(id=f"beside-C{c}", claim=CLAIM.format(c=c), status=Status.INCONCLUSIVE, reason=why))
    for c, repeats in pairs_of(pairs).items():
        status, reason, measured = level_status(repeats)
        measurements = [m for (level, _), m in pairs.items() if level == c]
        made.append(
            Verdict(
                id=f"beside-C{c}",
                claim=CLAIM.format(c=c),
                status=status,
                measured=measured,
                limit=f"{AGREE_FRAC:.0%} of each mean with the server's own change taken out; the same requests and tokens; beyond it "
                "only time that bench_serving itself adds",
                rule="lib.load.definitions.compare",
                reason=reason,
                evidence=_evidence(run, repeats),
                launch_ids=list(dict.fromkeys(i for m in measurements for i in m.launch_ids)),
            )
        )
    return made


def _evidence(run: NotebookRun, repeats: Sequence[Pair]) -> list[Evidence]:
    names = (f"{OURS}/level.jsonl", f"{PEER}/{RESULT}", f"{PEER}/log.txt", f"{PEER}/{telemetry.AFTER}")
    return [run.evidence(p.folder / name) for p in repeats for name in names if (p.folder / name).exists()]
