"""Dilated attention: every n-th key, counted from the query (Longformer, arXiv 2004.05150, section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashtile.errors import InvalidProblem
from flashtile.problem.mask import Predicate
from flashtile.problem.number import plain, told
from flashtile.problem.score import Position
from flashtile.triton_glue.language import jit, tl


@jit
def dilated_visible(at, args):
    return tl.abs(at.q - at.k) % args[0] == 0


@dataclass(frozen=True)
class Dilated(Predicate):
    """Query i sees key j where their distance is a multiple of `step`; Dilated(4) & Band(left=256, right=0)."""

    step: int

    name = "dilated"
    visible = dilated_visible

    def __post_init__(self) -> None:
        object.__setattr__(self, "step", plain(self.step))
        if isinstance(self.step, bool) or not isinstance(self.step, int) or not 1 <= self.step < 2**31:
            raise InvalidProblem(f"dilated step is {told(self.step)}; it must be a positive int below 2**31.")

    def scalars(self) -> tuple[int, ...]:
        return (self.step,)

    @staticmethod
    def apply(at: Position, scalars: tuple[int, ...], tensors: tuple[Any, ...]) -> Any:
        return (at.q - at.k) % scalars[0] == 0
