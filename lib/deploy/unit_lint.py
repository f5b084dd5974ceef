"""Judge a unit file: real mistakes with a level, the evidence and what to do; a good unit gets nothing above `info`.

`error`: it does not work, or leaves processes or secrets behind. `warning`: it works until something goes wrong.
`info`: a matter of taste or of a default that a reader may not know.

Each rule is one function in RULES. Source of what systemd does: systemd.service(5), systemd.exec(5), systemd.kill(5),
systemd.unit(5) of 252; of what a model server does: recorded SGLang 0.5.16 runs and the threads named beside the rule.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from lib.deploy.unit_parse import Command, Unit, parse_unit
from lib.errors import UnreadableFile
from lib.findings import Finding, worst_level
from lib.records import Record
from lib.server.redact import REDACTED, find_secrets, is_secret_name, redact_object, redact_text

DEFAULT_TIMEOUT_S = 90.0
DEFAULT_RESTART_DELAY_S = 0.1
DEFAULT_LIMIT_INTERVAL_S = 10.0
DEFAULT_LIMIT_BURST = 5
#: A model server that is ready sooner than this is not what these rules are about.
SHORT_LOAD_S = 300.0

_ENGINE = re.compile(
    r"\b(?:sglang|vllm|ollama|lmdeploy|tritonserver|trtllm\S*|ktransformers|aphrodite|text-generation-launcher|mlc_llm)\b"
    r"|llama-server|llama\.cpp|launch_server|sglang",
    re.IGNORECASE,
)
_MAYBE = re.compile(r"llm|inference|sglang|vllm|gpu|cuda|model", re.IGNORECASE)
_SHELLS = ("sh", "bash", "dash", "zsh")


class UnitReport(Record):
    """What a unit says: its effective settings and the findings about it."""

    valid: bool = True
    severity: str | None = None
    findings: tuple[Finding, ...] = ()
    type: str = "simple"
    command: tuple[str, ...] = ()
    user: str | None = None
    kill_mode: str = "control-group"
    restart: str = "no"
    restart_delay_s: float = DEFAULT_RESTART_DELAY_S
    start_limit_burst: int = DEFAULT_LIMIT_BURST
    start_limit_interval_s: float | None = DEFAULT_LIMIT_INTERVAL_S
    start_limit_is_default: bool = True
    start_limit_stops_instant_failures: bool | None = None
    effective_limit: str = ""
    timeout_start_s: float | None = None
    timeout_stop_s: float | None = None
    environment: dict[str, str] = {}
    environment_files: tuple[str, ...] = ()
    serves_model: bool = False
    container: bool = False


class _Context:
    """A unit with what several rules ask of it."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    @cached_property
    def commands(self) -> tuple[Command, ...]:
        return self.unit.commands("ExecStart")

    @cached_property
    def main(self) -> Command | None:
        return self.commands[0] if self.commands else None

    @cached_property
    def words(self) -> list[str]:
        """The main command's words, with a shell's -c text split into words too."""
        if self.main is None:
            return []
        words = [self.main.path, *self.main.argv[1:]]
        return [
            part for word in words for part in (word.split() if self.shell_text and word == self.shell_text else [word])
        ]

    @cached_property
    def shell_text(self) -> str | None:
        """The text after `sh -c`, or None where no shell is asked to read any."""
        if self.main is None or self.main.path.rsplit("/", 1)[-1] not in _SHELLS:
            return None
        for option, text in zip(self.main.argv[1:], self.main.argv[2:], strict=False):
            if re.fullmatch(r"-[a-z]*c", option):
                return text
        return None

    @cached_property
    def script(self) -> bool:
        """Whether what the command does is hidden in a script."""
        return self.main is not None and (
            self.main.path.endswith(".sh")
            or self.shell_text is not None
            or any(
                word.endswith(".sh")
                for word in self.main.argv[1:2]
                if self.main and self.main.path.rsplit("/", 1)[-1] in _SHELLS
            )
        )

    @cached_property
    def docker(self) -> list[str]:
        """The words after `docker run` (or podman), empty where the unit runs no container."""
        words = self.words
        for index, word in enumerate(words):
            if word.rsplit("/", 1)[-1] in ("docker", "podman", "nerdctl"):
                rest = words[index + 1 :]
                if "run" in rest[:4]:
                    return rest[rest.index("run") + 1 :]
                if "compose" in rest[:2]:
                    return rest
        return []

    @cached_property
    def podman(self) -> bool:
        """Whether podman runs the container: its conmon tells systemd that it is ready, and does not wait for a model."""
        return bool(self.docker) and any(word.rsplit("/", 1)[-1] == "podman" for word in self.words[:3])

    @cached_property
    def image(self) -> str | None:
        """The image that `docker run` starts: the first word that is no option or an option's value."""
        rest = iter(self.docker)
        flags = {
            "--rm",
            "-d",
            "--detach",
            "-i",
            "-t",
            "-it",
            "-ti",
            "--init",
            "--privileged",
            "--read-only",
            "--interactive",
            "--tty",
        }
        for word in rest:
            if word == "compose" or word == "up":
                return None
            if not word.startswith("-"):
                return word
            if word not in flags and "=" not in word:
                next(rest, None)
        return None

    @cached_property
    def serves_model(self) -> bool:
        return bool(_ENGINE.search(" ".join(self.words)))

    @cached_property
    def may_serve_model(self) -> bool:
        described = self.unit.value("Unit", "Description") + " " + " ".join(self.words)
        return self.serves_model or (self.script and bool(_MAYBE.search(described)))

    @cached_property
    def gpu(self) -> bool:
        names = self.unit.environment()
        return self.serves_model or any("CUDA" in name or "NVIDIA" in name for name in names) or "--gpus" in self.words

    @cached_property
    def type(self) -> str:
        chosen = self.unit.value("Service", "Type")
        return chosen or ("simple" if self.commands else "oneshot")

    @cached_property
    def restart(self) -> str:
        return self.unit.value("Service", "Restart", "no")

    @cached_property
    def restart_delay_s(self) -> float:
        found = self.unit.seconds("Service", "RestartSec")
        return DEFAULT_RESTART_DELAY_S if found is None else found

    @cached_property
    def burst(self) -> int:
        for section in ("Unit", "Service"):
            text = self.unit.value(section, "StartLimitBurst")
            if re.fullmatch(r"[0-9]{1,9}", text):
                return int(text)
        return DEFAULT_LIMIT_BURST

    @cached_property
    def interval_s(self) -> float:
        for section, key in (
            ("Unit", "StartLimitIntervalSec"),
            ("Unit", "StartLimitInterval"),
            ("Service", "StartLimitInterval"),
        ):
            found = self.unit.seconds(section, key)
            if found is not None:
                return found
        return DEFAULT_LIMIT_INTERVAL_S

    @cached_property
    def interval_is_default(self) -> bool:
        keys = (("Unit", "StartLimitIntervalSec"), ("Unit", "StartLimitInterval"), ("Service", "StartLimitInterval"))
        return all(self.unit.seconds(section, key) is None for section, key in keys)

    @cached_property
    def instant_failures_stop(self) -> bool:
        """Whether a service that dies at once runs into its start limit within the interval."""
        return self.interval_s > 0 and self.burst > 0 and self.burst * self.restart_delay_s <= self.interval_s

    def seconds(self, key: str) -> float | None:
        """A timeout in seconds as it applies: TimeoutSec sets both; 0 is infinity; None where unset."""
        latest = None
        for item in self.unit.assignments:
            if item.section == "Service" and item.key in (key, "TimeoutSec"):
                latest = self.unit.seconds("Service", item.key) if item.value else None
        return math.inf if latest == 0 else latest

    def find(
        self,
        id_: str,
        level: str,
        what: str,
        do: str,
        key: str | None = None,
        evidence: str | None = None,
        section: str = "Service",
        source: str = "",
    ) -> Finding:
        """A finding that quotes the deciding line of a key."""
        item = self.unit.last(section, key) if key else None
        if evidence is None:
            evidence = f"{item.key}={item.value}" if item else ""
        line = item.line if item else None
        shown = redact_text(evidence)[:200]
        return Finding(id=id_, level=level, what=what, do=do, evidence=shown, line=line, source=source)


