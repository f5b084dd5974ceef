"""The six notebooks as a person plays them: JupyterLab, Debian's Chromium, a real server, and nothing but 127.0.0.1."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml

from lib.params import NOTEBOOKS, ROOT
from lib.report.html import render_notebook
from lib.server import launch as launching
from tests.conftest import TINY
from tests.widgets.lab import CHROMIUM, Browser, Lab, browser, put_notebooks, running_lab, wait_for

pytestmark = [pytest.mark.browser, pytest.mark.server, pytest.mark.timeout(240)]

#: What makes the tiny profile shorter still: enough requests in 03 that there is time to press stop, little of all else.
SHORTER: dict[str, dict[str, Any]] = {
    "03": {"concurrency": [1, 2], "num_requests": 400, "input_len": 32, "output_len": 16, "depths": [], "smoke_tokens": 8},
    "05": {"kv_cache_dtypes": ["bf16"], "documents": ["argparse"], "document_tokens": 200, "bucket_tokens": 50, "task_items": 0,
           "probe_documents": 0, "cost_requests": 0},
}  # fmt: skip


@pytest.fixture(scope="module")
def profile(tiny_server: launching.Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny profile, attached to one shared server."""
    folder = tmp_path_factory.mktemp("profile")
    for file in (ROOT / TINY).glob("*.yaml"):
        data = yaml.safe_load(file.read_text())
        if file.stem == "profile":
            log = str(tiny_server.folder / "server.log")
            data["server"] |= {"attach": tiny_server.base_url, "model": None, "log": log}
        else:
            data |= {"profile": str(folder)} | SHORTER.get(file.stem, {})
        (folder / file.name).write_text(yaml.safe_dump(data))
    return folder


