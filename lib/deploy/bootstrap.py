"""Sets this project up on a machine that has Python and nothing else; does nothing, at once, where all is there.

    python3 lib/deploy/bootstrap.py [notebooks | server | models | all]

    notebooks   .venv         what notebooks and lib need, from requirements.txt (hashed), and this project, editable
    server      .venv-sglang  SGLang for a CPU, from requirements-server.txt (hashed), and a torch (`install_torch`)
    models      the cache     SmolLM2-135M-Instruct and the tiny test models (`lib/model/make_models.py`)

Standard library only, for the system's Python. An environment counts as there when its stamp is: the hash of what it
was made from, written last, by a rename. Without that stamp (never made, killed half-way, other inputs, moved folder)
it is made anew: a virtual environment holds its own path, so it cannot be built elsewhere and renamed. `.setup/` keeps
the lock, each step's output (`logs/`) and duration (`times.json`).
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
TORCH = "torch==2.13.0"
#: PyTorch's own index of CPU builds, asked where pip as configured offers none; TORCH_INDEX_URL overrides it.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
#: The Python that makes environments; not .venv's own, should that be the active one.
BASE_PYTHON: str = getattr(sys, "_base_executable", None) or sys.executable
STAMP = ".workbook-stamp.json"
PARTS = ("notebooks", "server", "models")
#: Seconds a step may take on two cores, until this machine's own times are known; then gigabytes that a part may take.
EXPECTED_S = {
    "notebooks: virtual environment": 4,
    "notebooks: packages": 15,
    "notebooks: this project": 3,
    "server: virtual environment": 4,
    "server: packages": 40,
    "server: torch": 30,
    "models": 45,
}
DISK_GB = {"notebooks": 1.0, "server": 3.0, "models": 0.6}


class SetupError(Exception):
    """The set-up cannot go on; the message says what is missing or failed and what to do, one line each."""

    exit_code = 1


class Missing(SetupError):
    """Something that only the machine's owner can install is not there."""

    exit_code = 2


class InUse(SetupError):
    """Another set-up of this folder is running."""

    exit_code = 2


def say(text: str) -> None:
    """One line for the person who waits."""
    sys.stdout.write(f"setup: {text}\n")
    sys.stdout.flush()


# --- what the machine must have ---------------------------------------------------------------------------------------


def apt(package: str) -> str:
    """The command that installs a Debian package, as this user has to type it."""
    return f"{'' if os.geteuid() == 0 else 'sudo '}apt-get install -y {package}"


def missing_parts(
    version: tuple[int, int], has_module: Callable[[str], bool], free_gb: float, parts: Sequence[str]
) -> list[str]:
    """What this machine lacks for setting up `parts`: one line each, with the command that installs it.

    Args:
        version: major and minor version of the Python that would make the environments.
        has_module: whether that Python has a module of that name.
        free_gb: free space where the environments go, in GB.
        parts: out of PARTS, those that have to be made.
    """
    lines = []
    if version < (3, 11):
        lines.append(f"Python 3.11 or newer (this is {version[0]}.{version[1]}): {apt('python3.11 python3.11-venv')}")
    elif "server" in parts and version != (3, 11):
        lines.append(
            f"Python 3.11 for the embedded server (this is {version[0]}.{version[1]}; torchvision 0.16.2 needs "
            f"3.11): {apt('python3.11 python3.11-venv')}, then 'make PYTHON=python3.11 ...'"
        )
    if set(parts) & {"notebooks", "server"} and not (has_module("venv") and has_module("ensurepip")):
        lines.append(f"python3-venv, which makes virtual environments: {apt('python3-venv')}")
    needed = sum(DISK_GB[part] for part in parts)
    if free_gb < needed:
        lines.append(f"{needed:.1f} GB of free disk space for {ROOT} ({free_gb:.1f} GB are free): free some")
    return lines


def check_machine(parts: Sequence[str]) -> None:
    """Raise `Missing` with all that the machine lacks for setting up `parts`."""
    lines = missing_parts(
        sys.version_info[:2],
        lambda name: importlib.util.find_spec(name) is not None,
        shutil.disk_usage(ROOT).free / 1e9,
        parts,
    )
    if lines:
        raise Missing("\n".join(f"missing: {line}" for line in lines))


# --- one set-up at a time ---------------------------------------------------------------------------------------------


