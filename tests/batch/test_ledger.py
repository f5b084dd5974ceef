"""The ledger: once a key, whole lines only, several writers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lib.batch import attempts
from lib.batch.ledger import LEDGER, Ledger
from lib.batch.storage import FolderStore, store_of
from lib.batch.tasks import TaskRecord
from lib.errors import UnreadableFile
from lib.params import ROOT


def record(key: str = "0", state: str = "done", attempt: str = "a", **more: Any) -> TaskRecord:
    return TaskRecord(key=key * 64, cell="c", number="03", run_id="r", state=state, attempt=attempt, **more)


def test_a_key_is_done_once(tmp_path: Path) -> None:
    """Failures may be many; the second `done` is refused, unless its files went away."""
    ledger = Ledger(FolderStore(tmp_path), tmp_path)
    assert [ledger.add(record(state=s)) for s in ("failed", "failed", "done", "done")] == [True, True, True, False]
    assert ledger.add(record(attempt="b", taken_from="c/r0")) is True
    again = Ledger(FolderStore(tmp_path), tmp_path)
    assert again.records == ledger.records and len(again.records) == 4
    again.forget("0" * 64)
    assert (
        again.add(record(attempt="c")) is True and Ledger(FolderStore(tmp_path), tmp_path).done["0" * 64].attempt == "c"
    )


@pytest.mark.parametrize("cut", [1, 20, 100])
def test_a_line_that_was_cut_off_is_no_record_and_spoils_none(tmp_path: Path, cut: int) -> None:
    """A writer killed in the middle: what was whole stays, what comes next is whole."""
    ledger = Ledger(FolderStore(tmp_path), tmp_path)
    ledger.add(record("1"))
    ledger.add(record("2"))
    file = tmp_path / LEDGER
    file.write_bytes(file.read_bytes()[:-cut])
    after = Ledger(FolderStore(tmp_path), tmp_path)
    assert "1" * 64 in after.done
    kept = len(after.records)
    assert after.add(record("3")) is True
    last = Ledger(FolderStore(tmp_path), tmp_path)
    assert len(last.records) in (kept + 1, kept + 2) and last.done["3" * 64].attempt == "a"


def test_a_foreign_line_is_refused(tmp_path: Path) -> None:
    """A whole line that is no record is one message, not a silent loss."""
    (tmp_path / LEDGER).write_text('{"key": "x"}\n')
    with pytest.raises(UnreadableFile, match="no|none"):
        Ledger(FolderStore(tmp_path), tmp_path)


def test_processes_that_race_record_a_key_once(tmp_path: Path) -> None:
    """Four writers, the same 25 keys: 25 records."""
    program = (
        "import sys; from pathlib import Path; from lib.batch.ledger import Ledger; from lib.batch.storage import FolderStore\n"
        "from lib.batch.tasks import TaskRecord\n"
        "p = Path(sys.argv[1]); ledger = Ledger(FolderStore(p), p); fixed = dict(cell='c', number='03', run_id='r', state='done')\n"
        "for i in range(25): ledger.add(TaskRecord(key=f'{i:064x}', attempt=sys.argv[2], **fixed))\n"
    )
    racers = [subprocess.Popen([sys.executable, "-c", program, str(tmp_path), name], cwd=ROOT) for name in "abcd"]
    assert [racer.wait(60) for racer in racers] == [0, 0, 0, 0]
    assert sorted(r.key for r in Ledger(FolderStore(tmp_path), tmp_path).records) == [f"{i:064x}" for i in range(25)]


def test_two_machines_with_one_s3_record_a_key_once(s3_url: str, tmp_path: Path) -> None:
    """Each has a copy of its own; the second learns who was first, also where the first was killed half way."""
    store = store_of(s3_url)
    one, two = Ledger(store, tmp_path / "one"), Ledger(store, tmp_path / "two")
    assert one.add(record("1", attempt="a")) is True and two.add(record("1", attempt="b")) is False
    assert two.done["1" * 64].attempt == "a" and one.add(record("1", attempt="a", state="failed")) is True
    # killed after it was first, before its record: the attempt that it committed is put down by whoever comes next
    attempts.commit(store, record("2", attempt="x"))
    store.put_new(f".done/{'2' * 64}.json", b"x")
    assert two.add(record("2", attempt="y")) is False and two.done["2" * 64].attempt == "x"
    # killed before it committed: it does not count
    store.put_new(f".done/{'3' * 64}.json", b"x")
    assert two.add(record("3", attempt="y")) is True
    fresh = Ledger(store, tmp_path / "three")
    assert {key[0]: r.attempt for key, r in fresh.done.items()} == {"1": "a", "2": "x", "3": "y"}
    two.forget("1" * 64)
    assert two.add(record("1", attempt="again")) is True
