"""A slope per head: ALiBi without its absolute value and alignment, as FlexAttention's examples write it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashtile._triton import jit, tl
from flashtile.errors import InvalidProblem
from flashtile.spec.score import Captured, Position, Score


@jit
def relative_add(score, at, args, unit):
    strides = args[1]
    slope = tl.load(args[0] + at.batch * strides[0] + at.head * strides[1]).to(tl.float32)
    return score + (slope * unit) * (at.k - at.row).to(tl.float32)


@jit
def relative_forward(score, at, args):
    return relative_add(score, at, args, 1.0)


@jit
def relative_backward(grad, score, out, at, args):
    return grad


@jit
def relative_contribution(grad, score, at, args):
    return grad * (at.k - at.row).to(tl.float32)


@dataclass(frozen=True, eq=False)
class Relative(Score):
    """Score modifier slope * (j - i), of indices as they are, not aligned; `slopes` is (heads_q,) or (batch, heads_q)."""

    slopes: Any

    name = "relative"
    forward = relative_forward
    backward = relative_backward
    add = relative_add
    captured = (Captured(relative_contribution),)

    def __post_init__(self) -> None:
        if not hasattr(self.slopes, "shape") or len(self.slopes.shape) not in (1, 2):
            shape = tuple(self.slopes.shape) if hasattr(self.slopes, "shape") else type(self.slopes).__name__
            raise InvalidProblem(f"relative slopes are {shape}; they must be a tensor (heads_q,) or (batch, heads_q).")

    def tensors(self, batch: int, heads_q: int) -> tuple[Any, ...]:
        shape = tuple(self.slopes.shape)
        if shape not in ((heads_q,), (batch, heads_q)):
            raise InvalidProblem(f"relative slopes have shape {shape}; it must be ({heads_q},) or ({batch}, {heads_q}).")
        return (self.slopes.expand(batch, heads_q),)

    @staticmethod
    def apply(score: Any, at: Position, scalars: tuple[float, ...], tensors: tuple[Any, ...]) -> Any:
        """The formula in PyTorch."""
        slopes = tensors[0].to(score.dtype)[at.batch, at.head]
        return score + slopes * (at.k - at.row).to(score.dtype)
