"""Statistics of the softmax: each row's largest score and entropy, each key's mass, and the entropy's gradient.

Kernels of their own behind a forward, of one product each (of the gradient two a pass), which read no values. Of a row of
scores y with p = exp(y - lse): the entropy is H = lse - sum p y, its derivative by y is -p (y - lse + H).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from flashtile.kernels.device.exponential import exp, finite
from flashtile.kernels.device.grid import Sizes, this_program
from flashtile.kernels.device.mask import seen, zero_unseen
from flashtile.kernels.device.memory import column_offset, head_offset, load_tile, row_offset, store_tile
from flashtile.kernels.device.product import (
    add_product,
    add_to_sum,
    aligned_parts,
    free_parts,
    long_sum,
    score_product,
    transposed,
    whole_sum,
)
from flashtile.kernels.device.score import locate, stages
from flashtile.kernels.device.softmax import entropy_of
from flashtile.kernels.device.stream import await_stream
from flashtile.kernels.portable.opening import Scene, key_tile, keys_seen, query_tile
from flashtile.kernels.portable.rows import by_head
from flashtile.triton_glue.language import PLAIN_INTEGERS, jit, tl


@dataclass(frozen=True)
class Pace:
    """How a program of mass goes through its keys: in how many parts; whether it begins before the kernel in front is done."""

    parts: int
    early: bool


class Spread(NamedTuple):
    """Running state of rows: largest score, sum of p and of p (y - largest)."""

    top: tl.tensor
    total: tl.tensor
    mean: tl.tensor


@jit
def tile_stages(a, b_t, at, scale, score_args, T: tl.constexpr, SCORE: tl.constexpr):
    """The scaled product of parts, and what each modifier made of it."""
    return stages(score_product(a, b_t, T), at, scale, score_args, SCORE)


@jit
def entropy_slopes(scores, keep, lse, entropy, arriving, at, score_args, T: tl.constexpr, SCORE: tl.constexpr):
    """The gradient of the scaled product that `arriving` at the entropies makes."""
    y = scores[len(SCORE) // 2]
    p = tl.where(keep, exp(y - finite(lse), T), 0.0)
    ds = tl.where(p > 0.0, -p * (y - finite(lse) + entropy) * arriving, 0.0)
    for r in tl.static_range(1, len(SCORE) // 2 + 1):  # r modifiers before the end
        score, made = scores[len(SCORE) // 2 - r], scores[len(SCORE) // 2 - r + 1]
        ds = SCORE[len(SCORE) - 2 * r + 1](ds, score, made, at, score_args[len(SCORE) // 2 - r])
    return tl.where(keep, ds, 0.0)  # a modifier's derivative may be NaN where nothing is to be seen


@jit
def spread_step(rows, q, start, scene, MASKED: tl.constexpr, T: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr):
    """Fold the key tile at `start` into the rows."""
    BLOCK_K: tl.constexpr = T.block_k
    k_ptrs, strides, sizes, ends, place, scale, band, args, _ = scene
    start = start // BLOCK_K * BLOCK_K  # which it is: the compiler learns it here
    first, end = ends[0] - start, ends[1] - start
    k = load_tile(k_ptrs[0] + row_offset(start, strides[1]), strides[1], first, end, T.head_dim, BLOCK_K, T.columns, MASKED)
    key = start + tl.arange(0, BLOCK_K)[None, :]
    at = locate(place[0], place[1], place[2], key, sizes, MASKED and T.mask.pads_keys)
    keep = seen(at, place[2], key, sizes, band, MASKED, T, MASK)
    y = tile_stages(q, transposed(aligned_parts(k, T), T), at, scale, args, T, SCORE)[len(SCORE) // 2]
    if MASKED:
        y = tl.where(keep, y, float("-inf"))
    top = tl.maximum(rows.top, tl.max(y, 1))
    pivot = finite(top)
    if T.arrives == "":  # nothing but the largest
        return Spread(top, rows.total, rows.mean)
    else:
        p, decay = exp(y - pivot[:, None], T), exp(rows.top - pivot, T)
        bend = tl.where(p > 0.0, p * (y - pivot[:, None]), 0.0)
        total = rows.total * decay
        mean = (rows.mean + rows.total * (finite(rows.top) - pivot)) * decay
        return Spread(top, total + tl.sum(p, 1), mean + tl.sum(bend, 1))


@jit(do_not_specialize=PLAIN_INTEGERS)
def attention_statistics(in_ptrs, out_ptrs, strides, seqlen_q, seqlen_k, heads, group, left, right, scale, args, region,
                         T: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """One query tile of one head: its rows' largest scores, and with T.arrives their entropies.

    in_ptrs = (q, k, sink or None); out_ptrs = (peak, entropy), (slabs, heads_q, span_q), None where not wanted. Strides of q,
    k, sink. args = the modifiers' arguments; region = (schedule or None, the predicates' arguments).
    """
    BLOCK_Q: tl.constexpr = T.block_q
    BLOCK_K: tl.constexpr = T.block_k
    WIDE = tl.float64 if T.wide else tl.float32
    band = (left, right, region[1])
    _, head, item, _, sizes, batch, row, keys_of = query_tile(
        this_program(), region, Sizes(seqlen_q, seqlen_k, heads, group), band, T
    )
    lo, full_lo, full_hi, hi, ends = keys_of
    index = row + tl.arange(0, BLOCK_Q)
    q = in_ptrs[0] + head_offset(batch, head, strides[0]) + row_offset(item.first_q + row, strides[0])
    q = aligned_parts(load_tile(q, strides[0], 0, item.q - row, T.head_dim, BLOCK_Q, T.columns, True), T)
    k_head = in_ptrs[1] + head_offset(batch, head // group, strides[1]) + row_offset(item.first_k, strides[1])
    place = (item.batch, head, index[:, None])
    scene = Scene((k_head,), strides, sizes, ends, place, scale, band, args)
    none = tl.zeros([BLOCK_Q], WIDE)
    rows = Spread(tl.full([BLOCK_Q], float("-inf"), WIDE), none, none)
    if T.mask.left:
        for start in tl.range(lo, full_lo, BLOCK_K):
            rows = spread_step(rows, q, start, scene, True, T, SCORE, MASK)
    for start in tl.range(full_lo, full_hi, BLOCK_K):
        rows = spread_step(rows, q, start, scene, False, T, SCORE, MASK)
    for start in tl.range(full_hi, hi, BLOCK_K):
        rows = spread_step(rows, q, start, scene, True, T, SCORE, MASK)
    counts, here = index < item.q, index < item.span_q
    at_rows = (batch * heads + head).to(tl.int64) * seqlen_q + item.first_q + index
    if out_ptrs[0] is not None:
        tl.store(out_ptrs[0] + at_rows, tl.where(counts, rows.top, float("-inf")), mask=here)
    if out_ptrs[1] is not None:
        sink = None
        if T.modifiers.sink:
            sink = tl.full(rows.top.shape, 1.0, WIDE) * tl.load(in_ptrs[2] + head.to(tl.int64) * strides[2][0]).to(WIDE)
        entropy = entropy_of(rows.top, rows.total, rows.mean, sink, T)
        tl.store(out_ptrs[1] + at_rows, tl.where(counts, entropy, 0.0), mask=here)


@jit
def key_mass(q, lse, index, column, scene, T: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr, KEYS: tl.constexpr):
    """What probability KEYS keys from `column` on receive from a tile of queries, which `index` says."""
    k_ptrs, strides, sizes, _, place, scale, band, args, _ = scene
    width = sizes.k - column
    key = column + tl.arange(0, KEYS)[:, None]
    k = k_ptrs[0] + row_offset(column, strides[1])
    k = aligned_parts(load_tile(k, strides[1], 0, width, T.head_dim, KEYS, T.columns, True), T)
    at = locate(place[0], place[1], index[None, :], key, sizes, T.mask.pads_keys)
    keep = seen(at, index[None, :], key, sizes, band, True, T, MASK)
    y = tile_stages(k, transposed(q, T), at, scale, args, T, SCORE)[len(SCORE) // 2]
    return tl.sum(tl.where(keep & (lse != float("inf"))[None, :], exp(y - finite(lse)[None, :], T), 0.0), 1)


@jit(do_not_specialize=PLAIN_INTEGERS)
def attention_mass(in_ptrs, mass_ptr, strides, seqlen_q, seqlen_k, heads, group, left, right, scale, args, region,
                   T: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr, PACE: tl.constexpr):  # fmt: skip
    """One key tile of one query head: what probability its keys receive from an item's last region[2] queries, or all if 0.

    It goes by PACE.parts: where queries are few, a program waits for its first keys alone. in_ptrs = (q, k, lse); mass is
    (slabs, heads_q, span_k); all else as for `attention_statistics`.
    """
    PARTS: tl.constexpr = PACE.parts
    if PACE.early:
        await_stream()
    BLOCK_Q: tl.constexpr = T.block_q
    BLOCK_K: tl.constexpr = T.block_k
    KEYS: tl.constexpr = BLOCK_K // PARTS
    WIDE = tl.float64 if T.wide else tl.float32
    band = (left, right, region[1])
    head, item, sizes, batch, column, _, queries_of = key_tile(
        this_program(), region, Sizes(seqlen_q, seqlen_k, heads, group), heads, band, T
    )
    lo, _, _, hi, ends = queries_of
    k_head = in_ptrs[1] + head_offset(batch, head // group, strides[1]) + row_offset(item.first_k, strides[1])
    scene = Scene((k_head,), strides, sizes, ends, (item.batch, head), scale, band, args)
    q_head = in_ptrs[0] + head_offset(batch, head, strides[0]) + row_offset(item.first_q, strides[0])
    lse_head = in_ptrs[2] + (batch * heads + head).to(tl.int64) * seqlen_q + item.first_q
    mass_head = mass_ptr + (batch * heads + head).to(tl.int64) * seqlen_k + item.first_k
    first_row = 0
    if region[2] > 0:
        first_row = tl.maximum(item.q - region[2], 0)
    lo = tl.maximum(lo, first_row // BLOCK_Q * BLOCK_Q)
    if PARTS == 1:
        mass = tl.zeros([KEYS], WIDE)
    elif lo >= hi:  # nobody sees these keys
        every = column + tl.arange(0, BLOCK_K)
        tl.store(mass_head + every, tl.zeros([BLOCK_K], WIDE), mask=every < item.span_k)
    for start in tl.range(lo, hi, BLOCK_Q):
        start = start // BLOCK_Q * BLOCK_Q
        q = q_head + row_offset(start, strides[0])
        q = load_tile(q, strides[0], ends[0] - start, ends[1] - start, T.head_dim, BLOCK_Q, T.columns, True)
        q = aligned_parts(q, T)
        index = start + tl.arange(0, BLOCK_Q)
        lse = tl.load(lse_head + index, mask=(index < item.q) & (index >= first_row), other=float("inf")).to(WIDE)
        if PARTS == 1:
            mass += key_mass(q, lse, index, column, scene, T, SCORE, MASK, KEYS)
        else:
            if start > lo:
                tl.debug_barrier()  # what other threads may have left
            for key in tl.range(column, tl.minimum(column + BLOCK_K, item.span_k), KEYS):
                part = key_mass(q, lse, index, key, scene, T, SCORE, MASK, KEYS)
                keys = key + tl.arange(0, KEYS)
                if start > lo:  # queries before have left theirs
                    part += tl.load(mass_head + keys, mask=keys < item.span_k, other=0.0)
                tl.store(mass_head + keys, part, mask=keys < item.span_k)
    if PARTS == 1:
        keys = column + tl.arange(0, KEYS)
        tl.store(mass_head + keys, mass, mask=keys < item.span_k)


@jit
def load_entropies(in_ptrs, at_rows, here, T: tl.constexpr):
    """(lse, entropy, its gradient) of rows; those that are not `here` have no gradient."""
    WIDE = tl.float64 if T.wide else tl.float32
    lse = tl.load(in_ptrs[2] + at_rows, mask=here, other=0.0).to(WIDE)
    entropy = tl.load(in_ptrs[3] + at_rows, mask=here, other=0.0).to(WIDE)
    return lse, entropy, tl.load(in_ptrs[4] + at_rows, mask=here, other=0.0).to(WIDE)


@jit
def entropy_query_step(dq, q, known, start, scene, MASKED: tl.constexpr, T: tl.constexpr, SCORE: tl.constexpr,
                       MASK: tl.constexpr):  # fmt: skip
    """Add the key tile at `start` to a query tile's sum; known = what `load_entropies` gave."""
    BLOCK_K: tl.constexpr = T.block_k
    k_ptrs, strides, sizes, ends, place, scale, band, args, _ = scene
    start = start // BLOCK_K * BLOCK_K
    first, end = ends[0] - start, ends[1] - start
    k = load_tile(k_ptrs[0] + row_offset(start, strides[1]), strides[1], first, end, T.head_dim, BLOCK_K, T.columns, MASKED)
    key = start + tl.arange(0, BLOCK_K)[None, :]
    at = locate(place[0], place[1], place[2], key, sizes, MASKED and T.mask.pads_keys)
    keep = seen(at, place[2], key, sizes, band, MASKED, T, MASK)
    if MASKED and T.mask.predicate:
        k = zero_unseen(k, keep, 0)
    k = aligned_parts(k, T)
    scores = tile_stages(q, transposed(k, T), at, scale, args, T, SCORE)
    ds = entropy_slopes(scores, keep if MASKED else scores[0] == scores[0], known[0][:, None], known[1][:, None],
                        known[2][:, None], at, args, T, SCORE)  # fmt: skip
    return add_product(dq, free_parts(ds, k[0].dtype, T), k, T)


