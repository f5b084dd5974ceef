"""An HTTP server that logs like SGLang and misbehaves like it, for hosts on which no SGLang can run. Standard library only.

Started with SGLang's own arguments (`--model-path --host --port --api-key --served-model-name --kv-cache-dtype ...`, others are
taken and shown). What it does was seen on SGLang 0.5.15 (CPU) and 0.5.16 (H200); texts are its logger's:

- nothing listens while it loads (STAND_IN_LOAD_S, default 20); then /health answers 503 until «The server is fired up»;
- SIGTERM is looked at every STAND_IN_POLL_S (5) seconds; idle: it ends by SIGKILL of its own tree (exit code -9, never 0);
- SIGTERM with a stream in flight: «Gracefully exiting... Remaining number of requests 1», for as long as the stream lasts;
- the scheduler is a process of its own; when it dies the server says so, waits 5 s and ends with -9;
- /server_info repeats the requested kv_cache_dtype, the log line tells the allocated one.

Faults by environment: STAND_IN_HEALTH_ONLY=1 (answers /health, and every other question with 500), STAND_IN_DIE=MESSAGE (a
traceback with that message while loading, exit code 1), STAND_IN_HANG_S (accepts, answers nothing for that long),
STAND_IN_KV_DTYPE (allocates another dtype than asked), STAND_IN_TOKENS (size of the pool), STAND_IN_ANSWER (its text),
STAND_IN_TOKEN_S (seconds a token takes), STAND_IN_SCORE_S (seconds that scoring a prompt takes), STAND_IN_VERSION,
STAND_IN_TELL (a JSON file read at each /server_info: `state` is what the scheduler says of itself, `say` lines for the log, once).
"""

from __future__ import annotations

import ctypes
import hmac
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ENV = os.environ
LOAD_S = float(ENV.get("STAND_IN_LOAD_S", "20"))
POLL_S = float(ENV.get("STAND_IN_POLL_S", "5"))
TOKEN_S = float(ENV.get("STAND_IN_TOKEN_S", "0.01"))
ANSWER = ENV.get("STAND_IN_ANSWER", " Paris")
VERSION = ENV.get("STAND_IN_VERSION", "0.5.15.post1")
TOKENS = int(ENV.get("STAND_IN_TOKENS", "65536"))
KINDS = {"auto": "bfloat16", "bf16": "bfloat16", "bfloat16": "bfloat16"}


def arguments(words):
    """SGLang's command line as a dictionary with its own field names."""
    found = {"model_path": None, "host": "127.0.0.1", "port": 30000, "api_key": None, "served_model_name": None,
             "kv_cache_dtype": "auto", "tp_size": 1, "context_length": None, "mem_fraction_static": None, "random_seed": None}  # fmt: skip
    at = 0
    while at < len(words):
        name, equals, value = words[at].partition("=")
        at += 1
        if not name.startswith("--"):
            continue
        if not equals:
            if at < len(words) and not words[at].startswith("--"):
                value, at = words[at], at + 1
            else:
                value = True
        key = {"tp": "tp_size", "model": "model_path"}.get(name[2:], name[2:].replace("-", "_"))
        found[key] = value
    if found.get("config"):  # SGLang's own: a YAML file, here with one scalar a line
        with open(found["config"]) as file:
            for line in file:
                name, colon, value = line.strip().partition(": ")
                if colon:
                    found[name.replace("-", "_")] = json.loads(value)
    found["port"] = int(found["port"])
    found["random_seed"] = int(found["random_seed"] or time.time_ns() % 10**9)
    found["served_model_name"] = found["served_model_name"] or found["model_path"]
    return found


ARGS = arguments(sys.argv[1:])
DTYPE = ENV.get("STAND_IN_KV_DTYPE") or KINDS.get(str(ARGS["kv_cache_dtype"]), str(ARGS["kv_cache_dtype"]))
STATE = {"ready": False, "stopping": False, "scheduler": None, "seed": ARGS["random_seed"]}
REQUESTS = {}
SAID = []
LOCK = threading.Lock()


