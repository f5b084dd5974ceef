"""The set-up: what it finds missing, one at a time, killed half-way, which torch, and where its inputs come from."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lib.deploy import bootstrap

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "lib" / "deploy" / "bootstrap.py"
REPORTS = ROOT / "tests" / "data" / "torch_reports"
SERVER_PYTHON = ROOT / ".venv-sglang" / "bin" / "python"


def wait_for(what: Callable[[], object], seconds: float = 20.0) -> None:
    """Poll until something is true; fail if it never is."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


# --- what the machine must have ---------------------------------------------------------------------------------------


def test_a_complete_machine_lacks_nothing() -> None:
    """Python 3.11 with venv and ensurepip, and room: nothing is missing."""
    assert bootstrap.missing_parts((3, 11), lambda name: True, 50.0, bootstrap.PARTS) == []


def test_missing_python3_venv_is_one_line_with_its_command() -> None:
    """Debian's Python without python3-venv has venv but no ensurepip: one line names the package's command."""
    lines = bootstrap.missing_parts((3, 11), lambda name: name != "ensurepip", 50.0, bootstrap.PARTS)
    assert len(lines) == 1
    assert "apt-get install -y python3-venv" in lines[0]
    assert "\n" not in lines[0]


@pytest.mark.parametrize(
    ("version", "parts", "said"),
    [
        ((3, 9), ("notebooks",), "Python 3.11 or newer (this is 3.9)"),
        ((3, 10), bootstrap.PARTS, "Python 3.11 or newer (this is 3.10)"),
        ((3, 13), bootstrap.PARTS, "Python 3.11 for the embedded server (this is 3.13"),
        ((3, 13), ("notebooks",), None),
        ((3, 12), ("models",), None),
    ],
)
def test_python_version(version: tuple[int, int], parts: tuple[str, ...], said: str | None) -> None:
    """The notebooks need 3.11 or newer, the embedded server exactly 3.11, the models only the server's own Python."""
    lines = bootstrap.missing_parts(version, lambda name: True, 50.0, parts)
    if said is None:
        assert lines == []
    else:
        assert len(lines) == 1
        assert said in lines[0]
        assert "apt-get install -y python3.11 python3.11-venv" in lines[0]


def test_everything_missing_is_said_at_once() -> None:
    """An old Python without venv on a full disk gets three lines, not the first one."""
    lines = bootstrap.missing_parts((3, 8), lambda name: False, 0.1, bootstrap.PARTS)
    assert [line.split(" ")[0] for line in lines] == ["Python", "python3-venv,", "4.6"]


def test_the_file_parses_on_old_pythons_so_that_they_can_be_told() -> None:
    """Syntax newer than 3.8 would end with a SyntaxError instead of the line that says which Python is needed."""
    import ast

    ast.parse(SCRIPT.read_text(encoding="utf-8"), feature_version=(3, 8))


def test_only_the_standard_library_is_imported() -> None:
    """On a fresh machine there is nothing else to import, not even `lib`."""
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE))
    assert imported - {"__future__"} <= set(sys.stdlib_module_names)


def test_the_only_address_in_the_code_is_pytorchs_index() -> None:
    """No registry host is named but the one that TORCH_INDEX_URL overrides."""
    found = re.findall(r"https?://[^\s\"']+", SCRIPT.read_text(encoding="utf-8"))
    assert found == [bootstrap.TORCH_CPU_INDEX]


# --- run as a program -------------------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what the set-up reads, in a folder of its own."""
    for file in ("lib/deploy/bootstrap.py", "requirements.txt", "requirements-server.txt", "pyproject.toml"):
        target = tmp_path / "project" / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / file).read_bytes())
    return tmp_path / "project"


