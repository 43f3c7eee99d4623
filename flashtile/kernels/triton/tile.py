"""Tile: everything that the compiler must know, as one constexpr."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flashtile.spec.attention import AttentionProblem

Pass = Literal["forward", "keys", "queries", "fused"]


@dataclass(frozen=True)
class Launch:
    """A tile choice: what `tune` measures and the tuned files hold."""

    block_q: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 2
    swizzle: int = 1

    def spell(self) -> str:
        return f"{self.block_q}x{self.block_k} warps={self.num_warps} stages={self.num_stages} swizzle={self.swizzle}"


@dataclass(frozen=True)
class Tile:
    """Compile-time part of a kernel call. Plain ints, bools and strings only: Triton keys its cache by their text."""

    block_q: int
    block_k: int
    head_dim: int
    head_dim_v: int
    columns: int  # head_dim, padded to what a tile can have
    columns_v: int
    group: int  # query heads per key/value head
    left: bool  # the band is bounded on the left
    right: bool
    pads_keys: bool  # the last key tile reaches beyond the keys
    prescale: bool  # scores are scaled before the softmax: there are modifiers, or the scale is not positive
    precision: str
    swizzle: int
    last_first: bool
    slots: int = 0  # places for per-head sums of captured gradients, a power of two or 0

    @property
    def width(self) -> int:
        return max(self.slots, 1)


def padded(head_dim: int) -> int:
    """Columns of a tile for this head_dim: a power of two, at least 16 (the matrix units' least depth)."""
    return max(16, 1 << (head_dim - 1).bit_length())


def make_tile(problem: AttentionProblem, launch: Launch, which: Pass, slots: int = 0) -> Tile:
    """The constexpr of one kernel call. Under a causal bound the longest tiles start first."""
    band = problem.mask.clipped(problem.seqlen_q, problem.seqlen_k)
    return Tile(
        block_q=launch.block_q,
        block_k=launch.block_k,
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        columns=padded(problem.head_dim),
        columns_v=padded(problem.head_dim_v),
        group=problem.group,
        left=band.left is not None,
        right=band.right is not None,
        pads_keys=problem.seqlen_k % launch.block_k != 0,
        prescale=bool(problem.score) or problem.scale_value <= 0,
        precision=problem.precision,
        swizzle=launch.swizzle,
        last_first=band.right is not None and which in ("forward", "queries"),
        slots=1 << (slots - 1).bit_length() if slots else 0,
    )
