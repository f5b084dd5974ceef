"""Watches a window of load: GPU state once a second, the kernel's Xid lines, and /metrics before and after.

Everything is written raw (telemetry.jsonl, metrics_before.txt, metrics_after.txt) beside what was measured; what it
means is computed from these files by `lib.server.gpu_state`. NVML is asked through nvidia-ml-py where that can be
imported, else nvidia-smi; a machine without either gives its reason instead of samples.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil

from lib.errors import ServerError
from lib.hosts import local
from lib.server.control import Control
from lib.server.gpu_state import (
    SMI_FIELDS,
    SMI_REASONS_BEFORE,
    ServerCount,
    WindowState,
    names_nvidia,
    new_xids,
    parse_counters,
    parse_smi,
    server_count,
    window_state,
)
from lib.server.redact import redact_text
from lib.server.remote import Place
from lib.server.telemetry_there import HostSampler, kernel_log_there

FILE, BEFORE, AFTER = "telemetry.jsonl", "metrics_before.txt", "metrics_after.txt"
PERIOD_S = 1.0
#: How long the counters of /metrics may take to hold a window's last request.
SETTLE_S = 2.0


class Reader(Protocol):
    """One way to ask for the GPUs' state."""

    source: str | None
    reason: str | None

    def read(self) -> list[dict[str, Any]]: ...
    def close(self) -> None: ...


class NoGpu:
    """A machine on which no GPU is seen, and why."""

    source: str | None = None

    def __init__(self, reason: str) -> None:
        self.reason: str | None = reason

    def read(self) -> list[dict[str, Any]]:
        """Nothing."""
        return []

    def close(self) -> None:
        """Nothing to close."""


class Nvml:
    """NVML through nvidia-ml-py (the module is given, so that a test can give one of its own)."""

    source: str | None = "nvml"
    reason: str | None = None

    def __init__(self, module: Any) -> None:
        self.module = module
        module.nvmlInit()
        self.handles = [module.nvmlDeviceGetHandleByIndex(i) for i in range(module.nvmlDeviceGetCount())]

    def _ask(self, function: str, *arguments: Any) -> Any:
        """One question; None where this GPU or this driver does not answer it."""
        try:
            return getattr(self.module, function)(*arguments)
        except AttributeError:
            return None
        except self.module.NVMLError as error:
            lost = {getattr(self.module, n, None) for n in ("NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_UNINITIALIZED")}
            if getattr(error, "value", None) in lost - {None}:
                raise
            return None

    def read(self) -> list[dict[str, Any]]:
        """One sample of every GPU."""
        m, rows = self.module, []
        sm, mem = getattr(m, "NVML_CLOCK_SM", 1), getattr(m, "NVML_CLOCK_MEM", 2)
        for index, handle in enumerate(self.handles):
            power, limit = (
                self._ask(f, handle) for f in ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetEnforcedPowerLimit")
            )
            busy, memory = (
                self._ask("nvmlDeviceGetUtilizationRates", handle),
                self._ask("nvmlDeviceGetMemoryInfo", handle),
            )
            reasons = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
            if reasons is None:
                reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
            rows.append(
                {
                    "index": index,
                    "uuid": _text(self._ask("nvmlDeviceGetUUID", handle)),
                    "name": _text(self._ask("nvmlDeviceGetName", handle)),
                    "sm_clock_mhz": self._ask("nvmlDeviceGetClockInfo", handle, sm),
                    "sm_clock_max_mhz": self._ask("nvmlDeviceGetMaxClockInfo", handle, sm),
                    "memory_clock_mhz": self._ask("nvmlDeviceGetClockInfo", handle, mem),
                    "power_w": power / 1000 if power is not None else None,
                    "power_limit_w": limit / 1000 if limit is not None else None,
                    "temperature_c": self._ask(
                        "nvmlDeviceGetTemperature", handle, getattr(m, "NVML_TEMPERATURE_GPU", 0)
                    ),
                    "gpu_busy_pct": busy.gpu if busy is not None else None,
                    "memory_used_mib": memory.used / 2**20 if memory is not None else None,
                    "clock_reasons": reasons,
                }
            )
        return rows

    def close(self) -> None:
        """Ends the session with NVML."""
        with contextlib.suppress(self.module.NVMLError):
            self.module.nvmlShutdown()


