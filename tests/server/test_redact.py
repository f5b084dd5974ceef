"""Secrets never pass, ordinary words always do."""

from __future__ import annotations

import json
import time
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from lib.records import Record
from lib.server.redact import REDACTED, find_secrets, is_secret_name, redact_bytes, redact_object, redact_text

SECRET = "s3cr3t-Value.9"

LEAKS = [
    "server_args=ServerArgs(model_path='/m', api_key='{}', admin_api_key='{}', ssl_keyfile_password='{}', port=30000)",
    'ServerArgs(api_key="{}", tp_size=8)',
    "python -m sglang.launch_server --api-key {} --port 30000",
    "python -m sglang.launch_server --api-key={} --port 30000",
    "python -m sglang.launch_server --api-key '{}' --port 30000",
    "ExecStart=/opt/bin/python --api-key \\\n    {} \\\n    --port 8000",
    "argv: ['--api-key', '{}', '--port', '1']",
    '["--admin-api-key", "{}", "--port"]',
    '{{"api_key": "{}", "port": 1}}',
    '{{\\"api_key\\": \\"{}\\", \\"port\\": 1}}',
    '{{"api_keys": ["{}", "other-{}"]}}',
    "HF_TOKEN={}",
    "export HUGGING_FACE_HUB_TOKEN='{}'",
    'Environment="HF_TOKEN={} with words"',
    "Environment=HF_TOKEN={} OTHER=1",
    "OPENAI_API_KEY={} DB_PASSWORD={} CLIENT_SECRET={}",
    "AWS_SECRET_ACCESS_KEY={} AWS_ACCESS_KEY_ID={} AWS_SESSION_TOKEN={}",
    "WANDB_API_KEY: {}",
    "Authorization: Bearer {}",
    "Authorization: Basic {}",
    "authorization: {}",
    "{{'authorization': 'Bearer {}', 'host': 'x'}}",
    "(b'authorization', b'Bearer {}')",
    "curl -H 'Authorization: Bearer {}' http://127.0.0.1:30000/v1/models",
    'curl -H "x-api-key: {}" http://127.0.0.1/',
    "got token Bearer {} here",
    "https://user:{}@host/path",
    "GET /v1/models?api_key={}&x=1",
    "GET /v1/models?x=1&token={}",
    "docker run -e HF_TOKEN={} image",
    "password = {}",
    "Set-Cookie: session={}; Path=/",
    "api_key='{}",
    "vllm serve --api-key first-key-1 {} --port 1",
    "--hf-token {}",
]

ORDINARY = [
    "max_total_num_tokens=65536, chunked_prefill_size=8192, max_running_requests=72",
    "tokenizer_path='/srv/models/m', tokenizer_mode='auto', skip_tokenizer_init=False",
    "Decode batch. #running-req: 1, #token: 5, token usage: 0.1, gen throughput (token/s): 12.3, #queue-req: 0",
    "Prefill batch, #new-seq: 1, #new-token: 4, #cached-token: 0, token usage: 0.00, #running-req: 0",
    "api_key=None, admin_api_key=None, ssl_keyfile=None, ssl_keyfile_password=None, port=1",
    '{"api_key": null, "admin_api_key": "", "x": 1}',
    "api_key='' port=1",
    "eos_token='</s>', pad_token='<pad>', think_end_token='x', speculative_token_map=None",
    "BOS_TOKEN=<s> MAX_TOKEN=5 PUBLIC_KEY=abc CACHE_KEY=1 HF_HUB_DISABLE_IMPLICIT_TOKEN=1",
    "--api-key ${SGLANG_API_KEY} --port 1",
    "EnvironmentFile=/etc/sglang/secrets.env",
    "LoadCredential=x",
    "hf_quant_config.json says kv_cache_quant_algo FP8; sk-learn and task-sk-1",
    "key=value, keys: 5, monkey: 4, kv_cache_dtype=auto, cache_key=3, num_key_value_heads=8",
    "This server needs no API key.",
    "http://127.0.0.1:30000/v1/models and ssh://git@host/x",
    '{"token": " Paris", "logprob": -0.1}',
    "Bearer token is missing",
    "usage: [--api-key API_KEY] [--ssl-keyfile-password SSL_KEYFILE_PASSWORD]",
    "the password prompt and the secret of speed",
]


