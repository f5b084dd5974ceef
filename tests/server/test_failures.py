"""`lib.server.failures`: the root cause among the symptoms, for every row of the table and every recorded death."""

# ruff: noqa: E501  (lines of servers are quoted whole)

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_log import cases, check, log_of

from lib.records import OUTCOMES
from lib.server.failures import FAILURE_NEEDLES, SIGNATURES, Failure, classify
from lib.server.log import read_log
from lib.server.observations import (
    classify_answer,
    classify_events,
    classify_nodes,
    classify_speeds,
    device_taken,
    garbage_signal,
)

RECORDED = Path(__file__).resolve().parents[1] / "recorded"


@pytest.mark.parametrize("case", cases("failure_class"))
def test_case(case: dict[str, Any]) -> None:
    """Every number, boolean and class of the case comes out of the one mapping table."""
    check(case)


def need(failure: Failure | None) -> Failure:
    assert failure is not None
    return failure


# ------------------------------------------------------------------------------------ the table

#: One real line for every row; a row without one fails test_every_row_has_an_example.
EXAMPLES: dict[str, str] = {
    "no_gpu_driver": "RuntimeError: 0 active drivers ([]). There should only be one.",
    "package_missing": "importlib.metadata.PackageNotFoundError: No package metadata was found for flashinfer_python",
    "module_missing": "ModuleNotFoundError: No module named 'deep_gemm'",
    "cuda_only": "ValueError: Ngram speculative decoding only supports CUDA device.",
    "needs_newer_gpu": "ValueError: TRTLLM MHA backend for prefill is only supported on Blackwell GPUs (SM100). Please use a different prefill backend.",
    "needs_cpu_feature": "ValueError: CPU FP8 KV cache requires Intel AMX support.",
    "combination_unsupported": "ValueError: EAGLE is not supported in decode attention backend torch_native",
    "fp8_type_not_on_this_gpu": "ValueError(\"type fp8e4nv not supported in this architecture. The supported fp8 dtypes are ('fp8e5')\")",
    "nccl_out_of_memory": "torch.distributed.DistBackendError: NCCL error, unhandled cuda error. Last error: Cuda failure 2 'out of memory'",
    "no_kernel_image": "RuntimeError: RMSNorm failed with error code no kernel image is available for execution on the device",
    "kernel_download_failed": "AssertionError: Failed to get checksums.txt from 481dce/batched_gemm//checksums.txt",
    "no_cuda_device": "RuntimeError: No CUDA GPUs are available",
    "library_missing": "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
    "device_ordinal": "torch.AcceleratorError: CUDA error: invalid device ordinal",
    "gpu_occupied": "ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes. pre_model_load_memory=1, local_gpu_memory=2",
    "vllm_no_cache_blocks": "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.",
    "triton_out_of_resources": "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456, Hardware limit: 101376. Reducing block sizes or `num_stages` may help.",
    "cublas": "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`",
    "nccl": "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:94, unhandled system error (run with NCCL_DEBUG=INFO for details)",
    "bus_error": "Fatal Python error: Bus error",
    "segfault": "Fatal Python error: Segmentation fault",
    "gated_model": "huggingface_hub.errors.GatedRepoError: 401 Client Error. (Request ID: Root=1)",
    "remote_code": "ValueError: The repository m contains custom code which must be executed. Please pass the argument `trust_remote_code=True`",
    "main_process_exited": "Nov 29 13:05:53 host systemd[1]: sglang.service: Main process exited, code=exited, status=1/FAILURE",
    "shell_killed": "Killed",
    "invalid_choice": "sglang serve: error: argument --fp4-gemm-backend: invalid choice: 'cutlass' (choose from 'auto', 'marlin')",
    "unrecognized_arguments": "sglang serve: error: unrecognized arguments: --mamba-scheduler-strategy extra_buffer",
    "argument_error": "launch_server.py: error: argument --tp-size: invalid int value: 'eight'",
    "weights_leave_no_kv": "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.7.",
    "no_room_for_kv": "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: mem_fraction_static=0.5",
    "no_room_for_mamba": "RuntimeError: Not enough GPU memory for hybrid (mamba/linear-attention) state cache. Computed max_mamba_cache_size=-7 (total_rest_memory=-2.50 GB, mamba_cache_per_req=3.07 MB). Try",
    "negative_profile": "max_total_tokens=4096 is larger than the profiled value -8. Use the profiled value instead.",
    "oom_killer": "Out of memory: Killed process 4242 (sglang::schedul) total-vm:1kB",
    "retract_failed": "Out of memory even after retracting all other requests in the decode batch",
    "pool_out_of_memory": "Decode out of memory. Try to lower your batch size.",
    "gpu_out_of_memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 970.00 MiB.",
    "nan": "RuntimeError: Assertion 'NaN detected! sampler: next_token_logits' failed.",
    "too_much_shared_memory": "RuntimeError: NVCC compilation failed: ptxas error : Entry function 'k' uses too much shared data (0xd000 bytes, 0xc000 max)",
    "compile_failed": "RuntimeError: Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist",
    "shape_mismatch": "RuntimeError: The size of tensor a (3072) must match the size of tensor b (6144) at non-singleton dimension 1",
    "fp4_gemm_failed": "RuntimeError: nvfp4_scaled_mm_sm120.cuh:175 Error Internal",
    "router_weight_unsupported": "AssertionError: apply_router_weight_on_input is not supported for Flashinfer",
    "device_assert": "torch.AcceleratorError: CUDA error: device-side assert triggered",
    "illegal_memory": "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    "hardware": "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.",
    "memory_leak": "ValueError: token_to_kv_pool_allocator memory leak detected! available_size=1",
    "port_taken": "OSError: [Errno 98] error while attempting to bind on address ('0.0.0.0', 30000): address already in use",
    "architecture_unknown": "ValueError: Model architectures ['FooForCausalLM'] are not supported for now.",
    "model_not_found": "OSError: /models/x does not appear to have a file named config.json.",
    "shard_corrupt": "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
    "disk_full": "OSError: [Errno 28] No space left on device",
    "nccl_watchdog": "[rank6]:[F1019 01:14:03.35 ProcessGroupNCCL.cpp:1224] [PG 3 Rank 6] ProcessGroupNCCL's watchdog got stuck for 600 seconds without making progress",
    "sglang_watchdog": "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)",
    "health_no_heartbeat": "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. tic start time: 05:49:14. last_heartbeat time: 05:42:53",
    "peer_timeout": "RuntimeError: Timed out waiting 1800000ms for recv operation to complete",
    "peers_missing": "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
    "peer_closed": "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [192.0.2.10]:24567",
    "scheduler_died": "RuntimeError: Rank 0 scheduler died during initialization (exit code: -6). If exit code is -9 (SIGKILL), a common cause is the OS OOM killer.",
    "subprocess_crashed": "Subprocess scheduler_0 (pid=705) crashed with exit code 1. Triggering SIGQUIT for cleanup...",
    "sigquit": "Received sigquit from a child process. It usually means the child failed.",
    "pipe_closed": "EOFError",
    "engine_core_failed": "RuntimeError: Engine core initialization failed. See root cause above.",
}  # fmt: skip

