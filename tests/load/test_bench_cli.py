"""`workbook bench` as a user calls it: a table and a JSON file, or one message."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty_server import faulty_server

from lib.cli import main
from lib.cli.bench import WITH_ENDS
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
    ends = [line for line in text.splitlines() if "95% intervals: " in line]
    assert len(ends) == 2
    for line, level in zip(ends, made["levels"], strict=True):
        for name, key, scale in WITH_ENDS:
            figure = level["metrics"][key]
            if "value" not in figure:
                assert figure["reason"] in text
            elif "low" in figure:
                assert f"{name} {figure['low'] * scale:.4g} to {figure['high'] * scale:.4g} (n = {figure['n']})" in line
            else:
                assert f"{name}: none ({figure['reason']}, n = {figure['n']})" in line


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


SMALL = ["--output-len", "4", "--input-len", "16"]


def loaded(path: Path) -> dict[str, Any]:
    made = json.loads(path.read_text())
    assert isinstance(made, dict)
    return made


def test_agentic_sessions(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--dataset agentic: C sessions at a time, a row a turn with prompt growth, and the same in the JSON."""
    out = tmp_path / "b.json"
    how = ["--dataset", "agentic", "--turns", "3", "--think-time", "0.01", "--num-requests", "3", "--json", str(out)]
    for api in ("generate", "chat", "completions"):
        assert bench("--base-url", url, "--concurrency", "2", *how, *SMALL, "--api", api, "--overwrite") == 0
        (made,) = loaded(out)["levels"]
        assert made["metrics"]["requests_ok"]["value"] == 9 and [t["turn"] for t in made["turns"]] == [0, 1, 2]
    assert "turn 2: 3 of 3 ok" in capsys.readouterr().out


