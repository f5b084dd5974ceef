"""Read a service's journal: how often it restarted, how it ended, and whether what the unit says reached the process.

Understands journalctl's `short`, `short-iso`, `cat` and `json` output, `systemctl cat` output in front of it, and
lines of a container supervisor. Lines of an earlier invocation are told apart from those of the current one.

Source: systemd 252's own messages (src/core/service.c, unit.c, job.c); `-u UNIT` shows every invocation, and
`_SYSTEMD_INVOCATION_ID=X` alone leaves systemd's own lines out.
"""

from __future__ import annotations

import json
import re
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import Field

from lib.deploy.unit_lint import unit_secrets
from lib.deploy.unit_parse import Unit, parse_unit
from lib.errors import UnreadableFile
from lib.findings import Finding, worst_level
from lib.records import Record
from lib.server.redact import REDACTED, is_secret_name, redact_object, redact_text

#: From this many restarts on it is a storm: the default start limit would have ended it.
STORM_RESTARTS = 5

_PREFIX = re.compile(
    r"(?:(?P<time>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)?"
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.,:+Z-]*) (?P<host>\S+) )?"
    r"(?P<name>[A-Za-z_(][\w.@()/-]{0,80})(?:\[(?P<pid>\d+)\])?: (?P<message>.*)",
    re.DOTALL | re.ASCII,
)
_COUNTER = re.compile(r"restart counter is at (\d+)")
_EXITED = re.compile(r"[Mm]ain process exited, code=(exited|killed|dumped), status=(\d+)(?:/(\S+))?")
_RESULT = re.compile(r"Failed with result '([\w-]+)'")
_STARTED = re.compile(r"^Started |^Starting ")
_TOO_QUICKLY = re.compile(r"Start request repeated too quickly|start-limit-hit")
_START_TIMEOUT = re.compile(r"(start(?:-pre|-post)?) operation timed out")
_STOP_TIMEOUT = re.compile(r"State '((?:stop|final)[\w-]*)' timed out")
_SIGKILLED = re.compile(r"Killing process (\d+) \(([^)]*)\) with signal SIGKILL")
_LEFT_OVER = re.compile(
    r"Found left-over process (\d+) \(([^)]*)\)|Unit process (\d+) \(([^)]*)\) remains running after unit stopped"
)
_OOM = re.compile(r"killed by the OOM killer|Out of memory: Killed process|oom-kill:|Memory cgroup out of memory")
_UNKNOWN_KEY = re.compile(r"Unknown (?:key name|key|lvalue) '([^']+)' in section '?\[?(\w+)\]?'?")
_RELOAD = re.compile(r"changed on disk|daemon-reload")
_STEP = re.compile(r"Failed at step (\w+) spawning (\S+): (.*)")
_DONE = re.compile(r"Deactivated successfully|: Succeeded\.")
_REPEATED = re.compile(
    r"repeated (?:about |around |some |roughly |~ ?|more than )?(\d[\d,]*) times"
    r"|\((?:x|×) ?(\d+)\)|restarted (?:about |~)?(\d+) times"
)
_POLICY = re.compile(r"\brestart: ?[\"']?(unless-stopped|always|on-failure(?::\d+)?)")
_CONTAINER_EXIT = re.compile(r"exited with code (\d+)|container die")
_EXCEPTION = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Interrupt))(?:: |$)")
_VLLM_MEMORY = re.compile(
    r"Free memory on device (\S+) \(([\d.]+)/([\d.]+) GiB\) on startup is less than desired GPU memory utilization"
    r" \(([\d.]+), ([\d.]+) GiB\)"
)
_SGLANG_MEMORY = re.compile(
    r"Loaded weights leave no GPU memory|Not enough memory\. Please try to increase --mem-fraction-static"
)
#: Without one of these a line holds no event; most lines are the server's own.
_HINTS = (
    "restart",
    "exited",
    "ailed",
    "Start",
    "timed out",
    "Killing process",
    "left-over",
    "remains running",
    "OOM",
    "oom-kill",
    "Out of memory",
    "Memory cgroup",
    "Unknown",
    "changed on disk",
    "daemon-reload",
    "Deactivated",
    "Succeeded",
    "repeated",
    "(x",
    "(×",
    "Error",
    "Exception",
    "Interrupt",
    "Free memory on device",
    "leave no GPU memory",
    "Not enough memory",
    "container die",
)
#: How many lines that show a setting of the unit are looked at, the last ones.
_KEPT_LINES = 10_000
_HEADER = re.compile(r"^# (/\S+\.(?:service|conf))\s*$")
_SERVER_ARGS = re.compile(r"server_args=(?:ServerArgs)?\(")


