"""What the hardware would allow: the time that a decode step, or a prefill, cannot go below.

A decode step reads every weight that its tokens use, each sequence's KV cache and recurrent state, multiplies by them,
and with tensor parallelism adds up partial results over the interconnect. Reading and multiplying overlap at best
(the longer one counts), an all-reduce waits for both. What is left out (launches, sampling, scheduling, writes of new
KV) only makes a real step longer, so each figure is a ceiling on throughput or a floor under time to first token: for
the bandwidth, the products a second and the all-reduce's latency that it names.

Sources: the roofline model (Williams, Waterman, Patterson, CACM 2009); ring all-reduce moves 2 (N - 1) / N of its
bytes over each link (Patarasuk and Yuan, 2009); rows of the tables name theirs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import Field

from lib.errors import BadInput
from lib.records import Record

# devices --------------------------------------------------------------------------------------------------------------


class Device(Record):
    """What one device can move and multiply; None where no figure is stated or measured."""

    name: str
    bandwidth_bytes_per_s: float | None
    flops_per_s: float | None = Field(description="dense 16-bit products with 32-bit sums; two operations a product")
    source: str


_SHEETS = "NVIDIA's specification of {} (dense: stated with sparsity, halved)"
_UNCHECKED = "NVIDIA's specification of {} as remembered, not looked up for this row: check it, or state it in params"
#: Name as nvidia-smi says it (a pattern; the first that matches counts), bytes/s, dense 16-bit FLOP/s with 32-bit sums.
#: Where sheets differ (B200: 7.7 and 8 TB/s) the higher figure stands: these are ceilings.
GPUS: tuple[tuple[str, float, float | None, str], ...] = (
    (r"\bGB300\b", 8.0e12, 2.5e15, _SHEETS.format("GB300 NVL72: 576 TB/s, 360 PFLOPS over 72")),
    (r"\bB300\b", 8.0e12, 2.25e15, _SHEETS.format("HGX B300: 36 PFLOPS over 8, up to 8 TB/s a GPU")),
    (r"\bGB200\b", 8.0e12, 2.5e15, _SHEETS.format("GB200 NVL72: 8 TB/s, 5 PFLOPS a GPU")),
    (r"\bB200\b", 8.0e12, 2.25e15, _SHEETS.format("HGX B200: 4.5 PFLOPS, 7.7 to 8 TB/s a GPU")),
    (r"H200 NVL", 4.8e12, 835e12, _UNCHECKED.format("H200 NVL")),
    (r"\bH200\b", 4.8e12, 989e12, _SHEETS.format("H200 SXM")),
    (r"H100 NVL", 3.9e12, 835e12, _UNCHECKED.format("H100 NVL")),
    (r"H100 PCIe", 2.0e12, 756e12, _UNCHECKED.format("H100 PCIe")),
    (r"\bH100\b.*(SXM|HBM3\b)", 3.35e12, 989e12, _SHEETS.format("H100 SXM")),
    (r"A100.*80GB.*PCIe|A100.*PCIe.*80GB", 1.935e12, 312e12, _SHEETS.format("A100 80GB PCIe")),
    (r"A100.*80GB", 2.039e12, 312e12, _SHEETS.format("A100 80GB SXM")),
    (r"A100.*40GB", 1.555e12, 312e12, _SHEETS.format("A100 40GB")),
    (r"RTX PRO 6000 Blackwell Server", 1.597e12, 500e12, _UNCHECKED.format("RTX PRO 6000 Blackwell Server Edition")),
    (r"RTX PRO 6000 Blackwell Max-Q", 1.792e12, 439e12, _UNCHECKED.format("RTX PRO 6000 Blackwell Max-Q")),
    (
        r"RTX PRO 6000 Blackwell Work", 1.792e12, 500e12,
        _SHEETS.format("RTX PRO 6000 Blackwell Workstation Edition: 1,792 GB/s, 4,000 sparse FP4 TOPS, an eighth of it"),
    ),
    (r"\bL40S\b", 864e9, 362e12, _SHEETS.format("L40S")),
    (r"\bL4\b", 300e9, 121e12, _UNCHECKED.format("L4")),
    (r"\bA10\b", 600e9, 125e12, _UNCHECKED.format("A10")),
    (r"RTX 5090$", 1.792e12, 209.5e12, _SHEETS.format("GeForce RTX 5090: a quarter of 838 sparse with 16-bit sums")),
    (r"RTX 4090$", 1.008e12, 165.2e12, _UNCHECKED.format("GeForce RTX 4090")),
    (r"RTX 3090$", 936e9, 71e12, _UNCHECKED.format("GeForce RTX 3090")),
)  # fmt: skip
#: A part of a GPU (MIG) has a part of these figures, a laptop's has others: neither is a row.
_NO_WHOLE_GPU = re.compile(r"\bMIG\b|laptop|max-q design", re.IGNORECASE)


def gpu(name: str) -> Device | None:
    """The row of the table that a GPU's name belongs to; None for a name that no row knows (nothing is guessed).

    Example: `gpu("NVIDIA H200").bandwidth_bytes_per_s` is 4.8e12.
    """
    for pattern, bandwidth, flops, source in GPUS:
        if re.search(pattern, name.strip(), re.IGNORECASE) and not _NO_WHOLE_GPU.search(name):
            return Device(name=name, bandwidth_bytes_per_s=bandwidth, flops_per_s=flops, source=source)
    return None


# weights --------------------------------------------------------------------------------------------------------------


class Weights(Record):
    """A checkpoint's weights by how often a decode step reads them, in bytes as stored and in parameters.

    `shared`: read by every step. `experts`: all routed experts of all layers, of which a step reads those that its
    tokens choose. `looked_up`: an input embedding of its own, one row a token. `unused`: vision towers and draft
    layers, which plain decoding of text does not read.
    """

    shared_bytes: int
    expert_bytes: int
    looked_up_bytes: int
    unused_bytes: int
    shared_parameters: int
    expert_parameters: int
    head_parameters: int = Field(description="output head, which a prefill applies to its last token only")
    experts: int | None = None
    experts_per_token: int | None = None

    @property
    def active_parameters(self) -> float:
        """Parameters that one token is multiplied by."""
        return self.shared_parameters + self.expert_parameters * self.share_of_experts(1)

    def share_of_experts(self, tokens: float) -> float:
        """Part of the routed experts that a step of `tokens` tokens reads, if each token chooses evenly and alone.

        Example: 8 of 512 experts, 16 tokens: 1 - (1 - 8/512)**16 = 0.2227.
        """
        if not self.experts or not self.experts_per_token:
            return 0.0 if self.expert_bytes == 0 else 1.0
        return float(1 - (1 - self.experts_per_token / self.experts) ** tokens)

    def read_bytes(self, tokens: float) -> float:
        """Bytes that a decode step of `tokens` tokens reads, all ranks together."""
        return self.shared_bytes + self.expert_bytes * self.share_of_experts(tokens)


_EXPERT = re.compile(r"\.experts\b")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|word_embeddings|wte|embeddings)\.weight$")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|output_layer)\.weight$")
_UNUSED = re.compile(r"(?:^|\.)(?:visual|vision\w*|audio\w*|mtp\w*|nextn\w*|draft\w*|multi_modal_projector)\.")
_NOT_A_WEIGHT = re.compile(r"scale|zero|_zp$|input_global|qzeros|g_idx")
_EXPERT_COUNT = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts")


def weights(tensors: Iterable[tuple[str, str, Sequence[int], int]], config: Mapping[str, Any]) -> Weights:
    """A checkpoint's weights by how often decoding reads them, from its safetensors headers.

    Bytes are those stored, scales included, so quantization needs no formula. Parameters count packed 4-bit weights
    by their content (`U8` beside a `weight_scale`: two a byte; `I32`: eight a word) and leave scales out.

    Args:
        tensors: (name, dtype, shape, bytes) of each tensor.
        config: config.json.

    Raises:
        BadInput: there are routed experts, but config.json does not say how many a token uses.

    Example: SmolLM2-135M: 269,030,016 B, all shared (the head is the tied embedding).
    """
    text = config.get("text_config") or config.get("llm_config") or config
    layers = text.get("num_hidden_layers")
    listed = list(tensors)
    scaled = {
        name.rsplit(".", 1)[0] for name, *_ in listed if name.endswith(("weight_scale", "weight_scale_2", "scales"))
    }
    has_head = any(_HEAD.search(name) for name, *_ in listed)
    tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", not has_head))) or not has_head
    sums = dict.fromkeys(("shared", "experts", "looked_up", "unused"), 0)
    parameters = dict.fromkeys(("shared", "experts", "looked_up", "unused"), 0)
    head = 0
    for name, dtype, shape, size in listed:
        number = re.search(r"(?:^|\.)layers\.(\d{1,6})\.", name)
        kind = "shared"
        if _UNUSED.search(name) or (number and isinstance(layers, int) and int(number[1]) >= layers):
            kind = "unused"
        elif _EXPERT.search(name):
            kind = "experts"
        elif _EMBEDDING.search(name) and not tied:
            kind = "looked_up"
        sums[kind] += size
        if _NOT_A_WEIGHT.search(name.rsplit(".", 1)[-1]):
            continue
        count = math.prod(shape)
        if dtype == "U8" and name.rsplit(".", 1)[0] in scaled:
            count *= 2
        elif dtype == "I32" and name.endswith(("qweight", "weight_packed")):
            count *= 8
        parameters[kind] += count
        if (_HEAD.search(name) and not tied) or (_EMBEDDING.search(name) and tied):
            head += count
    experts = next((int(text[k]) for k in _EXPERT_COUNT if isinstance(text.get(k), int)), None)
    chosen = next((int(text[k]) for k in _EXPERTS_PER_TOKEN if isinstance(text.get(k), int)), None)
    if sums["experts"] and (not experts or not chosen):
        raise BadInput(
            "config.json says how many experts there are and how many a token uses",
            f"experts {experts}, per token {chosen}",
            "set active_weight_bytes",
        )
    return Weights(
        shared_bytes=sums["shared"],
        expert_bytes=sums["experts"],
        looked_up_bytes=sums["looked_up"],
        unused_bytes=sums["unused"],
        shared_parameters=parameters["shared"],
        expert_parameters=parameters["experts"],
        head_parameters=head,
        experts=experts if sums["experts"] else None,
        experts_per_token=chosen if sums["experts"] else None,
    )


# attention ------------------------------------------------------------------------------------------------------------


class Attention(Record):
    """What one sequence's context costs on one rank: bytes by layer kind, and attention's products.

    `kv`: kind -> (bytes a token, tokens at most; None: all of them). `state_bytes`: recurrent state, which a step reads
    and writes once. `products_per_token`: query-key and value products of one new token with one token of context.
    """

    kv: dict[str, tuple[int, int | None]]
    state_bytes: int
    products_per_token: float

    def kv_read_bytes(self, context_tokens: float) -> float:
        """KV bytes that one sequence's step reads at this depth.

        Example: 23,040 B a token, full attention, 1,000 tokens: 23,040,000 B.
        """
        return sum(
            size * (context_tokens if most is None else min(context_tokens, most)) for size, most in self.kv.values()
        )

    def flops(self, new_tokens: float, cached_tokens: float) -> float:
        """Operations of attention for `new_tokens` that follow `cached_tokens`, each seeing all before it."""
        pairs = new_tokens * (cached_tokens + new_tokens / 2)
        return 2 * self.products_per_token * pairs


# interconnect ---------------------------------------------------------------------------------------------------------


class Topology(Record):
    """GPUs and how each pair is connected, as `nvidia-smi topo -m` prints it."""

    gpus: list[int]
    links: dict[str, str] = Field(description="'0-1' -> NV18, PIX, PXB, PHB, NODE, SYS")
    cpus: dict[int, str] = Field(default={}, description="a GPU's near processors, as '0-31,64-95'")
    numa: dict[int, str] = Field(default={}, description="a GPU's NUMA node or nodes, as '0' or '0-1'")

    def apart(self, ranks: Sequence[int]) -> str | None:
        """The NUMA nodes that these GPUs are spread over, in words; None where they share one or it is not said."""
        by_node: dict[str, list[int]] = {}
        for rank in ranks:
            if rank in self.numa:
                by_node.setdefault(self.numa[rank], []).append(rank)
        if len(by_node) < 2:
            return None
        return "; ".join(f"GPU {', '.join(map(str, found))} on node {node}" for node, found in sorted(by_node.items()))

    def worst(self, ranks: Sequence[int]) -> str | None:
        """The slowest kind of connection among these GPUs; None where one of them is not listed."""
        pairs = [self.links.get(f"{min(a, b)}-{max(a, b)}") for i, a in enumerate(ranks) for b in ranks[i + 1 :]]
        if not pairs or any(p is None for p in pairs):
            return None
        return max((str(p) for p in pairs), key=slowness)


_ORDER = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")


def slowness(kind: str) -> tuple[int, int]:
    """Orders kinds of connection from the fastest (NV18) to the slowest (SYS, and what is not known)."""
    base = "NV" if kind.startswith("NV") else kind
    number = int(kind[2:]) if kind.startswith("NV") and kind[2:].isdigit() else 0
    return _ORDER.index(base) if base in _ORDER else len(_ORDER), -number


def parse_topology(text: str) -> Topology:
    """GPUs and their connections from the text of `nvidia-smi topo -m` (NIC columns, affinities and legend left out).

    Raises:
        BadInput: no matrix in it.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [line for line in plain.splitlines() if line.strip()]
    head = next((line for line in lines if re.match(r"\s*GPU\d+(\s|$)", line) and " X " not in f" {line} "), None)
    if head is None:
        raise BadInput("the matrix of `nvidia-smi topo -m`", repr(plain[:80]))
    columns = [int(n) for n in re.findall(r"\bGPU(\d+)\b", head)]
    names = re.findall(r"CPU Affinity|NUMA Affinity|GPU NUMA ID|\S+", head)
    links: dict[str, str] = {}
    near: dict[str, dict[int, str]] = {"CPU Affinity": {}, "NUMA Affinity": {}}
    rows = []
    for line in lines:
        match = re.match(r"\s*GPU(\d+)\s+(.*)", line)
        if not match or line is head:
            continue
        row, cells = int(match[1]), match[2].split()
        rows.append(row)
        if len(cells) == len(names):  # an empty cell (no affinity said) cannot be told from a missing column
            for name, found in near.items():
                if name in names and (value := cells[names.index(name)]) != "N/A":
                    found[row] = value
        for column, cell in zip(columns, cells, strict=False):
            if row < column:
                links[f"{row}-{column}"] = cell
    return Topology(
        gpus=sorted(set(rows) | set(columns)), links=links, cpus=near["CPU Affinity"], numa=near["NUMA Affinity"]
    )


