"""Outcomes from evidence: each outcome by its evidence, what outweighs what, and who is chosen."""

from __future__ import annotations

from typing import Any

import pytest

from lib.params import ROOT
from lib.records import OUTCOMES, Measured
from lib.server import known_findings, outcomes
from lib.server.failures import classify
from lib.server.flags import AXES
from lib.server.outcomes import Candidate, Difference, Facts, Piece, Ran, Sample, choose, judge, same_bits, stalled


# --- a starting server that makes no progress ---------------------------------------------------------------------------
def quiet(seconds: int, cores: float, line: str = "Load weight begin", compilers: tuple[str, ...] = ()) -> list[Sample]:
    """A server that wrote 100 bytes at second 10 and nothing for `seconds` afterwards."""
    return [Sample(t_s=9, log_bytes=50, cpu_s=5, last_line="before")] + [
        Sample(
            t_s=10 + t, log_bytes=100, cpu_s=5 + t * cores, last_line=line if t == 0 else "", compilers=list(compilers)
        )
        for t in range(seconds + 1)
    ]


def test_silence_at_rest_is_a_hang() -> None:
    """No line for the stated time and no CPU use: it hangs, and the numbers say so; one second less is no hang."""
    assert stalled(quiet(179, 0.0), 180, 1200) is None
    stall = stalled(quiet(180, 0.0), 180, 1200)
    assert stall and stall.kind == "hangs" and "no line for 180 s, 0.0 CPU cores" in stall.words


@pytest.mark.parametrize(
    ("line", "compilers"),
    [
        ("Running FlashInfer autotune with cache: /x", ()),
        ("Entering DeepGEMM JIT Pre-Compile session. It may take a long time", ()),
        ("Capture cuda graph begin. This can take up to several minutes.", ("ptxas",)),
        ("Load weight end.", ("cicc", "ninja")),
    ],
)
def test_compiling_has_a_deadline_of_its_own(line: str, compilers: tuple[str, ...]) -> None:
    """A line that announces it or a compiler at work, and CPU use: it goes on to its own deadline, and is then no hang."""
    assert stalled(quiet(600, 1.0, line, compilers), 180, 1200) is None
    stall = stalled(quiet(1200, 1.0, line, compilers), 180, 1200)
    assert stall and stall.kind == "compiling" and "still compiling" in stall.words


def test_the_line_alone_or_the_cpu_alone_is_no_compilation() -> None:
    """A server that announced a compilation and rests hangs; so does one that computes and shows nothing of it."""
    rests = stalled(quiet(180, 0.0, "Running FlashInfer autotune"), 180, 1200)
    spins = stalled(quiet(180, 1.0, "Capture cuda graph begin."), 180, 1200)
    assert rests and rests.kind == "hangs"
    assert spins and spins.kind == "hangs" and "neither its log nor a compiler" in spins.words


def test_a_new_line_is_progress() -> None:
    """Silence counts from the last new byte."""
    samples = [*quiet(170, 0.0), Sample(t_s=181, log_bytes=101, cpu_s=5), Sample(t_s=300, log_bytes=101, cpu_s=5)]
    assert stalled(samples, 180, 1200) is None
    assert stalled([], 180, 1200) is None


# --- outcomes -------------------------------------------------------------------------------------------------------------
def apart(mean: float, half: float = 0.0, worst: float | None = None) -> Difference:
    return Difference(
        tokens=100, mean=mean, low=mean - half, high=mean + half, worst_piece=mean if worst is None else worst,
        largest=mean, identical=mean == 0,
    )  # fmt: skip


