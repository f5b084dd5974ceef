"""What notebook 03's records prove: trials, verdicts with their evidence and limits, open questions, one recommendation."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lib.load import metrics
from lib.load.bench_forecast import KNEE_EFFICIENCY, Frozen
from lib.load.bench_rows import (
    cached_share,
    knee_level,
    level_in,
    level_of,
    measured_for,
    params_of,
    pooled,
    share,
    state_in,
    steps,
    summary_in,
    truth_of,
    usable,
    windows,
)
from lib.load.benchmark import LEVEL_FILE, DepthCell, Levels
from lib.records import Evidence, Measured, Status, Trial, Verdict
from lib.results import Measurement, NotebookRun
from lib.server import telemetry

#: How far a smoke test may lie from what its parts predict: two requests on a shared machine are not the same minute.
SMOKE_TOLERANCE = 0.25
#: A prefix counts as taken from the cache if the server says so of at least this share of it, for every request.
HIT_SHARE = 0.90
#: ... or if no more than this is missing, and at least half is there: pages and recurrent states are kept every so many
#: tokens (SGLang's `mamba_track_interval` is 256), so the end of a prefix is computed again.
HIT_SLACK_TOKENS = 512
#: A cache counts as empty if no request took more than this share of its prompt from it.
COLD_SHARE = 0.05
#: Decoding at the deepest context keeps at least this share of its rate at the shallowest.
DEPTH_KEEPS = 0.80

Row = dict[str, Any]


def launch_ids(measurements: Sequence[Measurement]) -> list[str]:
    """The launches that measurements stand on, each once."""
    return list(dict.fromkeys(i for m in measurements for i in m.launch_ids))


def _all(levels: Levels) -> list[Measurement]:
    return [m for repeats in levels.values() for m in repeats]


def _evidence(run: NotebookRun, folders: Sequence[Path], name: str = LEVEL_FILE) -> list[Evidence]:
    return [run.evidence(folder / name) for folder in folders if (folder / name).exists()]


def _outcome(measurement: Measurement) -> tuple[str, str | None]:
    """What one level, or one half of a depth, came to: an outcome of the records' table and the reason."""
    if measurement.stamp.invalid:
        return "identity_mismatch", measurement.stamp.invalid
    level = level_of(measurement)
    if (measurement.stamp.error or "").startswith("Stopped"):
        return "skipped", measurement.stamp.error
    if level is None:
        return "crashes", measurement.problem or "no record"
    return level_outcome(level, measurement.stamp.error)


def level_outcome(level: metrics.Level, error: str | None = None) -> tuple[str, str | None]:
    """What the requests of one level came to."""
    causes = metrics.failures(level)
    verdict = metrics.client_verdict(level)
    if error:
        return "crashes", error
    if verdict.status == "client_bound":
        return "client_bound", "; ".join(verdict.reasons)
    if causes:
        return "crashes", ", ".join(f"{n} {name}" for name, n in causes.items())
    if verdict.status != "ok":
        return "not_enough_data", f"every request ok, but the client is {verdict.status}: {'; '.join(verdict.reasons)}"
    return "works", None


_WORST = ("crashes", "identity_mismatch", "client_bound", "skipped", "not_enough_data", "works")


def trials(run: NotebookRun, levels: Levels, cells: Sequence[DepthCell] = ()) -> list[Trial]:
    """One trial a level (over its repeats, as good as the worst of them) and one a depth."""
    made = []
    for c, repeats in levels.items():
        found = [_outcome(m) for m in repeats]
        outcome = min((o for o, _ in found), key=_WORST.index)
        reasons = [f"repeat {i}: {why}" if len(found) > 1 else why for i, (_, why) in enumerate(found, 1) if why]
        values = {}
        if any(m.ok for m in repeats):
            values = {key: pooled(repeats, key) for key in ("output_tokens_per_s", "ttft_s_p50", "chunk_gap_s_p50")}
        folders = [m.folder for m in repeats]
        made.append(
            Trial(
                id=f"level-C{c}",
                what=f"closed loop, C={c}, {len(repeats)} repeat{'s' * (len(repeats) > 1)}",
                outcome=outcome,
                reason="; ".join(reasons) or None,
                values=values,
                evidence=_evidence(run, folders) or _evidence(run, folders, "stamp.json"),
                launch_ids=launch_ids(repeats),
                seconds=round(sum(m.stamp.seconds for m in repeats), 3),
            )
        )
    return made + [_depth_trial(run, cell) for cell in cells]


