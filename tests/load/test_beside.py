"""bench_serving beside this client: one definition for both, the server's own change taken out, and whose the rest is."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lib.errors import ServerError, UnreadableFile
from lib.load import benchmark, beside, beside_rows, definitions
from lib.load.client import Request
from lib.load.definitions import compare, own_figures, peer_figures, server_means, slots_time_s
from lib.load.metrics import Level
from lib.records import Status
from lib.results import NotebookRun
from tests.load.bench_server import BenchServer
from tests.load.test_benchmark import EMPTY, Handle, open_run


@pytest.mark.parametrize(
    ("times", "slots", "seconds"), [([3, 1, 1, 2], 2, 4), ([1, 2], 8, 2), ([1, 1, 1], 1, 3), ([], 4, 0)]
)
def test_requests_fill_their_slots_one_after_the_other(times: list[float], slots: int, seconds: float) -> None:
    """Each is taken by the first slot that is free."""
    assert slots_time_s(times, slots) == seconds


def request(
    i: int, sent_ms: int, first_ms: int, gap_ms: int, tokens: int, tail_ms: int = 1, due_ms: int | None = None
) -> dict[str, Any]:
    """A request of the client's record: tokens one by one, then the closing lines."""
    times = [(first_ms + k * gap_ms) * 1000 for k in range(tokens)]
    end = sent_ms * 1_000_000 + times[-1] * 1000 + tail_ms * 1_000_000
    return {
        "kind": "request", "i": i, "due_ns": (sent_ms if due_ms is None else due_ms) * 1_000_000, "sent_ns": sent_ms * 1_000_000,
        "end_ns": end, "failure": None, "kinds": "c" * tokens + "n", "t_us": [*times, times[-1] + tail_ms * 1000], "tokens": None,
        "usage": {"completion_tokens": tokens, "prompt_tokens": 5}, "slot": 0, "meta": None,
    }  # fmt: skip


def level(*requests: dict[str, Any], api: str = "completions", concurrency: int = 1, output_len: int = 5) -> Level:
    header = {
        "kind": "level", "schema": 1, "api": api, "load": {"mode": "closed", "concurrency": concurrency},
        "workload": {"settings": {"output_len": output_len}}, "sent": len(requests),
    }  # fmt: skip
    return Level(header, list(requests))


def row(
    ttfts: list[float], gaps: list[list[float]], tail_s: float = 0.001, duration: float = 1.0, **changes: Any
) -> dict[str, Any]:
    """A row of bench_serving with details, its summary computed by its own formulas."""
    lens = [len(g) + 1 for g in gaps]
    e2e = [t + sum(g) + tail_s for t, g in zip(ttfts, gaps, strict=True)]
    tpot = [(e - t) / (n - 1) for e, t, n in zip(e2e, ttfts, lens, strict=True)]
    pooled = [x for g in gaps for x in g]
    return {
        "duration": duration, "ttfts": ttfts, "itls": gaps, "output_lens": lens, "errors": [""] * len(lens),
        "mean_e2e_latency_ms": 1e3 * sum(e2e) / len(e2e), "mean_ttft_ms": 1e3 * sum(ttfts) / len(ttfts),
        "mean_tpot_ms": 1e3 * sum(tpot) / len(tpot), "mean_itl_ms": 1e3 * sum(pooled) / len(pooled),
        "output_throughput": sum(lens) / duration, **changes,
    }  # fmt: skip


def test_the_same_wire_gives_the_same_figures() -> None:
    """One stream seen by both: TTFT 40 ms from sending, gaps of 10 ms, closing lines 1 ms later; equal to the last digit.

    This client's own figures are others: TTFT from the due time (45 ms), token latency to the last token (10 ms, not 10.25).
    """
    own = own_figures(level(request(0, 5, 40, 10, 5, due_ms=0), request(1, 86, 40, 10, 5)))
    peer = peer_figures(row([0.04, 0.04], [[0.01] * 4] * 2, duration=0.4), 1)
    assert own and peer
    # (40 + 4 x 10 + 1 - 40) / 4 = 10.25 ms; the requests take 81 ms each, one after the other: 10 tokens in 162 ms
    expected = {"ttft_s": 0.040, "tpot_s": 0.01025, "itl_s": 0.010, "e2e_s": 0.081, "output_tokens_per_s": 10 / 0.162}
    assert own.common == pytest.approx(expected) and peer.common == pytest.approx(expected)
    assert own.reported["ttft_s"] == pytest.approx(0.0425) and own.reported["tpot_s"] == pytest.approx(0.010)
    assert peer.reported["output_tokens_per_s"] == pytest.approx(10 / 0.4)
    assert (own.requests_ok, own.output_tokens) == (peer.requests_ok, peer.output_tokens) == (2, 10)


