"""sgl-kernel from source: the plan for a GPU and CUDA version, and its execution on a host that has CUDA's compiler.

The plan is data: repository and commit, edits with their purpose, architectures, jobs sized to memory, environment, steps.
Every check that needs no CUDA runs anywhere; where there is no nvcc the compile is *unsupported here*, with the reason. A
step that ended well is not run again (its stamp names what it was made from); the log grows, the products are hashed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lib.deploy import fatbin
from lib.errors import BadInput, WorkbookError
from lib.hosts import local
from lib.records import Record

BUILD, LOG = "build.json", "build.log"
REPOSITORY = "https://github.com/sgl-project/sglang"
#: Memory that one nvcc process takes at its worst in this build, and threads inside each (SGL_KERNEL_COMPILE_THREADS).
#: Source: sgl-kernel's CMakeLists.txt warns of exhausted memory with 32 threads; 8 GiB a job is the rule of its README.
GIB_PER_JOB = 8.0
#: What sgl-kernel/CMakeLists.txt asks for (cmake_minimum_required, FATAL_ERROR).
OLDEST_CMAKE = (3, 26)
#: The oldest CMake that knows a policy that the unpatched file sets without asking.
POLICIES = {"CMP0169": (3, 30), "CMP0177": (3, 31)}


class Edit(Record):
    """One patch: what is replaced in which file, how often at least, and why."""

    id: str
    file: str
    find: str
    put: str
    purpose: str
    source: str


class Step(Record):
    """One command of the build, in the folder it runs in."""

    id: str
    argv: list[str]
    folder: str
    why: str


class BuildPlan(Record):
    """All that decides what comes out."""

    repository: str
    ref: str
    commit: str | None
    sm: int
    cuda: str
    edits: list[Edit]
    architectures: list[str]
    jobs: int
    threads: int
    environment: dict[str, str]
    steps: list[Step]
    notes: list[str]


def architecture_name(sm: int) -> str:
    """What is compiled for a GPU: sm_90a, sm_100a, sm_120a, sm_121a from 9.0 on (the kernels use its own instructions)."""
    return f"{sm}a" if sm >= 90 else str(sm)


def edits(sm: int, cuda: tuple[int, int]) -> list[Edit]:
    """The patches that this GPU and CUDA need, none more.

    The origin's three (policy guards, cccl include paths, FA3 fallback) and the list of architectures.
    """
    cmake = "sgl-kernel/CMakeLists.txt"
    made = [
        Edit(
            id="policy-guards", file=cmake, find=r"^cmake_policy\(SET (CMP\d+) (OLD|NEW)\)$",
            put=r"if(POLICY \1)\n  cmake_policy(SET \1 \2)\nendif()",
            purpose="a CMake that does not know a policy stops at it: set it only where it is known",
            source="sgl-kernel/CMakeLists.txt sets CMP0169 (CMake 3.30) and CMP0177 (3.31) and asks for 3.26",
        ),
    ]  # fmt: skip
    if sm >= 90:
        made += _architecture_edits(sm, cuda)
    if sm not in (80, 86, 90):
        made.append(Edit(
            id="fa3-off", file=cmake, find=r"set\(SGL_KERNEL_ENABLE_FA3 ON\)", put="set(SGL_KERNEL_ENABLE_FA3 OFF)",
            purpose="FA3 has kernels for SM80, SM86 and SM90 alone; compiling them for another GPU costs hours and 1.1 GB",
            source="flash_ops.abi3.so of sglang-kernel 0.4.5 carries sm_80, sm_86 and sm_90a (read by lib.deploy.fatbin)",
        ))  # fmt: skip
        made.append(Edit(
            id="fa3-fallback", file="sgl-kernel/python/sgl_kernel/flash_attn.py",
            find=r'raise ImportError\(\s*"Can not import FA3[^"]*"\s*\)', put="flash_ops = None",
            purpose="without flash_ops the module still imports, so that SGLang can choose another attention backend",
            source="sgl_kernel/flash_attn.py of sglang-kernel 0.4.5",
        ))  # fmt: skip
    if cuda >= (13, 0):
        made.append(Edit(
            id="cccl-include", file=cmake, find=r"^(find_package\(CUDAToolkit REQUIRED\))$",
            put=r"\1\ninclude_directories(SYSTEM ${CUDAToolkit_INCLUDE_DIRS}/cccl)",
            purpose="CUDA 13 keeps cuda/, cub/ and thrust/ below include/cccl, which nvcc knows and the host compiler does not "
            "(mscclpp: 'fatal error: cuda/atomic: No such file or directory')",
            source="sgl-project/sglang pull request 20588; microsoft/mscclpp issue 672",
        ))  # fmt: skip
    return made


def _architecture_edits(sm: int, cuda: tuple[int, int]) -> list[Edit]:
    """For this GPU alone: the other lines go; its own stays where the file has one for this CUDA, else it takes compute_90's.

    FA3's own flags carry 90a, and keep it in a build for SM90.
    """
    own = architecture_name(sm)
    listed = {"90a": (12, 4), "100a": (12, 8), "103a": (13, 0), "120a": (12, 8)}
    others = "|".join(x for x in ("80", "86", "87", "89", "90a", "100a", "101a", "103a", "110a", "120a", "121a") if x != own)
    there = own in listed and cuda >= listed[own]
    common = {"file": "sgl-kernel/CMakeLists.txt", "source": "sgl-kernel/CMakeLists.txt, SGL_KERNEL_CUDA_FLAGS"}
    return [
        Edit(
            id="other-architectures", find=rf'^\s*"-gencode=arch=compute_(?:{others}),code=sm_\w+"$\n?', put="",
            purpose="compile for this GPU alone: the published list has seven architectures, and no SM121 on x86-64", **common,
        ),
        Edit(
            id="architecture", find=r'^(\s*)"-gencode=arch=compute_90,code=sm_90"$',
            put=r"\1" if there else rf'\1"-gencode=arch=compute_{own},code=sm_{own}"',
            purpose=f"sm_{own} " + ("is in the file for this CUDA; the plain SM90 goes" if there else "takes the plain SM90's place"),
            **common,
        ),
    ]  # fmt: skip


def jobs_for(memory_gib: float, cores: int, threads: int = 1) -> int:
    """Compilers at once: as many as memory carries, at most one for `threads` cores, at least one.

    Example: 128 GiB and 16 cores give 16; 24 GiB and 2 cores give 2; 24 GiB and 64 cores give 3.
    """
    return max(1, min(int(memory_gib // GIB_PER_JOB), cores // max(1, threads)))


def make_plan(
    sm: int, cuda: str, memory_gib: float, cores: int, ref: str, commit: str | None = None, python: str = "python3"
) -> BuildPlan:
    """The plan for one GPU architecture and CUDA version.

    Raises:
        BadInput: this CUDA cannot compile for that GPU.
    """
    found = re.fullmatch(r"(\d+)\.(\d+)(?:\.\d+)?", cuda)
    if not found:
        raise BadInput("a CUDA version as '13.0'", repr(cuda))
    version = (int(found[1]), int(found[2]))
    oldest = {80: (11, 0), 86: (11, 1), 89: (11, 8), 90: (11, 8), 100: (12, 8), 103: (12, 9), 120: (12, 8), 121: (12, 9)}.get(sm)
    if oldest is None:
        raise BadInput("an architecture out of SM80, SM86, SM89, SM90, SM100, SM103, SM120, SM121", f"SM{sm}")
    if version < oldest:
        raise BadInput(f"CUDA {oldest[0]}.{oldest[1]} or newer for SM{sm}", f"CUDA {cuda}", "install a newer toolkit")
    jobs = jobs_for(memory_gib, cores)
    environment = {
        "MAX_JOBS": str(jobs), "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs),
        "TORCH_CUDA_ARCH_LIST": f"{sm // 10}.{sm % 10}{'a' if sm >= 90 else ''}",
        "CMAKE_ARGS": f"-DSGL_KERNEL_COMPILE_THREADS=1 -DENABLE_BELOW_SM90={'ON' if sm < 90 else 'OFF'} -DCMAKE_POLICY_VERSION_MINIMUM=3.5",
    }  # fmt: skip
    # the build folder stays: an interrupted compile goes on with the objects that it has (scikit-build-core's setting `build-dir`)
    wheel = [
        python, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--config-settings", "build-dir=build", "--wheel-dir", "../dist",
        "-v", ".",
    ]  # fmt: skip
    fetch = commit or ref
    return BuildPlan(
        repository=REPOSITORY, ref=ref, commit=commit, sm=sm, cuda=cuda, edits=edits(sm, version),
        architectures=[f"sm_{architecture_name(sm)}"], jobs=jobs, threads=1, environment=environment,
        steps=[
            Step(id="init", argv=["git", "init", "--quiet", "."], folder="source", why="an empty repository"),
            Step(id="fetch", argv=["git", "fetch", "--depth", "1", REPOSITORY, fetch], folder="source", why="one commit, no history"),
            Step(id="checkout", argv=["git", "checkout", "--force", "--quiet", "FETCH_HEAD"], folder="source", why="its files"),
            Step(id="edit", argv=[], folder="source", why="the patches above, each found or the build stops"),
            Step(id="compile", argv=wheel, folder="source/sgl-kernel", why=f"{jobs} compilers at once"),
        ],
        notes=[
            "CMake fetches nine further repositories at the commits that its file names: this host needs them from the network or "
            "a mirror (FETCHCONTENT_SOURCE_DIR_<NAME>)",
            "the published wheel is named sglang-kernel; a source build installs the same Python package, sgl_kernel",
        ],
    )  # fmt: skip


def plan_sha256(plan: BuildPlan) -> str:
    """The hash by which a build's record and folder belong to a plan."""
    return hashlib.sha256(plan.model_dump_json().encode()).hexdigest()


