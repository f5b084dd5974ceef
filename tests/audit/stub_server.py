"""A stand-in SGLang over HTTP: endpoints and shapes as of 0.5.15, log-probabilities that are a function of the ids, less a loss."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Stub:
    """What the server computes: `loss` nats a token are missing, tokens scatter by `spread`, answers are `answer(prompt)`."""

    def __init__(self, loss: float = 0.0, spread: float = 0.0, answer: Any = None, backend: str = "triton") -> None:
        self.loss, self.spread, self.answer, self.backend = loss, spread, answer or (lambda prompt: "?"), backend
        self.scored = self.flushed = 0
        self.dies_after: int | None = None

    def info(self) -> dict[str, Any]:
        return {
            "version": "0.5.15.post1", "model_path": "/models/stub", "served_model_name": "stub", "attention_backend": self.backend,
            "chunked_prefill_size": 512, "page_size": 1, "max_req_input_len": 4000, "max_total_num_tokens": 100_000,
            "kv_cache_dtype": "auto", "random_seed": 7, "internal_states": [{"kv_cache_dtype": "fp8_e4m3"}],
        }  # fmt: skip

    def logprob(self, ids: list[int], place: int) -> float:
        r = random.Random(str(ids[max(0, place - 3) : place + 1]))
        sound = -3 * r.random() - 0.1
        return (
            sound - self.loss + (random.Random(f"{self.loss}{ids[place - 3 : place + 1]}{place}").gauss(0, self.spread))
        )

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "e2e_latency": 0.01,
            "cached_tokens": 0,
            "prompt_tokens": 1,
            "finish_reason": {"type": "stop"},
        }
        meta["completion_tokens"] = body["sampling_params"]["max_new_tokens"]
        ids = body.get("input_ids")
        if ids is None:
            return {"text": self.answer(body["text"]), "meta_info": meta}
        if body.get("return_logprob"):
            self.scored += 1
            start = body["logprob_start_len"]
            rows = [
                [None, ids[start], None],
                *([self.logprob(ids, i), ids[i], None] for i in range(start + 1, len(ids))),
            ]
            meta["input_token_logprobs"] = rows if start >= 0 else []
            meta["output_token_logprobs"] = [[-1.0, 65, None]] * meta["completion_tokens"]
            if body.get("top_logprobs_num"):
                meta["input_top_logprobs"] = [None, *([[r[0], r[1], None]] for r in rows[1:])]
        return {"text": "", "meta_info": meta}


@contextlib.contextmanager
def serving(stub: Stub) -> Iterator[str]:
    """The stub behind a free port of this machine; gives its URL."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def _send(self, content: Any, code: int = 200) -> None:
            data = json.dumps(content).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            if self.path == "/server_info":
                self._send(stub.info())
            elif self.path == "/v1/models":
                self._send({"data": [{"id": "stub"}]})
            else:
                self._send({}, 404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
            if self.path == "/flush_cache":
                stub.flushed += 1
                self._send({})
            elif self.path == "/tokenize":
                self._send({"tokens": list(body["prompt"].encode())})
            elif self.path == "/detokenize":
                self._send({"text": [chr(t[0]) for t in body["tokens"]]})
            elif self.path == "/generate" and (stub.dies_after is None or stub.scored < stub.dies_after):
                self._send(stub.generate(body))
            else:
                self._send({"error": "gone"}, 500)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