def run_setup(project: Path, *parts: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The set-up of a copied project, as a user runs it."""
    return subprocess.run(
        [sys.executable, str(project / "lib/deploy/bootstrap.py"), *parts],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
        timeout=120,
    )


def test_an_unknown_part_is_refused(project: Path) -> None:
    """A typo ends with 2 and the known names, and makes nothing."""
    result = run_setup(project, "notebook")
    assert result.returncode == 2
    assert "unknown part notebook; known: notebooks, server, models, all" in result.stderr
    assert not (project / ".setup").exists()


def test_a_second_setup_names_pid_and_start_and_ends_with_2(project: Path) -> None:
    """While one set-up holds the lock, another one says whose it is, since when, and touches nothing."""
    (project / ".setup").mkdir()
    with (project / ".setup" / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.write("pid 4711, since 2026-11-29 14:03:22+00:00\n")
        held.flush()
        result = run_setup(project, "notebooks")
    assert result.returncode == 2
    assert "pid 4711, since 2026-11-29 14:03:22+00:00" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (project / ".venv").exists()


def test_a_failing_step_quotes_its_last_lines_and_leaves_no_stamp(project: Path) -> None:
    """Without a package index, uv and then pip fail: exit code 1, pip's own words, the log's path, no environment."""
    empty = project / "no-packages"
    empty.mkdir()
    result = run_setup(
        project,
        "notebooks",
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(empty),
        PIP_CONFIG_FILE=os.devnull,
    )
    assert result.returncode == 1
    assert "uv cannot do it here" in result.stdout
    assert "No matching distribution found" in result.stderr
    assert str(project / ".setup" / "logs" / "notebooks-packages.log") in result.stderr
    assert (project / ".venv").exists()
    assert not (project / ".venv" / bootstrap.STAMP).exists()
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_setup_ends_its_step_and_frees_the_lock(project: Path, number: int) -> None:
    """SIGTERM and Ctrl-C end the running step too; exit code 130, one line, and the lock is free."""
    process = subprocess.Popen(
        [sys.executable, str(project / "lib/deploy/bootstrap.py"), "notebooks"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: (project / ".venv" / "pyvenv.cfg").exists())
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors.splitlines() == ["setup: interrupted; the next call goes on"]
    with (project / ".setup" / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


# --- an environment is whole or not there -----------------------------------------------------------------------------

KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from lib.deploy import bootstrap

folder = Path({folder!r})
bootstrap.BASE_PYTHON = {python!r}
with bootstrap.lock(folder / ".setup") as handle:
    steps = bootstrap.Steps(folder / ".setup", handle)

    def fill(python):
        code = "import pathlib, time; pathlib.Path('{folder}/filling').touch(); {then}"
        steps.command([sys.executable, "-c", code], "fill")

    bootstrap.make_environment(steps, "notebooks", folder / ".venv", "inputs", fill)
"""


def half_made(folder: Path, then: str) -> subprocess.Popen[bytes]:
    """A set-up of a bare environment in its own process, whose filling step does `then`."""
    without_pip = folder / "python-without-pip"  # pip would take 3 s and has no part in this
    without_pip.write_text(f'#!/bin/sh\nexec {sys.executable} "$@" --without-pip\n')
    without_pip.chmod(0o755)
    code = KILLED.format(root=str(ROOT), folder=str(folder), then=then, python=str(without_pip))
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)


def test_a_setup_killed_half_way_is_no_environment_and_is_repaired(tmp_path: Path) -> None:
    """SIGKILL in the middle: no stamp, the orphaned step ends, and the next call makes the environment anew."""
    first = half_made(tmp_path, "time.sleep(100)")
    wait_for((tmp_path / "filling").exists)
    (tmp_path / ".venv" / "left-by-the-first").touch()
    first.kill()
    first.wait()
    assert environment_is(tmp_path, "inputs") is False

    def lock_is_free() -> bool:
        with (tmp_path / ".setup" / "lock").open() as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    wait_for(lock_is_free, 5)  # the step inherits the lock: free means that the step is gone
    second = half_made(tmp_path, "pass")
    assert second.wait(timeout=60) == 0
    assert environment_is(tmp_path, "inputs") is True
    assert not (tmp_path / ".venv" / "left-by-the-first").exists()
    assert not (tmp_path / ".setup" / "trash").exists()


def environment_is(folder: Path, inputs: str) -> bool:
    """Whether the environment in `folder` counts as made from `inputs`."""
    return bootstrap.is_made(folder / ".venv", inputs)


def test_an_environment_counts_only_with_its_inputs_and_its_python(tmp_path: Path) -> None:
    """Other inputs, a broken stamp or a vanished Python make it count as not there."""
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    stamp = tmp_path / ".venv" / bootstrap.STAMP
    stamp.write_text('{"inputs": "a"}')
    assert environment_is(tmp_path, "a")
    assert not environment_is(tmp_path, "b")
    stamp.write_text('{"inp')
    assert not environment_is(tmp_path, "a")
    stamp.write_text('{"inputs": "a"}')
    python.unlink()
    python.symlink_to(tmp_path / "uninstalled" / "python3.11")
    assert not environment_is(tmp_path, "a")