class Link(Record):
    """How long an all-reduce takes: a latency each, and bytes over a bandwidth in one direction; None: not known."""

    kind: str
    latency_s: float | None
    bytes_per_s: float | None
    source: str
    measured: list[tuple[int, float]] = Field(
        default=[], description="bytes and shortest seconds on this host, by size"
    )


#: Kinds of `nvidia-smi topo -m` -> bytes/s in one direction. NVLink: so much a link, times the number after NV.
NVLINK_BYTES_PER_S = {"NVLink 5": 50e9, "NVLink 3 or 4": 25e9}
PCIE_GEN5_X16_BYTES_PER_S = 63e9
#: Measured elsewhere; figures of one host each, used where params state none.
PCIE_ALL_REDUCE_LATENCY_S = 205e-6
NVLINK_ALL_REDUCE_LATENCY_S = 6e-6
_HAS_NVLINK_5 = re.compile(r"\bG?B(100|200|300)\b", re.IGNORECASE)


def link_of(
    kind: str | None,
    ranks: int,
    latency_s: float | None = None,
    bytes_per_s: float | None = None,
    gpu_name: str = "",
) -> Link:
    """The interconnect's row for a kind of connection; what params state counts before the table.

    NVLink moves 25 GB/s a link and direction, from Blackwell's data centre GPUs on 50. PCIe is taken as Gen5 x16, the
    fastest that such a host has. NCCL's all-reduce of a decode step over eight PCIe GPUs took 205 us on one host; a small
    one over NVLink (two H100, CUDA graph) about 6 us. Kernels of a server's own can be faster: a ceiling computed with
    these holds for these, so state what your host measures.

    Source: NVIDIA's NVLink page (900 GB/s both ways over 18 links, 1.8 TB/s with NVLink 5); PCIe 5.0 x16; SGLang 0.5.23
    `distributed/device_communicators/pcie_ipc_ar.py` (its docstring); NVIDIA/nccl issue #1259 (NCCL 2.20.5).
    """
    table: tuple[float | None, float | None, str] = (
        None,
        None,
        "no figure for this connection (set allreduce_latency_s)",
    )
    if kind and kind.startswith("NV") and kind[2:].isdigit():
        generation = "NVLink 5" if _HAS_NVLINK_5.search(gpu_name) else "NVLink 3 or 4"
        each = NVLINK_BYTES_PER_S[generation]
        table = (
            NVLINK_ALL_REDUCE_LATENCY_S,
            int(kind[2:]) * each,
            f"{generation}: {each / 1e9:g} GB/s a link and direction; NCCL on two H100: 6 us (NVIDIA/nccl #1259), not this host",
        )
    elif kind in _ORDER[1:]:
        latency = PCIE_ALL_REDUCE_LATENCY_S if ranks > 2 else None
        table = (
            latency,
            PCIE_GEN5_X16_BYTES_PER_S,
            "PCIe 5.0 x16; NCCL on one 8-GPU host: 205 us (SGLang 0.5.23 source), not this host",
        )
    stated = latency_s is not None or bytes_per_s is not None
    return Link(
        kind=kind or "unknown",
        latency_s=latency_s if latency_s is not None else table[0],
        bytes_per_s=bytes_per_s if bytes_per_s is not None else table[1],
        source="stated in params" + (f"; else {table[2]}" if None in (latency_s, bytes_per_s) else "")
        if stated
        else table[2],
    )