Rule = Callable[[_Context], Iterator[Finding]]


def lint_unit(text: str, dropins: Sequence[str | tuple[str, str]] = ()) -> list[Finding]:
    """The findings about a unit file and its drop-ins, worst first.

    Example: a unit with `KillMode=process` that runs vLLM gets `kill_mode_leaves_processes` at level `error`.
    """
    return list(read_unit(text, dropins).findings)


def read_unit(text: str, dropins: Sequence[str | tuple[str, str]] = ()) -> UnitReport:
    """The effective settings of a unit with the findings about it; secrets are hidden.

    Raises:
        UnreadableFile: if the text is no unit file, or one of another kind (a timer, a socket).
    """
    unit = parse_unit(text, dropins)
    sections = dict.fromkeys(item.section for item in unit.assignments)
    # a misspelt [Service] is a finding; a file that never meant one is of another kind
    odd = {"unknown_section", "bad_section", "outside_section"} & {problem.id for problem in unit.problems}
    if "Service" not in sections and not odd and not re.search(r"(?i)\bservice[ \t]*\]", text):
        shown = redact_text(", ".join(f"[{name}]" for name in sections))[:80]
        raise UnreadableFile("a service unit, with a [Service] section", f"only {shown}", "give the .service file")
    context = _Context(unit)
    found = list(unit.problems)
    for rule in RULES:
        found.extend(rule(context))
    secrets = unit_secrets(unit)
    found = [
        finding.model_copy(
            update=redact_object({"what": finding.what, "evidence": finding.evidence, "do": finding.do}, secrets)
        )
        for finding in found
    ]
    found.sort(key=lambda finding: {"error": 0, "warning": 1, "info": 2}[finding.level])
    limit = f"{context.burst} starts in {'the default ' if context.interval_is_default else ''}{context.interval_s:g} s"
    if context.interval_s <= 0 or context.burst <= 0:
        limit = "none"
    stop_s = context.seconds("TimeoutStopSec")
    start_s = context.seconds("TimeoutStartSec")
    return UnitReport(
        valid=not any(finding.level == "error" and finding.id in _REFUSED for finding in found),
        severity=worst_level(found),
        findings=tuple(found),
        type=context.type,
        command=tuple(redact_object(list(context.main.argv), secrets)) if context.main else (),
        user=redact_text(unit.value("Service", "User"), secrets) or None,
        kill_mode=unit.value("Service", "KillMode", "control-group"),
        restart=context.restart,
        restart_delay_s=context.restart_delay_s,
        start_limit_burst=context.burst,
        start_limit_interval_s=_finite(context.interval_s),
        start_limit_is_default=context.interval_is_default,
        start_limit_stops_instant_failures=context.instant_failures_stop if context.restart != "no" else None,
        effective_limit=limit,
        timeout_start_s=_finite(DEFAULT_TIMEOUT_S if start_s is None else start_s),
        timeout_stop_s=_finite(DEFAULT_TIMEOUT_S if stop_s is None else stop_s),
        environment=redact_object(unit.environment(), secrets),
        environment_files=tuple(redact_text(item.value, secrets) for item in unit.values("Service", "EnvironmentFile")),
        serves_model=context.serves_model,
        container=bool(context.docker),
    )