def test_an_environment_in_use_is_not_taken_away(tmp_path: Path) -> None:
    """A process that runs from the environment (a JupyterLab, a server) is named with its pid, and keeps its files."""
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    with subprocess.Popen([str(python), "-c", "import time; time.sleep(60)"]) as user:
        try:
            wait_for(lambda: bootstrap.users_of(tmp_path / ".venv"))
            with pytest.raises(
                bootstrap.InUse, match=rf"\.venv has to be made anew, but is in use: {user.pid} \(bin/python"
            ):
                bootstrap.wait_until_unused(tmp_path / ".venv", patience_s=0.1)
        finally:
            user.kill()
    bootstrap.wait_until_unused(tmp_path / ".venv", patience_s=5)


def test_what_moves_the_inputs_hash(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requirements, the package's metadata and the folder count; settings of ruff, mypy and pytest do not."""
    monkeypatch.setattr(bootstrap, "ROOT", project)
    first = bootstrap.notebooks_inputs()
    settings = project / "pyproject.toml"
    text = settings.read_text(encoding="utf-8")
    settings.write_text(text.replace("line-length = 120", "line-length = 119"), encoding="utf-8")
    assert settings.read_text(encoding="utf-8") != text
    assert bootstrap.notebooks_inputs() == first
    settings.write_text(text.replace('version = "0.1.0"', 'version = "0.1.1"'), encoding="utf-8")
    assert settings.read_text(encoding="utf-8") != text
    assert bootstrap.notebooks_inputs() != first
    settings.write_text(text, encoding="utf-8")
    assert bootstrap.notebooks_inputs() == first
    with (project / "requirements.txt").open("a") as file:
        file.write("# more\n")
    assert bootstrap.notebooks_inputs() != first
    moved = project.rename(project.with_name("moved"))
    monkeypatch.setattr(bootstrap, "ROOT", moved)
    assert bootstrap.server_inputs() != bootstrap.inputs_hash(
        project / ".venv-sglang", [moved / "requirements-server.txt"], bootstrap.TORCH
    )


def test_a_step_leaves_its_duration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """times.json holds the seconds of a step, and the next time it is announced with them."""
    steps = bootstrap.Steps(tmp_path, os.open(tmp_path, os.O_RDONLY))
    with steps.step("models"):
        time.sleep(0.05)
    kept = json.loads((tmp_path / "times.json").read_text(encoding="utf-8"))
    assert 0.05 <= kept["models"]["seconds"] < 5
    assert "setup: models (may take 45 s)" in capsys.readouterr().out
    with bootstrap.Steps(tmp_path, 0).step("models"):
        pass
    assert "setup: models (took 0 s last time)" in capsys.readouterr().out


def test_uv_comes_with_all_its_hashes() -> None:
    """pip gets uv's whole block: one build for each platform, and nothing of the next package."""
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    block = bootstrap.hashed_block(text, "uv")
    assert block.count("--hash=sha256:") == text.split("\nuv==")[1].split("\nuvloop==")[0].count("--hash=sha256:") > 5
    assert len(re.findall(r"^\S+==", block, re.MULTILINE)) == 1
    assert not block.rstrip().endswith("\\")


def test_uv_gets_pips_index_and_certificates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user whose pip goes to another index needs uv to go there too, unless uv is told otherwise."""
    settings = tmp_path / "pip.conf"
    settings.write_text("[global]\nindex-url = http://127.0.0.1:9/simple\ncert = /some/ca.pem\n")
    for name in ("PIP_INDEX_URL", "PIP_CERT", "UV_DEFAULT_INDEX", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    wanted = {"UV_DEFAULT_INDEX": "http://127.0.0.1:9/simple", "SSL_CERT_FILE": "/some/ca.pem"}
    assert bootstrap.uv_environment(Path(sys.executable)) == wanted
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:10/simple")
    assert bootstrap.uv_environment(Path(sys.executable)) == {"SSL_CERT_FILE": "/some/ca.pem"}


# --- which torch ------------------------------------------------------------------------------------------------------


def report(name: str) -> dict[str, Any]:
    """A recorded report of pip (see tests/data/torch_reports/README.md)."""
    return dict(json.loads((REPORTS / f"{name}.json").read_text(encoding="utf-8")))


def with_version(recorded: dict[str, Any], version: str) -> dict[str, Any]:
    """The same report for a torch of another version."""
    recorded["install"][0]["metadata"]["version"] = version
    return recorded


def test_pypis_torch_for_linux_is_a_cuda_build() -> None:
    """No local version, and it requires NVIDIA's packages on Linux."""
    assert bootstrap.is_cpu_build(report("linux_x86_64_cuda")) is False


def test_a_local_version_decides() -> None:
    """`+cpu` is a CPU build whatever else it says; `+cu130` and `+rocm6.4` are none, even without requirements."""
    assert bootstrap.is_cpu_build(report("linux_x86_64_cpu")) is True
    assert bootstrap.is_cpu_build(with_version(report("linux_x86_64_cuda"), "2.13.0+cpu")) is True
    assert bootstrap.is_cpu_build(with_version(report("linux_x86_64_cpu"), "2.13.0+cu130")) is False
    assert bootstrap.is_cpu_build(with_version(report("linux_x86_64_cpu"), "2.13.0+rocm6.4")) is False


def test_another_system_or_machine_type_needs_no_cuda() -> None:
    """The same requirements do not hold on macOS; nor where their marker names another machine type."""
    mac = report("linux_x86_64_cuda")
    mac["environment"]["sys_platform"] = "darwin"
    assert bootstrap.is_cpu_build(mac) is True
    arm = report("linux_x86_64_cuda")
    metadata = arm["install"][0]["metadata"]
    metadata["requires_dist"] = [
        "nvidia-cudnn-cu13==9.20.0.48; platform_system == 'Linux' and platform_machine == 'x86_64'",
        'nvidia-nccl-cu13==2.29.7; extra == "distributed"',
    ]
    assert bootstrap.is_cpu_build(arm) is False
    arm["environment"]["platform_machine"] = "aarch64"
    assert bootstrap.is_cpu_build(arm) is True


class Pip:
    """Answers for some options, and the questions that were asked."""

    def __init__(self, configured: Any, index: Any, everything: Any = None) -> None:
        self.configured, self.index, self.everything = configured, index, everything
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, *options: str) -> dict[str, Any] | None:
        self.asked.append(options)
        if "--index-url" in options:
            return self.index
        return self.configured if "--no-deps" in options else self.everything


