"""Keys and values of 8 bits in JAX. Kernels read them as they are; elsewhere, and to differentiate, they become numbers of
query's dtype, times their scales, and the rest follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from flashtile.errors import InvalidProblem
from flashtile.jax import blockwise, derivatives
from flashtile.jax.arguments import array, number
from flashtile.jax.arrays import Arrays, promotes
from flashtile.jax.batching import run_mapped
from flashtile.jax.derivatives import Call
from flashtile.jax.step import Forward
from flashtile.jax.symbolic import symbols
from flashtile.plan.buffers import input_buffers
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.stored import Scaling, Stored

KINDS: dict[str, Any] = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2, "int8": jnp.int8}
NAMES = {jnp.dtype(kind): name for name, kind in KINDS.items()}
STORED = tuple(NAMES)


def numbers_of(
    query: Any, key: Any, value: Any, scales: dict[str, Any], cu_seqlens_k: Any = None, padded: bool = True
) -> tuple[Any, Any]:
    """key and value (slabs, span, heads, head_dim) as `check_operands` takes them.

    scales: k_scale and v_scale, None for 1. cu_seqlens_k: where items begin, of which a scale (items, heads) speaks.
    padded: whether some tokens may not count: scales of tokens are then not looked at.
    """
    _check_alike(key, value)
    key, value = (
        _number(name, x, called, scales.get(called), query, cu_seqlens_k, padded)
        for name, x, called in (("key", key, "k_scale"), ("value", value, "v_scale"))
    )
    return key, value


def _check_alike(key: Any, value: Any) -> None:
    if (key.dtype in STORED or value.dtype in STORED) and key.dtype != value.dtype:
        raise InvalidProblem(f"value is {value.dtype} and key is {key.dtype}; they must have one dtype.")


def _number(name: str, x: Any, called: str, scale: Any, query: Any, cu_seqlens_k: Any, padded: bool) -> Any:
    if x.dtype not in STORED:
        if scale is not None:
            raise InvalidProblem(f"{called} is given and {name} is {x.dtype}; it must be float8_e4m3fn, float8_e5m2 or int8.")
        return x
    rows = None if scale is None else _rows(_checked(called, scale, x, cu_seqlens_k, padded), x, cu_seqlens_k)
    return _times(x, rows, query.dtype)


def _times(x: Any, rows: Any, dtype: Any) -> Any:
    """What is stored times its scales, if it has any, in a dtype."""
    wide = x.astype(jnp.float32)
    return (wide if rows is None else wide * rows[..., None]).astype(dtype)


def _checked(called: str, scale: Any, x: Any, cu_seqlens_k: Any, padded: bool) -> Any:
    """The scale as an array. Raises InvalidProblem for what is none."""
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
    return scale


def _rows(scale: Any, x: Any, cu_seqlens_k: Any) -> Any:
    """A scale, so that it broadcasts to (slabs, span, heads)."""
    slabs, span, heads = x.shape[:3]
    items = slabs if cu_seqlens_k is None else cu_seqlens_k.shape[0] - 1
    if scale.shape == (items, heads):
        if cu_seqlens_k is None:
            return scale[:, None]
        item = jnp.searchsorted(cu_seqlens_k[1:], jnp.arange(span), side="right")
        return scale[jnp.minimum(item, items - 1)] if items else jnp.ones((span, heads), jnp.float32)
    return scale


def is_read(query: Any, key: Any, value: Any) -> bool:
    """Whether kernels may read keys and values as they are stored: there are kernels for such queries, of known sizes."""
    _check_alike(key, value)
    sizes = (*query.shape, *key.shape, *value.shape)
    return key.dtype in STORED and query.dtype in (jnp.bfloat16, jnp.float16) and not symbols(sizes)


def described_stored(
    key: Any, value: Any, scales: dict[str, Any], cu_seqlens_k: Any = None, padded: bool = True
) -> tuple[Stored, Arrays]:
    """How keys and values are stored, and their scales as a problem's inputs have them. As in `numbers_of`."""
    made: Arrays = {}
    how: dict[str, Scaling] = {}
    for name, x in (("k_scale", key), ("v_scale", value)):
        if scales.get(name) is None:
            continue
        scale = _checked(name, scales[name], x, cu_seqlens_k, padded)
        items, heads = x.shape[0] if cu_seqlens_k is None else cu_seqlens_k.shape[0] - 1, x.shape[2]
        by_head = scale.shape in ((), (1,), (heads,), (items, heads))
        how[name] = "head" if by_head else "token"
        made[name] = jnp.broadcast_to(scale, (items, heads)) if by_head else scale.reshape(x.shape[:3])
    return Stored(NAMES[key.dtype], how.get("k_scale", ""), how.get("v_scale", "")), made


def _numbers(p: AttentionProblem, known: Arrays, dtype: Any) -> Arrays:
    """Inputs of a problem that is stored as those of the one that it stands for."""
    starts = known.get("cu_seqlens_k")
    wide = {n: x for n, x in known.items() if n not in ("k_scale", "v_scale")}
    for side in "kv":
        scale = known.get(f"{side}_scale")
        rows = None if scale is None else _rows(scale, known[side], starts)
        wide[side] = _times(known[side], rows, dtype)
    return wide


@dataclass(frozen=True)
class StoredForward(Forward):
    """A forward whose keys and values are bytes."""

    def plain(self, arrays: Arrays) -> Arrays:
        p = self.problem
        assert p.stored is not None
        kind = KINDS[p.stored.dtype]
        known = arrays | {n: jax.lax.bitcast_convert_type(arrays[n], kind) for n in "kv"}
        return blockwise.forward(p.dequantised, _numbers(p, known, arrays["q"].dtype))


@dataclass(frozen=True)
class StoredCall:
    """What is static of a call: of the numbers that are stored, and the problem of what stores them."""

    call: Call
    problem: AttentionProblem

    @property
    def names(self) -> tuple[str, ...]:
        """Of the inputs, in order."""
        return tuple(b.name for b in input_buffers(self.problem))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def attend_stored(how: StoredCall, *given: Any) -> tuple[Any, Any]:
    """(out, lse). given: inputs of the stored problem in their order, keys and values in their own dtype."""
    call, step = how.call, StoredForward(how.problem, how.call.backend)
    dtypes = {b.name: jnp.dtype(b.dtype) for b in input_buffers(how.problem) if b.name in ("k", "v")}
    read = [jax.lax.bitcast_convert_type(x, dtypes[n]) if n in dtypes else x for n, x in zip(how.names, given, strict=True)]
    out, lse = derivatives.finite(call, run_mapped(step, call.implementation, *read))[:2]
    return out, lse


def _along(how: StoredCall, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    """Derivatives are those of the numbers, which are made in memory."""
    moved = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
    if not moved:
        made: Any = attend_stored(how, *primals)
        return made, tuple(map(jnp.zeros_like, made))

    def wide(*some: Any) -> tuple[Any, ...]:
        given = list(primals)
        for i, x in zip(moved, some, strict=True):
            given[i] = x
        known = dict(zip(how.names, given, strict=True))
        known = _numbers(how.problem, known, known["q"].dtype)
        found: Any = derivatives.attend(how.call, *(known[n] for n in how.call.names))
        return found[:2]

    return jax.jvp(wide, [primals[i] for i in moved], [tangents[i] for i in moved])


attend_stored.defjvp(promotes(_along), symbolic_zeros=True)
