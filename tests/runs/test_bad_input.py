"""Bad input as a new user gives it, on the real command and where the fault is real on a real server: one clear message,
no server left, earlier results intact."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from lib.hosts import local
from lib.runner import only_run as only_run_lock
from lib.server import launch as launching
from tests.conftest import ROOT, WORKBOOK, only_run, said, server_pids, states


def wait_for(condition: Callable[[], Any], seconds: float) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.2)
    raise AssertionError(f"not within {seconds} s")


def one_message(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Nothing but one message on standard error, without a traceback, with these words."""
    assert "Traceback" not in said(done)
    messages = [line for line in done.stderr.splitlines() if line.startswith("workbook: ")]
    assert len(messages) == 1, done.stderr
    for word in words:
        assert word in messages[0], messages[0]


# --- without a server: refused before anything runs ----------------------------------------------------------------


def test_an_unknown_profile_names_the_nearest(workbook: Any) -> None:
    """A misspelt profile is exit 2 and the right name."""
    done = workbook("run", "--profile", "embeded")
    assert done.returncode == 2
    one_message(done, "'embedded'")


def test_yaml_typos_are_all_named_before_anything_runs(workbook: Any, profile: Any, tmp_path: Path) -> None:
    """Faults in notebook 03's file stop the run before notebook 01 is started."""
    folder = profile(files={"03": {"concurency": [1], "output_len": "many"}})
    done = workbook("run", "--profile", str(folder))
    assert done.returncode == 2
    one_message(done, "'concurency'", "'concurrency'", "output_len")
    assert not list((tmp_path / "outputs").glob("*/*"))


@pytest.mark.parametrize("only", ["07", "x", "", ","])
def test_an_unknown_notebook_is_refused(workbook: Any, only: str) -> None:
    """--only takes the six numbers."""
    done = workbook("run", "--only", only)
    assert done.returncode == 2
    one_message(done, "01, 02")


def test_resuming_what_is_not_there_names_the_latest(workbook: Any) -> None:
    """--resume of an unknown run is exit 2."""
    done = workbook("run", "--resume", "20200101-000000")
    assert done.returncode == 2
    one_message(done, "20200101-000000")