def plan_rows(plan: BuildPlan) -> list[dict[str, Any]]:
    """The plan as a table: what, value, why."""
    rows: list[dict[str, Any]] = [
        {"what": "repository", "value": plan.repository, "why": ""},
        {"what": "commit", "value": plan.commit or f"{plan.ref} (its commit is recorded when it is fetched)", "why": ""},
        {"what": "architectures", "value": ", ".join(plan.architectures), "why": f"SM{plan.sm}, CUDA {plan.cuda}"},
        {"what": "jobs", "value": plan.jobs, "why": f"{GIB_PER_JOB:.0f} GiB of memory each"},
    ]
    rows += [{"what": f"patch {e.id}", "value": e.file, "why": f"{e.purpose} ({e.source})"} for e in plan.edits]
    rows += [{"what": f"${name}", "value": value, "why": ""} for name, value in plan.environment.items()]
    rows += [{"what": f"step {s.id}", "value": " ".join(s.argv) or "(the patches)", "why": s.why} for s in plan.steps]
    return rows


def edited(text: str, edit: Edit) -> str:
    """The text with one edit made.

    Raises:
        BadInput: it is not found: the source is another one than the plan was written for.
    """
    new, count = re.subn(edit.find, edit.put, text, flags=re.MULTILINE)
    if not count:
        raise BadInput(f"patch {edit.id!r} applies to {edit.file}", "what it replaces is not there", "compare the commit with the plan's")
    return new