def unit_secrets(unit: Unit) -> tuple[str, ...]:
    """The secret values that stand in a unit, to be removed from whatever quotes it or its journal."""
    commands = [list(command.argv) for item in _EXEC for command in unit.commands(item)]
    return find_secrets([commands, unit.environment()])


_EXEC = ("ExecStartPre", "ExecStart", "ExecStartPost", "ExecReload", "ExecStop", "ExecStopPost")
#: Findings with which systemd does not load the unit at all.
_REFUSED = frozenset(
    {
        "no_exec_start",
        "several_exec_start",
        "relative_command",
        "unbalanced_quotes",
        "unknown_specifier",
        "bad_section",
        "bad_command_path",
    }
)


def _finite(value: float) -> float | None:
    """The value, or None for infinity (the JSON says null: no limit)."""
    return None if math.isinf(value) else value


def _exec_start(c: _Context) -> Iterator[Finding]:
    if not c.unit.values("Service", "ExecStart"):
        if not any(item.section == "Service" for item in c.unit.assignments):
            return
        if not c.unit.values("Service", "ExecStop") and not c.unit.values("Service", "SuccessAction"):
            yield c.find(
                "no_exec_start", "error", "The service has no ExecStart=: systemd refuses it.", "Give it a command."
            )
        return
    if len(c.commands) > 1 and c.type != "oneshot":
        yield c.find(
            "several_exec_start",
            "error",
            f"{len(c.commands)} ExecStart= commands, which only Type=oneshot may have.",
            "Reset it with an empty ExecStart= in the drop-in before the new one.",
            "ExecStart",
        )
    for key in _EXEC:
        for command in c.unit.commands(key):
            if re.match(r"[A-Za-z]", command.path):
                venv = re.match(r"python|pip|conda|uv|vllm|sglang|torchrun|accelerate", command.path)
                what = (
                    f"{key}= begins with {command.path[:80]!r}, no absolute path: systemd looks only in its own"
                    " fixed PATH,"
                    " never in a virtual environment."
                )
                yield c.find("bare_command", "warning" if venv else "info", what, "Write the absolute path.", key)


def _swallowed(c: _Context) -> Iterator[Finding]:
    for key in _EXEC:
        for command in c.unit.commands(key):
            taken = next(
                (
                    w
                    for w in command.argv[1:]
                    if re.match(
                        r"(?:Restart|RestartSec|User|Group|Environment|EnvironmentFile|KillMode|Type|"
                        r"WorkingDirectory|Timeout\w+Sec|Exec\w+|Standard(?:Output|Error)|Limit[A-Z]+|WantedBy|After|Wants)=",
                        w,
                    )
                ),
                None,
            )
            if taken or "[Install]" in command.argv or "[Service]" in command.argv:
                yield c.find(
                    "swallowed_line",
                    "error",
                    f"{key}= took the line {redact_text(taken or '[Install]')[:60]!r} as an argument:"
                    " the line above it ends with a backslash.",
                    "Remove the last backslash.",
                    key,
                )


def _shell_syntax(c: _Context) -> Iterator[Finding]:
    for key in _EXEC:
        for command in c.unit.commands(key):
            if command.path.rsplit("/", 1)[-1] in _SHELLS:
                continue
            odd = [
                w
                for w in command.argv[1:]
                if w in ("&&", "||", "|", ">", ">>", "<", "2>&1", "&", "#") or re.match(r"\d?>>?/|\$\(|`", w)
            ]
            if odd:
                yield c.find(
                    "shell_syntax",
                    "error",
                    f"{key}= passes {odd[0]!r} to the program as an argument: no shell reads the line.",
                    "Use systemd's own keys (StandardOutput=, several Exec lines), or run a script.",
                    key,
                )


