#!/usr/bin/env bash
# PyTorch 2.13.0 and ml_dtypes 0.6.0 (JAX's and ONNX's types), CPU: the same 8-bit types hold other numbers of the same float32.
#
# e4m3fn beyond its largest, 448: PyTorch stores 448, of infinity too, ml_dtypes NaN. PyTorch's other 8-bit types do not do so: e5m2
# overflows to infinity, and e4m3fnuz and e5m2fnuz to NaN, as ml_dtypes' do. e8m0fnu, which scales blocks of MX formats, has
# neither zero nor sign: PyTorch stores 0 as 2^-127 and drops the sign, so that -3 becomes 4; ml_dtypes stores NaN for both. All other
# bfloat16 numbers become the same in both, in all four types of numbers and in e8m0fnu.
#
# Seen here: every bfloat16 number in each type of both libraries. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
import ml_dtypes
import numpy as np
import torch

numbers = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
for name in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"):
    ours = torch.from_numpy(numbers).to(getattr(torch, f"float8_{name}")).float().numpy()
    theirs = numbers.astype(getattr(ml_dtypes, f"float8_{name}")).astype(np.float32)
    differ = (ours != theirs) & ~(np.isnan(ours) & np.isnan(theirs))
    if name == "e4m3fn":
        wanted = np.abs(numbers) > 464
        assert (np.abs(ours[differ]) == 448).all() and np.isnan(theirs[differ]).all()
    elif name == "e8m0fnu":
        wanted = (numbers == 0) | ((numbers < 0) & ~np.isnan(ours))
        assert np.isnan(theirs[differ]).all()
    else:
        wanted = np.zeros_like(differ)
    assert (differ == wanted).all(), (name, numbers[differ != wanted])
    print(f"torch {torch.__version__}, ml_dtypes {ml_dtypes.__version__}, {name}: {differ.sum()} of 65536 differ")
    for number in (500.0, np.inf, 0.0, -3.0):
        at = np.flatnonzero(numbers == number)[0]
        if differ[at]:
            print(f"    {number} is {ours[at]:.4g} in torch, {theirs[at]:.4g} in ml_dtypes")
PY
python3 -m venv --without-pip "$folder/venv"
python3 -m pip --python "$folder/venv" install --quiet torch==2.13.0 numpy==2.3.5 ml_dtypes==0.6.0
"$folder/venv/bin/python" "$folder/look.py"
