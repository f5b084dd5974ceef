"""environment.yml, the requirements files and their sources: every line of them, held against each other."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
SERVER_PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
#: What the workbook's user asked for by name.
ASKED_FOR = ("jupyterlab", "papermill", "pandas", "matplotlib", "ipywidgets", "sglang", "torch", "requests")
#: Direct requirements that environment.yml leaves out: tools of the set-up with two environments. conda brings an
#: installer of its own, and torch 2.11, which SGLang asks for, forbids the setuptools of requirements.txt.
ONLY_FOR_SETUP = {"setuptools", "uv"}


def normal(name: str) -> str:
    """A package's name as package indexes compare them."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(file: str) -> dict[str, str]:
    """The `name==version` lines of a requirements file."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    return {normal(name): version for name, version in found}


def named(file: str) -> set[str]:
    """The packages that a .in file names."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / file).read_text(encoding="utf-8").splitlines()]
    return {normal(re.split(r"[<>=!~\[; ]", line)[0]) for line in lines if line}


def conda() -> dict[str, object]:
    """environment.yml, parsed."""
    return dict(yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8")))


def pip_lines() -> list[str]:
    """What environment.yml hands to pip."""
    dependencies = conda()["dependencies"]
    assert isinstance(dependencies, list)
    (nested,) = [entry for entry in dependencies if isinstance(entry, dict)]
    assert list(nested) == ["pip"]
    return [str(line) for line in nested["pip"]]


def test_environment_yml_has_the_parts_that_conda_reads() -> None:
    """A name, channels, Python 3.11 and pip from conda, everything else from pip."""
    environment = conda()
    assert set(environment) == {"name", "channels", "dependencies"}
    assert environment["channels"] == ["conda-forge"]
    dependencies = environment["dependencies"]
    assert isinstance(dependencies, list)
    assert [entry for entry in dependencies if isinstance(entry, str)] == ["python=3.11", "pip"]


def test_every_pip_line_is_an_exact_pin_or_this_project() -> None:
    """No line is loose, doubled, or an option; the last is this project, editable."""
    *packages, project = pip_lines()
    assert project == "-e ."
    for line in packages:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line), line
    names = [normal(line.partition("==")[0]) for line in packages]
    assert len(names) == len(set(names))


def conda_pins() -> dict[str, str]:
    """The pins among environment.yml's pip lines."""
    pairs = [line.split("==") for line in pip_lines() if "==" in line]
    return {normal(name): version for name, version in pairs}


def test_environment_yml_has_the_versions_of_requirements_txt() -> None:
    """Each direct requirement of the notebooks, in the version of requirements.txt; nothing else but the server."""
    compiled = pins("requirements.txt")
    wanted = {name: compiled[name] for name in named("requirements.in") - ONLY_FOR_SETUP}
    found = conda_pins()
    assert {name: version for name, version in found.items() if name not in ("sglang", "torch")} == wanted


def test_what_the_user_asked_for_is_there() -> None:
    """All eight packages by name; SGLang in the version that the embedded server has."""
    found = conda_pins()
    assert set(ASKED_FOR) <= set(found)
    assert found["sglang"] == pins("requirements-server.txt")["sglang"]


def test_no_hash_reaches_conda() -> None:
    """One hash would make pip demand one for every line: torch has none that fits every machine."""
    assert not [line for line in pip_lines() if "--hash" in line or line.startswith(("-r", "-c"))]


@pytest.mark.server
@pytest.mark.skipif(not SERVER_PYTHON.exists(), reason="no .venv-sglang, whose SGLang says which torch it wants")
def test_torch_is_the_one_that_sglang_asks_for() -> None:
    """SGLang's own metadata pins torch; environment.yml names that version."""
    code = "import importlib.metadata as m; print('\\n'.join(m.requires('sglang')))"
    lines = subprocess.run(
        [str(SERVER_PYTHON), "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    (wanted,) = [line.partition("==")[2] for line in lines if re.fullmatch(r"torch==\S+", line)]
    assert conda_pins()["torch"] == wanted


@pytest.mark.parametrize(
    ("source", "compiled"),
    [("requirements.in", "requirements.txt"), ("requirements-server.in", "requirements-server.txt")],
)
def test_compiled_requirements_are_pinned_hashed_and_complete(source: str, compiled: str) -> None:
    """Each package once, exactly pinned, with a SHA-256; each one that the source names; no index, no torch."""
    text = (ROOT / compiled).read_text(encoding="utf-8")
    blocks = re.split(r"^(?=\S)", text, flags=re.MULTILINE)[1:]
    blocks = [block for block in blocks if not block.startswith("#")]
    assert len(blocks) == len(pins(compiled)) > 50
    for block in blocks:
        assert re.match(r"[a-z0-9._-]+==\S+ \\\n(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+\Z", block), block[:80]
    assert named(source) <= set(pins(compiled))
    assert "torch" not in pins(compiled)
    assert "://" not in text


def test_the_servers_freeze_is_compiled_as_it_stands() -> None:
    """requirements-server.in is a freeze: the compiled file has exactly its pins, nothing resolved."""
    assert pins("requirements-server.in") == pins("requirements-server.txt")


def test_the_optional_packages_for_several_hosts_agree_with_the_others() -> None:
    """requirements-dask.txt: every package that it names is pinned, hashed, and of the version that requirements.txt has."""
    optional, own = pins("requirements-dask.txt"), pins("requirements.txt")
    assert named("requirements-dask.in") - {"-c"} <= set(optional), "run 'make lock'"
    text = (ROOT / "requirements-dask.txt").read_text(encoding="utf-8")
    assert text.count("--hash=sha256:") >= len(optional) and "://" not in text
    assert {n: v for n, v in optional.items() if own.get(n, v) != v} == {}
    assert not named("requirements-dask.in") & set(own), "what every user has is no option"
