"""Plays notebook 04's own cells, in this process, against the stand-in server (tests/server/standin_sglang.py)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml

from lib import results
from lib.load.metrics import ClientVerdict
from lib.params import ROOT
from lib.records import NotebookResult, Verdict
from lib.server import arms, spec_analysis
from tests.model.checkpoint_files import TINY_HYBRID, safetensors_bytes

STANDIN = Path(__file__).resolve().parents[1] / "server" / "standin_sglang.py"
CHAIN = {
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}


def make_profile(folder: Path, standin: dict[str, Any], environment: dict[str, str] | None = None) -> Path:
    """A profile whose interpreter is the stand-in: it claims to be SGLang 0.5.16 with a tiny hybrid model."""
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model"
    model.mkdir(exist_ok=True)
    config = json.loads(json.dumps(TINY_HYBRID))
    config["text_config"]["vocab_size"] = 4096
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").write_bytes(safetensors_bytes({"lm_head.weight": ("BF16", [4, 2], bytes(16))}))
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -u "{STANDIN}" "$@"\n')
    python.chmod(0o755)
    profile = {
        "title": "a stand-in",
        "server": {
            "model": str(model),
            "python": str(python),
            "flags": {},
            "environment": {"STANDIN": json.dumps(standin), **(environment or {})},
            "ready_timeout_s": 60,
            "stop_timeout_s": 5,
        },
        "known_answer": {"expect": None},
    }
    (folder / "profile.yaml").write_text(yaml.safe_dump(profile))
    return folder


def small(profile: Path, **changes: Any) -> dict[str, Any]:
    """Parameters of a short experiment: one text, one request at a time, two launches of each arm."""
    return {
        "profile": str(profile),
        "flags": CHAIN,
        "texts": ["repeating"],
        "concurrency": [1],
        "num_requests": 3,
        "input_len": 24,
        "output_len": 24,
        "answers": 2,
        "samples": 0,
        "long_run_requests": 0,
        "recorded": None,
        "published": None,
        **changes,
    }


def play(
    run_folder: Path, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch, offline: bool = False
) -> NotebookResult:
    """Runs the notebook's code cells in order with these parameters; the result that it wrote."""
    monkeypatch.setenv("WORKBOOK_RUN_DIR", str(run_folder))
    monkeypatch.setenv("WORKBOOK_OFFLINE", "1" if offline else "0")
    monkeypatch.setattr(results, "OPEN", [])
    notebook = nbformat.read(ROOT / "notebooks/04_speculative_nextn.ipynb", 4)
    namespace: dict[str, Any] = {}
    try:
        for cell in notebook.cells:
            if cell.cell_type == "code":
                exec(compile(cell.source, cell["id"], "exec"), namespace)
                if "parameters" in cell.metadata.get("tags", []):
                    namespace.update(params)
    finally:
        for run in results.OPEN:
            run.close()
    return NotebookResult.model_validate_json((run_folder / "04.result.json").read_text())


def verdict(result: NotebookResult, id_: str) -> Verdict:
    return next(v for v in result.verdicts if v.id == id_)


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., NotebookResult]:
    """`quick(standin, **params)`: a short experiment; the client's own checks (which tests/load has) are taken as passed."""
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(arms, "take_calibration", lambda folder, **_: (folder / "calibration.json").write_text("{}"))
    monkeypatch.setattr(spec_analysis, "client_verdict", lambda level: ClientVerdict("ok", ()))

    def go(standin: dict[str, Any], environment: dict[str, str] | None = None, **changes: Any) -> NotebookResult:
        profile = make_profile(tmp_path / "profile", standin, environment)
        return play(tmp_path / "run", small(profile, **changes), monkeypatch)

    return go
