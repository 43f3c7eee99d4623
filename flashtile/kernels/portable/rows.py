"""What the backward's passes need of every query besides its data: made by `attention_delta`, read tile by tile."""

from __future__ import annotations

from flashtile.kernels.device.exponential import LOG2E
from flashtile.kernels.device.memory import head_offset, load_tile, row_offset
from flashtile.kernels.device.varlen import first_padded, slab, tile_of
from flashtile.triton_glue.language import PLAIN_INTEGERS, jit, tl


@jit(do_not_specialize=PLAIN_INTEGERS)
def attention_delta(in_ptrs, rows_ptr, strides, seqlen_q, seqlen_k, heads, schedule_ptr, T: tl.constexpr):
    """One program: `tile_of_delta`."""
    tile_of_delta(tl.program_id(0), tl.num_programs(0), in_ptrs, rows_ptr, strides, seqlen_q, seqlen_k, heads, schedule_ptr, T)


@jit
def tile_of_delta(number, tiles, in_ptrs, rows_ptr, strides, seqlen_q, seqlen_k, heads, schedule_ptr, T: tl.constexpr):
    """What the passes need of every query: rows = (lse, delta), where T.exact (maximum, delta, 1 / sum, slip), where T.offset
    (lse, delta, 0, which the pass over queries replaces by what lse lacks), where T.lonely (lse, delta, either, size).

    delta = sum(out * dout, head_dim_v) - dlse. Where T.exact the sum is formed in float64 and dlse left to slip = -dlse,
    which the pass over queries corrects. Where T.lone there is no sum. rows is float32 (batch, heads_q, 2 to 4, padded),
    padded to whole tiles by item, so that the passes load it unmasked and aligned; queries that do not exist or saw nothing get
    +inf first, hence p = 0. lse and delta alternate, but lie in rows of their own where T.apart; unless T.exact or T.offset lse
    counts in powers of two. size: the sum of the magnitudes that delta adds up.
    in_ptrs = (out, dout, lse, dlse or None, stats); strides of out, dout, dlse (batch, heads_q, seqlen_q), rows.
    """
    BLOCK_Q: tl.constexpr = T.block_q
    tile, head, item, _ = tile_of(number, tiles, schedule_ptr, seqlen_q, seqlen_q, seqlen_k, heads, BLOCK_Q, False, T)
    batch, row = slab(item, T), tile * BLOCK_Q
    out_head = in_ptrs[0] + head_offset(batch, head, strides[0]) + row_offset(item.first_q + row, strides[0])
    dout_head = in_ptrs[1] + head_offset(batch, head, strides[1]) + row_offset(item.first_q + row, strides[1])
    WIDE: tl.constexpr = tl.float64 if T.exact else tl.float32
    COLUMNS: tl.constexpr = min(T.columns_v, 256)  # at a time: more would not fit into registers
    wide_delta, size = tl.zeros([BLOCK_Q], WIDE), tl.zeros([BLOCK_Q], WIDE)
    END: tl.constexpr = T.columns_v
    for column in tl.static_range(0, END, COLUMNS):
        total, magnitudes = row_products(out_head, dout_head, strides, item.q - row, column, COLUMNS, WIDE, T)
        wide_delta += total
        size += magnitudes
    delta = wide_delta.to(tl.float32)
    if T.lone:
        delta = tl.zeros([BLOCK_Q], tl.float32)
    index = row + tl.arange(0, BLOCK_Q)
    here = index < item.q
    token = item.first_q + index
    dlse = load_dlse(in_ptrs[3], strides[2], batch, head, token, here)
    rows = rows_ptr + rows_offset(item, head, strides[3], T)
    written = index < tl.cdiv(item.span_q, BLOCK_Q) * BLOCK_Q  # none of a tile that a schedule has no item for
    per_head = (batch * heads + head).to(tl.int64)
    if T.exact:
        rows += index
        stats = in_ptrs[4] + per_head * (2 * seqlen_q) + token
        level = tl.load(stats, mask=here, other=float("-inf"))
        total = tl.load(stats + seqlen_q, mask=here, other=0.0)
        tl.store(rows, tl.where(level == float("-inf"), float("inf"), level), mask=written)
        tl.store(rows + strides[3][2], delta, mask=written)
        tl.store(rows + 2 * strides[3][2], tl.where(total == 0.0, 0.0, tl.div_rn(1.0, total)), mask=written)
        tl.store(rows + 3 * strides[3][2], -dlse, mask=written)
    else:
        delta -= dlse
        level = tl.load(in_ptrs[2] + per_head * seqlen_q + token, mask=here, other=float("-inf"))
        level = tl.where(level == float("-inf"), float("inf"), level)
        if T.apart:
            tl.store(rows + index, level if T.offset else level * LOG2E, mask=written)
            tl.store(rows + index + strides[3][2], delta, mask=written)
            if T.offset:
                tl.store(rows + index + 2 * strides[3][2], tl.zeros_like(delta), mask=written)
            if T.lonely:
                tl.store(rows + index + 3 * strides[3][2], size, mask=written)
        else:
            tl.store(rows + 2 * index, level * LOG2E, mask=written)
            tl.store(rows + 2 * index + 1, delta, mask=written)


