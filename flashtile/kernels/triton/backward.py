"""Backward kernels (FlashAttention-2, arXiv 2307.08691, algorithm 2).

split:  delta, then a pass over keys (dk, dv) and a pass over queries (dq); no atomics, bitwise repeatable.
fused:  delta, then the pass over keys alone, which adds its share of dq atomically in float32; then a conversion.
"""

from __future__ import annotations

from flashtile._triton import jit, tl
from flashtile.kernels.lib.grid import assign
from flashtile.kernels.lib.mask import key_range, visible
from flashtile.kernels.lib.memory import head_offset, inside, load_tile, row_offset, store_tile, tile_offsets
from flashtile.kernels.lib.score import LOG2E, locate, probabilities, store_totals


@jit
def attention_delta(out_ptr, dout_ptr, dlse_ptr, delta_ptr, strides, sizes, T: tl.constexpr):
    """delta = sum(out * dout, head_dim_v) - dlse, per row. strides of out, dout, dlse (batch, heads_q, seqlen_q)."""
    BLOCK_Q: tl.constexpr = T.block_q
    len_q, heads = sizes[1], sizes[3]
    tile, batch_head = assign(tl.cdiv(len_q, BLOCK_Q), sizes[0] * heads, 1, False)
    batch, head, row = batch_head // heads, batch_head % heads, tile * BLOCK_Q
    out_head = out_ptr + head_offset(batch, head, strides[0]) + row_offset(row, strides[0])
    dout_head = dout_ptr + head_offset(batch, head, strides[1]) + row_offset(row, strides[1])
    out = load_tile(out_head, strides[0], 0, len_q - row, T.head_dim_v, BLOCK_Q, T.columns_v, True)
    dout = load_tile(dout_head, strides[1], 0, len_q - row, T.head_dim_v, BLOCK_Q, T.columns_v, True)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    index = row + tl.arange(0, BLOCK_Q)
    if dlse_ptr is not None:
        dlse_head = dlse_ptr + batch.to(tl.int64) * strides[2][0] + head.to(tl.int64) * strides[2][1]
        delta -= tl.load(dlse_head + index.to(tl.int64) * strides[2][2], mask=index < len_q, other=0.0)
    tl.store(delta_ptr + batch_head.to(tl.int64) * len_q + index, delta, mask=index < len_q)