def test_on_generate_a_gap_is_dealt_out_over_its_tokens() -> None:
    """Three tokens a chunk: 30 ms between chunks is 10 ms a token on /generate, as bench_serving has it there."""
    r = request(0, 0, 40, 30, 3) | {"tokens": [3, 3, 3, 0], "usage": {"completion_tokens": 9, "prompt_tokens": 5}}
    own = own_figures(level(r, api="generate"))
    assert own and own.common["itl_s"] == pytest.approx(0.010) and own.output_tokens == 9
    chunks = own_figures(level(r, api="completions", output_len=9))
    assert chunks and chunks.common["itl_s"] == pytest.approx(0.030)


def test_a_failed_request_of_bench_serving_counts_nowhere() -> None:
    """It has length 0 and an error; a row without details is refused; one in which all failed has no figures."""
    lists = {"ttfts": [0.04, 0.0], "itls": [[0.01] * 4, []], "output_lens": [5, 0], "errors": ["", "boom"]}
    made = row([0.04], [[0.01] * 4]) | lists
    figures = peer_figures(made, 2)
    assert figures and figures.requests_ok == 1 and figures.common["ttft_s"] == 0.04
    assert peer_figures({**made, "errors": ["a", "b"]}, 2) is None
    with pytest.raises(UnreadableFile, match="output-details"):
        peer_figures({k: v for k, v in made.items() if k != "itls"}, 2)


def figures(ttft: float, gap: float, n: int = 4) -> Any:
    made = peer_figures(row([ttft] * n, [[gap] * 4] * n), 1)
    assert made
    return made


def means(ttft: float, gap: float, n: int = 4) -> dict[str, float]:
    return server_means({
        "ttft_sum_s": n * ttft, "ttft_count": n, "e2e_sum_s": n * (ttft + 4 * gap), "e2e_count": n, "generation_tokens": 5 * n,
    })  # fmt: skip


def pair(own: Any, peer: Any, own_server: dict[str, float], peer_server: dict[str, float], **more: Any) -> Any:
    made = {
        "own": own,
        "peer": peer,
        "differences": compare(own, peer, own_server, peer_server),
        "bound": [],
        "problem": None,
    }
    return SimpleNamespace(**(made | {"server_silent": None, "sent_differently": None} | more))


def test_a_server_that_changed_between_the_windows_is_no_difference_of_the_clients() -> None:
    """Everything 10% slower, and the server's clock says so: within the limit once that is taken out."""
    p = pair(figures(0.044, 0.011), figures(0.040, 0.010), means(0.0435, 0.011), means(0.0395, 0.010))
    status, words, measured = beside_rows.level_status([p])
    assert status == Status.PASS and "the server itself changed" in words and measured and measured.value < 0.02
    without = pair(figures(0.044, 0.011), figures(0.040, 0.010), {}, {}, server_silent="no /metrics")
    status, words, _ = beside_rows.level_status([without])
    assert status == Status.INCONCLUSIVE and "not attributed: no /metrics" in words


def test_a_much_slower_window_leaves_a_constant_overhead_small() -> None:
    """A server 17 times slower in one window, 5 ms outside it in both: nothing is left, and neither client is blamed for it."""
    p = pair(figures(0.0405, 0.0055), figures(0.6754, 0.117), means(0.0358, 0.0055), means(0.6705, 0.117))
    (first, *_) = p.differences
    assert first.left_frac == pytest.approx((0.0047 - 0.0049) / 0.0405) and first.frac == pytest.approx(
        first.left_frac + first.server_frac
    )
    assert beside_rows.level_status([p])[0] == Status.PASS


def test_whose_time_the_rest_is_decides() -> None:
    """6 ms more TTFT outside the server: bench_serving's is said and passes, this client's own is a fail."""
    slow, fast, server = figures(0.046, 0.010), figures(0.040, 0.010), means(0.0398, 0.010)
    status, words, _ = beside_rows.level_status([pair(fast, slow, server, server)])
    assert (
        status == Status.PASS
        and "it is bench_serving's time: outside the server 0.20 ms here, 6.20 ms in bench_serving" in words
    )
    status, words, _ = beside_rows.level_status([pair(slow, fast, server, server)])
    assert status == Status.FAIL and "it is this client's time" in words
    both = [pair(slow, fast, server, server), pair(fast, slow, server, server)]
    assert beside_rows.level_status(both)[0] == Status.INCONCLUSIVE


