"""The forward's loading role: queries, keys and values of every tile, by the copy engine."""

from flashtile.kernels.device.grid import ROWS
from flashtile.kernels.sm90.device.parts import part_at
from flashtile.kernels.sm90.forward.retry import NONE, meet
from flashtile.kernels.sm90.forward.tile_scheduler import (
    job_at,
    place_at,
    place_count,
    place_of,
    sized,
    take_place,
    tell,
    tell_job,
    tile_at,
    visit,
)
from flashtile.triton_glue.gluon import gl, gluon, tma_load


@gluon.jit
def load(q_desc, k_desc, v_desc, bias_desc, dout_desc, mem, size, region, T: gl.constexpr):
    """Role: bring queries, keys and values of every tile into shared memory; with dout, unless that is None, beside queries."""
    places, place, turn, use = place_count(size), place_at(0, size, T), gl.to_tensor(0), gl.to_tensor(0)
    if T.items.ragged:
        if place >= places:
            mem.tickets.publish(turn, (place,))
    while place < places:  # negative: it is computed again
        at = job_at(place & NONE, size, region, T)
        if T.items.ragged:
            tell_job(mem.tickets, turn - (place >> 31), place & NONE, at)
            ticket = take_place(region)  # in vain where tiles are computed again
        use = load_tile(q_desc, k_desc, v_desc, bias_desc, dout_desc, mem, use, turn, at, size, region, T)
        turn = turn + 1
        before, place = place, places
        if before >= 0:
            place = place_of(ticket) if T.items.ragged else place_at(turn, size, T)
            if T.items.ragged:
                if place >= places:
                    mem.tickets.publish(turn, (place,))
        if T.softmax.watches:
            if place >= places:
                place = meet(mem.again, turn, T.pipeline.loader_warps, T)


