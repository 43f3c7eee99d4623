"""Forward kernel for Hopper: warps take roles, tiles arrive by TMA, products run on the warpgroup matrix unit.

A block computes a tile of queries of one head. One role loads; each consumer warpgroup owns 64 queries and walks the keys
from the last visible one back, so that masked tiles come first. It multiplies the queries with key tile n and the
probabilities of tile n + 1 with its values in one go, then turns scores into probabilities while the matrix unit works
for another warpgroup (FlashAttention-3, arXiv 2407.08608, section 3). docs/hopper.md says what was tried.
"""

from typing import NamedTuple

from flashtile._triton import PLAIN_INTEGERS
from flashtile.kernels.hopper.channel import Channel, make_channel
from flashtile.kernels.hopper.gluon import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    named_arrive,
    named_wait,
    pack,
    store_wait,
    tma_load,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashtile.kernels.hopper.layouts import column_layout, matrix_layout, operand_layout, row_layout
from flashtile.kernels.hopper.work import Size, assign, turns, walk, within
from flashtile.kernels.lib.exponential import LN2, LOG2E
from flashtile.kernels.lib.score import added, bent, logits, unit
from flashtile.spec.score import Position

FIRST_TURN = gl.constexpr(8)  # hardware barriers 8, 9, ... say whose turn it is; Triton uses the lower ones


@aggregate
class Memory:
    """Shared memory of a block: tiles, and the channels through which they arrive. out has no channel.

    Tiles are [place * parts + part, 1, 1, rows, columns]: every head dim is a row of parts.
    """

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor
    queries: Channel
    keys: Channel
    values: Channel

    @gluon.constexpr_function
    def __init__(self, q, k, v, out, queries, keys, values):
        self.q, self.k, self.v, self.out = q, k, v, out
        self.queries, self.keys, self.values = queries, keys, values


class Place(NamedTuple):
    """Where a warpgroup's queries lie."""

    batch: gl.tensor
    head: gl.tensor
    row: gl.tensor  # the first of them


class Rows(NamedTuple):
    """State of a warpgroup's 64 queries."""

    acc: gl.tensor  # tuple with one accumulator for each part of head_dim_v
    weights: gl.tensor  # probabilities of the last key tile, whose values are yet to be added
    top: gl.tensor  # maximum score, in units of `unit`
    total: gl.tensor  # sums of probabilities, one for each of the four lanes that hold a row


@gluon.jit
def load(q_desc, k_desc, v_desc, mem, size, T: gl.constexpr):
    """Role: bring queries, keys and values of every tile into shared memory."""
    tiles, heads = gl.cdiv(size.seqlen_q, T.block_q), size.batch * size.heads
    use = 0
    for turn in range(turns(tiles * heads, T)):
        tile, batch_head = assign(turn, tiles, heads, size.swizzle, T)
        batch, head = batch_head // size.heads, batch_head % size.heads
        head_kv = head // size.group
        seen = walk(tile * T.block_q, T.block_q, size, T)
        key = (seen.end - 1) * T.block_k
        fill(k_desc, mem.k, mem.keys, use, batch, head_kv, key, T.columns, T.parts)
        if T.staged and turn > 0:  # the last products with the old queries are done when their last keys are let go of
            mem.keys.reclaim(use - 1)
        load_queries(q_desc, mem, turn, batch, head, tile * T.block_q, T)
        fill(v_desc, mem.v, mem.values, use, batch, head_kv, key, T.columns_v, T.parts_v)
        use += 1
        for _ in range(seen.end - 1 - seen.first):
            key -= T.block_k
            fill(k_desc, mem.k, mem.keys, use, batch, head_kv, key, T.columns, T.parts)
            fill(v_desc, mem.v, mem.values, use, batch, head_kv, key, T.columns_v, T.parts_v)
            use += 1


@gluon.jit
def load_queries(desc, mem, turn, batch, head, row, T: gl.constexpr):
    """Load the queries of every warpgroup."""
    GROUPS: gl.constexpr = T.groups
    PARTS: gl.constexpr = T.parts
    BYTES: gl.constexpr = desc.block_type.nbytes * PARTS
    for group in gl.static_range(GROUPS):
        use = turn * GROUPS + group
        bar = mem.queries.announce(use, BYTES) if T.staged else mem.queries.acquire(use, BYTES)
        for part in gl.static_range(PARTS):
            tma_load(desc, [batch, head, row + group * T.rows, part * T.columns], bar, mem.q.index(group * PARTS + part))


