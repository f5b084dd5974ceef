"""Facts about one deployment from what an engineer has at hand: a launch line, a log, answers of a server, a
checkpoint.

Thin: files and HTTP answers come in here and leave as facts. Only what a rule asks for is taken out of an input,
so that
keys in `server_args=` lines and `/server_info` never get further than this file.
"""

from __future__ import annotations

import ast
import difflib
import functools
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lib.audit.facts import DEFAULT_NOTE, FACTS, WRITTEN_AS, Fact, Facts, How, make_fact, torch_dtype
from lib.audit.rules import LINES
from lib.audit.scales import checkpoint_of, derived, loads_scales, version_of
from lib.errors import BadInput, ServerError, UnreadableFile
from lib.model.checkpoint import read_checkpoint
from lib.model.facts import Checkpoint
from lib.model.memory import state_bytes_per_slot, state_pool_gib
from lib.records import Evidence
from lib.server.flags import known_versions, release
from lib.server.lines import lines_of
from lib.server.log import ServerLog, read_log
from lib.server.redact import redact_text

#: SGLang's defaults of the arguments that rules ask about (server_args.py, the same in the wheels 0.5.11 to 0.5.23). An
#: argument whose default is worked out at start-up (attention_backend, chunked_prefill_size) has none here.
DEFAULTS: dict[str, Any] = {
    "kv_cache_dtype": "auto",
    "speculative_draft_kv_cache_dtype": None,
    "quantization_param_path": None,
    "moe_runner_backend": "auto",
    "fp4_gemm_runner_backend": "auto",
    "fp8_gemm_runner_backend": "auto",
    "quantization": None,
    "mamba_ssm_dtype": None,
    "mamba_radix_cache_strategy": "auto",
    "enable_int8_mamba_checkpoint": False,
    "disable_radix_cache": False,
    "speculative_algorithm": None,
    "speculative_accept_threshold_single": 1.0,
    "speculative_accept_threshold_acc": 1.0,
    "speculative_draft_load_format": None,
    "speculative_draft_window_size": None,
    "context_length": None,
    "json_model_override_args": "{}",
    "allow_auto_truncate": False,
    "chat_template": None,
    "default_chat_template_kwargs": None,
    "reasoning_parser": None,
    "tool_call_parser": None,
    "sampling_defaults": "model",
    "load_format": "auto",
    "model_loader_extra_config": "{}",
    "enable_fp32_lm_head": False,
    "enable_tf32_matmul": False,
    "enable_torch_compile": False,
    "enable_deterministic_inference": False,
    "enable_quant_communications": False,
    "disable_custom_all_reduce": False,
    "moe_a2a_backend": "none",
    "deepep_dispatcher_output_dtype": "auto",
    "enable_hierarchical_cache": False,
    "hicache_storage_backend": None,
    "enable_hisparse": False,
    "disable_cuda_graph": False,
    "disable_cuda_graph_padding": False,
    "tp_size": 1,
}

#: Spellings on a command line of fields that are named otherwise in server_args.
ALIASES: dict[str, str] = {
    "model": "model_path",
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "pp": "pp_size",
    "pipeline_parallel_size": "pp_size",
    "fp4_gemm_backend": "fp4_gemm_runner_backend",
    "fp8_gemm_backend": "fp8_gemm_runner_backend",
    "mamba_scheduler_strategy": "mamba_radix_cache_strategy",
    "enable_hicache": "enable_hierarchical_cache",
}

_ARGUMENTS = {name for name, kind in FACTS.items() if kind.belongs == "argument"}
_BOOLEAN = {name for name, value in DEFAULTS.items() if isinstance(value, bool)} | {
    "enable_mamba_cache_stochastic_rounding",
    "enable_p2p_check",
    "speculative_adaptive",
    "disable_overlap_schedule",
}
_NUMBER = {
    "tp_size": int,
    "context_length": int,
    "chunked_prefill_size": int,
    "speculative_num_draft_tokens": int,
    "speculative_eagle_topk": int,
    "speculative_num_steps": int,
    "pp_size": int,
    "nnodes": int,
    "page_size": int,
    "speculative_draft_window_size": int,
    "speculative_accept_threshold_single": float,
    "speculative_accept_threshold_acc": float,
}

#: Facts that a description may state by name, beside the arguments, and the types that their values may have.
_STATED: dict[str, tuple[type, ...]] = {
    "engine": (str,),
    "platform": (str,),
    "flashinfer_version": (str,),
    "model_class": (str,),
    "recurrent": (str,),
    "mamba_ssm_dtype_config": (str, type(None)),
    "ssm_dtype": (str,),
    "native_context": (int,),
    "context_len": (int,),
    "max_total_num_tokens": (int,),
    "mla": (bool,),
    "is_moe": (bool,),
    "has_chat_template": (bool,),
    "kv_dtype_target": (str,),
    "kv_dtype_draft": (str,),
    "kv_scales_loaded": (str,),
    "attention_backend_prefill": (str,),
    "attention_backend_decode": (str,),
    "request_params": (dict,),
    "client_history": (bool,),
}
_OBJECTS = {"json_model_override_args", "default_chat_template_kwargs", "model_loader_extra_config"}


def _typed_value(name: str, value: Any) -> Any:
    """The value of a named fact when it has a type that the fact can have; BadInput otherwise."""
    kinds: tuple[type, ...]
    if name in _STATED:
        kinds = _STATED[name]
    elif name in _BOOLEAN:
        kinds = (bool, type(None))
    elif name in _NUMBER:
        kinds = (int, float, type(None))
    else:
        kinds = (str, type(None), dict) if name in _OBJECTS else (str, type(None))
    wrong = not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)
    if wrong or (isinstance(value, float) and value != value):
        names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        raise BadInput(f"expected {name} as {names}", f"{type(value).__name__}: {str(value)[:60]}")
    return value