class Invocation(Record):
    """One start of the service: its id where the journal has one, its pid and how it ended."""

    id: str | None = None
    pid: int | None = None
    first_line: int
    lines: int
    exit_code: int | None = None
    exit_signal: str | None = None
    result: str | None = None


class SettingCheck(Record):
    """One setting of the unit as the journal shows it in the process."""

    name: str
    expected: str
    seen: tuple[str, ...]
    applied: bool | None
    origin: str


class JournalReport(Record):
    """What a journal tells about a service."""

    class_: str = Field(serialization_alias="class")
    severity: str | None = None
    findings: tuple[Finding, ...] = ()
    lines: int
    format: str
    restarts_about: int
    restart_limit_hit: bool = False
    restart_policy: str | None = None
    invocations: tuple[Invocation, ...] = ()
    current_invocation: str | None = None
    exit_code: int | None = None
    exit_signal: str | None = None
    result: str | None = None
    cause: str | None = None
    failing_check: str | None = None
    memory_free_gib: float | None = None
    memory_total_gib: float | None = None
    memory_target_frac: float | None = None
    memory_target_gib: float | None = None
    left_over_pids: tuple[int, ...] = ()
    settings: tuple[SettingCheck, ...] = ()
    unit_valid: bool | None = None
    dropin_valid: bool | None = None
    dropin_applied: bool | None = None


class _Line(NamedTuple):
    number: int
    message: str
    name: str | None = None
    pid: int | None = None
    invocation: str | None = None


def split_bundle(text: str) -> tuple[str | None, list[tuple[str, str]], str]:
    """The parts of `systemctl cat` output with a journal behind it: (unit, drop-ins with their names, journal).

    A text without such headers is all journal.
    """
    text = text.removeprefix("\ufeff")
    if not re.search(r"(?m)^# /\S+\.(?:service|conf)\s*$", text[: 1 << 20]):
        return None, [], text
    unit: str | None = None
    dropins: list[tuple[str, str]] = []
    journal: list[str] = []
    target = "journal"
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            target = "dropin" if ".d/" in header[1] or header[1].endswith(".conf") else "unit"
            if target == "dropin":
                dropins.append((header[1].rsplit("/", 1)[-1], ""))
            elif unit is None:
                unit = ""
            continue
        stripped = line.strip().lower()
        if stripped.startswith("#") and "journal" in stripped or target != "journal" and _begins_journal(line):
            target = "journal"
            if stripped.startswith("#"):
                continue
        if target == "unit":
            unit = (unit or "") + line + "\n"
        elif target == "dropin":
            dropins[-1] = (dropins[-1][0], dropins[-1][1] + line + "\n")
        else:
            journal.append(line)
    return unit, dropins, "\n".join(journal)


def _begins_journal(line: str) -> bool:
    match = _PREFIX.match(line)
    return bool(match and match["pid"])


