"""What devices of a mesh axis exchange of a sequence that they share, within `jax.shard_map`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from flashtile.errors import InvalidProblem

LAYOUTS = ("contiguous", "zigzag", "striped")


def check_layout(layout: Any) -> None:
    if layout not in LAYOUTS:
        raise InvalidProblem(f"layout is {layout!r}; it must be one of {', '.join(LAYOUTS)}.")


def shard_order(seqlen: int, devices: int, layout: str = "zigzag") -> jax.Array:
    """Which token of the whole stands at each place, int32 (seqlen,), so that equal parts are the devices' shards.

    x[:, shard_order(S, n)] is sharded over the axis; x[:, jnp.argsort(order)] brings what comes back into its own order.
    """
    check_layout(layout)
    part = devices * (2 if layout == "zigzag" else 1)
    if seqlen % part:
        raise InvalidProblem(
            f"seqlen is {seqlen}; of layout {layout!r} over {devices} devices it must be a multiple of {part}."
        )
    place = jnp.arange(seqlen, dtype=jnp.int32)
    if layout == "contiguous":
        return place
    if layout == "striped":
        return place % (seqlen // devices) * devices + place // (seqlen // devices)
    chunk, within = place // (seqlen // part), place % (seqlen // part)
    device = chunk // 2
    return jnp.where(chunk % 2 == 0, device, part - 1 - device) * (seqlen // part) + within


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gathered(x: Any, axis_name: Any, devices: int, chunks: int) -> Any:
    """The whole sequence of (B, S / n, ...), in its own order and in float32, so that gradients are summed in it."""
    return in_order(x, axis_name, devices, chunks).astype(jnp.float32)


def in_order(x: Any, axis_name: Any, devices: int, chunks: int) -> Any:
    """The whole of (B, S / n, ...) in its own dtype, without a gradient."""
    parts = jax.lax.all_gather(x, axis_name, axis=0)
    parts = parts.reshape(devices, x.shape[0], chunks, x.shape[1] // chunks, *x.shape[2:])
    if chunks == 2:
        parts = jnp.concatenate([parts[:, :, 0], parts[::-1, :, 1]])
    else:
        parts = parts[:, :, 0]
    return jnp.moveaxis(parts, 0, 1).reshape(x.shape[0], devices * x.shape[1], *x.shape[2:])


def _gathered_forward(x: Any, axis_name: Any, devices: int, chunks: int) -> tuple[Any, Any]:
    return gathered(x, axis_name, devices, chunks), jnp.zeros(0, x.dtype)


def _gathered_backward(axis_name: Any, devices: int, chunks: int, like: Any, grad: Any) -> tuple[Any]:
    size = grad.shape[1] // (devices * chunks)
    parts = jnp.moveaxis(grad.reshape(grad.shape[0], devices * chunks, size, *grad.shape[2:]), 1, 0)
    if chunks == 2:
        parts = jnp.stack([parts[:devices], parts[devices:][::-1]], 2)
    else:
        parts = parts[:, :, None]
    parts = parts.reshape(devices, grad.shape[0], chunks * size, *grad.shape[2:])
    return (jax.lax.psum_scatter(parts, axis_name, scatter_dimension=0, tiled=False).astype(like.dtype),)


gathered.defvjp(_gathered_forward, _gathered_backward)


def with_halo(x: Any, axis_name: Any, devices: int, left: int, right: int) -> Any:
    """(B, left + s + right, ...) of contiguous shards (B, s, ...): this device's, and so many tokens of those on both sides.

    What would be before the first token of all, or behind the last, is some other device's.
    """
    size, parts = x.shape[1], [x]
    for hop in range(1, -(-left // size) + 1):
        some = min(left - (hop - 1) * size, size)
        parts.insert(0, _from(x[:, size - some :], axis_name, devices, hop))
    for hop in range(1, -(-right // size) + 1):
        parts.append(_from(x[:, : min(right - (hop - 1) * size, size)], axis_name, devices, -hop))
    return jnp.concatenate(parts, 1)


def _from(x: Any, axis_name: Any, devices: int, back: int) -> Any:
    """Those of the device that is so many places back."""
    return jax.lax.ppermute(x, axis_name, [(i, (i + back) % devices) for i in range(devices)])


def heads_for_tokens(x: Any, axis_name: Any, devices: int, layout: str) -> Any:
    """(B, S, N / n, ...) of (B, S / n, N, ...): this device's heads of the whole sequence, in its own order."""
    return in_own_order(jax.lax.all_to_all(x, axis_name, 2, 1, tiled=True), devices, layout)


def in_own_order(x: Any, devices: int, layout: str) -> Any:
    """(B, S, ...) in the sequence's own order, of all devices' shards one after another."""
    return x if layout == "contiguous" else x[:, jnp.argsort(shard_order(x.shape[1], devices, layout))]


def tokens_for_heads(x: Any, axis_name: Any, devices: int, layout: str) -> Any:
    """The way back."""
    x = x if layout == "contiguous" else x[:, shard_order(x.shape[1], devices, layout)]
    return jax.lax.all_to_all(x, axis_name, 1, 2, tiled=True)
