"""One GET with a limit on its whole time and size: a control request must end, whatever answers at the address."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import requests

from lib.errors import BadInput

TOTAL_S = 15.0
MAX_BYTES = 32 << 20


class Answer(NamedTuple):
    """Status and body, or why there is none (`problem`); `ended` says that a further request would fail alike."""

    status: int | None
    body: bytes
    problem: str | None = None
    ended: bool = False

    @property
    def text(self) -> str:
        """The body as text; what is no UTF-8 is replaced."""
        return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        """The body as JSON.

        Raises:
            ValueError: if it is none.
        """
        try:
            return json.loads(self.body)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error


def refuse_url_with_secret(base_url: str) -> None:
    """Refuses a URL with a user, password, query or fragment, without repeating it.

    Raises:
        BadInput: for such a URL, or one that cannot be read.
    """
    do = "give it as http://HOST:PORT, for instance http://127.0.0.1:30000, and a key by its environment variable"
    try:
        parts = urlsplit(base_url)
        _ = parts.port
    except ValueError:
        raise BadInput("the server's base URL", "one that cannot be read (not shown)", do) from None
    if any(char in base_url for char in "@?#"):
        raise BadInput("a base URL without a user, a password, ? and #", "one that has them (not shown)", do)


def get_bounded(
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    total_s: float = TOTAL_S,
    max_bytes: int = MAX_BYTES,
    ca_file: Path | None = None,
) -> Answer:
    """GET without redirects, proxies or netrc; it ends after total_s even if the server sends a byte now and then.

    `ca_file` names the certificates to trust under https instead of the usual ones.
    """
    # requests' own timeout is for each read: a server that trickles its headers is only left by leaving the thread
    found: list[Answer] = []
    worker = threading.Thread(target=lambda: found.append(_get(url, headers, total_s, max_bytes, ca_file)), daemon=True)
    worker.start()
    worker.join(total_s + 0.2)
    return found[0] if found else Answer(None, b"", f"no whole answer within {total_s:g} s", True)


def _get(
    url: str, headers: Mapping[str, str] | None, total_s: float, max_bytes: int, ca_file: Path | None = None
) -> Answer:
    end = time.monotonic() + total_s
    session = requests.Session()
    session.trust_env = False
    session.headers.update(headers or {})
    if ca_file is not None:
        session.verify = str(ca_file)
    each = (min(5.0, total_s), min(10.0, total_s))
    try:
        with session, session.get(url, timeout=each, stream=True, allow_redirects=False) as answer:
            body = bytearray()
            for block in answer.iter_content(1 << 16):
                body += block
                if len(body) > max_bytes:
                    return Answer(None, b"", f"more than {max_bytes >> 20} MiB")
                if time.monotonic() > end:
                    return Answer(None, b"", f"no whole answer within {total_s:g} s", True)
            if 300 <= answer.status_code < 400:
                return Answer(answer.status_code, b"", f"HTTP {answer.status_code}, a redirect, which is not followed")
            return Answer(answer.status_code, bytes(body))
    except (requests.RequestException, ValueError) as error:
        words = no_answer_words(error)
        down = isinstance(error, (requests.exceptions.SSLError, requests.Timeout)) or words == "connection refused"
        return Answer(None, b"", words, down)


def no_answer_words(error: Exception) -> str:
    """Why a request got no answer, without the addresses and objects that urllib3 puts around it."""
    if isinstance(error, requests.exceptions.SSLError):
        return f"TLS failed: {_tls_words(error)}"
    if "refused" in str(error) and not isinstance(error, requests.Timeout):
        return "connection refused"
    return type(error).__name__


def _tls_words(error: BaseException) -> str:
    """What the TLS library says, out of the wrappings of urllib3: "certificate verify failed: self-signed ..."."""
    found = re.search(r"(?:\] )?([\w ]+verify failed[^\[(\\]*|[a-z ]*wrong version number)", str(error))
    return found.group(1).strip() if found else type(error).__name__
