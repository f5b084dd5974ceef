"""Facts about one deployment from what an engineer has at hand: a launch line, a log, answers of a server, a checkpoint.

Thin: files and HTTP answers come in here and leave as facts. Only what a rule asks for is taken out of an input, so that
keys in `server_args=` lines and `/server_info` never get further than this file.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lib.audit.facts import FACTS, Fact, Facts, make_fact, torch_dtype
from lib.audit.rules import LINES
from lib.errors import BadInput, ServerError, UnreadableFile
from lib.records import Evidence

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
    "fp4_gemm_backend": "fp4_gemm_runner_backend",
    "fp8_gemm_backend": "fp8_gemm_runner_backend",
    "mamba_scheduler_strategy": "mamba_radix_cache_strategy",
    "enable_hicache": "enable_hierarchical_cache",
}

_ARGUMENTS = {name for name, kind in FACTS.items() if kind.belongs == "argument"}
_BOOLEAN = {name for name, value in DEFAULTS.items() if isinstance(value, bool)} | {
    "enable_mamba_cache_stochastic_rounding",
    "enable_p2p_check",
}
_NUMBER = {
    "tp_size": int,
    "context_length": int,
    "chunked_prefill_size": int,
    "speculative_eagle_topk": int,
    "speculative_draft_window_size": int,
    "speculative_accept_threshold_single": float,
    "speculative_accept_threshold_acc": float,
}

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
    given, variables, whole = _split_words(words)
    facts: list[Fact] = []
    for name, value in given.items():
        facts.append(make_fact(name, value, "asked", "flags", path=path, quote=f"{name} = {value}"))
    if whole:
        for name, value in DEFAULTS.items():
            if name not in given:
                note = "not on the launch line: SGLang's default"
                facts.append(make_fact(name, value, "derived", "flags", path=path, note=note))
    if variables:
        facts.append(environment_fact(variables, complete=False, path=path))
        if "FLASHINFER_VERSION" in variables:
            facts.append(make_fact("flashinfer_version", variables["FLASHINFER_VERSION"], "asked", "flags", path=path))
    return facts


def _split_words(words: list[str]) -> tuple[dict[str, Any], dict[str, str], bool]:
    given: dict[str, Any] = {}
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
    return given, variables, whole


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

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_PAIR = re.compile(
    r"(?<![\w'])'?([a-z][a-z0-9_]*)'?(?:=|: )('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|None|True|False|-?\d[\d.]*(?:e-?\d+)?)"
    r"(?=[,)}\s])"
)
_RANK = re.compile(r"^\[?[^\]]*?((?:\b(?:DP|PP|TP|EP|ATTN_CP|MOE_DP)\d+ ?)+)\]")
_POOL = re.compile(
    r"((?:Full |SWA |\w+ )?KV Cache) (?:is allocated|VA upper bound)\.?(?: dtype: torch\.(\w+),)? #tokens: (\d+)"
    r"(?:, K size: ([\d.]+) GB, V size: ([\d.]+) GB|, KV size: ([\d.]+) GB)?"
)
_LOADED = re.compile(r"Load weight end\..*?type=(\w+)(?:, quant=(\w+))?(?:, quant_algo=(\w+))?")
_CAPACITY = re.compile(r"max_total_num_tokens=(\d+).*?context_len=(\d+)")
_BACKEND = re.compile(r"Attention backend not specified\. Use (\w+) backend by default")
_HYBRID = re.compile(r"decode_backend=(\w+), prefill_backend=(\w+)")
_TO_NATIVE = re.compile(r"will fallback to (\w+) backend|Setting attention backend to (\w+)")
_SAMPLING = re.compile(r"Using default chat sampling params from model generation config: (\{.*?\})")
_DECODE = re.compile(r"Decode batch.*?token usage: ([\d.]+).*?accept len: ([\d.]+), accept rate: ([\d.]+)")
_MOE = re.compile(r"Use (\w+) as MoE runner backend")
_FP4 = re.compile(r"auto-selecting fp4-gemm-backend=(\w+)")
_DEVICE = re.compile(r"device_name=([\w ]+?)(?:_down)?\.json|detected.*?(SM\d{2,3})|(SM\d{2,3}) \(\w+\) detected")
_VLLM = re.compile(
    r"(?:INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d \[\w+\.py:\d+\]|vLLM API server version|Initializing a V\d LLM engine"
)
_VLLM_DTYPE = re.compile(r"Initializing a V\d LLM engine \(v([\w.]+)\)")
_SGLANG_SIGNS = (
    "server_args=",
    "KV Cache is allocated",
    "max_total_num_tokens=",
    "Decode batch",
    "Prefill batch",
    "Load weight end",
)


class _LogScan:
    """One pass over a log; a new server_args= line is a new launch and starts again (only the last launch counts)."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.engine: str | None = None
        self.lines: dict[str, dict[str, Any]] = {}
        self.facts: dict[str, Fact] = {}
        self.pools: list[tuple[str, str, re.Match[str], int, str]] = []
        self.loads: dict[str, tuple[int, str]] = {}
        self.stuck = self.decodes = 0
        self.launches = 0
        self.capacity = False
        self.recurrent: str | None = None
        self.any_sign = False

    def feed(self, number: int, raw: str) -> None:
        line = _ANSI.sub("", raw).rstrip("\r\n")
        if not self.any_sign and any(sign in line for sign in _SGLANG_SIGNS):
            self.any_sign = True
            self.engine = self.engine or "sglang"
        if "server_args=" in line:
            self._launch(number, line)
            return
        if self.engine is None and _VLLM.search(line):
            self.engine = "vllm"
        if line.startswith("[") or "atch" not in line:
            self._marks(number, line)
        self._structure(number, line)

    def _launch(self, number: int, line: str) -> None:
        path, launches = self.path, self.launches + 1
        self.__init__(path)  # type: ignore[misc]
        self.launches, self.engine, self.any_sign = launches, "sglang", True
        text = line[line.index("server_args=") :]
        for match in _PAIR.finditer(text):
            name, written = match.groups()
            if name in _ARGUMENTS and name not in self.facts:
                self._keep(name, ast.literal_eval(written), "read", number, f"{name}={written}")
            elif (
                name == "device"
                and "platform" not in self.facts
                and written.strip("'\"") in ("cpu", "xpu", "npu", "hpu")
            ):
                self._keep("platform", written.strip("'\""), "read", number, f"device={written}")

    def _marks(self, number: int, line: str) -> None:
        for mark, (literal, pattern, _) in LINES.items():
            if literal in line and mark not in self.lines and re.search(pattern, line):
                self.lines[mark] = {"path": self.path, "line": number, "quote": _clean(line)}

    def _structure(self, number: int, line: str) -> None:
        if "Decode batch" in line:
            match = _DECODE.search(line)
            if match:
                self.decodes += 1
                self.stuck += float(match[1]) >= 0.5 and float(match[3]) == 0.0
                self._keep("accept_length", float(match[2]), "measured", number, line, newest=True)
            return
        if "KV Cache" in line and (match := _POOL.search(line)):
            rank = _RANK.match(line)
            self.pools.append((rank.group(1).strip() if rank else "", match[1], match, number, line))
        elif "Using KV cache dtype: torch." in line:
            self._keep("kv_dtype_target", line.rsplit("torch.", 1)[1].split()[0].rstrip(".,"), "measured", number, line)
        elif "Load weight end" in line and (match := _LOADED.search(line)):
            self.loads.setdefault(match[1], (number, line))
            if "model_class" not in self.facts:
                self._keep("model_class", match[1], "measured", number, line)
                if match[2] or match[3]:
                    self._keep("weight_quant", weight_quant(match[2], match[3]), "read", number, line)
        elif match := _CAPACITY.search(line):
            self.capacity = True
            self._keep("max_total_num_tokens", int(match[1]), "measured", number, line)
            self._keep("context_len", int(match[2]), "measured", number, line)
        elif "hybrid GDN models" in line:
            self.recurrent = "gdn"
        elif "Mamba Cache is allocated" in line:
            self.recurrent = self.recurrent or "recurrent"
        elif match := _BACKEND.search(line):
            self._backends(match[1], match[1], number, line)
        elif "hybrid attention backend" in line and (match := _HYBRID.search(line)):
            self._backends(match[2], match[1], number, line)
        elif match := _TO_NATIVE.search(line):
            self._backends(match[1] or match[2], match[1] or match[2], number, line)
        elif match := _SAMPLING.search(line):
            self._keep("default_sampling", _literal(match[1]), "measured", number, line)
        elif match := _MOE.search(line):
            self._keep("moe_runner_backend", match[1], "read", number, line, newest=True)
        elif match := _FP4.search(line):
            self._keep("fp4_gemm_runner_backend", match[1], "read", number, line, newest=True)
        if "gpu_sm" not in self.facts and (match := _DEVICE.search(line)):
            sm = gpu_sm(next(group for group in match.groups() if group).replace("_", " "))
            if sm:
                self._keep("gpu_sm", sm, "read", number, match.group(0))
        if self.engine == "vllm" and (match := _VLLM_DTYPE.search(line)):
            self.capacity = True

    def _backends(self, prefill: str, decode: str, number: int, line: str) -> None:
        self._keep("attention_backend_prefill", prefill, "measured", number, line, newest=True)
        self._keep("attention_backend_decode", decode, "measured", number, line, newest=True)

    def _keep(self, name: str, value: Any, how: Any, number: int, line: str, newest: bool = False) -> None:
        if newest or name not in self.facts:
            self.facts[name] = make_fact(name, value, how, "log", path=self.path, line=number, quote=_clean(line))

    def result(self) -> list[Fact]:
        facts = dict(self.facts)
        self._pool_facts(facts)
        started = self.capacity and (bool(self.loads) or self.engine == "vllm")
        facts["startup_seen"] = make_fact("startup_seen", started, "read", "log", path=self.path)
        facts["log_lines"] = make_fact("log_lines", self.lines, "read", "log", path=self.path)
        if self.engine:
            facts["engine"] = make_fact("engine", self.engine, "read", "log", path=self.path)
        if self.recurrent or (started and self.engine == "sglang"):
            note = None if self.recurrent else "the start-up allocates no recurrent state"
            facts["recurrent"] = make_fact(
                "recurrent", self.recurrent or "none", "measured", "log", path=self.path, note=note
            )
        if self.decodes:
            counts = {"total": self.decodes, "stuck": self.stuck}
            facts["decode_batches"] = make_fact("decode_batches", counts, "measured", "log", path=self.path)
        for mark, loaded in (("scale_not_loaded", "dropped"), ("scale_ignored_16bit", "loaded")):
            if mark in self.lines:
                seen = self.lines[mark]
                facts["kv_scales_loaded"] = make_fact(
                    "kv_scales_loaded",
                    loaded,
                    "measured",
                    "log",
                    path=self.path,
                    line=seen["line"],
                    quote=seen["quote"],
                )
        if "marlin_fallback" in self.lines:
            seen = self.lines["marlin_fallback"]
            facts["kernel_trace"] = make_fact(
                "kernel_trace", [seen["quote"]], "read", "log", path=self.path, line=seen["line"], quote=seen["quote"]
            )
        return list(facts.values())

    def _pool_facts(self, facts: dict[str, Fact]) -> None:
        if not self.pools:
            return
        rank = self.pools[0][0]
        mine = [pool for pool in self.pools if pool[0] == rank]
        speculative = len(self.loads) > 1
        for index, (_, label, match, number, line) in enumerate(mine):
            again = any(other[1] == label for other in mine[:index])
            role = "draft" if speculative and again else "target"
            dtype = torch_dtype(match[2]) if match[2] else None
            name = f"kv_dtype_{role}"
            if dtype and (name not in facts or facts[name].source != "log"):
                facts[name] = make_fact(name, dtype, "measured", "log", path=self.path, line=number, quote=_clean(line))
            sizes = [float(size) for size in (match[4], match[5], match[6]) if size]
            tokens = int(match[3])
            if role == "target" and not again and sum(sizes) > 0.1 and tokens and "kv_bytes_per_token" not in facts:
                per_token = sum(sizes) * 2**30 / tokens
                facts["kv_bytes_per_token"] = make_fact(
                    "kv_bytes_per_token", per_token, "measured", "log", path=self.path, line=number, quote=_clean(line)
                )


