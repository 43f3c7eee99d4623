"""Memory-bound passes around the backward: what it needs of every query, and the way from its sum to dq. Plain Triton."""

from __future__ import annotations

from flashtile.kernels.device.exponential import FAR, LOG2E
from flashtile.kernels.device.grid import ROWS, padded_rows
from flashtile.kernels.device.memory import head_offset, load_tile, row_offset, store_tile
from flashtile.kernels.device.stream import await_stream
from flashtile.kernels.device.varlen import Item, assign_tile, first_padded, slab
from flashtile.triton_glue.language import PLAIN_INTEGERS, jit, tl


@jit
def last_first(seqlen_q):
    """(64 queries, batch * head) of this program, from the last: what a pass wrote last is still in the L2 cache."""
    tiles = padded_rows(seqlen_q) // 64
    place = tl.num_programs(0) - 1 - tl.program_id(0)
    return place % tiles, place // tiles


@jit
def rows_tile(in_ptrs, out_ptrs, strides, head, item, padded, row, seqlen_q, heads, scale, T: tl.constexpr):
    """The part of `attention_rows` for 64 queries of an item from `row` on; (what they add to the gradient of sink, which have
    a finite lse beyond FAR).
    """
    COLUMNS: tl.constexpr = T.columns
    batch, token = slab(item, T), item.first_q + row
    out_head = in_ptrs[0] + head_offset(batch, head, strides[0]) + row_offset(token, strides[0])
    dout_head = in_ptrs[1] + head_offset(batch, head, strides[1]) + row_offset(token, strides[1])
    out = load_tile(out_head, strides[0], 0, item.q - row, T.head_dim_v, 64, T.columns_v, True)
    dout = load_tile(dout_head, strides[1], 0, item.q - row, T.head_dim_v, 64, T.columns_v, True)
    total = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    index = row + tl.arange(0, 64)
    here = index < item.q
    if in_ptrs[3] is not None:
        dlse_head = in_ptrs[3] + batch.to(tl.int64) * strides[2][0] + head.to(tl.int64) * strides[2][1]
        at = dlse_head + (item.first_q + index).to(tl.int64) * strides[2][2]
        total -= tl.load(at, mask=here, other=0.0)
    head_lse = in_ptrs[2] + (batch * heads + head).to(tl.int64) * seqlen_q + item.first_q
    lse = tl.load(head_lse + index, mask=here, other=float("-inf"))
    level = tl.where(lse == float("-inf"), float("inf"), lse)
    delta = tl.where(lse == float("-inf"), 0.0, total)  # dout of a query that saw nothing may be NaN
    sunk = 0.0
    if T.modifiers.sink:
        sink = tl.load(in_ptrs[4] + head.to(tl.int64) * strides[3][0]).to(tl.float32)
        sunk = tl.sum(-tl.exp2((sink - level) * LOG2E) * delta)
    level = -level / scale if T.modifiers.folds_level else level * LOG2E
    if T.modifiers.folds:
        delta = -delta
    per_head, first = (batch * heads + head).to(tl.int64) * padded, first_padded(item, T)
    head_rows, rows = per_head + first, out_ptrs[0] + 2 * per_head + (first + index)
    written = index < tl.cdiv(item.span_q, ROWS) * ROWS  # none of a tile that a schedule has no item for
    tl.store(rows, level, mask=written)
    tl.store(rows + padded, delta, mask=written)
    exists = item.span_q > row // ROWS * ROWS
    if out_ptrs[1] is not None:
        sums = out_ptrs[1] + (head_rows + row) * COLUMNS + tl.arange(0, 64 * COLUMNS)
        tl.store(sums, tl.zeros([64 * COLUMNS], tl.float32), mask=exists)
    if T.locked:
        PARTS: tl.constexpr = T.columns // T.columns_dq
        locks = out_ptrs[3] + (head_rows + row) // 64 * PARTS + tl.arange(0, PARTS)
        tl.store(locks, tl.zeros([PARTS], tl.int32), mask=exists)
    distance = tl.abs(lse)
    return sunk, ((distance > FAR) & (distance < float("inf"))).to(tl.int32)


