"""Edited copies of a checkpoint: scales added and removed, declarations made and taken back, the original untouched."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest

from lib.audit.edits import SCALES_FILE, edited_checkpoint
from lib.audit.edits_there import edited_there
from lib.errors import BadInput
from lib.hosts.base import LocalHost
from lib.params import HostParams
from lib.server.remote import Place


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of two tensors in one file, one of them a k_scale."""
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}))
    entries = {
        "model.layers.0.self_attn.k_proj.k_scale": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
        "model.norm.weight": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
    }
    header = json.dumps(entries).encode()
    data = struct.pack("<fff", 0.5, 1.0, 2.0)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + data)
    return folder


def tensors(file: Path) -> dict[str, tuple[float, ...]]:
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    header.pop("__metadata__", None)
    parts = {name: data[slice(*entry["data_offsets"])] for name, entry in header.items()}
    return {name: struct.unpack(f"<{len(part) // 4}f", part) for name, part in parts.items()}


def test_scales_are_removed_and_the_other_tensors_stay(source: Path) -> None:
    """The copy holds the weight with its values; the original keeps its scale."""
    before = (source / "model.safetensors").read_bytes()
    made = edited_checkpoint(source, ["kv_scales_removed"])
    assert tensors(made / "model.safetensors") == {"model.norm.weight": (1.0, 2.0)}
    assert (source / "model.safetensors").read_bytes() == before


def test_scales_are_added_for_every_layer_beside_linked_weights(source: Path) -> None:
    """Two layers, K and V each, under the names of a calibrated checkpoint."""
    made = edited_checkpoint(source, ["fp8_kv_declared", "kv_scales_added"])
    found = tensors(made / SCALES_FILE)
    assert sorted(found) == sorted(f"model.layers.{n}.self_attn.{w}_proj.{w}_scale" for n in (0, 1) for w in "kv")
    assert found["model.layers.1.self_attn.v_proj.v_scale"][0] == pytest.approx(0.0625)
    assert (made / "model.safetensors").is_symlink() and not (source / SCALES_FILE).exists()
    assert json.loads((made / "hf_quant_config.json").read_text())["quantization"]["kv_cache_quant_algo"] == "FP8"


def test_an_index_lists_added_scales(source: Path) -> None:
    """A loader that reads the index only would leave them out."""
    (source / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": "model.safetensors"}})
    )
    made = edited_checkpoint(source, ["kv_scales_added"])
    assert (
        list(json.loads((made / "model.safetensors.index.json").read_text())["weight_map"].values()).count(SCALES_FILE)
        == 4
    )


def test_a_declaration_is_taken_back_in_both_places(source: Path) -> None:
    """hf_quant_config.json and config.json; what else they say stays."""
    (source / "config.json").write_text(
        json.dumps({"quantization_config": {"kv_cache_scheme": {"num_bits": 8}, "quant_method": "m"}})
    )
    made = edited_checkpoint(source, ["fp8_kv_declared", "kv_cache_quant_algo_null"])
    declared = json.loads((made / "hf_quant_config.json").read_text())["quantization"]
    assert declared["kv_cache_quant_algo"] is None and declared["quant_algo"] == "FP8"
    assert json.loads((made / "config.json").read_text())["quantization_config"] == {
        "kv_cache_scheme": None,
        "quant_method": "m",
    }


def test_the_copy_is_made_once_and_another_source_is_another_copy(source: Path) -> None:
    """The name is the hash of source and edits."""
    first = edited_checkpoint(source, ["kv_scales_removed"])
    assert edited_checkpoint(source, ["kv_scales_removed"]) == first != edited_checkpoint(source, ["kv_scales_added"])
    (source / "more.txt").write_text("x")
    assert edited_checkpoint(source, ["kv_scales_removed"]) != first


def test_an_edit_without_anything_to_change_is_refused(source: Path, tmp_path: Path) -> None:
    """Taking back a declaration that is not there, removing scales twice: no copy is left."""
    with pytest.raises(BadInput, match="declares none"):
        edited_checkpoint(source, ["kv_cache_quant_algo_null"])
    with pytest.raises(BadInput, match="it has none"):
        edited_checkpoint(source, ["kv_scales_removed", "kv_scales_removed"])
    assert not list((tmp_path / "cache" / "edited").glob("*"))


def test_an_edited_copy_is_made_on_the_host_and_only_its_name_comes_back(source: Path) -> None:
    """The same edit by an interpreter there (here: this machine's, behind a host's interface), and its refusal in its own words."""
    with LocalHost() as host:
        place = Place(host, HostParams(client_python=sys.executable))
        made = Path(edited_there(place, str(source), ["kv_scales_removed"]))
        assert made == edited_checkpoint(source, ["kv_scales_removed"]) and made != source
        assert tensors(made / "model.safetensors") == {"model.norm.weight": (1.0, 2.0)}
        with pytest.raises(BadInput, match="declares none"):
            edited_there(place, str(source), ["kv_cache_quant_algo_null"])
        with pytest.raises(BadInput, match="checkpoint folder on this machine"):
            edited_there(place, "/no/such", ["kv_scales_removed"])
