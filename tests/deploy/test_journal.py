"""A journal says how often the service restarted, how it ended, and whether the unit's settings reached the process."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.deploy.unit import parse_unit, read_journal, split_bundle
from lib.errors import UnreadableFile


def short(*messages: str, name: str = "systemd", pid: int = 1) -> str:
    """Lines of journalctl's default output."""
    return "".join(f"May  6 09:15:{i % 60:02d} gpu1 {name}[{pid}]: {text}\n" for i, text in enumerate(messages))


def cycle(number: int) -> str:
    """One failing start of a service as systemd 252 logs it."""
    return (
        short("Started sglang.service - SGLang.")
        + short("RuntimeError: CUDA out of memory", name="python", pid=1000 + number)
        + short(
            "sglang.service: Main process exited, code=exited, status=1/FAILURE",
            "sglang.service: Failed with result 'exit-code'.",
            f"sglang.service: Scheduled restart job, restart counter is at {number}.",
        )
    )


def ids(text: str) -> set[str]:
    """The kinds of findings about a journal."""
    return {finding.id for finding in read_journal(text).findings}


@pytest.mark.parametrize("count", [1, 4, 5, 37])
def test_restarts_are_counted(count: int) -> None:
    """The counter of the journal is the number of restarts; from 5 on it is a storm."""
    report = read_journal("".join(cycle(i) for i in range(1, count + 1)))
    assert report.restarts_about == count
    assert report.class_ == ("restart_storm" if count >= 5 else "crash")
    assert len(report.invocations) == count
    assert [item.pid for item in report.invocations] == [1000 + i for i in range(1, count + 1)]
    assert report.exit_code == 1 and report.result == "exit-code"
    assert report.cause == "RuntimeError: CUDA out of memory"


def test_a_tripped_limit_is_not_a_storm() -> None:
    """When systemd gave up, the class says so."""
    text = "".join(cycle(i) for i in range(1, 6)) + short("sglang.service: Start request repeated too quickly.")
    assert read_journal(text).class_ == "start_limit_hit"
    assert "start_limit_hit" in ids(text)


# other numbers than any recorded case: 12.5 of 80 GiB free, 0.9 of it asked
@pytest.mark.parametrize(("times", "policy", "class_"), [(12, "always", "restart_storm"), (3, "on-failure:3", "crash")])
def test_a_container_supervisors_prose(times: int, policy: str, class_: str) -> None:
    """A note that a line was repeated counts as restarts; the failed memory check gives its four numbers."""
    text = (
        "ValueError: Free memory on device cuda:1 (12.5/80.0 GiB) on startup is less than desired GPU memory"
        " utilization (0.9, 72.0 GiB).\n"
        f"(repeated about {times} times under restart: {policy})\n"
    )
    report = read_journal(text)
    assert (report.class_, report.restarts_about, report.restart_policy) == (class_, times, policy)
    assert report.failing_check == "12.5 of 80 GiB free < 0.9 target (72)"
    assert (report.memory_free_gib, report.memory_total_gib) == (12.5, 80.0)
    assert (report.memory_target_frac, report.memory_target_gib) == (0.9, 72.0)


@pytest.mark.parametrize(
    ("message", "class_", "id_"),
    [
        ("x.service: Failed at step EXEC spawning /opt/x: No such file or directory", "exec_failed", "exec_failed"),
        ("x.service: A process of this unit has been killed by the OOM killer.", "oom_killed", "oom_killed"),
        ("x.service: start operation timed out. Terminating.", "start_timeout", "start_timeout"),
        ("x.service: State 'stop-sigterm' timed out. Killing.", "stop_timeout", "stop_timeout"),
        ("x.service: Killing process 77 (python) with signal SIGKILL.", "no_failure_seen", "stop_timeout"),
        ("x.service: Main process exited, code=killed, status=9/KILL", "crash", ""),
        ("x.service: Deactivated successfully.", "clean_stop", ""),
        ("Started x.service - X.", "no_failure_seen", ""),
        (
            "x.service: Found left-over process 77 (python) in control group while starting unit. Ignoring.",
            "no_failure_seen",
            "left_over_processes",
        ),
        (
            "x.service: Unit process 77 (python) remains running after unit stopped.",
            "no_failure_seen",
            "left_over_processes",
        ),
        (
            "/etc/systemd/system/x.service:8: Unknown key 'StartLimitIntervalSec' in section [Service], ignoring.",
            "no_failure_seen",
            "key_ignored",
        ),
        (
            "/etc/x.service:8: Unknown key name 'StartLimitIntervalSec' in section 'Service', ignoring.",
            "no_failure_seen",
            "key_ignored",
        ),
        (
            "Warning: The unit file of x.service changed on disk. Run 'systemctl daemon-reload'.",
            "no_failure_seen",
            "reload_needed",
        ),
    ],
)
@pytest.mark.parametrize("form", ["short", "cat", "json"])
def test_systemds_own_lines(message: str, class_: str, id_: str, form: str) -> None:
    """Each of systemd's messages is understood in each output form."""
    text = {
        "short": short(message),
        "cat": message,
        "json": json.dumps(
            {"MESSAGE": message, "INVOCATION_ID": "a" * 32, "SYSLOG_IDENTIFIER": "systemd", "_PID": "1"}
        ),
    }[form]
    report = read_journal(text)
    assert report.class_ == class_
    assert not id_ or id_ in ids(text)
    assert report.format == form
    if "77" in message and "left" in id_:
        assert report.left_over_pids == (77,)
    if "status=9" in message:
        assert report.exit_signal == "SIGKILL"


