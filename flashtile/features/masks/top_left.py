"""Causal order and windows counted from the first key: what libraries mean that align positions top-left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashtile.errors import InvalidProblem
from flashtile.problem.mask import Predicate
from flashtile.problem.score import Position
from flashtile.triton_glue.language import jit, tl  # noqa: F401  Triton's interpreter wants tl beside every jit function


@jit
def top_left_visible(at, args):
    keep = at.k <= at.row
    if len(args) > 0:
        keep = keep & (at.k >= at.row - args[0])
    return keep


@dataclass(frozen=True)
class TopLeft(Predicate):
    """Query i sees the keys up to i, whatever the lengths: `Band(right=0)` counted from the first key, not from the last.

    With `left` it sees those from i - left on alone. For items of different lengths; where seqlen_q and seqlen_k are known,
    `Band(right=seqlen_q - seqlen_k)` is the same.
    """

    left: int | None = None

    name = "top_left"
    visible = top_left_visible

    def __post_init__(self) -> None:
        if self.left is not None and (
            isinstance(self.left, bool) or not isinstance(self.left, int) or not 0 <= self.left < 2**31
        ):
            raise InvalidProblem(f"top-left's left is {self.left!r}; it must be an int of 31 bits, at least 0, or None.")

    def scalars(self) -> tuple[int, ...]:
        return () if self.left is None else (self.left,)

    @staticmethod
    def apply(at: Position, scalars: tuple[int, ...], tensors: tuple[Any, ...]) -> Any:
        seen = at.k <= at.row
        return seen & (at.k >= at.row - scalars[0]) if scalars else seen
