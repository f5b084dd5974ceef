"""Notebook 03's prediction: what the hardware would allow, written down before anything is measured, and never again.

The prediction is computed from raw records (the checkpoint's headers, the host, bandwidth, topology), frozen as a raw
file of its own with its time, and read back from there ever after: on a resumed run and on a rebuild too. A later
computation that differs (another version of the formulas, edited params) is shown beside it and does not replace it.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from lib.deploy import host_character
from lib.errors import BadInput, HostError, HostTimeout, HostUnreachable, WorkbookError
from lib.hosts import local
from lib.hosts.base import Host
from lib.hosts.remote_client import bundle, folder_on
from lib.load import machine
from lib.model import roofline
from lib.model.checkpoint import read_safetensors_header
from lib.model.facts import Checkpoint, LayerGroup
from lib.model.memory import kv_bytes_per_token, state_bytes_per_slot
from lib.model.roofline import Attention, Bound, Device, Link, Machine, Weights
from lib.params import BenchmarkParams, HostParams
from lib.records import Record
from lib.results import NotebookRun, ServerHandle
from lib.server import gpu_state
from lib.server.remote import place_of
from lib.server.spec import resolve_python
from lib.server.telemetry import read_topology
from lib.server.telemetry_there import topology_there

FROZEN = "prediction.json"
#: A doubling of users that adds less than half of their share of throughput lies beyond the knee.
KNEE_EFFICIENCY = 0.5
#: A recomputed bound that differs by less is the same one.
SAME_FRAC = 1e-6


class Point(Record):
    """One predicted bound: a decode rate (`tok/s`, all sequences together) or a time to first token (`s`)."""

    id: str
    what: str
    kind: str
    concurrency: int
    context_tokens: float
    new_tokens: float
    value: float | None
    unit: str
    terms_s: dict[str, float] = {}
    binds: str | None = None
    reason: str | None = None


class Forecast(Record):
    """All bounds of a run, with what they were computed from."""

    inputs: dict[str, str]
    points: list[Point]
    knee: int | None
    knee_reason: str
    estimate: str | None = Field(
        default=None, description="why the bounds are estimates: a device's figure that was measured, not stated"
    )

    def point(self, name: str) -> Point | None:
        """The point of that id, None if it was not predicted."""
        return next((p for p in self.points if p.id == name), None)


class Frozen(Record):
    """prediction.json: a forecast, when it was written down, and its hash."""

    schema_version: int = 1
    frozen_at: str
    frozen_monotonic_s: float
    sha256: str
    forecast: Forecast


# raw inputs -----------------------------------------------------------------------------------------------------------


def write_tensors(folder: Path, model_path: str) -> None:
    """Writes tensors.json: (name, dtype, shape, bytes) of every tensor, from the safetensors headers."""
    found = []
    for file in sorted(Path(model_path).glob("*.safetensors")):
        header = read_safetensors_header(file)
        found += [[name, t.dtype, list(t.shape), t.end - t.begin] for name, t in sorted(header.tensors.items())]
    local.write_atomic(folder / "tensors.json", json.dumps(found))


def measure_machine(folder: Path, on: Mapping[str, Any] | None = None, python: str = "python3") -> None:
    """Measures the CPUs of the server's machine (bandwidth.json; `lib.load.machine` says how), or says why it can't.

    `on` names another host, `python` an interpreter there that has numpy.
    """
    place = place_of(HostParams.model_validate(on)) if on else None
    found = machine.measured() if place is None else _measured_there(place.host, python)
    local.write_atomic(folder / "bandwidth.json", json.dumps(found))


def _measured_there(host: Host, python: str) -> dict[str, Any]:
    with folder_on(host) as folder:
        host.put(bundle("lib.load.machine")[0], folder / "machine.pyz", mode=0o600)
        try:
            done = host.run([python, str(folder / "machine.pyz")], deadline_s=300.0)
        except (HostUnreachable, HostTimeout):
            raise
        except HostError as error:  # no such interpreter there
            return {"read_bytes_per_s": None, "threads": None, "reason": str(error.found)}
    if done.ok:
        return dict(json.loads(done.text))
    last = (done.error_text.strip().splitlines() or ["no message"])[-1]
    return {"read_bytes_per_s": None, "threads": None, "reason": f"{python} on {host.name}: {last}"}


def write_topology(folder: Path, on: Mapping[str, Any] | None = None) -> None:
    """Writes topology.json: the text of `nvidia-smi topo -m` on this machine or the host `on`, or why there is none."""
    place = place_of(HostParams.model_validate(on)) if on else None
    text, reason = topology_there(place) if place else read_topology()
    local.write_atomic(folder / "topology.json", json.dumps({"text": text, "reason": reason}))


# the machine ----------------------------------------------------------------------------------------------------------


def device_of(run: NotebookRun, server: ServerHandle) -> tuple[Device, list[str]]:
    """Bandwidth and FLOP/s of one device, from params, the table of GPUs, or a measurement of the CPU; and what is unknown."""
    params: BenchmarkParams = run.params  # type: ignore[assignment]
    if run.platform(server) == "cpu":
        there = {**run.there, "python": _python_there(run, server)} if run.there else {}
        measured = run.measure("bandwidth", None, measure_machine, **there).json("bandwidth.json")
        source = f"measured on this host with {measured['threads']} threads; products: {measured.get('product')}"
        source = measured.get("reason") or source
        found = Device(
            name=str(run.host().get("cpu")),
            bandwidth_bytes_per_s=measured["read_bytes_per_s"],
            flops_per_s=measured.get("flops_per_s"),
            source=source,
        )
    else:
        names = {str(g.get("name")) for g in run.host()["gpus"]}
        unknown = Device(name=", ".join(sorted(names)), bandwidth_bytes_per_s=None, flops_per_s=None, source="no row")
        found = (roofline.gpu(next(iter(names))) if len(names) == 1 else None) or unknown
    stated = {"bandwidth_bytes_per_s": params.bandwidth_bytes_per_s, "flops_per_s": params.flops_per_s}
    given = {k: v for k, v in stated.items() if v is not None}
    if given:
        found = found.model_copy(
            update={**given, "source": f"{', '.join(given)}: stated in params; else {found.source}"}
        )
    missing = [name for name in stated if getattr(found, name) is None]
    return found, [f"{name} of {found.name!r} is not known (set it in params)" for name in missing]


def copied_bytes_per_s(run: NotebookRun) -> float | None:
    """What copies inside the slowest device moved, read and written, where notebook 01 of this run measured it; else None.

    A ceiling is not lowered by it: a kernel that only reads may be faster than a copy.
    """
    file = run.raw.parent / "01" / "character" / "character.json"
    if not file.is_file() or run.profile.host.remote:
        return None
    return host_character.device_bandwidth(json.loads(file.read_text(encoding="utf-8")))


def _python_there(run: NotebookRun, server: ServerHandle) -> str:
    """An interpreter on another host that should have numpy: the server's own, where params name it."""
    host, own = run.profile.host, server.params.python
    return own if own.startswith("/") else host.client_python or host.python