def test_unequal_work_less_than_the_server_s_time_and_bound_clients_are_no_pass() -> None:
    """Three ways in which a comparison is worth nothing, each by its own name."""
    one, server = figures(0.040, 0.010), means(0.0398, 0.010)
    assert beside_rows.level_status([pair(one, one, server, server)])[0] == Status.PASS
    status, words, _ = beside_rows.level_status(
        [pair(one, one, server, server, sent_differently="output tokens: 20 here, 19")]
    )
    assert status == Status.FAIL and "not the same work" in words
    status, words, _ = beside_rows.level_status([pair(one, one, means(0.05, 0.010), means(0.05, 0.010))])
    assert status == Status.FAIL and "less time than the server itself spent" in words
    status, words, _ = beside_rows.level_status([pair(one, one, server, server, bound=["bench_serving is bound: x"])])
    assert status == Status.INCONCLUSIVE and "bound" in words
    assert definitions.peer_bound("sglang-oai", 1024, one) and not definitions.peer_bound("sglang-oai", 8, one)
    quick = one.model_copy(update={"itl_events": 100_000, "slots_s": 10.0})
    assert "10,000 events/s" in (definitions.peer_bound("sglang-oai", 8, quick) or "") and not definitions.peer_bound(
        "sglang", 8, quick
    )


# the process ----------------------------------------------------------------------------------------------------------

