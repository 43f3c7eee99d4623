"""Attention by flax's signature, for `attention_fn` of linen's and nnx's modules: with dropout, masks and biases."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from flashtile.errors import InvalidProblem, NotSupported
from flashtile.jax.arguments import number, operand
from flashtile.jax.arrays import promotes
from flashtile.jax.attention import dot_product_attention as by_our_names
from flashtile.problem.attention import Precision
from flashtile.problem.dropout import Dropout
from flashtile.problem.score import broadcasts

__all__ = ["dot_product_attention"]


@promotes
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    broadcast_dropout: bool = True,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    **extras: Any,
) -> Any:
    """Attention with the arguments of flax.linen's and flax.nnx's `dot_product_attention`, in O(seqlen) memory.

    query: (batch..., q_length, N, H); key: (batch..., kv_length, K, H); value: (batch..., kv_length, K, V); any number of
    batch axes, N a multiple of K. bias: added to scores, mask: True (or a number that is not 0) where they count; both
    broadcast to (batch..., N, q_length, kv_length). dtype: of the computation, by default what the three promote to.
    dropout_rate: the chance that a probability is dropped, by the key dropout_rng, unless deterministic. Which ones follows
    batch, head, query and key: broadcast_dropout, by which flax drops alike in all heads and items, changes nothing here.
    precision: "highest" multiplies fp32 without tensor cores; anything less as exactly as `flashtile.Options` has it by
    default. force_fp32_for_softmax: it always is. extras: is_causal, scale, local_window_size, softcap, sinks and all that
    `flashtile.jax.dot_product_attention` takes by names that are not flax's.

    Returns (batch..., q_length, N, V). A query that sees no key gives 0 (flax gives it the mean of all values). Raises
    NotSupported for module (the weights that `sow_weights` asks for are never formed) and for einsums of the caller's own.
    """
    wanted = dict(
        module=module, qk_attn_weights_einsum=qk_attn_weights_einsum, attn_weights_value_einsum=attn_weights_value_einsum,
        einsum_dot_general=extras.pop("einsum_dot_general", None),
    )  # fmt: skip
    reasons = [f"{name} is given; attention weights are never formed here, tile by tile" for name, x in wanted.items() if x]
    if reasons:
        raise NotSupported("flax's attention with weights to be seen or products of the caller's own", {"jax": reasons})
    arrays = {name: _present(name, x) for name, x in (("query", query), ("key", key), ("value", value))}
    dtype = jnp.result_type(*arrays.values()) if dtype is None else dtype
    lead = arrays["query"].shape[:-3]
    for name, x in arrays.items():
        if x.ndim < 3 or x.shape[:-3] != lead:
            raise InvalidProblem(
                f"{name} has shape {x.shape}; it must be (batch..., length, heads, head_dim), batch... {lead}."
            )
    items = math.prod(lead)
    q, k, v = (operand(name, x.astype(dtype).reshape(items, *x.shape[-3:])) for name, x in arrays.items())
    if mask is not None:
        mask = _flattened("mask", jnp.asarray(mask) != 0, lead)
    if bias is not None:
        bias = _flattened("bias", jnp.asarray(bias), lead)
    dropout = _dropout(dropout_rate, dropout_rng, deterministic)
    made = by_our_names(q, k, v, bias, mask, dropout=dropout, precision=_precision(precision), **extras)
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), made)


def _present(name: str, x: Any) -> Any:
    if x is None:
        raise InvalidProblem(f"{name} is None; it must be an array.")
    return jnp.asarray(x)


def _flattened(name: str, x: Any, lead: tuple[int, ...]) -> Any:
    """What broadcasts to (batch..., heads, q_length, kv_length), as it does to (items, heads, q_length, kv_length)."""
    shape = (1,) * (len(lead) + 3 - x.ndim) + x.shape
    own, rest = shape[: len(lead)], shape[len(lead) :]
    if len(rest) != 3 or not broadcasts(own, lead):
        raise InvalidProblem(f"{name} has shape {x.shape}; it must broadcast to (*{lead}, N, q_length, kv_length).")
    x = x.reshape(shape)
    if all(n == 1 for n in own):
        return x.reshape(1, *rest)
    return jnp.broadcast_to(x, (*lead, *rest)).reshape(math.prod(lead), *rest)


def _dropout(rate: Any, rng: Any, deterministic: Any) -> Dropout | None:
    rate, deterministic = number("dropout_rate", rate), number("deterministic", deterministic)
    if not isinstance(deterministic, bool):
        raise InvalidProblem(f"deterministic is {deterministic!r}; it must be True or False.")
    if deterministic or not rate:
        return None
    if rng is None:
        raise InvalidProblem(
            f"dropout_rng is None and dropout_rate {rate}; it must be a jax.random key, or deterministic True."
        )
    return Dropout(rate, rng)


def _precision(given: Any) -> Precision:
    """Of fp32 products, as `flashtile.Options` names it."""
    try:
        asked = [jax.lax.Precision(p or "default") for p in (given if isinstance(given, tuple) else (given,))]
    except ValueError as error:
        raise InvalidProblem(f"precision is {given!r}; it must be None or a jax.lax.Precision, not an algorithm.") from error
    return "ieee" if jax.lax.Precision.HIGHEST in asked else "tf32x3"
