"""Write the systemd unit of a measured server configuration: the same argv, and no value that can become a line.

The model behind the choices (systemd 252; the server's behaviour from recorded SGLang 0.5.16 runs):
- KillMode=mixed: SIGTERM reaches the launcher only, which drains while its workers live; after TimeoutStopSec
  everything in the control group gets SIGKILL. (`process` leaves workers on the GPU, `control-group` ends the
  workers under the drain.)
- SGLang ends by SIGKILL-ing its own tree, on a clean stop too, so SIGKILL must never be a SuccessExitStatus: a crash
  looks the same.
- Type=exec with an ExecStartPost probe: the start job ends when the server answers, so TimeoutStartSec is the time
  to load. The probe gives up as soon as the main process is gone.
- A start limit that trips: its interval covers as many starts as its burst, each with a full load, stop and delay.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from pydantic import Field

from lib.errors import BadInput
from lib.records import Record
from lib.server.redact import is_secret_name, redact_object, redact_text

_SAFE = re.compile(r"[A-Za-z0-9_@:,./=+-]+", re.ASCII)
_PLAIN_PATH = re.compile(r"/(?:[^$\x00-\x1f\x7f\\\"']*[^/$\x00-\x1f\x7f\\\"'])")
_MAX_LINE = (1 << 20) - 1024
_PROBE = 'until "$@"; do kill -0 "$MAINPID" || exit 1; sleep 2; done'


class UnitSpec(Record):
    """What a unit is rendered from. Secrets have no field: they stand in a file that argv or environment_file names."""

    name: str = Field(description="file name, ends in .service")
    description: str
    argv: tuple[str, ...] = Field(description="the command; argv[0] is an absolute path")
    environment: Mapping[str, str] = {}
    environment_file: str | None = Field(default=None, description="root-readable file with secrets, read by systemd")
    user: str | None = Field(description="unprivileged account; None and root need allow_root")
    group: str | None = None
    allow_root: bool = False
    working_directory: str | None = None
    writable_paths: tuple[str, ...] = Field(
        default=(), description="written to although below /usr, /boot, /efi or /etc"
    )
    gpu: bool = False
    ready_argv: tuple[str, ...] = Field(
        default=(), description="exits 0 when the server answers; argv[0] is an absolute path"
    )
    load_timeout_s: float = Field(default=1800, gt=0, description="longest time from exec to ready")
    drain_timeout_s: float = Field(default=60, gt=0, description="time that running requests get at a stop")
    restart: str = Field(default="on-failure", pattern="^(on-failure|always|no)$")
    restart_delay_s: float = Field(default=15, ge=1)
    start_limit_burst: int = Field(default=3, ge=1, le=100)
    after: tuple[str, ...] = ()


def http_probe_argv(url: str) -> tuple[str, ...]:
    """A `ready_argv` that asks a URL with curl and succeeds on HTTP 200."""
    return ("/usr/bin/curl", "--silent", "--fail", "--output", "/dev/null", "--max-time", "5", "--url", url)


class ContainerSpec(Record):
    """What the unit of a server in a container is rendered from; the image is pinned by its digest."""

    name: str = Field(description="file name, ends in .service; the container gets its stem")
    description: str
    image: str = Field(description="repository@sha256:digest")
    argv: tuple[str, ...] = Field(description="the command in the container")
    environment: Mapping[str, str] = {}
    environment_file: str | None = Field(default=None, description="root-readable file with secrets, read by docker")
    volumes: tuple[tuple[str, str], ...] = Field(default=(), description="(host path, container path), read-only")
    cache_volumes: tuple[tuple[str, str], ...] = Field(default=(), description="(host path, container path), writable")
    port: int = Field(gt=0, lt=65536)
    address: str = Field(default="127.0.0.1", pattern=r"^[0-9a-fA-F.:]{3,45}$")
    gpu: bool = True
    docker: str = "/usr/bin/docker"
    ready_argv: tuple[str, ...] = ()
    load_timeout_s: float = Field(default=1800, gt=0)
    drain_timeout_s: float = Field(default=60, gt=0)
    restart: str = Field(default="on-failure", pattern="^(on-failure|always|no)$")
    restart_delay_s: float = Field(default=15, ge=1)
    start_limit_burst: int = Field(default=3, ge=1, le=100)
    after: tuple[str, ...] = ()


def start_limit_interval_s(spec: UnitSpec | ContainerSpec) -> int:
    """Seconds that hold `start_limit_burst` full cycles of load, stop and delay, and one delay more.

    Example: 3 cycles of 1800 + 60 + 15 s and 15 s are 5640 s.
    """
    cycle = spec.load_timeout_s + spec.drain_timeout_s + spec.restart_delay_s
    return math.ceil(spec.start_limit_burst * cycle + spec.restart_delay_s)


def unit_value(value: str, form: str, what: str) -> str:
    """The only place that quotes a value for a unit file.

    Args:
        form: `word` (an argument of a command), `assignment` (a word in which $ has no meaning: Environment=, lists of
            paths) or `plain` (the rest of a line: Description=, a single path).
        what: names the value in an error.

    Raises:
        BadInput: for a newline, a NUL, a lone surrogate, or in a plain value what has no escape there.

    Example: `unit_value('a $b 5%', "word", "argument")` is `'"a $$b 5%%"'`.
    """
    bad = next((char for char in value if char in "\n\r\0" or 0xD800 <= ord(char) < 0xE000), None)
    if bad is not None:
        raise BadInput(f"{what} on one line of text", f"{bad!r} in {_shown(value)}", "remove it")
    percent = value.replace("%", "%%")
    if form == "plain":
        control = next((char for char in value if ord(char) < 0x20 or ord(char) == 0x7F), None)
        if control is not None or value != value.strip() or value.endswith("\\") or not value:
            found = f"{_shown(value)}: empty, a blank at an end, a backslash at the end, or a control character"
            raise BadInput(f"{what} that a unit file can hold", found, "change it")
        return percent
    if form not in ("word", "assignment"):
        raise ValueError(f"unknown form {form!r}")
    if _SAFE.fullmatch(value):
        return value
    escaped = percent.replace("\\", "\\\\").replace('"', '\\"')
    if form == "word":
        escaped = escaped.replace("$", "$$")
    escaped = "".join(f"\\x{ord(char):02x}" if ord(char) < 0x20 or ord(char) == 0x7F else char for char in escaped)
    return f'"{escaped}"'


def render_unit(spec: UnitSpec) -> str:
    """The text of the unit.

    Raises:
        BadInput: for a value that cannot stand in a unit, a secret in argv or environment, or a root user that was
        not allowed.

    Source: systemd.service(5), systemd.exec(5), systemd.kill(5); hardening that a CUDA process lives with: no
    PrivateDevices, MemoryDenyWriteExecute or ProtectClock (each of which takes /dev/nvidia* or the JIT away).
    """
    _check(spec)
    after = ["network-online.target"]
    if spec.gpu:
        after += ["nvidia-persistenced.service", "nvidia-fabricmanager.service"]
    lines = [
        "[Unit]",
        f"Description={unit_value(spec.description, 'plain', 'a description')}",
        "Wants=network-online.target",
        f"After={' '.join([*after, *spec.after])}",
    ]
    if spec.restart != "no":
        lines += [f"StartLimitIntervalSec={start_limit_interval_s(spec)}", f"StartLimitBurst={spec.start_limit_burst}"]
    lines += ["", "[Service]", "Type=exec"]
    if spec.user is not None:
        lines.append(f"User={spec.user}")
    if spec.group is not None:
        lines.append(f"Group={spec.group}")
    if spec.working_directory is not None:
        lines.append(f"WorkingDirectory={unit_value(spec.working_directory, 'plain', 'a working directory')}")
    environment = dict(spec.environment)
    if spec.gpu:
        # torch compiles into /tmp, which PrivateTmp empties at every stop: each start would compile again
        lines.append(f"CacheDirectory={_folder_name(spec.name)}")
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", f"/var/cache/{_folder_name(spec.name)}/inductor")
    for name, value in sorted(environment.items()):
        lines.append(f"Environment={unit_value(f'{name}={value}', 'assignment', f'environment variable {name}')}")
    if spec.environment_file is not None:
        lines.append(f"EnvironmentFile={unit_value(spec.environment_file, 'plain', 'an environment file')}")
    if spec.gpu:
        # With NoNewPrivileges the setuid helper cannot make /dev/nvidia-uvm for the server; root does it before.
        lines.append("ExecStartPre=-+/usr/bin/nvidia-modprobe -c 0 -u")
    lines.append(f"ExecStart={_command(spec.argv, 'argument')}")
    if spec.ready_argv:
        lines.append(
            f"ExecStartPost={_command(('/bin/sh', '-c', _PROBE, 'ready', *spec.ready_argv), 'argument of the probe')}"
        )
        lines.append(f"TimeoutStartSec={math.ceil(spec.load_timeout_s)}")
    lines += [f"TimeoutStopSec={math.ceil(spec.drain_timeout_s)}", "KillMode=mixed", f"Restart={spec.restart}"]
    if spec.restart != "no":
        # 2 is a wrong flag (argparse): trying again cannot help.
        lines += [f"RestartSec={math.ceil(spec.restart_delay_s)}", "RestartPreventExitStatus=2"]
    lines += [
        f"SyslogIdentifier={spec.name.removesuffix('.service')}",
        "LogRateLimitIntervalSec=0",
        "LimitNOFILE=1048576",
        "LimitMEMLOCK=infinity",
        "TasksMax=infinity",
        "UMask=0027",
        "NoNewPrivileges=yes",
        "PrivateTmp=yes",
        "ProtectSystem=full",
    ]
    if spec.writable_paths:
        lines.append(
            "ReadWritePaths="
            + " ".join(unit_value(path, "assignment", "a writable path") for path in spec.writable_paths)
        )
    lines += [
        "ProtectControlGroups=yes",
        "ProtectKernelTunables=yes",
        "ProtectKernelLogs=yes",
        "ProtectHostname=yes",
        "RestrictSUIDSGID=yes",
        "RestrictNamespaces=yes",
        "LockPersonality=yes",
    ]
    if not _is_root(spec.user):
        lines += ["CapabilityBoundingSet=", "AmbientCapabilities="]
    lines += ["", "[Install]", "WantedBy=multi-user.target", ""]
    return "\n".join(lines)


def render_container_unit(spec: ContainerSpec) -> str:
    """The text of the unit that runs the server in a container, in the foreground and stopped by name.

    A container of the same name that an unclean stop left is removed first; the image is not pulled here (a pull would
    count against TimeoutStartSec=), it has to be on the host.

    Raises:
        BadInput: for an image without a digest, a value that cannot stand in a unit, or a secret in argv or
        environment.
    """
    _check_container(spec)
    name = _folder_name(spec.name)
    run = [spec.docker, "run", "--rm", "--name", name, "--pull=never", "--ipc=host", "--ulimit", "memlock=-1"]
    run += ["--ulimit", "stack=67108864", "-p", f"{_bracketed(spec.address)}:{spec.port}:{spec.port}"]
    if spec.gpu:
        run += ["--gpus", "all"]
    if spec.environment_file is not None:
        run += ["--env-file", spec.environment_file]
    for variable, value in sorted(spec.environment.items()):
        run += ["--env", f"{variable}={value}"]
    for host, inside in spec.volumes:
        run += ["--volume", f"{host}:{inside}:ro"]
    for host, inside in spec.cache_volumes:
        run += ["--volume", f"{host}:{inside}"]
    after = ["network-online.target", "docker.service"]
    if spec.gpu:
        after += ["nvidia-persistenced.service", "nvidia-fabricmanager.service"]
    lines = [
        "[Unit]",
        f"Description={unit_value(spec.description, 'plain', 'a description')}",
        "Wants=network-online.target",
        "Requires=docker.service",
        f"After={' '.join([*after, *spec.after])}",
    ]
    if spec.restart != "no":
        lines += [f"StartLimitIntervalSec={start_limit_interval_s(spec)}", f"StartLimitBurst={spec.start_limit_burst}"]
    lines += ["", "[Service]", "Type=exec", f"ExecStartPre=-{_command((spec.docker, 'rm', '-f', name), 'a name')}"]
    lines.append(f"ExecStart={_command((*run, spec.image, *spec.argv), 'argument')}")
    if spec.ready_argv:
        probe = ("/bin/sh", "-c", _PROBE, "ready", *spec.ready_argv)
        lines += [f"ExecStartPost={_command(probe, 'argument of the probe')}"]
        lines += [f"TimeoutStartSec={math.ceil(spec.load_timeout_s)}"]
    drain = math.ceil(spec.drain_timeout_s)
    lines.append(f"ExecStop={_command((spec.docker, 'stop', '-t', str(drain), name), 'a name')}")
    # docker sends SIGKILL after `drain`; systemd waits for that, then for the container's removal
    lines += [f"TimeoutStopSec={drain + 30}", "KillMode=mixed", f"Restart={spec.restart}"]
    if spec.restart != "no":
        lines.append(f"RestartSec={math.ceil(spec.restart_delay_s)}")
    lines += [f"SyslogIdentifier={spec.name.removesuffix('.service')}", "LogRateLimitIntervalSec=0"]
    lines += ["", "[Install]", "WantedBy=multi-user.target", ""]
    return "\n".join(lines)


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _check_container(spec: ContainerSpec) -> None:
    """The checks of a plain unit, and those that only a container has."""
    wrong: list[str] = []
    if not re.fullmatch(r"[a-z0-9][a-zA-Z0-9._:/-]{0,250}@sha256:[0-9a-f]{64}", spec.image, re.ASCII):
        wrong.append(f"image {_shown(spec.image)} is not pinned as repository@sha256:digest")
    if not spec.argv:
        wrong.append("argv is missing")
    for host, inside in (*spec.volumes, *spec.cache_volumes):
        for path in (host, inside):
            if not _PLAIN_PATH.fullmatch(path) or ":" in path or "/../" in path + "/":
                wrong.append(f"volume path {_shown(path)} is no plain absolute path without a colon")
    if spec.environment_file is not None and not _PLAIN_PATH.fullmatch(spec.environment_file):
        wrong.append(f"environment_file {_shown(spec.environment_file)} is no plain absolute path")
    plain = UnitSpec(
        name=spec.name,
        description=spec.description,
        argv=(spec.docker, *spec.argv),
        environment=spec.environment,
        user=None,
        allow_root=True,
        ready_argv=spec.ready_argv,
        after=spec.after,
    )
    _check(plain, wrong)


def _folder_name(unit: str) -> str:
    """A unit's name as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", unit.removesuffix(".service")).lstrip(".-") or "sglang"


