"""What reading from the KV cache costs, measured on one running server: no restart, no flush, no second checkpoint.

The same tokens are scored twice: *fresh* (all in one prefill chunk) and as a *hit* (their context read from the prefix
cache). Backends whose first chunk attends to the keys and values just computed (Triton, FlashInfer) never read the pool
in the fresh case, so the difference is what the pool costs: its precision, or a scaling fault. Decode is compared the
same way: sampled tokens' own log-probabilities against the same tokens scored fresh.

    fresh  [ salt | context L | window W ]   one chunk, L + W <= chunked_prefill_size, cached_tokens = 0
    hit    [ salt | context L ]cached [ W ]  cached_tokens = L is the proof
    decode [ salt | context L ]-> N sampled tokens, then the same tokens fresh

Where a backend writes the pool first and reads everything back (torch_native, fa3), both cases read the pool: the
difference is blind to it. An exact 0 everywhere is the sign of that, not of a sound cache. Split sums differ anyway: a
sound 16-bit cache shows a mean |difference| of about 0.035 nat on an H200 (Triton, SmolLM2-135M); this figure depends on
model, chunk and window, so these are stated. Source: docs/sources.md, H1; SGLang 0.5.15 layers/attention/*_backend.py.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lib.audit.probes import LIBRARY_TEXTS, read_document, token_ids
from lib.errors import ServerError
from lib.hosts import local
from lib.load.stats import paired_mean_difference, student_t_quantile
from lib.records import Measured, Record
from lib.results import Answering

#: Where each attention backend's prefill without a prefix gets keys and values from, as read in SGLang 0.5.15's source.
VIEWS: dict[str, tuple[bool, str]] = {
    "triton": (True, "extend attention takes the new tokens' keys and values directly, only the prefix from the pool"),
    "flashinfer": (True, "a prefill without prefix is ragged: it reads the keys and values just computed"),
    "torch_native": (False, "forward_extend writes the pool and then reads every key and value back from it"),
    "torch_flex": (False, "forward_extend reads every key and value from the pool"),
    "fa3": (False, "flash_attn_with_kvcache reads every key and value through the page table (models with MLA: not read)"),
    "fa4": (False, "flash_attn_with_kvcache reads every key and value through the page table (models with MLA: not read)"),
    "trtllm_mha": (False, "the paged context kernel reads every key and value from the pool"),
}
#: Two-sided level of each contrast's interval; a fault is called at half of it.
LEVEL = 0.05
#: At most this many tokens of context and window: longer ones cost more and say no more.
MOST_TOKENS = 4096
#: Where the source says that a backend is blind, this short one shows the exact 0.
BLIND_TOKENS = 256
#: The probe may put at most this share of the pool into the prefix cache, where it could displace other people's prefixes.
CACHE_SHARE = 0.1
#: A fresh request may share this many first tokens with the cache (a beginning-of-text token where extra_key is not known).
SHARED_TOKENS = 4
#: Requests of the probe take at most this share of the time.
DUTY = 0.5


class Plan(Record):
    """Sizes of a probe on this server, and what is known about its sight before anything is sent."""

    backend: str
    sees: bool | None
    why: str
    chunked_prefill_size: int | None
    page_size: int
    context_tokens: int
    window_tokens: int
    decode_tokens: int
    documents: int
    tries: int = 1
    refused: str | None = None


class Contrast(Record):
    """One comparison: what the cache costs in nats a token, with interval, noise, and what would have been seen."""

    what: str
    outcome: str
    cost: Measured
    mean_absolute: float | None = None
    largest: float | None = None
    tokens: int = 0
    detectable: float | None = None
    needed_tokens: int | None = None
    reason: str


class ProbeReport(Record):
    """What one probe found. `outcome` is clean, fault, blind, no_hit, not_enough_data, or not_run."""

    outcome: str
    answer: str
    plan: Plan
    prefix: Contrast | None = None
    decode: Contrast | None = None
    floor_fresh: float | None = None
    floor_hit: float | None = None
    limit_nats: float
    false_alarm_rate: float = LEVEL
    requests: int = 0
    tokens_sent: int = 0
    seconds: float = 0.0
    kv_cache_dtype: str | None = None
    notes: list[str] = []


def view_of(info: Mapping[str, Any], multimodal: bool | None = None) -> tuple[bool | None, str]:
    """Whether a prefill without prefix bypasses the pool on this server, and why; None where that is not known.

    FlashInfer does so with its ragged wrapper alone, which it leaves for the paged one on multimodal models, in
    deterministic mode and under piecewise CUDA graphs (SGLang 0.5.15 flashinfer_backend.py, `use_ragged`).

    Args:
        info: the server's `/server_info`.
        multimodal: whether its model takes images, from `/model_info`; None: not known, taken as no.
    """
    backend = str(info.get("prefill_attention_backend") or info.get("attention_backend") or "unknown")
    unread = (None, "this backend's source was not read: only an exact 0 would settle that it is blind")
    sees, why = VIEWS.get(backend, unread)
    if backend == "flashinfer":
        paged = "its paged wrapper reads every key and value from the pool"
        if multimodal or info.get("enable_deterministic_inference"):
            return False, f"{'the model is multimodal' if multimodal else 'deterministic inference is on'}: {paged}"
        if any("tc_piecewise" in str(v) for k, v in info.items() if "cuda_graph" in k):
            return None, f"under a piecewise CUDA graph of the prefill {paged}, and which prefills run in one was not read"
    return sees, why


def plan_probe(
    info: Mapping[str, Any], documents: int = 4, decode_tokens: int = 64, tokens: int = MOST_TOKENS, multimodal: bool | None = None
) -> Plan:
    """Sizes that keep context and window in one chunk of this server, from its `/server_info`.

    Example: chunked_prefill_size 8192 gives 2,032 tokens of context (less the salt) and 2,048 of window; 256 gives 112 and 128.
    """
    backend = str(info.get("prefill_attention_backend") or info.get("attention_backend") or "unknown")
    sees, why = view_of(info, multimodal)
    chunk = int(info.get("chunked_prefill_size") or 0)
    page = max(1, int(info.get("page_size") or 1))
    room = int(info.get("max_req_input_len") or MOST_TOKENS) - 8
    total = min(tokens if sees is not False else BLIND_TOKENS, room, chunk if chunk > 0 else MOST_TOKENS)
    documents = min(documents, 1) if sees is False else documents  # enough to show the exact 0
    window = total // 2
    context = (total - window - 16) // page * page
    decoded = max(0, min(decode_tokens, total - context - 1))
    pool = int(info.get("max_total_num_tokens") or 0)
    each = 2 * (context + window) + 2 * (context + decoded)
    if pool:
        documents = max(0, min(documents, int(pool * CACHE_SHARE) // max(each, 1)))
    refused = None
    if info.get("disable_radix_cache"):
        refused = "the prefix cache is off (disable_radix_cache): nothing can be read from it"
    elif context < max(32, page) or documents < 1:
        refused = (
            f"too little room: chunked_prefill_size {chunk}, pages of {page}, requests up to {room} tokens, a pool of {pool} "
            f"of which the probe takes at most {CACHE_SHARE:.0%}"
        )
    elif info.get("is_embedding") or info.get("disaggregation_mode") not in (None, "null"):
        refused = "this server does not prefill and decode by itself"
    return Plan(
        backend=backend,
        sees=sees,
        why=why,
        chunked_prefill_size=chunk or None,
        page_size=page,
        context_tokens=max(context, 0),
        window_tokens=window,
        decode_tokens=decoded,
        documents=documents,
        tries=2 * max(1, int(info.get("dp_size") or 1)),
        refused=refused,
    )


def take_probe(server: Answering, folder: Path, documents: int = 4, tokens: int = MOST_TOKENS, duty: float = DUTY) -> None:
    """Sends a probe's requests, one after the other with pauses, and writes probe.json: raw log-probabilities and hits.

    Safe beside real traffic: no flush, one request in flight, none longer than a chunk, at most `duty` of the time, a
    bounded share of the prefix cache; it stops at the first error.

    Raises:
        ServerError: a request fails.
    """
    info = server.control.server_info()
    multimodal = None
    with contextlib.suppress(ServerError, AttributeError):
        multimodal = bool(server.control.get_json("/model_info").get("has_image_understanding"))
    plan = plan_probe(info, documents, tokens=tokens, multimodal=multimodal)
    sender = _Sender(server, duty)
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    if plan.refused is None:
        for number in range(plan.documents):
            run = uuid.uuid4().hex
            salt = token_ids(server, f"{run}\n", 16)
            text = read_document(LIBRARY_TEXTS[number % len(LIBRARY_TEXTS)])[0]
            ids = (salt + token_ids(server, text, plan.context_tokens + plan.window_tokens))[
                : plan.context_tokens + plan.window_tokens
            ]
            rows.append(_one_document(sender, plan, ids, run[:12]))
    dtype = info.get("kv_cache_dtype")
    states = info.get("internal_states") or [{}]
    if isinstance(states, list) and states and isinstance(states[0], dict):
        dtype = states[0].get("kv_cache_dtype") or dtype
    raw = {
        "plan": plan.model_dump(),
        "rows": rows,
        "requests": sender.requests,
        "tokens_sent": sender.tokens,
        "seconds": round(time.monotonic() - began, 3),
        "kv_cache_dtype": dtype,
    }
    local.write_atomic(folder / "probe.json", json.dumps(raw))


class _Sender:
    """One request at a time, with a pause after each that keeps the share of busy time below `duty`."""

    def __init__(self, server: Answering, duty: float) -> None:
        self.server, self.duty, self.requests, self.tokens = server, min(max(duty, 0.01), 1.0), 0, 0

    def __call__(self, ids: Sequence[int], start: int, key: str, new_tokens: int = 1) -> dict[str, Any]:
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": 1}
        if new_tokens > 1:
            sampling = {
                "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True
            }  # fmt: skip
        body = {
            "input_ids": list(ids),
            "return_logprob": True,
            "logprob_start_len": start,
            "extra_key": key,
            "sampling_params": sampling,
        }
        began = time.monotonic()
        payload = self.server.control.post_bytes("/generate", body, 300)
        busy = time.monotonic() - began
        try:
            meta = dict(json.loads(payload)["meta_info"])
        except (ValueError, KeyError, TypeError) as error:
            raise ServerError("/generate answers one object with meta_info", f"{payload[:200]!r}") from error
        self.requests += 1
        self.tokens += len(ids) + new_tokens
        time.sleep(busy * (1 / self.duty - 1))
        return meta


def _one_document(send: _Sender, plan: Plan, ids: Sequence[int], key: str) -> dict[str, Any]:
    length = plan.context_tokens
    row: dict[str, Any] = {"tokens": len(ids)}

    def score(name: str, salt: str, tries: int = 1, tokens: Sequence[int] = ids) -> None:
        for _ in range(tries):
            meta = send(tokens, length, f"{key}-{salt}")
            found = meta.get("input_token_logprobs") or []
            if [r[1] for r in found] != list(tokens[length:]):
                raise ServerError(f"log-probabilities of {len(tokens) - length} ids", f"{len(found)} rows, or other ids")
            row[name] = [r[0] for r in found[1:]]  # the first has no score: its state was not computed in a hit
            row[f"{name}_cached"] = meta.get("cached_tokens")
            if not name.startswith("hit") or (meta.get("cached_tokens") or 0) >= length:
                break

    score("fresh", "a")
    score("hit", "a", plan.tries)
    score("fresh_again", "b")
    score("hit_again", "a", plan.tries)
    if plan.decode_tokens > 1:
        meta = send(ids[:length], -1, f"{key}-c", plan.decode_tokens)
        out = meta.get("output_token_logprobs") or []
        row["decode"] = [r[0] for r in out[1:]]  # the first output token is the prefill's
        score("decode_fresh", "d", tokens=[*ids[:length], *(int(r[1]) for r in out)])
    return row


def judge_probe(raw: Mapping[str, Any], limit_nats: float) -> ProbeReport:
    """What a probe's raw answers mean, against the largest accepted cost of reading from the cache."""
    plan = Plan.model_validate(raw["plan"])
    rows: Sequence[Mapping[str, Any]] = raw["rows"]
    common: dict[str, Any] = {
        "plan": plan,
        "limit_nats": limit_nats,
        "requests": raw["requests"],
        "tokens_sent": raw["tokens_sent"],
        "seconds": raw["seconds"],
        "kv_cache_dtype": raw.get("kv_cache_dtype"),
    }
    if plan.refused or not rows:
        return ProbeReport(outcome="not_run", answer=f"Not probed: {plan.refused or 'nothing was sent'}.", **common)
    notes = [
        f"chunk {plan.chunked_prefill_size}, context {plan.context_tokens}, window {plan.window_tokens}: the mean |difference| "
        "depends on them and on the model, so compare it only with the same sizes on the same model",
    ]
    mixed = [r for r in rows if (r["fresh_cached"] or 0) > SHARED_TOKENS]
    missed = [r for r in rows if (r["hit_cached"] or 0) < plan.context_tokens]
    floor_hit = _mean_absolute(rows, "hit", "hit_again")
    again = [r for r in rows if (r["fresh_again_cached"] or 0) <= SHARED_TOKENS]
    floor_fresh = _mean_absolute(again, "fresh", "fresh_again") if again else None
    if not again:
        notes.append("extra_key did not give a fresh computation, so fresh against fresh was not measured")
    common |= {"floor_fresh": floor_fresh, "floor_hit": floor_hit}
    if mixed or missed:
        seen = sorted({r["hit_cached"] for r in rows}, key=str)
        why = "a 'fresh' request met a cached prefix" if mixed else f"cached_tokens {seen}, expected {plan.context_tokens}"
        answer = f"Not settled: {why}, so nothing shows that the hits were hits."
        return ProbeReport(outcome="no_hit", answer=answer, notes=notes, **common)
    prefix = _contrast("context read from the prefix cache", rows, "fresh", "hit", limit_nats, plan)
    decode = (
        _contrast("tokens decoded (for sampled tokens this mean estimates KL(decode || fresh))", rows, "decode", "decode_fresh",
                  limit_nats, plan)
        if all(r.get("decode") and (r["decode_fresh_cached"] or 0) <= SHARED_TOKENS for r in rows)
        else None
    )  # fmt: skip
    parts = [c for c in (prefix, decode) if c]
    outcome, answer = _overall(parts, plan, limit_nats)
    return ProbeReport(
        outcome=outcome, answer=answer, prefix=prefix, decode=decode, notes=notes,
        false_alarm_rate=LEVEL / 2 * len(parts), **common,
    )  # fmt: skip


