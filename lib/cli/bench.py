"""`workbook bench`: load levels against a running server, with raw records and the client's own proof."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.batch import dask_options
from lib.errors import BadInput, ServerError, WorkbookError
from lib.load import client, judge, metrics, search, server_side, stats, workloads
from lib.load.workloads import Workload
from lib.records import Measured
from lib.server.bounded import get_bounded, refuse_url_with_secret
from lib.server.control import Control
from lib.server.redact import redact_text

if TYPE_CHECKING:
    from lib.batch.dask_load import DaskSenders

DATASETS = ("code", "random-ids", "repeating", "chat", "shared-prefix", "agentic")
JSON_SCHEMA = 1
#: Of the numbers, those that an A/B comparison and repeats are summarised by.
COMPARED = ("output_tokens_per_s", "ttft_s_p50", "chunk_gap_s_p50", "token_latency_s_p50", "e2e_s_mean")
#: They decide too where load is sent from other machines.
SENT_FROM = ("scheduler", "cluster", "machines")
#: Without a terminal, progress is a line this often.
PROGRESS_LINE_S = 30.0
#: Options that decide what is measured: a --json file of a run with others is not continued.
DECIDING = (
    "base_url", "versus", "concurrency", "rate", "trace", "time_scale", "limit", "arrival", "ramp", "ramp_from",
    "num_requests", "input_len", "output_len", "dataset", "turns", "think_time", "max_context", "scripted", "multi_turn",
    "vocab_size", "api", "model", "seed", "warmup", "stop_at_eos", "token_counts", "workers", "repeats", "flush_cache",
    "slo", "good_frac", "search", "find_knee", "max_seconds",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """One level to measure: which load, on which server (a or b), in which repeat."""

    name: str
    value: float
    number: int
    repeat: int
    side: str

    def key(self) -> str:
        """Its file name without the ending."""
        end = f"-{self.side}" if self.side else ""
        return f"{self.name}-{self.value:g}" + (f"-r{self.repeat}" if self.repeat else "") + end


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Options of `workbook bench`."""
    parser = subparsers.add_parser("bench", help="measure a running server at several load levels")
    parser.add_argument("--base-url", required=True, help="http://HOST:PORT of the server, or https://")
    load = parser.add_argument_group("load")
    load.add_argument("--concurrency", help="closed loop: levels, for instance 1,4,16,32")
    load.add_argument("--rate", help="open loop instead: requests a second, for instance 0.5,1,2")
    load.add_argument("--trace", type=Path, help="replay instead: a recorded trace (Mooncake's form, or docs/bench.md)")
    load.add_argument("--time-scale", default="1", help="replay: levels; 2 is twice as slow, 0.5 twice as fast")
    load.add_argument("--limit", type=int, help="replay: only the first lines of the trace")
    load.add_argument("--arrival", choices=client.ARRIVALS, default="poisson", help="open loop: how requests arrive")
    load.add_argument("--ramp", type=float, default=0.0, help="seconds over which slots start, or the rate grows")
    load.add_argument("--ramp-from", type=float, default=0.0, help="open loop: the rate at which the ramp begins")
    load.add_argument(
        "--num-requests", type=int, help="requests (sessions) a level (default max(4, 2C); open loop: 64)"
    )
    load.add_argument("--max-seconds", type=float, help="send nothing after so many seconds of a level")
    load.add_argument("--repeats", type=int, default=1, help="measure all levels so often, interleaved")
    load.add_argument("--versus", help="a second server: A/B, interleaved, the same prompts, paired differences")
    load.add_argument("--workers", type=int, default=1, help="sending processes")
    dask_options.add_load_arguments(parser.add_argument_group("load from several machines"))
    what = parser.add_argument_group("what is sent")
    what.add_argument("--input-len", type=int, default=512, help="tokens a prompt, about (default 512)")
    what.add_argument("--output-len", type=int, default=128, help="tokens an answer (default 128)")
    what.add_argument(
        "--dataset", default="code", help=f"{', '.join(DATASETS)}, or the path of a .txt, .jsonl or .json file"
    )
    what.add_argument("--turns", type=int, default=6, help="agentic: requests a session (default 6)")
    what.add_argument("--think-time", type=float, default=0.5, help="sessions: mean seconds before the next turn")
    what.add_argument("--max-context", type=int, help="agentic: end a session before so many tokens")
    what.add_argument("--scripted", action="store_true", help="agentic: fixed answers in the conversation")
    what.add_argument("--multi-turn", action="store_true", help="ShareGPT file: whole conversations, not first turns")
    what.add_argument("--vocab-size", type=int, help="for random ids: the model's vocabulary size (config.json)")
    what.add_argument("--api", choices=tuple(client.PATHS), help="default: chat for chat datasets, else generate")
    what.add_argument("--model", help="served model name (default: what /v1/models says)")
    what.add_argument("--seed", type=int, default=0)
    what.add_argument("--warmup", type=int, default=1, help="warm-up requests a level, never measured (default 1)")
    what.add_argument("--stop-at-eos", action="store_true", help="let answers end by themselves")
    what.add_argument("--flush-cache", action="store_true", help="empty the server's prefix cache before each level")
    what.add_argument(
        "--token-counts", action="store_true",
        help="completions and chat: ask for a token count in every event (per-token latency under speculation)",
    )  # fmt: skip
    goal = parser.add_argument_group("service level")
    goal.add_argument("--slo", help="limits of a good request, for instance ttft=0.5,tpot=0.05,e2e=20 (seconds)")
    goal.add_argument(
        "--good-frac", type=float, default=search.GOOD_FRAC, help="share that must be good (default 0.95)"
    )
    goal.add_argument("--search", type=float, help="search the highest load up to this that meets --slo")
    goal.add_argument("--find-knee", type=float, help="search the knee up to this load, from the one level given")
    rest = parser.add_argument_group("connection and output")
    rest.add_argument("--gap-timeout", type=float, default=60.0, help="seconds without a byte that make a stall")
    rest.add_argument("--first-timeout", type=float, default=600.0, help="seconds until an answer must have begun")
    rest.add_argument("--api-key-env", help="name of the environment variable with the API key")
    rest.add_argument("--ca-file", type=Path, help="https: certificates to trust instead of the system's")
    rest.add_argument("--no-calibration", action="store_true", help="skip it; latencies then carry no verdict")
    rest.add_argument("--json", type=Path, help="write all numbers to this file; a file of the same run is continued")
    rest.add_argument("--overwrite", action="store_true", help="begin anew although the --json file exists")
    rest.add_argument("--raw", type=Path, help="folder for the raw records (default: a new temporary one)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure each level; 0 if every request of every level succeeded, 1 if some failed, 130 after Ctrl-C."""
    for url in (args.base_url, args.versus):
        if url:
            refuse_url_with_secret(url)
            client.split_url(url)
    with dask_options.load_senders(args) as senders:
        bench = Bench(args, senders)
        try:
            bench.measure()
        except KeyboardInterrupt:
            bench.stopped = "interrupted"
            print("interrupted: what was measured is kept", file=sys.stderr)
        bench.conclude()
    if bench.stopped:
        return 130
    return 1 if bench.bad else 0


class Bench:
    """One call of the command: its levels, what has been measured of them, and its JSON file."""

    def __init__(self, args: argparse.Namespace, senders: DaskSenders | None = None) -> None:
        self.args, self.senders = args, senders
        self.processes = len(senders.machines) if senders else args.workers
        self.levels = _levels(args)
        self.limits = _limits(args)
        if args.search and args.no_calibration:
            do = "leave out --no-calibration"
            raise BadInput("--search with a calibrated client: it is a verdict on latencies", "--no-calibration", do)
        self.stopped: str | None = None
        self.bad = 0
        self.results: list[dict[str, Any]] = []
        self.measured: dict[str, list[dict[str, Measured]]] = {}
        self.points: dict[float, search.Point] = {}
        self.bracket: search.Bracket | None = None
        self.done_work = self.left_work = self.spent_s = 0.0
        if args.json and not args.json.parent.is_dir():
            raise BadInput("an existing folder for --json", str(args.json.parent))
        old = _earlier(args)
        self.api = args.api or ("chat" if args.dataset == "chat" or args.multi_turn else "generate")
        self.models = {
            side: args.model or _served_model(url, args.api_key_env, args.ca_file) for side, url in self.sides().items()
        }
        self.raw = Path(old["raw"]) if old else args.raw or Path(tempfile.mkdtemp(prefix="workbook-bench-"))
        self.earlier = {r["key"]: r for r in old["levels"] if "record" in r} if old else {}
        self.calibration: dict[str, Any] | None = None

    def sides(self) -> dict[str, str]:
        """The servers by their side: one without a name, or a and b."""
        return {"a": self.args.base_url, "b": self.args.versus} if self.args.versus else {"": self.args.base_url}

    def steps(self) -> list[Step]:
        """All levels of all repeats: repeats interleaved, and the two sides in turn, so that drift meets all alike."""
        made = []
        for repeat in range(self.args.repeats):
            for number, (name, value) in enumerate(self.levels):
                sides = list(self.sides())
                if (repeat + number) % 2:
                    sides.reverse()
                made += [Step(name, value, number, repeat, side) for side in sides]
        return made

    def measure(self) -> None:
        """Every step, or the search; a level that cannot be measured is kept with its reason and the next goes on."""
        args = self.args
        steps = self.steps()
        made = {step: self.workload(step) for step in steps} if not (args.search or args.find_knee) else {}
        first = next(iter(made.values())) if made else self.workload(steps[0])
        if not args.api and any(r.prompt_kind() == "messages" for r in first.requests):
            self.api = "chat"  # the only endpoint that takes messages
        self.calibrate()
        print(f"{args.base_url}" + (f" (a) against {args.versus} (b)" if args.versus else ""))
        print(
            f"model {', '.join(dict.fromkeys(self.models.values()))}  api {self.api}  dataset {first.name}  raw in {self.raw}"
        )
        if self.earlier:
            print(f"continuing {args.json}: {len(self.earlier)} level(s) are in it and are not measured again")
        print(_row({"concurrency": "C", "rate": "req/s", "replay": "scale"}[self.levels[0][0]], *COLUMNS))
        if args.search:
            self.bracket = search.highest_load(
                self.probe, self.levels[0][1], most=args.search, whole=self.levels[0][0] == "concurrency"
            )
            return
        if args.find_knee:
            search.find_knee(
                self.knee_point, self.levels[0][1], most=args.find_knee, whole=self.levels[0][0] == "concurrency"
            )
            return
        self.left_work = sum(_work(w, s) for s, w in made.items() if s.key() not in self.earlier)
        for position, (step, workload) in enumerate(made.items(), 1):
            self.take(step, workload, f"{position}/{len(made)}")

    def calibrate(self) -> None:
        """Hold this client against the built-in judge at the largest load."""
        args = self.args
        if args.no_calibration:
            return
        streams = (
            int(max([v for _, v in self.levels] + [args.search or 0, args.find_knee or 0])) if args.concurrency else 64
        )
        print(f"calibrating this client at {streams} streams against the built-in judge ...", flush=True)
        if self.senders:
            made = self.senders.calibrate(max(1, streams), self.api)
        else:
            made = judge.calibrate(max(1, streams), api=self.api, workers=args.workers)
        why = "; ".join(made["reasons"])
        print(f"calibration: {made['status']}" + (f" ({why})" if why else "") + _shown(made), flush=True)
        self.calibration = made

    def workload(self, step: Step) -> Workload:
        """Prompts of a step's own: no level meets what another left in the prefix cache, but both sides get the same."""
        return _workload(self.args, step.number + 100 * step.repeat, step.value, step.name)

    def probe(self, load: float) -> search.Probe:
        """One load of the search."""
        step = Step(self.levels[0][0], load, len(self.results), 0, "")
        level = self.take(step, self.workload(step), f"search {len(self.results) + 1}")
        if level is None:
            none = Measured(value=None, reason=self.results[-1].get("problem") or "not measured")
            return search.Probe(
                load=load, status="invalid", good_frac=none, goodput_requests_per_s=none, output_tokens_per_s=none,
                reason=none.reason,
            )  # fmt: skip
        return search.probe_of(load, level, self.limits, self.args.good_frac)

    def knee_point(self, load: float) -> search.Point:
        """One load of the knee's search."""
        step = Step(self.levels[0][0], load, len(self.results), 0, "")
        level = self.take(step, self.workload(step), f"knee {len(self.results) + 1}")
        none = Measured(value=None, reason="not measured")
        return search.point_of(load, level) if level else search.Point(load, none, none)

    def take(self, step: Step, workload: Workload, position: str) -> metrics.Level | None:
        """Measure one step, or take it from the earlier run's record; None if it could not be measured."""
        args = self.args
        known = self.earlier.get(step.key())
        if known and Path(known["record"]).exists():
            level = client.read_level(Path(known["record"]))
            self.same(step, level, workload)
            self.keep(step, level)
            return level
        url = self.sides()[step.side]
        path = _free(self.raw / f"{step.key()}.jsonl")
        begun, work = time.monotonic(), _work(workload, step)
        try:
            if args.flush_cache:
                self.flush(url)
            closed = int(step.value) if step.name == "concurrency" else None
            client.run_level(
                url, self.api, workload.requests, out=path, model=self.models[step.side], warmup=workload.warmup,
                seed=args.seed + step.repeat, workload=workload.describe(), workers=self.processes,
                sender=self.senders.sender() if self.senders else None,
                gap_timeout_s=args.gap_timeout, first_timeout_s=args.first_timeout, arrival=args.arrival,
                api_key_env=args.api_key_env, calibration=self.calibration, ca_file=args.ca_file,
                continuous_usage=args.token_counts, max_seconds=args.max_seconds, ramp_s=args.ramp,
                ramp_from=args.ramp_from, offsets_s=workload.offsets_s, concurrency=closed,
                rate=step.value if step.name == "rate" else None,
                observe=server_side.observer(url, args.api_key_env, args.ca_file),
                progress=self.progress(f"{position} {step.key()}", begun, work),
                extra_header={"cache": "flushed" if args.flush_cache else "kept", "repeat": step.repeat},
            )  # fmt: skip
        except KeyboardInterrupt:
            if path.exists():
                self.keep(step, client.read_level(path))
            raise
        except (WorkbookError, OSError) as error:
            if isinstance(error, BadInput):
                raise
            self.bad += 1
            self.results.append({step.name: step.value, "key": step.key(), "problem": str(error)})
            print(f"{step.key()}: not measured: {error}", file=sys.stderr)
            self.write()
            return None
        finally:
            self.done_work, self.left_work = self.done_work + work, self.left_work - work
            self.spent_s += time.monotonic() - begun
        level = client.read_level(path)
        self.keep(step, level)
        return level

    def same(self, step: Step, level: metrics.Level, workload: Workload) -> None:
        """Refuse an earlier level of another model or of other prompts: the options alone tell neither."""
        there = {"model": level.header["model"], "prompts": level.header["workload"].get("sha256")}
        now = {"model": self.models[step.side], "prompts": workload.sha256}
        if there != now:
            other = "; ".join(f"{k}: {there[k]} there, {now[k]} now" for k in now if there[k] != now[k])
            do = "name another file, or give --overwrite"
            raise BadInput(f"{step.key()} in {self.args.json} to be of the same model and prompts", other, do)

    def flush(self, url: str) -> None:
        """Empty the prefix cache, or say why it cannot be."""
        control = Control(url, self.args.api_key_env)
        if self.args.ca_file:
            control.session.verify = str(self.args.ca_file)
        control.flush_cache()

    def keep(self, step: Step, level: metrics.Level) -> None:
        """Print a level's row and notes, and keep its numbers."""
        summary = metrics.level_summary(level)
        failed = metrics.failures(level)
        unsent = level.header["planned"] - level.header["sent"]
        self.bad += sum(failed.values()) + (unsent if level.header["stopped"] != "deadline" else 0)
        label = f"{step.value:g}" + (f" {step.side}" if step.side else "")
        print(_line(label, summary), flush=True)
        beside = server_side.rows(level)
        turns = metrics.turn_rows(level)
        for note in [
            *_notes(level, summary, failed, bool(self.args.ramp)),
            *_turn_notes(turns),
            *_server_notes(beside),
        ]:
            print(f"    {note}")
        result = {
            step.name: step.value, "key": step.key(), "repeat": step.repeat, "side": step.side or None,
            "failures": failed, "unsent": unsent,
            "stopped": level.header["stopped"], "record": str(level.path), "client": _dumped(summary["client"]),
            "metrics": {k: _dumped(m) for k, m in summary.items()}, "server_side": _plain(beside), "turns": _plain(turns),
        }  # fmt: skip
        if self.limits:
            good = metrics.goodput(level, **self.limits)
            result["goodput"] = _plain(good)
            share = good["goodput_frac"]
            status, why = search.level_status(level, share, self.args.good_frac)
            result["slo_status"], result["slo_reason"] = status, why
            words = "no verdict" if status == "invalid" else status
            print(
                f"    good (SLO): {_percent(share)}, {_figure(good['goodput_requests_per_s'], 1, 2)} a second: {words}"
            )
        if self.args.ramp:
            result["timeline"] = _plain(metrics.timeline(level))
        if level.header["stopped"] == "interrupted":
            result.pop("key")  # a later run measures it again
        self.results.append(result)
        self.measured.setdefault(f"{step.name}-{step.value:g}{step.side}", []).append(summary)
        if step.side in ("", "a"):
            self.points.setdefault(step.value, search.point_of(step.value, level))
        self.write()

    def conclude(self) -> None:
        """What all levels say together: repeats, A against B, the knee, the search."""
        more: dict[str, Any] = {}
        if self.args.repeats > 1:
            more["across_repeats"] = {
                key: {m: _dumped(metrics.across_repeats(list_, m)) for m in COMPARED}
                for key, list_ in self.measured.items()
            }
            for key, made in more["across_repeats"].items():
                print(f"{key}, over repeats: " + "; ".join(f"{m} {_worded(made[m])}" for m in COMPARED[:3]))
        if self.args.versus:
            more["a_against_b"] = self.paired()
        if not self.args.search and self.levels[0][0] != "replay" and len(self.points) >= 3:
            found = search.knee(list(self.points.values()))
            spoilt = sorted({str(s["client"].value) for all_ in self.measured.values() for s in all_} - {"ok"})
            if spoilt:
                found = found.model_copy(
                    update={"reason": f"{found.reason}; no verdict: the client was {', '.join(spoilt)}"}
                )
            more["knee"] = found.model_dump()
            print(f"knee: between {_end(found.low)} and {_end(found.high)}; {found.reason}")
        if self.bracket is not None:
            more["search"] = _plain(self.bracket.model_dump())
            low, high = _end(self.bracket.low), _end(self.bracket.high)
            print(f"{self.bracket.what}: at least {low}, below {high}; {self.bracket.reason}")
        self.write(more)

    def paired(self) -> dict[str, Any]:
        """For each level, a minus b over the repeats that both have."""
        made: dict[str, Any] = {}
        for name, value in self.levels:
            a, b = (self.measured.get(f"{name}-{value:g}{side}", []) for side in ("a", "b"))
            row = {}
            for key in COMPARED:
                pairs = [
                    (x[key].value, y[key].value)
                    for x, y in zip(a, b, strict=False)
                    if isinstance(x[key].value, (int, float)) and isinstance(y[key].value, (int, float))
                ]
                found = stats.paired_difference([float(x) for x, _ in pairs], [float(y) for _, y in pairs])  # type: ignore[arg-type]
                row[key] = found.model_dump(exclude_none=True)
            made[f"{name}-{value:g}"] = row
            first = row["output_tokens_per_s"]
            print(
                f"{name} {value:g}, a minus b: output tok/s {_worded(first)}; TTFT p50 s {_worded(row['ttft_s_p50'])}"
            )
        return made

    def write(self, more: dict[str, Any] | None = None) -> None:
        """The JSON file, whole or not at all."""
        if not self.args.json:
            return
        content = {
            "schema": JSON_SCHEMA, "settings": _settings(self.args), "settings_sha256": _digest(self.args),
            "base_url": self.args.base_url, "versus": self.args.versus,
            "model": next(iter(self.models.values())), "models": self.models, "api": self.api, "raw": str(self.raw),
            "calibration": self.calibration, "stopped": self.stopped, "levels": self.results, **(more or {}),
        }  # fmt: skip
        temporary = self.args.json.with_name(f".{self.args.json.name}.tmp")
        try:
            temporary.write_text(json.dumps(content, indent=1, default=str) + "\n")
            temporary.replace(self.args.json)
        except OSError as error:
            raise BadInput(
                f"to write {self.args.json}", str(error.strerror), "free space, or name another file"
            ) from None

    def progress(self, name: str, begun: float, work: float) -> Callable[[dict[str, Any]], None]:
        """Done, in flight, and the time left of this level and of all: on a terminal in place, else a line now and then."""
        tty = sys.stderr.isatty()
        last = [time.monotonic()]

        def show(state: dict[str, Any]) -> None:
            now = time.monotonic()
            done, of = state["done"], state["of"]
            left = (now - begun) / done * (of - done) if done else None
            words = f"{name}: {done} of {of} done, {state['in_flight']} in flight"
            if left is not None:
                share = work * done / of
                each = (self.spent_s + now - begun) / (self.done_work + share) if self.done_work + share else 0.0
                rest = max(0.0, self.left_work - work) * each
                words += f", about {left:.0f} s left" + (f", {left + rest:.0f} s for all levels" if rest else "")
            if tty:
                print(f"\r{words:<100}", end="\r" + " " * 100 + "\r" if done == of else "", file=sys.stderr, flush=True)
            elif now - last[0] >= PROGRESS_LINE_S:
                last[0] = now
                print(words, file=sys.stderr, flush=True)

        return show


def _work(workload: Workload, step: Step) -> float:
    """How long a level may take, in requests one after the other: the measure by which the time left is shared."""
    if workload.offsets_s is not None or step.name == "rate":
        return float(len(workload.requests))
    return len(workload.requests) / max(step.value, 1.0)


def _free(path: Path) -> Path:
    """The path, or one beside it: a record is evidence and is never written over."""
    for number in range(1, 1000):
        made = path if number == 1 else path.with_name(f"{path.stem}-take{number}{path.suffix}")
        if not made.exists():
            return made
    raise BadInput("a free name for a record", str(path), "give another folder with --raw")


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    decide = [*DECIDING, *(name for name in SENT_FROM if getattr(args, name, None))]
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k in decide}