def all_reduce_s(size_bytes: float, ranks: int, link: Link) -> float:
    """Seconds of one all-reduce over `ranks`; what is not known of the link counts as nothing (still a bound).

    Where the host's own times by size are there, they count: linear between two sizes, the smallest size's below it, the last
    slope beyond.

    Example: 12 KiB over 8 ranks, 205 us, 63 GB/s: 205.3 us. Measured 20 us at 8 KiB and 30 us at 16 KiB: 25 us.
    """
    if ranks < 2:
        return 0.0
    if link.measured:
        return _between(sorted(link.measured), size_bytes)
    moved = 2 * (ranks - 1) / ranks * size_bytes
    return (link.latency_s or 0.0) + (moved / link.bytes_per_s if link.bytes_per_s else 0.0)


def _between(points: Sequence[tuple[int, float]], size: float) -> float:
    """Seconds at a size from the times at others."""
    if len(points) == 1 or size <= points[0][0]:
        return points[0][1]
    at = next((i for i, (b, _) in enumerate(points) if b >= size), len(points) - 1)
    (a, t), (b, u) = points[at - 1], points[at]
    return max(t, t + (u - t) * (size - a) / (b - a))


def measured_link(link: Link, rows: Sequence[Mapping[str, Any]]) -> Link:
    """The link with a host's own all-reduce times by size; the same link where there are none, or a sum was wrong.

    Of each size the shortest time counts, alone or in a row: the bounds are floors. Latency and bandwidth are then those of the
    smallest and the largest size.
    """
    points = sorted(
        (int(r["size"]), min(float(r["low"]), float(r.get("burst_seconds") or r["low"])))
        for r in rows
        if r.get("right")
    )
    if not points or len(points) < len(rows):
        return link
    size, seconds = points[-1]
    return link.model_copy(update={
        "measured": points, "latency_s": points[0][1], "bytes_per_s": size / seconds,
        "source": f"all-reduce measured on this host by size ({points[0][0]:,} to {size:,} B, shortest of each)",
    })  # fmt: skip


