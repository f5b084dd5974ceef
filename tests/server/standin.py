#!/usr/bin/env python3
"""A stand-in for SGLang: its command line, its log lines and its HTTP answers with made-up numbers, in a second.

`--attention-backend` and the variable SGLANG_STANDIN choose what it does (see MODES). Standard library only: it is the
`server.python` of a test's profile and is called as an interpreter would be.
"""

from __future__ import annotations

import http.server
import json
import os
import sys
import threading
import time

#: What SGLANG_STANDIN may say; without it the stand-in works.
MODES = {
    "off": "every log-probability is 0.2 nat off",
    "far": "every log-probability is 3 nat off",
    "nan": "log-probabilities that are none",
    "zeros": "log-probabilities that are all 0",
    "wrong": "the known answer is another",
    "degenerate": "one character repeated",
    "decode": "decoding disagrees with prefill",
    "race": "right alone, wrong while another request is in flight",
    "race-short": "right alone, wrong for short pieces while another request is in flight",
    "race-decode": "right alone, what it continues while another request is in flight is another text's",
    "refuses-long": "answers 500 to a long text",
    "silent": "never answers /generate",
    "silent-load": "stops answering while several requests are in flight",
    "compiles-load": "compiles and does not answer while several requests are in flight",
    "dies": "ends while it is asked",
    "dies-load": "ends while several requests are in flight",
    "refuses-load": "answers 500 while several requests are in flight",
    "hangs": "stops writing while it starts, and rests",
    "compiles": "stops writing while it starts, and says that it compiles, and computes",
    "spins": "stops writing while it starts, and computes",
    "no-amx": "says that it runs torch_native instead",
}
VERSION = "0.5.15.post1"


def say(text: str) -> None:
    print(f"[2026-11-29 12:00:00] {text}", flush=True)


def option(name: str, default: str = "") -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


BACKEND = option("--attention-backend")
MODE = os.environ.get("SGLANG_STANDIN", "")
IN_FLIGHT = 0
LOCK = threading.Lock()


def logprob(token: int, place: int) -> float:
    """The same number on every run; `triton` sums in another order."""
    value = -1.0 - ((token * 7919 + place * 104729) % 1000) / 500
    return value + (1e-4 if BACKEND == "triton" else 0.0) + {"off": 0.2, "far": -3.0}.get(MODE, 0.0)


def generate(body: dict, busy: bool) -> dict:
    new = body["sampling_params"]["max_new_tokens"]
    ids = body.get("input_ids") or [1, 2, 3]
    rows = [[None, ids[0], None], *([logprob(t, i), t, None] for i, t in enumerate(ids[1:], 1))]
    out = [(ids[-1] * 31 + 7 * i) % 997 for i in range(new)]
    lps = [logprob(t, len(ids) + i) - (2.0 if MODE == "decode" else 0.0) for i, t in enumerate(out)]
    text = " Paris, the city of" if "text" in body else "".join(f" w{t}" for t in out)
    if MODE == "race-decode" and busy and "input_ids" in body and new > 1:
        lps = [lp - 4.0 for lp in lps]
    short = MODE == "race-short" and busy and len(ids) <= 16
    if MODE == "nan":
        rows = [[None, t, None] for _, t, _ in rows]
    if MODE == "zeros":
        rows = [rows[0], *([0.0, t, None] for _, t, _ in rows[1:])]
    if MODE == "wrong" and "text" in body:
        text = " Berlin"
    if MODE == "degenerate" or (MODE == "race" and busy):
        text = "!" * 20
    if (MODE == "race" and busy) or short:
        rows = [rows[0], *([lp - 4.0, t, None] for lp, t, _ in rows[1:])]
    meta = {"prompt_tokens": len(ids), "completion_tokens": new, "e2e_latency": 0.01}
    if body.get("return_logprob"):
        meta["input_token_logprobs"] = rows
        meta["output_token_logprobs"] = [[lp, t, None] for lp, t in zip(lps, out, strict=True)]
    return {"text": text, "meta_info": meta}


class Answers(http.server.BaseHTTPRequestHandler):
    def send(self, said: object, code: int = 200) -> None:
        body = json.dumps(said).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        info = {
            "version": VERSION,
            "model_path": option("--model-path"),
            "random_seed": 42,
            "attention_backend": BACKEND,
        }
        said = {"/health": {}, "/server_info": info, "/v1/models": {"data": [{"id": "standin"}]}}.get(self.path)
        self.send(said if said is not None else {}, 200 if said is not None else 404)

    def do_POST(self) -> None:
        global IN_FLIGHT
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        if self.path == "/flush_cache":
            return self.send({})
        if self.path == "/tokenize":
            return self.send({"tokens": [(ord(c) * 31 + i) % 997 for i, c in enumerate(body["prompt"])]})
        if self.path == "/v1/completions":
            return self.stream(body)
        with LOCK:
            IN_FLIGHT += 1
        # On a loaded machine the second of two requests sent at once may be late: those that race wait for it.
        until = time.monotonic() + (0.3 if MODE.startswith("race") else 0.03)
        while time.monotonic() < until and not (IN_FLIGHT > 1 and MODE.startswith("race")):
            time.sleep(0.01)
        busy = IN_FLIGHT > 1
        if MODE == "dies" or (MODE == "dies-load" and busy):
            say("Scheduler hit an exception: Traceback (most recent call last):")
            print("RuntimeError: CUDA error: an illegal memory access was encountered", flush=True)
            os._exit(1)
        if MODE == "compiles-load" and busy:
            say("Compiling kernel fused_moe")
            burn(300)
        if MODE == "silent" or (MODE == "silent-load" and busy):
            time.sleep(300)
        try:
            long = len(body.get("input_ids", ())) > 40
            refused = (MODE == "refuses-load" and busy) or (MODE == "refuses-long" and long)
            self.send({"error": "no"} if refused else generate(body, busy), 500 if refused else 200)
        finally:
            with LOCK:
                IN_FLIGHT -= 1

    def stream(self, body: dict) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for i in range(body["max_tokens"]):
            time.sleep(0.002)
            choice = {"index": 0, "text": f" w{i}", "finish_reason": "length" if i + 1 == body["max_tokens"] else None}
            self.event({"id": "x", "choices": [choice]})
        self.event({"id": "x", "choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": body["max_tokens"]}})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def event(self, said: object) -> None:
        self.wfile.write(b"data: " + json.dumps(said).encode() + b"\n\n")
        self.wfile.flush()

    def log_message(self, *_: object) -> None: ...


class Listening(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


def burn(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10000))


def main() -> None:
    if sys.argv[1] == "-c":
        print(VERSION)
        return
    if BACKEND == "flashinfer":
        print(
            "importlib.metadata.PackageNotFoundError: No package metadata was found for flashinfer_python", flush=True
        )
        sys.exit(1)
    say(f"server_args=ServerArgs(model_path='m', attention_backend='{BACKEND}')")
    if MODE == "no-amx":
        say("The current platform does not support Intel AMX, will fallback to torch_native backend.")
    say("Load weight begin. avail mem=10.00 GB")
    if MODE in ("hangs", "compiles", "spins"):
        if MODE == "compiles":
            say("Running FlashInfer autotune with cache: /tmp/x")
        burn(300) if MODE != "hangs" else time.sleep(300)
    say("Load weight end. elapsed=0.10 s, type=Standin, avail mem=9.00 GB, mem usage=1.00 GB.")
    server = Listening((option("--host", "127.0.0.1"), int(option("--port"))), Answers)
    say("The server is fired up and ready to roll!")
    server.serve_forever()


if __name__ == "__main__":
    main()
