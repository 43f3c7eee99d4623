"""Forward mode on Hopper: out, lse and their tangents of a tile of queries, whose tangents there are, in one launch.

Blocks, tiles and roles are the forward's, formulas `portable.tangent`'s: beside acc = sum p v and total = sum p a warpgroup
has turn = sum p (T - ref) v + p v' and mean = sum p (T - ref). A step begins all its products in one go: those with the values
of the key tile before, then scores, then, as soon as the values' operands have left the registers, T. So while one warpgroup
exponentiates there are four products of the other, or six.
"""

from typing import NamedTuple

from flashtile.kernels.device.direction import FIELDS, LONE
from flashtile.kernels.device.exponential import LN2, LOG2E
from flashtile.kernels.device.grid import padded_rows
from flashtile.kernels.device.memory import head_offset
from flashtile.kernels.device.stream import await_stream
from flashtile.kernels.sm90.device.barriers import pass_turn, take_turn
from flashtile.kernels.sm90.device.blank import blank_unseen
from flashtile.kernels.sm90.device.channel import Channel, make_channel
from flashtile.kernels.sm90.device.layouts import matrix_layout, operand_layout, row_layout
from flashtile.kernels.sm90.device.scores import lane_sums, level, shape_scores
from flashtile.kernels.sm90.forward.epilogue import send
from flashtile.kernels.sm90.forward.kernel import enter, leave
from flashtile.kernels.sm90.forward.tile_scheduler import ForwardScene, job_at, measure, place_at, place_count, sized, visit
from flashtile.triton_glue.gluon import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    pack,
    settled,
    store_wait,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashtile.triton_glue.language import PLAIN_INTEGERS


@aggregate
class TangentMemory:
    """Shared memory of a block; out and its tangent are stored where a warpgroup's queries and their tangents were.

    Tiles are [places, 1, 1, rows, columns]. tk and tv are k and v where these have no tangent.
    """

    q: gl.shared_memory_descriptor
    tq: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    tk: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    tv: gl.shared_memory_descriptor
    queries: Channel  # with tq
    keys: Channel  # with tk
    values: Channel  # with tv

    @gluon.constexpr_function
    def __init__(self, q, tq, k, tk, v, tv, queries, keys, values):
        self.q, self.tq, self.k, self.tk, self.v, self.tv = q, tq, k, tk, v, tv
        self.queries, self.keys, self.values = queries, keys, values


class TangentRows(NamedTuple):
    """State of a warpgroup's 64 queries."""

    acc: gl.tensor
    turn: gl.tensor
    weights: gl.tensor  # probabilities of the last key tile, whose values are yet to be added
    bends: gl.tensor  # these times T - ref
    top: gl.tensor  # maximum score
    total: gl.tensor  # sums, one for each of the four lanes that hold a row
    mean: gl.tensor


@gluon.jit
def load(q_desc, k_desc, v_desc, tq_desc, tk_desc, tv_desc, mem, size, region, T: gl.constexpr):
    """Role: bring queries, keys and values of every tile, with their tangents, into shared memory."""
    ROWS: gl.constexpr = T.rows
    GROUPS: gl.constexpr = T.groups
    BYTES: gl.constexpr = q_desc.block_type.nbytes * 2
    places, place, turn, use = place_count(size), place_at(0, size, T), gl.to_tensor(0), gl.to_tensor(0)
    while place < places:
        at = job_at(place, size, region, T)
        head_kv = at.head // size.group
        seen, _ = visit(at, sized(size, at.item), region, T)
        fill(k_desc, tk_desc, mem.k, mem.tk, mem.keys, use, at.slab, head_kv, (seen.end - 1) * T.block_k)
        for group in gl.static_range(GROUPS):
            bar = mem.queries.acquire(turn * GROUPS + group, BYTES)
            tma_load(q_desc, [at.slab, at.head, at.row + group * ROWS, 0], bar, mem.q.index(group))
            tma_load(tq_desc, [at.slab, at.head, at.row + group * ROWS, 0], bar, mem.tq.index(group))
        for n in range(seen.end - 1 - seen.first):
            key = (seen.end - 2 - n) * T.block_k
            fill(k_desc, tk_desc, mem.k, mem.tk, mem.keys, use + 1, at.slab, head_kv, key)
            fill(v_desc, tv_desc, mem.v, mem.tv, mem.values, use, at.slab, head_kv, key + T.block_k)
            use += 1
        fill(v_desc, tv_desc, mem.v, mem.tv, mem.values, use, at.slab, head_kv, seen.first * T.block_k)
        use += 1
        turn = turn + 1
        place = place_at(turn, size, T)


