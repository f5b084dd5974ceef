"""Interpreters of the tests' own in front of a real SGLang: one that hides a line, one that hangs, one that is wrong under load."""

from __future__ import annotations

import json
import struct
from pathlib import Path

#: Leaves out every line that names a fallback; otherwise the real server.
HIDES = """#!/bin/bash
if [ "$1" = "-c" ]; then exec {python} "$@"; fi
{python} "$@" 2>&1 | grep --line-buffered -v "will fallback"
"""

#: Writes what a server writes at first, and then nothing.
HANGS = """#!/bin/bash
if [ "$1" = "-c" ]; then exec {python} "$@"; fi
echo "[2026-11-29 12:00:00] server_args=ServerArgs(model_path='m')"
echo "[2026-11-29 12:00:01] Load weight begin. avail mem=10.00 GB"
sleep 600
"""

#: Passes everything on to a real server; what comes back while other requests are in flight is another text's.
RACES = """#!{python}
import http.client, http.server, json, os, subprocess, sys, threading
if sys.argv[1] == "-c":
    os.execv("{python}", ["{python}", *sys.argv[1:]])
port = int(sys.argv[sys.argv.index("--port") + 1])
inner = port + 1
words = list(sys.argv[1:])
words[words.index("--port") + 1] = str(inner)
real = subprocess.Popen(["{python}", *words])
threading.Thread(target=lambda: os._exit(real.wait() or 1), daemon=True).start()
lock, now = threading.Lock(), [0]
class Pass(http.server.BaseHTTPRequestHandler):
    def both(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        generating = self.path == "/generate"
        with lock:
            now[0] += generating
        try:
            busy = now[0] > 1
            upstream = http.client.HTTPConnection("127.0.0.1", inner, timeout=120)
            upstream.request(self.command, self.path, body, {{"Content-Type": "application/json"}})
            answer = upstream.getresponse()
            said, code = answer.read(), answer.status
            busy = generating and (busy or now[0] > 1)
        except OSError:
            said, code, busy = b"{{}}", 503, False
        finally:
            with lock:
                now[0] -= generating
        if busy and code == 200:
            made = json.loads(said)
            rows = made["meta_info"].get("input_token_logprobs") or []
            made["meta_info"]["input_token_logprobs"] = [[None if lp is None else lp - 5.0, *rest] for lp, *rest in rows]
            said = json.dumps(made).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)
    do_GET = do_POST = both
    def log_message(self, *_): pass
class Many(http.server.ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 64
Many(("127.0.0.1", port), Pass).serve_forever()
"""


def wrapper(folder: Path, name: str, text: str, python: str) -> str:
    """An executable that stands in for the interpreter `python`."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(text.format(python=python))
    file.chmod(0o755)
    return str(file)


def damaged(model: Path, folder: Path, tensor: str, value: float) -> Path:
    """A copy of a checkpoint in which every number of one bf16 tensor is `value`."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (shard,) = folder.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    assert header[tensor]["dtype"] == "BF16"
    first, last = (8 + size + offset for offset in header[tensor]["data_offsets"])
    data[first:last] = struct.pack("<f", value)[2:] * ((last - first) // 2)
    shard.write_bytes(bytes(data))
    return folder


def misfit(model: Path, folder: Path) -> Path:
    """A copy of a checkpoint whose config.json claims another width of the model than the weights have."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["hidden_size"] += 64
    (folder / "config.json").write_text(json.dumps(config))
    return folder