@gluon.jit
def fill(desc, tiles, channel, use, batch, head, row, COLUMNS: gl.constexpr, PARTS: gl.constexpr):
    """Load the tile at `row`, all its parts, into its place in the ring."""
    bar = channel.acquire(use, desc.block_type.nbytes * PARTS)
    for part in gl.static_range(PARTS):
        tma_load(desc, [batch, head, row, part * COLUMNS], bar, tiles.index(channel.at(use) * PARTS + part))


@gluon.jit
def consume(out_desc, lse_ptr, mem, size, scale, score_args, GROUP: gl.constexpr, T: gl.constexpr, SCORE: gl.constexpr):
    """Role: attention of the GROUP-th 64 queries of every tile."""
    tiles, heads = gl.cdiv(size.seqlen_q, T.block_q), size.batch * size.heads
    use = 0
    if GROUP == T.groups - 1:
        pass_turn(GROUP, T)
    tile, batch_head = assign(0, tiles, heads, size.swizzle, T)
    for turn in range(turns(tiles * heads, T)):
        at = Place(batch_head // size.heads, batch_head % size.heads, tile * T.block_q + GROUP * T.rows)
        loaded = walk(tile * T.block_q, T.block_q, size, T)
        seen = loaded
        if T.skips:
            seen = within(walk(at.row, T.rows, size, T), loaded.end)
            for _ in range(loaded.end - seen.end):
                skip(mem, use, GROUP, T)
                use += 1
        mem.queries.wait(turn * T.groups + GROUP)
        rows = begin(mem, use, seen.end - 1, at, size, scale, score_args, GROUP, T, SCORE)
        use += 1
        if T.right or T.pads_keys:
            for n in range(seen.end - 1 - seen.high):
                rows = step(rows, mem, use, seen.end - 2 - n, at, size, scale, score_args, GROUP, True, T, SCORE)
                use += 1
        for n in range(seen.high - seen.low):
            rows = step(rows, mem, use, seen.high - 1 - n, at, size, scale, score_args, GROUP, False, T, SCORE)
            use += 1
        if T.left:
            for n in range(seen.low - seen.first):
                rows = step(rows, mem, use, seen.low - 1 - n, at, size, scale, score_args, GROUP, True, T, SCORE)
                use += 1
        acc = add_values(rows, mem, use - 1, seen.first, size, T)
        tile, batch_head = assign(turn + 1, tiles, heads, size.swizzle, T)  # divisions, here hidden under the product
        acc = settle(acc, T)
        mem.values.release(use - 1)
        if T.skips and T.left:
            for _ in range(seen.first - loaded.first):
                skip(mem, use, GROUP, T)
                use += 1
        finish(acc, rows, out_desc, lse_ptr, mem, at, size, scale, score_args, GROUP, T, SCORE)
        if not T.staged:
            store_wait(0)
            mem.queries.release(turn * T.groups + GROUP)
    if T.staged:
        store_wait(0)


@gluon.jit
def skip(mem, use, GROUP: gl.constexpr, T: gl.constexpr):
    """Let go of a key tile that these queries do not see, unlike others of the block."""
    mem.keys.wait(use)
    take_turn(GROUP, T)
    pass_turn(GROUP, T)
    mem.keys.release(use)
    mem.values.wait(use)
    mem.values.release(use)


@gluon.jit
def begin(mem, use, tile, at, size, scale, score_args, GROUP: gl.constexpr, T: gl.constexpr, SCORE: gl.constexpr):
    """The state after the first key tile, without its values."""
    score = starts(tile, at, size, scale, score_args, T.masked, T, SCORE)
    mem.keys.wait(use)
    take_turn(GROUP, T)
    score = multiply_keys(score, mem, use, GROUP, T)
    pass_turn(GROUP, T)
    score = warpgroup_mma_wait(0, deps=[score])
    mem.keys.release(use)
    score = shape_scores(score, tile, at, size, scale, score_args, T.masked, T, SCORE)
    top = gl.max(score, 1)
    if not T.masked:
        top = bent(top, scale, score_args, T, SCORE)
        score = bent(score, scale, score_args, T, SCORE)
    factor = unit(scale, score_args, T, SCORE) * LOG2E
    p = gl.exp2(score * factor - pivot(top, factor, T.masked, T)[:, None])
    return Rows(empty(T), weigh(p, mem, T), top, lane_sums(p, T))


@gluon.jit
def step(rows, mem, use, tile, at, size, scale, score_args,
         GROUP: gl.constexpr, MASKED: gl.constexpr, T: gl.constexpr, SCORE: gl.constexpr):  # fmt: skip
    """The state after a further key tile; the values of the one before are added meanwhile.

    The wait for that product stands between the row maximum and the exponentials: rescaling, summing and packing then hide
    under the exponentials, and probabilities are packed into the registers that the product has just freed. What modifiers
    add is where the product starts from; a curve is evaluated while the values are being added.
    """
    score = starts(tile, at, size, scale, score_args, MASKED, T, SCORE)
    mem.keys.wait(use)
    take_turn(GROUP, T)
    score = multiply_keys(score, mem, use, GROUP, T)
    acc = add_values(rows, mem, use - 1, tile + 1, size, T)
    pass_turn(GROUP, T)
    score = warpgroup_mma_wait(T.parts_v, deps=[score])
    mem.keys.release(use)
    score = shape_scores(score, tile, at, size, scale, score_args, MASKED, T, SCORE)
    top = row_max(score, T)
    if not MASKED:  # the curve rises: it is evaluated while the maximum is being found
        top = bent(top, scale, score_args, T, SCORE)
        score = bent(score, scale, score_args, T, SCORE)
    top = gl.maximum(rows.top, top)
    factor = unit(scale, score_args, T, SCORE) * LOG2E
    shift = pivot(top, factor, MASKED, T)
    decay = gl.exp2(rows.top * factor - shift)
    if T.curved:
        mem.values.wait(use - 1)  # long over: but it ends in a jump, across which ptxas does not move the curve
    acc = settle(acc, T)
    mem.values.release(use - 1)
    p = gl.exp2(score * factor - shift[:, None])
    total = rows.total * gl.convert_layout(decay, gl.SliceLayout(1, rows.total.type.layout))[:, None] + lane_sums(p, T)
    return Rows(scaled(acc, decay, T), weigh(p, mem, T), top, total)


@gluon.jit
def finish(acc, rows, out_desc, lse_ptr, mem, at, size, scale, score_args,
           GROUP: gl.constexpr, T: gl.constexpr, SCORE: gl.constexpr):  # fmt: skip
    """Write out and lse; a row that saw nothing gives 0 and -inf, whatever lies in the values."""
    PARTS_V: gl.constexpr = T.parts_v
    ROWS: gl.constexpr = T.rows
    BLOCK_K: gl.constexpr = T.block_k
    COLUMNS: gl.constexpr = T.columns_v
    total = gl.convert_layout(gl.sum(rows.total, 1), row_layout(BLOCK_K))
    safe = gl.where(total == 0.0, 1.0, total)
    lse = (rows.top * (unit(scale, score_args, T, SCORE) * LOG2E) + gl.log2(safe)) * LN2
    index = at.row + gl.arange(0, ROWS, row_layout(BLOCK_K))
    gl.store(lse_ptr + (at.batch * size.heads + at.head).to(gl.int64) * size.seqlen_q + index, lse, mask=index < size.seqlen_q)
    share = gl.convert_layout(1.0 / safe, row_layout(COLUMNS))[:, None]
    if T.masked:
        seen = gl.convert_layout(total, row_layout(COLUMNS))[:, None] != 0.0
    if T.staged:
        store_wait(0)
    for part in gl.static_range(PARTS_V):
        out = acc[part] * share
        if T.masked:
            out = gl.where(seen, out, 0.0)
        mem.out.index(GROUP * T.parts_v + part).reshape([ROWS, COLUMNS]).store(out.to(mem.out.dtype))
    fence_async_shared()
    for part in gl.static_range(PARTS_V):
        tma_store(out_desc, [at.batch, at.head, at.row, part * COLUMNS], mem.out.index(GROUP * T.parts_v + part))


@gluon.jit
def take_turn(GROUP: gl.constexpr, T: gl.constexpr):
    """Wait until the warpgroup before this one has issued its products."""
    if T.turns:
        named_wait(FIRST_TURN + GROUP, 256)


@gluon.jit
def pass_turn(GROUP: gl.constexpr, T: gl.constexpr):
    """Let the next warpgroup issue its products."""
    if T.turns:
        named_arrive(FIRST_TURN + (GROUP + 1) % T.groups, 256)


@gluon.jit
def multiply_keys(score, mem, use, GROUP: gl.constexpr, T: gl.constexpr):
    """Queries times a key tile, under way, onto `score` if modifiers add; the head dim is summed part by part."""
    PARTS: gl.constexpr = T.parts
    ROWS: gl.constexpr = T.rows
    BLOCK_K: gl.constexpr = T.block_k
    COLUMNS: gl.constexpr = T.columns
    for part in gl.static_range(PARTS):
        q = mem.q.index(GROUP * T.parts + part).reshape([ROWS, COLUMNS])
        k = mem.k.index(mem.keys.at(use) * T.parts + part).reshape([BLOCK_K, COLUMNS])
        score = warpgroup_mma(q, k.permute((1, 0)), score, use_acc=T.adds > 0 or part > 0, is_async=True)
    return score


@gluon.jit
def add_values(rows, mem, use, tile, size, T: gl.constexpr):
    """The accumulators plus probabilities times a value tile, under way."""
    PARTS_V: gl.constexpr = T.parts_v
    BLOCK_K: gl.constexpr = T.block_k
    COLUMNS: gl.constexpr = T.columns_v
    mem.values.wait(use)
    acc = ()
    for part in gl.static_range(PARTS_V):
        v = mem.v.index(mem.values.at(use) * T.parts_v + part).reshape([BLOCK_K, COLUMNS])
        if T.unseen:
            blank_unseen(v, tile, size, T)
        acc = acc + (warpgroup_mma(rows.weights, v, rows.acc[part], is_async=True),)  # noqa: RUF005 (no unpacking here)
    return acc


@gluon.jit
def blank_unseen(v, tile, size, T: gl.constexpr):
    """Zero the values that no query sees, in place: 0 times NaN is NaN. Warpgroups may do it to the same tile."""
    BLOCK_K: gl.constexpr = T.block_k
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])  # pyright: ignore[reportAssignmentType]
    first, end, start = 0, size.seqlen_k, tile * BLOCK_K
    if T.left:
        first = size.seqlen_k - size.seqlen_q - size.left
    if T.right:
        end = size.seqlen_k + size.right
    if (start < first) | (start + BLOCK_K > end):
        key = start + gl.arange(0, BLOCK_K, gl.SliceLayout(1, LAYOUT))
        v.store(gl.where(((key >= first) & (key < end))[:, None], v.load(LAYOUT), 0.0))
        fence_async_shared()


