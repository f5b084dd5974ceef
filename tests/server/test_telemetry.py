"""GPU state over a window, from a stubbed NVML and from nvidia-smi's text; Xids; the server's counters. No GPU is needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lib.errors import ServerError
from lib.hosts.base import LocalHost
from lib.params import HostParams
from lib.server import gpu_state, telemetry
from lib.server.remote import Place
from lib.server.telemetry import FILE, read_state
from lib.server.telemetry_there import HostSampler
from tests.conftest import ROOT

# text and numbers -----------------------------------------------------------------------------------------------------

#: Two lines in the form of `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`; the second GPU caps its power.
SMI = """0, GPU-aa, NVIDIA H200, 1980, 1980, 3201, 412.50, 700.00, 55, 98, 120000, 0x0000000000000000
1, GPU-bb, NVIDIA H200, 1410, 1980, 3201, 699.10, 700.00, 71, 100, 120010, 0x0000000000000004
"""


def test_smi_rows_are_numbers_with_units_and_reasons() -> None:
    """Every column lands under its own name; the mask is hexadecimal."""
    first, second = gpu_state.parse_smi(SMI)
    assert first["sm_clock_mhz"] == 1980 and first["power_w"] == 412.5 and first["clock_reasons"] == 0
    assert second["index"] == 1 and gpu_state.clock_reasons(second["clock_reasons"]) == ["sw_power_cap"]


@pytest.mark.parametrize("word", ["[N/A]", "[Not Supported]", "[Unknown Error]", "N/A", ""])
def test_what_a_gpu_does_not_report_is_none_never_0(word: str) -> None:
    """A card without a power sensor has no power, and unknown reasons are not the absence of reasons."""
    (row,) = gpu_state.parse_smi(f"0, GPU-aa, X, 1980, 1980, 3201, {word}, 700.00, 55, 98, 1, {word}\n")
    assert row["power_w"] is None and row["clock_reasons"] is None


def test_text_that_is_no_table_gives_no_rows() -> None:
    """nvidia-smi's error messages are not GPUs."""
    assert gpu_state.parse_smi("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n") == []
    assert gpu_state.parse_smi("") == []


@pytest.mark.parametrize("bit", gpu_state.CLOCK_REASONS)
def test_every_clock_reason_has_its_own_name(bit: int) -> None:
    """One bit, one name; several bits, several names; an unknown bit is shown as a number."""
    assert gpu_state.clock_reasons(bit) == [gpu_state.CLOCK_REASONS[bit][0]]
    assert gpu_state.clock_reasons(bit | 0x8000)[-1] == "bit_0x8000"


def line(t_s: float, gpus: list[dict[str, Any]]) -> dict[str, Any]:
    return {"kind": "sample", "t_ns": int(t_s * 1e9), "unix_s": t_s, "gpus": gpus, "cpu_frac": 0.25}


HEAD = {"kind": "telemetry", "schema": 1, "source": "nvml", "reason": None, "ranks": [0, 1], "period_s": 1.0}


def sample(index: int, clock: float, reasons: int | None = 0, **changes: Any) -> dict[str, Any]:
    return {"index": index, "name": "X", "sm_clock_mhz": clock, "clock_reasons": reasons, "power_w": 100.0, **changes}


def test_a_throttled_window_is_marked_and_the_slowest_rank_named() -> None:
    """Half of rank 1's samples carry a thermal slowdown; rank 0 is never marked."""
    lines = [HEAD] + [line(t, [sample(0, 1980), sample(1, 1400 if t % 2 else 1980, 0x20 if t % 2 else 0)]) for t in range(4)]
    state = gpu_state.window_state(lines)
    assert state.throttled == ["rank 1 (GPU 1): sw_thermal_slowdown in 50% of 4 samples"]
    assert state.slowest == "rank 1 (GPU 1): 1690 MHz, rank 0 1980 MHz, sw_thermal_slowdown"
    assert state.cpu_frac == 0.25 and state.reported


@pytest.mark.parametrize("mask", [0x0, 0x1, 0x2, 0x100])
def test_idle_and_chosen_clocks_are_not_throttling(mask: int) -> None:
    """Idle, application clocks and display clocks are somebody's wish, not a limit that was hit."""
    assert gpu_state.window_state([HEAD, line(1, [sample(0, 300, mask)])]).throttled == []