# the bounds -----------------------------------------------------------------------------------------------------------


class Machine(Record):
    """A server's hardware and model as the bounds take them, one rank of `ranks`."""

    device: Device
    weights: Weights | None
    weight_bytes: float | None = Field(default=None, description="one rank's, stated instead of `weights`")
    attention: Attention
    layers: int
    hidden_size: int
    ranks: int = 1
    link: Link | None = None
    all_reduces_per_layer: int = 2

    def step_weight_bytes(self, tokens: float) -> float:
        """Weight bytes that one rank reads in a step of `tokens` tokens."""
        if self.weight_bytes is not None:
            return self.weight_bytes
        if self.weights is None:
            raise ValueError("either weights or weight_bytes")
        return self.weights.read_bytes(tokens) / self.ranks


class Bound(Record):
    """The time that a step or a prefill cannot go below: seconds by term, their sum, and the term that binds."""

    terms_s: dict[str, float]
    seconds: float
    binds: str
    tokens_per_s: float | None = None


def decode_bound(machine: Machine, concurrency: int, context_tokens: float) -> Bound:
    """The shortest decode step of `concurrency` sequences of `context_tokens` each, and the ceiling it sets.

    seconds = max(weights + KV + state over bandwidth, products over FLOP/s) + all-reduces.

    Example: 269 MB of weights, 23,040 B a token, 288 tokens, C=1, 10 GB/s: 27.6 ms, 36.3 tok/s, weights bind.
    """
    device = machine.device
    if concurrency < 1 or context_tokens < 0 or not device.bandwidth_bytes_per_s or device.bandwidth_bytes_per_s <= 0:
        raise ValueError("concurrency and bandwidth are positive; the context is not negative")
    per_s = device.bandwidth_bytes_per_s
    terms = {
        "weights": machine.step_weight_bytes(concurrency) / per_s,
        "KV cache": concurrency * machine.attention.kv_read_bytes(context_tokens) / per_s,
        "recurrent state": 2 * concurrency * machine.attention.state_bytes / per_s,
    }
    memory = sum(terms.values())
    compute = 0.0
    if machine.weights is not None and device.flops_per_s:
        flops = 2 * machine.weights.active_parameters * concurrency
        flops += concurrency * 2 * machine.attention.products_per_token * machine.ranks * context_tokens
        compute = flops / machine.ranks / device.flops_per_s
        terms["products"] = compute
    reduce = _all_reduces(machine, concurrency)
    if machine.ranks > 1:
        terms["all-reduces"] = reduce
    seconds = max(memory, compute) + reduce
    return Bound(
        terms_s=terms, seconds=seconds, binds=_binds(terms, memory, compute, reduce), tokens_per_s=concurrency / seconds
    )