def _depth_trial(run: NotebookRun, cell: DepthCell) -> Trial:
    measurement = cell.measurement
    folders = [measurement.folder / half for half in ("cold", "hit")]
    outcome, reason = ("works", None)
    if measurement.problem:
        stopped = measurement.problem.startswith("Stopped")
        outcome = "identity_mismatch" if measurement.stamp.invalid else "skipped" if stopped else "crashes"
        reason = measurement.problem
    else:
        found = [level_outcome(level) if (level := level_in(f)) else ("crashes", "no record") for f in folders]
        outcome = min((o for o, _ in found), key=_WORST.index)
        reason = (
            "; ".join(f"{half}: {why}" for half, (_, why) in zip(("cold", "hit"), found, strict=True) if why) or None
        )
    values: dict[str, Measured] = {}
    for half, folder in zip(("cold", "hit"), folders, strict=True):
        s = summary_in(folder) if measurement.ok else None
        values |= {f"{key}_{half}": s[key] for key in ("ttft_s_p50", "decode_tokens_per_s_mean")} if s else {}
    return Trial(
        id=measurement.stamp.name,
        what=f"{cell.depth} tokens deep, {cell.concurrency} at once, cold and with a prefix hit",
        outcome=outcome,
        reason=reason,
        values=values,
        evidence=_evidence(run, folders) or _evidence(run, [measurement.folder], "stamp.json"),
        launch_ids=measurement.launch_ids,
        seconds=measurement.stamp.seconds,
    )


def verdicts(
    run: NotebookRun, levels: Levels, cells: Sequence[DepthCell], smoke: Measurement, frozen: Frozen
) -> list[Verdict]:
    """What the records show, each claim with its limit; undecided ones say why."""
    tried = [t for t in trials(run, levels) if t.id.startswith("level-")]
    made = [
        Verdict(
            id=t.id,
            claim=f"At C={c} every request is answered by the server under test",
            status=t.status,
            measured=t.values.get("output_tokens_per_s"),
            limit="0 failed requests, one server identity, client keeps up, in every repeat",
            rule="lib.load.bench_verdicts",
            reason=t.reason or "all requests ok",
            evidence=t.evidence,
            launch_ids=t.launch_ids,
        )
        for c, t in zip(levels, tried, strict=True)
    ]
    wanted = params_of(run).concurrency
    if missing := [c for c in wanted if c not in levels]:
        reason = "; ".join(s for s in run.skipped if any(f"level-C{c}" in s for c in missing)) or (
            run.skipped[-1] if run.skipped else "no level was asked for"
        )
        claim = "Every level of the parameters was measured"
        made.append(Verdict(id="levels", claim=claim, status=Status.INCONCLUSIVE, reason=reason))
    made.append(_scaling(run, levels))
    made.append(_knee(run, levels, frozen))
    made.append(_prediction_first(run, levels, cells, frozen))
    made.append(_below_ceiling(run, levels, cells, frozen))
    if cells or params_of(run).depths:
        made += [_hit(run, cells), _hit_pays(run, cells), _depth_decode(run, cells)]
    made.append(_server_truth(run, levels, cells))
    made.append(_gpu_state(run, levels, cells))
    made.append(_smoke(run, levels, smoke))
    return made


