"""Runs `precision` on synthetic data and on the K, V and queries of a real checkpoint; by a Python that has torch.

    PYTHON lib/model/precision_job.py <request.json >rows.jsonl

The request is one JSON object (`REQUEST` has every key and its default); each row of the answer is one JSON object on a
line of its own, written when it is known; progress goes to standard error. A checkpoint needs `transformers` as well.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:  # run by path: the project is not installed in the server's environment
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from lib.errors import BadInput, WorkbookError
from lib.model import precision

if TYPE_CHECKING:
    from torch import Tensor

#: What can be asked, with defaults; `layers` are those whose attention is computed (rounding is of every layer).
#: `arms` are pairs of a format and a path; `scales`: 1.0 or calibrated to the tensor.
REQUEST: dict[str, Any] = {
    "device": "cpu",
    "keys": [2048, 16384, 131072],
    "kinds": ["gaussian_mean", "gaussian", "student_t3"],
    "head_dim": 256,
    "queries": 16,
    "logit_std": 2.0,
    "draws": 2,
    "seed": 20260417,
    "num_kv_splits": precision.NUM_KV_SPLITS,
    "arms": [
        ["bf16", "triton", "one"], ["fp8_e4m3", "storage", "one"], ["fp8_e4m3", "triton", "one"], ["fp8_e4m3", "lifted", "one"],
        ["fp8_e4m3", "storage", "calibrated"], ["fp8_e5m2", "storage", "one"], ["fp8_e5m2", "triton", "one"],
        ["int8", "storage", "calibrated"], ["nvfp4", "storage", "one"], ["fp4_mx_block16", "storage", "one"],
    ],
    "checkpoint": None,
    "text": None,
    "layers": None,
    "tokens": None,
    "positions": 16,
}  # fmt: skip


def read_request(text: str) -> dict[str, Any]:
    """The request with its defaults.

    Raises:
        BadInput: no JSON object, an unknown key, or a format, path or kind that does not exist; all of them named.
    """
    try:
        given = json.loads(text or "{}")
    except ValueError as error:
        raise BadInput("one JSON object on standard input", str(error), "see REQUEST in precision_job.py") from None
    if not isinstance(given, dict):
        raise BadInput("one JSON object on standard input", type(given).__name__, "see REQUEST in precision_job.py")
    request = {**REQUEST, **given}
    wrong = [f"unknown key {k!r}" for k in sorted(set(given) - set(REQUEST))]
    for arm in request["arms"]:
        if (
            len(arm) != 3
            or arm[0] not in precision.FORMATS
            or arm[1] not in precision.PATHS
            or arm[2] not in ("one", "calibrated")
        ):
            wrong.append(f"arm {arm!r}")
        elif arm[1] != "storage" and arm[0] not in precision.CAST_FORMATS:
            wrong.append(f"arm {arm!r}: only storage")
    wrong += [f"kind {k!r}" for k in request["kinds"] if k not in precision.KINDS]
    wrong += [f"keys {n!r}" for n in request["keys"] if not isinstance(n, int) or n < 1]
    if wrong:
        raise BadInput(
            "keys of REQUEST, arms [format, path, one or calibrated]",
            "; ".join(wrong),
            "formats: " + ", ".join(precision.FORMATS),
        )
    return request


def synthetic_rows(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row for each kind, context length and arm: relative error of the output over queries and draws."""
    for kind in request["kinds"]:
        for keys in request["keys"]:
            errors: dict[int, list[float]] = {}
            dropped: dict[int, list[float]] = {}
            for draw in range(request["draws"]):
                seed = request["seed"] + 1000 * draw + keys
                q, k, v = precision.synthetic(
                    kind,
                    1,
                    request["queries"],
                    keys,
                    request["head_dim"],
                    request["logit_std"],
                    seed,
                    request["device"],
                )
                for i, (error, lost) in enumerate(arm_errors(q, k, v, request)):
                    errors.setdefault(i, []).append(error)
                    dropped.setdefault(i, []).append(lost)
                say(f"{kind}, {keys} keys, draw {draw + 1} of {request['draws']}")
            for i, (name, path, scales) in enumerate(request["arms"]):
                yield {
                    "row": "attention", "source": kind, "keys": keys, "format": name, "path": path, "scales": scales,
                    "head_dim": request["head_dim"], "logit_std": request["logit_std"], "units": "draws",
                    **summary(errors[i]), "dropped_frac": sum(dropped[i]) / len(dropped[i]),
                }  # fmt: skip


