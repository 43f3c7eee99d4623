"""Chunked attention: a sequence is cut into chunks, and a query sees its own (Llama 4's local layers)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashtile.errors import InvalidProblem
from flashtile.problem.mask import Predicate
from flashtile.problem.number import plain, told
from flashtile.problem.score import Position
from flashtile.triton_glue.language import jit, tl


@jit
def chunked_visible(at, args):
    place = at.q - (at.k - at.k % args[0])  # in the key's chunk
    return tl.minimum(place, args[0] - 1 - place) >= 0


@dataclass(frozen=True)
class Chunked(Predicate):
    """Query i sees key j where both stand in the same `size` positions, counted from the first key.

    Chunked(8192) & Band(left=8191, right=0) is causal, and goes by the keys of a chunk alone.
    """

    size: int

    name = "chunked"
    visible = chunked_visible

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", plain(self.size))
        if isinstance(self.size, bool) or not isinstance(self.size, int) or not 1 <= self.size < 2**30:
            raise InvalidProblem(f"chunk size is {told(self.size)}; it must be a positive int below 2**30.")

    def scalars(self) -> tuple[int, ...]:
        return (self.size,)

    @staticmethod
    def apply(at: Position, scalars: tuple[int, ...], tensors: tuple[Any, ...]) -> Any:
        first = at.k - at.k % scalars[0]
        return (at.q >= first) & (at.q < first + scalars[0])
