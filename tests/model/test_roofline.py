"""Bounds by hand: each expected value is arithmetic in a comment, and no unknown is guessed."""

from __future__ import annotations

import re

import pytest

from lib.errors import BadInput
from lib.model import roofline
from lib.model.roofline import Attention, Device, Link, Machine, Weights
from lib.params import ROOT

SLOW = Device(name="d", bandwidth_bytes_per_s=10e9, flops_per_s=None, source="test")
FULL = Attention(kv={"full_attention": (23_040, None)}, state_bytes=0, products_per_token=0)


def machine(**changes: object) -> Machine:
    values: dict[str, object] = {
        "device": SLOW, "weights": None, "weight_bytes": 269e6, "attention": FULL, "layers": 30, "hidden_size": 576
    }  # fmt: skip
    return Machine.model_validate(values | changes)


def plain(**changes: object) -> Weights:
    values = dict.fromkeys(
        ("shared_bytes", "expert_bytes", "looked_up_bytes", "unused_bytes", "shared_parameters", "expert_parameters", "head_parameters"), 0
    )
    return Weights.model_validate(values | changes)


def test_the_docstring_example_of_a_decode_step() -> None:
    """Weights and KV over bandwidth; the longer of both binds."""
    # (269e6 + 23040 * 288) / 10e9 = 27.564 ms -> 36.28 tok/s
    bound = roofline.decode_bound(machine(), 1, 288)
    assert bound.tokens_per_s == pytest.approx(36.28, abs=0.01)
    assert bound.binds == "weights"
    # at 100 sequences of 1000 tokens KV is 2.3 GB against 0.27 GB
    assert roofline.decode_bound(machine(), 100, 1000).binds == "KV cache"


def test_the_origin_s_ceiling_of_620_tokens_a_second() -> None:
    """About 23 GB of active weights over 8 GPUs of 1.79 TB/s, before any all-reduce, and with NCCL's over PCIe."""
    # 7.5e9 * 4.5 / 8 + 9.5e9 * 2 = 23.2 GB; / 8 / 1.79e12 = 1.62 ms -> 617 tok/s
    device = Device(name="RTX PRO 6000", bandwidth_bytes_per_s=1.79e12, flops_per_s=None, source="test")
    none = Attention(kv={}, state_bytes=0, products_per_token=0)
    weight = (7.5e9 * 4.5 / 8 + 9.5e9 * 2) / 8
    alone = machine(device=device, weight_bytes=weight, attention=none, layers=60, hidden_size=4096, ranks=8)
    assert roofline.decode_bound(alone, 1, 0).tokens_per_s == pytest.approx(617, abs=1)
    # 120 all-reduces of 205 us = 24.6 ms a step: then the interconnect binds, at 38 tok/s
    linked = alone.model_copy(update={"link": roofline.link_of("NODE", 8)})
    bound = roofline.decode_bound(linked, 1, 0)
    assert bound.binds == "all-reduces" and bound.tokens_per_s == pytest.approx(38.1, abs=0.3)


def test_recurrent_state_is_read_and_written_for_every_sequence() -> None:
    """24 MB a slot: 48 MB moved a step and sequence, whatever the depth."""
    hybrid = Attention(kv={}, state_bytes=24_007_680, products_per_token=0)
    shallow, deep = (roofline.decode_bound(machine(attention=hybrid), 4, depth) for depth in (10, 100_000))
    assert shallow.terms_s["recurrent state"] == pytest.approx(4 * 2 * 24_007_680 / 10e9)
    assert shallow.seconds == deep.seconds


def test_a_sliding_window_stops_growing() -> None:
    """Bytes beyond the window are not read."""
    sliding = Attention(kv={"full_attention": (100, None), "sliding_window": (1000, 512)}, state_bytes=0, products_per_token=0)
    assert sliding.kv_read_bytes(256) == 256 * 1100
    assert sliding.kv_read_bytes(10_000) == 10_000 * 100 + 512 * 1000


