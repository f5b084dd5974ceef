#!/usr/bin/env bash
# A first look on the GPU host, about 90 s: what is there, does the bundle install, does everything import, does SGLang serve
# the tiny model. Prints all that is missing at once. Files go to $OUT: host.json, missing.json, server.log, trace.txt.
set -u
OUT=${OUT:-/tmp/smoke}; mkdir -p "$OUT"
t0=$(date +%s); say() { echo "smoke: $(( $(date +%s) - t0 )) s: $*"; }
python3 lib/deploy/describe_host.py "$OUT/host.json"; say "host described"
. params/h200/setup.sh "$@" || { say "the bundle was refused"; exit 2; }
say "installed"
mkdir -p /tmp/hook /tmp/trace; cp lib/deploy/import_trace.py /tmp/hook/sitecustomize.py
export WORKBOOK_IMPORT_TRACE=/tmp/trace WORKBOOK_IMPORT_PREFIXES="$SITE:$(python3 -c 'import sys; print(sys.prefix)')"
export PYTHONPATH="/tmp/hook:$PYTHONPATH"
# the models and the survey of imports run beside each other: about 25 s
python3 lib/model/make_models.py tiny-qwen3.5-moe > /tmp/models.txt 2>&1 & models=$!
python3 lib/deploy/missing_imports.py sglang.srt.entrypoints.http_server sglang.srt.managers.scheduler sglang.srt.models.qwen3_5 \
  sglang.srt.models.qwen3_5_mtp sglang.srt.speculative.eagle_worker_v2 sglang.benchmark.serving sgl_kernel deep_gemm xgrammar \
  papermill nbconvert ipykernel nbformat ipywidgets lib.runner lib.report.html > "$OUT/missing.json" 2> /tmp/missing.err & survey=$!
python3 -m lib.cli --help > /tmp/cli.txt 2>&1; say "workbook --help: rc $?"
wait $models; say "models: rc $?"; cat /tmp/models.txt
MODEL=$WORKBOOK_CACHE/models/tiny-qwen3.5-moe
setsid python3 -m sglang.launch_server --model-path "$MODEL" --host 127.0.0.1 --port 30000 --attention-backend triton \
  --sampling-backend pytorch --grammar-backend none --mm-attention-backend triton_attn --enable-metrics --mem-fraction-static 0.3 \
  --cuda-graph-max-bs-decode 8 --disable-prefill-cuda-graph ${SMOKE_FLAGS:-} > "$OUT/server.log" 2>&1 & server=$!
wait $survey; code=$?; say "survey of imports: rc $code"; [ $code = 0 ] || tail -20 /tmp/missing.err
python3 - "$OUT/missing.json" <<'P'
import json, sys
try:
    found = json.load(open(sys.argv[1]))
    for name, why in found["failed"].items(): print("FAILED", name, why)
    for name, places in found["absent"].items(): print("absent", name, places)
except ValueError as error: print("no survey:", error)
P
for _ in $(seq "${SMOKE_WAIT:-100}"); do
  kill -0 $server 2>/dev/null || { say "the server ended"; break; }
  python3 -S -c "import urllib.request as u; u.urlopen('http://127.0.0.1:30000/health', timeout=5)" 2>/dev/null && { say "ready"; break; }
  sleep 1
done
python3 -S - <<'P'
import json, urllib.request as u
try:
    body = json.dumps({"text": "def main():", "sampling_params": {"max_new_tokens": 16, "temperature": 0}}).encode()
    print("ANSWER", u.urlopen(u.Request("http://127.0.0.1:30000/generate", body, {"Content-Type": "application/json"}), timeout=30).read()[:600])
except OSError as error: print("NO ANSWER", error)
P
grep -nE "Error|Traceback|No module|not found|Exception" "$OUT/server.log" | head -40; tail -25 "$OUT/server.log" | cut -c1-400
kill -TERM -- -$server 2>/dev/null; sleep 6; kill -KILL -- -$server 2>/dev/null
cat /tmp/trace/*.txt | sort -u > "$OUT/trace.txt"; say "$(wc -l < "$OUT/trace.txt") files opened; done"
mkdir -p /tmp/workbook-jit && tar -C /tmp/workbook-jit -cJf "$OUT/jit.tar.xz" . && ls -l "$OUT"