@gluon.jit
def settle(acc, T: gl.constexpr):
    """The accumulators, once all products are done."""
    PARTS_V: gl.constexpr = T.parts_v
    done = ()
    for part in gl.static_range(PARTS_V):
        done = done + (warpgroup_mma_wait(0, deps=[acc[part]]),)  # noqa: RUF005
    return done


@gluon.jit
def scaled(acc, decay, T: gl.constexpr):
    """The accumulators relative to a new maximum."""
    PARTS_V: gl.constexpr = T.parts_v
    COLUMNS: gl.constexpr = T.columns_v
    column = gl.convert_layout(decay, row_layout(COLUMNS))[:, None]
    result = ()
    for part in gl.static_range(PARTS_V):
        result = result + (acc[part] * column,)  # noqa: RUF005
    return result


@gluon.jit
def empty(T: gl.constexpr):
    """Accumulators of nothing."""
    PARTS_V: gl.constexpr = T.parts_v
    ROWS: gl.constexpr = T.rows
    COLUMNS: gl.constexpr = T.columns_v
    acc = ()
    for _ in gl.static_range(PARTS_V):
        acc = acc + (gl.zeros([ROWS, COLUMNS], gl.float32, matrix_layout(COLUMNS)),)  # noqa: RUF005  # pyright: ignore[reportCallIssue]
    return acc