def test_products_bind_where_they_take_longer_and_do_not_add_up() -> None:
    """Reading and multiplying overlap: the step takes the longer of both."""
    fast = Device(name="d", bandwidth_bytes_per_s=1e12, flops_per_s=1e12, source="test")
    weights = plain(shared_bytes=2_000_000_000, shared_parameters=1_000_000_000)
    none = Attention(kv={}, state_bytes=0, products_per_token=0)
    many = machine(device=fast, weights=weights, weight_bytes=None, attention=none)
    # C=1: 2 ms of reading, 2 ms of products; C=8: still 2 ms of reading, 16 ms of products
    assert roofline.decode_bound(many, 1, 0).seconds == pytest.approx(2e-3)
    bound = roofline.decode_bound(many, 8, 0)
    assert bound.seconds == pytest.approx(16e-3) and bound.binds == "products"


def test_a_prefill_multiplies_the_body_for_every_token_and_the_head_once() -> None:
    """2 x (107 M x 1000 + 28 M) over 100 GFLOP/s is 2.14 s; a hit computes only what is new."""
    device = Device(name="d", bandwidth_bytes_per_s=1e12, flops_per_s=100e9, source="test")
    weights = plain(shared_bytes=270e6, shared_parameters=135_000_000, head_parameters=28_000_000)
    attention = Attention(kv={"full_attention": (23_040, None)}, state_bytes=0, products_per_token=0)
    model = machine(device=device, weights=weights, weight_bytes=None, attention=attention)
    assert roofline.prefill_bound(model, 1000).seconds == pytest.approx(2.1406, abs=1e-3)
    assert roofline.prefill_bound(model, 10, 1000).seconds == pytest.approx(2 * (107e6 * 10 + 28e6) / 100e9)


def test_attention_of_a_prefill_grows_with_the_square_and_sees_the_cached_prefix() -> None:
    """n new tokens after c cached ones make n (c + n/2) pairs."""
    attention = Attention(kv={}, state_bytes=0, products_per_token=10)
    assert attention.flops(100, 0) == 2 * 10 * 100 * 50
    assert attention.flops(100, 1000) == 2 * 10 * 100 * 1050


def test_a_prefill_without_flops_is_refused() -> None:
    """No FLOP/s: no floor is made up."""
    with pytest.raises(ValueError, match="FLOP/s"):
        roofline.prefill_bound(machine(), 100)


@pytest.mark.parametrize(("concurrency", "context"), [(0, 1), (1, -1)])
def test_impossible_steps_are_refused(concurrency: int, context: float) -> None:
    """Zero sequences and negative depths are programming errors."""
    with pytest.raises(ValueError, match="positive"):
        roofline.decode_bound(machine(), concurrency, context)


