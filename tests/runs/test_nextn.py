"""Notebook 04 itself against a stand-in server that speculates, through several launches: honest ones and ones that lie."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lib.errors import BadInput
from lib.load.metrics import ClientVerdict
from lib.records import NotebookResult
from lib.server import arms, spec_analysis
from tests.runs.nextn_play import make_profile, play, small, verdict
from tests.runs.nextn_play import quick as quick  # a fixture

pytestmark = pytest.mark.timeout(300)
#: A speculative step costs 1.5 decode steps alone and 3.5 with four in flight: repeating text pays at first, then no more.
HONEST = {
    "base_s": 0.010,
    "cycle_s": 0.015,
    "cycle_load_s": 0.009,
    "accept": {"random": 0.0, "repeating": 1.0, "text": 0.6},
    "answers": "near_tie",
}


@pytest.fixture(scope="module")
def patched() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arms, "take_calibration", lambda folder, **_: (folder / "calibration.json").write_text("{}"))
        patch.setattr(spec_analysis, "client_verdict", lambda level: ClientVerdict("ok", ()))
        yield patch


@pytest.fixture(scope="module")
def honest(
    tmp_path_factory: pytest.TempPathFactory, patched: pytest.MonkeyPatch
) -> tuple[NotebookResult, Path, dict[str, Any]]:
    """One experiment with an honest server: A B B A, two texts, two levels; its result, folder and parameters."""
    folder = tmp_path_factory.mktemp("honest")
    patched.setenv("WORKBOOK_CACHE", str(folder / "cache"))
    params = small(
        make_profile(folder / "profile", HONEST),
        texts=["repeating", "random_ids"],
        concurrency=[1, 6],
        input_len=80,  # the repeated sentence fits in several times
        num_requests=4,
        samples=16,
        long_run_requests=8,
        long_run_len=64,
        published="qwen3.5-397b-nvfp4-rtx6000x8",
        recorded="tests/recorded/h200-sglang-0.5.16",
        expected={
            "accept_length": {"repeating": 4.0, "random_ids": 1.0},
            "verify_cost": 1.0,
            "draft_cost": 0.5,
            "source": "the stand-in's settings",
        },
    )
    return play(folder / "run", params, patched), folder / "run", params


def test_four_launches_in_the_order_a_b_b_a(honest: Any) -> None:
    """Each switch is a launch of its own, each a process of its own, and the launches alternate."""
    result, run, _ = honest
    records = sorted(
        (json.loads(f.read_text()) for f in run.glob("raw/04/servers/*/launch.json")), key=lambda r: r["started_at"]
    )
    assert [r["name"] for r in records] == ["base-1", "treated-1", "treated-2", "base-2"]
    assert len({r["pid"] for r in records}) == 4
    seeds = {json.loads(f.read_text())["random_seed"] for f in run.glob("raw/04/servers/*/server_info.json")}
    assert len(seeds) == 4  # else two launches would draw the same samples, and their distance would be none
    assert len([s for s in result.servers if s.origin == "launched"]) == 4


def test_it_was_on_where_it_should_be(honest: Any) -> None:
    """Steps in both treated launches, none in the others, identity checked: the trace passes and counts its steps."""
    found = verdict(honest[0], "was-on")
    assert (
        found.status == "pass"
        and found.measured
        and int(found.measured.value or 0) > 100
        and len(found.launch_ids) == 4
    )
    assert any((e.note or "") == "draft weights" and e.line for e in found.evidence)


def test_repeating_text_pays_alone_and_random_ids_cost(honest: Any) -> None:
    """4 tokens for 1.5 decode steps pays at C=1; nothing accepted costs; n is the number of launches."""
    pays, costs = verdict(honest[0], "pays-repeating-C1"), verdict(honest[0], "pays-random_ids-C1")
    assert pays.status == "pass" and "pays:" in pays.reason and pays.measured and pays.measured.n == 4
    assert costs.status == "fail" and "costs:" in costs.reason
    assert (pays.measured.low or 0) > 1 and costs.measured and (costs.measured.high or 9) < 1


def test_the_crossover_lies_between_measured_levels(honest: Any) -> None:
    """A step costs 1.5 decode steps alone and 6 with six in flight: 4 tokens a step stop paying between."""
    found = verdict(honest[0], "crossover-repeating")
    assert found.measured and isinstance(found.measured.value, float) and 1.5 < found.measured.value < 6
    assert "already" in verdict(honest[0], "crossover-random_ids").reason


def test_the_prediction_was_frozen_before_the_treated_levels(honest: Any) -> None:
    """Its raw record is older than every treated level, it is beside the measurement, and it is right for most cells."""
    result, run, _ = honest
    frozen = json.loads((run / "raw/04/expectation-pilot/stamp.json").read_text())["started"]
    levels = [
        json.loads(f.read_text())["started"]
        for f in run.glob("raw/04/treated-*/*-C?/stamp.json")
        if "pilot" not in str(f)
    ]
    assert len(levels) == 8 and all(frozen <= at for at in levels)
    before = json.loads((run / "raw/04/expectation-params/stamp.json").read_text())["started"]
    first = min(json.loads(f.read_text())["started"] for f in run.glob("raw/04/servers/*/launch.json"))
    assert before <= first
    by_id = {p.id: p for p in result.predictions}
    asked = by_id["params-repeating-C1"]
    assert asked.predicted.value == pytest.approx(4 / 1.5) and asked.measured and asked.measured.value
    pilot = by_id["pilot-repeating-C1"]
    assert pilot.predicted.value == pytest.approx(float(pilot.measured.value), rel=0.35)  # type: ignore[union-attr, arg-type]
    assert verdict(result, "foreseen").measured.n == 4  # type: ignore[union-attr]


def test_near_ties_explain_the_divergences(honest: Any) -> None:
    """The treated server flips tokens 0.01 nat apart and no others: answers differ, all explained, the floor is clean."""
    found = verdict(honest[0], "same-greedy")
    assert found.status == "pass" and "every divergence is a near tie" in found.reason, found.reason
    assert "identical" in found.reason and (honest[1] / "raw/04/tops/tops.json").exists()


def test_honest_sampling_and_parameters_pass(honest: Any) -> None:
    """The same odds with and without; min_p and penalties honoured."""
    assert verdict(honest[0], "same-sampled").status == "pass"
    assert verdict(honest[0], "parameters").status in ("pass", "inconclusive")
    assert "min_p honoured" in str(verdict(honest[0], "parameters").measured.value)  # type: ignore[union-attr]


def test_a_long_run_says_how_full_the_pool_was(honest: Any) -> None:
    """Nothing decays, nothing loops; at 12% usage S4 can't be excluded, and that is said."""
    found = verdict(honest[0], "lasts")
    assert found.status in ("pass", "inconclusive") and "12%" in found.reason and "can't exclude" in found.reason


