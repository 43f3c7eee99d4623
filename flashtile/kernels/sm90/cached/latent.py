"""Attention over a cache of latents on Hopper: values are the first 512 of the keys' 576 columns (absorbed MLA), and read once.

A block has 64 rows, as in `kernel.py`, and two consumers, each of which has half of the values' columns: 64 x 256 numbers are
all that the registers of a warpgroup hold. Each multiplies the queries with every other key tile, makes its probabilities, and
hands them to the other through shared memory; so no score is computed twice, and while one exponentiates the other multiplies.
Probabilities go to and fro through one place: who is handed those of tile n - 1 is who makes those of tile n.
"""

from typing import NamedTuple

from flashtile.kernels.device.exponential import LOG2E
from flashtile.kernels.device.softmax import Rows as Sums
from flashtile.kernels.device.stream import await_stream, let_next
from flashtile.kernels.sm90.cached.producer import boxes_of, fill, look_up_tile
from flashtile.kernels.sm90.cached.seat import STRIP, UNSPECIALIZED, CachedSizes, hidden, seat_of, store_part, write
from flashtile.kernels.sm90.device.blank import blank_rows
from flashtile.kernels.sm90.device.channel import Channel, make_channel
from flashtile.kernels.sm90.device.layouts import matrix_layout, row_layout
from flashtile.kernels.sm90.device.scores import lane_sums, level
from flashtile.kernels.sm90.forward.mma import add_columns
from flashtile.triton_glue.gluon import (
    abreast,
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    pack,
    recast,
    scale_unless_one,
    settled,
    tma_load,
    uniform,
    warpgroup_mma,
    warpgroup_mma_wait,
)

STRIPS = gl.constexpr(4)  # of values that one consumer adds up
HALF = gl.constexpr(256)  # their columns
SLACK = gl.constexpr(8.0)  # by which scores may exceed what is subtracted, in log2: accumulators are scaled seldom
PIECES = gl.constexpr(3)  # of a tile, each multiplied with the queries by itself


@aggregate
class LatentKeys:
    """Rings of key tiles, in three pieces with a channel each: the values of consumer 0 and of consumer 1, which let go of
    them, and the other 64 columns, which the consumer that multiplies them with the queries lets go of.
    """

    lower: gl.shared_memory_descriptor
    upper: gl.shared_memory_descriptor
    rest: gl.shared_memory_descriptor
    lowers: Channel
    uppers: Channel
    rests: Channel

    @gluon.constexpr_function
    def __init__(self, lower, upper, rest, lowers, uppers, rests):
        self.lower, self.upper, self.rest = lower, upper, rest
        self.lowers, self.uppers, self.rests = lowers, uppers, rests


@aggregate
class Handed:
    """What consumers give each other: the last tile's probabilities, [64, 64], what each consumer subtracts from its scores,
    [64], and at the end of a part the sums of its probabilities, [64].
    """

    weights: gl.shared_memory_descriptor
    top_0: gl.shared_memory_descriptor
    top_1: gl.shared_memory_descriptor
    sum_0: gl.shared_memory_descriptor
    sum_1: gl.shared_memory_descriptor
    given_0: Channel  # probabilities by consumer 0
    given_1: Channel
    sums_0: Channel
    sums_1: Channel

    @gluon.constexpr_function
    def __init__(self, weights, top_0, top_1, sum_0, sum_1, given_0, given_1, sums_0, sums_1):
        self.weights, self.top_0, self.top_1, self.sum_0, self.sum_1 = weights, top_0, top_1, sum_0, sum_1
        self.given_0, self.given_1, self.sums_0, self.sums_1 = given_0, given_1, sums_0, sums_1


@aggregate
class LatentMemory:
    """Shared memory of a block: queries, [9, 64, 64], also as boxes of tokens and heads; key tiles; what is handed over."""

    q: gl.shared_memory_descriptor
    q_boxes: gl.shared_memory_descriptor
    queries: Channel
    keys: LatentKeys
    handed: Handed

    @gluon.constexpr_function
    def __init__(self, q, q_boxes, queries, keys, handed):
        self.q, self.q_boxes, self.queries, self.keys, self.handed = q, q_boxes, queries, keys, handed


