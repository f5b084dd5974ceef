"""What the host can do, measured: GPUs and their links, PCIe as negotiated, NUMA, copy bandwidth, all-reduce by size.

`take_character` writes what nvidia-smi, /sys and a probe in the server's Python say (character.json); every number carries how
it was measured. What cannot be had here is None with a reason. The bandwidths are inputs of notebook 03's roofline.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lib.deploy import host_probe
from lib.errors import BadInput, NotMeasured
from lib.hosts import local
from lib.model import roofline
from lib.results import NotebookRun, ServerHandle
from lib.server.spec import resolve_python

#: What is asked of nvidia-smi for each GPU: generation and width of PCIe now and at most, clocks, power, ECC, MIG.
FIELDS = (
    "index", "name", "uuid", "pci.bus_id", "compute_cap", "memory.total", "driver_version", "pcie.link.gen.current", "pcie.link.gen.max",
    "pcie.link.width.current", "pcie.link.width.max", "clocks.max.sm", "clocks.max.memory", "power.limit", "ecc.mode.current",
    "mig.mode.current",
)  # fmt: skip


def nvidia_smi(*arguments: str) -> tuple[str, str | None]:
    """What nvidia-smi prints, or why it prints nothing."""
    program = shutil.which("nvidia-smi")
    if not program:
        return "", "no nvidia-smi on this host"
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, errors="replace", timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"nvidia-smi: {type(error).__name__}"
    return (done.stdout, None) if not done.returncode else ("", (done.stderr or done.stdout).strip()[:300])


def read_gpus(text: str, fields: tuple[str, ...] = FIELDS) -> list[dict[str, Any]]:
    """Rows of nvidia-smi's csv,noheader,nounits; what it marks as not available is None."""
    rows = []
    for line in text.splitlines():
        values = [v.strip() for v in line.split(",")]
        if len(values) == len(fields):
            rows.append({
                f.replace(".", "_"): None if v.strip("[]").lower() in ("n/a", "not supported", "unknown error", "") else v
                for f, v in zip(fields, values, strict=True)
            })  # fmt: skip
    return rows


def numa(root: Path = Path("/sys/devices/system/node")) -> list[dict[str, Any]]:
    """NUMA nodes with their processors and memory; empty where the kernel shows none."""
    rows = []
    for node in sorted(root.glob("node[0-9]*"), key=lambda p: int(p.name[4:])):
        try:
            total = next((x.split()[3] for x in (node / "meminfo").read_text().splitlines() if "MemTotal" in x), None)
            rows.append({
                "node": int(node.name[4:]), "cpus": (node / "cpulist").read_text().strip(),
                "memory_bytes": int(total) * 1024 if total else None, "distance": (node / "distance").read_text().strip(),
            })  # fmt: skip
        except OSError:
            continue
    return rows


