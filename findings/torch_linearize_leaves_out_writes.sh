#!/usr/bin/env bash
# PyTorch 2.13.0, CPU: torch.func.linearize gives a wrong linear map, without a word, of a function that writes into a tensor of its own
# through a view.
#
# f(x) = x * s, where s = zeros(2); s[0] = 3. Its value and its jvp are right (3, 0); the map that linearize returns makes (0, 0).
# linearize traces jvp, takes dead code out of the graph and folds what depends on no input. A write through a view (s[0] = 3,
# s[:1].copy_(...)) has no user in that graph, so that it is dead code, and s stays zeros. A write to the tensor itself is kept, and so
# is torch.func.jvp's result. Masks, seeds and tables that a function fills by index are such tensors.
#
# Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy
"$folder/venv/bin/python" -W ignore - <<'PY'
import sys

import torch


def by_index(x):
    s = torch.zeros(2)
    s[0] = 3.0
    return x * s


def by_view(x):
    s = torch.zeros(2)
    s[:1].copy_(torch.full((1,), 3.0))
    return x * s


def whole(x):
    s = torch.zeros(2)
    s.masked_fill_(torch.tensor([True, False]), 3.0)
    return x * s


x = torch.ones(2)
print("torch", torch.__version__)
found = []
for f in (by_index, by_view, whole):
    value, along = torch.func.jvp(f, (x,), (x,))
    again, linear = torch.func.linearize(f, x)
    print(f"{f.__name__}: jvp {along.tolist()}, linearize {linear(x).tolist()}; the values {value.tolist()}, {again.tolist()}")
    found.append(torch.equal(linear(x), along))
sys.exit(found != [False, False, True])
PY