def test_a_cpu_build_that_pip_offers_is_taken_and_no_other_index_is_asked() -> None:
    """Where pip's own configuration offers a CPU build, that is the end of it."""
    pip = Pip(report("linux_x86_64_cpu"), None)
    options, words = bootstrap.choose_torch(pip, "http://index.invalid", lambda url: 190_000_000)
    assert options == ["--no-deps"]
    assert words == "torch 2.13.0+cpu, a CPU build, 0.2 GB in 1 packages"
    assert pip.asked == [("--no-deps",)]


def test_else_the_cpu_build_of_the_index_is_taken() -> None:
    """PyPI offers CUDA: the index of CPU builds is asked, and its answer taken from there."""
    pip = Pip(report("linux_x86_64_cuda"), report("linux_x86_64_cpu"))
    options, words = bootstrap.choose_torch(pip, "http://index.invalid", lambda url: None)
    assert options == ["--no-deps", "--index-url", "http://index.invalid"]
    assert "a CPU build of PyTorch's own index" in words


def test_else_the_cuda_build_is_taken_and_its_size_said() -> None:
    """Index out of reach: the CUDA build with all that it needs, and how large that is, before anything is fetched."""
    everything = report("linux_x86_64_cuda")
    everything["install"] = [{"download_info": {"url": f"u{i}"}, "metadata": {"name": f"n{i}"}} for i in range(20)]
    pip = Pip(report("linux_x86_64_cuda"), None, everything)
    options, words = bootstrap.choose_torch(pip, "http://index.invalid", lambda url: 150_000_000)
    assert options == []
    # 20 packages of 0.15 GB
    assert "taking the CUDA build with what it needs, 3.0 GB in 20 packages" in words
    assert "TORCH_INDEX_URL" in words


def test_an_index_that_serves_cuda_too_is_not_taken_for_cpu() -> None:
    """TORCH_INDEX_URL pointing at CUDA builds does not turn them into CPU builds."""
    cuda = with_version(report("linux_x86_64_cuda"), "2.13.0+cu130")
    pip = Pip(report("linux_x86_64_cuda"), cuda, report("linux_x86_64_cuda"))
    options, words = bootstrap.choose_torch(pip, "http://index.invalid", lambda url: None)
    assert options == []
    assert "1 packages, size not told, expect 3 GB" in words