@gluon.jit
def fill(desc, tangent_desc, tiles, tangents, channel, use, batch, head, row):
    """Load a tile, and its tangent unless its descriptor is None, into their place in the ring."""
    BOTH: gl.constexpr = tangent_desc is not None  # pyright: ignore[reportAssignmentType]
    BYTES: gl.constexpr = desc.block_type.nbytes * 2 if BOTH else desc.block_type.nbytes
    bar = channel.acquire(use, BYTES)
    tma_load(desc, [batch, head, row, 0], bar, tiles.index(channel.at(use)))
    if BOTH:
        tma_load(tangent_desc, [batch, head, row, 0], bar, tangents.index(channel.at(use)))


@gluon.jit
def consume(out_desc, tout_desc, targets, mem, whole, rest, GROUP: gl.constexpr, MOVES_K: gl.constexpr,
            MOVES_V: gl.constexpr, T: gl.constexpr):  # fmt: skip
    """Role: out, lse and their tangents of the GROUP-th 64 queries of every tile."""
    if GROUP == T.groups - 1:
        pass_turn(GROUP, T)
    places, turn, use = place_count(whole), gl.to_tensor(0), gl.to_tensor(0)
    place = place_at(0, whole, T)
    while place < places:
        job = job_at(place, whole, rest[2], T)
        entered = enter(use, job, mem, whole, rest[2], GROUP, T)
        use = attend(entered, turn, out_desc, tout_desc, targets, mem, whole, rest, GROUP, MOVES_K, MOVES_V, T)
        turn = turn + 1
        place = place_at(turn, whole, T)


@gluon.jit
def attend(entered, turn, out_desc, tout_desc, targets, mem, whole, rest, GROUP: gl.constexpr, MOVES_K: gl.constexpr,
           MOVES_V: gl.constexpr, T: gl.constexpr):  # fmt: skip
    """Key tiles used: the GROUP-th 64 queries of a Job; entered as `enter` gives it."""
    use, at, size, seen, first, _ = entered
    scene = ForwardScene(mem, at, size, rest[0], rest[1], (), (), ())
    mem.queries.wait(turn * T.groups + GROUP)
    rows, ref = begin(use, seen.end - 1, scene, GROUP, MOVES_K, MOVES_V, T)
    use += 1
    if T.mask.masks_first:
        for n in range(seen.end - 1 - seen.high):
            tile = seen.end - 2 - n
            rows = step(rows, ref, use, tile, scene, GROUP, T.mask.above, MOVES_K, MOVES_V, T)
            use += 1
    for n in range(seen.high - seen.low):
        tile = seen.high - 1 - n
        rows = step(rows, ref, use, tile, scene, GROUP, False, MOVES_K, MOVES_V, T)
        use += 1
    if T.mask.left:
        for n in range(seen.low - seen.first):
            tile = seen.low - 1 - n
            rows = step(rows, ref, use, tile, scene, GROUP, T.mask.below, MOVES_K, MOVES_V, T)
            use += 1
        if T.mask.unseen:
            blank_values(mem, use - 1, seen.first, size, MOVES_V, T)
    acc, turned = add_values(rows, mem, use - 1, MOVES_V, T)
    acc, turned = warpgroup_mma_wait(0, deps=[acc]), warpgroup_mma_wait(0, deps=[turned])
    mem.values.release(use - 1)
    use = leave(use, seen, first, mem, GROUP, T)
    done = TangentRows(acc, turned, (), (), rows.top, rows.total, rows.mean)
    finish(done, ref, out_desc, tout_desc, targets, mem, at, whole, size, rest[0], GROUP, T)
    mem.queries.release(turn * T.groups + GROUP)
    return use


@gluon.jit
def blank_values(mem, use, tile, size, MOVES_V: gl.constexpr, T: gl.constexpr):
    """Zero the values, and their tangents, of a tile's keys that no query sees."""
    blank_unseen(mem.v, mem.values, use, tile, size, T.columns_v, 1, T)
    if MOVES_V:
        blank_unseen(mem.tv, mem.values, use, tile, size, T.columns_v, 1, T)


