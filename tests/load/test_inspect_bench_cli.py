"""`workbook inspect bench`: exit codes, JSON, standard input, and no secret in any output."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import pytest

from lib.cli import _inspect_bench
from lib.errors import WorkbookError

ROW = {
    "backend": "sglang",
    "completed": 10,
    "duration": 5.0,
    "request_throughput": 2.0,
    "mean_ttft_ms": 5.0,
    "mean_tpot_ms": 2.0,
    "output_throughput": 20.0,
    "total_output_tokens": 100,
    "server_info": {"api_key": "k3y-of-ours"},
    "tag": "k3y-of-ours \x1b[2J",
    "failed": 0,
}


def run(*argv: str) -> int:
    """The exit code that the command line would have."""
    parser = argparse.ArgumentParser()
    _inspect_bench.add_parser(parser.add_subparsers())
    args = parser.parse_args(["bench", *argv])
    try:
        return int(args.run(args))
    except WorkbookError as error:
        print(error)
        return error.exit_code


def test_text_and_json_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every finding of the JSON stands in the text; secrets and control characters stand in neither."""
    path = tmp_path / "b.jsonl"
    path.write_text(json.dumps(ROW))
    assert run(str(path), "--json") == 0
    raw = capsys.readouterr().out
    found = json.loads(raw)
    assert found["rows"][0]["completed"] == 10 and found["rows"][0]["duration_s"] == 5.0
    assert run(str(path)) == 0
    text = capsys.readouterr().out
    assert all(f"{finding['level']}: {finding['id']}" in text for finding in found["findings"])
    assert "k3y-of-ours" not in raw + text and "\x1b" not in raw + text
    assert {finding["id"] for finding in found["findings"]} >= {"secret_in_file"}


@pytest.mark.parametrize(
    ("level", "failed", "code"), [("error", 0, 0), ("error", 5, 1), ("warning", 0, 1), ("info", 0, 1)]
)
def test_fail_on(tmp_path: Path, level: str, failed: int, code: int) -> None:
    """A finding at or above the level gives 1."""
    path = tmp_path / "b.jsonl"
    path.write_text(json.dumps(ROW | {"failed": failed}))
    assert run(str(path), "--fail-on", level) == code


def test_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`-` reads standard input."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(json.dumps(ROW).encode())))
    assert run("-", "--json") == 0
    assert json.loads(capsys.readouterr().out)["format"] == "sglang_jsonl"


@pytest.mark.parametrize(
    "content",
    [b"", b"\0\1", b"\xff\xfe{\0", b"hello", b'{"request_throughput": 1, ', b"[" * 200_000, b"\x80\x81\x82"],
)
def test_what_cannot_be_read(tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    """Rubbish and files cut off give exit code 2 and one line."""
    path = tmp_path / "x"
    path.write_bytes(content)
    assert run(str(path)) == 2
    assert len(capsys.readouterr().out.strip().splitlines()) == 1


def test_the_documentation_names_every_finding_and_field() -> None:
    """docs/inspect-bench.md and docs/inspect-unit.md list each finding id, and each field of the report."""
    import re

    from lib.deploy import journal, unit_lint, unit_parse
    from lib.load import bench_readers, benchfiles

    root = Path(__file__).parents[2]
    bench = (root / "docs/inspect-bench.md").read_text()
    unit = (root / "docs/inspect-unit.md").read_text()
    pattern = r'(?:c\.find|report|Finding)\(\s*(?:id=)?"(\w+)"'
    for text, modules in ((bench, [benchfiles]), (unit, [unit_lint, unit_parse])):
        ids = {name for module in modules for name in re.findall(pattern, Path(module.__file__ or "").read_text())}
        assert ids and [name for name in ids if f"`{name}`" not in text] == []
    for text, records in (
        (bench, [benchfiles.BenchReport, benchfiles.BenchReading, bench_readers.BenchRow]),
        (unit, [unit_lint.UnitReport, journal.JournalReport]),
    ):
        fields = {
            field.serialization_alias or name for record in records for name, field in record.model_fields.items()
        }
        assert [name for name in fields if not re.search(rf"\b{name}\b", text)] == []


def test_a_wrong_file_with_a_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The line that a refusal quotes is shown without secrets."""
    path = tmp_path / "x"
    path.write_text("export HF_TOKEN=hunter2secret9\n")
    assert run(str(path)) == 2
    shown = capsys.readouterr().out
    assert "hunter2secret9" not in shown and "HF_TOKEN=REDACTED" in shown
