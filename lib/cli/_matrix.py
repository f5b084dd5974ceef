"""`workbook run --matrix`: the cells of a matrix through an engine, with a view, an exit code and JUnit XML over all of them."""

from __future__ import annotations

import argparse
import importlib
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from lib.batch.engine import ENGINES, Engine
from lib.batch.files import read_matrix
from lib.batch.outputs import RunFiles
from lib.batch.resume import CellPlan
from lib.batch.session import Session
from lib.batch.snapshot import Snapshot, lines
from lib.cli._input import printable, writing
from lib.cli._outputs import say_if_over_budget
from lib.errors import BadInput
from lib.hosts import local
from lib.params import NOTEBOOKS
from lib.records import Status
from lib.results import outputs_root

FAILED = (Status.FAIL, Status.INVALID, Status.ERROR)


def run_matrix(args: argparse.Namespace) -> int:
    """Plans and runs; see the exit codes of `workbook run`."""
    numbers = None if args.only is None else _numbers(args.only)
    name, cells, left_out = read_matrix(args.matrix, numbers)
    engine = _engine(args)
    try:
        session = Session(name, cells, left_out, engine, args.outputs or str(outputs_root()))
        with session.locked():
            plans = session.plan()
            _say_plan(name, plans, {one.id: one.why for one in left_out}, args.plan)
            if args.plan:
                return 0
            view = Screen() if args.watch else Log()
            try:
                runs = session.run(view.show)
            except KeyboardInterrupt:
                view.close()
                again = f"{sys.argv[0]} run --matrix {args.matrix}"
                print(f"workbook: interrupted; what is done is kept. Continue with: {again}", file=sys.stderr)
                return 130
            finally:
                view.close()
        return _report(args, name, session, runs)
    finally:
        engine.close()


def _numbers(only: str) -> list[str]:
    found = [number.strip().zfill(2) for number in only.split(",")]
    if unknown := [number for number in found if number not in NOTEBOOKS]:
        raise BadInput(f"--only takes numbers of notebooks ({', '.join(NOTEBOOKS)})", ", ".join(unknown))
    return found


def _engine(args: argparse.Namespace) -> Engine:
    if args.engine == "local":
        from lib.batch.local_engine import LocalEngine

        return LocalEngine()
    made: Engine = importlib.import_module(ENGINES[args.engine]).make_engine(args)
    return made


def _say_plan(name: str, plans: Sequence[CellPlan], left_out: dict[str, str], everything: bool) -> None:
    todo = sum(len(plan.todo) for plan in plans)
    kept = sum(len(plan.kept) + len(plan.taken) for plan in plans)
    out = sys.stdout if everything else sys.stderr
    print(f"{name}: {len(plans)} cells, {todo + kept} tasks: {kept} done before, {todo} to do", file=out)
    if everything:
        for plan in plans:
            for task in plan.todo:
                print(f"  {plan.cell.id} {task.number}: {plan.why[task.number]}")
        for cell, why in left_out.items():
            print(f"  left out: {cell}: {printable(why)}")


def _report(args: argparse.Namespace, name: str, session: Session, runs: Sequence[RunFiles]) -> int:
    failed = [(run, number, state) for run in runs for number, state in run.states.items() if _bad(run, number)]
    for run, number, state in failed:
        why = printable((state.error or state.state).splitlines()[0])
        print(f"workbook: {run.cell.id} {number} {state.state.replace('_', ' ')}: {why}", file=sys.stderr)
    results = [run.results() for run in runs] if args.junit or args.strict else []
    if args.junit:
        from lib.report.junit import matrix_xml

        left_out = {one.id: one.why for one in session.left_out}
        with writing("--junit", args.junit):
            made = [(run.index("done"), found) for run, found in zip(runs, results, strict=True)]
            local.write_atomic(Path(args.junit), matrix_xml(name, made, left_out, NOTEBOOKS))
    for run in runs:
        print(f"report: {run.folder / 'index.html'}")
    if session.outputs != str(session.here):
        print(f"outputs: {session.outputs}")
    say_if_over_budget()
    if failed:
        return 1
    no = any(verdict.status in FAILED for found in results for result in found.values() for verdict in result.verdicts)
    return 3 if args.strict and no else 0


def _bad(run: RunFiles, number: str) -> bool:
    return number in run.cell.params and run.states[number].state != "done"


class Log:
    """One line for each task that begins or ends."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str], str] = {}
        self.first = True

    def show(self, made: Snapshot) -> None:
        """Says what changed since the last one."""
        tasks = [(cell, task) for cell in made.cells for task in cell.tasks]
        done = sum(task.state not in ("waiting", "running") for _, task in tasks)
        for cell, task in tasks:
            before = self.seen.get((cell.id, task.number))
            self.seen[cell.id, task.number] = task.state
            if before == task.state or task.state in ("waiting", "kept") or (self.first and task.state != "running"):
                continue
            took = "" if task.seconds is None else f" {task.seconds:.0f} s"
            print(f"[{done}/{len(tasks)}] {cell.id} {task.number} {task.state}{took}", file=sys.stderr, flush=True)
        self.first = False

    def close(self) -> None:
        """Nothing is held."""


class Screen:
    """The whole matrix, drawn again in place on a terminal; elsewhere as Log."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.log = None if self.stream.isatty() else Log()
        self.rows = 0

    def show(self, made: Snapshot) -> None:
        """Draws the matrix over what was drawn before."""
        if self.log is not None:
            self.log.show(made)
            return
        size = shutil.get_terminal_size((100, 24))
        text = [printable(line) for line in lines(made, time.time(), size.columns - 1, size.lines - 1)]
        up = f"\x1b[{self.rows}A" if self.rows else ""
        body = "".join(f"{line}\x1b[K\n" for line in text)
        self.stream.write(f"{up}{body}\x1b[J")
        self.stream.flush()
        self.rows = len(text)

    def close(self) -> None:
        """Leaves the last drawing."""
        self.rows = 0
