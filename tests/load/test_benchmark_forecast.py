"""The prediction from a checkpoint and a machine: real geometries, hand-computed figures, and reasons where nothing is known."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lib.errors import NotMeasured
from lib.hosts.base import LocalHost
from lib.load import bench_forecast, benchmark
from lib.model.checkpoint import checkpoint_from_configs
from lib.params import BenchmarkParams, HostParams
from lib.server.remote import Place
from tests.conftest import TINY
from tests.model.checkpoint_files import ORIGIN, SMOLLM2
from tests.model.test_roofline import TOPO_8

#: SmolLM2-135M-Instruct's bytes in bf16: 134,515,008 parameters, embedding tied.
SMOLLM2_TENSORS = [
    ["model.embed_tokens.weight", "BF16", [49152, 576], 56_623_104],
    ["model.layers.0.x.weight", "BF16", [106_203_456], 212_406_912],
]
#: The origin's share of weights in one number: routed experts at 4.5 bits, 10 of 512 a token; all else at 16 bits.
ORIGIN_TENSORS = [
    ["model.layers.0.mlp.experts.0.up_proj.weight", "U8", [192_000_000_000], 192_000_000_000],
    ["model.layers.0.mlp.experts.0.up_proj.weight_scale", "F8_E4M3", [24_000_000_000], 24_000_000_000],
    ["model.layers.0.mlp.shared.weight", "BF16", [9_500_000_000], 19_000_000_000],
    ["mtp.fc.weight", "BF16", [1000], 2000],
]
CPU = {"cpu": "a CPU", "gpus": []}
EIGHT = {"cpu": "a CPU", "gpus": [{"name": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"}] * 8}
EXPERTS = {"num_experts": 512, "num_experts_per_tok": 10, "tie_word_embeddings": False}


class Run:
    """As much of a notebook's run as a forecast asks for, from given records."""

    offline = False
    there: dict[str, Any] = {}

    def __init__(
        self, config: dict[str, Any] | None, host: dict[str, Any], records: dict[str, Any], **params: Any
    ) -> None:
        values: dict[str, Any] = {"profile": TINY, "concurrency": [1, 4], "input_len": 256, "output_len": 64}
        self.params = BenchmarkParams.model_validate(values | params)
        self.config, self._host, self.records = config, host, records
        self.raw = Path("/nowhere/03")
        self.profile = SimpleNamespace(host=SimpleNamespace(remote=False))

    def checkpoint(self, _: Any) -> Any:
        return checkpoint_from_configs(self.config) if self.config else None

    def host(self) -> dict[str, Any]:
        return self._host

    def platform(self, _: Any) -> str:
        return "cuda" if self._host["gpus"] else "cpu"

    def version(self, _: Any) -> str:
        return "0.5.15.post1"

    def measure(self, name: str, *_: Any, **__: Any) -> Any:
        if name not in self.records:
            raise NotMeasured(f"raw record {name!r}", "none")
        return SimpleNamespace(json=lambda file: self.records[name])


def handle(tp: int = 1, attached: bool = False, **flags: Any) -> Any:
    return SimpleNamespace(
        tp_size=tp, attached=attached, params=SimpleNamespace(flags=flags, environment={}, python=sys.executable),
        spec=SimpleNamespace(model_path="/nowhere", model={}), launches=list,
    )  # fmt: skip


def predict(run: Run, server: Any) -> bench_forecast.Forecast:
    return bench_forecast.forecast(run, server, benchmark.planned_depths(run, server))  # type: ignore[arg-type]


BANDWIDTH = {"read_bytes_per_s": 10e9, "threads": 2, "flops_per_s": 100e9}