def _digest(args: argparse.Namespace) -> str:
    return sha256(json.dumps(_settings(args), sort_keys=True).encode()).hexdigest()


def _earlier(args: argparse.Namespace) -> dict[str, Any] | None:
    """The content of an existing --json file if it is of this very run; another one is refused, with what differs."""
    if not args.json or args.overwrite or not args.json.exists():
        return None
    do = "name another file, or give --overwrite"
    try:
        old = json.loads(args.json.read_text())
        settings, raw, levels = old["settings"], old["raw"], old["levels"]
        if not isinstance(settings, dict) or not isinstance(raw, str) or not all(isinstance(x, dict) for x in levels):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError):
        raise BadInput(
            "a --json file that does not exist, or is an earlier run's", f"{args.json} is neither", do
        ) from None
    now = _settings(args)
    other = [
        f"{k}: {settings.get(k)!r} there, {now.get(k)!r} now" for k in sorted(now) if settings.get(k) != now.get(k)
    ]
    if other:
        found = f"{args.json} is of a run with other options ({'; '.join(other[:4])})"
        raise BadInput("a --json file of the same run, to continue it", found, do)
    # A level that ended because the server was gone says nothing about its load: it is measured again.
    return {"raw": raw, "levels": [x for x in levels if "key" in x and x.get("stopped") != "server_gone"]}


