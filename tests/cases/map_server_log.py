"""From `lib.server.log.ServerLog` to the names that cases of kind server_log use: one table for all of them.

`answer` gives every name that the log answers; a case's `expect` asks for some of them. Nothing is computed here that
`lib` does not compute: a row picks a field, or renames it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lib.server.lines import rank_tag
from lib.server.log import ServerLog, read_log
from lib.server.log_records import Batch


def answer(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """All names that the case's log answers, in the shape that `expect` has."""
    log = read_log(_text(case, folder).splitlines())
    found: dict[str, Any] = {}
    for name, pick in TABLE.items():
        value = pick(log)
        if value is not None:
            found[name] = value
    for field in BATCH:  # what one batch line says, by the record's own name and the short ones
        value = _last(log, field)
        if value is not None:
            found.setdefault(field, value)
    if log.kv_pools:
        found["bytes_per_token"] = log.kv_pools[0].bytes_per_token  # None is an answer: it can't be known
    return found


def _text(case: dict[str, Any], folder: Path) -> str:
    given = case["input"]
    if "file" in given:
        return (folder / given["file"]).read_bytes().decode("utf-8", "replace")
    text = given["text"]
    return text if isinstance(text, str) else "\n".join(str(line) for line in text)


def _class(log: ServerLog) -> str | None:
    if log.failure is None:
        return None
    if log.failure.failure_class == "crash" and log.failure.during_startup:
        return "crash_at_init"
    return log.failure.failure_class


def _failure(name: str) -> Callable[[ServerLog], Any]:
    return lambda log: getattr(log.failure, name) if log.failure else None


def _failure_value(name: str) -> Callable[[ServerLog], Any]:
    return lambda log: log.failure.values.get(name) if log.failure else None


def _tp_numbers(ranks: list[str]) -> list[int]:
    return sorted({n for n in (rank_tag(rank, "TP") for rank in ranks) if n is not None})


def _notice_ranks(log: ServerLog, ident: str) -> list[int] | None:
    ranks = [rank for notice in log.notices if notice.id == ident for rank in notice.ranks]
    return _tp_numbers(ranks) or None


def _plan(log: ServerLog, name: str) -> Any:
    return next((v for v in (getattr(plan, name) for plan in log.pool_plans) if v is not None), None)


def _pool(log: ServerLog, role: str) -> dict[str, Any] | None:
    rows = [pool for pool in log.kv_pools if pool.role == role]
    if not rows:
        return None
    return {"tokens": rows[0].tokens, "k_gib": rows[0].k_gib, "v_gib": rows[0].v_gib, "dtype": rows[0].dtype}


def _labelled(log: ServerLog, label: str) -> dict[str, Any] | None:
    rows = [pool for pool in log.kv_pools if pool.label == label and pool.role == "target"]
    return {"k": rows[0].k_gib, "v": rows[0].v_gib} if rows else None


def _last(log: ServerLog, name: str, kinds: tuple[str, ...] = ("decode", "acceptance", "prefill", "engine")) -> Any:
    rows = [getattr(row, name) for row in log.batches.series if row.kind in kinds and getattr(row, name) is not None]
    return rows[-1] if rows else None


def _rows(log: ServerLog) -> list[dict[str, Any]] | None:
    if log.engine == "vllm":
        rows = [
            {"max_len": row.max_model_len, "blocks": row.blocks, "tokens": row.tokens, "fits": row.fits}
            for row in log.vllm_capacity
        ]
        return rows or None
    return log.speculation.rows if log.speculation else None


def _accepts(log: ServerLog) -> dict[str, list[float]] | None:
    if log.speculation is None:
        return None
    return {"accept_len": [r["len"] for r in log.speculation.rows], "rate": [r["rate"] for r in log.speculation.rows]}


def _speculation(name: str) -> Callable[[ServerLog], Any]:
    return lambda log: getattr(log.speculation, name) if log.speculation else None


def _vllm(log: ServerLog, name: str) -> Any:
    rows = [getattr(row, name) for row in log.vllm_capacity if getattr(row, name) is not None]
    return rows[-1] if rows else None


def _vllm_tokens(log: ServerLog) -> Any:
    """Capacity of a vLLM server: the printed tokens where they agree with the printed concurrency, else what it implies."""
    agrees = _vllm(log, "consistent") is not False
    return (agrees and _vllm(log, "printed_tokens")) or _vllm(log, "real_token_capacity") or _vllm(log, "tokens")


def _vllm_speculation(name: str) -> Callable[[ServerLog], Any]:
    return lambda log: getattr(log.vllm_speculation[-1], name) if log.vllm_speculation else None


def _total(log: ServerLog, name: str) -> Any:
    return getattr(log.pool_totals[0], name) if log.pool_totals else None


