"""Why a server died: a table of failure signatures, and the search for the root cause among the symptoms.

A dying server says many things. The first rank to fail logs a traceback, the others lose their peer, the launcher
gets a
SIGQUIT, the parent reads EOF and offers the kernel's OOM killer as a guess. Only the first of these is the cause.
Each row
of SIGNATURES says which of the two it is (`cause` or `symptom`), so that a new failure is a new row and no new code.

    Failure.failure_class     crash | bad_arguments | oom_at_startup | oom_runtime | oom_killed | hang |
    hang_suspected |
                              garbage_output | numerical_nan | secondary_failure | killed_sigkill |
                              performance_degradation
    Failure.outcome           the key of lib.records.OUTCOMES that a trial takes (unsupported_here for a missing device,
                              kernel or package)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import Field

from lib.records import Record
from lib.server.flags import RULES, Rule
from lib.server.lines import Line, parse_line, seconds_between, split_messages
from lib.server.progress import PHASES, phase_of
from lib.server.redact import find_secrets, redact_object

STARTUP_END = PHASES.index("ready")


class Quote(Record):
    """One line of the log as evidence."""

    line_no: int
    line: str
    rank: str | None = None


class Failure(Record):
    """Why a server failed: one root cause, the symptoms around it, and what to do."""

    id: str = Field(
        description="id of the row in SIGNATURES or of the rule in flags.RULES, or 'exception', "
        "'unfinished_traceback', 'no_cause_in_log'"
    )
    failure_class: str
    outcome: str = Field(description="key of lib.records.OUTCOMES")
    phase: str | None = Field(
        default=None, description="what the server was doing: 'arguments' or a name of progress.PHASES"
    )
    during_startup: bool | None = None
    cause_known: bool = Field(description="False if this log holds symptoms only")
    root_cause: str
    what_to_do: str
    do_not: str | None = Field(default=None, description="the obvious remedy that is wrong here")
    unsupported_here: bool = Field(default=False, description="a device, kernel or package is missing on this machine")
    rank: str | None = None
    line_no: int | None = None
    line: str | None = None
    where: str | None = Field(default=None, description="innermost frame of the traceback")
    evidence: list[Quote] = []
    symptoms: list[Quote] = Field(default=[], description="lines that follow from the cause")
    ranks_failed: list[str] = Field(default=[], description="ranks in the order in which they failed")
    values: dict[str, float | int | str | bool | None] = {}
    needs: list[str] = Field(default=[], description="evidence that would settle what is open")
    exit_code: int | None = None
    exit_signal: str | None = None
    exit_seen: bool = Field(default=False, description="a line or the exit code shows that the process ended")
    out_of_memory: bool = False
    gpu_memory_oom: bool = Field(
        default=False, description="GPU memory ran out: not the slots of the token pool, not the host's memory"
    )
    graph_related: bool = Field(
        default=False, description="CUDA graphs are part of the cause, not only where it surfaced"
    )
    hardware_fault: bool = False
    source: str | None = None
    versions: str | None = None


class Signature(NamedTuple):
    """One row: how a failure looks, what it is and what to do."""

    id: str
    needle: str
    pattern: str
    failure_class: str
    role: str
    cause: str
    do: str
    source: str
    phase: str | None = None
    unsupported: bool = False
    do_not: str | None = None
    needs: tuple[str, ...] = ()
    graph_related: bool = False
    hardware_fault: bool = False
    versions: str = "all"


_EXC = r"^(?:[\w.]+: )?"
#: Order: the first row that matches a line decides, so specific rows stand above general ones.
SIGNATURES: tuple[Signature, ...] = (
    # ---- a device, a kernel or a package is missing on this machine
    Signature(
        "no_gpu_driver",
        "active drivers",
        r"0 active drivers \(\[\]\)",
        "crash",
        "cause",
        "Triton finds no GPU driver: a Triton kernel was called on a machine without a GPU",
        "use a backend without Triton kernels (on a CPU: attention_backend torch_native, no speculative decoding), "
        "or a GPU",
        "SGLang 0.5.15.post1 on a CPU",
        unsupported=True,
    ),
    Signature(
        "package_missing",
        "No package metadata was found for",
        r"No package metadata was found for (?P<package>[\w.-]+)",
        "crash",
        "cause",
        "the package {package} is not installed",
        "install {package}, or choose a backend that does not need it",
        "SGLang 0.5.15.post1 on a CPU, attention_backend flashinfer",
        unsupported=True,
    ),
    Signature(
        "module_missing",
        "No module named",
        r"^(?:[\w.]+: )?(?:ModuleNotFoundError|ImportError): No module named '(?P<package>[\w.]+)'",
        "crash",
        "cause",
        "the Python module {package} is not installed",
        "install the package that has {package}, or choose a backend without it",
        "Python",
        unsupported=True,
    ),
    Signature(
        "cuda_only",
        "CUDA",
        r"(?:only (?:supports|supported (?:on|for)|works (?:on|with))|requires?) (?:an? )?(?:NVIDIA )?CUDA(?: device|"
        r" GPU|\.|$)",
        "crash",
        "cause",
        "the feature needs a CUDA device: {line}",
        "leave the feature out on this machine, or use a CUDA GPU",
        "SGLang 0.5.15.post1 speculative_hook.py (NGRAM)",
        unsupported=True,
    ),
    Signature(
        "needs_newer_gpu",
        "",
        r"only supports (?:sm\d|SM ?\d)|on (?:Ampere|Ada|Turing|Hopper)[^.]{0,40} only supports"
        r"|(?:is |are )?only supported on [^.]{0,80}(?:Blackwell|Hopper|SM ?\d{2,3})|Please use Blackwell and above"
        r"|requires? (?:an? )?(?:NVIDIA )?(?:Blackwell|Hopper|SM ?\d{2,3})\+?[^.]{0,40}(?:\.|$| GPU)|does not "
        r"support NVFP4 quantization",
        "crash",
        "cause",
        "the kernel does not exist for this GPU: {line}",
        "choose a backend that this GPU has (the message names one), or another GPU",
        "SGLang 0.5.16 on an H200: trtllm_mha, NVFP4 dense GEMM and MoE",
        unsupported=True,
    ),
    Signature(
        "needs_cpu_feature",
        "",
        r"requires Intel (?:AMX|XMX)|is not supported on CPU\b|only supported on (?:AMX|CPUs with)",
        "crash",
        "cause",
        "this CPU, or SGLang on any CPU, cannot do it: {line}",
        "leave the feature out on this machine",
        "SGLang 0.5.21 on a CPU, FP8 KV cache",
        unsupported=True,
    ),
    Signature(
        "combination_unsupported",
        "is not supported in",
        r"(?P<what>\w[\w -]{0,59}) is not supported in (?:\w+ ){0,2}attention backend (?P<backend>\w+)",
        "crash",
        "cause",
        "{what} has no kernels in the attention backend {backend}",
        "choose an attention backend that has them",
        "SGLang 0.5.21 on a CPU, NEXTN with torch_native",
        unsupported=True,
    ),
    Signature(
        "no_kernel_image",
        "",
        r"no kernel image is available for execution on the device|device kernel image is invalid|HIP error: invalid "
        r"device function|ptxas fatal +: Value '(?P<arch>sm_\w+)' is not defined|Unknown CUDA arch|no SASS for this GPU",
        "crash",
        "cause",
        "the wheels or their compiler have no kernels for this GPU's architecture",
        "install wheels built for this GPU's compute capability (sgl-kernel, torch, flashinfer)",
        "sgl-project/sglang#7249",
        unsupported=True,
        do_not="disabling CUDA graphs: capture is only where it surfaces first",
    ),
    Signature(
        "fp8_type_not_on_this_gpu",
        "",
        r"type (?P<what>fp8\w+) not supported in this architecture",
        "crash",
        "cause",
        "Triton cannot compile {what} for this GPU: e4m3 kernels need compute capability 8.9 or more",
        "a KV cache and weights that this GPU computes with (bfloat16, or fp8_e5m2 where the backend takes it)",
        "Triton's own message, seen on compute capability 8.0 and 8.6",
        unsupported=True,
        do_not="disabling CUDA graphs: capture is only where it surfaces first",
    ),
    Signature(
        "kernel_download_failed",
        "Failed to get checksums.txt",
        r"Failed to get checksums\.txt from",
        "crash",
        "cause",
        "FlashInfer wanted to download precompiled kernels and could not (no network, or none exist for this GPU)",
        "install flashinfer-cubin for the same version, give the host network access, or choose another MoE backend",
        "SGLang 0.5.16 on an H200, moe_runner_backend flashinfer_trtllm",
        unsupported=True,
    ),
    Signature(
        "no_cuda_device",
        "",
        r"No CUDA GPUs are available|could not select device driver|NVIDIA driver on your system is too old|PTX was "
        r"compiled with an unsupported toolchain|CUDA-capable device\(s\) is/are busy"
        r"|Found no NVIDIA driver|Torch not compiled with CUDA enabled|CUDA driver version "
        r"is insufficient"
        r"|no CUDA-capable device is detected|Can(?:no|')t (?:find|detect) any (?:CUDA|GPU)|No accelerator \(CUDA",
        "crash",
        "cause",
        "no usable GPU: {line}",
        "check nvidia-smi, the container's GPU access and the driver version",
        "torch",
        unsupported=True,
    ),
    Signature(
        "library_missing",
        "",
        r"cannot open shared object file|undefined symbol: |GLIBC(?:XX)?_[\d.]+' not found"
        r"|Could not load any common_ops library",
        "crash",
        "cause",
        "a compiled library is missing or does not fit the installed torch or CUDA: {line}",
        "install wheels that were built for this torch and CUDA (sgl-kernel, flashinfer, torch)",
        "Python, dynamic linker",
        unsupported=True,
    ),
    Signature(
        "device_ordinal",
        "invalid device ordinal",
        r"invalid device ordinal",
        "crash",
        "cause",
        "fewer GPUs are visible than the launch needs",
        "compare --tp-size x --pp-size with nvidia-smi and CUDA_VISIBLE_DEVICES",
        "CUDA",
        phase="distributed_init",
        unsupported=True,
    ),
    # ---- the command line
    Signature(
        "invalid_choice",
        "invalid choice",
        r"error: argument (?P<flag>--?[\w/,-]+): invalid choice: '?(?P<value>[^' ]*)'?",
        "bad_arguments",
        "cause",
        "{flag} does not know the value {value} in this version",
        "use one of the values that the message lists",
        "argparse",
        phase="arguments",
    ),
    Signature(
        "unrecognized_arguments",
        "unrecognized arguments",
        r"error: unrecognized arguments: (?P<flag>.{1,200})",
        "bad_arguments",
        "cause",
        "this version has no argument {flag}",
        "remove it or use the name of this version (0.5.20 and newer dropped several aliases)",
        "argparse",
        phase="arguments",
    ),
    Signature(
        "argument_error",
        "error: ",
        r"^[\w ./-]{0,80}: error: (?P<flag>(?:argument |the following arguments).{1,200})",
        "bad_arguments",
        "cause",
        "{flag}",
        "correct the command line",
        "argparse",
        phase="arguments",
    ),
    # ---- memory
    Signature(
        "weights_leave_no_kv",
        "leave no GPU memory for the KV cache",
        r"leave no GPU memory for the KV cache under --mem-fraction-static=(?P<mem_fraction_static>[\d.]+\d)",
        "oom_at_startup",
        "cause",
        "the weights alone fill the static budget of mem_fraction_static={mem_fraction_static}",
        "raise --mem-fraction-static, use more GPUs or smaller weights",
        "SGLang 0.5.14+, sgl-project InferenceX#2128",
        phase="allocating_kv",
        do_not="lowering --mem-fraction-static, as one does for an out-of-memory at run time",
    ),
    Signature(
        "no_room_for_kv",
        "Not enough memory",
        r"Not enough memory\. Please try to increase --mem-fraction-static"
        r"(?:.*mem_fraction_static=(?P<mem_fraction_static>[\d.]+\d))?",
        "oom_at_startup",
        "cause",
        "the weights leave no memory for the KV cache under the static fraction",
        "raise --mem-fraction-static, use more GPUs or smaller weights",
        "SGLang, model_runner",
        phase="allocating_kv",
        do_not="lowering --mem-fraction-static",
    ),
    Signature(
        "no_room_for_mamba",
        "Not enough GPU memory for hybrid",
        r"Not enough GPU memory for hybrid(?:.*?max_mamba_cache_size=(?P<max_mamba_cache_size>-?\d+))?"
        r"(?: \(total_rest_memory=(?P<rest_gib>-?[\d.]+\d) GB, mamba_cache_per_req=(?P<per_request_mib>[\d.]+\d) MB)?",
        "oom_at_startup",
        "cause",
        "no memory is left for the recurrent-state cache (max_mamba_cache_size={max_mamba_cache_size})",
        "see who else holds the GPU (nvidia-smi); then lower --max-running-requests or raise --mem-fraction-static",
        "SGLang 0.5.16 on an H200 shared by eight servers",
        phase="allocating_kv",
    ),
    Signature(
        "negative_profile",
        "is larger than the profiled value",
        r"max_total_tokens=(?P<asked_tokens>\d+) is larger than the profiled value (?P<profiled_tokens>-\d+)",
        "oom_at_startup",
        "cause",
        "weights leave no room for the KV cache under the static fraction (profiled {profiled_tokens} tokens, a "
        "shortage)",
        "raise --mem-fraction-static, use more GPUs or smaller weights",
        "sgl-project/sglang#7691",
        phase="allocating_kv",
        do_not="changing --max-total-tokens: it is not the limit here",
    ),
    Signature(
        "gpu_occupied",
        "memory capacity is unbalanced",
        r"The memory capacity is unbalanced",
        "crash",
        "cause",
        "the GPUs do not have the same free memory: another process holds some of it",
        "end the process that holds GPU memory (nvidia-smi), e.g. what a killed server left behind",
        "SGLang model_runner",
        phase="distributed_init",
    ),
    Signature(
        "vllm_no_cache_blocks",
        "",
        r"No available memory for the cache blocks|is larger than the available KV cache memory"
        r"|is less than desired GPU memory utilization"
        r"|max seq len \(\d+\) is larger than the maximum number of tokens that can be stored in KV cache",
        "oom_at_startup",
        "cause",
        "vLLM has no room for the KV cache: {line}",
        "raise gpu_memory_utilization, lower max_model_len, use more GPUs; see who else holds the GPU",
        "vLLM",
        phase="allocating_kv",
    ),
    Signature(
        "oom_killer",
        "",
        r"Out of memory: Killed process|oom-kill:|Memory cgroup out of memory|oom_reaper: reaped|OOMKilled|"
        r"status=9/KILL.*oom|Failed with result 'oom-kill'",
        "oom_killed",
        "cause",
        "the kernel's OOM killer ended a process: host memory, not GPU memory",
        "give the container or unit more memory, load weights without a second copy in RAM, check shared memory",
        "Linux kernel, systemd",
    ),
    Signature(
        "retract_failed",
        "even after retracting",
        r"Out of memory even after retracting all other requests",
        "oom_runtime",
        "cause",
        "one request alone does not fit into the KV pool",
        "lower --context-length or raise the pool (KV dtype, fraction, GPUs)",
        "SGLang scheduler",
        phase="serving",
    ),
    Signature(
        "pool_out_of_memory",
        "ut of memory",
        r"(?:^|: )(?:Prefill|Decode) out of memory\. Try to lower your batch size|(?:^|: )Out of memory\. Try to lower|"
        r"alloc_req_slots runs out of memory",
        "oom_runtime",
        "cause",
        "the token pool ran out: {line}",
        "lower --max-running-requests or the schedule's conservativeness, or enlarge the pool",
        "SGLang mem_cache/common.py",
        phase="serving",
    ),
    Signature(
        "nccl_out_of_memory",
        "",
        r"(?:NCCL error|nccl\w*Error)[\s\S]{0,600}Cuda failure (?:\d+ )?'?out of memory",
        "oom",
        "cause",
        "NCCL found no GPU memory for its buffers: the GPU is full, or another process holds it",
        "see who holds the GPU (nvidia-smi); else lower --mem-fraction-static or NCCL's buffers (NCCL_BUFFSIZE)",
        "NCCL's last error, as torch prints it",
    ),
    Signature(
        "gpu_out_of_memory",
        "",
        r"(?:CUDA|HIP|NPU|XPU) out of memory|OutOfMemoryError|CUDA OOM\b|CUDA error: out of memory|"
        r"Cuda failure (?:\d+ )?'?out of memory|"
        r"cudaErrorMemoryAllocation"
        r"|CUBLAS_STATUS_ALLOC_FAILED",
        "oom",
        "cause",
        "GPU memory ran out{tried}",
        "lower --mem-fraction-static (what allocates here is outside the static budget), --cuda-graph-max-bs or "
        "--chunked-prefill-size",
        "torch",
    ),
    # ---- wrong numbers
    Signature(
        "nan",
        "",
        r"Assertion '?NaN detected|NaN detected! |NaN happened|NaN in the logits|probability tensor contains",
        "numerical_nan",
        "cause",
        "NaN in the logits: a kernel computes wrong numbers",
        "change the backend that computes them (MoE, FP4 GEMM, attention) or its package's version; a score of 0 is "
        "this, not the model",
        "sgl-project/sglang#34629",
        do_not="reading the evaluation's score as the model's quality",
    ),
    # ---- kernels and compilers
    Signature(
        "too_much_shared_memory",
        "uses too much shared data",
        r"uses too much shared data \((?P<asked>0x[0-9a-f]+) bytes, (?P<limit>0x[0-9a-f]+) max\)",
        "crash",
        "cause",
        "a kernel asks for {asked_bytes} bytes of static shared memory, the GPU has {limit_bytes}: a compile-time "
        "limit, not GPU memory",
        "use a version or backend whose kernel fits this GPU",
        "sgl-project/sglang#25484",
        phase="compiling_kernels",
        do_not="treating it as out of memory",
    ),
    Signature(
        "triton_out_of_resources",
        "out of resource",
        r"out of resources?: (?P<resource>[\w ]+?), Required: (?P<asked_bytes>\d+), Hardware limit: "
        r"(?P<limit_bytes>\d+)",
        "crash",
        "cause",
        "a Triton kernel asks for {asked_bytes} of {resource}, the GPU has {limit_bytes}: a limit of the kernel, not "
        "GPU memory",
        "use a backend or version whose kernel fits this GPU",
        "Triton",
        do_not="treating it as out of memory",
    ),
    Signature(
        "cublas",
        "CUBLAS_STATUS_",
        r"(?P<status>CUBLAS_STATUS_(?!ALLOC_FAILED)\w+)",
        "crash",
        "cause",
        "cuBLAS failed: {status}",
        "check that torch's CUDA fits the driver and the GPU; if it follows an out-of-memory, that is the cause",
        "cuBLAS",
    ),
    Signature(
        "compile_failed",
        "",
        r"NVCC compilation failed|ninja: build stopped|nvcc fatal|Could not find nvcc|nvcc: not found|No such file "
        r"or directory: '[^']*nvcc'"
        r"|CUDA_HOME environment variable is not set|Error compiling objects for extension|RuntimeError: Ninja build "
        r"failed",
        "crash",
        "cause",
        "a kernel could not be compiled on this machine: {line}",
        "install the CUDA toolkit of torch's version, or choose a backend with ready-made kernels",
        "torch, flashinfer, deep_gemm",
        phase="compiling_kernels",
    ),
    Signature(
        "shape_mismatch",
        "must match the size of tensor b",
        r"The size of tensor a \((?P<a>\d+)\) must match the size of tensor b \((?P<b>\d+)\)",
        "crash",
        "cause",
        "tensor sizes {a} and {b} do not match{packed}",
        "check which layers the checkpoint leaves unquantized; on fused shared experts: "
        "--disable-shared-experts-fusion",
        "sgl-project/sglang#29562",
        do_not="suspecting the GPU",
    ),
    Signature(
        "fp4_gemm_failed",
        "nvfp4_scaled_mm",
        r"(?P<kernel>nvfp4_scaled_mm\w*\.cuh:\d+) Error",
        "crash",
        "cause",
        "the FP4 GEMM kernel failed ({kernel})",
        "choose another --fp4-gemm-backend",
        "sgl-project/sglang#32021",
    ),
    Signature(
        "router_weight_unsupported",
        "apply_router_weight_on_input",
        r"apply_router_weight_on_input is not supported",
        "crash",
        "cause",
        "the automatically chosen FlashInfer MoE has no apply_router_weight_on_input, which this model needs",
        "use a MoE backend that has it and compare its output with a known-good one",
        "sgl-project/sglang#34192",
        phase="warming_up",
        do_not="moe_runner_backend marlin: it runs and is numerically wrong (it scales the output instead of the "
        "input)",
    ),
    Signature(
        "device_assert",
        "device-side assert",
        r"device-side assert triggered",
        "crash",
        "cause",
        "a kernel's own check failed on the GPU; a token id outside the vocabulary does this",
        "look for the first assertion above; run once with CUDA_LAUNCH_BLOCKING=1; check client token ids",
        "SGLang 0.5.16 on an H200",
    ),
    Signature(
        "illegal_memory",
        "",
        r"illegal memory access|misaligned address|an illegal instruction was encountered|unspecified launch failure",
        "crash",
        "cause",
        "a GPU kernel touched memory that is not its own: {line}",
        "run once with CUDA_LAUNCH_BLOCKING=1 and --disable-cuda-graph to find the kernel, then change that backend "
        "or its version",
        "CUDA",
    ),
    Signature(
        "hardware",
        "",
        r"NVRM: Xid|uncorrectable ECC|fallen off the bus|NVLink error|hardware exception|cudaErrorECCUncorrectable|"
        r"GPU is lost",
        "crash",
        "cause",
        "the GPU reports a hardware fault: {line}",
        "read dmesg for Xid, take the GPU out of service",
        "NVIDIA",
        hardware_fault=True,
    ),
    Signature(
        "memory_leak",
        "memory leak detected",
        r"(?P<pool>[\w ]{0,40}?) ?memory leak detected!",
        "crash",
        "cause",
        "SGLang's own check of its memory accounting found a leak and stopped: {line}",
        "update SGLang; report it with this log",
        "SGLang scheduler",
    ),
    Signature(
        "nccl",
        "",
        r"ncclUnhandledCudaError|ncclSystemError|ncclInternalError|ncclInvalidUsage|NCCL error",
        "crash",
        "cause",
        "NCCL could not start or finish a collective: {line}",
        "run once with NCCL_DEBUG=INFO; check /dev/shm (--shm-size), the network interface and peer access",
        "NCCL",
    ),
    Signature(
        "bus_error",
        "Bus error",
        r"^(?:Fatal Python error: )?Bus error",
        "crash",
        "cause",
        "a bus error: shared memory is full, or a mapped file ended early",
        "enlarge /dev/shm (--shm-size), check the model's files",
        "Linux",
    ),
    Signature(
        "segfault",
        "",
        r"^(?:Fatal Python error: )?Segmentation fault|^!+ *Segfault encountered|segfault at [0-9a-f]+ ip",
        "crash",
        "cause",
        "native code crashed (segmentation fault)",
        "read the native stack (core dump, py-spy --native); suspect the newest kernel package",
        "Linux",
    ),
    Signature(
        "gated_model",
        "",
        r"401 Client Error|403 Client Error|[Gg]ated repo|Access to model .{1,200} is restricted",
        "crash",
        "cause",
        "the model hub refuses access to the model",
        "accept the model's licence there and set a token",
        "huggingface_hub",
        phase="loading_weights",
    ),
    Signature(
        "remote_code",
        "trust_remote_code",
        r"(?:requires|contains custom code|set the option) .{0,200}trust_remote_code",
        "crash",
        "cause",
        "the model brings its own code, which is not trusted",
        "read that code, then set --trust-remote-code",
        "transformers",
        phase="arguments",
    ),
    # ---- files, model, port
    Signature(
        "port_taken",
        "",
        r"[Aa]ddress already in use|Errno 98|port \d+ is (?:already )?(?:in use|occupied|not available)",
        "crash",
        "cause",
        "the port is taken",
        "see who listens (ss -ltnp), stop it or take another port",
        "uvicorn",
        phase="starting_http",
    ),
    Signature(
        "architecture_unknown",
        "",
        r"Model architectures? .{1,120}? (?:is|are) not supported|does not recognize this architecture"
        r"|Unrecognized (?:configuration class|model)|has no SGlang implementation",
        "crash",
        "cause",
        "this version does not know the model's architecture: {line}",
        "use a version that has it",
        "SGLang models/registry.py",
    ),
    Signature(
        "model_not_found",
        "",
        r"does not appear to have a file named|is not a local folder and is not a valid model identifier|Repository "
        r"Not Found"
        r"|LocalEntryNotFoundError|OfflineModeIsEnabled|Cannot find any model weights|No such file or directory: "
        r"'[^']{1,300}(?:config\.json|\.safetensors)'",
        "crash",
        "cause",
        "the model's files are not where the server looks: {line}",
        "check --model-path and the download",
        "transformers, SGLang",
        phase="loading_weights",
    ),
    Signature(
        "shard_corrupt",
        "",
        r"Error while deserializing header|HeaderTooLarge|InvalidHeader|MetadataIncompleteBuffer|IncompleteBuffer",
        "crash",
        "cause",
        "a safetensors file is truncated or damaged",
        "download it again and compare checksums",
        "safetensors",
        phase="loading_weights",
    ),
    Signature(
        "disk_full",
        "No space left on device",
        r"No space left on device",
        "crash",
        "cause",
        "a disk or /dev/shm is full",
        "free space, or give the container more shared memory (--shm-size)",
        "Linux",
    ),
    # ---- hangs
    Signature(
        "nccl_watchdog",
        "",
        r"ProcessGroupNCCL's watchdog got stuck for (?P<seconds>\d+) seconds|Watchdog caught collective operation "
        r"timeout"
        r"|HeartbeatMonitor.{0,60}timed out",
        "hang",
        "hang",
        "a collective made no progress{for_seconds}: ranks wait for each other",
        "look in the other ranks' logs for the one that stopped first; py-spy dump the schedulers",
        "sgl-project/sglang#1691",
        needs=("py-spy dumps of all ranks", "logs of all nodes from the minutes before"),
    ),
    Signature(
        "sglang_watchdog",
        "atchdog timeout",
        r"[Ww]atchdog timeout \(self\.watchdog_timeout=(?P<seconds>[\d.]+)(?:, self\.soft=False)?\)",
        "hang",
        "hang",
        "a forward pass made no progress{for_seconds}: this rank waits, often for a peer that has died",
        "look at the ranks and nodes that stopped first; this rank is usually a victim",
        "sgl-project/sglang#32021",
        needs=("the other nodes' logs", "finish times of all ranks"),
    ),
    Signature(
        "health_no_heartbeat",
        "Health check failed",
        r"Health check failed\. Server couldn't get a response from detokenizer for last (?P<threshold_s>\d+) seconds\."
        r"(?: tic start time: (?P<start>\d\d:\d\d:\d\d)\. last_heartbeat time: (?P<beat>\d\d:\d\d:\d\d))?",
        "hang_suspected",
        "hang",
        "the detokenizer has not been heard of{for_seconds}",
        "compare the gap, not the line: far above the threshold is a stall, just above it is load",
        "sgl-project/sglang#10856, #22511",
        needs=("whether requests complete", "py-spy dump of scheduler and detokenizer"),
    ),
    Signature(
        "peer_timeout",
        "Timed out waiting",
        r"Timed out waiting (?P<milliseconds>\d{1,12})ms for (?:recv|send) operation",
        "hang",
        "hang",
        "a peer did not answer: ranks wait for each other",
        "look in the other ranks' and nodes' logs for the one that stopped first",
        "gloo",
        needs=("the logs of the other ranks and nodes", "py-spy dumps of all ranks"),
    ),
    # ---- symptoms: something else failed first
    Signature(
        "peers_missing",
        "waiting for clients",
        r"Timed out after \d{1,9} seconds waiting for clients\. (?P<joined>\d{1,9})/(?P<expected>\d{1,9}) clients joined",
        "secondary_failure",
        "symptom",
        "only {joined} of {expected} nodes or ranks came: the others did not start or cannot reach this one",
        "read the missing nodes' logs; check --dist-init-addr, --nnodes, --node-rank and the firewall",
        "torch.distributed",
        phase="distributed_init",
        needs=("the logs of the other ranks and nodes",),
    ),
    Signature(
        "peer_closed",
        "",
        r"Connection closed by peer|Connection reset by peer|ncclRemoteError|remote process exited|Socket Timeout|"
        r"Broken pipe"
        r"|recvValue failed|TCPStore.{0,80}(?:failed|closed)",
        "secondary_failure",
        "symptom",
        "another rank or node closed the connection first",
        "read the other ranks' and nodes' logs from the same minute",
        "sgl-project/sglang#4205",
        needs=("the logs of the other ranks and nodes",),
        do_not="disabling CUDA graphs",
    ),
    Signature(
        "scheduler_died",
        "scheduler died",
        r"Rank (?P<rank_died>\d+) scheduler died during initialization \(exit code: (?P<exit_code>-?\d{1,9})\)",
        "crash",
        "symptom",
        "a scheduler process died during initialization",
        "look for the first traceback above; the hint about the OOM killer holds for exit code -9 only",
        "SGLang entrypoints/engine.py",
    ),
    Signature(
        "subprocess_crashed",
        "crashed with exit code",
        r"Subprocess (?P<process>\S+) \(pid=\d+\) crashed with exit code (?P<exit_code>-?\d{1,9})",
        "crash",
        "symptom",
        "the process {process} ended with exit code {exit_code}",
        "look for the first traceback above",
        "SGLang engine",
    ),
    Signature(
        "main_process_exited",
        "rocess exited, code=",
        r"[Mm]ain process exited, code=(?P<how>exited|killed|dumped), status=(?!0/)(?P<exit_code>\d{1,9})",
        "crash",
        "symptom",
        "systemd saw the main process end with {how}, status {exit_code}",
        "read the server's own lines above",
        "systemd",
    ),
    Signature(
        "shell_killed",
        "Killed",
        r"^(?:\S+: line \d+: +\d+ )?Killed(?: |$)",
        "crash",
        "symptom",
        "a process was ended by SIGKILL",
        "look for the sender: dmesg, the journal, the cgroup's memory.events",
        "shells, docker",
    ),
    Signature(
        "sigquit",
        "sigquit",
        r"Received sigquit from a child process",
        "crash",
        "symptom",
        "a child process failed",
        "look for the first traceback above",
        "SGLang engine",
    ),
    Signature(
        "pipe_closed",
        "",
        r"^(?:EOFError|BrokenPipeError|ConnectionResetError|ConnectionRefusedError)\b",
        "crash",
        "symptom",
        "the other end of a pipe or connection is gone",
        "look for the first traceback above",
        "Python",
    ),
    Signature(
        "engine_core_failed",
        "",
        r"Engine core initialization failed|EngineDeadError|EngineCore (?:failed to start|encountered a fatal error)",
        "crash",
        "symptom",
        "vLLM's engine process died",
        "look for the first traceback above",
        "vLLM",
    ),
)

_COMPILED: tuple[tuple[Signature, re.Pattern[str]], ...] = tuple((row, re.compile(row.pattern)) for row in SIGNATURES)
_BY_ID: dict[str, Signature] = {row.id: row for row in SIGNATURES}

_EXCEPTION = re.compile(
    r"^(?P<type>(?:[A-Za-z_][\w]*\.)*(?:[A-Z]\w*)?(?:Error|Exception|Interrupt|Exit|Failure|Timeout|Fault|Warning|"
    r"NotFound|Unsupported))(?:: (?P<message>.*))?$"
)
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
_HIT = re.compile(r"\w hit an exception\b")
_REQUEST_TEXT = ("Receive: ", "Finish: ", "Receive OpenAI", "server_args=", "Prefill batch", "Decode batch")

#: Where a traceback was, by what its frames name (the last match in the stack wins).
_STACK_PHASES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), phase)
    for pattern, phase in (
        (
            r"in (?:prepare_server_args|from_cli_args|__post_init__|parse_args)$|/server_args\.py|/arg_groups/",
            "arguments",
        ),
        (r"in (?:init_torch_distributed|init_distributed_environment|initialize_model_parallel)$", "distributed_init"),
        (
            r"in (?:load_model|_initialize_model|load_weights\w*|get_model|load_weights_and_postprocess)$|"
            r"/model_loader/",
            "loading_weights",
        ),
        (
            r"in (?:alloc_memory_pool|init_memory_pools?|init_target_memory_pool|create_buffer|_init_pools)$|"
            r"/mem_cache/",
            "allocating_kv",
        ),
        (
            r"in (?:capture|capture_one_batch_size|init_device_graphs|init_cuda_graphs?|_capture\w*)$|"
            r"cuda_graph_runner|cuda_graph_setup",
            "capturing_graphs",
        ),
        (r"in (?:_execute_server_warmup|_wait_and_warmup|warmup\w*)$", "warming_up"),
        (r"in (?:event_loop_\w+|process_batch_result\w*|run_batch)$", "serving"),
    )
)
_TEXT_PHASES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"Capture (?:cuda|CUDA|npu|xpu) ?graph failed|during capture"), "capturing_graphs"),
    (re.compile(r"\b(?:draft|target|KV|memory) pool\b"), "allocating_kv"),
)
_TRIED = re.compile(r"(?:[Tt]ried to allocate|while allocating) (\d{1,15}(?:\.\d{1,9})?) ([KMG]iB)")

#: For a bytes prefilter: a line without any of these says nothing about a failure.
FAILURE_NEEDLES: tuple[str, ...] = (
    "Error",
    "Exception",
    "Traceback",
    "error: ",
    "failed",
    "Failed",
    "sigquit",
    "SIGTERM",
    "SIGINT",
    "atchdog",
    "out of memory",
    "Out of memory",
    "OOM",
    "oom",
    "NaN",
    "no kernel image",
    "Connection closed",
    "Connection reset",
    "profiled value",
    "even after retracting",
    "Not enough",
    "crashed with",
    "scheduler died",
    "memory leak detected",
    "too much shared data",
    "nvcc",
    "Xid",
    "illegal",
    "misaligned",
    "device-side",
    "active drivers",
    "lready in use",
    "Killed process",
    "No such file",
    "No space left",
    "not supported",
    "hit an exception",
    "kill_process_tree",
    "Remaining number of requests",
    "uncorrectable",
    "ninja:",
    "launch failure",
    "leave no GPU memory",
    "Killed",
    "out of resource",
    "rocess exited, code=",
    "egfault",
    "egmentation fault",
    "Bus error",
    "NCCL error",
    "nccl",
    "CUBLAS_STATUS_",
    "shared object file",
    "undefined symbol",
    "GLIBC",
    "common_ops",
    "unbalanced",
    "invalid device ordinal",
    "Client Error",
    "ated repo",
    "is restricted",
    "trust_remote_code",
    "cache blocks",
    "available KV cache memory",
    "stored in KV cache",
    "desired GPU memory",
    "fallen off",
    "GPU is lost",
    "No module named",
    "No package metadata",
    "HeartbeatMonitor",
    "ncclRemote",
    "remote process exited",
    "Socket Timeout",
    "Broken pipe",
    "JIT Pre-Compile",
    "autotune",
    "NVLink error",
    "hardware exception",
    "Error response from daemon",
    "probability tensor",
    "kernel image",
    "Timed out",
    "[Errno",
    "ptxas fatal",
)
_NEEDLE = re.compile("|".join(re.escape(n) for n in FAILURE_NEEDLES))

#: Messages of these rows stand in warnings of healthy servers too: alone they count only as an exception's line.
_ONLY_AS_EXCEPTION = frozenset(
    (
        "module_missing", "package_missing", "cuda_only", "needs_newer_gpu", "needs_cpu_feature",
        "combination_unsupported", "no_cuda_device", "library_missing", "cublas", "nccl", "model_not_found",
        "gated_model", "remote_code", "architecture_unknown", "port_taken", "shard_corrupt", "disk_full", "memory_leak",
    )
)  # fmt: skip
#: Lines that say of themselves that nothing broke.
_HARMLESS = re.compile(
    r"Warning: |\bIgnore import error\b|^(?:\[rank\d+\]:)?\[W\d|(?:^|\) ?)(?:INFO|WARNING|DEBUG) \d\d-\d\d |"
    r"\bwill be ignored\b"
    r"| disabled: |OpenAIServing\w+ init failed"
)

#: Uvicorn's and docker's own way to say that they stop.
_ERROR_LINE = re.compile(r"ERROR: +\[Errno \d+\]|(?:docker: )?Error response from daemon: ")
#: A stamp that the server itself wrote, not a collector.
_OWN_STAMP = re.compile(r"\[(?:\d{4}-\d\d-\d\d[ T])?\d\d:\d\d:\d\d|\[(?:DP|PP|TP|EP)\d")
_VLLM_ERROR = re.compile(r"ERROR \d\d-\d\d \d\d:\d\d:\d\d")

MAX_EVENTS = 400
_MAX_BLOCK_LINES = 2000


#: Rows that say that the token pool has no free slot: nothing failed to allocate.
_POOL_SLOTS = ("pool_out_of_memory", "retract_failed")
#: What to do about a GPU that ran out of memory, by what the server was doing.
_OOM_DO: dict[str, str] = {
    "loading_weights": "the weights do not fit: more GPUs (--tp-size), a smaller quantization, and see who else holds "
    "the GPU; --mem-fraction-static changes nothing here",
    "allocating_kv": "pools that the budget does not count (draft model, recurrent state) do not fit: lower "
    "--mem-fraction-static, set --max-total-tokens, or ask for fewer draft tokens and fewer state slots",
    "capturing_graphs": "lower --cuda-graph-max-bs or --mem-fraction-static; with speculation and recurrent state, "
    "fewer draft tokens or slots",
    "warming_up": "lower --mem-fraction-static or --chunked-prefill-size",
    "serving": "lower --mem-fraction-static or --chunked-prefill-size: what allocates here is outside the "
    "static budget",
}


class _Event:
    """One line that says that something failed."""

    __slots__ = ("line", "row", "match", "text", "where", "assertion", "phase", "fatal", "order", "loose")

    def __init__(
        self,
        line: Line,
        row: Signature | None,
        match: re.Match[str] | None,
        text: str,
        phase: str | None,
        fatal: bool,
        order: int,
    ):
        self.line, self.row, self.match, self.text = line, row, match, text
        self.where: str | None = None
        self.assertion: str | None = None
        self.phase, self.fatal, self.order = phase, fatal, order
        self.loose = False

    @property
    def role(self) -> str:
        return self.row.role if self.row else "cause"


class _Block:
    """A traceback that is being read."""

    __slots__ = (
        "head", "fatal", "frames", "code", "events", "relation", "lines", "tail", "phase", "prefixed", "flat", "collected"
    )  # fmt: skip

    def __init__(self, head: Line, fatal: bool, phase: str | None):
        self.head, self.fatal, self.phase = head, fatal, phase
        self.frames: list[str] = []
        self.code: str | None = None
        self.events: list[_Event] = []
        self.relation: str | None = None
        self.lines = 0
        self.tail = 0
        self.flat = False  # a log collector cut the indentation off
        self.prefixed = bool(_VLLM_ERROR.search(head.quote[:200]))
        # A collector stamps every line, those inside a traceback too.
        self.collected = bool(head.outer) or (head.stamped and head.text.startswith("Traceback"))


class FailureReader:
    """Collects what a log says about a failure, line by line and in bounded memory; `finish` decides.

    Feed it the lines that contain one of FAILURE_NEEDLES, and every line while `open` is true (inside a traceback).
    """

    def __init__(self) -> None:
        self.events: list[_Event] = []
        self.dropped = 0
        self.phase: str | None = None
        self.ready_line: int | None = None
        self.stop_line: Line | None = None
        self.hints: dict[str, Line] = {}
        self._block: _Block | None = None
        self._order = 0
        self.seen_startup = False
        self.alive = 0

    @property
    def open(self) -> bool:
        """True inside a traceback: the next lines are wanted whatever they hold."""
        return self._block is not None

    def saw_phase(self, name: str, line: Line) -> None:
        """Tell the reader what the server is doing (from `progress.phase_of`)."""
        if name == "stopping":
            return
        if name == "serving":
            self.alive = line.number
        if name == "ready":
            self.ready_line = line.number
            # What was logged before and did not stop the server was no failure of the server.
            self.events = [event for event in self.events if event.fatal and not event.loose]
        if name in PHASES[:STARTUP_END]:
            self.seen_startup = True
        if self.phase in PHASES and name in PHASES[:STARTUP_END] and self.ready_line is not None:
            return
        self.phase = name

    def feed(self, line: Line) -> None:
        """Take one parsed line."""
        text = line.text
        if self._block is not None and self._in_block(line):
            return
        if text.startswith(_REQUEST_TEXT):
            return
        if "Traceback (most recent call last)" in text or " hit an exception" in text:
            hit = _HIT.search(text)
            asgi = "ASGI" in text
            fatal = bool(hit) or (self.ready_line is None and not asgi)
            self._close()
            self._block = _Block(line, fatal, self.phase)
            if not hit:
                self._block.head = line
            return
        self._single(line)

    def _single(self, line: Line) -> None:
        text = line.text
        if "Exception in ASGI application" in text:
            return
        stopping = text.startswith(("SIGTERM received", "Gracefully exiting"))
        stopping = stopping or (text.startswith("Stopping ") and "systemd[" in line.quote[:200])
        if stopping and self.stop_line is None:
            self.stop_line = line
        if "JIT Pre-Compile" in text:
            self.hints["deep_gemm_precompile"] = line
        elif text.startswith("Running FlashInfer autotune"):
            self.hints["flashinfer_autotune"] = line
        if not _NEEDLE.search(text):
            return
        exception = _EXCEPTION.match(text)
        raised = exception is not None and (exception.group("message") or "").startswith("Warning: ")
        if _HARMLESS.search(line.quote[:300]) and not raised:
            return
        row, match = _signature(text)
        if row is None and exception and exception.group("type").endswith("Warning"):
            return
        if row is not None and row.id in _ONLY_AS_EXCEPTION and not exception and not _ERROR_LINE.match(text):
            return
        if row is None and not exception:
            if " graph failed: " in text:
                self._add(_Event(line, None, None, text, self.phase, True, self._order))
            return
        event = _Event(line, row, match, text, self._phase_of_text(text), True, self._order)
        event.loose = row is None
        if row is None and self.ready_line is not None:
            event.fatal = False
        self._add(event)

    def _in_block(self, line: Line) -> bool:
        block = self._block
        if block is None:
            return False
        block.lines += 1
        text = line.text
        if block.head.indent:  # a quoted log is indented as a whole
            text = text[min(block.head.indent, len(text) - len(text.lstrip())) :]
        if line.stamped and block.prefixed and block.lines <= _MAX_BLOCK_LINES:
            # vLLM writes its prefix before every line of a traceback; other processes' lines stand between them.
            if line.rank != block.head.rank:
                return False
        elif block.lines > _MAX_BLOCK_LINES or (
            line.stamped and not (block.collected and not _OWN_STAMP.search(line.quote[:200]))
        ):
            self._close()
            return False
        elif line.rank and not block.head.stamped and line.rank != block.head.rank:
            return False  # another rank's traceback, between the lines of this one
        if block.tail:
            # After the exception's line: the message may go on, or a chained traceback begins.
            if "direct cause of the following exception" in text:
                block.relation, block.tail = "direct", 1
            elif "During handling of the above exception" in text:
                block.relation, block.tail = "handling", 1
            elif "Traceback (most recent call last)" in text:
                if block.relation is None:
                    self._close()
                    return False
                block.tail, block.frames, block.code = 0, [], None
            elif not text.strip():
                block.tail += 1
            elif block.relation is None and block.tail <= 4 and block.events and not _FRAME.match(text):
                row, match = _signature(text)
                exception = _EXCEPTION.match(text)
                if exception and block.tail > 1:
                    self._close()
                    return False
                last = block.events[-1]
                if row and last.row is None:
                    last.row, last.match = row, match
                last.text = f"{last.text} {text.strip()}"[:1000]
                if last.row and last.row.id == "nccl":  # what it wanted stands in its last line
                    last.row, last.match = _signature(last.text)
                block.tail += 1
            elif _EXCEPTION.match(text) or _signature(text)[0]:
                self._finish_exception(line, text)
            else:
                self._close()
                return False
            return True
        frame = _FRAME.match(text)
        if frame:
            block.frames.append(f"{frame.group('file')}:{frame.group('line')} in {frame.group('function')}")
            if len(block.frames) > 60:
                del block.frames[:20]
            block.code = None
            block.flat = block.flat or text[:1] not in (" ", "\t")
        elif text[:1] in (" ", "\t") or (block.flat and not _EXCEPTION.match(text) and text.strip()):
            stripped = text.strip()
            if stripped and not set(stripped) <= set("^~ "):
                block.code = stripped
        elif text.strip() == "" or text.startswith(("Traceback", "[Previous line repeated")):
            pass
        else:
            self._finish_exception(line, text)
        return True

    def _finish_exception(self, line: Line, text: str) -> None:
        block = self._block
        if block is None:
            return
        row, match = _signature(text)
        event = _Event(
            line._replace(rank=line.rank or block.head.rank, time=line.time or block.head.time),
            row,
            match,
            text,
            None,
            block.fatal,
            self._order,
        )
        event.where = block.frames[-1] if block.frames else None
        if text.startswith("AssertionError"):
            event.assertion = block.code
        event.phase = self._phase_of_stack(block) or self._phase_of_text(text) or block.phase
        block.events.append(event)
        block.tail = 1

    def _phase_of_stack(self, block: _Block) -> str | None:
        found: str | None = None
        for frame in block.frames:
            for pattern, phase in _STACK_PHASES:
                if pattern.search(frame):
                    found = phase
                    break
        if found == "serving" and self.ready_line is None and self.seen_startup:
            return "warming_up" if self.phase in ("starting_http", "warming_up") else self.phase
        return found

    def _phase_of_text(self, text: str) -> str | None:
        for pattern, phase in _TEXT_PHASES:
            if pattern.search(text):
                return phase
        return self.phase

    def _close(self) -> None:
        block, self._block = self._block, None
        if block is None:
            return
        if not block.events:
            event = _Event(
                block.head, None, None, "", self._phase_of_stack(block) or block.phase, block.fatal, self._order
            )
            event.where = block.frames[-1] if block.frames else None
            event.assertion = "unfinished"
            self._add(event)
            return
        specific = [e for e in block.events if e.row and e.role != "symptom"]
        if specific:
            chosen = specific[0]
        elif block.relation == "handling":
            causes = [e for e in block.events if e.role != "symptom"]
            chosen = causes[-1] if causes else block.events[0]
        else:
            chosen = block.events[0]
        for event in block.events:
            if event is not chosen and event.role != "symptom":
                continue
            event.loose = event.row is None and not _HIT.search(block.head.text)
            self._add(event)

    def _add(self, event: _Event) -> None:
        event.order = self._order
        self._order += 1
        if len(self.events) < MAX_EVENTS:
            self.events.append(event)
        else:
            self.dropped += 1

    def finish(self, exit_code: int | None = None, ready: bool | None = None) -> Failure | None:
        """The failure that these lines and the exit code show, or None if they show none."""
        self._close()
        fatal = [e for e in self.events if e.fatal]
        causes = [e for e in fatal if e.role == "cause"]
        # Batches after a failed health check show that it was load, not a stall.
        hangs = [e for e in fatal if e.role == "hang"]
        hangs = [e for e in hangs if e.row and (e.row.id != "health_no_heartbeat" or e.line.number > self.alive)]
        symptoms = [e for e in fatal if e.role == "symptom"]
        was_ready = self.ready_line is not None if ready is None else ready
        if exit_code is None:
            codes = [_exit_code(e.match) for e in symptoms if e.match and "exit_code" in e.match.re.groupindex]
            killed_by_shell = any(e.row and e.row.id == "shell_killed" for e in symptoms)
            exit_code = codes[0] if codes else (-9 if killed_by_shell else None)
        if self.stop_line is not None:
            # What falls apart while a server is told to stop is no failure.
            causes = [e for e in causes if e.line.number < self.stop_line.number]
            hangs = [e for e in hangs if e.line.number < self.stop_line.number]
            symptoms = [e for e in symptoms if e.line.number < self.stop_line.number]
        if causes:
            times = _times(causes)
            root = min(causes, key=lambda e: (times[e.order] if times else "", e.line.number))
            return self._failure(root, causes, hangs + symptoms, exit_code, was_ready)
        if hangs:
            return self._failure(hangs[0], [], hangs[1:] + symptoms, exit_code, was_ready)
        peers = [e for e in symptoms if e.row and e.row.failure_class == "secondary_failure"]
        if peers:
            return self._failure(peers[0], [], [e for e in symptoms if e is not peers[0]], exit_code, was_ready)
        killed = exit_code in (-9, 137)
        if symptoms and not killed:
            return self._failure(symptoms[0], [], symptoms[1:], exit_code, was_ready)
        return self._without_cause(exit_code, ready, symptoms)

    def _failure(
        self, root: _Event, causes: Sequence[_Event], others: Sequence[_Event], exit_code: int | None, was_ready: bool
    ) -> Failure:
        row = root.row
        values = _values(root)
        ranks = [e.line.rank for e in sorted(causes or [root], key=lambda e: e.order) if e.line.rank]
        phase = row.phase if row and row.phase else root.phase
        if row and row.id == "port_taken" and root.phase == "distributed_init":
            phase = root.phase  # the port of the ranks' rendezvous, not the HTTP server's
        startup = None
        if phase is not None:
            startup = phase == "arguments" or (phase in PHASES and PHASES.index(phase) < STARTUP_END)
        if self.ready_line is not None and (self.ready_line < root.line.number):
            startup = False
            phase = (
                row.phase
                if row and row.phase and row.phase not in PHASES[:STARTUP_END]
                else (phase if phase == "compiling_kernels" else "serving")
            )
        failure_class = row.failure_class if row else "crash"
        rule = _refusal(root) if row is None and startup is not False else None
        if failure_class == "oom":
            failure_class = "oom_at_startup" if startup else "oom_runtime"
        if row is None and root.assertion == "unfinished":
            ident, cause = "unfinished_traceback", "an exception whose traceback is cut off"
            do = "get the rest of the log; the exception's name and message are missing"
        elif row is None and rule is not None:
            ident, cause, failure_class = rule.id, rule.reason, "bad_arguments"
            do = _RULE_DO.get(rule.id, "start it with other arguments: the reason names what excludes what")
        elif row is None:
            ident, cause = "exception", _exception_text(root)
            do = "no row of the failure table knows this exception; read the traceback"
        else:
            ident, cause, do = row.id, _fill(row.cause, root, values), _fill(row.do, root, values)
        if ident == "gpu_out_of_memory" and phase in _OOM_DO:
            do = _OOM_DO[phase]
        known = ident != "unfinished_traceback" and root.role == "cause"
        signal = _signal(exit_code)
        evidence = [Quote(line_no=root.line.number, line=_short(root.line.quote), rank=root.line.rank)]
        seen: set[tuple[str, str]] = set()
        quotes: list[Quote] = []
        later = [e for e in causes if e is not root]
        for event in sorted([*later, *others], key=lambda e: e.order):
            key = (event.row.id if event.row else event.text[:60], event.line.rank or "")
            if key not in seen and len(quotes) < 12:
                seen.add(key)
                quotes.append(Quote(line_no=event.line.number, line=_short(event.line.quote), rank=event.line.rank))
        ended = bool({"sigquit", "scheduler_died", "subprocess_crashed"} & {e.row.id for e in [root, *others] if e.row})
        unsupported = bool(row and row.unsupported) or bool(rule and rule.outcome == "unsupported_here")
        oom = failure_class in ("oom_at_startup", "oom_runtime", "oom_killed")
        return Failure(
            id=ident,
            failure_class=failure_class,
            outcome=_outcome(failure_class, unsupported),
            phase=phase,
            during_startup=startup,
            cause_known=known,
            root_cause=cause,
            what_to_do=do,
            do_not=row.do_not if row else None,
            unsupported_here=unsupported,
            rank=root.line.rank,
            line_no=root.line.number,
            line=_short(root.line.quote),
            where=root.where,
            evidence=evidence,
            symptoms=quotes,
            ranks_failed=list(dict.fromkeys(ranks)),
            values=values,
            needs=list(row.needs) if row else [],
            exit_code=exit_code,
            exit_signal=signal,
            exit_seen=ended or exit_code is not None,
            out_of_memory=oom,
            gpu_memory_oom=failure_class in ("oom_at_startup", "oom_runtime") and ident not in _POOL_SLOTS,
            graph_related=bool(row and row.graph_related) or (row is None and phase == "capturing_graphs" and known),
            hardware_fault=bool(row and row.hardware_fault),
            source=row.source if row else rule.source if rule else None,
            versions=row.versions if row else f"{rule.since} to {rule.until or 'newest'}" if rule else None,
        )

    def _without_cause(self, exit_code: int | None, ready: bool | None, symptoms: Sequence[_Event]) -> Failure | None:
        quotes = [Quote(line_no=e.line.number, line=_short(e.line.quote), rank=e.line.rank) for e in symptoms[:12]]
        startup = self.ready_line is None
        common: dict[str, Any] = {
            "phase": "serving" if self.ready_line is not None else self.phase,
            "during_startup": startup,
            "cause_known": False,
            "symptoms": quotes,
            "exit_code": exit_code,
            "exit_signal": _signal(exit_code),
            "exit_seen": exit_code is not None,
        }
        if self.stop_line is not None and exit_code in (None, 0, -9, 137, -15, 143, -2, 130):
            return None  # told to stop; SGLang ends its own process tree with SIGKILL
        if exit_code in (-9, 137):
            return Failure(
                id="sigkill",
                failure_class="killed_sigkill",
                outcome="crashes",
                root_cause="the process was ended by SIGKILL; who sent it is not in this log",
                what_to_do="look for the sender: dmesg and the journal (OOM killer), the cgroup's memory.events, a "
                "supervisor's timeout",
                do_not="concluding that memory ran out: 137 is 128 + 9 and proves SIGKILL only",
                values={"oom_killer": "unknown"},
                needs=["dmesg or the kernel journal", "memory.events of the cgroup", "the supervisor's log"],
                **common,
            )
        if exit_code in (-15, 143, -2, 130) and not symptoms:
            return None  # SIGTERM or SIGINT, and nothing broke: somebody stopped it
        if exit_code is not None and exit_code != 0:
            signal = _signal(exit_code)
            bad = exit_code == 2 and startup
            return Failure(
                id="no_cause_in_log",
                failure_class="bad_arguments" if bad else "crash",
                outcome="crashes",
                root_cause=f"the process ended with {f'signal {signal}' if signal else f'exit code {exit_code}'} and "
                f"the log does not say why",
                what_to_do="get the complete log (standard error too), the journal and, for a signal, the core dump",
                needs=["standard error of the process", "the journal of the same minute"],
                **common,
            )
        if ready is False and self.ready_line is None:
            hint = next(iter(self.hints.values()), None)
            what = {
                "deep_gemm_precompile": "DeepGEMM is compiling its kernels, which can take 10 to 20 minutes",
                "flashinfer_autotune": "FlashInfer is tuning or compiling kernels",
            }.get(next(iter(self.hints), ""), f"it was still in the phase {self.phase or 'before its first line'}")
            evidence = [Quote(line_no=hint.number, line=_short(hint.quote), rank=hint.rank)] if hint else []
            return Failure(
                id="not_ready_in_time",
                failure_class="hang",
                outcome="hangs",
                root_cause=f"not ready within the deadline: {what}",
                what_to_do="give it more time once with the compile cache kept, and look at py-spy dump if no line "
                "is added",
                evidence=evidence,
                line_no=hint.number if hint else None,
                line=_short(hint.quote) if hint else None,
                needs=["a longer deadline", "py-spy dump"],
                **common,
            )
        return None


def _exit_code(match: re.Match[str]) -> int:
    """The exit code in a line; systemd writes a signal as a positive number with code=killed."""
    code = int(match.group("exit_code"))
    killed = match.groupdict().get("how") in ("killed", "dumped")
    return -code if killed else code


def _times(events: Sequence[_Event]) -> dict[int, str] | None:
    """Time stamps by one clock, by order: the collector's where every line has it; None if they can't be compared."""
    outer = [e.line.outer for e in events]
    times = outer if all(outer) else [e.line.time for e in events]
    if not all(times) or len({len(t or "") for t in times}) != 1:
        return None
    return {event.order: time or "" for event, time in zip(events, times, strict=True)}


def _signature(text: str) -> tuple[Signature | None, re.Match[str] | None]:
    for row, pattern in _COMPILED:
        if row.needle and row.needle not in text:
            continue
        match = pattern.search(text[:4000])
        if match:
            return row, match
    return None, None


#: What to do where a rule's reason does not say it by itself.
_RULE_DO: dict[str, str] = {
    "hybrid-no-buffer-overlap": "leave --mamba-scheduler-strategy at auto or set extra_buffer; keep no_buffer only with "
    "--disable-overlap-schedule",
    "hybrid-lazy-spec": "use --mamba-scheduler-strategy extra_buffer with speculation, or an SGLang newer than 0.5.16",
    "spec-steps-alone": "give --speculative-num-steps, --speculative-eagle-topk and --speculative-num-draft-tokens "
    "together, or none of them",
    "spec-without-steps": "give --speculative-num-steps, --speculative-eagle-topk and --speculative-num-draft-tokens "
    "together, or none of them",
    "moe-cutedsl-quantization": "use another --moe-runner-backend, or, for a checkpoint with NVFP4 experts, say "
    "--quantization modelopt_fp4",
}
_SPECULATIVE = re.compile(r"speculative|eagle", re.IGNORECASE)


def _refusal(event: _Event) -> Rule | None:
    """The rule of `flags.RULES` that this exception is, or None.

    Messages that many mistakes share (a bare assertion, a comparison with None) count only inside the check of the
    speculative arguments; of several rules with one message, that whose backend the message names.
    """
    found = []
    for rule in RULES:
        if rule.outcome == "silently_ignored" or not re.search(rule.pattern, event.text.strip()):
            continue
        if rule.pattern.startswith(("TypeError", "^AssertionError")) and not _SPECULATIVE.search(event.where or ""):
            continue
        found.append(rule)
    said = re.sub(r"[^a-z0-9]", "", event.text.lower())
    named = [rule for rule in found if "_" in (name := rule.reason.split()[0]) and name.replace("_", "") in said]
    return next(iter(named or found), None)


def _exception_text(event: _Event) -> str:
    text = _short(event.text, 400)
    if event.assertion:
        function = (event.where or "").rpartition(" in ")[2]
        condition = event.assertion.removeprefix("assert ").strip()
        if text.strip() == "AssertionError":
            return f"AssertionError: {condition} in {function}" if function else f"AssertionError: {condition}"
    return text


def _values(event: _Event) -> dict[str, float | int | str | bool | None]:
    values: dict[str, float | int | str | bool | None] = {}
    for key, raw in (event.match.groupdict() if event.match else {}).items():
        if raw is None:
            continue
        values[key] = _number(raw)
    ident = event.row.id if event.row else ""
    if ident == "unrecognized_arguments":
        # argparse lists what is left over: names and what was meant as their values.
        words = str(values.get("flag") or "").split()
        names = [word.partition("=")[0] for word in words if re.match(r"--?[A-Za-z]", word)]
        values["flag"] = ", ".join(dict.fromkeys(names)) or values.get("flag")
    if ident == "too_much_shared_memory":
        values["asked_bytes"] = int(str(event.match.group("asked")), 16) if event.match else None
        values["limit_bytes"] = int(str(event.match.group("limit")), 16) if event.match else None
    if ident == "gpu_out_of_memory":
        tried = _TRIED.search(event.text)
        if tried:
            size, unit = tried.group(1), tried.group(2)
            values["tried_gib"] = float(size) / {"KiB": 1 << 20, "MiB": 1 << 10, "GiB": 1}[unit]
    if ident == "oom_killer":
        values["oom_killer"] = True
    if ident == "nccl_watchdog":
        queue = re.search(r"workMetaList_\.size\(\) = (\d{1,18})", event.text)
        if queue:
            values["queue_length"] = int(queue.group(1))
    if ident == "health_no_heartbeat" and values.get("start") and values.get("beat"):
        gap = seconds_between(f"2001-01-01 {values['beat']}", f"2001-01-01 {values['start']}")
        if gap is not None:
            values["seconds_since_heartbeat"] = int(gap if gap >= 0 else gap + 86400)
    if ident == "shape_mismatch":
        values["packed"] = _is_half(values.get("a"), values.get("b"))
    return values


def _is_half(a: object, b: object) -> bool:
    return isinstance(a, int) and isinstance(b, int) and (a == 2 * b or b == 2 * a)


def _number(raw: str) -> float | int | str:
    if re.fullmatch(r"-?\d{1,18}", raw):
        return int(raw)
    if re.fullmatch(r"-?\d{1,18}\.\d{1,18}", raw):
        return float(raw)
    return raw


def _fill(template: str, event: _Event, values: Mapping[str, object]) -> str:
    tried = values.get("tried_gib")
    seconds = values.get("seconds_since_heartbeat") or values.get("seconds")
    extra = {
        "line": _short(event.text, 240),
        "tried": f" (it asked for {float(str(tried)):.2f} GiB)" if tried is not None else "",
        "for_seconds": f" for {seconds} s" if seconds is not None else "",
        "packed": ": one is half of the other, as when a layer is read as packed FP4 that is not"
        if values.get("packed")
        else "",
    }
    known = {**values, **extra}
    return re.sub(r"\{(\w+)\}", lambda m: str(known.get(m.group(1), "not said")), template)


def _short(text: str, limit: int = 600) -> str:
    return text if len(text) <= limit else text[: limit - 20] + " ... (cut)"


_SIGNALS = {
    1: "SIGHUP",
    2: "SIGINT",
    3: "SIGQUIT",
    4: "SIGILL",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    11: "SIGSEGV",
    15: "SIGTERM",
}


def _signal(exit_code: int | None) -> str | None:
    """The signal in an exit code: Python counts -9, a shell 128 + 9."""
    if exit_code is None:
        return None
    number = -exit_code if exit_code < 0 else exit_code - 128
    return _SIGNALS.get(number)


_OUTCOMES = {
    "crash": "crashes",
    "bad_arguments": "crashes",
    "secondary_failure": "crashes",
    "killed_sigkill": "crashes",
    "oom_at_startup": "out_of_memory",
    "oom_runtime": "out_of_memory",
    "oom_killed": "out_of_memory",
    "hang": "hangs",
    "hang_suspected": "hangs",
    "garbage_output": "garbage",
    "numerical_nan": "numerically_off",
    "performance_degradation": "outside_limit",
}


def _outcome(failure_class: str, unsupported: bool) -> str:
    return "unsupported_here" if unsupported else _OUTCOMES[failure_class]


def classify(log_or_lines: Any, exit_code: int | None = None, ready: bool | None = None) -> Failure | None:
    """Why a server failed, or None if neither its lines nor its exit code show a failure.

    The root cause is the first fatal event that is not a symptom: the first rank to die, the assertion above the
    SIGQUIT,
    never the OOM-killer hint below it. Without any, the class says so (`cause_known` False).

    Args:
        log_or_lines: a text, an iterable of lines (bytes or str), or a `lib.server.log.ServerLog`.
        exit_code: the process's exit code, as Python (-9) or a shell (137) counts.
        ready: False if the caller waited for the server in vain; None if that is not known.

    Example: a log that ends in `RuntimeError: 0 active drivers ([]). There should only be one.` below
    `Scheduler hit an exception: Traceback` gives class crash, id no_gpu_driver, unsupported_here True.
    """
    if hasattr(log_or_lines, "failure") and hasattr(log_or_lines, "kv_pools"):
        return _with_exit_code(log_or_lines, exit_code, ready)
    lines: Iterable[bytes | str]
    if isinstance(log_or_lines, str | bytes):
        lines = log_or_lines.splitlines()
    else:
        lines = log_or_lines
    reader = FailureReader()
    secrets: set[str] = set()
    for number, raw in enumerate(lines, 1):
        data = raw.encode("utf-8", "replace") if isinstance(raw, str) else raw
        if b"server_args=" in data or b"-key" in data:
            secrets.update(value for value in find_secrets(data[:65536].decode("utf-8", "replace")) if len(value) >= 8)
        for part in split_messages(data[: 1 << 20]) or ([data] if reader.open else []):
            line = parse_line(number, part)
            phase = phase_of(part)
            if phase:
                reader.saw_phase(phase.name, line)
            reader.feed(line)
    return redact_object(reader.finish(exit_code, ready), sorted(secrets))


#: Roles of a row for a reader: group title, and what the role means.
_ROLES: dict[str, tuple[str, str]] = {
    "cause": ("Causes", "the first of these that is fatal is the root cause"),
    "hang": ("Hangs", "taken as the failure where no cause is in the log"),
    "symptom": ("Symptoms", "something else failed first; named as evidence, never as the cause"),
}


def failures_markdown() -> str:
    """docs/failures.md: every failure that is recognised, how it looks, what it is and what to do."""
    out = [
        "# Failures",
        "",
        "Generated by `lib.server.failures.failures_markdown()` from the table in `lib/server/failures.py`; do not "
        "edit.",
        "Of the lines of a dying server the first fatal one that is no symptom is the root cause. A message that the "
        "rules of",
        "[backends](backends.md) know (an argument that a version refuses) is recognised too, and any other exception "
        "is class",
        "`crash` with its own text as the cause. `*`: a device, kernel or package is missing on this machine "
        "(`unsupported_here`).",
    ]
    for role, (title, meaning) in _ROLES.items():
        out += ["", f"## {title}", "", f"{meaning[0].upper()}{meaning[1:]}.", ""]
        out += ["| id | class | pattern | what it is | do | do not | source |", "|" + "---|" * 7]
        for row in SIGNATURES:
            if row.role == role:
                cells = [f"{row.id}{' *' if row.unsupported else ''}", row.failure_class, f"`{row.pattern}`", row.cause]
                cells += [row.do, row.do_not or "", row.source]
                out.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    out += ["", "## Outcomes", "", "| class | outcome of a trial |", "|---|---|"]
    out += [f"| {name} | {outcome} |" for name, outcome in _OUTCOMES.items()]
    return "\n".join(out) + "\n"


def _with_exit_code(log: Any, exit_code: int | None, ready: bool | None) -> Failure | None:
    failure: Failure | None = log.failure
    if failure is not None:
        if exit_code is None or failure.exit_code is not None:
            return failure
        return failure.model_copy(update={"exit_code": exit_code, "exit_signal": _signal(exit_code), "exit_seen": True})
    reader = FailureReader()
    reader.phase = log.phase
    if log.ready is not None:
        reader.ready_line = log.ready.line_no
    if log.stopped is not None:
        reader.stop_line = Line(log.stopped.line_no, None, None, log.stopped.line, True, log.stopped.line)
    if log.compiling is not None:
        name = "deep_gemm_precompile" if "DeepGEMM" in log.compiling.line else "flashinfer_autotune"
        reader.hints[name] = Line(log.compiling.line_no, None, None, log.compiling.line, True, log.compiling.line)
    return reader.finish(exit_code, ready)
