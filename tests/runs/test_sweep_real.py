"""The sweep against a real SGLang on the CPU: each outcome that such a host can show, and an interrupt inside a start.

What `intel_amx` says in its log and how triton and flashinfer fail is tested with the whole notebook (test_chain.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from lib.params import load_profile
from lib.server import holders, sweep, watching
from lib.server import launch as launching
from lib.server.spec import resolve_model, resolve_python
from tests.conftest import TINY
from tests.server.sweeping import Place, any_client, interrupted, outcomes_of
from tests.server.wrappers import HANGS, HIDES, RACES, damaged, misfit, wrapper

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

EXPECTED = {
    "torch_native": "works",
    "intel_amx, its line hidden": "silently_ignored",
    "crashes at arguments": "crashes",
    "crashes at start": "crashes",
    "hangs": "hangs",
    "damaged": "garbage",
    "wrong under load": "garbage_under_load",
}
IDS = {name: name.replace(", ", "-").replace(" ", "_") for name in EXPECTED}


@pytest.fixture(scope="module")
def place(tiny_spec_module: launching.ServerSpec, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A sweep of seven, with the tests' own wrappers and damaged checkpoints."""
    folder = tmp_path_factory.mktemp("real-sweep")
    profile = load_profile(TINY)
    python, model = str(resolve_python(profile.server.python)), resolve_model(profile.server.model or "")
    trials: dict[str, dict[str, Any]] = {
        "torch_native": {},
        "intel_amx, its line hidden": {
            "flags": {"attention_backend": "intel_amx"}, "python": wrapper(folder, "hides", HIDES, python),
        },
        "crashes at arguments": {"flags": {"attention_backend": "nonsense"}},
        "crashes at start": {"model": str(misfit(model, folder / "misfit"))},
        "hangs": {"python": wrapper(folder, "hangs", HANGS, python), "quiet_timeout_s": 6.0},
        "damaged": {"model": str(damaged(model, folder / "damaged", "model.norm.weight", 50.0))},
        "wrong under load": {"python": wrapper(folder, "races", RACES, python)},
    }  # fmt: skip
    made = Place(folder, [], load_concurrency=4, answer_timeout_s=60.0)
    made.profile_yaml = {
        "title": "a real SGLang", "server": profile.server.model_dump(exclude_none=True),
        "known_answer": {"expect": None, "max_new_tokens": 8},
    }  # fmt: skip
    made.params["candidates"] = [{"id": IDS[name], **trial} for name, trial in trials.items()]
    made.params["reference"] = "torch_native"
    return made


@pytest.fixture(scope="module")
def tiny_spec_module(tmp_path_factory: pytest.TempPathFactory) -> launching.ServerSpec:
    """Skips where no real server can be started."""
    import os

    from lib.server.spec import server_spec
    from tests.conftest import missing_server

    if os.environ.get("CI") is None and (reason := missing_server()):
        pytest.skip(reason)
    return server_spec("probe", load_profile(TINY).server)


#: Two trials at a time, as on a host with two GPUs: a start of SGLang keeps one core busy.
LANES = [{"uuid": f"LANE-{i}", "index": str(i)} for i in range(2)]


@pytest.fixture(scope="module")
def swept(place: Place) -> sweep.Sweep:
    """Two sessions: the first is interrupted while the last trial starts, the second finishes."""
    seen = watching.Watch.__call__

    def ctrl_c(self: watching.Watch, server: launching.Server, elapsed_s: float) -> str | None:
        if "hidden" in server.record.name and elapsed_s > 2:
            raise KeyboardInterrupt
        return seen(self, server, elapsed_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holders, "look", lambda *_: ([], LANES, "lanes of a test"))
        any_client(patch)
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(watching.Watch, "__call__", ctrl_c)
            assert interrupted(place.sweep)
        (hidden,) = place.launches(IDS["intel_amx, its line hidden"])
        assert hidden["state"] == "interrupted" and len(place.launches()) == len(EXPECTED)
        return place.sweep()


@pytest.mark.parametrize("name", EXPECTED)
def test_outcome(swept: sweep.Sweep, name: str) -> None:
    """From what a real server did."""
    assert outcomes_of(swept)[IDS[name]] == EXPECTED[name], [(t.id, t.reason) for t in sweep.outcome_rows(swept)]


def test_reasons(swept: sweep.Sweep) -> None:
    """Bits convict where the line is hidden; a crash has its phase; the hang and the load their numbers."""
    reasons = {t.id: t.reason or "" for t in sweep.outcome_rows(swept)}
    assert "bit-identical to torch_native" in reasons[IDS["intel_amx, its line hidden"]]
    assert "exit code 2" in reasons[IDS["crashes at arguments"]] and "arguments" in reasons[IDS["crashes at arguments"]]
    assert "while loading weights: tensor sizes" in reasons[IDS["crashes at start"]]
    assert "no line for" in reasons["hangs"] and "0.0 CPU cores" in reasons["hangs"]
    assert "nat/token" in reasons["damaged"]
    assert "right alone" in reasons[IDS["wrong under load"]]


def test_no_trial_is_lost_and_none_runs_twice(swept: sweep.Sweep, place: Place) -> None:
    """The interrupted one has two launches, every other one; all are gone, with the proof."""
    names = [r["name"] for r in place.launches()]
    hidden = IDS["intel_amx, its line hidden"]
    assert {n: names.count(n) for n in IDS.values()} == {n: 2 if n == hidden else 1 for n in IDS.values()}
    assert all(r["stop"] and not r["stop"]["processes_left"] and r["stop"]["port_free"] for r in place.launches())
    assert swept.choice.id == "torch_native"
