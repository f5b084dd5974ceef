"""The plan to build sgl-kernel: patches with their purpose, jobs by memory, checks; and its execution with a stand-in compiler."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lib.deploy import source_build as sb
from lib.deploy import stack
from lib.errors import BadInput, WorkbookError
from tests.deploy.test_fatbin import container, elf, entry

#: The lines of sgl-kernel/CMakeLists.txt and flash_attn.py that the patches look for, in their order (Apache-2.0).
CMAKE = """cmake_minimum_required(VERSION 3.26 FATAL_ERROR)
cmake_policy(SET CMP0169 OLD)
cmake_policy(SET CMP0177 NEW)
find_package(CUDAToolkit REQUIRED)
set(SGL_KERNEL_CUDA_FLAGS
    "-gencode=arch=compute_90,code=sm_90"
    "-std=c++17"
)
    list(APPEND SGL_KERNEL_CUDA_FLAGS
        "-gencode=arch=compute_80,code=sm_80"
        "-gencode=arch=compute_120a,code=sm_120a"
    )
    set(SGL_KERNEL_ENABLE_FA3 ON)
"""
FLASH = """try:
    from sgl_kernel import flash_ops
except:
    raise ImportError(
        "Can not import FA3 in sgl_kernel. Please check."
    )
"""


def plan(sm: int = 121, cuda: str = "13.0", **more: object) -> sb.BuildPlan:
    return sb.make_plan(sm, cuda, memory_gib=128, cores=16, ref="v0.5.16", python=sys.executable, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("memory", "cores", "jobs"), [(128, 16, 16), (24, 2, 2), (24, 64, 3), (4, 8, 1)])
def test_jobs_are_sized_to_memory(memory: float, cores: int, jobs: int) -> None:
    """8 GiB a compiler, never more than cores, never fewer than one."""
    assert sb.jobs_for(memory, cores) == jobs


def test_the_origins_three_patches_and_the_architecture_each_have_a_purpose_and_a_source() -> None:
    """SM121 with CUDA 13: policy guards, cccl include, FA3 off with its fallback, architectures."""
    edits = {e.id: e for e in plan().edits}
    assert {"policy-guards", "cccl-include", "fa3-off", "fa3-fallback", "architecture"} <= set(edits)
    assert all(e.purpose and e.source for e in edits.values())


def test_a_patch_that_is_not_needed_is_not_made() -> None:
    """CUDA 12.8 has its headers where compilers look; an H200 keeps FA3."""
    assert {e.id for e in plan(90, "12.8").edits} == {"policy-guards", "architecture", "other-architectures"}


def test_the_patched_file_compiles_for_one_architecture_behind_guards() -> None:
    """After the patches: sm_121a alone, each policy behind if(POLICY), the cccl folder for the host compiler, no FA3."""
    text = CMAKE
    for edit in plan().edits:
        if edit.file.endswith("CMakeLists.txt"):
            text = sb.edited(text, edit)
    assert text.count("-gencode") == 1 and "compute_121a,code=sm_121a" in text
    assert "if(POLICY CMP0177)\n  cmake_policy(SET CMP0177 NEW)\nendif()" in text
    assert "include_directories(SYSTEM ${CUDAToolkit_INCLUDE_DIRS}/cccl)" in text
    assert "set(SGL_KERNEL_ENABLE_FA3 OFF)" in text


@pytest.mark.parametrize(
    ("sm", "cuda", "own"), [(120, "13.0", "sm_120a"), (121, "13.0", "sm_121a"), (103, "12.9", "sm_103a"), (90, "12.8", "sm_90")]
)
def test_one_architecture_is_left_whichever_the_file_lists(sm: int, cuda: str, own: str) -> None:
    """120a has a line of its own; 121a and, before CUDA 13, 103a have none and take the plain SM90's place."""
    text = CMAKE
    for edit in plan(sm, cuda).edits:
        if edit.file.endswith("CMakeLists.txt"):
            text = sb.edited(text, edit)
    # the excerpt has no 90a line, which the whole file has twice (kernels, FA3)
    assert [line.strip() for line in text.splitlines() if "-gencode" in line] == (
        [] if sm == 90 else [f'"-gencode=arch=compute_{own[3:]},code={own}"']
    )


def test_a_patch_that_does_not_apply_stops_the_build() -> None:
    """Another source than the plan's is refused, by the patch's name."""
    with pytest.raises(BadInput, match="policy-guards"):
        sb.edited("project(x)", plan().edits[0])


@pytest.mark.parametrize(("sm", "cuda"), [(120, "12.4"), (100, "12.6"), (121, "12.8"), (77, "13.0"), (90, "thirteen")])
def test_what_a_toolkit_cannot_compile_is_refused_before_it_is_tried(sm: int, cuda: str) -> None:
    """SM120 needs CUDA 12.8, SM121 12.9; an unknown architecture or version is none."""
    with pytest.raises(BadInput):
        plan(sm, cuda)


