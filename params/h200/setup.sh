# Sourced on the GPU host, in the repository's root: installs the bundle and sets the environment.
#   . params/h200/setup.sh [BUNDLE-FOLDER [MORE-FOLDERS WITH PARTS]]
# SITE (default /tmp/workbook-site) is where it is unpacked; JIT caches that travel in <bundle>/jit.tar.xz are put back.
BUNDLE=${1:-.bundle}
SITE=${SITE:-/tmp/workbook-site}
also=""
for more in "${@:2}"; do also="$also --also $more"; done
if ! cmp -s "$BUNDLE/bundle.json" "$SITE/bundle.json"; then
  # shellcheck disable=SC2086
  python3 "$BUNDLE/install.py" "$SITE" $also || return 2
fi
export PYTHONPATH="$PWD:$SITE" JUPYTER_PATH="$SITE/share/jupyter" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export WORKBOOK_CACHE=${WORKBOOK_CACHE:-/tmp/workbook-cache} MPLBACKEND=Agg
export PATH="$PATH:/usr/local/cuda/bin"
if [ -f "$BUNDLE/jit.tar.xz" ] && [ ! -d /tmp/workbook-jit ]; then
  mkdir -p /tmp/workbook-jit && tar -xJf "$BUNDLE/jit.tar.xz" -C /tmp/workbook-jit
fi
export TRITON_CACHE_DIR=/tmp/workbook-jit/triton TVM_FFI_CACHE_DIR=/tmp/workbook-jit/tvm-ffi FLASHINFER_WORKSPACE_BASE=/tmp/workbook-jit/flashinfer
export TORCHINDUCTOR_CACHE_DIR=/tmp/workbook-jit/inductor SGLANG_CACHE_DIR=/tmp/workbook-jit/sglang XDG_CACHE_HOME=/tmp/workbook-jit/xdg
export SGLANG_DG_CACHE_DIR=/tmp/workbook-jit/deep_gemm
workbook() { python3 -m lib.cli "$@"; }
