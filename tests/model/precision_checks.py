"""Checks of lib/model/precision.py that need torch; run by test_precision.py with a Python that has it."""

from __future__ import annotations

import json
import math
import sys
import traceback
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

from lib.errors import BadInput
from lib.model import precision as p


def errors(kind: str, keys: int, name: str, path: str, std: float = 2.0, **options: float) -> tuple[float, float]:
    """Mean relative error and mean dropped mass of one arm, d = 256, 16 queries."""
    q, k, v = p.synthetic(kind, 1, 16, keys, 256, std, 7)
    out, dropped = p.attention_output(q, k, v, name, path, **options)  # type: ignore[arg-type]
    return float(p.relative_errors(out, p.exact_output(q, k, v)).mean()), float(dropped.mean())


def check_the_table_of_formats_is_torchs() -> None:
    """Maximum and smallest normal and subnormal value of each float format are those that torch states."""
    for fmt in p.FORMATS.values():
        if fmt.kind == "float":
            info = torch.finfo(getattr(torch, fmt.torch_dtype))
            assert (fmt.maximum, fmt.min_normal) == (info.max, info.smallest_normal), fmt
            smallest = torch.tensor([fmt.min_subnormal]).to(getattr(torch, fmt.torch_dtype)).float().item()
            below = torch.tensor([fmt.min_subnormal * 0.49]).to(getattr(torch, fmt.torch_dtype)).float().item()
            assert smallest == fmt.min_subnormal and below == 0, fmt


def check_round_trip_of_known_numbers() -> None:
    """0.3 comes back as 0.3125 (e4m3, e5m2) and 0.30078125 (bf16); exact powers of two come back as they are."""
    x = torch.tensor([0.3, 1.0, -2.0])
    assert p.round_trip(x, "fp8_e4m3").tolist() == [0.3125, 1.0, -2.0]
    assert p.round_trip(x, "fp8_e5m2").tolist() == [0.3125, 1.0, -2.0]
    assert p.round_trip(x, "bf16").tolist() == [0.30078125, 1.0, -2.0]
    assert p.round_trip(x, "int8", 0.1).tolist() == [torch.tensor(3 * 0.1).item(), 1.0, -2.0]


def check_a_scale_moves_the_range_and_not_the_mantissa() -> None:
    """e4m3 of 896 with scale 2 is exact; N(0, 1) loses the same 2.6% with and without a calibrated scale."""
    assert p.round_trip(torch.tensor([896.0]), "fp8_e4m3", 2.0).item() == 896.0
    assert p.calibrated_scale(torch.tensor([-896.0, 3.0]), "fp8_e4m3") == 2.0
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(1))
    one = p.rounding_losses(x, "fp8_e4m3")["relative_rms_error"]
    scaled = p.rounding_losses(x, "fp8_e4m3", p.calibrated_scale(x, "fp8_e4m3"))["relative_rms_error"]
    assert abs(one - 0.0265) < 0.0005 and abs(scaled - one) < 0.001, (one, scaled)


def check_e2m1_rounds_to_the_nearest_of_its_eight_values() -> None:
    """Every value between two neighbours goes to the nearer one, ties to the even mantissa, 7 saturates at 6."""
    grid = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    x = torch.linspace(-7, 7, 2801)
    got = p._round_e2m1(x)
    for value, rounded in zip(x.tolist(), got.tolist(), strict=True):
        best = min(abs(abs(value) - g) for g in grid)
        assert abs(abs(abs(value) - abs(rounded)) - best) < 1e-5, (value, rounded)
    assert p._round_e2m1(torch.tensor([0.25, 0.75, 2.5, 5.0])).tolist() == [0.0, 1.0, 2.0, 4.0]


def check_block_formats_scale_each_block_by_itself() -> None:
    """A block of tiny values beside one of large values keeps its own precision; a zero block stays zero."""
    x = torch.cat([torch.full((16,), 6e-3), torch.full((16,), 6.0), torch.zeros(16)]).unsqueeze(0)
    for name in ("nvfp4", "fp4_mx_block16"):
        back = p.round_trip(x, name)
        assert ((back - x).abs() <= 0.26 * x.abs()).all(), (name, back)
        assert (back[0, 32:] == 0).all()
    try:
        p.round_trip(torch.ones(1, 24), "nvfp4")
    except BadInput as error:
        assert "24" in str(error)
    else:
        raise AssertionError("a head_dim that is no multiple of 16 must be refused")


def check_losses_are_told_apart() -> None:
    """Too large is clipped, too small flushed or subnormal, the rest mantissa; the shares of elements add up to 1."""
    x = torch.tensor([1000.0] + [2.0**-12] * 2 + [2.0**-8] * 3 + [1.1] * 4)
    found = p.rounding_losses(x, "fp8_e4m3")
    assert [round(found[f"{c}_frac"] * 10) for c in ("clipped", "flushed", "subnormal", "mantissa")] == [1, 2, 3, 4]
    assert found["clipped_error_frac"] > 0.99
    scaled = p.rounding_losses(x, "fp8_e4m3", 1000.0 / 448.0)
    assert scaled["clipped_frac"] == 0
    exact = p.rounding_losses(torch.ones(8), "fp8_e4m3")
    assert exact["relative_rms_error"] == 0 and exact["mantissa_error_frac"] is None


