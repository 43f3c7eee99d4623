"""Second order: how dq, dk and dv change along a direction that moves q, k, v, and the gradients that arrive.

`attention_tangent` has left what is known of rows; a pass over queries forms dq's tangent, one over keys dk's and dv's. With
ds = p (dp - delta): its tangent is p ((T - mu) (dp - delta) + dp' - delta'), where dp' = dout v'^T + dout' v^T. No atomics.
"""

from __future__ import annotations

from flashtile.kernels.device.blocks import block_list, block_start
from flashtile.kernels.device.direction import FIELDS, directed_gradients, directed_probabilities
from flashtile.kernels.device.dropout import dropped, kept, load_seed
from flashtile.kernels.device.grid import Sizes, this_program
from flashtile.kernels.device.mask import seen, zero_unseen
from flashtile.kernels.device.memory import column_offset, head_offset, load_tile, row_offset, store_tile
from flashtile.kernels.device.product import (
    add_product,
    add_rounded,
    add_to_sum,
    aligned_parts,
    free_parts,
    long_sum,
    product,
    score_product,
    transposed,
    whole_sum,
)
from flashtile.kernels.device.score import locate
from flashtile.kernels.portable.opening import Scene, key_tile, keys_seen, query_tile
from flashtile.kernels.portable.tangent import product_tangent
from flashtile.triton_glue.language import PLAIN_INTEGERS, jit, tl


@jit
def load_fields(fields_ptr, start, end, ROWS: tl.constexpr, MASKED: tl.constexpr):
    """(level, norm, mu, delta, delta's tangent) of ROWS rows; if MASKED, those from the end on have no probabilities.

    One load of all of them: Triton 3.6.0 has every thread load by itself, element by element, what has fewer elements than
    there are threads.
    """
    index = start + tl.arange(0, ROWS)
    at = fields_ptr + FIELDS * index[:, None] + tl.arange(0, FIELDS)[None, :]
    here = index < end
    fields = tl.load(at, mask=here[:, None], other=0.0) if MASKED else tl.load(at)
    even, odd = tl.split(tl.reshape(fields, [ROWS, 2, 2, 2]))
    first, third = tl.split(even)
    second, _ = tl.split(odd)
    level, norm = tl.split(first)
    mean, delta = tl.split(third)
    tdelta, _ = tl.split(second)
    if MASKED:
        level = tl.where(here, level, float("inf"))
    return level, norm, mean, delta, tdelta


@jit
def gradient_products(dout, tdout, v, tv, survives, factor, like, T: tl.constexpr, BY_KEY: tl.constexpr):
    """(dp, its tangent), dropout applied: of parts, queries by keys, or keys by queries if BY_KEY; `like` has that shape."""
    dp, tdp = tl.zeros_like(like), tl.zeros_like(like)
    if T.has_dout:
        dp = product(v, dout, T) if BY_KEY else product(dout, v, T)
        if T.moves_v:
            tdp = product(tv, dout, T) if BY_KEY else product(dout, tv, T)
    if T.has_tdout:
        if T.has_dout and T.moves_v:
            tdp = add_product(tdp, v, tdout, T) if BY_KEY else add_product(tdp, tdout, v, T)
        else:
            tdp = product(v, tdout, T) if BY_KEY else product(tdout, v, T)
    if T.modifiers.dropout:
        factors = tl.where(survives, factor, 0.0)
        dp, tdp = dp * factors, tdp * factors
    return dp, tdp


