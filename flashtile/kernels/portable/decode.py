"""Attention over a cache in pages: a tile of queries packed with the heads that share keys, parts of keys, and their sum.

Parts begin at multiples of `split` keys, and are added up in order (Flash-Decoding's split and combine): what an item's sum
looks like depends on the item alone. A program forms a few parts, one after another: how many follows from the batch.
"""

from __future__ import annotations

from flashtile.kernels.device.decoding import UNSPECIALIZED, seat_of, tokens_of, write
from flashtile.kernels.device.grid import Sizes
from flashtile.kernels.device.mask import seen, tiles_seen, zero_unseen
from flashtile.kernels.device.product import aligned_parts, score_product, transposed
from flashtile.kernels.device.score import locate, logits
from flashtile.kernels.device.softmax import Rows, empty_rows, fold, scored
from flashtile.kernels.device.stored import lowered, widened
from flashtile.kernels.device.stream import let_next
from flashtile.triton_glue.language import constexpr, jit, tl

LIFT = constexpr(32768.0)  # of probabilities that are multiplied in fp16 beside bf16: 2^-29 has all its bits


@jit
def cache_rows(strides, table_ptr, table_strides, item, position, exists, head, pages, PAGE: tl.constexpr):
    """Where rows `position` of an item's cache lie; entries of the table are read for those that exist."""
    if table_ptr is not None:
        entry = table_ptr + item.to(tl.int64) * table_strides[0] + (position // PAGE).to(tl.int64) * table_strides[1]
        page = tl.load(entry, mask=exists, other=0).to(tl.int64)
    else:
        page = item.to(tl.int64) + position.to(tl.int64) * 0
    page = tl.minimum(tl.maximum(page, 0), pages - 1)
    row = (position % PAGE).to(tl.int64) if table_ptr is not None else position.to(tl.int64)
    return page * strides[0] + row * strides[1] + head.to(tl.int64) * strides[2]


@jit
def cache_tile(ptr, at, stride, exists, first, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, KIND: tl.constexpr,
               PACK: tl.constexpr):  # fmt: skip
    """WIDTH columns from `first` of rows that lie `at`, as numbers of KIND, zero where they do not exist."""
    column = tl.arange(0, COLUMNS)
    inside = exists[:, None] & (column < WIDTH)[None, :]
    x = tl.load(ptr + at[:, None] + (first + column).to(tl.int64)[None, :] * stride, mask=inside, other=0)
    STORED: tl.constexpr = PACK.stored
    if STORED != "":
        x = widened(x, KIND, STORED, PACK.native)
        if KIND == tl.float32:  # multiplied in float64: Triton looks no further than a reduction (`free_parts`)
            x = tl.sum(x[:, :, None], 2)
    return x


@jit
def head_scale(ptr, strides, item, head, batch, SCALE: tl.constexpr):
    """What all keys, or values, of an item's head are to be multiplied by."""
    if SCALE == "head":
        return tl.load(ptr + item.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1], mask=item < batch, other=1.0)
    else:
        return 1.0


@jit
def scale_of_rows(ptr, strides, table, item, position, exists, head, size, PAGE: tl.constexpr, SCALE: tl.constexpr):
    """(1, rows), or one number for all: what rows of an item's cache are to be multiplied by. table: (pointer or None, its
    strides); size = (items, pages).
    """
    if SCALE == "token":
        at = cache_rows(strides, table[0], table[1], item, position, exists, head, size[1], PAGE)
        return tl.load(ptr + at, mask=exists, other=1.0)[None, :]
    else:
        return head_scale(ptr, strides, item, head, size[0], SCALE)


@jit
def times_tokens(x, ptr, at, exists):
    """A tile of rows, each times its own scale."""
    scale = tl.load(ptr + at, mask=exists, other=0.0)
    return (x.to(tl.float32) * scale[:, None]).to(x.dtype)


@jit
def times(rows, scale, SCALE: tl.constexpr, PACK: tl.constexpr):
    """The state, whose values are to be multiplied by `scale`."""
    if SCALE == "head" or PACK.lowers:
        return Rows(rows.acc * scale, rows.top, rows.total)
    else:
        return rows