MOE = {"text_config": {"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False}}
TENSORS = [
    ("model.embed_tokens.weight", "BF16", (1000, 16), 32_000),
    ("lm_head.weight", "BF16", (1000, 16), 32_000),
    ("model.layers.0.self_attn.q_proj.weight", "BF16", (16, 16), 512),
    ("model.layers.0.mlp.gate.weight", "BF16", (8, 16), 256),
    ("model.layers.0.mlp.shared_expert.up_proj.weight", "BF16", (16, 16), 512),
    ("model.layers.0.mlp.experts.3.up_proj.weight", "U8", (16, 8), 128),
    ("model.layers.0.mlp.experts.3.up_proj.weight_scale", "F8_E4M3", (16, 1), 16),
    ("model.layers.0.mlp.experts.3.up_proj.weight_scale_2", "F32", (), 4),
    ("model.layers.2.mtp_block.weight", "BF16", (16, 16), 512),
    ("mtp.fc.weight", "BF16", (16, 16), 512),
    ("model.visual.blocks.0.weight", "BF16", (16, 16), 512),
]


def test_weights_are_told_apart_by_how_often_a_step_reads_them() -> None:
    """Embedding rows are looked up, drafts and towers unused, routed experts shared out; 4-bit pairs count twice."""
    found = roofline.weights(TENSORS, MOE)
    assert found.looked_up_bytes == 32_000
    assert found.unused_bytes == 3 * 512
    assert found.expert_bytes == 128 + 16 + 4
    assert found.shared_bytes == 32_000 + 512 + 256 + 512
    assert found.expert_parameters == 2 * 16 * 8  # two 4-bit weights a byte, scales are no parameters
    assert found.head_parameters == 16_000
    # one token reads 2 of 8 experts, 16 tokens nearly all: 1 - (6/8)**16 = 0.98998
    assert found.share_of_experts(1) == pytest.approx(0.25)
    assert found.share_of_experts(16) == pytest.approx(0.98998, abs=1e-5)


def test_a_tied_embedding_is_read_as_the_head() -> None:
    """Where there is no head of its own, every step multiplies by the embedding."""
    found = roofline.weights([("model.embed_tokens.weight", "BF16", (1000, 16), 32_000)], {"tie_word_embeddings": True})
    assert (found.shared_bytes, found.looked_up_bytes, found.head_parameters) == (32_000, 0, 16_000)


def test_a_mixture_whose_config_does_not_say_how_many_experts_is_refused() -> None:
    """Nothing architectural is guessed."""
    with pytest.raises(BadInput, match="experts"):
        roofline.weights(TENSORS, {"num_hidden_layers": 2})


#: A name as nvidia-smi prints it -> bytes/s and dense 16-bit FLOP/s, computed here from what NVIDIA states.
STATED = {
    "NVIDIA GB300": (576e12 / 72, 360e15 / 72 / 2),
    "NVIDIA B300 SXM6 AC": (8e12, 36e15 / 8 / 2),
    "NVIDIA GB200": (8e12, 5e15 / 2),
    "NVIDIA B200": (8e12, 4.5e15 / 2),
    "NVIDIA H200 NVL": (4.8e12, 1671e12 / 2),
    "NVIDIA H200": (4.8e12, 1979e12 / 2),
    "NVIDIA H100 NVL": (3.9e12, 1671e12 / 2),
    "NVIDIA H100 PCIe": (2e12, 1513e12 / 2),
    "NVIDIA H100 80GB HBM3": (3.35e12, 1979e12 / 2),
    "NVIDIA A100 80GB PCIe": (1.935e12, 624e12 / 2),
    "NVIDIA A100-SXM4-80GB": (2.039e12, 624e12 / 2),
    "NVIDIA A100-SXM4-40GB": (1.555e12, 624e12 / 2),
    "NVIDIA A100-PCIE-40GB": (1.555e12, 624e12 / 2),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": (1.597e12, 4000e12 / 8),
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": (1.792e12, 3511e12 / 8),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": (1.792e12, 4000e12 / 8),
    "NVIDIA L40S": (864e9, 733e12 / 2),
    "NVIDIA L4": (300e9, 242e12 / 2),
    "NVIDIA A10": (600e9, 250e12 / 2),
    "NVIDIA GeForce RTX 5090": (1.792e12, 838.4e12 / 4),
    "NVIDIA GeForce RTX 4090": (1.008e12, 660.6e12 / 4),
    "NVIDIA GeForce RTX 3090": (936e9, 284e12 / 4),
}


@pytest.mark.parametrize("name", STATED)
def test_figures_are_dense_and_those_stated(name: str) -> None:
    """Half of what a sheet states with sparsity (a quarter where it counts 16-bit sums too), within its rounding."""
    found = roofline.gpu(name)
    assert found is not None and found.source
    bandwidth, flops = STATED[name]
    assert (found.bandwidth_bytes_per_s, found.flops_per_s) == (pytest.approx(bandwidth), pytest.approx(flops, rel=0.015))


def test_every_row_is_reached_by_a_name() -> None:
    """A row that an earlier one hides could never be used; a source says whether its figures were looked up."""
    used = {next(row for row in roofline.GPUS if re.search(row[0], name, re.IGNORECASE)) for name in STATED}
    assert used == set(roofline.GPUS)
    assert {("not looked up" in row[3]) for row in roofline.GPUS} == {True, False}


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H200 MIG 1g.18gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 5090 D", "NVIDIA GeForce RTX 4090 D", "NVIDIA GH200 480GB", "NVIDIA H20", "NVIDIA A10G",
        "NVIDIA H100 64GB HBM2e", "NVIDIA L40", "NVIDIA A100X",
    ],
)  # fmt: skip
def test_a_relative_of_a_known_gpu_has_no_figure(name: str) -> None:
    """Parts of a GPU and siblings with other memory or clocks are not the row whose name theirs contains."""
    assert roofline.gpu(name) is None


