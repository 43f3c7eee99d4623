"""Which probabilities dropout keeps, in plain JAX: the bits of `problem/dropout.py`, by 32-bit arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from flashtile.errors import InvalidProblem, NotSupported
from flashtile.problem.dropout import (
    LATTICE,
    MULTIPLIERS,
    ROUNDS,
    SEED_WORDS,
    WEYL,
    WORD,
    Dropout,
    Origin,
    OriginKind,
    call_index,
    dither_index,
    placed,
    threshold,
)


@dataclass(frozen=True)
class DeviceOrigin(Origin):
    """An Origin whose fields a device knows when it runs: which of a mesh it is. aligned: what is known before."""

    aligned: bool = False

    def __post_init__(self) -> None:
        """Arrays cannot be checked."""

    @property
    def kind(self) -> OriginKind:
        return "aligned" if self.aligned else "any"

    @property
    def words(self) -> tuple[Any, ...]:
        return self.head, self.heads, self.more, self.query, self.key, self.query_step, self.key_step


def origin_kind(dropout: Dropout | None) -> OriginKind | None:
    """What a problem says of it."""
    return dropout.origin.kind if dropout is not None and isinstance(dropout.origin, DeviceOrigin) else None


def seed_words(dropout: Dropout) -> Any:
    """The words of (seed, offset) as kernels read them, int32 (4,), and behind them those of a `DeviceOrigin`; the same as
    PyTorch's for the same int.
    """
    seed = dropout.seed
    if isinstance(dropout.origin, DeviceOrigin):
        origin = jnp.stack([jnp.asarray(word, jnp.int32) for word in dropout.origin.words])
        return jnp.concatenate([seed_words(replace(dropout, origin=None)), origin])
    if dropout.origin is not None:
        raise NotSupported("attention", {"jax": ["dropout with an origin, which is flashtile.distributed's"]})
    if seed is None:
        raise InvalidProblem("dropout seed is None; JAX draws nothing by itself: it must be an int or a jax.random key.")
    if isinstance(seed, int):
        return jnp.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, 0, 0], jnp.uint32).view(jnp.int32)
    of_today = jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) and seed.shape == ()
    if of_today or (seed.dtype == jnp.uint32 and seed.ndim == 1):  # or of jax.random.PRNGKey
        return jax.random.bits(seed, (4,), jnp.uint32).view(jnp.int32)
    raise InvalidProblem(f"dropout seed is {seed.dtype} of shape {seed.shape}; it must be an int or one jax.random key.")


def keep(p: float, batch: Any, head: Any, row: Any, key: Any, heads_q: int, seed: Any) -> Any:
    """Boolean: whether the probabilities at these int32 positions, which broadcast, are kept; seed: what `seed_words` makes."""
    low, high, offset, _ = (seed[i].view(jnp.uint32) for i in range(4))
    slab = batch * heads_q + head
    if seed.shape[0] > SEED_WORDS:
        slab, row, key = placed(seed[SEED_WORDS:], batch, head, row, key, heads_q)
    a, b, c, d = _philox((offset, call_index(key), slab, call_index(row)), (low, high))
    by_key = (key >> 3 & 1) == 1
    word = jnp.where((row & 1) == 1, jnp.where(by_key, d, c), jnp.where(by_key, b, a))
    number = word >> (16 * (key & 1) + 8 * (row >> 3 & 1)).astype(jnp.uint32) & jnp.uint32(127)
    last = jnp.uint32(WORD)
    dither, *_ = _philox((offset, last, jnp.uint32(0), last), (low, high))
    for step, index in zip(LATTICE, (slab, dither_index(row), dither_index(key)), strict=True):
        dither = dither + jnp.uint32(step) * jnp.asarray(index).astype(jnp.uint32)
    chance = min(threshold(p), 2**32 - threshold(p))
    below = number < jnp.uint32(chance >> 25) + (dither < jnp.uint32(chance << 7 & WORD)).astype(jnp.uint32)
    return below if threshold(p) > 2**31 else ~below


@jax.jit
def _philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """As `spec.dropout.philox`, of integers that broadcast."""
    a, b, c, d = (jnp.asarray(word).astype(jnp.uint32) for word in counter)
    low, high = key
    for _ in range(ROUNDS):
        (left_high, left), (right_high, right) = _multiply(a, MULTIPLIERS[0]), _multiply(c, MULTIPLIERS[1])
        a, b, c, d = right_high ^ b ^ low, right, left_high ^ d ^ high, left
        low, high = low + jnp.uint32(WEYL[0]), high + jnp.uint32(WEYL[1])
    return a, b, c, d


def _multiply(x: Any, factor: int) -> tuple[Any, Any]:
    """(high, low) words of x * factor, all unsigned 32-bit."""
    top, bottom = jnp.uint32(factor >> 16), jnp.uint32(factor & 0xFFFF)
    x_top, x_bottom = x >> 16, x & jnp.uint32(0xFFFF)
    middle = x_top * bottom + (x_bottom * bottom >> 16)
    carry = (middle & jnp.uint32(0xFFFF)) + x_bottom * top
    return x_top * top + (middle >> 16) + (carry >> 16), x * jnp.uint32(factor)