def _limits(args: argparse.Namespace) -> dict[str, float]:
    """--slo as the keys of metrics.goodput."""
    if not args.slo:
        if args.search:
            raise BadInput("--slo with --search", "none", "for instance --slo ttft=1,tpot=0.05")
        return {}
    names = {"ttft": "ttft_s", "tpot": "token_latency_s", "e2e": "e2e_s"}
    made = {}
    for part in args.slo.split(","):
        key, _, value = part.strip().partition("=")
        try:
            made[names[key]] = float(value)
        except (KeyError, ValueError):
            raise BadInput("--slo as ttft=SECONDS,tpot=SECONDS,e2e=SECONDS (any of them)", repr(args.slo)) from None
        if not 0 < made[names[key]] < 1e6:
            raise BadInput("--slo with positive seconds", repr(args.slo))
    return made


RATES = ("tok/s", "steady", "tok/s/req")
#: Columns whose interval is printed below the row: name, metric, factor.
WITH_ENDS = (
    ("tok/s", "output_tokens_per_s", 1.0), ("steady", "steady_output_tokens_per_s", 1.0),
    ("tok/s/req", "request_output_tokens_per_s_mean", 1.0), ("TTFT p50", "ttft_s_p50", 1e3), ("p99 ms", "ttft_s_p99", 1e3),
    ("gap p50", "chunk_gap_s_p50", 1e3), ("p99 ms", "chunk_gap_s_p99", 1e3), ("tok p50 ms", "token_latency_s_p50", 1e3),
)  # fmt: skip
COLUMNS = (*RATES, "TTFT p50", "p99 ms", "gap p50", "p99 ms", "tok p50 ms", "tokens", "wall s", "ok")


