"""Prefix: the first keys are visible to every query; with `|` the prefix-LM mask (T5, arXiv 1910.10683, section 3.2.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashtile.errors import InvalidProblem
from flashtile.problem.mask import Predicate
from flashtile.problem.score import Position
from flashtile.triton_glue.language import jit, tl


@jit
def prefix_visible(at, args):
    return at.k < tl.load(args[0] + at.batch * args[1][0])


@dataclass(frozen=True, eq=False)
class Prefix(Predicate):
    """Every query sees the first lengths[b] keys; ints (batch,). A prefix-LM's mask is Prefix(lengths) | Band(right=0)."""

    lengths: Any

    name = "prefix"
    visible = prefix_visible

    def tensors(self, batch: int, heads_q: int) -> tuple[Any, ...]:
        shape = getattr(self.lengths, "shape", None)
        if shape is None or tuple(shape) != (batch,):
            given = f"a {type(self.lengths).__name__}" if shape is None else shape
            raise InvalidProblem(f"prefix lengths are {given}; they must be a tensor ({batch},), a number for each sequence.")
        return (self.lengths,)

    @staticmethod
    def apply(at: Position, scalars: tuple[int, ...], tensors: tuple[Any, ...]) -> Any:
        return at.k < tensors[0][at.batch]
