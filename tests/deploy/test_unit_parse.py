"""Our reader of units against the real systemd, on lines of every shape."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from lib.deploy.unit_lint import read_unit
from lib.deploy.unit_parse import parse_unit, split_words, time_span_s
from lib.errors import UnreadableFile
from tests.deploy.test_unit_render import needs_systemd, unquote_dump

PIECES = [
    "a",
    "b1",
    " ",
    "  ",
    "\t",
    '"',
    "'",
    "\\",
    "\\\\",
    '\\"',
    "\\x41",
    "\\n",
    "\\t",
    "\\s",
    "\\q",
    "\\;",
    ";",
    " ; ",
    "%%",
    "%n",
    "$",
    "$$",
    "${X}",
    "$X",
    "=",
    "#",
    "é",
    "-",
    "\\\n",
    "\\\n # c\n",
    "\\101",
    "\\u00e9",
    "~",
    "*",
    "|",
    ",",
]


def ask(folder: Path, text: str) -> str:
    """What the real systemd says about a unit, with its dump of what it read."""
    path = folder / "w-parse.service"
    path.write_text(text, "utf-8", newline="")
    command = [shutil.which("systemd-analyze") or "", "verify", str(path)]
    loud = subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=60,
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "debug", "LC_ALL": "C.UTF-8"},
    )
    return loud.stdout + loud.stderr


@needs_systemd
@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example("a 'b \"c' \\x41\\\n  d ; ")
@example('a"b"c "" \\; \\\n # comment\n d')
@example("%%n $$ ${X}y")
@example(" ; \\;")
@example(" ; $$")
@example(" ; -")
def test_command_lines_as_systemd_reads_them(tmp_path: Path, tail: str) -> None:
    """The same words, or both refuse; what both accept has the same arguments."""
    assume("%n" not in tail.replace("%%", ""))  # its dump shows the name, we keep the specifier
    text = f"[Service]\nType=oneshot\nExecStart=/bin/true {tail}\n"
    shown = ask(tmp_path, text)
    theirs = [unquote_dump(line) for line in re.findall(r"Command Line: ([^\n]*)", shown)]
    unit = parse_unit(text)
    ours = [list(command.argv) for command in unit.commands()]
    theirs = [[words[0], *(word.replace("$$", "$") for word in words[1:])] for words in theirs]
    refused = not read_unit(text).valid
    assert refused == (not theirs)
    assert refused or ours == theirs


@needs_systemd
@given(st.lists(st.sampled_from([*PIECES, "A=1", "B=x", " C=2 "]), max_size=12).map("".join))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example('"A=1\\\n  "')
@example('"A=1 2" B=\'x"y\' C=d"e f"')
def test_environment_as_systemd_reads_it(tmp_path: Path, value: str) -> None:
    """The same variables with the same values."""
    assume("%n" not in value.replace("%%", "") and "\\n" not in value and "\\x" not in value)
    text = f"[Service]\nExecStart=/bin/true\nEnvironment={value}\n"
    shown = ask(tmp_path, text)
    theirs = dict(line.split("=", 1) for line in re.findall(r"\n\t+Environment: ([A-Za-z_]\w*=[^\n]*)", shown))
    assert parse_unit(text).environment() == theirs


@needs_systemd
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(
    "lines",
    [
        ["[Service]", "ExecStart=/bin/true \\", "  a \\", "# comment", "", "Environment=A=1"],
        ["[Service]", "ExecStart=/bin/true a\\\\", "Environment=A=1"],
        [" [Service] ", "\tExecStart = /bin/true  x ", "; c", "Environment=A=1", "Environment=", "Environment=B=2"],
        ["[Service]", "ExecStart=/bin/true \\ ", "  a", "Environment=A=1"],
        ["\ufeff[Service]", "ExecStart=/bin/true b", "Environment=A=1 \\"],
    ],
)
def test_lines_as_systemd_reads_them(tmp_path: Path, lines: list[str], end: str) -> None:
    """Continuations, comments within them, blanks, resets, a byte order mark, CR and CRLF."""
    text = end.join(lines) + end
    shown = ask(tmp_path, text)
    theirs = [unquote_dump(line) for line in re.findall(r"Command Line: ([^\n]*)", shown)]
    unit = parse_unit(text)
    assert [list(command.argv) for command in unit.commands()] == theirs
    assert unit.environment() == dict(
        line.split("=", 1) for line in re.findall(r"\n\t+Environment: (\w+=[^\n]*)", shown)
    )


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("1min 30s", 90),
        ("1h", 3600),
        ("5min20s", 320),
        ("500ms", 0.5),
        ("infinity", float("inf")),
        ("1.5min", 90),
        ("2d", 172800),
        ("", None),
        ("soon", None),
        ("10 # x", None),
    ],
)
def test_time_spans(text: str, seconds: float | None) -> None:
    """A time span is in seconds; what is none is None."""
    assert time_span_s(text) == seconds


def test_words_of_the_docstring() -> None:
    """The worked example of split_words holds."""
    assert split_words('a "b c" d\\x41') == ["a", "b c", "dA"]
    with pytest.raises(ValueError, match="unbalanced"):
        split_words("a 'b")


def test_a_word_that_systemd_ignores_decides_nothing() -> None:
    """`Restart=sometimes` is ignored: what was valid before it, or the default, counts."""
    unit = parse_unit("[Service]\nExecStart=/bin/x\nRestart=sometimes\nKillMode=mixed\nKillMode=all\n")
    assert unit.value("Service", "Restart", "no") == "no" and unit.value("Service", "KillMode") == "mixed"


def test_a_line_beyond_the_limit_of_systemd() -> None:
    """1 MiB in one line or over continuations is refused; just below it is read, and quickly."""
    almost = "[Service]\nExecStart=/bin/x " + "--x abc " * 60_000 + "\n"
    parse_unit(almost)
    begun = time.monotonic()
    for _ in range(5):
        assert len(parse_unit(almost).commands()[0].argv) == 120_001
    assert time.monotonic() - begun < 20
    for long in ("a" * (1 << 20), "\u00e9" * (1 << 19), "abc \\\n" * 250_000):
        with pytest.raises(UnreadableFile, match="1 MiB"):
            parse_unit("[Service]\nExecStart=/bin/x " + long + "\n")


@pytest.mark.parametrize(
    "text", ["[Timer]\nOnCalendar=daily\n", "[Socket]\nListenStream=80\n", "[Unit]\nDescription=x\n"]
)
def test_another_kind_of_unit(text: str) -> None:
    """A timer, a socket, a part without [Service]: refused with the reason."""
    with pytest.raises(UnreadableFile, match="service unit"):
        read_unit(text)
