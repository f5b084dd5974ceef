"""A notebook's run: measured once, kept, resumed, rebuilt; and only from the server that was meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lib.errors import BadInput, BadParams, HostTimeout, HostUnreachable, IdentityError, NotMeasured, ServerError
from lib.params import BuildParams, SpeculativeParams, validated
from lib.records import Evidence, Measured, Status, Trial, Verdict
from lib.results import Measurement, NotebookRun, ServerHandle, open_notebook
from lib.server import recorded_arms, speculative
from lib.server.spec_analysis import Analysis
from tests.conftest import TINY


class FakeServer:
    """Answers identity checks from a list: None is fine, text is a mismatch."""

    launch_id = "L1"
    base_url = "http://127.0.0.1:1"
    control = None

    def __init__(self, checks: list[str | None]) -> None:
        self.checks = checks

    def check_identity(self) -> list[str]:
        found = self.checks.pop(0)
        if found:
            raise IdentityError("the launched server answers", found)
        return ["pid"]


def make_run(folder: Path, offline: bool = False) -> NotebookRun:
    return NotebookRun("01", validated(BuildParams, {"profile": TINY}, "test"), folder, offline)


def handle(run: NotebookRun, checks: list[str | None], key: str = "k1") -> ServerHandle:
    made = ServerHandle(run, "server", run.profile.server)
    made._live = FakeServer(checks)  # type: ignore[assignment]
    made.__class__ = type("Handle", (ServerHandle,), {"key": property(lambda _: None if run.offline else key)})
    return made


def count(server: Any, folder: Path, value: int) -> None:
    (folder / "n.json").write_text(json.dumps(value))


def test_a_measurement_is_taken_once_and_resumed(tmp_path: Path) -> None:
    """The same arguments on the same server key are not measured again; other arguments are, and the old record is kept."""
    run = make_run(tmp_path)
    first = run.measure("m", handle(run, [None, None]), count, value=1)
    assert first.ok and first.json("n.json") == 1 and first.launch_ids == ["L1"]
    again = make_run(tmp_path)
    assert again.measure("m", handle(again, []), count, value=1).stamp == first.stamp
    other = again.measure("m", handle(again, [None, None]), count, value=2)
    assert other.json("n.json") == 2
    assert len(list(again.raw.glob("m.earlier-*/n.json"))) == 1


def test_another_server_configuration_is_another_measurement(tmp_path: Path) -> None:
    """A changed server key takes the measurement again."""
    run = make_run(tmp_path)
    run.measure("m", handle(run, [None, None]), count, value=1)
    assert run.measure("m", handle(run, [None, None], "k2"), count, value=1).stamp.server_key == "k2"


@pytest.mark.parametrize("checks", [["another pid"], [None, "another pid"]])
def test_a_mismatch_before_or_after_makes_the_measurement_invalid(tmp_path: Path, checks: list[str | None]) -> None:
    """Whatever was written, a server that is not the same before and after gives no number; a resumed run takes it again."""
    run = make_run(tmp_path)
    taken = run.measure("m", handle(run, checks), count, value=1)
    assert not taken.ok and "another pid" in (taken.problem or "")
    assert run.measure("m", handle(run, [None, None]), count, value=1).ok


def test_an_error_is_kept_where_asked_and_raised_elsewhere(tmp_path: Path) -> None:
    """With keep_errors the next measurement goes on; without, the notebook fails."""
    run = make_run(tmp_path)

    def fails(server: Any, folder: Path) -> None:
        raise ServerError("200", "500")

    kept = run.measure("m", handle(run, [None, None]), fails, keep_errors=True)
    assert not kept.ok and "500" in (kept.problem or "")
    with pytest.raises(ServerError):
        run.measure("n", handle(run, [None, None]), fails)


def test_offline_reads_what_is_there_and_names_what_is_missing(tmp_path: Path) -> None:
    """A rebuild never measures: a missing record is an error with its name."""
    run = make_run(tmp_path)
    run.measure("m", handle(run, [None, None]), count, value=1)
    offline = make_run(tmp_path, offline=True)
    assert (
        offline.measure("m", ServerHandle(offline, "server", offline.profile.server), count, value=99).json("n.json")
        == 1
    )
    with pytest.raises(NotMeasured, match="'gone'"):
        offline.measure("gone", None, count)


def test_a_record_of_files_follows_the_files(tmp_path: Path) -> None:
    """Another context (a model's hash) is another record."""
    run = make_run(tmp_path)
    calls = []

    def read(folder: Path) -> None:
        calls.append(1)

    run.measure("c", None, read, context={"sha256": "a"})
    run.measure("c", None, read, context={"sha256": "a"})
    run.measure("c", None, read, context={"sha256": "b"})
    assert len(calls) == 2


def test_the_profile_is_kept_with_the_run(tmp_path: Path) -> None:
    """A rebuild resolves the run's own copy of the profile, whatever params/ says today."""
    make_run(tmp_path)
    copy = tmp_path / "params" / "01.profile.yaml"
    copy.write_text(copy.read_text().replace("title: ", "title: kept "))
    assert make_run(tmp_path, offline=True).profile.title.startswith("kept ")


def test_running_the_cells_again_in_one_kernel_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of later cells are no unknown parameters, and the first run's servers are closed."""
    monkeypatch.setenv("WORKBOOK_RUN_DIR", str(tmp_path))
    monkeypatch.setattr("lib.results.OPEN", [])
    names: dict[str, Any] = {"profile": TINY, "server": {}, "known_answer": {}}
    with pytest.raises(BadParams, match="unknown key 'i'"):
        open_notebook("01", {**names, "i": 3})
    first = open_notebook("01", names)
    closed: list[str] = []
    monkeypatch.setattr(first, "close", lambda: closed.append("first"))
    open_notebook("01", {**names, "i": 3, "predictions": [1]})
    assert closed == ["first"]


def test_secrets_in_parameters_are_refused_by_name(tmp_path: Path) -> None:
    """The message names the key, never the value."""
    params = validated(BuildParams, {"profile": TINY, "server": {"environment": {"HF_TOKEN": "hf_topsecret"}}}, "test")
    with pytest.raises(BadParams, match="environment.HF_TOKEN") as caught:
        NotebookRun("01", params, tmp_path, False)
    assert "topsecret" not in str(caught.value)


def test_attach_refuses_a_password_in_the_url(tmp_path: Path) -> None:
    """http://user:password@host would stand in every record."""
    params = validated(BuildParams, {"profile": TINY, "server": {"attach": "http://u:pw123@127.0.0.1:1"}}, "test")
    with pytest.raises((BadParams, BadInput)) as caught:
        NotebookRun("01", params, tmp_path, False)
    assert "pw123" not in str(caught.value)


def test_records_refuse_what_a_reader_could_misread() -> None:
    """No pass without evidence, no missing value without a reason, no unknown outcome, no infinite number."""
    with pytest.raises(ValueError, match="without evidence"):
        Verdict(id="v", claim="c", status=Status.PASS, reason="r")
    with pytest.raises(ValueError, match="reason"):
        Measured(value=None)
    with pytest.raises(ValueError, match="finite"):
        Measured(value=float("nan"))
    with pytest.raises(ValueError, match="outcome"):
        Trial(id="t", what="w", outcome="fine")
    assert Verdict(id="v", claim="c", status=Status.PASS, reason="r", evidence=[Evidence(path="x")])
    assert Measurement(Path("x"), None)  # type: ignore[arg-type]


def test_the_origins_published_tables_are_judged_invalid_with_their_evidence(tmp_path: Path) -> None:
    """The verdict on quoted tables links to the run's own copy of them."""
    params = validated(SpeculativeParams, {"profile": "qwen3.5-397b-nvfp4-rtx6000x8"}, "test")
    run = NotebookRun("04", params, tmp_path, False)
    tables = recorded_arms.published_tables(run)
    verdicts = speculative.verdicts(run, None, None, Analysis(), [], recorded_arms.Recorded(), tables)
    (found,) = [v for v in verdicts if v.id == "published"]
    assert found.status == Status.INVALID
    assert (tmp_path / found.evidence[0].path).is_file()


@pytest.mark.parametrize("lost", [HostUnreachable, HostTimeout])
def test_a_host_that_is_lost_ends_the_run_and_says_nothing_about_the_server(tmp_path: Path, lost: Any) -> None:
    """Also where errors are kept: no stamp is written, so that a resumed run takes it again; what was written stays."""
    run = make_run(tmp_path)

    def cut(server: Any, folder: Path) -> None:
        (folder / "n.json").write_text("1")
        raise lost("an answer", "the network is down")

    with pytest.raises(lost):
        run.measure("m", handle(run, [None]), cut, keep_errors=True)
    assert (run.raw / "m" / "n.json").exists() and not (run.raw / "m" / "stamp.json").exists()
    assert run.measure("m", handle(run, [None, None]), count, value=2).json("n.json") == 2
