"""The way of a key tile's dk and dv from registers to memory."""

from flashtile.kernels.device.memory import head_offset, row_offset
from flashtile.kernels.sm90.device.layouts import column_layout, matrix_layout, row_layout
from flashtile.kernels.sm90.device.partial import store_part
from flashtile.triton_glue.gluon import fence_async_shared, gl, gluon, recast, store_wait, tma_store


@gluon.jit
def scaled(sums, scale, CUT: gl.constexpr):
    """The pieces of a gradient times a scale."""
    if CUT:
        return (sums[0] * scale, sums[1] * scale)
    else:
        return (sums[0] * scale,)


@gluon.jit
def store_keys(dk_desc, dv_desc, grads, memory, dk, dv, place, W: gl.constexpr, T: gl.constexpr):
    """Write a consumer's part of dk and dv, through shared memory that no product reads any more; T.outputs.wide_keys: past
    it.
    """
    store_wait(0)  # of the tile before, unless a step that adds to dq has waited
    if T.outputs.sums_dq:  # products of either consumer, and who stores ds, have let go of it
        memory.to.scores.claim(place.visits.end)
        memory.to.scores.claim(place.visits.end + 1)
    first = place.column + W * 64
    if T.outputs.wide_keys:
        if T.outputs.dv:
            store_wide(dv_desc, grads[2], dv[0], 0, first, T.head_dim_v, place, T)
            if T.pieces_v:
                store_wide(dv_desc, grads[2], dv[1], T.columns_v // 2, first, T.head_dim_v, place, T)
        if T.outputs.dk:
            store_wide(dk_desc, grads[1], dk[0], 0, first, T.head_dim, place, T)
            if T.cut:
                store_wide(dk_desc, grads[1], dk[1], T.columns // 2, first, T.head_dim, place, T)
        if T.outputs.copies_dq:
            memory.to.sums.claim(2 * place.visits.end + W)
    elif T.outputs.parted:
        if T.outputs.dk:
            store_halves(dk_desc, grads[1], memory, dk[0], first, T.head_dim, place, W, T)
            if T.cut:
                store_piece(dk_desc, grads[1], memory, dk[1], T.columns // 2, first, T.head_dim, place, W, T)
        else:
            store_halves(dv_desc, grads[2], memory, dv[0], first, T.head_dim_v, place, W, T)
    else:
        PLACES: gl.constexpr = 4 * T.block_q // T.columns_v_stored
        store_pieces(dv_desc, grads[2], memory.ds, dv, first, T.head_dim_v, W * (PLACES // 2), PLACES, T.pieces_v, place, T)
        if T.outputs.copies_dq:
            SHARES: gl.constexpr = 4 * T.columns_dq // T.columns_stored  # of both consumers: each writes where its own were
            memory.to.sums.claim(2 * place.visits.end + W)
            store_pieces(dk_desc, grads[1], memory.shares, dk, first, T.head_dim, W * (SHARES // 2), SHARES, T.cut, place, T)
        else:
            OTHERS: gl.constexpr = 4 * T.block_q // T.columns_stored
            store_wait(0)
            store_pieces(dk_desc, grads[1], memory.ds, dk, first, T.head_dim, W * (OTHERS // 2), OTHERS, T.cut, place, T)
            store_wait(0)


@gluon.jit
def store_pieces(desc, target, staging, sums, first, WIDTH: gl.constexpr, PLACE: gl.constexpr, PLACES: gl.constexpr,
                 CUT: gl.constexpr, place, T: gl.constexpr):  # fmt: skip
    """Write a gradient of 64 keys from `first` on, whole or, where it is CUT, a quarter of its columns after the other, through
    places of their own from PLACE on.
    """
    if CUT:
        COLUMNS: gl.constexpr = sums[1].shape[1]
        halves = gl.split(sums[0].reshape([64, 2, COLUMNS]).permute((0, 2, 1)))
        for i in gl.static_range(2):
            half = gl.convert_layout(halves[i], matrix_layout(COLUMNS), assert_trivial=True)
            store_gradient(desc, target, staging, half, i * COLUMNS, first, WIDTH, PLACE + i, PLACES, place, T)
        store_gradient(desc, target, staging, sums[1], 2 * COLUMNS, first, WIDTH, PLACE + 2, PLACES, place, T)
    else:
        store_gradient(desc, target, staging, sums[0], 0, first, WIDTH, PLACE, PLACES, place, T)


@gluon.jit
def store_wide(desc, target, value, column, first, WIDTH: gl.constexpr, place, T: gl.constexpr):
    """Write the float32 gradient of 64 keys from `first` on; target = (pointer, strides)."""
    COLUMNS: gl.constexpr = value.shape[1]
    row = first + gl.arange(0, 64, row_layout(COLUMNS))[:, None]
    column += gl.arange(0, COLUMNS, column_layout(COLUMNS))[None, :]
    strides = target[1]
    ptr = target[0] + head_offset(place.slab, place.head_kv, strides)
    if T.items.varlen:
        at = ptr + row_offset(place.first_k + row, strides) + column * strides[3]
        gl.store(at, value, mask=(row < place.span_k) & (column < WIDTH))
    else:
        at = ptr + row_offset(row, strides) + column * strides[3]
        gl.store(at, value, mask=(row < desc.shape[2]) & (column < WIDTH))


@gluon.jit
def store_halves(desc, target, memory, value, first, WIDTH: gl.constexpr, place, W: gl.constexpr, T: gl.constexpr):
    """Write the gradient of 64 keys from `first` on, one half of its columns after the other, where the consumer's ds was."""
    COLUMNS: gl.constexpr = value.shape[1] // 2
    halves = gl.split(value.reshape([64, 2, COLUMNS]).permute((0, 2, 1)))
    for i in gl.static_range(2):
        half = gl.convert_layout(halves[i], matrix_layout(COLUMNS), assert_trivial=True)
        store_piece(desc, target, memory, half, i * COLUMNS, first, WIDTH, place, W, T)


@gluon.jit
def store_piece(desc, target, memory, value, column, first, WIDTH: gl.constexpr, place, W: gl.constexpr, T: gl.constexpr):
    """Write some columns of the gradient of 64 keys from `first` on, through where the consumer's ds was."""
    PLACES: gl.constexpr = 4 * T.block_q // value.shape[1]
    store_gradient(desc, target, memory.ds, value, column, first, WIDTH, W * (PLACES // 2), PLACES, place, T)
    store_wait(0)


@gluon.jit
def store_gradient(desc, target, staging, value, column, first, WIDTH: gl.constexpr, PLACE: gl.constexpr, PLACES: gl.constexpr,
                   place, T: gl.constexpr):  # fmt: skip
    """Write the gradient of 64 keys from `first` on, by the copy engine, through one of the PLACES that staging has.

    Where T.items.varlen target = (pointer, strides), for a tile that other items' keys follow.
    """
    COLUMNS: gl.constexpr = value.shape[1]
    staged = recast(staging, desc.dtype, [PLACES, 1, 1, 64, COLUMNS], desc.layout).index(PLACE)
    staged.reshape([64, COLUMNS]).store(value.to(desc.dtype))
    fence_async_shared()
    if T.items.varlen:
        if first + 64 > place.span_k:
            store_part(staged.reshape([64, COLUMNS]), column, target[0], target[1], place.slab, place.head_kv,
                       place.first_k + first, place.span_k - first, WIDTH)  # fmt: skip
        else:
            tma_store(desc, [place.slab, place.head_kv, place.first_k + first, column], staged)
    else:
        tma_store(desc, [place.slab, place.head_kv, first, column], staged)
