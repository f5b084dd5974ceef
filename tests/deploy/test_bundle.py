"""The bundle: what is found by importing, what travels and why, the same bytes twice, and an installer that trusts nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lib.deploy import bundle, describe_host, missing_imports
from lib.errors import BadInput, UnreadableFile, WorkbookError

MINOR = f"{sys.version_info[0]}.{sys.version_info[1]}"
HOST: dict[str, Any] = {
    "python": sys.version.split()[0], "python_minor": MINOR, "machine": os.uname().machine, "libc": ["glibc", "2.39"], "gpus": [],
    "packages": {"present": "1.0", "old": "1.0"},
}  # fmt: skip


def add(site: Path, name: str, version: str, files: dict[str, str | bytes], requires: list[str] | None = None) -> None:
    """An installed distribution."""
    info = f"{name}-{version}.dist-info"
    requirements = "".join(f"Requires-Dist: {r}\n" for r in requires or [])
    files = {**files, f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requirements}"}
    files[f"{info}/RECORD"] = "".join(f"{f},,\n" for f in [*files, f"{info}/RECORD"])
    for file, content in files.items():
        path = site / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A root that needs `needed` always, `optional` under a try, `old` in a version that the host lacks, and `present` as it is there."""
    site = tmp_path / "site"
    big = "#" * (2 * bundle.MIB)
    add(site, "root", "1.0", {
        "root/__init__.py": "import needed, present, old\ntry:\n    import optional\nexcept ImportError:\n    pass\n",
        "root/beside.py": "x = 1\n", "root/kernel.so": b"\x7fELF" + b"k" * 5000, "root/include/a.cuh": "// header\n",
        "root/extra/__init__.py": "#" * 300_000, "root/table.txt": big, "root/loaded.so": b"\x7fELF" + b"l" * 5000,
    }, ["needed", "old>=2", "optional; extra == 'all'"])  # fmt: skip
    reads = "import pathlib\npathlib.Path(__file__).with_name('root').joinpath('loaded.so').read_bytes()\n"
    add(site, "needed", "1.0", {"needed.py": reads + big})
    add(site, "optional", "1.0", {"optional.py": big})
    add(site, "old", "2.0", {"old.py": "v = 2\n"})
    add(site, "present", "1.0", {"present.py": "v = 1\n"})
    add(site, "never", "1.0", {"never.py": "v = 1\n"})
    return site


PLAN = bundle.Plan(requirements=["root"], programs=[bundle.Program(name="go", code="import root")], part_mib=0.0004, limit_mib=5)


@pytest.fixture
def traced(site: Path, tmp_path: Path) -> tuple[dict[str, bundle.Package], set[str], set[str]]:
    """Packages, those needed and files opened, found by really importing."""
    packages = bundle.read_packages(site)
    tracer = bundle.Tracer(site, HOST, tmp_path / "work", Path(sys.executable))
    needed, opened = bundle.least_packages(tracer, PLAN, packages, HOST, lambda _: None)
    return packages, needed, opened["go"]


def built(site: Path, traced: Any, out: Path) -> dict[str, Any]:
    packages, needed, opened = traced
    return bundle.build(site, packages, bundle.carried_packages(packages, needed, HOST), opened, HOST, PLAN, out)


def test_what_is_needed_is_found_by_importing(traced: Any) -> None:
    """A package whose absence the program survives is not needed; one that nothing imports is not even tried."""
    _, needed, opened = traced
    assert needed == {"root", "needed", "old", "present"}
    assert "root/loaded.so" in opened and "root/kernel.so" not in opened


