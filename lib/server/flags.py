"""One server configuration as argument list and environment of a given SGLang release, and what that release refuses.

SGLang renames and removes flags from release to release. The table `flags_by_version.json` (made by `extract_flags.py`
from the published wheels) says for each release which flags there are; the tables below say what the parser does not:
values that changed their name, environment variables that changed their meaning, combinations that the parser accepts
and the server refuses afterwards. The sweep, the benchmark and the unit file all call `launch_argv`: what was measured
is what is deployed.

Everything here is text in, text out: the packaged table is read through `importlib.resources`, nothing is run.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from importlib import resources
from typing import Any

from lib.errors import BadParams
from lib.records import Record

TABLE = "flags_by_version.json"
CONFIG_KEYS = ("model_path", "served_model_name", "flags", "environment")
#: set by the launcher or by the configuration itself, never by `flags`
OWNED = {
    "model_path": "model_path of the server configuration",
    "served_model_name": "served_model_name of the server configuration",
    "host": "the launcher (host and port are always explicit)",
    "port": "the launcher (host and port are always explicit)",
    "config": "nobody: the flags of a second file would be invisible here; write them under flags",
}


class Note(Record):
    """Something that a reader should know about a launch: a translation, a deprecation, a flag without effect."""

    kind: str  # renamed | value_renamed | deprecated | ignored | default | version | environment
    text: str
    source: str


class Launch(Record):
    """What follows `python -m sglang.launch_server` (or `sglang serve`), and what the environment must hold.

    `fields` are the values that were asked for by the names of `ServerArgs` (tp_size, fp4_gemm_runner_backend), as the
    parser holds them: what an identity check compares with `/server_info`. SGLang resolves some of them further (NEXTN
    becomes EAGLE), and it repeats some that it does not honour.
    """

    argv: list[str]
    environment: dict[str, str]
    notes: list[Note]
    fields: dict[str, Any]
    sglang_version: str
    table_version: str


class PredictedFailure(Record):
    """A launch that need not be tried: what SGLang would do, known from its source or from a recorded run.

    `exit_code` is the launcher's (2 argparse, 1 argument check, -9 when the scheduler dies and the launcher kills its
    own tree; None: it goes on serving). `pattern` is a regular expression that a line of the server's output matches.
    """

    id: str
    outcome: str  # crashes | unsupported_here | silently_ignored
    exit_code: int | None
    pattern: str
    reason: str
    source: str
    since: str
    until: str | None


class Gpu(Record):
    """The device that a launch is meant for: `sm` 90 on H200, 100 on B200, 120 on RTX PRO 6000, None without a GPU."""

    sm: int | None
    name: str = ""
    amx: bool | None = None  # the CPU's AMX, where the server runs on the CPU


class ModelFacts(Record):
    """What the rules need to know about a checkpoint; None is unknown, and then no rule that needs it speaks."""

    hybrid: bool | None = None  # linear-attention or Mamba layers with a radix cache of states (Qwen3.5, Nemotron-H)
    nvfp4_dense: bool | None = None  # NVFP4 in dense linear layers
    nvfp4_experts: bool | None = None  # NVFP4 in routed experts


# --------------------------------------------------------------------------------------------------------- versions


VERSION = r"v?(\d+)\.(\d+)\.(\d+)(?:\.?(post|rc|dev|a|b)(\d+))?(?:\.dev(\d+))?(?:\+[A-Za-z0-9.]+)?"


@dataclass(frozen=True, order=True)
class Version:
    """An SGLang version as something that can be compared; a development build sorts before its release."""

    release: tuple[int, int, int]
    stage: int  # -2 dev, -1 rc, 0 release, 1 post
    number: int
    text: str = field(compare=False)

    @classmethod
    def of(cls, text: str) -> Version:
        """Version from its text; raises BadParams for anything else.

        >>> Version.of("0.5.15.post1") > Version.of("0.5.15") > Version.of("0.5.15rc1")
        True
        """
        match = re.fullmatch(VERSION, text.strip()) if isinstance(text, str) else None
        if match is None:
            raise BadParams("an SGLang version like 0.5.15.post1", repr(text), "ask the server: /server_info, version")
        stage = {None: 0, "post": 1, "rc": -1, "a": -1, "b": -1, "dev": -2}[match.group(4)]
        if match.group(6) and stage == 0:
            stage = -2
        return cls((int(match[1]), int(match[2]), int(match[3])), stage, int(match.group(5) or 0), text.strip())


@dataclass(frozen=True)
class Form:
    """How one release spells and reads one flag."""

    flag: str
    also: tuple[str, ...]
    dest: str
    action: str
    type: str | None
    nargs: str | int | None
    choices: tuple[Any, ...] | None
    default: Any
    const: Any
    required: bool
    use: str | None
    error: str | None
    unresolved: tuple[str, ...]

    @property
    def spellings(self) -> tuple[str, ...]:
        """All spellings, the one that is used first."""
        return (self.flag, *self.also)

    @property
    def is_deprecated(self) -> bool:
        """True when the release still reads the flag, but names another."""
        return self.action.startswith("deprecated") or self.action == "ignored"


@dataclass(frozen=True)
class Release:
    """The flags of one release, by spelling and by field name (both with underscores)."""

    version: str
    forms: dict[str, Form]
    by_name: dict[str, Form]

    def find(self, name: str) -> Form | None:
        """The flag that has this spelling or fills this field; None if there is none."""
        return self.by_name.get(_plain(name))

    def nearest(self, name: str) -> list[str]:
        """Names of this release that look like `name`."""
        return difflib.get_close_matches(_plain(name), self.by_name, n=3, cutoff=0.6)


SECRET = re.compile(r"(^|_)(api_?key|key|secret|password|passwd|credentials?)($|_)|(^|_)token$", re.IGNORECASE)


def _shown(key: str, value: Any) -> str:
    """A value for a message; that of a flag whose name says that it is a secret stays out of it."""
    if SECRET.search(_plain(key)):
        return f"a {type(value).__name__} (not shown)"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _plain(name: str) -> str:
    return name.strip().lstrip("-").replace("-", "_")


@cache
def _table() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(resources.files(__package__).joinpath(TABLE).read_text("utf-8"))
    return loaded


def known_versions() -> tuple[str, ...]:
    """The SGLang releases that the table was made from, oldest first."""
    return tuple(_table()["versions"])


@cache
def _known() -> tuple[Version, ...]:
    return tuple(Version.of(v) for v in known_versions())


@cache
def release(version: str) -> Release:
    """Flags of exactly this known release."""
    table = _table()
    index = {v: i for i, v in enumerate(table["versions"])}
    at = index[version]
    forms: dict[str, Form] = {}
    for flag, rows in table["flags"].items():
        for row in rows:
            if index[row["since"]] <= at <= index[row["until"]]:
                choices = row.get("choices")
                forms[flag] = Form(
                    flag=flag,
                    also=tuple(row.get("also", ())),
                    dest=row["dest"],
                    action=row["action"],
                    type=row.get("type"),
                    nargs=row.get("nargs"),
                    choices=tuple(table["choices"][choices]) if choices is not None else None,
                    default=row.get("default"),
                    const=row.get("const"),
                    required=row.get("required", False),
                    use=row.get("use"),
                    error=row.get("error"),
                    unresolved=tuple(row.get("unresolved", ())),
                )
    by_name: dict[str, Form] = {}
    for form in sorted(forms.values(), key=lambda f: f.is_deprecated):
        by_name.setdefault(form.dest, form)
    for form in forms.values():
        for spelling in form.spellings:
            by_name[_plain(spelling)] = form
    return Release(version, forms, by_name)


def nearest_release(version: str) -> tuple[Release, Note | None]:
    """The release of the table that stands for `version`: itself, or the nearest lower one with a note that says so.

    Raises:
        BadParams: the version is older than every known one, or not a version.
    """
    asked = Version.of(version)
    known = _known()
    lower = [v for v in known if v <= asked]
    if not lower:
        raise BadParams(
            f"an SGLang version from {known[0].text} on (flags of older ones are not known)",
            version,
            "use a newer SGLang, or add its wheel to the table with lib/server/extract_flags.py",
        )
    best = lower[-1]
    if best == asked:
        return release(best.text), None
    if asked > known[-1]:
        text = f"SGLang {version} is newer than the newest known release {best.text}, whose flags are assumed"
    else:
        text = f"SGLang {version} is not in the table; the flags of {best.text}, the nearest lower release, are assumed"
    return release(best.text), Note(kind="version", text=text, source=TABLE)


# ------------------------------------------------------------------------------------------ names and values that moved


@dataclass(frozen=True)
class Moved:
    """A flag that a release dropped, and what takes its place there (nothing is translated silently)."""

    name: str
    instead: str
    source: str


_CP_MODE = "cp_strategy (in-seq-split -> zigzag, round-robin-split -> interleave)"
_HELP = "0.5.15.post1 server_args.py, add_cli_args"
#: what replaced a removed flag where the table itself does not know (it knows every deprecated alias)
REPLACED: tuple[Moved, ...] = (
    Moved(
        "enable_nan_detection",
        "environment SGLANG_SPEC_NAN_DETECTION, later SGLANG_ENABLE_NAN_LOGITS_CHECK",
        "0.5.11 server_args.py; 0.5.23 environ.py",
    ),
    Moved("dsa_prefill_cp_mode", _CP_MODE, _HELP),
    Moved("nsa_prefill_cp_mode", _CP_MODE, _HELP),
    Moved("prefill_cp_mode", "cp_strategy (in-seq-split -> zigzag)", _HELP),
    Moved("enable_dsa_prefill_context_parallel", "enable_prefill_cp", _HELP),
    Moved("enable_nsa_prefill_context_parallel", "enable_prefill_cp", _HELP),
    Moved("enable_prefill_context_parallel", "enable_prefill_cp", _HELP),
    Moved(
        "enable_expert_distribution_metrics",
        "expert_balancedness_report_mode (off, server_log, prometheus, both)",
        "0.5.18 server_args.py, error_message",
    ),
    Moved("collect_tokens_histogram", "nothing: token histograms come with enable_metrics", _HELP),
)


@dataclass(frozen=True)
class SameValue:
    """Two spellings of one value of a flag; whichever the release knows is used."""

    dests: tuple[str, ...]
    values: tuple[str, ...]
    source: str


ATTENTION_DESTS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
_ALIASES = "0.5.15.post1 server_args.py, ATTENTION_BACKEND_CHOICES (deprecated aliases)"
SAME_VALUES: tuple[SameValue, ...] = (
    SameValue(
        ("kv_cache_dtype", "speculative_draft_kv_cache_dtype"),
        ("bf16", "bfloat16"),
        "0.5.11 model_runner.py configure_kv_cache_dtype",
    ),
    SameValue(ATTENTION_DESTS, ("dsa", "nsa"), _ALIASES),
    SameValue(ATTENTION_DESTS, ("dsv4", "compressed"), _ALIASES),
)


@dataclass(frozen=True)
class Variable:
    """What an environment variable does from one release to another."""

    name: str
    since: str
    until: str | None
    text: str
    source: str


VARIABLES: tuple[Variable, ...] = (
    Variable(
        "SGLANG_ENABLE_SPEC_V2",
        "0.5.10",
        "0.5.10.post1",
        "off by default in this release; 1 turns spec v2 and the overlap scheduler on",
        "0.5.10.post1 environ.py:442, server_args.py:3001",
    ),
    Variable(
        "SGLANG_ENABLE_SPEC_V2",
        "0.5.11",
        "0.5.12.post1",
        "on by default in this release; 0 means spec v1 without overlap",
        "0.5.11 environ.py:459, server_args.py:3469",
    ),
    Variable(
        "SGLANG_ENABLE_SPEC_V2",
        "0.5.13",
        "0.5.13.post1",
        "on by default in this release; 0 means the synchronous (non-overlap) spec v2",
        "0.5.13.post1 environ.py:620, arg_groups/speculative_hook.py:288",
    ),
    Variable(
        "SGLANG_ENABLE_SPEC_V2",
        "0.5.14",
        "0.5.20",
        "without effect: speculative decoding always runs v2, and a warning says so; "
        "disable_overlap_schedule selects the synchronous path",
        "0.5.15.post1 arg_groups/speculative_hook.py:75; recorded on 0.5.16",
    ),
    Variable(
        "SGLANG_ENABLE_SPEC_V2",
        "0.5.21",
        None,
        "without effect, and no line says so",
        "no file of 0.5.21, 0.5.22 and 0.5.23 names it",
    ),
)


@cache
def _within(version: str, since: str, until: str | None) -> bool:
    at = Version.of(version)
    return Version.of(since) <= at and (until is None or at <= Version.of(until))


@cache
def _same_flags() -> dict[str, frozenset[str]]:
    """Flag names that fill one field in some release (spelling, alias, deprecated alias): each name's whole family."""
    family: dict[str, set[str]] = {}

    def join(names: Iterable[str]) -> None:
        merged = set(names)
        for name in list(merged):
            merged |= family.get(name, set())
        for name in merged:
            family[name] = merged

    for version in known_versions():
        here = release(version)
        for form in here.forms.values():
            if form.action == "ignored":
                continue
            names = {_plain(s) for s in form.spellings}
            if form.is_deprecated:
                new = here.find((form.use or "").split("=")[0].split()[0]) if form.use else None
                # a deprecated name is the same flag only if it fills the same field with the same kind of value
                if form.action == "deprecated_const" or new is None or new.dest != form.dest or new is form:
                    names = {_plain(s) for s in form.spellings}
                else:
                    names |= {_plain(s) for s in new.spellings} | {form.dest}
            else:
                names.add(form.dest)
            join(names)
    return {name: frozenset(names) for name, names in family.items()}