ROWS = [pytest.param(row, id=row.id) for row in SIGNATURES]
SYMPTOMS = [
    "[2026-11-29 12:27:39 TP1] Scheduler hit an exception: Traceback (most recent call last):",
    '  File "/srv/site/sglang/srt/x.py", line 7, in load_model',
    "    dist.barrier()",
    "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [192.0.2.10]:24567",
    "",
    "[2026-11-29 12:27:40] Received sigquit from a child process. It usually means the child failed.",
    "Traceback (most recent call last):",
    '  File "/srv/site/sglang/srt/entrypoints/engine.py", line 1275, in _wait_for_scheduler_ready',
    "    data = scheduler_pipe_readers[i].recv()",
    "EOFError",
    "",
    "During handling of the above exception, another exception occurred:",
    "",
    "Traceback (most recent call last):",
    '  File "/srv/site/sglang/srt/entrypoints/engine.py", line 1290, in _wait_for_scheduler_ready',
    "    raise _scheduler_died_error(i, proc)",
    "RuntimeError: Rank 0 scheduler died during initialization (exit code: -3). If exit code is -9 (SIGKILL), a "
    "common cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check.",
]


def test_every_row_has_an_example() -> None:
    """A new row needs a line that it matches; ids are unique, classes have an outcome."""
    assert {row.id for row in SIGNATURES} == set(EXAMPLES)
    assert len({row.id for row in SIGNATURES}) == len(SIGNATURES)
    assert {row.role for row in SIGNATURES} <= {"cause", "hang", "symptom"}
    for row in SIGNATURES:
        assert row.source and row.do and row.cause


@pytest.mark.parametrize("row", ROWS)
def test_row_matches_its_line(row: Any) -> None:
    """Alone in a log, the line gives its row; the prefilter lets it pass; read_log and classify agree."""
    line = EXAMPLES[row.id]
    assert any(needle in line for needle in FAILURE_NEEDLES)
    failure = need(classify([line]))
    if row.id == "shell_killed":  # its exit code is known, and nothing else
        assert (failure.failure_class, failure.exit_code) == ("killed_sigkill", -9)
        return
    assert failure.id == row.id
    assert failure.outcome in OUTCOMES
    assert failure.cause_known is (row.role == "cause")
    assert failure.unsupported_here is row.unsupported
    assert (failure.outcome == "unsupported_here") is row.unsupported
    assert failure.line_no == 1 and failure.line is not None and failure.line.endswith(line)
    assert "{" not in failure.root_cause + failure.what_to_do
    lines = ["[2026-11-29 13:06:26] Load weight begin. avail mem=139.09 GB", line]
    assert need(read_log(lines).failure).id == row.id


@pytest.mark.parametrize(
    "row", [r for r in ROWS if r.values[0].role == "cause" and r.values[0].failure_class != "bad_arguments"]
)
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_cause_stands_above_its_symptoms(row: Any, ranks: int) -> None:
    """A cause under `hit an exception` on one rank is the root, whatever symptoms follow on the others."""
    number = 0 if ranks == 1 else random.Random(row.id).randrange(ranks)
    tag = "" if ranks == 1 else f" TP{number}"
    lines = [
        "[2026-11-29 12:27:36] Load weight begin. avail mem=21.14 GB",
        f"[2026-11-29 12:27:37{tag}] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/srv/site/sglang/srt/managers/scheduler.py", line 4325, in run_scheduler_process',
        "    scheduler = Scheduler(",
        "                ^^^^^^^^^^",
        EXAMPLES[row.id],
        "",
        *SYMPTOMS,
    ]
    for found in (classify(lines), read_log(lines).failure):
        failure = need(found)
        assert failure.id == row.id
        assert failure.line_no == 6
        assert failure.rank == (f"TP{number}" if ranks > 1 else None)
        assert failure.exit_code == -3 and failure.exit_signal == "SIGQUIT"
        assert {quote.line_no for quote in failure.symptoms} >= {11, 13}
        assert "OOM killer" not in failure.root_cause or row.id == "oom_killer"


def test_vllm_traceback() -> None:
    """A traceback with vLLM's prefix before every line, other processes' lines between them, gives its cause."""
    error = "(EngineCore pid=99) ERROR 10-02 00:39:31 [core.py:708] "
    lines = [
        error + "EngineCore failed to start.",
        error + "Traceback (most recent call last):",
        "(APIServer pid=1) INFO 10-02 00:39:31 [launcher.py:1] waiting",
        error + '  File "/x/vllm/v1/engine/core.py", line 699, in run_engine_core',
        error + "    engine_core = EngineCoreProc(*args, **kwargs)",
        error
        + "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is needed, which is larger than the available KV cache memory (11.20 GiB).",
        "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
    ]
    for found in (classify(lines), read_log(lines).failure):
        failure = need(found)
        assert (failure.id, failure.failure_class, failure.line_no) == ("vllm_no_cache_blocks", "oom_at_startup", 6)


