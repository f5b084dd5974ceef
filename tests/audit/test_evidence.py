"""How facts come in: launch lines, environments, logs, answers of a server, checkpoints; and how bad input is
refused."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.audit import evidence
from lib.audit.evidence import checkpoint_facts, gather, log_file_facts
from lib.audit.facts import DEFAULT_NOTE, Fact, Facts, make_fact
from lib.audit.rules import audit
from lib.audit.scales import derived
from lib.errors import BadInput, ServerError, UnreadableFile, WorkbookError
from tests.audit.checkpoints import FP8_KV, write_checkpoint

RECORDED = Path(__file__).parents[1] / "recorded"
SECRET = "sk-live-0123456789abcdef"


def told(facts: list[Any]) -> dict[str, Any]:
    """Fact name -> value of its first sighting."""
    values: dict[str, Any] = {}
    for fact in facts:
        values.setdefault(fact.name, fact.value)
    return values


# --- launch line ----------------------------------------------------------------------------------------


def test_flags_in_all_spellings() -> None:
    """Values after a space or an equals sign, booleans, numbers, old and short names, environment in front and
    by -e."""
    line = (
        "docker run -e SGLANG_SIMULATE_ACC_LEN=2 --env SGLANG_MAMBA_SSM_DTYPE=bfloat16 image "
        "python -m sglang.launch_server "
        "--model-path '/models/a b' --tp=8 --kv-cache-dtype bf16 --fp4-gemm-backend flashinfer_cudnn --enable-hisparse "
        "--mamba-scheduler-strategy extra_buffer --speculative-accept-threshold-single 0.9 --chat-template=x.jinja"
    )
    values = told(evidence.flags_facts(line))
    assert values["environment"] == {
        "variables": {"SGLANG_SIMULATE_ACC_LEN": "2", "SGLANG_MAMBA_SSM_DTYPE": "bfloat16"},
        "complete": False,
    }
    expected = {
        "model_path": "/models/a b", "tp_size": 8, "kv_cache_dtype": "bf16", "enable_hisparse": True,
        "fp4_gemm_runner_backend": "flashinfer_cudnn", "mamba_radix_cache_strategy": "extra_buffer",
        "speculative_accept_threshold_single": 0.9, "chat_template": "x.jinja",
    }  # fmt: skip
    assert {name: values[name] for name in expected} == expected


def test_only_a_whole_launch_line_tells_defaults() -> None:
    """A few flags say nothing about the others; a command with a model does, and its defaults say that they are."""
    assert "load_format" not in told(evidence.flags_facts("--kv-cache-dtype bf16"))
    whole = evidence.flags_facts("sglang serve --model-path m --kv-cache-dtype bf16")
    default = next(fact for fact in whole if fact.name == "load_format")
    assert (default.value, default.how, default.note) == ("auto", "derived", DEFAULT_NOTE)
    assert "attention_backend" not in told(whole), "its default is worked out at start-up"


@pytest.mark.parametrize("line", ["--chat-template 'open", "--tp eight"])
def test_bad_launch_lines_are_refused(line: str) -> None:
    """One message that says what was expected."""
    with pytest.raises(BadInput, match="expected"):
        evidence.flags_facts(line)


def test_environ_is_whole_and_keeps_no_secret() -> None:
    """A copy of /proc/PID/environ is complete; only variables that rules look at are kept, and never a key."""
    text = f"PATH=/bin\0SGLANG_ENABLE_X=1\0OPENAI_API_KEY={SECRET}\0SGLANG_API_KEY={SECRET}\0"
    fact = evidence.environ_facts(text)[0]
    assert fact.value == {"variables": {"SGLANG_ENABLE_X": "1"}, "complete": True}
    with pytest.raises(BadInput):
        evidence.environ_facts("nothing here")


@pytest.mark.parametrize(
    ("text", "sm"),
    [
        ("GB10 sm_121", "12.1"),
        ("8x NVIDIA RTX PRO 6000 Blackwell", "12.0"),
        ("NVIDIA_H200", "9.0"),
        ("SM100", "10.0"),
        ("12.0", "12.0"),
        ("MI300X", None),
        ("H2000", None),
    ],
)
def test_compute_capability(text: str, sm: str | None) -> None:
    """Names and numbers of GPUs; an unknown one is None, not a guess."""
    assert evidence.gpu_sm(text) == sm


# --- log ------------------------------------------------------------------------------------------------

ARGS = (
    "[2026-01-01 00:00:00] server_args=ServerArgs(model_path='m', kv_cache_dtype='{dtype}', "
    "attention_backend='triton', api_key='{key}', tp_size=2, speculative_algorithm=None)"
)
POOL = (
    "[2026-01-01 00:00:09 TP{rank}] KV Cache is allocated. dtype: torch.{dtype}, #tokens: 1000, K size: 1.00 GB, "
    "V size: 1.00 GB"
)
WARNING = "Using FP8 KV cache but no scaling factors provided. Defaulting to scaling factors of 1.0."


def test_only_the_last_launch_of_a_log_counts() -> None:
    """A journal with two launches: the first one's FP8 pool and warning are gone."""
    lines = [
        ARGS.format(dtype="fp8_e4m3", key=SECRET),
        f"[2026-01-01 00:00:05 TP0] {WARNING}",
        POOL.format(rank=0, dtype="float8_e4m3fn"),
        ARGS.format(dtype="bf16", key=SECRET),
        POOL.format(rank=0, dtype="bfloat16"),
        POOL.format(rank=1, dtype="bfloat16"),
    ]
    values = told(evidence.log_facts(lines))
    assert (values["kv_dtype_target"], values["kv_cache_dtype"]) == ("bfloat16", "bf16")
    assert "scale_default" not in values["log_lines"] and "kv_dtype_draft" not in values