def arm_errors(q: Tensor, k: Tensor, v: Tensor, request: dict[str, Any]) -> Iterator[tuple[float, float]]:
    """For each arm the mean relative error over heads and queries, and the mean softmax mass dropped."""
    exact = precision.exact_output(q, k, v)
    for name, path, scales in request["arms"]:
        k_scale, v_scale = (
            (precision.calibrated_scale(k, name), precision.calibrated_scale(v, name))
            if scales == "calibrated"
            else (1.0, 1.0)
        )
        output, lost = precision.attention_output(q, k, v, name, path, k_scale, v_scale, request["num_kv_splits"])
        yield float(precision.relative_errors(output, exact).mean()), float(lost.mean())


def summary(values: list[float]) -> dict[str, Any]:
    """Mean of independent units with the smallest and largest; an interval is for the reader of at least three."""
    finite = [x for x in values if math.isfinite(x)]
    return {
        "error_rel": sum(values) / len(values) if len(finite) == len(values) else None,
        "error_rel_units": [x if math.isfinite(x) else None for x in values],
        "not_finite": len(values) - len(finite),
    }


def checkpoint_rows(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows for the keys, values and queries that a real checkpoint makes of a real text: attention errors and rounding losses."""
    for layer, q, k, v in captured(request):
        for tensor, x in (("K", k), ("V", v)):
            for name, scales in (("fp8_e4m3", "one"), ("fp8_e4m3", "calibrated"), ("fp8_e5m2", "one")):
                scale = precision.calibrated_scale(x, name) if scales == "calibrated" else 1.0
                yield {
                    "row": "rounding", "source": "checkpoint", "layer": layer, "tensor": tensor, "format": name, "scales": scales,
                    "scale": scale, **precision.rounding_losses(x, name, scale),
                }  # fmt: skip
        if request["layers"] is not None and layer not in request["layers"]:
            continue  # rounding is cheap, so whether anything clips is asked of every layer
        for (name, path, scales), (error, lost) in zip(request["arms"], arm_errors(q, k, v, request), strict=True):
            yield {
                "row": "attention", "source": "checkpoint", "layer": layer, "keys": k.shape[1], "format": name, "path": path,
                "scales": scales, "head_dim": k.shape[2], "units": "layers", "error_rel": error if math.isfinite(error) else None,
                "error_rel_units": [error], "not_finite": 0 if math.isfinite(error) else 1, "dropped_frac": lost,
            }  # fmt: skip


def captured(request: dict[str, Any]) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Layer, q [kv heads, group x positions, head_dim], k, v [kv heads, keys, head_dim] of one forward pass of a text.

    The queries are those of the last positions, the keys all that lie before the first of them.
    """
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(request["checkpoint"])
    text = Path(request["text"]).read_text(encoding="utf-8", errors="replace")
    most = (request["tokens"] or max(request["keys"])) + request["positions"]
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def record(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any) -> Any:
        seen.append((query[0].detach(), key[0].detach(), value[0].detach()))
        return transformers.integrations.sdpa_attention.sdpa_attention_forward(
            module, query, key, value, attention_mask, **options
        )

    transformers.AttentionInterface.register("recorded", record)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        request["checkpoint"], dtype=torch.bfloat16, attn_implementation="recorded"
    ).to(request["device"])
    most = min(most, int(getattr(model.config, "max_position_embeddings", most)))
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :most].to(request["device"])
    positions = request["positions"]
    if ids.shape[1] < 2 * positions:
        raise BadInput(f"a text of at least {2 * positions} tokens", f"{ids.shape[1]}", "name a longer text")
    say(f"forward pass of {ids.shape[1]} tokens")
    with torch.no_grad():
        model(ids, use_cache=False)
    if beyond := [layer for layer in request["layers"] or [] if not 0 <= layer < len(seen)]:
        raise BadInput(f"layers 0 to {len(seen) - 1}", f"{beyond}", "correct `layers`")
    for layer, (query, key, value) in enumerate(seen):
        groups = query.shape[0] // key.shape[0]
        last = query[:, -positions:].reshape(key.shape[0], groups * positions, -1)
        yield layer, last, key[:, :-positions], value[:, :-positions]


def machine(request: dict[str, Any]) -> dict[str, Any]:
    """What computed: versions, device, and what its cast makes of values beyond the range."""
    import torch

    device = request["device"]
    return {
        "row": "machine", "torch": torch.__version__, "device": torch.cuda.get_device_name() if device != "cpu" else "cpu",
        "threads": torch.get_num_threads(), "overflow": {n: precision.overflow_of(n, device) for n in ("fp8_e4m3", "fp8_e5m2")},
    }  # fmt: skip


def say(text: str) -> None:
    """One line of progress."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Rows on standard output; 2 with one message for a request that can't be computed."""
    try:
        request = read_request(sys.stdin.read())
        rows = [iter([machine(request)]), synthetic_rows(request)]
        if request["checkpoint"]:
            rows.append(checkpoint_rows(request))
        for row in (r for part in rows for r in part):
            print(json.dumps(row, allow_nan=False), flush=True)
    except WorkbookError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
