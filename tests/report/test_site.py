"""A run's pages: verdicts first, everything from the records, nothing hidden, nothing that loads."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nbformat.v4 import new_code_cell, new_output

from lib.errors import UnreadableFile
from lib.report.site import build_site
from tests.report.made_run import RUN_ID, TITLES, notebook, result, write_json
from tests.report.pages import Page

PAGES = ["index.html", *(f"{number}.html" for number in TITLES)]


def edited(path: Path, change: Callable[[Any], None]) -> None:
    """A JSON file of the run, changed."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def index(folder: Path) -> Page:
    """The built index."""
    return Page.read(build_site(folder))


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_somewhere_and_nothing_is_loaded(site: Path, name: str) -> None:
    """Each page's links reach a file and an anchor that exist; no page loads or runs anything."""
    page = Page.read(site / name)
    assert page.broken(site, name) == []
    assert page.loads == [] and page.runs == []
    assert len(page.links) > 3
    assert "\u202e" not in (site / name).read_text() and "\x1b" not in (site / name).read_text()


def test_the_link_check_finds_a_broken_link(site: Path, tmp_path: Path) -> None:
    """The check above fails on a link to a missing file and on a missing anchor."""
    (tmp_path / "a.html").write_text('<p id="x"></p>')
    page = Page('<a href="b.html">1</a><a href="a.html#y">2</a><a href="a.html#x">3</a><a href="#z">4</a>')
    (tmp_path / "c.html").write_text("")
    assert page.broken(tmp_path, "c.html") == ["b.html", "a.html#y", "#z"]


def test_verdicts_come_first_and_lead_to_their_section_and_evidence(site: Path) -> None:
    """The first table is the verdicts'; each claim leads to its row in the notebook, evidence to the raw file."""
    text = (site / "index.html").read_text()
    assert (
        text.index('id="verdicts"') < text.index('id="servers"') < text.index('id="stack"') < text.index('id="times"')
    )
    page = Page(text)
    for number, verdict in (
        ("01", "known-answer"),
        ("02", "intel_amx"),
        ("03", "ttft"),
        ("05", "kv-dtype"),
        ("05", "hostile"),
    ):
        assert f"{number}.html#verdict-{verdict}" in page.links
    assert page.links.count("raw/05/server.log") == 1 and "raw/05/server.log:3" in page.text
    assert "raw/02/gone.json file not found" in page.text and "raw/02/gone.json" not in page.links
    assert "javascript:alert(1)" in page.text and "javascript:alert(1)" not in page.links


def test_verdict_without_its_row_leads_to_the_verdict_section(run_dir: Path) -> None:
    """If a notebook doesn't show a verdict's row, its claim leads to the section, else to the page."""
    plain = notebook("01")
    plain.cells = [cell for cell in plain.cells if cell.source != "verdict_table(verdicts)"]
    write_json(run_dir / "01.ipynb", plain)
    assert "01.html#verdict" in index(run_dir).links
    plain.cells = plain.cells[:3]
    write_json(run_dir / "01.ipynb", plain)
    links = index(run_dir).links
    assert "01.html" in links and "01.html#verdict" not in links


def test_numbers_and_identity_follow_the_records(run_dir: Path) -> None:
    """Changing one measured number and one server flag in a record changes the index, so neither is typed in."""
    before = index(run_dir).text
    assert "44.1 tok/s" in before and "attention_backend=torch_native" in before and "0.5.15.post1" in before

    def change(content: Any) -> None:
        content["verdicts"][0]["measured"].update(value=77.7, low=75.0, high=80.4)
        content["servers"][0]["resolved_args"]["attention_backend"] = "intel_amx"
        content["servers"][0]["sglang_version"] = "9.9.9"
        content["server_seconds"] = 12.25

    edited(run_dir / "03.result.json", change)
    after = index(run_dir).text
    # half-width 2.7: one decimal; own time 61.4 - 12.25 = 49.15
    assert "77.7 tok/s [75.0, 80.4]" in after and "44.1" not in after
    assert "attention_backend=intel_amx" in after and "9.9.9" in after and "49.15 s" in after


def test_counts_are_of_the_verdicts(run_dir: Path) -> None:
    """The badges on top count the verdicts of all valid results."""
    summary = index(run_dir).text
    for badge in ("✓ 2 pass", "✗ 2 fail", "? 1 inconclusive", "⊘ 1 invalid", "– 1 unsupported", "! 1 error"):
        assert badge in summary


def test_what_ran_on_what_times_predictions_and_skipped_are_there(site: Path) -> None:
    """Launches with notebooks, stack, times (total, server, own), predictions and what was skipped are all there."""
    text = Page.read(site / "index.html").text
    # the run: 360.25 - 244.5 = 115.75 s
    for part in ("L-03", "python -m sglang.launch_server", "SGLANG_USE_CPU_ENGINE", "cdcdcdcdcdcdcdcd", "0123456789ab",
                 "efefefefefefefef", "12.5 s", "115.8 s", "23,040 B/token", "-12.11 %", "2 * layers * kv_heads",
                 "GPU telemetry: no NVIDIA driver on this host", "14.24 s"):  # fmt: skip
        assert part in text