def _mean_absolute(rows: Sequence[Mapping[str, Any]], one: str, two: str) -> float:
    pairs = [abs(x - y) for r in rows for x, y in zip(r[one], r[two], strict=True)]
    return sum(pairs) / len(pairs)


def _contrast(
    what: str, rows: Sequence[Mapping[str, Any]], sound: str, tested: str, limit: float, plan: Plan
) -> Contrast:
    a = [x for r in rows for x in r[sound]]
    b = [x for r in rows for x in r[tested]]
    blocks = [i for i, r in enumerate(rows) for _ in r[sound]]
    d = paired_mean_difference(a, b, blocks)
    cost = Measured(value=d.mean, unit="nat/token", n=d.n, low=d.low, high=d.high, reason=d.reason)
    differences = [x - y for x, y in zip(a, b, strict=True)]
    found: dict[str, Any] = {
        "what": what,
        "cost": cost,
        "mean_absolute": sum(map(abs, differences)) / len(differences),
        "largest": max(differences, key=abs),
        "tokens": d.n,
    }
    if not any(differences):
        return Contrast(outcome="blind", reason="exactly 0 at every token: both cases computed the same thing", **found)
    if d.mean is None or d.low is None or d.high is None or d.standard_error is None:
        return Contrast(outcome="not_enough_data", reason=d.reason or "no interval", **found)
    reach = student_t_quantile(1 - LEVEL / 2, d.batches - 1)
    found["detectable"] = limit + (reach + 1.2816) * d.standard_error
    words = (
        f"{d.mean:+.4f} nat/token [{d.low:+.4f}, {d.high:+.4f}] over {d.n:,} tokens, mean |difference| {found['mean_absolute']:.4f}, "
        f"{'told apart from 0' if d.low > 0 or d.high < 0 else 'not told apart from 0'}"
    )
    if d.low > limit:
        return Contrast(outcome="fault", reason=f"{words}: the cache costs more than {limit:g}", **found)
    if d.high < -limit:
        why = "the cached case is better by more than the limit, so the fresh computation is the suspect"
        return Contrast(outcome="fault", reason=f"{words}: {why}", **found)
    if plan.sees is False:
        return Contrast(outcome="blind", reason=f"{words}; {plan.backend}: {plan.why}", **found)
    if d.low >= -limit and d.high <= limit:
        return Contrast(outcome="clean", reason=f"{words}: within {limit:g}", **found)
    distance = abs(abs(d.mean) - limit)
    found["needed_tokens"] = int(d.n * (reach * d.standard_error / distance) ** 2) + 1 if distance else None
    return Contrast(outcome="not_enough_data", reason=f"{words}: the interval spans {limit:g}", **found)


