"""Backward kernels (FlashAttention-2, arXiv 2307.08691, algorithm 2).

split:  delta, then a pass over queries (dq) and a pass over keys (dk, dv); no atomics, bitwise repeatable.
fused:  delta, then the pass over keys alone, which adds its share of dq atomically, in fp32 to dq itself; else a conversion.
The gradients of captured tensors and sinks are formed in the pass over queries, in both variants. It comes first, and in
float64 and small 16-bit problems always: it corrects delta.
"""

from __future__ import annotations

from flashtile.kernels.device.blocks import block_list, block_start
from flashtile.kernels.device.dropout import dropped, kept, load_seed
from flashtile.kernels.device.exponential import FAR, LOG2E, exp
from flashtile.kernels.device.grid import Sizes, assign, this_program
from flashtile.kernels.device.mask import seen, zero_unseen
from flashtile.kernels.device.memory import (
    column_offset,
    head_offset,
    hold,
    inside,
    load_tile,
    row_offset,
    store_tile,
    tile_offsets,
)
from flashtile.kernels.device.product import (
    add_product,
    add_to_sum,
    aligned_parts,
    free_parts,
    long_sum,
    product,
    product_and_rest,
    score_product,
    transposed,
    whole_sum,
)
from flashtile.kernels.device.score import capture, locate, probabilities, store_totals
from flashtile.kernels.portable.opening import Scene, key_tile, keys_seen, query_tile
from flashtile.kernels.portable.rows import by_head, load_dlse, load_rows, rows_offset
from flashtile.triton_glue.language import PLAIN_INTEGERS, constexpr, jit, tl

# How far a row's probabilities, below float32's grade, may add up to something else than 1: exp2(score - level) has the
# roundings of both. Keys that are not there may have so much in all, a quarter of what fp16's rounding of out may be.
WHOLE = constexpr(2.0**-13)
WHOLE_PER_LEVEL = constexpr(2.0**-22)


@jit
def beyond_mean(dout, v, delta, rest, keep, factor, T: tl.constexpr):
    """The gradient of p, less its mean over the row: dp - delta, from parts of dout and v in either order.

    rest: slip where T.exact, where T.lonely the size of what delta adds up (`rows.py`).
    Where T.modifiers.dropout dp is `factor` times the product where `keep` says so, and 0 elsewhere.

    Both may be ten times their difference, so of aligned parts neither dp's rounding nor delta's is let into it.
    A lone key has p = 1 whatever its score: but for dlse it is its own mean. A mask may leave a query one key at run time
    alone, or one that outweighs the others: plain PyTorch gets 0 there, and so do we where the two agree but for T.noise.
    """
    if T.parts and not T.cut:
        dp, low = product_and_rest(dout, v, T)
        if T.lone:
            dp, low = dp - dp, tl.zeros_like(dp)  # 0, or NaN where something is not finite
        if T.modifiers.dropout:
            factors = tl.where(keep, factor, 0.0)
            return tl.fma(dp, factors, tl.zeros_like(dp) - delta) + tl.fma(low, factors, tl.zeros_like(dp) - rest)
        return (dp - delta) + (low - rest)
    else:
        dp = product(dout, v, T)
        if T.lone:
            dp = dp - dp
        if T.modifiers.dropout:
            dp *= tl.where(keep, factor, 0.0)
        dp -= delta
        if T.exact:
            dp -= rest
        if T.lonely:
            dp = tl.where(tl.abs(dp) < rest * T.noise, 0.0, dp)
        elif T.noise > 0.0:
            dp = tl.where(tl.abs(dp) < tl.abs(delta) * T.noise, 0.0, dp)
        return dp


@jit
def seen_parts(k, keep, T: tl.constexpr):
    """The parts of a key tile, 0 in keys that no query of this tile sees."""
    if T.parts:
        return zero_unseen(k[0], keep, 1), zero_unseen(k[1], keep, 1), zero_unseen(k[2], keep, 1)
    else:
        return (zero_unseen(k[0], keep, 1),)