def _scaling(run: NotebookRun, levels: Levels) -> Verdict:
    good = usable(levels)
    used = [m for repeats in good.values() for m in repeats]
    rates = {c: pooled(repeats, "output_tokens_per_s") for c, repeats in good.items()}
    known = {c: m for c, m in sorted(rates.items()) if isinstance(m.value, (int, float)) and m.value > 0}
    common: dict[str, Any] = {
        "id": "more-users",
        "claim": "More concurrent requests give more total throughput, up to the highest level",
        "limit": "the 95% interval of each level lies above the one before (requests and repeats of this run; not other days)",
        "rule": "lib.load.bench_verdicts",
        "evidence": _evidence(run, [m.folder for m in used]),
        "launch_ids": launch_ids(used),
    }
    if len(known) < 2:
        return Verdict(status=Status.INCONCLUSIVE, reason="fewer than two levels gave a throughput", **common)
    levels_in_order = list(known)
    rate = {c: float(m.value or 0) for c, m in known.items()}
    first, last = levels_in_order[0], levels_in_order[-1]
    n = sum(m.n or 0 for m in known.values())
    gain = Measured(
        value=rate[last] / rate[first], unit="x", n=n, reason=f"C={last} over C={first}; intervals by level"
    )
    words = ", ".join(f"C={c}: {rate[c]:.4g} tok/s" for c in levels_in_order)
    if any(m.low is None or m.high is None for m in known.values()):
        return Verdict(status=Status.INCONCLUSIVE, measured=gain, reason=f"{words}; a level has no interval", **common)
    pairs = list(zip(levels_in_order, levels_in_order[1:], strict=False))
    falls = [f"C={a} to C={b}" for a, b in pairs if (known[b].high or 0) < (known[a].low or 0)]
    unclear = [f"C={a} to C={b}" for a, b in pairs if not falls and (known[b].low or 0) <= (known[a].high or 0)]
    if falls:
        return Verdict(status=Status.FAIL, measured=gain, reason=f"{words}; it falls from {', '.join(falls)}", **common)
    if unclear:
        reason = f"{words}; intervals overlap: {', '.join(unclear)}"
        return Verdict(status=Status.INCONCLUSIVE, measured=gain, reason=reason, **common)
    return Verdict(status=Status.PASS, measured=gain, reason=words, **common)


def _knee(run: NotebookRun, levels: Levels, frozen: Frozen) -> Verdict:
    used = [m for repeats in usable(levels).values() for m in repeats]
    level, beyond, words = knee_level(levels)
    predicted = frozen.forecast.knee
    common: dict[str, Any] = {
        "id": "knee",
        "claim": "The knee lies between two measured levels: up to it more users pay, beyond it they do not",
        "limit": f"scaling efficiency of a step (log of throughput's growth over log of users' growth) across {KNEE_EFFICIENCY:g}",
        "rule": "lib.model.roofline.step_efficiency",
        "predicted": Measured(value=predicted, unit="requests", reason=frozen.forecast.knee_reason),
        "evidence": _evidence(run, [m.folder for m in used]),
        "launch_ids": launch_ids(used),
    }
    if level is None:
        return Verdict(status=Status.INCONCLUSIVE, reason=words, **common)
    n = sum((row["scaling efficiency"].n or 0) for row in steps(levels) if row["from"] == level)
    found = Measured(
        value=level, unit="requests", n=n, low=level, high=beyond, reason="the knee lies between these levels"
    )
    return Verdict(status=Status.PASS, measured=found, reason=words, **common)


def _first_sent(levels: Levels, cells: Sequence[DepthCell]) -> float | None:
    """When the first measured request's level began, seconds since the epoch."""
    found = [level_in(folder) for folder in windows(levels, cells).values()]
    return min((level.header["window"]["started_unix_s"] for level in found if level), default=None)


