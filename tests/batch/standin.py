"""A project with a notebook set that needs no server: the real runner, kernels and records, in seconds.

The copy of `lib` in it is the one under test; its notebooks open a run, write a raw file, and finish with one verdict.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import yaml

from lib.params import NOTEBOOKS, ROOT
from tests.model.checkpoint_files import TINY_HYBRID, safetensors_bytes

#: What a stand-in takes: small subsets of the real parameters, checked by the real models.
PARAMETERS = {
    "01": 'profile = "embedded"\nserver = {}\nknown_answer = {}\ncompute_capability = None\nbuild_from_source = False\n'
    "source_ref = None\nsource_commit = None",
    "03": 'profile = "embedded"\nserver = {}\nknown_answer = {}\nconcurrency = [1]\nseed = 42',
    "06": 'profile = "embedded"\nserver = {}\nknown_answer = {}\nservice = "sglang"',
}
METADATA = {
    "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
    "language_info": {"name": "python"},
}
BODY = """
import os, time
from pathlib import Path
from lib.records import Evidence, Measured, Verdict
from lib.results import open_notebook
run = open_notebook("{number}", globals())
run.say("at work")
with open(os.environ["STANDIN_LOG"], "a") as log: log.write(run.params.profile + " {number}\\n")
time.sleep(float(os.environ.get("STANDIN_SLEEP", "0")))
flags = run.profile.server.flags
if flags.get("max_total_tokens") == 13: raise RuntimeError("thirteen")
seen = sorted(run.earlier())
raw = run.raw / "seen.txt"
if not raw.exists(): raw.write_text(str([seen, run.params.model_dump().get("concurrency")]))  # evidence is written once
verdict = Verdict(id="saw", claim="it saw what it reads", status="fail" if flags.get("max_total_tokens") == 7 else "pass",
    measured=Measured(value=len(seen), n=1), reason="counted", evidence=[Evidence(path="raw/{number}/seen.txt", line=1)])
run.finish("stand-in {number}", "Does it run?", [verdict], "keep it")
"""


def make_project(folder: Path, numbers: tuple[str, ...] = ("01", "03", "06")) -> Path:
    """A project folder with a profile `standin`, a matrix `two` (two configurations) and stand-in notebooks."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "lib", folder / "lib", ignore=ignore)
    (folder / "notebooks").mkdir()
    for number in numbers:
        made = nbformat.v4.new_notebook(metadata=METADATA)
        cells = [nbformat.v4.new_code_cell(PARAMETERS[number], metadata={"tags": ["parameters"]})]
        cells.append(nbformat.v4.new_code_cell(BODY.format(number=number)))
        made.cells = cells
        nbformat.write(made, folder / "notebooks" / f"{NOTEBOOKS[number]}.ipynb")
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY_HYBRID))
    (model / "model.safetensors").write_bytes(safetensors_bytes({"lm_head.weight": ("BF16", [4, 2], bytes(16))}))
    files: dict[str, Any] = {
        "standin/profile.yaml": {"title": "a stand-in", "server": {"model": str(model), "python": sys.executable}},
        "standin/01.yaml": {},
        "standin/03.yaml": {"concurrency": [1]},
        "standin/06.yaml": {},
        "matrix/two.yaml": {
            "title": "two configurations",
            "profile": "standin",
            "configurations": {
                "small": {"server": {"flags": {"max_total_tokens": 1024}}},
                "large": {"server": {"flags": {"max_total_tokens": 4096}}},
            },
        },
    }
    for name, content in files.items():
        path = folder / "params" / name
        if path.stem in ("01", "03", "06") and path.stem not in numbers:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(content, sort_keys=False) if content else "profile: standin\n")
    return folder


def environment(project: Path, **more: str) -> dict[str, str]:
    """The environment of a command in a project."""
    return {
        **os.environ,
        "PYTHONPATH": str(project),
        "WORKBOOK_OUTPUTS": str(project / "outputs"),
        "STANDIN_LOG": str(project / "ran.txt"),
        **more,
    }


def workbook(project: Path, *arguments: str, timeout: float = 120, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs the project's `workbook`."""
    return subprocess.run(
        [sys.executable, "-m", "lib.cli", *arguments],
        cwd=project, capture_output=True, text=True, timeout=timeout, env=environment(project, **more),
    )  # fmt: skip


def ran(project: Path) -> list[str]:
    """What the stand-ins wrote when they ran: `CELL NN`, in order; the log is emptied."""
    file = project / "ran.txt"
    found = file.read_text().splitlines() if file.exists() else []
    file.write_text("")
    return found


def change(file: Path, **changes: Any) -> None:
    """Changes keys of a YAML file."""
    data = yaml.safe_load(file.read_text()) or {}
    file.write_text(yaml.safe_dump({**data, **changes}, sort_keys=False))
