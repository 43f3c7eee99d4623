"""Attention over a cache on Hopper: the copy engine brings keys through the table of pages, as a role of one warp asks it to.

A block has 64 rows, queries packed with the heads that share keys, and goes through a few parts of the keys, as the portable
kernel does (`portable/decode.py`), or all; `device/decoding.py` adds the parts up. One warpgroup multiplies: the queries with
key tile n, and the probabilities of tile n - 1 with its values. Of 8 bits it makes fp16 first (`convert.py`), in which bf16
queries are then multiplied, too: keys are waited for, values are converted while keys are multiplied. Where T.apart who loads
converts. Where T.turned, for 32 rows of queries or fewer, keys and values are the rows of products (`turned.py`).
"""

from typing import NamedTuple

from flashtile.kernels.device.decoding import joined
from flashtile.kernels.device.exponential import LOG2E
from flashtile.kernels.device.softmax import Rows as Sums
from flashtile.kernels.device.stored import lowered
from flashtile.kernels.device.stream import await_stream, let_next
from flashtile.kernels.sm90.cached import turned
from flashtile.kernels.sm90.cached.convert import convert_tile, load_and_convert
from flashtile.kernels.sm90.cached.producer import load
from flashtile.kernels.sm90.cached.seat import (
    DROP,
    STRIP,
    UNSPECIALIZED,
    CachedSizes,
    hidden,
    lifted,
    queries_of,
    scale_of,
    seat_of,
    store_part,
    write,
)
from flashtile.kernels.sm90.cached.tiles import blank, let_go, tile_of
from flashtile.kernels.sm90.device.channel import Channel, make_channel
from flashtile.kernels.sm90.device.layouts import column_layout, matrix_layout, row_layout
from flashtile.kernels.sm90.device.scores import lane_sums, level
from flashtile.kernels.sm90.forward.mma import add_columns, multiply_parts
from flashtile.triton_glue.gluon import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    pack,
    recast,
    settled,
    warpgroup_mma_wait,
)

VALUE_ROWS = gl.constexpr(16)  # of 8 bits that are converted at a time while keys are multiplied: registers


@aggregate
class CachedMemory:
    """Shared memory of a block: queries, [parts, rows, 64], and rings of key and value tiles, [stages x parts x boxes, 1, 1,
    rows of a box, 64], with the channels that fill them. Of 8 bits a box has all columns, and wide_k and wide_v, [places x
    parts, keys, 64], hold the tiles that are multiplied: rings with channels of their own where T.apart. Else all are the same.
    p, [2, rows, keys], has probabilities by turns where T.turned; else these stay in registers, and it is the queries'.
    """

    q: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    wide_k: gl.shared_memory_descriptor
    wide_v: gl.shared_memory_descriptor
    keys: Channel
    values: Channel
    loaded_k: Channel
    loaded_v: Channel

    @gluon.constexpr_function
    def __init__(self, q, p, k, v, wide_k, wide_v, keys, values, loaded_k, loaded_v):
        self.q, self.p, self.k, self.v, self.wide_k, self.wide_v = q, p, k, v, wide_k, wide_v
        self.keys, self.values, self.loaded_k, self.loaded_v = keys, values, loaded_k, loaded_v


class CachedRows(NamedTuple):
    """State of 64 rows."""

    acc: gl.tensor
    weights: gl.tensor  # probabilities of the last key tile, whose values are yet to be added
    top: gl.tensor  # maximum score, in units of log2
    total: gl.tensor  # sums of probabilities, one for each of the four lanes that hold a row