@cache
def _fixed_values() -> dict[str, tuple[str, Any]]:
    """Old on-switches that stand for one value of a newer flag: name -> (that flag's field, value)."""
    found: dict[str, tuple[str, Any]] = {}
    for version in known_versions():
        for form in release(version).forms.values():
            if form.action == "deprecated_const" and form.choices is None:
                for spelling in form.spellings:
                    found[_plain(spelling)] = (form.dest, form.const)
    return found


@cache
def _releases_with(name: str) -> list[str]:
    return [v for v in known_versions() if release(v).find(name) is not None]


def _missing(name: str, here: Release) -> str:
    """Why `name` is no flag of this release, and what to write instead."""
    plain = _plain(name)
    held = _releases_with(plain)
    if held:
        when = (
            f"removed after {held[-1]}" if Version.of(held[-1]) < Version.of(here.version) else f"comes with {held[0]}"
        )
        instead = next((m.instead for m in REPLACED if m.name == plain), None)
        if instead is None:
            use = next((f.use for v in reversed(held) if (f := release(v).find(plain)) is not None and f.use), None)
            instead = use
        hint = f"; instead: {instead}" if instead else "; no replacement is known"
        if when.startswith("comes"):
            hint = ""
        return f"{name}: not a flag of SGLang {here.version} ({when}){hint}"
    near = here.nearest(plain)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    return f"{name}: no SGLang release has such a flag{hint}"


# ----------------------------------------------------------------------------------------------------------- argv


#: up to 0.5.13.post1 the parser's names are not those of ServerArgs (0.5.13.post1 server_args.py, from_cli_args)
_FIELDS = {
    "tensor_parallel_size": "tp_size",
    "pipeline_parallel_size": "pp_size",
    "data_parallel_size": "dp_size",
    "expert_parallel_size": "ep_size",
    "attention_context_parallel_size": "attn_cp_size",
    "moe_data_parallel_size": "moe_dp_size",
}


@dataclass
class _Asked:
    """One flag as asked, resolved for a release."""

    key: str
    form: Form
    value: Any


def launch_argv(config: Mapping[str, Any], sglang_version: str, host: str, port: int, *, strict: bool = True) -> Launch:
    """Argument list and environment that launch this configuration on this SGLang release.

    Flags that the release spells differently are translated, with a note; values are written so that argparse gives
    them back exactly. `None` leaves a flag at the release's default. Host and port are always explicit.

    Args:
        config: `model_path`, `served_model_name` (or None), `flags` (field or flag name -> value), `environment`.
        sglang_version: the release that will be launched, as in `/server_info`.
        host: address to listen on.
        port: 1 to 65535.
        strict: refuse unknown flags and values outside the release's choices. Without it they are passed as asked, for
            a trial that wants SGLang's own refusal, and a key that is written with its dashes (`--fp4-gemm-backend`)
            is passed untranslated; words that argparse could not give back are refused all the same.

    Returns:
        argv (without the program), environment (only what was asked), notes, and whose flags were used.

    Raises:
        BadParams: everything that is wrong with the configuration, in one message.

    Source: `ServerArgs.add_cli_args` of the release.

    Example:
        >>> launch_argv({"model_path": "m", "flags": {"tp_size": 2}}, "0.5.16", "127.0.0.1", 30000).argv
        ['--model-path', 'm', '--host', '127.0.0.1', '--port', '30000', '--tp-size', '2']
    """
    here, version_note = nearest_release(sglang_version)
    notes = [version_note] if version_note else []
    if not isinstance(config, Mapping):
        raise BadParams("a server configuration as a mapping", type(config).__name__, f"give {', '.join(CONFIG_KEYS)}")
    faults: list[str] = []
    argv: list[str] = []
    fields: dict[str, Any] = {}
    faults += [
        f"{k}: not part of a server configuration{_near(str(k), CONFIG_KEYS)}" for k in config if k not in CONFIG_KEYS
    ]
    flags = _mapping(config.get("flags"), "flags", faults)
    environment = _environment(_mapping(config.get("environment"), "environment", faults), here, notes, faults)
    for name, value, needed in (
        ("model_path", config.get("model_path"), True),
        ("served_model_name", config.get("served_model_name"), False),
        ("host", host, True),
        ("port", port, True),
    ):
        if value is None and not needed:
            continue
        if name != "port" and not (isinstance(value, str) and value):
            faults.append(f"{name}: text is needed, found {_shown(name, value)}")
            continue
        if name == "port" and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65535):
            faults.append(f"port: a number from 1 to 65535 is needed, found {value!r}")
            continue
        argv += _words(here.by_name[name], value, name, faults)
        fields[name] = value
    for asked in _resolved(flags, here, notes, faults, strict=strict):
        if isinstance(asked, _Asked):
            value = _value_of_release(asked, here, notes)
            if strict:
                _check_choice(asked, value, here, faults)
            argv += _words(asked.form, value, asked.key, faults, checked=strict)
            if value is not None and asked.form.action != "ignored":
                fields[_FIELDS.get(asked.form.dest, asked.form.dest)] = _held(asked.form, value)
        else:
            argv += asked
    if faults:
        raise BadParams(
            f"a configuration that SGLang {sglang_version} can be launched with",
            "; ".join(f"({i}) {fault}" for i, fault in enumerate(faults, 1)),
            "correct the server section of the parameters",
        )
    return Launch(
        argv=argv,
        environment=environment,
        notes=notes,
        fields=fields,
        sglang_version=sglang_version,
        table_version=here.version,
    )


