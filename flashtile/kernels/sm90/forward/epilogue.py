"""The end of a query tile: out and lse, from registers to memory."""

from flashtile.kernels.device.exponential import FAR, LN2, LOG2E
from flashtile.kernels.device.score import unit
from flashtile.kernels.device.softmax import divisor
from flashtile.kernels.sm90.device.layouts import matrix_layout, row_layout
from flashtile.kernels.sm90.device.partial import store_part
from flashtile.kernels.sm90.device.parts import first_parts, part_at
from flashtile.kernels.sm90.forward.fp8 import LIFT_LOG2, values_scale
from flashtile.triton_glue.gluon import fence_async_shared, gl, gluon, recast, store_wait, tma_store


@gluon.jit
def load_sink(targets, at, T: gl.constexpr):
    """The logit that joins the softmax of a head, in units of log2; 0 unless T.modifiers.sink. targets as the kernel has
    them.
    """
    if T.modifiers.sink:
        return gl.load(targets[1] + at.head.to(gl.int64) * targets[3][1][0]).to(gl.float32) * LOG2E
    else:
        return 0.0


@gluon.jit
def finish(rows, sink, out_desc, targets, whole, region, scene, GROUP: gl.constexpr, T: gl.constexpr, SCORE: gl.constexpr):
    """Write out and, unless its address is 0, lse; a row that saw nothing gives 0 and -inf, whatever lies in the values.

    sink as `load_sink` gives it. Which rows have a sum that is infinite, or no number.
    targets and region as the kernel has them; `whole` is the problem's Size; scene: a ForwardScene.
    """
    mem, at, size = scene.mem, scene.at, scene.size
    PARTS_V: gl.constexpr = T.parts_v
    ROWS: gl.constexpr = T.rows
    BLOCK_K: gl.constexpr = T.block_k
    COLUMNS: gl.constexpr = T.columns_v
    total = gl.convert_layout(gl.sum(rows.total, 1), row_layout(BLOCK_K))
    if T.softmax.watches:
        level = gl.convert_layout(gl.max(rows.top, 1), row_layout(BLOCK_K))
    else:
        level = rows.top * (unit(scene.scale, scene.score_args, T, SCORE) * LOG2E)
    if T.stored.fp8:
        level = level - LIFT_LOG2
    if T.softmax.bounded:
        level = gl.where(total == 0.0, float("-inf"), level)
    index = at.row + gl.arange(0, ROWS, row_layout(BLOCK_K))
    if T.statistics != "":
        keep_statistics(rows, level, total, sink, targets, at, whole, size, index, T)
    ran = (index < size.seqlen_q) & ((total < float("inf")) == 0)
    seen = total != 0.0
    if T.items.ragged:
        seen = seen & (index < size.seqlen_q)
    weight = total
    if not T.stored.fp8 and T.modifiers.early < 0:  # where a tensor is added the portable kernels compute such rows again
        weight = divisor(total, level, out_desc.dtype)
    share = 1.0 / gl.where(total == 0.0, 1.0, weight)
    if T.modifiers.sink:  # one more key, whose value is zero
        top = gl.maximum(level, sink)
        top = gl.where(top == float("-inf"), 0.0, top)
        decay, last = gl.exp2(level - top), gl.exp2(sink - top)
        total = total * decay + last
        share = decay / gl.where(total == 0.0, 1.0, weight * decay + last)
        level = gl.where(total == 0.0, float("-inf"), top)
    lse = (level + gl.log2(gl.where(total == 0.0, 1.0, total))) * LN2
    if T.items.ragged:
        lse = gl.where(index < size.seqlen_q, lse, float("-inf"))
    token = at.item.first_q + index
    head_rows = (at.slab * size.heads + at.head).to(gl.int64) * whole.seqlen_q
    if targets[0].to(gl.int64) != 0:
        gl.store(targets[0] + head_rows + token, lse, mask=index < at.item.span_q)
    if T.tells_far:
        tell(1, (index < size.seqlen_q) & ((gl.abs(lse) < FAR) == 0), targets, GROUP, T)
    if T.modifiers.dropout:
        share *= scene.seed.factor
    if T.stored.v_head:
        share *= values_scale(region, at, size.group, T)
    share = gl.convert_layout(share, row_layout(COLUMNS))[:, None]
    if T.mask.masked:
        seen = gl.convert_layout(seen, row_layout(COLUMNS))[:, None]
    if T.pipeline.staged:
        store_wait(0)
    acc = parted(rows.acc, PARTS_V, COLUMNS)
    for part in gl.static_range(PARTS_V):
        out = acc[part] * share
        if T.mask.masked:
            out = gl.where(seen, out, 0.0)
        out_tile(mem, out_desc, GROUP, part, T).reshape([ROWS, COLUMNS]).store(out.to(out_desc.dtype))
    fence_async_shared()
    for part in gl.static_range(PARTS_V):
        tile = out_tile(mem, out_desc, GROUP, part, T)
        send(tile, out_desc, (targets[2], targets[3][0]), at, part * COLUMNS, T.head_dim_v, T)
    return ran


