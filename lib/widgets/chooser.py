"""The backend and flag chooser: the launch line and its audit, as one types.

The line is `launch_argv`'s, as for every launch of the workbook; what argparse and the known rules of the version would
say is `check_arguments`'; the findings are `lib.audit.rules.audit`'s on that line and the checkpoint.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from lib.audit.evidence import check_argument, facts_of_checkpoint, flags_facts, gather, gpu_fact, version_fact
from lib.audit.rules import AuditReport, audit
from lib.errors import BadInput, WorkbookError
from lib.model.facts import Checkpoint
from lib.report.tables import Table, table
from lib.results import NotebookRun, ServerHandle
from lib.server.flags import Gpu, Launch, check_arguments, known_versions, launch_argv, nearest_release
from lib.server.redact import redact_object, redact_text
from lib.widgets.panel import TEXT_CHARACTERS, Control, Panel, Values, View, is_live
from lib.widgets.pictures import audit_answers
from lib.widgets.sources import checkpoint_of
from lib.widgets.typed import typed_flags

TITLE = "Backend and flag chooser"
#: Flags with a control of their own; every other one is typed.
CHOSEN = ("attention_backend", "prefill_attention_backend", "decode_attention_backend", "moe_runner_backend",
          "sampling_backend", "kv_cache_dtype", "speculative_algorithm")  # fmt: skip
#: What a pasted line says beside flags, and what `launch_argv` calls it.
PASTED = {"model_path": "model_path", "model": "model_path", "served_model_name": "served_model_name",
          "host": "host", "port": "port"}  # fmt: skip
UNSET = "(not given)"
GPUS = ("(not said)", "RTX PRO 6000", "B200", "H200", "H100", "A100")


def flag_chooser(run: NotebookRun) -> Panel:
    """Shows the chooser, first at the profile's own flags; line and findings change as one types or chooses."""
    base = run.profile.server
    handle = run.server("chooser", strict=False)
    checkpoint, _ = checkpoint_of(run, handle)
    version = _version(run, handle)
    own = dict(base.flags)
    typed = " ".join(_typed(name, value) for name, value in own.items() if name not in CHOSEN)
    environment = " ".join(f"{name}={shlex.quote(str(value))}" for name, value in base.environment.items())
    text = redact_text(f"{environment} {typed}".strip())
    controls = controls_of(version, own, text)
    model = str(base.model or "MODEL")

    def shown(values: Values) -> View:
        return chosen(values, model, base.served_model_name, checkpoint)

    panel = Panel(TITLE, controls, shown, is_live(run))
    panel.display()
    return panel


def _version(run: NotebookRun, handle: ServerHandle) -> str:
    """The version that this notebook's launches had, else the configured one's, else the newest that is known."""
    launched = run.launch_records()
    try:
        return launched[-1].sglang_version if launched else run.version(handle)
    except WorkbookError:
        return known_versions()[-1]


def controls_of(version: str, flags: Mapping[str, Any], typed: str) -> list[Control]:
    """The chooser's controls: the release, the GPU, flags with choices, and a field for the rest."""
    release, _ = nearest_release(version)
    versions = tuple(dict.fromkeys([*reversed(known_versions()), version]))
    controls = [
        Control("version", "SGLang", version, "choice", versions),
        Control("gpu", "GPU", GPUS[0], "choice", GPUS, help="rules that need to know the GPU are silent without it"),
    ]
    for name in CHOSEN:
        form = release.find(name)
        choices = list(form.choices) if form and form.choices else []
        value = str(flags.get(name, UNSET))
        options = tuple(dict.fromkeys([UNSET, *map(str, choices), value]))
        controls.append(Control(name, name, value, "choice", options))
    controls.append(Control("typed", "all other flags, environment", typed, "lines", help="NAME=value --flag value"))
    return controls


def wanted_flags(values: Values) -> tuple[dict[str, Any], dict[str, str]]:
    """The flags that the controls mean together; one that is chosen and typed is a mistake.

    Raises:
        BadInput: the typed text, or a flag given twice.
    """
    text = str(values["typed"])
    if len(text) > TEXT_CHARACTERS:
        raise BadInput(f"expected at most {TEXT_CHARACTERS:,} characters", f"{len(text):,}", "shorten the line")
    typed, environment = typed_flags(text, values["version"])
    flags = {name: values[name] for name in CHOSEN if values.get(name, UNSET) != UNSET}
    twice = [name for name in typed if name.replace("-", "_") in flags]
    if twice:
        raise BadInput("expected each flag once", f"{', '.join(twice)} chosen and typed", "take it out of one of them")
    return flags | typed, environment