#: Arguments that are counts: one is the least.
_AT_LEAST_ONE = ("tp_size", "context_length", "page_size", "speculative_eagle_topk", "speculative_num_draft_tokens")


@functools.cache
def _choices(name: str) -> tuple[str, ...]:
    """What any release that was read takes for an argument; empty where a release takes any value."""
    found: dict[str, None] = {}
    for version in known_versions():
        form = release(version).find(name)
        if form is None:
            continue
        if form.choices is None or "choices" in form.unresolved:
            return ()
        found.update(dict.fromkeys(map(str, form.choices)))
    return tuple(found)


def check_argument(name: str, value: Any) -> None:
    """Raises BadInput for a value of a server argument that no release of SGLang takes (a typing error, most likely).

    What only some releases take passes here; `audit_of_fix` says `does_not_start` for the others.
    """
    if name not in _ARGUMENTS or value is None:
        return
    _typed_value(name, value)
    flag, shown = "--" + name.replace("_", "-"), redact_text(f"{value}")[:60]
    choices = _choices(name)
    if choices and str(value) not in choices:
        near = difflib.get_close_matches(str(value), choices, n=4, cutoff=0.4)
        raise BadInput(f"expected a value of {flag} that SGLang takes", shown, f"one of {', '.join(near or choices)}")
    if name in _AT_LEAST_ONE and value < 1:
        raise BadInput(f"expected {flag} of at least 1", shown)


#: Compute capability by what a log or a person calls the GPU. Source: NVIDIA's CUDA GPU list.
GPU_SM: tuple[tuple[str, str], ...] = (
    ("RTX PRO 6000", "12.0"),
    ("RTX 5090", "12.0"),
    ("GB10", "12.1"),
    ("GB300", "10.3"),
    ("B300", "10.3"),
    ("GB200", "10.0"),
    ("B200", "10.0"),
    ("GH200", "9.0"),
    ("H200", "9.0"),
    ("H100", "9.0"),
    ("H20", "9.0"),
    ("L40S", "8.9"),
    ("RTX 4090", "8.9"),
    ("A100", "8.0"),
)


def gpu_sm(text: str) -> str | None:
    """The compute capability that a text names or implies (`sm_121`, `SM120`, `12.0`, `NVIDIA H200`), or None.

    Example: `gpu_sm("GB10 sm_121") == "12.1"`.
    """
    match = re.search(r"\b[sS][mM]_?(\d{2,3})\b", text) or re.fullmatch(r"\s*(\d{1,2})\.(\d)\s*", text)
    if match:
        digits = "".join(match.groups())
        return f"{digits[:-1]}.{digits[-1]}"
    plain = text.upper().replace("_", " ")
    return next((sm for name, sm in GPU_SM if re.search(rf"\b{re.escape(name)}\b", plain)), None)


# --- launch line ------------------------------------------------------------------------------------------------------


def flags_facts(text: str, path: str = "--flags") -> list[Fact]:
    """What a launch line asks for; a whole one (it names a model or a program) also tells what was left on its default.

    Args:
        text: flags alone, or a command with its environment (`NAME=VALUE ... python -m sglang.launch_server --...`).
        path: what to name as the place of the evidence.

    Raises:
        BadInput: quotes that do not close.
    """
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=False)
    except ValueError as error:
        raise BadInput("expected a launch line that a shell can split", str(error), "close its quotes") from error
    given, variables, whole, spelled = _split_words(words)
    facts: list[Fact] = []
    for name, value in given.items():
        note = f"{WRITTEN_AS}{spelled[name]}" if name in spelled else None
        facts.append(make_fact(name, value, "asked", "flags", path=path, quote=f"{name} = {value}", note=note))
    if whole:
        for name, value in DEFAULTS.items():
            if name not in given:
                facts.append(make_fact(name, value, "derived", "flags", path=path, note=DEFAULT_NOTE))
    if variables:
        facts.append(environment_fact(variables, complete=False, path=path))
        if "FLASHINFER_VERSION" in variables:
            facts.append(make_fact("flashinfer_version", variables["FLASHINFER_VERSION"], "asked", "flags", path=path))
    return facts


def _split_words(words: list[str]) -> tuple[dict[str, Any], dict[str, str], bool, dict[str, str]]:
    given: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    variables: dict[str, str] = {}
    whole = False
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if re.fullmatch(r"(?:sglang(?:\.launch_server)?|.*launch_server(?:\.py)?)", word):
            whole = True
        assigned = re.fullmatch(r"([A-Z][A-Z0-9_]*)=(.*)", word, re.S)
        if assigned:
            variables[assigned.group(1)] = assigned.group(2)
            continue
        if not word.startswith("--"):
            continue
        name, sign, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if name in ALIASES and ALIASES[name] in _ARGUMENTS:
            spelled[ALIASES[name]] = word.partition("=")[0]
        name = ALIASES.get(name, name)
        if name == "model_path":
            whole = True
        follows = index < len(words) and not words[index].startswith("--")
        if name in _BOOLEAN:
            given[name] = True
            continue
        if not sign:
            if not follows:
                continue
            value = words[index]
            index += 1
        if name in _ARGUMENTS:
            given[name] = _typed(name, value)
        elif name == "env":
            key, _, content = value.partition("=")
            variables[key] = content
    return given, variables, whole, spelled


def _typed(name: str, value: str) -> Any:
    kind = _NUMBER.get(name)
    if kind is None:
        return None if value in ("None", "null") else value
    try:
        return kind(value)
    except ValueError as error:
        raise BadInput(f"expected a number for --{name.replace('_', '-')}", value) from error


