"""`workbook run --matrix` as a person runs it: real processes, kernels and files, with notebooks that need no server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import papermill.s3
import psutil
import pytest
from papermill.iorw import load_notebook_node

from lib.cli import main
from tests.batch import s3_server
from tests.batch.standin import change, environment, make_project, ran, workbook
from tests.conftest import said as plain


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One project whose matrix `two` runs notebooks 03 and 06 in two configurations; tests use it in turn."""
    return make_project(tmp_path_factory.mktemp("project") / "p", ("03", "06"))


class Said:
    """What a command that only reads printed: in this process, because starting one costs more than it does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], outputs: Path) -> None:
        self.capsys = capsys
        monkeypatch.setenv("WORKBOOK_OUTPUTS", str(outputs))

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self.capsys.readouterr()
        code = main(list(arguments))
        return code, *self.capsys.readouterr()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], project: Path) -> Said:
    return Said(monkeypatch, capsys, project / "outputs")


def indexes(project: Path, outputs: str = "outputs") -> dict[str, list[str]]:
    """States of the runs of each cell, oldest first."""
    found: dict[str, list[str]] = {}
    for file in sorted((project / outputs).glob("*/*/result.json")):
        found.setdefault(file.parent.parent.name, []).append(json.loads(file.read_text())["state"])
    return found


@pytest.mark.timeout(200)
def test_killed_in_the_middle_it_goes_on_and_a_changed_parameter_reruns_what_reads_it(
    project: Path, said: Said
) -> None:
    """kill -9 in the third task: its child is gone, two are kept, the rest runs; then 03 is changed for one configuration."""
    started = subprocess.Popen(
        [sys.executable, "-m", "lib.cli", "run", "--matrix", "two"], cwd=project, text=True,
        env=environment(project, STANDIN_SLEEP="3"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    log = project / "ran.txt"
    try:
        end = time.monotonic() + 90
        while not (log.exists() and len(log.read_text().splitlines()) == 3):
            assert time.monotonic() < end and started.poll() is None, started.stderr and started.stderr.read()
            time.sleep(0.05)
        code, out, _ = said("status")
        while "03 running" not in out and time.monotonic() < end:  # the notebook may begin before its record is written
            code, out, _ = said("status")
        assert code == 0 and "++" in out and "03 running" in out, out
        children = psutil.Process(started.pid).children(recursive=True)
        assert children
    finally:
        started.send_signal(signal.SIGKILL)
        started.wait()
    psutil.wait_procs(children, timeout=10)
    assert not [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE]
    assert ran(project) == ["two.model.here.small 03", "two.model.here.small 06", "two.model.here.large 03"]
    code, _, error = said("status", "two")
    assert code == 1 and "is gone" in error

    done = workbook(project, "run", "--matrix", "two", "--junit", "junit.xml")
    assert done.returncode == 0, done.stderr
    assert ran(project) == ["two.model.here.large 03", "two.model.here.large 06"]
    assert indexes(project) == {"two.model.here.small": ["done"], "two.model.here.large": ["done"]}
    assert not list((project / "outputs/.attempts").glob("*/*/*"))
    junit = ElementTree.parse(project / "junit.xml").getroot()
    assert (junit.get("tests"), junit.get("failures"), junit.get("errors")) == ("4", "0", "0")

    change(
        project / "params/matrix/two.yaml",
        include=[{"configuration": "large", "params": {"03": {"concurrency": [2]}}}],
    )
    plan = workbook(project, "run", "--matrix", "two", "--plan")
    assert "large 03: changed: parameters" in plan.stdout and "large 06: changed: needs" in plan.stdout
    assert "small" not in plan.stdout.partition("\n")[2] and ran(project) == []
    assert workbook(project, "run", "--matrix", "two", "--watch").returncode == 0
    assert ran(project) == ["two.model.here.large 03", "two.model.here.large 06"]
    assert indexes(project)["two.model.here.large"] == ["done", "done"]


def test_history_and_compare_take_the_runs_of_a_cell(project: Path, said: Said) -> None:
    """After the test above: two runs of one cell, and what changed between them."""
    runs = sorted(f.name for f in (project / "outputs/two.model.here.large").iterdir())
    assert len(runs) == 2
    _, out, _ = said("history", "two.model.here.large", "--json")
    assert [r["run"] for r in json.loads(out)["runs"]] == runs[::-1]
    code, out, error = said("compare", *(f"two.model.here.large/{run}" for run in runs))
    assert code == 0 and "concurrency" in out, error


@pytest.mark.timeout(200)
def test_exit_codes_and_outputs_in_s3(
    project: Path, s3: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Into S3: 3 with --strict where a verdict says no, 1 where a notebook fails; all of it is there, no secret anywhere."""
    change(
        project / "params/matrix/two.yaml",
        include=[
            {"configuration": "small", "server": {"flags": {"max_total_tokens": 7}}},
            {"configuration": "large", "server": {"flags": {"max_total_tokens": 13}}},
        ],
        notebooks=["03"],
    )
    variables = {**s3_server.environment(s3), "WORKBOOK_OUTPUTS": str(project / "elsewhere")}
    url = s3_server.new_bucket(s3)
    done = workbook(project, "run", "--matrix", "two", "--outputs", url, "--strict", **variables)
    assert done.returncode == 1 and "thirteen" in done.stderr and "Traceback" not in plain(done), done.stderr
    change(project / "params/matrix/two.yaml", exclude=[{"configuration": "large", "why": "it fails"}])
    strict = workbook(project, "run", "--matrix", "two", "--outputs", url, "--strict", **variables)
    assert strict.returncode == 3 and "1 done before, 0 to do" in strict.stderr, strict.stderr
    assert len(ran(project)) == 2
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    said = Said(monkeypatch, capsys, project / "new")
    code, out, error = said("history", "--outputs", url, "--json")
    runs = json.loads(out)["runs"]
    assert {(r["profile"], r["state"]) for r in runs} == {
        ("two.model.here.small", "done"), ("two.model.here.large", "failed"),
    }  # fmt: skip
    run = next(r["path"] for r in runs if r["state"] == "done")
    monkeypatch.setattr(papermill.s3.S3, "s3_session", (None, None, None))  # papermill keeps the first one that it made
    assert load_notebook_node(f"{url}/{run}/03.ipynb").metadata.papermill.exception is None
    files = [f for f in project.rglob("*") if f.is_file() and "lib" not in f.relative_to(project).parts]
    assert not [f for f in files if s3_server.SECRET.encode() in f.read_bytes()]
    assert s3_server.SECRET not in done.stderr + done.stdout


def test_mistakes_are_one_message(said: Said, tmp_path: Path) -> None:
    """Unknown keys, names, options that exclude each other: exit 2, nothing runs."""
    bad = tmp_path / "bad.yaml"
    bad.write_text(
        "title: x\nprofile: embedded\nconfigurations:\n  a: {server: {flagz: {}}}\nexclude: [{host: there, why: x}]\n"
    )
    for arguments, words in (
        (("--matrix", str(bad)), ("flagz", "'there' is on no axis")),
        (("--matrix", "embeded"), ("embeded", "embedded")),
        (("--matrix", "embedded", "--profile", "embedded"), ("--profile",)),
        (("--matrix", "embedded", "--outputs", "ftp://x/y"), ("s3://",)),
        (("--matrix", "embedded", "--outputs", "s3:/x/y"), ("s3://",)),
        (("--matrix", "embedded", "--only", "7"), ("--only",)),
        (("--plan",), ("--matrix",)),
    ):
        code, _, error = said("run", *arguments)
        assert code == 2 and "Traceback" not in error, error
        assert error.count("workbook: ") == 1 and all(word in error for word in words), error