def attention_of(run: NotebookRun, server: ServerHandle, checkpoint: Checkpoint) -> Attention:
    """What a sequence's context costs on one rank, by the architecture's layers and the KV cache's dtype."""
    layout = checkpoint.architecture
    if layout is None:
        raise BadInput("an architecture with a formula", checkpoint.architecture_error)
    flags = server.params.flags
    kv = kv_bytes_per_token(
        checkpoint,
        server.tp_size,
        str(flags.get("kv_cache_dtype") or "auto"),
        sglang_version=run.version(server),
        platform=run.platform(server),
    )
    config = checkpoint.config.get("text_config") or checkpoint.config
    sparse = config.get("index_topk")
    limits = {
        "mla": int(sparse) if isinstance(sparse, int) else None,
        "sliding_window": _window(layout.group("sliding_window")),
    }
    state = state_bytes_per_slot(
        checkpoint,
        server.tp_size,
        mamba_ssm_dtype=str(flags["mamba_ssm_dtype"]) if flags.get("mamba_ssm_dtype") else None,
    )
    heads = int(config.get("num_attention_heads") or 0)
    products = 0.0
    for group in layout.groups:
        if group.kind == "recurrent":
            continue
        size = _widths(group)
        products += heads * size * len(group.layers) / server.tp_size
    return Attention(
        kv={name: (size, limits.get(name)) for name, size in kv.groups.items()},
        state_bytes=state.per_slot if state else 0,
        products_per_token=products,
    )