def _near(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; nearest: {near[0]}" if near else f"; there are: {', '.join(names)}"


def _mapping(value: Any, name: str, faults: list[str]) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        faults.append(f"{name}: a mapping of names to values is needed, found {type(value).__name__}")
        return {}
    faults += [
        f"{name}: {key!r} is no name (YAML reads a bare yes, no, on or off as true or false: quote it)"
        for key in value
        if not isinstance(key, str)
    ]
    return {key: v for key, v in value.items() if isinstance(key, str)}


def _environment(asked: Mapping[str, Any], here: Release, notes: list[Note], faults: list[str]) -> dict[str, str]:
    """Environment as text, with notes on variables that this release does not read."""
    table: dict[str, list[list[str]]] = _table()["environment"]
    found: dict[str, str] = {}
    for name, value in asked.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            faults.append(f"environment {name!r}: no name of an environment variable")
            continue
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            faults.append(
                f"environment {name}: text or a number is needed, found {_shown(name, value)} (write '1' or '0')"
            )
            continue
        text = str(value)
        if "\0" in text:
            faults.append(f"environment {name}: a NUL character cannot be passed")
            continue
        found[name] = text
        told = [v for v in VARIABLES if v.name == name and _within(here.version, v.since, v.until)]
        notes += [Note(kind="environment", text=f"{name}={text}: {v.text}", source=v.source) for v in told]
        if not told and name.startswith(("SGLANG_", "SGL_")):
            ranges = table.get(name, [])
            if not any(_within(here.version, *pair) for pair in ranges):
                near = difflib.get_close_matches(name, table, n=1, cutoff=0.8)
                when = ", ".join(a if a == b else f"{a} to {b}" for a, b in ranges)
                nearest = f"nearest: {near[0]}" if near else "no known release names it"
                hint = f"known in {when}" if when else nearest
                text = f"{name}: no file of SGLang {here.version} names it, so it has no effect there ({hint})"
                notes.append(Note(kind="environment", text=text, source=TABLE))
    return found


def _resolved(
    flags: Mapping[str, Any], here: Release, notes: list[Note], faults: list[str], *, strict: bool
) -> list[_Asked | list[str]]:
    """Each asked flag as this release spells it; what it does not have is a fault, or passed as it is (not strict)."""
    found: list[_Asked | list[str]] = []
    filled: dict[str, str] = {}
    for key, value in flags.items():
        plain = _plain(key)
        direct = here.find(plain)
        if plain in OWNED or (direct is not None and direct.dest in OWNED):
            faults.append(f"{key}: is set by {OWNED.get(plain) or OWNED[direct.dest if direct else plain]}")
            continue
        if not strict and key.startswith("--"):
            found.append(_as_is(key, value, faults))
            continue
        form, value = _form_of(key, value, here, notes)
        if form is None:
            if strict:
                faults.append(_missing(key, here))
            else:
                found.append(_as_is(key, value, faults))
            continue
        if form.error is not None:
            if strict:
                faults.append(f"{key}: SGLang {here.version} refuses it: {form.error}")
                continue
        elif form.action == "ignored":
            notes.append(Note(kind="ignored", text=f"{key}: read and ignored by SGLang {here.version}", source=TABLE))
        elif form.is_deprecated:
            use = f"; it names {form.use} instead" if form.use else ""
            notes.append(Note(kind="deprecated", text=f"{key}: deprecated in SGLang {here.version}{use}", source=TABLE))
        if form.dest in filled and value is not None:
            faults.append(f"{key}: sets {form.dest}, as {filled[form.dest]} does (SGLang would keep the last)")
            continue
        if value is not None:
            filled[form.dest] = key
        found.append(_Asked(key, form, value))
    return found


def _form_of(key: str, value: Any, here: Release, notes: list[Note]) -> tuple[Form | None, Any]:
    """The form that stands for `key` in this release and the value to give it; notes a renaming."""
    plain = _plain(key)
    form = here.find(plain)
    family = _same_flags().get(plain, frozenset())
    if form is None or form.is_deprecated:
        for name in sorted(family - {plain}):
            other = here.find(name)
            if other is not None and not other.is_deprecated:
                if other is not form:
                    notes.append(
                        Note(
                            kind="renamed",
                            text=f"{key}: SGLang {here.version} calls it {other.flag}",
                            source=f"{TABLE}: one field in other releases",
                        )
                    )
                return other, value
    if form is None or form.action == "deprecated_const":
        fixed = _fixed_values().get(plain)
        target = here.find(fixed[0]) if fixed else None
        if fixed and target is not None and not target.is_deprecated and (value is None or isinstance(value, bool)):
            if not value:
                return target, None
            notes.append(
                Note(
                    kind="renamed",
                    text=f"{key}: SGLang {here.version} writes it {target.flag} {fixed[1]}",
                    source=f"{TABLE}: deprecated switch with that value",
                )
            )
            # an on-switch takes no value, its successor does
            return target, True if target.action == "true" else fixed[1]
    return form, value


def _as_is(key: str, value: Any, faults: list[str]) -> list[str]:
    """An unknown flag as a person would type it."""
    flag = key if key.startswith("--") else "--" + key.replace("_", "-")
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    items = value if isinstance(value, list | tuple) else [value]
    words = [json.dumps(v) if isinstance(v, Mapping) else str(v) for v in items]
    if any("\0" in w for w in words):
        faults.append(f"{key}: a NUL character cannot be passed")
    if len(words) == 1 and words[0].startswith("-"):
        return [f"{flag}={words[0]}"]
    return [flag, *words]


def _value_of_release(asked: _Asked, here: Release, notes: list[Note]) -> Any:
    """The value under the name that this release gives it."""
    choices = asked.form.choices
    if choices is None or not isinstance(asked.value, str) or asked.value in choices:
        return asked.value
    for row in SAME_VALUES:
        if asked.form.dest in row.dests and asked.value in row.values:
            for value in row.values:
                if value in choices:
                    notes.append(
                        Note(
                            kind="value_renamed",
                            text=f"{asked.key}: SGLang {here.version} calls {asked.value!r} {value!r}",
                            source=row.source,
                        )
                    )
                    return value
    return asked.value


def _check_choice(asked: _Asked, value: Any, here: Release, faults: list[str]) -> None:
    choices = asked.form.choices
    if choices is None or value is None or asked.form.action in ("true", "on_off", "deprecated_true", "ignored"):
        return
    for item in value if isinstance(value, list | tuple) and asked.form.nargs else [value]:
        if item in choices and not isinstance(item, bool):
            continue
        near = difflib.get_close_matches(str(item), [str(c) for c in choices], n=1, cutoff=0.5)
        held = [
            v for v in known_versions() if (f := release(v).find(asked.key)) is not None and item in (f.choices or ())
        ]
        when = f"; known in {held[0]}" + (f" to {held[-1]}" if len(held) > 1 else "") if held else ""
        hint = f"; nearest: {near[0]}" if near else ""
        told = f"{asked.key}: {item!r} is no choice of SGLang {here.version}{when}{hint}"
        faults.append(f"{told} (choose from {', '.join(str(c) for c in choices if c is not None)})")


NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")  # what argparse takes for a number and not for an option


def _words(form: Form, value: Any, key: str, faults: list[str], *, checked: bool = True) -> list[str]:
    """Argument words from which argparse makes exactly `value` again; faults for what it could not."""
    if value is None:
        return []
    match form.action:
        case "true" | "deprecated_true" | "deprecated_const" | "ignored" if form.choices is None:
            if not isinstance(value, bool):
                faults.append(f"{key}: true or false is needed, found {_shown(key, value)}")
            elif value:
                return [form.flag]
            elif form.action == "true" and form.default is not False:
                faults.append(
                    f"{key}: SGLang has no way to say false here (absent means {form.default!r}); leave it out"
                )
            return []
        case "on_off":
            if not isinstance(value, bool):
                faults.append(f"{key}: true or false is needed, found {_shown(key, value)}")
                return []
            return [form.flag] if value else ["--no-" + form.flag.removeprefix("--")]
    if form.nargs in ("+", "*"):
        if not isinstance(value, list | tuple):
            faults.append(f"{key}: a list is needed, found {_shown(key, value)}")
            return []
        if not value and form.nargs == "+":
            faults.append(f"{key}: at least one value is needed, found an empty list")
            return []
        words = [_text(form, item, key, faults, checked=checked) for item in value]
        told = [w for w in words if w is not None]
        dashes = [w for w in told if w.startswith("-") and w != "-" and not NEGATIVE.fullmatch(w)]
        if dashes and len(told) == 1 and dashes[0] != "--":
            return [f"{form.flag}={told[0]}"]
        if dashes:
            faults.append(f"{key}: argparse takes {dashes[0]!r} in a list for a flag; it cannot be passed")
        return [form.flag, *told]
    if form.nargs == "?" and value is True:
        return [form.flag]
    text = _text(form, value, key, faults, checked=checked)
    if text is None:
        return []
    if text == "--":
        faults.append(f"{key}: argparse drops the value '--'; it cannot be passed")
        return []
    # '=' keeps a leading dash from being read as a flag
    return [f"{form.flag}={text}"] if text.startswith("-") else [form.flag, text]


def _text(form: Form, value: Any, key: str, faults: list[str], *, checked: bool) -> str | None:
    """One value as a word, by the flag's type."""
    kind = form.type or "str"
    if isinstance(value, str) and "\0" in value:
        faults.append(f"{key}: a NUL character cannot be passed")
        return None
    if isinstance(value, str) and not _encodable(value):
        faults.append(f"{key}: {value!r} is not valid text (a lone surrogate)")
        return None
    if not checked and isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    if kind in ("int", "human_readable_int"):
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if kind == "human_readable_int" and isinstance(value, str) and re.fullmatch(SUFFIXED, value):
            return value
        faults.append(f"{key}: a whole number is needed, found {_shown(key, value)}")
        return None
    if kind == "float":
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return repr(value)
        faults.append(f"{key}: a number is needed, found {_shown(key, value)}")
        return None
    if kind in ("json", "json_list", "cuda_graph_config") or form.action == "lora_paths":
        return _json_text(form, value, key, faults)
    if kind == "nullable_str" and value in ("", "None"):
        faults.append(f"{key}: SGLang reads {value!r} as nothing; write null")
        return None
    if isinstance(value, Mapping | list) and form.default == "{}":
        return json.dumps(value)
    if not isinstance(value, str):
        faults.append(
            f"{key}: text is needed, found {_shown(key, value)}{' (quote it)' if isinstance(value, bool | int) else ''}"
        )
        return None
    return value


def _held(form: Form, value: Any) -> Any:
    """A value as the parser holds it."""
    if form.action == "deprecated_const":
        return form.const if value is not False else form.default
    if form.nargs in ("+", "*") and isinstance(value, list | tuple):
        return [_held_one(form, v) for v in value]
    if form.nargs == "?" and value is True:
        return form.const
    return _held_one(form, value)


def _held_one(form: Form, value: Any) -> Any:
    if form.action == "lora_paths" or not isinstance(value, str):
        return json.dumps(value) if isinstance(value, Mapping | list) and form.type == "str" else value
    if form.type == "human_readable_int":
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)", value.strip())
        if match:
            return int(Decimal(match[1]) * SUFFIXES[match[2]])
    if form.type in ("json", "json_list", "cuda_graph_config"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return _typed(form, value)


SUFFIXES = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
#: 64k, 1.5M, 8Ki as SGLang's human_readable_int reads them (utils/common.py)
SUFFIXED = r"\d+(?:\.\d+)?(?:k|M|G|T)|\d+(?:Ki|Mi|Gi|Ti)|-?\d+"


def _encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _json_text(form: Form, value: Any, key: str, faults: list[str]) -> str | None:
    if form.action == "lora_paths":
        if isinstance(value, Mapping):
            return json.dumps(value)
        if isinstance(value, str) and value and value == value.strip():
            return value
        faults.append(f"{key}: a path, name=path or a mapping is needed, found {_shown(key, value)}")
        return None
    if isinstance(value, str):
        if not _is_json(value):
            faults.append(f"{key}: JSON text or a mapping is needed, found {_shown(key, value)}")
            return None
        return value
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        faults.append(f"{key}: something that JSON can hold is needed, found {_shown(key, value)}")
        return None


# ------------------------------------------------------------------------------------- refusals known without a launch


@dataclass(frozen=True)
class View:
    """A configuration as the rules read it: values by field name, defaults filled in, and what is known of the host."""

    here: Release
    values: Mapping[str, Any]
    environment: Mapping[str, str]
    gpu: Gpu | None
    model: ModelFacts

    def __getitem__(self, dest: str) -> Any:
        """Value of a field; the release's default where it was not asked, None where the release has no such field."""
        form = self.here.find(dest)
        return self.values.get(form.dest, form.default) if form is not None else None

    @property
    def strategy(self) -> Any:
        """The state-cache strategy of hybrid models, under either of its names."""
        return self["mamba_radix_cache_strategy"] or self["mamba_scheduler_strategy"]

    @property
    def speculative(self) -> str | None:
        """The speculative algorithm, NEXTN under the name that SGLang resolves it to."""
        asked = self["speculative_algorithm"]
        return None if asked is None else {"NEXTN": "EAGLE"}.get(str(asked).upper(), str(asked).upper())

    @property
    def is_eagle(self) -> bool:
        """True for the algorithms that share EAGLE's argument checks."""
        return self.speculative in ("EAGLE", "EAGLE3", "STANDALONE")

    @property
    def prefill(self) -> Any:
        """The attention backend of prefill, as far as the arguments say."""
        return self["prefill_attention_backend"] or self["attention_backend"]

    @property
    def decode(self) -> Any:
        """The attention backend of decode, as far as the arguments say."""
        return self["decode_attention_backend"] or self["attention_backend"]

    @property
    def linear_decode(self) -> Any:
        """The linear-attention backend of decode, as far as the arguments say."""
        return self["linear_attn_decode_backend"] or self["linear_attn_backend"]

    @property
    def sm(self) -> int | None:
        """The GPU's generation, None where it is unknown or there is no GPU."""
        return self.gpu.sm if self.gpu is not None and self["device"] != "cpu" else None

    @property
    def on_cpu(self) -> bool:
        """True when the server is asked to run on the CPU."""
        return self["device"] == "cpu"

    def lacks(self, *generations: int) -> bool:
        """True when the device is known to be of none of these generations (9 is SM90, 10 is SM100 and SM103)."""
        return self.on_cpu or (self.sm is not None and self.sm // 10 not in generations)


@dataclass(frozen=True)
class Rule:
    """A combination that the parser accepts and the release refuses (or ignores) afterwards."""

    id: str
    since: str
    until: str | None
    outcome: str
    exit_code: int | None
    pattern: str
    reason: str
    source: str
    applies: Callable[[View], bool]


_SPEC = "arg_groups/speculative_hook.py (server_args.py up to 0.5.12)"
_MAMBA = "_validate_mamba_no_buffer (server_args.py, from 0.5.19 arg_groups/mamba_hook.py)"

#: checked in this order; the first that applies is what SGLang would say, as far as its own order is known
RULES: tuple[Rule, ...] = (
    Rule(
        "attention-trtllm-mha-prefill",
        "0.5.10",
        "0.5.18",
        "unsupported_here",
        1,
        r"TRTLLM MHA backend for prefill is only supported on Blackwell GPUs \(SM100\)",
        "trtllm_mha prefill needs SM100 up to 0.5.18",
        "0.5.10 to 0.5.18 server_args.py; recorded on 0.5.16, SM90, exit 1; run on 0.5.15.post1, CPU",
        lambda v: v.prefill == "trtllm_mha" and v.lacks(10),
    ),
    Rule(
        "attention-trtllm-mha-prefill-sm",
        "0.5.19",
        None,
        "unsupported_here",
        1,
        r"TRTLLM MHA backend for prefill requires Hopper \(SM90\), Blackwell \(SM100\), or SM120 GPUs",
        "trtllm_mha prefill needs SM90, SM100 or SM120",
        "0.5.19 to 0.5.23 arg_groups/attention_hook.py (read, not run)",
        lambda v: v.prefill == "trtllm_mha" and v.lacks(9, 10, 12),
    ),
    Rule(
        "attention-trtllm-mha-decode",
        "0.5.10",
        None,
        "unsupported_here",
        1,
        r"TRTLLM MHA backend for decode is only supported on Hopper \(SM90\), Blackwell \(SM100\) and \(SM120\) GPUs",
        "trtllm_mha decode needs SM90, SM100 or SM120",
        "0.5.10 to 0.5.18 server_args.py, from 0.5.19 arg_groups/attention_hook.py; run on 0.5.15.post1, CPU",
        lambda v: v.decode == "trtllm_mha" and v.lacks(9, 10, 12),
    ),
    Rule(
        "attention-trtllm-mha-sm120-fp8-kv",
        "0.5.19",
        None,
        "unsupported_here",
        1,
        r"TRTLLM FMHAv2 prefill on SM120 does not support",
        "trtllm_mha prefill on SM120 does not read an fp8_e4m3 KV cache",
        "0.5.19 to 0.5.23 arg_groups/attention_hook.py (read, not run)",
        lambda v: (
            v.prefill == "trtllm_mha" and v.sm is not None and v.sm // 10 == 12 and v["kv_cache_dtype"] == "fp8_e4m3"
        ),
    ),
    Rule(
        "attention-trtllm-mha-topk",
        "0.5.10",
        None,
        "crashes",
        1,
        r"trtllm_mha backend only supports topk = 1 for speculative decoding",
        "trtllm_mha verifies a chain of drafts, not a tree",
        f"0.5.10 to 0.5.23 {_SPEC} (read, not run)",
        lambda v: v.is_eagle and "trtllm_mha" in (v.prefill, v.decode) and (v["speculative_eagle_topk"] or 0) > 1,
    ),
    Rule(
        "linear-attention-flashinfer-state",
        "0.5.10",
        None,
        "unsupported_here",
        1,
        r"linear-attn-decode-backend flashinfer on SM100\+ requires",
        "FlashInfer GDN decode on SM100 and later needs mamba_ssm_dtype bfloat16",
        "0.5.10 to 0.5.23 _handle_linear_attn_backend (read, not run)",
        lambda v: (
            v.linear_decode == "flashinfer" and v.sm is not None and v.sm >= 100 and v["mamba_ssm_dtype"] != "bfloat16"
        ),
    ),
    Rule(
        "linear-attention-flashkda-decode",
        "0.5.15",
        None,
        "crashes",
        1,
        r"linear-attn-decode-backend flashkda is not supported",
        "FlashKDA has no decode kernel",
        "0.5.15 to 0.5.23 _handle_linear_attn_backend; run on 0.5.15.post1",
        lambda v: v["linear_attn_decode_backend"] == "flashkda",
    ),
    Rule(
        "spec-hybrid-no-buffer",
        "0.5.10",
        "0.5.13.post1",
        "crashes",
        1,
        r"is not compatible with radix cache when using --mamba-scheduler-strategy no_buffer",
        "speculation on a hybrid model needs mamba_scheduler_strategy extra_buffer (the default here is no_buffer), "
        "or no radix cache",
        "0.5.10 to 0.5.13.post1 server_args.py (read, not run); one of the origin's three failed launches",
        lambda v: (
            v.model.hybrid is True
            and v.speculative is not None
            and not v["disable_radix_cache"]
            and v.strategy in (None, "auto", "no_buffer")
        ),
    ),
    Rule(
        "hybrid-no-buffer-overlap",
        "0.5.14",
        None,
        "crashes",
        1,
        r"no_buffer do not support overlap schedule\. Try to set disable_overlap_schedule=True\.",
        "no_buffer on a hybrid model needs disable_overlap_schedule (auto would have chosen extra_buffer)",
        f"0.5.14 to 0.5.23 {_MAMBA}; recorded on 0.5.16, exit 1 after 27.6 s; run on 0.5.15.post1",
        lambda v: (
            v.model.hybrid is True
            and not v["disable_radix_cache"]
            and v.strategy == "no_buffer"
            and not v["disable_overlap_schedule"]
            and v["page_size"] in (None, 1)
        ),
    ),
    Rule(
        "hybrid-no-buffer-page",
        "0.5.14",
        None,
        "crashes",
        1,
        r"no_buffer only supports page_size=1",
        "no_buffer on a hybrid model keeps one state for each token: page_size 1",
        f"0.5.14 to 0.5.23 {_MAMBA}; run on 0.5.15.post1",
        lambda v: (
            v.model.hybrid is True
            and not v["disable_radix_cache"]
            and v.strategy == "no_buffer"
            and v["page_size"] not in (None, 1)
        ),
    ),
    Rule(
        "hybrid-lazy-spec-13",
        "0.5.13",
        "0.5.13.post1",
        "crashes",
        1,
        r"extra_buffer_lazy is not yet supported with speculative decoding",
        "extra_buffer_lazy and speculation exclude each other in this release",
        "0.5.13 server_args.py:2708 (read, not run)",
        lambda v: (
            v.model.hybrid is True
            and not v["disable_radix_cache"]
            and v.strategy == "extra_buffer_lazy"
            and v.speculative is not None
            and v["speculative_num_draft_tokens"] is not None
        ),
    ),
    Rule(
        "hybrid-lazy-spec",
        "0.5.14",
        "0.5.16",
        "crashes",
        1,
        r"extra_buffer_lazy unsupported with spec\.",
        "extra_buffer_lazy and speculation exclude each other up to 0.5.16",
        "0.5.14 to 0.5.16 server_args.py, _validate_mamba_extra_buffer; recorded on 0.5.16, exit 1 after 22.2 s",
        lambda v: (
            v.model.hybrid is True
            and not v["disable_radix_cache"]
            and v.strategy == "extra_buffer_lazy"
            and v.speculative is not None
            and v["speculative_num_draft_tokens"] is not None
        ),
    ),
    Rule(
        "spec-v2-topk",
        "0.5.10",
        "0.5.10.post1",
        "crashes",
        1,
        r"Spec v2 currently only supports topk = 1 for speculative decoding",
        "spec v2 (SGLANG_ENABLE_SPEC_V2=1) takes no draft tree in this release",
        "0.5.10.post1 server_args.py:3005 (read, not run); one of the origin's three failed launches",
        lambda v: (
            v.is_eagle
            and (v["speculative_eagle_topk"] or 0) > 1
            and v.environment.get("SGLANG_ENABLE_SPEC_V2", "").lower() in ("1", "true", "yes", "y")
        ),
    ),
    Rule(
        "spec-steps-alone",
        "0.5.10",
        None,
        "crashes",
        1,
        r"TypeError: '>' not supported between instances of 'NoneType' and 'int'",
        "speculative_num_steps needs speculative_eagle_topk and speculative_num_draft_tokens beside it",
        f"0.5.10 to 0.5.23 {_SPEC}; recorded on 0.5.16, exit 1 after 34.7 s; run on 0.5.15.post1",
        lambda v: (
            v.is_eagle
            and not v["speculative_adaptive"]
            and v["speculative_num_steps"] is not None
            and v["speculative_eagle_topk"] is None
        ),
    ),
    Rule(
        "spec-without-steps",
        "0.5.10",
        None,
        "crashes",
        1,
        r"^AssertionError$",
        "speculative_eagle_topk and speculative_num_draft_tokens need speculative_num_steps beside them",
        f"0.5.10 to 0.5.23 {_SPEC}: a bare assert; run on 0.5.15.post1",
        lambda v: (
            v.is_eagle
            and not v["speculative_adaptive"]
            and v["speculative_num_steps"] is None
            and (v["speculative_eagle_topk"] is not None or v["speculative_num_draft_tokens"] is not None)
        ),
    ),
    Rule(
        "moe-cutedsl-quantization",
        "0.5.11",
        None,
        "crashes",
        1,
        r"Invalid quantization '.*'\.",
        "flashinfer_cutedsl needs NVFP4 experts",
        "0.5.11 to 0.5.18 server_args.py, from 0.5.19 arg_groups/moe_hook.py; recorded on 0.5.16, exit 1 after 30.2 s; "
        "run on 0.5.15.post1",
        lambda v: (
            v["moe_runner_backend"] == "flashinfer_cutedsl"
            and v.model.nvfp4_experts is False
            and v["quantization"] not in ("modelopt_fp4", "modelopt_mixed", "nvfp4_online")
        ),
    ),
    Rule(
        "moe-cutedsl-detected-checkpoint",
        "0.5.16",
        "0.5.16",
        "crashes",
        1,
        r"Invalid quantization 'None'\.",
        "that the checkpoint is NVFP4 is found out later than this check: quantization modelopt_fp4 must be said",
        "argument check of 0.5.16 with a ModelOpt NVFP4 checkpoint",
        lambda v: (
            v["moe_runner_backend"] == "flashinfer_cutedsl"
            and v.model.nvfp4_experts is True
            and v["quantization"] is None
        ),
    ),
    Rule(
        "moe-flashinfer-cutlass-quantization",
        "0.5.10",
        None,
        "crashes",
        1,
        r"Invalid quantization '.*'\.",
        "flashinfer_cutlass takes modelopt_fp4, modelopt_fp8, modelopt_mixed or unquantized experts",
        "0.5.10 to 0.5.18 server_args.py, from 0.5.19 arg_groups/moe_hook.py; run on 0.5.15.post1",
        lambda v: (
            v["moe_runner_backend"] == "flashinfer_cutlass"
            and v["quantization"] not in (None, "modelopt_fp4", "modelopt_fp8", "modelopt_mixed")
        ),
    ),
    Rule(
        "moe-nvfp4-before-blackwell",
        "0.5.13",
        None,
        "unsupported_here",
        -9,
        r"Current platform does not support NVFP4 quantization with the selected MoE backend",
        "before SM100 NVFP4 experts run on marlin only (auto chooses it)",
        "0.5.13 to 0.5.23 layers/quantization/modelopt_quant.py; recorded on 0.5.16, SM90, exit -9 after 62 to 70 s",
        lambda v: (
            v.model.nvfp4_experts is True
            and v.sm is not None
            and v.sm < 100
            and v["moe_runner_backend"] not in ("auto", "marlin")
        ),
    ),
    Rule(
        "moe-nvfp4-before-blackwell-any",
        "0.5.10",
        "0.5.12.post1",
        "unsupported_here",
        -9,
        r"Current platform does not support NVFP4 quantization",
        "NVFP4 experts need SM100 up to 0.5.12.post1",
        "0.5.11 layers/quantization/modelopt_quant.py:1528 (read, not run)",
        lambda v: v.model.nvfp4_experts is True and v.sm is not None and v.sm < 100,
    ),
    Rule(
        "fp4-gemm-before-blackwell",
        "0.5.13",
        None,
        "unsupported_here",
        -9,
        r"ModelOpt NVFP4 native dense GEMM backends require SM100\+",
        "before SM100 NVFP4 dense layers run on marlin only (auto chooses it)",
        "0.5.13 to 0.5.23 layers/quantization/modelopt_quant.py; recorded on 0.5.16, SM90, exit -9 after 63 to 68 s",
        lambda v: (
            v.model.nvfp4_dense is True
            and v.sm is not None
            and v.sm < 100
            and v["fp4_gemm_runner_backend"] not in ("auto", "marlin")
        ),
    ),
    Rule(
        "kv-mxfp8-before-blackwell",
        "0.5.16",
        None,
        "unsupported_here",
        1,
        r"--kv-cache-dtype mxfp8 requires an SM100\+ \(Blackwell\) GPU",
        "an mxfp8 KV cache needs SM100 or later",
        "0.5.16 to 0.5.18 server_args.py, from 0.5.19 arg_groups/kv_cache_hook.py (read, not run)",
        lambda v: v["kv_cache_dtype"] == "mxfp8" and v.sm is not None and v.sm < 100,
    ),
    Rule(
        "kv-nvfp4-before-blackwell",
        "0.5.16",
        None,
        "unsupported_here",
        1,
        r"--kv-cache-dtype=nvfp4 requires Blackwell SM100 or SM120",
        "an nvfp4 KV cache needs SM100 or SM120",
        "0.5.16 to 0.5.18 server_args.py, from 0.5.19 arg_groups/kv_cache_hook.py (read, not run)",
        lambda v: v["kv_cache_dtype"] == "nvfp4" and v.sm is not None and v.sm // 10 not in (10, 12),
    ),
    Rule(
        "kv-fp4-e2m1-deprecated",
        "0.5.16",
        "0.5.20",
        "crashes",
        -9,
        r"--kv-cache-dtype=fp4_e2m1 is deprecated",
        "the parser still takes fp4_e2m1, the scheduler refuses it; fp4_mx_block16 is the same recipe by its new name",
        "0.5.16 to 0.5.20 mem_cache/kv_cache_dtype.py (read, not run)",
        lambda v: v["kv_cache_dtype"] == "fp4_e2m1",
    ),
    Rule(
        "cpu-hybrid-extra-buffer",
        "0.5.14",
        "0.5.21",
        "unsupported_here",
        1,
        r"extra_buffer needs CUDA",
        "extra_buffer copies states with GPU kernels; on a CPU use no_buffer and disable_overlap_schedule",
        "0.5.14 to 0.5.21 _validate_mamba_extra_buffer; run on 0.5.15.post1",
        lambda v: (
            v.on_cpu
            and v.model.hybrid is True
            and not v["disable_radix_cache"]
            and v.strategy in ("extra_buffer", "extra_buffer_lazy")
        ),
    ),
    Rule(
        "cpu-hybrid-auto",
        "0.5.15.post1",
        "0.5.15.post1",
        "unsupported_here",
        1,
        r"extra_buffer needs CUDA",
        "auto chooses extra_buffer while the overlap scheduler is on or pages are larger than one token",
        "run on 0.5.15.post1",
        lambda v: (
            v.on_cpu
            and v.model.hybrid is True
            and not v["disable_radix_cache"]
            and v.strategy == "auto"
            and (not v["disable_overlap_schedule"] or (v["page_size"] or 1) > 1)
        ),
    ),
    Rule(
        "cpu-ngram",
        "0.5.10",
        "0.5.15.post1",
        "unsupported_here",
        1,
        r"Ngram speculative decoding only supports CUDA device",
        "NGRAM needs CUDA up to 0.5.15.post1",
        f"0.5.10 to 0.5.15.post1 {_SPEC}; recorded on 0.5.15.post1",
        lambda v: v.on_cpu and v.speculative == "NGRAM",
    ),
    Rule(
        "cpu-eagle-triton",
        "0.5.15.post1",
        "0.5.15.post1",
        "unsupported_here",
        -9,
        r"0 active drivers",
        "drafting and verifying run Triton kernels, which have no CPU driver",
        "recorded on 0.5.15.post1 without a GPU, after 29 s",
        lambda v: v.on_cpu and v.is_eagle,
    ),
    Rule(
        "cpu-eagle-cuda",
        "0.5.19",
        "0.5.19",
        "unsupported_here",
        -9,
        r"Torch not compiled with CUDA enabled",
        "the draft worker asks torch for a CUDA device",
        "recorded on 0.5.19 without a GPU",
        lambda v: v.on_cpu and v.is_eagle,
    ),
    Rule(
        "cpu-eagle-torch-native",
        "0.5.21",
        "0.5.21",
        "unsupported_here",
        -9,
        r"EAGLE is not supported in decode attention backend torch_native",
        "torch_native has no multi-step draft decode",
        "recorded on 0.5.21 without a GPU",
        lambda v: v.on_cpu and v.is_eagle and v.decode == "torch_native",
    ),
    Rule(
        "cpu-attention-triton",
        "0.5.15.post1",
        "0.5.15.post1",
        "unsupported_here",
        -9,
        r"0 active drivers",
        "Triton has no CPU driver",
        "measured on 0.5.15.post1 without a GPU: exit 137 in a shell after 31 s",
        lambda v: v.on_cpu and v["attention_backend"] == "triton",
    ),
    Rule(
        "cpu-attention-flashinfer",
        "0.5.15.post1",
        "0.5.15.post1",
        "unsupported_here",
        1,
        r"No package metadata was found for flashinfer_python",
        "flashinfer_python is not installed beside a CPU build of SGLang",
        "measured on 0.5.15.post1 without a GPU: exit 1 after 9 s",
        lambda v: v.on_cpu and v["attention_backend"] == "flashinfer",
    ),
    Rule(
        "cpu-attention-intel-amx",
        "0.5.10",
        None,
        "silently_ignored",
        None,
        r"does not support Intel AMX, will fallback to torch_native backend",
        "without AMX the server runs torch_native and goes on repeating intel_amx",
        "0.5.10 to 0.5.23 source; measured on 0.5.15.post1 on a CPU without AMX",
        lambda v: v.on_cpu and v["attention_backend"] == "intel_amx" and v.gpu is not None and v.gpu.amx is False,
    ),
    Rule(
        "cpu-kv-fp8-without-amx",
        "0.5.20",
        None,
        "unsupported_here",
        -9,
        r"CPU FP8 KV cache requires Intel AMX support",
        "an fp8_e4m3 KV cache on a CPU needs AMX from 0.5.20 on",
        "0.5.20 to 0.5.23 mem_cache/kv_cache_configurator.py; recorded on 0.5.21 without AMX",
        lambda v: v.on_cpu and v["kv_cache_dtype"] == "fp8_e4m3" and v.gpu is not None and v.gpu.amx is False,
    ),
    Rule(
        "cpu-kv-e5m2",
        "0.5.20",
        None,
        "unsupported_here",
        -9,
        r"--kv-cache-dtype fp8_e5m2 is not supported on CPU",
        "no fp8_e5m2 KV cache on a CPU from 0.5.20 on",
        "0.5.20 to 0.5.23 mem_cache/kv_cache_dtype.py; recorded on 0.5.21",
        lambda v: v.on_cpu and v["kv_cache_dtype"] == "fp8_e5m2",
    ),
    Rule(
        "nodes-divide-tp",
        "0.5.10",
        None,
        "crashes",
        1,
        r"tp_size must be divisible by number of nodes",
        "tp_size x pp_size must be a multiple of nnodes",
        "0.5.10 to 0.5.18 server_args.py, from 0.5.19 arg_groups/validation_hook.py; run on 0.5.15.post1",
        lambda v: v["nnodes"] not in (None, 0) and (v["tp_size"] * v["pp_size"]) % v["nnodes"] != 0,
    ),
)


def check_arguments(
    config: Mapping[str, Any],
    sglang_version: str,
    gpu: Gpu | None = None,
    model: ModelFacts | None = None,
    *,
    strict: bool = True,
) -> list[PredictedFailure]:
    """What this release would refuse or ignore in a configuration, without a launch.

    What argparse refuses (exit 2: a flag that the release does not know, a value that is no choice or no number); if it
    refuses nothing, the rules of RULES that apply. A rule that needs the GPU or a fact about the checkpoint stays
    silent where it is unknown: an empty list is no promise that the launch works.

    Args:
        config: as for `launch_argv`; `strict` as there.
        sglang_version: the release that would be launched.
        gpu: the device; None is unknown.
        model: facts about the checkpoint; None is unknown.

    Source: each row names its own.

    Example:
        >>> [f.id for f in check_arguments({"model_path": "m", "flags": {"fp4_gemm_backend": "cutlass"}}, "0.5.16")]
        ['argparse-choice']
    """
    here, _ = nearest_release(sglang_version)
    found: list[PredictedFailure] = []
    values: dict[str, Any] = {}
    if not config.get("model_path"):
        found.append(
            _argparse("argparse-required", "the following arguments are required: --model-path", "no model_path", here)
        )
    unknown: list[str] = []
    for key, value in _mapping(config.get("flags"), "flags", []).items():
        if value is None:
            continue
        literal = not strict and key.startswith("--")
        if literal:
            form = next((f for f in here.forms.values() if key in f.spellings), None) or _abbreviated(key, here, found)
            if form is None and not any(f.id == "argparse-ambiguous" for f in found):
                unknown.append(key)
        else:
            form, value = _form_of(key, value, here, [])
            if form is None:
                unknown.append("--" + _plain(key).replace("_", "-"))
        if form is None or value is None:
            continue
        if form.error is not None and value is not False:
            found.append(_argparse("argparse-retired", re.escape(form.error), f"{key} is retired", here))
            continue
        value = value if literal else _value_of_release(_Asked(key, form, value), here, [])
        found += _argparse_faults(form, value, here)
        if form.action == "deprecated_const":
            value = form.const if value is not False else form.default
        values[form.dest] = _typed(form, value)
    if unknown:
        text = rf"unrecognized arguments: .*{re.escape(unknown[0])}"
        found.append(_argparse("argparse-unknown", text, "; ".join(_missing(k, here) for k in unknown), here))
    if found:
        return found
    environment = {k: str(v) for k, v in _mapping(config.get("environment"), "environment", []).items()}
    view = View(here, values, environment, gpu, model or ModelFacts())
    for rule in RULES:
        if _within(here.version, rule.since, rule.until) and rule.applies(view):
            found.append(
                PredictedFailure(
                    id=rule.id,
                    outcome=rule.outcome,
                    exit_code=rule.exit_code,
                    pattern=rule.pattern,
                    reason=rule.reason,
                    source=rule.source,
                    since=rule.since,
                    until=rule.until,
                )
            )
    return found


def _argparse(name: str, pattern: str, reason: str, here: Release) -> PredictedFailure:
    return PredictedFailure(
        id=name,
        outcome="crashes",
        exit_code=2,
        pattern=pattern,
        reason=reason,
        source=f"{TABLE}, {here.version}",
        since=here.version,
        until=here.version,
    )


def _abbreviated(key: str, here: Release, found: list[PredictedFailure]) -> Form | None:
    """The flag that argparse takes an unknown one for: it completes an unambiguous beginning."""
    matches = {s: f for f in here.forms.values() for s in f.spellings if s.startswith(key)}
    if len(matches) > 1:
        text = rf"ambiguous option: {re.escape(key)} could match "
        found.append(_argparse("argparse-ambiguous", text, f"{key} is the beginning of {', '.join(matches)}", here))
        return None
    return next(iter(matches.values()), None)


def _argparse_faults(form: Form, value: Any, here: Release) -> list[PredictedFailure]:
    """What argparse says to a value: no number, or none of the choices."""
    if form.action not in ("store", "deprecated_store") and form.choices is None:
        return []
    names = re.escape("/".join(form.spellings))
    for item in value if isinstance(value, list | tuple) and form.nargs in ("+", "*") else [value]:
        if form.type in ("int", "float"):
            try:
                {"int": int, "float": float}[form.type](str(item))
            except ValueError:
                text = rf"argument {names}: invalid {form.type} value: {re.escape(repr(str(item)))}"
                return [_argparse("argparse-number", text, f"{form.flag} needs a number", here)]
        if form.type == "human_readable_int" and not re.fullmatch(SUFFIXED, str(item).strip()):
            text = rf"argument {names}: (Invalid integer value|Decimals are not allowed)"
            return [_argparse("argparse-number", text, f"{form.flag} needs a whole number, 64k or 8Ki", here)]
        if form.type == "json" and isinstance(item, str) and not _is_json(item):
            text = rf"argument {names}: invalid loads value: {re.escape(repr(item))}"
            return [_argparse("argparse-json", text, f"{form.flag} needs JSON", here)]
        if form.type == "parse_cuda_graph_backend_arg" and item == "tc_piecewise":
            text = rf"argument {names}: tc_piecewise was removed"
            return [_argparse("argparse-choice", text, f"{form.flag} no longer takes tc_piecewise", here)]
        if form.choices is not None and _typed(form, item) not in form.choices:
            text = rf"argument {names}: invalid choice: {re.escape(repr(_typed(form, item)))} \(choose from "
            choices = ", ".join(str(c) for c in form.choices if c is not None)
            return [_argparse("argparse-choice", text, f"{form.flag} takes {choices}", here)]
    return []


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _typed(form: Form, value: Any) -> Any:
    """A value as argparse would hold it, for the rules; text that is no number stays text."""
    if isinstance(value, list | tuple):
        return [_typed(form, v) for v in value]
    if isinstance(value, str) and form.type in ("int", "float"):
        try:
            return {"int": int, "float": float}[form.type](value)
        except ValueError:
            return value
    return value


# ---------------------------------------------------------------------------------------------------- NEXTN by version


@dataclass(frozen=True)
class Incantation:
    """What turns multi-token prediction on in a range of releases, beside the algorithm itself."""

    since: str
    until: str | None
    hybrid: bool
    flags: Mapping[str, Any]
    environment: Mapping[str, str]
    reason: str
    source: str


NEXTN: tuple[Incantation, ...] = (
    Incantation(
        "0.5.10",
        "0.5.10.post1",
        True,
        {"mamba_scheduler_strategy": "extra_buffer"},
        {"SGLANG_ENABLE_SPEC_V2": "1"},
        "no_buffer is the default and refuses speculation with a radix cache; the refusal itself names both settings",
        "0.5.10.post1 server_args.py:2207, environ.py:442",
    ),
    Incantation(
        "0.5.10",
        "0.5.10.post1",
        False,
        {},
        {"SGLANG_ENABLE_SPEC_V2": "1"},
        "spec v2 (overlap) is off by default; without the variable spec v1 runs",
        "0.5.10.post1 server_args.py:3001",
    ),
    Incantation(
        "0.5.11",
        "0.5.13.post1",
        True,
        {"mamba_scheduler_strategy": "extra_buffer"},
        {},
        "no_buffer is the default and refuses speculation with a radix cache; spec v2 is on by default",
        "0.5.11 server_args.py:2455, environ.py:459",
    ),
    Incantation("0.5.11", "0.5.13.post1", False, {}, {}, "spec v2 is on by default", "0.5.11 environ.py:459"),
    Incantation(
        "0.5.14",
        None,
        True,
        {},
        {},
        "auto chooses extra_buffer by itself; the variable has no effect",
        "0.5.14 to 0.5.23 mamba radix cache resolution; argument check on 0.5.16",
    ),
    Incantation("0.5.14", None, False, {}, {}, "nothing else is needed", "0.5.14 speculative_hook.py:69"),
)


def nextn(sglang_version: str, *, hybrid: bool, steps: int = 3) -> tuple[dict[str, Any], dict[str, str], Incantation]:
    """Flags and environment that turn NEXTN on in this release, and the row that says why.

    A chain of `steps` drafts: topk 1 and steps + 1 draft tokens, all three named, since naming only some of them is
    refused.

    Example:
        >>> nextn("0.5.11", hybrid=True)[0]["mamba_scheduler_strategy"]
        'extra_buffer'
    """
    here, _ = nearest_release(sglang_version)
    row = next(r for r in NEXTN if r.hybrid is hybrid and _within(here.version, r.since, r.until))
    chain = {
        "speculative_algorithm": "NEXTN",
        "speculative_num_steps": steps,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": steps + 1,
    }
    return {**chain, **row.flags}, dict(row.environment), row


# ------------------------------------------------------------------------------------------------ the table of backends

#: what a person sweeps -> the fields of SGLang that choose it
AXES: dict[str, tuple[str, ...]] = {
    "attention": ATTENTION_DESTS,
    "moe_runner": ("moe_runner_backend",),
    "fp4_gemm": ("fp4_gemm_runner_backend",),
    "fp8_gemm": ("fp8_gemm_runner_backend",),
    "bf16_gemm": ("bf16_gemm_backend",),
    "linear_attn": (
        "linear_attn_backend",
        "linear_attn_decode_backend",
        "linear_attn_prefill_backend",
        "linear_attn_verify_backend",
    ),
    "mamba": ("mamba_backend",),
    "kv_cache_dtype": ("kv_cache_dtype",),
    "sampling": ("sampling_backend",),
    "grammar": ("grammar_backend",),
}


@dataclass(frozen=True)
class HardwareNote:
    """What is known of one value of one axis on some hardware."""

    axis: str
    value: str
    text: str
    source: str


_H200 = "recorded: SGLang 0.5.16, one H200 (SM90), tiny hybrid MoE"
_CPU = "measured: SGLang 0.5.15.post1, CPU without AMX"
_ORIGIN = "the origin case: 8 x RTX PRO 6000 (SM120), Qwen3.5-397B-A17B-NVFP4"
_BF16 = "bf16 experts: log-probabilities bit-identical to triton's, /server_info repeats the asked value: not honoured"
_DENSE = "NVFP4 dense layers on SM90: refused at load, exit -9"

HARDWARE_NOTES: tuple[HardwareNote, ...] = (
    HardwareNote("attention", "torch_native", "CPU: works; never applies KV scales", _CPU),
    HardwareNote("attention", "triton", "SM90: works", _H200),
    HardwareNote("attention", "triton", "SM120: works (used for the whole origin sweep)", _ORIGIN),
    HardwareNote("attention", "triton", "CPU: dies with '0 active drivers' after 31 s", _CPU),
    HardwareNote("attention", "flashinfer", "CPU: flashinfer_python is not installed, exit 1 after 9 s", _CPU),
    HardwareNote("attention", "intel_amx", "CPU without AMX: serves, but runs torch_native (one warning)", _CPU),
    HardwareNote("attention", "trtllm_mha", "SM90: refused for prefill up to 0.5.18, exit 1 after 29.7 s", _H200),
    HardwareNote(
        "attention",
        "trtllm_mha",
        "SM120: allowed from 0.5.19 on, but not with an fp8_e4m3 KV cache",
        "0.5.23 arg_groups/attention_hook.py (read)",
    ),
    HardwareNote("moe_runner", "triton", "SM90, bf16: works, ready after 70 to 84 s", _H200),
    HardwareNote("moe_runner", "triton_kernel", "SM90, bf16: works", _H200),
    HardwareNote("moe_runner", "cutlass", f"SM90, {_BF16}", _H200),
    HardwareNote("moe_runner", "marlin", f"SM90, {_BF16}", _H200),
    HardwareNote(
        "moe_runner", "marlin", "SM80 to SM90: the only runner of NVFP4 experts, and what auto chooses", _H200
    ),
    HardwareNote("moe_runner", "flashinfer_trtllm", "SM90, bf16: dies at the first forward (kernel download)", _H200),
    HardwareNote("moe_runner", "flashinfer_trtllm", "SM120, NVFP4: crashed", _ORIGIN),
    HardwareNote("moe_runner", "flashinfer_cutedsl", "SM90, bf16: refused, exit 1 after 30.2 s", _H200),
    HardwareNote("moe_runner", "flashinfer_cutedsl", "SM120, NVFP4: answered garbage", _ORIGIN),
    HardwareNote("moe_runner", "flashinfer_cutlass", "SM90, bf16: JIT compilation for more than 140 s, silent", _H200),
    HardwareNote("moe_runner", "flashinfer_cutlass", "SM120, NVFP4: worked, and was kept", _ORIGIN),
    HardwareNote(
        "moe_runner",
        "auto",
        "SM120, NVFP4: flashinfer_trtllm (SM100 kernels) up to 0.5.12.post1, flashinfer_cutlass from 0.5.13 on",
        "0.5.11 and 0.5.13.post1 source (read)",
    ),
    HardwareNote(
        "moe_runner", "deep_gemm", "SM90, bf16: JIT compilation for more than 140 s, announced as 10 to 20 min", _H200
    ),
    HardwareNote("fp4_gemm", "flashinfer_cudnn", "SM120: worked, and was kept", _ORIGIN),
    HardwareNote(
        "fp4_gemm",
        "flashinfer_cudnn",
        "SM120: no NaN in 3,200 requests of mixed length",
        "sgl-project/sglang#20047",
    ),
    HardwareNote(
        "fp4_gemm", "flashinfer_cutlass", "SM90, nothing NVFP4 in the model: serves, flag without effect", _H200
    ),
    HardwareNote("fp4_gemm", "flashinfer_cutlass", _DENSE, _H200),
    HardwareNote(
        "fp4_gemm",
        "flashinfer_cutlass",
        "SM120: NaN rows in mixed batches reported; all-zero outputs for some shapes with flashinfer 0.6.12",
        "sgl-project/sglang#20043, flashinfer-ai/flashinfer#3398",
    ),
    HardwareNote("fp4_gemm", "flashinfer_cutedsl", _DENSE, _H200),
    HardwareNote("fp4_gemm", "flashinfer_trtllm", _DENSE, _H200),
    HardwareNote("fp4_gemm", "cutlass", "no choice from 0.5.16 on: exit 2 after 23 s", _H200),
    HardwareNote(
        "fp4_gemm",
        "auto",
        "SM120: flashinfer_cudnn up to 0.5.12.post1, flashinfer_cutlass from 0.5.13 on; SM100: flashinfer_cutedsl and "
        "SM80 to SM90: marlin (0.5.23)",
        "0.5.11 server_args.py, 0.5.23 layers/quantization/fp4_utils.py (read)",
    ),
    HardwareNote(
        "linear_attn",
        "flashinfer",
        "decode on SM100 and later: needs mamba_ssm_dtype bfloat16",
        "0.5.10 to 0.5.23 _handle_linear_attn_backend (read)",
    ),
    HardwareNote(
        "linear_attn",
        "flashkda",
        "prefill only; named for decode it is refused",
        "0.5.15 to 0.5.23 _handle_linear_attn_backend (read)",
    ),
    HardwareNote("kv_cache_dtype", "auto", "FP8 of the checkpoint becomes fp8_e4m3 without a message", _H200),
    HardwareNote(
        "kv_cache_dtype",
        "fp8_e4m3",
        "CPU: works on 0.5.15.post1 and 0.5.19, needs AMX from 0.5.20 on",
        f"{_CPU}; recorded on 0.5.19 and 0.5.21; 0.5.20 mem_cache/kv_cache_configurator.py (read)",
    ),
    HardwareNote("kv_cache_dtype", "fp8_e5m2", "SM90: works, without a warning", _H200),
    HardwareNote(
        "kv_cache_dtype",
        "fp8_e5m2",
        "CPU: works, without a warning, up to 0.5.19; refused from 0.5.20 on",
        f"{_CPU}; recorded on 0.5.21; 0.5.20 mem_cache/kv_cache_dtype.py (read)",
    ),
    HardwareNote("kv_cache_dtype", "mxfp8", "needs SM100 or later", "0.5.16 server_args.py (read)"),
    HardwareNote("kv_cache_dtype", "nvfp4", "needs SM100 or SM120", "0.5.16 server_args.py (read)"),
    HardwareNote(
        "kv_cache_dtype",
        "fp4_e2m1",
        "refused by the scheduler from 0.5.16 to 0.5.20, though the parser takes it; no choice from 0.5.21 on",
        "0.5.16 mem_cache/kv_cache_dtype.py (read)",
    ),
    HardwareNote("sampling", "pytorch", "SM90: works", _H200),
    HardwareNote("sampling", "pytorch", "CPU: works", _CPU),
    HardwareNote("grammar", "none", "SM90: works", _H200),
    HardwareNote("grammar", "none", "CPU: works", _CPU),
)


class Backend(Record):
    """One value of one axis: the fields that take it, the releases that know it, and what is known of it."""

    axis: str
    value: str
    fields: list[str]
    versions: list[tuple[str, str]]
    notes: list[Note]
    source: str


def backends() -> list[Backend]:
    """Every value of every axis in the known releases, in the order in which SGLang lists them."""
    found: list[Backend] = []
    for axis, dests in AXES.items():
        holds: dict[str, dict[str, set[str]]] = {}
        for version in known_versions():
            for dest in dests:
                form = release(version).find(dest)
                for value in form.choices or () if form is not None else ():
                    holds.setdefault(str(value), {}).setdefault(version, set()).add(dest)
        for value, by_version in holds.items():
            found.append(
                Backend(
                    axis=axis,
                    value=value,
                    fields=[d for d in dests if any(d in held for held in by_version.values())],
                    versions=_runs(by_version),
                    notes=[
                        Note(kind="hardware", text=n.text, source=n.source)
                        for n in HARDWARE_NOTES
                        if n.axis == axis and n.value == value
                    ],
                    source=TABLE,
                )
            )
    return found


def _runs(present: Iterable[str]) -> list[tuple[str, str]]:
    """Runs of consecutive known releases."""
    held = set(present)
    runs: list[tuple[str, str]] = []
    before: str | None = None
    for version in known_versions():
        if version in held:
            if runs and runs[-1][1] == before:
                runs[-1] = (runs[-1][0], version)
            else:
                runs.append((version, version))
        before = version
    return runs


def _releases_text(runs: list[tuple[str, str]]) -> str:
    first, last = known_versions()[0], known_versions()[-1]
    texts = []
    for since, until in runs:
        if (since, until) == (first, last):
            texts.append("all")
        elif until == last:
            texts.append(f"from {since}")
        elif since == first:
            texts.append(f"to {until}")
        else:
            texts.append(since if since == until else f"{since} to {until}")
    return ", ".join(texts)


def backends_markdown() -> str:
    """docs/backends.md: backends by axis, refusals that are known without a launch, and variables by release."""

    def row(*cells: str) -> str:
        return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"

    known = known_versions()
    lines = [
        "# Backends and flags by SGLang release",
        "",
        "Generated from the tables of `lib/server/flags.py` by `backends_markdown()`; do not edit.",
        "",
        f"Choices were read from the source of {len(known)} published releases, {known[0]} to {known[-1]} "
        f"({', '.join(known)}); a release in between is treated as the nearest lower one, with a note. "
        "That a release takes a value says nothing about whether it works on some hardware: the notes say what is "
        "known, and from where; the rest is what a sweep is for.",
    ]
    for axis, dests in AXES.items():
        lines += ["", f"## {axis}", "", "Fields: " + ", ".join(f"`{d}`" for d in dests) + ".", ""]
        lines += [row("value", "releases", "known"), row("---", "---", "---")]
        for backend in backends():
            if backend.axis == axis:
                notes = "<br>".join(f"{n.text} [{n.source}]" for n in backend.notes)
                only = "" if backend.fields == list(dests) else " (only " + ", ".join(backend.fields) + ")"
                lines.append(row(f"`{backend.value}`{only}", _releases_text(backend.versions), notes))
    lines += [
        "",
        "## Refused or ignored, known without a launch",
        "",
        "Exit codes of the launcher: 2 argparse, 1 argument check, -9 the scheduler died and the launcher killed its "
        "own tree (137 in a shell), none: it goes on serving. Beside these rows, everything that argparse itself "
        "refuses is known from the table of flags.",
        "",
        row("rule", "releases", "outcome", "exit", "why", "source"),
        row("---", "---", "---", "---", "---", "---"),
    ]
    for rule in RULES:
        until = "on" if rule.until is None else f"to {rule.until}"
        releases = rule.since if rule.since == rule.until else f"{rule.since} {until}"
        code = "none" if rule.exit_code is None else str(rule.exit_code)
        lines.append(row(rule.id, releases, rule.outcome, code, rule.reason, rule.source))
    lines += ["", "## Variables that changed their meaning", ""]
    lines += [row("variable", "releases", "effect", "source"), row("---", "---", "---", "---")]
    for variable in VARIABLES:
        until = "on" if variable.until is None else f"to {variable.until}"
        lines.append(row(f"`{variable.name}`", f"{variable.since} {until}", variable.text, variable.source))
    lines += ["", "## NEXTN, beside the algorithm and its three numbers", ""]
    lines += [row("releases", "model", "flags", "environment", "why", "source"), row(*["---"] * 6)]
    for one in NEXTN:
        until = "on" if one.until is None else f"to {one.until}"
        words = ", ".join(f"`{k}: {v}`" for k, v in one.flags.items())
        variables = ", ".join(f"`{k}={v}`" for k, v in one.environment.items())
        kind = "hybrid" if one.hybrid else "other"
        lines.append(row(f"{one.since} {until}", kind, words, variables, one.reason, one.source))
    lines += ["", "## Flags that were renamed", ""]
    lines += ["Either name is taken in a configuration; the one that the release knows is written.", ""]
    families = sorted({tuple(sorted(f)) for f in _same_flags().values() if len(f) > 1})
    lines += [row("names", "releases"), row("---", "---")]
    for family in families:
        names = [n for n in family if _releases_with(n)]
        lines.append(
            row(
                ", ".join(f"`{n}`" for n in names),
                "; ".join(f"{n}: {_releases_text(_runs(_releases_with(n)))}" for n in names),
            )
        )
    return "\n".join(lines) + "\n"