@pytest.mark.parametrize("style", ["cloud", "docker", "tags", "clock", "quoted"])
@pytest.mark.parametrize(
    "name", ["cpu-sglang/sp15_nextn", "h200-sglang-0.5.16/x_m3_auto", "h200-sglang-0.5.16/m1_auto"]
)
def test_how_collectors_and_people_change_a_log(style: str, name: str) -> None:
    """Prefixes on every line, indentation cut off, dates or times cut off: the root cause stays."""
    lines = (RECORDED / f"{name}.log").read_text(errors="replace").split("\n")
    want = need(classify(lines))
    changed = {
        "cloud": [f"ERROR 2026-11-29T12:27:37.392125190Z {line.strip()}" for line in lines],
        "quoted": [f"    {line}" for line in lines],
        "docker": [f"2026-11-29T12:27:37.392125190Z {line}" for line in lines],
        "tags": [re.sub(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\]", "[TP5 EP5]", line) for line in lines],
        "clock": [re.sub(r"^\[\d{4}-\d\d-\d\d ", "[", line) for line in lines],
    }[style]
    for found in (classify(changed), read_log(changed).failure):
        failure = need(found)
        assert (failure.id, failure.phase, failure.line_no) == (want.id, want.phase, want.line_no)
    assert need(classify(changed)).rank == ("TP5 EP5" if style == "tags" else None)


# ------------------------------------------------------------------------------------ recorded deaths

# (file, id, class, phase, unsupported here)
DEATHS = [
    ("cpu-sglang/sp15_nextn", "no_gpu_driver", "crash", "allocating_kv", True),
    ("cpu-sglang/sp15_ngram", "cuda_only", "crash", "arguments", True),
    ("cpu-sglang/nextn19", "no_cuda_device", "crash", "allocating_kv", True),
    ("cpu-sglang/nextn_21", "combination_unsupported", "crash", "allocating_kv", True),
    ("cpu-sglang/kv21_fp8_e4m3", "needs_cpu_feature", "crash", "allocating_kv", True),
    ("cpu-sglang/kv21_fp8_e5m2", "needs_cpu_feature", "crash", "allocating_kv", True),
    ("cpu-sglang/kv15_hfq_null_q", "exception", "crash", "loading_weights", False),
    ("cpu-sglang/nextn_f32", "exception", "crash", "serving", False),
    ("h200-sglang-0.5.16/m1_auto", "device_assert", "crash", "serving", False),
    ("h200-sglang-0.5.16/x_attn_trtllm_mha", "needs_newer_gpu", "crash", "arguments", True),
    ("h200-sglang-0.5.16/x_fp4_cutlass", "invalid_choice", "bad_arguments", "arguments", False),
    ("h200-sglang-0.5.16/x_fp4name", "unrecognized_arguments", "bad_arguments", "arguments", False),
    ("h200-sglang-0.5.16/x_m3_auto", "no_room_for_mamba", "oom_at_startup", "allocating_kv", False),
    ("h200-sglang-0.5.16/x_m3_fp4_flashinfer_trtllm", "needs_newer_gpu", "crash", "loading_weights", True),
    ("h200-sglang-0.5.16/x_m3_moe_cutlass", "needs_newer_gpu", "crash", "loading_weights", True),
    ("h200-sglang-0.5.16/x_moe_flashinfer_trtllm", "kernel_download_failed", "crash", "warming_up", True),
    ("h200-sglang-0.5.16/x_moe_flashinfer_cutedsl", "moe-cutedsl-quantization", "bad_arguments", "arguments", False),
    ("h200-sglang-0.5.16/x_nextn_lazy", "hybrid-lazy-spec", "bad_arguments", "arguments", False),
    ("h200-sglang-0.5.16/x_nextn_no_buffer", "hybrid-no-buffer-overlap", "bad_arguments", "arguments", False),
    ("h200-sglang-0.5.16/x_nextn_steps_only", "spec-steps-alone", "bad_arguments", "arguments", False),
    ("h200-sglang-0.5.16/m2_e5m2", "sigkill", "killed_sigkill", "serving", False),
]


@pytest.mark.parametrize("row", DEATHS, ids=lambda row: row[0].rpartition("/")[2])
def test_recorded_death(row: tuple[str, str, str, str, bool]) -> None:
    """A recorded server that died is read as H200.md and CPU.md say it died, by classify and by read_log alike."""
    name, ident, failure_class, phase, unsupported = row
    lines = (RECORDED / f"{name}.log").read_bytes().split(b"\n")
    for found in (classify(lines), read_log(lines).failure):
        failure = need(found)
        assert (failure.id, failure.failure_class, failure.phase, failure.unsupported_here) == (
            ident,
            failure_class,
            phase,
            unsupported,
        )


DEAD = {name for name, *_ in DEATHS} | {"h200-sglang-0.5.16/m2_nextn_auto", "cpu-sglang/kv15_hfq_fp8"}
DEAD |= {f"h200-sglang-0.5.16/{path.stem}" for path in (RECORDED / "h200-sglang-0.5.16").glob("x_m3_*.log")}


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*/*.log")), ids=lambda path: path.stem)
def test_only_the_dead_are_dead(path: Path) -> None:
    """No server that worked and was stopped gets a failure, whatever warnings and import errors it logged."""
    failure = log_of(path).failure
    assert (failure is not None) is (f"{path.parent.name}/{path.stem}" in DEAD)


def test_plain_exception_and_shortened_header() -> None:
    """`Exception:` itself is an exception, also below a header that somebody shortened."""
    lines = [
        "[01:39:47] Memory pool end. avail mem=9.00 GB",
        "[01:39:49] Scheduler hit an exception ...",
        "Exception: Capture cuda graph failed:",
        "  shim: not native",
    ]
    for found in (classify(lines), read_log(lines).failure):
        failure = need(found)
        assert (failure.id, failure.phase, failure.line_no) == ("exception", "capturing_graphs", 3)


def test_messages_of_several_lines() -> None:
    """An exception's message that goes on in the next line is whole."""
    head = b'Traceback (most recent call last):\n  File "/x/a.py", line 1, in check\n    assert a\n'
    lines = (head + b"AssertionError: Invalid shape 'None'. \nThis layer takes only: 'two', 'three'.").split(b"\n")
    for found in (classify(lines), read_log(lines).failure):
        assert need(found).root_cause == "AssertionError: Invalid shape 'None'. This layer takes only: 'two', 'three'."


# ------------------------------------------------------------------------------------ exit codes, hangs, stops


@pytest.mark.parametrize(
    ("code", "failure_class", "signal"),
    [
        (137, "killed_sigkill", "SIGKILL"),
        (-9, "killed_sigkill", "SIGKILL"),
        (-11, "crash", "SIGSEGV"),
        (139, "crash", "SIGSEGV"),
        (134, "crash", "SIGABRT"),
        (1, "crash", None),
        (2, "bad_arguments", None),
    ],
)
def test_exit_code_without_a_cause(code: int, failure_class: str, signal: str | None) -> None:
    """An exit code alone proves no cause: 137 is SIGKILL and nothing more."""
    for found in (
        classify(["[2026-11-29 12:00:00] Load weight begin. avail mem=1.00 GB"], exit_code=code),
        classify(read_log(["[2026-11-29 12:00:00] Load weight begin. avail mem=1.00 GB"]), exit_code=code),
    ):
        failure = need(found)
        assert (failure.failure_class, failure.exit_signal, failure.cause_known, failure.out_of_memory) == (
            failure_class,
            signal,
            False,
            False,
        )
        assert failure.needs


def test_exit_code_with_the_killers_line() -> None:
    """With the kernel's own line beside it, the OOM killer is proven."""
    failure = need(classify(["kernel: Out of memory: Killed process 77 (python3) total-vm:1kB"], exit_code=137))
    assert (failure.failure_class, failure.out_of_memory, failure.cause_known) == ("oom_killed", True, True)


def test_stopped_on_request_is_no_failure() -> None:
    """SIGTERM and then exit code -9 is SGLang's way to end its own process tree."""
    log = read_log((RECORDED / "h200-sglang-0.5.16/m2_auto.log").read_bytes().split(b"\n"))
    assert log.stopped is not None
    for code in (None, 0, -9, 137, 143):
        assert classify(log, exit_code=code) is None


def test_not_ready_in_time() -> None:
    """A launcher that waited in vain gets a hang with the phase, and the compilation that explains it."""
    log = read_log((RECORDED / "h200-sglang-0.5.16/x_moe_deep_gemm.log").read_bytes().split(b"\n"))
    assert classify(log) is None  # the lines alone show no failure
    failure = need(classify(log, ready=False))
    assert (failure.failure_class, failure.outcome) == ("hang", "hangs")
    assert "DeepGEMM" in failure.root_cause and failure.line_no
    silent = need(classify((RECORDED / "h200-sglang-0.5.16/m3_auto.log").read_bytes().split(b"\n"), ready=False))
    assert (silent.failure_class, silent.phase) == ("hang", "capturing_graphs")
    dead = need(classify((RECORDED / "cpu-sglang/sp15_nextn.log").read_bytes().split(b"\n"), ready=False))
    assert dead.id == "no_gpu_driver"


@given(start=st.integers(0, 86399), gap=st.integers(21, 40000), threshold=st.integers(5, 60))
@settings(max_examples=60, deadline=None)
def test_heartbeat_gap(start: int, gap: int, threshold: int) -> None:
    """The seconds since the last heartbeat follow from the two times, over midnight too."""
    clock = lambda s: f"{s // 3600:02d}:{s // 60 % 60:02d}:{s % 60:02d}"  # noqa: E731
    line = f"Health check failed. Server couldn't get a response from detokenizer for last {threshold} seconds. tic start time: {clock((start + gap) % 86400)}. last_heartbeat time: {clock(start)}"
    failure = need(classify([line]))
    assert (failure.failure_class, failure.values["seconds_since_heartbeat"], failure.values["threshold_s"]) == (
        "hang_suspected",
        gap,
        threshold,
    )


@given(asked=st.integers(1, 10**7), short=st.integers(1, 10**7), ranks=st.integers(1, 16))
@settings(max_examples=40, deadline=None)
def test_negative_profile(asked: int, short: int, ranks: int) -> None:
    """The sign of a profiled value decides: negative is a shortage, positive is no failure."""
    line = "[2026-07-02 07:41:59 TP{r}] max_total_tokens={a} is larger than the profiled value {p}. Use the profiled value instead."
    failure = need(classify([line.format(r=r, a=asked, p=-short) for r in range(ranks)]))
    assert (failure.failure_class, failure.values["profiled_tokens"], failure.values["asked_tokens"]) == (
        "oom_at_startup",
        -short,
        asked,
    )
    assert failure.ranks_failed == [f"TP{r}" for r in range(ranks)]
    assert classify([line.format(r=0, a=asked, p=short)]) is None


def test_out_of_memory_by_phase() -> None:
    """The same line is out of memory at startup or at run time, by whether the server was ready."""
    line = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    head = [
        "[2026-11-29 12:00:00] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "a.py", line 1, in f',
        line,
    ]
    ready = [
        "[2026-11-29 11:59:00] Load weight begin. avail mem=1.00 GB",
        "[2026-11-29 12:00:00] The server is fired up and ready to roll!",
    ]
    assert need(classify([ready[0], *head])).failure_class == "oom_at_startup"
    after = need(classify([*ready, *head]))
    assert (after.failure_class, after.phase, after.values["tried_gib"]) == ("oom_runtime", "serving", 2.0)


def test_first_rank_by_time_stamp() -> None:
    """When logs were merged out of order, the earliest time stamp is the first to die."""

    def block(rank: int, second: int, text: str) -> list[str]:
        return [
            f"[2026-11-29 12:00:{second:02d} TP{rank}] Scheduler hit an exception: Traceback (most recent call last):",
            '  File "a.py", line 1, in f',
            text,
            "",
        ]

    lines = [
        *block(3, 40, "RuntimeError: CUDA error: an illegal memory access was encountered"),
        *block(1, 20, "RuntimeError: nvfp4_scaled_mm_sm120.cuh:175 Error Internal"),
    ]
    failure = need(classify(lines))
    assert (failure.id, failure.rank, failure.ranks_failed) == ("fp4_gemm_failed", "TP1", ["TP3", "TP1"])


def test_chained_exceptions() -> None:
    """Of a direct chain the first is the cause; of 'during handling' the last, unless the first is known."""
    first = ["Traceback (most recent call last):", '  File "a.py", line 1, in f', "    g()", "KeyError: 'a'", ""]
    second = [
        "Traceback (most recent call last):",
        '  File "a.py", line 9, in h',
        "    k()",
        "ValueError: something else",
        "",
    ]
    direct = [*first, "The above exception was the direct cause of the following exception:", "", *second]
    assert need(classify(direct)).root_cause == "KeyError: 'a'"
    handling = [*first, "During handling of the above exception, another exception occurred:", "", *second]
    assert need(classify(handling)).root_cause == "ValueError: something else"
    known = [
        *first[:3],
        "RuntimeError: 0 active drivers ([]). There should only be one.",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        *second,
    ]
    assert need(classify(known)).id == "no_gpu_driver"


def test_request_errors_after_ready_are_no_failure() -> None:
    """A traceback of one request in the HTTP layer does not make the server dead."""
    lines = [
        "[2026-11-29 12:00:00] The server is fired up and ready to roll!",
        "[2026-11-29 12:00:05] ERROR:    Exception in ASGI application",
        "Traceback (most recent call last):",
        '  File "/srv/site/uvicorn/h11_impl.py", line 4, in run_asgi',
        "ValueError: bad request",
        "[2026-11-29 12:00:06] Decode batch, #running-req: 1, #token: 10, token usage: 0.00, cuda graph: True, gen "
        "throughput (token/s): 1.00, #queue-req: 0",
    ]
    assert classify(lines) is None
    assert read_log(lines).failure is None


HARMLESS = [
    "/srv/x/torchvision/io/image.py:13: UserWarning: Failed to load image Python extension: 'libjpeg.so.8: cannot open shared object file: No such file'",
    "[2026-11-29 13:06:26] Ignore import error when loading sglang.srt.models.x: undefined symbol: _ZN3c10",
    "[2026-11-29 13:06:26] Ignore import error when loading sglang.srt.models.inkling: No module named 'helion'",
    "[2026-11-29 13:05:19] OpenAI Responses API (/v1/responses) disabled: OpenAIServingResponses init failed (ImportError: cannot import name 'X')",
    "[rank0]:[W513 02:15:19.747 ProcessGroupNCCL.cpp:1524] Warning: WARNING: destroy_process_group() was not called, Broken pipe",
    "[2026-11-29 13:06:26] NVFP4 GEMM is only supported on Blackwell GPUs (SM100); using marlin instead.",
    "[2026-11-29 13:06:26] Speculative feature X only supports CUDA device. Falling back.",
    "(APIServer pid=1) WARNING 11-29 12:57:39 [system_utils.py:255] errors like `OSError: [Errno 24] No space left on device`",
    "(EngineCore pid=1) INFO 11-29 12:57:39 [x.py:1] No CUDA GPUs are available for this test",
    "[2026-11-29 13:06:27] max_total_tokens=131072 is larger than the profiled value 100000. Use the profiled value instead.",
    "[2026-11-29 13:06:27] Receive: obj=GenerateReqInput(text='torch.OutOfMemoryError: CUDA out of memory.')",
]


@pytest.mark.parametrize("line", HARMLESS)
@pytest.mark.parametrize("name", ["cpu-sglang/q3_15b.log", "h200-sglang-0.5.16/m2_bf16.log"])
def test_warnings_of_healthy_servers(line: str, name: str) -> None:
    """Words of a failure in a warning do not kill a healthy server, before or after it is ready."""
    lines = (RECORDED / name).read_text(errors="replace").splitlines()
    ready = next(i for i, text in enumerate(lines) if "fired up" in text)
    for at in (3, ready - 1, ready + 1, ready + 3):
        mixed = [*lines[:at], line, *lines[at:]]
        assert classify(mixed) is None
        assert read_log(mixed).failure is None
    assert classify([line]) is None


def test_health_check_that_recovers() -> None:
    """Batches after a failed health check show load, not a stall; none after it leave the suspicion."""
    batch = "[2026-11-29 12:00:{s:02d}] Decode batch, #running-req: 1, #token: 10, token usage: 0.00, cuda graph: True, gen throughput (token/s): 1.00, #queue-req: 0"
    health = f"[2026-11-29 12:00:30] {EXAMPLES['health_no_heartbeat']}"
    lines = ["[2026-11-29 11:59:00] The server is fired up and ready to roll!", batch.format(s=10), health]
    assert need(read_log(lines).failure).failure_class == "hang_suspected"
    assert read_log([*lines, batch.format(s=40)]).failure is None
    assert need(classify(lines)).failure_class == "hang_suspected"
    assert classify([*lines, batch.format(s=40)]) is None


def test_restarts_under_systemd() -> None:
    """In a journal with restarts the last start's death is reported, not the first one's, and a clean stop before it is none."""
    at = "Nov 29 13:05:{s:02d} host {who}: {text}"
    good = (RECORDED / "cpu-sglang/q3_15b.log").read_text(errors="replace").splitlines()
    journal = [at.format(s=1, who="systemd[1]", text="Started SGLang.")]
    journal += [at.format(s=2, who="python[7]", text=line) for line in good]
    assert classify(journal) is None
    journal += [
        at.format(s=50, who="systemd[1]", text="Stopping SGLang..."),
        at.format(s=52, who="systemd[1]", text="Started SGLang."),
        at.format(
            s=55, who="python[9]", text="sglang serve: error: unrecognized arguments: --mamba-scheduler-strategy"
        ),
        at.format(
            s=56, who="systemd[1]", text="sglang.service: Main process exited, code=exited, status=2/INVALIDARGUMENT"
        ),
    ]
    log = read_log(journal)
    failure = need(log.failure)
    assert (failure.id, failure.exit_code) == ("unrecognized_arguments", 2)
    assert [(start.ready, start.failure_class) for start in log.launches] == [(True, None), (False, "bad_arguments")]
    killed = [at.format(s=1, who="systemd[1]", text="sglang.service: Main process exited, code=killed, status=9/KILL")]
    assert need(classify(killed)).failure_class == "killed_sigkill"


@pytest.mark.parametrize(("phase", "line", "word"), [
    ("loading_weights", "[2026-11-29 12:00:00] Load weight begin. avail mem=1.00 GB", "weights do not fit"),
    ("capturing_graphs", "[2026-11-29 12:00:00] Capture target decode CUDA graph begin. backend=full, bs=[1], avail mem=1.00 GB", "cuda-graph-max-bs"),
    ("serving", "[2026-11-29 12:00:00] The server is fired up and ready to roll!", "chunked-prefill-size"),
])  # fmt: skip
def test_what_to_do_about_out_of_memory(phase: str, line: str, word: str) -> None:
    """The advice depends on what the server was doing when GPU memory ran out."""
    dead = [
        "[2026-11-29 12:00:01] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "a.py", line 1, in f',
        EXAMPLES["gpu_out_of_memory"],
    ]
    failure = need(classify([line, *dead]))
    assert failure.phase == phase and word in failure.what_to_do


# ------------------------------------------------------------------------------------ observations


@pytest.mark.parametrize("char", ["+", "!", "0", "的", "\ufffd"])
@pytest.mark.parametrize("n", [8, 50, 400])
def test_garbage(char: str, n: int) -> None:
    """One character again and again is garbage, with HTTP 200."""
    failure = need(classify_answer({"choices": [{"message": {"content": char * n}, "finish_reason": "length"}]}))
    assert (failure.failure_class, failure.outcome, failure.values["http"]) == ("garbage_output", "garbage", 200)
    assert garbage_signal("abc " * (n // 2 + 6)) == "short_unit_repeated"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4",
        "Paris.",
        "++++",
        "def f(x):\n    return x + 1\n",
        "The capital of France is Paris, and it has two million people.",
        "| a | b |\n|---|---|\n| 1 | 2 |",
        "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12",
    ],
)
def test_not_garbage(text: str) -> None:
    """Ordinary and very short answers are not judged to be garbage."""
    assert garbage_signal(text) is None
    assert classify_answer({"text": text}) is None


@pytest.mark.parametrize("guilty", range(4))
def test_nodes(guilty: int) -> None:
    """The node with a cause of its own is the root, wherever it stands; the others are its victims."""
    nodes = {f"node_{n}": [EXAMPLES["sglang_watchdog"].replace("300", "600")] for n in range(4)}
    nodes[f"node_{guilty}"] = [EXAMPLES["fp4_gemm_failed"]]
    found = classify_nodes(nodes, exit_codes=[0, 0, 0, 0])
    assert found is not None
    assert (found.root_node, found.failure.id, found.exit_code_hides_it) == (f"node_{guilty}", "fp4_gemm_failed", True)
    assert sorted(found.victims) == sorted(set(nodes) - {f"node_{guilty}"})
    assert classify_nodes({"a": ["[2026-11-29 12:00:00] The server is fired up and ready to roll!"]}) is None


def test_events_and_speeds() -> None:
    """A hang behind a healthy /health and a decay without an error are found; their absence is None."""
    failure = need(
        classify_events(
            ["GET /health 200", "requests 1..77 ok at 2 QPS", "request 78.. : connected, 0 tokens, 300 s timeout"]
        )
    )
    assert (
        failure.failure_class,
        failure.values["ok_before_hang"],
        failure.values["qps"],
        failure.values["health_http"],
    ) == ("hang", 77, 2.0, 200)
    assert classify_events(["GET /health 200", "requests 1..77 ok at 2 QPS"]) is None
    decay = need(classify_speeds(["50 tok/s after restart", "20.5 tok/s later, accept rate below 0.4"]))
    assert (decay.values["healthy_tok_s"], decay.values["degraded_tok_s"], decay.values["threshold"]) == (
        50.0,
        20.5,
        0.4,
    )
    assert classify_speeds(["50 tok/s", "45 tok/s"]) is None and classify_speeds(["50 tok/s"]) is None


def test_device_taken() -> None:
    """A skipped runner is not a skipped device; the line that takes one decides."""
    skip = 'INFO msg="skipping CUDA device - compute capability not in compiled architectures"'
    assert device_taken([skip]) is None
    assert device_taken([skip, 'INFO msg="inference compute" library=CUDA compute=12.1']) == "CUDA"
    assert device_taken([skip, 'INFO msg="inference compute" library=cpu']) == "CPU"


# ------------------------------------------------------------------------------------ bad input

POOL = [
    line
    for path in sorted(RECORDED.glob("*/*.log"))
    for line in path.read_text(errors="replace").splitlines()
    if "rror" in line or "Traceback" in line or line.startswith("  File")
]