def read_journal(text: str, unit: Unit | None = None) -> JournalReport:
    """What happened to the service, from its journal; with a unit, also whether its settings reached the process.

    Args:
        text: the journal, or `systemctl cat` output followed by it (then the unit is read from there).
        unit: the unit with its drop-ins.

    Raises:
        UnreadableFile: if there is no line of text in it.
    """
    if "\0" in text[:4096]:
        raise UnreadableFile(
            "journalctl output, which is text", "binary data", "give the output of journalctl -u UNIT -o json"
        )
    fragment, dropins, body = split_bundle(text)
    unit_valid = dropin_valid = None
    if fragment is not None:
        bad = parse_unit(fragment).problems
        unit_valid = not any(problem.level != "info" for problem in bad)
        unit = unit or parse_unit(fragment, dropins)
    if dropins:
        dropin_valid = not any(p.level != "info" for _, content in dropins for p in parse_unit(content).problems)
    secrets = unit_secrets(unit) if unit else ()
    wanted = [*unit.environment(), "server_args="] if unit else []
    forms: set[str] = set()
    facts, events, kept, count = _facts(_lines(body, forms), wanted)
    if not count:
        raise UnreadableFile("a journal with at least one line", "nothing", "give the output of journalctl -u UNIT")
    settings = _settings(unit, kept) if unit else ()
    findings = [*_judge(facts, events), *_judge_settings(settings)]
    order = {"error": 0, "warning": 1, "info": 2}
    findings.sort(key=lambda finding: order[finding.level])
    from_dropins = [item for item in settings if item.origin != "unit" and item.applied is not None]
    report = JournalReport(
        class_=_class(facts, events, settings),
        severity=worst_level(findings),
        findings=tuple(findings),
        lines=count,
        format=next((form for form in ("json", "short") if form in forms), "cat"),
        settings=settings,
        unit_valid=unit_valid,
        dropin_valid=dropin_valid,
        dropin_applied=all(item.applied for item in from_dropins) if from_dropins else None,
        **facts,
    )
    return redact_object(report, secrets)


def _lines(text: str, forms: set[str]) -> Iterator[_Line]:
    """The journal's lines one by one; the output forms that were met are added to `forms`."""
    for number, found in enumerate(re.finditer(r"[^\r\n]*(?:\r\n|\n|\r|\Z)", text), start=1):
        raw = found[0].rstrip("\r\n")
        if not raw.strip() or raw.startswith("-- "):
            continue
        if raw.lstrip().startswith("{") and '"MESSAGE"' in raw:
            entry = _entry(raw)
            if entry is not None:
                forms.add("json")
                yield _from_entry(number, entry)
                continue
        match = _PREFIX.match(raw)
        if match and (match["time"] or match["pid"]):
            forms.add("short")
            pid = int(match["pid"]) if match["pid"] and len(match["pid"]) < 12 else None
            yield _Line(number, match["message"], match["name"], pid)
        else:
            yield _Line(number, raw.strip())


def _entry(raw: str) -> dict[str, Any] | None:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _from_entry(number: int, entry: dict[str, Any]) -> _Line:
    message = entry.get("MESSAGE")
    if isinstance(message, list):
        message = bytes(byte for byte in message if isinstance(byte, int) and 0 <= byte < 256).decode(
            "utf-8", "replace"
        )
    pid = str(entry.get("_PID", ""))
    invocation = entry.get("INVOCATION_ID") or entry.get("_SYSTEMD_INVOCATION_ID")
    return _Line(
        number=number,
        message=str(message or ""),
        name=str(entry.get("SYSLOG_IDENTIFIER") or entry.get("_COMM") or "") or None,
        pid=int(pid) if re.fullmatch(r"[0-9]{1,10}", pid) else None,
        invocation=str(invocation) if invocation else None,
    )


def _own(message: str) -> str:
    """systemd's message without the unit's name in front of it."""
    return re.sub(r"^[\w@.\\:-]+\.service: ", "", message)