@gluon.jit
def multiply(a, place, tiles, key_place, start, ADDS: gl.constexpr, T: gl.constexpr):
    """Queries times the key tile at a place, under way, onto `start` if ADDS."""
    ROWS: gl.constexpr = T.rows
    BLOCK_K: gl.constexpr = T.block_k
    COLUMNS: gl.constexpr = T.columns
    rows = a.index(place).reshape([ROWS, COLUMNS])
    keys = tiles.index(key_place).reshape([BLOCK_K, COLUMNS])
    return warpgroup_mma(rows, keys.permute((1, 0)), start, use_acc=ADDS, is_async=True)


@gluon.jit
def multiply_slopes(mem, use, GROUP: gl.constexpr, MOVES_K: gl.constexpr, T: gl.constexpr):
    """The tangents of a key tile's scores, under way."""
    ROWS: gl.constexpr = T.rows
    BLOCK_K: gl.constexpr = T.block_k
    zero = gl.zeros([ROWS, BLOCK_K], gl.float32, matrix_layout(BLOCK_K))  # pyright: ignore[reportCallIssue]
    slope = multiply(mem.tq, GROUP, mem.k, mem.keys.at(use), zero, False, T)
    if MOVES_K:
        slope = multiply(mem.q, GROUP, mem.tk, mem.keys.at(use), slope, True, T)
    return slope


@gluon.jit
def multiply_keys(mem, use, GROUP: gl.constexpr, T: gl.constexpr):
    """The products of a key tile, under way."""
    ROWS: gl.constexpr = T.rows
    BLOCK_K: gl.constexpr = T.block_k
    zero = gl.zeros([ROWS, BLOCK_K], gl.float32, matrix_layout(BLOCK_K))  # pyright: ignore[reportCallIssue]
    return multiply(mem.q, GROUP, mem.k, mem.keys.at(use), zero, False, T)


@gluon.jit
def add_values(rows, mem, use, MOVES_V: gl.constexpr, T: gl.constexpr):
    """(acc, turn) with the values of the key tile whose probabilities the rows have, under way."""
    BLOCK_K: gl.constexpr = T.block_k
    COLUMNS: gl.constexpr = T.columns_v
    mem.values.wait(use)
    values = mem.v.index(mem.values.at(use)).reshape([BLOCK_K, COLUMNS])
    weights = gl.convert_layout(rows.weights, operand_layout(COLUMNS))
    acc = warpgroup_mma(weights, values, rows.acc, is_async=True)
    turn = warpgroup_mma(gl.convert_layout(rows.bends, operand_layout(COLUMNS)), values, rows.turn, is_async=True)
    if MOVES_V:
        tangents = mem.tv.index(mem.values.at(use)).reshape([BLOCK_K, COLUMNS])
        turn = warpgroup_mma(weights, tangents, turn, is_async=True)
    return acc, turn


@gluon.jit
def slopes_of(raw, p, scale, MASKED: gl.constexpr):
    """T of a product's tangent; 0 where it may be no number, for nobody sees it."""
    slope = raw * scale
    if MASKED:
        slope = gl.where(p > 0.0, slope, 0.0)
    return slope


@gluon.jit
def begin(use, tile, scene, GROUP: gl.constexpr, MOVES_K: gl.constexpr, MOVES_V: gl.constexpr, T: gl.constexpr):
    """(the state after the first key tile without its values, ref): what T is near to, its mean there."""
    mem, at, size, scale, score_args, _, _, _ = scene
    MASKED: gl.constexpr = T.mask.above if T.mask.masked else 0  # pyright: ignore[reportAssignmentType]
    ROWS: gl.constexpr = T.rows
    BLOCK_K: gl.constexpr = T.block_k
    COLUMNS: gl.constexpr = T.columns_v
    factor = scale * LOG2E
    mem.keys.wait(use)
    take_turn(GROUP, T)
    score = multiply_keys(mem, use, GROUP, T)
    slope = multiply_slopes(mem, use, GROUP, MOVES_K, T)
    pass_turn(GROUP, T)
    score = warpgroup_mma_wait(0, deps=[score])
    slope = warpgroup_mma_wait(0, deps=[slope])
    mem.keys.release(use)
    score = shape_scores(score, tile, at, size, scale, score_args, (), MASKED, T, None, None)
    top = gl.convert_layout(gl.max(score, 1), row_layout(BLOCK_K))
    p = gl.exp2(score * factor - level(top * factor, MASKED, T)[:, None])
    finite = gl.abs(slope) < float("inf")
    weight = gl.where(finite, gl.maximum(p, 2.0**-60), 0.0)  # of a row that sees none of these keys, too
    whole = gl.sum(weight, 1)
    ref = gl.sum(gl.where(finite, slope * scale, 0.0) * weight, 1) / gl.where(whole == 0.0, 1.0, whole)
    ref = gl.convert_layout(ref, row_layout(BLOCK_K))
    bend = p * (slopes_of(slope, p, scale, MASKED) - ref[:, None])
    if T.mask.unseen:
        blank_values(mem, use, tile, size, MOVES_V, T)
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, matrix_layout(COLUMNS))  # pyright: ignore[reportCallIssue]
    return TangentRows(acc, acc, pack(p, mem.v.dtype), pack(bend, mem.v.dtype), top, lane_sums(p, T), lane_sums(bend, T)), ref


