"""Forward kernel: one program computes one query tile of one head (FlashAttention-2, arXiv 2307.08691, algorithm 1)."""

from __future__ import annotations

from flashtile._triton import PLAIN_INTEGERS, jit, tl
from flashtile.kernels.lib.dropout import kept, load_seed
from flashtile.kernels.lib.grid import Sizes, assign
from flashtile.kernels.lib.mask import key_range, visible
from flashtile.kernels.lib.memory import head_offset, load_tile, row_offset, store_tile
from flashtile.kernels.lib.product import aligned_parts, score_product, transposed
from flashtile.kernels.lib.score import locate, logits, unit
from flashtile.kernels.lib.softmax import add_sink, empty_rows, finish, fold


@jit
def forward_step(rows, q, k_ptr, v_ptr, strides, sizes, seen, place, start, scale, band, score_args,
                 MASKED: tl.constexpr, T: tl.constexpr, SCORE: tl.constexpr):  # fmt: skip
    """Fold the key tile at `start` into the rows.

    seen = (first, end) keys that this query tile sees at all; place = (batch, head, row indices as a column,
    the first of them, seed of dropout).
    """
    BLOCK_K: tl.constexpr = T.block_k
    first, end = seen[0] - start, seen[1] - start
    k = load_tile(k_ptr + row_offset(start, strides[1]), strides[1], first, end, T.head_dim, BLOCK_K, T.columns, MASKED)
    v = load_tile(v_ptr + row_offset(start, strides[2]), strides[2], first, end, T.head_dim_v, BLOCK_K, T.columns_v, MASKED)
    key = start + tl.arange(0, BLOCK_K)[None, :]
    at = locate(place[0], place[1], place[2], key, sizes)
    score = logits(score_product(q, transposed(aligned_parts(k, T), T), T), at, scale, score_args, T, SCORE)
    survives = kept(place[4], place[0] * sizes.heads + place[1], place[3], start, False, T)
    keep = visible(place[2], key, sizes, band, T)
    return fold(rows, score, keep, survives, v, scale, score_args, MASKED, T, SCORE)


@jit(do_not_specialize=PLAIN_INTEGERS)
def attention_forward(in_ptrs, out_ptrs, strides, seqlen_q, seqlen_k, heads, group, left, right, scale, score_args,
                      T: tl.constexpr, SCORE: tl.constexpr):  # fmt: skip
    """in_ptrs = (q, k, v, sink or None); out_ptrs = (out, lse, stats); strides of q, k, v, out, sink (heads_q,).

    lse is (batch, heads_q, seqlen_q); stats, present where T.exact, is (batch, heads_q, 2, seqlen_q): each row's maximum
    and sum, from which the backward forms probabilities without the rounding of a logarithm.
    """
    BLOCK_Q: tl.constexpr = T.block_q
    BLOCK_K: tl.constexpr = T.block_k
    sizes, band = Sizes(seqlen_q, seqlen_k, heads, group), (left, right)
    tile, batch_head = assign(tl.cdiv(seqlen_q, BLOCK_Q), T.swizzle, T.last_first)
    batch, head = batch_head // heads, batch_head % heads
    row, shift = tile * BLOCK_Q, seqlen_k - seqlen_q
    first, last = row + shift, tl.minimum(row + BLOCK_Q, seqlen_q) - 1 + shift
    lo, full_lo, full_hi, hi = key_range(first, last, seqlen_k, left, right, T.left, T.right, BLOCK_K)
    seen_from = 0
    if T.left:
        seen_from = tl.maximum(first - left, 0)
    seen = (seen_from, hi)

    q_head = in_ptrs[0] + head_offset(batch, head, strides[0]) + row_offset(row, strides[0])
    k_head = in_ptrs[1] + head_offset(batch, head // group, strides[1])
    v_head = in_ptrs[2] + head_offset(batch, head // group, strides[2])
    q = aligned_parts(load_tile(q_head, strides[0], 0, seqlen_q - row, T.head_dim, BLOCK_Q, T.columns, True), T)
    index = row + tl.arange(0, BLOCK_Q)
    seed = load_seed(score_args, T)
    place = (batch, head, index[:, None], row, seed)
    rows = empty_rows(BLOCK_Q, T.columns_v)
    if T.left:
        for start in tl.range(lo, full_lo, BLOCK_K):
            rows = forward_step(rows, q, k_head, v_head, strides, sizes, seen, place, start, scale, band, score_args,
                                True, T, SCORE)  # fmt: skip
    for start in tl.range(full_lo, full_hi, BLOCK_K):
        rows = forward_step(rows, q, k_head, v_head, strides, sizes, seen, place, start, scale, band, score_args,
                            False, T, SCORE)  # fmt: skip
    for start in tl.range(full_hi, hi, BLOCK_K):
        rows = forward_step(rows, q, k_head, v_head, strides, sizes, seen, place, start, scale, band, score_args,
                            True, T, SCORE)  # fmt: skip

    factor = unit(scale, score_args, T, SCORE)
    if T.sink:
        sink = tl.load(in_ptrs[3] + head.to(tl.int64) * strides[4][0]).to(tl.float32)
        rows = add_sink(rows, tl.full(rows.top.shape, 1.0, tl.float32) * sink, factor, T)
        factor = 1.0
    out, lse = finish(rows, factor, T)
    if T.dropout:
        out *= seed[4]
    out_head = out_ptrs[0] + head_offset(batch, head, strides[3]) + row_offset(row, strides[3])
    store_tile(out_head, strides[3], out, seqlen_q - row, T.head_dim_v, BLOCK_Q, T.columns_v)
    tl.store(out_ptrs[1] + batch_head.to(tl.int64) * seqlen_q + index, lse, mask=index < seqlen_q)
    if T.exact:
        stats = out_ptrs[2] + batch_head.to(tl.int64) * (2 * seqlen_q) + index
        tl.store(stats, rows.top, mask=index < seqlen_q)
        tl.store(stats + seqlen_q, rows.total, mask=index < seqlen_q)