SERVES: dict[str, Any] = {
    "id": "t", "state": "stopped", "ready_s": 9.0, "alone": apart(0.01), "floor": apart(0), "load": apart(0),
    "load_reference": apart(0), "decode_gap": 0.0, "decode_gap_reference": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "outcome", "words"),
    [
        ({}, "works", "0.0100"),
        ({"state": None, "ready_s": None, "predicted": "predicted crashes"}, "skipped", "predicted crashes"),
        ({"invalid": "port 1 belongs to pid 2"}, "identity_mismatch", "pid 2"),
        ({"died": "exit code -9"}, "crashes", "while serving: exit code -9"),
        ({"silent": "no answer within 9 s"}, "hangs", "while serving"),
        ({"garbage": "the known answer is wrong"}, "garbage", "known answer"),
        ({"failed": "500"}, "crashes", "500"),
        ({"decode_gap": 1.5}, "garbage", "disagrees with its own prefill"),
        ({"decode_gap": 0.2}, "numerically_off", "its own prefill"),
        ({"decode_gap": 0.2, "decode_gap_reference": 0.19}, "works", ""),
        ({"alone": apart(2.0)}, "garbage", "2.0000"),
        ({"alone": apart(0.2)}, "numerically_off", "limit 0.05"),
        ({"alone": apart(0.05, 0.02)}, "not_enough_data", "spans"),
        ({"alone": apart(0.2), "floor": apart(0.19)}, "not_enough_data", "floor is above the limit"),
        ({"alone": apart(0.06), "floor": apart(0.03)}, "works", ""),
        ({"alone": None}, "not_enough_data", "no scores to compare"),
        ({"load_garbage": "under load 1 of 9"}, "garbage_under_load", "right alone"),
        ({"load_failed": "3 of 9"}, "crashes", "under load"),
        ({"load": apart(0.01, worst=2.0)}, "garbage_under_load", "worst piece"),
        ({"load": apart(0.01, worst=0.3)}, "numerically_off", "worst piece"),
        ({"load": apart(0.01, worst=0.3), "load_reference": apart(0.01, worst=0.29)}, "works", ""),
        ({"load_decode_gap": 1.5}, "garbage_under_load", "from its own prefill at rest"),
        ({"load_decode_gap": 0.9}, "works", ""),
        ({"load": None}, "not_enough_data", "under load nothing"),
        ({"ignored": "triton runs"}, "silently_ignored", "triton runs"),
        ({"same_bits": "bit-identical to ref"}, "silently_ignored", "bit-identical"),
        (
            {"ignored": "triton runs", "same_bits": "bit-identical to ref"},
            "silently_ignored",
            "triton runs; bit-identical",
        ),
        ({"client": "client lag"}, "client_bound", "client lag"),
        # what outweighs what
        ({"ignored": "x", "garbage": "it is garbage"}, "garbage", ""),
        ({"ignored": "x", "client": "y"}, "silently_ignored", ""),
        ({"invalid": "other", "garbage": "z"}, "identity_mismatch", ""),
    ],
)
def test_an_outcome_from_its_evidence(changes: dict[str, Any], outcome: str, words: str) -> None:
    """Each row of the module's table, and that a later row hides no earlier one."""
    made = judge(Facts(**{**SERVES, **changes}), limit_nats=0.05, garbage_nats=1.0)
    assert made.outcome == outcome and words in made.reason


def test_the_reference_is_held_against_itself() -> None:
    """It has no distance from another; its own noise, its decoding and its load are judged all the same."""
    facts = Facts(**{**SERVES, "is_reference": True, "alone": None})
    assert judge(facts, 0.05, 1.0).outcome == "works"
    assert judge(facts.model_copy(update={"load": apart(0, worst=3)}), 0.05, 1.0).outcome == "garbage_under_load"
    assert judge(facts.model_copy(update={"load": apart(0.1, worst=0.2)}), 0.05, 1.0).outcome == "works"  # its noise
    assert judge(facts.model_copy(update={"decode_gap": 3.0}), 0.05, 1.0).outcome == "garbage"


NEVER = {"id": "t", "state": "died", "exit_code": -9, "ended_s": 31.0}


def test_a_death_at_start_has_phase_and_cause() -> None:
    """Exit code, phase and the root cause in the server's own words; without a cause in the log it says so."""
    log = [
        "Load weight begin. avail mem=1 GB",
        "Scheduler hit an exception: Traceback (most recent call last):",
        "RuntimeError: 0 active drivers ([]). There should only be one.",
    ]
    made = judge(Facts(**NEVER, failure=classify(log, exit_code=-9, ready=False)), 0.05, 1.0)
    assert made.outcome == "unsupported_here" and "exit code -9 after 31.0 s" in made.reason and "driver" in made.reason
    assert judge(Facts(**NEVER), 0.05, 1.0).reason.endswith("names no known cause")