def test_no_secret_of_a_log_reaches_the_report() -> None:
    """The arguments' line holds an API key; report, evidence and facts do not."""
    lines = [ARGS.format(dtype="auto", key=SECRET), POOL.format(rank=0, dtype="float8_e4m3fn")]
    assert SECRET not in audit(Facts().plus(evidence.log_facts(lines))).model_dump_json()


def test_no_secret_of_server_info_reaches_the_report() -> None:
    """/server_info carries api_key and the launch command."""
    info = json.loads((RECORDED / "h200-sglang-0.5.16" / "m2_auto.server_info.json").read_text())
    info |= {"api_key": SECRET, "launch_command": f"--api-key {SECRET}"}
    info["internal_states"][0]["admin_api_key"] = SECRET
    report = audit(Facts().plus(evidence.server_info_facts(info)))
    assert report.findings and SECRET not in report.model_dump_json()


def test_a_foreign_log_is_refused(tmp_path: Path) -> None:
    """The log of another program, an empty file, binary data and a missing file: one message each."""
    for name, content in (("nginx.log", b'127.0.0.1 - - "GET / HTTP/1.1" 200\n' * 50), ("empty.log", b""),
                          ("rubbish.log", bytes(range(256)) * 64)):  # fmt: skip
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(UnreadableFile):
            evidence.log_file_facts(path)
    with pytest.raises(UnreadableFile):
        evidence.log_file_facts(tmp_path / "missing.log")


def test_acceptance_stuck_at_zero_is_counted() -> None:
    """Decode lines with acceptance 0 while the pool is more than half full; the same at low usage does not count."""
    decode = (
        "[2026-01-01 00:01:00] Decode batch, #running-req: 4, #full token: 9, full token usage: {usage}, mamba num: 4, "
        "mamba usage: 0.10, accept len: 1.00, accept rate: 0.00, cuda graph: True, gen throughput (token/s): 9.00, "
        "#queue-req: 0"
    )
    lines = [ARGS.format(dtype="auto", key=SECRET)]
    lines += [decode.format(usage="0.71")] * 4 + [decode.format(usage="0.05")] * 3
    assert told(evidence.log_facts(lines))["decode_batches"] == {"total": 7, "stuck": 4}


# --- answers --------------------------------------------------------------------------------------------


def test_bytes_per_token_from_server_info() -> None:
    """m2_auto: 21.9 GiB over 11,483,156 tokens are 2,048 B within the printed precision."""
    info = json.loads((RECORDED / "h200-sglang-0.5.16" / "m2_auto.server_info.json").read_text())
    # 21.9 * 2^30 / 11,483,156 = 2047.8
    assert told(evidence.server_info_facts(info))["kv_bytes_per_token"] == pytest.approx(2048, rel=0.001)


