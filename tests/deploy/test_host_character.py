"""The host's character: what nvidia-smi and /sys say, in words or None; what was not measured says why."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from lib.deploy import host_character as hc
from lib.model import roofline
from lib.params import ROOT

#: nvidia-smi's own form (csv, noheader, nounits): an H200 in a virtual machine, and a card on a narrowed link.
SMI = """0, NVIDIA H200, GPU-1, 00000000:00:05.0, 9.0, 143771, 580.159.04, 5, 5, 16, 16, 1980, 3201, 700.00, Enabled, Disabled
1, NVIDIA RTX PRO 6000 Blackwell, GPU-2, 00000000:41:00.0, 12.0, 97887, 580.95.05, 3, 5, 8, 16, 2617, 14001, 600.00, [N/A], [N/A]
"""


def character(**probe: object) -> dict[str, object]:
    gpus = hc.read_gpus(SMI)
    return {"gpus": [{**g, "numa_node": None} for g in gpus], "gpus_reason": None, "numa": [], "probe": probe}


def test_pcie_is_shown_as_negotiated_beside_the_most() -> None:
    """A gen 5 x16 card that runs at gen 3 x8 is seen at once; what the driver does not say is not a number."""
    rows = hc.gpu_rows(character())
    assert (rows[1]["PCIe now"], rows[1]["PCIe most"]) == ("gen 3 x8", "gen 5 x16")
    assert rows[1]["MIG"] == "not said" and rows[0]["NUMA node"] == "not said" and rows[0]["MIG"] == "Disabled"


def test_a_gpu_row_of_another_form_is_no_gpu() -> None:
    """An error text or too few columns is not read as a GPU."""
    assert hc.read_gpus("NVIDIA-SMI has failed\n0, NVIDIA H200\n") == []


def test_no_gpu_says_why_everywhere() -> None:
    """Tables of a host without GPUs hold the reason, no zero."""
    nothing = {"gpus": [], "gpus_reason": "no nvidia-smi on this host", "numa": [], "probe": {"devices": 0, "reason": "no GPU"}}
    assert hc.gpu_rows(nothing)[0]["why"] == "no nvidia-smi on this host"
    assert hc.copy_rows(nothing)[0]["why"] == hc.reduce_rows(nothing)[0]["why"] == "no GPU"
    assert hc.device_bandwidth(nothing) is None


def test_the_rooflines_input_is_the_slowest_device() -> None:
    """Two devices at 4.3 and 4.1 TB/s: 4.1; copies to the host do not count."""
    one = {"what": "inside", "size": 1, "n": 5, "low": 1.0, "high": 2.0}
    copies = [
        {**one, "from": 0, "to": 0, "bytes_per_s": 4.3e12}, {**one, "from": 1, "to": 1, "bytes_per_s": 4.1e12},
        {**one, "from": "host", "to": 0, "bytes_per_s": 5e10},
    ]  # fmt: skip
    assert hc.device_bandwidth(character(copies=copies)) == 4.1e12
    assert hc.copy_rows(character(copies=copies))[2]["GB/s"] == 50.0


def test_a_wrong_sum_is_shown_and_one_gpu_has_no_all_reduce() -> None:
    """The all-reduce's sum is checked: WRONG is a word in the table; with one GPU the reason stands instead."""
    row = {"size": 2048, "seconds": 2e-5, "low": 1.8e-5, "high": 9e-5, "n": 50, "right": False, "bus_bytes_per_s": 1e8}
    shown = hc.reduce_rows(character(all_reduce=[row]))[0]
    assert shown["sum"] == "WRONG" and shown["median, us"] == 20.0 and shown["lowest to highest, us"] == "18.0 to 90.0"
    assert hc.reduce_rows(character(all_reduce=[], all_reduce_reason="one GPU: nothing to reduce over"))[0]["why"].startswith("one GPU")


def test_numa_is_read_from_the_kernel(tmp_path: Path) -> None:
    """Nodes with processors and memory; a device's node, where -1 (a virtual machine) is not said."""
    node = tmp_path / "node1"
    node.mkdir()
    (node / "meminfo").write_text("Node 1 MemTotal:       131072 kB\n")
    (node / "cpulist").write_text("0-7\n")
    (node / "distance").write_text("21 10\n")
    assert hc.numa(tmp_path) == [{"node": 1, "cpus": "0-7", "memory_bytes": 131072 * 1024, "distance": "21 10"}]
    for bus, text, expected in (("0000:41:00.0", "1", 1), ("0000:00:05.0", "-1", None)):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "numa_node").write_text(text)
        assert hc.numa_of(f"0000{bus}", tmp_path) == expected


def test_a_probe_that_fails_gives_its_last_line(tmp_path: Path) -> None:
    """A Python without torch: the reason is Python's own, and nothing is measured."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    said = hc.probe(str(bare), 30)
    assert "No module named 'torch'" in said["reason"] and "copies" not in said


def test_the_topology_is_a_row_a_gpu_or_a_reason() -> None:
    """Its node, its processors, how it reaches each other GPU, slowest first; what is no matrix is a reason."""
    text = (ROOT / "tests" / "recorded" / "topology" / "mixed-5-phb-node-sys.txt").read_text()
    rows = hc.topology_rows({"topology": text})
    assert rows[1] == {"GPU": 1, "NUMA node": "0", "near processors": "0-7,16-23", "links": "SYS to 0; NODE to 3, 4; PHB to 2"}
    assert hc.topology_rows({"topology": "", "topology_reason": "no nvidia-smi on this host"})[0]["why"] == "no nvidia-smi on this host"
    assert "topo" in hc.topology_rows({"topology": "Failed to initialize NVML"})[0]["why"]


@pytest.mark.server
def test_the_all_reduce_runs_over_real_processes(tmp_path: Path) -> None:
    """Two processes over gloo: the code of the GPUs' all-reduce with times by size and right sums; three GPUs that are not there."""
    python = str(ROOT / ".venv-sglang" / "bin" / "python")
    hc.take_all_reduce(tmp_path, python, 2, None, backend="gloo", timeout_s=120)
    made = json.loads((tmp_path / "all_reduce.json").read_text())
    rows = made["all_reduce"]
    assert [r["size"] for r in rows] == [1 << n for n in range(11, 22)] and all(r["right"] for r in rows), made
    assert all(0 < r["low"] <= r["seconds"] <= r["high"] and r["burst_seconds"] > 0 for r in rows)
    # the bus moves 2 (n - 1) / n = 1 times the size over two ranks
    assert rows[0]["bus_bytes_per_s"] == pytest.approx(2048 / rows[0]["seconds"])
    link = roofline.measured_link(roofline.link_of(None, 2), rows)
    assert link.measured and roofline.all_reduce_s(2048, 2, link) > 0
    hc.take_all_reduce(tmp_path, python, 3, "0,1,2", timeout_s=60)
    assert "3 ranks, and torch sees 0 GPUs" in json.loads((tmp_path / "all_reduce.json").read_text())["all_reduce_reason"]


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no GPU here")
def test_a_real_gpu_is_measured(tmp_path: Path) -> None:
    """On a GPU host: a bandwidth inside the device above a TB/s, and the driver's words beside it."""
    hc.take_character(tmp_path, sys.executable)
    found = json.loads((tmp_path / "character.json").read_text())
    assert (hc.device_bandwidth(found) or 0) > 1e11 and found["topology"]
