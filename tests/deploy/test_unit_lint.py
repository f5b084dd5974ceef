"""Real mistakes are found, good units are left alone, and the real systemd agrees on what it ignores."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.deploy import journal, unit_lint, unit_parse
from lib.deploy.unit import lint_unit, parse_unit, read_unit, render_unit
from lib.errors import UnreadableFile
from lib.findings import LEVELS, reaches, worst_level
from tests.deploy.test_unit_render import needs_systemd, spec

GOOD = """\
[Unit]
Description=SGLang for the team
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=3600
StartLimitBurst=3

[Service]
Type=exec
User=sglang
# what the JIT needs
Environment="CUDA_VISIBLE_DEVICES=0,1" CUDA_HOME=/usr/local/cuda
Environment=PATH=/usr/local/cuda/bin:/usr/bin:/bin
EnvironmentFile=-/etc/sglang/tuning.env
ExecStart=/opt/venv/bin/python -m sglang.launch_server \\
  --model-path /srv/models/m \\
  # a comment between the lines
  --host 0.0.0.0 --port 30000
Restart=on-failure
RestartSec=20
TimeoutStopSec=60

[Install]
WantedBy=multi-user.target
"""


def changed(old: str, new: str) -> str:
    """The good unit with one change, which must be one."""
    assert old in GOOD
    return GOOD.replace(old, new)


DOCKER = """\
[Unit]
Description=SGLang in a container
Wants=network-online.target
After=network-online.target docker.service
Requires=docker.service
StartLimitIntervalSec=3600
StartLimitBurst=3
[Service]
ExecStartPre=-/usr/bin/docker rm -f llm
ExecStart=/usr/bin/docker run --rm --name llm --gpus all lmsysorg/sglang:v0.5.16 python3 -m sglang.launch_server
ExecStop=/usr/bin/docker stop -t 30 llm
Restart=on-failure
RestartSec=20
TimeoutStopSec=60
[Install]
WantedBy=multi-user.target
"""
START = "ExecStart=/opt/venv/bin/python -m sglang.launch_server"

#: (id, level, unit): each unit has the mistake.
BAD: list[tuple[str, str, str]] = [
    ("kill_mode_leaves_processes", "error", changed("Type=exec", "Type=exec\nKillMode=process")),
    ("kill_mode_leaves_processes", "error", changed("Type=exec", "Type=exec\nKillMode=none")),
    ("watchdog_never_fed", "error", changed("Type=exec", "Type=exec\nWatchdogSec=30")),
    ("restart_misses_crash", "warning", changed("Restart=on-failure", "Restart=on-watchdog")),
    ("restart_misses_crash", "warning", changed("Restart=on-failure", "Restart=on-abnormal")),
    (
        "secret_expanded_on_command_line",
        "warning",
        changed(START, "ExecStart=/bin/sh -c 'exec python -m sglang.launch_server --api-key $API_KEY' x"),
    ),
    ("no_final_kill", "error", changed("Type=exec", "Type=exec\nSendSIGKILL=no")),
    ("no_drain", "warning", changed("Type=exec", "Type=exec\nKillSignal=SIGKILL")),
    ("no_drain", "warning", changed("Type=exec", "Type=exec\nExecStop=/bin/kill -9 $MAINPID")),
    ("crash_is_success", "warning", changed("Type=exec", "Type=exec\nSuccessExitStatus=143 SIGKILL")),
    ("timeout_start_without_effect", "info", changed("Type=exec", "Type=simple\nTimeoutStartSec=300")),
    ("start_timeout_too_short", "warning", changed("Type=exec", "ExecStartPost=/usr/bin/wait-ready")),
    (
        "start_timeout_too_short",
        "warning",
        changed("Type=exec", "ExecStartPost=/usr/bin/wait-ready\nTimeoutStartSec=1min"),
    ),
    ("stop_timeout_default", "info", changed("TimeoutStopSec=60\n", "")),
    ("stop_timeout_short", "info", changed("TimeoutStopSec=60", "TimeoutStopSec=5")),
    ("stop_timeout_infinite", "warning", changed("TimeoutStopSec=60", "TimeoutStopSec=infinity")),
    ("stop_timeout_infinite", "warning", changed("TimeoutStopSec=60", "TimeoutStopSec=0")),
    ("no_readiness_message", "error", changed("Type=exec", "Type=notify\nTimeoutStartSec=1h")),
    ("does_not_fork", "error", changed("Type=exec", "Type=forking\nTimeoutStartSec=1h")),
    ("oneshot_server", "error", changed("Type=exec", "Type=oneshot")),
    ("remains_after_exit", "warning", changed("Type=exec", "Type=exec\nRemainAfterExit=yes")),
    ("no_restart", "info", changed("Restart=on-failure\n", "")),
    ("restart_without_delay", "warning", changed("Restart=on-failure\nRestartSec=20", "Restart=always")),
    ("restart_without_delay", "info", changed("RestartSec=20\n", "")),
    ("start_limit_never_trips", "warning", changed("StartLimitIntervalSec=3600", "").replace("on-failure", "always")),
    ("start_limit_never_trips", "info", changed("StartLimitIntervalSec=3600", "StartLimitIntervalSec=30")),
    ("start_limit_never_trips", "warning", changed("StartLimitIntervalSec=3600", "StartLimitIntervalSec=0")),
    ("wrong_section", "warning", changed("Type=exec", "StartLimitIntervalSec=300")),
    ("wrong_section", "warning", changed("StartLimitBurst=3", "Restart=always")),
    ("unknown_key", "warning", changed("RestartSec=20", "RestartSecs=20")),
    ("newer_key", "info", changed("Type=exec", "RestartSteps=3")),
    ("invalid_value", "warning", changed("Restart=on-failure", "Restart=true")),
    ("invalid_value", "warning", changed("Type=exec", "Type=exec\nKillMode=group")),
    ("invalid_value", "warning", changed("Type=exec", "PrivateTmp=maybe")),
    ("inline_comment", "warning", changed("RestartSec=20", "RestartSec=20 # seconds")),
    ("unknown_section", "error", changed("[Service]", "[service]")),
    ("unknown_section", "warning", changed("[Install]", "[Notes]\nA=b\n[Install]")),
    ("bad_section", "error", changed("[Install]", "[Install")),
    ("outside_section", "error", "Type=exec\n" + GOOD),
    ("not_an_assignment", "error", changed("--model-path /srv/models/m \\\n", "--model-path /srv/models/m\n")),
    ("broken_continuation", "error", changed("--model-path /srv/models/m \\", "--model-path /srv/models/m \\ ")),
    ("swallowed_line", "error", changed("--port 30000", "--port 30000 \\")),
    ("unbalanced_quotes", "error", changed("--port 30000", "--port '30000")),
    ("unknown_escape", "warning", changed("--port 30000", "--port 30000 a\\q")),
    ("unknown_specifier", "error", changed("--port 30000", "--port 30000 x%20y")),
    ("shell_syntax", "error", changed("--port 30000", "--port 30000 > /var/log/x 2>&1")),
    ("shell_syntax", "error", changed("--port 30000", "--port $(cat port)")),
    ("backgrounded", "error", changed(START, "ExecStart=/usr/bin/nohup /opt/venv/bin/python -m sglang.launch_server")),
    ("backgrounded", "error", changed(START, "ExecStart=/bin/bash -c 'python -m sglang.launch_server &' x")),
    ("script_without_exec", "info", changed(START, "ExecStart=/opt/sglang/start.sh")),
    (
        "script_without_exec",
        "warning",
        changed(START, "KillMode=mixed\nExecStart=/bin/bash -c 'cd /x && python -m sglang.launch_server' x"),
    ),
    (
        "no_exec_start",
        "error",
        changed(START, "#").replace("  --host 0.0.0.0 --port 30000", "").replace("  --model-path /srv/models/m \\", ""),
    ),
    ("several_exec_start", "error", changed("Type=exec", "Type=exec\nExecStart=/bin/true")),
    ("bare_command", "warning", changed(START, "ExecStart=python -m sglang.launch_server")),
    ("bad_command_path", "error", changed(START, "ExecStart=./venv/bin/python -m sglang.launch_server")),
    ("bad_command_path", "error", changed(START, "ExecStart=/opt/venv/ -m sglang.launch_server")),
    ("bad_command_path", "error", changed(START, "ExecStart='/opt/my \\'venv/python' -m sglang.launch_server")),
    ("secret_on_command_line", "error", changed("--port 30000", "--port 30000 --api-key k3y-of-ours")),
    ("secret_on_command_line", "error", changed("--port 30000", "--port 30000 --api-key=k3y-of-ours")),
    ("secret_expanded_on_command_line", "warning", changed("--port 30000", "--port 30000 --api-key ${SGLANG_API_KEY}")),
    ("secret_in_environment", "warning", changed("CUDA_HOME=/usr/local/cuda", "HF_TOKEN=k3y-of-ours")),
    ("environment_quoting", "warning", changed("CUDA_HOME=/usr/local/cuda", "export FOO=bar")),
    ("environment_quoting", "warning", changed('"CUDA_VISIBLE_DEVICES=0,1"', '"CUDA_VISIBLE_DEVICES=0,1')),
    (
        "environment_not_expanded",
        "warning",
        changed("PATH=/usr/local/cuda/bin:/usr/bin:/bin", "PATH=/usr/local/cuda/bin:$PATH"),
    ),
    ("environment_comma", "warning", changed('"CUDA_VISIBLE_DEVICES=0,1"', "A=1, B=2")),
    (
        "relative_environment_file",
        "error",
        changed("EnvironmentFile=-/etc/sglang/tuning.env", "EnvironmentFile=tuning.env"),
    ),
    ("relative_working_directory", "error", changed("Type=exec", "WorkingDirectory=models")),
    ("network_online_not_wanted", "warning", changed("Wants=network-online.target\n", "")),
    ("network_online_not_awaited", "warning", changed("After=network-online.target\n", "")),
    (
        "network_too_early",
        "warning",
        changed("Wants=network-online.target\nAfter=network-online.target", "").replace("0.0.0.0", "10.1.2.3"),
    ),
    (
        "network_too_early",
        "warning",
        DOCKER.replace("network-online", "network").replace(
            "ExecStop=", "ExecStartPre=/usr/bin/docker pull x\nExecStop="
        ),
    ),
    ("required_not_awaited", "warning", DOCKER.replace("network-online.target docker.service", "network.target")),
    ("runs_as_root", "warning", changed("User=sglang", "User=root")),
    ("runs_as_root", "info", changed("User=sglang\n", "")),
    (
        "pull_in_start_pre",
        "warning",
        DOCKER.replace("ExecStop=", "ExecStartPre=/usr/bin/docker pull lmsysorg/sglang:v0.5.16\nExecStop="),
    ),
    ("cleanup_may_fail", "warning", DOCKER.replace("-/usr/bin/docker rm", "/usr/bin/docker rm")),
    ("unpinned_image", "warning", DOCKER.replace(":v0.5.16", ":latest")),
    ("unpinned_image", "warning", DOCKER.replace(":v0.5.16", "")),
    ("detached_container", "error", DOCKER.replace("--rm --name", "--rm -d --name")),
    ("container_name_clash", "info", DOCKER.replace("ExecStartPre=-/usr/bin/docker rm -f llm\n", "")),
    (
        "container_name_clash",
        "warning",
        DOCKER.replace("ExecStartPre=-/usr/bin/docker rm -f llm\n", "").replace(" --rm", ""),
    ),
    ("container_not_stopped", "info", DOCKER.replace("ExecStop=/usr/bin/docker stop -t 30 llm\n", "")),
    ("stop_waits_too_long", "warning", DOCKER.replace("-t 30", "-t 120")),
    ("kills_by_name", "warning", changed("Type=exec", "ExecStartPre=-/usr/bin/pkill -9 -f sglang")),
    ("kills_by_name", "warning", changed("Type=exec", "ExecStartPre=-/bin/sh -c 'fuser -k 30000/tcp'")),
    ("hides_gpu", "error", changed("Type=exec", "PrivateDevices=yes")),
    ("hides_gpu", "error", changed("Type=exec", "ProtectClock=yes")),
    ("hides_gpu", "error", changed("Type=exec", "DevicePolicy=closed")),
    ("forbids_jit", "error", changed("Type=exec", "MemoryDenyWriteExecute=yes")),
    ("no_network", "error", changed("Type=exec", "PrivateNetwork=yes")),
    ("hides_proc", "warning", changed("Type=exec", "ProcSubset=pid")),
    ("hides_home", "error", changed("/srv/models/m", "/home/u/m").replace("Type=exec", "ProtectHome=yes")),
    ("memory_limit_small", "warning", changed("Type=exec", "MemoryMax=512M")),
    ("no_log", "warning", changed("Type=exec", "StandardOutput=null")),
    ("cannot_be_enabled", "info", changed("[Install]\nWantedBy=multi-user.target\n", "")),
    ("bad_target", "warning", changed("WantedBy=multi-user.target", "WantedBy=multi-user")),
    ("crlf", "info", GOOD.replace("\n", "\r\n")),
]

FINE = {
    "good": GOOD,
    "container": DOCKER,
    "drained by hand": changed("Type=exec", "Type=exec\nKillMode=mixed\nSuccessExitStatus=143"),
    "order of keys": changed("Type=exec\nUser=sglang", "Restart=on-failure\nUser=sglang\nType=exec"),
    "quoted value": changed("CUDA_HOME=/usr/local/cuda", 'CUDA_HOME="/usr/local/cuda"'),
    "legacy burst": changed("StartLimitBurst=3\n", "").replace("Type=exec", "Type=exec\nStartLimitBurst=3"),
    "hex and specifiers": changed("--port 30000", "--port 30000 --name %H-%%-\\x41"),
    "literal dollar": changed("--port 30000", "--port 30000 --x $$HOME ${PORT}"),
    "gpu opened": changed("Type=exec", "DevicePolicy=closed\nDeviceAllow=char-nvidia* rw\nProtectClock=yes"),
    "podman as it generates units": "[Unit]\nAfter=network-online.target\nWants=network-online.target\nStartLimitIntervalSec=3600\n"
    "[Service]\nType=notify\nNotifyAccess=all\nRestart=on-failure\nRestartSec=60\n"
    "TimeoutStopSec=180\nExecStart=/usr/bin/podman run --rm --sdnotify=conmon --replace -d --name s "
    "lmsysorg/sglang:v0.5.16 python3 -m sglang.launch_server --model-path /m\nExecStop=/usr/bin/podman stop -t 60 s\n"
    "[Install]\nWantedBy=multi-user.target\n",
    "watchdog switched off": changed("Type=exec", "Type=exec\nWatchdogSec=0"),
    "a key handed on in the environment": changed(
        START, "ExecStart=/bin/sh -c 'API_KEY=$SOME_API_KEY exec python -m sglang.launch_server' x"
    ),
    "shell that execs": changed(START, "ExecStart=/bin/bash -c 'source /x && exec python -m sglang.launch_server' x"),
    "extension": changed("[Install]", "[X-Ours]\nAnything=goes\n[Install]"),
    "semicolon comment": changed("# what", "; what"),
    "pull with time": DOCKER.replace(
        "ExecStop=", "TimeoutStartSec=1h\nExecStartPre=/usr/bin/docker pull lmsysorg/sglang:v0.5.16\nExecStop="
    ),
    "digest": DOCKER.replace(":v0.5.16", "@sha256:" + "0" * 64),
    "token options": changed("--port 30000", "--port 30000 --max-total-tokens 65536 --skip-tokenizer-init"),
}


@pytest.mark.parametrize(("id_", "level", "text"), BAD, ids=[f"{n}-{row[0]}" for n, row in enumerate(BAD)])
def test_each_mistake_is_found(id_: str, level: str, text: str) -> None:
    """The mistake is found at its level, and the secret in it is shown nowhere."""
    findings = lint_unit(text)
    assert (id_, level) in {(finding.id, finding.level) for finding in findings}
    assert "k3y-of-ours" not in read_unit(text).model_dump_json()
    assert all(finding.do for finding in findings)


@pytest.mark.parametrize("name", FINE)
def test_good_units_are_left_alone(name: str) -> None:
    """A good unit has no finding at all."""
    assert lint_unit(FINE[name]) == []


def test_every_kind_has_its_mistake_in_the_table() -> None:
    """A new rule without a unit that shows it fails here."""
    source = "".join(Path(module.__file__ or "").read_text() for module in (unit_lint, unit_parse))
    ids = set(re.findall(r'(?:c\.find|report|Finding)\(\s*(?:id=)?"(\w+)"', source)) | {
        "inline_comment",
        "invalid_value",
    }
    assert len(ids) > 50
    assert ids - {row[0] for row in BAD} == set()


@pytest.mark.parametrize(
    "changes", [{}, {"gpu": False, "ready_argv": ()}, {"restart": "always"}, {"environment_file": None}]
)
def test_our_own_unit_has_no_finding(changes: dict[str, object]) -> None:
    """What we render, our linter likes."""
    assert (
        lint_unit(
            render_unit(spec(argv=("/opt/venv/bin/python", "-m", "sglang.launch_server", "--port", "1"), **changes))
        )
        == []
    )


def test_effective_settings_are_those_of_systemd() -> None:
    """Legacy StartLimitBurst in [Service] counts, StartLimitIntervalSec there does not."""
    report = read_unit(
        changed("StartLimitIntervalSec=3600\nStartLimitBurst=3\n", "").replace(
            "Type=exec", "StartLimitIntervalSec=300\nStartLimitBurst=7"
        )
    )
    assert report.effective_limit == "7 starts in the default 10 s"
    assert [f.what for f in report.findings if f.id == "wrong_section"] == [
        "Unknown key 'StartLimitIntervalSec' in section [Service], ignoring."
    ]
    assert read_unit(GOOD).effective_limit == "3 starts in 3600 s"
    assert read_unit(changed("TimeoutStopSec=60", "TimeoutStopSec=infinity")).timeout_stop_s is None


# 20 s apart, the 3rd restart comes at 60 s: an interval of 60 s stops it, one of 59 s never does.
@pytest.mark.parametrize(("interval", "stops"), [(60, True), (59, False)])
def test_start_limit_arithmetic(interval: int, stops: bool) -> None:
    """The limit trips exactly when burst x delay fits into the interval."""
    report = read_unit(changed("StartLimitIntervalSec=3600", f"StartLimitIntervalSec={interval}"))
    assert report.start_limit_stops_instant_failures is stops


def test_drop_ins_are_merged_in_order() -> None:
    """A later drop-in wins, an empty assignment resets a list, and a finding names the drop-in it stands in."""
    dropins = [
        ("10-a.conf", "[Service]\nKillMode=process\nEnvironment=A=1\n"),
        ("20-b.conf", "[Service]\nKillMode=\nEnvironment=\nEnvironment=B=2\n"),
    ]
    unit = parse_unit(GOOD, dropins)
    assert unit.environment() == {"B": "2"}
    assert unit.value("Service", "KillMode") == ""
    assert lint_unit(GOOD, dropins) == []
    assert "kill_mode_leaves_processes" in {f.id for f in lint_unit(GOOD, dropins[:1])}
    assert any("x.conf: " in f.what for f in lint_unit(GOOD, [("x.conf", "[Service]\nfoo\n")]))
    replaced = parse_unit(GOOD, ["[Service]\nExecStart=\nExecStart=/bin/other --x\n"])
    assert [command.argv for command in replaced.commands()] == [("/bin/other", "--x")]


@needs_systemd
@pytest.mark.parametrize(
    "row",
    [
        row
        for row in BAD
        if row[0]
        in (
            "wrong_section",
            "unknown_key",
            "unknown_section",
            "not_an_assignment",
            "outside_section",
            "unknown_escape",
            "bad_section",
            "environment_quoting",
            "unbalanced_quotes",
            "unknown_specifier",
            "inline_comment",
            "invalid_value",
            "broken_continuation",
            "several_exec_start",
            "no_exec_start",
            "crlf",
        )
    ],
    ids=lambda row: row[0],
)
def test_the_real_systemd_agrees(tmp_path: Path, row: tuple[str, str, str]) -> None:
    """What we say systemd ignores or refuses, it does; where we quote its wording, it is its wording."""
    text = row[2].replace("/opt/venv/bin/python", "/bin/true").replace("User=sglang\n", "")
    path = tmp_path / "w.service"
    path.write_text(text, newline="")
    command = [shutil.which("systemd-analyze") or "", "verify", str(path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if row[0] == "crlf":
        assert ran.stderr == "" and ran.returncode == 0  # 252 reads CRLF: our finding is a note only
        return
    assert ran.stderr
    if row[0] in ("unbalanced_quotes", "unknown_specifier", "bad_section", "several_exec_start", "no_exec_start"):
        assert ran.returncode != 0
        assert read_unit(text).valid is False
    ours = [f.what for f in lint_unit(text) if f.id == row[0]]
    for line in ours:
        if line.endswith(("ignoring.", "ignoring line.")):
            assert line in ran.stderr


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=300))
@settings(max_examples=200, deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    """Arbitrary text gives findings or one clear error, never a traceback."""
    for candidate in (text, "[Service]\nExecStart=" + text, "[Service]\nEnvironment=" + text, GOOD + text):
        try:
            read_unit(candidate)
        except UnreadableFile as error:
            assert str(error)


@given(
    st.integers(0, len(GOOD)),
    st.sampled_from(["\\", "'", '"', "%", "$", "\n", "[", "=", ";", "#", "\r", "\ufeff", "${", "\\x"]),
)
@settings(max_examples=300, deadline=None)
def test_one_stroke_anywhere_is_survived(at: int, stroke: str) -> None:
    """One wrong character anywhere in a good unit never breaks the reader."""
    read_unit(GOOD[:at] + stroke + GOOD[at:])


@pytest.mark.parametrize(
    "text", ["", "\n\n", "# only a comment\n", "hello world", "\x00\x01", "{}", "x" * (5 << 20), '{"a": 1}\n']
)
def test_what_is_no_unit_is_refused(text: str) -> None:
    """Nothing, prose, binary rubbish, a huge file: one clear message."""
    with pytest.raises(UnreadableFile, match="unit"):
        read_unit(text)


def test_levels_have_an_order() -> None:
    """The worst level is the highest; a threshold counts what is at or above it."""
    found = lint_unit(changed("Type=exec", "KillMode=process"))
    assert worst_level(found) == "error" and worst_level([]) is None
    assert [reaches(found, level) for level in LEVELS] == [True, True, True]
    assert not reaches(lint_unit(GOOD), "info")
    assert journal.STORM_RESTARTS == unit_lint.DEFAULT_LIMIT_BURST