def test_two_runs_at_once_the_second_is_told_who(workbook: Any, tmp_path: Path) -> None:
    """The lock names pid, profile and since when; it is free again when its holder is killed."""
    holder = subprocess.Popen(
        [
            WORKBOOK[0],
            "-c",
            "import time; from pathlib import Path; from lib.runner import only_run\n"
            f"with only_run(Path({str(tmp_path / 'outputs')!r}), 'embedded'): print('held', flush=True); time.sleep(60)",
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        done = workbook("run")
        assert done.returncode == 2
        one_message(done, f"pid {holder.pid}", "profile embedded", "since 20")
    finally:
        holder.kill()
        holder.wait()
    done = workbook("rebuild", "nothing-of-that-name")
    assert done.returncode == 2 and "one is running" not in done.stderr
    with only_run_lock(tmp_path / "outputs", "embedded"):
        pass


def test_a_full_disk_for_outputs_is_one_message(profile: Any, tmp_path: Path) -> None:
    """Where no byte can be written the run ends with the reason; nothing was launched."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small tmpfs")
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k,nr_inodes=64", "none", str(small)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs can't be mounted here: {mounted.stderr.strip()}")
    try:
        subprocess.run(["dd", "if=/dev/zero", f"of={small}/fill", "bs=1k", "count=16"], capture_output=True)
        done = subprocess.run(
            [*WORKBOOK, "run", "--profile", str(profile()), "--only", "01"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=200,
            env={**os.environ, "WORKBOOK_OUTPUTS": str(small)},
        )
        assert done.returncode == 2, done.stderr
        one_message(done, "space")
    finally:
        subprocess.run(["umount", str(small)], check=True)


# --- on the way to a server -----------------------------------------------------------------------------------------

server = pytest.mark.server


@server
@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("/nonexistent/model", "/nonexistent/model"),
        ("{empty}", "config.json"),
        ("no-such-embedded-model", "no-such-embedded-model"),
    ],
)
def test_a_model_that_is_none_is_named(
    workbook: Any, profile: Any, tmp_path: Path, tiny_spec: Any, model: str, words: str
) -> None:
    """A missing folder, a folder that holds no model, and an unknown name: the notebook fails with one message, exit 1."""
    (tmp_path / "empty").mkdir()
    folder = profile(server={"model": model.replace("{empty}", str(tmp_path / "empty"))})
    done = workbook("run", "--profile", str(folder), "--only", "01")
    assert done.returncode == 1
    one_message(done, words)


@server
def test_a_port_in_use_names_its_holder(workbook: Any, profile: Any, tiny_spec: Any) -> None:
    """The launch refuses and says who holds the port; the holder is not touched."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = workbook("run", "--profile", str(profile(server={"port": port})), "--only", "01")
        assert done.returncode == 1
        one_message(done, f"port {port}", f"pid {os.getpid()}")
        with socket.create_connection(("127.0.0.1", port), 2):
            pass


@server
def test_a_server_that_dies_at_start_is_reported_with_its_cause(
    workbook: Any, profile: Any, tmp_path: Path, tiny_spec: Any
) -> None:
    """The process ends long before the deadline; the verdict quotes the log, the run goes on."""
    folder = profile(server={"flags": {**tiny_flags(), "attention_backend": "flashinfer"}, "ready_timeout_s": 250})
    began = time.monotonic()
    done = workbook("run", "--profile", str(folder), "--only", "01")
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 200
    result = json.loads((only_run(tmp_path / "outputs") / "01.result.json").read_text())
    loads = next(v for v in result["verdicts"] if v["id"] == "loads")
    assert loads["status"] == "unsupported" and "flashinfer" in loads["evidence"][0]["quote"]


@server
def test_a_server_that_is_never_ready_is_stopped_at_the_deadline(
    workbook: Any, profile: Any, tmp_path: Path, tiny_spec: Any
) -> None:
    """After ready_timeout_s the launch is a hang, with its last phase, and nothing is left of it."""
    done = workbook(
        "run", "--profile", str(profile(server={"ready_timeout_s": 4, "stop_timeout_s": 3})), "--only", "01"
    )
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path / "outputs")
    result = json.loads((run / "01.result.json").read_text())
    loads = next(v for v in result["verdicts"] if v["id"] == "loads")
    assert loads["status"] == "fail" and "not ready after" in loads["reason"]
    assert not [p for p in server_pids(run) if psutil.pid_exists(p)]


def tiny_flags() -> dict[str, Any]:
    import yaml

    return dict(yaml.safe_load((ROOT / "tests/params/tiny/profile.yaml").read_text())["server"]["flags"])


def start(profile_folder: Path, outputs: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*WORKBOOK, "run", "--profile", str(profile_folder), *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "WORKBOOK_OUTPUTS": str(outputs)},
        start_new_session=True,
    )


def group_of_server(outputs: Path) -> int | None:
    for file in outputs.glob("*/*/raw/*/servers/*/status.json"):
        status = json.loads(file.read_text())
        if status.get("state") == "running":
            return int(status["pgid"])
    return None


@server
@pytest.mark.timeout(600)
def test_ctrl_c_in_notebook_03_leaves_no_server_and_a_run_that_resumes(
    profile: Any, tmp_path: Path, tiny_spec: Any, workbook: Any
) -> None:
    """SIGINT while a level is measured: exit 130, server gone; --resume keeps the finished level and takes the rest."""
    folder = profile(files={"03": {"concurrency": [1, 2], "output_len": 40, "num_requests": 12}})
    outputs = tmp_path / "outputs"
    running = start(folder, outputs, "--only", "03")
    first = wait_for(lambda: next(iter(outputs.glob("*/*/raw/03/level-C1/stamp.json")), None), 280)
    wait_for(lambda: (first.parents[1] / "level-C2").is_dir(), 60)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    assert "Traceback" not in err
    run = only_run(outputs)
    assert not [p for p in server_pids(run) if psutil.pid_exists(p)]
    assert states(run)["03"] == "interrupted" and (run / "index.html").exists()
    kept = first.read_text()
    done = workbook("run", "--resume", run.name)
    assert done.returncode == 0, done.stderr
    resumed = json.loads((run / "result.json").read_text())
    assert next(n for n in resumed["notebooks"] if n["notebook"] == "03")["state"] == "done"
    assert first.read_text() == kept
    second = json.loads((run / "raw/03/level-C2/stamp.json").read_text())
    assert second["error"] is None and second["launch_id"] != json.loads(kept)["launch_id"]


