"""Keys and values of 8 bits in JAX: they become numbers of query's dtype, times their scales, and the rest follows."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from flashtile.errors import InvalidProblem
from flashtile.jax.arguments import array, number

STORED = tuple(jnp.dtype(d) for d in (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8))


def numbers_of(
    query: Any, key: Any, value: Any, scales: dict[str, Any], cu_seqlens_k: Any = None, padded: bool = True
) -> tuple[Any, Any]:
    """key and value (slabs, span, heads, head_dim) as `check_operands` takes them.

    scales: k_scale and v_scale, None for 1. cu_seqlens_k: where items begin, of which a scale (items, heads) speaks.
    padded: whether some tokens may not count: scales of tokens are then not looked at.
    """
    if (key.dtype in STORED or value.dtype in STORED) and key.dtype != value.dtype:
        raise InvalidProblem(f"value is {value.dtype} and key is {key.dtype}; they must have one dtype.")
    key, value = (
        _number(name, x, called, scales.get(called), query, cu_seqlens_k, padded)
        for name, x, called in (("key", key, "k_scale"), ("value", value, "v_scale"))
    )
    return key, value


def _number(name: str, x: Any, called: str, scale: Any, query: Any, cu_seqlens_k: Any, padded: bool) -> Any:
    if x.dtype not in STORED:
        if scale is not None:
            raise InvalidProblem(f"{called} is given and {name} is {x.dtype}; it must be float8_e4m3fn, float8_e5m2 or int8.")
        return x
    wide = x.astype(jnp.float32)
    if scale is not None:
        wide *= _rows(called, scale, x, cu_seqlens_k, padded)[..., None]
    return wide.astype(query.dtype)


def _rows(called: str, scale: Any, x: Any, cu_seqlens_k: Any, padded: bool) -> Any:
    """The scale, so that it broadcasts to (slabs, span, heads). Raises InvalidProblem for what is none."""
    known = number(called, scale) if not isinstance(scale, Tracer) else scale
    scale = jnp.asarray(known, jnp.float32) if isinstance(known, (int, float)) else array(called, scale)
    if scale.dtype != jnp.float32:
        raise InvalidProblem(f"{called} is {scale.dtype}; it must be float32: {called}.astype(jnp.float32).")
    slabs, span, heads = x.shape[:3]
    items = slabs if cu_seqlens_k is None else cu_seqlens_k.shape[0] - 1
    token = (slabs, span, heads) if cu_seqlens_k is None else (span, heads)
    if scale.shape not in ((), (1,), (heads,), (items, heads), token):
        raise InvalidProblem(
            f"{called} has shape {scale.shape}; it must be () for a scale of all, ({heads},) for one of each head, "
            f"({items}, {heads}) of each item's head, or {token} of each token's."
        )
    if not isinstance(scale, Tracer) and not (padded and scale.shape == token != (items, heads)):
        held = np.asarray(scale)
        wrong = ~((held > 0) & np.isfinite(held))
        if wrong.any():
            raise InvalidProblem(f"{called} holds {held[wrong][0]}; it must be positive and finite.")
    if scale.shape == (items, heads):
        if cu_seqlens_k is None:
            return scale[:, None]
        item = jnp.searchsorted(cu_seqlens_k[1:], jnp.arange(span), side="right")
        return scale[jnp.minimum(item, items - 1)] if items else jnp.ones((span, heads), jnp.float32)
    return scale