class LatentRows(NamedTuple):
    """State of 64 rows, of half of the values' columns."""

    acc: gl.tensor
    top: gl.tensor  # the maximum score so far, or less by at most SLACK, in units of log2
    total: gl.tensor  # sums of this consumer's own probabilities, one for each of the four lanes that hold a row


class Use(NamedTuple):
    """What a consumer counts: key tiles, probabilities that each consumer gave, and parts."""

    tile: gl.tensor
    given_0: gl.tensor
    given_1: gl.tensor
    part: gl.tensor


@gluon.jit
def attend(out_ptrs, strides, mem, seat, sizes, scale, GROUP: gl.constexpr, T: gl.constexpr):
    """Role: attention of 64 rows to the keys of a block, half of the values' columns."""
    SPLIT: gl.constexpr = T.split
    ROWS: gl.constexpr = T.rows
    mem.queries.wait(0)
    zero = gl.to_tensor(0)
    use = Use(zero, zero, zero, zero)
    if T.direct or SPLIT == 0:
        rows = totalled(nothing(T), gl.zeros([ROWS], gl.float32, row_layout(HALF)))  # pyright: ignore[reportCallIssue]
        if seat.first < seat.end:
            rows, use = walk(use, mem, seat, seat.first, seat.end, sizes, scale, GROUP, T)
        write(rows, out_ptrs, strides, seat, sizes, T, GROUP * HALF)
    else:
        for part in range(seat.first // SPLIT, (gl.maximum(seat.end, seat.first) + SPLIT - 1) // SPLIT):
            low, high = gl.maximum(seat.first, part * SPLIT), gl.minimum(seat.end, (part + 1) * SPLIT)
            if low < high:
                rows, use = walk(use, mem, seat, low, high, sizes, scale, GROUP, T)
                store_part(rows, out_ptrs, part, seat, sizes, T, GROUP * HALF)


@gluon.jit
def nothing(T: gl.constexpr):
    """The state before the first key."""
    ROWS: gl.constexpr = T.rows
    BLOCK_K: gl.constexpr = T.block_k
    total = lane_sums(gl.zeros([ROWS, BLOCK_K], gl.float32, matrix_layout(BLOCK_K)), T)  # pyright: ignore[reportCallIssue]
    top = gl.full([ROWS], float("-inf"), gl.float32, row_layout(BLOCK_K))
    return LatentRows(gl.zeros([ROWS, HALF], gl.float32, matrix_layout(HALF)), top, total)  # pyright: ignore[reportCallIssue]


@gluon.jit
def walk(use, mem, seat, low, high, sizes, scale, GROUP: gl.constexpr, T: gl.constexpr):
    """(Sums, Use) after the keys from low to high, of which there are some.

    Consumer 0 multiplies the queries with tiles 0, 2, 4, ... and consumer 1 with the others; each adds the values of all.
    """
    BLOCK_K: gl.constexpr = T.block_k
    tiles = gl.cdiv(high - low, BLOCK_K)
    rows = nothing(T)
    if GROUP == 0:
        score = multiply_keys(mem, use.tile, GROUP, T)
        rows = own(rows, score, mem, use, 0, low, seat, sizes, scale, True, GROUP, T)
    for tile in range(2 - GROUP, tiles, 2):
        rows = others(rows, mem, use, tile - 1, GROUP, T)
        score = multiply_keys(mem, use.tile + tile, GROUP, T)
        rows = own(rows, score, mem, use, tile, low + tile * BLOCK_K, seat, sizes, scale, False, GROUP, T)
    if tiles % 2 == GROUP:
        rows = others(rows, mem, use, tiles - 1, GROUP, T)
        acc = warpgroup_mma_wait(0, deps=[rows.acc])
        values_of(mem, GROUP)[1].release(use.tile + tiles - 1)
        rows = LatentRows(acc, rows.top, rows.total)
    total = exchanged(gl.convert_layout(gl.sum(rows.total, 1), row_layout(HALF)), mem, use.part, GROUP, T)
    return totalled(rows, total), Use(use.tile + tiles, use.given_0 + (tiles + 1) // 2, use.given_1 + tiles // 2, use.part + 1)


@gluon.jit
def totalled(rows, total):
    """The state with a number for each row, as `device/decoding.py` has it."""
    return Sums(rows.acc, gl.convert_layout(rows.top, row_layout(HALF)), total)


@gluon.jit
def values_of(mem, GROUP: gl.constexpr):
    """(ring, channel) of a consumer's half of the values."""
    if GROUP == 0:
        return mem.keys.lower, mem.keys.lowers
    else:
        return mem.keys.upper, mem.keys.uppers


@gluon.jit
def given_by(mem, use, tile, GROUP: gl.constexpr):
    """(channel, which use of it, rows' maximum) of the probabilities of a tile that consumer GROUP gives."""
    if GROUP == 0:
        return mem.handed.given_0, use.given_0 + tile // 2, mem.handed.top_0
    else:
        return mem.handed.given_1, use.given_1 + tile // 2, mem.handed.top_1


@gluon.jit
def strips_of(ring, place, T: gl.constexpr):
    """A ring's tile, [keys, 256]."""
    COUNT: gl.constexpr = T.pipeline.stages * STRIPS
    BLOCK_K: gl.constexpr = T.block_k
    return abreast(strips_in(ring, COUNT, T), uniform(place), BLOCK_K, STRIP, STRIPS)


@gluon.jit
def strips_in(ring, COUNT: gl.constexpr, T: gl.constexpr):
    """A ring as strips, [COUNT, keys, 64]: boxes of a strip lie one behind another."""
    BLOCK_K: gl.constexpr = T.block_k
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, STRIP], ring.dtype)
    return recast(ring, ring.dtype, [COUNT, BLOCK_K, STRIP], SHARED)