def _swa_tokens(log: ServerLog) -> Any:
    swa = next((pool.tokens for pool in log.kv_pools if pool.label == "swa"), None)
    return _total(log, "swa_tokens") or swa or _final(log, "swa_tokens")


def _final(log: ServerLog, name: str) -> Any:
    """A plan's last value on the rank that gave its first: a limit asked for comes after what memory allows."""
    rows = [plan for plan in log.pool_plans if getattr(plan, name) is not None]
    return next((getattr(plan, name) for plan in reversed(rows) if plan.rank == rows[0].rank), None)


def _full_tokens(log: ServerLog) -> Any:
    return _total(log, "full_tokens") or _final(log, "full_tokens") or _last(log, "full_tokens")


def _kv(name: str) -> Callable[[ServerLog], Any]:
    return lambda log: getattr(log.kv, name) if log.kv else None


def _backend(log: ServerLog, name: str) -> Any:
    return next((getattr(b, name) for b in log.backends if b.kind == "attention_backend"), None)


def _minimum(log: ServerLog) -> dict[str, float] | None:
    if log.failure is None or log.mem_fraction_floor is None:
        return None
    drafts = any(row.role == "draft" for row in log.weights)
    return {"with_mtp" if drafts else "without_mtp": log.mem_fraction_floor}


def _beside_the_kv_dtype(log: ServerLog) -> bool | None:
    """True where memory ran out in a draft's pool after the target's, which the KV dtype sizes, was complete."""
    ran_out = log.failure is not None and log.failure.failure_class == "oom_at_startup"
    return True if ran_out and "each_draft_pool" in log.memory_of_parts_gib else None


def _tokens(log: ServerLog) -> Any:
    """Tokens that fit: of the pools, of vLLM's lines, else of the scheduler's own line."""
    return _kv("tokens")(log) or _vllm_tokens(log) or _capacity(log, "max_total_num_tokens")


def _capacity(log: ServerLog, name: str) -> Any:
    return getattr(log.capacity, name) if log.capacity else None


#: Quantities of a batch line.
BATCH = tuple(name for name in Batch.model_fields if name not in ("line_no", "time", "rank", "kind"))

