"""The tile of second derivatives: what the compiler must know, as one constexpr."""

from __future__ import annotations

from dataclasses import dataclass

from flashtile.kernels.device.tile import Items
from flashtile.kernels.sm90.host.tile_backward import BackwardMask, unseen
from flashtile.kernels.sm90.host.tile_forward import GROUP_ROWS, LOST, Narrow, columns_of
from flashtile.problem.attention import AttentionProblem


@dataclass(frozen=True)
class SecondTile(Narrow):
    """Compile-time part of the pass over keys, and of `rows.attention_dq` behind it."""

    head_dim: int
    head_dim_v: int
    columns: int
    columns_v: int
    mask: BackwardMask
    items: Items
    stages: int = 2  # tiles of queries under way
    swizzle: int = 4  # heads that go together, for the L2 cache
    block_q: int = GROUP_ROWS
    block_k: int = 2 * GROUP_ROWS
    cut: bool = False  # no product leaves out columns
    clears: bool = True  # the sum of dq is zero before
    tells: bool = False  # every role finds its tile and its steps itself

    @classmethod
    def of(cls, p: AttentionProblem) -> SecondTile:
        mask = BackwardMask.of(p, p.seqlen_k % (2 * GROUP_ROWS) != 0, blanks=unseen(p))
        return cls(p.head_dim, p.head_dim_v, columns_of(p.head_dim), columns_of(p.head_dim_v), mask, Items.of(p))

    @property
    def columns_dq(self) -> int:
        """Columns of a part of dq's sum: a consumer adds all of them, of its own keys."""
        return self.columns

    @property
    def raised(self) -> float:
        """By how much products are less than they should be (`arguments.product_scale`)."""
        return 1.0 + LOST * self.head_dim

    def spell(self) -> str:
        return f"{self.block_q}x{self.block_k} stages={self.stages} swizzle={self.swizzle}"
