"""Backward kernels (FlashAttention-2, arXiv 2307.08691, algorithm 2).

split:  delta, then a pass over queries (dq) and a pass over keys (dk, dv); no atomics, bitwise repeatable.
fused:  delta, then the pass over keys alone, which adds its share of dq atomically in float32; then a conversion.
Captured tensors' gradients are formed in the pass over queries, in both variants. It comes first: it corrects delta.
"""

from __future__ import annotations

from flashtile._triton import PLAIN_INTEGERS, jit, tl
from flashtile.kernels.lib.dropout import kept, load_seed
from flashtile.kernels.lib.exponential import LOG2E, exp
from flashtile.kernels.lib.grid import Sizes, assign, padded_rows
from flashtile.kernels.lib.mask import key_range, visible
from flashtile.kernels.lib.memory import head_offset, hold, inside, load_tile, row_offset, store_tile, tile_offsets
from flashtile.kernels.lib.product import (
    add_product,
    aligned_parts,
    free_parts,
    product,
    product_and_rest,
    score_product,
    transposed,
)  # fmt: skip
from flashtile.kernels.lib.score import capture, locate, probabilities, store_totals


@jit(do_not_specialize=PLAIN_INTEGERS)
def attention_delta(in_ptrs, out_ptrs, strides, seqlen_q, heads, T: tl.constexpr):
    """What the passes need of every query: rows = (lse, delta) or, where T.exact, (maximum, delta, 1 / sum, slip).

    delta = sum(out * dout, head_dim_v) - dlse. Where T.exact the sum is formed in float64 and dlse left to slip = -dlse,
    which the pass over queries corrects. Where T.lone there is no sum. rows is float32 (batch, heads_q, 2 or 4, padded),
    padded to whole tiles, so that the passes load it unmasked and aligned; queries that do not exist or saw nothing get
    +inf first, hence p = 0. lse and delta alternate, and lse counts in powers of two unless T.prescale; the four others
    lie in rows of their own.
    in_ptrs = (out, dout, lse, dlse or None, stats, sink or None); out_ptrs = (rows, what each program adds to the gradient of
    sink (heads_q, batch x tiles), or None); strides of out, dout, dlse (batch, heads_q, seqlen_q), sink (heads_q,).
    """
    BLOCK_Q: tl.constexpr = T.block_q
    tiles = tl.cdiv(seqlen_q, BLOCK_Q)
    tile, batch_head = assign(tiles, 1, False)
    batch, head, row = batch_head // heads, batch_head % heads, tile * BLOCK_Q
    out_head = in_ptrs[0] + head_offset(batch, head, strides[0]) + row_offset(row, strides[0])
    dout_head = in_ptrs[1] + head_offset(batch, head, strides[1]) + row_offset(row, strides[1])
    WIDE: tl.constexpr = tl.float64 if T.exact else tl.float32
    COLUMNS: tl.constexpr = min(T.columns_v, 256)  # at a time: more would not fit into registers
    wide_delta = tl.zeros([BLOCK_Q], WIDE)
    END: tl.constexpr = T.columns_v
    for column in tl.static_range(0, END, COLUMNS):
        wide_delta += row_products(out_head, dout_head, strides, seqlen_q - row, column, COLUMNS, WIDE, T)
    delta = wide_delta.to(tl.float32)
    if T.lone:
        delta = tl.zeros([BLOCK_Q], tl.float32)
    index = row + tl.arange(0, BLOCK_Q)
    here = index < seqlen_q
    dlse = load_dlse(in_ptrs[3], strides[2], batch, head, index, seqlen_q)
    rows = out_ptrs[0] + rows_offset(batch_head, seqlen_q, T)
    sink, sunk = 0.0, tl.zeros([BLOCK_Q], tl.float32)  # sunk: the probability that the sink takes
    if T.sink:
        sink = tl.load(in_ptrs[5] + head.to(tl.int64) * strides[3][0]).to(tl.float32)
    if T.exact:
        rows += index
        stats = in_ptrs[4] + batch_head.to(tl.int64) * (2 * seqlen_q) + index
        level = tl.load(stats, mask=here, other=float("-inf"))
        total = tl.load(stats + seqlen_q, mask=here, other=0.0)
        tl.store(rows, tl.where(level == float("-inf"), float("inf"), level))
        tl.store(rows + padded_rows(seqlen_q), delta)
        tl.store(rows + 2 * padded_rows(seqlen_q), tl.where(total == 0.0, 0.0, tl.div_rn(1.0, total)))
        tl.store(rows + 3 * padded_rows(seqlen_q), -dlse)
        if T.sink:
            sunk = tl.where(total == 0.0, 0.0, exp(sink - level, T) / total)
    else:
        delta -= dlse
        level = tl.load(in_ptrs[2] + batch_head.to(tl.int64) * seqlen_q + index, mask=here, other=float("-inf"))
        level = tl.where(level == float("-inf"), float("inf"), level)
        if T.sink:
            sunk = exp(sink - level, T)
        if not T.prescale:
            level *= LOG2E
        tl.store(rows + 2 * index, level)
        tl.store(rows + 2 * index + 1, delta)
    if T.sink:
        if out_ptrs[1] is not None:
            given = tl.where(here, sunk.to(WIDE) * (dlse.to(WIDE) - wide_delta), 0.0)
            batches = tl.num_programs(0) // (tiles * heads)
            tl.store(out_ptrs[1] + (head.to(tl.int64) * batches + batch) * tiles + tile, tl.sum(given).to(tl.float32))


