"""Who and what produced a number: tables of provenance and of server identities."""

from __future__ import annotations

from collections.abc import Sequence

from lib.records import Provenance, ServerIdentity
from lib.report.tables import Table, table

#: Resolved arguments that a reader looks for first; the rest is in the raw server_info.json.
KEY_FLAGS = (
    "device",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "tp_size",
    "dp_size",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "moe_runner_backend",
    "fp4_gemm_runner_backend",
    "sampling_backend",
    "mem_fraction_static",
    "max_total_tokens",
    "max_running_requests",
    "context_length",
    "chunked_prefill_size",
    "disable_cuda_graph",
    "disable_radix_cache",
    "speculative_algorithm",
    "speculative_num_draft_tokens",
)


def provenance_table(provenance: Provenance) -> Table:
    """What runs this notebook: commit, Python, parameters, machine."""
    commit = provenance.commit or "not a git checkout"
    rows = [
        (
            "workbook",
            f"{provenance.workbook_version}, commit {commit[:12]}{' with local changes' if provenance.dirty else ''}",
        ),
        ("Python of the notebooks", f"{provenance.python}, packages {provenance.packages_sha256[:12]}"),
        ("parameters", f"{provenance.params_sha256[:12]}"),
        (
            "machine",
            f"{provenance.host.get('cpu')}, {provenance.host.get('cpu_cores')} cores, {provenance.host.get('os')}",
        ),
        (
            "GPUs",
            ", ".join(g["name"] for g in provenance.host.get("gpus", [])) or str(provenance.host.get("gpus_reason")),
        ),
    ]
    return table([{"what": what, "value": value} for what, value in rows], caption="What runs this notebook")


def identity_table(identities: Sequence[ServerIdentity]) -> Table:
    """Which servers the numbers come from: one row a launch."""
    rows = []
    for one in identities:
        shown = [f"{key}={one.resolved_args[key]}" for key in KEY_FLAGS if one.resolved_args.get(key) not in (None, "")]
        rows.append(
            {
                "launch": one.launch_id,
                "origin": one.origin,
                "SGLang": one.sglang_version,
                "pid": one.pid,
                "ready after": f"{one.ready_s:.1f} s"
                if one.ready_s is not None
                else ("not recorded" if one.origin == "recorded" else "not ready"),
                "model": f"{one.served_model_name or one.model.get('path', '')} ({str(one.model.get('sha256', ''))[:12]})",
                "resolved": ", ".join(shown) or "(never answered)",
                "fingerprint": one.fingerprint[:12],
            }
        )
    return table(rows, caption="The servers behind this notebook's numbers", empty="no server was launched")