def test_waiting_in_vain_is_a_hang_only_without_progress() -> None:
    """Silent: hangs. Compiling, or still writing when the time was over: not enough data, and what helps."""
    base = {"id": "t", "state": "not_ready", "ended_s": 200.0, "phase": "loading weights"}
    hang = outcomes.Stall(kind="hangs", words="no line for 180 s")
    busy = outcomes.Stall(kind="compiling", words="still compiling at its deadline")
    assert judge(Facts(**base, stall=hang), 0.05, 1.0).outcome == "hangs"
    for stall in (busy, None):
        made = judge(Facts(**base, stall=stall, silence_s=12.0), 0.05, 1.0)
        assert made.outcome == "not_enough_data" and "give it longer" in made.reason
    assert "its last new line 12 s before" in made.reason


def test_every_outcome_is_one_of_the_workbook_and_documented() -> None:
    """docs/sweep.md names the evidence of every outcome that a trial can get, and no other."""
    assert set(known_findings.EVIDENCE) <= set(OUTCOMES)
    said = {
        "skipped", "identity_mismatch", "crashes", "hangs", "not_enough_data", "garbage", "numerically_off",
        "garbage_under_load", "silently_ignored", "client_bound", "works", "unsupported_here", "out_of_memory",
    }  # fmt: skip
    assert set(known_findings.EVIDENCE) == said
    assert all(f"| {name.replace('_', ' ')} |" in known_findings.sweep_markdown() for name in said)


@pytest.mark.parametrize(
    ("log", "code", "outcome", "words"),
    [
        ("x_fp4_cutlass", 2, "crashes", "invalid choice"),
        ("x_moe_flashinfer_cutedsl", 1, "crashes", "quantization"),
        ("x_attn_trtllm_mha", 1, "unsupported_here", "Blackwell"),
        ("x_moe_flashinfer_trtllm", -9, "unsupported_here", "checksums"),
        ("x_m3_moe_triton", -9, "unsupported_here", "NVFP4"),
    ],
)
def test_what_really_failed_on_an_h200(log: str, code: int, outcome: str, words: str) -> None:
    """Recorded launches of SGLang 0.5.16: the outcome, and the server's own words in the line that is quoted."""
    with (ROOT / f"tests/recorded/h200-sglang-0.5.16/{log}.log").open("rb") as lines:
        failure = classify(lines, exit_code=code, ready=False)
    made = judge(Facts(**{**NEVER, "exit_code": code}, failure=failure), 0.05, 1.0)
    assert made.outcome == outcome and failure and words in (failure.line or "") + made.reason


# --- the same bits --------------------------------------------------------------------------------------------------------
def ran(name: str, asked: dict[str, Any], prefill: str | None = "p", decode: str | None = "d", says: Any = None) -> Ran:
    return Ran(id=name, asked=asked, says=asked if says is None else says, prefill=prefill, decode=decode)


REF = ran("ref", {"moe_runner_backend": "triton", "attention_backend": "triton"})


def test_another_backends_bits_convict_a_flag_that_the_server_repeats() -> None:
    """cutlass on bf16 experts (H200): the same bits as triton, /server_info repeats cutlass: it had no effect."""
    words = same_bits(ran("c", {**REF.asked, "moe_runner_backend": "cutlass"}), REF)
    assert words and "moe_runner_backend=cutlass (/server_info repeats cutlass) had no effect" in words
    assert words.startswith("bit-identical to ref, which asked for triton")


@pytest.mark.parametrize(
    "other",
    [
        ran("c", {**REF.asked, "moe_runner_backend": "cutlass"}, prefill="q"),  # its own numbers
        ran("c", {**REF.asked, "moe_runner_backend": "cutlass"}, decode="q"),
        ran("c", {**REF.asked, "moe_runner_backend": "cutlass"}, prefill=None),  # nothing to compare
        ran("c", {**REF.asked, "moe_runner_backend": "auto"}),  # auto may have chosen triton
        ran("c", {**REF.asked, "sampling_backend": "flashinfer"}),  # greedy sampling leaves every bit
        ran("c", {**REF.asked, "moe_runner_backend": "cutlass", "chunked_prefill_size": 64}),
        ran("c", dict(REF.asked)),
    ],
)
def test_what_does_not_convict(other: Ran) -> None:
    """Other bits, missing bits, `auto`, and flags whose kernels need not change a bit prove nothing."""
    assert same_bits(other, REF) is None


