"""Second derivatives on Hopper: the tangents of dk and dv of a key tile in registers, shares of dq's added to a float32 sum.

Formulas are `portable.second`'s, roles the backward's: each of two warpgroups has 64 keys, and scores lie keys x queries. Both
passes of the portable kernels are one here, with ten products of a tile for fifteen: the sum of dq is what that costs. A
warpgroup adds the share of its own keys, so that neither waits for the other.
"""

from typing import Any, NamedTuple

from flashtile.kernels.device.exponential import LOG2E
from flashtile.kernels.device.grid import Sizes, padded_rows, seat
from flashtile.kernels.device.mask import key_range
from flashtile.kernels.device.memory import head_offset, row_offset, store_tile
from flashtile.kernels.device.stream import await_stream, let_next
from flashtile.kernels.sm90.backward.scores import hide, starts
from flashtile.kernels.sm90.backward.split_tiles import flatten
from flashtile.kernels.sm90.device.channel import Channel, make_channel
from flashtile.kernels.sm90.device.layouts import matrix_layout, operand_layout
from flashtile.triton_glue.gluon import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    pack,
    recast,
    store_wait,
    tma_add,
    tma_load,
    tma_store,
    uniform,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashtile.triton_glue.language import PLAIN_INTEGERS, constexpr, jit, tl

COUNT = constexpr(5)  # numbers of a row: what `tangent.kernel.store_starts` stores


@aggregate
class SecondMemory:
    """Shared memory of a block. Tiles are [places, 1, 1, rows, columns]."""

    k: gl.shared_memory_descriptor
    tk: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    tv: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor
    tq: gl.shared_memory_descriptor
    dout: gl.shared_memory_descriptor  # then its tangent, where it has one
    rows: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor  # of each consumer the gradient of its scores, and its tangent
    shares: gl.shared_memory_descriptor  # of dq; at the end dk and dv
    keys: Channel  # with values, and the tangents of both
    queries: Channel  # with all that belongs to them

    @gluon.constexpr_function
    def __init__(self, k, tk, v, tv, q, tq, dout, rows, ds, shares, keys, queries):
        self.k, self.tk, self.v, self.tv = k, tk, v, tv
        self.q, self.tq, self.dout, self.rows = q, tq, dout, rows
        self.ds, self.shares, self.keys, self.queries = ds, shares, keys, queries


class SecondDescriptors(NamedTuple):
    """What the loader reads, as the kernel has it."""

    q: Any
    k: Any
    v: Any
    tq: Any
    tk: Any
    tv: Any
    dout: Any
    tdout: Any  # or None
    rows: Any


class KeyTile(NamedTuple):
    """The key tile of a block, and the query tiles that see it: [lo, hi), of which [full_lo, full_hi) need no mask."""

    column: gl.tensor
    batch: gl.tensor
    head_kv: gl.tensor
    lo: gl.tensor
    full_lo: gl.tensor
    full_hi: gl.tensor
    tiles: gl.tensor


class SecondScene(NamedTuple):
    """What all steps of a consumer share: the block's memory, its keys, and what the kernel was given."""

    memory: SecondMemory
    at: KeyTile
    sizes: Sizes
    band: tuple[gl.tensor, gl.tensor]
    scale: Any