def test_only_an_earlier_bundle_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with other files, the working folder or a file is refused before any work; a new, an empty and an old one are fine."""
    keep = tmp_path / "mine"
    keep.mkdir()
    (keep / "thesis.txt").write_text("")
    monkeypatch.chdir(keep)
    for wrong in (keep, Path(), Path(), keep / "thesis.txt", Path("..")):
        with pytest.raises(BadInput, match="--out"):
            bundle.replaceable(wrong)
    assert (keep / "thesis.txt").exists()
    old = tmp_path / "old"
    assert bundle.replaceable(old) == old
    old.mkdir()
    assert bundle.replaceable(old) == old
    (old / "bundle.json").write_text("{}")
    assert bundle.replaceable(Path("../old")) == old


def test_a_program_is_settled_before_the_next_and_all_are_seen_with_the_same_packages(site: Path, tmp_path: Path) -> None:
    """Two programs, one missing package each: each comes back once, and the last pass runs both with both there."""
    packages = bundle.read_packages(site)
    ran: list[tuple[str, frozenset[str]]] = []
    needs = {"one": "needed", "two": "old"}

    class Told(bundle.Tracer):
        def __init__(self) -> None:
            self.site, self.work = site, tmp_path / "work"
            self.work.mkdir()

        def run(self, program: bundle.Program, farm: Path, rest: Path | None = None) -> tuple[bool, str, set[str]]:
            there = frozenset(name for name in packages if any((farm / Path(f).parts[0]).exists() for f in packages[name].files))
            ran.append((program.name, there))
            wanted = needs[program.name]
            if wanted not in there:
                return False, f"ModuleNotFoundError: No module named '{wanted}'", set()
            return True, "", {f for f in packages[wanted].files if ".dist-info/" not in f}

    plan = bundle.Plan(requirements=["root"], programs=[bundle.Program(name=n, code="") for n in needs])
    large = {n: p.model_copy(update={"files": dict.fromkeys(p.files, 2 * bundle.MIB)}) for n, p in packages.items()}
    needed, _ = bundle.least_packages(Told(), plan, large, {"packages": {}}, lambda _: None)
    assert {"needed", "old"} <= needed
    names = [name for name, _ in ran]
    assert names == ["one", "two", "one", "one", "two", "two", "one", "two"]
    assert ran[-1][1] == ran[-2][1] >= {"needed", "old"}


def test_only_what_the_host_lacks_or_has_in_a_refused_version_travels(traced: Any) -> None:
    """`present` stays (the host has it); `old` travels since the root refuses the host's version, and says so."""
    packages, needed, _ = traced
    carried = bundle.carried_packages(packages, needed, HOST)
    assert set(carried) == {"root", "needed", "old"}
    assert carried["old"] == "root needs old>=2, the host has 1.0"


def test_binaries_and_large_things_that_nothing_opened_stay_with_their_reason(traced: Any) -> None:
    """A loaded library, headers and small code travel; an unopened library, a large table and an unentered folder do not."""
    packages, _, opened = traced
    kept, left = bundle.select_files(packages["root"], opened)
    assert {"root/loaded.so", "root/include/a.cuh", "root/beside.py"} <= set(kept)
    assert left == {
        "root/kernel.so": "a binary that no program opened",
        "root/table.txt": "a large file that no program opened",
        "root/extra/": "code that no program entered",
    }


def test_the_same_inputs_give_the_same_bytes_and_parts_keep_their_size(site: Path, traced: Any, tmp_path: Path) -> None:
    """Two builds, the second without the first's cache and with other file times, agree byte for byte; no part is over the limit."""
    built(site, traced, tmp_path / "a")
    shutil.rmtree(site.parent / "packed")
    for file in site.rglob("*.py"):
        os.utime(file, (1, 1))
    built(site, traced, tmp_path / "b")
    first = {f.name: f.read_bytes() for f in (tmp_path / "a").iterdir()}
    assert first == {f.name: f.read_bytes() for f in (tmp_path / "b").iterdir()}
    parts = [f for f in first if ".xz." in f]
    assert len(parts) > 2 and all(len(first[f]) <= 0.0004 * bundle.MIB for f in parts)


def install(folder: Path, target: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(folder / "install.py"), str(target), *more], capture_output=True, text=True, check=False)


