#!/usr/bin/env bash
# Types and tests of flashtile.jax in .venv-jax, with so many workers (2 by default). `make jax` calls it.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=.
run() { .venv-jax/bin/python -m pytest -q -n "${1:-2}" --dist worksteal --confcutdir=tests/jax "${@:2}"; }
failed=0
.venv-jax/bin/python -m pyright --pythonpath .venv-jax/bin/python --project tools/pyright-jax.json || failed=1
# Few tests, in one process: each worker more would import JAX and Triton anew for a dozen of them.
TRITON_INTERPRET=1 .venv-jax/bin/python -m pytest -q --confcutdir=tests/jax tests/jax/test_interpreted.py || failed=1
TRITON_INTERPRET=0 run "${1:-2}" tests/jax --deselect tests/jax/test_interpreted.py || failed=1
exit $failed