def environment_fact(variables: Mapping[str, str], *, complete: bool, path: str = "environment") -> Fact:
    """The variables that rules look at, and whether all of the process's variables are known."""
    kept = {
        name: value
        for name, value in variables.items()
        if name.startswith(("SGLANG_", "VLLM_", "ROCM_", "FLASHINFER_"))
        and not re.search(r"KEY|TOKEN|SECRET|PASS", name)
    }
    value = {"variables": kept, "complete": complete}
    quote = " ".join(f"{name}={content}" for name, content in kept.items())
    return make_fact(
        "environment", value, "read" if complete else "asked", "environment", path=path, quote=quote or None
    )


def environ_facts(text: str, path: str = "environ") -> list[Fact]:
    """The whole environment of a process from a copy of /proc/PID/environ (separated by NUL) or `env` (by lines)."""
    parts = text.split("\0") if "\0" in text else text.splitlines()
    variables = dict(part.split("=", 1) for part in parts if re.match(r"[A-Za-z_]\w*=", part))
    if not variables:
        raise BadInput("expected NAME=VALUE assignments", "none", "cp /proc/PID/environ FILE")
    return [environment_fact(variables, complete=True, path=path)]


# --- log --------------------------------------------------------------------------------------------------------------

_ANSI = re.compile(rb"\x1b\[[0-9;]*m")
_SAMPLING = re.compile(r"Using default chat sampling params from model generation config: (\{.*?\})")
_STUCK = re.compile(rb"token usage: ([\d.]+).*?accept rate: 0\.00\b")
_DEVICE = re.compile(r"device_name=([\w ]+?)(?:_down)?\.json|\b(SM\d{2,3}) \(\w+\) detected")
#: Literals that a line must hold to be looked at here; everything else only passes through to `read_log`.
_LITERALS = [literal.encode() for literal, _, _ in LINES.values()]
_LITERALS += [b"server_args=", b"device_name=", b") detected", b"model generation config", b"hybrid GDN"]


