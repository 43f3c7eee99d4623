#!/usr/bin/env bash
# JAX 0.10.2, CPU: segment_max of e4m3 is NaN, and so is every maximum of e8m0, the type of MX scales; its argmax is always 0.
#
# A maximum starts from minus infinity, and these types have none: converted, it is NaN, and NaN wins. jnp.max and jnp.argmax of e4m3fn were
# mended in 2023 (jax issue 19011). jax.ops.segment_max and segment_min were not, so that an amax by page, group or document of an e4m3 tensor
# is NaN, while of e5m2 it is right. Of float8_e8m0fnu max, min, nanmax, cummax and ptp are NaN, and argmax and argmin are 0 with no NaN to be
# seen, be it a global scale from block scales or the search for the largest. sort, argsort, top_k, jnp.maximum and NumPy with ml_dtypes are
# right for all. Maxima of .astype(jnp.float32) lose nothing.
#
# Seen here: maxima of 1, 4, 2 by each way in each type, one of them compiled. Exit 1 when that changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/look.py" <<'PY'
import jax
import jax.numpy as jnp
import numpy as np

one = jnp.zeros(3, jnp.int32)  # all numbers belong to segment 0
ways = {
    "max": jnp.max,
    "max, compiled": jax.jit(jnp.max),
    "nanmax": jnp.nanmax,
    "min": jnp.min,
    "cummax": lambda x: jax.lax.cummax(x)[-1],
    "argmax": jnp.argmax,
    "argmin": jnp.argmin,
    "segment_max": lambda x: jax.ops.segment_max(x, one, 1)[0],
    "segment_min": lambda x: jax.ops.segment_min(x, one, 1)[0],
    "sort": lambda x: jnp.sort(x)[-1],
    "top_k": lambda x: jax.lax.top_k(x, 1)[0][0],
    "argsort": lambda x: jnp.argsort(x)[-1],
    "numpy max": lambda x: np.max(np.asarray(x)),
    "max in float32": lambda x: jnp.max(x.astype(jnp.float32)),
}
right = {name: {"min": 1.0, "segment_min": 1.0, "argmax": 1.0, "argsort": 1.0, "argmin": 0.0}.get(name, 4.0) for name in ways}
segments = dict.fromkeys(("segment_max", "segment_min"), float("nan"))
every = segments | dict.fromkeys(("max", "max, compiled", "nanmax", "min", "cummax"), float("nan")) | {"argmax": 0.0}
wrong = {"bfloat16": {}, "float8_e5m2": {}, "float8_e4m3fn": segments, "float8_e4m3fnuz": segments, "float8_e5m2fnuz": segments, "float8_e8m0fnu": every}
for dtype, expected in wrong.items():
    x = jnp.asarray([1, 4, 2], dtype)
    found = {name: float(way(x)) for name, way in ways.items()}
    lost = {name: value for name, value in found.items() if value != right[name]}
    print(f"jax {jax.__version__}, 1, 4, 2 of {dtype}: wrong are {lost or 'none'} of {len(ways)} ways")
    assert lost.keys() == expected.keys(), (lost, expected)
    assert all(np.array_equal(lost[name], expected[name], equal_nan=True) for name in lost), lost
PY
python3 -m venv --without-pip "$folder/venv"
python3 -m pip --python "$folder/venv" install --quiet jax==0.10.2 jaxlib==0.10.2 numpy==2.3.5 ml_dtypes==0.6.0
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/look.py"