def test_it_installs_and_runs_without_anything_else(site: Path, traced: Any, tmp_path: Path) -> None:
    """Unpacked, its own interpreter command imports the root from it; files are exactly the manifest's."""
    manifest = built(site, traced, tmp_path / "b")
    done = install(tmp_path / "b", tmp_path / "it's here")
    assert done.returncode == 0, done.stderr
    files = {str(p.relative_to(tmp_path / "it's here")) for p in (tmp_path / "it's here").rglob("*") if p.is_file()}
    assert files == {*manifest["files"], "bundle.json", "python"}
    rest = tmp_path / "rest"
    rest.mkdir()
    shutil.copy(site / "present.py", rest)
    code = "import root, old; print(root.__file__, old.v)"
    asked = subprocess.run(
        [str(tmp_path / "it's here" / "python"), "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(rest)}, check=False
    )  # fmt: skip
    assert asked.stdout.strip() == f"{tmp_path}/it's here/root/__init__.py 2", asked.stderr


def test_parts_may_come_in_several_goes(site: Path, traced: Any, tmp_path: Path) -> None:
    """A part in another folder is found by --also; without it the installer names the part and installs nothing."""
    built(site, traced, tmp_path / "b")
    part = next((tmp_path / "b").glob("*.xz.01"))
    (tmp_path / "more").mkdir()
    part.rename(tmp_path / "more" / part.name)
    refused = install(tmp_path / "b", tmp_path / "t")
    assert refused.returncode == 2 and f"{part.name} is missing" in refused.stderr and not (tmp_path / "t").exists()
    assert install(tmp_path / "b", tmp_path / "t", "--also", str(tmp_path / "more")).returncode == 0


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def test_a_changed_part_is_refused_and_what_was_installed_stays(site: Path, traced: Any, tmp_path: Path) -> None:
    """One flipped bit: exit 2, the part's name, the earlier installation untouched, nothing left beside it."""
    built(site, traced, tmp_path / "b")
    assert install(tmp_path / "b", tmp_path / "t").returncode == 0
    flip(next((tmp_path / "b").glob("code*.00")))
    refused = install(tmp_path / "b", tmp_path / "t")
    assert refused.returncode == 2 and "SHA-256" in refused.stderr
    assert (tmp_path / "t" / "root" / "__init__.py").exists() and not list(tmp_path.glob("*.unpacking-*"))


def test_a_manifest_that_speaks_of_other_files_is_refused(site: Path, traced: Any, tmp_path: Path) -> None:
    """A file's hash changed in the manifest, one added, one for another Python: each is refused by name."""
    built(site, traced, tmp_path / "b")
    file = tmp_path / "b" / "bundle.json"
    whole = json.loads(file.read_text())
    for change, words in (
        (lambda m: m["files"]["old.py"].__setitem__(0, "0" * 64), "old.py has another SHA-256"),
        (lambda m: m["files"].__setitem__("ghost.py", ["0" * 64, 1, 0, "code"]), "ghost.py is not in the archive"),
        (lambda m: m["files"].pop("old.py"), "old.py is not in bundle.json"),
        (lambda m: m["target"].__setitem__("python", "2.7"), "it is for Python 2.7"),
    ):
        changed = json.loads(json.dumps(whole))
        change(changed)
        file.write_text(json.dumps(changed))
        refused = install(tmp_path / "b", tmp_path / "t")
        assert refused.returncode == 2 and words in refused.stderr, words
        assert not (tmp_path / "t").exists()


def test_a_bundle_over_its_limit_is_an_error_that_names_the_largest(site: Path, traced: Any, tmp_path: Path) -> None:
    """The limit is the plan's; the message says which packages are large."""
    packages, needed, opened = traced
    small = PLAN.model_copy(update={"limit_mib": 0.001})
    with pytest.raises(WorkbookError, match="largest before compression: needed"):
        bundle.build(site, packages, bundle.carried_packages(packages, needed, HOST), opened, HOST, small, tmp_path / "b")


def test_a_program_that_fails_with_everything_there_stops_the_trace(site: Path, tmp_path: Path) -> None:
    """Not a missing package: the program's own words are in the message."""
    plan = PLAN.model_copy(update={"programs": [bundle.Program(name="bad", code="raise SystemExit('no such thing')")]})
    tracer = bundle.Tracer(site, HOST, tmp_path / "work", Path(sys.executable))
    with pytest.raises(WorkbookError, match="no such thing"):
        bundle.least_packages(tracer, plan, bundle.read_packages(site), HOST, lambda _: None)


def test_a_killed_process_has_told_what_it_opened(site: Path, tmp_path: Path) -> None:
    """The trace is written at once: a SIGKILL after the import loses nothing."""
    code = "import root, os; os.kill(os.getpid(), 9)"
    tracer = bundle.Tracer(site, HOST, tmp_path / "work", Path(sys.executable))
    bundle.link_farm(bundle.read_packages(site), {"root", "needed", "old", "present"}, site, tmp_path / "farm")
    ok, _, opened = tracer.run(bundle.Program(name="k", code=code), tmp_path / "farm")
    assert not ok and {"root/__init__.py", "needed.py", "root/loaded.so"} <= opened


def test_a_trace_from_the_host_is_read_by_the_paths_endings(site: Path) -> None:
    """/any/where/root/__pycache__/__init__.cpython-312.pyc is root/__init__.py; what no package owns is nothing."""
    packages = bundle.read_packages(site)
    paths = ["/any/where/root/__pycache__/__init__.cpython-312.pyc", "/usr/lib/python3/json/decoder.py", "/x/old.py"]
    assert bundle.opened_below(paths, packages) == {"root/__init__.py", "old.py"}


def test_a_host_describes_itself_with_the_standard_library(tmp_path: Path) -> None:
    """The script runs by path, and what it writes can be read; a damaged file is refused with what to do."""
    done = subprocess.run(
        [sys.executable, "-I", describe_host.__file__, str(tmp_path / "host.json")], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    host = bundle.read_host(tmp_path / "host.json")
    assert host["python_minor"] == MINOR and host["packages"]["pydantic"] and bundle.platform_tag(host).startswith(os.uname().machine)
    (tmp_path / "host.json").write_text("{}")
    with pytest.raises(UnreadableFile, match="--describe-host"):
        bundle.read_host(tmp_path / "host.json")


def test_all_missing_modules_are_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two absent modules, one of them asked for inside a function, and a module that fails: all in one answer; a guarded one is not."""
    (tmp_path / "surveyed").mkdir()
    (tmp_path / "surveyed" / "__init__.py").write_text(
        "def f():\n    import absent_a\n    from absent_b.c import d\ntry:\n    import guarded\nexcept ImportError:\n    pass\n"
    )
    (tmp_path / "surveyed" / "broken.py").write_text("raise RuntimeError('why')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = missing_imports.survey(["surveyed", "surveyed.broken"])
    assert set(found["absent"]) == {"absent_a", "absent_b"} and found["absent"]["absent_a"] == ["surveyed:2"]
    assert "RuntimeError: why" in found["failed"]["surveyed.broken"]


def test_the_committed_plan_lock_and_imports_speak_of_the_same_packages() -> None:
    """params/h200: every needed package is in the lock, in the version that was traced."""
    folder = bundle.ROOT / "params" / "h200"
    locked = dict(line.split("==", 1) for line in (folder / "bundle.lock").read_text().splitlines() if "==" in line and line[0].isalpha())
    rows = json.loads((folder / "bundle.imports.json").read_text())["packages"]
    assert {name: row["version"] for name, row in rows.items()} == {n: locked[n].split(" ")[0].split(";")[0].strip() for n in rows}
    assert bundle.read_plan(folder / "bundle.yaml").limit_mib <= 52