@jit
def q_tile(ptr, at, stride, exists, first, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """WIDTH columns from `first` of queries that lie `at`."""
    column = tl.arange(0, COLUMNS)
    inside = exists[:, None] & (column < WIDTH)[None, :]
    return tl.load(ptr + at[:, None] + (first + column).to(tl.int64)[None, :] * stride, mask=inside, other=0.0)


@jit(do_not_specialize=UNSPECIALIZED)
def decode_forward(in_ptrs, out_ptrs, strides, lengths, seqlen_q, batch, group, capacity, pages, left, right, extra,
                   PACK: tl.constexpr, T: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """One program: a tile of T.block_q // HEADS queries of HEADS heads that share keys, and PARTS parts of the keys.

    Grid (tiles, heads_kv * CHUNKS, parts / PARTS). in_ptrs = (q, k pool, v pool or None, table or None, sink or None,
    k_scale or None, v_scale or None), the pools and their strides the other way round where PACK.apart; out_ptrs = (out, lse),
    or where SPLIT > 0 (acc, top, total) of parts: acc (parts, tokens, heads, head_dim_v), the others (parts, tokens, heads).
    strides of q, k, v, table, out, sink, k_scale, v_scale; lengths = (cu_seqlens_q or None, seqused_k, first_k or None);
    extra = (arguments of the modifiers, of the predicates, scale); PACK: `Packing`.
    """
    HEADS: tl.constexpr = PACK.heads
    CHUNKS: tl.constexpr = PACK.chunks
    PAGE: tl.constexpr = PACK.page
    SPLIT: tl.constexpr = PACK.split
    SPAN: tl.constexpr = PACK.split * PACK.parts
    TOKENS: tl.constexpr = T.block_q // HEADS
    BLOCK_K: tl.constexpr = T.block_k
    K_SCALE: tl.constexpr = PACK.k_scale
    V_SCALE: tl.constexpr = PACK.v_scale
    heads = tl.num_programs(1) // CHUNKS * group
    if PACK.early:
        let_next()
    seat = seat_of(tl.program_id(0), lengths[0], lengths[1], lengths[2], seqlen_q, batch, capacity, TOKENS)
    head_kv, chunk = tl.program_id(1) // CHUNKS, tl.program_id(1) % CHUNKS
    scale = extra[2] * head_scale(in_ptrs[5], strides[6], seat.batch, head_kv, batch, K_SCALE)
    v_scale = head_scale(in_ptrs[6], strides[7], seat.batch, head_kv, batch, V_SCALE)
    packed = tl.arange(0, T.block_q)
    row, member = seat.token + packed // HEADS, chunk * HEADS + packed % HEADS
    exists = (row < seat.span) & (member < group)
    head = head_kv * group + tl.minimum(member, group - 1)
    sizes = Sizes(seat.q, seat.k, heads, group)
    band = (left, right, extra[1])
    lo, _, _, hi, ends = tiles_seen(seat.token, seat.q, seat.k, left, right, T.mask.left, T.mask.right, TOKENS, BLOCK_K, T)
    if SPLIT > 0:
        lo = tl.maximum(lo, tl.program_id(2) * SPAN)
        hi = tl.minimum(hi, (tl.program_id(2) + 1) * SPAN)
    q_at = seat.slab.to(tl.int64) * strides[0][0] + (seat.first_q + row).to(tl.int64) * strides[0][1]
    q_at += head.to(tl.int64) * strides[0][2]
    counts = exists & (row < seat.q)
    q_main = q_tile(in_ptrs[0], q_at, strides[0][3], counts, 0, T.head_dim, T.columns)
    if PACK.rest > 0:
        q_rest = q_tile(in_ptrs[0], q_at, strides[0][3], counts, T.head_dim, PACK.rest, PACK.rest_columns)
    if PACK.lowers:
        top = tl.max(tl.abs(q_main), 1)
        if PACK.rest > 0:
            top = tl.maximum(top, tl.max(tl.abs(q_rest), 1))
            q_rest, _ = lowered(q_rest, top)
        q_main, q_factor = lowered(q_main, top)
        v_scale *= 1.0 / LIFT
    KIND: tl.constexpr = q_main.dtype
    q = aligned_parts(q_main, T)
    if PACK.rest > 0:
        q_rest = aligned_parts(q_rest, T)
    rows = empty_rows(T.block_q, T.columns_v, T)
    token = seat.slab.to(tl.int64) * seqlen_q + seat.first_q + row
    for start in tl.range(lo, hi, BLOCK_K):
        key = start + tl.arange(0, BLOCK_K)
        there = (key >= ends[0]) & (key < tl.minimum(ends[1], hi))
        position = seat.first_k + key
        k_at = cache_rows(strides[1], in_ptrs[3], strides[3], seat.batch, position, there, head_kv, pages, PAGE)
        k = cache_tile(in_ptrs[1], k_at, strides[1][3], there, 0, T.head_dim, T.columns, KIND, PACK)
        if PACK.shared:
            v = k
        else:
            v_at = cache_rows(strides[2], in_ptrs[3], strides[3], seat.batch, position, there, head_kv, pages, PAGE)
            v = cache_tile(in_ptrs[2], v_at, strides[2][3], there, 0, T.head_dim_v, T.columns_v, KIND, PACK)
        if V_SCALE == "token":
            scale_at = cache_rows(strides[7], in_ptrs[3], strides[3], seat.batch, position, there, head_kv, pages, PAGE)
            v = times_tokens(v, in_ptrs[6], scale_at, there)
        at = locate(seat.batch, head[:, None], row[:, None], key[None, :], sizes, True)
        keep = seen(at, row[:, None], key[None, :], sizes, band, True, T, MASK)
        if T.mask.predicate:
            v = zero_unseen(v, keep, 0)
        product = score_product(q, transposed(aligned_parts(k, T), T), T)
        if PACK.rest > 0:
            REST: tl.constexpr = 2 if PACK.apart else 1
            FIRST: tl.constexpr = 0 if PACK.apart else T.head_dim
            if PACK.apart:
                k_at = cache_rows(strides[REST], in_ptrs[3], strides[3], seat.batch, position, there, head_kv, pages, PAGE)
            column = strides[REST][3]
            k_rest = cache_tile(in_ptrs[REST], k_at, column, there, FIRST, PACK.rest, PACK.rest_columns, KIND, PACK)
            if PACK.apart and (K_SCALE != "" or V_SCALE != ""):
                table, size = (in_ptrs[3], strides[3]), (batch, pages)
                latents = scale_of_rows(
                    in_ptrs[6], strides[7], table, seat.batch, position, there, head_kv, size, PAGE, V_SCALE
                )
                behind = scale_of_rows(in_ptrs[5], strides[6], table, seat.batch, position, there, head_kv, size, PAGE, K_SCALE)
                product *= tl.div_rn(latents, behind)  # that of both is multiplied by the keys' below
            product += score_product(q_rest, transposed(aligned_parts(k_rest, T), T), T)
        if PACK.lowers:
            product *= q_factor[:, None]
        if K_SCALE == "token":
            scale_at = cache_rows(strides[6], in_ptrs[3], strides[3], seat.batch, position, there, head_kv, pages, PAGE)
            product *= tl.load(in_ptrs[5] + scale_at, mask=there, other=0.0)[None, :]
        score = logits(product, at, scale, extra[0], T, SCORE)
        rows = fold(rows, score, keep, 0, 0, v, scale, extra[0], True, T, SCORE, LIFT if PACK.lowers else 1.0)
        if PACK.parts > 1:
            ends_here = ((start + BLOCK_K) % SPLIT == 0) | (start + BLOCK_K >= hi)
            if ends_here:
                done = times(rows, v_scale, V_SCALE, PACK)
                store_part(out_ptrs, done, start // SPLIT, token, head, heads, counts, lengths[0], seqlen_q, batch, T)
            rows = Rows(tl.where(ends_here, 0.0, rows.acc), tl.where(ends_here, float("-inf"), rows.top),
                        tl.where(ends_here, 0.0, rows.total))  # fmt: skip
    rows = times(rows, v_scale, V_SCALE, PACK)
    if PACK.parts == 1 and SPLIT > 0:
        if tl.program_id(2) * SPLIT < seat.k:
            store_part(out_ptrs, rows, tl.program_id(2), token, head, heads, counts, lengths[0], seqlen_q, batch, T)
    if SPLIT == 0:
        rows = scored(rows, T)
        write(rows, (out_ptrs[0], out_ptrs[1], in_ptrs[4]), (strides[4], strides[5]), seat, (row, head), heads, seqlen_q,
              exists, counts, 0, T.columns_v, T)  # fmt: skip


@jit
def store_part(part_ptrs, rows, part, token, head, heads, counts, cu_ptr, seqlen_q, batch, T: tl.constexpr):
    """(acc, top, total) of one part, for the rows that count."""
    place = (tl.cast(part, tl.int64) * tokens_of(cu_ptr, seqlen_q, batch) + token) * heads + head
    value = tl.arange(0, T.columns_v)
    tl.store(part_ptrs[0] + place[:, None] * T.head_dim_v + value[None, :], rows.acc,
             mask=counts[:, None] & (value < T.head_dim_v)[None, :])  # fmt: skip
    tl.store(part_ptrs[1] + place, rows.top, mask=counts)
    tl.store(part_ptrs[2] + place, rows.total, mask=counts)