@gluon.jit
def starts(tile, at, size, scale, score_args, MASKED: gl.constexpr, T: gl.constexpr, SCORE: gl.constexpr):
    """What the product with a key tile starts from: what modifiers add, which costs nothing between product and softmax."""
    BLOCK_K: gl.constexpr = T.block_k
    ROWS: gl.constexpr = T.rows
    score = gl.zeros([ROWS, BLOCK_K], gl.float32, matrix_layout(BLOCK_K))  # pyright: ignore[reportCallIssue]
    if T.adds > 0:
        score = added(score, locate(tile, at, size, MASKED, T), scale, score_args, T, SCORE)
    return score


@gluon.jit
def locate(tile, at, size, MASKED: gl.constexpr, T: gl.constexpr):
    """The Position of a tile's scores, its indices clamped into the tensors so that a modifier may load by them.

    A thread's columns are 8 j + k, constants, and an offset of its own, which joins the row's: `ahead` is one addition.
    """
    ROWS: gl.constexpr = T.rows
    BLOCK_K: gl.constexpr = T.block_k
    shift = size.seqlen_k - size.seqlen_q
    row = gl.minimum(at.row + gl.arange(0, ROWS, row_layout(BLOCK_K)), size.seqlen_q - 1)
    key = tile * BLOCK_K + gl.arange(0, BLOCK_K, column_layout(BLOCK_K))
    if MASKED:
        key = gl.minimum(key, size.seqlen_k - 1)
    parts = gl.zeros([ROWS, BLOCK_K], gl.float32, matrix_layout(BLOCK_K)).reshape([ROWS, BLOCK_K // 8, 4, 2])  # pyright: ignore[reportCallIssue]
    L: gl.constexpr = parts.type.layout
    query = at.row + gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))[:, None, None, None]
    lane = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))[None, None, :, None]
    eight = gl.arange(0, BLOCK_K // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))[None, :, None, None]
    pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))[None, None, None, :]
    ahead = (tile * BLOCK_K - query - shift + lane * 2).to(gl.float32) + (eight * 8 + pair).to(gl.float32)
    ahead = gl.convert_layout(ahead.reshape([ROWS, BLOCK_K]), matrix_layout(BLOCK_K), assert_trivial=True)
    return Position(at.batch, at.head, row[:, None], (row + shift)[:, None], key[None, :], ahead)


