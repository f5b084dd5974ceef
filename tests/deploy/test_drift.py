"""What counts as drift: each kind by name, with its evidence; what isn't known is never drift and never the same."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from lib.deploy.drift import Sight, compare, trouble

UNIT = "[Service]\nExecStart=/opt/v/bin/python -m sglang.launch_server\n"
RECORD: dict[str, Any] = {
    "id": "p1", "unit_sha256": hashlib.sha256(UNIT.encode()).hexdigest(), "invocation": "i1", "restarts": "0",
    "plan": {"unit_text": UNIT, "expectation": {"gpu_memory_mib": 1000.0}},
    "proof": {
        "facts": {"version": "0.5.15", "kv_cache_dtype": "bfloat16", "max_total_num_tokens": 1000, "accept_length": 3.0, "retractions": 2,
                  "arguments": {"tp_size": 1, "kv_cache_dtype": "bf16"}},
        "containers": [],
    },
}  # fmt: skip
SEEN = {"pid": 7, "ticks": 1, "uid": 0, "state": "S", "argv": "x", "unit": "web.service"}


def sight(**changes: Any) -> Sight:
    """A service exactly as it was proven, with changes."""
    fields: dict[str, Any] = {
        "unit": "s.service", "unit_text": UNIT, "dropins": [], "needs_reload": False, "active": "active", "invocation": "i1", "restarts": 0,
        "version_running": "0.5.15", "version_on_disk": "0.5.15", "kv_cache_dtype": "bfloat16",
        "arguments": {"tp_size": 1, "kv_cache_dtype": "bf16"}, "max_total_num_tokens": 1000, "accept_length": 2.9, "retractions": 2,
        "health": 200, "port_owned": True, "gpu_mib": 1010.0,
    }  # fmt: skip
    return Sight.model_validate({**fields, **changes})


def drifted(**changes: Any) -> set[str]:
    """Ids of what drifted."""
    return {row.id for row in compare(RECORD, sight(**changes)) if row.status == "drift"}


def test_nothing_changed_is_no_drift() -> None:
    """Every row is the same, none is unknown."""
    assert {row.status for row in compare(RECORD, sight())} == {"same"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"unit_text": UNIT + "Nice=5\n"}, {"unit"}), ({"unit_text": None}, {"unit"}), ({"dropins": ["/etc/x.conf"]}, {"dropins"}),
        ({"needs_reload": True}, {"daemon-reload"}), ({"active": "failed"}, {"running"}), ({"restarts": 1}, {"restarts"}),
        ({"invocation": "i2", "retractions": 0}, {"invocation"}), ({"version_on_disk": "0.5.16"}, {"version-on-disk"}),
        ({"version_running": "0.5.16"}, {"version-running"}), ({"kv_cache_dtype": "float8_e4m3fn"}, {"kv-dtype"}),
        ({"arguments": {"tp_size": 2, "kv_cache_dtype": "bf16"}}, {"flags"}), ({"max_total_num_tokens": 980}, {"pool-tokens"}),
        ({"accept_length": 2.6}, {"accept-length"}), ({"retractions": 3}, {"retractions"}), ({"health": 503}, {"health"}),
        ({"health": None}, {"health"}), ({"port_owned": False, "port_holders": [SEEN]}, {"port-owner"}),
        ({"journal_errors": ["CUDA error"]}, {"journal"}), ({"gpu_strangers": [SEEN]}, {"gpu-holders"}),
        ({"gpu_mib": 1060.0}, {"gpu-memory"}),
        ({"unfinished": "plan p2 at step stop"}, {"rollout"}),
    ],
)  # fmt: skip
def test_each_drift_is_named(changes: dict[str, Any], expected: set[str]) -> None:
    """One change, one name."""
    assert drifted(**changes) == expected


@pytest.mark.parametrize(
    ("changes", "unknown"),
    [
        ({"version_on_disk": None, "reasons": {"version-on-disk": "no such Python"}}, "version-on-disk"),
        ({"kv_cache_dtype": None}, "kv-dtype"), ({"max_total_num_tokens": None}, "pool-tokens"), ({"accept_length": None}, "accept-length"),
        ({"retractions": None}, "retractions"), ({"arguments": {}}, "flags"), ({"port_owned": None}, "port-owner"),
        ({"reasons": {"journal": "rotated"}}, "journal"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_no_drift_and_not_the_same(changes: dict[str, Any], unknown: str) -> None:
    """It is unknown, with its reason."""
    rows = {row.id: row for row in compare(RECORD, sight(**changes))}
    assert rows[unknown].status == "unknown" and not drifted(**changes)
    assert "not known" in rows[unknown].now or unknown in ("journal", "port-owner")


def test_an_edit_shows_the_lines_that_came_and_went() -> None:
    """The reader sees what was edited."""
    row = next(r for r in compare(RECORD, sight(unit_text=UNIT.replace("/opt/v", "/opt/w"))) if r.id == "unit")
    assert "+ExecStart=/opt/w/bin/python" in row.now and "-ExecStart=/opt/v/bin/python" in row.now


def test_trouble_is_what_tells_of_an_error() -> None:
    """Errors, each once; traffic and warnings are none."""
    lines = ["INFO: GET /health 200 OK", "Traceback (most recent call last):", "x", "Traceback (most recent call last):",
             "torch.OutOfMemoryError: CUDA out of memory.", "WARNING: slow", "Decode batch, #running-req: 1"]  # fmt: skip
    assert trouble(lines) == ["Traceback (most recent call last):", "torch.OutOfMemoryError: CUDA out of memory."]
