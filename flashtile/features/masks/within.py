"""A band as a predicate, for masks that are an "or" of several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashtile.problem.mask import Band, Predicate
from flashtile.problem.score import Position
from flashtile.triton_glue.language import jit, tl

FAR = 2**30  # beyond every distance between positions, and safe to add to one


@jit
def within_visible(at, args):
    return tl.maximum(at.q - at.k - args[0], at.k - at.q - args[1]) <= 0


@dataclass(frozen=True, eq=False)
class Within(Predicate):
    """The band as a predicate."""

    band: Band

    name = "within"
    visible = within_visible

    def scalars(self) -> tuple[int, ...]:
        return tuple(FAR if b is None else max(-FAR, min(b, FAR)) for b in (self.band.left, self.band.right))

    @staticmethod
    def apply(at: Position, scalars: tuple[int, ...], tensors: tuple[Any, ...]) -> Any:
        return (at.k >= at.q - scalars[0]) & (at.k <= at.q + scalars[1])
