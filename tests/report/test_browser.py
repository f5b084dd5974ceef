"""The pages in a real browser, from file://: nothing leaves, nothing runs, everything is seen."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--hide-scrollbars",
]


@pytest.fixture(scope="module", autouse=True)
def _browser() -> None:
    if CHROMIUM is None:
        pytest.skip("no Chromium here; do: apt-get install -y chromium")


def browse(page: Path, work: Path, *flags: str) -> tuple[str, list[str]]:
    """The page's document after loading, and every address that was asked for other than the page itself."""
    work.mkdir(exist_ok=True)
    log = work / "net.json"
    command = [
        str(CHROMIUM),
        *FLAGS,
        f"--user-data-dir={work / 'profile'}",
        f"--log-net-log={log}",
        "--virtual-time-budget=2000",
    ]
    env = {**os.environ, "HOME": str(work)}
    done = subprocess.run(
        [*command, *flags, "--dump-dom", page.as_uri()],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    text = log.read_text()
    try:
        events = json.loads(text)["events"]
    except ValueError:  # the browser was ended before it closed the list
        events = json.loads(text.rstrip().rstrip(",") + "]}")["events"]
    asked = {str((event.get("params") or {}).get("url", "")) for event in events}
    hosts = {str((event.get("params") or {}).get("host", "")) for event in events}
    return done.stdout, sorted(url for url in asked | hosts if "invalid" in url)


def test_the_watch_sees_a_request(tmp_path: Path) -> None:
    """A page that does load and run something is caught by what the next tests look at."""
    page = tmp_path / "bad.html"
    page.write_text("<title>bad</title><img src='http://x.invalid/a.png'><script>document.title='owned'</script>")
    document, asked = browse(page, tmp_path / "b")
    assert any("x.invalid" in url for url in asked) and "<title>owned</title>" in document


@pytest.mark.parametrize("name", ["index.html", "05.html", "02.html"])
def test_nothing_leaves_and_nothing_runs(site: Path, tmp_path: Path, name: str) -> None:
    """Opened from a file share, a page full of hostile content asks for nothing and keeps its title."""
    document, asked = browse(site / name, tmp_path / "b")
    assert asked == []
    assert "<title>owned</title>" not in document and 'onerror="' not in document
    assert "⟨U+202E⟩gnp.exe" in document


def test_pictures_are_drawn(site: Path, tmp_path: Path) -> None:
    """The browser lays the page out and writes a picture of it that is not blank, in the light and in the dark."""
    sizes = []
    for scheme in ("1", "0"):
        picture = tmp_path / f"{scheme}.png"
        browse(site / "index.html", tmp_path / scheme, f"--screenshot={picture}", "--window-size=1360,1200",
               f"--blink-settings=preferredColorScheme={scheme}")  # fmt: skip
        sizes.append(picture.read_bytes())
    assert all(len(content) > 30_000 for content in sizes) and sizes[0] != sizes[1]
