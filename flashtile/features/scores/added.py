"""What modifiers share that add something to the score: their backward, and slopes, one per head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from flashtile.errors import InvalidProblem
from flashtile.problem.score import expanded, is_tensor
from flashtile.triton_glue.language import jit, tl


@jit
def added_backward(grad, score, out, at, args):
    return grad


@jit
def slope_of(score, at, args):
    """The slope of a tile's head, where slopes are the first tensor of a modifier without scalars; in the scores' dtype."""
    strides = args[1]
    return tl.load(args[0] + at.batch * strides[0] + at.head * strides[1]).to(score.dtype)


@dataclass(frozen=True, eq=False)
class Slopes:
    """The field of a modifier that has one tensor: a slope for every head."""

    slopes: Any

    name: ClassVar[str]

    def __post_init__(self) -> None:
        if not is_tensor(self.slopes):
            raise InvalidProblem(f"{self.name} slopes are a {type(self.slopes).__name__}; they must be a tensor.")
        if len(self.slopes.shape) not in (1, 2):
            raise InvalidProblem(
                f"{self.name} slopes have shape {tuple(self.slopes.shape)}; it must be (heads_q,) or (batch, heads_q)."
            )

    def tensors(self, batch: int, heads_q: int) -> tuple[Any, ...]:
        shape = tuple(self.slopes.shape)
        if shape != (batch, heads_q)[2 - len(shape) :]:
            raise InvalidProblem(f"{self.name} slopes have shape {shape}; it must be ({heads_q},) or ({batch}, {heads_q}).")
        slopes = self.slopes
        if len(shape) == 1 and batch != 1 and slopes.dtype.itemsize == 2 and getattr(slopes, "requires_grad", True):
            # Their gradient is one sum over all items: rounded item by item, little of it may be left.
            slopes = slopes.float() if hasattr(slopes, "float") else slopes.astype("float32")
        return (expanded(slopes, batch, heads_q),)
