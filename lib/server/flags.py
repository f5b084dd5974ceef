"""One server configuration as the argument list and environment of a given SGLang release; what that release would refuse.

SGLang renames and removes flags from release to release. The table `flags_by_version.json` (made by `extract_flags.py`
from the published wheels) says for each release which flags there are; the tables below say what the parser does not:
values that changed their name, environment variables that changed their meaning, and combinations that are accepted by
the parser and refused afterwards. The sweep, the benchmark and the unit file all call `launch_argv`: what was measured is
what is deployed.

Everything here is text in, text out: the packaged table is read through `importlib.resources`, nothing is run.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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
    """What follows `python -m sglang.launch_server` (or `sglang serve`), and what the environment must hold."""

    argv: list[str]
    environment: dict[str, str]
    notes: list[Note]
    sglang_version: str
    table_version: str


class PredictedFailure(Record):
    """A launch that need not be tried: what SGLang would do, known from its source or from a recorded run."""

    id: str
    outcome: str  # unsupported_here | crashes | silently_ignored
    exit_code: int | None
    pattern: str  # regular expression that the server's own words match
    reason: str
    source: str
    since: str
    until: str | None


class Gpu(Record):
    """The accelerator that a launch is meant for. `sm` is 90 for H200, 100 for B200, 120 for RTX PRO 6000; None on a CPU."""

    sm: int | None
    name: str = ""
    count: int = 1


# --------------------------------------------------------------------------------------------------------- versions


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
        match = re.fullmatch(
            r"v?(\d+)\.(\d+)\.(\d+)(?:\.?(post|rc|dev|a|b)(\d+))?(?:\.dev(\d+))?(?:\+[A-Za-z0-9.]+)?", text.strip()
        )
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
    known = [Version.of(v) for v in known_versions()]
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


#: what replaced a removed flag where the table itself does not know (it knows every deprecated alias)
REPLACED: tuple[Moved, ...] = (
    Moved("enable_nan_detection", "environment SGLANG_SPEC_NAN_DETECTION, later SGLANG_ENABLE_NAN_LOGITS_CHECK", "FACTS 0"),
    Moved("dsa_prefill_cp_mode", "cp_strategy (in-seq-split -> zigzag, round-robin-split -> interleave)", "0.5.15.post1 server_args.py, help"),
    Moved("nsa_prefill_cp_mode", "cp_strategy (in-seq-split -> zigzag, round-robin-split -> interleave)", "0.5.15.post1 server_args.py, help"),
    Moved("prefill_cp_mode", "cp_strategy (in-seq-split -> zigzag)", "0.5.15.post1 server_args.py, help"),
    Moved("enable_dsa_prefill_context_parallel", "enable_prefill_cp", "0.5.15.post1 server_args.py, new_flag"),
    Moved("enable_nsa_prefill_context_parallel", "enable_prefill_cp", "0.5.15.post1 server_args.py, new_flag"),
    Moved("enable_prefill_context_parallel", "enable_prefill_cp", "0.5.15.post1 server_args.py, new_flag"),
    Moved("enable_expert_distribution_metrics", "expert_balancedness_report_mode (off, server_log, prometheus, both)", "0.5.18 server_args.py, error_message"),
    Moved("collect_tokens_histogram", "nothing: token histograms come with enable_metrics", "0.5.15.post1 server_args.py, help"),
)


@dataclass(frozen=True)
class SameValue:
    """Two spellings of one value of a flag; whichever the release knows is used."""

    dests: tuple[str, ...]
    values: tuple[str, ...]
    source: str


ATTENTION_DESTS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
SAME_VALUES: tuple[SameValue, ...] = (
    SameValue(("kv_cache_dtype", "speculative_draft_kv_cache_dtype"), ("bf16", "bfloat16"), "FACTS 1.1: an alias"),
    SameValue(ATTENTION_DESTS, ("dsa", "nsa"), "0.5.15.post1 server_args.py: nsa is a deprecated alias for dsa"),
    SameValue(ATTENTION_DESTS, ("dsv4", "compressed"), "0.5.15.post1 server_args.py: compressed is a deprecated alias for dsv4"),
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
    Variable("SGLANG_ENABLE_SPEC_V2", "0.5.10", "0.5.10.post1", "off by default here: unset or 0 means spec v1 without overlap", "0.5.10.post1 environ.py"),
    Variable("SGLANG_ENABLE_SPEC_V2", "0.5.11", "0.5.13.post1", "on by default here: only 0 changes anything (0.5.13: synchronous v2; before: v1)", "0.5.11 environ.py; FACTS 0"),
    Variable("SGLANG_ENABLE_SPEC_V2", "0.5.14", "0.5.20", "without effect: speculative decoding always runs v2; a warning says so", "0.5.15.post1 speculative_hook.py:75; H200.md"),
    Variable("SGLANG_ENABLE_SPEC_V2", "0.5.21", None, "without effect, and no line says so", "0.5.23 source does not name it; FACTS 0"),
)


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
            if form.action == "deprecated_const":
                for spelling in form.spellings:
                    found[_plain(spelling)] = (form.dest, form.const)
    return found


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


@dataclass
class _Asked:
    """One flag as asked, resolved for a release."""

    key: str
    form: Form
    value: Any


def launch_argv(
    config: Mapping[str, Any], sglang_version: str, host: str, port: int, *, strict: bool = True
) -> Launch:
    """Argument list and environment that launch this configuration on this SGLang release.

    Flags that the release spells differently are translated, with a note; values are written so that argparse gives
    them back exactly. `None` leaves a flag at the release's default. Host and port are always explicit.

    Args:
        config: `model_path`, `served_model_name` (or None), `flags` (field or flag name -> value), `environment`.
        sglang_version: the release that will be launched, as in `/server_info`.
        host: address to listen on.
        port: 1 to 65535.
        strict: refuse unknown flags and values outside the release's choices. Without it they are passed as asked, for
            a trial that wants SGLang's own refusal; values that argparse could not give back are refused all the same.

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
    faults: list[str] = []
    argv: list[str] = []
    faults += [
        f"{key}: not part of a server configuration{_near(str(key), CONFIG_KEYS)}" for key in config if key not in CONFIG_KEYS
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
            faults.append(f"{name}: text is needed, found {value!r}")
            continue
        if name == "port" and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65535):
            faults.append(f"port: a number from 1 to 65535 is needed, found {value!r}")
            continue
        argv += _words(here.by_name[name], value, name, faults)
    for asked in _resolved(flags, here, notes, faults, strict=strict):
        if isinstance(asked, _Asked):
            value = _value_of_release(asked, here, notes)
            if strict:
                _check_choice(asked, value, here, faults)
            argv += _words(asked.form, value, asked.key, faults, checked=strict)
        else:
            argv += asked
    if faults:
        raise BadParams(
            f"a configuration that SGLang {sglang_version} can be launched with",
            "; ".join(f"({i}) {fault}" for i, fault in enumerate(faults, 1)),
            "correct the server section of the parameters",
        )
    return Launch(
        argv=argv, environment=environment, notes=notes, sglang_version=sglang_version, table_version=here.version
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
    wrong = [key for key in value if not isinstance(key, str)]
    faults += [f"{name}: {key!r} is no name (YAML reads a bare yes, no, on or off as true or false: quote it)" for key in wrong]
    return {key: v for key, v in value.items() if isinstance(key, str)}


def _environment(
    asked: Mapping[str, Any], here: Release, notes: list[Note], faults: list[str]
) -> dict[str, str]:
    """Environment as text, with notes on variables that this release does not read."""
    table: dict[str, list[list[str]]] = _table()["environment"]
    found: dict[str, str] = {}
    for name, value in asked.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            faults.append(f"environment {name!r}: no name of an environment variable")
            continue
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            faults.append(f"environment {name}: text or a number is needed, found {value!r} (write '1' or '0')")
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
                hint = f"known from {when}" if when else (f"nearest: {near[0]}" if near else "no known release names it")
                notes.append(
                    Note(
                        kind="environment",
                        text=f"{name}: the source of SGLang {here.version} does not name it, so it has no effect ({hint})",
                        source=TABLE,
                    )
                )
    return found


def _resolved(
    flags: Mapping[str, Any], here: Release, notes: list[Note], faults: list[str], *, strict: bool
) -> list[_Asked | list[str]]:
    """Each asked flag as this release spells it; what it does not have is a fault, or passed as it is (`strict=False`)."""
    found: list[_Asked | list[str]] = []
    filled: dict[str, str] = {}
    for key, value in flags.items():
        plain = _plain(key)
        direct = here.find(plain)
        if plain in OWNED or (direct is not None and direct.dest in OWNED):
            faults.append(f"{key}: is set by {OWNED[plain if plain in OWNED else direct.dest]}")  # type: ignore[union-attr]
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
            faults.append(f"{key}: sets {form.dest}, which {filled[form.dest]} sets already (SGLang would keep the last)")
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
        if fixed and target is not None and not target.is_deprecated and value is True:
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
        case "true" | "deprecated_true" | "deprecated_const" | "ignored" if form.nargs in (None, 0):
            if not isinstance(value, bool):
                faults.append(f"{key}: true or false is needed, found {value!r}")
            elif value:
                return [form.flag]
            elif form.action == "true" and form.default is not False:
                faults.append(
                    f"{key}: SGLang has no way to say false here (absent means {form.default!r}); leave it out"
                )
            return []
        case "on_off":
            if not isinstance(value, bool):
                faults.append(f"{key}: true or false is needed, found {value!r}")
                return []
            return [form.flag] if value else ["--no-" + form.flag.removeprefix("--")]
    if form.nargs in ("+", "*"):
        if not isinstance(value, list | tuple):
            faults.append(f"{key}: a list is needed, found {value!r}")
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
        faults.append(f"{key}: a whole number is needed, found {value!r}")
        return None
    if kind == "float":
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return repr(value)
        faults.append(f"{key}: a number is needed, found {value!r}")
        return None
    if kind in ("json", "json_list", "cuda_graph_config") or form.action == "lora_paths":
        return _json_text(form, value, key, faults)
    if kind == "nullable_str" and value in ("", "None"):
        faults.append(f"{key}: SGLang reads {value!r} as nothing; write null")
        return None
    if isinstance(value, Mapping | list) and form.default == "{}":
        return json.dumps(value)
    if not isinstance(value, str):
        faults.append(f"{key}: text is needed, found {value!r}{' (quote it)' if isinstance(value, bool | int) else ''}")
        return None
    return value


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
        faults.append(f"{key}: a path, name=path or a mapping is needed, found {value!r}")
        return None
    if isinstance(value, str):
        try:
            json.loads(value)
        except ValueError:
            faults.append(f"{key}: JSON text or a mapping is needed, found {value!r}")
            return None
        return value
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        faults.append(f"{key}: something that JSON can hold is needed, found {value!r}")
        return None