@jit
def by_head(tile, head, item, unit, tiles, seqlen_q, heads, T: tl.constexpr):
    """The place of the sum of one of `tiles` in a buffer (heads_q, tiles of all items); `unit` where a schedule says it."""
    if not T.items.ragged:
        BLOCK_Q: tl.constexpr = T.block_q
        per_head = tl.cdiv(seqlen_q, BLOCK_Q)
        unit = (head * (tiles // (per_head * heads)) + item.batch) * per_head + tile
    return unit.to(tl.int64)


@jit
def row_products(a_ptr, b_ptr, strides, end, FIRST: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr, T: tl.constexpr):
    """The sums over COLUMNS of head_dim_v, from FIRST on, of a * b and of its magnitude, per row of a tile; in type WIDE."""
    BLOCK_Q: tl.constexpr = T.block_q
    WIDTH: tl.constexpr = T.head_dim_v - FIRST
    a = load_tile(a_ptr + FIRST * strides[0][3], strides[0], 0, end, WIDTH, BLOCK_Q, COLUMNS, True)
    b = load_tile(b_ptr + FIRST * strides[1][3], strides[1], 0, end, WIDTH, BLOCK_Q, COLUMNS, True)
    products = a.to(WIDE) * b.to(WIDE)
    return tl.sum(products, 1), tl.sum(tl.abs(products), 1)


@jit
def load_dlse(ptr, strides, batch, head, token, here):
    """The gradient of lse for the rows `token` of a tensor, 0 where they are not `here` or ptr is None; strides of dlse."""
    dlse = tl.zeros(token.shape, tl.float32)
    if ptr is not None:
        first = ptr + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
        dlse = tl.load(first + token.to(tl.int64) * strides[2], mask=here, other=0.0)
    return dlse


@jit
def rows_offset(item, head, strides, T: tl.constexpr):
    """Elements from the start of `rows` to those of an item and head; strides of rows."""
    padded = first_padded(item, T).to(tl.int64)
    if not T.apart:
        padded = 2 * padded
    return slab(item, T).to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + padded


@jit
def load_rows(rows_ptr, strides, start, T: tl.constexpr):
    """(lse or maximum, delta, 1 / sum or what lse lacks or 1, slip or size or 0) of the queries from `start`, a multiple of
    block_q.

    rows_ptr: those of an item and head; strides of rows.
    """
    BLOCK_Q: tl.constexpr = T.block_q
    index = tl.arange(0, BLOCK_Q)
    if T.exact:
        rows = rows_ptr + start + index
        level, delta = tl.load(rows), tl.load(rows + strides[2])
        norm, slip = tl.load(rows + 2 * strides[2]), tl.load(rows + 3 * strides[2])
        return level, delta, norm, slip
    elif T.apart:
        rows = rows_ptr + start + index
        level, delta = tl.load(rows), tl.load(rows + strides[2])
        norm, size = tl.full(level.shape, 1.0, tl.float32), tl.zeros_like(level)
        if T.offset:
            norm = tl.load(rows + 2 * strides[2])
        if T.lonely:
            size = tl.load(rows + 3 * strides[2])
        return level, delta, norm, size
    else:
        # The hint is what lets a thread's neighbouring rows come in one load: `start` counts a loop and carries none.
        rows = tl.multiple_of(rows_ptr + 2 * start, 16)
        pairs = tl.load(rows + tl.arange(0, 2 * BLOCK_Q))
        level, delta = tl.split(tl.reshape(pairs, [BLOCK_Q, 2]))
        return level, delta, tl.full(level.shape, 1.0, tl.float32), tl.zeros_like(level)
