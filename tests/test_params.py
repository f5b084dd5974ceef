"""Parameters: every profile is valid, and every mistake is named at once."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
import yaml
from pydantic import ValidationError

from lib.errors import BadParams
from lib.params import MODELS, NOTEBOOKS, ROOT, load_notebook, load_profile, notebook_params, profile_folder

PROFILES = [p.parent for p in sorted([*ROOT.glob("params/*/profile.yaml"), *ROOT.glob("tests/params/*/profile.yaml")])]


@pytest.mark.parametrize("folder", PROFILES, ids=lambda p: p.name)
@pytest.mark.parametrize("number", NOTEBOOKS)
def test_every_file_of_every_profile_is_valid(folder: Path, number: str) -> None:
    """Each profile has one valid file a notebook."""
    assert load_notebook(str(folder), number)["profile"]


def make(tmp_path: Path, number: str, text: str, profile: str = "title: t\nserver: {model: m}\n") -> str:
    (tmp_path / "profile.yaml").write_text(profile)
    (tmp_path / f"{number}.yaml").write_text(text)
    return str(tmp_path)


def test_all_faults_come_in_one_message_with_the_nearest_key(tmp_path: Path) -> None:
    """Two misspelt keys and a wrong type are all named, the keys with what was meant."""
    folder = make(tmp_path, "03", "concurency: [1]\nconcurrency: [one]\noutput_length: 3\n")
    with pytest.raises(BadParams) as caught:
        load_notebook(folder, "03")
    message = str(caught.value)
    assert "'concurency', did you mean 'concurrency'?" in message
    assert "'output_length', did you mean 'output_len'?" in message
    assert "concurrency.0" in message and "'one'" in message


def test_unknown_key_of_the_server_names_the_nearest(tmp_path: Path) -> None:
    """A typo inside `server` is found too, in the profile or in the notebook's file."""
    folder = make(tmp_path, "01", "server: {ready_timeout: 3}\n")
    with pytest.raises(BadParams, match="server.ready_timeout.*ready_timeout_s"):
        load_notebook(folder, "01")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", "is YAML"),
        ("- 1\n- 2\n", "mapping"),
        ("profile: x\nprofile: y\n", "given twice"),
        ("a: !!python/object:os.system {}", "is YAML"),
    ],
)
def test_a_file_that_is_not_a_yaml_mapping_is_one_message(tmp_path: Path, text: str, words: str) -> None:
    """Broken YAML, a list, a doubled key and a Python tag are refused in words."""
    with pytest.raises(BadParams, match=words):
        load_notebook(make(tmp_path, "01", text), "01")


def test_unknown_profile_names_the_nearest() -> None:
    """A misspelt profile is answered with the right one."""
    with pytest.raises(BadParams, match="did you mean 'embedded'"):
        profile_folder("embeded")


def test_a_profile_needs_a_model_or_a_url(tmp_path: Path) -> None:
    """Neither model nor attach is a contradiction that is named before anything runs."""
    folder = make(tmp_path, "01", "{}\n", "title: t\nserver: {}\n")
    with pytest.raises(BadParams, match="neither"):
        load_notebook(folder, "01")


def test_flags_are_laid_over_the_profile_one_by_one() -> None:
    """A notebook that changes one flag keeps the others."""
    profile = load_profile("embedded", {"flags": {"attention_backend": "triton"}, "ready_timeout_s": 5})
    assert profile.server.flags["attention_backend"] == "triton"
    assert profile.server.flags["device"] == "cpu"
    assert profile.server.ready_timeout_s == 5


def test_parameters_are_frozen() -> None:
    """Nothing changes a parameter after it was checked."""
    profile = load_profile("embedded")
    with pytest.raises(ValidationError):
        profile.server.port = 1  # type: ignore[misc]


def test_an_injected_unknown_parameter_is_refused() -> None:
    """Papermill injects an undeclared parameter with a warning only; the notebook refuses it."""
    with pytest.raises(BadParams, match="did you mean 'seed'"):
        notebook_params("03", {"concurrency": [1], "sed": 3, "_hidden": 1, "In": [], "print": print, "Path": Path})


@pytest.mark.parametrize("number", NOTEBOOKS)
def test_the_parameters_cell_declares_all_parameters_with_the_embedded_values(number: str) -> None:
    """A notebook opened by hand does what `make report` does: its defaults are params/embedded/NN.yaml."""
    notebook = nbformat.read(ROOT / "notebooks" / f"{NOTEBOOKS[number]}.ipynb", 4)
    cells = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    assert len(cells) == 1
    names: dict[str, object] = {}
    exec(cells[0].source, names)
    names.pop("__builtins__")
    assert set(names) == set(MODELS[number].model_fields)
    file = yaml.safe_load((ROOT / "params" / "embedded" / f"{number}.yaml").read_text())
    assert MODELS[number].model_validate(names) == MODELS[number].model_validate(file)


def test_a_copied_profile_that_still_names_the_other_is_refused(tmp_path: Path) -> None:
    """`cp -r params/embedded params/mine` alone would measure the embedded server under the name `mine`."""
    folder = make(tmp_path, "03", "profile: embedded\nconcurrency: [1]\n")
    with pytest.raises(BadParams, match="it says profile: embedded"):
        load_notebook(folder, "03")
