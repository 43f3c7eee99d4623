"""Bias: a tensor that is added to the scores, with its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashtile.errors import InvalidProblem
from flashtile.features.scores.added import added_backward
from flashtile.problem.score import Captured, Position, Score, is_tensor
from flashtile.triton_glue.language import jit, tl


@jit
def bias_load(at, args):
    element, strides = args[0], args[1]  # a stride is None along an axis of one element
    if strides[0] is not None:
        element += at.batch.to(tl.int64) * strides[0]
    if strides[1] is not None:
        element += at.head.to(tl.int64) * strides[1]
    if strides[2] is not None:
        element += at.row.to(tl.int64) * strides[2]
    if strides[3] is not None:
        element += at.k.to(tl.int64) * strides[3]
    return tl.load(element)


@jit
def bias_join(score, loaded, unit):
    loaded = tl.cast(loaded, score.dtype)
    return tl.fma(loaded, unit, score)  # a sum would become the product's accumulator, and the product wait for the load


@jit
def bias_add(score, at, args, unit):
    return bias_join(score, bias_load(at, args), unit)


@jit
def bias_forward(score, at, args):
    return bias_add(score, at, args, 1.0)


@jit
def bias_contribution(grad, score, at, args):
    return grad


@dataclass(frozen=True, eq=False)
class Bias(Score):
    """Score modifier score + bias; `bias` is a tensor that broadcasts to (batch, heads_q, seqlen_q, seqlen_k).

    It is read where it lies, and never expanded; where the caller has expanded batch or heads, and wants no gradient, one of
    them is read. Its gradient is summed over the axes that it lacks or that have size 1, in a fixed order. -inf hides a key,
    as a mask does.
    """

    bias: Any

    name = "bias"
    forward = bias_forward
    backward = added_backward
    add = bias_add
    linear = True
    load = bias_load
    join = bias_join
    captured = (Captured(bias_contribution, broadcast=True, identity=True),)

    def __post_init__(self) -> None:
        if not is_tensor(self.bias):
            raise InvalidProblem(f"bias is a {type(self.bias).__name__}; it must be a tensor.")
        if len(self.bias.shape) > 4:
            raise InvalidProblem(
                f"bias has shape {tuple(self.bias.shape)}; it must broadcast to (batch, heads_q, seqlen_q, seqlen_k)."
            )

    def tensors(self, batch: int, heads_q: int) -> tuple[Any, ...]:
        bias = self.bias[(None,) * (4 - len(self.bias.shape))]
        if hasattr(bias, "stride") and not bias.requires_grad:
            for axis, size in enumerate((batch, heads_q)):
                if bias.stride(axis) == 0 and bias.shape[axis] == size:
                    bias = bias.narrow(axis, 0, min(size, 1))
        return (bias,)

    @staticmethod
    def apply(score: Any, at: Position, scalars: tuple[float, ...], tensors: tuple[Any, ...]) -> Any:
        """The formula in PyTorch."""
        (bias,) = tensors
        where = (at.batch, at.head, at.row, at.k)
        # An axis of one element stays one: backwards autograd then sums over it in pairs, and not element by element.
        return score + bias[tuple(index if size > 1 else 0 for index, size in zip(where, bias.shape, strict=True))]

    @classmethod
    def apply_(cls, score: Any, at: Position, scalars: tuple[float, ...], tensors: tuple[Any, ...]) -> None:
        """The formula in PyTorch, in place: a part of the tensor is added as it lies."""
        (bias,) = tensors
        for axis, index in enumerate((at.batch, at.head, at.row, at.k)):
            if bias.shape[axis] > 1:
                bias = bias.narrow(axis, int(index.reshape(-1)[0]), index.numel())
        score.add_(bias)

    @staticmethod
    def apply_jax(score: Any, at: Position, scalars: tuple[float, ...], tensors: tuple[Any, ...]) -> Any:
        """The formula in JAX."""
        return score + tensors[0]
