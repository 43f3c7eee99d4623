#!/usr/bin/env bash
# Builds .venv with all that the tests and the checks need, or with "demo" what the demo needs. `make` calls it.
# PYTHON: the interpreter to build on. TORCH: what pip installs as PyTorch where the machine has none for its GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
system=${PYTHON:-python3}
torch=${TORCH:-torch==2.13.0}

if ! "$system" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "flashtile needs Python 3.10 or newer: make PYTHON=/path/to/it" >&2
    exit 1
fi
if [ -L .venv ]; then # another checkout's: building would clear it
    echo ".venv is a link to $(readlink .venv), which is not touched here: run make there, or touch .venv/.ready if it is up to date." >&2
    exit 1
fi
echo "Building .venv, once. PyTorch is a large download."

# A PyTorch that already drives this machine's GPU is better than any that would be installed here.
sees_gpu='import torch; raise SystemExit(not torch.cuda.is_available())'
share=
if "$system" -c "$sees_gpu" 2>/dev/null; then share=--system-site-packages; fi

# Without ensurepip (Debian's python3 without python3-venv) the system's pip puts one in.
if ! "$system" -m venv $share .venv >/dev/null 2>&1; then
    "$system" -m venv --clear --without-pip $share .venv
    "$system" -m pip --python .venv/bin/python install --quiet pip
fi

has() { .venv/bin/python -c "import $1" 2>/dev/null; }
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
# Nothing is compiled to bytecode ahead: Python does so with what it imports, which is little of 240 MB of sources.

pip install --quiet --no-compile --upgrade 'pip>=25.1' # the first that knows --group
if ! has torch; then pip install --no-compile $torch; fi # unquoted: options may follow the name
if ! has triton && [ "$(uname)" = Linux ]; then
    pip install --no-compile triton==3.6.0 || echo "There is no Triton for this machine: flashtile runs on its CPU backend." >&2
fi
if [ "${1:-}" = demo ]; then
    pip install --quiet --no-compile --editable '.[cli]'
    exit
fi
# Beside .venv's own packages, and installed while those are:
beside() { if [ ! -d ".venv/$1" ]; then pip install --quiet --no-compile --no-deps --target ".venv/$1" "${@:2}" || rm -rf ".venv/$1"; fi; }
trap wait EXIT
# The newest Triton: the compile tests compile the kernels with both. Nothing else looks there.
if has triton; then beside newest-triton triton==3.9.0 & fi
# JAX: PyTorch and JAX hand each other tensors in tests/integrations/test_dlpack.py. The last for Python 3.11; 380 MB,
# and without SciPy, which its import does not need. Nothing else looks there.
beside jax jax==0.10.2 jaxlib==0.10.2 opt_einsum &
# onnxruntime: tests/integrations/test_onnx.py runs what torch exports in each. The oldest that the export is for, one that caps
# scores after the mask, and the newest. 40 to 80 MB each. Nothing else looks there.
(
    beside onnxruntime-oldest onnxruntime==1.20.0
    beside onnxruntime-capping onnxruntime==1.23.2
    beside onnxruntime-newest onnxruntime==1.32.0
) &
# Zig, whose compiler of C is clang: the tests compile what `flashtile export` writes with it where the machine has no clang.
beside clang ziglang==0.17.1 &
pip install --quiet --no-compile --editable . --group dev