def _window(group: LayerGroup | None) -> int | None:
    return group.window if group else None


def _widths(group: LayerGroup) -> int:
    """Products of one query head with one token: its key's width and its value's."""
    if group.kind == "mla":
        return 2 * (group.kv_lora_rank or 0) + (group.qk_rope_head_dim or 0)
    return (group.k_head_dim or 0) + (group.v_head_dim or 0)


def weights_of(run: NotebookRun, server: ServerHandle, checkpoint: Checkpoint) -> Weights:
    """The checkpoint's weights by how often a step reads them (raw record `tensors`).

    Raises:
        BadInput: no headers, or the server changes the weights' precision while it loads them.
    """
    flags = server.params.flags
    if str(flags.get("dtype")) in ("float", "float32") and checkpoint.torch_dtype != "float32":
        raise BadInput("weights served as they are stored", f"--dtype {flags['dtype']}", "set active_weight_bytes")
    method = flags.get("quantization")
    if method and checkpoint.quantization.weights_method is None:
        raise BadInput("weights served as they are stored", f"--quantization {method}", "set active_weight_bytes")
    path = None if run.offline else getattr(server.spec, "mirror", server.spec.model_path)
    context = None if run.offline else server.spec.model
    read = run.measure("tensors", None, write_tensors, context=context, model_path=path)
    tensors = [(n, d, s, b) for n, d, s, b in read.json("tensors.json")]
    if not tensors:
        raise BadInput("a checkpoint with safetensors headers", "none")
    return roofline.weights(tensors, checkpoint.config)


def server_ranks(server: ServerHandle) -> list[int] | None:
    """The GPU of each rank of a server, None where it can't be told (then every GPU counts as its own rank)."""
    if server.attached:
        return None
    flags = server.params.flags
    base, step = (int(str(flags.get(name) or default)) for name, default in (("base_gpu_id", 0), ("gpu_id_step", 1)))
    inherited = {k: v for k, v in os.environ.items() if k == "CUDA_VISIBLE_DEVICES"}
    return gpu_state.visible_gpus({**inherited, **server.params.environment}, base, server.tp_size, step)


def link_for(run: NotebookRun, server: ServerHandle) -> tuple[Link | None, str]:
    """The interconnect of the server's ranks, and one sentence about it; None with one rank."""
    params: BenchmarkParams = run.params  # type: ignore[assignment]
    if server.tp_size < 2:
        return None, "one rank: no all-reduce"
    kind, why = None, ""
    notes: list[str] = []
    read = run.measure("topology", None, write_topology, **run.there).json("topology.json")
    if read["text"]:
        try:
            topology = roofline.parse_topology(read["text"])
            ranks = server_ranks(server)
            if apart := topology.apart(topology.gpus if ranks is None else ranks):
                notes.append(f"spread over NUMA nodes: {apart}")
            # Which GPUs they are is not known (attached, or named by uuid): then the slowest connection of the host.
            kind = topology.worst(topology.gpus if ranks is None else ranks)
        except BadInput as error:
            why = str(error)
    else:
        why = read["reason"]
    names = ", ".join(str(g.get("name")) for g in run.host().get("gpus") or [])
    link = roofline.link_of(kind, server.tp_size, params.allreduce_latency_s, params.interconnect_bytes_per_s, names)
    if params.allreduce_latency_s is None and params.interconnect_bytes_per_s is None:
        link, not_measured = _measured(run, server, link)
        notes += [not_measured] if not_measured else []
    known = [
        f"latency {link.latency_s * 1e6:.3g} us" if link.latency_s is not None else "latency unknown, counted as 0",
        f"{link.bytes_per_s / 1e9:.3g} GB/s" if link.bytes_per_s else "bandwidth unknown, counted as infinite",
    ]
    return link, "; ".join([f"{link.kind}{f' ({why})' if why else ''}, {', '.join(known)}", link.source, *notes])


