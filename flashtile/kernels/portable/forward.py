"""Forward kernel: one program computes one query tile of one head (FlashAttention-2, arXiv 2307.08691, algorithm 1)."""

from __future__ import annotations

from flashtile.kernels.device.blocks import block_list, block_start
from flashtile.kernels.device.dropout import kept, load_seed
from flashtile.kernels.device.exponential import FAR, LN2, exp
from flashtile.kernels.device.grid import Sizes, this_program
from flashtile.kernels.device.mask import seen, tiles_seen, zero_unseen
from flashtile.kernels.device.memory import head_offset, load_tile, row_offset, store_tile
from flashtile.kernels.device.product import aligned_parts, score_product, transposed
from flashtile.kernels.device.score import locate, logits
from flashtile.kernels.device.softmax import Rows, add_sink, empty_rows, entropy_of, finish, fold, scored
from flashtile.kernels.device.stored import operand_of, scale_of_head, scales_of_rows
from flashtile.kernels.device.varlen import slab, tile_of
from flashtile.kernels.portable.opening import Scene
from flashtile.triton_glue.language import PLAIN_INTEGERS, constexpr, jit, tl

LIFT = constexpr(256.0)  # of probabilities in e4m3: from 2^-14 on they have all its bits
CENTRAL = constexpr(16)  # keys whose mean is taken off the values
ONE_SIDED = constexpr(0.75)  # of what they add up to in magnitude, from where on their sum tells of a mean
MOST_CENTRAL = constexpr(2.0**100)  # of that mean: less it no finite value overflows


@jit
def center_of(v_head, strides, ends, T: tl.constexpr):
    """What the values of an item and head are taken less of, where T.centers: the mean of the first keys that count.

    0 in columns whose values have either sign. It has bf16's bits, so that values of its size lose none by it.
    """
    count = tl.minimum(ends[1] - ends[0], CENTRAL)
    some = load_tile(v_head + row_offset(ends[0], strides[2]), strides[2], 0, count, T.head_dim_v, CENTRAL, T.columns_v, True)
    total = tl.sum(some, 0)
    center = (total / tl.maximum(count, 1).to(tl.float32)).to(tl.bfloat16).to(tl.float32)
    told = (tl.abs(total) > ONE_SIDED * tl.sum(tl.abs(some), 0)) & (tl.abs(center) < MOST_CENTRAL)
    return tl.where(told, center, 0.0)


@jit
def forward_step(rows, q, start, scene, scales, center, MASKED: tl.constexpr, T: tl.constexpr, SCORE: tl.constexpr,
                 MASK: tl.constexpr):  # fmt: skip
    """Fold the key tile at `start` into the rows.

    scales, where T.stored: (those of k, of v, slab, first key's row, key/value head, those of the query rows). center: what
    values are taken less of, where T.centers.
    """
    BLOCK_K: tl.constexpr = T.block_k
    kv_ptrs, strides, sizes, ends, place, scale, band, score_args, _ = scene
    start = start // BLOCK_K * BLOCK_K  # which it is: the compiler learns it here, and a bias is read by wide loads
    first, end = ends[0] - start, ends[1] - start
    k = load_tile(kv_ptrs[0] + row_offset(start, strides[1]), strides[1], first, end, T.head_dim, BLOCK_K, T.columns, MASKED)
    v = load_tile(
        kv_ptrs[1] + row_offset(start, strides[2]), strides[2], first, end, T.head_dim_v, BLOCK_K, T.columns_v, MASKED
    )
    if T.stored != "":
        KIND: tl.constexpr = q[0].dtype
        k = operand_of(k, KIND, T)
        v = v if T.fp8 else operand_of(v, KIND, T)
        if T.v_rows:
            v_scale = scales_of_rows(scales[1], strides[7], scales[2], scales[3] + start, scales[4], end, BLOCK_K, first)
            v = (v.to(tl.float32) * v_scale[:, None]).to(v.dtype)
    survives = kept(place[4], place[0] * sizes.heads + place[1], place[3], start, False, T)
    key = start + tl.arange(0, BLOCK_K)[None, :]
    at = locate(place[0], place[1], place[2], key, sizes, MASKED and T.mask.pads_keys)
    keep = seen(at, place[2], key, sizes, band, MASKED, T, MASK)
    if MASKED and T.mask.predicate:
        v = zero_unseen(v, keep, 0)
    if T.centers:
        v -= center[None, :]
    product = score_product(q, transposed(aligned_parts(k, T), T), T)
    if T.q_rows:
        product *= scales[5][:, None]
    if T.k_rows:
        k_scale = scales_of_rows(scales[0], strides[6], scales[2], scales[3] + start, scales[4], end, BLOCK_K, first)
        product *= k_scale[None, :]
    score = logits(product, at, scale, score_args, T, SCORE)
    if T.fp8:
        v = v.to(tl.float8e4nv, bitcast=True)
    return fold(rows, score, keep, survives, place[4], v, scale, score_args, MASKED, T, SCORE, LIFT if T.fp8 else 1.0)


