"""Read a unit file as systemd reads it: sections, continuations, quoting, comments, resets, CRLF, specifiers, drop-ins.

What systemd would ignore or refuse becomes a finding with the wording that its own journal line has.

Source: systemd.syntax(7), systemd.service(5) "Command lines", and the behaviour of systemd 252, against which the tests
compare the arguments (`systemd-analyze verify`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence

from lib.deploy.unit_keys import BOOLEAN_KEYS, NEWER_KEYS, OTHER_SECTIONS, SECTION_KEYS, TIME_KEYS
from lib.errors import UnreadableFile
from lib.findings import Finding
from lib.records import Record
from lib.server.redact import redact_text

#: No line of a unit file may be longer (systemd's LONG_LINE_MAX, 1 MiB); a whole file beyond this is not a unit.
MAX_UNIT_CHARACTERS = 4 << 20
MAX_LINE_BYTES = 1 << 20

#: More findings about one line help nobody.
_MAX_PROBLEMS = 20

_SPACE = " \t\n\r"
_UNSAFE_IN_PATH = r"[\x00-\x1f\x7f\\\"']"
_SPECIFIERS = frozenset("aAbBcCdDEfgGhHiIjJlLmMnNopPqsStTuUvVwWyY%")
_ESCAPES = {
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
    "\\": "\\",
    '"': '"',
    "'": "'",
    "s": " ",
}
_HEX_LENGTH = {"x": 2, "u": 4, "U": 8}
_EXEC_KEYS = ("ExecCondition", "ExecStartPre", "ExecStart", "ExecStartPost", "ExecReload", "ExecStop", "ExecStopPost")
#: Values of the keys whose words are few; anything else is ignored by systemd with a line in the journal.
CHOICES: dict[str, frozenset[str]] = {
    "Type": frozenset({"simple", "exec", "forking", "oneshot", "dbus", "notify", "notify-reload", "idle"}),
    "Restart": frozenset({"no", "always", "on-success", "on-failure", "on-abnormal", "on-abort", "on-watchdog"}),
    "KillMode": frozenset({"control-group", "mixed", "process", "none"}),
    "DevicePolicy": frozenset({"auto", "closed", "strict"}),
    "OOMPolicy": frozenset({"continue", "stop", "kill"}),
    "NotifyAccess": frozenset({"none", "main", "exec", "all"}),
}
_BOOLEANS = frozenset({"1", "yes", "y", "true", "t", "on", "0", "no", "n", "false", "f", "off"})
_TRUE = frozenset({"1", "yes", "y", "true", "t", "on"})
_UNITS_S = {
    "": 1.0,
    "s": 1.0,
    "sec": 1.0,
    "second": 1.0,
    "seconds": 1.0,
    "ms": 1e-3,
    "msec": 1e-3,
    "us": 1e-6,
    "usec": 1e-6,
    "µs": 1e-6,
    "m": 60.0,
    "min": 60.0,
    "minute": 60.0,
    "minutes": 60.0,
    "h": 3600.0,
    "hr": 3600.0,
    "hour": 3600.0,
    "hours": 3600.0,
    "d": 86400.0,
    "day": 86400.0,
    "days": 86400.0,
    "w": 604800.0,
    "week": 604800.0,
    "weeks": 604800.0,
    "month": 2629800.0,
    "months": 2629800.0,
    "M": 2629800.0,
    "y": 31557600.0,
    "year": 31557600.0,
    "years": 31557600.0,
    "ns": 1e-9,
    "nsec": 1e-9,
}


#: A reporting function: id, level, what, line, evidence, do.
_Report = Callable[[str, str, str, int, str, str], None]


class Assignment(Record):
    """One `Key=value` line; `line` is where it begins, `origin` the file it stands in."""

    section: str
    key: str
    value: str
    line: int
    origin: str


class Command(Record):
    """One command as systemd would run it: prefix characters, path and arguments (argv[0] is what the process sees)."""

    prefix: str
    path: str
    argv: tuple[str, ...]
    variables: tuple[str, ...] = ()
    line: int = 0
    raw: str = ""


class Unit(Record):
    """A unit file with its drop-ins merged in order; ask it for what is effective."""

    assignments: tuple[Assignment, ...]
    problems: tuple[Finding, ...]

    def values(self, section: str, key: str) -> list[Assignment]:
        """All assignments of a key that count: those after its last empty assignment."""
        kept: list[Assignment] = []
        for item in self.assignments:
            if item.section == section and item.key == key:
                kept = [*kept, item] if item.value else []
        return kept

    def last(self, section: str, key: str) -> Assignment | None:
        """The assignment that decides a key with one value, or None where it is unset or reset."""
        values = self.values(section, key)
        return values[-1] if values else None

    def value(self, section: str, key: str, default: str = "") -> str:
        """The deciding value of a key, or the default; a word that systemd does not know for the key is ignored."""
        known = CHOICES.get(key) if section == "Service" else None
        values = [item.value for item in self.values(section, key) if known is None or item.value in known]
        return values[-1] if values else default

    def names(self, section: str, key: str) -> list[str]:
        """The words of a list of unit names, such as After=."""
        return [name for item in self.values(section, key) for name in item.value.split()]

    def is_true(self, section: str, key: str) -> bool:
        """Whether a yes-or-no key is set to yes."""
        return self.value(section, key).lower() in _TRUE

    def seconds(self, section: str, key: str) -> float | None:
        """A time span in seconds (infinity for `infinity`); None where unset or unreadable."""
        return time_span_s(self.value(section, key))

    def commands(self, key: str = "ExecStart") -> tuple[Command, ...]:
        """The commands of an Exec key, as far as they can be read."""
        found: list[Command] = []
        for item in self.values("Service", key):
            found.extend(_commands(item)[0])
        return tuple(found)

    def environment(self) -> dict[str, str]:
        """The variables that Environment= sets, later ones winning."""
        merged: dict[str, str] = {}
        for item in self.values("Service", "Environment"):
            for word in _environment_words(item)[0]:
                name, _, value = word.partition("=")
                merged[name] = value
        return merged

    def environment_origins(self) -> dict[str, str]:
        """For each variable of Environment= the file whose assignment decides it."""
        return {
            word.partition("=")[0]: item.origin
            for item in self.values("Service", "Environment")
            for word in _environment_words(item)[0]
        }


def parse_unit(text: str, dropins: Sequence[str | tuple[str, str]] = ()) -> Unit:
    """The unit that systemd would load from a fragment and its drop-ins.

    Args:
        text: the unit file.
        dropins: texts, or pairs of name and text, in the order in which systemd applies them (by file name).

    Raises:
        UnreadableFile: if it is binary, too large, or has no section and no assignment at all.
    """
    assignments: list[Assignment] = []
    problems: list[Finding] = []
    parts: list[tuple[str, str]] = [("unit", text)]
    for index, part in enumerate(dropins):
        parts.append((f"drop-in {index + 1}", part) if isinstance(part, str) else part)
    for origin, content in parts:
        _read_lines(content, origin, assignments, problems)
    if not assignments:
        first = next((line for line in text.splitlines() if line.strip()), "nothing")
        raise UnreadableFile(
            "a systemd unit file with sections and assignments",
            repr(redact_text(first[:4096])[:80]),
            "give the unit's text",
        )
    unit = Unit(assignments=tuple(assignments), problems=())
    for item in assignments:
        problems.extend(_value_problems(item))
    return unit.model_copy(update={"problems": tuple(problems)})


def split_words(text: str, *, escapes: bool = True) -> list[str]:
    """The words of a value as systemd splits and unquotes them.

    Raises:
        ValueError: for unbalanced quoting or an escape that systemd refuses.

    Example: `split_words('a "b c" d\\\\x41')` is `["a", "b c", "dA"]`.
    """
    found = _split(text, escapes=escapes)
    if found.error:
        raise ValueError(found.error)
    return [word for word, _ in found.words]


def time_span_s(text: str) -> float | None:
    """A systemd time span in seconds: `90`, `5min 20s`, `infinity`; None if it is none.

    Example: `time_span_s("1min 30s")` is 90.0.
    """
    text = text.strip()
    if text == "infinity":
        return float("inf")
    total, at = 0.0, 0
    part = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([A-Za-zµ]*)")
    while at < len(text):
        match = part.match(text, at)
        if not match or match[2] not in _UNITS_S:
            return None
        total += float(match[1]) * _UNITS_S[match[2]]
        at = match.end()
    return total if text else None


def _read_lines(text: str, origin: str, assignments: list[Assignment], problems: list[Finding]) -> None:
    if len(text) > MAX_UNIT_CHARACTERS:
        raise UnreadableFile("a unit file of a few kilobytes", f"{len(text)} characters", "give the unit, not a log")
    if "\0" in text:
        raise UnreadableFile("a unit file, which is text", "a NUL character", "give the unit's text")
    where = "" if origin == "unit" else f"{origin}: "

    def report(id_: str, level: str, what: str, line: int, evidence: str, do: str) -> None:
        problems.append(Finding(id=id_, level=level, what=where + what, line=line, evidence=evidence[:300], do=do))

    if "\r" in text:
        report(
            "crlf",
            "info",
            "The file has CR line ends.",
            1,
            "\\r",
            "Save it with LF; older systemd keeps the CR in values.",
        )
    section: str | None = None
    known = False
    pending: list[str] = []
    begun = size = 0
    lines = re.split(r"\r\n|\n\r|\n|\r", text.removeprefix("\ufeff"))
    for number, line in enumerate([*lines, ""], start=1):
        body = line.lstrip(_SPACE)
        if body[:1] in ("#", ";"):
            continue
        if not pending:
            begun, size = number, 0
        part = line if pending else body
        size += len(part.encode("utf-8", "surrogatepass"))
        if size > MAX_LINE_BYTES:
            raise UnreadableFile(
                "a unit whose lines systemd reads, 1 MiB at most", f"{where}line {begun} is longer", "shorten it"
            )
        odd = len(part) - len(part.rstrip("\\"))
        if odd % 2 and number <= len(lines):
            pending.append(part[:-1] + " ")
            continue
        if re.search(r"\\[ \t]+$", part[-1000:]) and not odd:
            report(
                "broken_continuation",
                "error",
                "A blank after the backslash: the line ends here.",
                number,
                line.strip(),
                "Delete the blanks after the backslash.",
            )
        whole = "".join([*pending, part])
        pending = []
        whole = whole.strip(_SPACE)
        if not whole:
            continue
        if whole.startswith("["):
            if not whole.endswith("]"):
                report(
                    "bad_section",
                    "error",
                    "Invalid section header: the file is refused.",
                    begun,
                    whole,
                    "Close the bracket.",
                )
                section, known = None, False
                continue
            section = whole[1:-1]
            known = section in SECTION_KEYS or section in OTHER_SECTIONS or section.startswith("X-")
            if not known:
                right = next((name for name in SECTION_KEYS if name.lower() == section.strip().lower()), None)
                report(
                    "unknown_section",
                    "error" if right else "warning",
                    f"Unknown section '{section}'. Ignoring.",
                    begun,
                    whole,
                    f"Write [{right}]." if right else "Remove it, or prefix it with X-.",
                )
            continue
        if section is None:
            report(
                "outside_section",
                "error",
                "Assignment outside of section. Ignoring.",
                begun,
                whole,
                "Put it under its section.",
            )
            continue
        key, equals, value = whole.partition("=")
        key, value = key.strip(_SPACE), value.strip(_SPACE)
        if not equals or not key:
            missing = "Missing '=', ignoring line." if not equals else "Missing key name before '=', ignoring line."
            report(
                "not_an_assignment",
                "error",
                missing,
                begun,
                whole,
                "A value over several lines needs a backslash at each line's end.",
            )
            continue
        if not known:
            continue
        if section in SECTION_KEYS and key not in SECTION_KEYS[section] and not key.startswith("X-"):
            _report_key(section, key, whole, begun, report)
            if key not in NEWER_KEYS:
                continue
        assignments.append(Assignment(section=section, key=key, value=value, line=begun, origin=origin))


def _report_key(section: str, key: str, whole: str, line: int, report: _Report) -> None:
    says = f"Unknown key '{key}' in section [{section}], ignoring."
    home = next((name for name, keys in SECTION_KEYS.items() if key in keys), None)
    if home:
        report("wrong_section", "warning", says, line, whole, f"Move {key}= to [{home}].")
    elif key in NEWER_KEYS:
        since = NEWER_KEYS[key]
        report(
            "newer_key",
            "info",
            f"{key}= needs systemd {since} or later; older ones ignore it.",
            line,
            whole,
            "Check the host's version.",
        )
    else:
        close = next((k for k in SECTION_KEYS[section] if k.lower() == key.lower() or _near(k, key)), None)
        hint = f"Write {close}=." if close else "Correct or remove it."
        report("unknown_key", "warning", says, line, whole, hint)


def _near(a: str, b: str) -> bool:
    """Whether two names differ by one letter (changed, missing, added or two swapped)."""
    if abs(len(a) - len(b)) > 1 or a == b:
        return False
    start = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    x, y = a[start:], b[start:]
    return x[1:] == y[1:] or x[1:] == y or x == y[1:] or (x[:2] == y[1::-1] and x[2:] == y[2:])


class _Words(Record):
    """Words as (text, was quoted or escaped), unknown escapes that were kept, and why the rest could not be read."""

    words: tuple[tuple[str, bool], ...]
    odd: tuple[str, ...] = ()
    error: str | None = None


def _split(text: str, *, escapes: bool = True, relaxed: bool = True) -> _Words:
    """The words up to the first fault; relaxed (Exec lines) an unknown escape and a last backslash stay as they are."""
    words: list[tuple[str, bool]] = []
    odd: list[str] = []
    at, end = 0, len(text)
    while at < end:
        if text[at] in _SPACE:
            at += 1
            continue
        begins = not words or words[-1] == (";", False)  # the first word of a command has no such escape
        if relaxed and not begins and text[at : at + 2] == "\\;" and (at + 2 == end or text[at + 2] in _SPACE):
            words.append((";", True))
            at += 2
            continue
        word: list[str] = []
        quote = ""
        quoted = False
        while at < end:
            char = text[at]
            if char == "\\":
                quoted = True
                if at + 1 == end:
                    if not relaxed:
                        return _Words(words=tuple(words), error="a backslash at the end")
                    word.append(char)
                    at += 1
                elif escapes:
                    decoded, at, known = _unescape(text, at + 1)
                    word.append(decoded)
                    if not known:
                        odd.append(decoded)
                        if not relaxed:
                            return _Words(words=tuple(words), error=f"unknown escape {decoded}")
                else:
                    word.append(text[at + 1])
                    at += 2
            elif quote:
                at += 1
                if char == quote:
                    quote = ""
                else:
                    word.append(char)
            elif char in "\"'":
                quote, quoted, at = char, True, at + 1
            elif char in _SPACE:
                break
            else:
                word.append(char)
                at += 1
        if quote:
            return _Words(words=tuple(words), odd=tuple(odd), error=f"unbalanced quotes ({quote})")
        words.append(("".join(word), quoted))
    return _Words(words=tuple(words), odd=tuple(odd))


def _unescape(text: str, at: int) -> tuple[str, int, bool]:
    """The character that an escape means, where the text goes on, and whether it is known (else it stays as it is)."""
    char = text[at]
    if char in _ESCAPES:
        return _ESCAPES[char], at + 1, True
    if char in _HEX_LENGTH:
        digits = text[at + 1 : at + 1 + _HEX_LENGTH[char]]
        if len(digits) == _HEX_LENGTH[char] and re.fullmatch(r"[0-9A-Fa-f]+", digits):
            code = int(digits, 16)
            if 0 < code < 0x110000 and not 0xD800 <= code < 0xE000:
                return chr(code), at + 1 + len(digits), True
    octal = text[at : at + 3]
    if re.fullmatch(r"[0-3][0-7]{2}", octal) and int(octal, 8):
        return chr(int(octal, 8)), at + 3, True
    return "\\" + char, at + 1, False


def _resolve(word: str) -> tuple[str, str | None]:
    """The word with `%%` as `%`, and the first specifier that systemd does not know."""
    if "%" not in word:
        return word, None
    bad = None
    for match in re.finditer(r"%(.?)", word, re.DOTALL):
        if match[1] and match[1] not in _SPECIFIERS and bad is None:
            bad = match[0]
    return re.sub(r"%%", "%", word), bad


_VARIABLE = re.compile(r"\$(?:\$|\{([A-Za-z_]\w*)[^}]*\})")


def _expand(word: str, variables: list[str]) -> str:
    """The word with `$$` as `$`; names of variables that systemd would put in are collected, their text stays."""
    if "$" not in word:
        return word
    whole = re.fullmatch(r"\$([A-Za-z_]\w*)", word)
    if whole:
        variables.append(whole[1])
        return word
    variables.extend(match[1] for match in _VARIABLE.finditer(word) if match[1])
    return _VARIABLE.sub(lambda match: "$" if match[1] is None else match[0], word)


@functools.lru_cache(maxsize=32)  # a dozen rules ask for the same line; one of 1 MiB takes a second to read
def _commands(item: Assignment) -> tuple[list[Command], list[Finding]]:
    problems: list[Finding] = []

    def report(id_: str, what: str, do: str, level: str = "error") -> None:
        if len(problems) < _MAX_PROBLEMS:
            what = f"{item.key}: {what}"
            problems.append(Finding(id=id_, level=level, what=what, line=item.line, evidence=item.value[:300], do=do))

    read = _split(item.value)
    groups: list[list[tuple[str, bool]]] = [[]]
    for word in read.words:
        if word[0] == ";" and not word[1]:
            groups.append([])
        else:
            groups[-1].append(word)
    if read.error:
        # in the first word of a further command, the earlier ones stand; anywhere else the unit is refused
        partly = len(groups) > 1 and not groups[-1]
        what = f"{read.error}: systemd {'ignores the rest of' if partly else 'refuses'} the line."
        report("unbalanced_quotes", what, "Close the quotes or escape a literal one.", "warning" if partly else "error")
        if not partly:
            return [], problems
    if read.odd:
        shown = ", ".join(read.odd[:5])
        report("unknown_escape", f"Ignoring unknown escape sequences: {shown}", "Double the backslash.", "warning")
    commands: list[Command] = []
    for group in groups:
        if not group:
            continue
        match = re.match(r"[-@:+!|]*", group[0][0])
        prefix = match[0] if match else ""
        # with - in front, systemd leaves a command out that it cannot read; without, it refuses the unit
        level = "warning" if "-" in prefix else "error"
        rest = [group[0][0][len(prefix) :], *[word for word, _ in group[1:]]]
        resolved = []
        fault = False
        for part in rest:
            text, bad = _resolve(part)
            if bad:
                fault = True
                does = "leaves the command out" if "-" in prefix else "refuses the unit"
                what = f"'{bad}' is no specifier: systemd {does}."
                report("unknown_specifier", what, "Write %% for a percent sign.", level)
            resolved.append(text)
        path = resolved[0]
        if not path or ("/" in path and path[0] not in "/%") or path[-1] == "/" or re.search(_UNSAFE_IN_PATH, path):
            fault = True
            report("bad_command_path", f"{path[:80]!r} is no path of a program.", "Write the absolute path.", level)
        if fault and "-" in prefix:
            continue
        variables: list[str] = []
        raw = ":" in prefix
        argv = [resolved[0], *[word if raw else _expand(word, variables) for word in resolved[1:]]]
        if "@" in prefix:
            argv = argv[1:]
        commands.append(
            Command(
                prefix=prefix, path=path, argv=tuple(argv), variables=tuple(variables), line=item.line, raw=item.value
            )
        )
    return commands, problems


@functools.lru_cache(maxsize=64)
def _environment_words(item: Assignment) -> tuple[list[str], list[Finding]]:
    problems: list[Finding] = []

    def report(id_: str, what: str, do: str, level: str = "warning") -> None:
        if len(problems) < _MAX_PROBLEMS:
            problems.append(Finding(id=id_, level=level, what=what, line=item.line, evidence=shown, do=do))

    shown = _names_only(item.value)

    read = _split(item.value, relaxed=False)
    if read.error:
        what = f"Environment: {read.error}: systemd ignores the rest of the line."
        report("environment_quoting", what, 'Write Environment="NAME=value with spaces"; double a literal backslash.')
    kept = []
    for word, _ in read.words:
        text, bad = _resolve(word)
        if bad:
            report(
                "unknown_specifier", f"Environment: '{bad}' is no specifier: ignored.", "Write %% for a percent sign."
            )
        elif not re.match(r"[A-Za-z_]\w*=", text, re.ASCII):
            what = f"Invalid environment assignment, ignoring: {text.partition('=')[0][:60]}"
            report("environment_quoting", what, 'Quote the whole assignment: Environment="NAME=value with spaces".')
        else:
            kept.append(text)
    return kept, problems


def _names_only(value: str) -> str:
    """The assignment's names with their values cut out: values may be secrets."""
    return re.sub(r"(=)[^\s\"']+", r"\1...", value[:4096])[:200]


