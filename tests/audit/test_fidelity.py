"""The cache probe against stand-in servers with a prefix cache and a pool: sound, FP8-like, H1, decode-only fault, blind."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lib.audit.fidelity import Plan, judge_probe, plan_probe, take_probe
from lib.records import Record

INFO: dict[str, Any] = {
    "version": "0.5.16", "attention_backend": "triton", "chunked_prefill_size": 512, "page_size": 1, "max_req_input_len": 8000,
    "max_total_num_tokens": 200_000, "kv_cache_dtype": "auto", "internal_states": [{"kv_cache_dtype": "fp8_e4m3"}],
}  # fmt: skip


class Pool:
    """A server whose log-probabilities are a function of the ids, plus noise of the kernel, minus what its pool costs.

    Args:
        loss: nats that a token loses (mean) where its context is read from the pool.
        spread: how far single tokens scatter around that.
        decode_loss: the same for decoded tokens.
        split: noise of another split of the sums, even in a sound pool.
        sees: False for a backend that reads the pool in the fresh case too.
    """

    def __init__(
        self, loss: float = 0.0, spread: float = 0.0, decode_loss: float | None = None, split: float = 0.035, sees: bool = True,
        salted: bool = True, hits: bool = True, info: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.loss, self.spread, self.split, self.sees, self.salted, self.hits = loss, spread, split, sees, salted, hits
        self.decode_loss = loss if decode_loss is None else decode_loss
        self.info = {**INFO, **(info or {})}
        self.cache: dict[str, list[int]] = {}
        self.bodies: list[dict[str, Any]] = []
        self.flushed = 0

    def server_info(self) -> dict[str, Any]:
        return self.info

    def post_json(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": [ord(c) % 251 for c in body["prompt"]]}

    def flush_cache(self) -> None:
        self.flushed += 1

    def _logprob(self, ids: list[int], place: int, case: str) -> float:
        sound = -3 * random.Random(str(ids[max(0, place - 3) : place + 1])).random() - 0.1
        if not self.sees:
            case = "pool"
        own = random.Random(f"{case}{ids[: place + 1]}")
        if case == "fresh":
            return sound
        noisy = sound + own.gauss(0, self.split)
        if case == "decode":  # sampled from what decode computes: likelier there than in truth
            return noisy + (abs(own.gauss(self.decode_loss, self.spread)) if self.decode_loss else 0.0)
        return noisy - (abs(own.gauss(self.loss, self.spread)) if self.loss else 0.0)

    def post_bytes(self, path: str, body: dict[str, Any], timeout_s: float = 0) -> bytes:
        self.bodies.append(body)
        ids, start, count = body["input_ids"], body["logprob_start_len"], body["sampling_params"]["max_new_tokens"]
        key = body["extra_key"] if self.salted else ""
        known = self.cache.get(key, [])
        common = next(
            (i for i, (x, y) in enumerate(zip(known, ids, strict=False)) if x != y), min(len(known), len(ids))
        )
        cached = min(common, start if start >= 0 else common) if self.hits else 0
        case = "pool" if cached else "fresh"
        rows = (
            [[None, ids[start]], *([self._logprob(ids, i, case), ids[i]] for i in range(start + 1, len(ids)))]
            if start >= 0
            else []
        )
        out, grown = [], list(ids)
        for _ in range(count):
            grown.append(len(grown) % 97)
            out.append([self._logprob(grown, len(grown) - 1, "decode"), grown[-1]])
        self.cache[key] = list(ids)
        return json.dumps(
            {"meta_info": {"input_token_logprobs": rows, "output_token_logprobs": out, "cached_tokens": cached}}
        ).encode()


def probed(tmp_path: Path, pool: Pool, limit: float = 0.05, documents: int = 4) -> Any:
    take_probe(SimpleNamespace(control=pool), tmp_path, documents, duty=1.0)  # type: ignore[arg-type]
    return judge_probe(json.loads((tmp_path / "probe.json").read_text()), limit)


def test_a_sound_pool_is_clean_and_its_noise_is_stated(tmp_path: Path) -> None:
    """Another split of the sums moves tokens by 0.028 on average (0.035 x sqrt(2/pi)), and not the mean."""
    found = probed(tmp_path, Pool())
    assert found.outcome == "clean", found.answer
    assert found.prefix.mean_absolute == pytest.approx(0.035 * math.sqrt(2 / math.pi), rel=0.1)
    assert abs(found.prefix.cost.value) < 0.01 and found.floor_fresh == 0 == found.floor_hit
    assert found.prefix.detectable < 0.08 and found.kv_cache_dtype == "fp8_e4m3"
    assert any("chunk 512" in n for n in found.notes)


def test_h1_is_a_fault_by_more_than_a_nat(tmp_path: Path) -> None:
    """BF16 over calibrated scales: prefix and decode read the pool wrongly."""
    found = probed(tmp_path, Pool(loss=1.5, spread=1.0))
    assert (
        found.outcome == "fault"
        and found.prefix.cost.low > 1
        and found.prefix.outcome == found.decode.outcome == "fault"
    )


def test_a_fault_of_decode_alone_is_found(tmp_path: Path) -> None:
    """FlashInfer 0.5.16 with a BF16 pool over scales reads prefixes right and decodes wrong."""
    found = probed(tmp_path, Pool(loss=0.0, decode_loss=0.4, spread=0.3))
    assert found.prefix.outcome == "clean"
    assert found.decode.outcome == "fault" == found.outcome and found.decode.cost.value == pytest.approx(0.4, abs=0.15)


def test_what_the_pool_costs_is_measured(tmp_path: Path) -> None:
    """A pool that costs 0.02 nat is clean against 0.05 and a fault against 0.005; the estimate is 0.02."""
    pool = Pool(loss=0.02, spread=0.005)
    found = probed(tmp_path, pool)
    assert found.outcome == "clean" and found.prefix.cost.value == pytest.approx(
        0.02, abs=0.006
    )  # error 0.035 / sqrt(1020)
    raw = json.loads((tmp_path / "probe.json").read_text())
    assert judge_probe(raw, 0.005).outcome == "fault"


def test_exactly_zero_is_blindness_and_not_a_sound_cache(tmp_path: Path) -> None:
    """A backend that was not read and shows exactly 0 is blind."""
    pool = Pool(split=0.0, info={"attention_backend": "something_new"})
    found = probed(tmp_path, pool)
    assert found.outcome == "blind" and "not of a sound cache" in found.answer


def test_torch_native_is_blind_and_the_reason_is_said(tmp_path: Path) -> None:
    """It writes the pool and reads it back in the fresh case too: even a lossy pool shows nothing."""
    pool = Pool(loss=1.0, spread=0.5, split=0.0, sees=False, info={"attention_backend": "torch_native"})
    found = probed(tmp_path, pool)
    assert found.outcome == "blind" and "reads every key and value back" in found.answer
    assert found.prefix.outcome == "blind"


def test_an_unknown_backend_is_never_called_clean(tmp_path: Path) -> None:
    """Whether its fresh case avoids the pool is not known."""
    assert probed(tmp_path, Pool(info={"attention_backend": "something_new"})).outcome == "not_enough_data"


def test_a_hit_has_to_be_proven(tmp_path: Path) -> None:
    """Without cached_tokens nothing was read from the cache, whatever the numbers say."""
    found = probed(tmp_path, Pool(hits=False))
    assert found.outcome == "no_hit" and "cached_tokens [0]" in found.answer


def test_where_the_salt_is_ignored_the_fresh_floor_is_missing_with_a_reason(tmp_path: Path) -> None:
    """A release without extra_key: the random prefix still makes the first one fresh."""
    found = probed(tmp_path, Pool(salted=False))
    assert found.floor_fresh is None and any("extra_key" in n for n in found.notes)
    assert found.outcome == "clean"


def test_false_alarms_of_a_sound_server_are_rare() -> None:
    """40 probes of a sound server with noise of 0.3 nat, judged against a limit of 0: at most the stated 5% + 3 sigma (6)."""
    r = random.Random(5)
    plan = plan_probe(INFO)
    faults = 0
    for _ in range(40):
        rows = []
        for _ in range(4):
            fresh = [r.gauss(-2, 1) for _ in range(200)]
            rows.append({
                "fresh": fresh, "hit": [x + r.gauss(0, 0.3) for x in fresh], "fresh_again": fresh, "hit_again": fresh,
                "fresh_cached": 0, "fresh_again_cached": 0, "hit_cached": plan.context_tokens,
            })  # fmt: skip
        raw = {"plan": plan.model_dump(), "rows": rows, "requests": 1, "tokens_sent": 1, "seconds": 1.0}
        faults += judge_probe(raw, 1e-9).outcome == "fault"
    assert faults <= 6


def test_it_is_safe_beside_real_traffic(tmp_path: Path) -> None:
    """No flush, no request longer than a chunk, bounded new tokens, a small share of the cache."""
    pool = Pool()
    found = probed(tmp_path, pool)
    assert pool.flushed == 0
    assert all(len(b["input_ids"]) <= 512 and b["sampling_params"]["max_new_tokens"] <= 64 for b in pool.bodies)
    assert sum(len(b["input_ids"]) for b in pool.bodies) == found.tokens_sent - sum(
        b["sampling_params"]["max_new_tokens"] for b in pool.bodies
    )
    assert (
        len({b["extra_key"] for b in pool.bodies}) == 4 * 4
    )  # each document has keys of its own, and every run other ones


@pytest.mark.parametrize(
    ("info", "context", "window", "refused"),
    [
        ({"chunked_prefill_size": 8192}, 2032, 2048, None),
        ({"chunked_prefill_size": 256}, 112, 128, None),
        ({"chunked_prefill_size": -1}, 2032, 2048, None),
        ({"chunked_prefill_size": 256, "page_size": 64}, 64, 128, None),
        ({"attention_backend": "torch_native", "chunked_prefill_size": 8192}, 112, 128, None),
        ({"disable_radix_cache": True}, 240, 256, "prefix cache is off"),
        ({"max_total_num_tokens": 4096}, 240, 256, "too little room"),
        ({"chunked_prefill_size": 64}, 16, 32, "too little room"),
    ],
)
def test_sizes_fit_one_chunk_and_the_cache(
    info: dict[str, Any], context: int, window: int, refused: str | None
) -> None:
    """L + W <= chunked_prefill_size, L a whole number of pages, at most a tenth of the pool."""
    plan = plan_probe({**INFO, **info})
    assert (plan.context_tokens, plan.window_tokens) == (context, window)
    assert (refused in plan.refused) if refused else plan.refused is None
    assert isinstance(plan, Plan) and isinstance(plan, Record)


@pytest.mark.parametrize(
    ("info", "multimodal", "sees", "words"),
    [
        ({"attention_backend": "flashinfer"}, False, True, "ragged"),
        ({"attention_backend": "flashinfer"}, None, True, "ragged"),
        ({"attention_backend": "flashinfer"}, True, False, "multimodal"),
        ({"attention_backend": "flashinfer", "enable_deterministic_inference": True}, False, False, "deterministic"),
        (
            {"attention_backend": "flashinfer", "cuda_graph_config": '{"prefill": "tc_piecewise"}'},
            False,
            None,
            "piecewise",
        ),
        ({"attention_backend": "triton"}, True, True, "extend"),
        ({"attention_backend": "triton", "prefill_attention_backend": "fa3"}, False, False, "page table"),
        ({"attention_backend": "trtllm_mha"}, False, False, "paged context"),
        ({"attention_backend": "no-such"}, False, None, "not read"),
    ],
)
def test_what_a_probe_can_see_depends_on_the_path_that_a_prefill_takes(
    info: dict[str, Any], multimodal: bool | None, sees: bool | None, words: str
) -> None:
    """FlashInfer leaves its ragged prefill for the paged one on multimodal models, in deterministic mode, in piecewise graphs."""
    plan = plan_probe({**INFO, **info}, multimodal=multimodal)
    assert plan.sees is sees and words in plan.why


def test_a_refused_probe_says_why_and_sends_nothing(tmp_path: Path) -> None:
    """The prefix cache is off: nothing can be read from it."""
    pool = Pool(info={"disable_radix_cache": True})
    found = probed(tmp_path, pool)
    assert found.outcome == "not_run" and "prefix cache is off" in found.answer and not pool.bodies
