"""The grid of a sweep: axes, links, exclusions, stable ids, order, and which trials run side by side."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.errors import BadParams
from lib.params import ROOT, SweepParams, read_yaml
from lib.server import grid, known_findings

MOE = {"moe_runner": ["triton", "cutlass", "marlin"]}


def ids(**params: Any) -> list[str]:
    return [t.id for t in grid.plan(SweepParams.model_validate(params)).trials]


def test_an_axis_by_its_name_or_by_its_flag_gives_the_same_ids() -> None:
    """`moe_runner` of docs/backends.md sets moe_runner_backend; any flag and any variable is an axis too."""
    assert ids(axes={"moe_runner": ["a"]}, reference="moe_runner_backend=a") == ["moe_runner_backend=a"]
    assert ids(axes={"moe_runner_backend": ["a"]}, reference="moe_runner_backend=a") == ["moe_runner_backend=a"]
    plan = grid.plan(
        SweepParams(axes={"page_size": [1, 64], "env:SGLANG_X": ["1"]}, reference="env.SGLANG_X=1+page_size=1")
    )
    assert [(t.flags, t.environment) for t in plan.trials] == [
        ({"page_size": 1}, {"SGLANG_X": "1"}),
        ({"page_size": 64}, {"SGLANG_X": "1"}),
    ]


def test_ids_do_not_depend_on_order_or_on_what_else_is_tried() -> None:
    """Another order of axes and values, more values, and a new axis that is null leave an id as it was."""
    reference = "attention_backend=triton+moe_runner_backend=cutlass"
    small = {"attention": ["triton"], "moe_runner": ["cutlass", "triton"]}
    large = {"moe_runner": ["marlin", "triton", "cutlass"], "attention": ["flashinfer", "triton"], "mamba": [None]}
    assert set(ids(axes=small, reference=reference)) <= set(ids(axes=large, reference=reference))


def test_ids_are_folder_names_and_differ_where_points_differ() -> None:
    """Values with slashes, spaces, lists and great length become safe names that stay apart."""
    values = ["a/b", "a b", "a_b", True, False, "x" * 300, "x" * 301, [1, 2], "1,2 "]
    made = {grid.point_id({"flag": value}) for value in values}
    assert len(made) == len(values)
    assert all(len(name) <= grid.ID_CHARACTERS and "/" not in name and " " not in name for name in made)


def test_the_reference_comes_first_then_what_differs_least() -> None:
    """After the reference one deviation, then two: a sweep that is cut short has learnt most."""
    order = ids(
        axes={"attention": ["flashinfer", "triton"], "moe_runner": ["cutlass", "triton"]},
        reference="attention_backend=triton+moe_runner_backend=triton",
    )
    assert order == [
        "attention_backend=triton+moe_runner_backend=triton",
        "attention_backend=flashinfer+moe_runner_backend=triton",
        "attention_backend=triton+moe_runner_backend=cutlass",
        "attention_backend=flashinfer+moe_runner_backend=cutlass",
    ]


def test_a_link_adds_flags_and_says_why() -> None:
    """Where a trial has all of `when`, it gets the link's flags and variables, and only there."""
    plan = grid.plan(
        SweepParams.model_validate(
            {
                "axes": MOE,
                "reference": "moe_runner_backend=triton",
                "links": [
                    {
                        "when": {"moe_runner": "cutlass"},
                        "flags": {"quantization": "modelopt_fp4"},
                        "environment": {"A": "1"},
                        "why": "needed",
                    }
                ],
            }
        )
    )
    linked = {t.id: (t.flags.get("quantization"), t.environment, t.linked) for t in plan.trials}
    assert linked["moe_runner_backend=cutlass"] == ("modelopt_fp4", {"A": "1"}, ["needed"])
    assert linked["moe_runner_backend=triton"] == (None, {}, [])


def test_what_is_left_out_is_listed_with_its_reason() -> None:
    """An exclusion, a double and (cross: false) a far point are no trials, and each says why."""
    plan = grid.plan(
        SweepParams.model_validate(
            {
                "axes": {**MOE, "attention": ["triton", "fa3"]},
                "cross": False,
                "candidates": [{"id": "same", "flags": {"attention_backend": "fa3", "moe_runner_backend": "triton"}}],
                "reference": "attention_backend=triton+moe_runner_backend=triton",
                "exclude": [{"when": {"moe_runner": "marlin"}, "why": "no kernel for it here"}],
            }
        )
    )
    why = {one.what: one.why for one in plan.left_out}
    assert why["attention_backend=triton+moe_runner_backend=marlin"] == "no kernel for it here"
    assert "more than one axis" in why["attention_backend=fa3+moe_runner_backend=cutlass"]
    assert why["attention_backend=fa3+moe_runner_backend=triton"] == "the same launch as same"
    tried = [t.id for t in plan.trials]
    assert len(tried) == 3 and not set(tried) & set(why)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"axes": MOE, "reference": "moe_runner_backend=tritn"}, "did you mean 'moe_runner_backend=triton'"),
        ({"reference": "a"}, "the trials: none"),
        ({"candidates": [{"id": "a"}, {"id": "a", "flags": {"x": 1}}], "reference": "a"}, "id 'a' twice"),
        ({"axes": {"moe_runner": []}, "reference": "x"}, "axis 'moe_runner' has no value"),
        ({"axes": {"moe_runner": ["a"], "moe_runner_backend": ["b"]}, "reference": "x"}, "two axes set moe_runner_backend"),
        (
            {"axes": MOE, "reference": "moe_runner_backend=triton",
             "links": [{"when": {"moe_runner": "cutlas"}, "why": "x"}]},
            "no trial has moe_runner=cutlas, did you mean 'cutlass'",
        ),
        (
            {"axes": MOE, "reference": "moe_runner_backend=triton",
             "links": [{"when": {"moe_runner": "cutlass"}, "flags": {"moe_runner_backend": "x"}, "why": "x"}]},
            "a link sets moe_runner_backend=x, the trial itself has cutlass",
        ),
        (
            {"axes": MOE, "reference": "moe_runner_backend=triton",
             "exclude": [{"when": {"moe_runner": "triton"}, "why": "no"}]},
            r"the reference .* is no trial \(left out: no\)",
        ),
        ({"candidates": [{"id": "a"}], "reference": "a", "verify": ["b"]}, "verify names 'b'"),
    ],
)  # fmt: skip
def test_a_grid_that_makes_no_sense_is_refused(params: dict[str, Any], words: str) -> None:
    """Misspelt references, links and exclusions would silently do nothing: they are named before anything is launched."""
    with pytest.raises(BadParams, match=words):
        grid.plan(SweepParams.model_validate(params))