def test_invocations_are_told_apart_by_id() -> None:
    """The last invocation is the current one; an earlier one's lines are named as such, also when they come mixed."""
    rows = [("old", "start"), ("new", "start"), ("old", "late"), ("new", "ready")]
    text = "\n".join(json.dumps({"MESSAGE": m, "_SYSTEMD_INVOCATION_ID": i, "_PID": "5"}) for i, m in rows)
    report = read_journal(text)
    assert [(item.id, item.lines) for item in report.invocations] == [("old", 2), ("new", 2)]
    assert report.current_invocation == "new"
    assert "several_invocations" in ids(text)


UNIT = """\
[Service]
ExecStart=/opt/x/python -m sglang.launch_server --kv-cache-dtype bf16 --port 31000 --api-key k3y-of-ours
Environment="MODE=slow"
"""


@pytest.mark.parametrize(("shown", "applied"), [("fast", True), ("slow", False), ("", False)])
def test_a_drop_in_that_did_not_arrive(shown: str, applied: bool) -> None:
    """The variable that a drop-in sets is compared with what the process printed; an empty value is a value."""
    unit = parse_unit(UNIT, [("override.conf", '[Service]\nEnvironment="MODE=fast"\n')])
    report = read_journal(f'srv[7]: INFO config env="map[A: MODE:{shown} B:1]"', unit)
    assert report.dropin_applied is applied
    assert report.class_ == ("no_failure_seen" if applied else "dropin_not_applied")
    assert [item.seen for item in report.settings] == [(shown,)]


def test_later_lines_decide() -> None:
    """After a restart the last printed value counts."""
    unit = parse_unit(UNIT, [("override.conf", '[Service]\nEnvironment="MODE=fast"\n')])
    report = read_journal("srv[7]: MODE=\nsrv[9]: MODE=fast\n", unit)
    assert report.settings[0].seen == ("", "fast") and report.dropin_applied is True


@pytest.mark.parametrize(
    ("dtype", "class_"), [("auto", "unit_not_applied"), ("bf16", "no_failure_seen"), ("bfloat16", "no_failure_seen")]
)
def test_arguments_are_compared_with_the_servers_own_line(dtype: str, class_: str) -> None:
    """A flag of the unit that the server's own argument line contradicts means that another unit was started."""
    text = short(
        f"server_args=ServerArgs(port=31000, kv_cache_dtype='{dtype}', api_key='k3y-of-ours', host='127.0.0.1')",
        name="python",
        pid=9,
    )
    report = read_journal(text, parse_unit(UNIT))
    assert report.class_ == class_
    assert "k3y-of-ours" not in report.model_dump_json()


def test_systemctl_cat_with_a_journal_behind_it() -> None:
    """`systemctl cat` headers separate fragment, drop-ins and journal; each is judged on its own."""
    dropin = '# /etc/systemd/system/s.service.d/o.conf\n[Service]\nEnvironment="MODE=fast"\n'
    text = f"# /etc/systemd/system/s.service\n{UNIT}{dropin}# journal\nsrv[7]: MODE:slow\n"
    unit, dropins, body = split_bundle(text)
    assert (
        unit == UNIT and dropins == [("o.conf", '[Service]\nEnvironment="MODE=fast"\n')] and body == "srv[7]: MODE:slow"
    )
    report = read_journal(text)
    assert (report.unit_valid, report.dropin_valid, report.dropin_applied) == (True, True, False)
    broken = read_journal(text.replace('"MODE=fast"\n# j', '"MODE=fast\n# j'))
    assert (broken.unit_valid, broken.dropin_valid, broken.dropin_applied) == (True, False, None)


@given(st.text(max_size=300), st.binary(max_size=50))
@settings(max_examples=200, deadline=None)
def test_any_text_is_read_or_refused(text: str, data: bytes) -> None:
    """Arbitrary lines give a report or one clear error."""
    for candidate in (
        text,
        short(*text.split("\n")),
        json.dumps({"MESSAGE": list(data), "_PID": text}),
        "# /a/x.service\n" + text,
    ):
        try:
            read_journal(candidate)
        except UnreadableFile as error:
            assert str(error)


@pytest.mark.parametrize("text", ["", "\n \n", "\0\0\0", "-- No entries --\n"])
def test_no_journal_is_refused(text: str) -> None:
    """Nothing to read is an error, not an empty success."""
    with pytest.raises(UnreadableFile, match="journal"):
        read_journal(text)