def _background(c: _Context) -> Iterator[Finding]:
    text = c.shell_text or ""
    first = [c.main.path.rsplit("/", 1)[-1] if c.main else "", *c.words[1:2]]
    if re.search(r"(?<![&>])&\s*$", text) or first[0] in ("nohup", "setsid", "screen", "tmux"):
        yield c.find(
            "backgrounded",
            "error",
            "The command puts the server into the background: systemd watches the wrong process, or none.",
            "Run the server itself in the foreground.",
            "ExecStart",
        )
    elif c.script and c.may_serve_model and "exec " not in text and not (text and not re.search(r"&&|;|\|", text)):
        level = "warning" if c.unit.value("Service", "KillMode") == "mixed" and text else "info"
        yield c.find(
            "script_without_exec",
            level,
            "A script is the main process: unless its last line is `exec ...`, SIGTERM reaches"
            " the shell and not the server.",
            "Begin the script's last line with exec, or start the server directly.",
            "ExecStart",
        )


def _kill_mode(c: _Context) -> Iterator[Finding]:
    mode = c.unit.value("Service", "KillMode")
    if mode in ("process", "none"):
        level = "error" if c.may_serve_model else ("warning" if mode == "none" else "info")
        yield c.find(
            "kill_mode_leaves_processes",
            level,
            f"KillMode={mode} leaves the workers alive when the main process ends: they keep the GPU memory,"
            " and the next start fails its memory check.",
            "Remove it (control-group is the default), or use mixed.",
            "KillMode",
            source="systemd.kill(5); vllm-project/vllm#55510",
        )
    if c.unit.value("Service", "SendSIGKILL") and not c.unit.is_true("Service", "SendSIGKILL"):
        yield c.find(
            "no_final_kill",
            "error" if c.may_serve_model else "warning",
            "SendSIGKILL=no: what ignores SIGTERM stays for ever.",
            "Remove it.",
            "SendSIGKILL",
        )
    if c.unit.value("Service", "KillSignal") in ("SIGKILL", "KILL", "9"):
        yield c.find(
            "no_drain",
            "warning",
            "KillSignal=SIGKILL: running requests are cut at every stop.",
            "Remove it.",
            "KillSignal",
        )
    for item in c.unit.values("Service", "SuccessExitStatus"):
        if re.search(r"\b(?:SIGKILL|KILL|9|137)\b", item.value) and c.restart != "always":
            yield c.find(
                "crash_is_success",
                "warning",
                "SuccessExitStatus counts SIGKILL as success: a server that dies of it (SGLang kills its own tree"
                " after a crash) is not restarted.",
                "Remove SIGKILL from it.",
                "SuccessExitStatus",
                source="recorded SGLang 0.5.16 runs",
            )


def _timeouts(c: _Context) -> Iterator[Finding]:
    start, stop = c.seconds("TimeoutStartSec"), c.seconds("TimeoutStopSec")
    covered = c.unit.values("Service", "ExecStartPre") or c.unit.values("Service", "ExecStartPost")
    if c.type in ("simple", "exec", "idle") and c.unit.last("Service", "TimeoutStartSec") and not covered:
        yield c.find(
            "timeout_start_without_effect",
            "info",
            f"TimeoutStartSec= has no effect on loading: with Type={c.type} the unit counts as started at once.",
            "Wait for readiness in ExecStartPost=, or drop it.",
            "TimeoutStartSec",
        )
    waits = c.type in ("notify", "notify-reload", "forking", "oneshot", "dbus") or bool(
        c.unit.values("Service", "ExecStartPost")
    )
    waits = waits and not (c.type.startswith("notify") and c.podman)  # conmon is ready when the container runs
    if c.serves_model and waits and c.type != "oneshot" and (start is None or start < SHORT_LOAD_S):
        shown = "the default 90 s" if start is None else f"{start:g} s"
        yield c.find(
            "start_timeout_too_short",
            "warning",
            f"The start job waits for the server, and {shown} is less than a large model takes to load:"
            " systemd kills it while loading.",
            "Set TimeoutStartSec= above the measured load time.",
            "TimeoutStartSec",
        )
    if c.serves_model and stop is None:
        yield c.find(
            "stop_timeout_default",
            "info",
            "No TimeoutStopSec=: requests in flight and a multi-GPU unload get 90 s, then SIGKILL.",
            "Set it to the time that draining may take.",
            None,
        )
    elif c.serves_model and stop is not None and stop < 10:
        yield c.find(
            "stop_timeout_short",
            "info",
            f"TimeoutStopSec={stop:g} s: an idle SGLang takes about 8 s to end, one that drains longer.",
            "Give it at least 30 s.",
            "TimeoutStopSec",
            source="recorded SGLang 0.5.16 runs",
        )
    elif c.serves_model and stop == math.inf:
        yield c.find(
            "stop_timeout_infinite",
            "warning",
            "TimeoutStopSec without an end: SGLang with a stream in flight never ends on SIGTERM, so a stop"
            " or a reboot hangs.",
            "Set a limit, such as 60.",
            "TimeoutStopSec",
            source="recorded SGLang 0.5.16 runs",
        )


