#!/usr/bin/env bash
# NumPy 2.3.5 and ml_dtypes 0.6.0 (JAX's bfloat16 and 8-bit floats in NumPy), CPU: one NaN, and np.sort returns an array that is not sorted.
#
# NumPy sorts NaN of its own floats behind all numbers. Of types that it knows by ml_dtypes the comparison says of a NaN that it equals any
# number, so the order is none, and what depends on it is wrong without a warning: argsort, np.unique,
# np.median, np.searchsorted. max and argmax find the NaN. A quantile of weights that JAX brought to the host is then a number at random.
#
# Seen here: sort, argsort and unique of six numbers in four types. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
import ml_dtypes
import numpy as np

numbers = [3.0, np.nan, 1.0, 2.0, 1.0, 0.5]
for dtype in (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
    x = np.array(numbers, dtype)
    ordered, unique = (f(x).astype(np.float32).tolist() for f in (np.sort, np.unique))
    print(f"numpy {np.__version__}, ml_dtypes {ml_dtypes.__version__}, {numbers} of {np.dtype(dtype)}:")
    print(f"    sort {ordered}, argsort {np.argsort(x).tolist()}, unique {unique}")
    if dtype is np.float16:
        assert str(ordered) == "[0.5, 1.0, 1.0, 2.0, 3.0, nan]" and str(unique) == "[0.5, 1.0, 2.0, 3.0, nan]"
    else:
        assert str(ordered) == "[3.0, nan, 0.5, 1.0, 1.0, 2.0]" and np.argsort(x)[0] == 0, ordered
        assert str(unique) == "[3.0, nan, 0.5, 1.0, 2.0]", unique
    assert str(np.sort(np.array([3.0, 1.0, 2.0], dtype)).astype(np.float32).tolist()) == "[1.0, 2.0, 3.0]"
PY
python3 -m venv --without-pip "$folder/venv"
python3 -m pip --python "$folder/venv" install --quiet numpy==2.3.5 ml_dtypes==0.6.0
"$folder/venv/bin/python" "$folder/look.py"