@jit
def load_row_state(lse_ptr, delta_ptr, index, len_q):
    """(lse in base 2, delta) of some rows. Rows that do not exist or saw nothing get lse = +inf, hence p = 0."""
    lse = tl.load(lse_ptr + index, mask=index < len_q, other=float("-inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
    return lse, tl.load(delta_ptr + index, mask=index < len_q, other=0.0)


@jit
def key_step(dk, dv, totals, k, v, ptrs, strides, sizes, seen, place, start, scale, band, score_args, grad_args,
             MASKED: tl.constexpr, T: tl.constexpr, SCORE: tl.constexpr):  # fmt: skip
    """Add the query tile at `start` to dk and dv of a key tile (scores transposed: keys x queries).

    ptrs = (q, dout, lse, delta, dq or None) of the head; seen = (first, end) queries that see this key tile;
    place = (batch, head, key indices as a column).
    """
    BLOCK_Q: tl.constexpr = T.block_q
    first, end = seen[0] - start, seen[1] - start
    q = load_tile(ptrs[0] + row_offset(start, strides[0]), strides[0], first, end, T.head_dim, BLOCK_Q, T.columns, MASKED)
    dout = load_tile(ptrs[1] + row_offset(start, strides[3]), strides[3], first, end, T.head_dim_v, BLOCK_Q, T.columns_v, MASKED)
    index = start + tl.arange(0, BLOCK_Q)
    lse, delta = load_row_state(ptrs[2], ptrs[3], index, sizes[1])
    at = locate(place[0], place[1], index[None, :], place[2], sizes)
    keep = visible(index[None, :], place[2], sizes, band, T)
    raw = tl.dot(k, tl.trans(q), input_precision=T.precision)
    dp = tl.dot(v, tl.trans(dout), input_precision=T.precision)
    p, ds, totals = probabilities(raw, dp, lse[None, :], delta[None, :], at, keep, scale, score_args, grad_args, totals,
                                  MASKED or T.slots > 0, T, SCORE)  # fmt: skip
    dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=T.precision)
    ds = ds.to(q.dtype)
    dk = tl.dot(ds, q, dk, input_precision=T.precision)
    if ptrs[4] is not None:
        share = tl.dot(tl.trans(ds), k, input_precision=T.precision)
        target = ptrs[4] + row_offset(start, strides[4]) + tile_offsets(strides[4], BLOCK_Q, T.columns)
        tl.atomic_add(target, share, mask=inside(first, end, T.head_dim, BLOCK_Q, T.columns, True), sem="relaxed")
    return dk, dv, totals


@jit
def attention_backward_keys(q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, grad_ptrs, strides, sizes, scale, band,
                            score_args, grad_args, T: tl.constexpr, SCORE: tl.constexpr):  # fmt: skip
    """One program: dk, dv of one key tile of one key/value head, over all its query heads; with dq, the fused pass.

    grad_ptrs = (dq float32 zeroed or None, dk, dv); strides of q, k, v, dout, dq, dk, dv;
    sizes = (batch, seqlen_q, seqlen_k, heads_q).
    """
    BLOCK_Q: tl.constexpr = T.block_q
    BLOCK_K: tl.constexpr = T.block_k
    len_q, len_k, heads = sizes[1], sizes[2], sizes[3]
    heads_kv = heads // T.group
    tiles = tl.cdiv(len_k, BLOCK_K)
    tile, batch_head = assign(tiles, sizes[0] * heads_kv, T.swizzle, T.last_first)
    batch, head_kv, column = batch_head // heads_kv, batch_head % heads_kv, tile * BLOCK_K
    shift = len_k - len_q
    first, last = column - shift, tl.minimum(column + BLOCK_K, len_k) - 1 - shift
    lo, full_lo, full_hi, hi = key_range(first, last, len_q, band[1], band[0], T.right, T.left, BLOCK_Q)
    if column + BLOCK_K > len_k:  # keys beyond the end: no tile of queries is free of masking
        full_lo = hi
        full_hi = hi
    seen_from = 0
    if T.right:
        seen_from = tl.maximum(first - band[1], 0)
    seen = (seen_from, hi)

    keys_here = len_k - column
    k_tile = k_ptr + head_offset(batch, head_kv, strides[1]) + row_offset(column, strides[1])
    v_tile = v_ptr + head_offset(batch, head_kv, strides[2]) + row_offset(column, strides[2])
    k = load_tile(k_tile, strides[1], 0, keys_here, T.head_dim, BLOCK_K, T.columns, True)
    v = load_tile(v_tile, strides[2], 0, keys_here, T.head_dim_v, BLOCK_K, T.columns_v, True)
    dk = tl.zeros([BLOCK_K, T.columns], tl.float32)
    dv = tl.zeros([BLOCK_K, T.columns_v], tl.float32)
    key = column + tl.arange(0, BLOCK_K)[:, None]
    for member in tl.range(0, T.group):
        head = head_kv * T.group + member
        row_state = (batch * heads + head).to(tl.int64) * len_q
        dq_head = None
        if grad_ptrs[0] is not None:
            dq_head = grad_ptrs[0] + head_offset(batch, head, strides[4])
        ptrs = (q_ptr + head_offset(batch, head, strides[0]), dout_ptr + head_offset(batch, head, strides[3]),
                lse_ptr + row_state, delta_ptr + row_state, dq_head)  # fmt: skip
        place = (batch, head, key)
        totals = tl.zeros([T.width], tl.float32)
        if T.right or T.pads_keys:
            for start in tl.range(lo, full_lo, BLOCK_Q):
                dk, dv, totals = key_step(dk, dv, totals, k, v, ptrs, strides, sizes, seen, place, start, scale, band,
                                          score_args, grad_args, True, T, SCORE)  # fmt: skip
        for start in tl.range(full_lo, full_hi, BLOCK_Q):
            dk, dv, totals = key_step(dk, dv, totals, k, v, ptrs, strides, sizes, seen, place, start, scale, band,
                                      score_args, grad_args, False, T, SCORE)  # fmt: skip
        for start in tl.range(full_hi, hi, BLOCK_Q):
            dk, dv, totals = key_step(dk, dv, totals, k, v, ptrs, strides, sizes, seen, place, start, scale, band,
                                      score_args, grad_args, True, T, SCORE)  # fmt: skip
        if T.slots > 0:
            store_totals(totals, (batch * heads + head) * tiles + tile, grad_args, T, SCORE)

    if grad_ptrs[1] is not None:
        dk_tile = grad_ptrs[1] + head_offset(batch, head_kv, strides[5]) + row_offset(column, strides[5])
        store_tile(dk_tile, strides[5], dk * scale, keys_here, T.head_dim, BLOCK_K, T.columns)
    if grad_ptrs[2] is not None:
        dv_tile = grad_ptrs[2] + head_offset(batch, head_kv, strides[6]) + row_offset(column, strides[6])
        store_tile(dv_tile, strides[6], dv, keys_here, T.head_dim_v, BLOCK_K, T.columns_v)


@jit
def query_step(dq, totals, q, dout, lse, delta, k_ptr, v_ptr, strides, sizes, seen, place, start, scale, band,
               score_args, grad_args, MASKED: tl.constexpr, T: tl.constexpr, SCORE: tl.constexpr):  # fmt: skip
    """Add the key tile at `start` to dq of a query tile; seen and place as in the forward step."""
    BLOCK_K: tl.constexpr = T.block_k
    first, end = seen[0] - start, seen[1] - start
    k = load_tile(k_ptr + row_offset(start, strides[1]), strides[1], first, end, T.head_dim, BLOCK_K, T.columns, MASKED)
    v = load_tile(v_ptr + row_offset(start, strides[2]), strides[2], first, end, T.head_dim_v, BLOCK_K, T.columns_v, MASKED)
    key = start + tl.arange(0, BLOCK_K)[None, :]
    at = locate(place[0], place[1], place[2], key, sizes)
    keep = visible(place[2], key, sizes, band, T)
    raw = tl.dot(q, tl.trans(k), input_precision=T.precision)
    dp = tl.dot(dout, tl.trans(v), input_precision=T.precision)
    p, ds, totals = probabilities(raw, dp, lse[:, None], delta[:, None], at, keep, scale, score_args, grad_args, totals,
                                  MASKED or T.slots > 0, T, SCORE)  # fmt: skip
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=T.precision), totals