def prefill_bound(machine: Machine, new_tokens: float, cached_tokens: float = 0.0) -> Bound:
    """The shortest time to a first token: `new_tokens` are computed after `cached_tokens` taken from the cache.

    seconds = max(products over FLOP/s, (weights + cached KV) over bandwidth) + all-reduces of every token.

    Raises:
        ValueError: no FLOP/s or no parameters are known.

    Example: 135 M parameters (28 M of them the head), 1,000 tokens, 100 GFLOP/s, attention aside: 2.14 s.
    """
    device = machine.device
    if machine.weights is None or not device.flops_per_s or not device.bandwidth_bytes_per_s or new_tokens < 1:
        raise ValueError("parameters, FLOP/s and bandwidth are known, and at least one token is new")
    body = machine.weights.active_parameters - machine.weights.head_parameters
    flops = 2 * (body * new_tokens + machine.weights.head_parameters)
    attention = machine.attention.flops(new_tokens, cached_tokens) * machine.ranks
    terms = {
        "products": flops / machine.ranks / device.flops_per_s,
        "attention's products": attention / machine.ranks / device.flops_per_s,
        "weights": machine.step_weight_bytes(new_tokens) / device.bandwidth_bytes_per_s,
        "KV cache": machine.attention.kv_read_bytes(cached_tokens) / device.bandwidth_bytes_per_s,
    }
    compute = terms["products"] + terms["attention's products"]
    memory = terms["weights"] + terms["KV cache"]
    reduce = _all_reduces(machine, new_tokens)
    if machine.ranks > 1:
        terms["all-reduces"] = reduce
    return Bound(terms_s=terms, seconds=max(compute, memory) + reduce, binds=_binds(terms, memory, compute, reduce))