def test_a_pool_too_small_to_print_gives_no_ratio() -> None:
    """0.00 GB over 4,096 tokens is not 0 bytes per token."""
    info = {"version": "0.5.16", "internal_states": [{"memory_usage": {"kvcache": 0.0, "token_capacity": 4096}}]}
    assert "kv_bytes_per_token" not in told(evidence.server_info_facts(info))


def test_metrics() -> None:
    """Gauges of SGLang are read, other Prometheus text is refused."""
    text = 'sglang:max_total_num_tokens{model_name="m"} 1000.0\nsglang:kv_cache_memory_usage_gb{tp_rank="0"} 1.5\n'
    values = told(evidence.metrics_facts(text))
    # 1.5 * 2^30 / 1000 = 1,610,612.7
    assert values["max_total_num_tokens"] == 1000 and values["kv_bytes_per_token"] == pytest.approx(1610612.736)
    with pytest.raises(BadInput):
        evidence.metrics_facts("vllm:num_requests_running 1.0\n")


class _Answers(BaseHTTPRequestHandler):
    routes: dict[str, tuple[int, bytes]] = {}
    key: str | None = None

    def do_GET(self) -> None:  # noqa: N802
        status, body = self.routes.get(self.path, (404, b""))
        if self.key and self.headers.get("Authorization") != f"Bearer {self.key}":
            status, body = 401, b""
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Silent."""


@pytest.fixture
def server() -> Iterator[str]:
    """A local server that answers with recorded answers."""
    http = HTTPServer(("127.0.0.1", 0), _Answers)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{http.server_address[1]}"
    http.shutdown()
    http.server_close()
    _Answers.routes, _Answers.key = {}, None


def test_a_running_server(server: str) -> None:
    """GET /server_info, /model_info, /v1/models and /metrics; a 404 of one of them is no failure."""
    folder = RECORDED / "h200-sglang-0.5.16"
    _Answers.routes = {
        "/server_info": (200, (folder / "m2_auto.server_info.json").read_bytes()),
        "/model_info": (200, b'{"architectures": ["Qwen3_5MoeForConditionalGeneration"], "tool_call_parser": null}'),
        "/v1/models": (200, b'{"data": [{"id": "m", "max_model_len": 32768}]}'),
    }
    values = told(evidence.fetch_server(server + "/"))
    assert (values["kv_dtype_target"], values["model_class"], values["context_len"]) == (
        "float8_e4m3fn", "Qwen3_5MoeForConditionalGeneration", 32768,
    )  # fmt: skip


def test_a_server_that_asks_for_a_key(server: str) -> None:
    """Without the key one message, which does not hold the key; with it the facts."""
    _Answers.routes, _Answers.key = {"/server_info": (200, b'{"version": "0.5.16"}')}, SECRET
    with pytest.raises(ServerError, match="401") as error:
        evidence.fetch_server(server)
    assert SECRET not in str(error.value)
    assert told(evidence.fetch_server(server, api_key=SECRET))["sglang_version"] == "0.5.16"


def test_a_server_that_is_not_there() -> None:
    """Nothing listens: one message."""
    with pytest.raises(ServerError, match="expected an SGLang server"):
        evidence.fetch_server("http://127.0.0.1:9", timeout_s=1)


# --- checkpoint -----------------------------------------------------------------------------------------


def test_checkpoint(tmp_path: Path) -> None:
    """Class, scales with their values, template and sampling defaults of a folder."""
    folder = write_checkpoint(tmp_path, hf_quant_config=FP8_KV, k_scale=0.5, v_scale=0.25)
    values = told(evidence.checkpoint_facts(folder))
    assert values["model_class"] == "LlamaForCausalLM"
    scales = {key: values["kv_scales"][key] for key in ("present", "count", "min", "max", "all_one")}
    assert scales == {"present": True, "count": 8, "min": 0.25, "max": 0.5, "all_one": False}
    assert (values["has_chat_template"], values["generation_config"], values["native_context"]) == (False, False, 8192)
    kinds = (values["recurrent"], values["mla"], values["is_moe"], values["weight_quant"]["kind"])
    assert kinds == (
        "none",
        False,
        False,
        "none",
    )


@pytest.mark.parametrize("value", [1.0, 0.999])
def test_scales_of_one(tmp_path: Path, value: float) -> None:
    """Exactly 1.0 is 1.0; close to it is not."""
    folder = write_checkpoint(tmp_path, hf_quant_config=FP8_KV, k_scale=value, v_scale=1.0)
    assert told(evidence.checkpoint_facts(folder))["kv_scales"]["all_one"] is (value == 1.0)


def test_state_dtype_from_its_pool() -> None:
    """Qwen3.8-27B: 360 slots and 50.77 GiB are float32, 25.39 GiB would be bfloat16, in between is nothing."""
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
        "text_config": {
            "model_type": "qwen3_5_text", "num_hidden_layers": 64, "hidden_size": 5120, "num_attention_heads": 24,
            "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320, "intermediate_size": 17408,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16, "linear_num_value_heads": 48,
            "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4, "max_position_embeddings": 262144, "torch_dtype": "bfloat16",
        },
    }  # fmt: skip
    known = Facts().plus(evidence.config_facts(config))

    def dtype(gib: float) -> list[Any]:
        pool = make_fact("state_pool", {"slots": 360, "ssm_gib": gib}, "measured", "log")
        return [fact.value for fact in evidence.ssm_dtype_facts(known.plus([pool]))]

    # 48 layers * 48 heads * 128 * 128 * 4 B = 150,994,944 B a slot; * 361 slots / 2^30 = 50.77
    assert (dtype(50.77), dtype(25.39), dtype(38.0)) == (["float32"], ["bfloat16"], [])


@pytest.mark.parametrize(("gib", "dtype"), [(8.0, "bfloat16"), (4.0, "float8_e4m3fn"), (6.0, None)])
def test_pool_dtype_by_arithmetic(tmp_path: Path, gib: float, dtype: str | None) -> None:
    """From 0.5.18 on /server_info says auto at both levels: pool size over tokens and the geometry tell the dtype."""
    # 4 layers * 4 heads * 128 * 2 (K and V) * 2 B = 8,192 B a token in bf16; 2^20 tokens are 8 GiB
    usage = {"kvcache": gib, "token_capacity": 1 << 20}
    info = {"version": "0.5.20", "kv_cache_dtype": "auto", "tp_size": 1,
            "internal_states": [{"kv_cache_dtype": "auto", "memory_usage": usage}]}  # fmt: skip
    folder = write_checkpoint(tmp_path, hf_quant_config=FP8_KV, k_scale=0.5, v_scale=0.25)
    known = derived(evidence.gather(evidence.server_info_facts(info), evidence.checkpoint_facts(folder)))
    fact = known.best("kv_dtype_target")
    assert fact is not None
    # 6 GiB fit neither: then the checkpoint's declaration decides, and says so.
    assert (fact.value, fact.source) == ((dtype, "arithmetic") if dtype else ("float8_e4m3fn", "rule"))


@pytest.mark.parametrize("content", ["{", "[1]", '"x"', "\0\0"])
def test_bad_json_is_refused(tmp_path: Path, content: str) -> None:
    """Truncated JSON, a list, a string and binary data: one message."""
    path = tmp_path / "info.json"
    path.write_text(content)
    with pytest.raises(UnreadableFile):
        evidence.json_object(path)


# --- descriptions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("description", "name", "value"),
    [
        ({"response": {"choices": [{"message": {"content": "++++"}}]}}, "output_text", "++++"),
        ({"architectures": ["LlamaForCausalLM"]}, "model_class", "LlamaForCausalLM"),
        ({"sampling_params": {"min_p": 0.1}}, "request_params", {"min_p": 0.1}),
        ({"args": ["--kv-cache-dtype", "fp8_e5m2"]}, "kv_cache_dtype", "fp8_e5m2"),
        ({"args": {"kv_cache_dtype": "bf16", "tp": 4}}, "tp_size", 4),
        ({"sglang": "0.5.16"}, "sglang_version", "0.5.16"),
        ({"gpu": "8x RTX PRO 6000"}, "gpu_sm", "12.0"),
        ({"kv_dtype_target": "float8_e4m3fn"}, "kv_dtype_target", "float8_e4m3fn"),
        ({"something": "else"}, "kv_dtype_target", None),
    ],
)
def test_descriptions(description: dict[str, Any], name: str, value: Any) -> None:
    """What a report may hold, under the keys that people use; anything else is left alone."""
    assert evidence.described_facts(description).value(name) == value


def test_declared_kv_dtype_in_a_description() -> None:
    """`kv_cache_quant_algo: FP8` with an algo, under auto, is a silent FP8 cache."""
    told = {"kv_cache_quant_algo": "FP8", "quant_algo": "NVFP4", "kv_cache_dtype": "auto", "sglang": "0.5.16"}
    report = audit(evidence.described_facts({**told, "model_class": "Qwen3_5MoeForConditionalGeneration"}))
    assert "silent_quantized_kv" in [item.verdict for item in report.findings]


# --- anything at all ------------------------------------------------------------------------------------

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=12,
)
_FIELDS = ["version", "kv_cache_dtype", "internal_states", "max_total_num_tokens", "attention_backend", "device"]
_FIELDS += ["speculative_accept_threshold_single", "json_model_override_args", "context_length", "tp_size"]
_NAMES = st.sampled_from([*_FIELDS, "speculative_algorithm"])


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(_NAMES | st.text(max_size=8), _JSON, max_size=8))
def test_any_object_as_server_info(info: dict[str, Any]) -> None:
    """Whatever an endpoint answers, the audit gives a report or one clear refusal."""
    with contextlib.suppress(WorkbookError):
        audit(Facts().plus(evidence.server_info_facts(info)))


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=300))
def test_any_text_as_input(text: str) -> None:
    """Any text as launch line, metrics, environment or log: facts or one clear refusal."""
    for read in (evidence.flags_facts, evidence.metrics_facts, evidence.environ_facts):
        with contextlib.suppress(WorkbookError):
            audit(Facts().plus(read(text)))
    with contextlib.suppress(WorkbookError):
        audit(Facts().plus(evidence.log_facts(text.splitlines())))


_KEYS = ["config", "env", "log", "args", "gpu", "tensors", "k_scale", "output", "kv_cache_dtype", "attention_backend"]
_KEYS += ["server_info", "trace", "sglang", "model_info", "hf_quant_config", "metrics", "kv_dtype_target"]


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(_KEYS), _JSON, max_size=6))
def test_any_description(description: dict[str, Any]) -> None:
    """Any object as a description of a deployment: a report or one clear refusal."""
    with contextlib.suppress(WorkbookError):
        audit(evidence.described_facts(description))


def _q0(folder: Path, *more: list[Fact]) -> tuple[str, str]:
    """Where Q0 ends and what it says."""
    report = audit(gather(checkpoint_facts(folder), *more))
    for part in ("fine", "not_checked", "accepted_losses"):
        for item in getattr(report, part):
            if item.id == "Q0":
                return part, getattr(item, "what", getattr(item, "why", ""))
    raise AssertionError("Q0 is missing")


def test_a_quantization_that_excludes_every_linear_quantizes_no_weight(tmp_path: Path) -> None:
    """H1's checkpoints: FP8 is declared for the KV cache only; a log that names FP8 does not change that."""
    folder = write_checkpoint(tmp_path, hf_quant_config=FP8_KV, k_scale=0.05, v_scale=0.02)
    log = Path(__file__).parents[1] / "recorded" / "h200-h1" / "e_L2_auto.log"
    for more in ([], [log_file_facts(log)]):
        part, words = _q0(folder, *more)
        assert part == "fine" and "every linear is excluded" in words
    alone = audit(gather(log_file_facts(log)))
    assert all("only the checkpoint's files say" in item.what for item in alone.accepted_losses if item.id == "Q0")


def test_declared_fp8_without_an_8_bit_tensor_is_not_called_fp8(tmp_path: Path) -> None:
    """Files that declare FP8 weights and hold none: not accepted as FP8, and not called fine."""
    declared = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}}
    part, words = _q0(write_checkpoint(tmp_path, hf_quant_config=declared))
    assert part == "not_checked" and "F32" in words
