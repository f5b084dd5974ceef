"""A run's folder as pages that open from a file share: an index with the verdicts first, and one page a notebook.

Everything shown comes from `result.json`, `NN.result.json` and the executed notebooks; no number is typed in.
What is missing, invalid or of another run is shown as such, never left out.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from pydantic import BaseModel, ValidationError

from lib.errors import UnreadableFile
from lib.migrations import NewerVersion, up_to_date
from lib.records import Measured, NotebookResult, NotebookState, Provenance, RunResult, ServerIdentity, Status, Verdict
from lib.report.clean import anchors_of, first_heading
from lib.report.html import existing_below, redactor, render_notebook, write_page
from lib.report.provenance import KEY_FLAGS
from lib.report.single import build_report
from lib.report.style import POLICY, css
from lib.report.tables import MARKS, Cell, Exists, Table, prediction_table, table, verdict_table
from lib.report.text import anchor, escaped, relative_href, shortened, visible_text

#: All pages of a run together stay below this; the index gets its share first.
SITE_BYTES = 2_000_000
INDEX_BYTES = 400_000
PAGE_OVERHEAD_BYTES = 30_000


_NUMBER = re.compile(r"(\d\d)(?=[._-]|$)")


@dataclass
class Notebook:
    """One notebook of a run as the index shows it."""

    number: str
    state: str
    problems: list[str] = field(default_factory=list)
    result: NotebookResult | None = None
    ipynb: Path | None = None
    page: str | None = None
    anchors: set[str] = field(default_factory=set)
    seconds: float | None = None
    taken_from: str | None = None

    heading: str = ""

    @property
    def title(self) -> str:
        """What it is called: by its result, else by its page."""
        return self.result.title if self.result else self.heading or "(no valid result)"


def _read_record(path: Path, kind: type[BaseModel]) -> tuple[Any, str | None]:
    """A record from a file, redacted, or what is wrong with it."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None, f"expected {path.name}, found no such file"
    except (OSError, UnicodeError) as error:
        return None, f"expected {path.name}, found an unreadable file: {error}"
    try:
        data = up_to_date(json.loads(text), "run" if kind is RunResult else "notebook")
        return kind.model_validate(redactor("redact_object")(data)), None
    except ValidationError as error:
        faults = [f"{'.'.join(str(part) for part in e['loc']) or 'record'}: {e['msg']}" for e in error.errors()[:5]]
        return None, f"{path.name} is not valid ({error.error_count()} faults): " + "; ".join(faults)
    except NewerVersion as error:
        return None, f"{path.name}: {error}"
    except (ValueError, RecursionError) as error:
        return None, f"{path.name} is not JSON: {error}"


def _found_numbers(folder: Path) -> list[str]:
    """Numbers of notebooks of which any file lies in the folder."""
    names = [path.name for pattern in ("*.ipynb", "*.result.json") for path in folder.glob(pattern)]
    return sorted({match[1] for name in names if (match := _NUMBER.match(name))})


def _file_of(folder: Path, named: str | None, number: str, suffix: str) -> Path | None:
    """A notebook's file: the one that the index names, else the one that begins with its number."""
    if named and relative_href(named) and (folder / named).is_file():
        return folder / named
    exact = folder / f"{number}{suffix}"
    if exact.is_file():
        return exact
    return next((path for path in sorted(folder.glob(f"{number}*{suffix}")) if path.is_file()), None)


def _notebook(folder: Path, number: str, state: NotebookState | None, run: RunResult | None) -> Notebook:
    one = Notebook(number, state.state if state else "done", seconds=state.seconds if state else None)
    one.taken_from = state.taken_from if state else None
    one.ipynb = _file_of(folder, state.ipynb if state else None, number, ".ipynb")
    if state and state.error:
        one.problems.append(state.error)
    file = _file_of(folder, state.result if state else None, number, ".result.json")
    if one.state in ("not_run", "interrupted") and file is None:
        return one
    one.result, problem = _read_record(file or folder / f"{number}.result.json", NotebookResult)
    if one.result is not None:
        if not one.result.notebook.startswith(number[:2]):
            problem = f"{file.name if file else number} is the result of notebook {one.result.notebook}"
        elif run is not None and one.result.run_id != (_origin(one.taken_from) or run.run_id):
            problem = f"{file.name if file else number} belongs to run {one.result.run_id}, not to {run.run_id}"
        if problem:
            one.result = None
    if problem:
        one.state = "failed"
        if file is not None or not one.problems:
            one.problems.append(problem)
    return one