@contextmanager
def lock(folder: Path) -> Iterator[int]:
    """Hold `.setup/lock`, which names pid and start; yields its descriptor, which steps inherit.

    A step whose set-up was killed thus keeps the lock for as long as it may still write.

    Raises:
        InUse: another set-up holds it.
    """
    folder.mkdir(exist_ok=True)
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 200).decode(errors="replace").strip() or "unknown pid"
            raise InUse(f"another set-up of {ROOT} is running: {holder}. Wait for it, then run this again.") from None
        since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"pid {os.getpid()}, since {since}\n".encode(), 0)
        yield handle
    finally:
        os.close(handle)


# --- steps ------------------------------------------------------------------------------------------------------------


def die_with_parent() -> None:
    """Let a step end when the set-up is killed: an orphaned pip would write into an environment that is made anew."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def clean_environment(more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without what would lead packages into, or out of, the environment being made."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET")}
    return {**kept, "PIP_USER": "0", **more}


class Steps:
    """Runs the steps of a set-up: a line before and after each, its output in a log, its duration in times.json."""

    def __init__(self, folder: Path, lock_handle: int) -> None:
        self.folder, self.lock_handle = folder, lock_handle
        self.file = folder / "times.json"
        try:
            self.times: dict[str, Any] = dict(json.loads(self.file.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            self.times = {}

    @contextmanager
    def step(self, name: str, note: str = "") -> Iterator[None]:
        """Announce a step with how long it may take, and keep how long it took."""
        earlier = self.times.get(name, {}).get("seconds")
        about = f"took {earlier:.0f} s last time" if earlier else f"may take {EXPECTED_S.get(name, 10)} s"
        say(f"{name} ({about}{note and ', ' + note})")
        began = time.monotonic()
        yield
        seconds = time.monotonic() - began
        say(f"{name}: done in {seconds:.1f} s")
        ended = datetime.now().astimezone().isoformat(timespec="seconds")
        self.times[name] = {"seconds": round(seconds, 2), "ended": ended}
        write_whole(self.file, json.dumps(self.times, indent=2) + "\n")

    def command(self, argv: Sequence[str], log: str, environment: Mapping[str, str] | None = None) -> None:
        """Run one command, its output in `logs/<log>.log`; every 30 s a line says that it still runs.

        Raises:
            SetupError: it failed; the message ends with its last lines.
        """
        path = self.folder / "logs" / f"{log}.log"
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as output:
            output.write(f"$ {shlex.join(argv)}\n".encode())
            output.flush()
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=clean_environment(environment or {}),
                pass_fds=[self.lock_handle],
                preexec_fn=die_with_parent,
            )
            began = time.monotonic()
            try:
                while True:
                    try:
                        code = process.wait(timeout=30)
                        break
                    except subprocess.TimeoutExpired:
                        say(f"  still at it after {time.monotonic() - began:.0f} s; its output: {path}")
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if code:
            last = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()[1:][-12:]
            raise SetupError("\n".join([f"'{shlex.join(argv[:6])} ...' ended with {code}; all of it: {path}", *last]))


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all, also after a power cut."""
    fresh = path.with_name(f".{path.name}.new")
    with fresh.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


# --- environments -----------------------------------------------------------------------------------------------------


def environment_python(folder: Path) -> Path:
    """The Python of a virtual environment."""
    return folder / "bin" / "python"


def inputs_hash(folder: Path, files: Sequence[Path], *more: str) -> str:
    """The hash of what an environment is made from: its place, files, and other text. Another hash: made anew."""
    digest = hashlib.sha256(str(folder).encode())
    for text in [*(file.read_bytes() for file in files), *(item.encode() for item in more)]:
        digest.update(hashlib.sha256(text).digest())
    return digest.hexdigest()


def is_made(folder: Path, inputs: str) -> bool:
    """Whether an environment is there, complete, made from `inputs`, and its Python still on this machine."""
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(stamp.get("inputs") == inputs and environment_python(folder).exists())