class Smi:
    """nvidia-smi, one short process a sample."""

    source: str | None = "nvidia-smi"
    reason: str | None = None

    def __init__(self, program: str = "nvidia-smi") -> None:
        self.program = program
        self.queries = list(SMI_FIELDS.values())
        try:
            rows = self.read()
        except ServerError:
            self.queries = [SMI_REASONS_BEFORE if q == SMI_FIELDS["clock_reasons"] else q for q in self.queries]
            rows = self.read()
        if not rows:
            raise ServerError("nvidia-smi lists a GPU", "none")

    def read(self) -> list[dict[str, Any]]:
        """One sample of every GPU."""
        command = [self.program, f"--query-gpu={','.join(self.queries)}", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ServerError("nvidia-smi answers", str(error)) from error
        if done.returncode:
            raise ServerError("nvidia-smi answers", (done.stdout + done.stderr).strip()[:200])
        return parse_smi(done.stdout)

    def close(self) -> None:
        """Nothing to close."""


def _text(value: Any) -> str | None:
    return value.decode() if isinstance(value, bytes) else value


def open_reader(local_server: bool = True) -> Reader:
    """NVML if it can be imported and finds a GPU, else nvidia-smi, else the reason why there are no samples."""
    if not local_server:
        return NoGpu("the server runs on another host, whose GPUs are not seen from here")
    reasons = []
    try:
        found = Nvml(importlib.import_module("pynvml"))
        if found.handles:
            return found
        reasons.append("NVML lists no GPU")
    except ImportError:
        reasons.append("nvidia-ml-py is not installed")
    except Exception as error:  # noqa: BLE001  (NVML's own error class comes from the module that is asked)
        reasons.append(f"NVML: {error}")
    if shutil.which("nvidia-smi"):
        try:
            return Smi()
        except ServerError as error:
            reasons.append(f"nvidia-smi: {error}")
    else:
        reasons.append("nvidia-smi is not on this machine")
    return NoGpu(f"no GPU: {'; '.join(reasons)}")


def kernel_log() -> tuple[str | None, str | None]:
    """The kernel's log as far as it may be read, and the reason where it can't be.

    A log without any line of the NVIDIA driver (another machine's, a sandbox's, a short buffer) proves nothing about
    Xids and counts as unreadable.
    """
    reasons = []
    for command in (["dmesg"], ["journalctl", "-k", "-b", "-o", "short-monotonic", "--no-pager", "-q", "-n", "20000"]):
        if not shutil.which(command[0]):
            reasons.append(f"{command[0]} is not on this machine")
            continue
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10)
        except (OSError, subprocess.TimeoutExpired) as error:
            reasons.append(f"{command[0]}: {error}")
            continue
        if done.returncode:
            words = (done.stderr or done.stdout).strip().splitlines()
            reasons.append(f"{command[0]}: {words[-1][:120] if words else done.returncode}")
        elif not names_nvidia(done.stdout):
            reasons.append(f"{command[0]} shows no line of the NVIDIA driver")
        else:
            return done.stdout, None
    return None, "unknown: " + "; ".join(reasons)


class Sampler:
    """One thread that writes a sample a second to a file until it is stopped."""

    def __init__(
        self, file: Path, reader: Reader, ranks: Sequence[int] | None = None, period_s: float = PERIOD_S
    ) -> None:
        self.file, self.reader, self.period_s = file, reader, period_s
        self._out = file.open("w", encoding="utf-8")
        self._stop = threading.Event()
        self._write({
            "kind": "telemetry", "schema": 1, "source": reader.source, "reason": reader.reason, "ranks": ranks,
            "period_s": period_s, "clock": "CLOCK_MONOTONIC",
        })  # fmt: skip
        self._thread = threading.Thread(target=self._sample, name="gpu-telemetry", daemon=True)
        self._thread.start()

    def _write(self, line: dict[str, Any]) -> None:
        self._out.write(json.dumps(line) + "\n")
        self._out.flush()

    def _sample(self) -> None:
        psutil.cpu_percent()  # the first call of a thread only starts its count
        due = time.monotonic() + self.period_s
        while True:
            stopping = self._stop.wait(max(0.0, due - time.monotonic()))
            due = max(due + self.period_s, time.monotonic())
            try:
                gpus = self.reader.read()
                cpu = psutil.cpu_percent() / 100
                self._write({
                    "kind": "sample", "t_ns": time.monotonic_ns(), "unix_s": time.time(), "gpus": gpus, "cpu_frac": cpu
                })  # fmt: skip
            except Exception as error:  # noqa: BLE001  (a lost GPU, a full disk: the measurement goes on, the file says so)
                with contextlib.suppress(OSError, ValueError):
                    self._write({"kind": "fault", "t_ns": time.monotonic_ns(), "error": redact_text(str(error))[:300]})
            if stopping:
                return

    def stop(self, last: dict[str, Any] | None = None) -> None:
        """Takes a last sample, ends the thread and closes the file."""
        self._stop.set()
        self._thread.join(timeout=15)
        if last:
            self._write(last)
        self._out.close()
        self.reader.close()