def test_an_unknown_gpu_has_no_figure() -> None:
    """A name without a row is None, not the nearest row."""
    assert roofline.gpu("NVIDIA GeForce GT 1030") is None
    assert roofline.gpu("NVIDIA L400") is None


TOPO_8 = """\x1b[4m\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tPIX\tNODE\tSYS\tPIX\t0-31\t0\t\tN/A
GPU1\tPIX\t X \tNODE\tSYS\tPIX\t0-31\t0\t\tN/A
GPU2\tNODE\tNODE\t X \tSYS\tNODE\t0-31\t0\t\tN/A
GPU3\tSYS\tSYS\tSYS\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPIX\tPIX\tNODE\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
"""


def test_a_topology_is_read_with_its_escapes_and_without_nics_and_legend() -> None:
    """Each pair once; the slowest connection among the ranks counts, not the host's."""
    found = roofline.parse_topology(TOPO_8)
    assert found.gpus == [0, 1, 2, 3] and len(found.links) == 6
    assert found.links["0-1"] == "PIX"
    assert found.worst([0, 1]) == "PIX"
    assert found.worst([0, 1, 2]) == "NODE"
    assert found.worst([0, 1, 2, 3]) == "SYS"
    assert found.worst([0]) is None and found.worst([0, 9]) is None


def test_more_nvlinks_are_faster_and_any_pcie_is_slower() -> None:
    """NV18 beats NV4 beats PIX."""
    text = "\tGPU0\tGPU1\tGPU2\nGPU0\t X \tNV18\tNV4\nGPU1\tNV18\t X \tPIX\nGPU2\tNV4\tPIX\t X \n"
    found = roofline.parse_topology(text)
    assert found.worst([0, 1]) == "NV18" and found.worst([0, 2]) == "NV4" and found.worst([0, 1, 2]) == "PIX"
    assert roofline.link_of("NV18", 8).bytes_per_s == 450e9
    for name, stated in (("NVIDIA H200", 900e9), ("NVIDIA B200", 1.8e12), ("NVIDIA GB300", 1.8e12)):
        assert roofline.link_of("NV18", 8, gpu_name=name).bytes_per_s == stated / 2


@pytest.mark.parametrize(
    ("name", "gpus", "worst", "near", "apart"),
    [
        ("h200-1", 1, None, {0: ("0-15", "0")}, None),
        ("h100-8-nvlink", 8, "NV18", {0: ("0-47,96-143", "0"), 7: ("48-95,144-191", "1")}, "3 on node 0; GPU 4, 5, 6, 7 on node 1"),
        ("nvlink8-nics-no-gpu-numa-id-cut", 8, "NV8", {0: ("0-47,96-143", "0"), 6: ("48-95,144-191", "1")}, "4, 5, 6 on node 1"),
        ("rtx5090-2-phb", 2, "PHB", {1: ("0-63", "0")}, None),
        ("rtx4090-8-sys-nics", 8, "SYS", {6: ("56-111,168-223", "1")}, "GPU 4, 5, 6, 7 on node 1"),
        ("mixed-5-phb-node-sys", 5, "SYS", {0: ("8-15,24-31", "1")}, "GPU 1, 2, 3, 4 on node 0; GPU 0 on node 1"),
    ],
)  # fmt: skip
def test_recorded_topologies_of_several_kinds(
    name: str, gpus: int, worst: str | None, near: dict[int, tuple[str, str]], apart: str | None
) -> None:
    """Tabs or blanks, NIC columns, no `GPU NUMA ID`, a cut row: every pair, the slowest link, each GPU's processors and node."""
    text = (ROOT / "tests" / "recorded" / "topology" / f"{name}.txt").read_text()
    found = roofline.parse_topology(text)
    assert found.gpus == list(range(gpus)) and len(found.links) == gpus * (gpus - 1) // 2
    assert found.worst(found.gpus) == worst
    assert {g: (found.cpus[g], found.numa[g]) for g in near} == near
    said = found.apart(found.gpus)
    assert (said is None) == (apart is None) and (apart or "") in (said or "")