@gluon.jit
def find(sizes, band, T: gl.constexpr):
    """The KeyTile of this block. Under a causal mask the first keys, which most queries see, come first."""
    BLOCK_Q: gl.constexpr = T.block_q
    BLOCK_K: gl.constexpr = T.block_k
    tiles, heads_kv = gl.cdiv(sizes.k, BLOCK_K), sizes.heads // sizes.group
    tile, number = seat(gl.program_id(0), tiles, gl.num_programs(0) // tiles, T.swizzle, False)
    column, shift = tile * BLOCK_K, sizes.k - sizes.q
    first, last = column - shift, gl.minimum(column + BLOCK_K, sizes.k) - 1 - shift
    lo, full_lo, full_hi, hi = key_range(first, last, sizes.q, band[1], band[0], T.mask.right, T.mask.left, BLOCK_Q)
    if T.mask.pads_keys:  # keys beyond the end: no tile of queries is free of masking
        if column + BLOCK_K > sizes.k:
            full_lo = hi
            full_hi = hi
    lo, full_lo, full_hi = gl.to_tensor(lo), gl.to_tensor(full_lo), gl.to_tensor(full_hi)
    return KeyTile(column, number // heads_kv, number % heads_kv, lo, full_lo, full_hi, gl.cdiv(hi - lo, BLOCK_Q))


@gluon.jit
def load(descs, memory, sizes, band, T: gl.constexpr):
    """Role: bring keys and values into shared memory, then queries, step by step, with what belongs to them."""
    MOVES: gl.constexpr = descs.tdout is not None  # pyright: ignore[reportAssignmentType]
    ARRIVING: gl.constexpr = descs.dout.block_type.nbytes * (2 if MOVES else 1)
    KEYS: gl.constexpr = (descs.k.block_type.nbytes + descs.v.block_type.nbytes) * 4
    QUERIES: gl.constexpr = 2 * descs.q.block_type.nbytes + ARRIVING + COUNT * descs.rows.block_type.nbytes
    at = find(sizes, band, T)
    bar = memory.keys.announce(0, KEYS)
    for i in gl.static_range(2):
        key = at.column + i * 64
        tma_load(descs.k, [at.batch, at.head_kv, key, 0], bar, memory.k.index(i))
        tma_load(descs.tk, [at.batch, at.head_kv, key, 0], bar, memory.tk.index(i))
        tma_load(descs.v, [at.batch, at.head_kv, key, 0], bar, memory.v.index(i))
        tma_load(descs.tv, [at.batch, at.head_kv, key, 0], bar, memory.tv.index(i))
    step = gl.to_tensor(0)
    for member in range(sizes.group):
        head = at.head_kv * sizes.group + member
        for nth in range(at.tiles):
            start = at.lo + nth * T.block_q
            bar = memory.queries.acquire(step, QUERIES)
            place = memory.queries.at(step)
            tma_load(descs.q, [at.batch, head, start, 0], bar, memory.q.index(place))
            tma_load(descs.tq, [at.batch, head, start, 0], bar, memory.tq.index(place))
            tma_load(descs.dout, [at.batch, head, start, 0], bar, memory.dout.index(place))
            if MOVES:
                tma_load(descs.tdout, [at.batch, head, start, 0], bar, memory.dout.index(T.stages + place))
            for i in gl.static_range(COUNT):
                tma_load(descs.rows, [at.batch, head, i, start], bar, memory.rows.index(COUNT * place + i))
            step = step + 1


@gluon.jit
def consume(dk_desc, dv_desc, sum_desc, memory, sizes, band, scale, W: gl.constexpr, MOVES: gl.constexpr, T: gl.constexpr):
    """Role: the tangents of dk and dv of 64 keys."""
    COLUMNS: gl.constexpr = T.columns
    COLUMNS_V: gl.constexpr = T.columns_v
    at = find(sizes, band, T)
    scene = SecondScene(memory, at, sizes, band, scale)
    dk = gl.zeros([64, COLUMNS], gl.float32, matrix_layout(COLUMNS))  # pyright: ignore[reportCallIssue]
    dv = gl.zeros([64, COLUMNS_V], gl.float32, matrix_layout(COLUMNS_V))  # pyright: ignore[reportCallIssue]
    memory.keys.wait(0)
    step = gl.to_tensor(0)
    for member in range(sizes.group):
        head = at.head_kv * sizes.group + member
        for nth in range(at.tiles):
            start = at.lo + nth * T.block_q
            dk, dv = step_keys(dk, dv, sum_desc, step, head, start, scene, W, MOVES, T)
            step = step + 1
    store_wait(0)  # the last share
    PLACES: gl.constexpr = 2 * T.columns * T.block_q * 2 // (64 * COLUMNS)
    store_gradient(dk_desc, memory, dk * (scale / T.raised), W * (PLACES // 2), PLACES, at, W)
    if PLACES == 2:
        store_wait(0)
    store_gradient(dv_desc, memory, dv, W * (PLACES // 2) + PLACES // 4, PLACES, at, W)
    let_next()
    store_wait(0)


@gluon.jit
def store_gradient(desc, memory, value, PLACE: gl.constexpr, PLACES: gl.constexpr, at, W: gl.constexpr):
    """Write the gradient of 64 keys, through one of the PLACES that both consumers' shares of dq have room for."""
    COLUMNS: gl.constexpr = value.shape[1]
    staged = recast(memory.shares, desc.dtype, [PLACES, 1, 1, 64, COLUMNS], desc.layout).index(PLACE)
    staged.reshape([64, COLUMNS]).store(value.to(desc.dtype))
    fence_async_shared()
    tma_store(desc, [at.batch, at.head_kv, at.column + W * 64, 0], staged)


@gluon.jit
def times(a, b, start, ADDS: gl.constexpr):
    """Rows times rows, under way, onto `start` if ADDS."""
    return warpgroup_mma(a, b.permute((1, 0)), start, use_acc=ADDS, is_async=True)


@gluon.jit
def rows_of(memory, place, NTH: gl.constexpr, T: gl.constexpr):
    """A number of each query of a step."""
    return memory.rows.index(COUNT * place + NTH).reshape([T.block_q])


@gluon.jit
def across(memory, place, NTH: gl.constexpr, T: gl.constexpr):
    """`rows_of` along their axis of the scores."""
    return rows_of(memory, place, NTH, T).load(gl.SliceLayout(0, matrix_layout(T.block_q)))[None, :]


@gluon.jit
def step_keys(dk, dv, sum_desc, step, head, start, scene, W: gl.constexpr, MOVES: gl.constexpr, T: gl.constexpr):
    """Add 64 queries of a head to dk and dv of 64 keys, and the share of these to dq's sum."""
    memory, at, sizes, band, scale = scene
    BLOCK_Q: gl.constexpr = T.block_q
    COLUMNS: gl.constexpr = T.columns
    COLUMNS_V: gl.constexpr = T.columns_v
    dtype: gl.constexpr = memory.q.dtype
    own = uniform(gl.to_tensor(W))  # in every step: the operands' descriptors, found before the loop, would spill
    place, first_key = uniform(memory.queries.at(step)), at.column + W * 64
    k, tk = memory.k.index(own).reshape([64, COLUMNS]), memory.tk.index(own).reshape([64, COLUMNS])
    v, tv = memory.v.index(own).reshape([64, COLUMNS_V]), memory.tv.index(own).reshape([64, COLUMNS_V])
    q, tq = memory.q.index(place).reshape([BLOCK_Q, COLUMNS]), memory.tq.index(place).reshape([BLOCK_Q, COLUMNS])
    dout = memory.dout.index(place).reshape([BLOCK_Q, COLUMNS_V])

    memory.queries.wait(step)
    zero = starts(rows_of(memory, place, 0, T), BLOCK_Q, False)
    raw = times(k, q, zero, False)
    slope = times(tk, q, times(k, tq, zero, False), True)
    dp = times(v, dout, zero, False)
    tdp = times(tv, dout, zero, False)
    tdout = dout
    if MOVES:
        tdout = memory.dout.index(T.stages + place).reshape([BLOCK_Q, COLUMNS_V])
        tdp = times(v, tdout, tdp, True)
    masked = (start < at.full_lo) | (start >= at.full_hi)
    raw = warpgroup_mma_wait(5 if MOVES else 4, deps=[raw])
    if T.mask.any:
        if masked:
            raw = hide(raw, float("-inf"), start, first_key, sizes, band, T)
    p = gl.exp2(raw * (scale * LOG2E) - across(memory, place, 0, T))
    slope = warpgroup_mma_wait(3 if MOVES else 2, deps=[slope])
    if T.mask.any:
        if masked:
            slope = slope * across(memory, place, 4, T)  # elsewhere no query sees one key alone
    bend = slope * scale - across(memory, place, 1, T)
    weights = pack(p * bend, dtype)
    dv = warpgroup_mma(gl.convert_layout(weights, operand_layout(COLUMNS_V)), dout, dv, is_async=True)
    if MOVES:
        dv = warpgroup_mma(gl.convert_layout(pack(p, dtype), operand_layout(COLUMNS_V)), tdout, dv, is_async=True)
    dp, tdp = warpgroup_mma_wait(2 if MOVES else 1, deps=[dp, tdp])
    dp = dp - across(memory, place, 2, T)
    ds = pack(p * dp, dtype)
    tds = pack(p * (bend * dp + (tdp - across(memory, place, 3, T))), dtype)
    stored, tangents = memory.ds.index(2 * own), memory.ds.index(2 * own + 1)
    stored.store(ds)
    tangents.store(tds)
    fence_async_shared()  # the next queries' rows overwrite what was read, too
    if T.turned:
        WIDE: gl.constexpr = COLUMNS // 2
        low = columns_share(k.slice(0, WIDE, 1), tk.slice(0, WIDE, 1), stored, tangents)
        high = columns_share(k.slice(WIDE, WIDE, 1), tk.slice(WIDE, WIDE, 1), stored, tangents)
        dk = warpgroup_mma(gl.convert_layout(tds, operand_layout(COLUMNS)), q, dk, is_async=True)
        dk = warpgroup_mma(gl.convert_layout(ds, operand_layout(COLUMNS)), tq, dk, is_async=True)
        low, high = warpgroup_mma_wait(2, deps=[low, high])  # the share is written while dk's products are under way
        store_wait(0)  # the share of the step before
        memory.shares.index(2 * own).reshape([WIDE * BLOCK_Q]).store(flatten(low))
        memory.shares.index(2 * own + 1).reshape([WIDE * BLOCK_Q]).store(flatten(high))
    else:
        dk = warpgroup_mma(gl.convert_layout(tds, operand_layout(COLUMNS)), q, dk, is_async=True)
        dk = warpgroup_mma(gl.convert_layout(ds, operand_layout(COLUMNS)), tq, dk, is_async=True)
        none = gl.zeros([BLOCK_Q, COLUMNS], gl.float32, matrix_layout(COLUMNS))  # pyright: ignore[reportCallIssue]
        dq = warpgroup_mma(tangents.permute((1, 0)), k, none, use_acc=False, is_async=True)
        dq = warpgroup_mma(stored.permute((1, 0)), tk, dq, is_async=True)
        dk, dv = warpgroup_mma_wait(2, deps=[dk, dv])
        memory.queries.release(step)
        dq = warpgroup_mma_wait(0, deps=[dq])
        store_wait(0)  # the share of the step before
        memory.shares.index(own).reshape([BLOCK_Q * COLUMNS]).store(flatten(dq))
    fence_async_shared()
    ROWS: gl.constexpr = 64 * BLOCK_Q // 256
    PARTS: gl.constexpr = T.parts_dq
    part = ((at.batch * sizes.heads + head).to(gl.int64) * padded_rows(sizes.q) + start) // BLOCK_Q * PARTS
    for i in gl.static_range(PARTS):
        tma_add(sum_desc, [0, 0, ((part + i) * ROWS).to(gl.int32), 0], memory.shares.index(PARTS * own + i))
    if T.turned:
        dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
        memory.queries.release(step)
    return dk, dv


@gluon.jit
def columns_share(keys, tangents_of_keys, ds, tds):
    """Some columns of a share of dq, columns x queries, under way: of fewer queries than an instruction has rows."""
    QUERIES: gl.constexpr = ds.shape[1]
    WIDE: gl.constexpr = keys.shape[1]
    none = gl.zeros([WIDE, QUERIES], gl.float32, matrix_layout(QUERIES))  # pyright: ignore[reportCallIssue]
    dq = warpgroup_mma(keys.permute((1, 0)), tds, none, use_acc=False, is_async=True)
    return warpgroup_mma(tangents_of_keys.permute((1, 0)), ds, dq, is_async=True)


@gluon.jit(do_not_specialize=PLAIN_INTEGERS)
def attention_second(q_desc, k_desc, v_desc, tq_desc, tk_desc, tv_desc, dout_desc, tdout_desc, rows_desc, dk_desc, dv_desc,
                     sum_desc, left, right, scale, T: gl.constexpr):  # fmt: skip
    """A block a key tile: the tangents of dk and dv over all query heads of its key/value head, and a share of dq's.

    rows: (batch, heads, COUNT, queries), what is known of queries; sum as `rows.attention_dq` reads it, or where T.turned
    `attention_turned_dq`, which the tangent pass has cleared.
    """
    MOVES: gl.constexpr = tdout_desc is not None  # pyright: ignore[reportAssignmentType]
    STAGES: gl.constexpr = T.stages
    BLOCK_Q: gl.constexpr = T.block_q
    heads = q_desc.shape[1]
    sizes, band = Sizes(q_desc.shape[2], k_desc.shape[2], heads, heads // k_desc.shape[1]), (left, right)
    k = gl.allocate_shared_memory(k_desc.dtype, [2, 1, 1, 64, T.columns], k_desc.layout)
    tk = gl.allocate_shared_memory(k_desc.dtype, [2, 1, 1, 64, T.columns], tk_desc.layout)
    v = gl.allocate_shared_memory(v_desc.dtype, [2, 1, 1, 64, T.columns_v], v_desc.layout)
    tv = gl.allocate_shared_memory(v_desc.dtype, [2, 1, 1, 64, T.columns_v], tv_desc.layout)
    q = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BLOCK_Q, T.columns], q_desc.layout)
    tq = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BLOCK_Q, T.columns], tq_desc.layout)
    DOUTS: gl.constexpr = 2 * STAGES if MOVES else STAGES
    dout = gl.allocate_shared_memory(dout_desc.dtype, [DOUTS, 1, 1, BLOCK_Q, T.columns_v], dout_desc.layout)
    rows = gl.allocate_shared_memory(gl.float32, [COUNT * STAGES, 1, 1, 1, BLOCK_Q], rows_desc.layout)
    SCORES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_Q], q_desc.dtype)
    ds = gl.allocate_shared_memory(q_desc.dtype, [4, 64, BLOCK_Q], SCORES)
    shares = gl.allocate_shared_memory(gl.float32, [2 * T.parts_dq, 1, 1, 64 * BLOCK_Q // 256, 256], sum_desc.layout)
    keys, queries = make_channel(1, 0), make_channel(STAGES, 2, 1, True)
    descs = SecondDescriptors(q_desc, k_desc, v_desc, tq_desc, tk_desc, tv_desc, dout_desc, tdout_desc, rows_desc)
    memory = SecondMemory(k, tk, v, tv, q, tq, dout, rows, ds, shares, keys, queries)
    fence_async_shared()
    await_stream(False)
    gl.warp_specialize([
        (consume, (dk_desc, dv_desc, sum_desc, memory, sizes, band, scale, 0, MOVES, T)),
        (consume, (dk_desc, dv_desc, sum_desc, memory, sizes, band, scale, 1, MOVES, T)),
        (load, (descs, memory, sizes, band, T)),
    ], [4, 1], [240, 24])  # fmt: skip


@jit(do_not_specialize=PLAIN_INTEGERS)
def attention_turned_dq(sum_ptr, dq_ptr, strides, seqlen_q, heads, scale, T: tl.constexpr):
    """dq = sum * scale in its own type and order, of T.block_q queries a program; strides of dq."""
    BLOCK_Q: tl.constexpr = T.block_q
    COLUMNS: tl.constexpr = T.columns
    await_stream()
    tiles = padded_rows(seqlen_q) // BLOCK_Q
    part, head = tl.program_id(0), tl.program_id(0) // tiles
    row = part % tiles * BLOCK_Q
    value = tl.load(sum_ptr + part.to(tl.int64) * (BLOCK_Q * COLUMNS) + tl.arange(0, BLOCK_Q * COLUMNS))
    # (half, 8 queries, warp, column of 8, pair, eight of a warp, query of a pair) -> (queries, columns)
    value = tl.reshape(value, [2, BLOCK_Q // 8, COLUMNS // 32, 8, 4, 2, 2])
    value = tl.reshape(tl.permute(value, (1, 4, 6, 0, 2, 5, 3)), [BLOCK_Q, COLUMNS])
    dq = dq_ptr + head_offset(head // heads, head % heads, strides) + row_offset(row, strides)
    store_tile(dq, strides, value * scale, seqlen_q - row, T.head_dim, BLOCK_Q, COLUMNS)
