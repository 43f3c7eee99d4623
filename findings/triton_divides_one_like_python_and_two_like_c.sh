#!/usr/bin/env bash
# Triton 3.6.0 and 3.9.0, any target: -n // 4 in a kernel rounds down where the argument n is 1, and towards zero where it is 2 or more.
#
# An int argument of 1 is compiled as a constant. Of constants Triton's // and % are Python's, of everything else C's, so that
# -n // 4 is -1 for n = 1, and 0 for n = 2 and 3. The usual way to divide up, -(-n // 4), is 1 for n = 1 (what a test of one
# row sees) and 0 for 2 and 3; -n % 4 is 3 for 1 and -2 for 2. An annotation n: tl.constexpr changes the results of all n. The
# interpreter compiles nothing and has C's results for 1, too, but Python's for constexprs. The documentation says that scalars follow
# Python, and n is one. Of 2 and more that is not so.
#
# Seen here without a GPU: what the compiler makes of an argument and of a constexpr, and the interpreter's results. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
import os
import re

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget


@triton.jit
def divide(out, n):
    tl.store(out, -n // 4)
    tl.store(out + 1, -(-n // 4))
    tl.store(out + 2, -n % 4)


@triton.jit
def divide_constant(out, n: tl.constexpr):
    tl.store(out, -n // 4)
    tl.store(out + 1, -(-n // 4))
    tl.store(out + 2, -n % 4)


class Nothing:  # a driver with no device: compiling asks for the target alone
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 80, 32))


def stored(kernel, n):
    """What a kernel stores: numbers where the compiler knows them, else the operation."""
    if os.environ["TRITON_INTERPRET"] == "1":
        out = torch.zeros(3, dtype=torch.int32)
        kernel[(1,)](out, n)
        return out.tolist()
    text = kernel.warmup(torch.int32, n, grid=(1,)).asm["ttir"]
    names = {name: int(number) if number else operation for name, operation, number in re.findall(r"(%\S+) = (arith\.\w+)(?: (-?\d+) :)?", text)}
    return [names[value] for value in re.findall(r"tt\.store %\S+, (%\S+) :", text)]


python, c = {n: [-n // 4, -(-n // 4), -n % 4] for n in (1, 2, 3)}, {n: [0, 0, -n] for n in (1, 2, 3)}
runs = os.environ["TRITON_INTERPRET"] == "1"
if not runs:
    triton.runtime.driver.set_active(Nothing())
for n in (1, 2, 3):
    argument, constant = stored(divide, n), stored(divide_constant, n)
    said = f"triton {triton.__version__}, {'interpreted' if runs else 'compiled'}, n = {n}: -n // 4, -(-n // 4), -n % 4 are"
    print(f"{said} {argument} of an argument, {constant} of a constexpr; Python {python[n]}, C {c[n]}")
    assert constant == python[n], constant
    compiled = python[1] if n == 1 else ["arith.divsi", "arith.subi", "arith.remsi"]
    assert argument == (c[n] if runs else compiled), argument
PY
python3 -m venv "$folder/venv"
for version in 3.6.0 3.9.0; do
    "$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.3.5 setuptools
    "$folder/venv/bin/python" -m pip install --quiet --no-deps "triton==$version"
    for interpret in 0 1; do
        TRITON_INTERPRET=$interpret TRITON_CACHE_DIR="$folder/cache-$version" "$folder/venv/bin/python" "$folder/look.py"
    done
done