@jit
def row_products(a_ptr, b_ptr, strides, end, FIRST: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr, T: tl.constexpr):
    """The sum over COLUMNS of head_dim_v, from FIRST on, of a * b, per row of a tile; in type WIDE."""
    BLOCK_Q: tl.constexpr = T.block_q
    WIDTH: tl.constexpr = T.head_dim_v - FIRST
    a = load_tile(a_ptr + FIRST * strides[0][3], strides[0], 0, end, WIDTH, BLOCK_Q, COLUMNS, True)
    b = load_tile(b_ptr + FIRST * strides[1][3], strides[1], 0, end, WIDTH, BLOCK_Q, COLUMNS, True)
    return tl.sum(a.to(WIDE) * b.to(WIDE), 1)


@jit
def load_dlse(ptr, strides, batch, head, index, seqlen_q):
    """The gradient of lse for the queries `index`, 0 where ptr is None; strides (batch, heads_q, seqlen_q)."""
    dlse = tl.zeros(index.shape, tl.float32)
    if ptr is not None:
        first = ptr + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
        dlse = tl.load(first + index.to(tl.int64) * strides[2], mask=index < seqlen_q, other=0.0)
    return dlse


@jit
def rows_offset(batch_head, seqlen_q, T: tl.constexpr):
    """Elements from the start of `rows` to those of a head."""
    count = 4 if T.exact else 2
    return batch_head.to(tl.int64) * (count * padded_rows(seqlen_q))


@jit
def load_rows(rows_ptr, batch_head, start, seqlen_q, T: tl.constexpr):
    """(lse or maximum, delta, 1 / sum or 1, slip or 0) of a tile of queries from `start`, a multiple of block_q."""
    BLOCK_Q: tl.constexpr = T.block_q
    rows, index = rows_ptr + rows_offset(batch_head, seqlen_q, T), tl.arange(0, BLOCK_Q)
    if T.exact:
        rows += start + index
        level, delta = tl.load(rows), tl.load(rows + padded_rows(seqlen_q))
        norm, slip = tl.load(rows + 2 * padded_rows(seqlen_q)), tl.load(rows + 3 * padded_rows(seqlen_q))
        return level, delta, norm, slip
    else:
        # The hint is what lets a thread's neighbouring rows come in one load: `start` counts a loop and carries none.
        rows = tl.multiple_of(rows + 2 * start, 16)
        pairs = tl.load(rows + tl.arange(0, 2 * BLOCK_Q))
        level, delta = tl.split(tl.reshape(pairs, [BLOCK_Q, 2]))
        return level, delta, tl.full(level.shape, 1.0, tl.float32), tl.zeros_like(level)