def _type(c: _Context) -> Iterator[Finding]:
    direct = c.serves_model and not c.script and not c.docker
    if direct and c.type in ("notify", "notify-reload", "dbus"):
        yield c.find(
            "no_readiness_message",
            "error",
            f"Type={c.type}: the server sends no such message, so the start never completes.",
            "Use Type=exec and wait in ExecStartPost=.",
            "Type",
        )
    elif direct and c.type == "forking":
        yield c.find(
            "does_not_fork",
            "error",
            "Type=forking: the server stays in the foreground, so the start times out and kills it.",
            "Use Type=exec.",
            "Type",
        )
    elif c.serves_model and c.type == "oneshot" and not ({"-d", "--detach"} & set(c.docker)):
        yield c.find(
            "oneshot_server",
            "error",
            "Type=oneshot: the start job never ends while the server runs.",
            "Use Type=exec.",
            "Type",
        )
    watchdog = c.unit.seconds("Service", "WatchdogSec")
    if c.serves_model and not c.docker and watchdog and math.isfinite(watchdog):
        yield c.find(
            "watchdog_never_fed",
            "error",
            f"WatchdogSec={watchdog:g} s: the server sends no WATCHDOG=1, so systemd kills it after that time.",
            "Remove it, and check liveness by a request that must produce a token.",
            "WatchdogSec",
            source="systemd.service(5)",
        )
    if c.serves_model and c.type in ("simple", "exec") and c.unit.is_true("Service", "RemainAfterExit"):
        yield c.find(
            "remains_after_exit",
            "warning",
            "RemainAfterExit=yes: a server that ended still shows as active.",
            "Remove it.",
            "RemainAfterExit",
        )


def _restarts(c: _Context) -> Iterator[Finding]:
    if c.restart == "no":
        if c.serves_model and c.type != "oneshot":
            yield c.find(
                "no_restart",
                "info",
                "No Restart=: after a crash the server stays down.",
                "Use Restart=on-failure with a limit.",
            )
        return
    misses = {
        "on-success": "an end with an error",
        "on-abnormal": "an end with an exit code",
        "on-abort": "an end with an exit code, and a SIGKILL",
        "on-watchdog": "any end but a watchdog's",
    }
    if c.may_serve_model and c.restart in misses:
        yield c.find(
            "restart_misses_crash",
            "warning",
            f"Restart={c.restart} leaves the server down after {misses[c.restart]}, which is how a server crashes.",
            "Use Restart=on-failure with a limit.",
            "Restart",
            source="systemd.service(5), table of exit causes",
        )
    delay = c.unit.last("Service", "RestartSec")
    if c.restart == "always" and delay is None:
        yield c.find(
            "restart_without_delay",
            "warning" if c.may_serve_model else "info",
            f"Restart=always with the default RestartSec of 100 ms: a start that fails at once hits the limit"
            f" ({c.burst} in {c.interval_s:g} s) within a second and stays failed; one that fails after loading"
            " restarts for ever.",
            "Set RestartSec=, and StartLimitIntervalSec= above burst x (load time + delay).",
            "Restart",
        )
    elif c.restart == "on-failure" and delay is None and c.serves_model:
        yield c.find(
            "restart_without_delay",
            "info",
            "Restart=on-failure with the default RestartSec of 100 ms: the GPU memory of the dead server may"
            " not be back yet.",
            "Set RestartSec= to some seconds.",
            "Restart",
        )
    if not c.instant_failures_stop:
        never = (
            "is switched off"
            if c.interval_s <= 0 or c.burst <= 0
            else (
                f"never trips: RestartSec={c.restart_delay_s:g} s allows at most"
                f" {math.floor(c.interval_s / c.restart_delay_s) + 1} starts in {c.interval_s:g} s, limit {c.burst}"
            )
        )
        level = "warning" if c.may_serve_model and (c.restart == "always" or c.interval_s <= 0) else "info"
        yield c.find(
            "start_limit_never_trips",
            level,
            f"The start limit {never}: a server that dies at every start is loaded again for ever.",
            f"Put StartLimitIntervalSec= above {c.burst} x (load time + RestartSec) into [Unit].",
            "Restart",
        )


def _shell_variables(command: Command) -> list[str]:
    """Names of variables that the text behind `sh -c` puts on a further command line (`NAME=$OTHER` is no such place)."""
    if command.path.rsplit("/", 1)[-1] not in _SHELLS or len(command.argv) < 3:
        return []
    return [one or other for one, other in _ON_A_COMMAND_LINE.findall(" ".join(command.argv[2:]))]