@gluon.jit
def tell(word, rows, targets, GROUP: gl.constexpr, T: gl.constexpr):
    """Store `word`, 0 before all tiles of a block, in that of each warp which has one of `rows`."""
    WARP: gl.constexpr = T.rows // 4
    warp = gl.arange(0, T.rows, row_layout(T.block_k)) // WARP
    gl.store(targets[4] + ((gl.program_id(0) * T.groups + GROUP) * 4 + warp), 0 * warp + word, mask=rows)


@gluon.jit
def keep_statistics(rows, level, total, sink, targets, at, whole, size, index, T: gl.constexpr):
    """Store rows' largest scores and entropies. level and total as before the sink, the former in units of log2."""
    counts, here = index < size.seqlen_q, index < at.item.span_q
    at_rows = (at.slab * size.heads + at.head).to(gl.int64) * whole.seqlen_q + at.item.first_q + index
    if targets[4][0] is not None:
        gl.store(targets[4][0] + at_rows, gl.where(counts, level * LN2, float("-inf")), mask=here)
    if T.finds_entropy:
        depth = gl.convert_layout(gl.sum(rows.depth, 1), row_layout(T.block_k))
        if T.modifiers.sink:
            top = gl.maximum(level, sink)
            top = gl.where(top == float("-inf"), 0.0, top)
            share = gl.exp2(sink - top)
            rise = gl.where(level == float("-inf"), 0.0, level - top)
            depth = (depth + total * rise) * gl.exp2(level - top) + gl.where(share > 0.0, share * (sink - top), 0.0)
            total = total * gl.exp2(level - top) + share
        sum_of_all = gl.where(total == 0.0, 1.0, total)
        entropy = (gl.log2(sum_of_all) - depth / sum_of_all) * LN2
        gl.store(targets[4][1] + at_rows, gl.where(counts, entropy, 0.0), mask=here)


@gluon.jit
def send(tile, desc, target, at, column, WIDTH: gl.constexpr, T: gl.constexpr):
    """Store columns from `column` on of a warpgroup's queries, staged in `tile`; where T.items.varlen target = (pointer,
    strides).
    """
    ROWS: gl.constexpr = T.rows
    COLUMNS: gl.constexpr = tile.shape[3]
    if T.items.varlen:
        if at.row + ROWS > at.item.span_q:  # other items' rows follow
            store_part(tile.reshape([ROWS, COLUMNS]), column, target[0], target[1], at.slab, at.head,
                       at.item.first_q + at.row, at.item.span_q - at.row, WIDTH)  # fmt: skip
        else:
            tma_store(desc, [at.slab, at.head, at.item.first_q + at.row, column], tile)
    else:
        tma_store(desc, [at.slab, at.head, at.row, column], tile)


@gluon.jit
def parted(acc, PARTS: gl.constexpr, COLUMNS: gl.constexpr):
    """An accumulator for each part of a head dim."""
    if PARTS < 3:
        return acc
    else:
        ROWS: gl.constexpr = acc[1].shape[0]
        first, second = gl.split(acc[0].reshape([ROWS, 2, COLUMNS]).permute([0, 2, 1]))
        first = gl.convert_layout(first, matrix_layout(COLUMNS), assert_trivial=True)
        second = gl.convert_layout(second, matrix_layout(COLUMNS), assert_trivial=True)
        return first, second, acc[1]


@gluon.jit
def out_tile(mem, out_desc, GROUP: gl.constexpr, PART: gl.constexpr, T: gl.constexpr):
    """Where a part of a warpgroup's out is staged: shared memory of its own, or that of its queries, which are done."""
    PARTS_V: gl.constexpr = T.parts_v
    ROWS: gl.constexpr = T.rows
    COLUMNS: gl.constexpr = T.columns_v
    if T.pipeline.staged:
        return part_at(mem.out, GROUP, PART, PARTS_V)
    elif (T.parts == PARTS_V) & (T.columns == COLUMNS):
        return part_at(mem.q, GROUP, PART, PARTS_V)
    else:  # narrower, so that the first parts of queries have room for all of it
        room = first_parts(mem.q, GROUP, ROWS, T.columns, T.parts)
        return recast(room, mem.q.dtype, [PARTS_V, 1, 1, ROWS, COLUMNS], out_desc.layout).index(PART)