@gluon.jit
def own(rows, score, mem, use, tile, start, seat, sizes, scale, FIRST: gl.constexpr, GROUP: gl.constexpr, T: gl.constexpr):
    """The state after a tile whose scores this consumer computes: they are under way. So are, unless FIRST, the values of the
    tile before.
    """
    BLOCK_K: gl.constexpr = T.block_k
    at = use.tile + tile
    acc = rows.acc
    if not FIRST:
        acc = warpgroup_mma_wait(PIECES, deps=[acc])
        values_of(mem, GROUP)[1].release(at - 1)
    score = warpgroup_mma_wait(0, deps=[score])
    mem.keys.rests.release(at)
    score = score * scale
    if (start < seat.whole_from) | (start + BLOCK_K > seat.whole_to):
        score = hidden(score, start, seat, sizes, T)
        if (start < seat.seen_from) | (start + BLOCK_K > seat.seen_to):
            blank(mem, at, seat.seen_from - start, seat.seen_to - start, T)
    most = gl.max(score, 1)
    top = gl.where(most > rows.top + SLACK, most, rows.top)
    p = gl.exp2(score - level(top, True, T)[:, None])
    weights = pack(p, mem.q.dtype)
    channel, count, tops = given_by(mem, use, tile, GROUP)
    tops.store(top)
    mem.handed.weights.store(weights)
    fence_async_shared()
    channel.hand_over(count)
    rows = decayed(LatentRows(acc, rows.top, rows.total), top, T)
    ring, values = values_of(mem, GROUP)
    acc = add_columns(rows.acc, weights, strips_of(ring, values.at(at), T), 0)
    total = rows.total + lane_sums(p, T)
    acc = warpgroup_mma_wait(0, deps=[acc])
    values.release(at)
    return LatentRows(acc, top, total)


@gluon.jit
def others(rows, mem, use, tile, GROUP: gl.constexpr, T: gl.constexpr):
    """The state after a tile whose probabilities the other consumer gives, under way."""
    channel, count, tops = given_by(mem, use, tile, 1 - GROUP)
    channel.wait(count)
    top = tops.load(row_layout(T.block_k))
    rows = decayed(rows, top, T)
    ring, values = values_of(mem, GROUP)
    at = use.tile + tile
    values.wait(at)
    acc = warpgroup_mma(mem.handed.weights, strips_of(ring, values.at(at), T), rows.acc, is_async=True)
    return LatentRows(acc, top, rows.total)