#: A variable as a word of its own, or as a flag's value.
_ON_A_COMMAND_LINE = re.compile(r"""(?<![\w$=])["']?\$\{?([A-Za-z_]\w*)|--[\w-]+=["']?\$\{?([A-Za-z_]\w*)""")


def _secrets(c: _Context) -> Iterator[Finding]:
    for key in _EXEC:
        for command in c.unit.commands(key):
            argv = list(command.argv)
            shown = redact_object(argv)
            if shown != argv:
                at = next((i for i, word in enumerate(shown) if REDACTED in word), 0)
                yield c.find(
                    "secret_on_command_line",
                    "error",
                    f"{key}= holds a secret, and ps, systemctl cat and the journal show it to every user.",
                    "Put it into a root-readable file that the program reads itself, and change the secret.",
                    key,
                    " ".join(shown[max(0, at - 1) : at + 1]),
                )
            elif name := next((n for n in (*command.variables, *_shell_variables(command)) if is_secret_name(n)), None):
                yield c.find(
                    "secret_expanded_on_command_line",
                    "warning",
                    f"{key}= puts ${{{name}}} on the command line, where it is expanded, and ps shows it.",
                    "Let the program read it from its environment or a file.",
                    key,
                    f"${{{name}}}",
                )
    for name, value in c.unit.environment().items():
        if value and (is_secret_name(name) or redact_text(f"{name}={value}") != f"{name}={value}"):
            yield c.find(
                "secret_in_environment",
                "warning",
                f"Environment= holds a secret ({name}), and systemctl show tells it to every user.",
                "Use EnvironmentFile= with a file that only root reads, or LoadCredential=.",
                "Environment",
                f"{name}={REDACTED}",
            )


def _environment(c: _Context) -> Iterator[Finding]:
    variables = c.unit.environment()
    for name, value in variables.items():
        if re.search(r"\$\{?[A-Za-z_]", value) or value.startswith("~/"):
            yield c.find(
                "environment_not_expanded",
                "warning",
                f"Environment={name}=: systemd expands neither $ nor ~ here; the program gets them literally.",
                "Write the value out.",
                "Environment",
                f"{name}={value}",
            )
        elif value.endswith(",") and len(variables) > 1:
            yield c.find(
                "environment_comma",
                "warning",
                f"The value of {name} ends with a comma: assignments are separated by blanks.",
                "Remove the comma.",
                "Environment",
                f"{name}={value}",
            )
    for item in c.unit.values("Service", "EnvironmentFile"):
        if not item.value.lstrip("-").startswith(("/", "%")):
            yield c.find(
                "relative_environment_file",
                "error",
                "EnvironmentFile= must be an absolute path: systemd ignores this one.",
                "Write the absolute path, without quotes.",
                "EnvironmentFile",
            )
    directory = c.unit.value("Service", "WorkingDirectory").lstrip("-")
    if directory and directory != "~" and not directory.startswith(("/", "%")):
        yield c.find(
            "relative_working_directory",
            "error",
            "WorkingDirectory= must be an absolute path or ~.",
            "Write the absolute path.",
            "WorkingDirectory",
        )


def _network(c: _Context) -> Iterator[Finding]:
    after = c.unit.names("Unit", "After")
    wanted = [*c.unit.names("Unit", "Wants"), *c.unit.names("Unit", "Requires"), *c.unit.names("Unit", "BindsTo")]
    online = "network-online.target"
    if online in after and online not in wanted:
        yield c.find(
            "network_online_not_wanted",
            "warning",
            "After=network-online.target only orders; nothing pulls the target in, so it may not be waited for.",
            "Add Wants=network-online.target.",
            "After",
            section="Unit",
        )
    if online in wanted and online not in after:
        yield c.find(
            "network_online_not_awaited",
            "warning",
            "Wants=network-online.target without After=: the service starts beside it.",
            "Add After=network-online.target.",
            "Wants",
            section="Unit",
        )
    if online in after:
        return
    pulls = any(_pulls(command) for command in c.unit.commands("ExecStartPre"))
    address = _option(c.words, "--host")
    if pulls:
        yield c.find(
            "network_too_early",
            "warning",
            "The image is pulled at start, but the unit does not wait for the network (network.target says only that"
            " networking was begun).",
            "Add Wants= and After=network-online.target.",
            "After" if after else None,
            section="Unit",
        )
    elif (
        c.serves_model
        and address
        and re.fullmatch(r"\d+\.\d+\.\d+\.\d+", address)
        and not address.startswith(("127.", "0."))
    ):
        yield c.find(
            "network_too_early",
            "warning",
            f"The server binds {address}, but the unit does not wait until the host has that address.",
            "Add Wants= and After=network-online.target.",
            "ExecStart",
        )
    for kind in ("Requires", "BindsTo", "Requisite"):
        for name in c.unit.names("Unit", kind):
            if name.endswith(".service") and name not in after:
                yield c.find(
                    "required_not_awaited",
                    "warning",
                    f"{kind}={name} without After={name}: both start at the same time.",
                    f"Add After={name}.",
                    kind,
                    section="Unit",
                )


