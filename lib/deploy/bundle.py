"""A bundle for a host without a network: from the package index, only what the chosen programs really open there.

    host.json (describe_host.py) + plan (params/<profile>/bundle.yaml)
      -> lock       versions and hashes, resolved for the host's Python and platform, the host's own versions preferred
      -> imports    what the plan's programs open, traced in an environment of those versions (or on the host itself)
      -> selection  packages that the host lacks or has in a version that a carried package refuses; of those, the files
                    that were opened and the text beside them: binaries that nothing opened stay out
      -> archives   sorted, without times and owners, split into parts; bundle.json with every hash; install.py

The same lock, imports and host give the same bytes. What was left out is in bundle.json with its reason and size.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.markers import UndefinedEnvironmentName, default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from lib.deploy import bundle_install, import_trace
from lib.errors import BadInput, UnreadableFile, WorkbookError
from lib.hosts import local
from lib.params import ROOT, read_yaml, validated
from lib.records import Record

SCHEMA = 1
MIB = 1 << 20
#: A file of this size that no traced program opened is left out; smaller text travels with its package.
LARGE = MIB
#: A folder of code that no traced program entered is left out from this size on (with all below it).
LARGE_FOLDER = 256 << 10
#: Files that only a program that opens them needs, whatever their size.
BINARY = (".so", ".a", ".o", ".bin", ".cubin", ".fatbin", ".dll", ".pyd", ".exe", ".dylib")
CODE = (".py", ".pyi")
#: What compilers on the host read (JIT kernels): no Python program is seen opening it, so all of a package's travels.
SOURCES = (".h", ".hh", ".hpp", ".cuh", ".cu", ".inl", ".inc", ".ipp", ".cpp", ".cc", ".c", ".def", ".jinja", ".cmake", ".pyx", ".pxd")
#: xz's preset 9 makes it a percent smaller in three times the time.
PRESET = 6
DICTIONARY = 128 * MIB


class Program(Record):
    """One thing that the host will run: Python code, and how it may end here (a machine without the host's GPU)."""

    name: str
    code: str
    ends: str = "well"  # or the text with which it ends here


class Plan(Record):
    """bundle.yaml: what is installed, what is run, and how large the bundle may become."""

    requirements: list[str]
    programs: list[Program]
    part_mib: float = 16.0
    limit_mib: float = 52.0


class Package(Record):
    """One distribution of the environment: its files (relative to site-packages) with their sizes."""

    name: str
    version: str
    requires: list[str]
    files: dict[str, int]


def normalised(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_host(path: Path) -> dict[str, Any]:
    """host.json as describe_host.py writes it.

    Raises:
        UnreadableFile: not there, or not such a file.
    """
    try:
        host = json.loads(path.read_text(encoding="utf-8"))
        version = ".".join(str(host["python"]).split(".")[:2])
        packages = {normalised(name): value for name, value in dict(host["packages"]).items()}
        return {**host, "python_minor": version, "packages": packages, "machine": str(host["machine"])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableFile(
            f"{path} describes a host", f"{type(error).__name__}: {error}", "make it with 'workbook bundle --describe-host'"
        ) from error


def read_plan(path: Path) -> Plan:
    """The plan; faults as every parameter file tells them."""
    plan: Plan = validated(Plan, read_yaml(path), str(path))
    return plan


# --- lock -------------------------------------------------------------------------------------------------------------


def uv() -> list[str]:
    """The command line of uv, which resolves for another Python and platform."""
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.is_file() else shutil.which("uv")
    if not found:
        raise BadInput("uv, which resolves for another Python", "none", "pip install uv")
    return [found]


def platform_tag(host: Mapping[str, Any]) -> str:
    """uv's name of the host's platform: the newest manylinux that its C library carries."""
    known = (17, 28, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40)
    words = str((host.get("libc") or ["", ""])[1]).split(".")
    minor = int(words[1]) if len(words) > 1 and words[1].isdigit() else 28
    fits = [n for n in known if n <= minor] or [17]
    return f"{host['machine']}-manylinux{'2014' if fits[-1] == 17 else f'_2_{fits[-1]}'}"


def resolve(plan: Plan, host: Mapping[str, Any], lock: Path) -> None:
    """Writes the lock: every version with its hashes; versions of the host, then those of an earlier lock, come first.

    Raises:
        BadInput: the requirements contradict each other, or the index lacks one; uv's own words.
    """
    earlier = lock.read_text(encoding="utf-8") if lock.exists() else ""
    pins = {m[1]: m[2] for m in re.finditer(r"^([A-Za-z0-9_.-]+)==([^ \\;]+)", earlier, re.MULTILINE)}
    pins.update({name: version.split("+")[0] for name, version in host["packages"].items() if version})
    with tempfile.TemporaryDirectory() as folder:
        wanted, out = Path(folder) / "in.txt", Path(folder) / "out.txt"
        wanted.write_text("\n".join(plan.requirements) + "\n", encoding="utf-8")
        out.write_text("".join(f"{name}=={version}\n" for name, version in sorted(pins.items())), encoding="utf-8")
        done = _run(
            [*uv(), "pip", "compile", "-q", str(wanted), "-o", str(out), "--generate-hashes", "--no-header", "--no-annotate",
             "--python-version", host["python_minor"], "--python-platform", platform_tag(host)],
            timeout=600,
        )  # fmt: skip
        if done.returncode:
            raise BadInput(
                f"versions of {', '.join(plan.requirements)} that fit together", _last_words(done), "change the plan's requirements"
            )
        text = "\n".join(line for line in out.read_text(encoding="utf-8").splitlines() if not line.startswith("--"))
    head = f"# Resolved for Python {host['python_minor']}, {platform_tag(host)}, by 'workbook bundle --resolve'. Not edited by hand.\n"
    local.write_atomic(lock, head + text.strip() + "\n")


def _run(argv: Sequence[str], timeout: float, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(argv), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        timeout=timeout, check=False, env=dict(environment) if environment is not None else None,
    )  # fmt: skip


def _last_words(done: subprocess.CompletedProcess[str], lines: int = 6) -> str:
    return " / ".join(line.strip() for line in done.stdout.strip().splitlines()[-lines:]) or f"exit code {done.returncode}, no output"


# --- environment ------------------------------------------------------------------------------------------------------


def make_environment(lock: Path, host: Mapping[str, Any], site: Path) -> None:
    """Unpacks every wheel of the lock for the host's Python and platform into `site`; no interpreter of it is needed.

    Raises:
        BadInput: the index lacks a wheel for that platform, or serves other bytes than the lock says.
    """
    stamp = site.with_name(f"{site.name}.lock-sha256")
    digest = hashlib.sha256(lock.read_bytes()).hexdigest()
    if site.is_dir() and stamp.exists() and stamp.read_text() == digest:
        return
    shutil.rmtree(site, ignore_errors=True)
    site.parent.mkdir(parents=True, exist_ok=True)
    done = _run(
        [*uv(), "pip", "install", "-q", "--target", str(site), "--no-deps", "--require-hashes", "--only-binary", ":all:",
         "--python-version", host["python_minor"], "--python-platform", platform_tag(host), "-r", str(lock)],
        timeout=3600,
    )  # fmt: skip
    if done.returncode:
        raise BadInput(f"all wheels of {lock.name}", _last_words(done), "see the message; --resolve makes a new lock")
    stamp.write_text(digest)


def read_packages(site: Path) -> dict[str, Package]:
    """Every distribution in a site-packages folder, by normalised name, with the files that its RECORD lists."""
    found = {}
    for distribution in importlib.metadata.distributions(path=[str(site)]):
        files = {}
        for file in distribution.files or []:
            path = PurePosixPath(str(file))
            if path.is_absolute() or ".." in path.parts or "__pycache__" in path.parts:
                continue
            try:
                files[str(path)] = (site / path).stat().st_size
            except OSError:
                continue
        name = normalised(distribution.metadata["Name"])
        found[name] = Package(
            name=name, version=distribution.version, requires=list(distribution.requires or []), files=dict(sorted(files.items()))
        )
    return dict(sorted(found.items()))


def owners(packages: Mapping[str, Package]) -> dict[str, str]:
    """Which distribution a file belongs to."""
    return {file: package.name for package in packages.values() for file in package.files}


def link_farm(packages: Mapping[str, Package], names: Iterable[str], site: Path, farm: Path) -> None:
    """A folder for PYTHONPATH in which only these distributions exist: links to whole folders, or below shared ones."""
    chosen = set(names)
    tree: dict[str, Any] = {}
    for package in packages.values():
        for file in package.files:
            node = tree
            *parents, leaf = PurePosixPath(file).parts
            for part in parents:
                node = node.setdefault(part, {})
            node[leaf] = package.name

    def belong(node: Any) -> set[str]:
        return {node} if isinstance(node, str) else set().union(*(belong(child) for child in node.values()))

    def link(node: Mapping[str, Any], below: Path, source: Path) -> None:
        below.mkdir(parents=True, exist_ok=True)
        for name, child in node.items():
            who = belong(child)
            if who <= chosen:
                (below / name).symlink_to(source / name)
            elif who & chosen:
                link(child, below / name, source / name)

    shutil.rmtree(farm, ignore_errors=True)
    link(tree, farm, site.resolve())


# --- trace ------------------------------------------------------------------------------------------------------------


def find_python(minor: str) -> Path:
    """An interpreter of that version on this machine.

    Raises:
        BadInput: there is none; says how the trace can be made elsewhere.
    """
    places = [Path(p) for p in (shutil.which(f"python{minor}"),) if p]
    places += sorted(Path.home().glob(f".pyenv/versions/{minor}.*/bin/python"))
    found = _run([*uv(), "python", "find", "--no-project", minor], timeout=60)
    places += [Path(found.stdout.strip())] if not found.returncode else []
    for place in places:
        asked = _run([str(place), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], timeout=60)
        if not asked.returncode and asked.stdout.strip() == minor:
            return place
    raise BadInput(
        f"a Python {minor}, to import what the host would import", "none on this machine",
        "install one, or trace on the host (docs/bundle.md) and give --imports",
    )  # fmt: skip


def cuda_stub(site: Path, folder: Path) -> Path | None:
    """A libcuda.so.1 whose functions say that there is no device: libraries that need it can be loaded here.

    None where there is no C compiler; what needs the driver then fails to load and shows as missing.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        return None
    symbols = set()
    for file in site.rglob("*.so*"):
        if file.stat().st_size < 600 * MIB:
            data = file.read_bytes()
            if b"libcuda.so.1" in data:
                symbols |= set(re.findall(rb"\0(cu[A-Z][A-Za-z0-9_]{3,60})(?=\0)", data))
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "stub.c"
    source.write_text("".join(f"int {name.decode()}(void) {{ return 100; }}\n" for name in sorted(symbols)))
    library = folder / "libcuda.so.1"
    done = _run([compiler, "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(source)], timeout=120)
    return library if not done.returncode else None


class Tracer:
    """Runs the plan's programs in an environment of chosen distributions and reads what they opened."""

    def __init__(self, site: Path, host: Mapping[str, Any], work: Path, python: Path | None = None) -> None:
        self.site, self.host, self.work = site, host, work
        work.mkdir(parents=True, exist_ok=True)
        bare = work / "bare"
        if not (bare / "bin" / "python").exists():
            base = python or find_python(host["python_minor"])
            done = _run([str(base), "-m", "venv", "--without-pip", str(bare)], timeout=120)
            if done.returncode:
                raise BadInput(f"{base} makes a virtual environment", _last_words(done))
        self.python = bare / "bin" / "python"
        hook = work / "hook"
        hook.mkdir(exist_ok=True)
        shutil.copy(import_trace.__file__, hook / "sitecustomize.py")
        stub = work / "stub"
        if not (stub / "libcuda.so.1").exists() and host.get("gpus"):
            cuda_stub(site, stub)

    def run(self, program: Program, farm: Path, rest: Path | None = None) -> tuple[bool, str, set[str]]:
        """Whether it ended as the plan says, its output, and the opened files relative to site-packages.

        What was run once in an environment with the same entries is not run again: an interrupted trace goes on.
        """
        entries = sorted(str(p.relative_to(farm)) for p in farm.rglob("*") if p.is_symlink())
        key = hashlib.sha256(json.dumps([program.name, program.code, program.ends, entries]).encode()).hexdigest()
        kept = self.work / "runs" / f"{key[:24]}.json"
        if kept.exists() and rest is None:
            earlier = json.loads(kept.read_text(encoding="utf-8"))
            return earlier["ok"], earlier["output"], set(earlier["opened"])
        folder = Path(tempfile.mkdtemp(dir=self.work, prefix="trace-"))
        gpus = self.host.get("gpus") or []
        environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
        environment |= {
            "PYTHONPATH": os.pathsep.join(str(p) for p in (self.work / "hook", farm, rest) if p), "WORKBOOK_IMPORT_TRACE": str(folder),
            "WORKBOOK_IMPORT_PREFIXES": f"{farm}{os.pathsep}{self.site.resolve()}", "HF_HUB_OFFLINE": "1",
            "PYTHONDONTWRITEBYTECODE": "1", "WORKBOOK_ROOT": str(ROOT), "JUPYTER_PATH": f"{farm}/share/jupyter",
            "LD_LIBRARY_PATH": str(self.work / "stub"), "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        if gpus:
            major, minor = str(gpus[0]["compute_capability"]).split(".")
            environment["WORKBOOK_PRETEND_GPU"] = f"{gpus[0]['name']},{major},{minor},{len(gpus)}"
        try:
            done = subprocess.run(
                [str(self.python), "-c", program.code], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, errors="replace", timeout=300, check=False, env=environment, cwd=folder,
            )  # fmt: skip
            output, well = done.stdout, done.returncode == 0
        except subprocess.TimeoutExpired as error:
            output, well = f"{error}", False
        roots = (f"{farm}/", f"{self.site.resolve()}/")
        opened = set()
        for path in import_trace.read_trace(str(folder)):
            for root in roots:
                if path.startswith(root):
                    opened.add(_source_of(path[len(root) :]))
        shutil.rmtree(folder, ignore_errors=True)
        as_planned = well if program.ends == "well" else program.ends in output
        if rest is not None:
            return as_planned, output, opened
        kept.parent.mkdir(exist_ok=True)
        local.write_atomic(kept, json.dumps({"ok": as_planned, "output": output[-20000:], "opened": sorted(opened)}))
        return as_planned, output, opened


def _source_of(path: str) -> str:
    """The .py of a compiled file; any other path as it is."""
    found = re.fullmatch(r"(?:(.*)/)?__pycache__/(.+?)\.cpython-\d+(?:\.opt-\d)?\.pyc", path)
    return (f"{found[1]}/" if found[1] else "") + f"{found[2]}.py" if found else path


MISSING = re.compile(r"No module named '([\w.]+)'|No package metadata was found for (?:The ')?([\w.-]+)|PackageNotFoundError: ([\w.-]+)")


def least_packages(
    tracer: Tracer, plan: Plan, packages: Mapping[str, Package], host: Mapping[str, Any], say: Callable[[str], None]
) -> tuple[set[str], dict[str, set[str]]]:
    """The fewest distributions with which every program ends as planned, and the files that each program opened.

    First all are there; of those that the programs touch and the host lacks, the large ones are then taken away together,
    and one comes back each time a program fails for want of it.

    Raises:
        WorkbookError: a program fails with everything there, or for another reason than a missing package.
    """
    belongs = owners(packages)
    tops: dict[str, set[str]] = {}
    for file, name in belongs.items():
        tops.setdefault(PurePosixPath(file).parts[0].split(".")[0], set()).add(name)
    farm = tracer.work / "farm"
    opened: dict[str, set[str]] = {}
    link_farm(packages, packages, tracer.site, farm)
    for program in plan.programs:
        ok, output, opened[program.name] = tracer.run(program, farm)
        say(f"{program.name}: {'as planned' if ok else 'FAILED'} with everything there, {len(opened[program.name])} files opened")
        if not ok:
            raise WorkbookError(f"program {program.name!r} ends {program.ends!r}", " / ".join(output.strip().splitlines()[-8:]))
    touched = {belongs[f] for files in opened.values() for f in files if f in belongs and ".dist-info/" not in f}
    roots = {normalised(Requirement(r).name) for r in plan.requirements}
    size = {name: sum(packages[name].files.values()) for name in packages}
    optional = {n for n in touched - roots if n not in host["packages"] and size[n] > LARGE}
    hidden = (set(packages) - touched - roots - set(host["packages"])) | optional
    say(f"taken away: {', '.join(sorted(optional)) or 'nothing'}")
    settled = False
    while not settled:  # the last pass sees all programs with the same packages: one that came back may wake an optional import
        settled = True
        for program in plan.programs:
            while True:
                link_farm(packages, set(packages) - hidden, tracer.site, farm)
                ok, output, files = tracer.run(program, farm)
                if ok:
                    opened[program.name] = files
                    break
                back = _wanted(output, packages, tops, hidden)
                if not back:
                    raise WorkbookError(
                        f"program {program.name!r} ends {program.ends!r} without {', '.join(sorted(optional & hidden))}",
                        " / ".join(output.strip().splitlines()[-8:]),
                        "it needs one of these and does not say which: name it in the plan's requirements",
                    )
                hidden -= back
                settled = False
                say(f"needed by {program.name}: {', '.join(sorted(back))}")
    touched = {belongs[f] for files in opened.values() for f in files if f in belongs and ".dist-info/" not in f}
    return (touched - hidden) | roots, opened


def _wanted(output: str, packages: Mapping[str, Package], tops: Mapping[str, set[str]], hidden: set[str]) -> set[str]:
    """Hidden distributions that a program's last words ask for: the last missing module or metadata that is one of them."""
    words = [w for found in MISSING.findall(output) for w in found if w]
    names = [{normalised(w)} & set(packages) or tops.get(w.split(".")[0], set()) for w in reversed(words)]
    return next((n & hidden for n in names if n & hidden), set())


# --- selection --------------------------------------------------------------------------------------------------------


def target_environment(host: Mapping[str, Any]) -> dict[str, str]:
    """What a requirement's markers are judged by: the host, not this machine."""
    environment = {key: str(value) for key, value in default_environment().items()}
    environment |= {
        "python_version": host["python_minor"], "python_full_version": str(host["python"]), "platform_machine": host["machine"],
        "implementation_name": "cpython", "sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "extra": "",
    }  # fmt: skip
    return environment


def refusals(packages: Mapping[str, Package], carried: Iterable[str], host: Mapping[str, Any]) -> dict[str, str]:
    """Packages of the host in a version that a carried package refuses, each with who refuses it."""
    found: dict[str, str] = {}
    environment = target_environment(host)
    for name in sorted(carried):
        for text in packages[name].requires:
            try:
                wanted = Requirement(text)
                if wanted.marker and not wanted.marker.evaluate(environment):
                    continue
            except (InvalidRequirement, UndefinedEnvironmentName):
                continue
            there = host["packages"].get(normalised(wanted.name))
            if there and not wanted.specifier.contains(Version(there), prereleases=True):
                found.setdefault(normalised(wanted.name), f"{name} needs {wanted.name}{wanted.specifier}, the host has {there}")
    return found


def carried_packages(packages: Mapping[str, Package], needed: Iterable[str], host: Mapping[str, Any]) -> dict[str, str]:
    """The packages that travel, each with the reason: the host lacks it, or has a version that another one refuses."""
    wanted = set(needed)
    carried = {name: "the host lacks it" for name in wanted if name not in host["packages"]}
    while True:
        more = {n: why for n, why in refusals(packages, carried, host).items() if n in wanted and n not in carried}
        if not more:
            return dict(sorted(carried.items()))
        carried |= more


def select_files(package: Package, opened: set[str]) -> tuple[list[str], dict[str, str]]:
    """The files of one package that travel, and why each other one (or folder) does not.

    Opened files travel, what compilers read, and text beside them. A binary or a file of a MiB that nothing opened stays; so
    does a large folder of code that nothing entered.
    """
    kept, left = [], {}
    entered = {str(parent) for f in opened for parent in PurePosixPath(f).parents}
    code_below: dict[str, int] = {}
    for file, size in package.files.items():
        if file.endswith(CODE):
            for parent in PurePosixPath(file).parents:
                code_below[str(parent)] = code_below.get(str(parent), 0) + size
    for file, size in package.files.items():
        path = PurePosixPath(file)
        if file in opened or file.endswith(SOURCES) or (not path.suffix and "include" in path.parts and size < LARGE):
            kept.append(file)
            continue
        unentered = next(
            (str(p) for p in reversed(path.parents) if code_below.get(str(p), 0) > LARGE_FOLDER and str(p) not in entered), None
        )
        if unentered:
            left[f"{unentered}/"] = "code that no program entered"
        elif file.endswith(BINARY) or ".so." in path.name:
            left[file] = "a binary that no program opened"
        elif size >= LARGE:
            left[file] = "a large file that no program opened"
        elif path.parts[0] in ("bin", "etc", "include"):
            left[file] = "outside the package"
        else:
            kept.append(file)
    return kept, left


# --- archives ---------------------------------------------------------------------------------------------------------


def is_elf(path: Path) -> bool:
    """Whether a file begins as shared objects do."""
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def pack(files: Sequence[str], site: Path, elf: bool) -> bytes:
    """One compressed archive: files in the given order, without times, owners and modes of this machine."""
    filters: list[dict[str, int]] = [{"id": lzma.FILTER_X86}] if elf else []
    filters.append({"id": lzma.FILTER_LZMA2, "preset": PRESET, "dict_size": DICTIONARY})
    compressor = lzma.LZMACompressor(lzma.FORMAT_XZ, lzma.CHECK_CRC64, filters=filters)
    out = io.BytesIO()

    class Sink(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            out.write(compressor.compress(bytes(data)))
            return len(data)

    with tarfile.open(fileobj=Sink(), mode="w|", format=tarfile.GNU_FORMAT) as tar:
        for file in files:
            member = tarfile.TarInfo(file)
            member.size = (site / file).stat().st_size
            member.mode = 0o644
            with (site / file).open("rb") as stream:
                tar.addfile(member, stream)
    out.write(compressor.flush())
    return out.getvalue()


def build(
    site: Path, packages: Mapping[str, Package], carried: Mapping[str, str], opened: set[str], host: Mapping[str, Any],
    plan: Plan, out: Path, extra: Mapping[str, Path] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Writes the bundle into `out` and returns its manifest.

    Raises:
        WorkbookError: it is larger than the plan's limit (the largest packages are named; the bundle stays for a look).
    """
    chosen: dict[str, Path] = {}
    left: dict[str, dict[str, Any]] = {}
    rows: list[dict[str, Any]] = []
    for name, why in carried.items():
        kept, out_of = select_files(packages[name], opened)
        for file in kept:
            chosen[file] = site / file
        sizes = {
            key: sum(s for f, s in packages[name].files.items() if (f.startswith(key) if key.endswith("/") else f == key))
            for key in out_of
        }
        left[name] = {key: {"why": out_of[key], "bytes": sizes[key]} for key in sorted(out_of)}
        rows.append({
            "name": name, "version": packages[name].version, "why": why, "files": len(kept),
            "bytes": sum(packages[name].files[f] for f in kept), "bytes_left_out": sum(sizes.values()),
        })  # fmt: skip
    groups: dict[str, list[str]] = {"code": [], "sources": [], "elf": []}
    for file, path in chosen.items():
        groups["elf" if is_elf(path) else "sources" if file.endswith(SOURCES) else "code"].append(file)
    fresh = out.with_name(f".{out.name}.making-{os.getpid()}")
    fresh.mkdir(parents=True)
    try:
        archives, hashes = [], {}
        for group, members in groups.items():
            # the same header in several packages lies side by side: it costs its size once
            members.sort(key=lambda f: (PurePosixPath(f).suffix, PurePosixPath(f).name, f))
            for file in members:
                data = chosen[file].read_bytes()
                hashes[file] = [hashlib.sha256(data).hexdigest(), len(data), int("/bin/" in f"/{file}"), group]
            if not members:
                continue
            content = hashlib.sha256(json.dumps([[f, *hashes[f]] for f in members]).encode()).hexdigest()
            packed = site.parent / "packed" / f"{content[:32]}-{PRESET}.xz"
            if not packed.exists():  # the same files give the same bytes, which take minutes
                packed.parent.mkdir(exist_ok=True)
                local.write_atomic(packed, pack(members, site, group == "elf"))
            data = packed.read_bytes()
            step = int(plan.part_mib * MIB)
            parts = []
            for number, at in enumerate(range(0, len(data), step)):
                piece = data[at : at + step]
                part = fresh / f"{group}.tar.xz.{number:02d}"
                part.write_bytes(piece)
                parts.append({"name": part.name, "bytes": len(piece), "sha256": hashlib.sha256(piece).hexdigest()})
            archives.append({"name": group, "parts": parts})
        manifest = {
            "schema": SCHEMA,
            "target": {"python": host["python_minor"], "machine": host["machine"], "platform": platform_tag(host)},
            "requirements": plan.requirements,
            "packages": rows,
            "left_out": {name: value for name, value in left.items() if value},
            "archives": archives,
            "files": dict(sorted(hashes.items())),
        }
        (fresh / bundle_install.MANIFEST).write_text(_one_line_a_file(manifest), encoding="utf-8")
        shutil.copyfile(bundle_install.__file__, fresh / "install.py")
        shutil.rmtree(out, ignore_errors=True)
        fresh.rename(out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    total = sum(f.stat().st_size for f in out.iterdir()) / MIB
    if total > plan.limit_mib:
        largest = sorted(rows, key=lambda r: -r["bytes"])[:8]
        raise WorkbookError(
            f"a bundle of at most {plan.limit_mib} MiB",
            f"{total:.1f} MiB in {out}; largest before compression: "
            + ", ".join(f"{r['name']} {r['bytes'] / MIB:.1f}" for r in largest),
            "leave requirements or programs out of the plan, or raise limit_mib and carry it in several goes",
        )
    return manifest


def _one_line_a_file(manifest: Mapping[str, Any]) -> str:
    """The manifest as JSON, small and yet readable by line: one for each file, package and part."""
    whole = json.dumps({**manifest, "files": {}}, indent=1, sort_keys=True)
    rows = ",\n".join(f"{json.dumps(name)}:{json.dumps(row, separators=(',', ':'))}" for name, row in manifest["files"].items())
    return whole.replace('"files": {}', '"files": {\n' + rows + "\n}", 1) + "\n"


def prove(manifest_folder: Path, packages: Mapping[str, Package], host: Mapping[str, Any], plan: Plan, tracer: Tracer) -> list[str]:
    """Installs the bundle here and runs every program with it and the host's own packages alone; what failed, by program.

    Packages that the host has are taken in the lock's version, which is the host's where the requirements allow.
    """
    target = tracer.work / "installed"
    done = _run([str(tracer.python), str(manifest_folder / "install.py"), str(target)], timeout=300)
    if done.returncode:
        return [_last_words(done)]
    names = {row["name"] for row in json.loads((manifest_folder / bundle_install.MANIFEST).read_text())["packages"]}
    rest = tracer.work / "rest"
    link_farm(packages, (set(packages) & set(host["packages"])) - names, tracer.site, rest)
    wrong = []
    for program in plan.programs:
        ok, output, _ = tracer.run(program, target, rest)
        if not ok:
            wrong.append(f"{program.name}: " + " / ".join(output.strip().splitlines()[-4:]))
    return wrong


# --- all of it --------------------------------------------------------------------------------------------------------


def make(
    host_file: Path,
    plan_file: Path,
    out: Path,
    lock: Path | None,
    imports: Path | None,
    resolve_anew: bool,
    trace_anew: bool,
    added_traces: Sequence[Path],
    work: Path | None,
    prove_it: bool,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """From host.json and plan to the bundle in `out`; returns its manifest. What exists (lock, imports) is not made again."""
    from lib.model.cache import cache_dir

    host, plan = read_host(host_file), read_plan(plan_file)
    out = replaceable(out)
    lock = lock or plan_file.with_suffix(".lock")
    imports = imports or plan_file.with_suffix(".imports.json")
    work = (work or cache_dir() / "bundle").absolute()
    if resolve_anew or not lock.exists():
        say(f"resolving {len(plan.requirements)} requirements for Python {host['python_minor']}, {platform_tag(host)}")
        resolve(plan, host, lock)
    site = work / "site"
    say(f"wheels of {lock.name} in {site}")
    make_environment(lock, host, site)
    packages = read_packages(site)
    if trace_anew or not imports.exists():
        needed, by_program = least_packages(Tracer(site, host, work), plan, packages, host, say)
        opened = set().union(*by_program.values())
        write_imports(imports, packages, needed, opened, plan)
    needed, opened = read_imports(imports)
    for folder in added_traces:
        more = opened_below(import_trace.read_trace(str(folder)), packages)
        belongs = owners(packages)
        opened |= more
        needed |= {belongs[f] for f in more}
        write_imports(imports, packages, needed, opened, plan)
    unknown = sorted(needed - set(packages))
    if unknown:
        raise BadInput(f"{imports.name} and {lock.name} speak of the same packages", f"not in the lock: {', '.join(unknown)}", "--trace")
    manifest = build(site, packages, carried_packages(packages, needed, host), opened, host, plan, out)
    if prove_it:
        wrong = prove(out, packages, host, plan, Tracer(site, host, work))
        if wrong:
            raise WorkbookError("every program ends as planned with the bundle and the host's packages alone", "; ".join(wrong))
        say(f"proved: {len(plan.programs)} programs end as planned with the bundle and the host's packages alone")
    return manifest


def replaceable(out: Path) -> Path:
    """The absolute folder in which a bundle may be made: a new one, an empty one, or an earlier bundle.

    Raises:
        BadInput: something else is there, which would be deleted.
    """
    folder = out.absolute().resolve()
    if folder.exists() and not folder.is_dir():
        raise BadInput("--out names a folder", f"{out} is a file", "name a new folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / bundle_install.MANIFEST).is_file():
        raise BadInput("--out names a new folder or an earlier bundle", f"{out} has other files, which would be deleted", "name another")
    return folder


def opened_below(paths: Iterable[str], packages: Mapping[str, Package]) -> set[str]:
    """Files of known packages among absolute paths of another machine, by their longest known ending."""
    belongs = owners(packages)
    found = set()
    for path in paths:
        parts = _source_of(path).split("/")
        for at in range(1, len(parts)):
            ending = "/".join(parts[at:])
            if ending in belongs:
                found.add(ending)
                break
    return found


def write_imports(path: Path, packages: Mapping[str, Package], needed: Iterable[str], opened: Iterable[str], plan: Plan) -> None:
    """Keeps what was opened, by package, with its version and the programs that were run."""
    names = set(needed)
    files: dict[str, list[str]] = {}
    belongs = owners(packages)
    for file in sorted(opened):
        if belongs.get(file) in names:
            files.setdefault(belongs[file], []).append(file)
    rows = {name: {"version": packages[name].version, "opened": files.get(name, [])} for name in sorted(names)}
    local.write_atomic(
        path, json.dumps({"schema": SCHEMA, "programs": [p.name for p in plan.programs], "packages": rows}, indent=0) + "\n"
    )


def read_imports(path: Path) -> tuple[set[str], set[str]]:
    """The packages that are needed and the files that were opened.

    Raises:
        UnreadableFile: not such a file.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["packages"]
        return set(rows), {file for row in rows.values() for file in row["opened"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnreadableFile(f"{path} says what was opened", f"{type(error).__name__}: {error}", "make it with --trace") from error


def summary(manifest: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """The bundle in a few numbers."""
    parts = [part for archive in manifest["archives"] for part in archive["parts"]]
    return {
        "packages": len(manifest["packages"]),
        "files": len(manifest["files"]),
        "parts": len(parts),
        "bytes": sum(f.stat().st_size for f in out.iterdir()),
        "left_out_bytes": sum(row["bytes_left_out"] for row in manifest["packages"]),
        "largest": [[r["name"], r["bytes"]] for r in sorted(manifest["packages"], key=lambda r: -r["bytes"])[:12]],
        "target": manifest["target"],
    }