def _facts(lines: Iterator[_Line], wanted: list[str]) -> tuple[dict[str, Any], dict[str, _Event], list[_Line], int]:
    """The fields of the report, the first event of each kind, the last lines with a wanted word, and how many lines."""
    restarts = scheduled = repeated = container_exits = 0
    facts: dict[str, Any] = {}
    events: dict[str, _Event] = {}
    exceptions: Counter[str] = Counter()
    left_over: list[int] = []
    invocations: list[dict[str, Any]] = []
    by_id: dict[str, dict[str, Any]] = {}
    begun = False  # a start line of the invocation in progress was seen
    kept: deque[_Line] = deque(maxlen=_KEPT_LINES)
    count = 0
    for line in lines:
        count += 1
        if wanted and any(word in line.message for word in wanted):
            kept.append(line)
        message = _own(line.message)
        systemd = line.name in (None, "systemd") or line.name == "systemd[1]"
        current = by_id.get(line.invocation) if line.invocation else (invocations[-1] if invocations else None)
        starts = systemd and _STARTED.match(message) is not None
        if current is None or (not line.invocation and starts and (not begun or message.startswith("Starting"))):
            current = {"id": line.invocation, "first_line": line.number, "lines": 0}
            invocations.append(current)
            if line.invocation:
                by_id[line.invocation] = current
        begun = begun or starts
        current["lines"] += 1
        if not systemd and line.pid and current.get("pid") is None:
            current["pid"] = line.pid
        if not any(hint in message for hint in _HINTS):
            continue
        for hit in _COUNTER.finditer(message):
            restarts = max(restarts, int(hit[1][:9]))
            scheduled += 1
        match = _EXITED.search(message)
        if match:
            begun = False
            name = match[3] or ""
            code = int(match[2][:9])
            if match[1] == "exited":
                current["exit_code"], current["exit_signal"] = code, None
                facts["exit_code"], facts["exit_signal"] = code, None
            else:
                signal = f"SIG{name}" if name and not name.startswith("SIG") else name or str(code)
                current["exit_signal"], current["exit_code"] = signal, None
                facts["exit_signal"], facts["exit_code"] = signal, None
        match = _RESULT.search(message)
        if match:
            begun = False
            current["result"] = facts["result"] = match[1]
        if _DONE.search(message):
            begun = False
            current["result"] = facts["result"] = "success"
        for hit in _REPEATED.finditer(message):
            repeated = max(repeated, int(next(g for g in hit.groups() if g).replace(",", "")[:9]))
        container_exits += bool(_CONTAINER_EXIT.search(message))
        match = _POLICY.search(message)
        if match:
            facts["restart_policy"] = match[1]
        match = _LEFT_OVER.search(message)
        if match:
            left_over.append(int((match[1] or match[3])[:9]))
        match = _VLLM_MEMORY.search(message)
        if match:
            free, total, frac, target = (float(match[i].strip(".") or 0) for i in (2, 3, 4, 5))
            facts |= {
                "memory_free_gib": free,
                "memory_total_gib": total,
                "memory_target_frac": frac,
                "memory_target_gib": target,
                "failing_check": f"{free:g} of {total:g} GiB free < {frac:g} target ({target:g})",
            }
        if _EXCEPTION.match(message):
            exceptions[redact_text(message)[:300]] += 1
        for kind, pattern in _EVENTS.items():
            match = pattern.search(message)
            if match and kind not in events:
                events[kind] = (line.number, redact_text(line.message)[:200], match)
    cause, times = exceptions.most_common(1)[0] if exceptions else (None, 0)
    failed = sum(
        1
        for item in invocations
        if item.get("result") not in (None, "success") or item.get("exit_signal") or item.get("exit_code")
    )
    facts |= {
        "restarts_about": max(restarts, scheduled, repeated, container_exits - 1, times - 1, failed - 1, 0),
        "restart_limit_hit": "too_quickly" in events,
        "invocations": tuple(Invocation(**item) for item in invocations),
        "current_invocation": invocations[-1].get("id") if invocations else None,
        "cause": cause,
        "left_over_pids": tuple(dict.fromkeys(left_over)),
    }
    return facts, events, list(kept), count


_Event = tuple[int, str, re.Match[str]]
_EVENTS: dict[str, re.Pattern[str]] = {
    "too_quickly": _TOO_QUICKLY,
    "start_timeout": _START_TIMEOUT,
    "stop_timeout": _STOP_TIMEOUT,
    "sigkilled": _SIGKILLED,
    "left_over": _LEFT_OVER,
    "oom": _OOM,
    "unknown_key": _UNKNOWN_KEY,
    "reload": _RELOAD,
    "step": _STEP,
    "memory": re.compile(f"{_VLLM_MEMORY.pattern}|{_SGLANG_MEMORY.pattern}"),
}


