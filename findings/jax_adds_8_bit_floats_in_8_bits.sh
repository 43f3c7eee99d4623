#!/usr/bin/env bash
# JAX 0.10.2, CPU: a sum of 8-bit floats is formed in 8 bits, so the mean of a thousand e4m3 ones is NaN and of e5m2 ones 1/16.
#
# jnp.sum and jnp.mean form sums of float16 and bfloat16 in float32 and round once. Of float8 they do not: partial sums stop where a one
# is lost (at 16 of e4m3, at 8 of e5m2), and mean divides by a thousand in e4m3, where that is NaN, for e4m3 ends at 448. jnp.dot of the same
# arrays adds up in float32. An amax, the usual statistic of such tensors, is a maximum and right; a mean or a norm needs .astype(jnp.float32).
#
# Seen here: sum, mean and a dot product of a thousand ones in four types. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
import jax
import jax.numpy as jnp

found = {}
for dtype in (jnp.float16, jnp.bfloat16, jnp.float8_e5m2, jnp.float8_e4m3fn):
    ones = jnp.ones(1000, dtype)
    name = jnp.dtype(dtype).name
    found[name] = [float(x) for x in (ones.sum(), ones.mean(), jnp.dot(ones, ones, preferred_element_type=jnp.float32))]
    print(f"jax {jax.__version__}, 1000 ones of {name}: sum {found[name][0]:g}, mean {found[name][1]:g}, dot {found[name][2]:g}")
assert found["float16"] == found["bfloat16"] == [1000.0, 1.0, 1000.0], found
assert found["float8_e5m2"][0] <= 256 and found["float8_e5m2"][1] == 0.0625 and found["float8_e5m2"][2] == 1000.0, found
assert found["float8_e4m3fn"][0] <= 256 and found["float8_e4m3fn"][1] != found["float8_e4m3fn"][1], found
PY
python3 -m venv --without-pip "$folder/venv"
python3 -m pip --python "$folder/venv" install --quiet jax==0.10.2 jaxlib==0.10.2 numpy==2.3.5
"$folder/venv/bin/python" "$folder/look.py"
