#!/usr/bin/env bash
# flax 0.12.8 and JAX 0.10.2, CPU: with jax.nn's own attention, linen's multi-head attention has no dropout, whatever its rate says.
#
# nn.MultiHeadDotProductAttention takes another attention as attention_fn. Of dropout_rate, dropout_rng, deterministic and the rest
# it hands over those alone that the function's signature names, and drops the others without a word. jax.nn.dot_product_attention
# names none of dropout's. So a layer with dropout_rate=0.9 trains as one with 0, and its loss, which only looks better, tells nobody.
#
# Seen here: one layer, both functions, two dropout keys, and the layer with rate 0. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
import flax
import flax.linen as nn
import jax

x = jax.random.normal(jax.random.key(0), (2, 16, 32))
found = []
for name, function in (("flax's", nn.dot_product_attention), ("jax.nn's", jax.nn.dot_product_attention)):
    layer = nn.MultiHeadDotProductAttention(num_heads=2, dropout_rate=0.9, deterministic=False, attention_fn=function)
    weights = layer.init({"params": jax.random.key(1), "dropout": jax.random.key(2)}, x)
    one, other = (layer.apply(weights, x, rngs={"dropout": jax.random.key(key)}) for key in (3, 4))
    without = layer.clone(dropout_rate=0.0).apply(weights, x)
    found.append((float(abs(one - other).max()), float(abs(one - without).max())))
    said = "two keys differ by {:.2f}, from rate 0 by {:.2f}".format(*found[-1])
    print(f"flax {flax.__version__}, jax {jax.__version__}, rate 0.9, {name} attention: {said}")
assert min(found[0]) > 0.5 and found[1] == (0.0, 0.0), found
PY
python3 -m venv --without-pip "$folder/venv"
python3 -m pip --python "$folder/venv" install --quiet flax==0.12.8 jax==0.10.2 jaxlib==0.10.2
"$folder/venv/bin/python" "$folder/look.py"
