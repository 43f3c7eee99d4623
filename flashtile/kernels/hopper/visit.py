"""Which queries a block of the backward visits, and which blocks have visited them before."""

from flashtile.kernels.hopper.gluon import aggregate, gl, gluon
from flashtile.kernels.lib.grid import assign
from flashtile.kernels.lib.mask import key_range


@aggregate
class Walk:
    """The key tile of a program and the query tiles that see it, for one query head of the group after another."""

    tile: gl.tensor
    column: gl.tensor
    batch: gl.tensor
    head_kv: gl.tensor
    lo: gl.tensor
    full_lo: gl.tensor
    full_hi: gl.tensor
    tiles: gl.tensor

    @gluon.constexpr_function
    def __init__(self, tile, column, batch, head_kv, lo, full_lo, full_hi, tiles):
        self.tile = tile
        self.column = column
        self.batch = batch
        self.head_kv = head_kv
        self.lo = lo
        self.full_lo = full_lo
        self.full_hi = full_hi
        self.tiles = tiles

    @gluon.jit
    def at(self, step, T: gl.constexpr):
        """(query head, first query) of a step."""
        if T.group == 1:
            return self.head_kv, self.lo + step * T.block_q
        else:
            return self.head_kv * T.group + step // self.tiles, self.lo + step % self.tiles * T.block_q

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
def walk(sizes, band, T: gl.constexpr):
    BLOCK_Q: gl.constexpr = T.block_q
    BLOCK_K: gl.constexpr = T.block_k
    tile, batch_head = assign(gl.cdiv(sizes.k, BLOCK_K), T.swizzle, T.last_first)
    heads_kv = sizes.heads // T.group
    column, shift = tile * BLOCK_K, sizes.k - sizes.q
    first, last = column - shift, gl.minimum(column + BLOCK_K, sizes.k) - 1 - shift
    lo, full_lo, full_hi, hi = key_range(first, last, sizes.q, band[1], band[0], T.right, T.left, BLOCK_Q)
    if T.pads_keys:  # keys beyond the end: no tile of queries is free of masking
        if column + BLOCK_K > sizes.k:
            full_lo = hi
            full_hi = hi
    lo = gl.to_tensor(lo)
    return Walk(tile, column, batch_head // heads_kv, batch_head % heads_kv, lo, gl.to_tensor(full_lo), gl.to_tensor(full_hi),
                gl.cdiv(hi - lo, BLOCK_Q))  # fmt: skip
