"""Read a checkpoint folder: its JSON files, its safetensors headers and its scalar k/v scales; never the weights."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import os
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pydantic_core import from_json

from lib.errors import BadInput, UnknownArchitecture, UnreadableFile
from lib.model.architectures import architecture, architecture_name, text_config
from lib.model.facts import Architecture, Checkpoint, ScaleTensors
from lib.model.quantization import declared_quantization, model_dtype, weights_quantized

#: safetensors' own limit for a header (its Rust reader refuses larger ones).
MAX_HEADER_BYTES = 100_000_000
MAX_JSON_BYTES = 256 << 20
#: A file name that claims more shards is not believed.
MAX_SHARDS = 10_000
#: k_scale and v_scale wherever they hang (ModelOpt, compressed-tensors), Quark's output_scale, and the old shared
#: kv_scale.
_SCALE = re.compile(r"(?:^|[._])(kv?|v)_scale$|\.(k|v)_proj\.output_scale$")
_NUMBERED = re.compile(r"(.*)-(\d{1,6})-of-(\d{1,6})\.safetensors")
_DRAFT = re.compile(r"^(?:mtp\.|model\.mtp\.|.*\.mtp_layers?\.)|nextn")
_LAYER = re.compile(r"\.\d+\.")
_DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
}
#: The small files that say what a model is; their order is the order of the fingerprint.
JSON_FILES = (
    "config.json",
    "hf_quant_config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "chat_template.json",
    "quantize_config.json",
    "preprocessor_config.json",
)


class Tensor(NamedTuple):
    """One entry of a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """A safetensors header: its tensors, where the data begins, the file's size and the hash of the header's bytes."""

    tensors: dict[str, Tensor]
    data_start: int
    file_size: int
    sha256: str


def _unreadable(path: Path, expected: str, found: str, do: str) -> UnreadableFile:
    return UnreadableFile(f"{path.name}: expected {expected}", found, do)


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large for a number")
    return value


def _parse(raw: bytes) -> Any:
    """JSON without NaN, Infinity, overflowing numbers or lone surrogates, none of which may reach an output."""
    text = raw.decode("utf-8-sig")
    data = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    if b"\\ud" in raw or b"\\uD" in raw:
        json.dumps(data, ensure_ascii=False).encode("utf-8")
    return data


def _parse_large(raw: bytes) -> Any:
    """JSON of hundreds of thousands of entries (headers, the index): the parser that pydantic ships, 2 to 4 times
    json's speed.

    Only names, whole numbers and shapes are taken out of it, each checked, so an overflowing float does no harm.
    """
    return from_json(raw.removeprefix(b"\xef\xbb\xbf"), allow_inf_nan=False)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Hold back the cycle collector while millions of small objects without cycles are made: measured, it costs half
    the time.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def read_json(path: Path, *, large: bool = False) -> dict[str, Any]:
    """A JSON object from a file of bounded size; NaN and Infinity are refused, as in the JSON standard.

    Args:
        path: the file.
        large: the safetensors index, which has a line for each tensor.

    Raises:
        UnreadableFile: missing, not a regular file, too large, not UTF-8, not JSON, or not an object.
    """
    do = "use the model's original file"
    try:
        if not path.is_file():
            raise _unreadable(path, "a file", "none, or something else", do)
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise _unreadable(path, f"at most {MAX_JSON_BYTES >> 20} MiB", f"{size >> 20} MiB", do)
        data = (_parse_large if large else _parse)(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, UnreadableFile):
            raise
        raise _unreadable(path, "a JSON object", _why(error), do) from error
    if not isinstance(data, dict):
        raise _unreadable(path, "a JSON object", type(data).__name__, do)
    return data