def check_without_rounding_the_kernel_is_exact() -> None:
    """bf16 storage of bf16 values is exact to float32, for any context length, also one that fills no block or split."""
    for keys in (1, 31, 33, 257, 4099):
        q, k, v = p.synthetic("gaussian", 2, 3, keys, 64, 2.0 if keys > 1 else 1.0, 3) if keys > 1 else (
            torch.ones(2, 3, 64).bfloat16(), torch.ones(2, 1, 64).bfloat16(), torch.ones(2, 1, 64).bfloat16()
        )  # fmt: skip
        out, dropped = p.attention_output(q, k, v, "bf16", "storage")
        assert float(p.relative_errors(out, p.exact_output(q, k, v)).max()) < 2e-6, keys
        assert float(dropped.max()) == 0


def check_the_exact_output_is_torchs_attention() -> None:
    """The float64 reference agrees with torch's own scaled_dot_product_attention in float64."""
    q, k, v = p.synthetic("student_t3", 2, 4, 500, 64, 2.0, 5)
    theirs = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert float((p.exact_output(q, k, v) - theirs).abs().max()) < 1e-12


def check_dropped_mass_is_what_the_cast_flushes() -> None:
    """With every weight but one below e4m3's half smallest subnormal, all but that one is dropped; the lift keeps them."""
    d, keys = 64, 32  # one block: one logit 0, 31 at -8; exp(-8) = 0.000335 < 2^-10 = 0.00098
    k = torch.zeros(1, keys, d)
    k[0, 0, 0] = 8.0
    q = torch.zeros(1, 1, d)
    q[0, 0, 0] = 8.0  # 8 * 8 / sqrt(64) = 8
    v = torch.ones(1, keys, d)
    expected = 31 * math.exp(-8) / (1 + 31 * math.exp(-8))
    out, dropped = p.attention_output(q, k, v, "fp8_e4m3", "triton")
    assert abs(float(dropped) - expected) < 1e-6
    assert abs(float(out[0, 0, 0]) - (1 - expected)) < 1e-6
    lifted, none = p.attention_output(q, k, v, "fp8_e4m3", "lifted")
    assert float(none) == 0 and abs(float(lifted[0, 0, 0]) - 1) < 0.002


def check_storage_and_the_triton_path_part_with_the_context() -> None:
    """With values of a shared mean, storage falls with the context (averaging) while the Triton path grows (dropped mass)."""
    storage = [errors("gaussian_mean", n, "fp8_e4m3", "storage")[0] for n in (2048, 16384)]
    triton = [errors("gaussian_mean", n, "fp8_e4m3", "triton") for n in (2048, 16384, 65536)]
    assert storage[1] < storage[0] / 2, storage
    assert triton[2][0] > triton[0][0] and triton[2][0] > 4 * storage[1], triton
    assert triton[0][1] < triton[1][1] < triton[2][1]
    lifted = errors("gaussian_mean", 65536, "fp8_e4m3", "lifted")[0]
    assert lifted < triton[2][0] / 4


def check_values_without_a_mean_lose_the_same_at_any_context() -> None:
    """With zero-mean values the output shrinks as its error does: the relative error of storage does not fall."""
    storage = [errors("gaussian", n, "fp8_e4m3", "storage")[0] for n in (2048, 32768)]
    assert 0.6 < storage[1] / storage[0] < 1.6, storage


def check_formats_are_ordered() -> None:
    """bf16 loses least, then int8 and e4m3, then e5m2, then FP4, on Gaussian data."""
    found = {n: errors("gaussian", 2048, n, "storage")[0] for n in ("bf16", "fp8_e4m3", "fp8_e5m2", "nvfp4")}
    values = list(found.values())
    assert values == sorted(values), found


def check_scales_fold_into_logits_and_output() -> None:
    """A cache whose values are 1000 times too large is ruined at scale 1 and as good as ever with calibrated scales."""
    q, k, v = p.synthetic("gaussian", 1, 4, 512, 64, 2.0, 11)
    q, k, v = q / 1000, k.float() * 1000, v.float() * 1000
    exact = p.exact_output(q, k, v)
    scales = (p.calibrated_scale(k, "fp8_e4m3"), p.calibrated_scale(v, "fp8_e4m3"))
    plain, _ = p.attention_output(q, k, v, "fp8_e4m3", "storage")
    good, _ = p.attention_output(q, k, v, "fp8_e4m3", "storage", *scales)
    assert float(p.relative_errors(good, exact).mean()) < 0.12
    ruined = p.relative_errors(plain, exact)
    assert not bool(torch.isfinite(ruined).all()) or float(ruined.mean()) > 0.5


def check_overflow_is_asked_of_torch() -> None:
    """What happens beyond the range is one of three words, and what a round trip really does."""
    for name in ("fp8_e4m3", "fp8_e5m2"):
        word = p.overflow_of(name)
        back = p.round_trip(torch.tensor([1e6]), name).item()
        assert {"nan": math.isnan(back), "inf": math.isinf(back), "saturates": math.isfinite(back)}[word]


def check_bad_names_are_refused() -> None:
    """Unknown formats, paths and kinds, and a path that a format can't take, are one clear error each."""
    q, k, v = p.synthetic("gaussian", 1, 1, 64, 64, 2.0, 1)
    for call in (
        lambda: p.known_format("fp8"), lambda: p.attention_output(q, k, v, "bf16", "fa9"),
        lambda: p.attention_output(q, k, v, "nvfp4", "triton"), lambda: p.synthetic("cauchy", 1, 1, 8, 8, 1.0, 1),
    ):  # fmt: skip
        try:
            call()
        except BadInput:
            continue
        raise AssertionError("accepted")


if __name__ == "__main__":
    torch.set_num_threads(2)
    found = {}
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            try:
                check()
                found[name] = "ok"
            except Exception:  # noqa: BLE001
                found[name] = traceback.format_exc()[-1500:]
    print(json.dumps(found))
