"""Tables of `lib.server.log`: what each line of a server looks like, by version. A new line is a new row here.

Sources: FACTS 0, 1.4 and 4; the sources of all 18 releases from 0.5.10 to 0.5.23; recorded servers in tests/recorded.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from lib.server.failures import FAILURE_NEEDLES

#: The first release whose server_args have a name, in order. Read from the ServerArgs of all 18 releases, 0.5.10
#: to 0.5.23.
VERSION_MARKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("0.5.11", ("batch_notify_size", "debug_cuda_graph")),
    ("0.5.12", ("enable_forward_pass_metrics", "enable_return_indexer_topk")),
    ("0.5.13", ("asr_max_buffer_seconds", "deepep_dispatcher_output_dtype")),
    ("0.5.14", ("cp_strategy", "cuda_graph_backend_decode")),
    ("0.5.15", ("bf16_gemm_backend", "dcp_size")),
    ("0.5.16", ("default_chat_template_kwargs", "enable_flexkv")),
    ("0.5.17", ("dcp_comm_backend", "dwdp_size")),
    ("0.5.18", ("allowed_media_domains", "c128_page_size")),
    ("0.5.19", ("deepep_v2_mode", "enable_layernorm_sp")),
    ("0.5.20", ("dsv4_attn_backend", "enable_response_store")),
    ("0.5.21", ("boundary_reduction", "cuda_graph_prefill_max_context")),
    ("0.5.22", ("attn_dp_size", "dsa_triton_union")),
    ("0.5.23", ("enable_amd_monokernel", "enable_paged_experts")),
)
#: Releases with the same arguments as the one before them.
SAME_ARGUMENTS: dict[str, str] = {
    "0.5.10": "0.5.10 or 0.5.10.post1, or older",
    "0.5.12": "0.5.12 or 0.5.12.post1",
    "0.5.13": "0.5.13 or 0.5.13.post1",
    "0.5.15": "0.5.15 or 0.5.15.post1",
    "0.5.23": "0.5.23 or newer",
}
#: (what a line holds, first release, last release) as read in the same 18 releases.
VERSION_LINES: tuple[tuple[str, str | None, str | None], ...] = (
    ("Using KV cache dtype: ", None, "0.5.12.post1"),
    ("KV Cache is allocated. dtype: ", "0.5.13", None),
    ("Full KV Cache ", "0.5.17", None),
    ("SWA KV Cache ", "0.5.17", None),
    ("Init torch distributed begin", None, "0.5.20"),
    ("Init parallel begin", "0.5.21", None),
    ("Memory baseline taken", "0.5.21", None),
    ("Engine startup timings", "0.5.17", None),
    ("Tree cache initialized: ", "0.5.13", None),
    ("Init Unified Radix Cache", "0.5.18", None),
    ("Init Unified RadixTree", "0.5.11", "0.5.17"),
    ("SGLANG_ENABLE_SPEC_V2 has been removed", "0.5.14", "0.5.20"),
    ("Spec v2 is enabled by default", "0.5.11", "0.5.12.post1"),
    ("Loaded weights leave no GPU memory", "0.5.14", None),
    ("#pending-token: ", "0.5.11", None),
)

#: (kind, pattern) with groups `asked` and `taken`; `kind_group` instead of a kind where the line names it.
BACKEND_ROWS: tuple[tuple[str, re.Pattern[str], str | None], ...] = tuple(
    (kind, re.compile(pattern), asked)
    for kind, pattern, asked in (
        ("attention_backend", r"does not support Intel AMX, will fallback to (?P<taken>\w+) backend", "intel_amx"),
        ("attention_backend", r"does not support Intel XMX, will fallback to (?P<taken>\w+) backend", "intel_xpu"),
        ("attention_backend", r"FlashAttention3 only supports .*Setting attention backend to (?P<taken>\w+)", "fa3"),
        (
            "attention_backend",
            r"(?:Setting|Switching|Changing|Overriding|setting|switching|changing|overriding) (?:the )?attention "
            r"backend (?:from (?P<asked>\w+) )?to (?P<taken>\w+)",
            None,
        ),
        ("attention_backend", r"Attention backend not specified\. (?:Use|Falling back to) '?(?P<taken>\w+)'?", ""),
        ("attention_backend", r"Attention backend is (?:overridden|set) to '?(?P<taken>\w+)", None),
        ("attention_backend", r"Use (?P<taken>\w+) as (?:default )?attention backend\b", ""),
        ("prefill_attention_backend", r"Use (?P<taken>\w+) as default prefill attention backend", ""),
        (
            "attention_backend",
            r"Using hybrid attention backend for decode and prefill: decode_backend=(?P<decode>\w+), "
            r"prefill_backend=(?P<prefill>\w+)",
            None,
        ),
        ("mm_attention_backend", r"Using (?P<taken>\w+) as multimodal attention backend", None),
        ("mm_attention_backend", r"Multimodal attention backend not set\. Use (?P<taken>\w+)", ""),
        ("moe_runner_backend", r"Use (?P<taken>\w+) as MoE runner backend", ""),
        ("moe_runner_backend", r"moe_runner_backend=(?P<taken>\w+)\.?$", None),
        ("moe_runner_backend", r"resolved --moe-runner-backend (?P<asked>\w+) -> (?P<taken>\w+)", None),
        ("fp4_gemm_runner_backend", r"auto-selecting fp4-gemm-backend=(?P<taken>\w+)", "auto"),
        (
            "linear_attn_backend",
            r"Linear attention kernel backend: decode=(?P<decode>\w+), prefill=(?P<prefill>\w+)",
            None,
        ),
        ("gdn_kernel", r"GDN kernel dispatcher: decode=(?P<decode>\w+), extend=(?P<prefill>\w+)", None),
        ("grammar_backend", r"[Ff]all(?:ing)? ?back to grammar_backend='?(?P<taken>\w+)", None),
    )
)
BACKEND_ARGS = (
    "attention_backend",
    "decode_attention_backend",
    "prefill_attention_backend",
    "mm_attention_backend",
    "sampling_backend",
    "grammar_backend",
    "moe_runner_backend",
    "moe_a2a_backend",
    "fp4_gemm_runner_backend",
    "fp8_gemm_runner_backend",
    "bf16_gemm_backend",
    "linear_attn_backend",
    "mamba_backend",
    "speculative_draft_attention_backend",
    "speculative_moe_runner_backend",
    "dsa_prefill_backend",
    "dsa_decode_backend",
    "nsa_prefill_backend",
    "nsa_decode_backend",
)
ARG_ALIASES = {
    "fp4_gemm_backend": "fp4_gemm_runner_backend",
    "fp8_gemm_backend": "fp8_gemm_runner_backend",
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "model": "model_path",
    "dp": "dp_size",
    "pp": "pp_size",
    "ep": "ep_size",
}
#: A MoE runner other than this one never prints this line (H200: cutlass and marlin on bf16 print it, and are not
#: used).
MOE_TRACE = "Using default MoE kernel config."

#: Warnings that matter: (id, level, what a line holds, what it means). Sources: FACTS 1.4, 4, 5.2; H1.md; H200.md;
#: CPU.md.
NOTICES: tuple[tuple[str, str, str, str], ...] = (
    (
        "kv_scale_default",
        "medium",
        "Using FP8 KV cache but no scaling factors provided",
        "printed when the flag says fp8_e4m3 while weights load, whether or not the checkpoint has scales: not proof, "
        "and its absence is not either",
    ),
    (
        "kv_scale_not_loaded",
        "medium",
        "is not loaded.",
        "a scale in the checkpoint has no place in this model: the cache runs with scale 1.0",
    ),
    (
        "vllm_fp8_kv",
        "medium",
        "data type to store kv cache",
        "vLLM uses an 8-bit KV cache; without scales in the checkpoint it runs with scale 1.0",
    ),
    (
        "kv_scale_loaded",
        "info",
        "Loaded KV cache scaling factors from",
        "scales come from a file (--quantization-param-path)",
    ),
    ("kv4", "high", "KV Cache might lead to a", "a 4-bit KV cache"),
    ("kv_dtype_changed", "medium", "Setting KV cache dtype to", "the server chose the KV dtype for this architecture"),
    (
        "kv_scheme_ignored",
        "medium",
        "Ignoring compressed-tensors kv_cache_scheme",
        "the checkpoint's KV scheme is not used",
    ),
    (
        "attention_changed",
        "medium",
        "Setting attention backend to",
        "the attention backend that was asked for is not used",
    ),
    ("fallback", "medium", "will fallback to", "something that was asked for is not used"),
    ("truncated_input", "high", "Truncating the input", "a prompt was cut (--allow-auto-truncate)"),
    ("rope_factor_missing", "high", "rope_scaling missing 'factor'", "RoPE scaling without its factor"),
    (
        "context_beyond_model",
        "high",
        "is greater than the derived context_length",
        "the served context is longer than the model's",
    ),
    ("nan_logits", "critical", "NaN in the logits", "NaN while sampling"),
    ("nan_detected", "critical", "NaN detected", "NaN while sampling"),
    (
        "custom_all_reduce_off",
        "info",
        "is disabled because it's not supported on more than two PCIe-only GPUs",
        "reductions go through NCCL: expected on PCIe",
    ),
    (
        "spec_v2_env",
        "info",
        "SGLANG_ENABLE_SPEC_V2 has been removed",
        "the environment variable has no effect in this version",
    ),
    ("deprecated_flag", "low", "is deprecated and will be removed", "a name that a later version does not know"),
    (
        "spec_max_running",
        "medium",
        "Max running requests is reset to",
        "speculative decoding without --max-running-requests serves few requests at once",
    ),
    (
        "draft_tokens_adjusted",
        "low",
        "speculative_num_draft_tokens is adjusted",
        "the number of draft tokens was changed",
    ),
    (
        "max_total_tokens_capped",
        "low",
        "is larger than the profiled value",
        "--max-total-tokens was larger than what fits",
    ),
    (
        "moe_config_default",
        "low",
        "Using default MoE kernel config",
        "no tuned Triton config for this GPU: slower, not less exact",
    ),
    ("graph_disabled", "low", "uda graph is disabled", "decode runs without CUDA graphs: slower"),
    ("mxfp4_slow", "low", "quantization is not fully optimized yet", "slower than it could be"),
    (
        "no_chat_template",
        "high",
        "No HuggingFace chat template found",
        "prompts are not formatted as the model was trained",
    ),
    ("health_slow", "high", "Health check failed", "the health check got no answer in time"),
    ("leak", "high", "memory leak detected", "SGLang's accounting found a leak"),
    ("grammar_off", "medium", "Cannot fall back to grammar_backend", "structured output is not available"),
)
#: `is not loaded.` alone is too common.
NOTICE_NEEDS = {
    "kv_scale_not_loaded": "_scale",
    "max_total_tokens_capped": "max_total_tokens=",
    "fallback": "platform",
}
LEVELS: tuple[str, ...] = ("info", "low", "medium", "high", "critical")

STRONG = {
    "sglang": (
        b"server_args=",
        b"Memory pool end. avail mem",
        b"KV Cache is allocated",
        b"The server is fired up",
        b"Load weight begin",
        b"Load weight end",
        b"#running-req",
        b"#new-seq",
        b"sglang/srt",
        b"sglang serve",
        b"sglang.launch_server",
        b"sglang.srt",
        b"hit an exception: Traceback",
        b"Received sigquit from a child",
        b"Mamba Cache is allocated",
        b"max_total_num_tokens=",
        b"Using KV cache dtype: ",
        b"SWAKVPool ",
        b"bytes_per_full_token",
        b"accept len: ",
        b"_layer_tokens=",
        b"mem-fraction-static",
        b"Init torch distributed",
        b"self.watchdog_timeout",
        b"sgl_kernel",
        b"mem_fraction_static",
        b"from detokenizer for last",
        b"Capture cuda graph failed",
        b"SGLANG_",
        b"profiled value",
        b"sgl-workspace",
    ),
    "vllm": (
        b"(APIServer pid=",
        b"(EngineCore",
        b"[kv_cache_utils.py",
        b"GPU KV cache size",
        b"GPU blocks: ",
        b"vllm/entrypoints",
        b"vllm serve",
        b"vLLM API server",
        b"Initializing a V1 LLM engine",
        b"Initializing an LLM engine",
        b"SpecDecoding metrics: ",
        b"Avg prompt throughput",
        b"Avg generation throughput",
        b"gpu_memory_utilization=",
        b"Maximum concurrency for",
        b"vllm/v1/",
        b"VLLM_",
        b"init engine (profile",
        b"(VllmWorker",
    ),
}
FOREIGN = (
    (b"llama_model_loader", "llama.cpp"),
    (b"ggml_cuda_init", "llama.cpp"),
    (b"llm_load_print_meta", "llama.cpp"),
    (b"ollama", "Ollama"),
    (b"text_generation_launcher", "text-generation-inference"),
    (b"[TensorRT-LLM]", "TensorRT-LLM"),
    (b"lmdeploy", "LMDeploy"),
    (b"tritonserver", "Triton Inference Server"),
    (b"ktransformers", "KTransformers"),
    (b"nginx", "nginx"),
    (b"kernel: ", "Linux kernel log"),
)

WANTED: tuple[bytes, ...] = (
    b"loading took",
    b"weights took",
    b"server_args=",
    b"launch_server",
    b"sglang serve",
    b"vllm serve",
    b"KV Cache",
    b"KV cache",
    b"KVPool",
    b"Mamba Cache",
    b"Load weight",
    b"Loading ",
    b"loading shards",
    b"Memory pool end",
    b"Memory profiling",
    b"memory calculation",
    b"pool sizes: ",
    b"max_total_num_tokens=",
    b"aptur",
    b"fired up and ready",
    b"ackend",
    b"accept len: ",
    b"Retract",
    b"Detected ",
    b"is deprecated",
    b"GDN kernel",
    b"Init ",
    b"Memory baseline",
    b"Engine startup",
    b"Tree cache",
    b"Started server process",
    b"Application startup",
    b"Uvicorn running",
    b"_layer_tokens=",
    b"draft pool",
    b"target pool",
    b"SpecDecoding",
    b"Avg generation throughput",
    b"GPU blocks",
    b"Maximum concurrency",
    b"profiling results",
    b"max seq len",
    b"LLM engine",
    b"non-default args",
    b"version ",
    b"isabled because",
    b"Disable prefill",
    b"Truncating",
    b"rope_scaling",
    b"Max running requests",
    b"draft_tokens is adjusted",
    b"MoE kernel config",
    b"fully optimized yet",
    b"SGLANG_ENABLE_SPEC_V2",
    b"chat template",
    b"Health check",
    b"sampling params from",
    b"derived context_length",
    b"compressed-tensors",
    b"scaling factors",
    b"_scale",
    b"memory leak",
    b"size: ",
    b"avail mem=",
    b"Spec v",
    b"init_threads_binding",
    b"Warm",
    b"warmup",
    b"kernel backend",
    b"sglang==",
    b"sglang ",
    b"Resolved architecture",
    b"cache dtype",
    b"store kv cache",
    b"systemd[1]",
)
INTERESTING = re.compile(
    b"|".join(re.escape(n) for n in dict.fromkeys((*WANTED, *(n.encode() for n in FAILURE_NEEDLES))))
)

NUM = r"-?\d{1,15}(?:\.\d{1,15})?"
KV_LINE = re.compile(
    rf"(?:(?<![\w-])(?P<label>[A-Z][\w-]{{0,40}}(?: [\w-]{{1,40}})??) )?KV Cache (?P<state>is allocated|VA upper bound)\. (?:dtype: "
    rf"(?:torch\.)?(?P<dtype>[\w]+), ?)?"
    rf"(?:#tokens: (?P<tokens>\d(?:,?\d){{0,24}})(?:, *(?=KV? ?[-\d]|KV? size)|(?![\d,])))?"
    rf"(?:K(?: size:?)? (?P<k>{NUM}) ?GB, *V(?: size:?)? (?P<v>{NUM}) ?GB|KV(?: size:?)? (?P<kv>{NUM}) ?GB)?"
)
POST_CAPTURE = re.compile(
    rf"Post-capture KV sizing: (?P<draft>draft )?KV cache allocated\. dtype: (?:torch\.)?(?P<dtype>\w+), #tokens: "
    rf"(?P<tokens>\d{{1,18}}), KV size: (?P<kv>{NUM}) GB"
)
SWA_LINE = re.compile(
    rf"SWAKVPool (?:mem usage|VA upper bound): (?P<gib>{NUM}) GB, swa size: (?P<swa>\d{{1,18}}), full size: "
    rf"(?P<full>\d{{1,18}})"
)
MAMBA_LINE = re.compile(
    rf"Mamba Cache is allocated\. max_mamba_cache_size: (?P<slots>\d{{1,18}}),\s*conv_state size: (?P<conv>{NUM}) "
    rf"?GB,\s*ssm_state size: (?P<ssm>{NUM}) ?GB"
    rf"(?:,?\s*intermediate_ssm_state_cache size: (?P<issm>{NUM}) ?GB)?(?:,?\s*intermediate_conv_window_cache size: "
    rf"(?P<iconv>{NUM}) ?GB)?"
)
LOAD_END = re.compile(r"Load weight end\.")
PAIR = re.compile(r"([A-Za-z_][\w ]{0,60}?)=([^,\s]+)")
GRAPH = re.compile(
    r"^Capture (?P<name>[\w -]*?) ?(?P<device>cuda|CUDA|cpu|CPU|npu|NPU|xpu|XPU) ?[Gg]raphs? (?P<what>begin|end)"
    r"\b(?P<rest>.*)"
)
GRAPH_FAILED = re.compile(r"Capture (?:cuda|CUDA|npu|xpu) ?graph failed: (?P<why>.*)")
DISABLED = re.compile(
    r"(?:^|\b)(?:[Cc][Uu][Dd][Aa] graph is disabled because(?: of)? (?P<why>.*)|Disable (?P<which>prefill|decode) "
    r"CUDA graph because (?P<why2>.*))"
)
ACCEPT = re.compile(
    rf"accept len: (?P<len>{NUM}), accept rate: (?P<rate>{NUM})(?:.*?gen throughput(?: \(token/s\))?:? "
    rf"(?P<gen>{NUM}))?"
)
RETRACT = re.compile(r"Retract requests\. #retracted_reqs: (?P<n>\d{1,18})")
NEGATIVE = re.compile(r"is larger than the profiled value (-?\d{1,18})")
DSV4 = re.compile(
    rf"bytes_per_full_token=(?P<bytes>{NUM}), available_bytes=(?P<gib>{NUM}) GB, "
    rf"(?:\w{{1,40}}_fixed=(?:{NUM}) GB, ){{0,8}}full_token=(?P<full>\d{{1,18}})"
)
DSV4_SIZES = re.compile(r"DS[Vv]4 pool sizes: full=(?P<full>\d{1,18}), swa=(?P<swa>\d{1,18})")
PROFILE = re.compile(
    rf"available_gpu_memory=(?P<avail>{NUM}) GB, total_gpu_memory=(?P<total>{NUM}) GB, "
    rf"mem_fraction_static=(?P<f>{NUM}), rest_memory=(?P<rest>{NUM}) GB"
)
LAYER_TOKENS = re.compile(r"full_layer_tokens=(?P<full>\d{1,18}), swa_layer_tokens=(?P<swa>\d{1,18})")
POOL_INIT = re.compile(r"Initialize \w+TokenToKVPool with .*?swa_size=(?P<swa>\d{1,18})")
TARGET_LEFT = re.compile(rf"target pool complete: (?P<gib>{NUM}) GB")
DRAFTS_LEFT = re.compile(rf"after (?P<n>\w+) draft pools?: (?P<gib>{NUM}) GB")
WORDS = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
USING_DTYPE = re.compile(
    r"Using KV cache dtype: (?:torch\.)?(?P<dtype>\w+)|KV Cache is allocated\. dtype: (?:torch\.)?(?P<quoted>\w+)\W*$"
)
VERSION_TEXT = re.compile(
    r"\bsglang(?:==|[ :/-]v?| version:? ?)(?P<v>0\.\d+\.\d{1,18}(?:\.?(?:post|rc|dev)\d{1,18})?)\b", re.IGNORECASE
)
VLLM_VERSION = re.compile(r"(?:vLLM API server version|version|LLM engine \(v)\s*(?P<v>\d+\.\d+\.\d{1,18}[\w.+]*)")
VLLM_KV = re.compile(r"KV cache size: (?P<tokens>\d[\d,]{0,24}) tokens")
VLLM_CONC = re.compile(
    r"Maximum concurrency for (?P<len>\d[\d,]{0,24}) tokens per request: (?P<x>\d[\d,]{0,12}(?:\.\d{1,9})?)x"
)
VLLM_BLOCKS = re.compile(r"#? ?(?:GPU|CPU|cuda) blocks: (?P<blocks>\d[\d,]{0,24})")
VLLM_TOO_LONG = re.compile(
    r"max seq len \((?P<len>\d{1,18})\) is larger than the maximum number of tokens that can be stored in KV cache "
    r"\((?P<tokens>\d{1,18})\)"
)
VLLM_KV_GIB = re.compile(rf"(?:kv_cache_size=|Available KV cache memory: )(?P<gib>{NUM}) ?GiB")
VLLM_SPEC = re.compile(rf"Mean acceptance length: (?P<len>{NUM})")
VLLM_ENGINE = re.compile(
    rf"Avg prompt throughput: (?P<prompt>{NUM}) tokens/s, Avg generation throughput: (?P<gen>{NUM}) tokens/s, "
    rf"Running: (?P<run>\d{{1,18}}) reqs?, "
    rf"Waiting: (?P<wait>\d{{1,18}}) reqs?(?:.*?KV cache usage: (?P<usage>{NUM})%)?"
)
VLLM_ARGS = re.compile(r"non-default args: (?P<args>\{.*)")
MAX_MODEL_LEN = re.compile(r"Using max model len (?P<len>\d{1,18})|max_seq_len=(?P<len2>\d{1,18})")
VLLM_CONFIG = re.compile(
    r"\b(kv_cache_dtype|quantization|dtype|tensor_parallel_size|pipeline_parallel_size|data_parallel_size|"
    r"max_seq_len|block_size|model)"
    r"=('[^']*'|[\w./:-]+)"
)
COMMAND = re.compile(
    r"(?:sglang\.launch_server|sglang serve|vllm serve|vllm\.entrypoints\S*|launch\w{0,40}\.py)\s+(?P<args>-.*)"
)
FIELDS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "#running-req": ("running", int),
    "#queue-req": ("queue", int),
    "#token": ("tokens", int),
    "token usage": ("usage", float),
    "#full token": ("full_tokens", int),
    "full token usage": ("full_usage", float),
    "#swa token": ("swa_tokens", int),
    "swa token usage": ("swa_usage", float),
    "mamba num": ("mamba_num", int),
    "mamba usage": ("mamba_usage", float),
    "accept len": ("accept_len", float),
    "accept rate": ("accept_rate", float),
    "gen throughput (token/s)": ("gen_tok_s", float),
    "input throughput (token/s)": ("input_tok_s", float),
    "#new-seq": ("new_seqs", int),
    "#new-token": ("new_tokens", int),
    "#cached-token": ("cached_tokens", int),
    "#pending-token": ("pending_tokens", int),
}
FIELDS_B = {key.encode(): value for key, value in FIELDS.items()}
SPREAD = frozenset(
    (
        "running",
        "queue",
        "usage",
        "full_usage",
        "swa_usage",
        "mamba_usage",
        "accept_len",
        "accept_rate",
        "gen_tok_s",
        "input_tok_s",
    )
)
