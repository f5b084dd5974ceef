"""The forms of asking for NEXTN, against recorded launches and the releases' rules."""

from __future__ import annotations

import pytest

from lib.params import ROOT
from lib.server.flags import nextn
from lib.server.log import read_log
from lib.server.nextn_forms import FORMS, HYBRID, Form, fate, form_rows, memory_rows

RECORDED = ROOT / "tests/recorded/h200-sglang-0.5.16"
BY_ID = {f.id: f for f in FORMS}


@pytest.mark.parametrize("form", [f for f in FORMS if f.recorded], ids=lambda f: f.id)
def test_what_is_said_of_0_5_16_is_what_was_recorded(form: Form) -> None:
    """The recorded launch became ready, or failed, as the rules of its release say without a launch."""
    assert fate(form.flags, form.environment, "0.5.16").outcome == form.recorded
    with (RECORDED / f"{form.log}.log").open("rb") as lines:
        log = read_log(lines)
    assert (log.ready is not None) == (form.recorded == "starts")


@pytest.mark.parametrize(
    ("form", "version", "outcome", "words"),
    [
        ("origin-topk", "0.5.10.post1", "crashes", "draft tree"),
        ("origin-topk", "0.5.11", "starts", ""),
        ("origin-no-strategy", "0.5.10.post1", "crashes", "extra_buffer"),
        ("origin-no-strategy", "0.5.11", "crashes", "extra_buffer"),
        ("origin-no-strategy", "0.5.16", "starts", ""),
        ("origin-extra-buffer", "0.5.10.post1", "starts", ""),
        ("origin-extra-buffer", "0.5.23", "crashes", "--mamba-radix-cache-strategy"),
        ("lazy", "0.5.11", "crashes", ""),
        ("lazy", "0.5.23", "starts", ""),
        ("variable-alone", "0.5.10.post1", "starts_without", "does not speculate"),
        ("variable-alone", "0.5.23", "starts_without", "does not speculate"),
    ],
)
def test_forms_by_release(form: str, version: str, outcome: str, words: str) -> None:
    """The origin's failures are refused where it met them and not where the rule is gone; a variable alone never speculates."""
    found = fate(BY_ID[form].flags, BY_ID[form].environment, version)
    assert found.outcome == outcome and words in found.reason


@pytest.mark.parametrize(
    "version", ["0.5.10.post1", "0.5.11", "0.5.13.post1", "0.5.14", "0.5.16", "0.5.18", "0.5.20", "0.5.23"]
)
def test_the_incantation_of_each_release_is_not_refused(version: str) -> None:
    """What the table says turns NEXTN on passes that release's rules, on hybrid models and others."""
    for hybrid in (True, False):
        flags, environment, _ = nextn(version, hybrid=hybrid)
        model = HYBRID if hybrid else HYBRID.model_copy(update={"hybrid": False})
        assert fate(flags, environment, version, model=model).outcome == "starts"


def test_every_form_is_judged_for_every_release() -> None:
    """A row each, with a reason, and the origin's three are marked (the third is no form: memory)."""
    rows = form_rows("0.5.16")
    assert len(rows) == len(FORMS) and all(r["because"] for r in rows)
    assert sum("origin" in f.id for f in FORMS) == 3


def test_memory_that_somebody_holds_is_said_before_the_launch() -> None:
    """83 GB held on a GPU by the old server; a host with less memory than the checkpoint; nothing to say otherwise."""
    rows = memory_rows({"GPU-1": 85000.0}, {"GPU-1": {"4711": 84000}}, 10 * 2**30, 233 * 2**30)
    assert len(rows) == 2 and "4711" in rows[0]["means"] and "233.0 GiB" in rows[1]["value"]
    assert memory_rows({"GPU-1": 4.0}, {}, 300 * 2**30, 233 * 2**30) == [] and memory_rows({}, {}, None, None) == []