#: Stands in for sglang.bench_serving: sends the requests one after the other and writes its row by its own formulas.
STAND_IN = """
import argparse, json, sys, time, urllib.request
from datasets import load_dataset
p = argparse.ArgumentParser()
for name in ("backend", "base-url", "model", "served-model-name", "tokenizer", "dataset-name", "dataset-path", "num-prompts",
             "max-concurrency", "warmup-requests", "output-file"):
    p.add_argument("--" + name)
for name in ("output-details", "disable-tqdm", "disable-ignore-eos"):
    p.add_argument("--" + name, action="store_true")

def cli_main():
    a = p.parse_args()
    print("key sk-secret-1234 seen")
    rows = [json.loads(x) for x in open(a.dataset_path)]
    if rows[0]["output_len"] == 13:
        sys.exit("it does not like thirteen")
    ttfts, itls, begin = [], [], time.perf_counter()
    for r in rows:
        body = {"model": a.served_model_name, "prompt": r["prompt"], "max_tokens": r["output_len"], "stream": True}
        q = urllib.request.Request(a.base_url + "/v1/completions", json.dumps(body).encode())
        t0, times = time.perf_counter(), []
        for line in urllib.request.urlopen(q):
            if line.startswith(b"data: {") and b'"text"' in line:
                times.append(time.perf_counter())
        end = time.perf_counter()
        ttfts.append(times[0] - t0)
        itls.append([y - x for x, y in zip(times, times[1:])])
    d, n = time.perf_counter() - begin, [r["output_len"] for r in rows]
    e = [t + sum(g) for t, g in zip(ttfts, itls)]
    pool = [x for g in itls for x in g]
    out = {"server_info": {"api_key": "sk-secret-1234"}, "tag": "run with sk-secret-1234",
           "duration": d, "ttfts": ttfts, "itls": itls, "output_lens": n,
           "errors": [""] * len(n), "mean_e2e_latency_ms": 1e3 * sum(e) / len(e), "mean_ttft_ms": 1e3 * sum(ttfts) / len(e),
           "mean_itl_ms": 1e3 * sum(pool) / len(pool), "mean_tpot_ms": 1e3 * sum(pool) / len(pool), "output_throughput": sum(n) / d}
    with open(a.output_file, "a") as f:
        f.write(json.dumps(out) + "\\n")

if __name__ == "__main__":
    cli_main()
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an `sglang` that has a bench_serving, on the path of what is started."""
    site = tmp_path / "site"
    (site / "sglang").mkdir(parents=True)
    (site / "sglang" / "__init__.py").write_text("print('noise on stdout')\n")
    (site / "sglang" / "bench_serving.py").write_text(STAND_IN)
    (site / "sglang-9.9.dist-info").mkdir()
    (site / "sglang-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 9.9\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    return site


@pytest.fixture
def server() -> Iterator[BenchServer]:
    made = BenchServer()
    yield made
    made.close()


def handle(run: NotebookRun, server: BenchServer) -> Any:
    made: Any = Handle(run, server)
    made.params = SimpleNamespace(**vars(made.params), python=sys.executable)
    made.live.control.secrets.append("sk-secret-1234")
    return made


@pytest.fixture
def calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A calibration that always holds."""
    ok = {"status": "ok", "reasons": [], "streams": 4096, "chunks_per_s": 1e9, "workers": 1}
    monkeypatch.setattr(benchmark, "calibrate", lambda streams, api: ok)


def test_both_send_the_same_requests_and_the_record_alone_gives_the_verdict_again(
    tmp_path: Path, stand_in: Path, server: BenchServer, calibrated: None
) -> None:
    """Two repeats in one process, other prompts in each, each prompt sent twice; offline the same rows; a changed raw value shows."""
    server.step_s = 0.01
    run = open_run(tmp_path / "run", concurrency=[1], bench_serving=[1], depths=[])
    pairs = beside.measure_beside(run, handle(run, server), EMPTY)
    assert list(pairs) == [(1, 0), (1, 1)] and all(m.ok for m in pairs.values()), [m.problem for m in pairs.values()]
    first = pairs[1, 0].folder / beside.PEER
    sent = [json.loads(x)["prompt"] for x in (first / beside.REQUESTS).read_text().splitlines()]
    assert len(sent) == 4 and all(p == p.strip() for p in sent)
    (verdict,) = beside_rows.verdicts(run, pairs)
    (read,) = beside_rows.pairs_of(pairs).values()
    assert all(p.sent_differently is None and p.server_silent is None and len(p.differences) == 5 for p in read), (
        verdict
    )
    assert (
        verdict.status in (Status.PASS, Status.INCONCLUSIVE, Status.FAIL)
        and verdict.measured
        and verdict.measured.n == 2
    )
    ran = json.loads((first / beside.RAN).read_text())
    gone = [] if importlib.util.find_spec("datasets") else ["datasets"]
    assert ran["version"] == "9.9" and ran["not_installed"] == gone
    text = "".join(p.read_text() for p in first.iterdir())
    assert "sk-secret-1234" not in text and "key REDACTED seen" in text and "noise on stdout" not in text
    offline = open_run(tmp_path / "run", offline=True, concurrency=[1], bench_serving=[1], depths=[])
    again = beside.measure_beside(offline, handle(offline, server), EMPTY)
    assert beside_rows.beside_rows(again) == beside_rows.beside_rows(pairs) and beside_rows.verdicts(
        offline, again
    ) == [verdict]
    changed = json.loads((first / beside.RESULT).read_text())
    changed["output_lens"][0] -= 1
    (first / beside.RESULT).write_text(json.dumps(changed) + "\n")
    (other,) = beside_rows.verdicts(offline, again)
    assert other.status == Status.FAIL and "not the same work" in str(other.reason)


def test_bench_serving_s_own_words_are_the_reason_of_its_failure(
    tmp_path: Path, stand_in: Path, server: BenchServer, calibrated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with a message: the log's last line is the problem, the next level goes on; where it is not installed, that is said."""
    run = open_run(
        tmp_path / "a", concurrency=[1], bench_serving=[1], bench_serving_repeats=1, output_len=13, depths=[]
    )
    pairs = beside.measure_beside(run, handle(run, server), EMPTY)
    (verdict,) = beside_rows.verdicts(run, pairs)
    assert verdict.status == Status.INCONCLUSIVE and "it does not like thirteen" in str(verdict.reason)
    shutil.rmtree(stand_in / "sglang")
    run = open_run(tmp_path / "c", concurrency=[1], bench_serving=[1, 2], bench_serving_repeats=1, depths=[])
    assert beside.measure_beside(run, handle(run, server), EMPTY) == {}
    found = beside_rows.verdicts(run, {})
    assert [v.id for v in found] == ["beside-C1", "beside-C2"] and all(
        "No module named 'sglang" in str(v.reason) for v in found
    ), found
    benchmark.measure_calibration(run)
    offline = open_run(
        tmp_path / "c", offline=True, concurrency=[1], bench_serving=[1, 2], bench_serving_repeats=1, depths=[]
    )
    assert beside.measure_beside(offline, handle(offline, server), EMPTY) == {}
    assert beside_rows.verdicts(offline, {}) == found  # a replay gives the same reason
    runner = beside.Runner(sys.executable, None)
    with pytest.raises(ServerError, match="No module named 'sglang'"):
        runner([], tmp_path / "log")
    run = open_run(tmp_path / "b", concurrency=[1], bench_serving=[], depths=[])
    assert beside.measure_beside(run, handle(run, server), EMPTY) == {}


def test_a_process_that_dies_is_said_and_the_next_level_gets_a_new_one(tmp_path: Path, stand_in: Path) -> None:
    """Killed between two levels: an error with its exit code, then a fresh process."""
    runner = beside.Runner(sys.executable, None)
    runner.ready().kill()
    with pytest.raises(ServerError, match="bench_serving"):
        runner(["--help"], tmp_path / "log")
    assert runner(["--help"], tmp_path / "log")["exit_code"] == 0
    assert "--max-concurrency" in (tmp_path / "log").read_text()
    runner.close()


def test_requests_are_rows_of_the_data_set(tmp_path: Path) -> None:
    """Text, ids and messages, each with its length."""
    made = beside.rows_for(
        [Request("a", "text", 3), Request("b", (1, 2), 4), Request("c", ({"role": "user", "content": "x"},), 5)]
    )
    assert json.loads(json.dumps(made)) == [
        {"prompt": "text", "output_len": 3}, {"prompt": [1, 2], "output_len": 4},
        {"prompt": [{"role": "user", "content": "x"}], "output_len": 5},
    ]  # fmt: skip
