"""Long key tiles of a causal problem that is one wave: the block of a short tile takes their last steps first.

A tile and its counterpart from the other end of a head's keys share their steps evenly. The helper leaves its part of dk and
dv in memory, in the registers' own order, and reports; whoever owns the long tile adds it to its own. Helpers have lower
numbers, so that blocks wait for earlier ones only.
"""

from flashtile._triton import constexpr
from flashtile.kernels.hopper.gluon import gl, gluon
from flashtile.kernels.hopper.layouts import matrix_layout
from flashtile.kernels.hopper.order import await_turn, report
from flashtile.kernels.lib.mask import key_range

GIVES = constexpr(1)  # a job whose dk and dv another block adds to its own
TAKES = constexpr(2)  # that of the other block
FLAGS = constexpr(2)  # where their reports stand, behind the counts of tickets
HANDICAP = constexpr(64)  # queries that a step takes while another tile begins and one ends


@gluon.jit
def divide(tile, own, tiles, sizes, band, T: gl.constexpr):
    """(tile, GIVES, TAKES or 0, steps before the first one, steps) of the block of `tile`, one of a head's `tiles`.

    own: it has helped already.
    """
    other = tiles - 1 - tile
    long = gl.minimum(tile, other)
    most, least = visitors(long, sizes, band, T), visitors(tiles - 1 - long, sizes, band, T)
    kept = gl.minimum((most + least + 1) // 2 + HANDICAP // T.block_q, most)
    helped = (kept < most) & (tile != other)
    gives, takes = helped & (tile > other) & (own == 0), helped & (tile < other)
    steps = gl.where(gives, most - kept, gl.where(takes, kept, gl.where(tile > other, least, most)))
    job = gl.where(gives, GIVES, gl.where(takes, TAKES, 0))
    return gl.where(gives, long, tile), job, gl.where(gives, kept, 0), steps


@gluon.jit
def visitors(tile, sizes, band, T: gl.constexpr):
    """How many query tiles visit a key tile."""
    first = tile * T.block_k - (sizes.k - sizes.q)
    lo, _, _, hi = key_range(first, first, sizes.q, band[1], band[0], T.right, T.left, T.block_q)
    return gl.cdiv(hi - lo, T.block_q)


@gluon.jit
def give(dk, dv, sums, place, sizes, W: gl.constexpr, T: gl.constexpr):
    """Leave a consumer's part of a long tile's dk and dv to the tile's own block."""
    part, flag = place_of_job(sums, place, sizes, W, T)
    store_flat(part, dk[0])
    store_flat(part + 64 * T.columns, dv)
    report(flag)  # every warp


@gluon.jit
def add_given(dk, dv, sums, place, sizes, W: gl.constexpr, T: gl.constexpr):
    """dk and dv with what the helper gave."""
    part, flag = place_of_job(sums, place, sizes, W, T)
    await_turn(flag, 4)
    return (dk[0] + load_flat(part, T.columns),), dv + load_flat(part + 64 * T.columns, T.columns_v)


@gluon.jit
def place_of_job(sums, place, sizes, W: gl.constexpr, T: gl.constexpr):
    """(where a consumer's part of a long tile lies, the flag to which its warps report)."""
    pairs = gl.cdiv(sizes.k, T.block_k) // 2
    number = ((place.batch * sizes.heads + place.head_kv) * pairs + place.tile) * 2 + W
    return sums[3] + number.to(gl.int64) * (64 * (T.columns + T.columns_v)), sums[1] + FLAGS + number


@gluon.jit
def flatten(value):
    """64 rows as the matrix unit leaves them, in the order in which threads hold them."""
    COLUMNS: gl.constexpr = value.shape[1]
    flat: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])  # pyright: ignore[reportAssignmentType]
    value = value.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([64 * COLUMNS])
    return gl.convert_layout(value, flat, assert_trivial=True)


@gluon.jit
def store_flat(ptr, value):
    """Store 64 rows as `flatten` orders them."""
    flat: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])  # pyright: ignore[reportAssignmentType]
    gl.store(ptr + gl.arange(0, 64 * value.shape[1], layout=flat), flatten(value), eviction_policy="evict_first")


@gluon.jit
def load_flat(ptr, COLUMNS: gl.constexpr):
    """What `store_flat` stored."""
    flat: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])  # pyright: ignore[reportAssignmentType]
    value = gl.load(ptr + gl.arange(0, 64 * COLUMNS, layout=flat), eviction_policy="evict_first")
    value = value.reshape([COLUMNS // 8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5]).reshape([64, COLUMNS])
    return gl.convert_layout(value, matrix_layout(COLUMNS), assert_trivial=True)
