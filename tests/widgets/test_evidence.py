"""The evidence browser: verdict, rule, raw line; what no longer stands as quoted shows."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lib.audit.rules import RULES
from lib.errors import UnreadableFile
from lib.params import ROOT
from lib.records import Evidence, Status, Verdict
from lib.report.excerpts import read_excerpt
from lib.widgets import browser
from tests.report import made_run
from tests.report.made_run import HOSTILE

KEY = "sk-verysecret0123456789abcdef"


def verdict(id: str = "v", rule: str | None = "lib.model.memory.kv_bytes_per_token", **evidence: Any) -> Verdict:
    pieces = [Evidence(**evidence)] if evidence else []
    return Verdict(id=id, claim="it holds", status=Status.INCONCLUSIVE, rule=rule, reason="a test", evidence=pieces)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.log").write_text("one\ntwo  words\nthree\n" + f"{HOSTILE} --api-key {KEY}\n")
    return tmp_path


def view(folder: Path, *verdicts: Verdict, chosen: str = browser.ALL, piece: int = 1) -> Any:
    named = {f"05/{v.id}": v for v in verdicts}
    return browser.Browser(folder, named, len(named))({"verdict": chosen, "piece": piece})


@pytest.mark.parametrize(
    ("evidence", "now"),
    [
        ({"path": "raw/a.log", "line": 2, "quote": "two words"}, browser.STANDS),
        ({"path": "raw/a.log", "line": 2, "quote": "three"}, browser.MOVED),
        ({"path": "raw/a.log", "line": 9, "quote": "x"}, browser.MISSING),
        ({"path": "raw/a.log", "line": 0}, browser.MISSING),
        ({"path": "raw/none.log"}, browser.MISSING),
        ({"path": "../secret"}, browser.MISSING),
        ({"path": "/etc/hostname"}, browser.MISSING),
        ({"path": "raw/a.log"}, browser.WHOLE),
    ],
)
def test_each_piece_is_looked_up_again(folder: Path, evidence: dict[str, Any], now: str) -> None:
    """A line that stands, one that says something else, a file that is missing or outside, and a whole file."""
    (folder.parent / "secret").write_text("x")
    shown = view(folder, verdict(**evidence))
    assert f"1 {now}" in repr(shown.tables[0]) and now in shown.chart.alt
    assert now in view(folder, verdict(**evidence), chosen="05/v").sentence


def test_a_chosen_verdict_shows_its_rule_and_the_raw_line_with_neighbours(folder: Path) -> None:
    """Verdict, the rule's own first sentence, and the line marked between the lines around it."""
    shown = view(folder, verdict(path="raw/a.log", line=2, quote="two words"), chosen="05/v")
    assert "KV cache bytes per token, per GPU and for the whole box" in shown.sentence
    raw = repr(shown.tables[-1])
    assert "2> two  words" in raw or "2> two words" in raw
    assert "one" in raw and "three" in raw


def test_a_rule_of_the_audit_is_quoted_from_its_table(folder: Path) -> None:
    """A verdict of the accuracy audit names rules by id; their rows stand beside it."""
    rule = RULES[0]
    made = verdict(rule="docs/rules.md", path="raw/a.log").model_copy(update={"reason": f"{rule.id}: found"})
    assert rule.title in repr(view(folder, made, chosen="05/v").tables[1])