@gluon.jit
def shape_scores(score, tile, at, size, scale, score_args, MASKED: gl.constexpr, T: gl.constexpr, SCORE: gl.constexpr):
    """Scores, modified one by one if T.prescale; if MASKED after the curve, and -inf where a query does not see a key."""
    ROWS: gl.constexpr = T.rows
    BLOCK_K: gl.constexpr = T.block_k
    if T.prescale:
        score = logits(score, locate(tile, at, size, MASKED, T), scale, score_args, T, SCORE)
    if MASKED:  # one limit on either side, relative to the tile: a single comparison per score and side
        row = at.row + gl.arange(0, ROWS, row_layout(BLOCK_K))
        column = gl.arange(0, BLOCK_K, column_layout(BLOCK_K))
        start = tile * BLOCK_K
        position = row + (size.seqlen_k - size.seqlen_q) - start
        last = gl.full([ROWS], size.seqlen_k - 1 - start, gl.int32, row_layout(BLOCK_K))
        if T.right:
            last = gl.minimum(position + size.right, last)
        keep = column[None, :] <= last[:, None]
        if T.left:
            keep = keep & (column[None, :] >= (position - size.left)[:, None])
        score = gl.where(keep, bent(score, scale, score_args, T, SCORE), float("-inf"))
    return score


