"""Block lists: which tiles of a mask hold anything, and which of them are visible whole."""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.errors import InvalidProblem
from flashtile.problem.number import plain

LEAST_BLOCK = 32


@dataclass(frozen=True)
class BlockSpec:
    """The sizes of a mask's blocks, in queries and keys. The mask is what bands and predicates say; lists only repeat it.

    Tensors of a call, all int32, by query block and transposed by key block: `blocks.count_q` (batch, heads_q, rows, 2), how
    many blocks are visible in part and whole; `blocks.index_q` (batch, heads_q, rows, columns), which: first the former;
    `blocks.order_q` (batch, heads_q, rows), the rows from the one with most visible blocks to the one with fewest;
    `blocks.order_k` (batch, heads_q, columns + 2) has two numbers more behind them, the same for all heads: how many columns
    have more than twice the mean, in the head that has most of these; and how many columns like the longest of all heads would
    have as many visible blocks as a head's on average.
    """

    block_q: int
    block_k: int

    def __post_init__(self) -> None:
        for name in ("block_q", "block_k"):
            object.__setattr__(self, name, size := plain(getattr(self, name)))
            if isinstance(size, bool) or not isinstance(size, int) or size < LEAST_BLOCK or size & (size - 1):
                raise InvalidProblem(f"{name} is {size!r}; it must be a power of two, at least {LEAST_BLOCK}.")

    def rows(self, seqlen_q: int) -> int:
        return -(-seqlen_q // self.block_q)

    def columns(self, seqlen_k: int) -> int:
        return -(-seqlen_k // self.block_k)

    def shapes(self, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> dict[str, tuple[int, ...]]:
        """Of the tensors, by name."""
        rows, columns = self.rows(seqlen_q), self.columns(seqlen_k)
        return {
            "blocks.count_q": (batch, heads, rows, 2), "blocks.index_q": (batch, heads, rows, columns),
            "blocks.order_q": (batch, heads, rows),
            "blocks.count_k": (batch, heads, columns, 2), "blocks.index_k": (batch, heads, columns, rows),
            "blocks.order_k": (batch, heads, columns + 2),
        }  # fmt: skip