def test_a_line_of_the_log_decides_which_of_the_two_did_not_run() -> None:
    """A trial whose log shows its backend at work is not convicted; where the reference's does, no doubt is left."""
    trial = ran("c", {**REF.asked, "moe_runner_backend": "cutlass"})
    assert same_bits(trial.model_copy(update={"proven": ["moe_runner_backend"]}), REF) is None
    assert "(or triton did not run there)" in (same_bits(trial, REF) or "")
    sure = same_bits(trial, REF.model_copy(update={"proven": ["moe_runner_backend"]}))
    assert sure and sure.endswith("had no effect")


def test_a_flag_of_decoding_is_judged_by_decoding() -> None:
    """decode_attention_backend leaves prefill as it is: only equal decoding convicts it."""
    asked = {**REF.asked, "decode_attention_backend": "fa3"}
    base = ran("ref", {**REF.asked, "decode_attention_backend": "triton"})
    assert same_bits(ran("c", asked, decode="other"), base) is None
    assert same_bits(ran("c", asked, prefill="other"), base)


BOTH = {"prefill_attention_backend": "fa3", "decode_attention_backend": "triton"}


@pytest.mark.parametrize(
    ("asked", "base", "convicted"),
    [
        (
            {"attention_backend": "fa3", **BOTH},
            {"attention_backend": "triton", **BOTH},
            False,
        ),  # overruled in both places
        ({"attention_backend": "fa3"}, {"attention_backend": "triton"}, True),
        ({"kv_cache_dtype": "bf16"}, {"kv_cache_dtype": "bfloat16"}, False),  # two names of one thing
        ({"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "bfloat16"}, True),
    ],
)
def test_equal_on_purpose_is_not_ignored(asked: dict[str, Any], base: dict[str, Any], convicted: bool) -> None:
    """Trials that run one kernel by what they ask are equal for a reason; no flag of theirs was ignored."""
    assert (same_bits(ran("c", asked), ran("ref", base)) is not None) == convicted


def test_where_one_place_is_taken_over_the_other_one_tells() -> None:
    """decode is fa3 in both: attention_backend is judged by prefill, and equal decoding neither convicts nor acquits."""
    decode = {"decode_attention_backend": "fa3"}
    base = ran("ref", {"attention_backend": "triton", **decode})
    assert same_bits(ran("c", {"attention_backend": "flashinfer", **decode}, prefill="own"), base) is None
    assert same_bits(ran("c", {"attention_backend": "flashinfer", **decode}, decode="other"), base)


def test_the_table_of_kernels_uses_fields_of_sglang() -> None:
    """Every field is one that an axis sets, under the name that /server_info has."""
    fields = {field for dests in AXES.values() for field in dests}
    assert set(outcomes.COMPUTES) <= fields and set(outcomes.FIELD.values()) <= fields


# --- text and numbers that are garbage whatever the model -----------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "ids", "sign"),
    [
        ("!" * 12, (), "one character repeated"),
        ("", (), "empty"),
        (" \n ", (), "empty"),
        ("no no no no no no no no", (), "one word repeated"),
        ("\ufffd" * 6 + "abc", (), "replacement characters (U+FFFD)"),
        ("abcabcabcabcabcabcabcabcabc", (), "short unit repeated"),
        ("fine text", (0,) * 8, "one token repeated (0)"),
        (" Paris, the capital", (5, 6), None),
        ("aaa", (), None),
    ],
)
def test_signs_of_a_degenerate_answer(text: str, ids: tuple[int, ...], sign: str | None) -> None:
    """Empty, U+FFFD, and one character, word, token or unit throughout; short and ordinary texts are none."""
    assert outcomes.degenerate(text, ids) == sign


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([None, -1.0, None, -2.0], "NaN or no number as log-probability at 1 of 3 positions, first 2"),
        ([None, -1.0, float("nan")], "NaN"),
        ([None, *[0.0] * 9], "exactly 0"),
        ([None, *[-11.9] * 9], "every log-probability is -11.9"),
        ([None, -1.0, 0.7], "above 0"),
        ([None, -1.0, -0.0, -3.0], None),
        ([None, 0.0], None),
    ],
)
def test_log_probabilities_that_are_none(values: list[float | None], words: str | None) -> None:
    """NaN, all zero, all alike (a head that returns zeros) and positive ones are wrong whatever the model."""
    found = outcomes.score_problem(values)
    assert found is None if words is None else words in (found or "")