def test_samples_outside_the_window_do_not_count() -> None:
    """A throttling warm-up does not mark the measured window."""
    lines = [HEAD, line(1, [sample(0, 900, 0x40)]), line(3, [sample(0, 1980)]), line(5, [sample(0, 900, 0x40)])]
    state = gpu_state.window_state(lines, int(2e9), int(4e9))
    assert state.throttled == [] and state.gpus[0].samples == 1


def test_a_window_without_samples_says_so() -> None:
    """Shorter than the period: no judgement, a reason."""
    state = gpu_state.window_state([HEAD, line(1, [sample(0, 1980)])], int(2e9), int(3e9))
    assert state.gpus == [] and "no sample fell into the window" in str(state.reason) and not state.reported


def test_gpus_of_others_do_not_mark_the_server_s_window() -> None:
    """GPU 2 is not a rank of the server: its throttling is kept and does not mark."""
    lines = [HEAD, line(1, [sample(0, 1980), sample(1, 1980), sample(2, 500, 0x8)])]
    state = gpu_state.window_state(lines)
    assert state.throttled == [] and state.gpus[2].throttled == ["hw_slowdown"] and state.gpus[2].rank is None
    assert state.slowest == "none: all 2 ranks within 1% of 1980 MHz"


def test_unreported_reasons_are_unknown_not_no() -> None:
    """No mask at all: the window is not marked, and it is not cleared either."""
    state = gpu_state.window_state([HEAD, line(1, [sample(0, 1980, None), sample(1, 1980, None)])])
    assert state.throttled == [] and not state.reported and state.gpus[0].reasons is None


def test_a_machine_without_a_gpu_gives_its_reason() -> None:
    """The header's reason is the state's."""
    state = gpu_state.window_state([{"kind": "telemetry", "source": None, "reason": "no GPU: nvidia-smi is not on this machine"}])
    assert state.source is None and str(state.reason).startswith("no GPU")
    assert gpu_state.window_state([]).reason == "no telemetry was recorded"


@pytest.mark.parametrize(
    ("environment", "base", "count", "expected"),
    [
        ({}, 0, 2, [0, 1]),
        ({}, 4, 2, [4, 5]),
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 1, 2, [5, 6]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-aa,GPU-bb"}, 0, 2, None),
        ({"CUDA_VISIBLE_DEVICES": "3"}, 0, 2, None),
    ],
)
def test_ranks_are_found_through_the_visible_devices(
    environment: dict[str, str], base: int, count: int, expected: list[int] | None
) -> None:
    """Rank 0 is the first visible device after base_gpu_id; what can't be told is None."""
    assert gpu_state.visible_gpus(environment, base, count) == expected


LOG = """[   12.345678] nvidia: loading out-of-tree module taints kernel.
[  100.000001] NVRM: Xid (PCI:0000:41:00): 31, pid=77, name=python3, MMU Fault
"""


def test_xids_are_those_that_came_during_the_window() -> None:
    """What the log had before does not count; an equal line at another time does."""
    after = LOG + "[  200.000001] NVRM: Xid (PCI:0000:41:00): 79, pid='<unknown>', GPU has fallen off the bus.\n"
    assert gpu_state.new_xids(LOG, LOG) == []
    (found,) = gpu_state.new_xids(LOG, after)
    assert (found.number, found.gpu) == (79, "0000:41:00") and "fallen off" in found.text
    again = LOG + LOG.splitlines()[1].replace("100.000001", "101.000001") + "\n"
    assert [x.number for x in gpu_state.new_xids(LOG, again)] == [31]