@jit
def attention_backward_queries(q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, strides, sizes, scale, band,
                               score_args, grad_args, T: tl.constexpr, SCORE: tl.constexpr):  # fmt: skip
    """One program: dq of one query tile of one head. strides of q, k, v, dout, dq; sizes as in the forward."""
    BLOCK_Q: tl.constexpr = T.block_q
    BLOCK_K: tl.constexpr = T.block_k
    len_q, len_k, heads = sizes[1], sizes[2], sizes[3]
    tiles = tl.cdiv(len_q, BLOCK_Q)
    tile, batch_head = assign(tiles, sizes[0] * heads, T.swizzle, T.last_first)
    batch, head = batch_head // heads, batch_head % heads
    row, shift = tile * BLOCK_Q, len_k - len_q
    first, last = row + shift, tl.minimum(row + BLOCK_Q, len_q) - 1 + shift
    lo, full_lo, full_hi, hi = key_range(first, last, len_k, band[0], band[1], T.left, T.right, BLOCK_K)
    seen_from = 0
    if T.left:
        seen_from = tl.maximum(first - band[0], 0)
    seen = (seen_from, hi)

    rows_here = len_q - row
    q_tile = q_ptr + head_offset(batch, head, strides[0]) + row_offset(row, strides[0])
    dout_tile = dout_ptr + head_offset(batch, head, strides[3]) + row_offset(row, strides[3])
    k_head = k_ptr + head_offset(batch, head // T.group, strides[1])
    v_head = v_ptr + head_offset(batch, head // T.group, strides[2])
    q = load_tile(q_tile, strides[0], 0, rows_here, T.head_dim, BLOCK_Q, T.columns, True)
    dout = load_tile(dout_tile, strides[3], 0, rows_here, T.head_dim_v, BLOCK_Q, T.columns_v, True)
    index = row + tl.arange(0, BLOCK_Q)
    row_state = batch_head.to(tl.int64) * len_q
    lse, delta = load_row_state(lse_ptr + row_state, delta_ptr + row_state, index, len_q)
    place = (batch, head, index[:, None])
    dq = tl.zeros([BLOCK_Q, T.columns], tl.float32)
    totals = tl.zeros([T.width], tl.float32)
    if T.left:
        for start in tl.range(lo, full_lo, BLOCK_K):
            dq, totals = query_step(dq, totals, q, dout, lse, delta, k_head, v_head, strides, sizes, seen, place, start,
                                    scale, band, score_args, grad_args, True, T, SCORE)  # fmt: skip
    for start in tl.range(full_lo, full_hi, BLOCK_K):
        dq, totals = query_step(dq, totals, q, dout, lse, delta, k_head, v_head, strides, sizes, seen, place, start,
                                scale, band, score_args, grad_args, False, T, SCORE)  # fmt: skip
    for start in tl.range(full_hi, hi, BLOCK_K):
        dq, totals = query_step(dq, totals, q, dout, lse, delta, k_head, v_head, strides, sizes, seen, place, start,
                                scale, band, score_args, grad_args, True, T, SCORE)  # fmt: skip
    if T.slots > 0:
        store_totals(totals, batch_head * tiles + tile, grad_args, T, SCORE)
    if dq_ptr is not None:
        dq_tile = dq_ptr + head_offset(batch, head, strides[4]) + row_offset(row, strides[4])
        store_tile(dq_tile, strides[4], dq * scale, rows_here, T.head_dim, BLOCK_Q, T.columns)


@jit
def attention_convert(source_ptr, target_ptr, strides, sizes, scale, T: tl.constexpr):
    """target = source * scale in the target's type, tile by tile. strides of source, target, as for q."""
    BLOCK_Q: tl.constexpr = T.block_q
    len_q, heads = sizes[1], sizes[3]
    tile, batch_head = assign(tl.cdiv(len_q, BLOCK_Q), sizes[0] * heads, 1, False)
    batch, head, row = batch_head // heads, batch_head % heads, tile * BLOCK_Q
    source = source_ptr + head_offset(batch, head, strides[0]) + row_offset(row, strides[0])
    target = target_ptr + head_offset(batch, head, strides[1]) + row_offset(row, strides[1])
    value = load_tile(source, strides[0], 0, len_q - row, T.head_dim, BLOCK_Q, T.columns, True)
    store_tile(target, strides[1], value * scale, len_q - row, T.head_dim, BLOCK_Q, T.columns)


@jit
def sum_partials(source_ptr, target_ptr, count, BLOCK: tl.constexpr):
    """target[i] = the sum of source[i, :count], in a fixed order."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, count, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total += tl.load(source_ptr + row * count + column, mask=column < count, other=0.0)
    tl.store(target_ptr + row, tl.sum(total))