def test_chunks_carry_several_tokens(honest: Any) -> None:
    """Repeating text at C=1: a chunk every 15 ms with 4 tokens, so under half of that a token; without, both are equal."""
    values = next(t for t in honest[0].trials if t.id == "repeating-C1").values
    gap, token = float(values["treated_gap_s"].value), float(values["treated_token_s"].value)
    assert token < 0.5 * gap
    assert float(values["base_gap_s"].value) == pytest.approx(float(values["base_token_s"].value), rel=0.05)


def test_recorded_and_published_runs_carry_honest_identities(honest: Any) -> None:
    """Recorded servers are told by their files' hashes and say that no launch id exists; the origin's tables are invalid."""
    recorded = [s for s in honest[0].servers if s.origin == "recorded"]
    assert [s.launch_id for s in recorded] == ["recorded m1_base, no launch id", "recorded m1_nextn, no launch id"]
    assert all(s.pid is None and "no launch id" in s.checks[0] for s in recorded)
    assert any("m1_nextn.log" in c and len(c.split()[1]) == 64 for c in recorded[1].checks)
    published = verdict(honest[0], "published")
    assert published.status == "invalid" and "no verification step" in published.reason
    assert verdict(honest[0], "recorded-random_ids").status == "inconclusive"


def test_everything_is_derived_again_without_a_server(honest: Any, patched: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same verdicts, predictions and trials from the raw files alone; a raw latency that is changed changes its ratio."""
    result, run, params = honest
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    again = play(copy, params, patched, offline=True)
    assert (
        again.verdicts == result.verdicts and again.predictions == result.predictions and again.trials == result.trials
    )
    for level in copy.glob("raw/04/treated-*/repeating-C1/level.jsonl"):
        lines = [json.loads(line) for line in level.read_text().splitlines()]
        for line in lines[1:]:
            line["end_ns"] += 2_000_000_000
        level.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    slower = play(copy, params, patched, offline=True)
    assert (verdict(slower, "pays-repeating-C1").measured.value or 9) < 1  # type: ignore[union-attr, operator]


def test_a_resumed_run_measures_nothing_again(honest: Any, patched: pytest.MonkeyPatch) -> None:
    """Played once more in its folder: no new launch, the same verdicts, the expectation untouched."""
    result, run, params = honest
    stamp = (run / "raw/04/expectation-pilot/stamp.json").read_text()
    again = play(run, params, patched)
    assert len(list(run.glob("raw/04/servers/*/launch.json"))) == 4
    assert again.verdicts == result.verdicts and (run / "raw/04/expectation-pilot/stamp.json").read_text() == stamp


SIMULATED = {"SGLANG_SIMULATE_ACC_LEN": "3.0"}


@pytest.mark.parametrize(
    ("lie", "environment", "words"),
    [
        ("no_steps", {}, ["no verification step"]),  # the origin: asked for, started, never on
        ("base_speculates", SIMULATED, ["verification steps in the arm without", "SGLANG_SIMULATE_ACC_LEN=3.0"]),
    ],
)
def test_arms_that_lie_are_invalid(
    quick: Callable[..., NotebookResult], lie: str, environment: dict[str, str], words: list[str]
) -> None:
    """Whatever the throughput says: nothing pays, costs or equals without a trace of the treatment, or with a made-up one."""
    result = quick({"lie": lie, "base_s": 0.004, "cycle_s": 0.006}, environment, launches=1)
    for text in words:
        nothing_is_concluded(result, text, ["invalid"])


def nothing_is_concluded(result: NotebookResult, words: str, pays: list[str]) -> None:
    found = verdict(result, "was-on")
    assert found.status == "invalid" and words in found.reason
    assert [v.status for v in result.verdicts if v.id.startswith("pays-")] == pays
    assert verdict(result, "same-greedy").status == "invalid"
    assert result.recommendation.startswith("Nothing may be concluded")


def without_steps(meta: dict[str, Any], number: int) -> None:
    if number % 3 == 0:
        for name in [name for name in meta if name.startswith("spec_")]:
            del meta[name]


def impossible(meta: dict[str, Any], _: int) -> None:
    meta["spec_verify_ct"] = max(1, meta["spec_verify_ct"] // 8)


@pytest.mark.parametrize(
    ("change", "words"), [(without_steps, "have no verification step"), (impossible, "impossible counts")]
)
def test_counts_that_cannot_be_are_invalid(
    honest: Any, patched: pytest.MonkeyPatch, tmp_path: Path, change: Callable[..., None], words: str
) -> None:
    """The honest arms' own records, with the counts of one treated level changed: that launch proves nothing any more."""
    _, run, params = honest
    shutil.copytree(run, tmp_path / "copy")
    level = tmp_path / "copy/raw/04/treated-1/repeating-C1/level.jsonl"
    lines = [json.loads(line) for line in level.read_text().splitlines()]
    for number, line in enumerate(lines[1:]):
        change(line["meta"], number)
    level.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    nothing_is_concluded(play(tmp_path / "copy", params, patched, offline=True), words, ["invalid"] * 4)


def test_lossy_thresholds_are_said(honest: Any, patched: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A threshold that was lowered while the server ran: its speed counts as lossy, its answers as not the same."""
    _, run, params = honest
    shutil.copytree(run, tmp_path / "copy")
    state = tmp_path / "copy/raw/04/treated-2/state/state.json"
    said = json.loads(state.read_text())
    assert said["internal_states"] == [{"speculative_accept_threshold_single": 1.0}]
    said["internal_states"][0]["speculative_accept_threshold_single"] = 0.8
    state.write_text(json.dumps(said))
    result = play(tmp_path / "copy", params, patched, offline=True)
    assert verdict(result, "was-on").status == "pass" and "lossy" in verdict(result, "was-on").reason
    assert verdict(result, "same-greedy").status == "fail" and "(lossy)" in verdict(result, "pays-repeating-C1").claim
    assert "lossy as configured" in result.recommendation


def test_wrong_answers_ignored_parameters_and_a_loop_are_found(quick: Callable[..., NotebookResult]) -> None:
    """A server whose verification changes tokens, ignores parameters, samples otherwise and ends in '!!!!' (S4)."""
    result = quick(
        {
            "base_s": 0.002,
            "cycle_s": 0.002,
            "answers": "wrong",
            "parameters": "ignored",
            "sampled": "other",
            "loop": True,
        },
        samples=16,
        texts=["chat"],
        long_run_requests=12,
        long_run_len=64,
    )
    greedy = verdict(result, "same-greedy")
    assert greedy.status == "fail" and "no near tie" in greedy.reason and "launched twice, gave 2 of 2" in greedy.reason
    assert verdict(result, "same-sampled").status == "fail"
    parameters = verdict(result, "parameters")
    assert parameters.status == "fail" and "min_p ignored" in str(parameters.measured.value)  # type: ignore[union-attr]
    assert verdict(result, "lasts").status == "fail" and "S4" in verdict(result, "lasts").reason


def test_parameters_that_turn_nothing_on_are_refused(tmp_path: Path, patched: pytest.MonkeyPatch) -> None:
    """The environment variable alone is no treatment: both arms would be the same server."""
    params = small(make_profile(tmp_path / "profile", {}), flags={}, environment={"SGLANG_ENABLE_SPEC_V2": "1"})
    with pytest.raises(BadInput, match="variable alone turns nothing on"):
        play(tmp_path / "run", params, patched)
