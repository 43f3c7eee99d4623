"""A mask whose blocks are stored, as far as they are visible in part: for masks that are known by their values alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashtile.features.masks.block_table import blocks_of_all
from flashtile.problem.mask import Predicate
from flashtile.problem.score import Position
from flashtile.triton_glue.language import jit, tl


@jit
def stored_blocks_visible(at, args):
    row, column = at.row // args[0], at.k // args[1]
    place = tl.load(args[2] + at.batch * args[3][0] + at.head * args[3][1] + row * args[3][2] + column * args[3][3])
    inside = (at.row - row * args[0]) * args[5][1] + (at.k - column * args[1]) * args[5][2]
    return tl.load(args[4] + place.to(tl.int64) * args[5][0] + inside) != 0


@dataclass(frozen=True, eq=False)
class StoredBlocks(Predicate):
    """Query i sees key j where values[place[b, h, i // block_q, j // block_k], i % block_q, j % block_k].

    place: int32 (batch or 1, heads_q or 1, rows, columns); values: bool (n, block_q, block_k).
    """

    place: Any
    values: Any

    name = "stored_blocks"
    visible = stored_blocks_visible

    def scalars(self) -> tuple[int, ...]:
        return self.values.shape[1], self.values.shape[2]

    def tensors(self, batch: int, heads_q: int) -> tuple[Any, ...]:
        return blocks_of_all("stored blocks' place", self.place, batch, heads_q), self.values

    @staticmethod
    def apply(at: Position, scalars: tuple[int, ...], tensors: tuple[Any, ...]) -> Any:
        block_q, block_k = scalars
        place = tensors[0][at.batch, at.head, at.row // block_q, at.k // block_k].long()
        return tensors[1][place, at.row % block_q, at.k % block_k] != 0