def test_no_torch_at_all_is_an_error() -> None:
    """Neither offers one: an error that names the version and the index."""
    with pytest.raises(bootstrap.SetupError, match=r"no torch==2\.13\.0 .*\(http://index\.invalid\)"):
        bootstrap.choose_torch(Pip(None, None), "http://index.invalid", lambda url: None)


def test_sizes_in_words_never_turn_unknown_into_zero() -> None:
    """A size that is not told stays unknown, beside those that are."""
    assert bootstrap.sizes_in_words([2_000_000_000, None]) == "2.0 GB in 1 packages, and 1 of unknown size"
    assert bootstrap.sizes_in_words([None, None]) == "2 packages, size not told, expect 3 GB"


@contextlib.contextmanager
def index_of(folder: Path, requires: list[str], requests: list[str]) -> Iterator[str]:
    """A package index on 127.0.0.1 that tells a torch's metadata and size, and keeps what it was asked for."""
    python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    machine = os.uname().machine
    wheel = f"torch-2.13.0-{python}-{python}-manylinux_2_28_{machine}.whl"
    lines = [
        "Metadata-Version: 2.1",
        "Name: torch",
        "Version: 2.13.0",
        *(f"Requires-Dist: {line}" for line in requires),
    ]
    metadata = ("\n".join(lines) + "\n").encode()
    with zipfile.ZipFile(folder / wheel, "w") as archive:
        archive.writestr("torch-2.13.0.dist-info/METADATA", metadata)
        archive.writestr("torch-2.13.0.dist-info/WHEEL", f"Wheel-Version: 1.0\nTag: {python}-{python}-any\n")
        archive.writestr("torch-2.13.0.dist-info/RECORD", "")
    sha = hashlib.sha256(metadata).hexdigest()
    page = (
        f'<a href="/files/{wheel}" data-core-metadata="sha256={sha}" data-dist-info-metadata="sha256={sha}">{wheel}</a>'
    )
    answers = {
        "/simple/torch/": (page.encode(), "text/html"),
        f"/files/{wheel}": ((folder / wheel).read_bytes(), "application/octet-stream"),
        f"/files/{wheel}.metadata": (metadata, "application/octet-stream"),
    }

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self, with_body: bool) -> None:
            requests.append(f"{self.command} {self.path}")
            body, kind = answers.get(self.path, (b"", ""))
            self.send_response(200 if kind else 404)
            self.send_header("Content-Type", kind or "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def do_GET(self) -> None:
            self.answer(True)

        def do_HEAD(self) -> None:
            self.answer(False)

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()


@pytest.mark.server
@pytest.mark.skipif(not SERVER_PYTHON.exists(), reason="no .venv-sglang, whose pip is asked")
@pytest.mark.parametrize(
    ("requires", "is_cpu"),
    [(["filelock"], True), (['nvidia-cudnn-cu13==9.20.0.48; platform_system == "Linux"'], False)],
)
def test_the_real_pip_tells_the_build_without_downloading_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requires: list[str], is_cpu: bool
) -> None:
    """pip's report decides; the index sees the metadata and the size asked for, but never the wheel fetched."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    requests: list[str] = []
    with index_of(tmp_path, requires, requests) as url:
        told = bootstrap.ask_pip(SERVER_PYTHON, "--no-deps", "--ignore-installed", "--index-url", url)
        assert told is not None
        assert bootstrap.is_cpu_build(told) is is_cpu
        size = bootstrap.size_of(bootstrap.download_url(told["install"][0]))
    wheel = next(tmp_path.glob("*.whl"))
    assert size == wheel.stat().st_size
    assert f"GET /files/{wheel.name}.metadata" in requests
    assert f"GET /files/{wheel.name}" not in requests


@pytest.mark.server
@pytest.mark.skipif(not SERVER_PYTHON.exists(), reason="no .venv-sglang")
def test_the_servers_environment_lacks_nothing_but_what_sglang_does_not_import_on_a_cpu() -> None:
    """pip finds no requirement unmet, save SGLang's own CUDA packages and the torch that the old torchvision names."""
    check = [str(SERVER_PYTHON), "-m", "pip", "check"]
    lines = subprocess.run(check, capture_output=True, text=True, check=False).stdout.splitlines()
    others = [line for line in lines if not re.match(r"(sglang|torchvision) \S+ (requires|has requirement) ", line)]
    assert [line for line in others if line != "No broken requirements found."] == []
