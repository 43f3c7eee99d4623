"""The walk along a mask's lists of blocks."""

from __future__ import annotations

from flashtile.triton_glue.language import jit, tl


@jit
def block_list(blocks, batch, head, line):
    """(pointer to the indices, how many blocks are visible in part, how many in part or whole) of a row or column of blocks.

    blocks = (counts, their strides, indices, their strides, ...).
    """
    partial, visited = block_counts(blocks, batch, head, line)
    batch, head, line = batch.to(tl.int64), head.to(tl.int64), line.to(tl.int64)
    return blocks[2] + batch * blocks[3][0] + head * blocks[3][1] + line * blocks[3][2], partial, visited


@jit
def block_counts(blocks, batch, head, line):
    """The latter two of `block_list`."""
    batch, head, line = batch.to(tl.int64), head.to(tl.int64), line.to(tl.int64)
    counts = blocks[0] + batch * blocks[1][0] + head * blocks[1][1] + line * blocks[1][2]
    partial, whole = tl.load(counts), tl.load(counts + 1)
    return partial, partial + whole


@jit
def longest(blocks, batch, head, rank):
    """The row or column of blocks that is the `rank`-th by how many are visible; blocks = (..., order, its strides)."""
    order = blocks[4] + batch.to(tl.int64) * blocks[5][0] + head.to(tl.int64) * blocks[5][1]
    return tl.load(order + rank * blocks[5][2])


@jit
def long_lists(blocks, lines):
    """(how many of the `lines` columns of blocks are far longer than the mean, in the head that has most of these; how many
    columns like the longest have as many blocks as a head)."""
    more = blocks[4] + lines * blocks[5][2]
    return tl.load(more), tl.load(more + blocks[5][2])


@jit
def block_start(indices, step, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Where the tile of BLOCK that is the `step`-th of a list of blocks of SIZE starts."""
    PER: tl.constexpr = SIZE // BLOCK
    return tl.load(indices + step // PER) * SIZE + step % PER * BLOCK