@given(
    st.lists(st.one_of(st.sampled_from([*POOL, *EXAMPLES.values(), *SYMPTOMS]), st.text(max_size=120)), max_size=40),
    st.sampled_from([None, 0, 1, 2, -9, 137, 256]),
    st.sampled_from([None, True, False]),
)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_fuzz(lines: list[str], code: int | None, ready: bool | None) -> None:
    """Any mix of error lines is classified without an error, with a known outcome and a line that exists."""
    failure = classify(lines, exit_code=code, ready=ready)
    if failure is not None:
        assert failure.outcome in OUTCOMES
        assert failure.line_no is None or 1 <= failure.line_no <= len(lines)
        assert Failure.model_validate_json(failure.model_dump_json()) == failure


def test_endless_tracebacks_stay_bounded() -> None:
    """Thousands of tracebacks, and one that never ends, keep little."""
    block = [
        "[2026-11-29 12:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "a.py", line 1, in f',
        "RuntimeError: boom",
        "",
    ]
    failure = need(classify(block[n % 4] for n in range(20_000)))
    assert failure.line_no == 3 and len(failure.symptoms) <= 12
    endless = (block[0] if n == 0 else '  File "a.py", line 1, in f' for n in range(20_000))
    assert need(classify(endless)).id == "unfinished_traceback"


