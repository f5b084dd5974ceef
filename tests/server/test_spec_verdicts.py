"""Words of notebook 04 that need no server: when a prediction came true, drafts a step, refused and odd parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from lib.errors import BadParams
from lib.load.metrics import Level
from lib.params import SpeculativeParams, validated
from lib.records import Measured, Prediction
from lib.results import NotebookRun
from lib.server import recorded_arms, speculative
from lib.server.arms import requests_at
from lib.server.spec_analysis import drafts_of, level_counts
from tests.conftest import TINY


def made(predicted: float | None, low: float | None, high: float | None) -> Prediction:
    measured = Measured(value=1.0, n=4, low=low, high=high, reason=None if low else "one launch")
    return Prediction(
        id="pilot-x",
        what="x",
        predicted=Measured(value=predicted, reason="none"),
        formula="f",
        source="s",
        measured=measured,
    )


@pytest.mark.parametrize(
    ("prediction", "fate"),
    [
        # the limit is 15% around 1.0: 0.85 to 1.15
        (made(1.0, 0.95, 1.05), "right"),
        (made(1.0, 1.20, 1.40), "wrong"),
        (made(1.0, 0.50, 0.80), "wrong"),
        (made(1.0, 0.50, 2.00), "undecided"),  # a wide interval proves nothing
        (made(1.0, None, None), None),
        (made(None, 0.9, 1.1), None),
    ],
)
def test_a_prediction_is_right_only_if_the_whole_interval_is_near(prediction: Prediction, fate: str | None) -> None:
    """Inside the limit: right; outside: wrong; across: undecided; nothing to compare: None."""
    assert speculative._came_true(prediction) == fate


def test_drafts_a_step_come_from_the_server_and_else_from_params() -> None:
    """With topk 1 the steps count (8 draft tokens are adjusted to 4); a tree has one draft less than its tokens."""
    params = validated(
        SpeculativeParams,
        {"flags": {"speculative_eagle_topk": 1, "speculative_num_steps": 3, "speculative_num_draft_tokens": 8}},
        "t",
    )
    assert drafts_of(params, None) == 3
    info = {"speculative_eagle_topk": 2, "speculative_num_steps": 3, "speculative_num_draft_tokens": 8}
    assert drafts_of(params, info) == 7
    assert drafts_of(validated(SpeculativeParams, {}, "t"), {}) is None


def test_requests_of_a_level() -> None:
    """At least 8, twice the concurrency, or what params say, but never fewer than run at once."""
    assert [requests_at(validated(SpeculativeParams, {}, "t"), c) for c in (1, 4, 16)] == [8, 8, 32]
    assert requests_at(validated(SpeculativeParams, {"num_requests": 4}, "t"), 16) == 16


@pytest.mark.parametrize("levels", [[], [4, 1], [1, 1], [0, 1]])
def test_levels_in_disorder_are_refused(levels: list[int]) -> None:
    """Different levels in rising order: pilots take the first as the smallest."""
    with pytest.raises(BadParams, match="concurrency"):
        validated(SpeculativeParams, {"concurrency": levels}, "t")


def test_requests_that_failed_or_say_nothing_are_no_counts() -> None:
    """Only answers that succeeded and counted tokens are counted; one without `meta` was not speculated."""
    ok = {"failure": None, "usage": {"completion_tokens": 8}, "meta": {"spec_verify_ct": 4}}
    rows = [ok, {**ok, "failure": "stall"}, {**ok, "usage": None}, {**ok, "meta": None}]
    assert [c.verify_steps for c in level_counts(Level({}, rows))] == [4, None]


def test_an_attached_server_gets_no_arms_and_says_why(tmp_path: Path) -> None:
    """Nothing is restarted: no launch, recorded and published runs still speak."""
    params = validated(
        SpeculativeParams,
        {
            "profile": TINY,
            "server": {"attach": "http://127.0.0.1:9", "model": None},
            "published": "qwen3.5-397b-nvfp4-rtx6000x8",
        },
        "t",
    )
    run = NotebookRun("04", params, tmp_path, False)
    start = speculative.try_treatment(run)
    arms = speculative.measure_arms(run, start)
    assert start is None and arms is None and "not restarted" in run.skipped[0]
    assert speculative.incantation_rows(run) == speculative.forms(run) == speculative.before_launch_rows(run) == []
    found, recorded = speculative.analyse(run, arms), recorded_arms.recorded_runs(run)
    foreseen = speculative.predictions(run, arms, found, recorded)
    verdicts = speculative.verdicts(run, start, arms, found, foreseen, recorded, recorded_arms.published_tables(run))
    assert {v.id: v.status.value for v in verdicts} == {
        "recorded-random_ids": "inconclusive", "recorded-repeating_text": "inconclusive", "published": "invalid",
    }  # fmt: skip
    assert "not tried here" in speculative.recommendation(run, start, arms, found, recorded)


def test_recorded_texts_predict_each_other_and_the_error_stays(tmp_path: Path) -> None:
    """Random ids from the step cost on repeating text: 1.652 / 3.18 = 0.52 where 0.36 was measured; it is kept."""
    run = NotebookRun("04", validated(SpeculativeParams, {"profile": TINY}, "t"), tmp_path, False)
    recorded = recorded_arms.recorded_runs(run)
    one = next(p for p in recorded.predictions if p.id == "recorded-random_ids")
    assert one.predicted.value == pytest.approx(0.519, abs=0.002)
    assert one.measured and one.measured.value == pytest.approx(0.363, abs=0.001)
    assert [t.ok for t in recorded.traces] == [True, True] and recorded.traces[1].identity_checks == 0
