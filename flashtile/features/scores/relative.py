"""A slope per head: ALiBi without its absolute value and alignment, as FlexAttention's examples write it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashtile.features.scores.added import Slopes, added_backward, slope_of
from flashtile.problem.score import Captured, Position, Score
from flashtile.triton_glue.language import jit, tl


@jit
def relative_add(score, at, args, unit):
    return score + (slope_of(score, at, args) * unit) * (at.k - at.row).to(tl.float32)


@jit
def relative_forward(score, at, args):
    return relative_add(score, at, args, 1.0)


@jit
def relative_contribution(grad, score, at, args):
    return grad * (at.k - at.row).to(tl.float32)


@dataclass(frozen=True, eq=False)
class Relative(Slopes, Score):
    """Score modifier slope * (j - i), of indices as they are, not aligned; `slopes` is (heads_q,) or (batch, heads_q)."""

    name = "relative"
    forward = relative_forward
    backward = added_backward
    add = relative_add
    linear = True
    by_distance = True
    captured = (Captured(relative_contribution),)

    @staticmethod
    def apply(score: Any, at: Position, scalars: tuple[float, ...], tensors: tuple[Any, ...]) -> Any:
        """The formula in PyTorch."""
        slopes = tensors[0].to(score.dtype)[at.batch, at.head]
        return score + slopes * (at.k - at.row).to(score.dtype)