def test_the_recorded_topologies_are_all_tried() -> None:
    """A new file is a new row above."""
    files = {f.stem for f in (ROOT / "tests" / "recorded" / "topology").glob("*.txt")}
    assert files == {
        "h200-1", "h100-8-nvlink", "nvlink8-nics-no-gpu-numa-id-cut", "rtx5090-2-phb", "rtx4090-8-sys-nics", "mixed-5-phb-node-sys",
    }  # fmt: skip


def test_measured_all_reduces_are_read_between_their_sizes() -> None:
    """20 us at 8 KiB and 30 us at 16 KiB: 25 us at 12 KiB, 20 us below, the last slope beyond, never less than a smaller size takes."""
    rows = [{"size": 8192, "low": 20e-6, "right": True}, {"size": 16384, "low": 35e-6, "burst_seconds": 30e-6, "right": True}]
    link = roofline.measured_link(roofline.link_of("SYS", 8), rows)
    for size, us in ((12288, 25), (1024, 20), (8192, 20), (16384, 30), (32768, 50)):
        assert roofline.all_reduce_s(size, 8, link) == pytest.approx(us * 1e-6), size
    falling = link.model_copy(update={"measured": [(8192, 20e-6), (16384, 15e-6)]})
    assert roofline.all_reduce_s(16384, 8, falling) == 20e-6
    assert roofline.all_reduce_s(12288, 1, link) == 0.0
    table = roofline.link_of("SYS", 8)
    assert roofline.measured_link(table, []) == table and roofline.measured_link(table, [{**rows[0], "right": False}]) == table
    assert roofline.measured_link(table, [rows[0], {**rows[1], "right": False}]) == table  # one wrong sum spoils them all


def test_what_is_no_topology_is_refused() -> None:
    """An error message of nvidia-smi is not a host without links."""
    with pytest.raises(BadInput, match="topo"):
        roofline.parse_topology("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")


def test_an_all_reduce_by_hand() -> None:
    """12 KiB over 8 ranks: 205 us and 2 x 7/8 x 12 KiB over 63 GB/s."""
    link = roofline.link_of("NODE", 8)
    assert roofline.all_reduce_s(12 * 1024, 8, link) == pytest.approx(205e-6 + 1.75 * 12 * 1024 / 63e9)
    assert roofline.all_reduce_s(12 * 1024, 1, link) == 0.0


def test_what_params_state_of_the_link_counts_and_what_nobody_states_is_unknown() -> None:
    """A stated latency replaces the table's; NVLink has one measured on another host, and says so."""
    assert roofline.link_of("NODE", 8, latency_s=5.3e-6).latency_s == 5.3e-6
    linked = roofline.link_of("NV18", 8)
    assert linked.latency_s == 6e-6 and "not this host" in linked.source
    assert roofline.link_of("NV18", 8, latency_s=4e-6).latency_s == 4e-6
    unknown = roofline.link_of(None, 8)
    assert (unknown.latency_s, unknown.bytes_per_s) == (None, None)
    assert roofline.all_reduce_s(1e6, 8, unknown) == 0.0
    assert isinstance(unknown, Link) and "set allreduce_latency_s" in unknown.source


def test_the_knee_is_the_last_level_that_pays() -> None:
    """The docstring's example, a curve that never bends, one that falls, and too few levels."""
    assert roofline.knee({1: 100, 2: 190, 4: 300, 8: 330}, 0.5) == 4
    assert roofline.knee({1: 100, 2: 200, 4: 400}, 0.5) is None
    assert roofline.knee({1: 100, 4: 90}, 0.5) == 1
    assert roofline.knee({1: 100}, 0.5) is None
    assert roofline.step_efficiency(4, 300, 8, 330) == pytest.approx(0.1375, abs=1e-4)