@gluon.jit
def step(rows, ref, use, tile, scene, GROUP: gl.constexpr, MASKED: gl.constexpr, MOVES_K: gl.constexpr,
         MOVES_V: gl.constexpr, T: gl.constexpr):  # fmt: skip
    """The state after a further key tile; the values of the one before are added."""
    mem, at, size, scale, score_args, _, _, _ = scene
    BLOCK_K: gl.constexpr = T.block_k
    COLUMNS: gl.constexpr = T.columns_v
    factor = scale * LOG2E
    mem.keys.wait(use)
    take_turn(GROUP, T)
    acc, turn = add_values(rows, mem, use - 1, MOVES_V, T)
    score = multiply_keys(mem, use, GROUP, T)
    acc, turn = warpgroup_mma_wait(1, deps=[acc]), warpgroup_mma_wait(1, deps=[turn])
    mem.values.release(use - 1)
    slope = multiply_slopes(mem, use, GROUP, MOVES_K, T)
    pass_turn(GROUP, T)
    score = warpgroup_mma_wait(2 if MOVES_K else 1, deps=[score])
    score = shape_scores(score, tile, at, size, scale, score_args, (), MASKED, T, None, None)
    top = gl.maximum(rows.top, gl.convert_layout(gl.max(score, 1), row_layout(BLOCK_K)))
    shift = level(top * factor, MASKED, T)
    decay = gl.exp2(rows.top * factor - shift)
    p = gl.exp2(score * factor - shift[:, None])
    LANES: gl.constexpr = gl.SliceLayout(1, rows.total.type.layout)  # pyright: ignore[reportAssignmentType]
    decays = gl.convert_layout(decay, LANES)[:, None]
    total = rows.total * decays + lane_sums(p, T)
    mem.keys.wait(use)  # long over, but it ends in a jump, behind which ptxas would put the exponentials
    slope = warpgroup_mma_wait(0, deps=[slope])
    mem.keys.release(use)
    bend = p * (slopes_of(slope, p, scale, MASKED) - ref[:, None])
    mean = rows.mean * decays + lane_sums(bend, T)
    decay = gl.convert_layout(decay, row_layout(COLUMNS))[:, None]
    return TangentRows(acc * decay, turn * decay, pack(p, mem.v.dtype), pack(bend, mem.v.dtype), top, total, mean)