# --- this host --------------------------------------------------------------------------------------------------------


def missing_tools(python: str, which: Callable[[str], str | None] = shutil.which) -> list[str]:
    """What this host lacks for a compile, one line each; empty where it can be tried."""
    lacking = [f"{tool} ({why})" for tool, why in (
        ("git", "fetches the source"), ("cmake", "configures"), ("ninja", "builds"), ("g++", "host compiler"),
    ) if not which(tool)]  # fmt: skip
    if not (which("nvcc") or which("/usr/local/cuda/bin/nvcc")):
        lacking.append("nvcc (CUDA's compiler)")
    code = (
        "import importlib.util as u; print(bool(u.find_spec('scikit_build_core')), bool(u.find_spec('pip')))\n"
        "import torch; print(torch.version.cuda or '')"
    )
    asked = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    said = asked.stdout.split()
    if said[:1] != ["True"]:
        lacking.append("scikit-build-core in that Python (the build runs without isolation, against the torch that is there)")
    if said[1:2] != ["True"]:
        lacking.append("pip in that Python")
    if asked.returncode or len(said) < 3:
        lacking.append("a torch built for CUDA")
    return lacking


def checks(plan: BuildPlan, python: str, free_gb: float, lacking: Sequence[str], cmake_version: str | None) -> list[dict[str, Any]]:
    """Everything that is known before a compile: each with its outcome."""
    rows = [
        {"check": "tools", "outcome": "unsupported here" if lacking else "fine", "detail": ", ".join(lacking) or "all there"},
        {"check": "disk", "outcome": "fine" if free_gb >= 40 else "too little", "detail": f"{free_gb:.0f} GB free, 40 wanted"},
        {"check": "jobs", "outcome": "fine", "detail": f"{plan.jobs} compilers, {plan.jobs * GIB_PER_JOB:.0f} GiB"},
    ]
    found = re.search(r"(\d+)\.(\d+)", cmake_version or "")
    if found and (int(found[1]), int(found[2])) < OLDEST_CMAKE:
        detail = f"CMake {found[0]}, and the file asks for {'.'.join(map(str, OLDEST_CMAKE))} (pip install cmake)"
        rows.append({"check": "CMake", "outcome": "too old", "detail": detail})
    if found:
        have = (int(found[1]), int(found[2]))
        unknown = [name for name, since in POLICIES.items() if have < since]
        detail = f"CMake {found[0]} does not know {', '.join(unknown)}: the policy guards are needed" if unknown else f"CMake {found[0]}"
        rows.append({"check": "CMake policies", "outcome": "fine", "detail": detail})
    return rows