@pytest.fixture(scope="module")
def lab(profile: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One JupyterLab for all notebooks."""
    work, folder = tmp_path_factory.mktemp("lab"), tmp_path_factory.mktemp("notebooks")
    put_notebooks(folder, profile)
    settings = work / "config" / "lab" / "user-settings" / "@jupyterlab" / "notebook-extension"
    settings.mkdir(parents=True)
    # every cell is in the page, whether it is in sight or not; nobody is asked which kernel
    (settings / "tracker.jupyterlab-settings").write_text(
        json.dumps({"windowingMode": "none", "autoStartDefaultKernel": True})
    )
    with running_lab(folder, work) as made:
        yield made


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One browser for all notebooks."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here; do: apt-get install -y chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, browser(playwright) as made:
        yield made


class Page:
    """One notebook in the browser."""

    def __init__(self, lab: Lab, chromium: Browser, number: str) -> None:
        self.lab, self.number = lab, number
        self.file = lab.folder / f"{NOTEBOOKS[number]}.ipynb"
        self.page = chromium.context.new_page()
        self.page.set_default_timeout(60_000)
        self.page.goto(f"{lab.url}/lab/workspaces/w{number}/tree/{self.file.name}?token={lab.token}")
        self.page.locator(".jp-Notebook .jp-CodeCell").first.wait_for(timeout=150_000)
        # the page says idle before it has a kernel; who runs cells then gets a second kernel, and JupyterLab drops all cells but one
        wait_for(self.has_kernel, 50, self.sight)
        self.page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').wait_for(timeout=150_000)

    def has_kernel(self) -> bool:
        """Whether this notebook has a kernel that answers, as the server says and as the page shows."""
        self.page.wait_for_timeout(100)  # requests are let through only while Playwright is listened to
        shown = " ".join(self.page.locator(".jp-Toolbar-kernelName").all_inner_texts())
        states = [s["kernel"]["execution_state"] for s in self.lab.sessions() if s["path"] == self.file.name]
        return states == ["idle"] and "ipykernel" in shown

    def run_all(self) -> None:
        """Run > Run All Cells, until the last cell's prompt shows that it has begun; a question for the kernel is answered."""
        last = self.page.locator(".jp-Notebook .jp-CodeCell .jp-InputPrompt").last
        dialog = self.page.locator("dialog.jp-Dialog")
        for _ in range(6):
            self.page.wait_for_timeout(1000)
            if dialog.count():
                dialog.locator("button.jp-mod-accept").first.click()
                dialog.wait_for(state="detached")
                self.page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').wait_for()
                self.page.wait_for_timeout(1000)
            self.page.locator('.lm-MenuBar-itemLabel:text-is("Run")').click()
            self.page.locator('.lm-Menu-itemLabel:text-is("Run All Cells")').click()
            end = time.monotonic() + 12
            while time.monotonic() < end and not dialog.count():
                if re.search(r"[*\d]", last.inner_text()):
                    return
                self.page.wait_for_timeout(200)
        raise AssertionError("nothing runs")

    def result(self, seconds: float) -> dict[str, Any]:
        """NN.result.json, when it is there."""
        found = wait_for(
            lambda: list(self.lab.outputs.glob(f"*/*/{self.number}.result.json")) or self.errors(), seconds, self.sight
        )
        assert isinstance(found[0], Path), found
        self.page.locator('.jp-Notebook-ExecutionIndicator[data-status="idle"]').wait_for()
        return dict(json.loads(found[0].read_text()))

    def errors(self) -> list[str]:
        """What cells failed with."""
        shown = self.page.locator(
            '[data-mime-type="application/vnd.jupyter.stderr"], [data-mime-type="application/vnd.jupyter.error"]'
        )
        return [str(text) for text in shown.all_inner_texts() if "Error" in text]

    def sight(self) -> str:
        """What the page and the lab say last, for a test that waited in vain."""
        self.page.screenshot(path=str(self.lab.outputs.parent / f"{self.number}.png"))
        prompts = " ".join(self.page.locator(".jp-CodeCell .jp-InputPrompt").all_inner_texts())
        kernel = self.page.locator(".jp-Notebook-ExecutionIndicator").first.get_attribute("data-status")
        asked = " | ".join(self.page.locator("dialog.jp-Dialog").all_inner_texts())
        outputs = " | ".join(self.page.locator(".jp-OutputArea-output").all_inner_texts()[-6:])[-1500:]
        log = (self.lab.outputs.parent / "lab.log").read_text()[-1500:]
        return f"prompts {prompts}; kernel {kernel}; dialogs: {asked or 'none'}; outputs: {outputs or 'none'}; lab.log: {log}"

    def cell(self, call: str) -> Widget:
        """The widget that a cell's call shows."""
        return Widget(self.page.locator(".jp-CodeCell", has_text=f"widgets.{call}("))

    def saved(self, text: str) -> Any:
        """The notebook as Ctrl+S leaves it, with what the widget showed last."""
        self.page.locator('.lm-MenuBar-itemLabel:text-is("File")').click()
        self.page.locator('.lm-Menu-itemLabel:text-is("Save Notebook")').click()

        def is_there() -> bool:
            self.page.wait_for_timeout(100)  # requests are let through only while Playwright is listened to
            return text in self.file.read_text().replace('\\"', '"')

        wait_for(is_there, 20, lambda: f"{text!r} is not in the saved file")
        return nbformat.read(self.file, 4)


class Widget:
    """A widget in its cell: controls, sentence, tables, picture."""

    def __init__(self, cell: Any) -> None:
        self.cell = cell
        self.cell.scroll_into_view_if_needed()

    def control(self, label: str) -> Any:
        return self.cell.get_by_label(label, exact=True)

    def sentence(self) -> str:
        return str(self.cell.locator("p.reading, p.banner").first.inner_text())

    def text(self) -> str:
        return str(self.cell.locator(".jp-OutputArea").first.inner_text())

    def picture(self) -> str:
        return str(self.cell.locator('[data-mime-type="image/svg+xml"]').first.evaluate("e => e.innerHTML"))

    def changes(self, move: Any, until: str) -> tuple[str, str]:
        """Moves a control and waits until sentence and picture are others; gives both as they are then."""
        sentence, picture = self.sentence(), self.picture()
        move()
        wait_for(lambda: re.search(until, self.sentence()) and self.sentence() != sentence, 20, self.sentence)
        wait_for(lambda: self.picture() != picture, 20, lambda: "the picture is the same")
        return self.sentence(), self.picture()


def is_whole(notebook: Any, tmp_path: Path, call: str, sentence: str) -> None:
    """In the report's page and in plain nbconvert's, the cell has the sentence and the picture of the live notebook, and no gap."""
    from nbconvert import HTMLExporter

    (cell,) = [c for c in notebook.cells if f"widgets.{call}(" in c.source]
    bundles = [o["data"] for o in cell.outputs if "data" in o]
    assert any("image/svg+xml" in data and len(data["text/plain"]) > 40 for data in bundles)
    notebook.cells = [cell]
    nbformat.write(notebook, tmp_path / "one.ipynb")
    ours = render_notebook(tmp_path / "one.ipynb", tmp_path / "one.html", "t").read_text()
    plain, _ = HTMLExporter(template_name="basic").from_notebook_node(notebook)
    for page in (ours, plain):
        text = " ".join(re.sub(r"<[^>]*>", "", page).replace("&#x27;", "'").replace("&quot;", '"').split())
        assert " ".join(sentence.split()) in text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
        # nbconvert's own template puts any SVG into an <img> and gives it no words: the SVG in it carries them
        inside = re.findall(r"data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)", page)
        pictures = page + "".join(base64.b64decode(data).decode() for data in inside)
        assert re.search(r'<svg[^>]* aria-label="[^"]{40,}', pictures)
        assert "widget-view+json" not in page and "Error displaying widget" not in page


def play_01(page: Page, tmp_path: Path) -> None:
    """The planner beside the running server's own figure; dtype and cap move the figure."""
    planner = page.cell("capacity_planner")
    first = planner.sentence()
    assert re.search(r"The running server A\w+-\w+ holds 65,536 tokens, as planned, with the same settings", first), (
        first
    )
    assert "65,536 tokens of bfloat16 KV cache fit, 8 requests of 8,192 tokens" in first
    planner.changes(
        lambda: planner.control("kv_cache_dtype").select_option("fp8_e4m3"), "float8_e4m3fn.*asked otherwise"
    )
    cap = planner.control("max_total_tokens")
    sentence, _ = planner.changes(lambda: (cap.fill("16384"), cap.press("Enter")), "16,384 tokens .* 2 requests")
    slider = planner.cell.locator(".noUi-handle").first
    wrong = planner.control("GPUs (tensor parallel)")
    wrong.fill("3")
    wrong.press("Enter")
    wait_for(lambda: "expected" in planner.sentence() and "Traceback" not in planner.text(), 20, planner.sentence)
    wrong.fill("1")
    wrong.press("Enter")
    wait_for(lambda: planner.sentence() == sentence, 20, planner.sentence)
    cap.fill("0")
    cap.press("Enter")
    wait_for(lambda: "16,384" not in planner.sentence(), 20, planner.sentence)
    sentence, _ = planner.changes(lambda: slider.press("ArrowLeft"), "mem_fraction_static")
    is_whole(page.saved(sentence[:60]), tmp_path, "capacity_planner", sentence)


def play_02(page: Page, tmp_path: Path) -> None:
    """The line and its findings follow what is chosen and typed; a wrong value is one message."""
    chooser = page.cell("flag_chooser")
    assert "python -m sglang.launch_server" in chooser.text()
    chooser.changes(lambda: chooser.control("kv_cache_dtype").select_option("fp8_e5m2"), "finding")
    assert "--kv-cache-dtype fp8_e5m2" in chooser.text()
    typed = chooser.control("all other flags, environment")
    typed.press_sequentially(" --tp-siz 2", delay=15)
    wait_for(lambda: "no SGLang release has such a flag; nearest: tp_size" in chooser.sentence(), 20, chooser.sentence)
    typed.fill("--tp-size 2 --api-key sk-verysecret0123456789")
    wait_for(lambda: "--tp-size 2" in chooser.text() and "REDACTED" in chooser.text(), 20, chooser.text)
    sentence = chooser.sentence()
    notebook = page.saved("--tp-size 2")
    assert "verysecret" not in page.file.read_text()
    is_whole(notebook, tmp_path, "flag_chooser", sentence)


def stop_03(page: Page) -> None:
    """Throughput and latency come while the first level runs; stop is pressed."""
    panel = page.cell("live_panel")
    panel.cell.locator("p.reading").wait_for(timeout=150_000)
    wait_for(
        lambda: re.search(r"[1-9]\d* of 400 requests, 1 in flight, [\d.]+ tok/s so far", panel.sentence()),
        60,
        page.sight,
    )
    assert "in progress (means so far)" in panel.text()
    first = panel.sentence()
    wait_for(lambda: panel.sentence() != first, 10, panel.sentence)
    panel.cell.get_by_role("button", name="Stop, keep what is measured").click()


def play_03(page: Page, tmp_path: Path) -> None:
    """What was measured is kept: in the panel, in the record, in the result."""
    panel = page.cell("live_panel")
    sentence = panel.sentence()
    found = re.search(r"Stopped on request; what was measured is kept: 1 records, (\d+) answered requests", sentence)
    assert found and "stopped, kept" in panel.text() and "level-C2" in panel.text(), panel.text()
    (record,) = page.lab.outputs.glob("*/*/raw/03/level-C1/level.jsonl")
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    ok = [line for line in lines[1:] if line["failure"] is None]
    assert 1 <= len(ok) == int(found[1]) < 400
    is_whole(page.saved(sentence[:40]), tmp_path, "live_panel", sentence)


def play_browser(page: Page, tmp_path: Path) -> None:
    """From a verdict to its rule to the raw line."""
    browser_ = page.cell("evidence_browser")
    before = browser_.sentence()
    browser_.control("verdict").select_option(index=1)
    wait_for(lambda: "Rule: " in browser_.sentence() and browser_.sentence() != before, 20, browser_.sentence)
    assert "The raw line, marked >" in browser_.text() or "no evidence" in browser_.sentence()
    sentence = browser_.sentence()
    is_whole(page.saved(sentence[:40]), tmp_path, "evidence_browser", sentence)


@pytest.mark.parametrize("number", list(NOTEBOOKS))
def test_each_notebook_is_played(lab: Lab, chromium: Browser, tmp_path: Path, number: str) -> None:
    """Opened, run from the first cell to the last, its controls moved, saved, and whole without a kernel."""
    page = Page(lab, chromium, number)
    page.run_all()
    if number == "03":
        stop_03(page)
    result = page.result(100)
    assert not page.errors()
    assert result["notebook"] == number and result["verdicts"] is not None
    {"01": play_01, "02": play_02, "03": play_03}.get(number, play_browser)(page, tmp_path)
    assert not page.errors()
    page.page.close()


def test_nothing_left_this_machine(lab: Lab, chromium: Browser) -> None:
    """After all that: not one request of the browser, the lab or a kernel went anywhere but to 127.0.0.1."""
    assert len(chromium.asked) > 100 and any(url.startswith("ws://127.0.0.1") for url in chromium.asked)
    assert chromium.outside == []
    assert lab.left == []


def test_the_watch_sees_a_request(chromium: Browser) -> None:
    """The count above can fail: a page that loads something from elsewhere is caught, and gets nothing."""
    page = chromium.context.new_page()
    page.set_content("<img src='http://example.invalid/a.png'><p>there</p>")
    page.locator("p").wait_for()
    wait_for(lambda: chromium.outside == ["http://example.invalid/a.png"], 10)
    page.close()
    chromium.outside.clear()
