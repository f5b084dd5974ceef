"""Sweeps with the stand-in for SGLang: a profile folder, a run in this process, and what it left."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from lib.load import metrics
from lib.params import ROOT, SweepParams
from lib.results import NotebookRun
from lib.server import sweep

STANDIN = ROOT / "tests" / "server" / "standin.py"
REFERENCE = {"id": "ref", "flags": {"attention_backend": "torch_native"}}


def candidate(mode: str, backend: str = "triton", **more: Any) -> dict[str, Any]:
    """A trial in which the stand-in behaves as `mode` says; its id is the mode."""
    environment = {"SGLANG_STANDIN": mode} if mode else {}
    return {"id": mode or backend, "flags": {"attention_backend": backend}, "environment": environment, **more}


class Place:
    """A profile with the stand-in and one run's folder; `open()` is what a notebook's first cell does."""

    def __init__(self, folder: Path, candidates: Sequence[Mapping[str, Any]], **params: Any) -> None:
        self.profile, self.folder = folder / "profile", folder / "run"
        model = folder / "model"
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps({"architectures": ["Standin"], "model_type": "standin"}))
        self.profile.mkdir(exist_ok=True)
        self.profile_yaml: dict[str, Any] = {
            "title": "a stand-in",
            "server": {
                "model": str(model), "python": str(STANDIN), "ready_timeout_s": 60, "stop_timeout_s": 3,
                "flags": {"device": "cpu"},
            },
            "known_answer": {"expect": " Paris", "max_new_tokens": 6},
        }  # fmt: skip
        self.params: dict[str, Any] = {
            "profile": str(self.profile), "reference": "ref", "candidates": [REFERENCE, *candidates], "verify": "all",
            "text_tokens": 64, "load_rounds": 1, "load_concurrency": 4, "speed_repeats": 0, "answer_timeout_s": 3.0,
            **params,
        }  # fmt: skip

    def open(self, offline: bool = False) -> NotebookRun:
        (self.profile / "profile.yaml").write_text(yaml.safe_dump(self.profile_yaml))
        self.folder.mkdir(exist_ok=True)
        return NotebookRun("02", SweepParams.model_validate(self.params), self.folder, offline)

    def sweep(self, offline: bool = False) -> sweep.Sweep:
        """A session from its opening to its end; an interrupt leaves it as the kernel's end does."""
        run = self.open(offline)
        try:
            return sweep.run_sweep(run)
        finally:
            run.close()

    def launches(self, name: str | None = None) -> list[dict[str, Any]]:
        """Every launch record of the run, oldest first."""
        records = [json.loads(f.read_text()) for f in self.folder.glob("raw/02/servers/*/launch.json")]
        chosen = [r for r in records if name in (None, r["name"])]
        return sorted(chosen, key=lambda r: r["started_at"])

    def finished(self, name: str) -> dict[str, Any]:
        return dict(json.loads((self.folder / "raw/02" / name / "finished.json").read_text()))


def no_calibration(folder: Path, streams: int, api: str) -> None:
    """In place of the client's calibration, which takes seconds."""
    (folder / "calibration.json").write_text(json.dumps({"status": "not_calibrated", "reasons": ["left out"]}))


def any_client(patch: pytest.MonkeyPatch) -> None:
    """Takes any speed, however late the client was: for tests of something else, on a machine that others load."""
    for name in ("LAG_P50_FLOOR_S", "LAG_P99_FLOOR_S", "CPU_FRAC_LIMIT"):
        patch.setattr(metrics, name, 10.0)


def outcomes_of(done: sweep.Sweep) -> dict[str, str]:
    return {t.id: t.outcome for t in sweep.outcome_rows(done)}


def interrupted(run: Callable[[], object]) -> bool:
    """Whether a session ended by an interrupt."""
    try:
        run()
    except KeyboardInterrupt:
        return True
    return False