# ------------------------------------------------------------------------------------ refusals that flags.RULES knows


def refused(message: str, where: str) -> Failure:
    """A launcher that ends in an exception inside the check of its arguments."""
    file, function = where.split()
    lines = [
        "Traceback (most recent call last):",
        f'  File "/x/sglang/srt/{file}", line 640, in {function}',
        "    raise_it()",
        *message.split("\n"),
    ]
    return need(classify(lines, exit_code=1))


SPEC_CHECK = "arg_groups/speculative_hook.py _handle_eagle_family"


@pytest.mark.parametrize(
    ("message", "where", "ident", "words"),
    [
        (
            "AssertionError: no_buffer do not support overlap schedule. Try to set disable_overlap_schedule=True.",
            "server_args.py _validate_mamba_no_buffer",
            "hybrid-no-buffer-overlap",
            ("no_buffer", "--disable-overlap-schedule"),
        ),
        (
            "AssertionError: extra_buffer_lazy unsupported with spec.",
            "server_args.py _validate_mamba_extra_buffer",
            "hybrid-lazy-spec",
            ("extra_buffer_lazy", "extra_buffer"),
        ),
        (
            "TypeError: '>' not supported between instances of 'NoneType' and 'int'",
            SPEC_CHECK,
            "spec-steps-alone",
            ("speculative_num_steps", "--speculative-eagle-topk"),
        ),
        ("AssertionError", SPEC_CHECK, "spec-without-steps", ("speculative_num_steps", "--speculative-num-steps")),
        (
            "AssertionError: Invalid quantization 'None'. \nFlashInfer CuteDSL MOE currently supports only: 'modelopt_fp4'",
            "server_args.py _handle_moe_kernel_config",
            "moe-cutedsl-quantization",
            ("flashinfer_cutedsl", "--moe-runner-backend"),
        ),
        (
            "AssertionError: Invalid quantization 'awq'. \nFlashInfer Cutlass MOE supports only: 'modelopt_fp4'",
            "server_args.py _handle_moe_kernel_config",
            "moe-flashinfer-cutlass-quantization",
            ("flashinfer_cutlass", "arguments"),
        ),
    ],
)
def test_a_refusal_of_the_rules_is_bad_arguments(message: str, where: str, ident: str, words: tuple[str, str]) -> None:
    """The reason of the rule is the cause (recorded on an H200 with 0.5.16: four of these exceptions)."""
    failure = refused(message, where)
    assert (failure.id, failure.failure_class, failure.phase) == (ident, "bad_arguments", "arguments")
    assert words[0] in failure.root_cause
    assert words[1] in failure.what_to_do
    assert failure.cause_known and failure.outcome == "crashes"