class _Marks:
    """What the log reader does not keep: lines that bear on accuracy. A new server_args= line is a new launch."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.clear()

    def clear(self) -> None:
        self.lines: dict[str, dict[str, Any]] = {}
        self.facts: dict[str, Fact] = {}
        self.stuck = 0
        self.gdn = False

    def passing(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        """The same lines, looked at on their way to the log reader."""
        for number, raw in enumerate(lines, start=1):
            # Nearly all lines of a long log are batch lines, of which only one sign matters here.
            if b"batch, #" in raw:
                if b"accept rate: 0.00" in raw:
                    match = _STUCK.search(raw)
                    self.stuck += bool(match and float(match[1]) >= 0.5)
            elif any(literal in raw for literal in _LITERALS):
                self._look(number, raw)
            yield raw

    def _look(self, number: int, raw: bytes) -> None:
        line = _ANSI.sub(b"", raw).decode("utf-8", "replace").rstrip()
        if "server_args=" in line:
            self.clear()
            return
        for mark, (literal, pattern, _) in LINES.items():
            if literal in line and mark not in self.lines and re.search(pattern, line):
                self.lines[mark] = {"path": self.path, "line": number, "quote": _clean(line)}
        self.gdn = self.gdn or "hybrid GDN models" in line
        if announced := _SAMPLING.search(line):
            self._keep("default_sampling", _literal(announced[1]), number, line)
        if device := _DEVICE.search(line):
            sm = gpu_sm(next(group for group in device.groups() if group).replace("_", " "))
            if sm:
                self._keep("gpu_sm", sm, number, device.group(0))

    def _keep(self, name: str, value: Any, number: int, line: str) -> None:
        self.facts.setdefault(
            name, make_fact(name, value, "read", "log", path=self.path, line=number, quote=_clean(line))
        )


def log_facts(lines: Iterable[bytes | str], path: str = "log") -> list[Fact]:
    """What a log of SGLang or vLLM says that bears on accuracy; with several launches in it, the last one's.

    Raises:
        UnreadableFile: an empty input, binary data, or the log of another program.
    """
    marks = _Marks(path)
    log = read_log(marks.passing(line.encode() if isinstance(line, str) else line for line in lines))
    # A few lines quoted in a report have no program of their own; their marks still say something.
    if log.binary or (log.engine in ("foreign", "empty") and not marks.lines):
        raise UnreadableFile(f"expected a log of SGLang or vLLM at {path}", log.foreign_program or log.engine_why)
    return [*_server_log_facts(log, marks, path), *marks.facts.values()]


def _server_log_facts(log: ServerLog, marks: _Marks, path: str) -> list[Fact]:
    facts: list[Fact] = []

    def add(name: str, value: Any, how: How, told: Any = None, note: str | None = None) -> None:
        line, quote = (told.line_no, _clean(told.line)) if told is not None else (None, None)
        facts.append(make_fact(name, value, how, "log", path=path, line=line, quote=quote, note=note))

    engine = (
        log.engine
        if log.engine in ("sglang", "vllm")
        else "vllm"
        if any(m.startswith("vllm_") for m in marks.lines)
        else None
    )
    if engine:
        add("engine", engine, "read")
    if log.version and engine == "sglang":
        known = "read" if log.version_known_by == "line" else "derived"
        add("sglang_version", log.version, known, note=f"by its {log.version_known_by}")  # type: ignore[arg-type]
    for name in sorted(_ARGUMENTS & set(log.server_args)) if engine == "sglang" else ():
        try:
            value = _typed_value(name, log.server_args[name])
        except BadInput:
            continue  # a line that was cut or garbled: what it says of this argument is not known
        place = log.server_args_told.line_no if log.server_args_told else None
        facts.append(make_fact(name, value, "read", "log", path=path, line=place, quote=f"{name}={value!r}"[:200]))
    if log.server_args.get("device") in ("cpu", "xpu", "npu", "hpu"):
        add("platform", log.server_args["device"], "read")
    target = next((weights for weights in log.weights if weights.role == "target"), None)
    if log.model_class:
        add("model_class", log.model_class, "measured", target)
    if target and (target.quant or target.quant_algo):
        add("weight_quant", weight_quant(target.quant, target.quant_algo), "read", target)
    for role in ("target", "draft"):
        pool = next((pool for pool in log.kv_pools if pool.role == role), None)
        if pool and pool.dtype and pool.dtype_known_by == "line":
            add(f"kv_dtype_{role}", torch_dtype(pool.dtype) or pool.dtype, "measured", pool)
        elif role == "target" and log.kv and log.kv.dtype and log.kv.dtype_known_by == "line":
            add("kv_dtype_target", torch_dtype(log.kv.dtype) or log.kv.dtype, "measured", note="before a pool was made")
        if pool and pool.bytes_per_token and role == "target":
            add("kv_bytes_per_token", pool.bytes_per_token, "measured", pool)
    if log.capacity:
        if log.capacity.max_total_num_tokens:
            add("max_total_num_tokens", log.capacity.max_total_num_tokens, "measured", log.capacity)
        if log.capacity.context_len:
            add("context_len", log.capacity.context_len, "measured", log.capacity)
    _taken_backends(log, add)
    facts += _replaced_backends(log, path)
    started = bool(log.weights and log.capacity) if engine == "sglang" else bool(log.vllm_capacity or log.ready)
    add("startup_seen", started, "read")
    add("log_lines", marks.lines, "read")
    if log.mamba_pools:
        state = log.mamba_pools[0]
        add("recurrent", "gdn" if marks.gdn else "recurrent", "measured", state)
        add("state_pool", {"slots": state.slots, "ssm_gib": state.ssm_gib}, "measured", state)
    elif started and engine == "sglang":
        add("recurrent", "none", "measured", note="the start-up allocates no recurrent state")
    if log.speculation and log.batches.decode_lines:
        add("decode_batches", {"total": log.batches.decode_lines, "stuck": marks.stuck}, "measured")
    if log.speculation and log.speculation.last_accept_len is not None:
        add("accept_length", log.speculation.last_accept_len, "measured", log.speculation)
    for mark, loaded in (("scale_not_loaded", "dropped"), ("scale_ignored_16bit", "loaded")):
        if seen := marks.lines.get(mark):
            facts.append(
                make_fact(
                    "kv_scales_loaded", loaded, "measured", "log", path=path, line=seen["line"], quote=seen["quote"]
                )
            )
    if seen := marks.lines.get("scale_not_loaded"):
        # A scale that has no place to go to is in the checkpoint; how many there are and their values stay unknown.
        value = {"present": True, "count": None, "names": [], "min": None, "max": None, "all_one": None}
        quote = seen["quote"]
        facts.append(make_fact("kv_scales", value, "derived", "log", path=path, line=seen["line"], quote=quote))
    if seen := marks.lines.get("marlin_fallback"):
        quote = seen["quote"]
        facts.append(make_fact("kernel_trace", [quote], "read", "log", path=path, line=seen["line"], quote=quote))
    return facts


def _replaced_backends(log: ServerLog, path: str) -> list[Fact]:
    """Backends that were asked for and did not run: by a line that says so, or in silence (`backend_ignored`)."""
    if not log.backends:
        return []
    silent = {notice.line_no for notice in log.notices if notice.id == "backend_ignored"}
    changed = [backend for backend in log.backends if backend.changed]
    value = [
        {"kind": one.kind, "asked": one.asked, "taken": one.taken, "silent": one.line_no in silent} for one in changed
    ]
    places = [Evidence(path=path, line=one.line_no, quote=_clean(one.line or "")) for one in changed]
    return [Fact(name="backends_replaced", value=value, how="read", source="log", evidence=places)]


def _taken_backends(log: ServerLog, add: Callable[..., None]) -> None:
    for backend in log.backends:
        if not backend.taken or backend.known_by not in ("line", "trace"):
            continue
        if backend.kind == "attention_backend":
            split = re.fullmatch(r"decode (\w+), prefill (\w+)", backend.taken)
            decode, prefill = split.groups() if split else (backend.taken, backend.taken)
            add("attention_backend_decode", decode, "measured", backend)
            add("attention_backend_prefill", prefill, "measured", backend)
        elif backend.kind in ("moe_runner_backend", "fp4_gemm_runner_backend"):
            add(backend.kind, backend.taken, "measured", backend)


def weight_quant(method: str | None, algo: str | None) -> dict[str, Any]:
    """How weights are quantized, in one word (`nvfp4`, `mxfp4`, `fp8`, `mixed`, `none`, or the method's name).

    Example: `weight_quant("modelopt_fp4", "NVFP4")["kind"] == "nvfp4"`.
    """
    words = f"{method or ''} {algo or ''}".lower()
    if "mixed" in words:
        kind = "mixed"
    elif "mxfp4" in words:
        kind = "mxfp4"
    elif "nvfp4" in words or "fp4" in words:
        kind = "nvfp4"
    elif "mxfp8" in words or "fp8" in words:
        kind = "fp8"
    else:
        kind = (method or algo or "none").lower()
    return {"kind": kind, "detail": ", ".join(part for part in (method, algo) if part) or None}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _clean(line: str) -> str:
    """A line fit to be quoted: secrets cut out, and not longer than a reader can take."""
    return redact_text(line).strip()[:300]


def log_file_facts(path: Path | None) -> list[Fact]:
    """Facts from a log file (None: standard input); UnreadableFile when it is missing, binary or of another program."""
    if path is None:
        return log_facts(lines_of(sys.stdin.buffer.read), "standard input")
    try:
        with path.open("rb") as file:
            return log_facts(lines_of(file.read), path.name)
    except OSError as error:
        raise UnreadableFile(f"expected a readable log at {path}", error.strerror or str(error)) from error


# --- checkpoint -----------------------------------------------------------------------------------------


def checkpoint_facts(folder: Path) -> list[Fact]:
    """What a checkpoint folder says: its class, precision, KV scales with their values, context, template, defaults."""
    return facts_of_checkpoint(read_checkpoint(folder), folder.name)


def facts_of_checkpoint(checkpoint: Checkpoint, name: str) -> list[Fact]:
    """The same from a checkpoint that was read before; `name` is what its evidence is called."""
    facts = config_facts(checkpoint.config, checkpoint.hf_quant_config, name)
    facts = _stored_weights(facts, checkpoint.parameters_by_dtype, name)
    scales = checkpoint.scales
    if scales is not None:
        facts.append(
            scales_fact(
                scales.names_sample,
                [*scales.k_values, *scales.v_values],
                count=scales.k_count + scales.v_count,
                complete=not scales.unread,
                source="checkpoint",
                path=name,
            )
        )
    template = checkpoint.chat_template
    facts.append(make_fact("has_chat_template", template is not None, "read", "checkpoint", path=template or name))
    generation = checkpoint.generation_config
    facts.append(make_fact("generation_config", generation or False, "read", "checkpoint", path=name))
    return facts


def ssm_dtype_facts(facts: Facts) -> list[Fact]:
    """The dtype of the recurrent state, worked out from the size of its pool: the only way to see it at INFO level.

    Needs the log's pool and the checkpoint's geometry; gives nothing when the printed size is too coarse.
    Example: 360 slots of 150,994,944 B make the 50.77 GiB that a log of Qwen3.8-27B prints: float32.
    """
    checkpoint, pool = checkpoint_of(facts), facts.best("state_pool")
    if checkpoint is None or pool is None or checkpoint.architecture is None or pool.value["ssm_gib"] < 0.2:
        return []
    tp = int(facts.value("tp_size") or 1)
    for dtype in ("float32", "bfloat16"):
        try:
            state = state_bytes_per_slot(checkpoint, tp, mamba_ssm_dtype=dtype)
        except BadInput:
            return []
        if state and abs(state_pool_gib(state.ssm, pool.value["slots"]) / pool.value["ssm_gib"] - 1) < 0.04:
            note = f"{pool.value['slots']} slots of {state.ssm} B make {pool.value['ssm_gib']} GiB in {dtype}"
            return [pool.model_copy(update={"name": "ssm_dtype", "value": dtype, "how": "derived", "note": note})]
    return []


# --- answers of a server --------------------------------------------------------------------------------


def server_info_facts(info: Mapping[str, Any], path: str = "/server_info") -> list[Fact]:
    """What /server_info says: the arguments as the front process has them, and what the scheduler process resolved.

    The top-level `kv_cache_dtype` is what was asked for ('auto' hides FP8); the scheduler's is only taken when it is
    resolved, and the memory it reports gives bytes per token in every version.
    """
    facts = [
        make_fact(name, _typed_value(name, info[name]), "read", "server_info", path=path, quote=f"{name}: {info[name]}")
        for name in sorted(_ARGUMENTS)
        if name in info
    ]
    if info.get("version"):
        facts.append(make_fact("sglang_version", str(info["version"]), "read", "server_info", path=path))
        facts.append(make_fact("engine", "sglang", "read", "server_info", path=path))
    if info.get("device") in ("cpu", "xpu", "npu", "hpu"):
        facts.append(make_fact("platform", info["device"], "read", "server_info", path=path))
    if isinstance(info.get("max_total_num_tokens"), int):
        facts.append(
            make_fact("max_total_num_tokens", info["max_total_num_tokens"], "measured", "server_info", path=path)
        )
    states = info.get("internal_states")
    state = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    where = f"{path} internal_states[0]"
    resolved = torch_dtype(state.get("kv_cache_dtype"))
    if resolved and resolved != "auto":
        quote = f"kv_cache_dtype: {state['kv_cache_dtype']}"
        facts.append(make_fact("kv_dtype_target", resolved, "read", "server_info", path=where, quote=quote))
    usage = state.get("memory_usage")
    if isinstance(usage, dict):
        facts += _per_token(usage.get("kvcache"), usage.get("token_capacity"), "server_info", where)
    for phase in ("prefill", "decode"):
        backend = state.get(f"{phase}_attention_backend") or state.get("attention_backend")
        if isinstance(backend, str):
            name = f"attention_backend_{phase}"
            facts.append(
                make_fact(name, backend, "read", "server_info", path=where, quote=f"attention_backend: {backend}")
            )
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        if name in state:
            facts.append(
                make_fact(name, state[name], "measured", "server_info", path=where, quote=f"{name}: {state[name]}")
            )
    if state.get("mamba_radix_cache_strategy") and "mamba_radix_cache_strategy" not in info:
        value = _typed_value("mamba_radix_cache_strategy", state["mamba_radix_cache_strategy"])
        facts.append(make_fact("mamba_radix_cache_strategy", value, "read", "server_info", path=where))
    accept = state.get("avg_spec_accept_length")
    if isinstance(accept, int | float):
        facts.append(make_fact("accept_length", float(accept), "measured", "server_info", path=where))
    return facts


def model_info_facts(info: Mapping[str, Any], path: str = "/model_info") -> list[Fact]:
    """What /model_info says: the model's class, parsers and load format."""
    facts: list[Fact] = []
    architectures = info.get("architectures")
    if isinstance(architectures, list) and architectures:
        facts.append(make_fact("model_class", str(architectures[0]), "read", "model_info", path=path))
    for name in ("load_format", "tool_call_parser", "reasoning_parser", "model_path"):
        if name in info:
            facts.append(make_fact(name, _typed_value(name, info[name]), "read", "model_info", path=path))
    return facts


def metrics_facts(text: str, path: str = "/metrics") -> list[Fact]:
    """What /metrics says: tokens in the pool, bytes per token where both gauges are there, acceptance length."""
    values: dict[str, float] = {}
    for match in re.finditer(r"^(sglang:\w+)(?:\{[^}]*\})? ([-+.\deE]+|NaN)\s*$", text, re.M):
        if match[2] != "NaN":
            values.setdefault(match[1], float(match[2]))
    if not values:
        raise BadInput(
            "expected Prometheus text with sglang: metrics", "none", "start the server with --enable-metrics"
        )
    facts = [make_fact("engine", "sglang", "read", "metrics", path=path)]
    tokens = values.get("sglang:max_total_num_tokens")
    if tokens:
        facts.append(make_fact("max_total_num_tokens", int(tokens), "measured", "metrics", path=path))
        facts += _per_token(values.get("sglang:kv_cache_memory_usage_gb"), tokens, "metrics", path)
    if values.get("sglang:spec_accept_length"):
        facts.append(make_fact("accept_length", values["sglang:spec_accept_length"], "measured", "metrics", path=path))
    return facts


def v1_models_facts(info: Mapping[str, Any], path: str = "/v1/models") -> list[Fact]:
    """What /v1/models says: the context length that is served."""
    data = info.get("data")
    first = data[0] if isinstance(data, list) and data and isinstance(data[0], dict) else {}
    length = first.get("max_model_len")
    return [make_fact("context_len", length, "read", "v1_models", path=path)] if isinstance(length, int) else []


def _per_token(gib: Any, tokens: Any, source: str, path: str) -> list[Fact]:
    if not isinstance(gib, int | float) or not isinstance(tokens, int | float) or gib < 0.1 or tokens <= 0:
        return []
    quote = f"{gib} GiB / {tokens:g} tokens"
    return [make_fact("kv_bytes_per_token", gib * 2**30 / tokens, "measured", source, path=path, quote=quote)]


def fetch_server(base_url: str, *, timeout_s: float = 10.0, api_key: str | None = None) -> list[Fact]:
    """Facts from a running server: GET /server_info, /model_info, /v1/models and, where it is on, /metrics.

    Each request has timeout_s, all together twice that, and a limit on their size; no redirect is followed. After the first one that
    gets no answer in time the others are not tried.

    Raises:
        BadInput: the address holds a user, a password, a query or a fragment.
        ServerError: nothing answers at the address, or /server_info is no answer of SGLang.
    """
    import time

    from lib.server.bounded import Answer, get_bounded, refuse_url_with_secret

    refuse_url_with_secret(base_url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base = base_url.rstrip("/")
    problems: list[str] = []
    facts: list[Fact] = []

    ended = False
    end = time.monotonic() + 2 * timeout_s

    def get(path: str) -> Answer | None:
        nonlocal ended
        if ended:
            return None
        answer = get_bounded(base + path, headers=headers, total_s=max(0.1, min(timeout_s, end - time.monotonic())))
        ended = answer.ended
        if answer.problem or answer.status != 200:
            problems.append(f"{path}: {answer.problem or f'HTTP {answer.status}'}")
            return None
        return answer

    for path, read in (
        ("/server_info", server_info_facts),
        ("/model_info", model_info_facts),
        ("/v1/models", v1_models_facts),
    ):
        answer = get(path)
        if answer is None:
            continue
        try:
            content = answer.json()
        except ValueError:
            problems.append(f"{path}: not JSON")
            continue
        if isinstance(content, dict):
            facts += read(content, path)
    answer = get("/metrics")
    if answer is not None:
        try:
            facts += metrics_facts(answer.text)
        except BadInput:
            problems.append("/metrics: no sglang: metric")
    if not facts:
        raise ServerError(
            f"expected an SGLang server at {base_url}",
            "; ".join(problems),
            "check the address, and WORKBOOK_API_KEY if it asks for a key",
        )
    return facts


# --- parts that somebody describes ------------------------------------------------------------------------------------


#: As in lib.model.checkpoint: ModelOpt and compressed-tensors, the old shared kv_scale, Quark's output_scale.
_KV_SCALE = re.compile(r"(?:^|[._])(?:kv?|v)_scale$|\.[kv]_proj\.output_scale$")


def scales_fact(
    names: Iterable[str],
    values: Iterable[float] = (),
    *,
    source: str,
    path: str,
    how: How = "read",
    count: int | None = None,
    complete: bool = True,
) -> Fact:
    """The KV scale tensors among a checkpoint's tensor names, and their values where they are known.

    `weight_scale_inv`, `input_scale` and a query's `q_scale` are no KV scales.

    Args:
        names: tensor names.
        values: values of scale tensors.
        source: which input says so.
        path: its file.
        how: how it is known.
        count: the number of scale tensors, where `names` is only a sample of them.
        complete: all values were read; otherwise only a value other than 1.0 settles anything.
    """
    found = sorted(name for name in names if _KV_SCALE.search(name))
    known = sorted(values)
    other = any(value != 1.0 for value in known)
    value = {
        "present": bool(found) or bool(count),
        "count": len(found) if count is None else count,
        "names": found[:4],
        "min": known[0] if known else None,
        "max": known[-1] if known else None,
        "all_one": False if other else True if known and complete else None,
    }
    quote = ", ".join(found[:2]) or "no k_scale/v_scale among the tensor names"
    return make_fact("kv_scales", value, how, source, path=path, quote=quote)


def config_facts(
    config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None = None, path: str = "config.json"
) -> list[Fact]:
    """What config.json and hf_quant_config.json say (no tensors, no other files)."""
    text = config.get("text_config")
    inner: Mapping[str, Any] = text if isinstance(text, dict) else config
    facts: list[Fact] = []

    def add(name: str, value: Any, quote: str | None = None) -> None:
        facts.append(make_fact(name, value, "read", "checkpoint", path=path, quote=quote))

    architectures = config.get("architectures")
    if isinstance(architectures, list) and architectures:
        add("model_class", str(architectures[0]))
    quantization = (
        config.get("quantization_config") or inner.get("quantization_config") or config.get("compression_config")
    )
    quantization = quantization if isinstance(quantization, dict) else None
    add("kv_declared", {"config": dict(config), "hf_quant_config": dict(hf_quant_config) if hf_quant_config else None})
    section = (hf_quant_config or {}).get("quantization")
    algo = (quantization or {}).get("quant_algo") or (section.get("quant_algo") if isinstance(section, dict) else None)
    method = (quantization or {}).get("quant_method")
    if quantization and str(method) == "compressed-tensors":
        algo = algo or str(quantization.get("format") or "")
    declared = weight_quant(method, algo)
    if declared["kind"] != "none" and _all_excluded(quantization, section):
        declared = {"kind": "none", "detail": f"{declared['detail']} is declared, and every linear is excluded from it"}
    add("weight_quant", declared)
    add("mla", bool(inner.get("kv_lora_rank")))
    experts = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    add("is_moe", any(isinstance(inner.get(key), int) and inner[key] > 1 for key in experts))
    add("recurrent", _recurrent_kind(inner))
    add("mamba_ssm_dtype_config", inner.get("mamba_ssm_dtype"))
    if isinstance(inner.get("max_position_embeddings"), int):
        add("native_context", inner["max_position_embeddings"])
    rope = inner.get("rope_parameters") or inner.get("rope_scaling")
    add("rope", rope if isinstance(rope, dict) else {})
    forced = {"DeepseekV4ForCausalLM": "fp8_e4m3", "MuseSparkForCausalLM": "fp8_e4m3"}
    if architectures and str(architectures[0]) in forced:
        add("kv_auto_forced", forced[str(architectures[0])])
    return facts


def _all_excluded(*sections: Any) -> bool:
    """Whether a quantization leaves every linear out (`*`), so that it only stands for the KV cache."""
    keys = ("ignore", "exclude_modules", "modules_to_not_convert", "exclude")
    lists = [
        part[key] for part in sections if isinstance(part, dict) for key in keys if isinstance(part.get(key), list)
    ]
    return any(str(name) in ("*", "re:.*") for names in lists for name in names)


#: safetensors dtypes that hold weights in 16 bits or more; everything else is a narrow or packed form.
_WIDE = {"F64", "F32", "F16", "BF16", "I64", "BOOL", "C64"}


def _stored_weights(facts: list[Fact], parameters: Mapping[str, int], path: str) -> list[Fact]:
    """The same facts, with `weight_quant` corrected by what the tensors are stored as (`stored_narrow`)."""
    if not parameters:
        return facts
    narrow = {dtype: count for dtype, count in parameters.items() if dtype not in _WIDE}
    told = ", ".join(f"{dtype} {count:,}" for dtype, count in parameters.items())
    out: list[Fact] = []
    for fact in facts:
        if fact.name == "weight_quant" and fact.value["kind"] != "none":
            value = {**fact.value, "stored_narrow": bool(narrow), "stored": told}
            fact = make_fact("weight_quant", value, "read", fact.source, path=path, quote=f"parameters: {told}")
        out.append(fact)
    return out


def _recurrent_kind(inner: Mapping[str, Any]) -> str:
    if inner.get("linear_num_value_heads"):
        return "gdn"
    if inner.get("linear_attn_config"):
        return "kda"
    if any(
        key in inner for key in ("mamba_num_heads", "mamba_n_heads", "ssm_state_size", "mamba_d_state", "mamba_expand")
    ):
        return "mamba2"
    return "none"


def json_object(path: Path | None) -> dict[str, Any]:
    """A JSON object from a file (None: standard input); UnreadableFile says what is wrong with it."""
    name = path.name if path else "standard input"
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig") if path else sys.stdin.read())
    except OSError as error:
        raise UnreadableFile(f"expected a readable file at {path}", error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(f"expected JSON in {name}", str(error)[:120]) from error
    if not isinstance(content, dict):
        raise UnreadableFile(f"expected a JSON object in {name}", type(content).__name__)
    return content


def gpu_fact(text: str) -> Fact:
    """The compute capability of the GPUs by their name or number; BadInput when it is not a GPU that is known here."""
    sm = gpu_sm(text)
    if sm is None:
        names = ", ".join(name for name, _ in GPU_SM)
        raise BadInput("expected a GPU or a compute capability such as 12.0", text, f"one of {names}")
    return make_fact("gpu_sm", sm, "asked", "given", path="--gpu", quote=text)


def version_fact(version: str, source: str = "given") -> Fact:
    """The SGLang version as somebody names it; BadInput when it is no release."""
    if version_of(version) is None:
        raise BadInput("expected an SGLang version such as 0.5.16", version[:60])
    return make_fact("sglang_version", version, "asked", source, path="--sglang-version", quote=version)


def gather(*groups: Iterable[Fact]) -> Facts:
    """All facts of several inputs about one deployment; contradictions stay visible (rule X1)."""
    facts = Facts()
    for group in groups:
        facts = facts.plus(group)
    return facts


def stated_facts(values: Mapping[str, Any], source: str = "report") -> list[Fact]:
    """Facts that somebody states (a bug report, a ticket), as quoted: never surer than that."""
    return [
        make_fact(name, value, "quoted", source, path=source, quote=f"{name} = {value}")
        for name, value in values.items()
    ]


#: Keys under which a description of a deployment may hold each kind of input.
_KEYS: dict[str, tuple[str, ...]] = {
    "version": ("sglang_version", "sglang", "version"),
    "flags": ("args", "flags", "command", "launch", "launch_command", "server_args"),
    "environment": ("env", "environment"),
    "log": ("log", "logs", "lines", "server_log"),
    "trace": ("trace", "kernels", "profile"),
    "tensors": ("checkpoint_tensor_names", "tensor_names", "tensors"),
    "output": ("output", "content", "completion", "response", "answer"),
    "class": ("model_class", "class", "architecture", "architectures", "model_type_class"),
    "requests": ("request_params", "sampling_params", "request", "requests", "sampling"),
    "gpu": ("gpu", "gpus", "hardware", "device"),
}


def described_facts(description: Mapping[str, Any] | list[str] | str, folder: Path = Path()) -> Facts:
    """Facts from a description of a deployment: one object whose keys hold what a person would paste.

    Args:
        description: a log's text, or an object with any of: a version, args (a launch line), env, log lines, config and
            hf_quant_config (objects or files), generation_config, tensor names, k/v scale values, server_info, metrics,
            model_info, gpu, trace, output, engine; and any fact by its own name (attention_backend, ...).
        folder: where the files are that it names.

    Raises:
        BadInput: an input in it cannot be read.
    """
    if isinstance(description, str | list | tuple):
        return gather(log_facts(_joined(description, "\n").splitlines(), "log"))
    given = dict(description)
    groups: list[list[Fact]] = []

    def take(kind: str) -> Any:
        return next((given.pop(key) for key in _KEYS[kind] if key in given), None)

    flags = take("flags")
    if isinstance(flags, Mapping):
        named = {ALIASES.get(str(name), str(name)): value for name, value in flags.items()}
        groups.append(stated_facts({name: _typed_value(name, named[name]) for name in named if name in _ARGUMENTS}))
    elif flags is not None:
        groups.append(flags_facts(_joined(flags), "args"))
    version = take("version")
    if version is not None:
        groups.append(stated_facts({"sglang_version": str(version)}))
    environment = take("environment")
    if isinstance(environment, Mapping):
        variables = {str(name): str(value) for name, value in environment.items()}
        groups.append([environment_fact(variables, complete=False, path="env")])
        if any(name.startswith("VLLM_") for name in variables) and "engine" not in given:
            groups.append([make_fact("engine", "vllm", "derived", "env", note="VLLM_ variables")])
    log = take("log")
    if log is not None:
        groups.append(log_facts(_joined(log, "\n").splitlines(), "log"))
    trace = take("trace")
    if trace is not None:
        names = list(map(str, trace)) if isinstance(trace, list | tuple) else [str(trace)]
        groups.append(stated_facts({"kernel_trace": names}, "trace"))
    output = _content(take("output"))
    if output is not None:
        groups.append(stated_facts({"output_text": output}, "output"))
    named_class = take("class")
    if isinstance(named_class, list) and named_class:
        named_class = named_class[0]
    if isinstance(named_class, str):
        groups.append(stated_facts({"model_class": named_class}))
    requests = take("requests")
    if isinstance(requests, Mapping):
        groups.append(stated_facts({"request_params": dict(requests)}))
    gpu = take("gpu")
    if gpu is not None and gpu_sm(str(gpu)):
        groups.append([gpu_fact(str(gpu))])
    config, hf_quant = (_object(given.pop(key, None), folder) for key in ("config", "hf_quant_config"))
    quantization = _object(given.pop("quantization_config", None), folder)
    if quantization is not None:
        config = {**(config or {}), "quantization_config": quantization}
    declared = {name: given[name] for name in ("quant_algo", "kv_cache_quant_algo") if name in given}
    if declared and hf_quant is None:
        hf_quant = {"quantization": declared}
    if config is not None or hf_quant is not None:
        groups.append(config_facts(config or {}, hf_quant))
    generation = _object(given.pop("generation_config", None), folder)
    if generation is not None:
        groups.append(stated_facts({"generation_config": generation}))
    groups.append(_described_scales(given, take("tensors")))
    for key, read in (("server_info", server_info_facts), ("model_info", model_info_facts)):
        answer = _object(given.pop(key, None), folder)
        if answer is not None:
            groups.append(read(answer))
    if isinstance(given.get("metrics"), str):
        groups.append(metrics_facts(given.pop("metrics")))
    by_name = [name for name in given if name in _STATED or name in _ARGUMENTS]
    groups.append(stated_facts({name: _typed_value(name, given[name]) for name in by_name}))
    facts = gather(*groups)
    scales = facts.value("kv_scales")
    if scales and scales.get("present") and not derived(facts).known("kv_scales_loaded"):
        model_class, version_told = facts.value("model_class"), facts.value("sglang_version")
        told = loads_scales(model_class, version_told, None, "modelopt") if model_class else None
        note = "assumed: the description names neither the tensors nor the quantization; ModelOpt's are loaded by most"
        state = told.value if told else "loaded"
        facts = facts.plus([make_fact("kv_scales_loaded", state, "derived", "description", note=note)])
    return facts


def _described_scales(given: Mapping[str, Any], names: Any) -> list[Fact]:
    values = [
        float(number)
        for key, value in given.items()
        if re.search(r"(?:^|_)[kv]_scales?$", key)
        for number in (value if isinstance(value, list) else [value])
        if isinstance(number, int | float) and not isinstance(number, bool)
    ]
    if values:
        count = sum(1 for name in names or () if _KV_SCALE.search(str(name))) or len(values)
        named = [str(name) for name in names or ()]
        return [scales_fact(named, values, source="report", path="report", how="quoted", count=count)]
    if isinstance(names, list):
        return [scales_fact(map(str, names), source="report", path="tensor names", how="quoted")]
    return []


def _joined(text: Any, by: str = " ") -> str:
    return by.join(map(str, text)) if isinstance(text, list | tuple) else str(text)


def _content(answer: Any) -> str | None:
    """The text of an answer: itself, or the first choice of an OpenAI-style object."""
    if isinstance(answer, Mapping):
        choices = answer.get("choices")
        first = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], Mapping) else answer
        message = first.get("message")
        inner = message.get("content") if isinstance(message, Mapping) else first.get("text", first.get("content"))
        return inner if isinstance(inner, str) else None
    return None if answer is None else str(answer)


def _object(value: Any, folder: Path) -> dict[str, Any] | None:
    if isinstance(value, Mapping):
        return dict(value)
    return json_object(folder / value) if isinstance(value, str) and value.endswith(".json") else None