@jit(do_not_specialize=PLAIN_INTEGERS)
def attention_rows(in_ptrs, out_ptrs, strides, seqlen_q, heads, scale, region, T: tl.constexpr):
    """What the backward needs of every query, (level, delta), and zeros for the counts of tickets and the sum of dq, if given.

    64 queries per program or, where T.items.ragged, a tile of ROWS of the schedule; region as for `visit.walk`, but with a
    number of flags that are to be cleared behind the counts of tickets, or None.
    level is lse in the form that the kernel exponentiates (T.modifiers.folds_level: -lse / scale, what the matrix unit
    starts from; otherwise lse * log2(e)); rows without any visible key, and rows that do not exist, get the
    infinity that makes p = 0. delta = sum(out * dout) - dlse, negative if T.modifiers.folds.
    in_ptrs = (out, dout, lse, dlse or None, sink or None); out_ptrs = (rows, sum or None, tickets, locks if T.locked else
    None, what each program adds to the gradient of sink (heads_q, programs of a head) or None, a word of each program, not 0
    where one of its rows has an lse beyond FAR, or None); strides of out, dout, dlse
    (batch, heads_q, seqlen_q), sink (heads_q,).
    rows is float32 (batch, heads_q, 2, padded), sum float32 (batch, heads_q, padded, columns), locks int32 (batch, heads_q,
    padded / 64, columns / columns_dq): how many have added (`order`).
    """
    await_stream()
    if T.items.ragged:
        tile, head, item, unit = assign_tile(region[0], seqlen_q, seqlen_q, seqlen_q, heads, ROWS, False, T)
        padded = padded_rows(seqlen_q)
        if T.items.varlen:
            padded = region[1]
        sunk, far = rows_tile(in_ptrs, out_ptrs, strides, head, item, padded, tile * ROWS, seqlen_q, heads, scale, T)
        more, others = rows_tile(in_ptrs, out_ptrs, strides, head, item, padded, tile * ROWS + 64, seqlen_q, heads, scale, T)
        sunk, far = sunk + more, far | others
    else:
        tile, batch_head = last_first(seqlen_q)
        batch, head = batch_head // heads, batch_head % heads
        item, padded = Item(batch, batch * 0, seqlen_q, seqlen_q, batch * 0, seqlen_q, seqlen_q), padded_rows(seqlen_q)
        sunk, far = rows_tile(in_ptrs, out_ptrs, strides, head, item, padded, tile * 64, seqlen_q, heads, scale, T)
        unit = (head * (tl.num_programs(0) // (padded // 64 * heads)) + batch) * (padded // 64) + tile
    COUNTS: tl.constexpr = T.counts
    if tl.program_id(0) == 0:
        tl.store(out_ptrs[2] + tl.arange(0, COUNTS), tl.zeros([COUNTS], tl.int32))
    if region[2] is not None:
        for flag in tl.range(tl.program_id(0), region[2], tl.num_programs(0)):
            tl.store(out_ptrs[2] + COUNTS + flag, 0)
    if out_ptrs[5] is not None:
        tl.store(out_ptrs[5] + tl.program_id(0), tl.max(far, 0))
    if T.modifiers.sink:
        if out_ptrs[4] is not None:
            tl.store(out_ptrs[4] + unit.to(tl.int64), sunk)


@jit
def dq_tile(sum_ptrs, dq_ptr, strides, head, item, padded, row, heads, scale, T: tl.constexpr):
    """The part of `attention_dq` for 64 queries of an item from `row` on."""
    COLUMNS: tl.constexpr = T.columns
    WIDE: tl.constexpr = T.columns_dq
    batch = slab(item, T)
    head_rows = (batch * heads + head).to(tl.int64) * padded + first_padded(item, T)
    at = sum_ptrs[0] + (head_rows + row) * COLUMNS + tl.arange(0, 64 * COLUMNS)
    # (half, 8 columns, warp, row, pair, row of 8, column of a pair) -> (warp, row of 8, row, half, 8 columns, pair, column)
    exists = item.span_q > row // ROWS * ROWS
    there = exists
    if T.cut:  # nothing was added for columns that do not exist
        there = exists & (tl.arange(0, 64 * COLUMNS) < 48 * COLUMNS)
    value = tl.load(at, mask=there, other=0.0) if T.items.ragged or T.cut else tl.load(at)
    if not T.clears:  # nor for queries that no key tile visits: the sum is under way meanwhile
        PARTS: tl.constexpr = T.columns // T.columns_dq
        added = tl.load(sum_ptrs[1] + (head_rows + row) // 64 * PARTS, mask=exists, other=0)
        value = tl.where(added != 0, value, 0.0)
    value = tl.reshape(value, [COLUMNS // WIDE, WIDE // 8, 4, 8, 4, 2, 2])
    value = tl.reshape(tl.permute(value, (2, 5, 3, 0, 1, 4, 6)), [64, COLUMNS])
    if T.items.ragged:  # rows that do not count may have met an infinite key
        value = tl.where((row + tl.arange(0, 64) < item.q)[:, None], value, 0.0)
    dq = dq_ptr + head_offset(batch, head, strides) + row_offset(item.first_q + row, strides)
    store_tile(dq, strides, value * scale, item.span_q - row, T.head_dim, 64, COLUMNS)


@jit(do_not_specialize=PLAIN_INTEGERS)
def attention_dq(sum_ptrs, dq_ptr, strides, seqlen_q, heads, scale, region, T: tl.constexpr):
    """dq = sum * scale in its own type and order; strides of dq. The inverse of `backward.add_dq`. Programs as above.

    sum_ptrs = (sum, None or, where not T.clears, locks).
    """
    await_stream()
    if T.items.ragged:
        tile, head, item, _ = assign_tile(region[0], seqlen_q, seqlen_q, seqlen_q, heads, ROWS, False, T)
        padded = padded_rows(seqlen_q)
        if T.items.varlen:
            padded = region[1]
        dq_tile(sum_ptrs, dq_ptr, strides, head, item, padded, tile * ROWS, heads, scale, T)
        dq_tile(sum_ptrs, dq_ptr, strides, head, item, padded, tile * ROWS + 64, heads, scale, T)
    else:
        tile, batch_head = last_first(seqlen_q)
        batch, head = batch_head // heads, batch_head % heads
        item = Item(batch, batch * 0, seqlen_q, seqlen_q, batch * 0, seqlen_q, seqlen_q)
        dq_tile(sum_ptrs, dq_ptr, strides, head, item, padded_rows(seqlen_q), tile * 64, heads, scale, T)
