"""The warp that loads for the backward."""

from typing import Any, NamedTuple

from flashtile.kernels.device.stream import await_stream
from flashtile.kernels.sm90.backward.ds_store import brings_back
from flashtile.kernels.sm90.backward.tile_scheduler import find_ranks, flag_of, seeing, tell_step, tell_tile, walk
from flashtile.kernels.sm90.device.blank import blank_blind, blank_strips
from flashtile.kernels.sm90.device.locks import await_turn
from flashtile.kernels.sm90.device.ticket import spread, take
from flashtile.triton_glue.gluon import fence_async_shared, gl, gluon, tma_load


class BackwardDescriptors(NamedTuple):
    """What the loader reads, as the kernel has it."""

    q: Any
    k: Any
    v: Any
    dout: Any
    rows: Any
    sum: Any  # of which it clears its share
    bias: Any
    ds: Any


@gluon.jit
def load(descs, sum_ptr, counter_ptr, memory, work, T: gl.constexpr):
    """The warp that takes tickets and loads: keys and values once a tile, then queries, their rows and dout, step by step.

    Where T.tells the other roles learn tiles and steps from it. Given a sum, a pass without dk clears it meanwhile.
    """
    CLEARS: gl.constexpr = not T.outputs.dk and sum_ptr is not None  # pyright: ignore[reportAssignmentType]
    dirty, clean = gl.to_tensor(0), gl.to_tensor(0)
    if CLEARS:
        dirty, clean = share_of_sum(descs.sum)
    KEY_TILES: gl.constexpr = T.block_k // 64
    turn, step, edges, former = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    ticket, ahead = gl.program_id(0), gl.to_tensor(0)
    if T.schedule.resident and (
        T.items.ragged or T.pipeline.converts
    ):  # consumers would spill with their own numbers; `convert` waits for those taken
        ticket = spread(following(counter_ptr, T))
    elif T.schedule.resident:  # a block begins with the ticket of its own number, which travels from nowhere
        ahead = gl.num_programs(0)
    if not T.tells:
        memory.to.tickets.publish(turn, (ticket,))
    tickets, ranks = work.tiles, ()
    if T.mask.blocks_q > 0 and not T.schedule.deterministic:
        ranks = find_ranks(work, T)
        tickets = ranks.tickets
    while ticket < tickets:
        place, sizes = walk(ticket, step, ranks, work, T)
        if T.tells:  # all that others ask of a ticket is whether it is below the number of tiles
            tell_tile(memory.to.tickets, turn, gl.minimum(ticket, work.tiles - 1) if T.divided > 0 else ticket, place, sizes, T)
        BYTES: gl.constexpr = descs.k.block_type.nbytes + (descs.v.block_type.nbytes if T.outputs.dk else 0)
        bar = memory.to.keys.acquire(turn, KEY_TILES * BYTES)
        shared = place.head_kv
        if T.shares > 1:
            shared = place.head_kv // T.shares
        for i in gl.static_range(KEY_TILES):
            key = place.first_k + place.column + i * 64
            tma_load(descs.k, [place.slab, shared, key, 0], bar, memory.k.index(i))
            if T.outputs.dk:
                tma_load(descs.v, [place.slab, shared, key, 0], bar, memory.v.index(i))
        taken = tickets
        if T.schedule.resident and not T.takes_late:
            taken = following(counter_ptr, T)
        first, end = seeing(sizes.q, sizes.k, work.band[0], work.band[1], T.mask.left, T.mask.right)
        if T.schedule.interleaves:
            edges = load_group(descs, memory, first, end, place, step, edges, T)
            step = place.visits.end
        elif T.tells:
            before = place.visits.shift
            for member in range(T.group):
                head = place.head_kv * T.group + member
                steps, asked, listed = place.visited(head, work, T)
                passed = 0
                if T.divided > 0:
                    passed = gl.minimum(before, steps)
                    before -= passed
                # from 0: see CARRIED_BOUND in triton_glue/workarounds.py
                for nth in range(gl.minimum(steps - passed, place.visits.end - step)):
                    start, masked = place.visit(passed + nth, asked, listed, T)
                    edges = load_step(descs, memory, head, start, masked, first, end, place, step, edges, T)
                    if T.outputs.pairs_ds:
                        if (place.batch > 0) & brings_back(step):
                            if step - place.visits.begin < 2:  # the tile's first of these
                                await_turn(flag_of(counter_ptr, place, sizes, T), 1)
                            load_former(descs.ds, memory, head, start, place, former)
                            former = former + 2
                    if CLEARS:
                        dirty = clear(sum_ptr, dirty, gl.minimum(dirty + 8, clean))
                    step = step + 1
        else:
            while step < place.visits.end:
                head, start = place.at(step, T)
                edges = load_step(descs, memory, head, start, False, first, end, place, step, edges, T)
                if CLEARS:
                    dirty = clear(sum_ptr, dirty, gl.minimum(dirty + 8, clean))
                step = step + 1
        if T.schedule.resident and T.takes_late and not T.schedule.helps:
            taken = following(counter_ptr, T)
        if T.schedule.helps:  # who has helped takes its own tile next
            ticket = gl.where(place.visits.job > 0, ticket + work.tiles // 2, work.tiles)
        else:
            ticket = spread(taken) + ahead if T.schedule.resident else taken
        turn = turn + 1
        if not T.tells:
            memory.to.tickets.publish(turn, (ticket,))
    if T.tells:
        memory.to.tickets.publish(turn, (ticket,))
    if CLEARS:
        clear(sum_ptr, dirty, clean)


@gluon.jit
def load_group(descs, memory, first, end, place, step, edges, T: gl.constexpr):
    """Load the steps of a tile of grouped heads, all heads of the group at one place of the queries before the next place.

    Tiles that run at a time then read, and add to, the same queries at about the same time, whatever their length: under a
    right bound they begin with the last queries, which all of them see. Each begins a place with a head of its own, so that
    fewer add to one part of dq's sum at once. How many steps needed blanks, with these.
    """
    tiles, offset = place.visits.tiles, place.tile % T.group
    for nth in range(tiles):
        at = tiles - 1 - nth if T.mask.right else nth
        start = place.visits.lo + at * T.block_q
        masked = place.masked(start)
        for i in range(T.group):
            member = i + offset
            head = place.head_kv * T.group + gl.where(member >= T.group, member - T.group, member)
            nth_step = step + nth * T.group + i
            edges = load_step(descs, memory, head, start, masked, first, end, place, nth_step, edges, T)
    return edges


@gluon.jit
def share_of_sum(desc):
    """This block's part of the sum of dq, as the first and the last of its pieces of 512 numbers."""
    pieces = desc.shape[2] // 2
    each = gl.cdiv(pieces, gl.num_programs(0))
    first = gl.minimum(gl.program_id(0) * each, pieces)
    return first, gl.minimum(first + each, pieces)


@gluon.jit
def clear(ptr, piece, end):
    """Zeros for pieces of 512 numbers; the end."""
    LANES: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])  # pyright: ignore[reportAssignmentType]
    while piece < end:
        at = ptr + piece.to(gl.int64) * 512 + gl.arange(0, 512, LANES)
        gl.store(at, gl.zeros([512], gl.float32, LANES))  # pyright: ignore[reportCallIssue]
        piece = piece + 1
    return piece