def chosen(values: Values, model: str, served_name: str | None, checkpoint: Checkpoint | None) -> View:
    """The launch line for the controls, what its version says to it, and its audit.

    Raises:
        BadInput: what `launch_argv` or the audit's readers refuse, in one message.
    """
    flags, environment = wanted_flags(values)
    version = values["version"]
    pasted = {name: flags.pop(name) for name in [*flags] if name.replace("-", "_") in PASTED}
    named = {PASTED[name.replace("-", "_")]: value for name, value in pasted.items()}
    if named.get("model_path", model) != model:
        model, checkpoint = str(named["model_path"]), None  # another model: what its files say is not known here
    config = {
        "model_path": model,
        "served_model_name": named.get("served_model_name", served_name),
        "flags": flags,
        "environment": environment,
    }
    launch = launch_argv(config, version, named.get("host", "127.0.0.1"), named.get("port", 30000))
    line = launch_line(launch)
    report = audited(line, version, values["gpu"], checkpoint)
    told = check_arguments(config, version, _gpu(values["gpu"], flags))
    known = [{"note": f"{one.outcome.replace('_', ' ')}: {one.reason}", "source": one.source} for one in told]
    sentence = f"SGLang {version} would take this line. Does it lower accuracy? {report.answer}"
    if known:
        sentence = f"SGLang {version} would not do what this line asks: {'; '.join(one['note'] for one in known)}. {report.answer}"
    notes = [*({"note": note.text, "source": note.source} for note in launch.notes), *known]
    tables = (
        table([{"launch line": line}], caption="What would be launched"),
        finding_table(report),
        table(notes, caption="What this version makes of it", empty="nothing to note"),
    )
    return View(sentence, tables, audit_answers(report))


def launch_line(launch: Launch) -> str:
    """The whole command, each word quoted for a shell, without secrets."""
    words = [f"{name}={shlex.quote(value)}" for name, value in launch.environment.items()]
    return redact_text(" ".join([*words, "python", "-m", "sglang.launch_server", *map(shlex.quote, launch.argv)]))


def audited(line: str, version: str, gpu: str, checkpoint: Checkpoint | None) -> AuditReport:
    """The accuracy audit of a launch line with its checkpoint."""
    groups = [flags_facts(line), [version_fact(version)]]
    for fact in groups[0]:
        check_argument(fact.name, fact.value)
    if checkpoint is not None:
        groups.append(facts_of_checkpoint(checkpoint, "checkpoint"))
    if gpu != GPUS[0]:
        groups.append([gpu_fact(gpu)])
    made: AuditReport = redact_object(audit(redact_object(gather(*groups)), check_fixes=False))
    return made


def finding_table(report: AuditReport) -> Table:
    """The audit's findings, gravest first, then the accepted losses."""
    rows = [
        {"level": one.level, "rule": one.id, "finding": f"{one.title}: {one.what}", "effect": one.effect, "do": one.do}
        for one in report.findings
    ]
    rows += [
        {
            "level": "accepted",
            "rule": one.id,
            "finding": f"{one.title}: {one.what}",
            "effect": "comes with the checkpoint",
            "do": one.instead,
        }
        for one in report.accepted_losses
    ]
    return table(rows, caption="Accuracy audit of this line", empty="no finding")


def _gpu(name: str, flags: Mapping[str, Any]) -> Gpu | None:
    if str(flags.get("device")) == "cpu":
        return Gpu(sm=None, name="cpu")
    if name == GPUS[0]:
        return None
    sm = str(gpu_fact(name).value)
    return Gpu(sm=int(sm.replace(".", "")), name=name)


def _typed(name: str, value: Any) -> str:
    flag = "--" + name.replace("_", "-")
    if value is True:
        return flag
    if value in (None, False):
        return ""
    if isinstance(value, (list, tuple)):
        return " ".join([flag, *(shlex.quote(str(one)) for one in value)])
    return f"{flag} {shlex.quote(str(value))}"
