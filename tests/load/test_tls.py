"""https: a certificate of the tests' own, trusted by option, refused without it, and never a traceback."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
from faulty_server import TEXT, faulty_server

from lib.cli import main
from lib.errors import BadInput
from lib.load import metrics
from lib.load.client import Request, read_level, run_level

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl command to make a certificate with")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1, with its key beside it (made anew, valid for a day)."""
    folder = tmp_path_factory.mktemp("certificate")
    made = folder / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=127.0.0.1", "-addext",
         "subjectAltName=IP:127.0.0.1", "-keyout", str(folder / "key.pem"), "-out", str(made)],
        check=True, capture_output=True,
    )  # fmt: skip
    return made


@pytest.fixture(scope="module")
def context(certificate: Path) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(certificate, certificate.with_name("key.pem"))
    return made


REQUESTS = [Request(f"r{i}", f"FAULT:ok {i}", 9) for i in range(6)]


@pytest.mark.parametrize("api", ["completions", "chat", "generate"])
def test_streams_over_tls(api: str, certificate: Path, context: ssl.SSLContext, tmp_path: Path) -> None:
    """With its CA file the stream is read as over plain HTTP: whole text, exact counts, a time for each event."""
    with faulty_server(gap_s=0.002, tls=context) as server:
        path = run_level(
            server.base_url, api, REQUESTS, out=tmp_path / "l", concurrency=2, model="m", ca_file=certificate,
            keep_text=True, workers=2,
        )  # fmt: skip
    level = read_level(path)
    assert metrics.failures(level) == {}
    assert all(r["text"] == "".join(TEXT) and r["usage"]["completion_tokens"] == 9 for r in level.requests)


def test_an_untrusted_certificate_is_named(context: ssl.SSLContext, tmp_path: Path) -> None:
    """Without the CA file every request is `tls_error` with the library's words, and the level ends soon."""
    with faulty_server(tls=context) as server:
        path = run_level(server.base_url, "completions", REQUESTS * 20, out=tmp_path / "l", concurrency=2, model="m")
    level = read_level(path)
    assert set(metrics.failures(level)) == {"tls_error"} and "self" in level.requests[0]["detail"]
    assert level.header["stopped"] == "server_gone" and level.header["sent"] < 120


def test_tls_to_a_plain_server(tmp_path: Path) -> None:
    """https at a server that speaks plain HTTP is tls_error, not a stall."""
    with faulty_server() as server:
        url = server.base_url.replace("http:", "https:")
        path = run_level(url, "completions", REQUESTS[:2], out=tmp_path / "l", concurrency=1, model="m", connect_timeout_s=3)
    assert set(metrics.failures(read_level(path))) <= {"tls_error", "connect_error", "connect_timeout"}


def test_a_ca_file_that_is_none(tmp_path: Path) -> None:
    """A file without a certificate, and one that is not there, are refused before anything is sent."""
    (tmp_path / "x.pem").write_text("hello")
    for name in ("x.pem", "none.pem"):
        with pytest.raises(BadInput, match="CA file"):
            run_level(
                "https://127.0.0.1:1", "generate", REQUESTS, out=tmp_path / "l", concurrency=1, ca_file=tmp_path / name
            )


def test_the_command_over_tls(
    certificate: Path, context: ssl.SSLContext, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """`workbook bench` says what is wrong with the certificate and which option helps; with it, it measures."""
    monkeypatch.setenv("WORKBOOK_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "t.jsonl"
    text.write_text("".join(json.dumps({"prompt": f"FAULT:ok {i}"}) + "\n" for i in range(9)))
    with faulty_server(gap_s=0.001, tls=context) as server:
        how = ["bench", "--base-url", server.base_url, "--concurrency", "2", "--dataset", str(text), "--output-len", "9",
               "--num-requests", "4", "--no-calibration", "--raw", str(tmp_path / "raw")]  # fmt: skip
        assert main(how) == 1
        error = capsys.readouterr().err
        assert "certificate" in error and "--ca-file" in error and error.count("\n") == 1
        assert main([*how, "--ca-file", str(certificate)]) == 0
        assert main([*how, "--ca-file", "/no/such/file"]) == 2