@pytest.mark.parametrize("name", ["servers", "documents", "expected", "holders"])
def test_a_candidate_is_not_called_like_a_folder_of_the_run(name: str) -> None:
    """raw/02/servers is where launches lie."""
    with pytest.raises(ValueError, match="names a folder of the run"):
        SweepParams.model_validate({"candidates": [{"id": name}], "reference": name})


@pytest.mark.parametrize("file", sorted(ROOT.glob("params/*/02.yaml")), ids=lambda f: f.parent.name)
def test_every_profile_makes_a_sweep(file: Path) -> None:
    """The files under params/ give trials, the reference first, each with its own id."""
    made = grid.plan(SweepParams.model_validate(read_yaml(file))).trials
    assert len(made) >= 4 and len({t.id for t in made}) == len(made)
    assert made[0].id == read_yaml(file)["reference"]


def test_the_grid_of_the_documentation_is_one() -> None:
    """docs/sweep.md's example: the reference, two other runners, another attention; one point excluded."""
    made = grid.plan(SweepParams.model_validate(yaml.safe_load(known_findings.EXAMPLE)))
    assert [t.id.removeprefix("attention_backend=") for t in made.trials] == [
        "triton+moe_runner_backend=triton", "flashinfer+moe_runner_backend=triton",
        "triton+moe_runner_backend=cutlass", "triton+moe_runner_backend=flashinfer_cutedsl",
    ]  # fmt: skip
    assert "tried yesterday" in {one.why for one in made.left_out}
    assert made.trials[-1].flags["quantization"] == "modelopt_fp4"


# --- side by side -----------------------------------------------------------------------------------------------------
def test_without_gpus_or_with_one_each_trial_has_the_host_to_itself() -> None:
    """Servers on a CPU share its cores, and one GPU is one lane: nothing runs side by side, nothing is assigned."""
    for free in ([], ["0"]):
        assert grid.waves({"a": 1, "b": 1}, free) == [{"a": []}, {"b": []}]


def test_trials_run_side_by_side_as_far_as_gpus_last() -> None:
    """Three GPUs: three single trials, or one that needs two and one single; more than there are is left to the server."""
    assert grid.waves({"a": 1, "b": 1, "c": 1, "d": 1}, ["0", "1", "2"]) == [
        {"a": ["0"], "b": ["1"], "c": ["2"]},
        {"d": ["0"]},
    ]
    assert grid.waves({"a": 2, "b": 2, "c": 1}, ["0", "1", "2"]) == [{"a": ["0", "1"], "c": ["2"]}, {"b": ["0", "1"]}]
    assert grid.waves({"a": 8, "b": 1}, ["0", "1"]) == [{"a": []}, {"b": ["0"]}]


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(0, 8))
def test_no_gpu_is_given_twice_and_no_trial_is_lost(sizes: list[int], gpus: int) -> None:
    """Whatever the needs: each trial once, the first in the first group, GPUs of a group disjoint, each need met or none."""
    needs = {f"t{i}": size for i, size in enumerate(sizes)}
    made = grid.waves(needs, [str(i) for i in range(gpus)])
    assert sorted(itertools.chain.from_iterable(made)) == sorted(needs)
    assert "t0" in made[0]
    for group in made:
        given_out = list(itertools.chain.from_iterable(group.values()))
        assert len(given_out) == len(set(given_out))
        assert all(len(got) in (0, needs[name]) for name, got in group.items())
        assert len(group) == 1 or all(group.values())  # who has no GPUs of its own runs alone


def test_gpus_that_a_launch_takes() -> None:
    """Tensor x pipeline x data parallel, by any of their names; data parallel attention takes none of its own."""
    assert grid.gpus_needed({}) == 1
    assert grid.gpus_needed({"tp": 2, "pp_size": 2, "dp_size": 2}) == 8
    assert grid.gpus_needed({"tp_size": 4, "dp_size": 4, "enable_dp_attention": True}) == 4


def test_time_left_is_said_from_the_first_finished_trial_on() -> None:
    """Before the first trial nothing is known; then the mean of those done, for each that is not."""
    assert grid.seconds_left([], 4) is None
    assert grid.seconds_left([40, 60], 3, 20) == 130
    assert grid.seconds_left([10], 0) == 0