def _levels(args: argparse.Namespace) -> list[tuple[str, float]]:
    given = [n for n in ("concurrency", "rate", "trace") if getattr(args, n)]
    if len(given) != 1:
        raise BadInput(
            "one of --concurrency, --rate and --trace", " and ".join(f"--{n}" for n in given) or "none of them"
        )
    name = "replay" if given[0] == "trace" else given[0]
    option = "time-scale" if name == "replay" else name
    text = args.time_scale if name == "replay" else getattr(args, name)
    try:
        values = [float(x) for x in text.split(",") if x.strip()]
    except ValueError:
        values = []
    whole = name != "concurrency" or all(v.is_integer() for v in values)
    if not values or not whole or any(not 0 < v < 1e6 for v in values):
        raise BadInput(f"--{option} as positive numbers with commas between, for instance 1,4,16", repr(text))
    if len(set(values)) != len(values):
        raise BadInput(f"--{option} with different levels", repr(text), "use --repeats to measure a level again")
    least = {"num_requests": 1, "input_len": 1, "output_len": 1, "warmup": 0, "workers": 1, "turns": 1, "repeats": 1}
    least |= {"limit": 1, "max_context": 1}
    for option, low in least.items():
        number = getattr(args, option)
        if number is not None and number < low:
            raise BadInput(f"--{option.replace('_', '-')} of at least {low}", str(number))
    for option in (
        "ramp",
        "ramp_from",
        "think_time",
        "gap_timeout",
        "first_timeout",
        "max_seconds",
        "search",
        "find_knee",
    ):
        number = getattr(args, option)
        if number is not None and not 0 <= number < 1e6:
            raise BadInput(f"--{option.replace('_', '-')} as a number from 0 on", str(number))
    if args.gap_timeout == 0 or args.first_timeout == 0 or args.max_seconds == 0:
        raise BadInput("timeouts and --max-seconds above 0", "0")
    if not 0 < args.good_frac <= 1:
        raise BadInput("--good-frac above 0 and at most 1", str(args.good_frac))
    if args.search is not None:
        if len(values) != 1 or name == "replay" or args.repeats > 1 or args.versus:
            raise BadInput(
                "--search with one --concurrency or --rate to begin at, without --repeats and --versus", repr(text)
            )
        if args.search < values[0]:
            raise BadInput(f"--search of at least the load it begins at, {values[0]:g}", f"{args.search:g}")
    if args.find_knee is not None:
        if len(values) != 1 or name == "replay" or args.repeats > 1 or args.versus or args.search:
            raise BadInput(
                "--find-knee with one --concurrency or --rate, without --repeats, --versus and --search", repr(text)
            )
        if args.find_knee < values[0]:
            raise BadInput(f"--find-knee of at least the load it begins at, {values[0]:g}", f"{args.find_knee:g}")
    return [(name, v) for v in values]


