"""A sweep that is cut short, at every boundary and inside: no trial is lost, none that is done runs twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lib.hosts import local
from lib.params import ROOT
from lib.results import NotebookRun
from lib.runner import wait_servers_gone
from lib.server import sweep
from tests.server.sweeping import Place, any_client, candidate, interrupted, no_calibration, outcomes_of

TRIALS = [candidate("", "a") | {"id": "a"}, candidate("off"), candidate("", "flashinfer")]
OUTCOMES = {"ref": "works", "a": "silently_ignored", "off": "numerically_off", "flashinfer": "unsupported_here"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "cache"))
    any_client(monkeypatch)


def one_launch_each(place: Place, outcomes: dict[str, str] = OUTCOMES) -> None:
    """Each finished trial stands on one launch, its last one, and every one of its records is of that launch."""
    for name in outcomes:
        launch = place.finished(name)["launch_id"]
        assert place.launches(name)[-1]["launch_id"] == launch
        for stamp in (place.folder / "raw/02" / name).glob("*/stamp.json"):
            assert json.loads(stamp.read_text())["launch_id"] == launch, stamp


def test_an_interrupt_after_every_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four sessions that each end by Ctrl-C after one trial, and one that finds nothing to do: four launches."""
    place = Place(tmp_path, TRIALS)
    group = sweep._run_group

    def then_ctrl_c(*arguments: Any) -> None:
        group(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "_run_group", then_ctrl_c)
    for done in range(1, 5):
        assert interrupted(place.sweep) and len(place.launches()) == done
    assert outcomes_of(place.sweep()) == OUTCOMES
    assert [r["name"] for r in place.launches()] == ["ref", "a", "flashinfer", "off"]  # two changes come after one
    one_launch_each(place)
    # another boot of the same machine changes nothing: all state is on disk, and no key holds the boot
    monkeypatch.setattr(local, "boot_id", lambda: "another")
    assert outcomes_of(place.sweep()) == OUTCOMES and len(place.launches()) == 4


INSIDE = ("before the launch", "answer", "scores", "decode", "load", "speed-1", "before it is done")


def test_an_interrupt_at_every_place_inside_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven sessions that end inside the second trial: the first is never repeated, the second starts anew each time."""
    outcomes = {"ref": "works", "a": "silently_ignored"}
    place = Place(tmp_path, TRIALS[:1], speed_repeats=1, speed_concurrency=2, speed_output_len=4)
    monkeypatch.setattr(sweep, "take_calibration", no_calibration)
    at: list[str] = []

    def stopping(real: Callable[..., Any], name_of: Callable[..., str]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **more: Any) -> Any:
            if at and name_of(*arguments) == at[0]:
                at.clear()
                raise KeyboardInterrupt
            return real(*arguments, **more)

        return wrapped

    def named(run: NotebookRun, name: str, *_: Any) -> str:
        return name.removeprefix("a/") if name.startswith("a/") else ""

    monkeypatch.setattr(NotebookRun, "measure", stopping(NotebookRun.measure, named))
    launch = sweep._launch_and_question
    monkeypatch.setattr(
        sweep,
        "_launch_and_question",
        stopping(launch, lambda _r, _p, t, _h: "before the launch" if t.id == "a" else ""),
    )
    files = sweep.kernel_files
    calls: list[int] = []

    def counted(folder: str | None) -> int:
        calls.append(1)
        if at == ["before it is done"] and len(calls) == 2:
            at.clear()
            raise KeyboardInterrupt
        return files(folder)

    group = sweep._run_group
    # the first session does the reference alone
    with monkeypatch.context() as patch:
        patch.setattr(sweep, "_run_group", lambda *x: (group(*x), (_ for _ in ()).throw(KeyboardInterrupt))[0])
        assert interrupted(place.sweep)
    monkeypatch.setattr(sweep, "kernel_files", counted)
    for place_inside in INSIDE:
        at[:] = [place_inside]
        calls.clear()
        assert interrupted(place.sweep), place_inside
        assert not (place.folder / "raw/02/a/finished.json").exists()
        assert all(r["stop"] for r in place.launches()), place_inside  # the interrupt left no server
    assert outcomes_of(place.sweep()) == outcomes
    names = [r["name"] for r in place.launches()]
    # "before the launch" launches nothing: six cut short and the one that counts
    assert {n: names.count(n) for n in outcomes} == {"ref": 1, "a": len(INSIDE)}
    assert len(list((place.folder / "raw/02").glob("a.earlier-*"))) >= len(INSIDE) - 2  # what they left is kept
    one_launch_each(place, outcomes)


PROGRAM = """
import os, pickle, sys
from pathlib import Path
from tests.runs.test_sweep_resume import TRIALS
from tests.server.sweeping import Place
Place(Path(sys.argv[1]), TRIALS).sweep()
"""


def test_a_killed_process_loses_nothing_and_leaves_no_server(tmp_path: Path) -> None:
    """SIGKILL inside the fourth trial: its server ends by itself, the first three are not repeated."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=ROOT, env=environment)
    place = Place(tmp_path, TRIALS)
    end = time.monotonic() + 90
    while not place.launches("off") and time.monotonic() < end and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert [r["name"] for r in place.launches()] == ["ref", "a", "flashinfer", "off"]
    assert wait_servers_gone(place.folder, 15) == []
    assert outcomes_of(place.sweep()) == OUTCOMES
    names = [r["name"] for r in place.launches()]
    assert {n: names.count(n) for n in OUTCOMES} == {"ref": 1, "a": 1, "off": 2, "flashinfer": 1}
    one_launch_each(place)


def test_a_changed_trial_is_run_again_and_the_others_are_not(tmp_path: Path) -> None:
    """A trial counts as done for the launch that it was; other flags under the same id are another launch."""
    place = Place(tmp_path, TRIALS[:1])
    place.sweep()
    place.params["candidates"][1]["flags"] = {"attention_backend": "b"}
    place.sweep()
    assert [r["name"] for r in place.launches()] == ["ref", "a", "a"]
    assert len(list((place.folder / "raw/02").glob("a.earlier-*"))) == 1