def test_a_machine_without_cuda_says_why_it_cannot_compile() -> None:
    """The tools are checked; the compile is unsupported here, with all reasons."""
    lacking = sb.missing_tools(sys.executable, which=lambda name: None)
    rows = {r["check"]: r for r in sb.checks(plan(), sys.executable, 100.0, lacking, "cmake version 3.28.3")}
    assert rows["tools"]["outcome"] == "unsupported here" and "nvcc" in rows["tools"]["detail"]
    assert "scikit-build-core" in rows["tools"]["detail"] and "pip in" not in rows["tools"]["detail"]
    assert "CMake" not in rows
    old = {r["check"]: r for r in sb.checks(plan(), sys.executable, 100.0, [], "cmake version 3.25.1")}
    assert old["CMake"]["outcome"] == "too old" and "3.26" in old["CMake"]["detail"]
    assert "CMP0169, CMP0177" in rows["CMake policies"]["detail"] and rows["disk"]["outcome"] == "fine"


@pytest.fixture
def upstream(tmp_path: Path) -> tuple[Path, str]:
    """A repository with the two files that the patches change; its folder and commit."""
    folder = tmp_path / "upstream"
    (folder / "sgl-kernel" / "python" / "sgl_kernel").mkdir(parents=True)
    (folder / "sgl-kernel" / "CMakeLists.txt").write_text(CMAKE)
    (folder / "sgl-kernel" / "python" / "sgl_kernel" / "flash_attn.py").write_text(FLASH)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", "-C", str(folder)]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    done = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return folder, done.stdout.strip()


def with_stand_in(upstream: Path, compile_code: str, commit: str) -> sb.BuildPlan:
    """The plan with a local repository and Python in the compiler's place."""
    made = plan(commit=commit)
    steps = []
    for step in made.steps:
        argv = [str(upstream) if word == sb.REPOSITORY else word for word in step.argv]
        steps.append(step.model_copy(update={"argv": [sys.executable, "-c", compile_code] if step.id == "compile" else argv}))
    return made.model_copy(update={"steps": steps})


#: What stands in for the compiler: a wheel of one library without device code, one with code for sm_121a, and a text.
LIBRARY = elf(dot_nv_fatbin=container(entry(64, 121, 0x100011)))
GOOD = f"""
import pathlib, zipfile
print('[1/2] a', flush=True)
d = pathlib.Path('../dist')
d.mkdir(exist_ok=True)
with zipfile.ZipFile(d / 'k.whl', 'w') as z:
    z.writestr(zipfile.ZipInfo('sgl_kernel/common_ops.abi3.so'), {LIBRARY!r})
    z.writestr(zipfile.ZipInfo('sgl_kernel/spatial.so'), {elf(dot_text=b"12345678")!r})
    z.writestr(zipfile.ZipInfo('sgl_kernel/__init__.py'), '')
"""


def test_the_plan_runs_and_hashes_its_products_and_a_second_call_does_nothing(tmp_path: Path, upstream: tuple[Path, str]) -> None:
    """Fetched, patched, compiled, hashed; every step of the second call was done earlier."""
    made = with_stand_in(upstream[0], GOOD, upstream[1])
    said: list[str] = []
    state = sb.run_plan(made, tmp_path / "build", sys.executable, said.append)
    assert state["commit"] == upstream[1]
    (product,) = state["products"]
    assert product["sha256"] == hashlib.sha256((tmp_path / "build" / product["file"]).read_bytes()).hexdigest()
    assert product["architectures"] == {"sgl_kernel/common_ops.abi3.so": ["sm_121a"], "sgl_kernel/spatial.so": []}
    assert "flash_ops = None" in (tmp_path / "build/source/sgl-kernel/python/sgl_kernel/flash_attn.py").read_text()
    assert "compile: 1 of 2" in said
    again: list[str] = []
    sb.run_plan(made, tmp_path / "build", sys.executable, again.append)
    assert len(again) == len(made.steps) and all("done earlier" in line for line in again)


def test_a_failed_compile_goes_on_where_it_stopped(tmp_path: Path, upstream: tuple[Path, str]) -> None:
    """The log's last line is in the message; after the cause is gone only the compile runs again."""
    flag = tmp_path / "fixed"
    code = f"import pathlib, sys\nif not pathlib.Path({str(flag)!r}).exists(): sys.exit('ptxas died')\n{GOOD}"
    made = with_stand_in(upstream[0], code, upstream[1])
    with pytest.raises(WorkbookError, match="ptxas died"):
        sb.run_plan(made, tmp_path / "build", sys.executable)
    flag.write_text("")
    said: list[str] = []
    sb.run_plan(made, tmp_path / "build", sys.executable, said.append)
    assert [line for line in said if "done earlier" not in line][0].startswith("compile")