@gluon.jit
def decayed(rows, top, T: gl.constexpr):
    """The state, relative to a new maximum."""
    decay = gl.exp2(rows.top - level(top, True, T))
    total = rows.total * gl.convert_layout(decay, gl.SliceLayout(1, rows.total.type.layout))[:, None]
    ROWS: gl.constexpr = T.rows
    wide = gl.zeros([ROWS, HALF], gl.float32, matrix_layout(HALF))  # pyright: ignore[reportCallIssue]
    wide += gl.convert_layout(decay, row_layout(HALF))[:, None]
    return LatentRows(scale_unless_one(rows.acc, wide, HALF), top, total)


@gluon.jit
def multiply_keys(mem, use, GROUP: gl.constexpr, T: gl.constexpr):
    """Queries times a key tile, under way, piece by piece in the order in which they arrive."""
    ROWS: gl.constexpr = T.rows
    BLOCK_K: gl.constexpr = T.block_k
    STAGES: gl.constexpr = T.pipeline.stages
    score = gl.zeros([ROWS, BLOCK_K], gl.float32, matrix_layout(BLOCK_K))  # pyright: ignore[reportCallIssue]
    first = uniform(gl.to_tensor(0))  # else addresses of the queries wait in 72 registers for the next tile
    mem.keys.rests.wait(use)
    keys = strips_in(mem.keys.rest, STAGES, T).index(mem.keys.rests.at(use))
    score = warpgroup_mma(mem.q.index(first + 2 * STRIPS), keys.permute((1, 0)), score, use_acc=False, is_async=True)
    for half in gl.static_range(2):
        ring, values = values_of(mem, (GROUP + half) % 2)
        values.wait(use)
        keys = strips_of(ring, values.at(use), T)
        queries = abreast(mem.q, first + (GROUP + half) % 2, ROWS, STRIP, STRIPS)
        score = warpgroup_mma(queries, keys.permute((1, 0)), score, is_async=True)
    return score


@gluon.jit
def blank(mem, use, first, end, T: gl.constexpr):
    """Zero the rows of a tile's values outside of first <= row < end: no query sees them, and they may be NaN."""
    COUNT: gl.constexpr = T.pipeline.stages * STRIPS
    for strip in range(STRIPS):
        blank_rows(strips_in(mem.keys.lower, COUNT, T).index(mem.keys.lowers.at(use) * STRIPS + strip), first, end)
        blank_rows(strips_in(mem.keys.upper, COUNT, T).index(mem.keys.uppers.at(use) * STRIPS + strip), first, end)
    fence_async_shared()


@gluon.jit
def exchanged(total, mem, part, GROUP: gl.constexpr, T: gl.constexpr):
    """The sum of both consumers' probabilities; both have then done all products of the part."""
    if GROUP == 0:
        other = exchange(total, mem.handed.sum_0, mem.handed.sums_0, mem.handed.sum_1, mem.handed.sums_1, part)
        return total + other
    else:
        other = exchange(total, mem.handed.sum_1, mem.handed.sums_1, mem.handed.sum_0, mem.handed.sums_0, part)
        return other + total


@gluon.jit
def exchange(value, mine, gives, theirs, takes, use):
    """What the other consumer has in the place of `value`."""
    gives.claim(use)
    mine.store(value)
    gives.hand_over(use)
    takes.wait(use)
    other = theirs.load(value.type.layout)
    takes.release(use)
    return other