def test_replay(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--trace sends at the recorded times; --time-scale are the levels."""
    trace = tmp_path / "t.jsonl"
    rows = [{"timestamp": 100 * i, "input_length": 20, "output_length": 3, "hash_ids": [1]} for i in range(5)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    assert bench("--base-url", url, "--trace", str(trace), "--time-scale", "1,0.5", "--vocab-size", "100") == 0
    assert "scale" in capsys.readouterr().out


def test_messages_in_a_file_go_to_chat(url: str, tmp_path: Path) -> None:
    """A file or a trace of messages needs no --api: only one endpoint takes them."""
    rows = [{"at_s": 0.01 * i, "messages": [{"role": "user", "content": f"q {i}"}], "output_len": 3} for i in range(6)]
    path, out = tmp_path / "m.jsonl", tmp_path / "b.json"
    path.write_text("\n".join(map(json.dumps, rows)))
    for how in (["--dataset", str(path), "--concurrency", "2", "--num-requests", "4"], ["--trace", str(path)]):
        assert bench("--base-url", url, *how, "--output-len", "3", "--json", str(out), "--overwrite") == 0
        assert loaded(out)["api"] == "chat" and loaded(out)["levels"][0]["failures"] == {}


@pytest.fixture
def calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A calibration that covers these tests' loads (the real one is in test_judge)."""
    covers = {"status": "ok", "reasons": [], "streams": 1024, "chunks_per_s": 1e6, "workers": 1}
    monkeypatch.setattr(judge, "calibrate", lambda *_, **__: covers)


@pytest.mark.usefixtures("calibrated")
def test_goodput_and_ramp(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--slo gives the share of good requests with its interval and status; --ramp a timeline."""
    out = tmp_path / "b.json"
    how = ["--slo", "ttft=5,tpot=5,e2e=9", "--ramp", "0.2", "--num-requests", "12", "--json", str(out)]
    assert main(["bench", "--base-url", url, "--concurrency", "3", *how, *SMALL]) == 0
    (made,) = loaded(out)["levels"]
    assert made["slo_status"] == "undecided"
    assert made["goodput"]["goodput_frac"]["value"] == 1.0 and made["goodput"]["goodput_frac"]["low"] < 1.0
    assert len(made["timeline"]) == 20 and "undecided" in capsys.readouterr().out


def test_without_a_calibration_there_is_no_slo_verdict(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The share is shown, pass or fail is not; a search, which is such a verdict, is refused."""
    out = tmp_path / "b.json"
    how = ["--base-url", url, "--slo", "ttft=5", "--num-requests", "80", "--json", str(out), *SMALL]
    assert bench(*how, "--concurrency", "4") == 0
    (made,) = loaded(out)["levels"]
    assert made["goodput"]["goodput_frac"]["value"] == 1.0 and made["slo_status"] == "invalid"
    assert "not_calibrated" in made["slo_reason"]
    text = capsys.readouterr().out
    assert "a second: no verdict" in text and ": pass" not in text
    assert bench(*how, "--concurrency", "4", "--search", "8", "--overwrite") == 2
    assert "--no-calibration" in capsys.readouterr().err


@pytest.mark.usefixtures("calibrated")
def test_search(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--search prints a bracket and every probe with its record; a limit that is never met gives no lower end."""
    out = tmp_path / "b.json"
    how = ["--num-requests", "80", "--json", str(out), *SMALL]
    assert main(["bench", "--base-url", url, "--concurrency", "4", "--slo", "ttft=5", "--search", "8", *how]) == 0
    found = loaded(out)["search"]
    assert (found["low"], found["high"]) == (8.0, None) and all(Path(p["path"]).exists() for p in found["probes"])
    assert "at least 8, below an end not found" in capsys.readouterr().out
    never = ["--concurrency", "2", "--slo", "ttft=0.0001", "--search", "8", "--overwrite"]
    assert main(["bench", "--base-url", url, *never, *how]) == 0
    assert loaded(out)["search"]["low"] is None


def test_find_knee(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--find-knee measures more loads by itself and prints the bracket; a judge has no knee, so its upper end is open."""
    out = tmp_path / "b.json"
    assert bench("--base-url", url, "--concurrency", "1", "--find-knee", "4", "--num-requests", "12", "--json", str(out), *SMALL) == 0
    made = loaded(out)
    assert [x["concurrency"] for x in made["levels"]][:3] == [1, 2, 4] and made["knee"]["what"] == "knee"
    text = capsys.readouterr().out
    assert "knee: between" in text and "steady state from" in text
    assert "no verdict: the client was not_calibrated" in text and "no verdict" in made["knee"]["reason"]


def test_repeats_and_a_against_b(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Repeats are interleaved, A and B alternate with the same prompts, and the paired difference has an interval."""
    out = tmp_path / "b.json"
    with judge.running_judge(judge.Plan(step_s=0.012, stall_frac=0, first_min_s=0.01, first_max_s=0.02)) as slow:
        code = bench(
            "--base-url", url, "--versus", slow.base_url, "--concurrency", "1,2", "--repeats", "3", "--num-requests", "3",
            "--output-len", "12", "--input-len", "16", "--json", str(out),
        )  # fmt: skip
    assert code == 0
    made = loaded(out)
    order = [(x["concurrency"], x["repeat"], x["side"]) for x in made["levels"]]
    assert order[:4] == [(1, 0, "a"), (1, 0, "b"), (2, 0, "b"), (2, 0, "a")] and order[4] == (1, 1, "b") and len(order) == 12
    gap = made["a_against_b"]["concurrency-1"]["chunk_gap_s_p50"]
    assert gap["n"] == 3 and gap["high"] < 0 and gap["low"] <= gap["value"] <= gap["high"]
    records = [Path(x["record"]) for x in made["levels"] if x["concurrency"] == 1 and x["repeat"] == 0]
    sent = [sorted(json.loads(line)["prompt_sha256"] for line in r.read_text().splitlines()[1:]) for r in records]
    assert sent[0] == sent[1]
    assert "across_repeats" in made and "a minus b" in capsys.readouterr().out


def test_a_run_is_continued_or_refused(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An existing --json of the same run is continued without measuring again; of another run, or no JSON: refused."""
    out = tmp_path / "b.json"
    how = ["--base-url", url, "--concurrency", "1,2", "--json", str(out), "--raw", str(tmp_path / "raw"), *SMALL]
    assert bench(*how) == 0
    whole = loaded(out)
    before = Path(whole["levels"][0]["record"]).stat().st_mtime_ns
    whole["levels"] = whole["levels"][:1]
    out.write_text(json.dumps(whole))
    assert bench(*how) == 0
    again = loaded(out)
    assert len(again["levels"]) == 2 and again["levels"][0]["metrics"] == whole["levels"][0]["metrics"]
    assert Path(again["levels"][0]["record"]).stat().st_mtime_ns == before
    assert again["levels"][1]["record"].endswith("-take2.jsonl")
    assert "1 level(s) are in it" in capsys.readouterr().out
    assert bench(*how, "--seed", "5") == 2
    assert "seed: 0 there, 5 now" in capsys.readouterr().err
    out.write_text("[]")
    assert bench(*how) == 2 and "--overwrite" in capsys.readouterr().err
    assert bench(*how, "--overwrite") == 0


def test_a_run_with_other_prompts_or_another_model_is_not_continued(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The options are the same, but the data set's content or what the server serves is not: refused, not mixed."""
    text, out = tmp_path / "t.jsonl", tmp_path / "b.json"
    text.write_text("".join(json.dumps({"prompt": f"one {i}"}) + "\n" for i in range(20)))
    how = ["--base-url", url, "--concurrency", "1,2", "--json", str(out), "--output-len", "4", "--dataset", str(text)]
    assert bench(*how) == 0
    text.write_text("".join(json.dumps({"prompt": f"two {i}"}) + "\n" for i in range(20)))
    assert bench(*how) == 2 and "prompts: " in capsys.readouterr().err
    text.write_text("".join(json.dumps({"prompt": f"one {i}"}) + "\n" for i in range(20)))
    assert bench(*how) == 0
    record = Path(loaded(out)["levels"][1]["record"])
    header, *rest = record.read_text().splitlines()
    record.write_text("\n".join([json.dumps(json.loads(header) | {"model": "before"}), *rest]) + "\n")
    capsys.readouterr()
    assert bench(*how) == 2 and "model: before there, judge now" in capsys.readouterr().err


def test_levels_of_a_dead_server_are_measured_again(tmp_path: Path) -> None:
    """The server dies in the first level; when it is back, the same command measures what it had not."""
    out = tmp_path / "b.json"
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    how = ["--base-url", url, "--model", "judge", "--concurrency", "1", "--num-requests", "40", "--json", str(out), *SMALL]
    assert bench(*how) == 1
    gone = loaded(out)["levels"][0]
    assert gone["stopped"] == "server_gone" and set(gone["failures"]) == {"connection_refused"}
    assert gone["failures"]["connection_refused"] + gone["unsent"] == 40
    with judge.running_judge(judge.Plan(step_s=0.001, first_min_s=0.001, first_max_s=0.002)) as running:
        content = loaded(out)
        content["settings"]["base_url"] = running.base_url
        out.write_text(json.dumps(content))
        assert bench("--base-url", running.base_url, *how[2:]) == 0
    assert loaded(out)["levels"][0]["failures"] == {} and len(loaded(out)["levels"]) == 1


def test_progress_says_where_a_level_is_and_how_long_it_lasts(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a terminal a line now and then: level, done, in flight, seconds left of this level and of all."""
    monkeypatch.setattr("lib.cli.bench.PROGRESS_LINE_S", 0.0)
    how = ["--concurrency", "1,2", "--num-requests", "12", "--input-len", "16", "--output-len", "40"]
    assert bench("--base-url", url, *how) == 0
    lines = re.findall(
        r"^(\d)/2 concurrency-(\d): (\d+) of 12 done, (\d+) in flight(?:, about (\d+) s left(?:, (\d+) s for all levels)?)?$",
        capsys.readouterr().err, re.M,
    )  # fmt: skip
    assert {line[0] for line in lines} == {"1", "2"}
    assert all(int(line[3]) <= int(line[1]) and int(line[2]) <= 12 for line in lines)
    timed = [line for line in lines if line[4]]
    assert timed and all(int(line[4]) <= 10 for line in timed)
    # The first level knows of the second, the last one has nothing after it.
    assert any(line[5] for line in timed if line[0] == "1") and not any(line[5] for line in timed if line[0] == "2")


def test_progress_on_a_terminal_stays_on_one_line(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal each report starts with a carriage return and ends no line."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    how = ["--concurrency", "1", "--num-requests", "6", "--input-len", "16", "--output-len", "60"]
    assert bench("--base-url", url, *how) == 0
    shown = capsys.readouterr().err
    assert "\r1/1 concurrency-1: " in shown and "\n" not in shown


def test_a_level_that_fails_is_kept_and_the_next_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every request of a level fails by name: exit code 1, the JSON has its causes and no invented numbers."""
    text, out = tmp_path / "t.jsonl", tmp_path / "b.json"
    text.write_text("".join(json.dumps({"prompt": f"FAULT:http_500 {i}"}) + "\n" for i in range(20)))
    with faulty_server(gap_s=0.001) as server:
        how = ["--dataset", str(text), "--concurrency", "1,2", "--output-len", "5", "--json", str(out)]
        assert bench("--base-url", server.base_url, *how) == 1
    made = loaded(out)
    assert [x["failures"] for x in made["levels"]] == [{"http_5xx": 4}, {"http_5xx": 4}]
    assert "value" not in made["levels"][0]["metrics"]["ttft_s_p50"] and made["levels"][0]["metrics"]["ttft_s_p50"]["reason"]
    assert "Internal Server Error" in capsys.readouterr().out


def test_ctrl_c_keeps_the_json(tmp_path: Path) -> None:
    """SIGINT in the second level: exit code 130, the first level whole, the second marked, and a second call goes on."""
    out = tmp_path / "b.json"
    root = Path(__file__).parents[2]
    with judge.running_judge(judge.Plan(step_s=0.02, first_min_s=0.01, first_max_s=0.02)) as running:
        how = [
            sys.executable, "-m", "lib.cli", "bench", "--no-calibration", "--base-url", running.base_url, "--concurrency",
            "4,1", "--num-requests", "40", "--output-len", "8", "--input-len", "16", "--json", str(out),
        ]  # fmt: skip
        process = subprocess.Popen(how, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        end = time.monotonic() + 60
        while not (out.exists() and loaded(out)["levels"]):
            assert time.monotonic() < end
            time.sleep(0.05)
        time.sleep(1.5)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        made = loaded(out)
        assert process.returncode == 130 and "what was measured is kept" in error and "Traceback" not in error
        assert made["stopped"] == "interrupted" and made["levels"][0]["metrics"]["requests_ok"]["value"] == 40
        assert made["levels"][1]["stopped"] == "interrupted" and 0 < made["levels"][1]["metrics"]["requests_ok"]["value"] < 40
        again = subprocess.run(how, cwd=root, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0 and "1 level(s) are in it" in again.stdout
    assert [x["metrics"]["requests_ok"]["value"] for x in loaded(out)["levels"]] == [40, 40]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--concurrency", "1,1"], "different levels"),
        (["--concurrency", "1", "--slo", "ttft"], "--slo"),
        (["--concurrency", "1", "--slo", "speed=1"], "--slo"),
        (["--concurrency", "1", "--slo", "ttft=-1"], "positive"),
        (["--concurrency", "1", "--search", "8"], "--slo with --search"),
        (["--concurrency", "1,2", "--search", "8", "--slo", "ttft=1"], "--search with one"),
        (["--concurrency", "9", "--search", "8", "--slo", "ttft=1"], "at least the load"),
        (["--concurrency", "1", "--good-frac", "2"], "--good-frac"),
        (["--concurrency", "1,2", "--find-knee", "8"], "--find-knee with one"),
        (["--concurrency", "9", "--find-knee", "8"], "at least the load"),
        (["--concurrency", "1", "--ramp", "-1"], "--ramp"),
        (["--concurrency", "1", "--repeats", "0"], "--repeats"),
        (["--trace", "/no/such.jsonl"], "No such file"),
        (["--concurrency", "1", "--max-seconds", "0"], "--max-seconds"),
        (["--concurrency", "1", "--gap-timeout", "0"], "timeouts"),
    ],
)
def test_more_bad_input(arguments: list[str], part: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line that names the fault, exit code 2, no traceback."""
    assert bench("--base-url", url, *arguments) == 2
    error = capsys.readouterr().err
    assert part in error and error.count("\n") == 1 and "Traceback" not in error