@jit
def beyond_mean(dout, v, delta, slip, keep, factor, T: tl.constexpr):
    """The gradient of p, less its mean over the row: dp - delta, from parts of dout and v in either order.

    Where T.dropout dp is `factor` times the product where `keep` says so, and 0 elsewhere.

    Both may be ten times their difference, so where T.exact neither dp's rounding nor delta's is let into it.
    A lone key has p = 1 whatever its score: but for dlse it is its own mean.
    """
    if T.exact:
        dp, rest = product_and_rest(dout, v, T)
        if T.lone:
            dp, rest = dp - dp, tl.zeros_like(dp)  # 0, or NaN where something is not finite
        if T.dropout:
            factors = tl.where(keep, factor, 0.0)
            return tl.fma(dp, factors, tl.zeros_like(dp) - delta) + tl.fma(rest, factors, tl.zeros_like(dp) - slip)
        return (dp - delta) + (rest - slip)
    else:
        dp = product(dout, v, T)
        if T.lone:
            dp = dp - dp
        if T.dropout:
            dp *= tl.where(keep, factor, 0.0)
        return dp - delta


@jit
def key_step(dk, dv, k, v, in_ptrs, dq_ptr, strides, sizes, seen, place, walk, start, scale, band, score_args,
             MASKED: tl.constexpr, T: tl.constexpr, SCORE: tl.constexpr):  # fmt: skip
    """Add one query tile of one head to dk and dv of a key tile (scores transposed: keys x queries).

    walk = (first, span): `start` runs from `first` through a span of queries for one head of the group after another.
    seen = (first, end) queries that see this key tile; place = (batch, head_kv, key indices as a column, the first of them,
    seed of dropout).
    """
    BLOCK_Q: tl.constexpr = T.block_q
    COLUMNS: tl.constexpr = T.columns
    batch, head = place[0], place[1]
    start = tl.multiple_of(start, BLOCK_Q)
    if T.grouped:
        member = (start - walk[0]) // walk[1]
        start = tl.multiple_of(start - member * walk[1], BLOCK_Q)
        head = place[1] * sizes.group + member
    q_ptr = in_ptrs[0] + head_offset(batch, head, strides[0]) + row_offset(start, strides[0])
    dout_ptr = in_ptrs[3] + head_offset(batch, head, strides[3]) + row_offset(start, strides[3])
    first, end = seen[0] - start, seen[1] - start
    q = load_tile(q_ptr, strides[0], first, end, T.head_dim, BLOCK_Q, T.columns, MASKED)
    dout = load_tile(dout_ptr, strides[3], first, end, T.head_dim_v, BLOCK_Q, T.columns_v, MASKED)
    index = start + tl.arange(0, BLOCK_Q)
    level, delta, norm, slip = load_rows(in_ptrs[4], batch * sizes.heads + head, start, sizes.q, T)
    at = locate(batch, head, index[None, :], place[2], sizes)
    keep = visible(index[None, :], place[2], sizes, band, T)
    q_parts, dout_parts = aligned_parts(q, T), aligned_parts(dout, T)
    raw = score_product(k, transposed(q_parts, T), T)
    survives = kept(place[4], batch * sizes.heads + head, start, place[3], True, T)
    dp = beyond_mean(v, transposed(dout_parts, T), delta[None, :], slip[None, :], survives, place[4][4], T)
    row = (level[None, :], 0.0, norm[None, :])
    p, ds = probabilities(raw, dp, row, at, keep, scale, score_args, MASKED, T, SCORE)
    if T.dropout:
        p = tl.where(survives, p, 0.0)
    dv = add_product(dv, free_parts(p, dout.dtype, T), dout_parts, T)
    ds = free_parts(ds, q.dtype, T)
    dk = add_product(dk, ds, q_parts, T)
    if T.adds_dq:
        share = add_product(tl.zeros([BLOCK_Q, COLUMNS], tl.float32), transposed(ds, T), k, T)
        target = dq_ptr + head_offset(batch, head, strides[4]) + row_offset(start, strides[4])
        target += tile_offsets(strides[4], BLOCK_Q, T.columns)
        if T.exact:  # dq itself is float32 and receives the shares; otherwise `attention_convert` scales their sum
            share = share * scale
        tl.atomic_add(target, share, mask=inside(first, end, T.head_dim, BLOCK_Q, T.columns, True), sem="relaxed")
    return dk, dv