@pytest.mark.parametrize(
    "rule", ["lib.model.make_models", "os.system", "lib...x", "../x", "lib.results.NoSuch", None, "kv.shift", HOSTILE]
)
def test_a_rule_is_read_and_never_imported(folder: Path, rule: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a result names as its rule: text, no import, no traceback."""
    monkeypatch.setattr("importlib.import_module", lambda *_: pytest.fail("imported"))
    text = browser.rule_text(verdict(rule=rule))
    assert text and "\x1b" not in text and "\u202e" not in text


def test_hostile_and_secret_lines_are_inert(folder: Path) -> None:
    """A raw line with markup, escapes, bidi characters and a key: shown as text, without the key."""
    shown = view(folder, verdict(path="raw/a.log", line=4, quote="document.title"), chosen="05/v")
    text = shown.sentence + "".join(t._repr_html_() for t in shown.tables)
    assert "verysecret" not in text and "\x1b" not in text and "\u202e" not in text and "<script" not in text
    assert "&lt;script" in text


def test_a_cut_line_shows_no_half_of_a_secret(tmp_path: Path) -> None:
    """Redaction comes before a long line is cut."""
    (tmp_path / "a.log").write_text("x" * 225 + " hf_abcdefghijklmnopqrstuvwxyz0123456789ABCD\n")
    text = read_excerpt(tmp_path, "a.log", 1)
    assert text is not None and "hf_abc" not in text


def test_a_finished_run_is_browsed_from_its_folder(tmp_path: Path) -> None:
    """All notebooks' verdicts by number; a result that can't be read is left out; none at all is one message."""
    folder = made_run.make_run(tmp_path / "run")
    named = browser.read_verdicts(folder)
    assert {key[:2] for key in named} >= {"01", "05"}
    (folder / "05.result.json").write_text("{broken")
    assert not any(key.startswith("05") for key in browser.read_verdicts(folder))
    with pytest.raises(UnreadableFile, match="NN.result.json"):
        browser.read_verdicts(tmp_path)


def test_secrets_in_a_result_do_not_reach_the_browser(tmp_path: Path) -> None:
    """A result.json from elsewhere is redacted as it is read."""
    folder = made_run.make_run(tmp_path / "run")
    data = json.loads((folder / "05.result.json").read_text())
    data["verdicts"][0]["reason"] = f"--api-key {KEY}"
    (folder / "05.result.json").write_text(json.dumps(data))
    assert all("verysecret" not in str(v) for v in browser.read_verdicts(folder).values())


def test_the_notebook_s_own_verdicts_come_first_and_later_notebooks_are_not_shown(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rebuild, in which later results lie there already, shows the same as the run did."""
    shown: list[Any] = []
    monkeypatch.setattr(
        "IPython.display.display", lambda bundle, **_: shown.append(bundle) or SimpleNamespace(update=shown.append)
    )
    earlier = {n: SimpleNamespace(verdicts=[verdict(f"of-{n}")]) for n in ("01", "06")}
    run: Any = SimpleNamespace(number="03", folder=folder, offline=True, batch=True, earlier=lambda: earlier)
    panel = browser.evidence_browser(run, [verdict("own", path="raw/a.log")])
    assert "1 verdicts stand on 1 pieces" in shown[0]["text/plain"]
    options = panel.controls[0].options
    assert [value for _, value in options[1:]] == ["03/own", "01/of-01"]


def test_a_verdict_is_chosen_as_a_front_end_chooses_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its place in the list, through the real control: the view is that verdict's, and the first place is the list again."""
    shown: list[Any] = []
    monkeypatch.setattr(
        "IPython.display.display",
        lambda bundle, **_: shown.append(bundle) or SimpleNamespace(update=lambda b, **_: shown.append(b)),
    )
    monkeypatch.setattr(browser, "is_live", lambda *_: True)
    run: Any = SimpleNamespace(number="03", folder=folder, offline=False, batch=False, earlier=dict)
    panel = browser.evidence_browser(run, [verdict("own", path="raw/a.log", line=2, quote="two words")])
    panel._boxes["verdict"].index = 1
    assert any("Rule: KV cache bytes per token" in str(bundle.get("text/plain")) for bundle in shown)
    shown.clear()
    panel._boxes["verdict"].index = 0
    assert shown and "1 verdicts stand on 1 pieces" in shown[0]["text/plain"] and "Rule: " not in shown[0]["text/plain"]


@pytest.mark.parametrize("form", ["v1-first", "v1", "v2"])
def test_runs_of_every_version_are_browsed(form: str, tmp_path: Path) -> None:
    """Older results come by the shared migration; a newer one is left out and named."""
    stored = ROOT / "tests/data/results" / form / "01.result.json"
    (tmp_path / "01.result.json").write_bytes(stored.read_bytes())
    assert browser.read_verdicts(tmp_path)
    (tmp_path / "01.result.json").write_text(json.dumps({**json.loads(stored.read_text()), "schema_version": 99}))
    with pytest.raises(UnreadableFile, match="newer"):
        browser.read_verdicts(tmp_path)