@gluon.jit
def consume(q_ptr, out_ptrs, strides, scales, lengths, mem, sizes, scale, T: gl.constexpr):
    """Role: attention of queries to the keys of a block. scales: of stored keys and values, (pointer or None, its strides)."""
    SPLIT: gl.constexpr = T.split
    await_stream(False)
    if T.split > 0 and not T.direct:
        let_next()
    seat = seat_of(gl.program_id(0), lengths, sizes, T)
    v_scale = gl.to_tensor(1.0)
    if T.k_scale:
        scale = scale * scale_of(scales[0], seat)
    if T.v_scale:
        v_scale = scale_of(scales[1], seat)
    if T.lowers:
        scale = scale * load_lowered(q_ptr, strides[0], mem, seat, sizes, T)
    else:
        load_queries(q_ptr, strides[0], mem, seat, sizes, T)
    if SPLIT == 0:
        rows = before(T)
        if seat.first < seat.end:
            rows, _ = gone_through(gl.to_tensor(0), mem, seat, seat.first, seat.end, sizes, scale, T)
        write(sums_of(rows, v_scale, T), out_ptrs, strides, seat, sizes, T)
    else:
        use = gl.to_tensor(0)
        some = sums_of(before(T), v_scale, T)
        sums = some
        for part in range(seat.first // SPLIT, (gl.maximum(seat.end, seat.first) + SPLIT - 1) // SPLIT):
            low, high = gl.maximum(seat.first, part * SPLIT), gl.minimum(seat.end, (part + 1) * SPLIT)
            if low < high:
                rows, use = gone_through(use, mem, seat, low, high, sizes, scale, T)
                if T.folds:
                    some = joined(some, sums_of(rows, v_scale, T), T)
                    if T.crosses:
                        if (part + 1) % T.parts == 0:  # these are added up before they are added to others
                            sums, some = joined(sums, some, T), sums_of(before(T), v_scale, T)
                else:
                    store_part(sums_of(rows, v_scale, T), out_ptrs, part, seat, sizes, T)
        if T.crosses:
            some = joined(sums, some, T)
        if T.direct:
            write(some, out_ptrs, strides, seat, sizes, T)
        elif T.folds:
            if T.whole > 0:
                if seat.whole:
                    write(some, out_ptrs[3], strides, seat, sizes, T)
            if (seat.first < seat.end) & (not seat.whole):
                store_part(some, out_ptrs, seat.first // (SPLIT * T.parts), seat, sizes, T)


@gluon.jit
def before(T: gl.constexpr):
    """The state before the first key."""
    return turned.nothing(T) if T.turned else nothing(T)


@gluon.jit
def gone_through(use, mem, seat, low, high, sizes, scale, T: gl.constexpr):
    """(state, key tiles used) of the keys from low to high, of which there are some."""
    if T.turned:
        return turned.walk(use, mem, seat, low, high, sizes, scale, T)
    else:
        return walk(use, mem, seat, low, high, sizes, scale, T)


@gluon.jit
def sums_of(rows, v_scale, T: gl.constexpr):
    """The state with a number for each row, laid out as the accumulator's rows are; values times their scale."""
    return turned.summed(rows, v_scale, T) if T.turned else summed(rows, v_scale, T)


@gluon.jit
def summed(rows, v_scale, T: gl.constexpr):
    """The state with a number for each row, laid out as the accumulator's rows are; values times their scale."""
    ROWS: gl.constexpr = row_layout(T.columns_v)
    acc, total = rows.acc, gl.convert_layout(gl.sum(rows.total, 1), ROWS)
    if T.lowers:
        total, v_scale = total * DROP, v_scale * DROP
    if T.lowers or T.v_scale:
        acc = acc * v_scale
    return Sums(acc, gl.convert_layout(rows.top, ROWS), total)


@gluon.jit
def load_queries(ptr, strides, mem, seat, sizes, T: gl.constexpr):
    """Bring the queries to shared memory, zeros where there are none."""
    PARTS: gl.constexpr = T.parts_k
    for part in gl.static_range(PARTS):
        put_queries(mem, part, queries_of(ptr, strides, part, seat, sizes, T), T)
    fence_async_shared()


@gluon.jit
def load_lowered(ptr, strides, mem, seat, sizes, T: gl.constexpr):
    """The same in fp16 (`device/stored.py`: `lowered`); what each row's products are to be multiplied by, as scores lie."""
    PARTS: gl.constexpr = T.parts_k
    BLOCK_K: gl.constexpr = T.block_k
    some = ()
    for part in gl.static_range(PARTS):
        some = some + (queries_of(ptr, strides, part, seat, sizes, T),)  # noqa: RUF005
    top = gl.max(gl.abs(some[0]), 1)
    if PARTS == 2:
        top = gl.maximum(top, gl.max(gl.abs(some[1]), 1))
    for part in gl.static_range(PARTS):
        q, _ = lowered(some[part], top)
        put_queries(mem, part, q, T)
    fence_async_shared()
    _, factor = lowered(some[0], top)
    if T.turned:
        return gl.convert_layout(factor, column_layout(T.rows))[None, :]
    else:
        return gl.convert_layout(factor, row_layout(BLOCK_K))[:, None]


@gluon.jit
def put_queries(mem, part, q, T: gl.constexpr):
    """64 columns of the queries in shared memory, in the order in which products go through them."""
    ROWS: gl.constexpr = T.rows
    if T.turned and T.converts:
        q = turned.shuffled(q)
    mem.q.index(part).reshape([ROWS, STRIP]).store(q)


@gluon.jit
def nothing(T: gl.constexpr):
    """The state before the first key."""
    BLOCK_K: gl.constexpr = T.block_k
    ROWS: gl.constexpr = T.rows
    COLUMNS: gl.constexpr = T.columns_v
    total = lane_sums(gl.zeros([ROWS, BLOCK_K], gl.float32, matrix_layout(BLOCK_K)), T)  # pyright: ignore[reportCallIssue]
    top = gl.full([ROWS], float("-inf"), gl.float32, row_layout(BLOCK_K))
    return CachedRows(gl.zeros([ROWS, COLUMNS], gl.float32, matrix_layout(COLUMNS)), (), top, total)  # pyright: ignore[reportCallIssue]


@gluon.jit
def walk(use, mem, seat, low, high, sizes, scale, T: gl.constexpr):
    """(CachedRows, key tiles used) of the keys from low to high, of which there are some."""
    BLOCK_K: gl.constexpr = T.block_k
    take(mem.k, mem.keys, mem.wide_k, use, low, seat, T.parts_k, T.block_k, T)
    score = multiply_keys(mem, use, T)
    score = warpgroup_mma_wait(0, deps=[score])
    let_go(mem.keys, use, T)
    score = shaped(score * scale, mem, use, low, seat, sizes, T)
    top = gl.max(score, 1)
    p = gl.exp2(score - lifted(level(top, True, T), T)[:, None])
    rows = nothing(T)
    rows = CachedRows(rows.acc, pack(p, mem.q.dtype), top, lane_sums(p, T))
    use += 1
    for start in range(low + BLOCK_K, high, BLOCK_K):
        rows = step(rows, mem, use, start, seat, sizes, scale, T)
        use += 1
    last = low + (gl.cdiv(high - low, BLOCK_K) - 1) * BLOCK_K
    take(mem.v, mem.values, mem.wide_v, use - 1, last, seat, T.parts_v, VALUE_ROWS, T)
    acc = add_values(rows, mem, use - 1, T)
    acc = warpgroup_mma_wait(0, deps=[acc])
    let_go(mem.values, use - 1, T)
    return CachedRows(acc, (), rows.top, rows.total), use


@gluon.jit
def step(rows, mem, use, start, seat, sizes, scale, T: gl.constexpr):
    """The state after a further key tile; the values of the one before are added meanwhile."""
    COLUMNS: gl.constexpr = T.columns_v
    take(mem.k, mem.keys, mem.wide_k, use, start, seat, T.parts_k, T.block_k, T)
    score = multiply_keys(mem, use, T)
    take(mem.v, mem.values, mem.wide_v, use - 1, start - T.block_k, seat, T.parts_v, VALUE_ROWS, T)
    acc = add_values(rows, mem, use - 1, T)
    score = warpgroup_mma_wait(1, deps=[score])
    let_go(mem.keys, use, T)
    score = shaped(score * scale, mem, use, start, seat, sizes, T)
    top = gl.maximum(rows.top, gl.max(score, 1))
    shift = level(top, True, T)
    decay = gl.exp2(rows.top - shift)
    acc = warpgroup_mma_wait(0, deps=[acc])
    let_go(mem.values, use - 1, T)
    p = gl.exp2(score - lifted(shift, T)[:, None])
    total = rows.total * gl.convert_layout(decay, gl.SliceLayout(1, rows.total.type.layout))[:, None] + lane_sums(p, T)
    acc = acc * gl.convert_layout(decay, row_layout(COLUMNS))[:, None]
    return CachedRows(acc, pack(p, mem.q.dtype), top, total)


@gluon.jit
def take(tiles, channel, wide, use, start, seat, PARTS: gl.constexpr, ROWS: gl.constexpr, T: gl.constexpr):
    """Wait for a tile; what is still of 8 bits is converted, ROWS at a time, and let go of."""
    channel.wait(use)
    if T.converts and not T.apart:
        convert_tile(tiles, channel.at(use), wide, 0, start, seat, PARTS, ROWS, T)
        channel.release(use)


@gluon.jit
def multiply_keys(mem, use, T: gl.constexpr):
    """Queries times a key tile, under way."""
    ROWS: gl.constexpr = T.rows
    BLOCK_K: gl.constexpr = T.block_k
    PARTS: gl.constexpr = T.parts_k
    start = gl.zeros([ROWS, BLOCK_K], gl.float32, matrix_layout(BLOCK_K))  # pyright: ignore[reportCallIssue]
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, STRIP], mem.q.dtype)
    keys = recast(mem.wide_k, mem.q.dtype, [T.places * PARTS, BLOCK_K, STRIP], SHARED)
    return multiply_parts(start, (mem.q, 0), (keys, place_of(mem.keys, use, T)), False, ROWS, BLOCK_K, STRIP, PARTS)


