"""Forward mode: one program computes out, lse and their tangents of one query tile of one head.

With T the tangent of modified scores, lse's is mu = sum p T and out's is sum p (T - mu) v + p v'. An online softmax carries
both: beside acc = sum p v and total = sum p, turn = sum p (T - ref) v + p v' and mean = sum p (T - ref), all rescaled alike.
`ref` is any number per row near T's: what T has in common cancels in exact arithmetic, not after p T was rounded to 16 bits.
So six products form what the forward forms with two; what has no tangent costs none.
"""

from __future__ import annotations

from typing import NamedTuple

from flashtile.kernels.device.blocks import block_list, block_start
from flashtile.kernels.device.direction import FIELDS, LONE, slopes_of
from flashtile.kernels.device.dropout import dropped, kept, load_seed
from flashtile.kernels.device.exponential import LN2, LOG2E, exp
from flashtile.kernels.device.grid import Sizes, this_program
from flashtile.kernels.device.mask import seen, zero_unseen
from flashtile.kernels.device.memory import head_offset, load_tile, row_offset, store_tile
from flashtile.kernels.device.product import (
    add_product,
    add_rounded,
    aligned_parts,
    free_parts,
    product,
    score_product,
    transposed,
)
from flashtile.kernels.device.score import locate, stages
from flashtile.kernels.portable.opening import Scene, query_tile
from flashtile.kernels.portable.rows import by_head, load_dlse
from flashtile.triton_glue.language import PLAIN_INTEGERS, jit, tl


class Moving(NamedTuple):
    """Running state of a query tile; the maximum is a score where T.modifiers.prescale, else in units of the base-2
    exponential.
    """

    acc: tl.tensor
    turn: tl.tensor
    top: tl.tensor
    total: tl.tensor
    mean: tl.tensor


@jit
def product_tangent(q, tq, k_t, tk_t, T: tl.constexpr):
    """The tangent of q k^T, of parts; either term only where it moves. In either order of queries and keys."""
    if T.moves_q and T.moves_k:
        return add_product(product(tq, k_t, T), q, tk_t, T)
    elif T.moves_q:
        return product(tq, k_t, T)
    else:
        return product(q, tk_t, T)