@pytest.mark.parametrize(
    "message", ["TypeError: '>' not supported between instances of 'NoneType' and 'int'", "AssertionError"]
)
def test_an_exception_that_anything_may_raise_is_not_taken_for_a_refusal(message: str) -> None:
    assert refused(message, "server_args.py _handle_page_size").id == "exception"


@pytest.mark.parametrize(
    ("left_over", "names"),
    [
        ("--mamba-scheduler-strategy extra_buffer", "--mamba-scheduler-strategy"),
        ("--foo=bar --fizz -1 buzz --foo=2", "--foo, --fizz"),
        ("stray", "stray"),
    ],
)
def test_what_argparse_does_not_know_is_named_without_its_values(left_over: str, names: str) -> None:
    failure = need(classify([f"sglang serve: error: unrecognized arguments: {left_over}"], exit_code=2))
    assert failure.root_cause == f"this version has no argument {names}"
    assert failure.values["flag"] == names


def test_no_cause_begins_or_ends_with_a_space() -> None:
    """The parts that a row takes from the message carry no margin: `in phase X:  EAGLE` was one."""
    for text in EXAMPLES.values():
        failure = classify(["[2026-11-29 10:00:00] Load weight begin. avail mem=1.00 GB", text], exit_code=1)
        if failure is not None:
            assert failure.root_cause == failure.root_cause.strip()
            assert failure.what_to_do == failure.what_to_do.strip()