def _option(words: Sequence[str], flag: str) -> str | None:
    for index, word in enumerate(words):
        if word == flag and index + 1 < len(words):
            return words[index + 1]
        if word.startswith(flag + "="):
            return word[len(flag) + 1 :]
    return None


def _pulls(command: Command) -> bool:
    return command.path.rsplit("/", 1)[-1] in ("docker", "podman", "nerdctl") and "pull" in command.argv[1:4]


def _user(c: _Context) -> Iterator[Finding]:
    if c.docker or not c.may_serve_model:
        return
    if "default.target" in c.unit.names("Install", "WantedBy"):
        return
    user = c.unit.value("Service", "User")
    if user in ("root", "0"):
        yield c.find(
            "runs_as_root",
            "warning",
            "The server runs as root: it takes requests from the network and may run code of the model's repository.",
            "Give it an account of its own.",
            "User",
        )
    elif not user and not c.unit.is_true("Service", "DynamicUser"):
        yield c.find("runs_as_root", "info", "No User=: the server runs as root.", "Give it an account of its own.")


def _containers(c: _Context) -> Iterator[Finding]:
    start = c.seconds("TimeoutStartSec")
    for command in c.unit.commands("ExecStartPre"):
        if _pulls(command) and (start is None or start < SHORT_LOAD_S):
            shown = "the default 90 s" if start is None else f"{start:g} s"
            yield c.find(
                "pull_in_start_pre",
                "warning",
                f"The image is pulled in ExecStartPre=, inside the start job: {shown} are over before a large image is"
                " here, the pull is killed, and the next start begins again.",
                "Pull it beforehand, or set TimeoutStartSec= to an hour.",
                "ExecStartPre",
            )
        words = command.argv
        bare = (
            words[0].rsplit("/", 1)[-1] in ("docker", "podman")
            and len(words) > 1
            and words[1] in ("rm", "stop", "kill")
        )
        if bare and "-" not in command.prefix:
            yield c.find(
                "cleanup_may_fail",
                "warning",
                f"`{words[1]}` of a container that is not there fails, and the start with it.",
                "Put - before the command.",
                "ExecStartPre",
            )
    if not c.docker:
        return
    image = c.image
    if image and "@sha256:" not in image:
        tag = image.rsplit("/", 1)[-1].partition(":")[2]
        if not re.search(r"\d+\.\d+", tag):
            what = f"The image {image} has no tag" if not tag else f"The image's tag {tag!r} names no version"
            yield c.find(
                "unpinned_image",
                "warning",
                f"{what}: the next start may run another one.",
                "Pin it by @sha256 digest.",
                "ExecStart",
                image,
            )
    detached = {"-d", "--detach"} & set(c.docker)
    if detached and "compose" not in c.docker and c.type in ("simple", "exec"):
        yield c.find(
            "detached_container",
            "error",
            "docker run -d returns at once: systemd takes the service for ended while the container runs on.",
            "Remove -d.",
            "ExecStart",
        )
    name = _option(c.docker, "--name")
    cleaned = any({"rm"} & set(command.argv[1:3]) for command in c.unit.commands("ExecStartPre"))
    if name and not cleaned and "--replace" not in c.docker:
        removed = "--rm" in c.docker
        yield c.find(
            "container_name_clash",
            "info" if removed else "warning",
            f"A container named {name} that an unclean stop left behind makes every later start fail.",
            f"Add ExecStartPre=-/usr/bin/docker rm -f {name}.",
            "ExecStart",
            f"--name {name}",
        )
    if (
        not c.unit.values("Service", "ExecStop")
        and not c.unit.values("Service", "ExecStopPost")
        and "compose" not in c.docker
    ):
        yield c.find(
            "container_not_stopped",
            "info",
            "No ExecStop=: systemd signals the docker client only; after a SIGKILL the container runs on.",
            "Add ExecStop=/usr/bin/docker stop NAME.",
        )
    for command in c.unit.commands("ExecStop"):
        wait = _option(list(command.argv), "-t") or _option(list(command.argv), "--time")
        limit = c.seconds("TimeoutStopSec") or DEFAULT_TIMEOUT_S
        if wait and re.fullmatch(r"[0-9]{1,9}", wait) and int(wait) >= limit:
            yield c.find(
                "stop_waits_too_long",
                "warning",
                f"docker stop waits {wait} s, TimeoutStopSec ends it after {limit:g} s.",
                "Set TimeoutStopSec= above it.",
                "ExecStop",
            )


def _by_name(c: _Context) -> Iterator[Finding]:
    for key in _EXEC:
        for command in c.unit.commands(key):
            text = " ".join(command.argv)
            if re.search(r"(?:^|[/\s])(?:pkill|killall)\b|\bfuser\s+(?:-\w+\s+)*-\w*k", text):
                yield c.find(
                    "kills_by_name",
                    "warning",
                    f"{key}= kills by name or port: another service's processes may go with it.",
                    "Let systemd stop the control group.",
                    key,
                )
            elif key == "ExecStop" and re.search(r"(?:^|/)kill\s+(?:-s\s+)?-?(?:9|KILL|SIGKILL)\b", text):
                yield c.find(
                    "no_drain",
                    "warning",
                    "ExecStop= sends SIGKILL: running requests are cut, workers stay.",
                    "Remove ExecStop=.",
                    key,
                )


