"""A JupyterLab of a test's own on 127.0.0.1, and a browser in it that may go nowhere else."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nbformat
import yaml

from lib.params import NOTEBOOKS, ROOT

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
#: What keeps Debian's Chromium from calling home by itself, and from resolving any other name.
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-default-apps", "--disable-dev-shm-usage",
    "--disable-features=OptimizationHints,MediaRouter,Translate",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
]  # fmt: skip


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class _Refuses(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.server.asked.append(self.request.recv(300).split(b"\r\n")[0].decode("latin-1"))  # type: ignore[attr-defined]


@contextlib.contextmanager
def trap() -> Iterator[tuple[str, list[str]]]:
    """A proxy that serves nothing and writes down who asks: what the lab or a kernel fetches from elsewhere ends here."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Refuses) as server:
        server.daemon_threads = True
        server.asked = []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", server.asked  # type: ignore[attr-defined]
        server.shutdown()


def make_flags() -> list[str]:
    """The options that `make lab` gives JupyterLab, from the Makefile itself."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    line = next(one for one in text.splitlines() if "jupyter lab " in one)
    return [word for word in line.split() if word.startswith("--") and "root_dir" not in word and "default_url" not in word
            and "allow-root" not in word]  # fmt: skip


def put_notebooks(folder: Path, profile: Path) -> None:
    """Copies of the six notebooks whose parameters are the profile's, as papermill would inject them."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, stem in NOTEBOOKS.items():
        notebook = nbformat.read(ROOT / "notebooks" / f"{stem}.ipynb", 4)
        given = yaml.safe_load((profile / f"{number}.yaml").read_text())
        cell = nbformat.v4.new_code_cell("\n".join(f"{name} = {value!r}" for name, value in given.items()))
        at = next(i for i, c in enumerate(notebook.cells) if "parameters" in c.metadata.get("tags", []))
        notebook.cells.insert(at + 1, cell)
        nbformat.write(notebook, folder / f"{stem}.ipynb")


@dataclass
class Lab:
    """A running JupyterLab: its address, its folder, and what tried to leave 127.0.0.1 beside the browser."""

    url: str
    token: str
    folder: Path
    outputs: Path
    left: list[str]
    process: subprocess.Popen[bytes] | None = None

    def ask(self, path: str) -> Any:
        """The lab server's answer, asked without any proxy."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{self.url}/{path}?token={self.token}", timeout=10) as answer:
            return json.load(answer)

    def sessions(self) -> list[dict[str, Any]]:
        """The notebooks that have a kernel, with its state."""
        return list(self.ask("api/sessions"))


@contextlib.contextmanager
def running_lab(folder: Path, work: Path, **environment: str) -> Iterator[Lab]:
    """JupyterLab on `folder` as `make lab` starts it, with settings, kernels and outputs in `work`."""
    port, token = free_port(), "a-token-of-this-test"
    with trap() as (proxy, asked):
        env = {
            **os.environ, "PYTHONPATH": str(ROOT), "HOME": str(work), "WORKBOOK_OUTPUTS": str(work / "outputs"),
            "JUPYTER_CONFIG_DIR": str(work / "config"), "JUPYTER_DATA_DIR": str(work / "data"),
            "JUPYTER_RUNTIME_DIR": str(work / "runtime"), "IPYTHONDIR": str(work / "ipython"),
            "http_proxy": proxy, "https_proxy": proxy, "HTTP_PROXY": proxy, "HTTPS_PROXY": proxy,
            "no_proxy": "127.0.0.1,localhost", "NO_PROXY": "127.0.0.1,localhost", **environment,
        }  # fmt: skip
        for name in ("WORKBOOK_RUN_DIR", "JPY_SESSION_NAME"):
            env.pop(name, None)
        command = [sys.executable, "-m", "jupyter", "lab", *make_flags(), "--no-browser", "--allow-root",
                   f"--ServerApp.port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}",
                   f"--ServerApp.root_dir={folder}"]  # fmt: skip
        with (work / "lab.log").open("wb") as log:
            process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        lab = Lab(f"http://127.0.0.1:{port}", token, folder, work / "outputs", asked, process)
        try:
            wait_for(lambda: answers(lab), 60, lambda: (work / "lab.log").read_text()[-2000:])
            yield lab
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def answers(lab: Lab) -> bool:
    """Whether the lab answers; one that has ended fails the test at once."""
    assert lab.process is None or lab.process.poll() is None, "the lab has ended"
    with contextlib.suppress(OSError):
        return bool(lab.ask("api/status"))
    return False


def wait_for(true: Callable[[], Any], seconds: float, why: Callable[[], str] = lambda: "") -> Any:
    """Waits until something is true and gives it."""
    end = time.monotonic() + 3 * seconds  # three rows of tests share the machine in `make test`
    while not (found := true()):
        assert time.monotonic() < end, f"it did not happen within {3 * seconds:g} s; {why()}"
        time.sleep(0.1)
    return found


@dataclass
class Browser:
    """Chromium with everything but 127.0.0.1 refused; `asked` counts what was asked for, `outside` what was refused."""

    context: Any
    asked: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)


@contextlib.contextmanager
def browser(playwright: Any) -> Iterator[Browser]:
    """Debian's Chromium, driven by Playwright, in one context that notes every request and websocket."""
    chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
    context = chromium.new_context(viewport={"width": 1500, "height": 1000}, service_workers="block")
    made = Browser(context)

    def seen(url: str) -> bool:
        parts = urlsplit(url)
        local = parts.scheme in ("data", "blob", "about") or parts.hostname == "127.0.0.1"
        (made.asked if local else made.outside).append(url)
        return local

    context.route("**/*", lambda route: route.continue_() if seen(route.request.url) else route.abort())
    context.on("page", lambda page: page.on("websocket", lambda socket_: seen(socket_.url)))
    try:
        yield made
    finally:
        context.close()
        chromium.close()
