#!/usr/bin/env bash
# Triton 3.6.0 and 3.9.0: in the interpreter e4m3 of a NaN is 384, of infinity 256, and bfloat16 is cut off instead of rounded.
#
# TRITON_INTERPRET=1 is how kernels are tested without a GPU, also in CI. What it makes of tl.float8e4nv is no rounding of any kind:
# 1000 becomes 256, where PyTorch saturates at 448, as PTX's cvt does by its text; NaN becomes 384, so that a NaN which a kernel must keep is gone; ties
# go up, numbers below 2^-9 to 0. e5m2 makes 98304 of NaN. bfloat16 loses its last bits: 0.3 is 0.2988 and not 0.3008. And in
# 3.6.0 tl.fma rounds twice, so that the error of a product, fma(a, b, -a * b), is always 0; 3.9.0 has it.
#
# Seen here: conversions beside PyTorch's, and the error of one product. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
import torch
import triton
import triton.language as tl


@triton.jit
def convert(x, y, TO: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at).to(TO).to(tl.float32))


@triton.jit
def error(a, y):
    tl.store(y, tl.fma(tl.load(a), tl.load(a), -(tl.load(a) * tl.load(a))))


nan, inf = float("nan"), float("inf")
x = torch.tensor([0.3, 1.0625, 1000.0, nan, inf, 2.0**-10 * 1.5, 448.0, 1.0])
kinds = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2, tl.bfloat16: torch.bfloat16}
found = {}
for kind, theirs in kinds.items():
    y = torch.empty_like(x)
    convert[(1,)](x, y, kind, len(x))
    found[str(kind)] = y.tolist()
    print(f"triton {triton.__version__}, {x.tolist()} as {kind}:\n    {y.tolist()}; PyTorch: {x.to(theirs).float().tolist()}")
assert found["fp8e4nv"] == [0.3125, 1.125, 256.0, 384.0, 256.0, 0.0, 448.0, 1.0], found
assert found["fp8e5"][3] == 98304.0 and found["bf16"][0] == 0.298828125, found
y, a = torch.empty(1), torch.tensor([1 + 2.0**-12])
error[(1,)](a, y)
print(f"triton {triton.__version__}, fma(a, a, -a * a) of 1 + 2^-12: {y.item():.3g}; exactly {2.0**-24:.3g}")
assert y.item() == (2.0**-24 if triton.__version__ == "3.9.0" else 0.0)
PY
python3 -m venv --without-pip "$folder/venv"
for version in 3.6.0 3.9.0; do
    python3 -m pip --python "$folder/venv" install --quiet torch==2.13.0 numpy==2.3.5
    python3 -m pip --python "$folder/venv" install --quiet --no-deps "triton==$version"
    TRITON_INTERPRET=1 "$folder/venv/bin/python" "$folder/look.py"
done