def _hardening(c: _Context) -> Iterator[Finding]:
    if not c.gpu or c.docker:
        return
    devices = " ".join(item.value for item in c.unit.values("Service", "DeviceAllow"))
    allowed = "nvidia" in devices or "/dev/dri" in devices or "kfd" in devices
    if c.unit.is_true("Service", "PrivateDevices"):
        yield c.find(
            "hides_gpu", "error", "PrivateDevices=yes takes /dev/nvidia* away.", "Remove it.", "PrivateDevices"
        )
    if c.unit.value("Service", "DevicePolicy") in ("closed", "strict") and not allowed:
        yield c.find(
            "hides_gpu",
            "error",
            "DevicePolicy= closes /dev/nvidia*, and no DeviceAllow= opens it.",
            "Add DeviceAllow=char-nvidia* rw.",
            "DevicePolicy",
        )
    elif c.unit.is_true("Service", "ProtectClock") and not allowed:
        yield c.find(
            "hides_gpu",
            "error",
            "ProtectClock=yes adds a DeviceAllow= and so closes all other devices, /dev/nvidia* too.",
            "Remove it.",
            "ProtectClock",
            source="systemd.exec(5) ProtectClock=; systemd.resource-control(5) DeviceAllow=",
        )
    if c.unit.is_true("Service", "MemoryDenyWriteExecute"):
        yield c.find(
            "forbids_jit",
            "error",
            "MemoryDenyWriteExecute=yes forbids what CUDA, Triton and torch do when they compile.",
            "Remove it.",
            "MemoryDenyWriteExecute",
        )
    if c.unit.is_true("Service", "PrivateNetwork") and c.serves_model:
        yield c.find(
            "no_network", "error", "PrivateNetwork=yes: nobody reaches the server.", "Remove it.", "PrivateNetwork"
        )
    if c.unit.value("Service", "ProcSubset") == "pid":
        yield c.find(
            "hides_proc",
            "warning",
            "ProcSubset=pid hides /proc/meminfo, /proc/cpuinfo and /proc/driver/nvidia.",
            "Remove it.",
            "ProcSubset",
        )
    home = c.unit.value("Service", "ProtectHome").lower()
    paths = " ".join([*c.words, *c.unit.environment().values(), c.unit.value("Service", "WorkingDirectory")])
    if home in ("yes", "true", "1", "on", "tmpfs") and re.search(r"(?:^|[\s=:])/(?:home|root)/", paths):
        yield c.find(
            "hides_home",
            "error",
            f"ProtectHome={home} hides /home and /root, where the unit's own paths lie.",
            "Remove it, or move the files.",
            "ProtectHome",
        )


def _resources(c: _Context) -> Iterator[Finding]:
    if not c.serves_model or c.docker:
        return
    size = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", c.unit.value("Service", "MemoryMax"))
    if size:
        gib = float(size[1]) * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}[size[2]] / 2**30
        if gib < 8:
            yield c.find(
                "memory_limit_small",
                "warning",
                f"MemoryMax= of {gib:.3g} GiB is less than a model server needs while it loads: the kernel kills it.",
                "Raise it above the size of the checkpoint's largest shards, or remove it.",
                "MemoryMax",
            )
    if c.unit.value("Service", "StandardOutput") == "null":
        yield c.find(
            "no_log",
            "warning",
            "StandardOutput=null: when the server dies, nothing says why.",
            "Remove it (the journal is the default).",
            "StandardOutput",
        )


def _install(c: _Context) -> Iterator[Finding]:
    if not any(item.section == "Service" for item in c.unit.assignments) or not c.serves_model:
        return
    if not any(item.section == "Install" for item in c.unit.assignments):
        yield c.find(
            "cannot_be_enabled",
            "info",
            "No [Install] section: `systemctl enable` does nothing, the server is down after a reboot.",
            "Add [Install] with WantedBy=multi-user.target.",
        )
    for name in c.unit.names("Install", "WantedBy"):
        if not re.search(r"\.(?:target|service|socket|timer|path|mount|slice|device)$", name):
            yield c.find(
                "bad_target",
                "warning",
                f"WantedBy={name} names no unit type.",
                "Write multi-user.target.",
                "WantedBy",
                section="Install",
            )


#: Every rule; a new one is a new function and its name here.
RULES: tuple[Rule, ...] = (
    _exec_start,
    _swallowed,
    _shell_syntax,
    _background,
    _kill_mode,
    _timeouts,
    _type,
    _restarts,
    _secrets,
    _environment,
    _network,
    _user,
    _containers,
    _by_name,
    _hardening,
    _resources,
    _install,
)
