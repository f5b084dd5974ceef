"""A rendered unit means exactly what its spec says: to our reader, to our linter and to the real systemd."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from lib.deploy.unit_lint import lint_unit
from lib.deploy.unit_parse import parse_unit
from lib.deploy.unit_render import (
    ContainerSpec,
    UnitSpec,
    http_probe_argv,
    render_container_unit,
    render_unit,
    start_limit_interval_s,
    unit_value,
)
from lib.errors import BadInput
from lib.server.redact import is_secret_name, redact_object, redact_text

SYSTEMD = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(SYSTEMD is None, reason="systemd-analyze is not installed: apt-get install systemd")

HOSTILE = [
    "a b",
    'say "x"',
    "it's",
    "50%",
    "%n %H",
    "$HOME",
    "${HOME}",
    "$$",
    "\\",
    "\\n",
    "a\\",
    "-x",
    "--",
    ";",
    "\\;",
    "#c",
    "; rm",
    "=",
    "",
    " ",
    "\t",
    "\x01",
    "é",
    "\u2028",
    "\x85",
    "A=b",
    "*",
    "~",
    "$(id)",
    "`id`",
    "|",
    "@x",
    "+x",
    "!x",
    ":x",
    "[Service]",
    "\ufeff",
]
words = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(alphabet=st.characters(blacklist_categories=["Cs"], blacklist_characters="\n\r\0"), max_size=25),
    st.text(alphabet="ab \t\"'\\$%{};#-=x0", max_size=15),
)


def spec(**changes: object) -> UnitSpec:
    """A good spec with changes."""
    base: dict[str, object] = {
        "name": "sglang.service",
        "description": "SGLang",
        "argv": ("/bin/true", "-m", "sglang.launch_server", "--port", "30000"),
        "user": "sglang",
        "gpu": True,
        "environment": {"CUDA_VISIBLE_DEVICES": "0,1"},
        "environment_file": "/etc/sglang/secrets.env",
        "working_directory": "/srv/sglang",
        "ready_argv": ("/bin/true", "http://127.0.0.1:30000/health"),
    }
    return UnitSpec.model_validate(base | changes)


def no_secret(argv: list[str]) -> bool:
    """Whether nothing in the arguments looks like a secret (such arguments are refused, tested below)."""
    return redact_object(argv) == argv


def dump(folder: Path, text: str) -> tuple[str, str]:
    """What the real systemd read: (its dump of the unit, its complaints)."""
    assert SYSTEMD
    path = folder / "w-test.service"
    path.write_text(text, "utf-8", newline="\n")
    quiet = subprocess.run([SYSTEMD, "verify", str(path)], capture_output=True, text=True, errors="replace", timeout=60)
    loud = subprocess.run(
        [SYSTEMD, "verify", str(path)],
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=60,
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "debug", "LC_ALL": "C.UTF-8"},
    )
    assert quiet.returncode == 0, quiet.stderr
    return loud.stdout + loud.stderr, quiet.stderr


def unquote_dump(line: str) -> list[str]:
    """The words of a command line as systemd prints them (its quoting of a shell word, C escapes)."""
    out: list[str] = []
    for word in re.findall(r'"(?:\\.|[^"\\])*"|[^ ]+', line):
        text = word
        if word.startswith('"'):
            text = re.sub(
                r'\\([0-7]{3}|x[0-9a-f]{2}|[abfnrtv"\\$`])',
                lambda m: {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}.get(
                    m[1], chr(int(m[1], 8)) if m[1].isdigit() else chr(int(m[1][1:], 16)) if m[1][0] == "x" else m[1]
                ),
                word[1:-1],
            )
        out.append(text)
    return out


@given(st.lists(words, max_size=8))
@settings(max_examples=400, deadline=None)
@example(HOSTILE)
def test_arguments_come_back(arguments: list[str]) -> None:
    """Our reader gets the very same argv, and no argument becomes a variable, a command or a line."""
    assume(no_secret(arguments))
    text = render_unit(spec(argv=("/bin/true", *arguments)))
    unit = parse_unit(text)
    commands = unit.commands("ExecStart")
    assert [command.argv for command in commands] == [("/bin/true", *arguments)]
    assert commands[0].variables == ()
    assert unit.problems == ()
    assert len(unit.assignments) == len(parse_unit(render_unit(spec(argv=("/bin/true",)))).assignments)


@needs_systemd
@given(st.lists(words, max_size=8))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(HOSTILE)
def test_arguments_reach_the_real_systemd(tmp_path: Path, arguments: list[str]) -> None:
    """The real systemd reads the same argv ($$ is what it makes a $ of when it runs the command) and says nothing."""
    assume(no_secret(arguments))
    assume(not any("\x80" <= c <= "\x9f" for a in arguments for c in a))  # its dump shows these in more than one way
    shown, complaints = dump(tmp_path, render_unit(spec(argv=("/bin/true", *arguments))))
    assert complaints == ""
    lines = re.findall(r"ExecStart:\n\t+Command Line: ([^\n]*)\n", shown)
    assert len(lines) == 1
    assert [word.replace("$$", "$") for word in unquote_dump(lines[0])] == ["/bin/true", *arguments]


@given(st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True), words, max_size=5))
@settings(max_examples=200, deadline=None)
def test_environment_comes_back(environment: dict[str, str]) -> None:
    """Every value of the environment comes back as itself."""
    assume(not any(is_secret_name(n) or redact_text(f"{n}={v}") != f"{n}={v}" for n, v in environment.items()))
    unit = parse_unit(render_unit(spec(environment=environment)))
    assert unit.environment() == {"TORCHINDUCTOR_CACHE_DIR": "/var/cache/sglang/inductor"} | environment
    assert unit.problems == ()


@needs_systemd
def test_environment_reaches_the_real_systemd(tmp_path: Path) -> None:
    """The real systemd shows the same values of the environment."""
    environment = {f"V{i}": value for i, value in enumerate(HOSTILE) if value.isascii() and value.isprintable()}
    shown, complaints = dump(tmp_path, render_unit(spec(environment=environment)))
    assert complaints == ""
    assert dict(re.findall(r"\tEnvironment: (V\d+)=([^\n]*)\n", shown)) == environment


@needs_systemd
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gpu": False, "ready_argv": ()},
        {"restart": "no"},
        {"restart": "always"},
        {
            "description": 'Qwen "397B" 50% $x; #1',
            "working_directory": "/srv/a b %x",
            "writable_paths": ("/etc/a b", '/etc/"q"'),
        },
        {"argv": ("/bin/true",) + tuple(f"--flag-{i} {'x' * 50}" for i in range(200))},
        {"argv": ("/bin/true",), "ready_argv": ("/bin/true",), "name": "a@b-c.service"},
        {"group": "gpu", "after": ("srv-models.mount",), "environment_file": None},
    ],
)
def test_the_real_systemd_accepts_it(tmp_path: Path, changes: dict[str, object]) -> None:
    """`systemd-analyze verify` has no complaint, and its security score is below that of an unhardened unit (9.6)."""
    text = render_unit(spec(**changes))
    _, complaints = dump(tmp_path, text)
    assert complaints == ""
    assert SYSTEMD
    command = [SYSTEMD, "security", "--offline=true", "--threshold=70", str(tmp_path / "w-test.service")]
    security = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert security.returncode == 0, security.stdout[-300:]


@pytest.mark.parametrize("bad", ["a\nExecStart=/bin/evil", "a\r", "a\0b", "\ud800"])
@pytest.mark.parametrize(
    "field",
    ["argv", "ready_argv", "environment", "description", "working_directory", "environment_file", "user", "name"],
)
def test_a_second_line_is_refused(bad: str, field: str) -> None:
    """A newline, CR, NUL or lone surrogate anywhere is one clear error, never a line of the unit."""
    value: object = {"argv": ("/bin/true", bad), "ready_argv": ("/bin/true", bad), "environment": {"A": bad}}.get(
        field, "/" + bad
    )
    with pytest.raises(BadInput):
        render_unit(spec(**{field: value}))


@pytest.mark.parametrize(
    "changes",
    [
        {"argv": ()},
        {"argv": ("python", "-m")},
        {"argv": ("/bin/$x",)},
        {"argv": ("/bin/my 'x",)},
        {"argv": ("/bin/x\\y",)},
        {"argv": ("/opt/../bin/true",)},
        {"argv": ("/bin/true", "--api-key", "abc")},
        {"argv": ("/bin/true", "--api-key=abc")},
        {"argv": ("/bin/true", "--hf-token", "abc")},
        {"ready_argv": ("/usr/bin/curl", "-H", "Authorization: Bearer abcdef")},
        {"environment": {"HF_TOKEN": "abc"}},
        {"environment": {"X": "hf_abcdefghijklmnopqrstu"}},
        {"environment": {"A B": "c"}},
        {"environment": {"": "c"}},
        {"user": None},
        {"user": "root"},
        {"user": "-x"},
        {"working_directory": "relative"},
        {"working_directory": "/a/../b"},
        {"working_directory": "/a\\"},
        {"environment_file": "/etc/*.env"},
        {"name": "x"},
        {"name": "../x.service"},
        {"after": ("x y.service",)},
    ],
)
def test_what_cannot_be_rendered_is_refused(changes: dict[str, object]) -> None:
    """A relative command, a secret, root, a bad path or name: an error that says so, without the secret."""
    with pytest.raises(BadInput) as caught:
        render_unit(spec(**changes))
    assert "abc" not in str(caught.value)


def test_all_faults_are_in_one_message() -> None:
    """Every fault of a spec is listed, not only the first."""
    with pytest.raises(BadInput) as caught:
        render_unit(spec(name="x", user="root", argv=("python",)))
    assert all(part in str(caught.value) for part in ("name", "unprivileged", "argv[0]"))


def test_the_start_limit_trips() -> None:
    """As many full cycles as the burst fit into the interval: a server that dies after each load is given up."""
    # 2 cycles of 600 + 30 + 10 s, and one more delay: 2 * 640 + 10
    limited = spec(start_limit_burst=2, load_timeout_s=600, drain_timeout_s=30, restart_delay_s=10)
    assert start_limit_interval_s(limited) == 1290
    unit = parse_unit(render_unit(limited))
    assert unit.seconds("Unit", "StartLimitIntervalSec") == 1290
    assert unit.value("Unit", "StartLimitBurst") == "2"
    assert unit.seconds("Service", "TimeoutStartSec") == 600
    assert unit.seconds("Service", "TimeoutStopSec") == 30


def test_the_probe_watches_the_main_process(tmp_path: Path) -> None:
    """The readiness loop ends with 0 when the probe succeeds, and with 1 as soon as the main process is gone."""
    unit = parse_unit(render_unit(spec(ready_argv=("/bin/false", "a b"))))
    argv = unit.commands("ExecStartPost")[0].argv
    dead = subprocess.Popen(["/bin/true"])
    dead.wait()
    gone = subprocess.run(
        argv, env={"MAINPID": str(dead.pid), "PATH": "/usr/bin:/bin"}, capture_output=True, timeout=20
    )
    assert gone.returncode == 1
    good = (*argv[:4], "/bin/true")
    ready = subprocess.run(
        good, env={"MAINPID": str(os.getpid()), "PATH": "/usr/bin:/bin"}, capture_output=True, timeout=20
    )
    assert ready.returncode == 0


def test_quoting_has_three_forms() -> None:
    """One function quotes; the worked example of its docstring holds."""
    assert unit_value("a $b 5%", "word", "x") == '"a $$b 5%%"'
    assert unit_value("a $b 5%", "assignment", "x") == '"a $b 5%%"'
    assert unit_value("a $b 5%", "plain", "x") == "a $b 5%%"
    assert unit_value("--port", "word", "x") == "--port"
    assert http_probe_argv("http://127.0.0.1:1/health")[-1] == "http://127.0.0.1:1/health"


def container(**changes: object) -> ContainerSpec:
    """A good container spec with changes."""
    base: dict[str, object] = {
        "name": "sglang.service",
        "description": "SGLang in a container",
        "image": "lmsysorg/sglang@sha256:" + "a" * 64,
        "argv": ("python3", "-m", "sglang.launch_server", "--port", "30000"),
        "environment": {"NCCL_DEBUG": "WARN"},
        "environment_file": "/etc/sglang/secrets.env",
        "volumes": (("/srv/models", "/models"),),
        "port": 30000,
        "ready_argv": ("/bin/true",),
    }
    return ContainerSpec.model_validate(base | changes)


@given(st.lists(words, max_size=8), words)
@settings(max_examples=150, deadline=None)
@example(HOSTILE, "x y")
def test_a_containers_arguments_come_back(arguments: list[str], value: str) -> None:
    """Arguments and environment of a container arrive as themselves, and nothing becomes a line or another command."""
    assume(no_secret([*arguments, f"V={value}"]))
    unit = parse_unit(render_container_unit(container(argv=("python3", *arguments), environment={"V": value})))
    assert unit.problems == ()
    (command,) = unit.commands("ExecStart")
    assert command.argv[-len(arguments) - 1 :] == ("python3", *arguments)
    assert command.argv[command.argv.index("--env") + 1] == f"V={value}"
    assert command.variables == ()


@needs_systemd
@pytest.mark.parametrize("changes", [{}, {"gpu": False, "ready_argv": ()}, {"restart": "no"}, {"address": "::1"}])
def test_the_container_unit_is_accepted(tmp_path: Path, changes: dict[str, object]) -> None:
    """The real systemd and our own linter have nothing to say about it."""
    (tmp_path / "docker.service").write_text("[Service]\nExecStart=/bin/true\n")  # it has to exist for Requires=
    assert dump(tmp_path, render_container_unit(container(docker="/bin/true", **changes)))[1] == ""
    found = lint_unit(render_container_unit(container(**changes)))
    assert [finding for finding in found if finding.id != "no_restart"] == []


@pytest.mark.parametrize(
    "changes",
    [
        {"image": "lmsysorg/sglang:latest"},
        {"argv": ()},
        {"argv": ("python3", "--api-key", "abc")},
        {"environment": {"HF_TOKEN": "abc"}},
        {"volumes": (("/a:b", "/c"),)},
        {"volumes": (("a", "/c"),)},
        {"argv": ("a\nb",)},
        {"docker": "docker"},
    ],
)
def test_a_container_that_cannot_be_rendered_is_refused(changes: dict[str, object]) -> None:
    """An image without a digest, a secret, a bad path or a second line is an error."""
    with pytest.raises(BadInput) as caught:
        render_container_unit(container(**changes))
    assert "abc" not in str(caught.value)
