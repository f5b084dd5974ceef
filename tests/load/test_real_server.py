"""The client against a real SGLang: sessions find their prefix in the cache, and both sides count the same."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lib.cli import main
from lib.load import benchmark, beside, beside_rows, definitions, metrics, server_side, workloads
from lib.load.client import read_level, run_level
from lib.server import launch as launching
from tests.load.test_benchmark import EMPTY, open_run

pytestmark = pytest.mark.server


@pytest.fixture
def url(tiny_server: launching.Server) -> str:
    """The module's real server, which exports its counters."""
    return tiny_server.base_url


@pytest.mark.parametrize("api", ["generate", "completions", "chat"])
def test_agentic_sessions_reuse_their_prefix(api: str, url: str, tmp_path: Path) -> None:
    """Turn by turn the prompt grows by at least what was answered; /generate reports that the cache gave most of it."""
    made = workloads.agentic_sessions(2, 4, 16, first_len=150, think_s=0.05, max_context=1500, chat=api == "chat", seed=3)
    path = run_level(
        url, api, made.requests, out=tmp_path / "l", concurrency=2, model=model_of(url), warmup=made.warmup,
        workload=made.describe(), observe=server_side.observer(url),
    )  # fmt: skip
    level = read_level(path)
    assert metrics.failures(level) == {}, [r["detail"] for r in level.requests if r["failure"]]
    turns = metrics.turn_rows(level)
    prompts = [t["prompt_tokens_mean"].value for t in turns]
    assert len(turns) >= 2 and prompts == sorted(prompts) and prompts[1] > prompts[0] + 16
    summary = metrics.level_summary(level)
    if api == "generate":
        assert summary["prefix_reuse_frac"].value > 0.8, summary["prefix_reuse_frac"]
    rows = {r["what"]: r for r in server_side.rows(level)}
    for what in ("requests finished", "output tokens", "prompt tokens"):
        assert rows[what]["difference"].value == 0, rows[what]
    assert rows["end to end, mean"]["server"].value > 0


def model_of(url: str) -> str:
    import requests

    return str(requests.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"])


def test_the_command_against_a_real_server(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Levels, repeats and cache flushes; a real answer that ends by itself has its own length."""
    out = tmp_path / "b.json"
    how = ["bench", "--base-url", url, "--no-calibration", "--input-len", "40", "--output-len", "12", "--json", str(out)]
    assert main([*how, "--concurrency", "1,2", "--repeats", "2", "--flush-cache", "--raw", str(tmp_path / "raw")]) == 0
    made = json.loads(out.read_text())
    assert [x["concurrency"] for x in made["levels"]] == [1, 2, 1, 2]
    assert all(x["metrics"]["output_tokens"]["value"] == 48 for x in made["levels"])
    beside = {r["what"]: r for r in made["levels"][0]["server_side"]}
    assert beside["output tokens"]["difference"]["value"] == 0
    assert main([*how, "--rate", "5", "--num-requests", "8", "--stop-at-eos", "--overwrite"]) == 0
    trace = tmp_path / "t.jsonl"
    rows = [{"timestamp": 3000 * i, "input_length": 600, "output_length": 4, "hash_ids": [1, 2 + i]} for i in range(4)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    vocab = ["--vocab-size", "200"]
    assert main([*how, "--trace", str(trace), *vocab, "--api", "generate", "--flush-cache", "--overwrite"]) == 0
    replayed = json.loads(out.read_text())["levels"][0]["metrics"]
    assert replayed["requests_ok"]["value"] == 4 and replayed["cached_tokens"]["value"] >= 3 * 500
    assert "server: TTFT, mean" in capsys.readouterr().out


def test_the_real_bench_serving_beside_this_client(
    tiny_server: launching.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own, unmodified: the same requests and tokens, figures of one definition, none below the server's own time."""
    ok = {"status": "ok", "reasons": [], "streams": 4096, "chunks_per_s": 1e9, "workers": 1}
    monkeypatch.setattr(benchmark, "calibrate", lambda streams, api: ok)
    asked = SimpleNamespace(api_key_env=None, flags={}, environment={}, python=".venv-sglang/bin/python")
    handle: Any = SimpleNamespace(
        params=asked, key="key", tp_size=1, attached=False, name="server", get=lambda: tiny_server, launches=list
    )
    params: dict[str, Any] = {"concurrency": [4], "bench_serving": [4], "depths": [], "output_len": 16}
    left: list[float] = []
    for repeats in (2, 4, 8):  # what others do to this machine differs from pair to pair, a wrong definition does not
        run = open_run(tmp_path, bench_serving_repeats=repeats, **params)
        (both,) = beside_rows.pairs_of(beside.measure_beside(run, handle, EMPTY)).values()
        assert len(both) == repeats
        left = [min(abs(d.left_frac or 0) for d in same) for same in zip(*(p.differences for p in both), strict=True)]
        if all(x < 0.25 for x in left):
            break
    for p in both:
        assert (p.problem, p.sent_differently, p.server_silent) == (None, None, None)
        assert p.own and p.own.requests_ok == 8 and p.own.output_tokens == 8 * 16
        assert [d.figure for d in p.differences] == list(definitions.FIGURES)
        assert not any(d.impossible for d in p.differences), p.differences
    assert all(x < 0.25 for x in left), (left, [p.differences for p in both])