def test_another_commit_than_the_pinned_one_is_refused(tmp_path: Path, upstream: tuple[Path, str]) -> None:
    """A mirror that serves other bytes under the same name does not pass."""
    made = with_stand_in(upstream[0], GOOD, upstream[1])
    steps = [s.model_copy(update={"argv": [*s.argv[:-1], "HEAD"]}) if s.id == "fetch" else s for s in made.steps]
    with pytest.raises(WorkbookError, match="the mirror serves another one"):
        sb.run_plan(made.model_copy(update={"commit": "0" * 40, "steps": steps}), tmp_path / "build", sys.executable)


def test_an_interrupted_compile_takes_its_compilers_along_and_goes_on_afterwards(tmp_path: Path, upstream: tuple[Path, str]) -> None:
    """Ctrl-C in the middle: the compiler that the build had started is gone too; the next call runs the compile alone, to its end."""
    code = f"""
import pathlib, subprocess, sys, time
objects = pathlib.Path('objects')
if not objects.exists():
    objects.write_text('half')
    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
    pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(child.pid))
    print('[1/340] half', flush=True)
    time.sleep(60)
{GOOD}"""
    made = with_stand_in(upstream[0], code, upstream[1])

    def interrupt(text: str) -> None:
        if text == "compile: 1 of 340":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sb.run_plan(made, tmp_path / "build", sys.executable, interrupt)
    compiler = int((tmp_path / "pid").read_text())
    assert gone(compiler)
    said: list[str] = []
    state = sb.run_plan(made, tmp_path / "build", sys.executable, said.append)
    assert [line.split(":")[0] for line in said if "done earlier" not in line] == ["compile", "compile"] and state["products"]
    assert (tmp_path / "build" / "source" / "sgl-kernel" / "objects").read_text() == "half"  # what was compiled is still there
    assert "[1/340] half" in (tmp_path / "build" / "build.log").read_text()


def gone(pid: int) -> bool:
    """Whether a process has ended (or is a zombie) within two seconds."""
    for _ in range(40):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_a_killed_run_and_a_damaged_record_are_no_traceback(tmp_path: Path, upstream: tuple[Path, str]) -> None:
    """A record that was cut off, or a product that somebody removed: the steps that made it run again."""
    made = with_stand_in(upstream[0], GOOD, upstream[1])
    build = tmp_path / "build"
    sb.run_plan(made, build, sys.executable)
    (build / "source" / "dist" / "k.whl").unlink()
    said: list[str] = []
    assert sb.run_plan(made, build, sys.executable, said.append)["products"]
    assert [line.split(":")[0] for line in said if "done earlier" not in line] == ["compile", "compile"]
    for text in ('{"plan_sha256": "', "[]", '{"plan_sha256": 1, "steps": []}'):
        (build / "build.json").write_text(text)
        assert sb.run_plan(made, build, sys.executable)["products"]
    nothing = with_stand_in(upstream[0], "pass", upstream[1])
    with pytest.raises(WorkbookError, match="none was made"):
        sb.run_plan(nothing, tmp_path / "other", sys.executable)


def test_the_notebook_s_build_goes_on_in_the_cache_over_runs(
    tmp_path: Path, upstream: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed build leaves its record and log with the run; the next run finds the steps that were done."""
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "cache"))
    flag = tmp_path / "fixed"
    code = f"import pathlib, sys\nif not pathlib.Path({str(flag)!r}).exists(): sys.exit('ptxas died')\n{GOOD}"
    made = with_stand_in(upstream[0], code, upstream[1]).model_dump()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with pytest.raises(WorkbookError, match="ptxas died"):
        stack.take_build(tmp_path / "one", sys.executable, made)
    assert "ptxas died" in (tmp_path / "one" / "build.log").read_text()
    assert set(json.loads((tmp_path / "one" / "build.json").read_text())["steps"]) == {"init", "fetch", "checkout", "edit"}
    flag.write_text("")
    said: list[str] = []
    monkeypatch.setattr(stack, "local_say", said.append)
    stack.take_build(tmp_path / "two", sys.executable, made)
    assert sum("done earlier" in line for line in said) == 4
    assert json.loads((tmp_path / "two" / "build.json").read_text())["products"][0]["architectures"]


def test_a_repository_that_cannot_be_asked_is_unsupported_before_the_build(
    tmp_path: Path, upstream: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tools there: the sources are asked for; no answer is a reason, and so is a CMake that the file refuses."""
    reached = plan().model_copy(update={"repository": str(upstream[0])})
    assert sb.unreachable(reached) is None
    gone = plan().model_copy(update={"repository": str(tmp_path / "none")})
    assert "none" in str(sb.unreachable(gone))
    monkeypatch.setattr(sb, "missing_tools", lambda _: [])
    for made, cmake, words in ((reached, "3.28.3", None), (gone, "3.28.3", "the sources"), (reached, "3.25.1", "3.26")):
        monkeypatch.setattr(sb, "cmake_version", lambda cmake=cmake: cmake)
        stack.take_checks(tmp_path, sys.executable, made.model_dump())
        lacking = json.loads((tmp_path / "checks.json").read_text())["lacking"]
        assert (lacking == []) if words is None else words in lacking[0], lacking
