"""Memory-bound passes around the backward: what it needs of every query, and the way from its sum to dq. Plain Triton."""

from __future__ import annotations

from flashtile._triton import PLAIN_INTEGERS, jit, tl
from flashtile.kernels.lib.exponential import LOG2E
from flashtile.kernels.lib.grid import padded_rows
from flashtile.kernels.lib.memory import head_offset, load_tile, row_offset, store_tile


@jit
def last_first(seqlen_q):
    """(64 queries, batch * head) of this program, from the last: what a pass wrote last is still in the L2 cache."""
    tiles = padded_rows(seqlen_q) // 64
    place = tl.num_programs(0) - 1 - tl.program_id(0)
    return place % tiles, place // tiles


@jit(do_not_specialize=PLAIN_INTEGERS)
def attention_rows(in_ptrs, out_ptrs, strides, seqlen_q, heads, scale, T: tl.constexpr):
    """What the backward needs of every query, (level, delta), and a sum of zeros for dq and of tickets. 64 queries per program.

    level is lse in the form that the kernel exponentiates (T.folds_level: -lse / scale, what the matrix unit starts from;
    T.prescale: lse; otherwise lse * log2(e)); rows without any visible key, and rows that do not exist, get the
    infinity that makes p = 0. delta = sum(out * dout) - dlse, negative if T.folds_delta.
    in_ptrs = (out, dout, lse, dlse or None); out_ptrs = (rows, sum, tickets, and locks if T.deterministic); strides of out, dout,
    dlse (batch, heads_q, seqlen_q).
    rows is float32 (batch, heads_q, 2, padded), sum float32 (batch, heads_q, padded, columns), locks int32 (batch, heads_q,
    padded / 64, columns / columns_dq): how many have added (`order`).
    """
    COLUMNS: tl.constexpr = T.columns
    tile, batch_head = last_first(seqlen_q)
    batch, head, row = batch_head // heads, batch_head % heads, tile * 64
    out_head = in_ptrs[0] + head_offset(batch, head, strides[0]) + row_offset(row, strides[0])
    dout_head = in_ptrs[1] + head_offset(batch, head, strides[1]) + row_offset(row, strides[1])
    out = load_tile(out_head, strides[0], 0, seqlen_q - row, T.head_dim_v, 64, T.columns_v, True)
    dout = load_tile(dout_head, strides[1], 0, seqlen_q - row, T.head_dim_v, 64, T.columns_v, True)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    index = row + tl.arange(0, 64)
    here = index < seqlen_q
    if in_ptrs[3] is not None:
        dlse_head = in_ptrs[3] + batch.to(tl.int64) * strides[2][0] + head.to(tl.int64) * strides[2][1]
        delta -= tl.load(dlse_head + index.to(tl.int64) * strides[2][2], mask=here, other=0.0)
    level = tl.load(in_ptrs[2] + batch_head.to(tl.int64) * seqlen_q + index, mask=here, other=float("-inf"))
    level = tl.where(level == float("-inf"), float("inf"), level)
    if T.folds_level:
        level = -level / scale
    elif not T.prescale:
        level = level * LOG2E
    if T.folds_delta:
        delta = -delta
    head_rows = batch_head.to(tl.int64) * padded_rows(seqlen_q)
    rows = out_ptrs[0] + 2 * head_rows + index
    tl.store(rows, level)
    tl.store(rows + padded_rows(seqlen_q), delta)
    total = out_ptrs[1] + (head_rows + row) * COLUMNS + tl.arange(0, 64 * COLUMNS)
    tl.store(total, tl.zeros([64 * COLUMNS], tl.float32))
    if tl.program_id(0) == 0:
        tl.store(out_ptrs[2], 0)
    if T.deterministic:
        PARTS: tl.constexpr = T.columns // T.columns_dq
        tl.store(out_ptrs[3] + (head_rows + row) // 64 * PARTS + tl.arange(0, PARTS), tl.zeros([PARTS], tl.int32))


@jit(do_not_specialize=PLAIN_INTEGERS)
def attention_dq(sum_ptr, dq_ptr, strides, seqlen_q, heads, scale, T: tl.constexpr):
    """dq = sum * scale in its own type and order; strides of dq. The inverse of `backward.add_dq`. 64 queries per program."""
    COLUMNS: tl.constexpr = T.columns
    WIDE: tl.constexpr = T.columns_dq
    tile, batch_head = last_first(seqlen_q)
    batch, head, row = batch_head // heads, batch_head % heads, tile * 64
    at = sum_ptr + (batch_head.to(tl.int64) * padded_rows(seqlen_q) + row) * COLUMNS + tl.arange(0, 64 * COLUMNS)
    # (half, 8 columns, warp, row, pair, row of 8, column of a pair) -> (warp, row of 8, row, half, 8 columns, pair, column)
    value = tl.reshape(tl.load(at), [COLUMNS // WIDE, WIDE // 8, 4, 8, 4, 2, 2])
    value = tl.reshape(tl.permute(value, (2, 5, 3, 0, 1, 4, 6)), [64, COLUMNS])
    dq = dq_ptr + head_offset(batch, head, strides) + row_offset(row, strides)
    store_tile(dq, strides, value * scale, seqlen_q - row, T.head_dim, 64, COLUMNS)
