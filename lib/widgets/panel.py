"""Controls above a view: live in JupyterLab, and in a batch run what they would show first.

The view (one sentence, tables, one picture) is an output of its own beside the controls, updated in place. So a saved
notebook, papermill's output and a page hold the view as it was last, whatever becomes of the controls; and a batch run,
in which nobody could move them, makes no controls at all. Both come from the same function: they can't differ.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lib.errors import WorkbookError
from lib.report.clean import clean_html
from lib.report.figures import Chart, figure_svg
from lib.report.tables import Table
from lib.report.text import escaped, visible_text
from lib.results import NotebookRun
from lib.server.redact import redact_text

Values = dict[str, Any]
#: Longest text that a control may hold; more is a slip of the clipboard.
TEXT_CHARACTERS = 20_000


@dataclass(frozen=True)
class View:
    """What a widget shows: one sentence, tables, and a picture that says the same."""

    sentence: str
    tables: tuple[Table, ...] = ()
    chart: Chart | None = None
    wrong: bool = False


@dataclass(frozen=True)
class Control:
    """One control: its name in the view's values, its label, how it is moved, and where it stands at first."""

    name: str
    label: str
    value: Any
    kind: Literal["choice", "whole", "number", "slider", "line", "lines"] = "line"
    options: tuple[Any, ...] = field(default=())
    low: float = 0.0
    high: float = 1.0
    step: float = 1.0
    help: str = ""


#: From the values of the controls to what is shown; WorkbookError is shown as one message.
Show = Callable[[Values], View]


def is_live(run: NotebookRun | None = None) -> bool:
    """Whether somebody can move a control here: a kernel that Jupyter started for a person, not papermill, not a rebuild.

    `WORKBOOK_LIVE` (1 or 0) decides for front ends that say nothing of themselves.
    """
    if os.environ.get("WORKBOOK_RUN_DIR") or (run is not None and (run.offline or run.batch)):
        return False
    told = os.environ.get("WORKBOOK_LIVE")
    if told in ("0", "1"):
        return told == "1"
    return any(os.environ.get(name) for name in ("JPY_SESSION_NAME", "VSCODE_PID"))


def view_html(view: View) -> str:
    """A view's sentence and tables as HTML, cleaned like every page."""
    kind = "banner" if view.wrong else "reading"
    parts = [f'<p class="{kind}">{escaped(cleaned(view.sentence))}</p>']
    return "".join(parts) + "".join(clean_html(redact_text(table._repr_html_())) for table in view.tables)


def view_text(view: View) -> str:
    """A view's sentence and tables as plain text, for screen readers and terminals."""
    return "\n\n".join([cleaned(view.sentence), *(cleaned(str(table)) for table in view.tables)])


def cleaned(text: str) -> str:
    """Text from anywhere without secrets, and with what is invisible made visible."""
    return visible_text(redact_text(text))


class Outputs:
    """The two outputs of a widget, text and picture, replaced in place."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._shown: tuple[Any, ...] = ()

    def show(self, view: View) -> None:
        """Shows a view; later ones take its place. What has not changed is not sent again."""
        from IPython.display import display

        bundles = [{"text/html": view_html(view), "text/plain": view_text(view)}, _picture(view)]
        if not self._handles:
            self._handles = [display(bundle, raw=True, display_id=True) for bundle in bundles]
        else:
            for handle, bundle, before in zip(self._handles, bundles, self._shown, strict=True):
                if bundle != before:
                    handle.update(bundle, raw=True)
        self._shown = tuple(bundles)


def _picture(view: View) -> dict[str, str]:
    if view.chart is None:
        return {"text/plain": "(no picture: nothing to draw yet)"}
    return {"image/svg+xml": redact_text(figure_svg(view.chart)), "text/plain": cleaned(view.chart.alt)}


class Panel:
    """Controls and their view.

    Args:
        title: what it is for, in one line.
        controls: what can be moved.
        show: the view for the controls' values.
        live: whether controls are made at all.
    """

    def __init__(self, title: str, controls: Sequence[Control], show: Show, live: bool) -> None:
        self.title, self.controls, self._show, self.live = title, tuple(controls), show, live
        self.values: Values = {control.name: control.value for control in controls}
        self.outputs = Outputs()
        self._boxes: dict[str, Any] = {}
        self._lock = threading.Lock()

    def view(self) -> View:
        """What is shown for the values as they are now; a mistake in them is one message."""
        try:
            return self._show(dict(self.values))
        except WorkbookError as error:
            return View(f"{self.title}: {error}", wrong=True)
        except Exception as error:  # noqa: BLE001  (a widget only shows: what fails in it must not fail the notebook)
            return View(f"{self.title}: this can't be shown ({type(error).__name__}: {error})", wrong=True)

    def display(self) -> None:
        """Shows the controls, where somebody can move them, and the view."""
        if self.live:
            self._display_controls()
        self.outputs.show(self.view())

    def set(self, **values: Any) -> None:
        """Moves controls by program, as a hand would."""
        for name, value in values.items():
            if self._boxes:
                self._boxes[name].value = value
            else:
                self.values[name] = value
        if not self._boxes:
            self.outputs.show(self.view())

    def _moved(self, change: Mapping[str, Any]) -> None:
        with self._lock:  # controls may be moved faster than views are made, and from a thread of their own
            self.values[change["owner"].tag] = change["new"]
            self.outputs.show(self.view())

    def _display_controls(self) -> None:
        import ipywidgets
        from IPython.display import display

        for control in self.controls:
            box = _box(ipywidgets, control)
            box.tag = control.name
            box.observe(self._moved, names="value")
            self._boxes[control.name] = box
        rows = ipywidgets.VBox([ipywidgets.HTML(f"<b>{escaped(self.title)}</b>"), *self._boxes.values()])
        display(
            with_words(rows, f"{self.title}: the controls need a running kernel; what they showed last stands below."),
            raw=True,
        )


def with_words(widget: Any, words: str) -> dict[str, Any]:
    """A widget's output with a sentence for wherever it can't be shown."""
    bundle: dict[str, Any] = dict(widget._repr_mimebundle_())
    return bundle | {"text/html": f'<p class="note">{escaped(words)}</p>', "text/plain": words}


def reachable(widget: Any) -> None:
    """Lets a control be heard while a cell runs; to be called after each change that the program makes to it.

    A front end sends what is pressed to a subshell, which is free while a cell runs. ipykernel from 7.4 on sends it to the
    shell instead from which the control was last written to: the busy one. Without that note the front end's choice holds.

    Source: ipykernel 7.4.0 `comm/comm.py` (`_reply_subshell_for`), `kernelbase.py` (`shell_channel_thread_main`).
    """
    comm = getattr(widget, "comm", None)
    if comm is not None:
        vars(comm).pop("_reply_subshell_id", None)


def _box(made: Any, control: Control) -> Any:
    common = {
        "description": control.label,
        "style": {"description_width": "13em"},
        "layout": made.Layout(width="46em"),
        "tooltip": control.help or control.label,
    }
    if control.kind == "choice":
        return made.Dropdown(options=list(control.options), value=control.value, **common)
    if control.kind == "slider":
        return made.FloatSlider(
            value=control.value, min=control.low, max=control.high, step=control.step, readout_format=".3f", **common
        )
    if control.kind in ("whole", "number"):
        kind = made.BoundedIntText if control.kind == "whole" else made.BoundedFloatText
        return kind(value=control.value, min=control.low, max=control.high, step=control.step, **common)
    kind = made.Textarea if control.kind == "lines" else made.Text
    return kind(value=str(control.value), continuous_update=True, **common)