@jit
def key_step(dk, dv, keys, dq_ptr, walk, start, scene, MASKED: tl.constexpr, T: tl.constexpr, SCORE: tl.constexpr,
             MASK: tl.constexpr):  # fmt: skip
    """Add one query tile of one head to dk and dv of a key tile (scores transposed: keys x queries); keys = (k, v), in parts.

    walk = (first, span): `start` runs from `first` through a span of queries for one head of the group after another.
    Strides of q, k, v, dout, dq, rows.
    """
    k, v = keys
    in_ptrs, strides, sizes, ends, place, scale, band, score_args, _ = scene
    BLOCK_Q: tl.constexpr = T.block_q
    COLUMNS: tl.constexpr = T.columns
    WIDE = tl.float64 if T.wide else tl.float32
    batch, head = place[0], place[1]
    start = tl.multiple_of(start, BLOCK_Q)
    if T.grouped:
        member = (start - walk[0]) // walk[1]
        start = tl.multiple_of(start - member * walk[1], BLOCK_Q)
        head = place[1] * sizes.group + member
    q_ptr = in_ptrs[0] + column_offset(head, strides[0]) + row_offset(start, strides[0])
    dout_ptr = in_ptrs[1] + column_offset(head, strides[3]) + row_offset(start, strides[3])
    first, end = ends[0] - start, ends[1] - start
    q = load_tile(q_ptr, strides[0], first, end, T.head_dim, BLOCK_Q, T.columns, MASKED)
    dout = load_tile(dout_ptr, strides[3], first, end, T.head_dim_v, BLOCK_Q, T.columns_v, MASKED)
    index = start + tl.arange(0, BLOCK_Q)
    level, delta, norm, slip = load_rows(in_ptrs[2] + head.to(tl.int64) * strides[5][1], strides[5], start, T)
    at = locate(batch, head, index[None, :], place[2], sizes, MASKED and T.mask.pads_keys)
    keep = seen(at, index[None, :], place[2], sizes, band, MASKED, T, MASK)
    if MASKED and T.mask.predicate:
        q, dout = zero_unseen(q, keep, 0), zero_unseen(dout, keep, 0)
    q_parts, dout_parts = aligned_parts(q, T), aligned_parts(dout, T)
    raw = score_product(k, transposed(q_parts, T), T)
    survives = kept(place[4], batch * sizes.heads + head, start, place[3], True, T)
    dp = beyond_mean(v, transposed(dout_parts, T), delta[None, :], slip[None, :], survives, place[4].factor, T)
    row = (level[None, :], 0.0, norm[None, :])
    p, ds = probabilities(raw, dp, row, at, keep, scale, score_args, MASKED, T, SCORE)
    p = dropped(p, survives, place[4], T)
    dv = add_to_sum(dv, free_parts(p, dout.dtype, T), dout_parts, T)
    ds = free_parts(ds, q.dtype, T)
    dk = add_to_sum(dk, ds, q_parts, T)
    if T.adds_dq:
        if MASKED and T.mask.predicate:
            k = seen_parts(k, keep, T)
        share = add_product(tl.zeros([BLOCK_Q, COLUMNS], WIDE), transposed(ds, T), k, T)
        target = dq_ptr + column_offset(head, strides[4]) + row_offset(start, strides[4])
        target += tile_offsets(strides[4], BLOCK_Q, T.columns)
        if q.dtype == tl.float32 and not T.wide:  # dq itself receives the shares; else `attention_convert` scales their sum
            share = share * scale
        tl.atomic_add(target, share, mask=inside(first, end, T.head_dim, BLOCK_Q, T.columns, True), sem="relaxed")
    return dk, dv