#: name in a case -> where it stands in the record
TABLE: dict[str, Callable[[ServerLog], Any]] = {
    "engine": lambda log: log.engine,
    "model_class": lambda log: log.model_class,
    "tp": lambda log: log.tp_size,
    "dp": lambda log: log.dp_size,
    "ready": lambda log: log.is_ready,
    # weights and free memory
    "weights_gib": lambda log: log.weights_gib_per_rank,
    "weights_gib_per_rank": lambda log: log.weights_gib_per_rank,
    "avail_gib": lambda log: log.weights[0].avail_gib if log.weights else None,
    "load_s": lambda log: log.weights[0].seconds if log.weights else None,
    "slow_ranks": lambda log: _tp_numbers(log.slow_ranks) or None,
    "last_avail_gib": lambda log: log.last_avail_gib,
    "free_after_pool_gib_min": lambda log: log.avail_after_pools_gib_min,
    "free_before_graphs_gib": lambda log: log.avail_before_graphs_gib,
    "target_free_gib": lambda log: log.avail_after_target_pools_gib,
    "free_gib": lambda log: log.capacity.available_mem_gib if log.capacity else None,
    "mem_fraction": lambda log: (
        _plan(log, "mem_fraction_static")
        or (log.failure and log.failure.values.get("mem_fraction_static"))
        or log.server_args.get("mem_fraction_static")
    ),
    "static_budget_gib_about": lambda log: log.static_budget_gib,
    "minimum_viable": _minimum,
    # KV cache: of one rank
    "kv_dtype": _kv("dtype"),
    "kv_dtype_derived": lambda log: log.kv.dtype if log.kv and log.kv.dtype_known_by == "arithmetic" else None,
    "tokens": _tokens,
    "usable_tokens": _tokens,
    "capacity": _tokens,
    "kv_gib": lambda log: _kv("target_gib_per_rank")(log) or _vllm(log, "kv_gib"),
    "kv_gib_per_rank": _kv("target_gib_per_rank"),
    "kv_gib_total": _kv("total_gib_per_rank"),
    "total_gib": lambda log: _total(log, "gib") or (log.kv.total_gib_per_rank if log.kv else None),
    "kv_is_8bit_without_scales": _kv("eight_bit_without_scales"),
    "scale_warning": lambda log: any(notice.id == "kv_scale_default" for notice in log.notices),
    "scale_warning_ranks_seen": lambda log: _notice_ranks(log, "kv_scale_default"),
    "k_gib": lambda log: log.kv_pools[0].k_gib if log.kv_pools else None,
    "v_gib": lambda log: log.kv_pools[0].v_gib if log.kv_pools else None,
    "k_gib_printed": lambda log: log.kv_pools[0].k_gib if log.kv_pools else None,
    "bytes_per_token_derived": lambda log: log.kv_pools[0].bytes_per_token if log.kv_pools else None,
    "target_kv": lambda log: _pool(log, "target"),
    "draft_kv": lambda log: _pool(log, "draft"),
    "per_draft_pool_gib_about": lambda log: log.memory_of_parts_gib.get("each_draft_pool"),
    "swa_pool": lambda log: _labelled(log, "swa"),
    "full_pool": lambda log: _labelled(log, "full"),
    "tokens_full": _full_tokens,
    "full_tokens": _full_tokens,
    "full_token": lambda log: _plan(log, "full_tokens") or _full_tokens(log),
    "tokens_swa": _swa_tokens,
    "swa_tokens": _swa_tokens,
    "swa_full_ratio": lambda log: _total(log, "swa_full_ratio"),
    "bytes_per_full_token": lambda log: _plan(log, "bytes_per_full_token"),
    "total_gpu_gib": lambda log: _plan(log, "total_gpu_gib"),
    "available_gib": lambda log: _plan(log, "available_gib"),
    "kv_budget_gib": lambda log: _plan(log, "budget_gib"),
    # recurrent state
    "mamba_slots": lambda log: log.mamba_pools[0].slots if log.mamba_pools else None,
    "mamba_gib": lambda log: log.mamba_pools[0].total_gib if log.mamba_pools else None,
    "mamba_total_gib": lambda log: log.mamba_pools[0].total_gib if log.mamba_pools else None,
    "draft_tokens_derived": lambda log: log.mamba_pools[0].draft_tokens if log.mamba_pools else None,
    "slots_per_request": lambda log: log.slots_per_request,
    "bottleneck": lambda log: log.limited_by,
    "max_running_requests": lambda log: _capacity(log, "max_running_requests"),
    "max_total_num_tokens": lambda log: _capacity(log, "max_total_num_tokens"),
    "context_len": lambda log: _capacity(log, "context_len"),
    "context_length": lambda log: _capacity(log, "context_len"),
    "chunked_prefill_size": lambda log: _capacity(log, "chunked_prefill_size"),
    "max_prefill_tokens": lambda log: _capacity(log, "max_prefill_tokens"),
    "retractions": lambda log: log.retractions,
    "retracted_requests": lambda log: log.retracted_requests,
    # batch lines
    "running": lambda log: _last(log, "running"),
    "queued": lambda log: _last(log, "queue"),
    "token_usage": lambda log: _last(log, "usage"),
    "in_tok_s": lambda log: _last(log, "input_tok_s"),
    "decode_lines": lambda log: log.batches.decode_lines or None,
    "prefill_lines": lambda log: log.batches.prefill_lines or None,
    "full_usage": lambda log: _last(log, "full_usage"),
    "mamba_num": lambda log: _last(log, "mamba_num"),
    "mamba_usage": lambda log: _last(log, "mamba_usage"),
    "gen_tok_s": lambda log: _last(log, "gen_tok_s"),
    "graph": lambda log: _last(log, "graph", ("decode",)),
    "cuda_graph": lambda log: _last(log, "graph", ("decode",)),
    # speculation
    "accept_len": _speculation("last_accept_len"),
    "accept_rate": _speculation("last_accept_rate"),
    "accept_rate_printed": _speculation("last_accept_rate"),
    "drafts_accepted_per_step": _speculation("drafts_accepted_per_step"),
    "num_steps_derived": _speculation("num_steps"),
    "num_draft_tokens_derived": _speculation("num_draft_tokens"),
    "speculation_active": _speculation("active"),
    "quality_affected": _speculation("quality_affected"),
    "throughput_affected": _speculation("throughput_affected"),
    "rows": _rows,
    "mismatched": _accepts,
    # vLLM
    "printed_tokens": lambda log: _vllm(log, "printed_tokens"),
    "printed_concurrency": lambda log: _vllm(log, "printed_concurrency"),
    "max_model_len": lambda log: _vllm(log, "max_model_len"),
    "real_token_capacity": lambda log: _vllm(log, "real_token_capacity"),
    "mean_acceptance_length": _vllm_speculation("mean_acceptance_length"),
    "num_spec_tokens": _vllm_speculation("num_spec_tokens"),
    "draft_acceptance": _vllm_speculation("draft_acceptance"),
    # backends
    "requested_backend": lambda log: _backend(log, "asked"),
    "attention_backend_effective": lambda log: _backend(log, "taken"),
    # failure
    "class": _class,
    "phase": _failure("phase"),
    "root_cause": _failure("root_cause"),
    "exit_code": _failure("exit_code"),
    "exit_signal": _failure("exit_signal"),
    "not_oom": lambda log: not log.failure.out_of_memory if log.failure else None,
    "kv_dtype_is_not_the_cause": _beside_the_kv_dtype,
    "profiled_tokens": _failure_value("profiled_tokens"),
}