def _overall(parts: Sequence[Contrast], plan: Plan, limit: float) -> tuple[str, str]:
    faults = [c for c in parts if c.outcome == "fault"]
    if faults:
        words = "; ".join(f"{c.what}: {c.reason}" for c in faults)
        return "fault", f"Reading the KV cache loses accuracy: {words}."
    if plan.sees is False:
        return (
            "blind",
            f"This probe cannot see the cache of a {plan.backend} server: {plan.why}, so a fresh computation reads the "
            "same pool as a hit. Compare two servers instead (`workbook compare-accuracy`).",
        )
    if parts and parts[0].outcome == "blind":
        return (
            "blind",
            "Exactly 0 everywhere: the fresh computation read the pool too, or the hit did not. That is the sign of blindness, "
            "not of a sound cache. Compare two servers instead (`workbook compare-accuracy`).",
        )
    if plan.sees is None:
        return (
            "not_enough_data",
            f"No fault was seen, but not settled: {plan.backend}: {plan.why}; "
            + "; ".join(f"{c.what}: {c.reason}" for c in parts),
        )
    if all(c.outcome == "clean" for c in parts):
        power = max(c.detectable or 0.0 for c in parts)
        return (
            "clean",
            f"Reading the KV cache costs no more than {limit:g} nat/token here: {'; '.join(c.reason for c in parts)}. A cost of "
            f"{power:.3f} would have been found 9 times in 10.",
        )
    return "not_enough_data", "Not settled: " + "; ".join(f"{c.what}: {c.reason}" for c in parts) + "."
