"""`workbook inspect checkpoint DIR`: what a checkpoint folder dictates, from its small files and headers."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from lib.errors import BadInput
from lib.model.checkpoint import read_checkpoint
from lib.model.facts import DEFAULT_SGLANG_VERSION
from lib.model.summary import LEVELS, checkpoint_summary


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `checkpoint` to the subcommands of `workbook inspect`."""
    parser = subparsers.add_parser(
        "checkpoint", help="layers, precision, scales, bytes per token and pools of a checkpoint folder"
    )
    parser.add_argument("folder", metavar="DIR", help="the folder with config.json")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks (default 1)")
    parser.add_argument("--kv-cache-dtype", default="auto", metavar="D", help="the flag's value (default auto)")
    parser.add_argument("--sglang-version", default=DEFAULT_SGLANG_VERSION, metavar="V", help="default %(default)s")
    parser.add_argument(
        "--gpu-memory-mib", type=float, metavar="MIB", help="total memory of the smallest GPU: then pools are predicted"
    )
    parser.add_argument(
        "--weights-gib", type=float, metavar="GIB", help="weights on one GPU; default: the safetensors files' size / tp"
    )
    parser.add_argument("--mem-fraction-static", type=float, metavar="F", help="default: as SGLang derives it")
    parser.add_argument(
        "--sm", type=int, metavar="MAJOR", help="compute capability, e.g. 9 or 12 (sparse attention picks by it)"
    )
    parser.add_argument("--json", action="store_true", help="one object on stdout (docs/inspect-checkpoint.md)")
    parser.add_argument(
        "--fail-on", choices=LEVELS, metavar="LEVEL", help=f"exit 1 on a finding at or above {', '.join(LEVELS)}"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 read; 1 a finding at or above --fail-on; unreadable input raises (exit code 2)."""
    _check(args)
    memory: dict[str, Any] = {}
    if args.gpu_memory_mib is not None:
        memory = {
            "gpu_memory_mib": args.gpu_memory_mib,
            "mem_fraction_static": args.mem_fraction_static,
            "weights_gib": args.weights_gib,
        }
    summary = checkpoint_summary(
        read_checkpoint(args.folder),
        tp=args.tp,
        kv_cache_dtype=args.kv_cache_dtype,
        sglang_version=args.sglang_version,
        sm=args.sm,
        **memory,
    )
    print(json.dumps(summary, allow_nan=False) if args.json else "\n".join(_lines(summary)))
    if args.fail_on is None:
        return 0
    level = LEVELS.index(args.fail_on)
    return int(any(LEVELS.index(finding["level"]) >= level for finding in summary["findings"]))


#: (name, least, most, whether the bounds are allowed themselves, what it is)
_NUMBERS: tuple[tuple[str, float, float, bool, str], ...] = (
    ("tp", 1, 4096, True, "a number of ranks from 1 to 4096"),
    ("gpu_memory_mib", 1024, 1 << 24, True, "MiB, at least 1024, as nvidia-smi's memory.total says (80 GiB: 81920)"),
    ("mem_fraction_static", 0, 1, False, "a fraction between 0 and 1, e.g. 0.85"),
    ("weights_gib", 0, 1 << 14, False, "GiB on one GPU, above 0"),
    ("sm", 3, 20, True, "the major part of the compute capability, e.g. 8, 9, 10 or 12 (not 90)"),
)


def _check(args: argparse.Namespace) -> None:
    """All numbers of the command line against what they may be, in one message.

    Raises:
        BadInput: at least one can't be.
    """
    wrong = []
    for name, low, high, bounds, what in _NUMBERS:
        value = getattr(args, name)
        if value is None:
            continue
        fits = math.isfinite(value) and (low <= value <= high if bounds else low < value < high)
        if not fits:
            wrong.append((f"--{name.replace('_', '-')}", what, value))
    if wrong:
        raise BadInput(
            "expected " + "; ".join(f"{flag}: {what}" for flag, what, _ in wrong),
            ", ".join(f"{flag} {value:g}" for flag, _, value in wrong),
            "correct the command line",
        )
    alone = [f for f in ("mem_fraction_static", "weights_gib") if getattr(args, f) is not None]
    if alone and args.gpu_memory_mib is None:
        raise BadInput(
            "expected --gpu-memory-mib beside " + " and ".join(f"--{f.replace('_', '-')}" for f in alone),
            "no GPU memory, from which pools would follow",
            "give --gpu-memory-mib",
        )


def _lines(summary: dict[str, Any]) -> list[str]:
    """The readable form: what it is, the table of dtypes, and the findings."""
    facts, layers, cache, declared = (
        summary["checkpoint"],
        summary["layers"],
        summary["kv_cache"],
        summary["quantization"],
    )
    groups = ", ".join(f"{group['count']} {group['kind'].replace('_', ' ')}" for group in layers["groups"])
    size = "weights not read"
    if facts["weight_bytes"]:
        size = f"{facts['weight_bytes'] / 2**30:.2f} GiB in {facts['shards']} files"
    lines = [
        f"{facts['architecture_name']}: {layers['num_hidden_layers']} layers ({groups}), {size}",
        f"weights {declared['weights']}; context "
        f"{facts['context_length'] or 'not said'}; "
        f"vocabulary {facts['vocab_size'] or 'not said'}; chat template {facts['chat_template'] or 'none found'}",
        f"KV cache on SGLang {cache['sglang_version']} with --kv-cache-dtype {cache['flag']}: {cache['dtype']}",
        f"  because {cache['why']}",
    ]
    scales = summary["scales"]
    if scales and scales["present"]:
        values = [*scales["k_values"], *scales["v_values"]]
        reach = f", values {min(values):g} to {max(values):g}" if values else ""
        lines.append(
            f"k/v scales: {scales['k_count']} + {scales['v_count']} ({scales['name_form']}){reach}; "
            f"{summary['scales_loaded']['why']}"
        )
    lines += ["", *_table(summary), ""]
    if summary["state"]:
        state = summary["state"]
        lines.append(
            f"state per request slot: {state['per_slot']:,} B on each GPU ({state['layers']} {state['kind']} layers, "
            f"{state['ssm_dtype']})"
        )
    lines += [f"note: {text}" for text in layers["exceptions"]]
    if summary["pools"]:
        lines += [f"note: {note}" for note in next(iter(summary["pools"].values()))["notes"]]
    elif summary["pools_why"]:
        lines.append(f"pools: {summary['pools_why']}")
    lines += [f"{finding['level']}: {finding['text']}" for finding in summary["findings"]]
    return lines


def _table(summary: dict[str, Any]) -> list[str]:
    """KV dtype against bytes per token, tokens per GiB and, with a GPU's memory, tokens and full-length requests
    that fit.
    """
    cache, pools = summary["kv_cache"], summary["pools"] or {}
    by_dtype = {pool["kv_cache_dtype"]: pool for pool in pools.values()}
    head = f"{'KV dtype':<16}{'B/token/GPU':>12}{'B/token box':>13}{'tokens/GiB':>12}"
    rows = [head + (f"{'tokens fit':>13}{'full contexts':>15}" if pools else "")]
    for name, kv in cache["bytes_per_token"].items():
        row = f"{name:<16}{kv['per_gpu']:>12,}{kv['whole_box']:>13,}{kv['tokens_per_gib'] or 0:>12,}"
        pool = by_dtype.get(name)
        if pool:
            full = f"{pool['full_length_requests']:.1f}" if pool["full_length_requests"] is not None else "?"
            row += f"{pool['max_total_num_tokens']:>13,}{full:>15}"
        rows.append(row + (" <" if name == cache["dtype"] else ""))
        if kv["sliding_per_gpu"]:
            rows.append(f"  and {kv['sliding_per_gpu']:,} B for each token inside the sliding window")
    return rows
