#!/usr/bin/env bash
# NumPy 2.3.5, CPU: np.einsum("qk,kd->qd") of float16 makes 0.5 of the mean of 4,096 ones, and 0.125 of 16,384; optimize=True and @ make 1.
#
# Weights times values is this product. For operands laid out so, einsum adds each key's share to the result in float16, where 0.5 + 1/4096 is 0.5.
# optimize=True is documented as an optimisation of the order; of one product it hands the work to tensordot, which adds in float32. So the flag
# changes the result by a factor, and so does the same product with `values` stored as (d, k). torch.einsum of the same arrays makes 1 either way.
# With random weights over 4,096 keys the largest error is a tenth where it could be 0.0005: a reference in NumPy is worse than what it judges.
#
# Seen here: attention of equal weights, by length, and the largest relative error of random ones. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
import numpy as np
import torch

product = "qk,kd->qd"


def ways(weights, values):
    across = np.ascontiguousarray(values.T)
    return {
        "einsum": np.einsum(product, weights, values),
        "einsum, optimize=True": np.einsum(product, weights, values, optimize=True),
        "einsum of values stored as (d, k)": np.einsum("qk,dk->qd", weights, across),
        "@": weights @ values,
        f"torch {torch.__version__} einsum": torch.einsum(product, torch.tensor(weights), torch.tensor(values)).numpy(),
    }


for keys in (2048, 4096, 8192, 16384):
    found = ways(np.full((2, keys), 1 / keys, np.float16), np.ones((keys, 8), np.float16))
    means = {name: sorted(set(out.ravel().tolist())) for name, out in found.items()}
    print(f"numpy {np.__version__}, mean of {keys} ones in float16:", ", ".join(f"{name} {mean}" for name, mean in means.items()))
    for name, mean in means.items():
        assert mean == [2048 / keys if name == "einsum" else 1.0], (name, mean)

rng = np.random.default_rng(0)
weights = rng.random((64, 4096))
weights = (weights / weights.sum(1, keepdims=True)).astype(np.float16)
values = rng.random((4096, 64)).astype(np.float16)
right = weights.astype(np.float64) @ values.astype(np.float64)
for name, out in ways(weights, values).items():
    error = np.abs(out / right - 1).max()
    print(f"numpy {np.__version__}, random weights over 4096 keys, {name}: largest relative error {error:.1e}")
    assert error > 0.02 if name == "einsum" else error < 1e-3, (name, error)
PY
python3 -m venv --without-pip "$folder/venv"
python3 -m pip --python "$folder/venv" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" -W ignore "$folder/look.py"