@server
@pytest.mark.parametrize("victim", ["workbook", "kernel"])
def test_no_server_is_left_10_s_after_sigkill(profile: Any, tmp_path: Path, tiny_spec: Any, victim: str) -> None:
    """SIGKILL of the command, or of the notebook's kernel, takes the server along within 10 s."""
    outputs = tmp_path / "outputs"
    running = start(profile(), outputs, "--only", "01")
    pgid = wait_for(lambda: group_of_server(outputs), 120)
    wait_for(lambda: len(local.group_members(pgid)) >= 1, 30)
    if victim == "workbook":
        running.kill()
    else:
        kernels = [
            p
            for p in psutil.Process(running.pid).children(recursive=True)
            if "ipykernel_launcher" in " ".join(p.cmdline())
        ]
        assert len(kernels) == 1
        kernels[0].kill()
    wait_for(lambda: not local.group_members(pgid), 10)
    running.communicate(timeout=60)


# --- a server that the workbook did not launch ----------------------------------------------------------------------


@server
@pytest.mark.timeout(600)
def test_an_attached_server_is_measured_and_never_stopped(
    workbook: Any, profile: Any, tmp_path: Path, tiny_server: launching.Server
) -> None:
    """Notebooks 01, 02, 03 and 05 on a running server: marked attached, what needs a restart is named as skipped, it lives on."""
    log = tiny_server.folder / "server.log"
    folder = profile(
        server={"attach": tiny_server.base_url, "model": None, "log": str(log)}, files={"03": {"concurrency": [1]}}
    )
    done = workbook("run", "--profile", str(folder), "--only", "01,02,03,05")
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path / "outputs")
    for number in ("01", "03", "05"):
        result = json.loads((run / f"{number}.result.json").read_text())
        assert result["servers"] and all(s["origin"] == "attached" for s in result["servers"])
        assert result["servers"][0]["pid"] == tiny_server.record.pid
    skipped = " ".join(json.loads((run / "05.result.json").read_text())["skipped"])
    assert "not restarted" in skipped
    allocated = next(
        v for v in json.loads((run / "05.result.json").read_text())["verdicts"] if v["id"] == "allocated-attached"
    )
    assert allocated["measured"]["value"] == "bfloat16"
    assert tiny_server.check_identity()


@server
def test_plain_papermill_writes_into_the_folder_of_its_output(
    profile: Any, tmp_path: Path, tiny_server: launching.Server
) -> None:
    """`papermill notebooks/03_benchmark.ipynb out.ipynb -f 03.yaml` works, its result beside the output notebook."""
    folder = profile(server={"attach": tiny_server.base_url, "model": None}, files={"03": {"concurrency": [1]}})
    out = tmp_path / "plain" / "out.ipynb"
    out.parent.mkdir()
    papermill = Path(WORKBOOK[0]).parent / "papermill"
    done = subprocess.run(
        [str(papermill), "notebooks/03_benchmark.ipynb", str(out), "-f", str(folder / "03.yaml")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((out.parent / "03.result.json").read_text())
    assert {v["id"] for v in result["verdicts"]} >= {"level-C1", "smoke-test"}


@server
def test_an_injected_unknown_parameter_fails_plain_papermill(tmp_path: Path, tiny_spec: Any) -> None:
    """Papermill only warns of an undeclared parameter; the notebook refuses it by name."""
    papermill = Path(WORKBOOK[0]).parent / "papermill"
    done = subprocess.run(
        [str(papermill), "notebooks/01_build.ipynb", str(tmp_path / "out.ipynb"), "-p", "profil", "embedded"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert re.search(r"unknown key 'profil', did you mean 'profile'", done.stderr)


@server
def test_an_api_key_reaches_the_server_and_no_file(
    tiny_spec: launching.ServerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `api_key_env` the key guards the server and appears in no file of the launch, log included."""
    monkeypatch.setenv("TEST_KEY", "sk-very-s3cret-key-0123456789")
    spec = tiny_spec.model_copy(update={"api_key_env": "TEST_KEY", "name": "guarded"})
    me = local.process_id(os.getpid())
    assert me
    with launching.launch(spec, tmp_path, [me]) as guarded:
        assert guarded.control.server_info()["version"] == "0.5.15.post1"
        import requests

        assert requests.get(guarded.base_url + "/server_info", timeout=10).status_code == 401
        assert guarded.check_identity()
    files = [f for f in tmp_path.rglob("*") if f.is_file()]
    assert {f.name for f in files} >= {"server.log", "launch.json", "server_info.json", "status.json"}
    assert not [f for f in files if b"s3cret" in f.read_bytes()]
