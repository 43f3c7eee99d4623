#!/usr/bin/env bash
# Equinox 0.13.8 and JAX 0.10.2, CPU: of rotary embeddings with the same head size, the first one called gives its theta to all others.
#
# eqx.nn.RotaryPositionalEmbedding keeps its table of sines and cosines in a dictionary of the module, by head size and dtype. theta is not in
# the key. So a model with theta 1e4 in its local layers and 1e6 in its global ones, as Gemma 3 is, computes every layer with the theta of the layer that
# came first. A longer sequence makes the table anew with the theta of whichever layer sees it: then a layer answers otherwise than before for
# the same input. A model that was trained so and is loaded alone in another process is another model. Nothing warns. Calling
# equinox.nn._embedding.internal_rope_embedding_cache.clear() before each call helps, a layer of one's own is better.
#
# Seen here: two layers beside the formula, in both orders, and the first one before and after a longer call. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from equinox.nn._embedding import internal_rope_embedding_cache as tables


def rotated(x, theta):
    """The same layout by its formula, in float64."""
    x, half = np.asarray(x, np.float64), x.shape[1] // 2
    angles = np.outer(np.arange(len(x)), theta ** (-np.arange(half) / half))
    angles = np.concatenate([angles, angles], axis=1)
    return x * np.cos(angles) + np.concatenate([-x[:, half:], x[:, :half]], axis=1) * np.sin(angles)


def error(layer, x, theta):
    return float(np.abs(np.asarray(layer(x)) - rotated(x, theta)).max())


x = jax.random.normal(jax.random.key(0), (64, 128))
near, far = (eqx.nn.RotaryPositionalEmbedding(128, theta=theta) for theta in (1e4, 1e6))
versions = f"equinox {eqx.__version__}, jax {jax.__version__}"
for order in ((near, far), (far, near)):
    tables.clear()
    first, second = order
    found = [error(first, x, first.theta), error(second, x, second.theta), error(second, x, first.theta)]
    print(f"{versions}: theta {first.theta:g} called first, error {found[0]:.1g}; then theta {second.theta:g}, error {found[1]:.1g},")
    print(f"    but {found[2]:.1g} from the formula with the first one's theta")
    assert found[0] < 1e-4 and found[2] < 1e-4 and found[1] > 1, found

tables.clear()
before = near(x)
far(jnp.concatenate([x, x]))
after = near(x)
apart = float(jnp.abs(after - before).max())
print(f"{versions}: the layer of theta {near.theta:g} before and after another of theta {far.theta:g} saw 128 positions: {apart:.1g} apart")
assert apart > 1, apart
PY
python3 -m venv --without-pip "$folder/venv"
python3 -m pip --python "$folder/venv" install --quiet equinox==0.13.8 jax==0.10.2 jaxlib==0.10.2 numpy==2.3.5
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/look.py"