def scrape(control: Control, file: Path) -> str | None:
    """Reads /metrics and keeps its text; None where the server exports none."""
    try:
        text = control.metrics_text()
    except ServerError:
        return None
    if text is not None:
        local.write_atomic(file, text)
    return text


@contextlib.contextmanager
def watching(
    control: Control,
    folder: Path,
    *,
    ranks: Sequence[int] | None = None,
    local_server: bool = True,
    period_s: float = PERIOD_S,
    reader: Reader | None = None,
    log: Callable[[], tuple[str | None, str | None]] = kernel_log,
    place: Place | None = None,
) -> Iterator[dict[str, Any]]:
    """Watches what happens inside the `with` block; leaves telemetry.jsonl and /metrics before and after in `folder`.

    The block may put `tokens` into the mapping that it gets (what the client counted): /metrics is then read again
    until it holds as many, for at most `SETTLE_S`. `place` is the host of the server where that is another.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = scrape(control, folder / BEFORE)
    sampler: Sampler | HostSampler
    found: Reader | HostSampler
    if place is not None:
        log = functools.partial(kernel_log_there, place)
        found = sampler = HostSampler(place, folder / FILE, ranks, period_s)
        old, _ = log() if found.source else (None, None)
    else:
        found = reader or open_reader(local_server)
        old, _ = log() if found.source else (None, None)
        sampler = Sampler(folder / FILE, found, ranks, period_s)
    told: dict[str, Any] = {}
    try:
        yield told
    finally:
        last: dict[str, Any] = {"kind": "kernel_log", "xids": None, "reason": found.reason}
        if found.source:
            text, why = log()
            known = old is not None and text is not None
            xids = [x.model_dump() for x in new_xids(old or "", text or "")] if known else None
            last |= {"xids": xids, "reason": why if not known else None}
        sampler.stop(last)
        if before is not None:
            end = time.monotonic() + SETTLE_S
            wanted = parse_counters(before).get("generation_tokens", 0.0) + told.get("tokens", 0)
            while (text := scrape(control, folder / AFTER)) is not None:
                if parse_counters(text).get("generation_tokens", 0.0) >= wanted or time.monotonic() > end:
                    break
                time.sleep(0.1)


def read_state(folder: Path, start_ns: int | None = None, end_ns: int | None = None) -> WindowState:
    """The GPUs' state over a window from a folder's raw file."""
    file = folder / FILE
    if not file.exists():
        return WindowState(source=None, reason="no telemetry was recorded")
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):  # an interrupted run may have cut the last line
            lines.append(json.loads(line))
    return window_state(lines, start_ns, end_ns)


def read_count(folder: Path) -> ServerCount:
    """What the server counted over a window, from a folder's raw files."""
    texts = [(folder / name).read_text() if (folder / name).exists() else None for name in (BEFORE, AFTER)]
    return server_count(texts[0], texts[1])


def read_topology() -> tuple[str | None, str | None]:
    """The text of `nvidia-smi topo -m`, and the reason where there is none."""
    if not shutil.which("nvidia-smi"):
        return None, "nvidia-smi is not on this machine"
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"nvidia-smi topo -m: {error}"
    return (done.stdout, None) if done.returncode == 0 else (None, f"nvidia-smi topo -m: {done.stderr.strip()[:200]}")
