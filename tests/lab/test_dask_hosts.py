"""`workbook run --matrix --engine dask` over two real systemd hosts, outputs in an S3 server: one host is killed in the middle."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("distributed", reason="pip install -r requirements-dask.txt")

from lib.batch.ledger import Ledger
from lib.batch.storage import store_of
from lib.hosts.base import Host
from lib.hosts.ssh import SSHHost
from tests.batch import s3_server, standin
from tests.lab import faults
from tests.lab.lab import Lab

CONFIGURATIONS = 2
SECONDS = 3.0


@pytest.fixture
def s3(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """`s3://bucket/runs` of a server on this machine's end of the lab's network."""
    with s3_server.s3_server(tmp_path / "moto.log", f"{lab.subnet}.1") as url:
        for name, value in s3_server.environment(url).items():
            monkeypatch.setenv(name, value)
        yield s3_server.new_bucket(url)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with small notebooks, and a matrix of three configurations on hosts called `pool`."""
    made = standin.make_project(tmp_path / "project", ("03",))
    row = {"server": {"flags": {}}}
    matrix = {
        "title": "two hosts", "profile": "standin", "hosts": {"pool": {}},
        "configurations": {f"c{n}": {"server": {"flags": {"max_total_tokens": 1024 + n}}} for n in range(CONFIGURATIONS)} | {"base": row},
    }  # fmt: skip
    (made / "params" / "matrix" / "pool.yaml").write_text(yaml.safe_dump(matrix))
    return made


def put_project(host: Host, project: Path) -> None:
    """The same project at the same place on a host, and an interpreter that knows where the S3 server is."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(project, str(project).lstrip("/"))
    host.put(packed.getvalue(), "/root/project.tar")
    host.run(["tar", "-C", "/", "-xf", "/root/project.tar"]).check("the project")
    names = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_DEFAULT_REGION")
    lines = [f"export {n}={os.environ[n]}" for n in names]
    lines += [f"export STANDIN_SLEEP={SECONDS} STANDIN_LOG=/root/ran.txt", f'exec {sys.executable} "$@"']
    host.put("\n".join(["#!/bin/sh", *lines, ""]).encode(), "/root/python", mode=0o755)


def cluster_file(lab: Lab, project: Path) -> Path:
    """Both hosts over SSH, the scheduler here."""
    spec = {
        "kind": "ssh", "listen": f"{lab.subnet}.1", "folder": str(project), "python": "/root/python", "config": lab.config,
        "hosts": [{"address": f"guest-{n}", "serves": ["pool"]} for n in (101, 102)],
    }  # fmt: skip
    file = project / "cluster.yaml"
    file.write_text(yaml.safe_dump(spec))
    return file


@contextlib.contextmanager
def running(project: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The project's `workbook` while the context lasts; it hears of a lost connection after 12 s."""
    environment = standin.environment(project, DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP="12s")
    process = subprocess.Popen(
        [sys.executable, "-m", "lib.cli", *arguments], cwd=project, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=(project / "stderr.txt").open("w"), start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def until(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait for something to become true."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return found


@pytest.fixture
def started(
    lab: Lab, hypervisor: SSHHost, guest: Host, project: Path, s3: str
) -> Iterator[tuple[subprocess.Popen[str], Host]]:
    """A matrix that runs on both hosts, and the second host, in the middle of its first task; reached by its hypervisor."""
    other = lab.pct(102, hypervisor)
    for host in (guest, other):
        put_project(host, project)
    arguments = ["run", "--matrix", "pool", "--engine", "dask", "--cluster", str(cluster_file(lab, project))]
    with running(project, *arguments, "--outputs", s3) as process:
        until(lambda: faults.alive(other, "ipykernel_launcher") or process.poll() is not None)
        assert process.poll() is None, (project / "stderr.txt").read_text()
        time.sleep(1.0)
        yield process, other


def test_a_host_killed_in_the_middle_loses_no_run_and_none_is_there_twice(
    lab: Lab, hypervisor: SSHHost, guest: Host, project: Path, s3: str, started: tuple[subprocess.Popen[str], Host]
) -> None:
    """Three notebooks on two hosts over SSH; the second host is killed while it runs one: every run is there, once."""
    process, _ = started
    hypervisor.run(["pct", "stop", "102"]).check("the host is gone")
    try:
        out, _ = process.communicate(timeout=120)
    finally:
        hypervisor.run(["pct", "start", "102"]).check("the host is back")
    said = (project / "stderr.txt").read_text()
    assert process.returncode == 0, said + out
    assert "dashboard http://" in said and "is gone; again on ct101" in said, said
    check_the_record(s3, project)
    assert not faults.alive(guest, "lib.batch.one_task")
    until(lambda: not faults.alive(guest, "distributed.cli"), 20)
    until(lambda: "ssh-ed25519" in keyscan(lab.address(102)), 30)


def test_a_host_that_is_cut_off_ends_its_task_which_goes_elsewhere(
    lab: Lab, project: Path, s3: str, started: tuple[subprocess.Popen[str], Host]
) -> None:
    """Its cable is pulled: the other host does its task, and it stops by itself what nobody waits for any more."""
    process, behind = started
    with faults.network_cut(lab, 102):
        out, _ = process.communicate(timeout=120)
        assert faults.gone(behind, "lib.batch.one_task", 60) is not None
    said = (project / "stderr.txt").read_text()
    assert process.returncode == 0 and "is gone; again on ct101" in said, said + out
    check_the_record(s3, project)
    behind.run(["pkill", "-KILL", "-f", "distributed.cli"])


def keyscan(address: str) -> str:
    """The host key that an address shows, empty where no sshd answers."""
    words = ["ssh-keyscan", "-T", "1", "-t", "ed25519", address]
    return subprocess.run(words, capture_output=True, text=True).stdout


def check_the_record(s3: str, project: Path) -> None:
    """One `done` for each cell, its result in the store, no attempt left over, no host with two at a time."""
    store = store_of(s3)
    records = [r for r in Ledger(store, project / "again").records if r.state == "done"]
    cells = sorted(r.cell for r in records)
    assert len(cells) == len(set(cells)) == CONFIGURATIONS + 1, cells
    for record in records:
        result = json.loads(store.get(f"{record.cell}/{record.run_id}/03.result.json") or b"{}")
        assert result["verdicts"][0]["status"] in ("pass", "fail") and result["run_id"] == record.run_id
        assert list(store.children(record.cell)) == [record.run_id], "one run of each cell"
    for key in store.children(".attempts"):
        for attempt in store.children(f".attempts/{key}"):
            assert "commit.json" not in store.children(f".attempts/{key}/{attempt}"), "a committed attempt is in no run"
    by_host: dict[str, list[tuple[str, str]]] = {}
    for record in records:
        by_host.setdefault(record.host, []).append((record.started or "", record.ended or ""))
    for spans in by_host.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False)), spans
    assert "ct101" in by_host
