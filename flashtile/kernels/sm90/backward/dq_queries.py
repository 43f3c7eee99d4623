"""dq on Hopper by a pass over queries, for a backward whose sums are formed in one order: nothing is added in memory.

Blocks, tiles and roles are the forward's: a consumer warpgroup owns 64 queries and walks their keys. It forms scores and the
gradient of probabilities again, and adds their product's gradient times the keys to dq, which stays in its registers.
"""

from flashtile.kernels.device.dropout import load_seed
from flashtile.kernels.device.exponential import LOG2E
from flashtile.kernels.device.grid import ROWS as PADDED
from flashtile.kernels.device.grid import padded_rows
from flashtile.kernels.device.score import probabilities
from flashtile.kernels.device.stream import await_stream
from flashtile.kernels.device.varlen import first_padded
from flashtile.kernels.sm90.backward.kernel import through_dropout
from flashtile.kernels.sm90.backward.scores import spared
from flashtile.kernels.sm90.device.blank import blank_hidden, blank_unseen
from flashtile.kernels.sm90.device.channel import Channel, make_channel
from flashtile.kernels.sm90.device.dropout import draw_tile
from flashtile.kernels.sm90.device.layouts import matrix_layout, row_layout
from flashtile.kernels.sm90.device.parts import part_at
from flashtile.kernels.sm90.device.scores import locate, sees
from flashtile.kernels.sm90.device.ticket import Tickets, make_tickets, make_words
from flashtile.kernels.sm90.forward.epilogue import parted, send
from flashtile.kernels.sm90.forward.kernel import enter, leave
from flashtile.kernels.sm90.forward.mma import add_parts, empty, multiply_parts, settle
from flashtile.kernels.sm90.forward.producer import load
from flashtile.kernels.sm90.forward.tile_scheduler import (
    ForwardScene,
    job_at,
    measure,
    place_at,
    place_count,
    tile_at,
    told,
    told_job,
)
from flashtile.triton_glue.gluon import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    pack,
    settled,
    store_wait,
    uniform,
    warpgroup_mma_wait,
)
from flashtile.triton_glue.language import PLAIN_INTEGERS


@aggregate
class QueriesMemory:
    """Shared memory of a block, as the forward's; dq is stored where a warpgroup's queries were."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    dout: gl.shared_memory_descriptor
    job: gl.shared_memory_descriptor
    tickets: Tickets
    queries: Channel  # with dout
    keys: Channel
    values: Channel

    @gluon.constexpr_function
    def __init__(self, q, k, v, dout, job, tickets, queries, keys, values):
        self.q, self.k, self.v, self.dout = q, k, v, dout
        self.job, self.tickets, self.queries, self.keys, self.values = job, tickets, queries, keys, values


@gluon.jit
def consume(dq_desc, targets, mem, whole, rest, GROUP: gl.constexpr, FOLDS: gl.constexpr, T: gl.constexpr, SCORE: gl.constexpr,
            MASK: gl.constexpr):  # fmt: skip
    """Role: dq of the GROUP-th 64 queries of every tile."""
    region = rest[2]
    rest = rest[0], rest[1], region, load_seed(rest[1], T)
    places, turn, use = place_count(whole), gl.to_tensor(0), gl.to_tensor(0)
    place = mem.tickets.read(0, 4) if T.items.ragged else place_at(0, whole, T)
    while place < places:
        if T.items.ragged:
            job = told_job(mem.tickets, turn, T)
        elif T.mask.blocks_q > 0:
            mem.queries.wait(turn * T.groups + GROUP)
            job = told(mem.job, whole)
        else:
            job = job_at(place, whole, region, T)
        entered = enter(use, job, mem, whole, region, GROUP, T)
        use = attend(entered, turn, dq_desc, targets, mem, whole, rest, GROUP, FOLDS, T, SCORE, MASK)
        turn = turn + 1
        place = mem.tickets.read(turn, 4) if T.items.ragged else place_at(turn, whole, T)


@gluon.jit
def attend(entered, turn, dq_desc, targets, mem, whole, rest, GROUP: gl.constexpr, FOLDS: gl.constexpr, T: gl.constexpr,
           SCORE: gl.constexpr, MASK: gl.constexpr):  # fmt: skip
    """Key tiles used: dq of the GROUP-th 64 queries of a Job; entered as `enter` gives it, rest as the kernel has it, and
    behind it dropout's seed.
    """
    scale, score_args, region, seed = rest
    use, at, size, seen, first, indices = entered
    scene = ForwardScene(mem, at, size, scale, score_args, region[2], seed, ())
    rows = load_rows(targets, at, whole, scale, FOLDS, T)
    if T.mask.blocks_q == 0:
        mem.queries.wait(turn * T.groups + GROUP)
    dq = empty(T.rows, T.columns, T.parts)
    if T.mask.masked:  # of a walk at least the first tile
        for n in range(seen.end - seen.high):
            tile = tile_at(indices, seen, seen.end - 1 - n, size, T)
            dq = step(dq, rows, use, tile, scene, GROUP, T.mask.above, FOLDS, T, SCORE, MASK)
            use += 1
        for n in range(seen.high - seen.low):
            tile = tile_at(indices, seen, seen.high - 1 - n, size, T)
            dq = step(dq, rows, use, tile, scene, GROUP, False, FOLDS, T, SCORE, MASK)
            use += 1
        if T.mask.left:
            for n in range(seen.low - seen.first):
                tile = seen.low - 1 - n
                dq = step(dq, rows, use, tile, scene, GROUP, T.mask.below, FOLDS, T, SCORE, MASK)
                use += 1
    else:
        for n in range(seen.end - seen.first):
            tile = seen.end - 1 - n
            dq = step(dq, rows, use, tile, scene, GROUP, False, FOLDS, T, SCORE, MASK)
            use += 1
    use = leave(use, seen, first, mem, GROUP, T)
    finish(dq, rows[0], dq_desc, targets, mem, at, size, scale, GROUP, T)
    mem.queries.release(turn * T.groups + GROUP)
    return use


@gluon.jit
def load_rows(targets, at, whole, scale, FOLDS: gl.constexpr, T: gl.constexpr):
    """(level, delta) of a warpgroup's queries, as `probabilities` takes them; of those that see nothing level is infinite."""
    ROWS: gl.constexpr = T.rows
    BLOCK_K: gl.constexpr = T.block_k
    index = at.row + gl.arange(0, ROWS, row_layout(BLOCK_K))
    padded = padded_rows(whole.seqlen_q)
    if T.items.varlen:
        padded = targets[1]
    first = 2 * (at.slab * whole.heads + at.head).to(gl.int64) * padded + first_padded(at.item, T)
    known = index < gl.cdiv(at.item.span_q, PADDED) * PADDED
    level = gl.load(targets[0] + first + index, mask=known, other=0.0)
    delta = gl.load(targets[0] + first + padded + index, mask=known, other=0.0)
    if FOLDS == 2:
        level = level * (-scale * LOG2E)
    if FOLDS > 0:
        delta = -delta
    return gl.where(known, level, float("inf")), delta


