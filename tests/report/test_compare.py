"""Two runs side by side: what changed, what differs really, what can't be compared."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lib.params import ROOT
from lib.records import Measured, NotebookResult, Status
from lib.report.compare import compare_runs, difference_of, flat, server_facts
from tests.report import made_run

EXAMPLE = str(ROOT / "outputs" / "examples" / "h200")


def measured(value: float, half: float | None = None, unit: str = "tok/s", n: int | None = 4) -> Measured:
    """A value with a symmetric interval, or none."""
    if half is None:
        return Measured(value=value, unit=unit, n=n)
    return Measured(value=value, unit=unit, n=n, low=value - half, high=value + half)


def changed(result: NotebookResult, **verdict: Any) -> NotebookResult:
    """The result with its first verdict changed."""
    first = result.verdicts[0].model_copy(update=verdict)
    return result.model_copy(update={"verdicts": [first, *result.verdicts[1:]]})


def compared(a: NotebookResult, b: NotebookResult) -> Any:
    """A against B as two runs of one notebook."""
    return compare_runs("A", {"03": a}, "B", {"03": b})


def outcome(found: Any, key: str) -> Any:
    """The difference of the verdict with this id."""
    return next(d for d in found.differences if d.kind == "verdict" and d.id == key)


@pytest.fixture
def base() -> NotebookResult:
    """A made result whose first verdict has a number with an interval."""
    return changed(made_run.result("03"), measured=measured(10, 2), status=Status.PASS)


def test_an_interval_of_a_difference_combines_both() -> None:
    """10 +- 2 against 20 +- 3: 10 +- sqrt(13) = 3.606; asymmetric limits stay asymmetric."""
    found = difference_of(measured(10, 2), measured(20, 3))
    assert (found.value, found.low, found.high) == (
        10,
        pytest.approx(10 - math.sqrt(13)),
        pytest.approx(10 + math.sqrt(13)),
    )
    skewed = difference_of(Measured(value=0, low=-1, high=3, unit="s"), Measured(value=0, low=-1, high=3, unit="s"))
    # low: sqrt((0 - -1)^2 + (3 - 0)^2) = sqrt(10) both ways, by symmetry of the pair
    assert (skewed.low, skewed.high) == (pytest.approx(-math.sqrt(10)), pytest.approx(math.sqrt(10)))


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (measured(1), measured(2, 0.1), "no interval on A"),
        (measured(1, 0.1), measured(2), "no interval on B"),
        (measured(1, 0.1), measured(2, 0.1, unit="s"), "units differ"),
        (Measured(value=None, reason="not measured"), measured(2, 0.1), "no value in A: not measured"),
    ],
)
def test_what_has_no_interval_or_unit_in_common_gives_no_interval(a: Measured, b: Measured, words: str) -> None:
    """No difference is made up where one side can't carry it."""
    found = difference_of(a, b)
    assert words in (found.reason or "") and found.low is None and found.high is None


def test_a_run_against_itself_has_no_difference(base: NotebookResult) -> None:
    """Nothing changed, nothing is real, and the note says that what differs would be noise."""
    found = compared(base, base)
    assert found.changes == [] and not [d for d in found.differences if d.outcome in ("real", "changed")]
    assert any("drift or noise" in n for n in found.notes)


@pytest.mark.parametrize(("value", "expected"), [(20.0, "real"), (10.5, "not_told_apart"), (10.0, "same")])
def test_a_difference_is_real_when_its_interval_leaves_out_zero(
    base: NotebookResult, value: float, expected: str
) -> None:
    """10 +- 2 against 20, 10.5 and 10, each +- 2."""
    found = outcome(compared(base, changed(base, measured=measured(value, 2))), base.verdicts[0].id)
    assert found.outcome == expected


