"""A stand-in for SGLang 0.5.16 with speculation, of the tests' own: run as `python standin_sglang.py -m sglang.launch_server ...`.

It speaks what notebook 04 asks: /health, /server_info, /v1/models, /v1/chat/completions (prompt ids only), /tokenize,
/flush_cache and /generate (streaming or not, log-probabilities), with the `meta_info` fields and the log lines of the recorded
H200 runs (tests/recorded/h200-sglang-0.5.16). Its language model is arithmetic, its time is sleep. It speculates when it
is started with --speculative-algorithm. The environment variable STANDIN (JSON) sets costs, acceptance and lies:

    base_s, cycle_s      seconds of a plain decode step and of a speculative step; load_s, cycle_load_s: more for each
                         request beyond the first that is in flight
    accept               probability that a draft is accepted, by kind of text
    lie                  no_steps | base_speculates
    answers              same | near_tie | wrong      greedy answers with speculation
    parameters           honoured | ignored | otherwise
    sampled              same | other                 the distribution of sampled answers with speculation
    decay, loop          true: acceptance falls with each request; the long answers end in '!!!!', no draft is accepted
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import random
import socket
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

DEFAULT: dict[str, Any] = {
    "base_s": 0.008, "cycle_s": 0.012, "load_s": 0.0, "cycle_load_s": 0.0, "prefill_s": 0.002,
    "accept": {"random": 0.1, "repeating": 0.95, "text": 0.6}, "lie": None, "answers": "same",
    "parameters": "honoured", "sampled": "same", "decay": False, "loop": False,
}  # fmt: skip
STEPS = 3
VOCAB = 4096  # words of text have ids below 1000, so that random ids are told apart


def word_id(word: str) -> int:
    return 10 + zlib.crc32(word.encode()) % 900


def tokenize(text: str) -> list[int]:
    return [word_id(w) for w in text.split()] or [1]


def kind_of(ids: list[int]) -> str:
    if any(i >= 1000 for i in ids):
        return "random"
    return "repeating" if len(set(ids)) < 0.35 * len(ids) else "text"


class Model:
    """Greedy continuation by arithmetic on the last two tokens; every 23rd place or so is a near tie."""

    def __init__(self, config: dict[str, Any], speculative: bool) -> None:
        self.config, self.speculative = config, speculative

    @staticmethod
    def top(context: list[int]) -> list[tuple[float, int]]:
        a, b = context[-1], context[-2] if len(context) > 1 else 1
        first = 10 + (a * 31 + b * 17 + len(context) * 7) % 880
        near = (a + b) % 23 == 0
        gap = 0.01 if near else 1.5
        return [(-0.5, first), (-0.5 - gap, first + 1), (-0.5 - gap - 1.0, first + 2)]

    def next(self, context: list[int], prompt_len: int, sampling: dict[str, Any], dice: random.Random) -> int:
        rows = self.top(context)
        place = len(context) - prompt_len
        verified = self.speculative and place > 0
        treated = self.config["answers"] if verified else "same"
        choice = rows[0][1]
        if treated == "near_tie" and rows[0][0] - rows[1][0] < 0.1:
            choice = rows[1][1]
        if treated == "wrong" and place == 9:
            choice = rows[2][1] + 5
        fate = self.config["parameters"] if verified else "honoured"
        temperature = float(sampling.get("temperature", 1.0))
        if temperature > 0 and not (float(sampling.get("min_p", 0)) >= 1 and fate == "honoured"):
            odds = [0.6, 0.3, 0.1]
            if verified and self.config["sampled"] == "other":
                odds = [0.1, 0.2, 0.7]
            choice = dice.choices([token for _, token in rows], odds)[0]
        penalised = any(
            sampling.get(name) not in (None, 0, 1, 1.0)
            for name in ("frequency_penalty", "presence_penalty", "repetition_penalty")
        )
        if penalised and fate != "ignored" and choice % 3 == 0:
            choice += 40 if fate == "honoured" else 41
        return choice


class Server:
    def __init__(self, arguments: dict[str, str]) -> None:
        self.config = DEFAULT | json.loads(os.environ.get("STANDIN", "{}"))
        self.arguments = arguments
        self.asked = "speculative-algorithm" in arguments
        self.fast_without = self.config["lie"] == "no_steps"
        self.speculates = (self.asked and not self.fast_without) or self.config["lie"] == "base_speculates"
        self.model = Model(self.config, self.speculates)
        self.lock = threading.Lock()
        self.in_flight = 0
        self.seen = 0
        self.random_seed = self.drawn()
        self.lengths: list[float] = []

    def drawn(self) -> int:
        """A seed of its own for each launch, and the same ones when a test is run again: a test at 1% would fail in one of 100."""
        count = Path(self.arguments["model-path"]).parent / "launches"
        with count.open("ab") as file:
            file.write(b".")
        return zlib.crc32(f"{sorted(self.config.items())}-{count.stat().st_size}".encode()) >> 8

    def info(self) -> dict[str, Any]:
        algorithm = "EAGLE" if self.asked else None
        return {
            "version": "0.5.16", "model_path": self.arguments["model-path"], "random_seed": self.random_seed,
            "speculative_algorithm": algorithm, "speculative_num_steps": STEPS if algorithm else None,
            "speculative_eagle_topk": 1 if algorithm else None,
            "speculative_num_draft_tokens": STEPS + 1 if algorithm else None, "tp_size": 1, "kv_cache_dtype": "auto",
            "internal_states": [{"speculative_accept_threshold_single": 1.0}],
        }  # fmt: skip

    def log(self, text: str) -> None:
        print(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text}", flush=True)

    def start_lines(self) -> None:
        self.log("Load weight begin. avail mem=139.09 GB")
        self.log(
            "Load weight end. elapsed=0.16 s, type=Qwen3_5MoeForConditionalGeneration, avail mem=139.04 GB, mem usage=0.06 GB."
        )
        draft = self.asked and self.config["lie"] != "no_steps"
        if draft:
            self.log("Load weight begin. avail mem=139.02 GB")
            self.log(
                "Load weight end. elapsed=0.02 s, type=Qwen3_5ForCausalLMMTP, avail mem=139.01 GB, mem usage=0.01 GB."
            )
        self.log("KV Cache is allocated. dtype: torch.bfloat16, #tokens: 7880505, K size: 15.03 GB, V size: 15.03 GB")
        if draft:
            self.log("KV Cache is allocated. dtype: torch.bfloat16, #tokens: 7880505, K size: 7.52 GB, V size: 7.52 GB")
        running = 48 if self.asked else 1314
        self.log(
            "max_total_num_tokens=7880505, chunked_prefill_size=8192, max_prefill_tokens=16384, "
            f"max_running_requests={running}, context_len=32768, available_gpu_mem=81.57 GB"
        )
        self.log("The server is fired up and ready to roll!")

    def decode_line(self, length: float) -> None:
        rate = (length - 1) / STEPS
        self.log(
            f"Decode batch, #running-req: 1, #full token: 208, full token usage: 0.12, mamba num: 4, mamba usage: 0.00, "
            f"accept len: {length:.2f}, accept rate: {rate:.2f}, cuda graph: True, gen throughput (token/s): 214.98, #queue-req: 0"
        )

    def steps(self, ids: list[int], tokens: int, sampling: dict[str, Any], number: int) -> Any:
        """Yields (output ids so far, counts so far) after each step, in its own time."""
        dice = random.Random(f"{self.random_seed}-{number}")
        kind = kind_of(ids)
        chance = self.config["accept"][kind]
        if self.config["decay"]:
            chance = max(0.0, chance - 0.02 * max(0, number - 10))
        looping = self.config["loop"] and tokens >= 64 and self.speculates
        context = list(ids)
        time.sleep(self.config["prefill_s"])
        context.append(self.model.next(context, len(ids), sampling, dice))
        counts = {"verify": 0, "correct": 0, "histogram": [0] * (STEPS + 1)}
        yield context[len(ids) :], counts
        while len(context) - len(ids) < tokens:
            others = max(0, self.in_flight - 1)
            accepted = 0
            if self.speculates:
                time.sleep(self.config["cycle_s"] + others * self.config["cycle_load_s"])
                while not looping and accepted < STEPS and dice.random() < chance:
                    accepted += 1
                counts["verify"] += 1
                counts["correct"] += accepted
                counts["histogram"][accepted] += 1
            else:
                time.sleep(self.config["base_s"] + others * self.config["load_s"])
            for _ in range(accepted + 1):
                context.append(0 if looping else self.model.next(context, len(ids), sampling, dice))
            yield context[len(ids) : len(ids) + tokens], counts

    def meta(
        self, rid: str, prompt: int, out: list[int], counts: dict[str, Any], number: int, done: bool
    ) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": rid, "finish_reason": {"type": "length", "length": len(out)} if done else None,
            "prompt_tokens": prompt, "completion_tokens": len(out), "cached_tokens": 0, "num_retractions": 0,
        }  # fmt: skip
        if done and self.speculates and counts["verify"]:
            verify = counts["verify"]
            meta |= {
                "spec_accept_length": len(out) / verify, "spec_accept_rate": counts["correct"] / (STEPS * verify),
                "spec_verify_ct": verify, "spec_num_correct_drafts": counts["correct"],
                "spec_num_proposed_drafts": STEPS * verify, "spec_accepted_drafts": counts["correct"],
                "spec_proposed_drafts": STEPS * verify, "spec_correct_drafts_histogram": counts["histogram"],
                "spec_accept_histogram": counts["histogram"],
            }  # fmt: skip
        if done:
            meta["e2e_latency"] = 0.1
        return meta


SERVER: Server


class Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def say(self, body: Any, status: int = 200) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self) -> None:
        known = {"/health": dict, "/server_info": SERVER.info, "/v1/models": lambda: {"data": [{"id": "standin"}]}}
        made = known.get(self.path)
        self.say(made() if made else {"error": "not found"}, 200 if made else 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if self.path == "/flush_cache":
            self.say({})
        elif self.path == "/tokenize":
            self.say({"tokens": tokenize(body["prompt"])})
        elif self.path == "/v1/chat/completions":
            text = "<|user|> " + body["messages"][0]["content"] + " <|assistant|>"
            self.say({"choices": [{"prompt_token_ids": tokenize(text), "message": {"content": "ok"}}]})
        elif self.path == "/generate":
            self.generate(body)
        else:
            self.say({"error": "not found"}, 404)

    def generate(self, body: dict[str, Any]) -> None:
        ids = list(body.get("input_ids") or tokenize(body.get("text", "")))
        if any(not 0 <= i < VOCAB for i in ids):
            os._exit(1)  # an id outside the vocabulary kills the server
        sampling = body.get("sampling_params") or {}
        tokens = int(sampling.get("max_new_tokens", 16))
        rid = body.get("rid") or hashlib.sha256(os.urandom(8)).hexdigest()[:32]
        with SERVER.lock:
            SERVER.in_flight += 1
            SERVER.seen += 1
            number = SERVER.seen
        try:
            if body.get("stream"):
                self.stream(ids, tokens, sampling, rid, number)
            else:
                out, counts = [], {}
                for out, counts in SERVER.steps(ids, tokens, sampling, number):  # noqa: B007
                    pass
                meta = SERVER.meta(rid, len(ids), out, counts, number, True)
                if body.get("return_logprob"):
                    meta["output_top_logprobs"] = [[[p, token, None] for p, token in Model.top(ids)]]
                self.say({"text": " ".join(map(str, out)), "output_ids": out, "meta_info": meta})
            if SERVER.speculates and counts_of(SERVER, number):
                SERVER.decode_line(SERVER.lengths[-1])
        finally:
            with SERVER.lock:
                SERVER.in_flight -= 1

    def stream(self, ids: list[int], tokens: int, sampling: dict[str, Any], rid: str, number: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for out, counts in SERVER.steps(ids, tokens, sampling, number):
            done = len(out) >= tokens
            text = "".join("!" if i == 0 else f" {i}" for i in out)
            payload = {
                "text": text,
                "output_ids": out,
                "meta_info": SERVER.meta(rid, len(ids), out, counts, number, done),
            }
            self.event(b"data: " + json.dumps(payload).encode() + b"\n\n")
            if done and counts["verify"]:
                SERVER.lengths.append(1 + counts["correct"] / counts["verify"])
        self.event(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()

    def event(self, raw: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(raw), raw))
        self.wfile.flush()


def counts_of(server: Server, number: int) -> bool:
    return bool(server.lengths) and number % 2 == 0


class Listening(http.server.ThreadingHTTPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def get_request(self) -> Any:
        sock, address = super().get_request()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock, address


def main() -> None:
    global SERVER
    if sys.argv[1:2] == ["-c"]:
        print("0.5.16")  # what asks for the installed version
        return
    words = sys.argv[3:]
    arguments = {}
    for place, word in enumerate(words):
        if word.startswith("--"):
            following = words[place + 1] if place + 1 < len(words) else ""
            arguments[word[2:]] = "" if following.startswith("--") else following
    SERVER = Server(arguments)
    SERVER.start_lines()
    Listening((arguments.get("host", "127.0.0.1"), int(arguments["port"])), Answers).serve_forever()


if __name__ == "__main__":
    main()