_TRACE = (
    "Traceback (most recent call last):\n"
    '  File "/x/sglang/srt/managers/scheduler.py", line 2857, in run_scheduler_process\n'
    "    scheduler.event_loop_normal()\n"
    '  File "/x/sglang/srt/models/qwen3.py", line 98, in forward\n'
    "    x = self.mlp(x)\n"
    "        ^^^^^^^^^^^\n"
    "RuntimeError: a failure that no row knows, of size {n}"
)
_LAUNCHERS = {
    "ray": "(SGLangEngine pid=952, ip=192.0.2.7) ",
    "ray in colours": "\x1b[36m(SGLangEngine pid=952)\x1b[0m ",
    "vllm": "(EngineCore_DP0 pid=6880) ",
    "torch": "[rank0]: ",
    "kubectl": "[pod/sglang-0/sglang] ",
    "ci": "[2025-11-06T02:09:46.230Z] ",
    "srun": "3: ",
    "quoted": "> ",
    "wrapper": "2025-12-11 10:34:03.939481+08:00 - some.wrapper - INFO - ",
    "logging": "2025-04-03 12:06:13,365 - __main__ - INFO - ",
    "collector": "2026-04-12 21:16:41.762 ",
    "cri": "2025-07-25T07:53:08.21748708+08:00 stdout F ",
    "two": "2025-07-25T07:53:08.21748708+08:00 stdout F (EngineCore pid=3) ",
}