def _origin(taken_from: str | None) -> str | None:
    """The id of the run that a notebook was taken over from."""
    return taken_from.rpartition("/")[2] if taken_from else None


def read_run(folder: Path) -> tuple[RunResult | None, str | None, list[Notebook]]:
    """Return a run's index (or None and why), and its notebooks in order."""
    run, problem = _read_record(folder / "result.json", RunResult)
    states = {state.notebook[:2]: state for state in run.notebooks} if run else {}
    numbers = sorted({*states, *_found_numbers(folder)})
    return run, problem, [_notebook(folder, number, states.get(number), run) for number in numbers]


def _render(folder: Path, notebooks: Sequence[Notebook], page_bytes: int, profile: str) -> int:
    """Write the notebooks' pages; returns their size together."""
    total = 0
    for one in notebooks:
        if one.ipynb is None:
            continue
        name = f"{one.number}.html"
        problems = "".join(f"<div class='banner'>{_problem(text)}</div>" for text in one.problems)
        try:
            path = render_notebook(
                one.ipynb,
                folder / name,
                f"{one.number} {one.result.title}" if one.result else f"Notebook {one.number}",
                up=("index.html", f"Report of {profile}"),
                banner=problems,
                page_bytes=page_bytes,
            )
        except UnreadableFile as error:
            text = str(error).replace(str(folder), ".")
            if text not in one.problems:
                one.problems.append(text)
            one.state = "failed"
            (folder / name).unlink(missing_ok=True)
            continue
        one.page = name
        text = path.read_text(encoding="utf-8")
        one.anchors = anchors_of(text)
        one.heading = first_heading(text)
        total += len(text.encode())
    return total


def _problem(text: str) -> Markup:
    """An error's text for a banner: its first line plain, all of it below where it is longer."""
    shown = visible_text(redactor("redact_text")(text)).strip()
    first, _, rest = shown.partition("\n")
    markup = f"<b>{escaped(shortened(first, 600))}</b>"
    if rest:
        markup += (
            f"<details class='fold'><summary>all of it</summary><pre>{escaped(shortened(shown, 4000))}</pre></details>"
        )
    return Markup(markup)  # noqa: S704


def _html(shown: Table) -> Markup:
    return Markup(shown._repr_html_())  # noqa: S704


def _link(path: str, text: str | None = None) -> Cell:
    href = relative_href(path)
    label = escaped(text or path)
    return Cell(path, f'<a class="evidence" href="{escaped(href)}">{label}</a>' if href else label)


def _claim_link(one: Notebook, verdict: Verdict) -> str | None:
    if one.page is None:
        return None
    for name in (anchor("verdict", verdict.id), "verdict"):
        if name in one.anchors:
            return f"{one.page}#{name}"
    return one.page


def _servers(notebooks: Iterable[Notebook]) -> tuple[list[ServerIdentity], dict[str, list[str]]]:
    servers: dict[str, ServerIdentity] = {}
    used: dict[str, list[str]] = {}
    for one in notebooks:
        for server in one.result.servers if one.result else []:
            servers.setdefault(server.launch_id, server)
            used.setdefault(server.launch_id, []).append(one.number)
    return list(servers.values()), used


def _model_text(server: ServerIdentity) -> str:
    name = server.served_model_name or server.model.get("name") or server.model.get("path") or "unknown"
    mark = server.model.get("sha256") or server.model.get("fingerprint")
    return f"{name} ({str(mark)[:12]})" if mark else str(name)


