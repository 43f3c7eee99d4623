"""ALiBi: attention with linear biases (arXiv 2108.12409), with the gradient of its slopes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashtile._triton import jit, tl
from flashtile.errors import InvalidProblem
from flashtile.spec.score import Captured, Position, Score, expanded, is_tensor


@jit
def alibi_add(score, at, args, unit):
    strides = args[1]
    slope = tl.load(args[0] + at.batch * strides[0] + at.head * strides[1]).to(score.dtype)
    return score - (slope * unit) * tl.abs(at.ahead)


@jit
def alibi_forward(score, at, args):
    return alibi_add(score, at, args, 1.0)


@jit
def alibi_backward(grad, score, out, at, args):
    return grad


@jit
def alibi_slope_contribution(grad, score, at, args):
    return -grad * tl.abs(at.ahead)


@dataclass(frozen=True, eq=False)
class Alibi(Score):
    """Score modifier -slope * |i + seqlen_k - seqlen_q - j|; `slopes` is a (heads_q,) or (batch, heads_q) tensor."""

    slopes: Any

    name = "alibi"
    forward = alibi_forward
    backward = alibi_backward
    add = alibi_add
    captured = (Captured(alibi_slope_contribution),)

    def __post_init__(self) -> None:
        if not is_tensor(self.slopes):
            raise InvalidProblem(f"alibi slopes are a {type(self.slopes).__name__}; they must be a tensor.")
        if len(self.slopes.shape) not in (1, 2):
            raise InvalidProblem(
                f"alibi slopes have shape {tuple(self.slopes.shape)}; it must be (heads_q,) or (batch, heads_q)."
            )

    def tensors(self, batch: int, heads_q: int) -> tuple[Any, ...]:
        shape = tuple(self.slopes.shape)
        if shape not in ((heads_q,), (batch, heads_q)):
            raise InvalidProblem(f"alibi slopes have shape {shape}; it must be ({heads_q},) or ({batch}, {heads_q}).")
        return (expanded(self.slopes, batch, heads_q),)

    @staticmethod
    def apply(score: Any, at: Position, scalars: tuple[float, ...], tensors: tuple[Any, ...]) -> Any:
        """The formula in PyTorch."""
        slopes = tensors[0].to(score.dtype)[at.batch, at.head]
        return score - slopes * (at.q - at.k).to(score.dtype).abs()

    @staticmethod
    def apply_jax(score: Any, at: Position, scalars: tuple[float, ...], tensors: tuple[Any, ...]) -> Any:
        """The formula in JAX."""
        return score - tensors[0][at.batch, at.head] * abs(at.q - at.k)
