"""The frame of every widget: what it leaves without a front end, one message for a mistake, nothing hostile, nothing secret."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lib.errors import BadInput
from lib.report.figures import startup_phases
from lib.report.tables import table
from lib.widgets.panel import Control, Panel, Values, View, is_live
from tests.report.made_run import HOSTILE

SECRET = "sk-verysecret0123456789abcdef"
CONTROLS = [
    Control("n", "a number", 3, "whole", low=1, high=9),
    Control("f", "a fraction", 0.5, "slider"),
    Control("c", "a choice", "a", "choice", ("a", "b")),
    Control("t", "a text", "x"),
    Control("l", "lines", "x", "lines"),
    Control("m", "a measure", 1.5, "number", high=10),
]


class Notebook:
    """What a cell shows: bundles in order; an update replaces the one with its identifier."""

    def __init__(self) -> None:
        self.bundles: list[dict[str, Any]] = []

    def display(self, bundle: dict[str, Any], raw: bool, display_id: bool = False) -> Any:
        assert raw
        self.bundles.append(bundle)
        place = len(self.bundles) - 1

        def update(later: dict[str, Any], raw: bool) -> None:
            assert raw
            self.bundles[place] = later

        return SimpleNamespace(update=update) if display_id else None

    @property
    def text(self) -> str:
        return "\n".join(str(bundle) for bundle in self.bundles)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    made = Notebook()
    monkeypatch.setattr("IPython.display.display", made.display)
    return made


def doubled(values: Values) -> View:
    if values["n"] == 7:
        raise BadInput("expected another number", "7", "choose 6")
    if values["n"] == 8:
        raise RuntimeError("a fault of the widget's own")
    made = startup_phases([{"phase": "start", "seconds": float(values["n"])}])
    return View(f"twice {values['n']} is {2 * values['n']}", (table([{"n": values["n"]}]),), made)


def test_a_batch_run_leaves_a_sentence_a_table_and_a_picture_with_words(notebook: Notebook) -> None:
    """No control is made, no widget is named, and the picture says in words what it shows."""
    Panel("t", CONTROLS, doubled, live=False).display()
    text, picture = notebook.bundles
    assert (
        "twice 3 is 6" in text["text/html"] and "<table" in text["text/html"] and "twice 3 is 6" in text["text/plain"]
    )
    assert (
        picture["image/svg+xml"].startswith("<svg")
        and "aria-label=" in picture["image/svg+xml"]
        and "3 s" in picture["text/plain"]
    )
    assert "widget-view" not in notebook.text


def test_live_and_batch_show_the_same(notebook: Notebook) -> None:
    """The outputs of a live panel, moved or not, are those of a batch panel at the same values; only controls come on top."""
    live = Panel("t", CONTROLS, doubled, live=True)
    live.display()
    controls, *first = notebook.bundles
    assert "application/vnd.jupyter.widget-view+json" in controls and "need a running kernel" in controls["text/html"]
    live.set(n=5)
    moved = notebook.bundles[1:]
    notebook.bundles.clear()
    batch = Panel("t", CONTROLS, doubled, live=False)
    batch.display()
    assert notebook.bundles == first
    batch.set(n=5)
    assert notebook.bundles == moved and "twice 5 is 10" in notebook.text


@pytest.mark.parametrize(
    ("n", "message"), [(7, "expected another number; found: 7; do: choose 6."), (8, "RuntimeError: a fault")]
)
def test_a_mistake_is_one_message_and_the_next_move_goes_on(notebook: Notebook, n: int, message: str) -> None:
    """What the reader did wrong, and what the widget itself does wrong, is said in place; the notebook does not fail."""
    panel = Panel("t", CONTROLS, doubled, live=False)
    panel.display()
    panel.set(n=n)
    assert (
        message in notebook.bundles[0]["text/plain"]
        and "Traceback" not in notebook.text
        and "twice" not in notebook.text
    )
    panel.set(n=4)
    assert "twice 4 is 8" in notebook.text


@pytest.mark.parametrize("live", [False, True])
def test_hostile_text_is_text_and_secrets_are_gone(notebook: Notebook, live: bool) -> None:
    """In sentence, table and picture: markup is text, what is invisible shows, a key is nowhere."""
    bad = f"{HOSTILE} --api-key {SECRET}"

    def shown(_: Values) -> View:
        return View(bad, (table([{"line": bad}]),), startup_phases([{"phase": bad, "seconds": 1.0}], title=bad))

    Panel("t", CONTROLS, shown, live=live).display()
    assert "verysecret" not in notebook.text and "\u202e" not in notebook.text and "\x1b" not in notebook.text
    for bundle in notebook.bundles:
        for mime in ("text/html", "image/svg+xml"):
            assert "<script" not in bundle.get(mime, "") and "<img" not in bundle.get(mime, "")
    assert "⟨U+202E⟩" in notebook.text


def test_who_counts_as_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that Jupyter started for a person; never papermill, never a run of `workbook`, never a rebuild."""
    for name in ("WORKBOOK_RUN_DIR", "WORKBOOK_LIVE", "JPY_SESSION_NAME", "VSCODE_PID"):
        monkeypatch.delenv(name, raising=False)
    person: Any = SimpleNamespace(offline=False, batch=False)
    assert not is_live(person)
    monkeypatch.setenv("JPY_SESSION_NAME", "/01_build.ipynb")
    assert is_live(person) and is_live()
    assert not is_live(SimpleNamespace(offline=True, batch=False)) and not is_live(
        SimpleNamespace(offline=False, batch=True)
    )  # type: ignore[arg-type]
    monkeypatch.setenv("WORKBOOK_LIVE", "0")
    assert not is_live(person)
    monkeypatch.setenv("WORKBOOK_LIVE", "1")
    monkeypatch.setenv("WORKBOOK_RUN_DIR", "/x")
    assert not is_live(person)