def _why(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return (text or type(error).__name__)[:200]


def read_safetensors_header(path: Path) -> Header:
    """The header of one safetensors file, checked against the file's size; the weights are not read.

    The file is 8 bytes of little-endian length, that many bytes of JSON, then the tensors' bytes.

    Raises:
        UnreadableFile: missing, truncated, a length beyond the file or MAX_HEADER_BYTES, not JSON, or offsets outside
            the file.

    Source: the safetensors format, github.com/huggingface/safetensors README, 'Format'.
    """
    do = "download the shard again"
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise _unreadable(path, "a safetensors file", f"{size} bytes", do)
            (length,) = struct.unpack("<Q", prefix)
            if length < 2 or length > size - 8 or length > MAX_HEADER_BYTES:
                raise _unreadable(
                    path,
                    "a safetensors header inside the file",
                    f"a header length of {length} in a file of {size} bytes",
                    do,
                )
            raw = file.read(length)
        if len(raw) != length:
            raise _unreadable(path, f"a header of {length} bytes", f"{len(raw)} bytes", do)
        entries = _parse_large(raw)
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, UnreadableFile):
            raise
        raise _unreadable(path, "a safetensors header", _why(error), do) from error
    if not isinstance(entries, dict):
        raise _unreadable(path, "a safetensors header that is a JSON object", type(entries).__name__, do)
    return Header(_tensors(path, entries, size - 8 - length), 8 + length, size, hashlib.sha256(raw).hexdigest())


def _tensors(path: Path, entries: dict[str, Any], data_size: int) -> dict[str, Tensor]:
    """Checked header entries: known fields, offsets in the file, and as many bytes as dtype and shape ask for.

    A plain loop: a checkpoint of 512 experts has 370,000 entries.
    """
    tensors: dict[str, Tensor] = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            count = 1
            for n in shape:
                if type(n) is not int or n < 0:
                    raise TypeError
                count *= n
            if type(dtype) is not str or type(shape) is not list or type(begin) is not int or type(end) is not int:
                raise TypeError
        except (TypeError, KeyError, ValueError):
            raise _unreadable(
                path,
                "dtype, shape and data_offsets for each tensor",
                f"{name[:80]}: {str(entry)[:80]}",
                "download the shard again",
            ) from None
        if not 0 <= begin <= end <= data_size:
            raise _unreadable(
                path,
                "all tensors inside the file",
                f"{name[:80]} ends at {end} of {data_size} data bytes",
                "download the shard again: it is cut short",
            )
        width = _DTYPE_BYTES.get(dtype)
        if width is not None and count * width != end - begin:
            raise _unreadable(
                path,
                "as many bytes as dtype and shape ask for",
                f"{name[:80]}: {dtype} {shape} in {end - begin} bytes",
                "download it again",
            )
        tensors[name] = Tensor(dtype, tuple(shape), begin, end)
    return tensors


def scalar_value(dtype: str, raw: bytes) -> float | None:
    """The first number in `raw` by its safetensors dtype; None for a dtype that this reader doesn't know."""
    if dtype == "BF16" and len(raw) >= 2:
        return float(struct.unpack("<f", b"\0\0" + raw[:2])[0])
    form = {"F64": "<d", "F32": "<f", "F16": "<e", "I8": "<b", "U8": "<B", "I16": "<h", "I32": "<i", "I64": "<q"}.get(
        dtype
    )
    if form is not None and len(raw) >= struct.calcsize(form):
        return float(struct.unpack_from(form, raw)[0])
    if dtype in ("F8_E4M3", "F8_E5M2") and raw:
        return _float8(raw[0], 4 if dtype == "F8_E4M3" else 5)
    if dtype == "F8_E8M0" and raw:
        return math.nan if raw[0] == 255 else 2.0 ** (raw[0] - 127)
    return None


def _float8(byte: int, exponent_bits: int) -> float:
    """An FP8 number: e4m3 (finite only, bias 7) or e5m2 (IEEE-like, bias 15)."""
    mantissa_bits = 7 - exponent_bits
    bias = (1 << (exponent_bits - 1)) - 1
    exponent, mantissa = (byte & 0x7F) >> mantissa_bits, byte & ((1 << mantissa_bits) - 1)
    sign = -1.0 if byte & 0x80 else 1.0
    top = (1 << exponent_bits) - 1
    if exponent == top and (exponent_bits == 5 or mantissa == 7):
        return math.nan if mantissa else sign * math.inf
    if exponent == 0:
        return float(sign * mantissa * 2.0 ** (1 - bias - mantissa_bits))
    return float(sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias))