@gluon.jit
def finish(rows, ref, out_desc, tout_desc, targets, mem, at, whole, size, scale, GROUP: gl.constexpr, T: gl.constexpr):
    """Write those of out, lse, their tangents and FIELDS that are wanted; a row that saw nothing gives 0, -inf, 0 and 0."""
    ROWS: gl.constexpr = T.rows
    BLOCK_K: gl.constexpr = T.block_k
    COLUMNS: gl.constexpr = T.columns_v
    BY_KEY: gl.constexpr = row_layout(BLOCK_K)
    BY_COLUMN: gl.constexpr = row_layout(COLUMNS)
    total = gl.convert_layout(gl.sum(rows.total, 1), BY_KEY)
    share = 1.0 / gl.where(total == 0.0, 1.0, total)
    mean = gl.convert_layout(gl.sum(rows.mean, 1), BY_KEY) * share
    index = at.row + gl.arange(0, ROWS, BY_KEY)
    at_rows = (at.slab * whole.heads + at.head).to(gl.int64) * whole.seqlen_q + index
    lse = (rows.top * (scale * LOG2E) + gl.log2(gl.where(total == 0.0, 1.0, total))) * LN2
    here = index < size.seqlen_q
    if targets[0] is not None:
        gl.store(targets[0] + at_rows, lse, mask=here)
    if targets[1] is not None:
        gl.store(targets[1] + at_rows, gl.where(total == 0.0, 0.0, mean + ref), mask=here)
    seen = gl.convert_layout(total != 0.0, BY_COLUMN)[:, None]
    shares, means = gl.convert_layout(share, BY_COLUMN)[:, None], gl.convert_layout(mean, BY_COLUMN)[:, None]
    out = gl.where(seen, rows.acc * shares, 0.0)
    tout = gl.where(seen, rows.turn * shares - means * out, 0.0)
    if targets[2] is not None:
        delta, tdelta = deltas(out, tout, targets[3], targets[4], at, size, T)
        lone, mean = gl.abs(total - 1.0) <= LONE, gl.where(total == 0.0, 0.0, mean + ref)
        if targets[5] is None:
            fields = targets[2] + at_rows * FIELDS
            gl.store(fields, gl.where(total != 0.0, lse * LOG2E, float("inf")), mask=here)
            gl.store(fields + 1, tdelta, mask=here)
            gl.store(fields + 2, gl.where(lone, 0.0, mean), mask=here)
            gl.store(fields + 4, gl.where(lone, 0.0, scale / T.raised), mask=here)
            gl.store(fields + 6, delta, mask=here)
        else:
            level = gl.where(total != 0.0, lse, float("inf"))
            store_starts(targets[2], targets[5][0], level * LOG2E, mean, delta, tdelta, lone, at, whole, index)
            clear(targets[5][1], at, whole, T)
    if out_desc is not None:
        mem.q.index(GROUP).reshape([ROWS, COLUMNS]).store(out.to(mem.q.dtype))
    if tout_desc is not None:
        mem.tq.index(GROUP).reshape([ROWS, COLUMNS]).store(tout.to(mem.q.dtype))
    fence_async_shared()
    if out_desc is not None:
        send(mem.q.index(GROUP), out_desc, (), at, 0, T.head_dim_v, T)
    if tout_desc is not None:
        send(mem.tq.index(GROUP), tout_desc, (), at, 0, T.head_dim_v, T)
    store_wait(0)


@gluon.jit
def store_starts(ptr, span, level, mean, delta, tdelta, lone, at, whole, index):
    """Each row's numbers as `second.kernel` loads them: level, mu, delta, its tangent, and 0 where the row is LONE, else 1.

    Of queries that do not exist, too, of which nothing comes, for q and dout are 0.
    """
    first, here = ptr + (at.slab * whole.heads + at.head).to(gl.int64) * (5 * span) + index, index < span
    gl.store(first, level, mask=here)
    gl.store(first + span, gl.where(lone, 0.0, mean), mask=here)
    gl.store(first + 2 * span, delta, mask=here)
    gl.store(first + 3 * span, tdelta, mask=here)
    gl.store(first + 4 * span, gl.where(lone, 0.0, 1.0), mask=here)


@gluon.jit
def clear(sum_ptr, at, whole, T: gl.constexpr):
    """Zeros for a warpgroup's queries in the sum of dq, (batch, heads_q, `padded_rows`, columns)."""
    COUNT: gl.constexpr = T.rows * T.columns
    FLAT: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])  # pyright: ignore[reportAssignmentType]
    first = ((at.slab * whole.heads + at.head).to(gl.int64) * padded_rows(whole.seqlen_q) + at.row) * T.columns
    gl.store(sum_ptr + first + gl.arange(0, COUNT, FLAT), gl.zeros([COUNT], gl.float32, FLAT))  # pyright: ignore[reportCallIssue]


@gluon.jit
def deltas(out, tout, given, strides, at, size, T: gl.constexpr):
    """(delta = sum(out dout) - dlse, its tangent) of a warpgroup's rows; given = (dout, dlse, tangents of both), or None."""
    ROWS: gl.constexpr = T.rows
    BLOCK_K: gl.constexpr = T.block_k
    BY_KEY: gl.constexpr = row_layout(BLOCK_K)
    delta = gl.zeros([ROWS], gl.float32, BY_KEY)  # pyright: ignore[reportCallIssue]
    tdelta = delta
    if given[0] is not None:
        dout = given_rows(given[0], strides[0], out, at, size, T)
        delta = gl.convert_layout(gl.sum(out * dout, 1), BY_KEY)
        tdelta = gl.convert_layout(gl.sum(tout * dout, 1), BY_KEY)
    if given[2] is not None:
        tdelta = tdelta + gl.convert_layout(gl.sum(out * given_rows(given[2], strides[2], out, at, size, T), 1), BY_KEY)
    index = at.row + gl.arange(0, ROWS, BY_KEY)
    if given[1] is not None:
        delta = delta - given_lse(given[1], strides[1], index, at, size)
    if given[3] is not None:
        tdelta = tdelta - given_lse(given[3], strides[3], index, at, size)
    return delta, tdelta


