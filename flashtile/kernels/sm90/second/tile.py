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
    stages: int  # tiles of queries under way
    block_q: int
    swizzle: int = 4  # heads that go together, for the L2 cache
    block_k: int = 2 * GROUP_ROWS
    cut: bool = False  # no product leaves out columns
    clears: bool = True  # the sum of dq is zero before
    tells: bool = False  # every role finds its tile and its steps itself

    @classmethod
    def of(cls, p: AttentionProblem, arriving: int = 1) -> SecondTile:
        """The tile for a problem; arriving: tensors like out that a step loads, 2 where dout's tangent does."""
        mask = BackwardMask.of(p, p.seqlen_k % (2 * GROUP_ROWS) != 0, blanks=unseen(p))
        columns, columns_v = columns_of(p.head_dim), columns_of(p.head_dim_v)
        half, moves = columns > GROUP_ROWS, arriving > 1
        return cls(
            *(p.head_dim, p.head_dim_v, columns, columns_v, mask, Items.of(p)),
            stages=(1 if half else 2) if moves else 2 if half else 3,  # which is what shared memory has room for
            block_q=GROUP_ROWS // 2 if half else GROUP_ROWS,
        )

    @property
    def turned(self) -> bool:
        """Whether a share of dq is made columns x queries: registers have room for the scores of half as many queries."""
        return self.block_q < GROUP_ROWS

    @property
    def columns_dq(self) -> int:
        """Columns of a part of dq's sum: a consumer adds all of them, of its own keys."""
        return self.columns

    @property
    def parts_dq(self) -> int:
        """In how many parts a share is added, of 64 columns each."""
        return self.columns // GROUP_ROWS

    @property
    def raised(self) -> float:
        """By how much products are less than they should be (`arguments.product_scale`)."""
        return 1.0 + LOST * self.head_dim

    def spell(self) -> str:
        return f"{self.block_q}x{self.block_k} stages={self.stages} swizzle={self.swizzle}"
