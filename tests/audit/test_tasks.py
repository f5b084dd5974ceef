"""Agent tasks: items from a seed, exact grading, control arms, exact McNemar, and streaming to disk."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lib.audit.tasks import (
    CHARACTERS_PER_TOKEN,
    FAMILIES,
    Item,
    able_families,
    ask_items,
    compare_tasks,
    make_items,
    read_answers,
    right,
    run_tasks,
)
from lib.errors import BadInput, ServerError


@pytest.mark.parametrize("family", FAMILIES)
def test_both_arms_ask_the_same_and_hold_the_answer(family: str) -> None:
    """Control and deep differ in what stands around the facts, not in facts, question or answer; both are seeded."""
    control, deep = make_items(1, 1500, families=[family])
    assert (control.arm, deep.arm) == ("control", "deep") and control.expected == deep.expected
    assert control.prompt.rsplit("\n\n", 1)[1] == deep.prompt.rsplit("\n\n", 1)[1]
    assert len(deep.prompt) > 1500 * CHARACTERS_PER_TOKEN > 3 * len(control.prompt)
    assert make_items(1, 1500, families=[family]) == [control, deep] != make_items(1, 1500, families=[family], seed=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_facts_of_a_deep_item_lie_in_its_first_half(family: str) -> None:
    """What is asked for stands more than a third of the file before the question."""
    for item in make_items(4, 1500, families=[family])[1::2]:
        parts = (
            json.loads(item.expected)["arguments"]["assignee"]
            if item.kind == "json"
            else item.expected.split(",")[0].strip('"]')
        )
        place = item.prompt.index(parts)
        assert place < 0.66 * len(item.prompt), (place, len(item.prompt))


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_exact_answer_is_right(family: str) -> None:
    """The expected text with anything behind it is right; one changed character, nothing, or a cut answer is not."""
    item = make_items(1, 600, families=[family])[0]
    answer = item.expected.removeprefix('{"name": "') if item.kind == "json" else item.expected
    assert right(item, f"{answer}\n\nmore") and right(item, answer)
    wrong = [answer[: len(answer) // 2], "", answer.replace(answer[len(answer) // 2], "~", 1), "x" + answer]
    assert not [w for w in wrong if right(item, w)]


def test_a_longer_number_is_not_the_number() -> None:
    """7391 is wrong where 73912 is written."""
    item = Item(id="x", family="renamed", arm="deep", prompt="", expected="7391", kind="text", max_new_tokens=4)
    assert right(item, " 7391") and right(item, "7391\n") and not right(item, "73912")


def test_a_tool_call_is_judged_as_json() -> None:
    """Order and spaces do not matter; another value, another key, or text that is no JSON does."""
    item = make_items(1, 600, families=["tool_call"])[0]
    call = json.loads(item.expected)

    def told(c: dict[str, Any]) -> str:
        return json.dumps(c).removeprefix('{"name": "')

    assert right(item, told({"name": call["name"], "arguments": dict(reversed(call["arguments"].items()))}))
    assert not right(
        item, told({**call, "arguments": {**call["arguments"], "priority": str(call["arguments"]["priority"])}})
    )
    assert not right(item, told({**call, "arguments": {**call["arguments"], "more": 1}}))
    assert not right(item, 'open_x", "arguments": {')


def test_unknown_families_and_shallow_depths_are_refused() -> None:
    """The known ones are named."""
    with pytest.raises(BadInput, match="needle"):
        make_items(1, 600, families=["nonsense"])
    with pytest.raises(BadInput):
        make_items(1, 200)


def answers(family: str, control: list[bool], deep: list[bool]) -> list[dict[str, Any]]:
    arms = {"control": control, "deep": deep}
    return [{"id": f"{family}-{i:03d}-{arm}", "right": x} for arm, values in arms.items() for i, x in enumerate(values)]


def test_items_that_only_one_server_can_do_are_counted_by_exact_mcnemar() -> None:
    """Nine items lost, one gained of twelve: p = 2 x (1 + 10) / 2^10 = 0.0215."""
    a = answers("needle", [True] * 12, [True] * 9 + [False] + [True] * 2)
    b = answers("needle", [True] * 12, [False] * 9 + [True] + [True] * 2)
    row, total = compare_tasks(a, b)
    assert (
        row.outcome == "lost" and row.p_value == pytest.approx(0.0215, abs=1e-4) and (row.only_a, row.only_b) == (9, 1)
    )
    assert total.family == "all" and total.usable == 12


def test_who_fails_the_control_is_skipped_and_says_nothing_about_depth() -> None:
    """One of eight right close by: the model can't, whatever happens at depth."""
    a = answers("signature", [True] + [False] * 7, [False] * 8)
    (row,) = compare_tasks(a, a)
    assert row.outcome == "skipped" and "1 of 8" in row.reason and row.p_value is None


