#!/usr/bin/env bash
# Triton 3.6.0 to 3.7.1, any target: what an outer loop carries for the bounds of an inner loop alone keeps its first value.
#
#     first = 0
#     for i in range(n):
#         for j in range(first, first + 4):
#             total += tl.load(x + j)
#         first += 4
#
# adds x[0:4] n times where it should add x[0 : 4 * n]. TTIR still has the moving bounds; in TTGIR they are the constants 0 and 4, and
# the outer loop carries the sum alone. Nothing warns. A kernel of ours hung on a GPU by it: its loader brought fewer tiles than
# its consumers waited for. The code is right where the inner loop's body reads `first` too. Since 3.8.0 it is right as written.
#
# Seen here without a GPU: the bounds of the inner loop in the TTIR and TTGIR of both releases. Exit 1 when that changes.
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
def windows(x, out, n):
    first = 0
    total = 0
    for i in range(n):
        for j in range(first, first + 4):
            total += tl.load(x + j)
        first += 4
    tl.store(out, total)


def bounds(text):
    return re.findall(r"scf\.for \S+ = (\S+) to (\S+) step", text)[1]


for target in (GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)):
    source = ASTSource(windows, signature=dict(x="*i32", out="*i32", n="i32"))
    asm = triton.compile(source, target=target, options=dict(num_warps=1)).asm
    before, after = bounds(asm["ttir"]), bounds(asm["ttgir"])
    frozen = after == ("%c0_i32", "%c4_i32")
    print(f"triton {triton.__version__}, {target.backend} {target.arch}: {' to '.join(before)} in TTIR, {' to '.join(after)} in TTGIR")
    assert before[0] == "%first", before
    assert frozen == (triton.__version__ < "3.8"), after
PY
for version in 3.7.1 3.8.0; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/python" -m pip install --quiet "triton==$version" numpy==2.3.5 setuptools
    TRITON_INTERPRET=0 TRITON_CACHE_DIR="$folder/cache-$version" "$folder/$version/bin/python" "$folder/look.py"
done
