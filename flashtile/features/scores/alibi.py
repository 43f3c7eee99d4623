"""ALiBi: attention with linear biases (arXiv 2108.12409), with the gradient of its slopes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashtile.features.scores.added import Slopes, added_backward, slope_of
from flashtile.problem.score import Captured, Position, Score
from flashtile.triton_glue.language import jit, tl


@jit
def alibi_add(score, at, args, unit):
    return score - (slope_of(score, at, args) * unit) * tl.abs(at.ahead)


@jit
def alibi_forward(score, at, args):
    return alibi_add(score, at, args, 1.0)


@jit
def alibi_slope_contribution(grad, score, at, args):
    return grad * -1.0 * tl.abs(at.ahead)  # a sign that costs nothing, where -grad is a subtraction from 0


@dataclass(frozen=True, eq=False)
class Alibi(Slopes, Score):
    """Score modifier -slope * |i + seqlen_k - seqlen_q - j|; `slopes` is a (heads_q,) or (batch, heads_q) tensor."""

    name = "alibi"
    forward = alibi_forward
    backward = added_backward
    add = alibi_add
    linear = True
    by_distance = True
    captured = (Captured(alibi_slope_contribution),)

    @staticmethod
    def apply(score: Any, at: Position, scalars: tuple[float, ...], tensors: tuple[Any, ...]) -> Any:
        """The formula in PyTorch."""
        slopes = tensors[0].to(score.dtype)[at.batch, at.head]
        return score - slopes * (at.q - at.k).to(score.dtype).abs()

    @classmethod
    def apply_(cls, score: Any, at: Position, scalars: tuple[float, ...], tensors: tuple[Any, ...]) -> None:
        """The formula in PyTorch, in place."""
        first = at.q.flatten()[:1]
        ahead = (at.k - first).to(score.dtype) - (at.q - first).to(score.dtype)  # in float32 faster than in integers
        score.addcmul_(tensors[0].to(score.dtype)[at.batch, at.head], ahead.abs_(), value=-1.0)

    @staticmethod
    def apply_jax(score: Any, at: Position, scalars: tuple[float, ...], tensors: tuple[Any, ...]) -> Any:
        """The formula in JAX."""
        return score - tensors[0][at.batch, at.head] * abs(at.q - at.k)