@jit
def tile_scores(queries, start, scene, MASKED: tl.constexpr, T: tl.constexpr, SCORE: tl.constexpr, ALONG: tl.constexpr,
                MASK: tl.constexpr):  # fmt: skip
    """(scores, their tangents, which exist) of the key tile at `start`; scores are products unless T.modifiers.prescale.

    queries = (q, its tangent), in parts; scene.ptrs = (k, v, their tangents).
    """
    BLOCK_K: tl.constexpr = T.block_k
    kv_ptrs, strides, sizes, ends, place, scale, band, score_args, moved_args = scene
    first, end = ends[0] - start, ends[1] - start
    k = load_tile(kv_ptrs[0] + row_offset(start, strides[1]), strides[1], first, end, T.head_dim, BLOCK_K, T.columns, MASKED)
    key = start + tl.arange(0, BLOCK_K)[None, :]
    at = locate(place[0], place[1], place[2], key, sizes, MASKED and T.mask.pads_keys)
    keep = seen(at, place[2], key, sizes, band, MASKED, T, MASK)
    k_t = transposed(aligned_parts(k, T), T)
    score = score_product(queries[0], k_t, T)
    slope = tl.zeros_like(score)
    if T.moves_q or T.moves_k:
        tk_t = k_t
        if T.moves_k:
            tk = kv_ptrs[2] + row_offset(start, strides[6])
            tk = load_tile(tk, strides[6], first, end, T.head_dim, BLOCK_K, T.columns, MASKED)
            tk_t = transposed(aligned_parts(tk, T), T)
        slope = product_tangent(queries[0], queries[1], k_t, tk_t, T)
    if T.modifiers.prescale:
        scores = stages(score, at, scale, score_args, SCORE)
        if T.bends:
            slopes = slopes_of(slope, scores, at, scale, score_args, moved_args, SCORE, ALONG)
            slope = slopes[len(SCORE) // 2]
        score = scores[len(SCORE) // 2]
    else:
        slope = slope * scale
    return score, slope, keep


@jit
def tangent_step(rows, ref, queries, start, scene, MASKED: tl.constexpr, T: tl.constexpr, SCORE: tl.constexpr,
                 ALONG: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """Fold the key tile at `start` into the rows."""
    BLOCK_K: tl.constexpr = T.block_k
    kv_ptrs, strides, sizes, ends, place, scale, _, _, _ = scene
    start = start // BLOCK_K * BLOCK_K  # which it is: the compiler learns it here
    first, end = ends[0] - start, ends[1] - start
    v = load_tile(
        kv_ptrs[1] + row_offset(start, strides[2]), strides[2], first, end, T.head_dim_v, BLOCK_K, T.columns_v, MASKED
    )
    survives = kept(place[4], place[0] * sizes.heads + place[1], place[3], start, False, T)
    score, slope, keep = tile_scores(queries, start, scene, MASKED, T, SCORE, ALONG, MASK)
    if MASKED:
        score = tl.where(keep, score, float("-inf"))
        if T.mask.predicate:
            v = zero_unseen(v, keep, 0)
    top = tl.max(score, 1)
    if not T.modifiers.prescale:
        top = top * (scale * LOG2E)
    top = tl.maximum(rows.top, top)
    pivot = top
    if MASKED or T.modifiers.prescale:
        pivot = tl.where(top == float("-inf"), 0.0, top)
    if T.modifiers.prescale:
        decay, p = exp(rows.top - pivot, T), exp(score - pivot[:, None], T)
    else:
        decay, p = tl.exp2(rows.top - pivot), tl.exp2(score * (scale * LOG2E) - pivot[:, None])
    total, mean, turn = rows.total * decay + tl.sum(p, 1), rows.mean * decay, rows.turn * decay[:, None]
    v_parts = free_parts(v, v.dtype, T)
    if T.bends:
        bent = slope - ref[:, None]
        if MASKED:  # it may be NaN where nothing is to be seen
            bent = tl.where(keep, bent, 0.0)
        bent = p * bent
        mean += tl.sum(bent, 1)
        turn = add_rounded(turn, dropped(bent, survives, place[4], T), v_parts, T)
    p = dropped(p, survives, place[4], T)
    acc = add_rounded(rows.acc * decay[:, None], p, v_parts, T)
    if T.moves_v:
        tv = kv_ptrs[3] + row_offset(start, strides[7])
        tv = load_tile(tv, strides[7], first, end, T.head_dim_v, BLOCK_K, T.columns_v, MASKED)
        if MASKED and T.mask.predicate:
            tv = zero_unseen(tv, keep, 0)
        turn = add_rounded(turn, p, free_parts(tv, v.dtype, T), T)
    return Moving(acc, turn, top, total, mean)


@jit
def reference(queries, start, scene, T: tl.constexpr, SCORE: tl.constexpr, ALONG: tl.constexpr, MASK: tl.constexpr):
    """What T is near to in each row: its mean over the keys that the row sees of the tile at `start`, or else over the tile."""
    BLOCK_K: tl.constexpr = T.block_k
    start = start // BLOCK_K * BLOCK_K
    _, slope, keep = tile_scores(queries, start, scene, True, T, SCORE, ALONG, MASK)
    finite = tl.abs(slope) < float("inf")
    weight = tl.where(finite, tl.where(keep, 1.0, 2.0**-24), 0.0).to(slope.dtype)
    whole = tl.sum(weight, 1)
    return tl.sum(tl.where(finite, slope, 0.0) * weight, 1) / tl.where(whole == 0.0, 1.0, whole)


@jit(do_not_specialize=PLAIN_INTEGERS)
def attention_tangent(in_ptrs, out_ptrs, strides, seqlen_q, seqlen_k, heads, group, left, right, scale, args, region,
                      T: tl.constexpr, SCORE: tl.constexpr, ALONG: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """One query tile of one head.

    in_ptrs = (q, k, v, sink, tangents of these, dout, dlse, tangents of these); None where there is none.
    out_ptrs = (out, lse, tout, tlse, what `second` needs of rows, each program's share of the second derivative by sinks), or
    None. Strides of q, k, v, out, sink, tq, tk, tv, tsink, dout, dlse, tdout, tdlse. lse and tlse are (slabs, heads_q, span_q),
    rows (slabs, heads_q, span_q, FIELDS), of which five hold: level and norm, as `directed_probabilities` has them, mu,
    delta = sum(out dout) - dlse, its tangent, in the order in which `load_fields` splits them.
    args = (score_args, the same of captured tensors' tangents); region as in the forward.
    """
    BLOCK_Q: tl.constexpr = T.block_q
    BLOCK_K: tl.constexpr = T.block_k
    COLUMNS_V: tl.constexpr = T.columns_v
    WIDE = tl.float64 if T.wide else tl.float32
    band = (left, right, region[1])
    tile, head, item, unit, sizes, batch, row, keys_of = query_tile(
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
    tq = q
    if T.moves_q:
        tq_tile = in_ptrs[4] + head_offset(batch, head, strides[5]) + row_offset(row_q, strides[5])
        tq = aligned_parts(load_tile(tq_tile, strides[5], 0, rows_here, T.head_dim, BLOCK_Q, T.columns, True), T)
    if T.moves_k:
        tk_head = in_ptrs[5] + head_offset(batch, head_kv, strides[6]) + row_offset(item.first_k, strides[6])
    if T.moves_v:
        tv_head = in_ptrs[6] + head_offset(batch, head_kv, strides[7]) + row_offset(item.first_k, strides[7])
    queries, kv_ptrs = (q, tq), (k_head, v_head, tk_head, tv_head)
    seed = load_seed(args[0], T)
    place = (item.batch, head, index[:, None], row, seed)
    scene = Scene(kv_ptrs, strides, sizes, ends, place, scale, band, args[0], args[1])
    none = tl.zeros([BLOCK_Q], WIDE)
    empty = tl.zeros([BLOCK_Q, COLUMNS_V], WIDE)
    rows, ref = Moving(empty, empty, tl.full([BLOCK_Q], float("-inf"), WIDE), none, none), none
    if T.mask.blocks_k > 0:
        indices, partial, visited = block_list(region[2], item.batch, head, row // T.mask.blocks_q)
        PER: tl.constexpr = T.mask.blocks_k // BLOCK_K
        if T.bends:
            if visited > 0:
                start = block_start(indices, 0, T.mask.blocks_k, BLOCK_K)
                ref = reference(queries, start, scene, T, SCORE, ALONG, MASK)
        for step in tl.range(0, partial * PER):
            start = block_start(indices, step, T.mask.blocks_k, BLOCK_K)
            rows = tangent_step(rows, ref, queries, start, scene, True, T, SCORE, ALONG, MASK)
        for step in tl.range(partial * PER, visited * PER):
            start = block_start(indices, step, T.mask.blocks_k, BLOCK_K)
            rows = tangent_step(rows, ref, queries, start, scene, False, T, SCORE, ALONG, MASK)
    else:
        if T.bends:
            if lo < hi:
                ref = reference(queries, lo, scene, T, SCORE, ALONG, MASK)
        if T.mask.left:
            for start in tl.range(lo, full_lo, BLOCK_K):
                rows = tangent_step(rows, ref, queries, start, scene, True, T, SCORE, ALONG, MASK)
        for start in tl.range(full_lo, full_hi, BLOCK_K):
            rows = tangent_step(rows, ref, queries, start, scene, False, T, SCORE, ALONG, MASK)
        for start in tl.range(full_hi, hi, BLOCK_K):
            rows = tangent_step(rows, ref, queries, start, scene, True, T, SCORE, ALONG, MASK)

    acc, turn, top, total, mean = rows.acc, rows.turn, rows.top, rows.total, rows.mean
    if not T.modifiers.prescale:
        top = top * LN2
    sink, bend, share = none, none, none
    if T.modifiers.sink:  # one more key, whose logit is `sink` and whose value is zero
        sink += tl.load(in_ptrs[3] + head.to(tl.int64) * strides[4][0])
        if in_ptrs[7] is not None:
            bend += tl.load(in_ptrs[7] + head.to(tl.int64) * strides[8][0])
        level = tl.maximum(top, sink)
        pivot = tl.where(level == float("-inf"), 0.0, level)
        decay, share = exp(top - pivot, T), exp(sink - pivot, T)
        acc, turn, top = acc * decay[:, None], turn * decay[:, None], level
        total, mean = total * decay + share, mean * decay + share * (bend - ref)
    whole = tl.where(total == 0.0, 1.0, total)
    mean, share = mean / whole, share / whole
    out = acc / whole[:, None]
    tout = turn / whole[:, None] - mean[:, None] * out
    if T.modifiers.dropout:
        out, tout = out * seed.factor, tout * seed.factor
    counts = index < item.q
    sees = counts & (total > 0.0)
    lse = top + (tl.log(whole) if T.wide else tl.log2(whole) * LN2)
    tlse = tl.where(total == 0.0, 0.0, mean + ref)
    if T.items.ragged:  # rows that belong to an item, but do not count
        out, tout = tl.where(counts[:, None], out, 0.0), tl.where(counts[:, None], tout, 0.0)
        lse, tlse = tl.where(counts, lse, float("-inf")), tl.where(counts, tlse, 0.0)
    per_head, here, rows_own = (batch * heads + head).to(tl.int64), index < item.span_q, item.span_q - row
    at_rows = per_head * seqlen_q + item.first_q + index
    out_offset = head_offset(batch, head, strides[3]) + row_offset(row_q, strides[3])
    if out_ptrs[0] is not None:
        store_tile(out_ptrs[0] + out_offset, strides[3], out, rows_own, T.head_dim_v, BLOCK_Q, T.columns_v)
    if out_ptrs[1] is not None:
        tl.store(out_ptrs[1] + at_rows, lse, mask=here)
    if out_ptrs[2] is not None:
        store_tile(out_ptrs[2] + out_offset, strides[3], tout, rows_own, T.head_dim_v, BLOCK_Q, T.columns_v)
    if out_ptrs[3] is not None:
        tl.store(out_ptrs[3] + at_rows, tlse, mask=here)
    if out_ptrs[4] is not None:
        token, delta, tdelta = item.first_q + index, none, none
        if T.has_dout:
            dout = in_ptrs[8] + head_offset(batch, head, strides[9]) + row_offset(row_q, strides[9])
            dout = load_tile(dout, strides[9], 0, rows_here, T.head_dim_v, BLOCK_Q, T.columns_v, True).to(WIDE)
            delta, tdelta = tl.sum(out * dout, 1), tl.sum(tout * dout, 1)
        if T.has_tdout:
            tdout = in_ptrs[10] + head_offset(batch, head, strides[11]) + row_offset(row_q, strides[11])
            tdout = load_tile(tdout, strides[11], 0, rows_here, T.head_dim_v, BLOCK_Q, T.columns_v, True)
            tdelta += tl.sum(out * tdout.to(WIDE), 1)
        delta -= load_dlse(in_ptrs[9], strides[10], batch, head, token, counts)
        tdelta -= load_dlse(in_ptrs[11], strides[12], batch, head, token, counts)
        fields = out_ptrs[4] + (per_head * seqlen_q + token) * FIELDS
        level, norm, mean = lse * LOG2E, none + scale, tlse
        if T.modifiers.prescale:
            level, norm = top, 1.0 / whole
        if T.may_be_lone:
            lone = tl.abs(total - 1.0) <= (0.0 if T.exact or T.wide else LONE)
            norm = tl.where(lone, 1.0 if T.modifiers.prescale else 0.0, norm)
            mean = tl.where(lone, 0.0, mean)
        tl.store(fields, tl.where(sees, level, float("inf")), mask=here)
        tl.store(fields + 1, tdelta, mask=here)
        tl.store(fields + 2, mean, mask=here)
        tl.store(fields + 4, norm, mask=here)
        tl.store(fields + 6, delta, mask=here)
        if out_ptrs[5] is not None:
            given = tl.where(sees & (share > 0.0), -share * ((bend - tlse) * delta + tdelta), 0.0)
            tl.store(out_ptrs[5] + by_head(tile, head, item, unit, tl.num_programs(0), seqlen_q, heads, T), tl.sum(given))