def log_facts(lines: Iterable[str], path: str = "log") -> list[Fact]:
    """What a log of SGLang or vLLM says that bears on accuracy; with several launches in it, the last one's."""
    scan = _LogScan(path)
    for number, line in enumerate(lines, start=1):
        scan.feed(number, line)
    return scan.result()


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
    """A line fit to be quoted: keys cut out, and not longer than a reader can take."""
    text = re.sub(
        r"(?i)((?:api[_-]?key|token|secret|password)['\"]?\s*[=:]\s*)(?!None)['\"]?[^\s,'\")}]+['\"]?", r"\1***", line
    )
    text = re.sub(r"(?i)(bearer\s+)\S+", r"\1***", text)
    return text.strip()[:300]


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a log file, whatever its encoding; UnreadableFile when it is binary or missing."""
    try:
        with path.open("rb") as file:
            head = file.read(4096)
            if b"\0" in head:
                raise UnreadableFile(f"expected a text log at {path.name}", "binary data")
            file.seek(0)
            for raw in file:
                # A line without an end in sight (a corrupt file) must not fill the memory.
                yield raw[: 1 << 20].decode("utf-8", "replace")
    except OSError as error:
        raise UnreadableFile(f"expected a readable log at {path}", error.strerror or str(error)) from error


# --- answers of a server ----------------------------------------------------------------------------------------------


def server_info_facts(info: Mapping[str, Any], path: str = "/server_info") -> list[Fact]:
    """What /server_info says: the arguments as the front process has them, and what the scheduler process resolved.

    The top-level `kv_cache_dtype` is what was asked for ('auto' hides FP8); the scheduler's is only taken when it is
    resolved, and the memory it reports gives bytes per token in every version.
    """
    facts = [
        make_fact(name, info[name], "read", "server_info", path=path, quote=f"{name}: {info[name]}")
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
        value = state["mamba_radix_cache_strategy"]
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
            facts.append(make_fact(name, info[name], "read", "model_info", path=path))
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

    Raises:
        ServerError: nothing answers at the address, or /server_info is no answer of SGLang.
    """
    import requests

    session = requests.Session()
    session.trust_env = False
    if api_key:
        session.headers["Authorization"] = f"Bearer {api_key}"
    base = base_url.rstrip("/")
    problems: list[str] = []
    facts: list[Fact] = []

    def get(path: str) -> requests.Response | None:
        try:
            answer = session.get(base + path, timeout=(5.0, timeout_s))
        except requests.RequestException as error:
            problems.append(f"{path}: {type(error).__name__}")
            return None
        if answer.status_code != 200:
            problems.append(f"{path}: HTTP {answer.status_code}")
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