@jit(do_not_specialize=PLAIN_INTEGERS)
def attention_entropy_queries(in_ptrs, out_ptrs, strides, seqlen_q, seqlen_k, heads, group, left, right, scale, args,
                              region, T: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """One query tile of one head: dq of the entropies' gradients.

    in_ptrs = (q, k, lse, entropy, its gradient, sink or None); out_ptrs = (dq, each program's share of the sinks' gradient), or
    None. Strides of q, k, sink, dq, dk, the entropy's gradient; all else as for `attention_statistics`.
    """
    BLOCK_Q: tl.constexpr = T.block_q
    BLOCK_K: tl.constexpr = T.block_k
    COLUMNS: tl.constexpr = T.columns
    WIDE = tl.float64 if T.wide else tl.float32
    band = (left, right, region[1])
    tile, head, item, unit, sizes, batch, row, keys_of = query_tile(
        this_program(), region, Sizes(seqlen_q, seqlen_k, heads, group), band, T
    )
    lo, full_lo, full_hi, hi, ends = keys_of
    index, row_q = row + tl.arange(0, BLOCK_Q), item.first_q + row
    q = in_ptrs[0] + head_offset(batch, head, strides[0]) + row_offset(row_q, strides[0])
    q = aligned_parts(load_tile(q, strides[0], 0, item.q - row, T.head_dim, BLOCK_Q, T.columns, True), T)
    k_head = in_ptrs[1] + head_offset(batch, head // group, strides[1]) + row_offset(item.first_k, strides[1])
    at_rows = (batch * heads + head).to(tl.int64) * seqlen_q + item.first_q + index
    known = load_entropies(in_ptrs, at_rows, index < item.q, T)
    place = (item.batch, head, index[:, None])
    scene = Scene((k_head,), strides, sizes, ends, place, scale, band, args)
    if out_ptrs[0] is not None:
        dq = tl.zeros([BLOCK_Q, COLUMNS], WIDE)
        if T.mask.left:
            for start in tl.range(lo, full_lo, BLOCK_K):
                dq = entropy_query_step(dq, q, known, start, scene, True, T, SCORE, MASK)
        for start in tl.range(full_lo, full_hi, BLOCK_K):
            dq = entropy_query_step(dq, q, known, start, scene, False, T, SCORE, MASK)
        for start in tl.range(full_hi, hi, BLOCK_K):
            dq = entropy_query_step(dq, q, known, start, scene, True, T, SCORE, MASK)
        if T.items.ragged:  # rows that do not count may have met an infinite key
            dq = tl.where((index < item.q)[:, None], dq, 0.0)
        dq_tile = out_ptrs[0] + head_offset(batch, head, strides[3]) + row_offset(row_q, strides[3])
        store_tile(dq_tile, strides[3], dq * scale, item.span_q - row, T.head_dim, BLOCK_Q, T.columns)
    if out_ptrs[1] is not None:
        sink = tl.load(in_ptrs[5] + head.to(tl.int64) * strides[2][0]).to(WIDE)
        share = exp(sink - finite(known[0]), T)
        each = tl.where((index < item.q) & (share > 0.0), -share * (sink - finite(known[0]) + known[1]) * known[2], 0.0)
        tl.store(out_ptrs[1] + by_head(tile, head, item, unit, tl.num_programs(0), seqlen_q, heads, T), tl.sum(each, 0))


@jit
def entropy_key_step(dk, k, head, start, span, scene, T: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr):
    """Add the query tile at `start` of one head to a key tile's sum; scene.ptrs at head 0, span: rows of the tensors."""
    BLOCK_Q: tl.constexpr = T.block_q
    in_ptrs, strides, sizes, ends, place, scale, band, args, _ = scene
    start = start // BLOCK_Q * BLOCK_Q
    q = in_ptrs[0] + column_offset(head, strides[0]) + row_offset(start, strides[0])
    q = load_tile(q, strides[0], ends[0] - start, ends[1] - start, T.head_dim, BLOCK_Q, T.columns, True)
    index = start + tl.arange(0, BLOCK_Q)
    at = locate(place[0], head, index[None, :], place[2], sizes, T.mask.pads_keys)
    keep = seen(at, index[None, :], place[2], sizes, band, True, T, MASK)
    if T.mask.predicate:
        q = zero_unseen(q, keep, 0)
    q = aligned_parts(q, T)
    known = load_entropies(in_ptrs, head.to(tl.int64) * span + index, index < sizes.q, T)
    scores = tile_stages(k, transposed(q, T), at, scale, args, T, SCORE)
    ds = entropy_slopes(scores, keep, known[0][None, :], known[1][None, :],
                        known[2][None, :], at, args, T, SCORE)  # fmt: skip
    return add_to_sum(dk, free_parts(ds, q[0].dtype, T), q, T)


@jit(do_not_specialize=PLAIN_INTEGERS)
def attention_entropy_keys(in_ptrs, dk_ptr, strides, seqlen_q, seqlen_k, heads, group, left, right, scale, args, region,
                           T: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """One key tile of one key/value head: dk of the entropies' gradients, over all its query heads; as for the queries."""
    BLOCK_Q: tl.constexpr = T.block_q
    BLOCK_K: tl.constexpr = T.block_k
    COLUMNS: tl.constexpr = T.columns
    band, heads_kv = (left, right, region[1]), heads // group
    head_kv, item, sizes, batch, column, shift, queries_of = key_tile(
        this_program(), region, Sizes(seqlen_q, seqlen_k, heads, group), heads_kv, band, T
    )
    lo, _, _, hi, ends = queries_of
    keys_here, column_k = item.k - column, item.first_k + column
    key_first, key_end = keys_seen(column, keys_here, shift, left, right, T)
    k = in_ptrs[1] + head_offset(batch, head_kv, strides[1]) + row_offset(column_k, strides[1])
    k = aligned_parts(load_tile(k, strides[1], key_first, key_end, T.head_dim, BLOCK_K, T.columns, True), T)
    key, wide = column + tl.arange(0, BLOCK_K)[:, None], batch.to(tl.int64)
    rows = wide * heads * seqlen_q + item.first_q
    own = (in_ptrs[0] + wide * strides[0][0] + row_offset(item.first_q, strides[0]), in_ptrs[1], in_ptrs[2] + rows,
           in_ptrs[3] + rows, in_ptrs[4] + rows)  # fmt: skip
    scene = Scene(own, strides, sizes, ends, (item.batch, head_kv, key), scale, band, args)
    dk = long_sum(BLOCK_K, COLUMNS, T)
    for member in tl.range(0, group):
        head = head_kv * group + member
        for start in tl.range(lo, hi, BLOCK_Q):
            dk = entropy_key_step(dk, k, head, start, seqlen_q, scene, T, SCORE, MASK)
    dk_tile = dk_ptr + head_offset(batch, head_kv, strides[4]) + row_offset(column_k, strides[4])
    store_tile(dk_tile, strides[4], whole_sum(dk, T) * scale, item.span_k - column, T.head_dim, BLOCK_K, T.columns)
