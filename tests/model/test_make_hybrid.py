"""The tiny hybrid: names and counts from its sizes alone, NVFP4 that reads back, and a training that leaves a whole checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from lib.model import make_hybrid as mh
from lib.model import make_models
from lib.params import ROOT
from lib.server.spec import resolve_model

SERVER_PYTHON = ROOT / ".venv-sglang" / "bin" / "python"


def test_every_fourth_layer_has_full_attention() -> None:
    """Eight layers: the fourth and the eighth."""
    assert mh.full_attention() == [3, 7]


def test_the_geometry_is_that_of_the_recorded_runs() -> None:
    """2,048 B of K a token in bfloat16 (2 layers x 2 heads x 256 x 2 B), as tests/data/memory says of m1."""
    assert 2 * len(mh.full_attention()) * mh.HYBRID["num_key_value_heads"] * mh.HYBRID["head_dim"] == 2048


def test_counts_by_hand() -> None:
    """One full layer and one of the delta rule, added up by hand, differ by what their mixers differ."""
    sizes = {**mh.HYBRID, "num_hidden_layers": 1, "full_attention_interval": 1}
    # q+gate 2x8x256x512, k and v 2x256x512 each, o 2048x512, two norms of 256
    full = 2 * 2048 * 512 + 2 * 512 * 512 + 2048 * 512 + 512
    # qkv (2x512+1024) x (512+4), z 1024x512, b and a 8x512 each with A_log and dt_bias, norm 128, out 512x1024
    linear = 2048 * 516 + 1024 * 512 + 2 * 8 * 513 + 128 + 512 * 1024
    with_full = mh.size(sizes)[1]
    with_linear = mh.size({**sizes, "full_attention_interval": 2})[1]
    assert with_full - with_linear == full - linear


def test_embedded_models_are_the_default_and_hybrids_only_by_name() -> None:
    """A newcomer's set-up makes what it made before."""
    models = make_models.table()
    assert [m.name for m in models.values() if m.embedded] == [
        "smollm2-135m-instruct", "tiny-qwen3", "tiny-qwen3-fp8kv", "tiny-qwen3-fp8kv-scaled",
    ]  # fmt: skip
    assert {"tiny-qwen3.5-moe", "tiny-qwen3.5-moe-fp8kv", "tiny-qwen3.5-moe-fp8kv-scaled", "tiny-qwen3.5-moe-nvfp4"} <= set(models)


def test_experts_are_stored_one_by_one() -> None:
    """A fused tensor of two experts becomes gate and up of each."""

    class Fused(list[object]):
        pass

    class Matrix:
        def __init__(self, name: str) -> None:
            self.name = name

        def chunk(self, parts: int, dim: int) -> list[str]:
            return [f"{self.name}/{part}" for part in range(parts)]

    names = dict(mh.split_experts("x.mlp.experts.gate_up_proj", Fused([Matrix("a"), Matrix("b")])))
    assert names == {
        "x.mlp.experts.0.gate_proj.weight": "a/0", "x.mlp.experts.0.up_proj.weight": "a/1",
        "x.mlp.experts.1.gate_proj.weight": "b/0", "x.mlp.experts.1.up_proj.weight": "b/1",
    }  # fmt: skip


def server_python(code: str, **more: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **more}
    done = subprocess.run([str(SERVER_PYTHON), "-c", code], capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.server
def test_nvfp4_reads_back_what_four_bits_can_say() -> None:
    """Values on the E2M1 grid come back exactly; random ones within half of the coarsest step (a sixth) of their block's largest."""
    code = """
import torch
from lib.model import make_hybrid as mh
grid = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 6]).repeat(4, 2)
exact = mh.from_nvfp4(mh.nvfp4(grid))
assert torch.equal(exact, grid), (exact - grid).abs().max()
torch.manual_seed(0)
x = torch.randn(64, 128)
stored = mh.nvfp4(x)
assert stored['weight'].shape == (64, 64) and stored['weight_scale'].shape == (64, 8)
assert stored['weight_scale'].dtype == torch.float8_e4m3fn
off = (mh.from_nvfp4(stored) - x).abs().reshape(64, 8, 16)
assert (off <= 0.19 * x.abs().reshape(64, 8, 16).amax(-1, keepdim=True)).all()
assert torch.equal(mh.from_nvfp4(mh.nvfp4(torch.zeros(16, 16))), torch.zeros(16, 16))
print('fine')
"""
    assert "fine" in server_python(code)


@pytest.mark.server
@pytest.mark.timeout(280)
def test_a_training_leaves_a_whole_checkpoint_that_transformers_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few steps on the CPU: loss curve, hash, held-out loss of both heads, and the names and counts of the published form."""
    argv = [
        str(SERVER_PYTHON), "lib/model/train_tiny.py", "--out", str(tmp_path / "models" / "trained"), "--steps", "3", "--hidden", "32",
        "--layers", "4", "--vocabulary", "512", "--batch", "1", "--length", "24", "--characters", "600000",
    ]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(p.name for p in (tmp_path / "models").iterdir()) == ["trained"]  # nothing half-made beside it
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path))
    assert resolve_model("trained") == (tmp_path / "models" / "trained").resolve()  # `server.model: trained` finds it
    tmp_path = tmp_path / "models" / "trained"
    said = json.loads((tmp_path / "training.json").read_text())
    assert said["steps"] == 3 and [row[0] for row in said["curve"]] == [0, 2] and said["seed"] == 7
    assert said["weights_sha256"] == make_models.sha256_of(tmp_path / "model.safetensors")
    # untrained heads are about as good as a uniform guess over 512 tokens: ln 512 = 6.24
    assert abs(said["held_out_nats"] - said["uniform_nats"]) < 1 and abs(said["held_out_mtp_nats"] - said["uniform_nats"]) < 1
    assert 0 <= said["held_out_mtp_agreement"] <= 1
    code = f"""
from safetensors import safe_open
from transformers import Qwen3_5MoeForConditionalGeneration as Q
names = list(safe_open({str(tmp_path / "model.safetensors")!r}, 'pt').keys())
assert 'mtp.layers.0.mlp.experts.0.gate_proj.weight' in names and 'model.language_model.layers.3.self_attn.q_proj.weight' in names
model, how = Q.from_pretrained({str(tmp_path)!r}, output_loading_info=True)
assert not how['missing_keys'], how
print('fine')
"""
    assert "fine" in server_python(code)