def test_the_embedded_model_on_a_cpu() -> None:
    """269 MB of weights and 23,040 B a token at 10 GB/s; prefill by 100 GFLOP/s; the limit from the context length."""
    run = Run(SMOLLM2, CPU, {"bandwidth": BANDWIDTH, "tensors": SMOLLM2_TENSORS}, depths=[1024, "limit"], agents=2)
    made = predict(run, handle(kv_cache_dtype="bf16"))
    one = made.point("level-C1")
    # (269,030,016 + 23,040 x 288) / 10e9 = 27.567 ms
    assert one and one.value == pytest.approx(1 / 0.0275666, rel=1e-4) and one.binds == "weights"
    cold = made.point("depth-1024-C1-cold")
    # body 106,203,456, head 28,311,552 once; attention 30 layers x 9 heads x 128 products a pair, 1024 x 512 pairs
    flops = 2 * (106_203_456 * 1024 + 28_311_552) + 2 * 30 * 9 * 128 * 1024 * 512
    assert cold and cold.value == pytest.approx(flops / 100e9, rel=1e-6) and cold.binds == "products"
    hit = made.point("depth-1024-C1-hit")
    assert hit and hit.value is not None and cold.value is not None and hit.value < cold.value / 10
    limit = made.point("depth-limit-C2-decode")
    # 8192 - 32 - 64 - 16 tokens of room, and half of the answer
    assert limit and limit.context_tokens == 8080 + 16
    assert "one rank" in made.inputs["all-reduces"]
    assert "0.269 GB read by one token's step" in made.inputs["weights"]
    assert "measured on this host" in str(made.estimate)  # a CPU's figures are no data sheet's


def test_the_origin_on_eight_gpus_over_pcie() -> None:
    """KV 15,360 B a token and 24 MB of state a sequence and rank, 120 all-reduces of 205 us: they bind."""
    config = json.loads(json.dumps(ORIGIN))
    config["text_config"] |= EXPERTS
    topology = {"text": TOPO_8, "reason": None}
    run = Run(config, EIGHT, {"tensors": ORIGIN_TENSORS, "topology": topology})
    made = predict(run, handle(tp=4, kv_cache_dtype="bf16"))
    assert made.inputs["all-reduces"].startswith("120 a pass (60 layers x 2); SYS, latency 205 us")
    assert "B, read and written once a step" in made.inputs["recurrent state a sequence and rank"]
    one = made.point("level-C1")
    assert one and one.binds == "all-reduces" and one.terms_s["all-reduces"] == pytest.approx(120 * 205e-6, rel=0.01)
    # (19 GB + 216 GB x 10/512) / 4 ranks / 1.792 TB/s = 3.24 ms
    assert one.terms_s["weights"] == pytest.approx((19e9 + 216e9 * 10 / 512) / 4 / 1.792e12, rel=1e-6)
    four = made.point("level-C4")
    assert four and four.terms_s["weights"] > one.terms_s["weights"]  # more tokens touch more experts
    assert made.estimate is None
    stated = predict(Run(config, EIGHT, run.records, allreduce_latency_s=5.3e-6), handle(tp=4, kv_cache_dtype="bf16"))
    faster = stated.point("level-C1")
    assert faster and faster.binds == "weights" and "stated in params" in stated.inputs["all-reduces"]


def reduced(us: list[float], right: bool = True) -> dict[str, Any]:
    """An all-reduce by size as the host's probe writes it: 8 KiB, 16 KiB, 1 MiB, in microseconds alone; half as long in a row."""
    rows = [
        {"size": size, "seconds": 1.2e-6 * t, "low": 1e-6 * t, "burst_seconds": 0.5e-6 * t, "high": 9e-6 * t, "n": 50, "right": right}
        for size, t in zip((8192, 16384, 1 << 20), us, strict=True)
    ]  # fmt: skip
    return {"all_reduce": rows, "ranks": 4}