def _value_problems(item: Assignment) -> list[Finding]:
    if not item.value or item.section not in SECTION_KEYS:
        return []
    if item.section == "Service" and item.key in _EXEC_KEYS:
        return list(_commands(item)[1])
    if item.section == "Service" and item.key == "Environment":
        return _environment_words(item)[1]
    wrong = None
    if item.key in CHOICES and item.section == "Service" and item.value not in CHOICES[item.key]:
        wrong = f"one of {', '.join(sorted(CHOICES[item.key]))}"
    elif item.key in BOOLEAN_KEYS and item.value.lower() not in _BOOLEANS:
        wrong = "yes or no"
    elif item.key in TIME_KEYS and time_span_s(item.value) is None:
        wrong = "a time span such as 90, 5min or infinity"
    elif item.key == "StartLimitBurst" and not re.fullmatch(r"[0-9]{1,9}", item.value):
        wrong = "a number"
    if wrong is None:
        return []
    comment = re.search(r"\s[#;]", item.value)
    return [
        Finding(
            id="inline_comment" if comment else "invalid_value",
            level="warning",
            what=f"{item.key}={item.value} is ignored: it must be {wrong}.",
            line=item.line,
            evidence=f"{item.key}={item.value}"[:300],
            do="Put the comment on a line of its own." if comment else "Correct the value.",
        )
    ]
