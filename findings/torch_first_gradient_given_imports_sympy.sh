#!/usr/bin/env bash
# PyTorch 2.13.0, CPU: the first backward of a process that is given a gradient imports sympy and 480 modules with it; that of a loss
# does not.
#
# y.backward(g) and torch.autograd.grad(y, x, g) ask for symbolic shapes to compare g's shape with y's, whether anything is symbolic or
# not: about 500 modules, 0.5 s of a core here and more than 3 s where files are slow. loss.backward() makes its own gradient of one, and
# imports nothing. So whoever times "a first call, forward and backward" with a given gradient times that import, and lays it to kernels.
# The second one costs nothing.
#
# Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy
cat >"$folder/first.py" <<'PY'
import sys
import time

import torch

given = sys.argv[1] == "given"
x = torch.ones(3, requires_grad=True)
y = x * 2
before = set(sys.modules)
began = time.perf_counter()
if given:
    y.backward(torch.ones(3))
else:
    y.sum().backward()
took = time.perf_counter() - began
new = set(sys.modules) - before
print(f"torch {torch.__version__}, {sys.argv[1]}: {len(new)} modules more, sympy {'sympy' in new}, {took:.3f} s; gradient {x.grad.tolist()}")
sys.exit(("sympy" in new and len(new) > 300) != given)
PY
"$folder/venv/bin/python" -W ignore "$folder/first.py" loss
"$folder/venv/bin/python" -W ignore "$folder/first.py" given
