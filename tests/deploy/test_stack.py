"""What notebook 01 says of a stack: files that a bundle left out, broken pins, and a build that cannot run here."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lib.deploy import build, releases, source_build, stack
from lib.params import BuildParams
from lib.records import Evidence, Status


def recorded(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


@pytest.fixture
def bundled(tmp_path: Path) -> Path:
    """A Python whose path has a bundle: sglang with one file carried, one left out, as bundle.json says."""
    site = tmp_path / "site"
    (site / "sglang-0.5.16.dist-info").mkdir(parents=True)
    (site / "sglang.py").write_text("x = 1\n")
    record = f"sglang.py,{recorded(b'x = 1' + bytes([10]))},6\nleft.py,{recorded(b'')},0\n"
    (site / "sglang-0.5.16.dist-info/RECORD").write_text(record)
    (site / "sglang-0.5.16.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.16\n")
    (site / "bundle.json").write_text(json.dumps({"files": {"sglang.py": []}}))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return python


def inventory(folder: Path, python: Path) -> list[dict[str, Any]]:
    build.take_inventory(folder, str(python))
    return build.changed_files(json.loads((folder / "inventory.json").read_text()))


def test_what_a_bundle_left_out_is_neither_changed_nor_lost(tmp_path: Path, bundled: Path) -> None:
    """One equal file, one left out."""
    (row,) = [r for r in inventory(tmp_path, bundled) if r["name"] == "sglang"]
    assert (row["same"], row["changed"], row["missing"], row["left out by the bundle"]) == (1, 0, 0, 1)


def test_a_carried_file_that_is_gone_or_changed_still_shows(tmp_path: Path, bundled: Path) -> None:
    """bundle.json names it, so its absence is a loss; another content is a change."""
    (tmp_path / "site/sglang.py").write_text("x = 2\n")
    assert [r["changed"] for r in inventory(tmp_path, bundled) if r["name"] == "sglang"] == [1]
    (tmp_path / "site/sglang.py").unlink()
    assert [r["missing"] for r in inventory(tmp_path, bundled) if r["name"] == "sglang"] == [1]


def run(tmp_path: Path, **params: Any) -> Any:
    def evidence(path: Path, *_: Any) -> Evidence:
        return Evidence(path=str(path))

    return SimpleNamespace(params=BuildParams(**params), raw=tmp_path, evidence=evidence, offline=False)


def stack_of(torch_cuda: str | None, **changes: str) -> dict[str, Any]:
    fits = {name: (next(iter(r.specifier)).version if r.specifier else "1.0") for name, r in releases.pins("0.5.16").items()}
    fits |= {"sglang": "0.5.16"} | {k.replace("_", "-"): v for k, v in changes.items()}
    return {"distributions": [{"name": k, "version": v} for k, v in fits.items() if v], "torch": {"cuda": torch_cuda}, "host": {"gpus": []}}


@pytest.mark.parametrize(
    ("made", "status", "words"),
    [
        (stack_of("13.0"), Status.PASS, "every installed one is met"),
        (stack_of("13.0", torchao=""), Status.PASS, "not installed: torchao"),
        (stack_of("13.0", transformers="5.17.0"), Status.FAIL, "transformers 5.17.0, wanted ==5.12.1"),
        (stack_of(None, torch="2.13.0"), Status.INCONCLUSIVE, "a CPU environment"),
        (stack_of("13.0", sglang="0.4.0"), Status.INCONCLUSIVE, "not in the table"),
    ],
)
def test_the_verdict_on_pins(tmp_path: Path, made: dict[str, Any], status: Status, words: str) -> None:
    """Met: pass; another version: fail; a CPU environment or an unknown release: inconclusive."""
    verdict = stack.verdicts(run(tmp_path), made, {"libraries": []})[0]
    assert verdict.status == status and words in verdict.reason


def test_the_judged_gpu_is_stated_or_the_hosts() -> None:
    """01.yaml's word wins; two kinds of GPU must be settled by it."""
    made = {"host": {"gpus": [{"compute_cap": "9.0"}, {"compute_cap": "9.0"}]}}
    assert stack.kernels.target(made, None) == (90, "the host's GPUs")
    assert stack.kernels.target(made, "SM121")[0] == 121
    with pytest.raises(Exception, match="one architecture"):
        stack.kernels.target({"host": {"gpus": [{"compute_cap": "9.0"}, {"compute_cap": "12.0"}]}}, None)
    assert stack.kernels.target({"host": {"gpus": []}}, None)[0] is None


def test_a_build_that_cannot_run_here_says_why(tmp_path: Path) -> None:
    """No nvcc: unsupported here, with what is lacking, whether it was asked for or not."""
    made = source_build.make_plan(120, "13.0", 24, 2, "v0.5.16")
    rows = stack.build(run(tmp_path, build_from_source=True), SimpleNamespace(attached=False), made, {"lacking": ["nvcc"]})  # type: ignore[arg-type]
    assert rows == [{"build": "unsupported here", "why": "lacking: nvcc"}]