@jit(do_not_specialize=PLAIN_INTEGERS)
def attention_backward_keys(in_ptrs, grad_ptrs, strides, seqlen_q, seqlen_k, heads, group, left, right, scale, score_args,
                            T: tl.constexpr, SCORE: tl.constexpr):  # fmt: skip
    """One program: dk, dv of one key tile of one key/value head, over all its query heads; with dq, the fused pass.

    in_ptrs = (q, k, v, dout, rows); grad_ptrs = (sum for dq, float32 zeroed, or None; dk; dv);
    strides of q, k, v, dout, dq, dk, dv.
    """
    BLOCK_Q: tl.constexpr = T.block_q
    BLOCK_K: tl.constexpr = T.block_k
    COLUMNS: tl.constexpr = T.columns
    COLUMNS_V: tl.constexpr = T.columns_v
    sizes, band, heads_kv = Sizes(seqlen_q, seqlen_k, heads, group), (left, right), heads // group
    tile, batch_head = assign(tl.cdiv(seqlen_k, BLOCK_K), T.swizzle, T.last_first)
    batch, head_kv, column = batch_head // heads_kv, batch_head % heads_kv, tile * BLOCK_K
    shift = seqlen_k - seqlen_q
    first, last = column - shift, tl.minimum(column + BLOCK_K, seqlen_k) - 1 - shift
    lo, full_lo, full_hi, hi = key_range(first, last, seqlen_q, right, left, T.right, T.left, BLOCK_Q)
    if column + BLOCK_K > seqlen_k:  # keys beyond the end: no tile of queries is free of masking
        full_lo = hi
        full_hi = hi
    seen_from = 0
    if T.right:
        seen_from = tl.maximum(first - right, 0)
    seen = (seen_from, hi)

    keys_here = seqlen_k - column
    k_tile = in_ptrs[1] + head_offset(batch, head_kv, strides[1]) + row_offset(column, strides[1])
    v_tile = in_ptrs[2] + head_offset(batch, head_kv, strides[2]) + row_offset(column, strides[2])
    key_first, key_end = 0, keys_here  # keys that any query sees: others may hold NaN, and 0 * NaN is NaN
    if T.left:
        key_first = tl.maximum(shift - left - column, 0)
    if T.right:
        key_end = tl.minimum(keys_here, keys_here + right)
    k = load_tile(k_tile, strides[1], key_first, key_end, T.head_dim, BLOCK_K, T.columns, True)
    v = load_tile(v_tile, strides[2], key_first, key_end, T.head_dim_v, BLOCK_K, T.columns_v, True)
    if T.held > 0:
        v = hold(v, COLUMNS_V)
    if T.held > 1:
        k = hold(k, COLUMNS)
    k, v = aligned_parts(k, T), aligned_parts(v, T)
    dk = tl.zeros([BLOCK_K, COLUMNS], tl.float32)
    dv = tl.zeros([BLOCK_K, COLUMNS_V], tl.float32)
    seed = load_seed(score_args, T)
    place = (batch, head_kv, column + tl.arange(0, BLOCK_K)[:, None], column, seed)
    dq_ptr = grad_ptrs[0]
    members = group if T.grouped else 1
    if T.right or T.pads_keys:
        before = (lo, tl.cdiv(full_lo - lo, BLOCK_Q) * BLOCK_Q)
        for start in tl.range(lo, lo + before[1] * members, BLOCK_Q):
            dk, dv = key_step(dk, dv, k, v, in_ptrs, dq_ptr, strides, sizes, seen, place, before, start, scale, band,
                              score_args, True, T, SCORE)  # fmt: skip
    inner = (full_lo, full_hi - full_lo)
    for start in tl.range(full_lo, full_lo + inner[1] * members, BLOCK_Q):
        dk, dv = key_step(dk, dv, k, v, in_ptrs, dq_ptr, strides, sizes, seen, place, inner, start, scale, band,
                          score_args, False, T, SCORE)  # fmt: skip
    after = (full_hi, tl.cdiv(hi - full_hi, BLOCK_Q) * BLOCK_Q)
    for start in tl.range(full_hi, full_hi + after[1] * members, BLOCK_Q):
        dk, dv = key_step(dk, dv, k, v, in_ptrs, dq_ptr, strides, sizes, seen, place, after, start, scale, band,
                          score_args, True, T, SCORE)  # fmt: skip

    if grad_ptrs[1] is not None:
        dk_tile = grad_ptrs[1] + head_offset(batch, head_kv, strides[5]) + row_offset(column, strides[5])
        store_tile(dk_tile, strides[5], dk * scale, keys_here, T.head_dim, BLOCK_K, T.columns)
    if grad_ptrs[2] is not None:
        dv_tile = grad_ptrs[2] + head_offset(batch, head_kv, strides[6]) + row_offset(column, strides[6])
        if T.dropout:
            dv *= seed[4]
        store_tile(dv_tile, strides[6], dv, keys_here, T.head_dim_v, BLOCK_K, T.columns_v)