def users_of(folder: Path) -> list[str]:
    """The processes that were started from an environment, as 'pid (command)'; none where there is no /proc."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            argv = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended meanwhile
            continue
        if argv[0].startswith(f"{folder}/") and int(process.name) != os.getpid():
            found.append(f"{process.name} ({' '.join(argv)[len(str(folder)) + 1 :][:60].strip()})")
    return found


def wait_until_unused(folder: Path, patience_s: float = 10.0) -> None:
    """Wait for what a killed set-up left running in an environment.

    Raises:
        InUse: after `patience_s` processes still run from it: a JupyterLab or a server, which must not lose its files.
    """
    deadline = time.monotonic() + patience_s
    while users := users_of(folder):
        if time.monotonic() > deadline:
            raise InUse(
                f"{folder.name} has to be made anew, but is in use: {', '.join(users)}. Stop that, then run this again."
            )
        time.sleep(0.2)


def remove(folder: Path, trash: Path) -> None:
    """Take a folder away at once by a rename, then delete it; interrupted, it is trash for the next call."""
    if folder.exists() or folder.is_symlink():
        trash.mkdir(parents=True, exist_ok=True)
        folder.rename(trash / f"{folder.name}-{time.time_ns()}")
    shutil.rmtree(trash, ignore_errors=True)


def make_environment(steps: Steps, part: str, folder: Path, inputs: str, fill: Callable[[Path], None]) -> None:
    """Make a virtual environment anew, fill it, and stamp it."""
    with steps.step(f"{part}: virtual environment"):
        if folder.exists():
            say(f"  {folder.name} is unfinished or made from other inputs: making it anew")
            wait_until_unused(folder)
        remove(folder, steps.folder / "trash")
        steps.command([BASE_PYTHON, "-m", "venv", str(folder)], f"{part}-venv")
    fill(environment_python(folder))
    made = {"inputs": inputs, "made_by": sys.version.split()[0]}
    write_whole(folder / STAMP, json.dumps(made, indent=2) + "\n")


def hashed_block(requirements: str, name: str) -> str:
    """The lines of one package in a compiled, hashed requirements file."""
    found = re.search(rf"^{re.escape(name)}==(?:[^\n]*\\\n)*[^\n]*", requirements, re.MULTILINE)
    if not found:
        raise SetupError(f"requirements.txt names no {name}: compile it again with 'make lock'")
    return found.group(0) + "\n"


def uv_environment(python: Path) -> dict[str, str]:
    """pip's package index and certificates in uv's words: uv does not read pip's configuration."""
    result = subprocess.run(
        [str(python), "-m", "pip", "config", "list"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    configured = dict(re.findall(r"^(?:\w+|:env:)\.([a-z-]+)='(.*)'$", result.stdout, re.MULTILINE))
    wanted = {"UV_DEFAULT_INDEX": configured.get("index-url"), "SSL_CERT_FILE": configured.get("cert")}
    return {name: value for name, value in wanted.items() if value and name not in os.environ}


def install_hashed(steps: Steps, part: str, python: Path, requirements: Path, *options: str) -> None:
    """Install a hashed requirements file: by uv, which pip gets from the same hashes; by pip alone where uv cannot.

    All is compiled to bytecode, as pip does it: a first launch is then as quick as the next, also where
    PYTHONDONTWRITEBYTECODE keeps Python from writing any (a `workbook` command of 0.4 s took 2 s of CPU there).
    """
    with tempfile.TemporaryDirectory() as folder:
        only_uv = Path(folder) / "uv.txt"
        only_uv.write_text(
            hashed_block((ROOT / "requirements.txt").read_text(encoding="utf-8"), "uv"), encoding="utf-8"
        )
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--require-hashes"]
        uv = [str(python), "-m", "uv", "pip", "install", "--python", str(python), "--require-hashes", "--compile-bytecode"]
        try:
            steps.command([*pip, "--only-binary", ":all:", "-r", str(only_uv)], f"{part}-uv")
            steps.command([*uv, *options, "-r", str(requirements)], f"{part}-packages", uv_environment(python))
            return
        except SetupError as error:
            say(f"  uv cannot do it here ({str(error).splitlines()[-1].strip()}); pip can, in about a minute more")
        steps.command([*pip, *options, "-r", str(requirements)], f"{part}-packages")


def notebooks_inputs() -> str:
    """What .venv is made from: requirements.txt, and what pyproject.toml says about the package (not about checks)."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    tables = re.split(r"^(?=\[)", text, flags=re.MULTILINE)
    package = [table for table in tables if re.match(r"\[(build-system|project|tool\.setuptools)", table)]
    return inputs_hash(ROOT / ".venv", [ROOT / "requirements.txt"], *package)


def quiet_lab(python: Path) -> None:
    """Switch off JupyterLab's announcements: they ask a foreign server, and their dialog blocks every click."""
    folder = python.parent.parent / "etc" / "jupyter" / "labconfig"
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
    write_whole(folder / "page_config.json", json.dumps(settings) + "\n")


def make_notebooks(steps: Steps) -> None:
    """Make .venv: what the notebooks and lib need, and this project, editable."""

    def fill(python: Path) -> None:
        with steps.step("notebooks: packages"):
            install_hashed(steps, "notebooks", python, ROOT / "requirements.txt")
        with steps.step("notebooks: this project"):
            pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
            steps.command([*pip, "--no-deps", "--no-build-isolation", "-e", str(ROOT)], "notebooks-project")
            steps.command([str(python), "-m", "compileall", "-q", str(ROOT / "lib")], "notebooks-bytecode")
            quiet_lab(python)

    make_environment(steps, "notebooks", ROOT / ".venv", notebooks_inputs(), fill)


def server_inputs() -> str:
    """What .venv-sglang is made from."""
    return inputs_hash(ROOT / ".venv-sglang", [ROOT / "requirements-server.txt"], TORCH)


def make_server(steps: Steps) -> None:
    """Make .venv-sglang: SGLang as published and what it imports on a CPU, then torch."""

    def fill(python: Path) -> None:
        with steps.step("server: packages"):
            install_hashed(steps, "server", python, ROOT / "requirements-server.txt", "--no-deps")
        install_torch(steps, python)

    make_environment(steps, "server", ROOT / ".venv-sglang", server_inputs(), fill)


# --- torch ------------------------------------------------------------------------------------------------------------


def is_cpu_build(report: Mapping[str, Any]) -> bool:
    """Whether the torch that pip would take is a CPU build.

    A local version says so (`2.13.0+cpu`; `+cu130` or `+rocm6` say the contrary). Without one it is what PyPI serves:
    for Linux a CUDA build, which requires NVIDIA's packages there; for other systems a CPU build, which requires none.

    Args:
        report: what `pip install --dry-run --report` printed, torch among its `install` entries.
    """
    metadata = next(entry["metadata"] for entry in report["install"] if entry["metadata"]["name"].lower() == "torch")
    local = metadata["version"].partition("+")[2]
    if local:
        return bool(local.startswith("cpu"))
    machine = report.get("environment", {})
    on_linux = machine.get("sys_platform", "linux") == "linux"
    gpu = [
        line for line in metadata.get("requires_dist", []) if re.match(r"(nvidia|cuda|pytorch-triton)-", line.lower())
    ]
    return not any(on_linux and marker_allows(line, machine.get("platform_machine", "x86_64")) for line in gpu)


def marker_allows(requirement: str, machine: str) -> bool:
    """Whether a requirement's marker can hold on this machine type (the only variable looked at; extras never hold)."""
    marker = requirement.partition(";")[2]
    if "extra ==" in marker:
        return False
    named = re.findall(r"platform_machine\s*(==|!=)\s*['\"]([^'\"]+)['\"]", marker)
    equal = [value for operator, value in named if operator == "=="]
    return (not equal or machine in equal) and ("!=", machine) not in named


def ask_pip(python: Path, *options: str) -> dict[str, Any] | None:
    """What pip would install for torch, as its own report; nothing is downloaded. None if it finds nothing."""
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--dry-run", "--report", "-"]
    result = subprocess.run(
        [*pip, "--only-binary", ":all:", *options, TORCH],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=die_with_parent,
    )
    try:
        report: dict[str, Any] = json.loads(result.stdout)
    except ValueError:
        return None
    return report if result.returncode == 0 and report.get("install") else None


def size_of(url: str) -> int | None:
    """The size of what a URL names, in bytes, without fetching it; None if it is not told."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=10) as answer:
            length = answer.headers.get("Content-Length")
            return int(length) if length else None
    except (OSError, ValueError):
        return None


def sizes_in_words(sizes: Sequence[int | None]) -> str:
    """The total of some sizes in bytes, with what is unknown said."""
    known = [size for size in sizes if size is not None]
    if not known:
        return f"{len(sizes)} packages, size not told, expect 3 GB"
    total = f"{sum(known) / 1e9:.1f} GB in {len(known)} packages"
    return total if len(known) == len(sizes) else f"{total}, and {len(sizes) - len(known)} of unknown size"


def choose_torch(
    ask: Callable[..., dict[str, Any] | None], index: str, size: Callable[[str], int | None]
) -> tuple[list[str], str]:
    """Which torch to take: pip's options for it, and what to tell the user.

    A CPU build where pip as configured offers one; else one from PyTorch's index; else the CUDA build, its size said.

    Args:
        ask: pip's report for some options, or None.
        index: PyTorch's index of CPU builds, or its replacement.
        size: bytes behind a URL, or None.

    Raises:
        SetupError: pip finds no such torch at all.
    """
    offered = ask("--no-deps")
    if offered and is_cpu_build(offered):
        version = offered["install"][0]["metadata"]["version"]
        return [
            "--no-deps"
        ], f"torch {version}, a CPU build, {sizes_in_words([size(download_url(offered['install'][0]))])}"
    from_index = ask("--no-deps", "--index-url", index, "--retries", "1", "--timeout", "15")
    if from_index and is_cpu_build(from_index):
        entry = from_index["install"][0]
        return (
            ["--no-deps", "--index-url", index],
            f"torch {entry['metadata']['version']}, a CPU build of PyTorch's own index, "
            f"{sizes_in_words([size(download_url(entry))])}",
        )
    everything = ask()
    if not everything:
        raise SetupError(
            f"pip finds no {TORCH} for this Python and machine, neither as configured nor at TORCH_INDEX_URL ({index})"
        )
    sizes = [size(download_url(entry)) for entry in everything["install"]]
    return [], (
        f"no CPU build of torch is offered here: taking the CUDA build with what it needs, {sizes_in_words(sizes)}; "
        "Ctrl-C and TORCH_INDEX_URL=<an index with CPU builds> avoid that"
    )


def download_url(entry: Mapping[str, Any]) -> str:
    """Where pip would take a package from."""
    return str(entry.get("download_info", {}).get("url", ""))


def install_torch(steps: Steps, python: Path) -> None:
    """Install torch into an environment; the only place of the project that does."""
    with steps.step("server: torch", "longer where no CPU build is offered"):
        index = os.environ.get("TORCH_INDEX_URL") or TORCH_CPU_INDEX
        options, words = choose_torch(lambda *more: ask_pip(python, *more), index, size_of)
        say(f"  {words}")
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--only-binary", ":all:"]
        steps.command([*pip, *options, TORCH], "server-torch")


# --- models -----------------------------------------------------------------------------------------------------------


def models_command(*options: str) -> list[str]:
    """The command that makes models; the server's Python runs it, since it alone has torch."""
    return [str(environment_python(ROOT / ".venv-sglang")), str(ROOT / "lib" / "model" / "make_models.py"), *options]


def models_are_made() -> bool:
    """Whether every model is in the cache, by the maker's own word."""
    return subprocess.run(models_command("--check"), stdin=subprocess.DEVNULL, check=False).returncode == 0


def make_models(steps: Steps) -> None:
    """Make the models that are missing; the maker writes its own progress."""
    with steps.step("models"):
        result = subprocess.run(
            models_command(),
            stdin=subprocess.DEVNULL,
            check=False,
            pass_fds=[steps.lock_handle],
            preexec_fn=die_with_parent,
        )
        if result.returncode:
            raise SetupError(f"the models could not be made (see above; exit code {result.returncode})")


# --- all of it --------------------------------------------------------------------------------------------------------


def unmade(parts: Sequence[str]) -> list[str]:
    """Out of `parts`, those that have to be made; models need the server's environment."""
    wanted = [part for part in PARTS if part in parts or (part == "server" and "models" in parts)]
    made = {
        "notebooks": lambda: is_made(ROOT / ".venv", notebooks_inputs()),
        "server": lambda: is_made(ROOT / ".venv-sglang", server_inputs()),
        "models": lambda: is_made(ROOT / ".venv-sglang", server_inputs()) and models_are_made(),
    }
    return [part for part in wanted if not made[part]()]


def set_up(parts: Sequence[str]) -> None:
    """Make what is missing out of `parts`, in order."""
    if not unmade(parts):
        return
    with lock(ROOT / ".setup") as handle:
        todo = unmade(parts)
        check_machine(todo)
        began = time.monotonic()
        steps = Steps(ROOT / ".setup", handle)
        makers = {"notebooks": make_notebooks, "server": make_server, "models": make_models}
        for part in todo:
            makers[part](steps)
        if todo:
            say(f"{', '.join(todo)} ready in {time.monotonic() - began:.0f} s")


def stop(number: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM ends a set-up as Ctrl-C does: its running step first."""
    raise KeyboardInterrupt


def main(arguments: list[str] | None = None) -> int:
    """0 all there; 1 a step failed; 2 something is missing or another set-up runs; 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="bootstrap", description="Set this project up; does nothing where all is there."
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} or all (default)")
    args = parser.parse_args(arguments)
    unknown = sorted(set(args.parts) - {*PARTS, "all"})
    if unknown:
        parser.error(f"unknown part {', '.join(unknown)}; known: {', '.join(PARTS)}, all")
    signal.signal(signal.SIGTERM, stop)
    try:
        set_up(PARTS if not args.parts or "all" in args.parts else args.parts)
    except SetupError as error:
        for line in str(error).splitlines():
            sys.stderr.write(f"setup: {line}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"setup: {error}; what is unfinished is made anew by the next call\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("setup: interrupted; the next call goes on\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
