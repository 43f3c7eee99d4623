"""The ops around attention in plain JAX, float32 inside: what runs where there is no NVIDIA GPU; JAX differentiates them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from flashtile.jax.arrays import JAX_DTYPES, Arrays


def norm(p: Any, t: Arrays) -> Arrays:
    h = t["x"].astype(jnp.float32)
    if p.has("residual"):
        h = h + t["residual"].astype(jnp.float32)
    if p.mixes:
        h = h.astype(JAX_DTYPES[p.stored]).astype(jnp.float32)
    centred = h - h.mean(1, keepdims=True) if p.kind == "layer" else h
    out = centred * jax.lax.rsqrt((centred * centred).mean(1, keepdims=True) + p.eps)
    if p.has("weight"):
        out = out * (t["weight"].astype(jnp.float32) + float(p.zero_centered))
    if p.has("bias"):
        out = out + t["bias"].astype(jnp.float32)
    return {"out": out, "h": h}


def cross_entropy(p: Any, t: Arrays) -> Arrays:
    def scored(logits: Any) -> Any:
        x = logits.astype(jnp.float32) * p.logit_scale
        return x if p.softcap is None else p.softcap * jnp.tanh(x / p.softcap)

    logits, labels = t["logits"], t["labels"]
    counts, known = labels != p.ignore_index, (labels >= 0) & (labels < p.every)
    column = labels - p.first_class
    here = counts & (column >= 0) & (column < p.columns)
    x, index = scored(jnp.where(counts[:, None], logits, 0.0)), jnp.where(here, column, 0)  # whatever ignored rows hold
    x = x * jnp.where(counts & ~known, jnp.nan, 1.0)[:, None]  # a factor: gradients are NaN too
    lse = jax.nn.logsumexp(x, axis=1)
    at_label = jnp.take_along_axis(x, index[:, None], axis=1)[:, 0]
    own = weight = jnp.float32(1.0)
    if p.has("weight"):
        weight = t["weight"].astype(jnp.float32)
        own = jnp.where(known, weight[jnp.where(known, labels, 0)], 0.0)
        weight = weight[p.first_class : p.first_class + p.columns]
    if p.shard:
        share = (p.smoothing - 1.0) * own * jnp.where(here, at_label, 0.0)
        if p.smoothing:
            share = share - p.smoothing / p.every * (weight * x).sum(1)
        if "lse" in t:  # of all classes, which the backward is given: what has that one's gradient by these logits
            lse = jnp.exp(x - t["lse"][:, None]).sum(1)
        return {"share": jnp.where(counts, share, 0.0), "lse": lse}
    loss = (1.0 - p.smoothing) * own * (lse - at_label)
    if p.smoothing:
        loss = loss + p.smoothing * (weight * (lse[:, None] - x)).mean(1)
    loss, square = jnp.where(counts, loss, 0.0), jnp.where(counts, p.z_loss * lse * lse, 0.0)
    if p.reduction == "mean":  # what z_loss adds knows no classes
        loss = loss.sum() / jnp.where(counts, own, 0.0).sum() + square.sum() / counts.sum()
    else:
        loss = loss + square if p.reduction == "none" else (loss + square).sum()
    return {"loss": loss, "lse": jax.nn.logsumexp(scored(jax.lax.stop_gradient(logits)), axis=1)}


def rotary(p: Any, t: Arrays) -> Arrays:
    seqlen = t["q"].shape[1]
    if p.has("positions"):
        positions = t["positions"]
        beyond = (positions < 0) | (positions >= t["cos"].shape[0])
        inside = jnp.where(beyond, 0, positions)
        tables = (t[name].astype(jnp.float32) for name in ("cos", "sin"))
        cos, sin = ((table if len(table) else jnp.zeros((1, p.half)))[inside] for table in tables)  # of no row all lie beyond
        cos = jnp.where(beyond[..., None], jnp.nan, cos)
    else:
        cos, sin = (t[name].astype(jnp.float32)[None, p.offset : p.offset + seqlen] for name in ("cos", "sin"))
    cos, sin = cos[:, :, None], (-sin if p.conjugate else sin)[:, :, None]
    return {f"out_{name}": _turned(p, t[name], cos, sin) for name in ("q", "k") if p.has(name)}


def _turned(p: Any, x: Any, cos: Any, sin: Any) -> Any:
    part, rest = x[..., : 2 * p.half].astype(jnp.float32), x[..., 2 * p.half :]
    first, second = (part[..., ::2], part[..., 1::2]) if p.interleaved else jnp.split(part, 2, -1)
    both = first * cos - second * sin, first * sin + second * cos
    turned = jnp.stack(both, -1).reshape(part.shape) if p.interleaved else jnp.concatenate(both, -1)
    return jnp.concatenate([turned.astype(x.dtype), rest], -1)


def softmax(p: Any, t: Arrays) -> Arrays:
    x = t["x"].astype(jnp.float32) * p.scale
    rows, columns = x.shape[2:]
    if p.has("mask"):
        x = jnp.where(t["mask"] != 0, p.fill, x)
    if p.causal:
        x = jnp.where(jnp.arange(columns) <= jnp.arange(rows)[:, None] + columns - rows, x, -jnp.inf)
    top = jax.lax.stop_gradient(x.max(-1, keepdims=True, initial=-jnp.inf))
    blind = (top == p.fill) | (top < -3e38)
    return {"y": jnp.where(blind, 0.0, jax.nn.softmax(jnp.where(blind, 0.0, x), axis=-1))}


FORMULAS: dict[str, Callable[[Any, Arrays], Arrays]] = {
    "norm": norm, "cross_entropy": cross_entropy, "rotary": rotary, "softmax": softmax,
}  # fmt: skip
