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
def test_two_configurations_are_measured_and_a_change_of_one_leaves_the_other(
    workbook: Callable[..., Any], tmp_path: Path, tiny_spec: Any
) -> None:
    """Each cell's server has its own pool; nothing changed, nothing runs; one flag changed, one server is started again."""
    file = tmp_path / "pools.yaml"
    file.write_text(yaml.safe_dump(MATRIX))
    done = workbook("run", "--matrix", str(file), "--junit", str(tmp_path / "junit.xml"))
    assert done.returncode == 0, done.stderr
    assert pools(tmp_path) == {"pool-8k": [8192], "pool-16k": [16384]}
    junit = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert {case.get("classname") for case in junit.iter("testcase")} == {
        "pools.model.here.pool-8k.01", "pools.model.here.pool-16k.01",
    }  # fmt: skip
    again = workbook("run", "--matrix", str(file))
    assert again.returncode == 0 and "2 done before, 0 to do" in again.stderr, again.stderr
    changed = {**MATRIX, "include": [{"configuration": "pool-8k", "server": {"flags": {"max_total_tokens": 4096}}}]}
    file.write_text(yaml.safe_dump(changed))
    last = workbook("run", "--matrix", str(file))
    assert last.returncode == 0 and "1 done before, 1 to do" in last.stderr, last.stderr
    assert pools(tmp_path) == {"pool-8k": [8192, 4096], "pool-16k": [16384]}
    pids = [json.loads(f.read_text())["pid"] for f in (tmp_path / "outputs").glob("*/*/raw/*/servers/*/status.json")]
    assert len(pids) == 3 and not [pid for pid in pids if psutil.pid_exists(pid)]


def pools(tmp_path: Path) -> dict[str, list[int]]:
    """Tokens that each configuration's servers say they have, oldest run first."""
    found: dict[str, list[int]] = {}
    for file in sorted((tmp_path / "outputs").glob("pools.*/*/01.result.json")):
        servers = json.loads(file.read_text())["servers"]
        name = file.parent.parent.name.rpartition(".")[2]
        found.setdefault(name, []).extend(s["resolved_args"]["max_total_tokens"] for s in servers)
    return found