@jit
def second_query_step(dq, queries, fields, start, scene, MASKED: tl.constexpr, T: tl.constexpr, SCORE: tl.constexpr,
                      ALONG: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """Add the key tile at `start` to a query tile's sum; queries = parts of (q, tq, dout, tdout)."""
    BLOCK_K: tl.constexpr = T.block_k
    kv_ptrs, strides, sizes, ends, place, scale, band, score_args, moved_args = scene
    args = (score_args, moved_args)
    start = start // BLOCK_K * BLOCK_K  # which it is: the compiler learns it here
    first, end = ends[0] - start, ends[1] - start
    k = load_tile(kv_ptrs[0] + row_offset(start, strides[1]), strides[1], first, end, T.head_dim, BLOCK_K, T.columns, MASKED)
    v = load_tile(
        kv_ptrs[1] + row_offset(start, strides[2]), strides[2], first, end, T.head_dim_v, BLOCK_K, T.columns_v, MASKED
    )
    key = start + tl.arange(0, BLOCK_K)[None, :]
    at = locate(place[0], place[1], place[2], key, sizes, MASKED and T.mask.pads_keys)
    keep = seen(at, place[2], key, sizes, band, MASKED, T, MASK)
    tk, tv = k, v
    if T.moves_k:
        tk = kv_ptrs[2] + row_offset(start, strides[6])
        tk = load_tile(tk, strides[6], first, end, T.head_dim, BLOCK_K, T.columns, MASKED)
    if T.moves_v:
        tv = kv_ptrs[3] + row_offset(start, strides[7])
        tv = load_tile(tv, strides[7], first, end, T.head_dim_v, BLOCK_K, T.columns_v, MASKED)
    if MASKED and T.mask.predicate:
        k, tk = zero_unseen(k, keep, 0), zero_unseen(tk, keep, 0)
    k, tk = aligned_parts(k, T), aligned_parts(tk, T)
    k_t = transposed(k, T)
    raw = score_product(queries[0], k_t, T)
    traw = tl.zeros_like(raw)
    if T.moves_q or T.moves_k:
        traw = product_tangent(queries[0], queries[1], k_t, transposed(tk, T), T)
    directed = directed_probabilities(raw, traw, fields, at, keep, scale, args, MASKED, T, SCORE, ALONG)
    survives = kept(place[4], place[0] * sizes.heads + place[1], place[3], start, False, T)
    v_t, tv_t = transposed(aligned_parts(v, T), T), transposed(aligned_parts(tv, T), T)
    dp, tdp = gradient_products(queries[2], queries[3], v_t, tv_t, survives, place[4].factor, directed[0], T, False)
    ds, ds2 = directed_gradients(directed, dp, tdp, fields, at, keep, args, MASKED, T, SCORE, ALONG)
    dq = add_rounded(dq, ds2, k, T)
    if T.moves_k:
        dq = add_rounded(dq, ds, tk, T)
    return dq


@jit(do_not_specialize=PLAIN_INTEGERS)
def attention_second_queries(in_ptrs, dq_ptr, strides, seqlen_q, seqlen_k, heads, group, left, right, scale, args, region,
                             T: tl.constexpr, SCORE: tl.constexpr, ALONG: tl.constexpr,
                             MASK: tl.constexpr):  # fmt: skip
    """One program: dq's tangent of one query tile of one head.

    in_ptrs = (q, k, v, tq, tk, tv, dout, tdout, rows of `attention_tangent`); strides of q, k, v, dq, dv, tq, tk, tv, dout,
    tdout, dk; args and region as for the tangent.
    """
    BLOCK_Q: tl.constexpr = T.block_q
    BLOCK_K: tl.constexpr = T.block_k
    COLUMNS: tl.constexpr = T.columns
    WIDE = tl.float64 if T.wide else tl.float32
    band = (left, right, region[1])
    _, head, item, _, sizes, batch, row, keys_of = query_tile(
        this_program(), region, Sizes(seqlen_q, seqlen_k, heads, group), band, T
    )
    lo, full_lo, full_hi, hi, ends = keys_of
    index, rows_here, row_q = row + tl.arange(0, BLOCK_Q), item.q - row, item.first_q + row
    head_kv = head // group
    q_tile = in_ptrs[0] + head_offset(batch, head, strides[0]) + row_offset(row_q, strides[0])
    k_head = in_ptrs[1] + head_offset(batch, head_kv, strides[1]) + row_offset(item.first_k, strides[1])
    v_head = in_ptrs[2] + head_offset(batch, head_kv, strides[2]) + row_offset(item.first_k, strides[2])
    tk_head, tv_head = k_head, v_head
    q = aligned_parts(load_tile(q_tile, strides[0], 0, rows_here, T.head_dim, BLOCK_Q, T.columns, True), T)
    tq, dout, tdout = q, q, q
    if T.moves_q:
        tq_tile = in_ptrs[3] + head_offset(batch, head, strides[5]) + row_offset(row_q, strides[5])
        tq = aligned_parts(load_tile(tq_tile, strides[5], 0, rows_here, T.head_dim, BLOCK_Q, T.columns, True), T)
    if T.moves_k:
        tk_head = in_ptrs[4] + head_offset(batch, head_kv, strides[6]) + row_offset(item.first_k, strides[6])
    if T.moves_v:
        tv_head = in_ptrs[5] + head_offset(batch, head_kv, strides[7]) + row_offset(item.first_k, strides[7])
    if T.has_dout:
        dout = in_ptrs[6] + head_offset(batch, head, strides[8]) + row_offset(row_q, strides[8])
        dout = aligned_parts(load_tile(dout, strides[8], 0, rows_here, T.head_dim_v, BLOCK_Q, T.columns_v, True), T)
    if T.has_tdout:
        tdout = in_ptrs[7] + head_offset(batch, head, strides[9]) + row_offset(row_q, strides[9])
        tdout = aligned_parts(load_tile(tdout, strides[9], 0, rows_here, T.head_dim_v, BLOCK_Q, T.columns_v, True), T)
    queries, kv_ptrs = (q, tq, dout, tdout), (k_head, v_head, tk_head, tv_head)
    fields_ptr = in_ptrs[8] + (batch * heads + head).to(tl.int64) * (FIELDS * seqlen_q) + FIELDS * item.first_q
    level, norm, mean, delta, tdelta = load_fields(fields_ptr, row, item.q, BLOCK_Q, True)
    fields = (level[:, None], norm[:, None], mean[:, None], delta[:, None], tdelta[:, None])
    place = (item.batch, head, index[:, None], row, load_seed(args[0], T))
    scene = Scene(kv_ptrs, strides, sizes, ends, place, scale, band, args[0], args[1])
    dq = tl.zeros([BLOCK_Q, COLUMNS], WIDE)
    if T.mask.blocks_k > 0:
        indices, partial, visited = block_list(region[2], item.batch, head, row // T.mask.blocks_q)
        PER: tl.constexpr = T.mask.blocks_k // BLOCK_K
        for step in tl.range(0, partial * PER):
            start = block_start(indices, step, T.mask.blocks_k, BLOCK_K)
            dq = second_query_step(dq, queries, fields, start, scene, True, T, SCORE, ALONG, MASK)
        for step in tl.range(partial * PER, visited * PER):
            start = block_start(indices, step, T.mask.blocks_k, BLOCK_K)
            dq = second_query_step(dq, queries, fields, start, scene, False, T, SCORE, ALONG, MASK)
    else:
        if T.mask.left:
            for start in tl.range(lo, full_lo, BLOCK_K):
                dq = second_query_step(dq, queries, fields, start, scene, True, T, SCORE, ALONG, MASK)
        for start in tl.range(full_lo, full_hi, BLOCK_K):
            dq = second_query_step(dq, queries, fields, start, scene, False, T, SCORE, ALONG, MASK)
        for start in tl.range(full_hi, hi, BLOCK_K):
            dq = second_query_step(dq, queries, fields, start, scene, True, T, SCORE, ALONG, MASK)
    if T.items.ragged:  # rows that do not count may have met an infinite key
        dq = tl.where((index < item.q)[:, None], dq, 0.0)
    dq_tile = dq_ptr + head_offset(batch, head, strides[3]) + row_offset(row_q, strides[3])
    store_tile(dq_tile, strides[3], dq * scale, item.span_q - row, T.head_dim, BLOCK_Q, T.columns)


@jit
def parts_by_key(x, like, T: tl.constexpr):
    """Parts, keys by queries, of x, which is so or where T.upright queries by keys."""
    if T.upright:
        return transposed(free_parts(x, like.dtype, T), T)
    else:  # Triton compiles what stands behind a return, too
        return free_parts(x, like.dtype, T)


@jit
def add_by_key(sums, x, parts, T: tl.constexpr):
    """`long_sum` of keys + x times parts of queries, rounded as `add_rounded` does."""
    sums = add_to_sum(sums, parts_by_key(x, parts[0], T), parts, T)
    if T.halves_rounding:
        rest = x - x.to(parts[0].dtype).to(x.dtype)
        sums = add_to_sum(sums, parts_by_key(rest, parts[0], T), parts, T)
    return sums


@jit
def second_key_step(dk, dv, keys, walk, start, span, scene, MASKED: tl.constexpr, T: tl.constexpr, SCORE: tl.constexpr,
                    ALONG: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """Add one query tile of one head to the sums of a key tile (scores: keys x queries, or where T.upright queries x keys).

    keys = parts of (k, v, tk, tv); scene.ptrs = (q, tq, dout, tdout, rows) of head 0; walk as in the backward; span: rows of
    the tensors.
    """
    BLOCK_Q: tl.constexpr = T.block_q
    in_ptrs, strides, sizes, ends, place, scale, band, score_args, moved_args = scene
    args = (score_args, moved_args)
    batch, head = place[0], place[1]
    start = tl.multiple_of(start, BLOCK_Q)
    if T.grouped:
        member = (start - walk[0]) // walk[1]
        start = tl.multiple_of(start - member * walk[1], BLOCK_Q)
        head = place[1] * sizes.group + member
    first, end = ends[0] - start, ends[1] - start
    q = in_ptrs[0] + column_offset(head, strides[0]) + row_offset(start, strides[0])
    q = load_tile(q, strides[0], first, end, T.head_dim, BLOCK_Q, T.columns, MASKED)
    index = start + tl.arange(0, BLOCK_Q)
    row = index[:, None] if T.upright else index[None, :]
    at = locate(batch, head, row, place[2], sizes, MASKED and T.mask.pads_keys)
    keep = seen(at, row, place[2], sizes, band, MASKED, T, MASK)
    tq, dout, tdout = q, q, q
    if T.moves_q:
        tq = in_ptrs[1] + column_offset(head, strides[5]) + row_offset(start, strides[5])
        tq = load_tile(tq, strides[5], first, end, T.head_dim, BLOCK_Q, T.columns, MASKED)
    if T.has_dout:
        dout = in_ptrs[2] + column_offset(head, strides[8]) + row_offset(start, strides[8])
        dout = load_tile(dout, strides[8], first, end, T.head_dim_v, BLOCK_Q, T.columns_v, MASKED)
    if T.has_tdout:
        tdout = in_ptrs[3] + column_offset(head, strides[9]) + row_offset(start, strides[9])
        tdout = load_tile(tdout, strides[9], first, end, T.head_dim_v, BLOCK_Q, T.columns_v, MASKED)
    if MASKED and T.mask.predicate:
        KEYS: tl.constexpr = 1 if T.upright else 0
        q, tq = zero_unseen(q, keep, KEYS), zero_unseen(tq, keep, KEYS)
        dout, tdout = zero_unseen(dout, keep, KEYS), zero_unseen(tdout, keep, KEYS)
    q, tq, dout, tdout = aligned_parts(q, T), aligned_parts(tq, T), aligned_parts(dout, T), aligned_parts(tdout, T)
    fields_ptr = in_ptrs[4] + head.to(tl.int64) * (FIELDS * span)
    level, norm, mean, delta, tdelta = load_fields(fields_ptr, start, sizes.q, BLOCK_Q, MASKED)
    MOVES: tl.constexpr = T.moves_q or T.moves_k
    if T.upright:
        fields = (level[:, None], norm[:, None], mean[:, None], delta[:, None], tdelta[:, None])
        k_t = transposed(keys[0], T)
        raw = score_product(q, k_t, T)
        traw = product_tangent(q, tq, k_t, transposed(keys[2], T), T) if MOVES else tl.zeros_like(raw)
    else:
        fields = (level[None, :], norm[None, :], mean[None, :], delta[None, :], tdelta[None, :])
        q_t = transposed(q, T)
        raw = score_product(keys[0], q_t, T)
        traw = product_tangent(keys[2], keys[0], transposed(tq, T), q_t, T) if MOVES else tl.zeros_like(raw)
    directed = directed_probabilities(raw, traw, fields, at, keep, scale, args, MASKED, T, SCORE, ALONG)
    p, bend, _, _ = directed
    survives = kept(place[4], batch * sizes.heads + head, start, place[3], not T.upright, T)
    if T.has_dout:
        dv = add_by_key(dv, dropped(p * bend, survives, place[4], T), dout, T)
    if T.has_tdout:
        dv = add_by_key(dv, dropped(p, survives, place[4], T), tdout, T)
    if T.upright:
        v_t, tv_t = transposed(keys[1], T), transposed(keys[3], T)
        dp, tdp = gradient_products(dout, tdout, v_t, tv_t, survives, place[4].factor, p, T, False)
    else:
        dout_t, tdout_t = transposed(dout, T), transposed(tdout, T)
        dp, tdp = gradient_products(dout_t, tdout_t, keys[1], keys[3], survives, place[4].factor, p, T, True)
    ds, ds2 = directed_gradients(directed, dp, tdp, fields, at, keep, args, MASKED, T, SCORE, ALONG)
    dk = add_by_key(dk, ds2, q, T)
    if T.moves_q:
        dk = add_by_key(dk, ds, tq, T)
    return dk, dv


@jit(do_not_specialize=PLAIN_INTEGERS)
def attention_second_keys(in_ptrs, grad_ptrs, strides, seqlen_q, seqlen_k, heads, group, left, right, scale, args, region,
                          T: tl.constexpr, SCORE: tl.constexpr, ALONG: tl.constexpr,
                          MASK: tl.constexpr):  # fmt: skip
    """One program: the tangents of dk and dv of one key tile of one key/value head, over all its query heads.

    grad_ptrs = (dk, dv), None where not wanted; all else as for the pass over queries.
    """
    BLOCK_Q: tl.constexpr = T.block_q
    BLOCK_K: tl.constexpr = T.block_k
    COLUMNS: tl.constexpr = T.columns
    COLUMNS_V: tl.constexpr = T.columns_v
    band, heads_kv = (left, right, region[1]), heads // group
    head_kv, item, sizes, batch, column, shift, queries_of = key_tile(
        this_program(), region, Sizes(seqlen_q, seqlen_k, heads, group), heads_kv, band, T
    )
    lo, full_lo, full_hi, hi, ends = queries_of
    if not T.mask.predicate:
        if column + BLOCK_K > item.k:  # keys beyond the end: no tile of queries is free of masking
            full_lo = hi
            full_hi = hi
    keys_here, column_k = item.k - column, item.first_k + column
    key_first, key_end = keys_seen(column, keys_here, shift, left, right, T)
    k = in_ptrs[1] + head_offset(batch, head_kv, strides[1]) + row_offset(column_k, strides[1])
    v = in_ptrs[2] + head_offset(batch, head_kv, strides[2]) + row_offset(column_k, strides[2])
    k = aligned_parts(load_tile(k, strides[1], key_first, key_end, T.head_dim, BLOCK_K, T.columns, True), T)
    v = aligned_parts(load_tile(v, strides[2], key_first, key_end, T.head_dim_v, BLOCK_K, T.columns_v, True), T)
    tk, tv = k, v
    if T.moves_k:
        tk = in_ptrs[4] + head_offset(batch, head_kv, strides[6]) + row_offset(column_k, strides[6])
        tk = aligned_parts(load_tile(tk, strides[6], key_first, key_end, T.head_dim, BLOCK_K, T.columns, True), T)
    if T.moves_v:
        tv = in_ptrs[5] + head_offset(batch, head_kv, strides[7]) + row_offset(column_k, strides[7])
        tv = aligned_parts(load_tile(tv, strides[7], key_first, key_end, T.head_dim_v, BLOCK_K, T.columns_v, True), T)
    keys = (k, v, tk, tv)
    dk, dv = long_sum(BLOCK_K, COLUMNS, T), long_sum(BLOCK_K, COLUMNS_V, T)
    seed = load_seed(args[0], T)
    key = column + tl.arange(0, BLOCK_K)
    place = (item.batch, head_kv, key[None, :] if T.upright else key[:, None], column, seed)
    wide = batch.to(tl.int64)
    q_ptr = in_ptrs[0] + wide * strides[0][0] + row_offset(item.first_q, strides[0])
    tq_ptr, dout_ptr, tdout_ptr = q_ptr, q_ptr, q_ptr
    if T.moves_q:
        tq_ptr = in_ptrs[3] + wide * strides[5][0] + row_offset(item.first_q, strides[5])
    if T.has_dout:
        dout_ptr = in_ptrs[6] + wide * strides[8][0] + row_offset(item.first_q, strides[8])
    if T.has_tdout:
        tdout_ptr = in_ptrs[7] + wide * strides[9][0] + row_offset(item.first_q, strides[9])
    start_ptrs = (q_ptr, tq_ptr, dout_ptr, tdout_ptr, in_ptrs[8] + wide * heads * (FIELDS * seqlen_q) + FIELDS * item.first_q)
    scene = Scene(start_ptrs, strides, sizes, ends, place, scale, band, args[0], args[1])
    members = group if T.grouped else 1
    if T.mask.blocks_q > 0:
        PER: tl.constexpr = T.mask.blocks_q // BLOCK_Q
        whole = (0, tl.cdiv(seqlen_q, T.mask.blocks_q) * T.mask.blocks_q)
        for member in tl.range(0, members):
            indices, partial, visited = block_list(region[2], item.batch, head_kv * members + member, column // T.mask.blocks_k)
            for step in tl.range(0, partial * PER):
                start = member * whole[1] + block_start(indices, step, T.mask.blocks_q, BLOCK_Q)
                dk, dv = second_key_step(dk, dv, keys, whole, start, seqlen_q, scene, True, T, SCORE, ALONG, MASK)
            for step in tl.range(partial * PER, visited * PER):
                start = member * whole[1] + block_start(indices, step, T.mask.blocks_q, BLOCK_Q)
                dk, dv = second_key_step(dk, dv, keys, whole, start, seqlen_q, scene, False, T, SCORE, ALONG, MASK)
    else:
        if T.mask.right or T.mask.pads_keys:
            before = (lo, tl.cdiv(full_lo - lo, BLOCK_Q) * BLOCK_Q)
            for start in tl.range(lo, lo + before[1] * members, BLOCK_Q):
                dk, dv = second_key_step(dk, dv, keys, before, start, seqlen_q, scene, True, T, SCORE, ALONG, MASK)
        inner = (full_lo, full_hi - full_lo)
        for start in tl.range(full_lo, full_lo + inner[1] * members, BLOCK_Q):
            dk, dv = second_key_step(dk, dv, keys, inner, start, seqlen_q, scene, False, T, SCORE, ALONG, MASK)
        after = (full_hi, tl.cdiv(hi - full_hi, BLOCK_Q) * BLOCK_Q)
        for start in tl.range(full_hi, full_hi + after[1] * members, BLOCK_Q):
            dk, dv = second_key_step(dk, dv, keys, after, start, seqlen_q, scene, True, T, SCORE, ALONG, MASK)

    keys_own = item.span_k - column
    if grad_ptrs[0] is not None:
        dk_tile = grad_ptrs[0] + head_offset(batch, head_kv, strides[10]) + row_offset(column_k, strides[10])
        store_tile(dk_tile, strides[10], whole_sum(dk, T) * scale, keys_own, T.head_dim, BLOCK_K, T.columns)
    if grad_ptrs[1] is not None:
        dv_tile = grad_ptrs[1] + head_offset(batch, head_kv, strides[4]) + row_offset(column_k, strides[4])
        dv = whole_sum(dv, T)
        if T.modifiers.dropout:
            dv *= seed.factor
        store_tile(dv_tile, strides[4], dv, keys_own, T.head_dim_v, BLOCK_K, T.columns_v)