def test_a_kernel_log_without_the_driver_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox's dmesg that never saw a GPU proves no absence of Xids; one that may not be read neither."""
    program(tmp_path / "dmesg", "echo '[ 0.0] Linux version 6.1'")
    program(tmp_path / "journalctl", "echo 'Operation not permitted' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    text, reason = telemetry.kernel_log()
    assert text is None and "no line of the NVIDIA driver" in str(reason) and "Operation not permitted" in str(reason)
    program(tmp_path / "dmesg", "echo '[ 1.0] NVRM: loading NVIDIA UNIX x86_64 Kernel Module'")
    assert telemetry.kernel_log()[0] is not None


# the thread -----------------------------------------------------------------------------------------------------------


def program(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


class FakeReader:
    """A GPU that fails at every third question."""

    source: str | None = "nvml"
    reason: str | None = None

    def __init__(self) -> None:
        self.asked, self.closed = 0, False

    def read(self) -> list[dict[str, Any]]:
        self.asked += 1
        if self.asked % 3 == 0:
            raise RuntimeError("GPU is lost")
        return [sample(0, 1000 + self.asked)]

    def close(self) -> None:
        self.closed = True


class FakeControl:
    """A server whose counters reach their value only at the third reading."""

    def __init__(self, texts: list[str | None]) -> None:
        self.texts = texts

    def metrics_text(self) -> str | None:
        return self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]


def test_one_thread_samples_and_ends_with_the_block(tmp_path: Path) -> None:
    """Raw lines while the block runs, faults kept as such, the thread gone and the reader closed after it."""
    reader = FakeReader()
    before = threading.active_count()
    with telemetry.watching(FakeControl([None]), tmp_path, ranks=[0], reader=reader, period_s=0.05, log=lambda: (LOG, None)):  # type: ignore[arg-type]
        assert threading.active_count() == before + 1
        time.sleep(0.5)
    assert threading.active_count() == before and reader.closed
    lines = [json.loads(x) for x in (tmp_path / telemetry.FILE).read_text().splitlines()]
    assert lines[0]["kind"] == "telemetry" and lines[-1] == {"kind": "kernel_log", "xids": [], "reason": None}
    state = telemetry.read_state(tmp_path)
    assert state.gpus[0].samples >= 4 and state.faults >= 1 and state.xids == []
    kinds = [x["kind"] for x in lines]
    assert kinds.count("sample") == state.gpus[0].samples


def test_an_interrupt_still_leaves_a_whole_record(tmp_path: Path) -> None:
    """Ctrl-C in the block: the file has its last line, the interrupt goes on."""
    with (
        pytest.raises(KeyboardInterrupt),
        telemetry.watching(FakeControl([None]), tmp_path, reader=FakeReader(), period_s=0.05, log=lambda: (None, "no")),  # type: ignore[arg-type]
    ):
        raise KeyboardInterrupt
    assert json.loads((tmp_path / telemetry.FILE).read_text().splitlines()[-1])["kind"] == "kernel_log"
    state = telemetry.read_state(tmp_path)
    assert state.xids is None and state.xid_reason == "no"


def metrics(generated: int, **more: int) -> str:
    rows = [f'sglang:generation_tokens_total{{model_name="m"}} {generated}.0', "# HELP x y", "", "sglang:other_total 7"]
    rows += [f'sglang:{name}_total{{model_name="m",tp_rank="{i}"}} {value}' for name, value in more.items() for i in (0, 1)]
    return "\n".join(rows) + "\n"


def test_metrics_are_read_until_the_last_request_is_counted(tmp_path: Path) -> None:
    """Counters lag behind the last byte: read again until they hold what the client got."""
    control = FakeControl([metrics(100), metrics(100), metrics(120), metrics(164)])
    with telemetry.watching(control, tmp_path, reader=telemetry.NoGpu("no GPU")) as told:  # type: ignore[arg-type]
        told["tokens"] = 64
    assert telemetry.read_count(tmp_path).value("generation_tokens") == 64


def test_a_server_without_metrics_is_said(tmp_path: Path) -> None:
    """No --enable-metrics: a reason, never 0."""
    with telemetry.watching(FakeControl([None]), tmp_path, reader=telemetry.NoGpu("no GPU")):  # type: ignore[arg-type]
        pass
    count = telemetry.read_count(tmp_path)
    assert count.value("generation_tokens") is None and "--enable-metrics" in str(count.reason)
    assert telemetry.read_state(tmp_path).reason == "no GPU"


def test_counters_are_summed_over_labels_and_new_series_count_from_0() -> None:
    """Two ranks of 5 each; cached tokens appear with the first hit and are a real 0 before."""
    count = gpu_state.server_count(metrics(10), metrics(14, cached_tokens=5))
    assert count.value("generation_tokens") == 4 and count.value("cached_tokens") == 10
    assert gpu_state.server_count(metrics(10), metrics(14)).value("cached_tokens") == 0
    assert gpu_state.server_count(metrics(10), metrics(14)).value("prompt_tokens") is None


def test_counters_that_fell_mean_another_server() -> None:
    """A restart between the readings gives no difference at all."""
    count = gpu_state.server_count(metrics(10), metrics(4))
    assert count.deltas == {} and "restarted" in str(count.reason)


def test_a_recorded_metrics_page_is_read() -> None:
    """A real SGLang 0.5.16's page: its counters and histogram sums are found among 500 lines."""
    text = (ROOT / "tests/recorded/h200-sglang-0.5.16/m1_base.metrics_after_bench.txt").read_text()
    found = gpu_state.parse_counters(text)
    assert found["ttft_count"] == 429 and found["ttft_sum_s"] == pytest.approx(39.402, abs=1e-3)
    assert found["generation_tokens"] > 0 and found["prompt_tokens"] > 0


# NVML and nvidia-smi --------------------------------------------------------------------------------------------------


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


def fake_nvml(**changes: Any) -> SimpleNamespace:
    """A module with nvidia-ml-py's interface and two GPUs, the second power-capped; one that `changes` may break."""

    def not_supported(*_: Any) -> Any:
        raise NVMLError(3)

    module = SimpleNamespace(
        NVMLError=NVMLError, NVML_ERROR_GPU_IS_LOST=15, NVML_ERROR_UNINITIALIZED=1, NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2,
        nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetUUID=lambda h: f"GPU-{h}".encode(), nvmlDeviceGetName=lambda h: "NVIDIA H200",
        nvmlDeviceGetClockInfo=lambda h, t: {1: 1980 - 500 * h, 2: 3201}[t], nvmlDeviceGetMaxClockInfo=lambda h, t: 1980,
        nvmlDeviceGetPowerUsage=lambda h: 400_000 + h, nvmlDeviceGetEnforcedPowerLimit=not_supported,
        nvmlDeviceGetTemperature=lambda h, s: 60 + h, nvmlDeviceGetUtilizationRates=lambda h: SimpleNamespace(gpu=90),
        nvmlDeviceGetMemoryInfo=lambda h: SimpleNamespace(used=2**30),
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda h: 4 * h,
    )  # fmt: skip
    for name, value in changes.items():
        setattr(module, name, value)
    return module


def test_nvml_is_asked_and_what_it_does_not_support_is_none() -> None:
    """Older names of functions count, a missing power limit is None, watts are watts."""
    first, second = telemetry.Nvml(fake_nvml()).read()
    assert first["sm_clock_mhz"] == 1980 and second["sm_clock_mhz"] == 1480
    assert first["power_w"] == 400.0 and first["power_limit_w"] is None
    assert first["clock_reasons"] == 0 and second["clock_reasons"] == 4 and first["uuid"] == "GPU-0"


def test_a_lost_gpu_is_a_fault_and_not_a_missing_value() -> None:
    """GPU_IS_LOST is raised, so that the sampler writes it down as a fault."""

    def lost(*_: Any) -> Any:
        raise NVMLError(15)

    with pytest.raises(NVMLError):
        telemetry.Nvml(fake_nvml(nvmlDeviceGetClockInfo=lost)).read()


def test_the_reader_falls_from_nvml_to_nvidia_smi_to_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No nvidia-ml-py: nvidia-smi; neither: 'no GPU' with both reasons; another host: its own reason."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    nothing = telemetry.open_reader()
    assert nothing.source is None and str(nothing.reason).startswith("no GPU: nvidia-ml-py is not installed; nvidia-smi is not")
    program(tmp_path / "nvidia-smi", f"/bin/cat <<'END'\n{SMI}END")
    found = telemetry.open_reader()
    assert found.source == "nvidia-smi" and len(found.read()) == 2
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    assert telemetry.open_reader().source == "nvml"
    assert "another host" in str(telemetry.open_reader(local_server=False).reason)


def test_a_broken_driver_is_no_gpu_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML without a driver and an nvidia-smi that fails: both say so."""

    def fails() -> None:
        raise NVMLError(9)

    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(nvmlInit=fails))
    program(tmp_path / "nvidia-smi", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
    monkeypatch.setenv("PATH", str(tmp_path))
    reader = telemetry.open_reader()
    assert reader.source is None and "error 9" in str(reader.reason) and "version mismatch" in str(reader.reason)


def test_an_older_nvidia_smi_is_asked_by_the_older_name(tmp_path: Path) -> None:
    """Drivers before R535 refuse clocks_event_reasons.active."""
    old = program(tmp_path / "smi", f"case \"$1\" in *event*) echo bad field; exit 2;; esac\ncat <<'END'\n{SMI}END")
    rows = telemetry.Smi(str(old)).read()
    assert rows[1]["clock_reasons"] == 4
    with pytest.raises(ServerError, match="bad field"):
        telemetry.Smi(str(program(tmp_path / "never", "echo bad field; exit 2")))


def test_the_real_nvidia_ml_py_over_a_stub_of_the_library(tmp_path: Path) -> None:
    """nvidia-ml-py as published, over a compiled libnvidia-ml.so.1 of the tests: the thread marks a power-capped GPU."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed here")
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libnvidia-ml.so.1", ROOT / "tests/server/nvml_stub.c"], check=True)
    (tmp_path / "gpus").write_text("1980 1980 3201 400000 700000 55 98 1000 0\n1400 1980 3201 -1 700000 80 99 1000 4\n")
    code = (
        "import sys, time; from pathlib import Path; from lib.server import telemetry\n"
        "out = Path(sys.argv[1])\n"
        "class C:\n    def metrics_text(self): return None\n"
        "with telemetry.watching(C(), out, ranks=[0, 1], period_s=0.1): time.sleep(0.5)\n"
        "print(telemetry.read_state(out).model_dump_json())"
    )
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(tmp_path), "NVML_STUB": str(tmp_path / "gpus"), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out")], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 0, done.stderr
    state = gpu_state.WindowState.model_validate_json(done.stdout)
    assert state.source == "nvml" and len(state.gpus) == 2 and state.gpus[0].power_w == 400.0 and state.gpus[1].power_w is None
    assert state.throttled and state.throttled[0].startswith("rank 1 (GPU 1): sw_power_cap in 100%")