def _shard_names(folder: Path, index: Mapping[str, Any] | None) -> tuple[list[str], list[str]]:
    """Safetensors files of the folder that hold the model, and what is wrong with the index (missing shards)."""
    present = sorted(p.name for p in folder.glob("*.safetensors"))
    if index is None:
        # Mistral's folders hold the same weights twice, as consolidated.safetensors and in the usual form.
        usual = [name for name in present if not name.startswith("consolidated")] or present
        numbered = [match for name in usual if (match := _NUMBERED.fullmatch(name))]
        for first in numbered[:1]:
            count = min(int(first[3]), MAX_SHARDS)
            width = len(first[2])
            wanted = [f"{first[1]}-{i:0{width}d}-of-{first[3]}.safetensors" for i in range(1, count + 1)]
            return sorted({*usual, *wanted}), [name for name in wanted if name not in present]
        return usual, []
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, Mapping) or not all(isinstance(v, str) for v in weight_map.values()):
        raise UnreadableFile(
            "model.safetensors.index.json: expected a weight_map of tensor to file", "none", "download the index again"
        )
    wanted = sorted(set(weight_map.values()))
    if foreign := [
        name
        for name in wanted
        if "/" in name or "\\" in name or name.startswith(".") or not name.endswith(".safetensors")
    ]:
        raise UnreadableFile(
            "model.safetensors.index.json: expected file names of this folder",
            ", ".join(n[:60] for n in foreign[:3]),
            "download the index again",
        )
    return wanted, sorted(set(wanted) - set(present))


def _read_headers(folder: Path, index: Mapping[str, Any] | None) -> dict[str, Header]:
    """The headers of all shards; every shard that is missing or broken is named in one message."""
    names, absent_names = _shard_names(folder, index)
    missing = dict.fromkeys(absent_names)
    headers: dict[str, Header] = {}
    broken = []
    for name in names:
        if name not in missing:
            try:
                headers[name] = read_safetensors_header(folder / name)
            except UnreadableFile as error:
                broken.append(str(error))
    if missing or broken:
        told = (
            [
                f"{len(missing)} of {len(names)} shards are missing "
                f"({', '.join(absent_names[:4])}{', ...' if len(missing) > 4 else ''})"
            ]
            if missing
            else []
        )
        raise UnreadableFile(
            f"{folder.name}: expected all {len(names)} safetensors files whole",
            "; ".join(told + broken[:4]) + (f"; {len(broken) - 4} more are broken" if len(broken) > 4 else ""),
            "download what is missing",
        )
    if index is not None:
        absent = sorted(
            index["weight_map"].keys() - set().union(*(header.tensors.keys() for header in headers.values()))
        )
        if absent:
            raise UnreadableFile(
                f"{folder.name}: expected every tensor of the index in its shard",
                f"{len(absent)} are not there, first {absent[0][:80]}",
                "index and shards are of different downloads: download both again",
            )
    return headers


def _scales(folder: Path | None, headers: Mapping[str, Header]) -> ScaleTensors:
    """All k/v scale tensors: names, counts and, for scalars, values (a seek and a few bytes each)."""
    names: list[str] = []
    forms: Counter[str] = Counter()
    values: dict[str, list[float]] = {"k": [], "v": []}
    counts: Counter[str] = Counter()
    unread: list[str] = []
    for shard, header in headers.items():
        found = [
            (match[1] or match[2], name, tensor)
            for name, tensor in header.tensors.items()
            if name.endswith(("k_scale", "v_scale", "output_scale")) and (match := _SCALE.search(name))
        ]
        if not found:
            continue
        file: BinaryIO | None = (folder / shard).open("rb") if folder is not None else None
        try:
            for letter, name, tensor in found:
                for one in letter:
                    counts[one] += 1
                names.append(name)
                forms[_LAYER.sub(".N.", name)] += 1
                value = None
                if file is not None and math.prod(tensor.shape) == 1:
                    file.seek(header.data_start + tensor.begin)
                    value = scalar_value(tensor.dtype, file.read(min(8, tensor.end - tensor.begin)))
                if value is None or not math.isfinite(value):
                    why = "not a scalar" if math.prod(tensor.shape) != 1 else f"{tensor.dtype}, {value}"
                    unread.append(f"{name[:120]} ({why})")
                else:
                    for one in letter:
                        values[one].append(value)
        finally:
            if file is not None:
                file.close()
    return ScaleTensors(
        k_count=counts["k"],
        v_count=counts["v"],
        name_form="; ".join(form for form, _ in forms.most_common(4)) or None,
        k_values=tuple(values["k"]),
        v_values=tuple(values["v"]),
        unread=tuple(unread[:20]),
        names_sample=tuple(sorted(names)[:4]),
    )