def _server_table(servers: Sequence[ServerIdentity], used: dict[str, list[str]]) -> Table:
    rows = []
    for server in servers:
        flags = [f"{key}={server.resolved_args[key]}" for key in KEY_FLAGS if server.resolved_args.get(key) is not None]
        rows.append(
            {
                "launch": server.launch_id,
                "notebooks": ", ".join(used[server.launch_id]),
                "origin": server.origin,
                "SGLang": server.sglang_version or Measured(value=None, reason="not known"),
                "model": _model_text(server),
                "resolved arguments": ", ".join(flags) or Measured(value=None, reason="the server never answered"),
                "ready after": Measured(value=server.ready_s, unit="s")
                if server.ready_s is not None
                else Measured(value=None, reason="not ready, or not launched here"),
                "fingerprint": server.fingerprint[:16] or Measured(value=None, reason="none"),
            }
        )
    return table(rows, empty="no server was launched or attached")


def _facts(pairs: Iterable[tuple[str, Any]]) -> Markup:
    """Terms and what they are, as a list."""
    lines = []
    for name, value in pairs:
        if isinstance(value, (dict, list)):
            value = json.dumps(value, ensure_ascii=False, sort_keys=True) if value else "none"
        lines.append(f"<dt>{escaped(name)}</dt><dd>{escaped(shortened(str(value), 1500))}</dd>")
    return Markup(f'<dl class="facts">{"".join(lines)}</dl>')  # noqa: S704


def _server_detail(server: ServerIdentity) -> dict[str, Any]:
    pairs: list[tuple[str, Any]] = [
        ("address", server.base_url or "none"),
        ("process", f"pid {server.pid}, started {server.started or 'unknown'}, boot {server.boot_id or 'unknown'}"),
        ("environment", server.environment),
        ("model", server.model),
        ("host", server.host),
        ("fingerprint", server.fingerprint or "none"),
        ("resolved arguments", f"{len(server.resolved_args)}, all of them in the notebook’s result file"),
        *((f"check {index}", check) for index, check in enumerate(server.checks[:8], 1)),
    ]
    if len(server.checks) > 8:
        pairs.append(("more checks", f"{len(server.checks) - 8}, in the notebook’s result file"))
    argv = visible_text(shortened(shlex.join(server.argv), 4000)) or "(no command line: not launched here)"
    return {"launch_id": visible_text(server.launch_id), "argv": argv, "facts": _facts(pairs)}


def _stack(notebooks: Sequence[Notebook]) -> Table:
    """Provenance, one row for all notebooks that share it."""
    groups: dict[str, tuple[Provenance, list[str]]] = {}
    for one in notebooks:
        if one.result:
            provenance = one.result.provenance
            key = provenance.model_dump_json(exclude={"params", "params_sha256"})
            groups.setdefault(key, (provenance, []))[1].append(one.number)
    rows = []
    for provenance, numbers in groups.values():
        if provenance.commit is None:
            commit = "not a git checkout"
        else:
            changed = {True: ", with local changes", False: "", None: ", local changes unknown"}[provenance.dirty]
            commit = provenance.commit[:12] + changed
        host = {key: value for key, value in provenance.host.items() if value not in (None, "", [], {})}
        rows.append(
            {
                "notebooks": ", ".join(numbers),
                "workbook": provenance.workbook_version,
                "commit": commit,
                "Python": provenance.python,
                "packages": provenance.packages_sha256[:16],
                "host": ", ".join(f"{key}={value}" for key, value in host.items()),
            }
        )
    caption = "The notebooks of this run don’t share one stack." if len(rows) > 1 else ""
    return table(rows, caption=caption, empty="no notebook left a valid result")


def _seconds(value: float | None, reason: str) -> Measured:
    return Measured(value=value, unit="s") if value is not None else Measured(value=None, reason=reason)