def _prediction_first(run: NotebookRun, levels: Levels, cells: Sequence[DepthCell], frozen: Frozen) -> Verdict:
    written = datetime.datetime.fromisoformat(frozen.frozen_at).timestamp()
    first = _first_sent(levels, cells)
    file = run.raw / "prediction" / "prediction.json"
    points = [p for p in frozen.forecast.points if p.value is not None]
    common: dict[str, Any] = {
        "id": "prediction-first",
        "claim": "The prediction was written down before anything was measured",
        "limit": "its time lies before the first level's",
        "rule": "lib.load.bench_forecast.freeze",
        "evidence": [run.evidence(file)],
    }
    if not points:
        reason = next((p.reason for p in frozen.forecast.points if p.reason), "nothing was predicted")
        return Verdict(status=Status.INCONCLUSIVE, reason=f"no figure was predicted: {reason}", **common)
    if first is None:
        return Verdict(status=Status.INCONCLUSIVE, reason="nothing was measured", **common)
    lead = Measured(value=first - written, unit="s", n=len(points), reason=f"{len(points)} figures, one time stamp")
    status = Status.PASS if first > written else Status.INVALID
    return Verdict(status=status, measured=lead, reason=f"written down at {frozen.frozen_at}", **common)


def _below_ceiling(run: NotebookRun, levels: Levels, cells: Sequence[DepthCell], frozen: Frozen) -> Verdict:
    reached = [(p, share(p, measured_for(p, levels, cells))) for p in frozen.forecast.points]
    shares = [(p, s, float(s.value)) for p, s in reached if isinstance(s.value, (int, float))]
    used = [m for repeats in usable(levels).values() for m in repeats] + [
        c.measurement for c in cells if c.measurement.ok
    ]
    common: dict[str, Any] = {
        "id": "below-ceiling",
        "claim": "No measured rate or time is better than its predicted bound, so the bounds are not refuted",
        "limit": "share of the bound below 1 at every level and depth, with its whole interval",
        "rule": "lib.model.roofline",
        "launch_ids": launch_ids(used),
    }
    if not shares:
        reason = next((p.reason for p in frozen.forecast.points if p.reason), "nothing was measured")
        return Verdict(status=Status.INCONCLUSIVE, reason=reason, **common)
    names = ("prediction/prediction.json", "bandwidth/bandwidth.json", "tensors/tensors.json", "topology/topology.json")
    evidence = [run.evidence(run.raw / name) for name in names if (run.raw / name).exists()]
    evidence += _evidence(run, [m.folder for m in used]) + _evidence(
        run, [c.measurement.folder / "cold" for c in cells]
    )
    _, top, _ = max(shares, key=lambda row: row[2])
    words = ", ".join(f"{p.id} {value:.0%} ({p.binds})" for p, _, value in shares)
    reason = f"share reached and the term that binds: {words}"
    above = [p.id for p, s, value in shares if (value if s.low is None else s.low) >= 1]
    across = [p.id for p, s, value in shares if p.id not in above and (value if s.high is None else s.high) >= 1]
    if above and frozen.forecast.estimate:
        reason = f"passed at {', '.join(above)}, but {frozen.forecast.estimate}; {reason}"
        return Verdict(status=Status.INCONCLUSIVE, measured=top, reason=reason, evidence=evidence, **common)
    status = Status.FAIL if above else Status.INCONCLUSIVE if across else Status.PASS
    if above:
        reason = f"refuted at {', '.join(above)}: a figure of the device is too low, or a term is too long; {reason}"
    elif across:
        reason = f"the interval holds 1 at {', '.join(across)}; {reason}"
    return Verdict(status=status, measured=top, reason=reason, evidence=evidence, **common)


def _halves(cells: Sequence[DepthCell]) -> list[tuple[DepthCell, Path, Path]]:
    return [(c, c.measurement.folder / "cold", c.measurement.folder / "hit") for c in cells if c.measurement.ok]


def _depth_common(run: NotebookRun, cells: Sequence[DepthCell]) -> Row:
    good = _halves(cells)
    return {
        "evidence": _evidence(run, [folder for _, a, b in good for folder in (a, b)]),
        "launch_ids": launch_ids([c.measurement for c in cells]),
    }


