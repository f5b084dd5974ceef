"""A whole sweep against the stand-in for SGLang: every outcome by a process that really behaves so, and what it leaves."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from lib.errors import BadParams, Busy, NotMeasured, NotStopped
from lib.hosts import local
from lib.load import bench_rows, metrics
from lib.params import SweepParams
from lib.records import OUTCOMES
from lib.report import figures, tables
from lib.results import NotebookRun
from lib.server import holders, sweep, watching
from lib.server.answers import Answer, read_answer
from lib.server.grid import Planned
from tests.server.sweeping import Place, any_client, candidate, no_calibration, outcomes_of

#: What the stand-in does -> what it must be called.
EXPECTED = {
    "ref": "works",
    "triton": "works",
    "same": "silently_ignored",
    "flashinfer": "unsupported_here",
    "off": "numerically_off",
    "nan": "garbage",
    "decode": "garbage",
    "race": "garbage_under_load",
    "race-short": "garbage_under_load",
    "race-decode": "garbage_under_load",
    "refuses-long": "crashes",
    "dies-load": "crashes",
    "refuses-load": "crashes",
    "no-amx": "silently_ignored",
    # these take until their deadline, side by side
    "silent-load": "hangs",
    "compiles-load": "not_enough_data",
    "hangs": "hangs",
    "compiles": "not_enough_data",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """One sweep with all of them; patient where the machine is busy, except for those that must be found silent."""
    special = {
        "triton": candidate(""),
        "same": candidate(
            "",
            "other",
        )
        | {"id": "same"},
        "flashinfer": candidate("", "flashinfer"),
    }
    made = [special.get(name) or candidate(name) for name in EXPECTED if name != "ref"]
    made = [{**one, **SILENT.get(one["id"], {})} for one in made]
    return Place(tmp_path_factory.mktemp("sweep"), made, answer_timeout_s=10.0)


#: Silence after which the wait for these ends: long enough that a busy machine has written their lines before.
SILENT = {"hangs": {"quiet_timeout_s": 8.0}, "compiles": {"quiet_timeout_s": 8.0, "compile_timeout_s": 10.0}}
LANES = 5


@pytest.fixture(scope="module")
def swept(place: Place, tmp_path_factory: pytest.TempPathFactory) -> sweep.Sweep:
    """Side by side, as on a host with several GPUs (which these servers don't need): they mostly wait."""
    lanes = [{"uuid": f"LANE-{i}", "index": str(i)} for i in range(LANES)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBOOK_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(holders, "look", lambda *_: ([], lanes, "lanes of a test"))
        any_client(patch)
        return place.sweep()


@pytest.mark.parametrize("name", EXPECTED)
def test_each_behaviour_gets_its_outcome(swept: sweep.Sweep, name: str) -> None:
    """From what the process did, not from what it was called."""
    assert outcomes_of(swept)[name] == EXPECTED[name], swept


def trial(swept: sweep.Sweep, name: str) -> Any:
    return next(t for t in sweep.outcome_rows(swept) if t.id == name)


def test_reasons_say_what_was_seen(swept: sweep.Sweep) -> None:
    """Numbers, phases and words of each failure, not its name again."""
    words = {
        "off": "0.2", "nan": "NaN", "decode": "its own prefill", "race": "right alone", "race-short": "worst piece",
        "silent-load": "0.0 CPU cores in use", "compiles-load": "still compiling", "dies-load": "illegal memory access",
        "refuses-load": "500", "refuses-long": "1 of 4 pieces failed",
        "race-decode": "from its own prefill at rest", "hangs": "loading weights", "compiles": "announces a compilation",
        "no-amx": "torch_native runs; /server_info still says triton",
        "same": "attention_backend=other (/server_info repeats other) had no effect",
        "flashinfer": "exit code 1",
    }  # fmt: skip
    for name, text in words.items():
        assert text in (trial(swept, name).reason or ""), (name, trial(swept, name).reason)


def test_every_failure_quotes_a_line_that_is_in_the_log(swept: sweep.Sweep, place: Place) -> None:
    """Line and text as an editor shows them; what the gate found points to its raw file."""
    for one in sweep.outcome_rows(swept):
        assert one.evidence and one.launch_ids
        for evidence in one.evidence:
            file = place.folder / evidence.path
            assert file.exists(), evidence
            if evidence.quote:
                assert evidence.quote.strip() in file.read_text().split("\n")[(evidence.line or 0) - 1]
    assert "fallback" in (trial(swept, "no-amx").evidence[0].quote or "")
    assert [e.path.split("/raw/02/")[-1].removeprefix("raw/02/") for e in trial(swept, "same").evidence[:2]] == [
        "same/scores/scores.json", "ref/scores/scores.json",
    ]  # fmt: skip
    assert trial(swept, "nan").evidence[0].path.endswith("nan/scores/scores.json")
    assert trial(swept, "decode").evidence[0].path.endswith("decode/decode/decode.json")
    assert "illegal memory access" in (trial(swept, "dies-load").evidence[0].quote or "")
    assert trial(swept, "race").evidence[0].path.endswith("race/load/load.json")
    assert trial(swept, "hangs").evidence[1].path.endswith("watch.jsonl")


def test_every_server_is_gone(swept: sweep.Sweep, place: Place) -> None:
    """Each with its proof; no process of any launch is left."""
    records = place.launches()
    assert len(records) == len(EXPECTED) and all(r["stop"] and not r["stop"]["processes_left"] for r in records)
    for record in records:
        assert local.processes_with("WORKBOOK_LAUNCH_ID", record["launch_id"]) == []
    verdict = next(v for v in sweep.verdicts(place.open(offline=True), swept) if v.id == "gone")
    assert verdict.status == "pass" and f"{len(records)} of {len(records)}" in verdict.reason


def test_a_second_session_launches_nothing_and_says_the_same(swept: sweep.Sweep, place: Place) -> None:
    """What is done is done; and without any server the raw files give the same records again."""
    before = len(place.launches())
    again, offline = place.sweep(), place.sweep(offline=True)
    assert len(place.launches()) == before
    assert [t.trial for t in again.tried] == [t.trial for t in swept.tried] == [t.trial for t in offline.tried]
    assert again.choice == swept.choice == offline.choice


def test_predictions_stay_where_they_were_wrong(swept: sweep.Sweep, place: Place) -> None:
    """This version's rule says that triton has no CPU driver; the stand-in serves with it: both are shown."""
    made = {p.id: p for p in sweep.predictions(place.open(offline=True), swept)}
    assert made["expected-triton"].predicted.value == "unsupported here"
    assert made["expected-triton"].measured and made["expected-triton"].measured.value == "works"
    assert "expected-ref" not in made


def test_what_a_reader_sees_can_be_made_of_it(swept: sweep.Sweep, place: Place) -> None:
    """Tables, picture, verdicts and recommendation; each failing trial is in the picture's words."""
    run = place.open(offline=True)
    for rows in (
        sweep.expected_rows(run), sweep.host_rows(run), sweep.honoured_rows(run, swept),
        sweep.agreement_rows(run, swept), sweep.choice_rows(swept),
    ):  # fmt: skip
        assert rows and tables.table(rows)._repr_html_()
    html = tables.trial_table(sweep.outcome_rows(swept), sweep.COLUMNS)._repr_html_()
    assert "silently ignored" in html and "garbage under load" in html
    alt = figures.figure_alt(figures.speed_fidelity(sweep.figure_rows(swept), 0.05, title="x"))
    assert all(name in alt for name in EXPECTED)
    made = {v.id: v for v in sweep.verdicts(run, swept)}
    assert {name: made[name].status for name in EXPECTED} == {n: OUTCOMES[o] for n, o in EXPECTED.items()}
    assert "Go on with ref" in sweep.recommendation(swept) and "no-amx" in sweep.recommendation(swept)


def test_phases_of_each_start_are_kept(swept: sweep.Sweep) -> None:
    """The one that hangs got as far as loading weights."""
    assert ("hangs", "loading weights") in {(r["launch"], r["phase"]) for r in sweep.phase_rows(swept)}


def test_a_sample_sees_compilers_below_the_server(tmp_path: Path) -> None:
    """A process named like a compiler below the server's, CPU seconds of the whole tree, the log's size and last line."""
    shutil.copy("/bin/sleep", tmp_path / "ptxas")
    (tmp_path / "server.log").write_text("first\n 50%|##   | 1/2\rCompiling kernel\n\n")
    child = subprocess.Popen([tmp_path / "ptxas", "60"])
    try:
        record = types.SimpleNamespace(pid=os.getpid())
        seen = watching._sample(types.SimpleNamespace(record=record, folder=tmp_path), 3.0)  # type: ignore[arg-type]
    finally:
        child.kill()
        child.wait()
    assert seen.compilers == ["ptxas"] and seen.cpu_s > 0 and seen.t_s == 3.0
    assert seen.last_line == "Compiling kernel" and seen.log_bytes == (tmp_path / "server.log").stat().st_size


# --- cheap first ----------------------------------------------------------------------------------------------------------
def test_what_the_version_refuses_is_not_launched_unless_asked(tmp_path: Path) -> None:
    """`verify: none`: predicted with its source and skipped, which is no verdict; by id it is launched after all."""
    place = Place(tmp_path, [candidate(""), candidate("", "flashinfer")], verify=["flashinfer"])
    done = place.sweep()
    assert outcomes_of(done) == {"ref": "works", "triton": "skipped", "flashinfer": "unsupported_here"}
    skipped = trial(done, "triton")
    assert "predicted unsupported here, exit -9" in (skipped.reason or "") and skipped.launch_ids == []
    assert {r["name"] for r in place.launches()} == {"ref", "flashinfer"}
    run = place.open(offline=True)
    assert {r["trial"]: r["launched"] for r in sweep.expected_rows(run)} == {
        "ref": "yes", "triton": "no", "flashinfer": "yes, to verify",
    }  # fmt: skip
    made = {p.id: p for p in sweep.predictions(run, done)}
    assert made["expected-triton"].measured and made["expected-triton"].measured.value is None
    assert OUTCOMES["skipped"] == "inconclusive"


def test_all_trials_share_one_cache_and_the_time_left_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `kernel_cache` every launch gets the same folders, whose files are counted; from the second trial on the
    progress line holds which of how many, and about how long it takes."""
    said: list[str] = []
    monkeypatch.setattr(NotebookRun, "say", lambda self, text: said.append(f"{self.saying}{text}"))
    place = Place(tmp_path, [candidate("", "flashinfer")], kernel_cache=str(tmp_path / "kernels"))
    (tmp_path / "kernels/triton").mkdir(parents=True)
    (tmp_path / "kernels/triton/k.cubin").write_text("x")
    place.sweep()
    for record in place.launches():
        assert record["environment"]["TRITON_CACHE_DIR"] == str(tmp_path / "kernels/triton")
    assert place.finished("ref")["kernels_before"] == place.finished("flashinfer")["kernels_after"] == 1
    assert any(line.startswith("trial 1/2: ref: ") for line in said)
    assert any(re.match(r"trial 2/2, about \d+ s left: flashinfer: ", line) for line in said)


def test_a_reference_that_fails_leaves_the_others_undecided(tmp_path: Path) -> None:
    """Nothing to compare with: not enough data, and nothing is recommended."""
    place = Place(tmp_path, [candidate("")])
    place.params["candidates"][0] = {**place.params["candidates"][0], "environment": {"SGLANG_STANDIN": "wrong"}}
    done = place.sweep()
    assert outcomes_of(done) == {"ref": "garbage", "triton": "not_enough_data"}
    assert "the reference is not sound (garbage)" in (trial(done, "triton").reason or "")
    assert done.choice.id is None and sweep.recommendation(done).startswith("No trial works")


@pytest.mark.parametrize(
    ("text", "its", "name", "convicted"),
    [
        ("!" * 12, " fine", "t", True),  # the reference talks, this one doesn't
        ("!" * 12, "?" * 12, "t", False),  # a toy: both do
        ("!" * 12, "!" * 12, "ref", False),
        ("", "", "ref", True),
    ],
)
def test_signs_where_nothing_is_expected(tmp_path: Path, text: str, its: str, name: str, convicted: bool) -> None:
    """A model of which nothing is expected may repeat itself: only what the reference doesn't do counts."""

    def answer(said: str) -> Answer:
        return read_answer({"text": said, "meta_info": {}}, None)

    run = types.SimpleNamespace(params=SweepParams(reference="ref"), raw=tmp_path)
    found, _ = sweep._garbage(answer(text), answer(its), Planned(id=name), run)  # type: ignore[arg-type]
    assert (found is not None) == convicted


def test_a_speed_that_is_the_clients_own_is_withheld(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that lagged: no speed, invalid; the comparison with the reference stands. Without that: speeds, and a choice."""
    monkeypatch.setattr(sweep, "take_calibration", no_calibration)
    any_client(monkeypatch)
    place = Place(tmp_path, [candidate("")], speed_repeats=2, speed_concurrency=2, speed_output_len=4)
    done = place.sweep()
    assert outcomes_of(done) == {"ref": "works", "triton": "works"} and "tok/s" in done.choice.why
    assert all(t.speed.value and t.speed.n == 2 for t in done.tried)
    late = metrics.ClientVerdict("client_bound", ("client lag p99 9 ms, limit 2 ms",))
    monkeypatch.setattr(metrics, "client_verdict", lambda _: late)
    bench_rows._read.cache_clear()  # levels keep their summary
    bound = place.sweep(offline=True)
    assert outcomes_of(bound) == {"ref": "client_bound", "triton": "client_bound"}
    assert all(t.speed.value is None and "client lag p99 9 ms" in (t.speed.reason or "") for t in bound.tried)
    assert OUTCOMES["client_bound"] == "invalid" and bound.choice.id == "ref" and "no speed" in bound.choice.why


def test_a_rebuild_without_the_raw_files_says_what_is_missing(tmp_path: Path) -> None:
    """Offline nothing is launched."""
    with pytest.raises(NotMeasured):
        Place(tmp_path, []).sweep(offline=True)
    with pytest.raises(BadParams):
        sweep.planned(Place(tmp_path / "b", [], reference="nobody").open())


# --- side by side, on a host with two GPUs as nvidia-smi would show them -----------------------------------------------
def fake_gpus(
    monkeypatch: pytest.MonkeyPatch, users: dict[str, dict[int, int]] | None = None, used: float = 3.0
) -> None:
    row = {"name": "FAKE", "memory_total_mib": 1000.0, "driver_version": "1", "compute_cap": "9.0"}
    rows = [{**row, "index": str(i), "uuid": f"GPU-{i}", "memory_used_mib": used} for i in range(2)]
    monkeypatch.setattr(local, "gpus", lambda: (rows, None))
    monkeypatch.setattr(local, "gpu_users", lambda: (users or {}, None))


def test_trials_that_need_one_gpu_run_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs: pairs start at the same time, each with a GPU of its own; a resumed sweep repeats none of them."""
    fake_gpus(monkeypatch)
    place = Place(tmp_path, [candidate("", "other") | {"id": n} for n in ("a",)] + [candidate("off", "triton")])
    place.profile_yaml["server"]["flags"] = {}
    done = place.sweep()
    assert outcomes_of(done) == {"ref": "works", "a": "silently_ignored", "off": "numerically_off"}
    ref, a, off = (place.launches(name)[0] for name in ("ref", "a", "off"))
    assert {ref["environment"]["CUDA_VISIBLE_DEVICES"], a["environment"]["CUDA_VISIBLE_DEVICES"]} == {"GPU-0", "GPU-1"}
    assert abs(ref["started_at"] - a["started_at"]) < 1.5  # both before either was ready and questioned
    assert off["started_at"] > max(ref["started_at"], a["started_at"]) + 1
    assert place.finished("ref")["neighbours"] == ["a"]
    place.sweep()
    assert len(place.launches()) == 3


def test_an_interrupt_ends_all_that_start_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while one trial hangs and another is questioned: both servers are ended at once, not at their deadlines."""
    fake_gpus(monkeypatch)
    place = Place(tmp_path, [candidate("hangs")], quiet_timeout_s=60.0)
    place.profile_yaml["server"]["flags"] = {}
    question = sweep._launch_and_question

    def ctrl_c(run: Any, params: Any, planned: Any, handle: Any) -> Any:
        if planned.id == "ref":
            while not place.launches("hangs"):
                time.sleep(0.05)
            raise KeyboardInterrupt
        return question(run, params, planned, handle)

    monkeypatch.setattr(sweep, "_launch_and_question", ctrl_c)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        place.sweep()
    assert time.monotonic() - began < 25
    (record,) = place.launches()
    assert record["state"] == "interrupted" and local.processes_with("WORKBOOK_LAUNCH_ID", record["launch_id"]) == []
    assert not (place.folder / "raw/02/hangs/finished.json").exists()


def test_a_server_that_cannot_be_ended_keeps_no_other_alive() -> None:
    """The first stop fails; the second is still made; the failure is raised."""
    stopped = []

    def refuses() -> None:
        raise NotStopped("launch L1 is gone", "pids left: [7]")

    handles = [types.SimpleNamespace(stop=refuses), types.SimpleNamespace(stop=lambda: stopped.append("second"))]
    with pytest.raises(NotStopped, match=r"\[7\]"):
        sweep._stop_all(handles)  # type: ignore[arg-type]
    assert stopped == ["second"]


def test_an_attached_server_is_not_swept(tmp_path: Path) -> None:
    """It is somebody's: nothing is launched, nothing claimed, and the notebook goes on to its end."""
    place = Place(tmp_path, [])
    place.profile_yaml["server"] = {"attach": "http://127.0.0.1:1"}
    run = place.open()
    done = sweep.run_sweep(run)
    assert done.tried == [] and run.skipped and sweep.recommendation(done) == "No trial was launched here."
    assert [v.status for v in sweep.verdicts(run, done)] == ["inconclusive"]
    assert sweep.expected_rows(run) == sweep.host_rows(run) == sweep.predictions(run, done) == []
    assert figures.figure_alt(figures.speed_fidelity(sweep.figure_rows(done), 0.05))


# --- nobody's server is in the way ----------------------------------------------------------------------------------------
SLEEPER = "import time, subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(90)']); time.sleep(90)"


def test_a_sweep_refuses_while_a_gpu_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names GPU, pid, command and identity, launches nothing, and touches nobody."""
    other = subprocess.Popen([sys.executable, "-c", SLEEPER])
    try:
        fake_gpus(monkeypatch, {"GPU-1": {other.pid: 612}})
        place = Place(tmp_path, [])
        assert not any(
            "GPU" in r["what"] and r["identity"] for r in sweep.host_rows(place.open())
        )  # it runs on the CPU
        place.profile_yaml["server"]["flags"] = {}
        rows = sweep.host_rows(place.open())
        assert any(str(other.pid) in r["held by"] and r["identity"] for r in rows if "GPU 1" in r["what"])
        with pytest.raises(Busy, match=rf"GPU 1 .*pid {other.pid}.*612 MiB \[{other.pid}:"):
            place.sweep()
        assert place.launches() == [] and other.poll() is None
        place.params["gpus"] = [0]  # only this one may be used, and it is free
        assert outcomes_of(place.sweep()) == {"ref": "works"}
    finally:
        for one in local.descendants(other.pid):
            one.kill()
        other.wait()


def test_memory_that_nobody_visible_holds_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container the holder may not be listed: the memory is."""
    fake_gpus(monkeypatch, used=83000.0)
    place = Place(tmp_path, [])
    place.profile_yaml["server"]["flags"] = {}
    with pytest.raises(Busy, match="not visible from here"):
        place.sweep()
    monkeypatch.setattr(holders.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(local, "gpus", lambda: ([], "nvidia-smi did not answer"))
    with pytest.raises(Busy, match="unknown, because nvidia-smi did not answer"):
        place.sweep()  # who can't look can't say that nobody is there


@pytest.mark.parametrize(("listed", "seen"), [("1", ["1"]), ("GPU-0", ["0"]), ("", []), ("0,1", ["0", "1"]), ("7", [])])
def test_only_visible_gpus_are_used(monkeypatch: pytest.MonkeyPatch, listed: str, seen: list[str]) -> None:
    """CUDA_VISIBLE_DEVICES of the caller is a limit: its indices or uuids, never more."""
    fake_gpus(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert [row["index"] for row in holders.look(None, None, False)[1]] == seen


def test_exactly_the_named_process_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """may_stop names pid and start: that process and what it started end; the same pid with another start is refused."""
    other = subprocess.Popen([sys.executable, "-c", SLEEPER])
    bystander = subprocess.Popen([sys.executable, "-c", SLEEPER])
    try:
        mine = local.process_id(other.pid)
        assert mine
        one = holders.Holder(what="GPU 0 (x)", by="it", identity=local.owner_token(mine), mib=9.0)

        def held() -> list[holders.Holder]:
            return [one] if mine.alive() else []

        stranger = f"{mine.pid}:{mine.start_time - 50!r}:{(mine.ticks or 0) - 5000}"
        with pytest.raises(Busy):
            holders.free_the_way(held, [stranger], lambda _: None)
        assert other.poll() is None
        end = time.monotonic() + 20
        while len(local.descendants(other.pid)) < 2 and time.monotonic() < end:  # until its child is there
            time.sleep(0.1)
        family = local.descendants(other.pid)
        first, done = holders.free_the_way(held, [local.owner_token(mine)], lambda _: None)
        assert len(first) == 1 and "SIGTERM" in done[0]
        assert not any(p.alive() for p in family) and bystander.poll() is None
    finally:
        for process in (other, bystander):
            for one in local.descendants(process.pid):
                one.kill()
            process.wait()


def test_a_held_port_is_named(tmp_path: Path) -> None:
    """An old server on the port would answer in the new one's place."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        place = Place(tmp_path, [])
        place.profile_yaml["server"]["port"] = port
        with pytest.raises(Busy, match=f"port {port}: pid"):
            place.sweep()
    assert place.launches() == []
    looked = [json.loads(f.read_text()) for f in (place.folder / "raw/02/holders").glob("*.json")]
    assert looked and looked[0]["held"][0]["what"] == f"port {port}"
