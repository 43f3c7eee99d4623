"""Attention of a sequence that the devices of a mesh axis share, within `jax.shard_map`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from flashtile.errors import InvalidProblem, NotSupported
from flashtile.features.scores.alibi import Alibi
from flashtile.features.scores.softcap import Softcap
from flashtile.jax.arguments import check_operands, make_band, numbers, operand
from flashtile.jax.arrays import promotes
from flashtile.jax.attention import dot_product_attention
from flashtile.problem.mask import FULL

LAYOUTS = ("contiguous", "zigzag")


@promotes
def dot_product_attention_sharded(
    query: Any,
    key: Any,
    value: Any,
    *,
    axis_name: Any,
    layout: str = "contiguous",
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    **extras: Any,
) -> Any:
    """`dot_product_attention` of shards of a sequence, within a `jax.shard_map` whose `axis_name` shares it out.

    query: (B, T / n, N, H), key: (B, S / n, K, H), value: (B, S / n, K, V), of n devices; out and residual likewise.
    layout: "contiguous" shards, or "zigzag": a device's chunk of the first half and its mirror of the second, so that causal
        order gives all equal work; `shard_order` brings a whole sequence there, `shard_positions` says which tokens are here.
    is_causal, local_window_size: aligned bottom-right, of the whole. No query may look ahead but where all see all.
    extras: softcap, sinks, score (`Softcap` and `Alibi`), backward, deterministic, precision.

    Keys and values are gathered, in their own dtype; their gradients are summed over devices in float32. A device attends its
    queries to the keys up to their last one. Raises InvalidProblem and NotSupported.
    """
    given = numbers(scale=scale, is_causal=is_causal, return_residual=return_residual)
    query, key, value = (operand(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    check_operands(query, key, value)
    if layout not in LAYOUTS:
        raise InvalidProblem(f"layout is {layout!r}; it must be one of {', '.join(LAYOUTS)}.")
    band = make_band(given["is_causal"], local_window_size)
    _refuse(band, extras)
    devices, at = _axis(axis_name)
    for name, x in (("query", query), ("key", key)):
        if layout == "zigzag" and x.shape[1] % 2:
            raise InvalidProblem(f"{name} has {x.shape[1]} tokens a device; of layout 'zigzag' they must be even.")
    chunks = 2 if layout == "zigzag" else 1
    gathered: list[Any] = [_gathered(x, axis_name, devices, chunks) for x in (key, value)]
    keys, values = gathered
    size, shift = query.shape[1] // chunks, (key.shape[1] - query.shape[1]) * devices
    how: dict[str, Any] = {"scale": given["scale"], "implementation": implementation, "alignment": "bottom-right", **extras}
    how["local_window_size"] = None if band == FULL else (band.left, band.right)
    made: list[Any] = []
    for i in range(chunks):
        rows = query[:, i * size : (i + 1) * size]
        chunk = at if i == 0 else 2 * devices - 1 - at
        if band != FULL:  # keys end where this chunk does, and its last query stands at the last of them
            end = jnp.clip((chunk + 1) * size + shift, 0, keys.shape[1]).astype(jnp.int32)
            how["key_value_seq_lengths"] = jnp.broadcast_to(end, (rows.shape[0],))
        k, v = keys.astype(key.dtype), values.astype(value.dtype)
        made.append(dot_product_attention(rows, k, v, return_residual=True, **how))
    out, residual = (jnp.concatenate(parts, 1) for parts in zip(*made, strict=True))
    return (out, residual) if given["return_residual"] else out


def shard_order(seqlen: int, devices: int, layout: str = "zigzag") -> jax.Array:
    """Which token of the whole stands at each place, int32 (seqlen,), so that equal parts are the devices' shards.

    x[:, shard_order(S, n)] is sharded over the axis; x[:, jnp.argsort(order)] brings what comes back into its own order.
    """
    if layout not in LAYOUTS:
        raise InvalidProblem(f"layout is {layout!r}; it must be one of {', '.join(LAYOUTS)}.")
    part = devices * (2 if layout == "zigzag" else 1)
    if seqlen % part:
        raise InvalidProblem(
            f"seqlen is {seqlen}; of layout {layout!r} over {devices} devices it must be a multiple of {part}."
        )
    place = jnp.arange(seqlen, dtype=jnp.int32)
    if layout == "contiguous":
        return place
    chunk, within = place // (seqlen // part), place % (seqlen // part)
    device = chunk // 2
    return jnp.where(chunk % 2 == 0, device, part - 1 - device) * (seqlen // part) + within


def shard_positions(tokens: int, axis_name: Any, layout: str = "contiguous") -> jax.Array:
    """The positions in the whole, int32 (tokens,), of this device's tokens; within `jax.shard_map`, for rotary embeddings."""
    devices, at = _axis(axis_name)
    return jax.lax.dynamic_slice(shard_order(tokens * devices, devices, layout), (at * tokens,), (tokens,))


