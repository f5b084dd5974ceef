"""Edited copies of a checkpoint: small files rewritten, weights linked, so that a cure can be tried without touching the original.

A copy lies in the cache folder under the hash of its source and edits, and is made once. What an edit is for:

    fp8_kv_declared            hf_quant_config.json declares an FP8 KV cache, weights stay as they are
    kv_scales_added            one k_scale and one v_scale a layer, as a calibrated checkpoint carries them
    kv_scales_removed          the same checkpoint without scale tensors
    kv_cache_quant_algo_null   the declaration taken back, tensors stay

Source: docs/sources.md, H1 (which of these removed the fault on an H200).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib.errors import BadInput
from lib.model.cache import STAMP, cache_dir

#: Scales of the usual size of calibrated ones (largest absolute key or value / 448). Source: H1, L2.
K_SCALE, V_SCALE = 0.125, 0.0625
#: Name of the file that `kv_scales_added` puts beside the weights.
SCALES_FILE = "model-kv-scales.safetensors"
_SUFFIXES = ("k_scale", "v_scale", "kv_scale", "k_proj.output_scale", "v_proj.output_scale")


def edited_checkpoint(source: Path, edits: Sequence[str]) -> Path:
    """The folder of an edited copy of `source`, made if it is not there.

    Raises:
        BadInput: an edit finds nothing to change.
    """
    files = sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in source.iterdir() if p.is_file())
    name = hashlib.sha256(json.dumps([str(source.resolve()), files, list(edits)]).encode()).hexdigest()[:16]
    target = cache_dir() / "edited" / f"{source.name}-{name}"
    if target.is_dir():
        return target
    made = target.with_name(f".{target.name}-{os.getpid()}")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    try:
        for file in source.iterdir():
            if file.is_file() and file.name != STAMP:
                (made / file.name).symlink_to(file.resolve())
        for edit in edits:
            _EDITS[edit](made)
        made.replace(target)
    except OSError:
        if not target.is_dir():  # another process was faster
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def _rewrite(file: Path, content: Any) -> None:
    file.unlink(missing_ok=True)
    file.write_text(json.dumps(content, indent=2))


def _read(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text())) if file.exists() else {}


def _declare(folder: Path) -> None:
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["*"]}
    _rewrite(
        folder / "hf_quant_config.json",
        {"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": quantization},
    )


def _take_back(folder: Path) -> None:
    changed = False
    declared = _read(folder / "hf_quant_config.json")
    if (declared.get("quantization") or {}).get("kv_cache_quant_algo"):
        declared["quantization"]["kv_cache_quant_algo"] = None
        _rewrite(folder / "hf_quant_config.json", declared)
        changed = True
    config = _read(folder / "config.json")
    quantization = config.get("quantization_config") or {}
    found = [k for k in ("kv_cache_scheme", "kv_cache_quant_algo") if quantization.get(k)]
    if found:
        config["quantization_config"] = {k: (None if k in found else v) for k, v in quantization.items()}
        _rewrite(folder / "config.json", config)
        changed = True
    if not changed:
        raise BadInput("a checkpoint that declares a quantized KV cache", "it declares none", "drop this edit")


def _add_scales(folder: Path) -> None:
    config = _read(folder / "config.json")
    config = config.get("text_config") or config
    layers = int(config.get("num_hidden_layers") or 0)
    if not layers:
        raise BadInput("config.json with num_hidden_layers", "none", "drop this edit")
    names = {
        f"model.layers.{n}.self_attn.{w}_proj.{w}_scale": scale
        for n in range(layers)
        for w, scale in (("k", K_SCALE), ("v", V_SCALE))
    }
    header = {n: {"dtype": "F32", "shape": [], "data_offsets": [4 * i, 4 * i + 4]} for i, n in enumerate(names)}
    _write_tensors(folder / SCALES_FILE, header, b"".join(struct.pack("<f", scale) for scale in names.values()))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        listed = _read(index)
        listed["weight_map"] |= dict.fromkeys(names, SCALES_FILE)
        _rewrite(index, listed)


def _write_tensors(file: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _remove_scales(folder: Path) -> None:
    removed = 0
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
            start = 8 + length
            scales = [n for n in header if n.endswith(_SUFFIXES)]
            if not scales:
                continue
            removed += len(scales)
            kept = {n: v for n, v in header.items() if n not in scales and n != "__metadata__"}
            fresh = file.with_name(f"{file.name}.new")
            if kept:
                _copy_tensors(stream, start, kept, fresh)
        file.unlink()
        if kept:
            fresh.rename(file)
    index = folder / "model.safetensors.index.json"
    if index.exists() and removed:
        listed = _read(index)
        listed["weight_map"] = {n: f for n, f in listed["weight_map"].items() if not n.endswith(_SUFFIXES)}
        _rewrite(index, listed)
    if not removed:
        raise BadInput("a checkpoint with k_scale and v_scale tensors", "it has none", "drop this edit")


def _copy_tensors(stream: Any, start: int, kept: dict[str, Any], target: Path) -> None:
    order = sorted(kept.items(), key=lambda item: item[1]["data_offsets"][0])
    header, place = {}, 0
    for name, entry in order:
        first, last = entry["data_offsets"]
        header[name] = {**entry, "data_offsets": [place, place + last - first]}
        place += last - first
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with target.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _, entry in order:
            first, last = entry["data_offsets"]
            stream.seek(start + first)
            left = last - first
            while left:
                piece = stream.read(min(left, 1 << 24))
                if not piece:
                    raise BadInput("a whole safetensors file", f"{target.name} is cut off", "download it again")
                out.write(piece)
                left -= len(piece)


_EDITS = {
    "fp8_kv_declared": _declare,
    "kv_scales_added": _add_scales,
    "kv_scales_removed": _remove_scales,
    "kv_cache_quant_algo_null": _take_back,
}