@gluon.jit
def add_values(rows, mem, use, T: gl.constexpr):
    """The accumulator plus probabilities times a value tile, under way."""
    return add_columns(rows.acc, rows.weights, tile_of(mem.wide_v, place_of(mem.values, use, T), T.parts_v, T), 0)


@gluon.jit
def place_of(channel, use, T: gl.constexpr):
    """Where the tile to be multiplied is: who multiplies converts into one place."""
    if T.converts and not T.apart:
        return 0
    else:
        return channel.at(use)


@gluon.jit
def shaped(score, mem, use, start, seat, sizes, T: gl.constexpr):
    """Scores, -inf where a row does not see a key; values that no row sees become 0, as converted ones are: they may be NaN."""
    BLOCK_K: gl.constexpr = T.block_k
    if (start < seat.whole_from) | (start + BLOCK_K > seat.whole_to):
        score = hidden(score, start, seat, sizes, T)
        if not T.converts:
            if (start < seat.seen_from) | (start + BLOCK_K > seat.seen_to):
                blank(mem, use, seat.seen_from - start, seat.seen_to - start, T)
    return score


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def decode_hopper(k_desc, v_desc, q_ptr, out_ptrs, strides, scales, table, lengths, seqlen_q, heads_kv, capacity, shares, left,
                  right, rest, T: gl.constexpr):  # fmt: skip
    """One block: T.rows rows, and T.parts parts of the keys, or all. Grid (tiles x shares x heads_kv x T.chunks).

    Descriptors of rank 4 over the pools, (pages, heads_kv, rows, head_dim), boxes of T.box rows and 64 columns, or where
    T.converts all columns' bytes. out_ptrs = (out, lse, sink or None), or where T.split > 0 and not T.direct (acc, top,
    total) of parts, as `device/decoding.py` has them, and where T.whole the others behind them. strides of q, out, sink;
    scales of keys and values, and table: (pointer or None, its strides); lengths as `seat_of` has them; rest = (group, batch,
    scale).
    """
    ROWS: gl.constexpr = T.rows
    KIND: gl.constexpr = gl.float16 if T.converts else k_desc.dtype  # pyright: ignore[reportAssignmentType]
    QUERIES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, STRIP], KIND)
    q = gl.allocate_shared_memory(KIND, [T.parts_k, ROWS, STRIP], QUERIES)
    p = q
    if T.turned:
        WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, T.block_k], KIND)
        p = gl.allocate_shared_memory(KIND, [2, ROWS, T.block_k], WEIGHTS)
    BOXES: gl.constexpr = T.pipeline.stages * T.boxes
    k = gl.allocate_shared_memory(k_desc.dtype, [BOXES * T.copied_k, 1, 1, T.box, T.copied_columns_k], k_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, [BOXES * T.copied_v, 1, 1, T.box, T.copied_columns_v], v_desc.layout)
    loaded_k, loaded_v = make_channel(T.pipeline.stages, 1), make_channel(T.pipeline.stages, 1)
    wide_k, wide_v, keys, values = k, v, loaded_k, loaded_v
    if T.converts and not T.turned:
        WIDE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([T.block_k, STRIP], KIND)
        wide_k = gl.allocate_shared_memory(KIND, [T.places * T.parts_k, T.block_k, STRIP], WIDE)
        wide_v = gl.allocate_shared_memory(KIND, [T.places * T.parts_v, T.block_k, STRIP], WIDE)
        if T.apart:
            keys, values = make_channel(T.places, 1), make_channel(T.places, 1)
    mem = CachedMemory(q, p, k, v, wide_k, wide_v, keys, values, loaded_k, loaded_v)
    fence_async_shared()
    sizes = CachedSizes(seqlen_q, heads_kv, capacity, shares, left, right, rest[0], rest[1])
    if T.apart:
        gl.warp_specialize([
            (consume, (q_ptr, out_ptrs, settled(strides), settled(scales), lengths, mem, sizes, rest[2] * LOG2E, T)),
            (load_and_convert, (k_desc, v_desc, table[0], settled(table[1]), lengths, mem, sizes, T)),
        ], [4], [T.pipeline.loader_registers])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (q_ptr, out_ptrs, settled(strides), settled(scales), lengths, mem, sizes, rest[2] * LOG2E, T)),
            (load, (k_desc, v_desc, table[0], settled(table[1]), lengths, mem, sizes, T)),
        ], [1], [T.pipeline.loader_registers])  # fmt: skip