@jit
def keep_statistics(rows, in_ptrs, out_ptrs, strides, head, at_rows, item, index, T: tl.constexpr):
    """Store the largest scores and the entropies of a tile's rows, of their state before `scored` and the sink."""
    counts, here = index < item.q, index < item.span_q
    units = 1.0 if T.modifiers.prescale else LN2
    if out_ptrs[3] is not None:
        tl.store(out_ptrs[3] + at_rows + index, tl.where(counts, rows.top * units, float("-inf")), mask=here)
    if T.finds_entropy:
        sink = None
        if T.modifiers.sink:
            loaded = tl.load(in_ptrs[3] + head.to(tl.int64) * strides[4][0]).to(tl.float32)
            sink = tl.full(rows.top.shape, 1.0, rows.top.dtype) * loaded
        entropy = entropy_of(rows.top * units, rows.total, rows.depth * units, sink, T)
        tl.store(out_ptrs[4] + at_rows + index, tl.where(counts, entropy, 0.0), mask=here)


@jit(do_not_specialize=PLAIN_INTEGERS)
def attention_forward(in_ptrs, out_ptrs, strides, seqlen_q, seqlen_k, heads, group, left, right, scale, score_args,
                      region, T: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """One program: `forward_tile` of its number."""
    forward_tile(this_program(), in_ptrs, out_ptrs, strides, Sizes(seqlen_q, seqlen_k, heads, group),
                 (left, right, region[1]), scale, score_args, region, T, SCORE, MASK)  # fmt: skip


@jit
def forward_tile(program, in_ptrs, out_ptrs, strides, spans, band, scale, score_args, region, T: tl.constexpr,
                 SCORE: tl.constexpr, MASK: tl.constexpr):  # fmt: skip
    """One query tile of one head; program = (its number, how many there are).

    spans: the `Sizes` of the tensors; band = (left, right, region[1]).
    in_ptrs = (q, k, v, sink or None); out_ptrs = (out, lse, stats), and where T.statistics also each row's (peak, entropy), of
    which one may be None; strides of q, k, v, out, sink (heads_q,); where T.stored behind both q_scale, k_scale and v_scale.

    region = (the schedule where T.items.ragged, else None; arguments of the predicates MASK; the mask's block lists, or None).

    Where T.repairs out and lse are another forward's, of which rows are computed again whose lse is beyond FAR, or not finite.
    lse is (batch, heads_q, seqlen_q); stats, present where T.exact, is (batch, heads_q, 2, seqlen_q): each row's maximum
    and sum, from which the backward forms probabilities without the rounding of a logarithm.
    """
    BLOCK_Q: tl.constexpr = T.block_q
    BLOCK_K: tl.constexpr = T.block_k
    seqlen_q, seqlen_k, heads, group = spans
    left, right = band[0], band[1]
    tile, head, item, _ = tile_of(program[0], program[1], region[0], seqlen_q, seqlen_q, seqlen_k, heads, BLOCK_Q, False, T)
    sizes, batch = Sizes(item.q, item.k, heads, group), slab(item, T)
    row = tile * BLOCK_Q
    lo, full_lo, full_hi, hi, ends = tiles_seen(
        row, item.q, item.k, left, right, T.mask.left, T.mask.right, BLOCK_Q, BLOCK_K, T
    )

    index, per_head = row + tl.arange(0, BLOCK_Q), (batch * heads + head).to(tl.int64)
    lse_tile, far = out_ptrs[1] + per_head * seqlen_q + item.first_q + index, index < item.span_q
    if T.repairs:
        made = tl.load(lse_tile, mask=index < item.q, other=0.0)
        far = ((tl.abs(made) < FAR) == 0) & (index < item.q)  # infinite, or no number, too
    q_head = in_ptrs[0] + head_offset(batch, head, strides[0]) + row_offset(item.first_q + row, strides[0])
    k_head = in_ptrs[1] + head_offset(batch, head // group, strides[1]) + row_offset(item.first_k, strides[1])
    v_head = in_ptrs[2] + head_offset(batch, head // group, strides[2]) + row_offset(item.first_k, strides[2])
    q = load_tile(q_head, strides[0], 0, item.q - row, T.head_dim, BLOCK_Q, T.columns, True)
    scales = None
    if T.stored != "":
        first_k, head_kv, of_rows = item.first_k, head // group, None
        if T.fp8:
            q = q.to(tl.float8e4nv, bitcast=True)
        if T.q_rows:
            of_rows = scales_of_rows(in_ptrs[4], strides[5], batch, item.first_q + row, head, item.q - row, BLOCK_Q, 0)
        if T.q_head:
            scale = scale * scale_of_head(in_ptrs[4], strides[5], item.batch, head)
        if T.k_head:
            scale = scale * scale_of_head(in_ptrs[5], strides[6], item.batch, head_kv)
        scales = (in_ptrs[5], in_ptrs[6], batch, first_k, head_kv, of_rows)
    q = aligned_parts(q, T)
    seed = load_seed(score_args, T)
    place = (item.batch, head, index[:, None], row, seed)
    scene = Scene((k_head, v_head), strides, sizes, ends, place, scale, band, score_args)
    center = center_of(v_head, strides, ends, T) if T.centers else None
    rows = empty_rows(BLOCK_Q, T.columns_v, T)
    if T.mask.blocks_k > 0:
        indices, partial, visited = block_list(region[2], item.batch, head, row // T.mask.blocks_q)
        PER: tl.constexpr = T.mask.blocks_k // BLOCK_K
        for step in tl.range(0, partial * PER):
            start = block_start(indices, step, T.mask.blocks_k, BLOCK_K)
            rows = forward_step(rows, q, start, scene, scales, center, True, T, SCORE, MASK)
        for step in tl.range(partial * PER, visited * PER):
            start = block_start(indices, step, T.mask.blocks_k, BLOCK_K)
            rows = forward_step(rows, q, start, scene, scales, center, False, T, SCORE, MASK)
    else:
        if T.mask.left:
            for start in tl.range(lo, full_lo, BLOCK_K):
                rows = forward_step(rows, q, start, scene, scales, center, True, T, SCORE, MASK)
        for start in tl.range(full_lo, full_hi, BLOCK_K):
            rows = forward_step(rows, q, start, scene, scales, center, False, T, SCORE, MASK)
        for start in tl.range(full_hi, hi, BLOCK_K):
            rows = forward_step(rows, q, start, scene, scales, center, True, T, SCORE, MASK)

    if T.statistics != "":
        keep_statistics(rows, in_ptrs, out_ptrs, strides, head, per_head * seqlen_q + item.first_q, item, index, T)
    rows = scored(rows, T)
    if T.centers:
        rows = Rows(rows.acc + center[None, :] * rows.total[:, None], rows.top, rows.total)
    if T.modifiers.sink:
        sink = tl.load(in_ptrs[3] + head.to(tl.int64) * strides[4][0]).to(tl.float32)
        rows = add_sink(rows, tl.full(rows.top.shape, 1.0, rows.top.dtype) * sink, T)
    WEIGHTS: tl.constexpr = tl.float32 if T.modifiers.prescale or T.stored != "" else in_ptrs[2].dtype.element_ty
    out, lse = finish(rows, T, WEIGHTS)
    if T.modifiers.dropout:
        out *= seed.factor
    if T.fp8:
        out *= 1.0 / LIFT
    if T.v_head:
        out *= scale_of_head(in_ptrs[6], strides[7], item.batch, head // group)
    top, total = rows.top, rows.total
    if T.wide:
        top = rows.top.to(tl.float32)
        total = total * exp(tl.where(rows.top == float("-inf"), 0.0, rows.top - top), T)
    if T.items.ragged:  # rows that belong to an item, but do not count
        counts = index < item.q
        out = tl.where(counts[:, None], out, 0.0)
        lse = tl.where(counts, lse, float("-inf"))
        top, total = tl.where(counts, top, float("-inf")), tl.where(counts, total, 0.0)
    out_head = out_ptrs[0] + head_offset(batch, head, strides[3]) + row_offset(item.first_q + row, strides[3])
    if T.repairs:
        other = load_tile(out_head, strides[3], 0, item.span_q - row, T.head_dim_v, BLOCK_Q, T.columns_v, True)
        out = tl.where(far[:, None], out, other.to(out.dtype))
    store_tile(out_head, strides[3], out, item.span_q - row, T.head_dim_v, BLOCK_Q, T.columns_v)
    here = index < item.span_q
    tl.store(lse_tile, lse, mask=far)
    if T.exact:
        stats = out_ptrs[2] + per_head * (2 * seqlen_q) + item.first_q + index
        tl.store(stats, top, mask=here)
        tl.store(stats + seqlen_q, total, mask=here)
