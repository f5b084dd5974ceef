"""What a person says of clusters: files checked whole, the job script of Slurm, one message where packages or schedulers are missing."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lib.batch import dask_options
from lib.errors import BadInput, BadParams, HostError
from lib.params import ROOT

pytest.importorskip("distributed", reason="pip install -r requirements-dask.txt")

from lib.batch import dask_cluster

SLURM: dict[str, Any] = {
    "kind": "slurm", "serves": ["h200", "any"], "gpus": 8, "jobs": 4, "cores": 16, "memory": "200GB", "walltime": "08:00:00",
    "queue": "gpu", "account": "team", "directives": ["--gres=gpu:8"], "prologue": ["module load cuda"], "folder": "/shared/workbook",
}  # fmt: skip


def options(*words: str) -> argparse.Namespace:
    """The options as given."""
    parser = argparse.ArgumentParser()
    dask_options.add_arguments(parser)
    return parser.parse_args(words)


def spec(folder: Path, content: Any) -> Any:
    """A cluster file, read."""
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(content))
    return dask_cluster.read_cluster(file)


def test_a_slurm_job_has_a_node_for_itself_and_serves_its_names(tmp_path: Path) -> None:
    """The job script that would be submitted: one exclusive node, one worker with its resources, what the file asks for."""
    cluster = dask_cluster.slurm_cluster(spec(tmp_path, SLURM))
    try:
        script = cluster.job_script()
    finally:
        cluster.close()
    for line in ("#SBATCH -p gpu", "#SBATCH -A team", "#SBATCH -t 08:00:00", "#SBATCH --nodes=1", "#SBATCH --exclusive",
                 "#SBATCH --gres=gpu:8", "#SBATCH --cpus-per-task=16", "module load cuda", "cd /shared/workbook"):  # fmt: skip
        assert line in script.splitlines(), script
    assert "--resources host-h200=1,host-any=1,GPU=8" in script and "--nthreads 1 " in script
    assert "#SBATCH -n 1" in script and "187G" in script  # 200 GB are 186.3 GiB


def test_faults_of_a_cluster_file_are_named_at_once(tmp_path: Path) -> None:
    """Unknown keys with the nearest known one, wrong values, no such kind, no YAML, no file."""
    with pytest.raises(BadParams, match="memory.*did you mean 'walltime'"):
        spec(tmp_path, {"kind": "slurm", "serves": ["a"], "jobs": 1, "waltime": "1:00"})
    with pytest.raises(BadParams, match="kind: one of ssh, slurm"):
        spec(tmp_path, {"kind": "k8s"})
    with pytest.raises(BadParams, match="serves"):
        spec(tmp_path, {"kind": "ssh", "hosts": [{"address": "x", "serves": ["a.b"]}]})
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(BadParams, match="a cluster file"):
        dask_cluster.read_cluster(tmp_path / "bad.yaml")
    with pytest.raises(BadParams, match="a cluster file"):
        dask_cluster.read_cluster(tmp_path / "none.yaml")


def test_ssh_workers_say_what_their_host_is(tmp_path: Path) -> None:
    """Resources by host, as dask counts them."""
    made = spec(
        tmp_path,
        {
            "kind": "ssh",
            "hosts": [{"address": "x", "serves": ["a", "b"], "gpus": 8}, {"address": "y", "serves": ["a"]}],
        },
    )
    assert made.hosts[0].resources() == {"host-a": 1.0, "host-b": 1.0, "GPU": 8.0}
    assert made.hosts[1].resources() == {"host-a": 1.0}


def test_where_to_run_must_be_said_and_must_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither option, nobody at the address, a host that ssh does not reach."""
    with pytest.raises(BadInput, match="neither --scheduler nor --cluster"):
        dask_options.make_engine(options())
    monkeypatch.setattr(dask_cluster, "CONNECT_S", 0.5)
    with pytest.raises(BadInput, match="a dask scheduler at tcp://127.0.0.1:9"):
        dask_options.make_engine(options("--scheduler", "tcp://127.0.0.1:9"))
    with pytest.raises(BadInput, match="--wait-hosts"):
        dask_options.make_engine(options("--scheduler", "tcp://127.0.0.1:9", "--wait-hosts", "0"))
    config = tmp_path / "ssh_config"
    config.write_text("Host nowhere\n    HostName 127.0.0.1\n    Port 9\n")
    made = spec(
        tmp_path, {"kind": "ssh", "config": str(config), "listen": "127.0.0.1", "hosts": [{"address": "nowhere", "serves": ["a"]}]}
    )  # fmt: skip
    with pytest.raises(HostError, match="a ssh cluster that starts"):
        dask_cluster.start_cluster(made)


def test_without_the_packages_one_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of them is imported for any other command."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "distributed" else real(name, *a))
    with pytest.raises(BadInput, match="distributed not installed.*requirements-dask.txt"):
        dask_options.make_engine(options("--scheduler", "tcp://127.0.0.1:9"))
    code = "import sys, lib.cli; lib.cli.build_parser(); print([m for m in sys.modules if m.split('.')[0] in ('distributed', 'dask')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