def say(text):
    """One line of the log, as SGLang stamps it."""
    sys.stderr.write(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text}\n")
    sys.stderr.flush()


def kill_tree():
    """As SGLang ends: SIGKILL to all of it."""
    child = STATE["scheduler"]
    if child is not None and child.poll() is None:
        child.kill()
    os.kill(os.getpid(), signal.SIGKILL)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "uvicorn"

    def log_message(self, *_):
        pass

    def answer(self, code, body, kind="application/json"):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        reasons = {
            200: "OK",
            404: "Not Found",
            401: "Unauthorized",
            500: "Internal Server Error",
            503: "Service Unavailable",
        }
        say(f'INFO:     {self.client_address[0]}:{self.client_address[1]} - "{self.command} {self.path} HTTP/1.1" {code} '
            f"{reasons.get(code, '')}")  # fmt: skip
        self.send_response(code)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def allowed(self):
        key = ARGS["api_key"]
        open_to_all = self.path.startswith(("/health", "/ready", "/metrics"))
        if not key or open_to_all or hmac.compare_digest(self.headers.get("authorization", ""), f"Bearer {key}"):
            return True
        self.answer(401, {"error": "Unauthorized"})
        return False

    def do_GET(self):
        if ENV.get("STAND_IN_HANG_S"):
            time.sleep(float(ENV["STAND_IN_HANG_S"]))
        path = self.path.partition("?")[0]
        if path in ("/health", "/health_generate"):
            self.answer(200 if STATE["ready"] and not STATE["stopping"] else 503, b"")
        elif not self.allowed():
            pass
        elif ENV.get("STAND_IN_HEALTH_ONLY"):
            self.answer(500, {"error": {"message": "Internal Server Error"}})
        elif path in ("/server_info", "/get_server_info"):
            self.answer(200, server_info())
        elif path in ("/model_info", "/get_model_info"):
            self.answer(
                200, {"model_path": ARGS["model_path"], "tokenizer_path": ARGS["model_path"], "is_generation": True}
            )
        elif path == "/v1/models":
            self.answer(200, {"object": "list", "data": [{"id": ARGS["served_model_name"], "object": "model"}]})
        elif path in ("/flush_cache",):
            self.answer(200, b"Cache flushed.\n", "text/plain")
        else:
            self.answer(404, {"detail": "Not Found"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
        if ENV.get("STAND_IN_HANG_S"):
            time.sleep(float(ENV["STAND_IN_HANG_S"]))
        path = self.path.partition("?")[0]
        if not self.allowed():
            return
        if ENV.get("STAND_IN_HEALTH_ONLY"):
            self.answer(500, {"error": {"message": "Internal Server Error"}})
        elif path == "/flush_cache":
            self.answer(200, b"Cache flushed.\n", "text/plain")
        elif path in ("/generate", "/v1/completions", "/v1/chat/completions"):
            self.generate(path, body)
        elif path == "/tokenize":
            ids = [zlib.crc32(word.encode()) % 32000 for word in str(body.get("prompt", "")).split()]
            self.answer(200, {"tokens": ids, "count": len(ids)})
        else:
            self.answer(404, {"detail": "Not Found"})

    def generate(self, path, body):
        rid = str(body.get("rid") or f"{time.time_ns():x}")
        sampling = body.get("sampling_params") or {}
        asked = sampling.get("max_new_tokens") or body.get("max_tokens") or 16
        count = int(asked)
        with LOCK:
            REQUESTS[rid] = time.time()
        say(f"Prefill batch, #new-seq: 1, #new-token: 12, #cached-token: 0, token usage: 0.00, #running-req: "
            f"{len(REQUESTS) - 1}, #queue-req: 0, cpu graph: False, input throughput (token/s): 100.00")  # fmt: skip
        try:
            if body.get("return_logprob") and "input_ids" in body:
                time.sleep(float(ENV.get("STAND_IN_SCORE_S", "0")))
                self.answer(200, scored(rid, body["input_ids"]))
            elif body.get("stream"):
                self.stream(path, rid, count)
            else:
                time.sleep(TOKEN_S * min(count, 1000))
                self.answer(200, whole(path, rid, ANSWER, count))
        except OSError:
            pass
        finally:
            with LOCK:
                REQUESTS.pop(rid, None)

    def stream(self, path, rid, count):
        say(f'INFO:     {self.client_address[0]}:{self.client_address[1]} - "POST {path} HTTP/1.1" 200 OK')
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        text, begun = "", time.monotonic()
        for number in range(1, count + 1):
            # by a clock, not by naps: what a loaded machine delays in one token, the next one has back
            time.sleep(max(0.0, begun + number * TOKEN_S - time.monotonic()))
            piece = ANSWER if number == 1 else f" t{number}"
            text += piece
            last = number == count
            self.event(piece_of(path, rid, piece, text, number, last))
            if number % 40 == 0:
                say(f"Decode batch, #running-req: {len(REQUESTS)}, #token: {number}, token usage: 0.00, cpu graph: False, "
                    f"gen throughput (token/s): {1 / max(TOKEN_S, 1e-6):.2f}, #queue-req: 0")  # fmt: skip
        if path != "/generate":
            self.event({"id": rid, "object": "x", "model": ARGS["served_model_name"], "choices": [],
                        "usage": {"prompt_tokens": 12, "completion_tokens": count, "total_tokens": 12 + count}})  # fmt: skip
        self.chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def event(self, value):
        self.chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def chunk(self, data):
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()


def meta(rid, count, last):
    return {"id": rid, "finish_reason": {"type": "length", "length": count} if last else None, "prompt_tokens": 12,
            "completion_tokens": count, "cached_tokens": 0, "e2e_latency": 0.1}  # fmt: skip


def piece_of(path, rid, piece, text, number, last):
    """One event of a stream, in the endpoint's own form (/generate repeats the text so far)."""
    if path == "/generate":
        return {"text": text, "output_ids": list(range(number)), "meta_info": meta(rid, number, last)}
    choice = {"index": 0, "finish_reason": "length" if last else None}
    choice.update({"delta": {"content": piece}} if "chat" in path else {"text": piece})
    return {"id": rid, "object": "chunk", "model": ARGS["served_model_name"], "choices": [choice], "usage": None}


def scored(rid, ids):
    """A prompt with a log-probability for each of its ids."""
    rows = [[None if not at else -1.0 - (one % 7) / 10, one, None] for at, one in enumerate(ids)]
    return {"text": ANSWER, "output_ids": [1], "meta_info": {**meta(rid, 1, True), "input_token_logprobs": rows}}


def whole(path, rid, text, count):
    """A complete answer, in the endpoint's own form."""
    if path == "/generate":
        return {"text": text, "output_ids": list(range(count)), "meta_info": meta(rid, count, True)}
    choice = {"index": 0, "finish_reason": "length"}
    choice.update({"message": {"role": "assistant", "content": text}} if "chat" in path else {"text": text})
    usage = {"prompt_tokens": 12, "completion_tokens": count, "total_tokens": 12 + count}
    return {"id": rid, "model": ARGS["served_model_name"], "choices": [choice], "usage": usage}


def server_info():
    state = {"last_gen_throughput": 100.0, "kv_cache_dtype": DTYPE, "memory_usage": {"token_capacity": TOKENS}}
    if ENV.get("STAND_IN_TELL"):
        with open(ENV["STAND_IN_TELL"]) as file:
            told = json.load(file)
        state.update(told.get("state", {}))
        for line in told.get("say", []):
            if line not in SAID:
                SAID.append(line)
                say(line)
    return {**ARGS, "version": VERSION, "max_total_num_tokens": TOKENS, "status": "ready", "internal_states": [state]}


def scheduler():
    """A process of its own under SGLang's name for it; it dies with the server and the server with it."""
    code = "import ctypes,os,time;l=ctypes.CDLL(None);l.prctl(1,9);l.prctl(15,b'sglang::schedul');"
    code += f"os.getppid()=={os.getpid()} and time.sleep(1e9)"  # a parent that died before it asked kills nobody
    return subprocess.Popen(["sglang::scheduler", "-IS", "-c", code], executable=sys.executable)


def watch():
    """Ends the server as SGLang does: after SIGTERM when nothing is in flight, or when its scheduler has died."""
    last = time.monotonic()
    while True:
        time.sleep(0.1)
        child = STATE["scheduler"]
        if child is not None and child.poll() is not None:
            say(f"Subprocess scheduler_0 (pid={child.pid}) crashed with exit code {child.returncode}. "
                "Triggering SIGQUIT for cleanup...")  # fmt: skip
            say("Sleeping 5 seconds before crash diagnostics to let GPU activity settle.")
            time.sleep(5)
            kill_tree()
        if STATE["stopping"] and time.monotonic() - last >= POLL_S:
            last = time.monotonic()
            with LOCK:
                left = list(REQUESTS)
            say(
                f"Gracefully exiting... Remaining number of requests {len(left)}. Remaining requests remaining_rids={left}."
            )
            if not left:
                kill_tree()


def told(signum, frame):
    say(f"SIGTERM received. {signum=} frame=None. Draining requests and shutting down...")
    STATE["stopping"] = True


def load(server):
    shown = ", ".join(f"{k}={v!r}" for k, v in ARGS.items() if k != "api_key")
    say(f"server_args=ServerArgs({shown}, api_key={ARGS['api_key']!r})")
    say("Init torch distributed begin.")
    say("Init torch distributed ends. elapsed=0.03 s, mem usage=0.00 GB")
    say("Load weight begin. avail mem=21.64 GB")
    time.sleep(LOAD_S / 2)
    if ENV.get("STAND_IN_DIE"):
        say("Scheduler hit an exception: Traceback (most recent call last):\n"
            '  File "sglang/srt/managers/scheduler.py", line 1, in run_scheduler_process\n'
            f"{ENV['STAND_IN_DIE']}")  # fmt: skip
        os._exit(1)
    say("Load weight end. elapsed=0.05 s, type=Qwen3ForCausalLM, avail mem=21.51 GB, mem usage=0.13 GB.")
    say(f"KV Cache is allocated. dtype: torch.{DTYPE}, #tokens: {TOKENS}, K size: 0.03 GB, V size: 0.03 GB")
    say("Memory pool end. avail mem=21.50 GB")
    say(f"max_total_num_tokens={TOKENS}, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=2048, "
        "context_len=32768, available_gpu_mem=21.50 GB")  # fmt: skip
    STATE["scheduler"] = scheduler()
    say(f"INFO:     Started server process [{os.getpid()}]")
    say("INFO:     Application startup complete.")
    server.server_bind()
    server.server_activate()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    say(f"INFO:     Uvicorn running on http://{ARGS['host']}:{ARGS['port']} (Press CTRL+C to quit)")
    time.sleep(LOAD_S / 2)
    STATE["ready"] = True
    say("The server is fired up and ready to roll!")


def main():
    ctypes.CDLL(None).prctl(15, b"sglang::launch", 0, 0, 0)
    signal.signal(signal.SIGTERM, told)
    threading.Thread(target=watch, daemon=True).start()
    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer.request_queue_size = 128
    server = ThreadingHTTPServer((str(ARGS["host"]), ARGS["port"]), Handler, bind_and_activate=False)
    try:
        load(server)
    except OSError as error:
        say(f"ERROR:    [Errno {error.errno}] error while attempting to bind on address ('{ARGS['host']}', {ARGS['port']}): "
            "address already in use")  # fmt: skip
        os._exit(1)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