def _measured(run: NotebookRun, server: ServerHandle, link: Link) -> tuple[Link, str]:
    """The link with this host's own all-reduce times over the server's GPUs (raw record `all-reduce`), or why it has none."""
    if run.platform(server) == "cpu" or server.attached or run.profile.host.remote:
        return link, "all-reduce not measured: it needs this host's own GPUs, and free ones"
    gpus = server_ranks(server)
    visible = ",".join(map(str, gpus)) if gpus is not None else server.params.environment.get("CUDA_VISIBLE_DEVICES")
    try:
        python = None if run.offline else str(resolve_python(server.params.python))
        taken = run.measure(
            "all-reduce", None, host_character.take_all_reduce, python=python, ranks=server.tp_size, visible=visible
        )
    except WorkbookError as error:
        return link, f"all-reduce not measured: {error}"
    read = taken.json("all_reduce.json")
    found = roofline.measured_link(link, read.get("all_reduce") or [])
    if found.measured:
        return found, ""
    wrong = any(not r.get("right") for r in read.get("all_reduce") or [])
    return link, f"all-reduce: {'a sum was WRONG' if wrong else read.get('all_reduce_reason') or read.get('reason')}"


def machine_of(run: NotebookRun, server: ServerHandle) -> tuple[Machine | None, dict[str, str], str | None]:
    """The machine as the bounds take it, what it was computed from in words, and the reason where there is none."""
    params: BenchmarkParams = run.params  # type: ignore[assignment]
    inputs: dict[str, str] = {}
    try:
        checkpoint = run.checkpoint(server)
        if checkpoint is None:
            raise BadInput("the model's files", "the server is attached and its model files are not read here")
        _refuse_other_parallelism(server.params.flags)
        device, missing = device_of(run, server)
        inputs["device"] = f"{device.name}; {device.source}"
        inputs["read bandwidth"] = _words(device.bandwidth_bytes_per_s, 1e9, "GB/s")
        if copied := copied_bytes_per_s(run):
            inputs["copies inside a device, measured by 01 (shown beside the bound, which takes the line above)"] = (
                _words(copied, 1e9, "GB/s")
            )
        inputs["dense products"] = _words(device.flops_per_s, 1e12, "TFLOP/s")
        if device.bandwidth_bytes_per_s is None:
            raise BadInput("the bandwidth of this host's devices", "; ".join(missing))
        attention = attention_of(run, server, checkpoint)
        inputs["KV cache a token and rank"] = (
            ", ".join(
                f"{name} {size:,} B{f' (at most {most:,} tokens)' if most else ''}"
                for name, (size, most) in attention.kv.items()
            )
            or "none"
        )
        inputs["recurrent state a sequence and rank"] = (
            f"{attention.state_bytes:,} B, read and written once a step" if attention.state_bytes else "none"
        )
        loaded: Weights | None = None
        try:
            loaded = weights_of(run, server, checkpoint)
            inputs["weights"] = _weight_words(loaded)
        except WorkbookError as error:
            if params.active_weight_bytes is None:
                raise
            inputs["weights"] = f"{params.active_weight_bytes / 1e9:.4g} GB a rank, stated in params ({error})"
        if params.active_weight_bytes is not None and loaded is not None:
            inputs["weights"] = (
                f"{params.active_weight_bytes / 1e9:.4g} GB a rank, stated in params; headers: {inputs['weights']}"
            )
        link, words = link_for(run, server)
        inputs["all-reduces"] = words
        config = checkpoint.config.get("text_config") or checkpoint.config
        layers = checkpoint.architecture.num_hidden_layers if checkpoint.architecture else 0
        machine = Machine(
            device=device,
            weights=loaded,
            weight_bytes=params.active_weight_bytes,
            attention=attention,
            layers=layers,
            hidden_size=int(config.get("hidden_size") or 0),
            ranks=server.tp_size,
            link=link,
        )
        if link is not None:
            inputs["all-reduces"] = f"{2 * layers} a pass ({layers} layers x 2); {words}"
        return machine, inputs, None
    except WorkbookError as error:
        return None, inputs, str(error)


