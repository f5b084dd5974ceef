"""Foreign input, damaged in every way: no traceback but a WorkbookError, no slow input, and no secret in any output."""

from __future__ import annotations

import contextlib
import io
import json
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lib.cli import main
from tests.fuzz.readers import READERS, run

HERE = Path(__file__).resolve().parent
KEY = "Zx9-secret-of-ours-42"

LOG = f"""[2026-11-29 13:05:53] server_args=ServerArgs(model_path='/m', api_key='{KEY}', tp_size=2, kv_cache_dtype='auto')
[2026-11-29 13:06:28 TP0] Load weight end. elapsed=3.1 s, type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=9.00 GB, mem usage=7.00 GB.
[2026-11-29 13:06:28 TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 4096, K size: 0.25 GB, V size: 0.25 GB
[2026-11-29 13:06:29] The server is fired up and ready to roll!
[2026-11-29 13:06:30 TP0] Decode batch, #running-req: 1, #token: 9, token usage: 0.01, gen throughput (token/s): 9.1, #queue-req: 0
[2026-11-29 13:06:31 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/m/x.py", line 3, in forward
RuntimeError: request with Authorization: Bearer {KEY} failed
"""
UNIT = f"[Service]\nEnvironment=API_KEY={KEY}\nExecStart=/bin/python -m sglang.launch_server --model-path /m --api-key {KEY}\n"
JOURNAL = (
    f"Nov 29 13:05:53 h systemd[1]: Started x.\nNov 29 13:05:54 h python[7]: server_args=ServerArgs(api_key='{KEY}')\n"
    * 2
)
BENCH = json.dumps({"backend": "sglang", "completed": 3, "duration": 2.0, "output_throughput": 4.0, "total_output_tokens": 8,
                    "mean_ttft_ms": 1.0, "server_info": {"api_key": KEY, "launch_command": f"x --api-key {KEY}"}})  # fmt: skip
INFO = json.dumps(
    {"api_key": KEY, "kv_cache_dtype": "auto", "version": "0.5.16", "model_path": "/m", "admin_api_key": KEY}
)
SEEDS: dict[str, str] = {
    "log": LOG, "failure": LOG, "unit": UNIT, "journal": JOURNAL, "bench": BENCH,
    "config": '{"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}',
    "facts": f"API_KEY={KEY} python -m sglang.launch_server --model-path /m --api-key {KEY}",
    "words": "47.1 tok/s\n16.4 tok/s later\nrequests 1..9 ok at 5 QPS\nGET /health 200\n",
}  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, seed: bytes) -> bytes:
    """A seed with pieces cut out, doubled, overwritten and shuffled."""
    data = seed
    for _ in range(draw(st.integers(1, 4))):
        a, b = sorted(draw(st.tuples(st.integers(0, len(data)), st.integers(0, len(data)))))
        piece = draw(
            st.one_of(
                st.binary(max_size=12), st.sampled_from([b"", b"\r", b"\n", b"NaN", b'"', b"'", b"\x1b[", data[a:b]])
            )
        )
        data = data[:a] + piece + data[b:] if draw(st.booleans()) else data[:b] + piece + data[a:]
    return data[:20000]


@pytest.mark.parametrize("reader", sorted(READERS))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_input_is_an_answer_or_an_error_of_ours(reader: str, data: st.DataObject) -> None:
    """Whatever is in it, a reader returns or raises a WorkbookError."""
    seed = SEEDS.get(reader, "").encode()
    run(reader, data.draw(st.one_of(damaged(seed), st.binary(max_size=200))))


#: What was quadratic once, or may be: one line of 100,000 characters each.
LONG = {
    "words": "a " * 50_000, "flags": "--api-key x " * 8_000, "dashes": "sk-" * 33_000, "rulers": "=" * 100_000,
    "names": "A_TOKEN_" * 12_000, "digits": "1" * 100_000, "quotes": '\\"' * 50_000, "capitals": "Ab" * 50_000,
    "pairs": "a=1," * 25_000, "variables": "A_TOKEN=x " * 10_000, "blanks": " " * 100_000 + "x", "brackets": "[" * 100_000,
}  # fmt: skip


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("reader", ["log", "failure", "bench", "unit", "journal", "facts"])
def test_no_line_is_slow(reader: str, name: str) -> None:
    """A hostile line of 100,000 characters takes some tenths of a second, not minutes (quadratic would be hours at 1 MB)."""
    line = LONG[name]
    text = f"{SEEDS[reader]}\n[2026-11-29 13:05:53 TP0] {line}\nserver_args=ServerArgs({line}\nRuntimeError: {line}\n"
    if reader == "unit":
        text = f"[Service]\nExecStart=/bin/x {line}\nEnvironment={line}\n"
    start = time.process_time()
    run(reader, text.encode())
    assert time.process_time() - start < 12


@pytest.mark.parametrize("form", ["plain", "json"])
@pytest.mark.parametrize(
    ("command", "text"),
    [("inspect log", LOG), ("inspect unit", UNIT), ("inspect unit", JOURNAL), ("inspect bench", BENCH), ("audit --log", LOG),
     ("audit --server-info", INFO), ("audit --environ", f"SGLANG_X=1\nAPI_KEY={KEY}\nSGLANG_API_KEY={KEY}\n")],
)  # fmt: skip
def test_no_secret_in_any_output(command: str, text: str, form: str, tmp_path: Path) -> None:
    """The key of the input stands in no output, neither whole nor damaged input, neither as text nor as JSON."""
    path = tmp_path / "input"
    lines = text.splitlines(keepends=True)
    variants = [
        text,
        text.replace("'", '\\"'),
        text.replace("\n", "\r\n"),
        text[: len(text) * 2 // 3],
        "".join(reversed(lines)),
    ]
    for variant in variants:
        path.write_bytes(variant.encode())
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
            main([*command.split(), str(path), *(["--json"] if form == "json" else [])])
        assert KEY not in out.getvalue() + err.getvalue(), variant
