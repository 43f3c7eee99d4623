"""What every module here says of arrays. It needs no Triton, without which JAX's own programs run too."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

JAX_DTYPES: dict[str, Any] = {
    "fp16": jnp.float16, "bf16": jnp.bfloat16, "fp32": jnp.float32,
    "int8": jnp.int8, "int32": jnp.int32, "int64": jnp.int64, "uint8": jnp.uint8, "bool": jnp.bool_,
}  # fmt: skip
Arrays = dict[str, Any]

Given = ParamSpec("Given")
Made = TypeVar("Made")


def promotes(function: Callable[Given, Made]) -> Callable[Given, Made]:
    """The same function, within which ranks and dtypes are promoted whatever the caller has forbidden in its own code."""

    @wraps(function)
    def inside(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return inside