def context_length(config: Mapping[str, Any]) -> int | None:
    """The context length that SGLang derives from the text model's configuration.

    A RoPE factor multiplies it unless original_max_position_embeddings is given or the type is llama3. None: no field
    says it (SGLang then takes 2048).

    Source: SGLang `utils/hf_transformers/common.py:get_context_length`.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    factor = 1.0
    if (
        isinstance(rope, Mapping)
        and "original_max_position_embeddings" not in rope
        and rope.get("rope_type") != "llama3"
    ):
        found = rope.get("factor", 1)
        if isinstance(found, (int, float)) and not isinstance(found, bool) and math.isfinite(found):
            factor = float(found)
    keys = "max_sequence_length seq_length max_seq_len model_max_length max_position_embeddings n_positions"
    for key in keys.split():
        value = config.get(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1 << 40:
            return int(factor * value)
    return None


def _rope(config: Mapping[str, Any]) -> dict[str, Any] | None:
    found = {
        key: config[key]
        for key in ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
        if config.get(key) is not None
    }
    return found or None


def checkpoint_from_configs(
    config: Mapping[str, Any],
    hf_quant_config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Header] | None = None,
    **facts: Any,
) -> Checkpoint:
    """A Checkpoint from parsed files alone, without touching the disk.

    Args:
        config: config.json.
        hf_quant_config: hf_quant_config.json, if there is one.
        tensors: safetensors headers by file name (None: nothing is known of the tensors, scales included).
        facts: further fields of Checkpoint, as `read_checkpoint` finds them in the folder.

    Raises:
        BadInput: the configuration names no architecture.
    """
    if not isinstance(config, Mapping):
        raise BadInput("expected config.json as an object", type(config).__name__, "parse the file first")
    text, _ = text_config(config)
    name = architecture_name(config)
    layout: Architecture | None = None
    trouble = None
    try:
        layout = architecture(config)
    except UnknownArchitecture as error:
        trouble = str(error)
    quantization = declared_quantization(config, hf_quant_config)
    findings = list(quantization.conflicts)
    declared = config.get("torch_dtype", config.get("dtype"))
    dtype = model_dtype(config, text)
    if dtype == "float16" and not any(
        isinstance(c.get(k), str) for c in (text, config) for k in ("dtype", "torch_dtype")
    ):
        findings.append(
            "config.json gives no dtype; SGLang then takes float16 (float32 downcast), unless --dtype is given"
        )
    elif declared is not None and "float32" in str(declared):
        findings.append("config.json says float32; SGLang runs it in 16 bits unless --dtype is given")
    counted: dict[str, Any] = {}
    if tensors is not None:
        counted = _counts(tensors, layout.num_hidden_layers if layout else None)
        if "scales" not in facts:
            facts["scales"] = _scales(None, tensors)
    vocab = text.get("vocab_size", config.get("vocab_size"))
    made = Checkpoint(
        config=dict(config),
        hf_quant_config=dict(hf_quant_config) if hf_quant_config is not None else None,
        architecture_name=name,
        architecture=layout,
        architecture_error=trouble,
        torch_dtype=dtype,
        quantization=quantization,
        vocab_size=vocab if isinstance(vocab, int) and not isinstance(vocab, bool) else None,
        context_length=context_length(text),
        rope=_rope(text),
        findings=tuple(findings),
        **counted,
        **facts,
    )
    if quantization.weights_method is None or weights_quantized(made) is not False:
        return made
    # What is declared stays in weights_method and weights_algo: SGLang goes by it.
    bits = max((_STORED_BITS.get(name.upper(), 0.0) for name in made.parameters_by_dtype), default=0.0) or None
    quantization = quantization.model_copy(update={"weights_bits": bits})
    return made.model_copy(update={"quantization": quantization})


_STORED_BITS: dict[str, float] = {"F64": 64.0, "F32": 32.0, "F16": 16.0, "BF16": 16.0}


def _counts(headers: Mapping[str, Header], last_layer: int | None) -> dict[str, Any]:
    """Tensors, bytes and parameters by dtype, and the tensors of MTP/NEXTN layers."""
    parameters: dict[str, int] = {}
    tensors = weight_bytes = drafts = 0
    owners: dict[str, bool] = {}
    for header in headers.values():
        tensors += len(header.tensors)
        for name, tensor in header.tensors.items():
            weight_bytes += tensor.end - tensor.begin
            parameters[tensor.dtype] = parameters.get(tensor.dtype, 0) + math.prod(tensor.shape)
            at = name.find("layers.")
            owner = name if at < 0 else name[: name.find(".", at + 7)]
            draft = owners.get(owner)
            if draft is None:
                draft = owners[owner] = _is_draft(name, last_layer)
            drafts += draft
    return {
        "shards": len(headers),
        "tensors": tensors,
        "parameters_by_dtype": dict(sorted(parameters.items())),
        "weight_bytes": weight_bytes,
        "draft_tensors": drafts,
    }


def _is_draft(name: str, last_layer: int | None) -> bool:
    """MTP/NEXTN tensors: under an mtp prefix, or in a layer numbered past the text model's last."""
    if _DRAFT.search(name):
        return True
    match = re.search(r"(?:^|\.)layers\.(\d{1,6})\.", name)
    beyond = match is not None and last_layer is not None and int(match[1]) >= last_layer
    return beyond and not re.search("vis|audio|vit|image|tower", name)