@gluon.jit
def following(counter_ptr, T: gl.constexpr):
    """The next ticket, for `spread`; the pass before made the count 0."""
    if T.begins_early:
        await_stream(False)
    return take(counter_ptr)


@gluon.jit
def load_step(descs, memory, head, start, masked, first, end, place, step, edges, T: gl.constexpr):
    """Load queries, their rows and dout of a step, and blank what nobody sees; how many steps needed that, with this one."""
    blank = False
    if T.mask.predicate:
        blank = masked
    elif T.mask.blanks:
        blank = (start < first) | (start + T.block_q > end)
    if T.douts_first:
        if not blank:
            load_dout(descs.dout, memory, head, start, place, step)
    memory.to.queries.claim(step)
    if T.tells:
        tell_step(memory, step, head, start, masked, T)
    if T.mask.blanks:
        if blank:
            load_edge(descs, memory, head, start, place, step, edges, first - start, end - start, T)
            edges = edges + 1
        else:
            load_whole(descs, memory, head, start, place, step, T)
    else:
        load_whole(descs, memory, head, start, place, step, T)
    if T.modifiers.early >= 0:
        load_bias(descs.bias, memory, head, start, place, step)
    return edges


@gluon.jit
def load_bias(desc, memory, head, start, place, step):
    """Load what a modifier adds to a step's scores, for each consumer's keys."""
    bar = memory.to.biases.acquire(step, 2 * desc.block_type.nbytes)
    batch, head = gl.minimum(place.batch, desc.shape[0] - 1), gl.minimum(head, desc.shape[1] - 1)  # or one for all of them
    for i in gl.static_range(2):
        tma_load(desc, [batch, head, start, place.column + i * 64], bar, memory.bias.index(i))


