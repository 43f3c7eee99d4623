"""A block mask as a predicate: a table that says for each block of scores whether it is visible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashtile.errors import InvalidProblem
from flashtile.problem.mask import Predicate
from flashtile.problem.score import Position, broadcasts
from flashtile.triton_glue.language import jit, tl


@jit
def block_table_visible(at, args):
    rows, columns = tl.cast(args[0], tl.uint32), tl.cast(args[1], tl.uint32)  # a division of fewer instructions than signed
    row, column = (at.row.to(tl.uint32) // rows).to(tl.int32), (at.k.to(tl.uint32) // columns).to(tl.int32)
    here = args[2] + at.batch * args[3][0] + at.head * args[3][1]
    return tl.load(here + row * args[3][2] + column * args[3][3]) != 0


def blocks_of_all(name: str, table: Any, batch: int, heads_q: int) -> Any:
    """A table (batch or 1, heads_q or 1, rows, columns) for all items and heads. Raises InvalidProblem for one of others."""
    if len(table.shape) != 4 or not broadcasts(table.shape[:2], (batch, heads_q)):
        raise InvalidProblem(
            f"{name} has shape {tuple(table.shape)}; it must be (batch, heads, rows, columns), for ({batch}, {heads_q}) or 1."
        )
    return table.expand(batch, heads_q, -1, -1)


@dataclass(frozen=True, eq=False)
class BlockTable(Predicate):
    """Query i sees key j where table[b, h, i // block_q, j // block_k]; bool (batch or 1, heads_q or 1, rows, columns)."""

    table: Any
    block_q: int
    block_k: int

    name = "block_table"
    visible = block_table_visible

    def scalars(self) -> tuple[int, ...]:
        return self.block_q, self.block_k

    def tensors(self, batch: int, heads_q: int) -> tuple[Any, ...]:
        return (blocks_of_all("block table", self.table, batch, heads_q),)

    @staticmethod
    def grain(scalars: tuple[int, ...]) -> tuple[int, int]:
        return scalars[0], scalars[1]

    @staticmethod
    def apply(at: Position, scalars: tuple[int, ...], tensors: tuple[Any, ...]) -> Any:
        return tensors[0][at.batch, at.head, at.row // scalars[0], at.k // scalars[1]] != 0