def _no_depth(run: NotebookRun) -> str:
    found = [s for s in run.skipped if "depth" in s]
    return "; ".join(found) or "no depth was measured without error"


def needed_share(depth: int) -> float:
    """The share of a prefix that must have come from the cache for a request to count as a hit.

    Example: 0.9 at 8,192 tokens, 0.5 at 1,024 and below.
    """
    return max(0.5, min(HIT_SHARE, 1 - HIT_SLACK_TOKENS / depth))


def _hit(run: NotebookRun, cells: Sequence[DepthCell]) -> Verdict:
    common = _depth_common(run, cells) | {
        "id": "prefix-hit",
        "claim": "What is called cold was computed, and what is called a prefix hit came from the cache",
        "limit": f"cached_tokens of every request: cold at most {COLD_SHARE:.0%} of the prompt; "
        f"hit at least {HIT_SHARE:.0%} of the prefix, "
        f"or all but {HIT_SLACK_TOKENS} tokens and at least half",
        "rule": "lib.load.bench_rows.cached_share",
    }
    good = _halves(cells)
    if not good:
        return Verdict(status=Status.INCONCLUSIVE, reason=_no_depth(run), **common)
    faults, lowest, n = [], [], 0
    for cell, cold, hit in good:
        a, b = cached_share(level_in(cold)), cached_share(level_in(hit), cell.tokens())
        name = cell.measurement.stamp.name
        if a.value is None or b.value is None:
            return Verdict(
                status=Status.INCONCLUSIVE, reason=f"{name}: {a.reason if a.value is None else b.reason}", **common
            )
        level = level_in(cold)
        prompts = [metrics.cached_tokens(r) or 0 for r in level.requests if metrics.is_ok(r)] if level else []
        warmest = max(prompts, default=0) / max(cell.tokens() or 1, 1)
        n += (a.n or 0) + (b.n or 0)
        lowest.append(float(b.value))
        if warmest > COLD_SHARE:
            faults.append(f"{name}: a cold request took {warmest:.0%} of its prompt from the cache")
        if float(b.value) < needed_share(cell.tokens() or 1):
            faults.append(f"{name}: a hit took only {float(b.value):.0%} of its prefix from the cache")
    measured = Measured(
        value=min(lowest), unit="frac", n=n, reason="lowest share of a prefix; every request is looked at"
    )
    if faults:
        return Verdict(status=Status.INVALID, measured=measured, reason="; ".join(faults), **common)
    return Verdict(
        status=Status.PASS, measured=measured, reason=f"{n} requests at {len(good)} depths and users", **common
    )


def _hit_pays(run: NotebookRun, cells: Sequence[DepthCell]) -> Verdict:
    common = _depth_common(run, cells) | {
        "id": "hit-pays",
        "claim": "A prefix hit shortens the time to the first token at every depth",
        "limit": "the hit's 95% interval lies below the cold one's at every depth and number of users",
        "rule": "lib.load.bench_verdicts",
    }
    pairs = []
    for cell, cold, hit in _halves(cells):
        a, b = summary_in(cold), summary_in(hit)
        if (
            a
            and b
            and isinstance(a["ttft_s_p50"].value, (int, float))
            and isinstance(b["ttft_s_p50"].value, (int, float))
        ):
            pairs.append((cell.measurement.stamp.name, a["ttft_s_p50"], b["ttft_s_p50"]))
    if not pairs:
        return Verdict(status=Status.INCONCLUSIVE, reason=_no_depth(run), **common)
    words = ", ".join(f"{name} {float(c.value or 0):.3g} to {float(h.value or 0):.3g} s" for name, c, h in pairs)
    n = sum((c.n or 0) + (h.n or 0) for _, c, h in pairs)
    ratios = [float(h.value or 0) / float(c.value or 1) for _, c, h in pairs if c.value]
    measured = (
        Measured(value=max(ratios), unit="frac", n=n, reason="largest hit over cold; intervals by depth")
        if ratios
        else None
    )
    open_ones = [name for name, c, h in pairs if None in (c.low, c.high, h.low, h.high)]
    if open_ones:
        return Verdict(
            status=Status.INCONCLUSIVE,
            measured=measured,
            reason=f"no interval at {', '.join(open_ones)}; {words}",
            **common,
        )
    worse = [name for name, c, h in pairs if (h.low or 0) > (c.high or 0)]
    unclear = [name for name, c, h in pairs if name not in worse and (h.high or 0) >= (c.low or 0)]
    if worse:
        return Verdict(status=Status.FAIL, measured=measured, reason=f"longer at {', '.join(worse)}; {words}", **common)
    if unclear:
        reason = f"intervals overlap at {', '.join(unclear)}; {words}"
        return Verdict(status=Status.INCONCLUSIVE, measured=measured, reason=reason, **common)
    return Verdict(status=Status.PASS, measured=measured, reason=words, **common)