@gluon.jit
def given_rows(ptr, strides, like, at, size, T: gl.constexpr):
    """A warpgroup's rows of a tensor that lies as out, in float32."""
    ROWS: gl.constexpr = T.rows
    COLUMNS: gl.constexpr = T.columns_v
    row = at.row + gl.arange(0, ROWS, gl.SliceLayout(1, like.type.layout))[:, None]
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, like.type.layout))[None, :]
    first = ptr + head_offset(at.slab, at.head, strides)
    here = (row < size.seqlen_q) & (column < T.head_dim_v)
    return gl.load(first + row.to(gl.int64) * strides[1] + column.to(gl.int64) * strides[3], mask=here, other=0.0).to(
        gl.float32
    )


@gluon.jit
def given_lse(ptr, strides, index, at, size):
    """A warpgroup's rows of a tensor that lies as lse."""
    first = ptr + at.slab.to(gl.int64) * strides[0] + at.head.to(gl.int64) * strides[1]
    return gl.load(first + index.to(gl.int64) * strides[2], mask=index < size.seqlen_q, other=0.0)


@gluon.jit(do_not_specialize=[*PLAIN_INTEGERS, "swizzle"])
def attention_tangent(q_desc, k_desc, v_desc, tq_desc, tk_desc, tv_desc, out_desc, tout_desc, targets, heads, group, left,
                      right, swizzle, rest, T: gl.constexpr):  # fmt: skip
    """Descriptors, counts and rest as `forward.attention_forward` has them; of tk and tv None where these do not move.

    targets = (lse, its tangent, FIELDS of each row as `portable.tangent` leaves them, and what these are made of: (dout, dlse,
    tangents of both), strides of all four), or None; the first three float32, (batch, heads_q, seqlen_q), contiguous. Last,
    where rows are those of `store_starts`, (batch, heads_q, 5, queries), how many queries these are, some more than there are,
    and a sum that is to be cleared.
    """
    ROWS: gl.constexpr = T.rows
    BLOCK_K: gl.constexpr = T.block_k
    GROUPS: gl.constexpr = T.groups
    STAGES: gl.constexpr = T.pipeline.stages
    MOVES_K: gl.constexpr = tk_desc is not None  # pyright: ignore[reportAssignmentType]
    MOVES_V: gl.constexpr = tv_desc is not None  # pyright: ignore[reportAssignmentType]
    targets, scale, region = settled(targets), rest[0], settled(rest[2])
    q = gl.allocate_shared_memory(q_desc.dtype, [GROUPS, 1, 1, ROWS, T.columns], q_desc.layout)
    tq = gl.allocate_shared_memory(q_desc.dtype, [GROUPS, 1, 1, ROWS, T.columns], tq_desc.layout)
    k = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_K, T.columns], k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_K, T.columns_v], v_desc.layout)
    tk, tv = k, v
    if MOVES_K:
        tk = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_K, T.columns], tk_desc.layout)
    if MOVES_V:
        tv = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_K, T.columns_v], tv_desc.layout)
    mem = TangentMemory(
        q, tq, k, tk, v, tv, make_channel(GROUPS, 1), make_channel(STAGES, GROUPS), make_channel(STAGES, GROUPS)
    )
    fence_async_shared()
    await_stream()
    size = measure(heads, group, q_desc.shape[2], k_desc.shape[2], left, right, swizzle, q_desc.shape[0], region, T)
    told = scale, settled(rest[1]), region
    gl.warp_specialize([
        (consume, (out_desc, tout_desc, targets, mem, size, told, 0, MOVES_K, MOVES_V, T)),
        (consume, (out_desc, tout_desc, targets, mem, size, told, 1, MOVES_K, MOVES_V, T)),
        (load, (q_desc, k_desc, v_desc, tq_desc, tk_desc, tv_desc, mem, size, region, T)),
    ], [4, 1], [T.pipeline.registers, T.pipeline.loader_registers])  # fmt: skip
