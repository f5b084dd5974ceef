"""A small server of the tests' own with a prefix cache, counters and a pace: what notebook 03's measurements need.

It answers /generate (text or ids, streaming), /v1/completions and /v1/chat/completions, /tokenize (a token a character),
/flush_cache, /v1/models and /metrics. A prompt's first token takes `prefill_s` per token that is not in the cache.
"""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class BenchServer:
    """Counts what SGLang counts; `miscount` adds tokens that no client got, `fail_on` refuses from a request on."""

    def __init__(self, prefill_s: float = 0.00005, step_s: float = 0.002) -> None:
        self.prefill_s, self.step_s = prefill_s, step_s
        self.caching, self.metrics = True, True
        self.miscount = 0
        self.fail_when: Any = lambda body: False
        self.cache: list[tuple[int, ...]] = []
        self.counters = {"generation_tokens": 0, "prompt_tokens": 0, "cached_tokens": 0, "num_requests": 0}
        self.flushes = 0
        self.cut = threading.Event()  # ends every answer where it is
        self.clocks = {"time_to_first_token_seconds": [0.0, 0], "e2e_request_latency_seconds": [0.0, 0]}
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            answer_id = ""

            def log_message(self, *_: object) -> None:
                pass

            def plain(self, body: Any, status: int = 200) -> None:
                raw = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self.plain(outer.metrics_text() if outer.metrics else "", 200 if outer.metrics else 404)
                elif self.path == "/model_info":
                    self.plain({"model_path": "/models/m"})
                elif self.path == "/v1/models":
                    self.plain({"data": [{"id": "m"}]})
                else:
                    self.plain({}, 404)

            def do_POST(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(length) or b"{}")
                if self.path == "/flush_cache":
                    outer.cache.clear()
                    outer.flushes += 1
                    self.plain("Cache flushed.")
                elif self.path == "/tokenize":
                    self.plain({"tokens": [ord(c) % 512 for c in body["prompt"]]})
                elif outer.fail_when(body):
                    self.plain({"error": {"message": "no"}}, 500)
                else:
                    self.answer(body)

            def answer(self, body: dict[str, Any]) -> None:
                prompt = (
                    body.get("input_ids") or body.get("text") or body.get("prompt") or json.dumps(body.get("messages"))
                )
                ids = tuple(prompt) if isinstance(prompt, list) else tuple(ord(c) % 512 for c in prompt)
                sampling = body.get("sampling_params") or body
                tokens = int(sampling.get("max_new_tokens") or sampling.get("max_tokens"))
                began, cached = time.monotonic(), outer.remember(ids)
                self.answer_id = f"c-{time.monotonic_ns()}-{id(body)}"
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                time.sleep((len(ids) - cached) * outer.prefill_s)
                for i in range(tokens):
                    time.sleep(outer.step_s)
                    if outer.cut.is_set():
                        self.close_connection = True
                        return
                    if i == 0:
                        outer.clock("time_to_first_token_seconds", began)
                    if i == tokens - 1:
                        outer.count(len(ids), cached, tokens)
                        outer.clock("e2e_request_latency_seconds", began)
                    self.event(self.piece(body, i, tokens, len(ids), cached))
                if "input_ids" not in body and "text" not in body:
                    usage = {"prompt_tokens": len(ids), "completion_tokens": tokens, "total_tokens": len(ids) + tokens}
                    self.event({"id": self.answer_id, "model": "m", "choices": [], "usage": usage})
                self.event("[DONE]")
                self.wfile.write(b"0\r\n\r\n")

            def piece(self, body: dict[str, Any], i: int, tokens: int, prompt: int, cached: int) -> Any:
                last = i == tokens - 1
                if "input_ids" in body or "text" in body:
                    finish = {"type": "length", "length": tokens} if last else None
                    meta = {
                        "id": body.get("rid"),
                        "finish_reason": finish,
                        "prompt_tokens": prompt,
                        "cached_tokens": cached,
                    }
                    return {
                        "text": "x" * (i + 1),
                        "output_ids": [1] * (i + 1),
                        "meta_info": meta | {"completion_tokens": i + 1},
                    }
                part = {"delta": {"content": "x"}} if "messages" in body else {"text": "x"}
                return {
                    "id": self.answer_id,
                    "model": "m",
                    "choices": [{"index": 0, **part, "finish_reason": "length" if last else None}],
                }

            def event(self, payload: Any) -> None:
                text = payload if isinstance(payload, str) else json.dumps(payload)
                raw = f"data: {text}\n\n".encode()
                self.wfile.write(b"%x\r\n%b\r\n" % (len(raw), raw))
                self.wfile.flush()

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.base_url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def remember(self, ids: tuple[int, ...]) -> int:
        """Tokens of the longest remembered prefix (a lone first token counts too); the prompt is remembered."""
        with self.lock:
            longest = 0
            for known in self.cache if self.caching else ():
                same = 0
                for a, b in zip(known, ids[:-1], strict=False):
                    if a != b:
                        break
                    same += 1
                longest = max(longest, same)
            self.cache.append(ids)
            return longest

    def count(self, prompt: int, cached: int, tokens: int) -> None:
        with self.lock:
            for name, value in (
                ("generation_tokens", tokens + self.miscount),
                ("prompt_tokens", prompt),
                ("cached_tokens", cached),
            ):
                self.counters[name] += value
            self.counters["num_requests"] += 1

    def clock(self, name: str, began: float) -> None:
        with self.lock:
            self.clocks[name][0] += time.monotonic() - began
            self.clocks[name][1] += 1

    def metrics_text(self) -> str:
        with self.lock:
            counts = "".join(
                f'sglang:{name}_total{{model_name="m"}} {value}\n' for name, value in self.counters.items()
            )
            clocks = "".join(f"sglang:{n}_sum {s:.6f}\nsglang:{n}_count {c}\n" for n, (s, c) in self.clocks.items())
            return counts + clocks

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
