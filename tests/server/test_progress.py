"""`lib.server.progress`: what a starting server is doing, from one line."""

# ruff: noqa: E501  (lines of servers are quoted whole)

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.server.progress import PHASES, STARTUP_PHASES, phase_of, seconds_left

RECORDED = Path(__file__).resolve().parents[1] / "recorded"

# (line, phase, done, total, at_end)
LINES = [
    ("[2026-11-29 13:05:57] server_args=ServerArgs(model_path='/m')", "importing", None, None, False),
    ("[2026-11-29 13:06:25] Init torch distributed begin.", "distributed_init", None, None, False),
    ("[2026-11-29 13:05:18] Init parallel ends. elapsed=0.01 s", "distributed_init", None, None, True),
    ("[2026-11-29 13:06:26 TP3] Load weight begin. avail mem=139.09 GB", "loading_weights", None, None, False),
    ("Multi-thread loading shards:  66% Completed | 31/47 [01:15<00:39,  2.45s/it]", "loading_weights", 31, 47, False),
    ("Multi-thread loading shards: 100% Completed | 47/47 [01:55<00:00,  2.45s/it]", "loading_weights", 47, 47, True),
    ("Loading safetensors checkpoint shards:   0% Completed | 0/5 [00:00<?, ?it/s]", "loading_weights", 0, 5, False),
    ("[2026-11-29 13:06:27] Load weight end. elapsed=0.23 s, type=LlamaForCausalLM, avail mem=1.00 GB, mem usage=0.06 GB.", "loading_weights", None, None, True),
    ("[2026-11-29 13:06:28] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 1, K size: 0.00 GB, V size: 0.00 GB", "allocating_kv", None, None, False),
    ("[2026-11-29 13:06:28] Full KV Cache VA upper bound. dtype: torch.bfloat16, #tokens: 1, K size: 0.00 GB, V size: 0.00 GB", "allocating_kv", None, None, False),
    ("[2026-11-29 13:06:28] Memory pool end. avail mem=97.29 GB", "allocating_kv", None, None, True),
    ("[2026-11-29 13:06:28] Capture target verify CUDA graph begin. backend=full, num_tokens_per_req=4, bs=[1, 2], avail mem=81.46 GB", "capturing_graphs", None, None, False),
    ("[2026-05-01 13:06:28] Capture cuda graph begin. This can take up to several minutes. avail mem=3.67 GB", "capturing_graphs", None, None, False),
    ("Capturing batches (bs=28 avail_mem=81.33 GB):  15%|#5        | 3/20 [00:00<00:03,  4.43it/s]", "capturing_graphs", 3, 20, False),
    ("[2026-11-29 13:06:31] Capture target verify CUDA graph end. elapsed=2.76 s, mem usage=0.13 GB, avail mem=81.32 GB.", "capturing_graphs", None, None, True),
    ("[2026-11-29 13:06:31] Entering DeepGEMM JIT Pre-Compile session. It may take a long time", "compiling_kernels", None, None, False),
    ("[2026-11-29 13:06:31] Running FlashInfer autotune with cache: /c", "compiling_kernels", None, None, False),
    ("[2026-11-29 13:06:34] INFO:     Started server process [465]", "starting_http", None, None, False),
    ('[2026-11-29 13:06:35] INFO:     127.0.0.1:42982 - "GET /model_info HTTP/1.1" 200 OK', "warming_up", None, None, False),
    ("[2026-11-29 13:06:36] The server is fired up and ready to roll!", "ready", None, None, True),
    ("[2026-11-29 13:06:37] Decode batch, #running-req: 1, #token: 204", "serving", None, None, False),
    ("[2026-11-29 13:16:51] SIGTERM received. signum=None frame=None. Draining requests and shutting down...", "stopping", None, None, False),
]  # fmt: skip