def _all_reduces(machine: Machine, tokens: float) -> float:
    """All of a pass: `all_reduces_per_layer` a layer (after attention, after the MLP), 16-bit hidden states."""
    if machine.ranks < 2 or machine.link is None:
        return 0.0
    size = tokens * machine.hidden_size * 2
    return machine.layers * machine.all_reduces_per_layer * all_reduce_s(size, machine.ranks, machine.link)


def _binds(terms: Mapping[str, float], memory: float, compute: float, reduce: float) -> str:
    """The largest term of those that count (of reading and multiplying only the longer one does)."""
    of_memory = ("weights", "KV cache", "recurrent state")
    counted = {k: v for k, v in terms.items() if k != "all-reduces" and (k in of_memory) == (memory >= compute)}
    if "all-reduces" in terms:
        counted["all-reduces"] = reduce
    return max(counted, key=lambda k: counted[k])


def knee(rates: Mapping[int, float], efficiency: float) -> int | None:
    """The last level up to which throughput grows at least `efficiency` as fast as the number of users, doubling by doubling.

    None where it grows so up to the highest level (the knee lies above), or where there are fewer than two levels.

    Example: `knee({1: 100, 2: 190, 4: 300, 8: 330}, 0.5)` is 4: the last doubling gives log2(330 / 300) = 0.14.
    """
    steps = sorted(rates)
    for a, b in zip(steps, steps[1:], strict=False):
        if step_efficiency(a, rates[a], b, rates[b]) < efficiency:
            return a
    return None


def step_efficiency(low_level: int, low_rate: float, high_level: int, high_rate: float) -> float:
    """How much of the added users came back as throughput: 1 in proportion, 0 nothing, below 0 less than before.

    Example: from 4 users at 300 to 8 at 330 tok/s: log(1.1) / log(2) = 0.14.
    """
    return math.log(high_rate / low_rate) / math.log(high_level / low_level)
