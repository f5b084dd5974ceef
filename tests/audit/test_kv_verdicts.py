"""Notebook 05's verdicts and recommendation from stand-in measurements: H1, order, worth, arms without a trace."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lib.audit import kv_verdicts
from lib.audit.arms import Audit
from lib.audit.compare import compare_scores
from lib.audit.fidelity import judge_probe, plan_probe
from lib.errors import BadParams
from lib.params import ArmParams, AuditParams, validated
from lib.records import Evidence, Status
from tests.audit.test_compare import scores

INFO = {"attention_backend": "triton", "chunked_prefill_size": 512, "max_req_input_len": 8000, "model_path": "/m"}


class Made:
    """An `Audit` of which only what the verdicts ask is there."""

    reference = "bf16"

    def __init__(
        self, losses: dict[str, float], faults: tuple[str, ...] = (), arms: tuple[ArmParams, ...] = ()
    ) -> None:
        self.arms = {arm.id: arm for arm in arms}
        self.dtypes = ["bf16", *losses, *(a for a in self.arms if a not in losses)]
        self.losses, self.faults = losses, faults
        self.params = AuditParams()
        folder = SimpleNamespace(
            ok=True, problem=None, launch_ids=["L"], folder=Path("raw/05/x"), stamp=SimpleNamespace(invalid=None)
        )
        self.probes, self.scores = dict.fromkeys(self.dtypes, folder), {d: [folder] for d in self.dtypes}
        self.floors: dict[str, Any] = {}
        self.costs: dict[str, Any] = {}
        self.tasks: dict[str, Any] = {}
        self.launches = {d: SimpleNamespace(launch_id=f"L-{d}", name=d) for d in self.dtypes}
        self.infos: dict[str, dict[str, Any]] = {d: dict(INFO) for d in self.dtypes}
        self.run = SimpleNamespace(
            attached=False,
            server_info=lambda launch: self.infos[launch.name],
            evidence=lambda f, *_: Evidence(path=str(f)),
        )
        self.floor = 0.0

    def pool(self, dtype: str) -> Any:
        return SimpleNamespace(dtype=f"torch.{dtype}", tokens=1000, line_no=1, line="KV", kv_gib=1.0)

    def compared(self, dtype: str) -> Any:
        return compare_scores(scores(documents=6), scores(self.losses.get(dtype, 0.0), 0.01, documents=6), 200)

    def known_floors(self) -> list[Any]:
        return [compare_scores(scores(documents=6), scores(documents=6), 200)]

    def task_results(self, dtype: str) -> list[Any]:
        return []

    def launch_ids(self, *dtypes: str) -> list[str]:
        return [f"L-{d}" for d in dtypes]

    def evidence(self, dtype: str) -> list[Evidence]:
        return [Evidence(path=f"raw/05/{dtype}")]

    def usable(self, dtype: str) -> bool:
        return True

    def blind(self, dtype: str) -> None:
        return None

    def probe(self, dtype: str) -> Any:
        cost = 1.5 if dtype in self.faults else 0.0
        fresh = [-1.0 - i % 7 / 10 for i in range(400)]
        hit = [x - cost + (0.01 if i % 2 else -0.01) for i, x in enumerate(fresh)]
        plan = plan_probe(INFO)
        row = {
            "fresh": fresh,
            "hit": hit,
            "fresh_again": fresh,
            "hit_again": hit,
            "fresh_cached": 0,
            "fresh_again_cached": 0,
        }
        rows = [{**row, "hit_cached": plan.context_tokens}]
        return judge_probe(
            {"plan": plan.model_dump(), "rows": rows, "requests": 4, "tokens_sent": 1, "seconds": 1.0}, 0.05
        )


def recommended(made: Made, passed: list[str]) -> str:
    statuses = [SimpleNamespace(id=i, status=Status.PASS, reason="") for i in ("floor", *passed)]
    probes = [v for d in made.dtypes if (v := kv_verdicts._probe_verdict(made, d)) is not None]  # type: ignore[arg-type]
    losses = [kv_verdicts._loss_verdict(made, d) for d in made.dtypes[1:]]  # type: ignore[arg-type]
    return kv_verdicts.recommendation(made, [*statuses, *probes, *losses])  # type: ignore[arg-type,list-item]


def test_a_faulty_cache_is_never_recommended_and_the_clean_ones_carry_their_price() -> None:
    """H1 on the reference: BF16 over scales is wrong, whatever the comparison says; what measured clean is named with its cost."""
    words = recommended(Made({"scaled-auto": 0.02}, faults=("bf16",)), ["allocated-bf16"])
    assert words.startswith("Never serve with bf16") and "scaled-auto (1,000 tokens in the pool)" in words
    assert "serve with bf16 (" not in words.removeprefix("Never serve with bf16")


def test_a_loss_beyond_the_limit_is_worth_avoiding_and_a_small_one_is_not() -> None:
    """Two claims, two verdicts: worth it passes where the cheap arm loses 0.05, fails where it loses 0.001."""
    made = Made({"fp8_e5m2": -0.05, "fp8_e4m3": -0.001})
    found = {d: kv_verdicts._worth(made, d).status for d in made.losses}  # type: ignore[arg-type]
    assert found == {"fp8_e5m2": Status.PASS, "fp8_e4m3": Status.FAIL}
    effect = kv_verdicts._effect_verdict(made, "fp8_e5m2")  # type: ignore[arg-type]
    assert effect.status == Status.FAIL and "loss" in effect.reason


def test_a_treated_server_that_is_better_makes_the_reference_the_suspect() -> None:
    """Then nothing is said about what the reference is worth."""
    verdict = kv_verdicts._worth(Made({"scaled-auto": 0.5}), "scaled-auto")  # type: ignore[arg-type]
    assert verdict.status == Status.INVALID and "reference is the suspect" in verdict.reason


def test_an_arm_needs_a_trace_of_what_was_asked() -> None:
    """chunked_prefill_size as resolved by the server; an edited checkpoint by another path; nothing asked, nothing compared."""
    arms = (
        ArmParams(id="chunk", flags={"chunked_prefill_size": 128}),
        ArmParams(id="copy", checkpoint=["kv_scales_removed"]),
    )
    made = Made({}, arms=arms)
    assert "asked 128, resolved 512" in str(kv_verdicts._no_trace(made, "chunk"))  # type: ignore[arg-type]
    made.infos["chunk"]["chunked_prefill_size"] = 128
    assert kv_verdicts._no_trace(made, "chunk") is None  # type: ignore[arg-type]
    assert "same checkpoint" in str(kv_verdicts._no_trace(made, "copy"))  # type: ignore[arg-type]
    made.infos["copy"]["model_path"] = "/edited"
    assert kv_verdicts._no_trace(made, "copy") is None  # type: ignore[arg-type]
    assert "changes nothing" in str(kv_verdicts._no_trace(Made({}, arms=(ArmParams(id="none"),)), "none"))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_two_arms_with_one_allocated_dtype_compare_nothing(dtype: str) -> None:
    """Both allocated the same: invalid, never 'no loss'."""
    made = Made({dtype: 0.0})
    made.pool = lambda d: SimpleNamespace(dtype="torch.bfloat16", tokens=1, line_no=1, line="")  # type: ignore[method-assign]
    assert kv_verdicts._effect_verdict(made, dtype).status == Status.INVALID  # type: ignore[arg-type]
    assert kv_verdicts._worth(made, dtype).status == Status.INVALID  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"arms": [{"id": "x"}, {"id": "x"}]},
        {"arms": [{"id": "x", "checkpoint": ["nonsense"]}]},
        {"document_tokens": [1000, 10]},
        {"document_tokens": []},
        {"task_tokens": 100},
    ],
)
def test_wrong_parameters_are_refused(wrong: dict[str, Any]) -> None:
    """Ids twice, an unknown edit, documents too short, tasks without depth."""
    with pytest.raises(BadParams):
        validated(AuditParams, wrong, "05")


@pytest.mark.parametrize(
    ("backend", "first"),
    [("torch_native", 1), ("fa3", 1), ("trtllm_mha", 1), ("triton", 512), ("flashinfer", 512), ("new", 512)],
)
def test_only_backends_that_bypass_the_pool_lose_their_first_chunk(backend: str, first: int) -> None:
    """fa3 reads the pool from its first token: its documents of one chunk are no blind comparison."""
    audit: Any = SimpleNamespace(
        reference="bf16", launches={"bf16": 1, "fp8_e4m3": 2},
        run=SimpleNamespace(server_info=lambda _: {"attention_backend": backend, "chunked_prefill_size": 512}),
    )  # fmt: skip
    assert Audit.first_position(audit, "fp8_e4m3") == first


def test_an_arm_that_computes_nan_fails_and_is_never_recommended() -> None:
    """NaN log-probabilities (seen on an H200: scales too small for the values) are a fault, not a lack of data."""
    made = Made({"scaled": 0.0})
    words = "numbers as log-probabilities of argparse; found: NaN or none at positions [1025, 1026]"
    made.scores["scaled"] = [
        SimpleNamespace(
            ok=False, problem=words, launch_ids=["L"], folder=Path("raw/05/s"), stamp=SimpleNamespace(invalid=None)
        )
    ]
    verdict = kv_verdicts._finite_verdict(made, "scaled")  # type: ignore[arg-type]
    assert verdict and verdict.status is Status.FAIL and "1025" in verdict.reason
    sound = kv_verdicts._finite_verdict(made, "bf16")  # type: ignore[arg-type]
    assert sound and sound.status is Status.PASS
    floor = SimpleNamespace(id="floor", status=Status.PASS, reason="")
    text = kv_verdicts.recommendation(made, [floor, verdict])  # type: ignore[arg-type, list-item]
    assert text.startswith("Never serve with scaled: it computes NaN.") and "scaled is not settled" not in text