def _depth_decode(run: NotebookRun, cells: Sequence[DepthCell]) -> Verdict:
    common = _depth_common(run, cells) | {
        "id": "depth-decode",
        "claim": f"One user's decode rate at the deepest context is at least {DEPTH_KEEPS:.0%} of that at the shallowest",
        "limit": f"ratio, with its interval, at least {DEPTH_KEEPS:g}",
        "rule": "lib.load.bench_verdicts",
    }
    found = []
    for cell, cold, _ in _halves(cells):
        s = summary_in(cold)
        if cell.concurrency == 1 and s and isinstance(s["decode_tokens_per_s_mean"].value, (int, float)):
            found.append((cell.tokens() or 0, s["decode_tokens_per_s_mean"]))
    found.sort(key=lambda pair: pair[0])
    if len(found) < 2:
        reason = _no_depth(run) if not found else "fewer than two depths were measured for one user"
        return Verdict(status=Status.INCONCLUSIVE, reason=reason, **common)
    (low_at, shallow), (high_at, deep) = found[0], found[-1]
    ratio = float(deep.value or 0) / float(shallow.value or 1)
    low = high = None
    if None not in (deep.low, deep.high, shallow.low, shallow.high):
        low, high = (deep.low or 0) / (shallow.high or 1), (deep.high or 0) / (shallow.low or 1)
    measured = Measured(
        value=ratio,
        unit="frac",
        n=(deep.n or 0) + (shallow.n or 0),
        low=low,
        high=high,
        reason=None if low else "no interval",
    )
    words = f"{float(shallow.value or 0):.4g} tok/s at {low_at:,} tokens, {float(deep.value or 0):.4g} at {high_at:,}"
    if low is None or high is None:
        return Verdict(status=Status.INCONCLUSIVE, measured=measured, reason=f"{words}; no interval", **common)
    status = Status.PASS if low >= DEPTH_KEEPS else Status.FAIL if high < DEPTH_KEEPS else Status.INCONCLUSIVE
    return Verdict(
        status=status,
        measured=measured,
        reason=words + ("; the interval holds the limit" if status == Status.INCONCLUSIVE else ""),
        **common,
    )


def _server_truth(run: NotebookRun, levels: Levels, cells: Sequence[DepthCell]) -> Verdict:
    folders = windows(levels, cells)
    used = _all(levels) + [c.measurement for c in cells]
    common: dict[str, Any] = {
        "id": "server-truth",
        "claim": "The server counted the same requests, prompt tokens and output tokens as the client, in every window",
        "limit": "growth of /metrics over each window minus the client's count is 0",
        "rule": "lib.load.bench_rows.truth_of",
        "launch_ids": launch_ids(used),
    }
    off, silent, n = [], [], 0
    worst = 0.0
    for name, folder in folders.items():
        count, _, different, words = truth_of(folder)
        if not different:
            silent.append(f"{name}: {count.reason or words}")
            continue
        n += 1
        if any(different.values()):
            worst = max([worst, *(abs(v) for v in different.values())])
            off.append(f"{name}: {', '.join(f'{k} {v:+.0f}' for k, v in different.items() if v)} ({words})")
    evidence = _evidence(run, list(folders.values()), telemetry.AFTER)
    if not n:
        return Verdict(
            status=Status.INCONCLUSIVE,
            reason=silent[0] if silent else "nothing was measured",
            evidence=evidence,
            **common,
        )
    measured = Measured(value=worst, unit="", n=n, reason="largest difference of a count, over all windows")
    if off:
        return Verdict(status=Status.FAIL, measured=measured, reason="; ".join(off), evidence=evidence, **common)
    status = Status.INCONCLUSIVE if silent else Status.PASS
    reason = f"{n} windows agree" + (f"; not said: {'; '.join(silent[:3])}" if silent else "")
    return Verdict(status=status, measured=measured, reason=reason, evidence=evidence, **common)