def scales_fact(
    names: Iterable[str], values: Iterable[float] | None = None, *, how: Any = "read", source: str, path: str
) -> Fact:
    """The KV scale tensors among a checkpoint's tensor names, and their values where they are known.

    `weight_scale_inv`, `input_scale` and a query's `q_scale` are no KV scales.
    """
    found = sorted(name for name in names if re.search(r"(?:^|[._])[kv]_scale$", name))
    known = sorted(values) if values is not None else []
    all_one = all(value == 1.0 for value in known) if known else None
    return make_fact(
        "kv_scales",
        {
            "present": bool(found),
            "count": len(found),
            "names": found[:4],
            "min": known[0] if known else None,
            "max": known[-1] if known else None,
            "all_one": all_one,
        },
        how,
        source,
        path=path,
        quote=", ".join(found[:2]) or "no k_scale/v_scale among the tensor names",
    )


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
    dtype = next(
        (
            place[key]
            for place in (inner, config)
            for key in ("torch_dtype", "dtype")
            if isinstance(place.get(key), str)
        ),
        None,
    )
    add(
        "kv_declared",
        {
            "config": quantization,
            "hf_quant_config": dict(hf_quant_config) if hf_quant_config else None,
            "model_dtype": dtype,
        },
    )
    section = (hf_quant_config or {}).get("quantization")
    algo = (quantization or {}).get("quant_algo") or (section.get("quant_algo") if isinstance(section, dict) else None)
    method = (quantization or {}).get("quant_method")
    if quantization and str(method) == "compressed-tensors":
        algo = algo or str(quantization.get("format") or "")
    add("weight_quant", weight_quant(method, algo))
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


def json_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file; UnreadableFile says what is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UnreadableFile(f"expected a readable file at {path}", error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(f"expected JSON in {path.name}", str(error)[:120]) from error
    if not isinstance(content, dict):
        raise UnreadableFile(f"expected a JSON object in {path.name}", type(content).__name__)
    return content


def version_fact(version: str, source: str = "given") -> Fact:
    """The SGLang version as somebody names it."""
    return make_fact("sglang_version", version, "asked", source, path="--sglang-version", quote=version)


def gather(*groups: Iterable[Fact]) -> Facts:
    """All facts of several inputs about one deployment; contradictions stay visible (rule X1)."""
    facts = Facts()
    for group in groups:
        facts = facts.plus(group)
    return facts


def note_facts(values: Mapping[str, Any], source: str = "report") -> list[Fact]:
    """Facts that somebody states (a bug report, a ticket), as quoted: never surer than that."""
    return [
        Fact(
            name=name,
            value=value,
            how="quoted",
            source=source,
            evidence=[Evidence(path=source, quote=f"{name} = {value}"[:300])],
        )
        for name, value in values.items()
    ]
