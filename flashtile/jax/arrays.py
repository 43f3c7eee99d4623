"""What every module here says of arrays. It needs no Triton, without which JAX's own programs run too."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

JAX_DTYPES: dict[str, Any] = {
    "fp16": jnp.float16, "bf16": jnp.bfloat16, "fp32": jnp.float32,
    "int8": jnp.int8, "int32": jnp.int32, "int64": jnp.int64, "uint8": jnp.uint8, "bool": jnp.bool_,
}  # fmt: skip
Arrays = dict[str, Any]