def test_failed_notebook_is_shown_with_its_error(site: Path) -> None:
    """A notebook without a result is named on top and in its place, with the error's words."""
    page = Page.read(site / "index.html")
    assert "Notebook 06 failed." in page.text and "#notebook-06" in page.links
    assert "ServerDied: the server ended with code 1" in page.text
    assert "06.html" in page.links
    assert "ServerDied: the server ended with code 1" in Page.read(site / "06.html").text


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda d: (d / "03.result.json").unlink(), "expected 03.result.json, found no such file"),
        (lambda d: (d / "03.result.json").write_text('{"notebook": "03"'), "03.result.json is not JSON"),
        (lambda d: (d / "03.result.json").write_text("[" * 100_000), "03.result.json is not JSON"),
        (lambda d: (d / "03.result.json").write_bytes(b"\xff\xfe"), "03.result.json, found an unreadable file"),
        (lambda d: (d / "03.result.json").write_text("{}"), "03.result.json is not valid"),
        (lambda d: edited(d / "03.result.json", lambda c: c.update(extra=1)), "extra: Extra inputs are not permitted"),
        (lambda d: edited(d / "03.result.json", lambda c: c["verdicts"][0].pop("evidence")), "without evidence"),
        (lambda d: edited(d / "03.result.json", lambda c: c.update(run_id="other")), f"to run other, not to {RUN_ID}"),
        (lambda d: shutil.copy(d / "02.result.json", d / "03.result.json"), "is the result of notebook 02"),
        (lambda d: (d / "03.ipynb").write_text("{"), "expected a notebook"),
    ],
)  # fmt: skip
def test_missing_or_invalid_is_failed_not_hidden(run_dir: Path, damage: Callable[[Path], None], said: str) -> None:
    """Whatever is wrong with one notebook's files, the index says so, and shows the others."""
    damage(run_dir)
    page = index(run_dir)
    assert "Notebook 03 failed." in page.text
    assert said in page.text or said.replace("expected a notebook", "a notebook at") in page.text
    assert "fp8_e4m3 KV moves log-probabilities" in page.text
    assert page.broken(run_dir, "index.html") == []


def test_invalid_result_brings_no_verdict(run_dir: Path) -> None:
    """Numbers of a result that isn't valid or isn't of this run are not shown as this run's."""
    edited(run_dir / "03.result.json", lambda content: content.update(run_id="other"))
    page = index(run_dir)
    assert "44.1 tok/s" not in page.text and "✓ 1 pass" in page.text


def test_interrupted_run(run_dir: Path) -> None:
    """After an interruption the index says which notebook was cut and which did not run."""

    def change(content: Any) -> None:
        content.update(state="interrupted", ended=None, seconds=None)
        content["notebooks"][2] = {"notebook": "03", "state": "interrupted", "error": "interrupted by the user"}
        content["notebooks"][3:] = [{"notebook": n, "state": "not_run"} for n in ("04", "05", "06")]

    edited(run_dir / "result.json", change)
    for path in [*run_dir.glob("0[3456].result.json"), *run_dir.glob("0[456].ipynb")]:
        path.unlink()
    page = index(run_dir)
    assert "This run is interrupted" in page.text and "Notebook 03 interrupted." in page.text
    assert "interrupted by the user" in page.text and page.text.count("the notebook was not run") == 3
    assert "not run" in page.text and "Notebook 04 failed" not in page.text
    assert "fp8_e4m3 KV moves" not in page.text and "intel_amx runs" in page.text
    assert page.broken(run_dir, "index.html") == []


def test_killed_run_is_not_called_done(run_dir: Path) -> None:
    """An index that still says running is shown as running or killed."""
    edited(run_dir / "result.json", lambda content: content.update(state="running", ended=None))
    assert "still running, or ended without closing its index" in index(run_dir).text


@pytest.mark.parametrize("content", [None, "", "{", '{"run_id": 3}'])
def test_without_an_index_the_notebooks_are_found(run_dir: Path, content: str | None) -> None:
    """Plain papermill leaves no result.json, a crash half of one: the pages are built from what there is."""
    (run_dir / "result.json").unlink()
    if content is not None:
        (run_dir / "result.json").write_text(content)
    page = index(run_dir)
    assert "without a run index" in page.text and "44.1 tok/s" in page.text and "06" in page.text
    assert "Notebook 06 failed." in page.text


def test_empty_folder(tmp_path: Path) -> None:
    """A folder without a run gives a page that says so; a folder that isn't there is an error."""
    assert "No notebook of this run left a file." in index(tmp_path).text
    with pytest.raises(UnreadableFile, match="no such folder"):
        build_site(tmp_path / "none")


