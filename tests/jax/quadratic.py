"""Attention by its definition in plain JAX, differentiated by JAX; with float64 arrays the truth."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def attention(
    q: Any, k: Any, v: Any, bias: Any = None, mask: Any = None, *, scale: float | None = None, is_causal: bool = False,
    local_window_size: Any = None, query_seq_lengths: Any = None, key_value_seq_lengths: Any = None, **rest: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """(out, lse (B, T, N)); rest: softcap, sinks, slopes (N,) of ALiBi, keep (B, N, T, S) and p of dropout, bottom_right."""
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, group = k.shape[1], heads // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    score = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * (head_dim**-0.5 if scale is None else scale)
    length_q = jnp.full((batch,), seqlen_q) if query_seq_lengths is None else query_seq_lengths
    length_k = jnp.full((batch,), seqlen_k) if key_value_seq_lengths is None else key_value_seq_lengths
    row, key = jnp.arange(seqlen_q)[:, None], jnp.arange(seqlen_k)[None, :]
    place = jnp.broadcast_to(row, (batch, 1, seqlen_q, 1))
    if rest.get("bottom_right"):
        place = row + (length_k - length_q)[:, None, None, None]
    aligned = row + (length_k - length_q)[:, None, None, None]
    if bias is not None:
        score = score + bias.astype(score.dtype)
    if rest.get("softcap"):
        score = rest["softcap"] * jnp.tanh(score / rest["softcap"])
    if rest.get("slopes") is not None:
        score = score - rest["slopes"].astype(score.dtype)[:, None, None] * jnp.abs(aligned - key)
    left, right = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size or (None, None)
    right = 0 if is_causal else right
    seen = (row < length_q[:, None, None, None]) & (key < length_k[:, None, None, None])
    if left is not None:
        seen = seen & (key >= place - left)
    if right is not None:
        seen = seen & (key <= place + right)
    if mask is not None:
        seen = seen & mask
    score = jnp.where(seen, score, -jnp.inf)
    sinks = rest.get("sinks")
    top = score.max(-1, keepdims=True, initial=-jnp.inf)
    if sinks is not None:
        top = jnp.maximum(top, sinks.astype(score.dtype)[:, None, None])
    top = jnp.where(top == -jnp.inf, 0.0, top)
    weight = jnp.where(seen, jnp.exp(jnp.where(seen, score, 0.0) - top), 0.0)
    total = weight.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks.astype(score.dtype)[:, None, None] - top)
    lives = total > 0.0
    lse = jnp.where(lives, jnp.log(jnp.where(lives, total, 1.0)) + top, -jnp.inf)[..., 0]
    share = jnp.where(lives, weight / jnp.where(lives, total, 1.0), 0.0)
    if rest.get("keep") is not None:
        share = jnp.where(rest["keep"], share / (1.0 - rest["p"]), 0.0)
    out = jnp.einsum("bnts,bsnh->btnh", share.astype(v.dtype), v, precision="highest")
    counts = row[None] < length_q[:, None, None]
    return jnp.where(counts[..., None], out, 0.0), jnp.where(counts, jnp.swapaxes(lse, 1, 2), -jnp.inf)