def _gpu_state(run: NotebookRun, levels: Levels, cells: Sequence[DepthCell]) -> Verdict:
    folders = windows(levels, cells)
    states = {name: state_in(folder) for name, folder in folders.items()}
    common: dict[str, Any] = {
        "id": "gpu-state",
        "claim": "No GPU of the server held its clocks down or reported an Xid during a measured window",
        "limit": "0 samples with a power cap, thermal, hardware or power-brake slowdown; 0 new Xid lines",
        "rule": "lib.server.gpu_state.window_state",
        "evidence": _evidence(run, list(folders.values()), telemetry.FILE),
        "launch_ids": launch_ids(_all(levels) + [c.measurement for c in cells]),
    }
    if not states:
        return Verdict(status=Status.INCONCLUSIVE, reason="nothing was measured", **common)
    absent = [s.reason for s in states.values() if s.source is None]
    if len(absent) == len(states):
        return Verdict(status=Status.UNSUPPORTED, reason=str(absent[0]), **common)
    marked = [f"{name}: {words}" for name, s in states.items() for words in s.throttled]
    marked += [f"{name}: Xid {x.number} on {x.gpu} {x.text}" for name, s in states.items() for x in s.xids or []]
    samples = sum(g.samples for s in states.values() for g in s.gpus)
    clean = sum(1 for s in states.values() if not s.throttled and not s.xids)
    measured = Measured(
        value=clean / len(states), unit="frac", n=samples, reason="windows without a mark; n counts samples"
    )
    if marked:
        return Verdict(status=Status.FAIL, measured=measured, reason="; ".join(marked), **common)
    unknown = [
        f"{name}: {s.reason or 'clock reasons are not reported'}" for name, s in states.items() if not s.reported
    ]
    unread = next((s.xid_reason for s in states.values() if s.xids is None), None)
    open_ones = unknown[:3] + ([f"Xids {unread}"] if unread else [])
    if open_ones:
        reason = f"no window of {len(states)} is marked, but not all is known: {'; '.join(open_ones)}"
        return Verdict(status=Status.INCONCLUSIVE, measured=measured, reason=reason, **common)
    return Verdict(status=Status.PASS, measured=measured, reason=f"{len(states)} windows, {samples} samples", **common)