def test_a_difference_is_taken_piece_by_piece() -> None:
    """Mean over all tokens, the worst piece apart; a piece with a problem or of other ids is left out.

    (0.1 x 3 + 0.5 x 1) / 4 = 0.2; the worst piece lies 0.5 off.
    """
    base = [
        Piece(key="0", ids_sha256="a", logprobs=[None, -1, -2, -3]),
        Piece(key="1", ids_sha256="b", logprobs=[None, -1]),
    ]
    other = [
        Piece(key="0", ids_sha256="a", logprobs=[None, -1.1, -2.1, -3.1]),
        Piece(key="1", ids_sha256="b", logprobs=[None, -1.5]),
        Piece(key="1", ids_sha256="c", logprobs=[None, -9]),
        Piece(key="1", ids_sha256="b", logprobs=[], problem="NaN"),
    ]
    made = outcomes.difference(base, other)
    assert made and made.tokens == 4 and made.mean == pytest.approx(0.2) and made.worst_piece == pytest.approx(0.5)
    assert outcomes.difference(base, base).identical  # type: ignore[union-attr]
    assert outcomes.difference([], other) is None


# --- the choice -----------------------------------------------------------------------------------------------------------
def one(name: str, speed: float | None, half: float = 1.0, far: float = 0.0, outcome: str = "works") -> Candidate:
    rate = (
        Measured(value=speed, unit="tok/s", n=3, low=speed - half, high=speed + half)
        if speed is not None
        else Measured(value=None, reason="no")
    )
    return Candidate(
        id=name, outcome=outcome, speed=rate, fidelity=Measured(value=far, unit="nat/token"), reason="its line"
    )


def test_the_fastest_is_chosen_where_intervals_part() -> None:
    """100 +- 1 against 50 +- 1: the faster one, and why."""
    made = choose([one("ref", 50), one("fast", 100, far=0.01)], "ref")
    assert made.id == "fast" and "don't overlap" in made.why


def test_where_speeds_cannot_be_told_apart_the_nearest_is_kept() -> None:
    """100 +- 5 against 103 +- 5: the reference stays, and the other is what would change the choice."""
    made = choose([one("ref", 100, 5), one("other", 103, 5, 0.01)], "ref")
    assert made.id == "ref" and any("other" in which for which, _ in made.would_change)
    assert choose([one("ref", 10), one("b", 103, 5, 0.02), one("a", 100, 5, 0.01)], "ref").id == "a"


def test_two_launches_of_the_same_kernels_measure_the_noise_of_a_launch() -> None:
    """An ignored trial ran the reference's kernels at half its speed: a trial that is 40% faster proves nothing then.

    60 against 30: 1 - 30/60 = 0.5.
    """
    again = one("ignored", 30, outcome="silently_ignored").model_copy(update={"same_kernels": True})
    assert outcomes.launch_noise([one("ref", 60), again], "ref") == 0.5
    assert outcomes.launch_noise([one("ref", 60), one("b", 30)], "ref") is None
    assert choose([one("ref", 60), one("fast", 84, far=0.01)], "ref").id == "fast"
    made = choose([one("ref", 60), one("fast", 84, far=0.01), again], "ref")
    assert made.id == "ref" and "same kernels differed by 50%" in made.why


def test_what_fails_is_never_chosen_and_says_what_would_change_that() -> None:
    """A fast garbage backend stays out; skipped, ignored and failing trials are named with their condition."""
    made = choose([one("ref", 10), one("bad", 900, outcome="garbage"), one("x", None, outcome="skipped")], "ref")
    assert made.id == "ref" and "only one that works" in made.why
    assert ("bad (garbage)", "if this were gone: its line") in made.would_change
    assert any(which == "x (skipped)" and why.startswith("if it were launched") for which, why in made.would_change)
    assert choose([one("bad", 1, outcome="hangs")], "ref").id is None
    assert choose([one("b", None), one("ref", None)], "ref").id == "ref"


def test_the_reference_rows_have_sources_versions_and_known_outcomes() -> None:
    """The origin's four findings and Q1 to Q4 are there, each with hardware, versions, source and a known outcome."""
    rows = {k.id: k for k in known_findings.KNOWN}
    assert {"origin-attention", "origin-trtllm", "origin-cutedsl", "origin-kept", "Q1", "Q2", "Q3", "Q4"} <= set(rows)
    for known in rows.values():
        assert known.outcome in OUTCOMES and known.versions and known.hardware and known.source
        assert all(outcomes.FIELD.get(name, name) in {f for d in AXES.values() for f in d} for name in known.setting)