OLDER_SMI = """#!/bin/sh
case "$*" in *clocks_event_reasons*) echo 'Field "clocks_event_reasons.active" is not a valid field to query.'; exit 2;; esac
echo "0, GPU-ab, G, 1400, 1980, 2619, 310.5, 700.00, 51, 97, 1234, 0x0000000000000004"
"""


@pytest.mark.parametrize("client", ["host", "here"])
def test_a_hosts_gpus_are_sampled_there_by_the_clients_clock(
    client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process there, also with a driver that knows the fields by their older names; the window finds its samples."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(OLDER_SMI)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    with LocalHost() as host:
        place = Place(host, HostParams(load_client=client))  # type: ignore[arg-type]
        sampler = HostSampler(place, tmp_path / FILE, [0], 0.2)
        begin = time.monotonic_ns()
        time.sleep(1.0)
        sampler.stop({"kind": "kernel_log", "xids": None, "reason": "not asked"})
        assert not host._open  # nothing runs on there
    seen = read_state(tmp_path, begin, time.monotonic_ns())
    assert seen.source == "nvidia-smi" and seen.gpus[0].samples >= 3 and seen.cpu_frac is not None and 0 <= seen.cpu_frac <= 1
    assert json.loads((tmp_path / FILE).read_text().splitlines()[0])["host"] == "this machine"


def test_a_host_without_a_gpu_gives_its_reason_and_its_cpus(tmp_path: Path) -> None:
    """No sample is mistaken for a quiet GPU."""
    with LocalHost() as host:
        sampler = HostSampler(Place(host, HostParams()), tmp_path / FILE, None, 0.2)
        time.sleep(0.5)
        sampler.stop()
    seen = read_state(tmp_path)
    assert seen.source is None and "nvidia-smi" in str(seen.reason) and seen.cpu_frac is not None
