"""The control plane of a running server over HTTP: what it says about itself, one request at a time.

Load is sent by `lib.load`; this module asks. Answers are redacted where they come in (`/server_info` carries API keys).
Source: SGLang 0.5.15 entrypoints/http_server.py.
"""

from __future__ import annotations

import os
from typing import Any

import requests

from lib.errors import BadInput, ServerError
from lib.server.bounded import no_answer_words
from lib.server.redact import redact_object, redact_text


class Control:
    """Asks one server.

    Args:
        base_url: such as `http://127.0.0.1:30000`.
        api_key_env: name of the environment variable that holds the API key; the key itself is never recorded.
        timeout_s: seconds to wait for an answer to a short question.
        api_key: the key itself, where it is known without a variable of this process.
    """

    def __init__(
        self, base_url: str, api_key_env: str | None = None, timeout_s: float = 30.0, api_key: str | None = None
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.timeout_s = timeout_s
        self.session = requests.Session()
        self.session.trust_env = False
        self.secrets: list[str] = []
        if api_key_env or api_key:
            key = api_key or os.environ.get(api_key_env or "")
            if not key:
                raise BadInput(
                    f"the API key in the environment variable {api_key_env}", "it is not set", f"export {api_key_env}"
                )
            self.session.headers["Authorization"] = f"Bearer {key}"
            self.secrets.append(key)

    def get_json(self, path: str, timeout_s: float | None = None) -> Any:
        """GET and decode; ServerError if there is no answer, no 200, or no JSON."""
        return self._decode(path, self._ask("GET", path, None, timeout_s))

    def post_json(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> Any:
        """POST JSON and decode; ServerError as for `get_json`."""
        return self._decode(path, self._ask("POST", path, body, timeout_s))

    def post_bytes(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> bytes:
        """POST JSON and give the answer's bytes undecoded (long lists of numbers); ServerError if there is no 200."""
        response = self._ask("POST", path, body, timeout_s)
        if response.status_code != 200:
            text = redact_text(response.text[:300], self.secrets)
            raise ServerError(f"{self.base_url}{path} answers 200", f"{response.status_code} {text!r}")
        return response.content

    def _ask(self, method: str, path: str, body: Any, timeout_s: float | None) -> requests.Response:
        try:
            return self.session.request(method, self.base_url + path, json=body, timeout=timeout_s or self.timeout_s)
        except requests.RequestException as error:
            raise ServerError(
                f"an answer from {self.base_url}{path}",
                no_answer_words(error),
                "check that the server runs and that the URL is right",
            ) from error

    def _decode(self, path: str, response: requests.Response) -> Any:
        if response.status_code != 200:
            text = redact_text(response.text[:300], self.secrets)
            raise ServerError(f"{self.base_url}{path} answers 200", f"{response.status_code} {text!r}")
        try:
            return redact_object(response.json(), self.secrets)
        except ValueError as error:
            raise ServerError(
                f"{self.base_url}{path} answers JSON",
                f"{redact_text(response.text[:100], self.secrets)!r}",
                "is this an SGLang server?",
            ) from error

    def health(self, timeout_s: float = 5.0) -> int | None:
        """The status code of /health, None if nothing answers. On SGLang 200 costs about 1 s and a 1-token prefill."""
        try:
            return self.session.get(self.base_url + "/health", timeout=timeout_s).status_code
        except requests.RequestException:
            return None

    def server_info(self) -> dict[str, Any]:
        """Resolved arguments, version and internal states, redacted."""
        info = self.get_json("/server_info")
        if not isinstance(info, dict) or "version" not in info:
            raise ServerError(
                f"{self.base_url}/server_info is SGLang's",
                f"keys {sorted(info)[:8] if isinstance(info, dict) else info!r}",
            )
        return info

    def served_model_name(self) -> str:
        """The model's name as requests must use it, from /v1/models (never assumed)."""
        models = self.get_json("/v1/models").get("data") or []
        if not models:
            raise ServerError("/v1/models names a model", "an empty list")
        return str(models[0]["id"])

    def metrics_text(self) -> str | None:
        """The text of /metrics, None where the server exports none (`--enable-metrics` not given)."""
        response = self._ask("GET", "/metrics", None, None)
        return redact_text(response.text, self.secrets) if response.status_code == 200 else None

    def flush_cache(self) -> None:
        """Empties the prefix cache; ServerError if requests are running (SGLang answers 400 then)."""
        response = self._ask("POST", "/flush_cache", None, None)
        if response.status_code != 200:
            raise ServerError(
                "/flush_cache empties the cache",
                f"{response.status_code} {response.text[:200]!r}",
                "wait until no request runs",
            )

    def generate(self, body: dict[str, Any], timeout_s: float = 600.0) -> dict[str, Any]:
        """One non-streaming /generate."""
        answer = self.post_json("/generate", body, timeout_s)
        if not isinstance(answer, dict) or "meta_info" not in answer:
            raise ServerError("/generate answers one object with meta_info", f"{str(answer)[:200]!r}")
        return answer
