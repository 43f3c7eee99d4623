"""Long key tiles whose steps several blocks take: who takes the last ones begins before who takes the first ones.

Of a causal problem that is one wave the block of a short tile helps that of its counterpart from the other end of a head's
keys, so that both take as many steps. With lists a long one is T.schedule.pieces tickets. Helpers leave their part of dk and
dv in memory, in the registers' own order, and report; the tile's own block adds it to its own. Helpers have lower tickets, so
that blocks wait for earlier ones only.
"""

from flashtile.kernels.device.mask import key_range
from flashtile.kernels.sm90.device.layouts import matrix_layout
from flashtile.kernels.sm90.device.locks import await_turn, report
from flashtile.triton_glue.gluon import gl, gluon, uniform
from flashtile.triton_glue.language import constexpr

FLAGS = constexpr(4)  # where helpers' reports stand, behind the counts of tickets
HANDICAP = constexpr(64)  # queries that a step takes while another tile begins and one ends


@gluon.jit
def divide(tile, own, tiles, batch_head, sizes, band, T: gl.constexpr):
    """(tile, job, steps before the first one, steps) of the block of `tile`, one of a head's `tiles`.

    own: it has helped already.
    """
    other = tiles - 1 - tile
    long = gl.minimum(tile, other)
    most, least = visitors(long, sizes, band, T), visitors(tiles - 1 - long, sizes, band, T)
    kept = gl.minimum((most + least + 1) // 2 + HANDICAP // T.block_q, most)
    helped = (kept < most) & (tile != other)
    gives, takes = helped & (tile > other) & (own == 0), helped & (tile < other)
    steps = gl.where(gives, most - kept, gl.where(takes, kept, gl.where(tile > other, least, most)))
    number = batch_head * (tiles // 2) + long
    job = gl.where(gives, gives_to(number, 1, T), gl.where(takes, takes_of(number), 0))
    return gl.where(gives, long, tile), job, gl.where(gives, kept, 0), steps


@gluon.jit
def gives_to(number, piece, T: gl.constexpr):
    """The job of who takes a piece, from 1 on, of the `number`-th tile that is taken in pieces, and gives it away."""
    return number * (T.schedule.pieces - 1) + piece


@gluon.jit
def takes_of(number):
    """The job of who takes piece 0, and then what the others gave."""
    return -1 - number


@gluon.jit
def visitors(tile, sizes, band, T: gl.constexpr):
    """How many query tiles visit a key tile."""
    first = tile * T.block_k - (sizes.k - sizes.q)
    lo, _, _, hi = key_range(first, first, sizes.q, band[1], band[0], T.mask.right, T.mask.left, T.block_q)
    return gl.cdiv(hi - lo, T.block_q)


@gluon.jit
def give(dk, dv, sums, job, W: gl.constexpr, T: gl.constexpr):
    """Leave a consumer's part of a piece's dk and dv to who takes it."""
    part, number = place_of_piece(sums, job - 1, W, T), (job - 1) // (T.schedule.pieces - 1)
    store_flat(part, dk[0])
    store_flat(part + 64 * T.columns, dv[0])
    report(sums[1] + FLAGS + 2 * number + W)  # every warp


@gluon.jit
def add_given(dk, dv, sums, job, W: gl.constexpr, T: gl.constexpr):
    """dk and dv with what the helpers gave."""
    number = -1 - job
    await_turn(sums[1] + FLAGS + 2 * number + W, 4 * (T.schedule.pieces - 1))
    own, own_v, others = dk[0], dv[0], gl.to_tensor(T.schedule.pieces - 1)
    if T.schedule.pieces > 2:  # once in the code: what is jumped over costs, too
        others = uniform(others)
    for i in range(others):
        part = place_of_piece(sums, number * (T.schedule.pieces - 1) + i, W, T)
        own, own_v = own + load_flat(part, T.columns), own_v + load_flat(part + 64 * T.columns, T.columns_v)
    return (own,), (own_v,)


@gluon.jit
def place_of_piece(sums, number, W: gl.constexpr, T: gl.constexpr):
    """Where a consumer's part of what is given lies."""
    return sums[3] + (2 * number + W).to(gl.int64) * (64 * (T.columns + T.columns_v))


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
