"""Gradients of captured tensors that broadcast to the scores, summed in a fixed order.

A tile of the scores' gradient is formed anew for every (batch, head, query tile, key tile). Where the tensor has both query and
key axis, a program adds up the tiles of the batch entries and heads that share its elements, and stores the sum. Elsewhere a
program walks the axis that is missing, and `sum_shared` adds up batch entries and heads.
"""

from __future__ import annotations

from flashtile.kernels.device.dropout import kept, load_seed
from flashtile.kernels.device.grid import Sizes
from flashtile.kernels.device.mask import seen, tiles_seen
from flashtile.kernels.device.memory import head_offset, load_tile, row_offset
from flashtile.kernels.device.product import aligned_parts, score_product, transposed
from flashtile.kernels.device.score import contribution, locate
from flashtile.kernels.device.varlen import bounds
from flashtile.kernels.portable.backward import beyond_mean
from flashtile.kernels.portable.rows import load_rows
from flashtile.triton_glue.language import PLAIN_INTEGERS, jit, tl


@jit
def lengths_of(batch, used_ptrs, seqlen_q, seqlen_k):
    """How many queries and keys of an item count; used_ptrs = (seqused_q, seqused_k), None where absent."""
    _, _, queries = bounds(batch, None, used_ptrs[0], seqlen_q, batch + 1, False)
    _, _, keys = bounds(batch, None, used_ptrs[1], seqlen_k, batch + 1, False)
    return queries, keys


@jit
def load_queries(ptrs, strides, sizes, batch, head, row, T: tl.constexpr):
    """(q, dout) of the query tile from `row`, and what `load_rows` gives of it; ptrs and strides as for the kernel."""
    BLOCK_Q: tl.constexpr = T.block_q
    q_tile = ptrs[0] + head_offset(batch, head, strides[0]) + row_offset(row, strides[0])
    dout_tile = ptrs[3] + head_offset(batch, head, strides[3]) + row_offset(row, strides[3])
    q = load_tile(q_tile, strides[0], 0, sizes.q - row, T.head_dim, BLOCK_Q, T.columns, True)
    dout = load_tile(dout_tile, strides[3], 0, sizes.q - row, T.head_dim_v, BLOCK_Q, T.columns_v, True)
    rows = ptrs[4] + batch.to(tl.int64) * strides[4][0] + head.to(tl.int64) * strides[4][1]
    return q, dout, load_rows(rows, strides[4], row, T)


