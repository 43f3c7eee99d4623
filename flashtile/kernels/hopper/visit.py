"""Which queries a block of the backward visits, and which blocks have visited them before."""

from typing import NamedTuple

from flashtile.kernels.hopper.gluon import aggregate, gl, gluon
from flashtile.kernels.lib.grid import Sizes, seat
from flashtile.kernels.lib.mask import key_range


class Work(NamedTuple):
    """What all blocks share: key/value heads of the whole batch, sizes, and the bounds of the band."""

    slabs: gl.tensor
    sizes: Sizes
    band: tuple[gl.tensor, gl.tensor]


@gluon.jit
def key_tiles(work, T: gl.constexpr):
    """How many there are, of all heads."""
    return gl.cdiv(work.sizes.k, T.block_k) * work.slabs


@aggregate
class Walk:
    """A key tile and the query tiles that see it, for one query head of the group after another."""

    tile: gl.tensor
    column: gl.tensor
    batch: gl.tensor
    head_kv: gl.tensor
    lo: gl.tensor
    full_lo: gl.tensor
    full_hi: gl.tensor
    tiles: gl.tensor
    begin: gl.tensor
    end: gl.tensor

    @gluon.constexpr_function
    def __init__(self, tile, column, batch, head_kv, lo, full_lo, full_hi, tiles, begin, end):
        self.tile = tile
        self.column = column
        self.batch = batch
        self.head_kv = head_kv
        self.lo = lo
        self.full_lo = full_lo
        self.full_hi = full_hi
        self.tiles = tiles
        self.begin = begin  # steps of a block are counted over all of its tiles
        self.end = end

    @gluon.jit
    def at(self, step, T: gl.constexpr):
        """(query head, first query) of a step."""
        if T.group == 1:
            return self.head_kv, self.lo - self.begin * T.block_q + step * T.block_q
        else:
            done = step - self.begin
            return self.head_kv * T.group + done // self.tiles, self.lo + done % self.tiles * T.block_q

    @gluon.jit
    def turn(self, start, sizes, band, T: gl.constexpr):
        """How many key tiles add to the query tile at `start` before this one. Blocks only wait for earlier ones.

        Under a right bound the last tile comes first: each begins at its own diagonal, one tile behind the next, so that
        nobody waits. Without, all begin with the first query that they see, and run one behind the other.
        """
        shift = sizes.k - sizes.q
        if T.right:
            end = gl.cdiv(gl.maximum(start + T.block_q + shift + band[1], 0), T.block_k)
            tiles = gl.cdiv(sizes.k, T.block_k)
            end = gl.where(start + T.block_q > sizes.q, tiles, gl.minimum(end, tiles))
            return end - 1 - self.tile
        elif T.left:
            return self.tile - gl.maximum(start + shift - band[0], 0) // T.block_k
        else:
            return self.tile


@gluon.jit
def walk(ticket, begin, work, T: gl.constexpr):
    """The walk of whoever holds the ticket and has taken `begin` steps before."""
    BLOCK_Q: gl.constexpr = T.block_q
    BLOCK_K: gl.constexpr = T.block_k
    sizes, band = work.sizes, work.band
    tile, batch_head = seat(ticket, gl.cdiv(sizes.k, BLOCK_K), work.slabs, T.swizzle, T.last_first)
    heads_kv = sizes.heads // T.group
    column, shift = tile * BLOCK_K, sizes.k - sizes.q
    first, last = column - shift, gl.minimum(column + BLOCK_K, sizes.k) - 1 - shift
    lo, full_lo, full_hi, hi = key_range(first, last, sizes.q, band[1], band[0], T.right, T.left, BLOCK_Q)
    if T.pads_keys:  # keys beyond the end: no tile of queries is free of masking
        if column + BLOCK_K > sizes.k:
            full_lo = hi
            full_hi = hi
    tiles = gl.cdiv(hi - lo, BLOCK_Q)
    return Walk(tile, column, batch_head // heads_kv, batch_head % heads_kv, gl.to_tensor(lo), gl.to_tensor(full_lo),
                gl.to_tensor(full_hi), tiles, begin, begin + tiles * T.group)  # fmt: skip