@gluon.jit
def step(dq, rows, use, tile, scene, GROUP: gl.constexpr, MASKED: gl.constexpr, FOLDS: gl.constexpr, T: gl.constexpr,
         SCORE: gl.constexpr, MASK: gl.constexpr):  # fmt: skip
    """dq with a further key tile. Values are let go of before keys are, and come first."""
    mem, at, size, scale, score_args, mask_args, seed, _ = scene
    ROWS: gl.constexpr = T.rows
    BLOCK_K: gl.constexpr = T.block_k
    zero = gl.zeros([ROWS, BLOCK_K], gl.float32, matrix_layout(BLOCK_K))  # pyright: ignore[reportCallIssue]
    group, key_place, value_place = GROUP, mem.keys.at(use), mem.values.at(use)
    if T.pipeline.stages == 1:  # in every step: the operands' descriptors, found before the loop, would spill
        group, key_place, value_place = uniform(gl.to_tensor(GROUP)), uniform(key_place), uniform(value_place)
    mem.values.wait(use)
    dp = multiply_parts(zero, (mem.dout, group), (mem.v, value_place), False, ROWS, BLOCK_K, T.columns_v, T.parts_v)
    if MASKED and T.mask.asks:
        blank_hidden(mem.k, mem.keys, use, tile, at, size, mask_args, GROUP, T.columns, T.parts, T, MASK)
    elif MASKED and T.mask.unseen:  # before this warpgroup reads them: what another writes while it does is then no change
        blank_unseen(mem.k, mem.keys, use, tile, size, T.columns, T.parts, T)
    mem.keys.wait(use)
    raw = multiply_parts(zero, (mem.q, group), (mem.k, key_place), False, ROWS, BLOCK_K, T.columns, T.parts)
    drawn = ()
    if T.modifiers.dropout:
        drawn = draw_tile(tile, at, size, seed, T)
    PIECES: gl.constexpr = 2 if T.parts == 3 else 1  # pyright: ignore[reportAssignmentType]
    dp = warpgroup_mma_wait(PIECES, deps=[dp])
    mem.values.release(use)
    dp = through_dropout(dp, drawn, seed, True, T)
    raw = warpgroup_mma_wait(0, deps=[raw])
    keep = True
    if MASKED:
        keep = sees(tile, at, size, mask_args, MASKED, BLOCK_K, T, MASK)
    position = locate(tile, at, size, MASKED, BLOCK_K, T)
    numbers = (rows[0][:, None], rows[1][:, None], 1.0)
    p, ds = probabilities(raw, dp, numbers, position, keep, scale, score_args, MASKED, T, SCORE)
    if MASKED and FOLDS == -1:
        ds = spared(ds, p)
    dq = add_parts(dq, pack(ds, mem.k.dtype), mem.k, key_place, T.block_k, T.columns, T.parts)
    return settle(dq, mem.keys, use, PIECES)


