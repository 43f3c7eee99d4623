#!/usr/bin/env bash
# Triton 3.6.0 to 3.7.1, NVIDIA GPUs with mma.sync (sm_80 code; Hopper too, where tiles are small): a product of 16 terms is wrong
# where its left operand depends on a load of 8 bits and on tl.join.
#
# The compiler gives each thread kWidth neighbouring terms of the operand, and lets four threads share a row, so that a product
# should have 4 * kWidth terms. kWidth comes from the narrowest load that the operand depends on (32 bits / 8 = 4), and a join
# doubles it (8): 32 terms, of which a product of 16 has half. On an H100 such products were off by 1.2 to 2.3 times their largest
# element (fp16 and float32, 4 and 8 warps), products of 32 and 64 terms were right, and so was everything in the interpreter.
# Without the join, or with loads of 16 bits, kWidth is 4, which 16 terms fill. Since 3.8.0 kWidth is 4 here.
#
# Seen here without a GPU: kWidth and the length of the product in the TTGIR of both releases. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
import re

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def product(a_ptr, keep_ptr, weight_ptr, b_ptr, out_ptr, K: tl.constexpr, BYTES: tl.constexpr, JOINS: tl.constexpr):
    row, term, column = tl.arange(0, 16), tl.arange(0, K), tl.arange(0, 128)
    a = tl.load(a_ptr + row[:, None] * K + term[None, :])
    if BYTES:
        a = tl.where(tl.load(keep_ptr + row[:, None] * K + term[None, :]) != 0, a, 0.0)
    if JOINS:
        weight = tl.load(weight_ptr + row[:, None] * (K // 2) + tl.arange(0, K // 2)[None, :])
        a *= tl.reshape(tl.join(weight, weight + 1.0), (16, K))
    b = tl.load(b_ptr + term[:, None] * 128 + column[None, :])
    tl.store(out_ptr + row[:, None] * 128 + column[None, :], tl.dot(a.to(tl.float16), b))


def width(terms, loads_bytes, joins):
    kinds = dict(a_ptr="*fp32", keep_ptr="*i8", weight_ptr="*fp32", b_ptr="*fp16", out_ptr="*fp32")
    signature = {**kinds, "K": "constexpr", "BYTES": "constexpr", "JOINS": "constexpr"}
    source = ASTSource(product, signature=signature, constexprs={(5,): terms, (6,): loads_bytes, (7,): joins})
    text = triton.compile(source, target=GPUTarget("cuda", 80, 32), options=dict(num_warps=4)).asm["ttgir"]
    return int(re.search(r"opIdx = 0, parent = #mma\d*, kWidth = (\d+)", text)[1])


found = {(b, j): width(16, b, j) for b in (False, True) for j in (False, True)}
for (loads_bytes, joins), kwidth in found.items():
    said = "the operand's row is longer than the product" if 4 * kwidth > 16 else "it fits"
    print(f"triton {triton.__version__}, 16 terms, loads of {8 if loads_bytes else 32} bits, join {joins}: kWidth {kwidth}, {said}")
expected = 8 if triton.__version__ < "3.8" else 4
assert found[True, True] == expected, found
assert max(width for kind, width in found.items() if kind != (True, True)) <= 4, found
PY
for version in 3.7.1 3.8.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/python" -m pip install --quiet "triton==$version" numpy setuptools
    TRITON_CACHE_DIR="$folder/cache-$version" "$folder/$version/bin/python" "$folder/look.py"
done