def _command(argv: tuple[str, ...], what: str) -> str:
    """The words of a command, one flag with its values on each line."""
    words = [unit_value(argument, "word", what) for argument in argv]
    if sum(map(len, words)) + 8 * len(words) > _MAX_LINE:
        raise BadInput(
            "a command below 1 MiB, systemd's longest line", f"{sum(map(len, words))} characters", "shorten it"
        )
    rows: list[list[str]] = [[words[0]]]
    for argument, word in zip(argv[1:], words[1:], strict=True):
        if argument.startswith("--") and len(argument) > 2:
            rows.append([])
        rows[-1].append(word)
    return " \\\n    ".join(" ".join(row) for row in rows)


def _is_root(user: str | None) -> bool:
    return user in (None, "root", "0")


def _check(spec: UnitSpec, wrong: list[str] | None = None) -> None:
    """Everything that is wrong with a spec, in one message, with what was found wrong before."""
    wrong = list(wrong or ())
    if not re.fullmatch(r"[A-Za-z0-9:_.@-]{1,240}\.service", spec.name, re.ASCII):
        wrong.append(f"name {_shown(spec.name)} is no unit name ending in .service")
    for what, argv in (("argv", spec.argv), ("ready_argv", spec.ready_argv)):
        if what == "ready_argv" and not argv:
            continue
        if not argv or not _PLAIN_PATH.fullmatch(argv[0]) or "/../" in argv[0] + "/":
            wrong.append(f"{what}[0] must be a plain absolute path, not {_shown(argv[0]) if argv else 'missing'}")
        if redact_object(list(argv)) != list(argv):
            shown = " ".join(redact_object(list(argv)))
            wrong.append(f"{what} holds a secret, which ps and systemctl would show ({shown[:120]})")
    for name, value in spec.environment.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name, re.ASCII):
            wrong.append(f"environment name {_shown(name)} is not a variable's name")
        elif (is_secret_name(name) and value) or redact_text(f"{name}={value}") != f"{name}={value}":
            wrong.append(f"environment variable {name} holds a secret, which systemctl show would tell everyone")
    for what, account in (("user", spec.user), ("group", spec.group)):
        if account is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,30}|\d{1,10}", account, re.ASCII):
            wrong.append(f"{what} {_shown(account)} is no account name")
    if _is_root(spec.user) and not spec.allow_root:
        wrong.append("user must be an unprivileged account (allow_root says otherwise)")
    paths = [("working_directory", spec.working_directory), ("environment_file", spec.environment_file)]
    for what, path in [*paths, *(("writable_paths", path) for path in spec.writable_paths)]:
        if path is None:
            continue
        if not path.startswith("/") or "/../" in path + "/" or any(ord(char) < 0x20 for char in path):
            wrong.append(f"{what} {_shown(path)} is no absolute path")
        if what == "environment_file" and re.search(r"[*?\[\]]", path):
            wrong.append(f"{what} {_shown(path)} would be taken as a pattern")
    for unit in spec.after:
        if not re.fullmatch(r"[A-Za-z0-9:_.@\\-]{1,250}\.[a-z]{3,10}", unit, re.ASCII):
            wrong.append(f"after: {_shown(unit)} is no unit name")
    if wrong:
        do = "put secrets into environment_file or into a file that a flag such as --config names; correct the rest"
        raise BadInput("a unit spec that can be rendered", "; ".join(wrong), do)


def _shown(value: str) -> str:
    """The value for a message: short, printable, without secrets."""
    return ascii(redact_text(value))[:80]