def numa_of(bus_id: str, root: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The NUMA node of a PCI device as the kernel says it; None where it says none (-1) or does not know the device."""
    short = bus_id.lower()
    short = (
        short[4:] if len(short) > 12 else short
    )  # nvidia-smi writes a domain of eight digits, the kernel one of four
    try:
        node = int((root / short / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def take_character(folder: Path, python: str, timeout_s: float = 240.0) -> None:
    """Writes character.json; topology and the probe's output beside it."""
    text, reason = nvidia_smi(f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
    gpus = read_gpus(text)
    if text.strip() and not gpus:
        reason = f"nvidia-smi answers in another form: {text.strip()[:200]}"
    topology, topology_reason = nvidia_smi("topo", "-m")
    nvlink, nvlink_reason = nvidia_smi("nvlink", "--status")
    for gpu in gpus:
        gpu["numa_node"] = numa_of(str(gpu["pci_bus_id"] or ""))
    character: dict[str, Any] = {
        "machine": local.describe(), "gpus": gpus, "gpus_reason": reason, "numa": numa(),
        "topology": topology, "topology_reason": topology_reason, "nvlink": nvlink[:8000], "nvlink_reason": nvlink_reason,
    }  # fmt: skip
    character["probe"] = probe(python, timeout_s) if gpus else {"reason": reason or "no GPU", "devices": 0}
    local.write_atomic(folder / "character.json", json.dumps(character, indent=1))


def take_all_reduce(
    folder: Path, python: str, ranks: int, visible: str | None, backend: str = "nccl", timeout_s: float = 240.0
) -> None:
    """Writes all_reduce.json: latency and bandwidth by size over these GPUs (as CUDA_VISIBLE_DEVICES names them), or why there is none."""
    made = probe(python, timeout_s, (str(ranks), backend), visible)
    local.write_atomic(folder / "all_reduce.json", json.dumps({"visible": visible, **made}, indent=1))


def probe(python: str, timeout_s: float, arguments: Sequence[str] = (), visible: str | None = None) -> dict[str, Any]:
    """What the probe measured in the server's Python; on failure the reason, with its last line."""
    seen = {"CUDA_VISIBLE_DEVICES": visible} if visible is not None else {}
    with tempfile.TemporaryDirectory() as work:
        try:
            done = subprocess.run(
                [python, host_probe.__file__, work, *arguments],
                capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False,
                env={**os.environ, "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"), **seen},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"devices": None, "reason": f"the probe had not ended after {timeout_s:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("PROBE ")]
    if not lines:
        return {"devices": None, "reason": (done.stderr.strip().splitlines() or ["no output"])[-1][:400]}
    return dict(json.loads(lines[-1].removeprefix("PROBE ")))


def character_of(run: NotebookRun, server: ServerHandle) -> dict[str, Any]:
    """The raw record `character` of a notebook's run; for an attached server, why it isn't read."""
    if server.attached:
        run.skip("the host's character", "the server is attached: its host may be another one")
        return {
            "gpus": [],
            "gpus_reason": "attached server",
            "numa": [],
            "probe": {"devices": 0, "reason": "attached server"},
        }
    python = None if run.offline else str(resolve_python(server.params.python))
    try:
        return dict(run.measure("character", None, take_character, python=python).json("character.json"))
    except NotMeasured as error:  # a run of before this record existed
        run.skip("the host's character", str(error))
        return {"gpus": [], "gpus_reason": str(error), "numa": [], "probe": {"devices": 0, "reason": str(error)}}


def gpu_rows(character: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row a GPU: PCIe as negotiated beside the most, NUMA node, limits; or the reason why there is none."""
    if not character["gpus"]:
        return [{"GPU": "none", "why": character.get("gpus_reason") or "nvidia-smi lists none"}]
    return [
        {
            "GPU": g["index"], "name": g["name"], "compute capability": g["compute_cap"], "memory, MiB": g["memory_total"],
            "driver": g["driver_version"], "PCIe now": f"gen {g['pcie_link_gen_current'] or '?'} x{g['pcie_link_width_current'] or '?'}",
            "PCIe most": f"gen {g['pcie_link_gen_max'] or '?'} x{g['pcie_link_width_max'] or '?'}",
            "NUMA node": "not said" if g.get("numa_node") is None else g["numa_node"], "power limit, W": g["power_limit"] or "not said",
            "MIG": g["mig_mode_current"] or "not said",
        }
        for g in character["gpus"]
    ]  # fmt: skip


def copy_rows(character: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Measured bandwidth of copies, GB/s (median, the middle 90%), or why none was measured."""
    probe_said = character["probe"]
    rows = [
        {
            "copy": c["what"], "from": c["from"], "to": c["to"], "GB/s": round(c["bytes_per_s"] / 1e9, 1),
            "90% of samples": f"{c['low'] / 1e9:.1f} to {c['high'] / 1e9:.1f}", "n": c["n"], "bytes": c["size"],
        }
        for c in probe_said.get("copies", [])
    ]  # fmt: skip
    return rows or [{"copy": "not measured", "why": probe_said.get("reason") or "the probe gave none"}]


def reduce_rows(character: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All-reduce over all GPUs by size: latency, bus bandwidth, and whether the sum was right; or why none was measured."""
    probe_said = character["probe"]
    rows = [
        {
            "bytes": r["size"], "median, us": round(r["seconds"] * 1e6, 1),
            "lowest to highest, us": f"{r['low'] * 1e6:.1f} to {r['high'] * 1e6:.1f}",
            "in a row, us": round(r["burst_seconds"] * 1e6, 1) if r.get("burst_seconds") else "not measured",
            "bus GB/s": round(r["bus_bytes_per_s"] / 1e9, 2), "n": r["n"], "sum": "right" if r["right"] else "WRONG",
        }
        for r in probe_said.get("all_reduce", [])
    ]  # fmt: skip
    why = probe_said.get("all_reduce_reason") or probe_said.get("reason") or "the probe gave none"
    return rows or [{"all-reduce": "not measured", "why": why}]


def topology_rows(character: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each GPU with its NUMA node and processors as the driver says them, and how it reaches the others, slowest first."""
    text = character.get("topology") or ""
    if not text.strip():
        return [{"GPU": "unknown", "why": character.get("topology_reason") or "nvidia-smi topo -m says nothing"}]
    try:
        found = roofline.parse_topology(text)
    except BadInput as error:
        return [{"GPU": "unknown", "why": str(error)}]
    rows = []
    for gpu in found.gpus:
        kinds: dict[str, list[int]] = {}
        for other in found.gpus:
            if other != gpu and (kind := found.links.get(f"{min(gpu, other)}-{max(gpu, other)}")):
                kinds.setdefault(kind, []).append(other)
        ordered = sorted(kinds, key=roofline.slowness, reverse=True)
        links = "; ".join(f"{kind} to {', '.join(map(str, kinds[kind]))}" for kind in ordered)
        rows.append({
            "GPU": gpu, "NUMA node": found.numa.get(gpu, "not said"), "near processors": found.cpus.get(gpu, "not said"),
            "links": links or "no other GPU",
        })  # fmt: skip
    return rows


def device_bandwidth(character: Mapping[str, Any]) -> float | None:
    """Bytes a second that the slowest device moves inside itself (read and write counted): the roofline's input; None if unknown."""
    found = [c["bytes_per_s"] for c in character["probe"].get("copies", []) if c["from"] == c["to"]]
    return min(found) if found else None