@pytest.mark.parametrize("text", LEAKS)
@pytest.mark.parametrize("secret", [SECRET, "abc12345678", "k" * 40 + "7"])
def test_a_named_secret_is_hidden(text: str, secret: str) -> None:
    """In every form that names a secret its value goes and the rest stays."""
    shown = text.format(*[secret] * 3)
    hidden = redact_text(shown)
    assert secret not in hidden
    assert REDACTED in hidden
    assert redact_text(hidden) == hidden
    for word in ("--port", "tp_size=8", "OTHER=1", "model_path='/m'", "http://127.0.0.1"):
        assert (word in shown) == (word in hidden)


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_words_stay(text: str) -> None:
    """Tokens that are counted, tokenizers, absent keys and prose are not secrets."""
    assert redact_text(text) == text


@pytest.mark.parametrize(
    "shape",
    [
        "hf_AbCdEfGhIjKlMnOpQr",
        "sk-proj-1234567890abcdef",
        "ghp_0123456789abcdefABCD",
        "AKIAABCDEFGHIJKLMNOP",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc-def_1",
        "nvapi-0123456789abcdef_",
    ],
)
def test_known_shapes_are_hidden_without_a_name(shape: str) -> None:
    """A token that is recognised by its own form goes wherever it stands."""
    assert shape not in redact_text(f"using {shape} for download")
    assert shape not in redact_text(f"[{shape}]")


def test_private_key_block_is_hidden() -> None:
    """The body of a PEM private key goes, also when the end is missing."""
    for end in ("-----END PRIVATE KEY-----", ""):
        assert "MIIabc" not in redact_text(f"-----BEGIN PRIVATE KEY-----\nMIIabc\nMIIdef\n{end}")


@given(st.text(min_size=4, max_size=20), st.text(max_size=30), st.text(max_size=30))
def test_exact_values_go_in_every_encoding(secret: str, before: str, after: str) -> None:
    """A known value is removed plain, URL-encoded, in JSON and in a repr; a second pass changes nothing."""
    if secret in REDACTED or REDACTED in secret or any("\ud800" <= c <= "\udfff" for c in secret):
        return
    for form in (
        secret,
        quote(secret, safe=""),
        quote_plus(secret),
        quote(secret).lower(),
        json.dumps(secret)[1:-1],
        repr(secret)[1:-1],
    ):
        hidden = redact_text(f"<{before}|{form}|{after}>", [secret])
        rest = hidden.replace(REDACTED, "\0")
        assert secret not in rest
        assert redact_text(hidden, [secret]) == hidden


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=200))
@settings(max_examples=300)
def test_any_text_twice_is_once(text: str) -> None:
    """Redaction is idempotent on arbitrary text."""
    once = redact_text(text)
    assert redact_text(once) == once


FRAGMENTS = [
    "api_key",
    "--api-key",
    "HF_TOKEN",
    "Authorization",
    ": ",
    "=",
    " ",
    "'",
    '"',
    "\\",
    "\n",
    ",",
    "None",
    "abc1",
    "[",
    "]",
    "Bearer ",
    "&",
    "?token=",
    "://u:",
    "@h",
    REDACTED,
    "_TOKEN",
    "password",
    ";",
    "(",
    ")",
    "{",
    "}",
    "-",
]


@example(["Authorization", "://u:", "'", "api_key", "'", "Bearer "])
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=25))
@settings(max_examples=1500, deadline=None)
def test_built_from_the_grammars_own_pieces_twice_is_once(pieces: list[str]) -> None:
    """Idempotent also on text made of names, quotes, separators and the placeholder in any order."""
    once = redact_text("".join(pieces))
    assert redact_text(once) == once


@given(st.binary(max_size=200))
def test_bytes_without_secrets_pass_unchanged(data: bytes) -> None:
    """Bytes that are not text survive; only what a pattern names is replaced."""
    assume(b"abc123" not in data)
    marked = b"\xff\xfe" + data + b" api_key='abc123'"
    out = redact_bytes(marked)
    assert out.startswith(b"\xff\xfe")
    assert redact_bytes(out) == out
    assert b"abc123" not in redact_bytes(data.replace(b"'", b"") + b"\n api_key='abc123'")


