"""Notebook 03's panel in a real kernel, without a browser: a press reaches a kernel that is busy measuring."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml

from lib.params import NOTEBOOKS, ROOT
from tests.conftest import TINY
from tests.load.bench_server import BenchServer
from tests.widgets.lab import put_notebooks

INFO = {"version": "0.5.15.post1", "model_path": "/none", "served_model_name": "m", "max_total_num_tokens": 65536,
        "kv_cache_dtype": "bf16", "random_seed": 1, "internal_states": [{}]}  # fmt: skip


@pytest.fixture
def server() -> Iterator[BenchServer]:
    """The tests' own server, which also says who it is, so that a notebook can attach."""
    made = BenchServer(step_s=0.01)
    handler: Any = made.http.RequestHandlerClass
    known = handler.do_GET
    handler.do_GET = lambda self: self.plain(INFO) if self.path == "/server_info" else known(self)
    yield made
    made.close()


class Kernel:
    """A kernel as JupyterLab uses it: cells by the shell, what a control says by a subshell."""

    def __init__(self, environment: dict[str, str]) -> None:
        from jupyter_client.manager import KernelManager

        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(env=environment)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(60)
        self.client.control_channel.send(self.client.session.msg("create_subshell_request"))
        self.subshell = self.client.get_control_msg(timeout=30)["content"]["subshell_id"]
        self.controls: dict[str, str] = {}
        self.shown: dict[str, str] = {}

    def press(self, control: str) -> None:
        """What a front end sends when a button is pressed."""
        data = {"method": "custom", "content": {"event": "click"}}
        message = self.client.session.msg("comm_msg", {"comm_id": self.controls[control], "data": data})
        message["header"]["subshell_id"] = self.subshell
        self.client.shell_channel.send(message)

    def run(self, code: str, looking: Any) -> list[str]:
        """Runs a cell, keeps what it shows, and lets `looking` see each change of it; gives its errors."""
        asked, errors = self.client.execute(code), []
        while True:
            message = self.client.get_iopub_msg(timeout=100)
            kind, content = message["msg_type"], message["content"]
            if kind == "comm_open":
                self.controls[str(content["data"]["state"].get("description"))] = content["comm_id"]
            elif kind in ("display_data", "update_display_data") and content["transient"].get("display_id"):
                self.shown[content["transient"]["display_id"]] = content["data"].get("text/plain", "")
                looking(content["data"].get("text/plain", ""))
            elif kind == "error":
                errors.append(str(content["evalue"]))
            elif (
                kind == "status"
                and content["execution_state"] == "idle"
                and message["parent_header"].get("msg_id") == asked
            ):
                return errors


@pytest.mark.timeout(150)
def test_stop_is_heard_by_a_kernel_that_measures(
    server: BenchServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers come while the level runs; stop ends it within seconds, of 30 that it would take, and what was measured is kept."""
    profile = tmp_path / "profile"
    profile.mkdir()
    for file in (ROOT / TINY).glob("*.yaml"):
        data = yaml.safe_load(file.read_text())
        if file.stem == "profile":
            data["server"] |= {"attach": server.base_url, "model": None}
        else:
            data["profile"] = str(profile)
        if file.stem == "03":
            data |= {
                "concurrency": [1],
                "num_requests": 200,
                "input_len": 32,
                "output_len": 16,
                "depths": [],
                "repeats": 1,
            }
        (profile / file.name).write_text(yaml.safe_dump(data))
    put_notebooks(tmp_path / "notebooks", profile)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WORKBOOK_")}
    kernel = Kernel(
        {**clean, "JPY_SESSION_NAME": "x", "WORKBOOK_OUTPUTS": str(tmp_path / "out"), "PYTHONPATH": str(ROOT)}
    )
    pressed: list[float] = []

    def look(text: str) -> None:
        if "tok/s so far" in text and not pressed:
            pressed.append(time.monotonic())
            kernel.press("Stop, keep what is measured")

    try:
        for cell in nbformat.read(tmp_path / "notebooks" / f"{NOTEBOOKS['03']}.ipynb", 4).cells:
            if cell.cell_type == "code":
                assert kernel.run(cell.source, look) == []
            if "measure_levels" in cell.source:
                break
    finally:
        kernel.manager.shutdown_kernel(now=True)
    assert pressed and time.monotonic() - pressed[0] < 20
    (kept,) = [
        text
        for text in kernel.shown.values()
        if text.startswith("Stopped on request; what was measured is kept: 1 records")
    ]
    assert "stopped, kept" in kept and "in progress" not in kept
