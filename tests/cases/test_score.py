"""Our own cases of kinds bench and systemd are read right, follow their numbers, and the scorer cannot be fooled."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import map_bench
import map_systemd
import score

HERE = Path(__file__).parent


def cases(kind: str) -> list[dict[str, Any]]:
    """The project's own cases of a kind."""
    return [json.loads(line) for line in (HERE / kind / "cases.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("kind", ["bench", "systemd"])
def test_every_leaf_of_our_cases_is_right(kind: str) -> None:
    """All leaves that count are right, and there are many."""
    totals, wrong, given = score.score(HERE / kind)
    assert wrong == [] and given == []
    assert totals[kind][0] == totals[kind][1] > 30


@pytest.mark.parametrize("case", cases("systemd"), ids=lambda case: case["id"])
@pytest.mark.parametrize("seed", range(3))
def test_units_with_other_names_paths_and_order(case: dict[str, Any], seed: int) -> None:
    """Other paths, other accounts, other spacing and another order of keys change no answer."""
    rng = random.Random(seed)
    text = case["input"]["text"]
    for old, new in (
        ("/srv/m", "/data/checkpoints/x-1"),
        ("/opt/py/bin", "/home/ai/.venv/bin"),
        ("User=llm", "User=svc-9"),
        ("registry.example", "hub.invalid"),
    ):
        text = text.replace(old, new)
    if text.startswith("[Unit]"):
        sections = re.split(r"(?m)^(?=\[)", text)
        shuffled = []
        for section in sections:
            head, _, body = section.partition("\n")
            items = re.findall(r"(?:[^\n]*\\\n)*[^\n]*\n", body)
            rng.shuffle(items)
            shuffled.append(head + "\n" + "".join(items))
        text = "".join(shuffled)
        text = re.sub(r"(?m)^(\w+)=", lambda m: f"{m[1]} = " if rng.random() < 0.5 else m[0], text)
    got = map_systemd.answer({"kind": "systemd", "input": {"text": text}}, HERE)
    expected = case["expect"]
    assert [leaf for leaf in score.leaves(expected, got) if not leaf[3]] == []


# In a text block every number may be scaled by the same whole factor as long as rates and durations stay:
# counts x k and tok/s x k at the same duration leave every ratio as it was.
@pytest.mark.parametrize("factor", [2, 3, 10])
def test_a_block_follows_its_numbers(factor: int) -> None:
    """Counts and rates scaled together: counts scale, ratios stay."""
    case = next(case for case in cases("bench") if case["id"] == "many-failed")

    def scale(match: re.Match[str]) -> str:
        return match[1] + str(round(float(match[2]) * factor, 2)).removesuffix(".0")

    text = re.sub(
        r"(?m)^((?:Successful|Total (?:input|generated)|Request thr|Input tok|Output tok|Total tok)[^\n]*?: +)([\d.]+)",
        scale,
        case["input"]["text"],
    )
    text = text.replace("--num-prompts 500", f"--num-prompts {500 * factor}")
    got = map_bench.answer({"kind": "bench", "input": {"text": text}}, HERE)
    assert got["completed"] == 410 * factor and got["requested"] == 500 * factor and got["failed"] == 90 * factor
    assert got["success_rate"] == pytest.approx(0.82) and got["output_tokens_per_request"] == pytest.approx(200)
    assert got["out_tok_s"] == pytest.approx(1640 * factor) and got["valid"] is False


@pytest.mark.parametrize("count", [5, 8, 35, 400])
def test_a_storm_follows_its_count(count: int) -> None:
    """The number of restarts in the text is the number in the answer."""
    text = next(case for case in cases("systemd") if case["id"] == "supervised-storm")["input"]["text"].replace(
        "52", str(count)
    )
    got = map_systemd.answer({"input": {"text": text}}, HERE)
    assert got["restarts_about"] == count and got["class"] == "restart_storm"


@pytest.mark.parametrize(
    ("expected", "got", "right"),
    [
        ({"a": 100}, {"a": 100}, [True]),
        ({"a": 100}, {"a": 101}, [False]),
        ({"a": 100}, {"a": 100.9}, [True]),
        ({"a": 1.0}, {"a": 1.02}, [False]),
        ({"n_about": 57}, {"n_about": 58}, [True]),
        ({"n_about": 57}, {"n_about": 70}, [False]),
        ({"a": True}, {"a": 1}, [False]),
        ({"a": 1}, {"a": True}, [False]),
        ({"a": None}, {"a": None}, [True]),
        ({"a": None}, {}, [False]),
        ({"a": ""}, {"a": ""}, [True]),
        ({"a": ""}, {}, [False]),
        ({"class": "two words"}, {"class": "two words"}, [True]),
        ({"class": "x"}, {}, [False]),
        ({"why_so": "some prose here"}, {}, []),
        ({"note_x": 5}, {}, []),
        ({"a": "float8_e4m3fn"}, {"a": "bfloat16"}, [False]),
        ({"a": "1+2=3"}, {}, []),
        ({"a": []}, {"a": []}, [True]),
        ({"a": []}, {"a": ["x"]}, [False]),
        ({"a": [1, 2]}, {"a": [1, 3]}, [True, False]),
        ({"a": [1]}, {"a": [1, 2]}, [True, False]),
        ({"a": [{"b": 1}]}, {"a": [{"b": 1}]}, [True]),
        ({"a": ["x", "y"]}, {"a": ["y", "x"]}, [True]),
        ({"a": ["some prose", "more prose"]}, {}, []),
        ({"a": {"b": 1}}, {}, [False]),
        ({"a": 1}, {"a": float("nan")}, [False]),
    ],
)
def test_leaf_rules(expected: Any, got: Any, right: list[bool]) -> None:
    """Each rule of the comparison, right and wrong."""
    assert [leaf[3] for leaf in score.leaves(expected, got)] == right


def write(folder: Path, kind: str, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with one case and a map for it."""
    monkeypatch.setattr(score, "HERE", folder)
    (folder / f"map_{kind}.py").write_text(source)
    (folder / "cases.jsonl").write_text(
        json.dumps({"id": "x", "kind": kind, "input": {}, "expect": {"a": 5, "b": 6}}) + "\n"
    )


def test_a_map_that_copies_the_expectation_gets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leaf that follows a change of its own expected value was given: it counts neither as right nor in the total."""
    write(tmp_path, "audit", "def answer(case, folder):\n    return {'a': case['expect']['a'], 'b': 6}\n", monkeypatch)
    assert score.score(tmp_path) == ({"audit": [1, 1]}, [], ["x: a"])


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def answer(case, folder):\n    raise ValueError('no')\n", "ValueError: no"),
        ("def answer(case, folder):\n    return {}\n", "not answered"),
        ("1/0\n", "no map"),
    ],
)
def test_a_broken_map_is_wrong_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, reason: str
) -> None:
    """A map that raises, answers nothing or does not load makes all its leaves wrong, and the score goes on."""
    write(tmp_path, "audit", source, monkeypatch)
    totals, wrong, _ = score.score(tmp_path)
    assert totals == {"audit": [0, 2]}
    assert sum(reason in line for line in wrong) == 2


def test_a_missing_map_counts_as_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kind without a map is wrong, and the exit code says so."""
    write(tmp_path, "audit", "", monkeypatch)
    (tmp_path / "map_audit.py").unlink()
    assert score.main([str(tmp_path)]) == 1
    assert "all: 0/2" in capsys.readouterr().out
    assert score.main([str(tmp_path / "nowhere")]) == 2
