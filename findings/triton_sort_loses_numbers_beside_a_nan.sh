#!/usr/bin/env bash
# Triton 3.6.0 and 3.9.0, in the interpreter: tl.sort of numbers with one NaN loses numbers and repeats others; it is no permutation.
#
# Its network compares the two sides of a pair apart: each keeps its own number, or takes the other's, by x > y. Beside a NaN both
# comparisons are false, so one side keeps and the other takes, and a number is there twice. [3, 1, NaN, 2] becomes [1, 2, 2, 3],
# without a NaN. [NaN, 1, 2, 3] becomes four NaN. tl.topk is the same network. NumPy and PyTorch sort NaN behind all numbers.
# The sort is written in Triton's own language, which the interpreter runs as it stands.
#
# Seen here: two sorts, and that of 50 random rows with a NaN not one keeps its numbers. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
import torch
import triton
import triton.language as tl


@triton.jit
def sort(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.sort(tl.load(x + at)))


def sorted_by_triton(x):
    y = torch.empty_like(x)
    sort[(1,)](x, y, len(x))
    return y


nan = float("nan")
for row, wanted in (([3.0, 1.0, nan, 2.0], "[1.0, 2.0, 2.0, 3.0]"), ([nan, 1.0, 2.0, 3.0], "[nan, nan, nan, nan]")):
    found = str(sorted_by_triton(torch.tensor(row)).tolist())
    print(f"triton {triton.__version__}, {row} sorted: {found}")
    assert found == wanted
generator, kept = torch.Generator().manual_seed(0), {True: 0, False: 0}
for with_nan in (True, False):
    for _ in range(50):
        x = torch.randn(64, generator=generator)
        if with_nan:
            x[torch.randint(64, (1,), generator=generator)] = nan
        kept[with_nan] += torch.equal(sorted_by_triton(x).nan_to_num(9.0).sort()[0], x.nan_to_num(9.0).sort()[0])
print(f"triton {triton.__version__}, of 50 rows of 64 keep their numbers: {kept[True]} with a NaN, {kept[False]} without")
assert kept == {True: 0, False: 50}
PY
python3 -m venv --without-pip "$folder/venv"
for version in 3.6.0 3.9.0; do
    python3 -m pip --python "$folder/venv" install --quiet torch==2.13.0 numpy==2.3.5
    python3 -m pip --python "$folder/venv" install --quiet --no-deps "triton==$version"
    TRITON_INTERPRET=1 "$folder/venv/bin/python" "$folder/look.py"
done