def test_the_host_s_own_all_reduce_by_size_goes_into_the_bounds() -> None:
    """20 us at 8 KiB: 120 of them a step; a wrong sum and a failed probe leave the table's figure and say so; params go before all."""
    config = json.loads(json.dumps(ORIGIN))
    config["text_config"] |= EXPERTS
    records = {"tensors": ORIGIN_TENSORS, "topology": {"text": TOPO_8, "reason": None}, "all-reduce": reduced([40, 60, 400])}
    made = predict(Run(config, EIGHT, records), handle(tp=4, kv_cache_dtype="bf16"))
    one = made.point("level-C1")  # hidden size 4096: one token is 8 KiB, and in a row it takes 20 us
    assert one and one.terms_s["all-reduces"] == pytest.approx(120 * 20e-6)
    two = predict(Run(config, EIGHT, records, concurrency=[2]), handle(tp=4, kv_cache_dtype="bf16")).point("level-C2")
    assert two and two.terms_s["all-reduces"] == pytest.approx(120 * 30e-6)
    assert "all-reduce measured on this host by size (8,192 to 1,048,576 B" in made.inputs["all-reduces"]
    assert "spread over NUMA nodes: GPU 0, 1, 2 on node 0; GPU 3 on node 1" in made.inputs["all-reduces"]
    for record, words in (
        (reduced([40, 60, 400], right=False), "a sum was WRONG"),
        ({"all_reduce": [], "all_reduce_reason": "NCCL error: unhandled"}, "NCCL error: unhandled"),
        ({"reason": "No module named 'torch'"}, "No module named 'torch'"),
    ):
        made = predict(Run(config, EIGHT, records | {"all-reduce": record}), handle(tp=4, kv_cache_dtype="bf16"))
        assert words in made.inputs["all-reduces"] and "205 us" in made.inputs["all-reduces"]
    stated = predict(Run(config, EIGHT, records, allreduce_latency_s=5e-6), handle(tp=4, kv_cache_dtype="bf16"))
    assert "stated in params" in stated.inputs["all-reduces"]


def test_copies_that_01_measured_stand_beside_the_data_sheet(tmp_path: Path) -> None:
    """The slowest device's copy is shown; the bound stays the data sheet's; without 01 in the run nothing is said."""
    run = Run(SMOLLM2, EIGHT, {"tensors": SMOLLM2_TENSORS})
    run.raw = tmp_path / "03"
    before = predict(run, handle())
    assert not any("measured by 01" in name for name in before.inputs)
    copies = [{"from": n, "to": n, "bytes_per_s": speed} for n, speed in ((0, 1.5e12), (1, 1.4e12))]
    file = tmp_path / "01" / "character" / "character.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"probe": {"copies": copies}}))
    made = predict(run, handle())
    assert [v for k, v in made.inputs.items() if "measured by 01" in k] == ["1400 GB/s"] and made.points == before.points


@pytest.mark.parametrize(
    ("visible", "flags", "attached", "kind"),
    [
        (None, {}, False, "PIX"), ("0,1", {}, False, "PIX"), ("0,2", {}, False, "NODE"), ("3,0", {}, False, "SYS"),
        (None, {"base_gpu_id": 1}, False, "NODE"), (None, {"gpu_id_step": 2}, False, "NODE"), ("GPU-ab,GPU-cd", {}, False, "SYS"),
        (None, {}, True, "SYS"),
    ],
)  # fmt: skip
def test_the_connection_is_that_of_the_gpus_the_server_runs_on(
    visible: str | None, flags: dict[str, Any], attached: bool, kind: str
) -> None:
    """CUDA_VISIBLE_DEVICES, base_gpu_id and gpu_id_step choose the pair; where it is not known, the host's slowest."""
    run = Run(SMOLLM2, EIGHT, {"tensors": SMOLLM2_TENSORS, "topology": {"text": TOPO_8, "reason": None}})
    server = handle(tp=2, attached=attached, **flags)
    if visible is not None:
        server.params.environment["CUDA_VISIBLE_DEVICES"] = visible
    link, _ = bench_forecast.link_for(run, server)  # type: ignore[arg-type]
    assert link is not None and link.kind == kind


def test_the_kv_cache_of_eight_ranks_is_that_of_the_memory_formula() -> None:
    """The bytes read are those that the pool holds: 15 layers x 1 head x 512 x 2 B."""
    config = json.loads(json.dumps(ORIGIN))
    config["text_config"] |= EXPERTS
    run = Run(config, EIGHT, {"tensors": ORIGIN_TENSORS, "topology": {"text": None, "reason": "none"}})
    made = predict(run, handle(tp=8, kv_cache_dtype="bf16"))
    assert made.inputs["KV cache a token and rank"] == "full_attention 15,360 B"
    assert made.inputs["recurrent state a sequence and rank"].startswith("24,007,680 B")
    assert "latency unknown, counted as 0" in made.inputs["all-reduces"]


