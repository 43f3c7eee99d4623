"""Products of e4m3: probabilities as a left operand in registers, values turned, sums that are begun anew for every key tile.

A matrix unit takes 8-bit operands from shared memory along what is summed over alone. `values.py` therefore brings values
turned, and their keys in an order in which probabilities need not leave the threads that made them.
"""

from flashtile.kernels.sm90.device.layouts import matrix_layout, operand_layout, row_layout
from flashtile.kernels.sm90.device.parts import part_at
from flashtile.triton_glue.gluon import gl, gluon, pack_e4m3, recast, unpack_e4m3, warpgroup_mma, warpgroup_mma_wait

DEPTH = gl.constexpr(32)  # products of 8 bits that an instruction sums
LIFT_LOG2 = gl.constexpr(8.0)  # probabilities are multiplied by 256: from 2^-14 on e4m3 then has all its bits


@gluon.jit
def scale_of(ptr, strides, item, head):
    """What everything of an item's head is to be multiplied by."""
    return gl.load(ptr + item.batch.to(gl.int64) * strides[0] + head.to(gl.int64) * strides[1])


@gluon.jit
def scores_scale(scale, region, at, group, T: gl.constexpr):
    """The scale of a head's product of what is stored. region as the kernel has it."""
    if T.stored.q_head:
        scale = scale * scale_of(region[4][0], region[4][1], at.item, at.head)
    if T.stored.k_head:
        scale = scale * scale_of(region[4][2], region[4][3], at.item, at.head // group)
    return scale


@gluon.jit
def values_scale(region, at, group, T: gl.constexpr):
    """What a head's out is to be multiplied by; called where T.stored.v_head."""
    return scale_of(region[4][4], region[4][5], at.item, at.head // group)


@gluon.jit
def in_e4m3(tile, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """A tile of bytes as a matrix operand, which lies as they do."""
    rows = tile.reshape([ROWS, COLUMNS])
    return recast(rows, gl.float8e4nv, [ROWS, COLUMNS], rows.layout)


@gluon.jit
def multiply_stored(q, k, ROWS: gl.constexpr, KEYS: gl.constexpr, COLUMNS: gl.constexpr):
    """Queries times a key tile, tiles of bytes, under way."""
    start = gl.zeros([ROWS, KEYS], gl.float32, matrix_layout(KEYS, DEPTH))  # pyright: ignore[reportCallIssue]
    rows, columns = in_e4m3(q, ROWS, COLUMNS), in_e4m3(k, KEYS, COLUMNS)
    return warpgroup_mma(rows, columns.permute((1, 0)), start, use_acc=False, is_async=True)


@gluon.jit
def plain(product):
    """What was multiplied, once it is there, as other tiles of scores and accumulators lie: in the same registers."""
    return gl.convert_layout(product, matrix_layout(product.shape[1]), assert_trivial=True)


@gluon.jit
def stored_weights(p, T: gl.constexpr):
    """Probabilities in e4m3, in the order of `values.turned_key`, four to an int32: each stays in its thread.

    A loop carries words as they are, but takes bytes apart at its end and puts them together at its beginning.
    """
    ROWS: gl.constexpr = T.rows
    KEYS: gl.constexpr = T.block_k
    even, odd = gl.split(p.reshape([ROWS, KEYS // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]))
    a, c = gl.split(even)
    b, d = gl.split(odd)
    return pack_e4m3(a, b, c, d).reshape([ROWS, KEYS // 4])


@gluon.jit
def as_operand(words, COLUMNS: gl.constexpr):
    """What `stored_weights` made as the left operand of a product with COLUMNS."""
    ROWS: gl.constexpr = words.shape[0]
    KEYS: gl.constexpr = 4 * words.shape[1]
    twice = gl.join(words, words)
    four = gl.join(twice, twice).reshape([ROWS, KEYS])
    return unpack_e4m3(gl.convert_layout(four, operand_layout(COLUMNS, DEPTH), assert_trivial=True))


@gluon.jit
def add_stored(rows, mem, use, T: gl.constexpr):
    """The accumulators, times what the rows' `decay` says, plus probabilities times a value tile, which is let go of.

    The matrix unit keeps about 13 bits of what it adds to: its sums start from zero, and are added up in float32 here.
    """
    ROWS: gl.constexpr = T.rows
    KEYS: gl.constexpr = T.block_k
    COLUMNS: gl.constexpr = T.columns_v
    PARTS_V: gl.constexpr = T.parts_v
    ABREAST: gl.constexpr = PARTS_V if COLUMNS == 64 else 1  # pyright: ignore[reportAssignmentType]
    decay = gl.convert_layout(rows.decay, row_layout(COLUMNS))[:, None]
    weights, made = as_operand(rows.weights, COLUMNS), ()
    mem.values.wait(use)
    for first in gl.static_range(0, PARTS_V, ABREAST):
        under_way = ()
        for part in gl.static_range(first, first + ABREAST):
            v = in_e4m3(part_at(mem.v, mem.values.at(use), part, PARTS_V), COLUMNS, KEYS)
            start = gl.zeros([ROWS, COLUMNS], gl.float32, matrix_layout(COLUMNS, DEPTH))  # pyright: ignore[reportCallIssue]
            product = warpgroup_mma(weights, v.permute((1, 0)), start, use_acc=False, is_async=True)
            under_way = under_way + (product,)  # noqa: RUF005 (Triton knows no unpacking)
        for part in gl.static_range(ABREAST):
            product = plain(warpgroup_mma_wait(ABREAST - 1 - part, deps=[under_way[part]]))
            made = made + (rows.acc[first + part] * decay + product,)  # noqa: RUF005
    mem.values.release(use)
    return made