class _Model(Record):
    api_key: str | None = None
    argv: tuple[str, ...] = ()
    port: int = 1


def test_objects_keep_their_shape() -> None:
    """Nested objects come back with the same types and only secrets replaced; absent keys stay absent."""
    obj = {
        "api_key": "abc",
        "admin_api_key": None,
        "max_total_num_tokens": 65536,
        "n": [1, 2.5, True, None],
        "argv": ["--model", "m", "--api-key", "abc", "--port", "1", "--hf-token=abc"],
        "env": {"HF_TOKEN": "abc", "PATH": "/bin"},
        "headers": [("authorization", "Bearer abc"), (b"authorization", b"Bearer abc")],
        "k8s": [{"name": "HF_TOKEN", "value": "abc"}, {"name": "PATH", "value": "/bin"}],
        "credentials": {"user": "u", "n": 5},
        "missing": ["--api-key", "--port", "1"],
    }
    out = redact_object(obj)
    assert "abc" not in repr(out)
    assert out["admin_api_key"] is None and out["max_total_num_tokens"] == 65536 and out["n"] == [1, 2.5, True, None]
    assert out["argv"] == ["--model", "m", "--api-key", REDACTED, "--port", "1", "--hf-token=" + REDACTED]
    assert out["env"] == {"HF_TOKEN": REDACTED, "PATH": "/bin"}
    assert out["k8s"][1]["value"] == "/bin" and out["missing"] == ["--api-key", "--port", "1"]
    assert isinstance(out["headers"][0], tuple)
    assert redact_object(out) == out
    model = redact_object(_Model(api_key="abc", argv=("--api-key", "abc")))
    assert isinstance(model, _Model) and model.api_key == REDACTED and model.argv == ("--api-key", REDACTED)


def test_secrets_found_beside_their_name_can_be_removed_elsewhere() -> None:
    """A key that stands in server_info is also removed from a text that merely repeats it."""
    obj = {"server_info": {"api_key": "abc-key"}, "text": "the model said abc-key"}
    assert find_secrets(obj) == ("abc-key",)
    assert "abc-key" not in json.dumps(redact_object(obj, find_secrets(obj)))
    assert find_secrets("x --api-key 'long key' api_key=None HF_TOKEN=abcd") == ("abcd", "long key")


def test_deep_and_hostile_objects_end() -> None:
    """An object nested a thousand levels is cut, not followed for ever."""
    obj: list[object] = []
    for _ in range(1000):
        obj = [obj]
    assert REDACTED in repr(redact_object(obj))


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("api_key", True),
        ("--admin-api-key", True),
        ("HF_TOKEN", True),
        ("ssl_keyfile_password", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("ssl_keyfile", False),
        ("eos_token", False),
        ("EOS_TOKEN", False),
        ("max_tokens", False),
        ("tokenizer_path", False),
        ("key", False),
        ("HF_HUB_DISABLE_IMPLICIT_TOKEN", False),
        ("num_key_value_heads", False),
    ],
)
def test_names(name: str, secret: bool) -> None:
    """The last words of a name decide."""
    assert is_secret_name(name) is secret


def test_ordinary_log_lines_are_fast() -> None:
    """A line without a hint costs microseconds, and a hostile long line does not explode."""
    line = (
        "[2026-05-06 09:15:41 TP0] Decode batch, #running-req: 1, #token: 5, token usage: 0.10, gen throughput: 12.34"
    )
    start = time.perf_counter()
    for _ in range(2000):
        redact_text(line)
    assert (time.perf_counter() - start) / 2000 < 100e-6  # measured about 3 us; the bound only catches a lost prefilter
    for hostile in (
        "'" * 50_000,
        '"api_key' * 6_000,
        "--" * 25_000 + "api-key",
        "\\" * 50_000 + '"api_key',
        "a-" * 30_000 + "key",
        "://" * 20_000,
        "api_key=" + "\\'" * 20_000,
        "api_key='" + "\\" * 40_001,
        "-----BEGIN " + "A" * 50_000,
        "api_key=" + "a'b'" * 15_000,
    ):
        start = time.perf_counter()
        redact_text(hostile)
        assert time.perf_counter() - start < 5