def _axis(axis_name: Any) -> tuple[int, Any]:
    """(how many devices, this one's place among them)."""
    try:
        return jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    except NameError as error:
        raise InvalidProblem(f"axis_name is {axis_name!r}; it must be an axis of the jax.shard_map around the call.") from error


def _refuse(band: Any, extras: dict[str, Any]) -> None:
    reasons: list[str] = []
    if band != FULL and (band.right is None or band.right > 0):
        reasons.append("a window in which queries look ahead; causal ones, or none")
    for name in sorted(set(extras) - {"softcap", "sinks", "score", "backward", "deterministic", "precision"}):
        if extras[name] is not None:
            reasons.append(f"{name}, whose positions or tensors are the whole's")
    for modifier in extras.get("score") or ():
        if not isinstance(modifier, (Softcap, Alibi)):
            reasons.append(f"score modifier {getattr(modifier, 'name', modifier)}, whose use of positions is not known")
        elif isinstance(modifier, Alibi) and band == FULL:
            reasons.append("alibi without causal order")
    if reasons:
        raise NotSupported("dot_product_attention_sharded", {"jax": reasons})


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gathered(x: Any, axis_name: Any, devices: int, chunks: int) -> Any:
    """The whole sequence of (B, S / n, ...), in its own order and in float32, so that gradients are summed in it."""
    parts = jax.lax.all_gather(x, axis_name, axis=0)
    parts = parts.reshape(devices, x.shape[0], chunks, x.shape[1] // chunks, *x.shape[2:])
    if chunks == 2:
        parts = jnp.concatenate([parts[:, :, 0], parts[::-1, :, 1]])
    else:
        parts = parts[:, :, 0]
    return jnp.moveaxis(parts, 0, 1).reshape(x.shape[0], devices * x.shape[1], *x.shape[2:]).astype(jnp.float32)


def _gathered_forward(x: Any, axis_name: Any, devices: int, chunks: int) -> tuple[Any, Any]:
    return _gathered(x, axis_name, devices, chunks), jnp.zeros(0, x.dtype)


def _gathered_backward(axis_name: Any, devices: int, chunks: int, like: Any, grad: Any) -> tuple[Any]:
    size = grad.shape[1] // (devices * chunks)
    parts = jnp.moveaxis(grad.reshape(grad.shape[0], devices * chunks, size, *grad.shape[2:]), 1, 0)
    if chunks == 2:
        parts = jnp.stack([parts[:devices], parts[devices:][::-1]], 2)
    else:
        parts = parts[:, :, None]
    parts = parts.reshape(devices, grad.shape[0], chunks * size, *grad.shape[2:])
    return (jax.lax.psum_scatter(parts, axis_name, scatter_dimension=0, tiled=False).astype(like.dtype),)


_gathered.defvjp(_gathered_forward, _gathered_backward)