@jit(do_not_specialize=PLAIN_INTEGERS)
def attention_backward_keys(in_ptrs, grad_ptrs, strides, seqlen_q, seqlen_k, heads, group, left, right, scale, score_args,
                            region, T: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """One program: `tile_of_keys`."""
    tile_of_keys(this_program(), in_ptrs, grad_ptrs, strides, Sizes(seqlen_q, seqlen_k, heads, group),
                 (left, right, region[1]), scale, score_args, region, T, SCORE, MASK)  # fmt: skip


@jit
def tile_of_keys(program, in_ptrs, grad_ptrs, strides, spans, band, scale, score_args, region, T: tl.constexpr,
                 SCORE: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """dk, dv of one key tile of one key/value head, over all its query heads; with dq, the fused pass.

    program, spans and band as for `forward_tile`.
    in_ptrs = (q, k, v, dout, rows); grad_ptrs = (sum for dq, zeroed, float32 or float64, or None; dk; dv);
    strides of q, k, v, dout, dq, rows, dk, dv.
    """
    BLOCK_Q: tl.constexpr = T.block_q
    BLOCK_K: tl.constexpr = T.block_k
    COLUMNS: tl.constexpr = T.columns
    COLUMNS_V: tl.constexpr = T.columns_v
    seqlen_q, heads, group = spans.q, spans.heads, spans.group
    left, right = band[0], band[1]
    heads_kv = heads // group
    head_kv, item, sizes, batch, column, shift, queries_of = key_tile(program, region, spans, heads_kv, band, T)
    lo, full_lo, full_hi, hi, ends = queries_of
    if not T.mask.predicate:
        if column + BLOCK_K > item.k:  # keys beyond the end: no tile of queries is free of masking
            full_lo = hi
            full_hi = hi

    keys_here, column_k = item.k - column, item.first_k + column
    k_tile = in_ptrs[1] + head_offset(batch, head_kv, strides[1]) + row_offset(column_k, strides[1])
    v_tile = in_ptrs[2] + head_offset(batch, head_kv, strides[2]) + row_offset(column_k, strides[2])
    key_first, key_end = keys_seen(column, keys_here, shift, left, right, T)
    k = load_tile(k_tile, strides[1], key_first, key_end, T.head_dim, BLOCK_K, T.columns, True)
    v = load_tile(v_tile, strides[2], key_first, key_end, T.head_dim_v, BLOCK_K, T.columns_v, True)
    if T.held > 0:
        v = hold(v, COLUMNS_V)
    if T.held > 1:
        k = hold(k, COLUMNS)
    k, v = aligned_parts(k, T), aligned_parts(v, T)
    dk, dv = long_sum(BLOCK_K, COLUMNS, T), long_sum(BLOCK_K, COLUMNS_V, T)
    seed = load_seed(score_args, T)
    place = (item.batch, head_kv, column + tl.arange(0, BLOCK_K)[:, None], column, seed)
    start_ptrs = (
        in_ptrs[0] + batch.to(tl.int64) * strides[0][0] + row_offset(item.first_q, strides[0]),
        in_ptrs[3] + batch.to(tl.int64) * strides[3][0] + row_offset(item.first_q, strides[3]),
        in_ptrs[4] + rows_offset(item, head_kv * 0, strides[5], T),
    )
    dq_ptr = grad_ptrs[0]
    if T.adds_dq:
        dq_ptr += batch.to(tl.int64) * strides[4][0] + row_offset(item.first_q, strides[4])
    scene = Scene(start_ptrs, strides, sizes, ends, place, scale, band, score_args, grad_ptrs)
    members = group if T.grouped else 1
    if T.mask.blocks_q > 0:
        PER: tl.constexpr = T.mask.blocks_q // BLOCK_Q
        whole = (0, tl.cdiv(seqlen_q, T.mask.blocks_q) * T.mask.blocks_q)
        for member in tl.range(0, members):
            indices, partial, visited = block_list(region[2], item.batch, head_kv * members + member, column // T.mask.blocks_k)
            for step in tl.range(0, partial * PER):
                start = member * whole[1] + block_start(indices, step, T.mask.blocks_q, BLOCK_Q)
                dk, dv = key_step(dk, dv, (k, v), dq_ptr, whole, start, scene, True, T, SCORE, MASK)
            for step in tl.range(partial * PER, visited * PER):
                start = member * whole[1] + block_start(indices, step, T.mask.blocks_q, BLOCK_Q)
                dk, dv = key_step(dk, dv, (k, v), dq_ptr, whole, start, scene, False, T, SCORE, MASK)
    else:
        if T.mask.right or T.mask.pads_keys:
            before = (lo, tl.cdiv(full_lo - lo, BLOCK_Q) * BLOCK_Q)
            for start in tl.range(lo, lo + before[1] * members, BLOCK_Q):
                dk, dv = key_step(dk, dv, (k, v), dq_ptr, before, start, scene, True, T, SCORE, MASK)
        inner = (full_lo, full_hi - full_lo)
        for start in tl.range(full_lo, full_lo + inner[1] * members, BLOCK_Q):
            dk, dv = key_step(dk, dv, (k, v), dq_ptr, inner, start, scene, False, T, SCORE, MASK)
        after = (full_hi, tl.cdiv(hi - full_hi, BLOCK_Q) * BLOCK_Q)
        for start in tl.range(full_hi, full_hi + after[1] * members, BLOCK_Q):
            dk, dv = key_step(dk, dv, (k, v), dq_ptr, after, start, scene, True, T, SCORE, MASK)

    keys_own = item.span_k - column
    if grad_ptrs[1] is not None:
        dk_tile = grad_ptrs[1] + head_offset(batch, head_kv, strides[6]) + row_offset(column_k, strides[6])
        store_tile(dk_tile, strides[6], whole_sum(dk, T) * scale, keys_own, T.head_dim, BLOCK_K, T.columns)
    if grad_ptrs[2] is not None:
        dv_tile = grad_ptrs[2] + head_offset(batch, head_kv, strides[7]) + row_offset(column_k, strides[7])
        dv = whole_sum(dv, T)
        if T.modifiers.dropout:
            dv *= seed.factor
        store_tile(dv_tile, strides[7], dv, keys_own, T.head_dim_v, BLOCK_K, T.columns_v)


@jit
def query_step(dq, totals, off, rows, start, scene, MASKED: tl.constexpr, FINDS: tl.constexpr, T: tl.constexpr,
               SCORE: tl.constexpr, CAPTURED: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """Add the key tile at `start` to dq of a query tile; rows = ((q, dout), in parts; (level, delta, norm, slip, and what
    `beyond_mean` calls rest) as columns).

    off = (the sum of p * (dp - delta) without slip, which should be 0; what a unit of it makes of dq, where T.exact; of
    totals; the sum of p, where T.wide or not T.exact and FINDS). FINDS: it alone is formed, its first and last.
    """
    BLOCK_K: tl.constexpr = T.block_k
    kv_ptrs, strides, sizes, ends, place, scale, band, score_args, _ = scene
    queries, row = rows
    start = start // BLOCK_K * BLOCK_K  # which it is: the compiler learns it here
    first, end = ends[0] - start, ends[1] - start
    k_ptr, v_ptr = kv_ptrs[0] + row_offset(start, strides[1]), kv_ptrs[1] + row_offset(start, strides[2])
    k = load_tile(k_ptr, strides[1], first, end, T.head_dim, BLOCK_K, T.columns, MASKED)
    v = load_tile(v_ptr, strides[2], first, end, T.head_dim_v, BLOCK_K, T.columns_v, MASKED)
    key = start + tl.arange(0, BLOCK_K)[None, :]
    at = locate(place[0], place[1], place[2], key, sizes, MASKED and T.mask.pads_keys)
    keep = seen(at, place[2], key, sizes, band, MASKED, T, MASK)
    if MASKED and T.mask.predicate:
        k = zero_unseen(k, keep, 0)
    k = aligned_parts(k, T)
    raw = score_product(queries[0], transposed(k, T), T)
    survives = kept(place[4], place[0] * sizes.heads + place[1], place[3], start, False, T)
    dp = beyond_mean(queries[1], transposed(aligned_parts(v, T), T), row[1], row[4], survives, place[4].factor, T)
    row = (row[0], 0.0, row[2], row[3])
    if T.slots > 0 and not FINDS:
        totals = capture(totals, raw, dp, row, at, keep, scene, True, MASKED, T, SCORE, CAPTURED)
    p, ds = probabilities(raw, dp, row, at, keep, scale, score_args, MASKED, T, SCORE)
    if FINDS or T.corrects:
        excess = p * (dp + row[3])
        if MASKED:
            excess = tl.where(keep, excess, 0.0)
        units, turn, mass = off[2], off[1], off[3]
        if T.wide or (FINDS and not T.exact):
            mass += tl.sum(p, 1)
        if T.corrects:
            ones = tl.full(dp.shape, 1.0, tl.float32)
            if T.exact:
                _, weight = probabilities(raw, ones, row, at, keep, scale, score_args, MASKED, T, SCORE)
                turn = tl.dot(weight.to(tl.float32).to(tl.bfloat16), k[0].to(tl.float32).to(tl.bfloat16), turn)
            if T.slots > 0:
                units = capture(units, raw, ones, row, at, keep, scene, False, MASKED, T, SCORE, CAPTURED)
        off = (off[0] + tl.sum(excess, 1), turn, units, mass)
    if not FINDS:
        dq = add_product(dq, free_parts(ds, k[0].dtype, T), k, T)
    return dq, totals, off


@jit
def walk_keys(dq, totals, off, rows, walk, scene, FINDS: tl.constexpr, T: tl.constexpr, SCORE: tl.constexpr,
              CAPTURED: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """`query_step` of every key tile that a query tile sees; walk = (lo, full_lo, full_hi, hi, the mask's block lists or None,
    the first query).
    """
    BLOCK_K: tl.constexpr = T.block_k
    lo, full_lo, full_hi, hi, lists, first = walk
    if T.mask.blocks_k > 0:
        indices, partial, visited = block_list(lists, scene.place[0], scene.place[1], first // T.mask.blocks_q)
        PER: tl.constexpr = T.mask.blocks_k // BLOCK_K
        for step in tl.range(0, partial * PER):
            start = block_start(indices, step, T.mask.blocks_k, BLOCK_K)
            dq, totals, off = query_step(dq, totals, off, rows, start, scene, True, FINDS, T, SCORE, CAPTURED, MASK)
        for step in tl.range(partial * PER, visited * PER):
            start = block_start(indices, step, T.mask.blocks_k, BLOCK_K)
            dq, totals, off = query_step(dq, totals, off, rows, start, scene, False, FINDS, T, SCORE, CAPTURED, MASK)
    else:
        if T.mask.left:
            for start in tl.range(lo, full_lo, BLOCK_K):
                dq, totals, off = query_step(dq, totals, off, rows, start, scene, True, FINDS, T, SCORE, CAPTURED, MASK)
        for start in tl.range(full_lo, full_hi, BLOCK_K):
            dq, totals, off = query_step(dq, totals, off, rows, start, scene, False, FINDS, T, SCORE, CAPTURED, MASK)
        for start in tl.range(full_hi, hi, BLOCK_K):
            dq, totals, off = query_step(dq, totals, off, rows, start, scene, True, FINDS, T, SCORE, CAPTURED, MASK)
    return dq, totals, off


@jit(do_not_specialize=PLAIN_INTEGERS)
def attention_backward_queries(in_ptrs, strides, seqlen_q, seqlen_k, heads, group, left, right, scale, score_args,
                               grad_args, region, T: tl.constexpr, SCORE: tl.constexpr, CAPTURED: tl.constexpr,
                               MASK: tl.constexpr):  # fmt: skip
    """One program: `tile_of_queries`."""
    tile_of_queries(this_program(), in_ptrs, strides, Sizes(seqlen_q, seqlen_k, heads, group),
                    (left, right, region[1]), scale, (score_args, grad_args), region, T, SCORE, CAPTURED, MASK)  # fmt: skip


@jit
def tile_of_queries(program, in_ptrs, strides, spans, band, scale, args, region, T: tl.constexpr, SCORE: tl.constexpr,
                    CAPTURED: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """dq of one query tile of one head; program, spans and band as for `forward_tile`; args = (score_args, grad_args).

    in_ptrs = (q, k, v, dout, rows, dlse or None, sink or None, dq or None, what each program adds to the gradient of sink
    (heads_q, tiles of all items), or None); region as in the forward;
    strides of q, k, v, dout, dq, rows, dlse, sink (heads_q,).

    T.corrects: delta comes of out, which was rounded, by another arithmetic than dp. sum(ds) over a row's keys shows how
    far the two are apart; a sink's probability, which has no dp, is set off first. What is summed over many rows for a
    captured tensor is corrected by that; where T.exact dq too, and slip in `rows` for the pass over keys. (Plain PyTorch forms
    delta of the very dp: what has to cancel, cancels.) Where T.wide 1 / sum, which was rounded, is corrected likewise.
    T.offset: where lse is large, a walk of its own adds up each row's probabilities first: what they are off 1 by is what lse
    lacks, and goes into `rows`.
    T.twice: the same is found by a walk of its own first, and delta corrected in `rows`, before anything is formed of it. But
    where not T.exact out and lse may be of more keys than these, as a ring's are. Then p does not add up to 1, nor dp to delta.
    """
    BLOCK_Q: tl.constexpr = T.block_q
    COLUMNS: tl.constexpr = T.columns
    WIDTH: tl.constexpr = T.width
    WIDE = tl.float64 if T.wide else tl.float32
    q_ptr, k_ptr, v_ptr, dout_ptr, rows_ptr, dlse_ptr, sink_ptr, dq_ptr, sunk_ptr = in_ptrs
    seqlen_q, heads, group = spans.q, spans.heads, spans.group
    score_args, grad_args = args
    tile, head, item, unit, sizes, batch, row, keys_of = query_tile(program, region, spans, band, T)
    lo, full_lo, full_hi, hi, ends = keys_of

    rows_here, row_q = item.q - row, item.first_q + row
    q_tile = q_ptr + head_offset(batch, head, strides[0]) + row_offset(row_q, strides[0])
    dout_tile = dout_ptr + head_offset(batch, head, strides[3]) + row_offset(row_q, strides[3])
    k_head = k_ptr + head_offset(batch, head // group, strides[1]) + row_offset(item.first_k, strides[1])
    v_head = v_ptr + head_offset(batch, head // group, strides[2]) + row_offset(item.first_k, strides[2])
    kv_head = (k_head, v_head)
    q = load_tile(q_tile, strides[0], 0, rows_here, T.head_dim, BLOCK_Q, T.columns, True)
    dout = load_tile(dout_tile, strides[3], 0, rows_here, T.head_dim_v, BLOCK_Q, T.columns_v, True)
    if T.held > 0:
        q = hold(q, COLUMNS)
    if T.held > 1:
        dout = hold(dout, T.columns_v)
    queries = (aligned_parts(q, T), aligned_parts(dout, T))
    index = row + tl.arange(0, BLOCK_Q)
    rows_ptr += rows_offset(item, head, strides[5], T)
    level, delta, norm, slip = load_rows(rows_ptr, strides[5], row, T)
    size = slip
    if T.lonely:
        slip = tl.zeros_like(size)
    totals = tl.zeros([BLOCK_Q, WIDTH], WIDE)
    none = tl.zeros([BLOCK_Q], WIDE)
    off = (none, none, totals, none)
    sunk = none  # the probability that the sink takes
    if T.modifiers.sink:
        sink = tl.load(sink_ptr + head.to(tl.int64) * strides[7][0]).to(WIDE)
        if T.exact:
            sunk = exp(sink - level, T) * norm
        elif T.offset:
            sunk = tl.exp2((sink - level) * LOG2E)
        else:
            sunk = tl.exp2(sink * LOG2E - level)
    change = -(delta + slip)  # of lse, less what it averages to: what a sink's score receives
    if T.corrects or T.twice or T.offset:
        mean = delta
        if T.exact and T.corrects:
            off = (none, tl.zeros([BLOCK_Q, COLUMNS], tl.float32), totals, none)
        if not T.exact:  # delta holds dlse already
            slip = -load_dlse(dlse_ptr, strides[6], batch, head, item.first_q + index, index < item.q)
            mean = delta - slip
        off = (tl.where(sunk == 0.0, 0.0, -sunk * mean), off[1], totals, sunk)  # delta may be NaN where nothing is seen
    row_state = (level[:, None], delta[:, None], norm[:, None], slip[:, None], (size if T.lonely else slip)[:, None])
    place = (item.batch, head, index[:, None], row, load_seed(score_args, T))
    dq = tl.zeros([BLOCK_Q, COLUMNS], WIDE)
    scene = Scene(kv_head, strides, sizes, ends, place, scale, band, score_args, grad_args)
    walk = (lo, full_lo, full_hi, hi, region[2], row)
    found = off
    if T.offset:
        distance = tl.where(tl.abs(level) < float("inf"), tl.abs(level), 0.0)
        if T.twice or tl.max(distance) > FAR:
            _, _, found = walk_keys(dq, totals, off, (queries, row_state), walk, scene, True, T, SCORE, CAPTURED, MASK)
            lacks = tl.log2(tl.where(found[3] > 0.0, found[3], 1.0))
            # more than lse's rounding: out and lse are of other keys, too
            lacks = tl.where(tl.abs(lacks) <= WHOLE + WHOLE_PER_LEVEL * distance, lacks, 0.0)
            share = tl.exp2(-lacks)
            norm, sunk = lacks, sunk * share
            found = (found[0] * share, found[1], found[2], found[3] * share)
            tl.store(rows_ptr + 2 * strides[5][2] + index, norm, mask=index < item.q)
            row_state = (level[:, None], delta[:, None], norm[:, None], slip[:, None], (size if T.lonely else slip)[:, None])
    elif T.twice:
        _, _, found = walk_keys(dq, totals, off, (queries, row_state), walk, scene, True, T, SCORE, CAPTURED, MASK)
    if T.twice:
        excess = found[0]
        if T.wide:
            whole = tl.where(found[3] == 0.0, 1.0, found[3])
            excess, norm, sunk = excess / whole, norm / whole, sunk / whole
        if not T.exact:
            excess = tl.where(tl.abs(found[3] - 1.0) <= WHOLE + WHOLE_PER_LEVEL * tl.abs(level), excess, 0.0)
        change -= excess
        if T.exact:
            slip += excess
            if T.wide:  # a rounded slip would show where a key is its row's mean: two numbers hold delta
                mean = delta + slip
                delta = mean.to(tl.float32)
                slip = mean - delta
                tl.store(rows_ptr + strides[5][2] + index, delta, mask=index < item.q)
            tl.store(rows_ptr + 3 * strides[5][2] + index, slip, mask=index < item.q)
        else:
            delta += excess
            place_of_delta = index + strides[5][2] if T.apart else 2 * index + 1
            tl.store(rows_ptr + place_of_delta, delta, mask=index < item.q)
        row_state = (level[:, None], delta[:, None], norm[:, None], slip[:, None], (size if T.lonely else slip)[:, None])
    dq, totals, off = walk_keys(dq, totals, off, (queries, row_state), walk, scene, False, T, SCORE, CAPTURED, MASK)
    if T.corrects:
        excess = off[0]
        if T.wide:
            whole = tl.where(off[3] == 0.0, 1.0, off[3])
            excess, totals, dq, sunk = excess / whole, totals / whole[:, None], dq / whole[:, None], sunk / whole
            off = (excess, off[1] / whole[:, None], off[2] / whole[:, None], whole)
        totals -= excess[:, None] * off[2]
        if T.exact:
            dq -= excess[:, None] * off[1]
            tl.store(rows_ptr + 3 * strides[5][2] + index, slip + excess, mask=index < item.q)
        change -= excess
    if sunk_ptr is not None:
        given = tl.where(index < item.q, sunk * change, 0.0)
        tl.store(sunk_ptr + by_head(tile, head, item, unit, program[1], seqlen_q, heads, T), tl.sum(given))
    if T.slots > 0:
        if T.items.ragged:  # what is known of rows that do not exist may be NaN
            totals = tl.where((index < item.q)[:, None], totals, 0.0)
        store_totals(tl.sum(totals, 0), unit, grad_args, T, SCORE, CAPTURED)
    if dq_ptr is not None:
        if T.items.ragged:  # rows that do not count may have met an infinite key
            dq = tl.where((index < item.q)[:, None], dq, 0.0)
        dq_tile = dq_ptr + head_offset(batch, head, strides[4]) + row_offset(row_q, strides[4])
        store_tile(dq_tile, strides[4], dq * scale, item.span_q - row, T.head_dim, BLOCK_Q, T.columns)


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