@pytest.mark.parametrize("head", ["", "[2026-11-06 01:16:21 TP0] Scheduler hit an exception: "])
@pytest.mark.parametrize("launcher", _LAUNCHERS)
def test_what_launchers_put_before_each_line_of_a_traceback(launcher: str, head: str) -> None:
    """The cause is the exception, and not the first frame with its prefix."""
    n = random.randrange(10_000)
    lines = [_LAUNCHERS[launcher] + line for line in (head + _TRACE.format(n=n)).splitlines()]
    found = classify(lines)
    assert found is not None and found.root_cause.endswith(f"of size {n}")
    assert found.where is not None and found.where.endswith("qwen3.py:98 in forward")


def test_two_ranks_that_write_line_by_line() -> None:
    """PyTorch prefixes each rank's lines; another rank's stand between them."""
    one = [f"[rank0]: {line}" for line in _TRACE.format(n=1).splitlines()]
    two = [f"[rank1]: {line}" for line in _TRACE.format(n=2).splitlines()]
    found = classify([line for pair in zip(one[:1] + one[1:], ["", *two[1:]], strict=True) for line in pair])
    assert found is not None and found.root_cause.endswith("of size 1") and found.rank == "rank0"


@pytest.mark.parametrize(
    ("line", "failure_class"),
    [
        (
            "[rank3]:[E1019 01:14:03.35 ProcessGroupNCCL.cpp:629] [Rank 3] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=84213, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600029 milliseconds",
            "hang",
        ),
        ("HeartbeatMonitor on rank 2 timed out", "hang"),
        ("Out of memory. Try to lower your batch size.", "oom_runtime"),
        ("[rank2]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3384", "crash"),
        ("[2026-03-02 15:17:25] ValueError: Unknown quantization method: modelopt_x. Must be one of ['awq'].", "crash"),
        ("ValueError: Warning: User-specified context_length (9) is greater than the derived one (4).", "crash"),
    ],
)
def test_one_pasted_line(line: str, failure_class: str) -> None:
    """People quote the last line alone; each branch of a row's pattern counts, whatever its capital."""
    found = classify([line])
    assert found is not None and found.failure_class == failure_class


def test_needles_are_in_each_branch() -> None:
    """A row's needle is a prefilter: a branch of its pattern without it could never match."""
    for row in SIGNATURES:
        depth, branches = 0, [""]
        for piece in re.findall(r"\\.|\[(?:\\.|[^\]\\])+\]|.", row.pattern):
            depth += (piece == "(") - (piece == ")")
            if piece == "|" and depth == 0:
                branches.append("")
            else:
                branches[-1] += piece
        for branch in branches:
            assert row.needle in branch.replace("\\", ""), (row.id, branch)


@pytest.mark.parametrize("code", [143, -15, 130, -2])
def test_ended_by_request_alone(code: int) -> None:
    """SIGTERM or SIGINT and a log in which nothing broke."""
    assert classify(["[2026-01-01 00:00:00] Load weight begin. avail mem=79.00 GB"], exit_code=code) is None


def test_the_kernel_says_that_it_killed() -> None:
    """With the kernel's line the question who killed is answered."""
    found = classify(["Memory cgroup out of memory: Killed process 99231 (python3)"], exit_code=137)
    assert found is not None and found.failure_class == "oom_killed" and found.values["oom_killer"] is True


def test_nccl_without_gpu_memory_is_out_of_memory() -> None:
    """The cause stands in the message's last line, three lines below the exception; the token pool's end is another thing."""
    lines = [
        "[2025-12-02 13:00:44 TP0] Init torch distributed begin.",
        "[2025-12-02 13:00:46 TP0] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/srv/site/sglang/srt/distributed/parallel_state.py", line 300, in __init__',
        "    self.nccl = PyNcclCommunicator(group)",
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, unhandled cuda error, NCCL version 2.21.5",
        "ncclUnhandledCudaError: Call to CUDA function failed.",
        "Last error:",
        "Cuda failure 2 'out of memory'",
        "",
    ]
    failure = need(classify(lines))
    assert (failure.id, failure.failure_class, failure.gpu_memory_oom) == ("nccl_out_of_memory", "oom_at_startup", True)
    without = need(classify([*lines[:-2], "Cuda failure 1 'invalid argument'", ""]))
    assert (without.id, without.gpu_memory_oom) == ("nccl", False)
    slots = need(classify(["[2025-12-02 13:00:46] Prefill out of memory. Try to lower your batch size."]))
    assert slots.out_of_memory and not slots.gpu_memory_oom


def test_a_compile_error_under_capture_is_not_the_graphs_fault() -> None:
    """Triton cannot compile e4m3 for an A100: it would fail without graphs too."""
    lines = [
        "[2025-12-02 13:00:44 TP0] Capture cuda graph begin. This can take up to several minutes. avail mem=9.02 GB",
        "[2025-12-02 13:00:46 TP0] Scheduler hit an exception: Traceback (most recent call last):",
        "triton.compiler.errors.CompilationError: at 44:15:",
        "ValueError(\"type fp8e4nv not supported in this architecture. The supported fp8 dtypes are ('fp8e4b15', 'fp8e5')\")",
        "",
    ]
    failure = need(classify(lines))
    assert (failure.id, failure.phase, failure.graph_related) == ("fp8_type_not_on_this_gpu", "capturing_graphs", False)