def _served_model(base_url: str, api_key_env: str | None, ca_file: Path | None = None) -> str:
    """The name that /v1/models gives; it also tells a dead server or a wrong URL before any load is sent."""
    headers = {}
    if api_key_env:
        if not os.environ.get(api_key_env):
            raise BadInput(f"the environment variable {api_key_env} with the API key", "not set")
        headers["Authorization"] = f"Bearer {os.environ[api_key_env]}"
    url = f"{base_url.rstrip('/')}/v1/models"
    do = "check the URL and that the server is ready"
    if ca_file and not ca_file.is_file():
        raise BadInput("--ca-file as a file of certificates", str(ca_file))
    answer = get_bounded(url, headers=headers, ca_file=ca_file)
    if answer.problem and "certificate" in answer.problem:
        do = "give the server's certificate, or its CA's, with --ca-file FILE"
        raise ServerError(f"a certificate of {base_url} that can be trusted", answer.problem, do)
    if answer.problem:
        raise ServerError(f"a server at {base_url}", answer.problem, do)
    if answer.status in (401, 403):
        raise ServerError(f"access to {url}", f"HTTP {answer.status}", "give --api-key-env NAME")
    try:
        names = [m["id"] for m in answer.json()["data"]] if answer.status == 200 else []
    except (ValueError, KeyError, TypeError):
        names = []
    if not names:
        shown = redact_text(answer.text[:4096])[:80]
        raise ServerError(f"model names from {url}", f"HTTP {answer.status}, {shown!r}", do)
    return str(names[0])