def _class(facts: dict[str, Any], events: dict[str, _Event], settings: tuple[SettingCheck, ...]) -> str:
    """One word for the whole journal, the gravest first."""
    if facts["restart_limit_hit"]:
        return "start_limit_hit"
    if facts["restarts_about"] >= STORM_RESTARTS:
        return "restart_storm"
    for kind, name in (("step", "exec_failed"), ("oom", "oom_killed"), ("start_timeout", "start_timeout")):
        if kind in events:
            return name
    if "stop_timeout" in events or facts.get("result") == "timeout":
        return "stop_timeout"
    if (
        facts.get("result") not in (None, "success")
        or facts.get("exit_signal")
        or facts.get("exit_code")
        or facts.get("cause")
    ):
        return "crash"
    if any(item.applied is False for item in settings):
        return (
            "dropin_not_applied"
            if any(item.applied is False and item.origin != "unit" for item in settings)
            else "unit_not_applied"
        )
    if facts.get("result") == "success":
        return "clean_stop"
    return "no_failure_seen"


def _judge(facts: dict[str, Any], events: dict[str, _Event]) -> list[Finding]:
    found: list[Finding] = []

    def add(id_: str, level: str, what: str, do: str, kind: str | None = None) -> None:
        line, quote, _ = events[kind] if kind else (None, facts.get("cause") or "", None)
        found.append(Finding(id=id_, level=level, what=what, do=do, evidence=quote, line=line))

    restarts = facts["restarts_about"]
    if facts["restart_limit_hit"]:
        add(
            "start_limit_hit",
            "error",
            f"systemd gave up after about {restarts} restarts; it stays down.",
            "Correct the cause, then `systemctl reset-failed UNIT` and start it.",
            "too_quickly",
        )
    elif restarts >= STORM_RESTARTS:
        policy = facts.get("restart_policy")
        by = f" under restart: {policy}" if policy else ""
        add(
            "restart_storm",
            "error",
            f"About {restarts} restarts{by}, each failing again: every cycle loads the model, and nothing ends it.",
            "Stop it; bound restarts (StartLimitIntervalSec= above burst x cycle, or on-failure:N), with a delay.",
            "memory" if "memory" in events else None,
        )
    elif restarts:
        add(
            "restarted",
            "warning",
            f"The service restarted about {restarts} times in this journal.",
            "Find out why it died.",
        )
    if "memory" in events:
        shown = facts.get("failing_check")
        add(
            "gpu_memory_check_failed",
            "error",
            f"The start's memory check failed{': ' + shown if shown else ''}.",
            "Find who holds the memory (an earlier process?), or ask for less.",
            "memory",
        )
    if "step" in events:
        match = events["step"][2]
        add(
            "exec_failed",
            "error",
            f"systemd could not run the command (step {match[1]}): {redact_text(match[3])[:100]}",
            "Check path, user, directory and permissions.",
            "step",
        )
    if "oom" in events:
        add(
            "oom_killed",
            "error",
            "The kernel killed a process of the service for host memory.",
            "Look at MemoryMax= and at the host's memory.",
            "oom",
        )
    if "start_timeout" in events:
        add(
            "start_timeout",
            "error",
            "The start took longer than TimeoutStartSec= and was ended.",
            "Raise it above the load time.",
            "start_timeout",
        )
    if "stop_timeout" in events or "sigkilled" in events:
        add(
            "stop_timeout",
            "warning",
            "The stop took longer than TimeoutStopSec=: SIGKILL.",
            "Expected with a stream in flight; see that the GPU memory came back.",
            "stop_timeout" if "stop_timeout" in events else "sigkilled",
        )
    if "left_over" in events:
        add(
            "left_over_processes",
            "error",
            f"Processes of an earlier start are still alive: {list(facts['left_over_pids'])[:8]}.",
            "Remove KillMode=process or none; end them by pid.",
            "left_over",
        )
    if "unknown_key" in events:
        match = events["unknown_key"][2]
        add(
            "key_ignored",
            "warning",
            f"systemd ignores {match[1]}= in [{match[2]}].",
            "Put it into its own section or correct it.",
            "unknown_key",
        )
    if "reload" in events:
        add(
            "reload_needed",
            "warning",
            "The unit on disk is not the one that runs.",
            "`systemctl daemon-reload`, then restart.",
            "reload",
        )
    several = [item for item in facts["invocations"] if item.lines]
    if len(several) > 1:
        what = f"The lines come from {len(several)} invocations; only the last one describes what runs now."
        found.append(
            Finding(
                id="several_invocations",
                level="info",
                what=what,
                line=several[-1].first_line,
                do="journalctl _SYSTEMD_INVOCATION_ID=X + INVOCATION_ID=X shows one.",
            )
        )
    return found


