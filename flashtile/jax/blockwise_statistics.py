"""Statistics of the softmax and the entropy's gradient in plain JAX, block of keys by block of keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from flashtile.jax.arrays import Arrays
from flashtile.jax.blockwise import Block, Scene, computed, few_keys, through_scores
from flashtile.jax.run import varying_like
from flashtile.kernels.device.score import sums_per_head
from flashtile.problem.attention import AttentionProblem
from flashtile.problem.dtype import DType


def statistics(p: AttentionProblem, arrays: Arrays, names: Sequence[str], last: int) -> Arrays:
    """Those of "peak", "entropy" and "mass" that are named, of inputs and lse; last: of how many queries mass is, 0 for all."""
    return computed(lambda given, dtype: _statistics(p, given, names, last, dtype), arrays, few_keys(p))


def entropy(p: AttentionProblem, arrays: Arrays, outputs: Sequence[str]) -> Arrays:
    """The gradients of `outputs` that "dentropy" makes, of inputs, lse and the entropy."""
    wide = few_keys(p) or (p.dtype is DType.FP32 and sums_per_head(p))
    return computed(lambda given, dtype: _entropy(p, given, outputs, dtype), arrays, wide)


def _statistics(p: AttentionProblem, arrays: Arrays, names: Sequence[str], last: int, dtype: Any) -> Arrays:
    scene = Scene(p, arrays, dtype)
    lse = arrays["lse"].astype(dtype)
    pivot = jnp.where(lse == -jnp.inf, 0.0, lse)
    counted: Any = scene.row >= scene.length_q - last if last else True

    def step(state: tuple[Any, Any], block: Block) -> tuple[Any, Any]:
        peak, depth = state
        at = scene.position(block)
        seen = scene.visible(at, block)
        block = scene.shown(block, seen)
        score = jnp.where(seen, scene.modified(scene.products(block), scene.modifiers(block), at, seen), -jnp.inf)
        weight = jnp.exp(score - pivot[..., None])
        below = jnp.where(weight > 0.0, weight * (pivot[..., None] - score), 0.0)
        received = jnp.where(counted, weight, 0.0).sum(-2)
        return (jnp.maximum(peak, score.max(-1)), depth + below.sum(-1)), received

    start = varying_like([jnp.full(scene.rows, -jnp.inf, dtype), scene.zeros()], tuple(arrays.values()))
    (peak, depth), mass = lax.scan(step, tuple(start), scene.blocks)
    if p.sink is not None:
        sink = arrays["sink"].astype(dtype)[:, None]
        weight = jnp.where(lse == -jnp.inf, 0.0, jnp.exp(sink - pivot))
        depth = depth + jnp.where(weight > 0.0, weight * (pivot - sink), 0.0)
    mass = jnp.moveaxis(mass, 0, 2).reshape(p.slabs, p.heads_q, -1)[..., : p.span_k]
    if scene.counts_q is not None:
        depth = jnp.where(scene.counts_q[..., 0], depth, 0.0)
    made = {"peak": peak, "entropy": depth, "mass": mass}
    return {name: made[name].astype(jnp.float32) for name in names}


def _entropy(p: AttentionProblem, arrays: Arrays, outputs: Sequence[str], dtype: Any) -> Arrays:
    """The derivative by a score y is -p (y - lse + H)."""
    scene = Scene(p, arrays, dtype)
    lse, entropy, arriving = (arrays[name].astype(dtype) for name in ("lse", "entropy", "dentropy"))
    alive, pivot = lse != -jnp.inf, jnp.where(lse == -jnp.inf, 0.0, lse)
    arriving = jnp.where(alive, arriving, 0.0)
    if scene.counts_q is not None:
        arriving = jnp.where(scene.counts_q[..., 0], arriving, 0.0)

    def derivatives(score: Any, seen: Any, *_: Any) -> tuple[Any, Any]:
        """Those of scores, or of sinks."""
        weight = jnp.where(seen, jnp.exp(score - pivot[..., None]), 0.0)
        bend = -weight * (score - pivot[..., None] + entropy[..., None]) * arriving[..., None]
        return jnp.where(weight > 0.0, bend, 0.0), ()

    made, _ = through_scores(scene, outputs, alive[..., None], derivatives)
    if p.sink is not None and "dsink" in outputs:
        by_rows, _ = derivatives(arrays["sink"].astype(dtype)[:, None, None], alive[..., None])
        made["dsink"] = by_rows.sum((0, 2, 3)).astype(jnp.float32)
    return {name: made[name] for name in outputs}