def cmake_version() -> str | None:
    """The first line of `cmake --version`; None where there is no cmake."""
    program = shutil.which("cmake")
    if not program:
        return None
    done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.splitlines()[0] if done.stdout else None


def unreachable(plan: BuildPlan, within_s: float = 20.0) -> str | None:
    """Why the repository cannot be asked from here; None where it answers."""
    argv = ["git", "ls-remote", "--exit-code", plan.repository, "HEAD"]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=within_s, check=False, stdin=subprocess.DEVNULL,
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0"},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{plan.repository}: {type(error).__name__} after {within_s:g} s"
    return None if not done.returncode else f"{plan.repository}: {(done.stderr.strip().splitlines() or ['no answer'])[-1][:200]}"


def run_plan(plan: BuildPlan, folder: Path, python: str = sys.executable, say: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Executes the plan in `folder`; a step with a stamp from the same plan is not run again. Returns build.json's content.

    The log (`build.log`) grows; `build.json` holds seconds by step, the commit, and the SHA-256 and architectures of products.

    Raises:
        WorkbookError: a step failed; the message ends with the log's last lines.
    """
    folder.mkdir(parents=True, exist_ok=True)
    key = plan_sha256(plan)
    state: dict[str, Any] = {"plan_sha256": key, "plan": plan.model_dump(), "steps": {}}
    kept = folder / BUILD
    earlier = _earlier(kept)
    if earlier.get("plan_sha256") == key:
        state = earlier
    if not list((folder / "source" / "dist").glob("*.whl")):
        state["steps"].pop("compile", None)  # whatever the record says: what it made is gone
    for step in plan.steps:
        if state["steps"].get(step.id, {}).get("done"):
            say(f"{step.id}: done earlier ({state['steps'][step.id]['seconds']} s)")
            continue
        say(f"{step.id}: {step.why}")
        began = time.monotonic()
        where = folder / step.folder
        where.mkdir(parents=True, exist_ok=True)
        if step.argv:
            _command(step, where, folder / LOG, plan.environment, say)
        else:
            _apply(plan, where)
        if step.id == "checkout":
            state["commit"] = subprocess.run(
                ["git", "rev-parse", "HEAD"], cwd=where, capture_output=True, text=True, check=True
            ).stdout.strip()  # fmt: skip
            if plan.commit and state["commit"] != plan.commit:
                raise WorkbookError(f"commit {plan.commit}", state["commit"], "the mirror serves another one")
        state["steps"][step.id] = {"done": True, "seconds": round(time.monotonic() - began, 1)}
        local.write_atomic(kept, json.dumps(state, indent=1))
    state["products"] = [
        {"file": str(p.relative_to(folder)), "bytes": p.stat().st_size, "sha256": _sha256(p), "architectures": wheel_architectures(p)}
        for p in sorted((folder / "source" / "dist").glob("*.whl"))
    ]
    local.write_atomic(kept, json.dumps(state, indent=1))
    if not state["products"]:
        raise WorkbookError("a wheel in source/dist", "none was made, though every step ended well", f"its log: {folder / LOG}")
    return state


def _earlier(file: Path) -> dict[str, Any]:
    """The record of an earlier call; empty where there is none, or none that can be read (the steps are then run again)."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("steps"), dict) else {}


def wheel_architectures(wheel: Path) -> dict[str, list[str]]:
    """The GPU architectures of every shared object in a wheel, read from the objects themselves; empty lists have no device code."""
    found: dict[str, list[str]] = {}
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in sorted(n for n in archive.namelist() if n.endswith(".so") or ".so." in n):
                with contextlib.suppress(fatbin.NotElf):
                    found[name] = sorted({code.name for code in fatbin.device_code(archive.read(name))})
    except zipfile.BadZipFile as error:
        raise WorkbookError(f"{wheel.name} is a wheel", str(error), "run the build again") from error
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _apply(plan: BuildPlan, source: Path) -> None:
    """Makes every edit from the files as committed, so that a second call gives the same."""
    for name in sorted({e.file for e in plan.edits}):
        original = subprocess.run(["git", "show", f"HEAD:{name}"], cwd=source, capture_output=True, text=True, check=False)
        if original.returncode:
            raise BadInput(f"{name} in the source", "no such file in this commit", "compare the commit with the plan's")
        text = original.stdout
        for edit in plan.edits:
            if edit.file == name:
                text = edited(text, edit)
        local.write_atomic(source / name, text)


def _command(step: Step, where: Path, log: Path, more: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Runs one step; its output goes to the log, and ninja's progress ([12/340]) to `say`."""
    with log.open("a", encoding="utf-8", errors="replace") as file:
        file.write(f"$ {' '.join(step.argv)}\n")
        process = subprocess.Popen(
            step.argv, cwd=where, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            env={**os.environ, **more}, start_new_session=True,
        )  # fmt: skip
        told = 0.0
        try:
            for line in process.stdout or ():
                file.write(line)
                file.flush()
                found = re.search(r"\[(\d+)/(\d+)\]", line)
                if found and time.monotonic() - told > 5:
                    told = time.monotonic()
                    say(f"{step.id}: {found[1]} of {found[2]}")
            code = process.wait()
        finally:
            if process.poll() is None:  # interrupted: the compilers that it started go with it
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code:
        last = " / ".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-6:])
        raise WorkbookError(
            f"step {step.id!r} of the build ends well", f"exit code {code}: {last}", f"its log: {log}; run it again to go on"
        )  # fmt: skip