def test_building_again_changes_nothing(run_dir: Path, made: Path) -> None:
    """The same run gives the same bytes, records and evidence stay as they were, no temporary file is left."""
    build_site(run_dir)
    first = {path.relative_to(run_dir): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    build_site(run_dir)
    assert {path.relative_to(run_dir): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == first
    before = {path.relative_to(made): path.read_bytes() for path in made.rglob("*") if path.is_file()}
    assert set(first) - set(before) == {Path(name) for name in (*PAGES, "report.html")}
    assert all(first[path] == content for path, content in before.items())


def test_pages_together_are_below_two_megabytes(run_dir: Path) -> None:
    """A usual run takes a tenth of the room; one with megabytes of output in each notebook still fits."""
    build_site(run_dir)
    assert sum((run_dir / name).stat().st_size for name in PAGES) < 400_000
    picture = base64.b64encode(b"0" * 100_000).decode()
    for number in TITLES:
        made = notebook(number)
        for place in range(12):
            made.cells.append(new_code_cell("x", outputs=[
                new_output("stream", text=f"{place} " * 8_000),
                new_output("display_data", {"image/png": picture, "text/plain": "bars"})]))  # fmt: skip
        write_json(run_dir / f"{number}.ipynb", made)
    edited(run_dir / "05.result.json", lambda content: content.update(verdicts=content["verdicts"] * 150))
    build_site(run_dir)
    assert sum((run_dir / name).stat().st_size for name in PAGES) < 2_000_000
    assert "is left out here" in (run_dir / "03.html").read_text()
    assert Page.read(run_dir / "index.html").broken(run_dir, "index.html") == []


def test_pages_shrink_until_they_fit(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first estimate of a page's share is too large, the pages are made again with less."""
    monkeypatch.setattr("lib.report.site.SITE_BYTES", 400_000)
    monkeypatch.setattr("lib.report.site.INDEX_BYTES", 0)  # an estimate that can't hold: the index takes 30 kB
    monkeypatch.setattr("lib.report.site.PAGE_OVERHEAD_BYTES", 0)
    for number in TITLES:
        made = notebook(number)
        made.cells += [new_code_cell("x", outputs=[new_output("stream", text=f"{n} " * 3_000)]) for n in range(12)]
        write_json(run_dir / f"{number}.ipynb", made)
    build_site(run_dir)
    assert sum((run_dir / name).stat().st_size for name in PAGES) < 400_000


def test_two_stacks_in_one_run_are_told_apart(run_dir: Path) -> None:
    """A run whose notebooks ran on different packages says so."""
    assert "don’t share one stack" not in index(run_dir).text
    edited(
        run_dir / "03.result.json", lambda content: content["provenance"].update(packages_sha256="99" * 32, dirty=True)
    )
    text = index(run_dir).text
    assert "don’t share one stack" in text and "with local changes" in text


def test_own_time_is_never_negative(run_dir: Path) -> None:
    """A resumed run, whose servers worked in an earlier session too, gives a reason instead of a negative time."""
    edited(run_dir / "result.json", lambda content: content.update(seconds=20.0))
    text = index(run_dir).text
    assert "measured partly in an earlier session" in text and not re.search(r"-\d[\d.]* s\b", text)


def test_secrets_in_records_are_redacted(run_dir: Path) -> None:
    """A key that slipped into a record is not on the index."""
    pytest.importorskip("lib.server.redact")
    key = "sk-test-0123456789abcdef0123456789abcdef"

    def change(content: Any) -> None:
        content["servers"][0]["resolved_args"]["api_key"] = key
        content["servers"][0]["argv"] += ["--api-key", key]
        content["servers"][0]["environment"]["HF_TOKEN"] = key
        content["verdicts"][0]["reason"] = f"server_args=ServerArgs(api_key='{key}')"
        content["provenance"]["params"]["api_key"] = key

    edited(run_dir / "03.result.json", change)
    edited(run_dir / "result.json", lambda content: content["notebooks"][5].update(error=f"--api-key {key} refused"))
    build_site(run_dir)
    assert all(key not in (run_dir / name).read_text() for name in PAGES)
    assert "44.1 tok/s" in Page.read(run_dir / "index.html").text


def test_names_as_the_index_gives_them(run_dir: Path) -> None:
    """Files named by the run's index are used, if they lie in the run's folder."""
    (run_dir / "03.result.json").rename(run_dir / "03_benchmark.result.json")
    (run_dir / "03.ipynb").rename(run_dir / "03_benchmark.ipynb")
    assert "44.1 tok/s" in index(run_dir).text
    (run_dir.parent / "foreign.json").write_text(result("03").model_dump_json())
    (run_dir / "03_benchmark.result.json").unlink()
    edited(run_dir / "result.json", lambda content: content["notebooks"][2].update(result="../foreign.json"))
    assert "44.1 tok/s" not in index(run_dir).text
