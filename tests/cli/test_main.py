"""The `workbook` command as a process: odd outputs and inputs end with one message, and no secret is echoed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lib.cli import build_parser, main

ROOT = Path(__file__).parents[2]
UNIT = "[Unit]\nDescription=caf\u00e9 \U0001f600\n[Service]\nExecStart=/srv/caf\u00e9/bin/vllm serve /m\U0001f600\n"


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line of a shell, with `workbook` for this Python's own."""
    line = command.replace("workbook", f"{sys.executable} -m lib.cli")
    return subprocess.run(
        line, shell=True, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """A unit with letters that ASCII does not have."""
    path = tmp_path / "x.service"
    path.write_text(UNIT)
    return path


def test_a_full_disk_is_one_message(unit: Path) -> None:
    """Output that cannot be written: exit 1, one line, no traceback."""
    done = shell(f"workbook inspect unit {unit} > /dev/full")
    assert done.returncode == 1
    assert done.stderr.startswith("workbook: cannot write") and done.stderr.count("\n") == 1, done.stderr
    assert "No space left" in done.stderr


def test_a_closed_pipe_is_silent(unit: Path) -> None:
    """As with `| head -0`: no traceback."""
    done = shell(f"bash -c 'set -o pipefail; workbook inspect unit {unit} --json | true; exit 0'")
    assert done.stderr == ""


@pytest.mark.parametrize(
    "what", ["inspect log -", "inspect bench -", "inspect unit -", "audit --environ -", "audit --log -",
             "audit --server-info -", "audit --metrics -"],
)  # fmt: skip
def test_no_standard_input(what: str) -> None:
    """`-` with standard input closed: exit 2 and one message."""
    done = shell(f"workbook {what} <&-")
    assert done.returncode == 2, done.stderr
    assert "standard input is closed" in done.stderr and done.stderr.count("\n") == 1


def test_ascii_output(unit: Path) -> None:
    """A locale without the letter: it is escaped, and JSON stays JSON with the same text."""
    done = shell(f"workbook inspect unit {unit}", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "") and "\\u00e9" in done.stdout
    done = shell(f"workbook inspect unit {unit} --json", PYTHONIOENCODING="ascii")
    assert json.loads(done.stdout)["unit"]["command"] == ["/srv/caf\u00e9/bin/vllm", "serve", "/m\U0001f600"]


@pytest.mark.parametrize(
    "argv",
    [
        ["bench", "--base-url", "http://127.0.0.1:9", "--api-key", "hunter2secret9"],
        ["bench", "--base-url", "http://127.0.0.1:9", "--api-key=hunter2secret9"],
        ["inspect", "--api-key", "hunter2secret9", "bench", "x"],
        ["--api-key", "hunter2secret9", "bench"],
        ["audit", "--flags", "--api-key hunter2secret9", "--flugs", "HF_TOKEN=hunter2secret9"],
    ],
)
def test_a_wrong_option_shows_no_secret(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """An option that is none ends with exit 2; the value beside a secret's name is not repeated."""
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert "hunter2secret9" not in shown.out + shown.err and "usage:" in shown.err


def test_an_error_shows_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    """What a command raises is redacted too."""
    assert main(["inspect", "bench", "/nowhere/HF_TOKEN=hunter2secret9"]) == 2
    assert "hunter2secret9" not in capsys.readouterr().err


def test_no_option_can_be_shortened() -> None:
    """Every parser, also the nested ones, takes whole options only."""

    def walk(parser: object) -> list[object]:
        nested = [a.choices for a in parser._actions if hasattr(a, "add_parser")]  # type: ignore[attr-defined]
        return [parser, *(found for choices in nested for p in choices.values() for found in walk(p))]

    parsers = walk(build_parser())
    assert len(parsers) > 8
    assert not [p.prog for p in parsers if p.allow_abbrev]  # type: ignore[attr-defined]


@pytest.mark.parametrize("arguments", ["--help", "inspect --help", "inspect log --help"])
def test_help_that_cannot_be_written_is_not_done(arguments: str) -> None:
    """argparse drops the error of a full disk and exits with 0; the command says so and exits with 1."""
    done = shell(f"workbook {arguments} > /dev/full")
    assert done.returncode == 1 and "cannot write the output" in done.stderr


def test_a_command_imports_no_other_one() -> None:
    """What the others import costs more than a second of CPU; a word that is no command still shows all of them."""
    code = "import sys, lib.cli; lib.cli.build_parser({}); print(*sorted(m for m in sys.modules if m.startswith('lib.cli.')))"
    given = {name: subprocess.run([sys.executable, "-c", code.format(words)], capture_output=True, text=True, cwd=ROOT, check=True)
             for name, words in (("one", "['bench', '--help']"), ("none", "['bnech']"), ("dash", "['compare-accuracy']"))}  # fmt: skip
    there = {name: {m.removeprefix("lib.cli.") for m in done.stdout.split()} for name, done in given.items()}
    assert {m for m in there["one"] if not m.startswith("_")} == {"bench"}
    assert {m for m in there["dash"] if not m.startswith("_")} == {"compare_accuracy"}
    assert {"audit", "bench", "deploy", "run", "watch"} <= there["none"]