def _refuse_other_parallelism(flags: Mapping[str, Any]) -> None:
    """The bounds know tensor parallelism and one token a step and sequence; of anything else nothing is said."""
    for names in (("pp_size", "pipeline_parallel_size"), ("dp_size", "data_parallel_size")):
        found = next((flags[name] for name in names if flags.get(name)), 1)
        if int(str(found)) > 1:
            raise BadInput("tensor parallelism alone", f"{names[0]} {found}", "no bound is computed for it")
    if flags.get("speculative_algorithm"):
        found = flags["speculative_algorithm"]
        raise BadInput("one token a step and sequence", f"speculation ({found})", "no bound is computed for it")


def _words(value: float | None, scale: float, unit: str) -> str:
    return f"{value / scale:.4g} {unit}" if value is not None else "not known"


def _weight_words(found: Weights) -> str:
    text = f"{found.read_bytes(1) / 1e9:.4g} GB read by one token's step ({found.active_parameters / 1e9:.4g} B parameters)"
    if found.experts:
        text += f", {found.expert_bytes / 1e9:.4g} GB of routed experts, {found.experts_per_token} of {found.experts} a token"
    left = found.unused_bytes + found.looked_up_bytes
    return text + (f"; {left / 1e9:.3g} GB of embedding, vision or draft weights are not read" if left else "")


# the forecast ---------------------------------------------------------------------------------------------------------


def depth_id(depth: int | str, concurrency: int) -> str:
    """The name of one cell of the depth axis, also its raw folder."""
    return f"depth-{depth}-C{concurrency}"


def depth_users(params: BenchmarkParams) -> list[int]:
    """How many at once on the axis of depth: one user, and the agents."""
    return sorted({1, params.agents})


def forecast(run: NotebookRun, server: ServerHandle, depths: Mapping[int | str, int | None]) -> Forecast:
    """Bounds of every level and depth of the parameters.

    Args:
        depths: each depth of the params -> its tokens, None where the limit is not known before the server runs.
    """
    params: BenchmarkParams = run.params  # type: ignore[assignment]
    machine, inputs, why = machine_of(run, server)
    points = []
    for c in sorted(params.concurrency):
        context = params.input_len + params.output_len / 2
        points.append(_decode(machine, f"level-C{c}", f"decode rate of all requests together, C={c}", c, context, why))
    if params.dataset != "chat":
        first = f"level-C{min(params.concurrency)}-ttft"
        points.append(
            _prefill(machine, first, f"time to first token, {params.input_len} tokens", params.input_len, 0, why)
        )
    for depth, tokens in depths.items():
        for c in depth_users(params):
            reason = why or (None if tokens else "the served limit is known only when the server runs")
            what = f"decode rate of all requests together, {depth} tokens deep, C={c}"
            points.append(
                _decode(
                    machine,
                    f"{depth_id(depth, c)}-decode",
                    what,
                    c,
                    (tokens or 0) + params.depth_output_len / 2,
                    reason,
                )
            )
        for name, new, cached in (("cold", tokens or 0, 0), ("hit", params.depth_suffix_len, tokens or 0)):
            words = "nothing in the cache" if name == "cold" else f"all but {new} tokens in the cache"
            what = f"time to first token, {depth} tokens deep, {words}, C=1"
            points.append(_prefill(machine, f"{depth_id(depth, 1)}-{name}", what, new, cached, reason))
    rates = {p.concurrency: p.value for p in points if p.kind == "level" and p.value}
    found = roofline.knee(rates, KNEE_EFFICIENCY) if len(rates) > 1 else None
    if len(rates) < 2:
        knee_reason = why or "fewer than two levels"
    elif found is None:
        knee_reason = f"the bound grows with the users up to C={max(rates)}: the knee lies above"
    else:
        knee_reason = f"beyond C={found} a doubling of users adds less than {KNEE_EFFICIENCY:.0%} to log-throughput"
    estimate = None
    if (
        machine is not None
        and run.platform(server) == "cpu"
        and None in (params.bandwidth_bytes_per_s, params.flops_per_s)
    ):
        estimate = (
            "the CPU's figures were measured on this host, which may have been busy, and its products in float32: "
            "a quieter moment or a 16-bit kernel may pass them"
        )
    return Forecast(inputs=inputs, points=points, knee=found, knee_reason=knee_reason, estimate=estimate)