def _times(run: RunResult | None, notebooks: Sequence[Notebook]) -> Table:
    rows = []

    def row(name: str, total: float | None, server: float | None) -> None:
        own: Measured = Measured(value=None, reason="not known")
        if total is not None and server is not None:
            own = _seconds(total - server, "")
            if total < server:
                own = Measured(value=None, reason="measured partly in an earlier session of this run")
        rows.append(
            {
                "notebook": name,
                "total": _seconds(total, "not recorded"),
                "inside a server": _seconds(server, "not recorded"),
                "the workbook’s own": own,
            }
        )

    for one in notebooks:
        if one.result:
            row(one.number, one.seconds if one.seconds is not None else one.result.seconds, one.result.server_seconds)
        elif one.seconds is not None:
            row(one.number, one.seconds, None)
    if run is not None:
        row("the whole run", run.seconds, run.server_seconds)
    return table(rows, empty="no times were recorded")


def _state_text(run: RunResult | None, problem: str | None) -> str:
    if run is None:
        return f"without a run index ({problem})"
    if run.state == "running":
        return "still running, or ended without closing its index"
    return run.state


def _counts(notebooks: Iterable[Notebook]) -> list[tuple[str, str, int]]:
    counted = Counter(verdict.status for one in notebooks if one.result for verdict in one.result.verdicts)
    return [(status.value, MARKS[status], counted[status]) for status in Status if counted[status]]


def _files(folder: Path, notebooks: Sequence[Notebook]) -> tuple[Table, str]:
    """The run's files, and how many raw ones there are."""
    rows: list[dict[str, Any]] = []
    for one in notebooks:
        result = _file_of(folder, None, one.number, ".result.json")
        rows.append(
            {
                "notebook": one.number,
                "page": _link(one.page) if one.page else None,
                "executed notebook": _link(one.ipynb.name) if one.ipynb else None,
                "record": _link(result.name) if result else None,
            }
        )
    run: dict[str, Any] = {"notebook": "the whole run", "page": _link("index.html"), "executed notebook": None}
    rows.append({**run, "record": _link("result.json") if (folder / "result.json").is_file() else None})
    rows.append(
        {"notebook": "all of it in one file", "page": _link("report.html"), "executed notebook": None, "record": None}
    )
    raw = folder / "raw"
    if raw.is_dir():
        count = sum(1 for path in raw.rglob("*") if path.is_file())
        return table(rows), f"{count:,}"
    return table(rows), ""


