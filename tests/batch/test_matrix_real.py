"""A matrix of two configurations of the tiny profile on real SGLang servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest
import yaml

from lib.params import ROOT

MATRIX: dict[str, Any] = {
    "title": "two pools",
    "profile": str(ROOT / "tests/params/tiny"),
    "notebooks": ["01"],
    "configurations": {
        "pool-8k": {"server": {"flags": {"max_total_tokens": 8192}}},
        "pool-16k": {"server": {"flags": {"max_total_tokens": 16384}}},
    },
}


@pytest.mark.server
@pytest.mark.timeout(280)
def test_a_second_configuration_is_measured_beside_the_first_which_is_kept(
    workbook: Callable[..., Any], tmp_path: Path, tiny_spec: Any
) -> None:
    """One configuration, then two: only the new one's server is started. Each has its own pool; a flag changed is one cell's."""
    file = tmp_path / "pools.yaml"
    file.write_text(yaml.safe_dump({**MATRIX, "exclude": [{"configuration": "pool-16k", "why": "later"}]}))
    first = workbook("run", "--matrix", str(file))
    assert first.returncode == 0, first.stderr
    assert pools(tmp_path) == {"pool-8k": [8192]}
    file.write_text(yaml.safe_dump(MATRIX))
    both = workbook("run", "--matrix", str(file), "--junit", str(tmp_path / "junit.xml"))
    assert both.returncode == 0 and "1 done before, 1 to do" in both.stderr, both.stderr
    assert pools(tmp_path) == {"pool-8k": [8192], "pool-16k": [16384]}
    junit = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert {case.get("classname") for case in junit.iter("testcase")} == {
        "pools.model.here.pool-8k.01", "pools.model.here.pool-16k.01",
    }  # fmt: skip
    changed = {**MATRIX, "include": [{"configuration": "pool-8k", "server": {"flags": {"max_total_tokens": 4096}}}]}
    file.write_text(yaml.safe_dump(changed))
    plan = workbook("run", "--matrix", str(file), "--plan")
    assert plan.stdout.splitlines()[1:] == ["  pools.model.here.pool-8k 01: changed: profile"], plan.stdout
    pids = [json.loads(f.read_text())["pid"] for f in (tmp_path / "outputs").glob("*/*/raw/*/servers/*/status.json")]
    assert len(pids) == 2 and not [pid for pid in pids if psutil.pid_exists(pid)]


def pools(tmp_path: Path) -> dict[str, list[int]]:
    """Tokens that each configuration's servers say they have, oldest run first."""
    found: dict[str, list[int]] = {}
    for file in sorted((tmp_path / "outputs").glob("pools.*/*/01.result.json")):
        servers = json.loads(file.read_text())["servers"]
        name = file.parent.parent.name.rpartition(".")[2]
        found.setdefault(name, []).extend(s["resolved_args"]["max_total_tokens"] for s in servers)
    return found
