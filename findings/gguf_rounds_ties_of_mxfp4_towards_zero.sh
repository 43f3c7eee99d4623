#!/usr/bin/env bash
# gguf 0.19.0 beside torchao 0.18.0 and ml_dtypes 0.6.0, CPU: in MXFP4 a number midway between two becomes the smaller one, not the even one.
#
# The MX specification rounds 4-bit elements to nearest, ties to even. torchao does so, and ml_dtypes' float4_e2m1fn. gguf's quantizer, whose scales are
# torchao's to the bit, takes the first of two equally near numbers in its table: 0.75 becomes 0.5 and not 1, 1.75 becomes 1.5 and not 2,
# and 3.5 becomes 3 and not 4. Random float32 numbers are never ties. But weights come as bfloat16, whose eight bits often end at one: of normal ones one in
# 200 differs between the two files made of it, and every one of these is smaller in gguf's.
#
# Seen here: the ties of one block, and 2^20 random numbers as float32 and bfloat16. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
from importlib.metadata import version

import ml_dtypes
import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from torchao.prototype.mx_formats.mx_tensor import MXTensor

kind = GGMLQuantizationType.MXFP4
names = [f"{name} {version(name)}" for name in ("gguf", "torchao", "ml_dtypes")]


def ways(x):
    """What each makes of rows of 32 numbers; ml_dtypes has no scales and is given those of the format, 2^(floor(log2(largest)) - 2)."""
    scale = 2.0 ** (np.floor(np.log2(np.abs(x).max(-1, keepdims=True))) - 2)
    return [
        dequantize(quantize(x, kind), kind),
        MXTensor.to_mx(torch.tensor(x), torch.float4_e2m1fn_x2, 32).dequantize(torch.float32).numpy(),
        (x / scale).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scale.astype(np.float32),
    ]


block = np.zeros((1, 32), np.float32)
block[0, :8] = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, -5.0]
found = [out[0, 1:8].tolist() for out in ways(block)]
for name, out in zip(names, found):
    print(f"{name}: {block[0, 1:8].tolist()} become {out}")
assert found[0] == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, -4.0] and found[1] == found[2] == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, -4.0], found

x = torch.randn(2**15, 32, generator=torch.manual_seed(0))
for dtype in (torch.float32, torch.bfloat16):
    rows = x.to(dtype).float().numpy()
    theirs, ours, again = ways(rows)
    differ = theirs != ours
    share, smaller = differ.mean(), (np.abs(theirs) < np.abs(ours))[differ].mean() if differ.any() else 0.0
    print(f"{names[0]} beside {names[1]}, 2^20 numbers as {dtype}: {share:.3%} differ, of these {smaller:.0%} are smaller in gguf")
    assert np.array_equal(ours, again)
    assert share > 0.001 and smaller == 1 if dtype is torch.bfloat16 else share < 1e-5, (share, smaller)
PY
python3 -m venv --without-pip "$folder/venv"
python3 -m pip --python "$folder/venv" install --quiet torch==2.13.0 numpy==2.3.5 ml_dtypes==0.6.0 gguf==0.19.0
python3 -m pip --python "$folder/venv" install --quiet --no-deps torchao==0.18.0
"$folder/venv/bin/python" -W ignore "$folder/look.py" 2> >(grep -v -e "Failed to load" -e pytree -e Skipping >&2)
