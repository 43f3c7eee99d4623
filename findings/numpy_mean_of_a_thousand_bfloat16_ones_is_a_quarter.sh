#!/usr/bin/env bash
# NumPy 2.3.5 and ml_dtypes 0.6.0 (JAX's bfloat16 in NumPy), CPU: the mean of a thousand bfloat16 ones is 0.256, without a warning.
#
# NumPy forms the mean of its own float16 in float32, and adds in pairs. A type that it knows by ml_dtypes gets neither: `sum` adds
# one number after another in bfloat16, where 256 + 1 is 256, and `mean` divides that. The dot product of the same arrays is right. So a
# statistic of an array that JAX brought to the host may be off by any factor.
#
# Seen here: sum, mean and a dot product of both types. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
import ml_dtypes
import numpy as np

found = {}
for dtype in (np.float16, ml_dtypes.bfloat16):
    ones = np.ones(1000, dtype)
    found[dtype] = [float(x) for x in (ones.sum(), ones.mean(), ones @ ones)]
    names = ("sum", "mean", "dot product with itself")
    said = ", ".join(f"{name} {value:.4g}" for name, value in zip(names, found[dtype]))
    print(f"numpy {np.__version__}, ml_dtypes {ml_dtypes.__version__}, 1000 ones of {np.dtype(dtype)}: {said}")
assert found[np.float16] == [1000.0, 1.0, 1000.0], found
assert found[ml_dtypes.bfloat16] == [256.0, 0.255859375, 1000.0], found
PY
python3 -m venv --without-pip "$folder/venv"
python3 -m pip --python "$folder/venv" install --quiet numpy==2.3.5 ml_dtypes==0.6.0
"$folder/venv/bin/python" "$folder/look.py"