def _smoke(run: NotebookRun, levels: Levels, smoke: Measurement) -> Verdict:
    """Whether the smoke test's figure follows from its wait for the first token and the decode rate of the C=1 level."""
    file = smoke.folder / (LEVEL_FILE if (smoke.folder / LEVEL_FILE).exists() else "stamp.json")
    common: dict[str, Any] = {
        "id": "smoke-test",
        "claim": "The smoke test's tokens per second follow from its time to first token and the decode rate measured at C=1",
        "limit": f"within {SMOKE_TOLERANCE:.0%} of n / (TTFT + (n - 1) / decode rate at C=1)",
        "rule": "lib.load.metrics.decompose",
        "evidence": [run.evidence(file)],
        "launch_ids": smoke.launch_ids,
    }
    if smoke.stamp.invalid:
        return Verdict(status=Status.INVALID, reason=smoke.stamp.invalid, **common)
    level = level_of(smoke)
    apart: Mapping[str, Measured] = metrics.decompose(level.requests[0]) if level and level.requests else {}
    numbers = {k: float(m.value) for k, m in apart.items() if isinstance(m.value, (int, float))}
    if not {"tokens_per_s", "output_tokens", "ttft_s"} <= numbers.keys():
        reason = apart["tokens_per_s"].reason if apart else None
        return Verdict(status=Status.INCONCLUSIVE, reason=reason or smoke.problem or "no answer", **common)
    figure = apart["tokens_per_s"]
    alone = usable(levels).get(1, [])
    rate = pooled(alone, "decode_tokens_per_s_mean") if alone else None
    if rate is None or not isinstance(rate.value, (int, float)):
        reason = "there is no usable level C=1 to compare with"
        return Verdict(status=Status.INCONCLUSIVE, measured=figure, reason=reason, **common)
    common["evidence"] += _evidence(run, [m.folder for m in alone])
    common["launch_ids"] = launch_ids([smoke, *alone])
    n, ttft = numbers["output_tokens"], numbers["ttft_s"]
    expected = n / (ttft + (n - 1) / float(rate.value))
    off = numbers["tokens_per_s"] / expected - 1
    words = (
        f"{n:.0f} tokens, {ttft:.3f} s to the first, then {numbers.get('decode_tokens_per_s', 0):.4g} tok/s "
        f"(C=1 decoded at {rate.value:.4g}): expected {expected:.4g} tok/s, seen {numbers['tokens_per_s']:.4g} ({off:+.0%})"
    )
    predicted = Measured(value=expected, unit="tok/s", reason="computed")
    status = Status.PASS if abs(off) <= SMOKE_TOLERANCE else Status.FAIL
    return Verdict(status=status, measured=figure, predicted=predicted, reason=words, **common)


def open_rows(made: Sequence[Verdict]) -> list[Row]:
    """What is not decided, and why: every verdict that is neither pass nor fail."""
    undecided = [v for v in made if v.status not in (Status.PASS, Status.FAIL)]
    return [{"claim": v.claim, "status": v.status, "why it is not decided": v.reason} for v in undecided]


def recommendation(made: Sequence[Verdict], levels: Levels, frozen: Frozen) -> str:
    """One sentence from the verdicts: what one and many get, the knee, the share of the ceiling, what did not pass."""
    rates = {c: pooled(repeats, "output_tokens_per_s") for c, repeats in usable(levels).items()}
    known = {c: float(m.value) for c, m in rates.items() if isinstance(m.value, (int, float))}
    if not levels or not usable(levels):
        return "No level gave a usable measurement: read the failures before anything else."
    if not known:
        return "No request succeeded: read the failures before anything else."
    best = max(known, key=lambda c: known[c])
    words = [f"Highest measured throughput: {known[best]:.4g} tok/s at C={best}"]
    one = usable(levels).get(1)
    if one and isinstance((alone := pooled(one, "decode_tokens_per_s_mean")).value, (int, float)):
        words.append(f"one user decodes at {alone.value:.4g} tok/s")
    knee, beyond, why = knee_level(levels)
    words.append(f"the knee lies at C={knee}, before C={beyond}" if knee is not None else f"no knee is shown ({why})")
    point = frozen.forecast.point(f"level-C{knee if knee is not None else best}")
    reached = share(point, measured_for(point, levels, ())) if point else None
    if point and reached and isinstance(reached.value, (int, float)):
        words.append(f"C={point.concurrency} reaches {reached.value:.1%} of its ceiling (what binds: {point.binds})")
    failed = [v.id for v in made if v.status in (Status.FAIL, Status.INVALID, Status.ERROR)]
    undecided = [v.id for v in made if v.status == Status.INCONCLUSIVE]
    words += [f"failed: {', '.join(failed)}"] * bool(failed) + [f"undecided: {', '.join(undecided)}"] * bool(undecided)
    return "; ".join(words) + "."