def _point(bound: Bound | None, value: float | None, **common: Any) -> Point:
    return Point(value=value, terms_s=bound.terms_s if bound else {}, binds=bound.binds if bound else None, **common)


def _decode(machine: Machine | None, name: str, what: str, c: int, context: float, why: str | None) -> Point:
    kind = "level" if name.startswith("level-") else "depth"
    common: dict[str, Any] = {
        "id": name, "what": what, "kind": kind, "concurrency": c, "context_tokens": context, "new_tokens": 1, "unit": "tok/s"
    }  # fmt: skip
    if machine is None or why:
        return _point(None, None, reason=why or "no machine", **common)
    bound = roofline.decode_bound(machine, c, context)
    return _point(bound, bound.tokens_per_s, **common)


def _prefill(machine: Machine | None, name: str, what: str, new: float, cached: float, why: str | None) -> Point:
    common: dict[str, Any] = {
        "id": name, "what": what, "kind": "ttft", "concurrency": 1, "context_tokens": cached, "new_tokens": new, "unit": "s"
    }  # fmt: skip
    if machine is None or why:
        return _point(None, None, reason=why or "no machine", **common)
    try:
        bound = roofline.prefill_bound(machine, new, cached)
    except ValueError:
        reason = "FLOP/s of the device or the active parameters are not known"
        return _point(None, None, reason=reason, **common)
    return _point(bound, bound.seconds, **common)


def write_frozen(folder: Path, made: Forecast) -> None:
    """Writes prediction.json: the forecast with its time."""
    text = made.model_dump_json()
    frozen = Frozen(
        frozen_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        frozen_monotonic_s=time.monotonic(),
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        forecast=made,
    )
    local.write_atomic(folder / FROZEN, frozen.model_dump_json(indent=1))


def freeze(run: NotebookRun, made: Forecast) -> Frozen:
    """The run's frozen prediction: the one written down before, else this one, written down now (raw record `prediction`).

    The record depends on no arguments: whatever changes later, it is not written again.
    """
    file = run.raw / "prediction" / FROZEN
    if file.exists():
        return Frozen.model_validate_json(file.read_text())
    kept = run.measure("prediction", None, functools.partial(write_frozen, made=made))
    return Frozen.model_validate_json((kept.folder / FROZEN).read_text())


def differences(frozen: Forecast, now: Forecast) -> list[tuple[Point | None, Point | None]]:
    """Pairs of points that a later computation gives otherwise (None: one of them does not have the point)."""
    pairs = []
    for name in dict.fromkeys([p.id for p in frozen.points] + [p.id for p in now.points]):
        a, b = frozen.point(name), now.point(name)
        same = a is not None and b is not None and _same(a.value, b.value)
        if not same:
            pairs.append((a, b))
    return pairs


def _same(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return abs(a - b) <= SAME_FRAC * max(abs(a), abs(b))