@gluon.jit
def row_max(score, T: gl.constexpr):
    """Maximum of each row; T.split_max: of its even and odd columns apart first, two chains instead of one."""
    ROWS: gl.constexpr = T.rows
    BLOCK_K: gl.constexpr = T.block_k
    if T.split_max:
        lanes = gl.max(gl.max(score.reshape([ROWS, BLOCK_K // 8, 4, 2]), 1), 2)
        return gl.convert_layout(gl.max(lanes, 1), row_layout(BLOCK_K))
    else:
        return gl.max(score, 1)


@gluon.jit
def lane_sums(p, T: gl.constexpr):
    """Sums within each thread: a row's four lanes are added up only at the end."""
    ROWS: gl.constexpr = T.rows
    BLOCK_K: gl.constexpr = T.block_k
    return gl.sum(gl.sum(p.reshape([ROWS, BLOCK_K // 8, 4, 2]), 3), 1)


@gluon.jit
def weigh(p, mem, T: gl.constexpr):
    """Probabilities as the left operand of the product with the values."""
    COLUMNS: gl.constexpr = T.columns_v
    return gl.convert_layout(pack(p, mem.v.dtype), operand_layout(COLUMNS))


@gluon.jit
def pivot(top, factor, MASKED: gl.constexpr, T: gl.constexpr):
    """The exponent to subtract; finite for a row that has seen nothing so far."""
    shift = top * factor
    if MASKED or T.prescale:
        shift = gl.where(top == float("-inf"), 0.0, shift)
    return shift


@gluon.jit(do_not_specialize=[*PLAIN_INTEGERS, "swizzle"])
def attention_forward(q_desc, k_desc, v_desc, out_desc, lse_ptr, seqlen_q, seqlen_k, heads, group, left, right, swizzle,
                      scale, score_args, T: gl.constexpr, SCORE: gl.constexpr):  # fmt: skip
    """Descriptors of rank 4 over (batch, heads, seqlen, head_dim), blocks of T.rows or T.block_k rows and a part's columns.

    `swizzle` heads are computed together (see `work.assign`); it depends on the sizes, so it is no part of T.
    lse is (batch, heads_q, seqlen_q), natural logarithm, float32, contiguous.
    """
    ROWS: gl.constexpr = T.rows
    BLOCK_K: gl.constexpr = T.block_k
    GROUPS: gl.constexpr = T.groups
    q = gl.allocate_shared_memory(q_desc.dtype, [GROUPS * T.parts, 1, 1, ROWS, T.columns], q_desc.layout)
    k = gl.allocate_shared_memory(k_desc.dtype, [T.stages * T.parts, 1, 1, BLOCK_K, T.columns], k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, [T.stages * T.parts_v, 1, 1, BLOCK_K, T.columns_v], v_desc.layout)
    out = q
    if T.staged:
        out = gl.allocate_shared_memory(q_desc.dtype, [GROUPS * T.parts_v, 1, 1, ROWS, T.columns_v], out_desc.layout)
    mem = Memory(q, k, v, out, make_channel(GROUPS, 1), make_channel(T.stages, GROUPS), make_channel(T.stages, GROUPS))
    fence_async_shared()
    size = Size(q_desc.shape[0], heads, group, seqlen_q, seqlen_k, left, right, swizzle)
    if T.groups == 2 and T.loader_warps == 4:
        gl.warp_specialize([
            (load, (q_desc, k_desc, v_desc, mem, size, T)),
            (consume, (out_desc, lse_ptr, mem, size, scale, score_args, 0, T, SCORE)),
            (consume, (out_desc, lse_ptr, mem, size, scale, score_args, 1, T, SCORE)),
        ], [4, 4], [T.registers, T.registers])  # fmt: skip
    elif T.groups == 2:
        gl.warp_specialize([
            (consume, (out_desc, lse_ptr, mem, size, scale, score_args, 0, T, SCORE)),
            (consume, (out_desc, lse_ptr, mem, size, scale, score_args, 1, T, SCORE)),
            (load, (q_desc, k_desc, v_desc, mem, size, T)),
        ], [4, 1], [T.registers, T.loader_registers])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (out_desc, lse_ptr, mem, size, scale, score_args, 0, T, SCORE)),
            (consume, (out_desc, lse_ptr, mem, size, scale, score_args, 1, T, SCORE)),
            (consume, (out_desc, lse_ptr, mem, size, scale, score_args, 2, T, SCORE)),
            (load, (q_desc, k_desc, v_desc, mem, size, T)),
        ], [4, 4, 1], [T.registers, T.registers, T.loader_registers])  # fmt: skip
