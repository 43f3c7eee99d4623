"""The way of dq from its sum to the tensor, in the pass that adds: `rows.attention_dq` without a pass of its own."""

from flashtile.kernels.device.grid import padded_rows
from flashtile.kernels.device.memory import head_offset, row_offset
from flashtile.kernels.device.stream import await_stream
from flashtile.kernels.sm90.backward.dq_reduce import done_flag
from flashtile.kernels.sm90.device.locks import await_turn
from flashtile.kernels.sm90.device.ticket import spread, take
from flashtile.triton_glue.gluon import fence_async_shared, gl, gluon, pack, recast, role_barrier, tma_load

UNITS = gl.constexpr(2)  # which count is that of units, behind those of tickets


@gluon.jit
def convert(sum_desc, sum_ptrs, dq, batch, memory, work, T: gl.constexpr):
    """The warp that makes dq of 64 queries of a head at a time, a unit, once all of the head's key tiles have added.

    Units are taken as tickets are, in about the order in which heads are done. Who waits for a head waits for blocks that have
    begun, because every tile is of one that has taken a ticket for it.
    dq = (tensor, strides, scale).
    """
    # that there is something of: where T.cut nothing was added for columns that do not exist
    PARTS: gl.constexpr = 3 if T.cut else T.columns // T.columns_dq  # pyright: ignore[reportAssignmentType]
    ROWS: gl.constexpr = T.columns_added // 4  # of 256 elements
    sizes = work.sizes
    tiles = gl.cdiv(sizes.q, 64)
    heads = batch * sizes.heads
    reports = 2 * (work.tiles // (heads // T.group))
    await_stream(False)
    counter_ptr = sum_ptrs[1] + UNITS
    unit, use = spread(take(counter_ptr)), gl.to_tensor(0)
    while unit < tiles * heads:
        following = take(counter_ptr)
        head, row = unit // tiles, unit % tiles * 64
        await_turn(done_flag(sum_ptrs, head // T.group, T), reports)
        at = (head.to(gl.int64) * padded_rows(sizes.q) + row) // 64
        added = gl.load(sum_ptrs[2] + at * (T.columns // T.columns_dq)) != 0  # nothing was, to queries that no key tile visits
        at = at * (T.columns // T.columns_added)
        for part in range(PARTS):
            bar = memory.to.parts.announce(use, sum_desc.block_type.nbytes)
            tma_load(sum_desc, [0, 0, ((at + part) * ROWS).to(gl.int32), 0], bar, memory.part)
            memory.to.parts.wait(use)
            store_dq(memory.part, dq, head, row, part * T.columns_added, added, sizes, T)
            fence_async_shared()  # the next part overwrites what was read
            role_barrier()
            use = use + 1
        unit = spread(following)


@gluon.jit
def store_dq(part, dq, head, row, first_column, added, sizes, T: gl.constexpr):
    """dq of 64 queries of a head (of all batch entries) from `row` on, and of T.columns_added columns."""
    # eights of columns that are stored at a time
    EIGHTS: gl.constexpr = 4 if T.columns_added % 32 == 0 else 2  # pyright: ignore[reportAssignmentType]
    ACROSS: gl.constexpr = T.columns_added // (8 * EIGHTS)
    # by one or two in the code, whichever lets the consumers' loops keep their numbers in registers
    ABREAST: gl.constexpr = ACROSS if T.block_q > 64 else 1  # pyright: ignore[reportAssignmentType]
    LANES: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])  # pyright: ignore[reportAssignmentType]
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])  # pyright: ignore[reportAssignmentType]
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [32 // EIGHTS, EIGHTS], [1, 1], [1, 0])  # pyright: ignore[reportAssignmentType]
    sums = recast(part, gl.float32, [T.columns_added // 2, 128], FLAT)
    token = row + gl.arange(0, 16, gl.SliceLayout(1, ROWS))[:, None]
    column = gl.arange(0, 8 * EIGHTS, gl.SliceLayout(0, ROWS))[None, :]
    to = dq[0] + head_offset(head // sizes.heads, head % sizes.heads, dq[1]) + first_column
    # dq is addressable (`call.Pointer`), which no role's arguments tell
    to, token_at = gl.multiple_of(to, 16), gl.multiple_of(row_offset(token, dq[1]), [8, 8])
    strip_at = gl.multiple_of(row_offset(16, dq[1]), 8)
    for i in range(4 * ACROSS // ABREAST):
        for j in gl.static_range(ABREAST):
            strip, across = i * ABREAST // ACROSS, i * ABREAST % ACROSS + j
            first = across * EIGHTS * 4 + strip
            value = gl.join(eight(sums, first, added, dq, LANES), eight(sums, first + 4, added, dq, LANES))
            if EIGHTS == 4:
                others = gl.join(eight(sums, first + 8, added, dq, LANES), eight(sums, first + 12, added, dq, LANES))
                value = gl.join(value, others)
            # (row, pair, row of 8, column of a pair, lower and upper bit of the eight)
            value = value.reshape([8, 4, 2, 2, 2, EIGHTS // 2]).permute((2, 0, 5, 4, 1, 3)).reshape([16, 8 * EIGHTS])
            here = token < sizes.q - strip * 16
            if T.head_dim != T.columns:
                here = here & (first_column + across * (8 * EIGHTS) + column < T.head_dim)
            at = to + strip * strip_at + across * (8 * EIGHTS)
            gl.store(at + (token_at + column), gl.convert_layout(value, ROWS), mask=here)


@gluon.jit
def eight(sums, at, added, dq, LANES: gl.constexpr):
    """dq of 16 rows and 8 columns, which lie together in the sum: row, pair, row of 8, column of a pair (`rows.dq_tile`)."""
    return pack(gl.where(added, sums.index(at).load(LANES) * dq[2], 0.0), dq[0].dtype.element_ty)
