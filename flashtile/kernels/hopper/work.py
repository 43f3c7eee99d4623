"""Which query tiles a block computes, and which key tiles these visit."""

from typing import NamedTuple

from flashtile.kernels.hopper.gluon import gl, gluon
from flashtile.kernels.lib.mask import key_range


class Size(NamedTuple):
    """Runtime integers: the problem's, left and right bounding the band, and how many heads go together."""

    batch: gl.tensor
    heads: gl.tensor
    group: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    left: gl.tensor
    right: gl.tensor
    swizzle: gl.tensor


class Walk(NamedTuple):
    """Key tiles of a query tile, in tiles: [first, low) and [high, end) need the mask, [low, high) do not; end > first."""

    first: gl.tensor
    low: gl.tensor
    high: gl.tensor
    end: gl.tensor


@gluon.jit
def rank(turn, T: gl.constexpr):
    """A block's place in the order of a turn.

    Under a causal mask tiles get shorter and shorter. Turns then go to and fro over the blocks, so that who got a longer
    tile gets a shorter one next.
    """
    block = gl.program_id(0)
    if T.zigzag:
        block = gl.where((turn & 1) == 1, gl.num_programs(0) - 1 - block, block)
    return block


@gluon.jit
def turns(tiles, T: gl.constexpr):
    """How many turns this block takes: in each every block gets a tile, in the last one those that come first."""
    whole = tiles // gl.num_programs(0)
    return whole + gl.where(rank(whole, T) < tiles % gl.num_programs(0), 1, 0)


@gluon.jit
def assign(turn, tiles, heads, swizzle, T: gl.constexpr):
    """(tile, batch * head) of a block's turn.

    `swizzle` heads go together, tile by tile: their keys and values stay in the L2 cache, while the long tiles of all of
    them come first.
    """
    place = turn * gl.num_programs(0) + rank(turn, T)
    span = tiles * swizzle
    first = place // span * swizzle
    together = gl.maximum(gl.minimum(heads - first, swizzle), 1)
    tile = place % span // together
    if T.last_first:
        tile = tiles - 1 - tile
    return tile, first + place % span % together


@gluon.jit
def walk(row, ROWS: gl.constexpr, size, T: gl.constexpr):
    """The key tiles of ROWS queries from `row` on; one at least, so that the pipeline always has something to drain."""
    BLOCK_K: gl.constexpr = T.block_k
    shift = size.seqlen_k - size.seqlen_q
    last = gl.minimum(row + ROWS, size.seqlen_q) - 1
    lo, full_lo, full_hi, hi = key_range(
        row + shift, last + shift, size.seqlen_k, size.left, size.right, T.left, T.right, BLOCK_K
    )
    first = lo // BLOCK_K
    end = gl.maximum(gl.cdiv(gl.where(row < size.seqlen_q, hi, 0), BLOCK_K), first + 1)
    low = gl.minimum(gl.cdiv(full_lo, BLOCK_K), end - 1)
    high = gl.minimum(gl.maximum(full_hi // BLOCK_K, low), end - 1)
    return Walk(first, low, high, end)


@gluon.jit
def within(visits, end):
    """The same walk without the tiles from `end` on: queries that see nothing visit none that their block does not load."""
    return Walk(
        gl.minimum(visits.first, end - 1),
        gl.minimum(visits.low, end - 1),
        gl.minimum(visits.high, end - 1),
        gl.minimum(visits.end, end),
    )
