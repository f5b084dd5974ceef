"""How fast `workbook history` opens over many runs, and what its index costs. Not a test: it measures.

    python benchmarks/index_scale.py [--runs 100000] [--profiles 1000] [--verdicts 10] [--folder FOLDER] [--keep]

It makes an outputs folder with that many run folders, each with a result.json and a 03.result.json as a run writes them
(values and intervals at random, one text), then measures
  first look   the index made from nothing but those files, which is also the time that a history without an index takes;
  open         the command as a person types it, in a new process, best of three: latest 30 runs of one profile, and of all.
Target: a history over 100,000 results opens in less than 2 s.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lib.records import Evidence, Measured, NotebookResult, NotebookState, Provenance, RunResult, Status, Verdict
from lib.report import history

ROOT = Path(__file__).resolve().parents[1]
AT = "2026-01-01T{:02}:{:02}:{:02}+00:00"


def texts(number: int, verdicts: int) -> tuple[str, str]:
    """result.json and 03.result.json of run `number`."""
    generator = random.Random(number)
    at = AT.format(number // 3600 % 24, number // 60 % 60, number % 60)
    found = []
    for place in range(verdicts):
        value = 1000 * generator.random()
        measured = Measured(value=value, low=0.98 * value, high=1.02 * value, unit="tok/s", n=64)
        found.append(
            Verdict(
                id=f"output-tokens-{place}",
                claim=f"Level {place} gives the output tokens per second that the roofline leaves room for.",
                status=generator.choice([Status.PASS, Status.PASS, Status.FAIL, Status.INCONCLUSIVE]),
                measured=measured,
                limit="at least 500 tok/s",
                reason="The interval lies where it lies.",
                evidence=[Evidence(path=f"raw/03/levels/C{place}/level.jsonl", line=1)],
                launch_ids=["20260101-000000-ab12"],
            )
        )
    provenance = Provenance(
        commit="0" * 40, dirty=False, workbook_version="0.1.0", python="3.11.2", packages_sha256="0" * 64,
        params_sha256="0" * 64, params={"profile": "made", "concurrency": [1, 4, 16]}, host={"cpu": "made", "gpus": []},
    )  # fmt: skip
    name = f"{number:08}"
    result = NotebookResult(
        notebook="03", title="Benchmark", question="How fast?", run_id=name, profile="made", started=at, ended=at,
        seconds=61.0, server_seconds=58.0, provenance=provenance, servers=[], predictions=[], trials=[], verdicts=found,
        recommendation="None.", skipped=[],
    )  # fmt: skip
    state = NotebookState(notebook="03", state="done", result="03.result.json", seconds=61.0)
    run = RunResult(
        run_id=name, profile="made", started=at, ended=at, seconds=61.0, server_seconds=58.0, state="done",
        selected=["03"], notebooks=[state],
    )  # fmt: skip
    return run.model_dump_json(indent=1), result.model_dump_json(indent=1)


def make(root: Path, runs: int, profiles: int, verdicts: int) -> int:
    """Write the run folders; returns their bytes."""
    size = 0
    for number in range(runs):
        folder = root / f"p{number % profiles:04}" / f"{number:08}"
        folder.mkdir(parents=True)
        run, result = texts(number, verdicts)
        (folder / "result.json").write_text(run)
        (folder / "03.result.json").write_text(result)
        size += len(run) + len(result)
    return size


def opened_s(root: Path, *arguments: str) -> float:
    """Seconds of the command, the best of three new processes."""
    environment = {**os.environ, "WORKBOOK_OUTPUTS": str(root), "PYTHONPATH": str(ROOT)}
    best = 1e9
    for _ in range(3):
        began = time.perf_counter()
        argv = [sys.executable, "-m", "lib.cli", "history", *arguments]
        done = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True)
        best = min(best, time.perf_counter() - began)
        assert done.returncode == 0, done.stderr
    return best


def main() -> None:
    """Measure, print one JSON line and the same in words."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--profiles", type=int, default=1_000)
    parser.add_argument("--verdicts", type=int, default=10)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--keep", action="store_true")
    asked = parser.parse_args()
    root = asked.folder or Path(tempfile.mkdtemp(prefix="index-scale-"))
    began = time.perf_counter()
    size = make(root, asked.runs, asked.profiles, asked.verdicts)
    made_s = time.perf_counter() - began
    began = time.perf_counter()
    with history.opened(root) as connection:
        assert history.refresh(connection, root) == asked.runs
    first_s = time.perf_counter() - began
    empty = Path(tempfile.mkdtemp(prefix="index-none-"))
    numbers = {
        "runs": asked.runs,
        "results": asked.runs * asked.verdicts,
        "files_bytes": size,
        "make_s": round(made_s, 1),
        "index_bytes": (root / history.INDEX).stat().st_size,
        "first_look_s": round(first_s, 1),
        "open_nothing_s": round(opened_s(empty), 3),
        "open_profile_s": round(opened_s(root, "p0007"), 3),
        "open_all_s": round(opened_s(root), 3),
        "load_average": os.getloadavg()[0],
    }
    print(json.dumps(numbers))
    ratio = first_s / numbers["open_all_s"]
    print(
        f"{asked.runs} runs, {numbers['results']} results: opens in {numbers['open_profile_s']} s (one profile) and "
        f"{numbers['open_all_s']} s (all), of which {numbers['open_nothing_s']} s are the command itself; reading the "
        f"files instead takes {first_s:.0f} s, {ratio:.0f} times as long ({1000 * first_s / asked.runs:.2f} ms a run)."
    )
    shutil.rmtree(empty)
    if not asked.keep:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
