#!/usr/bin/env bash
# Builds .venv-jax, in which the tests of flashtile.jax run: JAX, its CUDA plugin (which needs no GPU), Triton, no PyTorch.
# `make jax` calls it. JAX_PYTHON: the interpreter, 3.12 or newer; by default the first of python3.12, python3.13, python3 that is.
set -euo pipefail
cd "$(dirname "$0")/.."

serves() { "$@" -c 'import sys; sys.exit(not (3, 12) <= sys.version_info < (3, 14))' >/dev/null 2>&1; }
found=
for candidate in ${JAX_PYTHON:-} python3.12 python3.13 python3; do
    if serves "$candidate"; then found=$candidate && break; fi
    # pyenv's shims answer for installed versions only when they are asked for by name
    version=$(pyenv versions --bare 2>/dev/null | grep "^${candidate#python}\\." | tail -1 || true)
    if [ -n "$version" ] && serves env PYENV_VERSION="$version" "$candidate"; then
        found=$(env PYENV_VERSION="$version" "$candidate" -c 'import sys; print(sys.executable)') && break
    fi
done
if [ -z "$found" ]; then
    echo "flashtile.jax is not tested: JAX 0.11 needs Python 3.12 or 3.13 and there is none here (JAX_PYTHON=/path/to/it)." >&2
    exit 3
fi
if [ -L .venv-jax ]; then # another checkout's: building would clear it
    echo ".venv-jax is a link to $(readlink .venv-jax), which is not touched here: run make there, or touch .venv-jax/.ready." >&2
    exit 1
fi
echo "Building .venv-jax, once."
"$found" -m venv --clear .venv-jax
pip() { .venv-jax/bin/python -m pip --disable-pip-version-check "$@"; }
pip install --quiet --no-compile 'pip>=25.1' # the first that knows --group
pip install --quiet --no-compile --group jax
pip install --quiet --no-compile --no-deps jax-cuda13-plugin==0.11.2 # jaxlib's launcher of Triton kernels: 8 MB; lowering needs it alone