def _workload(args: argparse.Namespace, number: int, value: float, kind: str) -> Workload:
    how: dict[str, Any] = {"seed": args.seed * 1000 + number, "warmup": args.warmup, "ignore_eos": not args.stop_at_eos}
    if kind == "replay":
        return workloads.trace_file(
            args.trace,
            time_scale=value,
            limit=args.limit,
            vocab_size=args.vocab_size,
            **how | {"seed": args.seed * 1000},
        )
    count = args.num_requests or (workloads.requests_per_level(int(value)) if args.concurrency else 64)
    if args.dataset == "random-ids":
        return workloads.random_ids(count, args.input_len, args.output_len, vocab_size=args.vocab_size, **how)
    if args.dataset == "code":
        return workloads.code_text(count, args.input_len, args.output_len, **how)
    if args.dataset == "repeating":
        return workloads.repeating_text(count, args.input_len, args.output_len, **how)
    if args.dataset == "chat":
        return workloads.chat_tasks(count, args.output_len, **how)
    if args.dataset == "shared-prefix":
        tail = max(1, args.input_len // 8)
        return workloads.shared_prefix(count, args.input_len - tail or 1, tail, args.output_len, **how)
    if args.dataset == "agentic":
        return workloads.agentic_sessions(
            count, args.turns, args.output_len, first_len=args.input_len, think_s=args.think_time,
            max_context=args.max_context, scripted=args.scripted, chat=args.api == "chat", **how,
        )  # fmt: skip
    path = Path(args.dataset)
    if path.suffix not in (".txt", ".jsonl", ".json", ".md", ".py") and not path.exists():
        raise BadInput(f"--dataset as one of {', '.join(DATASETS)}, or a file", repr(args.dataset))
    if path.suffix in (".jsonl", ".json"):
        if args.multi_turn:
            return workloads.chat_sessions_file(path, count, args.output_len, think_s=args.think_time, **how)
        return workloads.jsonl_file(path, count, args.output_len, **how)
    return workloads.text_file(path, count, args.input_len, args.output_len, **how)


def _shown(calibration: dict[str, Any]) -> str:
    if "ttft_p50_shown_true_s" not in calibration:
        return ""
    ttft, gap = calibration["ttft_p50_shown_true_s"], calibration["gap_p99_shown_true_s"]
    return (
        f"; TTFT p50 shown {ttft[0] * 1e3:.1f} ms, true {ttft[1] * 1e3:.1f}; gap p99 shown {gap[0] * 1e3:.1f}, "
        f"true {gap[1] * 1e3:.1f}; {calibration['chunks_per_s']:.0f} chunks/s; share {calibration['share']:.3f}"
    )


def _row(*cells: str) -> str:
    return "".join(f"{c:>11}" for c in cells)


def _figure(measured: Measured, scale: float = 1.0, digits: int = 1) -> str:
    value = measured.value
    return f"{value * scale:.{digits}f}" if isinstance(value, (int, float)) else "-"


def _ends(name: str, measured: Measured, scale: float) -> str:
    if measured.low is None or measured.high is None:
        return f"{name}: none ({measured.reason}, n = {measured.n})"
    return f"{name} {measured.low * scale:.4g} to {measured.high * scale:.4g} (n = {measured.n})"


def _line(label: str, s: dict[str, Measured]) -> str:
    milli = [
        _figure(s[k], 1e3, 2)
        for k in ("ttft_s_p50", "ttft_s_p99", "chunk_gap_s_p50", "chunk_gap_s_p99", "token_latency_s_p50")
    ]
    whole = [_figure(s["output_tokens"], 1, 0), _figure(s["wall_s"], 1, 2), _figure(s["requests_ok"], 1, 0)]
    keys = ("output_tokens_per_s", "steady_output_tokens_per_s", "request_output_tokens_per_s_mean")
    rates = [_figure(s[k]) for k in keys]
    return _row(label, *rates, *milli, *whole)


def _notes(level: metrics.Level, summary: dict[str, Measured], failed: dict[str, int], ramp: bool = False) -> list[str]:
    notes = []
    ends = [_ends(name, summary[key], scale) for name, key, scale in WITH_ENDS if summary[key].value is not None]
    if ends:
        notes.append("95% intervals: " + "; ".join(ends))
    if summary["client"].value != "ok":
        notes.append(f"{summary['client'].value}: {summary['client'].reason}")
    if failed:
        notes.append("failed: " + ", ".join(f"{n} {cause}" for cause, n in failed.items()))
        first = next((r["detail"] for r in level.requests if r["failure"] and r["detail"]), None)
        if first:
            notes.append(f"first: {first[:160]}")
    if clocks := level.header["client"].get("clocks"):
        bound, most = 1e3 * clocks["skew_bound_s"], 1e3 * clocks["max_skew_s"]
        notes.append(
            f"from {len(clocks['machines'])} machines whose clocks are told within {bound:.3f} ms of each other (limit {most:g} ms)"
        )
    unsent = level.header["planned"] - level.header["sent"]
    if unsent:
        after = level.header.get("unsent_after_failed_turn") or 0
        why = [f"{after} after a failed turn of their session"] if after else []
        if unsent > after:
            why.append(f"{unsent - after}: {level.header['stopped']}")
        notes.append(f"{unsent} never sent ({'; '.join(why)})")
    view = level.view
    if not isinstance(view.steady, str) and view.wall_s:
        begin, end = ((x - view.start_ns) / 1e9 for x in view.steady)
        notes.append(f"steady state from {begin:.2f} to {end:.2f} of {view.wall_s:.2f} s (ramp and drain cut off)")
    for key in ("steady_output_tokens_per_s", "token_latency_s_p50"):
        if summary[key].value is None and not failed and summary["client"].value != "client_bound":
            hint = " (--token-counts)" if key.startswith("token") else ""
            notes.append(f"no {key}: {summary[key].reason}{hint}")
    achieved = summary["achieved_of_offered"]
    if isinstance(achieved.value, (int, float)):
        notes.append(f"sent at {achieved.value:.3f} of the offered rate")
    liars = summary["usage_below_events"].value
    if liars:
        notes.append(
            f"in {liars} request(s) the server counts fewer tokens than it sent events: tok/s is not to be believed"
        )
    cached = summary["cached_tokens"].value
    if isinstance(cached, int) and cached:
        notes.append(f"{cached} of {summary['input_tokens'].value} prompt tokens came from the prefix cache")
    return notes


def _turn_notes(turns: list[dict[str, Any]]) -> Iterator[str]:
    if len(turns) < 2:
        return
    for row in turns:
        cached, reuse, ttft = row["cached_frac"], row["prefix_reuse_frac"], row["ttft_s_p50"]
        yield (
            f"turn {row['turn']}: {row['ok']} of {row['sent']} ok, prompt {_figure(row['prompt_tokens_mean'], 1, 0)} tokens, "
            f"cached {_percent(cached)}, reused {_percent(reuse)}, TTFT p50 {_figure(ttft, 1e3, 1)} ms"
        )


def _server_notes(beside: list[dict[str, Any]]) -> Iterator[str]:
    known = [r for r in beside if isinstance(r["server"].value, (int, float))]
    if not known:
        yield f"no server-side counters: {beside[0]['server'].reason}"
    for row in known:
        off = row["difference"].value
        if row["client"].unit == "s":
            server, mine = row["server"].value * 1e3, row["client"].value
            if isinstance(mine, (int, float)):
                yield f"server: {row['what']} {server:.1f} ms, here {mine * 1e3:.1f} ms ({row['explanation'] or 'alike'})"
        elif off:
            yield f"server: {row['what']} {row['server'].value}, here {row['client'].value} ({row['explanation']})"


def _percent(measured: Measured) -> str:
    if not isinstance(measured.value, (int, float)):
        return f"- ({measured.reason})"
    known = measured.low is not None and measured.high is not None
    ends = f" ({measured.low:.0%} to {measured.high:.0%}, n = {measured.n})" if known else f" (n = {measured.n})"
    return f"{measured.value:.1%}{ends}"


def _worded(figure: dict[str, Any]) -> str:
    if figure.get("value") is None:
        return f"- ({figure.get('reason')})"
    if figure.get("low") is None:
        return f"{figure['value']:.4g} ({figure.get('reason')})"
    return f"{figure['value']:.4g} ({figure['low']:.4g} to {figure['high']:.4g}, n = {figure['n']})"


def _end(load: float | None) -> str:
    return "an end not found" if load is None else f"{load:g}"


def _dumped(measured: Measured) -> dict[str, Any]:
    return measured.model_dump(exclude_none=True)


def _plain(content: Any) -> Any:
    """Records inside lists and dictionaries as JSON takes them."""
    if isinstance(content, Measured):
        return _dumped(content)
    if isinstance(content, search.Probe):
        return content.model_dump(exclude_none=True)
    if isinstance(content, dict):
        return {k: _plain(v) for k, v in content.items()}
    return [_plain(v) for v in content] if isinstance(content, (list, tuple)) else content