@gluon.jit
def load(q_desc, k_desc, rest_desc, table_ptr, table_strides, mem, seat, group, T: gl.constexpr):
    """Role: bring the queries of a block, and every key tile, into shared memory: the pieces of a tile in the order in which
    their places become free. Heads beyond a group's come with it; nobody asks what becomes of them.
    """
    SPLIT: gl.constexpr = T.split
    PARTS: gl.constexpr = T.parts_k
    bar = mem.queries.announce(0, q_desc.block_type.nbytes * PARTS)
    head = seat.head * group + seat.chunk * T.heads
    for part in gl.static_range(PARTS):
        tma_load(q_desc, [seat.item, seat.token, head, part * STRIP], bar, mem.q_boxes.index(part))
    use = gl.to_tensor(0)
    for start in range(seat.first, seat.end, T.block_k):
        low = seat.first
        if SPLIT > 0:
            low = gl.maximum(low, start // SPLIT * SPLIT)
        known = look_up_tile(table_ptr, table_strides, start, seat, T)
        pages, rows = boxes_of(start, known, seat, k_desc.shape[0], T)
        fill(rest_desc, mem.keys.rest, mem.keys.rests, use, pages, rows, seat.head, 1, T, T.first_copied_k)
        if (start - low) // T.block_k % 2 == 0:
            fill(k_desc, mem.keys.lower, mem.keys.lowers, use, pages, rows, seat.head, STRIPS, T)
            fill(k_desc, mem.keys.upper, mem.keys.uppers, use, pages, rows, seat.head, STRIPS, T, STRIPS)
        else:
            fill(k_desc, mem.keys.upper, mem.keys.uppers, use, pages, rows, seat.head, STRIPS, T, STRIPS)
            fill(k_desc, mem.keys.lower, mem.keys.lowers, use, pages, rows, seat.head, STRIPS, T)
        use += 1


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def decode_latent(q_desc, k_desc, rest_desc, out_ptrs, strides, table, lengths, seqlen_q, heads_kv, capacity, shares, left,
                  right, rest, T: gl.constexpr):  # fmt: skip
    """One block: 64 rows, and T.parts parts of the keys, as `decode_hopper` has them; strides of out, sink.

    q_desc: of rank 4 over the queries, boxes of a tile's tokens, their heads, and 64 columns. rest_desc: over the pool of the
    columns behind the values, k_desc unless these lie apart.
    """
    ROWS: gl.constexpr = T.rows
    BOXES: gl.constexpr = T.pipeline.stages * T.boxes
    KIND: gl.constexpr = k_desc.dtype
    QUERIES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, STRIP], KIND)
    q_boxes = gl.allocate_shared_memory(KIND, [T.parts_k, 1, ROWS // T.heads, T.heads, STRIP], q_desc.layout)
    q = recast(q_boxes, KIND, [T.parts_k, ROWS, STRIP], QUERIES)
    lower = gl.allocate_shared_memory(KIND, [BOXES * STRIPS, 1, 1, T.box, STRIP], k_desc.layout)
    upper = gl.allocate_shared_memory(KIND, [BOXES * STRIPS, 1, 1, T.box, STRIP], k_desc.layout)
    other = gl.allocate_shared_memory(KIND, [BOXES, 1, 1, T.box, STRIP], k_desc.layout)
    BLOCK_K: gl.constexpr = T.block_k
    PROBABILITIES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_K], KIND)
    weights = gl.allocate_shared_memory(KIND, [ROWS, BLOCK_K], PROBABILITIES)
    ONES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])  # pyright: ignore[reportAssignmentType]
    top_0 = gl.allocate_shared_memory(gl.float32, [ROWS], ONES)
    top_1 = gl.allocate_shared_memory(gl.float32, [ROWS], ONES)
    sum_0 = gl.allocate_shared_memory(gl.float32, [ROWS], ONES)
    sum_1 = gl.allocate_shared_memory(gl.float32, [ROWS], ONES)
    STAGES: gl.constexpr = T.pipeline.stages
    keys = LatentKeys(lower, upper, other, make_channel(STAGES, 1), make_channel(STAGES, 1), make_channel(STAGES, 1))
    given_0, given_1, sums_0, sums_1 = make_channel(1, 0), make_channel(1, 0), make_channel(1, 1), make_channel(1, 1)
    handed = Handed(weights, top_0, top_1, sum_0, sum_1, given_0, given_1, sums_0, sums_1)
    mem = LatentMemory(q, q_boxes, make_channel(1, 0), keys, handed)
    fence_async_shared()
    await_stream(False)
    if T.split > 0 and not T.direct:
        let_next()
    sizes = CachedSizes(seqlen_q, heads_kv, capacity, shares, left, right, rest[0], rest[1])
    seat = seat_of(gl.program_id(0), lengths, sizes, T)
    gl.warp_specialize([
        (attend, (out_ptrs, settled(strides), mem, seat, sizes, rest[2] * LOG2E, 0, T)),
        (attend, (out_ptrs, settled(strides), mem, seat, sizes, rest[2] * LOG2E, 1, T)),
        (load, (q_desc, k_desc, rest_desc, table[0], settled(table[1]), mem, seat, rest[0], T)),
    ], [4, 1], [T.pipeline.registers, T.pipeline.loader_registers])  # fmt: skip
