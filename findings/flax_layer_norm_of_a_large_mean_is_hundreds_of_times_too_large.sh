#!/usr/bin/env bash
# flax 0.12.8 and JAX 0.10.2, CPU: LayerNorm of rows around 4,096 with a deviation of 1 comes out hundreds of times too large, in float32.
#
# By default linen's and nnx's LayerNorm take the variance for mean(x^2) - mean(x)^2, and jax.nn.standardize always does. Around 4,096 both are
# 1.7e7, whose last bit is 1, so that what is left is noise; where it is negative it counts as 0 and x is divided by sqrt(epsilon). The
# documentation calls this "a faster, but less numerically stable, calculation"; the result is wrong in the third digit around 100, by a third
# around 1,000, and by any factor beyond. Residual streams with one huge channel have such means. use_fast_variance=False is right, as are
# equinox on the same JAX, and PyTorch, whose weights are so often loaded into flax.
#
# Seen here: the largest error and the mean size beside float64, by mean of the rows. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
import equinox
import flax
import flax.linen as nn
import jax
import numpy as np
import torch
from flax import nnx

bare = dict(use_bias=False, use_scale=False)
ways = {
    f"flax {flax.__version__} linen.LayerNorm": lambda x: nn.LayerNorm(**bare).apply({}, x),
    f"flax {flax.__version__} nnx.LayerNorm": nnx.LayerNorm(256, **bare, rngs=nnx.Rngs(0)),
    f"JAX {jax.__version__} nn.standardize": lambda x: jax.nn.standardize(x, epsilon=1e-6),
    "use_fast_variance=False": lambda x: nn.LayerNorm(**bare, use_fast_variance=False).apply({}, x),
    f"equinox {equinox.__version__} LayerNorm": jax.vmap(equinox.nn.LayerNorm(256, eps=1e-6, use_weight=False, use_bias=False)),
    f"torch {torch.__version__} layer_norm": lambda x: torch.nn.functional.layer_norm(torch.tensor(x), (256,), eps=1e-6).numpy(),
}
noise = np.random.default_rng(0).standard_normal((64, 256))
for mean in (0, 100, 1000, 4096):
    x = (mean + noise).astype(np.float32)
    exact = x.astype(np.float64)
    exact = (exact - exact.mean(-1, keepdims=True)) / np.sqrt(exact.var(-1, keepdims=True) + 1e-6)
    for at, (name, normalise) in enumerate(ways.items()):
        out = np.asarray(normalise(x), np.float64)
        error, size = np.abs(out - exact).max(), np.abs(out).mean() / np.abs(exact).mean()
        print(f"{name}, rows around {mean}: largest error {error:.1e}, size {size:.3f} times that in float64")
        if at > 2 or not mean:
            assert error < 1e-3, (name, mean, error)
        else:
            assert error > {100: 1e-3, 1000: 0.2, 4096: 1000.0}[mean], (name, mean, error)
        if at < 3 and mean == 4096:
            assert size > 50, (name, size)
PY
python3 -m venv --without-pip "$folder/venv"
python3 -m pip --python "$folder/venv" install --quiet torch==2.13.0 numpy==2.3.5 jax==0.10.2 flax==0.12.8 equinox==0.13.8
JAX_PLATFORMS=cpu "$folder/venv/bin/python" -W ignore "$folder/look.py"
