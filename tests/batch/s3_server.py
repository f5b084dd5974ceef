"""A server of S3 on loopback (moto) in a process of its own, with a bucket; no request leaves this machine."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import requests

SECRET = "kept-out-of-every-file-4242"


@contextmanager
def s3_server(log: Path, address: str = "127.0.0.1") -> Iterator[str]:
    """The URL of a running server, on loopback or on this machine's end of the lab's network."""
    with log.open("wb") as out:
        server = subprocess.Popen(
            [sys.executable, "-c", f"from moto.server import main; main(['-H', '{address}', '-p', '0'])"],
            stdout=out, stderr=out,
        )  # fmt: skip
        try:
            yield _address(server, log, address)
        finally:
            server.kill()
            server.wait()


def _address(server: subprocess.Popen[bytes], log: Path, address: str) -> str:
    end = time.monotonic() + 30
    while time.monotonic() < end and server.poll() is None:
        text = log.read_text(errors="replace")
        if f"http://{address}:" in text:
            return f"http://{address}:" + text.split(f"http://{address}:")[1].split()[0].strip("\x1b[0m")
        time.sleep(0.05)
    raise AssertionError(f"moto did not start: {log.read_text(errors='replace')[-500:]}")


def environment(url: str) -> dict[str, str]:
    """What boto3 reads from the environment to reach it."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
    }


def new_bucket(url: str) -> str:
    """A bucket of its own: `s3://bucket-.../runs`."""
    name = f"bucket-{uuid.uuid4().hex[:8]}"
    requests.put(f"{url}/{name}", timeout=10).raise_for_status()
    return f"s3://{name}/runs"
