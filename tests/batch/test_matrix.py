"""A matrix file to cells: order, ids, what goes over what, and every fault at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lib.batch.files import read_matrix
from lib.batch.matrix import Cell, LeftOut, MatrixFile, expand
from lib.errors import BadParams

PROFILE: dict[str, Any] = {
    "profile": {
        "title": "p",
        "server": {"model": "m", "flags": {"tp_size": 1, "kv_cache_dtype": "auto"}, "environment": {"A_FLAG": "1"}},
    },
    "01": {"profile": "p"},
    "03": {"profile": "p", "concurrency": [1, 2]},
}
TWO_BY_TWO: dict[str, Any] = {
    "title": "t",
    "profile": "p",
    "models": {"a": {}, "b": {"server": {"model": "other", "flags": {"tp_size": 2}}}},
    "hosts": {"here": {}, "far": {"host": {"kind": "ssh", "address": "far"}, "gpus": 8}},
}


def cells(content: dict[str, Any]) -> tuple[list[Cell], list[LeftOut]]:
    return expand(MatrixFile.model_validate(content), "n", {"p": PROFILE})


def test_a_profile_alone_is_one_cell() -> None:
    """Axes that are left out have one row each; parameters are the profile's, without its name."""
    (one,), left_out = cells({"title": "t", "profile": "p"})
    assert one.id == "n.model.here.as-is" and left_out == []
    assert one.profile == {**PROFILE["profile"], "known_answer": {}}
    assert one.params == {"01": {}, "03": {"concurrency": [1, 2]}}
    assert (one.resources.host, one.resources.gpus, one.resources.exclusive) == ("here", 0, True)


def test_axes_cross_in_the_order_of_the_file() -> None:
    """Two models on two hosts in two configurations: eight cells, the configuration fastest; one is left out with its reason."""
    configurations = {"x": {}, "y": {"server": {"flags": {"kv_cache_dtype": "fp8_e4m3"}}}}
    exclude = [{"model": "b", "host": "here", "configuration": "y", "why": "does not fit"}]
    made, left_out = cells({**TWO_BY_TWO, "configurations": configurations, "exclude": exclude})
    assert [c.id for c in made] == [
        "n.a.here.x", "n.a.here.y", "n.a.far.x", "n.a.far.y", "n.b.here.x", "n.b.far.x", "n.b.far.y",
    ]  # fmt: skip
    assert left_out == [LeftOut(id="n.b.here.y", why="does not fit")]
    last = made[-1]
    assert last.profile["server"]["flags"] == {"tp_size": 2, "kv_cache_dtype": "fp8_e4m3"}
    assert last.profile["server"]["environment"] == {"A_FLAG": "1"} and last.profile["server"]["model"] == "other"
    assert last.profile["host"] == {"kind": "ssh", "address": "far"} and last.resources.gpus == 8
    assert made[0].profile["server"]["flags"] == PROFILE["profile"]["server"]["flags"]


def test_include_goes_over_what_fits_it() -> None:
    """Later rows win; parameters of a notebook change key by key; notebooks can be others there."""
    include = [
        {"params": {"03": {"output_len": 8}}},
        {"host": "far", "params": {"03": {"output_len": 16}}, "notebooks": ["03"]},
    ]
    made, _ = cells({**TWO_BY_TWO, "include": include})
    found = {c.id: c.params for c in made}
    assert found["n.a.here.as-is"] == {"01": {}, "03": {"concurrency": [1, 2], "output_len": 8}}
    assert found["n.a.far.as-is"] == {"03": {"concurrency": [1, 2], "output_len": 16}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"exclude": [{"host": "fra", "why": "x"}]}, ["exclude[0].host", "did you mean 'far'?"]),
        (
            {"include": [{"server": {"flagz": {}}}]},
            ["n.a.here.as-is and 3 more", "'server.flagz'", "did you mean 'flags'"],
        ),
        ({"include": [{"params": {"03": {"concurrency": "many"}}}]}, ["03.yaml", "concurrency"]),
        ({"include": [{"server": {"flags": {"api_key": "s3cr3t"}}}]}, ["flags.api_key"]),
        (
            {"include": [{"params": {"01": {"server": {"environment": {"HF_TOKEN": "s3cr3t"}}}}}]},
            ["environment.HF_TOKEN"],
        ),
        ({"include": [{"server": {"model": None}}]}, ["neither server.model nor server.attach"]),
        ({"exclude": [{"why": "all"}]}, ["every combination is excluded"]),
        ({"notebooks": ["02"]}, ["no file for 02"]),
        ({"profile": None}, ["none for a, b"]),
    ],
)
def test_faults_are_named_all_at_once(change: dict[str, Any], words: list[str]) -> None:
    """Every cell's faults in one message, secrets by name only."""
    content = MatrixFile.model_validate({**TWO_BY_TWO, **change})
    with pytest.raises(BadParams) as error:
        if content.profile is None:
            from lib.batch.matrix import profiles_named

            profiles_named(content)
        expand(content, "n", {"p": PROFILE})
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "s3cr3t" not in str(error.value)


@pytest.mark.parametrize(
    "text", ["models: {a.b: {}}\n", "modles: {}\n", "notebooks: ['07']\n", "exclude: [{host: here}]\n"]
)
def test_a_file_with_a_wrong_form_is_refused(tmp_path: Path, text: str) -> None:
    """A dot in a name, an unknown key, no such notebook, an exclusion without a reason."""
    file = tmp_path / "x.yaml"
    file.write_text("title: t\nprofile: embedded\n" + text)
    with pytest.raises(BadParams):
        read_matrix(str(file))


def test_the_shipped_profiles_make_a_matrix(tmp_path: Path) -> None:
    """A file that names two real profiles expands to their notebooks."""
    file = tmp_path / "both.yaml"
    file.write_text("title: t\nmodels:\n  small: {profile: embedded}\n  large: {profile: h200}\nnotebooks: ['03']\n")
    name, made, _ = read_matrix(str(file))
    assert (name, [c.id for c in made]) == ("both", ["both.small.here.as-is", "both.large.here.as-is"])
    assert made[1].profile["server"]["model"] != made[0].profile["server"]["model"]