def test_an_item_whose_control_the_other_server_fails_is_not_a_matter_of_depth() -> None:
    """Four items that B fails even close by are left out of the pairs."""
    a = answers("needle", [True] * 10, [True] * 10)
    b = answers("needle", [False] * 4 + [True] * 6, [False] * 10)
    assert compare_tasks(a, b)[0].usable == 6


def test_few_items_are_not_enough_and_equal_ones_state_their_power() -> None:
    """Fewer than six pairs can't reach p < 0.05; twelve equal ones say which loss would have been seen."""
    few = answers("needle", [True] * 5, [True] * 5)
    assert compare_tasks(few, few)[0].outcome == "not_enough_data"
    many = answers("needle", [True] * 12, [True] * 12)
    row = compare_tasks(many, many)[0]
    assert row.outcome == "none_seen" and "50%" in row.reason


def test_other_items_are_refused() -> None:
    """Two servers that were asked other items can't be paired."""
    with pytest.raises(BadInput, match="same items"):
        compare_tasks(answers("needle", [True], [True]), answers("renamed", [True], [True]))


class Solver:
    """Answers right up to a prompt length, as a model that loses what is far; dies after some requests."""

    def __init__(self, reach: int, items: list[Item], dies_after: int | None = None) -> None:
        self.reach, self.asked, self.dies_after = reach, 0, dies_after
        self.expected = {i.prompt: i.expected.removeprefix('{"name": "') for i in items}

    def flush_cache(self) -> None:
        pass

    def post_bytes(self, path: str, body: dict[str, Any], timeout_s: float = 0) -> bytes:
        self.asked += 1
        if self.dies_after is not None and self.asked > self.dies_after:
            raise ServerError("an answer", "none")
        text = self.expected[body["text"]] if len(body["text"]) < self.reach else "?"
        return json.dumps(
            {"text": text, "meta_info": {"prompt_tokens": len(body["text"]) // 3, "finish_reason": None}}
        ).encode()


def test_depth_lost_by_one_server_is_found(tmp_path: Path) -> None:
    """A reaches 10,000 characters, B only 2,000: every control is right under both, every deep item only under A."""
    items = make_items(2, 900)
    found = []
    for reach in (10_000, 2_000):
        folder = tmp_path / str(reach)
        folder.mkdir()
        run_tasks(SimpleNamespace(control=Solver(reach, items)), folder, 2, 900)  # type: ignore[arg-type]
        found.append(read_answers(folder))
    total = compare_tasks(*found)[-1]
    assert (total.family, total.outcome, total.only_a, total.only_b) == ("all", "lost", 12, 0)


def test_deep_items_are_asked_only_where_the_control_is_done(tmp_path: Path) -> None:
    """A model that can do nothing is asked the 12 controls and nothing else."""
    solver = Solver(0, make_items(2, 900))
    run_tasks(SimpleNamespace(control=solver), tmp_path, 2, 900)  # type: ignore[arg-type]
    assert solver.asked == 12 and able_families(read_answers(tmp_path))["needle"] == (0, 2)


def test_the_other_server_is_asked_only_what_the_reference_can_do(tmp_path: Path) -> None:
    """Two families named: 4 controls and 4 deep items, and the others stay skipped in the comparison."""
    items = make_items(2, 900)
    solver = Solver(10**6, items)
    run_tasks(SimpleNamespace(control=solver), tmp_path, 2, 900, families=["needle", "renamed"])  # type: ignore[arg-type]
    assert solver.asked == 8
    reference = [{"id": i.id, "right": i.family in ("needle", "renamed")} for i in items]
    outcomes = {r.family: r.outcome for r in compare_tasks(reference, read_answers(tmp_path))}
    assert outcomes["signature"] == "skipped" and outcomes["needle"] == "not_enough_data"


def test_answers_stream_to_disk_and_a_second_call_asks_what_is_missing(tmp_path: Path) -> None:
    """A server that dies after five answers leaves five; a line that was cut off is asked again."""
    items = make_items(1, 900)
    rows = [i.model_dump() for i in items]
    with pytest.raises(ServerError):
        ask_items(SimpleNamespace(control=Solver(10**6, items, 5)), tmp_path, rows, parallel=1)  # type: ignore[arg-type]
    assert len(read_answers(tmp_path)) == 5
    with (tmp_path / "answers.jsonl").open("a") as file:
        file.write('{"id": "cut')
    (tmp_path / "answers.jsonl").write_text((tmp_path / "answers.jsonl").read_text() + "\n")
    solver = Solver(10**6, items)
    ask_items(SimpleNamespace(control=solver), tmp_path, rows, parallel=1)  # type: ignore[arg-type]
    assert solver.asked == 7 and len(read_answers(tmp_path)) == 12