@gluon.jit
def load_tile(q_desc, k_desc, v_desc, bias_desc, dout_desc, mem, use, turn, at, size, region, T: gl.constexpr):
    """Bring what a Job needs; `use` counts key tiles. Whoever takes dout, too, multiplies values before keys."""
    head_kv = at.head // size.group
    own = sized(size, at.item)
    seen, indices = visit(at, own, region, T)
    KEYS_FIRST: gl.constexpr = dout_desc is None  # pyright: ignore[reportAssignmentType]
    key = at.item.first_k + tile_at(indices, seen, seen.end - 1, own, T) * T.block_k
    first_v = at.item.first_k
    if T.stored.fp8 and T.items.varlen:
        first_v = (first_v // ROWS + at.item.batch) * ROWS
    fill_side(k_desc, v_desc, mem, use, at.slab, head_kv, key, KEYS_FIRST, T)
    # the last products with the old queries are done, and what was told is read, when their last keys are let go of
    if (T.pipeline.staged or T.mask.blocks_q > 0) and turn > 0:
        mem.keys.reclaim(use - 1)
    if T.mask.blocks_q > 0:  # those that wait for the queries find it
        tell(mem.job, at, T)
    load_queries(q_desc, dout_desc, mem, turn, at.slab, at.head, at.item.first_q + at.row, T)
    if T.modifiers.brought:
        fill_biases(bias_desc, mem, use, at, key, 0, T.groups, T)
    if not KEYS_FIRST:
        fill_side(k_desc, v_desc, mem, use, at.slab, head_kv, key, True, T)
        use += 1
    if not T.schedule.once:
        for n in range(seen.end - 1 - seen.first):
            key = at.item.first_k + tile_at(indices, seen, seen.end - 2 - n, own, T) * T.block_k
            if KEYS_FIRST:  # the place of the next keys is let go of before that of these values
                fill_side(k_desc, v_desc, mem, use + 1, at.slab, head_kv, key, True, T)
                if T.modifiers.brought:
                    fill_biases(bias_desc, mem, use + 1, at, key, 0, 1, T)
                value = first_v + tile_at(indices, seen, seen.end - 1 - n, own, T) * T.block_k
                fill_side(k_desc, v_desc, mem, use, at.slab, head_kv, value, False, T)
                if T.modifiers.brought:  # those for whom it lies there are half a step behind
                    fill_biases(bias_desc, mem, use + 1, at, key, 1, T.groups, T)
            else:
                fill_side(k_desc, v_desc, mem, use, at.slab, head_kv, key, False, T)
                fill_side(k_desc, v_desc, mem, use, at.slab, head_kv, key, True, T)
            use += 1
    if KEYS_FIRST:
        key = first_v + tile_at(indices, seen, seen.first, own, T) * T.block_k
        fill_side(k_desc, v_desc, mem, use, at.slab, head_kv, key, False, T)
        use += 1
    return use


@gluon.jit
def fill_side(k_desc, v_desc, mem, use, batch, head, row, KEYS: gl.constexpr, T: gl.constexpr):
    """Load a key tile, or its values."""
    if KEYS:
        fill(k_desc, mem.k, mem.keys, use, batch, head, row, T.columns, T.parts)
    elif T.stored.fp8:
        fill_turned(v_desc, mem.v, mem.values, use, batch, head, row, T.columns_v, T.parts_v)
    else:
        fill(v_desc, mem.v, mem.values, use, batch, head, row, T.columns_v, T.parts_v)


@gluon.jit
def load_queries(desc, dout_desc, mem, turn, batch, head, row, T: gl.constexpr):
    """Load the queries of every warpgroup, and their dout."""
    GROUPS: gl.constexpr = T.groups
    PARTS: gl.constexpr = T.parts
    PARTS_V: gl.constexpr = T.parts_v
    DOUTS: gl.constexpr = 0 if dout_desc is None else dout_desc.block_type.nbytes * PARTS_V  # pyright: ignore[reportAssignmentType]
    BYTES: gl.constexpr = desc.block_type.nbytes * PARTS + DOUTS
    for group in gl.static_range(GROUPS):
        use = turn * GROUPS + group
        bar = mem.queries.announce(use, BYTES) if T.pipeline.staged else mem.queries.acquire(use, BYTES)
        for part in gl.static_range(PARTS):
            tma_load(desc, [batch, head, row + group * T.rows, part * T.columns], bar, part_at(mem.q, group, part, PARTS))
        if dout_desc is not None:
            for part in gl.static_range(PARTS_V):
                place = part_at(mem.dout, group, part, PARTS_V)
                tma_load(dout_desc, [batch, head, row + group * T.rows, part * T.columns_v], bar, place)


@gluon.jit
def fill(desc, tiles, channel, use, batch, head, row, COLUMNS: gl.constexpr, PARTS: gl.constexpr):
    """Load the tile at `row`, all its parts, into its place in the ring."""
    bar = channel.acquire(use, desc.block_type.nbytes * PARTS)
    for part in gl.static_range(PARTS):
        tma_load(desc, [batch, head, row, part * COLUMNS], bar, part_at(tiles, channel.at(use), part, PARTS))


@gluon.jit
def fill_turned(desc, tiles, channel, use, batch, head, row, COLUMNS: gl.constexpr, PARTS: gl.constexpr):
    """As `fill`, of values that `values.py` has turned."""
    bar = channel.acquire(use, desc.block_type.nbytes * PARTS)
    for part in gl.static_range(PARTS):
        tma_load(desc, [batch, head, part * COLUMNS, row], bar, part_at(tiles, channel.at(use), part, PARTS))


@gluon.jit
def fill_biases(desc, mem, use, at, key, FIRST: gl.constexpr, END: gl.constexpr, T: gl.constexpr):
    """Load what T.modifiers.early adds to the scores of a key tile, for the warpgroups from FIRST to END.

    Items or heads may have one for all of them.
    """
    batch, head = gl.minimum(at.item.batch, desc.shape[0] - 1), gl.minimum(at.head, desc.shape[1] - 1)
    for group in gl.static_range(FIRST, END):
        bar = mem.biases.acquire(use * T.groups + group, desc.block_type.nbytes)
        tma_load(desc, [batch, head, at.row + group * T.rows, key], bar, mem.bias.index(group))