def _judge_settings(settings: tuple[SettingCheck, ...]) -> list[Finding]:
    return [
        Finding(
            id="dropin_not_applied" if item.origin != "unit" else "unit_not_applied",
            level="warning",
            what=f"{item.name} is {item.expected!r} in the {item.origin}, but the process shows {_other(item)}.",
            evidence=f"{item.name}={item.seen[0]}",
            do="systemctl daemon-reload, restart, then systemctl show -p Environment UNIT.",
        )
        for item in settings
        if item.applied is False
    ]


def _other(item: SettingCheck) -> str:
    hidden = REDACTED in item.expected and item.seen[-1] == item.expected
    return "another value (both are hidden)" if hidden else repr(item.seen[0])


def _settings(unit: Unit, lines: list[_Line]) -> tuple[SettingCheck, ...]:
    """Settings of the unit that some line of the journal shows: environment variables, and SGLang's own arguments."""
    origins = unit.environment_origins()
    found: list[SettingCheck] = []
    for name, expected in unit.environment().items():
        seen: list[str] = []
        pattern = re.compile(rf"""(?<![\w]){re.escape(name)}(?:=|:|["']: ["'])([^\s\]"',}}]*)""")
        for line in lines:
            if name in line.message:
                seen.extend(match[1] for match in pattern.finditer(line.message))
        if seen:
            found.append(
                SettingCheck(
                    name=name,
                    expected=_hidden(name, expected),
                    seen=tuple(dict.fromkeys(_hidden(name, value) for value in seen)),
                    applied=seen[-1] == expected,
                    origin=origins[name],
                )
            )
    found.extend(_arguments(unit, lines))
    return tuple(found)


def _hidden(name: str, value: str) -> str:
    """A variable's value as it may be shown: after the comparison, which needs the real one."""
    if is_secret_name(name):
        return REDACTED if value else value
    shown = redact_text(f"{name}={value}")
    return shown.removeprefix(f"{name}=")


#: Flags whose value SGLang keeps as given, as far as one is given (it resolves the others).
_KEPT_FLAGS = (
    "model-path",
    "port",
    "host",
    "tp-size",
    "dp-size",
    "kv-cache-dtype",
    "mem-fraction-static",
    "context-length",
    "served-model-name",
)
_ALIASES = {"tp": "tp-size", "tensor-parallel-size": "tp-size", "model": "model-path", "dp": "dp-size"}


def _arguments(unit: Unit, lines: list[_Line]) -> list[SettingCheck]:
    shown = [line.message for line in lines if _SERVER_ARGS.search(line.message)]
    commands = unit.commands("ExecStart")
    if not shown or not commands:
        return []
    item = unit.last("Service", "ExecStart")
    origin = item.origin if item else "unit"
    words = commands[-1].argv
    asked: dict[str, str] = {}
    for index, word in enumerate(words):
        name, equals, value = word.removeprefix("--").partition("=")
        name = _ALIASES.get(name, name)
        if word.startswith("--") and name in _KEPT_FLAGS:
            asked[name] = value if equals else (words[index + 1] if index + 1 < len(words) else "")
    found = []
    for name, expected in asked.items():
        field = name.replace("-", "_")
        seen = re.findall(rf"""\b{field}=(?:'([^']*)'|"([^"]*)"|([^,)\s]+))""", shown[-1])
        if not seen or expected == "auto":
            continue
        value = "".join(seen[0])
        same = value == expected or _number(value) is not None and _number(value) == _number(expected)
        same = same or {value, expected} == {"bf16", "bfloat16"}
        found.append(SettingCheck(name=f"--{name}", expected=expected, seen=(value,), applied=same, origin=origin))
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