@pytest.mark.parametrize(("line", "phase", "done", "total", "at_end"), LINES, ids=lambda v: str(v)[:40])
def test_phase_of(line: str, phase: str, done: int | None, total: int | None, at_end: bool) -> None:
    """Each line shows its phase, with what is done of how much."""
    found = phase_of(line)
    assert found is not None
    assert (found.name, found.done, found.total, found.at_end) == (phase, done, total, at_end)
    assert found.order == PHASES.index(phase)


@pytest.mark.parametrize("prefix", ["", "Nov 29 13:05:53 host sglang[1]: ", "\x1b[1m", "sglang-1  | "])
@pytest.mark.parametrize("line", [row[0] for row in LINES if row[0].startswith("[")], ids=lambda v: v[22:50])
def test_prefixes_do_not_matter(line: str, prefix: str) -> None:
    """A journal's or a container's prefix, colours and bytes change nothing."""
    want = phase_of(line)
    assert phase_of(prefix + line) == want
    assert phase_of((prefix + line + "\r\n").encode()) == want


def test_last_state_of_a_progress_bar_counts() -> None:
    """Of the states that a progress bar wrote into one line, the last one is now."""
    bar = "Capturing batches (bs=32 avail_mem=81.42 GB):   5%|x| 1/20 [00:00<?]\rCapturing batches (bs=28 avail_mem=81.33 GB):  15%|x| 3/20 [00:00<?]"
    found = phase_of(bar)
    assert found is not None and (found.done, found.total) == (3, 20)
    assert found.text == "capturing graphs 3/20 (bs=28 avail_mem=81.33 GB)"


@given(done=st.integers(0, 500), total=st.integers(1, 500))
@settings(max_examples=50, deadline=None)
def test_numbers_follow(done: int, total: int) -> None:
    """Other shard counts come out as they went in."""
    found = phase_of(f"Multi-thread loading shards:  50% Completed | {done}/{total} [00:00<00:00, 7it/s]")
    assert found is not None and (found.done, found.total) == (done, total)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "hello",
        "Traceback (most recent call last):",
        b"\xff\xfe\x00",
        "x" * 100_000,
        "[2026-11-29 13:06:00] torchcodec is not installed",
    ],
)
def test_lines_that_say_nothing(line: str | bytes) -> None:
    """A line that says nothing about the start gives None."""
    assert phase_of(line) is None


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None)
def test_fuzz(raw: bytes) -> None:
    """Any bytes are read without an error."""
    phase_of(raw)


STARTS = [p for p in sorted(RECORDED.glob("*/*.log")) if b"fired up and ready" in p.read_bytes()]


@pytest.mark.parametrize("path", STARTS, ids=lambda path: path.stem)
def test_recorded_starts_pass_the_phases(path: Path) -> None:
    """A recorded server that got ready passed weights, KV cache and HTTP in this order, and then got ready."""
    seen: list[str] = []
    for line in path.read_bytes().split(b"\n"):
        found = phase_of(line)
        if found and found.name not in seen:
            seen.append(found.name)
    for a, b in zip(
        ("importing", "loading_weights", "allocating_kv", "starting_http"),
        ("loading_weights", "allocating_kv", "starting_http", "ready"),
        strict=True,
    ):
        assert seen.index(a) < seen.index(b), (a, b, seen)


def test_seconds_left() -> None:
    """Time left is what earlier runs needed from here, less what has passed in this phase; unknown is None."""
    earlier = {"loading_weights": 30.0, "capturing_graphs": 12.0}
    assert seconds_left("loading_weights", 10, earlier) == 32  # 30 - 10 + 12
    assert seconds_left("loading_weights", 99, earlier) == 12  # a slow phase leaves the later ones, never less than 0
    assert seconds_left("capturing_graphs", 2, earlier) == 10
    assert seconds_left("warming_up", 1, earlier) is None
    assert seconds_left("importing", 1, {}) is None
    assert seconds_left("ready", 1, earlier) == 0


def test_order_of_phases() -> None:
    """The start's phases end before 'ready', and the names are unique."""
    assert len(set(PHASES)) == len(PHASES)
    assert PHASES[: len(STARTUP_PHASES)] == STARTUP_PHASES and "ready" not in STARTUP_PHASES
