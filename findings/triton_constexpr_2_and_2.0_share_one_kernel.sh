#!/usr/bin/env bash
# Triton 3.6.0 and 3.9.0, any target: a kernel that was called with the constexpr 2 runs that code again for 2.0, and the other way round.
#
# A constexpr is compiled into the code, each value into its own, and 2 and 2.0 are not the same there: int8 * 2 is int8 and wraps, so that
# 100 becomes -56, and int8 * 2.0 is float32, 200. But a process looks compiled kernels up by ==, as Python's dicts do, where
# 2 == 2.0 and 1 == True. The first call of the process decides for all later ones. On disk they are two kernels, so that each
# call is right in a process of its own, where one looks for the cause. The interpreter compiles nothing and is right in any order.
# A constexpr has no type to be converted to: callers must pass float(scale), or the kernel write x.to(tl.float32) * SCALE.
#
# Seen here without a GPU: what the compiler makes of each call, in both orders, and the interpreter's results. Exit 1 when that changes.
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


class Nothing:  # a driver with no device: compiling asks for the target alone
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 80, 32))


def made(kernel, scale):
    """What a kernel makes of 100 if it is interpreted, else its constant and product."""
    if way == "interpreted":
        kernel[(1,)](torch.tensor([100], dtype=torch.int8), y := torch.empty(1), scale)
        return y.item()
    text = kernel.warmup(torch.int8, torch.float32, scale, grid=(1,)).asm["ttir"]
    return " ".join(re.findall(r"arith.constant (\S+) : \w+", text) + re.findall(r"arith.mul\w", text))


triton.runtime.driver.set_active(Nothing())
way = "interpreted" if os.environ["TRITON_INTERPRET"] == "1" else "compiled"
right = {"2": -56.0, "2.0": 200.0} if way == "interpreted" else {"2": "2 arith.muli", "2.0": "2.000000e+00 arith.mulf"}
for order in ((2, 2.0), (2.0, 2), (2.0,), (2,)):

    @triton.jit
    def scaled(x, y, SCALE: tl.constexpr):
        tl.store(y, tl.load(x) * SCALE)

    found = [made(scaled, scale) for scale in order]
    print(f"triton {triton.__version__}, {way}, int8 * SCALE:", ", then ".join(map("{} gives {}".format, order, found)))
    assert found == [right[str(scale if way == "interpreted" else order[0])] for scale in order], found
PY
python3 -m venv "$folder/venv"
for version in 3.6.0 3.9.0; do
    "$folder/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.3.5 setuptools
    "$folder/venv/bin/python" -m pip install --quiet --no-deps "triton==$version"
    for interpret in 0 1; do
        TRITON_INTERPRET=$interpret TRITON_CACHE_DIR="$folder/cache-$version" "$folder/venv/bin/python" -W ignore "$folder/look.py"
    done
done
