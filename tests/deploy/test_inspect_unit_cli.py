"""`workbook inspect unit`: exit codes, JSON, standard input, drop-ins, and no secret in any output."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import pytest

from lib.cli import _inspect_unit
from lib.errors import WorkbookError

UNIT = """\
[Service]
ExecStart=/opt/py/bin/vllm serve /srv/m --api-key k3y-of-ours
Environment="MODE=slow"
KillMode=process
"""


def run(*argv: str) -> int:
    """The exit code that the command line would have."""
    parser = argparse.ArgumentParser()
    _inspect_unit.add_parser(parser.add_subparsers())
    args = parser.parse_args(["unit", *argv])
    try:
        return int(args.run(args))
    except WorkbookError as error:
        print(error)
        return error.exit_code


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """A unit file with two errors."""
    path = tmp_path / "x.service"
    path.write_text(UNIT)
    return path


def test_text_and_json_say_the_same(unit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every finding of the JSON stands in the text; the secret stands in neither."""
    assert run(str(unit), "--json") == 0
    raw = capsys.readouterr().out
    found = json.loads(raw)
    assert found["journal"] is None and found["unit"]["severity"] == "error"
    assert run(str(unit)) == 0
    text = capsys.readouterr().out
    assert all(f"{finding['level']}: {finding['id']}" in text for finding in found["unit"]["findings"])
    assert "k3y-of-ours" not in raw + text


@pytest.mark.parametrize(("level", "code"), [("error", 1), ("info", 1)])
def test_fail_on(unit: Path, level: str, code: int) -> None:
    """A finding at or above the level gives 1; without any, 0."""
    assert run(str(unit), "--fail-on", level) == code
    unit.write_text("[Service]\nType=oneshot\nExecStart=/bin/true\n")
    assert run(str(unit), "--fail-on", level) == 0


def test_drop_ins_are_sorted_by_name_and_the_journal_is_compared(
    unit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The later name wins whatever the order on the command line, and the journal shows whether it arrived."""
    for name, value in (("20-b.conf", "fast"), ("10-a.conf", "medium")):
        (tmp_path / name).write_text(f"[Service]\nEnvironment=MODE={value}\nKillMode=\n")
    (tmp_path / "j.txt").write_text("srv[7]: MODE=slow key k3y-of-ours\n")
    argv = [str(unit), "--dropin", str(tmp_path / "20-b.conf"), "--dropin", str(tmp_path / "10-a.conf")]
    assert run(*argv, "--journal", str(tmp_path / "j.txt"), "--json") == 0
    raw = capsys.readouterr().out
    found = json.loads(raw)
    assert found["unit"]["environment"]["MODE"] == "fast" and found["unit"]["kill_mode"] == "control-group"
    assert found["journal"]["class"] == "dropin_not_applied" and found["journal"]["dropin_applied"] is False
    assert "k3y-of-ours" not in raw


def test_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`-` reads standard input, once."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(UNIT.encode())))
    assert run("-", "--json") == 0
    assert json.loads(capsys.readouterr().out)["unit"]["kill_mode"] == "process"
    assert run("-", "--journal", "-") == 2


@pytest.mark.parametrize("content", [b"", b"\0\1\2", b"\xff\xfe[\0U\0", b"hello", b"x" * (5 << 20)])
def test_what_cannot_be_read(tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    """Rubbish gives exit code 2 and one line."""
    path = tmp_path / "x"
    path.write_bytes(content)
    assert run(str(path)) == 2
    assert len(capsys.readouterr().out.strip().splitlines()) == 1


def test_missing_file_and_folder(tmp_path: Path) -> None:
    """A missing file and a folder give exit code 2."""
    assert run(str(tmp_path / "none")) == 2
    assert run(str(tmp_path)) == 2


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An escape sequence in a unit is shown by its code."""
    path = tmp_path / "x.service"
    path.write_text("[Service]\nExecStart=/bin/true \x1b[2J\nDescripton=\x1b]0;x\x07\n")
    assert run(str(path)) == 0
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("as_json", [True, False])
def test_secret_of_the_process_is_hidden(as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A secret variable that the journal shows with another value: said so, with neither value."""
    unit, journal = tmp_path / "x.service", tmp_path / "x.log"
    unit.write_text(
        "[Service]\nExecStart=/opt/py/bin/vllm serve /srv/m\nEnvironment=HF_TOKEN=hunter2unit55\n"
        "Environment=UPSTREAM=http://me:fromUnit77@h/ MODE=slow\n"
    )
    stamp = "Nov 20 10:00:00 host"
    journal.write_text(
        f"{stamp} systemd[1]: Started x.service - x.\n{stamp} sglang[1]: HF_TOKEN=otherSecret99x\n"
        f"{stamp} sglang[1]: UPSTREAM=http://me:fromLog88@h/ MODE=fast\n"
    )
    assert run(str(unit), "--journal", str(journal), *(["--json"] if as_json else [])) == 0
    out = capsys.readouterr().out
    assert not [secret for secret in ("hunter2unit55", "otherSecret99x", "fromUnit77", "fromLog88") if secret in out]
    assert "both are hidden" in out and "fast" in out
    if as_json:
        found = {item["name"]: item for item in json.loads(out)["journal"]["settings"]}
        assert found["HF_TOKEN"]["applied"] is False and found["HF_TOKEN"]["seen"] == ["REDACTED"]
        assert found["MODE"]["seen"] == ["fast"]


def test_a_wrong_file_with_a_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The line that a refusal quotes, and the user of the summary, are shown without secrets."""
    path = tmp_path / "x"
    path.write_text("export HF_TOKEN=hunter2secret9\n")
    assert run(str(path)) == 2
    path.write_text("[Service]\nExecStart=/bin/x\nUser=HF_TOKEN=hunter2secret9\n")
    assert run(str(path)) == 0
    shown = capsys.readouterr().out
    assert "hunter2secret9" not in shown and shown.count("HF_TOKEN=REDACTED") == 2


@pytest.mark.parametrize(
    "line", ["Nov 20 10:00:00 host sglang[1]: ready", '{"MESSAGE": "ready", "_PID": "1"}',
             "2026-11-20T10:00:00+0000 host systemd[1]: Started x."],
)  # fmt: skip
def test_a_journal_in_the_place_of_the_unit(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is read by itself; beside a second journal or a drop-in, exit 2 and the option it belongs to."""
    path = tmp_path / "x.log"
    path.write_text(f"{line}\n" * 3)
    assert run(str(path), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["unit"] is None and found["journal"]["lines"] == 3
    assert run(str(path)) == 0
    assert capsys.readouterr().out.startswith("journal: ")
    for option in ("--journal", "--dropin"):
        assert run(str(path), option, str(path)) == 2
        assert "--journal" in capsys.readouterr().out


def test_an_ignored_restart_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`Restart=sometimes`: systemd ignores it, and so does the summary."""
    path = tmp_path / "x.service"
    path.write_text("[Service]\nExecStart=/bin/x\nRestart=sometimes\n")
    assert run(str(path), "--json") == 0
    unit = json.loads(capsys.readouterr().out)["unit"]
    assert unit["restart"] == "no" and "invalid_value" in [finding["id"] for finding in unit["findings"]]