def _chat_template(folder: Path) -> str | None:
    """Where the chat template is, in the order that transformers looks."""
    for name in ("chat_template.jinja", "chat_template.json"):
        if (folder / name).is_file():
            return name
    path = folder / "tokenizer_config.json"
    if path.is_file() and read_json(path).get("chat_template"):
        return "tokenizer_config.json chat_template"
    return None


def _folder(path: str | os.PathLike[str]) -> Path:
    folder = Path(path)
    try:
        if folder.is_dir() and (folder / "config.json").is_file():
            return folder
        found = "a file" if folder.is_file() else "a folder without config.json" if folder.is_dir() else "nothing there"
    except (OSError, ValueError) as error:
        found = _why(error)
    raise UnreadableFile(
        f"{str(path)[-200:]}: expected a checkpoint folder with config.json",
        found,
        "give the folder that holds the model's files",
    )


def read_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """A checkpoint folder as its small files and safetensors headers describe it; the weights are never read.

    Args:
        path: the folder with config.json.

    Returns:
        the Checkpoint; an architecture without a row leaves `architecture` None with the reason (memory functions
            then raise).

    Raises:
        UnreadableFile: not a checkpoint folder, missing shards, a corrupt header, a JSON file that isn't one (all
            named).
    """
    folder = _folder(path)
    with _collector_paused():
        return _read_checkpoint(folder)


def _read_checkpoint(folder: Path) -> Checkpoint:
    config = read_json(folder / "config.json")
    quant = read_json(folder / "hf_quant_config.json") if (folder / "hf_quant_config.json").is_file() else None
    generation = read_json(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else None
    index_path = folder / "model.safetensors.index.json"
    index = read_json(index_path, large=True) if index_path.is_file() else None
    headers = _read_headers(folder, index)
    tokenizers = tuple(
        name
        for name in (
            "tokenizer.json",
            "tokenizer.model",
            "tokenizer_config.json",
            "vocab.json",
            "merges.txt",
            "tiktoken.model",
        )
        if (folder / name).is_file()
    )
    return checkpoint_from_configs(
        config,
        quant,
        headers if headers else None,
        path=str(folder),
        generation_config=generation,
        scales=_scales(folder, headers) if headers else None,
        chat_template=_chat_template(folder),
        tokenizer_files=tokenizers,
    )


def model_fingerprint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What identifies a checkpoint without reading its weights.

    Returns:
        `sha256` over all of the rest; `files`: name to sha256 of each JSON file and tokenizer file; `shards`: name to
            header_sha256, size in bytes and mtime_ns. Two folders with equal header hashes and sizes may still differ
            in weight bytes.

    Raises:
        UnreadableFile: as `read_checkpoint`.
    """
    folder = _folder(path)
    files = {}
    for name in (*JSON_FILES, "chat_template.jinja", "tokenizer.model"):
        if (folder / name).is_file():
            files[name] = _file_sha256(folder / name)
    index_path = folder / "model.safetensors.index.json"
    with _collector_paused():
        index = read_json(index_path, large=True) if index_path.is_file() else None
        headers = _read_headers(folder, index)
    shards = {
        name: {"header_sha256": header.sha256, "size": header.file_size, "mtime_ns": (folder / name).stat().st_mtime_ns}
        for name, header in sorted(headers.items())
    }
    content = {
        "files": files,
        "shards": {name: {k: v for k, v in shard.items() if k != "mtime_ns"} for name, shard in shards.items()},
    }
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return {"sha256": digest, "files": files, "shards": shards}


def _file_sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, "a readable file", _why(error), "check its permissions") from error