def _index(
    folder: Path, run: RunResult | None, problem: str | None, notebooks: Sequence[Notebook], exists: Exists
) -> str:
    servers, used = _servers(notebooks)
    results = [one.result for one in notebooks if one.result]
    profile = run.profile if run else (results[0].profile if results else folder.parent.name or "unknown profile")
    run_id = run.run_id if run else (results[0].run_id if results else folder.name)
    notes = [
        Markup(f'<b>Notebook {escaped(one.number)} {escaped(one.state)}.</b> <a href="#notebook-{one.number}">Why</a>')  # noqa: S704
        for one in notebooks
        if one.state in ("failed", "interrupted")
    ]
    if run is None:
        notes.insert(0, _problem(problem or "result.json is missing"))
    elif run.state in ("running", "interrupted"):
        notes.insert(0, _problem(f"This run is {_state_text(run, None)}: what follows is what it has so far."))
    if not notebooks:
        notes.append(_problem("No notebook of this run left a file."))
    shown = []
    for one in notebooks:
        verdicts = one.result.verdicts if one.result else []
        made = verdict_table(verdicts, exists=exists, href=lambda verdict, one=one: _claim_link(one, verdict))  # type: ignore[misc]
        shown.append(
            {
                "number": one.number,
                "slug": one.number,
                "title": visible_text(one.title),
                "page": one.page,
                "state": one.state.replace("_", " "),
                "badge": "fail" if one.state in ("failed", "interrupted") else "unsupported",
                "question": visible_text(one.result.question) if one.result else "",
                "recommendation": visible_text(one.result.recommendation) if one.result else "",
                "problems": [_problem(text) for text in one.problems],
                "verdicts": _html(_prefixed(made, one.number)) if one.result else "",
            }
        )
    skipped = [(one.number, text) for one in notebooks for text in (one.result.skipped if one.result else [])]
    skipped += [(one.number, "the notebook was not run") for one in notebooks if one.state == "not_run"]
    unchanged = "not measured again, nothing that it depends on has changed: taken over from"
    skipped += [(one.number, f"{unchanged} {one.taken_from}") for one in notebooks if one.taken_from]
    predictions = [
        _html(prediction_table(one.result.predictions, caption=f"{one.number} {one.title}", anchors=False))
        for one in notebooks
        if one.result and one.result.predictions
    ]
    parameters = [
        {
            "number": one.number,
            "text": visible_text(
                shortened(json.dumps(one.result.provenance.params, indent=1, ensure_ascii=False), 6000)
            ),
        }
        for one in notebooks
        if one.result
    ]
    sections = (
        ("verdicts", "verdicts"),
        ("servers", "what ran on what"),
        ("stack", "stack"),
        ("times", "times"),
        ("predictions", "predictions"),
        ("skipped", "not done"),
        ("files", "files"),
    )
    files, raw_files = _files(folder, notebooks)
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True)
    return environment.get_template("index.html.j2").render(
        title=visible_text(f"{profile}: {run_id}"),
        css=Markup(css()),  # noqa: S704
        policy=Markup(POLICY),  # noqa: S704
        profile=visible_text(profile),
        run_id=visible_text(run_id),
        state=visible_text(_state_text(run, problem)),
        started=visible_text(run.started) if run else "",
        ended=visible_text(run.ended or "") if run else "",
        counts=_counts(notebooks),
        notes=notes,
        sections=sections,
        notebooks=shown,
        servers=_html(_server_table(servers, used)),
        server_details=[_server_detail(server) for server in servers],
        stack=_html(_stack(notebooks)),
        parameters=parameters,
        times=_html(_times(run, notebooks)),
        predictions=predictions,
        skipped=_html(
            table(
                [{"notebook": number, "what and why": text} for number, text in skipped],
                empty="nothing was left out",
            )
        ),
        files=_html(files),
        raw_files=raw_files,
    )


def _prefixed(made: Table, number: str) -> Table:
    """The table with ids of its own on the index, where several notebooks may use the same verdict id."""
    return Table(
        made.headings, made.rows, made.caption, tuple(f"{number}-{one}" for one in made.ids), made.name, made.empty
    )


def build_site(run_dir: Path | str) -> Path:
    """Write a run's pages into its folder and return the path of `index.html`.

    Pages go to temporary names first and are renamed; all together stay below 2 MB: what is too large for a page is
    named there and left in the notebook file. Works on a run that failed, was interrupted or lost files, and says so.

    Args:
        run_dir: the folder with `result.json`, `NN.result.json`, `NN.ipynb` and `raw/`.

    Raises:
        UnreadableFile: `run_dir` is not a folder.
    """
    folder = Path(run_dir)
    if not folder.is_dir():
        raise UnreadableFile(f"the folder of a run at {folder}", "no such folder", "name a folder below outputs/")
    run, problem, notebooks = read_run(folder)
    profile = run.profile if run else folder.parent.name
    exists = existing_below(folder)
    page_bytes = (SITE_BYTES - INDEX_BYTES) // max(1, len(notebooks)) - PAGE_OVERHEAD_BYTES
    text = ""
    for _ in range(4):
        total = _render(folder, notebooks, page_bytes, profile)
        text = _index(folder, run, problem, notebooks, exists)
        if total + len(text.encode("utf-8", "replace")) <= SITE_BYTES:
            break
        page_bytes //= 2
    index = write_page(folder / "index.html", text)
    run_id = run.run_id if run else folder.name
    build_report(folder, [one.number for one in notebooks if one.page], f"{profile}: {run_id}")
    return index
