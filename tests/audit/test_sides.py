"""Recorded sides: compared without any server, refused where they don't fit; the command and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lib.audit.probes import ids_sha256
from lib.audit.sides import (
    Wanted,
    check_same_vocabulary,
    compare_sides,
    default_lengths,
    record_side,
    tokenize_side,
    unread_tokens,
)
from lib.audit.tasks import make_items
from lib.cli import main
from lib.errors import BadInput
from tests.audit.stub_server import Stub, serving


def side(
    folder: Path, shift: float = 0.0, noise: float = 0.0, seed: int = 1, floor: bool = True, tasks: str = ""
) -> Path:
    """A recorded side of six documents of 300 tokens; `tasks` is one letter an item, T or F, deep items all as given."""
    base, own = np.random.default_rng(7), np.random.default_rng(seed)
    documents = [
        {"name": f"d{i}", "origin": "made", "sha256": str(i), "ids": [i] * 300, "pieces": ["x"] * 300} for i in range(6)
    ]
    (folder / "documents").mkdir(parents=True)
    (folder / "documents" / "documents.json").write_text(json.dumps(documents))
    (folder / "side.json").write_text(
        json.dumps({"base_url": "http://x", "launch_id": "L", "server_key": "k", "told": {}, "checks": []})
    )
    values = base.normal(-2, 1, (6, 299))
    treated = values + shift + own.normal(0, noise, values.shape) if noise else values + shift
    for name in ("first", *(["again"] if floor else [])):
        (folder / name).mkdir()
        for i, d in enumerate(documents):
            ids = list(d["ids"])  # type: ignore[call-overload]
            record = {
                "name": d["name"],
                "key": f"{i:02d}",
                "ids_sha256": ids_sha256(ids),
                "logprobs": [None, *treated[i].tolist()],
            }
            (folder / name / f"scores-{i:02d}.json").write_text(json.dumps(record))
    if tasks:
        (folder / "tasks").mkdir()
        rows = [
            {"id": f"needle-{i:03d}-{arm}", "right": arm == "control" or letter == "T"}
            for arm in ("control", "deep")
            for i, letter in enumerate(tasks)
        ]
        (folder / "tasks" / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return folder


def test_two_folders_are_compared_with_floor_loss_and_tasks(tmp_path: Path) -> None:
    """A loss of 0.05 against a floor of 0, and nine task items lost: both verdicts, without a server."""
    a, b = side(tmp_path / "a", tasks="T" * 12), side(tmp_path / "b", -0.05, 0.02, floor=False, tasks="F" * 9 + "TTT")
    report = compare_sides(a, b, Wanted(), 128, 0.01)
    assert report.outcome == "outside_limit" and report.effect == "loss" and report.floors["again"].identical
    assert report.tasks[-1].outcome == "lost" and report.needed_tokens is None
    assert len(report.comparison.buckets) == 3 and report.comparison.decisive.n == 6  # type: ignore[union-attr]


def test_a_restarted_reference_is_part_of_the_floor(tmp_path: Path) -> None:
    """A restart that shifts the reference by as much hides the effect."""
    a, b = side(tmp_path / "a"), side(tmp_path / "b", -0.02, 0.01, floor=False)
    again = side(tmp_path / "again", -0.03, 0.01, seed=5, floor=False)
    report = compare_sides(a, b, Wanted(), 128, 0.01, [again])
    assert report.effect == "none_seen" and report.floor_shift_nats == pytest.approx(0.03, abs=0.002)
    assert report.outcome == "not_enough_data"


def test_one_side_alone_gives_its_floor(tmp_path: Path) -> None:
    """A against A: bit-identical, and said so."""
    report = compare_sides(side(tmp_path / "a"), None, Wanted(), 128, 0.01)
    assert report.comparison is None and report.outcome == "within_limit" and "bit-identical" in report.reason


def test_too_little_data_names_the_tokens_needed(tmp_path: Path) -> None:
    """A mean near the limit with much noise."""
    a, b = side(tmp_path / "a"), side(tmp_path / "b", -0.02, 0.6, floor=False)
    report = compare_sides(a, b, Wanted(), 128, 0.01)
    assert report.outcome == "not_enough_data" and report.needed_tokens and report.needed_tokens > 1794


def test_the_command_compares_recorded_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--against A --b B`: text with every part, one JSON object, and exit 1 with --fail-on-loss."""
    a, b = side(tmp_path / "a", tasks="T" * 8), side(tmp_path / "b", -0.05, 0.02, floor=False, tasks="F" * 8)
    given = ["compare-accuracy", "--against", str(a), "--b", str(b), "--bucket", "128"]
    assert main(given) == 0
    text = capsys.readouterr().out
    for words in (
        "outside_limit",
        "effect: loss",
        "by position",
        "largest single differences",
        "tasks (A / B right)",
        "SHA-256",
    ):
        assert words in text, words
    assert main([*given, "--json", "--fail-on-loss"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["outcome"] == "outside_limit" and found["comparison"]["pooled"]["high"] < -0.01


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--a", "http://127.0.0.1:1", "--against", "x"],
        ["--a", "folder", "--record", "x"],
        ["--a", "http://127.0.0.1:1", "--b", "http://127.0.0.1:2", "--record", "x"],
        ["--against", "nowhere", "--b", "nowhere"],
        ["--a", "http://127.0.0.1:1", "--limit", "0"],
        ["--a", "http://127.0.0.1:1", "--tokens", "many"],
        ["--a", "http://127.0.0.1:1", "--tokens", "10"],
    ],
)
def test_bad_input_ends_with_two_and_no_traceback(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One message that says what was expected."""
    assert main(["compare-accuracy", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("workbook: ") and "found: " in said and "Traceback" not in said


def test_nobody_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A URL without a server is a failure of the server, not bad input."""
    assert main(["compare-accuracy", "--a", "http://127.0.0.1:9", "--out", str(tmp_path / "o")]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err


class Control:
    def __init__(self, room: int = 5000, pieces: str = "x") -> None:
        self.room, self.pieces = room, pieces

    def server_info(self) -> dict[str, Any]:
        return {"max_req_input_len": self.room, "version": "0.5.15"}

    def post_json(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return {"text": [self.pieces] * len(body["tokens"])}


def test_another_tokenizer_or_too_short_a_context_is_refused() -> None:
    """Ids outside B's vocabulary would end B; a document longer than its context would be refused by it."""
    documents = [{"name": "d", "ids": [1, 2, 3], "pieces": ["x"] * 3}]

    def on(control: Control) -> Any:
        return SimpleNamespace(control=control)

    assert "same text" in check_same_vocabulary(on(Control()), documents)
    with pytest.raises(BadInput, match="other text on B"):
        check_same_vocabulary(on(Control(pieces="y")), documents)
    with pytest.raises(BadInput, match="at most 3"):
        check_same_vocabulary(on(Control(room=3)), documents)
    assert "could not be checked" in check_same_vocabulary(on(Control()), [{"name": "d", "ids": [1], "pieces": None}])


def test_a_finished_record_of_another_server_is_never_mixed(tmp_path: Path) -> None:
    """Another server's answers in the same folder would be nobody's."""
    server = SimpleNamespace(control=Control(), record=SimpleNamespace(key="other"))
    with pytest.raises(BadInput, match="another server's record"):
        record_side(server, side(tmp_path / "a"), Wanted(), [], floor=True)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="others are there"):
        tokenize_side(server, tmp_path / "a", Wanted(documents=["argparse"], lengths=[300]))  # type: ignore[arg-type]


def test_default_lengths_reach_the_context() -> None:
    """Two documents each at a quarter, half and all of what the server takes; too small a server is refused."""
    assert default_lengths({"max_req_input_len": 4096, "max_total_num_tokens": 10**6}) == [
        1022,
        1022,
        2044,
        2044,
        4088,
        4088,
    ]
    with pytest.raises(BadInput):
        default_lengths({"max_req_input_len": 200})


TEXTS = [x for name in ("argparse", "typing", "tarfile", "inspect", "doctest", "pdb") for x in ("--document", name)]


def test_two_servers_over_http_from_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Texts, floors (again and under load), buckets, tasks, largest differences with their text, and the time around it all."""
    items = {i.prompt: i.expected.removeprefix('{"name": "') for i in make_items(6, 300)}
    far = {p for p in items if len(p) > 1100}
    a, b = Stub(answer=items.get), Stub(0.05, 0.02, answer=lambda p: "?" if p in far else items.get(p))
    with serving(a) as one, serving(b) as other:
        given = [
            "compare-accuracy",
            "--a",
            one,
            "--b",
            other,
            *TEXTS,
            "--tokens",
            "400",
            "--bucket",
            "128",
            "--out",
            str(tmp_path),
        ]
        assert main([*given, "--tasks", "6", "--task-tokens", "300", "--json", "--fail-on-loss"]) == 1
        found = json.loads(capsys.readouterr().out)
        asked = (a.scored, b.scored)
        assert main([*given, "--tasks", "6", "--task-tokens", "300"]) == 0
    assert (a.scored, b.scored) == asked, "a second call scored again"
    assert found["outcome"] == "outside_limit" and found["effect"] == "loss"
    assert set(found["floors"]) == {"again", "loaded"} and all(f["identical"] for f in found["floors"].values())
    assert found["comparison"]["pooled"]["value"] == pytest.approx(-0.05, abs=0.003)
    assert found["tasks"][-1]["outcome"] == "lost" and found["tasks"][-1]["only_b"] == 0
    assert "[[" in found["comparison"]["largest_tokens"][0]["text"]
    assert "the workbook's own" in capsys.readouterr().out or found["timing"]["a/first"]["scored"] == 6


def test_one_after_the_other_with_record_and_against(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two servers that are never up together; the interrupted one goes on where it stopped."""
    recorded = tmp_path / "recorded"
    stub = Stub()
    with serving(stub) as url:
        given = [
            "compare-accuracy",
            "--a",
            url,
            "--record",
            str(recorded),
            *TEXTS,
            "--tokens",
            "400",
            "--load",
            "0",
            "--json",
        ]
        stub.dies_after = 3
        assert main(given) == 1 and len(list((recorded / "first").glob("scores-*.json"))) == 3
        stub.dies_after = None
        assert main(given) == 0 and stub.scored == 12  # 6 + 6 again, none twice
    capsys.readouterr()
    with serving(Stub(0.05, 0.02)) as url:
        assert (
            main(["compare-accuracy", "--against", str(recorded), "--b", url, "--out", str(tmp_path / "b"), "--json"])
            == 0
        )
    found = json.loads(capsys.readouterr().out)
    assert found["outcome"] == "outside_limit" and [d["tokens"] for d in found["documents"]] == [400] * 6


def test_no_flush_flushes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other traffic runs: not for a document, nor for the loaded pass, nor for the tasks."""
    stub = Stub()
    with serving(stub) as url:
        given = [
            "compare-accuracy",
            "--a",
            url,
            "--document",
            "argparse",
            "--tokens",
            "400",
            "--tasks",
            "1",
            "--task-tokens",
            "300",
        ]
        assert main([*given, "--out", str(tmp_path), "--no-flush"]) == 0
        assert stub.flushed == 0
        assert main([*given, "--out", str(tmp_path / "other")]) == 0
        assert stub.flushed > 0


def test_the_probe_from_the_command_needs_a_hit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`workbook audit --probe` adds `probe` to the report; a server without a prefix cache is not settled, and nothing is flushed."""
    with serving(Stub()) as url:
        assert main(
            ["audit", "--base-url", url, "--probe", "--probe-documents", "1", "--probe-duty", "1", "--json"]
        ) in (0, 1)
    probe = json.loads(capsys.readouterr().out)["probe"]
    assert probe["outcome"] == "no_hit" and probe["plan"]["chunked_prefill_size"] == 512
    assert main(["audit", "--probe"]) == 2
    assert main(["audit", "--base-url", "http://127.0.0.1:9", "--probe", "--probe-documents", "0"]) == 2


@pytest.mark.parametrize(
    ("a", "b", "unread"),
    [
        ({}, {}, 0),
        ({}, {"kv_cache_dtype": "fp8_e4m3"}, 2048),
        ({}, {"resolved_kv_cache_dtype": "fp8_e4m3"}, 2048),
        ({"attention_backend": "torch_native"}, {"attention_backend": "torch_native", "kv_cache_dtype": "fp8_e4m3"}, 0),
        ({"attention_backend": "fa3"}, {"kv_cache_dtype": "fp8_e4m3"}, 2048),
    ],
)
def test_where_caches_differ_the_first_chunk_is_known_to_be_blind(
    a: dict[str, Any], b: dict[str, Any], unread: int
) -> None:
    """On Triton and FlashInfer a first chunk reads no pool: a comparison of caches leaves it out; other comparisons don't."""
    told = {"kv_cache_dtype": "bf16", "attention_backend": "triton", "chunked_prefill_size": 2048}
    assert unread_tokens({**told, **a}, {**told, **b}) == unread


def test_caches_that_no_token_read_are_never_within_the_limit(tmp_path: Path) -> None:
    """Two servers, documents in one prefill chunk of Triton: equal scores say nothing about the caches."""
    ids = list(range(100))
    for name, dtype in (("a", "bf16"), ("b", "fp8_e4m3")):
        told = {"kv_cache_dtype": dtype, "attention_backend": "triton", "chunked_prefill_size": 2048}
        score = {"name": "t", "key": "00", "ids_sha256": ids_sha256(ids), "logprobs": [None, *([-1.0] * 99)]}
        files = {
            "documents/documents.json": [{"name": "t", "origin": "o", "sha256": "0", "ids": ids}],
            "side.json": {"told": told}, "first/scores-00.json": score, "again/scores-00.json": score,
        }  # fmt: skip
        for file, content in files.items():
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text(json.dumps(content))
    found = compare_sides(tmp_path / "a", tmp_path / "b", Wanted(), 500, 0.01)
    assert found.outcome == "not_enough_data" and "one prefill chunk of 2048" in found.reason
    side = json.loads((tmp_path / "b" / "side.json").read_text())
    for name in ("a", "b"):
        told = {**side["told"], "kv_cache_dtype": "bf16"}
        (tmp_path / name / "side.json").write_text(json.dumps({"told": told}))
    assert compare_sides(tmp_path / "a", tmp_path / "b", Wanted(), 500, 0.01).outcome == "within_limit"