@jit
def query_step(dq, totals, off, q, dout, row, k_ptr, v_ptr, strides, sizes, seen, place, start, scale, band,
               score_args, grad_args, MASKED: tl.constexpr, T: tl.constexpr, SCORE: tl.constexpr,
               CAPTURED: tl.constexpr):  # fmt: skip
    """Add the key tile at `start` to dq of a query tile; row = (level, delta, norm, slip) as columns.

    off = (the sum of p * (dp - delta) without slip, which should be 0; what a unit of it makes of dq, where T.exact; of
    totals).
    """
    BLOCK_K: tl.constexpr = T.block_k
    first, end = seen[0] - start, seen[1] - start
    k = load_tile(k_ptr + row_offset(start, strides[1]), strides[1], first, end, T.head_dim, BLOCK_K, T.columns, MASKED)
    v = load_tile(v_ptr + row_offset(start, strides[2]), strides[2], first, end, T.head_dim_v, BLOCK_K, T.columns_v, MASKED)
    key = start + tl.arange(0, BLOCK_K)[None, :]
    at = locate(place[0], place[1], place[2], key, sizes)
    keep = visible(place[2], key, sizes, band, T)
    k = aligned_parts(k, T)
    raw = score_product(q, transposed(k, T), T)
    survives = kept(place[4], place[0] * sizes.heads + place[1], place[3], start, False, T)
    dp = beyond_mean(dout, transposed(aligned_parts(v, T), T), row[1], row[3], survives, place[4][4], T)
    row = (row[0], 0.0, row[2], row[3])
    if T.slots > 0:
        totals = capture(totals, raw, dp, row, at, keep, scale, score_args, grad_args, True, T, SCORE, CAPTURED)
    p, ds = probabilities(raw, dp, row, at, keep, scale, score_args, MASKED, T, SCORE)
    if T.corrects:
        excess = p * (dp + row[3])
        if MASKED:
            excess = tl.where(keep, excess, 0.0)
        ones = tl.full(dp.shape, 1.0, tl.float32)
        units, turn = off[2], off[1]
        if T.exact:
            _, weight = probabilities(raw, ones, row, at, keep, scale, score_args, MASKED, T, SCORE)
            turn = tl.dot(weight.to(tl.bfloat16), k[0].to(tl.bfloat16), turn)
        if T.slots > 0:
            units = capture(units, raw, ones, row, at, keep, scale, score_args, grad_args, False, T, SCORE, CAPTURED)
        off = (off[0] + tl.sum(excess, 1), turn, units)
    return add_product(dq, free_parts(ds, k[0].dtype, T), k, T), totals, off