def test_an_unknown_gpu_is_not_predicted_until_params_state_its_bandwidth() -> None:
    """No row: every point has the reason; a stated bandwidth is enough for decoding, not for a prefill."""
    strange = {"cpu": "", "gpus": [{"name": "Strange GPU"}]}
    records = {"tensors": SMOLLM2_TENSORS}
    made = predict(Run(SMOLLM2, strange, records), handle())
    assert all(p.value is None and "set it in params" in str(p.reason) for p in made.points) and made.knee is None
    made = predict(Run(SMOLLM2, strange, records, bandwidth_bytes_per_s=1e12), handle())
    level, first = made.point("level-C1"), made.point("level-C1-ttft")
    assert level and level.value and first and first.value is None and "FLOP/s" in str(first.reason)


def test_weights_that_the_server_quantizes_itself_are_not_guessed() -> None:
    """--quantization on a 16-bit checkpoint changes what is read: a reason, unless params state the bytes."""
    records = {"bandwidth": BANDWIDTH, "tensors": SMOLLM2_TENSORS}
    made = predict(Run(SMOLLM2, CPU, records), handle(quantization="fp8"))
    assert "--quantization fp8" in str(made.points[0].reason)
    made = predict(Run(SMOLLM2, CPU, records, active_weight_bytes=135e6), handle(quantization="fp8"))
    level = made.point("level-C1")
    assert level and level.value == pytest.approx(1 / ((135e6 + 23_040 * 288) / 10e9), rel=1e-4)


def test_an_attached_server_s_model_is_not_read() -> None:
    """Nothing is predicted of a model whose files are not seen."""
    made = predict(Run(None, CPU, {}, depths=["limit"]), handle(attached=True))
    assert all(p.value is None and "attached" in str(p.reason) for p in made.points)


def test_the_machine_is_measured_with_all_cores(tmp_path: Path) -> None:
    """Bandwidth and products come with the number of threads and what was multiplied."""
    bench_forecast.measure_machine(tmp_path)
    found = json.loads((tmp_path / "bandwidth.json").read_text())
    assert (
        found["threads"] >= 1
        and found["read_bytes_per_s"] > 1e8
        and found["flops_per_s"] > 1e8
        and "float32" in found["product"]
    )


def test_another_machine_is_measured_there_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an interpreter of that host; one without numpy gives its reason and no number, never this machine's."""
    with LocalHost() as host:
        place = Place(host, HostParams())
        monkeypatch.setattr(bench_forecast, "place_of", lambda _: place)
        bench_forecast.measure_machine(tmp_path, {"kind": "ssh", "address": "x"}, sys.executable)
        assert json.loads((tmp_path / "bandwidth.json").read_text())["read_bytes_per_s"] > 1e8
        bare = tmp_path / "bare"
        bare.write_text(f'#!/bin/sh\nexec {sys.executable} -IS "$@"\n')
        bare.chmod(0o755)
        bench_forecast.measure_machine(tmp_path, {"kind": "ssh", "address": "x"}, str(bare))
    found = json.loads((tmp_path / "bandwidth.json").read_text())
    assert found["read_bytes_per_s"] is None and "numpy" in found["reason"]
    made = predict(Run(SMOLLM2 | {"torch_dtype": "bfloat16"}, CPU, {"bandwidth": found, "tensors": SMOLLM2_TENSORS}), handle())
    assert all(p.value is None for p in made.points if p.kind == "decode")


@pytest.mark.parametrize("flags", [{"pp_size": 2}, {"dp_size": 4}, {"speculative_algorithm": "NEXTN"}, {"dtype": "float32"}])
def test_what_the_formulas_do_not_cover_is_not_predicted(flags: dict[str, Any]) -> None:
    """Pipelines, data parallelism, speculation and widened weights: a reason instead of a bound that would be wrong."""
    config = SMOLLM2 | {"torch_dtype": "bfloat16"}
    made = predict(Run(config, CPU, {"bandwidth": BANDWIDTH, "tensors": SMOLLM2_TENSORS}), handle(**flags))
    assert all(p.value is None and p.reason for p in made.points)