@jit
def load_keys(ptrs, strides, sizes, batch, head, key, T: tl.constexpr):
    """(k, v) of the key tile from `key`."""
    BLOCK_K: tl.constexpr = T.block_k
    k_tile = ptrs[1] + head_offset(batch, head // sizes.group, strides[1]) + row_offset(key, strides[1])
    v_tile = ptrs[2] + head_offset(batch, head // sizes.group, strides[2]) + row_offset(key, strides[2])
    k = load_tile(k_tile, strides[1], 0, sizes.k - key, T.head_dim, BLOCK_K, T.columns, True)
    return k, load_tile(v_tile, strides[2], 0, sizes.k - key, T.head_dim_v, BLOCK_K, T.columns_v, True)


@jit
def tile_contribution(queries, keys, sizes, place, seed, scale, band, score_args, T: tl.constexpr, SCORE: tl.constexpr,
                      CAPTURED: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """What the tile of scores at place = (batch, head, row, key) sends to the tensor: queries by keys, 0 where nothing is seen.

    queries and keys are what `load_queries` and `load_keys` gave.
    """
    batch, head, row, key = place
    BLOCK_Q: tl.constexpr = T.block_q
    BLOCK_K: tl.constexpr = T.block_k
    q, dout, rows = queries
    k, v = keys
    level, delta, norm, slip = rows
    index, column = row + tl.arange(0, BLOCK_Q)[:, None], key + tl.arange(0, BLOCK_K)[None, :]
    at = locate(batch, head, index, column, sizes, T.mask.pads_keys)
    raw = score_product(aligned_parts(q, T), transposed(aligned_parts(k, T), T), T)
    survives = kept(seed, batch * sizes.heads + head, row, key, False, T)
    values = transposed(aligned_parts(v, T), T)
    dp = beyond_mean(aligned_parts(dout, T), values, delta[:, None], slip[:, None], survives, seed.factor, T)
    state = (level[:, None], 0.0, norm[:, None])
    MASKED: tl.constexpr = (
        T.mask.left or T.mask.right or T.mask.predicate or T.mask.pads_keys
    )  # queries that do not exist have p = 0
    keep = seen(at, index, column, sizes, band, MASKED, T, MASK)
    return contribution(raw, dp, state, at, keep, scale, score_args, MASKED, T, SCORE, CAPTURED)


@jit(do_not_specialize=[*PLAIN_INTEGERS, "batches"])
def attention_backward_broadcast(ptrs, strides, seqlen_q, seqlen_k, heads, group, left, right, scale, score_args, region,
                                 batches, T: tl.constexpr, SCORE: tl.constexpr, CAPTURED: tl.constexpr,
                                 MASK: tl.constexpr):  # fmt: skip
    """One program: `broadcast_tile` of its number."""
    broadcast_tile(tl.program_id(0), ptrs, strides, Sizes(seqlen_q, seqlen_k, heads, group), (batches, region[0]),
                   (left, right, region[1]), scale, score_args, T, SCORE, CAPTURED, MASK)  # fmt: skip


@jit
def broadcast_tile(program, ptrs, strides, spans, items, band, scale, score_args, T: tl.constexpr, SCORE: tl.constexpr,
                   CAPTURED: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """The gradient of a captured tensor, or what `sum_shared` makes it of.

    CAPTURED = (its contribution, its modifier's place in the chain, then which axes of (batch, heads_q, seqlen_q, seqlen_k)
    the tensor lacks; not both of the last two). ptrs = (q, k, v, dout, rows, the result); strides of q, k, v, dout, rows.
    spans: the `Sizes` of the tensors; items = (how many, (seqused_q, seqused_k), None where absent); band = (left, right,
    arguments of the predicates MASK).
    The result is float32, float64 where T.wide, or the tensor's type: with query and key axis the gradient itself; else (own,
    shared, n), own and shared counting the batch entries and heads, n queries or keys.
    """
    BLOCK_Q: tl.constexpr = T.block_q
    BLOCK_K: tl.constexpr = T.block_k
    WIDE = tl.float64 if T.wide else tl.float32
    seqlen_q, seqlen_k, heads, group = spans
    batches, used_ptrs = items
    left, right = band[0], band[1]
    out_ptr, seed = ptrs[5], load_seed(score_args, T)
    tiles_q, tiles_k = tl.cdiv(seqlen_q, BLOCK_Q), tl.cdiv(seqlen_k, BLOCK_K)
    shared_batches = batches if CAPTURED[2] else 1
    shared_heads = heads if CAPTURED[3] else 1
    own_heads = 1 if CAPTURED[3] else heads
    shared = shared_batches * shared_heads
    if not CAPTURED[4] and not CAPTURED[5]:
        key, row = program % tiles_k * BLOCK_K, program // tiles_k % tiles_q * BLOCK_Q
        own = program // (tiles_k * tiles_q)
        total = tl.zeros([BLOCK_Q, BLOCK_K], WIDE)
        lo, _, _, hi, _ = tiles_seen(row, seqlen_q, seqlen_k, left, right, T.mask.left, T.mask.right, BLOCK_Q, BLOCK_K, T)
        count = shared
        if not T.items.ragged:  # asked once: loads under a condition are not made ahead
            count = tl.where((key >= lo) & (key < hi), shared, 0)
        for n in tl.range(0, count):
            batch, head = own // own_heads + n // shared_heads, own % own_heads + n % shared_heads
            queries, keys = lengths_of(batch, used_ptrs, seqlen_q, seqlen_k)
            sizes = Sizes(queries, keys, heads, group)
            if T.items.ragged:
                lo, _, _, hi, _ = tiles_seen(row, queries, keys, left, right, T.mask.left, T.mask.right, BLOCK_Q, BLOCK_K, T)
                if (key >= lo) & (key < hi):
                    here = load_queries(ptrs, strides, sizes, batch, head, row, T)
                    there = load_keys(ptrs, strides, sizes, batch, head, key, T)
                    total += tile_contribution(here, there, sizes, (batch, head, row, key), seed, scale, band, score_args,
                                               T, SCORE, CAPTURED, MASK)  # fmt: skip
            else:
                here = load_queries(ptrs, strides, sizes, batch, head, row, T)
                there = load_keys(ptrs, strides, sizes, batch, head, key, T)
                total += tile_contribution(here, there, sizes, (batch, head, row, key), seed, scale, band, score_args,
                                           T, SCORE, CAPTURED, MASK)  # fmt: skip
        index, column = row + tl.arange(0, BLOCK_Q)[:, None], key + tl.arange(0, BLOCK_K)[None, :]
        element = (own.to(tl.int64) * seqlen_q + index) * seqlen_k + column
        tl.store(out_ptr + element, total.to(out_ptr.dtype.element_ty), mask=(index < seqlen_q) & (column < seqlen_k))
    else:
        tiles = tiles_k if CAPTURED[4] else tiles_q
        tile, batch_head = program % tiles, program // tiles
        batch, head = batch_head // heads, batch_head % heads
        own = (0 if CAPTURED[2] else batch) * own_heads + (0 if CAPTURED[3] else head)
        place = own * shared + (batch if CAPTURED[2] else 0) * shared_heads + (head if CAPTURED[3] else 0)
        place = tl.cast(place, tl.int64)
        queries, keys = lengths_of(batch, used_ptrs, seqlen_q, seqlen_k)
        sizes = Sizes(queries, keys, heads, group)
        if CAPTURED[4]:
            key = tile * BLOCK_K
            lo, _, _, hi, _ = tiles_seen(key, keys, queries, right, left, T.mask.right, T.mask.left, BLOCK_K, BLOCK_Q, T)
            total = tl.zeros([BLOCK_Q, BLOCK_K], WIDE)  # added up across threads once, behind the loop
            there = load_keys(ptrs, strides, sizes, batch, head, key, T)
            for row in tl.range(lo, hi, BLOCK_Q):
                row = row // BLOCK_Q * BLOCK_Q
                here = load_queries(ptrs, strides, sizes, batch, head, row, T)
                total += tile_contribution(here, there, sizes, (batch, head, row, key), seed, scale, band, score_args,
                                           T, SCORE, CAPTURED, MASK)  # fmt: skip
            column = key + tl.arange(0, BLOCK_K)
            tl.store(out_ptr + place * seqlen_k + column, tl.sum(total, 0), mask=column < seqlen_k)
        else:
            row = tile * BLOCK_Q
            lo, _, _, hi, _ = tiles_seen(row, queries, keys, left, right, T.mask.left, T.mask.right, BLOCK_Q, BLOCK_K, T)
            total = tl.zeros([BLOCK_Q, BLOCK_K], WIDE)
            here = load_queries(ptrs, strides, sizes, batch, head, row, T)
            for key in tl.range(lo, hi, BLOCK_K):
                key = key // BLOCK_K * BLOCK_K
                there = load_keys(ptrs, strides, sizes, batch, head, key, T)
                total += tile_contribution(here, there, sizes, (batch, head, row, key), seed, scale, band, score_args,
                                           T, SCORE, CAPTURED, MASK)  # fmt: skip
            index = row + tl.arange(0, BLOCK_Q)
            tl.store(out_ptr + place * seqlen_q + index, tl.sum(total, 1), mask=index < seqlen_q)


@jit
def sum_shared(source_ptr, target_ptr, shared, length, BLOCK: tl.constexpr):
    """target[own, n] = the sum of source[own, :shared, n], in a fixed order; `length` is that of n."""
    blocks = tl.cdiv(length, BLOCK)
    own, column = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], source_ptr.dtype.element_ty)
    for n in tl.range(0, shared):
        total += tl.load(source_ptr + (own * shared + n) * length + column, mask=column < length, other=0.0)
    tl.store(target_ptr + own * length + column, total.to(target_ptr.dtype.element_ty), mask=column < length)
