"""`workbook bench` as a user calls it: a table and a JSON file, or one message."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from lib.cli import main
from lib.load import judge


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the user's cache is read or written."""
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def url() -> Iterator[str]:
    """A judge as the server under test: it answers /v1/models and the three endpoints."""
    with judge.running_judge(judge.Plan(step_s=0.004, first_min_s=0.01, first_max_s=0.02)) as running:
        yield running.base_url


def bench(*arguments: str) -> int:
    return main(["bench", "--no-calibration", *arguments])


def test_two_levels(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row a level, every number in the JSON file, and the raw records it was computed from."""
    out = tmp_path / "b.json"
    code = bench(
        "--base-url", url, "--concurrency", "1,3", "--output-len", "8", "--input-len", "32", "--json", str(out),
        "--raw", str(tmp_path / "raw"),
    )  # fmt: skip
    assert code == 0
    made = json.loads(out.read_text())
    assert made["model"] == "judge" and [x["concurrency"] for x in made["levels"]] == [1, 3]
    for level, expected in zip(made["levels"], (4, 6), strict=True):
        assert level["failures"] == {} and level["metrics"]["requests_ok"]["value"] == expected
        assert level["metrics"]["output_tokens"]["value"] == 8 * expected
        assert Path(level["record"]).exists()
    text = capsys.readouterr().out
    assert "not_calibrated" in text and "tok/s/req" in text


@pytest.mark.parametrize("dataset", ["code", "random-ids", "repeating", "chat", "shared-prefix"])
def test_every_dataset(dataset: str, url: str) -> None:
    """Each built-in workload can be sent with one option (random ids: with the vocabulary)."""
    more = ["--vocab-size", "1000"] if dataset == "random-ids" else []
    size = ["--output-len", "4", "--input-len", "32", "--num-requests", "3"]
    assert bench("--base-url", url, "--concurrency", "2", "--dataset", dataset, *size, *more) == 0


def test_open_loop(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--rate sends by the clock."""
    size = ["--num-requests", "8", "--output-len", "4", "--input-len", "16"]
    assert bench("--base-url", url, "--rate", "40", *size) == 0
    assert "req/s" in capsys.readouterr().out


def test_calibration_is_part_of_a_run(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By default the client is first held against the judge, and the result is printed."""
    assert main(["bench", "--base-url", url, "--concurrency", "1", "--output-len", "4", "--input-len", "16"]) == 0
    assert "calibration: " in capsys.readouterr().out


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize(
    ("arguments", "part", "expected"),
    [
        (["--concurrency", "1,x"], "positive numbers", 2),
        (["--concurrency", "0"], "positive numbers", 2),
        (["--concurrency", "1.5"], "positive numbers", 2),
        (["--rate", "-1"], "positive numbers", 2),
        ([], "none of them", 2),
        (["--concurrency", "1", "--rate", "1"], "--concurrency and --rate", 2),
        (["--concurrency", "1", "--dataset", "random-ids"], "kills the server", 2),
        (["--concurrency", "1", "--dataset", "/no/such.jsonl"], "No such file", 2),
        (["--concurrency", "1", "--dataset", "nonsense"], "--dataset", 2),
        (["--concurrency", "1", "--output-len", "0"], "--output-len", 2),
        (["--concurrency", "1", "--api-key-env", "NO_SUCH_KEY_X"], "NO_SUCH_KEY_X", 2),
        (["--concurrency", "1", "--json", "/no/such/folder/x.json"], "--json", 2),
    ],
)
def test_bad_input(
    arguments: list[str], part: str, expected: int, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that names the fault, exit code 2, no traceback."""
    assert bench("--base-url", url, *arguments) == expected
    error = capsys.readouterr().err
    assert part in error and error.count("\n") == 1 and "Traceback" not in error


@pytest.mark.parametrize("base_url", ["foo", "http://", "file:///etc/passwd", "http://127.0.0.1:0x1"])
def test_a_wrong_url(base_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Not a URL: exit code 2 and an example of one."""
    assert bench("--base-url", base_url, "--concurrency", "1") == 2
    assert "http://127.0.0.1:30000" in capsys.readouterr().err


def test_a_dead_server(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody listens: exit code 1 at once."""
    assert bench("--base-url", closed_port(), "--concurrency", "1") == 1
    assert "connection refused" in capsys.readouterr().err


def test_a_wrong_path(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A server that is something else: its answer is quoted."""
    assert bench("--base-url", url + "/wrong", "--concurrency", "1") == 1
    assert "HTTP 404" in capsys.readouterr().err