@gluon.jit
def load_former(desc, memory, head, start, place, former):
    """Load what a second entry's ds of a step is added to, once the one loaded before is stored again."""
    for i in gl.static_range(2):
        bar = memory.to.formers.acquire(former + i, desc.block_type.nbytes)
        tma_load(desc, [0, head, start, place.column + i * 64], bar, memory.former.index(i))


@gluon.jit
def load_whole(descs, memory, head, start, place, step, T: gl.constexpr):
    """Load queries, their rows and dout."""
    BYTES: gl.constexpr = descs.dout.block_type.nbytes if T.pipeline.joined else 0  # pyright: ignore[reportAssignmentType]
    bar = memory.to.queries.announce(step, descs.q.block_type.nbytes + 2 * descs.rows.block_type.nbytes + BYTES)
    load_queries(descs, memory, head, start, place, step, bar, T)
    if T.pipeline.joined:
        copy_dout(descs.dout, memory, head, start, place, step, bar)
    elif not T.douts_first:
        load_dout(descs.dout, memory, head, start, place, step)


@gluon.jit
def load_dout(desc, memory, head, start, place, step):
    """Load dout, once its stage is free."""
    copy_dout(desc, memory, head, start, place, step, memory.to.douts.acquire(step, desc.block_type.nbytes))


@gluon.jit
def copy_dout(desc, memory, head, start, place, step, bar):
    """Begin to load dout, which reports to a barrier."""
    tma_load(desc, [place.slab, head, place.first_q + start, 0], bar, memory.dout.index(memory.to.douts.at(step)))


@gluon.jit
def load_queries(descs, memory, head, start, place, step, bar, T: gl.constexpr):
    """Load queries and their rows, which the pass before has made.

    Queries come first where that is not waited for yet; elsewhere consumers of unequal lengths would spill for that order.
    """
    row, place_of_rows = place.first_row + start, 2 * memory.to.queries.at(step)
    if T.begins_early:
        tma_load(descs.q, [place.slab, head, place.first_q + start, 0], bar, memory.q.index(memory.to.queries.at(step)))
        await_stream(False)
    tma_load(descs.rows, [place.slab, head, 0, row], bar, memory.rows.index(place_of_rows))
    tma_load(descs.rows, [place.slab, head, 1, row], bar, memory.rows.index(place_of_rows + 1))
    if not T.begins_early:
        tma_load(descs.q, [place.slab, head, place.first_q + start, 0], bar, memory.q.index(memory.to.queries.at(step)))


@gluon.jit
def load_edge(descs, memory, head, start, place, step, edge, first, end, T: gl.constexpr):
    """As `load_whole`, with zeros for queries outside first <= query < end: the loader waits for the tiles itself.

    They see nothing, and what lies there may be NaN; all queries are summed over for dk and dv. Where T.mask.predicate they are
    those without an lse.
    """
    if not T.pipeline.joined:
        memory.to.douts.claim(step)
    bytes_of_rows: gl.constexpr = 2 * descs.rows.block_type.nbytes
    bar = memory.to.edges.announce(edge, descs.q.block_type.nbytes + descs.dout.block_type.nbytes + bytes_of_rows)
    load_queries(descs, memory, head, start, place, step, bar, T)
    copy_dout(descs.dout, memory, head, start, place, step, bar)
    memory.to.edges.wait(edge)
    if T.mask.predicate:
        levels = memory.rows.index(2 * memory.to.queries.at(step)).reshape([T.block_q])
        blank_blind(memory.q.index(memory.to.queries.at(step)), levels, T.block_q, T.columns)
        blank_blind(memory.dout.index(memory.to.douts.at(step)), levels, T.block_q, T.columns_v)
    else:
        blank_strips(memory.q.index(memory.to.queries.at(step)), first, end, T.block_q, T.columns)
        blank_strips(memory.dout.index(memory.to.douts.at(step)), first, end, T.block_q, T.columns_v)
    fence_async_shared()
    memory.to.queries.hand_over(step)
    if not T.pipeline.joined:
        memory.to.douts.hand_over(step)