@jit(do_not_specialize=PLAIN_INTEGERS)
def attention_backward_queries(in_ptrs, dq_ptr, strides, seqlen_q, seqlen_k, heads, group, left, right, scale, score_args,
                               grad_args, T: tl.constexpr, SCORE: tl.constexpr, CAPTURED: tl.constexpr):  # fmt: skip
    """One program: dq of one query tile of one head.

    in_ptrs = (q, k, v, dout, rows, dlse or None, sink or None); strides of q, k, v, dout, dq, dlse, sink (heads_q,).

    T.corrects: delta comes of out, which was rounded, by another arithmetic than dp. sum(ds) over a row's keys shows how
    far the two are apart; a sink's probability, which has no dp, is set off first. What is summed over many rows for a
    captured tensor is corrected by that; where T.exact dq too, and slip in `rows` for the pass over keys. (Plain PyTorch forms
    delta of the very dp: what has to cancel, cancels.)
    """
    BLOCK_Q: tl.constexpr = T.block_q
    BLOCK_K: tl.constexpr = T.block_k
    COLUMNS: tl.constexpr = T.columns
    WIDTH: tl.constexpr = T.width
    q_ptr, k_ptr, v_ptr, dout_ptr, rows_ptr, dlse_ptr, sink_ptr = in_ptrs
    sizes, band = Sizes(seqlen_q, seqlen_k, heads, group), (left, right)
    tiles = tl.cdiv(seqlen_q, BLOCK_Q)
    tile, batch_head = assign(tiles, T.swizzle, T.last_first)
    batch, head = batch_head // heads, batch_head % heads
    row, shift = tile * BLOCK_Q, seqlen_k - seqlen_q
    first, last = row + shift, tl.minimum(row + BLOCK_Q, seqlen_q) - 1 + shift
    lo, full_lo, full_hi, hi = key_range(first, last, seqlen_k, left, right, T.left, T.right, BLOCK_K)
    seen_from = 0
    if T.left:
        seen_from = tl.maximum(first - left, 0)
    seen = (seen_from, hi)

    rows_here = seqlen_q - row
    q_tile = q_ptr + head_offset(batch, head, strides[0]) + row_offset(row, strides[0])
    dout_tile = dout_ptr + head_offset(batch, head, strides[3]) + row_offset(row, strides[3])
    k_head = k_ptr + head_offset(batch, head // group, strides[1])
    v_head = v_ptr + head_offset(batch, head // group, strides[2])
    q = load_tile(q_tile, strides[0], 0, rows_here, T.head_dim, BLOCK_Q, T.columns, True)
    dout = load_tile(dout_tile, strides[3], 0, rows_here, T.head_dim_v, BLOCK_Q, T.columns_v, True)
    if T.held > 0:
        q = hold(q, COLUMNS)
    if T.held > 1:
        dout = hold(dout, T.columns_v)
    q, dout = aligned_parts(q, T), aligned_parts(dout, T)
    index = row + tl.arange(0, BLOCK_Q)
    level, delta, norm, slip = load_rows(rows_ptr, batch_head, row, seqlen_q, T)
    totals = tl.zeros([BLOCK_Q, WIDTH], tl.float32)
    off = (delta, delta, totals)  # unused unless T.corrects
    if T.corrects:
        off = (tl.zeros([BLOCK_Q], tl.float32), delta, totals)
        mean = delta
        if T.exact:
            off = (off[0], tl.zeros([BLOCK_Q, COLUMNS], tl.float32), totals)
        else:  # delta holds dlse already
            slip = -load_dlse(dlse_ptr, strides[5], batch, head, index, seqlen_q)
            mean = delta - slip
        if T.sink:
            sink = tl.load(sink_ptr + head.to(tl.int64) * strides[6][0]).to(tl.float32)
            off = (off[0] - exp(sink - level, T) * norm * mean, off[1], off[2])
    row_state = (level[:, None], delta[:, None], norm[:, None], slip[:, None])
    place = (batch, head, index[:, None], row, load_seed(score_args, T))
    dq = tl.zeros([BLOCK_Q, COLUMNS], tl.float32)
    if T.left:
        for start in tl.range(lo, full_lo, BLOCK_K):
            dq, totals, off = query_step(dq, totals, off, q, dout, row_state, k_head, v_head, strides, sizes, seen, place,
                                         start, scale, band, score_args, grad_args, True, T, SCORE, CAPTURED)  # fmt: skip
    for start in tl.range(full_lo, full_hi, BLOCK_K):
        dq, totals, off = query_step(dq, totals, off, q, dout, row_state, k_head, v_head, strides, sizes, seen, place,
                                     start, scale, band, score_args, grad_args, False, T, SCORE, CAPTURED)  # fmt: skip
    for start in tl.range(full_hi, hi, BLOCK_K):
        dq, totals, off = query_step(dq, totals, off, q, dout, row_state, k_head, v_head, strides, sizes, seen, place,
                                     start, scale, band, score_args, grad_args, True, T, SCORE, CAPTURED)  # fmt: skip
    if T.corrects:
        totals -= off[0][:, None] * off[2]
    if T.corrects and T.exact:
        dq -= off[0][:, None] * off[1]
        tl.store(rows_ptr + rows_offset(batch_head, seqlen_q, T) + 3 * padded_rows(seqlen_q) + index, slip + off[0])
    if T.slots > 0:
        store_totals(tl.sum(totals, 0), batch_head * tiles + tile, grad_args, T, SCORE, CAPTURED)
    if dq_ptr is not None:
        dq_tile = dq_ptr + head_offset(batch, head, strides[4]) + row_offset(row, strides[4])
        store_tile(dq_tile, strides[4], dq * scale, rows_here, T.head_dim, BLOCK_Q, T.columns)


@jit(do_not_specialize=PLAIN_INTEGERS)
def attention_convert(source_ptr, target_ptr, strides, seqlen_q, heads, scale, T: tl.constexpr):
    """target = source * scale in the target's type, tile by tile. strides of source, target, as for q."""
    BLOCK_Q: tl.constexpr = T.block_q
    tile, batch_head = assign(tl.cdiv(seqlen_q, BLOCK_Q), 1, False)
    batch, head, row = batch_head // heads, batch_head % heads, tile * BLOCK_Q
    source = source_ptr + head_offset(batch, head, strides[0]) + row_offset(row, strides[0])
    target = target_ptr + head_offset(batch, head, strides[1]) + row_offset(row, strides[1])
    value = load_tile(source, strides[0], 0, seqlen_q - row, T.head_dim, BLOCK_Q, T.columns, True)
    store_tile(target, strides[1], value * scale, seqlen_q - row, T.head_dim, BLOCK_Q, T.columns)


@jit
def sum_partials(source_ptr, target_ptr, count, BLOCK: tl.constexpr):
    """target[i] = the sum of source[i, :count], in a fixed order."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, count, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total += tl.load(source_ptr + row * count + column, mask=column < count, other=0.0)
    tl.store(target_ptr + row, tl.sum(total))