@gluon.jit
def finish(dq, level, dq_desc, targets, mem, at, size, scale, GROUP: gl.constexpr, T: gl.constexpr):
    """Write dq, zero where a query sees nothing or does not count, whatever lies in its dout."""
    PARTS: gl.constexpr = T.parts
    ROWS: gl.constexpr = T.rows
    COLUMNS: gl.constexpr = T.columns
    keep = level < float("inf")
    if T.items.ragged:
        BLOCK_K: gl.constexpr = T.block_k
        keep = keep & (at.row + gl.arange(0, ROWS, row_layout(BLOCK_K)) < size.seqlen_q)
    keep = gl.convert_layout(keep, row_layout(COLUMNS))[:, None]
    dq = parted(dq, PARTS, COLUMNS)
    for part in gl.static_range(PARTS):
        made = gl.where(keep, dq[part] * scale, 0.0)
        part_at(mem.q, GROUP, part, PARTS).reshape([ROWS, COLUMNS]).store(made.to(mem.q.dtype))
    fence_async_shared()
    for part in gl.static_range(PARTS):
        send(part_at(mem.q, GROUP, part, PARTS), dq_desc, targets[2:], at, part * COLUMNS, T.head_dim, T)
    store_wait(0)


@gluon.jit(do_not_specialize=[*PLAIN_INTEGERS, "swizzle"])
def attention_queries(q_desc, k_desc, v_desc, dout_desc, dq_desc, targets, heads, group, left, right, swizzle, rest,
                      FOLDS: gl.constexpr, T: gl.constexpr, SCORE: gl.constexpr, MASK: gl.constexpr):  # fmt: skip
    """Descriptors, counts and rest as `forward.attention_forward` has them.

    targets = (rows as `rows.attention_rows` leaves them, how many a head has where T.items.varlen, and there dq and its
    strides). FOLDS: 0, 1 if delta is folded, 2 if level is, too; -1 if neither is, and the passes over keys call `spared`.
    """
    targets, scale, region = settled(targets), rest[0], settled(rest[2])
    ROWS: gl.constexpr = T.rows
    BLOCK_K: gl.constexpr = T.block_k
    GROUPS: gl.constexpr = T.groups
    q = gl.allocate_shared_memory(q_desc.dtype, [GROUPS * T.parts, 1, 1, ROWS, T.columns], q_desc.layout)
    dout = gl.allocate_shared_memory(q_desc.dtype, [GROUPS * T.parts_v, 1, 1, ROWS, T.columns_v], dout_desc.layout)
    k = gl.allocate_shared_memory(k_desc.dtype, [T.pipeline.stages * T.parts, 1, 1, BLOCK_K, T.columns], k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, [T.pipeline.stages * T.parts_v, 1, 1, BLOCK_K, T.columns_v], v_desc.layout)
    job = q
    if T.mask.blocks_q > 0:
        job = make_words(5)
    keys, values = make_channel(T.pipeline.stages, GROUPS), make_channel(T.pipeline.stages, GROUPS)
    tickets = Tickets(q, keys, 1)
    if T.items.ragged:
        tickets = make_tickets(GROUPS, 8)
    mem = QueriesMemory(q, k, v, dout, job, tickets, make_channel(GROUPS, 1), keys, values)
    fence_async_shared()
    await_stream()
    size = measure(heads, group, q_desc.shape[2], k_desc.shape[2], left, right, swizzle, q_desc.shape[0], region, T)
    gl.warp_specialize([
        (consume, (dq_desc, targets, mem, size, (scale, settled(rest[1]), region), 0, FOLDS, T, SCORE, MASK)),
        (consume, (dq_desc, targets, mem, size, (scale, settled(rest[1]), region), 1, FOLDS, T, SCORE, MASK)),
        (load, (q_desc, k_desc, v_desc, None, dout_desc, mem, size, region, T)),
    ], [4, 1], [T.pipeline.registers, T.pipeline.loader_registers])  # fmt: skip