def test_a_changed_method_is_not_comparable_and_a_changed_flag_is(base: NotebookResult) -> None:
    """Another output_len measures something else; another server flag is what one wants to compare."""
    other = changed(base, measured=measured(20, 2))
    params = {**base.provenance.params, "output_len": 999, "server": {"flags": {"kv_cache_dtype": "fp8_e5m2"}}}
    method = other.model_copy(update={"provenance": base.provenance.model_copy(update={"params": params})})
    found = outcome(compared(base, method), base.verdicts[0].id)
    assert found.outcome == "not_comparable" and "output_len" in found.reason and "kv_cache_dtype" not in found.reason
    treatment = base.provenance.model_copy(update={"params": {**base.provenance.params, "server": params["server"]}})
    found = compared(base, other.model_copy(update={"provenance": treatment}))
    assert outcome(found, base.verdicts[0].id).outcome == "real"
    assert [c.what for c in found.changes] == ["server.flags.kv_cache_dtype"]


def test_a_verdict_that_got_worse_is_named(base: NotebookResult) -> None:
    """pass to fail is worse, fail to pass is not."""
    worse = changed(base, status=Status.FAIL)
    assert [d.id for d in compared(base, worse).worse()] == [base.verdicts[0].id]
    assert compared(worse, base).worse() == []


def test_another_limit_is_not_comparable(base: NotebookResult) -> None:
    """A claim judged by another limit is another claim."""
    found = outcome(compared(base, changed(base, limit="another")), base.verdicts[0].id)
    assert found.outcome == "not_comparable" and "limit" in found.reason


def test_claims_of_one_side_only_are_named(base: NotebookResult) -> None:
    """A claim that the other run lacks is not dropped; a notebook that it lacks is a note."""
    less = base.model_copy(update={"verdicts": base.verdicts[1:]})
    assert outcome(compared(base, less), base.verdicts[0].id).outcome == "only_a"
    assert outcome(compared(less, base), base.verdicts[0].id).outcome == "only_b"
    assert any("only in A" in n for n in compare_runs("A", {"03": base}, "B", {}).notes)


def test_server_facts_leave_out_what_differs_at_every_launch() -> None:
    """Ports and paths are no change; the version and the dtype are; a server that never answered is known by its argv."""
    one = made_run.identity("L1", port=30000, random_seed=1)
    other = made_run.identity("L2", port=31000, random_seed=2, kv_cache_dtype="fp8_e4m3")
    a, b = server_facts(one), server_facts(other)
    assert {k for k in {*a, *b} if a.get(k) != b.get(k)} == {"kv_cache_dtype"}
    silent = one.model_copy(
        update={"resolved_args": {}, "argv": ["python", "--port", "1", "--dtype", "bf16", "--host=x"]}
    )
    assert server_facts(silent)["argv"] == "--dtype bf16"


def test_nested_parameters_are_told_apart_key_by_key() -> None:
    """Dotted keys; lists stay whole."""
    assert flat({"a": {"b": 1, "c": [1, 2]}, "d": None}) == {"a.b": 1, "a.c": [1, 2], "d": None}


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`workbook compare` as a user runs it."""
    return subprocess.run(
        [sys.executable, "-m", "lib.cli", "compare", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


def test_the_command_compares_folders(tmp_path: Path) -> None:
    """Text, JSON and a page; exit code 1 only when asked and something got worse; hostile text is inert."""
    a, b = tmp_path / "a", tmp_path / "b"
    shutil.copytree(made_run.make_run(a), b)
    file = b / "03.result.json"
    data = json.loads(file.read_text())
    data["verdicts"][0]["status"] = "error"
    data["verdicts"][0]["reason"] = made_run.HOSTILE
    file.write_text(json.dumps(data))
    page = tmp_path / "page.html"
    done = command(str(a), str(b), "--html", str(page))
    assert done.returncode == 0, done.stderr
    assert "What changed" in done.stdout
    assert "got worse" in page.read_text() and "<script" not in page.read_text()
    worse = command(str(a), str(b), "--json", "--fail-on-worse")
    assert worse.returncode == 1
    assert json.loads(worse.stdout)["comparisons"][0]["differences"]
    assert command(str(a), str(a), "--fail-on-worse").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x"], "at least two runs"), (["nowhere", "nothing"], "a run with result.json"),
        ([EXAMPLE, EXAMPLE, "--html", "/nonexistent/folder/page.html"], "--html names a file that can be written"),
    ],
)  # fmt: skip
def test_bad_input_is_one_message(arguments: list[str], words: str) -> None:
    """Exit code 2, what was expected, no traceback."""
    done = command(*arguments)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
